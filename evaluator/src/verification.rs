//! The verification rules: which drafted tokens the target agrees with, and which of them are kept. Plain slices, no tensors.
//!
//! A token that was drafted without chance is a point mass, so it is accepted exactly when the target itself chooses it ([`verify`]). This
//! gives the target's own text at temperature 0 and the target's own distribution above it. A token that was *drawn* is accepted by the
//! rejection rule ([`verify_drawn`]), which gives the target's distribution too, but not the text that the target alone would have drawn.

use data::responses::FinishReason;

/// What the target said about a draft.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Verdict {
    /// Drafted tokens that the target accepts, counted from the first.
    pub accepted: usize,
    /// The token that the target puts behind them: a correction, or the bonus token after full acceptance.
    pub next: u32,
}

/// Compares a draft with the target's choices; `choices[j]` is the target's token after the anchor and the first `j` drafted
/// tokens, so there is one more choice than there are drafted tokens.
pub fn verify(draft: &[u32], choices: &[u32]) -> Verdict {
    debug_assert_eq!(choices.len(), draft.len() + 1);
    let accepted = draft.iter().zip(choices).take_while(|(drafted, chosen)| drafted == chosen).count();
    Verdict { accepted, next: choices[accepted] }
}

/// Uniform numbers in (0, 1) for one position, independent of each other and of what drew the draft.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Chance {
    /// Decides whether the drafted token is accepted.
    pub accept: f64,
    /// Draws the token in its place, or the bonus token.
    pub replace: f64,
}

/// Judges a draft whose tokens were drawn, `draft[j]` from `drafter[j]`; `target[j]` is the target's distribution after the anchor and the
/// first `j` drafted tokens, so there is one more of these than there are drafted tokens, and one chance for each.
///
/// A token d is accepted with probability min(1, p(d) / q(d)), p the target's and q the drafter's distribution; in place of the first one
/// that is not, a token is drawn from what p has beyond q, and after full acceptance from p (Leviathan et al., arXiv 2211.17192, theorem
/// 3.5). Rows may be of any scale: they are normalised here, in f64, so that their rounding in f32 does not matter. Tokens beyond the end
/// of a drafter's row have no probability in it.
pub fn verify_drawn<D: AsRef<[f32]>, T: AsRef<[f32]>>(draft: &[u32], drafter: &[D], target: &[T], chances: &[Chance]) -> Verdict {
    debug_assert!(drafter.len() == draft.len() && target.len() == draft.len() + 1 && chances.len() == target.len());
    for (position, &token) in draft.iter().enumerate() {
        let (p, q) = (Distribution::new(target[position].as_ref()), Distribution::new(drafter[position].as_ref()));
        let Chance { accept, replace } = chances[position];
        // Not divided by q(d), which may be tiny: no clamp is needed, and the probability is exact.
        if accept * q.of(token as usize) >= p.of(token as usize) {
            let beyond = (0..p.row.len()).map(|other| (p.of(other) - q.of(other)).max(0.0));
            // Nothing is beyond q only if p is q, and then no rejection is due, but for rounding.
            let next = pick(beyond, replace).unwrap_or_else(|| p.draw(replace));
            return Verdict { accepted: position, next };
        }
    }
    let bonus = Distribution::new(target[draft.len()].as_ref()).draw(chances[draft.len()].replace);
    Verdict { accepted: draft.len(), next: bonus }
}

/// Weights of all tokens, and what they add up to.
struct Distribution<'a> {
    row: &'a [f32],
    total: f64,
}

impl<'a> Distribution<'a> {
    fn new(row: &'a [f32]) -> Self {
        Self { row, total: row.iter().copied().map(f64::from).sum() }
    }

    fn of(&self, token: usize) -> f64 {
        self.row.get(token).map_or(0.0, |&weight| f64::from(weight) / self.total)
    }

    fn draw(&self, chance: f64) -> u32 {
        // A row without any weight is no distribution, and any token as good as the other.
        pick(self.row.iter().copied().map(f64::from), chance).unwrap_or_default()
    }
}

/// The token at which the running sum of weights first exceeds the chance's share of their total; `None` if all are 0.
fn pick(weights: impl Iterator<Item = f64> + Clone, chance: f64) -> Option<u32> {
    let threshold = chance * weights.clone().sum::<f64>();
    let (mut sum, mut picked) = (0.0, None);
    for (token, weight) in (0_u32..).zip(weights) {
        if weight > 0.0 {
            // Should rounding leave the sum below the threshold, the last token with a weight is the one.
            picked = Some(token);
            sum += weight;
            if sum > threshold {
                break;
            }
        }
    }
    picked
}

/// What a round adds to the text.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Committed {
    pub tokens: Vec<u32>,
    /// Why the text ends with these tokens, if it does.
    pub ended: Option<FinishReason>,
}

/// The tokens that a verdict commits: the accepted ones and the target's next, cut behind the first stop token and at `room`,
/// the number of tokens left until the length limit.
pub fn commit(draft: &[u32], verdict: &Verdict, stop_tokens: &[u32], room: usize) -> Committed {
    let agreed = draft[..verdict.accepted].iter().copied().chain([verdict.next]);
    let mut tokens = Vec::with_capacity(verdict.accepted + 1);
    for token in agreed.take(room) {
        tokens.push(token);
        if stop_tokens.contains(&token) {
            return Committed { tokens, ended: Some(FinishReason::Stop) };
        }
    }
    let ended = (tokens.len() == room).then_some(FinishReason::Length);
    Committed { tokens, ended }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_first_disagreement_ends_acceptance() {
        assert_eq!(verify(&[1, 2, 3], &[1, 9, 3, 4]), Verdict { accepted: 1, next: 9 });
        assert_eq!(verify(&[1, 2, 3], &[7, 2, 3, 4]), Verdict { accepted: 0, next: 7 });
    }

    #[test]
    fn full_acceptance_brings_a_bonus_token() {
        assert_eq!(verify(&[1, 2, 3], &[1, 2, 3, 4]), Verdict { accepted: 3, next: 4 });
        assert_eq!(verify(&[], &[4]), Verdict { accepted: 0, next: 4 });
    }

    const EVEN: Chance = Chance { accept: 0.5, replace: 0.5 };

    fn judged(draft: &[u32], drafter: &[[f32; 3]], target: &[[f32; 3]], chances: &[(f64, f64)]) -> (usize, u32) {
        let chances: Vec<Chance> = chances.iter().map(|&(accept, replace)| Chance { accept, replace }).collect();
        let verdict = verify_drawn(draft, drafter, target, &chances);
        (verdict.accepted, verdict.next)
    }

    #[test]
    fn a_drawn_token_is_accepted_with_the_ratio_of_its_probabilities() {
        let (q, p, bonus) = ([0.5, 0.25, 0.25], [0.25, 0.5, 0.25], [0.0, 0.0, 1.0]);
        assert_eq!(judged(&[0], &[q], &[p, bonus], &[(0.499, 0.5), (0.5, 0.5)]), (1, 2));
        assert_eq!(judged(&[0], &[q], &[p, bonus], &[(0.501, 0.5), (0.5, 0.5)]), (0, 1));
        // What the target likes at least as much is always accepted.
        assert_eq!(judged(&[1], &[q], &[p, bonus], &[(0.999, 0.5), (0.5, 0.5)]), (1, 2));
        assert_eq!(judged(&[2], &[q], &[p, bonus], &[(0.999, 0.5), (0.5, 0.5)]), (1, 2));
        // Rows of any scale.
        assert_eq!(judged(&[0], &[q.map(|it| it * 8.0)], &[p, bonus], &[(0.499, 0.5), (0.5, 0.5)]), (1, 2));
        assert_eq!(judged(&[0], &[q], &[p.map(|it| it * 8.0), bonus], &[(0.501, 0.5), (0.5, 0.5)]), (0, 1));
    }

    #[test]
    fn a_replacement_comes_from_what_the_target_has_beyond_the_drafter() {
        let (q, p) = ([0.75, 0.25, 0.0], [0.0, 0.5, 0.5]);
        // Beyond q: a third of token 1, two thirds of token 2.
        for (replace, next) in [(0.01, 1), (0.33, 1), (0.34, 2), (0.99, 2)] {
            assert_eq!(judged(&[0], &[q], &[p, p], &[(0.5, replace), (0.5, 0.5)]), (0, next));
        }
        // A token outside a smaller drafter's vocabulary is replacement at most.
        let verdict = verify_drawn(&[0], &[vec![1.0_f32, 0.0]], &[[0.0_f32, 0.0, 1.0]; 2], &[EVEN; 2]);
        assert_eq!(verdict, Verdict { accepted: 0, next: 2 });
    }

    #[test]
    fn each_position_has_its_own_rows_and_chances() {
        let (sure, other) = ([1.0, 0.0, 0.0], [0.0, 0.5, 0.5]);
        let chances = [(0.5, 0.9), (0.9, 0.1), (0.5, 0.9)];
        assert_eq!(judged(&[0, 1], &[sure, [0.0, 0.625, 0.375]], &[sure, other, sure], &chances), (1, 2));
        assert_eq!(judged(&[0, 1], &[sure, [0.0, 0.5, 0.5]], &[sure, other, sure], &chances), (2, 0));
        let low = Chance { replace: 0.25, ..EVEN };
        assert_eq!(verify_drawn(&[], &[] as &[[f32; 3]], &[other], &[low]), Verdict { accepted: 0, next: 1 });
    }

    #[test]
    fn equal_distributions_and_empty_rows_are_no_trap() {
        let tiny = [1e-30, 1.0, 0.0];
        assert_eq!(judged(&[0], &[tiny], &[tiny, tiny], &[(1.0 - 1e-16, 0.5), (0.5, 0.5)]), (1, 1));
        // A token that the drafter cannot have drawn, and rows that are no distributions.
        assert_eq!(judged(&[2], &[tiny], &[tiny, tiny], &[(0.5, 0.5), (0.5, 0.5)]).0, 0);
        assert_eq!(judged(&[0], &[[0.0; 3]], &[[0.0; 3], [f32::NAN; 3]], &[(0.5, 0.5), (0.5, 0.5)]), (1, 0));
    }

    #[test]
    fn the_first_stop_token_is_kept_and_ends_the_text() {
        let verdict = Verdict { accepted: 3, next: 4 };
        assert_eq!(commit(&[1, 2, 2], &verdict, &[2], 10), Committed { tokens: vec![1, 2], ended: Some(FinishReason::Stop) });
        assert_eq!(
            commit(&[1, 2, 3], &verdict, &[4], 10),
            Committed { tokens: vec![1, 2, 3, 4], ended: Some(FinishReason::Stop) }
        );
    }

    #[test]
    fn a_stop_token_that_was_drafted_but_not_accepted_ends_nothing() {
        let committed = commit(&[1, 2, 3], &Verdict { accepted: 1, next: 5 }, &[2, 3], 10);
        assert_eq!(committed, Committed { tokens: vec![1, 5], ended: None });
    }

    #[test]
    fn the_length_limit_cuts_and_a_stop_token_on_the_limit_counts_as_stop() {
        let verdict = Verdict { accepted: 3, next: 4 };
        assert_eq!(commit(&[1, 2, 3], &verdict, &[], 2), Committed { tokens: vec![1, 2], ended: Some(FinishReason::Length) });
        assert_eq!(
            commit(&[1, 2, 3], &verdict, &[], 4),
            Committed { tokens: vec![1, 2, 3, 4], ended: Some(FinishReason::Length) }
        );
        assert_eq!(commit(&[1, 2, 3], &verdict, &[2], 2), Committed { tokens: vec![1, 2], ended: Some(FinishReason::Stop) });
    }
}
