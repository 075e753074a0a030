//! Counters and latencies. One operation in so many is timed.

use super::Lane;
use crate::Volume;
use crate::status::LaneMetrics;
use std::time::Instant;
use weir_core::metrics::{Counter, Latencies};
use weir_store::Fault;

/// One operation in so many is timed: reading the clock twice costs a tenth of a write to host memory.
const SAMPLE_EVERY: u32 = 16;

impl Lane {
    #[inline]
    pub(super) fn sample(&mut self) -> Option<Instant> {
        if self.until_sample == 0 {
            self.until_sample = SAMPLE_EVERY;
        }
        self.until_sample -= 1;
        (self.until_sample == 0).then(Instant::now)
    }

    /// Counts `pages` pages written together since `started`, if that is timed; each took its share.
    pub(super) fn count_writes(&self, pages: u64, started: Option<Instant>) {
        let metrics = self.metrics();
        metrics.writes.add(pages);
        if let Some(started) = started
            && pages > 0
        {
            metrics.write_latencies.record(started.elapsed() / pages as u32, 1);
        }
    }
}

impl Volume {
    pub(super) fn seat(&self, seat: usize) -> &LaneMetrics {
        &self.lanes[seat].metrics
    }
}

impl LaneMetrics {
    #[inline]
    pub(super) fn read_ended(&self, started: Option<Instant>, result: Result<(), Fault>) {
        ended(started, result, &self.read_latencies, &self.read_faults);
        if result == Err(Fault::Corrupt) {
            count(&self.corrupt);
        }
    }

    #[inline]
    pub(super) fn write_ended(&self, started: Option<Instant>, result: Result<(), Fault>) {
        ended(started, result, &self.write_latencies, &self.write_faults);
    }
}

#[inline]
fn ended(started: Option<Instant>, result: Result<(), Fault>, latencies: &Latencies, faults: &Counter) {
    if let Some(started) = started {
        latencies.record(started.elapsed(), 1);
    }
    if result.is_err() {
        count(faults);
    }
}

#[inline]
pub(super) fn count(counter: &Counter) {
    counter.add(1);
}
