//! AdamW over a rank's flat share of the parameters, and the learning-rate schedules.
//!
//! tch's optimisers cannot save their state; libtorch's own fused kernel over a few long stretches passes over memory once.
//! Formula: Loshchilov and Hutter, Decoupled Weight Decay Regularization (arXiv 1711.05101), algorithm 2.

use tch::{Kind, Tensor};
use torch::TorchError;
use torch::fused::fused_adamw_step;

use crate::parameters::Stretch;

const EPSILON: f64 = 1e-8;

/// What AdamW needs beside the gradient.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct AdamWSettings {
    pub beta1: f64,
    pub beta2: f64,
    pub weight_decay: f64,
}

/// First and second moments, f32, of the same length as the masters.
pub struct AdamW {
    pub exp_avg: Tensor,
    pub exp_avg_sq: Tensor,
    settings: AdamWSettings,
    stretches: Vec<Stretch>,
    /// By how much the learning rate of boosted stretches exceeds that of the others.
    boost: f64,
}

impl AdamW {
    /// Zero moments for masters of this length.
    pub fn new(master: &Tensor, settings: AdamWSettings, stretches: Vec<Stretch>, boost: f64) -> Self {
        Self { exp_avg: master.zeros_like(), exp_avg_sq: master.zeros_like(), settings, stretches, boost }
    }

    /// Moves the masters by one step. `step` counts from one; the gradient is multiplied by `gradient_scale` (clipping) on the way.
    pub fn step(
        &self,
        master: &Tensor,
        gradient: &Tensor,
        step: u64,
        learning_rate: f64,
        gradient_scale: f64,
    ) -> Result<(), TorchError> {
        let _guard = tch::no_grad_guard();
        let AdamWSettings { beta1, beta2, weight_decay } = self.settings;
        for (decayed, boosted) in [(false, false), (false, true), (true, false), (true, true)] {
            let alike: Vec<&Stretch> =
                self.stretches.iter().filter(|it| (it.decayed, it.boosted) == (decayed, boosted)).collect();
            if alike.is_empty() {
                continue;
            }
            let parts = |flat: &Tensor| -> Vec<Tensor> {
                alike.iter().map(|it| flat.narrow(0, it.range.start, it.range.end - it.range.start)).collect()
            };
            fused_adamw_step(
                &parts(master),
                &parts(gradient),
                &parts(&self.exp_avg),
                &parts(&self.exp_avg_sq),
                step,
                if boosted { learning_rate * self.boost } else { learning_rate },
                beta1,
                beta2,
                if decayed { weight_decay } else { 0.0 },
                EPSILON,
                gradient_scale,
            )?;
        }
        Ok(())
    }
}

/// The sum of squares of a flat gradient.
pub fn squared_norm(gradient: &Tensor) -> f64 {
    f64::try_from(gradient.norm().to_kind(Kind::Double)).unwrap_or(f64::NAN).powi(2)
}

/// How the learning rate moves after the warm-up.
#[derive(Debug, Clone, Copy, PartialEq)]
pub enum Curve {
    Constant,
    Linear,
    Cosine,
    /// Warm-up, stable, decay (arXiv 2404.06395): constant, then linear over the last `decay` of all steps.
    WarmupStableDecay {
        decay: f64,
    },
}

/// The learning rate over a run, as a share of its peak.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Schedule {
    /// Share of all steps over which the rate rises.
    pub warmup: f64,
    pub curve: Curve,
    /// What it ends at.
    pub minimum: f64,
}

impl Schedule {
    /// The share of the peak at `step` of `steps`; steps count from one.
    pub fn share(&self, step: u64, steps: u64) -> f64 {
        let (step, steps) = (step as f64, steps as f64);
        let warmup = (self.warmup * steps).ceil();
        if step <= warmup {
            return step / warmup;
        }
        let progress = |from: f64| ((step - from) / (steps - from).max(1.0)).clamp(0.0, 1.0);
        let left = match self.curve {
            Curve::Constant => return 1.0,
            Curve::Linear => 1.0 - progress(warmup),
            Curve::Cosine => 0.5 * (1.0 + (std::f64::consts::PI * progress(warmup)).cos()),
            Curve::WarmupStableDecay { decay } => 1.0 - progress((steps * (1.0 - decay)).floor().max(warmup)),
        };
        self.minimum + (1.0 - self.minimum) * left
    }
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]
    use super::*;

    fn stretch(range: std::ops::Range<i64>, decayed: bool, boosted: bool) -> Stretch {
        Stretch { range, decayed, boosted }
    }

    #[test]
    fn two_steps_equal_pytorchs_adamw() {
        // torch.optim.AdamW([1., -2., 3.], lr=0.1, betas=(0.9, 0.95), weight_decay=0.01), gradients [0.5, -1, 2] then [1, 1, -1].
        let master = Tensor::from_slice(&[1_f32, -2.0, 3.0]);
        let settings = AdamWSettings { beta1: 0.9, beta2: 0.95, weight_decay: 0.01 };
        let optimiser = AdamW::new(&master, settings, vec![stretch(0..3, true, false)], 1.0);
        optimiser.step(&master, &Tensor::from_slice(&[0.5_f32, -1.0, 2.0]), 1, 0.1, 1.0).unwrap();
        optimiser.step(&master, &Tensor::from_slice(&[2_f32, 2.0, -2.0]), 2, 0.1, 0.5).unwrap();
        for (ours, golden) in torch::to_f32s(&master).iter().zip([0.802_302_4, -1.901_365_3, 2.867_266_2_f32]) {
            assert!((ours - golden).abs() < 1e-6, "{ours} against {golden}");
        }
    }

    #[test]
    fn stretches_decay_and_move_each_in_their_own_way_and_padding_stays() {
        let master = Tensor::from_slice(&[1_f32, 1.0, 1.0, 1.0]);
        let settings = AdamWSettings { beta1: 0.9, beta2: 0.95, weight_decay: 0.5 };
        let stretches = vec![stretch(0..1, true, false), stretch(1..2, false, true), stretch(2..3, false, false)];
        let optimiser = AdamW::new(&master, settings, stretches, 5.0);
        optimiser.step(&master, &master.full_like(0.25), 1, 0.01, 1.0).unwrap();
        for (ours, expected) in torch::to_f32s(&master).iter().zip([0.985_f32, 0.95, 0.99, 1.0]) {
            assert!((ours - expected).abs() < 1e-6, "{ours} against {expected}");
        }
    }

    #[test]
    fn every_schedule_warms_up_and_ends_at_its_minimum() {
        let at = |curve, steps: &[u64]| -> Vec<f64> {
            let schedule = Schedule { warmup: 0.1, curve, minimum: 0.1 };
            steps.iter().map(|&step| (schedule.share(step, 100) * 1e9).round() / 1e9).collect()
        };
        assert_eq!(at(Curve::Cosine, &[1, 10, 55, 100]), [0.1, 1.0, 0.55, 0.1]);
        assert_eq!(at(Curve::Linear, &[1, 10, 55, 100]), [0.1, 1.0, 0.55, 0.1]);
        assert_eq!(at(Curve::Linear, &[28]), [0.82]);
        assert_eq!(at(Curve::Constant, &[1, 10, 55, 100]), [0.1, 1.0, 1.0, 1.0]);
        assert_eq!(at(Curve::WarmupStableDecay { decay: 0.2 }, &[1, 10, 80, 90, 100]), [0.1, 1.0, 1.0, 0.55, 0.1]);
        let no_warmup = Schedule { warmup: 0.0, curve: Curve::Cosine, minimum: 0.1 };
        assert_eq!(no_warmup.share(1, 1), 0.1);
    }
}
