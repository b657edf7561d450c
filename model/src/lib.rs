//! Decoder-only transformers (Llama, Qwen2, Qwen3) as Hugging Face names them, their weights, attention and caches.
//!
//! Shapes legend, used as suffixes of tensor names in this crate and the crates above it:
//! `T` rows (tokens) of one forward, `D` hidden size, `H` query heads, `K` key/value heads, `G` query heads per key head (H / K),
//! `E` head size, `F` feed-forward size, `S` cache slots, `R` rows picked for logits, `V` vocabulary.
//!
//! Every forward runs over `T` flat rows without padding, whatever they belong to: one prompt, a draft under verification, a pack of
//! continuations, or several responses with all their blocks. Only attention knows which rows see which ([`attention::Attention`]).

pub mod attention;
pub mod cache;
pub mod checkpoint;
pub mod config;
pub mod dequantise;
pub mod export;
pub mod gguf_export;
mod gguf_names;
pub mod quantise;
pub mod rope;
pub mod tensor_file;
pub mod transformer;
pub mod weights;

pub use attention::{Attention, BlockPattern, CachedAttention, PackedAttention, Piece, Sequence};
pub use cache::KvCache;
pub use config::ModelConfig;
pub use transformer::Transformer;
