//! The server over a store that fails as told: exactly the requests that hit a fault get an error,
//! and nothing hangs.

mod common;

use common::{PATIENCE, Served, few, noise, page};
use std::collections::{HashMap, HashSet};
use std::sync::Arc;
use std::time::{Duration, Instant};
use weir_core::{ByteSize, PAGE_SIZE};
use weir_export::nbd::client::{Client, ClientError, Operation};
use weir_export::nbd::wire::Errno;
use weir_store::{Sim, SimUrl};

fn served(name: &str, pages: u32, url: &SimUrl) -> (Served, Arc<Sim>) {
    let mut opened = None;
    let served = Served::over(name, pages, &few(), |slots| {
        let size = ByteSize(u64::from(slots) * PAGE_SIZE as u64);
        let sim = Arc::new(Sim::open(SimUrl { size, ..url.clone() }).unwrap());
        opened = Some(Arc::clone(&sim));
        sim
    });
    (served, opened.unwrap())
}

/// The requests of a load that failed, as the client saw them.
#[derive(Default)]
struct Failed {
    reads: u64,
    writes: u64,
}

/// Number of pages that one connection uses in [`load`].
const PAGES: u64 = 512;

/// Random whole-page reads and writes, 16 in flight, checked against a shadow. A read returns the
/// last content whose write was acknowledged, or an error. A refused write leaves the page as it
/// was.
fn load(client: &mut Client, number: u64, rounds: usize) -> Failed {
    let mut shadow = vec![None; PAGES as usize];
    let mut failed = Failed::default();
    let dice = noise(1000 + number, rounds * 16 * 8);
    let mut dice = dice.chunks_exact(8).map(|word| u64::from_le_bytes(word.try_into().unwrap()));
    for round in 0..rounds {
        let (mut reads, mut writes, mut touched) = (HashMap::new(), HashMap::new(), HashSet::new());
        for word in dice.by_ref().take(16) {
            let at = (word % PAGES) as usize;
            if !touched.insert(at) {
                continue; // requests in flight may change places: one of them a page
            }
            let offset = (number * PAGES + at as u64) * PAGE_SIZE as u64;
            if word >> 40 & 1 == 0 {
                reads.insert(client.queue(Operation::read(offset, PAGE_SIZE as u32)), at);
            } else {
                writes.insert(client.queue(Operation::write(offset, &page(word))), (at, word));
            }
        }
        client.send().unwrap();
        while client.in_flight() > 0 {
            let reply = client.receive().unwrap();
            match (reads.get(&reply.cookie), writes.get(&reply.cookie), reply.result) {
                (Some(at), _, Ok(())) => {
                    let expected = shadow[*at].map_or(vec![0; PAGE_SIZE], page);
                    assert!(reply.data == expected, "connection {number}, round {round}, page {at}");
                }
                (Some(_), _, Err(Errno::Io)) => failed.reads += 1,
                (_, Some((at, word)), Ok(())) => shadow[*at] = Some(*word),
                (_, Some(_), Err(Errno::Io)) => failed.writes += 1,
                (_, _, other) => panic!("{other:?}"),
            }
        }
    }
    failed
}

/// Runs the load on four connections, two of them with simple replies. Compares the failures that
/// the clients saw with the faults that the store injected.
fn every_fault_is_seen_once(name: &str, url: &SimUrl, rounds: usize) {
    let (served, sim) = served(name, 4 * PAGES as u32, url);
    let start = Instant::now();
    let threads: Vec<_> = (0..4)
        .map(|number| {
            let mut client = if number % 2 == 0 { served.client() } else { served.simple_client() };
            std::thread::spawn(move || load(&mut client, number, rounds))
        })
        .collect();
    let mut seen = Failed::default();
    for thread in threads {
        let failed = thread.join().unwrap();
        seen.reads += failed.reads;
        seen.writes += failed.writes;
    }
    let (injected, status, stats) = (sim.injected(), served.volume.status(), served.server().stats());
    println!("{name}: {:?}, {injected:?}, {stats:?}", start.elapsed());
    assert!(injected.read_errors > 0 && injected.write_errors > 0 && injected.damaged_reads > 0);
    assert_eq!(seen.reads, injected.read_errors + injected.damaged_reads, "reads that failed");
    assert_eq!(seen.writes, injected.write_errors, "writes that failed");
    assert_eq!((status.read_faults, status.write_faults), (seen.reads, seen.writes));
    assert_eq!(status.corrupt, injected.damaged_reads);
    assert_eq!(stats.errors, seen.reads + seen.writes);
    served.shutdown();
}

fn faults() -> SimUrl {
    SimUrl { seed: 7, read_error: 1e-3, write_error: 1e-3, corrupt: 1e-3, lose: 1e-3, ..SimUrl::default() }
}

#[test]
fn exactly_the_requests_that_a_store_failed_get_eio() {
    every_fault_is_seen_once("eio", &SimUrl { lost_slot: Some(3), ..faults() }, 800);
}

#[test]
fn the_same_where_operations_finish_late_and_overtake_one_another() {
    every_fault_is_seen_once("late", &SimUrl { delay: 5, ..faults() }, 800);
}

#[test]
fn the_same_where_operations_take_time() {
    every_fault_is_seen_once("slow", &SimUrl { latency: Duration::from_micros(300), ..faults() }, 800);
}

#[test]
fn long_and_unaligned_requests_to_a_slow_store_come_back_as_written() {
    let slow = SimUrl { delay: 7, latency: Duration::from_micros(20), ..SimUrl::default() };
    let (served, _) = served("long", 4096, &slow);
    for mut client in [served.client(), served.simple_client()] {
        for (seed, (offset, length)) in
            [(0, 3 << 20), (777, 70_001), (4096, 4096), (4095, 2), (1 << 20, (8 << 20) + 5)]
                .into_iter()
                .enumerate()
        {
            let data = noise(seed as u64, length);
            client.write(offset, &data).unwrap();
            assert!(client.read(offset, length as u32).unwrap() == data, "{offset} {length}");
        }
        // The range begins and ends within pages: those pages are read, changed and written.
        let zeroes = Operation::WriteZeroes { offset: 5000, length: 100_000, fast: false, no_hole: false };
        client.write(0, &noise(9, 200_000)).unwrap();
        client.perform(zeroes).unwrap();
        let mut expected = noise(9, 200_000);
        expected[5000..105_000].fill(0);
        assert!(client.read(0, 200_000).unwrap() == expected);
    }
    served.shutdown();
}

#[test]
fn a_read_that_begins_within_a_page_and_is_as_long_as_a_chunk_has_one_reply() {
    let (served, _) = served("ragged", 1024, &SimUrl { delay: 3, ..SimUrl::default() });
    let content = noise(4, 1 << 20);
    for mut client in [served.client(), served.simple_client()] {
        client.write(0, &content).unwrap();
        for (offset, length) in
            [(512, 256 << 10), (4095, (256 << 10) - 4094), (1, 256 << 10), (2048, 255 << 10)]
        {
            let cookies = [(offset, length), (0, 4096)]
                .map(|(offset, length)| client.queue(Operation::read(offset as u64, length as u32)));
            client.send().unwrap();
            for _ in 0..2 {
                let reply = client.receive().unwrap();
                let (from, length) = if reply.cookie == cookies[0] { (offset, length) } else { (0, 4096) };
                assert!(reply.data == content[from..from + length], "{offset} {length}");
            }
        }
    }
    served.shutdown();
}

#[test]
fn a_long_read_over_a_bad_page_fails_as_a_whole_and_the_connection_goes_on() {
    let bad = SimUrl { lost_slot: Some(100), delay: 3, ..SimUrl::default() };
    for (name, simple) in [("bad", false), ("bad-simple", true)] {
        let (served, sim) = served(name, 1024, &bad);
        let mut client = if simple { served.simple_client() } else { served.client() };
        client.write(0, &noise(1, 4 << 20)).unwrap();
        let before = sim.injected().damaged_reads;
        let whole = client.read(0, 4 << 20);
        assert!(matches!(whole, Err(ClientError::Failed(Errno::Io))), "{:?}", whole.map(|data| data.len()));
        assert!(sim.injected().damaged_reads > before);
        let pages: Vec<bool> = (0..1024).map(|at| client.read(at * 4096, 4096).is_ok()).collect();
        assert_eq!(pages.iter().filter(|ok| !**ok).count(), 1, "one page is lost, and no other");
        served.shutdown();
    }
}

#[test]
fn a_store_that_is_lost_turns_every_request_into_an_error_and_hangs_none() {
    let (served, sim) = served("dead", 256, &SimUrl { delay: 3, ..SimUrl::default() });
    let mut client = served.client();
    client.write(0, &page(1)).unwrap();
    sim.kill();
    for _ in 0..10 {
        assert!(matches!(client.read(0, 4096), Err(ClientError::Failed(Errno::Io))));
        assert!(matches!(client.write(0, &page(2)), Err(ClientError::Failed(Errno::Io | Errno::NoSpace))));
    }
    assert_eq!(
        client.read(4096, 4096).unwrap(),
        vec![0; 4096],
        "a page that was never written is still zeros"
    );
    served.shutdown();
}

#[test]
fn a_client_that_leaves_with_requests_under_way_leaves_nothing_behind() {
    let slow = SimUrl { latency: Duration::from_millis(30), ..SimUrl::default() };
    let (served, _) = served("leaves", 1024, &slow);
    let deadline = Instant::now() + PATIENCE;
    let seat = || loop {
        assert!(Instant::now() < deadline, "no seat comes free");
        if let Ok(client) = Client::unix(&served.socket, &Default::default()) {
            return client;
        }
    };
    for round in 0..8 {
        let mut client = seat();
        for at in 0..32 {
            client.queue(Operation::write(at * 4096, &page(round)));
            client.queue(Operation::read((at + 64) * 4096, 4096));
        }
        client.send().unwrap();
        drop(client);
    }
    // Every seat is usable again, and serves only new requests.
    let mut clients: Vec<Client> = (0..4).map(|_| seat()).collect();
    for client in &mut clients {
        assert_eq!(client.read(100 * 4096, 4096).unwrap(), vec![0; 4096]);
    }
    served.shutdown();
}
