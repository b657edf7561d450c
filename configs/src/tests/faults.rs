//! What is said about each kind of faulty recipe, word for word.

use super::*;

#[test]
fn unknown_keys_are_pointed_at() {
    let folder = Folder::new();
    assert_eq!(
        folder.message(&format!("{MINIMAL}  anchorz = 3 # many\n"), &[]),
        "recipe.toml:17:3: unknown key `train.anchorz`; nearest valid key: `anchors`\n\
         17 |   anchorz = 3 # many\n   \
            |   ^^^^^^^"
    );
    assert_eq!(
        folder.message("[trian]\nsteps = 3", &[]),
        "recipe.toml:1:2: unknown key `trian`; nearest valid key: `train`\n1 | [trian]\n  |  ^^^^^"
    );
    assert_eq!(
        folder.message(MINIMAL, &["devices.gpu=1"]),
        "--set devices.gpu=1: unknown key `devices.gpu`; valid keys: `target`, `drafter`, `timeout`\n  | devices.gpu=1\n  |         ^^^"
    );
    folder.write("base.toml", "naem = \"x\"");
    assert_eq!(
        folder.message("extends = \"base.toml\"", &[]),
        "base.toml:1:1: unknown key `naem`; nearest valid key: `name`\n1 | naem = \"x\"\n  | ^^^^"
    );
}

#[test]
fn wrong_types_are_named() {
    let folder = Folder::new();
    assert_eq!(
        folder.message_with("steps = \"many\""),
        "recipe.toml:15:9: `train.steps` must be a whole number from 0 to 1000000000, not the string `\"many\"`\n\
         15 | steps = \"many\"\n   |         ^^^^^^"
    );
    for (line, says) in [
        ("steps = -1", "`train.steps` must be a whole number from 0 to 1000000000, not the integer `-1`"),
        ("steps = 1.5", "`train.steps` must be a whole number from 0 to 1000000000, not the float `1.5`"),
        (
            "mask_token = 4294967296",
            "`drafter.mask_token` must be a whole number from 0 to 4294967295, not the integer `4294967296`",
        ),
        ("prompts = \"a.jsonl\"", "`data.prompts` must be a list of strings, not the string `\"a.jsonl\"`"),
        ("prompts = [1]", "`data.prompts` must be a list of strings, not the array `[1]`"),
        ("name = true", "`name` must be a string, not the boolean `true`"),
    ] {
        let message = folder.message_with(line);
        assert!(message.lines().next().unwrap().ends_with(says), "{message}");
    }
    assert_eq!(
        folder.message("train = 5", &[]),
        "recipe.toml:1:9: `train` must be a table of keys, not the integer `5`\n1 | train = 5\n  |         ^"
    );
    assert_eq!(
        folder.message(MINIMAL, &["train.gamma=inf"]),
        "--set train.gamma=inf: `train.gamma` must be a finite number, not the float `inf`\n  | train.gamma=inf\n  |             ^^^"
    );
    assert_eq!(
        folder.message(MINIMAL, &["target.thinking=yes"]).lines().next(),
        Some("--set target.thinking=yes: `target.thinking` must be `true` or `false`, not the string `\"yes\"`")
    );
}

#[test]
fn missing_keys_are_asked_for() {
    let folder = Folder::new();
    assert_eq!(
        folder.message(&MINIMAL.replace("steps = 65\n", ""), &[]),
        "recipe.toml:14:1: missing key `train.steps`; add `steps = …` under `[train]`, a whole number from 0 to 1000000000\n\
         14 | [train]\n   | ^^^^^^^"
    );
    assert_eq!(folder.message("", &[]), "recipe.toml: missing key `name`; add `name = …` at the top, a string");
    assert_eq!(
        folder.message("name = \"x\"", &["drafter.keep_layers=2"]),
        "recipe.toml: missing key `drafter.block_size`; add `block_size = …` under `[drafter]`, a whole number from 0 to 1000000000"
    );
    // Of several files with the section, the last one is the place to add the key.
    folder.write("base.toml", &MINIMAL.replace("steps = 65\n", ""));
    let message = folder.message("extends = \"base.toml\"\n[train]\n", &["train.gamma=1"]);
    assert!(message.starts_with("recipe.toml:2:1: missing key `train.steps`"), "{message}");
    for key in ["name", "model", "init", "block_size", "mask_token", "prompts", "steps", "batch_responses"] {
        let lines: Vec<&str> = MINIMAL.lines().filter(|line| !line.starts_with(&format!("{key} ="))).collect();
        let message = folder.message(&lines.join("\n"), &[]);
        assert!(message.contains("missing key `") && message.contains(&format!("{key}`; add `{key} = …`")), "{message}");
    }
}

#[test]
fn impossible_values_are_refused() {
    let folder = Folder::new();
    assert_eq!(
        folder.message_with("block_size = 1"),
        "recipe.toml:8:14: `drafter.block_size` must be at least 2, an anchor and a mask, and at most 1024, not `1`\n\
         8 | block_size = 1\n  |              ^"
    );
    for (setting, says) in [
        ("name=", "must be letters, digits, `-`, `_` and `.`, the first not a `.`"),
        ("name=a/b", "must be letters, digits, `-`, `_` and `.`, the first not a `.`"),
        ("name=..", "must be letters, digits, `-`, `_` and `.`, the first not a `.`"),
        ("target.dtype=f16", "must be one of `auto`, `f32`, `bf16`, not `f16`"),
        ("drafter.kind=dflash", "`dflash` is not supported yet; supported: `d3d`"),
        ("drafter.labels=before", "must be one of `in_place`, `next`, not `before`"),
        ("drafter.layers=[]", "must name at least one layer; leave it out to keep all"),
        ("drafter.layers=[0, 2, 2]", "must ascend without repeats, but 2 follows 2"),
        ("drafter.layers=[3, 1]", "must ascend without repeats, but 1 follows 3"),
        ("drafter.keep_layers=0", "must be at least 1, not `0`"),
        ("data.prompts=[]", "must name at least one file"),
        (
            "data.prompts=[\"hf://datasets/a/b.parquet\"]",
            "cannot fetch `hf://datasets/a/b.parquet` yet; download it and give the path of the file",
        ),
        ("data.max_tokens=1", "must be at least 2, a token and the one that it predicts, not `1`"),
        ("data.holdout=1", "must be at least 0 and less than 1, not `1`"),
        ("data.holdout=-0.1", "must be at least 0 and less than 1, not `-0.1`"),
        ("data.limit=0", "must be at least 1, not `0`"),
        ("regenerate.engine=vllm", "must be one of `builtin`, `server`, not `vllm`"),
        ("regenerate.concurrency=0", "must be at least 1, not `0`"),
        ("regenerate.timeout=0", "must be at least 1, not `0`"),
        ("regenerate.temperature=-1", "must be 0, which takes the likeliest token, or at least 0.001, not `-1`"),
        ("evaluate.temperature=0.0001", "must be 0, which takes the likeliest token, or at least 0.001, not `0.0001`"),
        ("drafter.block_size=1025", "must be at least 2, an anchor and a mask, and at most 1024, not `1025`"),
        (
            "evaluate.candidates=86",
            "times `evaluate.positions` makes more than 1024 blocks, full acceptance included; give fewer",
        ),
        ("regenerate.top_p=0", "must be greater than 0 and at most 1, not `0`"),
        ("regenerate.top_p=1.5", "must be greater than 0 and at most 1, not `1.5`"),
        ("regenerate.batch_rows=0", "must be at least 1, not `0`"),
        ("train.anchors=0", "must be at least 1, not `0`"),
        ("train.gamma=0", "must be greater than 0, not `0`"),
        ("train.ar_weight=-0.5", "must be at least 0, not `-0.5`"),
        ("train.learning_rate=0.0", "must be greater than 0, not `0`"),
        ("train.steps=0", "must be at least 1, not `0`"),
        ("train.batch_responses=0", "must be at least 1, not `0`"),
        ("train.forward_rows=0", "must be at least 1, not `0`"),
        ("train.schedule=exponential", "must be one of `constant`, `linear`, `cosine`, `wsd`, not `exponential`"),
        ("train.decay=2", "must be from 0 to 1, not `2`"),
        ("train.objective=kl", "must be one of `tokens`, `target`, `target_variation`, not `kl`"),
        ("train.position_weights=pace", "must be one of `exponential`, `d_pace`, not `pace`"),
        ("train.pace_alpha=-1", "must be from 0 to 1, not `-1`"),
        ("devices.timeout=0", "must be at least 1, not `0`"),
        ("train.warmup=1.01", "must be from 0 to 1, not `1.01`"),
        ("train.minimum_learning_rate=-1", "must be from 0 to 1, not `-1`"),
        ("train.beta1=1", "must be at least 0 and less than 1, not `1`"),
        ("train.clip=0", "must be greater than 0, not `0`"),
        ("prune.min_layers=0", "must be at least 1, not `0`"),
        ("prune.keep_tau=0", "must be greater than 0 and at most 1, not `0`"),
        ("prune.temperature=0", "must be greater than 0, not `0`"),
        ("evaluate.positions=0", "must be at least 1, not `0`"),
        ("evaluate.candidates=0", "must be at least 1, not `0`"),
        ("evaluate.fan_out=tree", "must be one of `rectangle`, `best_first`, `geometric`, not `tree`"),
        ("evaluate.budget=often", "must be a number of blocks, \"auto\" or a time such as \"8 ms\", not the string `\"often\"`"),
        ("evaluate.budget=8 s", "must be a number of blocks, \"auto\" or a time such as \"8 ms\", not the string `\"8 s\"`"),
        ("evaluate.budget=1.5", "must be a number of blocks, \"auto\" or a time such as \"8 ms\", not the float `1.5`"),
        ("evaluate.decoders=[]", "must name at least one decoder"),
        ("evaluate.decoders=[\"lockstep\", \"lockstep\"]", "names `lockstep` twice"),
        ("evaluate.decoders=[\"tree\"]", "must be one of `autoregressive`, `lockstep`, `asynchronous`, not `tree`"),
        ("devices.target=cuda", "must be `cpu` or `cuda:N`, not `cuda`"),
        ("devices.target=cuda:+1", "must be `cpu` or `cuda:N`, not `cuda:+1`"),
    ] {
        let key = setting.split('=').next().unwrap();
        let message = folder.message(MINIMAL, &[setting]);
        assert_eq!(message.lines().next().unwrap(), format!("--set {setting}: `{key}` {says}"));
    }
    for (budget, shown) in [("0", "0"), ("0 ms", "0 ms"), ("-1ms", "-1 ms")] {
        let setting = format!("evaluate.budget={budget}");
        let message = folder.message(MINIMAL, &["evaluate.fan_out=best_first", &setting]);
        let says = format!("--set {setting}: `evaluate.budget` must be at least 1 block or more than 0 ms, not `{shown}`");
        assert_eq!(message.lines().next().unwrap(), says);
    }
    assert_eq!(
        folder.message(MINIMAL, &["drafter.layers=[0]", "drafter.keep_layers=1"]).lines().next().unwrap(),
        "--set drafter.keep_layers=1: `drafter.keep_layers` cannot stand beside `drafter.layers`; keep one of them"
    );
    folder.write("more/gsm8k.jsonl", "");
    assert_eq!(
        folder.message(&format!("{MINIMAL}[evaluate]\nbenchmarks = [\"gsm8k.jsonl\", \"more/gsm8k.jsonl\"]"), &[]),
        "recipe.toml:18:30: `evaluate.benchmarks` names two benchmarks `gsm8k`, which scores could not tell apart; rename a file\n\
         18 | benchmarks = [\"gsm8k.jsonl\", \"more/gsm8k.jsonl\"]\n   |                              ^^^^^^^^^^^^^^^^^^"
    );
}

#[test]
fn absent_files_are_named() {
    let folder = Folder::new();
    assert_eq!(
        folder.message_with("prompts = [\"prompts.jsonl\", \"absent.jsonl\"]"),
        "recipe.toml:12:29: `data.prompts`: no file `absent.jsonl`\n\
         12 | prompts = [\"prompts.jsonl\", \"absent.jsonl\"]\n   |                             ^^^^^^^^^^^^^^"
    );
    for (line, says) in [
        ("prompts = [\"*.parquet\"]", "recipe.toml:12:12: `data.prompts`: no file matches `*.parquet`"),
        ("init = \"absent.gguf\"", "recipe.toml:7:8: `drafter.init`: no file or folder `absent.gguf`"),
        ("model = \"./absent\"", "recipe.toml:4:9: `target.model`: no file or folder `absent`"),
    ] {
        assert_eq!(folder.message_with(line).lines().next(), Some(says));
    }
    let missing = folder.path.join("absent.toml");
    assert_eq!(
        load(&missing, &[]).unwrap_err().to_string(),
        format!("cannot read recipe `{}`: No such file or directory (os error 2)", missing.display())
    );
    assert_eq!(
        folder.message("extends = \"absent.toml\"", &[]),
        "cannot read recipe `absent.toml`: No such file or directory (os error 2); named by `extends` at recipe.toml:1:11\n\
         1 | extends = \"absent.toml\"\n  |           ^^^^^^^^^^^^^"
    );
}

#[test]
fn benchmarks_that_are_not_there_are_named_with_what_to_do() {
    let folder = Folder::new();
    let message = |evaluate: &str| folder.message(&format!("{MINIMAL}[evaluate]\n{evaluate}"), &[]);
    assert_eq!(
        message("benchmarks = [\"aime25\"]"),
        "recipe.toml:18:15: `evaluate.benchmarks` names `aime25`, but not where its local copy is: set `evaluate.benchmark_folder` to a \
         folder with `aime25.jsonl`, which is the file `test.jsonl` of the hub dataset `math-ai/aime25` (licence Apache-2.0)\n\
         18 | benchmarks = [\"aime25\"]\n   |               ^^^^^^^^"
    );
    folder.write("copies/gsm8k.jsonl", "");
    assert_eq!(
        message("benchmark_folder = \"copies\"\nbenchmarks = [\"gsm8k\", \"aime25\"]").lines().next().unwrap(),
        "recipe.toml:19:24: `evaluate.benchmarks` names `aime25`, but there is no local copy of it: put the file `test.jsonl` of the hub \
         dataset `math-ai/aime25` (licence Apache-2.0) there as `copies/aime25.jsonl`"
    );
    assert_eq!(
        message("benchmarks = [\"gsm8\"]").lines().next().unwrap(),
        "recipe.toml:18:15: `evaluate.benchmarks` names no file, `gsm8` is not there, and no benchmark that is known: `gsm8k`, `math500`, \
         `aime25`, `humaneval`, `mbpp`, `livecodebench`, `mt-bench`"
    );
    assert_eq!(
        message("benchmark_folder = \"copy\"").lines().next().unwrap(),
        "recipe.toml:18:20: `evaluate.benchmark_folder`: no folder `copy`"
    );
    // A preset and a file of its name would be one column.
    let both = message("benchmark_folder = \"copies\"\nbenchmarks = [\"gsm8k\", \"gsm8k.jsonl\"]");
    assert!(both.contains("names two benchmarks `gsm8k`, which scores could not tell apart; rename a file"), "{both}");
}

#[test]
fn broken_text_is_pointed_at() {
    let folder = Folder::new();
    for (text, says) in [
        ("name = \"x\"\nseed = = 1\n", "recipe.toml:2:8: not valid TOML: "),
        ("name = \"x\"\nname = \"y\"\n", "recipe.toml:2:1: not valid TOML: duplicate key"),
        ("\tname = \"é\" \"\n", "recipe.toml:1:13: not valid TOML: "),
        ("name = \"x", "recipe.toml:1:10: not valid TOML: "),
    ] {
        let message = folder.message(text, &[]);
        assert!(message.starts_with(says) && message.lines().count() == 3, "{message}");
    }
}

#[test]
fn circles_of_extends_are_refused() {
    let folder = Folder::new();
    folder.write("other.toml", "extends = \"recipe.toml\"\n");
    assert_eq!(
        folder.message("extends = \"other.toml\"\n", &[]),
        "other.toml:1:11: `extends` goes round in a circle: `recipe.toml` -> `other.toml` -> `recipe.toml`\n\
         1 | extends = \"recipe.toml\"\n  |           ^^^^^^^^^^^^^"
    );
    assert!(folder.message("extends = \"./recipe.toml\"\n", &[]).contains("goes round in a circle"));
}

#[test]
fn overrides_of_the_wrong_form_are_quoted() {
    let folder = Folder::new();
    for text in ["train.steps", "=1", "train..steps=1", "a b=1", "extends=\"x.toml\"", "seed=1\nname=\"x\""] {
        let says = format!("--set {text}: not of the form `key.path=VALUE`, as in `train.ar_weight=0.5`");
        assert_eq!(folder.message(MINIMAL, &[text]), says);
    }
}
