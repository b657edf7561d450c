//! Fault campaigns that take minutes: `make soak`.

use std::collections::BTreeMap;
use std::fs;
use std::path::Path;
use std::process::{Command, Stdio};
use std::time::{Duration, Instant, SystemTime};

use super::ranks::{metrics, regenerated, training};
use super::stderr;

const KILLS: usize = 50;

/// Long enough that fifty kills find it at work, and saving so often that many hit a save.
const LONG: [&str; 8] = [
    "--set",
    "train.steps=1500",
    "--set",
    "train.batch_responses=2",
    "--set",
    "train.save_every=3",
    "--set",
    "train.evaluate_every=50",
];

/// A linear congruential generator is random enough for moments, and repeats.
pub(super) struct Moments(pub(super) u64);

impl Moments {
    pub(super) fn below(&mut self, bound: u64) -> u64 {
        self.0 = self.0.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
        (self.0 >> 33) % bound
    }
}

/// The processes that a process started.
fn children(process: u32) -> Vec<u32> {
    let text = fs::read_to_string(format!("/proc/{process}/task/{process}/children")).unwrap_or_default();
    text.split_whitespace().map(|child| child.parse().unwrap()).collect()
}

fn kill(processes: &[u32]) {
    let list: Vec<String> = processes.iter().map(u32::to_string).collect();
    // One of them may have ended by itself.
    let _ = Command::new("sh").args(["-c", &format!("kill -KILL {}", list.join(" "))]).stderr(Stdio::null()).status().unwrap();
}

/// The bytes of everything that must come out the same.
fn outcome(folder: &Path) -> (Vec<u8>, BTreeMap<u64, serde_json::Value>) {
    (fs::read(folder.join("runs/tiny/train/latest/model.safetensors")).unwrap(), metrics(folder))
}

/// Whether a checkpoint is being written that was begun after this moment, or was when its writer was killed.
fn is_saving(train: &Path, since: SystemTime) -> bool {
    let is_partial = |entry: fs::DirEntry| {
        let begun = entry.metadata().and_then(|metadata| metadata.modified());
        entry.file_name().to_string_lossy().ends_with(".partial") && begun.is_ok_and(|begun| begun > since)
    };
    fs::read_dir(train).into_iter().flatten().flatten().any(is_partial)
}

fn killed_fifty_times_equals_left_alone(ranks: usize) {
    let base = regenerated();
    let [alone, killed] = [(); 2].map(|()| super::ranks::copy_of(base.path()));
    let begun = Instant::now();
    let output = training(alone.path(), ranks, &LONG).output().unwrap();
    assert!(output.status.success(), "{}", stderr(&output));
    println!("{ranks} ranks: uninterrupted in {:.0} s", begun.elapsed().as_secs_f64());

    let mut moments = Moments(ranks as u64);
    let (mut while_saving, mut steps) = (0, Vec::new());
    let train = killed.path().join("runs/tiny/train");
    for count in 0..KILLS {
        let started = SystemTime::now();
        let mut child = training(killed.path(), ranks, &LONG).stderr(Stdio::null()).stdout(Stdio::null()).spawn().unwrap();
        std::thread::sleep(Duration::from_millis(400 + moments.below(2600)));
        // Saves are short: every fifth kill waits for one.
        let deadline = Instant::now() + Duration::from_secs(20);
        while count % 5 == 4 && !is_saving(&train, started) && Instant::now() < deadline {
            std::thread::sleep(Duration::from_micros(500));
        }
        assert!(child.try_wait().unwrap().is_none(), "it was over after {count} kills: train longer");
        let ranks_now = children(child.id());
        // All at once, as when the power goes; or one rank alone, which takes the others along.
        match (ranks, moments.below(3)) {
            (1, _) => kill(&[child.id()]),
            (_, 0) if !ranks_now.is_empty() => kill(&ranks_now[..1 + moments.below(2) as usize % ranks_now.len()]),
            _ => kill(&[&[child.id()], &ranks_now[..]].concat()),
        }
        child.wait().unwrap();
        while_saving += usize::from(is_saving(&train, started));
        steps.push(fs::read_link(train.join("latest")).map_or("none".to_string(), |link| link.display().to_string()));
    }
    println!("{ranks} ranks: {KILLS} kills, {while_saving} of them amid a save; latest after each: {}", steps.join(" "));
    assert!(while_saving > 3, "too few kills hit a save");
    let output = training(killed.path(), ranks, &LONG).output().unwrap();
    assert!(output.status.success(), "{}", stderr(&output));
    let (one, other) = (outcome(alone.path()), outcome(killed.path()));
    assert!(one.0 == other.0, "the final weights differ");
    assert_eq!(one.1, other.1);
}

#[test]
#[ignore = "takes minutes: make soak"]
fn soak_one_rank_killed_at_fifty_moments_ends_as_left_alone() {
    killed_fifty_times_equals_left_alone(1);
}

#[test]
#[ignore = "takes minutes: make soak"]
fn soak_two_ranks_killed_at_fifty_moments_end_as_left_alone() {
    killed_fifty_times_equals_left_alone(2);
}

/// Two removals and a swap, with recoveries that save often.
const PRUNING: [&str; 10] = [
    "--set",
    "prune.remove=2",
    "--set",
    "prune.recovery_steps=100",
    "--set",
    "train.save_every=4",
    "--set",
    "prune.anchors=60",
    "--set",
    "prune.swap=true",
];

#[test]
#[ignore = "takes minutes: make soak"]
fn soak_pruning_killed_at_twenty_moments_ends_as_left_alone() {
    const KILLS: usize = 20;
    let base = regenerated();
    let output = training(base.path(), 1, &PRUNING[4..6]).output().unwrap();
    assert!(output.status.success(), "{}", stderr(&output));
    let [alone, killed] = [(); 2].map(|()| super::ranks::copy_of(base.path()));
    let prune = |folder: &Path| super::drafthorse(folder, &[&["prune", "recipe.toml"], &PRUNING[..]].concat());
    let begun = Instant::now();
    let output = prune(alone.path()).output().unwrap();
    assert!(output.status.success(), "{}", stderr(&output));
    let whole = begun.elapsed();
    println!("pruning: uninterrupted in {:.0} s", whole.as_secs_f64());

    let mut moments = Moments(5);
    let ledger = killed.path().join("runs/tiny/prune/ledger.jsonl");
    let mut lines = Vec::new();
    for count in 0..KILLS {
        let mut child = prune(killed.path()).stderr(Stdio::null()).stdout(Stdio::null()).spawn().unwrap();
        // So much for the start, then on average a part of the whole that twenty kills find at all of its stages.
        std::thread::sleep(Duration::from_millis(500 + moments.below(whole.as_millis() as u64 / 9)));
        if child.try_wait().unwrap().is_some() {
            assert!(count > 12, "over after {count} kills: recover longer");
            break;
        }
        kill(&[child.id()]);
        child.wait().unwrap();
        lines.push(fs::read_to_string(&ledger).map_or(0, |text| text.lines().count()).to_string());
    }
    println!("pruning: {} kills; lines of the ledger after each: {}", lines.len(), lines.join(" "));
    let output = prune(killed.path()).output().unwrap();
    assert!(output.status.success(), "{}", stderr(&output));
    for file in ["ledger.jsonl", "layers-03/model.safetensors", "layers-02/model.safetensors", "layers-02/drafter.json"] {
        let [one, other] = [&alone, &killed].map(|folder| fs::read(folder.path().join("runs/tiny/prune").join(file)).unwrap());
        assert!(one == other, "{file} differs");
    }
    let swapped = "layers-02-swapped/model.safetensors";
    let [one, other] = [&alone, &killed].map(|folder| fs::read(folder.path().join("runs/tiny/prune").join(swapped)).ok());
    assert!(one == other, "{swapped} differs");
}
