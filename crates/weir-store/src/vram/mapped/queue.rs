//! Copies by the card's transfer queue, for memory that the processor does not see: on cards
//! without Resizable BAR and without CUDA. It is slower than a window, and the only path there.
//!
//! As in CUDA's batches ([`crate::vram::engine`]), operations take staging pages in turn,
//! neighbours become one copy, and a batch is done when its fence is signalled.

use super::{Allocation, Device, Named, VulkanError};
use crate::vram::answer_limit;
use crate::{Done, Fault, Ticket};
use ash::vk;
use ash::vk::Handle;
use std::ptr;
use std::sync::{Arc, PoisonError};
use std::time::Instant;
use weir_core::{PAGE_SIZE, PageBytes};

/// Largest number of batches under way at once.
const BATCHES: usize = 4;

/// The place of a page: an allocation's buffer, as a number, and the offset in it.
#[derive(Clone, Copy, Default, PartialEq, Eq, Debug)]
pub struct BufferAddress {
    /// The buffer's number, from [`Allocation::buffer`].
    pub buffer: u64,
    /// The page's offset in the buffer, in bytes.
    pub offset: u64,
}

/// One thread's staging memory and its batches.
pub struct QueueLane {
    device: Arc<Device>,
    staging: Allocation,
    pool: vk::CommandPool,
    operations: Box<[Operation]>,
    /// Operation numbers that only grow: operations below `finished` were handed over, those below
    /// `started` are in a batch, those below `queued` wait. `number % depth` is the staging page.
    finished: u64,
    started: u64,
    queued: u64,
    batches: [Batch; BATCHES],
    begun: u64,
    ended: u64,
    dead: bool,
}

#[derive(Clone, Copy, Default)]
struct Operation {
    ticket: Ticket,
    write: bool,
    place: BufferAddress,
}

struct Batch {
    commands: vk::CommandBuffer,
    fence: vk::Fence,
    /// The sequence number after that of the batch's last operation.
    end: u64,
    begun: Option<Instant>,
    failed: Option<Fault>,
}

// SAFETY: the staging address is plain memory, and Vulkan's handles may move between threads. Only
// this lane uses them.
unsafe impl Send for QueueLane {}

impl QueueLane {
    /// Makes a lane with `depth` staging pages.
    ///
    /// # Errors
    /// Fails when the driver has no memory for the lane.
    pub fn new(device: &Arc<Device>, depth: usize) -> Result<Self, VulkanError> {
        let staging = device.staging((depth * PAGE_SIZE) as u64)?;
        let d = &device.device;
        let nothing = || Batch {
            commands: vk::CommandBuffer::null(),
            fence: vk::Fence::null(),
            end: 0,
            begun: None,
            failed: None,
        };
        // SAFETY: every create-info outlives its call; the handles are dropped with the lane, after
        // errors too.
        unsafe {
            let info = vk::CommandPoolCreateInfo::default()
                .queue_family_index(device.card.queue)
                .flags(vk::CommandPoolCreateFlags::RESET_COMMAND_BUFFER);
            let pool = d.create_command_pool(&info, None).of("vkCreateCommandPool")?;
            let mut lane = QueueLane {
                device: Arc::clone(device),
                staging,
                pool,
                operations: vec![Operation::default(); depth].into_boxed_slice(),
                finished: 0,
                started: 0,
                queued: 0,
                batches: std::array::from_fn(|_| nothing()),
                begun: 0,
                ended: 0,
                dead: false,
            };
            let info = vk::CommandBufferAllocateInfo::default()
                .command_pool(pool)
                .command_buffer_count(BATCHES as u32);
            let commands = d.allocate_command_buffers(&info).of("vkAllocateCommandBuffers")?;
            for (batch, commands) in lane.batches.iter_mut().zip(commands) {
                batch.commands = commands;
                batch.fence = d.create_fence(&vk::FenceCreateInfo::default(), None).of("vkCreateFence")?;
            }
            Ok(lane)
        }
    }

    /// Number of operations that were queued, and whose completions the caller does not have yet.
    pub fn in_flight(&self) -> usize {
        (self.queued - self.finished) as usize
    }

    /// Whether there is room for another operation.
    pub fn has_room(&self) -> bool {
        self.in_flight() < self.operations.len()
    }

    fn staging_offset(&self, number: u64) -> usize {
        (number % self.operations.len() as u64) as usize * PAGE_SIZE
    }

    fn staging_page(&self, number: u64) -> *mut u8 {
        let host = self.staging.host().map_or(ptr::null_mut(), ptr::NonNull::as_ptr);
        // SAFETY: the staging memory is mapped, with a page for each operation.
        unsafe { host.add(self.staging_offset(number)) }
    }

    /// Queues a write; there must be room.
    pub fn write(&mut self, ticket: Ticket, place: BufferAddress, page: &PageBytes) {
        // SAFETY: since there is room, no operation in flight uses this staging page.
        unsafe { ptr::copy_nonoverlapping(page.as_ptr(), self.staging_page(self.queued), PAGE_SIZE) };
        self.push(Operation { ticket, write: true, place });
    }

    /// Queues a read; there must be room.
    pub fn read(&mut self, ticket: Ticket, place: BufferAddress) {
        self.push(Operation { ticket, write: false, place });
    }

    fn push(&mut self, operation: Operation) {
        let index = (self.queued % self.operations.len() as u64) as usize;
        self.operations[index] = operation;
        self.queued += 1;
    }

    /// Starts waiting operations, if a batch is free; otherwise [`poll`](Self::poll) starts them.
    pub fn submit(&mut self) {
        if self.started == self.queued || self.begun - self.ended == BATCHES as u64 {
            return;
        }
        let failed = if self.dead { Some(Fault::Lost) } else { self.start().err().map(fault) };
        let batch = &mut self.batches[(self.begun % BATCHES as u64) as usize];
        batch.end = self.queued;
        batch.begun = None;
        batch.failed = failed;
        self.begun += 1;
        self.started = self.queued;
    }

    /// Records the waiting operations and hands them to the queue.
    fn start(&self) -> Result<(), VulkanError> {
        let batch = &self.batches[(self.begun % BATCHES as u64) as usize];
        let (d, commands) = (&self.device.device, batch.commands);
        let info = vk::CommandBufferBeginInfo::default().flags(vk::CommandBufferUsageFlags::ONE_TIME_SUBMIT);
        // SAFETY: the batch has ended, so this lane may record its commands and reset its fence.
        // Every buffer is the staging memory, or a chunk that stays until the batch has ended.
        unsafe {
            d.begin_command_buffer(commands, &info).of("vkBeginCommandBuffer")?;
            let mut at = self.started;
            while at < self.queued {
                at = self.record_run(commands, at);
            }
            // The barrier makes the copies in the staging memory visible to the processor.
            let barrier = [vk::MemoryBarrier::default()
                .src_access_mask(vk::AccessFlags::TRANSFER_WRITE)
                .dst_access_mask(vk::AccessFlags::HOST_READ)];
            let (copies, host) = (vk::PipelineStageFlags::TRANSFER, vk::PipelineStageFlags::HOST);
            d.cmd_pipeline_barrier(commands, copies, host, vk::DependencyFlags::empty(), &barrier, &[], &[]);
            d.end_command_buffer(commands).of("vkEndCommandBuffer")?;
            d.reset_fences(&[batch.fence]).of("vkResetFences")?;
            let all = [commands];
            let submit = [vk::SubmitInfo::default().command_buffers(&all)];
            // The threads of all lanes, and the one that clears chunks, submit to one queue. So
            // take its lock.
            let _turn = self.device.queue_turn.lock().unwrap_or_else(PoisonError::into_inner);
            d.queue_submit(self.device.queue, &submit, batch.fence).of("vkQueueSubmit")
        }
    }

    /// Records one copy of operation `first` and of the neighbours that follow it. Returns the
    /// number after that of the last operation in the copy.
    ///
    /// # Safety
    /// This thread must be recording `commands`.
    unsafe fn record_run(&self, commands: vk::CommandBuffer, first: u64) -> u64 {
        let depth = self.operations.len() as u64;
        let operation = |number: u64| self.operations[(number % depth) as usize];
        let Operation { write, place, .. } = operation(first);
        let mut end = first + 1;
        // Neighbours lie side by side on the card, and in the staging memory, which wraps at its
        // end.
        while end < self.queued && !end.is_multiple_of(depth) {
            let next = operation(end);
            let offset = place.offset + (end - first) * PAGE_SIZE as u64;
            if next.write != write || next.place != (BufferAddress { offset, ..place }) {
                break;
            }
            end += 1;
        }
        let (chunk, staging) = (vk::Buffer::from_raw(place.buffer), self.staging.buffer);
        let (near, far) = (self.staging_offset(first) as u64, place.offset);
        let size = (end - first) * PAGE_SIZE as u64;
        let (from, to, src, dst) =
            if write { (staging, chunk, near, far) } else { (chunk, staging, far, near) };
        let region = [vk::BufferCopy::default().src_offset(src).dst_offset(dst).size(size)];
        // SAFETY: the caller guarantees that `commands` is being recorded, and both ranges lie in
        // their buffers.
        unsafe { self.device.device.cmd_copy_buffer(commands, from, to, &region) };
        end
    }

    /// Hands over the operations of every batch that has ended.
    pub fn poll(&mut self, now: Instant, done: &mut dyn FnMut(Done<'_>)) {
        for number in self.ended..self.begun {
            self.batches[(number % BATCHES as u64) as usize].begun.get_or_insert(now);
        }
        while self.ended < self.begun {
            let at = (self.ended % BATCHES as u64) as usize;
            let Some(outcome) = self.outcome(now, at) else { break };
            let end = self.batches[at].end;
            while self.finished < end {
                let operation = self.operations[(self.finished % self.operations.len() as u64) as usize];
                // SAFETY: the copy into this staging page has ended, and no new one starts before
                // the page is handed over.
                let page = unsafe { &*self.staging_page(self.finished).cast::<PageBytes>() };
                self.finished += 1;
                let page = (outcome.is_ok() && !operation.write).then_some(page);
                done(Done { ticket: operation.ticket, result: outcome, page });
            }
            self.ended += 1;
        }
        self.submit();
    }

    /// The result of a batch; `None` while it has not ended.
    fn outcome(&mut self, now: Instant, at: usize) -> Option<Result<(), Fault>> {
        let batch = &self.batches[at];
        if let Some(fault) = batch.failed {
            return Some(Err(fault));
        }
        if self.dead {
            return Some(Err(Fault::Lost));
        }
        // SAFETY: the fence was submitted to the queue.
        match unsafe { self.device.device.get_fence_status(batch.fence) } {
            Ok(true) => return Some(Ok(())),
            Ok(false) => {}
            Err(result) => {
                self.dead = true;
                return Some(Err(fault(VulkanError { call: "vkGetFenceStatus", result })));
            }
        }
        let late = batch.begun.is_some_and(|begun| now.saturating_duration_since(begun) > answer_limit());
        if !late {
            return None;
        }
        // The card may still write to the staging pages at any time. So this lane never uses them
        // again. Nobody can learn when a copy to the card has ended, so a slot that waits for that
        // would never be free again. The card is lost from here on, and takes no page any more.
        self.dead = true;
        Some(Err(Fault::Lost))
    }

    /// Whether the card no longer answers.
    pub fn is_dead(&self) -> bool {
        self.dead
    }
}

/// The fault of the batch's operations after a driver error.
fn fault(error: VulkanError) -> Fault {
    if error.is_lost() { Fault::Lost } else { Fault::Io(libc::EIO) }
}

impl Drop for QueueLane {
    fn drop(&mut self) {
        let d = &self.device.device;
        let flying = (self.ended..self.begun).map(|number| &self.batches[(number % BATCHES as u64) as usize]);
        let fences: Vec<vk::Fence> =
            flying.filter(|batch| batch.failed.is_none()).map(|batch| batch.fence).collect();
        // SAFETY: operations in flight are waited for before anything that they use is destroyed;
        // this lane made all of it.
        unsafe {
            if !fences.is_empty() {
                let _ = d.wait_for_fences(&fences, true, answer_limit().as_nanos() as u64);
            }
            for batch in &self.batches {
                d.destroy_fence(batch.fence, None);
            }
            d.destroy_command_pool(self.pool, None);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::time::Duration;

    #[test]
    fn operations_that_the_queue_never_answers_are_lost_and_so_are_later_ones() {
        let gpu = Arc::new(Device::find(0, true, true).expect("lavapipe, from mesa-vulkan-drivers"));
        let chunk = gpu.allocate(1 << 20).expect("memory");
        let mut lane = QueueLane::new(&gpu, 4).expect("memory");
        let place = BufferAddress { buffer: chunk.buffer(), offset: 0 };
        lane.write(7, place, &[1; PAGE_SIZE]);
        // The queue never gets this batch, so its fence is never signalled.
        (lane.batches[0].end, lane.begun, lane.started) = (lane.queued, 1, lane.queued);
        let (begun, mut ended) = (Instant::now(), Vec::new());
        let mut poll = |lane: &mut QueueLane, after: Duration| {
            lane.poll(begun + after, &mut |done| ended.push((done.ticket, done.result)));
            ended.clone()
        };
        assert_eq!(poll(&mut lane, Duration::ZERO), []);
        assert_eq!(poll(&mut lane, answer_limit()), []);
        // A timeout would keep the slot until the store names it as settled, which it never does.
        let late = answer_limit() + Duration::from_millis(1);
        assert_eq!(poll(&mut lane, late), [(7, Err(Fault::Lost))]);
        lane.read(8, place);
        lane.submit();
        assert_eq!(poll(&mut lane, late), [(7, Err(Fault::Lost)), (8, Err(Fault::Lost))]);
        assert!(lane.is_dead());
    }
}
