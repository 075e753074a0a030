//! The late parts of a card. Its first operations do not need them, so they are opened later.
//!
//! When a daemon takes over, programs that sleep in page faults wait for it. To serve a page, a
//! lane only needs the mapping of the page's chunk. The late parts are CUDA's context, CUDA's
//! import of every chunk, the resident kernel, and NVML. These parts take longer to open than
//! everything else. So a thread opens them while lanes already serve through the window. Each lane
//! gets its parts through a [`PartsCell`], and takes them between two operations, without
//! allocating.
//!
//! The opening of these parts begins once all chunks are mapped. To begin earlier would gain
//! nothing: in most of the calls that map chunks or open these parts, the driver serves one thread
//! at a time.

use super::Drivers;
use super::engine::{BatchLane, Context, Which};
use super::gpu::{Gpu, Owner};
use super::lane::Engine;
use super::options::VramUrl;
use super::ring::{Ring, RingLane};
use super::setup;
use super::table::{Direction, Path, Table};
use crate::{Joined, Tell};
use std::cell::UnsafeCell;
use std::fmt;
use std::io;
use std::mem;
use std::sync::atomic::{AtomicU8, Ordering};
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError, Weak};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};
use weir_core::swap_safety::{self, Children};

/// Longest time that the closing of a store waits for a driver that is being opened.
const END_LIMIT: Duration = Duration::from_secs(10);

/// The opening of one card's late parts, as far as it has come.
#[derive(Default)]
pub struct Late {
    progress: Mutex<Progress>,
    /// Notified when the card's other users are known, and when the opening is over.
    bell: Condvar,
}

#[derive(Default)]
struct Progress {
    /// Whether the opening has asked NVML about the card's other users.
    has_owner: bool,
    /// Whether no lane waits any more: each lane has its parts, or no parts will come.
    settled: bool,
    over: Option<Joined>,
    /// Lanes that wait for their parts, with the depth of each.
    waiting: Vec<(usize, Arc<PartsCell>)>,
    tell: Vec<Tell>,
    thread: Option<JoinHandle<()>>,
}

/// The settings by which the late parts of a card are opened.
pub struct Opening {
    pub options: VramUrl,
    pub drivers: Drivers,
    /// The costs of all paths, including late ones that may fail to open.
    pub costs: Table,
    /// The time when the opening of the card began.
    pub since: Instant,
}

impl Opening {
    /// Whether to open CUDA: the costs show whether the earlier daemon had it.
    pub fn wants_cuda(&self) -> bool {
        self.costs.get(Path::Engine, Direction::Read).is_some()
    }
}

impl Late {
    fn lock(&self) -> MutexGuard<'_, Progress> {
        self.progress.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Starts a thread that opens the late parts of `gpu`, while `gpu` serves pages already.
    ///
    /// # Errors
    /// Fails when no thread can be started.
    pub fn begin(gpu: &Arc<Gpu>, opening: Opening) -> io::Result<()> {
        let Some(late) = &gpu.late else { return Ok(()) };
        let (weak, its) = (Arc::downgrade(gpu), Arc::clone(late));
        let url = gpu.url().to_owned();
        let open = move || {
            // The new thread locks its memory if its starter did. Programs wait for memory while it
            // works, so its own memory must not be swapped out.
            if swap_safety::locks_all_memory() {
                let _ = swap_safety::reach_reserves(Children::Ordinary);
            }
            let mut stages = Vec::new();
            let missing = its.open(&weak, &opening, &mut stages).err();
            if weak.upgrade().is_none_or(|gpu| gpu.is_stopping()) {
                // The card is being closed, so drop the callbacks: nobody is told any more whether
                // its late parts are open.
                its.lock().tell.clear();
            }
            its.finish(&Joined { store: url, stages, missing, after: opening.since.elapsed() });
        };
        let mut progress = late.lock();
        progress.thread = Some(std::thread::Builder::new().name("weir-vram-open".to_owned()).spawn(open)?);
        Ok(())
    }

    /// A cell for the parts of a lane that is opened now; `None` if no parts will come.
    pub fn cell(&self, depth: usize) -> Option<Arc<PartsCell>> {
        let mut progress = self.lock();
        if progress.settled {
            return None;
        }
        let cell = Arc::new(PartsCell::default());
        progress.waiting.push((depth, Arc::clone(&cell)));
        Some(cell)
    }

    /// Waits until the card's other users are known.
    pub fn wait_for_owner(&self) {
        let waits = |progress: &mut Progress| !progress.has_owner && progress.over.is_none();
        drop(self.bell.wait_timeout_while(self.lock(), END_LIMIT, waits));
    }

    /// Calls `tell` when the late parts are open, or have failed to open. If that is so already,
    /// calls it at once.
    pub fn when_over(&self, tell: Tell) {
        let mut progress = self.lock();
        match &progress.over {
            None => progress.tell.push(tell),
            Some(joined) => {
                let joined = joined.clone();
                drop(progress);
                tell(&joined);
            }
        }
    }

    /// Waits until the opening is over. Once the card is `stopping`, the opening is over soon. But
    /// a driver may never answer, so the wait is limited to `END_LIMIT`.
    pub fn end(&self) {
        let waits = |progress: &mut Progress| progress.over.is_none();
        let waited = self.bell.wait_timeout_while(self.lock(), END_LIMIT, waits);
        let (mut progress, _) = waited.unwrap_or_else(PoisonError::into_inner);
        let thread = progress.thread.take().filter(|_| progress.over.is_some());
        drop(progress);
        if let Some(thread) = thread {
            let _ = thread.join();
        }
    }

    fn finish(&self, joined: &Joined) {
        let mut progress = self.lock();
        (progress.settled, progress.has_owner) = (true, true);
        progress.waiting.clear();
        progress.over = Some(joined.clone());
        let tell = mem::take(&mut progress.tell);
        drop(progress);
        self.bell.notify_all();
        tell.iter().for_each(|tell| tell(joined));
    }

    /// Opens the late parts. The error says which part is missing, and what follows from that.
    /// While a driver is being opened, this thread holds no reference to the card, so that the card
    /// can close.
    fn open(
        &self,
        gpu: &Weak<Gpu>,
        opening: &Opening,
        stages: &mut Vec<(&'static str, Duration)>,
    ) -> Result<(), String> {
        let mut since = Instant::now();
        let mut stage = |name| stages.push((name, mem::replace(&mut since, Instant::now()).elapsed()));
        let known = |gpu: Arc<Gpu>| (gpu.uuid, gpu.owner.get().is_some());
        let Some((uuid, is_known)) = gpu.upgrade().map(known) else { return Ok(()) };
        let owner = (!is_known).then(|| Owner::look(&opening.options, &opening.drivers, uuid));
        let goes_on = |gpu: Arc<Gpu>| {
            let _ = owner.map(|owner| gpu.owner.set(owner));
            opening.wants_cuda() && !gpu.is_stopping()
        };
        let goes_on = gpu.upgrade().is_some_and(goes_on);
        self.lock().has_owner = true;
        self.bell.notify_all();
        stage("management");
        if !goes_on {
            return Ok(());
        }
        let cuda = Context::open(&opening.drivers.cuda, Which::Uuid(uuid), opening.options.batch_copies())
            .map_err(|why| format!("CUDA: {why}"));
        let Some(gpu) = gpu.upgrade() else { return Ok(()) };
        stage("cuda");
        let joined = cuda.and_then(|cuda| self.join(&gpu, &cuda, opening, &mut stage));
        if joined.is_err() {
            gpu.chunks().without_cuda();
        }
        let _ = gpu.table.set(opening.costs.only(|path| gpu.has(path)));
        gpu.wake();
        joined.or_else(|why| if gpu.is_stopping() { Ok(()) } else { Err(why) })
    }

    /// Opens CUDA's parts for the card and all its lanes. If one of them fails, opens none.
    fn join(
        &self,
        gpu: &Arc<Gpu>,
        cuda: &Arc<Context>,
        opening: &Opening,
        stage: &mut impl FnMut(&'static str),
    ) -> Result<(), String> {
        let import = || {
            (0..gpu.chunks().count()).try_for_each(|chunk| match gpu.is_stopping() {
                // The card is closing, so end the import. The caller ignores an error then, so this
                // one needs no text.
                true => Err(String::new()),
                false => gpu.chunks().import(chunk, cuda).map_err(|why| format!("chunk {chunk}: {why}")),
            })
        };
        import()?;
        stage("import");
        // If the rings cannot be made, go on without them: the card is slower, but works.
        let display = gpu.owner.get().is_some_and(|owner| owner.display);
        let ring =
            setup::ring(&opening.options, gpu.source(), cuda, display, gpu.chunks().hot()).unwrap_or(None);
        stage("ring");
        let mut made: Vec<(Arc<PartsCell>, Parts)> = Vec::new();
        let mut progress = loop {
            let mut progress = self.lock();
            if progress.waiting.is_empty() {
                break progress;
            }
            let waiting = mem::take(&mut progress.waiting);
            drop(progress);
            for (depth, cell) in waiting {
                match Parts::open(cuda, ring.as_ref(), depth) {
                    Ok(parts) => made.push((cell, parts)),
                    Err(why) => {
                        made.into_iter().for_each(|(_, parts)| parts.close(ring.as_ref()));
                        return Err(format!("lane: {why}"));
                    }
                }
            }
        };
        {
            // Import the chunks that were taken since the others were imported.
            let _no_other = gpu.taking();
            if let Err(why) = import() {
                drop(progress);
                made.into_iter().for_each(|(_, parts)| parts.close(ring.as_ref()));
                return Err(why);
            }
            gpu.source().add_cuda(cuda);
            if let Some(ring) = &ring {
                let _ = gpu.ring.set(Arc::clone(ring));
            }
        }
        progress.settled = true;
        drop(progress);
        for (cell, parts) in made {
            if let Some(parts) = cell.fill(parts) {
                parts.close(ring.as_ref());
            }
        }
        gpu.chunks().hot().gate().joined.store(true, Ordering::Release);
        stage("lanes");
        Ok(())
    }
}

impl fmt::Debug for Late {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Late").field("over", &self.lock().over).finish_non_exhaustive()
    }
}

/// A lane's parts besides the window. The fields are dropped in this order.
pub struct Parts {
    pub ring: Option<RingLane>,
    pub engine: Option<Engine>,
}

impl Parts {
    fn open(cuda: &Arc<Context>, ring: Option<&Arc<Ring>>, depth: usize) -> Result<Self, String> {
        let ring_lane = match ring {
            Some(ring) => ring.lane(depth).map_err(|fault| fault.to_string())?,
            None => None,
        };
        let _paused = ring.map(|ring| ring.pause());
        let engine = BatchLane::new(cuda, depth.max(1)).map_err(|error| error.to_string())?;
        Ok(Parts { ring: ring_lane, engine: Some(Engine::Cuda(engine)) })
    }

    /// Closes the parts while the ring is paused. Closing unmaps pinned memory, and a driver does
    /// that only once no resident kernel is on the card.
    pub fn close(self, ring: Option<&Arc<Ring>>) {
        let Parts { ring: lane, engine } = self;
        drop(lane);
        let paused = ring.map(|ring| ring.pause());
        drop(engine);
        drop(paused);
    }
}

const EMPTY: u8 = 0;
const FULL: u8 = 1;
const CLOSED: u8 = 2;

/// A cell by which a lane gets its late parts from the thread that opens them. The lane moves the
/// parts out, and keeps the empty cell until it closes: an I/O thread may not free memory.
pub struct PartsCell {
    state: AtomicU8,
    parts: UnsafeCell<Option<Parts>>,
}

// SAFETY: the parts may move between threads. The filling thread accesses them only while the state
// is EMPTY, and the lane only after it has seen FULL.
unsafe impl Sync for PartsCell {}
// SAFETY: the parts may move between threads, and the state orders the accesses.
unsafe impl Send for PartsCell {}

impl Default for PartsCell {
    fn default() -> Self {
        PartsCell { state: AtomicU8::new(EMPTY), parts: UnsafeCell::new(None) }
    }
}

impl PartsCell {
    /// Puts a lane's parts into its cell, once. Returns them if the lane has closed the cell.
    fn fill(&self, parts: Parts) -> Option<Parts> {
        // SAFETY: the lane does not access the parts before FULL, and only one thread fills the
        // cell.
        let place = unsafe { &mut *self.parts.get() };
        *place = Some(parts);
        match self.state.compare_exchange(EMPTY, FULL, Ordering::AcqRel, Ordering::Acquire) {
            Ok(_) => None,
            Err(_) => place.take(),
        }
    }

    /// Takes the parts of the cell. `None`: they have not come yet. Only the lane that owns the
    /// cell calls this.
    pub fn take(&self) -> Option<Parts> {
        if self.state.load(Ordering::Acquire) != FULL {
            return None;
        }
        self.close()
    }

    /// Closes the cell, because its lane is dropped or has taken its parts. Returns parts that the
    /// lane has not taken.
    pub fn close(&self) -> Option<Parts> {
        if self.state.swap(CLOSED, Ordering::AcqRel) != FULL {
            return None;
        }
        // SAFETY: the state was FULL, so the filling thread has finished, and only the lane comes
        // here.
        unsafe { (*self.parts.get()).take() }
    }
}
