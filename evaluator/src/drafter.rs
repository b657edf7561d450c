//! A block drafter: one forward takes in clean tokens and writes any number of blocks behind them.
//!
//! Everything that drafts goes through [`Drafter::draft`] or its sibling [`Drafter::draft_drawn`]: the prefill (clean tokens alone), a lockstep round (what the last round
//! committed, and one block), a pack (the block under verification as clean tokens, and all continuations) and replay (one block in
//! each of many lanes).
//!
//! Shapes legend: see the crate `model`.

use configs::Labels;
use model::{BlockPattern, CachedAttention, KvCache, Piece, Transformer};
use tch::{Device, Kind, Tensor};
use torch::TorchError;

use crate::fan_out::{Candidate, Draft};
use crate::sampling::{Distributions, Sampler, TokenPlace};

/// Probabilities that are drawn from in one go.
const DRAWN_AT_ONCE: usize = 1 << 22;

/// A transformer that fills blocks of masks.
pub struct Drafter {
    pub model: Transformer,
    /// Slots of a block, its anchor included; at least 2.
    pub block_size: usize,
    pub mask_token: u32,
    pub labels: Labels,
    /// Whether the anchor sees the masks of its block.
    pub anchor_sees_block: bool,
    /// For each used slot the temperature that makes its probabilities honest; empty leaves them as they are. What is drafted, and by what
    /// distributions, does not depend on it, only which outcomes a fan-out thinks likely.
    pub temperatures: Vec<f32>,
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
        self.drafts(cache, work, ranked, None)
    }

    /// As [`Drafter::draft`], but tokens are drawn from the distributions that `sampler` makes of their slots' logits, each slot for
    /// itself, and drafts keep these distributions. `firsts` says for each block, lane by lane, which token its first slot drafts.
    ///
    /// # Errors
    /// As [`Drafter::draft`].
    pub fn draft_drawn(
        &self,
        cache: &mut KvCache,
        work: &[LaneWork<'_>],
        ranked: usize,
        sampler: &Sampler,
        firsts: &[TokenPlace],
    ) -> Result<Vec<Draft>, TorchError> {
        self.drafts(cache, work, ranked, Some((sampler, firsts)))
    }

    fn drafts(
        &self,
        cache: &mut KvCache,
        work: &[LaneWork<'_>],
        ranked: usize,
        draws: Option<(&Sampler, &[TokenPlace])>,
    ) -> Result<Vec<Draft>, TorchError> {
        let drafts = torch::guarded("drafting", || {
            let (logits_rv, blocks) = self.logits(cache, work)?;
            let ranked = (ranked.max(1) as i64).min(self.model.config.vocab_size);
            let drawn = draws.map(|(sampler, firsts)| self.draw(&logits_rv, sampler, firsts));
            let best = self.best(&logits_rv, ranked, drawn.as_ref());
            let mut drafts: Vec<Draft> = best.chunks(best.len() / blocks).map(|slots| self.to_draft(slots)).collect();
            for (draft, drawn) in drafts.iter_mut().zip(drawn.into_iter().flatten()) {
                draft.tokens = drawn.tokens;
                draft.drawn_from = Some(drawn.from);
            }
            Some(drafts)
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

    /// Draws the verified slots of each block.
    fn draw(&self, logits_rv: &Tensor, sampler: &Sampler, firsts: &[TokenPlace]) -> Vec<Drawn> {
        let vocabulary = logits_rv.size()[1];
        let verified = self.block_size - 1;
        let logits_bsv = logits_rv.view([firsts.len() as i64, -1, vocabulary]).narrow(1, 0, verified as i64);
        // Some blocks at a time, so that what drawing needs for a while is small beside the logits.
        let at_once = (DRAWN_AT_ONCE / (verified * vocabulary as usize)).max(1);
        let mut drawn = Vec::with_capacity(firsts.len());
        for firsts in firsts.chunks(at_once) {
            let logits_rv = logits_bsv.narrow(0, drawn.len() as i64, firsts.len() as i64).reshape([-1, vocabulary]);
            let from_rv = sampler.probabilities(&logits_rv);
            let slot = |first: &TokenPlace, slot| TokenPlace { position: first.position + slot, ..*first };
            let places: Vec<TokenPlace> = firsts.iter().flat_map(|first| (0..verified).map(move |it| slot(first, it))).collect();
            let tokens = sampler.draw_drafts(&from_rv, &places);
            for (block, tokens) in tokens.chunks(verified).enumerate() {
                let from_sv = from_rv.narrow(0, (block * verified) as i64, verified as i64);
                drawn.push(Drawn { tokens: tokens.to_vec(), from: Distributions::new(from_sv) });
            }
        }
        drawn
    }

    /// The `ranked` likeliest tokens of each row, and behind them the one drawn if it is not among them.
    fn best(&self, logits_rv: &Tensor, ranked: i64, drawn: Option<&Vec<Drawn>>) -> Vec<Vec<Candidate>> {
        let (values, tokens) = logits_rv.topk(ranked, -1, true, true);
        let (values, tokens, width) = match drawn {
            None => (values, tokens, ranked),
            Some(drawn) => {
                let drawn_r1 = self.drawn_column(drawn, &tokens);
                let drawn_values_r1 = logits_rv.gather(1, &drawn_r1, false);
                (Tensor::cat(&[values, drawn_values_r1], 1), Tensor::cat(&[tokens, drawn_r1], 1), ranked + 1)
            }
        };
        let ranked = ranked as usize;
        let mut candidates: Vec<Vec<Candidate>> =
            self.candidates(logits_rv, values, &tokens, ranked).chunks(width as usize).map(<[Candidate]>::to_vec).collect();
        for slot in &mut candidates {
            if slot[..ranked].iter().any(|candidate| slot.last().is_some_and(|drawn| drawn.token == candidate.token)) {
                slot.truncate(ranked);
            }
        }
        candidates
    }

    /// The drawn tokens as a column `[R, 1]`, with the likeliest token where none was drawn: in the slot that guesses the bonus token.
    fn drawn_column(&self, drawn: &[Drawn], best_rk: &Tensor) -> Tensor {
        let blocks = drawn.len() as i64;
        let tokens: Vec<u32> = drawn.iter().flat_map(|block| block.tokens.iter().copied()).collect();
        let drawn_bs = torch::ids_tensor(&tokens, best_rk.device()).view([blocks, -1]);
        let best_bs = best_rk.narrow(1, 0, 1).reshape([blocks, -1]);
        let bonus = best_bs.size()[1] - drawn_bs.size()[1];
        let bonus_bs = best_bs.narrow(1, drawn_bs.size()[1], bonus);
        Tensor::cat(&[drawn_bs, bonus_bs], 1).view([-1, 1])
    }

    /// Tokens with their logits `[R, K]` as candidates, row by row.
    fn candidates(&self, logits_rv: &Tensor, values: Tensor, tokens: &Tensor, ranked: usize) -> Vec<Candidate> {
        let tokens = torch::to_ids(tokens);
        if ranked == 1 {
            // Nobody picks from these.
            return tokens.into_iter().map(|token| Candidate { token, probability: 1.0 }).collect();
        }
        let probabilities = if self.temperatures.is_empty() {
            (values - logits_rv.logsumexp([-1_i64].as_slice(), true)).exp()
        } else {
            let slots = self.temperatures.len() as i64;
            let temperatures_r1 = Tensor::from_slice(&self.temperatures).to_device(logits_rv.device());
            let temperatures_r1 = temperatures_r1.repeat([logits_rv.size()[0] / slots]).unsqueeze(1);
            (values / &temperatures_r1 - (logits_rv / &temperatures_r1).logsumexp([-1_i64].as_slice(), true)).exp()
        };
        let probabilities = torch::to_f32s(&probabilities.to_kind(Kind::Float));
        tokens.into_iter().zip(probabilities).map(|(token, probability)| Candidate { token, probability }).collect()
    }

    /// Reads a block's slots, likeliest tokens first, by the label convention.
    fn to_draft(&self, slots: &[Vec<Candidate>]) -> Draft {
        let (verified, bonus) = match self.labels {
            Labels::InPlace => (slots, None),
            Labels::Next => (&slots[..slots.len() - 1], slots.last().cloned()),
        };
        let tokens = verified.iter().map(|best| best[0].token).collect();
        Draft { tokens, ranked: verified.to_vec(), bonus, drawn_from: None }
    }
}

/// The tokens drawn for a block, and the distributions they were drawn from.
struct Drawn {
    tokens: Vec<u32>,
    from: Distributions,
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
