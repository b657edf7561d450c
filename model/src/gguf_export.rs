//! A checkpoint as a GGUF file that llama.cpp loads: its metadata, its names, its order of query and key rows.

use std::io;
use std::path::Path;

use data::gguf::GgufFile;
use data::gguf::writer::{self, Entry, PlannedTensor};
use serde_json::Value;
use tch::Kind;

use crate::checkpoint::DrafterFile;
use crate::config::ModelConfig;
use crate::export::{ExportError, sound_tensor};
use crate::gguf_names::{ROPE_FACTORS, from_hugging_face};
use crate::quantise::{Quantisation, quantise};
use crate::rope::{RopeScaling, YarnScaling, plain_frequencies};
use crate::weights::{Source, WeightsError};

/// What drafters' own keys begin with.
const DRAFTER_KEYS: &str = "drafthorse.";

/// The keys of tokens that end a response, in the order in which they are used. llama.cpp stops at any of them.
pub(crate) const STOP_KEYS: [&str; 3] =
    ["tokenizer.ggml.eos_token_id", "tokenizer.ggml.eot_token_id", "tokenizer.ggml.eom_token_id"];

/// A file that is to be written: all of it but the weights.
#[derive(Debug)]
pub struct GgufPlan {
    metadata: Vec<(String, Entry)>,
    tensors: Vec<PlannedTensor>,
    contents: Vec<Content>,
    config: ModelConfig,
}

/// Where a tensor's values come from.
#[derive(Debug)]
enum Content {
    /// A parameter by Hugging Face's name.
    Parameter {
        name: String,
        shape: Vec<i64>,
        stored: Quantisation,
    },
    Values(Vec<f32>),
}

impl GgufPlan {
    /// Plans the file of a model whose matrices are stored as `quantisation`, norms as f32. `description` are the keys under `general`
    /// and [`drafter_metadata`], `text` those of the tokenizer and the chat template.
    ///
    /// # Errors
    /// [`ExportError::NotInGguf`]: what of the model llama.cpp would not compute, or the kind cannot hold.
    pub fn new(
        config: &ModelConfig,
        quantisation: Quantisation,
        description: Vec<(String, Entry)>,
        text: Vec<(String, Entry)>,
    ) -> Result<GgufPlan, ExportError> {
        let mut metadata = vec![("general.architecture".to_string(), Entry::String(config.model_type.clone()))];
        metadata.extend(description);
        metadata.extend(
            [("general.file_type", file_type(quantisation)), ("general.quantization_version", 2)]
                .map(|(key, number)| (key.to_string(), Entry::U32(number))),
        );
        metadata.extend(shape_metadata(config)?);
        let (scaling, factors) = rope_scaling(config)?;
        metadata.extend(scaling);
        metadata.extend(text);
        add_stop_tokens(&mut metadata, &config.eos_token_id)?;

        let (mut tensors, mut contents) = (Vec::new(), Vec::new());
        if let Some(factors) = factors {
            let kind = Quantisation::F32.kind();
            tensors.push(PlannedTensor { name: ROPE_FACTORS.to_string(), shape: vec![factors.len()], kind });
            contents.push(Content::Values(factors));
        }
        for (name, shape) in config.parameter_shapes() {
            let stored = if shape.len() == 1 { Quantisation::F32 } else { quantisation };
            let planned = PlannedTensor {
                name: gguf_name(config, &name)?,
                shape: shape.iter().map(|&length| length as usize).collect(),
                kind: stored.kind(),
            };
            planned.bytes().map_err(|what| ExportError::NotInGguf(format!("{what}; choose --quantisation bf16 or f16")))?;
            tensors.push(planned);
            contents.push(Content::Parameter { name, shape, stored });
        }
        Ok(GgufPlan { metadata, tensors, contents, config: config.clone() })
    }

    /// How many bytes the file takes.
    ///
    /// # Errors
    /// None that [`GgufPlan::new`] did not have.
    pub fn bytes(&self) -> Result<u64, ExportError> {
        writer::size(&self.metadata, &self.tensors).map_err(ExportError::NotInGguf)
    }

    /// Writes the file, reads its head again, and holds that against the model. `goes_on` is asked before each tensor.
    ///
    /// # Errors
    /// A weight cannot be read or stored, the file cannot be written, or this program would read another model from it. The file is then
    /// not to be used: write under a temporary name.
    pub fn write(&self, path: &Path, source: &Source, goes_on: &mut dyn FnMut() -> bool) -> Result<(), ExportError> {
        let written = writer::write::<Failure>(path, &self.metadata, &self.tensors, |index| {
            if goes_on() { self.data(source, index).map_err(Failure) } else { Err(Failure(ExportError::Interrupted)) }
        });
        written.map_err(|Failure(error)| match error {
            // Which file it was is known only here.
            ExportError::Write { source, .. } => ExportError::Write { path: path.to_path_buf(), source },
            other => other,
        })?;
        self.read_back(path)
    }

    fn data(&self, source: &Source, index: usize) -> Result<Vec<u8>, ExportError> {
        let (values, stored) = match &self.contents[index] {
            Content::Values(values) => (values.clone(), Quantisation::F32),
            Content::Parameter { name, shape, stored } => {
                let tensor = sound_tensor(source, name, shape, Kind::Float)?;
                let values = torch::to_f32s(&tensor);
                (paired(&self.config, name, shape, values), *stored)
            }
        };
        quantise(stored, &values).map_err(|value| ExportError::TooLarge {
            tensor: self.tensors[index].name.clone(),
            value,
            kind: stored.kind().name(),
        })
    }

    fn read_back(&self, path: &Path) -> Result<(), ExportError> {
        let found = Source::Gguf(GgufFile::open(path).map_err(WeightsError::from)?).config()?;
        let comparable = |config: &ModelConfig| {
            let mut config = config.clone();
            // What a file says of YaRN's attention factor is that there is nothing to say: only such models are written.
            if let Some(RopeScaling::Yarn(scaling)) = &mut config.rope_scaling {
                (scaling.attention_factor, scaling.mscale, scaling.mscale_all_dim) = (None, None, None);
            }
            let mut json = config.to_json("float32");
            // Files name these otherwise: the first token is the tokenizer's, and stop tokens are in the order of their keys.
            for key in ["bos_token_id", "eos_token_id"] {
                json[key] = Value::Null;
            }
            round(&mut json);
            json
        };
        let (found, expected) = (comparable(&found), comparable(&self.config));
        let keys = expected.as_object().into_iter().flatten();
        match keys.into_iter().find(|(key, value)| found.get(key) != Some(value)) {
            None => Ok(()),
            Some((key, value)) => Err(ExportError::ReadBack(format!("`{key}` is {} instead of {value}", found[key]))),
        }
    }
}

/// An error on the way through the writer, whose own are those of the file system.
struct Failure(ExportError);

impl From<io::Error> for Failure {
    fn from(source: io::Error) -> Self {
        Failure(ExportError::Write { path: Default::default(), source })
    }
}

/// The number that stands for a file's main kind.
fn file_type(quantisation: Quantisation) -> u32 {
    match quantisation {
        Quantisation::F32 => 0,
        Quantisation::F16 => 1,
        Quantisation::Q8_0 => 7,
        Quantisation::Bf16 => 32,
    }
}

/// Numbers as f32, which is how the file stores them.
fn round(json: &mut Value) {
    match json {
        Value::Number(number) if number.is_f64() => *json = Value::from(number.as_f64().unwrap_or_default() as f32),
        Value::Array(items) => items.iter_mut().for_each(round),
        Value::Object(fields) => fields.values_mut().for_each(round),
        _ => (),
    }
}

/// The tensor's name in the file, where llama.cpp has a place for it.
fn gguf_name(config: &ModelConfig, name: &str) -> Result<String, ExportError> {
    let architecture = config.model_type.as_str();
    let biases: &[&str] = match architecture {
        "llama" => &["q_proj", "k_proj", "v_proj", "o_proj"],
        "qwen2" => &["q_proj", "k_proj", "v_proj"],
        _ => &[],
    };
    let has_no_place = name.strip_suffix(".bias").is_some_and(|stem| !biases.iter().any(|projection| stem.ends_with(projection)));
    let found = from_hugging_face(name).filter(|_| !has_no_place);
    found.ok_or_else(|| {
        ExportError::NotInGguf(format!("llama.cpp's `{architecture}` has no tensor for `{name}`; use --format hf"))
    })
}

/// The keys below the architecture's name that say how large everything is.
fn shape_metadata(config: &ModelConfig) -> Result<Vec<(String, Entry)>, ExportError> {
    let counts = [
        ("block_count", config.num_hidden_layers as i64),
        ("context_length", config.max_position_embeddings),
        ("embedding_length", config.hidden_size),
        ("feed_forward_length", config.intermediate_size),
        ("attention.head_count", config.num_attention_heads),
        ("attention.head_count_kv", config.num_key_value_heads),
        ("attention.key_length", config.head_dim),
        ("attention.value_length", config.head_dim),
        ("rope.dimension_count", config.head_dim),
        ("vocab_size", config.vocab_size),
    ];
    let key = |name: &str| format!("{}.{name}", config.model_type);
    let mut metadata = Vec::new();
    for (name, count) in counts {
        let count = u32::try_from(count).map_err(|_| ExportError::NotInGguf(format!("`{name}` would be {count}")))?;
        metadata.push((key(name), Entry::U32(count)));
    }
    metadata.push((key("attention.layer_norm_rms_epsilon"), Entry::F32(config.rms_norm_eps as f32)));
    metadata.push((key("rope.freq_base"), Entry::F32(config.rope_theta as f32)));
    Ok(metadata)
}

type Scaling = (Vec<(String, Entry)>, Option<Vec<f32>>);

/// RoPE's scaling as keys, or for Llama 3's as a table of one factor for each pair.
fn rope_scaling(config: &ModelConfig) -> Result<Scaling, ExportError> {
    let refuse = |what: String| Err(ExportError::NotInGguf(what + "; use --format hf"));
    let key = |name: &str| format!("{}.rope.scaling.{name}", config.model_type);
    let kind = |name: &str, factor: f64| {
        vec![(key("type"), Entry::String(name.to_string())), (key("factor"), Entry::F32(factor as f32))]
    };
    let original = |length: i64| (key("original_context_length"), Entry::U32(length as u32));
    match &config.rope_scaling {
        None => Ok((Vec::new(), None)),
        Some(RopeScaling::Linear { factor }) => Ok((kind("linear", *factor), None)),
        Some(RopeScaling::Llama3(scaling)) => {
            if config.model_type != "llama" {
                return refuse(format!(
                    "llama.cpp reads the RoPE scaling `llama3` for `llama` only, not for `{}`",
                    config.model_type
                ));
            } else if (scaling.low_freq_factor, scaling.high_freq_factor) != (1.0, 4.0) {
                return refuse(
                    "of the RoPE scaling `llama3`, files are read only with the frequency factors 1 and 4".to_string(),
                );
            }
            let factor = |frequency: f32| frequency / scaling.scale(frequency);
            let factors = plain_frequencies(config.rope_theta, config.head_dim).into_iter().map(factor).collect();
            Ok((vec![original(scaling.original_max_position_embeddings)], Some(factors)))
        }
        Some(RopeScaling::Yarn(scaling)) => {
            if !is_llama_cpps(scaling) {
                let asked = serde_json::to_string(scaling).unwrap_or_default();
                return refuse(format!("llama.cpp computes the RoPE scaling `yarn` without what is asked for here: {asked}"));
            }
            let mut keys = kind("yarn", scaling.factor);
            keys.push(original(scaling.original_max_position_embeddings));
            for (name, beta) in [("beta_fast", scaling.beta_fast), ("beta_slow", scaling.beta_slow)] {
                keys.push((key(&format!("yarn_{name}")), Entry::F32(beta as f32)));
            }
            Ok((keys, None))
        }
    }
}

/// Whether llama.cpp, which rounds the ramp's ends and derives the attention factor by itself, computes the same.
fn is_llama_cpps(scaling: &YarnScaling) -> bool {
    let usual = YarnScaling { attention_factor: None, mscale: None, mscale_all_dim: None, ..scaling.clone() };
    scaling.truncate && (scaling.attention_factor() - usual.attention_factor()).abs() < 1e-6
}

/// Adds the tokens that end a response to the keys of the tokenizer, which may have named the first already.
fn add_stop_tokens(metadata: &mut Vec<(String, Entry)>, stop_tokens: &[u32]) -> Result<(), ExportError> {
    let named = metadata.iter().find(|(key, _)| key == STOP_KEYS[0]).and_then(|(_, entry)| match entry {
        Entry::U32(id) => Some(*id),
        _ => None,
    });
    let others = stop_tokens.iter().copied().filter(|&id| Some(id) != named);
    let all: Vec<u32> = named.into_iter().chain(others).collect();
    if all.len() > STOP_KEYS.len() {
        let room = STOP_KEYS.len();
        return Err(ExportError::NotInGguf(format!("{} tokens end its responses, and there is room for {room}", all.len())));
    }
    let added = STOP_KEYS.iter().zip(all).skip(usize::from(named.is_some()));
    metadata.extend(added.map(|(key, id)| (key.to_string(), Entry::U32(id))));
    Ok(())
}

/// Puts the rows of Llama's queries and keys, `[heads · E, …]`, into llama.cpp's order: the two members of each RoPE pair side by side,
/// where Hugging Face keeps the first members of all pairs of a head before the second ones. Everything else stays as it is.
fn paired(config: &ModelConfig, name: &str, shape: &[i64], values: Vec<f32>) -> Vec<f32> {
    if config.model_type != "llama" || !["self_attn.q_proj.", "self_attn.k_proj."].iter().any(|part| name.contains(part)) {
        return values;
    }
    let (head, row) = (config.head_dim as usize, shape.get(1).map_or(1, |&inputs| inputs as usize));
    let mut ordered = Vec::with_capacity(values.len());
    for head in values.chunks_exact(head * row) {
        let (first, second) = head.split_at(head.len() / 2);
        for (first, second) in first.chunks_exact(row).zip(second.chunks_exact(row)) {
            ordered.extend_from_slice(first);
            ordered.extend_from_slice(second);
        }
    }
    ordered
}

/// What makes the model a drafter, as `drafthorse.block_size` and so on; what `drafter.json` leaves empty has no key.
///
/// # Errors
/// A field of a form that has no place in GGUF.
pub fn drafter_metadata(drafter: &DrafterFile) -> Result<Vec<(String, Entry)>, ExportError> {
    let json = serde_json::to_value(drafter).unwrap_or_default();
    let mut metadata = Vec::new();
    for (name, value) in json.as_object().into_iter().flatten().filter(|(_, value)| !value.is_null()) {
        let entry = match value {
            Value::String(text) => Some(Entry::String(text.clone())),
            Value::Bool(truth) => Some(Entry::Bool(*truth)),
            Value::Number(number) => number.as_u64().map(Entry::U64),
            Value::Array(items) => {
                let numbers = items.iter().map(|item| item.as_i64().and_then(|number| i32::try_from(number).ok()));
                numbers.collect::<Option<_>>().map(Entry::I32s)
            }
            _ => None,
        };
        let entry = entry.ok_or_else(|| ExportError::NotInGguf(format!("drafter.json's `{name}` is {value}")))?;
        metadata.push((format!("{DRAFTER_KEYS}{name}"), entry));
    }
    Ok(metadata)
}

/// The other way, for a file that [`drafter_metadata`] is in.
///
/// # Errors
/// Keys are missing or not of this form; the message says which.
pub(crate) fn drafter_file(file: &GgufFile) -> Result<DrafterFile, String> {
    let keys = file.metadata.iter().filter_map(|(key, value)| Some((key.strip_prefix(DRAFTER_KEYS)?.to_string(), json(value))));
    let fields: serde_json::Map<String, Value> = keys.collect();
    if fields.is_empty() {
        return Err(format!("it has no `{DRAFTER_KEYS}` keys"));
    }
    serde_json::from_value(Value::Object(fields)).map_err(|error| format!("its `{DRAFTER_KEYS}` keys: {error}"))
}

fn json(value: &data::gguf::Value) -> Value {
    use data::gguf::Value as Stored;
    match value {
        Stored::U64(number) => Value::from(*number),
        Stored::I64(number) => Value::from(*number),
        Stored::F64(number) => Value::from(*number),
        Stored::Bool(truth) => Value::from(*truth),
        Stored::String(text) => Value::from(text.as_str()),
        Stored::Array(items) => items.iter().map(json).collect(),
    }
}

#[cfg(test)]
mod tests;
