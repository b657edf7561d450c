//! Golden models written as GGUF and read again by this crate's own loader.
#![allow(clippy::unwrap_used)]

use super::*;
use crate::config::ModelConfig;
use crate::dequantise::dequantise;
use crate::weights::open;
use serde_json::json;
use tch::Device;

fn golden(name: &str) -> Source {
    open(&Path::new(env!("CARGO_MANIFEST_DIR")).join("../tests/golden/logits").join(name)).unwrap()
}

/// Written into `small.gguf` and opened again.
fn written(source: &Source, quantisation: Quantisation, text: Vec<(String, Entry)>) -> (tempfile::TempDir, Source) {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("small.gguf");
    let plan = GgufPlan::new(&source.config().unwrap(), quantisation, Vec::new(), text).unwrap();
    plan.write(&path, source, &mut || true).unwrap();
    assert_eq!(plan.bytes().unwrap(), std::fs::metadata(&path).unwrap().len());
    let source = open(&path).unwrap();
    (folder, source)
}

#[test]
fn every_family_comes_back_exactly_as_f32_and_bf16() {
    for name in ["llama_tied", "llama_untied_scaled", "qwen3_tied", "qwen3_untied_sharded"] {
        let source = golden(name);
        let config = source.config().unwrap();
        for (quantisation, kind) in [(Quantisation::F32, Kind::Float), (Quantisation::Bf16, Kind::BFloat16)] {
            let (_folder, back) = written(&source, quantisation, Vec::new());
            let found = ModelConfig { bos_token_id: config.bos_token_id, ..back.config().unwrap() };
            assert_eq!(found, config, "{name}");
            for (name, shape) in config.parameter_shapes() {
                // Norms are stored as f32 whatever the rest is.
                let kind = if shape.len() == 1 { Kind::Float } else { kind };
                let expected = source.tensor(&name, &shape, kind, Device::Cpu).unwrap().to_kind(Kind::Float);
                assert_eq!(back.tensor(&name, &shape, Kind::Float, Device::Cpu).unwrap(), expected, "{name}");
            }
            back.load(Kind::Float, tch::Device::Cpu).unwrap();
        }
    }
}

#[test]
fn the_order_of_rows_is_the_converters() {
    // Golden files were written by the gguf package, in the order of llama.cpp's converter.
    for name in ["llama_tied", "qwen3_tied"] {
        let (_folder, back) = written(&golden(name), Quantisation::F32, Vec::new());
        let (Source::Gguf(ours), Source::Gguf(theirs)) = (back, golden(&format!("{name}.gguf"))) else { panic!("not GGUF") };
        assert_eq!(ours.tensors.len(), theirs.tensors.len());
        for tensor in &theirs.tensors {
            let found = ours.tensor(&tensor.name).unwrap();
            assert_eq!(
                (&found.shape, ours.read(found).unwrap()),
                (&tensor.shape, theirs.read(tensor).unwrap()),
                "{}",
                tensor.name
            );
        }
        for (key, value) in theirs.metadata.iter().filter(|(key, _)| !key.starts_with("tokenizer.")) {
            assert_eq!(ours.metadata.get(key), Some(value), "{key}");
        }
    }
}

/// A model whose rows are whole blocks, as all that are used are.
fn config(fields: &[(&str, serde_json::Value)]) -> ModelConfig {
    let mut json = json!({"model_type": "llama", "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 1,
        "num_attention_heads": 4, "num_key_value_heads": 2, "vocab_size": 40, "tie_word_embeddings": true, "eos_token_id": 2});
    fields.iter().for_each(|(key, value)| json[*key] = value.clone());
    ModelConfig::from_json(&json).unwrap()
}

fn random(config: &ModelConfig) -> (tempfile::TempDir, Source) {
    let folder = tempfile::tempdir().unwrap();
    let model = crate::Transformer::random(config.clone(), 5, Kind::Float);
    let path = folder.path().join("model");
    let drafter = DrafterFile { layers: 1, ..DrafterFile::default() };
    crate::checkpoint::save(&path, &model, &drafter, &Default::default(), Kind::Float).unwrap();
    let source = open(&path).unwrap();
    (folder, source)
}

#[test]
fn coarser_kinds_give_what_they_hold_and_stay_near() {
    let config = config(&[]);
    let (_model, source) = random(&config);
    for (quantisation, room) in [(Quantisation::F16, 1e-3), (Quantisation::Q8_0, 2e-2)] {
        let (_folder, back) = written(&source, quantisation, Vec::new());
        for (name, shape) in config.parameter_shapes() {
            let values = torch::to_f32s(&source.tensor(&name, &shape, Kind::Float, Device::Cpu).unwrap());
            let found = torch::to_f32s(&back.tensor(&name, &shape, Kind::Float, Device::Cpu).unwrap());
            if shape.len() == 1 {
                assert_eq!(found, values, "{name}");
                continue;
            }
            let paired = paired(&config, &name, &shape, values.clone());
            let held = dequantise(quantisation.kind(), &quantise(quantisation, &paired).unwrap(), paired.len());
            let Source::Gguf(file) = &back else { panic!("not GGUF") };
            let tensor = file.tensor(&from_hugging_face(&name).unwrap()).unwrap();
            assert_eq!(dequantise(tensor.kind, &file.read(tensor).unwrap(), held.len()), held, "{name}");
            assert_ne!(found, values, "{name}");
            let largest = values.iter().fold(0_f32, |largest, value| largest.max(value.abs()));
            assert!(found.iter().zip(&values).all(|(found, value)| (found - value).abs() < room * largest), "{name}");
        }
    }
}

#[test]
fn what_makes_it_a_drafter_comes_back() {
    let drafter = DrafterFile {
        kind: "d3d".to_string(),
        block_size: 8,
        labels: "next".to_string(),
        anchor_sees: "block".to_string(),
        mask_token: 3,
        removed_layers: vec![5, 2],
        parent: None,
        recipe_hash: "abc".to_string(),
        thinking: true,
        training_tokens: 1 << 40,
        step: 7,
        layers: 1,
    };
    for drafter in [DrafterFile { parent: Some("step-7".to_string()), removed_layers: Vec::new(), ..drafter.clone() }, drafter] {
        let (_model, source) = random(&config(&[]));
        let (folder, _) = written(&source, Quantisation::Bf16, drafter_metadata(&drafter).unwrap());
        let path = folder.path().join("small.gguf");
        assert_eq!(crate::checkpoint::load(&path, Kind::Float, tch::Device::Cpu).unwrap().1, drafter);
    }
    let message = crate::checkpoint::load_drafter_file(golden("llama_tied.gguf").path()).unwrap_err().to_string();
    assert!(message.contains("llama_tied.gguf") && message.contains("no `drafthorse.` keys"), "{message}");
}

#[test]
fn stop_tokens_come_back_the_tokenizers_first() {
    let text = |id: u32| vec![(STOP_KEYS[0].to_string(), Entry::U32(id))];
    for (stop, text, expected) in [
        (json!([7, 8]), text(8), vec![8, 7]),
        (json!([7, 8, 9]), Vec::new(), vec![7, 8, 9]),
        (json!(7), text(7), vec![7]),
        (json!([]), Vec::new(), vec![]),
    ] {
        let (_model, source) = random(&config(&[("eos_token_id", stop)]));
        let (_folder, back) = written(&source, Quantisation::Bf16, text);
        assert_eq!(back.config().unwrap().eos_token_id, expected);
    }
    let many = config(&[("eos_token_id", json!([6, 7, 8]))]);
    let message = GgufPlan::new(&many, Quantisation::Bf16, Vec::new(), text(9)).unwrap_err().to_string();
    assert!(message.contains("4 tokens end its responses"), "{message}");
}

#[test]
fn what_llama_cpp_would_not_compute_is_refused() {
    let refusal = |config: &ModelConfig, quantisation| {
        GgufPlan::new(config, quantisation, Vec::new(), Vec::new()).map(drop).unwrap_err().to_string()
    };
    let llama3 = |low: f64| {
        json!({"rope_type": "llama3", "factor": 8.0, "low_freq_factor": low, "high_freq_factor": 4.0,
        "original_max_position_embeddings": 64})
    };
    let message = refusal(&config(&[("model_type", json!("qwen3")), ("rope_scaling", llama3(1.0))]), Quantisation::Bf16);
    assert!(message.contains("`llama3` for `llama` only, not for `qwen3`; use --format hf"), "{message}");
    let message = refusal(&config(&[("rope_scaling", llama3(2.0))]), Quantisation::Bf16);
    assert!(message.contains("frequency factors 1 and 4"), "{message}");
    let message = refusal(&config(&[("intermediate_size", json!(80))]), Quantisation::Q8_0);
    assert!(message.contains("rows of 80") && message.contains("--quantisation bf16 or f16"), "{message}");
    for odd in ["q_norm.bias", "mlp.up_proj.bias", "self_attn.q_proj.bias"] {
        let qwen3 = config(&[("model_type", json!("qwen3"))]);
        let message = gguf_name(&qwen3, &format!("model.layers.0.{odd}")).unwrap_err().to_string();
        assert!(message.contains(odd) && message.contains("`qwen3` has no tensor"), "{message}");
    }
}

#[test]
fn yarn_is_written_under_its_keys_where_llama_cpp_computes_the_same() {
    let scaled = |extra: serde_json::Value| {
        let mut json = json!({"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32768});
        extra.as_object().unwrap().iter().for_each(|(key, value)| json[key] = value.clone());
        config(&[("rope_scaling", json)])
    };
    let (keys, factors) = rope_scaling(&scaled(json!({"beta_fast": 16.0}))).unwrap();
    let expected = [
        ("type", Entry::String("yarn".to_string())),
        ("factor", Entry::F32(4.0)),
        ("original_context_length", Entry::U32(32768)),
        ("yarn_beta_fast", Entry::F32(16.0)),
        ("yarn_beta_slow", Entry::F32(1.0)),
    ];
    assert_eq!(keys, expected.map(|(key, entry)| (format!("llama.rope.scaling.{key}"), entry)));
    assert!(factors.is_none());
    for odd in [json!({"attention_factor": 1.0}), json!({"truncate": false}), json!({"mscale": 2.0, "mscale_all_dim": 1.0})] {
        let message = rope_scaling(&scaled(odd.clone())).unwrap_err().to_string();
        assert!(message.contains("`yarn` without what is asked for"), "{odd} {message}");
    }
}

#[test]
fn every_scaling_that_can_be_written_reads_back() {
    let llama3 = json!({"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
        "original_max_position_embeddings": 64});
    let linear = json!({"rope_type": "linear", "factor": 2.5});
    let yarn = json!({"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 64, "beta_slow": 2.0});
    let spoken = json!({"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 64,
        "attention_factor": 0.1 * 4.0_f64.ln() + 1.0});
    for scaling in [json!(null), llama3, linear, yarn, spoken] {
        let (_model, source) = random(&config(&[("rope_scaling", scaling.clone())]));
        let (_folder, back) = written(&source, Quantisation::Bf16, Vec::new());
        let (found, expected) = (back.config().unwrap().rope_scaling, source.config().unwrap().rope_scaling);
        match (found, expected) {
            (Some(RopeScaling::Yarn(found)), Some(RopeScaling::Yarn(expected))) => {
                assert_eq!(found, YarnScaling { attention_factor: None, ..expected });
            }
            (found, expected) => assert_eq!(found, expected, "{scaling}"),
        }
    }
}

#[test]
fn a_file_that_reads_back_as_another_model_is_an_error() {
    let (_model, source) = random(&config(&[]));
    let folder = tempfile::tempdir().unwrap();
    let mut plan = GgufPlan::new(&source.config().unwrap(), Quantisation::Bf16, Vec::new(), Vec::new()).unwrap();
    plan.config.rope_theta = 5e5;
    let message = plan.write(&folder.path().join("other.gguf"), &source, &mut || true).unwrap_err().to_string();
    assert!(message.contains("`rope_theta` is 10000.0 instead of 500000.0"), "{message}");
    let message = plan.write(&folder.path().join("absent/other.gguf"), &source, &mut || true).unwrap_err().to_string();
    assert!(message.contains("cannot write") && message.contains("absent/other.gguf"), "{message}");
    assert!(matches!(plan.write(&folder.path().join("other.gguf"), &source, &mut || false), Err(ExportError::Interrupted)));
}
