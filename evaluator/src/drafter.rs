//! A block drafter: one forward takes in clean tokens and writes any number of blocks behind them.
//!
//! Everything that drafts goes through [`Drafter::draft`]: the prefill (clean tokens alone), a lockstep round (what the last round
//! committed, and one block), a pack (the block under verification as clean tokens, and all continuations) and replay (one block in
//! each of many lanes).
//!
//! Shapes legend: see the crate `model`.

use configs::Labels;
use model::{BlockPattern, CachedAttention, KvCache, Piece, Transformer};
use tch::{Device, Tensor};
use torch::TorchError;

use crate::fan_out::Draft;

/// A transformer that fills blocks of masks.
pub struct Drafter {
    pub model: Transformer,
    /// Slots of a block, its anchor included; at least 2.
    pub block_size: usize,
    pub mask_token: u32,
    pub labels: Labels,
    /// Whether the anchor sees the masks of its block.
    pub anchor_sees_block: bool,
}

/// A block to draft: slot 0 holds the anchor, the other slots hold masks.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Block {
    pub anchor: u32,
    /// How many of the forward's clean tokens it looks back at, besides all that its lane holds. The anchor stands right behind them.
    pub context: usize,
}

/// What one forward does in one lane of the cache.
pub struct LaneWork<'a> {
    pub lane: usize,
    /// Tokens that follow what the lane holds; they stay in the cache.
    pub clean: &'a [u32],
    /// Blocks that see the lane, their part of `clean`, and themselves in both directions; they leave nothing in the cache.
    pub blocks: &'a [Block],
}

impl Drafter {
    /// A cache for `lanes` texts of up to `tokens` tokens, with room for one forward of `work_rows` rows behind them.
    pub fn new_cache(&self, lanes: usize, tokens: usize, work_rows: usize) -> KvCache {
        KvCache::new(&self.model.config, lanes, tokens + work_rows, self.model.kind(), self.model.device())
    }

    /// The slots of a block whose logits are predictions.
    pub fn first_used_slot(&self) -> usize {
        match self.labels {
            Labels::InPlace => 1,
            Labels::Next => 0,
        }
    }

    /// Runs one forward over all lanes' work and returns the drafts of all blocks, lane by lane; each slot comes with its `ranked`
    /// best tokens.
    ///
    /// # Errors
    /// What libtorch refuses, such as a token outside the vocabulary or work that does not fit into the cache.
    pub fn draft(&self, cache: &mut KvCache, work: &[LaneWork<'_>], ranked: usize) -> Result<Vec<Draft>, TorchError> {
        let drafts = torch::guarded("drafting", || {
            let (logits_rv, blocks) = self.logits(cache, work)?;
            let ranked = (ranked.max(1) as i64).min(self.model.config.vocab_size);
            let (_, best) = logits_rv.topk(ranked, -1, true, true);
            let best: Vec<Vec<u32>> = torch::to_ids(&best).chunks(ranked as usize).map(<[u32]>::to_vec).collect();
            Some(best.chunks(best.len() / blocks).map(|slots| self.to_draft(slots)).collect())
        })?;
        for lane in work {
            cache.set_length(lane.lane, cache.length(lane.lane) + lane.clean.len());
        }
        Ok(drafts.unwrap_or_default())
    }

    /// The f32 logits `[R, V]` of all used slots, block by block, and the number of blocks; `None` without any block. Lanes are not
    /// extended. Panics as libtorch does; [`Drafter::draft`] is the guarded form.
    pub fn logits(&self, cache: &KvCache, work: &[LaneWork<'_>]) -> Option<(Tensor, usize)> {
        let device = self.model.device();
        let (mut ids, mut positions, mut used, mut pieces) = (Vec::new(), Vec::new(), Vec::new(), Vec::new());
        for lane in work.iter().filter(|lane| !lane.clean.is_empty() || !lane.blocks.is_empty()) {
            let (first_row, held) = (ids.len(), cache.length(lane.lane));
            ids.extend_from_slice(lane.clean);
            positions.extend(held..held + lane.clean.len());
            for block in lane.blocks {
                used.extend(ids.len() + self.first_used_slot()..ids.len() + self.block_size);
                ids.push(block.anchor);
                ids.extend(std::iter::repeat_n(self.mask_token, self.block_size - 1));
                positions.extend(held + block.context..held + block.context + self.block_size);
            }
            pieces.push(self.piece(lane, first_row..ids.len(), device));
        }
        if ids.is_empty() {
            return None;
        }
        let mut attention = CachedAttention::new(cache, pieces);
        let (ids_t, positions_t) = (torch::ids_tensor(&ids, device), torch::index_tensor(&positions, device));
        let hidden_td = self.model.forward(&ids_t, &positions_t, &mut attention);
        let blocks = work.iter().map(|lane| lane.blocks.len()).sum();
        (blocks > 0).then(|| {
            let hidden_rd = hidden_td.index_select(0, &torch::index_tensor(&used, device));
            (self.model.logits(&hidden_rd), blocks)
        })
    }

    fn piece(&self, lane: &LaneWork<'_>, rows: std::ops::Range<usize>, device: Device) -> Piece {
        match (lane.clean.len(), lane.blocks.len()) {
            (_, 0) => Piece::causal(lane.lane, rows, device),
            (0, 1) if self.anchor_sees_block => Piece::block(lane.lane, rows),
            (clean, _) => {
                let size = rows.len() as i64;
                let pattern = BlockPattern { size: self.block_size, anchor_sees_block: self.anchor_sees_block };
                let visible = visibility(clean, lane.blocks, pattern);
                Piece { lane: lane.lane, rows, mask: Some(Tensor::from_slice(&visible).view([size, size]).to_device(device)) }
            }
        }
    }

    /// Reads a block's slots, best tokens first, by the label convention.
    fn to_draft(&self, slots: &[Vec<u32>]) -> Draft {
        let (verified, bonus) = match self.labels {
            Labels::InPlace => (slots, None),
            Labels::Next => (&slots[..slots.len() - 1], slots.last().cloned()),
        };
        Draft { tokens: verified.iter().map(|best| best[0]).collect(), ranked: verified.to_vec(), bonus }
    }
}

/// Which rows of a lane's work see which, row-major: clean rows are causal; a block sees its context, and itself by its pattern.
fn visibility(clean: usize, blocks: &[Block], pattern: BlockPattern) -> Vec<bool> {
    let size = clean + blocks.len() * pattern.size;
    let mut visible = vec![false; size * size];
    for (row, sees) in visible.chunks_exact_mut(size).enumerate() {
        if row < clean {
            sees[..=row].fill(true);
        } else {
            let (number, slot) = ((row - clean) / pattern.size, (row - clean) % pattern.size);
            let own = clean + number * pattern.size;
            sees[..blocks[number].context].fill(true);
            (0..pattern.size).for_each(|key| sees[own + key] = pattern.sees(slot, key));
        }
    }
    visible
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn clean_rows_are_causal_and_blocks_see_their_context_and_themselves() {
        let blocks = [Block { anchor: 1, context: 0 }, Block { anchor: 2, context: 2 }];
        let rows = |anchor_sees_block| {
            let visible = visibility(2, &blocks, BlockPattern { size: 2, anchor_sees_block });
            visible.chunks(6).map(|row| row.iter().map(|&sees| if sees { 'x' } else { '.' }).collect()).collect::<Vec<String>>()
        };
        assert_eq!(rows(true), ["x.....", "xx....", "..xx..", "..xx..", "xx..xx", "xx..xx"]);
        assert_eq!(rows(false), ["x.....", "xx....", "..x...", "..xx..", "xx..x.", "xx..xx"]);
    }
}
