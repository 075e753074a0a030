//! Lanes and a mover that act in the middle of each other's operations, from a seed.
//!
//! The simulator beside this one plays whole operations one after another. Here others also run
//! where a lane hands a completion over, between the pages of a pack that it publishes, and within
//! a claim, between the look at a slot's record and the exchange that claims it. No store fails
//! here, so every read is right: it gives a write that none which began after its end ended before
//! the read began. The lanes use two volumes of one pool, and a page's number here is the pool's.
//!
//! `WEIR_SIMULATOR_SEED=17` plays one seed, `WEIR_SIMULATOR_SEEDS=1000` so many from 0 on. It needs
//! debug assertions, by which the volume lets others run within a claim.
#![cfg(debug_assertions)]

#[path = "simulator/chance.rs"]
mod chance;

use chance::Chance;
use std::cell::{Cell, RefCell};
use std::ops::Range;
use std::rc::Rc;
use std::sync::Arc;
use std::time::{Duration, Instant};
use weir_core::{ByteSize, PAGE_SIZE, PageBytes, PageNo};
use weir_store::{Fault, Progress, Sim, SimUrl, Store};
use weir_volume::{
    ChunkState, Compression, Config, GiveBackError, Lane, Mover, Pool, Sparse, Step, Task, Volume,
    run_within_claims,
};

/// Slots of a chunk: an extent of the volume's records, the least that can be given back.
const CHUNK_SLOTS: u32 = 1024;
/// Operations within operations.
const NESTED_MOST: u32 = 3;

/// A write of a page: when it began and when it ended, in events.
#[derive(Clone, Copy)]
struct Write {
    serial: u32,
    began: u64,
    ended: Option<u64>,
}

/// The operation under a ticket.
#[derive(Clone, Copy)]
enum Pending {
    Read { page: u32, began: u64 },
    Write { page: u32, serial: u32 },
}

struct Client {
    lane: Lane,
    /// The pages of the lane's volume, if those of all are counted one after the other.
    pages: Range<u32>,
    pending: Vec<Option<Pending>>,
}

struct Worker {
    mover: Mover,
    task: Option<Task>,
    away: Vec<(usize, u32)>,
}

#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
struct Tally {
    reads: u64,
    writes: u64,
    within_claims: u64,
    within_polls: u64,
    given_back: u64,
    taken: u64,
    compacted: u64,
    moved_up: u64,
}

struct World {
    config: Config,
    pool: Arc<Pool>,
    clients: Vec<RefCell<Client>>,
    worker: RefCell<Worker>,
    /// By page; its first is that of the beginning, of zeros.
    writes: RefCell<Vec<Vec<Write>>>,
    chance: RefCell<Chance>,
    events: Cell<u64>,
    begun: Instant,
    now: Cell<Duration>,
    depth: Cell<u32>,
    compresses: bool,
    tally: Cell<Tally>,
}

thread_local! {
    static WORLD: RefCell<Option<Rc<World>>> = const { RefCell::new(None) };
}

/// Others act within a claim.
fn within_claim() {
    let world = WORLD.with_borrow(Clone::clone);
    if let Some(world) = world.filter(|world| world.is_interrupted(16)) {
        world.count(|tally| tally.within_claims += 1);
        world.others();
    }
}

/// A page whose first word is its number, and whose second says which write it is; half of each
/// 16 compress.
fn content(page: u32, serial: u32, compresses: bool) -> PageBytes {
    let mut bytes = [0; PAGE_SIZE];
    let noise = if compresses && serial % 16 < 12 { 64 } else { PAGE_SIZE };
    let mut chance = Chance::new(u64::from(serial) << 32 | u64::from(page));
    bytes[..noise].chunks_exact_mut(8).for_each(|word| word.copy_from_slice(&chance.bits().to_le_bytes()));
    bytes[..4].copy_from_slice(&page.to_le_bytes());
    bytes[4..8].copy_from_slice(&serial.to_le_bytes());
    bytes
}

impl World {
    fn begin(seed: u64) -> Rc<World> {
        let mut chance = Chance::new(seed);
        let config = Config {
            pages: chance.within(4, 40),
            lanes: chance.within(3, 6) as usize,
            depth: chance.within(2, 17) as usize,
        };
        let size = ByteSize(u64::from(2 * CHUNK_SLOTS) * PAGE_SIZE as u64);
        let stores = (0..chance.within(1, 3)).map(|_| {
            let url = SimUrl {
                seed: chance.bits(),
                size,
                chunk: Some(ByteSize(u64::from(CHUNK_SLOTS) * PAGE_SIZE as u64)),
                delay: chance.pick(&[0, 1, 3, 20]),
                ..SimUrl::default()
            };
            Arc::new(Sim::open(url).expect("memory")) as Arc<dyn Store>
        });
        let pool = Pool::create(config, stores.collect()).expect("stores that are large enough");
        let compresses = chance.one_in(2);
        if compresses {
            pool.compress(chance.pick(&[Compression::Lz4, Compression::Zstd]));
        }
        // This number comes from another stream: the histories of old seeds change less.
        let first = Chance::new(!seed).within(1, config.pages);
        let volumes = [0..first, first..config.pages]
            .map(|pages| (pool.volume(pages.len() as u32).expect("free pages"), pages));
        let client = |(volume, pages): &(Arc<Volume>, Range<u32>)| {
            let lane = volume.lane().expect("a seat");
            RefCell::new(Client { lane, pages: pages.clone(), pending: Vec::new() })
        };
        let clients = volumes.iter().cycle().take(config.lanes - 1).map(client).collect();
        let mover = pool.mover().expect("a seat");
        let first = Write { serial: 0, began: 0, ended: Some(0) };
        Rc::new(World {
            config,
            clients,
            worker: RefCell::new(Worker { mover, task: None, away: Vec::new() }),
            pool,
            writes: RefCell::new(vec![vec![first]; config.pages as usize]),
            chance: RefCell::new(chance),
            events: Cell::new(0),
            begun: Instant::now(),
            now: Cell::default(),
            depth: Cell::new(0),
            compresses,
            tally: Cell::default(),
        })
    }

    fn play(seed: u64) -> Tally {
        let world = World::begin(seed);
        let ending = Ending(seed);
        WORLD.set(Some(Rc::clone(&world)));
        run_within_claims(Some(within_claim));
        for _ in 0..world.within(200, 1200) {
            world.act();
        }
        run_within_claims(None);
        world.end();
        drop(ending);
        WORLD.set(None);
        world.tally.get()
    }

    fn within(&self, from: u32, to: u32) -> u32 {
        self.chance.borrow_mut().within(from, to)
    }

    fn one_in(&self, times: u32) -> bool {
        self.within(0, times) == 0
    }

    fn count(&self, count: impl FnOnce(&mut Tally)) {
        let mut tally = self.tally.get();
        count(&mut tally);
        self.tally.set(tally);
    }

    fn event(&self) -> u64 {
        self.events.set(self.events.get() + 1);
        self.events.get()
    }

    fn time(&self) -> Instant {
        self.now.set(self.now.get() + Duration::from_micros(10));
        self.begun + self.now.get()
    }

    fn is_interrupted(&self, once_in: u32) -> bool {
        self.depth.get() < NESTED_MOST && self.one_in(once_in)
    }

    /// Others act in the middle of somebody's operation: mostly a few, now and then many.
    fn others(&self) {
        self.depth.set(self.depth.get() + 1);
        let most = if self.one_in(4) { 60 } else { 6 };
        (0..self.within(1, most)).for_each(|_| self.act());
        self.depth.set(self.depth.get() - 1);
    }

    fn act(&self) {
        let at = self.within(0, self.config.lanes as u32) as usize;
        match self.clients.get(at) {
            None => {
                if let Ok(mut worker) = self.worker.try_borrow_mut() {
                    self.work(&mut worker);
                }
            }
            // One that is in the middle of something is not asked.
            Some(client) => {
                if let Ok(mut client) = client.try_borrow_mut() {
                    self.use_lane(&mut client);
                }
            }
        }
    }

    fn use_lane(&self, client: &mut Client) {
        // Half of all operations meet on a few pages.
        let page = self.within(0, self.config.pages);
        let page = if self.one_in(2) { page % 4 } else { page };
        let page = client.pages.start + page % client.pages.len() as u32;
        match self.within(0, 20) {
            0..7 => self.write(client, page),
            7..12 => self.read(client, page),
            12..16 => client.lane.submit(),
            16..19 => self.poll(client),
            _ => self.rest(client),
        }
    }

    fn ticket(client: &mut Client) -> usize {
        client.pending.iter().position(Option::is_none).unwrap_or_else(|| {
            client.pending.push(None);
            client.pending.len() - 1
        })
    }

    fn write(&self, client: &mut Client, page: u32) {
        self.count(|tally| tally.writes += 1);
        let began = self.event();
        let bytes = {
            let mut writes = self.writes.borrow_mut();
            let writes = &mut writes[page as usize];
            let serial = writes.last().map_or(0, |write| write.serial) + 1;
            writes.push(Write { serial, began, ended: None });
            content(page, serial, self.compresses)
        };
        let serial = u32::from_le_bytes(bytes[4..8].try_into().expect("4 bytes"));
        let ticket = Self::ticket(client);
        match client.lane.write(ticket as u32, PageNo(page - client.pages.start), &bytes) {
            Progress::Done(result) => self.end_write(page, serial, result),
            Progress::Queued => client.pending[ticket] = Some(Pending::Write { page, serial }),
            // Nothing has begun, and nobody tries again.
            Progress::Full => {
                self.end_write(page, serial, Err(Fault::Full));
                client.lane.submit();
                self.poll(client);
            }
        }
    }

    fn end_write(&self, page: u32, serial: u32, result: Result<(), Fault>) {
        let ended = self.event();
        let mut writes = self.writes.borrow_mut();
        let writes = &mut writes[page as usize];
        let at = writes.iter().position(|write| write.serial == serial).expect("a write that began");
        match result {
            Ok(()) => writes[at].ended = Some(ended),
            Err(Fault::Full) => {
                // Its number stays taken, in the last.
                let is_last = at + 1 == writes.len();
                if !is_last {
                    writes.remove(at);
                } else {
                    writes[at].began = u64::MAX;
                }
            }
            Err(fault) => panic!("a write of page {page} failed, and no store fails: {fault}"),
        }
    }

    fn read(&self, client: &mut Client, page: u32) {
        self.count(|tally| tally.reads += 1);
        let began = self.event();
        let ticket = Self::ticket(client);
        let mut out = [0x5a; PAGE_SIZE];
        match client.lane.read(ticket as u32, PageNo(page - client.pages.start), &mut out) {
            Progress::Done(Ok(())) => self.check(page, began, &out),
            Progress::Done(Err(fault)) => panic!("page {page} cannot be read, and no store fails: {fault}"),
            Progress::Queued => client.pending[ticket] = Some(Pending::Read { page, began }),
            Progress::Full => {
                client.lane.submit();
                self.poll(client);
            }
        }
    }

    /// A read that began then gave this.
    fn check(&self, page: u32, began: u64, found: &PageBytes) {
        let number = |at: usize| u32::from_le_bytes(found[at..at + 4].try_into().expect("4 bytes"));
        let (of, serial) = (number(0), number(4));
        let writes = self.writes.borrow();
        let writes = &writes[page as usize];
        let expected = if serial == 0 { [0; PAGE_SIZE] } else { content(page, serial, self.compresses) };
        assert!(*found == expected, "page {page} reads as write {serial} of page {of}, or a torn one");
        let write = writes.iter().find(|write| write.serial == serial && write.began != u64::MAX);
        let write = write.unwrap_or_else(|| panic!("page {page} reads as write {serial}, which was refused"));
        let newer = |it: &&Write| {
            it.ended.is_some_and(|it| it < began) && write.ended.is_some_and(|ended| ended < it.began)
        };
        if let Some(newer) = writes.iter().find(newer) {
            panic!("page {page} reads as write {serial}, older than {}", newer.serial);
        }
    }

    fn poll(&self, client: &mut Client) {
        let now = self.time();
        let Client { lane, pending, .. } = client;
        lane.poll(now, &mut |done| {
            let ended = pending[done.ticket as usize].take().expect("a ticket that is in flight");
            match (ended, done.result) {
                (Pending::Read { page, began }, Ok(())) => {
                    self.check(page, began, done.page.expect("a read has a page"));
                }
                (Pending::Read { page, .. }, Err(fault)) => {
                    panic!("page {page} cannot be read, and no store fails: {fault}")
                }
                (Pending::Write { page, serial }, result) => self.end_write(page, serial, result),
            }
            if self.is_interrupted(4) {
                self.count(|tally| tally.within_polls += 1);
                self.others();
            }
        });
    }

    fn rest(&self, client: &mut Client) {
        for polls in 0.. {
            client.lane.submit();
            if client.lane.in_flight() == 0 {
                return;
            }
            assert!(polls < 10_000, "a lane hangs");
            self.poll(client);
        }
    }

    fn work(&self, worker: &mut Worker) {
        if worker.task.is_none() && !self.begin_task(worker) {
            return;
        }
        for _ in 0..self.within(1, 8) {
            let Some(task) = worker.task else { return };
            match worker.mover.step(self.time()) {
                Step::More { .. } => {}
                Step::Waits(..) => return,
                Step::Ended(result) => {
                    worker.task = None;
                    self.end_task(worker, task, result.map(|moved| moved.pages));
                }
            }
        }
    }

    fn begin_task(&self, worker: &mut Worker) -> bool {
        let stores = self.pool.stores().count() as u32;
        let (store, chunk) = (self.within(0, stores) as usize, self.within(0, 2));
        let task = match self.within(0, 4) {
            0 | 1 if worker.away.len() < 2 => {
                if self.pool.begin_give_back(store, &[chunk]).is_err() {
                    return false;
                }
                Task::GiveBack { store, chunk }
            }
            2 if self.compresses => Task::Compact { store, next: 0, sparse: Sparse::up_to(16) },
            _ => {
                if let Some((store, chunk)) = worker.away.pop() {
                    worker.mover.take(store, chunk).expect("a simulated store has memory");
                    self.count(|tally| tally.taken += 1);
                }
                Task::MoveUp { from: store, next: 0 }
            }
        };
        worker.mover.begin(task).expect("there is such a chunk");
        worker.task = Some(task);
        true
    }

    fn end_task(&self, worker: &mut Worker, task: Task, result: Result<u32, GiveBackError>) {
        match (task, result) {
            (Task::GiveBack { store, chunk }, Ok(_)) => {
                worker.away.push((store, chunk));
                self.count(|tally| tally.given_back += 1);
                let state = self.pool.chunks(store).nth(chunk as usize).map(|chunk| chunk.state);
                assert_eq!(state, Some(ChunkState::GivenBack));
            }
            (Task::Compact { .. }, Ok(pages)) => self.count(|tally| tally.compacted += u64::from(pages)),
            (_, Ok(pages)) => self.count(|tally| tally.moved_up += u64::from(pages)),
            (_, Err(GiveBackError::Pages(failed))) => {
                assert!(failed.iter().all(|(_, fault)| *fault == Fault::Full), "no store fails: {failed:?}");
            }
            (task, Err(error)) => panic!("{task:?}: {error}"),
        }
    }

    /// Everybody ends what they are at, and every page is read once more.
    fn end(&self) {
        // Nobody begins anything new in the middle of that.
        self.depth.set(NESTED_MOST);
        let rest = || self.clients.iter().for_each(|client| self.rest(&mut client.borrow_mut()));
        let mut worker = self.worker.borrow_mut();
        for _ in 0..10_000 {
            rest();
            if worker.task.is_none() {
                break;
            }
            self.work(&mut worker);
        }
        for page in 0..self.config.pages {
            let reader = self.clients.iter().find(|client| client.borrow().pages.contains(&page));
            self.read(&mut reader.expect("a client of each volume").borrow_mut(), page);
            rest();
        }
        let status = self.pool.status();
        let used: u64 = status.stores.iter().map(|store| u64::from(store.used)).sum();
        assert_eq!(
            used,
            status.stored - status.packed + status.packs,
            "slots hold pages, or packs: {status:?}"
        );
        assert!(status.packs <= status.packed, "no pack is left empty");
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

#[test]
fn every_read_is_right_whoever_acts_in_the_middle_of_an_operation() {
    let number = |name: &str| std::env::var(name).ok().map(|text| text.parse::<u64>().expect("a number"));
    if let Some(seed) = number("WEIR_SIMULATOR_SEED") {
        println!("{:#?}", World::play(seed));
        return;
    }
    let mut total = Tally::default();
    for seed in 0..number("WEIR_SIMULATOR_SEEDS").unwrap_or(200) {
        let tally = World::play(seed);
        total.reads += tally.reads;
        total.writes += tally.writes;
        total.within_claims += tally.within_claims;
        total.within_polls += tally.within_polls;
        total.given_back += tally.given_back;
        total.taken += tally.taken;
        total.compacted += tally.compacted;
        total.moved_up += tally.moved_up;
    }
    println!("{total:#?}");
    let Tally { within_claims, within_polls, given_back, taken, compacted, moved_up, .. } = total;
    let events = [within_claims, within_polls, given_back, taken, compacted, moved_up];
    assert!(events.iter().all(|&count| count > 0), "something never happened: {total:?}");
}

#[test]
fn a_seed_is_one_history() {
    for seed in 0..5 {
        assert_eq!(World::play(seed), World::play(seed), "seed {seed} went another way");
    }
}
