//! The recorder of a cache's page trace: which page each request used.
//!
//! Lanes put page numbers into a ring, and a [`Trace`] takes them out. No lane ever waits for that:
//! a page that is not taken within one lap of the ring is overwritten, and counts as lost. While
//! nothing records, a request costs one load of a word that nobody writes.

use std::sync::atomic::Ordering::{Acquire, Relaxed, Release};
use std::sync::atomic::{AtomicBool, AtomicU64};
use std::sync::{Arc, OnceLock};
use weir_core::PageNo;
use weir_device::Progress;

/// Number of words in the ring.
const RING: u64 = if cfg!(test) { 64 } else { 1 << 16 };

/// The ring of a cache, and whether lanes put pages into it.
#[derive(Default)]
pub(crate) struct Recorder {
    is_on: AtomicBool,
    /// Number of pages that were ever put into the ring.
    put: AtomicU64,
    /// The first trace makes the ring. Each word has a page number in its low half, and in its high
    /// half the number of the lap in which it was put there. Laps count from 1.
    ring: OnceLock<Box<[AtomicU64]>>,
}

impl Recorder {
    /// Notes that a request has used a page, if a trace is being recorded and the request was
    /// taken.
    #[inline]
    pub fn note(&self, page: PageNo, progress: Progress) {
        if self.is_on.load(Relaxed) && progress != Progress::Full {
            self.put(page);
        }
    }

    #[cold]
    fn put(&self, page: PageNo) {
        let Some(ring) = self.ring.get() else { return };
        fill(ring, self.put.fetch_add(1, Relaxed), page);
    }

    /// Begins a trace. The first trace of a cache takes memory for the ring. `None`: another trace
    /// is being recorded.
    pub fn begin(self: &Arc<Self>) -> Option<Trace> {
        self.ring.get_or_init(|| (0..RING).map(|_| AtomicU64::new(0)).collect());
        let at = self.put.load(Relaxed);
        let begins = self.is_on.compare_exchange(false, true, Acquire, Relaxed).is_ok();
        begins.then(|| Trace { recorder: Arc::clone(self), at, end: None, lost: 0 })
    }
}

/// Writes a page into the ring's word that position `at` has. A lane may be so late that the word
/// is in use for a later lap. Then the word stays as it is: the page is lost.
fn fill(ring: &[AtomicU64], at: u64, page: PageNo) {
    ring[(at % RING) as usize].fetch_max(lap(at) << 32 | u64::from(page.0), Release);
}

/// The number of the lap of the ring's word that position `at` has.
fn lap(at: u64) -> u64 {
    (at / RING + 1) & u64::from(u32::MAX)
}

/// A page trace that is being recorded. Dropping it ends the recording.
pub struct Trace {
    recorder: Arc<Recorder>,
    /// The position of the page that is taken next.
    at: u64,
    /// The position after the trace's last page, once the trace has ended.
    end: Option<u64>,
    lost: u64,
}

impl Trace {
    /// Takes the pages that were used since the last call, in order, `most` of them at most.
    pub fn take(&mut self, most: usize) -> impl Iterator<Item = PageNo> {
        std::iter::from_fn(|| self.next()).take(most)
    }

    /// Ends the trace. Pages that were used before can still be taken.
    pub fn end(&mut self) {
        self.end.get_or_insert(self.recorder.put.load(Relaxed));
    }

    /// Whether the trace has ended, and each of its pages was taken or is lost.
    pub fn is_over(&self) -> bool {
        self.end == Some(self.at)
    }

    /// Number of pages that were overwritten before they were taken.
    pub fn lost(&self) -> u64 {
        self.lost
    }

    fn next(&mut self) -> Option<PageNo> {
        let recorder = &self.recorder;
        let ring = recorder.ring.get()?;
        loop {
            let put = recorder.put.load(Relaxed);
            let end = self.end.unwrap_or(put);
            let oldest = put.saturating_sub(RING).min(end);
            self.lost += oldest.saturating_sub(self.at);
            self.at = self.at.max(oldest);
            if self.at == end {
                return None;
            }
            let word = ring[(self.at % RING) as usize].load(Acquire);
            if word >> 32 == lap(self.at) {
                self.at += 1;
                return Some(PageNo(word as u32));
            }
            // A lane has taken the position and has not written the word yet. Or a lane has
            // overwritten the word in a later lap. In that case, the next turn of the loop counts
            // the page as lost.
            if recorder.put.load(Relaxed) == put {
                return None;
            }
        }
    }
}

impl Drop for Trace {
    fn drop(&mut self) {
        self.recorder.is_on.store(false, Release);
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::directory::Outcome;
    use crate::{Cache, CacheLane, Config};
    use std::time::Instant;
    use weir_core::{ByteSize, Page};
    use weir_device::{PageDevice as _, PageLane as _};
    use weir_store::{Host, Sim, SimUrl};

    fn cache() -> Arc<Cache> {
        let home = Sim::open(SimUrl { size: ByteSize(4 << 20), ..SimUrl::default() }).unwrap();
        Cache::create(Arc::new(Host::new(4096).unwrap()), Arc::new(home), Config::default()).unwrap()
    }

    fn note(cache: &Cache, pages: std::ops::Range<u32>) {
        pages.for_each(|page| cache.recorder.note(PageNo(page), Progress::Queued));
    }

    fn taken(trace: &mut Trace) -> Vec<u32> {
        trace.take(usize::MAX).map(|page| page.0).collect()
    }

    #[test]
    fn a_trace_has_each_request_that_was_taken_from_its_begin_to_its_end() {
        let cache = cache();
        let mut lane = cache.open().unwrap();
        let page = Page::zeroed();
        let write = |lane: &mut CacheLane, at| {
            assert_eq!(lane.write(1, PageNo(at), &page), Progress::Done(Ok(())));
        };
        write(&mut lane, 1);
        let mut trace = cache.trace().unwrap();
        assert!(cache.trace().is_none(), "one at a time");
        write(&mut lane, 2);
        assert_eq!(lane.read(1, PageNo(2), &mut Page::zeroed()), Progress::Done(Ok(())));
        assert_eq!(trace.take(1).map(|page| page.0).collect::<Vec<_>>(), [2]);
        let _ = lane.write_part(1, PageNo(3), 8, &[1; 8]);
        lane.poll(Instant::now(), &mut |_| {});
        assert_eq!(taken(&mut trace), [2, 3]);
        // A request that is refused comes again, and counts then.
        let held = cache.directory.hold(PageNo(2), 9).unwrap();
        assert_eq!(lane.read(1, PageNo(2), &mut Page::zeroed()), Progress::Full);
        cache.directory.let_go(held, Outcome::Clean);
        assert_eq!(taken(&mut trace), []);
        drop(trace);
        write(&mut lane, 4);
        let mut next = cache.trace().unwrap();
        write(&mut lane, 5);
        assert_eq!((taken(&mut next), next.lost()), (vec![5], 0));
    }

    #[test]
    fn pages_that_nobody_takes_are_lost_and_counted_and_no_lane_waits() {
        let cache = cache();
        let mut trace = cache.trace().unwrap();
        note(&cache, 0..10);
        assert_eq!(taken(&mut trace).len(), 10);
        note(&cache, 10..110);
        let last = RING as u32;
        assert_eq!((taken(&mut trace), trace.lost()), ((110 - last..110).collect(), 100 - RING));
        // A lane that has a position and has not written its word hides the later ones for now.
        let at = cache.recorder.put.fetch_add(1, Relaxed);
        note(&cache, 200..202);
        assert_eq!(taken(&mut trace), []);
        let ring = cache.recorder.ring.get().unwrap();
        fill(ring, at, PageNo(199));
        assert_eq!((taken(&mut trace), trace.lost()), (vec![199, 200, 201], 100 - RING));
    }

    #[test]
    fn a_lane_that_is_a_lap_late_hides_no_later_page() {
        let cache = cache();
        let mut trace = cache.trace().unwrap();
        let at = cache.recorder.put.fetch_add(1, Relaxed);
        note(&cache, 0..RING as u32);
        fill(cache.recorder.ring.get().unwrap(), at, PageNo(199));
        assert_eq!((taken(&mut trace), trace.lost()), ((0..RING as u32).collect(), 1));
    }

    #[test]
    fn a_trace_that_has_ended_has_the_pages_until_then_and_is_over_once_they_are_taken() {
        let cache = cache();
        let mut trace = cache.trace().unwrap();
        note(&cache, 0..3);
        trace.end();
        note(&cache, 3..6);
        trace.end();
        assert_eq!((trace.take(2).count(), trace.is_over()), (2, false));
        assert_eq!((taken(&mut trace), trace.is_over()), (vec![2], true));
        drop(trace);
        // A trace waits for a page that no lane has written yet, until the page's position is a lap
        // old.
        let mut trace = cache.trace().unwrap();
        cache.recorder.put.fetch_add(1, Relaxed);
        trace.end();
        assert_eq!((taken(&mut trace), trace.is_over()), (vec![], false));
        note(&cache, 0..2 * RING as u32);
        assert_eq!((taken(&mut trace), trace.is_over(), trace.lost()), (vec![], true, 1));
    }

    #[test]
    fn what_two_threads_put_is_taken_once_or_counted_as_lost() {
        const EACH: u32 = 20_000;
        let cache = cache();
        let mut trace = cache.trace().unwrap();
        let mut found = std::thread::scope(|scope| {
            for first in [0, EACH] {
                let cache = &cache;
                scope.spawn(move || {
                    note(cache, first..first + EACH);
                });
            }
            let mut found = Vec::new();
            while cache.recorder.put.load(Relaxed) < u64::from(2 * EACH) {
                found.extend(taken(&mut trace));
            }
            found
        });
        found.extend(taken(&mut trace));
        assert_eq!(found.len() as u64 + trace.lost(), u64::from(2 * EACH));
        for half in [0..EACH, EACH..2 * EACH] {
            let of_one: Vec<u32> = found.iter().copied().filter(|page| half.contains(page)).collect();
            assert!(of_one.is_sorted_by(|a, b| a < b), "in order, each once");
        }
    }
}
