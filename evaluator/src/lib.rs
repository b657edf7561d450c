//! Runs a target with a drafter and counts what the drafter is worth: verification, decoders, packs, replay, scores, report.
//!
//! The verification rule ([`verification`]), the outcomes drafted ahead ([`fan_out`]) and the accounting ([`rounds`]) are plain Rust
//! on slices. [`drafter`] is the one forward through which everything drafts. [`decode`] is the one loop through which everything
//! decodes; [`asynchronous`] puts the drafter on a second thread. [`replay`] gives τ without the target. [`benchmark`] runs it all
//! and [`score`] writes it down; [`report`] shows it.

pub mod asynchronous;
pub mod benchmark;
pub mod bootstrap;
pub mod decode;
pub mod drafter;
pub mod fan_out;
mod figures;
pub mod generate;
pub mod replay;
pub mod report;
pub mod rounds;
pub mod sampling;
pub mod score;
mod svg;
mod table;
pub mod verification;

pub use asynchronous::asynchronous;
pub use decode::{DecodeError, Decoded, Settings, autoregressive, lockstep};
pub use drafter::Drafter;
pub use replay::{Replay, replay};
pub use sampling::Sampler;
