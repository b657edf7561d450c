//! What a person or a program sees of training: a report of each step, its numbers for the metrics, and a note of every batch left out.

use std::fs::OpenOptions;
use std::io::{self, Write};
use std::path::Path;

use evaluator::replay::Replay;
use model::ModelConfig;
use serde_json::json;

use crate::batch::{Batch, BlockShape};
use crate::losses::Losses;
use crate::metrics::MetricSink;

/// What a step did, for whoever shows progress.
#[derive(Debug, Clone, PartialEq)]
pub struct StepReport {
    pub step: u64,
    pub steps: u64,
    pub losses: Losses,
    pub gradient_norm: f64,
    pub learning_rate: f64,
    /// Of the step alone, without replay and saving.
    pub seconds: f64,
    /// Clean tokens of all ranks.
    pub tokens_per_second: f64,
    /// The step's floating-point operations (recomputation not counted) a second, as a share of what matrix products reach on this machine.
    pub peak_share: f64,
    /// The largest memory of this process so far (on CUDA: of its tensors on the device).
    pub memory_bytes: Option<u64>,
    /// Present at the steps that replay the hold-out.
    pub replay: Option<Replay>,
    /// Why the step was left out, if it was.
    pub skipped: Option<Skipped>,
}

/// Why a step moves nothing.
#[derive(Debug, Clone, Copy, PartialEq)]
pub enum Skipped {
    NothingSupervised,
    NotFinite { loss: f64, norm: f64 },
}

impl std::fmt::Display for Skipped {
    fn fmt(&self, formatter: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        match self {
            Self::NothingSupervised => write!(formatter, "nothing in it is supervised"),
            Self::NotFinite { loss, norm } => write!(formatter, "not finite: loss {loss}, gradient norm {norm}"),
        }
    }
}

/// Scores a checkpoint's folder, or says why that failed.
pub type Score<'a> = &'a mut dyn FnMut(&Path) -> Result<(), String>;

/// Who is told what. On ranks other than 0 nobody is.
pub struct Watch<'a> {
    /// Metrics; absent on ranks other than 0.
    pub sink: Option<&'a mut dyn MetricSink>,
    /// Sees every step after its metrics were recorded.
    pub report: &'a mut dyn FnMut(&StepReport),
    /// Steps between checkpoints that are scored while training, on every rank, and how to do it, on rank 0.
    pub score_every: Option<u64>,
    pub score: Option<Score<'a>>,
}

impl Watch<'_> {
    /// Whether the checkpoint of `step` is to be scored.
    pub(crate) fn scores_at(&self, step: u64) -> bool {
        self.score_every.is_some_and(|every| step.is_multiple_of(every))
    }

    pub(crate) fn score(&mut self, folder: &Path) -> Result<(), String> {
        self.score.as_mut().map_or(Ok(()), |score| score(folder))
    }

    pub(crate) fn record(&mut self, stage: &str, done: &StepReport) -> io::Result<()> {
        let Some(sink) = &mut self.sink else { return Ok(()) };
        let by_position = |name: &str, values: &[f64]| -> Vec<(String, f64)> {
            values.iter().enumerate().map(|(draft, &value)| (format!("{name}_{}", draft + 1), value)).collect()
        };
        let positions =
            [by_position("loss", &done.losses.diffusion_by_position), by_position("accuracy", &done.losses.accuracy_by_position)];
        let mut values = vec![
            ("loss", done.losses.total),
            ("loss_diffusion", done.losses.diffusion),
            ("loss_autoregressive", done.losses.autoregressive),
            ("gradient_norm", done.gradient_norm),
            ("learning_rate", done.learning_rate),
            ("seconds", done.seconds),
            ("tokens_per_second", done.tokens_per_second),
            ("peak_share", done.peak_share),
            ("skipped", f64::from(u8::from(done.skipped.is_some()))),
        ];
        values.extend(done.memory_bytes.map(|bytes| ("memory_gb", bytes as f64 / 1e9)));
        values.extend(positions.iter().flatten().map(|(name, value)| (name.as_str(), *value)));
        sink.record(stage, done.step, &values)?;
        if let Some(replay) = &done.replay {
            let values = [
                ("replay_tau_pooled", replay.tau_pooled),
                ("replay_tau_low", replay.tau_interval.0),
                ("replay_tau_high", replay.tau_interval.1),
                ("replay_tau_macro", replay.tau_macro),
                ("replay_rounds", replay.rounds as f64),
            ];
            sink.record(stage, done.step, &values)?;
        }
        Ok(())
    }
}

/// Adds a line to the file of steps that were left out: the step, why, and the responses of all ranks.
pub(crate) fn write_skipped<'a>(
    path: &Path,
    stage: &str,
    step: u64,
    why: &Skipped,
    responses: impl Iterator<Item = &'a str>,
) -> io::Result<()> {
    let line = json!({"stage": stage, "step": step, "reason": why.to_string(), "responses": responses.collect::<Vec<_>>()});
    let mut file = OpenOptions::new().create(true).append(true).open(path)?;
    file.write_all(format!("{line}\n").as_bytes())
}

/// Floating-point operations of a batch's forward and backward: two for each multiply-add, the backward twice the forward.
pub fn operations(config: &ModelConfig, batch: &Batch, shape: BlockShape) -> f64 {
    let in_layer: i64 =
        config.layer_shapes().iter().filter(|(_, shape)| shape.len() == 2).map(|(_, shape)| shape[0] * shape[1]).sum();
    let layers = config.num_hidden_layers as f64 * in_layer as f64 * batch.ids.len() as f64;
    let labelled = (batch.diffusion.len() + batch.autoregressive.len()) as f64;
    let head = config.vocab_size as f64 * config.hidden_size as f64 * labelled;
    let block = shape.block_size as f64;
    let pairs: f64 = batch
        .sequences
        .iter()
        .map(|sequence| {
            let clean = sequence.clean as f64;
            clean * (clean + 1.0) / 2.0 + sequence.anchors.iter().map(|&anchor| block * (anchor as f64 + block)).sum::<f64>()
        })
        .sum();
    // Queries with keys, then weights with values.
    let attention = 2.0 * pairs * (config.num_attention_heads * config.head_dim) as f64 * config.num_hidden_layers as f64;
    6.0 * (layers + head + attention)
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]
    use super::*;
    use configs::Labels;
    use data::supervision::Example;

    #[test]
    fn operations_of_known_counts() {
        let config = ModelConfig::from_json(&json!({
            "model_type": "llama", "hidden_size": 4, "intermediate_size": 6, "num_hidden_layers": 2, "num_attention_heads": 2,
            "num_key_value_heads": 1, "head_dim": 2, "vocab_size": 10, "tie_word_embeddings": true,
        }))
        .unwrap();
        let example = Example::after_prompt(vec![1, 2, 3, 4], 1);
        let shape = BlockShape { block_size: 2, mask_token: 9, labels: Labels::Next, anchor_sees_block: true };
        let batch = Batch::pack(&[(&example, vec![1])], shape, 4.0);
        // A layer has 4·4 + 2·(2·4) + 4·4 + 3·(6·4) = 120 weights in products; 4 clean rows and 2 of the block; 3 clean labels and 2 slots'.
        // Pairs: 10 clean, 2 rows of the block see 1 + 2.
        let expected = 6.0 * (2.0 * 120.0 * 6.0 + 10.0 * 4.0 * 5.0 + 2.0 * 16.0 * 4.0 * 2.0);
        assert_eq!(operations(&config, &batch, shape), expected);
    }
}
