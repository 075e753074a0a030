//! One card as a store: its chunks, its three paths, its state, and the thread that watches over it.

use super::Drivers;
use super::chunks::{Chunks, Hot, LANES_MAX, Memory, Source};
use super::contest::Contest;
use super::engine::{BatchLane, Context, Which};
use super::headroom::Headroom;
use super::lane::GpuLane;
use super::mapped::Device;
use super::mapped::copy::Copies;
use super::nvml::Nvml;
use super::options::{PathMode, RingMode, Target, VramUrl};
use super::ring::{self, Paused, Policy, Ring, Seen, Step, Tuning};
use super::table::{Batch, Direction, Path, Table};
use super::{Trouble, calibrate};
use crate::{Fault, OpenError, State};
use rustix::process::{Resource, Rlimit, getrlimit, setrlimit};
use std::fmt;
use std::os::fd::OwnedFd;
use std::path::Path as FilePath;
use std::sync::atomic::{AtomicBool, AtomicU8, AtomicU64, AtomicUsize, Ordering};
use std::sync::{Arc, Mutex, OnceLock, PoisonError};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};
use weir_core::{ByteSize, PAGE_SIZE};

/// Device memory that is never taken: what drivers and desktops want for themselves (as nbd-vram sizes itself).
const SPARE: u64 = 1 << 30;
/// The same, on a card that drives a display.
const SPARE_DISPLAY: u64 = 3 << 30;
/// How often the watcher looks while pages move, and while none do.
const TICK_BUSY: Duration = Duration::from_millis(1);
const TICK_IDLE: Duration = Duration::from_millis(20);
/// How often it asks who else is on the card, and how much memory is left.
const ASK_EVERY: Duration = Duration::from_millis(250);

/// Lanes at work from which on the window is full of writes: two or three fill an H200's.
pub(super) const CROWD: usize = 3;
/// Pages a second from which on it is worth finding out by which way a crowd's writes go fastest.
const THRONG: f64 = 1e6;
/// Pages of a batch as such a crowd has them.
const BATCH_OF_CROWD: usize = 64;
/// The largest chunk.
const CHUNK_MAX: u64 = 4 << 30;
/// Bytes by which importing is tried.
const PROBE: u64 = 2 << 20;

const ONLINE: u8 = 0;
const DRAINING: u8 = 1;
const LOST: u8 = 2;

/// One card's memory.
pub struct Gpu {
    url: String,
    path: PathMode,
    floor: u64,
    spare: u64,
    display: bool,
    chunk_bytes: u64,
    slots: u32,
    copies: Copies,
    table: OnceLock<Table>,
    chunks: Chunks,
    ring: Option<Arc<Ring>>,
    source: Source,
    nvml: Option<Nvml>,
    state: AtomicU8,
    /// Lanes that moved pages when the watcher last looked.
    busy: AtomicUsize,
    /// The way that a crowd's writes take, by what is written: single pages or runs. 0: by cost; else a path and 1.
    crowd: [AtomicU8; 2],
    entered: AtomicU64,
    left: AtomicU64,
    stopping: AtomicBool,
    watcher: Mutex<Option<JoinHandle<()>>>,
}

/// What happened since the store was opened.
#[derive(Clone, Copy, Default, Debug)]
pub struct Counters {
    /// Pages moved, by path: mapped, engine, ring.
    pub pages: [u64; 3],
    /// Chunks that have memory now.
    pub chunks_held: usize,
    /// Times that the resident kernel entered and left.
    pub ring_entered: u64,
    /// As above.
    pub ring_left: u64,
    /// What the card draws, in milliwatts.
    pub power_mw: Option<u32>,
}

impl Gpu {
    /// Opens one card: finds it, reserves its memory, measures its paths.
    ///
    /// # Errors
    /// When there is no such card, or not so much memory.
    pub(super) fn open(options: &VramUrl, drivers: &Drivers) -> Result<Arc<Self>, OpenError> {
        let url = options.to_string();
        let fail = |what: String| OpenError::new(&url, what);
        let (source, uuid) = find(options, &drivers.cuda).map_err(fail)?;
        let nvml = uuid.and_then(|uuid| Nvml::open(&drivers.nvml, uuid));
        let display = nvml.as_ref().is_some_and(Nvml::drives_display);
        let spare = options.floor.0.max(if display { SPARE_DISPLAY } else { SPARE });
        let bytes = size(options, &source, nvml.as_ref(), spare).map_err(fail)?;
        let size = chunk_bytes(options, bytes);
        let count = bytes.div_ceil(size) as usize;
        let used = || nvml.as_ref().and_then(Nvml::memory).map(|memory| memory.used);
        let used_before = used();
        let chunks = Chunks::new(count, (size / PAGE_SIZE as u64) as u32)
            .map_err(|error| OpenError::io(&url, "cannot take memory for its map", error))?;
        let ring =
            ring(options, &source, display, chunks.hot()).map_err(|error| fail(format!("ring: {error}")))?;
        let mut taken = 0;
        for chunk in 0..count {
            match source.take(size) {
                Ok(memory) => {
                    chunks.install(chunk, memory);
                    taken = chunk as u64 + 1;
                }
                // Whoever asked for all gets what there is; whoever named a size gets it or hears of it.
                Err(_) if options.size.is_none() && taken > 0 => break,
                Err(error) => {
                    let (want, have) = (ByteSize(bytes), ByteSize(taken * size));
                    return Err(fail(format!(
                        "{want} of device memory, but only {have} could be had: {error}"
                    )));
                }
            }
        }
        let bytes = bytes.min(taken * size);
        // A driver may quietly place "device" memory in RAM when the card is full. NVML counts what is on the card.
        let is_card = options.target != Target::Software;
        if let (Some(before), Some(after), true) = (used_before, used(), is_card) {
            let grown = after.saturating_sub(before);
            if grown < bytes / 2 {
                let (taken, grown) = (ByteSize(bytes), ByteSize(grown));
                return Err(fail(format!(
                    "took {taken}, but the card's use grew by {grown} only: it is no VRAM"
                )));
            }
        }
        let gpu = Arc::new(Gpu {
            url: url.clone(),
            path: options.path,
            floor: options.floor.0,
            spare,
            display,
            chunk_bytes: size,
            slots: (bytes / PAGE_SIZE as u64).min(u64::from(u32::MAX)) as u32,
            copies: Copies::detect(),
            table: OnceLock::new(),
            chunks,
            ring,
            source,
            nvml,
            state: AtomicU8::new(ONLINE),
            busy: AtomicUsize::new(0),
            crowd: [const { AtomicU8::new(0) }; 2],
            entered: AtomicU64::new(0),
            left: AtomicU64::new(0),
            stopping: AtomicBool::new(false),
            watcher: Mutex::new(None),
        });
        let table = calibrate::measure(&gpu).map_err(|fault| fail(format!("calibration: {fault}")))?;
        let _ = gpu.table.set(table);
        let watched = Arc::clone(&gpu);
        let mut policy = Policy::default();
        policy.always = options.ring == RingMode::On;
        let watcher = std::thread::Builder::new()
            .name("weir-vram".to_owned())
            .spawn(move || watch(&watched, policy))
            .map_err(|error| OpenError::io(&url, "cannot start the watching thread", error))?;
        *gpu.watcher.lock().unwrap_or_else(PoisonError::into_inner) = Some(watcher);
        Ok(gpu)
    }

    /// What was measured when it was opened.
    pub fn table(&self) -> &Table {
        static NOTHING: OnceLock<Table> = OnceLock::new();
        self.table.get().unwrap_or_else(|| NOTHING.get_or_init(Table::default))
    }

    /// What happened so far.
    pub fn counters(&self) -> Counters {
        Counters {
            pages: self.chunks.pages(),
            chunks_held: self.chunks.held(),
            ring_entered: self.entered.load(Ordering::Relaxed),
            ring_left: self.left.load(Ordering::Relaxed),
            power_mw: self.nvml.as_ref().and_then(Nvml::power_mw),
        }
    }

    /// How much of the card is left to its owner: one call of the management library, some ten microseconds. `None`
    /// where it is not there; then nothing is known about other processes.
    pub fn headroom(&self) -> Option<Headroom> {
        let memory = self.nvml.as_ref()?.memory()?;
        Some(Headroom {
            free: memory.free,
            total: memory.total,
            display: self.display,
            floor: self.floor,
            spare: self.spare,
            chunk: self.chunk_bytes,
        })
    }

    /// A descriptor of a chunk's memory, which lives while one is open; `None` for a released chunk. What a keeper
    /// holds, and a restarted daemon imports.
    ///
    /// # Errors
    /// What the driver answered.
    pub fn export(&self, chunk: u32) -> Result<Option<OwnedFd>, Fault> {
        self.chunks.export(chunk as usize).map_err(Trouble::fault)
    }

    /// One line about the card and its paths, for logs.
    pub fn describe(&self) -> String {
        let name = match (&self.source.gpu, &self.source.cuda) {
            (Some(gpu), _) => gpu.card.to_string(),
            (None, Some(cuda)) => format!("{}, not mapped", cuda.name),
            (None, None) => String::new(),
        };
        let paths: Vec<&str> = Path::ALL.into_iter().filter(|&path| self.has(path)).map(Path::name).collect();
        let driver = self.nvml.as_ref().map_or("unknown", Nvml::driver);
        format!("{name}, driver {driver}, {}, by {}", self.copies.name, paths.join(" and "))
    }

    /// Whether there is that path.
    pub fn has(&self, path: Path) -> bool {
        match path {
            Path::Mapped => self.source.gpu.is_some(),
            Path::Engine => self.source.cuda.is_some(),
            Path::Ring => self.ring.is_some(),
        }
    }

    /// Whether the resident kernel is on the card.
    pub fn ring_is_resident(&self) -> bool {
        self.ring.as_ref().is_some_and(|ring| ring.is_resident())
    }

    /// Puts the kernel on the card now, without waiting for load; for calibration and benchmarks.
    pub fn enter_ring(&self) -> bool {
        let Some(ring) = &self.ring else { return false };
        if ring.enter().is_ok() && ring.is_resident() {
            self.entered.fetch_add(1, Ordering::Relaxed);
        }
        ring.is_resident()
    }

    pub(super) fn leave_ring(&self) {
        if let Some(ring) = &self.ring
            && ring.is_resident()
            && matches!(ring.leave(), Ok(true))
        {
            self.left.fetch_add(1, Ordering::Relaxed);
        }
    }

    pub(super) fn pause_ring(&self) -> Option<Result<Paused<'_>, Fault>> {
        self.ring.as_ref().map(|ring| ring.pause())
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

    /// Whether CUDA said so. The watcher carries it over into the state, which is all that an operation looks at.
    pub(super) fn cuda_is_lost(&self) -> bool {
        self.source.cuda.as_ref().is_some_and(|cuda| cuda.is_lost())
    }

    /// Says so to every lane.
    pub(super) fn lose(&self) {
        self.state.store(LOST, Ordering::Relaxed);
        self.chunks.hot().gate().lost.store(true, Ordering::Relaxed);
    }

    /// The way that was found for writes of several lanes at once, in batches.
    pub(super) fn crowd_path(&self, runs: bool) -> Option<Path> {
        let path = self.crowd[usize::from(runs)].load(Ordering::Relaxed).checked_sub(1)?;
        [Path::Mapped, Path::Engine, Path::Ring].into_iter().find(|&it| it as u8 == path)
    }

    /// A lane that knows the mapping only.
    pub(super) fn bare_lane(self: &Arc<Self>) -> Option<GpuLane> {
        Some(GpuLane::new(self, self.chunks.open_pin()?, None, None))
    }

    /// How many cards Vulkan, or else CUDA, lists.
    pub(super) fn count(libcuda: &FilePath) -> usize {
        let vulkan = (0..).take_while(|&index| Device::find(index, false).is_ok()).count();
        if vulkan > 0 {
            return vulkan;
        }
        (0..).take_while(|&index| Context::open(libcuda, Which::Index(index)).is_ok()).count()
    }

    /// Opens a lane with room for `depth` operations in flight on each path.
    ///
    /// # Errors
    /// When memory cannot be pinned, or too many lanes are open.
    pub fn lane(self: &Arc<Self>, depth: usize) -> Result<GpuLane, OpenError> {
        let fail = |what: String| OpenError::new(&self.url, what);
        let pin = self.chunks.open_pin().ok_or_else(|| {
            fail(format!("{LANES_MAX} lanes are open already, which is the most it can serve"))
        })?;
        let opened = (|| {
            // A ring of its own where one is free; the pause ends before the engine's lane waits for another.
            let ring = match &self.ring {
                Some(ring) => ring.lane(depth).map_err(|fault| fail(format!("no ring: {fault}")))?,
                None => None,
            };
            let _paused = self.pause_ring();
            let engine = match &self.source.cuda {
                Some(cuda) => Some(
                    BatchLane::new(cuda, depth.max(1)).map_err(|error| fail(format!("no lane: {error}")))?,
                ),
                None => None,
            };
            Ok((engine, ring))
        })();
        match opened {
            Ok((engine, ring)) => Ok(GpuLane::new(self, pin, engine, ring)),
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
            // Not cleared, not freed: it stays ours until the process ends, and holds no slot.
            self.chunks.install(chunk, memory);
            return Err(error);
        }
        drop(memory);
        Ok(())
    }

    fn note(&self, trouble: Trouble) -> Fault {
        if trouble.is_lost() {
            self.lose();
        }
        trouble.fault()
    }

    /// Looks after head-room. Returns how many others use the card.
    fn ask(&self) -> u32 {
        let Some(nvml) = &self.nvml else { return 0 };
        if let Some(headroom) = self.headroom() {
            // With a chunk's difference between both directions, so that it does not flutter.
            let state = self.state.load(Ordering::Relaxed);
            if state == ONLINE && headroom.is_short() {
                let _ = self.state.compare_exchange(ONLINE, DRAINING, Ordering::Relaxed, Ordering::Relaxed);
            } else if state == DRAINING && headroom.has_recovered() {
                let _ = self.state.compare_exchange(DRAINING, ONLINE, Ordering::Relaxed, Ordering::Relaxed);
            }
        }
        nvml.others()
    }
}

impl Gpu {
    /// Its URL.
    pub fn url(&self) -> &str {
        &self.url
    }

    /// Pages it has room for.
    pub fn slots(&self) -> u32 {
        self.slots
    }

    /// Pages of a chunk.
    pub fn chunk_slots(&self) -> u32 {
        (self.chunk_bytes / PAGE_SIZE as u64) as u32
    }

    /// Whether it can be relied on.
    pub fn state(&self) -> State {
        match self.state.load(Ordering::Relaxed) {
            _ if self.cuda_is_lost() => State::Lost,
            LOST => State::Lost,
            DRAINING => State::Draining,
            _ => State::Online,
        }
    }

    /// Gives a chunk's memory back, cleared.
    ///
    /// # Errors
    /// When a lane still uses it, or the card would not clear it; then it is still held.
    pub fn release(&self, chunk: u32) -> Result<(), Fault> {
        if chunk as usize >= self.chunks.count() {
            return Err(Fault::Io(libc::EINVAL));
        }
        self.release_chunk(chunk as usize).map_err(|trouble| self.note(trouble))
    }

    /// Takes memory for a chunk that was released.
    ///
    /// # Errors
    /// When there is none now.
    pub fn take(&self, chunk: u32) -> Result<(), Fault> {
        if chunk as usize >= self.chunks.count() {
            return Err(Fault::Io(libc::EINVAL));
        }
        if self.state() == State::Lost {
            return Err(Fault::Lost);
        }
        if self.chunks.has(chunk as usize) {
            return Ok(());
        }
        let _paused = self.pause_ring();
        let memory = self.source.take(self.chunk_bytes).map_err(|trouble| self.note(trouble))?;
        self.chunks.install(chunk as usize, memory);
        Ok(())
    }

    /// Ends the watching thread. Idempotent.
    pub(super) fn stop_watching(&self) {
        self.stopping.store(true, Ordering::Release);
        if let Some(watcher) = self.watcher.lock().unwrap_or_else(PoisonError::into_inner).take() {
            watcher.thread().unpark();
            let _ = watcher.join();
        }
    }
}

impl Drop for Gpu {
    fn drop(&mut self) {
        // The kernel first: it would hold up every unmapping.
        self.ring = None;
        for chunk in 0..self.chunks.count() {
            // Nothing readable stays. A lost card has nobody to read it either.
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

/// Vulkan's card, CUDA's view of it, and the identifier by which NVML knows it.
fn find(options: &VramUrl, libcuda: &FilePath) -> Result<(Source, Option<[u8; 16]>), String> {
    let index = if let Target::Index(index) = options.target { index as usize } else { 0 };
    let gpu = Device::find(index, options.target == Target::Software);
    let which = match &gpu {
        Ok(gpu) => Which::Uuid(gpu.card.uuid),
        Err(_) => Which::Index(index),
    };
    // Who wants the window alone wants none of CUDA's memory.
    let cuda = match (&gpu, options.path) {
        (Ok(_), PathMode::Mapped) => Err("not wanted with path=mapped".to_owned()),
        _ => Context::open(libcuda, which),
    };
    let uuid = match (&gpu, &cuda) {
        (Ok(gpu), _) => Some(gpu.card.uuid),
        (_, Ok(cuda)) => Some(cuda.uuid),
        _ => None,
    };
    match (gpu, cuda) {
        (Err(vulkan), Err(cuda)) => Err(format!("no VRAM store here. Vulkan: {vulkan}. CUDA: {cuda}")),
        (Err(refusal), Ok(_)) if options.target == Target::Software => Err(refusal.to_string()),
        (gpu, cuda) => {
            let mut source = Source { gpu: gpu.ok().map(Arc::new), cuda: cuda.ok() };
            // A driver that will not import leaves the window, which needs no import.
            if source.gpu.is_some() && matches!(source.take(PROBE), Err(Trouble::Cuda(_))) {
                source.cuda = None;
            }
            Ok((source, uuid))
        }
    }
}

/// Bytes of a chunk: as the URL says, or more where the process may not open enough files. The driver keeps
/// about two descriptors for each mapped and imported chunk, and calls running out of them out of device memory.
fn chunk_bytes(options: &VramUrl, bytes: u64) -> u64 {
    const DESCRIPTORS: u64 = 2;
    const SPARE_DESCRIPTORS: u64 = 256;
    let limit = getrlimit(Resource::Nofile);
    let raised = Rlimit { current: limit.maximum, maximum: limit.maximum };
    let limit = match setrlimit(Resource::Nofile, raised) {
        Ok(()) => limit.maximum,
        Err(_) => limit.current,
    };
    let room = limit.unwrap_or(u64::MAX).saturating_sub(SPARE_DESCRIPTORS).max(64);
    let mut chunk = options.chunk.0;
    while bytes.div_ceil(chunk).saturating_mul(DESCRIPTORS) > room && chunk < CHUNK_MAX {
        chunk *= 2;
    }
    chunk
}

/// Bytes to reserve.
fn size(options: &VramUrl, source: &Source, nvml: Option<&Nvml>, spare: u64) -> Result<u64, String> {
    if let Some(size) = options.size {
        return Ok(size.0);
    }
    let free = match (nvml.and_then(Nvml::memory), &source.gpu, &source.cuda) {
        (Some(memory), _, _) => memory.free,
        (None, Some(gpu), _) => gpu.free_bytes(),
        (None, None, Some(cuda)) => cuda.memory().map_err(|error| error.to_string())?.0,
        (None, None, None) => 0,
    };
    let chunks = free.saturating_sub(spare) / options.chunk.0;
    if chunks == 0 {
        let (free, spare) = (ByteSize(free), ByteSize(spare));
        return Err(format!(
            "{free} of device memory is free, of which {spare} is left to others; free some"
        ));
    }
    Ok(chunks * options.chunk.0)
}

/// The resident kernel's rings, where the card and the options allow it.
fn ring(
    options: &VramUrl,
    source: &Source,
    display: bool,
    hot: &Arc<Hot>,
) -> Result<Option<Arc<Ring>>, Trouble> {
    let (Some(gpu), Some(cuda)) = (&source.gpu, &source.cuda) else { return Ok(None) };
    let wanted = match options.ring {
        RingMode::Off => false,
        // A kernel that stays makes a desktop stutter.
        RingMode::Auto => !display,
        RingMode::On => true,
    };
    if !wanted || cuda.capability < (7, 0) || options.path == PathMode::Mapped {
        return Ok(None);
    }
    let memory: Memory =
        Source { gpu: Some(Arc::clone(gpu)), cuda: Some(Arc::clone(cuda)) }.take(ring::DEVICE_BYTES)?;
    let (Some(device), Some(mapped)) = memory.into_parts() else { return Ok(None) };
    let mut tuning = Tuning::default();
    if options.blocks > 0 {
        tuning.blocks = options.blocks;
    }
    tuning.blocks = tuning.blocks.min(cuda.multiprocessors * 8);
    Ok(Some(Arc::new(Ring::new(cuda, mapped, device, tuning, hot)?)))
}

/// Lets a crowd's writes go the way that has moved the most pages.
fn contend(gpu: &Gpu, contests: &mut [Contest; 2], elapsed: Duration, pages: u64, busy: usize, runs: bool) {
    let ring = gpu.ring_is_resident();
    let batch = Batch { pages: BATCH_OF_CROWD, neighbours: runs, busy, ring };
    let contenders = gpu.table().contenders(Direction::Write, batch);
    let path = contests[usize::from(runs)].step(elapsed, pages, &contenders);
    gpu.crowd[usize::from(runs)].store(path.map_or(0, |path| path as u8 + 1), Ordering::Relaxed);
    contests[usize::from(!runs)].pause();
}

/// The watching thread: lets the kernel in and out, counts who is at work, minds the head-room.
fn watch(gpu: &Gpu, mut policy: Policy) {
    let (mut looked, mut asked) = (Instant::now(), Instant::now());
    let total = || gpu.chunks.pages().iter().sum::<u64>();
    let (mut pages, mut others) = (total(), gpu.ask());
    let mut written = gpu.chunks.written();
    let mut contests = [Contest::default(), Contest::default()];
    let mut seen_by_lane = vec![0u64; LANES_MAX];
    while !gpu.stopping.load(Ordering::Acquire) {
        let idle = gpu.busy.load(Ordering::Relaxed) == 0 && !gpu.ring_is_resident();
        std::thread::park_timeout(if idle { TICK_IDLE } else { TICK_BUSY });
        if gpu.cuda_is_lost() {
            gpu.lose();
        }
        let elapsed = looked.elapsed();
        looked = Instant::now();
        let moved = total().wrapping_sub(pages);
        pages = pages.wrapping_add(moved);
        let before = std::mem::replace(&mut written, gpu.chunks.written());
        let through = written[0].wrapping_sub(before[0]);
        let sent = written[1].wrapping_sub(before[1]);
        // The window takes writes faster than the ring until it is full, so those alone ask for no kernel.
        let crowded = gpu.busy.load(Ordering::Relaxed) >= CROWD;
        let asking = if crowded { moved } else { moved.saturating_sub(through) };
        let (busy, runs) = gpu.chunks.busy(&mut seen_by_lane);
        gpu.busy.store(busy, Ordering::Relaxed);
        let rate = moved as f64 / elapsed.as_secs_f64().max(1e-6);
        if busy >= CROWD && rate >= THRONG && through + sent > 0 {
            contend(gpu, &mut contests, elapsed, moved, busy, 2 * runs > busy);
        } else {
            contests.iter_mut().for_each(Contest::pause);
        }
        if asked.elapsed() >= ASK_EVERY {
            others = gpu.ask();
            asked = Instant::now();
        }
        let Some(ring) = &gpu.ring else { continue };
        let seen = Seen {
            elapsed,
            pages: asking,
            others,
            stalls: ring.take_stalls(),
            resident: ring.is_resident(),
            uncovered: ring.has_uncovered_lanes(),
        };
        match policy.step(seen) {
            Step::Stay => {}
            Step::Enter => {
                // Asked afresh: somebody may have come since.
                others = gpu.ask();
                asked = Instant::now();
                if others == 0 {
                    gpu.enter_ring();
                }
            }
            Step::Leave => gpu.leave_ring(),
        }
    }
    gpu.leave_ring();
}
