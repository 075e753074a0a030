//! A store of the simulator: a [`Sim`] whose chunks are real memory that a keeper holds, and whose
//! lanes let others act in the middle of a call.

use super::world::others_may_act;
use std::os::unix::fs::MetadataExt as _;
use std::sync::atomic::{AtomicBool, AtomicU32, Ordering};
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};
use weir_core::{Memory, PAGE_SIZE, PageBytes, Slot};
use weir_device::{ANSWER_WITHIN, POLL_EVERY};
use weir_store::{
    Done, Fault, Lane, Lateness, OpenError, Progress, Reclaim, Sim, SimUrl, State, Store, Survive, Ticket,
};

/// Most questions for a store's state within one step of an actor. A step does a bounded piece of
/// work. One that asks so often waits for somebody who cannot act meanwhile.
const LOOKS_MOST: u32 = 20_000;

#[derive(Debug)]
pub struct Disk {
    pub sim: Arc<Sim>,
    /// A page for each chunk, which goes and comes with the chunk's memory.
    memory: Mutex<Memory>,
    looks: AtomicU32,
    /// Whether the store stalls. No lane hears of an answer then, and operations end in time with
    /// a timeout.
    stalls: Arc<AtomicBool>,
}

struct DiskLane {
    lane: Box<dyn Lane>,
    stalls: Arc<AtomicBool>,
    lateness: Lateness,
    /// The operations under way, by the tickets that the store's lane has.
    operations: Vec<Option<Operation>>,
    unsubmitted: Vec<usize>,
    in_flight: usize,
    /// Slots of late writes that have arrived since.
    settled: Vec<Slot>,
    /// The time of the last poll.
    polled: Option<Instant>,
}

/// An operation on slots side by side.
#[derive(Clone, Copy)]
struct Operation {
    ticket: Ticket,
    next: Slot,
    left: usize,
    is_write: bool,
    /// Whether it was submitted, and the time of the first poll after that.
    is_submitted: bool,
    since: Option<Instant>,
}

/// The error of an operation that was not begun, since the store does not end those before it.
const ETIMEDOUT: i32 = 110;
/// The time that a store has for an operation.
const LIMIT: Duration = ANSWER_WITHIN.saturating_sub(POLL_EVERY);

impl Disk {
    pub fn open(url: SimUrl) -> Self {
        let sim = Arc::new(Sim::open(url).expect("memory"));
        let chunks = sim.slots().div_ceil(sim.chunk_slots()) as usize;
        // The last page is never taken.
        let memory = Memory::sparse("weir-system", (chunks + 1) * PAGE_SIZE).expect("addresses");
        memory.take_more(0, chunks * PAGE_SIZE).expect("memory");
        Disk { sim, memory: Mutex::new(memory), looks: AtomicU32::new(0), stalls: Arc::default() }
    }

    /// An actor begins a step.
    pub fn forget_looks(&self) {
        self.looks.store(0, Ordering::Relaxed);
    }

    pub fn stall(&self, stalls: bool) {
        self.stalls.store(stalls, Ordering::Relaxed);
    }

    pub fn is_stalled(&self) -> bool {
        self.stalls.load(Ordering::Relaxed)
    }

    fn blocks(&self) -> u64 {
        let memory = self.memory.lock().expect("no panic holds it");
        let fd = memory.fd().expect("a memfd").try_clone_to_owned().expect("a descriptor");
        std::fs::File::from(fd).metadata().expect("a size").blocks()
    }

    /// The next daemon maps the memory that the keeper holds for it. What was given back is not
    /// taken again by that.
    pub fn hand_over(&self) {
        let before = self.blocks();
        {
            let mut memory = self.memory.lock().expect("no panic holds it");
            let fd = memory.fd().expect("a memfd").try_clone_to_owned().expect("a descriptor");
            *memory = Memory::adopt(fd).expect("a mapping");
        }
        assert!(self.blocks() <= before, "memory that was given back is taken again over a death");
    }

    fn with_chunk(&self, chunk: u32, change: impl FnOnce(&Memory, usize) -> std::io::Result<()>) {
        let memory = self.memory.lock().expect("no panic holds it");
        change(&memory, chunk as usize * PAGE_SIZE).expect("a page of memory");
    }
}

impl Store for Disk {
    fn name(&self) -> &str {
        self.sim.name()
    }
    fn slots(&self) -> u32 {
        self.sim.slots()
    }
    fn lane(&self, depth: usize) -> Result<Box<dyn Lane>, OpenError> {
        Ok(Box::new(DiskLane {
            lane: self.sim.lane(depth)?,
            stalls: Arc::clone(&self.stalls),
            lateness: Lateness::new(depth, LIMIT),
            operations: vec![None; depth],
            unsubmitted: Vec::new(),
            in_flight: 0,
            settled: Vec::new(),
            polled: None,
        }))
    }
    fn state(&self, member: u32) -> State {
        let looks = self.looks.fetch_add(1, Ordering::Relaxed);
        assert!(looks < LOOKS_MOST, "an actor does not end its step: whom it waits for cannot act");
        self.sim.state(member)
    }
    fn unfit_for_swap(&self) -> Option<String> {
        None
    }
    fn reclaim(&self) -> Option<&dyn Reclaim> {
        Some(self)
    }
    fn survive(&self) -> Option<&dyn Survive> {
        self.sim.survive()
    }
}

impl Reclaim for Disk {
    fn chunk_slots(&self) -> u32 {
        self.sim.chunk_slots()
    }
    fn release(&self, chunk: u32) -> Result<(), Fault> {
        others_may_act(4);
        self.sim.release(chunk)?;
        self.with_chunk(chunk, |memory, at| memory.punch(at, PAGE_SIZE));
        others_may_act(4);
        Ok(())
    }
    fn take(&self, chunk: u32) -> Result<(), Fault> {
        others_may_act(4);
        self.with_chunk(chunk, |memory, at| memory.take_more(at, PAGE_SIZE));
        self.sim.take(chunk)?;
        others_may_act(4);
        Ok(())
    }
}

impl DiskLane {
    /// Begins an operation by `begin`, which gets the ticket for the store's lane.
    fn begin(
        &mut self,
        (ticket, next, left): (Ticket, Slot, usize),
        is_write: bool,
        begin: impl FnOnce(&mut dyn Lane, Ticket) -> (Progress, usize),
    ) -> (Progress, usize) {
        let hangs = self.in_flight == 0;
        if let Some(polled) = self.polled.filter(|_| hangs) {
            // Nobody polls a lane whose operations are all late.
            self.poll(polled, &mut |done| unreachable!("{} was answered before", done.ticket));
        }
        let refused = if hangs { Progress::Done(Err(Fault::Io(ETIMEDOUT))) } else { Progress::Full };
        let Some(number) = self.operations.iter().position(Option::is_none) else { return (refused, 0) };
        let (progress, begun) = begin(&mut *self.lane, number as Ticket);
        match progress {
            Progress::Queued if begun > 0 => {
                let left = left.min(begun);
                let (is_submitted, since) = (false, None);
                let operation = Operation { ticket, next, left, is_write, is_submitted, since };
                self.operations[number] = Some(operation);
                self.unsubmitted.push(number);
                self.in_flight += left;
            }
            Progress::Full => return (refused, 0),
            _ => {}
        }
        (progress, begun)
    }
}

impl Lane for DiskLane {
    fn write(&mut self, ticket: Ticket, slot: Slot, page: &PageBytes) -> Progress {
        others_may_act(24);
        let (progress, _) =
            self.begin((ticket, slot, 1), true, |lane, number| (lane.write(number, slot, page), 1));
        others_may_act(24);
        progress
    }
    fn read(&mut self, ticket: Ticket, slot: Slot, page: &mut PageBytes) -> Progress {
        others_may_act(24);
        self.begin((ticket, slot, 1), false, |lane, number| (lane.read(number, slot, page), 1)).0
    }
    fn run_room(&self, write: bool) -> usize {
        self.lane.run_room(write)
    }
    fn read_run(&mut self, ticket: Ticket, first: Slot, count: usize) -> usize {
        let run = |lane: &mut dyn Lane, number| (Progress::Queued, lane.read_run(number, first, count));
        self.begin((ticket, first, count), false, run).1
    }
    fn write_run(&mut self, ticket: Ticket, first: Slot, pages: &[PageBytes]) -> usize {
        let run = |lane: &mut dyn Lane, number| (Progress::Queued, lane.write_run(number, first, pages));
        self.begin((ticket, first, pages.len()), true, run).1
    }
    fn submit(&mut self) {
        self.lane.submit();
        for number in self.unsubmitted.drain(..) {
            self.lateness.submitted(number);
            self.operations[number].as_mut().expect("it has begun").is_submitted = true;
        }
    }
    fn poll(&mut self, now: Instant, done: &mut dyn FnMut(Done<'_>)) {
        let DiskLane { lane, stalls, lateness, operations, in_flight, settled, polled, .. } = self;
        *polled = Some(now);
        lateness.stamp(now);
        if !stalls.load(Ordering::Relaxed) {
            lane.poll(now, &mut |answer| {
                let number = answer.ticket as usize;
                let operation = operations[number].as_mut().expect("an operation under way");
                let Operation { ticket, next, left, is_write, .. } = *operation;
                (operation.next, operation.left) = (Slot(next.0 + 1), left - 1);
                let is_late = lateness.is_late(number);
                if left == 1 {
                    lateness.end(number);
                    operations[number] = None;
                }
                match is_late {
                    true if is_write => settled.push(next),
                    true => {}
                    false => {
                        *in_flight -= 1;
                        done(Done { ticket, ..answer });
                    }
                }
            });
        }
        lateness.expire(now, |number| {
            let Operation { ticket, left, .. } = operations[number].expect("an operation under way");
            for _ in 0..left {
                *in_flight -= 1;
                done(Done { ticket, result: Err(Fault::Timeout), page: None });
            }
        });
        for (number, operation) in operations.iter_mut().enumerate() {
            let Some(operation) = operation.as_mut().filter(|it| it.is_submitted) else { continue };
            let since = *operation.since.get_or_insert(now);
            let has_answer = lateness.is_late(number) || now - since < ANSWER_WITHIN;
            assert!(has_answer, "a store has not answered an operation within {ANSWER_WITHIN:?}");
        }
    }
    fn settled(&mut self, free: &mut dyn FnMut(Slot)) {
        self.settled.drain(..).for_each(free);
    }
    fn in_flight(&self) -> usize {
        self.in_flight
    }
}
