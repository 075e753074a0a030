//! The server through Weir's own client: every command, aligned and not, short and long.

mod common;

use common::{PATIENCE, Served, few, noise, page};
use std::time::{Duration, Instant};
use weir_core::PAGE_SIZE;
use weir_export::nbd::Config;
use weir_export::nbd::client::{Client, ClientError, Extent, Operation};
use weir_export::nbd::wire::{Errno, extent_flag};

const MIB: usize = 1 << 20;

#[test]
fn what_one_connection_wrote_and_was_told_of_every_other_reads_at_once() {
    let served = Served::host("multi", 4096, &few());
    let mut clients = [served.client(), served.simple_client(), served.client()];
    assert!(clients[0].terms().multi_conn());
    assert_eq!(clients[0].terms().bytes, 16 << 20);
    assert_eq!(clients[0].terms().block_sizes, Some([1, 4096, 32 << 20]));
    for round in 0..300u64 {
        let (writer, reader) = ((round % 3) as usize, ((round / 3) % 3) as usize);
        let (offset, data) = ((round % 64) * 4096, page(round));
        // A flush on another connection covers this write too: CAN_MULTI_CONN promises that.
        clients[writer].write(offset, &data).unwrap();
        clients[reader].perform(Operation::Flush).unwrap();
        assert!(clients[reader].read(offset, 4096).unwrap() == data, "round {round}");
    }
    served.shutdown();
}

#[test]
fn ranges_of_any_alignment_and_length_up_to_32_mib_come_back_as_written() {
    let served = Served::host("ranges", 16_384, &few());
    for mut client in [served.client(), served.simple_client()] {
        let mut shadow = client.read(0, 64 * MIB as u32 / 2).unwrap();
        shadow.resize(64 * MIB, 0);
        for (at, (offset, length)) in [
            (0, 1),
            (4095, 2),
            (1, 4094),
            (5000, 100),
            (0, 4096),
            (4096 * 3 - 7, 4096 * 2 + 9),
            (100_000, 300_000),
            (4096, MIB),
            (12_345, 3 * MIB + 17),
            (MIB, 32 * MIB),
            (32 * MIB - 1, 32 * MIB),
        ]
        .into_iter()
        .enumerate()
        {
            let data = noise(at as u64 + 1, length);
            client.write(offset as u64, &data).unwrap();
            shadow[offset..offset + length].copy_from_slice(&data);
            assert!(client.read(offset as u64, length as u32).unwrap() == data, "{offset} {length}");
            let (from, to) = (offset.saturating_sub(5000), (offset + length + 5000).min(64 * MIB));
            let around = client.read(from as u64, (to - from).min(32 * MIB) as u32).unwrap();
            assert!(around == shadow[from..from + around.len()], "around {offset} {length}");
        }
        client.perform(Operation::Trim { offset: 0, length: 64 * MIB as u32 }).unwrap();
    }
    served.shutdown();
}

/// There are more of them than there is memory for long pieces: later ones are served in smaller
/// pieces.
#[test]
fn clients_that_leave_their_long_replies_unread_keep_nobody_else_from_theirs() {
    const STALLED: usize = 7;
    for kind in ["host:", "sim:delay=3,size="] {
        let config = Config { connections: STALLED + 3, ..few() };
        let open = |slots| weir_store::open(&format!("{kind}{}KiB", slots * 4).parse().unwrap()).unwrap();
        let served = Served::over("unread", 1024, &config, open);
        let data = noise(7, 4 * MIB);
        served.client().write(0, &data).unwrap();
        let mut stalled: Vec<Client> = (0..STALLED)
            .map(|at| if at % 2 == 0 { served.client() } else { served.simple_client() })
            .collect();
        for client in &mut stalled {
            (0..4).for_each(|at| _ = client.queue(Operation::read(at * MIB as u64, MIB as u32)));
            client.send().unwrap();
        }
        for mut client in [served.client(), served.simple_client()] {
            for (offset, length) in
                [(0, 4 * MIB), (4095, 300_000), (MIB + 1, 2 * MIB), (5, 100_000), (0, 4096)]
            {
                let back = client.read(offset as u64, length as u32).unwrap();
                assert!(back == data[offset..offset + length], "{offset} {length}");
            }
        }
        for client in &mut stalled {
            let mut came = 0;
            while client.in_flight() > 0 {
                let reply = client.receive().unwrap();
                assert!((0..4).any(|at| reply.data == data[at * MIB..(at + 1) * MIB]));
                came += 1;
            }
            assert_eq!(came, 4);
        }
        served.shutdown();
    }
}

#[test]
fn zeroes_and_trims_of_any_alignment_touch_their_range_only() {
    let served = Served::host("zeroes", 256, &few());
    let mut client = served.client();
    let data = noise(1, MIB);
    for (offset, length) in
        [(0, 4096), (100, 50), (4000, 200), (4096, 8192), (5000, 20_000), (0, MIB), (7, MIB - 7)]
    {
        for no_hole in [false, true] {
            client.write(0, &data).unwrap();
            let zeroes =
                Operation::WriteZeroes { offset: offset as u64, length: length as u32, fast: false, no_hole };
            client.perform(zeroes).unwrap();
            let mut expected = data.clone();
            expected[offset..offset + length].fill(0);
            assert!(client.read(0, MIB as u32).unwrap() == expected, "zero {offset} {length}");

            client.write(0, &data).unwrap();
            client.perform(Operation::Trim { offset: offset as u64, length: length as u32 }).unwrap();
            let back = client.read(0, MIB as u32).unwrap();
            assert!(back[..offset] == data[..offset] && back[offset + length..] == data[offset + length..]);
        }
    }
    let fast = |offset, length| Operation::WriteZeroes { offset, length, fast: true, no_hole: false };
    client.perform(fast(0, MIB as u32)).unwrap();
    let slow = client.perform(fast(10, 20));
    assert!(matches!(slow, Err(ClientError::Failed(Errno::NotSupported))), "{slow:?}");
    served.shutdown();
}

#[test]
fn long_zeroes_and_trims_clear_each_page_of_their_range_and_no_other() {
    // The range is several steps and a half of a discard's.
    let pages = 3 * 4096 + 2048;
    let served = Served::host("long-zeroes", pages, &few());
    let mut client = served.client();
    let (first, length) = (u64::from(3 * PAGE_SIZE as u32), (pages - 4) * PAGE_SIZE as u32);
    let page = |number: u32| u64::from(number) * PAGE_SIZE as u64;
    let outside = [2, pages - 1];
    let inside = [3, 4095, 4096, 4098, 4099, 8194, 8195, 12290, 12291, pages - 2];
    let zeroes = |no_hole| Operation::WriteZeroes { offset: first, length, fast: false, no_hole };
    for clear in [zeroes(false), zeroes(true), Operation::Trim { offset: first, length }] {
        let data = noise(1, PAGE_SIZE);
        for number in outside.into_iter().chain(inside) {
            client.write(page(number), &data).unwrap();
        }
        client.perform(clear).unwrap();
        for number in inside {
            assert!(client.read(page(number), PAGE_SIZE as u32).unwrap() == [0; PAGE_SIZE], "page {number}");
        }
        for number in outside {
            assert!(client.read(page(number), PAGE_SIZE as u32).unwrap() == data, "page {number}");
        }
        assert_eq!(served.volume.status().stored, 2);
    }
    served.shutdown();
}

#[test]
fn trimmed_pages_give_their_slots_back_and_are_holes() {
    let served = Served::host("holes", 256, &few());
    let mut client = served.client();
    client.write(0, &noise(1, 64 << 10)).unwrap();
    client.write(128 << 10, &vec![0; 64 << 10]).unwrap();
    assert_eq!(served.volume.status().stored, 16);
    let status = |offset, length, one| Operation::BlockStatus { offset, length, one };
    let hole = extent_flag::HOLE | extent_flag::ZERO;
    let extents = client.perform(status(0, MIB as u32, false)).unwrap().extents;
    let lengths: Vec<(u32, u32)> = extents.iter().map(|extent| (extent.length >> 10, extent.flags)).collect();
    assert_eq!(lengths, [(64, 0), (64, hole), (64, extent_flag::ZERO), (832, hole)]);
    let one = client.perform(status(1000, 100_000, true)).unwrap().extents;
    assert_eq!(one, [Extent { length: (64 << 10) - 1000, flags: 0 }]);

    client.perform(Operation::Trim { offset: 0, length: MIB as u32 }).unwrap();
    assert_eq!(served.volume.status().stored, 0);
    let extents = client.perform(status(0, MIB as u32, false)).unwrap().extents;
    assert_eq!(extents, [Extent { length: MIB as u32, flags: hole }]);
    served.shutdown();
}

#[test]
fn a_hole_is_one_short_chunk_unless_the_client_wants_no_fragments() {
    let served = Served::host("chunks", 1024, &few());
    let mut client = served.client();
    client.write(0, &noise(1, 2 * MIB)).unwrap();
    let long = client.perform(Operation::read(0, 4 * MIB as u32)).unwrap();
    assert!(
        long.chunks > 1
            && long.data[..2 * MIB] == noise(1, 2 * MIB)
            && long.data[2 * MIB..] == vec![0; 2 * MIB]
    );
    for length in [4096, 65_536, 256 << 10] {
        for offset in [0, 2 * MIB as u64] {
            let whole = client.perform(Operation::Read { offset, length, unfragmented: true }).unwrap();
            assert_eq!(whole.chunks, 1);
        }
    }
    let too_long = client.perform(Operation::Read { offset: 0, length: 256 * 1024 + 1, unfragmented: true });
    assert!(matches!(too_long, Err(ClientError::Failed(Errno::Overflow))), "{too_long:?}");
    served.shutdown();
}

#[test]
fn deep_mixed_batches_from_several_connections_keep_every_page() {
    let served = Served::host("deep", 1024, &Config { spin: Duration::from_micros(20), ..few() });
    let threads: Vec<_> = (0..4u64)
        .map(|number| {
            let mut client = if number % 2 == 0 { served.client() } else { served.simple_client() };
            std::thread::spawn(move || mixed(&mut client, number))
        })
        .collect();
    for thread in threads {
        thread.join().unwrap();
    }
    let stats = served.server().stats();
    assert_eq!((stats.errors, stats.connections), (0, 4));
    assert!(stats.batches < stats.requests, "requests come in batches: {stats:?}");
    assert_eq!(stats.requests, stats.reads + stats.writes + stats.trims);
    served.shutdown();
}

/// Random reads, writes and trims with 16 in flight, on the quarter of the export that belongs to
/// client `number`.
fn mixed(client: &mut Client, number: u64) {
    const PAGES: u64 = 256;
    let mut shadow: Vec<Option<u64>> = vec![None; PAGES as usize];
    let expected = |seed: Option<u64>| seed.map_or(vec![0; 4096], page);
    let dice = noise(number, 8 * 4000);
    let mut dice = dice.chunks_exact(8).map(|word| u64::from_le_bytes(word.try_into().unwrap()));
    for round in 0..200 {
        let mut reads = std::collections::HashMap::new();
        let mut touched = std::collections::HashSet::new();
        for _ in 0..16 {
            let word = dice.next().unwrap();
            let at = word % PAGES;
            if !touched.insert(at) {
                continue; // requests in flight may change places: one of them a page
            }
            let offset = (number * PAGES + at) * 4096;
            match word >> 32 & 3 {
                0 | 1 => {
                    let cookie = client.queue(Operation::read(offset, 4096));
                    reads.insert(cookie, at);
                }
                2 => {
                    client.queue(Operation::write(offset, &page(word)));
                    shadow[at as usize] = Some(word);
                }
                _ => {
                    client.queue(Operation::Trim { offset, length: 4096 });
                    shadow[at as usize] = None;
                }
            }
        }
        client.send().unwrap();
        while client.in_flight() > 0 {
            let reply = client.receive().unwrap();
            assert_eq!(reply.result, Ok(()));
            if let Some(at) = reads.get(&reply.cookie) {
                assert!(reply.data == expected(shadow[*at as usize]), "round {round}, page {at}");
            }
        }
    }
}

#[test]
fn requests_that_make_no_sense_fail_alone() {
    let served = Served::host("senseless", 256, &few());
    let mut client = served.client();
    let end = MIB as u64;
    for (operation, error) in [
        (Operation::read(end, 1), Errno::Invalid),
        (Operation::read(u64::MAX, 4096), Errno::Invalid),
        (Operation::write(end - 10, &[1; 11]), Errno::NoSpace),
        (Operation::write(u64::MAX - 5, &[1; 5000]), Errno::NoSpace),
        (Operation::Trim { offset: end, length: 1 }, Errno::Invalid),
        (Operation::Cache { offset: 1, length: u32::MAX }, Errno::Invalid),
    ] {
        let result = client.perform(operation);
        assert!(
            matches!(result, Err(ClientError::Failed(seen)) if seen == error),
            "{operation:?}: {result:?}"
        );
    }
    client.perform(Operation::Cache { offset: 0, length: 4096 }).unwrap();
    assert_eq!(client.read(0, 0).unwrap(), []);
    client.write(0, &[]).unwrap();
    assert_eq!(client.read(0, MIB as u32).unwrap(), vec![0; MIB], "nothing was written");
    assert_eq!(served.server().stats().errors, 6);
    served.shutdown();
}

#[test]
fn a_read_only_export_is_read_and_not_written() {
    let served = Served::host("readonly", 256, &Config { read_only: true, ..few() });
    let mut client = served.client();
    assert_eq!(client.read(0, 4096).unwrap(), vec![0; 4096]);
    let refused = client.write(0, &[1; 4096]);
    assert!(matches!(refused, Err(ClientError::Failed(Errno::NotPermitted))), "{refused:?}");
    served.shutdown();
}

#[test]
fn shutting_down_answers_what_was_received_and_ends_in_bounded_time() {
    let served = Served::host("shutdown", 256, &few());
    let mut idle = served.client();
    let mut busy = served.client();
    busy.write(0, &page(1)).unwrap();
    let start = Instant::now();
    let socket = served.socket.clone();
    served.shutdown();
    assert!(start.elapsed() < PATIENCE, "{:?}", start.elapsed());
    assert!(!socket.exists());
    assert!(idle.read(0, 4096).is_err() && busy.read(0, 4096).is_err());
}

#[test]
fn a_connection_too_many_is_refused_and_finds_a_seat_once_one_is_free() {
    let served = Served::host("full", 256, &Config { connections: 1, ..few() });
    let first = served.client();
    let refused = Client::unix(&served.socket, &Default::default()).unwrap_err().to_string();
    assert!(refused.contains("every connection is in use"), "{refused}");
    first.disconnect().unwrap();
    let deadline = Instant::now() + PATIENCE;
    while Client::unix(&served.socket, &Default::default()).is_err() {
        assert!(Instant::now() < deadline, "the seat does not come free");
    }
    served.shutdown();
}
