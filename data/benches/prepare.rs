//! The way of prompts into work, beside a Python program that does the same with `datasets` and `tokenizers`
//! (`tests/bench/plain_prepare.py`): `make bench`.
//!
//! Rows of all dialects are read, normalised, rendered with SmolLM2's template, tokenised and written as Parquet. Both programs have all
//! cores and nothing else to do, each in a process of its own. Needs a Python with datasets, tokenizers and jinja2, named by PYTHON.

use std::collections::BTreeMap;
use std::error::Error;
use std::path::Path;
use std::process::Command;
use std::sync::atomic::AtomicBool;
use std::time::Instant;

use data::chat::ChatTemplate;
use data::gguf::GgufFile;
use data::preparation::{Preparation, prepare};
use data::requests::read_chunk;
use data::tokenizer::{SpecialTokens, Tokenizer};
use serde_json::Value;

#[allow(clippy::unwrap_used)]
#[path = "../tests/synthetic/mod.rs"]
mod synthetic;

const ROWS: usize = 100_000;

fn main() -> Result<(), Box<dyn Error>> {
    let root = Path::new(env!("CARGO_MANIFEST_DIR")).join("..");
    let python = std::env::var("PYTHON").map_err(|_| "name a Python that has datasets, tokenizers and jinja2 by PYTHON=…")?;
    let gguf = GgufFile::open(&root.join(".models/SmolLM2-135M-Instruct.Q4_1.gguf"))?;
    let (tokenizer, template) = (Tokenizer::from_gguf(&gguf)?, ChatTemplate::from_gguf(&gguf)?);
    let folder = tempfile::tempdir()?;
    let at = |name: &str| folder.path().join(name);
    synthetic::write_rows(&at("prompts.jsonl"), ROWS);
    std::fs::write(at("tokenizer.json"), tokenizer.to_json())?;
    std::fs::write(at("tokenizer_config.json"), SpecialTokens::from_gguf(&gguf).to_configuration(template.source()))?;

    let preparation = Preparation {
        prompts: &[at("prompts.jsonl")],
        limit: None,
        seed: 1,
        max_tokens: 65_536,
        vocabulary: 49152,
        tokenizer: &tokenizer,
        template: &template,
        thinking: false,
        inputs: &BTreeMap::new(),
    };
    let begun = Instant::now();
    let prepared = prepare(&preparation, &at("work"), &AtomicBool::new(false), &mut |_, _| {})?;
    let ours = begun.elapsed().as_secs_f64();
    let mut tokens = 0;
    for chunk in 0..prepared.chunks {
        tokens += read_chunk(&at("work"), chunk)?.iter().map(|row| row.prompt_ids.len()).sum::<usize>();
    }

    let cores = std::thread::available_parallelism()?.to_string();
    let output = Command::new(python)
        .arg(root.join("tests/bench/plain_prepare.py"))
        .args([folder.path().as_os_str(), cores.as_ref()])
        .stderr(std::process::Stdio::inherit())
        .output()?;
    let said = String::from_utf8(output.stdout)?;
    if !output.status.success() {
        return Err(format!("plain_prepare.py failed: {said}").into());
    }
    let plain: Value = serde_json::from_str(said.lines().last().unwrap_or_default())?;
    let seconds = plain["seconds"].as_f64().unwrap_or(f64::NAN);
    println!("{ROWS} rows normalised, rendered, tokenised and written as Parquet on {cores} cores");
    println!(
        "  ours               {:7} rows used, {tokens} tokens, {ours:6.1} s, {:6.0} rows/s",
        prepared.rows_used,
        ROWS as f64 / ours
    );
    println!(
        "  datasets {:<9} {:7} rows used, {} tokens, {seconds:6.1} s, {:6.0} rows/s",
        plain["datasets"].as_str().unwrap_or_default(),
        plain["rows"],
        plain["tokens"],
        ROWS as f64 / seconds
    );
    println!("  rows/s × {:.1}", seconds / ours);
    Ok(())
}
