//! Times the target and drafters of every depth that pruning may reach, for pruning that stops by speed.

use configs::{Budget, Evaluate};
use data::supervision::Example;
use evaluator::Drafter;
use evaluator::budget::resolve;
use evaluator::decode::Settings;
use evaluator::fan_out::FanOut;
use evaluator::round_times::{RoundTimes, round_times};
use model::Transformer;
use pruner::ledger::Ledger;
use pruner::speed::SpeedModel;
use trainer::training::drafter_of;

use crate::models;
use crate::stages::{Context, evaluate};

/// What speeds are predicted from: times that an earlier start wrote into the ledger, or else measured now.
pub(super) fn model(
    context: &Context<'_>,
    teacher: &Transformer,
    held_out: &[Example],
    remove: usize,
) -> anyhow::Result<SpeedModel> {
    let (recipe, unpruned) = (context.recipe, teacher.layers.len());
    let depths = unpruned - remove..=unpruned;
    let covers = |times: &&RoundTimes| depths.clone().all(|depth| times.drafters.iter().any(|it| it.layers == depth));
    // A ledger that cannot be read is told of when pruning opens it.
    let ledger = Ledger::open(&context.folder.join("ledger.jsonl")).ok();
    let known = ledger.as_ref().and_then(Ledger::times).filter(covers).cloned();
    let times = match known {
        Some(times) => times,
        None => {
            context.progress.note(&format!(
                "{:>12} timing the target and drafters of {} to {unpruned} layers",
                "prune",
                depths.start()
            ));
            let target = models::target(recipe)?;
            let settings = evaluate::settings(recipe, &target);
            let shape = models::block_shape(recipe);
            // Which layers a drafter has makes no difference to its time.
            let of_depth = |depth: usize| drafter_of(&teacher.with_layers(&(0..depth).collect::<Vec<_>>()), shape);
            let behind = middle(held_out);
            let mut drafters = Vec::new();
            for depth in depths {
                let drafter = of_depth(depth);
                let blocks = blocks(&recipe.evaluate, &target, &drafter, &settings, behind)?;
                drafters.push((drafter, blocks));
            }
            round_times(&target, &drafters, &settings, behind)?
        }
    };
    context.progress.note(&in_words(&times));
    Ok(SpeedModel { times, evaluate: recipe.evaluate.clone() })
}

/// Tokens that a text holds halfway through the response of middle length.
fn middle(responses: &[Example]) -> usize {
    let halfway = |response: &Example| (response.prompt_length + response.ids.len()) / 2;
    let mut lengths: Vec<usize> = responses.iter().map(halfway).collect();
    lengths.sort_unstable();
    lengths.get(lengths.len() / 2).copied().unwrap_or(0)
}

/// How many continuations evaluation would draft ahead with this drafter.
fn blocks(
    evaluate: &Evaluate,
    target: &Transformer,
    drafter: &Drafter,
    settings: &Settings,
    context: usize,
) -> anyhow::Result<usize> {
    let (positions, candidates) = (evaluate.positions, evaluate.candidates);
    match (evaluate.fan_out, &evaluate.budget) {
        (configs::FanOut::Rectangle, _) => Ok(FanOut::Rectangle { positions, candidates }.most_blocks(drafter.block_size)),
        (_, Some(Budget::Blocks(blocks))) => Ok(*blocks),
        (_, Some(budget)) => Ok(resolve(target, drafter, budget, settings, context)?.map_or(0, |resolved| resolved.blocks)),
        (_, None) => Ok(0),
    }
}

fn in_words(times: &RoundTimes) -> String {
    let milliseconds = |seconds: f64| format!("{:.1}", 1e3 * seconds);
    let drafters: Vec<String> = times
        .drafters
        .iter()
        .rev()
        .map(|it| {
            let (pack, draft) = (milliseconds(it.pack_seconds), milliseconds(it.draft_seconds));
            format!("{} layers a pack of {} {pack} and a draft {draft} ms", it.layers, it.blocks)
        })
        .collect();
    format!(
        "{:>12} a verification takes {} ms behind {} tokens; with {}",
        "prune",
        milliseconds(times.verify_seconds),
        times.context,
        drafters.join(", with ")
    )
}
