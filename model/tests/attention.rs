//! Training, decoding and batched generation against the definition of what a block sees, on seeded random models and inputs.
//!
//! The definition is computed the slow way: one dense attention over all rows ([`DenseAttention`]), its mask written pair by pair, its
//! softmax plain and in f64. Everything but attention is the crate's own forward, which `golden.rs` compares with Hugging Face.
//!
//! Shapes legend: see the crate's documentation.
#![allow(clippy::unwrap_used)]

use std::convert::Infallible;
use std::panic::{AssertUnwindSafe, catch_unwind, resume_unwind};

use model::attention::StepAttention;
use model::config::{ModelConfig, RopeScaling, architecture_of};
use model::{Attention, CachedAttention, KvCache, PackedAttention, Piece, Sequence, Transformer};
use rand_chacha::ChaCha8Rng;
use rand_chacha::rand_core::{RngCore, SeedableRng};
use tch::{Device, Kind, Tensor};

const CASES: u64 = 48;
/// Of logits in f32, and of gradients relative to the largest one of their parameter.
const TOLERANCE: f64 = 1e-4;
/// What a wrong mask or a wrong position must at least change.
const CLEARLY_DIFFERENT: f64 = 1e-3;

/// The random choices of one case.
struct Random(ChaCha8Rng);

impl Random {
    /// From `low` to `high`, both included.
    fn between(&mut self, low: usize, high: usize) -> usize {
        low + self.0.next_u32() as usize % (high - low + 1)
    }

    fn pick<T: Copy>(&mut self, choices: &[T]) -> T {
        choices[self.between(0, choices.len() - 1)]
    }

    /// Tokens of a text: all but the last of the vocabulary, which is the mask.
    fn ids(&mut self, count: usize, model: &Transformer) -> Vec<u32> {
        (0..count).map(|_| self.between(0, model.config.vocab_size as usize - 2) as u32).collect()
    }

    /// Numbers of normal size, in the shape of `like`.
    fn projection(&mut self, like: &Tensor) -> Tensor {
        let values: Vec<f32> = (0..like.numel()).map(|_| self.between(0, 2000) as f32 / 1000.0 - 1.0).collect();
        Tensor::from_slice(&values).view(&like.size()[..])
    }

    fn config(&mut self) -> ModelConfig {
        let model_type = self.pick(&["llama", "qwen3"]);
        let (heads, key_heads) = self.pick(&[(1, 1), (2, 1), (2, 2), (3, 3), (4, 1), (4, 2), (6, 2), (6, 3)]);
        let stretched =
            RopeScaling { factor: 4.0, low_freq_factor: 1.0, high_freq_factor: 4.0, original_max_position_embeddings: 32.0 };
        ModelConfig {
            architectures: vec![architecture_of(model_type).to_string()],
            model_type: model_type.to_string(),
            hidden_size: self.between(16, 48) as i64,
            intermediate_size: self.between(16, 64) as i64,
            num_hidden_layers: self.between(1, 3),
            num_attention_heads: heads,
            num_key_value_heads: key_heads,
            head_dim: self.pick(&[4, 6, 8, 16]),
            rms_norm_eps: self.pick(&[1e-5, 1e-6]),
            rope_theta: self.pick(&[1e4, 1e6]),
            rope_scaling: self.pick(&[false, false, true]).then_some(stretched),
            vocab_size: self.between(20, 40) as i64,
            tie_word_embeddings: self.pick(&[false, true]),
            max_position_embeddings: 128,
            bos_token_id: None,
            eos_token_id: Vec::new(),
        }
    }

    fn model(&mut self) -> Transformer {
        let config = self.config();
        Transformer::random(config, self.0.next_u64(), Kind::Float)
    }

    fn block_shape(&mut self, model: &Transformer) -> BlockShape {
        BlockShape { size: self.between(2, 8), mask_token: model.config.vocab_size as u32 - 1 }
    }

    /// Up to 20 sorted anchors among the positions `0..=clean`: side by side, evenly far apart, or anywhere.
    fn anchors(&mut self, clean: usize) -> Vec<usize> {
        let count = self.pick(&[0, 1, 2, 5, 15, 16, 17, 20]).min(clean + 1);
        match self.between(0, 2) {
            0 => {
                let first = self.between(0, clean + 1 - count);
                (first..first + count).collect()
            }
            1 => (0..count).map(|number| number * (clean + 1) / count).collect(),
            _ => {
                let mut positions: Vec<usize> = (0..=clean).collect();
                while positions.len() > count {
                    positions.remove(self.between(0, positions.len() - 1));
                }
                positions
            }
        }
    }

    /// A training batch of one to four responses; the first has room for an anchor with context before it.
    fn packed(&mut self, model: &Transformer) -> Packed {
        let shape = self.block_shape(model);
        let responses = self.between(1, 4);
        let mut packed = Packed { shape, responses: Vec::new(), ids: Vec::new(), rows: Vec::new(), sequences: Vec::new() };
        for response in 0..responses {
            let clean = self.between(if response == 0 { 2 } else { 1 }, 50);
            let text = self.ids(clean + 1, model);
            let anchors = self.anchors(clean);
            packed.push(Response { text, anchors });
        }
        packed
    }
}

/// Runs every case, with the seed of the one that fails on standard error; libtorch runs on one thread, as tests run side by side.
fn for_each_case(mut run: impl FnMut(&mut Random)) {
    torch::set_num_threads(1);
    for seed in 0..CASES {
        let mut random = Random(ChaCha8Rng::seed_from_u64(seed));
        if let Err(panic) = catch_unwind(AssertUnwindSafe(|| run(&mut random))) {
            eprintln!("the case of seed {seed} failed");
            resume_unwind(panic);
        }
    }
}

/// The definition: every row attends to the rows that its line of the mask names, and to no others.
struct DenseAttention {
    /// `[T, T]` boolean, query by key.
    visible_tt: Tensor,
}

impl DenseAttention {
    fn new(rows: usize, sees: impl Fn(usize, usize) -> bool) -> Self {
        let mut visible = Vec::with_capacity(rows * rows);
        for query in 0..rows {
            for key in 0..rows {
                visible.push(sees(query, key));
            }
        }
        Self { visible_tt: Tensor::from_slice(&visible).view([rows as i64, rows as i64]) }
    }
}

impl Attention for DenseAttention {
    fn attend(&mut self, _layer: usize, query_the: &Tensor, key_tke: &Tensor, value_tke: &Tensor) -> Tensor {
        let (_, heads, size) = query_the.size3().unwrap();
        let key_heads = key_tke.size()[1];
        let outputs: Vec<Tensor> = (0..heads)
            .map(|head| {
                let key_head = head * key_heads / heads;
                let query_te = query_the.select(1, head).to_kind(Kind::Double);
                let key_te = key_tke.select(1, key_head).to_kind(Kind::Double);
                let value_te = value_tke.select(1, key_head).to_kind(Kind::Double);
                let score_tt = query_te.matmul(&key_te.transpose(0, 1)) / (size as f64).sqrt();
                let score_tt = score_tt.masked_fill(&self.visible_tt.logical_not(), f64::NEG_INFINITY);
                score_tt.softmax(-1, Kind::Double).matmul(&value_te)
            })
            .collect();
        Tensor::stack(&outputs, 1).to_kind(query_the.kind())
    }
}

/// Logits `[T, V]` of all rows of one forward.
fn logits(model: &Transformer, ids: &[u32], positions: &[usize], attention: &mut dyn Attention) -> Tensor {
    let (ids_t, positions_t) = (torch::ids_tensor(ids, Device::Cpu), torch::index_tensor(positions, Device::Cpu));
    model.logits(&model.forward(&ids_t, &positions_t, attention))
}

/// Logits `[T, V]` of a forward of its own: `prefix` causal, then `block`, which sees all of the prefix and itself in both directions.
fn fresh(model: &Transformer, prefix: &[u32], block: &[u32]) -> Tensor {
    let ids = [prefix, block].concat();
    let positions: Vec<usize> = (0..ids.len()).collect();
    let mut attention = DenseAttention::new(ids.len(), |query, key| key <= query || query >= prefix.len());
    logits(model, &ids, &positions, &mut attention)
}

fn fresh_block(model: &Transformer, prefix: &[u32], block: &[u32]) -> Tensor {
    fresh(model, prefix, block).narrow(0, prefix.len() as i64, block.len() as i64)
}

fn difference(found: &Tensor, expected: &Tensor) -> f64 {
    assert_eq!(found.size(), expected.size());
    (found - expected).abs().max().double_value(&[])
}

fn assert_close(found: &Tensor, expected: &Tensor, what: &str) {
    let difference = difference(found, expected);
    // Written so that a NaN fails too.
    assert!(difference < TOLERANCE, "{what}: the logits differ by {difference}");
}

fn rows_of(tensor: &Tensor, first: usize, count: usize) -> Tensor {
    tensor.narrow(0, first as i64, count as i64)
}

#[derive(Clone, Copy)]
struct BlockShape {
    size: usize,
    mask_token: u32,
}

impl BlockShape {
    fn ids(self, anchor: u32) -> Vec<u32> {
        let mut ids = vec![self.mask_token; self.size];
        ids[0] = anchor;
        ids
    }
}

struct Response {
    /// The clean rows' tokens and one more, so that an anchor may stand right behind the clean rows.
    text: Vec<u32>,
    anchors: Vec<usize>,
}

impl Response {
    fn clean(&self) -> &[u32] {
        &self.text[..self.text.len() - 1]
    }
}

/// What a row of a training forward is; `block` is the anchor of the row's block, `None` for a clean row.
#[derive(Clone, Copy)]
struct Row {
    response: usize,
    position: usize,
    block: Option<usize>,
}

/// A training batch in the layout of [`PackedAttention`].
struct Packed {
    shape: BlockShape,
    responses: Vec<Response>,
    ids: Vec<u32>,
    rows: Vec<Row>,
    sequences: Vec<Sequence>,
}

impl Packed {
    fn push(&mut self, response: Response) {
        let (number, clean) = (self.responses.len(), response.clean().len());
        self.sequences.push(Sequence { first_row: self.ids.len(), clean, anchors: response.anchors.clone() });
        self.ids.extend(response.clean());
        self.rows.extend((0..clean).map(|position| Row { response: number, position, block: None }));
        for &anchor in &response.anchors {
            self.ids.extend(self.shape.ids(response.text[anchor]));
            let positions = anchor..anchor + self.shape.size;
            self.rows.extend(positions.map(|position| Row { response: number, position, block: Some(anchor) }));
        }
        self.responses.push(response);
    }

    fn positions(&self) -> Vec<usize> {
        self.rows.iter().map(|row| row.position).collect()
    }

    fn logits(&self, model: &Transformer) -> Tensor {
        let mut attention = PackedAttention::new(&self.sequences, self.shape.size, Device::Cpu);
        logits(model, &self.ids, &self.positions(), &mut attention)
    }

    /// The same rows through one dense attention.
    fn dense_logits(&self, model: &Transformer, positions: &[usize], sees: impl Fn(Row, Row) -> bool) -> Tensor {
        let mut attention = DenseAttention::new(self.rows.len(), |query, key| sees(self.rows[query], self.rows[key]));
        logits(model, &self.ids, positions, &mut attention)
    }

    /// Every block: the response's number, the anchor, and the block's first row.
    fn blocks(&self) -> Vec<(usize, usize, usize)> {
        let of_sequence = |(number, sequence): (usize, &Sequence)| {
            let first = sequence.first_row + sequence.clean;
            let size = self.shape.size;
            sequence.anchors.iter().enumerate().map(move |(block, &anchor)| (number, anchor, first + block * size)).collect()
        };
        self.sequences.iter().enumerate().flat_map::<Vec<_>, _>(of_sequence).collect()
    }
}

/// Responses apart; clean rows causal; a block sees the clean rows strictly before its anchor, and itself in both directions.
fn sees(query: Row, key: Row) -> bool {
    query.response == key.response
        && match (query.block, key.block) {
            (None, None) => key.position <= query.position,
            (None, Some(_)) => false,
            (Some(anchor), None) => key.position < anchor,
            (Some(own), Some(other)) => own == other,
        }
}

#[test]
fn a_packed_training_forward_equals_a_fresh_forward_for_each_block_and_response() {
    let _no_gradients = tch::no_grad_guard();
    let (mut without_blocks, mut several_groups) = (0, 0);
    for_each_case(|random| {
        let model = random.model();
        let packed = random.packed(&model);
        let found = packed.logits(&model);
        // Without lively logits a comparison to an absolute tolerance would prove little.
        assert!(found.std(false).double_value(&[]) > 0.3);
        for (response, sequence) in packed.responses.iter().zip(&packed.sequences) {
            let clean = rows_of(&found, sequence.first_row, sequence.clean);
            assert_close(&clean, &fresh(&model, response.clean(), &[]), "clean rows");
            without_blocks += usize::from(sequence.anchors.is_empty());
            several_groups += usize::from(sequence.anchors.len() > 16);
        }
        for (number, anchor, first_row) in packed.blocks() {
            let text = &packed.responses[number].text;
            let expected = fresh_block(&model, &text[..anchor], &packed.shape.ids(text[anchor]));
            let what = format!("block of anchor {anchor} of response {number}");
            assert_close(&rows_of(&found, first_row, packed.shape.size), &expected, &what);
        }
        assert_close(&found, &packed.dense_logits(&model, &packed.positions(), sees), "all rows");
    });
    assert!(without_blocks > 5 && several_groups > 5, "{without_blocks} and {several_groups}");
}

/// The known ways to get a block wrong must be seen by the comparison above, in every block that they touch.
#[test]
fn wrong_masks_and_positions_are_clearly_seen() {
    let _no_gradients = tch::no_grad_guard();
    let mut touched = [0; 4];
    for_each_case(|random| {
        let model = random.model();
        let packed = random.packed(&model);
        let found = packed.logits(&model);
        let positions = packed.positions();
        let shifted: Vec<usize> = packed.rows.iter().map(|row| row.position + usize::from(row.block.is_some())).collect();
        let sees_anchor_row = |query: Row, key: Row| {
            sees(query, key)
                || query.response == key.response
                    && key.block.is_none()
                    && query.block.is_some_and(|anchor| key.position <= anchor)
        };
        let causal_block = |query: Row, key: Row| {
            sees(query, key) && (query.block.is_none() || key.block.is_none() || key.position <= query.position)
        };
        let sees_other_blocks = |query: Row, key: Row| {
            sees(query, key) || query.response == key.response && query.block.is_some() && key.block.is_some()
        };
        let wrong = [
            ("a block sees the clean row of its anchor", packed.dense_logits(&model, &positions, sees_anchor_row)),
            ("a block's positions are one too high", packed.dense_logits(&model, &shifted, sees)),
            ("a block is causal", packed.dense_logits(&model, &positions, causal_block)),
            ("a block sees the other blocks", packed.dense_logits(&model, &positions, sees_other_blocks)),
        ];
        for (number, anchor, first_row) in packed.blocks() {
            let response = &packed.responses[number];
            // Without context a shift of all of a block's positions changes nothing: RoPE is relative.
            let touches = [anchor < response.clean().len(), anchor > 0, true, response.anchors.len() > 1];
            for (index, (fault, wrong)) in wrong.iter().enumerate().filter(|&(index, _)| touches[index]) {
                let rows = |logits: &Tensor| rows_of(logits, first_row, packed.shape.size);
                let difference = difference(&rows(&found), &rows(wrong));
                assert!(difference > CLEARLY_DIFFERENT, "{fault}, anchor {anchor}: the logits differ by {difference} only");
                touched[index] += 1;
            }
        }
    });
    assert!(touched.iter().all(|&blocks| blocks > 100), "{touched:?}");
}

#[test]
fn gradients_of_a_packed_training_forward_equal_the_dense_ones() {
    for_each_case(|random| {
        let plain = random.model();
        let mut values = plain.named_parameters().into_iter().map(|(_, value)| value.copy());
        let leaf = |_: &str, _: &[i64]| Ok::<_, Infallible>(values.next().unwrap().set_requires_grad(true));
        let Ok(model) = Transformer::from_source(plain.config.clone(), leaf);
        let packed = random.packed(&model);
        let parameters = model.named_parameters();
        let leaves: Vec<&Tensor> = parameters.iter().map(|(_, leaf)| *leaf).collect();
        let (found, dense) = (packed.logits(&model), packed.dense_logits(&model, &packed.positions(), sees));
        let projection = random.projection(&found);
        let gradients = |logits: &Tensor| {
            let projected = (logits * &projection).sum(Kind::Float);
            Tensor::run_backward(&[projected], &leaves, false, false)
        };
        for (((name, _), found), expected) in parameters.iter().zip(gradients(&found)).zip(gradients(&dense)) {
            let largest = expected.abs().max().double_value(&[]);
            let relative = difference(&found, &expected) / largest;
            assert!(largest > 1e-3 && relative < TOLERANCE, "{name}: the gradients differ by {relative} of {largest}");
        }
    });
}

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
            (0, 1) => Piece::block(self.lane, rows),
            _ => {
                let block_of = |row: usize| (row >= clean).then(|| (row - clean) / shape.size);
                let sees = |query: usize, key: usize| match (block_of(query), block_of(key)) {
                    (None, None) => key <= query,
                    (None, Some(_)) => false,
                    (Some(block), None) => key < self.blocks[block].1,
                    (Some(own), Some(other)) => own == other,
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
                    let expected = rows_of(&fresh(&model, &whole, &[]), held, clean.len());
                    assert_close(&rows_of(&found, row, clean.len()), &expected, "clean rows");
                }
                row += clean.len();
                packs += usize::from(!clean.is_empty() && blocks.len() > 1);
                for (anchor, context) in blocks {
                    let expected = fresh_block(&model, &whole[..held + context], &shape.ids(anchor));
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
                Feed { expected: fresh(&model, &text, &[]), text, fed: 0 }
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
