//! The forward of a decoder-only transformer: Llama, Qwen2 with its biases, and Qwen3 with its norms on queries and keys.
//!
//! Shapes legend: see the crate's documentation. Parameters carry Hugging Face's tensor names, so loading needs no rename table.

use std::ops::Range;

use tch::{Device, Kind, Tensor};

use crate::attention::Attention;
use crate::config::ModelConfig;
use crate::rope::{Rope, Rotary};

/// A projection: outputs are `weight` times inputs, plus `bias` where there is one.
pub struct Linear {
    /// `[outputs, inputs]`.
    pub weight: Tensor,
    /// `[outputs]`.
    pub bias: Option<Tensor>,
}

/// The weights of one decoder layer, under Hugging Face's names.
pub struct Layer {
    pub input_layernorm: Tensor,
    pub q_proj: Linear,
    pub k_proj: Linear,
    pub v_proj: Linear,
    pub o_proj: Linear,
    /// Qwen3 only, like `k_norm`.
    pub q_norm: Option<Tensor>,
    pub k_norm: Option<Tensor>,
    pub post_attention_layernorm: Tensor,
    pub gate_proj: Linear,
    pub up_proj: Linear,
    pub down_proj: Linear,
}

/// A whole model: embedding, layers, final norm, head.
pub struct Transformer {
    pub config: ModelConfig,
    pub embed_tokens: Tensor,
    pub layers: Vec<Layer>,
    pub norm: Tensor,
    /// `None` when the head is tied to the embedding.
    pub lm_head: Option<Tensor>,
    rotary: Rotary,
}

impl Transformer {
    /// Builds a model by asking `tensor` for each parameter's name and shape, in the order of [`ModelConfig::parameter_shapes`].
    pub fn from_source<E>(config: ModelConfig, mut tensor: impl FnMut(&str, &[i64]) -> Result<Tensor, E>) -> Result<Self, E> {
        let mut parameters = config.parameter_shapes().into_iter().map(|(name, shape)| tensor(&name, &shape));
        // The iterator yields exactly the parameters that the fields below ask for, in this order.
        let mut next = || parameters.next().unwrap_or_else(|| unreachable!("parameter_shapes lists every parameter"));
        let embed_tokens = next()?;
        let mut layers = Vec::with_capacity(config.num_hidden_layers);
        for _ in 0..config.num_hidden_layers {
            layers.push(Layer::from_source(&config, &mut next)?);
        }
        let norm = next()?;
        let lm_head = if config.tie_word_embeddings { None } else { Some(next()?) };
        drop(parameters);
        let rotary = Rotary::new(&config, embed_tokens.device());
        Ok(Self { config, embed_tokens, layers, norm, lm_head, rotary })
    }

    /// A model of seeded random weights, for tests: normal with a deviation that keeps logits lively, norms near one.
    pub fn random(config: ModelConfig, seed: u64, kind: Kind) -> Self {
        Self::seeded(config, seed, kind, |shape| shape.get(1).map_or(0.1, |&inputs| 1.5 / (inputs as f64).sqrt()))
    }

    /// A model that nothing was learned in yet, f32, as `transformers` initialises it: normal with deviation 0.02 (its `initializer_range`),
    /// norms one, biases zero.
    pub fn from_scratch(config: ModelConfig, seed: u64) -> Self {
        Self::seeded(config, seed, Kind::Float, |shape| if shape.len() == 1 { 0.0 } else { 0.02 })
    }

    /// Normal numbers by counter, around one for norms and around zero for matrices and biases, of the deviation that `scale` gives for a
    /// shape.
    fn seeded(config: ModelConfig, seed: u64, kind: Kind, scale: impl Fn(&[i64]) -> f64) -> Self {
        use rand_chacha::rand_core::SeedableRng;
        let mut index = 0;
        let built = Self::from_source::<std::convert::Infallible>(config, |name, shape| {
            index += 1;
            let mut generator = rand_chacha::ChaCha8Rng::seed_from_u64(seed);
            generator.set_stream(index);
            let count: i64 = shape.iter().product();
            let (scale, offset) = (scale(shape), if name.ends_with("norm.weight") { 1.0 } else { 0.0 });
            let values: Vec<f32> = (0..count).map(|_| (offset + scale * normal(&mut generator)) as f32).collect();
            Ok(Tensor::from_slice(&values).view(shape).to_kind(kind))
        });
        match built {
            Ok(model) => model,
            Err(never) => match never {},
        }
    }

    /// The same model over the same weights, outside any gradient graph.
    pub fn shallow_clone(&self) -> Self {
        self.with_layers(&(0..self.layers.len()).collect::<Vec<_>>())
    }

    /// The model of these layers, in this order, over the same weights: removing layers is leaving them out here.
    pub fn with_layers(&self, kept: &[usize]) -> Self {
        let config = ModelConfig { num_hidden_layers: kept.len(), ..self.config.clone() };
        Self {
            config,
            embed_tokens: self.embed_tokens.detach(),
            layers: kept.iter().map(|&index| self.layers[index].shallow_clone()).collect(),
            norm: self.norm.detach(),
            lm_head: self.lm_head.as_ref().map(Tensor::detach),
            rotary: self.rotary.shallow_clone(),
        }
    }

    /// Every parameter with its Hugging Face name, in the order of [`ModelConfig::parameter_shapes`].
    pub fn named_parameters(&self) -> Vec<(String, &Tensor)> {
        let mut tensors = vec![&self.embed_tokens];
        for layer in &self.layers {
            tensors.extend(layer.parameters());
        }
        tensors.push(&self.norm);
        tensors.extend(&self.lm_head);
        self.config.parameter_shapes().into_iter().map(|(name, _)| name).zip(tensors).collect()
    }

    /// Where the weights are.
    pub fn device(&self) -> Device {
        self.embed_tokens.device()
    }

    /// The kind that the forward computes in.
    pub fn kind(&self) -> Kind {
        self.embed_tokens.kind()
    }

    /// Embedding → all layers: ids and positions `[T]` → hidden states `[T, D]` before the final norm.
    pub fn forward(&self, ids_t: &Tensor, positions_t: &Tensor, attention: &mut dyn Attention) -> Tensor {
        let hidden_td = self.embed(ids_t);
        let rope = self.rope(positions_t);
        self.forward_layers(0..self.layers.len(), hidden_td, &rope, attention)
    }

    /// Rows `[T, D]` of the embedding.
    pub fn embed(&self, ids_t: &Tensor) -> Tensor {
        self.embed_tokens.index_select(0, ids_t)
    }

    /// Runs the layers of `range` one after the other.
    pub fn forward_layers(&self, range: Range<usize>, hidden_td: Tensor, rope: &Rope, attention: &mut dyn Attention) -> Tensor {
        range.fold(hidden_td, |hidden_td, index| self.layers[index].forward(&self.config, index, &hidden_td, rope, attention))
    }

    /// Final norm and head for the rows given: `[R, D]` → f32 logits `[R, V]`.
    pub fn logits(&self, hidden_rd: &Tensor) -> Tensor {
        self.final_norm(hidden_rd).matmul(&self.head().transpose(0, 1)).to_kind(Kind::Float)
    }

    /// The norm between the last layer and the head.
    pub fn final_norm(&self, hidden_rd: &Tensor) -> Tensor {
        rms_norm(hidden_rd, &self.norm, self.config.rms_norm_eps)
    }

    /// The head's weights `[V, D]`: the embedding's when tied.
    pub fn head(&self) -> &Tensor {
        self.lm_head.as_ref().unwrap_or(&self.embed_tokens)
    }

    /// RoPE tables for these positions.
    pub fn rope(&self, positions_t: &Tensor) -> Rope {
        self.rotary.tables(positions_t)
    }
}

impl Linear {
    /// `[rows, inputs]` → `[rows, outputs]`.
    fn apply(&self, input: &Tensor) -> Tensor {
        let weight = self.weight.transpose(0, 1);
        match &self.bias {
            // In one operation, which rounds once.
            Some(bias) => bias.addmm(input, &weight),
            None => input.matmul(&weight),
        }
    }

    fn from_source<E>(biased: bool, next: &mut impl FnMut() -> Result<Tensor, E>) -> Result<Self, E> {
        Ok(Self { weight: next()?, bias: if biased { Some(next()?) } else { None } })
    }

    fn parameters(&self) -> impl Iterator<Item = &Tensor> {
        std::iter::once(&self.weight).chain(&self.bias)
    }

    fn shallow_clone(&self) -> Self {
        Self { weight: self.weight.detach(), bias: self.bias.as_ref().map(Tensor::detach) }
    }
}

impl Layer {
    /// Builds a layer by asking for each of its parameters in the order of [`ModelConfig::layer_shapes`].
    pub fn from_source<E>(config: &ModelConfig, mut next: impl FnMut() -> Result<Tensor, E>) -> Result<Self, E> {
        let (query_key_norm, biased) = (config.has_query_key_norm(), config.has_query_key_value_bias());
        Ok(Self {
            input_layernorm: next()?,
            q_proj: Linear::from_source(biased, &mut next)?,
            k_proj: Linear::from_source(biased, &mut next)?,
            v_proj: Linear::from_source(biased, &mut next)?,
            o_proj: Linear::from_source(config.attention_bias, &mut next)?,
            q_norm: if query_key_norm { Some(next()?) } else { None },
            k_norm: if query_key_norm { Some(next()?) } else { None },
            post_attention_layernorm: next()?,
            gate_proj: Linear::from_source(config.mlp_bias, &mut next)?,
            up_proj: Linear::from_source(config.mlp_bias, &mut next)?,
            down_proj: Linear::from_source(config.mlp_bias, &mut next)?,
        })
    }

    fn shallow_clone(&self) -> Self {
        Self {
            input_layernorm: self.input_layernorm.detach(),
            q_proj: self.q_proj.shallow_clone(),
            k_proj: self.k_proj.shallow_clone(),
            v_proj: self.v_proj.shallow_clone(),
            o_proj: self.o_proj.shallow_clone(),
            q_norm: self.q_norm.as_ref().map(Tensor::detach),
            k_norm: self.k_norm.as_ref().map(Tensor::detach),
            post_attention_layernorm: self.post_attention_layernorm.detach(),
            gate_proj: self.gate_proj.shallow_clone(),
            up_proj: self.up_proj.shallow_clone(),
            down_proj: self.down_proj.shallow_clone(),
        }
    }

    /// The layer's parameters in the order of [`ModelConfig::layer_shapes`].
    pub fn parameters(&self) -> Vec<&Tensor> {
        let (mut tensors, second) = self.halves();
        tensors.extend(second);
        tensors
    }

    /// The parameters that [`Layer::attend`] uses, and those that [`Layer::feed_forward`] uses.
    pub fn halves(&self) -> (Vec<&Tensor>, Vec<&Tensor>) {
        let mut first = vec![&self.input_layernorm];
        for projection in [&self.q_proj, &self.k_proj, &self.v_proj, &self.o_proj] {
            first.extend(projection.parameters());
        }
        first.extend(self.q_norm.iter().chain(&self.k_norm));
        let mut second = vec![&self.post_attention_layernorm];
        for projection in [&self.gate_proj, &self.up_proj, &self.down_proj] {
            second.extend(projection.parameters());
        }
        (first, second)
    }

    /// One decoder layer over `[T, D]`; `index` tells the attention which layer of the cache this is.
    pub fn forward(
        &self,
        config: &ModelConfig,
        index: usize,
        hidden_td: &Tensor,
        rope: &Rope,
        attention: &mut dyn Attention,
    ) -> Tensor {
        self.feed_forward(config, &self.attend(config, index, hidden_td, rope, attention))
    }

    /// The layer's first half, up to the second norm: `[T, D]` plus what attention adds.
    pub fn attend(
        &self,
        config: &ModelConfig,
        index: usize,
        hidden_td: &Tensor,
        rope: &Rope,
        attention: &mut dyn Attention,
    ) -> Tensor {
        let normed_td = rms_norm(hidden_td, &self.input_layernorm, config.rms_norm_eps);
        let heads = |projection: &Linear| {
            let count = projection.weight.size()[0] / config.head_dim;
            projection.apply(&normed_td).view([-1, count, config.head_dim])
        };
        let (mut query_the, mut key_tke, value_tke) = (heads(&self.q_proj), heads(&self.k_proj), heads(&self.v_proj));
        if let (Some(q_norm), Some(k_norm)) = (&self.q_norm, &self.k_norm) {
            query_the = rms_norm(&query_the, q_norm, config.rms_norm_eps);
            key_tke = rms_norm(&key_tke, k_norm, config.rms_norm_eps);
        }
        let attended_the = attention.attend(index, &rope.turn(&query_the), &rope.turn(&key_tke), &value_tke);
        let rows = attended_the.size()[0];
        hidden_td + self.o_proj.apply(&attended_the.reshape([rows, -1]))
    }

    /// The layer's second half: `[T, D]` plus what the gated feed-forward adds.
    pub fn feed_forward(&self, config: &ModelConfig, hidden_td: &Tensor) -> Tensor {
        let normed_td = rms_norm(hidden_td, &self.post_attention_layernorm, config.rms_norm_eps);
        let gate_tf = self.gate_proj.apply(&normed_td).silu();
        let feed_forward_tf = gate_tf * self.up_proj.apply(&normed_td);
        hidden_td + self.down_proj.apply(&feed_forward_tf)
    }
}

/// Root-mean-square norm over the last dimension, reduced in f32 as Hugging Face does.
pub fn rms_norm(input: &Tensor, weight: &Tensor, epsilon: f64) -> Tensor {
    let wide = input.to_kind(Kind::Float);
    let scale = (wide.square().mean_dim(-1, true, Kind::Float) + epsilon).rsqrt();
    (wide * scale).to_kind(input.kind()) * weight
}

/// A standard normal number by the Box-Muller transform.
fn normal(generator: &mut impl rand_chacha::rand_core::RngCore) -> f64 {
    let mut uniform = || (generator.next_u32() as f64 + 0.5) / 2_f64.powi(32);
    let (radius, angle) = (uniform(), uniform());
    (-2.0 * radius.ln()).sqrt() * (2.0 * std::f64::consts::PI * angle).cos()
}
