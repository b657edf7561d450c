//! What a drafter drafts ahead: how far its probabilities can be believed, how many continuations there is time for, and what other
//! fan-outs would have found ready.

use std::cell::OnceCell;
use std::collections::BTreeMap;
use std::fs;
use std::path::PathBuf;

use anyhow::Context as _;
use configs::{Budget, Decoder, Labels};
use data::supervision::Example;
use evaluator::benchmark::Benchmark;
use evaluator::budget::{Resolved, resolve};
use evaluator::calibration::{Calibration, MOST_ROUNDS, calibrate, deal, fan_out, geometric};
use evaluator::decode::DecodeError;
use evaluator::fan_out::{FanOut, UNKNOWN_DRAFTER};
use evaluator::replay::hit_rates;
use evaluator::score::HitRateAt;
use evaluator::{Drafter, Settings};
use model::Transformer;

use crate::stages::Context;
use crate::stages::train::responses;

/// Sizes at which fan-outs are compared: packs of 4, 8, 16, 25 and 32 with the block under verification.
const COMPARED_BLOCKS: [usize; 5] = [3, 7, 15, 24, 31];

/// What was found for one checkpoint.
pub(super) struct Found {
    pub(super) fan_out: FanOut,
    pub(super) budget: Option<Resolved>,
    pub(super) calibration: Option<Calibration>,
    pub(super) hit_rate_by_blocks: BTreeMap<String, Vec<HitRateAt>>,
}

/// What is the same for all checkpoints.
pub(super) struct Ahead {
    /// Where budgets are kept by number of layers. A machine measures differently from moment to moment: drafters of one depth get the same
    /// budget, and an evaluation that goes on keeps the one that it had.
    budgets: PathBuf,
    /// Held-out responses: those to calibrate on, and those to count hits on.
    held_out: OnceCell<(Vec<Example>, Vec<Example>)>,
}

impl Ahead {
    pub(super) fn new(budgets: PathBuf) -> Self {
        Self { budgets, held_out: OnceCell::new() }
    }

    /// Calibrates a checkpoint's drafter, counts hit rates, and settles its fan-out. Does nothing where no decoder drafts ahead.
    pub(super) fn of(
        &self,
        context: &Context<'_>,
        (name, drafter): (&str, &mut Drafter),
        target: &Transformer,
        benchmarks: &[Benchmark],
        settings: &Settings,
    ) -> anyhow::Result<Found> {
        let evaluate = &context.recipe.evaluate;
        if !evaluate.decoders.contains(&Decoder::Asynchronous) {
            let fan_out = fan_out(evaluate, evaluate.budget.and_then(blocks_of).unwrap_or(0), None);
            return Ok(Found { fan_out, budget: None, calibration: None, hit_rate_by_blocks: BTreeMap::new() });
        }
        let (to_calibrate, to_count) = self.held_out(context)?;
        let calibration = calibrate(drafter, to_calibrate, MOST_ROUNDS)?;
        match &calibration {
            Some(calibration) => {
                drafter.temperatures.clone_from(&calibration.temperatures);
                context.progress.note(&in_words(name, calibration));
            }
            None => {
                if let Some(note) = without_calibration(evaluate.fan_out) {
                    context
                        .progress
                        .note(&format!("{:>12} {name}: no response is held out (`data.holdout`); {note}", "evaluate"));
                }
            }
        }
        let hit_rate_by_blocks = match &calibration {
            Some(calibration) if !context.stopping() => compare(drafter, to_count, calibration)?,
            _ => BTreeMap::new(),
        };
        let budget = match &evaluate.budget {
            Some(budget) if blocks_of(*budget).is_none() && !context.stopping() => {
                self.budget(context, name, drafter, (target, budget), benchmarks, settings)?
            }
            _ => None,
        };
        let blocks = budget.as_ref().map(|it| it.blocks).or_else(|| evaluate.budget.and_then(blocks_of)).unwrap_or(0);
        let fan_out = fan_out(evaluate, blocks, calibration.as_ref());
        Ok(Found { fan_out, budget, calibration, hit_rate_by_blocks })
    }

    /// The run's held-out responses: those to calibrate on, and those to count hits on.
    fn held_out(&self, context: &Context<'_>) -> anyhow::Result<(&[Example], &[Example])> {
        if self.held_out.get().is_none() {
            let _ = self.held_out.set(deal(&responses(context)?.held_out));
        }
        Ok(self.held_out.get().map_or((&[], &[]), |(one, other)| (one, other)))
    }

    /// What a budget of time comes to for drafters of this depth: as found before, else measured.
    fn budget(
        &self,
        context: &Context<'_>,
        name: &str,
        drafter: &Drafter,
        (target, budget): (&Transformer, &Budget),
        benchmarks: &[Benchmark],
        settings: &Settings,
    ) -> anyhow::Result<Option<Resolved>> {
        let path = &self.budgets;
        let mut known: BTreeMap<usize, Resolved> = match fs::read(path) {
            Ok(bytes) => serde_json::from_slice(&bytes).with_context(|| format!("`{}` is damaged; remove it", path.display()))?,
            Err(_) => BTreeMap::new(),
        };
        let layers = drafter.model.layers.len();
        if let Some(resolved) = known.get(&layers) {
            return Ok(Some(resolved.clone()));
        }
        // Halfway through the longest answer to the prompt in the middle.
        let mut lengths: Vec<usize> = benchmarks.iter().flat_map(|benchmark| benchmark.prompts.iter().map(Vec::len)).collect();
        lengths.sort_unstable();
        let middle = lengths.get(lengths.len() / 2).copied().unwrap_or(0) + settings.max_new_tokens / 2;
        let resolved = match resolve(target, drafter, budget, settings, middle, context.stop) {
            // Whoever decodes next ends as well.
            Err(DecodeError::Stopped) => return Ok(None),
            resolved => resolved?,
        };
        let Some(resolved) = resolved else { return Ok(None) };
        context.progress.note(&format!("{:>12} {name}, {layers} layers: {resolved}", "evaluate"));
        known.insert(layers, resolved.clone());
        data::files::write_atomically(path, &serde_json::to_vec_pretty(&known)?)
            .with_context(|| format!("cannot write `{}`", path.display()))?;
        Ok(Some(resolved))
    }
}

/// A budget that needs no measuring.
fn blocks_of(budget: Budget) -> Option<usize> {
    match budget {
        Budget::Blocks(blocks) => Some(blocks),
        Budget::Auto | Budget::Milliseconds(_) => None,
    }
}

/// The hit rates of all fan-outs at sizes from small to published.
fn compare(
    drafter: &Drafter,
    examples: &[Example],
    calibration: &Calibration,
) -> anyhow::Result<BTreeMap<String, Vec<HitRateAt>>> {
    let of_size = |blocks: usize| {
        [
            ("rectangle", rectangle(blocks, drafter.block_size - 1, drafter.labels)),
            ("geometric", geometric(blocks, Some(calibration))),
            ("best_first", FanOut::BestFirst { blocks }),
        ]
        .map(|(name, fan_out)| (blocks, name, fan_out))
    };
    let (sizes, fan_outs): (Vec<(usize, &str)>, Vec<FanOut>) =
        COMPARED_BLOCKS.into_iter().flat_map(of_size).map(|(blocks, name, fan_out)| ((blocks, name), fan_out)).unzip();
    let mut compared: BTreeMap<String, Vec<HitRateAt>> = BTreeMap::new();
    for (((blocks, name), fan_out), rate) in
        sizes.into_iter().zip(&fan_outs).zip(hit_rates(drafter, examples, &fan_outs, MOST_ROUNDS)?)
    {
        if rate.rounds > 0 {
            let at = HitRateAt { blocks, fan_out: fan_out.to_string(), hit_rate: rate.share(), rounds: rate.rounds };
            compared.entry(name.to_string()).or_default().push(at);
        }
    }
    Ok(compared)
}

/// The rectangle of at most so many blocks, full acceptance included: two candidates a position, as published, and as many positions as
/// fit; more candidates only where all positions of the draft have two and blocks are left for another at each, and one where not even
/// one position of two fits.
fn rectangle(blocks: usize, drafted: usize, labels: Labels) -> FanOut {
    let positions = |candidates: usize| {
        let full_acceptance = if labels == Labels::Next { candidates } else { 1 };
        blocks.saturating_sub(full_acceptance) / candidates
    };
    let candidates =
        if positions(2) == 0 { 1 } else { (2..).take_while(|&it| it == 2 || positions(it) >= drafted).last().unwrap_or(2) };
    FanOut::Rectangle { positions: positions(candidates).min(drafted), candidates }
}

fn in_words(name: &str, calibration: &Calibration) -> String {
    let temperatures: Vec<String> = calibration.temperatures.iter().map(|temperature| format!("{temperature:.2}")).collect();
    format!(
        "{:>12} {name}: calibrated on {} blocks of {} held-out responses: temperatures {}; {:.2} of drafted tokens right; rank exponent {:.2}",
        "evaluate",
        calibration.blocks,
        calibration.responses,
        temperatures.join(" "),
        calibration.acceptance,
        calibration.rank_exponent
    )
}

/// What a fan-out does without a calibration, if it matters to it.
fn without_calibration(fan_out: configs::FanOut) -> Option<String> {
    match fan_out {
        configs::FanOut::Rectangle => None,
        configs::FanOut::BestFirst => Some("the drafter's probabilities are taken as they are".to_string()),
        configs::FanOut::Geometric => {
            let (acceptance, rank_exponent) = UNKNOWN_DRAFTER;
            Some(format!("an acceptance of {acceptance} and a rank exponent of {rank_exponent} are assumed"))
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn rectangles_take_what_fits_into_their_blocks() {
        for (blocks, drafted, labels, positions, candidates) in [
            // As published: 11 positions with two candidates and one continuation for full acceptance.
            (23, 15, Labels::InPlace, 11, 2),
            (24, 15, Labels::InPlace, 11, 2),
            (24, 15, Labels::Next, 11, 2),
            (15, 15, Labels::Next, 6, 2),
            (3, 15, Labels::InPlace, 1, 2),
            (3, 15, Labels::Next, 2, 1),
            // Short drafts: all seven positions have three candidates.
            (24, 7, Labels::Next, 7, 3),
            (31, 7, Labels::Next, 7, 3),
            (31, 7, Labels::InPlace, 7, 4),
        ] {
            let expected = FanOut::Rectangle { positions, candidates };
            let found = rectangle(blocks, drafted, labels);
            assert_eq!(found, expected, "{blocks} blocks, {drafted} drafted, {labels:?}");
            let full_acceptance = if labels == Labels::Next { candidates } else { 1 };
            assert!(positions * candidates + full_acceptance <= blocks);
        }
    }
}
