//! Runs a target with a drafter and counts what the drafter is worth: verification, decoders, packs, replay, scores, report.
//!
//! The verification rules ([`verification`]), the outcomes drafted ahead ([`fan_out`]) and the accounting ([`rounds`]) are plain Rust
//! on slices. [`drafter`] is the one forward through which everything drafts, and `drafting` what a decoder's drafter keeps between
//! rounds. [`decode`] is the one loop through which everything decodes; [`asynchronous`] puts the drafter on a second thread. [`replay`]
//! gives τ and hit rates without the target; [`calibration`] and [`budget`] say which outcomes are likely and how many there is time for,
//! and [`round_times`] how fast decoding would be with each of several depths.
//! [`benchmark`] runs it all and [`score`] writes it down; [`simulated`] times it for other hardware; [`report`] shows it, and
//! [`comparison`] sets scores side by side.

pub mod asynchronous;
pub mod benchmark;
pub mod bootstrap;
pub mod budget;
pub mod calibration;
pub mod comparison;
pub mod decode;
mod dots;
pub mod drafter;
mod drafting;
pub mod fan_out;
mod figures;
pub mod generate;
mod hand_over;
mod headline;
mod judging;
pub mod replay;
pub mod report;
mod room;
pub mod round_times;
pub mod rounds;
pub mod sampling;
pub mod score;
pub mod simulated;
mod svg;
mod table;
mod under_way;
pub mod verification;
mod walking;

/// What [`hand_over`] sends through; its test under loom has others.
mod channels {
    pub(crate) use std::sync::mpsc::{Receiver, Sender, channel};
}

pub use asynchronous::asynchronous;
pub use decode::{DecodeError, Decoded, Event, Settings, autoregressive, lockstep};
pub use drafter::Drafter;
pub use replay::{Replay, replay};
pub use sampling::Sampler;
