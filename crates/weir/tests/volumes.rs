//! Volumes that come and go while clients work: each page is its own volume's, and a daemon that
//! dies at any moment leaves every volume as it was or as it was to be.
//!
//! `tests/torture volumes` is the full scale: ten minutes with a hundred volumes.

mod common;

use common::{Daemon, Ends, PATIENCE, kill, number};
use rustix::process::Signal;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::thread;
use std::time::{Duration, Instant};
use weir_daemon::control::{self, NamedVolume, Request};
use weir_export::nbd::client::{Client, Wish};

const PAGE: u64 = 4096;
/// Number of threads that make and remove volumes.
const OWNERS: u64 = 4;
/// Number of volumes that a thread has at most.
const EACH: usize = 25;
/// Largest size of a volume in pages.
const PAGES_MOST: u64 = 96;

/// Memory in KiB by which a daemon grows at most while volumes come and go.
const GROWN_MOST_KIB: u64 = 4 << 10;

struct Random(u64);

impl Random {
    /// A number below `end`: SplitMix64.
    fn below(&mut self, end: u64) -> u64 {
        self.0 = self.0.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let z = (self.0 ^ (self.0 >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        let z = (z ^ (z >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        (z ^ (z >> 31)) % end
    }
}

/// A volume as its owner knows it: the content of each page, 0 for an empty one.
struct Known {
    name: String,
    pages: Vec<u64>,
}

/// The content of a page: its stamp in each word, and the word's place.
fn content(stamp: u64) -> Vec<u8> {
    let word = |at| if stamp == 0 { 0 } else { stamp.wrapping_mul(0x9e37_79b9_7f4a_7c15) ^ at };
    (0..PAGE / 8).flat_map(|at| word(at).to_le_bytes()).collect()
}

/// One thread with volumes of its own.
struct Owner<'a> {
    daemon: &'a Daemon,
    number: u64,
    random: Random,
    volumes: Vec<Known>,
    /// Stamps so far: no two pages have the same.
    stamps: u64,
    /// Volumes made so far, for their names.
    made: u64,
    operations: &'a AtomicU64,
}

impl Owner<'_> {
    fn stamp(&mut self) -> u64 {
        self.stamps += 1;
        self.number << 56 | self.stamps
    }

    fn connect(&self, name: &str) -> Client {
        let begun = Instant::now();
        let wish = Wish { name: name.to_owned(), ..Wish::default() };
        loop {
            match Client::unix(self.daemon.directory.join("nbd"), &wish) {
                Ok(client) => return client,
                Err(error) => assert!(begun.elapsed() < PATIENCE, "export {name}: {error}"),
            }
            thread::sleep(Duration::from_millis(1));
        }
    }

    /// The volume of this name, as the daemon lists it.
    fn listed(&self, name: &str) -> Option<NamedVolume> {
        let begun = Instant::now();
        loop {
            match control::status(&self.daemon.control()) {
                Ok(status) => return status.volumes.into_iter().find(|volume| volume.name == name),
                Err(error) => assert!(begun.elapsed() < PATIENCE, "no status: {error}"),
            }
            thread::sleep(Duration::from_millis(1));
        }
    }

    /// Asks for a change until the daemon has said yes, or died. `false`: it has died, so the
    /// change is done or not.
    fn change(&self, request: &Request) -> bool {
        let begun = Instant::now();
        loop {
            match control::ask_for(&self.daemon.control(), request.clone(), |_| {}) {
                Ok(_) => return true,
                // A connection that was closed a moment ago is still being taken down.
                Err(error) if error.to_string().contains("is in use") => {}
                Err(error) if error.to_string().contains("such requests are under way") => {}
                Err(error) if error.kind() == weir_daemon::ErrorKind::Unreachable => return false,
                Err(error) => panic!("{request:?}: {error}"),
            }
            assert!(begun.elapsed() < PATIENCE, "{request:?} is refused");
            thread::sleep(Duration::from_millis(2));
        }
    }

    fn make(&mut self) {
        let name = format!("v{}-{}", self.number, self.made);
        self.made += 1;
        let pages = 1 + self.random.below(PAGES_MOST);
        let request = Request::VolumeCreate { name: name.clone(), bytes: Some(pages * PAGE) };
        if self.change(&request) || self.listed(&name).is_some() {
            self.volumes.push(Known { name, pages: vec![0; pages as usize] });
        }
    }

    /// Writes and reads pages of a volume by a connection of its own.
    fn work(&mut self, at: usize) {
        let mut client = self.connect(&self.volumes[at].name);
        let pages = self.volumes[at].pages.len() as u64;
        assert_eq!(client.terms().bytes, pages * PAGE, "{}", self.volumes[at].name);
        for _ in 0..1 + self.random.below(40) {
            let page = self.random.below(pages);
            let outcome = if self.random.below(2) == 0 {
                let stamp = self.stamp();
                let before = std::mem::replace(&mut self.volumes[at].pages[page as usize], stamp);
                let written = client.write(page * PAGE, &content(stamp));
                if written.is_err() {
                    // The write took effect before the daemon's end, or never will.
                    let name = self.volumes[at].name.clone();
                    let found = self.read_again(&name, page);
                    let either = [before, stamp].into_iter().find(|stamp| found == content(*stamp));
                    let known = either.unwrap_or_else(|| panic!("page {page} of {name} is neither"));
                    self.volumes[at].pages[page as usize] = known;
                }
                written
            } else {
                let known = self.volumes[at].pages[page as usize];
                client.read(page * PAGE, PAGE as u32).map(|found| {
                    assert!(found == content(known), "page {page} of {}", self.volumes[at].name);
                })
            };
            self.operations.fetch_add(1, Ordering::Relaxed);
            if outcome.is_err() {
                client = self.connect(&self.volumes[at].name);
            }
        }
        // The daemon may have died.
        let _ = client.disconnect();
    }

    fn read_again(&self, name: &str, page: u64) -> Vec<u8> {
        loop {
            if let Ok(found) = self.connect(name).read(page * PAGE, PAGE as u32) {
                return found;
            }
        }
    }

    fn verify(&self, at: usize) {
        let Known { name, pages } = &self.volumes[at];
        'again: loop {
            let mut client = self.connect(name);
            assert_eq!(client.terms().bytes, pages.len() as u64 * PAGE, "{name}");
            for (page, known) in pages.iter().enumerate() {
                let Ok(found) = client.read(page as u64 * PAGE, PAGE as u32) else { continue 'again };
                assert!(found == content(*known), "page {page} of {name}");
            }
            self.operations.fetch_add(pages.len() as u64, Ordering::Relaxed);
            let _ = client.disconnect();
            return;
        }
    }

    fn resize(&mut self, at: usize) {
        let pages = 1 + self.random.below(PAGES_MOST);
        let name = self.volumes[at].name.clone();
        let request = Request::VolumeResize { name: name.clone(), bytes: pages * PAGE };
        let now = match self.change(&request) {
            true => pages,
            false => self.listed(&name).expect("a resize removes nothing").bytes / PAGE,
        };
        let before = self.volumes[at].pages.len() as u64;
        assert!(now == pages || now == before, "{name} has {now} pages, neither {before} nor {pages}");
        self.volumes[at].pages.resize(now as usize, 0);
    }

    fn remove(&mut self, at: usize) {
        let name = self.volumes[at].name.clone();
        if self.change(&Request::VolumeRemove { name: name.clone() }) || self.listed(&name).is_none() {
            self.volumes.swap_remove(at);
        } else {
            // It was not noted, so nothing is lost.
            self.verify(at);
        }
    }

    fn run(&mut self, stop: &AtomicBool) {
        while !stop.load(Ordering::Relaxed) {
            let at = self.random.below(self.volumes.len().max(1) as u64) as usize;
            match self.random.below(16) {
                _ if self.volumes.is_empty() => self.make(),
                0..4 if self.volumes.len() < EACH => self.make(),
                4..12 => self.work(at),
                12 => self.verify(at),
                13 | 14 => self.resize(at),
                _ => self.remove(at),
            }
        }
        while !self.volumes.is_empty() {
            self.verify(0);
            self.remove(0);
        }
    }
}

/// Memory of the daemon that is no store: its pages in RAM that are no shared memory, in KiB.
fn anonymous_kib(daemon: &Daemon) -> u64 {
    let status = std::fs::read_to_string(format!("/proc/{}/status", daemon.status()["pid"])).unwrap();
    let line = status.lines().find(|line| line.starts_with("RssAnon:")).unwrap();
    line.split_whitespace().nth(1).unwrap().parse().unwrap()
}

#[test]
fn volumes_come_and_go_under_load_and_through_kills_and_no_page_shows_in_another() {
    let full = std::env::var_os("WEIR_SCALE").is_some_and(|scale| scale == "full");
    let seconds = number("WEIR_SECONDS", if full { 600 } else { 8 });
    let seed = number("WEIR_SEED", 20_261_125);
    let flags = ["--keeper", "--store", "host:96MiB", "--size", "1MiB"];
    let mut daemon = Daemon::spawn("volumes", &flags, |command, directory| {
        let address = format!("unix:{}", directory.join("nbd").display());
        command.args(["--connections", "8", "--nbd", &address]);
    });
    assert!(daemon.comes_up(Daemon::listens));
    let before = daemon.status();
    let operations = AtomicU64::new(0);
    let stop = AtomicBool::new(false);
    let (mut kills, mut most, mut grown) = (0, 0, 0);
    thread::scope(|scope| {
        for number in 0..OWNERS {
            let (daemon, operations, stop) = (&daemon, &operations, &stop);
            scope.spawn(move || {
                let random = Random(seed ^ number << 32);
                let (volumes, stamps, made) = (Vec::new(), 0, 0);
                Owner { daemon, number: number + 1, random, volumes, stamps, made, operations }.run(stop);
            });
        }
        let ends = Ends(&stop);
        let (begun, mut random) = (Instant::now(), Random(!seed));
        let mut lives = anonymous_kib(&daemon);
        while begun.elapsed() < Duration::from_secs(seconds) {
            thread::sleep(Duration::from_millis(200 + random.below(1500)));
            if let Ok(status) = control::status(&daemon.control()) {
                most = most.max(status.volumes.len() - 1);
            }
            if random.below(2) == 0 {
                grown = grown.max(anonymous_kib(&daemon).saturating_sub(lives));
                kills += u64::from(daemon.daemon().is_some_and(|it| kill(it, Signal::KILL)));
                lives = anonymous_kib(&daemon);
            }
        }
        drop(ends);
    });
    let after = daemon.status();
    let same = |path: &str| assert_eq!(after.pointer(path), before.pointer(path), "{path}");
    ["/volumes", "/free_bytes", "/volume/stored", "/volume/map_bytes", "/stores/0/slots_used"]
        .into_iter()
        .for_each(same);
    assert_eq!(after["read"]["corrupt"], 0);
    let keeper = std::fs::read_to_string(format!("/proc/{}/maps", daemon.process.id())).unwrap();
    let mappings = keeper.lines().count();
    assert!(mappings < 2000, "the keeper has {mappings} mappings");
    let operations = operations.into_inner();
    println!("{operations} operations on up to {most} volumes, {kills} kills; seed {seed}");
    println!("figure: volumes mismatches 0 lower 0");
    println!("figure: volumes operations {operations} higher");
    println!("figure: volumes at_once {most} higher");
    println!("figure: volumes kills {kills} higher");
    println!("figure: volumes keeper_mappings {mappings} lower");
    println!("figure: volumes grown_kib {grown} lower {GROWN_MOST_KIB}");
    assert!(grown <= GROWN_MOST_KIB, "a daemon's memory grew by {grown} KiB");
    assert_eq!(daemon.terminate(), Some(0));
}
