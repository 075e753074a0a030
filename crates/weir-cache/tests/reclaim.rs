//! A cache whose memory is given back and taken again while it is in use: what its clients see, and
//! what happens when the home is slow or fails.

use std::sync::Arc;
use std::time::{Duration, Instant};
use weir_cache::{Cache, CacheLane, Config, Reclaim, ReclaimError, Reclaimer, WriteBack};
use weir_core::{ByteSize, PAGE_SIZE, PageBytes, PageNo, Slot};
use weir_device::{Fault, PageDevice, PageLane, Progress, Ticket};
use weir_store::{Sim, SimUrl, Store as _};
use weir_volume::ChunkState;

const CHUNKS: usize = 3;
/// Slots of a chunk.
const CHUNK: u32 = 1024;
/// Slots for the writes of two lanes, the write-back and the reclaimer.
const SLACK: u32 = 4 * (8 + 64);

struct Rig {
    store: Arc<Sim>,
    cache: Arc<Cache>,
    lanes: [CacheLane; 2],
    write_back: WriteBack,
    reclaimer: Reclaimer,
    now: Instant,
    /// The time that a turn takes.
    tick: Duration,
    answers: Vec<(Ticket, Result<(), Fault>, Option<PageBytes>)>,
}

/// A page's content. It repeats no value: a volume would store such a page in its map.
fn bytes(page: u32, round: u32) -> PageBytes {
    std::array::from_fn(|at| (at as u32 / 64 + page * 7 + round * 3) as u8)
}

impl Rig {
    fn new(home: &SimUrl, store: &SimUrl) -> Self {
        let home = SimUrl { size: ByteSize(8 << 20), ..home.clone() };
        let chunk = u64::from(CHUNK) * PAGE_SIZE as u64;
        let store =
            SimUrl { size: ByteSize(CHUNKS as u64 * chunk), chunk: Some(ByteSize(chunk)), ..store.clone() };
        let store = Arc::new(Sim::open(store).unwrap());
        let config = Config { lanes: 2, depth: 8, stream_pages: 0, ..Config::default() };
        let home = Arc::new(Sim::open(home).unwrap());
        for page in 0..home.slots() {
            home.change(Slot(page), |content| *content = bytes(page, 0));
        }
        let cache = Cache::create(Arc::clone(&store) as _, home, config).unwrap();
        Rig {
            store,
            lanes: [cache.open().unwrap(), cache.open().unwrap()],
            write_back: WriteBack::open(&cache).unwrap(),
            reclaimer: Reclaimer::open(&cache).unwrap(),
            cache,
            now: Instant::now(),
            tick: Duration::from_millis(1),
            answers: Vec::new(),
        }
    }

    /// One turn of all that works.
    fn turn(&mut self) -> Reclaim {
        self.now += self.tick;
        for lane in &mut self.lanes {
            let answers = &mut self.answers;
            lane.poll(self.now, &mut |done| answers.push((done.ticket, done.result, done.page.copied())));
        }
        let _ = self.write_back.step(self.now);
        self.reclaimer.step(self.now)
    }

    /// Has the job go on until it ends.
    fn end_job(&mut self) -> Result<(), ReclaimError> {
        for _ in 0..200_000 {
            if let Reclaim::Ended(result) = self.turn() {
                return result;
            }
        }
        panic!("it has no end: {:?}", self.cache.status());
    }

    fn give_all_back(&mut self) {
        let chunks = self.cache.chunks(ChunkState::Held);
        self.reclaimer.give_back(chunks);
    }

    fn take_all(&mut self) -> Result<(), ReclaimError> {
        let chunks = self.cache.chunks(ChunkState::GivenBack);
        self.reclaimer.take(chunks);
        self.end_job()
    }

    fn write(&mut self, page: u32, round: u32) {
        loop {
            match self.lanes[0].write(0, PageNo(page), &bytes(page, round)) {
                Progress::Done(result) => return result.unwrap(),
                Progress::Queued => return assert_eq!(self.answer().0, Ok(())),
                Progress::Full => drop(self.turn()),
            }
        }
    }

    fn read(&mut self, page: u32) -> PageBytes {
        let mut out = [0; PAGE_SIZE];
        loop {
            match self.lanes[0].read(0, PageNo(page), &mut out) {
                Progress::Done(result) => {
                    result.unwrap();
                    return out;
                }
                Progress::Queued => return self.answer().1.expect("a page"),
                Progress::Full => drop(self.turn()),
            }
        }
    }

    fn reads(&mut self, page: u32) {
        let _ = self.read(page);
    }

    /// Waits for the answer to the only operation under way.
    fn answer(&mut self) -> (Result<(), Fault>, Option<PageBytes>) {
        loop {
            if let Some((_, result, page)) = self.answers.pop() {
                return (result, page);
            }
            let _ = self.turn();
        }
    }

    fn held(&self) -> usize {
        (0..CHUNKS as u32).filter(|chunk| self.store.holds(*chunk)).count()
    }
}

#[test]
fn all_memory_goes_and_the_device_goes_on_and_it_comes_again_and_reads_hit() {
    let mut rig = Rig::new(&SimUrl { delay: 2, ..SimUrl::default() }, &SimUrl::default());
    let frames = rig.cache.status().open;
    assert_eq!(frames, (CHUNKS as u32 * CHUNK - SLACK) / 64 * 64);
    (0..500).for_each(|page| rig.write(page, 1));
    assert_eq!(rig.cache.dirty(), 500, "below the watermark nothing goes home");
    rig.give_all_back();
    rig.end_job().unwrap();
    assert_eq!(rig.held(), 0);
    let status = rig.cache.status();
    assert_eq!((status.open, status.used, status.dirty), (0, 0, 0));
    assert_eq!(status.given_back_bytes, CHUNKS as u64 * u64::from(CHUNK) * PAGE_SIZE as u64);
    // Without memory, requests go to the home and leave nothing behind.
    for page in 0..500 {
        assert!(rig.read(page) == bytes(page, 1), "page {page} is at home");
    }
    (0..100).for_each(|page| rig.write(page, 2));
    assert_eq!(rig.lanes[0].write_part(0, PageNo(3), 8, &[9; 8]), Progress::Queued);
    assert_eq!(rig.answer().0, Ok(()));
    let status = rig.cache.status();
    assert_eq!((status.used, status.dirty, status.read_hits), (0, 0, 0));
    rig.take_all().unwrap();
    assert_eq!((rig.held(), rig.cache.status().open), (CHUNKS, frames));
    for _ in 0..2 {
        for page in 0..500 {
            let mut wanted = bytes(page, if page < 100 { 2 } else { 1 });
            if page == 3 {
                wanted[8..16].fill(9);
            }
            assert!(rig.read(page) == wanted, "page {page}");
        }
    }
    assert_eq!(rig.cache.status().read_hits, 500, "the second round");
    assert_eq!(rig.store.injected().released, 0);
}

#[test]
fn a_part_of_the_memory_goes_and_the_rest_of_the_cache_holds_what_fits() {
    let mut rig = Rig::new(&SimUrl { delay: 1, ..SimUrl::default() }, &SimUrl::default());
    (0..2000).for_each(|page| rig.reads(page));
    // The pages that came last lie in the frames that leave.
    (1800..2000).for_each(|page| rig.write(page, 1));
    let mut chunks = rig.cache.chunks(ChunkState::Held);
    chunks.truncate(2);
    rig.reclaimer.give_back(chunks);
    // Fewer pages are dirty than half of what is left: none goes home for the watermark.
    rig.end_job().unwrap();
    let status = rig.cache.status();
    assert_eq!((rig.held(), status.open), (1, CHUNK - SLACK));
    assert!(status.used > status.open / 2, "frames before the limit keep their pages: {status:?}");
    let hits = status.read_hits;
    (0..2000).for_each(|page| rig.reads(page));
    assert!(rig.cache.status().read_hits > hits + 100, "they are hits");
}

#[test]
fn a_home_that_stalls_for_ten_seconds_delays_a_give_back_and_a_flush_and_no_read_of_what_is_cached() {
    let home = SimUrl { latency: Duration::from_secs(10), ..SimUrl::default() };
    let mut rig = Rig::new(&home, &SimUrl::default());
    (0..100).for_each(|page| rig.write(page, 1));
    let begun = rig.now;
    rig.give_all_back();
    (0..3000).for_each(|_| assert!(!matches!(rig.turn(), Reclaim::Ended(_))));
    assert_eq!(rig.lanes[1].flush(7), Progress::Queued);
    let mut out = [0; PAGE_SIZE];
    for page in 0..100 {
        assert_eq!(rig.lanes[0].read(0, PageNo(page), &mut out), Progress::Done(Ok(())));
        assert!(out == bytes(page, 1));
    }
    assert!(rig.cache.chunks(ChunkState::GivenBack).len() >= 2, "what the dirty pages do not need went");
    rig.end_job().unwrap();
    assert!(rig.now < begun + Duration::from_secs(25), "one write home, and a little");
    assert_eq!((rig.held(), rig.cache.status().dirty), (0, 0));
    assert_eq!(rig.answer().0, Ok(()), "the flush");
}

#[test]
fn pages_that_do_not_go_home_end_a_give_back_after_a_minute_and_stay_readable() {
    let home = SimUrl { delay: 1, write_error: 1.0, ..SimUrl::default() };
    let mut rig = Rig::new(&home, &SimUrl::default());
    (0..100).for_each(|page| rig.write(page, 1));
    (rig.tick, rig.now) = (Duration::from_millis(20), rig.now + Duration::from_secs(100));
    let begun = rig.now;
    rig.give_all_back();
    let error = rig.end_job().unwrap_err().to_string();
    assert_eq!(error, "400KiB of pages do not leave the cache");
    let took = rig.now - begun;
    assert!((60..70).contains(&took.as_secs()), "{took:?}");
    assert_eq!(rig.held(), 1, "one chunk has room for them");
    assert_eq!(rig.cache.status().open, CHUNK - SLACK - 100);
    for page in 0..100 {
        assert!(rig.read(page) == bytes(page, 1), "page {page}");
    }
    rig.reads(1500);
    assert!(rig.cache.status().used > 100, "other pages are cached again");
    rig.take_all().unwrap();
    let status = rig.cache.status();
    assert_eq!((rig.held(), status.open), (CHUNKS, status.frames));
}

#[test]
fn a_job_that_is_stopped_opens_frames_again() {
    let home = SimUrl { latency: Duration::from_secs(10), ..SimUrl::default() };
    let mut rig = Rig::new(&home, &SimUrl::default());
    (0..100).for_each(|page| rig.write(page, 1));
    rig.give_all_back();
    (0..100).for_each(|_| drop(rig.turn()));
    rig.reclaimer.stop();
    assert!(matches!(rig.end_job(), Err(ReclaimError::Stopped)));
    rig.take_all().unwrap();
    let status = rig.cache.status();
    assert_eq!((rig.held(), status.open), (CHUNKS, status.frames));
}

#[test]
fn pages_that_are_read_or_written_without_a_break_leave_all_the_same() {
    let slow = SimUrl { delay: 32, ..SimUrl::default() };
    let mut rig = Rig::new(&slow, &slow);
    rig.write(7, 1);
    assert_eq!(rig.lanes[1].flush(9), Progress::Queued);
    assert_eq!(rig.answer().0, Ok(()));
    rig.write(8, 0);
    for round in 0..20_000 {
        if round == 50 {
            rig.give_all_back();
        }
        // The first lane always reads page 7, and the second lane always writes page 8.
        for lane in 0..2 {
            for ticket in 0..8 {
                let _ = match lane {
                    0 => rig.lanes[0].read(ticket, PageNo(7), &mut [0; PAGE_SIZE]),
                    _ => rig.lanes[1].write(ticket, PageNo(8), &bytes(8, round)),
                };
            }
            rig.lanes[lane].submit();
        }
        let step = rig.turn();
        assert!(rig.answers.drain(..).all(|(_, result, _)| result == Ok(())));
        if let (Reclaim::Ended(result), true) = (step, round >= 50) {
            result.unwrap();
            return assert_eq!(rig.held(), 0);
        }
    }
    panic!("they never leave");
}

#[test]
fn clean_pages_that_cannot_be_read_in_the_store_are_dropped_and_their_chunk_goes() {
    let store = SimUrl { read_error: 1.0, ..SimUrl::default() };
    let mut rig = Rig::new(&SimUrl { delay: 1, ..SimUrl::default() }, &store);
    // Fill all frames that will stay open, and others.
    (0..2000).for_each(|page| rig.reads(page));
    for _ in 0..2 {
        let mut chunks = rig.cache.chunks(ChunkState::Held);
        // Take those with the most pages, so that pages must move.
        chunks.reverse();
        chunks.truncate(1);
        rig.reclaimer.give_back(chunks);
        rig.end_job().unwrap();
    }
    assert_eq!(rig.held(), 1);
}
