//! Long reads from a slow store, and long writes, whose bytes a thread beside the connection's own moves.

mod common;

use common::{PATIENCE, Served, few, noise, page};
use std::collections::HashMap;
use std::io::{Read, Write};
use std::os::unix::net::UnixStream;
use std::sync::Arc;
use std::time::{Duration, Instant};
use weir_core::{ByteSize, PAGE_SIZE};
use weir_export::nbd::Config;
use weir_export::nbd::client::{Client, Operation, Wish};
use weir_export::nbd::transmission::Request;
use weir_export::nbd::wire::command;
use weir_store::{Sim, SimUrl};

const PAGES: u32 = 2048;

fn served(name: &str, config: &Config) -> Served {
    Served::over(name, PAGES, config, |slots| {
        let size = ByteSize(u64::from(slots) * PAGE_SIZE as u64);
        let url = SimUrl { size, delay: 7, ..SimUrl::default() };
        Arc::new(Sim::open(url).unwrap())
    })
}

/// Writes the whole device; returns what it holds.
fn filled(served: &Served) -> Vec<u8> {
    let content = noise(1, PAGES as usize * PAGE_SIZE);
    served.client().write(0, &content).unwrap();
    content
}

#[test]
fn long_and_short_requests_in_flight_together_come_back_as_written_whoever_sends_them() {
    for (name, carriers) in [("carried", 2), ("uncarried", 0)] {
        let served = served(name, &Config { carriers, ..few() });
        let content = Arc::new(filled(&served));
        let threads: Vec<_> = (0..3u64)
            .map(|number| {
                let (mut client, content) = (served.client(), Arc::clone(&content));
                std::thread::spawn(move || mixed(&mut client, number, &content))
            })
            .collect();
        threads.into_iter().for_each(|thread| thread.join().unwrap());
        let stats = served.server().stats();
        assert_eq!(stats.carried > 0, carriers > 0, "{stats:?}");
        assert_eq!(stats.errors, 0);
        served.shutdown();
    }
}

/// Reads of every length, and writes of what is there already, sixteen in flight.
fn mixed(client: &mut Client, number: u64, content: &[u8]) {
    let dice = noise(number + 10, 12 * 16 * 8);
    for round in dice.chunks_exact(16 * 8) {
        let mut reads = HashMap::new();
        for word in round.chunks_exact(8) {
            let word = u64::from_le_bytes(word.try_into().unwrap());
            let longest = [4096, 70_000, 1 << 20, 2 << 20][word as usize % 4];
            let length = 1 + (word >> 32) as usize % longest;
            let offset = (word >> 3) as usize % (content.len() - length);
            if word >> 20 & 7 == 0 {
                // Short, for this client reads nothing before it has sent everything.
                let length = length.min(5000);
                client.queue(Operation::write(offset as u64, &content[offset..offset + length]));
            } else {
                let cookie = client.queue(Operation::read(offset as u64, length as u32));
                reads.insert(cookie, offset..offset + length);
            }
        }
        client.send().unwrap();
        while client.in_flight() > 0 {
            let reply = client.receive().unwrap();
            assert_eq!(reply.result, Ok(()));
            if let Some(range) = reads.remove(&reply.cookie) {
                assert!(reply.data == content[range.clone()], "connection {number}: {range:?}");
            }
        }
        assert!(reads.is_empty());
    }
}

/// A client, once a seat is free.
fn seat(served: &Served) -> Client {
    let begun = Instant::now();
    loop {
        match Client::unix(&served.socket, &Wish::default()) {
            Ok(client) => return client,
            Err(error) => assert!(begun.elapsed() < PATIENCE, "no seat comes free: {error}"),
        }
    }
}

/// Asks for more than a socket holds and reads none of it, until a carrier has begun with it.
fn deaf(served: &Served) -> Client {
    let begun = Instant::now();
    loop {
        let before = served.server().stats().carried;
        let mut deaf = seat(served);
        for at in 0..6 {
            deaf.queue(Operation::read(at << 20, 1 << 20));
        }
        deaf.send().unwrap();
        // The one before may have had the carrier for a moment longer; then nobody is hired, and another must ask.
        for _ in 0..500 {
            if served.server().stats().carried > before {
                return deaf;
            }
            std::thread::sleep(Duration::from_millis(1));
        }
        assert!(begun.elapsed() < PATIENCE, "no carrier was hired");
    }
}

#[test]
fn a_client_that_reads_nothing_loses_its_connection_and_its_carrier_serves_the_next() {
    let config = Config { carriers: 1, send_patience: Duration::from_millis(300), ..few() };
    let served = served("deaf-carried", &config);
    let content = filled(&served);
    let deaf = deaf(&served);
    // Nobody waits for that carrier: who finds none sends by itself.
    let mut other = served.client();
    assert!(other.read(4096, 1 << 20).unwrap() == content[4096..4096 + (1 << 20)]);
    other.write(0, &page(5)).unwrap();
    assert!(served.logs("does not read its replies"));
    let before = served.server().stats().carried;
    let begun = Instant::now();
    while served.server().stats().carried == before {
        assert!(begun.elapsed() < PATIENCE, "the carrier did not come back");
        assert!(other.read(4096, 2 << 20).unwrap() == content[4096..4096 + (2 << 20)]);
    }
    drop(deaf);
    served.shutdown();
}

#[test]
fn a_server_that_ends_cuts_what_a_carrier_cannot_send() {
    let served = served("cut-carried", &few());
    filled(&served);
    let deaf = deaf(&served);
    let mut server = served;
    let busy = server.server.take().unwrap().shutdown(Duration::from_millis(10));
    assert_eq!(busy, 0, "threads wait for a client that reads nothing");
    drop(deaf);
}

#[test]
fn a_client_that_leaves_while_a_carrier_sends_takes_neither_memory_nor_carrier_with_it() {
    let served = served("left-carried", &Config { carriers: 1, ..few() });
    let content = filled(&served);
    for _ in 0..40 {
        // More often than there is memory to borrow.
        drop(deaf(&served));
    }
    let mut client = seat(&served);
    assert!(client.read(0, 3 << 20).unwrap() == content[..3 << 20]);
    served.shutdown();
}

#[test]
fn long_writes_from_several_connections_lie_where_they_belong_whoever_receives_them() {
    for (name, carriers) in [("received", 2), ("unreceived", 0)] {
        let served = served(name, &Config { carriers, ..few() });
        // Each has a part of the device, a little past its middle unaligned, and writes it again and again.
        let part = (PAGES as usize * PAGE_SIZE) / 4;
        let threads: Vec<_> = (0..3u64)
            .map(|number| {
                let mut client = served.client();
                std::thread::spawn(move || rewrite(&mut client, number, number as usize * part, part))
            })
            .collect();
        let content = threads.into_iter().flat_map(|thread| thread.join().unwrap()).collect::<Vec<_>>();
        // Another connection sees the same.
        assert!(served.client().read(0, 3 * part as u32).unwrap() == content);
        let stats = served.server().stats();
        assert_eq!((stats.errors, stats.carried > 0), (0, carriers > 0), "{stats:?}");
        served.shutdown();
    }
}

/// Writes of many lengths, whole pages and ragged, and reads of what was written; returns what the part holds.
fn rewrite(client: &mut Client, number: u64, from: usize, part: usize) -> Vec<u8> {
    let mut content = vec![0; part];
    let dice = noise(number + 70, 40 * 8);
    for (round, word) in dice.chunks_exact(8).enumerate() {
        let word = u64::from_le_bytes(word.try_into().unwrap());
        let mut length = [part / 2, 512 << 10, (768 << 10) + 4096, 600_001, 9_000][round % 5];
        let mut offset = (word >> 8) as usize % (part - length);
        if word & 3 > 0 {
            offset -= offset % PAGE_SIZE;
            length = length.next_multiple_of(PAGE_SIZE).min(part - offset);
        }
        let data = noise(word, length);
        content[offset..offset + length].copy_from_slice(&data);
        // Two at once, with a short one between them.
        client.queue(Operation::write((from + offset) as u64, &data));
        client.queue(Operation::write(from as u64, &page(word)));
        content[..PAGE_SIZE].copy_from_slice(&page(word));
        if offset >= PAGE_SIZE {
            client.queue(Operation::write((from + offset) as u64, &data));
        }
        client.send().unwrap();
        while client.in_flight() > 0 {
            assert_eq!(client.receive().unwrap().result, Ok(()));
        }
        if offset < PAGE_SIZE {
            // Both were in flight together: either may have come last.
            client.write(from as u64, &content[..PAGE_SIZE]).unwrap();
        }
        assert!(
            client.read((from + offset) as u64, length as u32).unwrap() == content[offset..offset + length]
        );
    }
    content
}

#[test]
fn a_payload_in_parts_waits_for_no_store_that_has_answered() {
    let served = served("prompt-carried", &Config { carriers: 1, ..few() });
    let (content, mut client) = (filled(&served), seat(&served));
    let begun = Instant::now();
    // Two thousand parts: a nap for each of them, as a store that says nothing is looked at, would take minutes.
    let mut rounds = 0;
    while served.server().stats().carried < 2000 {
        for half in content.chunks_exact(content.len() / 2).enumerate() {
            client.queue(Operation::write((half.0 * half.1.len()) as u64, half.1));
        }
        client.send().unwrap();
        while client.in_flight() > 0 {
            assert_eq!(client.receive().unwrap().result, Ok(()));
        }
        rounds += 1;
        assert!(begun.elapsed() < 3 * PATIENCE, "{rounds} rounds, {:?}", served.server().stats());
    }
    assert!(client.read(0, content.len() as u32).unwrap() == content);
    served.shutdown();
}

#[test]
fn a_client_that_stops_within_a_payload_holds_up_nobody_and_its_end_is_noticed() {
    let served = served("stopped-carried", &Config { carriers: 1, ..few() });
    let content = filled(&served);
    for round in 0..6 {
        let begun = Instant::now();
        while served.server().stats().connected > 0 {
            assert!(begun.elapsed() < PATIENCE, "the connection before does not end");
            std::thread::sleep(Duration::from_millis(1));
        }
        // So its carrier is free, and its seat.
        let before = served.server().stats().carried;
        let mut stopped = raw(&served);
        let request = Request { flags: 0, command: command::WRITE, cookie: 1, offset: 0, length: 4 << 20 };
        stopped.write_all(&request.encode()).unwrap();
        stopped.write_all(&content[..(1 << 20) + 100 * round]).unwrap();
        while served.server().stats().carried == before {
            assert!(begun.elapsed() < PATIENCE, "no carrier received anything");
            std::thread::sleep(Duration::from_millis(1));
        }
        let mut other = seat(&served);
        assert!(other.read(2 << 20, 1 << 20).unwrap() == content[2 << 20..3 << 20]);
        drop(other);
        drop(stopped);
    }
    assert!(served.client().read(0, 4 << 20).unwrap() == content[..4 << 20]);
    served.shutdown();
}

#[test]
fn a_server_that_ends_does_not_wait_for_the_rest_of_a_payload() {
    let mut served = served("cut-received", &few());
    let mut stopped = raw(&served);
    let request = Request { flags: 0, command: command::WRITE, cookie: 1, offset: 0, length: 4 << 20 };
    stopped.write_all(&request.encode()).unwrap();
    stopped.write_all(&noise(1, 1 << 20)).unwrap();
    let begun = Instant::now();
    while served.server().stats().carried == 0 {
        assert!(begun.elapsed() < PATIENCE, "no carrier received anything");
        std::thread::sleep(Duration::from_millis(1));
    }
    let busy = served.server.take().unwrap().shutdown(Duration::from_millis(10));
    assert_eq!(busy, 0, "threads wait for a client that sends nothing");
    drop(stopped);
}

/// A connection in transmission, with simple replies, for a client that stops where ours would not.
fn raw(served: &Served) -> UnixStream {
    let mut stream = UnixStream::connect(&served.socket).unwrap();
    stream.set_read_timeout(Some(PATIENCE)).unwrap();
    stream.read_exact(&mut [0; 18]).unwrap();
    // Fixed newstyle without zeroes; NBD_OPT_EXPORT_NAME with the default name.
    stream.write_all(&3u32.to_be_bytes()).unwrap();
    stream.write_all(b"IHAVEOPT").unwrap();
    stream.write_all(&[1u32.to_be_bytes(), 0u32.to_be_bytes()].concat()).unwrap();
    stream.read_exact(&mut [0; 10]).unwrap();
    stream
}
