//! A store whose writes a test holds back.

use super::{PATIENCE, page};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};
use weir_core::{PAGE_SIZE, PageBytes, Slot};
use weir_store::{Done, Host, Lane, OpenError, Progress, State, Store, Ticket};

/// A disk with a bad spot: writes of pages that begin with [`MARK`] wait until the gate is open.
#[derive(Debug)]
struct Gated {
    host: Host,
    open: Arc<AtomicBool>,
    held: Arc<AtomicBool>,
}

pub const MARK: [u8; 2] = [0xaa, 0x55];
const HELD_MAX: usize = 64;

struct GatedLane {
    lane: Box<dyn Lane>,
    open: Arc<AtomicBool>,
    held: Arc<AtomicBool>,
    waiting: Vec<(Ticket, Slot, Box<PageBytes>)>,
    spare: Mutex<Vec<Box<PageBytes>>>,
}

impl Store for Gated {
    fn name(&self) -> &str {
        "gated"
    }

    fn slots(&self) -> u32 {
        self.host.slots()
    }

    fn lane(&self, depth: usize) -> Result<Box<dyn Lane>, OpenError> {
        let spare = (0..HELD_MAX).map(|_| Box::new([0; PAGE_SIZE])).collect();
        Ok(Box::new(GatedLane {
            lane: self.host.lane(depth)?,
            open: Arc::clone(&self.open),
            held: Arc::clone(&self.held),
            waiting: Vec::with_capacity(HELD_MAX),
            spare: Mutex::new(spare),
        }))
    }

    fn state(&self, member: u32) -> State {
        self.host.state(member)
    }

    fn unfit_for_swap(&self) -> Option<String> {
        None
    }
}

impl Lane for GatedLane {
    fn write(&mut self, ticket: Ticket, slot: Slot, page: &PageBytes) -> Progress {
        if page[..2] != MARK || self.open.load(Ordering::SeqCst) {
            return self.lane.write(ticket, slot, page);
        }
        let mut kept = self.spare.lock().unwrap().pop().expect("a page for each write that waits");
        *kept = *page;
        self.waiting.push((ticket, slot, kept));
        self.held.store(true, Ordering::SeqCst);
        Progress::Queued
    }

    fn read(&mut self, ticket: Ticket, slot: Slot, page: &mut PageBytes) -> Progress {
        self.lane.read(ticket, slot, page)
    }

    fn poll(&mut self, _now: Instant, done: &mut dyn FnMut(Done<'_>)) {
        while self.open.load(Ordering::SeqCst)
            && let Some((ticket, slot, page)) = self.waiting.pop()
        {
            let Progress::Done(result) = self.lane.write(ticket, slot, &page) else {
                panic!("memory answers at once")
            };
            self.spare.lock().unwrap().push(page);
            done(Done { ticket, result, page: None });
        }
    }

    fn in_flight(&self) -> usize {
        self.waiting.len()
    }
}

pub struct Gate {
    pub open: Arc<AtomicBool>,
    held: Arc<AtomicBool>,
}

impl Gate {
    /// A store of this many slots, and its gate, which is closed.
    pub fn store(slots: u32) -> (Arc<dyn Store>, Gate) {
        let (open, held) = (Arc::new(AtomicBool::new(false)), Arc::new(AtomicBool::new(false)));
        let gate = Gate { open: Arc::clone(&open), held: Arc::clone(&held) };
        (Arc::new(Gated { host: Host::new(slots).unwrap(), open, held }), gate)
    }

    /// Waits until a write waits at the gate.
    pub fn wait(&self) {
        let begun = Instant::now();
        while !self.held.swap(false, Ordering::SeqCst) {
            assert!(begun.elapsed() < PATIENCE, "the write does not come to the store");
            std::thread::sleep(Duration::from_millis(1));
        }
    }
}

/// A page whose writes wait at a closed gate.
pub fn marked(seed: u64) -> Vec<u8> {
    let mut bytes = page(seed);
    bytes[..2].copy_from_slice(&MARK);
    bytes
}
