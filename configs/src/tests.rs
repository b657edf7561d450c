//! Recipes as a whole: what loads, what is filled in, and what every key changes.
#![allow(clippy::unwrap_used)]

mod faults;
mod hardware;

use std::collections::BTreeSet;
use std::fs;
use std::path::{Path, PathBuf};

use super::*;

const MINIMAL: &str = r#"name = "small"

[target]
model = "HuggingFaceTB/SmolLM2-135M-Instruct"

[drafter]
init = "model.gguf"
block_size = 8
mask_token = 16

[data]
prompts = ["prompts.jsonl"]

[train]
steps = 65
batch_responses = 4
"#;

/// A folder with the files that the recipes of these tests name.
struct Folder {
    _guard: tempfile::TempDir,
    path: PathBuf,
}

impl Folder {
    fn new() -> Self {
        let guard = tempfile::tempdir().unwrap();
        let path = guard.path().canonicalize().unwrap();
        let folder = Self { _guard: guard, path };
        for file in ["model.gguf", "prompts.jsonl", "part-2.jsonl", "part-1.jsonl", "gsm8k.jsonl"] {
            folder.write(file, "");
        }
        folder
    }

    fn write(&self, file: &str, text: &str) -> PathBuf {
        let path = self.path.join(file);
        fs::create_dir_all(path.parent().unwrap()).unwrap();
        fs::write(&path, text).unwrap();
        path
    }

    fn load(&self, text: &str, overrides: &[&str]) -> Result<Recipe, RecipeError> {
        let overrides: Vec<String> = overrides.iter().map(|text| text.to_string()).collect();
        load(&self.write("recipe.toml", text), &overrides)
    }

    /// What is said about a faulty recipe, without the folder's own path.
    fn message(&self, text: &str, overrides: &[&str]) -> String {
        let error = self.load(text, overrides).expect_err("this recipe is faulty");
        error.to_string().replace(&format!("{}/", self.path.display()), "")
    }

    /// What is said when the lines of the minimal recipe that start like `line` are replaced by it.
    fn message_with(&self, line: &str) -> String {
        let key = line.split('=').next().unwrap();
        assert!(MINIMAL.lines().any(|other| other.starts_with(key)), "{key}");
        let replaced = |other: &str| if other.starts_with(key) { line.to_string() } else { other.to_string() };
        self.message(&MINIMAL.lines().map(replaced).collect::<Vec<_>>().join("\n"), &[])
    }
}

#[test]
fn defaults_complete_a_minimal_recipe() {
    let folder = Folder::new();
    let recipe = folder.load(MINIMAL, &[]).unwrap();
    let file = folder.path.join("recipe.toml");
    let text = |name: &str| String::from(name);
    let expected = Recipe {
        name: text("small"),
        seed: 0,
        target: Target {
            model: text("HuggingFaceTB/SmolLM2-135M-Instruct"),
            revision: text("main"),
            dtype: Dtype::Auto,
            thinking: false,
        },
        drafter: Drafter {
            kind: DrafterKind::D3d,
            init: folder.path.join("model.gguf").to_str().unwrap().to_string(),
            layers: None,
            keep_layers: None,
            from_scratch: false,
            block_size: 8,
            dtype: Dtype::Auto,
            labels: Labels::InPlace,
            anchor_sees: AnchorSees::Block,
            mask_token: 16,
            untie_head: false,
        },
        data: Data {
            prompts: vec![folder.path.join("prompts.jsonl")],
            max_tokens: 4096,
            holdout: 0.01,
            limit: None,
            max_rejected: 1.0,
            truncated: Truncated::Keep,
        },
        regenerate: Regenerate {
            engine: Engine::Builtin,
            endpoints: Vec::new(),
            server_model: None,
            concurrency: 32,
            timeout: 600,
            retries: 5,
            temperature: 0.0,
            top_p: 1.0,
            top_k: 0,
            max_new_tokens: 2048,
            batch_rows: None,
        },
        train: Train {
            anchors: 128,
            gamma: 4.0,
            ar_weight: 1.0,
            objective: Objective::Tokens,
            position_weights: PositionWeights::Exponential,
            pace_alpha: 0.5,
            learning_rate: 2e-5,
            mask_learning_rate: 2e-5,
            steps: 65,
            batch_responses: Some(4),
            batch_tokens: None,
            forward_rows: 8192,
            schedule: Schedule::Cosine,
            warmup: 0.04,
            decay: 0.2,
            minimum_learning_rate: 0.1,
            weight_decay: 0.0,
            beta1: 0.9,
            beta2: 0.95,
            clip: 1.0,
            chunk_rows: 256,
            recompute: true,
            save_every: 7,
            evaluate_every: 7,
            evaluate_responses: 64,
            keep_last: 2,
        },
        prune: Prune {
            remove: Some(0),
            min_layers: 1,
            keep_tau: Some(0.99),
            stop: Stop::Tau,
            swap: false,
            recovery_steps: 10_000,
            learning_rate: 2e-5 / 5.0,
            ar_weight: 1.0,
            margin: 0.5,
            temperature: 1.0,
            criterion: Criterion::Tau,
            responses: 64,
            anchors: 16,
        },
        evaluate: Evaluate {
            benchmarks: vec![],
            benchmark_folder: None,
            decoders: vec![Decoder::Autoregressive, Decoder::Lockstep, Decoder::Asynchronous],
            fan_out: FanOut::Rectangle,
            positions: 11,
            candidates: 2,
            budget: None,
            concurrency: 1,
            limit: None,
            every: None,
            max_new_tokens: 2048,
            temperature: 0.0,
            top_p: 1.0,
            top_k: 0,
            hardware: vec![],
            drafts: Drafts::Point,
        },
        devices: Devices { target: text("cpu"), drafter: text("cpu"), timeout: 600 },
        file,
    };
    assert_eq!(recipe, expected);
}

#[test]
fn defaults_follow_other_values() {
    let folder = Folder::new();
    for (block_size, gamma) in [(2, 4.0), (9, 4.0), (10, 5.0), (15, 5.0), (16, 7.0), (32, 7.0)] {
        let recipe = folder.load(MINIMAL, &[&format!("drafter.block_size={block_size}")]).unwrap();
        assert_eq!(recipe.train.gamma, gamma, "block {block_size}");
    }
    let recipe = folder.load(MINIMAL, &["train.learning_rate=1e-3", "train.ar_weight=0.25"]).unwrap();
    assert_eq!((recipe.prune.learning_rate, recipe.prune.ar_weight), (1e-3 / 5.0, 0.25));
    assert_eq!(folder.load(&format!("{MINIMAL}[prune]"), &[]).unwrap().prune.remove, None);
    assert_eq!(folder.load(MINIMAL, &["prune.keep_tau=0.9"]).unwrap().prune.remove, None);
    let keep_tau = |overrides: &[&str]| folder.load(MINIMAL, overrides).unwrap().prune.keep_tau;
    assert_eq!(keep_tau(&["prune.stop=tau"]), Some(0.99));
    assert_eq!(keep_tau(&["prune.stop=speed"]), None, "a faster drafter may draft worse");
    assert_eq!(keep_tau(&["prune.stop=speed", "prune.keep_tau=0.8"]), Some(0.8));
}

#[test]
fn every_key_changes_the_recipe() {
    let folder = Folder::new();
    // One valid value for each key, other than what the minimal recipe or a default gives it.
    let values = r#"
        name="other" seed=7
        target.model="Qwen/Qwen3-8B" target.revision="v2" target.dtype="f32" target.thinking=true
        drafter.init="Qwen/Qwen3-0.6B" drafter.layers=[0,2] drafter.keep_layers=3 drafter.from_scratch=true drafter.block_size=16 drafter.dtype="bf16"
        drafter.labels="next" drafter.anchor_sees="prefix" drafter.mask_token=17 drafter.untie_head=true
        data.prompts=["part-*.jsonl"] data.max_tokens=256 data.holdout=0 data.limit=5 data.max_rejected=0.5 data.truncated="drop"
        regenerate.temperature=0.7 regenerate.top_p=0.8 regenerate.top_k=20 regenerate.max_new_tokens=96 regenerate.batch_rows=8
        regenerate.concurrency=4 regenerate.timeout=30 regenerate.retries=2
        train.anchors=16 train.gamma=3.5 train.ar_weight=0.5 train.objective="target" train.position_weights="d_pace"
        train.pace_alpha=0.3 train.batch_tokens=4096 train.forward_rows=64 train.schedule="wsd" train.decay=0.1 train.learning_rate=1e-4
        train.mask_learning_rate=1e-2 train.steps=66 train.batch_responses=5 train.warmup=0.1 train.minimum_learning_rate=0
        train.weight_decay=0.01 train.beta1=0.8 train.beta2=0.99 train.clip=2 train.chunk_rows=128 train.recompute=false
        train.save_every=20 train.evaluate_every=30 train.evaluate_responses=8 train.keep_last=3
        prune.remove=2 prune.min_layers=4 prune.keep_tau=0.9 prune.recovery_steps=5 prune.learning_rate=1e-3 prune.ar_weight=0
        prune.margin=1 prune.temperature=2 prune.criterion="block_influence" prune.stop="speed" prune.swap=true prune.responses=3 prune.anchors=2
        evaluate.benchmarks=["gsm8k.jsonl"] evaluate.benchmark_folder="." evaluate.decoders=["lockstep"] evaluate.positions=7 evaluate.candidates=1
        evaluate.fan_out="best_first" evaluate.concurrency=4
        evaluate.limit=8 evaluate.max_new_tokens=64 evaluate.temperature=1 evaluate.top_p=0.5 evaluate.top_k=3
        evaluate.hardware=["h100-graphs-8b-8b"]
        devices.target="cuda:0" devices.drafter="cuda:1" devices.timeout=30
    "#;
    let assignments: Vec<(&str, &str)> = values.split_whitespace().map(|pair| pair.split_once('=').unwrap()).collect();

    let mut given: BTreeSet<String> = assignments.iter().map(|(key, _)| key.to_string()).collect();
    // These have one valid value, or none of their own.
    given.extend(["extends", "drafter.kind"].map(String::from));
    // These ask for another, which is tried below.
    given.extend(["evaluate.every", "evaluate.drafts", "evaluate.budget"].map(String::from));
    given.extend(["regenerate.engine", "regenerate.endpoints", "regenerate.server_model"].map(String::from));
    assert_eq!(given, typed::Recipe::key_paths().into_iter().collect(), "this test names every key");

    // With the section present from the start, a key of [prune] cannot change the recipe by its presence alone.
    let text = format!("{MINIMAL}\n[prune]\n");
    let before = folder.load(&text, &[]).unwrap();
    for (key, value) in assignments {
        let (section, name) = key.split_once('.').unwrap_or(("", key));
        let layer = folder.write(
            "changed.toml",
            &if section.is_empty() {
                format!("extends = \"recipe.toml\"\n{name} = {value}\n")
            } else {
                format!("extends = \"recipe.toml\"\n[{section}]\n{name} = {value}\n")
            },
        );
        let after = load(&layer, &[]).unwrap();
        let changed: Vec<String> =
            flattened(&after).into_iter().filter(|pair| !flattened(&before).contains(pair)).map(|pair| pair.0).collect();
        assert!(changed.contains(&key.to_string()), "{key} = {value} changes {changed:?}");
        // Defaults follow other values.
        let expected = match key {
            "train.learning_rate" => 3,
            "drafter.block_size" | "train.ar_weight" | "evaluate.fan_out" => 2,
            _ => 1,
        };
        assert_eq!(changed.len(), expected, "{key} = {value} changes {changed:?}");
    }
}

#[test]
fn checkpoints_are_scored_while_training_only_on_something() {
    let folder = Folder::new();
    let text = format!("{MINIMAL}[evaluate]\nevery = 100\n");
    assert!(folder.message(&text, &[]).contains("`evaluate.every` scores checkpoints, but `evaluate.benchmarks` names nothing"));
    let recipe = folder.load(&format!("{text}benchmarks = [\"gsm8k.jsonl\"]\n"), &[]).unwrap();
    assert_eq!(recipe.evaluate.every, Some(100));
}

#[test]
fn a_budget_is_blocks_or_automatic_or_a_time_and_not_for_rectangles() {
    let folder = Folder::new();
    let budget = |overrides: &[&str]| folder.load(MINIMAL, overrides).unwrap().evaluate.budget;
    assert_eq!(budget(&[]), None);
    assert_eq!(budget(&["evaluate.fan_out=best_first"]), Some(Budget::Blocks(24)));
    for (written, expected) in [
        ("9", Budget::Blocks(9)),
        ("auto", Budget::Auto),
        ("\"auto\"", Budget::Auto),
        ("8 ms", Budget::Milliseconds(8.0)),
        ("\"0.25ms\"", Budget::Milliseconds(0.25)),
    ] {
        let setting = format!("evaluate.budget={written}");
        assert_eq!(budget(&["evaluate.fan_out=geometric", &setting]), Some(expected), "{written}");
    }
    // A fan-out that a later source writes over the one that the budget belongs to.
    assert_eq!(budget(&["evaluate.fan_out=best_first", "evaluate.budget=9", "evaluate.fan_out=rectangle"]), None);
    assert_eq!(
        budget(&["evaluate.fan_out=best_first", "evaluate.budget=9", "evaluate.fan_out=geometric"]),
        Some(Budget::Blocks(9))
    );
    assert_eq!(
        folder.message(&format!("{MINIMAL}[evaluate]\nbudget = 9\nfan_out = \"rectangle\""), &[]),
        "recipe.toml:18:10: `evaluate.budget` cannot stand beside `evaluate.fan_out = \"rectangle\"`, whose size is `evaluate.positions` \
         and `evaluate.candidates`; leave it out or choose `best_first` or `geometric`\n18 | budget = 9\n   |          ^"
    );
}

#[test]
fn servers_are_named_for_the_engine_that_asks_them() {
    let folder = Folder::new();
    let server = "[regenerate]\nengine = \"server\"\n";
    let text = format!("{MINIMAL}{server}endpoints = [\"http://a:1\"]\nserver_model = \"m\"\n");
    let regenerate = folder.load(&text, &[]).unwrap().regenerate;
    assert_eq!(regenerate.engine, Engine::Server);
    assert_eq!((regenerate.endpoints, regenerate.server_model), (vec!["http://a:1".to_string()], Some("m".to_string())));
    // A later source that goes back to the built-in engine needs no servers.
    let regenerate = folder.load(&text, &["regenerate.engine=builtin"]).unwrap().regenerate;
    assert_eq!((regenerate.engine, regenerate.endpoints, regenerate.server_model), (Engine::Builtin, Vec::new(), None));

    let message = folder.message(&format!("{MINIMAL}{server}"), &[]);
    assert!(message.starts_with("recipe.toml:18:10: `regenerate.endpoints` must name at least one server"), "{message}");
    let endpoints = |list: &str| folder.message(&format!("{MINIMAL}{server}endpoints = {list}\n"), &[]);
    assert!(endpoints("[]").contains("19:13: `regenerate.endpoints` must name at least one"), "{}", endpoints("[]"));
    let message = endpoints("[\"http://a:1\", \"localhost:8000\"]");
    assert!(message.contains("19:28: `regenerate.endpoints` has `localhost:8000`, which is not an address"), "{message}");
    let message = endpoints("[\"http://a:1\", \"http://a:1\"]");
    assert!(message.contains("names `http://a:1` twice; raise `regenerate.concurrency`"), "{message}");
    for setting in ["endpoints = [\"http://a:1\"]", "server_model = \"m\""] {
        let message = folder.message(&format!("{MINIMAL}[regenerate]\n{setting}\n"), &[]);
        assert!(message.contains("is for servers: set `regenerate.engine = \"server\"`"), "{message}");
    }
}

#[test]
fn drafts_are_sampled_only_above_temperature_zero() {
    let folder = Folder::new();
    for temperature in ["", "temperature = 0.0\n"] {
        let message = folder.message(&format!("{MINIMAL}[evaluate]\n{temperature}drafts = \"sampled\"\n"), &[]);
        assert!(message.contains("`evaluate.drafts` cannot be `sampled` while `evaluate.temperature` is 0"), "{message}");
        assert!(message.contains("recipe.toml:") && message.contains("drafts = \"sampled\""), "{message}");
    }
    let message = folder.message(MINIMAL, &["evaluate.drafts=greedy", "evaluate.temperature=1"]);
    assert!(message.contains("`evaluate.drafts` must be one of `point`, `sampled`, not `greedy`"), "{message}");
    let drafts = |overrides: &[&str]| folder.load(MINIMAL, overrides).unwrap().evaluate.drafts;
    assert_eq!(drafts(&["evaluate.drafts=sampled", "evaluate.temperature=0.7"]), Drafts::Sampled);
    assert_eq!(drafts(&["evaluate.drafts=point"]), Drafts::Point);
}

#[test]
fn a_later_batch_size_replaces_an_earlier_one_by_either_key() {
    let folder = Folder::new();
    let sizes = |overrides: &[&str]| {
        let train = folder.load(MINIMAL, overrides).unwrap().train;
        (train.batch_responses, train.batch_tokens)
    };
    assert_eq!(sizes(&[]), (Some(4), None));
    assert_eq!(sizes(&["train.batch_tokens=4096"]), (None, Some(4096)));
    assert_eq!(sizes(&["train.batch_tokens=4096", "train.batch_responses=3"]), (Some(3), None));
    let both = MINIMAL.replace("batch_responses = 4", "batch_responses = 4\nbatch_tokens = 100");
    assert!(folder.message(&both, &[]).contains("cannot stand beside `train.batch_responses`; keep one of them"));
}

#[test]
fn an_automatic_dtype_is_what_the_run_had_else_what_is_chosen_for_the_device() {
    let folder = Folder::new();
    let begun = |stored: &str, overrides: &[&str]| {
        let mut recipe = folder.load(MINIMAL, overrides).unwrap();
        recipe.settle_dtypes(stored, |device| if device == "cpu" { Dtype::F32 } else { Dtype::Bf16 });
        (recipe.target.dtype, recipe.drafter.dtype)
    };
    assert_eq!(begun("", &["devices.drafter=cuda:0"]), (Dtype::F32, Dtype::Bf16));
    let stored = "[target]\ndtype = \"bf16\"\n[drafter]\ndtype = \"bf16\"\n";
    assert_eq!(begun(stored, &[]), (Dtype::Bf16, Dtype::Bf16));
    assert_eq!(begun(stored, &["drafter.dtype=f32"]), (Dtype::Bf16, Dtype::F32));
    assert_eq!(begun("not TOML", &[]), (Dtype::F32, Dtype::F32));
}

/// Every field of a recipe as (key path, value).
fn flattened(recipe: &Recipe) -> Vec<(String, String)> {
    let names = "name seed target drafter data regenerate train prune evaluate devices";
    names.split(' ').flat_map(|name| recipe.section(name)).collect()
}

#[test]
fn resolved_recipe_loads_back_equal() {
    let folder = Folder::new();
    let elsewhere = Folder::new();
    let rich = ["drafter.layers=[0, 3, 5]", "data.prompts=[\"/dev/null\"]", "prune.margin=0.1", "train.learning_rate=3e-7"];
    let absolute = format!("evaluate.benchmarks=[\"{}/part-1.jsonl\", \"gsm8k\"]", folder.path.display());
    let copies = format!("evaluate.benchmark_folder={}", folder.path.display());
    let long = [&rich[2..], &[absolute.as_str(), copies.as_str()], &["prune.remove=3", "target.dtype=bf16"]].concat();
    for overrides in [
        vec![],
        rich[..1].to_vec(),
        long,
        vec!["evaluate.fan_out=best_first"],
        vec!["evaluate.fan_out=geometric", "evaluate.budget=auto"],
        vec!["regenerate.engine=server", "regenerate.endpoints=[\"http://a:1\", \"https://b/v1\"]", "regenerate.server_model=m"],
        vec!["evaluate.fan_out=geometric", "evaluate.budget=2.5 ms"],
    ] {
        let recipe = folder.load(MINIMAL, &overrides).unwrap();
        let resolved = recipe.to_toml();
        let loaded = elsewhere.load(&resolved, &[]).unwrap();
        assert_eq!(Recipe { file: recipe.file.clone(), ..loaded }, recipe, "{resolved}");
    }
    let keys: BTreeSet<String> = flattened(&folder.load(MINIMAL, &[]).unwrap()).into_iter().map(|pair| pair.0).collect();
    for key in typed::Recipe::key_paths() {
        let is_absent = [
            "extends",
            "regenerate.server_model",
            "regenerate.batch_rows",
            "drafter.layers",
            "drafter.keep_layers",
            "data.limit",
            "train.batch_tokens",
            "evaluate.budget",
            "evaluate.benchmark_folder",
            "evaluate.limit",
            "evaluate.every",
        ];
        assert_ne!(keys.contains(&key), is_absent.contains(&key.as_str()), "{key}");
    }
}

#[test]
fn section_lists_its_fields() {
    let recipe = Folder::new().load(MINIMAL, &["devices.drafter=cuda:3"]).unwrap();
    let pair = |key: &str, value: &str| (key.to_string(), value.to_string());
    let devices = [("target", "\"cpu\""), ("drafter", "\"cuda:3\""), ("timeout", "600")];
    assert_eq!(recipe.section("devices"), devices.map(|(key, value)| pair(&format!("devices.{key}"), value)));
    assert_eq!(recipe.section("name"), [pair("name", "\"small\"")]);
    assert_eq!(recipe.section("train")[0], pair("train.anchors", "128"));
    assert_eq!(recipe.section("nothing"), []);
}

#[test]
fn every_shipped_recipe_loads() {
    let root = Path::new(env!("CARGO_MANIFEST_DIR")).join("..");
    assert!(root.join(".models/SmolLM2-135M-Instruct.Q4_1.gguf").exists(), "run `make setup` first");
    let mut names = Vec::new();
    for entry in fs::read_dir(root.join("recipes")).unwrap() {
        let path = entry.unwrap().path();
        if path.extension().is_some_and(|extension| extension == "toml") {
            let recipe = load(&path, &[]).unwrap_or_else(|error| panic!("{error}"));
            names.push(recipe.name);
        }
    }
    assert!(names.contains(&String::from("quickstart")), "{names:?}");
}

#[test]
fn paths_start_from_the_file_that_names_them() {
    let folder = Folder::new();
    folder.write("base/prompts.jsonl", "");
    folder.write("base/local/config.json", "");
    folder.write("base/base.toml", &MINIMAL.replace("model.gguf", "local"));
    let recipe = folder.load("extends = \"base/base.toml\"\n[evaluate]\nbenchmarks = [\"./gsm8k.jsonl\"]", &[]).unwrap();
    assert_eq!(recipe.drafter.init, folder.path.join("base/local").to_str().unwrap());
    assert_eq!(recipe.data.prompts, [folder.path.join("base/prompts.jsonl")]);
    assert_eq!(
        recipe.evaluate.benchmarks,
        [Benchmark { name: "gsm8k".into(), path: folder.path.join("gsm8k.jsonl"), preset: None }]
    );
    let text = MINIMAL.replace("[\"prompts.jsonl\"]", "[\"prompts.jsonl\", \"p*.jsonl\", \"../*/part-1.jsonl\"]");
    assert!(folder.load(&text, &[]).is_err(), "`*` stands in file names only");
    let recipe =
        folder.load(&text.replace("*/", &format!("{}/", folder.path.file_name().unwrap().to_str().unwrap())), &[]).unwrap();
    let names = ["prompts.jsonl", "part-1.jsonl", "part-2.jsonl"];
    assert_eq!(recipe.data.prompts, names.map(|name| folder.path.join(name)));
}

#[test]
fn a_known_name_is_the_preset_and_its_copy_lies_in_the_folder() {
    let folder = Folder::new();
    // A file of that name changes nothing; its path does.
    folder.write("gsm8k", "");
    folder.write("copies/gsm8k.jsonl", "");
    let text = format!("{MINIMAL}[evaluate]\nbenchmark_folder = \"copies\"\nbenchmarks = [\"gsm8k\", \"part-1.jsonl\"]\n");
    let evaluate = folder.load(&text, &[]).unwrap().evaluate;
    assert_eq!(evaluate.benchmark_folder, Some(folder.path.join("copies")));
    let preset = benchmarks::preset("gsm8k");
    assert!(preset.is_some());
    assert_eq!(
        evaluate.benchmarks,
        [
            Benchmark { name: "gsm8k".into(), path: folder.path.join("copies/gsm8k.jsonl"), preset },
            Benchmark { name: "part-1".into(), path: folder.path.join("part-1.jsonl"), preset: None },
        ]
    );
    assert_eq!(Some(evaluate.max_new_tokens), preset.map(|preset| preset.max_new_tokens));
    let resolved = folder.load(&text, &[]).unwrap().to_toml();
    assert!(resolved.contains("benchmarks = [\"gsm8k\", \"/"), "{resolved}");
    let own = folder.load(&text.replace("\"gsm8k\"", "\"./gsm8k\""), &[]).unwrap().evaluate.benchmarks.remove(0);
    assert_eq!(own, Benchmark { name: "gsm8k".into(), path: folder.path.join("gsm8k"), preset: None });
}

#[test]
fn later_sources_win() {
    let folder = Folder::new();
    folder.write("first.toml", MINIMAL);
    folder.write("second.toml", "extends = \"first.toml\"\nseed = 2\n[train]\nsteps = 200\nanchors = 2");
    let text = "extends = \"second.toml\"\n[train]\nanchors = 3";
    let recipe = folder
        .load(text, &["train.gamma=1", "train.gamma = 2.5", "target.revision=a-branch", "devices.target = cuda:0"])
        .unwrap();
    assert_eq!((recipe.name.as_str(), recipe.seed, recipe.train.steps), ("small", 2, 200));
    assert_eq!((recipe.train.anchors, recipe.train.gamma, recipe.train.batch_responses), (3, 2.5, Some(4)));
    assert_eq!((recipe.target.revision.as_str(), recipe.devices.target.as_str()), ("a-branch", "cuda:0"));
}
