//! Samples of rows: drawn by a seed and the rows' ids, spread over categories in proportion.

use sha2::{Digest, Sha256};
use std::cmp::Reverse;

/// Draws `limit` rows, as ascending indices; all of them when there are no more. A row is its id and its category, which is empty where
/// a set has none.
///
/// Categories get places in proportion to their rows, by largest remainder; when there are places for all categories, each has one at
/// least. Within a category the rows with the lowest hashes of the seed and their id are drawn, so which rows those are does not depend
/// on the order of the rows, and a larger sample from the same places holds a smaller one.
pub fn sample(rows: &[(&str, &str)], limit: usize, seed: u64) -> Vec<usize> {
    if limit >= rows.len() {
        return (0..rows.len()).collect();
    }
    let rank = |purpose: &str, name: &str| {
        Sha256::new_with_prefix(seed.to_le_bytes()).chain_update(purpose).chain_update([0_u8]).chain_update(name).finalize()
    };
    let mut ranked: Vec<usize> = (0..rows.len()).collect();
    ranked.sort_by_cached_key(|&index| (rank("row", rows[index].0), index));
    let mut categories: Vec<&str> = rows.iter().map(|&(_, category)| category).collect();
    categories.sort_unstable();
    categories.dedup();
    // Of two that are as far from their due, neither should always be the first in the alphabet.
    categories.sort_by_cached_key(|category| rank("category", category));
    let of = |category: &str| ranked.iter().copied().filter(|&index| rows[index].1 == category).collect::<Vec<usize>>();
    let ranked: Vec<Vec<usize>> = categories.iter().map(|category| of(category)).collect();
    let places = places(&ranked.iter().map(Vec::len).collect::<Vec<_>>(), limit);
    let mut drawn: Vec<usize> = ranked.iter().zip(places).flat_map(|(rows, places)| &rows[..places]).copied().collect();
    drawn.sort_unstable();
    drawn
}

/// Divides `limit` places, fewer than there are rows, over categories of these sizes.
fn places(sizes: &[usize], limit: usize) -> Vec<usize> {
    let rows: usize = sizes.iter().sum();
    let least = usize::from(limit >= sizes.len());
    let mut places: Vec<usize> = sizes.iter().map(|size| (limit * size / rows).max(least)).collect();
    // By how much a category's due, `limit · size / rows`, exceeds its places; in parts of one over the rows.
    let owed = |index: usize, places: &[usize]| (limit * sizes[index]) as i128 - (places[index] * rows) as i128;
    while places.iter().sum::<usize>() < limit {
        let Some(most) = (0..sizes.len()).min_by_key(|&index| Reverse(owed(index, &places))) else { break };
        places[most] += 1;
    }
    while places.iter().sum::<usize>() > limit {
        let with_more = (0..sizes.len()).filter(|&index| places[index] > least);
        let Some(least_owed) = with_more.min_by_key(|&index| owed(index, &places)) else { break };
        places[least_owed] -= 1;
    }
    places
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Rows `0`, `1`, … in categories of these sizes, one after the other.
    fn rows(sizes: &[(&str, usize)]) -> Vec<(String, String)> {
        let categories = sizes.iter().flat_map(|&(category, size)| std::iter::repeat_n(category.to_string(), size));
        categories.enumerate().map(|(index, category)| (index.to_string(), category)).collect()
    }

    fn drawn(rows: &[(String, String)], limit: usize, seed: u64) -> Vec<usize> {
        sample(&rows.iter().map(|(id, category)| (id.as_str(), category.as_str())).collect::<Vec<_>>(), limit, seed)
    }

    fn count(rows: &[(String, String)], drawn: &[usize], category: &str) -> usize {
        drawn.iter().filter(|&&index| rows[index].1 == category).count()
    }

    #[test]
    fn the_seed_decides_and_the_order_of_rows_does_not() {
        let rows = rows(&[("", 200)]);
        let first = drawn(&rows, 20, 1);
        assert_eq!(first.len(), 20);
        assert!(first.windows(2).all(|pair| pair[0] < pair[1]), "{first:?}");
        assert_eq!(first, drawn(&rows, 20, 1));
        assert_ne!(first, drawn(&rows, 20, 2));
        let backward: Vec<(String, String)> = rows.iter().rev().cloned().collect();
        let mut again: Vec<usize> = drawn(&backward, 20, 1).into_iter().map(|index| 199 - index).collect();
        again.sort_unstable();
        assert_eq!(first, again);
        // A larger sample holds the smaller one, and a row that joins pushes at most one out.
        let larger = drawn(&rows, 40, 1);
        assert!(first.iter().all(|index| larger.contains(index)));
        let grown = [rows, vec![("new".to_string(), String::new())]].concat();
        assert!(drawn(&grown, 20, 1).iter().filter(|index| first.contains(index)).count() >= 19);
    }

    #[test]
    fn a_limit_of_all_rows_or_more_gives_all_in_order() {
        let rows = rows(&[("a", 3), ("b", 1)]);
        for limit in [4, 5, usize::MAX] {
            assert_eq!(drawn(&rows, limit, 7), [0, 1, 2, 3]);
        }
        assert!(drawn(&[], 3, 7).is_empty());
    }

    #[test]
    fn every_row_is_drawn_about_equally_often() {
        let rows = rows(&[("", 10)]);
        let mut counts = [0_u32; 10];
        for seed in 0..2000 {
            drawn(&rows, 3, seed).into_iter().for_each(|index| counts[index] += 1);
        }
        // 600 each, with a standard deviation of about 20.
        assert!(counts.iter().all(|count| count.abs_diff(600) < 110), "{counts:?}");
    }

    #[test]
    fn places_are_in_proportion_and_no_category_goes_without_where_there_are_enough() {
        let cases: [(&[usize], usize, &[usize]); 7] = [
            (&[50, 30, 20], 10, &[5, 3, 2]),
            // Dues 4.5, 3.3 and 2.2.
            (&[45, 33, 22], 10, &[5, 3, 2]),
            (&[10; 8], 16, &[2; 8]),
            // Dues 2.94, 0.03 and 0.03: a place each for the small ones, which the large one gives.
            (&[98, 1, 1], 3, &[1, 1, 1]),
            (&[98, 1, 1], 4, &[2, 1, 1]),
            (&[98, 1, 1], 99, &[97, 1, 1]),
            (&[98, 1, 1], 1, &[1, 0, 0]),
        ];
        for (sizes, limit, expected) in cases {
            assert_eq!(places(sizes, limit), expected, "{sizes:?} {limit}");
        }
        // Of whatever sizes.
        for seed in 0..200_usize {
            let sizes: Vec<usize> = (0..1 + seed % 9).map(|index| 1 + (seed * 31 + index * index * 17) % 23).collect();
            let rows: usize = sizes.iter().sum();
            for limit in 0..rows {
                let places = places(&sizes, limit);
                assert_eq!(places.iter().sum::<usize>(), limit, "{sizes:?}");
                assert!(places.iter().zip(&sizes).all(|(places, size)| places <= size), "{sizes:?} {limit} {places:?}");
                assert!(limit < sizes.len() || places.iter().all(|&places| places > 0), "{sizes:?} {limit} {places:?}");
            }
        }
    }

    #[test]
    fn samples_are_spread_over_categories() {
        let rows = rows(&[("writing", 10), ("math", 10), ("coding", 10), ("rare", 1)]);
        for seed in 0..20 {
            let picked = drawn(&rows, 4, seed);
            assert!(
                ["writing", "math", "coding", "rare"].iter().all(|category| count(&rows, &picked, category) == 1),
                "{picked:?}"
            );
            let picked = drawn(&rows, 16, seed);
            assert_eq!((count(&rows, &picked, "writing"), count(&rows, &picked, "rare"), picked.len()), (5, 1, 16));
        }
        // Fewer places than categories: the seed decides which go without.
        let picked: std::collections::BTreeSet<String> = (0..50).map(|seed| rows[drawn(&rows, 1, seed)[0]].1.clone()).collect();
        assert_eq!(picked.len(), 3, "{picked:?}");
    }
}
