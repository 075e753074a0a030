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
    Done, Fault, Lane, OpenError, Progress, Reclaim, Sim, SimUrl, State, Store, Survive, Ticket,
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
    sim: Arc<Sim>,
    stalls: Arc<AtomicBool>,
    /// The time of the first poll that found the store stalled.
    since: Option<Instant>,
}

/// The time that a stalled operation is given.
const LIMIT: Duration = ANSWER_WITHIN.saturating_sub(POLL_EVERY);

impl Disk {
    pub fn open(url: SimUrl) -> Self {
        let sim = Arc::new(Sim::open(url).expect("memory"));
        let chunks = sim.slots().div_ceil(sim.chunk_slots()) as usize;
        let memory = Memory::shared("weir-system", chunks * PAGE_SIZE).expect("memory");
        Disk { sim, memory: Mutex::new(memory), looks: AtomicU32::new(0), stalls: Arc::default() }
    }

    /// An actor begins a step.
    pub fn forget_looks(&self) {
        self.looks.store(0, Ordering::Relaxed);
    }

    pub fn stall(&self, stalls: bool) {
        self.stalls.store(stalls, Ordering::Relaxed);
        self.sim.hang(false);
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
        let lane = self.sim.lane(depth)?;
        Ok(Box::new(DiskLane {
            lane,
            sim: Arc::clone(&self.sim),
            stalls: Arc::clone(&self.stalls),
            since: None,
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

impl Lane for DiskLane {
    fn write(&mut self, ticket: Ticket, slot: Slot, page: &PageBytes) -> Progress {
        others_may_act(24);
        let progress = self.lane.write(ticket, slot, page);
        others_may_act(24);
        progress
    }
    fn read(&mut self, ticket: Ticket, slot: Slot, page: &mut PageBytes) -> Progress {
        others_may_act(24);
        self.lane.read(ticket, slot, page)
    }
    fn run_room(&self, write: bool) -> usize {
        self.lane.run_room(write)
    }
    fn read_run(&mut self, ticket: Ticket, first: Slot, count: usize) -> usize {
        self.lane.read_run(ticket, first, count)
    }
    fn write_run(&mut self, ticket: Ticket, first: Slot, pages: &[PageBytes]) -> usize {
        self.lane.write_run(ticket, first, pages)
    }
    fn submit(&mut self) {
        self.lane.submit();
    }
    fn poll(&mut self, now: Instant, done: &mut dyn FnMut(Done<'_>)) {
        if self.stalls.load(Ordering::Relaxed) {
            if now < *self.since.get_or_insert(now) + LIMIT {
                return;
            }
            self.sim.hang(true);
        } else {
            self.since = None;
        }
        self.lane.poll(now, done);
    }
    fn settled(&mut self, free: &mut dyn FnMut(Slot)) {
        self.lane.settled(free);
    }
    fn in_flight(&self) -> usize {
        self.lane.in_flight()
    }
}
