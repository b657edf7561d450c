//! The losses of a step as sums: over chunks, forwards and ranks, divided once at the end.

use crate::backward::LossSettings;
use crate::batch::{Denominators, LabelledRow};
use crate::objective::PositionWeights;

/// Running sums; those of several forwards or ranks may simply be added.
#[derive(Debug, Clone, PartialEq)]
pub struct LossSums {
    /// Σ w · loss over block slots.
    pub diffusion: f64,
    /// Σ loss over supervised clean rows.
    pub autoregressive: f64,
    /// By draft position: rows, Σ loss, how often the best token is the label.
    pub by_position: Vec<[f64; 3]>,
}

/// What a step's loss was.
#[derive(Debug, Clone, Default, PartialEq)]
pub struct Losses {
    /// L_diff + λ · L_AR.
    pub total: f64,
    /// Σ w · loss / Σ w over block slots (over blocks with D-PACE).
    pub diffusion: f64,
    /// Mean loss of supervised clean rows.
    pub autoregressive: f64,
    /// Mean unweighted loss by draft position.
    pub diffusion_by_position: Vec<f64>,
    /// Share of block slots whose best token is the label, by draft position.
    pub accuracy_by_position: Vec<f64>,
}

impl Denominators {
    /// What the block loss is divided by; one where there is nothing to divide.
    pub(crate) fn of_blocks(&self, weights: PositionWeights) -> f64 {
        let total = match weights {
            PositionWeights::Exponential => self.diffusion,
            PositionWeights::Pace { .. } => self.blocks as f64,
        };
        if total > 0.0 { total } else { 1.0 }
    }
}

impl LossSums {
    /// Nothing yet, for blocks of so many drafts.
    pub fn new(drafts: usize) -> Self {
        Self { diffusion: 0.0, autoregressive: 0.0, by_position: vec![[0.0; 3]; drafts] }
    }

    pub(crate) fn add_diffusion(&mut self, rows: &[LabelledRow], losses: &[f32], best: &[u32], weights: &[f64]) {
        for (((row, &loss), &best), weight) in rows.iter().zip(losses).zip(best).zip(weights) {
            let loss = f64::from(loss);
            self.diffusion += weight * loss;
            let [count, total, right] = &mut self.by_position[row.draft];
            *count += 1.0;
            *total += loss;
            *right += f64::from(u8::from(best == row.label));
        }
    }

    /// Adds the sums of another forward.
    pub fn add(&mut self, other: &Self) {
        let mut values = self.to_values();
        for (value, more) in values.iter_mut().zip(other.to_values()) {
            *value += more;
        }
        *self = Self::from_values(&values);
    }

    /// All sums in a row, to be added over ranks.
    pub fn to_values(&self) -> Vec<f64> {
        [self.diffusion, self.autoregressive].into_iter().chain(self.by_position.iter().flatten().copied()).collect()
    }

    /// The inverse of [`LossSums::to_values`].
    pub fn from_values(values: &[f64]) -> Self {
        let by_position = values[2..].chunks_exact(3).map(|each| [each[0], each[1], each[2]]).collect();
        Self { diffusion: values[0], autoregressive: values[1], by_position }
    }

    /// The losses that these sums are of.
    pub fn losses(&self, denominators: &Denominators, settings: LossSettings) -> Losses {
        let diffusion = self.diffusion / denominators.of_blocks(settings.weights);
        let autoregressive = self.autoregressive / (denominators.clean.max(1) as f64);
        let share = |pick: fn(&[f64; 3]) -> f64| self.by_position.iter().map(|each| pick(each) / each[0].max(1.0)).collect();
        Losses {
            total: diffusion + settings.ar_weight * autoregressive,
            diffusion,
            autoregressive,
            diffusion_by_position: share(|each| each[1]),
            accuracy_by_position: share(|each| each[2]),
        }
    }
}
