//! Layers go, the least harmful first; the drafter recovers after each.

mod speed;

use configs::{Criterion, Stop};
use model::checkpoint;
use pruner::ledger::{Swapped, TauLoss};
use pruner::pruning::{self, Progress, Settings, layers_name, recovery_name};
use pruner::swapping::{swap_recovery_name, swapped_name};
use serde_json::{Map, json};
use trainer::objective::Distillation;
use trainer::saving::{resumed_step, step_name};
use trainer::training::{Ending, Plan};

use super::train::{describe, plan, responses, rewind_metrics, sinks};
use super::{Context, Stage, Status};
use crate::models;

/// Prunes by the recipe, or records that nothing is to be pruned.
pub(super) fn run(context: &Context<'_>) -> anyhow::Result<Status> {
    let recipe = context.recipe;
    let trained = context.run.path.join(Stage::Train.folder()).join(checkpoint::LATEST);
    context.write_manifest(Stage::Prune, false, Map::new())?;
    let file = checkpoint::load_drafter_file(&trained)?;
    let remove = models::layers_to_remove(recipe, file.layers);
    if remove == 0 {
        context.progress.note(&format!("{:>12} nothing to remove", "prune"));
        context.write_manifest(Stage::Prune, true, Map::new())?;
        return Ok(Status::Done);
    }
    let (teacher, file) = models::load_drafter(recipe, &trained)?;
    let responses = responses(context)?;
    let prune = &recipe.prune;
    let training = plan(recipe, teacher.kind());
    let recovery = Plan {
        steps: prune.recovery_steps as u64,
        learning_rate: prune.learning_rate,
        // The mask row has found its place.
        mask_learning_rate: prune.learning_rate,
        loss: trainer::backward::LossSettings { ar_weight: prune.ar_weight, ..training.loss },
        // Another order and other anchors than in training.
        packing: trainer::packing::Packing { seed: recipe.seed + 1, ..training.packing },
        save_every: training.save_every.min(prune.recovery_steps.max(1) as u64),
        keep_last: 1,
        ..training
    };
    let held_out = &responses.held_out[..responses.held_out.len().min(prune.responses)];
    let speed = match prune.stop {
        Stop::Speed => Some(speed::model(context, &teacher, held_out, remove)?),
        Stop::Tau => None,
    };
    let settings = Settings {
        remove,
        min_layers: prune.min_layers,
        keep_tau: prune.keep_tau.unwrap_or(0.0),
        speed,
        swap: prune.swap,
        criterion: prune.criterion,
        anchors: prune.anchors,
        distillation: Distillation { temperature: prune.temperature, margin: Some(prune.margin) },
        recovery,
    };
    let text = context.text()?;
    let files = text.files();
    let parent = step_name(file.step);
    let pruning = pruning::Context {
        teacher: &teacher,
        parent: &parent,
        drafter: file,
        files: &files,
        folder: &context.folder,
        examples: &responses.training,
        ids: &responses.ids,
        held_out,
    };
    // The recovery under way says from which step its metrics go on; those of finished ones stay, those of an earlier start go.
    let depths = teacher.layers.len() - remove..teacher.layers.len();
    let recoveries =
        depths.flat_map(|depth| [(layers_name(depth), recovery_name(depth)), (swapped_name(depth), swap_recovery_name(depth))]);
    for (_, name) in recoveries.filter(|(checkpoint, _)| !context.folder.join(checkpoint).exists()) {
        rewind_metrics(context, &name, resumed_step(&context.folder.join(&name))?)?;
    }
    let mut sinks = sinks(context)?;

    let measuring = context.progress.bar("layers", teacher.layers.len());
    let recovering = context.progress.bar("recover", prune.recovery_steps);
    let mut show = |event: Progress<'_>| match event {
        Progress::Measured { part, parts, done, running } => {
            // Those dropped before count as done, so that the bar never goes back.
            let depth = teacher.layers.len();
            measuring.set_length(parts * depth);
            let part_of = format!(
                "part {} of {parts} of the held-out responses, {done} of {running} layers still in the running",
                part + 1
            );
            measuring.set(part * depth + depth - running + done, &part_of);
        }
        Progress::Searched { depth, losses, cost, seconds } => {
            let least = losses.iter().map(|loss| loss.tau_loss).fold(f64::INFINITY, f64::min);
            measuring.note(&format!(
                "{:>12} {depth} layers measured in {seconds:.0} s: without one of them τ falls by {least:.3} or more; {:.0} % of a plain \
                 search's token-layers",
                "prune",
                100.0 * cost.token_layers as f64 / cost.plain_token_layers.max(1) as f64
            ));
        }
        Progress::Replayed { losses } => {
            for (drawn, exact) in losses {
                measuring.note(&format!(
                    "{:>12} without layer {} of {}: τ falls by {} on blocks drawn at random, by {} in exact replay",
                    "prune",
                    drawn.layer,
                    drawn.depth,
                    with_interval(drawn),
                    with_interval(exact)
                ));
            }
        }
        Progress::Weighed { criterion, scores } => {
            let lowest = scores.iter().copied().fold(f64::INFINITY, f64::min);
            let highest = scores.iter().copied().fold(f64::NEG_INFINITY, f64::max);
            let what = match criterion {
                Criterion::LanguageModelLoss => "the loss as a language model rises by",
                _ => "layers turn their input by",
            };
            measuring.note(&format!("{:>12} {} layers weighed: {what} {lowest:.4} to {highest:.4}", "prune", scores.len()));
        }
        Progress::Removed { original_layer, depth, tau_before, tau_after } => {
            measuring.note(&format!(
                "{:>12} layer {original_layer} removed, {depth} layers left: τ {tau_before:.2} before, {tau_after:.2} after",
                "prune"
            ));
        }
        Progress::Recovering(step) => recovering.set(step.step as usize, &describe(step)),
        Progress::Recovered { depth, tau, tau_unpruned, keeps_tau } => recovering.note(&format!(
            "{:>12} {depth} layers recovered to τ {tau:.2}, {:.1} % of the unpruned drafter's {tau_unpruned:.2}{}",
            "prune",
            100.0 * tau / tau_unpruned,
            if keeps_tau { "" } else { ": less than `prune.keep_tau`, so pruning ends here" }
        )),
        Progress::Predicted { predicted, before } => {
            let slower = before.is_some_and(|before| predicted.tokens_per_second <= before.tokens_per_second);
            recovering.note(&format!(
                "{:>12} {} layers: {:.2} tokens/s predicted from τ {:.2} and a hit rate of {:.0} %{}",
                "prune",
                predicted.depth,
                predicted.tokens_per_second,
                predicted.tau,
                100.0 * predicted.hit_rate,
                if slower { ": no faster than with one layer more, so pruning ends here" } else { "" }
            ));
        }
        Progress::SwapMeasured(swap) => recovering.note(&format!(
            "{:>12} with layer {} back, layer {} can best be spared: τ {:.2} before recovery",
            "prune", swap.put_back, swap.take_out, swap.tau
        )),
        Progress::Swapped(swapped) => recovering.note(&format!("{:>12} {}", "prune", in_words(swapped))),
    };
    let ending = pruning::prune(&pruning, &settings, &mut sinks, &mut show, context.stop)?;
    drop((measuring, recovering));
    if ending != Ending::Done {
        return Ok(Status::Interrupted);
    }
    let mut results = Map::new();
    results.insert("checkpoints".to_string(), json!(pruned_checkpoints(context)));
    context.write_manifest(Stage::Prune, true, results)?;
    Ok(Status::Done)
}

fn in_words(swapped: &Swapped) -> String {
    let Swapped { put_back, take_out, depth, tau_before, tau, kept } = swapped;
    let ending = match kept {
        true => format!("; kept as {}", swapped_name(*depth)),
        false => ": no better, so it goes".to_string(),
    };
    format!("layer {put_back} back and layer {take_out} out: τ {tau:.2} after recovery, {tau_before:.2} without the swap{ending}")
}

/// A loss and its interval.
fn with_interval(loss: &TauLoss) -> String {
    format!("{:.3} ({:.3} to {:.3})", loss.tau_loss, loss.low, loss.high)
}

/// The names of the pruned checkpoints, deepest first.
pub(super) fn pruned_checkpoints(context: &Context<'_>) -> Vec<String> {
    let entries = std::fs::read_dir(context.run.path.join(Stage::Prune.folder())).into_iter().flatten().flatten();
    let mut names: Vec<String> =
        entries.filter_map(|entry| entry.file_name().into_string().ok()).filter(|name| name.starts_with("layers-")).collect();
    let depth = |name: &str| name.split('-').nth(1).and_then(|depth| depth.parse::<usize>().ok()).unwrap_or(0);
    names.sort_by_key(|name| (std::cmp::Reverse(depth(name)), name.clone()));
    names
}
