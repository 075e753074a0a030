//! Requests by a ring instead of `/dev/fuse` (FUSE over io_uring, Linux 6.14: fs/fuse/dev_uring.c).
//!
//! The kernel has a queue for every processor that there may ever be, and puts a request into that of the processor on which its
//! caller runs. A queue takes requests once something is offered to *every* queue; until then, and for what nobody waits for
//! (`FORGET`, `INTERRUPT`) always, there is `/dev/fuse`. One command answers a request and takes the next one.

mod entry;

use super::device::Device;
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
use std::fs;
use std::io;
use std::os::fd::{AsFd, AsRawFd, BorrowedFd};

const REGISTER: u32 = 1;
const COMMIT_AND_FETCH: u32 = 2;

/// Bytes of an answer that is not kept back until others are ready.
const LARGE: usize = 64 << 10;

/// What a completion is about, where it is not an entry.
const BELL: u64 = 1 << 32;
const DEVICE: u64 = BELL + 1;

type Uring = IoUring<squeue::Entry128, cqueue::Entry>;

/// Whether the kernel would have requests come by a ring: the module's parameter.
pub fn is_enabled() -> bool {
    fs::read_to_string("/sys/module/fuse/parameters/enable_uring").is_ok_and(|text| text.trim() == "Y")
}

/// Processors that there may ever be: the kernel's queues are numbered so. `None` where their numbers have gaps.
fn processors() -> Option<usize> {
    let text = fs::read_to_string("/sys/devices/system/cpu/possible").ok()?;
    let last = text.trim().strip_prefix("0-").unwrap_or(text.trim());
    last.parse::<usize>().ok()?.checked_add(1)
}

/// A thread's ring, with the entries of the queues that it serves.
pub(super) struct Ring {
    io: Uring,
    entries: Vec<Entry>,
    memory: Buffer,
    payload: usize,
    /// What the kernel reads while entries are registered.
    vectors: Vec<[libc::iovec; 2]>,
    /// A request that is no write, whole.
    scratch: Box<[u8; SMALL_MAX]>,
    cpus: CpuSet,
}

// SAFETY: the pointers in `vectors` are into `memory`, which this value owns.
unsafe impl Send for Ring {}

#[derive(Clone, Copy)]
struct Entry {
    queue: u16,
    commit: u64,
    state: State,
}

#[derive(Clone, Copy, PartialEq, Eq)]
enum State {
    /// The kernel's.
    Offered,
    /// There is a request in it.
    Filled,
    Gone,
}

/// What there is to do.
pub(super) enum Event {
    Request(usize),
    Device,
    Bell,
    Gone(Errno),
}

impl Ring {
    /// A ring for each of `threads` threads, with `depth` entries for each processor's queue; nothing is said to the kernel about them yet.
    pub fn prepare(threads: usize, depth: usize, payload: usize) -> io::Result<Vec<Ring>> {
        let processors = processors().ok_or_else(|| io::Error::other("the processors' numbers have gaps"))?;
        (0..threads.min(processors))
            .map(|thread| {
                let queues = (0..processors).filter(|queue| queue % threads == thread);
                Ring::new(queues, depth, payload)
            })
            .collect()
    }

    fn new(queues: impl Iterator<Item = usize>, depth: usize, payload: usize) -> io::Result<Ring> {
        let mut cpus = CpuSet::new();
        let mut entries = Vec::new();
        for queue in queues {
            cpus.set(queue);
            let entry = Entry { queue: queue as u16, commit: 0, state: State::Offered };
            entries.extend(std::iter::repeat_n(entry, depth));
        }
        let stride = PAYLOAD_AT + payload;
        let memory = Buffer::new(entries.len() * stride)?;
        let room = entries.len() as u32 + 2;
        // The thread that is to serve enables it: it is the only one that may submit.
        let io = IoUring::builder()
            .setup_single_issuer()
            .setup_defer_taskrun()
            .setup_taskrun_flag()
            .setup_r_disabled()
            .setup_cqsize(2 * room)
            .build(room)?;
        let mut ring = Ring {
            io,
            vectors: Vec::with_capacity(entries.len()),
            entries,
            memory,
            payload,
            scratch: Box::new([0; SMALL_MAX]),
            cpus,
        };
        for at in 0..ring.entries.len() {
            let start = ring.memory[at * stride..].as_mut_ptr();
            let vector = |start: *mut u8, bytes| libc::iovec { iov_base: start.cast(), iov_len: bytes };
            let payload_start = start.wrapping_add(PAYLOAD_AT);
            ring.vectors.push([vector(start, entry::HEADERS), vector(payload_start, payload)]);
        }
        Ok(ring)
    }

    pub fn is_locked(&self) -> bool {
        self.memory.is_locked()
    }

    /// Offers every entry to the kernel. Call it on the thread that is to serve.
    ///
    /// # Errors
    /// When the kernel refuses: then requests come by `/dev/fuse`.
    pub fn open(&mut self, device: &Device, bell: BorrowedFd<'_>, also_device: bool) -> io::Result<()> {
        if std::env::var_os("WEIR_NOPIN").is_none() {
            // Elsewhere it is as right, and slower.
            let _ = rustix::thread::sched_setaffinity(None, &self.cpus);
        }
        self.io.submitter().register_enable_rings()?;
        self.io.submitter().register_files(&[device.as_fd().as_raw_fd()])?;
        // Saves a look-up for each system call; as good without.
        let _ = self.io.submitter().register_ring_fd();
        for at in 0..self.entries.len() {
            self.command(REGISTER, at);
        }
        self.io.submit()?;
        if let Some(refused) = self.io.completion().find(|completion| completion.result() < 0) {
            return Err(io::Error::from_raw_os_error(-refused.result()));
        }
        self.watch(bell, BELL);
        if also_device {
            self.watch(device.as_fd(), DEVICE);
        }
        Ok(())
    }

    /// Has the ring say when a descriptor is readable, once.
    fn watch(&mut self, fd: BorrowedFd<'_>, data: u64) {
        let events = PollFlags::IN.bits();
        let poll = opcode::PollAdd::new(Fd(fd.as_raw_fd()), events.into()).build().user_data(data);
        self.push(&poll.into());
    }

    pub fn watch_device(&mut self, device: &Device) {
        self.watch(device.as_fd(), DEVICE);
    }

    fn push(&mut self, entry: &squeue::Entry128) {
        // SAFETY: what commands name is this value's memory, which the kernel uses until the ring is closed: `io` is dropped first.
        unsafe { self.io.submission().push(entry) }.expect("room for one command an entry and two polls");
    }

    fn command(&mut self, command: u32, at: usize) {
        let Entry { queue, commit, .. } = self.entries[at];
        let mut bytes = [0; 80];
        let argument = RingCommand { commit, queue, ..RingCommand::default() };
        bytes[..RingCommand::BYTES].copy_from_slice(&argument.encode());
        let mut build = opcode::UringCmd80::new(Fixed(0), command).cmd(bytes);
        if command == REGISTER {
            build = build.addr(Some(self.vectors[at].as_ptr() as u64));
        }
        let mut entry = build.build().user_data(at as u64);
        if command == REGISTER {
            set_len(&mut entry, 2);
        }
        self.push(&entry);
    }

    /// Sends what has been answered, and waits for something to do unless `look` is set.
    pub fn turn(&mut self, wait: bool) -> rustix::io::Result<()> {
        match self.io.submit_and_wait(usize::from(wait)) {
            Err(error) => match Errno::from_io_error(&error) {
                Some(Errno::INTR) | None => Ok(()),
                Some(errno) => Err(errno),
            },
            Ok(_) => Ok(()),
        }
    }

    /// The next thing that happened.
    pub fn next(&mut self) -> Option<Event> {
        let completion = self.io.completion().next()?;
        let result = completion.result();
        Some(match completion.user_data() {
            BELL => Event::Bell,
            DEVICE => Event::Device,
            at => {
                let at = at as usize;
                if result == 0 {
                    self.entries[at].state = State::Filled;
                    Event::Request(at)
                } else {
                    self.entries[at].state = State::Gone;
                    Event::Gone(Errno::from_raw_os_error(-result))
                }
            }
        })
    }

    /// Has `serve` answer an entry's request, and queues the answer.
    pub fn handle(
        &mut self,
        at: usize,
        serve: impl FnOnce(Result<Message<'_>, Malformed>, &dyn Reply) -> rustix::io::Result<()>,
    ) -> rustix::io::Result<()> {
        let stride = PAYLOAD_AT + self.payload;
        let memory = &mut self.memory[at * stride..][..stride];
        let incoming = Incoming::read(memory);
        self.entries[at].commit = incoming.commit;
        let large = incoming.answer(memory, &mut self.scratch, serve)? > LARGE;
        self.entries[at].state = State::Offered;
        self.command(COMMIT_AND_FETCH, at);
        if large { self.turn(false) } else { Ok(()) }
    }
}

/// Sets a field that the crate has no setter for, of a command that names a vector of buffers.
fn set_len(entry: &mut squeue::Entry128, len: u32) {
    const LEN_AT: usize = 24;
    const _: () = assert!(size_of::<squeue::Entry128>() == 128);
    // SAFETY: the entry is the kernel's `io_uring_sqe` of 128 bytes, plain numbers, with `len`, a u32, at byte 24.
    unsafe { std::ptr::from_mut(entry).cast::<u8>().add(LEN_AT).cast::<u32>().write(len) };
}
