//! A drafter's checkpoint folder: the model as Hugging Face lays it out, plus `drafter.json` with what makes it a drafter.
//!
//! A folder appears under its own name only when all of it is on disk. What a killed process leaves behind starts with a dot, is never
//! picked up, and goes at the next [`remove_partial`].

use std::fs::{self, File};
use std::io;
use std::path::{Path, PathBuf};

use data::chat::ChatTemplate;
use data::gguf::GgufFile;
use data::tokenizer::{SpecialTokens, Tokenizer};
use serde::{Deserialize, Serialize};
use tch::{Device, Kind};

use crate::gguf_export;
use crate::tensor_file::{TensorFileError, save_safetensors_as};
use crate::transformer::Transformer;
use crate::weights::{self, WeightsError};

/// The link to the newest checkpoint of a folder of checkpoints.
pub const LATEST: &str = "latest";
/// The link to the checkpoint with the largest τ of a folder of checkpoints.
pub const BEST: &str = "best";
/// `.NAME.partial` is a checkpoint being written.
const PARTIAL: &str = ".partial";
/// `.NAME.replaced` is an old checkpoint that a new one is taking the name of.
const REPLACED: &str = ".replaced";

/// Why a checkpoint cannot be written or read.
#[derive(Debug, thiserror::Error)]
pub enum CheckpointError {
    #[error("cannot {doing} `{}`: {source}", path.display())]
    Io { doing: &'static str, path: PathBuf, source: io::Error },
    #[error("`{}` is no name for a checkpoint folder", .0.display())]
    Name(PathBuf),
    #[error("cannot store weights as {0:?}: use f32, bf16 or f16")]
    Kind(Kind),
    #[error("`{}` is not a drafter's checkpoint: {message}", path.display())]
    DrafterFile { path: PathBuf, message: String },
    #[error("`{}` says {stated} layers, but config.json {found}; the folder mixes two checkpoints", path.display())]
    Layers { path: PathBuf, stated: usize, found: usize },
    #[error(transparent)]
    Weights(#[from] WeightsError),
    #[error(transparent)]
    TensorFile(#[from] TensorFileError),
}

/// `drafter.json`: what a decoder must know about a drafter, and where it came from.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize, Default)]
pub struct DrafterFile {
    /// `d3d`, `dflash` or `ar`.
    pub kind: String,
    /// Rows of one block, the anchor included.
    pub block_size: usize,
    /// `in_place` or `next`.
    pub labels: String,
    /// `block` or `prefix`.
    pub anchor_sees: String,
    pub mask_token: u32,
    /// Layers removed by pruning, in the order of removal, each numbered as in the drafter before any was removed.
    pub removed_layers: Vec<usize>,
    /// The checkpoint that this one was made from, if it was.
    pub parent: Option<String>,
    pub recipe_hash: String,
    /// Whether it was trained on responses with thinking.
    pub thinking: bool,
    /// Supervised and unsupervised tokens seen in training.
    pub training_tokens: u64,
    /// Optimiser steps done.
    pub step: u64,
    /// Layers left.
    pub layers: usize,
}

/// The text files that come with a model, as written to disk.
#[derive(Debug, Clone, Default, PartialEq)]
pub struct TextFiles {
    /// `tokenizer.json`.
    pub tokenizer: String,
    /// `tokenizer_config.json`, with the chat template inside as `chat_template`.
    pub tokenizer_config: String,
    /// `generation_config.json`, where the model has one.
    pub generation_config: Option<String>,
}

impl TextFiles {
    /// From what reads and writes the model's text.
    pub fn new(tokenizer: &Tokenizer, special: &SpecialTokens, template: &ChatTemplate) -> Self {
        Self {
            tokenizer: tokenizer.to_json().to_string(),
            tokenizer_config: special.to_configuration(template.source()),
            generation_config: None,
        }
    }
}

/// Writes a checkpoint under `folder`, its weights as `kind`, replacing an older one of that name.
///
/// # Errors
/// Something cannot be written; what stood under `folder` is then untouched.
pub fn save(
    folder: &Path,
    model: &Transformer,
    drafter: &DrafterFile,
    files: &TextFiles,
    kind: Kind,
) -> Result<(), CheckpointError> {
    begin(folder, model, drafter, files, kind)?;
    publish(folder)
}

/// The folder in which a checkpoint is put together before it gets the name `folder`.
///
/// # Errors
/// `folder` ends in no name.
pub fn partial(folder: &Path) -> Result<PathBuf, CheckpointError> {
    hidden_sibling(folder, PARTIAL)
}

/// Writes all files of a checkpoint into its [`partial`] folder. Whoever wants to add more (such as `state/`) does so before
/// [`publish`].
///
/// # Errors
/// Something cannot be written; what stands under `folder` is untouched.
pub fn begin(
    folder: &Path,
    model: &Transformer,
    drafter: &DrafterFile,
    files: &TextFiles,
    kind: Kind,
) -> Result<(), CheckpointError> {
    let dtype = dtype_name(kind)?;
    let partial = partial(folder)?;
    if partial.exists() {
        fs::remove_dir_all(&partial).map_err(io("remove", &partial))?;
    }
    fs::create_dir_all(&partial).map_err(io("create", &partial))?;
    save_safetensors_as(&partial.join("model.safetensors"), &model.named_parameters(), kind)?;
    let drafter_json = serde_json::to_value(drafter).unwrap_or_default();
    let texts = [
        ("config.json", Some(pretty(&model.config.to_json(dtype)))),
        ("drafter.json", Some(pretty(&drafter_json))),
        ("tokenizer.json", Some(files.tokenizer.clone())),
        ("tokenizer_config.json", Some(files.tokenizer_config.clone())),
        ("generation_config.json", files.generation_config.clone()),
    ];
    for (name, text) in texts {
        let path = partial.join(name);
        if let Some(text) = text {
            fs::write(&path, text).map_err(io("write", &path))?;
        }
    }
    Ok(())
}

/// Gives a finished [`partial`] folder its name.
///
/// # Errors
/// It cannot be synced or renamed; what stood under `folder` is then untouched.
pub fn publish(folder: &Path) -> Result<(), CheckpointError> {
    let partial = partial(folder)?;
    sync_tree(&partial).map_err(io("sync", &partial))?;
    // A folder cannot be renamed over a full one, so an older checkpoint steps aside first; `remove_partial` puts it back should the
    // process die between the two renames.
    let replaced = hidden_sibling(folder, REPLACED)?;
    if folder.exists() {
        if replaced.exists() {
            fs::remove_dir_all(&replaced).map_err(io("remove", &replaced))?;
        }
        fs::rename(folder, &replaced).map_err(io("replace", folder))?;
    }
    let parent = parent_of(folder);
    fs::rename(&partial, folder).map_err(io("rename to", folder))?;
    sync(parent).map_err(io("sync", parent))?;
    if replaced.exists() {
        fs::remove_dir_all(&replaced).map_err(io("remove", &replaced))?;
    }
    Ok(())
}

/// Loads a checkpoint's model onto `device`, its weights as `kind`, and its `drafter.json`.
///
/// # Errors
/// The folder is not a drafter's checkpoint, or a part of it is missing or damaged.
pub fn load(folder: &Path, kind: Kind, device: Device) -> Result<(Transformer, DrafterFile), CheckpointError> {
    let drafter = load_drafter_file(folder)?;
    let model = weights::load(folder, kind, device)?;
    if drafter.layers != model.layers.len() {
        let path = folder.join("drafter.json");
        return Err(CheckpointError::Layers { path, stated: drafter.layers, found: model.layers.len() });
    }
    Ok((model, drafter))
}

/// Reads only a checkpoint's `drafter.json`, or what a drafter's GGUF file has of it.
///
/// # Errors
/// It is missing, or not of this form.
pub fn load_drafter_file(folder: &Path) -> Result<DrafterFile, CheckpointError> {
    if folder.is_file() {
        let file = GgufFile::open(folder).map_err(WeightsError::from)?;
        let wrong = |message| CheckpointError::DrafterFile { path: folder.to_path_buf(), message };
        return gguf_export::drafter_file(&file).map_err(wrong);
    }
    let path = folder.join("drafter.json");
    let wrong = |message: String| CheckpointError::DrafterFile { path: path.clone(), message };
    let text = fs::read_to_string(&path).map_err(|error| wrong(error.to_string()))?;
    serde_json::from_str(&text).map_err(|error| wrong(error.to_string()))
}

/// Makes `parent/link` ([`LATEST`] or [`BEST`]) a link to `parent/name`, in one step as seen by any reader.
///
/// # Errors
/// There is no such checkpoint, or the link cannot be written.
pub fn point(parent: &Path, link: &str, name: &str) -> Result<(), CheckpointError> {
    let temporary = parent.join(format!(".{link}{PARTIAL}"));
    let link = parent.join(link);
    fs::metadata(parent.join(name)).map_err(io("link to", &parent.join(name)))?;
    match fs::remove_file(&temporary) {
        Err(error) if error.kind() != io::ErrorKind::NotFound => return Err(io("remove", &temporary)(error)),
        _ => {}
    }
    std::os::unix::fs::symlink(name, &temporary).map_err(io("write", &temporary))?;
    fs::rename(&temporary, &link).map_err(io("replace", &link))?;
    sync(parent).map_err(io("sync", parent))
}

/// Clears away what killed processes left among the checkpoints of `parent`, and says how many there were. A checkpoint that was being
/// replaced gets its name back when the new one had not yet taken it.
///
/// # Errors
/// Something cannot be read, moved or removed. A folder that does not exist is clean.
pub fn remove_partial(parent: &Path) -> Result<usize, CheckpointError> {
    let entries = match fs::read_dir(parent) {
        Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(0),
        entries => entries.map_err(io("read", parent))?,
    };
    let mut cleared = 0;
    for entry in entries {
        let entry = entry.map_err(io("read", parent))?;
        let (path, name) = (entry.path(), entry.file_name().to_string_lossy().into_owned());
        let Some(hidden) = name.strip_prefix('.') else { continue };
        let replaced = hidden.strip_suffix(REPLACED).map(|name| parent.join(name));
        if let Some(folder) = replaced.as_ref().filter(|folder| !folder.exists()) {
            fs::rename(&path, folder).map_err(io("restore", folder))?;
        } else if replaced.is_some() || hidden.ends_with(PARTIAL) {
            // A link (the one that was to become `latest`) is not followed.
            let is_folder = entry.file_type().map_err(io("read", &path))?.is_dir();
            let removed = if is_folder { fs::remove_dir_all(&path) } else { fs::remove_file(&path) };
            removed.map_err(io("remove", &path))?;
        } else {
            continue;
        }
        cleared += 1;
    }
    Ok(cleared)
}

/// Turns an error of the file system into one that says what was being done to what.
fn io(doing: &'static str, path: &Path) -> impl FnOnce(io::Error) -> CheckpointError + use<> {
    let path = path.to_path_buf();
    move |source| CheckpointError::Io { doing, path, source }
}

fn dtype_name(kind: Kind) -> Result<&'static str, CheckpointError> {
    match kind {
        Kind::Float => Ok("float32"),
        Kind::BFloat16 => Ok("bfloat16"),
        Kind::Half => Ok("float16"),
        other => Err(CheckpointError::Kind(other)),
    }
}

fn pretty(json: &serde_json::Value) -> String {
    format!("{json:#}\n")
}

/// `parent/NAME` → `parent/.NAMEsuffix`.
fn hidden_sibling(folder: &Path, suffix: &str) -> Result<PathBuf, CheckpointError> {
    let name = folder.file_name().ok_or_else(|| CheckpointError::Name(folder.to_path_buf()))?;
    Ok(folder.with_file_name(format!(".{}{suffix}", name.to_string_lossy())))
}

fn parent_of(folder: &Path) -> &Path {
    folder.parent().filter(|parent| !parent.as_os_str().is_empty()).unwrap_or(Path::new("."))
}

fn sync(path: &Path) -> io::Result<()> {
    File::open(path)?.sync_all()
}

/// Syncs everything under `folder`, and the folder itself last.
fn sync_tree(folder: &Path) -> io::Result<()> {
    for entry in fs::read_dir(folder)? {
        let path = entry?.path();
        if path.is_dir() { sync_tree(&path)? } else { sync(&path)? }
    }
    sync(folder)
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]
    use super::*;

    fn model() -> Transformer {
        let folder = Path::new(env!("CARGO_MANIFEST_DIR")).join("../tests/golden/logits/qwen3_tied");
        weights::load(&folder, Kind::Float, Device::Cpu).unwrap()
    }

    fn drafter(step: u64) -> DrafterFile {
        DrafterFile {
            kind: "d3d".to_string(),
            block_size: 8,
            labels: "next".to_string(),
            anchor_sees: "block".to_string(),
            mask_token: 3,
            removed_layers: vec![5, 2],
            parent: None,
            recipe_hash: "abc".to_string(),
            thinking: false,
            training_tokens: 1 << 40,
            step,
            layers: 2,
        }
    }

    fn save_step(folder: &Path, step: u64) -> Result<(), CheckpointError> {
        save(folder, &model(), &drafter(step), &TextFiles::default(), Kind::Float)
    }

    fn names(folder: &Path) -> Vec<String> {
        let mut names: Vec<String> =
            fs::read_dir(folder).unwrap().map(|entry| entry.unwrap().file_name().into_string().unwrap()).collect();
        names.sort();
        names
    }

    #[test]
    fn what_is_saved_is_loaded() {
        let parent = tempfile::tempdir().unwrap();
        let folder = parent.path().join("train/step-000001");
        begin(&folder, &model(), &drafter(1), &TextFiles::default(), Kind::Float).unwrap();
        let state = partial(&folder).unwrap().join("state");
        fs::create_dir(&state).unwrap();
        fs::write(state.join("rank-0"), "here").unwrap();
        assert!(!folder.exists());
        publish(&folder).unwrap();
        let (loaded, file) = load(&folder, Kind::Float, Device::Cpu).unwrap();
        assert_eq!((file, &loaded.config), (drafter(1), &model().config));
        for ((name, saved), (_, loaded)) in model().named_parameters().into_iter().zip(loaded.named_parameters()) {
            assert_eq!(saved, loaded, "{name}");
        }
        assert_eq!(fs::read_to_string(folder.join("state/rank-0")).unwrap(), "here");
        assert!(!weights::open(&folder).unwrap().names().contains(&"lm_head.weight".to_string()));
        assert_eq!(names(folder.parent().unwrap()), ["step-000001"]);
    }

    #[test]
    fn a_newer_checkpoint_takes_an_older_ones_place() {
        let parent = tempfile::tempdir().unwrap();
        let folder = parent.path().join("layers-2");
        save_step(&folder, 1).unwrap();
        save_step(&folder, 2).unwrap();
        assert_eq!(load_drafter_file(&folder).unwrap().step, 2);
        assert_eq!(names(parent.path()), ["layers-2"]);
    }

    #[test]
    fn an_unfinished_save_leaves_the_older_one_alone() {
        let parent = tempfile::tempdir().unwrap();
        let folder = parent.path().join("layers-2");
        save_step(&folder, 1).unwrap();
        // Begun and never published, as when the disk fills up on the way.
        begin(&folder, &model(), &drafter(2), &TextFiles::default(), Kind::Float).unwrap();
        assert_eq!(load_drafter_file(&folder).unwrap().step, 1);
        assert_eq!(remove_partial(parent.path()).unwrap(), 1);
        assert_eq!(names(parent.path()), ["layers-2"]);
    }

    #[test]
    fn a_checkpoint_that_stepped_aside_comes_back() {
        let parent = tempfile::tempdir().unwrap();
        let folder = parent.path().join("layers-2");
        save_step(&folder, 1).unwrap();
        fs::rename(&folder, parent.path().join(".layers-2.replaced")).unwrap();
        fs::create_dir(parent.path().join(".layers-2.partial")).unwrap();
        assert_eq!(remove_partial(parent.path()).unwrap(), 2);
        assert_eq!(load_drafter_file(&folder).unwrap().step, 1);
        assert_eq!(names(parent.path()), ["layers-2"]);
        assert_eq!(remove_partial(&parent.path().join("absent")).unwrap(), 0);
    }

    #[test]
    fn latest_moves() {
        let parent = tempfile::tempdir().unwrap();
        for step in [1, 2] {
            save_step(&parent.path().join(format!("step-{step}")), step).unwrap();
            std::os::unix::fs::symlink("nowhere", parent.path().join(".latest.partial")).unwrap();
            point(parent.path(), LATEST, &format!("step-{step}")).unwrap();
            assert_eq!(load_drafter_file(&parent.path().join(LATEST)).unwrap().step, step);
        }
        assert!(point(parent.path(), LATEST, "step-3").is_err());
        assert_eq!(names(parent.path()), ["latest", "step-1", "step-2"]);
    }

    #[test]
    fn mixed_and_foreign_folders_are_refused() {
        let parent = tempfile::tempdir().unwrap();
        let folder = parent.path().join("layers-2");
        assert!(matches!(load(&folder, Kind::Float, Device::Cpu), Err(CheckpointError::DrafterFile { .. })));
        let wrong = DrafterFile { layers: 3, ..drafter(1) };
        save(&folder, &model(), &wrong, &TextFiles::default(), Kind::Float).unwrap();
        assert!(matches!(load(&folder, Kind::Float, Device::Cpu), Err(CheckpointError::Layers { stated: 3, found: 2, .. })));
        assert!(matches!(save(&folder, &model(), &wrong, &TextFiles::default(), Kind::Int64), Err(CheckpointError::Kind(_))));
    }
}
