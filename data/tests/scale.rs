//! Prompts by the hundred thousand become work in memory that their number does not change, on all cores.

#![allow(clippy::unwrap_used)]

use std::collections::BTreeMap;
use std::fs;
use std::path::Path;
use std::process::Command;
use std::sync::atomic::AtomicBool;
use std::time::Instant;

use data::chat::ChatTemplate;
use data::gguf::GgufFile;
use data::preparation::{Preparation, prepare};
use data::tokenizer::Tokenizer;

mod synthetic;

use synthetic::write_rows;

/// How many rows the process that measures itself is to prepare.
const ROWS: &str = "DRAFTHORSE_SCALE_ROWS";

const MIB: f64 = 1024.0;

/// The process's largest resident memory so far, in KiB.
fn peak_kib() -> f64 {
    let status = fs::read_to_string("/proc/self/status").unwrap();
    let line = status.lines().find(|line| line.starts_with("VmHWM:")).unwrap();
    line.split_whitespace().nth(1).unwrap().parse().unwrap()
}

/// Seconds that the process's threads have computed.
fn computed_seconds() -> f64 {
    let stat = fs::read_to_string("/proc/self/stat").unwrap();
    let fields: Vec<&str> = stat.rsplit(')').next().unwrap().split_whitespace().collect();
    (fields[11].parse::<f64>().unwrap() + fields[12].parse::<f64>().unwrap()) / 100.0
}

/// Prepares as many rows as the environment says, and says what it took. [`measured`] starts it in a process of its own.
#[test]
#[ignore = "started by the other tests"]
fn prepare_and_measure() {
    let rows: usize = std::env::var(ROWS).map_or(1000, |rows| rows.parse().unwrap());
    let folder = tempfile::tempdir().unwrap();
    let prompts = [folder.path().join("prompts.jsonl")];
    write_rows(&prompts[0], rows);
    let model = Path::new(env!("CARGO_MANIFEST_DIR")).join("../.models/SmolLM2-135M-Instruct.Q4_1.gguf");
    let gguf = GgufFile::open(&model).expect("run `make setup` first");
    let (tokenizer, template) = (Tokenizer::from_gguf(&gguf).unwrap(), ChatTemplate::from_gguf(&gguf).unwrap());
    let preparation = Preparation {
        prompts: &prompts,
        limit: None,
        seed: 1,
        // The longest of these texts has fewer.
        max_tokens: 65_536,
        vocabulary: 49152,
        tokenizer: &tokenizer,
        template: &template,
        thinking: false,
        inputs: &BTreeMap::new(),
    };
    let (begun, computed) = (Instant::now(), computed_seconds());
    let made = prepare(&preparation, &folder.path().join("work"), &AtomicBool::new(false), &mut |_, _| {}).unwrap();
    let seconds = begun.elapsed().as_secs_f64();
    assert_eq!(made.rows_read, rows);
    assert_eq!(made.rows_rejected, rows / 97);
    assert_eq!(made.rows_used + made.rows_rejected, rows);
    assert!(made.duplicate_ids > 0);
    let megabytes = fs::metadata(&prompts[0]).unwrap().len() as f64 / 1e6;
    println!(
        "peak {:.1} MiB; {rows} rows ({megabytes:.0} MB) in {seconds:.1} s: {:.0} rows/s, {:.2} cores busy",
        peak_kib() / MIB,
        rows as f64 / seconds,
        (computed_seconds() - computed) / seconds
    );
}

/// The peak memory in MiB of a process that prepares so many rows.
fn measured(rows: usize) -> f64 {
    let mut command = Command::new(std::env::current_exe().unwrap());
    command.args(["--exact", "prepare_and_measure", "--ignored", "--nocapture"]).env(ROWS, rows.to_string());
    let output = command.output().unwrap();
    let said = String::from_utf8_lossy(&output.stdout).into_owned();
    assert!(output.status.success(), "{said}{}", String::from_utf8_lossy(&output.stderr));
    let line = said.lines().find_map(|line| line.find("peak ").map(|place| &line[place..])).unwrap();
    println!("{line}");
    line.split(' ').nth(1).unwrap().parse().unwrap()
}

fn memory_does_not_grow(few: usize) {
    let (small, large) = (measured(few), measured(10 * few));
    assert!(large < 1024.0, "{large} MiB");
    // What may grow is a hash of each row's id, which tells duplicates: 32 bytes in a table that doubles. Chunks grow too, up to 4,096 rows
    // (see `data::requests::chunk_rows`), and freed memory that the allocator keeps varies.
    let ids = 10.0 * few as f64 * 64.0 / (MIB * MIB);
    assert!(large < small + ids + 100.0, "{small} MiB for {few} rows, {large} for ten times as many");
}

#[test]
fn memory_does_not_grow_from_two_thousand_to_twenty_thousand_rows() {
    memory_does_not_grow(2_000);
}

#[test]
#[ignore = "takes minutes: make soak"]
fn soak_memory_does_not_grow_from_fifty_thousand_to_five_hundred_thousand_rows() {
    memory_does_not_grow(50_000);
}
