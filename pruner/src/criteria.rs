//! Other criteria than τ for which layer goes, so that one can see what choosing by τ buys (ALGORITHMS §7): how little a layer turns its
//! input (block influence, <https://arxiv.org/abs/2403.03853>), and what the drafter loses as a language model without it
//! (<https://arxiv.org/abs/2402.09025>). Neither asks what the layer does for the drafts.

use std::ops::ControlFlow;

use configs::Criterion;
use model::Transformer;
use serde::{Deserialize, Serialize};
use tch::{Kind, Tensor};
use trainer::objective::log_probability;

use crate::search::{Blocks, CHUNK_ROWS, Run};

/// What some responses say of every layer: the lower, the better it can be spared.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct Weighed {
    /// By layer; means over the rows.
    pub scores: Vec<f64>,
    pub rows: usize,
}

/// The mean over all parts, each with as much weight as it has rows.
pub fn mean_scores(parts: &[Weighed]) -> Vec<f64> {
    let rows: usize = parts.iter().map(|part| part.rows).sum();
    let layers = parts.first().map_or(0, |part| part.scores.len());
    let mean = |layer: usize| parts.iter().map(|part| part.scores[layer] * part.rows as f64).sum::<f64>() / rows.max(1) as f64;
    (0..layers).map(mean).collect()
}

/// The layer of the lowest score, the first of equals.
pub fn least(scores: &[f64]) -> usize {
    (0..scores.len()).min_by(|&one, &other| scores[one].total_cmp(&scores[other])).unwrap_or(0)
}

/// Weighs every layer by `criterion`, one part of the responses at a time from the one of number `first` on; what `on_part` says decides
/// whether to go on.
pub fn weigh(
    model: &Transformer,
    blocks: &Blocks,
    criterion: Criterion,
    first: usize,
    on_part: &mut dyn FnMut(Weighed) -> ControlFlow<()>,
) {
    let _no_grad = tch::no_grad_guard();
    for run in blocks.runs(model, first) {
        let hidden = run.all_layers();
        let part = match criterion {
            Criterion::LanguageModelLoss => loss_without_each(model, &run, &hidden),
            Criterion::Tau | Criterion::BlockInfluence => influence(&hidden),
        };
        if on_part(part).is_break() {
            return;
        }
    }
}

/// 1 less the mean cosine of each layer's input and output.
fn influence(hidden: &[Tensor]) -> Weighed {
    let turned = |pair: &[Tensor]| {
        let [input_td, output_td] = [&pair[0], &pair[1]].map(|it| it.to_kind(Kind::Float));
        1.0 - Tensor::cosine_similarity(&input_td, &output_td, -1, 1e-8).mean(Kind::Double).double_value(&[])
    };
    Weighed { scores: hidden.windows(2).map(turned).collect(), rows: hidden[0].size()[0] as usize }
}

/// By how much the mean loss of the response tokens rises without each layer.
fn loss_without_each(model: &Transformer, run: &Run<'_>, hidden: &[Tensor]) -> Weighed {
    let rows = &run.batch().autoregressive;
    let row_r = torch::index_tensor(&rows.iter().map(|row| row.row).collect::<Vec<_>>(), model.device());
    let label_r = torch::ids_tensor(&rows.iter().map(|row| row.label).collect::<Vec<_>>(), model.device());
    let count = rows.len();
    let loss = |last_td: &Tensor| {
        let kept_rd = last_td.index_select(0, &row_r);
        let chunks = (0..count as i64).step_by(CHUNK_ROWS as usize);
        let sums = chunks.map(|start| {
            let length = CHUNK_ROWS.min(count as i64 - start);
            let logits_rv = model.logits(&kept_rd.narrow(0, start, length));
            -log_probability(&logits_rv, &label_r.narrow(0, start, length)).sum(Kind::Double).double_value(&[])
        });
        sums.sum::<f64>() / count.max(1) as f64
    };
    let all = model.layers.len();
    let with = loss(&hidden[all]);
    let without = |layer: usize| loss(&run.layers(layer + 1..all, hidden[layer].shallow_clone())) - with;
    Weighed { scores: (0..all).map(without).collect(), rows: count }
}
