//! Prompt files to work: every row is read, normalised, rendered and tokenised, and ends as a row of a chunk, as a rejected row with its
//! reason, or left out by the limit. Never more than a few thousand rows are in memory, whatever the files hold; all cores are used.

mod accounting;
#[cfg(test)]
mod tests;

use std::collections::{BTreeMap, BinaryHeap, HashSet};
use std::fs::{self, File};
use std::io::{self, BufWriter, Write};
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicBool, Ordering};

use rayon::prelude::*;
use serde::{Deserialize, Serialize};
use thiserror::Error;

pub use self::accounting::{FileCount, Reasons};
use crate::chat::ChatTemplate;
use crate::files::{name_path, write_atomically};
use crate::prompts::row::{self, Row};
use crate::prompts::{Message, Parsed, PromptError, Rejected, UniqueIds, check_usable, content_hash, request, stream};
use crate::requests::{Work, chunk_rows, write_chunk};
use crate::responses::ResponseError;
use crate::supervision::limit_rank;
use crate::tokenizer::Tokenizer;

/// What makes work of prompt files.
#[derive(Clone, Copy)]
pub struct Preparation<'a> {
    pub prompts: &'a [PathBuf],
    /// Use only so many of the rows, those that come first by seed and id.
    pub limit: Option<usize>,
    pub seed: u64,
    /// The most tokens of prompt and response together.
    pub max_tokens: usize,
    /// Token ids are below this.
    pub vocabulary: usize,
    pub tokenizer: &'a Tokenizer,
    pub template: &'a ChatTemplate,
    pub thinking: bool,
    /// Everything that the work depends on, by name; work made from other inputs is made anew.
    pub inputs: &'a BTreeMap<String, String>,
}

/// What became of all rows. Read are used, rejected and left out by the limit.
#[derive(Debug, Clone, Default, PartialEq, Serialize, Deserialize)]
pub struct Prepared {
    pub inputs: BTreeMap<String, String>,
    pub rows_read: usize,
    pub rows_rejected: usize,
    pub rows_left_out_by_limit: usize,
    /// Conversations in the chunks.
    pub rows_used: usize,
    pub duplicate_ids: usize,
    pub chunks: usize,
    /// The most tokens that a prompt can have; of a conversation with later turns, whose prompts nobody knows yet, what the limit allows.
    pub longest_prompt: usize,
    pub sources: Vec<FileCount>,
    pub reasons: Reasons,
}

/// Why prompts cannot be made into work.
#[derive(Debug, Error)]
pub enum PreparationError {
    #[error(transparent)]
    Prompts(#[from] PromptError),
    #[error("cannot write the work to be done: {0}")]
    Write(io::Error),
    #[error("cannot read the work to be done: {0}")]
    Read(io::Error),
    #[error(transparent)]
    Chunk(#[from] ResponseError),
    #[error("none of the {rows} prompts can be used; the first was line {} of {}: {}", first.line, first.file, first.reason)]
    NothingLeft { rows: usize, first: Rejected },
    #[error("stopped")]
    Stopped,
}

/// The rejected rows, in the folder of the work.
pub const REJECTED: &str = "rejected.jsonl";
const PREPARED: &str = "prepared.json";

/// Reads what [`prepare`] made from the same inputs; `None` where it has not, or not to the end.
///
/// # Errors
/// When the file is there and cannot be read.
pub fn prepared(folder: &Path, inputs: &BTreeMap<String, String>) -> Result<Option<Prepared>, PreparationError> {
    Ok(prepared_work(folder)?.filter(|prepared| prepared.inputs == *inputs))
}

/// Reads what [`prepare`] made from whatever inputs.
///
/// # Errors
/// When the file is there and cannot be read.
pub fn prepared_work(folder: &Path) -> Result<Option<Prepared>, PreparationError> {
    let path = folder.join(PREPARED);
    let bytes = match fs::read(&path) {
        Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(None),
        bytes => bytes.map_err(|error| PreparationError::Read(name_path(&path, &error)))?,
    };
    // One that this version cannot read is as good as none: the work is made again.
    Ok(serde_json::from_slice(&bytes).ok())
}

/// Makes the work of all prompt files anew in `folder`, which holds nothing else. `progress` is given the bytes and rows read so far.
///
/// A row is a JSON object in one of these dialects: `messages` or `conversations` (a list of messages with `role` and `content`, or `from`
/// and `value`), `prompt` (a text or such a list), `question`, `instruction` with an optional `input`, `turns` (a list of user texts), or
/// `text`; or it has `input_ids` and `loss_mask` and is done already. Answers in a chat are what regeneration replaces, each in its turn;
/// those that call tools stay as they are with what the tools gave back. `tools` go to the chat template. `id` is the row's `id`,
/// `question_id` or `task_id`, else a hash of what it says.
///
/// # Errors
/// When a file cannot be read, has no rows, or has no row that can be used; when no row of all files is left; when `stop` is set. A row
/// that cannot be used is no error while others can.
pub fn prepare(
    preparation: &Preparation<'_>,
    folder: &Path,
    stop: &AtomicBool,
    progress: &mut dyn FnMut(u64, usize),
) -> Result<Prepared, PreparationError> {
    if preparation.prompts.is_empty() {
        return Err(PromptError::NoFiles.into());
    }
    match fs::remove_dir_all(folder) {
        Err(error) if error.kind() != io::ErrorKind::NotFound => return Err(PreparationError::Write(name_path(folder, &error))),
        _ => fs::create_dir_all(folder).map_err(|error| PreparationError::Write(name_path(folder, &error)))?,
    }
    let chosen = match preparation.limit {
        Some(limit) => Some(within_limit(preparation, limit, stop, progress)?),
        None => None,
    };
    let rejected_path = folder.join(REJECTED);
    let mut rejected = RejectedRows::create(&rejected_path)?;
    let mut made = Prepared { inputs: preparation.inputs.clone(), ..Prepared::default() };
    // The next chunk is encoded and written while the rows after it are read.
    std::thread::scope(|scope| {
        let (sender, chunks) = std::sync::mpsc::sync_channel::<(usize, Vec<Work>)>(1);
        let writer = scope.spawn(move || chunks.into_iter().try_for_each(|(chunk, rows)| write_chunk(folder, chunk, &rows)));
        let mut pending = Vec::new();
        let read = read_all(preparation, chosen.as_ref(), stop, progress, &mut made, &mut rejected, &mut |made, work| {
            pending.push(work);
            if pending.len() == chunk_rows(made.chunks) {
                made.chunks += 1;
                // A writer that has failed says so below.
                return sender.send((made.chunks - 1, std::mem::take(&mut pending))).is_ok();
            }
            true
        });
        if read.is_ok() && !pending.is_empty() {
            made.chunks += 1;
            let _ = sender.send((made.chunks - 1, pending));
        }
        drop(sender);
        match writer.join() {
            Ok(written) => written?,
            Err(panic) => std::panic::resume_unwind(panic),
        }
        read
    })?;
    rejected.finish()?;
    if let (0, Some(first)) = (made.rows_used, made.reasons.first()) {
        return Err(PreparationError::NothingLeft { rows: made.rows_read, first: first.clone() });
    }
    let bytes = serde_json::to_vec_pretty(&made).map_err(|error| PreparationError::Write(error.into()))?;
    write_atomically(&folder.join(PREPARED), &bytes).map_err(PreparationError::Write)?;
    Ok(made)
}

/// Which of the good rows the limit leaves, counted from 0 in the order of reading.
fn within_limit(
    preparation: &Preparation<'_>,
    limit: usize,
    stop: &AtomicBool,
    progress: &mut dyn FnMut(u64, usize),
) -> Result<HashSet<usize>, PreparationError> {
    let mut ids = UniqueIds::default();
    let mut lowest: BinaryHeap<([u8; 32], usize)> = BinaryHeap::new();
    let (mut bytes_before, mut good, mut rows_read) = (0, 0, 0);
    for path in preparation.prompts {
        stream(path, row::parse, |batch| {
            if stop.load(Ordering::Relaxed) {
                return Err(PreparationError::Stopped);
            }
            rows_read += batch.len();
            progress(bytes_before + batch.last().map_or(0, |last| last.bytes_read), rows_read);
            for row in batch.into_iter().filter_map(|parsed| parsed.row.ok()) {
                let id = unique_id(&mut ids, path, &row);
                lowest.push((limit_rank(&id, preparation.seed), good));
                if lowest.len() > limit {
                    lowest.pop();
                }
                good += 1;
            }
            Ok(())
        })?;
        bytes_before += fs::metadata(path).map_or(0, |metadata| metadata.len());
    }
    Ok(lowest.into_iter().map(|(_, index)| index).collect())
}

/// A row and its unique id.
type Named = (Row, String);

/// Goes through all rows; `each` is given the work of each row that is used, and says whether it can be given more.
fn read_all(
    preparation: &Preparation<'_>,
    chosen: Option<&HashSet<usize>>,
    stop: &AtomicBool,
    progress: &mut dyn FnMut(u64, usize),
    made: &mut Prepared,
    rejected: &mut RejectedRows,
    each: &mut dyn FnMut(&mut Prepared, Work) -> bool,
) -> Result<(), PreparationError> {
    let mut ids = UniqueIds::default();
    // A limit takes two readings, of which this is the second.
    let (mut bytes_before, mut good) = (0, 0);
    for path in preparation.prompts {
        let mut count = FileCount { file: path.display().to_string(), ..FileCount::default() };
        let mut first_rejected = None;
        stream(path, row::parse, |batch| {
            if stop.load(Ordering::Relaxed) {
                return Err(PreparationError::Stopped);
            }
            count.read += batch.len();
            progress(bytes_before + batch.last().map_or(0, |last| last.bytes_read), made.rows_read + count.read);
            let mut kept: Vec<(Parsed<()>, Result<Named, String>)> = Vec::with_capacity(batch.len());
            for (parsed, row) in batch.into_iter().map(Parsed::split) {
                match row {
                    Ok(row) => {
                        let id = unique_id(&mut ids, path, &row);
                        let is_chosen = chosen.is_none_or(|chosen| chosen.contains(&good));
                        good += 1;
                        if is_chosen {
                            kept.push((parsed, Ok((row, id))));
                        } else {
                            count.left_out_by_limit += 1;
                        }
                    }
                    Err(reason) => kept.push((parsed, Err(reason))),
                }
            }
            let made_work = kept.into_par_iter().map(|(parsed, row)| {
                let line = parsed.line;
                (parsed, row.and_then(|(row, id)| work(preparation, path, line, id, row)))
            });
            for (parsed, work) in made_work.collect::<Vec<_>>() {
                match work {
                    Ok(work) => {
                        count.used += 1;
                        made.rows_used += 1;
                        made.longest_prompt = made.longest_prompt.max(longest_prompt(&work, preparation.max_tokens));
                        if !each(made, work) {
                            return Err(PreparationError::Stopped);
                        }
                    }
                    Err(reason) => {
                        count.rejected += 1;
                        let row = parsed.rejected(path, reason);
                        made.reasons.add(&row);
                        rejected.add(&row)?;
                        first_rejected.get_or_insert(row);
                    }
                }
            }
            Ok(())
        })?;
        check_usable(path, count.read, count.rejected, first_rejected.as_ref())?;
        bytes_before += fs::metadata(path).map_or(0, |metadata| metadata.len());
        made.rows_read += count.read;
        made.rows_rejected += count.rejected;
        made.rows_left_out_by_limit += count.left_out_by_limit;
        made.sources.push(count);
    }
    made.duplicate_ids = ids.duplicates;
    Ok(())
}

fn unique_id(ids: &mut UniqueIds, path: &Path, row: &Row) -> String {
    let id = row.id.clone().unwrap_or_else(|| {
        // The numbers of a row that was tokenised before are what it says.
        let of_tokens = row.tokens.iter().map(|tokens| {
            let spans = tokens.supervised.iter().flat_map(|span| [span.start as u64, span.end as u64]);
            let numbers = tokens.ids.iter().map(|&id| u64::from(id)).chain(spans);
            Message::new("tokens", numbers.map(|number| number.to_string()).collect::<Vec<_>>().join(" "))
        });
        let later: Vec<Message> = row.later_turns.iter().cloned().map(row::user).chain(of_tokens).collect();
        content_hash(row.messages.iter().chain(&later), row.tools.as_ref())
    });
    ids.make(id, row.source.as_deref().unwrap_or(&crate::prompts::file_name(path)))
}

/// The work of a row, or why there is none.
fn work(preparation: &Preparation<'_>, path: &Path, line: usize, id: String, mut row: Row) -> Result<Work, String> {
    let &Preparation { max_tokens, vocabulary, tokenizer, template, thinking, .. } = preparation;
    if let Some(tokens) = row.tokens.take() {
        if let Some(position) = tokens.ids.iter().position(|&id| id as usize >= vocabulary) {
            let id = tokens.ids[position];
            return Err(format!("`input_ids` has {id} at position {position}, beyond the target's vocabulary of {vocabulary}"));
        }
        let (prompt_ids, supervised) = (tokens.ids, tokens.supervised);
        return Ok(Work {
            request: request(path, line, id, row),
            later: Vec::new(),
            prompt_text: String::new(),
            prompt_ids,
            supervised,
        });
    }
    let mut turns = turns(std::mem::take(&mut row.messages), std::mem::take(&mut row.later_turns));
    row.messages = turns.remove(0);
    let prompt_text = template
        .render_with_tools(&row.messages, row.tools.as_ref(), true, Some(thinking))
        .map_err(|error| format!("the chat template refuses it: {error:#}"))?;
    let prompt_ids = tokenizer.encode(&prompt_text, false).map_err(|error| format!("the tokenizer refuses it: {error}"))?;
    if prompt_ids.len() + 2 > max_tokens {
        return Err(format!(
            "the prompt has {} tokens and leaves no room within `data.max_tokens` = {max_tokens}",
            prompt_ids.len()
        ));
    }
    if let Some(id) = prompt_ids.iter().find(|&&id| id as usize >= vocabulary) {
        return Err(format!("its text has the token {id}, beyond the target's vocabulary of {vocabulary}"));
    }
    Ok(Work { request: request(path, line, id, row), later: turns, prompt_text, prompt_ids, supervised: Vec::new() })
}

/// The most tokens that a prompt of this work can have.
fn longest_prompt(work: &Work, max_tokens: usize) -> usize {
    match (work.supervised.is_empty(), work.later.is_empty()) {
        (false, _) => 0,
        (true, false) => max_tokens,
        (true, true) => work.prompt_ids.len(),
    }
}

/// A chat as what is said before each answer: the answers within it go, since the target gives its own. An answer that calls tools stays,
/// with what the tools gave back, for nobody calls them again.
fn turns(messages: Vec<Message>, later_turns: Vec<String>) -> Vec<Vec<Message>> {
    let mut turns = vec![Vec::new()];
    let mut messages = messages.into_iter().peekable();
    while let Some(message) = messages.next() {
        let is_answer =
            message.role == "assistant" && message.tool_calls.is_none() && messages.peek().is_none_or(|next| next.role != "tool");
        match turns.last_mut() {
            Some(turn) if !is_answer => turn.push(message),
            // Answers that follow one another are one.
            Some(turn) if !turn.is_empty() => turns.push(Vec::new()),
            _ => {}
        }
    }
    turns.extend(later_turns.into_iter().map(|text| vec![row::user(text)]));
    turns
}

/// Rejected rows on their way to disk.
struct RejectedRows {
    path: PathBuf,
    file: BufWriter<File>,
}

impl RejectedRows {
    fn create(path: &Path) -> Result<Self, PreparationError> {
        let file = File::create(path).map_err(|error| PreparationError::Write(name_path(path, &error)))?;
        Ok(Self { path: path.to_path_buf(), file: BufWriter::new(file) })
    }

    fn add(&mut self, row: &Rejected) -> Result<(), PreparationError> {
        let mut write = || -> io::Result<()> {
            serde_json::to_writer(&mut self.file, row)?;
            self.file.write_all(b"\n")
        };
        write().map_err(|error| PreparationError::Write(name_path(&self.path, &error)))
    }

    /// The file counts only once the work is complete, so it is written in place; but then it is on disk.
    fn finish(mut self) -> Result<(), PreparationError> {
        let mut finish = || -> io::Result<()> {
            self.file.flush()?;
            self.file.get_ref().sync_all()
        };
        finish().map_err(|error| PreparationError::Write(name_path(&self.path, &error)))
    }
}
