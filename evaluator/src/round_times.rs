//! What rounds of asynchronous decoding take with drafters of several depths, and so how fast decoding would be with each: for choosing a
//! depth without decoding (ALGORITHMS §3.4 and §7, "select on speed model").
//!
//! A round takes the longer of verification and pack and, where no draft was ready, a draft after both; each text commits τ tokens in it.
//! Depths are timed by turns, so that a machine that is slower for a while is so for all of them.

use std::collections::BTreeSet;
use std::sync::atomic::AtomicBool;

use model::Transformer;
use serde::{Deserialize, Serialize};

use crate::asynchronous::Shares;
use crate::budget::{RUNS, median, pack, seconds, share_device, verification};
use crate::decode::{DecodeError, Settings, check_drafter};
use crate::drafter::Drafter;

/// Times of a round's forwards, in seconds.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct RoundTimes {
    /// Texts side by side, and tokens that each holds.
    pub texts: usize,
    pub context: usize,
    /// The target's forward over a block of each text.
    pub verify_seconds: f64,
    /// Whether both models are on one accelerator, where a pack and a verification wait for each other.
    pub shared_device: bool,
    /// Never slower with fewer layers at the same work, whatever was measured.
    pub drafters: Vec<DrafterTimes>,
}

/// Those of a drafter of so many layers.
#[derive(Debug, Clone, Copy, PartialEq, Serialize, Deserialize)]
pub struct DrafterTimes {
    pub layers: usize,
    /// Continuations of each text that it drafts ahead, and the time for all of them.
    pub blocks: usize,
    pub pack_seconds: f64,
    /// One block of each text, for which the target waits.
    pub draft_seconds: f64,
}

impl RoundTimes {
    /// Tokens per second of all texts together, from τ and the share of rounds whose draft is ready; `None` for a depth that was not timed.
    pub fn tokens_per_second(&self, layers: usize, tau: f64, hit_rate: f64) -> Option<f64> {
        let times = self.drafters.iter().find(|times| times.layers == layers)?;
        let beside = match self.shared_device {
            true => self.verify_seconds + times.pack_seconds,
            false => self.verify_seconds.max(times.pack_seconds),
        };
        // Texts side by side wait for each other: one miss is enough.
        let some_miss = 1.0 - hit_rate.powi(self.texts as i32);
        Some(self.texts as f64 * tau / (beside + some_miss * times.draft_seconds))
    }
}

/// Times drafters, each with as many continuations as it would draft ahead, beside `target`.
///
/// # Errors
/// Models that do not fit together, what libtorch refuses, such as a lack of memory, and [`DecodeError::Stopped`] when `stop` was set.
pub fn round_times(
    target: &Transformer,
    drafters: &[(Drafter, usize)],
    settings: &Settings,
    context: usize,
    stop: &AtomicBool,
) -> Result<RoundTimes, DecodeError> {
    let _no_grad = tch::no_grad_guard();
    let (texts, shares) = (settings.concurrency.max(1), Shares::take());
    let mut of_verification = Vec::with_capacity(RUNS);
    if let Some((drafter, _)) = drafters.first() {
        check_drafter(target, drafter)?;
        let mut verify = verification(target, drafter, settings, context)?;
        verify()?;
        for _ in 0..RUNS {
            of_verification.push(seconds(&mut verify, stop)?);
        }
    }
    torch::set_num_threads(shares.drafter);
    let mut taken: Vec<[Vec<f64>; 2]> = vec![[Vec::new(), Vec::new()]; drafters.len()];
    for _ in 0..RUNS {
        for ((drafter, blocks), taken) in drafters.iter().zip(&mut taken) {
            for (blocks, taken) in [*blocks, 1].into_iter().zip(taken) {
                // Caches of all depths at once might not fit; making one anew is not timed.
                let forward = pack(drafter, settings, context, blocks)?;
                taken.push(if blocks == 0 { 0.0 } else { seconds_when_warm(forward, stop)? });
            }
        }
    }
    let times = |((drafter, blocks), [packs, drafts]): (&(Drafter, usize), [Vec<f64>; 2])| DrafterTimes {
        layers: drafter.model.layers.len(),
        blocks: *blocks,
        pack_seconds: median(packs),
        draft_seconds: median(drafts),
    };
    Ok(RoundTimes {
        texts,
        context,
        verify_seconds: median(of_verification),
        shared_device: drafters.first().is_some_and(|(drafter, _)| share_device(target, drafter)),
        drafters: never_slower_with_fewer_layers(drafters.iter().zip(taken).map(times).collect()),
    })
}

/// What a forward takes over a cache whose memory has been touched: the first one over a new cache pays for its pages, decoding does not.
fn seconds_when_warm(mut forward: impl FnMut() -> Result<(), DecodeError>, stop: &AtomicBool) -> Result<f64, DecodeError> {
    seconds(&mut forward, stop)?;
    seconds(&mut forward, stop)
}

/// The nearest times by which no drafter is slower than a deeper one at the same work. It cannot be: it runs some of the same layers. Where
/// it was measured so, the machine was disturbed, and pruning would end by speed for that alone. Packs of other numbers of blocks are other
/// work and are not compared.
fn never_slower_with_fewer_layers(mut drafters: Vec<DrafterTimes>) -> Vec<DrafterTimes> {
    let mut by_depth: Vec<usize> = (0..drafters.len()).collect();
    by_depth.sort_by_key(|&index| drafters[index].layers);
    let measured: Vec<f64> = by_depth.iter().map(|&index| drafters[index].draft_seconds).collect();
    for (&index, seconds) in by_depth.iter().zip(ascending(&measured)) {
        drafters[index].draft_seconds = seconds;
    }
    let sizes: BTreeSet<usize> = drafters.iter().map(|drafter| drafter.blocks).collect();
    for blocks in sizes {
        let of_size: Vec<usize> = by_depth.iter().copied().filter(|&index| drafters[index].blocks == blocks).collect();
        let measured: Vec<f64> = of_size.iter().map(|&index| drafters[index].pack_seconds).collect();
        for (&index, seconds) in of_size.iter().zip(ascending(&measured)) {
            drafters[index].pack_seconds = seconds;
        }
    }
    drafters
}

/// The nearest values, by least squares, that never fall: neighbours that do are put together at their mean.
fn ascending(values: &[f64]) -> Vec<f64> {
    let mut groups: Vec<(f64, usize)> = Vec::with_capacity(values.len());
    for &value in values {
        groups.push((value, 1));
        while let [.., (before, many), (after, more)] = groups[..]
            && before > after
        {
            let all = many + more;
            groups.truncate(groups.len() - 2);
            groups.push(((before * many as f64 + after * more as f64) / all as f64, all));
        }
    }
    groups.into_iter().flat_map(|(value, count)| std::iter::repeat_n(value, count)).collect()
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use super::*;

    #[test]
    fn a_shallower_drafter_is_never_slower_at_the_same_work() {
        let drafter = |layers, blocks, pack_seconds, draft_seconds| DrafterTimes { layers, blocks, pack_seconds, draft_seconds };
        // In any order; a pack of 3 with 2 layers was measured slower than with 3, drafts with 1 layer slower than with 2 and 3.
        let measured = vec![drafter(2, 3, 0.5, 0.1), drafter(4, 3, 0.6, 0.3), drafter(3, 3, 0.3, 0.2), drafter(1, 9, 0.9, 0.6)];
        let found = never_slower_with_fewer_layers(measured);
        let expected = [drafter(2, 3, 0.4, 0.3), drafter(4, 3, 0.6, 0.3), drafter(3, 3, 0.4, 0.3), drafter(1, 9, 0.9, 0.3)];
        for (found, expected) in found.iter().zip(&expected) {
            assert_eq!((found.layers, found.blocks), (expected.layers, expected.blocks));
            let off = (found.pack_seconds - expected.pack_seconds).abs() + (found.draft_seconds - expected.draft_seconds).abs();
            assert!(off < 1e-9, "{found:?} is not {expected:?}");
        }
        assert_eq!(never_slower_with_fewer_layers(expected.to_vec()), expected, "what rises stays as it was measured");
    }

    #[test]
    fn the_first_forward_over_a_cache_does_not_count_and_none_begins_after_a_stop() {
        let (mut forwards, stop) = (0, AtomicBool::new(false));
        let slow_at_first = || {
            forwards += 1;
            std::thread::sleep(Duration::from_millis(if forwards == 1 { 400 } else { 0 }));
            Ok(())
        };
        let taken = seconds_when_warm(slow_at_first, &stop);
        assert!(taken.as_ref().is_ok_and(|&seconds| seconds < 0.2), "{taken:?}");
        stop.store(true, std::sync::atomic::Ordering::Relaxed);
        let stopped = seconds_when_warm(|| panic!("a forward after the stop"), &stop);
        assert!(matches!(stopped, Err(DecodeError::Stopped)), "{stopped:?}");
    }

    #[test]
    fn a_round_is_the_longer_of_both_and_a_draft_where_none_was_ready() {
        let drafter = |layers, pack_seconds, draft_seconds| DrafterTimes { layers, blocks: 3, pack_seconds, draft_seconds };
        let drafters = vec![drafter(4, 0.3, 0.1), drafter(2, 0.1, 0.05)];
        let times = RoundTimes { texts: 1, context: 9, verify_seconds: 0.2, shared_device: false, drafters };
        let close =
            |found: Option<f64>, expected: f64| assert!(found.is_some_and(|it| (it - expected).abs() < 1e-9), "{found:?}");
        close(times.tokens_per_second(4, 3.0, 0.6), 3.0 / (0.3 + 0.4 * 0.1));
        close(times.tokens_per_second(2, 3.0, 0.6), 3.0 / (0.2 + 0.4 * 0.05));
        close(times.tokens_per_second(2, 3.0, 1.0), 3.0 / 0.2);
        assert_eq!(times.tokens_per_second(3, 3.0, 1.0), None);
        let several = RoundTimes { texts: 2, ..times.clone() };
        close(several.tokens_per_second(2, 3.0, 0.6), 6.0 / (0.2 + (1.0 - 0.36) * 0.05));
        let shared = RoundTimes { shared_device: true, ..times };
        close(shared.tokens_per_second(2, 3.0, 0.6), 3.0 / (0.3 + 0.4 * 0.05));
    }
}
