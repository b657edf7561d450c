//! Which outcomes of a verification are drafted ahead, and finding the one that came true.
//!
//! A round ends in an outcome: `accepted` drafted tokens, then one token of the target's own. While the target works, the
//! drafter prepares a continuation for each of the likeliest outcomes. At a rejection the target's token cannot be the drafted
//! one, so the candidates at a position are its best tokens *other* than the drafted token. Plain Rust, no tensors.

use std::fmt::{Display, Formatter};

use serde::{Deserialize, Serialize};

use crate::sampling::Distributions;
use crate::verification::Verdict;

/// A token that a slot may hold, and the drafter's probability for it, calibrated.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Candidate {
    pub token: u32,
    pub probability: f32,
}

/// What a block proposes for verification, with the runners-up that a fan-out picks from.
#[derive(Debug, Clone, PartialEq, Default)]
pub struct Draft {
    /// The tokens to verify.
    pub tokens: Vec<u32>,
    /// For each of them its slot's tokens, likeliest first; a token that was drawn is among them, if need be as the last.
    pub ranked: Vec<Vec<Candidate>>,
    /// Ranked guesses of the token after full acceptance, where the label convention gives them.
    pub bonus: Option<Vec<Candidate>>,
    /// What the tokens were drawn from; absent where they are the likeliest ones.
    pub drawn_from: Option<Distributions>,
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

/// Which outcomes are drafted ahead.
#[derive(Debug, Clone, PartialEq)]
pub enum FanOut {
    /// The published one: for each of the first `positions` positions the `candidates` best tokens other than the drafted one, and
    /// full acceptance.
    ///
    /// With guesses of the bonus token, full acceptance gets `candidates` continuations, one a guess. Without, it gets one that is
    /// anchored at the last drafted token and loses its first prediction to the check against the bonus token; in a block of two
    /// nothing would remain, so there is none.
    Rectangle { positions: usize, candidates: usize },
    /// The `blocks` likeliest outcomes, by the drafter's own probabilities: all drafted tokens before it right, then this one.
    BestFirst { blocks: usize },
    /// `blocks` shared out over the positions by two numbers alone, the same in every round (SSD, arXiv 2603.03251, theorem 12): the
    /// share `acceptance` of drafted tokens that are right, and the `rank_exponent` r by which the target's token is missed less often
    /// the more candidates there are, F^-r. Each position takes its best candidates; see [`shares`].
    Geometric { blocks: usize, acceptance: f64, rank_exponent: f64 },
}

/// Acceptance and rank exponent of a drafter that nothing is known of: two of three tokens right, and a candidate in the likeliest dozen
/// at three of four rejections.
pub const UNKNOWN_DRAFTER: (f64, f64) = (0.67, 0.6);

impl FanOut {
    /// How many of a slot's best tokens it looks at.
    pub fn ranked(&self) -> usize {
        match self {
            Self::Rectangle { candidates, .. } => candidates + 1,
            Self::BestFirst { blocks } | Self::Geometric { blocks, .. } => blocks.saturating_add(1).min(MOST_RANKED),
        }
    }

    /// The most continuations it picks for a block of `block_size` slots.
    pub fn most_blocks(&self, block_size: usize) -> usize {
        match self {
            Self::Rectangle { positions, candidates } => positions.min(&(block_size - 1)) * candidates + candidates.max(&1),
            // A slot has no more candidates than are ranked, however large the budget.
            Self::BestFirst { blocks } | Self::Geometric { blocks, .. } => (*blocks).min(block_size * MOST_RANKED),
        }
    }

    /// The continuations to draft beside the verification of `draft`.
    pub fn continuations(&self, draft: &Draft, block_size: usize) -> Vec<Continuation> {
        match self {
            Self::Rectangle { positions, candidates } => rectangle(draft, block_size, *positions, *candidates),
            Self::BestFirst { blocks } => best_first(draft, block_size, *blocks),
            Self::Geometric { blocks, acceptance, rank_exponent } => {
                geometric(draft, block_size, *blocks, (*acceptance, *rank_exponent))
            }
        }
    }
}

impl Display for FanOut {
    fn fmt(&self, formatter: &mut Formatter<'_>) -> std::fmt::Result {
        match self {
            Self::Rectangle { positions, candidates } => write!(formatter, "rectangle, {positions} × {candidates}"),
            Self::BestFirst { blocks } => write!(formatter, "best_first, {blocks} blocks"),
            Self::Geometric { blocks, .. } => write!(formatter, "geometric, {blocks} blocks"),
        }
    }
}

/// More candidates of one slot than this are never among the likeliest outcomes worth a block.
const MOST_RANKED: usize = 32;

/// The outcomes of a draft that a continuation can stand for, each with the probability that it comes true as the drafter sees it:
/// position by position, a position's candidates likeliest first, full acceptance at the end.
fn outcomes(draft: &Draft, block_size: usize) -> Vec<(Continuation, f64)> {
    let drafted = draft.tokens.len();
    let mut outcomes = Vec::new();
    // That all drafted tokens so far are right.
    let mut reached = 1.0;
    let mut last = 1.0;
    for (accepted, (token, ranked)) in draft.tokens.iter().zip(&draft.ranked).enumerate() {
        for candidate in ranked.iter().filter(|candidate| candidate.token != *token) {
            let continuation = Continuation { accepted, anchor: candidate.token, context: accepted + 1 };
            outcomes.push((continuation, reached * f64::from(candidate.probability)));
        }
        last = ranked.iter().find(|candidate| candidate.token == *token).map_or(0.0, |it| f64::from(it.probability));
        reached *= last;
    }
    match (&draft.bonus, draft.tokens.last()) {
        (Some(guesses), _) => outcomes.extend(guesses.iter().map(|guess| {
            let continuation = Continuation { accepted: drafted, anchor: guess.token, context: drafted + 1 };
            (continuation, reached * f64::from(guess.probability))
        })),
        // Its own first prediction is the guess; how likely that is right is not known before it is drafted, so the slot before it
        // stands in.
        (None, Some(&anchor)) if block_size > 2 => {
            outcomes.push((Continuation { accepted: drafted, anchor, context: drafted }, reached * last));
        }
        (None, _) => {}
    }
    outcomes
}

fn rectangle(draft: &Draft, block_size: usize, positions: usize, candidates: usize) -> Vec<Continuation> {
    let mut taken = vec![0; draft.tokens.len() + 1];
    let picked = outcomes(draft, block_size).into_iter().map(|(continuation, _)| continuation).filter(|continuation| {
        let full = continuation.accepted == draft.tokens.len();
        taken[continuation.accepted] += 1;
        (full || continuation.accepted < positions)
            && (taken[continuation.accepted] <= candidates || continuation.guesses_outcome_itself())
    });
    picked.collect()
}

fn best_first(draft: &Draft, block_size: usize, blocks: usize) -> Vec<Continuation> {
    let mut outcomes = outcomes(draft, block_size);
    outcomes.sort_by(|one, other| other.1.total_cmp(&one.1));
    outcomes.into_iter().take(blocks).map(|(continuation, _)| continuation).collect()
}

fn geometric(draft: &Draft, block_size: usize, blocks: usize, (acceptance, rank_exponent): (f64, f64)) -> Vec<Continuation> {
    let outcomes = outcomes(draft, block_size);
    let mut candidates = vec![0; draft.tokens.len() + 1];
    outcomes.iter().for_each(|(continuation, _)| candidates[continuation.accepted] += 1);
    let mut left = shares(&candidates, blocks, acceptance, rank_exponent);
    let continuations = outcomes.into_iter().map(|(continuation, _)| continuation);
    continuations
        .filter(|continuation| {
            let left = &mut left[continuation.accepted];
            let taken = *left > 0;
            *left = left.saturating_sub(1);
            taken
        })
        .collect()
}

/// Shares `blocks` out over the positions 0 to K of a draft, K being full acceptance; no position gets more than its `candidates`, and what
/// one cannot take goes to the others.
///
/// The probability that a round reaches position k and ends there is P_k = a^k (1 - a), and P_K = a^K; given that, F_k candidates miss with
/// F_k^-r. The sum of P_k F_k^-r is least at F_k = F_0 a^(k / (1 + r)), F_K = F_0 a^(K / (1 + r)) (1 - a)^(-1 / (1 + r)). In whole numbers:
/// each block goes where it takes most off the sum, which is exact since each candidate takes off less than the one before it. What the
/// first one takes off, infinite by the formula, is the slope at one half, so that a position gets one from about half a block on.
pub fn shares(candidates: &[usize], blocks: usize, acceptance: f64, rank_exponent: f64) -> Vec<usize> {
    let (acceptance, rank_exponent) = (acceptance.clamp(0.0, 1.0), rank_exponent.max(1e-3));
    let full = candidates.len().saturating_sub(1);
    let gain = |position: usize, taken: usize| {
        let ends_here = acceptance.powi(position as i32) * if position == full { 1.0 } else { 1.0 - acceptance };
        let misses = |candidates: usize| (candidates as f64).powf(-rank_exponent);
        ends_here * if taken == 0 { rank_exponent * 2_f64.powf(1.0 + rank_exponent) } else { misses(taken) - misses(taken + 1) }
    };
    let mut shares = vec![0; candidates.len()];
    for _ in 0..blocks.min(candidates.iter().sum()) {
        // Backwards, because of equals the last one is taken.
        let open = (0..shares.len()).rev().filter(|&position| shares[position] < candidates[position]);
        let Some(most) = open.max_by(|&one, &other| gain(one, shares[one]).total_cmp(&gain(other, shares[other]))) else { break };
        shares[most] += 1;
    }
    shares
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
    /// The rejection came at a position that has no continuations: with a rectangle, behind the last one that has.
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
pub fn look_up(prepared: Vec<(Continuation, Draft)>, verdict: &Verdict, drafted: usize) -> Result<Draft, Lookup> {
    let mut position_prepared = false;
    for (continuation, mut draft) in prepared {
        if continuation.accepted != verdict.accepted {
            continue;
        }
        position_prepared = true;
        if continuation.guesses_outcome_itself() {
            // The guess is the likeliest token even where drafts are drawn: it is right more often, and hangs on no chance.
            if draft.ranked.first().and_then(|slot| slot.first()).is_some_and(|guess| guess.token == verdict.next) {
                draft.tokens.remove(0);
                draft.ranked.remove(0);
                draft.drawn_from = draft.drawn_from.map(|rows| rows.without_first());
                return Ok(draft);
            }
        } else if continuation.anchor == verdict.next {
            return Ok(draft);
        }
    }
    Err(match (verdict.accepted == drafted, position_prepared) {
        (true, _) => Lookup::FullAcceptance,
        (false, true) => Lookup::WrongCandidate,
        (false, false) => Lookup::BeyondPositions,
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Candidates of descending probability: 0.5, 0.25, …
    fn ranked(tokens: &[u32]) -> Vec<Candidate> {
        tokens.iter().enumerate().map(|(rank, &token)| Candidate { token, probability: 0.5_f32.powi(rank as i32 + 1) }).collect()
    }

    fn draft(bonus: Option<Vec<u32>>) -> Draft {
        let slots = [[10, 11, 12], [20, 21, 22], [30, 31, 32]];
        let ranked_slots = slots.iter().map(|slot| ranked(slot)).collect();
        Draft { tokens: vec![10, 20, 30], ranked: ranked_slots, bonus: bonus.as_deref().map(ranked), drawn_from: None }
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
        let draft = Draft { tokens: vec![10], ranked: vec![ranked(&[10, 11])], ..Draft::default() };
        assert_eq!(rectangle(&draft, 2, 1, 1), [continuation(0, 11, 1)]);
    }

    #[test]
    fn best_first_takes_the_likeliest_outcomes() {
        // By position 1/4 and 1/8, then 1/8 and 1/16, then 1/16 and 1/32; all three right 1/8, of which half go on with the guess.
        assert_eq!(
            best_first(&draft(Some(vec![40])), 4, 5),
            [
                continuation(0, 11, 1),
                continuation(0, 12, 1),
                continuation(1, 21, 2),
                continuation(1, 22, 2),
                continuation(2, 31, 3),
            ]
        );
        assert_eq!(best_first(&draft(None), 4, 99).len(), 3 * 2 + 1);
        assert_eq!(best_first(&draft(None), 4, 0), []);
    }

    #[test]
    fn a_sure_drafter_spends_its_blocks_on_full_acceptance() {
        let sure = |token| vec![Candidate { token, probability: 0.99 }, Candidate { token: token + 1, probability: 0.005 }];
        let draft = Draft { tokens: vec![10, 20], ranked: vec![sure(10), sure(20)], bonus: Some(sure(30)), drawn_from: None };
        assert_eq!(best_first(&draft, 3, 1), [continuation(2, 30, 3)]);
    }

    /// All ways of sharing `blocks` out over so many positions.
    fn all_shares(positions: usize, blocks: usize) -> Vec<Vec<usize>> {
        if positions == 1 {
            return vec![vec![blocks]];
        }
        let with_first =
            |first| all_shares(positions - 1, blocks - first).into_iter().map(move |rest| [&[first], &rest[..]].concat());
        (0..=blocks).flat_map(with_first).collect()
    }

    const DRAFTERS: [(f64, f64); 6] = [(0.3, 0.4), (0.5, 1.0), (0.67, 0.6), (0.8, 0.3), (0.9, 1.5), (0.97, 0.8)];

    #[test]
    fn geometric_shares_are_the_best_of_all_by_their_own_measure() {
        for (acceptance, exponent) in DRAFTERS {
            for (drafted, blocks) in [(1, 4), (2, 3), (2, 7), (3, 6), (3, 9), (4, 8), (4, 12)] {
                let missed = |shares: &[usize]| -> f64 {
                    let one = |(position, &share): (usize, &usize)| {
                        let last = if position == drafted { 1.0 } else { 1.0 - acceptance };
                        acceptance.powi(position as i32) * last * (share as f64).powf(-exponent)
                    };
                    shares.iter().enumerate().map(one).sum()
                };
                let found = shares(&vec![99; drafted + 1], blocks, acceptance, exponent);
                assert_eq!(found.iter().sum::<usize>(), blocks);
                // The published measure is infinite without a candidate at each position: it can only judge shares that have one.
                let covered = |shares: &Vec<usize>| shares.iter().zip(&found).all(|(share, found)| (*share > 0) == (*found > 0));
                let finite = |shares: &[usize]| {
                    missed(&shares.iter().map(|&share| if share == 0 { 1 } else { share }).collect::<Vec<_>>())
                };
                let best = all_shares(drafted + 1, blocks)
                    .iter()
                    .filter(|it| covered(it))
                    .map(|it| finite(it))
                    .fold(f64::INFINITY, f64::min);
                assert!(finite(&found) <= best + 1e-12, "{acceptance} {exponent} {drafted} {blocks}: {found:?}");
            }
        }
    }

    #[test]
    fn geometric_shares_round_the_published_ones() {
        for (acceptance, exponent) in DRAFTERS {
            for drafted in [1, 3, 7, 15] {
                let power = 1.0 / (1.0 + exponent);
                let mut published: Vec<f64> =
                    (0..=drafted).map(|position| acceptance.powf(f64::from(position) * power)).collect();
                published[drafted as usize] *= (1.0 - acceptance).powf(-power);
                let sum: f64 = published.iter().sum();
                let mut fewer = vec![0; drafted as usize + 1];
                for blocks in 0..200 {
                    let found = shares(&vec![999; drafted as usize + 1], blocks, acceptance, exponent);
                    assert_eq!(found.iter().sum::<usize>(), blocks);
                    // There is a scale on which each share is less than one block away from the published one.
                    let scales =
                        |more: f64| found.iter().zip(&published).map(move |(&share, weight)| (share as f64 + more) / weight);
                    let (low, high) = (scales(-1.0).fold(0.0, f64::max), scales(1.0).fold(f64::INFINITY, f64::min));
                    assert!(low < high, "{acceptance} {exponent} {drafted} {blocks}: {found:?}");
                    // Earlier positions never get fewer, and a larger budget takes nothing away.
                    assert!(found[..drafted as usize].is_sorted_by(|one, other| one >= other), "{found:?}");
                    assert!(found.iter().zip(&fewer).all(|(more, fewer)| more >= fewer), "{found:?} after {fewer:?}");
                    fewer = found;
                }
                let found = shares(&vec![9999; drafted as usize + 1], 4000, acceptance, exponent);
                for (share, expected) in found.iter().zip(&published) {
                    assert!(
                        (*share as f64 - 4000.0 * expected / sum).abs() < 2.0,
                        "{acceptance} {exponent} {drafted}: {found:?}"
                    );
                }
            }
        }
    }

    #[test]
    fn what_a_position_cannot_take_goes_to_the_others() {
        let (acceptance, exponent) = (0.9, 0.6);
        assert!(shares(&[9, 9, 9], 8, acceptance, exponent)[2] > 1);
        let capped = shares(&[9, 9, 1], 8, acceptance, exponent);
        assert_eq!((capped[2], capped.iter().sum::<usize>()), (1, 8));
        assert_eq!(shares(&[2, 3, 0], 99, acceptance, exponent), [2, 3, 0]);
        assert_eq!(shares(&[0], 5, acceptance, exponent), [0]);
        // Extremes: a drafter that is never right, or always.
        assert_eq!(shares(&[9, 9, 9], 3, 0.0, exponent), [3, 0, 0]);
        assert_eq!(shares(&[9, 9, 9], 3, 1.0, exponent), [0, 0, 3]);
    }

    #[test]
    fn a_geometric_fan_out_takes_each_positions_best() {
        let fan_out = FanOut::Geometric { blocks: 3, acceptance: 0.5, rank_exponent: 1.0 };
        assert_eq!(
            fan_out.continuations(&draft(Some(vec![40])), 4),
            [continuation(0, 11, 1), continuation(1, 21, 2), continuation(2, 31, 3)]
        );
        // Anchored at the last draft there is but one continuation for full acceptance, however likely that is.
        let fan_out = FanOut::Geometric { blocks: 4, acceptance: 0.99, rank_exponent: 1.0 };
        let picked = fan_out.continuations(&draft(None), 4);
        assert_eq!((picked.len(), picked.iter().filter(|it| it.accepted == 3).count()), (4, 1));
        assert_eq!(fan_out.continuations(&Draft::default(), 2), []);
    }

    fn prepared(bonus: Option<Vec<u32>>) -> Vec<(Continuation, Draft)> {
        let slots = |first| [first, 51, 52].map(|token| ranked(&[token])).to_vec();
        let follow_up = |first| Draft { tokens: vec![first, 51, 52], ranked: slots(first), ..Draft::default() };
        rectangle(&draft(bonus), 4, 2, 1).into_iter().map(|it| (it, follow_up(it.anchor + 100))).collect()
    }

    #[test]
    fn an_outcome_finds_its_draft() {
        let found = look_up(prepared(None), &Verdict { accepted: 1, next: 21 }, 3);
        assert_eq!(found.map(|draft| draft.tokens), Ok(vec![121, 51, 52]));
        let found = look_up(prepared(Some(vec![40])), &Verdict { accepted: 3, next: 40 }, 3);
        assert_eq!(found.map(|draft| draft.tokens), Ok(vec![140, 51, 52]));
    }

    #[test]
    fn full_acceptance_without_guesses_spends_the_first_prediction_on_the_check() {
        let found = look_up(prepared(None), &Verdict { accepted: 3, next: 130 }, 3);
        let slots = [51, 52].map(|token| ranked(&[token])).to_vec();
        assert_eq!(found, Ok(Draft { tokens: vec![51, 52], ranked: slots, ..Draft::default() }));
        // The anchor of that continuation is a drafted token, not a guess of the bonus token.
        let found = look_up(prepared(None), &Verdict { accepted: 3, next: 30 }, 3);
        assert_eq!(found, Err(Lookup::FullAcceptance));
    }

    #[test]
    fn a_drawn_first_token_is_no_guess_and_goes_with_its_distribution() {
        let rows = |first: f32| tch::Tensor::from_slice(&[first, 0.5, 0.25]).unsqueeze(1);
        let looked_up = |next| {
            let mut prepared = prepared(None);
            for (_, draft) in &mut prepared {
                draft.tokens[0] = 7;
                draft.drawn_from = Some(Distributions::new(rows(1.0)));
            }
            look_up(prepared, &Verdict { accepted: 3, next }, 3)
        };
        assert_eq!(looked_up(7), Err(Lookup::FullAcceptance));
        let found = looked_up(130).expect("130 is the likeliest first token");
        assert_eq!(found.tokens, [51, 52]);
        assert_eq!(found.drawn_from, Some(Distributions::new(rows(1.0).narrow(0, 1, 2))));
    }

    #[test]
    fn every_miss_has_its_cause() {
        let cause = |accepted, next| look_up(prepared(Some(vec![40])), &Verdict { accepted, next }, 3).err();
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
