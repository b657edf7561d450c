//! What a block sees, computed the slow way: one dense attention over all rows, its mask written pair by pair, its softmax plain and
//! in f64.

use model::{Attention, Transformer};
use tch::{Device, Kind, Tensor};

use crate::cases::BlockShape;

/// Of logits in f32, and of gradients relative to the largest one of their parameter.
pub(crate) const TOLERANCE: f64 = 1e-4;

/// The definition: every row attends to the rows that its line of the mask names, and to no others.
pub(crate) struct DenseAttention {
    /// `[T, T]` boolean, query by key.
    pub(crate) visible_tt: Tensor,
}

impl DenseAttention {
    pub(crate) fn new(rows: usize, sees: impl Fn(usize, usize) -> bool) -> Self {
        let mut visible = Vec::with_capacity(rows * rows);
        for query in 0..rows {
            for key in 0..rows {
                visible.push(sees(query, key));
            }
        }
        Self { visible_tt: Tensor::from_slice(&visible).view([rows as i64, rows as i64]) }
    }
}

impl Attention for DenseAttention {
    fn attend(&mut self, _layer: usize, query_the: &Tensor, key_tke: &Tensor, value_tke: &Tensor) -> Tensor {
        let (_, heads, size) = query_the.size3().unwrap();
        let key_heads = key_tke.size()[1];
        let outputs: Vec<Tensor> = (0..heads)
            .map(|head| {
                let key_head = head * key_heads / heads;
                let query_te = query_the.select(1, head).to_kind(Kind::Double);
                let key_te = key_tke.select(1, key_head).to_kind(Kind::Double);
                let value_te = value_tke.select(1, key_head).to_kind(Kind::Double);
                let score_tt = query_te.matmul(&key_te.transpose(0, 1)) / (size as f64).sqrt();
                let score_tt = score_tt.masked_fill(&self.visible_tt.logical_not(), f64::NEG_INFINITY);
                score_tt.softmax(-1, Kind::Double).matmul(&value_te)
            })
            .collect();
        Tensor::stack(&outputs, 1).to_kind(query_the.kind())
    }
}

/// Logits `[T, V]` of all rows of one forward.
pub(crate) fn logits(model: &Transformer, ids: &[u32], positions: &[usize], attention: &mut dyn Attention) -> Tensor {
    let (ids_t, positions_t) = (torch::ids_tensor(ids, Device::Cpu), torch::index_tensor(positions, Device::Cpu));
    model.logits(&model.forward(&ids_t, &positions_t, attention))
}

/// Logits `[T, V]` of a causal forward of its own.
pub(crate) fn fresh(model: &Transformer, ids: &[u32]) -> Tensor {
    let positions: Vec<usize> = (0..ids.len()).collect();
    logits(model, ids, &positions, &mut DenseAttention::new(ids.len(), |query, key| key <= query))
}

/// Logits `[B, V]` of a block in a forward of its own: `prefix` causal, then the block, which sees all of the prefix; its masks see the
/// whole block, its anchor by the pattern.
pub(crate) fn fresh_block(model: &Transformer, prefix: &[u32], anchor: u32, shape: BlockShape) -> Tensor {
    let ids = [prefix, &shape.ids(anchor)].concat();
    let positions: Vec<usize> = (0..ids.len()).collect();
    let first_mask = prefix.len() + if shape.pattern.anchor_sees_block { 0 } else { 1 };
    let mut attention = DenseAttention::new(ids.len(), |query, key| key <= query || query >= first_mask);
    logits(model, &ids, &positions, &mut attention).narrow(0, prefix.len() as i64, shape.size as i64)
}

pub(crate) fn difference(found: &Tensor, expected: &Tensor) -> f64 {
    assert_eq!(found.size(), expected.size());
    (found - expected).abs().max().double_value(&[])
}

pub(crate) fn assert_close(found: &Tensor, expected: &Tensor, what: &str) {
    let difference = difference(found, expected);
    // Written so that a NaN fails too.
    assert!(difference < TOLERANCE, "{what}: the logits differ by {difference}");
}

pub(crate) fn rows_of(tensor: &Tensor, first: usize, count: usize) -> Tensor {
    tensor.narrow(0, first as i64, count as i64)
}
