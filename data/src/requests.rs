//! The work of a regeneration, on disk before any of it is done: what every prompt row asks, in chunks that are worked on one by one. A
//! chunk's responses become the part of the same number.

use std::fs::File;
use std::ops::Range;
use std::path::{Path, PathBuf};
use std::sync::Arc;

use arrow_array::types::Int64Type;
use arrow_array::{ArrayRef, Int64Array, ListArray, RecordBatch, cast::AsArray};
use parquet::arrow::arrow_reader::ParquetRecordBatchReaderBuilder;
use parquet::file::reader::{FileReader, SerializedFileReader};
use serde::{Deserialize, Serialize};
use serde_json::Value;

use crate::columns::{column, id_lists, ids, strings, texts, to_parquet};
use crate::files::{name_path, write_atomically};
use crate::prompts::{Message, Request};
use crate::responses::ResponseError;

/// One conversation to be had.
#[derive(Debug, Clone, PartialEq)]
pub struct Work {
    /// Its messages are those before the first answer.
    pub request: Request,
    /// What is said after each answer but the last.
    pub later: Vec<Vec<Message>>,
    /// The prompt of the first answer, as the template renders it and as the tokenizer reads that; of a row that was tokenised before, all
    /// its ids and no text.
    pub prompt_text: String,
    pub prompt_ids: Vec<u32>,
    /// Of a row that was tokenised before, the spans that the target wrote; empty of every other.
    pub supervised: Vec<Range<usize>>,
}

/// What a chat consists of, as the column `chat` has it.
#[derive(Serialize, Deserialize)]
struct Chat {
    messages: Vec<Message>,
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    later: Vec<Vec<Message>>,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    tools: Option<Value>,
}

/// The rows of a chunk. The first ones are small, so that few prompts are shared by several ranks and a beginning is soon on disk; later
/// ones grow, so that millions of prompts are not a million files.
pub fn chunk_rows(chunk: usize) -> usize {
    const FIRST: usize = 16;
    const CHUNKS_OF_A_SIZE: usize = 16;
    const DOUBLINGS: usize = 8;
    FIRST << (chunk / CHUNKS_OF_A_SIZE).min(DOUBLINGS)
}

fn path_of(folder: &Path, chunk: usize) -> PathBuf {
    folder.join(format!("part-{chunk:05}.parquet"))
}

/// Writes a chunk in one step.
///
/// # Errors
/// When the folder cannot be written to, or a token id is above 2³¹ − 1.
pub fn write_chunk(folder: &Path, chunk: usize, rows: &[Work]) -> Result<(), ResponseError> {
    let path = path_of(folder, chunk);
    let bytes = encode(rows).map_err(|reason| ResponseError::Invalid { path: path.clone(), reason })?;
    write_atomically(&path, &bytes).map_err(ResponseError::Write)
}

/// Reads a chunk.
///
/// # Errors
/// When the file is absent or not one that [`write_chunk`] wrote.
pub fn read_chunk(folder: &Path, chunk: usize) -> Result<Vec<Work>, ResponseError> {
    let path = path_of(folder, chunk);
    let file = File::open(&path).map_err(|error| ResponseError::Read(name_path(&path, &error)))?;
    decode(file).map_err(|reason| ResponseError::Invalid { path, reason })
}

/// How many rows a chunk has.
///
/// # Errors
/// As [`read_chunk`].
pub fn count_rows(folder: &Path, chunk: usize) -> Result<usize, ResponseError> {
    let path = path_of(folder, chunk);
    let file = File::open(&path).map_err(|error| ResponseError::Read(name_path(&path, &error)))?;
    let reader = SerializedFileReader::new(file).map_err(|error| ResponseError::Invalid { path, reason: error.to_string() })?;
    Ok(reader.metadata().file_metadata().num_rows() as usize)
}

fn encode(rows: &[Work]) -> Result<Vec<u8>, String> {
    let chats: Vec<String> = rows.iter().map(chat).collect::<Result<_, _>>()?;
    let spans: Vec<Vec<u32>> =
        rows.iter().map(|row| row.supervised.iter().flat_map(|it| [it.start as u32, it.end as u32]).collect()).collect();
    let columns: [(&str, ArrayRef); 8] = [
        ("id", texts(rows.iter().map(|row| row.request.id.as_str()))),
        ("source", texts(rows.iter().map(|row| row.request.source.as_str()))),
        ("file", texts(rows.iter().map(|row| row.request.file.as_str()))),
        ("line", Arc::new(Int64Array::from_iter_values(rows.iter().map(|row| row.request.line as i64)))),
        ("chat", texts(chats.iter().map(String::as_str))),
        ("prompt_text", texts(rows.iter().map(|row| row.prompt_text.as_str()))),
        ("prompt_ids", id_lists(rows.iter().map(|row| row.prompt_ids.as_slice()))?),
        ("supervised", id_lists(spans.iter().map(Vec::as_slice))?),
    ];
    to_parquet(&RecordBatch::try_from_iter(columns).map_err(|error| error.to_string())?, Vec::new())
}

fn chat(row: &Work) -> Result<String, String> {
    // Borrowed, for a chat may be long.
    #[derive(Serialize)]
    struct Borrowed<'a> {
        messages: &'a [Message],
        #[serde(skip_serializing_if = "<[_]>::is_empty")]
        later: &'a [Vec<Message>],
        #[serde(skip_serializing_if = "Option::is_none")]
        tools: Option<&'a Value>,
    }
    let borrowed = Borrowed { messages: &row.request.messages, later: &row.later, tools: row.request.tools.as_ref() };
    serde_json::to_string(&borrowed).map_err(|error| error.to_string())
}

fn decode(file: File) -> Result<Vec<Work>, String> {
    let reader = ParquetRecordBatchReaderBuilder::try_new(file).and_then(ParquetRecordBatchReaderBuilder::build);
    let mut rows = Vec::new();
    for batch in reader.map_err(|error| error.to_string())? {
        let batch = batch.map_err(|error| error.to_string())?;
        let (id, source, file) = (strings(&batch, "id")?, strings(&batch, "source")?, strings(&batch, "file")?);
        let line: &Int64Array = column(&batch, "line", |array| array.as_primitive_opt::<Int64Type>())?;
        let (chat, prompt_text) = (strings(&batch, "chat")?, strings(&batch, "prompt_text")?);
        let prompt_ids: &ListArray = column(&batch, "prompt_ids", |array| array.as_list_opt())?;
        let supervised: &ListArray = column(&batch, "supervised", |array| array.as_list_opt())?;
        for row in 0..batch.num_rows() {
            let Chat { messages, later, tools } =
                serde_json::from_str(chat.value(row)).map_err(|error| format!("row {row} has no chat: {error}"))?;
            let spans = ids(supervised, row, "supervised")?;
            rows.push(Work {
                request: Request {
                    id: id.value(row).to_owned(),
                    messages,
                    tools,
                    source: source.value(row).to_owned(),
                    file: file.value(row).to_owned(),
                    line: line.value(row) as usize,
                },
                later,
                prompt_text: prompt_text.value(row).to_owned(),
                prompt_ids: ids(prompt_ids, row, "prompt_ids")?,
                supervised: spans.chunks_exact(2).map(|span| span[0] as usize..span[1] as usize).collect(),
            });
        }
    }
    Ok(rows)
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]
    use super::*;

    #[test]
    fn a_chunk_comes_back_as_it_was() {
        let request = Request {
            id: "a".to_owned(),
            messages: vec![Message::new("system", ""), Message::new("user", "ü\n")],
            tools: Some(serde_json::json!([{"name": "look"}])),
            source: "s".to_owned(),
            file: "f.jsonl".to_owned(),
            line: 7,
        };
        let chat = Work {
            request: request.clone(),
            later: vec![vec![Message::new("user", "and?")]],
            prompt_text: "text".to_owned(),
            prompt_ids: vec![1, 2],
            supervised: Vec::new(),
        };
        let given = Work {
            request: Request { messages: Vec::new(), tools: None, ..request },
            later: Vec::new(),
            prompt_text: String::new(),
            prompt_ids: vec![1, 2, 3, 4],
            supervised: vec![1..2, 3..4],
        };
        let folder = tempfile::tempdir().unwrap();
        write_chunk(folder.path(), 3, &[chat.clone(), given.clone()]).unwrap();
        assert_eq!(read_chunk(folder.path(), 3).unwrap(), [chat, given]);
        assert!(read_chunk(folder.path(), 4).unwrap_err().to_string().contains("part-00004.parquet"));
    }

    #[test]
    fn chunks_begin_small_and_grow() {
        assert_eq!([0, 15, 16, 127, 128, 9999].map(chunk_rows), [16, 16, 32, 2048, 4096, 4096]);
        let (mut chunks, mut rows) = (0, 0);
        while rows < 1_000_000 {
            rows += chunk_rows(chunks);
            chunks += 1;
        }
        assert_eq!(chunks, 357);
    }
}
