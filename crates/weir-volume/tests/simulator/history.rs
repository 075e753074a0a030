//! One seed's history: a volume, its stores, and all events.

use crate::chance::Chance;
use crate::model::{Content, squeezable, uniform, unique};
use std::cell::Cell;
use std::collections::HashMap;
use std::ops::Range;
use std::os::fd::BorrowedFd;
use std::os::unix::fs::MetadataExt as _;
use std::panic::{AssertUnwindSafe, catch_unwind, resume_unwind};
use std::rc::Rc;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::{Duration, Instant};
use weir_core::{ByteSize, Memory, PAGE_SIZE, PageBytes, PageNo};
use weir_store::{Done, Fault, Injected, Progress, Sim, SimUrl, Store};
use weir_volume::{
    ChunkState, Compression, Config, CreateError, GiveBackError, Kept, Lane, Moved, Mover, Pool, Sparse,
    Step, Task, View, Volume,
};

/// Slots of a simulated chunk: an extent of the volume's records, which is the smallest chunk that
/// can be given back.
const CHUNK_SLOTS: u32 = 1024;
/// Time that a write waits for a slot, as in the volume.
const SLOT_WAIT: Duration = Duration::from_secs(2);
/// The usual time between two polls of an owner that waits, and the longest time that it is kept
/// from running.
const SHORT: Duration = Duration::from_micros(100);
const LONG: Duration = Duration::from_secs(3);

/// The time of a history, which passes only when the history says so.
#[derive(Debug)]
struct Clock {
    begun: Instant,
    passed: Cell<Duration>,
}

impl Clock {
    fn now(&self) -> Instant {
        self.begun + self.passed.get()
    }

    fn pass(&self, time: Duration) {
        self.passed.set(self.passed.get() + time);
    }
}

/// The events, for the determinism test and for the eye.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Tally {
    reads: u64,
    writes: u64,
    parts: u64,
    discards: u64,
    zeroes: u64,
    views: u64,
    /// Answers that a poll handed over, and steps of the mover.
    answers: u64,
    moves: u64,
    full: u64,
    waited: u64,
    refused: u64,
    io_faults: u64,
    corrupt: u64,
    lost: u64,
    deaths: u64,
    crashes: u64,
    orphans: u64,
    given_back: u64,
    kept_back: u64,
    stopped: u64,
    torn_give_backs: u64,
    moved_up: u64,
    taken: u64,
    compacted: u64,
    torn_compactions: u64,
    destroyed: u64,
    doubled: u64,
    lost_reads: u64,
    made: u64,
    grown: u64,
    shrunk: u64,
    removed: u64,
    torn_removals: u64,
    torn_discards: u64,
    torn_growths: u64,
    torn_makings: u64,
    unnoted: u64,
    /// Pages that lay in packs at the end, and the slots that they took.
    packed: u64,
    packs: u64,
    /// A hash of everything that was read, in order.
    trace: u64,
}

impl Tally {
    pub fn add(&mut self, other: &Tally) {
        self.reads += other.reads;
        self.writes += other.writes;
        self.parts += other.parts;
        self.discards += other.discards;
        self.zeroes += other.zeroes;
        self.views += other.views;
        self.answers += other.answers;
        self.moves += other.moves;
        self.full += other.full;
        self.waited += other.waited;
        self.refused += other.refused;
        self.io_faults += other.io_faults;
        self.corrupt += other.corrupt;
        self.lost += other.lost;
        self.deaths += other.deaths;
        self.crashes += other.crashes;
        self.orphans += other.orphans;
        self.given_back += other.given_back;
        self.kept_back += other.kept_back;
        self.stopped += other.stopped;
        self.torn_give_backs += other.torn_give_backs;
        self.moved_up += other.moved_up;
        self.taken += other.taken;
        self.compacted += other.compacted;
        self.torn_compactions += other.torn_compactions;
        self.destroyed += other.destroyed;
        self.doubled += other.doubled;
        self.lost_reads += other.lost_reads;
        self.made += other.made;
        self.grown += other.grown;
        self.shrunk += other.shrunk;
        self.removed += other.removed;
        self.torn_removals += other.torn_removals;
        self.torn_discards += other.torn_discards;
        self.torn_growths += other.torn_growths;
        self.torn_makings += other.torn_makings;
        self.unnoted += other.unnoted;
        self.packed += other.packed;
        self.packs += other.packs;
        self.trace ^= other.trace;
    }

    /// Everything that some history must have had.
    pub fn events(&self) -> [(&'static str, u64); 37] {
        [
            ("a read", self.reads),
            ("a write", self.writes),
            ("a partial write", self.parts),
            ("a discard", self.discards),
            ("a zeroed range", self.zeroes),
            ("a view", self.views),
            ("a full lane", self.full),
            ("a write that waited for a slot and had one", self.waited),
            ("a write that waited in vain", self.refused),
            ("an I/O error", self.io_faults),
            ("a corrupt page", self.corrupt),
            ("a lost page", self.lost),
            ("a store that died", self.deaths),
            ("a daemon that crashed", self.crashes),
            ("a write that outlived its daemon", self.orphans),
            ("a chunk given back", self.given_back),
            ("a chunk that could not be given back", self.kept_back),
            ("giving back that was stopped midway", self.stopped),
            ("a crash in the middle of giving back", self.torn_give_backs),
            ("a page brought up", self.moved_up),
            ("a chunk taken again", self.taken),
            ("a page brought together with others", self.compacted),
            ("a crash in the middle of that", self.torn_compactions),
            ("a map entry that names another page's slot", self.doubled),
            ("a record destroyed", self.destroyed),
            ("a destroyed page read", self.lost_reads),
            ("a volume made", self.made),
            ("a volume that grew", self.grown),
            ("a volume that shrank", self.shrunk),
            ("a volume removed", self.removed),
            ("a crash when a smaller size was noted", self.torn_removals),
            ("a crash between two discards of a removal", self.torn_discards),
            ("a crash in the middle of a growth", self.torn_growths),
            ("a crash when a volume was made and not noted", self.torn_makings),
            ("a note that failed", self.unnoted),
            ("a page in a pack", self.packed),
            ("a pack of several pages", self.packed.saturating_sub(self.packs)),
        ]
    }

    /// The number of events: operations that began, answers that came later, steps of the mover,
    /// changes of volumes, and deaths. A refusal, a poll without an answer and a fault are none.
    pub fn count(&self) -> u64 {
        let operations =
            self.reads + self.writes + self.parts + self.discards + self.zeroes + self.views + self.answers;
        let changes = self.made + self.grown + self.shrunk + self.removed + self.unnoted;
        operations + self.moves + changes + self.taken + self.deaths + self.crashes
    }

    fn fault(&mut self, fault: Fault) {
        match fault {
            Fault::Io(_) => self.io_faults += 1,
            Fault::Corrupt => self.corrupt += 1,
            Fault::Lost => self.lost += 1,
            other => panic!("no store injects {other:?}"),
        }
    }
}

/// An operation in flight, with its effect.
enum Pending {
    /// The read must return this content, which the page had when the read began.
    Read(Content),
    Write(Content),
    Part {
        offset: usize,
        patch: Vec<u8>,
    },
}

/// Every page's content, by its number in the pool.
struct Pages(HashMap<u32, Content>);

impl Pages {
    fn get(&self, page: u32) -> &Content {
        self.0.get(&page).unwrap_or(&Content::Nothing)
    }

    fn set(&mut self, page: u32, content: Content) {
        self.0.insert(page, content);
    }

    fn fill(&mut self, pages: Range<u32>, content: &Content) {
        pages.for_each(|page| self.set(page, content.clone()));
    }
}

/// The end of a note for the next daemon.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
enum Fate {
    Noted,
    Fails,
    /// The daemon dies before it, or after it.
    DiesBefore,
    DiesAfter,
}

/// The payload of a panic that stands for the daemon's death.
struct Death;

/// Notes a volume's range, for the keeper, as far as its fate lets it.
fn note(noted: &mut Vec<Range<u32>>, range: Range<u32>, fate: Fate) -> std::io::Result<()> {
    if matches!(fate, Fate::Noted | Fate::DiesAfter) {
        let volume = noted.iter_mut().find(|it| it.start == range.start);
        *volume.expect("it was noted") = range;
        noted.retain(|range| !range.is_empty());
    }
    match fate {
        Fate::Noted => Ok(()),
        Fate::Fails => Err(std::io::ErrorKind::BrokenPipe.into()),
        Fate::DiesBefore | Fate::DiesAfter => resume_unwind(Box::new(Death)),
    }
}

/// The outcome of `change`; `None`: the daemon has died in it.
fn unless_it_dies<T>(change: impl FnOnce() -> T) -> Option<T> {
    match catch_unwind(AssertUnwindSafe(change)) {
        Ok(outcome) => Some(outcome),
        Err(payload) if payload.is::<Death>() => None,
        Err(payload) => resume_unwind(payload),
    }
}

struct Player {
    lane: Lane,
    /// By ticket: the page, the operation, and the time when it began.
    pending: Vec<Option<(u32, Pending, Instant)>>,
    /// The last time that a write waited for a slot until its limit.
    refused: Option<Instant>,
    /// The time since which the operation that is queued last may have waited for a slot.
    asked: Option<Instant>,
    /// When the partial write began that failed last. It may have begun the lane's wait for a slot.
    failed: Option<Instant>,
}

pub struct History {
    seed: u64,
    step: u32,
    chance: Chance,
    config: Config,
    stores: Vec<Arc<Sim>>,
    pool: Arc<Pool>,
    /// The volumes of the pool. In half of all histories they come, go and change their size. A
    /// page's number here is the pool's.
    volumes: Vec<Arc<Volume>>,
    /// Their ranges as a keeper would have them.
    noted: Vec<Range<u32>>,
    /// Whether, when and how volumes change.
    changes: Option<Chance>,
    players: Vec<Player>,
    /// The mover that gives chunks back and takes them.
    worker: Option<Mover>,
    pages: Pages,
    /// Whether each store alone can hold the volume.
    roomy: bool,
    released: Vec<(usize, u32)>,
    /// Whether the daemon may die in the middle of the task that the worker is at.
    crashes_now: bool,
    dead: Option<usize>,
    /// Number of writes that ended as lost when a store was dead: it had lost the page, or there
    /// was no slot for it.
    lost_writes: u64,
    /// In half of all histories one lane does most of the work, and the others' reads take as long
    /// as hundreds of its writes.
    busy: Option<usize>,
    /// In a quarter of all histories the disk never completes the operations that a daemon had
    /// under way when it died.
    hangs: bool,
    /// In half of all histories the volume compresses, in some only for a time.
    compression: Option<Compression>,
    compresses: bool,
    serial: u32,
    clock: Rc<Clock>,
    /// Faults that this daemon has reported; the next daemon counts from zero.
    tally: Tally,
}

impl Drop for History {
    fn drop(&mut self) {
        if std::thread::panicking() {
            eprintln!("seed {} failed at step {}; add it to seeds.txt", self.seed, self.step);
            eprintln!("{:?} over {:?}", self.config, self.pool.status().stores);
        }
    }
}

impl History {
    /// Plays a seed to its end and returns its events. Panics if a promise is broken. `least`: the
    /// history goes on until it has so many events.
    pub fn play(seed: u64, least: u64) -> Tally {
        let mut history = History::begin(seed);
        let steps = history.chance.within(200, 2000);
        while history.step < steps || history.tally.count() < least {
            history.step();
            history.step += 1;
        }
        history.end()
    }

    /// Whether the daemon may die once more. A daemon that dies often does little else.
    fn may_die(&self) -> bool {
        self.tally.crashes < 3 * (1 + u64::from(self.step) / 2000)
    }

    fn begin(seed: u64) -> Self {
        let mut chance = Chance::new(seed);
        let config = Config {
            pages: chance.within(1, 200),
            // One of the lanes is the worker's.
            lanes: chance.within(2, 7) as usize,
            depth: chance.within(1, 17) as usize,
        };
        let count = chance.within(1, 4);
        // A tight volume has exactly the slots that it needs. A roomy one has enough for a store to
        // die or to give chunks back.
        let roomy = chance.one_in(2);
        // If a store has only one chunk, giving it back empties the whole store, and taking it
        // again promotes pages.
        let chunks = chance.pick(&[1, 3]);
        let slots_each = if roomy { chunks * CHUNK_SLOTS } else { config.slots().div_ceil(count) };
        let rate = |chance: &mut Chance| chance.pick(&[0.0, 0.0, 0.0, 1e-3, 1e-2, 0.1]);
        let stores: Vec<_> = (0..count)
            .map(|_| {
                let url = SimUrl {
                    seed: chance.bits(),
                    size: ByteSize(u64::from(slots_each) * PAGE_SIZE as u64),
                    chunk: roomy.then_some(ByteSize(u64::from(CHUNK_SLOTS) * PAGE_SIZE as u64)),
                    read_error: rate(&mut chance),
                    write_error: rate(&mut chance),
                    corrupt: rate(&mut chance),
                    lose: rate(&mut chance),
                    lost_slot: chance.one_in(4).then_some(chance.within(0, slots_each.min(300))),
                    delay: chance.pick(&[0, 0, 1, 3, 20, 100]),
                    ..SimUrl::default()
                };
                Arc::new(Sim::open(url).expect("memory for a small store"))
            })
            .collect();
        let pool = Pool::create(config, as_stores(&stores)).expect("stores of the size asked for");
        // These numbers come from another stream, so that the histories of old seeds do not change.
        let compression = match Chance::new(!seed).within(0, 4) {
            0 => Some(Compression::Lz4),
            1 => Some(Compression::Zstd),
            _ => None,
        };
        let mut split = Chance::new(!seed.rotate_left(32));
        let two = config.lanes > 2 && config.pages > 1 && split.one_in(2);
        let first = if two { split.within(1, config.pages) } else { config.pages };
        let sizes = [first, config.pages - first].into_iter().filter(|pages| *pages > 0);
        let volumes: Vec<_> = sizes.map(|pages| pool.volume(pages).expect("free pages")).collect();
        let noted = volumes.iter().map(|volume| volume.range()).collect();
        let busy = chance.one_in(2).then(|| chance.within(0, config.lanes as u32 - 1) as usize);
        let mut history = History {
            seed,
            step: 0,
            chance,
            config,
            stores,
            pool,
            volumes,
            noted,
            changes: two.then_some(split),
            players: Vec::new(),
            worker: None,
            pages: Pages(HashMap::new()),
            roomy,
            released: Vec::new(),
            crashes_now: false,
            dead: None,
            lost_writes: 0,
            busy,
            // These numbers too come from another stream.
            hangs: Chance::new(seed.rotate_left(32)).one_in(4),
            compression,
            compresses: compression.is_some(),
            serial: 0,
            clock: Rc::new(Clock { begun: Instant::now(), passed: Cell::default() }),
            tally: Tally::default(),
        };
        history.compress();
        history.seat_players();
        history
    }

    fn compress(&self) {
        self.compression.iter().for_each(|with| self.pool.compress(*with));
    }

    fn seat_players(&mut self) {
        self.fill_seats();
        self.worker = Some(self.pool.mover().expect("a seat for the worker"));
    }

    fn fill_seats(&mut self) {
        let player = |volume: &Arc<Volume>| {
            let lane = volume.lane().expect("a seat for each");
            Player { lane, pending: Vec::new(), refused: None, asked: None, failed: None }
        };
        let free = self.config.lanes - 1 - self.players.len();
        self.players.extend(self.volumes.iter().cycle().take(free).map(player));
    }

    /// Makes a volume, or changes one's size, or removes one, every now and then.
    fn change_volumes(&mut self, one_in: u32) {
        let Some(mut chance) = self.changes.take() else { return };
        if chance.one_in(one_in) {
            let at = chance.within(0, self.volumes.len() as u32) as usize;
            let (pages, room) = (self.volumes[at].pages(), self.pool.free_pages());
            let dies = self.worker.is_some() && self.may_die();
            let fate = match chance.within(0, 16) {
                0 | 1 => Fate::Fails,
                2 if dies => Fate::DiesBefore,
                3 if dies => Fate::DiesAfter,
                _ => Fate::Noted,
            };
            match chance.within(0, 4) {
                0 if room > 0 && self.volumes.len() < 4 => self.make(chance.within(1, room + 1), fate),
                1 if room > 0 => self.grow(at, pages + chance.within(1, room + 1), fate),
                2 => self.shrink(at, chance.within(1, pages + 1), fate, &mut chance),
                3 if self.volumes.len() > 1 => self.shrink(at, 0, fate, &mut chance),
                _ => {}
            }
        }
        self.changes = Some(chance);
    }

    fn make(&mut self, pages: u32, fate: Fate) {
        let volume = self.pool.volume(pages).expect("there is room");
        if fate == Fate::DiesBefore {
            self.tally.torn_makings += 1;
            return self.crash();
        }
        self.tally.made += 1;
        self.noted.push(volume.range());
        self.volumes.push(volume);
    }

    fn grow(&mut self, at: usize, pages: u32, fate: Fate) {
        let Self { volumes, noted, .. } = self;
        let (volume, before) = (&volumes[at], noted[at].clone());
        match unless_it_dies(|| volume.grow(pages, |range| note(noted, range, fate))) {
            None => {
                self.tally.torn_growths += 1;
                self.crash();
            }
            Some(Ok(())) => self.tally.grown += 1,
            Some(Err(error)) => {
                assert!(fate == Fate::Fails && matches!(error, CreateError::Note(_)), "{error}");
                assert_eq!(volume.range(), before, "it is as it was");
                self.tally.unnoted += 1;
            }
        }
    }

    /// Takes a volume's last pages away, down to so many. Its clients have left.
    fn shrink(&mut self, at: usize, pages: u32, fate: Fate, chance: &mut Chance) {
        let is_its = |player: &Player, volume: &Arc<Volume>| Arc::ptr_eq(player.lane.volume(), volume);
        for player in 0..self.players.len() {
            if is_its(&self.players[player], &self.volumes[at]) {
                self.rest(player);
            }
        }
        self.players.retain(|player| !is_its(player, &self.volumes[at]));
        self.pool.close_lanes(self.clock.now());
        // The worker may be at a task.
        let Ok(mut mover) = self.pool.mover() else { return self.fill_seats() };
        let Range { start, end } = self.noted[at];
        let (volume, noted) = (self.volumes.remove(at), &mut self.noted);
        let begun = unless_it_dies(|| volume.shrink(pages, |range| note(noted, range, fate)));
        if matches!(fate, Fate::Noted | Fate::DiesAfter) {
            self.pages.0.retain(|page, _| !(start + pages..end).contains(page));
        }
        let mut removal = match begun {
            None => {
                self.tally.torn_removals += u64::from(fate == Fate::DiesAfter);
                mover.abandon();
                return self.crash();
            }
            Some(Ok(removal)) => removal,
            Some(Err((volume, error))) => {
                assert!(fate == Fate::Fails && matches!(error, CreateError::Note(_)), "{error}");
                assert_eq!(volume.range(), start..end, "it is as it was");
                self.tally.unnoted += 1;
                self.volumes.insert(at, volume);
                drop(mover);
                return self.fill_seats();
            }
        };
        let most = chance.within(1, 20);
        while !mover.remove(&mut removal, most) {
            if self.worker.is_some() && self.may_die() && chance.one_in(4) {
                self.tally.torn_discards += 1;
                mover.abandon();
                return self.crash();
            }
            if !self.players.is_empty() {
                self.interfere();
            }
        }
        drop(mover);
        match removal.rest().expect("it has ended") {
            Some(volume) => {
                self.tally.shrunk += 1;
                self.volumes.insert(at, volume);
            }
            None => self.tally.removed += 1,
        }
        self.fill_seats();
    }

    /// The page with this number, if the pages of all volumes are counted one after the other.
    fn nth(&self, mut number: u32) -> Option<u32> {
        for volume in &self.noted {
            if number < volume.len() as u32 {
                return Some(volume.start + number);
            }
            number -= volume.len() as u32;
        }
        None
    }

    /// The pages of a player's volume.
    fn pages_of(&self, at: usize) -> Range<u32> {
        self.players[at].lane.volume().range()
    }

    /// A page of a player's volume, for any number.
    fn own(&self, at: usize, number: u32) -> u32 {
        let pages = self.pages_of(at);
        pages.start + number % pages.len() as u32
    }

    /// The number that this page has in the player's volume.
    fn number(&self, at: usize, page: u32) -> PageNo {
        PageNo(page - self.pages_of(at).start)
    }

    /// Lets a write of a dead daemon land, every now and then.
    fn land(&mut self) {
        if self.hangs {
            return;
        }
        for store in &self.stores {
            let orphans = store.orphans() as u32;
            if orphans > 0 && self.chance.one_in(8) {
                store.land(self.chance.within(0, orphans) as usize);
            }
        }
    }

    fn step(&mut self) {
        self.land();
        self.change_volumes(50);
        let at = match self.busy {
            Some(busy) if !self.chance.one_in(8) => busy,
            _ => self.chance.within(0, self.players.len() as u32) as usize,
        };
        // Half of all operations use a few pages.
        let hot = self.config.pages.min(8);
        let page = self.chance.within(0, self.config.pages);
        let page = if self.chance.one_in(2) { page % hot } else { page };
        let page = self.own(at, page);
        match self.chance.within(0, 1000) {
            0..300 => self.write(at, page),
            300..550 => self.read(at, page),
            550..620 => self.write_part(at, page),
            620..660 => self.discard(at, page),
            660..690 => self.zero(at, page),
            690..740 => self.view(at, page),
            740..858 => self.poll(at),
            858..860 => self.overwrite(at),
            860..950 => self.players[at].lane.submit(),
            950..960 => self.compact(),
            960..975 => self.rest(at),
            975..984 => self.give_back(),
            984..992 => self.take(),
            992..996 => self.kill(),
            _ => self.crash(),
        }
    }

    /// One lane writes more pages than the volume has spare slots, while others may be within a
    /// batch that holds freed slots back.
    fn overwrite(&mut self, at: usize) {
        for _ in 0..2 * self.config.slack() {
            let page = self.chance.within(0, self.config.pages);
            let page = self.own(at, page);
            self.write(at, page);
            self.players[at].lane.submit();
        }
    }

    /// Calls `queue` until the lane takes the operation, and polls when it is full. `Err`: it is in
    /// flight, under this ticket.
    fn queue(
        &mut self,
        at: usize,
        mut queue: impl FnMut(&mut Lane, u32) -> Progress,
    ) -> Result<Result<(), Fault>, usize> {
        let mut stalled = None;
        self.players[at].asked = None;
        loop {
            let Player { lane, pending, asked, .. } = &mut self.players[at];
            let free = pending.iter().position(Option::is_none).unwrap_or_else(|| {
                pending.push(None);
                pending.len() - 1
            });
            match queue(lane, free as u32) {
                Progress::Done(result) => {
                    match (result, stalled) {
                        (Err(Fault::Full | Fault::Timeout), _) => {
                            self.refuse(at, stalled.unwrap_or_else(|| self.clock.now()));
                        }
                        (_, Some(_)) => self.tally.waited += 1,
                        (_, None) => {}
                    }
                    return Ok(result);
                }
                Progress::Queued => return Err(free),
                Progress::Full => {
                    self.tally.full += 1;
                    let alone = lane.in_flight() == 0;
                    assert!(
                        !alone || lane.must_poll(),
                        "full with nothing in flight, and nothing is waited for"
                    );
                    // A partial write may ask for a slot before the lane takes it.
                    if lane.must_poll() {
                        asked.get_or_insert(self.clock.now());
                    }
                    lane.submit();
                    let under_way = lane.in_flight();
                    // A lane with room waits for a slot, perhaps behind a partial write that does.
                    if under_way < self.config.depth {
                        let since = *stalled.get_or_insert(self.clock.now());
                        if alone {
                            self.stall(at, since);
                        }
                    }
                    // Most polls hand nothing over, and the lane stays as full as it was.
                    for _ in 0..8 {
                        self.poll(at);
                        if alone || self.players[at].lane.in_flight() < under_way {
                            break;
                        }
                    }
                }
            }
        }
    }

    /// Lets time pass while a lane waits for a slot; the others may end their batches.
    fn stall(&mut self, at: usize, since: Instant) {
        let waited = self.clock.now() - since;
        assert!(waited <= SLOT_WAIT + 3 * LONG, "lane {at} waits for a slot for {waited:?}");
        // A write that finds no slot in time while a store is dead fails as if its page was lost
        // there.
        if self.dead.is_some() || self.chance.one_in(3) {
            (0..self.players.len()).filter(|other| *other != at).for_each(|other| self.rest(other));
        }
        if self.dead.is_none() {
            self.clock.pass(self.chance.pick(&[SHORT, SLOT_WAIT / 20, SLOT_WAIT / 2, LONG]));
        }
    }

    /// Checks a write that was refused for want of a slot: it waited for long enough, or another
    /// write of its lane just did. The wait is the lane's. So it also counts for the write if a
    /// partial write began it and then failed for another reason.
    fn refuse(&mut self, at: usize, since: Instant) {
        self.tally.refused += 1;
        let now = self.clock.now();
        let began = self.players[at].failed.filter(|began| now - *began < SLOT_WAIT + LONG);
        if now - began.unwrap_or(since).min(since) >= SLOT_WAIT {
            self.players[at].refused = Some(now);
            return;
        }
        let before = self.players[at].refused.map(|refused| now - refused);
        assert!(
            before.is_some_and(|before| before <= SLOT_WAIT),
            "refused after {:?}, {before:?} after another",
            now - since
        );
    }

    fn write_failed(&mut self, fault: Fault) {
        if fault == Fault::Lost && self.dead.is_some() {
            self.lost_writes += 1;
        } else {
            self.tally.fault(fault);
        }
    }

    /// Checks that a write finds a slot once every lane has ended its batch. The mover's batch may
    /// be under way, though.
    fn must_find_a_slot(&mut self, at: usize, page: u32) {
        if self.worker.is_none() || self.dead.is_some() {
            return;
        }
        self.rest_all();
        let bytes = unique(self.serial);
        let refused = self.tally.refused;
        let number = self.number(at, page);
        let queue = |lane: &mut Lane, ticket: u32| lane.write(ticket, number, &bytes);
        match self.queue(at, queue) {
            Ok(Ok(())) => self.pages.set(page, Content::Bytes(Rc::new(bytes))),
            Ok(Err(Fault::Full | Fault::Timeout)) => {}
            Ok(Err(fault)) => self.write_failed(fault),
            Err(ticket) => {
                self.await_ticket(at, ticket, page, Pending::Write(Content::Bytes(Rc::new(bytes))));
            }
        }
        self.rest(at);
        assert_eq!(self.tally.refused, refused, "lane {at} finds no slot, and nobody holds any back");
    }

    fn await_ticket(&mut self, at: usize, ticket: usize, page: u32, operation: Pending) {
        let since = self.players[at].asked.unwrap_or_else(|| self.clock.now());
        self.players[at].pending[ticket] = Some((page, operation, since));
    }

    fn write(&mut self, at: usize, page: u32) {
        self.serial += 1;
        self.tally.writes += 1;
        let bytes = match self.chance.within(0, 8) {
            0 => uniform(self.serial),
            1 => uniform(0),
            2..6 if self.compresses => squeezable(self.serial),
            _ => unique(self.serial),
        };
        let content = Content::Bytes(Rc::new(bytes));
        let number = self.number(at, page);
        let queue = |lane: &mut Lane, ticket: u32| lane.write(ticket, number, &bytes);
        match self.queue(at, queue) {
            Ok(Ok(())) => self.pages.set(page, content),
            Ok(Err(Fault::Full | Fault::Timeout)) => self.must_find_a_slot(at, page),
            Ok(Err(fault)) => self.write_failed(fault),
            Err(ticket) => self.await_ticket(at, ticket, page, Pending::Write(content)),
        }
    }

    fn write_part(&mut self, at: usize, page: u32) {
        self.serial += 1;
        self.tally.parts += 1;
        let offset = self.chance.within(0, PAGE_SIZE as u32) as usize;
        let length = self.chance.within(0, (PAGE_SIZE - offset + 1) as u32) as usize;
        let patch = unique(self.serial)[..length].to_vec();
        let number = self.number(at, page);
        let queue = |lane: &mut Lane, ticket: u32| lane.write_part(ticket, number, offset, &patch);
        match self.queue(at, queue) {
            Ok(Err(Fault::Lost)) if self.is_lost(page) => self.tally.lost_reads += 1,
            Ok(Ok(())) => self.patch(page, offset, &patch),
            Ok(Err(Fault::Full | Fault::Timeout)) => {}
            Ok(Err(fault)) => self.write_failed(fault),
            Err(ticket) => self.await_ticket(at, ticket, page, Pending::Part { offset, patch }),
        }
    }

    fn is_lost(&self, page: u32) -> bool {
        *self.pages.get(page) == Content::Lost
    }

    fn patch(&mut self, page: u32, offset: usize, patch: &[u8]) {
        self.pages.set(page, self.pages.get(page).patched(offset, patch));
    }

    fn read(&mut self, at: usize, page: u32) {
        self.tally.reads += 1;
        let mut out = [0x5a; PAGE_SIZE];
        let number = self.number(at, page);
        let outcome = self.queue(at, |lane, ticket| lane.read(ticket, number, &mut out));
        // Take the page's content now: making room for the read may have finished a write of the
        // page.
        let expected = self.pages.get(page).clone();
        match outcome {
            Ok(Err(Fault::Lost)) if expected == Content::Lost => self.tally.lost_reads += 1,
            Ok(Ok(())) => self.check(page, &expected, &out),
            Ok(Err(fault)) => self.tally.fault(fault),
            Err(ticket) => self.await_ticket(at, ticket, page, Pending::Read(expected)),
        }
    }

    fn check(&mut self, page: u32, expected: &Content, found: &PageBytes) {
        assert!(expected.bytes() == *found, "page {page} reads as something else ({:02x?}..)", &found[..16]);
        let word = u64::from_le_bytes(found[..8].try_into().expect("8 of 4096 bytes"));
        self.tally.trace = self.tally.trace.rotate_left(5) ^ word ^ u64::from(page);
    }

    fn range(&mut self, at: usize, page: u32) -> u32 {
        self.chance.within(1, 9).min(self.pages_of(at).end - page)
    }

    fn discard(&mut self, at: usize, page: u32) {
        self.tally.discards += 1;
        let (count, number) = (self.range(at, page), self.number(at, page));
        self.players[at].lane.discard(number, count);
        self.pages.fill(page..page + count, &Content::Nothing);
    }

    fn zero(&mut self, at: usize, page: u32) {
        self.tally.zeroes += 1;
        let (count, number) = (self.range(at, page), self.number(at, page));
        self.players[at].lane.zero(number, count, false);
        let zeros = Content::Bytes(Rc::new(uniform(0)));
        self.pages.fill(page..page + count, &zeros);
    }

    fn view(&mut self, at: usize, page: u32) {
        self.tally.views += 1;
        let expected = self.pages.get(page).clone();
        let number = self.number(at, page);
        let lane = &mut self.players[at].lane;
        assert_eq!(lane.mapped(number), expected != Content::Nothing, "page {page}");
        assert!(!lane.known_zero(number) || expected.bytes() == uniform(0), "page {page}");
        match lane.pin().view(number) {
            View::Fault(Fault::Lost) => assert!(expected == Content::Lost, "page {page} is not lost"),
            View::Fill(value) => assert!(expected.bytes() == uniform(value), "page {page} shown as {value}"),
            View::Elsewhere => {}
            View::Bytes(_) | View::Fault(_) => {
                panic!("simulated stores show nothing, and no page is lost here")
            }
        }
    }

    fn poll(&mut self, at: usize) {
        let mut finished = Vec::new();
        self.clock.pass(SHORT);
        let Player { lane, pending, .. } = &mut self.players[at];
        lane.poll(self.clock.now(), &mut |Done { ticket, result, page }| {
            let (number, operation, since) =
                pending[ticket as usize].take().expect("a ticket that is in flight");
            finished.push((number, operation, since, result, page.map(|page| Box::new(*page))));
        });
        let waiting = pending.iter().flatten().count();
        assert_eq!(lane.in_flight(), waiting, "what is in flight is what was not handed over");
        self.tally.answers += finished.len() as u64;
        for (page, operation, since, result, bytes) in finished {
            match (operation, result) {
                (Pending::Write(_) | Pending::Part { .. }, Err(Fault::Full | Fault::Timeout)) => {
                    self.refuse(at, since);
                }
                (Pending::Write(_), Err(fault)) => self.write_failed(fault),
                (Pending::Part { .. }, Err(fault)) => {
                    self.players[at].failed = Some(since);
                    self.write_failed(fault);
                }
                (Pending::Read(_), Err(fault)) => self.tally.fault(fault),
                (Pending::Read(expected), Ok(())) => {
                    self.check(page, &expected, &bytes.expect("a read that succeeded has a page"));
                }
                (Pending::Write(content), Ok(())) => self.pages.set(page, content),
                (Pending::Part { offset, patch }, Ok(())) => self.patch(page, offset, &patch),
            }
        }
    }

    /// Lets a lane finish its operations in flight, and end its batch.
    fn rest(&mut self, at: usize) {
        let mut polls = 0;
        loop {
            self.players[at].lane.submit();
            if self.players[at].lane.in_flight() == 0 {
                return;
            }
            self.poll(at);
            polls += 1;
            // This takes longer than a store does. Either the lane waits for a slot, or partial
            // writes of one page restart again and again. In the first case the deadline comes. In
            // the second, less time passes than a mover waits for stores.
            if (501..514).contains(&polls) || polls > 4000 {
                self.clock.pass(SLOT_WAIT / 10);
            }
            assert!(polls < 10_000, "lane {at} hangs with {} in flight", self.players[at].lane.in_flight());
        }
    }

    fn rest_all(&mut self) {
        (0..self.players.len()).for_each(|at| self.rest(at));
    }

    /// The worker does a task, and others act between its steps. It is stopped after so many.
    /// `None`: the daemon has died in the middle.
    fn work(&mut self, task: Task, mut left: u32) -> Option<Result<Moved, GiveBackError>> {
        let mut worker = self.worker.take().expect("nobody else has it");
        worker.begin(task).expect("there is such a store and chunk");
        loop {
            self.tally.moves += 1;
            match worker.step(self.clock.now()) {
                Step::More { .. } => {
                    self.interfere();
                    left = left.saturating_sub(1);
                    if left == 0 {
                        worker.stop();
                    }
                }
                Step::Waits(..) => {
                    self.clock.pass(SHORT);
                    // Others are within a batch, for some time.
                    if self.chance.one_in(8) {
                        self.rest_all();
                    }
                }
                Step::Ended(result) => {
                    self.moves_failed(task, worker.failed());
                    self.worker = Some(worker);
                    return Some(result);
                }
            }
            if self.crashes_now && self.chance.one_in(16) {
                self.moves_failed(task, worker.failed());
                self.worker = Some(worker);
                self.crash();
                return None;
            }
        }
    }

    /// Pages that a mover left where they were.
    fn moves_failed(&mut self, task: Task, failed: &[(PageNo, Fault)]) {
        for &(_, fault) in failed.iter().filter(|(_, fault)| *fault != Fault::Full) {
            match task {
                Task::Compact { .. } => self.write_failed(fault),
                _ => self.tally.fault(fault),
            }
        }
    }

    /// How many steps a task may take: mostly as many as it needs.
    fn steps(&mut self) -> u32 {
        self.crashes_now = self.may_die() && self.chance.one_in(4);
        if self.chance.one_in(4) { self.chance.within(1, 8) } else { u32::MAX }
    }

    /// The worker gives a chunk back while the others go on; sometimes it is stopped midway,
    /// sometimes the daemon dies.
    fn give_back(&mut self) {
        let store = self.chance.within(0, self.stores.len() as u32) as usize;
        let chunk = self.chance.within(0, 3);
        if self.released.contains(&(store, chunk)) || self.dead == Some(store) {
            return;
        }
        self.rest_all();
        if let Err(error) = self.pool.begin_give_back(store, &[chunk]) {
            use GiveBackError::{NoChunk, NoRoom, Settling};
            let expected = matches!(error, NoRoom { .. } | NoChunk { .. } | Settling);
            assert!(expected, "giving back chunk {chunk} of store {store}: {error}");
            self.tally.kept_back += 1;
            return;
        }
        // Until the give-back is done the chunk takes no pages.
        self.released.push((store, chunk));
        let steps = self.steps();
        let outcome = self.work(Task::GiveBack { store, chunk }, steps);
        match outcome {
            Some(Ok(_)) => self.tally.given_back += 1,
            Some(Err(GiveBackError::Stopped)) => self.tally.stopped += 1,
            Some(Err(GiveBackError::Pages(_))) => self.tally.kept_back += 1,
            Some(Err(other)) => panic!("giving back chunk {chunk} of store {store}: {other}"),
            None => return self.tally.torn_give_backs += 1,
        }
        if !matches!(outcome, Some(Ok(_))) {
            self.released.pop();
            assert_eq!(
                self.chunk_state(store, chunk),
                Some(ChunkState::Held),
                "what is not given back is held"
            );
        }
    }

    /// The acts of the others between two steps of the worker's. Mostly they end their batches, for
    /// which the worker may wait.
    fn interfere(&mut self) {
        self.change_volumes(20);
        for _ in 0..self.chance.within(0, 4) {
            let at = self.chance.within(0, self.players.len() as u32) as usize;
            let page = self.chance.within(0, self.config.pages);
            let page = self.own(at, page);
            match self.chance.within(0, 5) {
                0 | 1 => self.write(at, page),
                2 => self.write_part(at, page),
                3 => self.discard(at, page),
                _ => self.read(at, page),
            }
        }
        if !self.roomy || !self.chance.one_in(4) {
            self.rest_all();
        }
    }

    fn chunk_state(&self, store: usize, chunk: u32) -> Option<ChunkState> {
        self.pool.chunks(store).nth(chunk as usize).map(|chunk| chunk.state)
    }

    /// Takes a chunk again, and promotes pages into the stores that have room now.
    fn take(&mut self) {
        let Some((store, chunk)) = self.released.pop() else { return };
        if self.dead == Some(store) {
            return;
        }
        self.tally.taken += 1;
        let worker = self.worker.as_mut().expect("nobody else has it");
        worker.take(store, chunk).expect("a simulated store always has memory");
        self.rest_all();
        let from = self.chance.within(0, self.stores.len() as u32) as usize;
        let mut next = 0;
        loop {
            self.steps();
            match self.work(Task::MoveUp { from, next }, u32::MAX) {
                Some(Ok(moved)) => {
                    self.tally.moved_up += u64::from(moved.pages);
                    if !moved.more {
                        break;
                    }
                }
                Some(Err(GiveBackError::Pages(_))) => {}
                Some(Err(other)) => panic!("bringing pages of store {from} up: {other}"),
                None => return,
            }
            next = self.moved_to();
        }
    }

    /// The number that the worker's task has come to.
    fn moved_to(&self) -> u32 {
        self.worker.as_ref().expect("nobody else has it").next()
    }

    /// The worker empties packs while the others go on; sometimes the daemon dies while pages are
    /// on their way.
    fn compact(&mut self) {
        // Other lanes may be within a batch, unless they would hold the last slots.
        if !self.roomy || self.chance.one_in(4) {
            self.rest_all();
        }
        let store = self.chance.within(0, self.stores.len() as u32) as usize;
        let sparse = Sparse::up_to(self.chance.pick(&[4, 8, 11, 16]));
        let mut next = 0;
        loop {
            let steps = self.steps();
            match self.work(Task::Compact { store, next, sparse }, steps) {
                Some(Ok(done)) => {
                    self.tally.compacted += u64::from(done.pages);
                    if !done.more {
                        return;
                    }
                }
                Some(Err(GiveBackError::Stopped)) => return,
                Some(Err(other)) => panic!("emptying packs of store {store}: {other}"),
                None => return self.tally.torn_compactions += 1,
            }
            next = self.moved_to();
        }
    }

    /// Kills a store with all its pages, if another store is left with room for everything.
    fn kill(&mut self) {
        if self.dead.is_some() || self.stores.len() < 2 || !self.roomy || !self.released.is_empty() {
            return;
        }
        self.tally.deaths += 1;
        let store = self.chance.within(0, self.stores.len() as u32) as usize;
        self.stores[store].kill();
        self.dead = Some(store);
    }

    /// Kills the daemon, and another takes its volume over. Writes that were not acknowledged never
    /// happened.
    fn crash(&mut self) {
        if !self.may_die() {
            return;
        }
        self.tally.crashes += 1;
        // A chunk that was being given back is open again, unless its word says that it is gone.
        let gone = |pool: &Pool, store: usize, chunk: u32| {
            pool.chunks(store).nth(chunk as usize).is_some_and(|it| it.state == ChunkState::GivenBack)
        };
        let pool = Arc::clone(&self.pool);
        self.released.retain(|&(store, chunk)| gone(&pool, store, chunk));
        for &(store, chunk) in &self.released {
            // A store that is opened anew may have all its memory; the volume remembers the chunks
            // that were given back.
            if self.dead != Some(store) && self.chance.one_in(2) {
                weir_store::Reclaim::take(&*self.stores[store], chunk).expect("memory");
            }
        }
        // In half of the crashes the daemon's writes are still under way, and land some time later.
        let outlive = self.chance.one_in(2);
        self.stores.iter().for_each(|store| store.let_writes_outlive_lanes(outlive));
        self.players.drain(..).for_each(|player| player.lane.abandon());
        self.worker.take().expect("nobody else has it").abandon();
        self.stores.iter().for_each(|store| store.let_writes_outlive_lanes(false));
        self.tally.orphans += self.stores.iter().map(|store| store.orphans() as u64).sum::<u64>();
        let fds = pool.kept_fds();
        let adopt = |fd: &BorrowedFd<'_>| {
            Memory::adopt(fd.try_clone_to_owned().expect("a descriptor")).expect("a mapping")
        };
        let kept = Kept { map: adopt(&fds.map), records: fds.records.iter().map(adopt).collect() };
        let destroyed = match self.chance.within(0, 4) {
            0 | 1 => self.destroy_a_record(&kept),
            2 => self.double_a_slot(&kept),
            _ => Vec::new(),
        };
        let (pool, volumes, lost) =
            Pool::take_over(self.config, as_stores(&self.stores), kept, &self.noted).expect("the same shape");
        assert_eq!(lost, destroyed.len() as u64, "pages lost by the crash");
        for page in destroyed {
            self.pages.set(page, Content::Lost);
        }
        (self.pool, self.volumes) = (pool, volumes);
        self.check_chunks();
        // Sometimes the next one does it otherwise, or no more.
        if self.compresses && self.chance.one_in(4) {
            let next = [None, Some(Compression::Lz4), Some(Compression::Zstd)];
            self.compression = self.chance.pick(&next);
        }
        self.compress();
        self.seat_players();
    }

    /// A chunk that the volume uses has its memory, and one that was given back has none.
    fn check_chunks(&self) {
        for (at, store) in self.stores.iter().enumerate().filter(|&(at, _)| Some(at) != self.dead) {
            for chunk in self.pool.chunks(at) {
                let given = self.released.contains(&(at, chunk.chunk));
                let state = if given { ChunkState::GivenBack } else { ChunkState::Held };
                assert_eq!(chunk.state, state, "chunk {} of store {at} after a crash", chunk.chunk);
                assert_eq!(store.holds(chunk.chunk), !given, "memory of chunk {} of store {at}", chunk.chunk);
            }
        }
    }

    /// The daemon has scribbled in its map before it died: a page's entry names the slot of
    /// another, alone there. Says which pages are lost by that.
    fn double_a_slot(&mut self, kept: &Kept) -> Vec<u32> {
        let pages = [(); 2].map(|()| self.chance.within(0, self.config.pages)).map(|at| self.nth(at));
        let [Some(from), Some(to)] = pages else { return Vec::new() };
        let entry = word(&kept.map, from).load(Ordering::Relaxed);
        if from == to || entry >> 62 != 2 || self.sharing(&kept.map, entry).len() != 1 {
            return Vec::new();
        }
        // A pack's record names no page, so it says nothing of who lies in it.
        let record = word(&kept.records[(entry >> 58 & 15) as usize], entry as u32);
        if (record.load(Ordering::Relaxed) >> 32) as u32 & (u32::MAX >> 1) != from {
            return Vec::new();
        }
        self.tally.doubled += 1;
        word(&kept.map, to).store(entry, Ordering::Relaxed);
        vec![to]
    }

    /// Wipes the record of a slot that some page lies in, and says which pages'.
    fn destroy_a_record(&mut self, kept: &Kept) -> Vec<u32> {
        let store = self.chance.within(0, self.stores.len() as u32) as usize;
        let number = self.chance.within(0, self.config.pages);
        let Some(page) = self.nth(number) else { return Vec::new() };
        let entry = word(&kept.map, page).load(Ordering::Relaxed);
        // Keep entries of the kind `stored`, with this store and this slot: see entry.rs.
        if entry >> 58 != 2 << 4 | store as u64 {
            return Vec::new();
        }
        word(&kept.records[store], entry as u32).store(0, Ordering::Relaxed);
        self.tally.destroyed += 1;
        self.sharing(&kept.map, entry)
    }

    /// The pages of all volumes whose entries name the same slot as this one.
    fn sharing(&self, map: &Memory, entry: u64) -> Vec<u32> {
        let same = |&page: &u32| {
            let other = word(map, page).load(Ordering::Relaxed);
            other >> 58 == entry >> 58 && other as u32 == entry as u32
        };
        self.noted.iter().cloned().flatten().filter(same).collect()
    }

    /// Reads every page once more, and compares all counts.
    fn end(mut self) -> Tally {
        self.rest_all();
        for volume in self.volumes.clone() {
            let has_it = |player: &Player| Arc::ptr_eq(player.lane.volume(), &volume);
            let at = self.players.iter().position(has_it).unwrap_or_else(|| {
                // There are more volumes than lanes.
                self.players.remove(0);
                let lane = volume.lane().expect("the one before is at rest");
                self.players.push(Player {
                    lane,
                    pending: Vec::new(),
                    refused: None,
                    asked: None,
                    failed: None,
                });
                self.players.len() - 1
            });
            volume.range().for_each(|page| self.read(at, page));
            self.rest(at);
        }
        self.rest_all();
        let injected =
            self.stores.iter().map(|store| store.injected()).fold(Injected::default(), |sum, store| {
                Injected {
                    read_errors: sum.read_errors + store.read_errors,
                    write_errors: sum.write_errors + store.write_errors,
                    corrupt_writes: sum.corrupt_writes + store.corrupt_writes,
                    lost_writes: sum.lost_writes + store.lost_writes,
                    damaged_reads: sum.damaged_reads + store.damaged_reads,
                    gone: sum.gone + store.gone,
                    released: sum.released + store.released,
                }
            });
        assert_eq!(injected.released, 0, "operations on slots whose memory was given back");
        let injected_io = injected.read_errors + injected.write_errors;
        let lost = self.tally.lost..=self.tally.lost + self.lost_writes;
        if self.compresses {
            // A failed write of a pack fails for every page in it, and may have failed unnoticed
            // when its daemon died.
            let all_seen = self.tally.crashes == 0;
            assert!(!all_seen || self.tally.io_faults >= injected_io, "I/O errors injected are seen");
            assert!(injected_io > 0 || self.tally.io_faults == 0, "I/O errors seen are injected");
            assert!(!all_seen || *lost.end() >= injected.gone, "lost pages injected are seen");
            assert!(injected.gone > 0 || *lost.start() == 0, "lost pages seen are injected");
        } else {
            assert_eq!(self.tally.io_faults, injected_io, "I/O errors seen and injected");
            assert!(lost.contains(&injected.gone), "lost pages seen {lost:?} and injected {}", injected.gone);
        }
        assert_eq!(self.tally.corrupt, injected.damaged_reads, "corrupt pages seen and injected");

        for store in &self.stores {
            (0..store.orphans()).for_each(|_| store.land(0));
        }
        let map = std::fs::File::from(self.pool.kept_fds().map.try_clone_to_owned().expect("a descriptor"));
        let in_memory = map.metadata().expect("a size").blocks() * 512;
        assert_eq!(
            in_memory,
            self.pool.map_bytes() + PAGE_SIZE as u64,
            "memory of the map, and of its count"
        );
        let status = self.pool.status();
        let used: u64 = status.stores.iter().map(|store| u64::from(store.used)).sum();
        assert_eq!(
            used,
            status.stored - status.packed + status.packs,
            "slots in use are pages stored, or packs"
        );
        assert!(status.packs <= status.packed, "no pack is left empty");
        self.tally.packed += status.packed;
        self.tally.packs += status.packs;
        let in_a_slot = |content: &&Content| match content {
            Content::Nothing | Content::Lost => false,
            Content::Bytes(bytes) => weir_core::uniform_value(bytes).is_none(),
        };
        let stored = self.pages.0.values().filter(in_a_slot).count() as u64;
        let mapped =
            self.pages.0.values().filter(|content| matches!(content, Content::Bytes(_))).count() as u64;
        assert_eq!((status.stored, status.filled), (stored, mapped - stored), "pages stored and filled");
        self.tally.clone()
    }
}

/// A word of a map, or of records.
fn word(memory: &Memory, at: u32) -> &AtomicU64 {
    assert!((at as usize + 1) * 8 <= memory.len(), "word {at}");
    // SAFETY: the pointer is inside the mapping (checked above) and aligned; the word is always
    // used as an atomic.
    unsafe { &*memory.as_ptr().cast::<AtomicU64>().add(at as usize) }
}

fn as_stores(stores: &[Arc<Sim>]) -> Vec<Arc<dyn Store>> {
    stores.iter().map(|store| Arc::clone(store) as Arc<dyn Store>).collect()
}
