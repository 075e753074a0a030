//! Long reads and writes over a slow store, mixed with short ones, torn and abandoned.

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

/// Writes the whole device; returns its content.
fn filled(served: &Served) -> Vec<u8> {
    let content = noise(1, PAGES as usize * PAGE_SIZE);
    served.client().write(0, &content).unwrap();
    content
}

#[test]
fn long_and_short_requests_in_flight_together_come_back_as_written() {
    let served = served("long-mixed", &few());
    let content = Arc::new(filled(&served));
    let threads: Vec<_> = (0..3u64)
        .map(|number| {
            let (mut client, content) = (served.client(), Arc::clone(&content));
            std::thread::spawn(move || mixed(&mut client, number, &content))
        })
        .collect();
    threads.into_iter().for_each(|thread| thread.join().unwrap());
    assert_eq!(served.server().stats().errors, 0);
    served.shutdown();
}

/// Reads of every length, and writes of content that is there already, sixteen in flight.
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
                // The length is short, for this client reads nothing before it has sent everything.
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

/// Connects a client, once a seat is free.
fn seat(served: &Served) -> Client {
    let begun = Instant::now();
    loop {
        match Client::unix(&served.socket, &Wish::default()) {
            Ok(client) => return client,
            Err(error) => assert!(begun.elapsed() < PATIENCE, "no seat comes free: {error}"),
        }
    }
}

#[test]
fn long_writes_from_several_connections_lie_where_they_belong() {
    let served = served("long-writes", &few());
    // Each client has a part of the device, which ends a little past a page, and writes it again
    // and again.
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
    assert_eq!(served.server().stats().errors, 0);
    served.shutdown();
}

/// Writes of many lengths, aligned and not, and reads of what was written. Returns the content of
/// the part.
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
        // Two requests are sent at once, with a short one between them.
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
            // Both were in flight together, so either may have come last.
            client.write(from as u64, &content[..PAGE_SIZE]).unwrap();
        }
        assert!(
            client.read((from + offset) as u64, length as u32).unwrap() == content[offset..offset + length]
        );
    }
    content
}

#[test]
fn a_client_that_stops_within_a_payload_holds_up_nobody_and_its_end_is_noticed() {
    let served = served("long-stopped", &few());
    let content = filled(&served);
    for round in 0..6 {
        let begun = Instant::now();
        while served.server().stats().connected > 0 {
            assert!(begun.elapsed() < PATIENCE, "the connection before does not end");
            std::thread::sleep(Duration::from_millis(1));
        }
        let before = served.server().stats().writes;
        let mut stopped = raw(&served);
        let request = Request { flags: 0, command: command::WRITE, cookie: 1, offset: 0, length: 4 << 20 };
        stopped.write_all(&request.encode()).unwrap();
        stopped.write_all(&content[..(1 << 20) + 100 * round]).unwrap();
        while served.server().stats().writes == before {
            assert!(begun.elapsed() < PATIENCE, "the write does not begin");
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
    let mut served = served("long-cut", &few());
    let mut stopped = raw(&served);
    let request = Request { flags: 0, command: command::WRITE, cookie: 1, offset: 0, length: 4 << 20 };
    stopped.write_all(&request.encode()).unwrap();
    stopped.write_all(&noise(1, 1 << 20)).unwrap();
    let begun = Instant::now();
    while served.server().stats().writes == 0 {
        assert!(begun.elapsed() < PATIENCE, "the write does not begin");
        std::thread::sleep(Duration::from_millis(1));
    }
    let busy = served.server.take().unwrap().shutdown(Duration::from_millis(10));
    assert_eq!(busy, 0, "threads wait for a client that sends nothing");
    drop(stopped);
}

#[test]
fn a_long_simple_read_before_a_long_write_is_answered_while_the_payload_still_arrives() {
    let served = served("long-both", &few());
    let content = filled(&served);
    let mut client = raw(&served);
    let request = |command, cookie, offset| Request { flags: 0, command, cookie, offset, length: 1 << 20 };
    let data = noise(9, 1 << 20);
    // The read's answer is more than a socket holds, and so is the payload: each needs a thread.
    let mut sender = client.try_clone().unwrap();
    let requests =
        [request(command::READ, 1, 0).encode(), request(command::WRITE, 2, 2 << 20).encode()].concat();
    let payload = data.clone();
    let sending = std::thread::spawn(move || {
        // Some of the payload comes with the headers, the rest when the server is at work.
        sender.write_all(&[&requests[..], &payload[..64 << 10]].concat()).unwrap();
        std::thread::sleep(Duration::from_millis(20));
        sender.write_all(&payload[64 << 10..]).unwrap();
    });
    let mut left = vec![(1, content[..1 << 20].to_vec()), (2, Vec::new())];
    while !left.is_empty() {
        let mut head = [0; 16];
        client.read_exact(&mut head).expect("an answer in time");
        assert_eq!(head[..8], [&0x6744_6698u32.to_be_bytes()[..], &[0; 4]].concat()[..], "a success");
        let cookie = u64::from_be_bytes(head[8..].try_into().unwrap());
        let at = left.iter().position(|(asked, _)| *asked == cookie).expect("a request of this client, once");
        let (_, expected) = left.swap_remove(at);
        let mut back = vec![0; expected.len()];
        client.read_exact(&mut back).unwrap();
        assert!(back == expected);
    }
    sending.join().unwrap();
    assert!(served.client().read(2 << 20, 1 << 20).unwrap() == data);
    drop(client);
    served.shutdown();
}

/// A connection in transmission, with simple replies, for a client that stops where Weir's would
/// not.
fn raw(served: &Served) -> UnixStream {
    let mut stream = UnixStream::connect(&served.socket).unwrap();
    stream.set_read_timeout(Some(PATIENCE)).unwrap();
    stream.read_exact(&mut [0; 18]).unwrap();
    // The client chooses fixed newstyle without zeroes, and NBD_OPT_EXPORT_NAME with the default
    // name.
    stream.write_all(&3u32.to_be_bytes()).unwrap();
    stream.write_all(b"IHAVEOPT").unwrap();
    stream.write_all(&[1u32.to_be_bytes(), 0u32.to_be_bytes()].concat()).unwrap();
    stream.read_exact(&mut [0; 10]).unwrap();
    stream
}
