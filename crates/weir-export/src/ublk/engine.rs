//! The part of a ublk queue that needs no io_uring: the queue's requests, and its lane of the
//! device. The queue's thread passes request descriptors to an [`Engine`], and takes the results
//! from it.

use super::request::{Rules, is_swap, success, urgent_first};
use super::stats::Counters;
use super::uapi::Descriptor;
use crate::buffer::Buffer;
use std::collections::VecDeque;
use std::io;
use std::os::fd::BorrowedFd;
use std::time::Instant;
use weir_core::{PAGE_SIZE, PageBytes};
use weir_device::PageLane;
use weir_request::{Answer, Id, Op, Request, RequestMemory, Requests, errno};

/// Bytes of the longest request that a device is made for.
pub(super) const REQUEST_BYTES_MAX: u32 = 1 << 20;

/// The parts of a queue without its io_uring.
pub(super) struct Engine<L> {
    requests: Requests<L>,
    memory: TagMemory,
    batch: Vec<Taken>,
    /// Tags whose requests are refused, with the error that answers each.
    refused: VecDeque<(u16, i32)>,
}

/// A request of the batch that is about to begin.
#[derive(Clone, Copy)]
struct Taken {
    tag: u16,
    swap: bool,
    request: Request,
}

/// The memory of the tags: a buffer for each, one after the other.
struct TagMemory {
    buffer: Buffer,
    /// Number of pages of each buffer.
    span: usize,
}

impl RequestMemory for TagMemory {
    fn data(&self, tag: Id) -> &[u8] {
        &self.buffer[usize::from(tag) * self.span * PAGE_SIZE..]
    }

    fn pages(&mut self, tag: Id, at: u32) -> &mut [PageBytes] {
        let from = usize::from(tag) * self.span;
        &mut self.buffer.pages_mut()[from + at as usize..from + self.span]
    }
}

impl<L: PageLane> Engine<L> {
    /// Makes an engine, with all its memory: `depth` buffers of `request_bytes`.
    ///
    /// # Errors
    /// Fails when the memory cannot be had.
    pub fn new(lane: L, depth: u16, request_bytes: u32) -> io::Result<Self> {
        let span = request_bytes as usize / PAGE_SIZE;
        Ok(Engine {
            requests: Requests::new(lane, depth),
            memory: TagMemory { buffer: Buffer::new(usize::from(depth) * span * PAGE_SIZE)?, span },
            batch: Vec::with_capacity(depth.into()),
            refused: VecDeque::with_capacity(depth.into()),
        })
    }

    /// Whether the buffers are locked in RAM.
    pub fn is_locked(&self) -> bool {
        self.memory.buffer.is_locked()
    }

    /// The address of a tag's buffer.
    pub fn address(&mut self, tag: u16) -> u64 {
        let TagMemory { buffer, span } = &self.memory;
        buffer.as_mut_ptr() as u64 + (usize::from(tag) * span * PAGE_SIZE) as u64
    }

    /// Adds a request to the batch; `tag` must be idle. An invalid request is answered with an
    /// error.
    pub fn take(&mut self, tag: u16, descriptor: &Descriptor, counters: &Counters) {
        let swap = is_swap(descriptor);
        counters.requests.add(1);
        counters.swap.add(u64::from(swap));
        // The device may have grown since the last request.
        let rules = Rules { pages: self.requests.lane().pages(), buffer_pages: self.memory.span as u32 };
        match rules.check(descriptor) {
            Ok(request) => {
                match request.op {
                    Op::Read => counters.reads.add(1),
                    Op::Write => counters.writes.add(1),
                    Op::Discard | Op::Zero | Op::Hole => counters.discards.add(1),
                    Op::Flush => {}
                }
                self.batch.push(Taken { tag, swap, request });
            }
            Err(error) => self.refused.push_back((tag, error)),
        }
    }

    /// Begins the batch. Operations in host memory are done when this returns; the others are under
    /// way.
    pub fn begin(&mut self, counters: &Counters) {
        if self.batch.is_empty() {
            return;
        }
        counters.batches.add(1);
        urgent_first(&mut self.batch, |taken| taken.swap);
        let Engine { requests, memory, batch, .. } = self;
        requests.announce(batch.iter().map(|taken| (taken.tag, taken.request)), memory);
        for Taken { tag, request, .. } in batch.drain(..) {
            requests.begin(tag, request, memory);
        }
        requests.submit();
    }

    /// Takes completions of slow stores, and continues waiting requests.
    pub fn turn(&mut self) {
        if self.is_busy() {
            self.requests.turn(Instant::now(), &mut self.memory);
        }
    }

    /// Takes the next answer.
    pub fn finished(&mut self, counters: &Counters) -> Option<(u16, i32)> {
        let answer = |Answer { id, request, result, .. }| match result {
            Ok(()) => (id, success(&request)),
            Err(fault) => (id, -errno(fault).raw_os_error()),
        };
        let (tag, result) = self.refused.pop_front().or_else(|| self.requests.finished().map(answer))?;
        counters.errors.add(u64::from(result < 0));
        Some((tag, result))
    }

    /// Whether answers are outstanding.
    pub fn is_busy(&self) -> bool {
        self.requests.is_busy()
    }

    /// Whether an operation is under way whose end no descriptor announces.
    pub fn must_poll(&self) -> bool {
        self.requests.must_poll()
    }

    /// Pauses before the next turn. Call it while [`must_poll`](Engine::must_poll) is true.
    pub fn rest(&mut self) {
        self.requests.rest();
    }

    /// Descriptors that become readable when [`turn`](Engine::turn) has something to do.
    pub fn wake_fds(&self) -> impl Iterator<Item = BorrowedFd<'_>> {
        self.requests.wake_fds()
    }
}

#[cfg(test)]
mod tests {
    use super::super::uapi::{IO_NO_UNMAP, IO_SWAP, PAGE_SECTORS, op};
    use super::*;
    use std::os::unix::fs::FileExt;
    use std::sync::Arc;
    use weir_core::PageNo;
    use weir_store::{Host, StoreUrl};
    use weir_volume::{Config, Lane, Volume};

    const REQUEST_BYTES: u32 = 64 << 10;
    const SPAN: u32 = REQUEST_BYTES / PAGE_SIZE as u32;

    fn engine(url: &str, pages: u32) -> Engine<Lane> {
        let url: StoreUrl = url.parse().unwrap();
        let store = weir_store::open(&url).unwrap();
        let volume: Arc<Volume> = Volume::create(Config { pages, lanes: 1, depth: 8 }, vec![store]).unwrap();
        Engine::new(volume.lane().unwrap(), 16, REQUEST_BYTES).unwrap()
    }

    fn descriptor(operation: u32, first: u32, pages: u32) -> Descriptor {
        Descriptor {
            op_flags: operation,
            sectors: pages * PAGE_SECTORS as u32,
            start_sector: u64::from(first) * PAGE_SECTORS,
            address: 0,
        }
    }

    /// Runs a batch to its end; its tags count from 0. Returns the tags with their results, in the
    /// order in which the results came.
    fn run(engine: &mut Engine<Lane>, batch: &[Descriptor]) -> (Vec<(u16, i32)>, Counters) {
        let counters = Counters::default();
        for (tag, descriptor) in batch.iter().enumerate() {
            engine.take(tag as u16, descriptor, &counters);
        }
        engine.begin(&counters);
        while engine.is_busy() {
            engine.turn();
        }
        let results = std::iter::from_fn(|| engine.finished(&counters)).collect();
        (results, counters)
    }

    fn fill(engine: &mut Engine<Lane>, tag: u16, seed: u32) {
        for at in 0..SPAN {
            let page = &mut engine.memory.pages(tag, at)[0];
            for (index, word) in page.chunks_exact_mut(4).enumerate() {
                let value = (seed + at).wrapping_mul(0x9e37_79b9) ^ index as u32;
                word.copy_from_slice(&value.to_ne_bytes());
            }
        }
    }

    fn content(engine: &mut Engine<Lane>, tag: u16, pages: u32) -> Vec<u8> {
        engine.memory.pages(tag, 0)[..pages as usize].as_flattened().to_vec()
    }

    /// Two stores. The first answers at once. The second answers later, and takes fewer operations
    /// in flight than the batch has pages.
    const STORES: [&str; 2] = ["host:4MiB", "sim:seed=1,size=4MiB,delay=20"];

    #[test]
    fn what_was_written_is_read_back_from_fast_and_slow_stores() {
        for url in STORES {
            let mut engine = engine(url, 512);
            let bytes = REQUEST_BYTES as i32;
            let writes: Vec<_> = (0..4).map(|tag| descriptor(op::WRITE.into(), tag * SPAN, SPAN)).collect();
            (0..4).for_each(|tag| fill(&mut engine, tag, u32::from(tag) * 100));
            let written: Vec<_> = (0..4).map(|tag| content(&mut engine, tag, SPAN)).collect();
            let (mut results, counters) = run(&mut engine, &writes);
            results.sort_unstable();
            assert_eq!(results, (0..4).map(|tag| (tag, bytes)).collect::<Vec<_>>(), "{url}");
            assert_eq!((counters.writes.get(), counters.batches.get(), counters.errors.get()), (4, 1, 0));
            (0..4).for_each(|tag| fill(&mut engine, tag, 77));
            let reads: Vec<_> = (0..4).map(|tag| descriptor(op::READ.into(), tag * SPAN, SPAN)).collect();
            let (results, _) = run(&mut engine, &reads);
            assert!(results.iter().all(|(_, result)| *result == bytes), "{url}: {results:?}");
            for tag in 0..4 {
                assert_eq!(content(&mut engine, tag, SPAN), written[usize::from(tag)], "{url} {tag}");
            }
        }
    }

    #[test]
    fn a_changed_page_within_a_long_request_is_an_error_of_that_request() {
        let pages = 2 * SPAN;
        let store = Arc::new(Host::new(1024).unwrap());
        let memory = std::fs::File::from(store.fd().try_clone_to_owned().unwrap());
        let volume = Volume::create(Config { pages, lanes: 1, depth: 8 }, vec![store]).unwrap();
        let mut engine = Engine::new(volume.lane().unwrap(), 16, REQUEST_BYTES).unwrap();
        (0..2).for_each(|tag| fill(&mut engine, tag, 1 + 100 * u32::from(tag)));
        let page = content(&mut engine, 1, SPAN)[5 * PAGE_SIZE..6 * PAGE_SIZE].to_vec();
        let both = |operation| [descriptor(operation, 0, SPAN), descriptor(operation, SPAN, SPAN)];
        run(&mut engine, &both(op::WRITE.into()));
        let mut slot = vec![0; PAGE_SIZE];
        let at = (0..1024 * PAGE_SIZE as u64)
            .step_by(PAGE_SIZE)
            .find(|at| memory.read_exact_at(&mut slot, *at).is_ok() && slot == page)
            .unwrap();
        memory.write_all_at(&[!page[7]], at + 7).unwrap();
        let (mut results, counters) = run(&mut engine, &both(op::READ.into()));
        results.sort_unstable();
        assert_eq!(results, [(0, REQUEST_BYTES as i32), (1, -libc::EIO)]);
        assert_eq!(counters.errors.get(), 1);
    }

    #[test]
    fn discarded_and_zeroed_pages_read_as_zeros() {
        let mut engine = engine(STORES[0], 512);
        for (operation, first, mapped) in
            [(u32::from(op::DISCARD), 0, false), (u32::from(op::WRITE_ZEROES) | IO_NO_UNMAP, 3, true)]
        {
            fill(&mut engine, 0, 1);
            run(&mut engine, &[descriptor(op::WRITE.into(), first, 3)]);
            let (results, counters) = run(&mut engine, &[descriptor(operation, first, 3)]);
            assert_eq!((results, counters.discards.get()), (vec![(0, 0)], 1));
            assert_eq!(engine.requests.lane().mapped(PageNo(first)), mapped);
            run(&mut engine, &[descriptor(op::READ.into(), first, 3)]);
            assert!(content(&mut engine, 0, 3).iter().all(|byte| *byte == 0));
        }
        assert_eq!(run(&mut engine, &[descriptor(op::FLUSH.into(), 0, 0)]).0, [(0, 0)]);
    }

    #[test]
    fn the_kernels_own_requests_are_answered_first() {
        let mut engine = engine(STORES[0], 512);
        let plain = descriptor(op::READ.into(), 0, 1);
        let swap = descriptor(u32::from(op::READ) | IO_SWAP, 1, 1);
        let (results, counters) = run(&mut engine, &[plain, swap, plain, swap]);
        assert_eq!(results.iter().map(|(tag, _)| *tag).collect::<Vec<_>>(), [1, 3, 0, 2]);
        assert_eq!(counters.swap.get(), 2);
    }

    #[test]
    fn an_error_is_the_answer_to_its_request_alone() {
        let mut engine = engine("sim:seed=3,size=4MiB,read_error=0.05", 512);
        (0..16).for_each(|tag| fill(&mut engine, tag, u32::from(tag) * 100));
        let writes: Vec<_> = (0..16).map(|tag| descriptor(op::WRITE.into(), tag * SPAN, SPAN)).collect();
        run(&mut engine, &writes);
        let reads: Vec<_> = (0..16).map(|tag| descriptor(op::READ.into(), tag * SPAN, SPAN)).collect();
        let (results, counters) = run(&mut engine, &reads);
        let errors = results.iter().filter(|(_, result)| *result == -libc::EIO).count();
        let fine = results.iter().filter(|(_, result)| *result == REQUEST_BYTES as i32).count();
        assert!(errors > 0 && fine > 0 && errors + fine == 16, "{results:?}");
        assert_eq!(counters.errors.get(), errors as u64);
    }

    #[test]
    fn what_may_not_be_done_is_answered_and_counted() {
        let mut engine = engine(STORES[0], 16);
        let (mut results, counters) = run(
            &mut engine,
            &[descriptor(op::READ.into(), 16, 1), descriptor(9, 0, 1), descriptor(op::READ.into(), 15, 1)],
        );
        results.sort_unstable();
        assert_eq!(results, [(0, -libc::EINVAL), (1, -libc::EOPNOTSUPP), (2, PAGE_SIZE as i32)]);
        assert_eq!((counters.requests.get(), counters.errors.get()), (3, 2));
    }
}
