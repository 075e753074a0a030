//! Requests through a cache to a disk that loses power. A flush, or a write with FUA, that was
//! answered is there afterwards. Clients leave their connections, as a kernel does that waits for
//! too long, and send what has no answer on another one. From its answer on, nothing of the
//! connection that was left takes effect.
//!
//! One thread plays several clients, the write-back and the disk, so a seed is a history. The disk
//! keeps any of the contents that a page had since the disk's last flush. `WEIR_SIMULATOR_SEEDS`
//! says how many seeds are played, and `WEIR_SIMULATOR_SEED=17` plays one. `WEIR_SCALE=full` plays
//! 10,000.

use std::sync::Arc;
use std::time::{Duration, Instant};
use weir_cache::{Cache, CacheLane, Config, Mode, WriteBack};
use weir_core::{ByteSize, PAGE_SIZE, PageBytes, Slot};
use weir_device::{Fault, Progress};
use weir_request::{Id, Op, Request, RequestMemory, Requests, Span};
use weir_store::conformance::{Chance, History, repeated};
use weir_store::{Sim, SimUrl, Store as _};

const HOME: u32 = 200;
const SECTOR: usize = 512;
const SECTORS: u32 = HOME * (PAGE_SIZE / SECTOR) as u32;
/// Most sectors of a request.
const LONGEST: u32 = 40;
const CLIENTS: usize = 3;
const IDS: u16 = 6;
const MODES: [Mode; 3] = [Mode::WriteBack, Mode::WriteThrough, Mode::WriteAround];

/// A sector: the values that it may have.
struct Sector {
    history: History<u64>,
    /// The index of the oldest write that may be there after a power cut.
    safe: usize,
}

impl Sector {
    fn of(value: u64) -> Self {
        Sector { history: History::of(value), safe: 0 }
    }
}

/// The value of a sector of a read.
fn value(bytes: &[u8]) -> u64 {
    repeated(bytes).expect("no sector is torn")
}

/// The requests' memory of one client.
struct Buffers {
    data: Vec<Vec<u8>>,
    read: Vec<Vec<PageBytes>>,
}

impl Buffers {
    fn new() -> Self {
        let pages = LONGEST as usize * SECTOR / PAGE_SIZE + 2;
        Buffers {
            data: vec![Vec::new(); usize::from(IDS)],
            read: vec![vec![[0; PAGE_SIZE]; pages]; usize::from(IDS)],
        }
    }
}

impl RequestMemory for Buffers {
    fn data(&self, id: Id) -> &[u8] {
        &self.data[usize::from(id)]
    }
    fn pages(&mut self, id: Id, at: u32) -> &mut [PageBytes] {
        &mut self.read[usize::from(id)][at as usize..]
    }
}

/// A client's connection.
struct Client {
    requests: Requests<CacheLane>,
    buffers: Buffers,
    /// For each request under way: the time at which it began. 0: its client has left.
    begun: Vec<Option<u64>>,
    /// The request that was sent under each identity.
    sent: Vec<Option<Again>>,
    /// Whether the client has left, and the server has not noticed it.
    is_left: bool,
    /// The server's thread does not get to run for so many of its turns.
    sleeps: u32,
}

/// A request that goes out again, and the value that it writes.
#[derive(Clone, Copy)]
struct Again {
    request: Request,
    value: u64,
}

#[derive(Default, Debug, PartialEq, Eq)]
struct Counts {
    writes: u64,
    flushes: u64,
    fua: u64,
    cuts: u64,
    left: u64,
    again: u64,
    /// Sectors that lost a write which nothing had made safe.
    lost: u64,
    errors: u64,
}

struct World {
    seed: u64,
    chance: Chance,
    now: Instant,
    time: u64,
    value: u64,
    disk: Arc<Sim>,
    clients: Vec<Client>,
    /// The requests that had no answer on a connection that was left.
    again: Vec<Again>,
    write_back: Option<WriteBack>,
    sectors: Vec<Sector>,
    counts: Counts,
}

impl World {
    fn new(seed: u64) -> Self {
        let rate = if Self::fails(seed) { 0.01 } else { 0.0 };
        let disk = Sim::open(SimUrl {
            seed,
            size: ByteSize(u64::from(HOME) * PAGE_SIZE as u64),
            delay: 1 + (seed % 3) as u32,
            read_error: rate,
            write_error: rate,
            ..SimUrl::default()
        });
        let disk = Arc::new(disk.expect("memory"));
        disk.forget_without_power();
        let mut world = World {
            seed,
            chance: Chance(seed ^ 0x5eed),
            now: Instant::now(),
            time: 0,
            value: 0,
            disk,
            clients: Vec::new(),
            again: Vec::new(),
            write_back: None,
            sectors: (0..SECTORS).map(|_| Sector::of(0)).collect(),
            counts: Counts::default(),
        };
        world.start();
        world
    }

    fn fails(seed: u64) -> bool {
        seed % 4 == 3
    }

    /// Starts a cache over the disk, and its clients.
    fn start(&mut self) {
        let depth = 4 + self.chance.below(8) as usize;
        let frames = 64 + (CLIENTS as u32 + 2) * (depth as u32 + 64);
        let delay = (self.seed / 3 % 3) as u32;
        let size = ByteSize(u64::from(frames) * PAGE_SIZE as u64);
        let store = Sim::open(SimUrl { seed: !self.seed, size, delay, ..SimUrl::default() });
        let mode = MODES[(self.seed / 4 % 3) as usize];
        let config = Config { lanes: CLIENTS, depth, mode, stream_pages: 0, ..Config::default() };
        let home = Arc::clone(&self.disk) as _;
        let cache = Cache::create(Arc::new(store.expect("memory")), home, config).expect("a cache");
        let client = || Client {
            requests: Requests::new(weir_device::PageDevice::open(&cache).expect("a lane"), IDS),
            buffers: Buffers::new(),
            begun: vec![None; usize::from(IDS)],
            sent: vec![None; usize::from(IDS)],
            is_left: false,
            sleeps: 0,
        };
        self.clients = (0..CLIENTS).map(|_| client()).collect();
        self.write_back = Some(WriteBack::open(&cache).expect("a lane"));
    }

    fn turn(&mut self) {
        self.time += 1;
        self.now += Duration::from_millis(1);
        let at = self.chance.below(CLIENTS as u64) as usize;
        match self.chance.below(10) {
            0..4 => self.begin(at),
            4 if self.chance.below(40) == 0 => self.leave(at),
            4..8 => self.go_on(at),
            _ => {
                let write_back = self.write_back.as_mut().expect("it is there");
                (0..4).for_each(|_| {
                    let _ = write_back.step(self.now);
                });
            }
        }
    }

    /// A client begins a request. What has no answer yet comes first.
    fn begin(&mut self, at: usize) {
        let begun = &self.clients[at].begun;
        let Some(id) = begun.iter().position(Option::is_none) else { return };
        if self.clients[at].is_left || begun.contains(&Some(0)) {
            return;
        }
        if let Some(Again { request, value }) = self.again.pop() {
            self.counts.again += 1;
            return self.send(at, id, request, value);
        }
        // Half of all requests use an eighth of the disk.
        let below = if self.chance.below(2) == 0 { SECTORS / 8 } else { SECTORS };
        let first = self.chance.below(below.into()) as u32;
        let count = 1 + self.chance.below(LONGEST.min(SECTORS - first).into()) as u32;
        let (op, fua) = match self.chance.below(40) {
            0 => (Op::Flush, false),
            1..14 => (Op::Read, false),
            _ => (Op::Write, self.chance.below(12) == 0),
        };
        let span = match op {
            Op::Flush => Span { offset: 0, length: 0 },
            _ => Span { offset: u64::from(first) * SECTOR as u64, length: u64::from(count) * SECTOR as u64 },
        };
        if op == Op::Write {
            let sectors = &mut self.sectors[first as usize..(first + count) as usize];
            if sectors.iter().any(|sector| sector.history.is_written) {
                return;
            }
            self.counts.writes += 1;
            self.value += 1;
            let value = self.value;
            sectors.iter_mut().for_each(|sector| sector.history.begin(value));
        }
        self.send(at, id, Request { op, span, fua }, self.value);
    }

    fn send(&mut self, at: usize, id: usize, request: Request, value: u64) {
        if request.op == Op::Write {
            let length = request.span.length as usize;
            self.clients[at].buffers.data[id] = value.to_ne_bytes().repeat(length / 8);
        }
        let Client { requests, buffers, begun, sent, .. } = &mut self.clients[at];
        begun[id] = Some(self.time);
        requests.begin(id as Id, request, buffers);
        sent[id] = Some(Again { request, value });
        if self.chance.below(2) == 0 {
            requests.submit();
        }
        self.hear(at);
    }

    /// A client leaves its connection. The server notices it later, and gives up what is under way
    /// there. It takes the next client once that has ended.
    fn leave(&mut self, at: usize) {
        self.counts.left += 1;
        let client = &mut self.clients[at];
        for (begun, sent) in client.begun.iter_mut().zip(&client.sent) {
            if begun.is_some_and(|since| since > 0) {
                *begun = Some(0);
                self.again.extend(*sent);
            }
        }
        client.is_left = true;
        client.sleeps = self.chance.below(200) as u32;
    }

    fn go_on(&mut self, at: usize) {
        let Client { requests, buffers, is_left, sleeps, .. } = &mut self.clients[at];
        if *sleeps > 0 {
            *sleeps -= 1;
            return;
        }
        if std::mem::take(is_left) {
            requests.forsake(|_| true);
        }
        requests.submit();
        requests.turn(self.now, buffers);
        self.hear(at);
    }

    /// A client takes its answers.
    fn hear(&mut self, at: usize) {
        while let Some(answer) = self.clients[at].requests.finished() {
            let (id, Request { op, span, fua }) = (usize::from(answer.id), answer.request);
            let since = self.clients[at].begun[id].take().expect("each request is answered once");
            if since == 0 {
                continue;
            }
            let first = (span.offset / SECTOR as u64) as usize;
            let range = first..first + (span.length / SECTOR as u64) as usize;
            if let Err(fault) = answer.result {
                assert!(Self::fails(self.seed), "{op:?} failed, and no store fails: {fault}");
                self.counts.errors += 1;
            }
            let is_ok = answer.result.is_ok();
            match op {
                Op::Flush if is_ok => {
                    self.counts.flushes += 1;
                    self.sectors.iter_mut().for_each(|it| it.safe = it.safe.max(it.history.oldest(since)));
                }
                Op::Read if is_ok => {
                    let bytes = self.clients[at].buffers.read[id].as_flattened();
                    let bytes = &bytes[span.offset as usize % PAGE_SIZE..][..span.length as usize];
                    for (number, bytes) in range.zip(bytes.chunks_exact(SECTOR)) {
                        let (history, found) = (&self.sectors[number].history, value(bytes));
                        let is_right = history.allows(found, history.oldest(since));
                        assert!(is_right, "sector {number} is read as {found}");
                    }
                }
                Op::Write => {
                    self.counts.fua += u64::from(fua && is_ok);
                    for sector in &mut self.sectors[range] {
                        let last = sector.history.writes.len() - 1;
                        sector.history.end(last, is_ok.then_some(self.time));
                        if fua && is_ok {
                            sector.safe = last;
                        }
                    }
                }
                _ => {}
            }
        }
    }

    /// Cuts the power. Only the disk is left, with any of the contents since its last flush.
    fn cut_power(&mut self) {
        self.counts.cuts += 1;
        self.clients.clear();
        self.again.clear();
        self.write_back = None;
        let chance = &mut self.chance;
        self.disk.cut_power(&mut |contents| chance.below(contents as u64) as usize);
        let disk = Arc::clone(&self.disk);
        let mut lane = disk.lane(1).expect("a lane");
        for page in 0..HOME {
            let bytes = loop {
                let mut found = None;
                let queued = lane.read(0, Slot(page), &mut [0; PAGE_SIZE]);
                assert_eq!(queued, Progress::Queued);
                lane.submit();
                while lane.in_flight() > 0 {
                    lane.poll(self.now, &mut |done| found = done.page.copied());
                }
                // Errors are injected here too.
                if let Some(found) = found {
                    break found;
                }
            };
            let first = page as usize * PAGE_SIZE / SECTOR;
            for (sector, bytes) in self.sectors[first..].iter_mut().zip(bytes.chunks_exact(SECTOR)) {
                let found = value(bytes);
                let is_right = sector.history.allows(found, sector.safe);
                assert!(is_right, "a sector of page {page} has {found}: a write that was safe is lost");
                let newest = sector.history.writes.last().map(|write| write.value);
                self.counts.lost += u64::from(newest != Some(found));
                *sector = Sector::of(found);
            }
        }
        self.start();
    }

    fn play(seed: u64) -> Counts {
        let _ending = Ending(seed);
        let mut world = World::new(seed);
        for _ in 0..4 {
            (0..200 + world.chance.below(800)).for_each(|_| world.turn());
            world.cut_power();
        }
        world.counts
    }
}

/// Names the seed of a history that fails. Seeds count from 0.
struct Ending(u64);

impl Drop for Ending {
    fn drop(&mut self) {
        if std::thread::panicking() {
            eprintln!("seed {} failed: history {} failed", self.0, self.0 + 1);
        }
    }
}

fn number(name: &str) -> Option<u64> {
    std::env::var(name).ok().map(|text| text.parse().expect("a number"))
}

#[test]
fn what_was_flushed_or_written_with_fua_is_there_after_a_power_cut() {
    let full = std::env::var_os("WEIR_SCALE").is_some_and(|scale| scale == "full");
    let seeds = number("WEIR_SIMULATOR_SEEDS").unwrap_or(if full { 10_000 } else { 60 });
    let seeds = number("WEIR_SIMULATOR_SEED").map_or(0..seeds, |seed| seed..seed + 1);
    let alone = seeds.end - seeds.start == 1;
    let mut all = Counts::default();
    for seed in seeds {
        let counts = World::play(seed);
        all.writes += counts.writes;
        all.flushes += counts.flushes;
        all.fua += counts.fua;
        all.cuts += counts.cuts;
        all.left += counts.left;
        all.again += counts.again;
        all.lost += counts.lost;
        all.errors += counts.errors;
    }
    println!("{all:?}");
    let Counts { writes, flushes, fua, cuts, left, again, lost, errors } = all;
    for (what, count) in [
        ("writes", writes),
        ("flushes", flushes),
        ("fua", fua),
        ("power_cuts", cuts),
        ("connections_left", left),
        ("sent_again", again),
        ("unflushed_lost", lost),
    ] {
        println!("figure: {what} count {count} higher 1");
        assert!(alone || count > 0, "the histories have none of the {what}");
    }
    assert!(alone || errors > 0, "no store failed");
    println!("figure: flushed sectors_lost 0 lower 0");
}

#[test]
fn a_seed_is_a_history() {
    for seed in 0..4 {
        assert_eq!(World::play(seed), World::play(seed), "seed {seed} went another way");
    }
}

/// The fault of a flush that fails reaches the client.
#[test]
fn a_flush_that_the_disk_fails_is_no_success() {
    let mut world = World::new(0);
    world.disk.fail_flushes(true);
    let Client { requests, buffers, .. } = &mut world.clients[0];
    requests.begin(0, Request { op: Op::Flush, span: Span { offset: 0, length: 0 }, fua: false }, buffers);
    requests.submit();
    let mut answer = None;
    for _ in 0..10_000 {
        world.now += Duration::from_millis(1);
        let Client { requests, buffers, .. } = &mut world.clients[0];
        requests.turn(world.now, buffers);
        let _ = world.write_back.as_mut().expect("it is there").step(world.now);
        answer = requests.finished();
        if answer.is_some() {
            break;
        }
    }
    let result = answer.expect("an answer").result;
    assert!(matches!(result, Err(Fault::Io(_))), "{result:?}");
}
