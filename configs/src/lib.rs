//! The recipe of a run: one strict TOML file, read, checked and resolved before anything else happens.
//!
//! The way of a recipe: the files of its `extends` chain and the `--set` overrides are sources ([`source`]); each source
//! is read over the one before it into the recipe as typed ([`typed`], every value with its place in its source); the
//! recipe as typed is checked, completed by defaults and turned into a [`Recipe`] ([`validate`]). Only a [`Recipe`] leaves
//! this crate, so that nobody else meets an absent field, a relative path or an impossible value. Beside it stand the benchmarks that
//! a recipe can call by name ([`benchmarks`]).

pub mod benchmarks;
mod error;
mod hardware;
mod paths;
mod recipe;
mod reference;
mod rules;
mod source;
#[cfg(test)]
mod tests;
mod typed;
mod validate;

use std::path::Path;

pub use error::RecipeError;
pub use hardware::{Hardware, Latency};
pub use recipe::{
    AnchorSees, Benchmark, Budget, Criterion, Data, Decoder, Devices, Drafter, DrafterKind, Drafts, Dtype, Engine, Evaluate,
    FanOut, Labels, Objective, PositionWeights, Prune, Recipe, Regenerate, Schedule, Stop, Target, Train, Truncated,
};
pub use reference::{Method, PublishedFigures, Reference, ReferenceError};
pub use source::Place;
pub use validate::{COLDEST, LARGEST_BLOCK, MOST_BLOCKS};

/// Reads the recipe at `path`, the recipes it extends, and then `overrides` of the form `key.path=VALUE`, the later ones
/// winning. VALUE is TOML, or else taken as a bare string.
///
/// Errors name the file, line and key of the first thing that is wrong; see [`RecipeError`].
pub fn load(path: &Path, overrides: &[String]) -> Result<Recipe, RecipeError> {
    let mut typed = typed::Recipe::default();
    typed::read_file(&mut typed, path, None, &mut Vec::new())?;
    for text in overrides {
        typed::read_override(&mut typed, text)?;
    }
    validate::validate(&typed, path)
}
