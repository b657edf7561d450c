//! What can be wrong with a recipe, and how it is said: place, key, fault and remedy, then the line with carets below it.

use std::path::PathBuf;

use crate::source::Place;

/// The first fault found in a recipe. Shown, it is one line, followed by the source line and carets where there is one.
#[derive(Debug, thiserror::Error)]
pub enum RecipeError {
    /// A recipe file, the first or one named by `extends`, that cannot be read.
    #[error("cannot read recipe `{}`: {cause}{}", path.display(), excerpt(named_at))]
    Unreadable { path: PathBuf, cause: std::io::Error, named_at: Option<Place> },

    /// Text that is not TOML.
    #[error("{}: {message}{}", at.head(), at.excerpt())]
    Syntax { at: Place, message: String },

    /// An override that is not `key.path=VALUE`.
    #[error("--set {text}: not of the form `key.path=VALUE`, as in `train.ar_weight=0.5`")]
    Override { text: String },

    /// `extends` that leads back to a recipe that is being read.
    #[error("{}: `extends` goes round in a circle: {chain}{}", at.head(), at.excerpt())]
    Circle { at: Place, chain: String },

    /// A key that no section has.
    #[error("{}: unknown key `{key}`; {hint}{}", at.head(), at.excerpt())]
    UnknownKey { at: Place, key: String, hint: String },

    /// A key that every recipe has to set.
    #[error("{}: missing key `{key}`; add {remedy}{}", at.head(), at.excerpt())]
    MissingKey { at: Place, key: String, remedy: String },

    /// A value of a type that its key does not take.
    #[error("{}: `{key}` must be {expected}, not {found}{}", at.head(), at.excerpt())]
    WrongType { at: Place, key: String, expected: &'static str, found: String },

    /// A value of the right type that cannot be.
    #[error("{}: `{key}` {fault}{}", at.head(), at.excerpt())]
    BadValue { at: Place, key: String, fault: String },

    /// A path or glob that names nothing.
    #[error("{}: `{key}`: no {what} `{}`{}", at.head(), path.display(), at.excerpt())]
    NoFile { at: Place, key: String, what: &'static str, path: PathBuf },
}

fn excerpt(place: &Option<Place>) -> String {
    place.as_ref().map_or_else(String::new, |place| format!("; named by `extends` at {}{}", place.head(), place.excerpt()))
}

/// The words that point from an unknown key to the valid one: the nearest by edit distance, or all when none is near.
pub(crate) fn hint(unknown: &str, valid: &[&str]) -> String {
    let nearest = valid.iter().map(|key| (edit_distance(unknown, key), key)).min_by_key(|(distance, _)| *distance);
    match nearest {
        Some((distance, key)) if distance <= key.chars().count().div_ceil(2) => format!("nearest valid key: `{key}`"),
        _ => format!("valid keys: `{}`", valid.join("`, `")),
    }
}

/// The least number of insertions, deletions and replacements of one character that turn `left` into `right`.
fn edit_distance(left: &str, right: &str) -> usize {
    let right: Vec<char> = right.chars().collect();
    let mut row: Vec<usize> = (0..=right.len()).collect();
    for (row_index, left_character) in left.chars().enumerate() {
        let mut diagonal = row[0];
        row[0] = row_index + 1;
        for (column, right_character) in right.iter().enumerate() {
            let replaced = diagonal + usize::from(left_character != *right_character);
            diagonal = row[column + 1];
            row[column + 1] = replaced.min(diagonal + 1).min(row[column] + 1);
        }
    }
    row[right.len()]
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn edit_distance_counts_single_changes() {
        for (left, right, distance) in
            [("", "", 0), ("abc", "abc", 0), ("", "abc", 3), ("anchorz", "anchors", 1), ("kitten", "sitting", 3), ("ab", "ba", 2)]
        {
            assert_eq!(edit_distance(left, right), distance, "{left} {right}");
            assert_eq!(edit_distance(right, left), distance, "{right} {left}");
        }
    }

    #[test]
    fn hint_lists_all_keys_when_none_is_near() {
        assert_eq!(hint("step", &["anchors", "steps"]), "nearest valid key: `steps`");
        assert_eq!(hint("zzzzzzzz", &["anchors", "steps"]), "valid keys: `anchors`, `steps`");
    }
}
