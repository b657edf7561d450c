//! Which outcomes of a verification are drafted ahead, and finding the one that came true.
//!
//! A round ends in an outcome: `accepted` drafted tokens, then one token of the target's own. While the target works, the
//! drafter prepares a continuation for each of the likeliest outcomes. At a rejection the target's token cannot be the drafted
//! one, so the candidates at a position are its best tokens *other* than the drafted token. Plain Rust, no tensors.

use serde::{Deserialize, Serialize};

use crate::verification::Verdict;

/// What a block proposes for verification, with the runners-up that a fan-out picks from.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub struct Draft {
    /// The tokens to verify.
    pub tokens: Vec<u32>,
    /// For each of them its slot's tokens by descending score, the drafted one first.
    pub ranked: Vec<Vec<u32>>,
    /// Ranked guesses of the token after full acceptance, where the label convention gives them.
    pub bonus: Option<Vec<u32>>,
}

/// A block to draft ahead of time for one outcome.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Continuation {
    /// Accepted tokens of the outcome it stands for.
    pub accepted: usize,
    /// Slot 0 of the block.
    pub anchor: u32,
    /// How many of the clean tokens under verification (the round's anchor and its draft) the block looks back at; its own
    /// anchor stands right behind them.
    pub context: usize,
}

impl Continuation {
    /// Whether the block is anchored at the last *drafted* token, so that its own first prediction is the guess of the outcome's
    /// token.
    pub fn guesses_outcome_itself(&self) -> bool {
        self.context == self.accepted
    }
}

/// The published fan-out: for each of the first `positions` positions the `candidates` best tokens other than the drafted one,
/// and full acceptance.
///
/// With guesses of the bonus token, full acceptance gets `candidates` continuations, one a guess. Without, it gets one that is
/// anchored at the last drafted token and loses its first prediction to the check against the bonus token; in a block of two
/// nothing would remain, so there is none.
pub fn rectangle(draft: &Draft, block_size: usize, positions: usize, candidates: usize) -> Vec<Continuation> {
    let drafted = draft.tokens.len();
    let mut continuations = Vec::new();
    for (accepted, (token, ranked)) in draft.tokens.iter().zip(&draft.ranked).take(positions).enumerate() {
        let others = ranked.iter().filter(|&candidate| candidate != token).take(candidates);
        continuations.extend(others.map(|&anchor| Continuation { accepted, anchor, context: accepted + 1 }));
    }
    match (&draft.bonus, draft.tokens.last()) {
        (Some(guesses), _) => {
            let guesses = guesses.iter().take(candidates);
            continuations.extend(guesses.map(|&anchor| Continuation { accepted: drafted, anchor, context: drafted + 1 }));
        }
        (None, Some(&anchor)) if block_size > 2 => {
            continuations.push(Continuation { accepted: drafted, anchor, context: drafted });
        }
        (None, _) => {}
    }
    continuations
}

/// How the draft of a round came to be: what looking up the previous round's outcome gave.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Lookup {
    /// The first round of a text, for which nothing can be drafted ahead.
    First,
    /// A continuation was ready.
    Hit,
    /// The position had continuations, but none for the target's token.
    WrongCandidate,
    /// The rejection came behind the last position that has continuations.
    BeyondPositions,
    /// All drafted tokens were accepted, and no continuation fits the bonus token.
    FullAcceptance,
}

impl Lookup {
    pub const ALL: [Lookup; 5] =
        [Lookup::First, Lookup::Hit, Lookup::WrongCandidate, Lookup::BeyondPositions, Lookup::FullAcceptance];

    /// The name in score files.
    pub fn name(self) -> &'static str {
        match self {
            Lookup::First => "first",
            Lookup::Hit => "hit",
            Lookup::WrongCandidate => "wrong_candidate",
            Lookup::BeyondPositions => "beyond_positions",
            Lookup::FullAcceptance => "full_acceptance",
        }
    }

    /// The lookup with that name.
    pub fn from_name(name: &str) -> Option<Lookup> {
        Self::ALL.into_iter().find(|lookup| lookup.name() == name)
    }
}

/// Finds the draft that was prepared for a verdict on `drafted` tokens, or says why there is none.
pub fn look_up(
    prepared: Vec<(Continuation, Draft)>,
    verdict: &Verdict,
    drafted: usize,
    positions: usize,
) -> Result<Draft, Lookup> {
    for (continuation, mut draft) in prepared {
        if continuation.accepted != verdict.accepted {
            continue;
        }
        if continuation.guesses_outcome_itself() {
            if draft.tokens.first() == Some(&verdict.next) {
                draft.tokens.remove(0);
                draft.ranked.remove(0);
                return Ok(draft);
            }
        } else if continuation.anchor == verdict.next {
            return Ok(draft);
        }
    }
    Err(if verdict.accepted == drafted {
        Lookup::FullAcceptance
    } else if verdict.accepted >= positions {
        Lookup::BeyondPositions
    } else {
        Lookup::WrongCandidate
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    fn draft(bonus: Option<Vec<u32>>) -> Draft {
        Draft { tokens: vec![10, 20, 30], ranked: vec![vec![10, 11, 12], vec![20, 21, 22], vec![30, 31, 32]], bonus }
    }

    fn continuation(accepted: usize, anchor: u32, context: usize) -> Continuation {
        Continuation { accepted, anchor, context }
    }

    #[test]
    fn the_rectangle_holds_the_runners_up_of_each_position_and_full_acceptance() {
        assert_eq!(
            rectangle(&draft(None), 4, 2, 2),
            [
                continuation(0, 11, 1),
                continuation(0, 12, 1),
                continuation(1, 21, 2),
                continuation(1, 22, 2),
                continuation(3, 30, 3),
            ]
        );
        assert_eq!(rectangle(&draft(Some(vec![40, 41, 42])), 4, 1, 1), [continuation(0, 11, 1), continuation(3, 40, 4)]);
    }

    #[test]
    fn more_positions_than_drafted_tokens_and_small_vocabularies_are_fine() {
        let all = rectangle(&draft(None), 4, 11, 9);
        assert_eq!(all.len(), 3 * 2 + 1);
        assert_eq!(rectangle(&Draft::default(), 2, 11, 2), []);
    }

    #[test]
    fn a_block_of_two_has_no_continuation_anchored_at_its_draft() {
        let draft = Draft { tokens: vec![10], ranked: vec![vec![10, 11]], bonus: None };
        assert_eq!(rectangle(&draft, 2, 1, 1), [continuation(0, 11, 1)]);
    }

    fn prepared(bonus: Option<Vec<u32>>) -> Vec<(Continuation, Draft)> {
        let follow_up = |first| Draft { tokens: vec![first, 51, 52], ranked: vec![vec![first], vec![51], vec![52]], bonus: None };
        rectangle(&draft(bonus), 4, 2, 1).into_iter().map(|it| (it, follow_up(it.anchor + 100))).collect()
    }

    #[test]
    fn an_outcome_finds_its_draft() {
        let found = look_up(prepared(None), &Verdict { accepted: 1, next: 21 }, 3, 2);
        assert_eq!(found.map(|draft| draft.tokens), Ok(vec![121, 51, 52]));
        let found = look_up(prepared(Some(vec![40])), &Verdict { accepted: 3, next: 40 }, 3, 2);
        assert_eq!(found.map(|draft| draft.tokens), Ok(vec![140, 51, 52]));
    }

    #[test]
    fn full_acceptance_without_guesses_spends_the_first_prediction_on_the_check() {
        let found = look_up(prepared(None), &Verdict { accepted: 3, next: 130 }, 3, 2);
        assert_eq!(found, Ok(Draft { tokens: vec![51, 52], ranked: vec![vec![51], vec![52]], bonus: None }));
        // The anchor of that continuation is a drafted token, not a guess of the bonus token.
        let found = look_up(prepared(None), &Verdict { accepted: 3, next: 30 }, 3, 2);
        assert_eq!(found, Err(Lookup::FullAcceptance));
    }

    #[test]
    fn every_miss_has_its_cause() {
        let cause = |accepted, next| look_up(prepared(Some(vec![40])), &Verdict { accepted, next }, 3, 2).err();
        assert_eq!(cause(0, 12), Some(Lookup::WrongCandidate));
        assert_eq!(cause(1, 11), Some(Lookup::WrongCandidate));
        assert_eq!(cause(2, 31), Some(Lookup::BeyondPositions));
        assert_eq!(cause(3, 41), Some(Lookup::FullAcceptance));
    }

    #[test]
    fn names_are_read_back() {
        for lookup in Lookup::ALL {
            assert_eq!(Lookup::from_name(lookup.name()), Some(lookup));
        }
        assert_eq!(Lookup::from_name("HIT"), None);
    }
}
