//! A lane that is checked: every ticket is accounted for, and every completion comes once.

use crate::{Done, Fault, Lane, Progress, Store, Ticket};
use rustix::event::{PollFd, PollFlags, Timespec, poll};
use std::collections::HashMap;
use std::time::{Duration, Instant};
use weir_core::{PAGE_SIZE, PageBytes, Slot};

/// Time limit of a test: longer than any operation of a store that works.
pub(super) const PATIENCE: Duration = Duration::from_secs(20);

/// The kind of a completed operation.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) enum Kind {
    /// A write, with its serial number.
    Write(u32),
    Read,
}

/// An operation that has finished.
#[derive(Debug)]
pub(super) struct Finished {
    pub kind: Kind,
    pub slot: Slot,
    pub result: Result<(), Fault>,
    pub page: Option<Box<PageBytes>>,
}

/// A lane that is checked at each step.
pub(super) struct Watched {
    lane: Box<dyn Lane>,
    depth: usize,
    next: Ticket,
    pending: HashMap<Ticket, (Kind, Slot)>,
    unsubmitted: bool,
}

impl Watched {
    pub(super) fn open(store: &dyn Store, depth: usize) -> Self {
        let lane = store.lane(depth).expect("a lane");
        assert_eq!(lane.in_flight(), 0, "a new lane has nothing in flight");
        Watched { lane, depth, next: 0, pending: HashMap::new(), unsubmitted: false }
    }

    pub(super) fn in_flight(&self) -> usize {
        self.pending.len()
    }

    pub(super) fn plan(&mut self, reads: usize, writes: usize) {
        self.lane.plan(reads, writes);
    }

    /// Queues an operation. If the lane has no room, returns `Err`, and the caller must make room
    /// first.
    pub(super) fn queue(&mut self, kind: Kind, slot: Slot, page: &PageBytes) -> Result<Option<Finished>, ()> {
        let ticket = self.next;
        self.next = self.next.wrapping_add(1);
        const UNTOUCHED: u8 = 0xa5;
        let mut target = Box::new([UNTOUCHED; PAGE_SIZE]);
        let progress = match kind {
            Kind::Write(_) => {
                let mut given = *page;
                let progress = self.lane.write(ticket, slot, &given);
                given.fill(UNTOUCHED); // The page is the caller's again.
                std::hint::black_box(&given);
                progress
            }
            Kind::Read => self.lane.read(ticket, slot, &mut target),
        };
        let answer = match progress {
            Progress::Full => {
                let waiting = self.pending.len();
                assert!(
                    waiting >= self.depth,
                    "full with {waiting} in flight; there is room for {}",
                    self.depth
                );
                Err(())
            }
            Progress::Queued => {
                assert!(
                    target.iter().all(|&byte| byte == UNTOUCHED),
                    "a queued read touched the caller's page"
                );
                self.pending.insert(ticket, (kind, slot));
                self.unsubmitted = true;
                Ok(None)
            }
            Progress::Done(result) => {
                let page = (kind == Kind::Read && result.is_ok()).then_some(target);
                Ok(Some(Finished { kind, slot, result, page }))
            }
        };
        self.check_count();
        answer
    }

    pub(super) fn submit(&mut self) {
        self.lane.submit();
        self.unsubmitted = false;
        self.check_count();
    }

    pub(super) fn poll(&mut self) -> Vec<Finished> {
        let mut finished = Vec::new();
        let pending = &mut self.pending;
        self.lane.poll(Instant::now(), &mut |Done { ticket, result, page }| {
            let (kind, slot) =
                pending.remove(&ticket).unwrap_or_else(|| panic!("ticket {ticket} came back twice"));
            let expected = kind == Kind::Read && result.is_ok();
            assert_eq!(
                page.is_some(),
                expected,
                "a page comes with a read that succeeded and with nothing else"
            );
            finished.push(Finished { kind, slot, result, page: page.map(|page| Box::new(*page)) });
        });
        self.check_count();
        finished
    }

    /// Waits until one more operation is finished. Sleeps on the lane's descriptor if the lane has
    /// one.
    pub(super) fn wait(&mut self) -> Vec<Finished> {
        assert!(self.in_flight() > 0, "nothing to wait for");
        if self.unsubmitted {
            self.submit();
        }
        let deadline = Instant::now() + PATIENCE;
        loop {
            if let Some(fd) = self.lane.wake_fd() {
                let patience = Timespec { tv_sec: PATIENCE.as_secs() as i64, tv_nsec: 0 };
                let ready = poll(&mut [PollFd::new(&fd, PollFlags::IN)], Some(&patience)).expect("poll");
                assert_eq!(ready, 1, "{} in flight and the wake_fd stays silent", self.in_flight());
            }
            let finished = self.poll();
            if !finished.is_empty() {
                return finished;
            }
            assert!(Instant::now() < deadline, "{} in flight and none finishes", self.in_flight());
        }
    }

    /// Waits for all operations in flight.
    pub(super) fn drain(&mut self) -> Vec<Finished> {
        let mut finished = Vec::new();
        while self.in_flight() > 0 {
            finished.append(&mut self.wait());
        }
        finished
    }

    /// Queues an operation, and makes room for it if needed; adds the operations that finished
    /// meanwhile to `finished`.
    pub(super) fn run(&mut self, kind: Kind, slot: Slot, page: &PageBytes, finished: &mut Vec<Finished>) {
        loop {
            match self.queue(kind, slot, page) {
                Ok(done) => return finished.extend(done),
                Err(()) => finished.append(&mut self.wait()),
            }
        }
    }

    /// Writes one page, and waits for the result.
    pub(super) fn write_now(&mut self, slot: Slot, page: &PageBytes) -> Result<(), Fault> {
        let mut finished = Vec::new();
        self.run(Kind::Write(0), slot, page, &mut finished);
        finished.append(&mut self.drain());
        finished.pop().expect("a completion").result
    }

    /// Reads one page, and waits for the result.
    pub(super) fn read_now(&mut self, slot: Slot) -> Result<Box<PageBytes>, Fault> {
        let mut finished = Vec::new();
        self.run(Kind::Read, slot, &[0; PAGE_SIZE], &mut finished);
        finished.append(&mut self.drain());
        let Finished { result, page, .. } = finished.pop().expect("a completion");
        result.map(|()| page.expect("checked in `poll`"))
    }

    /// The slot's content where it lies, if the store shows it.
    pub(super) fn view(&self, slot: Slot) -> Option<PageBytes> {
        // SAFETY: the suite views a slot only while no lane has an operation on it and no chunk is
        // being released.
        unsafe { self.lane.view(slot) }.copied()
    }

    pub(super) fn into_lane(self) -> Box<dyn Lane> {
        self.lane
    }

    /// Whether the lane asks to be polled.
    pub(super) fn wakes(&self) -> Option<bool> {
        let fd = self.lane.wake_fd()?;
        Some(poll(&mut [PollFd::new(&fd, PollFlags::IN)], Some(&Timespec::default())).expect("poll") > 0)
    }

    fn check_count(&self) {
        assert_eq!(self.lane.in_flight(), self.pending.len(), "in_flight counts what was not handed over");
    }
}
