//! The built-in engine against `transformers` (`tests/bench/plain_generate.py`): `make bench`.
//!
//! SmolLM2 answers 256 real prompts greedily with up to 160 tokens each; both programs have the same weights, dtype and threads, each in a
//! process of its own, and loading is not counted. The peer works in batches of 32 padded on the left, as its documentation shows; ours with as
//! many lanes as a recipe gives it by default. Needs a Python with torch and transformers, named by PYTHON, and the prompts in
//! `../shared/prompts`; without these it says so and ends well.

use std::collections::{BTreeMap, VecDeque};
use std::fs;
use std::ops::ControlFlow;
use std::path::Path;
use std::process::Command;
use std::sync::atomic::AtomicBool;
use std::time::Instant;

use data::chat::ChatTemplate;
use data::engine::{Answer, Conversations, Question};
use data::gguf::GgufFile;
use data::preparation::{Preparation, prepare};
use data::requests::read_chunk;
use data::tokenizer::{SpecialTokens, Tokenizer};
use evaluator::Sampler;
use evaluator::generate::{GenerateSettings, generate, lanes_with_room};
use model::checkpoint::{self, DrafterFile, TextFiles};
use model::weights;
use serde_json::{Value, json};
use tch::{Device, Kind};

type Outcome<T> = Result<T, Box<dyn std::error::Error>>;

const PROMPTS: usize = 256;
const NEW_TOKENS: usize = 160;
/// Of a batch there.
const ROWS: usize = 32;

fn main() -> Outcome<()> {
    let arguments: Vec<String> = std::env::args().collect();
    match arguments.get(1).map(String::as_str) {
        Some("ours") => ours(Path::new(&arguments[2]), &arguments[3], arguments[4].parse()?),
        _ => compare(),
    }
}

fn compare() -> Outcome<()> {
    let root = Path::new(env!("CARGO_MANIFEST_DIR")).join("..");
    let (model, prompts) =
        (root.join(".models/SmolLM2-135M-Instruct.Q4_1.gguf"), root.join("../shared/prompts/gsm8k-train-3000.jsonl"));
    if !prompts.exists() {
        println!("generate: skipped, there is no `{}`", prompts.display());
        return Ok(());
    }
    let python = std::env::var("PYTHON").map_err(|_| "name a Python that has torch and transformers by PYTHON=…")?;
    let threads = torch::available_cores().to_string();
    let folder = tempfile::tempdir()?;
    write_case(folder.path(), &model, &prompts)?;
    for dtype in ["f32", "bf16"] {
        if dtype == "bf16" && !torch::bf16_is_faster(Device::Cpu) {
            continue;
        }
        println!("SmolLM2-135M, {PROMPTS} prompts, up to {NEW_TOKENS} new tokens, greedy, {dtype}, {threads} threads");
        let ours = measured(Command::new(std::env::current_exe()?).arg("ours").arg(folder.path()).args([dtype, &threads]))?;
        let script = root.join("tests/bench/plain_generate.py");
        let mut command = Command::new(&python);
        command.arg(script).arg(folder.path().join("model")).args([
            "--dtype",
            dtype,
            "--threads",
            &threads,
            "--batch",
            &ROWS.to_string(),
        ]);
        let plain = measured(&mut command)?;
        let number = |row: &Value, key: &str| row[key].as_f64().unwrap_or(f64::NAN);
        let rate = |row: &Value| number(row, "tokens") / number(row, "seconds");
        let version = plain["transformers"].as_str().unwrap_or_default();
        for (label, row) in [("ours".to_owned(), &ours), (format!("transformers {version}"), &plain)] {
            println!(
                "  {label:<22} {:6.0} tokens in {:6.1} s, {:6.1} tokens/s",
                number(row, "tokens"),
                number(row, "seconds"),
                rate(row)
            );
        }
        let pairs = || ours["ids"].as_array().into_iter().flatten().zip(plain["ids"].as_array().into_iter().flatten());
        let same = pairs().filter(|(one, other)| one == other).count();
        println!("  tokens/s × {:.2}; {same} of {PROMPTS} responses are the same ids", rate(&ours) / rate(&plain));
    }
    Ok(())
}

/// What a program prints as JSON on its last line.
fn measured(command: &mut Command) -> Outcome<Value> {
    let output = command.stderr(std::process::Stdio::inherit()).output()?;
    let text = String::from_utf8(output.stdout)?;
    if !output.status.success() {
        return Err(format!("{command:?} failed: {text}").into());
    }
    Ok(serde_json::from_str(text.lines().last().unwrap_or_default())?)
}

/// The model as a folder of Hugging Face's, and the prompts as `regenerate` would ask them.
fn write_case(folder: &Path, model: &Path, prompts: &Path) -> Outcome<()> {
    let gguf = GgufFile::open(model)?;
    let (tokenizer, template) = (Tokenizer::from_gguf(&gguf)?, ChatTemplate::from_gguf(&gguf)?);
    let loaded = weights::load(model, Kind::Float, Device::Cpu)?;
    let files = TextFiles::new(&tokenizer, &SpecialTokens::from_gguf(&gguf), &template);
    checkpoint::save(&folder.join("model"), &loaded, &DrafterFile::default(), &files, Kind::Float)?;
    let preparation = Preparation {
        prompts: &[prompts.to_owned()],
        limit: Some(PROMPTS),
        seed: 1,
        max_tokens: 4096,
        vocabulary: loaded.config.vocab_size as usize,
        tokenizer: &tokenizer,
        template: &template,
        thinking: false,
        inputs: &BTreeMap::new(),
    };
    let work = folder.join("work");
    let prepared = prepare(&preparation, &work, &AtomicBool::new(false), &mut |_, _| {})?;
    let mut ids = Vec::new();
    for chunk in 0..prepared.chunks {
        ids.extend(read_chunk(&work, chunk)?.into_iter().map(|row| row.prompt_ids));
    }
    let case = json!({ "prompts": ids, "max_new_tokens": NEW_TOKENS });
    Ok(fs::write(folder.join("model/prompts.json"), case.to_string())?)
}

/// All prompts, and the answers by the number of their prompt.
struct Prompts {
    waiting: VecDeque<Question>,
    answers: Vec<Vec<u32>>,
}

impl Conversations for Prompts {
    fn next(&mut self) -> Option<Question> {
        self.waiting.pop_front()
    }

    fn answer(&mut self, key: u64, answer: Result<Answer, String>) -> ControlFlow<()> {
        match answer.map(|answer| answer.ids) {
            Ok(Some(ids)) => self.answers[key as usize] = ids,
            other => eprintln!("prompt {key}: {other:?}"),
        }
        ControlFlow::Continue(())
    }
}

/// The engine as `regenerate` runs it; prints its figures.
fn ours(folder: &Path, dtype: &str, threads: usize) -> Outcome<()> {
    torch::set_num_threads(threads);
    let kind = if dtype == "bf16" { Kind::BFloat16 } else { Kind::Float };
    let target = weights::load(&folder.join("model"), kind, Device::Cpu)?;
    let case: Value = serde_json::from_str(&fs::read_to_string(folder.join("model/prompts.json"))?)?;
    let prompts: Vec<Vec<u32>> = serde_json::from_value(case["prompts"].clone())?;
    let longest_prompt = prompts.iter().map(Vec::len).max().unwrap_or_default();
    let settings = GenerateSettings {
        sampler: Sampler::greedy(),
        stop_tokens: target.config.eos_token_id.clone(),
        max_new_tokens: NEW_TOKENS,
        longest_prompt,
        lanes: lanes_with_room(&target, longest_prompt + NEW_TOKENS, 1),
    };
    let question = |(key, prompt_ids)| Question { key, messages: Vec::new(), tools: None, prompt_ids, counter: key };
    let mut asked = Prompts { answers: vec![Vec::new(); prompts.len()], waiting: (0..).zip(prompts).map(question).collect() };
    let begun = Instant::now();
    generate(&target, &mut asked, &settings, &AtomicBool::new(false))?;
    let seconds = begun.elapsed().as_secs_f64();
    let tokens: usize = asked.answers.iter().map(Vec::len).sum();
    println!("{}", json!({ "tokens": tokens, "seconds": seconds, "ids": asked.answers }));
    Ok(())
}
