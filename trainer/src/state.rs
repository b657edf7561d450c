//! What a checkpoint needs beside its weights so that training goes on as if it had never stopped: `state/` in the checkpoint's folder,
//! one file a rank. It may go on with another number of ranks: each reads its share from the files of those that wrote.
//!
//! Data order and anchors are counters, so the position in the data is one number.

use std::collections::BTreeMap;
use std::fs::{self, File};
use std::io;
use std::path::{Path, PathBuf};

use model::tensor_file::{StoredTensor, save_safetensors, table};
use serde::{Deserialize, Serialize};
use tch::{Kind, Tensor};

use crate::optimiser::AdamW;
use crate::parameters::{Parameters, Piece};

/// The folder's name within a checkpoint.
pub const FOLDER: &str = "state";

/// The numbers of a run at a checkpoint.
#[derive(Debug, Clone, Copy, PartialEq, Serialize, Deserialize, Default)]
pub struct Progress {
    /// Steps done.
    pub step: u64,
    /// Responses that the steps done have taken, over all epochs.
    pub position: u64,
    /// Clean tokens of all steps done.
    pub training_tokens: u64,
    /// Steps left out because their loss or gradient was not finite, or nothing in them was supervised.
    pub skipped: u64,
    /// Those of them that were not finite.
    pub not_finite: u64,
    /// Ranks whose files hold the state.
    pub ranks: usize,
    /// The step at whose checkpoint replaying the hold-out gave the largest τ, and that τ.
    pub best: Option<(u64, f64)>,
}

/// Why a state cannot be read.
#[derive(Debug, thiserror::Error)]
pub enum StateError {
    #[error(
        "cannot read training state `{}`: {message}; put it back, or begin again with `drafthorse run RECIPE --restart train`", path.display()
    )]
    Read { path: PathBuf, message: String },
    #[error(
        "training state `{}` holds {found} values of `{name}`, the model's share has {expected}; it belongs to another model", path.display()
    )]
    Length { path: PathBuf, name: &'static str, found: i64, expected: i64 },
}

/// Writes this rank's masters and moments under `folder`, a `state/` that rank 0 has made: where it is not seen, the ranks do not share a
/// file system.
pub fn save_share(folder: &Path, parameters: &Parameters<'_>, optimiser: &AdamW) -> io::Result<()> {
    let named = tensors(parameters, optimiser).map(|(name, tensor)| (name.to_string(), tensor));
    save_safetensors(&folder.join(file_name(parameters.group.rank())), &named).map_err(io::Error::other)
}

/// Writes the numbers under `folder`, once the files of all ranks are there.
pub fn save_progress(folder: &Path, progress: &Progress) -> io::Result<()> {
    if let Some(rank) = (0..progress.ranks).find(|&rank| !folder.join(file_name(rank)).exists()) {
        let message = format!("the state of rank {rank} is not there; all ranks need the same file system and current folder");
        return Err(io::Error::other(message));
    }
    let path = folder.join("progress.json");
    fs::write(&path, serde_json::to_string_pretty(progress)?)?;
    File::open(&path)?.sync_all()
}

/// Reads only the numbers of a checkpoint.
pub fn load_progress(checkpoint: &Path) -> Result<Progress, StateError> {
    let path = checkpoint.join(FOLDER).join("progress.json");
    let read_error = |message: String| StateError::Read { path: path.clone(), message };
    let text = fs::read_to_string(&path).map_err(|error| read_error(error.to_string()))?;
    serde_json::from_str(&text).map_err(|error| read_error(error.to_string()))
}

/// Reads this rank's share of what all ranks wrote, into masters and moments.
pub fn load(checkpoint: &Path, parameters: &Parameters<'_>, optimiser: &AdamW) -> Result<Progress, StateError> {
    let _no_grad = tch::no_grad_guard();
    let progress = load_progress(checkpoint)?;
    let mut files: BTreeMap<usize, (PathBuf, BTreeMap<String, StoredTensor>)> = BTreeMap::new();
    let pieces = parameters.pieces_from(progress.ranks);
    let expected = parameters.share_of(progress.ranks);
    for (name, tensor) in tensors(parameters, optimiser) {
        let mut read = Vec::with_capacity(pieces.len());
        for piece in &pieces {
            let (rank, range) = match piece {
                Piece::Padding(count) => {
                    read.push(Tensor::zeros([*count], (Kind::Float, tch::Device::Cpu)));
                    continue;
                }
                Piece::Stored { rank, range } => (*rank, range.clone()),
            };
            let path = checkpoint.join(FOLDER).join(file_name(rank));
            let read_error = |message: String| StateError::Read { path: path.clone(), message };
            if let std::collections::btree_map::Entry::Vacant(entry) = files.entry(rank) {
                entry.insert((path.clone(), table(&path).map_err(|error| read_error(error.to_string()))?));
            }
            let stored = files[&rank].1.get(name).ok_or_else(|| read_error(format!("`{name}` is missing")))?;
            let found = stored.shape.iter().product();
            if found != expected {
                return Err(StateError::Length { path, name, found, expected });
            }
            read.push(stored.read_range(range).map_err(|error| read_error(error.to_string()))?);
        }
        tensor.shallow_clone().copy_(&Tensor::cat(&read, 0));
    }
    Ok(progress)
}

fn file_name(rank: usize) -> String {
    format!("rank-{rank}.safetensors")
}

fn tensors<'a>(parameters: &'a Parameters<'_>, optimiser: &'a AdamW) -> [(&'static str, &'a Tensor); 3] {
    [("master", &parameters.master), ("exp_avg", &optimiser.exp_avg), ("exp_avg_sq", &optimiser.exp_avg_sq)]
}
