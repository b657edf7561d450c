//! A packed training forward and its gradients against the definition, and wrong definitions that must not pass.

use std::convert::Infallible;

use model::{BlockPattern, PackedAttention, Sequence, Transformer};
use tch::{Device, Kind, Tensor};

use crate::cases::{BlockShape, Random, for_each_case};
use crate::definition::{DenseAttention, TOLERANCE, assert_close, difference, fresh, fresh_block, logits, rows_of};

/// What a wrong mask or a wrong position must at least change.
const CLEARLY_DIFFERENT: f64 = 1e-3;

struct Response {
    /// The clean rows' tokens and one more, so that an anchor may stand right behind the clean rows.
    text: Vec<u32>,
    anchors: Vec<usize>,
}

impl Response {
    fn clean(&self) -> &[u32] {
        &self.text[..self.text.len() - 1]
    }
}

/// What a row of a training forward is; `block` is the anchor of the row's block, `None` for a clean row.
#[derive(Clone, Copy)]
struct Row {
    response: usize,
    position: usize,
    block: Option<usize>,
}

/// A training batch in the layout of [`PackedAttention`].
struct Packed {
    shape: BlockShape,
    responses: Vec<Response>,
    ids: Vec<u32>,
    rows: Vec<Row>,
    sequences: Vec<Sequence>,
}

impl Packed {
    fn push(&mut self, response: Response) {
        let (number, clean) = (self.responses.len(), response.clean().len());
        self.sequences.push(Sequence { first_row: self.ids.len(), clean, anchors: response.anchors.clone() });
        self.ids.extend(response.clean());
        self.rows.extend((0..clean).map(|position| Row { response: number, position, block: None }));
        for &anchor in &response.anchors {
            self.ids.extend(self.shape.ids(response.text[anchor]));
            let positions = anchor..anchor + self.shape.size;
            self.rows.extend(positions.map(|position| Row { response: number, position, block: Some(anchor) }));
        }
        self.responses.push(response);
    }

    fn positions(&self) -> Vec<usize> {
        self.rows.iter().map(|row| row.position).collect()
    }

    fn logits(&self, model: &Transformer) -> Tensor {
        let mut attention = PackedAttention::new(&self.sequences, self.shape.pattern, Device::Cpu);
        logits(model, &self.ids, &self.positions(), &mut attention)
    }

    /// The same rows through one dense attention.
    fn dense_logits(&self, model: &Transformer, positions: &[usize], sees: impl Fn(Row, Row) -> bool) -> Tensor {
        let mut attention = DenseAttention::new(self.rows.len(), |query, key| sees(self.rows[query], self.rows[key]));
        logits(model, &self.ids, positions, &mut attention)
    }

    /// Every block: the response's number, the anchor, and the block's first row.
    fn blocks(&self) -> Vec<(usize, usize, usize)> {
        let of_sequence = |(number, sequence): (usize, &Sequence)| {
            let first = sequence.first_row + sequence.clean;
            let size = self.shape.size;
            sequence.anchors.iter().enumerate().map(move |(block, &anchor)| (number, anchor, first + block * size)).collect()
        };
        self.sequences.iter().enumerate().flat_map::<Vec<_>, _>(of_sequence).collect()
    }
}

/// Responses apart; clean rows causal; a block sees the clean rows strictly before its anchor, and itself by its pattern.
fn sees(pattern: BlockPattern) -> impl Fn(Row, Row) -> bool {
    move |query, key| {
        query.response == key.response
            && match (query.block, key.block) {
                (None, None) => key.position <= query.position,
                (None, Some(_)) => false,
                (Some(anchor), None) => key.position < anchor,
                (Some(own), Some(other)) => own == other && pattern.sees(query.position - own, key.position - other),
            }
    }
}

impl Random {
    /// Up to 20 sorted anchors among the positions `0..=clean`: side by side, evenly far apart, or anywhere.
    fn anchors(&mut self, clean: usize) -> Vec<usize> {
        let count = self.pick(&[0, 1, 2, 5, 15, 16, 17, 20]).min(clean + 1);
        match self.between(0, 2) {
            0 => {
                let first = self.between(0, clean + 1 - count);
                (first..first + count).collect()
            }
            1 => (0..count).map(|number| number * (clean + 1) / count).collect(),
            _ => {
                let mut positions: Vec<usize> = (0..=clean).collect();
                while positions.len() > count {
                    positions.remove(self.between(0, positions.len() - 1));
                }
                positions
            }
        }
    }

    /// A training batch of one to four responses; the first has room for an anchor with context before it.
    fn packed(&mut self, model: &Transformer) -> Packed {
        let shape = self.block_shape(model);
        let responses = self.between(1, 4);
        let mut packed = Packed { shape, responses: Vec::new(), ids: Vec::new(), rows: Vec::new(), sequences: Vec::new() };
        for response in 0..responses {
            let clean = self.between(if response == 0 { 2 } else { 1 }, 50);
            let text = self.ids(clean + 1, model);
            let anchors = self.anchors(clean);
            packed.push(Response { text, anchors });
        }
        packed
    }
}

#[test]
fn a_packed_training_forward_equals_a_fresh_forward_for_each_block_and_response() {
    let _no_gradients = tch::no_grad_guard();
    let (mut without_blocks, mut several_groups) = (0, 0);
    for_each_case(|random| {
        let model = random.model();
        let packed = random.packed(&model);
        let found = packed.logits(&model);
        // Without lively logits a comparison to an absolute tolerance would prove little.
        assert!(found.std(false).double_value(&[]) > 0.3);
        for (response, sequence) in packed.responses.iter().zip(&packed.sequences) {
            let clean = rows_of(&found, sequence.first_row, sequence.clean);
            assert_close(&clean, &fresh(&model, response.clean()), "clean rows");
            without_blocks += usize::from(sequence.anchors.is_empty());
            several_groups += usize::from(sequence.anchors.len() > 16);
        }
        for (number, anchor, first_row) in packed.blocks() {
            let text = &packed.responses[number].text;
            let expected = fresh_block(&model, &text[..anchor], text[anchor], packed.shape);
            let what = format!("block of anchor {anchor} of response {number}");
            assert_close(&rows_of(&found, first_row, packed.shape.size), &expected, &what);
        }
        assert_close(&found, &packed.dense_logits(&model, &packed.positions(), sees(packed.shape.pattern)), "all rows");
    });
    assert!(without_blocks > 5 && several_groups > 5, "{without_blocks} and {several_groups}");
}

/// The known ways to get a block wrong must be seen by the comparison above, in every block that they touch.
#[test]
fn wrong_masks_and_positions_are_clearly_seen() {
    let _no_gradients = tch::no_grad_guard();
    let mut touched = [0; 4];
    for_each_case(|random| {
        let model = random.model();
        let packed = random.packed(&model);
        let found = packed.logits(&model);
        let positions = packed.positions();
        let shifted: Vec<usize> = packed.rows.iter().map(|row| row.position + usize::from(row.block.is_some())).collect();
        let sees_anchor_row = |query: Row, key: Row| {
            sees(packed.shape.pattern)(query, key)
                || query.response == key.response
                    && key.block.is_none()
                    && query.block.is_some_and(|anchor| key.position <= anchor)
        };
        let causal_block = |query: Row, key: Row| {
            sees(packed.shape.pattern)(query, key)
                && (query.block.is_none() || key.block.is_none() || key.position <= query.position)
        };
        let sees_other_blocks = |query: Row, key: Row| {
            sees(packed.shape.pattern)(query, key)
                || query.response == key.response && query.block.is_some() && key.block.is_some()
        };
        let wrong = [
            ("a block sees the clean row of its anchor", packed.dense_logits(&model, &positions, sees_anchor_row)),
            ("a block's positions are one too high", packed.dense_logits(&model, &shifted, sees(packed.shape.pattern))),
            ("a block is causal", packed.dense_logits(&model, &positions, causal_block)),
            ("a block sees the other blocks", packed.dense_logits(&model, &positions, sees_other_blocks)),
        ];
        for (number, anchor, first_row) in packed.blocks() {
            let response = &packed.responses[number];
            // An anchor that does not see its block is its clean row over again, so seeing both only weighs it double; and then only
            // masks, which are alike, can tell whether the block is causal. In a block of two that takes a single key from a single row,
            // which need not matter either. Without context a shift of all of a block's positions changes nothing, as RoPE is relative.
            let whole = packed.shape.pattern.anchor_sees_block;
            let touches = [
                whole && anchor < response.clean().len(),
                anchor > 0,
                whole && packed.shape.size > 2,
                response.anchors.len() > 1,
            ];
            for (index, (fault, wrong)) in wrong.iter().enumerate().filter(|&(index, _)| touches[index]) {
                let rows = |logits: &Tensor| rows_of(logits, first_row, packed.shape.size);
                let difference = difference(&rows(&found), &rows(wrong));
                assert!(difference > CLEARLY_DIFFERENT, "{fault}, anchor {anchor}: the logits differ by {difference} only");
                touched[index] += 1;
            }
        }
    });
    assert!(touched.iter().all(|&blocks| blocks > 100), "{touched:?}");
}

#[test]
fn gradients_of_a_packed_training_forward_equal_the_dense_ones() {
    for_each_case(|random| {
        let plain = random.model();
        let mut values = plain.named_parameters().into_iter().map(|(_, value)| value.copy());
        let leaf = |_: &str, _: &[i64]| Ok::<_, Infallible>(values.next().unwrap().set_requires_grad(true));
        let Ok(model) = Transformer::from_source(plain.config.clone(), leaf);
        let packed = random.packed(&model);
        let parameters = model.named_parameters();
        let leaves: Vec<&Tensor> = parameters.iter().map(|(_, leaf)| *leaf).collect();
        let (found, dense) =
            (packed.logits(&model), packed.dense_logits(&model, &packed.positions(), sees(packed.shape.pattern)));
        let projection = random.projection(&found);
        let gradients = |logits: &Tensor| {
            let projected = (logits * &projection).sum(Kind::Float);
            Tensor::run_backward(&[projected], &leaves, false, false)
        };
        for (((name, _), found), expected) in parameters.iter().zip(gradients(&found)).zip(gradients(&dense)) {
            let largest = expected.abs().max().double_value(&[]);
            let relative = difference(&found, &expected) / largest;
            assert!(largest > 1e-3 && relative < TOLERANCE, "{name}: the gradients differ by {relative} of {largest}");
        }
    });
}
