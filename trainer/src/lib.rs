//! Training a diffusion drafter: batches, the objective with its gradient, layer-wise backward, optimiser, checkpoints, the loop.
//!
//! The way of the data: [`packing`] chooses a step's responses and shares them out over ranks, [`batch`] lays responses and their blocks
//! out as flat rows, [`backward`] runs them through the model and back, a layer at a time as [`parameters`] gathers it from all ranks;
//! its end is the head, which turns logits into a loss and its gradient chunk by chunk ([`objective`], [`losses`]). [`optimiser`] moves
//! the f32 masters, [`training`] repeats this, [`watching`] tells of it, [`saving`] and [`state`] make it resumable.
//!
//! Shapes legend: that of the crate `model`; additionally `R` labelled rows of one chunk.

pub mod backward;
pub mod batch;
mod head;
pub mod losses;
pub mod metrics;
pub mod objective;
pub mod optimiser;
pub mod packing;
pub mod parameters;
pub mod saving;
pub mod state;
pub mod training;
pub mod watching;
