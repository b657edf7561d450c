//! The trainable parameters: f32 masters and f32 gradients in two flat tensors, and the model that computes with views of them.
//!
//! One flat tensor makes clipping, the optimiser and checkpoints whole-tensor operations, and later a shard a slice of it.

use std::collections::HashMap;
use std::ops::Range;

use model::Transformer;
use tch::{Kind, Tensor};

/// A model in training.
pub struct Parameters {
    /// All parameters, f32, one after the other in the order of `ModelConfig::parameter_shapes`.
    pub master: Tensor,
    /// Their gradients, f32, in the same order.
    pub gradient: Tensor,
    /// Computes with views of the masters, or of their copy in the compute kind; its tensors are leaves that require gradients.
    pub model: Transformer,
    /// The copy of the masters in the compute kind, where that is not f32.
    compute: Option<Tensor>,
    /// Where each parameter lies in the flat tensors.
    ranges: Vec<(String, Range<i64>)>,
    positions: HashMap<String, usize>,
}

impl Parameters {
    /// Takes over a model's weights, to be computed with in `kind`.
    pub fn new(model: &Transformer, kind: Kind) -> Self {
        let _guard = tch::no_grad_guard();
        let mut ranges = Vec::new();
        let mut pieces = Vec::new();
        let mut end = 0;
        for (name, tensor) in model.named_parameters() {
            let start = end;
            end += tensor.numel() as i64;
            ranges.push((name, start..end));
            pieces.push(tensor.to_kind(Kind::Float).reshape([-1]));
        }
        let master = Tensor::cat(&pieces, 0);
        drop(pieces);
        let gradient = master.zeros_like();
        let compute = (kind != Kind::Float).then(|| master.to_kind(kind));
        let source = compute.as_ref().unwrap_or(&master);
        let mut next = ranges.iter();
        let built = Transformer::from_source::<std::convert::Infallible>(model.config.clone(), |_, shape| {
            let range = next.next().map_or(0..0, |(_, range)| range.clone());
            Ok(source.narrow(0, range.start, range.end - range.start).view(shape).detach().set_requires_grad(true))
        });
        let model = match built {
            Ok(model) => model,
            Err(never) => match never {},
        };
        let positions = ranges.iter().enumerate().map(|(position, (name, _))| (name.clone(), position)).collect();
        Self { master, gradient, model, compute, ranges, positions }
    }

    /// Brings the computing copy up to date with the masters.
    pub fn refresh(&mut self) {
        let _guard = tch::no_grad_guard();
        if let Some(compute) = &mut self.compute {
            compute.copy_(&self.master);
        }
    }

    /// The f32 gradient of one parameter as a flat view.
    pub fn gradient_of(&self, name: &str) -> Tensor {
        let range = self.positions.get(name).map_or(0..0, |&position| self.ranges[position].1.clone());
        self.gradient.narrow(0, range.start, range.end - range.start)
    }

    /// The f32 gradients of layer `index`'s parameters, in the order of `Layer::parameters`.
    pub fn layer_gradients(&self, index: usize) -> Vec<Tensor> {
        let prefix = format!("model.layers.{index}.");
        let of_layer = self.ranges.iter().filter(|(name, _)| name.starts_with(&prefix));
        of_layer.map(|(_, range)| self.gradient.narrow(0, range.start, range.end - range.start)).collect()
    }

    /// Where the embedding of `token` lies in the flat tensors.
    pub fn embedding_row(&self, token: u32) -> Range<i64> {
        let embedding = self.positions.get("model.embed_tokens.weight").map_or(0, |&position| self.ranges[position].1.start);
        let (first, hidden) = (embedding + i64::from(token) * self.model.config.hidden_size, self.model.config.hidden_size);
        first..first + hidden
    }

    /// Ranges whose parameters weight decay applies to: matrices, not norms.
    pub fn decayed(&self) -> Vec<Range<i64>> {
        self.ranges.iter().filter(|(name, _)| !name.contains("norm")).map(|(_, range)| range.clone()).collect()
    }
}
