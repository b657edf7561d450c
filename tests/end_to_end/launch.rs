//! The launcher from outside: what it refuses, whose output goes where, and that no rank is left behind.

use std::fs;
use std::io::{BufRead, BufReader, Read};
use std::path::Path;
use std::process::{Command, ExitStatus, Stdio};
use std::thread;
use std::time::{Duration, Instant};

use super::{drafthorse, stderr, tiny};

/// A run whose progress tells how far it is, after `launch` and its options.
const RUN: [&str; 5] = ["--", "run", "recipe.toml", "--log-format", "json"];

/// The first and the last piece of work of a tiny run.
const FIRST_PROGRESS: &str = "\"progress\":\"regenerate\"";
const LAST_PROGRESS: &str = "\"progress\":\"layers-03\"";

/// Launches a run and calls `disturb` with the launcher's process id once the run makes progress. Gives how the launcher ended,
/// and what came on stderr until nobody was left who could write there: neither the launcher nor a rank that writes there itself.
fn disturbed(folder: &Path, options: &[&str], disturb: impl Fn(u32)) -> (ExitStatus, String) {
    tiny::write(folder);
    let arguments = [&["launch"], options, &RUN].concat();
    let mut child = drafthorse(folder, &arguments).stderr(Stdio::piped()).stdout(Stdio::null()).spawn().unwrap();
    let mut lines = BufReader::new(child.stderr.take().unwrap());
    let mut said = String::new();
    while !said.contains(FIRST_PROGRESS) {
        assert!(lines.read_line(&mut said).unwrap() > 0, "no progress was made:\n{said}");
    }
    disturb(child.id());
    lines.read_to_string(&mut said).unwrap();
    (child.wait().unwrap(), said)
}

fn signal(signal: &str, process: u32) {
    // The shell's own `kill`: a small system may have no other.
    assert!(Command::new("sh").args(["-c", &format!("kill {signal} {process}")]).status().unwrap().success());
}

/// The process that a launcher started as this rank, waited for while there is none.
fn process_of_rank(launcher: u32, rank: usize) -> u32 {
    let is_rank = |child: &u32| {
        let variables = fs::read(format!("/proc/{child}/environ")).unwrap();
        variables.split(|&byte| byte == 0).any(|variable| variable == format!("RANK={rank}").as_bytes())
    };
    let begun = Instant::now();
    while begun.elapsed() < Duration::from_secs(30) {
        let children = fs::read_to_string(format!("/proc/{launcher}/task/{launcher}/children")).unwrap();
        if let Some(child) = children.split_whitespace().map(|child| child.parse().unwrap()).find(is_rank) {
            return child;
        }
        thread::sleep(Duration::from_millis(10));
    }
    panic!("launcher {launcher} has no rank {rank}");
}

#[test]
fn what_cannot_be_launched_exits_2_and_says_what_to_give() {
    let folder = tempfile::tempdir().unwrap();
    let cases: [(&[&str], &str); 7] = [
        (&["--nproc", "2"], "drafthorse launch --nproc 2 -- run recipe.toml"),
        (&["--nproc", "0", "--", "check", "recipe.toml"], "--nproc"),
        (&["--nproc", "1000000", "--", "check", "recipe.toml"], "--nproc"),
        (&["--nnodes", "2", "--", "check", "recipe.toml"], "--node-rank (0 on the first node) and --rendezvous"),
        (&["--node-rank", "1", "--", "check", "recipe.toml"], "--nnodes 1"),
        (&["--rendezvous", "node0", "--", "check", "recipe.toml"], "HOST:PORT"),
        (&["--", "launch", "--", "check", "recipe.toml"], "cannot launch itself"),
    ];
    for (arguments, expected) in cases {
        let output = drafthorse(folder.path(), &[&["launch"], arguments].concat()).output().unwrap();
        let message = stderr(&output);
        assert_eq!(output.status.code(), Some(2), "{arguments:?}: {message}");
        assert!(message.contains(expected) && !message.contains("panicked"), "{arguments:?}: {message}");
        assert_eq!(output.stdout, b"", "{arguments:?}");
    }
}

#[test]
fn a_launched_rank_does_not_launch() {
    let folder = tempfile::tempdir().unwrap();
    let arguments = ["launch", "--nproc", "1", "--", "--log-format", "text", "launch", "--", "check", "absent.toml"];
    let output = drafthorse(folder.path(), &arguments).output().unwrap();
    let message = stderr(&output);
    assert!(output.status.code() == Some(2) && message.contains("launch"), "{message}");
    assert!(!message.contains("absent.toml"), "the inner launcher started a rank: {message}");
}

#[test]
fn the_help_teaches_every_way_to_start() {
    let output = drafthorse(&super::root(), &["launch", "--help"]).output().unwrap();
    let help = String::from_utf8(output.stdout).unwrap();
    for expected in
        ["drafthorse launch -- run recipe.toml", "--rendezvous node0:29500", "srun", "torchrun --standalone", "--no-python"]
    {
        assert!(help.contains(expected), "`{expected}` is not in: {help}");
    }
}

#[test]
fn rank_0_writes_as_it_would_alone_and_the_others_after_their_rank() {
    let folder = tempfile::tempdir().unwrap();
    tiny::write(folder.path());
    let alone = drafthorse(folder.path(), &["check", "recipe.toml"]).output().unwrap();
    assert!(alone.status.success(), "{}", stderr(&alone));
    let launched = drafthorse(folder.path(), &["launch", "--nproc", "2", "--", "check", "recipe.toml"]).output().unwrap();
    let messages = stderr(&launched);
    assert!(launched.status.success(), "{messages}");
    assert_eq!(launched.stdout, alone.stdout);
    let of_rank_1: Vec<&str> = messages.lines().filter_map(|line| line.strip_prefix("[rank 1] ")).collect();
    let expected = String::from_utf8(alone.stdout).unwrap();
    for line in expected.lines() {
        assert!(of_rank_1.contains(&line), "`{line}` of rank 1 is not in: {messages}");
    }
}

#[test]
fn a_recipe_that_no_rank_accepts_exits_2() {
    let folder = tempfile::tempdir().unwrap();
    let output = drafthorse(folder.path(), &["launch", "--nproc", "2", "--", "check", "absent.toml"]).output().unwrap();
    let message = stderr(&output);
    assert_eq!(output.status.code(), Some(2), "{message}");
    assert_eq!(message.matches("absent.toml").count(), 2, "both ranks say why: {message}");
    assert!(message.contains("exited with code 2"), "{message}");
}

#[test]
fn sigterm_lets_the_ranks_save_and_exits_3() {
    let folder = tempfile::tempdir().unwrap();
    let (status, said) = disturbed(folder.path(), &["--nproc", "1"], |launcher| signal("-TERM", launcher));
    assert_eq!(status.code(), Some(3), "{said}");
    assert_eq!(said.matches("Run the same command again").count(), 1, "{said}");
    assert!(!said.contains(LAST_PROGRESS), "{said}");
}

#[test]
fn a_killed_rank_is_named_and_takes_the_others_along() {
    let folder = tempfile::tempdir().unwrap();
    let (status, said) =
        disturbed(folder.path(), &["--nproc", "2", "--grace", "2"], |launcher| signal("-KILL", process_of_rank(launcher, 1)));
    assert_eq!(status.code(), Some(1), "{said}");
    assert!(said.contains("error: rank 1 was killed by signal 9 (SIGKILL); the others ended after it"), "{said}");
    assert!(!said.contains(LAST_PROGRESS), "{said}");
}

#[test]
fn ranks_end_with_a_launcher_that_was_killed() {
    let folder = tempfile::tempdir().unwrap();
    let (status, said) = disturbed(folder.path(), &["--nproc", "1"], |launcher| signal("-KILL", launcher));
    assert_eq!(status.code(), None, "{said}");
    assert!(!said.contains(LAST_PROGRESS), "rank 0 went on alone: {said}");
}
