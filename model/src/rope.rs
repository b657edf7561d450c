//! Rotary position embedding: how a configuration scales its frequencies, and the tables by which a forward turns queries and keys.
//!
//! Frequencies are computed in f32, operation by operation as `transformers` does (its `modeling_rope_utils.py`): at position 32,768 an
//! angle of another rounding would be off by a thousandth.
//!
//! Shapes legend: see the crate's documentation.

use std::f64::consts::PI;

use serde::Serialize;
use serde_json::Value;
use tch::{Device, Kind, Tensor};

use crate::config::{ConfigError, ModelConfig};

/// How the plain frequencies are scaled for contexts longer than those of pretraining, under Hugging Face's names.
#[derive(Debug, Clone, PartialEq, Serialize)]
#[serde(tag = "rope_type", rename_all = "lowercase")]
pub enum RopeScaling {
    /// All frequencies divided by one factor.
    Linear {
        factor: f64,
    },
    Llama3(Llama3Scaling),
    Yarn(YarnScaling),
}

/// Llama 3.1's and later: slow frequencies divided, fast ones kept, those between blended.
#[derive(Debug, Clone, PartialEq, Serialize)]
pub struct Llama3Scaling {
    pub factor: f64,
    pub low_freq_factor: f64,
    pub high_freq_factor: f64,
    pub original_max_position_embeddings: i64,
}

/// YaRN (arXiv 2309.00071): slow frequencies divided, fast ones kept, a ramp over the pairs between them, and attention scores raised.
#[derive(Debug, Clone, PartialEq, Serialize)]
pub struct YarnScaling {
    pub factor: f64,
    pub original_max_position_embeddings: i64,
    /// Rotations within the original context above which a pair is kept.
    pub beta_fast: f64,
    /// Rotations within the original context below which a pair is fully divided.
    pub beta_slow: f64,
    /// Whether the ramp's ends are rounded outwards to whole pairs.
    pub truncate: bool,
    /// What cosines and sines are multiplied by; from the factor, and from `mscale` and `mscale_all_dim` where both are given, if absent.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub attention_factor: Option<f64>,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub mscale: Option<f64>,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub mscale_all_dim: Option<f64>,
}

/// `rope_type`s that the forward computes.
const SUPPORTED: &str = "default, linear, llama3, yarn";

/// The rope fields of a `config.json`: the base of the frequencies and their scaling, `None` for plain RoPE.
///
/// transformers 5 gathers them in `rope_parameters`; earlier files have `rope_theta` beside `rope_scaling`, which wins where both are
/// there, as in `transformers`. Original positions that are not given are `longest`, the model's own `max_position_embeddings`.
pub(crate) fn from_json(json: &Value, longest: i64) -> Result<(f64, Option<RopeScaling>), ConfigError> {
    let of = |key: &'static str| {
        let fields = json.get(key).and_then(Value::as_object).filter(|fields| !fields.is_empty());
        fields.map(|fields| Fields { key, fields })
    };
    let fields = of("rope_scaling").or_else(|| of("rope_parameters"));
    let theta = fields.as_ref().and_then(|fields| fields.fields.get("rope_theta")).or_else(|| json.get("rope_theta"));
    let theta = match theta {
        None | Some(Value::Null) => 10_000.0,
        Some(theta) => theta.as_f64().ok_or_else(|| ConfigError::Field { key: "rope_theta".to_string() })?,
    };
    if !(theta.is_finite() && theta > 1.0) {
        return Err(ConfigError::Impossible {
            key: "rope_theta".to_string(),
            found: theta.to_string(),
            reason: "it must be larger than one".to_string(),
        });
    }
    let partial = |value: Option<&Value>| value.and_then(Value::as_f64).filter(|&share| share != 1.0);
    let of_rope = fields.as_ref().and_then(|fields| fields.fields.get("partial_rotary_factor"));
    if let Some(share) = partial(of_rope).or_else(|| partial(json.get("partial_rotary_factor"))) {
        return Err(ConfigError::Unsupported {
            key: "partial_rotary_factor".to_string(),
            found: share.to_string(),
            supported: "1",
        });
    }
    // Some files have this one beside the others, where `transformers` prefers it.
    let outside = json.get("original_max_position_embeddings").and_then(Value::as_i64);
    let scaling = fields.map_or(Ok(None), |fields| fields.scaling(outside, longest))?;
    Ok((theta, scaling))
}

/// The object of rope fields, and what it is called in its file.
struct Fields<'a> {
    key: &'static str,
    fields: &'a serde_json::Map<String, Value>,
}

impl Fields<'_> {
    fn scaling(&self, original_outside: Option<i64>, longest: i64) -> Result<Option<RopeScaling>, ConfigError> {
        if let Some((name, value)) = self.fields.iter().find(|(_, value)| value.is_object()) {
            return Err(ConfigError::Unsupported {
                key: format!("{}.{name}", self.key),
                found: value.to_string(),
                supported: "the same RoPE in all layers",
            });
        }
        let kind = self.fields.get("rope_type").or_else(|| self.fields.get("type"));
        let kind = match kind {
            None | Some(Value::Null) => "default",
            Some(kind) => kind.as_str().ok_or_else(|| self.missing("rope_type"))?,
        };
        let original = match original_outside {
            Some(original) => original,
            None => self.optional("original_max_position_embeddings")?.map_or(longest, |original| original as i64),
        };
        let scaling = match kind {
            "default" => return Ok(None),
            "linear" => RopeScaling::Linear { factor: self.number("factor")? },
            "llama3" => RopeScaling::Llama3(Llama3Scaling {
                factor: self.number("factor")?,
                low_freq_factor: self.number("low_freq_factor")?,
                high_freq_factor: self.number("high_freq_factor")?,
                original_max_position_embeddings: original,
            }),
            "yarn" => RopeScaling::Yarn(YarnScaling {
                // A null is an answer here: the ratio of the two lengths.
                factor: match self.fields.get("factor") {
                    Some(Value::Null) => longest as f64 / original as f64,
                    _ => self.number("factor")?,
                },
                original_max_position_embeddings: original,
                beta_fast: self.not_zero("beta_fast")?.unwrap_or(32.0),
                beta_slow: self.not_zero("beta_slow")?.unwrap_or(1.0),
                truncate: self.fields.get("truncate").and_then(Value::as_bool).unwrap_or(true),
                attention_factor: self.optional("attention_factor")?,
                mscale: self.not_zero("mscale")?,
                mscale_all_dim: self.not_zero("mscale_all_dim")?,
            }),
            other => {
                return Err(ConfigError::Unsupported {
                    key: format!("{}.rope_type", self.key),
                    found: other.to_string(),
                    supported: SUPPORTED,
                });
            }
        };
        self.check(&scaling)?;
        Ok(Some(scaling))
    }

    /// Refuses values with which a frequency would be infinite or no number.
    fn check(&self, scaling: &RopeScaling) -> Result<(), ConfigError> {
        let positive = |key: &str, value: f64| match value.is_finite() && value > 0.0 {
            true => Ok(()),
            false => Err(ConfigError::Impossible {
                key: format!("{}.{key}", self.key),
                found: value.to_string(),
                reason: "it must be larger than zero".to_string(),
            }),
        };
        let original = |value: i64| positive("original_max_position_embeddings", value as f64);
        match scaling {
            RopeScaling::Linear { factor } => positive("factor", *factor),
            RopeScaling::Llama3(llama3) => {
                positive("factor", llama3.factor)?;
                // JSON has no NaN.
                if llama3.high_freq_factor <= llama3.low_freq_factor {
                    return Err(ConfigError::Impossible {
                        key: format!("{}.high_freq_factor", self.key),
                        found: llama3.high_freq_factor.to_string(),
                        reason: "it must be larger than `low_freq_factor`".to_string(),
                    });
                }
                original(llama3.original_max_position_embeddings)
            }
            RopeScaling::Yarn(yarn) => {
                positive("factor", yarn.factor)?;
                positive("beta_fast", yarn.beta_fast)?;
                positive("beta_slow", yarn.beta_slow)?;
                positive("attention_factor", yarn.attention_factor.unwrap_or(1.0))?;
                original(yarn.original_max_position_embeddings)
            }
        }
    }

    fn missing(&self, key: &str) -> ConfigError {
        ConfigError::Field { key: format!("{}.{key}", self.key) }
    }

    fn number(&self, key: &str) -> Result<f64, ConfigError> {
        self.optional(key)?.ok_or_else(|| self.missing(key))
    }

    fn optional(&self, key: &str) -> Result<Option<f64>, ConfigError> {
        match self.fields.get(key) {
            None | Some(Value::Null) => Ok(None),
            Some(value) => value.as_f64().map(Some).ok_or_else(|| self.missing(key)),
        }
    }

    /// Zero stands for absent in some of YaRN's fields.
    fn not_zero(&self, key: &str) -> Result<Option<f64>, ConfigError> {
        Ok(self.optional(key)?.filter(|&value| value != 0.0))
    }
}

/// The object to write as `rope_scaling`; null for plain RoPE.
pub(crate) fn to_json(scaling: Option<&RopeScaling>) -> Value {
    serde_json::to_value(scaling).unwrap_or_default()
}

impl Llama3Scaling {
    /// A frequency as it is used: long wavelengths are stretched by `factor`, short ones stay, those between are blended.
    pub(crate) fn scale(&self, frequency: f32) -> f32 {
        let (factor, low, high) = (self.factor as f32, self.low_freq_factor, self.high_freq_factor);
        let original = self.original_max_position_embeddings as f64;
        let wavelength = (2.0 * PI) as f32 / frequency;
        if wavelength > (original / low) as f32 {
            frequency / factor
        } else if wavelength < (original / high) as f32 {
            frequency
        } else {
            let smooth = (original as f32 / wavelength - low as f32) / (high - low) as f32;
            (1.0 - smooth) * frequency / factor + smooth * frequency
        }
    }
}

impl YarnScaling {
    /// The pairs between which frequencies go over from kept to divided, of `head_dim / 2` pairs; fractions unless `truncate`.
    fn ramp(&self, theta: f64, head_dim: i64) -> (f64, f64) {
        let original = self.original_max_position_embeddings as f64;
        // The pair that turns so many times within the original context.
        let pair = |rotations: f64| head_dim as f64 * (original / (rotations * 2.0 * PI)).ln() / (2.0 * theta.ln());
        let (low, high) = (pair(self.beta_fast), pair(self.beta_slow));
        let (low, high) = if self.truncate { (low.floor(), high.ceil()) } else { (low, high) };
        let (low, high) = (low.max(0.0), high.min(head_dim as f64 - 1.0));
        (low, if low == high { high + 0.001 } else { high })
    }

    /// What cosines and sines are multiplied by.
    pub(crate) fn attention_factor(&self) -> f64 {
        let raised = |mscale: f64| if self.factor <= 1.0 { 1.0 } else { 0.1 * mscale * self.factor.ln() + 1.0 };
        match (self.attention_factor, self.mscale, self.mscale_all_dim) {
            (Some(given), ..) => given,
            (None, Some(mscale), Some(of_all)) => raised(mscale) / raised(of_all),
            _ => raised(1.0),
        }
    }
}

/// The angles by which positions turn queries and keys, and by how much they grow on the way.
pub struct Rotary {
    /// `[E / 2]`, f32, one for each pair of features.
    inverse_frequencies: Tensor,
    /// One but for YaRN.
    attention_factor: f64,
}

impl Rotary {
    /// The angles of a model, on `device`.
    pub fn new(config: &ModelConfig, device: Device) -> Self {
        let frequencies = Tensor::from_slice(&inverse_frequencies(config)).to_device(device);
        Self { inverse_frequencies: frequencies, attention_factor: attention_factor(config) }
    }

    /// RoPE tables for these positions `[T]`.
    pub fn tables(&self, positions_t: &Tensor) -> Rope {
        let angles = positions_t.to_kind(Kind::Float).unsqueeze(1) * self.inverse_frequencies.unsqueeze(0);
        let (mut cos, mut sin) = (angles.cos(), angles.sin());
        if self.attention_factor != 1.0 {
            (cos, sin) = (cos * self.attention_factor, sin * self.attention_factor);
        }
        let both = |first: &Tensor, second: &Tensor| Tensor::cat(&[first, second], 1).unsqueeze(1);
        Rope { cos_t1e: both(&cos, &cos), sin_t1e: both(&-&sin, &sin) }
    }

    pub(crate) fn shallow_clone(&self) -> Self {
        Self { inverse_frequencies: self.inverse_frequencies.shallow_clone(), attention_factor: self.attention_factor }
    }
}

/// Cosines and sines `[T, 1, E]` in f32 for the rows of one forward; the sines of the first half are negated.
pub struct Rope {
    cos_t1e: Tensor,
    sin_t1e: Tensor,
}

impl Rope {
    /// Turns each pair (i, i + E/2) of `[T, heads, E]` by its angle.
    pub(crate) fn turn(&self, input: &Tensor) -> Tensor {
        let wide = input.to_kind(Kind::Float);
        let swapped = wide.roll([wide.size()[2] / 2], [-1]);
        (wide * &self.cos_t1e).addcmul(&swapped, &self.sin_t1e).to_kind(input.kind())
    }
}

/// The angles per position of all pairs before any scaling: `theta` to the power of minus 2 pair / head size.
pub(crate) fn plain_frequencies(theta: f64, head_dim: i64) -> Vec<f32> {
    torch::to_f32s(&powers(theta, head_dim)).into_iter().map(|power| 1.0 / power).collect()
}

/// `theta` to the power of 2 pair / head size, by libtorch's own f32 power, whose last bit another one's may differ from.
fn powers(theta: f64, head_dim: i64) -> Tensor {
    let exponents = Tensor::arange_start_step(0, head_dim, 2, (Kind::Float, Device::Cpu)) / head_dim as f64;
    Tensor::pow_scalar(theta, &exponents)
}

/// The angles per position, one for each pair of features.
fn inverse_frequencies(config: &ModelConfig) -> Vec<f32> {
    let plain = plain_frequencies(config.rope_theta, config.head_dim);
    match &config.rope_scaling {
        None => plain,
        Some(RopeScaling::Linear { factor }) => plain.into_iter().map(|frequency| frequency / *factor as f32).collect(),
        Some(RopeScaling::Llama3(llama3)) => plain.into_iter().map(|frequency| llama3.scale(frequency)).collect(),
        Some(RopeScaling::Yarn(yarn)) => {
            let powers = torch::to_f32s(&powers(config.rope_theta, config.head_dim));
            let (low, high) = yarn.ramp(config.rope_theta, config.head_dim);
            let blend = |(pair, kept): (usize, f32)| {
                let divided = 1.0 / (yarn.factor as f32 * powers[pair]);
                let share = 1.0 - ((pair as f32 - low as f32) / (high - low) as f32).clamp(0.0, 1.0);
                divided * (1.0 - share) + kept * share
            };
            plain.into_iter().enumerate().map(blend).collect()
        }
    }
}

/// What queries and keys grow by when they are turned.
fn attention_factor(config: &ModelConfig) -> f64 {
    match &config.rope_scaling {
        Some(RopeScaling::Yarn(yarn)) => yarn.attention_factor(),
        _ => 1.0,
    }
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]
    use super::*;
    use serde_json::json;

    fn with(rope: Value) -> Result<ModelConfig, ConfigError> {
        let mut json = json!({"model_type": "qwen3", "hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2,
            "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 128, "vocab_size": 256, "max_position_embeddings": 40960});
        for (key, value) in rope.as_object().unwrap() {
            json[key] = value.clone();
        }
        ModelConfig::from_json(&json)
    }

    fn yarn(rope: Value) -> YarnScaling {
        match with(rope).unwrap().rope_scaling {
            Some(RopeScaling::Yarn(yarn)) => yarn,
            other => panic!("{other:?}"),
        }
    }

    /// `tests/golden/make_logits.py` asks `transformers` for the frequencies of published configurations.
    #[test]
    fn frequencies_of_published_models_are_those_of_transformers() {
        let path = std::path::Path::new(env!("CARGO_MANIFEST_DIR")).join("../tests/golden/logits/rope.json");
        let cases: Value = serde_json::from_str(&std::fs::read_to_string(path).unwrap()).unwrap();
        let cases = cases.as_array().unwrap();
        assert!(cases.len() >= 8);
        for case in cases {
            let config = ModelConfig::from_json(&case["config"]).unwrap();
            let factor = case["attention_factor"].as_f64().unwrap();
            assert!((attention_factor(&config) - factor).abs() < 1e-12 * factor, "{}", case["name"]);
            let theirs: Vec<f32> = serde_json::from_value(case["inverse_frequencies"].clone()).unwrap();
            let ours = inverse_frequencies(&config);
            assert_eq!(ours.len(), theirs.len(), "{}", case["name"]);
            for (pair, (ours, theirs)) in ours.iter().zip(&theirs).enumerate() {
                // Two units in the last place: processors differ in how they raise to a power.
                let close = (ours - theirs).abs() <= 2.4e-7 * theirs;
                assert!(close, "{}, pair {pair}: {ours} against {theirs}", case["name"]);
            }
        }
    }

    #[test]
    fn both_spellings_are_read_and_the_older_one_wins() {
        let new = json!({"rope_parameters": {"rope_type": "linear", "rope_theta": 5e5, "factor": 2.0}});
        let config = with(new).unwrap();
        assert_eq!((config.rope_theta, config.rope_scaling), (5e5, Some(RopeScaling::Linear { factor: 2.0 })));
        let both = json!({"rope_theta": 1e6, "rope_scaling": {"type": "linear", "factor": 4.0},
                          "rope_parameters": {"rope_type": "default", "rope_theta": 5e5}});
        let config = with(both).unwrap();
        assert_eq!((config.rope_theta, config.rope_scaling), (1e6, Some(RopeScaling::Linear { factor: 4.0 })));
        let empty = json!({"rope_theta": 1e6, "rope_scaling": null, "rope_parameters": {}});
        assert_eq!(with(empty).unwrap().rope_scaling, None);
    }

    #[test]
    fn yarns_fields_have_transformers_defaults() {
        let found =
            yarn(json!({"rope_scaling": {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32768}}));
        let expected = YarnScaling {
            factor: 4.0,
            original_max_position_embeddings: 32768,
            beta_fast: 32.0,
            beta_slow: 1.0,
            truncate: true,
            attention_factor: None,
            mscale: None,
            mscale_all_dim: None,
        };
        assert_eq!(found, expected);
        let bare = yarn(json!({"rope_scaling": {"type": "yarn", "factor": 4.0}}));
        assert_eq!(bare.original_max_position_embeddings, 40960, "the model's own length");
        let outside = json!({"original_max_position_embeddings": 8192, "rope_scaling": {"type": "yarn", "factor": null}});
        let outside = yarn(outside);
        assert_eq!((outside.original_max_position_embeddings, outside.factor), (8192, 5.0));
    }

    #[test]
    fn what_is_not_computed_is_refused_by_name() {
        let message = |rope: Value| with(json!({"rope_scaling": rope})).unwrap_err().to_string();
        for kind in ["dynamic", "longrope", "su", "mrope"] {
            let message = message(json!({"rope_type": kind, "factor": 4.0}));
            assert!(
                message.contains(&format!("`rope_scaling.rope_type` is `{kind}`")) && message.contains(SUPPORTED),
                "{message}"
            );
        }
        assert!(message(json!({"rope_type": "yarn"})).contains("`rope_scaling.factor`"));
        assert!(message(json!({"rope_type": "linear", "factor": "4"})).contains("`rope_scaling.factor`"));
        assert!(message(json!({"rope_type": "linear", "factor": 0.0})).contains("larger than zero"));
        assert!(message(json!({"rope_type": "yarn", "factor": 4, "original_max_position_embeddings": 0})).contains("larger"));
        assert!(message(json!({"partial_rotary_factor": 0.5})).contains("`partial_rotary_factor` is `0.5`"));
        assert!(message(json!({"full_attention": {"rope_type": "yarn"}})).contains("`rope_scaling.full_attention`"));
        assert!(with(json!({"rope_theta": 0.0})).unwrap_err().to_string().contains("`rope_theta`"));
    }
}
