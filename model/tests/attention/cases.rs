//! Seeded random models and inputs, and the loop that runs a test over them.

use std::panic::{AssertUnwindSafe, catch_unwind, resume_unwind};

use model::config::{ModelConfig, architecture_of};
use model::rope::{Llama3Scaling, RopeScaling, YarnScaling};
use model::{BlockPattern, Transformer};
use rand_chacha::ChaCha8Rng;
use rand_chacha::rand_core::{RngCore, SeedableRng};
use tch::{Kind, Tensor};

const CASES: u64 = 48;

/// The random choices of one case.
pub(crate) struct Random(ChaCha8Rng);

impl Random {
    /// From `low` to `high`, both included.
    pub(crate) fn between(&mut self, low: usize, high: usize) -> usize {
        low + self.0.next_u32() as usize % (high - low + 1)
    }

    pub(crate) fn pick<T: Copy>(&mut self, choices: &[T]) -> T {
        choices[self.between(0, choices.len() - 1)]
    }

    /// Tokens of a text: all but the last of the vocabulary, which is the mask.
    pub(crate) fn ids(&mut self, count: usize, model: &Transformer) -> Vec<u32> {
        (0..count).map(|_| self.between(0, model.config.vocab_size as usize - 2) as u32).collect()
    }

    /// Numbers of normal size, in the shape of `like`.
    pub(crate) fn projection(&mut self, like: &Tensor) -> Tensor {
        let values: Vec<f32> = (0..like.numel()).map(|_| self.between(0, 2000) as f32 / 1000.0 - 1.0).collect();
        Tensor::from_slice(&values).view(&like.size()[..])
    }

    pub(crate) fn config(&mut self) -> ModelConfig {
        let model_type = self.pick(&["llama", "qwen2", "qwen3"]);
        let (heads, key_heads) = self.pick(&[(1, 1), (2, 1), (2, 2), (3, 3), (4, 1), (4, 2), (6, 2), (6, 3)]);
        let rope_scaling = self.rope_scaling();
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
            rope_scaling,
            attention_bias: model_type != "qwen2" && self.pick(&[false, true]),
            mlp_bias: model_type == "llama" && self.pick(&[false, true]),
            vocab_size: self.between(20, 40) as i64,
            tie_word_embeddings: self.pick(&[false, true]),
            max_position_embeddings: 128,
            bos_token_id: None,
            eos_token_id: Vec::new(),
        }
    }

    fn rope_scaling(&mut self) -> Option<RopeScaling> {
        let original_max_position_embeddings = 32;
        match self.between(0, 5) {
            0 => Some(RopeScaling::Linear { factor: 4.0 }),
            1 => Some(RopeScaling::Llama3(Llama3Scaling {
                factor: 4.0,
                low_freq_factor: 1.0,
                high_freq_factor: 4.0,
                original_max_position_embeddings,
            })),
            2 => Some(RopeScaling::Yarn(YarnScaling {
                factor: 4.0,
                original_max_position_embeddings,
                beta_fast: 4.0,
                beta_slow: 1.0,
                truncate: self.pick(&[false, true]),
                attention_factor: self.pick(&[None, Some(1.5)]),
                mscale: None,
                mscale_all_dim: None,
            })),
            _ => None,
        }
    }

    pub(crate) fn model(&mut self) -> Transformer {
        let config = self.config();
        Transformer::random(config, self.0.next_u64(), Kind::Float)
    }

    pub(crate) fn block_shape(&mut self, model: &Transformer) -> BlockShape {
        let pattern = BlockPattern { size: self.between(2, 8), anchor_sees_block: self.pick(&[false, true]) };
        BlockShape { size: pattern.size, pattern, mask_token: model.config.vocab_size as u32 - 1 }
    }
}

/// The slots of a block: an anchor, then masks.
#[derive(Clone, Copy)]
pub(crate) struct BlockShape {
    pub(crate) size: usize,
    pub(crate) pattern: BlockPattern,
    pub(crate) mask_token: u32,
}

impl BlockShape {
    pub(crate) fn ids(self, anchor: u32) -> Vec<u32> {
        let mut ids = vec![self.mask_token; self.size];
        ids[0] = anchor;
        ids
    }
}

/// Runs every case, with the seed of the one that fails on standard error; libtorch runs on one thread, as tests run side by side.
pub(crate) fn for_each_case(mut run: impl FnMut(&mut Random)) {
    torch::set_num_threads(1);
    for seed in 0..CASES {
        let mut random = Random(ChaCha8Rng::seed_from_u64(seed));
        if let Err(panic) = catch_unwind(AssertUnwindSafe(|| run(&mut random))) {
            eprintln!("the case of seed {seed} failed");
            resume_unwind(panic);
        }
    }
}
