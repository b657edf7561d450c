//! Prompt files to requests: rows in the dialects that people have, read one by one, each row either used or
//! rejected with its file, line and reason. Rows read are always requests plus rejected rows.

mod reader;
pub(crate) mod row;

use self::reader::{Raw, Reader};
use crate::files::{name_path, sha256_hex, write_atomically};
use rayon::prelude::*;
use serde::{Deserialize, Serialize};
use serde_json::Value;
use std::collections::{HashMap, HashSet};
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

/// All rows of a set of prompt files.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Prompts {
    pub requests: Vec<Request>,
    pub rejected: Vec<Rejected>,
    /// Rows that were not blank; equals `requests.len() + rejected.len()`.
    pub rows_read: usize,
    /// The same of each file, in the order in which they were read.
    pub rows_by_file: Vec<(String, usize)>,
    /// Requests whose id had been taken by an earlier one; they got `#2`, `#3` and so on appended.
    pub duplicate_ids: usize,
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

/// Reads prompt files in the order given.
///
/// A row is a JSON object in one of these dialects: `messages` or `conversations` (a list of messages with `role` and
/// `content`, or `from` and `value`), `prompt` (a text or such a list), `question`, `instruction` with an optional
/// `input`, `turns` (a list of user texts, of which the first is the request), or `text`. A last message by the
/// assistant is dropped: it is what regeneration replaces. `tools` go to the chat template. `id` is the row's `id`, `question_id` or `task_id`, else a
/// hash of its messages.
///
/// # Errors
/// When a file cannot be read, has no rows, or has no row that can be used. A row that cannot be used is no error while
/// others can: it is in [`Prompts::rejected`].
pub fn read(paths: &[PathBuf]) -> Result<Prompts, PromptError> {
    if paths.is_empty() {
        return Err(PromptError::NoFiles);
    }
    let mut prompts = Prompts::default();
    for path in paths {
        read_file(path, &mut prompts)?;
    }
    prompts.duplicate_ids = make_ids_unique(prompts.requests.iter_mut().map(|request| &mut request.id).collect());
    Ok(prompts)
}

fn read_file(path: &Path, prompts: &mut Prompts) -> Result<(), PromptError> {
    let rows = read_rows(path, row::parse)?;
    let count = rows.used.len() + rows.rejected.len();
    prompts.rows_read += count;
    prompts.rows_by_file.push((path.display().to_string(), count));
    for (line, row) in rows.used {
        let id = row.id.clone().unwrap_or_else(|| content_hash(&row.messages, row.tools.as_ref()));
        prompts.requests.push(request(path, line, id, row));
    }
    prompts.rejected.extend(rows.rejected);
    Ok(())
}

/// The request of a row at a place.
pub(crate) fn request(path: &Path, line: usize, id: String, row: row::Row) -> Request {
    let file_name = || path.file_name().map_or_else(String::new, |name| name.to_string_lossy().into_owned());
    Request {
        id,
        messages: row.messages,
        tools: row.tools,
        source: row.source.unwrap_or_else(file_name),
        file: path.display().to_string(),
        line,
    }
}

/// The rows of a file: what could be used, with its line, and what could not.
pub(crate) struct Rows<T> {
    pub(crate) used: Vec<(usize, T)>,
    pub(crate) rejected: Vec<Rejected>,
}

/// Rows that are parsed together, on all cores.
const ROWS_AT_ONCE: usize = 4096;

/// Reads a file row by row; the error of `parse` is the reason for which a row is rejected.
pub(crate) fn read_rows<T: Send>(path: &Path, parse: impl Fn(&[u8]) -> Result<T, String> + Sync) -> Result<Rows<T>, PromptError> {
    let read_error = |error| PromptError::Read(name_path(path, &error));
    let mut reader = Reader::open(path).map_err(read_error)?;
    let mut rows = Rows { used: Vec::new(), rejected: Vec::new() };
    loop {
        let mut raws = Vec::with_capacity(ROWS_AT_ONCE);
        while raws.len() < ROWS_AT_ONCE
            && let Some(raw) = reader.next().map_err(read_error)?
        {
            raws.push(raw);
        }
        if raws.is_empty() {
            break;
        }
        let parsed: Vec<Result<T, String>> =
            raws.par_iter().map(|raw| raw.fault.clone().map_or_else(|| parse(&raw.text), Err)).collect();
        for (Raw { line, text, .. }, parsed) in raws.into_iter().zip(parsed) {
            match parsed {
                Ok(row) => rows.used.push((line, row)),
                Err(reason) => rows.rejected.push(Rejected {
                    file: path.display().to_string(),
                    line,
                    reason,
                    text: String::from_utf8_lossy(&text).into_owned(),
                }),
            }
        }
    }
    if !rows.used.is_empty() {
        return Ok(rows);
    }
    match rows.rejected.first() {
        None => Err(PromptError::NoRows { path: path.into() }),
        Some(first) => Err(PromptError::AllRejected {
            path: path.into(),
            rows: rows.rejected.len(),
            line: first.line,
            reason: first.reason.clone(),
        }),
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

/// Appends `#2`, `#3` and so on to ids that occur again, and says how many were changed.
pub(crate) fn make_ids_unique(ids: Vec<&mut String>) -> usize {
    let mut taken: HashSet<String> = ids.iter().map(|id| id.to_string()).collect();
    let mut occurrences: HashMap<String, usize> = HashMap::new();
    let mut duplicates = 0;
    for id in ids {
        let occurrence = occurrences.entry(id.clone()).or_insert(0);
        *occurrence += 1;
        if *occurrence == 1 {
            continue;
        }
        duplicates += 1;
        // A row may have been given the id `a#2` by its author; then the second `a` becomes `a#3`.
        let unique = loop {
            let candidate = format!("{id}#{occurrence}");
            if taken.insert(candidate.clone()) {
                break candidate;
            }
            *occurrence += 1;
        };
        *id = unique;
    }
    duplicates
}

/// Writes rejected rows as JSON Lines, in one step; an empty file says that nothing was rejected.
///
/// # Errors
/// When the file cannot be written; the message names it.
pub fn write_rejected(path: &Path, rejected: &[Rejected]) -> io::Result<()> {
    let mut bytes = Vec::new();
    for row in rejected {
        serde_json::to_writer(&mut bytes, row)?;
        bytes.push(b'\n');
    }
    write_atomically(path, &bytes)
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]
    use super::*;
    use std::fs;

    fn read_texts(files: &[&[u8]]) -> Result<Prompts, PromptError> {
        let folder = tempfile::tempdir().unwrap();
        let write = |(index, text): (usize, &&[u8])| {
            let path = folder.path().join(format!("prompts-{index}.jsonl"));
            fs::write(&path, text).unwrap();
            path
        };
        read(&files.iter().enumerate().map(write).collect::<Vec<_>>())
    }

    #[test]
    fn blank_lines_carriage_returns_a_byte_order_mark_and_a_missing_last_newline_are_fine() {
        let text = b"\xef\xbb\xbf{\"id\": \"a\", \"prompt\": \"one\"}\r\n\r\n   \n{\"id\": \"b\", \"prompt\": \"two\"}";
        let prompts = read_texts(&[text]).unwrap();
        let ids: Vec<&str> = prompts.requests.iter().map(|request| request.id.as_str()).collect();
        assert_eq!((ids, prompts.rows_read, prompts.rejected.len()), (vec!["a", "b"], 2, 0));
        assert_eq!(prompts.requests[0].source, "prompts-0.jsonl");
        let lines: Vec<usize> = prompts.requests.iter().map(|request| request.line).collect();
        assert_eq!(lines, [1, 4]);
        assert!(prompts.requests.iter().all(|request| request.file.ends_with("/prompts-0.jsonl")), "{:?}", prompts.requests);
    }

    #[test]
    fn rejected_rows_keep_place_reason_and_text_and_every_row_is_counted() {
        let text = b"{\"prompt\": \"one\"}\n\n{\"prompt\": \n[1]\n{\"prompt\": \"\xff\"}\n{\"prompt\": \"\"}\n{\"other\": 1}\n";
        let prompts = read_texts(&[text]).unwrap();
        let lines: Vec<usize> = prompts.rejected.iter().map(|row| row.line).collect();
        assert_eq!(lines, [3, 4, 5, 6, 7]);
        let reasons = ["not JSON: EOF", "not a JSON object", "not UTF-8", "message 1 (`user`) is empty", "no prompt field"];
        for (row, reason) in prompts.rejected.iter().zip(reasons) {
            assert!(row.reason.starts_with(reason), "{} / {reason}", row.reason);
            assert!(row.file.ends_with("prompts-0.jsonl"));
        }
        assert_eq!(prompts.rejected[1].text, "[1]");
        assert_eq!((prompts.rows_read, prompts.requests.len()), (6, 1));

        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("rejected.jsonl");
        write_rejected(&path, &prompts.rejected).unwrap();
        let written = fs::read_to_string(&path).unwrap();
        let back: Vec<Rejected> = written.lines().map(|line| serde_json::from_str(line).unwrap()).collect();
        assert_eq!(back, prompts.rejected);
    }

    #[test]
    fn a_file_without_a_usable_row_is_an_error_even_beside_a_good_one() {
        let good = b"{\"prompt\": \"one\"}".as_slice();
        let error = read_texts(&[good, b"\n \r\n"]).unwrap_err().to_string();
        assert!(error.contains("prompts-1.jsonl` has no rows"), "{error}");
        let error = read_texts(&[good, b"\n{\"prompt\": 5}\n{}\n"]).unwrap_err().to_string();
        assert!(
            error.contains("none of the 2 rows")
                && error.contains("prompts-1.jsonl` can be used; line 2: `prompt` is not a text"),
            "{error}"
        );
        assert!(matches!(read(&[]).unwrap_err(), PromptError::NoFiles));
        let error = read(&["absent.jsonl".into()]).unwrap_err().to_string();
        assert!(error.contains("`absent.jsonl`"), "{error}");
    }

    #[test]
    fn ids_are_given_or_hashed_and_made_unique_by_occurrence() {
        let row = |id: &str, prompt: &str| format!("{{\"id\": {id}, \"prompt\": \"{prompt}\"}}\n");
        let text =
            [row("\"a\"", "1"), row("\"a\"", "2"), row("\"a#2\"", "3"), row("\"a\"", "4"), row("7", "5"), row("null", "6")];
        let both = text.concat() + "{\"prompt\": \"6\"}\n{\"prompt\": \"7\"}";
        let prompts = read_texts(&[both.as_bytes()]).unwrap();
        let ids: Vec<&str> = prompts.requests.iter().map(|request| request.id.as_str()).collect();
        let hash = content_hash(&[Message::new("user", "6")], None);
        assert_eq!(ids[..7], ["a", "a#3", "a#2", "a#4", "7", &hash, &format!("{hash}#2")]);
        assert_eq!((hash.len(), prompts.duplicate_ids), (16, 3));
        assert_eq!(ids.iter().collect::<HashSet<_>>().len(), ids.len());
    }
}
