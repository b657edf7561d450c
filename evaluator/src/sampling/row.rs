//! One row's choice, on the host: of the tokens that may win, by the same noise as for all of them.
//!
//! Noise is a number for each token of the vocabulary, so making it and taking its logarithm twice costs more than a small model's
//! forward. Two observations spare most of it. A token's noise is the number of its id in a stream that can be entered anywhere, so with
//! top-k only the candidates' noise is made. And a token wins only with noise that makes up for what its logit lacks, which the uniform
//! number shows before any logarithm.

use rand_chacha::ChaCha8Rng;
use rand_chacha::rand_core::RngCore;

/// A token that may be chosen.
#[derive(Debug, Clone, Copy, PartialEq)]
pub(super) struct Candidate {
    pub(super) id: u32,
    /// Over the temperature.
    pub(super) logit: f32,
}

/// Candidates of a row of logits over the temperature, every token in the order of ids.
pub(super) fn all(logits: impl Iterator<Item = f32>) -> Vec<Candidate> {
    (0..).zip(logits).map(|(id, logit)| Candidate { id, logit }).collect()
}

/// Of all tokens of a row, the likeliest ones that together reach `top_p`, which is below 1.
pub(super) fn nucleus(mut candidates: Vec<Candidate>, top_p: f64) -> Vec<Candidate> {
    let best = best_logit(&candidates);
    let weight = |candidate: &Candidate| (f64::from(candidate.logit) - f64::from(best)).exp();
    let total: f64 = candidates.iter().map(weight).sum();
    // What such unlikely tokens have together is less than what top-p leaves out, so they need no place in the order. At least the likeliest
    // stays, which has no less than the mean.
    let least = (1.0 - top_p) * total / candidates.len() as f64;
    candidates.retain(|candidate| weight(candidate) > least || candidate.logit >= best);
    // Of equal ones the smaller id comes first, so that the order is one.
    candidates.sort_unstable_by(|one, other| other.logit.total_cmp(&one.logit).then(one.id.cmp(&other.id)));
    let mut before = 0.0;
    let kept = candidates.iter().take_while(|candidate| {
        let reached = before >= top_p * total;
        before += weight(candidate);
        !reached
    });
    let kept = kept.count().max(1);
    candidates.truncate(kept);
    candidates
}

/// The candidate with the largest sum of logit and noise; of equal ones the smallest id. `noise` is the row's stream.
pub(super) fn choose(candidates: &[Candidate], noise: &mut ChaCha8Rng) -> u32 {
    // The likeliest first: few others then need their noise worked out.
    let Some(first) = candidates.iter().copied().reduce(|one, other| if other.logit > one.logit { other } else { one }) else {
        return 0;
    };
    let (mut chosen, mut best) = (first.id, first.logit + gumbel(number(noise, first.id)));
    let mut next = u64::MAX;
    for candidate in candidates.iter().filter(|candidate| candidate.id != first.id) {
        if next != u64::from(candidate.id) {
            noise.set_word_pos(u128::from(candidate.id));
        }
        next = u64::from(candidate.id) + 1;
        let number = noise.next_u32();
        if !may_exceed(number, best - candidate.logit) {
            continue;
        }
        let score = candidate.logit + gumbel(number);
        if score > best || (score >= best && candidate.id < chosen) {
            (chosen, best) = (candidate.id, score);
        }
    }
    chosen
}

fn best_logit(candidates: &[Candidate]) -> f32 {
    candidates.iter().map(|candidate| candidate.logit).fold(f32::NEG_INFINITY, f32::max)
}

fn number(noise: &mut ChaCha8Rng, id: u32) -> u32 {
    noise.set_word_pos(u128::from(id));
    noise.next_u32()
}

/// The Gumbel noise of a number of the stream.
pub(super) fn gumbel(number: u32) -> f32 {
    let uniform = (f64::from(number) + 0.5) / 2_f64.powi(32);
    -(-uniform.ln()).ln() as f32
}

/// Whether the noise of this number may be `missing` or more; where it says no, it is surely less.
fn may_exceed(number: u32, missing: f32) -> bool {
    // −ln u ≥ 1 − u, so noise of x needs 1 − u ≤ e^−x. A hundredth more makes up for rounding in x and in the noise.
    let lacking = (4_294_967_295.5 - f64::from(number)) / 2_f64.powi(32);
    lacking <= f64::from((0.01 - missing).exp())
}

#[cfg(test)]
mod tests {
    use data::supervision::counter_generator;

    use super::*;

    #[test]
    fn noise_may_exceed_whatever_it_does_exceed() {
        let mut generator = counter_generator(1, 2, 3, 4);
        let numbers = (0..20_000).map(|_| generator.next_u32()).chain([0, 1, u32::MAX - 1, u32::MAX]);
        let (mut spared, mut all) = (0, 0);
        for number in numbers {
            for missing in [-3.0_f32, -1.0, 0.0, 0.5, 2.0, 5.0, 12.0, 22.0, 23.0] {
                let noise = gumbel(number);
                assert!(noise < missing || may_exceed(number, missing), "{number} {noise} {missing}");
                (spared, all) = (spared + usize::from(!may_exceed(number, missing)), all + 1);
            }
        }
        assert!(spared * 2 > all, "{spared} of {all}");
    }

    #[test]
    fn the_nucleus_is_the_shortest_front_that_reaches_the_share() {
        let logits = [0.3_f64, 0.1, 0.4, 0.15, 0.05].map(|share| share.ln() as f32);
        for (top_p, ids) in
            [(0.0, vec![2]), (0.39, vec![2]), (0.6, vec![2, 0]), (0.75, vec![2, 0, 3]), (0.9999, vec![2, 0, 3, 1, 4])]
        {
            let kept: Vec<u32> = nucleus(all(logits.into_iter()), top_p).iter().map(|candidate| candidate.id).collect();
            assert_eq!(kept, ids, "{top_p}");
        }
        let equal = nucleus(all([1.0; 8].into_iter()), 0.49);
        assert_eq!(equal.iter().map(|candidate| candidate.id).collect::<Vec<_>>(), [0, 1, 2, 3]);
    }

    #[test]
    fn the_order_of_candidates_does_not_matter() {
        for row in 0..200 {
            let mut generator = counter_generator(5, 6, 7, row);
            let mut candidates =
                all((0..300).map(|_| (generator.next_u32() % 100) as f32 / 10.0).collect::<Vec<_>>().into_iter());
            let noise = || counter_generator(1, 2, 3, row);
            let expected = choose(&candidates, &mut noise());
            candidates.sort_by(|one, other| other.logit.total_cmp(&one.logit));
            assert_eq!(choose(&candidates, &mut noise()), expected);
        }
    }
}
