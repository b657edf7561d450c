//! What a depth is worth end to end: the speed of asynchronous decoding as predicted from τ, the hit rate on held-out responses, and times
//! measured once for every depth (ALGORITHMS §7: select on a speed model, not on τ only).

use configs::Evaluate;
use data::supervision::Example;
use evaluator::Drafter;
use evaluator::calibration::{MOST_ROUNDS, calibrate, deal, fan_out};
use evaluator::decode::DecodeError;
use evaluator::replay::hit_rates;
use evaluator::round_times::RoundTimes;

use crate::ledger::Predicted;

/// What speeds are predicted from.
#[derive(Debug, Clone)]
pub struct SpeedModel {
    pub times: RoundTimes,
    /// How evaluation drafts ahead.
    pub evaluate: Evaluate,
}

impl SpeedModel {
    /// The speed with a drafter of this τ; `None` for a depth that was not timed.
    ///
    /// # Errors
    /// A drafter that cannot draft.
    pub fn predict(&self, mut drafter: Drafter, tau: f64, held_out: &[Example]) -> Result<Option<Predicted>, DecodeError> {
        let depth = drafter.model.layers.len();
        let Some(times) = self.times.drafters.iter().find(|times| times.layers == depth) else { return Ok(None) };
        let (to_calibrate, to_count) = deal(held_out);
        let calibration = calibrate(&drafter, &to_calibrate, MOST_ROUNDS)?;
        if let Some(calibration) = &calibration {
            drafter.temperatures.clone_from(&calibration.temperatures);
        }
        let fan_out = fan_out(&self.evaluate, times.blocks, calibration.as_ref());
        let hit_rate = hit_rates(&drafter, &to_count, &[fan_out], MOST_ROUNDS)?.first().map_or(0.0, |rate| rate.share());
        let speed = self.times.tokens_per_second(depth, tau, hit_rate);
        Ok(speed.map(|tokens_per_second| Predicted { depth, tau, hit_rate, tokens_per_second }))
    }
}
