//! What each layer is worth: τ with it and without it, on the same held-out blocks.
//!
//! A candidate without layer l shares everything below l with the full drafter, so each starts from the hidden states kept at l: half
//! of the plain loop's work.

use data::supervision::{Example, counter_generator, draw_anchors, purpose};
use evaluator::bootstrap::interval;
use model::{PackedAttention, Transformer};
use tch::Tensor;
use trainer::batch::{Batch, BlockShape};

use crate::ledger::TauLoss;

/// Responses that go through the drafter together.
const BATCH: usize = 8;

/// The held-out blocks that every candidate drafts.
pub struct Blocks {
    batches: Vec<Prepared>,
    shape: BlockShape,
}

struct Prepared {
    batch: Batch,
    /// By block: how many tokens follow its anchor in the response.
    left: Vec<usize>,
    /// By response: how many blocks it has.
    blocks_of: Vec<usize>,
}

impl Blocks {
    /// Draws the same `anchors` blocks of each response for every candidate, by counter.
    pub fn draw(examples: &[Example], shape: BlockShape, anchors: usize, seed: u64) -> Self {
        let drawn = |(index, example)| (example, draw_anchors(example, anchors, seed, 0, index as u64));
        let responses: Vec<(&Example, Vec<usize>)> = examples.iter().enumerate().map(drawn).collect();
        let batches = responses
            .chunks(BATCH)
            .map(|responses| {
                let left = |(example, anchors): &(&Example, Vec<usize>)| {
                    anchors.iter().map(|anchor| example.ids.len() - 1 - anchor).collect::<Vec<_>>()
                };
                Prepared {
                    batch: Batch::pack(responses, shape, 1.0),
                    left: responses.iter().flat_map(left).collect(),
                    blocks_of: responses.iter().map(|(_, anchors)| anchors.len()).collect(),
                }
            })
            .collect();
        Self { batches, shape }
    }
}

/// Tokens committed and blocks drafted, by response.
type Committed = Vec<(usize, usize)>;

/// Measures the layers in `layers`; `on_layer` gets each as soon as it is known and says whether to go on.
///
/// All batches' hidden states at every layer are kept meanwhile: `(layers + 1) · rows · hidden` values.
pub fn tau_losses(
    model: &Transformer,
    blocks: &Blocks,
    layers: &[usize],
    seed: u64,
    on_layer: &mut dyn FnMut(TauLoss) -> std::ops::ControlFlow<()>,
) {
    let _no_grad = tch::no_grad_guard();
    let runs: Vec<Run<'_>> = blocks.batches.iter().map(|prepared| Run::new(model, prepared, blocks.shape)).collect();
    let mut states: Vec<Vec<Tensor>> = Vec::new();
    for run in &runs {
        let ids_t = torch::ids_tensor(&run.prepared.batch.ids, model.device());
        let mut kept = vec![model.embed(&ids_t)];
        for index in 0..model.layers.len() {
            kept.push(run.layers(index..index + 1, kept[index].shallow_clone()));
        }
        states.push(kept);
    }
    let all = model.layers.len();
    let with: Committed = runs.iter().zip(&states).flat_map(|(run, kept)| run.committed(&kept[all])).collect();
    for &layer in layers {
        let without: Committed = runs
            .iter()
            .zip(&states)
            .flat_map(|(run, kept)| run.committed(&run.layers(layer + 1..all, kept[layer].shallow_clone())))
            .collect();
        if on_layer(tau_loss(all, layer, &with, &without, seed)).is_break() {
            return;
        }
    }
}

/// One batch and what its forwards need.
struct Run<'a> {
    model: &'a Transformer,
    prepared: &'a Prepared,
    shape: BlockShape,
    rope: model::transformer::Rope,
    attention: std::cell::RefCell<PackedAttention>,
}

impl<'a> Run<'a> {
    fn new(model: &'a Transformer, prepared: &'a Prepared, shape: BlockShape) -> Self {
        let batch = &prepared.batch;
        let rope = model.rope(&torch::index_tensor(&batch.positions, model.device()));
        let attention = PackedAttention::new(&batch.sequences, shape.pattern(), model.device());
        Self { model, prepared, shape, rope, attention: attention.into() }
    }

    fn layers(&self, range: std::ops::Range<usize>, hidden_td: Tensor) -> Tensor {
        self.model.forward_layers(range, hidden_td, &self.rope, &mut *self.attention.borrow_mut())
    }

    /// Drafts all blocks from the last hidden states and counts what their responses would have committed.
    fn committed(&self, hidden_td: &Tensor) -> Committed {
        let verified = self.shape.block_size - 1;
        // The last draft of `next` is a guess of the bonus token, which is not verified.
        let rows: Vec<_> = self.prepared.batch.diffusion.iter().filter(|row| row.draft < verified).collect();
        let row_r = torch::index_tensor(&rows.iter().map(|row| row.row).collect::<Vec<_>>(), hidden_td.device());
        let best = torch::to_ids(&self.model.logits(&hidden_td.index_select(0, &row_r)).argmax(-1, false));
        // Rows come block by block, drafts ascending: a block begins at draft 0 and every block has one.
        let mut accepted: Vec<usize> = Vec::with_capacity(self.prepared.left.len());
        for (row, best) in rows.iter().zip(best) {
            if row.draft == 0 {
                accepted.push(0);
            }
            if let Some(leading) = accepted.last_mut()
                && *leading == row.draft
                && best == row.label
            {
                *leading += 1;
            }
        }
        let mut blocks = accepted.iter().zip(&self.prepared.left).map(|(&accepted, &left)| (accepted + 1).min(left));
        self.prepared.blocks_of.iter().map(|&count| (blocks.by_ref().take(count).sum(), count)).collect()
    }
}

/// The loss and its interval by resampling responses, with and without the layer on the same ones.
fn tau_loss(depth: usize, layer: usize, with: &Committed, without: &Committed, seed: u64) -> TauLoss {
    let tau = |sums: (usize, usize)| sums.0 as f64 / sums.1.max(1) as f64;
    let total = |all: &Committed| all.iter().fold((0, 0), |sum, each| (sum.0 + each.0, sum.1 + each.1));
    let of_picked = |all: &Committed, picked: &[usize]| {
        tau(picked.iter().fold((0, 0), |sum, &index| (sum.0 + all[index].0, sum.1 + all[index].1)))
    };
    let generator = counter_generator(seed, purpose::BOOTSTRAP, depth as u64, layer as u64);
    let (low, high) = interval(with.len(), generator, |picked| of_picked(with, picked) - of_picked(without, picked));
    let (tau_with, tau_without) = (tau(total(with)), tau(total(without)));
    let blocks = total(with).1;
    TauLoss { depth, layer, tau_with, tau_without, tau_loss: tau_with - tau_without, low, high, blocks }
}
