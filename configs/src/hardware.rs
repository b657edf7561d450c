//! Hardware profiles: how long the forwards of a round take on machines that need not be at hand.
//!
//! A profile is a TOML file, as strict as a recipe. Some ship with this crate and go by their names; their figures are derived in their
//! comments. A profile of one's own goes by its path.

use std::path::Path;
use std::sync::Arc;

use serde::Serialize;

use crate::rules::bad;
use crate::source::{Place, Source};
use crate::typed::{self, Field, FromToml, Section, Written};
use crate::validate::checked_name;
use crate::{RecipeError, paths};

/// The profiles that ship, each with the name in it.
const PRESETS: &[(&str, &str)] = &[
    ("h100-graphs-8b-8b", include_str!("../hardware/h100-graphs-8b-8b.toml")),
    ("h100-graphs-8b-1.7b", include_str!("../hardware/h100-graphs-8b-1.7b.toml")),
    ("h100-graphs-32b-1.7b", include_str!("../hardware/h100-graphs-32b-1.7b.toml")),
    ("h100-transformers-8b-8b", include_str!("../hardware/h100-transformers-8b-8b.toml")),
];

/// Two devices, one for the target and one for the drafter; written in a recipe as the name of a preset or as a path.
#[derive(Debug, Clone, PartialEq, Serialize)]
#[serde(into = "String")]
pub struct Hardware {
    /// Letters, digits, `-`, `_` and `.`.
    pub name: String,
    /// Where the figures come from, and for which models they are; on one line.
    pub source: String,
    /// The target's forward over a block, or over one token.
    pub verify: Latency,
    /// The drafter's forward over a block under verification and all its continuations.
    pub pack: Latency,
    /// The drafter's forward over one block.
    pub draft: Latency,
    /// What a recipe calls it: the name of a preset or an absolute path.
    pub reference: String,
}

impl From<Hardware> for String {
    fn from(hardware: Hardware) -> Self {
        hardware.reference
    }
}

/// How long a forward takes, by the tokens it runs over and those that the cache holds already.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Latency {
    /// What no forward falls below: reading the weights, or launching the kernels. More than 0; the others are at least 0.
    pub floor_ms: f64,
    /// Arithmetic on one token, which hides behind the floor until it outlasts it.
    pub per_token_ms: f64,
    /// Reading one token of the context from the cache.
    pub per_context_token_ms: f64,
    /// What comes on top of every forward, such as picking tokens and telling the other device.
    pub overhead_ms: f64,
}

impl Latency {
    /// Seconds of a forward over `tokens` behind `context` tokens.
    pub fn seconds(&self, tokens: usize, context: usize) -> f64 {
        let work = self.floor_ms.max(self.per_token_ms * tokens as f64);
        (work + self.per_context_token_ms * context as f64 + self.overhead_ms) / 1000.0
    }
}

/// The profiles that `evaluate.hardware` names.
pub(crate) fn load(field: &Field<Vec<Written<String>>>) -> Result<Vec<Hardware>, RecipeError> {
    let mut profiles: Vec<Hardware> = Vec::new();
    for written in field.written.iter().flat_map(|written| &written.value) {
        let profile = if written.value.ends_with(".toml") || written.value.contains('/') {
            let path = paths::file(field.key, written)?;
            let text = std::fs::read_to_string(&path).map_err(|cause| {
                bad(field.key, &written.place, &format!("names `{}`, which cannot be read: {cause}", path.display()))
            })?;
            parse(&path, text)?
        } else {
            let preset = PRESETS.iter().find(|(name, _)| *name == written.value);
            let Some((name, text)) = preset else {
                let names: Vec<String> = PRESETS.iter().map(|(name, _)| format!("`{name}`")).collect();
                let fault = format!(
                    "must be one of {}, or the path of a profile that ends in `.toml`, not `{}`",
                    names.join(", "),
                    written.value
                );
                return Err(bad(field.key, &written.place, &fault));
            };
            parse(Path::new(name), (*text).to_string())?
        };
        if profiles.iter().any(|other| other.name == profile.name) {
            let fault = format!("names two profiles `{}`, which scores could not tell apart; rename one", profile.name);
            return Err(bad(field.key, &written.place, &fault));
        }
        profiles.push(profile);
    }
    Ok(profiles)
}

/// Reads and checks the profile at `path`; a preset's is its name.
fn parse(path: &Path, text: String) -> Result<Hardware, RecipeError> {
    let source = Arc::new(Source { name: path.display().to_string(), text, folder: Default::default(), is_override: false });
    let typed = typed::read_hardware(&source)?;
    let whole_file = Place::new(&source, None);
    let name = required("name", &typed.name, &whole_file)?;
    checked_name("name", name)?;
    let origin = required("source", &typed.source, &whole_file)?;
    if origin.value.trim().is_empty() || origin.value.chars().any(char::is_control) {
        return Err(bad("source", &origin.place, "must say on one line where the figures come from"));
    }
    Ok(Hardware {
        name: name.value.clone(),
        source: origin.value.clone(),
        verify: latency("verify", &typed.verify, &whole_file)?,
        pack: latency("pack", &typed.pack, &whole_file)?,
        draft: latency("draft", &typed.draft, &whole_file)?,
        reference: source.name.clone(),
    })
}

fn latency(name: &str, section: &Section<typed::Latency>, whole_file: &Place) -> Result<Latency, RecipeError> {
    let place = section.place.as_ref().unwrap_or(whole_file);
    let fields = &section.fields;
    let milliseconds = |field: &Field<f64>| {
        let key = format!("{name}.{}", field.key);
        let written = required(&key, field, place)?;
        // An hour: beyond that sums of many rounds mean nothing.
        if !(0.0..=3.6e6).contains(&written.value) {
            return Err(bad(&key, &written.place, &format!("must be from 0 to 3600000 milliseconds, not `{}`", written.value)));
        }
        Ok(written.value)
    };
    let floor_ms = milliseconds(&fields.floor_ms)?;
    if let (Some(written), true) = (&fields.floor_ms.written, floor_ms == 0.0) {
        return Err(bad(&format!("{name}.floor_ms"), &written.place, "must be greater than 0, for no forward is free"));
    }
    Ok(Latency {
        floor_ms,
        per_token_ms: milliseconds(&fields.per_token_ms)?,
        per_context_token_ms: milliseconds(&fields.per_context_token_ms)?,
        overhead_ms: milliseconds(&fields.overhead_ms)?,
    })
}

fn required<'a, T: FromToml>(key: &str, field: &'a Field<T>, at: &Place) -> Result<&'a Written<T>, RecipeError> {
    field.written.as_ref().ok_or_else(|| {
        let remedy = match key.split_once('.') {
            Some((section, name)) => format!("`{name} = …` under `[{section}]`, {}", T::ONE),
            None => format!("`{key} = …` at the top, {}", T::ONE),
        };
        RecipeError::MissingKey { at: at.clone(), key: key.to_string(), remedy }
    })
}
