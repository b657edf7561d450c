//! Work to responses: chunk by chunk the questions of all conversations, turn by turn on the target's own history, and their answers in
//! parts. What is answered of a chunk that is under way is journaled; its part is written in one step when nothing of it is missing, with
//! its rows in the order of the work, and so is the same whenever and however often the work was cut short.
//!
//! In a folder of responses: `part-00012.parquet` are the responses of chunk 12, `under-way/chunk-00012-00003.parquet` is a piece of its
//! journal, and `under-way/rejected-00012.jsonl` has the conversations of it that the engine would not answer.

mod journal;
#[cfg(test)]
mod tests;

use std::collections::{BTreeMap, HashMap, VecDeque};
use std::fs;
use std::io;
use std::ops::{ControlFlow, Range};
use std::path::Path;
use std::time::{Duration, Instant};

use thiserror::Error;

use self::journal::{ask_refused_again, journal, journal_path, refused_path, remove_journal};
pub use self::journal::{is_through, refused};
use crate::chat::ChatTemplate;
use crate::engine::{Answer, Conversations, Question};
use crate::files::{name_path, write_atomically};
use crate::prompts::{Message, Rejected};
use crate::requests::{Work, count_rows, read_chunk};
use crate::responses::{FinishReason, IdsFrom, Provenance, Response, ResponseError, read_part, write_part, write_rows};
use crate::supervision::counter_of;
use crate::tokenizer::{Tokenizer, TokenizerError};

/// What a killed process loses at most: so many responses, or those of so long a time.
const UNSAVED_RESPONSES: usize = 64;
const UNSAVED_TIME: Duration = Duration::from_secs(30);

/// The folder of journals, within that of the responses.
pub const UNDER_WAY: &str = "under-way";

/// What all conversations of a stage have in common.
#[derive(Clone, Copy)]
pub struct Common<'a> {
    /// Where parts go.
    pub folder: &'a Path,
    /// Where the chunks of work lie.
    pub work: &'a Path,
    pub provenance: &'a Provenance,
    pub tokenizer: &'a Tokenizer,
    pub template: &'a ChatTemplate,
    pub thinking: bool,
    pub temperature: f64,
    /// The most tokens of prompt and response together.
    pub max_tokens: usize,
    /// What ends a response, by the target's configuration.
    pub stop_tokens: &'a [u32],
    /// Conversations that the engine may refuse; one more ends the stage.
    pub may_be_refused: usize,
}

/// Why conversations cannot go on.
#[derive(Debug, Error)]
pub enum ConversationError {
    #[error(transparent)]
    Responses(#[from] ResponseError),
    #[error("cannot write responses: {0}")]
    Write(io::Error),
    #[error("cannot turn a response's ids into text: {0}")]
    Decode(#[from] TokenizerError),
    #[error(
        "the engine refused {refused} conversations, more than `data.max_rejected` allows; the last was line {} of {}: {}", last.line,
        last.file, last.reason
    )]
    TooManyRefused { refused: usize, last: Rejected },
    #[error(
        "the engine gives text without token ids, and the chat template's end of an answer has no stop token of the target ({stop_tokens:?}): it \
         cannot be told which token ended it; use an engine that returns token ids"
    )]
    NoEndOfTurn { stop_tokens: Vec<u32> },
}

/// What has been answered by this process and the ones before it, of the chunks that it works on.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct Done {
    /// Conversations that are through, the refused ones included.
    pub conversations: usize,
    pub refused: usize,
    /// Chunks that are through.
    pub chunks: usize,
    /// Generated for this process alone.
    pub tokens: usize,
}

/// A chunk under way.
struct Chunk {
    work: Vec<Work>,
    states: Vec<State>,
    /// Conversations that are not through yet.
    left: usize,
    /// Pieces of its journal on disk.
    journals: usize,
    /// Conversations that were answered since the last piece.
    unsaved: Vec<usize>,
}

/// How a conversation stands.
enum State {
    /// So many turns are answered, and the next is asked or will be.
    UnderWay(Vec<Response>),
    Answered(Vec<Response>),
    Refused(String),
}

/// The conversations of some chunks, as the side that asks.
pub struct Asking<'a> {
    common: Common<'a>,
    /// Chunks that were not begun yet, in order.
    waiting: VecDeque<usize>,
    open: BTreeMap<usize, Chunk>,
    /// Conversations whose next question can be asked: chunk and row.
    ready: VecDeque<(usize, usize)>,
    /// Questions that were asked -> chunk, row and prompt.
    asked: HashMap<u64, Asked>,
    next_key: u64,
    saved: Instant,
    unsaved: usize,
    done: Done,
    end_of_turn: Option<u32>,
    failure: Option<ConversationError>,
    progress: &'a mut dyn FnMut(Done),
}

struct Asked {
    chunk: usize,
    row: usize,
    prompt_text: String,
    prompt_ids: Vec<u32>,
}

impl<'a> Asking<'a> {
    /// The conversations of `chunks` that are not through. `progress` is told of every answer.
    ///
    /// # Errors
    /// When the folder of journals cannot be made or cleared.
    pub fn new(common: Common<'a>, chunks: &[usize], progress: &'a mut dyn FnMut(Done)) -> Result<Self, ConversationError> {
        let journals = common.folder.join(UNDER_WAY);
        fs::create_dir_all(&journals).map_err(|error| ConversationError::Write(name_path(&journals, &error)))?;
        let (mut waiting, mut done) = (VecDeque::new(), Done::default());
        for &chunk in chunks {
            if !is_through(common.folder, chunk) {
                waiting.push_back(chunk);
                continue;
            }
            // Its journal stays where the process was killed between the two.
            remove_journal(common.folder, chunk)?;
            done.refused += refused(common.folder, chunk)?.len();
            done.conversations += count_rows(common.work, chunk)?;
            done.chunks += 1;
        }
        progress(done);
        let end_of_turn = end_of_turn(&common);
        Ok(Self {
            common,
            waiting,
            open: BTreeMap::new(),
            ready: VecDeque::new(),
            asked: HashMap::new(),
            next_key: 0,
            saved: Instant::now(),
            unsaved: 0,
            done,
            end_of_turn,
            failure: None,
            progress,
        })
    }

    /// Ends: what was answered is on disk afterwards. Whether all is through.
    ///
    /// # Errors
    /// What went wrong while asking and answering, and a disk that cannot be written to.
    pub fn finish(mut self) -> Result<bool, ConversationError> {
        let saved = self.save();
        if let Some(failure) = self.failure.take() {
            if matches!(failure, ConversationError::TooManyRefused { .. }) {
                ask_refused_again(self.common.folder)?;
            }
            return Err(failure);
        }
        saved?;
        Ok(self.waiting.is_empty() && self.open.is_empty())
    }

    /// Reads the next chunk, with what its journal has.
    fn open_chunk(&mut self, chunk: usize) -> Result<(), ConversationError> {
        let work = read_chunk(self.common.work, chunk)?;
        let mut journaled: HashMap<String, Vec<Response>> = HashMap::new();
        let pieces = journal(self.common.folder, chunk)?;
        for piece in &pieces {
            for response in read_part(piece)?.1 {
                journaled.entry(response.id.clone()).or_default().push(response);
            }
        }
        let mut states = Vec::with_capacity(work.len());
        for row in &work {
            states.push(match journaled.remove(&row.request.id) {
                Some(responses) => State::Answered(responses),
                None if !row.supervised.is_empty() => State::Answered(self.given(row)?),
                None => State::UnderWay(Vec::new()),
            });
        }
        let left: Vec<usize> = (0..work.len()).filter(|&row| matches!(states[row], State::UnderWay(_))).collect();
        self.done.conversations += work.len() - left.len();
        self.ready.extend(left.iter().map(|&row| (chunk, row)));
        let journals = pieces.len();
        self.open.insert(chunk, Chunk { work, states, left: left.len(), journals, unsaved: Vec::new() });
        self.close_if_through(chunk)
    }

    /// The responses of a row that was tokenised before.
    fn given(&self, row: &Work) -> Result<Vec<Response>, ConversationError> {
        let ids = &row.prompt_ids;
        let response = |(turn, span): (usize, &Range<usize>)| {
            let stopped = span.end < ids.len() || ids.last().is_some_and(|last| self.common.stop_tokens.contains(last));
            Ok(Response {
                id: row.request.id.clone(),
                prompt_ids: ids[..span.start].to_vec(),
                response_ids: ids[span.clone()].to_vec(),
                finish_reason: if stopped { FinishReason::Stop } else { FinishReason::Length },
                prompt_text: self.common.tokenizer.decode(&ids[..span.start], false)?,
                response_text: self.common.tokenizer.decode(&ids[span.clone()], true)?,
                turn: turn as u32,
                ids_from: IdsFrom::Given,
                source: row.request.source.clone(),
                temperature: self.common.temperature,
                thinking: self.common.thinking,
            })
        };
        row.supervised.iter().enumerate().map(response).collect()
    }

    /// The question of a conversation's next turn; `None` when it has become too long for one, which ends it.
    fn question(&mut self, chunk: usize, row: usize) -> Result<Option<Question>, String> {
        let Some(Chunk { work, states, .. }) = self.open.get(&chunk) else { return Ok(None) };
        let (work, State::UnderWay(answered)) = (&work[row], &states[row]) else { return Ok(None) };
        let turn = answered.len();
        let mut messages = work.request.messages.clone();
        for (answer, later) in answered.iter().zip(&work.later) {
            messages.push(Message::new("assistant", answer.response_text.clone()));
            messages.extend(later.iter().cloned());
        }
        let tools = work.request.tools.clone();
        let (prompt_text, prompt_ids) = if turn == 0 {
            (work.prompt_text.clone(), work.prompt_ids.clone())
        } else {
            let text = self.common.template.render_with_tools(&messages, tools.as_ref(), true, Some(self.common.thinking));
            let text = text.map_err(|error| format!("the chat template refuses its turn {}: {error}", turn + 1))?;
            let ids = self.common.tokenizer.encode(&text, false);
            (text, ids.map_err(|error| format!("the tokenizer refuses its turn {}: {error}", turn + 1))?)
        };
        if prompt_ids.len() + 2 > self.common.max_tokens {
            return Ok(None);
        }
        let key = self.next_key;
        self.next_key += 1;
        let counter = counter_of(&work.request.id).wrapping_add(turn as u64);
        self.asked.insert(key, Asked { chunk, row, prompt_text, prompt_ids: prompt_ids.clone() });
        Ok(Some(Question { key, messages, tools, prompt_ids, counter }))
    }

    /// An answer as a response of a row.
    fn response(&self, asked: Asked, answer: Answer, turn: usize) -> Result<Result<Response, String>, ConversationError> {
        let Some(work) = self.open.get(&asked.chunk).map(|chunk| &chunk.work[asked.row]) else {
            return Ok(Err("its chunk is closed".to_owned()));
        };
        let (mut ids, ids_from) = match (answer.ids, &answer.text) {
            (Some(ids), _) => (ids, IdsFrom::Engine),
            (None, Some(text)) => match self.common.tokenizer.encode(text, false) {
                Ok(ids) => (ids, IdsFrom::Tokenizer),
                Err(error) => return Ok(Err(format!("the tokenizer refuses its answer: {error}"))),
            },
            (None, None) => return Ok(Err("the engine gave neither ids nor text".to_owned())),
        };
        // The engine says that a stop token was generated, and has taken it off. None is put behind an answer that was cut off.
        let stops = ids.last().is_some_and(|last| self.common.stop_tokens.contains(last));
        if answer.finish_reason == FinishReason::Stop && !stops {
            let stop_tokens = || self.common.stop_tokens.to_vec();
            ids.push(self.end_of_turn.ok_or_else(|| ConversationError::NoEndOfTurn { stop_tokens: stop_tokens() })?);
        }
        if ids.is_empty() {
            return Ok(Err("the answer is empty".to_owned()));
        }
        // What a server calls text may lack what its parsers took out; what the ids say is what was generated.
        let response_text = match (ids_from, answer.text) {
            (IdsFrom::Tokenizer, Some(text)) => text,
            _ => self.common.tokenizer.decode(&ids, true)?,
        };
        Ok(Ok(Response {
            id: work.request.id.clone(),
            prompt_ids: asked.prompt_ids,
            response_ids: ids,
            finish_reason: answer.finish_reason,
            prompt_text: asked.prompt_text,
            response_text,
            turn: turn as u32,
            ids_from,
            source: work.request.source.clone(),
            temperature: self.common.temperature,
            thinking: self.common.thinking,
        }))
    }

    fn take(&mut self, key: u64, answer: Result<Answer, String>) -> Result<(), ConversationError> {
        let Some(asked) = self.asked.remove(&key) else { return Ok(()) };
        let (chunk, row) = (asked.chunk, asked.row);
        let Some(State::UnderWay(answered)) = self.open.get(&chunk).map(|chunk| &chunk.states[row]) else { return Ok(()) };
        let turn = answered.len();
        let response = match answer {
            Ok(answer) => self.response(asked, answer, turn)?,
            Err(reason) => Err(reason),
        };
        match response {
            Err(reason) => self.refuse(chunk, row, reason),
            Ok(response) => {
                self.done.tokens += response.response_ids.len();
                let Some(open) = self.open.get_mut(&chunk) else { return Ok(()) };
                // Nobody goes on from half an answer.
                let last = turn == open.work[row].later.len() || response.finish_reason == FinishReason::Length;
                if let State::UnderWay(answered) = &mut open.states[row] {
                    answered.push(response);
                }
                if !last {
                    self.ready.push_front((chunk, row));
                    return Ok(());
                }
                self.end_conversation(chunk, row)
            }
        }
    }

    /// A conversation is through: as many turns as it has are its responses.
    fn end_conversation(&mut self, chunk: usize, row: usize) -> Result<(), ConversationError> {
        let Some(open) = self.open.get_mut(&chunk) else { return Ok(()) };
        if let State::UnderWay(answered) = &mut open.states[row] {
            self.unsaved += answered.len();
            open.states[row] = State::Answered(std::mem::take(answered));
        }
        open.unsaved.push(row);
        open.left -= 1;
        self.done.conversations += 1;
        self.close_if_through(chunk)?;
        if self.unsaved >= UNSAVED_RESPONSES || self.saved.elapsed() >= UNSAVED_TIME {
            self.save()?;
        }
        Ok(())
    }

    /// Nothing of the conversation is kept, whatever turns it has.
    fn refuse(&mut self, chunk: usize, row: usize, reason: String) -> Result<(), ConversationError> {
        let Some(open) = self.open.get_mut(&chunk) else { return Ok(()) };
        self.done.refused += 1;
        self.done.conversations += 1;
        open.left -= 1;
        open.states[row] = State::Refused(reason.clone());
        if self.done.refused > self.common.may_be_refused {
            let last = rejected(&open.work[row], reason);
            return Err(ConversationError::TooManyRefused { refused: self.done.refused, last });
        }
        self.close_if_through(chunk)
    }

    /// Writes a chunk's part, once nothing of it is missing.
    fn close_if_through(&mut self, chunk: usize) -> Result<(), ConversationError> {
        if self.open.get(&chunk).is_none_or(|open| open.left > 0) {
            return Ok(());
        }
        let Some(open) = self.open.remove(&chunk) else { return Ok(()) };
        self.unsaved -= open.unsaved.iter().map(|&row| answers(&open.states[row])).sum::<usize>();
        let (mut rows, mut refused) = (Vec::new(), Vec::new());
        for (work, state) in open.work.iter().zip(open.states) {
            match state {
                State::Answered(responses) => rows.extend(responses),
                State::Refused(reason) => serde_json::to_writer(&mut refused, &rejected(work, reason))
                    .map(|()| refused.push(b'\n'))
                    .map_err(|error| ConversationError::Write(error.into()))?,
                State::UnderWay(_) => {}
            }
        }
        // The part comes last: it says that the chunk is through.
        if !refused.is_empty() {
            write_atomically(&refused_path(self.common.folder, chunk), &refused).map_err(ConversationError::Write)?;
        }
        write_part(self.common.folder, chunk, &rows, self.common.provenance)?;
        self.done.chunks += 1;
        remove_journal(self.common.folder, chunk)
    }

    /// Journals what has been answered since the last time.
    fn save(&mut self) -> Result<(), ConversationError> {
        for (&chunk, open) in &mut self.open {
            if open.unsaved.is_empty() {
                continue;
            }
            let rows: Vec<&Response> = open
                .unsaved
                .iter()
                .filter_map(|&row| match &open.states[row] {
                    State::Answered(responses) => Some(responses),
                    _ => None,
                })
                .flatten()
                .collect();
            write_rows(&journal_path(self.common.folder, chunk, open.journals), &rows, self.common.provenance)?;
            open.journals += 1;
            open.unsaved.clear();
        }
        self.unsaved = 0;
        self.saved = Instant::now();
        Ok(())
    }
}

impl Conversations for Asking<'_> {
    fn next(&mut self) -> Option<Question> {
        while self.failure.is_none() {
            let Some((chunk, row)) = self.ready.pop_front() else {
                let chunk = self.waiting.pop_front()?;
                self.failure = self.open_chunk(chunk).err();
                (self.progress)(self.done);
                continue;
            };
            let ended = match self.question(chunk, row) {
                Ok(Some(question)) => return Some(question),
                Ok(None) => self.end_conversation(chunk, row),
                Err(reason) => self.refuse(chunk, row, reason),
            };
            self.failure = ended.err();
        }
        None
    }

    fn answer(&mut self, key: u64, answer: Result<Answer, String>) -> ControlFlow<()> {
        if self.failure.is_none() {
            self.failure = self.take(key, answer).err();
            (self.progress)(self.done);
        }
        if self.failure.is_some() { ControlFlow::Break(()) } else { ControlFlow::Continue(()) }
    }
}

/// Holds what all ranks together were refused against the limit that each of them had for itself.
///
/// # Errors
/// When there is more; the refused rows are then asked for again by the next start.
pub fn limit_refused(folder: &Path, chunks: Range<usize>, may_be_refused: usize) -> Result<(), ConversationError> {
    let mut all = Vec::new();
    for chunk in chunks {
        all.extend(refused(folder, chunk)?);
    }
    let refused = all.len();
    match all.pop() {
        Some(last) if refused > may_be_refused => {
            ask_refused_again(folder)?;
            Err(ConversationError::TooManyRefused { refused, last })
        }
        _ => Ok(()),
    }
}

fn answers(state: &State) -> usize {
    match state {
        State::Answered(responses) => responses.len(),
        _ => 0,
    }
}

fn rejected(work: &Work, reason: String) -> Rejected {
    let text = serde_json::to_string(&(&work.request.messages, &work.later)).unwrap_or_default();
    Rejected { file: work.request.file.clone(), line: work.request.line, reason, text }
}

/// The stop token that the template puts behind an answer.
fn end_of_turn(common: &Common<'_>) -> Option<u32> {
    let messages = [Message::new("user", "a"), Message::new("assistant", "b")];
    let text = common.template.render(&messages, false, Some(common.thinking)).ok()?;
    let ids = common.tokenizer.encode(&text, false).ok()?;
    ids.into_iter().rev().find(|id| common.stop_tokens.contains(id))
}
