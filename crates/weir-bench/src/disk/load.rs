//! The loads on Weir's store: one thread drives a lane, and sleeps until the lane's descriptor
//! shows that operations have ended.

use super::{Case, DiskError, Figures};
use crate::report::percentile;
use rustix::event::{PollFd, PollFlags, poll};
use std::time::{Duration, Instant};
use weir_core::{PAGE_SIZE, PageBytes, Slot};
use weir_store::{Fault, FileStore, Lane, Progress, Store};

/// Writes every slot once.
pub(super) fn fill(store: &FileStore) -> Result<(), DiskError> {
    let case = Case { name: "filling", write: true, batch: 4, pages: 256 };
    let mut batches = Batches::new(store, case, 0)?;
    let size = (case.batch * case.pages) as u32;
    for first in (0..store.slots() / size).map(|batch| batch * size) {
        batches.run(|at| first + (at * case.pages) as u32)?;
    }
    Ok(())
}

/// Runs a case for `time`, and returns its figures.
pub(super) fn run(store: &FileStore, case: Case, time: Duration, seed: u64) -> Result<Figures, DiskError> {
    let mut batches = Batches::new(store, case, seed)?;
    let places = u64::from(store.slots() / case.pages as u32);
    let (started, mut next, mut state) = (Instant::now(), 0, seed);
    while started.elapsed() < time {
        if case.pages > 1 {
            batches.run(|at| ((next + at as u64) % places) as u32 * case.pages as u32)?;
            next += case.batch as u64;
        } else {
            batches.run(|_| {
                // SplitMix64's increment and finaliser, for the next random number.
                state = state.wrapping_add(0x9e37_79b9_7f4a_7c15);
                let mixed = (state ^ (state >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
                ((u128::from(mixed ^ (mixed >> 27)) * u128::from(places)) >> 64) as u32
            })?;
        }
    }
    let seconds = started.elapsed().as_secs_f64();
    let (pages, mut latencies) = (batches.pages, batches.latencies);
    Ok(Figures {
        pages_per_second: pages as f64 / seconds,
        p50_us: percentile(&mut latencies, 50.0) as f64 / 1e3,
        p99_us: percentile(&mut latencies, 99.0) as f64 / 1e3,
    })
}

struct Batches {
    lane: Box<dyn Lane>,
    case: Case,
    page: Box<PageBytes>,
    pages: u64,
    /// Latency of each whole batch, in nanoseconds.
    latencies: Vec<u64>,
}

impl Batches {
    fn new(store: &FileStore, case: Case, seed: u64) -> Result<Self, DiskError> {
        let lane = store.lane(case.batch * case.pages)?;
        let page = Box::new(std::array::from_fn(|at| (at as u64 ^ seed) as u8));
        Ok(Batches { lane, case, page, pages: 0, latencies: Vec::with_capacity(1 << 20) })
    }

    /// Queues one batch and waits until all of it has ended. The run with index `at` begins at slot
    /// `first(at)`.
    fn run(&mut self, mut first: impl FnMut(usize) -> u32) -> Result<(), DiskError> {
        let failed = |fault| DiskError::Fault { case: self.case.name, fault };
        let began = Instant::now();
        for at in 0..self.case.batch {
            let first = first(at);
            for slot in (first..first + self.case.pages as u32).map(Slot) {
                let progress = match self.case.write {
                    true => self.lane.write(0, slot, &self.page),
                    false => self.lane.read(0, slot, &mut self.page),
                };
                match progress {
                    Progress::Queued | Progress::Done(Ok(())) => {}
                    Progress::Done(Err(fault)) => return Err(failed(fault)),
                    Progress::Full => return Err(failed(Fault::Full)),
                }
            }
        }
        self.lane.submit();
        let mut result = Ok(());
        while self.lane.in_flight() > 0 {
            if let Some(fd) = self.lane.wake_fd() {
                let _ = poll(&mut [PollFd::new(&fd, PollFlags::IN)], None);
            }
            self.lane.poll(Instant::now(), &mut |done| result = result.and(done.result));
        }
        result.map_err(failed)?;
        self.latencies.push(began.elapsed().as_nanos() as u64);
        self.pages += (self.case.batch * self.case.pages) as u64;
        debug_assert_eq!(self.page.len(), PAGE_SIZE);
        Ok(())
    }
}
