//! How many continuations there is time for: measured on the real models, each with its share of the cores.
//!
//! A pack that is still being written when the verification beside it is done keeps the target waiting, in every round and whatever its
//! outcome. So the budget of a round is best given as time, and its number of blocks found on the machine that decodes.

use std::fmt::{Display, Formatter};
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Instant;

use configs::Budget;
use model::Transformer;
use serde::{Deserialize, Serialize};

use crate::asynchronous::Shares;
use crate::decode::{DecodeError, Settings, check_drafter};
use crate::drafter::{Block, Drafter, LaneWork};
use crate::judging::{Trial, judge};
use crate::room::allocate;
use crate::sampling::TokenPlace;
use crate::under_way::target_logits;

/// What a round's forwards take.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct Measured {
    /// Texts side by side, and tokens that each holds.
    pub texts: usize,
    pub context: usize,
    /// The target's forward over a block of each text.
    pub verify_seconds: f64,
    /// The drafter's forward over packs of growing size, up to the first that does not fit.
    pub packs: Vec<PackTime>,
    /// Whether both models are on one accelerator, where forwards wait for each other: nothing is hidden there.
    pub shared_device: bool,
}

/// The median time of a pack of so many continuations of each text.
#[derive(Debug, Clone, Copy, PartialEq, Serialize, Deserialize)]
pub struct PackTime {
    pub blocks: usize,
    pub seconds: f64,
}

/// What a budget came to.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct Resolved {
    /// As the recipe has it.
    pub asked: String,
    /// Continuations of a round of one text; 0: drafting ahead would keep the target waiting.
    pub blocks: usize,
    pub measured: Measured,
}

/// Sizes of packs that are timed.
const PACKS: [usize; 9] = [1, 2, 4, 8, 16, 24, 32, 48, 64];

/// Each time is the median of so many, after one that is not counted.
pub(crate) const RUNS: usize = 5;

/// Measures both models at `context` tokens in each of as many texts as `settings` has side by side, and finds the largest number of
/// continuations within the budget: for `auto` those that are written while the target verifies. A number of blocks stands as it is, and is
/// measured against nothing: `None`.
///
/// # Errors
/// Models that do not fit together, what libtorch refuses, such as a lack of memory, and [`DecodeError::Stopped`] when `stop` was set.
pub fn resolve(
    target: &Transformer,
    drafter: &Drafter,
    budget: &Budget,
    settings: &Settings,
    context: usize,
    stop: &AtomicBool,
) -> Result<Option<Resolved>, DecodeError> {
    let limit = match budget {
        Budget::Blocks(_) => return Ok(None),
        Budget::Auto => None,
        Budget::Milliseconds(milliseconds) => Some(milliseconds / 1e3),
    };
    check_drafter(target, drafter)?;
    let measured = measure(target, drafter, settings, context, limit, stop)?;
    let limit = match limit {
        Some(limit) => limit,
        None if measured.shared_device => 0.0,
        None => measured.verify_seconds,
    };
    Ok(Some(Resolved { asked: budget.to_string(), blocks: most_blocks(&measured.packs, limit), measured }))
}

/// Times a verification, then packs up to the first that takes longer than the limit, or than the verification where there is none.
fn measure(
    target: &Transformer,
    drafter: &Drafter,
    settings: &Settings,
    context: usize,
    limit: Option<f64>,
    stop: &AtomicBool,
) -> Result<Measured, DecodeError> {
    let _no_grad = tch::no_grad_guard();
    let shares = Shares::take();
    let verify_seconds = median_seconds(verification(target, drafter, settings, context)?, stop)?;
    torch::set_num_threads(shares.drafter);
    let mut packs = Vec::new();
    for blocks in PACKS {
        let seconds = median_seconds(pack(drafter, settings, context, blocks)?, stop)?;
        packs.push(PackTime { blocks, seconds });
        if seconds > limit.unwrap_or(verify_seconds) {
            break;
        }
    }
    let texts = settings.concurrency.max(1);
    Ok(Measured { texts, context, verify_seconds, packs, shared_device: share_device(target, drafter) })
}

/// Whether both models are on one accelerator.
pub(crate) fn share_device(target: &Transformer, drafter: &Drafter) -> bool {
    target.device().is_cuda() && target.device() == drafter.model.device()
}

/// What the tokens are makes no difference to the time, nor do keys and values of zero.
fn any_block(drafter: &Drafter) -> Vec<u32> {
    (0..drafter.block_size as u32).map(|slot| slot % drafter.model.config.vocab_size as u32).collect()
}

const PLACE: TokenPlace = TokenPlace { request: 0, position: 0 };

/// The target's work in a round, to be done again and again: a block of each text behind `context` tokens.
pub(crate) fn verification<'a>(
    target: &'a Transformer,
    drafter: &'a Drafter,
    settings: &'a Settings,
    context: usize,
) -> Result<impl FnMut() -> Result<(), DecodeError> + 'a, DecodeError> {
    let (texts, ids) = (settings.concurrency.max(1), any_block(drafter));
    let mut cache = allocate("target", target, texts, context + ids.len())?;
    let drawn_from = settings.drawn_by().map(|_| vec![vec![1.0; drafter.model.config.vocab_size as usize]; ids.len() - 1]);
    Ok(move || {
        let work: Vec<(usize, &[u32])> = (0..texts).map(|lane| (lane, ids.as_slice())).collect();
        let trial = |_| Trial { place: PLACE, draft: &ids[1..], drawn_from: drawn_from.as_deref() };
        let trials: Vec<Trial<'_>> = (0..texts).map(trial).collect();
        (0..texts).for_each(|lane| cache.set_length(lane, context));
        let logits_rv = target_logits(target, &cache, &work, usize::MAX)?;
        judge(&logits_rv, &settings.sampler, &trials)?;
        Ok(())
    })
}

/// The drafter's work in a round, to be done again and again: so many continuations of each text. One is what a miss asks for.
pub(crate) fn pack<'a>(
    drafter: &'a Drafter,
    settings: &'a Settings,
    context: usize,
    blocks: usize,
) -> Result<impl FnMut() -> Result<(), DecodeError> + 'a, DecodeError> {
    let (texts, ids) = (settings.concurrency.max(1), any_block(drafter));
    let pack: Vec<Block> = (0..blocks).map(|block| Block { anchor: ids[0], context: 1 + block % ids.len() }).collect();
    let mut cache = torch::guarded("allocating the cache", || drafter.new_cache(texts, context, (1 + blocks) * ids.len()))?;
    let firsts = vec![PLACE; texts * blocks];
    Ok(move || {
        let work: Vec<LaneWork<'_>> = (0..texts).map(|lane| LaneWork { lane, clean: &ids, blocks: &pack }).collect();
        (0..texts).for_each(|lane| cache.set_length(lane, context));
        match settings.drawn_by() {
            None => drafter.draft(&mut cache, &work, RANKED)?,
            Some(sampler) => drafter.draft_drawn(&mut cache, &work, RANKED, sampler, &firsts)?,
        };
        Ok(())
    })
}

/// Tokens that a fan-out may ask a slot for.
const RANKED: usize = 16;

fn median_seconds(mut work: impl FnMut() -> Result<(), DecodeError>, stop: &AtomicBool) -> Result<f64, DecodeError> {
    work()?;
    let seconds: Result<Vec<f64>, DecodeError> = (0..RUNS).map(|_| seconds(&mut work, stop)).collect();
    Ok(median(seconds?))
}

/// What one run of it takes; none is begun once `stop` is set.
pub(crate) fn seconds(work: &mut impl FnMut() -> Result<(), DecodeError>, stop: &AtomicBool) -> Result<f64, DecodeError> {
    if stop.load(Ordering::Relaxed) {
        return Err(DecodeError::Stopped);
    }
    let start = Instant::now();
    work()?;
    Ok(start.elapsed().as_secs_f64())
}

/// The one in the middle; of an even number the later one.
pub(crate) fn median(mut seconds: Vec<f64>) -> f64 {
    seconds.sort_by(f64::total_cmp);
    seconds.get(seconds.len() / 2).copied().unwrap_or(0.0)
}

/// The largest number of blocks that takes no longer than `limit` seconds, between the sizes measured by a straight line; never more than
/// the largest size measured. A pack is taken to last no less than a smaller one.
fn most_blocks(packs: &[PackTime], limit: f64) -> usize {
    let mut fits = PackTime { blocks: 0, seconds: 0.0 };
    for pack in packs {
        let seconds = pack.seconds.max(fits.seconds);
        if seconds > limit {
            // Below the smallest size there is nothing to draw a line from: a forward has its price before its first block.
            let between = if fits.blocks == 0 { 0.0 } else { (limit - fits.seconds) / (seconds - fits.seconds) };
            return fits.blocks + (between * (pack.blocks - fits.blocks) as f64) as usize;
        }
        fits = PackTime { seconds, ..*pack };
    }
    fits.blocks
}

impl Display for Resolved {
    fn fmt(&self, formatter: &mut Formatter<'_>) -> std::fmt::Result {
        let Measured { texts, context, verify_seconds, packs, shared_device } = &self.measured;
        let packs: Vec<String> = packs.iter().map(|pack| format!("{}: {:.1}", pack.blocks, 1e3 * pack.seconds)).collect();
        write!(
            formatter,
            "a verification takes {:.1} ms behind {context} tokens{}, packs of so many blocks {} ms; budget {}: ",
            1e3 * verify_seconds,
            if *texts > 1 { format!(" in each of {texts} texts") } else { String::new() },
            packs.join(", "),
            self.asked
        )?;
        match (self.blocks, shared_device) {
            (0, true) => {
                write!(formatter, "0 blocks, nothing is drafted ahead: both models are on one device and wait for each other")
            }
            (0, false) => write!(formatter, "0 blocks, nothing is drafted ahead: not even one fits"),
            (1, _) => write!(formatter, "1 block"),
            (blocks, _) => write!(formatter, "{blocks} blocks"),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn packs(times: &[(usize, f64)]) -> Vec<PackTime> {
        times.iter().map(|&(blocks, seconds)| PackTime { blocks, seconds }).collect()
    }

    #[test]
    fn the_largest_pack_within_the_limit_is_found_between_the_sizes_measured() {
        let packs = packs(&[(1, 0.010), (2, 0.012), (4, 0.016), (8, 0.032)]);
        for (limit, blocks) in [
            (0.0, 0),
            (0.0099, 0),
            (0.010, 1),
            (0.0119, 1),
            (0.013, 2),
            (0.014, 3),
            (0.016, 4),
            (0.0201, 5),
            (0.031, 7),
            (0.032, 8),
            (9.0, 8),
        ] {
            assert_eq!(most_blocks(&packs, limit), blocks, "{limit}");
        }
        assert_eq!(most_blocks(&[], 1.0), 0);
    }

    #[test]
    fn a_larger_pack_that_was_measured_faster_by_chance_does_not_confuse() {
        let packs = packs(&[(1, 0.010), (2, 0.015), (4, 0.011), (8, 0.035)]);
        assert_eq!(most_blocks(&packs, 0.012), 1);
        assert_eq!(most_blocks(&packs, 0.015), 4);
        assert_eq!(most_blocks(&packs, 0.0299), 6);
    }

    #[test]
    fn what_was_chosen_is_said_in_words_and_read_back() -> Result<(), serde_json::Error> {
        let packs = packs(&[(1, 0.02), (2, 0.06)]);
        let measured = Measured { texts: 1, context: 90, verify_seconds: 0.0505, packs, shared_device: false };
        let resolved = Resolved { asked: "auto".to_string(), blocks: 1, measured };
        assert_eq!(
            resolved.to_string(),
            "a verification takes 50.5 ms behind 90 tokens, packs of so many blocks 1: 20.0, 2: 60.0 ms; budget auto: 1 block"
        );
        assert_eq!(serde_json::from_str::<Resolved>(&serde_json::to_string(&resolved)?)?, resolved);
        let nothing = Resolved { blocks: 0, ..resolved };
        assert!(nothing.to_string().ends_with("0 blocks, nothing is drafted ahead: not even one fits"));
        Ok(())
    }
}
