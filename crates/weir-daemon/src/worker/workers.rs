//! The threads that empty chunks, and the division of chunks between them.

use super::compaction::Compaction;
use super::job::{Job, JobKind, Reach, unmoved};
use super::pace::{Pace, drive};
use super::promotion::Promotion;
use super::removal::Discarders;
use crate::control::{Background, Moved};
use crate::environment::{Clock, Environment};
use crate::error::{Error, ErrorKind};
use std::collections::VecDeque;
use std::sync::atomic::{AtomicBool, AtomicU32, AtomicU64, AtomicUsize, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, OnceLock, PoisonError, Weak};
use std::time::Instant;
use weir_core::{ByteSize, PAGE_SIZE, Slot, chain};
use weir_queue::{Item, Queue, Work, has_item};
use weir_store::{Headroom, Store};
use weir_volume::{ChunkState, ChunkStatus, Mover, Note, Pool, Task};

/// The next step for a user whose memory cannot be given back: the other stores have no room for
/// its pages.
const MORE_ROOM: &str = "for more weir on and weir serve take --backing PATH, and weir on --parts N";

/// The threads, their movers, and their counts.
#[derive(Debug)]
pub struct Workers {
    pool: Arc<Pool>,
    /// The first queue takes the jobs. The other queues help it to empty chunks.
    queues: OnceLock<Box<[Queue]>>,
    movers: Box<[Mutex<OpenMover>]>,
    /// For each store: whether its memory is given back on request.
    gives_back: Box<[bool]>,
    /// The takes that are between two turns.
    pub(super) takes: Mutex<Vec<Taking>>,
    pub(super) promotion: Arc<Promotion>,
    compaction: Arc<Compaction>,
    stopping: AtomicBool,
    clock: Arc<dyn Clock>,
    given_back: Total,
    pub(super) taken: Total,
}

/// A mover; its own `Debug` would print nothing useful.
pub struct OpenMover(Mover);

impl std::fmt::Debug for OpenMover {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str("Mover")
    }
}

impl std::ops::Deref for OpenMover {
    type Target = Mover;
    fn deref(&self) -> &Mover {
        &self.0
    }
}

impl std::ops::DerefMut for OpenMover {
    fn deref_mut(&mut self) -> &mut Mover {
        &mut self.0
    }
}

/// The bytes moved since the start, and the bytes a second of the last job.
#[derive(Debug, Default)]
pub(super) struct Total {
    bytes: AtomicU64,
    bytes_per_s: AtomicU64,
}

impl Total {
    pub fn add(&self, bytes: u64, seconds: f64) {
        self.bytes.fetch_add(bytes, Ordering::Relaxed);
        self.bytes_per_s.store((bytes as f64 / seconds.max(1e-6)) as u64, Ordering::Relaxed);
    }
}

/// A card on which a store lies.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Card {
    /// The store's index in the pool's order.
    pub store: usize,
    /// The card's number among the store's members.
    pub card: u32,
}

/// A chunk, by its store and its number.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) struct Chunk {
    pub store: usize,
    pub chunk: u32,
    slots: u32,
    pub note: Note,
}

impl Chunk {
    pub fn is(&self, other: &Chunk) -> bool {
        (self.store, self.chunk) == (other.store, other.chunk)
    }

    pub fn bytes(self) -> u64 {
        bytes(self.slots)
    }
}

/// A take that has not ended.
#[derive(Debug)]
pub(super) struct Taking {
    pub job: Weak<Job>,
    pub kind: JobKind,
    pub began: Instant,
    /// The chunks that the take still wants. Each of them is given back.
    pub rest: VecDeque<Chunk>,
    /// Bytes that the take leaves to the governor.
    pub left_bytes: u64,
    /// Whether a later give-back has removed chunks from the rest.
    pub overruled: bool,
}

/// Closed chunks that wait to be emptied. All threads empty one chunk together, then the next. So a
/// program that waits for memory gets the first chunk soon. If each thread emptied a chunk of its
/// own, the program would get several at once, but later.
#[derive(Debug)]
struct List {
    chunks: Vec<Chunk>,
    /// For each chunk, the number of its parts that are not empty yet. A chunk has a part for each
    /// thread.
    left: Vec<AtomicU32>,
    /// The number of the next part to empty. The parts of the first chunk come first, then those of
    /// the second, and so on.
    next: AtomicUsize,
    job: Arc<Job>,
    threads: usize,
    /// The reason why a chunk could not be given back: that of the first such chunk.
    trouble: Mutex<Option<String>>,
}

/// One thread's work on a [`List`], as an item of the thread's queue.
#[derive(Debug)]
struct Help {
    item: Item<Help>,
    workers: Arc<Workers>,
    thread: usize,
    list: Arc<List>,
}

has_item!(Help, item);

impl Work for Help {
    type Pointer = Arc<Help>;

    fn run(this: Arc<Help>) {
        this.workers.empty(this.thread, &this.list);
    }
}

impl Discarders for Workers {
    fn queue(&self) -> &Queue {
        &self.queues()[0]
    }

    fn with_mover(&self, of: &mut dyn FnMut(&mut Mover)) {
        of(&mut self.mover(0));
    }

    fn is_stopping(&self) -> bool {
        Workers::is_stopping(self)
    }

    fn clock(&self) -> &dyn Clock {
        Workers::clock(self)
    }
}

impl Workers {
    pub fn start(
        pool: &Arc<Pool>,
        gives_back: &[bool],
        environment: &Environment,
    ) -> Result<Arc<Self>, Error> {
        let threads = super::lanes(environment.processors);
        let movers = (0..threads)
            .map(|_| Ok(Mutex::new(OpenMover(pool.mover()?))))
            .collect::<Result<_, weir_store::OpenError>>()
            .map_err(|error| Error::of(ErrorKind::Volume, error))?;
        let queue = |thread: usize| {
            let name = if thread == 0 { "weir-worker".to_owned() } else { format!("weir-help-{thread}") };
            Queue::builder().name(name).shards(1).start()
        };
        let queues: Result<Box<[Queue]>, _> = (0..threads).map(queue).collect();
        let queues = queues.map_err(|error| Error::of(ErrorKind::System, error))?;
        let workers = Arc::new_cyclic(|workers: &Weak<Workers>| Workers {
            pool: Arc::clone(pool),
            queues: OnceLock::new(),
            movers,
            gives_back: gives_back.into(),
            clock: Arc::clone(&environment.clock),
            takes: Mutex::default(),
            promotion: Promotion::new(Weak::clone(workers), environment.clock.now()),
            compaction: Compaction::new(Weak::clone(workers)),
            stopping: AtomicBool::new(false),
            given_back: Total::default(),
            taken: Total::default(),
        });
        workers.queues.set(queues).expect("set once");
        workers.compaction.begin(&workers);
        Ok(workers)
    }

    /// Ends every thread after its current chunk or batch.
    pub fn stop(&self) {
        self.stopping.store(true, Ordering::Release);
        self.queues().iter().for_each(Queue::stop);
    }

    pub fn is_stopping(&self) -> bool {
        self.stopping.load(Ordering::Acquire)
    }

    pub fn clock(&self) -> &dyn Clock {
        &*self.clock
    }

    pub fn pool(&self) -> &Arc<Pool> {
        &self.pool
    }

    /// The queue that takes the jobs.
    pub fn queue(&self) -> &Queue {
        &self.queues()[0]
    }

    pub fn mover(&self, thread: usize) -> MutexGuard<'_, OpenMover> {
        self.movers[thread].lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Notes that stores have more room than before, so that pages may be promoted.
    pub fn room_was_made(&self) {
        let stores = self.pool.status().stores;
        let below = stores.iter().skip(1).any(|store| store.used > 0);
        if below && stores.iter().rev().skip(1).any(|store| store.used < store.slots) {
            self.promotion.begin(self);
        }
    }

    fn queues(&self) -> &[Queue] {
        self.queues.get().expect("set before anyone has a workers")
    }

    pub fn status(&self) -> Background {
        let read = |count: &AtomicU64| count.load(Ordering::Relaxed);
        let metrics = self.queues().iter().map(Queue::metrics);
        let (mut items, mut batches, mut longest, mut wakes) = (0, 0, 0, 0);
        for queue in metrics {
            items += queue.items;
            batches += queue.batches;
            longest = queue.longest.max(longest);
            wakes += queue.wakes;
        }
        let status = self.pool.status();
        Background {
            moved_out: status.moved_out,
            moved_up: status.moved_up,
            compacted: status.compacted,
            given_back_bytes: read(&self.given_back.bytes),
            give_back_bytes_per_s: read(&self.given_back.bytes_per_s),
            taken_bytes: read(&self.taken.bytes),
            take_bytes_per_s: read(&self.taken.bytes_per_s),
            threads: self.movers.len() as u64,
            items,
            batches,
            longest_batch: longest,
            wakes,
        }
    }

    /// Runs a job on the worker's thread, up to the end of the job's turn. `None`: the job needs
    /// another turn.
    pub fn run(self: &Arc<Self>, job: &Arc<Job>) -> Option<Result<Moved, Error>> {
        match job.kind {
            JobKind::GiveBack | JobKind::Spare | JobKind::Sleep => Some(self.give_back(job)),
            JobKind::Take | JobKind::Wake => self.take(job),
        }
    }

    pub(super) fn card(&self, chunk: &Chunk) -> Card {
        let store = self.pool.stores().nth(chunk.store);
        Card { store: chunk.store, card: store.map_or(0, |store| member(&**store, chunk.chunk)) }
    }

    /// The free memory of a card, which its owner can use. `None`: the card does not report it.
    pub fn room(&self, card: Card) -> Option<Headroom> {
        self.pool.stores().nth(card.store)?.reclaim()?.headroom(card.card)
    }

    /// The cards that report their free memory. Cards of stores that give no memory back are left
    /// out.
    pub fn cards(&self) -> impl Iterator<Item = Card> {
        let stores = self.pool.stores().enumerate().filter(|&(at, _)| self.gives_back[at]);
        stores.flat_map(|(store, it)| {
            let says = move |&card: &u32| it.reclaim().is_some_and(|it| it.headroom(card).is_some());
            (0..it.members()).filter(says).map(move |card| Card { store, card })
        })
    }

    /// The number of a card's held chunks, and the number of chunks that the governor has given
    /// back and may take.
    pub fn chunk_counts(&self, card: Card) -> (u32, u32) {
        let count = |state| self.chunks(state, Some(card)).len() as u32;
        (count(ChunkState::Held), count(ChunkState::GivenBack))
    }

    /// The chunks in `state` of all stores that give memory back: store by store, chunks with the
    /// fewest pages first. With `only`, which the governor's requests have, they are the chunks of
    /// that card. Chunks that were given back for a client or before the machine slept are then
    /// left out.
    pub(super) fn chunks(&self, state: ChunkState, only: Option<Card>) -> Vec<Chunk> {
        let mut all = Vec::new();
        for (store, it) in self.pool.stores().enumerate().filter(|&(at, _)| self.gives_back[at]) {
            let wanted =
                |chunk: u32| only.is_none_or(|only| only == Card { store, card: member(&**it, chunk) });
            let chunks = self.pool.chunks(store);
            let governed = Note { unasked: true, asleep: false };
            let mine = |note| note == governed || only.is_none() || state != ChunkState::GivenBack;
            let mut chunks: Vec<_> = chunks
                .filter(|chunk| chunk.state == state && wanted(chunk.chunk) && mine(chunk.note))
                .collect();
            chunks.sort_by_key(|chunk| chunk.used);
            let chunk = |it: &ChunkStatus| Chunk { store, chunk: it.chunk, slots: it.slots, note: it.note };
            all.extend(chunks.iter().map(chunk));
        }
        all
    }

    fn give_back(self: &Arc<Self>, job: &Arc<Job>) -> Result<Moved, Error> {
        let began = self.clock.now();
        let held = self.chunks(ChunkState::Held, job.only);
        let there: u64 = held.iter().map(|chunk| chunk.bytes()).sum();
        let spare = bytes(self.pool.spare_slots());
        let device = ByteSize(bytes(self.pool.pages()));
        let wanted = match job.bytes {
            _ if job.kind == JobKind::Spare => fitting(held, spare),
            Some(wanted) if job.only.is_some() => {
                upto(&held, |sum, next| sum < wanted && sum + next.bytes() <= spare)
            }
            Some(wanted) if wanted > there => {
                return Err(unmoved(format!(
                    "cannot give back {}: only {} is held; ask for that, or for all",
                    ByteSize(wanted),
                    ByteSize(there)
                )));
            }
            Some(wanted) => upto(&held, |sum, _| sum < wanted),
            None => upto(&held, |sum, next| sum + next.bytes() <= spare),
        };
        let total: u64 = wanted.iter().map(|chunk| chunk.bytes()).sum();
        let is_spare = job.kind == JobKind::Spare;
        let refused = total > spare || (wanted.is_empty() && there > 0 && !is_spare);
        let nothing = is_spare && wanted.is_empty();
        // If the governor asks, the card is short. Then no take on that card goes on, even if no
        // chunk of the card can be given back.
        if job.only.is_some() || !(refused || nothing) {
            self.overrule_takes(job);
        }
        if refused {
            let asked = ByteSize(job.bytes.unwrap_or(there));
            let seen = if spare == 0 {
                format!("the device of {device} needs all that its stores hold")
            } else {
                format!(
                    "the stores hold only {} more than the device of {device} needs: ask for less",
                    ByteSize(spare)
                )
            };
            return Err(unmoved(format!("cannot give back {asked}: {seen}; {MORE_ROOM}")));
        }
        if job.only.is_none() && job.bytes.is_none() && job.kind != JobKind::Spare {
            let mut away = self.chunks(ChunkState::GivenBack, None);
            if job.kind == JobKind::Sleep {
                // The governor may take no chunk before the machine has slept, and never one that a
                // client gave back.
                away.retain(|it| it.note.unasked);
                self.note(&away, |note| Note { asleep: true, ..note });
            } else {
                // The client asked for all of the memory. So chunks that had been given back
                // already also count as given back by the client.
                self.note(&away, |_| Note::default());
            }
        }
        job.reach.total_bytes.store(total, Ordering::Relaxed);
        self.promotion.end();
        let before = self.pool.status().moved_out;
        let trouble = self.empty_all(job, wanted);
        let given = job.reach.bytes.load(Ordering::Relaxed);
        let seconds = (self.clock.now() - began).as_secs_f64();
        self.given_back.add(given, seconds);
        let pages = self.pool.status().moved_out.wrapping_sub(before);
        let moved = Moved { bytes: given, left_bytes: 0, pages, seconds };
        let asked = if job.kind == JobKind::Spare { total } else { job.bytes.map_or(there, |_| total) };
        match trouble {
            _ if given >= asked => Ok(moved),
            Some(trouble) => {
                Err(unmoved(format!("gave back {} of {}: {trouble}", ByteSize(given), ByteSize(asked))))
            }
            None => Err(unmoved(format!(
                "gave back {} of {}: the rest is needed to hold the device of {device}; {MORE_ROOM}",
                ByteSize(given),
                ByteSize(asked)
            ))),
        }
    }

    pub(super) fn note(&self, chunks: &[Chunk], note: impl Fn(Note) -> Note) {
        chunks.iter().for_each(|it| self.pool.note(it.store, &[it.chunk], note(it.note)));
    }

    /// Closes all `chunks`, then empties them with every thread. If a chunk could not be given
    /// back, returns the reason.
    fn empty_all(self: &Arc<Self>, job: &Arc<Job>, chunks: Vec<Chunk>) -> Option<String> {
        for (at, store) in self.pool.stores().enumerate() {
            let of_store: Vec<u32> = chunks.iter().filter(|it| it.store == at).map(|it| it.chunk).collect();
            if let Err(error) = self.pool.begin_give_back(at, &of_store) {
                let closed = chunks.iter().filter(|chunk| chunk.store < at);
                closed.for_each(|chunk| self.pool.cancel_give_back(chunk.store, chunk.chunk));
                return Some(format!("{}: {error}", store.name()));
            }
        }
        self.note(&chunks, |_| Note { unasked: job.only.is_some(), asleep: job.kind == JobKind::Sleep });
        let threads = self.movers.len();
        let list = Arc::new(List {
            left: chunks.iter().map(|_| AtomicU32::new(threads as u32)).collect(),
            chunks,
            next: AtomicUsize::new(0),
            job: Arc::clone(job),
            threads,
            trouble: Mutex::new(None),
        });
        for thread in 1..threads {
            let help = Help { item: Item::new(), workers: Arc::clone(self), thread, list: Arc::clone(&list) };
            self.queues()[thread].schedule(&Arc::new(help));
        }
        self.empty(0, &list);
        for queue in &self.queues()[1..] {
            queue.flush();
        }
        // The daemon stops, so no thread came to these chunks.
        for chunk in &list.chunks {
            self.pool.cancel_give_back(chunk.store, chunk.chunk);
        }
        list.trouble.lock().unwrap_or_else(PoisonError::into_inner).take()
    }

    /// Empties one part of a chunk after the other, until none is left. The thread that empties the
    /// last part of a chunk also gives back the chunk's memory.
    fn empty(&self, thread: usize, list: &List) {
        let mut mover = self.mover(thread);
        let mut pace = Pace::of(list.threads, &*self.clock);
        let Reach { bytes, pages, .. } = &list.job.reach;
        let mut goes_on = |moved: u32| {
            pages.fetch_add(moved.into(), Ordering::Relaxed);
            pace.step(moved);
            !self.is_stopping()
        };
        while !self.is_stopping() {
            let next = list.next.fetch_add(1, Ordering::Relaxed);
            let (at, part) = (next / list.threads, (next % list.threads) as u32);
            let Some(chunk) = list.chunks.get(at) else { return };
            // A page that cannot be moved is found again when the chunk is finished, and reported
            // then.
            let (Chunk { store, chunk: number, .. }, parts) = (*chunk, list.threads as u32);
            let _ = drive(
                &mut mover,
                self.clock(),
                Task::MoveOut { store, chunk: number, part: (part, parts) },
                &mut goes_on,
            );
            if list.left[at].fetch_sub(1, Ordering::AcqRel) > 1 || self.is_stopping() {
                continue;
            }
            match drive(&mut mover, self.clock(), Task::GiveBack { store, chunk: number }, &mut goes_on) {
                Ok(_) => {
                    bytes.fetch_add(chunk.bytes(), Ordering::Relaxed);
                }
                Err(error) => {
                    let store = self.pool.stores().nth(chunk.store).map_or("", |store| store.name());
                    let what = format!("chunk {} of {store} stays: {}", chunk.chunk, chain(&error));
                    list.trouble.lock().unwrap_or_else(PoisonError::into_inner).get_or_insert(what);
                }
            }
        }
    }
}

/// The member on which a chunk lies.
fn member(store: &dyn Store, chunk: u32) -> u32 {
    store.reclaim().map_or(0, |it| store.member(Slot(chunk * it.chunk_slots())))
}

/// Returns chunks from the front of `chunks`, and stops before the first one for which `more` is
/// false. `more` gets the total bytes of all chunks before, and then the chunk in question.
pub(super) fn upto(chunks: &[Chunk], more: impl Fn(u64, &Chunk) -> bool) -> Vec<Chunk> {
    let mut sum = 0;
    let take = |chunk: &&Chunk| {
        let goes_on = more(sum, chunk);
        sum += chunk.bytes();
        goes_on
    };
    chunks.iter().take_while(take).copied().collect()
}

/// Returns chunks that fit into `room` bytes together: the largest ones first, and of these the
/// first ones of `chunks`.
fn fitting(mut chunks: Vec<Chunk>, room: u64) -> Vec<Chunk> {
    chunks.sort_by_key(|chunk| std::cmp::Reverse(chunk.slots));
    let mut left = room;
    chunks.retain(|chunk| {
        let fits = chunk.bytes() <= left;
        left -= if fits { chunk.bytes() } else { 0 };
        fits
    });
    chunks
}

fn bytes(slots: u32) -> u64 {
    u64::from(slots) * PAGE_SIZE as u64
}

#[cfg(test)]
pub mod tests {
    use super::super::governor::Governor;
    use super::*;
    use crate::environment::tests::{Quick, quiet};
    use std::time::Duration;
    use weir_core::PageNo;
    use weir_store::{Fault, Host, OpenError, Progress, Reclaim, Sim, SimUrl, State};
    use weir_volume::{Config, Volume};

    const MIB: u64 = 1 << 20;
    pub const CHUNK: u64 = 4 * MIB;
    pub const CARD: Card = Card { store: 0, card: 0 };

    /// A store of four chunks on a card.
    #[derive(Debug)]
    struct OnCard {
        sim: Sim,
        owner: Arc<Owner>,
    }

    /// The owner of a card, as a test plays it.
    #[derive(Debug, Default)]
    pub struct Owner {
        pub free: AtomicU64,
        /// The card does not report its free memory.
        silent: AtomicBool,
        lost: AtomicBool,
        /// Runs while the next chunk is taken.
        happens: Mutex<Option<Happens>>,
    }

    struct Happens(Box<dyn FnOnce() + Send>);

    impl std::fmt::Debug for Happens {
        fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
            f.write_str("Happens")
        }
    }

    impl Owner {
        /// Has `what` happen while the next chunk is taken.
        pub fn when_taken(&self, what: impl FnOnce() + Send + 'static) {
            *self.happens.lock().expect("no panic") = Some(Happens(Box::new(what)));
        }
    }

    impl Store for OnCard {
        fn name(&self) -> &str {
            "on-card"
        }

        fn slots(&self) -> u32 {
            self.sim.slots()
        }

        fn lane(&self, depth: usize) -> Result<Box<dyn weir_store::Lane>, OpenError> {
            self.sim.lane(depth)
        }

        fn state(&self, member: u32) -> State {
            self.sim.state(member)
        }

        fn unfit_for_swap(&self) -> Option<String> {
            None
        }

        fn reclaim(&self) -> Option<&dyn Reclaim> {
            Some(self)
        }
    }

    impl Reclaim for OnCard {
        fn chunk_slots(&self) -> u32 {
            self.sim.chunk_slots()
        }

        fn release(&self, chunk: u32) -> Result<(), Fault> {
            self.owner.free.fetch_add(CHUNK, Ordering::Relaxed);
            self.sim.release(chunk)
        }

        fn take(&self, chunk: u32) -> Result<(), Fault> {
            if self.owner.lost.load(Ordering::Relaxed) {
                return Err(Fault::Lost);
            }
            if let Some(Happens(what)) = self.owner.happens.lock().expect("no panic").take() {
                what();
            }
            let left = |free: u64| free.checked_sub(CHUNK);
            self.owner
                .free
                .fetch_update(Ordering::Relaxed, Ordering::Relaxed, left)
                .map_err(|_| Fault::Full)?;
            self.sim.take(chunk)
        }

        fn headroom(&self, _member: u32) -> Option<Headroom> {
            let (free, floor, spare) = (self.owner.free.load(Ordering::Relaxed), MIB, 2 * MIB);
            let says = !self.owner.silent.load(Ordering::Relaxed);
            let (total, display, chunk) = (64 * MIB, false, CHUNK);
            says.then_some(Headroom { free, total, display, floor, spare, chunk })
        }
    }

    /// Workers over a device of `pages` pages. The store below the card has room for all pages but
    /// `less`.
    pub fn workers_of(pages: u32, less: u32) -> (Arc<Workers>, Arc<Owner>) {
        workers_in(pages, less, &quiet())
    }

    fn workers_in(pages: u32, less: u32, environment: &Environment) -> (Arc<Workers>, Arc<Owner>) {
        let owner = Arc::new(Owner { free: AtomicU64::new(2 * MIB), ..Owner::default() });
        let config = Config { pages, lanes: 1 + super::super::lanes(environment.processors), depth: 4 };
        let url = SimUrl { size: ByteSize(4 * CHUNK), chunk: Some(ByteSize(CHUNK)), ..SimUrl::default() };
        let first = OnCard { sim: Sim::open(url).expect("memory"), owner: Arc::clone(&owner) };
        let below = Host::new(config.slots() - less).expect("memory");
        let volume = Volume::create(config, vec![Arc::new(first), Arc::new(below)]).expect("a volume");
        (Workers::start(&volume, &[true, false], environment).expect("threads"), owner)
    }

    pub fn workers() -> (Arc<Workers>, Arc<Owner>) {
        workers_of(64, 0)
    }

    pub fn refused(workers: &Arc<Workers>, kind: JobKind) -> String {
        Job::new(workers, kind, None).run_on(workers, &mut |_| {}).expect_err("refused").to_string()
    }

    pub fn ask(workers: &Arc<Workers>, kind: JobKind, bytes: Option<u64>) -> Moved {
        Job::new(workers, kind, bytes).run_on(workers, &mut |_| {}).expect("it is done")
    }

    #[test]
    fn after_a_sleep_memory_is_where_it_was_and_what_was_given_back_by_hand_stays_away() {
        let (workers, _) = workers();
        ask(&workers, JobKind::GiveBack, Some(CHUNK));
        let governed = Job::governed(&workers, JobKind::GiveBack, CHUNK, CARD).run_on(&workers, &mut |_| {});
        assert_eq!(governed.expect("it is done").bytes, CHUNK);
        assert_eq!(workers.chunk_counts(CARD), (2, 1));
        // Two clients may ask for the same sleep. The second request finds nothing left to give
        // back.
        assert_eq!([0; 2].map(|_| ask(&workers, JobKind::Sleep, None).bytes), [2 * CHUNK, 0]);
        assert_eq!(workers.chunk_counts(CARD), (0, 0), "the governor takes nothing meanwhile");
        let woken = ask(&workers, JobKind::Wake, None);
        assert_eq!((woken.bytes, woken.left_bytes), (2 * CHUNK, 0));
        assert_eq!(workers.chunk_counts(CARD), (2, 1));
        assert_eq!(ask(&workers, JobKind::Wake, None).bytes, 0, "once");
        assert_eq!(ask(&workers, JobKind::Take, None).bytes, 2 * CHUNK);
        workers.stop();
    }

    #[test]
    fn two_governors_in_one_process_go_by_a_clock_each() {
        let until = |what: &str, done: &dyn Fn() -> bool| {
            let begun = Instant::now();
            while !done() {
                assert!(begun.elapsed() < Duration::from_secs(60), "{what}");
                std::thread::yield_now();
            }
        };
        let quick = Quick::new();
        let run = |clock: Arc<dyn Clock>| {
            let environment = Environment { clock, ..quiet() };
            let (workers, owner) = workers_in(64, 0, &environment);
            let governor = Governor::start(&workers, &environment.log).expect("a thread").expect("a card");
            (workers, owner, governor)
        };
        let (first, owner, governor) = run(Arc::clone(&quick) as _);
        // The second governor's clock stands still, so that governor must give nothing back.
        let (second, _, still) = run(Arc::new(Still(Instant::now())));
        until("a chunk is kept for the owner", &|| owner.free.load(Ordering::Relaxed) >= MIB);
        // Read the clock before the memory is given back: it advances while this thread waits.
        let given = quick.passed();
        owner.free.store(0, Ordering::Relaxed);
        until("the floor is kept", &|| owner.free.load(Ordering::Relaxed) >= MIB);
        owner.free.store(32 * MIB, Ordering::Relaxed);
        until("all of it is lent again", &|| first.chunk_counts(CARD) == (4, 0));
        assert!(quick.passed() - given >= Duration::from_secs(5), "only after a quiet while");
        assert_eq!(second.chunk_counts(CARD), (4, 0));
        for (workers, governor) in [(first, governor), (second, still)] {
            workers.stop();
            governor.stop();
        }
    }

    /// A clock that does not advance.
    #[derive(Debug)]
    struct Still(Instant);

    impl Clock for Still {
        fn now(&self) -> Instant {
            self.0
        }

        fn sleep(&self, _: Duration) {}

        fn wait(&self, fds: &mut [rustix::event::PollFd<'_>], _: Duration) {
            let _ = rustix::event::poll(fds, None);
        }
    }

    #[test]
    fn what_a_card_cannot_spare_after_a_sleep_is_left_to_the_governor() {
        let (workers, owner) = workers();
        assert_eq!(ask(&workers, JobKind::Sleep, None).bytes, 4 * CHUNK);
        // Before Weir takes memory again, the card's owner takes all but one chunk.
        owner.free.store(CHUNK + 2 * MIB, Ordering::Relaxed);
        let woken = ask(&workers, JobKind::Wake, None);
        assert_eq!((woken.bytes, woken.left_bytes), (CHUNK, 3 * CHUNK));
        assert!(owner.free.load(Ordering::Relaxed) >= MIB, "the floor is kept");
        assert_eq!(workers.chunk_counts(CARD), (1, 3));
        workers.stop();
    }

    #[test]
    fn a_card_that_did_not_survive_the_sleep_is_told_of() {
        let (workers, owner) = workers();
        ask(&workers, JobKind::Sleep, None);
        owner.lost.store(true, Ordering::Relaxed);
        let why = refused(&workers, JobKind::Wake);
        assert!(why.contains("no longer holds"), "{why}");
        workers.stop();
    }

    #[test]
    fn what_no_governor_looks_after_is_away_for_a_sleep_until_it_is_taken() {
        let (workers, owner) = workers();
        owner.silent.store(true, Ordering::Relaxed);
        ask(&workers, JobKind::Sleep, None);
        owner.free.store(CHUNK, Ordering::Relaxed);
        let why = refused(&workers, JobKind::Wake);
        assert!(
            why.contains("has no more now") && why.contains("end what uses it, then weir take --sleep"),
            "{why}"
        );
        owner.free.store(4 * CHUNK, Ordering::Relaxed);
        assert_eq!(ask(&workers, JobKind::Wake, None).bytes, 3 * CHUNK);
        workers.stop();
    }

    #[test]
    fn a_sleep_that_is_refused_takes_nothing_from_the_governor() {
        // The store has one chunk more than the device needs.
        let chunk_pages = (CHUNK / PAGE_SIZE as u64) as u32;
        let (workers, _) = workers_of(4 * chunk_pages, 3 * chunk_pages);
        let governed = Job::governed(&workers, JobKind::GiveBack, CHUNK, CARD).run_on(&workers, &mut |_| {});
        assert_eq!(governed.expect("it is done").bytes, CHUNK);
        refused(&workers, JobKind::Sleep);
        assert_eq!(workers.chunk_counts(CARD), (3, 1));
        workers.stop();
    }

    #[test]
    fn a_refused_give_back_names_what_all_volumes_need() {
        let mut config = Config { pages: 1, lanes: super::super::lanes(quiet().processors), depth: 4 };
        let url = SimUrl { size: ByteSize(4 * CHUNK), chunk: Some(ByteSize(CHUNK)), ..SimUrl::default() };
        config.pages = (4 * CHUNK / PAGE_SIZE as u64) as u32 - config.slack();
        let store = Sim::open(url).expect("memory");
        let pool = Pool::create(config, vec![Arc::new(store)]).expect("a pool");
        let [own, _other] = [1, config.pages - 1].map(|pages| pool.volume(pages).expect("room"));
        let workers = Workers::start(&own, &[true], &quiet()).expect("threads");
        let needs = format!("the device of {} needs all", ByteSize(bytes(config.pages)));
        let why = refused(&workers, JobKind::GiveBack);
        assert!(why.contains(&needs), "{why}");
        workers.stop();
    }

    #[test]
    fn what_no_volume_needs_is_given_back_by_whole_chunks_and_the_small_last_one_is_not_preferred() {
        const PAGE: [u8; PAGE_SIZE] = [7; PAGE_SIZE];
        // The store ends with a small chunk, for the slack.
        let mut config = Config { pages: 1, lanes: 2 + super::super::lanes(quiet().processors), depth: 4 };
        let chunk = (CHUNK / PAGE_SIZE as u64) as u32;
        config.pages = 4 * chunk;
        let size = ByteSize(bytes(config.slots()));
        let store = Sim::open(SimUrl { size, chunk: Some(ByteSize(CHUNK)), ..SimUrl::default() });
        let pool = Pool::create(config, vec![Arc::new(store.expect("memory"))]).expect("a pool");
        let [first, second] = [2 * chunk, 2 * chunk].map(|pages| pool.volume(pages).expect("room"));
        let workers = Workers::start(&pool, &[true], &quiet()).expect("threads");
        assert_eq!(ask(&workers, JobKind::Spare, None).bytes, 0, "all of it is needed");
        let mut lanes = [&first, &second].map(|volume| volume.lane().expect("a lane"));
        for page in 0..2 * chunk {
            for lane in &mut lanes {
                assert_eq!(lane.write(0, PageNo(page), &PAGE), Progress::Done(Ok(())));
                lane.submit();
            }
        }
        let [of_first, mut lane] = lanes;
        drop(of_first);
        pool.close_lanes(Instant::now());
        let mut removal = first.shrink(0, |_| Ok(())).expect("nobody has it");
        while !workers.mover(0).remove(&mut removal, chunk) {}
        drop(removal);
        assert_eq!(ask(&workers, JobKind::Spare, None).bytes, 2 * CHUNK);
        assert_eq!(ask(&workers, JobKind::Spare, None).bytes, 0, "the small chunk has the slack");
        let mut found = [0; PAGE_SIZE];
        for page in 0..2 * chunk {
            assert_eq!(lane.read(page, PageNo(page), &mut found), Progress::Done(Ok(())));
            assert!(found == PAGE, "page {page}");
        }
        ask(&workers, JobKind::Take, Some(1));
        assert_eq!(pool.free_pages(), chunk);
        let _third = pool.volume(chunk).expect("the chunk that was taken has room for it");
        assert_eq!(ask(&workers, JobKind::Spare, None).bytes, 0);
        workers.stop();
    }

    #[test]
    fn whoever_wants_all_of_it_while_the_machine_sleeps_has_it_after() {
        let (workers, _) = workers();
        ask(&workers, JobKind::Sleep, None);
        ask(&workers, JobKind::GiveBack, None);
        assert_eq!(ask(&workers, JobKind::Wake, None).bytes, 0);
        assert_eq!(workers.chunk_counts(CARD), (0, 0));
        workers.stop();
    }

    const CHUNK_SLOTS: u32 = 1024;

    /// A store on two cards. Only the second reports its free memory, as an AMD card beside an
    /// NVIDIA card.
    #[derive(Debug)]
    struct Mixed(Host);

    impl Store for Mixed {
        fn name(&self) -> &str {
            "mixed"
        }

        fn slots(&self) -> u32 {
            self.0.slots()
        }

        fn lane(&self, depth: usize) -> Result<Box<dyn weir_store::Lane>, OpenError> {
            self.0.lane(depth)
        }

        fn members(&self) -> u32 {
            2
        }

        fn member(&self, slot: Slot) -> u32 {
            u32::from(slot.0 / CHUNK_SLOTS == 3)
        }

        fn state(&self, _member: u32) -> State {
            State::Online
        }

        fn unfit_for_swap(&self) -> Option<String> {
            None
        }

        fn reclaim(&self) -> Option<&dyn Reclaim> {
            Some(self)
        }
    }

    impl Reclaim for Mixed {
        fn chunk_slots(&self) -> u32 {
            CHUNK_SLOTS
        }

        fn release(&self, _chunk: u32) -> Result<(), Fault> {
            Ok(())
        }

        fn take(&self, _chunk: u32) -> Result<(), Fault> {
            Ok(())
        }

        fn headroom(&self, member: u32) -> Option<Headroom> {
            let second = Headroom { free: 0, total: 1, display: false, floor: 1, spare: 1, chunk: 1 };
            (member == 1).then_some(second)
        }
    }

    #[test]
    fn a_card_that_says_nothing_does_not_give_back_for_one_that_does() {
        let lanes = super::super::lanes(quiet().processors);
        let config = Config { pages: 64, lanes, depth: 4 };
        let store = Mixed(Host::new(4 * CHUNK_SLOTS).expect("memory"));
        let volume = Volume::create(config, vec![Arc::new(store)]).expect("a volume");
        let workers = Workers::start(&volume, &[true], &quiet()).expect("threads");
        let cards: Vec<Card> = workers.cards().collect();
        assert_eq!(cards, [Card { store: 0, card: 1 }]);
        let held = workers.chunks(ChunkState::Held, Some(cards[0]));
        assert_eq!(held.iter().map(|chunk| chunk.chunk).collect::<Vec<_>>(), [3]);
        workers.stop();
    }
}
