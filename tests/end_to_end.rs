//! The binary from outside: what it says and how it exits when recipe, prompts or models are wrong.
#![allow(clippy::unwrap_used)]

use std::path::{Path, PathBuf};
use std::process::{Command, Output};

fn root() -> PathBuf {
    PathBuf::from(env!("CARGO_MANIFEST_DIR"))
}

fn drafthorse(folder: &Path, arguments: &[&str]) -> Output {
    Command::new(env!("CARGO_BIN_EXE_drafthorse")).current_dir(folder).args(arguments).output().unwrap()
}

/// Runs the quickstart recipe in an empty folder with overrides; gives exit code and stderr.
fn fails(overrides: &[&str]) -> (i32, String) {
    let folder = tempfile::tempdir().unwrap();
    let recipe = root().join("recipes/quickstart.toml");
    let mut arguments = vec!["run", recipe.to_str().unwrap()];
    arguments.extend(overrides.iter().flat_map(|change| ["--set", change]));
    let output = drafthorse(folder.path(), &arguments);
    let message = String::from_utf8(output.stderr).unwrap();
    assert!(!message.contains("panicked") && !message.contains("a defect in drafthorse"), "{message}");
    (output.status.code().unwrap(), message)
}

#[test]
fn every_subcommand_explains_itself() {
    for command in ["run", "regenerate", "train", "prune", "evaluate", "check"] {
        let output = drafthorse(&root(), &[command, "--help"]);
        assert!(output.status.success());
        assert!(String::from_utf8(output.stdout).unwrap().contains("recipe"), "{command}");
    }
}

#[test]
fn recipes_that_cannot_be_carried_out_exit_2_and_name_the_key() {
    let cases = [
        ("train.anchorz=3", "anchors"),
        ("train.steps=many", "train.steps"),
        ("drafter.block_size=1", "at least 2"),
        ("drafter.mask_token=49152", "49152 embedding rows"),
        ("prune.remove=30", "prune.remove"),
        ("data.prompts=[\"absent.jsonl\"]", "absent.jsonl"),
        ("target.model=./absent.gguf", "absent.gguf"),
    ];
    for (change, expected) in cases {
        let (code, message) = fails(&[change]);
        assert_eq!(code, 2, "{change}: {message}");
        assert!(message.contains(expected), "{change}: {message}");
    }
}

#[test]
fn a_truncated_model_and_an_empty_prompt_file_exit_1_and_name_the_file() {
    let folder = tempfile::tempdir().unwrap();
    let model = folder.path().join("short.gguf");
    let bytes = std::fs::read(root().join(".models/SmolLM2-135M-Instruct.Q4_1.gguf")).expect("run `make setup` first");
    std::fs::write(&model, &bytes[..bytes.len() / 2]).unwrap();
    let (code, message) = fails(&[&format!("target.model={}", model.display())]);
    assert_eq!(code, 1, "{message}");
    assert!(message.contains("short.gguf"), "{message}");

    let prompts = folder.path().join("empty.jsonl");
    std::fs::write(&prompts, "\n\n").unwrap();
    let (code, message) = fails(&[&format!("data.prompts=[\"{}\"]", prompts.display())]);
    assert_eq!(code, 1, "{message}");
    assert!(message.contains("empty.jsonl"), "{message}");
}
