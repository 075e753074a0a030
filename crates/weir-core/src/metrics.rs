//! Counters and latencies that take only a plain store on the I/O path. Each has one writer (the
//! thread that owns it) and any number of readers, so no instruction locks a bus.

use std::sync::atomic::{AtomicU64, Ordering::Relaxed};
use std::time::Duration;

/// A count with one writing thread.
#[derive(Debug, Default)]
pub struct Counter(AtomicU64);

impl Counter {
    /// Adds `n`. Only the owning thread may call it: two writers would lose counts.
    #[inline]
    pub fn add(&self, n: u64) {
        self.0.store(self.0.load(Relaxed).wrapping_add(n), Relaxed);
    }

    /// The count so far.
    pub fn get(&self) -> u64 {
        self.0.load(Relaxed)
    }
}

/// Number of sub-buckets of each power of two: values are accurate to 1 part in 16.
const SUB: usize = 16;
/// Number of buckets: [`SUB`] for the first [`SUB`] nanoseconds, and then [`SUB`] for each power of
/// two up to 2^40 ns = 18 minutes.
const BUCKETS: usize = SUB * 37;

/// A histogram of durations with one writing thread. It is log-linear as HdrHistogram (Tene), with
/// a fixed range of 1 ns to 18 minutes and a resolution of 6 %, in 4.7 KiB.
pub struct Latencies {
    buckets: [AtomicU64; BUCKETS],
}

impl Default for Latencies {
    fn default() -> Self {
        Latencies { buckets: [const { AtomicU64::new(0) }; BUCKETS] }
    }
}

impl Latencies {
    /// Records `n` operations that took this long each. Only the owning thread may call it.
    #[inline]
    pub fn record(&self, took: Duration, n: u64) {
        let bucket = &self.buckets[index(took.as_nanos().min(u128::from(u64::MAX)) as u64)];
        bucket.store(bucket.load(Relaxed).wrapping_add(n), Relaxed);
    }

    /// Adds the durations in this histogram to `total`.
    pub fn add_to(&self, total: &mut Distribution) {
        for (sum, bucket) in total.counts.iter_mut().zip(&self.buckets) {
            *sum += bucket.load(Relaxed);
        }
    }
}

impl std::fmt::Debug for Latencies {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        let mut total = Distribution::default();
        self.add_to(&mut total);
        write!(f, "Latencies({total:?})")
    }
}

/// The latencies of several threads, summed for reading.
#[derive(Clone)]
pub struct Distribution {
    counts: [u64; BUCKETS],
}

impl Default for Distribution {
    fn default() -> Self {
        Distribution { counts: [0; BUCKETS] }
    }
}

impl std::ops::AddAssign<&Distribution> for Distribution {
    fn add_assign(&mut self, other: &Distribution) {
        for (sum, count) in self.counts.iter_mut().zip(&other.counts) {
            *sum += count;
        }
    }
}

impl Distribution {
    /// The number of operations.
    pub fn count(&self) -> u64 {
        self.counts.iter().sum()
    }

    /// Every duration that occurred and its count, in rising order. A duration is the upper bound
    /// of its bucket, in nanoseconds.
    pub fn buckets(&self) -> impl Iterator<Item = (u64, u64)> + Clone {
        let occurred = self.counts.iter().enumerate().filter(|&(_, &count)| count > 0);
        occurred.map(|(at, &count)| (upper_bound(at), count))
    }

    /// The duration that `share` (0 to 1) of the operations did not exceed, at most 6 % too high.
    /// `None` if there were no operations.
    pub fn quantile(&self, share: f64) -> Option<Duration> {
        quantile(self.buckets(), share).map(Duration::from_nanos)
    }
}

/// The quantile `share` (0 to 1): the value that this share of all values did not exceed. `buckets`
/// has the values with their counts, in rising order. `None` if there are no values.
pub fn quantile(buckets: impl Iterator<Item = (u64, u64)> + Clone, share: f64) -> Option<u64> {
    let all: u64 = buckets.clone().map(|(_, count)| count).sum();
    let rank = (all as f64 * share.clamp(0.0, 1.0)).ceil().max(1.0) as u64;
    let mut seen = 0;
    let mut reached = buckets.skip_while(|(_, count)| {
        seen += count;
        seen < rank
    });
    reached.next().map(|(value, _)| value)
}

impl std::fmt::Debug for Distribution {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "n={} p50={:?} p99={:?}", self.count(), self.quantile(0.5), self.quantile(0.99))
    }
}

fn index(nanoseconds: u64) -> usize {
    if nanoseconds < SUB as u64 {
        return nanoseconds as usize;
    }
    let power = nanoseconds.ilog2() as usize; // 4 or more
    let within = (nanoseconds >> (power - 4)) as usize & (SUB - 1);
    ((power - 3) * SUB + within).min(BUCKETS - 1)
}

fn upper_bound(index: usize) -> u64 {
    if index < SUB {
        return index as u64;
    }
    let (power, within) = (index / SUB + 3, index % SUB);
    ((SUB + within + 1) as u64) << (power - 4)
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    proptest! {
        #[test]
        fn a_recorded_duration_is_read_back_within_a_sixteenth(nanoseconds in 0u64..1 << 40) {
            let latencies = Latencies::default();
            latencies.record(Duration::from_nanos(nanoseconds), 3);
            let mut total = Distribution::default();
            latencies.add_to(&mut total);
            prop_assert_eq!(total.count(), 3);
            let read = total.quantile(0.5).unwrap().as_nanos() as u64;
            prop_assert!(read >= nanoseconds && read <= nanoseconds + nanoseconds / 16 + 1, "{nanoseconds} {read}");
        }
    }

    #[test]
    fn quantiles_follow_the_ranks() {
        let latencies = Latencies::default();
        latencies.record(Duration::from_micros(1), 98);
        latencies.record(Duration::from_millis(1), 2);
        let mut total = Distribution::default();
        latencies.add_to(&mut total);
        assert!(total.quantile(0.5).unwrap() < Duration::from_micros(2));
        assert!(total.quantile(0.98).unwrap() < Duration::from_micros(2));
        assert!(total.quantile(0.99).unwrap() > Duration::from_micros(900));
        assert_eq!(Distribution::default().quantile(0.5), None);
        assert_eq!(total.buckets().map(|(_, count)| count).collect::<Vec<_>>(), [98, 2]);
        let twice = total.clone();
        total += &twice;
        assert_eq!(total.buckets().map(|(_, count)| count).collect::<Vec<_>>(), [196, 4]);
        assert!(total.buckets().is_sorted());
    }
}
