//! The thread of a queue: takes requests from its io_uring, passes them to the request engine,
//! answers them, and sleeps.
//!
//! Commands are bound to the thread that issued the first of them, so the thread itself makes the
//! io_uring. One system call sends the answers of a batch and sleeps until the next.

use super::engine::Engine;
use super::server::doing;
use super::stats::Counters;
use super::uapi::{self, Descriptor, IoCommand, Plain, RESULT_ABORT};
use crate::spin::Spin;
use io_uring::types::{Fd, Fixed, SubmitArgs, Timespec};
use io_uring::{IoUring, opcode, squeue};
use rustix::io::Errno;
use rustix::mm::{MapFlags, ProtFlags};
use std::io;
use std::os::fd::{AsFd, AsRawFd, OwnedFd, RawFd};
use std::ptr::NonNull;
use std::time::{Duration, Instant};
use weir_core::log::{Level, Log};
use weir_device::{PageLane, WAKE_FDS_MAX};

/// Time that offering every buffer may take.
const OFFERING: Duration = Duration::from_secs(10);

/// Time that a thread waits after the kernel had no memory for a request of the io_uring, or no
/// room for its completions.
const REFUSED_NAP: Duration = Duration::from_millis(1);

/// The bit of a completion's user data that marks a store's descriptor. Without the bit, the user
/// data are a tag.
const STORE: u64 = 1 << 32;

/// The request descriptors of one queue, in memory that the driver maps.
pub(super) struct Descriptors {
    start: NonNull<Descriptor>,
    bytes: usize,
    depth: u16,
}

// SAFETY: the value is an address range of the process, and nothing in it belongs to a thread.
unsafe impl Send for Descriptors {}

impl Descriptors {
    pub fn map(character: impl AsFd, queue: u16, depth: u16) -> io::Result<Descriptors> {
        let (offset, bytes) = uapi::descriptors(queue, depth);
        // SAFETY: a fresh mapping at an address of the kernel's choice overlaps no other.
        let start = unsafe {
            rustix::mm::mmap(
                std::ptr::null_mut(),
                bytes,
                ProtFlags::READ,
                MapFlags::SHARED | MapFlags::POPULATE,
                character,
                offset,
            )?
        };
        let start = NonNull::new(start.cast()).expect("mmap never returns null");
        Ok(Descriptors { start, bytes, depth })
    }

    /// Copies the request of a tag. The driver does not change the request from the tag's
    /// completion to the answer.
    fn get(&self, tag: u16) -> Descriptor {
        assert!(tag < self.depth, "the driver knows tags below the depth");
        // SAFETY: the address is within the mapping, which holds `depth` descriptors. The driver
        // writes a descriptor only while it owns the descriptor's tag, and a volatile read allows
        // such a write.
        unsafe { self.start.add(usize::from(tag)).read_volatile() }
    }
}

impl Drop for Descriptors {
    fn drop(&mut self) {
        // SAFETY: this value made the mapping, and only copies of its content are handed out.
        let _ = unsafe { rustix::mm::munmap(self.start.as_ptr().cast(), self.bytes) };
    }
}

/// A queue, as its thread works with it.
pub(super) struct Queue<'a, L> {
    ring: IoUring,
    descriptors: Descriptors,
    engine: Engine<L>,
    number: u16,
    depth: u16,
    /// Number of tags that will not come back, because the device is being removed.
    gone: u16,
    /// Descriptors of stores that the io_uring is polling.
    polled: [Option<RawFd>; WAKE_FDS_MAX],
    spin: Option<Spin<'a>>,
    counters: &'a Counters,
    log: &'a Log,
    _character: &'a OwnedFd,
}

impl<'a, L: PageLane> Queue<'a, L> {
    /// Makes the thread's io_uring and offers every buffer. Call it on the thread that is to serve.
    ///
    /// # Errors
    /// Fails when no io_uring can be had, or the driver refuses the buffers.
    pub fn open(
        number: u16,
        depth: u16,
        character: &'a OwnedFd,
        engine: Engine<L>,
        spin: Option<Spin<'a>>,
        counters: &'a Counters,
        log: &'a Log,
    ) -> io::Result<Self> {
        let descriptors = Descriptors::map(character, number, depth)
            .map_err(|error| doing("mapping the driver's descriptors", &error))?;
        let ring = ring(depth).map_err(|error| doing("making its ring", &error))?;
        ring.submitter().register_files(&[character.as_raw_fd()])?;
        let mut queue = Queue {
            ring,
            descriptors,
            engine,
            number,
            depth,
            gone: 0,
            polled: [None; WAKE_FDS_MAX],
            spin,
            counters,
            log,
            _character: character,
        };
        // The registration saves a look-up for each system call. The io_uring works without it too.
        let _ = queue.ring.submitter().register_ring_fd();
        for tag in 0..depth {
            queue.command(uapi::FETCH_REQ, tag, -1);
        }
        let begun = Instant::now();
        while !queue.ring.submission().is_empty() && begun.elapsed() < OFFERING {
            passed(queue.ring.submit()).map_err(|error| doing("offering its buffers", &error))?;
        }
        // Completions that are there already are refusals of the driver. If the device had a server
        // before, they may also be requests.
        match queue.collect() {
            None => Ok(queue),
            Some((_, error)) => Err(doing("having its buffers accepted", &error)),
        }
    }

    /// Serves until the device has gone.
    ///
    /// # Errors
    /// Fails when the io_uring fails, which leaves the device without this queue.
    pub fn serve(&mut self) -> io::Result<()> {
        loop {
            if let Some((tag, error)) = self.collect()
                && !is_abort(&error)
            {
                let number = self.number;
                (self.log)(Level::Warning, format_args!("ublk: queue {number}: tag {tag} is lost: {error}"));
            }
            self.engine.begin(self.counters);
            self.engine.turn();
            while let Some((tag, result)) = self.engine.finished(self.counters) {
                self.command(uapi::COMMIT_AND_FETCH_REQ, tag, result);
            }
            if self.gone == self.depth {
                return Ok(());
            }
            self.wait()?;
        }
    }

    /// Takes all completions into the engine's batch. If the driver has given up a tag, returns the
    /// tag and the reason.
    fn collect(&mut self) -> Option<(u64, io::Error)> {
        let Queue { ring, descriptors, engine, counters, polled, gone, .. } = self;
        let mut lost = None;
        for completion in ring.completion() {
            let (data, result) = (completion.user_data(), completion.result());
            if data >= STORE {
                let fd = (data - STORE) as RawFd;
                polled.iter_mut().filter(|slot| **slot == Some(fd)).for_each(|slot| *slot = None);
            } else if result == 0 {
                let tag = data as u16;
                engine.take(tag, &descriptors.get(tag), counters);
            } else {
                *gone += 1;
                if lost.as_ref().is_none_or(|(_, error): &(u64, io::Error)| is_abort(error)) {
                    lost = Some((data, io::Error::from_raw_os_error(-result)));
                }
            }
        }
        lost
    }

    /// Sends the queued commands, and sleeps until there is something to do.
    fn wait(&mut self) -> io::Result<()> {
        if self.engine.is_busy() {
            if self.engine.must_poll() {
                self.engine.rest();
                return self.send();
            }
            self.poll_stores();
            return self.sleep(Some(weir_store::POLL_EVERY));
        }
        if self.spin.is_some() {
            self.send()?;
            let Queue { ring, spin, .. } = self;
            let found = spin.as_mut().expect("looked").attempt(|| {
                // This flag of the io_uring says that completions wait in the kernel. A system call
                // moves them to where the thread sees them.
                let due = ring.submission().taskrun();
                if due {
                    passed(ring.submit())?;
                }
                io::Result::Ok((!ring.completion().is_empty()).then_some(()))
            })?;
            if found.is_some() {
                return Ok(());
            }
        }
        self.sleep(None)?;
        if let Some(spin) = &mut self.spin {
            spin.woke();
        }
        Ok(())
    }

    fn send(&mut self) -> io::Result<()> {
        passed(self.ring.submit())
    }

    fn sleep(&mut self, most: Option<Duration>) -> io::Result<()> {
        passed(match most {
            None => self.ring.submit_and_wait(1),
            Some(most) => {
                let most = Timespec::from(most);
                self.ring.submitter().submit_with_args(1, &SubmitArgs::new().timespec(&most))
            }
        })
    }

    /// Tells the io_uring to wake this thread when a store has a completion.
    fn poll_stores(&mut self) {
        let Queue { ring, engine, polled, .. } = self;
        for fd in engine.wake_fds() {
            let fd = fd.as_raw_fd();
            if polled.contains(&Some(fd)) {
                continue;
            }
            let Some(slot) = polled.iter_mut().find(|slot| slot.is_none()) else { return };
            *slot = Some(fd);
            let events = rustix::event::PollFlags::IN.bits();
            let entry = opcode::PollAdd::new(Fd(fd), events.into()).build().user_data(STORE | fd as u64);
            push(ring, &entry);
        }
    }

    /// Queues a command for a tag. The command also offers the tag's buffer for its next request.
    fn command(&mut self, command: u32, tag: u16, result: i32) {
        let address = self.engine.address(tag);
        let argument = IoCommand { queue: self.number, tag, result, address };
        let bytes = argument.bytes().try_into().expect("an argument of 16 bytes");
        let entry = opcode::UringCmd16::new(Fixed(0), command).cmd(bytes).build().user_data(tag.into());
        push(&mut self.ring, &entry);
    }
}

/// Ignores an io_uring's errors that do not end it: a signal came, the time is over, or the kernel
/// has no memory for a request now. The last comes when swap is full, which is when the kernel
/// needs this thread most. Unsent commands stay in the io_uring for the next call.
fn passed(entered: io::Result<usize>) -> io::Result<()> {
    let Err(error) = entered else { return Ok(()) };
    match error.raw_os_error() {
        Some(libc::EINTR | libc::ETIME) => Ok(()),
        Some(libc::EAGAIN | libc::EBUSY | libc::ENOMEM) => {
            std::thread::sleep(REFUSED_NAP);
            Ok(())
        }
        _ => Err(error),
    }
}

/// Whether the error means that the device is being removed, and nothing worse.
fn is_abort(error: &io::Error) -> bool {
    error.raw_os_error() == Some(-RESULT_ABORT)
}

fn push(ring: &mut IoUring, entry: &squeue::Entry) {
    // SAFETY: a command names a buffer of the engine, and `Queue` drops its io_uring before its
    // engine (the order of the fields). Polls name descriptors that the engine's lane holds open.
    unsafe { ring.submission().push(entry) }.expect("room for one command a tag and one poll a store");
}

/// Makes an io_uring with room for every tag and every store. The kernel adds completions only when
/// the thread asks, so it does not interrupt a working thread (Linux 6.1).
fn ring(depth: u16) -> io::Result<IoUring> {
    let entries = u32::from(depth) + WAKE_FDS_MAX as u32;
    let deferred = IoUring::builder()
        .setup_single_issuer()
        .setup_defer_taskrun()
        .setup_taskrun_flag()
        .setup_cqsize(2 * entries)
        .build(entries);
    match deferred {
        Err(error) if error.raw_os_error() == Some(Errno::INVAL.raw_os_error()) => {
            IoUring::builder().setup_cqsize(2 * entries).build(entries)
        }
        ring => ring,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_kernel_without_memory_for_a_request_is_asked_again() {
        let said = |errno| passed(Err(io::Error::from_raw_os_error(errno)));
        for errno in [libc::EINTR, libc::ETIME, libc::EAGAIN, libc::EBUSY, libc::ENOMEM] {
            said(errno).expect("it passes");
        }
        passed(Ok(0)).expect("nothing was taken");
        said(libc::EBADF).expect_err("the ring is gone");
    }
}
