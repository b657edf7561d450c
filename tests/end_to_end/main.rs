//! The binary from outside: help, bad input, and whole runs of a tiny model, left alone and interrupted.
#![allow(clippy::unwrap_used)]

mod bad_input;
mod benchmarks;
mod compare;
mod dry_run;
mod export;
mod generate;
mod inspect;
mod interrupt;
mod launch;
mod pruning;
mod ranks;
mod serving;
mod shared_responses;
mod soak;
mod tiny;
mod whole_runs;

use std::path::{Path, PathBuf};
use std::process::{Command, Output};

fn root() -> PathBuf {
    PathBuf::from(env!("CARGO_MANIFEST_DIR"))
}

/// The binary in a working folder; runs are made below it.
fn drafthorse(folder: &Path, arguments: &[&str]) -> Command {
    let mut command = Command::new(env!("CARGO_BIN_EXE_drafthorse"));
    command.current_dir(folder).args(arguments);
    command
}

fn stderr(output: &Output) -> String {
    String::from_utf8(output.stderr.clone()).unwrap()
}

#[test]
fn every_subcommand_explains_itself() {
    for command in ["run", "regenerate", "train", "prune", "evaluate", "check"] {
        let output = drafthorse(&root(), &[command, "--help"]).output().unwrap();
        assert!(output.status.success());
        assert!(String::from_utf8(output.stdout).unwrap().contains("recipe"), "{command}");
    }
}
