//! A log over a stripe of stores that fail, lie and hang, compared with a model that knows the
//! possible content of each page.
//!
//! `WEIR_SCALE=full` runs 1,000 seeds of 100,000 operations; without it, the test takes a few
//! seconds. `WEIR_SEED=N` runs one seed.

mod common;

use common::content;
use std::sync::Arc;
use std::time::{Duration, Instant};
use weir_core::{ByteSize, PAGE_SIZE, PageBytes, Slot};
use weir_log::{Cleaner, Config, Log};
use weir_store::conformance::Chance;
use weir_store::{Fault, Lane, Progress, Sim, SimUrl, Store};

const SEGMENT: u32 = 8;
const SEGMENTS: u32 = 120;
const LANES: usize = 3;
const DEPTH: usize = 12;

/// The URL with the faults of the seed's stores.
fn url(seed: u64) -> SimUrl {
    let size = ByteSize(u64::from(SEGMENT * SEGMENTS) * PAGE_SIZE as u64);
    let url = SimUrl { seed, size, delay: (seed % 6) as u32, ..SimUrl::default() };
    match seed % 4 {
        1 => SimUrl { read_error: 0.01, write_error: 0.02, ..url },
        2 => SimUrl { corrupt: 0.002, lose: 0.002, ..url },
        3 => SimUrl { delay: url.delay.max(1), ..url },
        _ => url,
    }
}

#[derive(Clone, Copy)]
enum Doing {
    Read(u32),
    Write(u32, u64),
}

struct World {
    seed: u64,
    chance: Chance,
    now: Instant,
    below: Arc<Sim>,
    log: Log,
    lanes: Vec<Box<dyn Lane>>,
    cleaner: Cleaner,
    /// For each page its value, whether a write of it is under way, and the number of its reads
    /// under way.
    pages: Vec<(u64, bool, u32)>,
    doing: Vec<Vec<Option<Doing>>>,
    value: u64,
    hangs: bool,
    reads: u64,
    writes: u64,
    errors: u64,
}

impl World {
    fn new(seed: u64) -> Self {
        let below = Arc::new(Sim::open(url(seed)).unwrap());
        // The log is between half full and as full as it may be. Few summaries are in memory, so
        // that most are read from disk.
        let most = 600;
        let pages = 300 + (seed / 4 % 4) as u32 * (most - 300) / 3;
        let config =
            Config { pages, segment_pages: SEGMENT, members: 3, lanes: LANES as u32 + 1, summaries: 1 };
        let log = Log::create(Arc::clone(&below) as _, config).unwrap();
        World {
            seed,
            chance: Chance(seed ^ 0x106),
            now: Instant::now(),
            below,
            lanes: (0..LANES).map(|_| log.lane(DEPTH).unwrap()).collect(),
            cleaner: Cleaner::open(&log).unwrap(),
            log,
            pages: vec![(0, false, 0); pages as usize],
            doing: vec![vec![None; DEPTH]; LANES],
            value: 0,
            hangs: false,
            reads: 0,
            writes: 0,
            errors: 0,
        }
    }

    fn turn(&mut self) {
        self.now += Duration::from_millis(1);
        let lane = self.chance.below(LANES as u64) as usize;
        match self.chance.below(100) {
            0..50 => self.begin(lane),
            50..55 => self.lanes[lane].submit(),
            55..75 => self.poll(lane),
            98 if self.seed % 4 == 3 && self.chance.below(20) == 0 => {
                self.hangs ^= true;
                self.below.hang(self.hangs);
            }
            99 if self.chance.below(200) == 0 => self.reopen(lane),
            _ => {
                self.cleaner.step(self.now);
            }
        }
    }

    /// Draws a page: half of the operations use an eighth of the pages.
    fn page(&mut self) -> usize {
        let pages = self.pages.len() as u64;
        let below = if self.chance.below(2) == 0 { pages / 8 } else { pages };
        self.chance.below(below) as usize
    }

    fn begin(&mut self, lane: usize) {
        let Some(ticket) = self.doing[lane].iter().position(Option::is_none) else { return };
        let page = self.page();
        let (_, is_written, readers) = self.pages[page];
        if is_written {
            return;
        }
        let (doing, progress, out) = if self.chance.below(3) == 0 {
            let mut out = [0xaa; PAGE_SIZE];
            let progress = self.lanes[lane].read(ticket as u32, Slot(page as u32), &mut out);
            (Doing::Read(page as u32), progress, Some(out))
        } else if readers == 0 {
            self.value += 1;
            let progress = self.lanes[lane].write(ticket as u32, Slot(page as u32), &content(self.value));
            (Doing::Write(page as u32, self.value), progress, None)
        } else {
            return;
        };
        match progress {
            Progress::Full => return,
            Progress::Done(_) => {}
            Progress::Queued => self.doing[lane][ticket] = Some(doing),
        }
        match doing {
            Doing::Read(_) => self.pages[page].2 += 1,
            Doing::Write(..) => self.pages[page].1 = true,
        }
        if let Progress::Done(result) = progress {
            self.ended(doing, result, out.as_ref());
        }
    }

    fn poll(&mut self, lane: usize) {
        let mut done = Vec::new();
        self.lanes[lane].poll(self.now, &mut |end| done.push((end.ticket, end.result, end.page.copied())));
        for (ticket, result, page) in done {
            let doing = self.doing[lane][ticket as usize].take().expect("each operation ends once");
            self.ended(doing, result, page.as_ref());
        }
        self.lanes[lane].settled(&mut |slot| panic!("{slot:?} was never late"));
    }

    fn ended(&mut self, doing: Doing, result: Result<(), Fault>, found: Option<&PageBytes>) {
        let seed = self.seed;
        if let Err(fault) = result {
            assert!(!seed.is_multiple_of(4), "seed {seed}: {fault}, and nothing was injected");
            self.errors += 1;
        }
        match doing {
            Doing::Read(page) => {
                self.reads += 1;
                let (value, _, readers) = &mut self.pages[page as usize];
                *readers -= 1;
                if result.is_ok() {
                    let found = found.expect("a read brings a page");
                    assert!(*found == content(*value), "seed {seed}: page {page} is not {value}");
                }
            }
            Doing::Write(page, value) => {
                self.writes += 1;
                let (holds, is_written, _) = &mut self.pages[page as usize];
                *is_written = false;
                // A write that failed has changed nothing.
                if result.is_ok() {
                    *holds = value;
                }
            }
        }
    }

    fn drain(&mut self) {
        self.below.hang(false);
        self.hangs = false;
        for turn in 0.. {
            assert!(turn < 100_000, "seed {}: {:?}", self.seed, self.log.status());
            self.now += Duration::from_millis(1);
            for lane in 0..LANES {
                self.lanes[lane].submit();
                self.poll(lane);
            }
            self.cleaner.step(self.now);
            if self.lanes.iter().all(|lane| lane.in_flight() == 0) {
                break;
            }
        }
    }

    /// Drops an idle lane and opens another.
    fn reopen(&mut self, lane: usize) {
        self.drain();
        let other = self.log.lane(DEPTH).unwrap();
        self.lanes[lane] = other;
    }

    /// Waits until everything is answered, and reads each page once more.
    fn end(&mut self) {
        self.drain();
        for page in 0..self.pages.len() {
            let mut out = [0xaa; PAGE_SIZE];
            match self.lanes[0].read(0, Slot(page as u32), &mut out) {
                Progress::Done(result) => {
                    self.pages[page].2 += 1;
                    self.ended(Doing::Read(page as u32), result, Some(&out));
                }
                Progress::Queued => {
                    self.pages[page].2 += 1;
                    self.doing[0][0] = Some(Doing::Read(page as u32));
                    self.drain();
                }
                Progress::Full => panic!("nothing is under way"),
            }
        }
        let status = self.log.status();
        let written = self.pages.iter().filter(|(value, ..)| *value != 0).count() as u64;
        assert_eq!(status.live, written, "seed {}: {status:?}", self.seed);
    }
}

#[test]
fn a_log_holds_what_was_written_whatever_fails_and_is_cleaned_meanwhile() {
    let full = std::env::var("WEIR_SCALE").is_ok_and(|scale| scale == "full");
    let (seeds, operations) = if full { (1000, 100_000) } else { (32, 8_000) };
    let one: Option<u64> = std::env::var("WEIR_SEED").ok().and_then(|seed| seed.parse().ok());
    let (mut cleaned, mut moved, mut errors, mut summary_reads, mut corrupt) = (0, 0, 0, 0, 0);
    for seed in one.map_or(0..seeds, |seed| seed..seed + 1) {
        let mut world = World::new(seed);
        let mut turns = 0u64;
        while world.reads + world.writes < operations {
            world.turn();
            turns += 1;
            // Stores that lie may leave so many segments stuck that no room is left.
            if turns > operations * 50 {
                assert!(seed % 4 == 2, "seed {seed}: {:?}", world.log.status());
                break;
            }
        }
        world.end();
        let status = world.log.status();
        cleaned += status.cleaned;
        moved += status.moved;
        summary_reads += status.summary_reads;
        corrupt += status.corrupt;
        errors += world.errors;
    }
    println!(
        "cleaned {cleaned}, moved {moved}, errors {errors}, summaries read {summary_reads}, corrupt {corrupt}"
    );
    // The histories must have had the events that they are for.
    assert!(
        one.is_some() || cleaned > 10_000 && moved > 10_000 && errors > 1_000,
        "{cleaned} {moved} {errors}"
    );
    assert!(one.is_some() || summary_reads > 1_000 && corrupt > 50, "{summary_reads} {corrupt}");
}

/// A disk may lose a long write as a whole, and so the pages of a segment together with their
/// summary. The segment's summary and pages of an earlier life, or of an earlier log, are then
/// proof of each other.
#[test]
fn a_disk_that_has_lost_all_writes_of_a_segments_life_gives_no_page_of_an_earlier_one() {
    const PAGES: u32 = 24;
    let (mut wrong, mut right, mut refused) = (0, 0, 0);
    for seed in 0..40 {
        let size = ByteSize(40 * u64::from(SEGMENT) * PAGE_SIZE as u64);
        let below = Arc::new(Sim::open(SimUrl { seed, size, ..SimUrl::default() }).unwrap());
        let config = Config { pages: PAGES, segment_pages: SEGMENT, members: 1, lanes: 2, summaries: 1 };
        let create = || {
            let log = Log::create(Arc::clone(&below) as _, config).unwrap();
            (log.lane(DEPTH).unwrap(), Cleaner::open(&log).unwrap())
        };
        let ((mut lane, mut cleaner), mut chance, now) = (create(), Chance(seed), Instant::now());
        let mut values = [0; PAGES as usize];
        let mut value = 0;
        let mut write =
            |lane: &mut dyn Lane, cleaner: &mut Cleaner, chance: &mut Chance, values: &mut [u64]| {
                for _ in 0..2000 {
                    let page = chance.below(PAGES.into()) as u32;
                    value += 1;
                    while lane.write(0, Slot(page), &content(value)) != Progress::Done(Ok(())) {
                        lane.poll(now, &mut |_| {});
                        cleaner.step(now);
                    }
                    values[page as usize] = value;
                }
            };
        let peek = |slot: u32| {
            let mut found = [0; PAGE_SIZE];
            below.change(Slot(slot), |bytes| found = *bytes);
            found
        };
        write(&mut *lane, &mut cleaner, &mut chance, &mut values);
        let earlier: Vec<PageBytes> = (0..below.slots()).map(peek).collect();
        if seed % 2 == 1 {
            // Another log does the same on the same disk.
            drop((lane, cleaner));
            ((lane, cleaner), chance) = (create(), Chance(seed));
        }
        write(&mut *lane, &mut cleaner, &mut chance, &mut values);
        for (slot, page) in (0..).zip(&earlier) {
            below.change(Slot(slot), |bytes| *bytes = *page);
        }
        for (page, value) in (0..).zip(values) {
            let (mut out, mut result) = ([0; PAGE_SIZE], None);
            if let Progress::Done(done) = lane.read(0, Slot(page), &mut out) {
                result = Some(done);
            }
            while result.is_none() {
                lane.submit();
                lane.poll(now, &mut |done| {
                    result = Some(done.result);
                    out = done.page.copied().unwrap_or(out);
                });
            }
            match result {
                Some(Ok(())) if out == content(value) => right += 1,
                Some(Ok(())) => wrong += 1,
                _ => refused += 1,
            }
        }
    }
    assert_eq!(wrong, 0, "{right} pages were right, and {refused} were refused");
    assert!(refused > 500, "{right} pages were right, and {refused} were refused");
}
