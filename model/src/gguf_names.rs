//! GGUF's names for what Hugging Face calls otherwise: tensors, and the metadata that makes up a configuration.

use data::gguf::{GgufError, GgufFile};
use serde_json::{Value, json};

use crate::dequantise::dequantise;
use crate::gguf_export::STOP_KEYS;
use crate::rope::{self, Llama3Scaling, RopeScaling, YarnScaling, plain_frequencies};
use crate::weights::WeightsError;

/// One factor for each pair that RoPE turns, by which the pair's frequency is divided: how llama.cpp's converter writes Llama 3's scaling.
pub(crate) const ROPE_FACTORS: &str = "rope_freqs.weight";

/// Relative difference between a stored RoPE factor and ours; the converter computes in f32.
const FACTOR_TOLERANCE: f32 = 1e-3;

/// (Hugging Face, GGUF) within a layer, without `.weight` or `.bias`.
const IN_LAYER: [(&str, &str); 11] = [
    ("input_layernorm", "attn_norm"),
    ("self_attn.q_proj", "attn_q"),
    ("self_attn.k_proj", "attn_k"),
    ("self_attn.v_proj", "attn_v"),
    ("self_attn.o_proj", "attn_output"),
    ("self_attn.q_norm", "attn_q_norm"),
    ("self_attn.k_norm", "attn_k_norm"),
    ("post_attention_layernorm", "ffn_norm"),
    ("mlp.gate_proj", "ffn_gate"),
    ("mlp.up_proj", "ffn_up"),
    ("mlp.down_proj", "ffn_down"),
];

/// (Hugging Face, GGUF) outside the layers.
const OUTSIDE: [(&str, &str); 3] = [
    ("model.embed_tokens.weight", "token_embd.weight"),
    ("model.norm.weight", "output_norm.weight"),
    ("lm_head.weight", "output.weight"),
];

/// `model.layers.3.self_attn.q_proj.weight` → `blk.3.attn_q.weight`; `None` for a name that no model here has.
pub(crate) fn from_hugging_face(name: &str) -> Option<String> {
    if let Some((_, gguf)) = OUTSIDE.iter().find(|(hugging_face, _)| *hugging_face == name) {
        return Some(gguf.to_string());
    }
    let (layer, inner) = name.strip_prefix("model.layers.")?.split_once('.')?;
    let (inner, suffix) = inner.rsplit_once('.')?;
    let (_, gguf) = IN_LAYER.iter().find(|(hugging_face, _)| *hugging_face == inner)?;
    is_suffix(suffix).then(|| format!("blk.{layer}.{gguf}.{suffix}"))
}

fn is_suffix(suffix: &str) -> bool {
    ["weight", "bias"].contains(&suffix)
}

/// The other way; `None` for a tensor that has no counterpart.
pub(crate) fn to_hugging_face(name: &str) -> Option<String> {
    if let Some((hugging_face, _)) = OUTSIDE.iter().find(|(_, gguf)| *gguf == name) {
        return Some(hugging_face.to_string());
    }
    let (layer, inner) = name.strip_prefix("blk.")?.split_once('.')?;
    let (inner, suffix) = inner.rsplit_once('.')?;
    let (hugging_face, _) = IN_LAYER.iter().find(|(_, gguf)| *gguf == inner)?;
    is_suffix(suffix).then(|| format!("model.layers.{layer}.{hugging_face}.{suffix}"))
}

/// Number of heads of a projection whose rows, of weight and bias alike, llama.cpp's converter reorders: Llama's queries and keys, nothing
/// of Qwen's.
pub(crate) fn interleaved_heads(file: &GgufFile, name: &str) -> Option<i64> {
    let (of_queries, of_keys) = (name.contains(".self_attn.q_proj."), name.contains(".self_attn.k_proj."));
    if file.string("general.architecture").ok()? != "llama" || !(of_queries || of_keys) {
        return None;
    }
    let heads = file.unsigned("llama.attention.head_count").ok()?;
    let heads = if of_queries { heads } else { file.unsigned("llama.attention.head_count_kv").unwrap_or(heads) };
    i64::try_from(heads).ok().filter(|&heads| heads > 0)
}

/// What `config.json` would say of this model.
pub(crate) fn config_json(file: &GgufFile) -> Result<Value, WeightsError> {
    let architecture = file.string("general.architecture")?;
    let key = |name: &str| format!("{architecture}.{name}");
    let unsupported = |what: String| WeightsError::Unsupported { path: file.path.clone(), what };
    if !["llama", "qwen2", "qwen3"].contains(&architecture) {
        return Err(unsupported(format!("holds the architecture `{architecture}`; supported are `llama`, `qwen2` and `qwen3`")));
    }
    if optional(file.unsigned("split.count"))?.is_some_and(|parts| parts > 1) {
        return Err(unsupported("is one of several parts; join them with `llama-gguf-split --merge`".to_string()));
    }
    if optional(file.unsigned(&key("expert_count")))?.is_some_and(|experts| experts > 0) {
        return Err(unsupported("holds a mixture of experts, which is not supported".to_string()));
    }
    let heads = file.unsigned(&key("attention.head_count"))?;
    let hidden = file.unsigned(&key("embedding_length"))?;
    let head_dim = match optional(file.unsigned(&key("attention.key_length")))? {
        Some(length) => length,
        None => hidden.checked_div(heads).unwrap_or(0),
    };
    if optional(file.unsigned(&key("rope.dimension_count")))?.is_some_and(|rotated| rotated != head_dim) {
        return Err(unsupported("turns only a part of each head by RoPE, which is not supported".to_string()));
    }
    let rope_theta = shortest(optional(file.float(&key("rope.freq_base")))?.unwrap_or(10_000.0));
    let context_length = file.unsigned(&key("context_length"))?;
    let rope_scaling = match llama3_scaling(file, rope_theta, head_dim)? {
        Some(scaling) => Some(RopeScaling::Llama3(scaling)),
        None => stated_scaling(file, architecture, context_length)?,
    };
    // Qwen2's biases go without saying.
    let biased = |name: &str| file.tensor(&format!("blk.0.{name}.bias")).is_some();
    // The rows of the embedding, not the tokenizer's entries, bound the ids that a model may be given.
    let embedding = file.tensor("token_embd.weight");
    let vocabulary = embedding.and_then(|tensor| tensor.shape.first().copied());
    let mut stop = Vec::new();
    for name in STOP_KEYS {
        stop.extend(optional(file.unsigned(name))?.filter(|id| !stop.contains(id)));
    }
    Ok(json!({
        "model_type": architecture,
        "hidden_size": hidden,
        "intermediate_size": file.unsigned(&key("feed_forward_length"))?,
        "num_hidden_layers": file.unsigned(&key("block_count"))?,
        "num_attention_heads": heads,
        "num_key_value_heads": optional(file.unsigned(&key("attention.head_count_kv")))?.unwrap_or(heads),
        "head_dim": head_dim,
        "rms_norm_eps": shortest(file.float(&key("attention.layer_norm_rms_epsilon"))?),
        "rope_theta": rope_theta,
        "rope_scaling": rope::to_json(rope_scaling.as_ref()),
        "attention_bias": architecture != "qwen2" && biased("attn_q"),
        "mlp_bias": architecture == "llama" && biased("ffn_gate"),
        "vocab_size": vocabulary,
        "tie_word_embeddings": file.tensor("output.weight").is_none(),
        "max_position_embeddings": context_length,
        "bos_token_id": optional(file.unsigned("tokenizer.ggml.bos_token_id"))?,
        "eos_token_id": stop,
    }))
}

/// Llama 3's scaling, recovered from the table of RoPE factors; `None` without a table.
///
/// The table does not say how it was made. The largest factor is the scaling's own, the other values are those of every Llama 3.1 and
/// later, but for an original length that the metadata may name; that they are the right ones shows in every entry of the table.
fn llama3_scaling(file: &GgufFile, rope_theta: f64, head_dim: u64) -> Result<Option<Llama3Scaling>, WeightsError> {
    let Some(table) = file.tensor(ROPE_FACTORS) else { return Ok(None) };
    let unsupported = |what: String| WeightsError::Unsupported { path: file.path.clone(), what };
    let pairs = head_dim / 2;
    if table.shape != [pairs as usize] {
        let shape = &table.shape;
        return Err(unsupported(format!(
            "has `{ROPE_FACTORS}` in the shape {shape:?}, but heads of {head_dim} have {pairs} pairs; use the model's safetensors"
        )));
    }
    let factors = dequantise(table.kind, &file.read(table)?, pairs as usize);
    let architecture = file.string("general.architecture")?;
    let original = optional(file.unsigned(&format!("{architecture}.rope.scaling.original_context_length")))?;
    let scaling = Llama3Scaling {
        factor: shortest(f64::from(factors.iter().copied().fold(1.0, f32::max))),
        low_freq_factor: 1.0,
        high_freq_factor: 4.0,
        original_max_position_embeddings: original.and_then(|length| i64::try_from(length).ok()).unwrap_or(8192),
    };
    for (pair, (&found, frequency)) in factors.iter().zip(plain_frequencies(rope_theta, head_dim as i64)).enumerate() {
        let expected = frequency / scaling.scale(frequency);
        // A comparison with NaN is false, so that such an entry is refused too.
        let agrees = (found - expected).abs() <= FACTOR_TOLERANCE * expected;
        if !agrees {
            return Err(unsupported(format!(
                "has a table of RoPE factors, `{ROPE_FACTORS}`, that is not Llama 3's scaling by {}: factor {pair} is {found}, not \
                 {expected:.4}; use the model's safetensors",
                scaling.factor
            )));
        }
    }
    Ok(Some(scaling))
}

/// The scaling that the metadata states: linear, or YaRN as llama.cpp computes it (`rope_yarn` in ggml), whose ramp and attention factor
/// are those that `transformers` takes where nothing else is said.
fn stated_scaling(file: &GgufFile, architecture: &str, context_length: u64) -> Result<Option<RopeScaling>, WeightsError> {
    let prefix = format!("{architecture}.rope.scaling.");
    let key = |name: &str| format!("{prefix}{name}");
    let unsupported = |what: String| WeightsError::Unsupported { path: file.path.clone(), what };
    let kind = optional(file.string(&key("type")))?.unwrap_or("none");
    let read: &[&str] = match kind {
        "none" => return Ok(None),
        "linear" => &["type", "factor", "finetuned", "original_context_length"],
        "yarn" => &["type", "factor", "finetuned", "original_context_length", "yarn_beta_fast", "yarn_beta_slow"],
        _ => return Err(unsupported(format!("scales RoPE by `{kind}`; supported are `linear` and `yarn`"))),
    };
    let other = file.metadata.keys().filter_map(|key| key.strip_prefix(&prefix)).find(|key| !read.contains(key));
    if let Some(other) = other {
        return Err(unsupported(format!(
            "scales RoPE by `{kind}` with `{prefix}{other}`, which is not supported; use the model's safetensors"
        )));
    }
    let factor = shortest(file.float(&key("factor"))?);
    if kind == "linear" {
        return Ok(Some(RopeScaling::Linear { factor }));
    }
    let or = |name: &str, absent: f64| Ok::<_, GgufError>(optional(file.float(&key(name)))?.map_or(absent, shortest));
    Ok(Some(RopeScaling::Yarn(YarnScaling {
        factor,
        original_max_position_embeddings: optional(file.unsigned(&key("original_context_length")))?.unwrap_or(context_length)
            as i64,
        beta_fast: or("yarn_beta_fast", 32.0)?,
        beta_slow: or("yarn_beta_slow", 1.0)?,
        truncate: true,
        attention_factor: None,
        mscale: None,
        mscale_all_dim: None,
    })))
}

/// A key may be absent, but not of the wrong type.
fn optional<T>(value: Result<T, GgufError>) -> Result<Option<T>, GgufError> {
    match value {
        Err(GgufError::MissingKey { .. }) => Ok(None),
        value => value.map(Some),
    }
}

/// GGUF stores these numbers as f32, where 1e-5 becomes 9.999999747378752e-6: this gives back the number that was meant.
fn shortest(value: f64) -> f64 {
    (value as f32).to_string().parse().unwrap_or(value)
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]
    use super::*;

    #[test]
    fn names_map_both_ways() {
        for (hugging_face, gguf) in [
            ("model.embed_tokens.weight", "token_embd.weight"),
            ("lm_head.weight", "output.weight"),
            ("model.layers.12.self_attn.o_proj.weight", "blk.12.attn_output.weight"),
            ("model.layers.0.post_attention_layernorm.weight", "blk.0.ffn_norm.weight"),
            ("model.layers.3.self_attn.q_proj.bias", "blk.3.attn_q.bias"),
            ("model.layers.3.mlp.down_proj.bias", "blk.3.ffn_down.bias"),
        ] {
            assert_eq!(from_hugging_face(hugging_face).unwrap(), gguf);
            assert_eq!(to_hugging_face(gguf).unwrap(), hugging_face);
        }
        assert_eq!(from_hugging_face("model.layers.0.other.weight"), None);
        assert_eq!(from_hugging_face("model.layers.0.self_attn.q_proj.weight_scale"), None);
        assert_eq!(to_hugging_face("rope_freqs.weight"), None);
    }

    const HEAD_DIM: usize = 64;
    const ROPE_THETA: f32 = 500_000.0;

    fn text(out: &mut Vec<u8>, text: &str) {
        out.extend((text.len() as u64).to_le_bytes());
        out.extend(text.as_bytes());
    }

    /// A GGUF file written byte by byte: the keys of a small Llama, and the tensors given, as F32 with one dimension.
    fn llama(tensors: &[(&str, &[f32])]) -> (tempfile::TempDir, GgufFile) {
        llama_with(None, tensors)
    }

    /// The same with a kind of RoPE scaling by 4 from 32 positions.
    fn llama_with(scaling: Option<&str>, tensors: &[(&str, &[f32])]) -> (tempfile::TempDir, GgufFile) {
        let mut words = vec![("general.architecture", "llama")];
        words.extend(scaling.map(|kind| ("llama.rope.scaling.type", kind)));
        let mut numbers = vec![
            ("embedding_length", 128),
            ("attention.head_count", 2),
            ("feed_forward_length", 64),
            ("block_count", 1),
            ("context_length", 64),
        ];
        let mut floats = vec![("attention.layer_norm_rms_epsilon", 1e-5), ("rope.freq_base", ROPE_THETA)];
        if scaling.is_some() {
            numbers.push(("rope.scaling.original_context_length", 32));
            floats.push(("rope.scaling.factor", 4.0));
        }
        let mut out = b"GGUF".to_vec();
        out.extend(3_u32.to_le_bytes());
        out.extend((tensors.len() as u64).to_le_bytes());
        out.extend(((words.len() + numbers.len() + floats.len()) as u64).to_le_bytes());
        for (key, word) in words {
            text(&mut out, key);
            out.extend(8_u32.to_le_bytes());
            text(&mut out, word);
        }
        for (key, value) in numbers {
            text(&mut out, &format!("llama.{key}"));
            out.extend(4_u32.to_le_bytes());
            out.extend(u32::to_le_bytes(value));
        }
        for (key, value) in floats {
            text(&mut out, &format!("llama.{key}"));
            out.extend(6_u32.to_le_bytes());
            out.extend(f32::to_le_bytes(value));
        }
        let mut data: Vec<u8> = Vec::new();
        for (name, values) in tensors {
            text(&mut out, name);
            out.extend(1_u32.to_le_bytes());
            out.extend((values.len() as u64).to_le_bytes());
            out.extend(0_u32.to_le_bytes());
            out.extend((data.len() as u64).to_le_bytes());
            data.extend(values.iter().flat_map(|value| value.to_le_bytes()));
            data.resize(data.len().next_multiple_of(32), 0);
        }
        out.resize(out.len().next_multiple_of(32), 0);
        out.extend(data);
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("small.gguf");
        std::fs::write(&path, out).unwrap();
        let file = GgufFile::open(&path).unwrap();
        (folder, file)
    }

    /// The table as llama.cpp's converter computes it, by wavelengths and in f32.
    fn converters_table(factor: f32, original_length: f32) -> Vec<f32> {
        let factor_of = |pair: usize| {
            let frequency = 1.0 / ROPE_THETA.powf(2.0 * pair as f32 / HEAD_DIM as f32);
            let wavelength = 2.0 * std::f32::consts::PI / frequency;
            if wavelength < original_length / 4.0 {
                return 1.0;
            }
            if wavelength > original_length {
                return factor;
            }
            let smooth = (original_length / wavelength - 1.0) / 3.0;
            1.0 / ((1.0 - smooth) / factor + smooth)
        };
        (0..HEAD_DIM / 2).map(factor_of).collect()
    }

    fn scaling_of(table: &[f32]) -> Result<Value, String> {
        let (_folder, file) = llama(&[("token_embd.weight", &[0.0; 8]), (ROPE_FACTORS, table)]);
        let json = config_json(&file).map_err(|error| error.to_string())?;
        assert!(crate::ModelConfig::from_json(&json).unwrap().rope_scaling.is_some());
        Ok(json["rope_scaling"].clone())
    }

    #[test]
    fn the_scaling_of_llama_3_is_recovered_from_its_table() {
        for factor in [8.0, 32.0] {
            let table = converters_table(factor, 8192.0);
            // The test means something only when the table has entries of all three kinds.
            assert!(table[0] == 1.0 && table[HEAD_DIM / 2 - 1] == factor);
            assert!(table.iter().any(|&entry| entry > 1.0 && entry < factor));
            let expected = json!({"rope_type": "llama3", "factor": f64::from(factor), "low_freq_factor": 1.0, "high_freq_factor": 4.0,
                                  "original_max_position_embeddings": 8192});
            assert_eq!(scaling_of(&table).unwrap(), expected);
        }
        let (_folder, file) = llama(&[("token_embd.weight", &[0.0; 8])]);
        assert_eq!(config_json(&file).unwrap()["rope_scaling"], Value::Null);
    }

    #[test]
    fn scalings_in_the_metadata_are_read_or_refused_by_name() {
        let read = |kind: &str| {
            let (_folder, file) = llama_with(Some(kind), &[("token_embd.weight", &[0.0; 8])]);
            let json = config_json(&file).map_err(|error| error.to_string())?;
            Ok::<_, String>(crate::ModelConfig::from_json(&json).unwrap().rope_scaling)
        };
        let Ok(Some(RopeScaling::Yarn(yarn))) = read("yarn") else { panic!("no YaRN") };
        assert_eq!((yarn.factor, yarn.original_max_position_embeddings), (4.0, 32));
        assert_eq!((yarn.beta_fast, yarn.beta_slow, yarn.attention_factor), (32.0, 1.0, None));
        assert_eq!(read("none"), Ok(None));
        assert_eq!(read("linear"), Ok(Some(RopeScaling::Linear { factor: 4.0 })));
        let message = read("longrope").unwrap_err();
        assert!(
            message.contains("small.gguf") && message.contains("by `longrope`; supported are `linear` and `yarn`"),
            "{message}"
        );

        let (_folder, mut file) = llama_with(Some("yarn"), &[("token_embd.weight", &[0.0; 8])]);
        file.metadata.insert("llama.rope.scaling.attn_factor".to_string(), data::gguf::Value::F64(0.5));
        let message = config_json(&file).unwrap_err().to_string();
        assert!(message.contains("`llama.rope.scaling.attn_factor`"), "{message}");
    }

    #[test]
    fn tables_of_another_scaling_are_refused() {
        let mut damaged = converters_table(8.0, 8192.0);
        damaged[3] = f32::NAN;
        let mut off = converters_table(8.0, 8192.0);
        off[31] *= 0.99;
        for table in [converters_table(8.0, 4096.0), damaged, off, vec![0.5; HEAD_DIM / 2], vec![f32::INFINITY; HEAD_DIM / 2]] {
            let message = scaling_of(&table).unwrap_err();
            assert!(message.contains("small.gguf") && message.contains("`rope_freqs.weight`"), "{message}");
            assert!(message.contains("not Llama 3's scaling") && message.contains("use the model's safetensors"), "{message}");
        }
        let message = scaling_of(&[1.0; 8]).unwrap_err();
        assert!(message.contains("`rope_freqs.weight`") && message.contains("32 pairs"), "{message}");
    }

    #[test]
    fn numbers_are_read_as_they_were_meant() {
        assert_eq!(shortest(f64::from(1e-5_f32)), 1e-5);
        assert_eq!(shortest(f64::from(1e6_f32)), 1e6);
    }
}
