//! Requests by io_uring instead of by `/dev/fuse` (FUSE over io_uring, Linux 6.14:
//! fs/fuse/dev_uring.c).
//!
//! The kernel has a queue for every possible processor. It puts a request into the queue of the
//! processor on which its caller runs. The io_urings work only once *every* queue has an entry, and
//! there may be fewer threads than processors. So each thread serves the queues of some
//! neighbouring processors, and is pinned to these. The caller and the thread that answers then
//! share a cache, and neither wakes another processor. One command answers a request and takes the
//! next one. `FORGET` and `INTERRUPT` still come by `/dev/fuse`. If the kernel refuses an entry,
//! all requests come by `/dev/fuse`.
//!
//! Requests that a dead server had in an io_uring fail, so the next daemon cannot take such a
//! server over. A server that must be taken over uses `/dev/fuse`.

mod entry;

use super::device::Device;
use super::range::IO_MAX;
use super::reply::Reply;
use super::request::{Malformed, Message};
use super::wire::RingCommand;
use crate::buffer::Buffer;
use entry::{Incoming, PAYLOAD_AT, SMALL_MAX};
use io_uring::types::{Fd, Fixed};
use io_uring::{IoUring, cqueue, opcode, squeue};
use rustix::event::PollFlags;
use rustix::io::Errno;
use rustix::thread::CpuSet;
use std::fmt;
use std::fs;
use std::io;
use std::ops::Range;
use std::os::fd::{AsFd, AsRawFd, BorrowedFd};

/// The commands to `/dev/fuse` (include/uapi/linux/fuse.h).
const REGISTER: u32 = 1;
const COMMIT_AND_FETCH: u32 = 2;

/// The number of the bell's completion. All other numbers stand for entries.
const BELL: u64 = 1 << 32;
const DEVICE: u64 = BELL + 1;

/// The most memory, in bytes, that all entries of a connection may take. The queue of each
/// processor has one entry: with more entries it was no faster (measured).
const MEMORY_MAX: usize = 64 << 20;
/// Smallest payload of an entry, in bytes. With smaller requests an io_uring is not worthwhile.
const PAYLOAD_LEAST: usize = 128 << 10;
/// Bytes of the largest answer that waits to be sent together with the next answers. A larger one
/// is sent at once.
const LARGE: usize = 64 << 10;

/// The reason why requests come by `/dev/fuse`.
#[derive(Debug)]
pub(super) enum Unavailable {
    /// The kernel has no FUSE over io_uring, or its module parameter `enable_uring` forbids it.
    Disabled,
    /// The processors' numbers have gaps, or there are too many processors for [`MEMORY_MAX`].
    Processors,
    /// The system gives no io_uring.
    Refused(io::Error),
}

impl fmt::Display for Unavailable {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Unavailable::Disabled => f.write_str("/sys/module/fuse/parameters/enable_uring is not Y"),
            Unavailable::Processors => {
                f.write_str("too many possible processors, or gaps between their numbers")
            }
            Unavailable::Refused(error) => write!(f, "no ring: {error}"),
        }
    }
}

/// The io_urings of a connection's threads, before the kernel knows of them.
#[derive(Debug)]
pub(super) struct Prepared {
    pub rings: Vec<Uring>,
    /// Bytes of the largest read or write that fits an entry.
    pub io_max: u32,
}

impl Prepared {
    /// No io_urings: all requests come by `/dev/fuse`.
    pub fn none() -> Prepared {
        Prepared { rings: Vec::new(), io_max: IO_MAX }
    }
}

/// Makes an io_uring for each of up to `threads` threads, with all memory that they need.
///
/// # Errors
/// Fails with the reason why there are no io_urings.
pub(super) fn prepare(threads: usize) -> Result<Prepared, Unavailable> {
    let parameter = fs::read_to_string("/sys/module/fuse/parameters/enable_uring");
    if !parameter.is_ok_and(|text| text.trim() == "Y") {
        return Err(Unavailable::Disabled);
    }
    let possible = fs::read_to_string("/sys/devices/system/cpu/possible").ok();
    let processors = possible.as_deref().and_then(count).ok_or(Unavailable::Processors)?;
    let payload = payload(processors).ok_or(Unavailable::Processors)?;
    let threads = threads.min(processors);
    let rings = (0..threads).map(|thread| Uring::new(share(processors, threads, thread), payload));
    let rings = rings.collect::<io::Result<_>>().map_err(Unavailable::Refused)?;
    Ok(Prepared { rings, io_max: payload as u32 })
}

/// Counts the processors in a list such as `0-3`. The kernel has a queue for each number in the
/// list. `None` if the numbers have gaps.
fn count(list: &str) -> Option<usize> {
    let list = list.trim();
    let last: u16 = list.strip_prefix("0-").unwrap_or(list).parse().ok()?;
    (list == "0" || list.starts_with("0-")).then_some(usize::from(last) + 1)
}

/// Number of bytes that each entry has for data, if there are `processors` entries; `None` if they
/// would be too few.
fn payload(processors: usize) -> Option<usize> {
    let each = MEMORY_MAX / processors;
    let most = if each < IO_MAX as usize { (each + 1).next_power_of_two() / 2 } else { IO_MAX as usize };
    (most >= PAYLOAD_LEAST).then_some(most)
}

/// The processors whose queues a thread serves.
fn share(processors: usize, threads: usize, thread: usize) -> Range<usize> {
    processors * thread / threads..processors * (thread + 1) / threads
}

/// A thread's io_uring, with an entry for each queue that it serves.
pub(super) struct Uring {
    // The order of the fields matters: the io_uring closes before the memory that it names is
    // freed.
    io: IoUring<squeue::Entry128, cqueue::Entry>,
    memory: Buffer,
    payload: usize,
    queues: Range<usize>,
    /// Memory in which a request other than a write is put together.
    scratch: Box<[u8; SMALL_MAX]>,
}

impl fmt::Debug for Uring {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Uring").field("queues", &self.queues).finish_non_exhaustive()
    }
}

/// An event of an io_uring.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) enum Event {
    /// A request is in the entry with this index.
    Request(usize),
    /// `/dev/fuse` has a request, or no more requests will come.
    Device,
    /// The eventfd that the io_uring watches was signalled.
    Bell,
    /// The kernel does not return an entry any more, mostly because the connection has ended.
    Gone(Errno),
}

impl Uring {
    fn new(queues: Range<usize>, payload: usize) -> io::Result<Uring> {
        let room = queues.len() as u32 + 2;
        // The kernel adds completions only when the thread asks. Only the thread that enables the
        // io_uring may submit.
        let io = IoUring::builder()
            .setup_single_issuer()
            .setup_defer_taskrun()
            .setup_r_disabled()
            .setup_cqsize(2 * room)
            .build(room)?;
        let memory = Buffer::new(queues.len() * (PAYLOAD_AT + payload))?;
        Ok(Uring { io, memory, payload, queues, scratch: Box::new([0; SMALL_MAX]) })
    }

    /// Whether the io_uring's memory is locked in RAM.
    pub fn is_locked(&self) -> bool {
        self.memory.is_locked()
    }

    /// Offers every entry to the kernel. From then on the io_uring also watches `bell` and, if
    /// `and_device`, `/dev/fuse`. Call this on the thread that is to serve.
    ///
    /// # Errors
    /// Fails when the kernel refuses the io_uring. All requests then come by `/dev/fuse`.
    pub fn open(&mut self, device: &Device, bell: BorrowedFd<'_>, and_device: bool) -> io::Result<()> {
        let mut processors = CpuSet::new();
        self.queues.clone().filter(|queue| *queue < CpuSet::MAX_CPU).for_each(|queue| processors.set(queue));
        // Pinning fails in a container that has none of these processors. Serving from another
        // processor is correct, but slower.
        let _ = rustix::thread::sched_setaffinity(None, &processors);
        self.io.submitter().register_enable_rings()?;
        self.io.submitter().register_files(&[device.as_fd().as_raw_fd()])?;
        // The registration saves a look-up for each system call. The io_uring works without it too.
        let _ = self.io.submitter().register_ring_fd();
        for at in 0..self.queues.len() {
            let start = self.entry(at).as_mut_ptr();
            let vectors = [
                libc::iovec { iov_base: start.cast(), iov_len: entry::HEADERS },
                libc::iovec { iov_base: start.wrapping_add(PAYLOAD_AT).cast(), iov_len: self.payload },
            ];
            let mut command = self.command(REGISTER, at, 0, vectors.as_ptr() as u64);
            set_len(&mut command, vectors.len() as u32);
            self.push(&command);
            // The kernel reads the vectors during this call, so they may be dropped afterwards.
            self.io.submit()?;
        }
        if let Some(refused) = self.io.completion().find(|completion| completion.result() < 0) {
            return Err(io::Error::from_raw_os_error(-refused.result()));
        }
        self.watch(bell, BELL);
        if and_device {
            self.watch_device(device);
        }
        Ok(())
    }

    /// Makes the io_uring report [`Event::Device`] once, as soon as `/dev/fuse` has a request.
    pub fn watch_device(&mut self, device: &Device) {
        self.watch(device.as_fd(), DEVICE);
    }

    fn watch(&mut self, fd: BorrowedFd<'_>, data: u64) {
        let events = PollFlags::IN.bits();
        let poll = opcode::PollAdd::new(Fd(fd.as_raw_fd()), events.into()).build().user_data(data);
        self.push(&poll.into());
    }

    /// Sends the answers. With `wait`, returns once an event has come.
    ///
    /// # Errors
    /// Fails when the io_uring fails.
    pub fn turn(&mut self, wait: bool) -> rustix::io::Result<()> {
        match self.io.submit_and_wait(usize::from(wait)) {
            Ok(_) => Ok(()),
            Err(error) => match Errno::from_io_error(&error) {
                Some(Errno::INTR) => Ok(()),
                errno => Err(errno.unwrap_or(Errno::IO)),
            },
        }
    }

    /// Returns the next event.
    pub fn next(&mut self) -> Option<Event> {
        let completion = self.io.completion().next()?;
        Some(match (completion.user_data(), completion.result()) {
            (BELL, _) => Event::Bell,
            (DEVICE, _) => Event::Device,
            (at, 0) if (at as usize) < self.queues.len() => Event::Request(at as usize),
            (_, result) => Event::Gone(Errno::from_raw_os_error(result.wrapping_neg())),
        })
    }

    /// Passes the request in an entry to `serve`, and returns the entry to the kernel with the
    /// answer that `serve` gave.
    ///
    /// # Errors
    /// Fails with the errors of `serve`, and of the io_uring.
    pub fn answer(
        &mut self,
        at: usize,
        serve: impl FnOnce(Result<Message<'_>, Malformed>, &dyn Reply) -> rustix::io::Result<()>,
    ) -> rustix::io::Result<()> {
        let stride = PAYLOAD_AT + self.payload;
        let memory = &mut self.memory[at * stride..][..stride];
        let incoming = Incoming::read(memory);
        let commit = incoming.commit;
        let bytes = incoming.answer(memory, &mut self.scratch, serve)?;
        let command = self.command(COMMIT_AND_FETCH, at, commit, 0);
        self.push(&command);
        if bytes > LARGE { self.turn(false) } else { Ok(()) }
    }

    fn entry(&mut self, at: usize) -> &mut [u8] {
        let stride = PAYLOAD_AT + self.payload;
        &mut self.memory[at * stride..][..stride]
    }

    fn command(&self, command: u32, at: usize, commit: u64, address: u64) -> squeue::Entry128 {
        let mut bytes = [0; 80];
        let argument =
            RingCommand { commit, queue: (self.queues.start + at) as u16, ..RingCommand::default() };
        bytes[..RingCommand::BYTES].copy_from_slice(&argument.encode());
        let command = opcode::UringCmd80::new(Fixed(0), command).cmd(bytes).addr(Some(address));
        command.build().user_data(at as u64)
    }

    fn push(&mut self, command: &squeue::Entry128) {
        // SAFETY: this value has the entries' memory, and drops `io` before that memory (the order
        // of the fields). An entry is accessed here only while the kernel does not write to it.
        // Polls name descriptors that outlive the thread.
        unsafe { self.io.submission().push(command) }.expect("room for one command an entry and two polls");
    }
}

/// Sets the number of buffers in a command's vector. The `io_uring` crate has no setter for it.
fn set_len(command: &mut squeue::Entry128, len: u32) {
    const LEN_AT: usize = 24;
    const _: () = assert!(size_of::<squeue::Entry128>() == 128);
    // SAFETY: the command is the kernel's `io_uring_sqe` of 128 bytes, plain numbers, with `len`, a
    // u32, at byte 24.
    unsafe { std::ptr::from_mut(command).cast::<u8>().add(LEN_AT).cast::<u32>().write(len) };
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn processors_are_counted_where_their_numbers_have_no_gaps() {
        let counts = ["0\n", "0-3\n", "0-255", "0-1,4-5", "1-3", "", "0-"].map(count);
        assert_eq!(counts, [Some(1), Some(4), Some(256), None, None, None, None]);
    }

    #[test]
    fn entries_take_what_is_promised_at_most() {
        assert_eq!(
            [1, 4, 64, 65, 512].map(payload),
            [1 << 20, 1 << 20, 1 << 20, 512 << 10, 128 << 10].map(Some)
        );
        assert_eq!(payload(513), None);
        assert!((1..=512).all(|processors| payload(processors).unwrap() * processors <= MEMORY_MAX));
    }

    #[test]
    fn every_queue_is_served_by_one_thread() {
        for (processors, threads) in [(4, 1), (4, 3), (4, 4), (7, 3), (64, 5)] {
            let all: Vec<_> = (0..threads).flat_map(|thread| share(processors, threads, thread)).collect();
            assert_eq!(all, (0..processors).collect::<Vec<_>>());
        }
    }
}
