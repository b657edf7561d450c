//! Responses as files: what the target saw and produced, token by token, in Parquet parts that any tool can open. A part
//! says in its key-value metadata which target made it and how; the folder's manifest lists the parts.

use crate::columns::{column, id_lists, ids, signed, strings, texts, to_parquet, unsigned};
use crate::files::{name_path, write_atomically};
use crate::manifest::{Manifest, ManifestError};
use arrow_array::cast::AsArray;
use arrow_array::types::{Float64Type, Int32Type};
use arrow_array::{ArrayRef, BooleanArray, Float64Array, Int32Array, ListArray, RecordBatch};
use parquet::arrow::arrow_reader::ParquetRecordBatchReaderBuilder;
use parquet::file::metadata::KeyValue;
use serde_json::Value;
use std::fs::File;
use std::io;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use thiserror::Error;

/// The version of the columns and metadata described here.
///
/// 2 added `ids_from`; in parts of version 1 all ids are an engine's.
pub const SCHEMA_VERSION: u32 = 2;

/// The key of the manifest's results under which the parts of a folder are listed, in order.
pub const PARTS: &str = "parts";

/// Why the target stopped.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum FinishReason {
    /// It produced a stop token, which is the last of the response's ids.
    Stop,
    /// It reached the limit of new tokens.
    Length,
}

impl FinishReason {
    /// The name in files: `stop` or `length`.
    pub fn name(self) -> &'static str {
        match self {
            FinishReason::Stop => "stop",
            FinishReason::Length => "length",
        }
    }

    fn from_name(name: &str) -> Option<FinishReason> {
        [FinishReason::Stop, FinishReason::Length].into_iter().find(|reason| reason.name() == name)
    }
}

/// Where a response's ids come from.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum IdsFrom {
    /// The engine that generated them.
    Engine,
    /// The text that a server gave, by the recorded tokenizer.
    Tokenizer,
    /// The row itself, which was tokenised before.
    Given,
}

impl IdsFrom {
    /// The name in files: `engine`, `tokenizer` or `given`.
    pub fn name(self) -> &'static str {
        match self {
            IdsFrom::Engine => "engine",
            IdsFrom::Tokenizer => "tokenizer",
            IdsFrom::Given => "given",
        }
    }

    fn from_name(name: &str) -> Option<IdsFrom> {
        [IdsFrom::Engine, IdsFrom::Tokenizer, IdsFrom::Given].into_iter().find(|from| from.name() == name)
    }
}

/// One response of the target to one request.
#[derive(Debug, Clone, PartialEq)]
pub struct Response {
    pub id: String,
    /// Exactly the ids the target was given, `[prompt tokens]`.
    pub prompt_ids: Vec<u32>,
    /// Exactly the ids it produced, the stop token included, `[response tokens]`.
    pub response_ids: Vec<u32>,
    pub finish_reason: FinishReason,
    pub prompt_text: String,
    pub response_text: String,
    /// Which answer of the chat this is, from 0.
    pub turn: u32,
    pub ids_from: IdsFrom,
    pub source: String,
    pub temperature: f64,
    pub thinking: bool,
}

/// What made the responses of a part. Parts of one folder have the same.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Provenance {
    pub target: String,
    pub revision: String,
    pub tokenizer_hash: String,
    pub chat_template_hash: String,
    /// The sampling settings, as text.
    pub sampling: String,
    pub schema_version: u32,
}

/// Why responses cannot be written or read.
#[derive(Debug, Error)]
pub enum ResponseError {
    #[error("cannot write responses: {0}")]
    Write(io::Error),
    #[error("cannot read responses: {0}")]
    Read(io::Error),
    #[error("`{}` is not a part of responses: {reason}", path.display())]
    Invalid { path: PathBuf, reason: String },
    #[error(transparent)]
    Manifest(#[from] ManifestError),
    #[error("folder `{}` has no list of parts in its manifest; run the regenerate stage first", .0.display())]
    NoParts(PathBuf),
    #[error("`{}` and the parts before it do not have the same {field}; use `drafthorse run RECIPE --restart regenerate`", path.display())]
    MixedProvenance { path: PathBuf, field: &'static str },
}

/// The file of part `index` of a folder.
pub fn part_name(index: usize) -> String {
    format!("part-{index:05}.parquet")
}

/// Writes the rows as part `index` of a folder, in one step, and returns the name of the file.
///
/// # Errors
/// When the folder cannot be written to, or a token id or turn is above 2³¹ − 1.
pub fn write_part(folder: &Path, index: usize, rows: &[Response], provenance: &Provenance) -> Result<String, ResponseError> {
    let name = part_name(index);
    write_rows(&folder.join(&name), &rows.iter().collect::<Vec<_>>(), provenance)?;
    Ok(name)
}

/// Writes rows in the form of a part under any name, in one step.
///
/// # Errors
/// As [`write_part`].
pub fn write_rows(path: &Path, rows: &[&Response], provenance: &Provenance) -> Result<(), ResponseError> {
    let bytes = encode(rows, provenance).map_err(|reason| ResponseError::Invalid { path: path.into(), reason })?;
    write_atomically(path, &bytes).map_err(ResponseError::Write)
}

/// Reads one part.
///
/// # Errors
/// When the file is absent, is not Parquet, lacks a column or a metadata key, or has a value out of range.
pub fn read_part(path: &Path) -> Result<(Provenance, Vec<Response>), ResponseError> {
    let file = File::open(path).map_err(|error| ResponseError::Read(name_path(path, &error)))?;
    decode(file).map_err(|reason| ResponseError::Invalid { path: path.into(), reason })
}

/// Reads the parts that the folder's manifest lists, in its order. Files it does not list are ignored.
///
/// # Errors
/// When there is no manifest or it lists no parts, a part cannot be read, or parts differ in provenance.
pub fn read_folder(folder: &Path) -> Result<Vec<Response>, ResponseError> {
    let manifest = Manifest::read(folder)?;
    let listed = manifest.as_ref().and_then(|manifest| manifest.results.get(PARTS)).and_then(Value::as_array);
    let names: Option<Vec<&str>> = listed.and_then(|parts| parts.iter().map(Value::as_str).collect());
    let mut first: Option<Provenance> = None;
    let mut rows = Vec::new();
    for name in names.ok_or_else(|| ResponseError::NoParts(folder.into()))? {
        let path = folder.join(name);
        let (provenance, part) = read_part(&path)?;
        if let Some(field) = first.as_ref().and_then(|first| first.first_difference(&provenance)) {
            return Err(ResponseError::MixedProvenance { path, field });
        }
        first.get_or_insert(provenance);
        rows.extend(part);
    }
    Ok(rows)
}

impl Provenance {
    fn fields(&self) -> [(&'static str, String); 6] {
        [
            ("target", self.target.clone()),
            ("revision", self.revision.clone()),
            ("tokenizer_hash", self.tokenizer_hash.clone()),
            ("chat_template_hash", self.chat_template_hash.clone()),
            ("sampling", self.sampling.clone()),
            ("schema_version", self.schema_version.to_string()),
        ]
    }

    fn first_difference(&self, other: &Provenance) -> Option<&'static str> {
        let pairs = self.fields().into_iter().zip(other.fields());
        pairs.into_iter().find(|(ours, theirs)| ours.1 != theirs.1).map(|(ours, _)| ours.0)
    }

    fn from_metadata(metadata: Option<&Vec<KeyValue>>) -> Result<Provenance, String> {
        let value = |key: &str| {
            let pair = metadata.and_then(|pairs| pairs.iter().find(|pair| pair.key == key));
            pair.and_then(|pair| pair.value.clone()).ok_or_else(|| format!("its metadata lacks `{key}`"))
        };
        let version = value("schema_version")?;
        let schema_version = version.parse().map_err(|_| format!("its schema version `{version}` is not a number"))?;
        if schema_version > SCHEMA_VERSION {
            return Err(format!("its schema version {version} is newer than {SCHEMA_VERSION}, the newest known here"));
        }
        Ok(Provenance {
            target: value("target")?,
            revision: value("revision")?,
            tokenizer_hash: value("tokenizer_hash")?,
            chat_template_hash: value("chat_template_hash")?,
            sampling: value("sampling")?,
            schema_version,
        })
    }
}

fn encode(rows: &[&Response], provenance: &Provenance) -> Result<Vec<u8>, String> {
    let strings = |text: fn(&Response) -> &str| texts(rows.iter().map(|row| text(row)));
    let turns: Vec<i32> = rows.iter().map(|row| signed(row.turn)).collect::<Result<_, _>>()?;
    let columns: [(&str, ArrayRef); 11] = [
        ("id", strings(|row| &row.id)),
        ("prompt_ids", id_lists(rows.iter().map(|row| row.prompt_ids.as_slice()))?),
        ("response_ids", id_lists(rows.iter().map(|row| row.response_ids.as_slice()))?),
        ("finish_reason", strings(|row| row.finish_reason.name())),
        ("prompt_text", strings(|row| &row.prompt_text)),
        ("response_text", strings(|row| &row.response_text)),
        ("turn", Arc::new(Int32Array::from(turns))),
        ("ids_from", strings(|row| row.ids_from.name())),
        ("source", strings(|row| &row.source)),
        ("temperature", Arc::new(Float64Array::from_iter_values(rows.iter().map(|row| row.temperature)))),
        ("thinking", Arc::new(BooleanArray::from_iter(rows.iter().map(|row| Some(row.thinking))))),
    ];
    let batch = RecordBatch::try_from_iter(columns).map_err(|error| error.to_string())?;
    let metadata = provenance.fields().map(|(key, value)| KeyValue::new(key.to_owned(), value)).to_vec();
    to_parquet(&batch, metadata)
}

fn decode(file: File) -> Result<(Provenance, Vec<Response>), String> {
    let builder = ParquetRecordBatchReaderBuilder::try_new(file).map_err(|error| error.to_string())?;
    let provenance = Provenance::from_metadata(builder.metadata().file_metadata().key_value_metadata())?;
    let reader = builder.build().map_err(|error| error.to_string())?;
    let mut rows = Vec::new();
    for batch in reader {
        decode_batch(&batch.map_err(|error| error.to_string())?, &mut rows)?;
    }
    Ok((provenance, rows))
}

fn decode_batch(batch: &RecordBatch, rows: &mut Vec<Response>) -> Result<(), String> {
    let id = strings(batch, "id")?;
    let prompt_ids: &ListArray = column(batch, "prompt_ids", |array| array.as_list_opt())?;
    let response_ids: &ListArray = column(batch, "response_ids", |array| array.as_list_opt())?;
    let finish_reason = strings(batch, "finish_reason")?;
    let prompt_text = strings(batch, "prompt_text")?;
    let response_text = strings(batch, "response_text")?;
    let turn: &Int32Array = column(batch, "turn", |array| array.as_primitive_opt::<Int32Type>())?;
    let source = strings(batch, "source")?;
    let temperature: &Float64Array = column(batch, "temperature", |array| array.as_primitive_opt::<Float64Type>())?;
    let thinking: &BooleanArray = column(batch, "thinking", |array| array.as_boolean_opt())?;
    let ids_from = batch.column_by_name("ids_from").map(|_| strings(batch, "ids_from")).transpose()?;
    for row in 0..batch.num_rows() {
        let reason = finish_reason.value(row);
        let from = ids_from.map_or(IdsFrom::Engine.name(), |column| column.value(row));
        rows.push(Response {
            id: id.value(row).to_owned(),
            prompt_ids: ids(prompt_ids, row, "prompt_ids")?,
            response_ids: ids(response_ids, row, "response_ids")?,
            finish_reason: FinishReason::from_name(reason)
                .ok_or_else(|| format!("row {row} has the unknown finish reason `{reason}`"))?,
            prompt_text: prompt_text.value(row).to_owned(),
            response_text: response_text.value(row).to_owned(),
            turn: unsigned(turn.value(row), "turn")?,
            ids_from: IdsFrom::from_name(from).ok_or_else(|| format!("row {row} has ids from the unknown place `{from}`"))?,
            source: source.value(row).to_owned(),
            temperature: temperature.value(row),
            thinking: thinking.value(row),
        });
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]
    use super::*;
    use std::collections::BTreeMap;
    use std::fs;

    fn provenance(target: &str) -> Provenance {
        Provenance {
            target: target.into(),
            revision: "main".into(),
            tokenizer_hash: "aa".into(),
            chat_template_hash: "bb".into(),
            sampling: "greedy".into(),
            schema_version: SCHEMA_VERSION,
        }
    }

    fn response(id: &str, response_ids: Vec<u32>) -> Response {
        Response {
            id: id.into(),
            prompt_ids: vec![1, 2_147_483_647],
            response_ids,
            finish_reason: FinishReason::Stop,
            prompt_text: "two\nlines ü".into(),
            response_text: String::new(),
            turn: 3,
            ids_from: IdsFrom::Tokenizer,
            source: "file.jsonl".into(),
            temperature: 0.7,
            thinking: true,
        }
    }

    fn list_parts(folder: &Path, names: &[&str]) {
        let results = serde_json::Map::from_iter([(PARTS.to_owned(), Value::from(names.to_vec()))]);
        Manifest { stage: "regenerate".into(), complete: true, inputs: BTreeMap::new(), results }.write(folder).unwrap();
    }

    #[test]
    fn a_part_comes_back_as_it_was() {
        let folder = tempfile::tempdir().unwrap();
        let mut second = response("b", vec![]);
        (second.finish_reason, second.thinking) = (FinishReason::Length, false);
        let rows = [response("a", vec![5, 6, 7]), second];
        let name = write_part(folder.path(), 12, &rows, &provenance("model")).unwrap();
        assert_eq!(name, "part-00012.parquet");
        let (read_provenance, read_rows) = read_part(&folder.path().join(name)).unwrap();
        assert_eq!((read_provenance, read_rows.as_slice()), (provenance("model"), rows.as_slice()));
        let empty = write_part(folder.path(), 0, &[], &provenance("model")).unwrap();
        assert!(read_part(&folder.path().join(empty)).unwrap().1.is_empty());
    }

    #[test]
    fn a_folder_is_what_its_manifest_lists_in_that_order() {
        let folder = tempfile::tempdir().unwrap();
        assert!(matches!(read_folder(folder.path()), Err(ResponseError::NoParts(_))));
        for (index, id) in ["a", "b", "unlisted"].into_iter().enumerate() {
            write_part(folder.path(), index, &[response(id, vec![1])], &provenance("model")).unwrap();
        }
        list_parts(folder.path(), &["part-00001.parquet", "part-00000.parquet"]);
        let ids: Vec<String> = read_folder(folder.path()).unwrap().into_iter().map(|row| row.id).collect();
        assert_eq!(ids, ["b", "a"]);
        write_part(folder.path(), 1, &[], &provenance("another")).unwrap();
        let error = read_folder(folder.path()).unwrap_err().to_string();
        assert!(error.contains("part-00000.parquet` and the parts before it do not have the same target"), "{error}");
    }

    #[test]
    fn broken_files_are_named() {
        let folder = tempfile::tempdir().unwrap();
        let error = read_part(&folder.path().join("absent.parquet")).unwrap_err().to_string();
        assert!(error.contains("absent.parquet"), "{error}");
        let name = write_part(folder.path(), 0, &[response("a", vec![1])], &provenance("model")).unwrap();
        let path = folder.path().join(name);
        let bytes = fs::read(&path).unwrap();
        fs::write(&path, &bytes[..bytes.len() / 2]).unwrap();
        let error = read_part(&path).unwrap_err().to_string();
        assert!(error.contains("part-00000.parquet` is not a part of responses"), "{error}");
        let too_large = write_part(folder.path(), 0, &[response("a", vec![1 << 31])], &provenance("model"));
        assert!(too_large.unwrap_err().to_string().contains("2147483648"));
        let newer = Provenance { schema_version: SCHEMA_VERSION + 1, ..provenance("model") };
        write_part(folder.path(), 1, &[], &newer).unwrap();
        let error = read_part(&folder.path().join("part-00001.parquet")).unwrap_err().to_string();
        assert!(error.contains("schema version 3 is newer"), "{error}");
    }
}
