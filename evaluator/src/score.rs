//! What an evaluation leaves on disk: a score (JSON) for tables and comparisons, and every round (Parquet) for whoever looks closer.

use std::collections::BTreeMap;
use std::fs::{self, File};
use std::path::{Path, PathBuf};
use std::sync::Arc;

use arrow_array::cast::AsArray;
use arrow_array::types::{Float64Type, Int64Type};
use arrow_array::{Array, ArrayRef, Float64Array, Int64Array, RecordBatch, StringArray};
use data::files::write_atomically;
use parquet::arrow::ArrowWriter;
use parquet::arrow::arrow_reader::ParquetRecordBatchReaderBuilder;
use parquet::basic::{Compression, ZstdLevel};
use parquet::file::properties::WriterProperties;
use serde::{Deserialize, Serialize};

use crate::budget::Resolved;
use crate::calibration::Calibration;
use crate::fan_out::Lookup;
use crate::rounds::Round;
use crate::simulated::Simulated;

/// One checkpoint's figures. Fields that do not apply are absent from the file.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct Score {
    pub checkpoint: String,
    pub kind: String,
    pub target: String,
    /// Whether the target thought before it answered; absent from old files.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub thinking: Option<bool>,
    pub dtype: String,
    /// The drafter's. Empty in old files.
    #[serde(default)]
    pub drafter_dtype: String,
    pub block_size: usize,
    pub layers: usize,
    /// Of the drafter.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub parameters: Option<u64>,
    /// What was drafted ahead, in words, such as `best_first, 9 blocks (auto)`.
    #[serde(default)]
    pub fan_out: String,
    /// What a budget that is not a number of blocks came to, with the times measured for it.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub budget: Option<Resolved>,
    /// What held-out responses say about the drafter's probabilities; absent where there are none.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub calibration: Option<Calibration>,
    /// By fan-out (`rectangle`, `geometric`, `best_first`): how often rounds on held-out responses would find their draft ready.
    #[serde(default, skip_serializing_if = "BTreeMap::is_empty")]
    pub hit_rate_by_blocks: BTreeMap<String, Vec<HitRateAt>>,
    /// Texts decoded side by side.
    #[serde(default = "one")]
    pub concurrency: usize,
    /// The target's temperature; 0 is greedy.
    #[serde(default)]
    pub temperature: f64,
    /// The rest of how tokens were chosen and how many: top-p, top-k, seed, new tokens at most. Empty in old files.
    #[serde(default)]
    pub sampling: String,
    /// How drafted tokens were chosen: `point` or `sampled`. Where they are sampled, texts are not compared with the autoregressive
    /// decoder's, with which they agree in distribution only.
    #[serde(default = "point")]
    pub drafts: String,
    /// By decoder: `autoregressive`, `lockstep`, `asynchronous`.
    pub decoders: BTreeMap<String, DecoderScore>,
}

fn one() -> usize {
    1
}

fn point() -> String {
    "point".to_string()
}

/// The hit rate of a fan-out of one size.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct HitRateAt {
    /// Continuations of a round at most.
    pub blocks: usize,
    /// In words; a rectangle may not use all of its blocks.
    pub fan_out: String,
    pub hit_rate: f64,
    /// Rounds that it rests on.
    pub rounds: usize,
}

/// One decoder's figures.
#[derive(Debug, Clone, PartialEq, Default, Serialize, Deserialize)]
pub struct DecoderScore {
    pub benchmarks: BTreeMap<String, BenchmarkScore>,
}

/// One decoder's figures on one benchmark.
#[derive(Debug, Clone, PartialEq, Default, Serialize, Deserialize)]
pub struct BenchmarkScore {
    pub prompts: usize,
    /// Response tokens, the first ones included.
    pub tokens: usize,
    pub rounds: usize,
    pub tau_pooled: f64,
    pub tau_macro: f64,
    /// Intervals here hold 95 %, by bootstrap over the prompts: how far a figure would move with other prompts of the same kind.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub tau_interval: Option<(f64, f64)>,
    /// Tokens after the first, over the time after the prefill.
    pub tokens_per_second: f64,
    /// Over the autoregressive decoder's tokens per second.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub speedup: Option<f64>,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub speedup_interval: Option<(f64, f64)>,
    /// Seconds of a round in units of a round of the autoregressive decoder.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub round_cost: Option<f64>,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub hit_rate: Option<f64>,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub identical_to_autoregressive: Option<bool>,
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub acceptance_by_position: Vec<f64>,
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub accepted_histogram: Vec<usize>,
    /// Rounds whose draft was not ready, by cause.
    #[serde(default, skip_serializing_if = "BTreeMap::is_empty")]
    pub misses: BTreeMap<Lookup, usize>,
    /// Tokens committed per round by rounds that found their draft ready, and by those that did not.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub tau_after_hit: Option<f64>,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub tau_after_miss: Option<f64>,
    /// Sums over all prompts.
    #[serde(default)]
    pub prefill_seconds: f64,
    #[serde(default)]
    pub draft_seconds: f64,
    #[serde(default)]
    pub pack_seconds: f64,
    #[serde(default)]
    pub verify_seconds: f64,
    #[serde(default)]
    pub wait_seconds: f64,
    /// How long the drafter stood still.
    #[serde(default)]
    pub bubble_seconds: f64,
    /// The most memory in use at once until the end of this benchmark, in bytes, of the process (CPU) or device.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub peak_memory_bytes: Option<u64>,
    /// Of the token ids of all prompts: scores with the same one are of the same prompts in the same order.
    #[serde(default, skip_serializing_if = "String::is_empty")]
    pub prompts_hash: String,
    /// What each prompt gave, its turns together: what comparisons pair.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub by_prompt: Vec<PromptFigures>,
    /// How many of the divergences are near-ties; the others are faults.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub near_ties: Option<usize>,
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub first_divergences: Vec<Divergence>,
    /// What the same rounds would take elsewhere, by hardware profile. Nothing of it was measured; everything above was.
    #[serde(default, skip_serializing_if = "BTreeMap::is_empty")]
    pub simulated: BTreeMap<String, Simulated>,
}

/// What a decoder did with one prompt.
#[derive(Debug, Clone, Copy, PartialEq, Default, Serialize, Deserialize)]
pub struct PromptFigures {
    pub rounds: usize,
    /// By rounds; the first token of a text comes from the prefill.
    pub committed: usize,
    /// Of decoding, without the prefill; a forward that several texts shared is shared out evenly.
    pub seconds: f64,
}

/// Where a text first differs from the autoregressive decoder's.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct Divergence {
    pub prompt: usize,
    /// Index in the response.
    pub position: usize,
    /// The autoregressive decoder's token there, and this decoder's; absent where a text had ended.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub expected: Option<u32>,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub found: Option<u32>,
    /// By how much the target prefers its best token to the worse of these two; absent where that one was left out by top-k or top-p.
    #[serde(default)]
    pub margin: Option<f64>,
    /// By how much the target's scores there move with the number of rows in a forward, measured.
    #[serde(default)]
    pub noise: f64,
    /// Whether that can have turned the choice round. In f32 it never counts as an excuse.
    pub near_tie: bool,
}

/// A round with the run it belongs to: one row of the Parquet file.
#[derive(Debug, Clone, PartialEq)]
pub struct RoundRow {
    pub decoder: String,
    pub benchmark: String,
    pub round: Round,
}

/// What can go wrong with score files.
#[derive(Debug, thiserror::Error)]
pub enum ScoreError {
    #[error("cannot write a score: {0}")]
    Write(std::io::Error),
    #[error("cannot read `{path}`: {reason}")]
    Read { path: PathBuf, reason: String },
}

impl Score {
    /// Writes the score as JSON; whole or not at all.
    pub fn write(&self, path: &Path) -> Result<(), ScoreError> {
        let mut json = serde_json::to_vec_pretty(self).map_err(|error| ScoreError::Write(error.into()))?;
        json.push(b'\n');
        write_atomically(path, &json).map_err(ScoreError::Write)
    }

    /// Reads a score.
    pub fn read(path: &Path) -> Result<Self, ScoreError> {
        let failed = |reason: String| ScoreError::Read { path: path.into(), reason };
        let bytes = fs::read(path).map_err(|error| failed(error.to_string()))?;
        serde_json::from_slice(&bytes).map_err(|error| failed(format!("it is not a score: {error}")))
    }
}

type Count = (&'static str, fn(&Round) -> usize, fn(&mut Round, usize));
type Time = (&'static str, fn(&Round) -> f64, fn(&mut Round, f64));

/// The columns of counts and of times, each with how it is read from a round and put into one.
const COUNTS: [Count; 11] = [
    ("prompt", |it| it.prompt, |it, value| it.prompt = value),
    ("turn", |it| it.turn, |it, value| it.turn = value),
    ("round", |it| it.round, |it, value| it.round = value),
    ("drafted", |it| it.drafted, |it, value| it.drafted = value),
    ("proposed", |it| it.proposed, |it, value| it.proposed = value),
    ("accepted", |it| it.accepted, |it, value| it.accepted = value),
    ("committed", |it| it.committed, |it, value| it.committed = value),
    ("next", |it| it.next as usize, |it, value| it.next = value as u32),
    ("lanes", |it| it.lanes, |it, value| it.lanes = value),
    ("context", |it| it.context, |it, value| it.context = value),
    ("pack_blocks", |it| it.pack_blocks, |it, value| it.pack_blocks = value),
];
const TIMES: [Time; 8] = [
    ("draft_start", |it| it.draft_start, |it, value| it.draft_start = value),
    ("draft_seconds", |it| it.draft_seconds, |it, value| it.draft_seconds = value),
    ("pack_start", |it| it.pack_start, |it, value| it.pack_start = value),
    ("pack_seconds", |it| it.pack_seconds, |it, value| it.pack_seconds = value),
    ("verify_start", |it| it.verify_start, |it, value| it.verify_start = value),
    ("bubble_seconds", |it| it.bubble_seconds, |it, value| it.bubble_seconds = value),
    ("verify_seconds", |it| it.verify_seconds, |it, value| it.verify_seconds = value),
    ("wait_seconds", |it| it.wait_seconds, |it, value| it.wait_seconds = value),
];

/// Writes one row a round; whole or not at all. `lookup` is null for decoders that do not draft ahead.
pub fn write_rounds(path: &Path, rows: &[RoundRow]) -> Result<(), ScoreError> {
    let lookups: StringArray = rows.iter().map(|row| row.round.lookup.map(Lookup::name)).collect();
    let mut columns: Vec<(&str, ArrayRef, bool)> = vec![
        ("decoder", Arc::new(StringArray::from_iter_values(rows.iter().map(|row| &row.decoder))), false),
        ("benchmark", Arc::new(StringArray::from_iter_values(rows.iter().map(|row| &row.benchmark))), false),
        ("lookup", Arc::new(lookups), true),
    ];
    for (name, get, _) in COUNTS {
        columns.push((name, Arc::new(Int64Array::from_iter_values(rows.iter().map(|row| get(&row.round) as i64))), false));
    }
    for (name, get, _) in TIMES {
        columns.push((name, Arc::new(Float64Array::from_iter_values(rows.iter().map(|row| get(&row.round)))), false));
    }
    let encode = || -> Result<Vec<u8>, parquet::errors::ParquetError> {
        let batch = RecordBatch::try_from_iter_with_nullable(columns)?;
        let compression = Compression::ZSTD(ZstdLevel::default());
        let properties = WriterProperties::builder().set_compression(compression).build();
        let mut bytes = Vec::new();
        let mut writer = ArrowWriter::try_new(&mut bytes, batch.schema(), Some(properties))?;
        writer.write(&batch)?;
        writer.close()?;
        Ok(bytes)
    };
    let bytes = encode().map_err(|error| ScoreError::Write(std::io::Error::other(error)))?;
    write_atomically(path, &bytes).map_err(ScoreError::Write)
}

/// Reads what [`write_rounds`] wrote.
pub fn read_rounds(path: &Path) -> Result<Vec<RoundRow>, ScoreError> {
    let failed = |reason: String| ScoreError::Read { path: path.into(), reason };
    let file = File::open(path).map_err(|error| failed(error.to_string()))?;
    let reader = ParquetRecordBatchReaderBuilder::try_new(file).and_then(|builder| builder.build());
    let mut rows = Vec::new();
    for batch in reader.map_err(|error| failed(error.to_string()))? {
        decode_batch(&batch.map_err(|error| failed(error.to_string()))?, &mut rows).map_err(failed)?;
    }
    Ok(rows)
}

fn decode_batch(batch: &RecordBatch, rows: &mut Vec<RoundRow>) -> Result<(), String> {
    let column = |name: &str| batch.column_by_name(name).ok_or_else(|| format!("column `{name}` is missing"));
    let strings = |name: &str| column(name)?.as_string_opt::<i32>().ok_or_else(|| format!("column `{name}` is not text"));
    let (decoder, benchmark, lookup) = (strings("decoder")?, strings("benchmark")?, strings("lookup")?);
    let first = rows.len();
    for row in 0..batch.num_rows() {
        let name = (!lookup.is_null(row)).then(|| lookup.value(row));
        let unknown = |name: &str| format!("row {row} has the unknown lookup `{name}`");
        rows.push(RoundRow {
            decoder: decoder.value(row).to_string(),
            benchmark: benchmark.value(row).to_string(),
            round: Round {
                lookup: name.map(|name| Lookup::from_name(name).ok_or_else(|| unknown(name))).transpose()?,
                ..Round::default()
            },
        });
    }
    for (name, _, set) in COUNTS {
        let values = column(name)?.as_primitive_opt::<Int64Type>().ok_or_else(|| format!("column `{name}` is not int64"))?;
        for (row, &value) in rows[first..].iter_mut().zip(values.values()) {
            set(&mut row.round, usize::try_from(value).map_err(|_| format!("column `{name}` has the negative value {value}"))?);
        }
    }
    for (name, _, set) in TIMES {
        let values = column(name)?.as_primitive_opt::<Float64Type>().ok_or_else(|| format!("column `{name}` is not float64"))?;
        for (row, &value) in rows[first..].iter_mut().zip(values.values()) {
            set(&mut row.round, value);
        }
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]
    use super::*;
    use serde_json::{Value, json};

    fn score() -> Score {
        let figures = BenchmarkScore { prompts: 2, tokens: 9, rounds: 3, tau_pooled: 2.5, ..BenchmarkScore::default() };
        let asynchronous = BenchmarkScore {
            speedup: Some(1.5),
            hit_rate: Some(0.75),
            identical_to_autoregressive: Some(true),
            misses: BTreeMap::from([(Lookup::WrongCandidate, 4)]),
            ..figures.clone()
        };
        let decoder = |figures| DecoderScore { benchmarks: BTreeMap::from([("stories".to_string(), figures)]) };
        Score {
            checkpoint: "layers-29".to_string(),
            kind: "d3d".to_string(),
            target: "small".to_string(),
            thinking: Some(false),
            dtype: "f32".to_string(),
            drafter_dtype: "bf16".to_string(),
            block_size: 8,
            layers: 29,
            parameters: Some(131_000_000),
            fan_out: "rectangle, 11 × 2".to_string(),
            budget: None,
            calibration: Some(Calibration {
                responses: 3,
                blocks: 60,
                temperatures: vec![1.0, 1.5],
                acceptance: 0.5,
                rank_exponent: 0.75,
            }),
            hit_rate_by_blocks: BTreeMap::from([(
                "rectangle".to_string(),
                vec![HitRateAt { blocks: 3, fan_out: "rectangle, 1 × 2".to_string(), hit_rate: 0.25, rounds: 12 }],
            )]),
            concurrency: 1,
            temperature: 0.0,
            sampling: String::new(),
            drafts: "point".to_string(),
            decoders: BTreeMap::from([
                ("autoregressive".to_string(), decoder(figures)),
                ("asynchronous".to_string(), decoder(asynchronous)),
            ]),
        }
    }

    #[test]
    fn names_are_the_contracts_and_absent_fields_are_absent() {
        let json: Value = serde_json::to_value(score()).unwrap();
        assert_eq!((&json["checkpoint"], &json["kind"], &json["layers"]), (&json!("layers-29"), &json!("d3d"), &json!(29)));
        let asynchronous = &json["decoders"]["asynchronous"]["benchmarks"]["stories"];
        for name in ["prompts", "tokens", "rounds", "tau_pooled", "tau_macro", "tokens_per_second", "speedup", "hit_rate"] {
            assert!(asynchronous[name].is_number(), "{name}");
        }
        assert_eq!(asynchronous["identical_to_autoregressive"], json!(true));
        assert_eq!(asynchronous["misses"], json!({"wrong_candidate": 4}));
        let autoregressive = json["decoders"]["autoregressive"]["benchmarks"]["stories"].as_object().unwrap();
        for name in ["speedup", "hit_rate", "identical_to_autoregressive", "near_ties", "first_divergences"] {
            assert!(!autoregressive.contains_key(name), "{name}");
        }
    }

    #[test]
    fn a_score_is_read_back_and_a_broken_one_is_refused() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("score.json");
        score().write(&path).unwrap();
        assert_eq!(Score::read(&path).unwrap(), score());
        fs::write(&path, "{\"checkpoint\": 1}").unwrap();
        let message = Score::read(&path).unwrap_err().to_string();
        assert!(message.contains("score.json") && message.contains("not a score"), "{message}");
    }

    #[test]
    fn rounds_are_read_back() {
        let round = Round {
            prompt: 1,
            turn: 1,
            lanes: 4,
            context: 99,
            pack_blocks: 23,
            bubble_seconds: 0.8,
            round: 2,
            drafted: 7,
            proposed: 15,
            accepted: 3,
            committed: 4,
            next: 49_000,
            lookup: Some(Lookup::BeyondPositions),
            draft_start: 0.1,
            draft_seconds: 0.2,
            pack_start: 0.3,
            pack_seconds: 0.4,
            verify_start: 0.5,
            verify_seconds: 0.6,
            wait_seconds: 0.7,
        };
        let row = |decoder: &str, round| RoundRow { decoder: decoder.to_string(), benchmark: "stories".to_string(), round };
        let rows = [row("asynchronous", round), row("lockstep", Round { committed: 1, ..Round::default() })];
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("score.rounds.parquet");
        write_rounds(&path, &rows).unwrap();
        assert_eq!(read_rounds(&path).unwrap(), rows);
        write_rounds(&path, &[]).unwrap();
        assert_eq!(read_rounds(&path).unwrap(), []);
        fs::write(&path, "not parquet").unwrap();
        assert!(read_rounds(&path).unwrap_err().to_string().contains("score.rounds.parquet"));
    }
}
