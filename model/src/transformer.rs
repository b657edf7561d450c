//! The forward of a decoder-only transformer: Llama, and Qwen3 with its norms on queries and keys.
//!
//! Shapes legend: see the crate's documentation. Parameters carry Hugging Face's tensor names, so loading needs no rename table.

use std::ops::Range;

use tch::{Device, Kind, Tensor};

use crate::attention::Attention;
use crate::config::{ModelConfig, RopeScaling};

/// The weights of one decoder layer; each field is Hugging Face's tensor of that name without `.weight`.
pub struct Layer {
    pub input_layernorm: Tensor,
    pub q_proj: Tensor,
    pub k_proj: Tensor,
    pub v_proj: Tensor,
    pub o_proj: Tensor,
    /// Qwen3 only, like `k_norm`.
    pub q_norm: Option<Tensor>,
    pub k_norm: Option<Tensor>,
    pub post_attention_layernorm: Tensor,
    pub gate_proj: Tensor,
    pub up_proj: Tensor,
    pub down_proj: Tensor,
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
        let query_key_norm = config.has_query_key_norm();
        let mut layers = Vec::with_capacity(config.num_hidden_layers);
        for _ in 0..config.num_hidden_layers {
            layers.push(Layer::from_source(query_key_norm, &mut next)?);
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
    /// norms one.
    pub fn from_scratch(config: ModelConfig, seed: u64) -> Self {
        Self::seeded(config, seed, Kind::Float, |shape| if shape.len() == 1 { 0.0 } else { 0.02 })
    }

    /// Normal numbers by counter, around one for norms and around zero for matrices, of the deviation that `scale` gives for a shape.
    fn seeded(config: ModelConfig, seed: u64, kind: Kind, scale: impl Fn(&[i64]) -> f64) -> Self {
        use rand_chacha::rand_core::SeedableRng;
        let mut index = 0;
        let built = Self::from_source::<std::convert::Infallible>(config, |_, shape| {
            index += 1;
            let mut generator = rand_chacha::ChaCha8Rng::seed_from_u64(seed);
            generator.set_stream(index);
            let count: i64 = shape.iter().product();
            let (scale, offset) = (scale(shape), if shape.len() == 1 { 1.0 } else { 0.0 });
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

impl Layer {
    /// Norm, gate, up and down.
    pub const FEED_FORWARD_PARAMETERS: usize = 4;

    /// Builds a layer by asking for each of its parameters in the order of [`ModelConfig::layer_shapes`].
    pub fn from_source<E>(query_key_norm: bool, mut next: impl FnMut() -> Result<Tensor, E>) -> Result<Self, E> {
        Ok(Self {
            input_layernorm: next()?,
            q_proj: next()?,
            k_proj: next()?,
            v_proj: next()?,
            o_proj: next()?,
            q_norm: if query_key_norm { Some(next()?) } else { None },
            k_norm: if query_key_norm { Some(next()?) } else { None },
            post_attention_layernorm: next()?,
            gate_proj: next()?,
            up_proj: next()?,
            down_proj: next()?,
        })
    }

    fn shallow_clone(&self) -> Self {
        Self {
            input_layernorm: self.input_layernorm.detach(),
            q_proj: self.q_proj.detach(),
            k_proj: self.k_proj.detach(),
            v_proj: self.v_proj.detach(),
            o_proj: self.o_proj.detach(),
            q_norm: self.q_norm.as_ref().map(Tensor::detach),
            k_norm: self.k_norm.as_ref().map(Tensor::detach),
            post_attention_layernorm: self.post_attention_layernorm.detach(),
            gate_proj: self.gate_proj.detach(),
            up_proj: self.up_proj.detach(),
            down_proj: self.down_proj.detach(),
        }
    }

    /// The layer's parameters in the order of [`ModelConfig::layer_shapes`]: those of the first half, then the last
    /// [`Layer::FEED_FORWARD_PARAMETERS`] of the second.
    pub fn parameters(&self) -> Vec<&Tensor> {
        let mut tensors = vec![&self.input_layernorm, &self.q_proj, &self.k_proj, &self.v_proj, &self.o_proj];
        tensors.extend(self.q_norm.iter().chain(&self.k_norm));
        tensors.extend([&self.post_attention_layernorm, &self.gate_proj, &self.up_proj, &self.down_proj]);
        tensors
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
        let heads = |projection: &Tensor| {
            normed_td.matmul(&projection.transpose(0, 1)).view([-1, projection.size()[0] / config.head_dim, config.head_dim])
        };
        let (mut query_the, mut key_tke, value_tke) = (heads(&self.q_proj), heads(&self.k_proj), heads(&self.v_proj));
        if let (Some(q_norm), Some(k_norm)) = (&self.q_norm, &self.k_norm) {
            query_the = rms_norm(&query_the, q_norm, config.rms_norm_eps);
            key_tke = rms_norm(&key_tke, k_norm, config.rms_norm_eps);
        }
        let attended_the = attention.attend(index, &rope.turn(&query_the), &rope.turn(&key_tke), &value_tke);
        let rows = attended_the.size()[0];
        hidden_td + attended_the.reshape([rows, -1]).matmul(&self.o_proj.transpose(0, 1))
    }

    /// The layer's second half: `[T, D]` plus what the gated feed-forward adds.
    pub fn feed_forward(&self, config: &ModelConfig, hidden_td: &Tensor) -> Tensor {
        let normed_td = rms_norm(hidden_td, &self.post_attention_layernorm, config.rms_norm_eps);
        let gate_tf = normed_td.matmul(&self.gate_proj.transpose(0, 1)).silu();
        let feed_forward_tf = gate_tf * normed_td.matmul(&self.up_proj.transpose(0, 1));
        hidden_td + feed_forward_tf.matmul(&self.down_proj.transpose(0, 1))
    }
}

/// Root-mean-square norm over the last dimension, reduced in f32 as Hugging Face does.
pub fn rms_norm(input: &Tensor, weight: &Tensor, epsilon: f64) -> Tensor {
    let wide = input.to_kind(Kind::Float);
    let scale = (wide.square().mean_dim(-1, true, Kind::Float) + epsilon).rsqrt();
    (wide * scale).to_kind(input.kind()) * weight
}

/// The angles by which positions turn queries and keys: `[E / 2]`, one for each pair of features.
pub struct Rotary {
    inverse_frequencies: Tensor,
}

impl Rotary {
    /// The angles of a model, on `device`.
    pub fn new(config: &ModelConfig, device: Device) -> Self {
        Self { inverse_frequencies: inverse_frequencies(config).to_device(device) }
    }

    /// RoPE tables for these positions `[T]`.
    pub fn tables(&self, positions_t: &Tensor) -> Rope {
        let angles = positions_t.to_kind(Kind::Float).unsqueeze(1) * self.inverse_frequencies.unsqueeze(0);
        let (cos, sin) = (angles.cos(), angles.sin());
        let both = |first: &Tensor, second: &Tensor| Tensor::cat(&[first, second], 1).unsqueeze(1);
        Rope { cos_t1e: both(&cos, &cos), sin_t1e: both(&-&sin, &sin) }
    }

    fn shallow_clone(&self) -> Self {
        Self { inverse_frequencies: self.inverse_frequencies.shallow_clone() }
    }
}

/// Cosines and sines `[T, 1, E]` in f32 for the rows of one forward; the sines of the first half are negated.
pub struct Rope {
    cos_t1e: Tensor,
    sin_t1e: Tensor,
}

impl Rope {
    /// Turns each pair (i, i + E/2) of `[T, heads, E]` by its angle.
    fn turn(&self, input: &Tensor) -> Tensor {
        let wide = input.to_kind(Kind::Float);
        let swapped = wide.roll([wide.size()[2] / 2], [-1]);
        (wide * &self.cos_t1e).addcmul(&swapped, &self.sin_t1e).to_kind(input.kind())
    }
}

/// `[E / 2]` angles per position, with Llama 3's stretching of the slow ones where configured.
fn inverse_frequencies(config: &ModelConfig) -> Tensor {
    let half = config.head_dim / 2;
    let frequencies: Vec<f32> = (0..half)
        .map(|pair| {
            let plain = 1.0 / config.rope_theta.powf(2.0 * pair as f64 / config.head_dim as f64);
            config.rope_scaling.as_ref().map_or(plain, |scaling| scaling.scale(plain)) as f32
        })
        .collect();
    Tensor::from_slice(&frequencies)
}

impl RopeScaling {
    /// Long wavelengths are stretched by `factor`, short ones stay, those between are blended.
    pub(crate) fn scale(&self, frequency: f64) -> f64 {
        let wavelength = 2.0 * std::f64::consts::PI / frequency;
        let cycles = self.original_max_position_embeddings as f64 / wavelength;
        if cycles < self.low_freq_factor {
            frequency / self.factor
        } else if cycles > self.high_freq_factor {
            frequency
        } else {
            let smooth = (cycles - self.low_freq_factor) / (self.high_freq_factor - self.low_freq_factor);
            frequency * (smooth + (1.0 - smooth) / self.factor)
        }
    }
}

/// A standard normal number by the Box-Muller transform.
fn normal(generator: &mut impl rand_chacha::rand_core::RngCore) -> f64 {
    let mut uniform = || (generator.next_u32() as f64 + 0.5) / 2_f64.powi(32);
    let (radius, angle) = (uniform(), uniform());
    (-2.0 * radius.ln()).sqrt() * (2.0 * std::f64::consts::PI * angle).cos()
}
