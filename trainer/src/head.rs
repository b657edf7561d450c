//! Final norm, head and loss, a chunk of rows at a time: `[R, V]` logits never exist for more than a chunk, and their gradient goes back
//! into the hidden states at once.
//!
//! Shapes legend: see the crate's documentation.

use model::Transformer;
use model::transformer::rms_norm;
use tch::{Device, Kind, Tensor};

use crate::backward::{Divergence, LossSettings};
use crate::batch::{Batch, BlockShape, Denominators, LabelledRow};
use crate::losses::LossSums;
use crate::objective::{PositionWeights, RowLoss, cross_entropy, distillation, log_probability, pace_weights, total_variation};

/// The weights behind the last layer, and where their gradients are summed up.
pub(crate) struct Head {
    /// Room for the logits of a chunk, f32, with whatever is in it.
    pub(crate) logits_rv: Tensor,
    pub(crate) epsilon: f64,
    /// A leaf.
    pub(crate) norm_d: Tensor,
    pub(crate) weight_vd: Tensor,
    /// f32.
    pub(crate) norm_gradient_d: Tensor,
    /// f32.
    pub(crate) weight_gradient_vd: Tensor,
}

/// A teacher and its last hidden states for the batch.
pub(crate) struct Teaching<'a> {
    pub(crate) teacher: &'a Transformer,
    pub(crate) hidden_td: Tensor,
    pub(crate) divergence: Divergence,
    /// Which of these states stands for a labelled row.
    pub(crate) row: fn(&LabelledRow) -> usize,
    /// Whether clean rows learn from it, or from their labels.
    pub(crate) clean_too: bool,
}

impl Teaching<'_> {
    /// The teacher's f32 logits for labelled rows.
    fn logits(&self, rows: &[LabelledRow]) -> Tensor {
        let row_r = torch::index_tensor(&rows.iter().map(self.row).collect::<Vec<_>>(), self.hidden_td.device());
        self.teacher.logits(&self.hidden_td.index_select(0, &row_r))
    }
}

/// The loss of rows towards a teacher's logits, or towards their labels.
fn row_loss(logits_rv: &Tensor, label_r: &Tensor, teacher: Option<&(Tensor, Divergence)>) -> RowLoss {
    match teacher {
        None => cross_entropy(logits_rv, label_r),
        Some((teacher_rv, Divergence::Forward(how))) => distillation(logits_rv, teacher_rv, label_r, *how),
        Some((teacher_rv, Divergence::TotalVariation)) => total_variation(logits_rv, teacher_rv),
    }
}

/// Rows whose losses are computed in one go. Losses pass over their rows several times and make copies of them: on a CPU these are to stay
/// in its caches, on a GPU only to be few.
fn rows_at_once(vocabulary: i64, device: Device) -> i64 {
    let bytes = if device == Device::Cpu { 8 << 20 } else { 256 << 20 };
    (bytes / (4 * vocabulary)).max(2 * torch::available_cores() as i64)
}

/// The weights of a chunk's rows.
struct RowWeights<'a> {
    /// Whether `of` is to be given the drafter's probabilities of the labels, which are not computed otherwise.
    by_probability: bool,
    of: &'a dyn Fn(&[f64]) -> Vec<f64>,
}

/// What one chunk of rows gave, read back.
struct Outcome {
    losses: Vec<f32>,
    best: Vec<u32>,
    /// Those that the gradient was weighted by.
    weights: Vec<f64>,
}

/// Room for a chunk's logits `[R, V]`, by far the largest tensor of a forward: to be taken before anything else is, and let go once the
/// head is done. An allocator that was asked for it later would find its place broken up by what the layers keep.
pub(crate) fn logits_room(batch: &Batch, shape: BlockShape, settings: LossSettings, vocabulary: i64, device: Device) -> Tensor {
    let longest = batch.diffusion.len().max(batch.autoregressive.len());
    let rows = settings.chunk_rows.max(shape.drafts()).min(longest);
    Tensor::empty([rows as i64, vocabulary], (Kind::Float, device))
}

impl Head {
    /// The sums of the batch's losses, and the gradient with respect to the last layer's output `[T, D]`.
    pub(crate) fn backward(
        &self,
        batch: &Batch,
        hidden_td: &Tensor,
        teaching: Option<&Teaching<'_>>,
        denominators: &Denominators,
        shape: BlockShape,
        settings: LossSettings,
    ) -> (LossSums, Tensor) {
        let gradient_td = hidden_td.zeros_like().to_kind(Kind::Float);
        let mut sums = LossSums::new(shape.drafts());
        let total = denominators.of_blocks(settings.weights);
        for rows in chunks_of_whole_blocks(&batch.diffusion, settings.chunk_rows) {
            let weights = RowWeights {
                by_probability: matches!(settings.weights, PositionWeights::Pace { .. }),
                of: &|probabilities| match settings.weights {
                    PositionWeights::Exponential => rows.iter().map(|row| row.weight).collect(),
                    PositionWeights::Pace { alpha } => block_weights(rows, probabilities, alpha),
                },
            };
            let outcome = self.chunk(hidden_td, rows, 1.0 / total, &weights, teaching, &gradient_td);
            sums.add_diffusion(rows, &outcome.losses, &outcome.best, &outcome.weights);
        }
        if settings.ar_weight > 0.0 {
            let teaching = teaching.filter(|teaching| teaching.clean_too);
            let scale = settings.ar_weight / denominators.clean as f64;
            for rows in batch.autoregressive.chunks(settings.chunk_rows.max(1)) {
                let outcome = self.chunk(
                    hidden_td,
                    rows,
                    scale,
                    &RowWeights { by_probability: false, of: &|_| vec![1.0; rows.len()] },
                    teaching,
                    &gradient_td,
                );
                sums.autoregressive += outcome.losses.iter().map(|&loss| f64::from(loss)).sum::<f64>();
            }
        }
        (sums, gradient_td.to_kind(hidden_td.kind()))
    }

    /// One chunk: logits, the loss of each row, and the gradients of head, norm and hidden rows, each row weighted by `scale · weight`.
    ///
    /// The gradient of the logits takes their place, so that `[R, V]` exists once (twice with a teacher).
    fn chunk(
        &self,
        hidden_td: &Tensor,
        rows: &[LabelledRow],
        scale: f64,
        weights: &RowWeights<'_>,
        teaching: Option<&Teaching<'_>>,
        gradient_td: &Tensor,
    ) -> Outcome {
        let device = hidden_td.device();
        let row_r = torch::index_tensor(&rows.iter().map(|row| row.row).collect::<Vec<_>>(), device);
        let label_r = torch::ids_tensor(&rows.iter().map(|row| row.label).collect::<Vec<_>>(), device);
        let hidden_rd = hidden_td.index_select(0, &row_r).set_requires_grad(true);
        let normed_rd = tch::with_grad(|| rms_norm(&hidden_rd, &self.norm_d, self.epsilon));
        let logits_rv = self.logits_rv.narrow(0, 0, rows.len() as i64);
        let head_dv = self.weight_vd.transpose(0, 1);
        if self.weight_vd.kind() == Kind::Float {
            let _ = normed_rd.detach().mm_out(&logits_rv, &head_dv);
        } else {
            logits_rv.shallow_clone().copy_(&normed_rd.detach().matmul(&head_dv));
        }
        let best = torch::to_ids(&logits_rv.argmax(-1, false));
        let teacher_rv = teaching.map(|teaching| (teaching.logits(rows), teaching.divergence));
        let (mut losses, mut probabilities) = (Vec::with_capacity(rows.len()), Vec::new());
        let (count, step) = (rows.len() as i64, rows_at_once(self.weight_vd.size()[0], device));
        for start in (0..count).step_by(step as usize) {
            let part = |tensor: &Tensor| tensor.narrow(0, start, step.min(count - start));
            let (mut logits_rv, label_r) = (part(&logits_rv), part(&label_r));
            if weights.by_probability {
                let label_probability_r = log_probability(&logits_rv, &label_r).exp();
                probabilities.extend(torch::to_f32s(&label_probability_r).into_iter().map(f64::from));
            }
            let teacher = teacher_rv.as_ref().map(|(teacher_rv, divergence)| (part(teacher_rv), *divergence));
            let RowLoss { loss_r, gradient_rv } = row_loss(&logits_rv, &label_r, teacher.as_ref());
            logits_rv.copy_(&gradient_rv);
            losses.extend(torch::to_f32s(&loss_r));
        }
        drop(teacher_rv);
        let weights = (weights.of)(&probabilities);
        let scaled: Vec<f32> = weights.iter().map(|weight| (weight * scale) as f32).collect();
        let mut gradient_rv = logits_rv;
        let _ = gradient_rv.g_mul_(&Tensor::from_slice(&scaled).to_device(device).unsqueeze(1));
        let gradient_rv = gradient_rv.to_kind(hidden_td.kind());

        add_product(&self.weight_gradient_vd, &gradient_rv.transpose(0, 1), &normed_rd.detach());
        let normed_gradient_rd = gradient_rv.matmul(&self.weight_vd);
        let surrogate = tch::with_grad(|| (&normed_rd * &normed_gradient_rd).sum(normed_rd.kind()));
        let gradients = Tensor::run_backward(&[surrogate], &[&hidden_rd, &self.norm_d], false, false);
        let _ = self.norm_gradient_d.shallow_clone().g_add_(&gradients[1].to_kind(Kind::Float));
        let _ = gradient_td.shallow_clone().index_add_(0, &row_r, &gradients[0].to_kind(Kind::Float));
        Outcome { losses, best, weights }
    }
}

/// total += left · right, in f32 without a product in between where the operands are f32 already.
fn add_product(total: &Tensor, left: &Tensor, right: &Tensor) {
    let mut total = total.shallow_clone();
    if left.kind() == Kind::Float {
        let _ = total.addmm_(left, right);
    } else {
        let _ = total.g_add_(&left.matmul(right).to_kind(Kind::Float));
    }
}

/// Cuts rows, which come block by block with drafts ascending, into chunks of up to `limit` that end where a block ends; a block larger
/// than the limit is a chunk of its own.
fn chunks_of_whole_blocks(rows: &[LabelledRow], limit: usize) -> impl Iterator<Item = &[LabelledRow]> {
    let mut rest = rows;
    std::iter::from_fn(move || {
        if rest.is_empty() {
            return None;
        }
        let is_end = |&end: &usize| end == rest.len() || rest[end].draft == 0;
        let within = (1..=rest.len().min(limit.max(1))).rev().find(is_end);
        let end = within.or_else(|| (1..=rest.len()).find(is_end)).unwrap_or(rest.len());
        let (chunk, others) = rest.split_at(end);
        rest = others;
        Some(chunk)
    })
}

/// [`pace_weights`] block by block.
fn block_weights(rows: &[LabelledRow], probabilities: &[f64], alpha: f64) -> Vec<f64> {
    let mut weights = Vec::with_capacity(rows.len());
    let mut start = 0;
    for end in 1..=rows.len() {
        if end == rows.len() || rows[end].draft == 0 {
            weights.extend(pace_weights(&probabilities[start..end], alpha));
            start = end;
        }
    }
    weights
}

#[cfg(test)]
mod tests {
    use super::*;

    fn rows(blocks: &[usize]) -> Vec<LabelledRow> {
        let drafts = blocks.iter().flat_map(|&slots| 0..slots);
        drafts.map(|draft| LabelledRow { row: 0, label: 0, weight: 1.0, draft, predictor: 0 }).collect()
    }

    #[test]
    fn chunks_end_where_blocks_end() {
        let rows = rows(&[3, 3, 2, 5, 1]);
        let lengths = |limit| chunks_of_whole_blocks(&rows, limit).map(<[_]>::len).collect::<Vec<_>>();
        assert_eq!(lengths(6), [6, 2, 6]);
        assert_eq!(lengths(4), [3, 3, 2, 5, 1]);
        assert_eq!(lengths(0), [3, 3, 2, 5, 1]);
        assert_eq!(lengths(1000), [14]);
        assert_eq!(chunks_of_whole_blocks(&[], 4).count(), 0);
    }

    #[test]
    fn weights_of_a_chunk_are_those_of_its_blocks() {
        let rows = rows(&[3, 1]);
        assert_eq!(block_weights(&rows, &[0.5, 0.0, 1.0, 0.0], 0.5), [1.5, 0.75, 0.375, 0.5]);
    }
}
