//! The ring: a kernel that stays on the card and serves descriptors.
//!
//! A copy engine takes 6 us to start, and the driver lets one thread at a time start one. A running
//! kernel avoids both. The processor writes a 64-byte descriptor into a ring in the card's memory,
//! through the window. A thread block of the kernel polls that ring. It copies the page between the
//! card's memory and a staging page in host memory. Then it writes the descriptor's number into
//! host memory too. Each lane has its own ring, and shares nothing.
//!
//! While the kernel stays, it occupies a time slice of the card, and the card draws more power. So
//! the kernel enters only when there is enough to do ([`Policy`]), and leaves when there is not.
//! While it is away, every operation has another path.
//!
//! # Entering and leaving
//!
//! A descriptor written after the kernel left would never be served. So a lane and the controller,
//! which takes the kernel off the card, use a handshake. A lane sets `Cell::adding`, then reads
//! `Ring::state`. The controller sets the state to leaving, then reads every lane's `adding`. At
//! least one of the two sees what the other has stored, if each one's store is visible before its
//! load. The controller calls `membarrier`, which ensures that for the lanes too. So a lane needs
//! no fence. Then the controller waits until every number that was added has been served, and only
//! then tells the kernel to stop. `model.rs` checks every interleaving of these steps.

#[cfg(test)]
mod model;
mod policy;
mod protocol;

pub use policy::{Policy, Seen, Step};

use super::answer_limit;
use super::chunks::Hot;
use super::condition::Death;
use super::engine::{CallError, Context, CudaError, DeviceMemory, Kernel, OwnStream, Pinned};
use super::lane::Salvaged;
use super::mapped::Allocation;
use super::mapped::copy::{fence_stores, store_line};
use super::membarrier;
use crate::{Done, Fault, Ticket};
use protocol::{ControlBlock, DESCRIPTOR, FIRST, LANES, LaneBlock, THREADS, descriptor};
use std::ffi::CStr;
use std::mem::ManuallyDrop;
use std::ptr::{self, NonNull};
use std::sync::atomic::{AtomicBool, AtomicPtr, AtomicU32, Ordering, compiler_fence};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};
use weir_core::{PAGE_SIZE, PageBytes, Slot};

/// Largest number of slots of a ring; a lane may have fewer.
pub const DEPTH_MAX: usize = 256;
/// Bytes of device memory for all rings and the control block.
pub const DEVICE_BYTES: u64 = (4096 + LANES * DEPTH_MAX * DESCRIPTOR) as u64;
/// Time limit to take the kernel off the card. If lanes still use the ring then, or the kernel has
/// not served their operations, the attempt ends.
const LEAVE_LIMIT: Duration = Duration::from_millis(100);
/// If a lane is not served for this long, another context must have had the card's time slice. The
/// lane's own queue takes 1 ms at most.
const STALL: Duration = Duration::from_millis(3);
/// Number of polls without progress between two looks at the clock.
const CLOCK_EVERY: u32 = 1024;
/// When this many descriptors wait, the lane starts them without a call of `submit`.
const GATHER: u32 = 16;

const ABSENT: u32 = 0;
const RESIDENT: u32 = 1;
const LEAVING: u32 = 2;

static PTX: &CStr = match CStr::from_bytes_with_nul(concat!(include_str!("kernel.ptx"), "\0").as_bytes()) {
    Ok(ptx) => ptx,
    Err(_) => panic!("the PTX holds no NUL"),
};

/// The settings of the ring.
#[derive(Clone, Copy, Debug)]
pub struct Tuning {
    /// Number of the kernel's thread blocks, divided among the lanes in powers of two.
    pub blocks: u32,
    /// Largest number of thread blocks that serve one lane.
    pub lane_blocks: u32,
}

impl Default for Tuning {
    fn default() -> Self {
        // A full link needs about a hundred pages in flight: it moves 12 million pages a second,
        // and each takes 8 us.
        Tuning { blocks: 128, lane_blocks: 64 }
    }
}

/// The kernel, its rings, and the lanes that use them.
pub struct Ring {
    state: AtomicU32,
    cells: [Cell; LANES],
    controller: Mutex<Controller>,
    context: Arc<Context>,
    tuning: Tuning,
    hot: Arc<Hot>,
}

/// The part of a lane's state that the controller reads.
#[repr(align(128))]
#[derive(Default)]
struct Cell {
    /// Whether the lane is writing descriptors, because it found the kernel on the card.
    adding: AtomicU32,
    /// The number after the last descriptor that the lane wrote.
    added: AtomicU32,
    /// Whether the resident kernel serves this ring.
    covered: AtomicBool,
    /// Number of waits that were so long that another context must have used the card.
    stalls: AtomicU32,
    /// For each slot of the ring, the number that the kernel served there last. Null while no lane
    /// uses the ring.
    done: AtomicPtr<AtomicU32>,
    /// Number of the ring's slots.
    depth: AtomicU32,
}

/// The state that only one thread at a time accesses: one that puts the kernel on the card or takes
/// it off. The fields are dropped in this order.
struct Controller {
    kernel: Kernel,
    stream: OwnStream,
    device: DeviceMemory,
    /// The address of the rings' memory for the processor.
    host: NonNull<u8>,
    _memory: Allocation,
}

// SAFETY: the address is plain memory, which `_memory` keeps.
unsafe impl Send for Controller {}

impl Ring {
    /// Prepares rings in `memory`, whose address in CUDA is `device`. The kernel is loaded and not
    /// yet started.
    ///
    /// # Errors
    /// Fails when the driver cannot compile the kernel for this card.
    pub fn new(
        context: &Arc<Context>,
        memory: Allocation,
        device: DeviceMemory,
        tuning: Tuning,
        hot: &Arc<Hot>,
    ) -> Result<Self, CallError> {
        let unmapped = CallError { call: "a mapping for the ring", error: CudaError(801) };
        let host = memory.host().ok_or(unmapped)?;
        let kernel = context.kernel(PTX, c"weir_ring")?;
        let stream = context.stream()?;
        device.clear()?;
        Ok(Ring {
            state: AtomicU32::new(ABSENT),
            cells: std::array::from_fn(|_| Cell::default()),
            controller: Mutex::new(Controller { kernel, stream, device, host, _memory: memory }),
            context: Arc::clone(context),
            tuning,
            hot: Arc::clone(hot),
        })
    }

    /// Changes the ring's state, and then `resident` in the `Gate`, which lanes read when they
    /// choose a path.
    fn set(&self, state: u32) {
        self.state.store(state, Ordering::Release);
        self.hot.gate().resident.store(state == RESIDENT, Ordering::Relaxed);
    }

    /// Whether the kernel is on the card.
    pub fn is_resident(&self) -> bool {
        self.state.load(Ordering::Relaxed) == RESIDENT
    }

    /// Returns how many waits, since the last call of this function, were so long that another
    /// context must have had a time slice.
    pub fn take_stalls(&self) -> u32 {
        self.cells.iter().map(|cell| cell.stalls.swap(0, Ordering::Relaxed)).sum()
    }

    /// Asks the driver whether the kernel still runs: a dead kernel serves nothing and reports
    /// nothing.
    pub fn ask(&self) {
        if self.is_resident()
            && let Ok(controller) = self.controller.try_lock()
        {
            let _ = controller.stream.is_idle();
        }
    }

    /// Whether there is a lane that the resident kernel does not serve, because the lane was opened
    /// after the kernel's start.
    pub fn has_uncovered_lanes(&self) -> bool {
        self.is_resident()
            && self.cells.iter().any(|cell| {
                !cell.done.load(Ordering::Relaxed).is_null() && !cell.covered.load(Ordering::Relaxed)
            })
    }

    /// Puts the kernel on the card, unless a thread holds it off or there is no lane.
    ///
    /// # Errors
    /// Fails with the driver's error.
    pub fn enter(&self) -> Result<(), CallError> {
        let Ok(controller) = self.controller.try_lock() else { return Ok(()) };
        if self.state.load(Ordering::Relaxed) != ABSENT {
            return Ok(());
        }
        let mut block =
            ControlBlock { stop: 0, blocks: 0, unused: [0; 14], lanes: [LaneBlock::default(); LANES] };
        let (mut lanes, mut depth_min) = (0u32, DEPTH_MAX as u32);
        for (index, cell) in self.cells.iter().enumerate() {
            let done = cell.done.load(Ordering::Acquire);
            if done.is_null() {
                continue;
            }
            let depth = cell.depth.load(Ordering::Relaxed);
            depth_min = depth_min.min(depth);
            block.lanes[lanes as usize] = LaneBlock {
                ring: controller.device.address + ring_offset(index) as u64,
                done: done as u64,
                // The kernel begins where the last one ended: lanes add nothing while no kernel is
                // on the card.
                head: cell.added.load(Ordering::Relaxed),
                depth,
                unused: [0; 2],
            };
            lanes += 1;
        }
        if lanes == 0 {
            return Ok(());
        }
        block.blocks = share(self.tuning, lanes).min(depth_min);
        // SAFETY: while the kernel is absent, only this thread accesses the control block in the
        // mapped memory.
        unsafe { ptr::write_volatile(controller.host.as_ptr().cast::<ControlBlock>(), block) };
        fence_stores();
        controller.kernel.launch(
            &controller.stream,
            lanes * block.blocks,
            THREADS,
            controller.device.address,
        )?;
        for cell in &self.cells {
            cell.covered.store(!cell.done.load(Ordering::Relaxed).is_null(), Ordering::Relaxed);
        }
        self.set(RESIDENT);
        Ok(())
    }

    /// Takes the kernel off the card. Returns false if the kernel is still there after a time
    /// limit, because lanes still used the ring or the kernel did not answer.
    ///
    /// # Errors
    /// Fails when the kernel failed, which loses the card.
    pub fn leave(&self) -> Result<bool, CallError> {
        self.leave_from(&self.controller.lock().unwrap_or_else(PoisonError::into_inner))
    }

    /// Takes the kernel off the card, and holds it off until the guard is dropped. The driver waits
    /// for running kernels when memory is mapped or unmapped. So a thread that does either pauses
    /// the ring first.
    ///
    /// # Errors
    /// Fails when the kernel did not leave.
    pub fn pause(&self) -> Result<Paused<'_>, Fault> {
        let controller = self.controller.lock().unwrap_or_else(PoisonError::into_inner);
        match self.leave_from(&controller) {
            Ok(true) => Ok(Paused { _controller: controller }),
            Ok(false) => Err(Fault::Timeout),
            Err(_) => Err(Fault::Lost),
        }
    }

    fn leave_from(&self, controller: &Controller) -> Result<bool, CallError> {
        if self.state.load(Ordering::Relaxed) == ABSENT {
            return Ok(true);
        }
        if self.context.is_lost() {
            // The kernel is gone, since its context has died. The lanes' memory may be gone too, so
            // touch none of it.
            self.set(ABSENT);
            return Ok(true);
        }
        self.set(LEAVING);
        membarrier::all_threads();
        let since = Instant::now();
        let served = |cell: &Cell| cell.adding.load(Ordering::Acquire) == 0 && cell.all_served();
        while !self.cells.iter().all(served) {
            if self.context.is_lost() {
                break;
            }
            if since.elapsed() > LEAVE_LIMIT {
                self.set(RESIDENT);
                return Ok(false);
            }
            std::thread::yield_now();
        }
        // SAFETY: the address is the control block's first word, mapped and aligned; the kernel
        // reads it.
        unsafe { ptr::write_volatile(controller.host.as_ptr().cast::<u32>(), 1) };
        fence_stores();
        loop {
            if controller.stream.is_idle()? {
                self.set(ABSENT);
                return Ok(true);
            }
            if since.elapsed() > answer_limit() {
                self.context.declare_lost(Death::NoAnswer("the resident kernel, told to leave,"));
                return Ok(false);
            }
            std::thread::yield_now();
        }
    }

    /// Opens a lane of at most `depth` slots; `None` if all lanes are taken.
    ///
    /// # Errors
    /// Fails when memory cannot be pinned, or when the kernel did not leave the card, which it must
    /// do before memory is pinned.
    pub fn lane(self: &Arc<Self>, depth: usize) -> Result<Option<RingLane>, Fault> {
        let paused = self.pause()?;
        let Some(index) = self.cells.iter().position(|cell| cell.done.load(Ordering::Relaxed).is_null())
        else {
            return Ok(None);
        };
        let depth = depth.next_power_of_two().clamp(GATHER as usize, DEPTH_MAX);
        let taken = |_: CallError| Fault::Io(libc::ENOMEM);
        let staging = self.context.pinned(depth * PAGE_SIZE).map_err(taken)?;
        let done = self.context.pinned(PAGE_SIZE).map_err(taken)?;
        // SAFETY: the part of the mapped memory for rings is as long as all rings together.
        let ring = unsafe { paused._controller.host.as_ptr().add(ring_offset(index)) };
        let cell = &self.cells[index];
        // The new lane continues the numbers of the lane that had this ring before. So the kernel
        // never mistakes the earlier lane's descriptors for new ones.
        let first = match cell.depth.load(Ordering::Relaxed) {
            0 => FIRST,
            _ => cell.added.load(Ordering::Relaxed),
        };
        cell.added.store(first, Ordering::Relaxed);
        cell.depth.store(depth as u32, Ordering::Relaxed);
        let served: *mut AtomicU32 = done.as_ptr().cast();
        for number in (1..=depth as u32).map(|back| first.wrapping_sub(back)) {
            // SAFETY: a page holds a word for each of at most 256 slots, and nothing else has its
            // address yet. Each slot's word gets the number that the slot had last, before this
            // lane. So no operation of this lane counts as served yet.
            unsafe { (*served.add((number % depth as u32) as usize)).store(number, Ordering::Relaxed) };
        }
        cell.done.store(served, Ordering::Release);
        Ok(Some(RingLane {
            ring: Arc::clone(self),
            index,
            descriptors: ring,
            memory: ManuallyDrop::new([staging, done]),
            operations: vec![Operation::default(); depth].into_boxed_slice(),
            finished: first,
            started: first,
            queued: first,
            polls: 0,
            waiting: None,
            dead: false,
        }))
    }
}

impl Drop for Ring {
    fn drop(&mut self) {
        let _ = self.leave();
    }
}

impl std::fmt::Debug for Ring {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Ring").field("resident", &self.is_resident()).field("tuning", &self.tuning).finish()
    }
}

/// A guard that holds the kernel off the card.
pub struct Paused<'a> {
    _controller: MutexGuard<'a, Controller>,
}

impl Cell {
    /// Whether the kernel has served every descriptor that the cell's lane has added.
    fn all_served(&self) -> bool {
        let done = self.done.load(Ordering::Acquire);
        if done.is_null() {
            return true;
        }
        let (depth, end) = (self.depth.load(Ordering::Relaxed), self.added.load(Ordering::Acquire));
        (1..=depth).all(|back| {
            let number = end.wrapping_sub(back);
            // SAFETY: the lane's words, `depth` of them, are alive while the cell points to them.
            unsafe { (*done.add((number % depth) as usize)).load(Ordering::Acquire) == number }
        })
    }
}

/// Number of thread blocks for each of `lanes` lanes: a power of two.
fn share(tuning: Tuning, lanes: u32) -> u32 {
    let each = (tuning.blocks / lanes).clamp(1, tuning.lane_blocks);
    1 << each.ilog2()
}

fn ring_offset(lane: usize) -> usize {
    4096 + lane * DEPTH_MAX * DESCRIPTOR
}

/// A ring's answer when a lane wants to queue an operation.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Admission {
    /// The lane may queue the operation.
    Yes,
    /// The ring is full until some operations have been handed over.
    Full,
    /// The kernel is away, or about to leave.
    Away,
}

/// One thread's ring.
pub struct RingLane {
    ring: Arc<Ring>,
    index: usize,
    /// The descriptors of the ring, at their address for the processor.
    descriptors: *mut u8,
    /// Staging pages, and the numbers served. They are freed only while the kernel is known to be
    /// absent.
    memory: ManuallyDrop<[Pinned; 2]>,
    operations: Box<[Operation]>,
    /// Operation numbers: those before `finished` were handed over, those before `started` are in
    /// the ring, those before `queued` wait.
    finished: u32,
    started: u32,
    queued: u32,
    polls: u32,
    waiting: Option<Instant>,
    dead: bool,
}

#[derive(Clone, Copy, Default)]
struct Operation {
    ticket: Ticket,
    write: bool,
    slot: u32,
    from: u64,
    to: u64,
}

// SAFETY: `descriptors` is this lane's part of the mapped memory, which its ring keeps alive.
unsafe impl Send for RingLane {}

impl RingLane {
    fn cell(&self) -> &Cell {
        &self.ring.cells[self.index]
    }

    /// Whether an operation can be queued now. After [`Admission::Yes`] the caller must queue one.
    pub fn admits(&mut self) -> Admission {
        if self.dead {
            return Admission::Away;
        }
        if self.in_flight() >= self.operations.len() {
            return Admission::Full;
        }
        if self.queued != self.started {
            return Admission::Yes; // Already adding, so the kernel waits.
        }
        let cell = self.cell();
        cell.adding.store(1, Ordering::Relaxed);
        // This fence binds the compiler alone. The processor may still do the next load before this
        // store. The controller's `membarrier` makes that harmless.
        compiler_fence(Ordering::SeqCst);
        if self.ring.state.load(Ordering::Acquire) == RESIDENT && cell.covered.load(Ordering::Relaxed) {
            return Admission::Yes;
        }
        cell.adding.store(0, Ordering::Release);
        Admission::Away
    }

    /// Number of operations queued and not yet handed over.
    pub fn in_flight(&self) -> usize {
        self.queued.wrapping_sub(self.finished) as usize
    }

    fn place(&self, number: u32) -> usize {
        number as usize % self.operations.len()
    }

    fn staging_page(&self, number: u32) -> *mut u8 {
        // SAFETY: there is a staging page for each slot.
        unsafe { self.memory[0].as_ptr().add(self.place(number) * PAGE_SIZE) }
    }

    /// Queues a write; [`admits`](Self::admits) must have said yes just before.
    pub fn write(&mut self, ticket: Ticket, slot: Slot, device: u64, page: &PageBytes) {
        let staging = self.staging_page(self.queued);
        // SAFETY: since there is room, no operation in flight uses this staging page.
        unsafe { ptr::copy_nonoverlapping(page.as_ptr(), staging, PAGE_SIZE) };
        self.push(Operation { ticket, write: true, slot: slot.0, from: staging as u64, to: device });
    }

    /// Queues a read; [`admits`](Self::admits) must have said yes just before.
    pub fn read(&mut self, ticket: Ticket, slot: Slot, device: u64) {
        let staging = self.staging_page(self.queued);
        self.push(Operation { ticket, write: false, slot: slot.0, from: device, to: staging as u64 });
    }

    fn push(&mut self, operation: Operation) {
        let slot = self.place(self.queued);
        self.operations[slot] = operation;
        self.queued = self.queued.wrapping_add(1);
        if self.queued.wrapping_sub(self.started) >= GATHER {
            self.submit();
        }
    }

    /// Writes the descriptors of all waiting operations.
    pub fn submit(&mut self) {
        if self.started == self.queued {
            return;
        }
        // Non-temporal stores may overtake ordinary ones. So fence here: the staging pages must be
        // visible before the descriptors.
        fence_stores();
        while self.started != self.queued {
            let slot = self.place(self.started);
            let operation = self.operations[slot];
            let line = descriptor(self.started, operation.from, operation.to);
            // SAFETY: a slot's descriptor is one cache line of this lane's ring. The kernel no
            // longer reads the earlier descriptor in that line, since its operation has been handed
            // over.
            unsafe { store_line(&line, self.descriptors.add(slot * DESCRIPTOR)) };
            self.started = self.started.wrapping_add(1);
        }
        fence_stores();
        let cell = self.cell();
        cell.added.store(self.started, Ordering::Release);
        cell.adding.store(0, Ordering::Release);
    }

    /// Hands over the served operations, in order. If the context has died, the rest stays in
    /// flight, to be [salvaged](Self::salvage).
    pub fn poll(&mut self, now: Instant, done: &mut dyn FnMut(Done<'_>)) {
        let served: *const AtomicU32 = self.memory[1].as_ptr().cast();
        while self.finished != self.started {
            let (number, slot) = (self.finished, self.place(self.finished));
            // SAFETY: there is a word for each slot, which the card writes and the processor reads.
            let is_served = unsafe { (*served.add(slot)).load(Ordering::Acquire) == number };
            if !is_served {
                self.wait_longer(now);
                break;
            }
            let operation = self.operations[slot];
            // SAFETY: the card wrote this staging page before it stored the operation's number as
            // served, with release semantics. So it does not access the page any more.
            let page = unsafe { &*self.staging_page(number).cast::<PageBytes>() };
            self.finished = number.wrapping_add(1);
            self.waiting = None;
            self.polls = 0;
            let page = (!operation.write).then_some(page);
            done(Done { ticket: operation.ticket, result: Ok(()), page });
        }
    }

    /// Hands over all operations in flight, so that another path does them again. Nobody knows
    /// which of their copies were done. The lane takes no operation afterwards.
    pub fn salvage(&mut self, redo: &mut dyn FnMut(Salvaged<'_>)) {
        self.dead = true;
        while self.finished != self.queued {
            let Operation { ticket, write, slot, .. } = self.operations[self.place(self.finished)];
            // SAFETY: a write's staging page was filled when it was queued, and the card only reads
            // it.
            let page = write.then(|| unsafe { &*self.staging_page(self.finished).cast::<PageBytes>() });
            self.finished = self.finished.wrapping_add(1);
            redo(Salvaged { ticket, slot: Slot(slot), page });
        }
        self.started = self.queued;
        let cell = self.cell();
        cell.adding.store(0, Ordering::Release);
    }

    /// Counts a poll that found the next operation not served. Now and then, checks how long that
    /// operation has waited.
    fn wait_longer(&mut self, now: Instant) {
        self.polls += 1;
        if !self.polls.is_multiple_of(CLOCK_EVERY) {
            return;
        }
        let since = *self.waiting.get_or_insert(now);
        let waited = now.saturating_duration_since(since);
        if waited > STALL {
            let stalls = &self.cell().stalls;
            stalls.store(stalls.load(Ordering::Relaxed) + 1, Ordering::Relaxed);
        }
        if waited > answer_limit() {
            // The card may still write into the staging pages at any time, so this lane never uses
            // them again.
            self.dead = true;
            self.ring.context.declare_lost(Death::NoAnswer("the resident kernel"));
        }
    }
}

impl Drop for RingLane {
    fn drop(&mut self) {
        let ring = Arc::clone(&self.ring);
        self.cell().adding.store(0, Ordering::Release);
        // If the kernel does not leave, the card may still write to the lane's memory. Then the
        // memory is never freed.
        if let Ok(_paused) = ring.pause() {
            self.cell().done.store(ptr::null_mut(), Ordering::Release);
            // SAFETY: dropped only once, here, and the kernel is absent.
            unsafe { ManuallyDrop::drop(&mut self.memory) };
        }
    }
}
