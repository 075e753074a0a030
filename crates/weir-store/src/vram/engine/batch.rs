//! One thread's copies, gathered into batches.
//!
//! Operations take staging pages in turn. So a run of neighbouring slots lies in neighbouring
//! staging pages, and becomes one copy. A stream finishes its copies in order, so a batch is done
//! when the event that was recorded after it has occurred. The event's result is the result of that
//! batch alone.

use super::driver::{Event, MemLocation, MemcpyAttributes, check};
use super::{CallError, Context, CudaError, DevicePtr, OwnStream, Pinned};
use crate::vram::answer_limit;
use crate::vram::condition::Death;
use crate::vram::lane::Salvaged;
use crate::{Done, Fault, Ticket};
use std::ffi::c_void;
use std::ptr;
use std::slice;
use std::sync::Arc;
use std::time::Instant;
use weir_core::{PAGE_SIZE, PageBytes, Slot};

/// Largest number of batches under way at once. Two would keep the engine busy; more let small ones
/// overlap.
const BATCHES: usize = 8;
/// Distance, in pages, from the page that is handed over now to the page that is prefetched
/// meanwhile.
const AHEAD: usize = 2;

/// A stream, its staging memory, and the operations that wait or are in flight.
pub struct BatchLane {
    context: Arc<Context>,
    stream: OwnStream,
    staging: Pinned,
    operations: Box<[Operation]>,
    /// Page numbers that only grow: pages below `finished` were handed over, those below `started`
    /// are in a batch, those below `queued` wait. `number % depth` is the staging page, and the
    /// index of an operation that begins with this page.
    finished: u64,
    started: u64,
    queued: u64,
    batches: [Batch; BATCHES],
    /// Number of batches that were ever begun, and number of those that have ended. `begun %
    /// BATCHES` is the index of the next one.
    begun: u64,
    ended: u64,
    /// The copies from the card at index 0, and those to it at index 1.
    copies: [Copies; 2],
    dead: bool,
}

#[derive(Clone, Copy, Default)]
struct Operation {
    ticket: Ticket,
    write: bool,
    slot: u32,
    /// Number of pages, which lie side by side in slots and in staging memory.
    pages: u32,
    /// Whether this is the first page of a chunk. The memory before it is another allocation, and
    /// no copy may reach into both.
    opens_chunk: bool,
    device: DevicePtr,
}

struct Batch {
    event: Event,
    /// The sequence number after that of the batch's last operation.
    end: u64,
    begun: Option<Instant>,
    /// The fault of a batch that was not started as a whole. A part of it may be under way.
    failed: Option<Fault>,
}

/// The copies of a batch, one for each run of neighbours. There is room for as many copies as
/// pages, for a batch without neighbours.
struct Copies {
    to: Vec<DevicePtr>,
    from: Vec<DevicePtr>,
    sizes: Vec<usize>,
}

impl Copies {
    fn new(depth: usize) -> Self {
        let addresses = || Vec::with_capacity(depth);
        Copies { to: addresses(), from: addresses(), sizes: Vec::with_capacity(depth) }
    }

    fn clear(&mut self) {
        self.to.clear();
        self.from.clear();
        self.sizes.clear();
    }
}

// SAFETY: any thread may use the event handles; all other fields are Send themselves.
unsafe impl Send for BatchLane {}

impl BatchLane {
    /// Makes a lane with `depth` staging pages.
    ///
    /// # Errors
    /// Fails when the driver has no memory or no stream left.
    pub fn new(context: &Arc<Context>, depth: usize) -> Result<Self, CallError> {
        let staging = context.pinned(depth * PAGE_SIZE)?;
        let stream = context.stream()?;
        let mut lane = BatchLane {
            context: Arc::clone(context),
            stream,
            staging,
            operations: vec![Operation::default(); depth].into_boxed_slice(),
            finished: 0,
            started: 0,
            queued: 0,
            batches: [const { Batch { event: ptr::null_mut(), end: 0, begun: None, failed: None } }; BATCHES],
            begun: 0,
            ended: 0,
            copies: [Copies::new(depth), Copies::new(depth)],
            dead: false,
        };
        for batch in &mut lane.batches {
            // SAFETY: the output outlives the call; 2 is CU_EVENT_DISABLE_TIMING.
            check("cuEventCreate", unsafe { (context.driver.event_create)(&mut batch.event, 2) })?;
        }
        Ok(lane)
    }

    /// Number of pages that were queued, and whose completions the caller does not have yet.
    pub fn in_flight(&self) -> usize {
        (self.queued - self.finished) as usize
    }

    /// Whether there is room for another page.
    pub fn has_room(&self) -> bool {
        self.in_flight() < self.operations.len()
    }

    /// Largest number of pages that the next operation may have. Its staging pages must be free and
    /// lie side by side.
    pub fn run_room(&self) -> usize {
        let depth = self.operations.len();
        (depth - self.in_flight()).min(depth - (self.queued % depth as u64) as usize)
    }

    fn staging_page(&self, number: u64) -> *mut u8 {
        let index = (number % self.operations.len() as u64) as usize;
        // SAFETY: the staging memory has a page for each index.
        unsafe { self.staging.as_ptr().add(index * PAGE_SIZE) }
    }

    /// Queues a write of `pages` at `offset` in the chunk that begins at `chunk`; there must be
    /// [room](Self::run_room).
    pub fn write(
        &mut self,
        ticket: Ticket,
        slot: Slot,
        (chunk, offset): (DevicePtr, u64),
        pages: &[PageBytes],
    ) {
        debug_assert!(pages.len() <= self.run_room());
        let staging = self.staging_page(self.queued);
        // SAFETY: since there is room, no operation in flight uses these staging pages.
        unsafe { ptr::copy_nonoverlapping(pages.as_ptr().cast(), staging, size_of_val(pages)) };
        self.push(ticket, true, slot, (chunk, offset), pages.len());
    }

    /// Queues a read of `pages` pages. It has the rules of [`write`](Self::write).
    pub fn read(&mut self, ticket: Ticket, slot: Slot, place: (DevicePtr, u64), pages: usize) {
        self.push(ticket, false, slot, place, pages);
    }

    fn push(
        &mut self,
        ticket: Ticket,
        write: bool,
        slot: Slot,
        (chunk, offset): (DevicePtr, u64),
        pages: usize,
    ) {
        debug_assert!(pages <= self.run_room());
        let index = (self.queued % self.operations.len() as u64) as usize;
        let (opens_chunk, device, pages) = (offset == 0, chunk + offset, pages as u32);
        self.operations[index] = Operation { ticket, write, slot: slot.0, pages, opens_chunk, device };
        self.queued += u64::from(pages);
    }

    /// Starts waiting operations, as far as batches are free; [`poll`](Self::poll) starts the rest.
    pub fn submit(&mut self) {
        while self.started != self.queued && self.begun - self.ended < BATCHES as u64 {
            let end = self.gather();
            let failed = self.start().err().map(fault);
            let batch = &mut self.batches[(self.begun % BATCHES as u64) as usize];
            batch.end = end;
            batch.begun = None;
            batch.failed = failed;
            self.begun += 1;
            self.started = end;
        }
    }

    /// Turns waiting operations into copies, one for each run of neighbours, as many as fit one
    /// batch. Returns the number of the first page that is in none of them.
    fn gather(&mut self) -> u64 {
        self.copies.iter_mut().for_each(Copies::clear);
        let depth = self.operations.len() as u64;
        let mut next = (false, 0, 0);
        let mut number = self.started;
        while number < self.queued {
            let operation = self.operations[(number % depth) as usize];
            let Operation { write, device, .. } = operation;
            let bytes = operation.pages as usize * PAGE_SIZE;
            let staging = self.staging_page(number) as DevicePtr;
            let copies = &mut self.copies[usize::from(write)];
            if next == (write, device, staging) && !operation.opens_chunk && !copies.sizes.is_empty() {
                *copies.sizes.last_mut().expect("not empty") += bytes;
            } else {
                // With one copy in each call, a batch may have any number of calls, and one event
                // after them. Otherwise the batch is one call, which may name no more than `most`
                // copies.
                let most = self.context.batch_copies(write);
                if most > 1 && copies.sizes.len() == most {
                    return number;
                }
                let (to, from) = if write { (device, staging) } else { (staging, device) };
                copies.to.push(to);
                copies.from.push(from);
                copies.sizes.push(bytes);
            }
            next = (write, device + bytes as u64, staging + bytes as u64);
            number += u64::from(operation.pages);
        }
        self.queued
    }

    /// Hands the copies to the driver and records the event after them.
    fn start(&self) -> Result<(), CallError> {
        if self.dead {
            return Err(CallError { call: "this lane", error: CudaError(999) });
        }
        self.context.enter()?;
        let event = self.batches[(self.begun % BATCHES as u64) as usize].event;
        self.copy(false)?;
        self.copy(true)?;
        // SAFETY: event and stream are alive.
        let result = unsafe { (self.context.driver.event_record)(event, self.stream.stream) };
        self.context.check("cuEventRecord", result)
    }

    fn copy(&self, write: bool) -> Result<(), CallError> {
        let d = &self.context.driver;
        let copies = &self.copies[usize::from(write)];
        let (to, from, sizes) = (copies.to.as_ptr(), copies.from.as_ptr(), copies.sizes.as_ptr());
        let (count, stream) = (copies.sizes.len(), self.stream.stream);
        // The value 1 is CU_MEMCPY_SRC_ACCESS_ORDER_STREAM: a copy reads its source in the order of
        // the stream. Hints about locations matter only for managed memory, which no address here
        // is.
        let nowhere = MemLocation { kind: 0, id: 0 };
        let attributes =
            MemcpyAttributes { source_order: 1, source: nowhere, destination: nowhere, flags: 0 };
        let first = 0usize;
        if count > 1 && self.context.batch_copies(write) > 1 {
            if let Some(batch) = d.copy_batch_13 {
                // SAFETY: the arrays hold `count` entries, and the one attribute covers all of
                // them. Every address is a page of staging, or of a chunk that stays until the
                // batch has ended.
                let result = unsafe { batch(to, from, sizes, count, &attributes, &first, 1, stream) };
                return self.context.check("cuMemcpyBatchAsync", result);
            }
            if let Some(batch) = d.copy_batch_12 {
                let mut failed = usize::MAX;
                // SAFETY: every address is a page of staging, or of a chunk that stays until the
                // batch has ended.
                let result =
                    unsafe { batch(to, from, sizes, count, &attributes, &first, 1, &mut failed, stream) };
                return self.context.check("cuMemcpyBatchAsync", result);
            }
        }
        for ((&to, &from), &bytes) in copies.to.iter().zip(&copies.from).zip(&copies.sizes) {
            // SAFETY: every address is a page of staging, or of a chunk that stays until the batch
            // has ended.
            let result = unsafe {
                if write {
                    (d.copy_to_device)(to, from as *const c_void, bytes, stream)
                } else {
                    (d.copy_to_host)(to as *mut c_void, from, bytes, stream)
                }
            };
            self.context.check("cuMemcpyAsync", result)?;
        }
        Ok(())
    }

    /// Hands over the operations of every batch that has ended. If the context has died, the rest
    /// stays in flight, to be [salvaged](Self::salvage).
    pub fn poll(&mut self, now: Instant, done: &mut dyn FnMut(Done<'_>)) {
        for number in self.ended..self.begun {
            self.batches[(number % BATCHES as u64) as usize].begun.get_or_insert(now);
        }
        while self.ended < self.begun {
            let at = (self.ended % BATCHES as u64) as usize;
            let Some(outcome) = self.outcome(now, at) else { break };
            if outcome.is_err() && self.context.is_lost() {
                // The lane's owner ends the operations that are left, by another path if it has
                // one.
                return;
            }
            let end = self.batches[at].end;
            while self.finished < end {
                let operation = self.operations[(self.finished % self.operations.len() as u64) as usize];
                // SAFETY: the staging pages lie side by side. The copies into these pages have
                // ended. No new copy into them starts before their operations are handed over.
                let pages = unsafe {
                    slice::from_raw_parts(
                        self.staging_page(self.finished).cast::<PageBytes>(),
                        operation.pages as usize,
                    )
                };
                for (at, page) in pages.iter().enumerate() {
                    let has_page = outcome.is_ok() && !operation.write;
                    if has_page && let Some(ahead) = pages.get(at + AHEAD) {
                        // Prefetch a page some steps before it is handed over. The card has just
                        // written it, so no cache of this processor has it.
                        weir_core::prefetch(ahead);
                    }
                    self.finished += 1;
                    done(Done { ticket: operation.ticket, result: outcome, page: has_page.then_some(page) });
                }
            }
            self.ended += 1;
        }
        self.submit();
    }

    /// Hands over all operations in flight, so that another path does them again. Nobody knows
    /// which of their copies were done. The lane takes no operation afterwards.
    pub fn salvage(&mut self, redo: &mut dyn FnMut(Salvaged<'_>)) {
        self.dead = true;
        while self.finished < self.queued {
            let Operation { ticket, write, slot, pages, .. } =
                self.operations[(self.finished % self.operations.len() as u64) as usize];
            for slot in slot..slot + pages {
                // SAFETY: a write's staging page was filled when it was queued, and the card only
                // reads it.
                let page = write.then(|| unsafe { &*self.staging_page(self.finished).cast::<PageBytes>() });
                self.finished += 1;
                redo(Salvaged { ticket, slot: Slot(slot), page });
            }
        }
        (self.started, self.ended) = (self.queued, self.begun);
    }

    /// The result of a batch; `None` while it has not ended.
    fn outcome(&mut self, now: Instant, at: usize) -> Option<Result<(), Fault>> {
        let batch = &self.batches[at];
        if self.dead {
            return Some(Err(batch.failed.unwrap_or(Fault::Lost)));
        }
        if let Some(fault) = batch.failed {
            // No event says when the part that was started has ended. Until the stream is idle, the
            // card may use the batch's staging pages. Later batches keep the stream busy for a
            // bounded time: no more than `BATCHES` begin before this one ends.
            if !matches!(self.stream.is_idle(), Ok(false)) {
                return Some(Err(fault));
            }
        } else {
            // SAFETY: the event was recorded.
            let result = unsafe { (self.context.driver.event_query)(batch.event) };
            if CudaError(result) != CudaError::NOT_READY {
                return Some(self.context.check("cuEventQuery", result).map_err(fault));
            }
        }
        let late = batch.begun.is_some_and(|begun| now.saturating_duration_since(begun) > answer_limit());
        if !late {
            return None;
        }
        // The card may still write to the staging pages at any time. So this lane never uses them
        // again.
        self.dead = true;
        self.context.declare_lost(Death::NoAnswer("a batch of copies"));
        Some(Err(Fault::Timeout))
    }
}

/// The fault of the batch's operations after a driver error.
fn fault(error: CallError) -> Fault {
    if error.error.is_sticky() { Fault::Lost } else { Fault::Io(libc::EIO) }
}

impl Drop for BatchLane {
    fn drop(&mut self) {
        let BatchLane { context, stream, batches, .. } = self;
        context.end(|driver| {
            // If the context is lost, the driver may never answer. So do not wait for it.
            if !context.is_lost() {
                let _ = stream.synchronize();
            }
            for batch in batches.iter().filter(|batch| !batch.event.is_null()) {
                // SAFETY: `new` made the event, and nothing waits for it any more.
                let _ = unsafe { (driver.event_destroy)(batch.event) };
            }
        });
    }
}
