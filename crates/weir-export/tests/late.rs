//! Writes of connections that have ended, over a slow store.

mod common;

use common::{PATIENCE, Served, few, page};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};
use weir_core::{PAGE_SIZE, PageBytes, Slot};
use weir_export::nbd::client::Operation;
use weir_store::{Done, Host, Lane, OpenError, Progress, State, Store, Ticket};

/// A disk with a bad spot: writes of pages that begin with [`MARK`] wait until the gate is open.
#[derive(Debug)]
struct Gated {
    host: Host,
    open: Arc<AtomicBool>,
    held: Arc<AtomicBool>,
}

const MARK: [u8; 2] = [0xaa, 0x55];
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

struct Gate {
    open: Arc<AtomicBool>,
    held: Arc<AtomicBool>,
}

fn served(name: &str) -> (Served, Gate) {
    let (open, held) = (Arc::new(AtomicBool::new(false)), Arc::new(AtomicBool::new(false)));
    let gate = Gate { open: Arc::clone(&open), held: Arc::clone(&held) };
    let served = Served::over(name, 1024, &few(), |slots| {
        Arc::new(Gated { host: Host::new(slots).unwrap(), open, held })
    });
    (served, gate)
}

impl Gate {
    /// Waits until a write waits at the gate.
    fn wait(&self) {
        let begun = Instant::now();
        while !self.held.swap(false, Ordering::SeqCst) {
            assert!(begun.elapsed() < PATIENCE, "the write does not come to the store");
            std::thread::sleep(Duration::from_millis(1));
        }
    }
}

fn marked(seed: u64) -> Vec<u8> {
    let mut bytes = page(seed);
    bytes[..2].copy_from_slice(&MARK);
    bytes
}

#[test]
fn a_write_of_a_connection_that_has_ended_is_never_published() {
    let (served, gate) = served("late");
    // The write is of a whole page, of a part, and the end of a long one.
    for (at, (from, length)) in [(0, PAGE_SIZE), (1000, 500), (0, 3 * PAGE_SIZE)].into_iter().enumerate() {
        gate.open.store(false, Ordering::SeqCst);
        let offset = at as u64 * 16 * PAGE_SIZE as u64;
        let mut second = served.client();
        let mut old = marked(1).repeat(3);
        if from > 0 {
            // The store holds back the page that a part is written to.
            gate.open.store(true, Ordering::SeqCst);
            second.write(offset, &old[..PAGE_SIZE]).unwrap();
            gate.open.store(false, Ordering::SeqCst);
            old[from..from + length].fill(7);
        }
        let mut first = served.simple_client();
        first.queue(Operation::write(offset + from as u64, &old[from..from + length]));
        first.send().unwrap();
        gate.wait();
        // The client gives the connection up, as the kernel's does after its I/O timeout. It writes
        // the same page again, then something newer.
        drop(first);
        let new = page(2).repeat(3);
        second.write(offset, &page(3).repeat(3)).unwrap();
        second.write(offset, &new).unwrap();
        gate.open.store(true, Ordering::SeqCst);
        assert!(served.logs("closed"), "the first connection ends");
        let begun = Instant::now();
        while served.server().stats().connected > 1 {
            assert!(begun.elapsed() < PATIENCE);
            std::thread::sleep(Duration::from_millis(1));
        }
        let back = second.read(offset, new.len() as u32).unwrap();
        assert!(back == new, "way {at}: older than what was acknowledged: {:02x?}", &back[..4]);
    }
    let status = served.volume.status();
    assert_eq!(u64::from(status.stores[0].used), status.stored, "what was given up has no slot");
    assert_eq!((status.write_faults, status.corrupt), (0, 0));
    served.shutdown();
}

#[test]
fn a_write_before_a_disconnect_is_published_though_the_client_has_gone() {
    let (served, gate) = served("goodbye");
    let mut client = served.simple_client();
    client.queue(Operation::write(0, &marked(1)));
    client.send().unwrap();
    gate.wait();
    client.disconnect().unwrap();
    std::thread::sleep(Duration::from_millis(100));
    gate.open.store(true, Ordering::SeqCst);
    let begun = Instant::now();
    while served.server().stats().connected > 0 {
        assert!(begun.elapsed() < PATIENCE);
        std::thread::sleep(Duration::from_millis(1));
    }
    assert!(served.client().read(0, PAGE_SIZE as u32).unwrap() == marked(1));
    served.shutdown();
}
