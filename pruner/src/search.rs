//! What each layer is worth: τ with it and without it, on the same held-out blocks.
//!
//! Two things make this cheaper than a plain loop over layers. A candidate without layer l shares everything below l with the full
//! drafter, so each starts from the hidden states kept at l: half of the work. And candidates that cannot be the best any more are dropped
//! on the way (successive halving, <https://arxiv.org/abs/1502.07943>): each time the number of responses has doubled, those whose τ is
//! below the best candidate's by more than twice what the interval of that difference, paired by response, reaches down.

use std::ops::ControlFlow;

use data::supervision::{Example, counter_generator, draw_anchors, purpose};
use evaluator::bootstrap::interval;
use model::{PackedAttention, Transformer};
use serde::{Deserialize, Serialize};
use tch::Tensor;
use trainer::batch::{Batch, BlockShape};

use crate::ledger::TauLoss;

/// Responses that go through the drafter together.
const BATCH: usize = 8;

/// Rows whose logits are there at once.
pub(crate) const CHUNK_ROWS: i64 = 256;

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
pub type Committed = Vec<(usize, usize)>;

/// What some responses' blocks gave, with all layers and without each that is still in the running.
#[derive(Debug, Clone, PartialEq, Default, Serialize, Deserialize)]
pub struct Part {
    pub with: Committed,
    /// By layer, ascending.
    pub without: Vec<(usize, Committed)>,
}

/// All parts so far, put together. A candidate that was dropped has fewer responses than the others.
#[derive(Debug, Clone, PartialEq, Default)]
pub struct Counted {
    parts: Vec<Part>,
    /// A layer that is no candidate.
    spared: Option<usize>,
}

impl Counted {
    /// What an earlier start counted, part by part.
    pub fn new(parts: Vec<Part>) -> Self {
        Self { parts, spared: None }
    }

    /// Nothing yet, in a search in which one layer is no candidate.
    pub fn sparing(layer: Option<usize>) -> Self {
        Self { parts: Vec::new(), spared: layer }
    }

    /// Parts that are known; a part is one batch of responses.
    pub fn parts(&self) -> usize {
        self.parts.len()
    }

    /// Candidates that each part was for.
    pub fn running_by_part(&self) -> Vec<usize> {
        self.parts.iter().map(|part| part.without.len()).collect()
    }

    fn with(&self) -> Committed {
        self.parts.iter().flat_map(|part| &part.with).copied().collect()
    }

    fn without(&self, layer: usize) -> Committed {
        let of_layer = |part: &'_ Part| part.without.iter().find(|(found, _)| *found == layer).map(|(_, counts)| counts.clone());
        self.parts.iter().filter_map(of_layer).flatten().collect()
    }

    /// The candidates that the next part is for. Nothing but the counts decides, so a start that goes on here decides alike.
    pub fn running(&self, depth: usize, seed: u64) -> Vec<usize> {
        let Some(last) = self.parts.last() else { return self.candidates(depth).collect() };
        let running: Vec<usize> = last.without.iter().map(|(layer, _)| *layer).collect();
        if !self.parts.len().is_power_of_two() {
            return running;
        }
        let counts: Vec<Committed> = running.iter().map(|&layer| self.without(layer)).collect();
        let Some(best) = counts.iter().max_by(|one, other| tau(total(one)).total_cmp(&tau(total(other)))) else { return running };
        let could_be_best = |layer: usize, counts: &Committed| {
            let behind = |picked: &[usize]| of_picked(best, picked) - of_picked(counts, picked);
            let generator = counter_generator(seed, purpose::BOOTSTRAP, depth as u64, layer as u64);
            let (low, _) = interval(counts.len(), generator, behind);
            let all: Vec<usize> = (0..counts.len()).collect();
            let by = behind(&all);
            by - 2.0 * (by - low) <= 0.0
        };
        running.iter().zip(&counts).filter(|(layer, counts)| could_be_best(**layer, counts)).map(|(layer, _)| *layer).collect()
    }

    /// The loss of every candidate on the responses that it was measured on.
    pub fn losses(&self, depth: usize, seed: u64) -> Vec<TauLoss> {
        let with = self.with();
        let loss = |layer: usize| {
            let without = self.without(layer);
            tau_loss(depth, layer, &with[..without.len()], &without, seed)
        };
        self.candidates(depth).map(loss).collect()
    }

    fn candidates(&self, depth: usize) -> impl Iterator<Item = usize> {
        (0..depth).filter(|&layer| Some(layer) != self.spared)
    }
}

/// What a search tells while it works.
pub enum Counting<'a> {
    /// So many of the candidates that are still in the running have been counted in this part.
    Candidates { part: usize, done: usize, running: usize },
    /// A part is done.
    Part(&'a Part),
}

/// Measures what is missing in `counted`, one part at a time; what `on_counting` says after a part decides whether to go on.
///
/// A batch's hidden states at every layer are kept meanwhile: `(layers + 1) · rows · hidden` values.
pub fn count(
    model: &Transformer,
    blocks: &Blocks,
    counted: &mut Counted,
    seed: u64,
    on_counting: &mut dyn FnMut(Counting<'_>) -> ControlFlow<()>,
) {
    let _no_grad = tch::no_grad_guard();
    let all = model.layers.len();
    for (part, prepared) in blocks.batches.iter().enumerate().skip(counted.parts()) {
        let run = Run::new(model, prepared, blocks.shape);
        let kept = run.all_layers();
        let running = counted.running(all, seed);
        let mut found = Part { with: run.committed(&kept[all]), without: Vec::with_capacity(running.len()) };
        for (done, &layer) in running.iter().enumerate() {
            found.without.push((layer, run.committed(&run.layers(layer + 1..all, kept[layer].shallow_clone()))));
            let _ = on_counting(Counting::Candidates { part, done: done + 1, running: running.len() });
        }
        let goes_on = on_counting(Counting::Part(&found));
        counted.parts.push(found);
        if goes_on.is_break() {
            return;
        }
    }
}

/// Rows through layers: what a search computed, and what a plain loop over the same blocks would have.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub struct Cost {
    pub token_layers: usize,
    pub plain_token_layers: usize,
}

impl Blocks {
    /// Batches that the responses are measured in.
    pub fn parts(&self) -> usize {
        self.batches.len()
    }

    /// Every batch from the one of this number on, ready to go through `model`.
    pub(crate) fn runs<'a>(&'a self, model: &'a Transformer, first: usize) -> impl Iterator<Item = Run<'a>> {
        self.batches.iter().skip(first).map(move |prepared| Run::new(model, prepared, self.shape))
    }

    /// What these counts of a drafter of `depth` layers took.
    pub fn cost(&self, counted: &Counted, depth: usize) -> Cost {
        let mut cost = Cost { token_layers: 0, plain_token_layers: 0 };
        for (prepared, part) in self.batches.iter().zip(&counted.parts) {
            let rows = prepared.batch.ids.len();
            cost.token_layers += rows * (depth + part.without.iter().map(|(layer, _)| depth - 1 - layer).sum::<usize>());
            cost.plain_token_layers += rows * (depth + depth * (depth - 1));
        }
        cost
    }
}

/// What every response's blocks commit under one model, by a whole forward: a plain search is this for every candidate.
pub fn committed(model: &Transformer, blocks: &Blocks) -> Committed {
    let _no_grad = tch::no_grad_guard();
    let of_run = |run: Run<'_>| {
        let embedded = model.embed(&torch::ids_tensor(&run.prepared.batch.ids, model.device()));
        run.committed(&run.layers(0..model.layers.len(), embedded))
    };
    blocks.runs(model, 0).flat_map(of_run).collect()
}

/// One batch and what its forwards need.
pub(crate) struct Run<'a> {
    model: &'a Transformer,
    prepared: &'a Prepared,
    shape: BlockShape,
    rope: model::rope::Rope,
    attention: std::cell::RefCell<PackedAttention>,
}

impl<'a> Run<'a> {
    fn new(model: &'a Transformer, prepared: &'a Prepared, shape: BlockShape) -> Self {
        let batch = &prepared.batch;
        let rope = model.rope(&torch::index_tensor(&batch.positions, model.device()));
        let attention = PackedAttention::new(&batch.sequences, shape.pattern(), model.device());
        Self { model, prepared, shape, rope, attention: attention.into() }
    }

    pub(crate) fn batch(&self) -> &'a Batch {
        &self.prepared.batch
    }

    /// The hidden states (rows, hidden) before every layer, and those behind the last.
    pub(crate) fn all_layers(&self) -> Vec<Tensor> {
        let mut kept = vec![self.model.embed(&torch::ids_tensor(&self.prepared.batch.ids, self.model.device()))];
        for index in 0..self.model.layers.len() {
            kept.push(self.layers(index..index + 1, kept[index].shallow_clone()));
        }
        kept
    }

    pub(crate) fn layers(&self, range: std::ops::Range<usize>, hidden_td: Tensor) -> Tensor {
        self.model.forward_layers(range, hidden_td, &self.rope, &mut *self.attention.borrow_mut())
    }

    /// Drafts all blocks from the last hidden states and counts what their responses would have committed.
    fn committed(&self, hidden_td: &Tensor) -> Committed {
        let verified = self.shape.block_size - 1;
        // The last draft of `next` is a guess of the bonus token, which is not verified.
        let rows: Vec<_> = self.prepared.batch.diffusion.iter().filter(|row| row.draft < verified).collect();
        let row_r = torch::index_tensor(&rows.iter().map(|row| row.row).collect::<Vec<_>>(), hidden_td.device());
        let kept_rd = hidden_td.index_select(0, &row_r);
        let best = kept_rd.split(CHUNK_ROWS, 0).into_iter().flat_map(|rows_rd| {
            // The logits of a large vocabulary take more room than all hidden states.
            torch::to_ids(&self.model.logits(&rows_rd).argmax(-1, false))
        });
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

fn tau((committed, blocks): (usize, usize)) -> f64 {
    committed as f64 / blocks.max(1) as f64
}

fn sum(sum: (usize, usize), each: (usize, usize)) -> (usize, usize) {
    (sum.0 + each.0, sum.1 + each.1)
}

fn total(all: &[(usize, usize)]) -> (usize, usize) {
    all.iter().copied().fold((0, 0), sum)
}

/// τ of the responses picked.
fn of_picked(all: &[(usize, usize)], picked: &[usize]) -> f64 {
    tau(picked.iter().map(|&index| all[index]).fold((0, 0), sum))
}

/// The loss and its interval by resampling responses, with and without the layer on the same ones.
pub(crate) fn tau_loss(depth: usize, layer: usize, with: &[(usize, usize)], without: &[(usize, usize)], seed: u64) -> TauLoss {
    let generator = counter_generator(seed, purpose::BOOTSTRAP, depth as u64, layer as u64);
    let (low, high) = interval(with.len(), generator, |picked| of_picked(with, picked) - of_picked(without, picked));
    let (tau_with, tau_without) = (tau(total(with)), tau(total(without)));
    let blocks = total(with).1;
    TauLoss { depth, layer, tau_with, tau_without, tau_loss: tau_with - tau_without, low, high, blocks }
}
