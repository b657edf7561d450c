//! Exact τ and hit rates from stored greedy responses, without running the target: what it would have answered is already known.

use data::supervision::{Example, counter_generator, purpose};

use crate::bootstrap::ratio_interval;
use crate::decode::DecodeError;
use crate::drafter::{Block, Drafter, LaneWork};
use crate::fan_out::{Continuation, FanOut};
use crate::rounds::{acceptance_by_position, mean, ratio};
use crate::verification::Verdict;
use crate::walking::{Walk, judge, walk};

/// What replaying a set of responses gives.
#[derive(Debug, Clone, PartialEq)]
pub struct Replay {
    pub rounds: usize,
    /// Tokens committed by rounds; the first token of a response belongs to none.
    pub committed: usize,
    /// Committed tokens over rounds, of the whole set.
    pub tau_pooled: f64,
    /// Mean over the responses of their own committed tokens over rounds; a response of one token has none.
    pub tau_macro: f64,
    /// Share of rounds in which the drafted token at this position was kept, among those that proposed one there.
    pub acceptance_by_position: Vec<f64>,
    /// 95 % interval of the pooled τ: bootstrap over responses.
    pub tau_interval: (f64, f64),
    /// Rounds and committed tokens of each response, in the order given.
    pub per_response: Vec<(usize, usize)>,
    /// Drafted and accepted tokens of each round, in no particular order.
    pub judged: Vec<(usize, usize)>,
}

impl Replay {
    /// The figures of what was counted; the parts of several replays may simply be put together.
    pub fn new(per_response: Vec<(usize, usize)>, judged: Vec<(usize, usize)>) -> Self {
        let pooled = |responses: &mut dyn Iterator<Item = (usize, usize)>| {
            let (rounds, committed) = responses.fold((0, 0), |sum, each| (sum.0 + each.0, sum.1 + each.1));
            (rounds, committed, ratio(committed, rounds))
        };
        let (rounds, committed, tau_pooled) = pooled(&mut per_response.iter().copied());
        let of_picked = |picked: &[usize]| pooled(&mut picked.iter().map(|&index| per_response[index])).2;
        Self {
            rounds,
            committed,
            tau_pooled,
            tau_macro: mean(per_response.iter().filter(|each| each.0 > 0).map(|&(rounds, committed)| ratio(committed, rounds))),
            acceptance_by_position: acceptance_by_position(judged.iter().copied()),
            tau_interval: ratio_interval(per_response.len(), counter_generator(0, purpose::BOOTSTRAP, 0, 0), of_picked),
            per_response,
            judged,
        }
    }
}

/// Replays `examples`, up to `responses_per_batch` of them at a time, and counts exactly as decoding would: a draft is judged up to
/// the end of its response.
///
/// # Errors
/// A drafter that cannot draft, and what libtorch refuses, such as a token outside the drafter's vocabulary.
pub fn replay(drafter: &Drafter, examples: &[Example], responses_per_batch: usize) -> Result<Replay, DecodeError> {
    let mut per_response = vec![(0, 0); examples.len()];
    let mut judged = Vec::new();
    let all = Walk { lanes: responses_per_batch, blocks: 1, most_rounds: usize::MAX };
    walk(drafter, examples, &all, &mut |cache, work, places| {
        let drafts = drafter.draft(cache, work, 1)?;
        let of_round = places.iter().zip(drafts).map(|(place, draft)| {
            let (drafted, accepted, committed) = judge(&draft.tokens, place.rest);
            judged.push((drafted, accepted));
            let (rounds, tokens) = &mut per_response[place.example];
            *rounds += 1;
            *tokens += committed;
            committed
        });
        Ok(of_round.collect())
    })?;
    Ok(Replay::new(per_response, judged))
}

/// How often an outcome had a continuation ready.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct HitRate {
    pub hits: usize,
    /// Rounds whose outcome a continuation could have been ready for: all but the last of each response.
    pub rounds: usize,
}

impl HitRate {
    /// Hits over rounds, and 0 of none.
    pub fn share(self) -> f64 {
        ratio(self.hits, self.rounds)
    }
}

/// The hit rate of each of these fan-outs on known responses, without running a pack: all of them are asked about the same rounds, those of
/// lockstep decoding, until there were `most_rounds`.
///
/// With labels `next` these are the rounds of asynchronous decoding as well, so the counts are exactly its own. With `in_place` they are
/// until the first hit at full acceptance, after which asynchronous decoding goes on with a draft that is one token shorter; whether that
/// continuation's own first prediction is right is looked up in a block drafted beside the next round.
///
/// # Errors
/// As [`replay`].
pub fn hit_rates(
    drafter: &Drafter,
    examples: &[Example],
    fan_outs: &[FanOut],
    most_rounds: usize,
) -> Result<Vec<HitRate>, DecodeError> {
    let ranked = fan_outs.iter().map(FanOut::ranked).max().unwrap_or(1);
    let mut rates = vec![HitRate::default(); fan_outs.len()];
    // For each response what its last round found where that hangs on a continuation's own first prediction.
    let mut open: Vec<Option<Vec<Ready>>> = vec![None; examples.len()];
    let beside = Walk { lanes: (MOST_LOGIT_ROWS / (2 * drafter.block_size).max(1)).max(1), blocks: 2, most_rounds };
    walk(drafter, examples, &beside, &mut |cache, work, places| {
        let blocks: Vec<Vec<Block>> = work
            .iter()
            .zip(places)
            .map(|(lane, place)| {
                // The last clean token is the last one drafted.
                let guess = open[place.example]
                    .as_ref()
                    .and(lane.clean.last())
                    .map(|&anchor| Block { anchor, context: lane.clean.len() - 1 });
                lane.blocks.iter().copied().chain(guess).collect()
            })
            .collect();
        let work: Vec<LaneWork<'_>> = work.iter().zip(&blocks).map(|(lane, blocks)| LaneWork { blocks, ..*lane }).collect();
        let mut drafts = drafter.draft(cache, &work, ranked)?.into_iter();
        let mut committed = Vec::with_capacity(places.len());
        for ((place, blocks), lane) in places.iter().zip(&blocks).zip(&work) {
            let draft = drafts.next().unwrap_or_default();
            if let (Some(ready), Some(guess)) = (open[place.example].take(), drafts.by_ref().take(blocks.len() - 1).last()) {
                let right = guess.tokens.first() == Some(&lane.blocks[0].anchor);
                count(&mut rates, ready.into_iter().map(|ready| ready == Ready::Yes || ready == Ready::IfItGuesses && right));
            }
            let (_, accepted, tokens) = judge(&draft.tokens, place.rest);
            committed.push(tokens);
            // The end of a text has no round after it that could find anything ready.
            if tokens == place.rest.len() {
                continue;
            }
            let outcome = Verdict { accepted, next: place.rest[accepted] };
            let ready: Vec<Ready> =
                fan_outs.iter().map(|it| is_ready(&it.continuations(&draft, drafter.block_size), &outcome)).collect();
            if ready.contains(&Ready::IfItGuesses) {
                open[place.example] = Some(ready);
            } else {
                count(&mut rates, ready.into_iter().map(|ready| ready == Ready::Yes));
            }
        }
        Ok(committed)
    })?;
    Ok(rates)
}

/// The most rows of logits that a forward of a measurement gives.
pub(crate) const MOST_LOGIT_ROWS: usize = 384;

fn count(rates: &mut [HitRate], hits: impl Iterator<Item = bool>) {
    for (rate, hit) in rates.iter_mut().zip(hits) {
        rate.rounds += 1;
        rate.hits += usize::from(hit);
    }
}

/// Whether there is a continuation for an outcome.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Ready {
    Yes,
    No,
    /// There is one anchored at the last drafted token, of use if its first prediction is the outcome's token.
    IfItGuesses,
}

fn is_ready(continuations: &[Continuation], outcome: &Verdict) -> Ready {
    let of_outcome = || continuations.iter().filter(|it| it.accepted == outcome.accepted);
    if of_outcome().any(|it| !it.guesses_outcome_itself() && it.anchor == outcome.next) {
        Ready::Yes
    } else if of_outcome().any(Continuation::guesses_outcome_itself) {
        Ready::IfItGuesses
    } else {
        Ready::No
    }
}
