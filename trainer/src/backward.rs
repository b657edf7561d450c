//! Forward, loss and backward of one batch, layer by layer.
//!
//! Each layer is gathered from all ranks, run, and let go; in the backward it is gathered and run again, and its gradient summed over the
//! ranks at once. Each half of it (attention, feed-forward) is its own little graph between detached tensors, so only half a layer's graph
//! need live at a time (`recompute`), and no engine hook is needed. The surrogate `(y · g).sum()` hands the gradient `g` to autograd, whose
//! roots are always ones in tch (<https://github.com/LaurentMazare/tch-rs/issues/526>); its own value does not matter.
//!
//! Shapes legend: see the crate's documentation.

use model::transformer::Layer;
use model::{PackedAttention, Transformer};
use tch::{Kind, Tensor};
use torch::group::GroupError;

use crate::batch::{Batch, BlockShape, Denominators, LabelledRow};
use crate::head::{Head, Teaching, logits_room};
use crate::losses::LossSums;
use crate::objective::{Distillation, PositionWeights};
use crate::parameters::{EMBEDDING, Parameters};

/// What the rows learn from.
pub enum Objective<'a> {
    /// The response's own tokens: training as published.
    Tokens,
    /// The target's distribution after everything that precedes the label, from one clean forward: much less noise than single tokens,
    /// for who can hold the target beside the drafter. Clean rows learn from it too.
    Target { target: &'a Transformer, divergence: Divergence },
    /// The unpruned drafter's distribution in the same slot, corrected towards the response's tokens: recovery. Clean rows learn the
    /// response's tokens.
    Unpruned { teacher: &'a Transformer, how: Distillation },
}

/// What is made small between two distributions.
#[derive(Debug, Clone, Copy, PartialEq)]
pub enum Divergence {
    /// Forward KL(teacher ‖ student), softened or corrected as told.
    Forward(Distillation),
    /// ½ Σ |teacher − student|.
    TotalVariation,
}

/// Weights and limits of the loss.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct LossSettings {
    /// λ of L = L_diff + λ · L_AR.
    pub ar_weight: f64,
    pub weights: PositionWeights,
    /// Rows whose logits over the vocabulary exist at a time; whole blocks are kept together.
    pub chunk_rows: usize,
    /// Whether a layer's activations are computed again in the backward instead of kept.
    pub recompute: bool,
}

/// Runs `batch` forward and backward, and adds its part of the step's gradient to `gradient`.
///
/// All ranks call this together, each with a batch of its own; one without rows only takes part in the exchanges.
///
/// # Errors
/// Another rank is gone. Panics as libtorch does: `torch::guarded` stands around it.
pub fn forward_backward(
    parameters: &Parameters<'_>,
    gradient: &Tensor,
    batch: &Batch,
    denominators: &Denominators,
    shape: BlockShape,
    objective: &Objective<'_>,
    settings: LossSettings,
) -> Result<LossSums, GroupError> {
    let _no_grad = tch::no_grad_guard();
    let device = parameters.device();
    let config = &parameters.config;
    let depth = config.num_hidden_layers;
    let idle = batch.ids.is_empty();
    let logits_rv = logits_room(batch, shape, settings, config.vocab_size, device);
    let ids_t = torch::ids_tensor(&batch.ids, device);
    let positions_t = torch::index_tensor(&batch.positions, device);
    let rope = parameters.rotary.tables(&positions_t);
    let mut attention = PackedAttention::new(&batch.sequences, shape.pattern(), device);

    let mut next = (depth > 0).then(|| parameters.start_gather(parameters.layer_unit(0))).transpose()?;
    let embedding_vd = parameters.gather_only(EMBEDDING)?;
    let mut hidden_td = embedding_vd.index_select(0, &ids_t);
    // A tied embedding is the head as well; gathering it again would cost more than keeping it.
    let tied = config.tie_word_embeddings.then_some(embedding_vd);
    let mut kept: Vec<Kept> = Vec::with_capacity(depth);
    for index in 0..depth {
        let Some(gathering) = next.take() else { break };
        let flat = gathering.wait()?;
        next = (index + 1 < depth).then(|| parameters.start_gather(parameters.layer_unit(index + 1))).transpose()?;
        if idle {
            continue;
        }
        let layer = parameters.layer_of(index, &flat);
        if settings.recompute {
            let input_td = hidden_td;
            let middle_td = layer.attend(config, index, &input_td, &rope, &mut attention);
            hidden_td = layer.feed_forward(config, &middle_td);
            kept.push(Kept::Inputs { input_td, middle_td });
        } else {
            let first = Run::of(&hidden_td, |input_td| layer.attend(config, index, input_td, &rope, &mut attention));
            let second = Run::of(&first.output_td, |middle_td| layer.feed_forward(config, middle_td));
            hidden_td = second.output_td.detach();
            kept.push(Kept::Runs { layer: Box::new(layer), first, second });
        }
    }

    let teaching = if idle { None } else { teaching(objective, batch, shape, &ids_t, &positions_t, &mut attention) };
    let head_vd = match tied {
        Some(embedding_vd) => embedding_vd,
        None => parameters.gather_only(parameters.head_unit())?,
    };
    let norm_d = parameters.gather_only(parameters.norm_unit())?;
    let head_open = parameters.open_gradient(parameters.head_unit(), gradient);
    let norm_open = parameters.open_gradient(parameters.norm_unit(), gradient);
    let head = Head {
        logits_rv,
        epsilon: config.rms_norm_eps,
        norm_gradient_d: parameters.gradient_views(&norm_open).swap_remove(0),
        weight_gradient_vd: parameters.gradient_views(&head_open).swap_remove(0),
        norm_d: norm_d.detach().set_requires_grad(true),
        weight_vd: head_vd,
    };
    let (sums, mut gradient_td) = head.backward(batch, &hidden_td, teaching.as_ref(), denominators, shape, settings);
    drop((head, hidden_td, teaching));
    parameters.close_gradient(norm_open, gradient)?;
    // The tied embedding still gets the gradient of its rows at the end.
    let embedding_open = if config.tie_word_embeddings {
        head_open
    } else {
        parameters.close_gradient(head_open, gradient)?;
        parameters.open_gradient(EMBEDDING, gradient)
    };

    let start = |index: usize| settings.recompute.then(|| parameters.start_gather(parameters.layer_unit(index))).transpose();
    let mut next = if depth > 0 { start(depth - 1)? } else { None };
    let first_half = config.attention_shapes().len();
    for index in (0..depth).rev() {
        let flat = next.take().map(|gathering| gathering.wait()).transpose()?;
        next = if index > 0 { start(index - 1)? } else { None };
        let open = parameters.open_gradient(parameters.layer_unit(index), gradient);
        let mut views = parameters.gradient_views(&open);
        let second_views = views.split_off(first_half);
        match (kept.pop(), flat) {
            (Some(Kept::Runs { layer, first, second }), _) => {
                let (first_parameters, second_parameters) = layer.halves();
                gradient_td = second.backward(&gradient_td, &second_parameters, &second_views);
                gradient_td = first.backward(&gradient_td, &first_parameters, &views);
            }
            (Some(Kept::Inputs { input_td, middle_td }), Some(flat)) => {
                let layer = parameters.layer_of(index, &flat);
                let (first_parameters, second_parameters) = layer.halves();
                let second = Run::of(&middle_td, |middle_td| layer.feed_forward(config, middle_td));
                gradient_td = second.backward(&gradient_td, &second_parameters, &second_views);
                drop(middle_td);
                let first = Run::of(&input_td, |input_td| layer.attend(config, index, input_td, &rope, &mut attention));
                gradient_td = first.backward(&gradient_td, &first_parameters, &views);
            }
            _ => {}
        }
        parameters.close_gradient(open, gradient)?;
    }

    if !idle {
        let mut rows_vd = parameters.gradient_views(&embedding_open).swap_remove(0);
        let _ = rows_vd.index_add_(0, &ids_t, &gradient_td.to_kind(Kind::Float));
    }
    parameters.close_gradient(embedding_open, gradient)?;
    Ok(sums)
}

/// What the forward leaves of a layer for the backward.
enum Kept {
    Inputs { input_td: Tensor, middle_td: Tensor },
    Runs { layer: Box<Layer>, first: Run, second: Run },
}

/// A graph of its own, from a leaf to its output.
struct Run {
    input_td: Tensor,
    output_td: Tensor,
}

impl Run {
    fn of(input_td: &Tensor, body: impl FnOnce(&Tensor) -> Tensor) -> Self {
        let input_td = input_td.detach().set_requires_grad(true);
        let output_td = tch::with_grad(|| body(&input_td));
        Self { input_td, output_td }
    }

    /// Adds to the gradients of `parameters`, and gives the gradient of the input.
    fn backward(self, gradient_td: &Tensor, parameters: &[&Tensor], totals: &[Tensor]) -> Tensor {
        let surrogate = tch::with_grad(|| (&self.output_td * gradient_td).sum(self.output_td.kind()));
        let inputs = [&[&self.input_td], parameters].concat();
        let gradients = Tensor::run_backward(&[surrogate], &inputs, false, false);
        for (total, gradient) in totals.iter().zip(&gradients[1..]) {
            let _ = total.shallow_clone().g_add_(&gradient.to_kind(Kind::Float));
        }
        gradients[0].shallow_clone()
    }
}

/// The teacher's last hidden states for the batch, where there is a teacher.
fn teaching<'a>(
    objective: &Objective<'a>,
    batch: &Batch,
    shape: BlockShape,
    ids_t: &Tensor,
    positions_t: &Tensor,
    attention: &mut PackedAttention,
) -> Option<Teaching<'a>> {
    match *objective {
        Objective::Tokens => None,
        Objective::Target { target, divergence } => {
            let (ids, positions, sequences) = batch.clean_rows();
            let device = target.device();
            let mut attention = PackedAttention::new(&sequences, shape.pattern(), device);
            let hidden_td =
                target.forward(&torch::ids_tensor(&ids, device), &torch::index_tensor(&positions, device), &mut attention);
            let row: fn(&LabelledRow) -> usize = |row| row.predictor;
            Some(Teaching { teacher: target, hidden_td, divergence, row, clean_too: true })
        }
        Objective::Unpruned { teacher, how } => {
            let hidden_td = teacher.forward(ids_t, positions_t, attention);
            Some(Teaching { teacher, hidden_td, divergence: Divergence::Forward(how), row: |row| row.row, clean_too: false })
        }
    }
}
