//! From token ids to what a step trains on: which positions are supervised, which of them are anchors this epoch, in
//! which order responses come, and which are held out. All pure functions of their arguments: randomness comes from
//! counters, so results depend neither on the number of workers nor on what was drawn before.

use rand_chacha::ChaCha8Rng;
use rand_chacha::rand_core::{RngCore, SeedableRng};
use sha2::{Digest, Sha256};
use std::collections::HashSet;
use std::ops::Range;

/// Purposes keep the random streams of one seed apart: no two uses share a generator.
pub mod purpose {
    /// Anchors of a response; counters: epoch, response.
    pub const ANCHORS: u64 = 1;
    /// Order of the responses; counters: epoch, 0.
    pub const ORDER: u64 = 2;
    /// Tokens sampled from the target; counters: response, position.
    pub const SAMPLING: u64 = 3;
    /// Resampling in bootstrap intervals; counters are the caller's.
    pub const BOOTSTRAP: u64 = 4;
    /// Tokens drawn from the drafter; counters: response, position.
    pub const DRAFTING: u64 = 5;
    /// Whether a drawn draft is accepted, and the token put in its place if not; counters: response, position.
    pub const ACCEPTANCE: u64 = 6;
    /// The seed that a server is given for an answer; counters: the question's, 0.
    pub const SERVER_SEED: u64 = 7;
    /// How long to wait before asking a server again; counters: the question's or the server's, attempt.
    pub const RETRY_DELAY: u64 = 8;
}

/// A conversation as the drafter is trained on it: a prompt and the target's response, or several turns of them.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Example {
    /// Prompts and responses as they follow each other, `[tokens]`.
    pub ids: Vec<u32>,
    /// Where in `ids` the target's responses are, ascending and apart: these tokens are supervised. The last one ends the ids.
    pub responses: Vec<Range<usize>>,
}

impl Example {
    /// One response behind a prompt of this many ids.
    pub fn after_prompt(ids: Vec<u32>, prompt_length: usize) -> Example {
        let response = prompt_length..ids.len();
        Example { ids, responses: vec![response] }
    }

    /// Joins prompt and response and cuts them at `max_tokens`; `None` when fewer than two supervised tokens remain,
    /// which is too few for an anchor and a token after it.
    pub fn new(prompt_ids: &[u32], response_ids: &[u32], max_tokens: usize) -> Option<Example> {
        let length = (prompt_ids.len() + response_ids.len()).min(max_tokens);
        if length < prompt_ids.len() + 2 {
            return None;
        }
        let ids = prompt_ids.iter().chain(response_ids).take(length).copied().collect();
        Some(Example::after_prompt(ids, prompt_ids.len()))
    }

    /// Adds a later turn of the same conversation, cut at `max_tokens`. False, with nothing changed, unless the turn's prompt begins with
    /// exactly these ids: a template may leave earlier thinking out of what it shows the target later.
    pub fn extend(&mut self, prompt_ids: &[u32], response_ids: &[u32], max_tokens: usize) -> bool {
        if !prompt_ids.starts_with(&self.ids) {
            return false;
        }
        let Some(turn) = Example::new(prompt_ids, response_ids, max_tokens) else { return false };
        self.ids = turn.ids;
        self.responses.extend(turn.responses);
        true
    }

    /// Ids before the first response.
    pub fn prompt_length(&self) -> usize {
        self.responses.first().map_or(self.ids.len(), |first| first.start)
    }

    /// How many tokens are supervised.
    pub fn supervised(&self) -> usize {
        self.responses.iter().map(Range::len).sum()
    }

    /// The positions that can be anchors, ascending: supervised, and so is the next one.
    pub fn anchors(&self) -> impl Iterator<Item = usize> {
        self.responses.iter().flat_map(|response| response.start..response.end.saturating_sub(1))
    }

    /// The end of the response that holds this position; the position itself where none does.
    pub fn end_of_response(&self, position: usize) -> usize {
        self.responses.iter().find(|response| response.contains(&position)).map_or(position, |response| response.end)
    }

    /// Numbers that are the same for equal examples alone, for hashing: the responses' places, then the ids, each with their count.
    pub fn fingerprint(&self) -> impl Iterator<Item = u32> {
        let places = self.responses.iter().flat_map(|response| [response.start as u32, response.end as u32]);
        let counts = [self.responses.len() as u32, self.ids.len() as u32];
        counts.into_iter().chain(places).chain(self.ids.iter().copied())
    }
}

/// The turns of one conversation, each with its prompt and response, in as few examples as their ids allow. Turns that keep fewer than two
/// supervised tokens within `max_tokens` are left out.
pub fn join_turns<'t>(turns: impl IntoIterator<Item = (&'t [u32], &'t [u32])>, max_tokens: usize) -> Vec<Example> {
    let mut examples = Vec::<Example>::new();
    for (prompt_ids, response_ids) in turns {
        if !examples.last_mut().is_some_and(|example| example.extend(prompt_ids, response_ids, max_tokens)) {
            examples.extend(Example::new(prompt_ids, response_ids, max_tokens));
        }
    }
    examples
}

/// A generator that is a function of four numbers: its 32-byte key is the numbers, little-endian.
pub fn counter_generator(seed: u64, purpose: u64, a: u64, b: u64) -> ChaCha8Rng {
    let mut key = [0; 32];
    for (bytes, number) in key.chunks_exact_mut(8).zip([seed, purpose, a, b]) {
        bytes.copy_from_slice(&number.to_le_bytes());
    }
    ChaCha8Rng::from_seed(key)
}

/// A uniform number below `bound`, without the bias of a plain remainder.
///
/// # Panics
/// When `bound` is 0.
pub fn below(generator: &mut ChaCha8Rng, bound: u64) -> u64 {
    // Numbers at or above the largest multiple of the bound would favour small remainders.
    let unbiased = u64::MAX - u64::MAX % bound;
    loop {
        let number = generator.next_u64();
        if number < unbiased {
            return number % bound;
        }
    }
}

/// Draws up to `count` anchors of an example without replacement, ascending; all of them when there are fewer.
pub fn draw_anchors(example: &Example, count: usize, seed: u64, epoch: u64, response: u64) -> Vec<usize> {
    let mut generator = counter_generator(seed, purpose::ANCHORS, epoch, response);
    let mut anchors: Vec<usize> = example.anchors().collect();
    shuffle_front(&mut anchors, count, &mut generator);
    anchors.truncate(count);
    anchors.sort_unstable();
    anchors
}

/// The order in which an epoch goes through `count` responses.
pub fn epoch_order(count: usize, seed: u64, epoch: u64) -> Vec<usize> {
    let mut generator = counter_generator(seed, purpose::ORDER, epoch, 0);
    let mut order: Vec<usize> = (0..count).collect();
    shuffle_front(&mut order, count, &mut generator);
    order
}

/// Moves `count` items drawn without replacement to the front (Fisher and Yates, stopped early).
fn shuffle_front(items: &mut [usize], count: usize, generator: &mut ChaCha8Rng) {
    for index in 0..count.min(items.len()) {
        let rest = (items.len() - index) as u64;
        items.swap(index, index + below(generator, rest) as usize);
    }
}

/// Splits rows into (training, held out), as ascending indices.
///
/// Ids are ranked by a hash of the seed and themselves, and the rows of the lowest `ceil(fraction · ids)` are held out, so a row's rank
/// does not depend on the other rows nor on their order. Rows of one id are the turns of a conversation and on one side, for each holds the
/// ones before it. With two ids or more and a positive fraction each side gets at least one; a single one is for training.
pub fn split_holdout(ids: &[&str], fraction: f64, seed: u64) -> (Vec<usize>, Vec<usize>) {
    let mut ranked: Vec<&str> = ids.to_vec();
    ranked.sort_unstable();
    ranked.dedup();
    ranked.sort_by_cached_key(|id| Sha256::new_with_prefix(seed.to_le_bytes()).chain_update(id).finalize());
    ranked.truncate(holdout_count(ranked.len(), fraction));
    let held_out: HashSet<&str> = ranked.into_iter().collect();
    (0..ids.len()).partition(|&index| !held_out.contains(ids[index]))
}

/// The rank of a row towards a limit, which leaves those of the lowest ranks: so a row is in or out whatever the order of rows and files.
/// Which of them are held out is drawn anew.
pub fn limit_rank(id: &str, seed: u64) -> [u8; 32] {
    Sha256::new_with_prefix(b"limit").chain_update(seed.to_le_bytes()).chain_update(id).finalize().into()
}

/// The counter of a row by its id, for what is drawn for this row alone.
pub fn counter_of(id: &str) -> u64 {
    let mut first = [0; 8];
    first.copy_from_slice(&Sha256::digest(id)[..8]);
    u64::from_le_bytes(first)
}

fn holdout_count(rows: usize, fraction: f64) -> usize {
    if rows < 2 || fraction.is_nan() || fraction <= 0.0 {
        return 0;
    }
    // 0.07 × 100 is 7.000000000000001 in floating point and means 7.
    let asked = (fraction * rows as f64 - 1e-9).ceil() as usize;
    asked.clamp(1, rows - 1)
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]
    use super::*;

    fn example(prompt: usize, response: usize) -> Example {
        Example::new(&vec![7; prompt], &vec![8; response], usize::MAX).unwrap()
    }

    #[test]
    fn examples_are_cut_and_short_ones_refused() {
        let cut = Example::new(&[1, 2, 3], &[4, 5, 6, 7], 6).unwrap();
        assert_eq!((cut.ids.as_slice(), cut.prompt_length()), ([1, 2, 3, 4, 5, 6].as_slice(), 3));
        assert_eq!((cut.supervised(), cut.anchors().collect::<Vec<_>>()), (3, vec![3, 4]));
        assert!(Example::new(&[1, 2, 3], &[4, 5, 6, 7], 5).is_some());
        assert!(Example::new(&[1, 2, 3], &[4, 5, 6, 7], 4).is_none());
        assert!(Example::new(&[1, 2, 3], &[4], 100).is_none());
        assert!(Example::new(&[1, 2, 3], &[4, 5], 2).is_none());
    }

    /// Turns of a conversation whose template repeats what came before, then one that does not.
    fn turns() -> [(&'static [u32], &'static [u32]); 4] {
        [
            (&[1, 2], &[50, 51, 9]),
            (&[1, 2, 50, 51, 9, 3, 4], &[60, 61, 62, 9]),
            (&[1, 2, 50, 51, 9, 3, 4, 60, 61, 62, 9, 5], &[70, 9]),
            (&[1, 2, 51, 9, 3, 4, 5, 6], &[80, 81, 9]),
        ]
    }

    #[test]
    fn turns_that_repeat_what_came_before_share_one_example() {
        let joined = join_turns(turns(), usize::MAX);
        assert_eq!(joined.len(), 2);
        assert_eq!(joined[0].ids, [1, 2, 50, 51, 9, 3, 4, 60, 61, 62, 9, 5, 70, 9]);
        assert_eq!(joined[0].responses, [2..5, 7..11, 12..14]);
        assert_eq!(joined[0].anchors().collect::<Vec<_>>(), [2, 3, 7, 8, 9, 12]);
        assert_eq!((joined[0].end_of_response(3), joined[0].end_of_response(7), joined[0].end_of_response(5)), (5, 11, 5));
        assert_eq!((joined[1].prompt_length(), joined[1].supervised()), (8, 3));
    }

    #[test]
    fn joined_turns_supervise_what_the_turns_alone_do() {
        for max_tokens in 0..20 {
            // (ids before, supervised id) of every supervised position.
            let supervised = |examples: &[Example]| {
                let all = examples.iter().flat_map(|example| {
                    example.responses.iter().cloned().flatten().map(|position| example.ids[..=position].to_vec())
                });
                all.collect::<Vec<_>>()
            };
            let joined = join_turns(turns(), max_tokens);
            let alone: Vec<Example> =
                turns().iter().filter_map(|(prompt, response)| Example::new(prompt, response, max_tokens)).collect();
            assert_eq!(supervised(&joined), supervised(&alone), "{max_tokens}");
            assert!(joined.iter().all(|example| example.responses.last().is_some_and(|last| last.end == example.ids.len())));
        }
    }

    #[test]
    fn anchors_are_distinct_ascending_in_range_and_fewer_when_there_are_fewer() {
        let example = example(5, 40);
        for response in 0..50 {
            let anchors = draw_anchors(&example, 16, 1, 0, response);
            assert_eq!(anchors.len(), 16);
            assert!(anchors.windows(2).all(|pair| pair[0] < pair[1]));
            assert!(anchors.iter().all(|anchor| example.anchors().any(|possible| possible == *anchor)));
        }
        assert_eq!(draw_anchors(&example, 100, 1, 0, 0), (5..44).collect::<Vec<_>>());
        assert!(draw_anchors(&example, 0, 1, 0, 0).is_empty());
    }

    #[test]
    fn anchors_depend_on_seed_epoch_and_response_alone() {
        let example = example(5, 200);
        let drawn = draw_anchors(&example, 16, 1, 2, 3);
        assert_eq!(drawn, draw_anchors(&example, 16, 1, 2, 3));
        for (seed, epoch, response) in [(2, 2, 3), (1, 3, 3), (1, 2, 4), (1, 3, 2)] {
            assert_ne!(drawn, draw_anchors(&example, 16, seed, epoch, response));
        }
    }

    #[test]
    fn every_anchor_is_drawn_about_equally_often() {
        let example = example(2, 11);
        let mut counts = [0_u32; 12];
        for response in 0..5000 {
            for anchor in draw_anchors(&example, 3, 9, 0, response) {
                counts[anchor] += 1;
            }
        }
        // Ten anchors, three a draw: 1500 each, with a standard deviation of about 32.
        assert_eq!(counts[..2], [0, 0]);
        assert!(counts[2..].iter().all(|&count| count.abs_diff(1500) < 160), "{counts:?}");
    }

    #[test]
    fn an_epochs_order_is_a_permutation_of_its_own() {
        let order = epoch_order(100, 1, 0);
        let mut sorted = order.clone();
        sorted.sort_unstable();
        assert_eq!(sorted, (0..100).collect::<Vec<_>>());
        assert_ne!(order, sorted);
        assert_eq!(order, epoch_order(100, 1, 0));
        assert_ne!(order, epoch_order(100, 1, 1));
        assert!(epoch_order(0, 1, 0).is_empty());
    }

    #[test]
    fn the_counter_is_the_key() {
        let mut purposes = [purpose::ANCHORS, purpose::ORDER, purpose::SAMPLING, purpose::BOOTSTRAP]
            .map(|purpose| counter_generator(1, purpose, 0, 0).next_u64());
        purposes.sort_unstable();
        assert!(purposes.windows(2).all(|pair| pair[0] != pair[1]));
        assert_eq!(counter_generator(1, 2, 3, 4).get_seed()[8..16], 2_u64.to_le_bytes());
    }

    #[test]
    fn a_rows_side_does_not_depend_on_the_order_of_rows() {
        let ids: Vec<String> = (0..50).map(|index| format!("row-{index}")).collect();
        let forward: Vec<&str> = ids.iter().map(String::as_str).collect();
        let backward: Vec<&str> = forward.iter().rev().copied().collect();
        let held = |ids: &[&str], seed| {
            let (training, held) = split_holdout(ids, 0.2, seed);
            assert_eq!((training.len(), held.len()), (40, 10));
            assert!(training.iter().all(|index| !held.contains(index)));
            let mut held: Vec<String> = held.iter().map(|&index| ids[index].to_owned()).collect();
            held.sort();
            held
        };
        assert_eq!(held(&forward, 1), held(&backward, 1));
        assert_ne!(held(&forward, 1), held(&forward, 2));
        // A row that joins pushes at most itself in.
        let (_, grown) = split_holdout(&[forward.as_slice(), &["new"]].concat(), 10.0 / 51.0, 1);
        let before = held(&forward, 1);
        let stayed = grown.iter().filter(|&&index| index < 50 && before.contains(&ids[index])).count();
        assert!(stayed >= 9);
    }

    #[test]
    fn the_turns_of_a_conversation_are_on_one_side() {
        let ids = ["a", "a", "b", "c", "c", "c", "d"];
        for seed in 0..20 {
            let (training, held) = split_holdout(&ids, 0.5, seed);
            let of = |side: &[usize]| side.iter().map(|&index| ids[index]).collect::<HashSet<_>>();
            assert_eq!((of(&training).len(), of(&held).len(), training.len() + held.len()), (2, 2, 7), "{training:?} {held:?}");
        }
    }

    #[test]
    fn ranks_and_counters_are_an_ids_own() {
        let mut by_limit: Vec<String> = (0..20).map(|index| format!("row-{index}")).collect();
        by_limit.sort_by_key(|id| limit_rank(id, 1));
        let within: Vec<&str> = by_limit.iter().map(String::as_str).collect();
        // Which of the rows within the limit are held out does not hang on the limit's own ranking.
        assert_ne!(split_holdout(&within, 0.5, 1).1, (0..10).collect::<Vec<_>>());
        assert_ne!(limit_rank("a", 1), limit_rank("a", 2));
        assert_ne!(counter_of("a"), counter_of("b"));
        assert_eq!(counter_of("a"), counter_of("a"));
    }

    #[test]
    fn holdout_counts() {
        let cases = [(0, 0.5, 0), (1, 0.5, 0), (2, 0.01, 1), (2, 1.0, 1), (10, 0.0, 0), (100, 0.07, 7), (100, 0.071, 8)];
        for (rows, fraction, expected) in cases {
            assert_eq!(holdout_count(rows, fraction), expected, "{rows} rows, {fraction}");
        }
    }
}
