//! One card as a store: its chunks, its three paths, its state, and the thread that watches it.

use super::chunks::{Chunks, LANES_MAX, Source};
use super::condition::{Death, Turn, xid};
use super::engine::{BatchCopies, Context, Which};
use super::lane::{CutOff, Engine, GpuLane};
use super::late::Late;
use super::mapped::Device;
use super::mapped::copy::Copies;
use super::nvml::Nvml;
use super::options::{PathMode, VramUrl};
use super::ring::{Paused, Ring};
use super::table::{Path, Table};
use super::{Drivers, Trouble, answer_limit, kept};
use crate::{Condition, Fault, Headroom, Keep, OpenError, OpenErrorKind, State, TellChange};
use std::fmt;
use std::io;
use std::os::fd::{AsFd, OwnedFd};
use std::path::Path as FilePath;
use std::sync::atomic::{AtomicBool, AtomicU8, AtomicU64, AtomicUsize, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, OnceLock, PoisonError};
use std::thread::{JoinHandle, Thread};
use std::time::{Duration, Instant};
use weir_core::{ByteSize, PAGE_SIZE};

/// Number of active lanes from which on the window is full of writes: two or three fill an H200's.
pub(super) const CROWD: usize = 3;

pub(super) const ONLINE: u8 = 0;
const DRAINING: u8 = 1;
const LOST: u8 = 2;

/// One card as a store.
pub struct Gpu {
    pub(super) url: String,
    pub(super) uuid: [u8; 16],
    pub(super) path: PathMode,
    pub(super) floor: u64,
    pub(super) owner: OnceLock<Owner>,
    pub(super) chunk_bytes: u64,
    pub(super) slots: u32,
    pub(super) copies: Copies,
    pub(super) table: OnceLock<Table>,
    pub(super) chunks: Chunks,
    pub(super) ring: OnceLock<Arc<Ring>>,
    pub(super) source: Source,
    /// The lock that a thread holds while it takes memory for a chunk. The thread that opens the
    /// late parts holds it too, while it announces that CUDA is open.
    pub(super) taking: Mutex<()>,
    /// The parts of the card that open after the first operations, if there are any.
    pub(super) late: Option<Arc<Late>>,
    /// The stages from the opening to the first operation, with their times.
    pub(super) stages: Vec<(&'static str, Duration)>,
    pub(super) state: AtomicU8,
    /// The last event of the card: its time and its reason.
    pub(super) turn: Mutex<Turn>,
    /// Callbacks that are told of changes of the card's condition.
    pub(super) tell: Mutex<Vec<TellChange>>,
    /// The reason why the card is lost, from the thread that first noticed it.
    pub(super) loss: OnceLock<&'static str>,
    /// Number of lanes that moved pages at the watcher's last look.
    pub(super) busy: AtomicUsize,
    /// The fastest path found for writes of many lanes: one for single pages, one for runs of
    /// neighbours. 0: none was found, so the path is chosen by cost; else the path's number plus 1.
    pub(super) crowd: [AtomicU8; 2],
    pub(super) entered: AtomicU64,
    pub(super) left: AtomicU64,
    pub(super) stopping: AtomicBool,
    pub(super) watcher: Mutex<Option<JoinHandle<()>>>,
    /// The watching thread, for threads that wake it.
    pub(super) watching: OnceLock<Thread>,
    /// The keeper that holds the chunks beyond this process, and this card's number there.
    pub(super) keep: OnceLock<(Arc<dyn Keep>, usize)>,
    /// Whether the pages must outlive this process. Then the store does not clear them when it
    /// closes.
    pub(super) kept: AtomicBool,
}

/// The card's other users, as far as NVML reports them.
pub(super) struct Owner {
    pub nvml: Option<Nvml>,
    /// Whether a display is connected to the card.
    pub display: bool,
    /// Free bytes that are left to the other users.
    pub spare: u64,
}

/// Device memory that Weir never takes, since drivers and desktops need it (nbd-vram has the same
/// figure).
const SPARE: u64 = 1 << 30;
/// Device memory that Weir never takes of a card that drives a display.
const SPARE_DISPLAY: u64 = 3 << 30;

impl Owner {
    pub fn look(options: &VramUrl, drivers: &Drivers, uuid: [u8; 16]) -> Self {
        let nvml = Nvml::open(&drivers.nvml, uuid);
        let display = nvml.as_ref().is_some_and(Nvml::drives_display);
        let spare = options.floor.0.max(if display { SPARE_DISPLAY } else { SPARE });
        Owner { nvml, display, spare }
    }
}

/// A card's counts since the store was opened.
#[derive(Clone, Copy, Default, Debug)]
pub struct Counters {
    /// Pages moved by each path: mapped, engine, ring.
    pub pages: [u64; 3],
    /// Number of chunks that have memory now.
    pub chunks_held: usize,
    /// Times that the resident kernel entered the card.
    pub ring_entered: u64,
    /// Times that the resident kernel left the card.
    pub ring_left: u64,
    /// The card's power, in milliwatts.
    pub power_mw: Option<u32>,
}

impl Gpu {
    /// The costs of the paths, measured when the card was opened.
    pub fn table(&self) -> &Table {
        static NOTHING: OnceLock<Table> = OnceLock::new();
        self.table.get().unwrap_or_else(|| NOTHING.get_or_init(Table::default))
    }

    /// The card's counts so far.
    pub fn counters(&self) -> Counters {
        Counters {
            pages: self.chunks.pages(),
            chunks_held: self.chunks.held(),
            ring_entered: self.entered.load(Ordering::Relaxed),
            ring_left: self.left.load(Ordering::Relaxed),
            power_mw: self.nvml().and_then(Nvml::power_mw),
        }
    }

    /// The card's memory that no process has taken. One call of NVML takes some ten microseconds.
    /// `None` without NVML: then nobody knows what the others use.
    pub fn headroom(&self) -> Option<Headroom> {
        let owner = self.owner.get()?;
        let memory = owner.nvml.as_ref()?.memory()?;
        Some(Headroom {
            free: memory.free,
            total: memory.total,
            display: owner.display,
            floor: self.floor,
            spare: owner.spare,
            chunk: self.chunk_bytes,
        })
    }

    /// NVML; `None` before it is loaded, or where it is missing.
    pub(super) fn nvml(&self) -> Option<&Nvml> {
        self.owner.get()?.nvml.as_ref()
    }

    /// The resident kernel's rings. `None` until they are made, and for good on a card without a
    /// resident kernel.
    fn ring(&self) -> Option<&Arc<Ring>> {
        self.ring.get()
    }

    pub(super) fn source(&self) -> &Source {
        &self.source
    }

    /// Locks out other threads that take memory for a chunk, until the guard is dropped.
    pub(super) fn taking(&self) -> MutexGuard<'_, ()> {
        self.taking.lock().unwrap_or_else(PoisonError::into_inner)
    }

    pub(super) fn is_stopping(&self) -> bool {
        self.stopping.load(Ordering::Acquire)
    }

    /// Exports a descriptor of a chunk's memory, which lives while a descriptor is open; `None` for
    /// a released chunk. A keeper holds it, and the next daemon imports it.
    ///
    /// # Errors
    /// Fails with the driver's error.
    pub fn export(&self, chunk: u32) -> Result<Option<OwnedFd>, Fault> {
        self.chunks.export(chunk as usize).map_err(Trouble::fault)
    }

    /// One line about the card and its paths, for logs.
    pub fn describe(&self) -> String {
        let name = match (&self.source.gpu, self.source.cuda()) {
            (Some(gpu), _) => gpu.card.to_string(),
            (None, Some(cuda)) => format!("{}, not mapped", cuda.name),
            (None, None) => String::new(),
        };
        let paths: Vec<&str> = Path::ALL.into_iter().filter(|&path| self.has(path)).map(Path::name).collect();
        let driver = self.nvml().map_or("unknown", Nvml::driver);
        format!("{name}, driver {driver}, {}, by {}", self.copies.name, paths.join(" and "))
    }

    /// Whether the card has this path.
    pub fn has(&self, path: Path) -> bool {
        match path {
            Path::Mapped => self.source.gpu.as_ref().is_some_and(|gpu| gpu.card.window),
            Path::Engine => {
                self.source.cuda().is_some() || (self.source.gpu.is_some() && !self.has(Path::Mapped))
            }
            Path::Ring => self.ring().is_some() && !self.cuda_is_lost(),
        }
    }

    /// Whether the resident kernel is on the card.
    pub fn ring_is_resident(&self) -> bool {
        self.ring().is_some_and(|ring| ring.is_resident())
    }

    /// Puts the kernel on the card now, whatever the load, for calibration and benchmarks.
    pub fn enter_ring(&self) -> bool {
        let Some(ring) = self.ring() else { return false };
        if ring.enter().is_ok() && ring.is_resident() {
            self.entered.fetch_add(1, Ordering::Relaxed);
        }
        ring.is_resident()
    }

    pub(super) fn leave_ring(&self) {
        if let Some(ring) = self.ring()
            && ring.is_resident()
            && matches!(ring.leave(), Ok(true))
        {
            self.left.fetch_add(1, Ordering::Relaxed);
        }
    }

    pub(super) fn pause_ring(&self) -> Option<Result<Paused<'_>, Fault>> {
        self.ring().map(|ring| ring.pause())
    }

    pub(super) fn chunks(&self) -> &Chunks {
        &self.chunks
    }

    pub(super) fn copies(&self) -> &Copies {
        &self.copies
    }

    pub(super) fn path(&self) -> PathMode {
        self.path
    }

    pub(super) fn busy_lanes(&self) -> usize {
        self.busy.load(Ordering::Relaxed)
    }

    /// Whether CUDA's context has died.
    #[inline]
    pub(super) fn cuda_is_lost(&self) -> bool {
        self.source.dead().is_some()
    }

    /// Decides how lanes continue once CUDA has died, and wakes the watching thread. A caller that
    /// is to wait must pause before it asks again. The thread that kills this process may have a
    /// lower priority, and needs the processor.
    #[cold]
    pub(super) fn without_cuda(&self, now: Instant) -> CutOff {
        let Some(cuda) = self.source.dead() else { return CutOff::ByTheWindow };
        self.alarm();
        if self.has(Path::Mapped) {
            return CutOff::ByTheWindow;
        }
        if self.is_kept() && self.state() != State::Lost && cuda.dead_for(now) < answer_limit() {
            return CutOff::Waits;
        }
        self.lose("CUDA was the only way to it");
        CutOff::Lost(match cuda.death() {
            Some(Death::NoAnswer(_)) => Fault::Timeout,
            _ => Fault::Lost,
        })
    }

    /// Whether another process can reach the card's content once this one has ended.
    pub(super) fn is_kept(&self) -> bool {
        self.kept.load(Ordering::Relaxed) && self.keep.get().is_some()
    }

    /// Marks the card as lost, for every lane.
    pub(super) fn lose(&self, why: &'static str) {
        let _ = self.loss.set(why);
        self.state.store(LOST, Ordering::Relaxed);
        self.chunks.hot().gate().lost.store(true, Ordering::Relaxed);
        self.alarm();
    }

    /// Wakes the watching thread, so that it looks at the card at once.
    pub(super) fn alarm(&self) {
        if let Some(thread) = self.watching.get() {
            thread.unpark();
        }
    }

    /// The card's condition.
    pub fn condition(&self) -> Condition {
        let turn = self.turn.lock().unwrap_or_else(PoisonError::into_inner).clone();
        let ways = Path::ALL.into_iter().filter(|&path| self.has(path)).map(Path::name).collect();
        let mut missing: Vec<(&'static str, String)> = self.source.refused.to_vec();
        if let Some(death) = self.source.dead().and_then(|cuda| cuda.death()) {
            missing.push((Path::Engine.name(), death.to_string()));
        }
        Condition {
            part: self.part(),
            state: self.state(),
            ways,
            missing,
            since: turn.since,
            why: turn.why,
            wants_another_process: self.cuda_is_lost()
                && !self.has(Path::Mapped)
                && self.is_kept()
                && self.state() != State::Lost,
        }
    }

    /// Notes that the card's condition has changed, and why, and calls the callbacks. Only threads
    /// that may wait call this.
    pub(super) fn turn(&self, why: Option<String>) {
        *self.turn.lock().unwrap_or_else(PoisonError::into_inner) = Turn::now(why);
        let tell = self.tell.lock().unwrap_or_else(PoisonError::into_inner).clone();
        let condition = self.condition();
        tell.iter().for_each(|tell| tell(&condition));
    }

    /// Registers `tell`, which is called at each change of the card's condition. If the condition
    /// has changed before, `tell` is also called now.
    pub(super) fn when_changed(&self, tell: &TellChange) {
        self.tell.lock().unwrap_or_else(PoisonError::into_inner).push(Arc::clone(tell));
        let condition = self.condition();
        if condition.why.is_some() {
            tell(&condition);
        }
    }

    /// The card's name with its driver's version.
    fn part(&self) -> String {
        let name = match (&self.source.gpu, self.source.context()) {
            (Some(gpu), _) => gpu.card.to_string(),
            (None, Some(cuda)) => cuda.name.clone(),
            (None, None) => String::new(),
        };
        format!("{name}, driver {}", self.nvml().map_or("unknown", Nvml::driver))
    }

    /// Wakes the watching thread if it sleeps for long. If several lanes try this at once, only one
    /// wakes it.
    #[inline(never)]
    pub(super) fn wake(&self) {
        if self.chunks.hot().gate().asleep.swap(false, Ordering::AcqRel)
            && let Some(thread) = self.watching.get()
        {
            thread.unpark();
        }
    }

    /// The path that was fastest for writes of several lanes at once, in batches.
    pub(super) fn crowd_path(&self, runs: bool) -> Option<Path> {
        let path = self.crowd[usize::from(runs)].load(Ordering::Relaxed).checked_sub(1)?;
        [Path::Mapped, Path::Engine, Path::Ring].into_iter().find(|&it| it as u8 == path)
    }

    /// Opens a lane that has only the mapping.
    pub(super) fn bare_lane(self: &Arc<Self>) -> Option<GpuLane> {
        Some(GpuLane::new(self, self.chunks.open_pin()?, None, None, None))
    }

    /// Number of cards that Vulkan lists. If it lists none, the number that CUDA lists.
    pub(super) fn count(libcuda: &FilePath) -> usize {
        let vulkan = (0..).take_while(|&index| Device::find(index, false, false).is_ok()).count();
        if vulkan > 0 {
            return vulkan;
        }
        (0..)
            .take_while(|&index| {
                Context::open(libcuda, Which::Index(index), BatchCopies { reads: 1, writes: 1 }).is_ok()
            })
            .count()
    }

    /// Opens a lane with room for `depth` operations in flight on each path.
    ///
    /// # Errors
    /// Fails when memory cannot be pinned, or too many lanes are open.
    pub fn lane(self: &Arc<Self>, depth: usize) -> Result<GpuLane, OpenError> {
        let fail = |kind, what: String| OpenError::new(kind, &self.url, what);
        let pin = self.chunks.open_pin().ok_or_else(|| {
            fail(
                OpenErrorKind::InUse,
                format!("{LANES_MAX} lanes are open already, which is the most it can serve"),
            )
        })?;
        if let Some(cell) = self.late.as_ref().and_then(|late| late.cell(depth)) {
            return Ok(GpuLane::new(self, pin, None, None, Some(cell)));
        }
        let opened = (|| {
            // [`Ring::lane`] pauses all rings while it runs. So first open a ring for the lane, if
            // one is free, and only then pause the rings for the engine.
            let ring = match self.ring().filter(|_| !self.cuda_is_lost()) {
                Some(ring) => {
                    ring.lane(depth).map_err(|fault| fail(OpenErrorKind::Io, format!("no ring: {fault}")))?
                }
                None => None,
            };
            let _paused = self.pause_ring();
            let engine = Engine::open(&self.source, depth.max(1));
            let engine = engine.map_err(|error| fail(OpenErrorKind::Io, format!("no lane: {error}")))?;
            Ok((engine, ring))
        })();
        match opened {
            Ok((engine, ring)) => Ok(GpuLane::new(self, pin, engine, ring, None)),
            Err(error) => {
                self.chunks.pin(pin).close();
                Err(error)
            }
        }
    }

    fn release_chunk(&self, chunk: usize) -> Result<(), Trouble> {
        let Some(memory) = self.chunks.withdraw(chunk)? else { return Ok(()) };
        let _paused = self.pause_ring();
        if let Err(error) = memory.clear() {
            // The memory was neither cleared nor freed. So it stays taken until the process ends,
            // and no slot uses it.
            self.chunks.install(chunk, memory);
            return Err(error);
        }
        // The keeper may hold a descriptor of the chunk, which would keep the memory on the card.
        // So tell the keeper to close it. If the call fails, the keeper is gone with its
        // descriptors.
        if let Some((keep, gpu)) = self.keep.get() {
            let _ = keep.let_go(&kept::chunk_name(*gpu, chunk));
        }
        drop(memory);
        Ok(())
    }

    fn note(&self, trouble: Trouble) -> Fault {
        match trouble {
            // The lanes will notice the death of CUDA themselves.
            Trouble::Cuda(error) if error.error.is_sticky() => {
                let _ = self.without_cuda(Instant::now());
            }
            Trouble::Vulkan(error) if error.is_lost() => self.lose("Vulkan lost the device"),
            _ => {}
        }
        trouble.fault()
    }

    /// Number of other processes that use the card. Asking takes milliseconds.
    pub(super) fn others(&self) -> u32 {
        self.nvml().map_or(0, Nvml::others)
    }

    /// Makes the card drain when less than the floor is free on it, and go online again when a
    /// chunk more than the floor is free.
    pub(super) fn mind_headroom(&self) {
        if let Some(headroom) = self.headroom() {
            // The card drains below one limit and is online again above another. They are one chunk
            // apart, so that the state does not change back and forth.
            let state = self.state.load(Ordering::Relaxed);
            let (next, what) = match state {
                ONLINE if headroom.is_short() => (DRAINING, "is below the floor of"),
                DRAINING if headroom.has_recovered() => (ONLINE, "is above the floor again, of"),
                _ => return,
            };
            if self.state.compare_exchange(state, next, Ordering::Relaxed, Ordering::Relaxed).is_ok() {
                let (free, floor) = (ByteSize(headroom.free), ByteSize(self.floor));
                self.turn(Some(format!("free memory of the card, {free}, {what} {floor}")));
            }
        }
    }

    /// Handles the death of CUDA, and reports it. The watching thread calls it once.
    pub(super) fn mind_death(self: &Arc<Self>) {
        let Some(cuda) = self.source.dead() else { return };
        let why = cuda.death().map_or_else(String::new, |death| death.to_string());
        let why = [Some(format!("CUDA is lost: {why}")), xid()].into_iter().flatten().collect::<Vec<_>>();
        // If NVML does not answer either, the card has left the bus, and no other process can reach
        // it. So it is lost at once, and pages in other stores need not wait for it.
        let is_gone = self.nvml().is_some_and(|nvml| nvml.memory().is_none());
        if is_gone && !self.has(Path::Mapped) {
            self.lose("the card does not answer its management library either");
        }
        let _ = self.without_cuda(Instant::now());
        self.turn(Some(why.join("; ")));
        if !self.has(Path::Mapped) {
            return;
        }
        // Operations under way are done again through the window. After that nothing uses the
        // context, and the driver destroys it with all its memory on the card. The driver may take
        // any time for that.
        let since = Instant::now();
        while !self.chunks.is_settled() && since.elapsed() < answer_limit() && !self.is_stopping() {
            std::thread::sleep(Duration::from_millis(1));
        }
        if self.chunks.is_settled() {
            let (gpu, cuda) = (Arc::clone(self), Arc::clone(cuda));
            let _ = std::thread::Builder::new().name("weir-vram-end".to_owned()).spawn(move || {
                cuda.retire();
                gpu.chunks.without_cuda();
            });
        }
    }
}

impl Gpu {
    /// The URL of the card's store.
    pub fn url(&self) -> &str {
        &self.url
    }

    /// Number of slots on the card.
    pub fn slots(&self) -> u32 {
        self.slots
    }

    /// Number of slots in a chunk.
    pub fn chunk_slots(&self) -> u32 {
        (self.chunk_bytes / PAGE_SIZE as u64) as u32
    }

    /// The card's state.
    pub fn state(&self) -> State {
        match self.state.load(Ordering::Relaxed) {
            LOST => State::Lost,
            DRAINING => State::Draining,
            _ => State::Online,
        }
    }

    /// Clears a chunk's memory, and gives it back.
    ///
    /// # Errors
    /// Fails when a lane still uses the chunk, or the card did not clear it. The chunk then keeps
    /// its memory.
    pub fn release(&self, chunk: u32) -> Result<(), Fault> {
        if chunk as usize >= self.chunks.count() {
            return Err(Fault::Io(libc::EINVAL));
        }
        self.release_chunk(chunk as usize).map_err(|trouble| self.note(trouble))
    }

    /// Takes memory for a chunk that was released.
    ///
    /// # Errors
    /// Fails when the card has no memory free now.
    pub fn take(&self, chunk: u32) -> Result<(), Fault> {
        if chunk as usize >= self.chunks.count() {
            return Err(Fault::Io(libc::EINVAL));
        }
        if self.state() == State::Lost || (self.cuda_is_lost() && !self.has(Path::Mapped)) {
            return Err(Fault::Lost);
        }
        let _alone = self.taking();
        if self.chunks.has(chunk as usize) {
            return Ok(());
        }
        let _paused = self.pause_ring();
        let memory = self.source.take(self.chunk_bytes).map_err(|trouble| self.note(trouble))?;
        if let Some((keep, gpu)) = self.keep.get() {
            let fd = memory.export().map_err(|trouble| self.note(trouble))?;
            let held = keep.hold(&kept::chunk_name(*gpu, chunk as usize), fd.as_fd(), false);
            held.map_err(|error| Fault::Io(error.raw_os_error().unwrap_or(libc::EIO)))?;
        }
        self.chunks.install(chunk as usize, memory);
        Ok(())
    }

    /// Gives the keeper every chunk, with `gpu` as this card's number. From now on it also gets
    /// each chunk that is taken. `held`: the keeper has the present chunks already.
    pub(super) fn keep_with(&self, keep: &Arc<dyn Keep>, gpu: usize, held: bool) -> io::Result<()> {
        for chunk in (0..self.chunks.count()).filter(|_| !held) {
            let fd = self.chunks.export(chunk).map_err(io::Error::other)?;
            if let Some(fd) = fd {
                keep.hold(&kept::chunk_name(gpu, chunk), fd.as_fd(), false)?;
            }
        }
        let _ = self.keep.set((Arc::clone(keep), gpu));
        self.kept.store(true, Ordering::Relaxed);
        Ok(())
    }

    /// Notes that the process ends because it was told to: the content need not survive.
    pub(super) fn forget(&self) {
        self.kept.store(false, Ordering::Relaxed);
    }

    /// Ends the watching thread, and the opening of late parts. Idempotent.
    pub(super) fn stop_watching(&self) {
        self.stopping.store(true, Ordering::Release);
        if let Some(late) = &self.late {
            late.end();
        }
        if let Some(watcher) = self.watcher.lock().unwrap_or_else(PoisonError::into_inner).take() {
            watcher.thread().unpark();
            let _ = watcher.join();
        }
    }
}

impl Drop for Gpu {
    fn drop(&mut self) {
        // End the kernel first: it would delay every unmapping.
        self.ring.take();
        if self.kept.load(Ordering::Relaxed) {
            return;
        }
        for chunk in 0..self.chunks.count() {
            // Clear the chunk, so that nothing readable stays. On a lost card nothing can be read.
            if let Ok(Some(memory)) = self.chunks.withdraw(chunk) {
                let _ = memory.clear();
            }
        }
    }
}

impl fmt::Debug for Gpu {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Gpu").field("url", &self.url).field("what", &self.describe()).finish_non_exhaustive()
    }
}
