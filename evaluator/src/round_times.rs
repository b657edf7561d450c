//! What rounds of asynchronous decoding take with drafters of several depths, and so how fast decoding would be with each: for choosing a
//! depth without decoding (ALGORITHMS §3.4 and §7, "select on speed model").
//!
//! A round takes the longer of verification and pack and, where no draft was ready, a draft after both; each text commits τ tokens in it.
//! Depths are timed by turns, so that a machine that is slower for a while is so for all of them.

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
/// Models that do not fit together, and what libtorch refuses, such as a lack of memory.
pub fn round_times(
    target: &Transformer,
    drafters: &[(Drafter, usize)],
    settings: &Settings,
    context: usize,
) -> Result<RoundTimes, DecodeError> {
    let _no_grad = tch::no_grad_guard();
    let (texts, shares) = (settings.concurrency.max(1), Shares::take());
    let mut of_verification = Vec::with_capacity(RUNS);
    if let Some((drafter, _)) = drafters.first() {
        check_drafter(target, drafter)?;
        let mut verify = verification(target, drafter, settings, context)?;
        verify()?;
        for _ in 0..RUNS {
            of_verification.push(seconds(&mut verify)?);
        }
    }
    torch::set_num_threads(shares.drafter);
    let mut taken: Vec<[Vec<f64>; 2]> = vec![[Vec::new(), Vec::new()]; drafters.len()];
    for turn in 0..=RUNS {
        for ((drafter, blocks), taken) in drafters.iter().zip(&mut taken) {
            for (blocks, taken) in [*blocks, 1].into_iter().zip(taken) {
                // Caches of all depths at once might not fit; making one anew is not timed.
                let mut forward = pack(drafter, settings, context, blocks)?;
                let seconds = if blocks == 0 { 0.0 } else { seconds(&mut forward)? };
                // The first turn is to warm up.
                if turn > 0 {
                    taken.push(seconds);
                }
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
        drafters: drafters.iter().zip(taken).map(times).collect(),
    })
}

#[cfg(test)]
mod tests {
    use super::*;

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
