//! A model's shape, read from and written to Hugging Face's `config.json`, under its field names.

use serde::{Deserialize, Serialize};
use serde_json::{Map, Value};

/// The fields of `config.json` that decide what a Llama or Qwen3 forward computes.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
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
    pub vocab_size: i64,
    pub tie_word_embeddings: bool,
    pub max_position_embeddings: i64,
    pub bos_token_id: Option<u32>,
    /// Every token that ends a response.
    pub eos_token_id: Vec<u32>,
}

/// The frequency scaling of Llama 3.1 and later (`rope_type = "llama3"`).
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct RopeScaling {
    pub factor: f64,
    pub low_freq_factor: f64,
    pub high_freq_factor: f64,
    pub original_max_position_embeddings: i64,
}

/// Why a `config.json` cannot be used.
#[derive(Debug, thiserror::Error, PartialEq)]
pub enum ConfigError {
    #[error("`{key}` is missing or has the wrong type")]
    Field { key: String },
    #[error("`model_type` is `{found}`; supported are `llama` and `qwen3`")]
    ModelType { found: String },
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
        if !["llama", "qwen3"].contains(&model_type) {
            return Err(ConfigError::ModelType { found: model_type.to_string() });
        }
        if let Some(quantisation) = json.get("quantization_config").filter(|value| !value.is_null()) {
            let method = quantisation.get("quant_method").and_then(Value::as_str).unwrap_or("by an unnamed method");
            return Err(ConfigError::Quantised { method: method.to_string() });
        }
        for key in ["attention_bias", "mlp_bias", "use_sliding_window"] {
            if json.get(key).and_then(Value::as_bool) == Some(true) {
                return Err(ConfigError::Unsupported { key: key.to_string(), found: "true".to_string(), supported: "false" });
            }
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
        let num_attention_heads = integer("num_attention_heads")?;
        // transformers 5 gathers the rope fields in `rope_parameters`; earlier files keep them apart.
        let rope = json.get("rope_parameters").or_else(|| json.get("rope_scaling")).filter(|value| value.is_object());
        let rope_theta = rope.and_then(|rope| rope.get("rope_theta")).or_else(|| json.get("rope_theta")).and_then(Value::as_f64);
        let config = Self {
            architectures: vec![architecture_of(model_type).to_string()],
            model_type: model_type.to_string(),
            hidden_size,
            intermediate_size: integer("intermediate_size")?,
            num_hidden_layers: integer("num_hidden_layers")? as usize,
            num_attention_heads,
            num_key_value_heads: json.get("num_key_value_heads").and_then(Value::as_i64).unwrap_or(num_attention_heads),
            head_dim: json.get("head_dim").and_then(Value::as_i64).unwrap_or(hidden_size / num_attention_heads),
            rms_norm_eps: json.get("rms_norm_eps").and_then(Value::as_f64).unwrap_or(1e-6),
            rope_theta: rope_theta.unwrap_or(10_000.0),
            rope_scaling: rope.map_or(Ok(None), RopeScaling::from_json)?,
            vocab_size: integer("vocab_size")?,
            tie_word_embeddings: json.get("tie_word_embeddings").and_then(Value::as_bool).unwrap_or(false),
            max_position_embeddings: json.get("max_position_embeddings").and_then(Value::as_i64).unwrap_or(2048),
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
        let rope_scaling = self.rope_scaling.as_ref().map(|scaling| {
            let mut fields = serde_json::to_value(scaling).unwrap_or_default();
            fields["rope_type"] = Value::from("llama3");
            fields
        });
        json.insert("rope_scaling".to_string(), rope_scaling.unwrap_or(Value::Null));
        json.insert("hidden_act".to_string(), Value::from("silu"));
        json.insert("attention_bias".to_string(), Value::from(false));
        if self.model_type == "llama" {
            json.insert("mlp_bias".to_string(), Value::from(false));
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

    /// Names and shapes of all parameters in the order of the data: embedding, layers, final norm, head when untied.
    pub fn parameter_shapes(&self) -> Vec<(String, Vec<i64>)> {
        let mut shapes = vec![("model.embed_tokens.weight".to_string(), vec![self.vocab_size, self.hidden_size])];
        for layer in 0..self.num_hidden_layers {
            let of_layer = self.layer_shapes().into_iter();
            shapes.extend(of_layer.map(|(name, shape)| (format!("model.layers.{layer}.{name}.weight"), shape)));
        }
        shapes.push(("model.norm.weight".to_string(), vec![self.hidden_size]));
        if !self.tie_word_embeddings {
            shapes.push(("lm_head.weight".to_string(), vec![self.vocab_size, self.hidden_size]));
        }
        shapes
    }

    /// Names and shapes of one layer's parameters, the same for each layer.
    pub fn layer_shapes(&self) -> Vec<(&'static str, Vec<i64>)> {
        let (hidden, feed_forward) = (self.hidden_size, self.intermediate_size);
        let queries = self.num_attention_heads * self.head_dim;
        let keys = self.num_key_value_heads * self.head_dim;
        let mut shapes = vec![
            ("input_layernorm", vec![hidden]),
            ("self_attn.q_proj", vec![queries, hidden]),
            ("self_attn.k_proj", vec![keys, hidden]),
            ("self_attn.v_proj", vec![keys, hidden]),
            ("self_attn.o_proj", vec![hidden, queries]),
        ];
        if self.has_query_key_norm() {
            shapes.extend([("self_attn.q_norm", vec![self.head_dim]), ("self_attn.k_norm", vec![self.head_dim])]);
        }
        shapes.extend([
            ("post_attention_layernorm", vec![hidden]),
            ("mlp.gate_proj", vec![feed_forward, hidden]),
            ("mlp.up_proj", vec![feed_forward, hidden]),
            ("mlp.down_proj", vec![hidden, feed_forward]),
        ]);
        shapes
    }
}

impl RopeScaling {
    fn from_json(json: &Value) -> Result<Option<Self>, ConfigError> {
        let kind = json.get("rope_type").or_else(|| json.get("type")).and_then(Value::as_str).unwrap_or("default");
        match kind {
            "default" => Ok(None),
            "llama3" => {
                let number = |key: &str| {
                    let field = || ConfigError::Field { key: format!("rope_scaling.{key}") };
                    json.get(key).and_then(Value::as_f64).ok_or_else(field)
                };
                Ok(Some(Self {
                    factor: number("factor")?,
                    low_freq_factor: number("low_freq_factor")?,
                    high_freq_factor: number("high_freq_factor")?,
                    original_max_position_embeddings: number("original_max_position_embeddings")? as i64,
                }))
            }
            other => Err(ConfigError::Unsupported {
                key: "rope_scaling.rope_type".to_string(),
                found: other.to_string(),
                supported: "default, llama3",
            }),
        }
    }
}

/// The class name that `transformers` gives a model type.
pub fn architecture_of(model_type: &str) -> &'static str {
    if model_type == "qwen3" { "Qwen3ForCausalLM" } else { "LlamaForCausalLM" }
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
    fn writing_and_reading_is_identity() {
        let mut json = llama();
        json["rope_parameters"] = json!({"rope_type": "llama3", "rope_theta": 5e5, "factor": 8.0, "low_freq_factor": 1.0,
                                         "high_freq_factor": 4.0, "original_max_position_embeddings": 8192});
        let config = ModelConfig::from_json(&json).unwrap();
        assert_eq!(config.rope_theta, 5e5);
        assert_eq!(ModelConfig::from_json(&config.to_json("float32")).unwrap(), config);
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
        assert_eq!(with("model_type", json!("gpt2")), "`model_type` is `gpt2`; supported are `llama` and `qwen3`");
        assert!(with("attention_bias", json!(true)).contains("attention_bias"));
        assert!(with("rope_scaling", json!({"rope_type": "yarn", "factor": 4.0})).contains("yarn"));
        assert!(with("num_key_value_heads", json!(3)).contains("divide"));
        assert_eq!(with("hidden_size", json!("64")), "`hidden_size` is missing or has the wrong type");
    }
}
