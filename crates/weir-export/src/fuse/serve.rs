//! The threads of a FUSE connection: they read a request, do it, and answer it.

use super::device::{Device, Incoming};
use super::pool::Pool;
use super::range::{IO_MAX, Ranges};
use super::reply::Reply;
use super::request::{self, Malformed, Message};
use super::ring::{self, Uring};
use super::stats::Counters;
use super::wire::{InHeader, WriteIn};
use crate::buffer::Buffer;
use crate::spin::Spin;
use rustix::io::Errno;
use std::io;
use std::sync::Arc;
use std::time::Duration;
use weir_core::PAGE_SIZE;
use weir_core::log::{Level, Log};
use weir_device::PageLane;

/// Number of requests in a row after which a thread wakes a parked thread to help.
const HELP_AFTER: u32 = 8;

/// Offset in the input at which a request is read, so that a write's data begin at a page.
const INPUT_AT: usize = PAGE_SIZE - InHeader::BYTES - WriteIn::BYTES;
/// The kernel requires room for the largest write with its header, and some more (fs/fuse/dev.c).
const INPUT_BYTES: usize = IO_MAX as usize + 2 * PAGE_SIZE;

/// One thread's part of a file system: it answers requests.
pub(super) trait Service<L>: Send {
    /// Does a request and answers it, unless the kernel waits for no answer.
    ///
    /// # Errors
    /// Fails when the connection is broken.
    fn serve(
        &mut self,
        message: &Message<'_>,
        ranges: &mut Ranges<L>,
        reply: &dyn Reply,
        counters: &Counters,
    ) -> rustix::io::Result<()>;
}

/// The way in which a thread's work ended.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) enum Ending {
    /// The thread was told to stop.
    Stopped,
    /// The file system was unmounted.
    Unmounted,
    /// The connection broke.
    Broken(Errno),
}

/// A thread's memory, all taken before the process is sealed.
pub(super) struct Worker<S, L> {
    pub number: usize,
    pub device: Device,
    pub pool: Arc<Pool>,
    pub spin: Duration,
    pub counters: Arc<[Counters]>,
    pub log: Log,
    /// The thread's io_uring, which [`run`](Worker::run) takes.
    pub ring: Option<Uring>,
    input: Buffer,
    ranges: Ranges<L>,
    service: S,
}

impl<L: PageLane, S: Service<L>> Worker<S, L> {
    /// Allocates the memory of one thread.
    ///
    /// # Errors
    /// Fails when the memory cannot be had.
    #[allow(clippy::too_many_arguments)] // each is a part of the whole, given once
    pub fn new(
        number: usize,
        device: Device,
        ranges: Ranges<L>,
        service: S,
        pool: Arc<Pool>,
        spin: Duration,
        counters: Arc<[Counters]>,
        log: Log,
    ) -> io::Result<Self> {
        let input = Buffer::new(INPUT_BYTES)?;
        Ok(Worker { number, device, pool, spin, counters, log, ring: None, input, ranges, service })
    }

    /// Whether the thread's memory is locked in RAM.
    pub fn is_locked(&self) -> bool {
        let ring = self.ring.as_ref().is_none_or(Uring::is_locked);
        ring && self.input.is_locked() && self.ranges.is_locked()
    }

    /// Serves requests until there are no more.
    pub fn run(&mut self) -> Ending {
        // Take the io_uring out here, so that it is dropped outside of the closure. A drop frees
        // memory, which an I/O thread must not do.
        let mut ring = self.ring.take();
        weir_core::seal::on_io_thread(|| {
            self.pool.join(self.number);
            let ending = match &mut ring {
                Some(ring) => self.serve_ring(ring).unwrap_or_else(|| self.look_and_serve()),
                None => self.look_and_serve(),
            };
            self.pool.away();
            ending
        })
    }

    fn look_and_serve(&mut self) -> Ending {
        let pool = Arc::clone(&self.pool);
        let mut spin = Spin::new(&pool.gate, self.spin);
        let mut in_a_row = 0;
        while !pool.is_stopping() {
            let mut found = self.look();
            if found == Ok(Incoming::Nothing) {
                in_a_row = 0;
                found = spin
                    .attempt(|| {
                        // The last answer may have left work for this very processor, such as a
                        // loop device's softirq. Without this yield, that work would wait until the
                        // spinning ends.
                        rustix::thread::sched_yield();
                        match self.look() {
                            Ok(Incoming::Nothing) => Ok(None),
                            Ok(found) => Ok(Some(found)),
                            Err(errno) => Err(errno),
                        }
                    })
                    .map(|found| found.unwrap_or(Incoming::Nothing));
            } else {
                in_a_row += 1;
                if in_a_row == HELP_AFTER {
                    in_a_row = 0;
                    self.counters[self.number].calls.add(1);
                    pool.call_one();
                }
            }
            match found {
                Ok(Incoming::Request(bytes)) => {
                    if let Err(errno) = self.serve(bytes) {
                        return Ending::Broken(errno);
                    }
                    continue;
                }
                Ok(Incoming::Nothing) => {}
                Ok(Incoming::Unmounted) => return Ending::Unmounted,
                Err(errno) => return Ending::Broken(errno),
            }
            if !pool.step_aside(self.number) {
                if let Err(errno) = pool.sleep(&self.device) {
                    return Ending::Broken(errno);
                }
                spin.woke();
            }
        }
        Ending::Stopped
    }

    /// Serves requests that come by io_uring; returns `None` if the kernel accepts no io_uring.
    fn serve_ring(&mut self, ring: &mut Uring) -> Option<Ending> {
        let pool = Arc::clone(&self.pool);
        if let Err(error) = ring.open(&self.device, pool.bell(), self.number == 0) {
            // Print the number only: the error's name comes from libc, which allocates.
            let number = error.raw_os_error().unwrap_or(0);
            (self.log)(
                Level::Warning,
                format_args!(
                    "fuse: the kernel refuses thread {}'s ring: errno {number}; going on by /dev/fuse",
                    self.number
                ),
            );
            return None;
        }
        while !pool.is_stopping() {
            if let Err(errno) = ring.turn(true) {
                return Some(Ending::Broken(errno));
            }
            while let Some(event) = ring.next() {
                let served = match event {
                    ring::Event::Request(at) => {
                        let Worker { number, counters, ranges, service, .. } = self;
                        counters[*number].by_ring.add(1);
                        ring.answer(at, |message, reply| {
                            answer(message, service, ranges, reply, &counters[*number])
                        })
                    }
                    ring::Event::Device => match self.drain() {
                        Ok(Ending::Stopped) => {
                            ring.watch_device(&self.device);
                            Ok(())
                        }
                        Ok(ending) => return Some(ending),
                        Err(errno) => Err(errno),
                    },
                    // Do nothing here: the loop looks at the bell once it has answered the other
                    // requests.
                    ring::Event::Bell => Ok(()),
                    ring::Event::Gone(Errno::NOTCONN | Errno::CONNABORTED | Errno::CANCELED) => {
                        return Some(Ending::Unmounted);
                    }
                    ring::Event::Gone(errno) => Err(errno),
                };
                if let Err(errno) = served {
                    return Some(Ending::Broken(errno));
                }
            }
        }
        // Send the answers now. If an answer cannot be sent, no program waits for it any more.
        let _ = ring.turn(false);
        Some(Ending::Stopped)
    }

    /// Serves the requests that wait at `/dev/fuse`.
    fn drain(&mut self) -> rustix::io::Result<Ending> {
        loop {
            match self.look()? {
                Incoming::Request(bytes) => self.serve(bytes)?,
                Incoming::Nothing => return Ok(Ending::Stopped),
                Incoming::Unmounted => return Ok(Ending::Unmounted),
            }
        }
    }

    fn look(&mut self) -> rustix::io::Result<Incoming> {
        self.device.read(&mut self.input[INPUT_AT..])
    }

    /// Serves a request that has been read.
    fn serve(&mut self, bytes: usize) -> rustix::io::Result<()> {
        let Worker { number, device, counters, input, ranges, service, .. } = self;
        answer(
            request::parse(&input[INPUT_AT..INPUT_AT + bytes]),
            service,
            ranges,
            device,
            &counters[*number],
        )
    }
}

fn answer<L>(
    message: Result<Message<'_>, Malformed>,
    service: &mut impl Service<L>,
    ranges: &mut Ranges<L>,
    reply: &dyn Reply,
    counters: &Counters,
) -> rustix::io::Result<()> {
    counters.requests.add(1);
    match message {
        Ok(message) => service.serve(&message, ranges, reply, counters),
        Err(malformed) => {
            counters.errors.add(1);
            reply.refuse(malformed.unique, Errno::INVAL)
        }
    }
}
