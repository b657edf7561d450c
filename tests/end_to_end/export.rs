//! `drafthorse export`: what comes out is the same drafter, here and in other programs, and what is not whole does not come out.
//!
//! Other programs are Python's `transformers` and `gguf` (`PYTHON`, else `python3`) and, where that Python has `xllamacpp`, llama.cpp;
//! without them the tests say so and pass.

mod run;

use std::collections::BTreeMap;
use std::fs;
use std::path::{Path, PathBuf};
use std::process::{Command, Output};

use data::chat::ChatTemplate;
use data::gguf::GgufFile;
use data::tokenizer::Tokenizer;
use model::checkpoint;
use model::tensor_file::{load_safetensors, save_safetensors};
use model::{CachedAttention, KvCache, Piece};
use serde_json::{Value, json};
use torch::tch::{self, Device, Kind, Tensor};

use self::run::{ROWS, drafter_file, run};
use super::{drafthorse, interrupt, root, stderr};

const TEXT: &str = "<|im_start|>user\nHow many legs have 7 spiders?<|im_end|>\n<|im_start|>assistant\nSeven spiders have";

fn export(folder: &Path, arguments: &[&str]) -> Output {
    drafthorse(folder, &[&["export"], arguments].concat()).output().unwrap()
}

fn exported(folder: &Path, arguments: &[&str]) -> String {
    let output = export(folder, arguments);
    assert!(output.status.success(), "{arguments:?}: {}", stderr(&output));
    assert!(output.stdout.is_empty());
    stderr(&output)
}

/// Names in a folder, hidden ones included.
fn names(folder: &Path) -> Vec<String> {
    let mut names: Vec<String> =
        fs::read_dir(folder).unwrap().map(|entry| entry.unwrap().file_name().into_string().unwrap()).collect();
    names.sort();
    names
}

/// The logits of all positions, in f32.
fn logits(model: &Path, ids: &[u32]) -> Vec<f32> {
    let _no_grad = tch::no_grad_guard();
    let model = model::weights::load(model, Kind::Float, Device::Cpu).unwrap();
    let cache = KvCache::new(&model.config, 1, ids.len(), Kind::Float, Device::Cpu);
    let mut attention = CachedAttention::new(&cache, vec![Piece::causal(0, 0..ids.len(), Device::Cpu)]);
    let positions: Vec<usize> = (0..ids.len()).collect();
    let (ids_t, positions_t) = (torch::ids_tensor(ids, Device::Cpu), torch::index_tensor(&positions, Device::Cpu));
    torch::to_f32s(&model.logits(&model.forward(&ids_t, &positions_t, &mut attention)))
}

fn apart(one: &[f32], other: &[f32]) -> f32 {
    assert_eq!(one.len(), other.len());
    one.iter().zip(other).fold(0.0, |largest, (one, other)| largest.max((one - other).abs()))
}

/// A folder with the checkpoint's model in f32, all its matrices being what bf16 holds.
fn matrices_rounded(folder: &Path, checkpoint: &str) -> PathBuf {
    let (from, to) = (folder.join(checkpoint), folder.join(format!("rounded-{}", checkpoint.len())));
    let mut tensors = load_safetensors(&from.join("model.safetensors")).unwrap();
    for tensor in tensors.values_mut().filter(|tensor| tensor.dim() == 2) {
        *tensor = tensor.to_kind(Kind::BFloat16).to_kind(Kind::Float);
    }
    fs::create_dir(&to).unwrap();
    fs::copy(from.join("config.json"), to.join("config.json")).unwrap();
    let named: Vec<(String, &Tensor)> = tensors.iter().map(|(name, tensor)| (name.clone(), tensor)).collect();
    save_safetensors(&to.join("model.safetensors"), &named).unwrap();
    to
}

fn answer(folder: &Path, drafter: &str) -> String {
    let command =
        ["generate", "--target", "model", "--drafter", drafter, "--dtype", "f32", "--max-new-tokens", "30", "Tell me of 7."];
    let output = drafthorse(folder, &command).output().unwrap();
    assert!(output.status.success(), "{}", stderr(&output));
    // Text and figures: what was accepted shows that it is the same drafter.
    let figures = stderr(&output);
    let tau = figures.split("rounds, τ ").nth(1).and_then(|rest| rest.split(',').next()).unwrap();
    format!("{} τ {tau}", String::from_utf8(output.stdout).unwrap())
}

#[test]
fn a_folder_is_the_checkpoint_with_a_card() {
    let folder = run();
    let folder = folder.path();
    let said = exported(folder, &["runs/tiny", "--format", "hf", "deep/out"]);
    assert!(said.contains("deep/out: ") && said.contains(" in f32"), "{said}");
    let out = folder.join("deep/out");
    let expected = [
        "README.md",
        "config.json",
        "drafter.json",
        "generation_config.json",
        "model.safetensors",
        "tokenizer.json",
        "tokenizer_config.json",
    ];
    assert_eq!(names(&out), expected);
    assert_eq!(names(&folder.join("deep")), ["out"]);
    let checkpoint = folder.join("runs/tiny/train/step-000030");
    let tensors = |folder: &Path| load_safetensors(&folder.join("model.safetensors")).unwrap();
    assert_eq!(tensors(&out), tensors(&checkpoint));
    assert_eq!(checkpoint::load_drafter_file(&out).unwrap(), drafter_file());
    for file in ["config.json", "tokenizer.json", "tokenizer_config.json"] {
        assert_eq!(fs::read(out.join(file)).unwrap(), fs::read(checkpoint.join(file)).unwrap(), "{file}");
    }
    let generation: Value = serde_json::from_slice(&fs::read(out.join("generation_config.json")).unwrap()).unwrap();
    assert_eq!(generation, json!({"eos_token_id": 2, "pad_token_id": 2}));
    assert_eq!(answer(folder, "deep/out"), answer(folder, "runs/tiny"));

    let card = fs::read_to_string(out.join("README.md")).unwrap();
    for part in [
        "---\nlibrary_name: transformers\npipeline_tag: text-generation\nlicense: apache-2.0\ntags:\n- drafthorse\n- d3d\n",
        "# out\n\nA diffusion drafter for `model`",
        "| layers | 4; pruning removed 5, 2, in this order |",
        "| block size | 8, ",
        "| labels | `next`: ",
        "| mask token | 16, ",
        "answers without thinking",
        "| checkpoint | `tiny/train/step-000030`, recipe `0123456789abcdef` |",
        "| gsm8k | asynchronous | 3.41 (3.10 to 3.70) | 2.40× (2.20 to 2.60) | 73 % | 100.0 | yes | 80 |\n| gsm8k | autoregressive | 1 | – ",
        "Target in f32, drafter in f32, greedy, one text at once, drafted ahead: best_first, 24 blocks",
        "target cpu, drafter cpu",
        "drafthorse generate --target TARGET --drafter out \"Why",
        "AutoModelForCausalLM.from_pretrained(\"out\")",
        "the mask token 16",
        "All 8 rows are drafts",
        "No serving engine",
        "## Licence\n\nThe weights are derived from `model`, whose licence goes with them: apache-2.0.",
    ] {
        assert!(card.contains(part), "{part} is not in:\n{card}");
    }
    assert!(!card.contains(&folder.display().to_string()), "a path of this machine:\n{card}");

    // Stored as bf16, of another architecture, into an empty folder; no score, which is said.
    fs::create_dir(folder.join("empty")).unwrap();
    let said = exported(folder, &["runs/tiny/prune/layers-02", "--format", "hf", "empty/"]);
    assert!(said.contains("mind: the checkpoint is not scored; `drafthorse evaluate ") && said.contains(" in bf16"), "{said}");
    let written = tensors(&folder.join("empty"));
    assert_eq!(written, tensors(&folder.join("runs/tiny/prune/layers-02")));
    let card = fs::read_to_string(folder.join("empty/README.md")).unwrap();
    assert!(card.contains("This checkpoint has not been scored.") && card.contains("so there are 7 drafts"), "{card}");
    assert!(!names(folder).iter().any(|name| name.starts_with('.')), "{:?}", names(folder));

    exported(folder, &["runs/tiny", "--format", "hf", "--dtype", "bf16", "rounded"]);
    let rounded = tensors(&folder.join("rounded"));
    for (name, tensor) in tensors(&checkpoint) {
        assert_eq!(rounded[&name], tensor.to_kind(Kind::BFloat16), "{name}");
    }
}

#[test]
fn a_gguf_file_reads_back_as_the_drafter() {
    let folder = run();
    let folder = folder.path();
    let ids = |text: &str, around: bool| -> Vec<u32> {
        Tokenizer::from_file(&folder.join("model/tokenizer.json")).unwrap().encode(text, around).unwrap()
    };
    let prompt = ids(TEXT, false);
    for (checkpoint, name) in [("runs/tiny/train/step-000030", "trained"), ("runs/tiny/prune/layers-02", "pruned")] {
        let original = logits(&folder.join(checkpoint), &prompt);
        let rounded = logits(&matrices_rounded(folder, checkpoint), &prompt);
        for (quantisation, options) in
            [("bf16", &[][..]), ("f16", &["--quantisation", "f16"]), ("q8_0", &["--quantisation", "q8_0"])]
        {
            let out = format!("{name}-{quantisation}.gguf");
            let said = exported(folder, &[&[checkpoint, "--format", "gguf", &out], options].concat());
            assert!(said.contains(&format!("in {}, norms in F32", quantisation.to_uppercase())), "{said}");
            let found = logits(&folder.join(&out), &prompt);
            match quantisation {
                "bf16" => assert_eq!(found, rounded),
                "f16" => assert!(apart(&found, &original) < 0.1, "{}", apart(&found, &original)),
                _ => assert!(apart(&found, &original) < 1.0, "{}", apart(&found, &original)),
            }
            let (_, drafter) = checkpoint::load(&folder.join(&out), Kind::Float, Device::Cpu).unwrap();
            assert_eq!(drafter, checkpoint::load_drafter_file(&folder.join(checkpoint)).unwrap());

            let file = GgufFile::open(&folder.join(&out)).unwrap();
            let tokenizer = Tokenizer::from_gguf(&file).unwrap();
            for text in [TEXT, "  ünïcode 中文 \u{1f600}\r\n\tx = 12345;", "", "<|endoftext|> <repo_name>"] {
                for around in [false, true] {
                    assert_eq!(tokenizer.encode(text, around).unwrap(), ids(text, around), "{text:?}");
                }
            }
            let template = ChatTemplate::from_gguf(&file).unwrap();
            assert_eq!(template.source(), ChatTemplate::from_folder(&folder.join("model")).unwrap().source());
            let string = |key: &str| file.string(key).unwrap().to_string();
            assert_eq!((string("drafthorse.target"), string("general.license")), ("model".into(), "apache-2.0".into()));
            assert_eq!(string("general.name"), format!("d3d drafter with {} layers for model", drafter.layers));
        }
    }
    let file = GgufFile::open(&folder.join("pruned-q8_0.gguf")).unwrap();
    let tokens = file.strings("tokenizer.ggml.tokens").unwrap();
    assert_eq!((tokens.len(), tokens[49_155]), (ROWS as usize, "[PAD49155]"));
    assert!(file.tensor("output.weight").is_some());
    assert!(GgufFile::open(&folder.join("trained-bf16.gguf")).unwrap().tensor("output.weight").is_none(), "the head is tied");
    assert_eq!(answer(folder, "trained-f16.gguf").split(" τ ").next(), answer(folder, "runs/tiny").split(" τ ").next());
    assert!(!names(folder).iter().any(|name| name.starts_with('.')), "{:?}", names(folder));
}

#[test]
fn what_cannot_be_meant_or_is_taken_is_refused() {
    let folder = run();
    let folder = folder.path();
    fs::create_dir(folder.join("full")).unwrap();
    fs::write(folder.join("full/kept"), "here").unwrap();
    fs::write(folder.join("full.gguf"), "here").unwrap();
    fs::create_dir(folder.join("folder.gguf")).unwrap();
    let refused = |arguments: &[&str], expected: &[&str]| {
        let output = export(folder, arguments);
        let said = stderr(&output);
        assert_eq!(output.status.code(), Some(2), "{arguments:?}: {said}");
        assert!(expected.iter().all(|words| said.contains(words)), "{arguments:?}: {said}");
    };
    refused(&["runs/tiny", "--format", "dflash", "out"], &["dflash", "hidden states", "Use hf"]);
    refused(&["runs/tiny", "--format", "onnx", "out"], &["onnx", "hf and gguf"]);
    refused(&["runs/tiny", "--format", "hf", "full"], &["`full`", "not empty"]);
    refused(&["runs/tiny", "--format", "hf", "full.gguf"], &["`full.gguf` is a file"]);
    refused(&["runs/tiny", "--format", "gguf", "full.gguf"], &["`full.gguf`", "not empty"]);
    refused(&["runs/tiny", "--format", "gguf", "folder.gguf"], &["`folder.gguf` is a folder"]);
    refused(&["runs/tiny", "--format", "gguf", "out"], &["does not end in .gguf"]);
    refused(&["runs/tiny", "--format", "gguf", "--dtype", "f32", "out.gguf"], &["--dtype has no effect", "--quantisation"]);
    refused(&["runs/tiny", "--format", "hf", "--quantisation", "f16", "out"], &["--quantisation has no effect", "--dtype"]);
    refused(&["runs/tiny", "--format", "gguf", "--quantisation", "q4_0", "out.gguf"], &["q4_0", "q8_0"]);
    refused(&["runs/tiny", "--format", "hf", "--dtype", "f16", "out"], &["f16", "bf16"]);
    refused(&["absent", "--format", "hf", "out"], &["`absent`", "drafter.json"]);
    refused(&["model", "--format", "hf", "out"], &["`model`", "drafter.json"]);
    exported(folder, &["runs/tiny", "--format", "gguf", "out.gguf"]);
    refused(&["out.gguf", "--format", "hf", "out"], &["`out.gguf` is a GGUF file"]);
    assert!(!folder.join("out").exists());
    assert_eq!(fs::read_to_string(folder.join("full/kept")).unwrap(), "here");
}

#[test]
fn a_damaged_checkpoint_is_refused_with_what_is_wrong() {
    let folder = run();
    let folder = folder.path();
    let checkpoint = folder.join("runs/tiny/prune/layers-02");
    let whole = fs::read(checkpoint.join("model.safetensors")).unwrap();
    let failed = |expected: &[&str]| {
        for arguments in [["--format", "hf", "out"], ["--format", "gguf", "out.gguf"]] {
            let output = export(folder, &[&["runs/tiny/prune/layers-02"], &arguments[..]].concat());
            let said = stderr(&output);
            assert_eq!(output.status.code(), Some(1), "{said}");
            assert!(expected.iter().all(|words| said.contains(words)) && !said.contains("defect"), "{expected:?}: {said}");
            let left: Vec<String> = names(folder).into_iter().filter(|name| name.contains("out")).collect();
            assert!(left.is_empty(), "{left:?}");
        }
    };
    fs::write(checkpoint.join("model.safetensors"), &whole[..whole.len() - 1]).unwrap();
    failed(&["model.safetensors", "truncated"]);
    fs::write(checkpoint.join("model.safetensors"), &whole).unwrap();

    let with = |change: &dyn Fn(&mut BTreeMap<String, Tensor>), expected: &[&str]| {
        let mut tensors = load_safetensors(&checkpoint.join("model.safetensors")).unwrap();
        change(&mut tensors);
        let named: Vec<(String, &Tensor)> = tensors.iter().map(|(name, tensor)| (name.clone(), tensor)).collect();
        save_safetensors(&checkpoint.join("model.safetensors"), &named).unwrap();
        failed(expected);
        fs::write(checkpoint.join("model.safetensors"), &whole).unwrap();
    };
    let shorter = |tensors: &mut BTreeMap<String, Tensor>| {
        let norm = tensors.remove("model.norm.weight").unwrap();
        tensors.insert("model.final.weight".to_string(), norm.narrow(0, 0, 3).copy());
        let query = tensors["model.layers.1.self_attn.q_proj.weight"].narrow(0, 0, 96).contiguous();
        tensors.insert("model.layers.1.self_attn.q_proj.weight".to_string(), query);
    };
    let listed = [
        "missing: `model.norm.weight`",
        "unexpected: `model.final.weight`",
        "of the wrong shape: `model.layers.1.self_attn.q_proj.weight` ([96, 64] instead of [128, 64])",
    ];
    with(&shorter, &listed);
    let not_a_number = |tensors: &mut BTreeMap<String, Tensor>| {
        let _ = tensors["model.layers.1.mlp.down_proj.weight"].get(5).get(7).fill_(f64::NAN);
    };
    with(&not_a_number, &["`model.layers.1.mlp.down_proj.weight`", "NaN", "damaged"]);

    let with_json = |name: &str, change: &dyn Fn(&mut Value), expected: &[&str]| {
        let path = checkpoint.join(name);
        let text = fs::read_to_string(&path).unwrap();
        let mut json: Value = serde_json::from_str(&text).unwrap();
        change(&mut json);
        fs::write(&path, json.to_string()).unwrap();
        failed(expected);
        fs::write(&path, text).unwrap();
    };
    with_json("drafter.json", &|json| json["layers"] = 3.into(), &["drafter.json", "3 layers", "2"]);
    with_json("drafter.json", &|json| json["mask_token"] = ROWS.into(), &["drafter.json", "`mask_token` is 49160"]);
    with_json(
        "config.json",
        &|json| json["vocab_size"] = 100.into(),
        &["of the wrong shape: `lm_head.weight` ([49160, 64] instead of [100, 64])"],
    );
    fs::write(checkpoint.join("tokenizer.json"), "{").unwrap();
    failed(&["tokenizer.json"]);
}

#[test]
fn an_export_that_ends_early_leaves_nothing_and_the_next_one_works() {
    let folder = run();
    let folder = folder.path();
    for arguments in [["--format", "hf", "out"], ["--format", "gguf", "out.gguf"]] {
        let command = [&["export", "runs/tiny"], &arguments[..]].concat();
        let (status, said) = interrupt::after(&mut drafthorse(folder, &command), "1/", "-INT");
        // Small as it is, it may have been through before the signal came.
        let interrupted = status.code() == Some(3) && said.contains("nothing was left behind");
        assert!(interrupted || status.success(), "{said}");
        assert_eq!(folder.join(arguments[2]).exists(), status.success());

        // A limit on the size of files stands for a full disk.
        let script = format!(
            "trap '' XFSZ; ulimit -f 100; exec '{}' export runs/tiny {} full",
            env!("CARGO_BIN_EXE_drafthorse"),
            arguments[..2].join(" ")
        );
        let script = if arguments[1] == "gguf" { format!("{script}.gguf") } else { script };
        let output = Command::new("sh").current_dir(folder).args(["-c", &script]).output().unwrap();
        let said = stderr(&output);
        assert_eq!(output.status.code(), Some(1), "{said}");
        assert!(said.contains("cannot write `") && said.contains("File too large"), "{said}");

        // What a killed one left is no obstacle.
        fs::create_dir_all(folder.join(".again.partial/model.safetensors")).unwrap();
        fs::create_dir_all(folder.join(".again.gguf.partial")).unwrap();
        let again = arguments[2].replace("out", "again");
        exported(folder, &["runs/tiny", arguments[0], arguments[1], &again]);
        let left: Vec<String> =
            names(folder).into_iter().filter(|name| name.contains("partial") || name.contains("full")).collect();
        let expected: &[&str] = if arguments[1] == "hf" { &[".again.gguf.partial"] } else { &[".again.partial"] };
        assert_eq!(left, expected);
        left.iter().for_each(|name| fs::remove_dir_all(folder.join(name)).unwrap());
        let again = folder.join(again);
        if again.is_dir() { fs::remove_dir_all(&again).unwrap() } else { fs::remove_file(&again).unwrap() }
    }
}

/// What a script beside the golden files prints; says so when there is no Python to run it.
fn python(script: &str, arguments: &[&Path]) -> Option<Value> {
    let python = std::env::var("PYTHON").unwrap_or_else(|_| "python3".to_string());
    let mut command = Command::new(&python);
    command.arg("-B").arg(root().join("tests/golden").join(script)).args(arguments).arg(TEXT);
    let output = command.output().unwrap();
    if output.status.code() == Some(3) {
        eprintln!("skipped: `{python}` has no transformers or gguf; set PYTHON to one that has");
        return None;
    }
    assert!(output.status.success(), "{}", stderr(&output));
    // llama.cpp writes to stdout as well.
    let text = String::from_utf8(output.stdout).unwrap();
    Some(serde_json::from_str(text.lines().last().unwrap()).unwrap())
}

fn last_row(model: &Path, ids: &[u32]) -> Vec<f32> {
    let all = logits(model, ids);
    all[all.len() - all.len() / ids.len()..].to_vec()
}

#[test]
fn other_programs_load_it_without_a_word_and_compute_the_same() {
    let folder = run();
    let folder = folder.path();
    let prompt = Tokenizer::from_file(&folder.join("model/tokenizer.json")).unwrap().encode(TEXT, false).unwrap();
    for (checkpoint, name) in [
        ("runs/tiny/train/step-000030", "trained"),
        ("runs/tiny/prune/layers-02", "pruned"),
        ("runs/tiny/prune/layers-01", "scaled"),
    ] {
        let out = folder.join(name);
        exported(folder, &[checkpoint, "--format", "hf", name]);
        let Some(found) = python("load_checkpoint.py", &[&out]) else { return };
        for kind in ["missing", "unexpected", "mismatched", "warnings"] {
            assert_eq!(found[kind], json!([]), "{kind}");
        }
        assert_eq!(found["ids"], json!(prompt));
        let theirs: Vec<f32> = serde_json::from_value(found["logits"].clone()).unwrap();
        assert!(apart(&last_row(&out, &prompt), &theirs) < 1e-3, "{name}");

        let quantisations: &[&str] = if name == "scaled" { &["f16"] } else { &["f16", "bf16", "q8_0"] };
        for quantisation in quantisations {
            let file: PathBuf = folder.join(format!("{name}-{quantisation}.gguf"));
            exported(folder, &[checkpoint, "--format", "gguf", "--quantisation", quantisation, file.to_str().unwrap()]);
            let Some(found) = python("load_gguf.py", &[&file, &out]) else { return };
            assert_eq!(found["different"], json!([]), "{name} {quantisation}");
            assert_eq!(found["ids"], json!(prompt));
            let (ours, theirs): (_, Vec<f32>) =
                (last_row(&file, &prompt), serde_json::from_value(found["logits"].clone()).unwrap());
            assert!(apart(&ours, &theirs) < 1e-3, "{name} {quantisation}: {}", apart(&ours, &theirs));
            if found["llama_cpp"].is_null() {
                eprintln!("skipped: llama.cpp, for this Python has no xllamacpp");
                continue;
            }
            assert_eq!(found["llama_cpp"]["ids"], json!(prompt));
            let theirs: Vec<f32> = serde_json::from_value(found["llama_cpp"]["logprobs"].clone()).unwrap();
            let normaliser = ours.iter().map(|logit| f64::from(*logit).exp()).sum::<f64>().ln() as f32;
            let ours: Vec<f32> = ours.iter().map(|logit| logit - normaliser).collect();
            // llama.cpp rounds activations too: to f16 or bf16, or to blocks of bytes.
            let room = if *quantisation == "f16" { 0.05 } else { 1.0 };
            assert!(apart(&ours, &theirs) < room, "{name} {quantisation} by llama.cpp: {}", apart(&ours, &theirs));
        }
    }
}

#[test]
fn help_teaches_by_example() {
    let output = drafthorse(&root(), &["export", "--help"]).output().unwrap();
    let help = String::from_utf8(output.stdout).unwrap();
    for words in
        ["drafthorse export runs/NAME --format hf", "--quantisation q8_0", "Exit codes", "drafter.json", "drafthorse generate"]
    {
        assert!(help.contains(words), "{words} is not in: {help}");
    }
}
