//! Counts of a queue's work. Only the queue's worker writes them, so plain stores are enough.

use core::fmt;
use core::sync::atomic::{AtomicU64, Ordering::Relaxed};

/// Number of buckets that count batches by size. Bucket `n` counts batches of `2^n` to `2^(n+1) -
/// 1` items, and the last bucket all larger ones too.
const BUCKETS: usize = 24;

#[derive(Default)]
pub(crate) struct Counters {
    items: AtomicU64,
    batches: AtomicU64,
    longest: AtomicU64,
    panics: AtomicU64,
    sizes: [AtomicU64; BUCKETS],
}

/// A queue's counts up to now.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
#[non_exhaustive]
pub struct Metrics {
    /// Number of items run.
    pub items: u64,
    /// Number of times that the worker looked and found items.
    pub batches: u64,
    /// Largest number of items that the worker found at once.
    pub longest: u64,
    /// Number of times that the worker slept and was woken. A queue makes system calls only for
    /// these.
    pub wakes: u64,
    /// Number of items whose function panicked. The worker goes on.
    pub panics: u64,
    /// Number of batches by size: index `n` counts batches of `2^n` to `2^(n+1) - 1` items, and the
    /// last index all larger ones too.
    pub sizes: [u64; BUCKETS],
}

/// Adds to a counter that only this thread writes.
fn add(counter: &AtomicU64, count: u64) {
    counter.store(counter.load(Relaxed) + count, Relaxed);
}

impl Counters {
    /// Counts a batch of `items` items before it runs. `items` is not 0.
    pub(crate) fn batch(&self, items: usize) {
        let items = items as u64;
        add(&self.items, items);
        add(&self.batches, 1);
        add(&self.sizes[(items.ilog2() as usize).min(BUCKETS - 1)], 1);
        if items > self.longest.load(Relaxed) {
            self.longest.store(items, Relaxed);
        }
    }

    pub(crate) fn panic(&self) {
        add(&self.panics, 1);
    }

    pub(crate) fn read(&self, wakes: u64) -> Metrics {
        Metrics {
            items: self.items.load(Relaxed),
            batches: self.batches.load(Relaxed),
            longest: self.longest.load(Relaxed),
            wakes,
            panics: self.panics.load(Relaxed),
            sizes: self.sizes.each_ref().map(|count| count.load(Relaxed)),
        }
    }
}

impl Metrics {
    /// Mean number of items in a batch; 0 before the first batch.
    pub fn items_per_batch(&self) -> f64 {
        if self.batches == 0 { 0.0 } else { self.items as f64 / self.batches as f64 }
    }

    /// Number of wakes for each thousand items; 0 before the first item.
    pub fn wakes_per_thousand(&self) -> f64 {
        if self.items == 0 { 0.0 } else { self.wakes as f64 * 1000.0 / self.items as f64 }
    }
}

impl fmt::Display for Metrics {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(
            f,
            "{} items in {} batches ({:.1} each, {} at most), {} wakes, {} panics",
            self.items,
            self.batches,
            self.items_per_batch(),
            self.longest,
            self.wakes,
            self.panics
        )
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn batches_are_counted_by_their_power_of_two() {
        let counters = Counters::default();
        for items in [1, 2, 3, 4, 1 << 30] {
            counters.batch(items);
        }
        let metrics = counters.read(2);
        assert_eq!((metrics.items, metrics.batches, metrics.longest), ((1 << 30) + 10, 5, 1 << 30));
        assert_eq!(metrics.sizes[..4], [1, 2, 1, 0]);
        assert_eq!(metrics.sizes[BUCKETS - 1], 1);
        assert!(metrics.to_string().contains("5 batches"));
    }

    #[test]
    fn no_items_no_ratios() {
        assert_eq!(Metrics::default().items_per_batch(), 0.0);
        assert_eq!(Metrics::default().wakes_per_thousand(), 0.0);
    }
}
