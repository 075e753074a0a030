//! `weir serve --fuse` as a process: a file as large as the volume, and one that outlives the
//! daemon.
//!
//! `tests/torture fuse-killed` is the full scale; `WEIR_KILLS` and `WEIR_SEED` choose by hand.

mod common;

use common::{Daemon, Ends, KILLS, PATIENCE, Stalls, allow_cores, kill, kills, number};
use rustix::process::Signal;
use std::fs::{self, File, OpenOptions};
use std::os::unix::fs::FileExt as _;
use std::path::PathBuf;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::thread;
use std::time::{Duration, Instant};
use weir_export::fuse::mount::is_mounted;

const PAGE: usize = 4096;
const PAGES: u64 = 2000;
const WRITERS: u64 = 3;

/// Starts a daemon that serves a file. `None`, after printing the reason, if this machine cannot
/// mount.
fn start(name: &str, flags: &[&str]) -> Option<Daemon> {
    allow_cores();
    let mut scene = Daemon::spawn(&format!("fuse-{name}"), flags, |command, directory| {
        command.arg("--fuse").arg(directory.join("disk"));
    });
    let is_there = |scene: &Daemon| fs::metadata(path(scene)).is_ok_and(|file| file.len() > 0);
    if scene.comes_up(|scene| scene.control().exists() && is_mounted(&path(scene)) && is_there(scene)) {
        return Some(scene);
    }
    println!("\nskipped: no FUSE mount here: the daemon ended");
    None
}

fn path(scene: &Daemon) -> PathBuf {
    scene.directory.join("disk")
}

fn open(scene: &Daemon) -> File {
    OpenOptions::new().read(true).write(true).open(path(scene)).unwrap()
}

fn kernel_sends_again() -> bool {
    let release = fs::read_to_string("/proc/sys/kernel/osrelease").unwrap();
    let mut numbers = release.split(['.', '-']).map_while(|part| part.parse::<u32>().ok());
    (numbers.next(), numbers.next()) >= (Some(6), Some(9))
}

/// The next random number, by SplitMix64.
fn random(state: &mut u64) -> u64 {
    *state = state.wrapping_add(0x9e37_79b9_7f4a_7c15);
    let z = (*state ^ (*state >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
    let z = (z ^ (z >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
    z ^ (z >> 31)
}

fn stamped(page: u64, generation: u64) -> Vec<u8> {
    if generation == 0 {
        return vec![0; PAGE];
    }
    let mut bytes = Vec::with_capacity(PAGE);
    for at in 0..PAGE as u64 / 16 {
        bytes.extend((page << 32 | at).to_le_bytes());
        bytes.extend(generation.wrapping_mul(0x9e37_79b9_7f4a_7c15).to_le_bytes());
    }
    bytes
}

#[test]
fn the_file_appears_and_goes_with_the_daemon() {
    let Some(mut scene) = start("plain", &["--store", "host:8MiB"]) else { return };
    let file = open(&scene);
    assert_eq!(file.metadata().unwrap().len(), 8 << 20);
    file.write_all_at(&stamped(3, 1), 3 * PAGE as u64).unwrap();
    let mut back = vec![0; PAGE];
    file.read_exact_at(&mut back, 3 * PAGE as u64).unwrap();
    assert_eq!(back, stamped(3, 1));
    drop(file);
    let status = scene.status();
    assert_eq!(status["exports"][0]["kind"], "fuse", "{status}");
    assert_eq!(status["protection"]["io_allocations"], 0, "{status}");
    assert_eq!(scene.terminate(), Some(0));
    assert!(!path(&scene).exists() && !scene.control().exists());
}

#[test]
fn each_volume_of_a_pool_has_a_file_that_outlives_its_daemon_and_goes_with_the_volume() {
    allow_cores();
    let flags = ["--pool", "2", "--keeper", "--store", "host:8MiB", "--fuse-threads", "2"];
    let mut scene = Daemon::spawn("fuse-pool", &flags, |command, directory| {
        command.arg("--fuse").arg(directory.join("disk"));
    });
    assert!(scene.comes_up(Daemon::listens), "it needs no mount to start");
    let directory = scene.directory.clone();
    let file = |name: &str| directory.join(format!("disk.{name}"));
    let ask = |arguments: &[&str]| {
        let output = scene.weir(&[&["volume"], arguments].concat());
        (
            output.status.success(),
            String::from_utf8_lossy(&[output.stdout, output.stderr].concat()).into_owned(),
        )
    };
    let made = ask(&["create", "a", "4MiB"]);
    if !made.0 && !rustix::process::geteuid().is_root() {
        return println!("\nskipped: no FUSE mount here: {}", made.1);
    }
    assert_eq!(made, (true, format!("made a, 4MiB; it is {}\n", file("a").display())));
    assert!(ask(&["create", "b.a", "2MiB"]).0);
    let (_, said) = ask(&["create", "c", "4KiB"]);
    assert!(said.contains("there are 2 volumes, and this daemon has no more"), "{said}");
    let open = |name: &str| OpenOptions::new().read(true).write(true).open(file(name)).unwrap();
    let (a, b) = (open("a"), open("b.a"));
    assert_eq!([&a, &b].map(|it| it.metadata().unwrap().len()), [4 << 20, 2 << 20]);
    let write =
        |file: &File, generation| file.write_all_at(&stamped(3, generation), 3 * PAGE as u64).unwrap();
    let read = |file: &File| {
        let mut back = vec![0; PAGE];
        file.read_exact_at(&mut back, 3 * PAGE as u64).unwrap();
        back
    };
    write(&a, 1);
    write(&b, 2);
    let (_, said) = ask(&["resize", "a", "8MiB"]);
    assert!(said.contains("volume a has a device of its size"), "{said}");
    for round in 0..3 {
        if round == 2 {
            let (_, said) = ask(&["remove", "a"]);
            assert!(said.contains("disk.a is in use") && said.contains("then try again"), "{said}");
            assert_eq!(read(&a), stamped(3, 1), "a file that is open is served on, also by the next daemon");
        }
        let daemon = scene.daemon().unwrap();
        kill(daemon, Signal::KILL);
        let begun = Instant::now();
        while scene.daemon().is_none_or(|next| next == daemon) || !scene.listens() {
            assert!(begun.elapsed() < PATIENCE);
            thread::sleep(Duration::from_millis(5));
        }
        assert_eq!((read(&a), read(&b)), (stamped(3, 1), stamped(3, 2)), "each file has its own page");
    }
    let exports = scene.status()["exports"].clone();
    assert_eq!((&exports[0]["volume"], &exports[1]["volume"]), (&"a".into(), &"b.a".into()), "{exports}");
    drop(a);
    assert_eq!(ask(&["remove", "a"]), (true, "removed a\n".to_owned()));
    assert!(!is_mounted(&file("a")) && !file("a").exists(), "its file goes with it");
    assert!(ask(&["create", "a", "4MiB"]).0, "a name is free again");
    assert_eq!((read(&open("a")), read(&b)), (vec![0; PAGE], stamped(3, 2)), "nothing old is in it");
    assert_eq!(scene.status()["protection"]["io_allocations"], 0);
    drop(b);
    // If the keeper is told to end while a daemon starts, no daemon removes the mounts.
    let daemon = scene.daemon().unwrap();
    kill(daemon, Signal::KILL);
    let begun = Instant::now();
    while scene.daemon().is_none_or(|next| next == daemon) && begun.elapsed() < PATIENCE {
        thread::sleep(Duration::from_micros(100));
    }
    assert!(scene.terminate().is_some());
    for name in ["a", "b.a"] {
        assert!(!is_mounted(&file(name)) && !file(name).exists(), "{name}");
    }
}

#[test]
fn nothing_stays_mounted_if_the_keeper_is_told_to_end_while_a_daemon_starts() {
    let Some(mut scene) = start("early", &["--keeper", "--store", "host:8MiB"]) else { return };
    let daemon = scene.daemon().unwrap();
    rustix::process::kill_process(daemon, Signal::KILL).unwrap();
    // The next daemon may not handle signals yet, may do so already, or may not exist yet.
    let begun = Instant::now();
    while scene.daemon().is_none_or(|next| next == daemon) && begun.elapsed() < PATIENCE {
        thread::sleep(Duration::from_micros(100));
    }
    assert!(scene.terminate().is_some());
    assert!(!is_mounted(&path(&scene)) && !path(&scene).exists());
}

#[test]
fn nothing_fails_and_every_page_survives_when_the_daemon_is_killed_under_load() {
    if !kernel_sends_again() {
        return println!("\nskipped: this kernel cannot send requests again (6.9 can)");
    }
    let kills = kills();
    let seed = number("WEIR_SEED", 20_261_121);
    let flags = ["--keeper", "--store", "host:8MiB", "--fuse-threads", "3", "--spin-us", "20"];
    let Some(mut scene) = start("kills", &flags) else { return };
    let (stop, done) = (AtomicBool::new(false), AtomicU64::new(0));
    let mut stalls = Stalls::default();
    thread::scope(|scope| {
        for writer in 0..WRITERS {
            let (file, stop, done) = (open(&scene), &stop, &done);
            scope.spawn(move || {
                let mut state = seed ^ writer;
                let mut known = vec![0; PAGES as usize];
                let mut back = vec![0; PAGE];
                let mut generation = 0;
                while !stop.load(Ordering::Relaxed) {
                    let page = random(&mut state) % (PAGES / WRITERS) * WRITERS + writer;
                    let at = page * PAGE as u64;
                    // There is no error at any moment: the next daemon does the requests of the
                    // dead one.
                    if random(&mut state).is_multiple_of(2) {
                        generation += 1;
                        file.write_all_at(&stamped(page, generation), at).unwrap();
                        known[page as usize] = generation;
                    } else {
                        file.read_exact_at(&mut back, at).unwrap();
                        assert!(back == stamped(page, known[page as usize]), "page {page} (seed {seed})");
                    }
                    done.fetch_add(1, Ordering::Relaxed);
                }
                for page in (writer..PAGES / WRITERS * WRITERS).step_by(WRITERS as usize) {
                    file.read_exact_at(&mut back, page * PAGE as u64).unwrap();
                    assert!(
                        back == stamped(page, known[page as usize]),
                        "page {page} at the end (seed {seed})"
                    );
                }
            });
        }
        let ends = Ends(&stop);
        let mut state = !seed;
        while stalls.count() < kills * KILLS.len() {
            thread::sleep(Duration::from_millis(20 + random(&mut state) % 200));
            let Some(daemon) = scene.daemon() else { continue };
            let killed = Instant::now();
            if !kill(daemon, stalls.next()) {
                continue;
            }
            let before = done.load(Ordering::Relaxed);
            while done.load(Ordering::Relaxed) < before + 100 {
                assert!(killed.elapsed() < PATIENCE, "no daemon works {PATIENCE:?} after a kill");
                thread::sleep(Duration::from_micros(200));
            }
            stalls.push(killed.elapsed());
        }
        drop(ends);
    });
    println!("{} operations, 0 errors, 0 mismatches; seed {seed}", done.load(Ordering::Relaxed));
    println!("figure: fuse mismatches 0 lower 0");
    stalls.print("fuse", kills);
    assert_eq!(scene.cores(), Vec::<PathBuf>::new(), "pages lie on a disk");
    assert_eq!(scene.terminate(), Some(0));
    assert!(!path(&scene).exists(), "the file that the first daemon made is gone");
}
