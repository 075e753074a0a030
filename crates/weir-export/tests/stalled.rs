//! Clients that do not read their replies while a slow store works for them.

mod common;

use common::{PATIENCE, Served, few, noise, page};
use rustix::time::{Itimerspec, TimerfdClockId, TimerfdFlags, TimerfdTimerFlags, Timespec};
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::time::{Duration, Instant};
use weir_core::{PAGE_SIZE, PageBytes, Slot};
use weir_export::nbd::client::{Client, Operation};
use weir_store::{Done, Host, Lane, OpenError, Progress, State, Store, Ticket};

const PAGES: u32 = 2048;
/// Reads that one poll hands over: fewer than a connection has under way.
const AT_ONCE: usize = 8;
/// Time from one such poll to the next, where a descriptor announces it.
const EVERY: Duration = Duration::from_millis(1);

/// Requests whose answers no socket holds: 80 MB. A Unix socket of Linux's default size was seen to
/// hold 60,000 of them.
const FLUSHES: u64 = 5_000_000;

/// A disk whose reads end some at a time, and none while its gate is closed.
#[derive(Debug)]
struct Disk {
    host: Host,
    is_closed: Arc<AtomicBool>,
    /// Whether a descriptor announces the ends of reads.
    announces: bool,
}

struct DiskLane {
    lane: Box<dyn Lane>,
    is_closed: Arc<AtomicBool>,
    waiting: Vec<(Ticket, Slot)>,
    timer: Option<OwnedFd>,
}

impl Store for Disk {
    fn name(&self) -> &str {
        "disk"
    }

    fn slots(&self) -> u32 {
        self.host.slots()
    }

    fn lane(&self, depth: usize) -> Result<Box<dyn Lane>, OpenError> {
        let flags = TimerfdFlags::NONBLOCK | TimerfdFlags::CLOEXEC;
        let timer = || rustix::time::timerfd_create(TimerfdClockId::Monotonic, flags).unwrap();
        Ok(Box::new(DiskLane {
            lane: self.host.lane(depth)?,
            is_closed: Arc::clone(&self.is_closed),
            waiting: Vec::with_capacity(depth),
            timer: self.announces.then(timer),
        }))
    }

    fn state(&self, member: u32) -> State {
        self.host.state(member)
    }

    fn unfit_for_swap(&self) -> Option<String> {
        None
    }
}

impl DiskLane {
    fn set_timer(&self) {
        let Some(timer) = &self.timer else { return };
        let none = Timespec { tv_sec: 0, tv_nsec: 0 };
        let next = Timespec { tv_sec: 0, tv_nsec: EVERY.as_nanos() as i64 };
        let _ = rustix::io::read(timer, &mut [0; 8]);
        let value = Itimerspec { it_interval: none, it_value: next };
        rustix::time::timerfd_settime(timer, TimerfdTimerFlags::empty(), &value).unwrap();
    }
}

impl Lane for DiskLane {
    fn write(&mut self, ticket: Ticket, slot: Slot, page: &PageBytes) -> Progress {
        self.lane.write(ticket, slot, page)
    }

    fn read(&mut self, ticket: Ticket, slot: Slot, _: &mut PageBytes) -> Progress {
        if self.waiting.len() == self.waiting.capacity() {
            return Progress::Full;
        }
        if self.waiting.is_empty() {
            self.set_timer();
        }
        self.waiting.push((ticket, slot));
        Progress::Queued
    }

    fn poll(&mut self, _: Instant, done: &mut dyn FnMut(Done<'_>)) {
        self.set_timer();
        if self.is_closed.load(Ordering::SeqCst) {
            return;
        }
        let now = AT_ONCE.min(self.waiting.len());
        for (ticket, slot) in self.waiting.drain(..now) {
            let mut page = [0; PAGE_SIZE];
            assert_eq!(self.lane.read(0, slot, &mut page), Progress::Done(Ok(())));
            done(Done { ticket, result: Ok(()), page: Some(&page) });
        }
    }

    fn in_flight(&self) -> usize {
        self.waiting.len()
    }

    fn wake_fd(&self) -> Option<BorrowedFd<'_>> {
        self.timer.as_ref().map(AsFd::as_fd)
    }
}

fn served(name: &str, announces: bool) -> (Served, Arc<AtomicBool>, Vec<u8>) {
    let is_closed = Arc::new(AtomicBool::new(false));
    let gate = Arc::clone(&is_closed);
    let served = Served::over(name, PAGES, &few(), |slots| {
        Arc::new(Disk { host: Host::new(slots).unwrap(), is_closed, announces })
    });
    let content = noise(1, PAGES as usize * PAGE_SIZE);
    served.client().write(0, &content).unwrap();
    (served, gate, content)
}

/// Writes so often that each write needs slots that an earlier one has freed.
fn others_write(served: &Served, what: &str) {
    let mut other = served.client();
    for round in 0..40 {
        let written = other.write(7 << 20, &page(round).repeat(128));
        written.unwrap_or_else(|error| panic!("{what}, round {round}: {error}"));
    }
}

fn wait(what: &str, mut is_so: impl FnMut() -> bool) {
    let begun = Instant::now();
    while !is_so() {
        assert!(begun.elapsed() < PATIENCE, "{what}");
        std::thread::sleep(Duration::from_millis(1));
    }
}

#[test]
fn a_client_that_does_not_take_its_pages_does_not_stop_the_writes_of_others() {
    for (at, announces) in [false, true].into_iter().enumerate() {
        let (served, _, content) = served(&format!("stalled-{at}"), announces);
        // Simple replies of more than 256 KiB are one stream; structured ones are chunks.
        for (is_structured, length) in
            [(false, 256 << 10), (false, 1 << 20), (true, 256 << 10), (true, 1 << 20)]
        {
            let what = format!("structured {is_structured}, {length} bytes, announced {announces}");
            let mut stalled = if is_structured { served.client() } else { served.simple_client() };
            let before = served.server().stats().reads;
            // No read is aligned, and together they are more than a socket holds.
            let offsets: Vec<u64> = (0..6).map(|at| (at << 20) + 512).collect();
            let asked: Vec<_> = offsets
                .iter()
                .map(|offset| (stalled.queue(Operation::read(*offset, length)), *offset))
                .collect();
            stalled.send().unwrap();
            wait("the reads do not come", || served.server().stats().reads > before);
            std::thread::sleep(Duration::from_millis(50));
            others_write(&served, &what);
            take_all(&mut stalled, &asked, &content, &what);
        }
        assert_eq!(served.server().stats().errors, 0);
        served.shutdown();
    }
}

/// Takes the replies to reads slowly, and compares their bytes.
fn take_all(client: &mut Client, asked: &[(u64, u64)], content: &[u8], what: &str) {
    for _ in asked {
        let reply = client.receive().expect(what);
        assert_eq!(reply.result, Ok(()), "{what}");
        let (_, offset) = asked.iter().find(|asked| asked.0 == reply.cookie).expect(what);
        let expected = &content[*offset as usize..][..reply.data.len()];
        assert!(reply.data == expected, "{what}: other bytes at {offset}");
        std::thread::sleep(Duration::from_millis(5));
    }
}

#[test]
fn nor_does_one_that_does_not_take_its_acknowledgements() {
    for (at, announces) in [false, true].into_iter().enumerate() {
        let (served, gate, _) = served(&format!("stalled-acks-{at}"), announces);
        let mut stalled = served.simple_client();
        gate.store(true, Ordering::SeqCst);
        let asked: Vec<_> =
            (0..4u64).map(|at| (stalled.queue(Operation::read(at << 20, 4096)), at << 20)).collect();
        stalled.send().unwrap();
        wait("the reads do not come", || served.server().stats().reads >= asked.len() as u64);
        // Flushes are answered at once. They are sent until their answers fill the socket.
        let sent = Arc::new(AtomicU64::new(0));
        let counter = Arc::clone(&sent);
        let flushes = std::thread::spawn(move || {
            for _ in 0..FLUSHES {
                stalled.queue(Operation::Flush);
                // The server is shut down in the end.
                if stalled.send().is_err() {
                    return;
                }
                counter.fetch_add(1, Ordering::SeqCst);
            }
        });
        let mut last = (Instant::now(), 0);
        wait("the client is never stopped", || {
            let now = sent.load(Ordering::SeqCst);
            if now != last.1 {
                last = (Instant::now(), now);
            }
            last.0.elapsed() > Duration::from_millis(500)
        });
        assert!(sent.load(Ordering::SeqCst) < FLUSHES, "a socket holds as many answers");
        gate.store(false, Ordering::SeqCst);
        others_write(&served, "flushes");
        drop(served);
        flushes.join().unwrap();
    }
}
