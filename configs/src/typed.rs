//! The recipe as typed: the keys that may be written, each with what was written and where, or nothing.
//!
//! Sources are read one over the other, base first, so that what stays is what was written last.

use std::path::{Path, PathBuf};
use std::sync::Arc;

use toml::Spanned;
use toml::de::{DeTable, DeValue};

use crate::error::hint;
use crate::paths;
use crate::source::{Place, Source};
use crate::{Budget, RecipeError};

/// A value and the place it was written at.
#[derive(Debug, Clone)]
pub(crate) struct Written<T> {
    pub(crate) value: T,
    pub(crate) place: Place,
}

/// A field of the recipe as typed: its key path, and what was written for it.
#[derive(Debug)]
pub(crate) struct Field<T> {
    pub(crate) key: &'static str,
    pub(crate) written: Option<Written<T>>,
}

/// A section of the recipe as typed: where its table was last written, and its fields.
#[derive(Debug, Default)]
pub(crate) struct Section<T> {
    pub(crate) place: Option<Place>,
    pub(crate) fields: T,
}

/// What can be read from a TOML value: a field or a section.
trait Read {
    fn read(&mut self, path: &str, value: &Spanned<DeValue>, source: &Arc<Source>) -> Result<(), RecipeError>;
}

/// The keys of a table.
trait Keys {
    fn read_key(&mut self, key: &str, path: &str, value: &Spanned<DeValue>, source: &Arc<Source>) -> Result<bool, RecipeError>;
    fn keys() -> &'static [&'static str];

    /// Lets what `source` has just said replace what earlier ones said by another key.
    fn settle(&mut self, _source: &Arc<Source>) {}
}

/// Declares the keys of a table once, for the struct, its empty state, reading, and the names that messages suggest.
macro_rules! keys {
    ($name:ident at $prefix:literal$(, settled by $settle:path)?: $($field:ident: $type:ty),* $(,)?;
     $($section:ident: $section_type:ty),* $(,)?) => {
        #[derive(Debug)]
        pub(crate) struct $name {
            $(pub(crate) $field: Field<$type>,)*
            $(pub(crate) $section: Section<$section_type>,)*
        }

        impl Default for $name {
            fn default() -> Self {
                Self {
                    $($field: Field { key: concat!($prefix, stringify!($field)), written: None },)*
                    $($section: Section::default(),)*
                }
            }
        }

        impl Keys for $name {
            $(fn settle(&mut self, source: &Arc<Source>) {
                $settle(self, source);
            })?

            fn read_key(
                &mut self,
                key: &str,
                path: &str,
                value: &Spanned<DeValue>,
                source: &Arc<Source>,
            ) -> Result<bool, RecipeError> {
                match key {
                    $(stringify!($field) => self.$field.read(path, value, source)?,)*
                    $(stringify!($section) => self.$section.read(path, value, source)?,)*
                    _ => return Ok(false),
                }
                Ok(true)
            }

            fn keys() -> &'static [&'static str] {
                &[$(stringify!($field),)* $(stringify!($section),)*]
            }
        }

        #[cfg(test)]
        impl $name {
            pub(crate) fn key_paths() -> Vec<String> {
                let sections: Vec<Vec<String>> = vec![$(<$section_type>::key_paths(),)*];
                let fields = vec![$(concat!($prefix, stringify!($field)).to_string(),)*];
                fields.into_iter().chain(sections.into_iter().flatten()).collect()
            }
        }
    };
}

keys! { Recipe at "":
    extends: String, name: String, seed: u64;
    target: Target, drafter: Drafter, data: Data, regenerate: Regenerate, train: Train, prune: Prune, evaluate: Evaluate,
    devices: Devices,
}
keys! { Target at "target.": model: String, revision: String, dtype: String, thinking: bool; }
keys! { Drafter at "drafter.":
    kind: String, init: String, layers: Vec<Written<usize>>, keep_layers: usize, from_scratch: bool, block_size: usize, dtype: String,
    labels: String, anchor_sees: String, mask_token: u32, untie_head: bool;
}
keys! { Data at "data.":
    prompts: Vec<Written<String>>, max_tokens: usize, holdout: f64, limit: usize, max_rejected: f64, truncated: String;
}
keys! { Regenerate at "regenerate.", settled by no_servers_of_the_builtin_engine:
    engine: String, endpoints: Vec<Written<String>>, server_model: String, concurrency: usize, timeout: usize, retries: usize, temperature: f64, top_p: f64, top_k: usize, max_new_tokens: usize, batch_rows: usize;
}
keys! { Train at "train.", settled by one_batch_size:
    anchors: usize, gamma: f64, ar_weight: f64, objective: String, position_weights: String, pace_alpha: f64, learning_rate: f64,
    mask_learning_rate: f64, steps: usize, batch_responses: usize, batch_tokens: usize, forward_rows: usize, schedule: String,
    warmup: f64, decay: f64, minimum_learning_rate: f64, weight_decay: f64, beta1: f64, beta2: f64, clip: f64, chunk_rows: usize,
    recompute: bool, save_every: usize, evaluate_every: usize, evaluate_responses: usize, keep_last: usize;
}
keys! { Prune at "prune.":
    remove: usize, min_layers: usize, keep_tau: f64, stop: String, swap: bool, recovery_steps: usize, learning_rate: f64, ar_weight: f64, margin: f64,
    temperature: f64, criterion: String, responses: usize, anchors: usize;
}
keys! { Evaluate at "evaluate.", settled by no_budget_of_a_rectangle:
    benchmarks: Vec<Written<String>>, benchmark_folder: String, decoders: Vec<Written<String>>, fan_out: String, positions: usize,
    candidates: usize, budget: Budget, concurrency: usize, limit: usize, every: usize, max_new_tokens: usize, temperature: f64,
    top_p: f64, top_k: usize, hardware: Vec<Written<String>>, drafts: String;
}
keys! { Devices at "devices.": target: String, drafter: String, timeout: usize; }

// A hardware profile is a file of its own.
keys! { Hardware at "": name: String, source: String; verify: Latency, pack: Latency, draft: Latency }
keys! { Latency at "": floor_ms: f64, per_token_ms: f64, per_context_token_ms: f64, overhead_ms: f64; }

/// The size of a batch has two keys: the later source's replaces the earlier one's.
fn one_batch_size(train: &mut Train, source: &Arc<Source>) {
    let said = |field: &Field<usize>| field.written.as_ref().is_some_and(|written| Arc::ptr_eq(&written.place.source, source));
    match (said(&train.batch_responses), said(&train.batch_tokens)) {
        (true, false) => train.batch_tokens.written = None,
        (false, true) => train.batch_responses.written = None,
        _ => {}
    }
}

/// A budget goes with the fan-out that it was written for: a later source that asks for a rectangle, which has none, takes it away.
fn no_budget_of_a_rectangle(evaluate: &mut Evaluate, source: &Arc<Source>) {
    let (fan_out, budget) = (&evaluate.fan_out.written, &evaluate.budget.written);
    let rectangle = fan_out.as_ref().is_some_and(|it| it.value == "rectangle" && Arc::ptr_eq(&it.place.source, source));
    if rectangle && budget.as_ref().is_some_and(|it| !Arc::ptr_eq(&it.place.source, source)) {
        evaluate.budget.written = None;
    }
}

/// Servers go with the engine that they were written for: a later source that asks for the built-in one takes them away.
fn no_servers_of_the_builtin_engine(regenerate: &mut Regenerate, source: &Arc<Source>) {
    let is_here = |place: &Place| Arc::ptr_eq(&place.source, source);
    if !regenerate.engine.written.as_ref().is_some_and(|it| it.value == "builtin" && is_here(&it.place)) {
        return;
    }
    regenerate.endpoints.written.take_if(|it| !is_here(&it.place));
    regenerate.server_model.written.take_if(|it| !is_here(&it.place));
}

/// Reads the recipe file at `path` over `recipe`, after the file it extends. `named_at` is the `extends` that led here,
/// `chain` the files being read (as given, canonical).
pub(crate) fn read_file(
    recipe: &mut Recipe,
    path: &Path,
    named_at: Option<Place>,
    chain: &mut Vec<(PathBuf, PathBuf)>,
) -> Result<(), RecipeError> {
    let unreadable = |cause| RecipeError::Unreadable { path: path.to_path_buf(), cause, named_at: named_at.clone() };
    let canonical = path.canonicalize().map_err(unreadable)?;
    if let Some(at) = named_at.clone().filter(|_| chain.iter().any(|(_, other)| *other == canonical)) {
        let names: Vec<String> = chain.iter().map(|(name, _)| format!("`{}`", name.display())).collect();
        return Err(RecipeError::Circle { at, chain: format!("{} -> `{}`", names.join(" -> "), path.display()) });
    }
    let text = std::fs::read_to_string(path).map_err(unreadable)?;
    let folder = paths::folder_of(path).map_err(unreadable)?;
    let source = Arc::new(Source { name: path.display().to_string(), text, folder, is_override: false });
    let table = parse(&source)?;

    let mut here: Field<String> = Field { key: "extends", written: None };
    if let Some(value) = table.get_ref().get("extends") {
        here.read("extends", value, &source)?;
    }
    if let Some(Written { value, place }) = here.written {
        let base = path.parent().unwrap_or(Path::new("")).join(&value);
        chain.push((path.to_path_buf(), canonical));
        read_file(recipe, &base, Some(place), chain)?;
        chain.pop();
    }
    read_table(recipe, "", table.get_ref(), &source)
}

/// Reads one `key.path=VALUE` over `recipe`. Relative paths in it start from the current folder.
pub(crate) fn read_override(recipe: &mut Recipe, text: &str) -> Result<(), RecipeError> {
    let malformed = || RecipeError::Override { text: text.to_string() };
    let (key, value) = text.split_once('=').ok_or_else(malformed)?;
    let is_name = |part: &str| !part.is_empty() && part.chars().all(|it| it.is_ascii_alphanumeric() || "-_".contains(it));
    if !key.trim().split('.').all(is_name) || text.contains('\n') || key.trim() == "extends" {
        return Err(malformed());
    }
    // A value that is not TOML, such as a model's name, means itself.
    let is_toml = DeTable::parse(text).is_ok();
    let document = if is_toml { text.to_string() } else { format!("{key}={}", toml::Value::from(value.trim())) };
    let folder = paths::folder_of(Path::new("")).map_err(|cause| RecipeError::Unreadable {
        path: PathBuf::from("."),
        cause,
        named_at: None,
    })?;
    let source = Arc::new(Source { name: format!("--set {text}"), text: document, folder, is_override: true });
    let table = parse(&source)?;
    read_table(recipe, "", table.get_ref(), &source)
}

/// Reads a hardware profile.
pub(crate) fn read_hardware(source: &Arc<Source>) -> Result<Hardware, RecipeError> {
    let mut hardware = Hardware::default();
    read_table(&mut hardware, "", parse(source)?.get_ref(), source)?;
    Ok(hardware)
}

fn parse(source: &Arc<Source>) -> Result<Spanned<DeTable<'_>>, RecipeError> {
    DeTable::parse(&source.text).map_err(|error| RecipeError::Syntax {
        at: Place::new(source, error.span()),
        message: format!("not valid TOML: {}", error.message().replace('\n', "; ")),
    })
}

fn read_table<T: Keys>(keys: &mut T, path: &str, table: &DeTable, source: &Arc<Source>) -> Result<(), RecipeError> {
    for (key, value) in table.iter() {
        let name: &str = key.get_ref();
        let key_path = if path.is_empty() { name.to_string() } else { format!("{path}.{name}") };
        if !keys.read_key(name, &key_path, value, source)? {
            let at = Place::new(source, Some(key.span()));
            return Err(RecipeError::UnknownKey { at, key: key_path, hint: hint(name, T::keys()) });
        }
    }
    Ok(())
}

impl<T: Keys> Read for Section<T> {
    fn read(&mut self, path: &str, value: &Spanned<DeValue>, source: &Arc<Source>) -> Result<(), RecipeError> {
        let place = Place::new(source, Some(value.span()));
        let Some(table) = value.get_ref().as_table() else {
            return Err(wrong_type(path, "a table of keys", value, place));
        };
        read_table(&mut self.fields, path, table, source)?;
        self.fields.settle(source);
        // A file's section says more than the override that adds to it.
        if !source.is_override || self.place.is_none() {
            self.place = Some(place);
        }
        Ok(())
    }
}

impl<T: FromToml> Read for Field<T> {
    fn read(&mut self, path: &str, value: &Spanned<DeValue>, source: &Arc<Source>) -> Result<(), RecipeError> {
        let place = Place::new(source, Some(value.span()));
        match T::from_toml(value, source) {
            Some(value) => self.written = Some(Written { value, place }),
            None => return Err(wrong_type(path, T::ONE, value, place)),
        }
        Ok(())
    }
}

fn wrong_type(key: &str, expected: &'static str, value: &Spanned<DeValue>, at: Place) -> RecipeError {
    let kind = value.get_ref().type_str();
    let article = if kind.starts_with(['a', 'i']) { "an" } else { "a" };
    let found = match at.short_text() {
        Some(text) if !value.get_ref().is_table() => format!("the {kind} `{text}`"),
        _ => format!("{article} {kind}"),
    };
    RecipeError::WrongType { at, key: key.to_string(), expected, found }
}

/// What the value of a key can be, and how messages call it.
pub(crate) trait FromToml: Sized {
    const ONE: &'static str;
    const LIST: &'static str;
    fn from_toml(value: &Spanned<DeValue>, source: &Arc<Source>) -> Option<Self>;
}

impl FromToml for String {
    const ONE: &'static str = "a string";
    const LIST: &'static str = "a list of strings";
    fn from_toml(value: &Spanned<DeValue>, _: &Arc<Source>) -> Option<Self> {
        value.get_ref().as_str().map(String::from)
    }
}

impl FromToml for bool {
    const ONE: &'static str = "`true` or `false`";
    const LIST: &'static str = "a list of `true` and `false`";
    fn from_toml(value: &Spanned<DeValue>, _: &Arc<Source>) -> Option<Self> {
        value.get_ref().as_bool()
    }
}

impl FromToml for f64 {
    const ONE: &'static str = "a finite number";
    const LIST: &'static str = "a list of finite numbers";
    fn from_toml(value: &Spanned<DeValue>, _: &Arc<Source>) -> Option<Self> {
        let number = match value.get_ref() {
            DeValue::Float(float) => float.as_str().parse().ok()?,
            other => integer(other)? as f64,
        };
        number.is_finite().then_some(number)
    }
}

/// Whole numbers stay within what a TOML integer is sure to hold, so that a resolved recipe can be written; counts also within what
/// can be added and multiplied without a second thought.
macro_rules! whole_number {
    ($type:ty, $most:expr, $one:literal) => {
        impl FromToml for $type {
            const ONE: &'static str = $one;
            const LIST: &'static str = "a list of whole numbers of at least 0";
            fn from_toml(value: &Spanned<DeValue>, _: &Arc<Source>) -> Option<Self> {
                integer(value.get_ref())?.try_into().ok().filter(|&number| number <= $most)
            }
        }
    };
}
whole_number!(usize, 1_000_000_000, "a whole number from 0 to 1000000000");
whole_number!(u64, <u64>::MAX, "a whole number of at least 0");
whole_number!(u32, <u32>::MAX, "a whole number from 0 to 4294967295");

impl FromToml for Budget {
    const ONE: &'static str = "a number of blocks, \"auto\" or a time such as \"8 ms\"";
    const LIST: &'static str = "a list of budgets";
    fn from_toml(value: &Spanned<DeValue>, source: &Arc<Source>) -> Option<Self> {
        match value.get_ref().as_str() {
            Some(text) => Self::from_text(text),
            None => usize::from_toml(value, source).map(Self::Blocks),
        }
    }
}

fn integer(value: &DeValue) -> Option<i64> {
    let integer = value.as_integer()?;
    i64::from_str_radix(integer.as_str(), integer.radix()).ok()
}

impl<T: FromToml> FromToml for Vec<Written<T>> {
    const ONE: &'static str = T::LIST;
    const LIST: &'static str = "a list of lists";
    fn from_toml(value: &Spanned<DeValue>, source: &Arc<Source>) -> Option<Self> {
        let items = value.get_ref().as_array()?.iter();
        items
            .map(|item| {
                let place = Place::new(source, Some(item.span()));
                Some(Written { value: T::from_toml(item, source)?, place })
            })
            .collect()
    }
}
