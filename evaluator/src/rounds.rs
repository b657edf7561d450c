//! The accounting of rounds: what each committed, what became of it, when it ran, and the figures drawn from many of them.

use std::collections::BTreeMap;

use crate::fan_out::Lookup;
use crate::verification::{Committed, Verdict};

/// One target forward over a block, and what it committed. Times are in seconds, starts counted from the end of the prompt's
/// prefill.
#[derive(Debug, Clone, PartialEq, Default)]
pub struct Round {
    /// Index of the prompt in its benchmark, and which of its turns this is, from 0.
    pub prompt: usize,
    pub turn: usize,
    /// Index of the round in its text, from 0.
    pub round: usize,
    /// Drafted tokens up to the end of the text; what a draft proposes behind a stop token or the length limit is not counted.
    pub drafted: usize,
    /// Drafted tokens that were verified: the rows of the target's forward but the anchor's.
    pub proposed: usize,
    /// Drafted tokens that were kept.
    pub accepted: usize,
    /// Tokens kept, correction or bonus token included.
    pub committed: usize,
    /// The token that the target put behind the accepted ones: with `accepted` the outcome of the round.
    pub next: u32,
    /// Texts that shared the round's forwards; the times below are those of whole forwards.
    pub lanes: usize,
    /// Tokens that the target held before the round's block.
    pub context: usize,
    /// Continuations drafted ahead of this round's outcome; 0 for decoders that do not draft ahead.
    pub pack_blocks: usize,
    /// How the draft came to be; absent for decoders that do not draft ahead.
    pub lookup: Option<Lookup>,
    /// When the drafter began to write this round's draft while the target waited, and for how long; 0 long for a hit.
    pub draft_start: f64,
    pub draft_seconds: f64,
    /// When the pack for this round's outcomes began, and how long it took; 0 long for decoders that do not draft ahead.
    pub pack_start: f64,
    pub pack_seconds: f64,
    /// When the target began to verify, and how long it took.
    pub verify_start: f64,
    pub verify_seconds: f64,
    /// How long the target stood still before it.
    pub wait_seconds: f64,
    /// How long the drafter stood still, its pack done, before it heard of the previous round's outcome.
    pub bubble_seconds: f64,
}

impl Round {
    /// The counts of a round from what was proposed and what was kept of it.
    pub fn counted(proposed: usize, verdict: &Verdict, committed: &Committed) -> Round {
        let kept = committed.tokens.len();
        // Without a token of the target's own at the end, the text ended inside the draft, and its rest was never judged.
        let ended_inside = kept <= verdict.accepted;
        Round {
            drafted: if ended_inside { kept } else { proposed },
            proposed,
            accepted: verdict.accepted.min(kept),
            committed: kept,
            next: verdict.next,
            ..Round::default()
        }
    }
}

/// The figures of many rounds.
#[derive(Debug, Clone, PartialEq, Default)]
pub struct Tally {
    pub rounds: usize,
    /// Tokens committed by rounds; the first token of a text comes from the prefill and is not among them.
    pub committed: usize,
    /// Committed tokens over rounds, of the whole set.
    pub tau_pooled: f64,
    /// Mean over the prompts of their own committed tokens over rounds; a prompt without a round has none.
    pub tau_macro: f64,
    /// Hits over the rounds that could have been drafted ahead; absent where nothing is drafted ahead.
    pub hit_rate: Option<f64>,
    /// Share of rounds in which the drafted token at this position was kept, among those that proposed one there.
    pub acceptance_by_position: Vec<f64>,
    /// How many rounds kept 0, 1, 2, … drafted tokens.
    pub accepted_histogram: Vec<usize>,
    /// Rounds whose draft was not ready, by cause.
    pub misses: BTreeMap<Lookup, usize>,
    /// Tokens committed per round by rounds that found their draft ready, and by those that did not.
    pub tau_after_hit: Option<f64>,
    pub tau_after_miss: Option<f64>,
    /// Sums of times; a forward that several texts shared counts once.
    pub draft_seconds: f64,
    pub pack_seconds: f64,
    pub verify_seconds: f64,
    pub wait_seconds: f64,
    pub bubble_seconds: f64,
}

/// Adds up rounds of any number of prompts, in any order.
pub fn tally(rounds: &[Round]) -> Tally {
    let mut by_prompt: BTreeMap<usize, (usize, usize)> = BTreeMap::new();
    let mut lookups: BTreeMap<Lookup, usize> = BTreeMap::new();
    for round in rounds {
        let (count, committed) = by_prompt.entry(round.prompt).or_default();
        *count += 1;
        *committed += round.committed;
        if let Some(lookup) = round.lookup {
            *lookups.entry(lookup).or_default() += 1;
        }
    }
    let hits = lookups.remove(&Lookup::Hit);
    lookups.remove(&Lookup::First);
    let chances = hits.unwrap_or(0) + lookups.values().sum::<usize>();
    let committed = rounds.iter().map(|round| round.committed).sum();
    let sum = |seconds: fn(&Round) -> f64| rounds.iter().map(|round| seconds(round) / round.lanes.max(1) as f64).sum();
    let tau_after = |wanted: fn(Lookup) -> bool| {
        let chosen = || rounds.iter().filter(move |round| round.lookup.is_some_and(wanted));
        let count = chosen().count();
        (count > 0).then(|| ratio(chosen().map(|round| round.committed).sum(), count))
    };
    Tally {
        rounds: rounds.len(),
        committed,
        tau_pooled: ratio(committed, rounds.len()),
        tau_macro: mean(by_prompt.values().map(|&(count, committed)| ratio(committed, count))),
        hit_rate: (chances > 0).then(|| ratio(hits.unwrap_or(0), chances)),
        acceptance_by_position: acceptance_by_position(rounds.iter().map(|round| (round.drafted, round.accepted))),
        accepted_histogram: accepted_histogram(rounds),
        misses: lookups,
        tau_after_hit: tau_after(|lookup| lookup == Lookup::Hit),
        tau_after_miss: tau_after(|lookup| !matches!(lookup, Lookup::Hit | Lookup::First)),
        draft_seconds: sum(|round| round.draft_seconds),
        pack_seconds: sum(|round| round.pack_seconds),
        verify_seconds: sum(|round| round.verify_seconds),
        wait_seconds: sum(|round| round.wait_seconds),
        bubble_seconds: sum(|round| round.bubble_seconds),
    }
}

/// For each position the share of rounds that kept its drafted token, among those that drafted one; rounds are given as
/// (drafted, accepted).
pub fn acceptance_by_position(rounds: impl Iterator<Item = (usize, usize)>) -> Vec<f64> {
    let mut counts: Vec<(usize, usize)> = Vec::new();
    for (drafted, accepted) in rounds {
        if counts.len() < drafted {
            counts.resize(drafted, (0, 0));
        }
        for (position, (proposed, kept)) in counts[..drafted].iter_mut().enumerate() {
            *proposed += 1;
            *kept += usize::from(position < accepted);
        }
    }
    counts.into_iter().map(|(proposed, kept)| ratio(kept, proposed)).collect()
}

fn accepted_histogram(rounds: &[Round]) -> Vec<usize> {
    let longest = rounds.iter().map(|round| round.drafted).max().unwrap_or(0);
    let mut histogram = vec![0; longest + 1];
    for round in rounds {
        histogram[round.accepted] += 1;
    }
    histogram
}

/// `part / whole`, and 0 of nothing.
pub fn ratio(part: usize, whole: usize) -> f64 {
    if whole == 0 { 0.0 } else { part as f64 / whole as f64 }
}

/// The mean, and 0 of nothing.
pub fn mean(values: impl Iterator<Item = f64>) -> f64 {
    let (sum, count) = values.fold((0.0, 0_usize), |(sum, count), value| (sum + value, count + 1));
    if count == 0 { 0.0 } else { sum / count as f64 }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::verification::commit;

    fn round(prompt: usize, drafted: usize, accepted: usize, committed: usize, lookup: Lookup) -> Round {
        Round { prompt, drafted, accepted, committed, lookup: Some(lookup), verify_seconds: 0.5, ..Round::default() }
    }

    #[test]
    fn both_taus_are_what_they_say() {
        let rounds = [
            round(0, 3, 3, 4, Lookup::First),
            round(1, 3, 0, 1, Lookup::First),
            round(1, 3, 1, 2, Lookup::Hit),
            round(1, 3, 2, 3, Lookup::WrongCandidate),
        ];
        let tally = tally(&rounds);
        assert_eq!((tally.rounds, tally.committed), (4, 10));
        assert_eq!(tally.tau_pooled, 2.5);
        assert_eq!(tally.tau_macro, (4.0 + 2.0) / 2.0);
        assert_eq!(tally.hit_rate, Some(0.5));
        assert_eq!(tally.misses, BTreeMap::from([(Lookup::WrongCandidate, 1)]));
        assert_eq!(tally.accepted_histogram, [1, 1, 1, 1]);
        assert_eq!(tally.acceptance_by_position, [0.75, 0.5, 0.25]);
        assert_eq!(tally.verify_seconds, 2.0);
        assert_eq!((tally.tau_after_hit, tally.tau_after_miss), (Some(2.0), Some(3.0)));
    }

    #[test]
    fn a_forward_that_texts_share_counts_once() {
        let shared = |prompt| Round { lanes: 2, ..round(prompt, 3, 1, 2, Lookup::Hit) };
        assert_eq!(tally(&[shared(0), shared(1)]).verify_seconds, 0.5);
    }

    #[test]
    fn the_hit_rate_is_absent_where_nothing_is_drafted_ahead() {
        assert_eq!(tally(&[Round { drafted: 2, committed: 1, ..Round::default() }]).hit_rate, None);
        assert_eq!(tally(&[round(0, 2, 1, 2, Lookup::First)]).hit_rate, None);
        assert_eq!(tally(&[]).tau_macro, 0.0);
    }

    #[test]
    fn shorter_drafts_count_only_where_they_propose() {
        assert_eq!(acceptance_by_position([(3, 3), (1, 1), (2, 0)].into_iter()), [2.0 / 3.0, 0.5, 1.0]);
    }

    #[test]
    fn what_is_drafted_behind_the_end_is_not_counted() {
        let counts = |draft: &[u32], accepted, next, stop: &[u32], room| {
            let verdict = Verdict { accepted, next };
            let round = Round::counted(draft.len(), &verdict, &commit(draft, &verdict, stop, room));
            (round.drafted, round.accepted, round.committed)
        };
        assert_eq!(counts(&[1, 2, 3], 1, 9, &[], 9), (3, 1, 2));
        assert_eq!(counts(&[1, 2, 3], 3, 9, &[], 9), (3, 3, 4));
        // A drafted stop token is the last one judged; a correction that stops was judged in its place.
        assert_eq!(counts(&[1, 2, 3], 3, 9, &[2], 9), (2, 2, 2));
        assert_eq!(counts(&[1, 2, 3], 1, 9, &[9], 9), (3, 1, 2));
        // The length limit inside the accepted part, and right behind it.
        assert_eq!(counts(&[1, 2, 3], 3, 9, &[], 3), (3, 3, 3));
        assert_eq!(counts(&[1, 2, 3], 2, 9, &[], 2), (2, 2, 2));
        assert_eq!(counts(&[1, 2, 3], 2, 9, &[], 3), (3, 2, 3));
    }
}
