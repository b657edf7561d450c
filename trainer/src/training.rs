//! The training loop: batches by counter, forward and backward, clip, step, measure, save. Recovery after pruning is the same loop with
//! another objective; many ranks run the same loop in step, each on its share.

use std::io;
use std::path::PathBuf;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::mpsc::{Receiver, sync_channel};
use std::time::Instant;

use data::files::sha256_hex;
use data::supervision::Example;
use evaluator::drafter::Drafter;
use evaluator::replay::{Replay, replay};
use model::checkpoint::CheckpointError;
use model::{ModelConfig, Transformer};
use tch::{Device, Kind, Tensor};
use torch::TorchError;
use torch::group::{Group, GroupError};
use torch::memory::{matrix_rate, peak_memory_bytes};

use crate::backward::{LossSettings, Objective, forward_backward};
use crate::batch::BlockShape;
use crate::losses::{LossSums, Losses};
use crate::optimiser::{AdamW, AdamWSettings, Schedule, squared_norm};
use crate::packing::{Packing, StepBatches, step_batches};
use crate::parameters::Parameters;
use crate::saving::{self, Output};
use crate::state::{self, Progress, StateError};
use crate::watching::{self, Skipped, StepReport, Watch};

/// Responses whose next blocks are drafted in one forward when the hold-out is replayed.
const REPLAY_LANES: usize = 16;

/// Steps with a loss or gradient that is not finite, after which training gives up.
const NOT_FINITE_LIMIT: u64 = 20;

/// How long products are timed to know what the machine can do.
const RATE_SECONDS: f64 = 0.3;

/// Everything that decides what the loop computes.
#[derive(Debug, Clone, PartialEq)]
pub struct Plan {
    /// Names the metrics: `train`, `recover-29`.
    pub stage: String,
    pub steps: u64,
    pub packing: Packing,
    pub loss: LossSettings,
    pub optimiser: AdamWSettings,
    /// The peak.
    pub learning_rate: f64,
    /// The mask row's own peak; far more than the others', it finds its place before the weights have moved much.
    pub mask_learning_rate: f64,
    pub schedule: Schedule,
    /// Largest gradient norm.
    pub clip: f64,
    pub save_every: u64,
    pub evaluate_every: u64,
    /// Newest checkpoints kept, the untrained one and the best not counted.
    pub keep_last: usize,
    /// Compute kind of forward and backward, and of the stored weights.
    pub kind: Kind,
}

/// What is trained on what, and where it goes.
pub struct Training<'a> {
    /// The weights to start from, on any device; let go once they are taken over.
    pub start: Transformer,
    /// Where to compute.
    pub device: Device,
    pub examples: &'a [Example],
    /// The examples' ids, to name those of a batch by.
    pub ids: &'a [String],
    pub held_out: &'a [Example],
    pub objective: Objective<'a>,
    pub output: Output<'a>,
    pub group: &'a Group,
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
        "{count} steps had a loss or gradient that is not finite, the last at step {step}; the responses of each are in `{}`; \
         lower `train.learning_rate` (or `prune.learning_rate` in a recovery)", path.display()
    )]
    NotFinite { count: u64, step: u64, path: PathBuf },
    #[error("rank {rank} trains on other data or by another recipe than rank 0; start all ranks alike, on the same files")]
    Unlike { rank: usize },
    #[error(
        "rank {rank} finds another checkpoint to go on from than rank 0; all ranks need the same file system and current folder. Run the \
         same command again if it is one that shows new files late"
    )]
    OtherStep { rank: usize },
    #[error("rank {rank}: {message}")]
    OtherRank { rank: usize, message: String },
    #[error("cannot write `{}`: {source}", path.display())]
    Write { path: PathBuf, source: io::Error },
    #[error("scoring a checkpoint failed: {0}")]
    Scoring(String),
    #[error(transparent)]
    Group(#[from] GroupError),
    #[error(transparent)]
    Checkpoint(#[from] CheckpointError),
    #[error(transparent)]
    State(#[from] StateError),
    #[error(transparent)]
    Decode(#[from] evaluator::decode::DecodeError),
    #[error(transparent)]
    Torch(#[from] TorchError),
}

/// Trains from the start (or goes on from the latest checkpoint with a state in `output.folder`) to the end of the plan.
///
/// Saves at `save_every`, when the replayed τ is the best so far, at the end and when `stop` is set. All ranks call this together; only
/// rank 0 writes metrics and checkpoints, but for each rank's own `state/` file.
///
/// # Errors
/// See [`TrainError`]; whatever was saved before stays valid. Who called it then tells the other ranks by `Group::fail`, unless the error
/// is theirs as well.
pub fn train(training: Training<'_>, plan: &Plan, watch: &mut Watch<'_>, stop: &AtomicBool) -> Result<Ending, TrainError> {
    let Training { start, device, examples, ids, held_out, objective, output, group } = training;
    if examples.is_empty() {
        return Err(TrainError::NoExamples);
    }
    let rows = start.config.vocab_size;
    let mask_token = plan.packing.shape.mask_token;
    if i64::from(mask_token) >= rows {
        return Err(TrainError::MaskToken { mask_token, rows });
    }
    check_alike(group, plan, &start, &objective, [examples, held_out], watch)?;
    let parameters = torch::guarded("placing the weights", || Parameters::new(&start, plan.kind, device, group))?;
    // Before the moments take their memory.
    drop(start);
    torch::release_freed_memory();
    let boost = plan.mask_learning_rate / plan.learning_rate;
    let stretches = parameters.stretches(mask_token);
    let optimiser =
        torch::guarded("allocating the optimiser's state", || AdamW::new(&parameters.master, plan.optimiser, stretches, boost))?;
    let latest = output.folder.join(model::checkpoint::LATEST);
    let loaded = if latest.join(state::FOLDER).exists() {
        state::load(&latest, &parameters, &optimiser).map_err(TrainError::from)
    } else {
        Ok(Progress::default())
    };
    let progress = together(group, loaded)?;
    check_resumed(group, &progress)?;
    let pointed = if group.leads() { saving::point_best(output.folder, &progress) } else { Ok(()) };
    together(group, pointed)?;
    let rate = if progress.step < plan.steps { matrix_rate(plan.kind, device, RATE_SECONDS) } else { 1.0 };
    let context = Context { parameters, optimiser, plan, ids, held_out, objective, output, group, device, rate };
    rayon::in_place_scope(|scope| {
        // The next step's batch is put together while this one is computed.
        let ahead = |position: u64| -> Receiver<StepBatches> {
            let (sender, receiver) = sync_channel(1);
            let (rank, world) = (group.rank(), group.world());
            scope.spawn(move |_| {
                let _ = sender.send(step_batches(examples, &plan.packing, position, rank, world));
            });
            receiver
        };
        steps(&context, progress, &ahead, watch, stop)
    })
}

/// What does not change from step to step.
pub(crate) struct Context<'a> {
    pub(crate) parameters: Parameters<'a>,
    pub(crate) optimiser: AdamW,
    pub(crate) plan: &'a Plan,
    ids: &'a [String],
    held_out: &'a [Example],
    objective: Objective<'a>,
    pub(crate) output: Output<'a>,
    pub(crate) group: &'a Group,
    device: Device,
    /// Floating-point operations a second that products reach here.
    rate: f64,
}

fn steps(
    context: &Context<'_>,
    mut progress: Progress,
    ahead: &dyn Fn(u64) -> Receiver<StepBatches>,
    watch: &mut Watch<'_>,
    stop: &AtomicBool,
) -> Result<Ending, TrainError> {
    let Context { plan, group, .. } = *context;
    let mut next = ahead(progress.position);
    // Where drafting and saving work on a copy of the weights, that copy has the gradient's memory meanwhile.
    let whole_is_a_copy = !group.is_alone() || plan.kind != Kind::Float;
    let mut gradient: Option<Tensor> = None;
    // The start before this one may have been cut short between the checkpoint and its score.
    if progress.step > 0 && watch.scores_at(progress.step) && score(context, progress.step, watch, stop)? {
        return Ok(Ending::Stopped { step: progress.step });
    }
    while progress.step < plan.steps {
        let started = Instant::now();
        let Ok(batches) = next.recv() else { unreachable!("the task that packs a batch sends it or ends the whole scope") };
        progress.step += 1;
        let (step, last) = (progress.step, progress.step == plan.steps);
        if !last {
            next = ahead(batches.next_position);
        }
        let sum = gradient.get_or_insert_with(|| context.parameters.zero_gradient());
        let _ = sum.zero_();
        let outcome = one_step(context, sum, &batches, &progress, stop)?;
        if let Some(skipped) = &outcome.skipped {
            progress.skipped += 1;
            progress.not_finite += u64::from(matches!(skipped, Skipped::NotFinite { .. }));
            let path = context.output.folder.join("skipped.jsonl");
            let names = batches.responses.iter().map(|&index| context.ids.get(index).map_or("?", String::as_str));
            let written = if group.leads() { watching::write_skipped(&path, &plan.stage, step, skipped, names) } else { Ok(()) };
            together(group, written.map_err(|source| TrainError::Write { path: path.clone(), source }))?;
            if progress.not_finite >= NOT_FINITE_LIMIT {
                return Err(TrainError::NotFinite { count: progress.not_finite, step, path });
            }
        }
        progress.position = batches.next_position;
        progress.training_tokens += batches.clean_tokens as u64;
        let seconds = started.elapsed().as_secs_f64();
        let replays = !context.held_out.is_empty() && (step.is_multiple_of(plan.evaluate_every) || last);
        let scoring = watch.scores_at(step);
        let saves = step.is_multiple_of(plan.save_every) || last || outcome.stopping || scoring;
        if whole_is_a_copy && (replays || saves) {
            gradient = None;
        }
        let replayed = if replays { Some(replay_together(context)?) } else { None };
        let tau = replayed.as_ref().map(|replay| replay.tau_pooled);
        let best = tau.filter(|&tau| progress.best.is_none_or(|(_, best)| tau > best)).map(|tau| (step, tau));
        progress.best = best.or(progress.best);
        let report = StepReport {
            step,
            steps: plan.steps,
            losses: outcome.losses,
            gradient_norm: outcome.norm,
            learning_rate: outcome.learning_rate,
            seconds,
            tokens_per_second: batches.clean_tokens as f64 / seconds,
            peak_share: outcome.operations / (seconds * context.rate * group.world() as f64),
            memory_bytes: peak_memory_bytes(context.device),
            replay: replayed,
            skipped: outcome.skipped,
        };
        let recorded = watch.record(&plan.stage, &report);
        together(
            group,
            recorded.map_err(|source| TrainError::Write { path: context.output.folder.join("metrics.jsonl"), source }),
        )?;
        (watch.report)(&report);
        if saves || best.is_some() {
            saving::save(context, &progress)?;
        }
        let stopping = if scoring { score(context, step, watch, stop)? } else { outcome.stopping };
        if stopping && !last {
            return Ok(Ending::Stopped { step });
        }
    }
    Ok(Ending::Done)
}

/// What one step gave, the same on every rank.
struct Outcome {
    losses: Losses,
    norm: f64,
    learning_rate: f64,
    /// Of all ranks.
    operations: f64,
    skipped: Option<Skipped>,
    stopping: bool,
}

/// Forward, backward and update. Everything a decision hangs on is summed over the ranks, so that all decide alike.
fn one_step(
    context: &Context<'_>,
    gradient: &Tensor,
    batches: &StepBatches,
    progress: &Progress,
    stop: &AtomicBool,
) -> Result<Outcome, TrainError> {
    let Context { plan, group, parameters, optimiser, .. } = context;
    let denominators = &batches.denominators;
    let learning_rate = plan.learning_rate * plan.schedule.share(progress.step, plan.steps);
    let mut sums = LossSums::new(plan.packing.shape.drafts());
    let mut operations = 0.0;
    for batch in &batches.forwards {
        sums.add(&torch::guarded("training", || {
            forward_backward(parameters, gradient, batch, denominators, plan.packing.shape, &context.objective, plan.loss)
        })??);
        operations += watching::operations(&parameters.config, batch, plan.packing.shape);
    }
    let mut values = sums.to_values();
    let count = values.len();
    values.extend([
        torch::guarded("training", || squared_norm(gradient))?,
        f64::from(u8::from(stop.load(Ordering::Relaxed))),
        operations,
    ]);
    group.all_reduce_sum(&mut values)?;
    let losses = LossSums::from_values(&values[..count]).losses(denominators, plan.loss);
    let (norm, stopping, operations) = (values[count].sqrt(), values[count + 1] > 0.0, values[count + 2]);
    let nothing = denominators.blocks == 0 && (denominators.clean == 0 || plan.loss.ar_weight == 0.0);
    let skipped = if nothing {
        Some(Skipped::NothingSupervised)
    } else if !losses.total.is_finite() || !norm.is_finite() {
        Some(Skipped::NotFinite { loss: losses.total, norm })
    } else {
        let scale = if norm > plan.clip { plan.clip / norm } else { 1.0 };
        // The moments know only of the steps that were taken.
        let updates = progress.step - progress.skipped;
        optimiser.step(&parameters.master, gradient, updates, learning_rate, scale)?;
        None
    };
    Ok(Outcome { losses, norm, learning_rate, operations, skipped, stopping })
}

/// Replays the hold-out, each rank its share of it.
fn replay_together(context: &Context<'_>) -> Result<Replay, TrainError> {
    let Context { group, held_out, parameters, plan, .. } = context;
    let Some(model) = parameters.whole_model(true)? else { unreachable!("it was to be kept") };
    let drafter = drafter_of(&model, plan.packing.shape);
    let share: Vec<Example> = held_out.iter().skip(group.rank()).step_by(group.world()).cloned().collect();
    let replayed = together(group, replay(&drafter, &share, REPLAY_LANES).map_err(TrainError::from))?;
    let own = serde_json::to_vec(&[replayed.per_response, replayed.judged]).unwrap_or_default();
    let mut shares = Vec::new();
    let mut judged = Vec::new();
    for bytes in group.all_gather_bytes(&own)? {
        let [responses, rounds]: [Vec<(usize, usize)>; 2] = serde_json::from_slice(&bytes).unwrap_or_default();
        shares.push(responses.into_iter());
        judged.extend(rounds);
    }
    // Back in the order of the hold-out, in which they were dealt out.
    let count = shares.len();
    let per_response = (0..held_out.len()).filter_map(|index| shares[index % count].next()).collect();
    Ok(Replay::new(per_response, judged))
}

/// Lets rank 0 score the checkpoint just saved while the others wait, for as long as it takes; gives whether to stop.
fn score(context: &Context<'_>, step: u64, watch: &mut Watch<'_>, stop: &AtomicBool) -> Result<bool, TrainError> {
    let key = format!("{}/scored/{step}", context.plan.stage);
    if !context.group.leads() {
        return Ok(context.group.await_announcement(&key)? == [1]);
    }
    watch.score(&context.output.folder.join(saving::step_name(step))).map_err(TrainError::Scoring)?;
    let stopping = stop.load(Ordering::Relaxed);
    context.group.announce(&key, &[u8::from(stopping)])?;
    Ok(stopping)
}

/// One outcome for all ranks: an error of one is an error of all.
pub(crate) fn together<T>(group: &Group, outcome: Result<T, TrainError>) -> Result<T, TrainError> {
    if group.is_alone() {
        return outcome;
    }
    let message = outcome.as_ref().err().map(ToString::to_string).unwrap_or_default();
    let messages = group.all_gather_bytes(message.as_bytes())?;
    let value = outcome?;
    match messages.into_iter().enumerate().find(|(_, message)| !message.is_empty()) {
        Some((rank, message)) => Err(TrainError::OtherRank { rank, message: String::from_utf8_lossy(&message).into_owned() }),
        None => Ok(value),
    }
}

/// Values of each parameter that ranks compare, to see whether they start from the same weights.
const SAMPLE: i64 = 64;

/// Refuses ranks that would compute something else.
fn check_alike(
    group: &Group,
    plan: &Plan,
    start: &Transformer,
    objective: &Objective<'_>,
    sets: [&[Example]; 2],
    watch: &Watch<'_>,
) -> Result<(), TrainError> {
    if group.is_alone() {
        return Ok(());
    }
    let objective = match objective {
        Objective::Tokens => "tokens".to_string(),
        Objective::Target { divergence, .. } => format!("target {divergence:?}"),
        Objective::Unpruned { how, .. } => format!("unpruned {how:?}"),
    };
    let mut text = format!("{plan:?} {objective} {:?} {:?}", watch.score_every, start.config).into_bytes();
    for (_, tensor) in start.named_parameters() {
        let flat = tensor.reshape([-1]);
        let sample = flat.narrow(0, 0, SAMPLE.min(flat.size()[0])).to_kind(Kind::Float);
        text.extend(torch::to_f32s(&sample).iter().flat_map(|value| value.to_le_bytes()));
    }
    for example in sets.into_iter().flatten() {
        text.extend(example.fingerprint().flat_map(u32::to_le_bytes));
    }
    text.extend(sets[0].len().to_le_bytes());
    match first_unlike(group, sha256_hex(text).as_bytes())? {
        Some(rank) => Err(TrainError::Unlike { rank }),
        None => Ok(()),
    }
}

/// Refuses ranks that found another checkpoint to go on from.
fn check_resumed(group: &Group, progress: &Progress) -> Result<(), TrainError> {
    match first_unlike(group, format!("{progress:?}").as_bytes())? {
        Some(rank) => Err(TrainError::OtherStep { rank }),
        None => Ok(()),
    }
}

/// The first rank whose bytes are not those of rank 0.
fn first_unlike(group: &Group, bytes: &[u8]) -> Result<Option<usize>, TrainError> {
    let all = group.all_gather_bytes(bytes)?;
    Ok(all.iter().position(|bytes| *bytes != all[0]))
}

/// A drafter that computes with these weights, sharing them.
pub fn drafter_of(model: &Transformer, shape: BlockShape) -> Drafter {
    let BlockShape { block_size, mask_token, labels, anchor_sees_block } = shape;
    Drafter { model: model.shallow_clone(), block_size, mask_token, labels, anchor_sees_block, temperatures: Vec::new() }
}

impl TrainError {
    /// Whether another rank brought it about.
    pub fn is_of_another_rank(&self) -> bool {
        match self {
            Self::OtherRank { .. } => true,
            Self::Group(error) => error.is_of_another_rank(),
            _ => false,
        }
    }
}

/// The bytes that one of `ranks` ranks holds of a model in training: masters, gradient and both moments, f32.
pub fn state_bytes(config: &ModelConfig, ranks: usize) -> u64 {
    let values: i64 = config.parameter_shapes().iter().map(|(_, shape)| shape.iter().product::<i64>()).sum();
    16 * (values as u64).div_ceil(ranks as u64)
}
