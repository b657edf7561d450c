//! Several ranks regenerate as one: the same parts byte for byte, by whatever number of ranks, killed or not.

use std::collections::BTreeMap;
use std::fs;
use std::path::Path;
use std::process::Command;

use serde_json::Value;
use tempfile::TempDir;

use super::ranks::{by_hand_in, free_port};
use super::{drafthorse, interrupt, stderr, tiny};

/// 80 prompts are five chunks. Sampled, so that what a row draws is seen to hang on the row alone.
const SETTINGS: [&str; 4] = ["--set", "regenerate.temperature=0.8", "--set", "regenerate.max_new_tokens=60"];

fn prompts() -> TempDir {
    let folder = tempfile::tempdir().unwrap();
    tiny::write(folder.path());
    let chat = |number: usize| match number % 9 {
        // Two turns, so that some conversations take longer than others.
        0 => format!("{{\"turns\": [\"What is {number}?\", \"And twice that?\"]}}\n"),
        _ => format!("{{\"prompt\": \"Tell me of {number}.{}\"}}\n", " Please.".repeat(number % 5)),
    };
    fs::write(folder.path().join("prompts.jsonl"), (0..80).map(chat).collect::<String>()).unwrap();
    // Random weights say any token, so one of many must end a response for there to be second turns.
    let path = folder.path().join("model/config.json");
    let mut config: Value = serde_json::from_slice(&fs::read(&path).unwrap()).unwrap();
    config["eos_token_id"] = (100..2000).collect();
    fs::write(path, config.to_string()).unwrap();
    folder
}

fn regeneration(folder: &Path, ranks: usize, more: &[&str]) -> Command {
    let regenerate = [&["regenerate", "recipe.toml"], &SETTINGS[..], more].concat();
    if ranks == 1 {
        return drafthorse(folder, &regenerate);
    }
    drafthorse(folder, &[&["launch", "--nproc", &ranks.to_string(), "--"], &regenerate[..]].concat())
}

/// What must come out the same: every file of the responses.
fn outcome(folder: &Path) -> BTreeMap<String, Vec<u8>> {
    let responses = folder.join("runs/tiny/responses");
    let entries = fs::read_dir(&responses).unwrap().flatten();
    entries.map(|entry| (entry.file_name().into_string().unwrap(), fs::read(entry.path()).unwrap_or_default())).collect()
}

#[test]
fn one_two_and_three_ranks_write_the_same_parts() {
    let alone = prompts();
    let output = regeneration(alone.path(), 1, &[]).output().unwrap();
    assert!(output.status.success(), "{}", stderr(&output));
    let mut expected = outcome(alone.path());
    let manifest: Value = serde_json::from_slice(&expected["manifest.json"]).unwrap();
    let results = &manifest["results"];
    assert_eq!((&manifest["complete"], &results["rows_used"]), (&true.into(), &80.into()));
    let (responses, stopped) = (results["responses"].as_u64().unwrap(), results["finished_by_stop"].as_u64().unwrap());
    assert!(responses > 80 && stopped > 20 && stopped < responses, "some go on to a second turn: {results}");
    assert!(expected.contains_key("part-00004.parquet") && expected.len() == 7, "{:?}", expected.keys());
    // The file of the prompts is in another folder each time, and named.
    let without_paths = |files: &mut BTreeMap<String, Vec<u8>>, folder: &Path| {
        let bytes = files.remove("manifest.json").unwrap();
        String::from_utf8(bytes).unwrap().replace(&folder.display().to_string(), "")
    };
    let expected_manifest = without_paths(&mut expected, alone.path());
    for ranks in [2, 3] {
        let folder = prompts();
        let output = regeneration(folder.path(), ranks, &[]).output().unwrap();
        assert!(output.status.success(), "{ranks} ranks: {}", stderr(&output));
        assert!(stderr(&output).contains("80/80 "), "{}", stderr(&output));
        let mut found = outcome(folder.path());
        assert_eq!(without_paths(&mut found, folder.path()), expected_manifest, "{ranks} ranks");
        assert!(found == expected, "{ranks} ranks write other parts");
    }

    // Cut short with two ranks, once asked to and once killed, then ended by one.
    let folder = prompts();
    for (signal, code) in [("-TERM", Some(3)), ("-KILL", None)] {
        let mut command = regeneration(folder.path(), 2, &["--log-format", "json"]);
        let said = interrupt::after(&mut command, "\"progress\":\"regenerate\"", signal);
        assert_eq!(said.0.code(), code, "{}", said.1);
    }
    // The ranks of a launcher that was killed end by themselves, and until then hold the folder.
    let output = loop {
        let output = regeneration(folder.path(), 1, &[]).output().unwrap();
        if !stderr(&output).contains("is in use by another drafthorse process") {
            break output;
        }
    };
    assert!(output.status.success() && stderr(&output).contains("goes on where it was"), "{}", stderr(&output));
    let mut found = outcome(folder.path());
    assert_eq!(without_paths(&mut found, folder.path()), expected_manifest);
    assert!(found == expected);
}

#[test]
fn a_rank_with_another_recipe_or_another_file_system_is_named() {
    let folder = prompts();
    let other = tempfile::tempdir().unwrap();
    let elsewhere = |change: &str| {
        // The run's folder is the same one, the recipe is not.
        let (from, to) = (folder.path().display(), other.path().display());
        format!("cp -a '{from}/.' '{to}'; cd '{to}'; rm -rf runs; {change}")
    };
    let shared = format!("mkdir -p '{0}/runs'; ln -sfn '{0}/runs' runs; ", folder.path().display());
    for (change, message) in [
        (format!("{shared} sed -i 's/^batch_rows = 6/temperature = 0.9/' recipe.toml"), "`regenerate.temperature` = 0.9"),
        (format!("{shared} sed -i 's/^seed = 1/seed = 2/' recipe.toml"), "`seed` = 2, and that of rank 0 has 1"),
        (":".to_owned(), "does not see `runs/tiny/responses`"),
    ] {
        let hinder = |rank: usize| if rank == 1 { elsewhere(&change) } else { ":".to_owned() };
        let _ = fs::remove_dir_all(folder.path().join("runs"));
        for (rank, (code, said)) in by_hand_in("regenerate", folder.path(), free_port(), &hinder).into_iter().enumerate() {
            assert_eq!(code, Some(1), "rank {rank}: {said}");
            assert!(said.contains(message) && said.contains("rank 1"), "rank {rank}: {said}");
        }
    }
}
