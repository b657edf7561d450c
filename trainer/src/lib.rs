//! Training a diffusion drafter: batches, the objective with its gradient, layer-wise backward, optimiser, checkpoints, the loop.
//!
//! The way of the data: [`batch`] packs responses and their blocks into flat rows, [`backward`] runs them through the model and back,
//! [`objective`] turns logits into a loss and its gradient chunk by chunk, [`optimiser`] moves the f32 masters that
//! [`parameters`] holds, [`training`] repeats this and [`state`] makes it resumable.
//!
//! Shapes legend: that of the crate `model`; additionally `R` labelled rows of one chunk.

pub mod backward;
pub mod batch;
pub mod metrics;
pub mod objective;
pub mod optimiser;
pub mod parameters;
pub mod state;
pub mod training;
