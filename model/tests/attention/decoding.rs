//! Forwards behind a cache against the definition: packs, chunks, single steps of many lanes, rejected rows and moved lanes.

use model::attention::StepAttention;
use model::{CachedAttention, KvCache, Piece, Transformer};
use tch::{Device, Kind, Tensor};

use crate::cases::{BlockShape, for_each_case};
use crate::definition::{DenseAttention, assert_close, fresh, fresh_block, logits, rows_of};

/// What one decoding forward does in one lane: tokens that follow what it holds, and blocks, each an anchor and the number of `clean`
/// tokens that it sees.
struct Work {
    lane: usize,
    clean: Vec<u32>,
    blocks: Vec<(u32, usize)>,
}

impl Work {
    /// The rows' attention; `mask` is built as a pack's whenever the work is neither all clean nor one lone block.
    fn piece(&self, first_row: usize, shape: BlockShape) -> Piece {
        let (clean, size) = (self.clean.len(), self.clean.len() + self.blocks.len() * shape.size);
        let rows = first_row..first_row + size;
        match (clean, self.blocks.len()) {
            (_, 0) => Piece::causal(self.lane, rows, Device::Cpu),
            (0, 1) if shape.pattern.anchor_sees_block => Piece::block(self.lane, rows),
            _ => {
                let block_of = |row: usize| (row >= clean).then(|| (row - clean) / shape.size);
                let sees = |query: usize, key: usize| match (block_of(query), block_of(key)) {
                    (None, None) => key <= query,
                    (None, Some(_)) => false,
                    (Some(block), None) => key < self.blocks[block].1,
                    (Some(own), Some(other)) => {
                        own == other && shape.pattern.sees((query - clean) % shape.size, (key - clean) % shape.size)
                    }
                };
                Piece { lane: self.lane, rows, mask: Some(DenseAttention::new(size, sees).visible_tt) }
            }
        }
    }
}

/// Logits `[T, V]` of one decoding forward; no lane is extended.
fn decode(model: &Transformer, cache: &KvCache, work: &[Work], shape: BlockShape) -> Tensor {
    let (mut ids, mut positions, mut pieces) = (Vec::new(), Vec::new(), Vec::new());
    for work in work {
        let held = cache.length(work.lane);
        pieces.push(work.piece(ids.len(), shape));
        ids.extend(&work.clean);
        positions.extend(held..held + work.clean.len());
        for &(anchor, context) in &work.blocks {
            ids.extend(shape.ids(anchor));
            positions.extend(held + context..held + context + shape.size);
        }
    }
    logits(model, &ids, &positions, &mut CachedAttention::new(cache, pieces))
}

#[test]
fn a_pack_behind_a_cache_equals_a_fresh_forward_for_each_continuation() {
    let _no_gradients = tch::no_grad_guard();
    let (mut packs, mut rejected) = (0, 0);
    for_each_case(|random| {
        let model = random.model();
        let shape = random.block_shape(&model);
        let mut texts = vec![Vec::new(); random.between(1, 3)];
        let mut cache = KvCache::new(&model.config, texts.len(), 100, Kind::Float, Device::Cpu);
        for round in 0..4 {
            let mut lanes: Vec<usize> = (0..texts.len()).collect();
            lanes.rotate_left(random.between(0, texts.len() - 1));
            let mut work = Vec::new();
            for lane in lanes {
                let clean = if round == 0 { random.between(1, 25) } else { random.between(0, 7) };
                let blocks = random.between(if clean == 0 { 1 } else { 0 }, 5);
                let anchors = random.ids(blocks, &model);
                let blocks = anchors.into_iter().map(|anchor| (anchor, random.between(0, clean))).collect();
                work.push(Work { lane, clean: random.ids(clean, &model), blocks });
            }
            let found = decode(&model, &cache, &work, shape);
            let mut row = 0;
            for Work { lane, clean, blocks } in work {
                let text: &mut Vec<u32> = &mut texts[lane];
                let held = text.len();
                let whole = [&text[..], &clean].concat();
                if !clean.is_empty() {
                    let expected = rows_of(&fresh(&model, &whole), held, clean.len());
                    assert_close(&rows_of(&found, row, clean.len()), &expected, "clean rows");
                }
                row += clean.len();
                packs += usize::from(!clean.is_empty() && blocks.len() > 1);
                for (anchor, context) in blocks {
                    let expected = fresh_block(&model, &whole[..held + context], anchor, shape);
                    let what = format!("round {round}, block with {context} of {} clean tokens", clean.len());
                    assert_close(&rows_of(&found, row, shape.size), &expected, &what);
                    row += shape.size;
                }
                // As after a verification, the lane keeps some of the clean tokens; the others and all blocks are left behind it.
                let accepted = random.between(0, clean.len());
                rejected += clean.len() - accepted;
                text.extend(&clean[..accepted]);
                cache.set_length(lane, text.len());
            }
            assert_eq!(row as i64, found.size()[0]);
        }
    });
    assert!(packs > 100 && rejected > 100, "{packs} and {rejected}");
}

/// A text that is fed to a lane of the cache bit by bit.
struct Feed {
    text: Vec<u32>,
    /// Logits `[T, V]` of the whole text in one causal forward.
    expected: Tensor,
    fed: usize,
}

#[test]
fn chunks_single_steps_rejections_and_moves_equal_one_causal_forward() {
    let _no_gradients = tch::no_grad_guard();
    let (mut steps, mut moves) = (0, 0);
    for_each_case(|random| {
        let model = random.model();
        let shape = random.block_shape(&model);
        // The feed of lane i is running[i].
        let mut running: Vec<Feed> = (0..random.between(1, 5))
            .map(|_| {
                let length = random.between(1, 30);
                let text = random.ids(length, &model);
                Feed { expected: fresh(&model, &text), text, fed: 0 }
            })
            .collect();
        let mut cache = KvCache::new(&model.config, running.len(), 36, Kind::Float, Device::Cpu);
        while !running.is_empty() {
            let lane = random.between(0, running.len() - 1);
            let feed = &mut running[lane];
            match random.between(0, 5) {
                0 => {
                    let count = random.between(1, 9).min(feed.text.len() - feed.fed);
                    let clean = feed.text[feed.fed..feed.fed + count].to_vec();
                    let found = decode(&model, &cache, &[Work { lane, clean, blocks: Vec::new() }], shape);
                    assert_close(&found, &rows_of(&feed.expected, feed.fed, count), "chunk");
                    feed.fed += count;
                    cache.set_length(lane, feed.fed);
                }
                // Rejected: written behind the lane, which is not extended over it.
                1 => {
                    let count = random.between(1, 6);
                    let clean = random.ids(count, &model);
                    let _ = decode(&model, &cache, &[Work { lane, clean, blocks: Vec::new() }], shape);
                }
                _ => {
                    let ids: Vec<u32> = running.iter().map(|feed| feed.text[feed.fed]).collect();
                    let positions: Vec<usize> = running.iter().map(|feed| feed.fed).collect();
                    let mut attention = StepAttention::new(&cache, running.len(), Device::Cpu);
                    let found = logits(&model, &ids, &positions, &mut attention);
                    for (lane, feed) in running.iter_mut().enumerate() {
                        assert_close(&rows_of(&found, lane, 1), &rows_of(&feed.expected, feed.fed, 1), "single step");
                        steps += 1;
                        // Now and then a lane does not keep its token, so that the lanes' lengths drift apart.
                        feed.fed += usize::from(random.between(0, 3) > 0);
                        cache.set_length(lane, feed.fed);
                    }
                }
            }
            while let Some(done) = running.iter().position(|feed| feed.fed == feed.text.len()) {
                let last = running.len() - 1;
                cache.move_lane(last, done);
                moves += usize::from(done < last && running[last].fed > 0);
                running.swap_remove(done);
                assert!(done == last || cache.length(done) == running[done].fed);
            }
        }
    });
    assert!(steps > 1000 && moves > 20, "{steps} and {moves}");
}
