//! What a checkpoint needs beside its weights so that training goes on as if it had never stopped: `state/` in the checkpoint's folder.
//!
//! Data order and anchors are counters of the step, so the position in the data is the step itself.

use std::fs;
use std::io;
use std::path::Path;

use serde::{Deserialize, Serialize};
use tch::Tensor;

use crate::optimiser::AdamW;
use crate::parameters::Parameters;

/// The folder's name within a checkpoint.
pub const FOLDER: &str = "state";

/// The numbers of a run at a checkpoint.
#[derive(Debug, Clone, Copy, PartialEq, Serialize, Deserialize, Default)]
pub struct Progress {
    /// Steps done.
    pub step: u64,
    /// Clean tokens of all steps done.
    pub training_tokens: u64,
    /// Steps left out because their loss or gradient was not finite.
    pub skipped: u64,
}

/// Why a state cannot be read.
#[derive(Debug, thiserror::Error)]
pub enum StateError {
    #[error(
        "cannot read training state `{path}`: {message}; put it back, or begin again with `drafthorse run RECIPE --restart train`"
    )]
    Read { path: String, message: String },
    #[error("training state `{path}` holds {found} values of `{name}`, the model has {expected}; it belongs to another model")]
    Length { path: String, name: &'static str, found: i64, expected: i64 },
}

/// Writes masters, moments and progress under `checkpoint/state/`.
pub fn save(checkpoint: &Path, parameters: &Parameters, optimiser: &AdamW, progress: &Progress) -> io::Result<()> {
    let folder = checkpoint.join(FOLDER);
    fs::create_dir_all(&folder)?;
    let named: Vec<(String, &Tensor)> =
        tensors(parameters, optimiser).into_iter().map(|(name, tensor)| (name.to_string(), tensor)).collect();
    model::tensor_file::save_safetensors(&folder.join("rank-0.safetensors"), &named).map_err(io::Error::other)?;
    fs::write(folder.join("progress.json"), serde_json::to_string_pretty(progress)?)
}

/// Reads back what [`save`] wrote, into masters and moments.
pub fn load(checkpoint: &Path, parameters: &mut Parameters, optimiser: &AdamW) -> Result<Progress, StateError> {
    let _no_grad = tch::no_grad_guard();
    let folder = checkpoint.join(FOLDER);
    let path = folder.join("rank-0.safetensors");
    let read_error = |path: &Path, message: String| StateError::Read { path: path.display().to_string(), message };
    let stored = model::tensor_file::load_safetensors(&path).map_err(|error| read_error(&path, error.to_string()))?;
    for (name, tensor) in tensors(parameters, optimiser) {
        let found = stored.get(name).ok_or_else(|| read_error(&path, format!("`{name}` is missing")))?;
        if found.numel() != tensor.numel() {
            let (found, expected) = (found.numel() as i64, tensor.numel() as i64);
            return Err(StateError::Length { path: path.display().to_string(), name, found, expected });
        }
        tensor.shallow_clone().copy_(found);
    }
    parameters.refresh();
    let path = folder.join("progress.json");
    let text = fs::read_to_string(&path).map_err(|error| read_error(&path, error.to_string()))?;
    serde_json::from_str(&text).map_err(|error| read_error(&path, error.to_string()))
}

fn tensors<'a>(parameters: &'a Parameters, optimiser: &'a AdamW) -> [(&'static str, &'a Tensor); 3] {
    [("master", &parameters.master), ("exp_avg", &optimiser.exp_avg), ("exp_avg_sq", &optimiser.exp_avg_sq)]
}
