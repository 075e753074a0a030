//! Repeated measurements of a figure, and their statistics.

/// One figure, measured in several runs.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Runs {
    sorted: Vec<f64>,
}

impl Runs {
    /// Adds one run's figure.
    pub fn push(&mut self, value: f64) {
        let at = self.sorted.partition_point(|&seen| seen < value);
        self.sorted.insert(at, value);
    }

    /// The number of runs.
    pub fn len(&self) -> usize {
        self.sorted.len()
    }

    /// Whether there is no figure of any run yet.
    pub fn is_empty(&self) -> bool {
        self.sorted.is_empty()
    }

    /// The median of the figures of all runs; NaN without runs. With an even number of runs it is
    /// the mean of the middle two.
    pub fn median(&self) -> f64 {
        let n = self.sorted.len();
        match n {
            0 => f64::NAN,
            _ if n % 2 == 1 => self.sorted[n / 2],
            _ => f64::midpoint(self.sorted[n / 2 - 1], self.sorted[n / 2]),
        }
    }

    /// The least figure of all runs; NaN without runs.
    pub fn min(&self) -> f64 {
        self.sorted.first().copied().unwrap_or(f64::NAN)
    }

    /// The greatest figure of all runs; NaN without runs.
    pub fn max(&self) -> f64 {
        self.sorted.last().copied().unwrap_or(f64::NAN)
    }
}

impl FromIterator<f64> for Runs {
    fn from_iter<I: IntoIterator<Item = f64>>(values: I) -> Self {
        let mut sorted: Vec<f64> = values.into_iter().collect();
        sorted.sort_by(f64::total_cmp);
        Runs { sorted }
    }
}

/// A percentile of `samples`, by nearest rank: with a `percent` of 99, the value that 99 % of them
/// do not exceed. Reorders the samples. 0 without samples.
pub fn percentile(samples: &mut [u64], percent: f64) -> u64 {
    if samples.is_empty() {
        return 0;
    }
    let rank = (percent / 100.0 * samples.len() as f64).ceil() as usize;
    let at = rank.clamp(1, samples.len()) - 1;
    *samples.select_nth_unstable(at).1
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_median_does_not_depend_on_the_order_of_the_runs() {
        let mut runs = Runs::default();
        for value in [9.0, 1.0, 5.0] {
            runs.push(value);
        }
        assert_eq!((runs.min(), runs.median(), runs.max(), runs.len()), (1.0, 5.0, 9.0, 3));
        assert_eq!(runs, Runs::from_iter([5.0, 9.0, 1.0]));
        runs.push(6.0);
        assert_eq!(runs.median(), 5.5);
    }

    #[test]
    fn percentiles_are_of_the_nearest_rank() {
        let mut samples: Vec<u64> = (1..=100).rev().collect();
        for (percent, value) in [(0.0, 1), (50.0, 50), (99.0, 99), (99.5, 100), (100.0, 100)] {
            assert_eq!(percentile(&mut samples, percent), value, "p{percent}");
        }
        assert_eq!(percentile(&mut [], 50.0), 0);
        assert_eq!(percentile(&mut [7], 1.0), 7);
    }
}
