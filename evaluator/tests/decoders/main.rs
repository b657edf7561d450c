//! Decoders, packs and replay over small random models in f32, against plain formulations of the same things.

#![allow(clippy::unwrap_used)]

mod chi_square;
mod drawn;
mod exact;
mod failures;
mod measured;
mod models;
mod packs;
mod replays;
mod scores;
mod texts;
