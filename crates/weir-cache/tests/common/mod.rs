//! A stripe of simulated disks. Each has its own faults, hangs and loses power by itself.

use std::os::fd::BorrowedFd;
use std::sync::Arc;
use std::time::Instant;
use weir_core::{ByteSize, PAGE_SIZE, PageBytes, Slot};
use weir_device::{Done, Fault, Progress, Ticket};
use weir_store::{Deal, Lane, OpenError, Sim, SimUrl, State, Store};

/// A stripe of disks.
#[derive(Debug)]
pub struct Disks {
    pub members: Vec<Arc<Sim>>,
    deal: Deal,
    slots: u32,
}

impl Disks {
    /// A stripe of `slots` slots over `members` disks that take units of `unit` slots in turns. The
    /// disks fail as `url` says.
    pub fn new(url: &SimUrl, slots: u32, members: u32, unit: u32) -> Self {
        let each = slots.div_ceil(unit).div_ceil(members) * unit;
        let open = |member: u32| {
            let size = ByteSize(u64::from(each) * PAGE_SIZE as u64);
            let seed = url.seed ^ u64::from(member) << 32;
            let disk = Sim::open(SimUrl { seed, size, ..url.clone() }).unwrap();
            disk.forget_without_power();
            Arc::new(disk)
        };
        Disks { members: (0..members).map(open).collect(), deal: Deal::in_turns(members, unit), slots }
    }

    /// Lets no disk hang any more.
    pub fn go_on(&self) {
        self.members.iter().for_each(|disk| disk.hang(false));
    }
}

impl Store for Disks {
    fn name(&self) -> &str {
        "disks"
    }

    fn slots(&self) -> u32 {
        self.slots
    }

    fn lane(&self, depth: usize) -> Result<Box<dyn Lane>, OpenError> {
        let lanes = self.members.iter().map(|disk| disk.lane(depth)).collect::<Result<_, _>>()?;
        Ok(Box::new(DisksLane { lanes, deal: self.deal.clone(), flush: None }))
    }

    fn members(&self) -> u32 {
        self.members.len() as u32
    }

    fn member(&self, slot: Slot) -> u32 {
        self.deal.locate(slot).map_or(0, |(member, _)| member)
    }

    fn state(&self, member: u32) -> State {
        self.members[member as usize].state(0)
    }

    fn unfit_for_swap(&self) -> Option<String> {
        None
    }
}

struct DisksLane {
    lanes: Vec<Box<dyn Lane>>,
    deal: Deal,
    /// The flush under way: its ticket, the number of disks that have not answered, and the result
    /// so far.
    flush: Option<(Ticket, usize, Result<(), Fault>)>,
}

impl DisksLane {
    fn locate(&mut self, slot: Slot) -> (&mut dyn Lane, Slot) {
        let (member, slot) = self.deal.locate(slot).unwrap();
        (&mut *self.lanes[member as usize], slot)
    }
}

impl Lane for DisksLane {
    fn write(&mut self, ticket: Ticket, slot: Slot, page: &PageBytes) -> Progress {
        let (lane, slot) = self.locate(slot);
        lane.write(ticket, slot, page)
    }

    fn read(&mut self, ticket: Ticket, slot: Slot, page: &mut PageBytes) -> Progress {
        let (lane, slot) = self.locate(slot);
        lane.read(ticket, slot, page)
    }

    fn flush(&mut self, ticket: Ticket) -> Progress {
        if self.flush.is_some() {
            return Progress::Full;
        }
        let (mut left, mut result) = (0, Ok(()));
        for lane in &mut self.lanes {
            match lane.flush(ticket) {
                Progress::Queued => left += 1,
                Progress::Done(ended) => result = result.and(ended),
                Progress::Full => result = Err(Fault::Full),
            }
        }
        if left == 0 {
            return Progress::Done(result);
        }
        self.flush = Some((ticket, left, result));
        Progress::Queued
    }

    fn submit(&mut self) {
        self.lanes.iter_mut().for_each(|lane| lane.submit());
    }

    fn poll(&mut self, now: Instant, done: &mut dyn FnMut(Done<'_>)) {
        let DisksLane { lanes, flush, .. } = self;
        for lane in lanes {
            lane.poll(now, &mut |ended| match flush {
                Some((ticket, left, result)) if *ticket == ended.ticket => {
                    *left -= 1;
                    *result = result.and(ended.result);
                }
                _ => done(ended),
            });
        }
        if let Some((ticket, 0, result)) = *flush {
            *flush = None;
            done(Done { ticket, result, page: None });
        }
    }

    fn settled(&mut self, free: &mut dyn FnMut(Slot)) {
        let deal = &self.deal;
        for (member, lane) in (0..).zip(&mut self.lanes) {
            lane.settled(&mut |there| free(deal.slot(member, there).unwrap()));
        }
    }

    fn in_flight(&self) -> usize {
        self.lanes.iter().map(|lane| lane.in_flight()).sum::<usize>()
    }

    fn wake_fd(&self) -> Option<BorrowedFd<'_>> {
        None
    }
}
