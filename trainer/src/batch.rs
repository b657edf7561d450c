//! Responses and their blocks as the flat rows of one forward (ALGORITHMS: D3D's two streams in one sequence).
//!
//! A response contributes its clean tokens, then for each anchor a block `[anchor token, mask, mask, …]` at the anchor's true positions.
//! `Sequence` says which rows see which; nothing is padded.

use configs::Labels;
use data::supervision::Example;
use model::{BlockPattern, Sequence};

/// What a block looks like and how its slots are labelled.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct BlockShape {
    /// Anchor slot + masks.
    pub block_size: usize,
    pub mask_token: u32,
    pub labels: Labels,
    /// Whether the anchor sees the masks of its block.
    pub anchor_sees_block: bool,
}

/// A row of the forward that has a label.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct LabelledRow {
    pub row: usize,
    pub label: u32,
    /// Its share of the loss before division by the batch's total.
    pub weight: f64,
    /// For a block's slot, which draft it is (0 is the first); unused for clean rows.
    pub draft: usize,
    /// The clean row before the label, counted over the batch's clean rows alone: what predicts the label from all that precedes it.
    pub predictor: usize,
}

/// One forward's rows and labels.
#[derive(Debug, Clone, Default)]
pub struct Batch {
    pub ids: Vec<u32>,
    pub positions: Vec<usize>,
    pub sequences: Vec<Sequence>,
    /// Block slots, weighted exp(-draft / γ).
    pub diffusion: Vec<LabelledRow>,
    /// Clean rows whose next token is supervised, weight one.
    pub autoregressive: Vec<LabelledRow>,
    /// Clean tokens, for throughput and `training_tokens`.
    pub clean_tokens: usize,
}

/// What the losses of a step are divided by: counts over all its responses, whichever rank and forward they are in.
#[derive(Debug, Clone, Copy, Default, PartialEq)]
pub struct Denominators {
    /// Σ of the position weights of labelled block slots.
    pub diffusion: f64,
    /// Blocks.
    pub blocks: usize,
    /// Supervised clean rows.
    pub clean: usize,
}

impl Denominators {
    /// Adds a response with its anchors.
    pub fn add(&mut self, example: &Example, anchors: &[usize], shape: BlockShape, gamma: f64) {
        for &anchor in anchors {
            self.diffusion += shape.labels(example, anchor).map(|label| weight(label.draft, gamma)).sum::<f64>();
        }
        self.blocks += anchors.len();
        self.clean += predicting(example).count();
    }
}

/// A labelled slot of a block.
struct SlotLabel {
    slot: usize,
    draft: usize,
    /// Position of the label in the response's ids.
    position: usize,
}

/// The position weight of a draft, exp(-draft / γ).
fn weight(draft: usize, gamma: f64) -> f64 {
    (-(draft as f64) / gamma).exp()
}

/// The clean positions whose next token is supervised.
fn predicting(example: &Example) -> impl Iterator<Item = usize> {
    example.responses.iter().flat_map(|response| response.start.max(1) - 1..response.end.saturating_sub(1))
}

impl BlockShape {
    /// Drafts that a block proposes.
    pub fn drafts(self) -> usize {
        self.block_size - self.first_slot_and_shift().0
    }

    /// The labelled slots of the block at `anchor`; those beyond the end of its response have no label.
    fn labels(self, example: &Example, anchor: usize) -> impl Iterator<Item = SlotLabel> {
        let (first_slot, shift) = self.first_slot_and_shift();
        let end = example.end_of_response(anchor);
        let all = (first_slot..self.block_size).map(move |slot| SlotLabel {
            slot,
            draft: slot - first_slot,
            position: anchor + slot + shift,
        });
        all.take_while(move |label| label.position < end)
    }

    /// Who sees whom in a block.
    pub fn pattern(self) -> BlockPattern {
        BlockPattern { size: self.block_size, anchor_sees_block: self.anchor_sees_block }
    }

    /// The first slot that is scored, and how far the label of slot `j` lies from `anchor + j`.
    ///
    /// `in_place`: slot j predicts the token at anchor + j, slot 0 holds a known token. `next`: slot j predicts the one after.
    fn first_slot_and_shift(self) -> (usize, usize) {
        match self.labels {
            Labels::InPlace => (1, 0),
            Labels::Next => (0, 1),
        }
    }
}

impl Batch {
    /// Packs responses, each with its sorted anchors. `gamma` is the decay of the position weights.
    pub fn pack(responses: &[(&Example, Vec<usize>)], shape: BlockShape, gamma: f64) -> Self {
        let mut batch = Self::default();
        for (example, anchors) in responses {
            batch.push(example, anchors, shape, gamma);
        }
        batch
    }

    /// The clean rows alone: their ids, their positions, and who sees whom.
    pub fn clean_rows(&self) -> (Vec<u32>, Vec<usize>, Vec<Sequence>) {
        let (mut ids, mut positions, mut sequences) = (Vec::new(), Vec::new(), Vec::new());
        for sequence in &self.sequences {
            let rows = sequence.first_row..sequence.first_row + sequence.clean;
            sequences.push(Sequence { first_row: ids.len(), clean: sequence.clean, anchors: Vec::new() });
            ids.extend_from_slice(&self.ids[rows.clone()]);
            positions.extend_from_slice(&self.positions[rows]);
        }
        (ids, positions, sequences)
    }

    fn push(&mut self, example: &Example, anchors: &[usize], shape: BlockShape, gamma: f64) {
        let (first_row, first_clean) = (self.ids.len(), self.clean_tokens);
        let length = example.ids.len();
        self.ids.extend_from_slice(&example.ids);
        self.positions.extend(0..length);
        self.clean_tokens += length;
        for position in predicting(example) {
            let (row, label, predictor) = (first_row + position, example.ids[position + 1], first_clean + position);
            self.autoregressive.push(LabelledRow { row, label, weight: 1.0, draft: 0, predictor });
        }
        for &anchor in anchors {
            let first_of_block = self.ids.len();
            self.ids.push(example.ids[anchor]);
            self.ids.extend(std::iter::repeat_n(shape.mask_token, shape.block_size - 1));
            self.positions.extend(anchor..anchor + shape.block_size);
            for SlotLabel { slot, draft, position } in shape.labels(example, anchor) {
                self.diffusion.push(LabelledRow {
                    row: first_of_block + slot,
                    label: example.ids[position],
                    weight: weight(draft, gamma),
                    draft,
                    predictor: first_clean + position - 1,
                });
            }
        }
        self.sequences.push(Sequence { first_row, clean: length, anchors: anchors.to_vec() });
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const EXAMPLE: [u32; 6] = [10, 11, 12, 13, 14, 15];

    fn pack(labels: Labels, anchors: &[usize]) -> Batch {
        let example = Example::after_prompt(EXAMPLE.to_vec(), 2);
        Batch::pack(
            &[(&example, anchors.to_vec())],
            BlockShape { block_size: 3, mask_token: 99, labels, anchor_sees_block: true },
            2.0,
        )
    }

    #[test]
    fn a_block_holds_its_anchor_and_masks_at_true_positions() {
        let batch = pack(Labels::InPlace, &[2, 4]);
        assert_eq!(batch.ids, [10, 11, 12, 13, 14, 15, 12, 99, 99, 14, 99, 99]);
        assert_eq!(batch.positions, [0, 1, 2, 3, 4, 5, 2, 3, 4, 4, 5, 6]);
    }

    #[test]
    fn in_place_labels_stand_where_they_predict_and_skip_the_anchor() {
        let rows: Vec<_> = pack(Labels::InPlace, &[2, 4]).diffusion.iter().map(|row| (row.row, row.label, row.draft)).collect();
        // The last block's second mask would predict beyond the response.
        assert_eq!(rows, [(7, 13, 0), (8, 14, 1), (10, 15, 0)]);
    }

    #[test]
    fn next_labels_are_one_further_and_score_every_slot() {
        let rows: Vec<_> = pack(Labels::Next, &[2, 4]).diffusion.iter().map(|row| (row.row, row.label, row.draft)).collect();
        assert_eq!(rows, [(6, 13, 0), (7, 14, 1), (8, 15, 2), (9, 15, 0)]);
    }

    #[test]
    fn weights_decay_and_clean_rows_predict_supervised_tokens_only() {
        let batch = pack(Labels::Next, &[2]);
        assert_eq!(batch.diffusion[0].weight, 1.0);
        assert!((batch.diffusion[2].weight - (-1.0_f64).exp()).abs() < 1e-12);
        let clean: Vec<_> = batch.autoregressive.iter().map(|row| (row.row, row.label)).collect();
        assert_eq!(clean, [(1, 12), (2, 13), (3, 14), (4, 15)]);
    }

    #[test]
    fn of_several_turns_each_response_is_predicted_and_no_prompt_between() {
        let example = Example { ids: EXAMPLE.to_vec(), responses: vec![1..3, 4..6] };
        for (labels, slots) in [(Labels::Next, [(6, 12), (9, 15)]), (Labels::InPlace, [(7, 12), (10, 15)])] {
            let shape = BlockShape { block_size: 3, mask_token: 99, labels, anchor_sees_block: true };
            let batch = Batch::pack(&[(&example, vec![1, 4])], shape, 2.0);
            // The first block ends with its response, though the ids go on.
            assert_eq!(batch.diffusion.iter().map(|row| (row.row, row.label)).collect::<Vec<_>>(), slots);
            let clean: Vec<_> = batch.autoregressive.iter().map(|row| (row.row, row.label)).collect();
            assert_eq!(clean, [(0, 11), (1, 12), (3, 14), (4, 15)]);
            let mut denominators = Denominators::default();
            denominators.add(&example, &[1, 4], shape, 2.0);
            assert_eq!(denominators, Denominators { diffusion: 2.0, blocks: 2, clean: 4 });
        }
    }

    #[test]
    fn rows_of_several_responses_follow_each_other() {
        let example = Example::after_prompt(EXAMPLE.to_vec(), 2);
        let shape = BlockShape { block_size: 3, mask_token: 99, labels: Labels::Next, anchor_sees_block: true };
        let batch = Batch::pack(&[(&example, vec![2]), (&example, vec![])], shape, 2.0);
        assert_eq!(batch.sequences[1].first_row, 9);
        assert_eq!(batch.ids.len(), 15);
        assert_eq!(batch.clean_tokens, 12);
        let (ids, positions, sequences) = batch.clean_rows();
        assert_eq!((ids.len(), &ids[6..], &positions[5..8]), (12, &EXAMPLE[..], &[5, 0, 1][..]));
        assert_eq!((sequences[1].first_row, sequences[1].clean), (6, 6));
        // The row before a label predicts it, in every kind of row and of the second response too.
        for row in batch.diffusion.iter().chain(&batch.autoregressive) {
            assert_eq!(ids[row.predictor + 1], row.label, "{row:?}");
        }
    }
}
