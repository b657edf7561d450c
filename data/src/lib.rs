//! Everything between prompt files and token ids: requests, benchmarks, responses, tokenizer and chat template, supervision, and the
//! manifests that say which stage is done. Never links libtorch.

pub mod benchmarks;
pub mod chat;
mod columns;
pub mod conversations;
pub mod engine;
pub mod files;
pub mod gguf;
pub mod manifest;
pub mod preparation;
pub mod prompts;
pub mod requests;
pub mod responses;
pub mod sample;
pub mod serving;
pub mod supervision;
#[cfg(test)]
mod testing;
pub mod tokenizer;
