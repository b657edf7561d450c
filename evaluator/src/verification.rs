//! The one verification rule: which drafted tokens the target agrees with, and which of them are kept.
//!
//! A draft is a point mass, so a drafted token is accepted exactly when the target itself chooses it. This gives the target's
//! own text at temperature 0 and the target's own distribution above it. Plain slices, no tensors.

use data::responses::FinishReason;

/// What the target said about a draft.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Verdict {
    /// Drafted tokens that equal the target's choices, counted from the first.
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
