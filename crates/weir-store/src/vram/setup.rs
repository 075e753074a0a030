//! Opens a card: finds it, takes its memory or takes it over, and measures its paths.

use super::chunks::{ChunkMemory, Chunks, Hot, Source};
use super::condition::Turn;
use super::engine::{Context, Which};
use super::gpu::{Gpu, ONLINE, Owner};
use super::kept::{self, KeptGpu};
use super::late::{Late, Opening};
use super::mapped::copy::Copies;
use super::mapped::{Device, Refusal};
use super::nvml::Nvml;
use super::options::{PathMode, RingMode, Target, VramUrl};
use super::ring::{self, Policy, Ring, Tuning};
use super::table::Path;
use super::watch::watch;
use super::{Drivers, Trouble, calibrate};
use crate::{DENIED, OpenError, OpenErrorKind};
use rustix::process::{Resource, Rlimit, getrlimit, setrlimit};
use std::os::fd::OwnedFd;
use std::path::Path as FilePath;
use std::sync::atomic::{AtomicBool, AtomicU8, AtomicU64, AtomicUsize};
use std::sync::{Arc, Mutex, OnceLock, PoisonError};
use std::time::{Duration, Instant};
use weir_core::{ByteSize, PAGE_SIZE};

/// The largest size of a chunk, in bytes.
const CHUNK_MAX: u64 = 4 << 30;
/// Bytes of the memory that CUDA imports as a test, before the store takes its own memory.
const PROBE: u64 = 2 << 20;

/// A card that was found, before memory is taken.
pub(super) struct Found {
    source: Source,
    uuid: [u8; 16],
    /// The card's other users; `None` if they have not been looked up yet.
    owner: Option<Owner>,
}

/// The memory taken from a card, and the parts that use it.
struct Room {
    chunks: Chunks,
    chunk_bytes: u64,
    /// Bytes of the memory: whole chunks, but for the last.
    bytes: u64,
    ring: Option<Arc<Ring>>,
    stages: Vec<(&'static str, Duration)>,
    /// Whether CUDA and NVML may be opened after the first operations.
    late: bool,
}

impl Gpu {
    /// Opens one card: finds it, reserves its memory, measures its paths.
    ///
    /// # Errors
    /// Fails when the card that `options` names is not there, or has too little memory.
    pub(super) fn open(options: &VramUrl, drivers: &Drivers) -> Result<Arc<Self>, OpenError> {
        let url = options.to_string();
        let fail = |kind, what: String| OpenError::new(kind, &url, what);
        let found = Found::look(options, drivers).map_err(|what| fail(OpenErrorKind::NoDevice, what))?;
        let room = found.reserve(options, &url)?;
        let gpu = found.assemble(options, url.clone(), room);
        let table = calibrate::measure(&gpu)
            .map_err(|fault| fail(OpenErrorKind::Io, format!("calibration: {fault}")))?;
        let _ = gpu.table.set(table);
        gpu.begin(options)?;
        Ok(gpu)
    }

    /// Opens the card of a daemon that has ended, with the chunks that the keeper holds. Nothing is
    /// measured again: that would overwrite pages. If the window is enough to serve, the rest is
    /// opened [after](super::late) the first operations.
    ///
    /// # Errors
    /// Fails when the card found here is not the one that has the pages, or when a chunk cannot be
    /// imported. Also fails when the loaded driver and its libraries differ in version. In each
    /// case the keeper still holds the pages.
    pub(super) fn reopen(
        options: &VramUrl,
        drivers: &Drivers,
        kept: &KeptGpu,
        mut take: impl FnMut(usize) -> Option<OwnedFd>,
    ) -> Result<Arc<Self>, OpenError> {
        let url = options.to_string();
        let fail = |kind, what: String| OpenError::new(kind, &url, what);
        let since = Instant::now();
        let (found, by_window) =
            Found::again(options, drivers, kept).map_err(|what| fail(OpenErrorKind::NoDevice, what))?;
        found.fits(kept, drivers).map_err(|what| fail(OpenErrorKind::Layout, what))?;
        let opening =
            Opening { options: options.clone(), drivers: drivers.clone(), costs: kept.table, since };
        let later = by_window && opening.wants_cuda();
        let late = later || found.owner.is_none();
        let driver = since.elapsed();
        let chunks = Chunks::new(kept.chunks, (kept.chunk_bytes / PAGE_SIZE as u64) as u32)
            .map_err(|error| OpenError::io(&url, DENIED, error))?;
        for chunk in 0..kept.chunks {
            // If the keeper does not hold a chunk, the earlier daemon had given the chunk back.
            let Some(fd) = take(chunk) else { continue };
            let memory = found.source.adopt(fd, kept.allocation_bytes, later);
            let memory = memory.map_err(|error| {
                fail(OpenErrorKind::Io, format!("chunk {chunk} cannot be imported: {error}"))
            })?;
            chunks.install(chunk, memory);
        }
        // If the rings cannot be made, go on without them: the card is slower, but its pages are
        // there.
        let ring = found.ring(options, chunks.hot()).unwrap_or(None);
        let bytes = u64::from(kept.slots) * PAGE_SIZE as u64;
        let stages = vec![("driver", driver), ("chunks", since.elapsed() - driver)];
        let room = Room { chunks, chunk_bytes: kept.chunk_bytes, bytes, ring, stages, late };
        let gpu = found.assemble(options, url.clone(), room);
        // Mark the pages as kept. If this process fails now, it must not clear them when it closes
        // the card.
        gpu.kept.store(true, std::sync::atomic::Ordering::Relaxed);
        if !later {
            let _ = gpu.table.set(kept.table.only(|path| gpu.has(path)));
        }
        gpu.begin(options)?;
        Late::begin(&gpu, opening).map_err(|error| OpenError::io(&url, DENIED, error))?;
        Ok(gpu)
    }

    /// The record that another process needs to open this card again.
    pub(super) fn to_keep(&self) -> KeptGpu {
        KeptGpu {
            uuid: self.uuid,
            mapped: self.source.gpu.is_some(),
            chunk_bytes: self.chunk_bytes,
            allocation_bytes: self.chunks.allocation_bytes().unwrap_or(self.chunk_bytes),
            chunks: self.chunks.count(),
            slots: self.slots,
            table: *self.table(),
        }
    }

    /// Starts the watching thread.
    fn begin(self: &Arc<Self>, options: &VramUrl) -> Result<(), OpenError> {
        let watched = Arc::clone(self);
        let mut policy = Policy::default();
        policy.always = options.ring == RingMode::On;
        let watcher = std::thread::Builder::new()
            .name("weir-vram".to_owned())
            .spawn(move || watch(&watched, policy))
            .map_err(|error| OpenError::io(&self.url, DENIED, error))?;
        let _ = self.watching.set(watcher.thread().clone());
        *self.watcher.lock().unwrap_or_else(PoisonError::into_inner) = Some(watcher);
        Ok(())
    }
}

impl Found {
    pub(super) fn look(options: &VramUrl, drivers: &Drivers) -> Result<Self, String> {
        let (source, uuid) = find(options, vulkan(options), &drivers.cuda)?;
        Ok(Found { source, uuid, owner: Some(Owner::look(options, drivers, uuid)) })
    }

    /// Finds the card of a daemon that has ended. Also returns whether its window is enough to
    /// serve, so that CUDA and NVML may come later.
    fn again(options: &VramUrl, drivers: &Drivers, kept: &KeptGpu) -> Result<(Self, bool), String> {
        match vulkan(options) {
            Ok(gpu) if gpu.card.window && kept.mapped => {
                let (uuid, version_is_known) = (gpu.card.uuid, gpu.card.driver.is_some());
                let source = Source::new(Some(Arc::new(gpu)), None);
                let owner = (!version_is_known).then(|| Owner::look(options, drivers, uuid));
                Ok((Found { source, uuid, owner }, true))
            }
            gpu => {
                let (source, uuid) = find(options, gpu, &drivers.cuda)?;
                Ok((Found { source, uuid, owner: Some(Owner::look(options, drivers, uuid)) }, false))
            }
        }
    }

    fn nvml(&self) -> Option<&Nvml> {
        self.owner.as_ref()?.nvml.as_ref()
    }

    pub(super) fn source(&self) -> &Source {
        &self.source
    }

    /// The reason why there will be no resident kernel; `None` if there may be one.
    pub(super) fn no_ring(&self, options: &VramUrl, cuda: &Context) -> Option<String> {
        let display = self.owner.as_ref().is_some_and(|owner| owner.display);
        no_ring(options, cuda, display).map(str::to_owned)
    }

    /// Makes the resident kernel's rings, if CUDA and Vulkan are both there.
    fn ring(&self, options: &VramUrl, hot: &Arc<Hot>) -> Result<Option<Arc<Ring>>, Trouble> {
        let Some(cuda) = self.source.cuda() else { return Ok(None) };
        ring(options, &self.source, cuda, self.owner.as_ref().is_some_and(|owner| owner.display), hot)
    }

    /// Takes memory of the card for all chunks.
    fn reserve(&self, options: &VramUrl, url: &str) -> Result<Room, OpenError> {
        let fail = |kind, what: String| OpenError::new(kind, url, what);
        let short = |wanted, had, what| fail(OpenErrorKind::NoMemory { wanted, had }, what);
        let spare = self.owner.as_ref().map_or(options.floor.0, |owner| owner.spare);
        let bytes = size(options, &self.source, self.nvml(), spare)
            .map_err(|what| short(options.chunk.0, 0, what))?;
        let size = chunk_bytes(options, bytes);
        let count = bytes.div_ceil(size) as usize;
        let used = || self.nvml().and_then(Nvml::memory).map(|memory| memory.used);
        let used_before = used();
        let chunks = Chunks::new(count, (size / PAGE_SIZE as u64) as u32)
            .map_err(|error| OpenError::io(url, DENIED, error))?;
        let ring = self
            .ring(options, chunks.hot())
            .map_err(|error| fail(OpenErrorKind::Io, format!("ring: {error}")))?;
        let mut taken = 0;
        for chunk in 0..count {
            match self.source.take(size) {
                Ok(memory) => {
                    chunks.install(chunk, memory);
                    taken = chunk as u64 + 1;
                }
                // A store without a size takes all free memory; one with a size gets it or fails.
                Err(_) if options.size.is_none() && taken > 0 => break,
                Err(error) => {
                    let (want, have) = (ByteSize(bytes), ByteSize(taken * size));
                    let what = format!("{want} of device memory, but only {have} could be had: {error}");
                    return Err(short(want.0, have.0, what));
                }
            }
        }
        let bytes = bytes.min(taken * size);
        // When the card is full, a driver may silently place "device" memory in RAM. So compare
        // with NVML, which counts the memory on the card.
        let is_card = options.target != Target::Software;
        if let (Some(before), Some(after), true) = (used_before, used(), is_card) {
            let grown = after.saturating_sub(before);
            if grown < bytes / 2 {
                let (taken, real) = (ByteSize(bytes), ByteSize(grown));
                let what = format!("took {taken}, but the card's use grew by {real} only: it is no VRAM");
                return Err(fail(OpenErrorKind::NoDevice, what));
            }
        }
        Ok(Room { chunks, chunk_bytes: size, bytes, ring, stages: Vec::new(), late: false })
    }

    fn assemble(self, options: &VramUrl, url: String, room: Room) -> Arc<Gpu> {
        Arc::new(Gpu {
            url,
            uuid: self.uuid,
            path: options.path.unwrap_or_default(),
            floor: options.floor.0,
            owner: self.owner.map_or_else(OnceLock::new, OnceLock::from),
            chunk_bytes: room.chunk_bytes,
            slots: (room.bytes / PAGE_SIZE as u64).min(u64::from(u32::MAX)) as u32,
            copies: Copies::detect(),
            table: OnceLock::new(),
            chunks: room.chunks,
            ring: room.ring.map_or_else(OnceLock::new, OnceLock::from),
            source: self.source,
            taking: Mutex::new(()),
            late: room.late.then(Arc::default),
            stages: room.stages,
            state: AtomicU8::new(ONLINE),
            turn: Mutex::new(Turn::now(None)),
            tell: Mutex::default(),
            loss: OnceLock::new(),
            busy: AtomicUsize::new(0),
            crowd: [const { AtomicU8::new(0) }; 2],
            entered: AtomicU64::new(0),
            left: AtomicU64::new(0),
            stopping: AtomicBool::new(false),
            watcher: Mutex::new(None),
            watching: OnceLock::new(),
            keep: OnceLock::new(),
            kept: AtomicBool::new(false),
        })
    }

    /// Checks whether the chunks that the keeper holds can be imported here.
    fn fits(&self, kept: &KeptGpu, drivers: &Drivers) -> Result<(), String> {
        kept.fits(self.uuid, self.source.gpu.is_some())?;
        let card = self.source.gpu.as_ref().and_then(|gpu| gpu.card.driver.clone());
        let libraries = card.or_else(|| self.nvml().map(|nvml| nvml.driver().to_owned()));
        let loaded = std::fs::read_to_string(&drivers.loaded).ok();
        kept::agree(libraries.as_deref(), loaded.as_deref())
    }
}

/// Opens the card by Vulkan.
fn vulkan(options: &VramUrl) -> Result<Device, Refusal> {
    Device::find(index(options), options.target == Target::Software, !options.window)
}

fn index(options: &VramUrl) -> usize {
    if let Target::Index(index) = options.target { index as usize } else { 0 }
}

/// Finds the card by Vulkan and by CUDA, and the UUID by which NVML knows it.
fn find(
    options: &VramUrl,
    gpu: Result<Device, Refusal>,
    libcuda: &FilePath,
) -> Result<(Source, [u8; 16]), String> {
    let which = match &gpu {
        Ok(gpu) => Which::Uuid(gpu.card.uuid),
        Err(_) => Which::Index(index(options)),
    };
    // With a window and `path=mapped`, leave CUDA out: its context takes memory of the card.
    let cuda = match (&gpu, options.path) {
        (Ok(gpu), Some(PathMode::Mapped)) if gpu.card.window => Err("not wanted with path=mapped".to_owned()),
        _ => Context::open(libcuda, which, options.batch_copies()),
    };
    let uuid = match (&gpu, &cuda) {
        (Ok(gpu), _) => gpu.card.uuid,
        (_, Ok(cuda)) => cuda.uuid,
        _ => [0; 16],
    };
    match (gpu, cuda) {
        (Err(vulkan), Err(cuda)) => Err(format!("no VRAM store here. Vulkan: {vulkan}. CUDA: {cuda}")),
        (Err(refusal), Ok(_)) if options.target == Target::Software => Err(refusal.to_string()),
        // Leave Vulkan out: to memory without a window, CUDA copies faster than a transfer queue.
        (Ok(gpu), Ok(cuda)) if !gpu.card.window => {
            let why =
                if options.window { "the processor sees too little of its memory" } else { "window=off" };
            let source = Source::new(None, Some(cuda));
            Ok((source.refuses(Path::Mapped.name(), Some(why.to_owned())), uuid))
        }
        (gpu, cuda) => {
            let (no_window, no_cuda) =
                (gpu.as_ref().err().map(ToString::to_string), cuda.as_ref().err().cloned());
            let source = Source::new(gpu.ok().map(Arc::new), cuda.ok())
                .refuses(Path::Mapped.name(), no_window)
                .refuses(Path::Engine.name(), no_cuda);
            // If CUDA cannot import memory of Vulkan's, go on without CUDA: the window needs no
            // import.
            let refuses = source.gpu.is_some() && matches!(source.take(PROBE), Err(Trouble::Cuda(_)));
            let why = "CUDA does not import what Vulkan allocates".to_owned();
            let source =
                if refuses { source.without_cuda().refuses(Path::Engine.name(), Some(why)) } else { source };
            Ok((source, uuid))
        }
    }
}

/// Bytes of a chunk: as the URL says, or more if the process may not open enough files. The driver
/// holds about two descriptors for each mapped and imported chunk. When it has none left, it
/// reports that device memory has run out.
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

/// Number of bytes of device memory to take for the store.
fn size(options: &VramUrl, source: &Source, nvml: Option<&Nvml>, spare: u64) -> Result<u64, String> {
    if let Some(size) = options.size {
        return Ok(size.0);
    }
    let free = match (nvml.and_then(Nvml::memory), &source.gpu, source.cuda()) {
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

/// The reason why the card or the options allow no resident kernel.
fn no_ring(options: &VramUrl, cuda: &Context, display: bool) -> Option<&'static str> {
    match options.ring {
        RingMode::Off => Some("ring=off"),
        // A kernel that stays makes a desktop stutter.
        RingMode::Auto if display => Some("the card drives a display; ring=on has it all the same"),
        _ if options.path == Some(PathMode::Mapped) => Some("path=mapped"),
        _ if cuda.capability < (7, 0) => Some("the card is older than compute capability 7.0"),
        RingMode::Auto | RingMode::On => None,
    }
}

/// Makes the resident kernel's rings, if the card and the options allow it.
pub(super) fn ring(
    options: &VramUrl,
    source: &Source,
    cuda: &Arc<Context>,
    display: bool,
    hot: &Arc<Hot>,
) -> Result<Option<Arc<Ring>>, Trouble> {
    let Some(gpu) = &source.gpu else { return Ok(None) };
    if no_ring(options, cuda, display).is_some() {
        return Ok(None);
    }
    let memory: ChunkMemory =
        Source::new(Some(Arc::clone(gpu)), Some(Arc::clone(cuda))).take(ring::DEVICE_BYTES)?;
    let (Some(device), Some(mapped)) = memory.into_parts() else { return Ok(None) };
    let mut tuning = Tuning::default();
    if options.blocks > 0 {
        tuning.blocks = options.blocks;
    }
    tuning.blocks = tuning.blocks.min(cuda.multiprocessors * 8);
    Ok(Some(Arc::new(Ring::new(cuda, mapped, device, tuning, hot)?)))
}
