//! Paths as typed -> absolute paths that exist.
//!
//! A relative path starts from the folder of the file that names it, so that a recipe means the same wherever it is run from.

use std::io;
use std::path::{Component, Path, PathBuf};

use crate::RecipeError;
use crate::source::Place;
use crate::typed::Written;

/// The absolute folder, free of links, that holds `file`; of a bare file name, the current folder.
pub(crate) fn folder_of(file: &Path) -> io::Result<PathBuf> {
    match file.parent() {
        Some(folder) if !folder.as_os_str().is_empty() => folder.canonicalize(),
        _ => Path::new(".").canonicalize(),
    }
}

/// `path` from `folder` on. Leading `.` and `..` are folded, which is exact since `folder` is free of links; links in the
/// rest stay as they are, because their own names matter (a `.gguf` may be a link to a file named by its hash).
fn join(folder: &Path, path: &str) -> PathBuf {
    let mut joined = folder.to_path_buf();
    let mut parts = Path::new(path).components().peekable();
    while let Some(part) = parts.next_if(|part| matches!(part, Component::CurDir | Component::ParentDir)) {
        if part == Component::ParentDir {
            joined.pop();
        }
    }
    joined.extend(parts);
    joined
}

/// A model reference: the absolute path of a local folder or file, or the hub id as typed.
///
/// It is local when it starts with `.` or `/`, ends in `.gguf`, or is a folder seen from the recipe.
pub(crate) fn model(key: &'static str, written: &Written<String>) -> Result<String, RecipeError> {
    let path = join(&written.place.source.folder, &written.value);
    let is_local = written.value.starts_with(['.', '/']) || written.value.ends_with(".gguf");
    if !is_local && !path.is_dir() {
        return Ok(written.value.clone());
    }
    if !path.exists() {
        return Err(no_file(key, "file or folder", path, &written.place));
    }
    text(key, path, &written.place)?.into_os_string().into_string().map_err(|_| not_text(key, &written.place))
}

/// One file that exists.
pub(crate) fn file(key: &'static str, written: &Written<String>) -> Result<PathBuf, RecipeError> {
    let path = join(&written.place.source.folder, &written.value);
    if written.value.contains("://") {
        let fault = format!("cannot fetch `{}` yet; download it and give the path of the file", written.value);
        return Err(RecipeError::BadValue { at: written.place.clone(), key: key.to_string(), fault });
    }
    if !path.is_file() {
        return Err(no_file(key, "file", path, &written.place));
    }
    text(key, path, &written.place)
}

/// A folder that exists.
pub(crate) fn folder(key: &'static str, written: &Written<String>) -> Result<PathBuf, RecipeError> {
    let path = join(&written.place.source.folder, &written.value);
    if !path.is_dir() {
        return Err(no_file(key, "folder", path, &written.place));
    }
    text(key, path, &written.place)
}

/// One file, or the files that match a glob, sorted; `*` in the file name stands for any characters, and for a leading
/// dot only where the glob has one too.
pub(crate) fn files(key: &'static str, written: &Written<String>) -> Result<Vec<PathBuf>, RecipeError> {
    let path = join(&written.place.source.folder, &written.value);
    let (Some(folder), Some(pattern)) = (path.parent(), path.file_name().and_then(|name| name.to_str())) else {
        return Ok(vec![file(key, written)?]);
    };
    if written.value.contains("://") || !pattern.contains('*') {
        return Ok(vec![file(key, written)?]);
    }
    let mut found = Vec::new();
    for entry in folder.read_dir().into_iter().flatten().flatten() {
        let name = entry.file_name();
        let matches = name.to_str().is_some_and(|name| matches_glob(pattern, name));
        if matches && entry.path().is_file() {
            found.push(text(key, entry.path(), &written.place)?);
        }
    }
    if found.is_empty() {
        return Err(no_file(key, "file matches", path, &written.place));
    }
    found.sort();
    Ok(found)
}

fn matches_glob(pattern: &str, name: &str) -> bool {
    if name.starts_with('.') && !pattern.starts_with('.') {
        return false;
    }
    let (Some((first, rest)), false) = (pattern.split_once('*'), pattern == name) else { return pattern == name };
    let Some(mut name) = name.strip_prefix(first) else { return false };
    let mut pieces: Vec<&str> = rest.split('*').collect();
    let last = pieces.pop().unwrap_or_default();
    for piece in pieces {
        let Some(start) = name.find(piece) else { return false };
        name = &name[start + piece.len()..];
    }
    name.ends_with(last)
}

/// `path`, once it is sure that it can be written into a resolved recipe.
fn text(key: &'static str, path: PathBuf, place: &Place) -> Result<PathBuf, RecipeError> {
    if path.to_str().is_none() { Err(not_text(key, place)) } else { Ok(path) }
}

fn not_text(key: &'static str, place: &Place) -> RecipeError {
    let fault = String::from("leads to a path that is not valid UTF-8; rename the folder or file");
    RecipeError::BadValue { at: place.clone(), key: key.to_string(), fault }
}

fn no_file(key: &'static str, what: &'static str, path: PathBuf, place: &Place) -> RecipeError {
    RecipeError::NoFile { at: place.clone(), key: key.to_string(), what, path }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn join_folds_leading_parents_only() {
        let folder = Path::new("/home/me/recipes");
        for (path, joined) in [
            ("a.jsonl", "/home/me/recipes/a.jsonl"),
            ("./a.jsonl", "/home/me/recipes/a.jsonl"),
            ("../.models/a.gguf", "/home/me/.models/a.gguf"),
            ("../../../../a", "/a"),
            ("link/../a", "/home/me/recipes/link/../a"),
            ("/data/../a", "/data/../a"),
        ] {
            assert_eq!(join(folder, path).to_str(), Some(joined), "{path}");
        }
    }

    #[test]
    fn globs_match_whole_names() {
        for (pattern, name, matches) in [
            ("*.jsonl", "a.jsonl", true),
            ("*.jsonl", "a.json", false),
            ("*.jsonl", "a.jsonl.gz", false),
            ("*", ".hidden", false),
            (".*", ".hidden", true),
            ("a*b*c", "abc", true),
            ("a*b*c", "a-b-b-c", true),
            ("a*b*c", "acb", false),
            ("a*a", "a", false),
            ("part-*", "part-", true),
        ] {
            assert_eq!(matches_glob(pattern, name), matches, "{pattern} {name}");
        }
    }
}
