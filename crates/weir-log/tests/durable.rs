//! A durable log that loses power again and again, over a store that fails and hangs, compared with
//! a model that knows the possible contents of each page. Writes since the store's last flush are
//! lost, torn by sectors, or done in another order.
//!
//! `WEIR_SCALE=full` runs 4,000 seeds and 80,000 power cuts; without it, the test takes a few
//! seconds. `WEIR_SEED=N` runs one seed.

mod common;

use common::content;
use std::sync::Arc;
use std::time::{Duration, Instant};
use weir_core::{ByteSize, Checksum, PAGE_SIZE, PageBytes, PageNo, Slot, unwatched};
use weir_log::{Cleaner, Config, DamagedError, Log, check};
use weir_store::conformance::{Chance, History, repeated};
use weir_store::{Fault, Lane, Progress, Sim, SimUrl, Store};

const SEGMENT: u32 = 8;
const SEGMENTS: u32 = 200;
const LANES: usize = 3;
const DEPTH: usize = 12;

/// A page: the writes that may be its content after a power cut, and its readers.
#[derive(Clone)]
struct Page {
    history: History<u64>,
    readers: u32,
}

impl Page {
    fn of(value: u64) -> Self {
        Page { history: History::of(value), readers: 0 }
    }
}

#[derive(Clone, Copy)]
enum Doing {
    Read(u32),
    Write(u32, usize),
    Flush(u64),
}

#[derive(Default, Debug)]
struct Counts {
    operations: u64,
    errors: u64,
    flushes: u64,
    cuts: u64,
    /// Cuts within a commit.
    mid_commit: u64,
    cuts_while_opening: u64,
    checkpoints: u64,
    commits: u64,
    cleaned: u64,
    /// Pages that lost a write which no flush had made safe.
    lost: u64,
}

struct World {
    seed: u64,
    chance: Chance,
    now: Instant,
    time: u64,
    value: u64,
    below: Arc<Sim>,
    log: Option<Log>,
    lanes: Vec<Box<dyn Lane>>,
    cleaner: Option<Cleaner>,
    pages: Vec<Page>,
    doing: Vec<Vec<Option<Doing>>>,
    flushed: u64,
    hangs: bool,
    fails: bool,
    counts: Counts,
}

fn config(seed: u64) -> Config {
    // The log is between a third full and as full as it may be.
    let pages = 300 + (seed / 4 % 4) as u32 * 130;
    Config { pages, segment_pages: SEGMENT, members: 3, lanes: LANES as u32 + 1, summaries: 1 }
}

fn store(seed: u64) -> Arc<Sim> {
    let size = ByteSize(u64::from(SEGMENT * SEGMENTS) * PAGE_SIZE as u64);
    let url = SimUrl { seed, size, delay: 1 + (seed % 5) as u32, ..SimUrl::default() };
    let url = match seed % 4 {
        1 => SimUrl { read_error: 0.01, write_error: 0.02, ..url },
        _ => url,
    };
    let below = Arc::new(Sim::open(url).unwrap());
    below.forget_without_power();
    below.let_writes_outlive_lanes(true);
    below
}

impl World {
    fn new(seed: u64) -> Self {
        let below = store(seed);
        let (mut now, config) = (Instant::now(), config(seed));
        let as_store = Arc::clone(&below) as Arc<dyn Store>;
        let mut clock = || {
            now += Duration::from_millis(1);
            now
        };
        while let Err(error) = Log::make(&as_store, config, u128::from(seed) + 1, &mut clock) {
            assert!(seed % 4 == 1, "seed {seed}: {error}");
        }
        let mut world = World {
            seed,
            chance: Chance(seed ^ 0xd0_0d),
            now,
            time: 1,
            value: 0,
            below,
            log: None,
            lanes: Vec::new(),
            cleaner: None,
            pages: vec![Page::of(0); config.pages as usize],
            doing: Vec::new(),
            flushed: 0,
            hangs: false,
            fails: seed % 4 == 1,
            counts: Counts::default(),
        };
        world.open();
        world
    }

    fn open(&mut self) {
        let (seed, below) = (self.seed, Arc::clone(&self.below) as Arc<dyn Store>);
        let (mut now, config) = (self.now, config(seed));
        let mut clock = || {
            now += Duration::from_millis(1);
            now
        };
        let report = check(&below, config, &mut clock, &mut unwatched).unwrap();
        assert!(report.is_clean(), "seed {seed} after {} cuts: {report:?}", self.counts.cuts);
        let log = Log::open(&below, config, &mut clock, &mut unwatched);
        let log = log.unwrap_or_else(|error| panic!("seed {seed}: {error}"));
        self.lanes = (0..LANES).map(|_| log.lane(DEPTH).unwrap()).collect();
        self.cleaner = Some(Cleaner::open(&log).unwrap());
        self.doing = vec![vec![None; DEPTH + 1]; LANES];
        self.log = Some(log);
        self.now = now;
    }

    fn turn(&mut self) {
        self.time += 1;
        self.now += Duration::from_millis(1);
        let lane = self.chance.below(LANES as u64) as usize;
        match self.chance.below(100) {
            0..50 => self.begin(lane),
            50..55 => self.lanes[lane].submit(),
            55..75 => self.poll(lane),
            98 if self.seed % 4 == 3 && self.chance.below(20) == 0 => {
                self.hangs ^= true;
                self.fails = true;
                self.below.hang(self.hangs);
            }
            _ => {
                self.cleaner.as_mut().unwrap().step(self.now);
            }
        }
    }

    fn begin(&mut self, lane: usize) {
        if self.chance.below(60) == 0 && self.doing[lane][DEPTH].is_none() {
            let doing = Doing::Flush(self.time);
            match self.lanes[lane].flush(DEPTH as u32) {
                Progress::Done(result) => self.ended(doing, result, None),
                Progress::Queued => self.doing[lane][DEPTH] = Some(doing),
                Progress::Full => panic!("one flush of a lane at a time"),
            }
            return;
        }
        let Some(ticket) = self.doing[lane][..DEPTH].iter().position(Option::is_none) else { return };
        let pages = self.pages.len() as u64;
        let below = if self.chance.below(2) == 0 { pages / 8 } else { pages };
        let page = self.chance.below(below) as u32;
        let Page { ref history, readers } = self.pages[page as usize];
        if history.is_written {
            return;
        }
        let (doing, progress, out) = if self.chance.below(4) == 0 {
            let mut out = [0xaa; PAGE_SIZE];
            let progress = self.lanes[lane].read(ticket as u32, Slot(page), &mut out);
            (Doing::Read(page), progress, Some(out))
        } else if readers == 0 {
            let doing = Doing::Write(page, history.writes.len());
            self.value += 1;
            let progress = self.lanes[lane].write(ticket as u32, Slot(page), &content(self.value));
            (doing, progress, None)
        } else {
            return;
        };
        if progress == Progress::Full {
            return;
        }
        self.counts.operations += 1;
        let page = &mut self.pages[page as usize];
        match doing {
            Doing::Write(..) => page.history.begin(self.value),
            _ => page.readers += 1,
        }
        match progress {
            Progress::Done(result) => self.ended(doing, result, out.as_ref()),
            _ => self.doing[lane][ticket] = Some(doing),
        }
    }

    fn poll(&mut self, lane: usize) {
        let mut done = Vec::new();
        self.lanes[lane].poll(self.now, &mut |end| done.push((end.ticket, end.result, end.page.copied())));
        for (ticket, result, page) in done {
            let doing = self.doing[lane][ticket as usize].take().expect("each operation ends once");
            self.ended(doing, result, page.as_ref());
        }
    }

    fn ended(&mut self, doing: Doing, result: Result<(), Fault>, found: Option<&PageBytes>) {
        let seed = self.seed;
        if let Err(fault) = result {
            assert!(self.fails, "seed {seed}: {fault}, and nothing was injected");
            self.counts.errors += 1;
        }
        match doing {
            Doing::Read(page) => {
                let Page { history, readers } = &mut self.pages[page as usize];
                *readers -= 1;
                if result.is_ok() {
                    let expected = history.writes[history.oldest(u64::MAX)].value;
                    let found = repeated(found.expect("a read brings a page"));
                    assert!(found == Some(expected), "seed {seed}: page {page} is {found:?}, not {expected}");
                }
            }
            Doing::Write(page, at) => {
                self.pages[page as usize].history.end(at, result.is_ok().then_some(self.time));
            }
            Doing::Flush(since) if result.is_ok() => {
                self.counts.flushes += 1;
                self.flushed = self.flushed.max(since);
            }
            Doing::Flush(_) => {}
        }
    }

    fn drain(&mut self) {
        self.below.hang(false);
        self.hangs = false;
        for turn in 0.. {
            assert!(turn < 100_000, "seed {}: {:?}", self.seed, self.log.as_ref().unwrap().status());
            self.now += Duration::from_millis(1);
            self.time += 1;
            for lane in 0..LANES {
                self.lanes[lane].submit();
                self.poll(lane);
            }
            self.cleaner.as_mut().unwrap().step(self.now);
            if self.lanes.iter().all(|lane| lane.in_flight() == 0) {
                break;
            }
        }
    }

    /// Ends the process; `cuts`: the power too.
    fn die(&mut self, cuts: bool) {
        let status = self.log.as_ref().unwrap().status();
        let durable = status.durable.unwrap();
        self.counts.commits += durable.commits;
        self.counts.checkpoints += durable.checkpoints;
        self.counts.cleaned += status.cleaned;
        let asks =
            |lane: &Vec<Option<Doing>>| lane.iter().flatten().any(|doing| matches!(doing, Doing::Flush(_)));
        self.counts.mid_commit += u64::from(self.doing.iter().any(asks));
        self.lanes.clear();
        self.cleaner = None;
        self.log = None;
        self.below.hang(false);
        self.hangs = false;
        if cuts {
            self.counts.cuts += 1;
            let chance = &mut self.chance;
            self.below.tear_power(&mut |count| chance.below(count as u64) as usize);
        } else {
            // The disk does what it was told before the process ended.
            while self.below.orphans() > 0 {
                self.below.land(0);
            }
        }
        while cuts && self.chance.below(2) == 0 {
            self.die_while_opening();
        }
        self.open();
        self.read_all();
    }

    /// Cuts the power while the log is opened.
    fn die_while_opening(&mut self) {
        let (below, config) = (Arc::clone(&self.below) as Arc<dyn Store>, config(self.seed));
        let (mut now, mut left) = (self.now, 1 + self.chance.below(60));
        let mut clock = || {
            left -= 1;
            if left == 0 {
                std::panic::resume_unwind(Box::new("the power is cut"));
            }
            now += Duration::from_millis(1);
            now
        };
        let opens = || drop(Log::open(&below, config, &mut clock, &mut unwatched));
        let ended = std::panic::catch_unwind(std::panic::AssertUnwindSafe(opens));
        self.counts.cuts_while_opening += u64::from(ended.is_err());
        let chance = &mut self.chance;
        self.below.tear_power(&mut |count| chance.below(count as u64) as usize);
    }

    /// Reads each page; from here on that is its content.
    fn read_all(&mut self) {
        for page in 0..self.pages.len() {
            let found = (0..100).find_map(|_| self.read(page as u32));
            let found = found.unwrap_or_else(|| panic!("seed {}: page {page} cannot be read", self.seed));
            let found = repeated(&found);
            let history = &self.pages[page].history;
            let allowed = &history.writes[history.oldest(self.flushed)..];
            assert!(
                allowed.iter().any(|write| Some(write.value) == found),
                "seed {} after {} cuts: page {page} is {found:?}, not of {allowed:?}; flushed at {}",
                self.seed,
                self.counts.cuts,
                self.flushed
            );
            let found = found.expect("an allowed value");
            self.counts.lost += u64::from(history.writes.last().is_some_and(|write| write.value != found));
            self.pages[page] = Page::of(found);
        }
    }

    /// The content of a page. `None`: an injected error.
    fn read(&mut self, page: u32) -> Option<PageBytes> {
        let mut out = [0; PAGE_SIZE];
        match self.lanes[0].read(0, Slot(page), &mut out) {
            Progress::Done(result) => return result.ok().map(|()| out),
            Progress::Queued => {}
            Progress::Full => panic!("nothing is under way"),
        }
        let mut found = None;
        while self.lanes[0].in_flight() > 0 {
            self.lanes[0].submit();
            self.now += Duration::from_millis(1);
            self.lanes[0].poll(self.now, &mut |done| found = done.page.copied());
        }
        assert!(found.is_some() || self.fails, "seed {}: page {page} cannot be read", self.seed);
        found
    }
}

#[test]
fn a_durable_log_has_every_flushed_page_after_a_power_cut_and_no_torn_one() {
    let full = std::env::var("WEIR_SCALE").is_ok_and(|scale| scale == "full");
    let (seeds, cuts, operations) = if full { (4000, 20, 600) } else { (24, 6, 500) };
    let one: Option<u64> = std::env::var("WEIR_SEED").ok().and_then(|seed| seed.parse().ok());
    let mut all = Counts::default();
    for seed in one.map_or(0..seeds, |seed| seed..seed + 1) {
        let mut world = World::new(seed);
        for cut in 1..=cuts {
            // Some runs are long enough to fill the log, some end within the first commit.
            let until = world.counts.operations + 1 + world.chance.below(operations * cut % 4000);
            let mut turns = 0;
            while world.counts.operations < until {
                world.turn();
                turns += 1;
                assert!(turns < 400_000, "seed {seed}: {:?}", world.log.as_ref().unwrap().status());
            }
            if cut % 3 == 0 {
                world.drain();
            }
            world.die(cut % 5 != 0);
        }
        all.operations += world.counts.operations;
        all.errors += world.counts.errors;
        all.flushes += world.counts.flushes;
        all.cuts += world.counts.cuts;
        all.mid_commit += world.counts.mid_commit;
        all.cuts_while_opening += world.counts.cuts_while_opening;
        all.commits += world.counts.commits;
        all.checkpoints += world.counts.checkpoints;
        all.cleaned += world.counts.cleaned;
        all.lost += world.counts.lost;
    }
    println!("{all:?}");
    // The histories must have had the events that they are for.
    assert!(one.is_some() || all.flushes > 400 && all.cuts > 100 && all.mid_commit > 15, "{all:?}");
    assert!(
        one.is_some()
            || all.cleaned > 1000 && all.cuts_while_opening > 20 && all.checkpoints > 200 && all.lost > 400,
        "{all:?}"
    );
}

#[test]
fn whatever_is_damaged_a_check_is_never_clean_wrongly_and_no_page_is_wrong() {
    let full = std::env::var("WEIR_SCALE").is_ok_and(|scale| scale == "full");
    // At CI scale also seed 31: a check found one of a page's two copies whole, and the log read
    // the other.
    let runs = if full { vec![(0..400, 1000)] } else { vec![(0..4, 100), (31..32, 1000)] };
    let (mut clean, mut damaged, mut refused, mut bad) = (0, 0, 0, 0);
    for (seed, cases) in runs.into_iter().flat_map(|(seeds, cases)| seeds.map(move |seed| (seed, cases))) {
        // Stores of these seeds have no errors of their own.
        let mut world = World::new(seed * 4);
        while world.counts.operations < 3000 {
            world.turn();
        }
        world.drain();
        // Every second log ends in good order, the others with segments that were being written.
        if seed % 2 == 0 {
            world.lanes.iter_mut().for_each(|lane| assert_eq!(lane.flush(DEPTH as u32), Progress::Queued));
            (0..LANES).for_each(|lane| world.doing[lane][DEPTH] = Some(Doing::Flush(world.time)));
            world.drain();
        }
        world.die(seed % 2 == 1);
        (world.lanes, world.cleaner, world.log) = (Vec::new(), None, None);
        let below = Arc::clone(&world.below) as Arc<dyn Store>;
        let config = config(seed * 4);
        let image: Vec<PageBytes> = (0..SEGMENT * SEGMENTS)
            .map(|slot| {
                let mut page = [0; PAGE_SIZE];
                world.below.change(Slot(slot), |bytes| page = *bytes);
                page
            })
            .collect();
        for _ in 0..cases {
            let slots = damage(&world.below, &mut world.chance);
            let mut now = world.now;
            let mut clock = || {
                now += Duration::from_millis(1);
                now
            };
            let report = check(&below, config, &mut clock, &mut unwatched);
            let is_clean = report.as_ref().is_ok_and(|report| report.is_clean());
            bad += u64::from(report.as_ref().is_ok_and(|report| report.bad_count > 0));
            match Log::open(&below, config, &mut clock, &mut unwatched) {
                Err(error) => {
                    assert!(!is_clean, "seed {seed}: clean, and then {error}");
                    refused += 1;
                }
                Ok(log) => {
                    world.fails = !is_clean;
                    world.lanes = vec![log.lane(DEPTH).unwrap()];
                    for page in 0..world.pages.len() {
                        let Some(found) = world.read(page as u32) else { continue };
                        let expected = world.pages[page].history.writes[0].value;
                        assert_eq!(
                            repeated(&found),
                            Some(expected),
                            "seed {seed}: page {page}, damaged {slots:?}, {report:?}"
                        );
                    }
                    world.lanes.clear();
                }
            }
            (clean, damaged) = (clean + u64::from(is_clean), damaged + u64::from(!is_clean));
            (0..).zip(&image).for_each(|(slot, page)| world.below.change(Slot(slot), |bytes| *bytes = *page));
        }
    }
    println!("clean {clean}, damaged {damaged}: refused {refused}, bad pages {bad}");
    assert!(clean > 30 && damaged > 150 && refused > 30 && bad > 30, "{clean} {damaged} {refused} {bad}");
}

/// Damages some pages of the store: bits, zeros, noise, or one page in another's place. Returns
/// their slots.
fn damage(below: &Sim, chance: &mut Chance) -> Vec<Slot> {
    let mut slots_damaged = Vec::new();
    for _ in 0..1 + chance.below(3) {
        // Half of the damage meets the log's own records, which are few.
        let slots = u64::from(SEGMENT * SEGMENTS);
        let slot = match chance.below(4) {
            0 => Slot(chance.below(3 * u64::from(SEGMENT) + 40) as u32),
            1 => Slot(chance.below(u64::from(SEGMENTS)) as u32 * SEGMENT + SEGMENT - 1),
            _ => Slot(chance.below(slots) as u32),
        };
        let mut other = [0; PAGE_SIZE];
        below.change(Slot(chance.below(slots) as u32), |bytes| other = *bytes);
        let (kind, bit, noise) = (chance.below(4), chance.below(PAGE_SIZE as u64 * 8), chance.below(1 << 30));
        slots_damaged.push(slot);
        below.change(slot, |bytes| match kind {
            0 => bytes[bit as usize / 8] ^= 1 << (bit % 8),
            1 => bytes.fill(0),
            2 => *bytes = content(noise | 1 << 62),
            _ => *bytes = other,
        });
    }
    slots_damaged
}

/// Changes a page and gives it the right checksum again, which lies at `at` and is mixed with two
/// numbers of the page.
fn forge(below: &Sim, slot: u32, at: usize, mixed: [usize; 2], change: impl FnOnce(&mut PageBytes)) {
    below.change(Slot(slot), |bytes| {
        change(bytes);
        bytes[at..at + 4].fill(0);
        let word = |at: usize| u32::from_le_bytes(bytes[at..at + 4].try_into().unwrap());
        let checksum = Checksum::of(bytes, PageNo(word(mixed[0])), word(mixed[1]));
        bytes[at..at + 4].copy_from_slice(&checksum.0.to_le_bytes());
    });
}

#[test]
fn what_is_missing_or_damaged_in_a_log_is_named_with_the_next_step() {
    let config = config(0);
    let mut now = Instant::now();
    let mut clock = || {
        now += Duration::from_millis(1);
        now
    };
    let mut refusal = |below: &Arc<Sim>, config: Config| {
        let below = Arc::clone(below) as Arc<dyn Store>;
        let opened = Log::open(&below, config, &mut clock, &mut unwatched);
        let error = opened.expect_err("it is refused");
        let cause = std::error::Error::source(&error).map_or(String::new(), |cause| format!(": {cause}"));
        format!("{error}{cause}")
    };
    let said = refusal(&store(0), config);
    assert!(said.contains("carries no durable log; weir cache create --durable makes one"), "{said}");

    // A log with segments in use, closed in good order.
    let made = || {
        let mut world = World::new(0);
        while world.counts.operations < 1000 {
            world.turn();
        }
        world.drain();
        world.die(false);
        (world.lanes, world.cleaner, world.log) = (Vec::new(), None, None);
        world.below
    };
    let below = made();
    let said = refusal(&below, Config { members: 2, ..config });
    assert!(said.contains("the log lies on 3 disks, and 2 are named: name all of them"), "{said}");
    let said = refusal(&below, Config { lanes: 100, ..config });
    assert!(said.contains("100 lanes for a log that was made for fewer"), "{said}");
    // The second disk's superblock says that it is the third.
    for slot in [8, 12] {
        forge(&below, slot, 4092, [540, 512], |bytes| bytes[540] = 2);
    }
    let said = refusal(&below, config);
    assert!(said.contains("disk 2 is the log's disk 3: name the disks in the order of its making"), "{said}");
    for slot in [8, 12] {
        forge(&below, slot, 4092, [540, 512], |bytes| (bytes[540], bytes[524]) = (1, 77));
    }
    let said = refusal(&below, config);
    assert!(said.contains("disk 2 is part of another log"), "{said}");
    for slot in [8, 12] {
        below.change(Slot(slot), |bytes| bytes.fill(0));
    }
    let said = refusal(&below, config);
    assert!(said.contains("disk 2 carries no part of the log"), "{said}");
    for slot in [8, 12] {
        below.change(Slot(slot), |bytes| bytes[..5].copy_from_slice(b"WEIR "));
    }

    // Each disk's superblock says that the log has 256 segments more.
    let below = made();
    for slot in [0, 4, 8, 12, 16, 20] {
        forge(&below, slot, 4092, [540, 512], |bytes| bytes[553] += 1);
    }
    let said = refusal(&below, config);
    assert!(said.contains(" segments of 8 pages, and there is room for "), "{said}");
    assert!(said.ends_with(" of 8: has a disk been replaced or cut?"), "{said}");

    let below = made();
    for slot in [0, 4] {
        forge(&below, slot, 4092, [540, 512], |bytes| bytes[512] = 2);
    }
    let said = refusal(&below, config);
    assert!(said.contains("of format 2; this version of Weir reads 1"), "{said}");

    let below = made();
    below.change(Slot(4), |bytes| bytes[600] ^= 1);
    let mut now = Instant::now();
    let mut clock = || {
        now += Duration::from_millis(1);
        now
    };
    let as_store = Arc::clone(&below) as Arc<dyn Store>;
    let report = check(&as_store, config, &mut clock, &mut unwatched).unwrap();
    assert_eq!(report.damage, [DamagedError::Copy(1)], "one copy is enough to open it");
    // A copy of the first disk's superblock in place of one of the third's, which are at 16 and 20.
    for slot in [16, 20] {
        let other = made();
        let mut first = [0; PAGE_SIZE];
        other.change(Slot(0), |bytes| first = *bytes);
        other.change(Slot(slot), |bytes| *bytes = first);
        let other = other as Arc<dyn Store>;
        let report = check(&other, config, &mut clock, &mut unwatched).unwrap();
        assert_eq!(report.damage, [DamagedError::Copy(3)], "the other copy is enough to open it");
        Log::open(&other, config, &mut clock, &mut unwatched).unwrap();
    }
    let mut stops = |_, _| Err(std::io::ErrorKind::Interrupted.into());
    let error = Log::open(&as_store, config, &mut clock, &mut stops).unwrap_err();
    assert_eq!(error.to_string(), "stopped before it was done");
    below.change(Slot(0), |bytes| bytes[600] ^= 1);
    let said = refusal(&below, config);
    assert!(said.contains("weir cache check says what is left: disk 1 of the log: both copies"), "{said}");

    // The journal begins at slot 24; each half has 88 pages. The last checkpoint is in one of them.
    let below = made();
    let half = |below: &Sim, half: u32| {
        let mut sequence = 0;
        let first = 24 + half * 88;
        below.change(Slot(first), |bytes| sequence = u64::from_le_bytes(bytes[16..24].try_into().unwrap()));
        (sequence, first)
    };
    let (_, first) = half(&below, 0).max(half(&below, 1));
    below.change(Slot(first), |bytes| bytes[100] ^= 1);
    let said = refusal(&below, config);
    assert!(said.contains("is the last one that is whole, and commit"), "{said}");
    for slot in [24, 112] {
        below.change(Slot(slot), |bytes| bytes.fill(0));
    }
    let said = refusal(&below, config);
    assert!(said.contains("the journal has no complete checkpoint"), "{said}");

    let below = made();
    let (_, first) = half(&below, 0).max(half(&below, 1));
    let mut segment = 0;
    below.change(Slot(first), |bytes| {
        segment = u32::from_le_bytes(bytes[64..68].try_into().unwrap());
    });
    let summary = segment * SEGMENT + SEGMENT - 1;
    let mut whole = [0; PAGE_SIZE];
    below.change(Slot(summary), |bytes| whole = std::mem::replace(bytes, [3; PAGE_SIZE]));
    let said = refusal(&below, config);
    assert!(said.contains(&format!("segment {segment} is in use, and its summary is damaged")), "{said}");
    below.change(Slot(summary), |bytes| *bytes = whole);
    forge(&below, summary, 12, [4, 8], |bytes| bytes[32..36].copy_from_slice(&9999u32.to_le_bytes()));
    let said = refusal(&below, config);
    assert!(said.contains("says of a page what cannot be"), "{said}");
    forge(&below, first, 4, [16, 24], |bytes| bytes[64..68].copy_from_slice(&9999u32.to_le_bytes()));
    let said = refusal(&below, config);
    assert!(said.contains("it says of segment 9999 what cannot be"), "{said}");

    let url =
        SimUrl { size: ByteSize(u64::from(SEGMENT * SEGMENTS) * PAGE_SIZE as u64), ..SimUrl::default() };
    let broken = Arc::new(Sim::open(SimUrl { write_error: 1.0, ..url }).unwrap()) as Arc<dyn Store>;
    let said = Log::make(&broken, config, 5, &mut clock).unwrap_err().to_string();
    assert!(said.contains("cannot write to"), "{said}");
    let said =
        Log::make(&broken, Config { segment_pages: 4, ..config }, 5, &mut clock).unwrap_err().to_string();
    assert!(said.contains("a log has segments of 2 to 285 pages (8 at least if it is durable)"), "{said}");
}

#[test]
fn after_a_flush_below_has_failed_no_later_one_succeeds() {
    let mut world = World::new(0);
    world.fails = true;
    world.below.fail_flushes(true);
    let flush = |world: &mut World| {
        assert_eq!(world.lanes[0].flush(0), Progress::Queued);
        let mut answer = None;
        while answer.is_none() {
            world.now += Duration::from_millis(1);
            world.cleaner.as_mut().unwrap().step(world.now);
            world.lanes[0].poll(world.now, &mut |done| answer = Some(done.result));
        }
        answer.unwrap()
    };
    assert!(flush(&mut world).is_err());
    world.below.fail_flushes(false);
    assert!(flush(&mut world).is_err(), "the kernel tells of a loss once");
    // The next process asks the disk anew.
    world.die(false);
    assert_eq!(flush(&mut world), Ok(()));
    // Without a cleaner nobody commits, and nobody waits for ever.
    assert_eq!(world.lanes[0].flush(0), Progress::Queued);
    world.cleaner = None;
    let mut answer = None;
    world.lanes[0].poll(world.now, &mut |done| answer = Some(done.result));
    assert!(matches!(answer, Some(Err(_))), "{answer:?}");
}
