//! A durable log that loses power again and again, over a store that fails and hangs, compared with
//! a model that knows the possible contents of each page. Writes since the store's last flush are
//! lost, torn by sectors, or done in another order.
//!
//! `WEIR_SCALE=full` runs 4,000 seeds and 80,000 power cuts; without it, the test takes a few
//! seconds. `WEIR_SEED=N` runs one seed.

use std::sync::Arc;
use std::time::{Duration, Instant};
use weir_core::{ByteSize, PAGE_SIZE, PageBytes, Slot, unwatched};
use weir_log::{Cleaner, Config, Log, check};
use weir_store::{Fault, Lane, Progress, Sim, SimUrl, Store};

const SEGMENT: u32 = 8;
const SEGMENTS: u32 = 200;
const LANES: usize = 3;
const DEPTH: usize = 12;

struct Chance(u64);

impl Chance {
    fn below(&mut self, below: u64) -> u64 {
        self.0 = self.0.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
        ((self.0 >> 33) * below) >> 31
    }
}

fn content(value: u64) -> PageBytes {
    let mut bytes = [0; PAGE_SIZE];
    bytes.chunks_exact_mut(8).for_each(|word| word.copy_from_slice(&value.to_ne_bytes()));
    bytes
}

/// The value of a page; `None`: it is torn.
fn value(bytes: &PageBytes) -> Option<u64> {
    let value = u64::from_ne_bytes(bytes[..8].try_into().unwrap());
    bytes.chunks_exact(8).all(|word| word == value.to_ne_bytes()).then_some(value)
}

/// The writes of a page that may be its content after a power cut, the oldest first.
#[derive(Clone)]
struct History {
    writes: Vec<Write>,
    is_written: bool,
    readers: u32,
}

#[derive(Clone, Copy, Debug)]
struct Write {
    value: u64,
    acknowledged: Option<u64>,
}

impl History {
    fn of(value: u64) -> Self {
        History { writes: vec![Write { value, acknowledged: Some(0) }], is_written: false, readers: 0 }
    }

    /// The last write that was acknowledged by `time`.
    fn last(&self, time: u64) -> usize {
        let by = |write: &Write| write.acknowledged.is_some_and(|at| at <= time);
        self.writes.iter().rposition(by).unwrap_or(0)
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
    pages: Vec<History>,
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
            pages: vec![History::of(0); config.pages as usize],
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
        let log = Log::open(below, config, &mut clock, &mut unwatched);
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
        let History { is_written, readers, ref writes, .. } = self.pages[page as usize];
        if is_written {
            return;
        }
        let (doing, progress, out) = if self.chance.below(4) == 0 {
            let mut out = [0xaa; PAGE_SIZE];
            let progress = self.lanes[lane].read(ticket as u32, Slot(page), &mut out);
            (Doing::Read(page), progress, Some(out))
        } else if readers == 0 {
            let doing = Doing::Write(page, writes.len());
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
        let history = &mut self.pages[page as usize];
        match doing {
            Doing::Write(..) => {
                history.writes.push(Write { value: self.value, acknowledged: None });
                history.is_written = true;
            }
            _ => history.readers += 1,
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
                let history = &mut self.pages[page as usize];
                history.readers -= 1;
                if result.is_ok() {
                    let expected = history.writes[history.last(u64::MAX)].value;
                    let found = value(found.expect("a read brings a page"));
                    assert!(found == Some(expected), "seed {seed}: page {page} is {found:?}, not {expected}");
                }
            }
            Doing::Write(page, at) => {
                let history = &mut self.pages[page as usize];
                history.is_written = false;
                history.writes[at].acknowledged = result.is_ok().then_some(self.time);
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
        let asks = |lane: &Vec<Option<Doing>>| lane.iter().flatten().any(|doing| matches!(doing, Doing::Flush(_)));
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
        self.open();
        self.read_all();
    }

    /// Reads each page; from here on that is its content.
    fn read_all(&mut self) {
        for page in 0..self.pages.len() {
            let found = (0..100).find_map(|_| self.read(page as u32));
            let found = found.unwrap_or_else(|| panic!("seed {}: page {page} cannot be read", self.seed));
            let found = value(&found);
            let history = &self.pages[page];
            let allowed = &history.writes[history.last(self.flushed)..];
            assert!(
                allowed.iter().any(|write| Some(write.value) == found),
                "seed {} after {} cuts: page {page} is {found:?}, not of {allowed:?}; flushed at {}",
                self.seed,
                self.counts.cuts,
                self.flushed
            );
            let found = found.expect("an allowed value");
            self.counts.lost += u64::from(history.writes.last().is_some_and(|write| write.value != found));
            self.pages[page] = History::of(found);
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
    let (seeds, cuts, operations) = if full { (4000, 20, 600) } else { (48, 6, 500) };
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
        all.commits += world.counts.commits;
        all.checkpoints += world.counts.checkpoints;
        all.cleaned += world.counts.cleaned;
        all.lost += world.counts.lost;
    }
    println!("{all:?}");
    // The histories must have had the events that they are for.
    assert!(one.is_some() || all.flushes > 500 && all.cuts > 200 && all.mid_commit > 50, "{all:?}");
    assert!(one.is_some() || all.cleaned > 1000 && all.checkpoints > 500 && all.lost > 500, "{all:?}");
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
