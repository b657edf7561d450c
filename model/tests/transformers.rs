//! Checkpoints as Hugging Face `transformers` sees them: all weights found, none left over, the same tokens, the same logits.
//!
//! Needs a Python with torch and transformers (`PYTHON`, else `python3`); without one the tests say so and pass.
#![allow(clippy::unwrap_used)]

use std::path::{Path, PathBuf};
use std::process::Command;

use data::chat::ChatTemplate;
use data::gguf::GgufFile;
use data::tokenizer::{SpecialTokens, Tokenizer};
use model::checkpoint::{self, DrafterFile, TextFiles};
use model::{CachedAttention, KvCache, ModelConfig, Piece, Transformer};
use serde_json::json;
use tch::{Device, Kind};

const TEXT: &str = "<|im_start|>user\nHow many legs have 7 spiders?<|im_end|>\n<|im_start|>assistant\nSeven spiders have";

fn root() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("..")
}

/// Compares a checkpoint's tokens and last logits; says so when there is nothing to compare with.
fn assert_transformers_agrees(folder: &Path, tokenizer: &Tokenizer) {
    let python = std::env::var("PYTHON").unwrap_or_else(|_| "python3".to_string());
    let script = root().join("tests/golden/load_checkpoint.py");
    let output = Command::new(&python).arg(script).arg(folder).arg(TEXT).output().unwrap();
    if output.status.code() == Some(3) {
        eprintln!("skipped: `{python}` has no transformers; set PYTHON to one that has");
        return;
    }
    let errors = String::from_utf8_lossy(&output.stderr);
    assert!(output.status.success(), "{errors}");
    let found: serde_json::Value = serde_json::from_slice(&output.stdout).unwrap();
    for kind in ["missing", "unexpected", "mismatched"] {
        assert_eq!(found[kind], json!([]), "{kind} weights");
    }
    let ids = tokenizer.encode(TEXT, false).unwrap();
    assert_eq!(found["ids"], json!(ids));

    let _no_grad = tch::no_grad_guard();
    let (model, _) = checkpoint::load(folder, Kind::Float, Device::Cpu).unwrap();
    let cache = KvCache::new(&model.config, 1, ids.len(), Kind::Float, Device::Cpu);
    let mut attention = CachedAttention::new(&cache, vec![Piece::causal(0, 0..ids.len(), Device::Cpu)]);
    let positions: Vec<usize> = (0..ids.len()).collect();
    let hidden_td =
        model.forward(&torch::ids_tensor(&ids, Device::Cpu), &torch::index_tensor(&positions, Device::Cpu), &mut attention);
    let logits = torch::to_f32s(&model.logits(&hidden_td.narrow(0, ids.len() as i64 - 1, 1)));
    let theirs: Vec<f32> = serde_json::from_value(found["logits"].clone()).unwrap();
    assert_eq!(logits.len(), theirs.len());
    for (token, (ours, theirs)) in logits.iter().zip(&theirs).enumerate() {
        assert!((ours - theirs).abs() < 1e-4 * theirs.abs().max(1.0), "token {token}: {ours} against {theirs}");
    }
}

#[test]
fn checkpoints_load_in_transformers_with_the_same_tokens_and_logits() {
    let gguf = GgufFile::open(&root().join(".models/SmolLM2-135M-Instruct.Q4_1.gguf")).expect("run `make setup` first");
    let tokenizer = Tokenizer::from_gguf(&gguf).unwrap();
    let template = ChatTemplate::from_gguf(&gguf).unwrap();
    let files = TextFiles::new(&tokenizer, &SpecialTokens::from_gguf(&gguf), &template);
    let llama3 = json!({"rope_type": "llama3", "rope_theta": 1e4, "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
                        "original_max_position_embeddings": 64});
    let yarn = json!({"rope_type": "yarn", "rope_theta": 1e4, "factor": 4.0, "original_max_position_embeddings": 8, "beta_fast": 16,
                      "truncate": false});
    let linear = json!({"rope_type": "linear", "rope_theta": 1e4, "factor": 4.0});
    for (model_type, tied, biases, rope, kind) in [
        ("llama", true, (false, false), &llama3, Kind::Float),
        ("llama", false, (true, true), &linear, Kind::Float),
        ("qwen2", false, (false, false), &yarn, Kind::Float),
        ("qwen3", true, (true, false), &yarn, Kind::Float),
        ("qwen3", false, (false, false), &llama3, Kind::BFloat16),
    ] {
        let config = json!({"model_type": model_type, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2,
            "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 8, "vocab_size": 49152, "tie_word_embeddings": tied,
            "attention_bias": biases.0, "mlp_bias": biases.1, "max_position_embeddings": 128, "rope_parameters": rope});
        let model = Transformer::random(ModelConfig::from_json(&config).unwrap(), 3, Kind::Float);
        let parent = tempfile::tempdir().unwrap();
        let folder = parent.path().join("step-000001");
        checkpoint::save(&folder, &model, &DrafterFile { layers: 2, ..DrafterFile::default() }, &files, kind).unwrap();
        assert_transformers_agrees(&folder, &tokenizer);
    }
    let trained = root().join("runs/quickstart/train/latest");
    if trained.exists() {
        assert_transformers_agrees(&trained, &tokenizer);
    }
}
