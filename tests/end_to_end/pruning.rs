//! Pruning that ends by speed, and with a swap.

use std::fs;
use std::path::Path;

use serde_json::Value;

use super::ranks::{copy_of, regenerated, training};
use super::{drafthorse, interrupt, stderr};

const SETTINGS: [&str; 8] =
    ["--set", "prune.remove=2", "--set", "prune.recovery_steps=8", "--set", "train.steps=10", "--set", "train.save_every=10"];

fn ledger(folder: &Path) -> Vec<Value> {
    let text = fs::read_to_string(folder.join("runs/tiny/prune/ledger.jsonl")).unwrap();
    text.lines().map(|line| serde_json::from_str(line).unwrap()).collect()
}

fn events<'l>(ledger: &'l [Value], name: &str) -> Vec<&'l Value> {
    ledger.iter().filter(|line| line["event"] == name).collect()
}

#[test]
fn pruning_ends_by_speed_and_with_a_swap() {
    let trained = regenerated();
    let output = training(trained.path(), 1, &SETTINGS[4..]).output().unwrap();
    assert!(output.status.success(), "{}", stderr(&output));

    let by_speed = copy_of(trained.path());
    let settings = ["prune.stop=speed", "evaluate.fan_out=best_first", "evaluate.budget=auto"];
    let settings: Vec<&str> = settings.iter().flat_map(|setting| ["--set", setting]).collect();
    let command = [&["run", "recipe.toml", "--log-format", "json"], &SETTINGS[..], &settings].concat();
    let start = || drafthorse(by_speed.path(), &command);
    let (status, said) = interrupt::after(&mut start(), "\"progress\":\"layers\"", "-INT");
    assert!(status.code() == Some(3) && said.contains("timing the target and drafters of 2 to 4 layers"), "{said}");
    let output = start().output().unwrap();
    let said = stderr(&output);
    assert!(output.status.success(), "{said}");
    assert!(!said.contains("timing the target") && said.contains("a verification takes"), "times are kept: {said}");
    assert!(said.contains("4 layers: "), "what was predicted before the interruption is told again: {said}");
    let lines = ledger(by_speed.path());
    assert_eq!(events(&lines, "timed").len(), 1);
    let layers: Vec<u64> =
        events(&lines, "timed")[0]["drafters"].as_array().unwrap().iter().map(|it| it["layers"].as_u64().unwrap()).collect();
    assert_eq!(layers, [2, 3, 4]);
    // It ends with the first that is no faster, or with as many as may go.
    let speeds: Vec<f64> = events(&lines, "predicted").iter().map(|it| it["tokens_per_second"].as_f64().unwrap()).collect();
    let kept: Vec<bool> = events(&lines, "recovered").iter().map(|it| it["kept"].as_bool().unwrap()).collect();
    assert_eq!(kept, speeds.windows(2).map(|pair| pair[1] > pair[0]).collect::<Vec<_>>(), "{speeds:?}");
    assert!(kept.len() == 2 || kept == [false], "{kept:?}");
    assert!(kept.iter().all(|&kept| kept) != said.contains("so pruning ends here"), "{kept:?}: {said}");

    // Timing that takes long ends soon after it is asked to, and leaves nothing half-measured.
    let slow = copy_of(trained.path());
    let settings = ["prune.stop=speed", "evaluate.fan_out=best_first", "evaluate.budget=8", "evaluate.concurrency=64"];
    let settings = [&settings[..], &["evaluate.hardware=[]"]].concat();
    let settings: Vec<&str> = settings.iter().flat_map(|setting| ["--set", setting]).collect();
    let command = [&["run", "recipe.toml"], &SETTINGS[..], &settings].concat();
    let (status, said) = interrupt::after(&mut drafthorse(slow.path(), &command), "timing the target", "-INT");
    assert!(status.code() == Some(3) && !said.contains("a verification takes"), "{said}");
    assert!(!slow.path().join("runs/tiny/prune/ledger.jsonl").exists());

    // What keeps τ is kept however slow, and a swap is tried on the last of them.
    let swapped = copy_of(trained.path());
    let command = [&["run", "recipe.toml", "--set", "prune.swap=true"], &SETTINGS[..]].concat();
    let output = drafthorse(swapped.path(), &command).output().unwrap();
    let said = stderr(&output);
    assert!(output.status.success(), "{said}");
    let lines = ledger(swapped.path());
    assert_eq!((events(&lines, "swap_measured").len(), events(&lines, "timed").len()), (2, 0));
    let end = events(&lines, "swapped")[0];
    let kept = end["kept"].as_bool().unwrap();
    assert_eq!(kept, end["tau"].as_f64() > end["tau_before"].as_f64(), "{end}");
    let run = swapped.path().join("runs/tiny");
    assert_eq!(run.join("prune/layers-02-swapped").exists(), kept);
    assert_eq!(run.join("scores/layers-02-swapped.json").exists(), kept, "every checkpoint has its score");
    assert!(run.join("scores/layers-02.json").exists());
    assert!(said.contains(if kept { "kept as layers-02-swapped" } else { "no better, so it goes" }), "{said}");
    let steps = fs::read_to_string(run.join("train/metrics.jsonl")).unwrap();
    assert!(steps.contains("recover-02-swapped"), "{steps}");
    let left = ["recover", "swap"];
    let names = fs::read_dir(run.join("prune")).unwrap().map(|it| it.unwrap().file_name().into_string().unwrap());
    assert!(!names.into_iter().any(|name| left.iter().any(|left| name.starts_with(left))));

    // As a kill behind a swap that was no better leaves it: what the swap's recovery took is not forgotten.
    let path = run.join("prune/ledger.jsonl");
    let (others, swap) = text_and_last_line(&path);
    fs::write(&path, format!("{others}{}\n", swap.replace("\"kept\":true", "\"kept\":false"))).unwrap();
    let _ = fs::remove_dir_all(run.join("prune/layers-02-swapped"));
    let path = run.join("prune").join(data::manifest::FILE_NAME);
    let mut manifest: Value = serde_json::from_slice(&fs::read(&path).unwrap()).unwrap();
    manifest["complete"] = false.into();
    fs::write(&path, manifest.to_string()).unwrap();
    let prune = |settings: &[&str]| {
        let command = [&["run", "recipe.toml", "--until", "prune"], &SETTINGS[..], settings].concat();
        let output = drafthorse(swapped.path(), &command).output().unwrap();
        assert!(output.status.success(), "{}", stderr(&output));
        fs::read_to_string(run.join("train/metrics.jsonl")).unwrap()
    };
    assert_eq!(prune(&["--set", "prune.swap=true"]), steps);
    assert!(!run.join("prune/layers-02-swapped").exists());
    // A pruning of nothing leaves nothing of the one before it.
    let steps = prune(&["--restart", "prune", "--set", "prune.remove=0"]);
    assert!(steps.contains("\"train\"") && !steps.contains("recover"), "{steps}");
}

/// A file's last line, and what is before it.
fn text_and_last_line(path: &Path) -> (String, String) {
    let text = fs::read_to_string(path).unwrap();
    let last = text.lines().last().unwrap().to_string();
    (text[..text.len() - last.len() - 1].to_string(), last)
}
