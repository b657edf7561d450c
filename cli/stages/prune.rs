//! Layers go, the least harmful first; the drafter recovers after each.

mod metrics;
mod speed;

use configs::{Criterion, Stop};
use model::checkpoint;
use pruner::ledger::{Ledger, Swapped, TauLoss};
use pruner::pruning::{self, Progress, Settings, layers};
use pruner::swapping::swapped_name;
use serde_json::{Map, json};
use trainer::objective::Distillation;
use trainer::saving::step_name;
use trainer::training::{Ending, Plan};

use super::train::{describe, metrics_path, plan, responses, sinks};
use super::{Context, Stage, Status};
use crate::models;

/// Prunes by the recipe, or records that nothing is to be pruned.
pub(super) fn run(context: &Context<'_>) -> anyhow::Result<Status> {
    let recipe = context.recipe;
    let trained = context.run.path.join(Stage::Train.folder()).join(checkpoint::LATEST);
    context.write_manifest(Stage::Prune, false, Map::new())?;
    let ledger = Ledger::open(&context.folder.join("ledger.jsonl"))?;
    metrics::rewind(&metrics_path(context), &context.folder, &ledger)?;
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
        Stop::Speed => match speed::model(context, &teacher, held_out, remove, &ledger)? {
            Some(model) => Some(model),
            None => return Ok(Status::Interrupted),
        },
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
                "{:>12} {} measured in {seconds:.0} s: without the one that can best be spared τ {}; {:.0} % of a plain search's token-layers",
                "prune",
                layers(depth),
                falls(least),
                100.0 * cost.token_layers as f64 / cost.plain_token_layers.max(1) as f64
            ));
        }
        Progress::Replayed { losses } => {
            for (drawn, exact) in losses {
                measuring.note(&format!(
                    "{:>12} without layer {} of {}: τ {} on blocks drawn at random, {} in exact replay",
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
            let weighed = layers(scores.len());
            measuring.note(&format!("{:>12} {weighed} weighed: {what} {lowest:.4} to {highest:.4}", "prune"));
        }
        Progress::Removed { original_layer, depth, tau_before, tau_after } => {
            measuring.note(&format!(
                "{:>12} layer {original_layer} removed, {} left: τ {tau_before:.2} before, {tau_after:.2} after",
                "prune",
                layers(depth)
            ));
        }
        Progress::Recovering(step) => recovering.set(step.step as usize, &describe(step)),
        Progress::Recovered { depth, tau, tau_unpruned, keeps_tau } => recovering.note(&format!(
            "{:>12} {} recovered to τ {tau:.2}, {:.1} % of the unpruned drafter's {tau_unpruned:.2}{}",
            "prune",
            layers(depth),
            100.0 * tau / tau_unpruned,
            if keeps_tau { "" } else { ": less than `prune.keep_tau`, so pruning ends here" }
        )),
        Progress::Predicted { predicted, before } => {
            let slower = before.is_some_and(|before| predicted.tokens_per_second <= before.tokens_per_second);
            recovering.note(&format!(
                "{:>12} {}: {:.2} tokens/s predicted from τ {:.2} and a hit rate of {:.0} %{}",
                "prune",
                layers(predicted.depth),
                predicted.tokens_per_second,
                predicted.tau,
                100.0 * predicted.hit_rate,
                if slower { ": no faster than with one layer more, so pruning ends here" } else { "" }
            ));
        }
        Progress::SwapMeasured(swap) => recovering.note(&format!(
            "{:>12} with layer {} back, layer {} can best be spared: τ {:.2} on blocks drawn at random, before recovery",
            "prune", swap.put_back, swap.take_out, swap.tau
        )),
        Progress::SwapSkipped => recovering.note(&format!("{:>12} no removal was kept, so there is nothing to swap", "prune")),
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

/// What τ does when it loses so much.
fn falls(tau_loss: f64) -> String {
    if tau_loss < 0.0 { format!("rises by {:.3}", -tau_loss) } else { format!("falls by {tau_loss:.3}") }
}

/// The same with the interval, which is turned round with the loss.
fn with_interval(loss: &TauLoss) -> String {
    let (low, high) = if loss.tau_loss < 0.0 { (-loss.high, -loss.low) } else { (loss.low, loss.high) };
    format!("{} ({low:.3} to {high:.3})", falls(loss.tau_loss))
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

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_loss_below_zero_is_told_as_a_rise() {
        let loss = |tau_loss, low, high| {
            with_interval(&TauLoss {
                depth: 4,
                layer: 1,
                tau_with: 2.0,
                tau_without: 2.0 - tau_loss,
                tau_loss,
                low,
                high,
                blocks: 9,
            })
        };
        assert_eq!(loss(0.25, -0.125, 0.5), "falls by 0.250 (-0.125 to 0.500)");
        assert_eq!(loss(-0.062, -0.25, 0.125), "rises by 0.062 (-0.125 to 0.250)");
        assert_eq!(loss(0.0, 0.0, 0.0), "falls by 0.000 (0.000 to 0.000)");
    }
}
