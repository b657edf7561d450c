//! The training loop: batches by counter, forward and backward, clip, step, measure, save. Recovery after pruning is the same loop with
//! another objective.

use std::fs;
use std::io;
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Instant;

use data::supervision::{Example, draw_anchors, epoch_order};
use evaluator::drafter::Drafter;
use evaluator::replay::{Replay, replay};
use model::Transformer;
use model::checkpoint::{self, CheckpointError, DrafterFile, LATEST, TextFiles};
use tch::Kind;
use torch::TorchError;

use crate::backward::{LossSettings, Losses, Objective, forward_backward};
use crate::batch::{Batch, BlockShape};
use crate::metrics::MetricSink;
use crate::optimiser::{AdamW, AdamWSettings, gradient_norm, learning_rate};
use crate::parameters::Parameters;
use crate::state::{self, Progress, StateError};

/// Responses whose next blocks are drafted in one forward when the hold-out is replayed.
const REPLAY_LANES: usize = 16;

/// Steps with a loss or gradient that is not finite, after which training gives up.
const SKIPPED_LIMIT: u64 = 20;

/// Everything that decides what the loop computes.
#[derive(Debug, Clone, PartialEq)]
pub struct Plan {
    /// Names the metrics: `train`, `recover-29`.
    pub stage: String,
    pub seed: u64,
    pub steps: u64,
    pub batch_responses: usize,
    /// Blocks drawn from each response.
    pub anchors: usize,
    pub gamma: f64,
    pub shape: BlockShape,
    pub loss: LossSettings,
    pub optimiser: AdamWSettings,
    pub learning_rate: f64,
    /// The mask row's own peak; far more than the others', it finds its place before the weights have moved much.
    pub mask_learning_rate: f64,
    /// Share of the steps.
    pub warmup: f64,
    /// Share of the peak learning rate.
    pub minimum_learning_rate: f64,
    /// Largest gradient norm.
    pub clip: f64,
    pub save_every: u64,
    pub evaluate_every: u64,
    /// Checkpoints kept, the untrained one not counted.
    pub keep_last: usize,
    /// Compute kind of forward and backward, and of the stored weights.
    pub kind: Kind,
}

/// Where checkpoints go and what stands in them beside weights.
pub struct Output<'a> {
    pub folder: &'a Path,
    /// `step` and `layers` are filled in at each save; `training_tokens` are those before this training, and each save adds its own.
    pub drafter: DrafterFile,
    pub files: &'a TextFiles,
}

/// What a step did, for whoever shows progress.
#[derive(Debug, Clone, PartialEq)]
pub struct StepReport {
    pub step: u64,
    pub steps: u64,
    pub losses: Losses,
    pub gradient_norm: f64,
    pub learning_rate: f64,
    pub seconds: f64,
    pub tokens_per_second: f64,
    /// Present at the steps that replay the hold-out.
    pub replay: Option<Replay>,
    /// Whether the step was left out because its loss or gradient was not finite.
    pub skipped: bool,
}

/// How the loop ended.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Ending {
    Done,
    /// Stopped on request after this step, with everything saved.
    Stopped {
        step: u64,
    },
}

/// Why training cannot go on.
#[derive(Debug, thiserror::Error)]
pub enum TrainError {
    #[error("there is no response to train on; lower `data.holdout` or give more prompts")]
    NoExamples,
    #[error("mask token {mask_token} lies beyond the drafter's {rows} embedding rows; choose `drafter.mask_token` below it")]
    MaskToken { mask_token: u32, rows: i64 },
    #[error(
        "{count} steps had a loss or gradient that is not finite, the last at step {step} with responses {responses:?}; lower `learning_rate`"
    )]
    NotFinite { count: u64, step: u64, responses: Vec<usize> },
    #[error("cannot write `{path}`: {source}")]
    Write { path: PathBuf, source: io::Error },
    #[error(transparent)]
    Checkpoint(#[from] CheckpointError),
    #[error(transparent)]
    State(#[from] StateError),
    #[error(transparent)]
    Decode(#[from] evaluator::decode::DecodeError),
    #[error(transparent)]
    Torch(#[from] TorchError),
}

/// The name of a step's checkpoint folder.
pub fn step_name(step: u64) -> String {
    format!("step-{step:06}")
}

/// The steps of the whole checkpoints in a folder, ascending.
pub fn saved_steps(folder: &Path) -> Vec<u64> {
    let entries = fs::read_dir(folder).into_iter().flatten().flatten();
    let mut steps: Vec<u64> =
        entries.filter_map(|entry| entry.file_name().to_str()?.strip_prefix("step-")?.parse().ok()).collect();
    steps.sort_unstable();
    steps
}

/// The step that training in `folder` goes on after; 0 when it has no state to go on from.
///
/// # Errors
/// A checkpoint with a state whose description cannot be read.
pub fn resumed_step(folder: &Path) -> Result<u64, CheckpointError> {
    let latest = folder.join(LATEST);
    if latest.join(state::FOLDER).exists() { Ok(checkpoint::load_drafter_file(&latest)?.step) } else { Ok(0) }
}

/// Trains `start` (or goes on from the latest checkpoint with a state in `output.folder`) to the end of the plan.
///
/// Saves at `save_every`, at the end and when `stop` is set; `report` sees every step after its metrics were recorded.
///
/// # Errors
/// See [`TrainError`]; whatever was saved before stays valid.
#[allow(clippy::too_many_arguments)]
pub fn train(
    start: &Transformer,
    plan: &Plan,
    examples: &[Example],
    held_out: &[Example],
    objective: &Objective<'_>,
    output: &Output<'_>,
    sink: &mut dyn MetricSink,
    report: &mut dyn FnMut(&StepReport),
    stop: &AtomicBool,
) -> Result<Ending, TrainError> {
    if examples.is_empty() {
        return Err(TrainError::NoExamples);
    }
    let rows = start.config.vocab_size;
    if i64::from(plan.shape.mask_token) >= rows {
        return Err(TrainError::MaskToken { mask_token: plan.shape.mask_token, rows });
    }
    let (mut parameters, mut optimiser) = torch::guarded("allocating the training state", || {
        let parameters = Parameters::new(start, plan.kind);
        let optimiser = AdamW::new(&parameters.master, plan.optimiser, parameters.decayed());
        (parameters, optimiser)
    })?;
    optimiser.boost(parameters.embedding_row(plan.shape.mask_token), plan.mask_learning_rate / plan.learning_rate);
    let latest = output.folder.join(LATEST);
    let mut progress = if latest.join(state::FOLDER).exists() {
        state::load(&latest, &mut parameters, &optimiser)?
    } else {
        Progress::default()
    };
    while progress.step < plan.steps {
        let started = Instant::now();
        let step = progress.step + 1;
        let (batch, responses) = batch_of(plan, examples, step);
        let _ = parameters.gradient.zero_();
        let losses = torch::guarded("training", || forward_backward(&parameters, &batch, plan.shape, objective, plan.loss))?;
        let norm = gradient_norm(&parameters.gradient);
        let rate = learning_rate(plan.learning_rate, step, plan.steps, plan.warmup, plan.minimum_learning_rate);
        let skipped = !losses.total.is_finite() || !norm.is_finite();
        if skipped {
            progress.skipped += 1;
            if progress.skipped >= SKIPPED_LIMIT {
                return Err(TrainError::NotFinite { count: progress.skipped, step, responses });
            }
        } else {
            let scale = if norm > plan.clip { plan.clip / norm } else { 1.0 };
            optimiser.step(&parameters.master, &parameters.gradient, step, rate, scale);
            parameters.refresh();
        }
        progress.step = step;
        progress.training_tokens += batch.clean_tokens as u64;
        let seconds = started.elapsed().as_secs_f64();
        let tokens_per_second = batch.clean_tokens as f64 / seconds;
        let last = step == plan.steps;
        let replayed = if !held_out.is_empty() && (step % plan.evaluate_every == 0 || last) {
            Some(replay(&drafter_of(&parameters.model, plan.shape), held_out, REPLAY_LANES)?)
        } else {
            None
        };
        let done = StepReport {
            step,
            steps: plan.steps,
            losses,
            gradient_norm: norm,
            learning_rate: rate,
            seconds,
            tokens_per_second,
            replay: replayed,
            skipped,
        };
        record(sink, &plan.stage, &done)
            .map_err(|source| TrainError::Write { path: output.folder.join("metrics.jsonl"), source })?;
        report(&done);
        let stopping = stop.load(Ordering::Relaxed);
        if step % plan.save_every == 0 || last || stopping {
            save(plan, output, &parameters, &optimiser, &progress)?;
        }
        if stopping && !last {
            return Ok(Ending::Stopped { step });
        }
    }
    Ok(Ending::Done)
}

/// A drafter that computes with these weights, sharing them.
pub fn drafter_of(model: &Transformer, shape: BlockShape) -> Drafter {
    let BlockShape { block_size, mask_token, labels, anchor_sees_block } = shape;
    Drafter { model: model.shallow_clone(), block_size, mask_token, labels, anchor_sees_block }
}

/// The responses and anchors of a step: a function of seed and step alone.
fn batch_of(plan: &Plan, examples: &[Example], step: u64) -> (Batch, Vec<usize>) {
    let count = examples.len() as u64;
    let first = (step - 1) * plan.batch_responses as u64;
    let mut order = (u64::MAX, Vec::new());
    let mut indices = Vec::new();
    let mut responses = Vec::new();
    for position in first..first + plan.batch_responses as u64 {
        let epoch = position / count;
        if order.0 != epoch {
            order = (epoch, epoch_order(examples.len(), plan.seed, epoch));
        }
        let index = order.1[(position % count) as usize];
        let anchors = draw_anchors(&examples[index], plan.anchors, plan.seed, epoch, index as u64);
        responses.push((&examples[index], anchors));
        indices.push(index);
    }
    (Batch::pack(&responses, plan.shape, plan.gamma), indices)
}

fn record(sink: &mut dyn MetricSink, stage: &str, done: &StepReport) -> io::Result<()> {
    let position_names: Vec<String> =
        (1..=done.losses.accuracy_by_position.len()).map(|draft| format!("accuracy_{draft}")).collect();
    let mut values = vec![
        ("loss", done.losses.total),
        ("loss_diffusion", done.losses.diffusion),
        ("loss_autoregressive", done.losses.autoregressive),
        ("gradient_norm", done.gradient_norm),
        ("learning_rate", done.learning_rate),
        ("seconds", done.seconds),
        ("tokens_per_second", done.tokens_per_second),
        ("skipped", f64::from(u8::from(done.skipped))),
    ];
    values.extend(position_names.iter().map(String::as_str).zip(done.losses.accuracy_by_position.iter().copied()));
    sink.record(stage, done.step, &values)?;
    if let Some(replay) = &done.replay {
        let values = [
            ("replay_tau_pooled", replay.tau_pooled),
            ("replay_tau_macro", replay.tau_macro),
            ("replay_rounds", replay.rounds as f64),
        ];
        sink.record(stage, done.step, &values)?;
    }
    Ok(())
}

/// Saves the step's checkpoint, moves `latest` to it, then clears what `keep_last` no longer keeps.
fn save(
    plan: &Plan,
    output: &Output<'_>,
    parameters: &Parameters,
    optimiser: &AdamW,
    progress: &Progress,
) -> Result<(), TrainError> {
    let name = step_name(progress.step);
    let drafter = DrafterFile {
        step: progress.step,
        training_tokens: output.drafter.training_tokens + progress.training_tokens,
        layers: parameters.model.layers.len(),
        ..output.drafter.clone()
    };
    let extra = |folder: &Path| state::save(folder, parameters, optimiser, progress);
    checkpoint::save(&output.folder.join(&name), &parameters.model, &drafter, output.files, plan.kind, extra)?;
    checkpoint::point_latest(output.folder, &name)?;
    let steps: Vec<u64> = saved_steps(output.folder).into_iter().filter(|&step| step > 0 && step < progress.step).collect();
    let kept = plan.keep_last.saturating_sub(1);
    for (index, &step) in steps.iter().enumerate() {
        // Only the latest checkpoint is ever resumed, so the older ones' optimiser state is dead weight.
        let folder = output.folder.join(step_name(step));
        let dropped = if index + kept < steps.len() { folder } else { folder.join(state::FOLDER) };
        if dropped.exists() {
            fs::remove_dir_all(&dropped).map_err(|source| TrainError::Write { path: dropped, source })?;
        }
    }
    Ok(())
}
