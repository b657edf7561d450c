//! Training, decoding and batched generation against the definition of what a block sees, on seeded random models and inputs.
//!
//! The definition is computed the slow way ([`definition`]). Everything but attention is the crate's own forward, which `golden.rs`
//! compares with Hugging Face.
//!
//! Shapes legend: see the crate's documentation.
#![allow(clippy::unwrap_used)]

mod cases;
mod decoding;
mod definition;
mod training;
