//! Known responses walked round by round as lockstep decoding would have walked them, many at a time.
//!
//! What the target would have answered is in the response, so no target runs. A forward takes in what the last round of each lane
//! committed and drafts its next block. A lane whose response is finished starts the next one at once.

use data::supervision::Example;
use model::KvCache;

use crate::decode::DecodeError;
use crate::drafter::{Block, Drafter, LaneWork};
use crate::verification::verify;

/// A response in a lane, before one of its rounds.
pub(crate) struct Place<'e> {
    /// Index of the response.
    pub(crate) example: usize,
    /// Its tokens behind the round's anchor; at least one.
    pub(crate) rest: &'e [u32],
}

/// How a walk goes.
pub(crate) struct Walk {
    /// Responses walked side by side.
    pub(crate) lanes: usize,
    /// Blocks that a round's forward drafts in each lane, at most.
    pub(crate) blocks: usize,
    /// No forward begins once there were so many rounds.
    pub(crate) most_rounds: usize,
}

/// Carries out one round of each of these responses, given a forward's work of one block for each: gives how many tokens each commits.
pub(crate) type OnRounds<'a> = dyn FnMut(&mut KvCache, &[LaneWork<'_>], &[Place<'_>]) -> Result<Vec<usize>, DecodeError> + 'a;

/// A response on its way through the rounds.
struct Walker {
    example: usize,
    /// Position of the anchor; tokens before it that the cache does not hold yet are taken in by the next forward.
    anchor: usize,
}

/// Walks all `examples`, each of one response. The first token of a response is its first anchor, so a response of one token has no round.
///
/// # Errors
/// A drafter that cannot draft, and what `on_rounds` gives.
pub(crate) fn walk(
    drafter: &Drafter,
    examples: &[Example],
    walk: &Walk,
    on_rounds: &mut OnRounds<'_>,
) -> Result<(), DecodeError> {
    if drafter.block_size < 2 {
        return Err(DecodeError::BlockSize(drafter.block_size));
    }
    let _no_grad = tch::no_grad_guard();
    let lanes = walk.lanes.clamp(1, examples.len().max(1));
    let longest = examples.iter().map(|example| example.ids.len()).max().unwrap_or(0);
    let mut cache = drafter.new_cache(lanes, longest, walk.blocks * drafter.block_size);
    let mut waiting = (0..examples.len()).filter(|&index| examples[index].ids.len() > examples[index].prompt_length() + 1);
    let mut walkers: Vec<Option<Walker>> = (0..lanes).map(|_| None).collect();
    let mut rounds = 0;
    while rounds < walk.most_rounds {
        for (lane, walker) in walkers.iter_mut().enumerate().filter(|(_, walker)| walker.is_none()) {
            *walker = waiting.next().map(|example| Walker { example, anchor: examples[example].prompt_length() });
            cache.set_length(lane, 0);
        }
        let mut running: Vec<(usize, &mut Option<Walker>)> = walkers.iter_mut().enumerate().collect();
        running.retain(|(_, walker)| walker.is_some());
        let (mut places, mut blocks) = (Vec::with_capacity(running.len()), Vec::with_capacity(running.len()));
        for (lane, walker) in &running {
            let Some(Walker { example, anchor }) = walker else { continue };
            let ids = &examples[*example].ids;
            places.push(Place { example: *example, rest: &ids[anchor + 1..] });
            blocks.push((
                &ids[cache.length(*lane)..*anchor],
                Block { anchor: ids[*anchor], context: anchor - cache.length(*lane) },
            ));
        }
        if places.is_empty() {
            break;
        }
        rounds += places.len();
        let work: Vec<LaneWork<'_>> = running
            .iter()
            .zip(&blocks)
            .map(|((lane, _), (clean, block))| LaneWork { lane: *lane, clean, blocks: std::slice::from_ref(block) })
            .collect();
        let committed = on_rounds(&mut cache, &work, &places)?;
        for (((lane, slot), place), committed) in running.into_iter().zip(&places).zip(committed) {
            let Some(walker) = slot else { continue };
            cache.set_length(lane, walker.anchor);
            walker.anchor += committed;
            if committed >= place.rest.len() {
                *slot = None;
            }
        }
    }
    Ok(())
}

/// What a round does with a draft when the response goes on with `rest`: (drafted tokens judged, accepted, committed). A draft is judged
/// up to the end of its response.
pub(crate) fn judge(draft: &[u32], rest: &[u32]) -> (usize, usize, usize) {
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
