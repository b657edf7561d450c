//! The trainable parameters, each rank holding its share: f32 masters in one flat tensor, gathered unit by unit to compute with.
//!
//! A unit is what is needed at one time: the embedding, a layer, the final norm, the untied head. Each unit is cut into as many equal
//! slices as there are ranks (the last padded with zeros), and rank r holds slice r of every unit, so masters, gradients and moments fall
//! as 1 / ranks, and at most two units are whole at a time. This is stage 3 of ZeRO (arXiv 1910.02054), by layer.
//! With one rank a gathered unit in f32 is a view of the masters, and nothing is copied.

use std::ops::Range;

use model::rope::Rotary;
use model::transformer::Layer;
use model::{ModelConfig, Transformer};
use tch::{Device, Kind, Tensor};
use torch::group::{Group, GroupError, Pending};

/// The unit of the embedding; layer `index` is unit `index + 1`, then come the final norm and the untied head.
pub const EMBEDDING: usize = 0;

/// A model in training.
pub struct Parameters<'g> {
    pub config: ModelConfig,
    /// What forward and backward compute in.
    pub kind: Kind,
    /// This rank's slices of all units, one after the other, f32.
    pub master: Tensor,
    pub rotary: Rotary,
    pub group: &'g Group,
    units: Vec<Unit>,
}

struct Unit {
    parameters: Vec<Parameter>,
    /// Values of the whole unit.
    length: i64,
    /// Values of a slice, padding included.
    slice: i64,
    /// Where this rank's slice begins in its flat tensors.
    start: i64,
}

impl Unit {
    /// The values of the unit that `rank` holds, padding included.
    fn slice_of(&self, rank: usize) -> Range<i64> {
        let first = rank as i64 * self.slice;
        first..first + self.slice
    }

    /// Where the part of the unit's `range` that `rank` holds lies in its flat tensors.
    fn held(&self, rank: usize, range: &Range<i64>) -> Option<Range<i64>> {
        let slice = self.slice_of(rank);
        let (start, end) = (range.start.max(slice.start), range.end.min(slice.end));
        (start < end).then(|| start - slice.start + self.start..end - slice.start + self.start)
    }
}

struct Parameter {
    shape: Vec<i64>,
    /// Within the unit.
    range: Range<i64>,
}

/// A stretch of a rank's flat tensors that the optimiser treats alike.
#[derive(Debug, Clone, PartialEq)]
pub struct Stretch {
    pub range: Range<i64>,
    /// Whether weight decay applies: to matrices, not to norms and biases.
    pub decayed: bool,
    /// Whether this is the embedding of the boosted token.
    pub boosted: bool,
}

/// A unit on its way from all ranks.
pub struct Gathering {
    pending: Pending,
    length: i64,
}

impl Gathering {
    /// The unit's values `[length]` in the compute kind, for reading only: they may be the masters themselves.
    pub fn wait(self) -> Result<Tensor, GroupError> {
        Ok(self.pending.wait()?.narrow(0, 0, self.length))
    }
}

impl<'g> Parameters<'g> {
    /// Takes this rank's share of a model's weights onto `device`, to be computed with in `kind`.
    pub fn new(model: &Transformer, kind: Kind, device: Device, group: &'g Group) -> Self {
        let _guard = tch::no_grad_guard();
        let units = units(&model.config, group.world());
        let share = units.iter().map(|unit| unit.slice).sum::<i64>();
        let master = Tensor::zeros([share], (Kind::Float, device));
        let mut named = model.named_parameters().into_iter();
        for unit in &units {
            let slice = unit.slice_of(group.rank());
            for (parameter, (_, tensor)) in unit.parameters.iter().zip(named.by_ref()) {
                // Straight into place: a whole copy beside the masters would be the largest memory of a whole run.
                let Some(held) = unit.held(group.rank(), &parameter.range) else { continue };
                let (first, count) = (held.start - unit.start + slice.start - parameter.range.start, held.end - held.start);
                master.narrow(0, held.start, count).copy_(&tensor.reshape([-1]).narrow(0, first, count));
            }
        }
        let rotary = Rotary::new(&model.config, device);
        Self { config: model.config.clone(), kind, master, rotary, group, units }
    }

    pub fn device(&self) -> Device {
        self.master.device()
    }

    /// The unit of layer `index`.
    pub fn layer_unit(&self, index: usize) -> usize {
        index + 1
    }

    /// The unit of the final norm.
    pub fn norm_unit(&self) -> usize {
        self.config.num_hidden_layers + 1
    }

    /// The unit of the head, which is the embedding's when tied.
    pub fn head_unit(&self) -> usize {
        if self.config.tie_word_embeddings { EMBEDDING } else { self.config.num_hidden_layers + 2 }
    }

    /// Starts to gather a unit from all ranks; what is computed until it is waited for overlaps with it.
    pub fn start_gather(&self, unit: usize) -> Result<Gathering, GroupError> {
        let _guard = tch::no_grad_guard();
        let Unit { length, slice, start, .. } = self.units[unit];
        let pending = self.group.start_all_gather(&self.master.narrow(0, start, slice).to_kind(self.kind))?;
        Ok(Gathering { pending, length })
    }

    /// Gathers a unit of one matrix or vector, in its shape.
    pub fn gather_only(&self, unit: usize) -> Result<Tensor, GroupError> {
        let flat = self.start_gather(unit)?.wait()?;
        Ok(flat.view(self.units[unit].parameters[0].shape.as_slice()))
    }

    /// A gathered layer's parameters as leaves that take gradients.
    pub fn layer_of(&self, index: usize, flat: &Tensor) -> Layer {
        let mut views = self.views(self.layer_unit(index), flat).into_iter();
        let mut next =
            || Ok::<Tensor, std::convert::Infallible>(views.next().unwrap_or_default().detach().set_requires_grad(true));
        match Layer::from_source(&self.config, &mut next) {
            Ok(layer) => layer,
            Err(never) => match never {},
        }
    }

    /// The whole model in the compute kind, for drafting and saving. Every rank takes part; those that do not `keep` it get nothing, and need
    /// room for one unit only.
    pub fn whole_model(&self, keep: bool) -> Result<Option<Transformer>, GroupError> {
        let _guard = tch::no_grad_guard();
        let mut tensors = Vec::new();
        for unit in 0..self.units.len() {
            let flat = self.start_gather(unit)?.wait()?;
            if keep {
                tensors.extend(self.views(unit, &flat));
            }
        }
        let mut tensors = tensors.into_iter();
        keep.then(|| Transformer::from_source(self.config.clone(), |_, _| Ok(tensors.next().unwrap_or_default()))).transpose()
    }

    /// A gradient of nothing yet: f32, this rank's slices.
    pub fn zero_gradient(&self) -> Tensor {
        self.master.zeros_like()
    }

    /// Where the gradient of a whole unit is summed up, `[length]` f32: `gradient` itself when there is one rank.
    pub fn open_gradient(&self, unit: usize, gradient: &Tensor) -> UnitGradient {
        let Unit { slice, start, .. } = self.units[unit];
        let whole = if self.group.is_alone() {
            gradient.narrow(0, start, slice)
        } else {
            Tensor::zeros([slice * self.group.world() as i64], (Kind::Float, self.device()))
        };
        UnitGradient { unit, whole }
    }

    /// The shares of a unit's gradient by parameter, to be added to.
    pub fn gradient_views(&self, open: &UnitGradient) -> Vec<Tensor> {
        self.views(open.unit, &open.whole)
    }

    /// Sums a unit's gradient over the ranks and adds this rank's slice to `gradient`.
    pub fn close_gradient(&self, open: UnitGradient, gradient: &Tensor) -> Result<(), GroupError> {
        if !self.group.is_alone() {
            let Unit { slice, start, .. } = self.units[open.unit];
            let sum = self.group.reduce_scatter(&open.whole)?;
            let _ = gradient.narrow(0, start, slice).g_add_(&sum);
        }
        Ok(())
    }

    fn views(&self, unit: usize, flat: &Tensor) -> Vec<Tensor> {
        let parameters = self.units[unit].parameters.iter();
        parameters.map(|it| flat.narrow(0, it.range.start, it.range.end - it.range.start).view(it.shape.as_slice())).collect()
    }

    /// How the optimiser is to treat this rank's values; padding is in no stretch. `boosted` is the token with a learning rate of its own.
    pub fn stretches(&self, boosted: u32) -> Vec<Stretch> {
        stretches(&self.units, self.group.rank(), self.config.hidden_size, boosted)
    }

    /// What this rank has to read of the flat tensors that `ranks` ranks wrote, in the order of its own.
    pub fn pieces_from(&self, ranks: usize) -> Vec<Piece> {
        pieces(&self.units, self.group.rank(), &units(&self.config, ranks), ranks)
    }

    /// Values that each of `ranks` ranks holds.
    pub fn share_of(&self, ranks: usize) -> i64 {
        units(&self.config, ranks).iter().map(|unit| unit.slice).sum()
    }
}

/// The gradient of a whole unit while it is being summed up.
pub struct UnitGradient {
    unit: usize,
    /// `[length or more]`, f32.
    whole: Tensor,
}

/// A part of a rank's flat tensors, as it is found in what other ranks wrote.
#[derive(Debug, Clone, PartialEq)]
pub enum Piece {
    Stored {
        rank: usize,
        range: Range<i64>,
    },
    /// So many zeros.
    Padding(i64),
}

/// The stretches of what `rank` holds, neighbours of a kind joined.
fn stretches(units: &[Unit], rank: usize, hidden: i64, boosted: u32) -> Vec<Stretch> {
    let row = i64::from(boosted) * hidden..(i64::from(boosted) + 1) * hidden;
    let mut stretches: Vec<Stretch> = Vec::new();
    for (index, unit) in units.iter().enumerate() {
        for Parameter { shape, range } in &unit.parameters {
            let pieces = if index == EMBEDDING {
                vec![(0..row.start, false), (row.clone(), true), (row.end..range.end, false)]
            } else {
                vec![(range.clone(), false)]
            };
            for (piece, boosted) in pieces {
                let Some(range) = unit.held(rank, &piece) else { continue };
                let decayed = shape.len() > 1;
                match stretches.last_mut() {
                    Some(last) if last.range.end == range.start && (last.decayed, last.boosted) == (decayed, boosted) => {
                        last.range.end = range.end;
                    }
                    _ => stretches.push(Stretch { range, decayed, boosted }),
                }
            }
        }
    }
    stretches
}

/// Where the slices of `rank` lie in what `ranks` ranks wrote, whose units are cut as `theirs`.
fn pieces(units: &[Unit], rank: usize, theirs: &[Unit], ranks: usize) -> Vec<Piece> {
    let mut pieces = Vec::new();
    for (unit, their) in units.iter().zip(theirs) {
        let slice = unit.slice_of(rank);
        let mut at = slice.start;
        while at < slice.end {
            let writer = at / their.slice;
            let end = slice.end.min((writer + 1) * their.slice);
            if writer < ranks as i64 {
                let offset = their.start - writer * their.slice;
                pieces.push(Piece::Stored { rank: writer as usize, range: at + offset..end + offset });
            } else {
                pieces.push(Piece::Padding(end - at));
            }
            at = end;
        }
    }
    pieces
}

/// The units of a model, cut for `world` ranks.
fn units(config: &ModelConfig, world: usize) -> Vec<Unit> {
    let mut shapes = config.parameter_shapes().into_iter();
    let mut counts = vec![1];
    counts.extend(std::iter::repeat_n(config.layer_shapes().len(), config.num_hidden_layers));
    counts.extend([1].iter().chain((!config.tie_word_embeddings).then_some(&1)));
    let mut start = 0;
    let mut units = Vec::with_capacity(counts.len());
    for count in counts {
        let mut length = 0;
        let parameters = shapes
            .by_ref()
            .take(count)
            .map(|(_, shape)| {
                let first = length;
                length += shape.iter().product::<i64>();
                Parameter { shape, range: first..length }
            })
            .collect();
        let slice = (length + world as i64 - 1) / world as i64;
        units.push(Unit { parameters, length, slice, start });
        start += slice;
    }
    units
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]
    use super::*;

    fn config() -> ModelConfig {
        // Sizes that few numbers of ranks divide.
        let json = serde_json::json!({"model_type": "qwen3", "hidden_size": 6, "intermediate_size": 7, "num_hidden_layers": 2,
            "num_attention_heads": 3, "num_key_value_heads": 1, "head_dim": 2, "vocab_size": 11, "tie_word_embeddings": false,
            "attention_bias": true});
        ModelConfig::from_json(&json).unwrap()
    }

    /// What each rank holds when value `i` of the model is `i + 1` and padding is 0.
    fn shares(units: &[Unit], ranks: usize) -> Vec<Vec<i64>> {
        let share = |rank: usize| {
            let mut before = 0;
            let mut held = Vec::new();
            for unit in units {
                held.extend(unit.slice_of(rank).map(|at| if at < unit.length { before + at + 1 } else { 0 }));
                before += unit.length;
            }
            held
        };
        (0..ranks).map(share).collect()
    }

    #[test]
    fn what_any_number_of_ranks_wrote_is_read_by_any_other() {
        let config = config();
        for (writers, readers) in (1..8).flat_map(|writers| (1..8).map(move |readers| (writers, readers))) {
            let (theirs, ours) = (units(&config, writers), units(&config, readers));
            let (written, expected) = (shares(&theirs, writers), shares(&ours, readers));
            for (rank, expected) in expected.iter().enumerate() {
                let read: Vec<i64> = pieces(&ours, rank, &theirs, writers)
                    .into_iter()
                    .flat_map(|piece| match piece {
                        Piece::Stored { rank, range } => written[rank][range.start as usize..range.end as usize].to_vec(),
                        Piece::Padding(count) => vec![0; count as usize],
                    })
                    .collect();
                assert_eq!(&read, expected, "{writers} wrote, rank {rank} of {readers} reads");
            }
        }
    }

    #[test]
    fn every_value_is_in_one_stretch_of_one_rank_and_padding_in_none() {
        let config = config();
        let (boosted, hidden) = (4_i64, config.hidden_size);
        let undecayed_ones = |name: &str| name.contains("norm") || name.ends_with(".bias");
        let vectors: i64 =
            config.parameter_shapes().iter().filter(|(name, _)| undecayed_ones(name)).map(|(_, shape)| shape[0]).sum();
        for ranks in 1..8 {
            let units = units(&config, ranks);
            let (mut seen, mut boosted_values, mut undecayed) = (Vec::new(), Vec::<i64>::new(), 0);
            for (rank, held) in shares(&units, ranks).iter().enumerate() {
                for Stretch { range, decayed, boosted } in stretches(&units, rank, hidden, boosted as u32) {
                    let values = &held[range.start as usize..range.end as usize];
                    seen.extend_from_slice(values);
                    undecayed += if decayed { 0 } else { values.len() as i64 };
                    boosted_values.extend(values.iter().copied().filter(|_| boosted));
                }
            }
            seen.sort_unstable();
            let count: i64 = units.iter().map(|unit| unit.length).sum();
            assert!(seen.iter().copied().eq(1..=count), "{ranks} ranks");
            assert_eq!(undecayed, vectors);
            assert!(boosted_values.iter().copied().eq(boosted * hidden + 1..=(boosted + 1) * hidden), "{boosted_values:?}");
        }
    }
}
