//! Small random models, and a forward that knows neither caches nor packs: every row against every row, by a dense mask.

use configs::Labels;
use evaluator::Drafter;
use model::{Attention, ModelConfig, Transformer};
use serde_json::json;
use tch::{Device, Kind, Tensor};

pub(crate) const LABELS: [Labels; 2] = [Labels::InPlace, Labels::Next];

/// Models this small only lose by sharing the work among threads.
pub(crate) fn random_model(vocabulary: u32, layers: usize, seed: u64) -> Transformer {
    torch::set_num_threads(1);
    let model_type = if seed.is_multiple_of(2) { "llama" } else { "qwen3" };
    let config = json!({"model_type": model_type, "hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": layers,
        "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 4, "vocab_size": vocabulary,
        "tie_word_embeddings": seed.is_multiple_of(3)});
    Transformer::random(ModelConfig::from_json(&config).unwrap(), seed, Kind::Float)
}

/// A drafter that is the target itself with some noise on all weights, so that it is often right.
pub(crate) fn noisy_drafter(target: &Transformer, noise: f64, block_size: usize, labels: Labels, seed: u64) -> Drafter {
    let _no_grad = tch::no_grad_guard();
    let other = Transformer::random(target.config.clone(), seed, Kind::Float);
    let mut noises = other.named_parameters().into_iter().map(|(_, tensor)| tensor * noise).collect::<Vec<_>>().into_iter();
    let mut weights = target.named_parameters().into_iter();
    let model = Transformer::from_source::<std::convert::Infallible>(target.config.clone(), |_, _| {
        let (_, weight) = weights.next().unwrap();
        Ok(weight * (1.0 - noise) + noises.next().unwrap())
    });
    drop(weights);
    let mask_token = target.config.vocab_size as u32 - 1;
    // Both kinds, whatever the labels.
    let anchor_sees_block = (seed / 2).is_multiple_of(2);
    Drafter { model: model.unwrap(), block_size, mask_token, labels, anchor_sees_block, temperatures: Vec::new() }
}

/// `count` prompts of 1 to 6 tokens.
pub(crate) fn prompts(count: u32, vocabulary: u32) -> Vec<Vec<u32>> {
    (0..count)
        .map(|index| (0..1 + index % 6).map(|place| (index * 7 + place * place * 3 + 1) % (vocabulary - 1)).collect())
        .collect()
}

/// Plain attention of all rows under a boolean mask `[T, T]`.
struct Dense(Tensor);

impl Attention for Dense {
    fn attend(&mut self, _layer: usize, query_the: &Tensor, key_tke: &Tensor, value_tke: &Tensor) -> Tensor {
        let group = query_the.size()[1] / key_tke.size()[1];
        let per_head = |tensor: &Tensor| tensor.repeat_interleave_self_int(group, 1, None).transpose(0, 1);
        let scale = (query_the.size()[2] as f64).sqrt();
        let scores = query_the.transpose(0, 1).matmul(&per_head(key_tke).transpose(1, 2)) / scale;
        let hidden = self.0.logical_not().unsqueeze(0);
        let shares = scores.masked_fill(&hidden, f64::NEG_INFINITY).softmax(-1, Kind::Float);
        shares.matmul(&per_head(value_tke)).transpose(0, 1)
    }
}

/// Logits `[T, V]` of a causal forward over all of `ids`.
pub(crate) fn fresh_causal(model: &Transformer, ids: &[u32]) -> Tensor {
    let size = ids.len() as i64;
    fresh(model, ids, Tensor::ones([size, size], (Kind::Bool, Device::Cpu)).tril(0))
}

/// Logits `[B, V]` of all slots of one block in a forward over `prefix + [anchor, masks]`.
pub(crate) fn fresh_block(drafter: &Drafter, prefix: &[u32], anchor: u32) -> Tensor {
    let masks = std::iter::repeat_n(drafter.mask_token, drafter.block_size - 1);
    let ids: Vec<u32> = prefix.iter().copied().chain([anchor]).chain(masks).collect();
    let (size, block) = (ids.len() as i64, drafter.block_size as i64);
    let mask = Tensor::ones([size, size], (Kind::Bool, Device::Cpu)).tril(0);
    let all_but_the_anchor = if drafter.anchor_sees_block { block } else { block - 1 };
    let _ = mask.narrow(0, size - all_but_the_anchor, all_but_the_anchor).fill_(1);
    fresh(&drafter.model, &ids, mask).narrow(0, size - block, block)
}

/// For each used slot of a block, in a forward of its own, all tokens by descending score.
pub(crate) fn fresh_ranking(drafter: &Drafter, prefix: &[u32], anchor: u32) -> Vec<Vec<u32>> {
    let ranked = torch::to_ids(&fresh_block(drafter, prefix, anchor).argsort(-1, true));
    let slots = ranked.chunks(drafter.model.config.vocab_size as usize).map(<[u32]>::to_vec);
    slots.skip(drafter.first_used_slot()).collect()
}

fn fresh(model: &Transformer, ids: &[u32], mask: Tensor) -> Tensor {
    let _no_grad = tch::no_grad_guard();
    let positions: Vec<usize> = (0..ids.len()).collect();
    let (ids, positions) = (torch::ids_tensor(ids, Device::Cpu), torch::index_tensor(&positions, Device::Cpu));
    model.logits(&model.forward(&ids, &positions, &mut Dense(mask)))
}

pub(crate) fn assert_close(found: &Tensor, expected: &Tensor) {
    assert_eq!(found.size(), expected.size());
    let difference = (found - expected).abs().max().double_value(&[]);
    assert!(difference < 1e-4, "differs by {difference}");
}
