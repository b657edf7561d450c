//! The manifest of a stage: what went in, what came out, and whether the stage ran to its end. It is what lets the same
//! command skip a finished stage, go on with one that was cut short, and refuse one whose inputs changed.

use crate::files::write_atomically;
use serde::{Deserialize, Serialize};
use serde_json::{Map, Value};
use std::collections::{BTreeMap, BTreeSet};
use std::fs;
use std::io;
use std::path::{Path, PathBuf};
use thiserror::Error;

/// The name of the manifest in a stage's folder.
pub const FILE_NAME: &str = "manifest.json";

/// What a stage's folder holds and what it was made from.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Manifest {
    pub stage: String,
    /// Whether the stage ran to its end.
    pub complete: bool,
    /// Everything the results depend on, by name: recipe values, hashes of files.
    pub inputs: BTreeMap<String, String>,
    /// What the stage wrote, and the counts it reports.
    pub results: Map<String, Value>,
}

/// How a stage's folder stands towards the inputs of this run.
#[derive(Debug, Clone, PartialEq)]
pub enum Standing {
    /// Nothing was done yet.
    Fresh,
    /// The same stage with the same inputs was cut short.
    Resume(Manifest),
    /// The same stage with the same inputs is done.
    Complete(Manifest),
}

/// Why a manifest cannot be used.
#[derive(Debug, Error)]
pub enum ManifestError {
    #[error("cannot read manifest `{}`: {source}", path.display())]
    Read { path: PathBuf, source: io::Error },
    #[error("cannot write manifest: {0}")]
    Write(io::Error),
    #[error("manifest `{}` is not valid: {reason}; remove its folder to do the stage again", path.display())]
    Invalid { path: PathBuf, reason: String },
    #[error("folder `{}` belongs to stage `{found}`, not to `{stage}`; give the run another name", folder.display())]
    OtherStage { folder: PathBuf, stage: String, found: String },
    #[error("stage `{stage}` in `{}` was made from other inputs:\n{changes}\nuse `drafthorse run RECIPE --restart {stage}` to do it again, or give the run another name", folder.display())]
    Changed { folder: PathBuf, stage: String, changes: String },
}

impl Manifest {
    /// Reads the manifest of a stage's folder; `None` where there is none.
    ///
    /// # Errors
    /// When the file exists but cannot be read or is not a manifest.
    pub fn read(folder: &Path) -> Result<Option<Manifest>, ManifestError> {
        let path = folder.join(FILE_NAME);
        let bytes = match fs::read(&path) {
            Err(source) if source.kind() == io::ErrorKind::NotFound => return Ok(None),
            Err(source) => return Err(ManifestError::Read { path, source }),
            Ok(bytes) => bytes,
        };
        match serde_json::from_slice(&bytes) {
            Ok(manifest) => Ok(Some(manifest)),
            Err(error) => Err(ManifestError::Invalid { path, reason: error.to_string() }),
        }
    }

    /// Writes the manifest into a stage's folder, in one step; to be called after everything it lists is on disk.
    ///
    /// # Errors
    /// When the folder does not exist or cannot be written to.
    pub fn write(&self, folder: &Path) -> Result<(), ManifestError> {
        let mut bytes = serde_json::to_vec_pretty(self).map_err(|error| ManifestError::Write(error.into()))?;
        bytes.push(b'\n');
        write_atomically(&folder.join(FILE_NAME), &bytes).map_err(ManifestError::Write)
    }
}

/// Says whether a stage is to be started, resumed or skipped.
///
/// # Errors
/// [`ManifestError::Changed`] when the folder was made from other inputs: the message lists each with its old and new
/// value. Also when the folder's manifest is another stage's, or cannot be read.
pub fn standing(folder: &Path, stage: &str, inputs: &BTreeMap<String, String>) -> Result<Standing, ManifestError> {
    let Some(manifest) = Manifest::read(folder)? else { return Ok(Standing::Fresh) };
    if manifest.stage != stage {
        return Err(ManifestError::OtherStage { folder: folder.into(), stage: stage.into(), found: manifest.stage });
    }
    if manifest.inputs != *inputs {
        let changes = describe_changes(&manifest.inputs, inputs);
        return Err(ManifestError::Changed { folder: folder.into(), stage: stage.into(), changes });
    }
    Ok(if manifest.complete { Standing::Complete(manifest) } else { Standing::Resume(manifest) })
}

fn describe_changes(old: &BTreeMap<String, String>, new: &BTreeMap<String, String>) -> String {
    let show = |value: Option<&String>| value.map_or("(absent)".to_owned(), |value| format!("`{value}`"));
    let keys: BTreeSet<&String> = old.keys().chain(new.keys()).collect();
    let changed = keys.into_iter().filter(|key| old.get(*key) != new.get(*key));
    let lines: Vec<String> = changed.map(|key| format!("  {key}: {} -> {}", show(old.get(key)), show(new.get(key)))).collect();
    lines.join("\n")
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]
    use super::*;

    fn inputs(pairs: &[(&str, &str)]) -> BTreeMap<String, String> {
        pairs.iter().map(|(key, value)| (key.to_string(), value.to_string())).collect()
    }

    fn manifest(complete: bool) -> Manifest {
        let results = Map::from_iter([("rows".to_owned(), Value::from(3))]);
        Manifest { stage: "train".into(), complete, inputs: inputs(&[("seed", "1"), ("steps", "10")]), results }
    }

    #[test]
    fn same_inputs_resume_or_are_complete_and_nothing_is_fresh() {
        let folder = tempfile::tempdir().unwrap();
        let inputs = manifest(false).inputs;
        assert_eq!(standing(folder.path(), "train", &inputs).unwrap(), Standing::Fresh);
        assert_eq!(standing(&folder.path().join("absent"), "train", &inputs).unwrap(), Standing::Fresh);
        manifest(false).write(folder.path()).unwrap();
        assert_eq!(standing(folder.path(), "train", &inputs).unwrap(), Standing::Resume(manifest(false)));
        manifest(true).write(folder.path()).unwrap();
        assert_eq!(standing(folder.path(), "train", &inputs).unwrap(), Standing::Complete(manifest(true)));
    }

    #[test]
    fn changed_inputs_are_listed_with_the_remedy() {
        let folder = tempfile::tempdir().unwrap();
        manifest(true).write(folder.path()).unwrap();
        let error = standing(folder.path(), "train", &inputs(&[("gamma", "4"), ("seed", "1"), ("steps", "20")])).unwrap_err();
        let message = error.to_string();
        assert!(matches!(error, ManifestError::Changed { .. }));
        assert!(message.contains("  gamma: (absent) -> `4`\n  steps: `10` -> `20`\n"), "{message}");
        assert!(message.contains("`drafthorse run RECIPE --restart train`"), "{message}");
        assert!(!message.contains("seed"), "an unchanged input is listed: {message}");
    }

    #[test]
    fn a_broken_manifest_and_another_stages_are_refused() {
        let folder = tempfile::tempdir().unwrap();
        fs::write(folder.path().join(FILE_NAME), b"{\"stage\": ").unwrap();
        let error = standing(folder.path(), "train", &BTreeMap::new()).unwrap_err();
        assert!(error.to_string().contains("manifest.json"), "{error}");
        manifest(true).write(folder.path()).unwrap();
        let error = standing(folder.path(), "prune", &manifest(true).inputs).unwrap_err();
        assert!(error.to_string().contains("stage `train`, not to `prune`"), "{error}");
    }
}
