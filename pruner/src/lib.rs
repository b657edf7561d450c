//! Removing a drafter's layers by what their absence costs in acceptance length, and recovering it by distillation.
//!
//! [`search`] measures every layer's τ loss on the same held-out blocks, [`criteria`] what else could decide, [`choosing`] which layer goes;
//! [`ledger`] keeps what was measured, [`pruning`] removes the layer, lets the trainer recover the rest, and repeats; [`speed`] may say when
//! to stop, and [`swapping`] tries another layer in the end.
//!
//! Shapes legend: that of the crate `model`.

pub mod choosing;
pub mod criteria;
pub mod ledger;
pub mod pruning;
pub mod recovery;
pub mod search;
pub mod speed;
pub mod swapping;
