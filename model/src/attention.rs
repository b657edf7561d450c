//! Which rows of a forward see which: the only place where a draft, a pack and a training batch differ.
//!
//! Three kinds, all exact and none with a dense mask over everything:
//! [`CachedAttention`] for decoding (rows see a lane of the cache and each other by a small mask), [`StepAttention`] for one new token in
//! each of many lanes, and [`PackedAttention`] for training (clean responses with all their blocks, no cache).
//!
//! Shapes legend: see the crate's documentation.

use std::ops::Range;

use tch::{Device, Kind, Tensor};

use crate::cache::KvCache;

/// Maps the queries, keys and values of all rows to what each row attends to.
pub trait Attention {
    /// `query_THE`, `key_TKE` (both after RoPE) and `value_TKE` of layer `layer` → output `[T, H, E]`.
    fn attend(&mut self, layer: usize, query_the: &Tensor, key_tke: &Tensor, value_tke: &Tensor) -> Tensor;
}

/// Softmax attention in which each group of query heads shares a key head.
///
/// The G query heads of a group become extra query rows, so that neither keys nor values are copied and every backend of libtorch's
/// scaled dot-product attention takes the call (some refuse grouped queries together with a mask).
/// `query_the` `[T, H, E]`, `key_kse` and `value_kse` `[K, S, E]`, `mask_ts` `[T, S]` boolean, true where visible; output `[T, H, E]`.
fn grouped_query_attention(query_the: &Tensor, key_kse: &Tensor, value_kse: &Tensor, mask_ts: Option<&Tensor>) -> Tensor {
    let (rows, heads, size) = query_the.size3().unwrap_or_default();
    let key_heads = key_kse.size()[0];
    let group = heads / key_heads;
    let folded = query_the.view([rows, key_heads, group, size]).permute([1, 2, 0, 3]).reshape([1, key_heads, group * rows, size]);
    let mask = mask_ts.map(|mask| mask.repeat([group, 1]).unsqueeze(0).unsqueeze(0));
    let output = Tensor::scaled_dot_product_attention(
        &folded,
        &key_kse.unsqueeze(0),
        &value_kse.unsqueeze(0),
        mask.as_ref(),
        0.0,
        false,
        None,
        false,
    );
    output.view([key_heads, group, rows, size]).permute([2, 0, 1, 3]).reshape([rows, heads, size])
}

/// Softmax attention of rows that see themselves and the rows before them.
///
/// libtorch's causal kernels need no mask and skip what is not seen, but want a key head for each query head: keys and values are small
/// enough to be copied. Shapes as [`grouped_query_attention`].
fn causal_attention(query_the: &Tensor, key_kse: &Tensor, value_kse: &Tensor) -> Tensor {
    let heads = query_the.size()[1];
    let (key_heads, rows, size) = key_kse.size3().unwrap_or_default();
    let of_query_heads = |tensor: &Tensor| {
        tensor.unsqueeze(1).expand([key_heads, heads / key_heads, rows, size], false).reshape([1, heads, rows, size])
    };
    let query = query_the.transpose(0, 1).unsqueeze(0);
    let (key, value) = (of_query_heads(key_kse), of_query_heads(value_kse));
    let output = Tensor::scaled_dot_product_attention(&query, &key, &value, None::<&Tensor>, 0.0, true, None, false);
    output.squeeze_dim(0).transpose(0, 1)
}

/// Rows that belong to one lane of the cache.
pub struct Piece {
    /// The lane whose held tokens all these rows see.
    pub lane: usize,
    /// Which rows of the forward these are.
    pub rows: Range<usize>,
    /// `[rows, rows]` boolean, true where visible; `None` for a single row, which sees itself.
    pub mask: Option<Tensor>,
}

impl Piece {
    /// Rows that see the lane, themselves and the rows before them: clean tokens.
    pub fn causal(lane: usize, rows: Range<usize>, device: Device) -> Self {
        let count = rows.len() as i64;
        let mask = (count > 1).then(|| Tensor::ones([count, count], (Kind::Bool, device)).tril(0));
        Self { lane, rows, mask }
    }

    /// Rows that see the lane and all of themselves in both directions: one block whose anchor sees it.
    pub fn block(lane: usize, rows: Range<usize>) -> Self {
        Self { lane, rows, mask: None }
    }
}

/// Attention of decoding: each piece's rows see what its lane holds, and each other by the piece's mask.
///
/// The keys and values of all rows are written behind the lane's length. The caller extends the lane over those that stay
/// ([`KvCache::set_length`]); the others are overwritten by the next forward.
pub struct CachedAttention<'a> {
    cache: &'a KvCache,
    pieces: Vec<Piece>,
    /// `[rows, held + rows]`, per piece.
    masks: Vec<Option<Tensor>>,
}

impl<'a> CachedAttention<'a> {
    /// Panics when a piece's rows do not fit behind what its lane holds: callers size their caches beforehand.
    pub fn new(cache: &'a KvCache, pieces: Vec<Piece>) -> Self {
        let masks = pieces
            .iter()
            .map(|piece| {
                let (held, rows) = (cache.length(piece.lane), piece.rows.len());
                assert!(held + rows <= cache.slots(), "{rows} rows do not fit behind {held} tokens in {} slots", cache.slots());
                piece.mask.as_ref().map(|mask| {
                    let prefix = Tensor::ones([rows as i64, held as i64], (Kind::Bool, mask.device()));
                    Tensor::cat(&[&prefix, mask], 1)
                })
            })
            .collect();
        Self { cache, pieces, masks }
    }
}

impl Attention for CachedAttention<'_> {
    fn attend(&mut self, layer: usize, query_the: &Tensor, key_tke: &Tensor, value_tke: &Tensor) -> Tensor {
        let outputs: Vec<Tensor> = self
            .pieces
            .iter()
            .zip(&self.masks)
            .map(|(piece, mask)| {
                let (first, rows) = (piece.rows.start as i64, piece.rows.len() as i64);
                let held = self.cache.length(piece.lane) as i64;
                let (key_kse, value_kse) = self.cache.lane(layer, piece.lane);
                key_kse.narrow(1, held, rows).copy_(&key_tke.narrow(0, first, rows).transpose(0, 1));
                value_kse.narrow(1, held, rows).copy_(&value_tke.narrow(0, first, rows).transpose(0, 1));
                let (key_kse, value_kse) = (key_kse.narrow(1, 0, held + rows), value_kse.narrow(1, 0, held + rows));
                grouped_query_attention(&query_the.narrow(0, first, rows), &key_kse, &value_kse, mask.as_ref())
            })
            .collect();
        join(outputs)
    }
}

/// Attention of batched generation: row `i` is the next token of lane `i`.
pub struct StepAttention<'a> {
    cache: &'a KvCache,
    rows: usize,
    /// The longest lane after this step.
    longest: i64,
    lane_index: Tensor,
    slot_index: Tensor,
    /// `[T, 1, 1, longest]`.
    mask: Tensor,
}

impl<'a> StepAttention<'a> {
    /// One new token for each of the first `rows` lanes.
    pub fn new(cache: &'a KvCache, rows: usize, device: Device) -> Self {
        let slots: Vec<usize> = (0..rows).map(|lane| cache.length(lane)).collect();
        let longest = slots.iter().max().map_or(0, |&slot| slot as i64 + 1);
        let slot_index = torch::index_tensor(&slots, device);
        let every_slot = Tensor::arange(longest, (Kind::Int64, device)).unsqueeze(0);
        let mask = every_slot.le_tensor(&slot_index.unsqueeze(1)).unsqueeze(1).unsqueeze(1);
        let lane_index = Tensor::arange(rows as i64, (Kind::Int64, device));
        Self { cache, rows, longest, lane_index, slot_index, mask }
    }
}

impl Attention for StepAttention<'_> {
    fn attend(&mut self, layer: usize, query_the: &Tensor, key_tke: &Tensor, value_tke: &Tensor) -> Tensor {
        let (rows, heads, size) = query_the.size3().unwrap_or_default();
        let key_heads = key_tke.size()[1];
        let (key_tkse, value_tkse) = self.cache.first_lanes(layer, self.rows);
        let at = [Some(&self.lane_index), None, Some(&self.slot_index)];
        let _ = key_tkse.shallow_clone().index_put_(&at, key_tke, false);
        let _ = value_tkse.shallow_clone().index_put_(&at, value_tke, false);
        let query = query_the.view([rows, key_heads, heads / key_heads, size]);
        let (key, value) = (key_tkse.narrow(2, 0, self.longest), value_tkse.narrow(2, 0, self.longest));
        Tensor::scaled_dot_product_attention(&query, &key, &value, Some(&self.mask), 0.0, false, None, false)
            .reshape([rows, heads, size])
    }
}

/// One response of a training batch: its clean rows, then one block for each anchor.
#[derive(Debug, Clone)]
pub struct Sequence {
    /// The first row of the response in the forward.
    pub first_row: usize,
    /// Number of clean rows.
    pub clean: usize,
    /// Sorted positions; the block of anchor `a` sees the clean rows strictly before `a`.
    pub anchors: Vec<usize>,
}

impl Sequence {
    /// Rows that this response takes.
    pub fn rows(&self, block_size: usize) -> usize {
        self.clean + self.anchors.len() * block_size
    }
}

/// What the rows of a block see of the block itself.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct BlockPattern {
    /// Rows of a block: its anchor, then masks.
    pub size: usize,
    /// Whether the anchor sees the masks behind it. If not, its row computes what the clean row of the same token does.
    pub anchor_sees_block: bool,
}

impl BlockPattern {
    /// Whether row `query` of a block sees its row `key`.
    pub fn sees(self, query: usize, key: usize) -> bool {
        query > 0 || key == 0 || self.anchor_sees_block
    }
}

/// Blocks that share one attention call: their common context ends at their last anchor.
const GROUP: usize = 16;

struct Group {
    rows: Range<i64>,
    context: i64,
    mask: Tensor,
}

/// Attention of training and anchor replay: each response's clean rows are causal; each of its blocks sees the clean rows strictly
/// before its anchor, and itself by its pattern. Responses do not see each other, nor do blocks.
///
/// Sorted anchors are cut into groups; a group attends to the clean rows up to its last anchor and to itself, by a small mask. At 3072
/// clean rows and 512 anchors this computes 1.2 times the needed pairs, where one dense mask computes 7.2 times.
pub struct PackedAttention {
    clean: Vec<Range<i64>>,
    groups: Vec<(i64, Vec<Group>)>,
}

impl PackedAttention {
    /// Builds the groups' small masks once; all layers of a forward use them.
    pub fn new(sequences: &[Sequence], pattern: BlockPattern, device: Device) -> Self {
        let mut clean = Vec::new();
        let mut groups = Vec::new();
        for sequence in sequences {
            let (first, length) = (sequence.first_row as i64, sequence.clean as i64);
            clean.push(first..first + length);
            let mut next_row = first + length;
            let of_sequence = sequence
                .anchors
                .chunks(GROUP)
                .map(|anchors| {
                    let rows = next_row..next_row + (anchors.len() * pattern.size) as i64;
                    next_row = rows.end;
                    let context = anchors.last().map_or(0, |&anchor| anchor as i64);
                    Group { rows, context, mask: group_mask(anchors, pattern, context, device) }
                })
                .collect();
            groups.push((first, of_sequence));
        }
        Self { clean, groups }
    }
}

/// `[anchors · block, context + anchors · block]`: context before the row's own anchor, and the row's own block.
fn group_mask(anchors: &[usize], pattern: BlockPattern, context: i64, device: Device) -> Tensor {
    let (blocks, size) = (anchors.len(), pattern.size);
    let anchors_a1 = torch::index_tensor(anchors, device).unsqueeze(1);
    let sees_context = Tensor::arange(context, (Kind::Int64, device)).unsqueeze(0).lt_tensor(&anchors_a1);
    let sees_context = sees_context.repeat_interleave_self_int(size as i64, 0, None);
    let rows = blocks * size;
    let sees_block = |at: usize| {
        let (query, key) = (at / rows, at % rows);
        query / size == key / size && pattern.sees(query % size, key % size)
    };
    let sees_block: Vec<bool> = (0..rows * rows).map(sees_block).collect();
    let sees_block = Tensor::from_slice(&sees_block).view([rows as i64, rows as i64]).to_device(device);
    Tensor::cat(&[sees_context, sees_block], 1)
}

impl Attention for PackedAttention {
    fn attend(&mut self, _layer: usize, query_the: &Tensor, key_tke: &Tensor, value_tke: &Tensor) -> Tensor {
        let key_kte = key_tke.transpose(0, 1);
        let value_kte = value_tke.transpose(0, 1);
        let rows_of =
            |tensor: &Tensor, dimension: i64, rows: &Range<i64>| tensor.narrow(dimension, rows.start, rows.end - rows.start);
        let mut outputs = Vec::new();
        for (clean, (first, groups)) in self.clean.iter().zip(&self.groups) {
            let (key, value) = (rows_of(&key_kte, 1, clean), rows_of(&value_kte, 1, clean));
            outputs.push(causal_attention(&rows_of(query_the, 0, clean), &key, &value));
            for group in groups {
                let with_context =
                    |tensor: &Tensor| Tensor::cat(&[tensor.narrow(1, *first, group.context), rows_of(tensor, 1, &group.rows)], 1);
                let query = rows_of(query_the, 0, &group.rows);
                outputs.push(grouped_query_attention(
                    &query,
                    &with_context(&key_kte),
                    &with_context(&value_kte),
                    Some(&group.mask),
                ));
            }
        }
        join(outputs)
    }
}

fn join(mut outputs: Vec<Tensor>) -> Tensor {
    match outputs.len() {
        1 => outputs.remove(0),
        _ => Tensor::cat(&outputs, 0),
    }
}
