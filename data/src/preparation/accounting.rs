//! Where every prompt row went: rows read are rows used, rejected, and left out by the limit, of each file.

use std::collections::BTreeMap;

use serde::{Deserialize, Serialize};

use crate::prompts::Rejected;

/// What became of one file's rows.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct FileCount {
    pub file: String,
    pub read: usize,
    pub used: usize,
    pub rejected: usize,
    pub left_out_by_limit: usize,
}

impl FileCount {
    /// One line about it.
    pub fn in_words(&self) -> String {
        let limit = match self.left_out_by_limit {
            0 => String::new(),
            count => format!(", {count} left out by the limit"),
        };
        format!("{}: {} rows, {} used, {} rejected{limit}", self.file, self.read, self.used, self.rejected)
    }
}

/// Kinds of reasons that are told; the file of rejected rows has all.
const TOLD: usize = 5;
/// Kinds that are told apart; a file of a thousand kinds of faults is told of no better than one of a hundred.
const KEPT: usize = 100;

/// Why rows were rejected, by kind, each with its first row.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Reasons {
    by_kind: BTreeMap<String, (usize, Rejected)>,
    of_other_kinds: usize,
    first: Option<Rejected>,
}

impl Reasons {
    pub fn add(&mut self, row: &Rejected) {
        // What is shown of it is its place and its reason.
        let shown = || Rejected { text: String::new(), ..row.clone() };
        self.first.get_or_insert_with(shown);
        let kind = kind(&row.reason);
        let full = self.by_kind.len() >= KEPT;
        match self.by_kind.get_mut(&kind) {
            Some((count, _)) => *count += 1,
            None if full => self.of_other_kinds += 1,
            None => drop(self.by_kind.insert(kind, (1, shown()))),
        }
    }

    pub fn first(&self) -> Option<&Rejected> {
        self.first.as_ref()
    }

    /// A line for each of the commonest kinds.
    pub fn in_words(&self) -> Vec<String> {
        let mut kinds: Vec<&(usize, Rejected)> = self.by_kind.values().collect();
        kinds.sort_by_key(|(count, _)| std::cmp::Reverse(*count));
        let others = kinds.iter().skip(TOLD).map(|(count, _)| count).sum::<usize>() + self.of_other_kinds;
        let more = (others > 0).then(|| format!("{others} more were rejected for other reasons"));
        let told = kinds
            .iter()
            .take(TOLD)
            .map(|(count, first)| format!("rejected {count}, first in line {} of {}: {}", first.line, first.file, first.reason));
        told.chain(more).collect()
    }
}

/// Reasons that differ in numbers or in what stands behind a colon are of one kind.
fn kind(reason: &str) -> String {
    let head = reason.split(':').next().unwrap_or_default();
    head.chars().filter(|character| !character.is_ascii_digit()).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn reasons(rows: &[(&str, usize, &str)]) -> Reasons {
        let mut reasons = Reasons::default();
        for &(file, line, reason) in rows {
            reasons.add(&Rejected { file: file.to_owned(), line, reason: reason.to_owned(), text: String::new() });
        }
        reasons
    }

    #[test]
    fn reasons_of_a_kind_are_told_once_the_commonest_first() {
        let told = reasons(&[
            ("a", 3, "not JSON: EOF at column 7"),
            ("b", 4, "message 2 (`user`) is empty"),
            ("b", 9, "message 13 (`user`) is empty"),
        ]);
        let expected = [
            "rejected 2, first in line 4 of b: message 2 (`user`) is empty",
            "rejected 1, first in line 3 of a: not JSON: EOF at column 7",
        ];
        assert_eq!(told.in_words(), expected);
        assert_eq!(told.first().map(|row| row.line), Some(3));
        assert!(Reasons::default().in_words().is_empty());
        let many: Vec<String> =
            (0..676_u16).map(|n| format!("{}{}", char::from(b'a' + (n / 26) as u8), char::from(b'a' + (n % 26) as u8))).collect();
        let many = reasons(&many.iter().map(|reason| ("a", 1, reason.as_str())).collect::<Vec<_>>());
        assert_eq!(many.in_words().last().map(String::as_str), Some("671 more were rejected for other reasons"));
        let count = FileCount { file: "a".to_owned(), read: 5, used: 1, rejected: 1, left_out_by_limit: 3 };
        assert_eq!(count.in_words(), "a: 5 rows, 1 used, 1 rejected, 3 left out by the limit");
    }
}
