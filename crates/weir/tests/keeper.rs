//! The keeper: what the daemon acknowledged survives the daemon, however and whenever that dies.
//!
//! `WEIR_KILLS=100 cargo test --release -p weir --test keeper` is the full scale; `WEIR_SEED` repeats a run.

use std::fs;
use std::path::PathBuf;
use std::process::{Child, Command, Stdio};
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::thread;
use std::time::{Duration, Instant};
use weir_export::nbd::client::{Client, Wish};

const PAGE: usize = 4096;
const PAGES: u64 = 2000;
const WRITERS: u64 = 2;
const PATIENCE: Duration = Duration::from_secs(20);

struct Scene {
    directory: PathBuf,
    keeper: Child,
}

impl Scene {
    fn start(name: &str, flags: &[&str]) -> Self {
        let directory = std::env::temp_dir().join(format!("weir-{}-{name}", std::process::id()));
        fs::create_dir_all(&directory).unwrap();
        let address = format!("unix:{}", directory.join("nbd").display());
        let keeper = Command::new(env!("CARGO_BIN_EXE_weir"))
            .args(["serve", "--keeper", "--connections", "4", "--nbd", &address, "--control"])
            .arg(directory.join("control"))
            .args(flags)
            .env("WEIR_SEAL", "abort")
            .stderr(Stdio::inherit())
            .spawn()
            .unwrap();
        Scene { directory, keeper }
    }

    /// A connection, as soon as there is a daemon that gives one.
    fn connect(&self) -> Client {
        let begun = Instant::now();
        loop {
            match Client::unix(self.directory.join("nbd"), &Wish::default()) {
                Ok(client) => return client,
                Err(error) => assert!(begun.elapsed() < PATIENCE, "no daemon for {PATIENCE:?}: {error}"),
            }
            thread::sleep(Duration::from_millis(1));
        }
    }

    /// The living daemon: the keeper's only child.
    fn daemon(&self) -> Option<rustix::process::Pid> {
        let pid = self.keeper.id();
        let children = fs::read_to_string(format!("/proc/{pid}/task/{pid}/children")).ok()?;
        rustix::process::Pid::from_raw(children.trim().parse().ok()?)
    }

    fn terminate(&mut self) -> Option<i32> {
        let pid = rustix::process::Pid::from_child(&self.keeper);
        rustix::process::kill_process(pid, rustix::process::Signal::TERM).unwrap();
        let begun = Instant::now();
        while begun.elapsed() < PATIENCE {
            if let Some(status) = self.keeper.try_wait().unwrap() {
                return status.code();
            }
            thread::sleep(Duration::from_millis(5));
        }
        None
    }
}

impl Drop for Scene {
    fn drop(&mut self) {
        let daemon = self.daemon();
        let _ = self.keeper.kill();
        let _ = self.keeper.wait();
        if let Some(daemon) = daemon {
            let _ = rustix::process::kill_process(daemon, rustix::process::Signal::KILL);
        }
        let _ = fs::remove_dir_all(&self.directory);
    }
}

/// SplitMix64.
struct Random(u64);

impl Random {
    fn next(&mut self) -> u64 {
        self.0 = self.0.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let z = (self.0 ^ (self.0 >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        let z = (z ^ (z >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        z ^ (z >> 31)
    }
}

fn stamped(page: u64, generation: u64) -> Vec<u8> {
    let mut bytes = Vec::with_capacity(PAGE);
    for at in 0..PAGE as u64 / 16 {
        bytes.extend((page << 32 | at).to_le_bytes());
        bytes.extend(generation.wrapping_mul(0x9e37_79b9_7f4a_7c15).to_le_bytes());
    }
    bytes
}

/// A page's history as its one writer knows it.
#[derive(Clone, Copy, Default)]
struct Known {
    acknowledged: u64,
    /// The last one sent; later than `acknowledged` if the daemon died over it.
    sent: u64,
}

impl Known {
    fn allows(&self, page: u64, bytes: &[u8]) -> bool {
        let is = |generation| {
            if generation == 0 {
                bytes.iter().all(|byte| *byte == 0)
            } else {
                bytes == stamped(page, generation)
            }
        };
        is(self.acknowledged) || is(self.sent)
    }
}

#[test]
fn the_keeper_runs_from_memory_so_that_an_upgrade_leaves_no_removed_file_in_use() {
    let mut scene = Scene::start("memory", &["--store", "host:8MiB"]);
    drop(scene.connect());
    let link = |what: &str| fs::read_link(format!("/proc/{}/{what}", scene.keeper.id())).unwrap();
    assert!(link("exe").starts_with("/memfd:weir (deleted)"), "{}", link("exe").display());
    let name = fs::read_to_string(format!("/proc/{}/comm", scene.keeper.id())).unwrap();
    assert_eq!(name.trim(), "weir");
    assert_eq!(scene.terminate(), Some(0));
}

#[test]
fn every_acknowledged_page_survives_kills_at_random_moments() {
    survive(&Scene::start("kills", &["--store", "host:8MiB"]));
}

#[test]
fn pages_in_gpu_memory_survive_too() {
    if !has_lavapipe() {
        println!("skipped: no lavapipe, Mesa's software renderer (package mesa-vulkan-drivers)");
        return;
    }
    survive(&Scene::start("vram-kills", &["--store", "vram:lavapipe?size=8MiB&chunk=1MiB"]));
}

fn has_lavapipe() -> bool {
    fs::read_dir("/usr/share/vulkan/icd.d").is_ok_and(|mut entries| {
        entries.any(|entry| entry.is_ok_and(|entry| entry.file_name().to_string_lossy().starts_with("lvp")))
    })
}

/// Kills the scene's daemon under load, again and again, and looks at every page meanwhile and afterwards.
fn survive(scene: &Scene) {
    let number = |name: &str, default| std::env::var(name).map_or(default, |text| text.parse().unwrap());
    let (kills, seed): (u64, u64) = (number("WEIR_KILLS", 5), number("WEIR_SEED", 20_261_120));
    // A daemon that never served is not followed by another.
    drop(scene.connect());
    let (stop, done) = (AtomicBool::new(false), AtomicU64::new(0));
    let mut stalls = Vec::new();
    thread::scope(|scope| {
        for writer in 0..WRITERS {
            let (stop, done) = (&stop, &done);
            scope.spawn(move || {
                let mut random = Random(seed ^ writer);
                let mut known = vec![Known::default(); PAGES as usize];
                let mut client = scene.connect();
                let mut generation = 0;
                while !stop.load(Ordering::Relaxed) {
                    let page = random.next() % (PAGES / WRITERS) * WRITERS + writer;
                    let state = &mut known[page as usize];
                    let outcome = if random.next().is_multiple_of(2) {
                        generation += 1;
                        state.sent = generation;
                        client
                            .write(page * PAGE as u64, &stamped(page, generation))
                            .map(|()| state.acknowledged = generation)
                    } else {
                        client.read(page * PAGE as u64, PAGE as u32).map(|bytes| {
                            assert!(
                                state.allows(page, &bytes),
                                "page {page} is neither old nor new (seed {seed})"
                            );
                        })
                    };
                    match outcome {
                        Ok(()) => {
                            done.fetch_add(1, Ordering::Relaxed);
                        }
                        Err(_) => client = scene.connect(),
                    }
                }
                let mut client = scene.connect();
                for page in (writer..PAGES).step_by(WRITERS as usize) {
                    let bytes = client.read(page * PAGE as u64, PAGE as u32).unwrap();
                    assert!(
                        known[page as usize].allows(page, &bytes),
                        "page {page} at the end (seed {seed})"
                    );
                }
            });
        }
        let mut random = Random(!seed);
        for _ in 0..kills {
            thread::sleep(Duration::from_millis(20 + random.next() % 200));
            let Some(daemon) = scene.daemon() else { continue };
            if rustix::process::kill_process(daemon, rustix::process::Signal::KILL).is_err() {
                continue;
            }
            let (killed, before) = (Instant::now(), done.load(Ordering::Relaxed));
            // What was under way may still be counted; a hundred more is a daemon at work.
            while done.load(Ordering::Relaxed) < before + 100 {
                assert!(killed.elapsed() < PATIENCE, "no daemon works {PATIENCE:?} after a kill");
                thread::sleep(Duration::from_micros(200));
            }
            stalls.push(killed.elapsed());
        }
        stop.store(true, Ordering::Relaxed);
    });
    stalls.sort();
    let [median, longest] = [stalls[stalls.len() / 2], stalls[stalls.len() - 1]];
    println!(
        "{} kills, {} operations, 0 mismatches; stall median {median:.1?}, longest {longest:.1?}; seed {seed}",
        stalls.len(),
        done.load(Ordering::Relaxed)
    );
    assert!(longest < Duration::from_secs(2), "stalled for {longest:?}");
}

#[test]
fn the_keeper_ends_with_its_daemon_when_told_and_leaves_nothing() {
    let mut scene = Scene::start("told", &["--store", "host:1MiB"]);
    drop(scene.connect());
    let daemon = scene.daemon().unwrap();
    assert_eq!(scene.terminate(), Some(0));
    assert!(rustix::process::test_kill_process(daemon).is_err(), "the daemon is gone");
    assert!(!scene.directory.join("nbd").exists() && !scene.directory.join("control").exists());
}

#[test]
fn a_daemon_that_never_served_is_not_started_again() {
    let begun = Instant::now();
    let mut scene = Scene::start("hopeless", &["--store", "host:1TiB"]);
    assert_eq!(scene.keeper.wait().unwrap().code(), Some(1));
    assert!(begun.elapsed() < PATIENCE);
}
