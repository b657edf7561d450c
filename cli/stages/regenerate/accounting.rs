//! Where every prompt row went: rows read are rows used, rejected, and left out by the limit, of each file.

use std::collections::BTreeMap;

use data::prompts::{Rejected, Request};
use serde::Serialize;

/// What became of one file's rows.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
pub(super) struct FileCount {
    pub(super) file: String,
    pub(super) read: usize,
    pub(super) used: usize,
    pub(super) rejected: usize,
    pub(super) left_out_by_limit: usize,
}

/// Counts by file, in the order in which files were read.
pub(super) fn by_file<'r>(
    rows_by_file: &[(String, usize)],
    used: impl Iterator<Item = &'r Request>,
    rejected: &[Rejected],
) -> Vec<FileCount> {
    let mut counts: BTreeMap<&str, (usize, usize)> = BTreeMap::new();
    used.for_each(|request| counts.entry(&request.file).or_default().0 += 1);
    rejected.iter().for_each(|row| counts.entry(&row.file).or_default().1 += 1);
    let count = |(file, read): &(String, usize)| {
        let (used, rejected) = counts.get(file.as_str()).copied().unwrap_or_default();
        FileCount { file: file.clone(), read: *read, used, rejected, left_out_by_limit: read.saturating_sub(used + rejected) }
    };
    rows_by_file.iter().map(count).collect()
}

/// Kinds of reasons that are told; rejected.jsonl has all.
const REASONS: usize = 5;

/// A line for each of several files, and the commonest reasons for which rows were rejected.
pub(super) fn in_words(sources: &[FileCount], rejected: &[Rejected]) -> Vec<String> {
    let of_file = |it: &FileCount| {
        let limit =
            if it.left_out_by_limit > 0 { format!(", {} left out by the limit", it.left_out_by_limit) } else { String::new() };
        format!("{}: {} rows, {} used, {} rejected{limit}", it.file, it.read, it.used, it.rejected)
    };
    let files = sources.iter().filter(|_| sources.len() > 1).map(of_file);
    let mut reasons: BTreeMap<String, (usize, &Rejected)> = BTreeMap::new();
    rejected.iter().for_each(|row| reasons.entry(kind(&row.reason)).or_insert((0, row)).0 += 1);
    let mut reasons: Vec<(usize, &Rejected)> = reasons.into_values().collect();
    reasons.sort_by_key(|(count, _)| std::cmp::Reverse(*count));
    let others = reasons.iter().skip(REASONS).map(|(count, _)| count).sum::<usize>();
    let more = (others > 0).then(|| format!("{others} more were rejected for other reasons"));
    let told = reasons
        .iter()
        .take(REASONS)
        .map(|(count, first)| format!("rejected {count}, first in line {} of {}: {}", first.line, first.file, first.reason));
    files.chain(told).chain(more).collect()
}

/// Reasons that differ in numbers or in what stands behind a colon are of one kind.
fn kind(reason: &str) -> String {
    let head = reason.split(':').next().unwrap_or_default();
    head.chars().filter(|character| !character.is_ascii_digit()).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn rejected(file: &str, line: usize, reason: &str) -> Rejected {
        Rejected { file: file.to_string(), line, reason: reason.to_string(), text: String::new() }
    }

    #[test]
    fn every_row_is_in_one_place_and_reasons_of_a_kind_are_told_once() {
        let request = |file: &str| Request {
            id: String::new(),
            messages: Vec::new(),
            tools: None,
            source: String::new(),
            file: file.to_string(),
            line: 1,
        };
        let used = [request("a"), request("b"), request("b")];
        let all = [
            rejected("a", 3, "not JSON: EOF at column 7"),
            rejected("b", 4, "message 2 (`user`) is empty"),
            rejected("b", 9, "message 13 (`user`) is empty"),
        ];
        let sources = by_file(&[("a".to_string(), 5), ("b".to_string(), 4)], used.iter(), &all);
        let counts: Vec<[usize; 4]> = sources.iter().map(|it| [it.read, it.used, it.rejected, it.left_out_by_limit]).collect();
        assert_eq!(counts, [[5, 1, 1, 3], [4, 2, 2, 0]]);
        let expected = [
            "a: 5 rows, 1 used, 1 rejected, 3 left out by the limit",
            "b: 4 rows, 2 used, 2 rejected",
            "rejected 2, first in line 4 of b: message 2 (`user`) is empty",
            "rejected 1, first in line 3 of a: not JSON: EOF at column 7",
        ];
        assert_eq!(in_words(&sources, &all), expected);
        assert!(in_words(&sources[..1], &[]).is_empty(), "one file without faults needs no words");
        let many: Vec<Rejected> = ["a", "b", "c", "d", "e", "f", "g"].map(|reason| rejected("a", 1, reason)).to_vec();
        assert_eq!(in_words(&sources[..1], &many).last().map(String::as_str), Some("2 more were rejected for other reasons"));
    }
}
