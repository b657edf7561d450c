//! A run of three small drafters of different make, as training and pruning leave it, made without either.

use std::collections::BTreeMap;
use std::fs;

use data::chat::ChatTemplate;
use data::tokenizer::{SpecialTokens, Tokenizer};
use evaluator::score::{BenchmarkScore, DecoderScore, Score};
use model::checkpoint::{self, BEST, DrafterFile, LATEST, TextFiles};
use model::{ModelConfig, Transformer};
use serde_json::json;
use tempfile::TempDir;
use torch::tch::{Device, Kind};

use crate::tiny;

/// Beyond the tokenizer's 49,152 tokens, as Qwen3's are beyond its own.
pub(super) const ROWS: i64 = 49_160;

pub(super) fn drafter_file() -> DrafterFile {
    DrafterFile {
        kind: "d3d".to_string(),
        block_size: 8,
        labels: "next".to_string(),
        anchor_sees: "prefix".to_string(),
        mask_token: 16,
        removed_layers: vec![5, 2],
        recipe_hash: "0123456789abcdef".to_string(),
        training_tokens: 12_345,
        step: 30,
        layers: 4,
        ..DrafterFile::default()
    }
}

/// `model/`, the tiny target, and `runs/tiny/`, a run as training leaves it: `train/step-000030` is the target's own weights, best and
/// latest, with a score; `prune/layers-02` of another architecture, stored as bf16, and `prune/layers-01` with Llama 3's RoPE, without one.
pub(super) fn run() -> TempDir {
    let folder = tempfile::tempdir().unwrap();
    tiny::write(folder.path());
    let model = folder.path().join("model");
    let run = folder.path().join("runs/tiny");
    fs::create_dir_all(run.join("scores")).unwrap();
    let recipe = configs::load(&folder.path().join("recipe.toml"), &[]).unwrap();
    fs::write(run.join("recipe.toml"), recipe.to_toml()).unwrap();
    // A run is moved more easily than its prompts, which nobody needs here.
    fs::remove_file(folder.path().join("prompts.jsonl")).unwrap();
    fs::write(model.join("README.md"), "---\nlicense: apache-2.0\n---\n# Tiny\n").unwrap();

    let special = SpecialTokens::from_configuration(&model.join("tokenizer_config.json")).unwrap();
    let tokenizer = Tokenizer::from_file(&model.join("tokenizer.json")).unwrap();
    let files = TextFiles::new(&tokenizer, &special, &ChatTemplate::from_folder(&model).unwrap());
    let trained = model::weights::load(&model, Kind::Float, Device::Cpu).unwrap();
    let train = run.join("train");
    checkpoint::save(&train.join("step-000030"), &trained, &drafter_file(), &files, Kind::Float).unwrap();
    for link in [BEST, LATEST] {
        checkpoint::point(&train, link, "step-000030").unwrap();
    }
    fs::create_dir(train.join("step-000030/state")).unwrap();
    score().write(&run.join("scores/step-000030.json")).unwrap();

    let config = json!({"model_type": "qwen3", "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2,
        "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 32, "vocab_size": ROWS, "tie_word_embeddings": false,
        "rope_theta": 1e6, "bos_token_id": 0, "eos_token_id": [2, 0]});
    let pruned = Transformer::random(ModelConfig::from_json(&config).unwrap(), 7, Kind::Float);
    let drafter = DrafterFile { mask_token: 49_155, layers: 2, labels: "in_place".to_string(), ..drafter_file() };
    checkpoint::save(&run.join("prune/layers-02"), &pruned, &drafter, &files, Kind::BFloat16).unwrap();

    let config = json!({"model_type": "llama", "hidden_size": 64, "intermediate_size": 64, "num_hidden_layers": 1,
        "num_attention_heads": 2, "num_key_value_heads": 1, "vocab_size": 49_152, "tie_word_embeddings": false, "eos_token_id": 2,
        "rope_theta": 1e4, "rope_scaling": {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
        "original_max_position_embeddings": 16}});
    let scaled = Transformer::random(ModelConfig::from_json(&config).unwrap(), 9, Kind::Float);
    checkpoint::save(&run.join("prune/layers-01"), &scaled, &DrafterFile { layers: 1, ..drafter_file() }, &files, Kind::Float)
        .unwrap();
    folder
}

fn score() -> Score {
    let figures = |tau: f64, speedup: Option<f64>| BenchmarkScore {
        prompts: 80,
        tau_pooled: tau,
        tau_interval: speedup.map(|_| (3.1, 3.7)),
        tokens_per_second: 100.0,
        speedup,
        speedup_interval: speedup.map(|_| (2.2, 2.6)),
        hit_rate: speedup.map(|_| 0.73),
        identical_to_autoregressive: speedup.map(|_| true),
        ..BenchmarkScore::default()
    };
    let decoder = |figures| DecoderScore { benchmarks: BTreeMap::from([("gsm8k".to_string(), figures)]) };
    Score {
        checkpoint: "step-000030".to_string(),
        kind: "d3d".to_string(),
        target: "model".to_string(),
        thinking: Some(false),
        dtype: "f32".to_string(),
        drafter_dtype: "f32".to_string(),
        block_size: 8,
        layers: 4,
        parameters: None,
        fan_out: "best_first, 24 blocks".to_string(),
        budget: None,
        calibration: None,
        hit_rate_by_blocks: BTreeMap::new(),
        concurrency: 1,
        temperature: 0.0,
        sampling: String::new(),
        drafts: "point".to_string(),
        decoders: BTreeMap::from([
            ("autoregressive".to_string(), decoder(figures(1.0, None))),
            ("asynchronous".to_string(), decoder(figures(3.41, Some(2.4)))),
        ]),
    }
}
