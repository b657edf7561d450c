//! Which responses a step trains on, and how they are shared out over ranks and forwards.
//!
//! Everything here is a function of the seed and the position in the data, so every rank knows the whole step: what its losses are
//! divided by needs no exchange, and the loss does not depend on how the step was split. Rows are never padded; "length-aware" means that
//! ranks get about the same number of rows, and forwards are filled up to a limit.

use data::supervision::{Example, draw_anchors, epoch_order};
use rayon::prelude::*;

use crate::batch::{Batch, BlockShape, Denominators};

/// How much a step trains on.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum BatchSize {
    Responses(usize),
    /// As many responses as it takes to reach this many clean tokens.
    Tokens(usize),
}

/// What decides the batches of a run.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Packing {
    pub seed: u64,
    pub size: BatchSize,
    /// Blocks drawn from each response.
    pub anchors: usize,
    pub shape: BlockShape,
    /// Decay of the position weights.
    pub gamma: f64,
    /// The most rows of one forward; a response with more has one of its own.
    pub forward_rows: usize,
}

/// One step as one rank sees it.
#[derive(Debug, Clone, Default)]
pub struct StepBatches {
    /// The responses of all ranks, as indices of the examples.
    pub responses: Vec<usize>,
    /// This rank's forwards. Every rank has as many, so that all take part in every exchange; some may be empty.
    pub forwards: Vec<Batch>,
    /// Of all ranks.
    pub denominators: Denominators,
    /// Clean tokens of all ranks.
    pub clean_tokens: usize,
    /// Where the next step goes on in the data: responses seen since the start, over all epochs.
    pub next_position: u64,
}

/// The batches of the step that begins at `position` in the data, for `rank` of `world`.
///
/// # Panics
/// Without any example.
pub fn step_batches(examples: &[Example], packing: &Packing, position: u64, rank: usize, world: usize) -> StepBatches {
    let drawn = draw(examples, packing, position);
    let rows: Vec<usize> =
        drawn.iter().map(|(index, anchors)| examples[*index].ids.len() + anchors.len() * packing.shape.block_size).collect();
    let shared = share(&rows, world, packing.forward_rows);
    let count = shared.iter().map(Vec::len).max().unwrap_or(0);
    let mut forwards: Vec<Batch> = shared[rank]
        .par_iter()
        .map(|forward| {
            let responses: Vec<(&Example, Vec<usize>)> =
                forward.iter().map(|&item| (&examples[drawn[item].0], drawn[item].1.clone())).collect();
            Batch::pack(&responses, packing.shape, packing.gamma)
        })
        .collect();
    forwards.resize(count, Batch::default());
    let mut denominators = Denominators::default();
    for (index, anchors) in &drawn {
        denominators.add(&examples[*index], anchors, packing.shape, packing.gamma);
    }
    StepBatches {
        clean_tokens: drawn.iter().map(|(index, _)| examples[*index].ids.len()).sum(),
        next_position: position + drawn.len() as u64,
        responses: drawn.into_iter().map(|(index, _)| index).collect(),
        forwards,
        denominators,
    }
}

/// The responses of a step with their anchors, in the order of the epochs.
fn draw(examples: &[Example], packing: &Packing, position: u64) -> Vec<(usize, Vec<usize>)> {
    let count = examples.len() as u64;
    let mut order = (u64::MAX, Vec::new());
    let (mut drawn, mut tokens) = (Vec::new(), 0);
    let is_full = |responses: usize, tokens: usize| match packing.size {
        BatchSize::Responses(wanted) => responses >= wanted,
        BatchSize::Tokens(wanted) => responses > 0 && tokens >= wanted,
    };
    while !is_full(drawn.len(), tokens) {
        let at = position + drawn.len() as u64;
        let epoch = at / count;
        if order.0 != epoch {
            order = (epoch, epoch_order(examples.len(), packing.seed, epoch));
        }
        let index = order.1[(at % count) as usize];
        let anchors = draw_anchors(&examples[index], packing.anchors, packing.seed, epoch, index as u64);
        tokens += examples[index].ids.len();
        drawn.push((index, anchors));
    }
    drawn
}

/// Shares items of these sizes out: rank → forward → items.
///
/// The largest go first, each to the rank with the fewest rows so far, then into the rank's first forward with room: both are the usual
/// greedy rules, within a third of the best possible.
fn share(rows: &[usize], world: usize, forward_rows: usize) -> Vec<Vec<Vec<usize>>> {
    let mut largest_first: Vec<usize> = (0..rows.len()).collect();
    largest_first.sort_by_key(|&item| std::cmp::Reverse(rows[item]));
    let mut loads = vec![0; world];
    let mut ranks: Vec<Vec<(usize, Vec<usize>)>> = vec![Vec::new(); world];
    for item in largest_first {
        let rank = (0..world).min_by_key(|&rank| loads[rank]).unwrap_or(0);
        loads[rank] += rows[item];
        match ranks[rank].iter_mut().find(|(filled, _)| filled + rows[item] <= forward_rows) {
            Some((filled, items)) => {
                *filled += rows[item];
                items.push(item);
            }
            None => ranks[rank].push((rows[item], vec![item])),
        }
    }
    let in_order = |(_, mut items): (usize, Vec<usize>)| {
        items.sort_unstable();
        items
    };
    ranks.into_iter().map(|forwards| forwards.into_iter().map(in_order).collect()).collect()
}

#[cfg(test)]
mod tests {
    use super::*;
    use configs::Labels;

    fn examples(lengths: &[usize]) -> Vec<Example> {
        lengths.iter().map(|&length| Example::after_prompt((0..length as u32).collect(), 2)).collect()
    }

    fn packing(size: BatchSize) -> Packing {
        let shape = BlockShape { block_size: 4, mask_token: 99, labels: Labels::Next, anchor_sees_block: true };
        Packing { seed: 7, size, anchors: 3, shape, gamma: 3.0, forward_rows: 40 }
    }

    #[test]
    fn every_item_is_in_exactly_one_forward_within_the_limit_and_ranks_are_balanced() {
        let rows = [30, 5, 12, 12, 9, 41, 3, 8, 8, 20, 1];
        for world in 1..5 {
            let shared = share(&rows, world, 40);
            let mut items: Vec<usize> = shared.iter().flatten().flatten().copied().collect();
            items.sort_unstable();
            assert_eq!(items, (0..rows.len()).collect::<Vec<_>>());
            let of = |forward: &Vec<usize>| forward.iter().map(|&item| rows[item]).sum::<usize>();
            for forward in shared.iter().flatten() {
                assert!(of(forward) <= 40 || forward.len() == 1, "{forward:?}");
            }
            let loads: Vec<usize> = shared.iter().map(|rank| rank.iter().map(of).sum()).collect();
            let largest = loads.iter().max().copied().unwrap_or(0);
            assert!(largest <= rows.iter().sum::<usize>() / world + 41, "{loads:?}");
        }
        assert_eq!(share(&[10], 3, 40).iter().map(Vec::len).collect::<Vec<_>>(), [1, 0, 0]);
    }

    #[test]
    fn a_step_is_the_same_however_many_ranks_share_it() {
        let examples = examples(&[9, 30, 12, 5, 17, 8, 22]);
        let alone = step_batches(&examples, &packing(BatchSize::Responses(5)), 10, 0, 1);
        assert_eq!((alone.responses.len(), alone.next_position), (5, 15));
        let rows = |batches: &[StepBatches]| {
            let mut rows: Vec<(u32, usize)> = Vec::new();
            for forward in batches.iter().flat_map(|batches| &batches.forwards) {
                rows.extend(forward.ids.iter().copied().zip(forward.positions.iter().copied()));
            }
            rows.sort_unstable();
            rows
        };
        for world in [2, 3, 8] {
            let ranks: Vec<StepBatches> =
                (0..world).map(|rank| step_batches(&examples, &packing(BatchSize::Responses(5)), 10, rank, world)).collect();
            assert_eq!(rows(&ranks), rows(std::slice::from_ref(&alone)));
            for rank in &ranks {
                assert_eq!((&rank.responses, rank.denominators), (&alone.responses, alone.denominators));
                assert_eq!(rank.forwards.len(), ranks[0].forwards.len());
            }
        }
        let forwards = &alone.forwards;
        let weights: f64 = forwards.iter().flat_map(|batch| &batch.diffusion).map(|row| row.weight).sum();
        assert!((weights - alone.denominators.diffusion).abs() < 1e-12);
        assert_eq!(forwards.iter().map(|batch| batch.autoregressive.len()).sum::<usize>(), alone.denominators.clean);
        assert_eq!(
            forwards.iter().flat_map(|batch| &batch.sequences).map(|it| it.anchors.len()).sum::<usize>(),
            alone.denominators.blocks
        );
    }

    #[test]
    fn steps_by_tokens_follow_each_other_through_the_epochs_without_a_gap() {
        let examples = examples(&[9, 30, 12, 5, 17, 8, 22]);
        let (mut position, mut seen) = (0, Vec::new());
        while position < 14 {
            let step = step_batches(&examples, &packing(BatchSize::Tokens(35)), position, 0, 1);
            let tokens: Vec<usize> = step.responses.iter().map(|&index| examples[index].ids.len()).collect();
            assert!(step.clean_tokens >= 35 && step.clean_tokens - tokens[tokens.len() - 1] < 35);
            assert_eq!(step.next_position, position + step.responses.len() as u64);
            position = step.next_position;
            seen.extend(step.responses);
        }
        for epoch in seen.chunks_exact(7) {
            let mut epoch = epoch.to_vec();
            epoch.sort_unstable();
            assert_eq!(epoch, [0, 1, 2, 3, 4, 5, 6]);
        }
    }

    #[test]
    fn a_response_larger_than_the_limit_of_tokens_is_a_step_of_its_own() {
        let examples = examples(&[50]);
        assert_eq!(step_batches(&examples, &packing(BatchSize::Tokens(1)), 3, 0, 1).responses, [0]);
    }
}
