//! Intervals by resampling: how far a figure would move with other prompts of the same kind.

use data::supervision::below;
use rand_chacha::ChaCha8Rng;

const RESAMPLES: usize = 1000;

/// The 95 % interval of `statistic` over `count` items: the central part of its values on sets of `count` drawn with replacement.
///
/// Two figures of the same items are compared by a statistic that computes both on what was picked. No items give (0, 0).
pub fn interval(count: usize, mut generator: ChaCha8Rng, statistic: impl Fn(&[usize]) -> f64) -> (f64, f64) {
    if count == 0 {
        return (0.0, 0.0);
    }
    let mut values: Vec<f64> = (0..RESAMPLES)
        .map(|_| {
            let picked: Vec<usize> = (0..count).map(|_| below(&mut generator, count as u64) as usize).collect();
            statistic(&picked)
        })
        .collect();
    values.sort_by(f64::total_cmp);
    let quantile = |share: f64| values[(share * RESAMPLES as f64) as usize];
    (quantile(0.025), quantile(0.975))
}

#[cfg(test)]
mod tests {
    use super::*;
    use data::supervision::counter_generator;

    #[test]
    fn the_interval_of_a_mean_is_that_of_the_normal_approximation() {
        // 400 items, half 0 and half 1: the mean's deviation is 0.025, so the interval is 0.5 ± 0.049.
        let mean = |picked: &[usize]| picked.iter().map(|index| (index % 2) as f64).sum::<f64>() / picked.len() as f64;
        let (low, high) = interval(400, counter_generator(1, 2, 3, 4), mean);
        assert!((low - 0.451).abs() < 0.01 && (high - 0.549).abs() < 0.01, "{low} {high}");
        assert_eq!(interval(0, counter_generator(1, 2, 3, 4), mean), (0.0, 0.0));
        assert_eq!(interval(5, counter_generator(1, 2, 3, 4), |_| 3.0), (3.0, 3.0));
    }
}
