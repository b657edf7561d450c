//! Chance, as a pure function of counters: the target's choice of a token at any temperature, and the draws of drafts.
//!
//! Choosing adds noise to the logits and takes the largest (the Gumbel-max trick); drafts are drawn from explicit probabilities by one
//! uniform number each, and another decides whether a draft is accepted. All noise of a token comes from the counters (seed, purpose,
//! request, position in the response) alone, so it is the same however rows are batched or packed, whether a draft was ready or not, and
//! however often a position is drafted.
//!
//! # Why a position's noise may be used again
//!
//! A position can be drafted in several rounds, and ahead of several outcomes, each time by the same noise. The text still has exactly
//! the target's distribution, because by the time a position is decided nothing that was decided before has looked at its noise:
//!
//! - Which tokens stand before it, and which block drafted it, hang on the noise of earlier positions alone: slots of a block are drawn
//!   independently of each other, a block sees only tokens before its anchor, and a rejected draft's later tokens are thrown away unread.
//! - Which outcomes are drafted ahead may hang on later drafted tokens, but only decides whether a block is ready; the block drafted on a
//!   miss sees the same tokens and has the same distributions and noise.
//! - The one exception is a continuation anchored at the last drafted token, whose distributions are not those of a block anchored at the
//!   bonus token. It is used if its own likeliest first token equals the bonus token: both are known before the next position's noise is
//!   looked at. So the text's distribution stays, but asynchronous and lockstep decoding, the one using it where the other does not, may
//!   then part (`in_place` labels only).
//! - Given all that, the draft of a position is drawn from its distribution, the number that decides on it is independent of the draft, and
//!   so is the one that draws a token in its place: three streams that share no key.
//!
//! Shapes legend: `R` rows, `S` slots of a block that are verified, `V` vocabulary.

use data::supervision::{counter_generator, purpose};
use rand_chacha::ChaCha8Rng;
use rand_chacha::rand_core::RngCore;
use rayon::prelude::*;
use serde::{Deserialize, Serialize};
use tch::{Kind, Tensor};
use torch::TorchError;

use crate::verification::Chance;

mod row;

use row::Candidate;

/// Beyond top-k, how many tokens that equal the k-th are looked for before a whole row is read. Logits in bf16 are often equal.
const EQUALS: usize = 32;

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

/// A token of a response, counted from 0: with the seed, all that its noise depends on.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct TokenPlace {
    pub request: u64,
    pub position: usize,
}

impl Sampler {
    /// Always the likeliest token.
    pub fn greedy() -> Self {
        Self { temperature: 0.0, top_p: 1.0, top_k: 0, seed: 0 }
    }

    /// The tokens chosen for logits `[R, V]`, row `i` for `places[i]`: those with the largest [`Sampler::scores`].
    pub fn choose(&self, logits_rv: &Tensor, places: &[TokenPlace]) -> Vec<u32> {
        if self.temperature <= 0.0 {
            return torch::to_ids(&logits_rv.argmax(-1, false));
        }
        let rows = self.candidates(logits_rv);
        let choose = |(candidates, place): (Vec<Candidate>, &TokenPlace)| {
            let candidates = if self.top_p < 1.0 { row::nucleus(candidates, self.top_p) } else { candidates };
            row::choose(&candidates, &mut self.noise_of(*place))
        };
        rows.into_par_iter().zip(places).map(choose).collect()
    }

    /// Row by row the tokens that top-k leaves.
    fn candidates(&self, logits_rv: &Tensor) -> Vec<Vec<Candidate>> {
        let (rows, vocabulary) = (logits_rv.size()[0], logits_rv.size()[1] as usize);
        let temper = |logit: &f32| (f64::from(*logit) / self.temperature) as f32;
        let whole = |row_v: &[f32]| row::all(row_v.iter().map(temper));
        // More than k, since all that equal the k-th stay.
        let looked_at = self.top_k.saturating_add(EQUALS);
        if self.top_k == 0 || looked_at >= vocabulary {
            let logits = torch::to_f32s(logits_rv);
            return logits.par_chunks(vocabulary).map(|row_v| self.keep_likeliest(whole(row_v))).collect();
        }
        let (best_rk, ids_rk) = logits_rv.topk(looked_at as i64, -1, true, true);
        let (best, ids) = (torch::to_f32s(&best_rk), torch::to_ids(&ids_rk));
        let rows = (0..rows).zip(best.chunks(looked_at).zip(ids.chunks(looked_at)));
        let candidates = |(row, (logits, ids)): (i64, (&[f32], &[u32]))| {
            // When even the last one equals the k-th, there may be more of them.
            if logits[looked_at - 1] >= logits[self.top_k - 1] {
                return self.keep_likeliest(whole(&torch::to_f32s(&logits_rv.select(0, row))));
            }
            let tokens = ids.iter().zip(logits);
            self.keep_likeliest(tokens.map(|(&id, logit)| Candidate { id, logit: temper(logit) }).collect())
        };
        rows.map(candidates).collect()
    }

    /// The k likeliest candidates and those that equal the last of them.
    fn keep_likeliest(&self, mut candidates: Vec<Candidate>) -> Vec<Candidate> {
        if self.top_k > 0 && self.top_k < candidates.len() {
            let mut logits: Vec<f32> = candidates.iter().map(|candidate| candidate.logit).collect();
            let (_, smallest, _) = logits.select_nth_unstable_by(self.top_k - 1, |one, other| other.total_cmp(one));
            candidates.retain(|candidate| candidate.logit >= *smallest);
        }
        candidates
    }

    /// Scores `[R, V]` of all tokens, of which each row's largest belongs to the token chosen; row `i` is for `places[i]`.
    pub fn scores(&self, logits_rv: &Tensor, places: &[TokenPlace]) -> Tensor {
        if self.temperature <= 0.0 {
            return logits_rv.shallow_clone();
        }
        let vocabulary = logits_rv.size()[1];
        let mut noise = Vec::with_capacity(places.len() * vocabulary as usize);
        for &place in places {
            let mut generator = self.noise_of(place);
            noise.extend((0..vocabulary).map(|_| row::gumbel(generator.next_u32())));
        }
        let noise_rv = Tensor::from_slice(&noise).view([places.len() as i64, vocabulary]);
        self.kept(logits_rv) + noise_rv.to_device(logits_rv.device())
    }

    /// For logits `[R, V]` the distributions `[R, V]` (f32) after temperature, top-k and top-p, of which [`Sampler::choose`] draws.
    pub fn probabilities(&self, logits_rv: &Tensor) -> Tensor {
        if self.temperature <= 0.0 {
            let best = logits_rv.argmax(-1, true);
            return logits_rv.zeros_like().scatter_value(-1, &best, 1.0).to_kind(Kind::Float);
        }
        self.kept(logits_rv).softmax(-1, Kind::Float)
    }

    /// Draws a token of each row of `probabilities_rv` (`[R, V]`, of any scale), row `i` for `places[i]`.
    pub fn draw_drafts(&self, probabilities_rv: &Tensor, places: &[TokenPlace]) -> Vec<u32> {
        let vocabulary = probabilities_rv.size()[1];
        let chance = |place: &TokenPlace| {
            uniform(&mut counter_generator(self.seed, purpose::DRAFTING, place.request, place.position as u64))
        };
        let chances: Vec<f64> = places.iter().map(chance).collect();
        // The token at which the running sum first exceeds the chance's share of the total. In f64, since in f32 the steps of unlikely
        // tokens would drown in the sum.
        let sums_rv = probabilities_rv.cumsum(-1, Kind::Double);
        let chances_r1 = Tensor::from_slice(&chances).to_device(sums_rv.device()).unsqueeze(1);
        let thresholds_r1 = sums_rv.narrow(1, vocabulary - 1, 1) * chances_r1;
        let drawn = sums_rv.le_tensor(&thresholds_r1).sum_dim_intlist([-1_i64].as_slice(), false, Kind::Int64);
        torch::to_ids(&drawn.clamp_max(vocabulary - 1))
    }

    /// What decides about `count` drafted tokens from `place` on, and about the token that follows them: `count + 1` chances.
    pub fn chances(&self, place: TokenPlace, count: usize) -> Vec<Chance> {
        let chance = |position: usize| {
            let mut generator = counter_generator(self.seed, purpose::ACCEPTANCE, place.request, position as u64);
            Chance { accept: uniform(&mut generator), replace: uniform(&mut generator) }
        };
        (place.position..=place.position + count).map(chance).collect()
    }

    /// Logits over the temperature, those of tokens that top-k and top-p leave out at negative infinity.
    fn kept(&self, logits_rv: &Tensor) -> Tensor {
        self.keep_nucleus(&self.keep_top_k(&(logits_rv / self.temperature)))
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
        // Of equal ones the smaller id comes first, and the sums are in f64, so that the nucleus is the one of `row::nucleus`.
        let (sorted, order) = logits_rv.sort_stable(true, -1, true);
        let probabilities = sorted.softmax(-1, Kind::Double);
        // A token goes when the likelier ones already reach the share; so the likeliest always stays.
        let before = probabilities.cumsum(-1, Kind::Double) - &probabilities;
        let dropped_in_order = before.ge(self.top_p);
        let dropped = dropped_in_order.zeros_like().scatter(-1, &order, &dropped_in_order);
        logits_rv.masked_fill(&dropped, f64::NEG_INFINITY)
    }

    /// The stream whose number at a token's id becomes that token's noise; it does not depend on which tokens are kept.
    fn noise_of(&self, place: TokenPlace) -> ChaCha8Rng {
        counter_generator(self.seed, purpose::SAMPLING, place.request, place.position as u64)
    }
}

/// A uniform number in (0, 1), both ends left out, with the 52 bits that leave room for that.
fn uniform(generator: &mut ChaCha8Rng) -> f64 {
    ((generator.next_u64() >> 12) as f64 + 0.5) / 2_f64.powi(52)
}

/// The distributions that a draft's tokens were drawn from, on the drafter's device.
///
/// Drafts of one forward share storage, so that it stays as long as one of them does. What is drafted ahead of a round thus needs as much
/// memory as its logits, blocks · S · V numbers of four bytes, until the round's outcome is known.
#[derive(Debug)]
pub struct Distributions {
    /// `[S, V]` f32.
    rows_sv: Tensor,
}

impl Distributions {
    /// Row by row those of the draft's tokens, `[S, V]` f32.
    pub fn new(rows_sv: Tensor) -> Self {
        Self { rows_sv }
    }

    /// Those of all tokens but the first.
    pub fn without_first(&self) -> Self {
        Self::new(self.rows_sv.narrow(0, 1, self.rows_sv.size()[0] - 1))
    }

    /// The rows as plain numbers, one `Vec` for each token.
    ///
    /// # Errors
    /// What libtorch says when the device fails.
    pub fn to_rows(&self) -> Result<Vec<Vec<f32>>, TorchError> {
        torch::guarded("reading what drafts were drawn from", || {
            let vocabulary = self.rows_sv.size()[1] as usize;
            torch::to_f32s(&self.rows_sv).chunks(vocabulary).map(<[f32]>::to_vec).collect()
        })
    }
}

impl Clone for Distributions {
    /// Shares the storage.
    fn clone(&self) -> Self {
        Self::new(self.rows_sv.shallow_clone())
    }
}

impl PartialEq for Distributions {
    fn eq(&self, other: &Self) -> bool {
        self.rows_sv.size() == other.rows_sv.size() && self.rows_sv.equal(&other.rows_sv)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn logits(rows: &[[f32; 4]]) -> Tensor {
        Tensor::from_slice(rows.as_flattened()).view([-1, 4])
    }

    fn places(request: u64, positions: std::ops::Range<usize>) -> Vec<TokenPlace> {
        positions.map(|position| TokenPlace { request, position }).collect()
    }

    fn counts(sampler: &Sampler, row: [f32; 4], draws: usize) -> [usize; 4] {
        let rows = logits(&vec![row; draws]);
        let mut counts = [0; 4];
        for token in sampler.choose(&rows, &places(0, 0..draws)) {
            counts[token as usize] += 1;
        }
        counts
    }

    #[test]
    fn temperature_zero_takes_the_likeliest() {
        let rows = logits(&[[0.0, 3.0, 1.0, 2.0], [5.0, 3.0, 1.0, 2.0]]);
        assert_eq!(Sampler::greedy().choose(&rows, &places(7, 3..5)), [1, 0]);
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
        let together = sampler.choose(&logits(&rows), &places(9, 10..74));
        let apart: Vec<u32> = rows
            .iter()
            .zip(10..)
            .flat_map(|(row, position)| sampler.choose(&logits(&[*row]), &places(9, position..position + 1)))
            .collect();
        assert_eq!(together, apart);
        assert_ne!(together, sampler.choose(&logits(&rows), &places(8, 10..74)));
    }

    #[test]
    fn choices_are_those_of_the_scores_of_all_tokens() {
        let (rows, vocabulary) = (48, 997);
        let drawn = Tensor::from_slice(
            &(0..rows * vocabulary).map(|index| ((index * 7919 + index / 13) % 1013) as f32 / 90.0).collect::<Vec<_>>(),
        );
        let logits_rv = drawn.view([rows, vocabulary]);
        // Coarse ones, of which many equal the k-th.
        for logits_rv in [logits_rv.shallow_clone(), logits_rv.round(), logits_rv.to_kind(Kind::BFloat16).to_kind(Kind::Float)] {
            for (top_k, top_p) in
                [(0, 1.0), (0, 0.7), (0, 0.99), (1, 1.0), (20, 1.0), (20, 0.9), (900, 0.95), (990, 1.0), (5000, 1.0)]
            {
                let sampler = Sampler { temperature: 0.7, top_p, top_k, seed: 3 };
                let places = places(12, 0..rows as usize);
                let all = torch::to_ids(&sampler.scores(&logits_rv, &places).argmax(-1, false));
                let chosen = sampler.choose(&logits_rv, &places);
                assert_eq!(chosen, all, "top-k {top_k}, top-p {top_p}");
            }
        }
    }

    #[test]
    fn probabilities_are_those_that_choices_are_drawn_from() {
        let row = [0.5_f32, 1.2, 2.0, -1.0];
        for (top_k, top_p) in [(0, 1.0), (3, 1.0), (0, 0.8), (3, 0.9), (1, 1.0)] {
            let sampler = Sampler { temperature: 1.5, top_p, top_k, seed: 11 };
            let probabilities = torch::to_f32s(&sampler.probabilities(&logits(&[row])));
            assert!((probabilities.iter().sum::<f32>() - 1.0).abs() < 1e-6);
            let draws = 20_000;
            for (count, probability) in counts(&sampler, row, draws).into_iter().zip(probabilities) {
                let (expected, share) = (f64::from(probability), count as f64 / draws as f64);
                assert!(
                    (share - expected).abs() <= 4.5 * (expected * (1.0 - expected) / draws as f64).sqrt(),
                    "{share} {expected}"
                );
            }
        }
        let greedy = torch::to_f32s(&Sampler::greedy().probabilities(&logits(&[row, [1.0, 0.0, 0.0, 0.0]])));
        assert_eq!(greedy, [0.0, 0.0, 1.0, 0.0, 1.0, 0.0, 0.0, 0.0]);
    }

    #[test]
    fn drafts_follow_their_distribution_and_their_position() {
        let sampler = Sampler { temperature: 1.0, top_p: 1.0, top_k: 0, seed: 2 };
        let row = [0.0_f32, 0.3, 0.0, 0.5, 0.2, 0.0];
        let draws = 20_000;
        let rows = Tensor::from_slice(&row).repeat([draws, 1]);
        let drawn = sampler.draw_drafts(&rows, &places(4, 10..10 + draws as usize));
        let mut counts = [0_usize; 6];
        drawn.iter().for_each(|&token| counts[token as usize] += 1);
        for (count, probability) in counts.into_iter().zip(row) {
            let (expected, share) = (f64::from(probability), count as f64 / draws as f64);
            assert!((share - expected).abs() <= 4.5 * (expected * (1.0 - expected) / draws as f64).sqrt(), "{share} {expected}");
        }
        for (index, token) in drawn[..64].iter().enumerate() {
            let alone = sampler.draw_drafts(&rows.narrow(0, 0, 1), &places(4, 10 + index..11 + index));
            assert_eq!(alone, [*token], "a draw follows its place, not its row");
        }
        assert_ne!(drawn[..64], sampler.draw_drafts(&rows.narrow(0, 0, 64), &places(5, 10..74)));
    }

    #[test]
    fn noises_of_a_position_share_nothing() {
        let sampler = Sampler { temperature: 1.0, top_p: 1.0, top_k: 0, seed: 2 };
        let chances = sampler.chances(TokenPlace { request: 1, position: 5 }, 2000);
        assert_eq!(chances.len(), 2001);
        assert_eq!(sampler.chances(TokenPlace { request: 1, position: 7 }, 0), chances[2..3]);
        // A draw from 1000 equal tokens is the drafting noise to three digits.
        let even = Tensor::ones([2001, 1000], (Kind::Float, tch::Device::Cpu));
        let drawn = sampler.draw_drafts(&even, &places(1, 5..2006));
        let drafting: Vec<f64> = drawn.into_iter().map(|token| (f64::from(token) + 0.5) / 1000.0).collect();
        let (accept, replace): (Vec<f64>, Vec<f64>) = chances.iter().map(|chance| (chance.accept, chance.replace)).unzip();
        for (one, other) in [(&drafting, &accept), (&drafting, &replace), (&accept, &replace)] {
            let covariance: f64 = one.iter().zip(other).map(|(one, other)| (one - 0.5) * (other - 0.5)).sum::<f64>() / 2001.0;
            // Of independent uniform numbers: 1/12 over the root of their count, times 4.5.
            assert!(covariance.abs() < 4.5 / 12.0 / 2001_f64.sqrt(), "{covariance}");
        }
    }

    #[test]
    fn uniform_numbers_leave_out_both_ends() {
        assert!(0.5 / 2_f64.powi(52) > 0.0 && ((u64::MAX >> 12) as f64 + 0.5) / 2_f64.powi(52) < 1.0);
    }
}
