//! Files that are whole or absent: what a run writes gets a temporary name first and its own name last, so that a
//! process killed at any moment leaves nothing half-written under a name that somebody reads.

use sha2::{Digest, Sha256};
use std::fs::{self, File};
use std::io::{self, Write};
use std::path::Path;
use std::sync::atomic::{AtomicU64, Ordering};

const TEMPORARY_SUFFIX: &str = ".temporary";

/// Writes `bytes` under `path`, replacing what was there, in one step as seen by any reader.
///
/// The bytes go to a temporary name in the same folder, are synced to disk, and are then renamed; the folder is synced
/// last. On failure the temporary file is removed and what stood under `path` is untouched.
///
/// # Errors
/// The message names the path; the kind is that of the failed operation.
pub fn write_atomically(path: &Path, bytes: &[u8]) -> io::Result<()> {
    write_atomically_with(path, |file| file.write_all(bytes))
}

/// The same for what is too large to be held in memory: `write` is given the temporary file.
///
/// # Errors
/// As [`write_atomically`].
pub fn write_atomically_with(path: &Path, write: impl FnOnce(&mut File) -> io::Result<()>) -> io::Result<()> {
    let temporary = path.with_file_name(temporary_name(path)?);
    let written = write_and_rename(path, &temporary, write);
    if written.is_err() {
        // The first error is the one to report; a temporary that cannot be removed is found by `remove_temporaries`.
        let _ = fs::remove_file(&temporary);
    }
    written.map_err(|error| name_path(path, &error))
}

fn write_and_rename(path: &Path, temporary: &Path, write: impl FnOnce(&mut File) -> io::Result<()>) -> io::Result<()> {
    let mut file = File::create(temporary)?;
    write(&mut file)?;
    file.sync_all()?;
    fs::rename(temporary, path)?;
    sync_folder_of(path)
}

/// A rename is on disk only once the folder that lists the name is.
fn sync_folder_of(path: &Path) -> io::Result<()> {
    match path.parent() {
        Some(folder) if !folder.as_os_str().is_empty() => File::open(folder)?.sync_all(),
        _ => File::open(".")?.sync_all(),
    }
}

/// The process and a count keep the writers of one folder apart, whatever names they write to.
fn temporary_name(path: &Path) -> io::Result<String> {
    static COUNT: AtomicU64 = AtomicU64::new(0);
    let name = path.file_name().ok_or_else(|| {
        let reason = format!("`{}` does not end in a file name", path.display());
        io::Error::new(io::ErrorKind::InvalidInput, reason)
    })?;
    let count = COUNT.fetch_add(1, Ordering::Relaxed);
    Ok(format!(".{}.{}-{count}{TEMPORARY_SUFFIX}", name.to_string_lossy(), std::process::id()))
}

/// Whether a file or folder of this name is one that [`write_atomically`] had not finished.
pub fn is_temporary(name: &str) -> bool {
    name.starts_with('.') && name.ends_with(TEMPORARY_SUFFIX)
}

/// Removes the temporary files and folders that a killed process left in `folder`, and says how many there were.
///
/// A folder that does not exist holds none. To be called only while nobody else writes to the folder.
///
/// # Errors
/// The message names the path that could not be read or removed.
pub fn remove_temporaries(folder: &Path) -> io::Result<usize> {
    let entries = match fs::read_dir(folder) {
        Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(0),
        entries => entries.map_err(|error| name_path(folder, &error))?,
    };
    let mut removed = 0;
    for entry in entries {
        let entry = entry.map_err(|error| name_path(folder, &error))?;
        if !is_temporary(&entry.file_name().to_string_lossy()) {
            continue;
        }
        let path = entry.path();
        let removal = if path.is_dir() { fs::remove_dir_all(&path) } else { fs::remove_file(&path) };
        removal.map_err(|error| name_path(&path, &error))?;
        removed += 1;
    }
    Ok(removed)
}

/// The SHA-256 of `bytes` as 64 lower-case hexadecimal digits.
pub fn sha256_hex(bytes: impl AsRef<[u8]>) -> String {
    format!("{:x}", Sha256::digest(bytes))
}

/// The SHA-256 of a file's bytes, in the same form; the file need not fit in memory.
///
/// # Errors
/// When the file cannot be read; the message names it.
pub fn sha256_of_file(path: &Path) -> io::Result<String> {
    let mut hash = Sha256::new();
    let copied = File::open(path).and_then(|mut file| io::copy(&mut file, &mut hash));
    copied.map_err(|error| name_path(path, &error))?;
    Ok(format!("{:x}", hash.finalize()))
}

/// Puts the path into the message of an error of the standard library, which leaves it out.
pub(crate) fn name_path(path: &Path, error: &io::Error) -> io::Error {
    io::Error::new(error.kind(), format!("`{}`: {error}", path.display()))
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]
    use super::*;

    fn names(folder: &Path) -> Vec<String> {
        let mut names: Vec<_> = fs::read_dir(folder).unwrap().map(|e| e.unwrap().file_name().into_string().unwrap()).collect();
        names.sort();
        names
    }

    #[test]
    fn a_file_is_replaced_and_no_temporary_stays() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("manifest.json");
        write_atomically(&path, b"first").unwrap();
        write_atomically(&path, b"second").unwrap();
        assert_eq!(fs::read(&path).unwrap(), b"second");
        assert_eq!(names(folder.path()), ["manifest.json"]);
    }

    #[test]
    fn a_failed_write_names_the_path_and_leaves_no_temporary() {
        let folder = tempfile::tempdir().unwrap();
        // A rename over a folder that is not empty fails after the temporary was written.
        let path = folder.path().join("taken");
        fs::create_dir_all(path.join("inside")).unwrap();
        let error = write_atomically(&path, b"bytes").unwrap_err();
        assert!(error.to_string().contains("taken"), "{error}");
        assert_eq!(names(folder.path()), ["taken"]);
        let absent = write_atomically(&folder.path().join("absent/file"), b"").unwrap_err();
        assert_eq!(absent.kind(), io::ErrorKind::NotFound);
    }

    #[test]
    fn temporaries_are_recognised_and_removed_and_nothing_else_is() {
        let folder = tempfile::tempdir().unwrap();
        let left = temporary_name(Path::new("part-00000.parquet")).unwrap();
        assert!(is_temporary(&left));
        assert!(!is_temporary("part-00000.parquet") && !is_temporary(".hidden") && !is_temporary("x.temporary"));
        fs::write(folder.path().join(&left), b"half").unwrap();
        fs::create_dir_all(folder.path().join(".step-5.1-0.temporary/state")).unwrap();
        fs::write(folder.path().join("kept"), b"whole").unwrap();
        assert_eq!(remove_temporaries(folder.path()).unwrap(), 2);
        assert_eq!(names(folder.path()), ["kept"]);
        assert_eq!(remove_temporaries(&folder.path().join("absent")).unwrap(), 0);
    }

    #[test]
    fn sha256_of_a_known_text() {
        assert_eq!(sha256_hex("abc"), "ba7816bf8f01cfea414140de5dae2223b00361a396177a9cb410ff61f20015ad");
    }
}
