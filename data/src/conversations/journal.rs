//! The files of a chunk under way: pieces of its journal, and what the engine refused of it.

use std::fs;
use std::io;
use std::path::{Path, PathBuf};

use super::{ConversationError, UNDER_WAY};
use crate::files::name_path;
use crate::prompts::Rejected;
use crate::responses::{ResponseError, part_name};

/// Whether a chunk's part is there.
pub fn is_through(folder: &Path, chunk: usize) -> bool {
    folder.join(part_name(chunk)).exists()
}

/// The conversations of a chunk that the engine refused.
///
/// # Errors
/// When the file is there and cannot be read.
pub fn refused(folder: &Path, chunk: usize) -> Result<Vec<Rejected>, ConversationError> {
    let path = refused_path(folder, chunk);
    let text = match fs::read_to_string(&path) {
        Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(Vec::new()),
        text => text.map_err(|error| ResponseError::Read(name_path(&path, &error)))?,
    };
    let row = |line: &str| {
        serde_json::from_str(line).map_err(|error| ResponseError::Invalid { path: path.clone(), reason: error.to_string() })
    };
    Ok(text.lines().map(row).collect::<Result<_, _>>()?)
}

/// When so many were refused that the stage ends, the fault is hardly the rows': chunks with refused rows are put back under way, so that the
/// next start asks for those rows again and for nothing else.
pub(super) fn ask_refused_again(folder: &Path) -> Result<(), ConversationError> {
    let write = |path: &Path, error: io::Error| ConversationError::Write(name_path(path, &error));
    let entries = fs::read_dir(folder).map_err(|error| ResponseError::Read(name_path(folder, &error)))?;
    for path in entries.flatten().map(|entry| entry.path()) {
        let name = path.file_stem().and_then(|name| name.to_str()).and_then(|name| name.strip_prefix("part-"));
        let Some(chunk) = name.and_then(|number| number.parse().ok()) else { continue };
        let refused = refused_path(folder, chunk);
        if refused.exists() {
            fs::rename(&path, journal_path(folder, chunk, 0)).map_err(|error| write(&path, error))?;
            fs::remove_file(&refused).map_err(|error| write(&refused, error))?;
        }
    }
    Ok(())
}

pub(super) fn refused_path(folder: &Path, chunk: usize) -> PathBuf {
    folder.join(UNDER_WAY).join(format!("rejected-{chunk:05}.jsonl"))
}

pub(super) fn journal_path(folder: &Path, chunk: usize, piece: usize) -> PathBuf {
    folder.join(UNDER_WAY).join(format!("chunk-{chunk:05}-{piece:05}.parquet"))
}

/// The pieces of a chunk's journal, in order. None is missing between two others, for they are written one after the other.
pub(super) fn journal(folder: &Path, chunk: usize) -> Result<Vec<PathBuf>, ConversationError> {
    Ok((0..).map(|piece| journal_path(folder, chunk, piece)).take_while(|path| path.exists()).collect())
}

/// From the last piece on, so that a kill in between leaves a journal without gaps.
pub(super) fn remove_journal(folder: &Path, chunk: usize) -> Result<(), ConversationError> {
    for path in journal(folder, chunk)?.into_iter().rev() {
        fs::remove_file(&path).map_err(|error| ConversationError::Write(name_path(&path, &error)))?;
    }
    Ok(())
}
