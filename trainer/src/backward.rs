//! Forward, loss and backward of one batch, layer by layer: gradients go straight into the f32 flat gradient.
//!
//! Each layer is its own little graph between detached tensors. So only one layer's graph need live at a time (`recompute`), a layer's
//! gradient is ready as soon as its backward ran, and no engine hook is needed. The surrogate `(y · g).sum()` hands the gradient `g`
//! to autograd, whose roots are always ones in tch (<https://github.com/LaurentMazare/tch-rs/issues/526>); its own value does not matter.
//!
//! Shapes legend: see the crate's documentation.

use model::{PackedAttention, Transformer};
use tch::{Kind, Tensor};

use crate::batch::{Batch, BlockShape, LabelledRow};
use crate::objective::{Distillation, RowLoss, cross_entropy, distillation};
use crate::parameters::Parameters;

/// What the rows learn from.
pub enum Objective<'a> {
    /// The response's own tokens: training as published.
    Tokens,
    /// The target's distribution after everything that precedes the label, from one clean forward: much less noise than single tokens,
    /// for who can hold the target beside the drafter. Clean rows learn from it too.
    Target { target: &'a Transformer },
    /// The unpruned drafter's distribution in the same slot, corrected towards the response's tokens: recovery. Clean rows learn the
    /// response's tokens.
    Unpruned { teacher: &'a Transformer, how: Distillation },
}

/// Weights and limits of the loss.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct LossSettings {
    /// λ of L = L_diff + λ · L_AR.
    pub ar_weight: f64,
    /// Rows whose logits over the vocabulary exist at a time.
    pub chunk_rows: usize,
    /// Whether a layer's activations are computed again in the backward instead of kept.
    pub recompute: bool,
}

/// What a batch's loss was, as plain numbers.
#[derive(Debug, Clone, Default, PartialEq)]
pub struct Losses {
    /// L_diff + λ · L_AR.
    pub total: f64,
    /// Σ w · loss / Σ w over block slots.
    pub diffusion: f64,
    /// Mean cross entropy of supervised clean rows.
    pub autoregressive: f64,
    /// Mean unweighted loss by draft position.
    pub diffusion_by_position: Vec<f64>,
    /// Share of block slots whose best token is the label, by draft position.
    pub accuracy_by_position: Vec<f64>,
}

/// Runs `batch` forward and backward; adds its gradient to `parameters.gradient`.
pub fn forward_backward(
    parameters: &Parameters,
    batch: &Batch,
    shape: BlockShape,
    objective: &Objective<'_>,
    settings: LossSettings,
) -> Losses {
    let _no_grad = tch::no_grad_guard();
    let model = &parameters.model;
    let device = model.device();
    let ids_t = torch::ids_tensor(&batch.ids, device);
    let positions_t = torch::index_tensor(&batch.positions, device);
    let rope = model.rope(&positions_t);
    let mut attention = PackedAttention::new(&batch.sequences, shape.pattern(), device);

    let mut hidden_td = model.embed(&ids_t);
    let mut kept = Vec::with_capacity(model.layers.len());
    for index in 0..model.layers.len() {
        let input_td = hidden_td;
        let output_td = if settings.recompute {
            model.layers[index].forward(&model.config, index, &input_td, &rope, &mut attention)
        } else {
            let leaf_td = input_td.set_requires_grad(true);
            let output_td = tch::with_grad(|| model.layers[index].forward(&model.config, index, &leaf_td, &rope, &mut attention));
            hidden_td = output_td.detach();
            kept.push((leaf_td, Some(output_td)));
            continue;
        };
        kept.push((input_td, None));
        hidden_td = output_td;
    }

    let teaching = match *objective {
        Objective::Tokens => None,
        Objective::Target { target } => {
            let (ids, positions, sequences) = batch.clean_rows();
            let mut attention = PackedAttention::new(&sequences, shape.pattern(), device);
            let hidden_td =
                target.forward(&torch::ids_tensor(&ids, device), &torch::index_tensor(&positions, device), &mut attention);
            let how = Distillation { temperature: 1.0, margin: None };
            Some(Teaching { teacher: target, hidden_td, how, row: |row| row.predictor, clean_too: true })
        }
        Objective::Unpruned { teacher, how } => {
            let hidden_td = teacher.forward(&ids_t, &positions_t, &mut attention);
            Some(Teaching { teacher, hidden_td, how, row: |row| row.row, clean_too: false })
        }
    };
    let (losses, mut gradient_td) = head(parameters, batch, &hidden_td, teaching.as_ref(), settings);

    for (index, (input_td, output_td)) in kept.into_iter().enumerate().rev() {
        let layer = &model.layers[index];
        let (input_td, output_td) = match output_td {
            Some(output_td) => (input_td, output_td),
            None => {
                let leaf_td = input_td.detach().set_requires_grad(true);
                let output_td = tch::with_grad(|| layer.forward(&model.config, index, &leaf_td, &rope, &mut attention));
                (leaf_td, output_td)
            }
        };
        let surrogate = tch::with_grad(|| (&output_td * &gradient_td).sum(output_td.kind()));
        let mut inputs = vec![&input_td];
        inputs.extend(layer.parameters());
        let gradients = Tensor::run_backward(&[surrogate], &inputs, false, false);
        for (mut total, gradient) in parameters.layer_gradients(index).into_iter().zip(&gradients[1..]) {
            let _ = total.g_add_(&gradient.reshape([-1]).to_kind(Kind::Float));
        }
        gradient_td = gradients[0].shallow_clone();
    }

    let hidden = model.config.hidden_size;
    let _ = parameters.gradient_of("model.embed_tokens.weight").view([-1, hidden]).index_add_(
        0,
        &ids_t,
        &gradient_td.to_kind(Kind::Float),
    );
    losses
}

/// A teacher and its last hidden states for the batch.
struct Teaching<'a> {
    teacher: &'a Transformer,
    hidden_td: Tensor,
    how: Distillation,
    /// Which of these states stands for a labelled row.
    row: fn(&LabelledRow) -> usize,
    /// Whether clean rows learn from it, or from their labels.
    clean_too: bool,
}

impl Teaching<'_> {
    fn loss(&self, logits_rv: &Tensor, rows: &[LabelledRow], label_r: &Tensor) -> RowLoss {
        let row_r = torch::index_tensor(&rows.iter().map(self.row).collect::<Vec<_>>(), logits_rv.device());
        distillation(logits_rv, &self.teacher.logits(&self.hidden_td.index_select(0, &row_r)), label_r, self.how)
    }
}

/// Final norm, head and loss, in chunks of rows: the losses, and the gradient with respect to the last layer's output `[T, D]`.
fn head(
    parameters: &Parameters,
    batch: &Batch,
    hidden_td: &Tensor,
    teaching: Option<&Teaching<'_>>,
    settings: LossSettings,
) -> (Losses, Tensor) {
    let model = &parameters.model;
    let gradient_td = hidden_td.zeros_like().to_kind(Kind::Float);
    let mut sums = Sums::default();
    let total_weight: f64 = batch.diffusion.iter().map(|row| row.weight).sum();
    let clean_rows = batch.autoregressive.len() as f64;
    for rows in batch.diffusion.chunks(settings.chunk_rows.max(1)) {
        let outcome = chunk(parameters, hidden_td, rows, 1.0 / total_weight, teaching, &gradient_td);
        sums.add_diffusion(rows, &outcome);
    }
    if settings.ar_weight > 0.0 {
        let teaching = teaching.filter(|teaching| teaching.clean_too);
        for rows in batch.autoregressive.chunks(settings.chunk_rows.max(1)) {
            let outcome = chunk(parameters, hidden_td, rows, settings.ar_weight / clean_rows, teaching, &gradient_td);
            sums.autoregressive += outcome.losses.iter().map(|&loss| f64::from(loss)).sum::<f64>();
        }
    }
    let diffusion = sums.diffusion / total_weight.max(f64::MIN_POSITIVE);
    let autoregressive = sums.autoregressive / clean_rows.max(1.0);
    let mean = |totals: &[f64]| totals.iter().zip(&sums.rows).map(|(total, &rows)| total / rows.max(1) as f64).collect();
    let losses = Losses {
        total: diffusion + settings.ar_weight * autoregressive,
        diffusion,
        autoregressive,
        diffusion_by_position: mean(&sums.by_position),
        accuracy_by_position: mean(&sums.right),
    };
    (losses, gradient_td.to_kind(model.kind()))
}

/// What one chunk of rows gave, read back.
struct ChunkOutcome {
    losses: Vec<f32>,
    best: Vec<u32>,
}

/// One chunk: logits, the loss of each row, and the gradients of head, norm and hidden rows, each row weighted by `scale · weight`.
fn chunk(
    parameters: &Parameters,
    hidden_td: &Tensor,
    rows: &[LabelledRow],
    scale: f64,
    teaching: Option<&Teaching<'_>>,
    gradient_td: &Tensor,
) -> ChunkOutcome {
    let model = &parameters.model;
    let device = model.device();
    let row_r = torch::index_tensor(&rows.iter().map(|row| row.row).collect::<Vec<_>>(), device);
    let label_r = torch::ids_tensor(&rows.iter().map(|row| row.label).collect::<Vec<_>>(), device);
    let weights: Vec<f32> = rows.iter().map(|row| (row.weight * scale) as f32).collect();
    let weight_r1 = Tensor::from_slice(&weights).to_device(device).unsqueeze(1);

    let hidden_rd = hidden_td.index_select(0, &row_r).set_requires_grad(true);
    let normed_rd = tch::with_grad(|| model.final_norm(&hidden_rd));
    let logits_rv = normed_rd.detach().matmul(&model.head().detach().transpose(0, 1)).to_kind(Kind::Float);
    let RowLoss { loss_r, gradient_rv } = match teaching {
        Some(teaching) => teaching.loss(&logits_rv, rows, &label_r),
        None => cross_entropy(&logits_rv, &label_r),
    };
    let gradient_rv = (gradient_rv * weight_r1).to_kind(model.kind());
    let outcome = ChunkOutcome { losses: torch::to_f32s(&loss_r), best: torch::to_ids(&logits_rv.argmax(-1, false)) };
    drop(logits_rv);

    let head_name = if model.lm_head.is_some() { "lm_head.weight" } else { "model.embed_tokens.weight" };
    let head_gradient_vd = gradient_rv.transpose(0, 1).matmul(&normed_rd.detach());
    let _ = parameters.gradient_of(head_name).g_add_(&head_gradient_vd.reshape([-1]).to_kind(Kind::Float));
    let normed_gradient_rd = gradient_rv.matmul(&model.head().detach());
    let surrogate = tch::with_grad(|| (&normed_rd * &normed_gradient_rd).sum(normed_rd.kind()));
    let gradients = Tensor::run_backward(&[surrogate], &[&hidden_rd, &model.norm], false, false);
    let _ = parameters.gradient_of("model.norm.weight").g_add_(&gradients[1].to_kind(Kind::Float));
    let _ = gradient_td.shallow_clone().index_add_(0, &row_r, &gradients[0].to_kind(Kind::Float));
    outcome
}

/// Running sums over chunks.
#[derive(Default)]
struct Sums {
    diffusion: f64,
    autoregressive: f64,
    by_position: Vec<f64>,
    right: Vec<f64>,
    rows: Vec<usize>,
}

impl Sums {
    fn add_diffusion(&mut self, rows: &[LabelledRow], outcome: &ChunkOutcome) {
        for ((row, &loss), &best) in rows.iter().zip(&outcome.losses).zip(&outcome.best) {
            if self.rows.len() <= row.draft {
                self.rows.resize(row.draft + 1, 0);
                self.by_position.resize(row.draft + 1, 0.0);
                self.right.resize(row.draft + 1, 0.0);
            }
            self.diffusion += row.weight * f64::from(loss);
            self.by_position[row.draft] += f64::from(loss);
            self.right[row.draft] += f64::from(u8::from(best == row.label));
            self.rows[row.draft] += 1;
        }
    }
}
