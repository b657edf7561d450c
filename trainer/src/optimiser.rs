//! AdamW over one flat tensor, and the learning-rate schedule.
//!
//! tch's optimisers cannot save their state, and step tensor by tensor; over a flat tensor AdamW is one loop.
//! Formula: Loshchilov and Hutter, Decoupled Weight Decay Regularization (arXiv 1711.05101), algorithm 2.

use std::ops::Range;

use tch::{Kind, Tensor};

/// Elements updated at a time: the five arrays of a slice fit into a core's cache, so that memory is passed over once.
const SLICE: i64 = 1 << 17;

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
    decayed: Vec<Range<i64>>,
    boosted: Option<(Range<i64>, f64)>,
}

impl AdamW {
    /// Zero moments for masters of this length; weight decay applies to the ranges in `decayed`.
    pub fn new(master: &Tensor, settings: AdamWSettings, decayed: Vec<Range<i64>>) -> Self {
        Self { exp_avg: master.zeros_like(), exp_avg_sq: master.zeros_like(), settings, decayed, boosted: None }
    }

    /// The masters of `range` move by `factor` times the step of the others.
    pub fn boost(&mut self, range: Range<i64>, factor: f64) {
        self.boosted = Some((range, factor));
    }

    /// Moves the masters by one step. `step` counts from one; the gradient is multiplied by `gradient_scale` (clipping) on the way.
    pub fn step(&mut self, master: &Tensor, gradient: &Tensor, step: u64, learning_rate: f64, gradient_scale: f64) {
        let _guard = tch::no_grad_guard();
        let AdamWSettings { beta1, beta2, weight_decay } = self.settings;
        if weight_decay > 0.0 {
            for range in &self.decayed {
                let _ = master.narrow(0, range.start, range.end - range.start).g_mul_scalar_(1.0 - learning_rate * weight_decay);
            }
        }
        let first_correction = 1.0 - beta1.powf(step as f64);
        let second_correction = 1.0 - beta2.powf(step as f64);
        let boosted = self.boosted.iter().map(|(range, factor)| {
            let part = master.narrow(0, range.start, range.end - range.start);
            (part.copy(), part, *factor)
        });
        let boosted: Vec<_> = boosted.collect();
        let length = master.size()[0];
        for start in (0..length).step_by(SLICE as usize) {
            let slice = |tensor: &Tensor| tensor.narrow(0, start, SLICE.min(length - start));
            let gradient = slice(gradient) * gradient_scale;
            let mut exp_avg = slice(&self.exp_avg);
            let mut exp_avg_sq = slice(&self.exp_avg_sq);
            let _ = exp_avg.lerp_(&gradient, 1.0 - beta1);
            let _ = exp_avg_sq.g_mul_scalar_(beta2).addcmul_(&gradient, &(gradient.shallow_clone() * (1.0 - beta2)));
            let denominator = (&exp_avg_sq / second_correction).sqrt_().g_add_scalar_(EPSILON);
            let _ = slice(master).addcdiv_(&(&exp_avg * (-learning_rate / first_correction)), &denominator);
        }
        for (before, mut part, factor) in boosted {
            let moved = before.lerp(&part, factor);
            part.copy_(&moved);
        }
    }
}

/// The Euclidean norm of a flat gradient.
pub fn gradient_norm(gradient: &Tensor) -> f64 {
    f64::try_from(gradient.norm().to_kind(Kind::Double)).unwrap_or(f64::NAN)
}

/// Linear warm-up to the peak over `warmup` of all steps, then a cosine down to `minimum` of the peak. `step` counts from one.
pub fn learning_rate(peak: f64, step: u64, steps: u64, warmup: f64, minimum: f64) -> f64 {
    let warmup_steps = (warmup * steps as f64).ceil();
    let step = step as f64;
    if step <= warmup_steps {
        return peak * step / warmup_steps;
    }
    let progress = (step - warmup_steps) / (steps as f64 - warmup_steps).max(1.0);
    let cosine = 0.5 * (1.0 + (std::f64::consts::PI * progress.min(1.0)).cos());
    peak * (minimum + (1.0 - minimum) * cosine)
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]
    use super::*;

    #[test]
    fn two_steps_equal_pytorchs_adamw() {
        // torch.optim.AdamW([1., -2., 3.], lr=0.1, betas=(0.9, 0.95), weight_decay=0.01), gradients [0.5, -1, 2] then [1, 1, -1].
        let master = Tensor::from_slice(&[1_f32, -2.0, 3.0]);
        let settings = AdamWSettings { beta1: 0.9, beta2: 0.95, weight_decay: 0.01 };
        let mut optimiser = AdamW::new(&master, settings, std::iter::once(0..3).collect());
        optimiser.step(&master, &Tensor::from_slice(&[0.5_f32, -1.0, 2.0]), 1, 0.1, 1.0);
        optimiser.step(&master, &Tensor::from_slice(&[1_f32, 1.0, -1.0]), 2, 0.1, 1.0);
        let expected = GOLDEN_ADAMW;
        for (ours, golden) in torch::to_f32s(&master).iter().zip(expected) {
            assert!((ours - golden).abs() < 1e-6, "{ours} against {golden}");
        }
    }

    #[test]
    fn a_boosted_range_moves_by_a_multiple() {
        let master = Tensor::from_slice(&[1_f32, 1.0, 1.0]);
        let settings = AdamWSettings { beta1: 0.9, beta2: 0.95, weight_decay: 0.0 };
        let mut optimiser = AdamW::new(&master, settings, Vec::new());
        optimiser.boost(1..2, 5.0);
        optimiser.step(&master, &master.full_like(0.25), 1, 0.01, 1.0);
        let values = torch::to_f32s(&master);
        assert!((values[0] - 0.99).abs() < 1e-6 && (values[1] - 0.95).abs() < 1e-6 && values[2] == values[0], "{values:?}");
    }

    const GOLDEN_ADAMW: [f32; 3] = [0.802_302_4, -1.901_365_3, 2.867_266_2];

    #[test]
    fn slices_do_not_change_the_result() {
        let length = SLICE + 3;
        let master = Tensor::ones([length], (Kind::Float, tch::Device::Cpu));
        let settings = AdamWSettings { beta1: 0.9, beta2: 0.95, weight_decay: 0.0 };
        let mut optimiser = AdamW::new(&master, settings, Vec::new());
        optimiser.step(&master, &master.full_like(0.25), 1, 0.1, 1.0);
        let values = torch::to_f32s(&master);
        assert!(values.iter().all(|&value| value == values[0] && (value - 0.9).abs() < 1e-5));
    }

    #[test]
    fn the_schedule_warms_up_and_ends_at_its_minimum() {
        let rate = |step| learning_rate(1.0, step, 100, 0.1, 0.1);
        assert_eq!((rate(1), rate(10)), (0.1, 1.0));
        assert!((rate(100) - 0.1).abs() < 1e-12);
        assert!((rate(55) - 0.55).abs() < 1e-12);
        assert_eq!(learning_rate(1.0, 1, 1, 0.0, 0.1), 0.1);
    }
}
