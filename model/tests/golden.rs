//! Logits and greedy text against Hugging Face `transformers`: `tests/golden/make_logits.py` made the files.
//!
//! Shapes legend: see the crate's documentation.
#![allow(clippy::unwrap_used)]

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};

use model::tensor_file::load_safetensors;
use model::{BlockPattern, CachedAttention, KvCache, PackedAttention, Piece, Sequence, Transformer, weights};
use serde_json::Value;
use tch::{Device, Kind, Tensor};

const TOLERANCE: f64 = 1e-4;
/// Every family, with and without each of: a tied head, biases, each scaling of RoPE, heads of another size than hidden / heads, shards.
const TINY_MODELS: [&str; 10] = [
    "llama_tied",
    "llama_untied_scaled",
    "llama_tied_scaled_biased",
    "llama_untied_linear_biased",
    "qwen2_tied",
    "qwen2_untied_yarn",
    "qwen3_tied",
    "qwen3_tied_yarn",
    "qwen3_untied_biased",
    "qwen3_untied_sharded",
];
const TINY_FILES: [&str; 5] =
    ["llama_tied.gguf", "llama_untied_linear_biased.gguf", "qwen2_tied.gguf", "qwen3_tied.gguf", "qwen3_tied_yarn.gguf"];

/// The tests run side by side: with one thread each, none of libtorch's threads waits for a core that another test holds.
fn begin() -> tch::NoGradGuard {
    torch::set_num_threads(1);
    tch::no_grad_guard()
}

fn golden(name: &str) -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("../tests/golden/logits").join(name)
}

fn load(path: &Path) -> Transformer {
    weights::load(path, Kind::Float, Device::Cpu).unwrap()
}

fn sample_model() -> Transformer {
    let path = Path::new(env!("CARGO_MANIFEST_DIR")).join("../.models/SmolLM2-135M-Instruct.Q4_1.gguf");
    assert!(path.is_file(), "the sample model is missing: run `make setup` first");
    load(&path)
}

/// What each layer puts out, `[L, T, D]`, for one sequence in one forward without a cache.
fn layers(model: &Transformer, ids_t: &Tensor) -> Tensor {
    let rows = ids_t.size()[0] as usize;
    let whole = Sequence { first_row: 0, clean: rows, anchors: Vec::new() };
    let mut attention = PackedAttention::new(&[whole], BlockPattern { size: 1, anchor_sees_block: true }, Device::Cpu);
    let rope = model.rope(&Tensor::arange(rows as i64, (Kind::Int64, Device::Cpu)));
    let mut hidden_td = model.embed(ids_t);
    let mut outputs = Vec::new();
    for index in 0..model.layers.len() {
        hidden_td = model.forward_layers(index..index + 1, hidden_td, &rope, &mut attention);
        outputs.push(hidden_td.shallow_clone());
    }
    Tensor::stack(&outputs, 0)
}

/// Logits `[T, V]` of one sequence in one forward without a cache.
fn without_cache(model: &Transformer, ids_t: &Tensor) -> Tensor {
    model.logits(&layers(model, ids_t).select(0, -1))
}

/// Appends `ids_t` to the cache's lane and returns their logits `[T, V]`.
fn extend(model: &Transformer, cache: &mut KvCache, lane: usize, ids_t: &Tensor) -> Tensor {
    let (held, rows) = (cache.length(lane), ids_t.size()[0] as usize);
    let positions_t = Tensor::arange(rows as i64, (Kind::Int64, Device::Cpu)) + held as i64;
    let piece = Piece::causal(lane, 0..rows, Device::Cpu);
    let hidden_td = model.forward(ids_t, &positions_t, &mut CachedAttention::new(cache, vec![piece]));
    cache.set_length(lane, held + rows);
    model.logits(&hidden_td)
}

/// Logits `[T, V]` of one sequence, handed to the cache in parts of these lengths; the last part takes what is left.
fn in_parts(model: &Transformer, ids_t: &Tensor, mut lengths: impl Iterator<Item = i64>) -> Tensor {
    let rows = ids_t.size()[0];
    // The second of two lanes: one that reads the wrong lane sees zeros.
    let mut cache = KvCache::new(&model.config, 2, rows as usize, Kind::Float, Device::Cpu);
    let mut logits = Vec::new();
    let mut start = 0;
    while start < rows {
        let length = lengths.next().unwrap_or(rows).min(rows - start);
        logits.push(extend(model, &mut cache, 1, &ids_t.narrow(0, start, length)));
        start += length;
    }
    Tensor::cat(&logits, 0)
}

/// All ways to compute the logits of one sequence, by name.
fn all_ways(model: &Transformer, ids_t: &Tensor) -> Vec<(&'static str, Tensor)> {
    let then = |first: i64, repeated: i64| std::iter::once(first).chain(std::iter::repeat(repeated));
    vec![
        ("without cache", without_cache(model, ids_t)),
        ("with cache, at once", in_parts(model, ids_t, std::iter::empty())),
        ("with cache, prefill and single tokens", in_parts(model, ids_t, then(11, 1))),
        ("with cache, single tokens", in_parts(model, ids_t, std::iter::repeat(1))),
        ("with cache, chunks", in_parts(model, ids_t, then(3, 7))),
    ]
}

fn assert_close(found: &Tensor, expected: &Tensor, what: &str) {
    assert_eq!(found.size(), expected.size(), "{what}");
    let difference = (found - expected).abs().max().double_value(&[]);
    assert!(difference < TOLERANCE, "{what}: they differ by {difference}");
}

fn assert_tiny_model_matches(name: &str) {
    let folder = golden(name.trim_end_matches(".gguf"));
    let expected: BTreeMap<String, Tensor> = load_safetensors(&folder.join("golden.safetensors")).unwrap();
    let by_layer = load_safetensors(&folder.join("layers.safetensors")).unwrap();
    let model = load(&golden(name));
    let hidden_ltd = layers(&model, &expected["ids"]);
    for layer in 0..model.layers.len() as i64 {
        assert_close(
            &hidden_ltd.get(layer),
            &by_layer["hidden"].get(layer),
            &format!("{name}, hidden states after layer {layer}"),
        );
    }
    // Without lively logits a comparison to an absolute tolerance would prove little.
    assert!(expected["logits"].std(false).double_value(&[]) > 0.5, "{name}");
    for (way, logits) in all_ways(&model, &expected["ids"]) {
        assert_close(&logits, &expected["logits"], &format!("{name}, logits {way}"));
    }
}

#[test]
fn tiny_models_match_after_every_layer_and_at_every_position_with_and_without_cache() {
    let _no_gradients = begin();
    TINY_MODELS.into_iter().chain(TINY_FILES).for_each(assert_tiny_model_matches);
}

/// Where a scaling is to show, positions go beyond those before it.
#[test]
fn sequences_of_scaled_models_are_longer_than_their_original_context() {
    for name in ["llama_tied_scaled_biased", "qwen2_untied_yarn", "qwen3_tied_yarn"] {
        let config = weights::open(&golden(name)).unwrap().config().unwrap();
        let original = config.to_json("float32")["rope_scaling"]["original_max_position_embeddings"].as_i64().unwrap();
        let rows = load_safetensors(&golden(name).join("golden.safetensors")).unwrap()["ids"].size()[0];
        assert!(rows > 3 * original, "{name}: {rows} rows, {original} original positions");
    }
}

#[test]
fn in_bf16_logits_deviate_no_more_than_those_of_transformers() {
    let _no_gradients = begin();
    for name in TINY_MODELS {
        let expected = load_safetensors(&golden(name).join("golden.safetensors")).unwrap();
        let theirs = torch::to_f32s(&load_safetensors(&golden(name).join("layers.safetensors")).unwrap()["bf16_deviation"]);
        let model = weights::load(&golden(name), Kind::BFloat16, Device::Cpu).unwrap();
        let difference = without_cache(&model, &expected["ids"]) - &expected["logits"];
        let root_mean_square = difference.square().mean(Kind::Float).sqrt().double_value(&[]);
        let largest = difference.abs().max().double_value(&[]);
        println!(
            "{name}: bf16 logits deviate by {root_mean_square:.4} (transformers' {:.4}) in the root mean square, by {largest:.4} ({:.4}) at most",
            theirs[0], theirs[1]
        );
        assert!(root_mean_square > 1e-4, "{name} was not computed in bf16");
        // Tables of RoPE stay in f32 here, which transformers rounds; beyond that both round as often, but not alike.
        assert!(root_mean_square < 1.25 * f64::from(theirs[0]), "{name}: {root_mean_square} against {}", theirs[0]);
        assert!(largest < 2.0 * f64::from(theirs[1]), "{name}: {largest} against {}", theirs[1]);
    }
}

#[test]
fn a_written_configuration_gives_the_same_model() {
    let _no_gradients = begin();
    for name in TINY_MODELS {
        let folder = tempfile::tempdir().unwrap();
        for entry in std::fs::read_dir(golden(name)).unwrap() {
            let path = entry.unwrap().path();
            std::fs::copy(&path, folder.path().join(path.file_name().unwrap())).unwrap();
        }
        let config = weights::open(folder.path()).unwrap().config().unwrap();
        std::fs::write(folder.path().join("config.json"), config.to_json("float32").to_string()).unwrap();
        assert_eq!(weights::open(folder.path()).unwrap().config().unwrap(), config, "{name}");
        let expected = load_safetensors(&golden(name).join("golden.safetensors")).unwrap();
        assert_close(&without_cache(&load(folder.path()), &expected["ids"]), &expected["logits"], name);
    }
}

#[test]
fn the_sample_model_matches_at_every_position_with_and_without_cache() {
    let _no_gradients = begin();
    let expected = load_safetensors(&golden("smollm2.safetensors")).unwrap();
    let model = sample_model();
    for (way, logits) in all_ways(&model, &expected["ids"]) {
        assert_close(&logits.index_select(1, &expected["columns"]), &expected["logits"], way);
        assert_close(&logits.logsumexp([1], false), &expected["logsumexp"], &format!("{way}, logsumexp"));
        assert_eq!(logits.argmax(1, false), expected["argmax"], "{way}");
    }
}

#[test]
fn the_sample_model_writes_the_same_greedy_text() {
    let _no_gradients = begin();
    let model = sample_model();
    let prompts: Value = serde_json::from_str(&std::fs::read_to_string(golden("smollm2_greedy.json")).unwrap()).unwrap();
    let ids_of = |value: &Value| -> Vec<u32> { value.as_array().unwrap().iter().map(|id| id.as_u64().unwrap() as u32).collect() };
    assert_eq!(prompts.as_array().unwrap().len(), 5);
    for prompt in prompts.as_array().unwrap() {
        let (prompt_ids, expected) = (ids_of(&prompt["prompt_ids"]), ids_of(&prompt["response_ids"]));
        let mut cache = KvCache::new(&model.config, 1, prompt_ids.len() + expected.len(), Kind::Float, Device::Cpu);
        let mut next_ids = prompt_ids;
        let mut response = Vec::new();
        while response.len() < expected.len() {
            let logits = extend(&model, &mut cache, 0, &torch::ids_tensor(&next_ids, Device::Cpu));
            let token = logits.select(0, -1).argmax(0, false).int64_value(&[]) as u32;
            response.push(token);
            next_ids = vec![token];
        }
        assert_eq!(response, expected, "{}", prompt["text"]);
    }
}
