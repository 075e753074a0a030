//! One history: clients, servers, movers and stores on one clock.

use super::books::{Books, CallId, PAGE_SECTORS, SECTOR, fill};
use super::disk::Disk;
use super::draws::{Draws, Lists};
use std::cell::{Cell, RefCell, RefMut};
use std::ops::Range;
use std::os::fd::BorrowedFd;
use std::panic::{AssertUnwindSafe, catch_unwind, resume_unwind};
use std::rc::Rc;
use std::sync::Arc;
use std::time::{Duration, Instant};
use weir_core::{ByteSize, Memory, PAGE_SIZE, PageBytes, PageNo};
use weir_device::{ANSWER_WITHIN, Fault, POLL_EVERY};
use weir_request::{Id, Op, Request, RequestMemory, Requests, Span};
use weir_store::{SimUrl, State, Store};
use weir_volume::{
    ChunkState, Compression, Config, GiveBackError, Kept, Lane, Mover, Pool, Sparse, Step, Task, Volume,
    run_within_claims, run_within_publications,
};

/// Slots of a chunk: the least that can be given back.
const CHUNK_SLOTS: u32 = 1024;
/// Operations within operations.
const NESTED_MOST: u32 = 3;
/// Requests that a connection may have under way.
const IDS: u16 = 5;
/// Most pages of a request, and of most requests. A long one may take slots side by side.
const LONGEST: u32 = 24;
const SHORT: u32 = 6;
/// The time after which a client gives a connection up, as the kernel does.
const GIVES_UP: Duration = Duration::from_secs(5);
/// A server has answered each request within this time, if it gets to run. A request may wait for
/// a slot, then for a read, then for another slot, and then for a write.
const ANSWERED: Duration = ANSWER_WITHIN.saturating_mul(5);
/// The time after which a server has ended what it has given up, if it gets to run. It waits for
/// what the stores have under way, and for nothing else.
const FORSAKEN: Duration = ANSWER_WITHIN;

/// The payload of a panic that stands for the daemon's death.
struct Death;

/// The memory of a connection's requests.
struct Buffers {
    data: Vec<Vec<u8>>,
    read: Vec<Vec<PageBytes>>,
}

impl RequestMemory for Buffers {
    fn fetch(&mut self, _id: Id, _at: u32) {
        others_may_act(24);
    }
    fn data(&self, id: Id) -> &[u8] {
        &self.data[usize::from(id)]
    }
    fn pages(&mut self, id: Id, at: u32) -> &mut [PageBytes] {
        &mut self.read[usize::from(id)][at as usize..]
    }
    fn filled(&mut self, _id: Id, _at: u32, _count: u32) {
        others_may_act(8);
    }
}

/// A request at a server.
#[derive(Clone, Copy)]
struct Sent {
    call: CallId,
    /// The time by events, and by the clock.
    event: u64,
    time: Duration,
    /// The time by which all of its bytes had come, or the server gave it up.
    since: Duration,
    /// Whether its client waits for it no more.
    left: bool,
    /// Whether the server has given it up.
    forsaken: bool,
}

/// A connection of a client.
struct Connection {
    client: usize,
    sent: Vec<Cell<Option<Sent>>>,
    /// Whether its client has left.
    is_left: Cell<bool>,
    /// Whether its client may leave though the server's thread is in the middle of a turn.
    may_leave: Cell<bool>,
    server: RefCell<Server>,
}

/// The server's thread for a connection.
struct Server {
    requests: Option<Requests<Lane>>,
    buffers: Buffers,
    /// A write whose bytes are still to come, and how many have come.
    open: Option<(Id, usize)>,
    /// The thread does not get to run for so many of its turns.
    sleeps: u32,
}

impl Connection {
    /// The requests under way.
    fn under_way(&self) -> impl Iterator<Item = Sent> {
        self.sent.iter().filter_map(Cell::get)
    }

    /// The number of requests under way, whether a thread serves them, and whether the client is
    /// there.
    fn state(&self) -> (usize, bool, bool) {
        (self.under_way().count(), self.server.borrow().requests.is_some(), !self.is_left.get())
    }
}

struct Worker {
    mover: Option<Mover>,
    task: Option<Task>,
    away: Vec<(usize, u32)>,
}

/// The counts of what has happened, for the determinism test and for the eye.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Tally {
    pub reads: u64,
    pub writes: u64,
    pub pieces: u64,
    pub zeros: u64,
    pub errors: u64,
    pub within: u64,
    pub left: u64,
    pub left_within: u64,
    pub resent: u64,
    pub dropped: u64,
    pub stalls: u64,
    pub deaths: u64,
    pub deaths_within: u64,
    pub orphans: u64,
    pub lost_stores: u64,
    pub given_back: u64,
    pub taken: u64,
    pub compacted: u64,
    pub moved_up: u64,
    pub events: u64,
}

impl Tally {
    pub fn events(&self) -> [(&'static str, u64); 20] {
        [
            ("reads", self.reads),
            ("writes", self.writes),
            ("pieces", self.pieces),
            ("zeros", self.zeros),
            ("errors", self.errors),
            ("within", self.within),
            ("left", self.left),
            ("left_within", self.left_within),
            ("resent", self.resent),
            ("dropped", self.dropped),
            ("stalls", self.stalls),
            ("deaths", self.deaths),
            ("deaths_within", self.deaths_within),
            ("orphans", self.orphans),
            ("lost_stores", self.lost_stores),
            ("given_back", self.given_back),
            ("taken", self.taken),
            ("compacted", self.compacted),
            ("moved_up", self.moved_up),
            ("events", self.events),
        ]
    }

    pub fn add(&mut self, other: &Tally) {
        self.reads += other.reads;
        self.writes += other.writes;
        self.pieces += other.pieces;
        self.zeros += other.zeros;
        self.errors += other.errors;
        self.within += other.within;
        self.left += other.left;
        self.left_within += other.left_within;
        self.resent += other.resent;
        self.dropped += other.dropped;
        self.stalls += other.stalls;
        self.deaths += other.deaths;
        self.deaths_within += other.deaths_within;
        self.orphans += other.orphans;
        self.lost_stores += other.lost_stores;
        self.given_back += other.given_back;
        self.taken += other.taken;
        self.compacted += other.compacted;
        self.moved_up += other.moved_up;
        self.events += other.events;
    }
}

/// How the stores of a history fail.
#[derive(Clone, Copy)]
struct Faults {
    errors: bool,
    damage: bool,
    lost: bool,
    /// The last time at which a store stalled.
    stalled: Option<Duration>,
    /// The last time at which the quarantine was so full that no lane might write.
    crowded: Option<Duration>,
}

pub struct World {
    config: Config,
    disks: Vec<Arc<Disk>>,
    has_chunks: bool,
    compresses: bool,
    /// Whether threads end with their connections, and do not wait for what is under way.
    drops_lanes: bool,
    /// Whether daemons die one after another, while no write of a dead one arrives.
    has_storm: bool,
    pool: RefCell<Option<Arc<Pool>>>,
    volumes: RefCell<Vec<Arc<Volume>>>,
    /// The pages of each volume, if those of all are counted one after the other.
    ranges: Vec<Range<u32>>,
    connections: Vec<Connection>,
    worker: RefCell<Worker>,
    books: RefCell<Books>,
    draws: RefCell<Draws>,
    faults: Cell<Faults>,
    /// The daemons that have died since every write of a dead one had arrived.
    unanswered: Cell<u32>,
    begun: Instant,
    now: Cell<Duration>,
    depth: Cell<u32>,
    tally: Cell<Tally>,
}

thread_local! {
    static WORLD: RefCell<Option<Rc<World>>> = const { RefCell::new(None) };
}

thread_local! {
    /// The numbers of the last history that failed.
    pub static FAILED: RefCell<Lists> = const { RefCell::new(Vec::new()) };
}

/// A place within a call where other actors may act, once in so many times.
pub fn others_may_act(once_in: u32) {
    let world = WORLD.with_borrow(Clone::clone);
    if let Some(world) = world.filter(|world| world.depth.get() < NESTED_MOST && world.one_in(once_in)) {
        world.count(|tally| tally.within += 1);
        world.depth.set(world.depth.get() + 1);
        let most = if world.one_in(8) { 80 } else { 6 };
        (0..world.within(1, most)).for_each(|_| world.act());
        if world.one_in(400) {
            world.count(|tally| tally.deaths_within += 1);
            resume_unwind(Box::new(Death));
        }
        world.depth.set(world.depth.get() - 1);
    }
}

impl World {
    fn begin(mut draws: Draws) -> Rc<World> {
        let mut within = |from: u32, to: u32| from + draws.below(to - from);
        let connections = within(2, 7) as usize;
        let clients = within(1, 4).min(connections as u32) as usize;
        let config = Config { pages: within(4, 40), lanes: connections + 1, depth: within(2, 40) as usize };
        let (has_chunks, count) = (within(0, 3) == 2, within(1, 4));
        let errors = if within(0, 4) == 3 { 0.005 } else { 0.0 };
        let (corrupt, lose) = if within(0, 6) == 5 { (0.003, 0.003) } else { (0.0, 0.0) };
        let tight = config.slots().div_ceil(count);
        let slots = if has_chunks { 2 * CHUNK_SLOTS } else { tight + within(0, 2) * within(1, 200) };
        let has_storm = within(0, 8) == 7;
        let disk = |_| {
            Arc::new(Disk::open(SimUrl {
                seed: u64::from(within(0, 1 << 20)),
                size: ByteSize(u64::from(slots) * PAGE_SIZE as u64),
                chunk: has_chunks.then_some(ByteSize(u64::from(CHUNK_SLOTS) * PAGE_SIZE as u64)),
                read_error: errors,
                write_error: errors,
                corrupt,
                lose,
                delay: [0, 1, 3, 3, 7][if has_storm { 4 } else { within(0, 5) as usize }],
                ..SimUrl::default()
            }))
        };
        let disks: Vec<_> = (0..count).map(disk).collect();
        let (compresses, drops_lanes) = (within(0, 2) == 1, within(0, 2) == 1);
        let first = if within(0, 2) == 0 { config.pages } else { within(1, config.pages) };
        let ranges = [0..first, first..config.pages].into_iter().filter(|pages| !pages.is_empty()).collect();
        let connection = |at| Connection {
            client: at % clients,
            sent: vec![Cell::default(); usize::from(IDS)],
            is_left: Cell::default(),
            may_leave: Cell::default(),
            server: RefCell::new(Server {
                requests: None,
                buffers: Buffers {
                    data: vec![Vec::new(); usize::from(IDS)],
                    read: vec![vec![[0; PAGE_SIZE]; LONGEST as usize + 1]; usize::from(IDS)],
                },
                open: None,
                sleeps: 0,
            }),
        };
        let world = Rc::new(World {
            config,
            has_chunks,
            compresses,
            drops_lanes,
            has_storm,
            pool: RefCell::default(),
            volumes: RefCell::default(),
            connections: (0..connections).map(connection).collect(),
            worker: RefCell::new(Worker { mover: None, task: None, away: Vec::new() }),
            books: RefCell::new(Books::new(clients, config.pages)),
            draws: RefCell::new(draws),
            faults: Cell::new(Faults {
                errors: errors > 0.0,
                damage: corrupt > 0.0,
                lost: false,
                stalled: None,
                crowded: None,
            }),
            unanswered: Cell::default(),
            ranges,
            disks,
            begun: Instant::now(),
            now: Cell::default(),
            depth: Cell::new(NESTED_MOST),
            tally: Cell::default(),
        });
        let pool = Pool::create(config, world.stores()).expect("stores that are large enough");
        let volumes = world.ranges.iter().map(|pages| pool.volume(pages.len() as u32).expect("free pages"));
        let volumes = volumes.collect();
        world.start(pool, volumes);
        world
    }

    /// Plays the history of these numbers: so many events, or as long as there are numbers.
    pub fn play(draws: Draws, events: u64) -> Tally {
        let world = World::begin(draws);
        let _left = Leaving;
        WORLD.set(Some(Rc::clone(&world)));
        run_within_claims(Some(|| others_may_act(24)));
        run_within_publications(Some(|| others_may_act(6)));
        while world.tally.get().events < events {
            if !world.draws.borrow_mut().step() {
                break;
            }
            world.depth.set(0);
            match catch_unwind(AssertUnwindSafe(|| world.step())) {
                Ok(()) => {}
                Err(payload) if payload.is::<Death>() => world.take_over(),
                Err(payload) => {
                    world.tell();
                    resume_unwind(payload);
                }
            }
        }
        if let Err(payload) = catch_unwind(AssertUnwindSafe(|| world.end())) {
            world.tell();
            resume_unwind(payload);
        }
        world.tally.get()
    }

    /// Keeps the numbers of a history that failed.
    fn tell(&self) {
        FAILED.set(std::mem::take(&mut self.draws.borrow_mut().drawn));
    }

    fn within(&self, from: u32, to: u32) -> u32 {
        from + self.draws.borrow_mut().below(to - from)
    }

    fn one_in(&self, times: u32) -> bool {
        // 0 is the number that changes least.
        self.within(0, times) + 1 == times
    }

    fn count(&self, count: impl FnOnce(&mut Tally)) {
        let mut tally = self.tally.get();
        count(&mut tally);
        self.tally.set(tally);
    }

    fn books(&self) -> RefMut<'_, Books> {
        self.books.borrow_mut()
    }

    fn pass(&self, time: Duration) {
        self.now.set(self.now.get() + time);
    }

    fn time(&self) -> Instant {
        self.begun + self.now.get()
    }

    fn pool(&self) -> Arc<Pool> {
        Arc::clone(self.pool.borrow().as_ref().expect("a daemon"))
    }

    fn stores(&self) -> Vec<Arc<dyn Store>> {
        self.disks.iter().map(|disk| Arc::clone(disk) as Arc<dyn Store>).collect()
    }

    /// A daemon serves these volumes.
    fn start(&self, pool: Arc<Pool>, volumes: Vec<Arc<Volume>>) {
        if self.compresses {
            pool.compress([Compression::Lz4, Compression::Zstd][self.within(0, 2) as usize]);
        }
        for connection in &self.connections {
            let lane = volumes[self.volume_of(connection.client)].lane().expect("a seat");
            connection.is_left.set(false);
            let mut server = connection.server.borrow_mut();
            server.requests = Some(Requests::new(lane, IDS));
            (server.sleeps, server.open) = (0, None);
        }
        let mut worker = self.worker.borrow_mut();
        (worker.mover, worker.task) = (Some(pool.mover().expect("a seat")), None);
        *self.pool.borrow_mut() = Some(pool);
        *self.volumes.borrow_mut() = volumes;
    }

    /// One step of the history, at whose end nobody is in the middle of anything.
    fn step(&self) {
        match self.within(0, 1000) {
            900..998 if self.has_storm => {
                // As many writes as can be are under way when the daemon dies.
                let all = 0..self.connections.len();
                all.cycle().take(usize::from(IDS) * self.connections.len()).for_each(|at| self.ask(at));
                self.take_over();
            }
            0..970 => self.act(),
            970..980 => self.wait(),
            980..986 => self.stall(),
            986..990 => self.take_over(),
            990..998 => self.land(),
            _ => self.lose_a_store(),
        }
    }

    /// Some actor does something.
    fn act(&self) {
        self.count(|tally| tally.events += 1);
        self.pass(Duration::from_micros(20));
        self.disks.iter().for_each(|disk| disk.forget_looks());
        let at = self.within(0, 2 * self.connections.len() as u32 + 1) as usize;
        match self.connections.get(at / 2) {
            Some(_) if at.is_multiple_of(2) => self.ask(at / 2),
            Some(connection) => self.serve(connection, true),
            None => {
                if let Ok(mut worker) = self.worker.try_borrow_mut() {
                    self.work(&mut worker);
                }
            }
        }
    }

    /// A client looks after one of its connections: it leaves it, or sends something.
    fn ask(&self, at: usize) {
        let connection = &self.connections[at];
        if connection.is_left.get() {
            return;
        }
        let Ok(mut server) = connection.server.try_borrow_mut() else {
            if connection.may_leave.get() && self.one_in(8) {
                self.count(|tally| tally.left_within += 1);
                self.leave(connection);
            }
            return;
        };
        let late = |sent: Sent| self.now.get() - sent.time > GIVES_UP;
        if connection.under_way().any(late) || (!self.is_ending() && self.one_in(60)) {
            return self.leave(connection);
        }
        let idle = connection.sent.iter().position(|sent| sent.get().is_none());
        let (Some(id), None) = (idle, server.open) else { return };
        let again = self.books().again[connection.client].pop_front();
        let Some(call) = again.or_else(|| self.new_call(connection)) else { return };
        let Server { requests: Some(requests), buffers, open, .. } = &mut *server else { return };
        let event = self.books().send(call);
        connection.sent[id].set(Some(Sent {
            call,
            event,
            time: self.now.get(),
            since: self.now.get(),
            left: false,
            forsaken: false,
        }));
        let it = self.books().call(call).clone();
        if again.is_some() {
            self.count(|tally| tally.resent += 1);
        }
        if it.request.op == Op::Write {
            let mut data = vec![0; it.count * SECTOR];
            let sectors = data.chunks_exact_mut(SECTOR).zip(it.first..);
            sectors.for_each(|(bytes, sector)| fill(bytes, sector, it.number));
            buffers.data[id] = data;
        }
        if it.request.op == Op::Write && self.one_in(4) {
            self.count(|tally| tally.pieces += 1);
            requests.open(id as Id, it.request);
            *open = Some((id as Id, 0));
        } else {
            requests.begin(id as Id, it.request, buffers);
        }
        if self.one_in(2) {
            requests.submit();
        }
        self.hear(connection, &mut server);
    }

    fn new_call(&self, connection: &Connection) -> Option<CallId> {
        if self.is_ending() {
            return None;
        }
        let range = &self.ranges[self.volume_of(connection.client)];
        let pages = range.len() as u32;
        // Half of all requests meet on a few pages.
        let first = self.within(0, pages);
        let first = if self.one_in(2) { first % 4 } else { first };
        let most = if self.one_in(8) { LONGEST } else { SHORT };
        let count = self.within(1, most.min(pages - first) + 1);
        let mut sectors = (first as usize * PAGE_SECTORS, count as usize * PAGE_SECTORS);
        if self.one_in(3) {
            // Parts of pages at both ends.
            let (skip, less) = (self.within(0, 8) as usize, self.within(0, 8) as usize);
            sectors.0 += skip;
            sectors.1 = (sectors.1 - skip).saturating_sub(less).max(1);
        }
        let span = Span { offset: (sectors.0 * SECTOR) as u64, length: (sectors.1 * SECTOR) as u64 };
        let first = sectors.0 + range.start as usize * PAGE_SECTORS;
        let mut books = self.books();
        let is_written = books.is_written(first, sectors.1);
        let op = match self.within(0, 20) {
            0..7 => Op::Read,
            7..17 => Op::Write,
            17 => Op::Zero,
            18 => Op::Hole,
            // A write that began before a discard of empty pages may come after it.
            _ if is_written => Op::Read,
            _ => Op::Discard,
        };
        // The first client is a kernel: it has one write of a page under way. Others do not care.
        if is_written && op != Op::Read && connection.client == 0 {
            return None;
        }
        self.count(|tally| match op {
            Op::Read => tally.reads += 1,
            Op::Write => tally.writes += 1,
            _ => tally.zeros += 1,
        });
        Some(books.open(Request { op, span, fua: false }, first, sectors.1))
    }

    /// The index of the volume that a client uses.
    fn volume_of(&self, client: usize) -> usize {
        client % self.ranges.len()
    }

    /// A client leaves a connection. What has no answer it sends again, on others of its own.
    fn leave(&self, connection: &Connection) {
        self.count(|tally| tally.left += 1);
        connection.is_left.set(true);
        let mut books = self.books();
        for sent in &connection.sent {
            let Some(it) = sent.get() else { continue };
            sent.set(Some(Sent { left: true, ..it }));
            books.again[connection.client].push_back(it.call);
        }
    }

    /// The server's thread of a connection does its next turn, unless it is in the middle of one.
    fn serve(&self, connection: &Connection, may_sleep: bool) {
        let Ok(mut server) = connection.server.try_borrow_mut() else { return };
        if may_sleep && server.sleeps > 0 {
            server.sleeps -= 1;
            return;
        }
        if may_sleep && self.one_in(100) {
            server.sleeps = self.within(1, 60);
        }
        if server.requests.is_none() {
            return self.open_lane(connection, &mut server);
        }
        let Server { requests: Some(requests), buffers, open, .. } = &mut *server else { return };
        if connection.is_left.get() {
            requests.forsake(|_| true);
            if let Some((id, _)) = open.take() {
                requests.close(id, Err(Fault::Forsaken));
            }
            for sent in &connection.sent {
                let Some(it) = sent.get().filter(|it| !it.forsaken) else { continue };
                sent.set(Some(Sent { forsaken: true, since: self.now.get(), ..it }));
                self.books().withdraw(it.call, it.event);
            }
            if self.drops_lanes && self.one_in(8) {
                return self.drop_lane(connection, &mut server);
            }
        }
        if let Some((id, done)) = open {
            let data = &buffers.data[usize::from(*id)];
            let sent = connection.sent[usize::from(*id)].get().expect("it is under way");
            let call = sent.call;
            let offset = self.books().call(call).request.span.offset + *done as u64;
            // A sector whose bytes came in two pieces could be torn.
            let come = self.within(1, 3 * PAGE_SECTORS as u32) as usize * SECTOR;
            let most = (*done + come).min(data.len());
            *done += requests.write_piece(*id, offset, &data[*done..most]);
            if *done == data.len() {
                requests.close(*id, Ok(()));
                connection.sent[usize::from(*id)].set(Some(Sent { since: self.now.get(), ..sent }));
                *open = None;
            }
        }
        requests.submit();
        // The server has seen its client just now. A write that begins or goes on in this turn
        // takes effect behind the next look. Zeros that have waited take effect at once.
        let clears = |it: Sent| {
            !it.left && matches!(self.books().call(it.call).request.op, Op::Discard | Op::Zero | Op::Hole)
        };
        let may_clear = requests.is_waiting() && connection.under_way().any(clears);
        connection.may_leave.set(!connection.is_left.get() && !may_clear);
        requests.turn(self.time(), buffers);
        connection.may_leave.set(false);
        self.hear(connection, &mut server);
        let Server { requests: Some(requests), open, .. } = &mut *server else { return };
        let limit = |it: &Sent| if it.forsaken { FORSAKEN } else { ANSWERED };
        let overdue = |it: &Sent| self.now.get() - it.since > limit(it);
        if let Some(sent) = connection.under_way().find(|it| open.is_none() && overdue(it)) {
            panic!("a request has no answer within {:?}: forsaken {}", limit(&sent), sent.forsaken);
        }
        if connection.is_left.get() && !requests.is_busy() {
            connection.is_left.set(false);
        }
    }

    /// A server's thread ends, though stores may work for it still.
    fn drop_lane(&self, connection: &Connection, server: &mut Server) {
        self.count(|tally| tally.dropped += 1);
        server.requests = None;
        connection.sent.iter().for_each(|sent| sent.set(None));
    }

    /// Another thread begins to serve a connection. There may be no slack for its lane before the
    /// stores have answered the one before it.
    fn open_lane(&self, connection: &Connection, server: &mut Server) {
        self.pool().close_lanes(self.time());
        let volume = Arc::clone(&self.volumes.borrow()[self.volume_of(connection.client)]);
        if let Ok(lane) = volume.lane() {
            server.requests = Some(Requests::new(lane, IDS));
            connection.is_left.set(false);
        }
    }

    /// A server's answers go to the client, if it is still there.
    fn hear(&self, connection: &Connection, server: &mut Server) {
        let Server { requests: Some(requests), buffers, .. } = server else { return };
        while let Some(answer) = requests.finished() {
            let id = usize::from(answer.id);
            let Sent { call, event, time, left, forsaken, .. } =
                connection.sent[id].take().expect("one answer for each");
            let mut books = self.books();
            if left {
                if !forsaken {
                    books.withdraw(call, event);
                }
                continue;
            }
            match answer.result {
                Ok(()) if answer.request.op == Op::Read => {
                    let Span { offset, length } = answer.request.span;
                    let from = offset as usize % PAGE_SIZE;
                    books.check(call, event, &buffers.read[id].as_flattened()[from..][..length as usize]);
                }
                Ok(()) => {}
                Err(fault) => self.check_fault(fault, time),
            }
            books.answer(call, answer.result.is_ok());
            books.withdraw(call, event);
        }
    }

    /// A request that was sent at a time ends with a fault. A store has injected it.
    fn check_fault(&self, fault: Fault, sent: Duration) {
        self.count(|tally| tally.errors += 1);
        self.note_quarantine(&self.pool());
        let Faults { errors, damage, lost, stalled, crowded } = self.faults.get();
        let has_stalled = stalled.is_some_and(|at| at + ANSWERED > sent);
        let was_crowded = crowded.is_some_and(|at| at >= sent);
        let is_injected = match fault {
            Fault::Io(_) => errors || has_stalled,
            Fault::Timeout => has_stalled || was_crowded,
            Fault::Corrupt => damage,
            Fault::Lost => lost,
            Fault::Full | Fault::Unsupported | Fault::Forsaken => false,
        };
        assert!(is_injected, "a request fails, and no store does: {fault}");
    }

    fn fails(&self) -> bool {
        let Faults { errors, damage, lost, stalled, crowded } = self.faults.get();
        errors || damage || lost || stalled.is_some() || crowded.is_some()
    }

    /// Time passes, and everybody gets to run now and then.
    fn wait(&self) {
        let step = if self.one_in(2) { POLL_EVERY } else { Duration::from_millis(1) };
        (0..self.within(1, 60)).for_each(|_| self.round(step));
    }

    fn round(&self, step: Duration) {
        self.pass(step);
        for at in 0..self.connections.len() {
            self.disks.iter().for_each(|disk| disk.forget_looks());
            self.ask(at);
            self.serve(&self.connections[at], false);
        }
        self.work(&mut self.worker.borrow_mut());
        self.note_quarantine(&self.pool());
        if self.faults.get().stalled.is_some() {
            self.note_stall();
        }
    }

    /// Notes the present time, if a store stalls now.
    fn note_stall(&self) {
        if self.disks.iter().any(|disk| disk.is_stalled()) {
            let faults = self.faults.get();
            self.faults.set(Faults { stalled: Some(self.now.get()), ..faults });
        }
    }

    /// Checks that dead daemons have left the lanes the slots that they need. Notes the present
    /// time, if so many daemons have died that no lane may write.
    fn note_quarantine(&self, pool: &Pool) {
        let Config { lanes, depth, .. } = self.config;
        let (held, room) = (pool.quarantined(), self.config.quarantine());
        // A store is limited from its own first quarantine on.
        let others = ((self.disks.len() - 1) * lanes * depth) as u32;
        let most = room + lanes as u32 + others;
        assert!(held <= most, "dead daemons have left {held} slots, and {most} may be");
        if held > room {
            let room = room.saturating_sub(others);
            let least = (room / lanes as u32 + 1).saturating_sub(depth as u32);
            let died = self.unanswered.get();
            assert!(died > least, "no lane may write after {died} deaths, and {least} are to be outlived");
            self.faults.set(Faults { crowded: Some(self.now.get()), ..self.faults.get() });
        }
    }

    /// A store stalls, or goes on.
    fn stall(&self) {
        let disk = &self.disks[self.within(0, self.disks.len() as u32) as usize];
        self.note_stall();
        disk.stall(!disk.is_stalled() && self.one_in(2));
        self.count(|tally| tally.stalls += u64::from(disk.is_stalled()));
        self.note_stall();
    }

    /// A write of a dead daemon arrives.
    fn land(&self) {
        for disk in &self.disks {
            if let orphans @ 1.. = disk.sim.orphans() {
                disk.sim.land(self.within(0, orphans as u32) as usize);
            }
        }
    }

    /// A store is gone for good, with its pages. The others have room for everything.
    fn lose_a_store(&self) {
        let worker = self.worker.borrow();
        if !self.has_chunks || self.disks.len() < 2 || self.faults.get().lost || !worker.away.is_empty() {
            return;
        }
        if worker.task.is_none() {
            self.count(|tally| tally.lost_stores += 1);
            self.disks[self.within(0, self.disks.len() as u32) as usize].sim.kill();
            self.faults.set(Faults { lost: true, ..self.faults.get() });
        }
    }

    fn work(&self, worker: &mut Worker) {
        self.pool().close_lanes(self.time());
        if worker.task.is_none() && (self.is_ending() || !self.begin_task(worker)) {
            return;
        }
        for _ in 0..self.within(1, 8) {
            let (Some(task), Some(mover)) = (worker.task, &mut worker.mover) else { return };
            match mover.step(self.time()) {
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
        let store = self.within(0, self.disks.len() as u32) as usize;
        let Some(mover) = &mut worker.mover else { return false };
        if self.disks[store].state(0) == State::Lost {
            return false;
        }
        let task = match self.within(0, 4) {
            0 | 1 if self.has_chunks && !self.faults.get().lost && worker.away.len() < 2 => {
                let chunk = self.within(0, 2);
                if self.pool().begin_give_back(store, &[chunk]).is_err() {
                    return false;
                }
                Task::GiveBack { store, chunk }
            }
            2 if self.compresses => Task::Compact { store, next: 0, sparse: Sparse::up_to(16) },
            _ => {
                if let Some((store, chunk)) = worker.away.pop() {
                    mover.take(store, chunk).expect("a simulated store has memory");
                    self.count(|tally| tally.taken += 1);
                }
                Task::MoveUp { from: store, next: 0 }
            }
        };
        mover.begin(task).expect("there is such a chunk");
        worker.task = Some(task);
        true
    }

    fn end_task(&self, worker: &mut Worker, task: Task, result: Result<u32, GiveBackError>) {
        match (task, result) {
            (Task::GiveBack { store, chunk }, Ok(_)) => {
                worker.away.push((store, chunk));
                self.count(|tally| tally.given_back += 1);
            }
            (Task::Compact { .. }, Ok(pages)) => self.count(|tally| tally.compacted += u64::from(pages)),
            (_, Ok(pages)) => self.count(|tally| tally.moved_up += u64::from(pages)),
            (_, Err(_)) if self.fails() => {}
            (_, Err(GiveBackError::Pages(failed))) => {
                assert!(failed.iter().all(|(_, fault)| *fault == Fault::Full), "no store fails: {failed:?}");
            }
            (task, Err(error)) => panic!("{task:?}: {error}"),
        }
    }

    /// The daemon dies, and the next one takes over. Stores may still work for the dead one.
    fn take_over(&self) {
        self.depth.set(NESTED_MOST);
        self.count(|tally| tally.deaths += 1);
        let outlive = self.has_storm || self.one_in(2);
        self.disks.iter().for_each(|disk| disk.sim.let_writes_outlive_lanes(outlive));
        for connection in &self.connections {
            connection.may_leave.set(false);
            if let Some(requests) = connection.server.borrow_mut().requests.take() {
                requests.into_lane().abandon();
            }
            let client = connection.client;
            for sent in connection.sent.iter().filter_map(Cell::take) {
                let mut books = self.books();
                // Mostly a client sends again what was under way. Some hear of an error.
                match sent.left {
                    false if self.one_in(8) => books.answer(sent.call, false),
                    false => books.again[client].push_back(sent.call),
                    true => {}
                }
                if !sent.forsaken {
                    books.withdraw(sent.call, sent.event);
                }
            }
        }
        let mut worker = self.worker.borrow_mut();
        if let Some(mover) = worker.mover.take() {
            mover.abandon();
        }
        let noted: Vec<_> = self.volumes.take().iter().map(|volume| volume.range()).collect();
        let pool = self.pool.take().expect("a daemon");
        let given_back = |store: usize| {
            let chunks = pool.chunks(store).filter(|chunk| chunk.state == ChunkState::GivenBack);
            chunks.map(move |chunk| (store, chunk.chunk)).collect::<Vec<_>>()
        };
        worker.away = (0..self.disks.len()).flat_map(given_back).collect();
        // The keeper maps what the daemon gave it.
        self.disks.iter().for_each(|disk| disk.hand_over());
        let fds = pool.kept_fds();
        let adopt = |fd: &BorrowedFd<'_>| {
            Memory::adopt(fd.try_clone_to_owned().expect("a descriptor")).expect("a mapping")
        };
        let kept = Kept { map: adopt(&fds.map), records: fds.records.iter().map(adopt).collect() };
        drop(pool);
        self.disks.iter().for_each(|disk| disk.sim.let_writes_outlive_lanes(false));
        let orphans = self.disks.iter().map(|disk| disk.sim.orphans() as u64).sum::<u64>();
        self.count(|tally| tally.orphans += orphans);
        self.unanswered.set(if orphans > 0 { self.unanswered.get() + 1 } else { 0 });
        let taken = Pool::take_over(self.config, self.stores(), kept, &noted);
        let (pool, volumes, lost) = taken.expect("the same shape");
        assert_eq!(lost, 0, "pages are lost by a death");
        self.note_quarantine(&pool);
        for (store, disk) in self.disks.iter().enumerate() {
            for chunk in pool.chunks(store) {
                let is_away = worker.away.contains(&(store, chunk.chunk));
                assert_eq!(
                    disk.sim.holds(chunk.chunk),
                    !is_away,
                    "memory of chunk {chunk:?} of store {store}"
                );
            }
        }
        drop(worker);
        self.start(pool, volumes);
    }

    fn is_ending(&self) -> bool {
        self.depth.get() > NESTED_MOST
    }

    /// Everybody ends what they are at, and every page is read once more.
    fn end(&self) {
        self.depth.set(NESTED_MOST + 1);
        self.draws.borrow_mut().end();
        for disk in &self.disks {
            self.note_stall();
            disk.stall(false);
            (0..disk.sim.orphans()).for_each(|_| disk.sim.land(0));
        }
        self.rest();
        for (volume, pages) in self.ranges.iter().enumerate() {
            let connection = self.connections.iter().find(|it| self.volume_of(it.client) == volume);
            let Some(client) = connection.map(|it| it.client) else { continue };
            for page in 0..pages.len() as u32 {
                let span = Span::pages_from(PageNo(page), 1);
                let first = (pages.start + page) as usize * PAGE_SECTORS;
                let request = Request { op: Op::Read, span, fua: false };
                let call = self.books().open(request, first, PAGE_SECTORS);
                self.books().again[client].push_back(call);
            }
        }
        self.rest();
        // Late writes arrive. The mover looks after its own when it has something to do.
        for _ in 0..10 {
            if let Worker { mover: Some(mover), task, .. } = &mut *self.worker.borrow_mut() {
                *task = Some(Task::MoveUp { from: 0, next: 0 });
                mover.begin(Task::MoveUp { from: 0, next: 0 }).expect("there is a store");
            }
            self.rest();
        }
        let pool = self.pool();
        // This ends the quarantines.
        let _ = pool.begin_give_back(usize::MAX, &[]);
        let status = pool.status();
        let used: u64 = status.stores.iter().map(|store| u64::from(store.used)).sum();
        assert_eq!(
            used,
            status.stored - status.packed + status.packs,
            "slots have pages, or packs: {status:?}"
        );
        assert!(status.packs <= status.packed, "no pack is left empty");
    }

    /// Waits until every client has its answers, and no server has anything under way.
    fn rest(&self) {
        let is_busy = || {
            let idle = |it: &Connection| it.state() == (0, true, true);
            self.books().is_busy()
                || self.worker.borrow().task.is_some()
                || !self.connections.iter().all(idle)
        };
        for _ in 0..3 {
            let mut rounds = 0;
            while is_busy() {
                self.round(Duration::from_millis(1));
                rounds += 1;
                assert!(
                    rounds < 20_000,
                    "the end does not come: a call {}, a task {:?}, connections {:?}",
                    self.books().is_busy(),
                    self.worker.borrow().task,
                    self.connections.iter().map(Connection::state).collect::<Vec<_>>()
                );
            }
            self.round(Duration::from_millis(1));
        }
    }
}

/// The thread's history has ended, or failed.
struct Leaving;

impl Drop for Leaving {
    fn drop(&mut self) {
        run_within_claims(None);
        run_within_publications(None);
        WORLD.set(None);
    }
}
