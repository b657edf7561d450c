//! The drafter learns to propose blocks of the target's responses.

use std::fs;
use std::path::{Path, PathBuf};

use anyhow::Context as _;
use configs::{Recipe, Schedule as RecipeSchedule, Truncated};
use data::responses::{FinishReason, read_folder};
use data::supervision::{Example, join_turns, split_holdout};
use model::Transformer;
use model::checkpoint::{self, LATEST};
use serde_json::{Map, json};
use torch::tch::{Device, Kind};
use trainer::backward::{Divergence, LossSettings, Objective};
use trainer::metrics::{JsonLines, MetricSink, Sinks, TensorBoard};
use trainer::objective::{Distillation, PositionWeights};
use trainer::optimiser::{AdamWSettings, Curve, Schedule};
use trainer::packing::{BatchSize, Packing};
use trainer::saving::{Output, discard, resumed_step, saved_steps, step_name};
use trainer::state;
use trainer::training::{Ending, Plan, Training, train};
use trainer::watching::{Score, StepReport, Watch};

use super::evaluate::{BaselineOf as Baseline, Scorer};
use super::{Context, Stage, Status};
use crate::models;

/// The responses of a run, as examples.
pub(super) struct Responses {
    /// Turns of a conversation that repeat what came before share one.
    pub(super) training: Vec<Example>,
    /// Of the training examples.
    pub(super) ids: Vec<String>,
    /// One response each.
    pub(super) held_out: Vec<Example>,
    /// Responses that keep fewer than two supervised tokens within `data.max_tokens`.
    pub(super) dropped: usize,
    /// Responses that were cut off, where `data.truncated` drops them.
    pub(super) truncated: usize,
}

impl Responses {
    /// Responses trained on, over all turns.
    fn in_training(&self) -> usize {
        self.training.iter().map(|example| example.responses.len()).sum()
    }
}

/// Reads the responses in the order of their ids, so that the parts they came in do not matter, and splits off the hold-out.
pub(super) fn responses(context: &Context<'_>) -> anyhow::Result<Responses> {
    let mut rows = read_folder(&context.run.path.join(Stage::Regenerate.folder()))?;
    rows.sort_by(|one, other| (&one.id, one.turn).cmp(&(&other.id, other.turn)));
    let thinking = context.recipe.target.thinking;
    if let Some(row) = rows.iter().find(|row| row.thinking != thinking) {
        anyhow::bail!(
            "response `{}` was made with thinking = {}, and `target.thinking` is {thinking}; a drafter learns answers of one kind, so set              it as it was or use `drafthorse run RECIPE --restart regenerate`",
            row.id,
            row.thinking
        );
    }
    let all = rows.len();
    if context.recipe.data.truncated == Truncated::Drop {
        rows.retain(|row| row.finish_reason != FinishReason::Length);
    }
    let read = rows.len();
    if read == 0 && all > 0 {
        anyhow::bail!(
            "all {all} responses were cut off at `regenerate.max_new_tokens` = {}, and `data.truncated = \"drop\"` leaves them out; raise \
             the one or set the other to \"keep\"",
            context.recipe.regenerate.max_new_tokens
        );
    }
    let max_tokens = context.recipe.data.max_tokens;
    rows.retain(|row| Example::new(&row.prompt_ids, &row.response_ids, max_tokens).is_some());
    let ids: Vec<&str> = rows.iter().map(|row| row.id.as_str()).collect();
    let (in_training, held_out) = split_holdout(&ids, context.recipe.data.holdout, context.recipe.seed);
    let turn = |index: &usize| (rows[*index].prompt_ids.as_slice(), rows[*index].response_ids.as_slice());
    let (mut training, mut names) = (Vec::new(), Vec::new());
    for conversation in in_training.chunk_by(|&one, &other| ids[one] == ids[other]) {
        training.extend(join_turns(conversation.iter().map(turn), max_tokens));
        names.resize(training.len(), ids[conversation[0]].to_string());
    }
    // Replays walk one response at a time.
    let walked =
        held_out.iter().map(turn).filter_map(|(prompt_ids, response_ids)| Example::new(prompt_ids, response_ids, max_tokens));
    Ok(Responses { training, ids: names, held_out: walked.collect(), dropped: read - rows.len(), truncated: all - read })
}

/// The loop's plan for training by the recipe.
pub(super) fn plan(recipe: &Recipe, kind: Kind) -> Plan {
    let train = &recipe.train;
    let size = match (train.batch_responses, train.batch_tokens) {
        (_, Some(tokens)) => BatchSize::Tokens(tokens),
        (responses, None) => BatchSize::Responses(responses.unwrap_or(1)),
    };
    let weights = match train.position_weights {
        configs::PositionWeights::Exponential => PositionWeights::Exponential,
        configs::PositionWeights::DPace => PositionWeights::Pace { alpha: train.pace_alpha },
    };
    let curve = match train.schedule {
        RecipeSchedule::Constant => Curve::Constant,
        RecipeSchedule::Linear => Curve::Linear,
        RecipeSchedule::Cosine => Curve::Cosine,
        RecipeSchedule::Wsd => Curve::WarmupStableDecay { decay: train.decay },
    };
    Plan {
        stage: "train".to_string(),
        steps: train.steps as u64,
        packing: Packing {
            seed: recipe.seed,
            size,
            anchors: train.anchors,
            shape: models::block_shape(recipe),
            gamma: train.gamma,
            forward_rows: train.forward_rows,
        },
        loss: LossSettings { ar_weight: train.ar_weight, weights, chunk_rows: train.chunk_rows, recompute: train.recompute },
        optimiser: AdamWSettings { beta1: train.beta1, beta2: train.beta2, weight_decay: train.weight_decay },
        learning_rate: train.learning_rate,
        mask_learning_rate: train.mask_learning_rate,
        schedule: Schedule { warmup: train.warmup, curve, minimum: train.minimum_learning_rate },
        clip: train.clip,
        save_every: train.save_every as u64,
        evaluate_every: train.evaluate_every as u64,
        keep_last: train.keep_last,
        kind,
    }
}

/// The run's metrics; training and recoveries share them.
pub(super) fn sinks(context: &Context<'_>) -> anyhow::Result<Sinks> {
    let events = context.run.path.join("events");
    let board = TensorBoard::create(&events).with_context(|| format!("cannot write `{}`", events.display()))?;
    Ok(Sinks(vec![Box::new(JsonLines::new(&metrics_path(context))), Box::new(board)]))
}

/// Drops what the metrics hold of `stage` after `step`: it is done again.
fn rewind_metrics(context: &Context<'_>, stage: &str, step: u64) -> anyhow::Result<()> {
    let path = metrics_path(context);
    JsonLines::rewind(&path, stage, step).with_context(|| format!("cannot write `{}`", path.display()))
}

/// Where the run's metrics are.
pub(super) fn metrics_path(context: &Context<'_>) -> PathBuf {
    context.run.path.join(Stage::Train.folder()).join("metrics.jsonl")
}

/// One line about a step.
pub(super) fn describe(report: &StepReport) -> String {
    let skipped = report.skipped.map_or(String::new(), |reason| format!(", left out: {reason}"));
    let memory = report.memory_bytes.map_or(String::new(), |bytes| format!(", {:.1} GB", bytes as f64 / 1e9));
    format!(
        "loss {:.3} (blocks {:.3}, next token {:.3}), gradient {:.2}, {:.1} s/step, {:.0} tokens/s, {:.0} % of peak{memory}{skipped}",
        report.losses.total,
        report.losses.diffusion,
        report.losses.autoregressive,
        report.gradient_norm,
        report.seconds,
        report.tokens_per_second,
        100.0 * report.peak_share
    )
}

/// Trains to the end of the plan, or until stopped. Rank 0 prepares the folder and writes; the others only compute.
pub(super) fn run(context: &Context<'_>) -> anyhow::Result<Status> {
    if context.leads() {
        context.write_manifest(Stage::Train, false, Map::new())?;
    }
    let recipe = context.recipe;
    let responses = responses(context)?;
    let (device, kind) = (context.own_device(&recipe.devices.drafter)?, models::kind(recipe.drafter.dtype));
    // On the CPU, from where each rank takes its share.
    let start = models::initial_drafter(recipe)?;
    if responses.held_out.is_empty() && models::layers_to_remove(recipe, start.layers.len()) > 0 {
        anyhow::bail!(
            "no response is held out of {}, but pruning measures layers on them; raise `data.holdout`, give more prompts or set \
             `prune.remove = 0`",
            responses.training.len()
        );
    }
    let plan = plan(recipe, kind);
    let held_out = &responses.held_out[..responses.held_out.len().min(recipe.train.evaluate_responses)];
    let text = context.text()?;
    let files = text.files();
    let drafter = models::drafter_file(recipe, start.layers.len());
    let scorer = match recipe.evaluate.every {
        Some(_) if context.leads() => match Scorer::new(context, Baseline::Beside)? {
            Some(scorer) => Some(scorer),
            None => return Ok(Status::Interrupted),
        },
        _ => None,
    };
    if context.leads() {
        context.progress.note(&what_is_trained(context, &responses, &start, &plan));
        let resumed = clear_unfinished(context)?;
        let untrained = context.folder.join(step_name(0));
        if !untrained.exists() {
            checkpoint::save(&untrained, &start, &drafter, &files, kind)?;
        }
        rewind_metrics(context, "train", resumed)?;
        let skipped = context.folder.join("skipped.jsonl");
        JsonLines::rewind(&skipped, "train", resumed).with_context(|| format!("cannot write `{}`", skipped.display()))?;
    }
    context.begin_together(Stage::Train)?;

    let mut sinks = context.leads().then(|| sinks(context)).transpose()?;
    let bar = context.leads().then(|| context.progress.bar("train", recipe.train.steps));
    let mut report = |step: &StepReport| {
        let Some(bar) = &bar else { return };
        bar.set(step.step as usize, &describe(step));
        if let Some(replay) = &step.replay {
            let (low, high) = replay.tau_interval;
            bar.note(&format!(
                "{:>12} step {}: τ {:.2} ({low:.2} to {high:.2}) on {} held-out responses",
                "train",
                step.step,
                replay.tau_pooled,
                held_out.len()
            ));
        }
    };
    let mut score = |folder: &Path| match &scorer {
        Some(scorer) => scorer.score(context, folder).map(|_| ()).map_err(|error| format!("{error:#}")),
        None => Ok(()),
    };
    let mut watch = Watch {
        sink: sinks.as_mut().map(|sinks| sinks as &mut dyn MetricSink),
        report: &mut report,
        score_every: recipe.evaluate.every.map(|every| every as u64),
        score: scorer.is_some().then_some(&mut score as Score<'_>),
    };
    let target = target_beside(recipe, device)?;
    let training = Training {
        start,
        device,
        examples: &responses.training,
        ids: &responses.ids,
        held_out,
        objective: objective(recipe, target.as_ref()),
        output: Output { folder: &context.folder, drafter, files: &files },
        group: context.group,
    };
    let ending = train(training, &plan, &mut watch, context.stop)?;
    drop(bar);
    if ending != Ending::Done {
        return Ok(Status::Interrupted);
    }
    if context.leads() {
        let file = checkpoint::load_drafter_file(&context.folder.join(LATEST))?;
        let mut results = Map::new();
        results.insert("checkpoint".to_string(), json!(step_name(file.step)));
        results.insert("training_tokens".to_string(), json!(file.training_tokens));
        results.insert("responses".to_string(), json!(responses.in_training()));
        results.insert("held_out".to_string(), json!(responses.held_out.len()));
        results.insert("too_short".to_string(), json!(responses.dropped));
        results.insert("truncated".to_string(), json!(responses.truncated));
        context.write_manifest(Stage::Train, true, results)?;
    }
    Ok(Status::Done)
}

fn what_is_trained(context: &Context<'_>, responses: &Responses, start: &Transformer, plan: &Plan) -> String {
    let ranks = match context.group.world() {
        1 => String::new(),
        ranks => format!(" over {ranks} ranks"),
    };
    let size = match plan.packing.size {
        BatchSize::Responses(count) => format!("{count} responses"),
        BatchSize::Tokens(count) => format!("{count} tokens"),
    };
    format!(
        "{:>12} {} responses{}, {} held out, {} too short{}; {} layers in {}, {} steps of {size}{ranks} with {} blocks of {} in each response; \
         up to {} rows in a forward, logits of {} rows at a time, {}",
        "train",
        responses.in_training(),
        if responses.training.len() < responses.in_training() {
            format!(" in {} rows of turns that go on from each other", responses.training.len())
        } else {
            String::new()
        },
        responses.held_out.len(),
        responses.dropped,
        if responses.truncated > 0 { format!(", {} cut off", responses.truncated) } else { String::new() },
        start.layers.len(),
        models::kind_name(plan.kind),
        plan.steps,
        plan.packing.anchors,
        plan.packing.shape.block_size,
        plan.packing.forward_rows,
        plan.loss.chunk_rows,
        if plan.loss.recompute { "layers run again in the backward" } else { "activations of all layers kept" }
    )
}

/// Removes what was written after `latest` and never became it; gives the step that training goes on after.
fn clear_unfinished(context: &Context<'_>) -> anyhow::Result<u64> {
    let latest = context.folder.join(LATEST);
    let resumed = resumed_step(&context.folder)?;
    if resumed == 0 && fs::symlink_metadata(&latest).is_ok() {
        anyhow::bail!(
            "`{}` has no `{}` to go on from; put it back, or begin again with `drafthorse run RECIPE --restart train`",
            latest.display(),
            state::FOLDER
        );
    }
    for step in saved_steps(&context.folder).into_iter().filter(|&step| step > resumed) {
        discard(&context.folder.join(step_name(step)))?;
    }
    Ok(resumed)
}

/// The target beside the drafter, where the objective needs it.
fn target_beside(recipe: &Recipe, device: Device) -> anyhow::Result<Option<Transformer>> {
    match recipe.train.objective {
        configs::Objective::Tokens => Ok(None),
        configs::Objective::Target | configs::Objective::TargetVariation => models::target_on(recipe, device).map(Some),
    }
}

fn objective<'a>(recipe: &Recipe, target: Option<&'a Transformer>) -> Objective<'a> {
    let divergence = match recipe.train.objective {
        configs::Objective::TargetVariation => Divergence::TotalVariation,
        _ => Divergence::Forward(Distillation { temperature: 1.0, margin: None }),
    };
    target.map_or(Objective::Tokens, |target| Objective::Target { target, divergence })
}
