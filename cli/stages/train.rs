//! The drafter learns to propose blocks of the target's responses.

use std::fs;
use std::path::PathBuf;

use anyhow::Context as _;
use configs::Recipe;
use data::responses::read_folder;
use data::supervision::{Example, split_holdout};
use model::checkpoint;
use serde_json::{Map, json};
use torch::tch::Kind;
use trainer::backward::{LossSettings, Objective};
use trainer::metrics::{JsonLines, Sinks, TensorBoard};
use trainer::optimiser::AdamWSettings;
use trainer::state;
use trainer::training::{Ending, Output, Plan, StepReport, resumed_step, saved_steps, step_name, train};

use super::{Context, Stage, Status};
use crate::models;

/// The responses of a run, as examples.
pub(super) struct Responses {
    pub(super) training: Vec<Example>,
    pub(super) held_out: Vec<Example>,
    /// Responses that keep fewer than two supervised tokens within `data.max_tokens`.
    pub(super) dropped: usize,
}

/// Reads the responses in the order of their ids, so that the parts they came in do not matter, and splits off the hold-out.
pub(super) fn responses(context: &Context<'_>) -> anyhow::Result<Responses> {
    let mut rows = read_folder(&context.run.path.join(Stage::Regenerate.folder()))?;
    rows.sort_by(|one, other| one.id.cmp(&other.id));
    let read = rows.len();
    let usable: Vec<(String, Example)> = rows
        .into_iter()
        .filter_map(|row| {
            Example::new(&row.prompt_ids, &row.response_ids, context.recipe.data.max_tokens).map(|example| (row.id, example))
        })
        .collect();
    let ids: Vec<&str> = usable.iter().map(|(id, _)| id.as_str()).collect();
    let (training, held_out) = split_holdout(&ids, context.recipe.data.holdout, context.recipe.seed);
    let pick = |indices: Vec<usize>| indices.into_iter().map(|index| usable[index].1.clone()).collect();
    Ok(Responses { training: pick(training), held_out: pick(held_out), dropped: read - usable.len() })
}

/// The loop's plan for training by the recipe.
pub(super) fn plan(recipe: &Recipe, kind: Kind) -> Plan {
    let train = &recipe.train;
    Plan {
        stage: "train".to_string(),
        seed: recipe.seed,
        steps: train.steps as u64,
        batch_responses: train.batch_responses,
        anchors: train.anchors,
        gamma: train.gamma,
        shape: models::block_shape(recipe),
        loss: LossSettings { ar_weight: train.ar_weight, chunk_rows: train.chunk_rows, recompute: train.recompute },
        optimiser: AdamWSettings { beta1: train.beta1, beta2: train.beta2, weight_decay: train.weight_decay },
        learning_rate: train.learning_rate,
        mask_learning_rate: train.mask_learning_rate,
        warmup: train.warmup,
        minimum_learning_rate: train.minimum_learning_rate,
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
pub(super) fn rewind_metrics(context: &Context<'_>, stage: &str, step: u64) -> anyhow::Result<()> {
    let path = metrics_path(context);
    JsonLines::rewind(&path, stage, step).with_context(|| format!("cannot write `{}`", path.display()))
}

fn metrics_path(context: &Context<'_>) -> PathBuf {
    context.run.path.join(Stage::Train.folder()).join("metrics.jsonl")
}

/// One line about a step.
pub(super) fn describe(report: &StepReport) -> String {
    let skipped = if report.skipped { ", skipped: not finite" } else { "" };
    format!(
        "loss {:.3} (blocks {:.3}, next token {:.3}), gradient {:.2}, {:.1} s/step{skipped}",
        report.losses.total, report.losses.diffusion, report.losses.autoregressive, report.gradient_norm, report.seconds
    )
}

/// Trains to the end of the plan, or until stopped.
pub(super) fn run(context: &Context<'_>) -> anyhow::Result<Status> {
    let recipe = context.recipe;
    context.write_manifest(Stage::Train, false, Map::new())?;
    let text = context.text()?;
    let files = text.files();
    let responses = responses(context)?;
    let (device, kind) = models::drafter_place(recipe)?;
    let start = models::initial_drafter(recipe, device)?;
    let drafter = models::drafter_file(recipe, start.layers.len());
    let plan = plan(recipe, kind);
    context.progress.note(&format!(
        "{:>12} {} responses, {} held out, {} too short; {} layers in {}, {} steps of {} responses with {} blocks of {} each",
        "train",
        responses.training.len(),
        responses.held_out.len(),
        responses.dropped,
        start.layers.len(),
        models::kind_name(kind),
        plan.steps,
        plan.batch_responses,
        plan.anchors,
        plan.shape.block_size
    ));

    let latest = context.folder.join(checkpoint::LATEST);
    let resumed = resumed_step(&context.folder)?;
    if resumed == 0 && fs::symlink_metadata(&latest).is_ok() {
        anyhow::bail!(
            "`{}` has no `{}` to go on from; put it back, or begin again with `drafthorse run RECIPE --restart train`",
            latest.display(),
            state::FOLDER
        );
    }
    // Steps beyond `latest` were written but never became it.
    for step in saved_steps(&context.folder).into_iter().filter(|&step| step > resumed) {
        let folder = context.folder.join(step_name(step));
        fs::remove_dir_all(&folder).with_context(|| format!("cannot remove `{}`", folder.display()))?;
    }
    let untrained = context.folder.join(step_name(0));
    if !untrained.exists() {
        checkpoint::save(&untrained, &start, &drafter, &files, kind, |_| Ok(()))?;
    }
    let held_out = &responses.held_out[..responses.held_out.len().min(recipe.train.evaluate_responses)];
    let bar = context.progress.bar("train", recipe.train.steps);
    let mut report = |step: &StepReport| {
        bar.set(step.step as usize, &describe(step));
        if let Some(replay) = &step.replay {
            bar.note(&format!(
                "{:>12} step {}: τ {:.2} on {} held-out responses",
                "train",
                step.step,
                replay.tau_pooled,
                held_out.len()
            ));
        }
    };
    let output = Output { folder: &context.folder, drafter, files: &files };
    rewind_metrics(context, "train", resumed)?;
    let mut sinks = sinks(context)?;
    let target = match recipe.train.objective {
        configs::Objective::Tokens => None,
        configs::Objective::Target => Some(models::target_on(recipe, device)?),
    };
    let objective = target.as_ref().map_or(Objective::Tokens, |target| Objective::Target { target });
    let ending = train(&start, &plan, &responses.training, held_out, &objective, &output, &mut sinks, &mut report, context.stop)?;
    drop(bar);
    if ending != Ending::Done {
        return Ok(Status::Interrupted);
    }
    let file = checkpoint::load_drafter_file(&latest)?;
    let mut results = Map::new();
    results.insert("checkpoint".to_string(), json!(step_name(file.step)));
    results.insert("training_tokens".to_string(), json!(file.training_tokens));
    results.insert("responses".to_string(), json!(responses.training.len()));
    results.insert("held_out".to_string(), json!(responses.held_out.len()));
    results.insert("too_short".to_string(), json!(responses.dropped));
    context.write_manifest(Stage::Train, true, results)?;
    Ok(Status::Done)
}
