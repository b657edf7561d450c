//! A pretrained model on disk, whichever way it is stored: a Hugging Face folder with safetensors, or a GGUF file.
//!
//! Both are asked for Hugging Face's names and shapes and answer one tensor at a time, so that loading never holds a model twice.

use std::collections::{BTreeMap, BTreeSet};
use std::path::{Path, PathBuf};

use data::gguf::{GgufError, GgufFile};
use serde_json::Value;
use tch::{Device, Kind, Tensor};

use crate::config::{ConfigError, ModelConfig};
use crate::dequantise::dequantise;
use crate::gguf_names;
use crate::tensor_file::{StoredTensor, TensorFileError, table};
use crate::transformer::Transformer;

/// How many of the tensors that are too many a message names.
const LISTED_TENSORS: usize = 3;

/// Why a model cannot be loaded.
#[derive(Debug, thiserror::Error)]
pub enum WeightsError {
    #[error("there is no model at `{}`: give a folder with config.json and safetensors, or a .gguf file", .0.display())]
    NotFound(PathBuf),
    #[error("`{}` has no `{file}`: {remedy}", folder.display())]
    MissingFile { folder: PathBuf, file: String, remedy: &'static str },
    #[error("cannot read `{}`: {message}", path.display())]
    Json { path: PathBuf, message: String },
    #[error("`{}`: {source}", path.display())]
    Config { path: PathBuf, source: ConfigError },
    #[error("`{}` {what}", path.display())]
    Unsupported { path: PathBuf, what: String },
    #[error("`{}` has no tensor `{tensor}`{hint}", path.display())]
    MissingTensor { path: PathBuf, tensor: String, hint: String },
    #[error("`{}` holds {tensors}, which the model does not have: {remedy}", path.display())]
    UnexpectedTensors { path: PathBuf, tensors: String, remedy: &'static str },
    #[error(
        "`{}`: tensor `{tensor}` has the shape {found:?}, but the configuration asks for {expected:?}; the weights and the \
         configuration belong to different models",
        path.display()
    )]
    Shape { path: PathBuf, tensor: String, expected: Vec<i64>, found: Vec<i64> },
    #[error("cannot load tensor `{tensor}` of `{}`: {message}", path.display())]
    Torch { path: PathBuf, tensor: String, message: String },
    #[error(transparent)]
    Gguf(#[from] GgufError),
    #[error(transparent)]
    TensorFile(#[from] TensorFileError),
}

/// An opened model: its configuration can be read and its tensors fetched.
#[derive(Debug)]
pub enum Source {
    /// A Hugging Face folder; the tensors of all its files by name.
    Safetensors { folder: PathBuf, tensors: BTreeMap<String, StoredTensor> },
    /// A GGUF file with its metadata.
    Gguf(GgufFile),
}

/// Opens a folder with `config.json` and `model.safetensors` (or `model.safetensors.index.json`), or a `.gguf` file.
///
/// # Errors
/// Nothing is there, a file is missing, truncated or damaged.
pub fn open(path: &Path) -> Result<Source, WeightsError> {
    if path.is_file() {
        return Ok(Source::Gguf(GgufFile::open(path)?));
    }
    if !path.is_dir() {
        return Err(WeightsError::NotFound(path.to_path_buf()));
    }
    let missing = |file: &str, remedy| WeightsError::MissingFile { folder: path.to_path_buf(), file: file.to_string(), remedy };
    if !path.join("config.json").is_file() {
        return Err(missing("config.json", "give the folder of a model in Hugging Face's layout, or a .gguf file"));
    }
    let (single, index) = (path.join("model.safetensors"), path.join("model.safetensors.index.json"));
    if single.is_file() {
        return Ok(Source::Safetensors { folder: path.to_path_buf(), tensors: table(&single)? });
    }
    if !index.is_file() {
        return Err(missing("model.safetensors", "fetch the weights too (model.safetensors, or its parts with their index)"));
    }
    let mut tensors = BTreeMap::new();
    for file in shard_names(&index)? {
        let shard = path.join(&file);
        if !shard.is_file() {
            return Err(missing(&file, "the index names it: fetch all parts of the model"));
        }
        tensors.extend(table(&shard)?);
    }
    Ok(Source::Safetensors { folder: path.to_path_buf(), tensors })
}

/// Opens and loads a model onto `device`, its weights converted to `kind`.
///
/// # Errors
/// As [`open`], [`Source::config`] and [`Source::tensor`].
pub fn load(path: &Path, kind: Kind, device: Device) -> Result<Transformer, WeightsError> {
    open(path)?.load(kind, device)
}

impl Source {
    /// The model's shape, from `config.json` or from GGUF metadata.
    ///
    /// The stop tokens of `generation_config.json`, where there is one, replace those of `config.json`, as in `transformers`.
    ///
    /// # Errors
    /// A field is missing, or asks for something that the forward does not compute.
    pub fn config(&self) -> Result<ModelConfig, WeightsError> {
        let (path, json) = match self {
            Source::Safetensors { folder, .. } => {
                let path = folder.join("config.json");
                let mut json = read_json(&path)?;
                let generation = folder.join("generation_config.json");
                if generation.is_file()
                    && let Some(stop) = read_json(&generation)?.get("eos_token_id").filter(|stop| !stop.is_null())
                    && json.is_object()
                {
                    json["eos_token_id"] = stop.clone();
                }
                (path, json)
            }
            Source::Gguf(file) => (file.path.clone(), gguf_names::config_json(file)?),
        };
        ModelConfig::from_json(&json).map_err(|source| WeightsError::Config { path, source })
    }

    /// One parameter by Hugging Face's name, on `device`, as `kind`; it must have exactly `shape`.
    ///
    /// # Errors
    /// There is no such tensor, it has another shape, or it cannot be read.
    pub fn tensor(&self, name: &str, shape: &[i64], kind: Kind, device: Device) -> Result<Tensor, WeightsError> {
        match self {
            Source::Safetensors { folder, tensors } => {
                let stored = tensors.get(name).ok_or_else(|| missing_tensor(folder, name))?;
                expect_shape(&stored.file, name, shape, &stored.shape)?;
                Ok(stored.load(kind, device)?)
            }
            Source::Gguf(file) => {
                let there = gguf_tensor(file, name, shape)?.f_to_kind(kind).and_then(|tensor| tensor.f_to_device(device));
                there.map_err(|error| torch_error(&file.path, name, &error))
            }
        }
    }

    /// Loads the whole model onto `device`, its weights converted to `kind`, one tensor at a time.
    ///
    /// # Errors
    /// As [`Source::config`] and [`Source::tensor`]; also when the file holds tensors that the configuration does not ask for.
    pub fn load(&self, kind: Kind, device: Device) -> Result<Transformer, WeightsError> {
        let config = self.config()?;
        self.expect_only(&config)?;
        Transformer::from_source(config, |name, shape| self.tensor(name, shape, kind, device))
    }

    /// Refuses weights of which the model would leave a part out: they would be loaded as another model than they are.
    fn expect_only(&self, config: &ModelConfig) -> Result<(), WeightsError> {
        let expected: BTreeSet<String> = config.parameter_shapes().into_iter().map(|(name, _)| name).collect();
        // Some files of tied models repeat the embedding as the head, and old ones carry RoPE's frequencies. GGUF's table of RoPE
        // factors is a part of the configuration, which has read it.
        let harmless = |name: &str| {
            (name == "lm_head.weight" && config.tie_word_embeddings)
                || name.ends_with("rotary_emb.inv_freq")
                || (matches!(self, Source::Gguf(_)) && name == gguf_names::ROPE_FACTORS)
        };
        let mut unexpected = self.names();
        unexpected.retain(|name| !expected.contains(name) && !harmless(name));
        if unexpected.is_empty() {
            return Ok(());
        }
        let mut tensors = unexpected.iter().take(LISTED_TENSORS).map(|name| format!("`{name}`")).collect::<Vec<_>>().join(", ");
        if unexpected.len() > LISTED_TENSORS {
            tensors += &format!(" and {} more tensors", unexpected.len() - LISTED_TENSORS);
        }
        let remedy = match self {
            Source::Safetensors { .. } => "config.json does not describe these weights; use the config.json that belongs to them",
            Source::Gguf(_) => "its metadata does not describe these weights; use the model's safetensors",
        };
        Err(WeightsError::UnexpectedTensors { path: self.path().to_path_buf(), tensors, remedy })
    }

    /// Names of all tensors that are there, sorted: Hugging Face's where a GGUF tensor has a counterpart.
    pub fn names(&self) -> Vec<String> {
        let hugging_face = |name: &str| gguf_names::to_hugging_face(name).unwrap_or_else(|| name.to_string());
        let mut names: Vec<String> = match self {
            Source::Safetensors { tensors, .. } => tensors.keys().cloned().collect(),
            Source::Gguf(file) => file.tensors.iter().map(|tensor| hugging_face(&tensor.name)).collect(),
        };
        names.sort();
        names
    }

    /// The folder or file that was opened.
    pub fn path(&self) -> &Path {
        match self {
            Source::Safetensors { folder, .. } => folder,
            Source::Gguf(file) => &file.path,
        }
    }
}

fn gguf_tensor(file: &GgufFile, name: &str, shape: &[i64]) -> Result<Tensor, WeightsError> {
    let info = gguf_names::from_hugging_face(name)
        .and_then(|stored_name| file.tensor(&stored_name))
        .ok_or_else(|| missing_tensor(&file.path, name))?;
    let found: Vec<i64> = info.shape.iter().map(|&length| length as i64).collect();
    expect_shape(&file.path, name, shape, &found)?;
    let values = dequantise(info.kind, &file.read(info)?, info.shape.iter().product());
    let to_tensor = || {
        let tensor = Tensor::f_from_slice(&values)?.f_view(shape)?;
        match gguf_names::interleaved_heads(file, name) {
            Some(heads) => unpermute(&tensor, heads),
            None => Ok(tensor),
        }
    };
    to_tensor().map_err(|error| torch_error(&file.path, name, &error))
}

/// Undoes the order in which llama.cpp's converter stores Llama's query and key rows: it puts the two members of each RoPE pair side by
/// side, where Hugging Face keeps the first members of all pairs before the second ones. `[heads · E, D]`, or `[heads · E]`, both ways.
fn unpermute(tensor: &Tensor, heads: i64) -> Result<Tensor, tch::TchError> {
    let shape = tensor.size();
    let rows = shape.first().copied().unwrap_or(0);
    tensor.f_view([heads, rows / heads / 2, 2, -1])?.f_transpose(1, 2)?.f_reshape(&shape)
}

/// The files that an index names, each once.
fn shard_names(index: &Path) -> Result<Vec<String>, WeightsError> {
    let json = read_json(index)?;
    let files = json
        .get("weight_map")
        .and_then(Value::as_object)
        .and_then(|map| map.values().map(|file| file.as_str().map(str::to_string)).collect::<Option<BTreeSet<_>>>());
    let files = files.ok_or_else(|| WeightsError::Json {
        path: index.to_path_buf(),
        message: "`weight_map` does not map names to files; fetch it again".to_string(),
    })?;
    Ok(files.into_iter().collect())
}

fn read_json(path: &Path) -> Result<Value, WeightsError> {
    let error = |message| WeightsError::Json { path: path.to_path_buf(), message };
    let text = std::fs::read_to_string(path).map_err(|source| error(source.to_string()))?;
    serde_json::from_str(&text).map_err(|source| error(source.to_string()))
}

fn missing_tensor(path: &Path, name: &str) -> WeightsError {
    let hint = match name {
        "lm_head.weight" => "; if the head shares the embedding, set `tie_word_embeddings` in config.json",
        _ => "; the weights and the configuration belong to different models, or parts are missing",
    };
    WeightsError::MissingTensor { path: path.to_path_buf(), tensor: name.to_string(), hint: hint.to_string() }
}

fn expect_shape(path: &Path, name: &str, expected: &[i64], found: &[i64]) -> Result<(), WeightsError> {
    if expected == found {
        return Ok(());
    }
    Err(WeightsError::Shape {
        path: path.to_path_buf(),
        tensor: name.to_string(),
        expected: expected.to_vec(),
        found: found.to_vec(),
    })
}

fn torch_error(path: &Path, tensor: &str, error: &tch::TchError) -> WeightsError {
    // libtorch appends a C++ stack trace after the first line.
    let message = error.to_string().lines().next().unwrap_or_default().to_string();
    WeightsError::Torch { path: path.to_path_buf(), tensor: tensor.to_string(), message }
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]
    use super::*;

    fn golden(name: &str) -> PathBuf {
        Path::new(env!("CARGO_MANIFEST_DIR")).join("../tests/golden/logits").join(name)
    }

    /// A copy that a test may damage.
    fn copy_of(name: &str) -> tempfile::TempDir {
        let folder = tempfile::tempdir().unwrap();
        for entry in std::fs::read_dir(golden(name)).unwrap() {
            let entry = entry.unwrap();
            std::fs::copy(entry.path(), folder.path().join(entry.file_name())).unwrap();
        }
        folder
    }

    #[test]
    fn gguf_and_safetensors_of_one_model_agree() {
        for name in ["llama_tied", "llama_untied_linear_biased", "qwen2_tied", "qwen3_tied", "qwen3_tied_yarn"] {
            let folder = open(&golden(name)).unwrap();
            let file = open(&golden(&format!("{name}.gguf"))).unwrap();
            assert_eq!(folder.config().unwrap(), file.config().unwrap());
            let mut names = folder.names();
            names.retain(|name| name != "lm_head.weight" || !folder.config().unwrap().tie_word_embeddings);
            assert_eq!(names, file.names());
            for (name, shape) in folder.config().unwrap().parameter_shapes() {
                let (one, other) = (
                    folder.tensor(&name, &shape, Kind::Float, Device::Cpu),
                    file.tensor(&name, &shape, Kind::Float, Device::Cpu),
                );
                assert_eq!(one.unwrap(), other.unwrap(), "{name}");
            }
        }
    }

    #[test]
    fn a_sharded_model_has_all_its_tensors() {
        let source = open(&golden("qwen3_untied_sharded")).unwrap();
        let mut expected: Vec<String> = source.config().unwrap().parameter_shapes().into_iter().map(|(name, _)| name).collect();
        expected.sort();
        assert_eq!(source.names(), expected);
        let model = source.load(Kind::BFloat16, Device::Cpu).unwrap();
        assert_eq!(model.kind(), Kind::BFloat16);
    }

    #[test]
    fn a_tied_model_that_stores_its_head_too_loads_and_stays_tied() {
        for name in ["qwen2_tied", "qwen3_tied"] {
            let folder = copy_of(name);
            let weights = folder.path().join("model.safetensors");
            let mut tensors = crate::tensor_file::load_safetensors(&weights).unwrap();
            tensors.insert("lm_head.weight".to_string(), tensors["model.embed_tokens.weight"].copy());
            let named: Vec<(String, &Tensor)> = tensors.iter().map(|(name, tensor)| (name.clone(), tensor)).collect();
            crate::tensor_file::save_safetensors(&weights, &named).unwrap();
            let model = load(folder.path(), Kind::Float, Device::Cpu).unwrap();
            assert!(model.lm_head.is_none() && model.head().equal(&model.embed_tokens), "{name}");
        }
    }

    #[test]
    fn a_bias_that_is_missing_or_too_many_is_told() {
        let folder = copy_of("qwen2_tied");
        let path = folder.path().join("config.json");
        let text = std::fs::read_to_string(&path).unwrap();
        std::fs::write(&path, text.replace("qwen2", "llama").replace("Qwen2", "Llama")).unwrap();
        let message = load(folder.path(), Kind::Float, Device::Cpu).map(|_| ()).unwrap_err().to_string();
        assert!(message.contains("`model.layers.0.self_attn.k_proj.bias`") && message.contains("does not describe"), "{message}");
        let folder = copy_of("llama_tied");
        let path = folder.path().join("config.json");
        let text = std::fs::read_to_string(&path).unwrap();
        std::fs::write(&path, text.replace("llama", "qwen2").replace("Llama", "Qwen2")).unwrap();
        let message = load(folder.path(), Kind::Float, Device::Cpu).map(|_| ()).unwrap_err().to_string();
        assert!(message.contains("has no tensor `model.layers.0.self_attn.q_proj.bias`"), "{message}");
    }

    #[test]
    fn stop_tokens_come_from_the_generation_config() {
        let folder = copy_of("llama_tied");
        std::fs::write(folder.path().join("generation_config.json"), r#"{"eos_token_id": [5, 6]}"#).unwrap();
        assert_eq!(open(folder.path()).unwrap().config().unwrap().eos_token_id, [5, 6]);
    }

    #[test]
    fn wrong_names_and_shapes_are_told() {
        let source = open(&golden("llama_tied")).unwrap();
        let message = source.tensor("model.norm.weight", &[33], Kind::Float, Device::Cpu).unwrap_err().to_string();
        assert!(message.contains("model.safetensors") && message.contains("`model.norm.weight`"), "{message}");
        assert!(message.contains("[32]") && message.contains("[33]"), "{message}");
        let message = source.tensor("lm_head.weight", &[160, 32], Kind::Float, Device::Cpu).unwrap_err().to_string();
        assert!(message.contains("`lm_head.weight`") && message.contains("tie_word_embeddings"), "{message}");
        let file = open(&golden("llama_tied.gguf")).unwrap();
        assert!(matches!(file.tensor("model.norm.weight", &[33], Kind::Float, Device::Cpu), Err(WeightsError::Shape { .. })));
        assert!(matches!(file.tensor("model.other", &[33], Kind::Float, Device::Cpu), Err(WeightsError::MissingTensor { .. })));
    }

    #[test]
    fn tensors_that_the_model_does_not_have_are_refused() {
        let folder = copy_of("llama_tied");
        let weights = folder.path().join("model.safetensors");
        let mut tensors = crate::tensor_file::load_safetensors(&weights).unwrap();
        let save = |tensors: &BTreeMap<String, Tensor>| {
            let named: Vec<(String, &Tensor)> = tensors.iter().map(|(name, tensor)| (name.clone(), tensor)).collect();
            crate::tensor_file::save_safetensors_as(&weights, &named, Kind::Float).unwrap();
            load(folder.path(), Kind::Float, Device::Cpu).map(|_| ()).map_err(|error| error.to_string())
        };
        let extra = || Tensor::zeros([4], (Kind::Float, Device::Cpu));
        tensors.insert("lm_head.weight".to_string(), extra());
        tensors.insert("model.layers.0.self_attn.rotary_emb.inv_freq".to_string(), extra());
        save(&tensors).unwrap();
        for projection in ["q", "k", "v", "o"] {
            tensors.insert(format!("model.layers.0.self_attn.{projection}_proj.weight_scale"), extra());
        }
        let message = save(&tensors).unwrap_err();
        let folder_name = folder.path().display().to_string();
        assert!(message.contains(&folder_name) && message.contains("config.json does not describe"), "{message}");
        assert!(message.contains("`model.layers.0.self_attn.k_proj.weight_scale`, "), "{message}");
        assert!(message.contains("and 1 more tensors") && !message.contains("lm_head"), "{message}");

        let Source::Gguf(mut file) = open(&golden("llama_tied.gguf")).unwrap() else { panic!("not GGUF") };
        let norm = file.tensor("output_norm.weight").unwrap().clone();
        file.tensors.push(data::gguf::TensorInfo { name: "blk.0.attn_q_norm.weight".to_string(), ..norm.clone() });
        file.tensors.push(data::gguf::TensorInfo { name: "blk.0.other.weight".to_string(), ..norm });
        let message = Source::Gguf(file).load(Kind::Float, Device::Cpu).map(|_| ()).unwrap_err().to_string();
        assert!(message.contains("llama_tied.gguf") && message.contains("its metadata does not describe"), "{message}");
        assert!(message.contains("`blk.0.other.weight`, `model.layers.0.self_attn.q_norm.weight`"), "{message}");
    }

    #[test]
    fn folders_without_what_is_needed_are_refused() {
        assert!(matches!(open(Path::new("absent")), Err(WeightsError::NotFound(_))));
        for (missing, model) in [
            ("config.json", "llama_tied"),
            ("model.safetensors", "llama_tied"),
            ("model-00002-of-00003.safetensors", "qwen3_untied_sharded"),
        ] {
            let folder = copy_of(model);
            std::fs::remove_file(folder.path().join(missing)).unwrap();
            let message = open(folder.path()).unwrap_err().to_string();
            assert!(message.contains(&format!("`{missing}`")), "{message}");
        }
    }

    #[test]
    fn damaged_files_are_refused_by_name() {
        let folder = copy_of("llama_tied");
        std::fs::write(folder.path().join("config.json"), "{").unwrap();
        let message = open(folder.path()).unwrap().config().unwrap_err().to_string();
        assert!(message.contains("config.json"), "{message}");

        std::fs::write(folder.path().join("config.json"), r#"{"model_type": "gpt2"}"#).unwrap();
        let message = open(folder.path()).unwrap().config().unwrap_err().to_string();
        assert!(message.contains("config.json") && message.contains("gpt2"), "{message}");

        let weights = folder.path().join("model.safetensors");
        let bytes = std::fs::read(&weights).unwrap();
        std::fs::write(&weights, &bytes[..bytes.len() / 2]).unwrap();
        let message = open(folder.path()).unwrap_err().to_string();
        assert!(message.contains("model.safetensors") && message.contains("truncated"), "{message}");

        let message = open(&weights).unwrap_err().to_string();
        assert!(message.contains("not a GGUF file"), "{message}");
    }
}
