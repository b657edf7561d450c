//! A run that is interrupted or killed in every stage ends with the results of one that was left alone.

use std::fs;
use std::path::Path;
use std::process::ExitStatus;

use super::{compare, drafthorse, interrupt, stderr, tiny};

/// The title of each piece of work's progress, in order: every stage at least once.
const WORK: [&str; 7] = ["regenerate", "train", "layers", "recover", "step-000000", "step-000030", "layers-03"];

const COMMAND: [&str; 4] = ["run", "recipe.toml", "--log-format", "json"];

/// Metrics that depend on the machine.
pub(crate) const CLOCK: [&str; 4] = ["seconds", "tokens_per_second", "peak_share", "memory_gb"];

/// Runs until the first progress of `title`, then sends the signal; gives how the process ended and what it said.
fn signalled(folder: &Path, title: &str, signal: &str) -> (ExitStatus, String) {
    interrupt::after(&mut drafthorse(folder, &COMMAND), &format!("\"progress\":\"{title}\""), signal)
}

/// Everything a run made that does not depend on the clock: the trained and pruned weights, and the scores without times.
fn results(folder: &Path) -> Vec<(String, Vec<u8>)> {
    let run = folder.join("runs/tiny");
    let mut results: Vec<(String, Vec<u8>)> = ["train/latest", "prune/layers-03"]
        .iter()
        .map(|name| (name.to_string(), fs::read(run.join(name).join("model.safetensors")).unwrap()))
        .collect();
    for name in ["step-000000", "step-000030", "layers-03"] {
        let text = fs::read_to_string(run.join("scores").join(format!("{name}.json"))).unwrap();
        let mut score: serde_json::Value = serde_json::from_str(&text).unwrap();
        for (_, decoder) in score["decoders"].as_object_mut().unwrap() {
            for (_, figures) in decoder["benchmarks"].as_object_mut().unwrap() {
                assert_ne!(figures["identical_to_autoregressive"], false, "{name}: {figures}");
                assert!(figures["simulated"]["h100-graphs-8b-8b"]["tokens_per_second"].is_number(), "{name}: {figures}");
                let figures = figures.as_object_mut().unwrap();
                let by_clock = ["tokens_per_second", "speedup", "speedup_interval", "round_cost", "peak_memory_bytes"];
                figures.retain(|key, _| !key.ends_with("_seconds") && !by_clock.contains(&key.as_str()));
                for prompt in figures["by_prompt"].as_array_mut().unwrap() {
                    prompt.as_object_mut().unwrap().remove("seconds");
                }
            }
        }
        results.push((name.to_string(), serde_json::to_vec_pretty(&score).unwrap()));
    }
    for file in ["train/metrics.jsonl", "prune/ledger.jsonl"] {
        let lines = fs::read_to_string(run.join(file)).unwrap();
        let without_times = lines.lines().map(|line| {
            let mut line: serde_json::Value = serde_json::from_str(line).unwrap();
            line.as_object_mut().unwrap().retain(|key, _| !CLOCK.contains(&key.as_str()));
            format!("{line}\n")
        });
        results.push((file.to_string(), without_times.collect::<String>().into_bytes()));
    }
    results
}

fn assert_same(one: &[(String, Vec<u8>)], other: &[(String, Vec<u8>)]) {
    for ((name, one), (_, other)) in one.iter().zip(other) {
        let show = |bytes: &[u8]| String::from_utf8(bytes.to_vec()).unwrap_or_else(|_| format!("{} bytes", bytes.len()));
        assert!(one == other, "{name} differs:\n{}\n{}", show(one), show(other));
    }
}

#[test]
fn a_run_interrupted_or_killed_in_every_stage_ends_as_one_left_alone() {
    let folders = [(); 3].map(|()| tempfile::tempdir().unwrap());
    let [alone, interrupted, killed] = folders.each_ref().map(|folder| folder.path());
    for folder in [alone, interrupted, killed] {
        tiny::write(folder);
    }
    let output = drafthorse(alone, &COMMAND).output().unwrap();
    assert!(output.status.success(), "{}", stderr(&output));
    let expected = results(alone);

    // A second start finds everything done and prints the same table.
    let again = drafthorse(alone, &COMMAND).output().unwrap();
    assert!(again.status.success(), "{}", stderr(&again));
    assert_eq!(stderr(&again).matches("is done").count(), 4, "{}", stderr(&again));
    assert_eq!(again.stdout, output.stdout);
    assert!(String::from_utf8(again.stdout).unwrap().contains("layers-03"));
    compare::assert_comparable(alone);

    for title in WORK {
        let (status, said) = signalled(interrupted, title, "-INT");
        assert_eq!(status.code(), Some(3), "{title}: {said}");
        assert!(said.contains("Run the same command again"), "{title}: {said}");
        let (status, _) = signalled(killed, title, "-KILL");
        assert_eq!(status.code(), None, "{title}");
    }
    for folder in [interrupted, killed] {
        let output = drafthorse(folder, &COMMAND).output().unwrap();
        assert!(output.status.success(), "{}", stderr(&output));
        assert_same(&results(folder), &expected);
    }
}

#[test]
fn a_budget_is_measured_once_and_kept() {
    let folder = tempfile::tempdir().unwrap();
    tiny::write(folder.path());
    let settings = ["evaluate.fan_out=geometric", "evaluate.budget=auto", "prune.remove=0", "train.steps=10"];
    let command: Vec<&str> = COMMAND.into_iter().chain(settings.iter().flat_map(|setting| ["--set", setting])).collect();
    let (status, said) = interrupt::after(&mut drafthorse(folder.path(), &command), "\"progress\":\"step-000010\"", "-INT");
    assert_eq!(status.code(), Some(3), "{said}");
    assert_eq!(said.matches("a verification takes").count(), 1, "two checkpoints of one depth: {said}");
    assert_eq!(said.matches("blocks of 3 held-out responses: temperatures").count(), 2, "{said}");

    // Another moment would have measured something else.
    let scores = folder.path().join("runs/tiny/scores");
    let read = |name: &str| -> serde_json::Value { serde_json::from_slice(&fs::read(scores.join(name)).unwrap()).unwrap() };
    let mut budgets = read("budgets.measured");
    let measured = budgets["4"]["blocks"].as_u64().unwrap();
    assert_eq!(read("step-000000.json")["budget"], budgets["4"]);
    budgets["4"]["blocks"] = serde_json::json!(measured + 3);
    fs::write(scores.join("budgets.measured"), budgets.to_string()).unwrap();
    let output = drafthorse(folder.path(), &command).output().unwrap();
    assert!(output.status.success() && !stderr(&output).contains("a verification takes"), "{}", stderr(&output));
    let score = read("step-000010.json");
    assert_eq!(score["fan_out"], format!("geometric, {} blocks (auto)", measured + 3));
    assert!(score["calibration"]["temperatures"].as_array().is_some_and(|it| it.len() == 4), "{score}");
    for fan_out in ["rectangle", "geometric", "best_first"] {
        let sizes = score["hit_rate_by_blocks"][fan_out].as_array().unwrap();
        assert_eq!(sizes.iter().map(|size| size["blocks"].as_u64().unwrap()).collect::<Vec<_>>(), [3, 7, 15, 24, 31]);
    }
    let report = fs::read_to_string(folder.path().join("runs/tiny/report.html")).unwrap();
    assert!(report.contains("has a continuation ready for"));

    // Blocks of another shape would be scored as if they were the checkpoint's.
    let other = ["evaluate", "runs/tiny", "--set", "drafter.anchor_sees=block"];
    let output = drafthorse(folder.path(), &other).output().unwrap();
    assert_eq!(output.status.code(), Some(1), "{}", stderr(&output));
    assert!(stderr(&output).contains("drafter.anchor_sees: "), "{}", stderr(&output));
}

#[test]
fn training_without_the_state_to_go_on_from_keeps_its_checkpoints() {
    let folder = tempfile::tempdir().unwrap();
    tiny::write(folder.path());
    assert_eq!(signalled(folder.path(), "train", "-INT").0.code(), Some(3));
    let latest = folder.path().join("runs/tiny/train/latest");
    fs::remove_dir_all(latest.join("state")).unwrap();
    let output = drafthorse(folder.path(), &COMMAND).output().unwrap();
    assert_eq!(output.status.code(), Some(1));
    assert!(stderr(&output).contains("no `state` to go on from"), "{}", stderr(&output));
    assert!(latest.join("model.safetensors").exists());
}

#[test]
fn what_changed_in_the_recipe_is_named_and_nothing_is_overwritten() {
    let folder = tempfile::tempdir().unwrap();
    tiny::write(folder.path());
    let output = drafthorse(folder.path(), &["run", "recipe.toml", "--until", "train"]).output().unwrap();
    assert!(output.status.success(), "{}", stderr(&output));
    let weights = || fs::read(folder.path().join("runs/tiny/train/latest/model.safetensors")).unwrap();
    let recipe = || fs::read_to_string(folder.path().join("runs/tiny/recipe.toml")).unwrap();
    let before = (weights(), recipe());
    let changed = ["run", "recipe.toml", "--until", "train", "--set", "train.learning_rate=1e-4"];
    let output = drafthorse(folder.path(), &changed).output().unwrap();
    assert_eq!(output.status.code(), Some(1));
    assert!(stderr(&output).contains("train.learning_rate") && stderr(&output).contains("--restart"), "{}", stderr(&output));
    assert!((weights(), recipe()) == before);
    let output = drafthorse(folder.path(), &[&changed[..], &["--restart", "train"]].concat()).output().unwrap();
    assert!(output.status.success(), "{}", stderr(&output));
    assert!(weights() != before.0 && recipe() != before.1);
    let events = fs::read_dir(folder.path().join("runs/tiny/events")).unwrap().count();
    assert_eq!(events, 1, "the old steps' events are gone with them");
}

#[test]
fn a_run_that_could_not_be_pruned_ends_before_it_trains() {
    let folder = tempfile::tempdir().unwrap();
    tiny::write(folder.path());
    let output = drafthorse(folder.path(), &["run", "recipe.toml", "--set", "data.limit=1"]).output().unwrap();
    assert_eq!(output.status.code(), Some(1), "{}", stderr(&output));
    assert!(stderr(&output).contains("no response is held out of 1, but pruning measures layers"), "{}", stderr(&output));
    assert!(!folder.path().join("runs/tiny/train/step-000000").exists());
}
