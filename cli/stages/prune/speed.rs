//! Times the target and drafters of every depth that pruning may reach, for pruning that stops by speed.

use std::ops::RangeInclusive;
use std::sync::atomic::AtomicBool;

use configs::{Budget, Evaluate};
use data::supervision::Example;
use evaluator::Drafter;
use evaluator::budget::resolve;
use evaluator::decode::{DecodeError, Settings};
use evaluator::fan_out::FanOut;
use evaluator::round_times::{RoundTimes, round_times};
use model::Transformer;
use pruner::ledger::Ledger;
use pruner::pruning::layers;
use pruner::speed::SpeedModel;
use trainer::training::drafter_of;

use crate::models;
use crate::stages::{Context, evaluate};

/// What speeds are predicted from: times that an earlier start wrote into the ledger, or else measured now. `None` when asked to stop.
pub(super) fn model(
    context: &Context<'_>,
    teacher: &Transformer,
    held_out: &[Example],
    remove: usize,
    ledger: &Ledger,
) -> anyhow::Result<Option<SpeedModel>> {
    let (recipe, unpruned) = (context.recipe, teacher.layers.len());
    let depths = unpruned - remove..=unpruned;
    let covers = |times: &&RoundTimes| depths.clone().all(|depth| times.drafters.iter().any(|it| it.layers == depth));
    let times = match ledger.times().filter(covers) {
        Some(times) => times.clone(),
        None => {
            context.progress.note(&format!(
                "{:>12} timing the target and drafters of {} to {}",
                "prune",
                depths.start(),
                layers(unpruned)
            ));
            let target = models::target(recipe)?;
            match measure(context, &target, teacher, depths, middle(held_out)) {
                Err(DecodeError::Stopped) => return Ok(None),
                times => times?,
            }
        }
    };
    context.progress.note(&in_words(&times));
    Ok(Some(SpeedModel { times, evaluate: recipe.evaluate.clone() }))
}

/// Times drafters of so many of the unpruned one's layers beside the target, with texts of `behind` tokens.
fn measure(
    context: &Context<'_>,
    target: &Transformer,
    teacher: &Transformer,
    depths: RangeInclusive<usize>,
    behind: usize,
) -> Result<RoundTimes, DecodeError> {
    let (recipe, stop) = (context.recipe, context.stop);
    let (settings, shape) = (evaluate::settings(recipe, target), models::block_shape(recipe));
    let mut drafters = Vec::new();
    for depth in depths {
        if context.stopping() {
            return Err(DecodeError::Stopped);
        }
        // Which layers a drafter has makes no difference to its time.
        let drafter = drafter_of(&teacher.with_layers(&(0..depth).collect::<Vec<_>>()), shape);
        let blocks = blocks(&recipe.evaluate, target, &drafter, &settings, behind, stop)?;
        drafters.push((drafter, blocks));
    }
    round_times(target, &drafters, &settings, behind, stop)
}

/// Tokens that a text holds halfway through the response of middle length.
fn middle(responses: &[Example]) -> usize {
    let halfway = |response: &Example| (response.prompt_length() + response.ids.len()) / 2;
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
    stop: &AtomicBool,
) -> Result<usize, DecodeError> {
    let (positions, candidates) = (evaluate.positions, evaluate.candidates);
    match (evaluate.fan_out, &evaluate.budget) {
        (configs::FanOut::Rectangle, _) => Ok(FanOut::Rectangle { positions, candidates }.most_blocks(drafter.block_size)),
        (_, Some(Budget::Blocks(blocks))) => Ok(*blocks),
        (_, Some(budget)) => Ok(resolve(target, drafter, budget, settings, context, stop)?.map_or(0, |resolved| resolved.blocks)),
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
            let pack = match it.blocks {
                0 => "no pack".to_string(),
                blocks => format!("a pack of {blocks} {}", milliseconds(it.pack_seconds)),
            };
            format!("{} {pack} and a draft {} ms", layers(it.layers), milliseconds(it.draft_seconds))
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

#[cfg(test)]
mod tests {
    use evaluator::round_times::DrafterTimes;

    use super::*;

    #[test]
    fn times_read_well_whatever_their_numbers() {
        let drafter = |layers, blocks, pack_seconds| DrafterTimes { layers, blocks, pack_seconds, draft_seconds: 0.0125 };
        let drafters = vec![drafter(1, 0, 0.0), drafter(2, 7, 0.02)];
        let times = RoundTimes { texts: 1, context: 40, verify_seconds: 0.05, shared_device: false, drafters };
        assert_eq!(
            in_words(&times).trim_start(),
            "prune a verification takes 50.0 ms behind 40 tokens; with 2 layers a pack of 7 20.0 and a draft 12.5 ms, with 1 layer no \
             pack and a draft 12.5 ms"
        );
    }
}
