//! One D3D training step against a plain PyTorch program doing the same (`tests/bench/plain_step.py`): `make bench`.
//!
//! Same weights, same batch, same threads, each in a process of its own so that peak memory is its own. The plain program is run in bf16,
//! as is usual, and in f32, since a CPU without bf16 units is slower in bf16; ours runs in what `dtype = "auto"` takes on this machine.
//! Needs a Python with torch and safetensors, named by PYTHON.

use std::fs;
use std::path::Path;
use std::process::Command;
use std::time::Instant;

use configs::Labels;
use data::supervision::{Example, draw_anchors};
use model::tensor_file::{load_safetensors, save_safetensors};
use model::{ModelConfig, Transformer};
use serde_json::{Value, json};
use tch::{Device, Kind};
use torch::group::Group;
use torch::memory::{matrix_rate, peak_memory_bytes};
use trainer::backward::{LossSettings, Objective, forward_backward};
use trainer::batch::{Batch, BlockShape, Denominators};
use trainer::losses::LossSums;
use trainer::objective::PositionWeights;
use trainer::optimiser::{AdamW, AdamWSettings, squared_norm};
use trainer::parameters::Parameters;
use trainer::watching::operations;

type Outcome<T> = Result<T, Box<dyn std::error::Error>>;

const SHAPE: BlockShape = BlockShape { block_size: 16, mask_token: 16, labels: Labels::InPlace, anchor_sees_block: true };
const ANCHORS: usize = 64;
const GAMMA: f64 = 7.0;
const LEARNING_RATE: f64 = 2e-5;
/// The default of `train.chunk_rows`.
const CHUNK_ROWS: usize = 256;
/// Rows of a forward: each response has one of its own.
const FORWARD_ROWS: usize = 2048;
/// Timed steps after one to warm up.
const STEPS: usize = 2;

fn main() -> Outcome<()> {
    let arguments: Vec<String> = std::env::args().collect();
    match arguments.get(1).map(String::as_str) {
        Some("ours") => ours(Path::new(&arguments[2]), &arguments[3], &arguments[4]),
        _ => compare(),
    }
}

/// The cases: name, configuration, responses of a step, their length.
fn cases() -> Vec<(&'static str, Value, usize, usize)> {
    let smollm2 = json!({"model_type": "llama", "hidden_size": 576, "intermediate_size": 1536, "num_hidden_layers": 30,
        "num_attention_heads": 9, "num_key_value_heads": 3, "head_dim": 64, "vocab_size": 49152, "rms_norm_eps": 1e-5,
        "rope_theta": 100_000.0, "tie_word_embeddings": true});
    let qwen3 = json!({"model_type": "qwen3", "hidden_size": 1024, "intermediate_size": 3072, "num_hidden_layers": 2,
        "num_attention_heads": 16, "num_key_value_heads": 8, "head_dim": 128, "vocab_size": 151_936, "rms_norm_eps": 1e-6,
        "rope_theta": 1_000_000.0, "tie_word_embeddings": true});
    vec![("SmolLM2-135M's shape", smollm2, 2, 512), ("2 layers with Qwen3's vocabulary", qwen3, 4, 512)]
}

fn compare() -> Outcome<()> {
    let python = std::env::var("PYTHON").map_err(|_| "name a Python that has torch and safetensors by PYTHON=…")?;
    let threads = torch::available_cores();
    let script = Path::new(env!("CARGO_MANIFEST_DIR")).join("../tests/bench/plain_step.py");
    for (name, config, responses, length) in cases() {
        let folder = tempfile::tempdir()?;
        write_case(folder.path(), &config, responses, length)?;
        println!(
            "{name}: {responses} responses of {length} tokens with {ANCHORS} blocks of {} each, {threads} threads",
            SHAPE.block_size
        );
        let mut rows = Vec::new();
        for recompute in ["recompute", "keep"] {
            let mut command = Command::new(std::env::current_exe()?);
            command.args(["ours", &folder.path().to_string_lossy(), recompute, &threads.to_string()]);
            let label = format!(
                "ours, {}",
                if recompute == "recompute" { "layers run again in the backward" } else { "activations kept" }
            );
            rows.push((label, measured(&mut command)?));
        }
        for dtype in ["bf16", "f32"] {
            let mut command = Command::new(&python);
            command.arg(&script).arg(folder.path()).args(["--steps", &STEPS.to_string(), "--dtype", dtype]);
            command.args(["--threads", &threads.to_string()]);
            rows.push((format!("plain PyTorch, {dtype}"), measured(&mut command)?));
        }
        let number = |row: &Value, key: &str| row[key].as_f64().unwrap_or(f64::NAN);
        for (label, row) in &rows {
            let share =
                row["peak_share"].as_f64().map_or(String::new(), |share| format!(", {:.0} % of the product peak", share * 100.0));
            println!(
                "  {label:<45} {:7.1} tokens/s, {:6.2} s/step, {:5.2} GB, loss {:.4}{share}",
                number(row, "tokens_per_second"),
                number(row, "seconds_per_step"),
                number(row, "peak_memory_bytes") / 1e9,
                number(row, "loss"),
            );
        }
        for (ours, row) in &rows[..2] {
            for (plain, other) in &rows[2..] {
                println!(
                    "  {ours} against {plain}: tokens/s × {:.2}, memory × {:.2}",
                    number(row, "tokens_per_second") / number(other, "tokens_per_second"),
                    number(row, "peak_memory_bytes") / number(other, "peak_memory_bytes")
                );
            }
        }
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

/// Weights and batch as both programs read them.
fn write_case(folder: &Path, config: &Value, responses: usize, length: usize) -> Outcome<()> {
    let model = Transformer::random(ModelConfig::from_json(config)?, 1, Kind::Float);
    let named: Vec<(String, &tch::Tensor)> = model.named_parameters();
    save_safetensors(&folder.join("model.safetensors"), &named)?;
    fs::write(folder.join("config.json"), config.to_string())?;
    let responses: Vec<Value> = (0..responses as u64)
        .map(|row| {
            let ids: Vec<u32> =
                (0..length as u64).map(|at| ((at * 7919 + row * 104_729 + at * at * 31) % 49_000) as u32).collect();
            let example = Example::after_prompt(ids, 64);
            json!({"ids": example.ids, "prompt_length": 64, "anchors": draw_anchors(&example, ANCHORS, 1, 0, row)})
        })
        .collect();
    let batch = json!({"block_size": SHAPE.block_size, "mask_token": SHAPE.mask_token, "labels": "in_place", "anchor_sees_block": true,
        "gamma": GAMMA, "ar_weight": 1.0, "learning_rate": LEARNING_RATE, "responses": responses});
    Ok(fs::write(folder.join("batch.json"), batch.to_string())?)
}

/// Our own steps, in this process; prints their figures.
fn ours(folder: &Path, recompute: &str, threads: &str) -> Outcome<()> {
    torch::keep_freed_memory();
    torch::set_num_threads(threads.parse()?);
    let kind = if torch::bf16_is_faster(Device::Cpu) { Kind::BFloat16 } else { Kind::Float };
    let config = ModelConfig::from_json(&serde_json::from_str(&fs::read_to_string(folder.join("config.json"))?)?)?;
    let json: Value = serde_json::from_str(&fs::read_to_string(folder.join("batch.json"))?)?;
    let list = |value: &Value| -> Vec<usize> {
        value.as_array().into_iter().flatten().filter_map(Value::as_u64).map(|it| it as usize).collect()
    };
    let responses: Vec<(Example, Vec<usize>)> = json["responses"]
        .as_array()
        .into_iter()
        .flatten()
        .map(|response| {
            let ids = list(&response["ids"]).into_iter().map(|id| id as u32).collect();
            (Example::after_prompt(ids, response["prompt_length"].as_u64().unwrap_or(0) as usize), list(&response["anchors"]))
        })
        .collect();
    let mut weights = load_safetensors(&folder.join("model.safetensors"))?;
    let start = Transformer::from_source(config, |name, _| weights.remove(name).ok_or(format!("`{name}` is missing")))?;

    let group = Group::alone();
    let parameters = Parameters::new(&start, kind, Device::Cpu, &group);
    drop(start);
    torch::release_freed_memory();
    let settings = AdamWSettings { beta1: 0.9, beta2: 0.95, weight_decay: 0.0 };
    let optimiser = AdamW::new(&parameters.master, settings, parameters.stretches(SHAPE.mask_token), 1.0);
    let loss = LossSettings {
        ar_weight: 1.0,
        weights: PositionWeights::Exponential,
        chunk_rows: CHUNK_ROWS,
        recompute: recompute == "recompute",
    };
    let mut losses = Vec::new();
    let mut seconds = Vec::new();
    let mut gradient = parameters.zero_gradient();
    let (mut work, mut tokens) = (0.0, 0);
    for step in 1..=STEPS as u64 + 1 {
        let started = Instant::now();
        (work, tokens) = (0.0, 0);
        let mut denominators = Denominators::default();
        responses.iter().for_each(|(example, anchors)| denominators.add(example, anchors, SHAPE, GAMMA));
        let _ = gradient.zero_();
        let mut sums = LossSums::new(SHAPE.drafts());
        for forward in responses.chunks((FORWARD_ROWS / (responses[0].0.ids.len() + ANCHORS * SHAPE.block_size)).max(1)) {
            let packed: Vec<(&Example, Vec<usize>)> =
                forward.iter().map(|(example, anchors)| (example, anchors.clone())).collect();
            let batch = Batch::pack(&packed, SHAPE, GAMMA);
            sums.add(&forward_backward(&parameters, &gradient, &batch, &denominators, SHAPE, &Objective::Tokens, loss)?);
            work += operations(&parameters.config, &batch, SHAPE);
            tokens += batch.clean_tokens;
        }
        let norm = squared_norm(&gradient).sqrt();
        optimiser.step(&parameters.master, &gradient, step, LEARNING_RATE, (1.0 / norm).min(1.0))?;
        losses.push(sums.losses(&denominators, loss).total);
        seconds.push(started.elapsed().as_secs_f64());
    }
    let peak = peak_memory_bytes(Device::Cpu);
    let timed = seconds[1..].iter().sum::<f64>() / (seconds.len() - 1) as f64;
    let line = json!({"loss": losses[0], "losses": losses, "seconds_per_step": timed, "tokens_per_second": tokens as f64 / timed,
        "peak_memory_bytes": peak, "peak_share": work / timed / matrix_rate(kind, Device::Cpu, 1.0), "dtype": format!("{kind:?}")});
    println!("{line}");
    Ok(())
}
