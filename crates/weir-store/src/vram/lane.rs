//! One thread's access to a card: the mapping does operations at once; the engine and the ring
//! complete them later.

use super::Trouble;
use super::chunks::{Site, Source, Way};
use super::engine::BatchLane;
use super::gpu::{CROWD, Gpu};
use super::late::{Parts, PartsCell};
use super::mapped::copy::{Copies, prefetch_lines};
use super::mapped::queue::{BufferAddress, QueueLane};
use super::options::PathMode;
use super::ring::{Admission, RingLane};
use super::table::{BatchShape, Direction, Path};
use crate::{Done, Fault, Lane, Progress, Ticket};
use std::slice;
use std::sync::Arc;
use std::time::Instant;
use weir_core::{Page, PageBytes, Slot};

/// After operations on this many neighbouring slots in a row, the lane expects neighbours in the
/// next batch too.
const NEIGHBOURS: u32 = 15;
/// From this many pages on, those in flight included, a batch of writes takes the path that the
/// watching thread has found fastest for many lanes.
const DEEP: usize = 8;

/// A lane to one card. Operations in flight together have no order. An operation that was handed
/// over is visible to every later one of every lane.
pub struct GpuLane {
    near: Near,
    /// A buffer for a page that is read again through the window after CUDA has died.
    spare: Option<Box<Page>>,
    // Field order: the lanes are dropped before the card, whose memory they use.
    engine: Option<Engine>,
    ring: Option<RingLane>,
    /// The cell from which the lane takes engine and ring, if they come later. The lane keeps it to
    /// the end, since an I/O thread may not free memory.
    cell: Option<Arc<PartsCell>>,
    gpu: Arc<Gpu>,
}

/// Only the fields that an operation through the window needs, in two cache lines: after a pause
/// each further line is a miss.
#[repr(align(128))]
struct Near {
    site: Site,
    copies: Copies,
    slots: u32,
    /// The slot that would continue the present run of neighbouring slots, and the number of
    /// operations in that run.
    next: u32,
    neighbours: u32,
    /// Number of operations that were queued, and whose completions the caller does not have yet.
    flying: u32,
    /// The load when the lane last chose its paths: the numbers of announced reads and writes, and
    /// whether the resident kernel was on the card.
    planned: [u32; 2],
    resident: bool,
    reads: Path,
    writes: Path,
    has_ring: bool,
    /// Whether a measurement has set the path, so that the lane does not choose one.
    forced: bool,
    /// Whether the lane has only the window until the other parts are open.
    waits: bool,
    /// Whether the lane has only the window from now on, because CUDA has died.
    cut_off: bool,
}

/// An operation whose outcome is unknown.
pub struct Salvaged<'a> {
    pub ticket: Ticket,
    pub slot: Slot,
    /// The page to be written; `None` for a read.
    pub page: Option<&'a PageBytes>,
}

/// The way in which a lane continues once CUDA has died.
#[derive(Clone, Copy, Debug)]
pub enum CutOff {
    /// The lane goes on through the window, which needs no CUDA.
    ByTheWindow,
    /// Another process is about to take over the card with everything that the keeper holds.
    /// Operations under way wait for that process.
    Waits,
    /// No path is left.
    Lost(Fault),
}

/// The engine: CUDA's, or Vulkan's transfer queue if there is neither CUDA nor a window.
#[allow(clippy::large_enum_variant, reason = "one a lane, and no pointer more on the way to it")]
pub(super) enum Engine {
    Cuda(BatchLane),
    Queue(QueueLane),
}

impl Engine {
    /// Opens a thread's engine; `None` if there is only the window.
    pub fn open(source: &Source, depth: usize) -> Result<Option<Self>, Trouble> {
        match (&source.gpu, source.cuda()) {
            (_, Some(cuda)) => Ok(Some(Engine::Cuda(BatchLane::new(cuda, depth)?))),
            (Some(gpu), None) if !gpu.card.window => Ok(Some(Engine::Queue(QueueLane::new(gpu, depth)?))),
            _ => Ok(None),
        }
    }

    fn in_flight(&self) -> usize {
        match self {
            Engine::Cuda(lane) => lane.in_flight(),
            Engine::Queue(lane) => lane.in_flight(),
        }
    }

    fn has_room(&self) -> bool {
        match self {
            Engine::Cuda(lane) => lane.has_room(),
            Engine::Queue(lane) => lane.has_room(),
        }
    }

    fn write(&mut self, ticket: Ticket, slot: Slot, (chunk, offset): (u64, u64), page: &PageBytes) {
        match self {
            Engine::Cuda(lane) => lane.write(ticket, slot, (chunk, offset), slice::from_ref(page)),
            Engine::Queue(lane) => lane.write(ticket, BufferAddress { buffer: chunk, offset }, page),
        }
    }

    fn read(&mut self, ticket: Ticket, slot: Slot, (chunk, offset): (u64, u64)) {
        match self {
            Engine::Cuda(lane) => lane.read(ticket, slot, (chunk, offset), 1),
            Engine::Queue(lane) => lane.read(ticket, BufferAddress { buffer: chunk, offset }),
        }
    }

    fn submit(&mut self) {
        match self {
            Engine::Cuda(lane) => lane.submit(),
            Engine::Queue(lane) => lane.submit(),
        }
    }

    fn poll(&mut self, now: Instant, done: &mut dyn FnMut(Done<'_>)) {
        match self {
            Engine::Cuda(lane) => lane.poll(now, done),
            Engine::Queue(lane) => lane.poll(now, done),
        }
    }

    /// Whether the card is lost because the transfer queue does not answer. A loss of CUDA's
    /// context is found elsewhere.
    fn has_lost_the_card(&self) -> bool {
        matches!(self, Engine::Queue(lane) if lane.is_dead())
    }
}

impl GpuLane {
    pub(super) fn new(
        gpu: &Arc<Gpu>,
        pin: usize,
        engine: Option<Engine>,
        ring: Option<RingLane>,
        cell: Option<Arc<PartsCell>>,
    ) -> Self {
        let near = Near {
            site: gpu.chunks().hot().site(pin),
            copies: *gpu.copies(),
            slots: gpu.slots(),
            next: 0,
            neighbours: 0,
            flying: 0,
            planned: [1, 1],
            resident: false,
            reads: Path::Mapped,
            writes: Path::Mapped,
            has_ring: ring.is_some(),
            forced: false,
            waits: cell.is_some(),
            cut_off: false,
        };
        let mut lane =
            GpuLane { near, spare: Some(Box::new(Page::zeroed())), engine, ring, cell, gpu: Arc::clone(gpu) };
        lane.decide(1, 1);
        lane
    }

    /// Makes all reads, or all writes, use one path, for measuring that path.
    pub fn force(&mut self, path: Path, direction: Direction) {
        self.near.forced = true;
        match direction {
            Direction::Read => self.near.reads = path,
            Direction::Write => self.near.writes = path,
        }
    }

    /// Takes the lane's late parts from its cell.
    #[cold]
    #[inline(never)]
    fn join(&mut self) {
        let Some(Parts { ring, engine }) = self.cell.as_ref().and_then(|cell| cell.take()) else { return };
        (self.near.waits, self.near.has_ring) = (false, ring.is_some());
        (self.ring, self.engine) = (ring, engine);
        let [reads, writes] = self.near.planned;
        self.decide(reads, writes);
    }

    /// Whether the lane waits for its late parts, and can [take](Self::join) them now.
    #[inline]
    fn is_joined(&self) -> bool {
        self.near.waits && self.near.site.gate().joined.load(std::sync::atomic::Ordering::Acquire)
    }

    /// Chooses the paths for a batch.
    #[inline(never)]
    fn decide(&mut self, reads: u32, writes: u32) {
        self.near.resident = self.near.has_ring && self.gpu.ring_is_resident();
        if self.near.forced || self.near.cut_off {
            return;
        }
        self.near.planned = [reads, writes];
        self.near.reads = self.choose(Direction::Read, reads as usize);
        self.near.writes = self.choose(Direction::Write, writes as usize);
        self.near.site.pin().note_runs(self.near.neighbours >= NEIGHBOURS && writes > 0);
    }

    fn choose(&self, direction: Direction, pages: usize) -> Path {
        if self.near.waits {
            return Path::Mapped;
        }
        let resident = self.near.resident;
        let fixed = match self.gpu.path() {
            PathMode::Auto => None,
            PathMode::Mapped => Some(Path::Mapped),
            PathMode::Engine => Some(Path::Engine),
            PathMode::Ring if resident => Some(Path::Ring),
            PathMode::Ring => Some(Path::Mapped),
        };
        let fixed = fixed.filter(|&path| self.gpu.has(path));
        let batch = BatchShape {
            pages: pages + self.near.flying as usize,
            neighbours: self.near.neighbours >= NEIGHBOURS,
            busy: self.gpu.busy_lanes(),
            ring: resident,
        };
        // For writes of many threads, the watching thread has tried each path and knows the
        // fastest. That is better than the costs measured at the opening.
        let is_crowd = direction == Direction::Write && batch.busy >= CROWD && batch.pages >= DEEP;
        let tried = || self.gpu.crowd_path(batch.neighbours).filter(|_| is_crowd);
        let tried = || tried().filter(|&path| path != Path::Ring || resident);
        fixed
            .or_else(tried)
            .or_else(|| self.gpu.table().choose(direction, batch))
            .unwrap_or(if self.gpu.has(Path::Mapped) { Path::Mapped } else { Path::Engine })
    }

    /// The path to take when the ring is away or full. The other paths have room for all operations
    /// of the lane, whatever is in the ring.
    fn otherwise(&self) -> Path {
        match &self.ring {
            _ if self.near.cut_off => Path::Mapped,
            Some(ring) if ring.in_flight() > 0 && self.gpu.has(Path::Engine) => Path::Engine,
            _ if self.gpu.has(Path::Mapped) => Path::Mapped,
            _ => Path::Engine,
        }
    }

    /// Checks whether an operation may begin. Chooses the path anew if the kernel came or went
    /// since the last plan.
    #[inline]
    fn admit(&mut self, slot: Slot) -> Result<(), Fault> {
        let near = &mut self.near;
        near.neighbours = if slot.0 == near.next { near.neighbours.saturating_add(1) } else { 0 };
        near.next = slot.0.wrapping_add(1);
        let gate = near.site.gate();
        if gate.lost.load(std::sync::atomic::Ordering::Relaxed) {
            return Err(Fault::Lost);
        }
        let resident = gate.resident.load(std::sync::atomic::Ordering::Relaxed);
        if gate.asleep.load(std::sync::atomic::Ordering::Relaxed) {
            self.gpu.wake();
        }
        if self.is_joined() {
            self.join();
        }
        let near = &self.near;
        let in_range = slot.0 < near.slots;
        if near.has_ring && resident != near.resident {
            let [reads, writes] = near.planned;
            self.decide(reads, writes);
        }
        if in_range { Ok(()) } else { Err(Fault::Io(libc::EINVAL)) }
    }

    /// Queues an operation by engine or ring, with `by_engine` or `by_ring`. `None`: the ring is
    /// away, so take another path.
    fn later(
        &mut self,
        path: Path,
        slot: Slot,
        by_engine: impl FnOnce(&mut Engine, (u64, u64)),
        by_ring: impl FnOnce(&mut RingLane, (u64, u64)),
    ) -> Option<Progress> {
        if self.gpu.cuda_is_lost() {
            // While nothing is in flight, no poll tells the lane the time.
            return match self.cut_off(Instant::now()) {
                CutOff::ByTheWindow => None,
                CutOff::Waits => Some(Progress::Full),
                CutOff::Lost(_) => Some(Progress::Done(Err(Fault::Lost))),
            };
        }
        let way = if path == Path::Ring { Way::Ring } else { Way::Engine };
        let site = &self.near.site;
        let Some(place) = site.begin(way, slot, 1) else {
            return Some(Progress::Done(Err(Fault::Lost)));
        };
        match (path, &mut self.engine, &mut self.ring) {
            (Path::Ring, _, Some(ring)) => match ring.admits() {
                Admission::Yes => {
                    by_ring(ring, place);
                    self.near.flying += 1;
                    return Some(Progress::Queued);
                }
                Admission::Full | Admission::Away => {}
            },
            (Path::Engine, Some(engine), _) => {
                if engine.has_room() {
                    by_engine(engine, place);
                    self.near.flying += 1;
                    return Some(Progress::Queued);
                }
                site.cancel(way);
                return Some(Progress::Full);
            }
            _ => {}
        }
        site.cancel(way);
        None
    }

    #[inline(never)]
    fn write_later(&mut self, ticket: Ticket, slot: Slot, page: &PageBytes, path: Path) -> Progress {
        let queued = self.later(
            path,
            slot,
            |engine, place| engine.write(ticket, slot, place, page),
            |ring, (chunk, offset)| ring.write(ticket, slot, chunk + offset, page),
        );
        match queued {
            Some(Progress::Queued) => {
                self.near.site.pin().count_sent(1);
                Progress::Queued
            }
            Some(progress) => progress,
            None => match self.otherwise() {
                Path::Mapped => self.store(slot, page),
                other if other == path => Progress::Done(Err(Fault::Unsupported)),
                other => self.write_later(ticket, slot, page, other),
            },
        }
    }

    #[inline(never)]
    fn read_later(&mut self, ticket: Ticket, slot: Slot, page: &mut PageBytes, path: Path) -> Progress {
        let queued = self.later(
            path,
            slot,
            |engine, place| engine.read(ticket, slot, place),
            |ring, (chunk, offset)| ring.read(ticket, slot, chunk + offset),
        );
        match queued {
            Some(progress) => progress,
            None => match self.otherwise() {
                Path::Mapped => self.load(slot, page),
                other if other == path => Progress::Done(Err(Fault::Unsupported)),
                other => self.read_later(ticket, slot, page, other),
            },
        }
    }

    /// Queues one operation of CUDA's engine on up to `pages` neighbouring slots from `first` on.
    /// `begin` gets the place of the slots on the card, and how many they are. Returns how many
    /// slots the operation has. If it is 0, the caller must queue each slot by itself.
    fn run(
        &mut self,
        first: Slot,
        pages: usize,
        direction: Direction,
        begin: impl FnOnce(&mut BatchLane, (u64, u64), usize),
    ) -> usize {
        if self.admit(first).is_err() || self.gpu.cuda_is_lost() {
            return 0;
        }
        let room = self.run_room(direction == Direction::Write);
        let GpuLane { near, engine: Some(Engine::Cuda(engine)), .. } = self else { return 0 };
        let pages = pages.min(room).min(near.site.left_in_chunk(first)).min((near.slots - first.0) as usize);
        if pages == 0 {
            return 0;
        }
        let Some(place) = near.site.begin(Way::Engine, first, pages) else { return 0 };
        begin(engine, place, pages);
        near.flying += pages as u32;
        near.neighbours = near.neighbours.saturating_add(pages as u32 - 1);
        near.next = first.0.wrapping_add(pages as u32);
        pages
    }

    /// Decides how the lane continues after CUDA has died.
    #[cold]
    #[inline(never)]
    fn cut_off(&mut self, now: Instant) -> CutOff {
        let how = self.gpu.without_cuda(now);
        if matches!(how, CutOff::ByTheWindow) {
            let near = &mut self.near;
            // A lane that measures one path must not go on through the window, which is another
            // path.
            if near.forced {
                return CutOff::Lost(Fault::Lost);
            }
            (near.cut_off, near.has_ring, near.resident) = (true, false, false);
            (near.reads, near.writes) = (Path::Mapped, Path::Mapped);
        }
        how
    }

    /// Ends the operations that CUDA had under way when it died. They are done again through the
    /// window, or end with a fault.
    #[cold]
    #[inline(never)]
    fn salvage(&mut self, now: Instant, done: &mut dyn FnMut(Done<'_>)) {
        let fault = match self.cut_off(now) {
            CutOff::ByTheWindow => None,
            CutOff::Waits => return,
            CutOff::Lost(fault) => Some(fault),
        };
        let Some(mut spare) = self.spare.take() else { return };
        let (mut ring, mut engine) = (self.ring.take(), self.engine.take());
        let (pin, mut ended) = (self.near.site.pin(), [0u64; 2]);
        let mut redo = |way: Way, it: Salvaged<'_>| {
            ended[way as usize] += 1;
            let progress = match (fault, it.page) {
                (Some(fault), _) => Progress::Done(Err(fault)),
                (None, Some(page)) => self.store(it.slot, page),
                (None, None) => self.load(it.slot, &mut spare),
            };
            let Progress::Done(result) = progress else { unreachable!("the window answers at once") };
            let page = (it.page.is_none() && result.is_ok()).then_some(&**spare);
            done(Done { ticket: it.ticket, result, page });
        };
        if let Some(ring) = &mut ring {
            ring.salvage(&mut |it| redo(Way::Ring, it));
        }
        if let Some(Engine::Cuda(engine)) = &mut engine {
            engine.salvage(&mut |it| redo(Way::Engine, it));
        }
        pin.finish(Way::Ring, ended[Way::Ring as usize]);
        pin.finish(Way::Engine, ended[Way::Engine as usize]);
        (self.ring, self.engine, self.spare) = (ring, engine, Some(spare));
        self.near.flying = 0;
    }

    /// Writes a page through the window.
    #[inline]
    fn store(&self, slot: Slot, page: &PageBytes) -> Progress {
        let near = &self.near;
        // SAFETY: the address is that of a page, aligned to a page. Its chunk stays while the page
        // is accessed. Only this lane writes the slot, by the contract of slots. A racing access
        // can at worst mix bytes of device memory.
        let copy = |host| unsafe { near.copies.to_device(page.as_ptr(), host) };
        let stored = near.site.with_host(slot, copy);
        near.site.pin().count_stored();
        Progress::Done(stored.ok_or(Fault::Lost))
    }

    /// Reads a page through the window.
    #[inline]
    fn load(&self, slot: Slot, page: &mut PageBytes) -> Progress {
        let near = &self.near;
        let to = page.as_mut_ptr();
        // SAFETY: the address is a page of a chunk whose memory stays during the call; `to` is a
        // page of the caller's.
        let copy = |host: *mut u8| unsafe { near.copies.from_device(host, to) };
        Progress::Done(near.site.with_host(slot, copy).ok_or(Fault::Lost))
    }
}

impl Lane for GpuLane {
    #[inline]
    fn plan(&mut self, reads: usize, writes: usize) {
        let near = &self.near;
        // After a pause, an operation meets one cache miss after another. Prefetch all these lines
        // at once, so that the misses overlap.
        near.site.prefetch();
        near.copies.prefetch(writes > 0);
        let code =
            if writes > 0 { <Self as Lane>::write as *const u8 } else { <Self as Lane>::read as *const u8 };
        prefetch_lines(code, 6);
        if self.is_joined() {
            self.join();
        }
        let near = &self.near;
        // A batch of a single page takes the path that the last such batch took. Choosing anew
        // would read many lines of memory. After a pause these miss the cache, which takes longer
        // than the page.
        let alone = near.flying == 0 && near.neighbours < NEIGHBOURS && reads + writes <= 1;
        let gate = near.site.gate();
        let resident = near.has_ring && gate.resident.load(std::sync::atomic::Ordering::Relaxed);
        let planned = [reads as u32, writes as u32];
        if !(alone && near.planned == planned && near.resident == resident) {
            self.decide(planned[0], planned[1]);
        }
    }

    fn heeds_plan(&self) -> bool {
        true
    }

    fn write(&mut self, ticket: Ticket, slot: Slot, page: &PageBytes) -> Progress {
        if let Err(fault) = self.admit(slot) {
            return Progress::Done(Err(fault));
        }
        match self.near.writes {
            Path::Mapped => self.store(slot, page),
            path => self.write_later(ticket, slot, page, path),
        }
    }

    fn read(&mut self, ticket: Ticket, slot: Slot, page: &mut PageBytes) -> Progress {
        if let Err(fault) = self.admit(slot) {
            return Progress::Done(Err(fault));
        }
        match self.near.reads {
            Path::Mapped => self.load(slot, page),
            path => self.read_later(ticket, slot, page, path),
        }
    }

    fn run_room(&self, write: bool) -> usize {
        let path = if write { self.near.writes } else { self.near.reads };
        match &self.engine {
            Some(Engine::Cuda(engine)) if path == Path::Engine => engine.run_room(),
            _ => 0,
        }
    }

    fn read_run(&mut self, ticket: Ticket, first: Slot, count: usize) -> usize {
        self.run(first, count, Direction::Read, |engine, place, pages| {
            engine.read(ticket, first, place, pages);
        })
    }

    fn write_run(&mut self, ticket: Ticket, first: Slot, pages: &[PageBytes]) -> usize {
        let begin = |engine: &mut BatchLane, place, count: usize| {
            engine.write(ticket, first, place, &pages[..count]);
        };
        let count = self.run(first, pages.len(), Direction::Write, begin);
        self.near.site.pin().count_sent(count);
        count
    }

    fn submit(&mut self) {
        if self.near.flying == 0 {
            return;
        }
        if let Some(ring) = &mut self.ring {
            ring.submit();
        }
        if let Some(engine) = &mut self.engine {
            self.near.site.pin().pass();
            engine.submit();
            self.near.site.pin().pass();
        }
    }

    fn poll(&mut self, now: Instant, done: &mut dyn FnMut(Done<'_>)) {
        if self.near.flying == 0 {
            return;
        }
        let pin = self.near.site.pin();
        let mut finished = 0;
        if let Some(ring) = &mut self.ring {
            let before = ring.in_flight();
            if before > 0 {
                ring.poll(now, done);
                let handed = before - ring.in_flight();
                pin.finish(Way::Ring, handed as u64);
                finished += handed;
            }
        }
        if let Some(engine) = &mut self.engine {
            let before = engine.in_flight();
            if before > 0 {
                pin.pass();
                engine.poll(now, &mut |it| {
                    // Before and after the callback, note that this thread makes progress. So the
                    // time that the callback spends on the page does not count as time in the
                    // driver.
                    pin.pass();
                    done(it);
                    pin.pass();
                });
                pin.pass();
                let handed = before - engine.in_flight();
                pin.finish(Way::Engine, handed as u64);
                finished += handed;
            }
        }
        self.near.flying -= finished as u32;
        if self.gpu.cuda_is_lost() {
            self.salvage(now, done);
        }
        if self.engine.as_ref().is_some_and(Engine::has_lost_the_card) {
            self.gpu.lose("Vulkan's transfer queue had no answer in time, or lost the device");
        }
    }

    fn in_flight(&self) -> usize {
        self.near.flying as usize
    }
}

impl Drop for GpuLane {
    fn drop(&mut self) {
        if let Some(Parts { ring, engine }) = self.cell.as_ref().and_then(|cell| cell.close()) {
            (self.ring, self.engine) = (ring, engine);
        }
        // Pause the ring while the engine's lane is dropped. The drop unmaps pinned memory, and a
        // driver does that only once no resident kernel is on the card.
        self.ring = None;
        let paused = self.gpu.pause_ring();
        self.engine = None;
        drop(paused);
        self.near.site.pin().close();
    }
}
