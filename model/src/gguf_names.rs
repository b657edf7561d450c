//! GGUF's names for what Hugging Face calls otherwise: tensors, and the metadata that makes up a configuration.

use data::gguf::{GgufError, GgufFile};
use serde_json::{Value, json};

use crate::weights::WeightsError;

/// (Hugging Face, GGUF) within a layer, without `.weight`.
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
    let (layer, inner) = name.strip_prefix("model.layers.")?.strip_suffix(".weight")?.split_once('.')?;
    let (_, gguf) = IN_LAYER.iter().find(|(hugging_face, _)| *hugging_face == inner)?;
    Some(format!("blk.{layer}.{gguf}.weight"))
}

/// The other way; `None` for a tensor that has no counterpart.
pub(crate) fn to_hugging_face(name: &str) -> Option<String> {
    if let Some((hugging_face, _)) = OUTSIDE.iter().find(|(_, gguf)| *gguf == name) {
        return Some(hugging_face.to_string());
    }
    let (layer, inner) = name.strip_prefix("blk.")?.strip_suffix(".weight")?.split_once('.')?;
    let (hugging_face, _) = IN_LAYER.iter().find(|(_, gguf)| *gguf == inner)?;
    Some(format!("model.layers.{layer}.{hugging_face}.weight"))
}

/// Number of heads of a projection whose rows llama.cpp's converter reorders: Llama's queries and keys, nothing of Qwen3's.
pub(crate) fn interleaved_heads(file: &GgufFile, name: &str) -> Option<i64> {
    let queries = name.ends_with("self_attn.q_proj.weight");
    if file.string("general.architecture").ok()? != "llama" || !(queries || name.ends_with("self_attn.k_proj.weight")) {
        return None;
    }
    let heads = file.unsigned("llama.attention.head_count").ok()?;
    let heads = if queries { heads } else { file.unsigned("llama.attention.head_count_kv").unwrap_or(heads) };
    i64::try_from(heads).ok().filter(|&heads| heads > 0)
}

/// What `config.json` would say of this model.
pub(crate) fn config_json(file: &GgufFile) -> Result<Value, WeightsError> {
    let architecture = file.string("general.architecture")?;
    let key = |name: &str| format!("{architecture}.{name}");
    let unsupported = |what: String| WeightsError::Unsupported { path: file.path.clone(), what };
    if !["llama", "qwen3"].contains(&architecture) {
        return Err(unsupported(format!("holds the architecture `{architecture}`; supported are `llama` and `qwen3`")));
    }
    if optional(file.unsigned("split.count"))?.is_some_and(|parts| parts > 1) {
        return Err(unsupported("is one of several parts; join them with `llama-gguf-split --merge`".to_string()));
    }
    if optional(file.unsigned(&key("expert_count")))?.is_some_and(|experts| experts > 0) {
        return Err(unsupported("holds a mixture of experts, which is not supported".to_string()));
    }
    if optional(file.string(&key("rope.scaling.type")))?.is_some_and(|kind| kind != "none") {
        return Err(unsupported("stretches RoPE in a way that is not supported; use the model's safetensors".to_string()));
    }
    if file.tensor("rope_freqs.weight").is_some() {
        let what = "holds a table of RoPE factors, from which Llama 3's scaling cannot be read back; use the model's safetensors";
        return Err(unsupported(what.to_string()));
    }
    if let Some(bias) = file.tensors.iter().find(|tensor| tensor.name.starts_with("blk.") && tensor.name.ends_with(".bias")) {
        return Err(unsupported(format!("has the bias `{}`; models with biases are not supported", bias.name)));
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
    // The rows of the embedding, not the tokenizer's entries, bound the ids that a model may be given.
    let embedding = file.tensor("token_embd.weight");
    let vocabulary = embedding.and_then(|tensor| tensor.shape.first().copied());
    let mut stop = Vec::new();
    for name in ["tokenizer.ggml.eos_token_id", "tokenizer.ggml.eot_token_id"] {
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
        "rope_theta": shortest(optional(file.float(&key("rope.freq_base")))?.unwrap_or(10_000.0)),
        "vocab_size": vocabulary,
        "tie_word_embeddings": file.tensor("output.weight").is_none(),
        "max_position_embeddings": file.unsigned(&key("context_length"))?,
        "bos_token_id": optional(file.unsigned("tokenizer.ggml.bos_token_id"))?,
        "eos_token_id": stop,
    }))
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
        ] {
            assert_eq!(from_hugging_face(hugging_face).unwrap(), gguf);
            assert_eq!(to_hugging_face(gguf).unwrap(), hugging_face);
        }
        assert_eq!(from_hugging_face("model.layers.0.other.weight"), None);
        assert_eq!(to_hugging_face("rope_freqs.weight"), None);
    }

    #[test]
    fn numbers_are_read_as_they_were_meant() {
        assert_eq!(shortest(f64::from(1e-5_f32)), 1e-5);
        assert_eq!(shortest(f64::from(1e6_f32)), 1e6);
    }
}
