//! Rules that many fields of a recipe share. Each takes the default that stands when nothing was written.

use std::fmt::Display;

use crate::RecipeError;
use crate::source::Place;
use crate::typed::{Field, FromToml, Written};
use crate::validate::COLDEST;

pub(crate) fn any<T: Clone>(field: &Field<T>, default: T) -> T {
    field.written.as_ref().map_or(default, |written| written.value.clone())
}

pub(crate) fn count(field: &Field<usize>, default: usize) -> Result<usize, RecipeError> {
    checked(field, default, |value| *value >= 1, "must be at least 1")
}

pub(crate) fn optional_count(field: &Field<usize>) -> Result<Option<usize>, RecipeError> {
    field.written.as_ref().map(|_| count(field, 1)).transpose()
}

pub(crate) fn required_count(field: &Field<usize>, section: &Place) -> Result<usize, RecipeError> {
    within(field, required(field, section)?, |value| *value >= 1, "must be at least 1")
}

pub(crate) fn positive(field: &Field<f64>, default: f64) -> Result<f64, RecipeError> {
    checked(field, default, |value| *value > 0.0, "must be greater than 0")
}

pub(crate) fn not_negative(field: &Field<f64>, default: f64) -> Result<f64, RecipeError> {
    checked(field, default, |value| *value >= 0.0, "must be at least 0")
}

pub(crate) fn temperature(field: &Field<f64>) -> Result<f64, RecipeError> {
    let may_be = |value: &f64| *value == 0.0 || *value >= COLDEST;
    checked(field, 0.0, may_be, &format!("must be 0, which takes the likeliest token, or at least {COLDEST}"))
}

pub(crate) fn fraction(field: &Field<f64>, default: f64) -> Result<f64, RecipeError> {
    checked(field, default, |value| (0.0..=1.0).contains(value), "must be from 0 to 1")
}

pub(crate) fn share(field: &Field<f64>, default: f64) -> Result<f64, RecipeError> {
    checked(field, default, |value| *value > 0.0 && *value <= 1.0, "must be greater than 0 and at most 1")
}

pub(crate) fn below_one(field: &Field<f64>, default: f64) -> Result<f64, RecipeError> {
    checked(field, default, |value| (0.0..1.0).contains(value), "must be at least 0 and less than 1")
}

pub(crate) fn choice<T: Copy>(field: &Field<String>, default: T, choices: &[(&str, T)]) -> Result<T, RecipeError> {
    field.written.as_ref().map_or(Ok(default), |written| chosen(field.key, written, choices))
}

pub(crate) fn chosen<T: Copy>(key: &str, written: &Written<String>, choices: &[(&str, T)]) -> Result<T, RecipeError> {
    choices.iter().find(|(name, _)| *name == written.value).map(|(_, value)| *value).ok_or_else(|| {
        let names: Vec<String> = choices.iter().map(|(name, _)| format!("`{name}`")).collect();
        bad(key, &written.place, &format!("must be one of {}, not `{}`", names.join(", "), written.value))
    })
}

pub(crate) fn checked<T: Clone + Display>(
    field: &Field<T>,
    default: T,
    is_valid: impl Fn(&T) -> bool,
    must: &str,
) -> Result<T, RecipeError> {
    field.written.as_ref().map_or(Ok(default), |written| within(field, written, is_valid, must))
}

pub(crate) fn within<T: Clone + Display>(
    field: &Field<T>,
    written: &Written<T>,
    is_valid: impl Fn(&T) -> bool,
    must: &str,
) -> Result<T, RecipeError> {
    if is_valid(&written.value) {
        return Ok(written.value.clone());
    }
    Err(bad(field.key, &written.place, &format!("{must}, not `{}`", written.value)))
}

/// What was written for a key that has no default; `section` is where it is missed.
pub(crate) fn required<'a, T: FromToml>(field: &'a Field<T>, section: &Place) -> Result<&'a Written<T>, RecipeError> {
    field.written.as_ref().ok_or_else(|| {
        let remedy = match field.key.rsplit_once('.') {
            Some((section, name)) => format!("`{name} = …` under `[{section}]`, {}", T::ONE),
            None => format!("`{} = …` at the top, {}", field.key, T::ONE),
        };
        RecipeError::MissingKey { at: section.clone(), key: field.key.to_string(), remedy }
    })
}

pub(crate) fn bad(key: &str, place: &Place, fault: &str) -> RecipeError {
    RecipeError::BadValue { at: place.clone(), key: key.to_string(), fault: fault.to_string() }
}
