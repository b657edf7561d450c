//! Prompt files as rows in the dialects that people have, a batch at a time, each row either good or rejected with its file, line and
//! reason.

mod reader;
pub(crate) mod row;

use self::reader::{Raw, Reader};
use crate::files::{name_path, sha256_hex};
use rayon::prelude::*;
use serde::{Deserialize, Serialize};
use serde_json::Value;
use sha2::{Digest, Sha256};
use std::collections::HashMap;
use std::collections::hash_map::Entry;
use std::io;
use std::path::{Path, PathBuf};
use thiserror::Error;

/// One message of a chat; `role` is `system`, `user`, `assistant` or `tool`.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Message {
    pub role: String,
    pub content: String,
    /// The calls that an assistant's message makes, as its row has them: a list, of whose form chat templates are the judge.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub tool_calls: Option<Value>,
}

impl Message {
    /// A message without calls.
    pub fn new(role: impl Into<String>, content: impl Into<String>) -> Self {
        Self { role: role.into(), content: content.into(), tool_calls: None }
    }
}

/// What the target is asked: a chat that ends with a user message, or with what a tool gave back.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Request {
    /// Unique among the requests read together, and the same on every reading.
    pub id: String,
    pub messages: Vec<Message>,
    /// The tools that the target may call, as its chat template is given them: a list that is not empty.
    pub tools: Option<Value>,
    /// The row's own `source`, else the name of its file.
    pub source: String,
    /// Where the row stands, as in [`Rejected`], for one that is rejected later.
    pub file: String,
    pub line: usize,
}

/// A row that was not used, and why.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Rejected {
    pub file: String,
    /// Where the row begins, counted from 1, blank lines included; of Parquet the number of the row.
    pub line: usize,
    pub reason: String,
    /// The line as it stood; bytes that are not UTF-8 are replaced.
    pub text: String,
}

/// Why prompt files cannot be used at all.
#[derive(Debug, Error)]
pub enum PromptError {
    #[error("no prompt files are given; set `data.prompts` to a file of JSON Lines, a JSON array or Parquet, or to several")]
    NoFiles,
    #[error("cannot read prompts: {0}")]
    Read(io::Error),
    #[error("prompt file `{}` has no rows; it needs JSON objects, one a line, in one array or as Parquet, such as `{{\"prompt\": \"...\"}}`", path.display())]
    NoRows { path: PathBuf },
    #[error("none of the {rows} rows of prompt file `{}` can be used; line {line}: {reason}", path.display())]
    AllRejected { path: PathBuf, rows: usize, line: usize, reason: String },
}

/// The request of a row at a place.
pub(crate) fn request(path: &Path, line: usize, id: String, row: row::Row) -> Request {
    Request {
        id,
        messages: row.messages,
        tools: row.tools,
        source: row.source.unwrap_or_else(|| file_name(path)),
        file: path.display().to_string(),
        line,
    }
}

/// The source of rows that name none.
pub(crate) fn file_name(path: &Path) -> String {
    path.file_name().map_or_else(String::new, |name| name.to_string_lossy().into_owned())
}

/// A row of a file, and what was made of it.
pub(crate) struct Parsed<T> {
    pub(crate) line: usize,
    /// As it stood.
    text: Vec<u8>,
    pub(crate) row: Result<T, String>,
    /// How much of the file, in bytes, had been read by then.
    pub(crate) bytes_read: u64,
}

/// Rows that are parsed together, on all cores, and how many bytes they may have before that.
const ROWS_AT_ONCE: usize = 1024;
const BYTES_AT_ONCE: usize = 8 << 20;

/// Reads a file batch by batch, one batch ahead; the error of `parse` is the reason for which a row is rejected.
///
/// # Errors
/// When the file cannot be read, and what `each` gives back.
pub(crate) fn stream<T: Send, E: From<PromptError>>(
    path: &Path,
    parse: impl Fn(&[u8]) -> Result<T, String> + Sync,
    mut each: impl FnMut(Vec<Parsed<T>>) -> Result<(), E>,
) -> Result<(), E> {
    let read_error = |error: io::Error| PromptError::Read(name_path(path, &error));
    std::thread::scope(|scope| {
        let (sender, batches) = std::sync::mpsc::sync_channel(1);
        scope.spawn(move || {
            let mut reader = match Reader::open(path) {
                Ok(reader) => reader,
                Err(error) => return drop(sender.send(Err(error))),
            };
            loop {
                let batch = next_batch(&mut reader);
                let ended = !batch.as_ref().is_ok_and(|(raws, _)| !raws.is_empty());
                // Nobody listens any more when `each` has failed.
                if sender.send(batch).is_err() || ended {
                    return;
                }
            }
        });
        // The iterator is moved in here, so that an early return hangs up before the scope waits for the reader.
        for batch in batches {
            let (raws, bytes_read) = batch.map_err(read_error)?;
            if raws.is_empty() {
                break;
            }
            let parsed = raws.into_par_iter().map(|Raw { line, text, fault }| {
                let row = fault.map_or_else(|| parse(&text), Err);
                Parsed { line, text, row, bytes_read }
            });
            each(parsed.collect())?;
        }
        Ok(())
    })
}

/// The next rows, none at the end, and how far the file has been read.
fn next_batch(reader: &mut Reader) -> io::Result<(Vec<Raw>, u64)> {
    let (mut raws, mut bytes) = (Vec::with_capacity(ROWS_AT_ONCE), 0);
    while raws.len() < ROWS_AT_ONCE
        && bytes < BYTES_AT_ONCE
        && let Some(raw) = reader.next()?
    {
        bytes += raw.text.len();
        raws.push(raw);
    }
    Ok((raws, reader.bytes_read()))
}

impl<T> Parsed<T> {
    /// The row's place, and what was made of it.
    pub(crate) fn split(self) -> (Parsed<()>, Result<T, String>) {
        let Parsed { line, text, row, bytes_read } = self;
        (Parsed { line, text, row: Ok(()), bytes_read }, row)
    }

    /// This row as a rejected one of a file.
    pub(crate) fn rejected(&self, path: &Path, reason: String) -> Rejected {
        let text = String::from_utf8_lossy(&self.text).into_owned();
        Rejected { file: path.display().to_string(), line: self.line, reason, text }
    }
}

/// The rows of a file: what could be used, with its line, and what could not.
pub(crate) struct Rows<T> {
    pub(crate) used: Vec<(usize, T)>,
    pub(crate) rejected: Vec<Rejected>,
}

/// Reads all rows of a file that is small enough for that.
///
/// # Errors
/// When the file cannot be read, has no rows, or has no row that can be used.
pub(crate) fn read_rows<T: Send>(path: &Path, parse: impl Fn(&[u8]) -> Result<T, String> + Sync) -> Result<Rows<T>, PromptError> {
    let mut rows = Rows { used: Vec::new(), rejected: Vec::new() };
    stream(path, parse, |batch| {
        for (parsed, row) in batch.into_iter().map(Parsed::split) {
            match row {
                Ok(row) => rows.used.push((parsed.line, row)),
                Err(reason) => rows.rejected.push(parsed.rejected(path, reason)),
            }
        }
        Ok::<(), PromptError>(())
    })?;
    check_usable(path, rows.used.len() + rows.rejected.len(), rows.rejected.len(), rows.rejected.first())?;
    Ok(rows)
}

/// Refuses a file without rows, and one whose rows are all rejected.
pub(crate) fn check_usable(path: &Path, read: usize, rejected: usize, first: Option<&Rejected>) -> Result<(), PromptError> {
    match first {
        _ if read == 0 => Err(PromptError::NoRows { path: path.into() }),
        Some(first) if rejected == read => {
            Err(PromptError::AllRejected { path: path.into(), rows: read, line: first.line, reason: first.reason.clone() })
        }
        _ => Ok(()),
    }
}

/// Roles and contents, each with its length before it, so that no two chats join to the same bytes; and calls and tools where there are any.
pub(crate) fn content_hash<'m>(messages: impl IntoIterator<Item = &'m Message>, tools: Option<&Value>) -> String {
    let mut bytes = Vec::new();
    let mut add = |text: &str| {
        bytes.extend_from_slice(&(text.len() as u64).to_le_bytes());
        bytes.extend_from_slice(text.as_bytes());
    };
    for message in messages {
        add(&message.role);
        add(&message.content);
        message.tool_calls.iter().for_each(|calls| add(&calls.to_string()));
    }
    tools.into_iter().for_each(|tools| add(&tools.to_string()));
    sha256_hex(bytes)[..16].to_owned()
}

/// Gives every id to one request alone, in the order of reading, and remembers no more of it than a hash: a million ids are a few tens of
/// megabytes.
#[derive(Debug, Default)]
pub(crate) struct UniqueIds {
    /// Hashes of the ids that are taken -> the source that took each.
    taken: HashMap<u128, u32>,
    /// How often an id came back, of those that did.
    occurrences: HashMap<u128, usize>,
    pub(crate) duplicates: usize,
}

impl UniqueIds {
    /// The id itself where it is free. The same id from another source becomes `id@source`; what comes again from the same source gets
    /// `#2`, `#3` and so on behind it.
    pub(crate) fn make(&mut self, id: String, source: &str) -> String {
        let source_hash = hash(source) as u32;
        let Some(&owner) = self.taken.get(&hash(&id)) else {
            self.taken.insert(hash(&id), source_hash);
            return id;
        };
        self.duplicates += 1;
        let base = if owner == source_hash { id } else { format!("{id}@{source}") };
        if owner != source_hash && !self.taken.contains_key(&hash(&base)) {
            self.taken.insert(hash(&base), source_hash);
            return base;
        }
        // A row may have been given the id `a#2` by its author; then the second `a` becomes `a#3`.
        let occurrence = self.occurrences.entry(hash(&base)).or_insert(1);
        loop {
            *occurrence += 1;
            let candidate = format!("{base}#{occurrence}");
            if let Entry::Vacant(free) = self.taken.entry(hash(&candidate)) {
                free.insert(source_hash);
                return candidate;
            }
        }
    }
}

fn hash(text: &str) -> u128 {
    let mut first = [0; 16];
    first.copy_from_slice(&Sha256::digest(text)[..16]);
    u128::from_le_bytes(first)
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]
    use super::*;
    use std::collections::HashSet;

    #[test]
    fn ids_are_made_unique_by_source_and_occurrence() {
        let rows =
            [("a", "x"), ("a", "x"), ("a#3", "x"), ("a", "x"), ("a", "y"), ("a", "y"), ("b", "y"), ("a@y", "x"), ("a", "x")];
        let mut ids = UniqueIds::default();
        let made: Vec<String> = rows.map(|(id, source)| ids.make(id.to_owned(), source)).to_vec();
        assert_eq!(made, ["a", "a#2", "a#3", "a#4", "a@y", "a@y#2", "b", "a@y@x", "a#5"]);
        assert_eq!(ids.duplicates, 6);
        let mut ids = UniqueIds::default();
        let many: HashSet<String> = (0..50_000).map(|_| ids.make("same".to_owned(), "x")).collect();
        assert_eq!((many.len(), ids.duplicates), (50_000, 49_999));
    }

    #[test]
    fn a_batch_ends_by_rows_or_bytes_and_an_early_end_hangs_nothing() {
        let file = tempfile::NamedTempFile::new().unwrap();
        let long = format!("{{\"prompt\": \"{}\"}}\n", "x".repeat(5 << 20));
        std::fs::write(file.path(), long.repeat(3) + &"{\"prompt\": \"y\"}\n".repeat(3000)).unwrap();
        let mut sizes = Vec::new();
        let read = stream(file.path(), row::parse, |batch| {
            sizes.push(batch.len());
            Ok::<(), PromptError>(())
        });
        read.unwrap();
        assert_eq!(sizes, [2, 1024, 1024, 953]);
        let stopped = stream(file.path(), row::parse, |_| Err(PromptError::NoFiles));
        assert!(matches!(stopped, Err(PromptError::NoFiles)));
    }
}
