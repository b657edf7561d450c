//! Exact τ from stored greedy responses, without running the target: what it would have answered is already known.
//!
//! Each response is walked as lockstep decoding would have walked it, many at a time: a forward takes in what the last round of
//! each lane committed and drafts its next block. A lane whose response is finished starts the next one at once.

use data::supervision::{Example, counter_generator, purpose};

use crate::bootstrap::interval;
use crate::decode::DecodeError;
use crate::drafter::{Block, Drafter, LaneWork};
use crate::rounds::{acceptance_by_position, mean, ratio};
use crate::verification::verify;

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
            tau_interval: interval(per_response.len(), counter_generator(0, purpose::BOOTSTRAP, 0, 0), of_picked),
            per_response,
            judged,
        }
    }
}

/// A response on its way through the rounds.
struct Walk {
    example: usize,
    /// Position of the anchor; tokens before it that the cache does not hold yet are taken in by the next forward.
    anchor: usize,
}

/// Replays `examples`, up to `responses_per_batch` of them at a time, and counts exactly as decoding would: a draft is judged up to
/// the end of its response.
///
/// # Errors
/// A drafter that cannot draft, and what libtorch refuses, such as a token outside the drafter's vocabulary.
pub fn replay(drafter: &Drafter, examples: &[Example], responses_per_batch: usize) -> Result<Replay, DecodeError> {
    if drafter.block_size < 2 {
        return Err(DecodeError::BlockSize(drafter.block_size));
    }
    let _no_grad = tch::no_grad_guard();
    let lanes = responses_per_batch.clamp(1, examples.len().max(1));
    let longest = examples.iter().map(|example| example.ids.len()).max().unwrap_or(0);
    let mut cache = drafter.new_cache(lanes, longest, drafter.block_size);
    // The first token of a response is the first anchor, so a response of one token has no round.
    let mut waiting = (0..examples.len()).filter(|&index| examples[index].ids.len() > examples[index].prompt_length + 1);
    let mut walks: Vec<Option<Walk>> = (0..lanes).map(|_| None).collect();
    let mut per_response = vec![(0, 0); examples.len()];
    let mut judged = Vec::new();
    loop {
        for (lane, walk) in walks.iter_mut().enumerate().filter(|(_, walk)| walk.is_none()) {
            *walk = waiting.next().map(|example| Walk { example, anchor: examples[example].prompt_length });
            cache.set_length(lane, 0);
        }
        let blocks: Vec<(usize, Block)> = walks
            .iter()
            .enumerate()
            .filter_map(|(lane, walk)| {
                let walk = walk.as_ref()?;
                let block = Block { anchor: examples[walk.example].ids[walk.anchor], context: walk.anchor - cache.length(lane) };
                Some((lane, block))
            })
            .collect();
        if blocks.is_empty() {
            break;
        }
        let work: Vec<LaneWork<'_>> = blocks
            .iter()
            .filter_map(|(lane, block)| {
                let walk = walks[*lane].as_ref()?;
                let clean = &examples[walk.example].ids[cache.length(*lane)..walk.anchor];
                Some(LaneWork { lane: *lane, clean, blocks: std::slice::from_ref(block) })
            })
            .collect();
        let drafts = drafter.draft(&mut cache, &work, 1)?;
        for ((lane, _), draft) in blocks.iter().zip(drafts) {
            let Some(walk) = &mut walks[*lane] else { continue };
            let rest = &examples[walk.example].ids[walk.anchor + 1..];
            let (drafted, accepted, committed) = judge(&draft.tokens, rest);
            judged.push((drafted, accepted));
            let (rounds, tokens) = &mut per_response[walk.example];
            *rounds += 1;
            *tokens += committed;
            walk.anchor += committed;
            if committed == rest.len() {
                walks[*lane] = None;
            }
        }
    }
    Ok(Replay::new(per_response, judged))
}

/// What a round does with a draft when the response goes on with `rest`: (drafted tokens judged, accepted, committed).
fn judge(draft: &[u32], rest: &[u32]) -> (usize, usize, usize) {
    let known = draft.len().min(rest.len() - 1);
    let accepted = verify(&draft[..known], &rest[..=known]).accepted;
    // The last token of a response has no successor; when the draft has it right, the text ends inside the draft.
    if accepted == known && known < draft.len() && draft[known] == rest[known] {
        (known + 1, known + 1, known + 1)
    } else {
        (draft.len(), accepted, accepted + 1)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_draft_is_judged_up_to_the_end_of_the_response() {
        assert_eq!(judge(&[1, 2, 3], &[1, 2, 3, 4, 5]), (3, 3, 4));
        assert_eq!(judge(&[1, 2, 3], &[1, 9, 3, 4, 5]), (3, 1, 2));
        assert_eq!(judge(&[1, 2, 3], &[1, 2, 3]), (3, 3, 3));
        assert_eq!(judge(&[1, 2, 3], &[1, 2]), (2, 2, 2));
        assert_eq!(judge(&[1, 2, 3], &[1, 9]), (3, 1, 2));
        assert_eq!(judge(&[1, 2, 3], &[9]), (3, 0, 1));
        assert_eq!(judge(&[1, 2, 3], &[1]), (1, 1, 1));
    }
}
