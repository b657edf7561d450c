//! How far a drafter's probabilities can be believed, from responses that it was not trained on.
//!
//! A fan-out weighs outcomes by what the drafter thinks of them. Slots further on are usually more sure than they should be, so each has a
//! temperature of its own that makes its probabilities honest: those of the true token given that all drafts before it are right, for only
//! then does the slot matter. The geometric fan-out needs two numbers instead, which are counted on the same blocks.
//!
//! Shapes legend: `R` rows, `V` vocabulary.

use data::supervision::Example;
use serde::{Deserialize, Serialize};
use tch::{Kind, Tensor};

use crate::decode::DecodeError;
use crate::drafter::{Drafter, LaneWork};
use crate::fan_out::{FanOut, UNKNOWN_DRAFTER};
use crate::replay::MOST_LOGIT_ROWS;
use crate::rounds::ratio;
use crate::walking::{Place, Walk, judge, walk};

/// What held-out responses say about a drafter's probabilities.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct Calibration {
    /// Responses and blocks it rests on.
    pub responses: usize,
    pub blocks: usize,
    /// For each used slot: what its logits are to be divided by. Above 1 the drafter is too sure of itself there.
    pub temperatures: Vec<f32>,
    /// Share of drafted tokens that are right, among those with all before them right.
    pub acceptance: f64,
    /// How fast more candidates bring the target's token at a rejection: F of them miss it in proportion to F^-r.
    pub rank_exponent: f64,
}

/// Fewer true tokens than this say too little about a slot, which then takes the temperature of the one before it.
const LEAST_TOKENS: usize = 32;

/// Numbers of candidates at which misses are counted; no slot is ever asked for more.
const CANDIDATES: [usize; 6] = [1, 2, 4, 8, 16, 32];

/// Fewer misses than this are too few for their logarithm.
const LEAST_MISSES: usize = 5;

/// Bounds of a rank exponent that a fan-out can use.
const RANK_EXPONENTS: (f64, f64) = (0.1, 4.0);

/// The temperatures that are tried: powers of the square root of 2, from 1/4 to 8.
const TRIED: usize = 11;

fn tried(index: usize) -> f64 {
    2_f64.powf(index as f64 / 2.0 - 2.0)
}

/// Held-out responses that a drafter is calibrated on, and as many others that hit rates are counted on.
const RESPONSES: usize = 24;

/// Rounds that either of them takes at most: a few hundred say all there is to say, and the time stays small beside decoding.
pub const MOST_ROUNDS: usize = 512;

/// Held-out responses to calibrate on and others to count hits on, dealt out by turns so that neither is judged by the other's; a single one
/// serves both.
pub fn deal(held_out: &[Example]) -> (Vec<Example>, Vec<Example>) {
    let of_turn = |turn: usize| held_out.iter().skip(turn).step_by(2).take(RESPONSES).cloned().collect();
    if held_out.len() == 1 { (held_out.to_vec(), held_out.to_vec()) } else { (of_turn(0), of_turn(1)) }
}

/// The fan-out that a recipe asks for, with so many blocks where it is not a rectangle.
pub fn fan_out(evaluate: &configs::Evaluate, blocks: usize, calibration: Option<&Calibration>) -> FanOut {
    match evaluate.fan_out {
        configs::FanOut::Rectangle => FanOut::Rectangle { positions: evaluate.positions, candidates: evaluate.candidates },
        configs::FanOut::BestFirst => FanOut::BestFirst { blocks },
        configs::FanOut::Geometric => geometric(blocks, calibration),
    }
}

/// The geometric fan-out by what is known of a drafter.
pub fn geometric(blocks: usize, calibration: Option<&Calibration>) -> FanOut {
    let (acceptance, rank_exponent) = calibration.map_or(UNKNOWN_DRAFTER, |it| (it.acceptance, it.rank_exponent));
    FanOut::Geometric { blocks, acceptance, rank_exponent }
}

/// Calibrates a drafter on known responses, walked as replay does until there were `most_blocks`. `None` when they hold no round.
///
/// # Errors
/// A drafter that cannot draft, and what libtorch refuses, such as a token outside the drafter's vocabulary.
pub fn calibrate(drafter: &Drafter, examples: &[Example], most_blocks: usize) -> Result<Option<Calibration>, DecodeError> {
    let used = drafter.block_size.saturating_sub(drafter.first_used_slot()).max(1);
    let mut counts = Counts::new(used);
    let in_chunks = Walk { lanes: (MOST_LOGIT_ROWS / used).max(1), blocks: 1, most_rounds: most_blocks };
    walk(drafter, examples, &in_chunks, &mut |cache, work, places| {
        torch::guarded("calibrating the drafter", || counts.rounds(drafter, cache, work, places)).map_err(DecodeError::from)
    })?;
    Ok((counts.blocks > 0).then(|| counts.calibration(examples.len())))
}

/// What is summed up over blocks.
struct Counts {
    blocks: usize,
    /// Per used slot the number of true tokens, and the sum of their -log probability at each of the temperatures tried.
    slots: Vec<(usize, [f64; TRIED])>,
    /// Drafted tokens judged, and how many of them were right.
    judged: usize,
    right: usize,
    /// Rejections that so many candidates miss, by [`CANDIDATES`].
    missed: [usize; CANDIDATES.len()],
}

/// A row of logits and the token that was true there.
struct Known {
    slot: usize,
    drafted: u32,
    truth: u32,
    /// Whether the slot's token was to be verified; the last slot may be a guess of the bonus token.
    verified: bool,
}

impl Counts {
    fn new(used: usize) -> Self {
        Self { blocks: 0, slots: vec![(0, [0.0; TRIED]); used], judged: 0, right: 0, missed: [0; CANDIDATES.len()] }
    }

    /// One block of each of these responses; gives how many tokens each commits.
    fn rounds(&mut self, drafter: &Drafter, cache: &model::KvCache, work: &[LaneWork<'_>], places: &[Place<'_>]) -> Vec<usize> {
        let Some((logits_rv, blocks)) = drafter.logits(cache, work) else { return Vec::new() };
        let (used, verified) = (self.slots.len(), drafter.block_size - 1);
        let drafted = torch::to_ids(&logits_rv.argmax(-1, false));
        let (mut rows, mut known, mut committed) = (Vec::new(), Vec::new(), Vec::with_capacity(blocks));
        for (block, (place, drafted)) in places.iter().zip(drafted.chunks(used)).enumerate() {
            let (_, accepted, tokens) = judge(&drafted[..verified], place.rest);
            committed.push(tokens);
            // The slots whose drafts before them are all right.
            for slot in (0..used).take_while(|&slot| slot <= accepted && slot < place.rest.len()) {
                rows.push(block * used + slot);
                known.push(Known { slot, drafted: drafted[slot], truth: place.rest[slot], verified: slot < verified });
            }
        }
        self.blocks += blocks;
        self.add(&logits_rv.index_select(0, &torch::index_tensor(&rows, logits_rv.device())), &known);
        committed
    }

    /// Adds f32 logits `[R, V]` of which the true tokens are known.
    fn add(&mut self, logits_rv: &Tensor, known: &[Known]) {
        let truths: Vec<u32> = known.iter().map(|known| known.truth).collect();
        let truths_r1 = torch::ids_tensor(&truths, logits_rv.device()).unsqueeze(1);
        let below_best_rv = logits_rv - logits_rv.amax([-1_i64].as_slice(), true);
        let truth_r1 = below_best_rv.gather(1, &truths_r1, false);
        for index in 0..TRIED {
            let scale = 1.0 / tried(index);
            let sums_r1 = (&below_best_rv * scale).exp_().sum_dim_intlist([-1_i64].as_slice(), true, Kind::Float);
            let losses = torch::to_f32s(&(sums_r1.log() - &truth_r1 * scale));
            for (known, loss) in known.iter().zip(losses) {
                self.slots[known.slot].1[index] += f64::from(loss);
            }
        }
        // The drafted token is among those that are likelier, so this is the true token's rank among the others, from 1.
        let ranks = torch::to_ids(&below_best_rv.gt_tensor(&truth_r1).sum_dim_intlist([-1_i64].as_slice(), false, Kind::Int64));
        for (known, rank) in known.iter().zip(ranks) {
            self.slots[known.slot].0 += 1;
            if !known.verified {
                continue;
            }
            self.judged += 1;
            if known.drafted == known.truth {
                self.right += 1;
                continue;
            }
            for (missed, candidates) in self.missed.iter_mut().zip(CANDIDATES) {
                *missed += usize::from(rank as usize > candidates);
            }
        }
    }

    fn calibration(&self, responses: usize) -> Calibration {
        let mut temperatures: Vec<f32> = Vec::with_capacity(self.slots.len());
        for (tokens, losses) in &self.slots {
            let before = temperatures.last().copied().unwrap_or(1.0);
            temperatures.push(if *tokens < LEAST_TOKENS { before } else { best_temperature(losses) as f32 });
        }
        let rejections = self.judged - self.right;
        Calibration {
            responses,
            blocks: self.blocks,
            temperatures,
            acceptance: if self.judged > 0 { ratio(self.right, self.judged) } else { UNKNOWN_DRAFTER.0 },
            rank_exponent: rank_exponent(&self.missed, rejections).unwrap_or(UNKNOWN_DRAFTER.1),
        }
    }
}

/// Where the losses at the temperatures tried are least: the vertex of the parabola through the least of them and its neighbours, over the
/// logarithm of the temperature.
fn best_temperature(losses: &[f64; TRIED]) -> f64 {
    let least = (0..TRIED).min_by(|&one, &other| losses[one].total_cmp(&losses[other])).unwrap_or(0);
    if least == 0 || least == TRIED - 1 {
        return tried(least);
    }
    let (before, at, after) = (losses[least - 1], losses[least], losses[least + 1]);
    let curvature = before - 2.0 * at + after;
    let offset = if curvature > 0.0 { (before - after) / (2.0 * curvature) } else { 0.0 };
    tried(least) * 2_f64.powf(offset / 2.0)
}

/// The slope of log(share missed) over log(candidates) by least squares, its sign turned. The line need not go through (1, 1): a constant
/// factor is the same for all positions and moves no candidate from one to another.
fn rank_exponent(missed: &[usize; CANDIDATES.len()], rejections: usize) -> Option<f64> {
    let enough = missed.iter().zip(CANDIDATES).filter(|(missed, _)| **missed >= LEAST_MISSES);
    let points: Vec<(f64, f64)> =
        enough.map(|(&missed, candidates)| ((candidates as f64).ln(), ratio(missed, rejections).ln())).collect();
    let count = points.len() as f64;
    let mean_of = |of: fn(&(f64, f64)) -> f64| points.iter().map(of).sum::<f64>() / count;
    let (x, y) = (mean_of(|point| point.0), mean_of(|point| point.1));
    let spread: f64 = points.iter().map(|point| (point.0 - x).powi(2)).sum();
    let slope = points.iter().map(|point| (point.0 - x) * (point.1 - y)).sum::<f64>() / spread;
    (points.len() >= 2).then(|| (-slope).clamp(RANK_EXPONENTS.0, RANK_EXPONENTS.1))
}

#[cfg(test)]
mod tests {
    use super::*;
    use data::supervision::{counter_generator, purpose};
    use rand_chacha::rand_core::RngCore;

    fn uniform(generator: &mut impl RngCore) -> f64 {
        (f64::from(generator.next_u32()) + 0.5) / 2_f64.powi(32)
    }

    /// Random logits `[rows, vocabulary]`, and for each row a token drawn by them.
    fn drawn(rows: usize, vocabulary: usize) -> (Tensor, Vec<u32>) {
        let mut generator = counter_generator(3, purpose::SAMPLING, 0, 0);
        let mut logits = Vec::with_capacity(rows * vocabulary);
        let mut tokens = Vec::with_capacity(rows);
        for _ in 0..rows {
            let row: Vec<f64> = (0..vocabulary).map(|_| 6.0 * uniform(&mut generator)).collect();
            // The Gumbel-max trick.
            let scores: Vec<f64> = row.iter().map(|logit| logit - (-uniform(&mut generator).ln()).ln()).collect();
            let best = (0..vocabulary).max_by(|&one, &other| scores[one].total_cmp(&scores[other]));
            tokens.push(best.unwrap_or(0) as u32);
            logits.extend(row.iter().map(|&logit| logit as f32));
        }
        (Tensor::from_slice(&logits).view([rows as i64, vocabulary as i64]), tokens)
    }

    fn known(slot: usize, truth: u32) -> Known {
        Known { slot, drafted: u32::MAX, truth, verified: true }
    }

    #[test]
    fn a_slot_gets_the_factor_back_by_which_its_logits_were_scaled() {
        let (logits_rv, tokens) = drawn(3000, 20);
        let factors = [1.0, 0.5, 1.3, 2.0, 5.0, 100.0];
        let mut counts = Counts::new(factors.len() + 1);
        for (slot, factor) in factors.iter().enumerate() {
            let of_slot: Vec<Known> = tokens.iter().map(|&token| known(slot, token)).collect();
            counts.add(&(&logits_rv * *factor), &of_slot);
        }
        counts.add(&logits_rv.narrow(0, 0, 3), &tokens[..3].iter().map(|&token| known(factors.len(), token)).collect::<Vec<_>>());
        let temperatures = counts.calibration(1).temperatures;
        for (temperature, factor) in temperatures.iter().zip([1.0, 0.5, 1.3, 2.0, 5.0, 8.0]) {
            assert!((temperature / factor - 1.0).abs() < 0.04, "{temperature} for {factor}");
        }
        assert_eq!(temperatures[6], temperatures[5], "three tokens say nothing");
        assert_eq!(Counts::new(2).calibration(1).temperatures, [1.0, 1.0]);
    }

    #[test]
    fn known_acceptance_and_rank_exponent_are_found() {
        for (acceptance, exponent) in [(0.8, 0.4), (0.5, 0.9), (0.3, 2.0)] {
            let mut generator = counter_generator(4, purpose::SAMPLING, 0, 0);
            let (rows, vocabulary) = (4000, 64_i64);
            // Token 0 is the drafted one, and token R its R-th other candidate.
            let logits_rv = -Tensor::arange(vocabulary, (Kind::Float, tch::Device::Cpu)).expand([rows, vocabulary], false);
            let known: Vec<Known> = (0..rows)
                .map(|_| {
                    let right = uniform(&mut generator) < acceptance;
                    // More than F with probability F^-r.
                    let rank = uniform(&mut generator).powf(-1.0 / exponent).ceil().min(63.0) as u32;
                    Known { slot: 0, drafted: 0, truth: if right { 0 } else { rank }, verified: true }
                })
                .collect();
            let mut counts = Counts::new(1);
            for (first, known) in known.chunks(500).enumerate() {
                counts.add(&logits_rv.narrow(0, 500 * first as i64, known.len() as i64), known);
            }
            let found = counts.calibration(1);
            assert!((found.acceptance - acceptance).abs() < 0.03, "{found:?}");
            assert!((found.rank_exponent / exponent - 1.0).abs() < 0.15, "{found:?} for {exponent}");
        }
    }

    #[test]
    fn a_constant_factor_does_not_change_the_rank_exponent_and_too_little_gives_none() {
        let missed = |factor: f64| CANDIDATES.map(|candidates| (factor * 1e6 * (candidates as f64).powf(-0.7)) as usize);
        for factor in [1.0, 0.5] {
            let found = rank_exponent(&missed(factor), 1_000_000);
            assert!(found.is_some_and(|found| (found - 0.7).abs() < 1e-3), "{found:?}");
        }
        assert_eq!(rank_exponent(&[9, 4, 2, 1, 0, 0], 20), None);
        assert_eq!(rank_exponent(&[0; 6], 0), None);
        assert_eq!(rank_exponent(&[9, 9, 9, 9, 9, 9], 10), Some(RANK_EXPONENTS.0), "more candidates bring nothing");
        let nothing = Counts::new(1).calibration(0);
        assert_eq!((nothing.acceptance, nothing.rank_exponent), UNKNOWN_DRAFTER);
    }
}
