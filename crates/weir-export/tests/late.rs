//! Writes of connections that have ended, over a slow store.

mod common;

use common::gated::{Gate, marked};
use common::{PATIENCE, Served, few, page};
use std::sync::atomic::Ordering;
use std::time::{Duration, Instant};
use weir_core::PAGE_SIZE;
use weir_export::nbd::client::Operation;

fn served(name: &str) -> (Served, Gate) {
    let mut gate = None;
    let served = Served::over(name, 1024, &few(), |slots| {
        let (store, its) = Gate::store(slots);
        gate = Some(its);
        store
    });
    (served, gate.unwrap())
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
