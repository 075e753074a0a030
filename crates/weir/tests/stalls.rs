//! A disk that stalls, a daemon that is stopped or killed, and clients that act as the kernel's
//! does. After a timeout they shut the connection, send its requests again on another one, and go
//! on writing. No page ever goes back to an older version.
//!
//! `tests/torture stalls` is the full scale, an hour; `WEIR_SECONDS` and `WEIR_SEED` choose by
//! hand.

mod common;

use common::{Daemon, Ends, PATIENCE, WEIR, number};
use rustix::process::{Pid, Signal, kill_process};
use std::ops::RangeInclusive;
use std::os::unix::net::UnixStream;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::sync::Mutex;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::thread;
use std::time::{Duration, Instant};
use weir_export::nbd::client::{Client, ClientError, Operation, Reply, Wish};
use weir_export::nbd::wire::Errno;

const PAGE: usize = 4096;
/// Pages of each client; half of them lie on the disk. When the disk stalls, memory has room now
/// and then. So a request that was given up on one connection is done on the other while the disk
/// still has it.
const PAGES: u64 = 1200;
/// The time that each client waits for an answer. The kernel waits for 5 s, as `weir attach` sets
/// it; two of these are shorter than a store's limit for its disk.
const TIMEOUTS: [Duration; 6] = {
    let (short, medium, long) = (Duration::from_secs(1), Duration::from_millis(1500), Duration::from_secs(5));
    [short, medium, long, short, medium, long]
};
/// Time after a stall until its delays are over: two timeouts of a store, and more for a busy
/// machine.
const AFTERMATH: Duration = Duration::from_secs(10);

/// A random number generator: SplitMix64.
struct Random(u64);

impl Random {
    fn next(&mut self) -> u64 {
        self.0 = self.0.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let z = (self.0 ^ (self.0 >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        let z = (z ^ (z >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        z ^ (z >> 31)
    }

    fn within(&mut self, milliseconds: RangeInclusive<u64>) -> Duration {
        let (from, to) = milliseconds.into_inner();
        Duration::from_millis(from + self.next() % (to - from + 1))
    }
}

/// Whether a page's generation is zeros: every fourth is a discard.
fn is_discard(generation: u64) -> bool {
    generation.is_multiple_of(4)
}

fn content(page: u64, generation: u64) -> Vec<u8> {
    if is_discard(generation) {
        return vec![0; PAGE];
    }
    let mut bytes = Vec::with_capacity(PAGE);
    for at in 0..PAGE as u64 / 16 {
        bytes.extend((page << 32 | at).to_le_bytes());
        bytes.extend(generation.wrapping_mul(0x9e37_79b9_7f4a_7c15).to_le_bytes());
    }
    bytes
}

/// A page's history as its only client knows it.
#[derive(Clone, Copy, Default)]
struct Known {
    /// The newest generation that was acknowledged, or read.
    newest: u64,
    /// The last generation that was sent. It is later than `newest` if it was not acknowledged.
    sent: u64,
}

impl Known {
    /// The generation of these bytes, if it is one that the page may have.
    fn generation(&self, page: u64, bytes: &[u8]) -> Option<u64> {
        (self.newest..=self.sent).find(|generation| bytes == content(page, *generation))
    }
}

/// The events of a run, with their times.
#[derive(Default)]
struct Events {
    is_over: AtomicBool,
    /// The stalls, of which the last may have no end yet.
    stalls: Mutex<Vec<(Instant, Option<Instant>)>>,
    requests: AtomicU64,
    timeouts: AtomicU64,
    errors: AtomicU64,
}

impl Events {
    /// Whether the disk stalled at some time between these two, or shortly before.
    fn is_excused(&self, sent: Instant, answered: Instant) -> bool {
        let stalls = self.stalls.lock().unwrap();
        stalls
            .iter()
            .any(|(begun, ended)| *begun <= answered && ended.is_none_or(|ended| sent <= ended + AFTERMATH))
    }
}

/// A client with two connections: requests that one of them does not answer in time go to the
/// other.
struct Kernel<'a> {
    socket: PathBuf,
    timeout: Duration,
    connections: [Option<Client>; 2],
    at: usize,
    events: &'a Events,
}

#[derive(Clone, Copy)]
struct Request {
    page: u64,
    /// The generation that is written; `None` for a read.
    write: Option<u64>,
}

impl Kernel<'_> {
    fn connect(&self) -> Result<Client, ClientError> {
        let stream = UnixStream::connect(&self.socket)?;
        stream.set_read_timeout(Some(self.timeout))?;
        stream.set_write_timeout(Some(self.timeout))?;
        Client::over(Box::new(stream), &Wish { structured: false, allocation: false, ..Wish::default() })
    }

    /// Sends the remaining requests, and removes those that were answered. False: there was no
    /// answer in time, and the connection is given up.
    fn perform(&mut self, left: &mut Vec<Request>, mut answer: impl FnMut(Request, &Reply, Instant)) -> bool {
        self.at = 1 - self.at;
        let begun = Instant::now();
        while self.connections[self.at].is_none() {
            match self.connect() {
                Ok(client) => self.connections[self.at] = Some(client),
                Err(error) => assert!(begun.elapsed() < PATIENCE, "nobody lets a client in: {error}"),
            }
            thread::sleep(Duration::from_millis(20));
        }
        let client = self.connections[self.at].as_mut().expect("just made");
        let sent = Instant::now();
        let ended = Self::attempt(client, left, |request, reply| answer(request, reply, sent));
        if ended.is_err() {
            // The connection is dropped before anything is sent again: the kernel also shuts the
            // socket first.
            self.connections[self.at] = None;
            self.events.timeouts.fetch_add(1, Ordering::Relaxed);
        }
        ended.is_ok()
    }

    fn attempt(
        client: &mut Client,
        left: &mut Vec<Request>,
        mut answer: impl FnMut(Request, &Reply),
    ) -> Result<(), ClientError> {
        let mut sent = Vec::new();
        for request in left.iter() {
            let offset = request.page * PAGE as u64;
            let cookie = match request.write {
                None => client.queue(Operation::read(offset, PAGE as u32)),
                Some(generation) if is_discard(generation) => {
                    client.queue(Operation::Trim { offset, length: PAGE as u32 })
                }
                Some(generation) => {
                    client.queue(Operation::write(offset, &content(request.page, generation)))
                }
            };
            sent.push((cookie, *request));
        }
        client.send()?;
        while !left.is_empty() {
            let reply = client.receive()?;
            let (_, request) = sent.iter().find(|(cookie, _)| *cookie == reply.cookie).expect("it was asked");
            left.retain(|other| other.page != request.page);
            answer(*request, &reply);
        }
        Ok(())
    }
}

/// Writes and reads the client's pages until the run is over, and then reads all of them.
fn work(number: u64, seed: u64, socket: PathBuf, events: &Events) {
    let mut random = Random(seed ^ number << 48);
    let first = number * PAGES;
    let mut known = vec![Known::default(); PAGES as usize];
    let timeout = TIMEOUTS[number as usize % TIMEOUTS.len()];
    let mut kernel = Kernel { socket, timeout, connections: [None, None], at: 0, events };
    let check = |known: &mut Known, request: Request, reply: &Reply, sent: Instant| {
        events.requests.fetch_add(1, Ordering::Relaxed);
        match (reply.result, request.write) {
            (Ok(()), Some(generation)) => known.newest = generation,
            (Ok(()), None) => match known.generation(request.page, &reply.data) {
                Some(generation) => known.newest = generation,
                None => panic!(
                    "page {} begins with {:02x?}: none of generations {} to {}",
                    request.page,
                    &reply.data[..16],
                    known.newest,
                    known.sent
                ),
            },
            (Err(Errno::Io), _) => {
                events.errors.fetch_add(1, Ordering::Relaxed);
                let excused = events.is_excused(sent, Instant::now());
                assert!(excused, "page {}: an error without a stall, {:?}", request.page, request.write);
            }
            (Err(error), _) => panic!("page {}: {error:?}", request.page),
        }
    };
    // All pages are written first, so that the disk has its share.
    let mut next = 0;
    // Pages of requests that were given up: new writes to them soon are newer than what the disk
    // may still have.
    let mut given_up = Vec::new();
    while !events.is_over.load(Ordering::Relaxed) {
        let mut batch: Vec<Request> = Vec::new();
        // A request has one page, or up to 16, equally often.
        for _ in 0..random.next() % (1 << (random.next() % 5)) + 1 {
            let fills = next < PAGES;
            let page = match given_up.pop() {
                Some(page) => page,
                None if fills => next,
                None => random.next() % PAGES,
            };
            if batch.iter().any(|request| request.page == first + page) {
                continue;
            }
            next += u64::from(page == next);
            let known = &mut known[page as usize];
            let writes = fills || random.next().is_multiple_of(2);
            known.sent += u64::from(writes);
            batch.push(Request { page: first + page, write: writes.then_some(known.sent) });
        }
        while !kernel.perform(&mut batch, |request, reply, sent| {
            check(&mut known[(request.page - first) as usize], request, reply, sent);
        }) {
            given_up.extend(batch.iter().map(|request| request.page - first));
            // Discards make room meanwhile: a request that is sent again then does not wait for the
            // disk.
            let mut discards: Vec<Request> = Vec::new();
            for _ in 0..32 {
                let page = random.next() % PAGES;
                if [&batch, &discards].iter().any(|list| list.iter().any(|it| it.page == first + page)) {
                    continue;
                }
                let known = &mut known[page as usize];
                known.sent = (known.sent + 1).next_multiple_of(4);
                discards.push(Request { page: first + page, write: Some(known.sent) });
            }
            while !kernel.perform(&mut discards, |request, reply, sent| {
                check(&mut known[(request.page - first) as usize], request, reply, sent);
            }) {}
        }
    }
    for page in 0..PAGES {
        let mut left = vec![Request { page: first + page, write: None }];
        while !kernel.perform(&mut left, |request, reply, sent| {
            assert_eq!(reply.result, Ok(()), "page {page} is lost");
            check(&mut known[page as usize], request, reply, sent);
        }) {}
    }
}

/// Mounts a file system of its own in `directory/disk`.
fn mount_disk(directory: &Path) -> Result<(), String> {
    let (image, disk) = (directory.join("image"), directory.join("disk"));
    std::fs::create_dir_all(&disk).map_err(|error| error.to_string())?;
    let file = std::fs::File::create(&image).map_err(|error| error.to_string())?;
    file.set_len(200 << 20).map_err(|error| error.to_string())?;
    run(Command::new("mkfs.ext4").arg("-q").arg(&image))?;
    run(Command::new("mount").args(["-o", "loop"]).arg(&image).arg(&disk))?;
    run(Command::new("fsfreeze").arg("-f").arg(&disk))?;
    run(Command::new("fsfreeze").arg("-u").arg(&disk))
}

fn run(command: &mut Command) -> Result<(), String> {
    let program = command.get_program().to_string_lossy().into_owned();
    match command.output() {
        Ok(output) if output.status.success() => Ok(()),
        Ok(output) => Err(format!("{program}: {}", String::from_utf8_lossy(&output.stderr).trim())),
        Err(error) => Err(format!("{program}: {error}")),
    }
}

/// Freezes a file system until this is dropped.
struct Frozen<'a>(&'a Path);

impl<'a> Frozen<'a> {
    fn new(disk: &'a Path) -> Self {
        run(Command::new("fsfreeze").arg("-f").arg(disk)).unwrap();
        Frozen(disk)
    }
}

impl Drop for Frozen<'_> {
    fn drop(&mut self) {
        run(Command::new("fsfreeze").arg("-u").arg(self.0)).unwrap();
    }
}

/// The kinds of trouble, in the order in which they come first.
#[derive(Clone, Copy, Debug)]
enum Trouble {
    Stall,
    Stop,
    Kill,
    /// The daemon is killed while the disk stalls, so that the next one meets its writes.
    KillInStall,
}

const TROUBLES: [Trouble; 4] = [Trouble::Stall, Trouble::Stop, Trouble::Kill, Trouble::KillInStall];

#[test]
fn no_page_goes_back_while_a_disk_stalls_for_longer_than_clients_wait() {
    const NAME: &str = "no_page_goes_back_while_a_disk_stalls_for_longer_than_clients_wait";
    let full = std::env::var_os("WEIR_SCALE").is_some_and(|scale| scale == "full");
    let seconds = number("WEIR_SECONDS", if full { 3600 } else { 25 });
    let seed = number("WEIR_SEED", u64::from(std::process::id()));
    let directory = std::env::temp_dir().join(format!("weir-{}-stalls", std::process::id()));
    std::fs::create_dir_all(&directory).unwrap();
    if let Err(missing) = mount_disk(&directory) {
        eprintln!("skipped: {NAME}: {missing}");
        let _ = run(Command::new("umount").arg(directory.join("disk")));
        let _ = std::fs::remove_dir_all(&directory);
        return;
    }
    let disk = directory.join("disk");
    let mut command = Command::new(WEIR);
    command.args(["serve", "--keeper", "--size", "40MiB", "--connections", "16", "--store", "host:14MiB"]);
    command.arg("--store").arg(format!("file:{}?size=64MiB", disk.join("pages").display()));
    command.arg("--nbd").arg(format!("unix:{}", directory.join("nbd").display()));
    command.arg("--control").arg(directory.join("control")).current_dir(&directory).env("WEIR_SEAL", "abort");
    let process = command.spawn().unwrap();
    let mut scene = Daemon { directory, process };
    assert!(scene.comes_up(Daemon::listens));
    println!("seed {seed}");
    let (events, mut random) = (Events::default(), Random(seed));
    let mut counts = [0u64; TROUBLES.len()];
    thread::scope(|scope| {
        let over = Ends(&events.is_over);
        for number in 0..TIMEOUTS.len() as u64 {
            let (socket, events) = (scene.directory.join("nbd"), &events);
            scope.spawn(move || {
                // If this thread fails, the others end too.
                let _over = Ends(&events.is_over);
                work(number, seed, socket, events);
            });
        }
        let begun = Instant::now();
        let mut turn = 0;
        while (turn < TROUBLES.len() || begun.elapsed().as_secs() < seconds)
            && !events.is_over.load(Ordering::Relaxed)
        {
            thread::sleep(random.within(if full { 500..=15_000 } else { 500..=1500 }));
            let at =
                if turn < TROUBLES.len() { turn } else { [0, 0, 0, 1, 2, 3][random.next() as usize % 6] };
            turn += 1;
            counts[at] += 1;
            let daemon = scene.daemon();
            let tell = |signal| daemon.is_some_and(|daemon: Pid| kill_process(daemon, signal).is_ok());
            match TROUBLES[at] {
                Trouble::Kill => {
                    tell(Signal::KILL);
                }
                Trouble::Stop => {
                    tell(Signal::STOP);
                    thread::sleep(random.within(if full { 1000..=12_000 } else { 2000..=3000 }));
                    tell(Signal::CONT);
                }
                trouble @ (Trouble::Stall | Trouble::KillInStall) => {
                    events.stalls.lock().unwrap().push((Instant::now(), None));
                    let frozen = Frozen::new(&disk);
                    let longest = if full { 30_000 } else { 4000 };
                    thread::sleep(random.within(if full { 500..=longest / 2 } else { 1200..=longest / 2 }));
                    if matches!(trouble, Trouble::KillInStall) {
                        tell(Signal::KILL);
                    }
                    thread::sleep(random.within(if full { 500..=longest / 2 } else { 1200..=longest / 2 }));
                    drop(frozen);
                    let mut stalls = events.stalls.lock().unwrap();
                    stalls.last_mut().expect("begun above").1 = Some(Instant::now());
                }
            }
        }
        // The effects of the last stall must be over before the pages are read for the last time.
        if !events.is_over.load(Ordering::Relaxed) {
            thread::sleep(AFTERMATH / 2);
        }
        drop(over);
    });
    let [requests, timeouts, errors] =
        [&events.requests, &events.timeouts, &events.errors].map(|count| count.load(Ordering::Relaxed));
    println!(
        "{requests} requests, {timeouts} connections given up, {errors} errors; {TROUBLES:?}: {counts:?}"
    );
    println!("figure: stalls stalls {} higher", counts[0] + counts[3]);
    println!("figure: stalls stops {} higher", counts[1]);
    println!("figure: stalls kills {} higher", counts[2] + counts[3]);
    println!("figure: stalls requests {requests} higher");
    println!("figure: stalls connections_given_up {timeouts} higher 1");
    println!("figure: stalls older_pages 0 lower 0");
    assert!(timeouts > 0, "nobody gave a connection up");
    assert_eq!(scene.terminate(), Some(0), "the disk is free again");
}
