//! What the binary says and how it exits when recipe, prompts or models are wrong.

use std::fs;
use std::path::Path;
use std::process::Command;

use super::{drafthorse, root, stderr, tiny};

/// Runs a recipe with overrides in a folder; gives exit code and stderr.
fn fails(folder: &Path, recipe: &Path, overrides: &[&str]) -> (i32, String) {
    let mut arguments = vec!["run", recipe.to_str().unwrap()];
    arguments.extend(overrides.iter().flat_map(|change| ["--set", change]));
    let output = drafthorse(folder, &arguments).output().unwrap();
    let message = stderr(&output);
    assert!(!message.contains("panicked") && !message.contains("a defect in drafthorse"), "{message}");
    (output.status.code().unwrap(), message)
}

#[test]
fn recipes_that_cannot_be_carried_out_exit_2_and_name_the_key() {
    let folder = tempfile::tempdir().unwrap();
    let cases = [
        ("train.anchorz=3", "anchors"),
        ("train.steps=many", "train.steps"),
        ("drafter.block_size=1", "at least 2"),
        ("drafter.mask_token=49152", "49152 embedding rows"),
        ("drafter.mask_token=100", "stands for text"),
        ("drafter.mask_token=2", "ends a response"),
        ("data.holdout=0", "data.holdout"),
        ("devices.drafter=cuda:99", "devices.drafter"),
        ("train.anchors=9223372036854775807", "from 0 to 1000000000"),
        ("prune.remove=30", "prune.remove"),
        ("data.prompts=[\"absent.jsonl\"]", "absent.jsonl"),
        ("target.model=./absent.gguf", "absent.gguf"),
    ];
    for (change, expected) in cases {
        let (code, message) = fails(folder.path(), &root().join("recipes/quickstart.toml"), &[change]);
        assert_eq!(code, 2, "{change}: {message}");
        assert!(message.contains(expected), "{change}: {message}");
        assert!(!folder.path().join("runs").exists(), "{change}: nothing may be begun");
    }
}

#[test]
fn a_result_that_cannot_be_written_is_no_defect_and_progress_that_cannot_be_is_no_failure() {
    let folder = tempfile::tempdir().unwrap();
    tiny::write(folder.path());
    let full = || fs::OpenOptions::new().write(true).open("/dev/full").unwrap();
    let check = |command: &mut std::process::Command| command.output().unwrap();
    let output = check(drafthorse(folder.path(), &["check", "recipe.toml"]).stdout(full()));
    assert_eq!(output.status.code(), Some(1));
    assert!(stderr(&output).contains("error: cannot write to stdout"), "{}", stderr(&output));
    // Whoever read the progress may be gone, as `tee` is after an interrupt.
    let output = drafthorse(folder.path(), &["compare", "absent"]).stderr(full()).output().unwrap();
    assert_eq!(output.status.code(), Some(2));
    let output = drafthorse(folder.path(), &["run", "recipe.toml", "--until", "regenerate"]).stderr(full()).output().unwrap();
    assert_eq!(output.status.code(), Some(0));
    assert!(folder.path().join("runs/tiny/responses/manifest.json").exists());
}

/// A tiny model's folder, changed by `spoil`, as the target: exit code 1, a message with all of `expected`, nothing begun.
fn assert_model_is_refused(spoil: impl Fn(&Path), expected: &[&str]) {
    let folder = tempfile::tempdir().unwrap();
    tiny::write(folder.path());
    spoil(&folder.path().join("model"));
    let (code, message) = fails(folder.path(), Path::new("recipe.toml"), &[]);
    assert!(code == 1 || code == 2, "{code}: {message}");
    for expected in expected {
        assert!(message.contains(expected), "`{expected}` is not in: {message}");
    }
    let responses = folder.path().join("runs/tiny/responses");
    let parts = fs::read_dir(responses)
        .into_iter()
        .flatten()
        .flatten()
        .filter(|file| file.path().extension().is_some_and(|extension| extension == "parquet"));
    assert_eq!(parts.count(), 0, "{message}");
}

#[test]
fn models_that_cannot_be_read_are_named_with_what_is_wrong() {
    let weights = "model.safetensors";
    assert_model_is_refused(|model| fs::remove_file(model.join(weights)).unwrap(), &["model", "safetensors"]);
    assert_model_is_refused(|model| fs::remove_file(model.join("config.json")).unwrap(), &["config.json"]);
    assert_model_is_refused(
        |model| {
            let bytes = fs::read(model.join(weights)).unwrap();
            fs::write(model.join(weights), &bytes[..bytes.len() / 2]).unwrap();
        },
        &[weights, "truncated"],
    );
    assert_model_is_refused(
        |model| {
            let config = fs::read_to_string(model.join("config.json")).unwrap();
            assert!(config.contains("\"intermediate_size\": 64"), "{config}");
            fs::write(model.join("config.json"), config.replace("\"intermediate_size\": 64", "\"intermediate_size\": 65"))
                .unwrap();
        },
        &[weights, "model.layers.0.mlp", "[64, 32]", "[65, 32]"],
    );
}

#[test]
fn a_truncated_gguf_is_named() {
    let folder = tempfile::tempdir().unwrap();
    let model = folder.path().join("short.gguf");
    let bytes = fs::read(root().join(".models/SmolLM2-135M-Instruct.Q4_1.gguf")).expect("run `make setup` first");
    fs::write(&model, &bytes[..bytes.len() / 2]).unwrap();
    let change = format!("target.model={}", model.display());
    let (code, message) = fails(folder.path(), &root().join("recipes/quickstart.toml"), &[&change]);
    assert_eq!(code, 1, "{message}");
    assert!(message.contains("short.gguf") && message.contains("truncated"), "{message}");
}

#[test]
fn a_prompt_file_without_a_prompt_is_an_error_and_bad_rows_are_counted() {
    let folder = tempfile::tempdir().unwrap();
    tiny::write(folder.path());
    let prompts = folder.path().join("prompts.jsonl");
    let good = fs::read_to_string(&prompts).unwrap();
    fs::write(&prompts, "\n\n").unwrap();
    let (code, message) = fails(folder.path(), Path::new("recipe.toml"), &[]);
    assert_eq!(code, 1, "{message}");
    assert!(message.contains("prompts.jsonl"), "{message}");

    let mut lines: Vec<&str> = good.lines().collect();
    lines.insert(5, "{\"messages\": [{\"role\": \"user\", \"content\"");
    lines.insert(9, "[1, 2]");
    lines.insert(12, "{\"messages\": [{\"role\": \"user\", \"content\": \"\"}]}");
    fs::write(&prompts, lines.join("\n")).unwrap();
    let (code, message) = fails(folder.path(), Path::new("recipe.toml"), &["data.max_rejected=0.1"]);
    assert_eq!(code, 1, "{message}");
    assert!(message.contains("3 of 27 prompts are rejected, more than `data.max_rejected` = 0.1 allows"), "{message}");
    // Another file is packed, an array, and has one row that is no prompt; a limit leaves rows of both.
    let rows: Vec<String> = lines[..5].iter().map(|line| line.to_string()).chain(["7".to_string()]).collect();
    fs::write(folder.path().join("more.json"), format!("[{}]", rows.join(",\n"))).unwrap();
    assert!(Command::new("gzip").arg(folder.path().join("more.json")).status().unwrap().success());
    let both = ["--set", "data.prompts=[\"prompts.jsonl\", \"more.json.gz\"]", "--set", "data.limit=20", "--set", "name=both"];
    let output = drafthorse(folder.path(), &[&["regenerate", "recipe.toml"], &both[..]].concat()).output().unwrap();
    let said = stderr(&output);
    assert!(output.status.success() && said.contains("33 prompts: 20 to answer, 4 rejected"), "{said}");
    assert!(said.contains("more.json.gz: 6 rows, ") && said.contains("first in line 6 of "), "{said}");
    let manifest = fs::read_to_string(folder.path().join("runs/both/responses").join(data::manifest::FILE_NAME)).unwrap();
    let manifest: serde_json::Value = serde_json::from_str(&manifest).unwrap();
    let total = |key: &str| {
        let sources = manifest["results"]["sources"].as_array().unwrap();
        sources.iter().map(|source| source[key].as_u64().unwrap()).sum::<u64>()
    };
    assert_eq!(["read", "used", "rejected", "left_out_by_limit"].map(total), [33, 20, 4, 9]);

    let output = drafthorse(folder.path(), &["regenerate", "recipe.toml"]).output().unwrap();
    assert!(output.status.success(), "{}", stderr(&output));
    assert!(stderr(&output).contains("27 prompts: 24 to answer, 3 rejected"), "{}", stderr(&output));
    let responses = folder.path().join("runs/tiny/responses");
    let rejected = fs::read_to_string(responses.join("rejected.jsonl")).unwrap();
    let rejected: Vec<serde_json::Value> = rejected.lines().map(|line| serde_json::from_str(line).unwrap()).collect();
    assert_eq!(rejected.iter().map(|row| row["line"].as_u64().unwrap()).collect::<Vec<_>>(), [6, 10, 13]);
    let path = responses.join(data::manifest::FILE_NAME);
    let mut manifest: serde_json::Value = serde_json::from_str(&fs::read_to_string(&path).unwrap()).unwrap();
    assert_eq!((&manifest["results"]["rows_used"], &manifest["results"]["rows_rejected"]), (&24.into(), &3.into()));
    assert!(["requests", "under-way"].iter().all(|name| !responses.join(name).exists()), "what was there for the work is gone");
    // Parts without the work that they are of cannot be gone on from.
    manifest["complete"] = false.into();
    fs::write(&path, manifest.to_string()).unwrap();
    let (code, message) = fails(folder.path(), Path::new("recipe.toml"), &[]);
    assert!(code == 1 && message.contains("lost its folder `requests`") && message.contains("--restart regenerate"), "{message}");
}

#[test]
fn pruning_refuses_a_ledger_of_another_run_and_a_drafter_without_weights() {
    let folder = tempfile::tempdir().unwrap();
    tiny::write(folder.path());
    let short = ["--set", "train.steps=2", "--set", "prune.recovery_steps=1"];
    let run = |arguments: &[&str]| {
        let output = drafthorse(folder.path(), &[arguments, &short].concat()).output().unwrap();
        let message = stderr(&output);
        assert!(!message.contains("panicked") && !message.contains("a defect in drafthorse"), "{message}");
        (output.status.code().unwrap(), message)
    };
    let (code, message) = run(&["run", "recipe.toml", "--until", "train"]);
    assert_eq!(code, 0, "{message}");
    let prune = folder.path().join("runs/tiny/prune");
    fs::create_dir(&prune).unwrap();
    let foreign = r#"{"event":"begun","parent":"step-000099","layers":7,"weights":"0123456789","held_out":"ab","anchors":3,"seed":9,"criterion":"tau"}"#;
    for (ledger, expected) in
        [(format!("{foreign}\n"), "its layers (7 there, 4 now)"), ("{\"event\":\"nonsense\"}\n".to_string(), "line 1")]
    {
        fs::write(prune.join("ledger.jsonl"), &ledger).unwrap();
        let (code, message) = run(&["prune", "recipe.toml"]);
        assert!(code != 0 && message.contains("ledger.jsonl") && message.contains(expected), "{code}: {message}");
        assert!(!message.contains("cannot write"), "{message}");
        assert_eq!(fs::read_to_string(prune.join("ledger.jsonl")).unwrap(), ledger);
    }
    // As the message says.
    fs::remove_dir_all(&prune).unwrap();

    let weights = folder.path().join("runs/tiny/train/latest/model.safetensors");
    let kept = fs::read(&weights).unwrap();
    fs::remove_file(&weights).unwrap();
    let (code, message) = run(&["prune", "recipe.toml"]);
    assert!(code != 0 && message.contains("model.safetensors"), "{code}: {message}");
    fs::write(&weights, &kept[..kept.len() / 2]).unwrap();
    let (code, message) = run(&["prune", "recipe.toml"]);
    assert!(code != 0 && message.contains("model.safetensors"), "{code}: {message}");
    fs::write(&weights, &kept).unwrap();
    let (code, message) = run(&["prune", "recipe.toml"]);
    assert_eq!(code, 0, "{message}");
    assert!(prune.join("layers-03/model.safetensors").exists());
}
