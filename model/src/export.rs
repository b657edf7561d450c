//! What a checkpoint goes through on its way to other programs: every tensor is held against the architecture first, then the weights are
//! written, as safetensors here and as GGUF in [`crate::gguf_export`]. One tensor (one file of several) is in memory at a time.

use std::collections::{BTreeMap, BTreeSet};
use std::io;
use std::path::{Path, PathBuf};

use tch::{Device, Kind, Tensor};

use crate::config::ModelConfig;
use crate::tensor_file::{TensorFileError, save_safetensors_as};
use crate::weights::{Source, WeightsError};

/// How many tensors of one kind of fault a message lists.
const LISTED: usize = 20;

/// Weights above this go into several files, as hubs and `transformers` have it.
pub const LARGEST_FILE: u64 = 5_000_000_000;

/// Why a checkpoint cannot be exported.
#[derive(Debug, thiserror::Error)]
pub enum ExportError {
    #[error("the weights in `{}` are not those of the model that its config.json describes:{list}\nexport a whole checkpoint", path.display())]
    Tensors { path: PathBuf, list: String },
    #[error("tensor `{tensor}` of `{}` holds {value}, which is no weight: the checkpoint is damaged, take another", path.display())]
    NotFinite { path: PathBuf, tensor: String, value: String },
    #[error("tensor `{tensor}` holds {value}, which {kind} cannot hold; choose another --quantisation")]
    TooLarge { tensor: String, value: f32, kind: &'static str },
    #[error("a GGUF file cannot express this drafter: {0}")]
    NotInGguf(String),
    #[error("the GGUF file does not read back as what was written: {0}; please report it, with the checkpoint's config.json")]
    ReadBack(String),
    #[error("cannot write `{}`: {source}", path.display())]
    Write { path: PathBuf, source: io::Error },
    #[error("interrupted")]
    Interrupted,
    #[error(transparent)]
    Weights(#[from] WeightsError),
    #[error(transparent)]
    TensorFile(#[from] TensorFileError),
}

/// Holds the tensors that are there against those that the architecture has, by name, shape and kind of number.
///
/// # Errors
/// [`ExportError::Tensors`] with the list of all that is missing, unexpected or of the wrong shape.
pub fn check_tensors(source: &Source, config: &ModelConfig) -> Result<(), ExportError> {
    let expected: BTreeMap<String, Vec<i64>> = config.parameter_shapes().into_iter().collect();
    let names: BTreeSet<String> = source.names().into_iter().collect();
    let named = |name: &String| format!("`{name}`");
    let missing: Vec<String> = expected.keys().filter(|name| !names.contains(*name)).map(named).collect();
    let unexpected: Vec<String> = names.iter().filter(|name| !expected.contains_key(*name)).map(named).collect();
    let mut faulty = Vec::new();
    if let Source::Safetensors { tensors, .. } = source {
        for (name, stored) in tensors {
            let Some(shape) = expected.get(name) else { continue };
            if stored.shape != *shape {
                faulty.push(format!("`{name}` ({:?} instead of {shape:?})", stored.shape));
            } else if !matches!(stored.kind(), Ok(Kind::Float | Kind::BFloat16 | Kind::Half | Kind::Double)) {
                faulty.push(format!("`{name}` (its numbers are no floating-point ones)"));
            }
        }
    }
    let list =
        [("missing", missing), ("unexpected", unexpected), ("of the wrong shape", faulty)].map(|(what, all)| lines(what, &all));
    if list.iter().all(String::is_empty) {
        return Ok(());
    }
    Err(ExportError::Tensors { path: source.path().to_path_buf(), list: list.concat() })
}

fn lines(what: &str, tensors: &[String]) -> String {
    if tensors.is_empty() {
        return String::new();
    }
    let more = tensors.len().saturating_sub(LISTED);
    let more = if more > 0 { format!(" and {more} more") } else { String::new() };
    format!("\n  {what}: {}{more}", tensors.iter().take(LISTED).cloned().collect::<Vec<_>>().join(", "))
}

/// The kind that a checkpoint's weights are stored in, judged by its embedding.
///
/// # Errors
/// There is no embedding, or its kind is unknown.
pub fn stored_kind(source: &Source, config: &ModelConfig) -> Result<Kind, ExportError> {
    let name = config.parameter_shapes().into_iter().next().map(|(name, _)| name).unwrap_or_default();
    match source {
        Source::Safetensors { tensors, .. } => match tensors.get(&name) {
            Some(stored) => Ok(stored.kind()?),
            None => check_tensors(source, config).map(|()| Kind::Float),
        },
        Source::Gguf(_) => Ok(Kind::Float),
    }
}

/// A parameter as `kind`, all of it finite.
///
/// # Errors
/// As [`Source::tensor`]; [`ExportError::NotFinite`].
pub(crate) fn sound_tensor(source: &Source, name: &str, shape: &[i64], kind: Kind) -> Result<Tensor, ExportError> {
    let tensor = source.tensor(name, shape, kind, Device::Cpu)?;
    let torch_error = |error: tch::TchError| {
        // libtorch appends a C++ stack trace after the first line.
        let message = error.to_string().lines().next().unwrap_or_default().to_string();
        WeightsError::Torch { path: source.path().to_path_buf(), tensor: name.to_string(), message }
    };
    // A sum of finite numbers may overflow, but a tensor with one that is not finite has no finite largest magnitude.
    let largest = tensor.f_abs().and_then(|tensor| tensor.f_max()).map_err(torch_error)?;
    let largest = largest.f_double_value(&[]).map_err(torch_error)?;
    if largest.is_finite() {
        return Ok(tensor);
    }
    let value = if largest.is_nan() { "NaN" } else { "an infinite number" };
    Err(ExportError::NotFinite { path: source.path().to_path_buf(), tensor: name.to_string(), value: value.to_string() })
}

/// How many bytes the weights of a model take as `kind`.
pub fn weights_bytes(config: &ModelConfig, kind: Kind) -> u64 {
    config.parameter_shapes().iter().map(|(_, shape)| bytes(shape, kind)).sum()
}

fn bytes(shape: &[i64], kind: Kind) -> u64 {
    shape.iter().product::<i64>() as u64 * kind.elt_size_in_bytes() as u64
}

/// Writes a model's weights into `folder` as `kind`: `model.safetensors`, or where they take more than `largest_file` bytes, files of at
/// most that size (a larger tensor has one for itself) with `model.safetensors.index.json`. `goes_on` is asked before each file.
///
/// # Errors
/// A tensor cannot be read or holds what is no number, a file cannot be written; [`ExportError::Interrupted`] when `goes_on` says no.
pub fn write_safetensors(
    folder: &Path,
    source: &Source,
    config: &ModelConfig,
    kind: Kind,
    largest_file: u64,
    goes_on: &mut dyn FnMut() -> bool,
) -> Result<(), ExportError> {
    let files = split(config.parameter_shapes(), kind, largest_file);
    let name_of = |index: usize| match files.len() {
        1 => "model.safetensors".to_string(),
        count => format!("model-{:05}-of-{count:05}.safetensors", index + 1),
    };
    let mut weight_map = serde_json::Map::new();
    for (index, parameters) in files.iter().enumerate() {
        let file = name_of(index);
        let mut tensors = Vec::with_capacity(parameters.len());
        for (name, shape) in parameters {
            if !goes_on() {
                return Err(ExportError::Interrupted);
            }
            tensors.push((name.clone(), sound_tensor(source, name, shape, kind)?));
            weight_map.insert(name.clone(), file.clone().into());
        }
        let named: Vec<(String, &Tensor)> = tensors.iter().map(|(name, tensor)| (name.clone(), tensor)).collect();
        save_safetensors_as(&folder.join(&file), &named, kind)?;
    }
    if files.len() > 1 {
        let index = serde_json::json!({"metadata": {"total_size": weights_bytes(config, kind)}, "weight_map": weight_map});
        let path = folder.join("model.safetensors.index.json");
        std::fs::write(&path, format!("{index:#}\n")).map_err(|source| ExportError::Write { path, source })?;
    }
    Ok(())
}

/// Parameters by the file they go into, in their order.
fn split(parameters: Vec<(String, Vec<i64>)>, kind: Kind, largest_file: u64) -> Vec<Vec<(String, Vec<i64>)>> {
    let (mut files, mut filled) = (vec![Vec::new()], 0);
    for (name, shape) in parameters {
        let size = bytes(&shape, kind);
        if filled > 0 && filled + size > largest_file {
            files.push(Vec::new());
            filled = 0;
        }
        filled += size;
        if let Some(file) = files.last_mut() {
            file.push((name, shape));
        }
    }
    files
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]
    use super::*;
    use crate::tensor_file::{load_safetensors, save_safetensors};
    use crate::weights::open;

    fn golden(name: &str) -> Source {
        open(&Path::new(env!("CARGO_MANIFEST_DIR")).join("../tests/golden/logits").join(name)).unwrap()
    }

    /// The golden model in a folder of its own, its tensors changed.
    fn changed(change: impl Fn(&mut BTreeMap<String, Tensor>)) -> (tempfile::TempDir, Source) {
        let folder = tempfile::tempdir().unwrap();
        let original = golden("qwen3_tied");
        let mut tensors = load_safetensors(&original.path().join("model.safetensors")).unwrap();
        tensors.remove("lm_head.weight");
        change(&mut tensors);
        std::fs::copy(original.path().join("config.json"), folder.path().join("config.json")).unwrap();
        let named: Vec<(String, &Tensor)> = tensors.iter().map(|(name, tensor)| (name.clone(), tensor)).collect();
        save_safetensors(&folder.path().join("model.safetensors"), &named).unwrap();
        let source = open(folder.path()).unwrap();
        (folder, source)
    }

    #[test]
    fn all_that_does_not_fit_is_listed() {
        let (_folder, source) = changed(|_| ());
        check_tensors(&source, &source.config().unwrap()).unwrap();
        let zeros = |shape: &[i64], kind| Tensor::zeros(shape, (kind, tch::Device::Cpu));
        let (_folder, source) = changed(|tensors| {
            tensors.remove("model.norm.weight");
            tensors.remove("model.layers.1.mlp.up_proj.weight");
            tensors.insert("model.layers.2.mlp.up_proj.weight".to_string(), zeros(&[48, 32], Kind::Float));
            tensors.insert("lm_head.weight".to_string(), zeros(&[160, 32], Kind::Float));
            tensors.insert("model.layers.0.input_layernorm.weight".to_string(), zeros(&[33], Kind::Float));
            tensors.insert("model.layers.0.post_attention_layernorm.weight".to_string(), zeros(&[32], Kind::Int64));
        });
        let message = check_tensors(&source, &source.config().unwrap()).unwrap_err().to_string();
        for part in [
            "\n  missing: `model.layers.1.mlp.up_proj.weight`, `model.norm.weight`\n",
            "\n  unexpected: `lm_head.weight`, `model.layers.2.mlp.up_proj.weight`\n",
            "of the wrong shape: `model.layers.0.input_layernorm.weight` ([33] instead of [32]), `model.layers.0.post_attention_layernorm",
            "no floating-point",
        ] {
            assert!(message.contains(part), "{part} is not in {message}");
        }
        let (_folder, source) = changed(BTreeMap::clear);
        let message = check_tensors(&source, &source.config().unwrap()).unwrap_err().to_string();
        assert!(message.contains(" and 4 more") && !message.contains("unexpected"), "{message}");
    }

    #[test]
    fn weights_that_are_no_numbers_are_refused() {
        for (value, word) in [(f64::NAN, "NaN"), (f64::NEG_INFINITY, "infinite")] {
            let (_folder, source) = changed(|tensors| {
                let _ = tensors["model.layers.1.mlp.up_proj.weight"].get(3).get(4).fill_(value);
            });
            let folder = tempfile::tempdir().unwrap();
            let config = source.config().unwrap();
            let written = write_safetensors(folder.path(), &source, &config, Kind::BFloat16, LARGEST_FILE, &mut || true);
            let message = written.unwrap_err().to_string();
            assert!(message.contains("`model.layers.1.mlp.up_proj.weight`") && message.contains(word), "{message}");
        }
    }

    #[test]
    fn one_file_and_several_hold_the_same_model() {
        let source = golden("qwen3_untied_sharded");
        let config = source.config().unwrap();
        for (largest, count) in [(LARGEST_FILE, 1), (30_000, 6), (1, config.parameter_shapes().len())] {
            let folder = tempfile::tempdir().unwrap();
            std::fs::copy(source.path().join("config.json"), folder.path().join("config.json")).unwrap();
            write_safetensors(folder.path(), &source, &config, Kind::Float, largest, &mut || true).unwrap();
            let written = open(folder.path()).unwrap();
            check_tensors(&written, &config).unwrap();
            for (name, shape) in config.parameter_shapes() {
                let tensor = |source: &Source| source.tensor(&name, &shape, Kind::Float, Device::Cpu).unwrap();
                assert_eq!(tensor(&written), tensor(&source), "{name}");
            }
            let files: Vec<u64> = std::fs::read_dir(folder.path())
                .unwrap()
                .map(|entry| entry.unwrap())
                .filter(|entry| entry.path().extension().is_some_and(|extension| extension == "safetensors"))
                .map(|entry| entry.metadata().unwrap().len())
                .collect();
            assert_eq!(files.len(), count);
            // A file's header comes on top; so does a tensor that is larger by itself.
            assert!(largest == 1 || files.iter().all(|&size| size < largest + 5_000), "{files:?}");
        }
        let folder = tempfile::tempdir().unwrap();
        let stopped = write_safetensors(folder.path(), &source, &config, Kind::Float, LARGEST_FILE, &mut || false);
        assert!(matches!(stopped, Err(ExportError::Interrupted)));
    }
}
