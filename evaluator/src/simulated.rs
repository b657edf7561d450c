//! A simulated clock: how long the rounds that happened here would take on hardware that is not at hand.
//!
//! What a round commits, and whether its draft was ready, does not depend on how fast anything is: a pack is never given up half done.
//! So the same rounds happen on any machine, at another pace, and a [`Hardware`] profile says at which. Target and drafter each have a
//! device that does one thing at a time:
//!
//! ```text
//! target:            verify 0    verify 1                      verify 2           t ─▶
//! drafter:  draft 0  pack 0      pack 1 ─ ─ ─ ─ ─     draft 2  pack 2
//!                            hit: after both     miss: after both, then a draft
//! ```
//!
//! In lockstep nothing is drafted ahead, so that each device waits for the other; the target alone runs over one token at a time. Rounds
//! say all this themselves, so there is one clock for all decoders. Prefills are left out, as they are of measured speeds, and so is the
//! pack beside a text's last round, which nobody asks about. Plain Rust, no tensors.

mod table;

use std::collections::BTreeMap;

use configs::{Decoder, Hardware};
use serde::{Deserialize, Serialize};

use crate::benchmark::decoder_name;
use crate::fan_out::Lookup;
use crate::rounds::Round;
use crate::score::{RoundRow, Score};

pub(crate) use table::{html, text};

/// What one decoder's rounds would take on a hardware profile; texts one after the other.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct Simulated {
    /// Where the profile's latencies come from, in its own words.
    pub source: String,
    /// Of decoding; prefills are left out.
    pub seconds: f64,
    pub tokens_per_second: f64,
    /// Over the target alone, writing the same tokens on the same profile one forward each.
    pub speedup: f64,
    /// How long the target waited for packs to end behind hits, and for blocks that were drafted because none was ready. With its
    /// verifications these make up `seconds`.
    pub wait_on_hits_seconds: f64,
    pub wait_on_misses_seconds: f64,
    /// How long the drafter did nothing; absent where nothing is drafted.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub drafter_idle_seconds: Option<f64>,
    /// The share of all packs' time that passed while the target verified; absent where nothing is drafted ahead.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub pack_hidden: Option<f64>,
}

/// Why rounds cannot be timed.
#[derive(Debug, PartialEq, Eq, thiserror::Error)]
pub enum SimulationError {
    /// Which lane would wait for which is not in the rounds.
    #[error(
        "the simulated clock times texts that are decoded one at a time, but round {round} of prompt {prompt} shared its forward with \
         others ({lanes} in all); set `evaluate.concurrency = 1` or leave `evaluate.hardware` out"
    )]
    Shared { prompt: usize, round: usize, lanes: usize },
    #[error(
        "prompt {prompt}, turn {turn} has no round {round} or has it twice, so that its rounds cannot be timed; score the checkpoint again"
    )]
    Incomplete { prompt: usize, turn: usize, round: usize },
}

/// Puts what the rounds behind a score would take on each of these profiles into the score, in place of what is there.
///
/// The target alone is timed over the tokens of its own rounds or, where it was measured for another checkpoint, of any other decoder's.
///
/// # Errors
/// Rounds that shared forwards, and texts with missing rounds.
pub fn add_simulated(score: &mut Score, rows: &[RoundRow], profiles: &[Hardware]) -> Result<(), SimulationError> {
    let block_size = score.block_size;
    for (decoder, figures) in &mut score.decoders {
        let alone = *decoder == decoder_name(Decoder::Autoregressive);
        for (benchmark, figures) in &mut figures.benchmarks {
            figures.simulated.clear();
            let of_benchmark = || rows.iter().filter(|row| row.benchmark == *benchmark);
            let own = of_benchmark().find(|row| row.decoder == *decoder);
            let Some(writer) = own.or_else(|| of_benchmark().next().filter(|_| alone)) else { continue };
            let rounds: Vec<&Round> = of_benchmark().filter(|row| row.decoder == writer.decoder).map(|row| &row.round).collect();
            for hardware in profiles {
                let simulated = if alone { simulate_alone(&rounds, hardware) } else { simulate(&rounds, block_size, hardware) };
                figures.simulated.insert(hardware.name.clone(), simulated?);
            }
        }
    }
    Ok(())
}

/// Times the rounds of any number of texts, in any order; `block_size` is the drafter's.
///
/// # Errors
/// Rounds that shared forwards, and texts with missing rounds.
pub fn simulate(rounds: &[&Round], block_size: usize, hardware: &Hardware) -> Result<Simulated, SimulationError> {
    let mut totals = Totals::default();
    for text in texts(rounds)? {
        totals.add(&text, block_size, hardware);
    }
    let alone = simulate_alone(rounds, hardware)?;
    Ok(Simulated {
        seconds: totals.seconds,
        tokens_per_second: rate(rounds, totals.seconds),
        speedup: if totals.seconds > 0.0 { alone.seconds / totals.seconds } else { 1.0 },
        wait_on_hits_seconds: totals.wait_on_hits,
        wait_on_misses_seconds: totals.wait_on_misses,
        drafter_idle_seconds: (totals.drafting > 0.0).then_some(totals.seconds - totals.drafting),
        pack_hidden: (totals.packing > 0.0).then(|| totals.packing_hidden / totals.packing),
        ..alone
    })
}

/// Times the target alone over the tokens that rounds of any decoder committed, one forward each.
///
/// # Errors
/// Rounds that shared forwards, and texts with missing rounds.
pub fn simulate_alone(rounds: &[&Round], hardware: &Hardware) -> Result<Simulated, SimulationError> {
    let texts = texts(rounds)?;
    let tokens = texts.iter().flatten().flat_map(|round| (0..round.committed).map(|before| round.context + before));
    let seconds = tokens.map(|context| hardware.verify.seconds(1, context)).sum();
    Ok(Simulated {
        source: hardware.source.clone(),
        seconds,
        tokens_per_second: rate(rounds, seconds),
        speedup: 1.0,
        wait_on_hits_seconds: 0.0,
        wait_on_misses_seconds: 0.0,
        drafter_idle_seconds: None,
        pack_hidden: None,
    })
}

fn rate(rounds: &[&Round], seconds: f64) -> f64 {
    let tokens: usize = rounds.iter().map(|round| round.committed).sum();
    if seconds > 0.0 { tokens as f64 / seconds } else { 0.0 }
}

/// The rounds of each text in their order.
fn texts<'r>(rounds: &[&'r Round]) -> Result<Vec<Vec<&'r Round>>, SimulationError> {
    let mut texts: BTreeMap<(usize, usize), Vec<&Round>> = BTreeMap::new();
    for round in rounds {
        if round.lanes > 1 {
            return Err(SimulationError::Shared { prompt: round.prompt, round: round.round, lanes: round.lanes });
        }
        texts.entry((round.prompt, round.turn)).or_default().push(round);
    }
    for (&(prompt, turn), text) in &mut texts {
        text.sort_by_key(|round| round.round);
        if let Some((round, _)) = text.iter().enumerate().find(|(place, round)| round.round != *place) {
            return Err(SimulationError::Incomplete { prompt, turn, round });
        }
    }
    Ok(texts.into_values().collect())
}

/// A device that does one thing at a time.
#[derive(Default)]
struct Device {
    free_at: f64,
    busy: f64,
}

impl Device {
    /// Does something as soon as it can be done and the device is free → when it is done.
    fn run(&mut self, possible_at: f64, seconds: f64) -> f64 {
        self.free_at = self.free_at.max(possible_at) + seconds;
        self.busy += seconds;
        self.free_at
    }
}

/// Sums over texts, in seconds.
#[derive(Default)]
struct Totals {
    seconds: f64,
    wait_on_hits: f64,
    wait_on_misses: f64,
    /// Of the drafter, packs included.
    drafting: f64,
    packing: f64,
    packing_hidden: f64,
}

impl Totals {
    /// Lets both devices go through a text, whose first token is known at 0.
    fn add(&mut self, text: &[&Round], block_size: usize, hardware: &Hardware) {
        let (mut target, mut drafter) = (Device::default(), Device::default());
        let mut previous: Option<&Round> = None;
        for (place, &round) in text.iter().enumerate() {
            let outcome_at = target.free_at;
            let ready_at = if round.lookup == Some(Lookup::Hit) {
                let ready_at = outcome_at.max(drafter.free_at);
                self.wait_on_hits += ready_at - outcome_at;
                ready_at
            } else if round.proposed > 0 {
                // A pack takes in the block under verification; where there was none, the draft does.
                let (clean, context) = match previous {
                    Some(previous) if previous.pack_blocks == 0 => (previous.accepted + 1, previous.context),
                    _ => (0, round.context),
                };
                let ready_at = drafter.run(outcome_at, hardware.draft.seconds(clean + block_size, context));
                self.wait_on_misses += ready_at - outcome_at;
                ready_at
            } else {
                outcome_at
            };
            // A block that the end of the text cut short was verified whole.
            let verified_at = target.run(ready_at, hardware.verify.seconds(1 + round.proposed, round.context));
            if round.pack_blocks > 0 && place + 1 < text.len() {
                let seconds = hardware.pack.seconds(1 + round.proposed + round.pack_blocks * block_size, round.context);
                let packed_at = drafter.run(ready_at, seconds);
                self.packing += seconds;
                self.packing_hidden += seconds - (packed_at - verified_at).max(0.0);
            }
            previous = Some(round);
        }
        self.seconds += target.free_at;
        self.drafting += drafter.busy;
    }
}

#[cfg(test)]
mod tests;
