//! Several ranks train as one: same losses and weights, one fate.

use std::collections::BTreeMap;
use std::fs;
use std::path::Path;
use std::process::{Command, Stdio};

use model::tensor_file::load_safetensors;
use serde_json::Value;
use tempfile::TempDir;
use torch::tch::Kind;

use super::whole_runs::CLOCK;
use super::{drafthorse, stderr, tiny};

/// Settings under which a tiny run of 20 steps saves and replays on its way.
const STEPS: [&str; 8] = [
    "--set",
    "train.steps=20",
    "--set",
    "train.save_every=8",
    "--set",
    "train.evaluate_every=10",
    "--set",
    "train.learning_rate=5e-4",
];

/// A folder with a tiny recipe and its responses.
pub(crate) fn regenerated() -> TempDir {
    let folder = tempfile::tempdir().unwrap();
    tiny::write(folder.path());
    let output = drafthorse(folder.path(), &["regenerate", "recipe.toml"]).output().unwrap();
    assert!(output.status.success(), "{}", stderr(&output));
    folder
}

/// The same folder again, to go another way from there.
pub(crate) fn copy_of(folder: &Path) -> TempDir {
    let copy = tempfile::tempdir().unwrap();
    let from = format!("{}/.", folder.display());
    assert!(Command::new("cp").args(["-a", &from]).arg(copy.path()).status().unwrap().success());
    copy
}

/// The command that trains with so many ranks, one of them without a launcher.
pub(crate) fn training(folder: &Path, ranks: usize, settings: &[&str]) -> Command {
    let train = [&["train", "recipe.toml"], settings].concat();
    if ranks == 1 {
        return drafthorse(folder, &train);
    }
    let count = ranks.to_string();
    drafthorse(folder, &[&["launch", "--nproc", &count, "--"], &train[..]].concat())
}

fn train(folder: &Path, ranks: usize, settings: &[&str]) {
    let output = training(folder, ranks, settings).output().unwrap();
    assert!(output.status.success(), "{ranks} ranks: {}", stderr(&output));
}

/// The losses of a run by step, without what depends on the machine.
pub(crate) fn metrics(folder: &Path) -> BTreeMap<u64, Value> {
    let text = fs::read_to_string(folder.join("runs/tiny/train/metrics.jsonl")).unwrap();
    let lines = text.lines().map(|line| serde_json::from_str::<Value>(line).unwrap());
    let mut steps = BTreeMap::new();
    for mut line in lines.filter(|line| line.get("loss").is_some()) {
        line.as_object_mut().unwrap().retain(|key, _| !CLOCK.contains(&key.as_str()));
        let step = line["step"].as_u64().unwrap();
        assert!(steps.insert(step, line).is_none(), "step {step} is there twice");
    }
    steps
}

/// Refuses metrics that differ by more than rounding.
fn assert_same_metrics(folder: &Path, reference: &Path) {
    let (ours, expected) = (metrics(folder), metrics(reference));
    assert!(ours.keys().eq(expected.keys()) && !ours.is_empty());
    for (step, expected) in &expected {
        let value = |line: &Value, name: &str| line[name].as_f64().unwrap();
        let total = value(expected, "loss");
        // Rounding is enlarged by the optimiser, which divides by small moments, the norm's most. How much depends on the number of cores
        // as well; a response too many or a wrong divisor shows in the second digit.
        let norm = value(expected, "gradient_norm");
        for (name, within) in [
            ("loss", 5e-5 * total),
            ("loss_diffusion", 5e-5 * total),
            ("loss_autoregressive", 5e-5 * total),
            ("gradient_norm", 1e-3 * norm),
        ] {
            let (ours, expected) = (value(&ours[step], name), value(expected, name));
            assert!((ours - expected).abs() <= within, "step {step}: {name} {ours} against {expected}");
        }
    }
}

/// How far the final weights are from the reference's, relative to their size.
fn distance(folder: &Path, reference: &Path) -> f64 {
    let load = |folder: &Path| load_safetensors(&folder.join("runs/tiny/train/latest/model.safetensors")).unwrap();
    let (ours, expected) = (load(folder), load(reference));
    assert!(ours.keys().eq(expected.keys()));
    let squared = |tensor: &torch::tch::Tensor| f64::try_from(tensor.square().sum(Kind::Double)).unwrap();
    let (mut difference, mut size) = (0.0, 0.0);
    for (name, expected) in &expected {
        difference += squared(&(&ours[name] - expected));
        size += squared(expected);
    }
    (difference / size).sqrt()
}

#[test]
fn one_two_and_four_ranks_train_alike_and_each_holds_its_share() {
    let base = regenerated();
    // Several forwards a step; and with one response in each step all ranks but one have nothing to do.
    for settings in [&["--set", "train.forward_rows=100"], &["--set", "train.batch_responses=1"]] {
        let settings = [&STEPS[..], settings].concat();
        let alone = copy_of(base.path());
        train(alone.path(), 1, &settings);
        for ranks in [2, 4] {
            let folder = copy_of(base.path());
            train(folder.path(), ranks, &settings);
            assert_same_metrics(folder.path(), alone.path());
            let distance = distance(folder.path(), alone.path());
            assert!(distance < 1e-5, "{ranks} ranks: the final weights differ by {distance:e}");
            let sizes = |folder: &Path| -> Vec<u64> {
                let entries = fs::read_dir(folder.join("runs/tiny/train/latest/state")).unwrap().flatten();
                let shares = entries.filter(|entry| entry.file_name().to_str().unwrap().starts_with("rank-"));
                shares.map(|share| share.metadata().unwrap().len()).collect()
            };
            let (shares, whole) = (sizes(folder.path()), sizes(alone.path()));
            assert_eq!((shares.len(), whole.len()), (ranks, 1));
            for share in shares {
                let ratio = share as f64 * ranks as f64 / whole[0] as f64;
                assert!((ratio - 1.0).abs() < 0.01, "a share of {share} bytes, {} in all", whole[0]);
            }
        }
    }
}

#[test]
fn a_run_of_two_ranks_goes_on_with_one_and_then_with_four() {
    let base = regenerated();
    let alone = copy_of(base.path());
    train(alone.path(), 1, &STEPS);
    let folder = copy_of(base.path());
    // The stage is cut short by what a checkpoint at its end would hide: a run of fewer steps is another run.
    for ranks in [2, 1] {
        let mut command = training(folder.path(), ranks, &[&STEPS[..], &["--log-format", "json"]].concat());
        let said = super::interrupt::after(&mut command, "\"progress\":\"train\"", "-TERM");
        assert_eq!(said.0.code(), Some(3), "{}", said.1);
    }
    train(folder.path(), 4, &STEPS);
    assert_same_metrics(folder.path(), alone.path());
    let distance = distance(folder.path(), alone.path());
    assert!(distance < 1e-5, "the final weights differ by {distance:e}");
}

/// Starts ranks of training by hand, each through a shell that may hinder it first; gives exit code and stderr of each.
fn by_hand(folder: &Path, port: u16, hinder: &dyn Fn(usize) -> String) -> Vec<(Option<i32>, String)> {
    by_hand_in("train", folder, port, hinder)
}

/// The same for any stage.
pub(crate) fn by_hand_in(stage: &str, folder: &Path, port: u16, hinder: &dyn Fn(usize) -> String) -> Vec<(Option<i32>, String)> {
    let children: Vec<_> = (0..2)
        .map(|rank| {
            let script = format!("{}; exec \"$0\" \"$@\"", hinder(rank));
            let binary = env!("CARGO_BIN_EXE_drafthorse");
            let mut command = Command::new("sh");
            command.args(["-c", &script, binary, stage, "recipe.toml"]).args(STEPS).current_dir(folder);
            let place = [("RANK", rank), ("LOCAL_RANK", rank), ("WORLD_SIZE", 2), ("MASTER_PORT", usize::from(port))];
            command.env("MASTER_ADDR", "127.0.0.1").envs(place.map(|(name, value)| (name, value.to_string())));
            command.stderr(Stdio::piped()).stdout(Stdio::null()).spawn().unwrap()
        })
        .collect();
    let outputs = children.into_iter().map(|child| child.wait_with_output().unwrap());
    outputs.map(|output| (output.status.code(), stderr(&output))).collect()
}

pub(crate) fn free_port() -> u16 {
    std::net::TcpListener::bind("127.0.0.1:0").unwrap().local_addr().unwrap().port()
}

#[test]
fn a_full_disk_of_one_rank_ends_all_of_them_with_its_error_and_keeps_what_was_saved() {
    let folder = regenerated();
    // Files of at most 1 MB (2,000 blocks of 512 bytes), less than a share of the state; a plain error instead of a signal.
    let outcomes =
        by_hand(folder.path(), free_port(), &|rank| (if rank == 1 { "trap '' XFSZ; ulimit -f 2000" } else { ":" }).to_string());
    for (rank, (code, said)) in outcomes.iter().enumerate() {
        assert_eq!(*code, Some(1), "rank {rank}: {said}");
        assert!(said.contains("File too large") && said.contains("rank-1.safetensors"), "rank {rank}: {said}");
    }
    assert!(outcomes[0].1.contains("rank 1"), "{}", outcomes[0].1);
    let train = folder.path().join("runs/tiny/train");
    assert!(fs::symlink_metadata(train.join("latest")).is_err() && !train.join("step-000008").exists());
    // Nothing is left that the next start could stumble over.
    self::train(folder.path(), 2, &STEPS);
    assert_eq!(metrics(folder.path()).len(), 20);
}

/// Two ranks by hand, the second in another folder after a shell command there; gives exit code and stderr of each.
fn in_two_folders(folder: &Path, other: &Path, before: &'static str) -> Vec<(Option<i32>, String)> {
    fs::create_dir_all(other.join("runs/tiny/train")).unwrap();
    let other = other.display().to_string();
    by_hand(folder, free_port(), &|rank| if rank == 1 { format!("cd '{other}'; {before}") } else { ":".to_string() })
}

#[test]
fn ranks_that_would_train_something_else_are_refused_by_name() {
    let folder = regenerated();
    let changes = [
        // Other examples, by another hold-out; another plan; another start; another objective.
        "sed -i 's/^holdout = 0.2/holdout = 0.4/' recipe.toml",
        "sed -i 's/^anchors = 6/anchors = 5/' recipe.toml",
        "sed -i 's/^block_size = 4/from_scratch = true\\nblock_size = 4/' recipe.toml",
        "sed -i 's/^objective = \"target\"/objective = \"tokens\"/' recipe.toml",
    ];
    for change in changes {
        let other = copy_of(folder.path());
        for (code, said) in in_two_folders(folder.path(), other.path(), change) {
            assert_eq!(code, Some(1), "{change}: {said}");
            assert!(said.contains("rank 1 trains on other data or by another recipe"), "{change}: {said}");
        }
    }
}

#[test]
fn ranks_on_two_file_systems_end_with_what_is_missing() {
    let folder = regenerated();
    let other = copy_of(folder.path());
    for (code, said) in in_two_folders(folder.path(), other.path(), ":") {
        assert_eq!(code, Some(1), "{said}");
        assert!(said.contains("rank-1.safetensors"), "{said}");
    }
    assert!(fs::symlink_metadata(folder.path().join("runs/tiny/train/latest")).is_err());
}

#[test]
fn checkpoints_are_scored_while_training_and_the_evaluation_finds_their_scores() {
    let folder = regenerated();
    let every = ["--set", "evaluate.every=8"];
    let settings = [&STEPS[..], &every].concat();
    train(folder.path(), 2, &settings);
    let scores = folder.path().join("runs/tiny/scores");
    let score = |step: u64| fs::read_to_string(scores.join(format!("step-{step:06}.json")));
    let while_training = [8, 16].map(|step| score(step).unwrap());
    assert!(score(20).is_err());
    let run = [&["run", "recipe.toml", "--set", "prune.remove=0"], &settings[..]].concat();
    let output = drafthorse(folder.path(), &run).output().unwrap();
    assert!(output.status.success(), "{}", stderr(&output));
    // Scores that are there are kept, those that are missing are made, and all are in the table.
    assert!([8, 16].map(|step| score(step).unwrap()) == while_training && score(20).is_ok() && score(0).is_ok());
    let table = String::from_utf8(output.stdout).unwrap();
    for step in [0, 8, 16, 20] {
        assert!(table.contains(&format!("step-{step:06}")), "{table}");
    }
}

#[test]
fn a_second_process_follows_a_run_and_scores_what_appears() {
    let folder = regenerated();
    let nothing = drafthorse(folder.path(), &["evaluate", "recipe.toml", "--set", "name=other", "--follow"]).output().unwrap();
    assert_eq!(nothing.status.code(), Some(2), "{}", stderr(&nothing));
    assert!(stderr(&nothing).contains("no run `runs/other` here to follow"), "{}", stderr(&nothing));
    // A whole run, which scores as well in the end: the two take turns.
    let whole = [&["run", "recipe.toml", "--set", "prune.remove=0"], &STEPS[..]].concat();
    let mut run = drafthorse(folder.path(), &whole).stderr(Stdio::null()).stdout(Stdio::null()).spawn().unwrap();
    // One that begins too early would find nobody at work.
    while !folder.path().join("runs/tiny/train/step-000000").exists() {
        std::thread::sleep(std::time::Duration::from_millis(20));
    }
    let follower = drafthorse(folder.path(), &["evaluate", "runs/tiny", "--follow"]).output().unwrap();
    assert!(follower.status.success(), "{}", stderr(&follower));
    assert!(stderr(&follower).contains("no process works on the run any more"), "{}", stderr(&follower));
    assert!(run.wait().unwrap().success());
    // The untrained checkpoint and the last one stay; those between may be cleared away before they are seen.
    for step in [0, 20] {
        assert!(folder.path().join(format!("runs/tiny/scores/step-{step:06}.json")).exists(), "{}", stderr(&follower));
    }
}

/// Needs a Python with torch (`PYTHON`, else `python3`) for its launcher; without one it says so and passes.
#[test]
fn torchrun_starts_ranks_as_the_launcher_does() {
    let python = std::env::var("PYTHON").unwrap_or_else(|_| "python3".to_string());
    let found = Command::new(&python).args(["-c", "import torch.distributed.run"]).stderr(Stdio::null()).status();
    if !found.is_ok_and(|status| status.success()) {
        eprintln!("skipped: `{python}` has no torch; set PYTHON to one that has");
        return;
    }
    let base = regenerated();
    let [launched, torchrun] = [(); 2].map(|()| copy_of(base.path()));
    train(launched.path(), 2, &STEPS);
    let run =
        ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", "--no-python", env!("CARGO_BIN_EXE_drafthorse")];
    let mut command = Command::new(python);
    command.args(run).args(["train", "recipe.toml"]).args(STEPS).current_dir(torchrun.path());
    let output = command.output().unwrap();
    assert!(output.status.success(), "{}", stderr(&output));
    let weights = |folder: &Path| fs::read(folder.join("runs/tiny/train/latest/model.safetensors")).unwrap();
    assert!(weights(launched.path()) == weights(torchrun.path()), "the final weights differ");
}
