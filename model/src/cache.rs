//! Keys and values of the tokens already seen, allocated once and overwritten in place.

use tch::{Device, Kind, Tensor};

use crate::config::ModelConfig;

/// Keys and values of several independent sequences ("lanes"), for every layer.
///
/// Writing beyond a lane's length and then not extending it costs nothing: the next write lands on the same slots. So a rejected draft
/// needs no rollback; the lane is simply not extended over it.
pub struct KvCache {
    /// Per layer, keys `[lanes, K, S, E]`.
    keys: Vec<Tensor>,
    /// Per layer, values `[lanes, K, S, E]`.
    values: Vec<Tensor>,
    lengths: Vec<usize>,
    slots: usize,
}

impl KvCache {
    /// Allocates room for `slots` tokens in each of `lanes` sequences.
    pub fn new(config: &ModelConfig, lanes: usize, slots: usize, kind: Kind, device: Device) -> Self {
        let shape = [lanes as i64, config.num_key_value_heads, slots as i64, config.head_dim];
        let allocate = || (0..config.num_hidden_layers).map(|_| Tensor::zeros(shape, (kind, device))).collect();
        Self { keys: allocate(), values: allocate(), lengths: vec![0; lanes], slots }
    }

    /// The bytes that such a cache takes.
    pub fn bytes(config: &ModelConfig, lanes: usize, slots: usize, kind: Kind) -> u128 {
        let shape =
            [config.num_hidden_layers as i64, config.num_key_value_heads, config.head_dim, kind.elt_size_in_bytes() as i64];
        // The model's numbers are small; the others may be anything that somebody asks for.
        2 * shape.into_iter().map(|size| size as u128).product::<u128>() * (lanes as u128).saturating_mul(slots as u128)
    }

    /// Sequences there is room for.
    pub fn lanes(&self) -> usize {
        self.lengths.len()
    }

    /// Tokens held in `lane`.
    pub fn length(&self, lane: usize) -> usize {
        self.lengths[lane]
    }

    /// Token slots of each lane.
    pub fn slots(&self) -> usize {
        self.slots
    }

    /// Declares the first `length` tokens of `lane` as held: after a forward has written them, or to drop later ones.
    pub fn set_length(&mut self, lane: usize, length: usize) {
        assert!(length <= self.slots, "a cache of {} slots cannot hold {length} tokens", self.slots);
        self.lengths[lane] = length;
    }

    /// Keys and values `[K, S, E]` of one lane in one layer, as views.
    pub fn lane(&self, layer: usize, lane: usize) -> (Tensor, Tensor) {
        (self.keys[layer].select(0, lane as i64), self.values[layer].select(0, lane as i64))
    }

    /// Keys and values `[lanes, K, S, E]` of the first `lanes` lanes in one layer, as views.
    pub fn first_lanes(&self, layer: usize, lanes: usize) -> (Tensor, Tensor) {
        (self.keys[layer].narrow(0, 0, lanes as i64), self.values[layer].narrow(0, 0, lanes as i64))
    }

    /// Copies what `from` holds into lane `to` (for moving the last running sequence into a finished one's place).
    pub fn move_lane(&mut self, from: usize, to: usize) {
        let length = self.lengths[from] as i64;
        for tensor in self.keys.iter().chain(&self.values) {
            let source = tensor.select(0, from as i64).narrow(1, 0, length).copy();
            tensor.select(0, to as i64).narrow(1, 0, length).copy_(&source);
        }
        self.lengths[to] = self.lengths[from];
    }
}
