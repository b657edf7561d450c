//! The target's choice of a token, at any temperature, as a pure function of its logits and of counters.
//!
//! Sampling adds noise to the logits and takes the largest (the Gumbel-max trick). The noise of a position comes from the counters
//! (seed, request, position) alone, so it is the same however rows are batched, and all decoders write the same text even above
//! temperature 0.
//!
//! Shapes legend: `R` rows, `V` vocabulary.

use data::supervision::{counter_generator, purpose};
use rand_chacha::rand_core::RngCore;
use serde::{Deserialize, Serialize};
use tch::{Kind, Tensor};

/// How the target chooses.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct Sampler {
    /// 0 takes the likeliest token, and the other fields have no effect.
    pub temperature: f64,
    /// Keep the likeliest tokens that together reach this probability; 1 keeps all.
    pub top_p: f64,
    /// Keep this many of the likeliest tokens; 0 keeps all.
    pub top_k: usize,
    pub seed: u64,
}

impl Sampler {
    /// Always the likeliest token.
    pub fn greedy() -> Self {
        Self { temperature: 0.0, top_p: 1.0, top_k: 0, seed: 0 }
    }

    /// The tokens chosen for f32 logits `[R, V]`; row `i` is for the token at `positions[i]` of the response to `request`, counted
    /// from 0.
    pub fn choose(&self, logits_rv: &Tensor, request: u64, positions: &[usize]) -> Vec<u32> {
        torch::to_ids(&self.scores(logits_rv, request, positions).argmax(-1, false))
    }

    /// Scores `[R, V]` whose largest entry of a row is the token chosen.
    pub fn scores(&self, logits_rv: &Tensor, request: u64, positions: &[usize]) -> Tensor {
        if self.temperature <= 0.0 {
            return logits_rv.shallow_clone();
        }
        let scaled = logits_rv / self.temperature;
        let kept = self.keep_nucleus(&self.keep_top_k(&scaled));
        let noise = self.noise(logits_rv.size()[1] as usize, request, positions);
        kept + noise.to_device(logits_rv.device())
    }

    fn keep_top_k(&self, logits_rv: &Tensor) -> Tensor {
        let vocabulary = logits_rv.size()[1];
        if self.top_k == 0 || self.top_k as i64 >= vocabulary {
            return logits_rv.shallow_clone();
        }
        let (best, _) = logits_rv.topk(self.top_k as i64, -1, true, true);
        let smallest = best.narrow(1, self.top_k as i64 - 1, 1);
        logits_rv.masked_fill(&logits_rv.lt_tensor(&smallest), f64::NEG_INFINITY)
    }

    fn keep_nucleus(&self, logits_rv: &Tensor) -> Tensor {
        if self.top_p >= 1.0 {
            return logits_rv.shallow_clone();
        }
        let (sorted, order) = logits_rv.sort(-1, true);
        let probabilities = sorted.softmax(-1, Kind::Float);
        // A token goes when the likelier ones already reach the share; so the likeliest always stays.
        let before = probabilities.cumsum(-1, Kind::Float) - &probabilities;
        let dropped_in_order = before.ge(self.top_p);
        let dropped = dropped_in_order.zeros_like().scatter(-1, &order, &dropped_in_order);
        logits_rv.masked_fill(&dropped, f64::NEG_INFINITY)
    }

    /// Gumbel noise `[R, V]`; a token's noise depends on its id, not on which tokens were kept.
    fn noise(&self, vocabulary: usize, request: u64, positions: &[usize]) -> Tensor {
        let mut uniform = Vec::with_capacity(positions.len() * vocabulary);
        for &position in positions {
            let mut generator = counter_generator(self.seed, purpose::SAMPLING, request, position as u64);
            uniform.extend((0..vocabulary).map(|_| (f64::from(generator.next_u32()) + 0.5) / 2_f64.powi(32)));
        }
        let uniform = Tensor::from_slice(&uniform).view([positions.len() as i64, vocabulary as i64]);
        (-(-uniform.log()).log()).to_kind(Kind::Float)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn logits(rows: &[[f32; 4]]) -> Tensor {
        Tensor::from_slice(rows.as_flattened()).view([-1, 4])
    }

    fn counts(sampler: &Sampler, row: [f32; 4], draws: usize) -> [usize; 4] {
        let rows = logits(&vec![row; draws]);
        let mut counts = [0; 4];
        for token in sampler.choose(&rows, 0, &(0..draws).collect::<Vec<_>>()) {
            counts[token as usize] += 1;
        }
        counts
    }

    #[test]
    fn temperature_zero_takes_the_likeliest() {
        let rows = logits(&[[0.0, 3.0, 1.0, 2.0], [5.0, 3.0, 1.0, 2.0]]);
        assert_eq!(Sampler::greedy().choose(&rows, 7, &[3, 4]), [1, 0]);
    }

    #[test]
    fn samples_follow_the_softmax_at_the_temperature() {
        let sampler = Sampler { temperature: 2.0, top_p: 1.0, top_k: 0, seed: 3 };
        let row = [0.0_f32, 1.0, 2.0, -1.0];
        let weights = row.map(|logit| f64::from(logit / 2.0).exp());
        let total: f64 = weights.iter().sum();
        let draws = 20_000;
        let observed = counts(&sampler, row, draws);
        let chi_square: f64 = (0..4)
            .map(|token| {
                let expected = draws as f64 * weights[token] / total;
                (observed[token] as f64 - expected).powi(2) / expected
            })
            .sum();
        // Three degrees of freedom: one draw in ten thousand exceeds 21.
        assert!(chi_square < 21.0, "{chi_square} {observed:?}");
    }

    #[test]
    fn filters_keep_the_likeliest_and_only_them() {
        let row = [2.0, 1.9, 0.0, -1.0];
        let top_k = Sampler { temperature: 1.0, top_p: 1.0, top_k: 2, seed: 1 };
        let found = counts(&top_k, row, 400);
        assert!(found[0] > 0 && found[1] > 0 && found[2..] == [0, 0], "{found:?}");
        // The first token alone has 0.47, the first two 0.90, the first three 0.97.
        for (top_p, kept) in [(0.3, 1), (0.6, 2), (0.95, 3)] {
            let found = counts(&Sampler { temperature: 1.0, top_p, top_k: 0, seed: 1 }, row, 400);
            assert_eq!(found.iter().filter(|&&count| count > 0).count(), kept, "{top_p} {found:?}");
            assert!(found[..kept].iter().all(|&count| count > 0));
        }
    }

    #[test]
    fn a_choice_depends_on_request_and_position_not_on_the_batch() {
        let sampler = Sampler { temperature: 1.0, top_p: 0.9, top_k: 3, seed: 5 };
        let rows: Vec<[f32; 4]> = (0..64).map(|row| [0.0, 0.1, 0.2, (row % 5) as f32 * 0.1]).collect();
        let positions: Vec<usize> = (10..74).collect();
        let together = sampler.choose(&logits(&rows), 9, &positions);
        let apart: Vec<u32> =
            rows.iter().zip(&positions).flat_map(|(row, &position)| sampler.choose(&logits(&[*row]), 9, &[position])).collect();
        assert_eq!(together, apart);
        assert_ne!(together, sampler.choose(&logits(&rows), 8, &positions));
    }
}
