//! A model's shape, read from and written to Hugging Face's `config.json`, under its field names.

use serde::Serialize;
use serde_json::{Map, Value};

use crate::rope::{self, RopeScaling};

/// Model types and the class names that `transformers` gives them.
const ARCHITECTURES: [(&str, &str); 3] =
    [("llama", "LlamaForCausalLM"), ("qwen2", "Qwen2ForCausalLM"), ("qwen3", "Qwen3ForCausalLM")];

/// Kinds of weights that can be read, by PyTorch's names.
const DTYPES: &str = "bfloat16, float16, float32, float64";

/// The fields of `config.json` that decide what a Llama, Qwen2 or Qwen3 forward computes.
#[derive(Debug, Clone, PartialEq, Serialize)]
pub struct ModelConfig {
    pub architectures: Vec<String>,
    pub model_type: String,
    pub hidden_size: i64,
    pub intermediate_size: i64,
    pub num_hidden_layers: usize,
    pub num_attention_heads: i64,
    pub num_key_value_heads: i64,
    pub head_dim: i64,
    pub rms_norm_eps: f64,
    pub rope_theta: f64,
    /// `None` for plain RoPE.
    pub rope_scaling: Option<RopeScaling>,
    /// Llama and Qwen3: whether queries, keys, values and the attention's output have biases. Qwen2 has them on the first three always.
    pub attention_bias: bool,
    /// Llama only: whether the feed-forward's three projections have biases.
    pub mlp_bias: bool,
    pub vocab_size: i64,
    pub tie_word_embeddings: bool,
    pub max_position_embeddings: i64,
    pub bos_token_id: Option<u32>,
    /// Every token that ends a response.
    pub eos_token_id: Vec<u32>,
}

/// Why a `config.json` cannot be used.
#[derive(Debug, thiserror::Error, PartialEq)]
pub enum ConfigError {
    #[error("`{key}` is missing or has the wrong type")]
    Field { key: String },
    #[error("`{key}` is `{found}`; supported are {}", listed(.supported))]
    Architecture { key: &'static str, found: String, supported: Vec<&'static str> },
    #[error("`{key}` is `{found}`, which this forward does not compute; supported: {supported}")]
    Unsupported { key: String, found: String, supported: &'static str },
    #[error(
        "`quantization_config` says that the weights are quantised ({method}), which cannot be read; use the unquantised weights"
    )]
    Quantised { method: String },
    #[error("`{key}` is {found}, which does not fit: {reason}")]
    Impossible { key: String, found: String, reason: String },
}

impl ModelConfig {
    /// Reads the object of a `config.json`, with Hugging Face's defaults where a field may be absent.
    pub fn from_json(json: &Value) -> Result<Self, ConfigError> {
        let missing = |key: &str| ConfigError::Field { key: key.to_string() };
        let integer = |key: &str| json.get(key).and_then(Value::as_i64).filter(|&value| value > 0).ok_or_else(|| missing(key));
        let model_type = json.get("model_type").and_then(Value::as_str).ok_or_else(|| missing("model_type"))?;
        let architecture = check_architecture(json, model_type)?;
        if let Some(quantisation) = json.get("quantization_config").filter(|value| !value.is_null()) {
            let method = quantisation.get("quant_method").and_then(Value::as_str).unwrap_or("by an unnamed method");
            return Err(ConfigError::Quantised { method: method.to_string() });
        }
        // What tensors are stored as, their files say; here it only shows early that they cannot be read.
        for key in ["dtype", "torch_dtype"] {
            let dtype = json.get(key).and_then(Value::as_str);
            if let Some(dtype) = dtype.filter(|dtype| !DTYPES.split(", ").any(|known| known == *dtype)) {
                let (key, found) = (key.to_string(), dtype.to_string());
                return Err(ConfigError::Unsupported { key, found, supported: DTYPES });
            }
        }
        let flag = |key: &str| json.get(key).and_then(Value::as_bool).unwrap_or(false);
        let llama = model_type == "llama";
        if flag("mlp_bias") && !llama {
            let supported = "false for this model type";
            return Err(ConfigError::Unsupported { key: "mlp_bias".to_string(), found: "true".to_string(), supported });
        }
        let activation = json.get("hidden_act").and_then(Value::as_str).unwrap_or("silu");
        if activation != "silu" {
            return Err(ConfigError::Unsupported {
                key: "hidden_act".to_string(),
                found: activation.to_string(),
                supported: "silu",
            });
        }
        let hidden_size = integer("hidden_size")?;
        let num_hidden_layers = integer("num_hidden_layers")? as usize;
        if !llama {
            check_windows(json, num_hidden_layers)?;
        }
        let num_attention_heads = integer("num_attention_heads")?;
        // A null asks for what follows from the other fields; what an absent field means depends on the model type.
        let or = |key: &str, null: i64, absent: i64| match json.get(key) {
            None => Ok(absent),
            Some(Value::Null) => Ok(null),
            Some(_) => integer(key),
        };
        let head_dim = hidden_size / num_attention_heads;
        let max_position_embeddings = if llama { 2048 } else { 32768 };
        let max_position_embeddings = or("max_position_embeddings", max_position_embeddings, max_position_embeddings)?;
        let (rope_theta, rope_scaling) = rope::from_json(json, max_position_embeddings)?;
        let config = Self {
            architectures: vec![architecture.to_string()],
            model_type: model_type.to_string(),
            hidden_size,
            intermediate_size: integer("intermediate_size")?,
            num_hidden_layers,
            num_attention_heads,
            num_key_value_heads: or("num_key_value_heads", num_attention_heads, if llama { num_attention_heads } else { 32 })?,
            head_dim: or("head_dim", head_dim, if model_type == "qwen3" { 128 } else { head_dim })?,
            rms_norm_eps: json.get("rms_norm_eps").and_then(Value::as_f64).unwrap_or(1e-6),
            rope_theta,
            rope_scaling,
            // Qwen2's biases are not up to this field.
            attention_bias: flag("attention_bias") && model_type != "qwen2",
            mlp_bias: flag("mlp_bias"),
            vocab_size: integer("vocab_size")?,
            tie_word_embeddings: flag("tie_word_embeddings"),
            max_position_embeddings,
            bos_token_id: json.get("bos_token_id").and_then(Value::as_u64).map(|id| id as u32),
            eos_token_id: token_ids(json.get("eos_token_id")),
        };
        config.check()?;
        Ok(config)
    }

    fn check(&self) -> Result<(), ConfigError> {
        let impossible = |key: &str, found: i64, reason: &str| {
            Err(ConfigError::Impossible { key: key.to_string(), found: found.to_string(), reason: reason.to_string() })
        };
        if self.num_key_value_heads < 1 || self.num_attention_heads % self.num_key_value_heads != 0 {
            return impossible("num_key_value_heads", self.num_key_value_heads, "it must divide `num_attention_heads`");
        }
        if self.head_dim < 2 || self.head_dim % 2 != 0 {
            return impossible("head_dim", self.head_dim, "RoPE turns pairs, so it must be even");
        }
        Ok(())
    }

    /// The object to write as `config.json`; `dtype` is the kind the weights are stored in, such as `float32`.
    pub fn to_json(&self, dtype: &str) -> Value {
        let mut json = match serde_json::to_value(self) {
            Ok(Value::Object(fields)) => fields,
            _ => Map::new(),
        };
        json.insert("hidden_act".to_string(), Value::from("silu"));
        // Fields that `transformers` does not know of a model type would only mislead.
        if self.model_type == "qwen2" {
            json.remove("attention_bias");
        }
        if self.model_type != "llama" {
            json.remove("mlp_bias");
        }
        json.insert("torch_dtype".to_string(), Value::from(dtype));
        if let [single] = self.eos_token_id[..] {
            json.insert("eos_token_id".to_string(), Value::from(single));
        }
        Value::Object(json)
    }

    /// Whether queries and keys are normalised per head before RoPE, as Qwen3 does.
    pub fn has_query_key_norm(&self) -> bool {
        self.model_type == "qwen3"
    }

    /// Whether queries, keys and values have biases.
    pub fn has_query_key_value_bias(&self) -> bool {
        self.attention_bias || self.model_type == "qwen2"
    }

    /// Names and shapes of all parameters in the order of the data: embedding, layers, final norm, head when untied.
    pub fn parameter_shapes(&self) -> Vec<(String, Vec<i64>)> {
        let mut shapes = vec![("model.embed_tokens.weight".to_string(), vec![self.vocab_size, self.hidden_size])];
        for layer in 0..self.num_hidden_layers {
            let of_layer = self.layer_shapes().into_iter();
            shapes.extend(of_layer.map(|(name, shape)| (format!("model.layers.{layer}.{name}"), shape)));
        }
        shapes.push(("model.norm.weight".to_string(), vec![self.hidden_size]));
        if !self.tie_word_embeddings {
            shapes.push(("lm_head.weight".to_string(), vec![self.vocab_size, self.hidden_size]));
        }
        shapes
    }

    /// Names (such as `self_attn.q_proj.bias`) and shapes of one layer's parameters, the same for each layer: those of the attention half,
    /// then those of the feed-forward half.
    pub fn layer_shapes(&self) -> Vec<(String, Vec<i64>)> {
        let mut shapes = self.attention_shapes();
        shapes.extend(self.feed_forward_shapes());
        shapes
    }

    /// The parameters of a layer's first half, up to the second norm.
    pub fn attention_shapes(&self) -> Vec<(String, Vec<i64>)> {
        let hidden = self.hidden_size;
        let queries = self.num_attention_heads * self.head_dim;
        let keys = self.num_key_value_heads * self.head_dim;
        let biased = self.has_query_key_value_bias();
        let mut shapes = vec![("input_layernorm.weight".to_string(), vec![hidden])];
        shapes.extend(projection("self_attn.q_proj", queries, hidden, biased));
        shapes.extend(projection("self_attn.k_proj", keys, hidden, biased));
        shapes.extend(projection("self_attn.v_proj", keys, hidden, biased));
        shapes.extend(projection("self_attn.o_proj", hidden, queries, self.attention_bias));
        if self.has_query_key_norm() {
            let norms = ["self_attn.q_norm.weight", "self_attn.k_norm.weight"];
            shapes.extend(norms.map(|name| (name.to_string(), vec![self.head_dim])));
        }
        shapes
    }

    /// The parameters of a layer's second half, the second norm first.
    fn feed_forward_shapes(&self) -> Vec<(String, Vec<i64>)> {
        let (hidden, feed_forward) = (self.hidden_size, self.intermediate_size);
        let mut shapes = vec![("post_attention_layernorm.weight".to_string(), vec![hidden])];
        shapes.extend(projection("mlp.gate_proj", feed_forward, hidden, self.mlp_bias));
        shapes.extend(projection("mlp.up_proj", feed_forward, hidden, self.mlp_bias));
        shapes.extend(projection("mlp.down_proj", hidden, feed_forward, self.mlp_bias));
        shapes
    }
}

/// A projection's weight `[outputs, inputs]`, and its bias where it has one.
fn projection(name: &str, outputs: i64, inputs: i64, biased: bool) -> impl Iterator<Item = (String, Vec<i64>)> {
    let weight = (format!("{name}.weight"), vec![outputs, inputs]);
    let bias = biased.then(|| (format!("{name}.bias"), vec![outputs]));
    std::iter::once(weight).chain(bias)
}

/// The class name that `transformers` gives a model type; Llama's for one that is not known here.
pub fn architecture_of(model_type: &str) -> &'static str {
    known_architecture(model_type).unwrap_or("LlamaForCausalLM")
}

fn known_architecture(model_type: &str) -> Option<&'static str> {
    ARCHITECTURES.iter().find(|(known, _)| *known == model_type).map(|(_, class)| *class)
}

/// The class of a model type that the forward computes. Where the file names classes too, it must be among them: heads for other purposes
/// share the model types of language models.
fn check_architecture(json: &Value, model_type: &str) -> Result<&'static str, ConfigError> {
    let Some(class) = known_architecture(model_type) else {
        let supported = ARCHITECTURES.map(|(known, _)| known).to_vec();
        return Err(ConfigError::Architecture { key: "model_type", found: model_type.to_string(), supported });
    };
    let named: Vec<&str> =
        json.get("architectures").and_then(Value::as_array).into_iter().flatten().filter_map(Value::as_str).collect();
    if named.is_empty() || named.contains(&class) {
        return Ok(class);
    }
    let supported = ARCHITECTURES.map(|(_, class)| class).to_vec();
    Err(ConfigError::Architecture { key: "architectures", found: named.join(", "), supported })
}

/// Refuses models of which a layer sees only a window of the latest tokens. `layer_types` says it layer by layer; without it, windows that
/// are in use begin at layer `max_window_layers`. Absent fields are as in `transformers`.
fn check_windows(json: &Value, layers: usize) -> Result<(), ConfigError> {
    let unsupported = |key: &str, found: String| {
        let supported = "full attention in every layer";
        Err(ConfigError::Unsupported { key: key.to_string(), found, supported })
    };
    if let Some(types) = json.get("layer_types").and_then(Value::as_array) {
        return match types.iter().find(|kind| kind.as_str() != Some("full_attention")) {
            Some(kind) => unsupported("layer_types", kind.as_str().map_or_else(|| kind.to_string(), str::to_string)),
            None => Ok(()),
        };
    }
    let used = json.get("use_sliding_window").and_then(Value::as_bool).unwrap_or(false);
    let has_window = json.get("sliding_window").is_none_or(|window| !window.is_null());
    let first = json.get("max_window_layers").and_then(Value::as_u64).unwrap_or(28);
    if used && has_window && first < layers as u64 {
        return unsupported("use_sliding_window", format!("true from layer {first} of {layers}"));
    }
    Ok(())
}

/// `a`, `b` and `c`.
fn listed(words: &[&str]) -> String {
    let quoted: Vec<String> = words.iter().map(|word| format!("`{word}`")).collect();
    match quoted.split_last() {
        Some((last, before)) if !before.is_empty() => format!("{} and {last}", before.join(", ")),
        _ => quoted.concat(),
    }
}

fn token_ids(json: Option<&Value>) -> Vec<u32> {
    match json {
        Some(Value::Number(id)) => id.as_u64().into_iter().map(|id| id as u32).collect(),
        Some(Value::Array(ids)) => ids.iter().filter_map(Value::as_u64).map(|id| id as u32).collect(),
        _ => Vec::new(),
    }
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]
    use super::*;
    use serde_json::json;

    fn llama() -> Value {
        json!({"model_type": "llama", "hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2, "num_attention_heads": 4,
               "num_key_value_heads": 2, "vocab_size": 256, "eos_token_id": [1, 2]})
    }

    #[test]
    fn defaults_are_hugging_faces() {
        let config = ModelConfig::from_json(&llama()).unwrap();
        assert_eq!((config.head_dim, config.rope_theta, config.rms_norm_eps), (16, 10_000.0, 1e-6));
        assert!(!config.tie_word_embeddings);
        assert_eq!(config.eos_token_id, [1, 2]);
    }

    #[test]
    fn absent_fields_of_qwen_are_hugging_faces_too() {
        let mut json = llama();
        json["model_type"] = json!("qwen3");
        let config = ModelConfig::from_json(&json).unwrap();
        assert_eq!((config.head_dim, config.max_position_embeddings), (128, 32768));
        json["head_dim"] = Value::Null;
        assert_eq!(ModelConfig::from_json(&json).unwrap().head_dim, 16);
        json["model_type"] = json!("qwen2");
        assert_eq!(ModelConfig::from_json(&json).unwrap().head_dim, 16);
    }

    #[test]
    fn writing_and_reading_is_identity() {
        let ropes = [
            json!({"rope_type": "llama3", "rope_theta": 5e5, "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
                   "original_max_position_embeddings": 8192}),
            json!({"rope_type": "yarn", "rope_theta": 1e6, "factor": 4.0, "original_max_position_embeddings": 32768, "beta_fast": 16,
                   "attention_factor": 1.25, "truncate": false}),
            json!({"rope_type": "yarn", "rope_theta": 1e6, "factor": 4.0, "mscale": 1.0, "mscale_all_dim": 0.5}),
            json!({"rope_type": "linear", "rope_theta": 1e4, "factor": 2.0}),
            json!({"rope_type": "default", "rope_theta": 1e4}),
        ];
        for rope in ropes {
            for (model_type, biases) in
                [("llama", (true, true)), ("llama", (false, true)), ("qwen2", (false, false)), ("qwen3", (true, false))]
            {
                let mut json = llama();
                json["model_type"] = json!(model_type);
                json["rope_parameters"] = rope.clone();
                (json["attention_bias"], json["mlp_bias"]) = (json!(biases.0), json!(biases.1));
                let config = ModelConfig::from_json(&json).unwrap();
                assert_eq!(config.rope_theta, rope["rope_theta"].as_f64().unwrap());
                assert_eq!(config.rope_scaling.is_some(), rope["rope_type"] != "default");
                assert_eq!((config.attention_bias, config.mlp_bias), biases);
                let written = config.to_json("float32");
                assert_eq!(ModelConfig::from_json(&written).unwrap(), config);
                assert_eq!(written.get("attention_bias").is_some(), model_type != "qwen2");
                assert_eq!(written.get("mlp_bias").is_some(), model_type == "llama");
            }
        }
    }

    #[test]
    fn biases_are_where_each_family_has_them() {
        let biases = |model_type: &str, attention: bool, feed_forward: bool| -> String {
            let mut json = llama();
            json["model_type"] = json!(model_type);
            (json["attention_bias"], json["mlp_bias"]) = (json!(attention), json!(feed_forward));
            let shapes = ModelConfig::from_json(&json).unwrap().layer_shapes();
            let biased = shapes.iter().filter_map(|(name, shape)| {
                let weight = format!("{}.weight", name.strip_suffix(".bias")?);
                let of_weight = shapes.iter().find(|(name, _)| *name == weight).unwrap();
                assert_eq!(shape[..], of_weight.1[..1], "{name}");
                name.split('.').nth(1).map(|name| name.trim_end_matches("_proj").to_string())
            });
            biased.collect::<Vec<_>>().join(" ")
        };
        assert_eq!(biases("llama", false, false), "");
        assert_eq!(biases("llama", true, false), "q k v o");
        assert_eq!(biases("llama", true, true), "q k v o gate up down");
        assert_eq!(biases("qwen3", false, false), "");
        assert_eq!(biases("qwen3", true, false), "q k v o");
        assert_eq!(biases("qwen2", false, false), "q k v");
        assert_eq!(biases("qwen2", true, false), "q k v");
    }

    #[test]
    fn windows_are_refused_only_where_a_layer_would_have_one() {
        let read = |fields: Value| {
            let mut json = llama();
            json["model_type"] = json!("qwen2");
            for (key, value) in fields.as_object().unwrap() {
                json[key] = value.clone();
            }
            ModelConfig::from_json(&json).map(|_| ()).map_err(|error| error.to_string())
        };
        // As published with Qwen2.5: the window is not in use.
        read(json!({"use_sliding_window": false, "sliding_window": 131072, "max_window_layers": 0})).unwrap();
        read(json!({"use_sliding_window": true, "sliding_window": 131072, "max_window_layers": 2})).unwrap();
        read(json!({"use_sliding_window": true, "sliding_window": null, "max_window_layers": 0})).unwrap();
        read(json!({"use_sliding_window": true, "layer_types": ["full_attention", "full_attention"], "max_window_layers": 0}))
            .unwrap();
        let message = read(json!({"use_sliding_window": true, "sliding_window": 4096, "max_window_layers": 1})).unwrap_err();
        assert!(message.contains("`use_sliding_window` is `true from layer 1 of 2`"), "{message}");
        let message = read(json!({"layer_types": ["full_attention", "sliding_attention"]})).unwrap_err();
        assert!(message.contains("`layer_types` is `sliding_attention`"), "{message}");
    }

    #[test]
    fn quantised_weights_are_refused_by_name() {
        let mut json = llama();
        json["quantization_config"] = Value::Null;
        assert!(ModelConfig::from_json(&json).is_ok());
        for (quantisation, method) in
            [(json!({"quant_method": "awq", "bits": 4}), "(awq)"), (json!({"bits": 4}), "(by an unnamed method)")]
        {
            json["quantization_config"] = quantisation;
            let message = ModelConfig::from_json(&json).unwrap_err().to_string();
            assert!(message.contains("`quantization_config`") && message.contains(method), "{message}");
            assert!(message.contains("use the unquantised weights"), "{message}");
        }
    }

    #[test]
    fn what_the_forward_does_not_compute_is_refused() {
        let with = |key: &str, value: Value| {
            let mut json = llama();
            json[key] = value;
            ModelConfig::from_json(&json).unwrap_err().to_string()
        };
        assert_eq!(with("model_type", json!("gpt2")), "`model_type` is `gpt2`; supported are `llama`, `qwen2` and `qwen3`");
        let message = with("architectures", json!(["LlamaForSequenceClassification"]));
        assert!(
            message.starts_with("`architectures` is `LlamaForSequenceClassification`; supported are `LlamaForCausalLM`, "),
            "{message}"
        );
        for key in ["dtype", "torch_dtype"] {
            let message = with(key, json!("float8_e4m3fn"));
            assert!(message.contains(&format!("`{key}` is `float8_e4m3fn`")) && message.contains("bfloat16"), "{message}");
        }
        assert!(with("rope_scaling", json!({"rope_type": "dynamic", "factor": 4.0})).contains("dynamic"));
        assert!(with("num_key_value_heads", json!(3)).contains("divide"));
        assert_eq!(with("hidden_size", json!("64")), "`hidden_size` is missing or has the wrong type");
    }
}
