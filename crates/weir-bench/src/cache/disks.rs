//! Simulated disks: memory with a limit of operations and bytes a second for each disk, shared by
//! all users. As in a `file:` store, neighbours that are queued one after another are one
//! operation.

use rustix::event::{PollFd, PollFlags};
use rustix::time::{Itimerspec, TimerfdClockId, TimerfdFlags, TimerfdTimerFlags, Timespec};
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering::Relaxed, Ordering::SeqCst};
use std::time::{Duration, Instant};
use weir_core::{PAGE_SIZE, Page, PageBytes, Slot};
use weir_store::{Deal, Done, Host, Lane, OpenError, Progress, State, Store, Ticket};

/// Largest number of neighbouring pages that one operation of a disk covers.
const RUN_PAGES: usize = 256;
/// Least number of bytes of a write that counts as long: 512 KiB.
const LONG: u64 = 512 << 10;

/// The limits of a disk, each for one second.
#[derive(Clone, Copy, Debug)]
pub struct Limits {
    pub operations: u64,
    pub bytes: u64,
}

impl Limits {
    /// Nanoseconds that a disk is busy with an operation of `bytes` bytes.
    fn takes(self, bytes: u64) -> u64 {
        (1_000_000_000 / self.operations).max(bytes * 1_000_000_000 / self.bytes)
    }
}

#[derive(Debug)]
struct Disk {
    /// The time at which the disk's last operation ends, in nanoseconds since `begun`.
    idle_at: AtomicU64,
}

/// The traffic that reached the disks: bytes written, and of these the bytes in long writes.
#[derive(Clone, Copy, Default, Debug)]
pub struct Traffic {
    pub written: u64,
    pub long: u64,
    #[cfg(test)]
    pub writes: u64,
}

/// A stripe of disks.
#[derive(Debug)]
pub struct Disks {
    memory: Host,
    disks: Box<[Disk]>,
    deal: Deal,
    limits: Limits,
    is_limited: AtomicBool,
    begun: Instant,
    written: AtomicU64,
    long: AtomicU64,
    writes: AtomicU64,
}

impl Disks {
    pub fn new(slots: u32, members: u32, limits: Limits) -> Result<Arc<Self>, OpenError> {
        Ok(Arc::new(Disks {
            memory: Host::new(slots)?,
            disks: (0..members).map(|_| Disk { idle_at: AtomicU64::new(0) }).collect(),
            deal: Deal::in_turns(members, RUN_PAGES as u32),
            limits,
            is_limited: AtomicBool::new(false),
            begun: Instant::now(),
            written: AtomicU64::new(0),
            long: AtomicU64::new(0),
            writes: AtomicU64::new(0),
        }))
    }

    /// Turns the limits of all disks on or off.
    pub fn limit(&self, is_limited: bool) {
        self.is_limited.store(is_limited, SeqCst);
    }

    pub fn traffic(&self) -> Traffic {
        Traffic {
            written: self.written.load(Relaxed),
            long: self.long.load(Relaxed),
            #[cfg(test)]
            writes: self.writes.load(Relaxed),
        }
    }

    /// Begins an operation on disk `member` now, and returns the time when the operation will end.
    fn begin(&self, member: u32, bytes: u64) -> Instant {
        let now = self.begun.elapsed().as_nanos() as u64;
        if !self.is_limited.load(Relaxed) {
            return self.begun;
        }
        let takes = self.limits.takes(bytes);
        let after = |idle_at: u64| Some(idle_at.max(now) + takes);
        let idle_at = &self.disks[member as usize].idle_at;
        let before = idle_at.fetch_update(SeqCst, SeqCst, after).unwrap_or(now);
        self.begun + Duration::from_nanos(before.max(now) + takes)
    }
}

/// The disks as a store, of which there may be several over the same disks.
#[derive(Clone, Debug)]
pub struct DiskStore(pub Arc<Disks>);

impl Store for DiskStore {
    fn name(&self) -> &str {
        "limited disks"
    }

    fn slots(&self) -> u32 {
        self.0.memory.slots()
    }

    fn lane(&self, depth: usize) -> Result<Box<dyn Lane>, OpenError> {
        let flags = TimerfdFlags::NONBLOCK | TimerfdFlags::CLOEXEC;
        let timer = rustix::time::timerfd_create(TimerfdClockId::Monotonic, flags)
            .map_err(|errno| OpenError::io(self.name(), "cannot make a timer", errno))?;
        Ok(Box::new(DiskLane {
            disks: Arc::clone(&self.0),
            memory: self.0.memory.lane(depth)?,
            queued: Vec::with_capacity(RUN_PAGES),
            running: Vec::with_capacity(depth),
            count: 0,
            depth,
            timer,
            page: Box::new(Page::zeroed()),
        }))
    }

    fn state(&self, _member: u32) -> State {
        State::Online
    }

    fn unfit_for_swap(&self) -> Option<String> {
        Some("it is for benchmarks".to_owned())
    }
}

struct DiskLane {
    disks: Arc<Disks>,
    memory: Box<dyn Lane>,
    queued: Vec<Operation>,
    running: Vec<Operation>,
    count: usize,
    depth: usize,
    timer: OwnedFd,
    page: Box<Page>,
}

#[derive(Clone, Copy)]
struct Operation {
    ticket: Ticket,
    slot: Slot,
    is_write: bool,
    due: Instant,
}

impl DiskLane {
    fn queue(&mut self, ticket: Ticket, slot: Slot, is_write: bool) -> Progress {
        self.queued.push(Operation { ticket, slot, is_write, due: self.disks.begun });
        self.count += 1;
        if self.queued.len() == RUN_PAGES {
            self.submit();
        }
        Progress::Queued
    }

    fn is_full(&self) -> bool {
        self.count == self.depth
    }

    /// Sets the timer to the end of the next operation.
    fn set_timer(&self) {
        let Some(next) = self.running.iter().map(|operation| operation.due).min() else { return };
        let wait = next.saturating_duration_since(Instant::now()).max(Duration::from_nanos(1));
        let none = Timespec { tv_sec: 0, tv_nsec: 0 };
        let value = Timespec { tv_sec: wait.as_secs() as i64, tv_nsec: wait.subsec_nanos().into() };
        let timer = Itimerspec { it_interval: none, it_value: value };
        let _ = rustix::time::timerfd_settime(&self.timer, TimerfdTimerFlags::empty(), &timer);
    }
}

impl Lane for DiskLane {
    fn write(&mut self, ticket: Ticket, slot: Slot, page: &PageBytes) -> Progress {
        if self.is_full() {
            return Progress::Full;
        }
        match self.memory.write(0, slot, page) {
            Progress::Done(Ok(())) => self.queue(ticket, slot, true),
            progress => progress,
        }
    }

    fn read(&mut self, ticket: Ticket, slot: Slot, _page: &mut PageBytes) -> Progress {
        if self.is_full() { Progress::Full } else { self.queue(ticket, slot, false) }
    }

    fn submit(&mut self) {
        if self.queued.is_empty() {
            return;
        }
        let mut at = 0;
        while at < self.queued.len() {
            let first = self.queued[at];
            let place = |slot| self.disks.deal.locate(slot).expect("turns end nowhere");
            let (member, there) = place(first.slot);
            let follows = |(step, next): (usize, &Operation)| {
                next.is_write == first.is_write && place(next.slot) == (member, Slot(there.0 + step as u32))
            };
            let run = self.queued[at..].iter().enumerate().take(RUN_PAGES).take_while(|it| follows(*it));
            let pages = run.count();
            let bytes = (pages * PAGE_SIZE) as u64;
            let due = self.disks.begin(member, bytes);
            if first.is_write {
                self.disks.written.fetch_add(bytes, Relaxed);
                self.disks.writes.fetch_add(1, Relaxed);
                self.disks.long.fetch_add(if bytes >= LONG { bytes } else { 0 }, Relaxed);
            }
            let run = self.queued[at..at + pages].iter();
            self.running.extend(run.map(|operation| Operation { due, ..*operation }));
            at += pages;
        }
        self.queued.clear();
        self.set_timer();
    }

    fn poll(&mut self, now: Instant, done: &mut dyn FnMut(Done<'_>)) {
        let mut ended = false;
        let mut at = 0;
        while let Some(operation) = self.running.get(at).copied() {
            if operation.due > now {
                at += 1;
                continue;
            }
            self.running.swap_remove(at);
            self.count -= 1;
            ended = true;
            let ticket = operation.ticket;
            if operation.is_write {
                done(Done { ticket, result: Ok(()), page: None });
                continue;
            }
            let Progress::Done(result) = self.memory.read(0, operation.slot, &mut self.page) else {
                continue;
            };
            done(Done { ticket, result, page: Some(&self.page) });
        }
        if ended {
            let _ = rustix::io::read(&self.timer, &mut [0; 8]);
            self.set_timer();
        }
    }

    fn in_flight(&self) -> usize {
        self.count
    }

    fn wake_fd(&self) -> Option<BorrowedFd<'_>> {
        Some(self.timer.as_fd())
    }
}

/// Sleeps until one of the descriptors is readable, for at most a millisecond.
pub fn sleep(fds: &[BorrowedFd<'_>]) {
    let mut fds: Vec<_> = fds.iter().map(|fd| PollFd::from_borrowed_fd(*fd, PollFlags::IN)).collect();
    let nap = Timespec { tv_sec: 0, tv_nsec: 1_000_000 };
    let _ = rustix::event::poll(&mut fds, Some(&nap));
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_disk_takes_as_long_as_its_limits_say_and_neighbours_are_one_operation() {
        let limits = Limits { operations: 1000, bytes: 100 << 20 };
        assert_eq!(limits.takes(4096), 1_000_000);
        assert_eq!(limits.takes(1 << 20), 10_000_000);
        let disks = Disks::new(4096, 2, limits).unwrap();
        disks.limit(true);
        let mut lane = DiskStore(Arc::clone(&disks)).lane(600).unwrap();
        // Each disk gets half of the 512 neighbouring pages, as one operation of 1 MiB. The ten
        // single pages are ten operations in all.
        let before = Instant::now();
        for slot in (0..512).chain((1024..1044).step_by(2)) {
            assert_eq!(lane.write(slot, Slot(slot), &[slot as u8; PAGE_SIZE]), Progress::Queued);
        }
        lane.submit();
        let traffic = disks.traffic();
        assert_eq!((traffic.writes, traffic.long, traffic.written), (12, 2 << 20, 522 << 12));
        // The test itself may stall for a while, and must not fail then. So the shortest time of an
        // operation counts from before the submission, and its longest time from after it.
        let (after, mut ended) = (Instant::now(), 0);
        lane.poll(before + Duration::from_millis(9), &mut |_| ended += 1);
        assert_eq!(ended, 0, "1 MiB takes 10 ms");
        lane.poll(before + Duration::from_millis(19), &mut |_| ended += 1);
        assert!(ended < 522, "ten single pages take 10 ms more: {ended}");
        lane.poll(after + Duration::from_millis(10), &mut |_| ended += 1);
        assert!(ended >= 512, "1 MiB takes no more than 10 ms: {ended}");
        lane.poll(after + Duration::from_millis(20), &mut |_| ended += 1);
        assert_eq!(ended, 522);
    }
}
