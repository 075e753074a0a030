//! Malicious clients: each gets a clear line in the log, takes no memory, and costs the other
//! clients nothing.

mod common;

use common::{PATIENCE, Served, few, page};
use std::io::{Read, Write};
use std::net::Shutdown;
use std::os::unix::net::UnixStream;
use std::sync::{Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};
use weir_export::nbd::client::{Client, Operation};
use weir_export::nbd::transmission::Request;
use weir_export::nbd::wire::{OPTION_MAGIC, command};
use weir_export::nbd::{Config, PENDING_MAX};

/// These tests measure the memory and speed of this process, so one runs at a time.
fn alone() -> MutexGuard<'static, ()> {
    static PROCESS: Mutex<()> = Mutex::new(());
    PROCESS.lock().unwrap_or_else(PoisonError::into_inner)
}

fn option(number: u32, length: u32, data: &[u8]) -> Vec<u8> {
    [&OPTION_MAGIC.to_be_bytes()[..], &number.to_be_bytes(), &length.to_be_bytes(), data].concat()
}

/// A connection that has sent `bytes` right after the greeting.
fn after_greeting(served: &Served, bytes: &[u8]) -> UnixStream {
    let mut stream = UnixStream::connect(&served.socket).unwrap();
    stream.set_read_timeout(Some(PATIENCE)).unwrap();
    stream.read_exact(&mut [0; 18]).unwrap();
    stream.write_all(bytes).unwrap();
    stream
}

/// A connection in transmission without Weir's client, so that it can send what the client would
/// not.
fn raw(served: &Served) -> UnixStream {
    let go = option(7, 6, &[0; 6]);
    let mut stream = after_greeting(served, &[&3u32.to_be_bytes()[..], &go].concat());
    // The server sends two pieces of information and the acknowledgement.
    stream.read_exact(&mut [0; 20 + 12 + 20 + 14 + 20]).unwrap();
    stream
}

/// Whether the server closes the connection.
fn is_closed(stream: &mut UnixStream) -> bool {
    let mut rest = Vec::new();
    match stream.read_to_end(&mut rest) {
        Ok(_) => true,
        Err(error) => error.kind() == std::io::ErrorKind::ConnectionReset,
    }
}

fn request(command: u16, offset: u64, length: u32) -> Vec<u8> {
    Request { flags: 0, command, cookie: 1, offset, length }.encode().to_vec()
}

/// Checks that another client is served all the while, and that its pages are right.
fn is_served(client: &mut Client, round: u64) {
    client.write(round % 64 * 4096, &page(round)).unwrap();
    assert!(client.read(round % 64 * 4096, 4096).unwrap() == page(round));
}

#[test]
fn what_breaks_the_protocol_ends_that_connection_with_a_line_that_says_why() {
    let _alone = alone();
    let served = Served::host("violations", 256, &few());
    let mut other = served.client();
    let flags = 3u32.to_be_bytes();
    for (round, (bytes, line)) in [
        (vec![0xff; 64], "client flags 0xffffffff were not offered"),
        ([&flags[..], &[0x55; 16]].concat(), "not with IHAVEOPT"),
        ([&flags[..], &option(99, u32::MAX, b"")].concat(), "announces 4294967295 bytes"),
        ([&flags[..], &option(99, 0, b"").repeat(300)].concat(), "more than 256 options"),
        ([&flags[..], &option(1, 5, b"other")].concat(), "an export that does not exist"),
    ]
    .into_iter()
    .enumerate()
    {
        let mut stream = after_greeting(&served, &bytes);
        assert!(is_closed(&mut stream), "{line}");
        assert!(served.logs(line), "{line}");
        is_served(&mut other, round as u64);
    }
    for (round, (bytes, line)) in [
        (vec![0x55; 28], "a request begins with 0x55555555"),
        (request(command::WRITE, 0, u32::MAX), "a write announces 4294967295 bytes"),
    ]
    .into_iter()
    .enumerate()
    {
        let mut stream = raw(&served);
        stream.write_all(&bytes).unwrap();
        assert!(is_closed(&mut stream), "{line}");
        assert!(served.logs(line), "{line}");
        is_served(&mut other, round as u64);
    }
    // The client sends half a header, or half a payload, and then nothing more.
    for bytes in [&request(command::READ, 0, 4096)[..14], &request(command::WRITE, 0, 4096)] {
        let mut stream = raw(&served);
        stream.write_all(bytes).unwrap();
        stream.shutdown(Shutdown::Write).unwrap();
        assert!(is_closed(&mut stream));
        assert!(served.logs("left in the middle of a request"));
        is_served(&mut other, 9);
    }
    served.shutdown();
}

#[test]
fn ranges_that_overflow_and_options_that_nobody_knows_are_answered() {
    let _alone = alone();
    let served = Served::host("overflow", 256, &few());
    let unknown: Vec<u8> = (100..150).flat_map(|number| option(number, 7, b"unknown")).collect();
    let go = option(7, 6, &[0; 6]);
    let mut stream = after_greeting(&served, &[&3u32.to_be_bytes()[..], &unknown, &go].concat());
    let mut replies = vec![0; 50 * (20 + "unknown option".len()) + 20 + 12 + 20 + 14 + 20];
    stream.read_exact(&mut replies).unwrap();
    for (command, offset, length) in [
        (command::READ, u64::MAX, u32::MAX),
        (command::READ, u64::MAX - 4095, 4096),
        (command::TRIM, 1 << 63, u32::MAX),
        (command::WRITE_ZEROES, u64::MAX, 1),
        (77, 0, 0),
    ] {
        stream.write_all(&request(command, offset, length)).unwrap();
        let mut reply = [0; 16];
        stream.read_exact(&mut reply).unwrap();
        assert_ne!(reply[4..8], [0; 4], "command {command} at {offset} is refused");
    }
    // The write's range wraps around: its payload is read and dropped.
    stream.write_all(&request(command::WRITE, u64::MAX - 10, 5000)).unwrap();
    stream.write_all(&[1; 5000]).unwrap();
    stream.read_exact(&mut [0; 16]).unwrap();
    assert_eq!(served.volume.status().stored, 0);
    served.shutdown();
}

#[test]
fn a_client_that_never_reads_is_dropped_and_the_others_do_not_notice() {
    let _alone = alone();
    let send_patience = Duration::from_millis(400);
    let config = Config { send_patience, ..few() };
    let served = Served::host("deaf", 1024, &config);
    let mut other = served.client();
    let mut fill = served.client();
    for at in 0..1024 {
        fill.write(at * 4096, &page(at)).unwrap();
    }
    let before = resident_kib();
    let mut deaf = raw(&served);
    deaf.set_write_timeout(Some(PATIENCE)).unwrap();
    let asks: Vec<u8> = (0..100).flat_map(|_| request(command::READ, 0, 4 << 20)).collect();
    let start = Instant::now();
    deaf.write_all(&asks).unwrap();
    let mut round = 0;
    while !served.logs_now("does not read its replies") {
        is_served(&mut other, round);
        round += 1;
        assert!(start.elapsed() < PATIENCE, "it is not dropped");
    }
    assert!(start.elapsed() >= send_patience, "it was given its time");
    assert!(resident_kib() < before + 4096, "{before} KiB before, {} KiB after", resident_kib());
    served.shutdown();
}

#[test]
fn ten_thousand_idle_connections_take_no_memory_and_cost_the_others_nothing() {
    let _alone = alone();
    let wanted = 10_000;
    let limit = rustix::process::getrlimit(rustix::process::Resource::Nofile);
    let raised = rustix::process::Rlimit { current: limit.maximum, maximum: limit.maximum };
    rustix::process::setrlimit(rustix::process::Resource::Nofile, raised).unwrap();
    let count = limit.maximum.map_or(wanted, |most| (most as usize).saturating_sub(500).min(wanted));
    if count < wanted {
        eprintln!("skipped: the limit of open files allows {count} of {wanted} connections");
        return;
    }
    // A thread that spins uses the processor while no request comes, so turn that off.
    let served = Served::host("idle", 256, &Config { spin: Duration::ZERO, ..few() });
    let mut other = served.client();
    for at in 0..64 {
        other.write(at * 4096, &page(at)).unwrap();
    }
    let (mut quiet, mut flooded) = (Vec::new(), Vec::new());
    for _ in 0..5 {
        let memory = resident_kib();
        quiet.push(work_for(&mut other, 4000));
        let mut idle = Vec::with_capacity(wanted);
        while idle.len() < wanted {
            idle.push(UnixStream::connect(&served.socket).unwrap());
            if idle.len() % 1000 == 0 {
                is_served(&mut other, idle.len() as u64);
            }
        }
        flooded.push(work_for(&mut other, 4000));
        let grown = resident_kib().saturating_sub(memory);
        assert!(grown < 8192, "{wanted} idle connections took {grown} KiB");
        assert!(served.logs(&format!("{PENDING_MAX} others negotiate")));
        // An honest client is accepted, with or without a flood.
        let start = Instant::now();
        is_served(&mut served.client(), 1);
        assert!(start.elapsed() < PATIENCE);
    }
    println!("work for another client, without {quiet:?} and with {flooded:?}");
    // A turn takes up to 16 times as long where the two threads do not share a processor. Work for
    // each idle connection would show in the shortest turns too.
    let least = |of: fn(&Work) -> u64, turns: &[Work]| turns.iter().map(of).min().expect("five turns");
    let serving = |turns: &[Work]| least(|work| work.serving, turns);
    assert!(serving(&flooded) < 3 * serving(&quiet), "without {quiet:?}, with them {flooded:?}");
    assert!(least(|work| work.accepting, &flooded) < serving(&flooded), "they keep the server at work");
    served.shutdown();
}

/// Nanoseconds of processor time that the server's threads used. Elapsed time would also depend on
/// the machine's other work.
#[derive(Clone, Copy, Debug)]
struct Work {
    serving: u64,
    accepting: u64,
}

/// Measures the cost of `count` single-page reads to the server.
fn work_for(client: &mut Client, count: u64) -> Work {
    let before = work();
    for at in 0..count {
        client.perform(Operation::read(at % 64 * 4096, 4096)).unwrap();
    }
    let after = work();
    Work { serving: after.serving - before.serving, accepting: after.accepting - before.accepting }
}

/// Sums the processor time of the threads so far.
fn work() -> Work {
    let mut work = Work { serving: 0, accepting: 0 };
    for thread in std::fs::read_dir("/proc/self/task").unwrap() {
        let read =
            |file| std::fs::read_to_string(thread.as_ref().unwrap().path().join(file)).unwrap_or_default();
        let used =
            read("schedstat").split_whitespace().next().and_then(|used| used.parse().ok()).unwrap_or(0);
        match read("comm").trim() {
            "weir-nbd" => work.accepting += used,
            name if name.starts_with("weir-nbd-") => work.serving += used,
            _ => {}
        }
    }
    work
}

fn resident_kib() -> u64 {
    let status = std::fs::read_to_string("/proc/self/status").unwrap();
    let line = status.lines().find(|line| line.starts_with("VmRSS:")).unwrap();
    line.split_whitespace().nth(1).unwrap().parse().unwrap()
}
