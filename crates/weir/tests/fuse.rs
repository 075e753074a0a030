//! `weir serve --fuse` as a process: a file as large as the volume, and one that outlives the daemon.
//!
//! `WEIR_KILLS=100 cargo test --release -p weir --test fuse` is the full scale; `WEIR_SEED` repeats a run.

use std::fs::{self, File, OpenOptions};
use std::os::unix::fs::FileExt as _;
use std::path::PathBuf;
use std::process::{Child, Command, Stdio};
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::thread;
use std::time::{Duration, Instant};
use weir_export::fuse::mount::is_mounted;

const PAGE: usize = 4096;
const PAGES: u64 = 2000;
const WRITERS: u64 = 3;
const PATIENCE: Duration = Duration::from_secs(30);

struct Scene {
    directory: PathBuf,
    process: Child,
}

impl Scene {
    /// A daemon that serves a file; `None`, having said why, where this machine cannot mount.
    fn start(name: &str, flags: &[&str]) -> Option<Self> {
        let directory = std::env::temp_dir().join(format!("weir-fuse-{}-{name}", std::process::id()));
        fs::create_dir_all(&directory).unwrap();
        let process = Command::new(env!("CARGO_BIN_EXE_weir"))
            .arg("serve")
            .args(flags)
            .arg("--control")
            .arg(directory.join("control"))
            .arg("--fuse")
            .arg(directory.join("disk"))
            .env("WEIR_SEAL", "abort")
            .stderr(Stdio::inherit())
            .spawn()
            .unwrap();
        let mut scene = Scene { directory, process };
        let begun = Instant::now();
        // The control socket comes last.
        while !scene.directory.join("control").exists()
            || !is_mounted(&scene.file())
            || fs::metadata(scene.file()).map_or(0, |meta| meta.len()) == 0
        {
            if let Some(status) = scene.process.try_wait().unwrap() {
                println!("\nskipped: no FUSE mount here: the daemon ended with {status}");
                return None;
            }
            assert!(begun.elapsed() < PATIENCE, "nothing is mounted");
            thread::sleep(Duration::from_millis(10));
        }
        Some(scene)
    }

    fn file(&self) -> PathBuf {
        self.directory.join("disk")
    }

    fn open(&self) -> File {
        OpenOptions::new().read(true).write(true).open(self.file()).unwrap()
    }

    /// The keeper's only child.
    fn daemon(&self) -> Option<rustix::process::Pid> {
        let pid = self.process.id();
        let children = fs::read_to_string(format!("/proc/{pid}/task/{pid}/children")).ok()?;
        rustix::process::Pid::from_raw(children.trim().parse().ok()?)
    }

    fn terminate(&mut self) -> Option<i32> {
        let pid = rustix::process::Pid::from_child(&self.process);
        rustix::process::kill_process(pid, rustix::process::Signal::TERM).unwrap();
        let begun = Instant::now();
        while begun.elapsed() < PATIENCE {
            if let Some(status) = self.process.try_wait().unwrap() {
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
        let _ = self.process.kill();
        let _ = self.process.wait();
        if let Some(daemon) = daemon {
            let _ = rustix::process::kill_process(daemon, rustix::process::Signal::KILL);
        }
        let _ = rustix::mount::unmount(self.file(), rustix::mount::UnmountFlags::DETACH);
        let _ = fs::remove_dir_all(&self.directory);
    }
}

fn kernel_sends_again() -> bool {
    let release = fs::read_to_string("/proc/sys/kernel/osrelease").unwrap();
    let mut numbers = release.split(['.', '-']).map_while(|part| part.parse::<u32>().ok());
    (numbers.next(), numbers.next()) >= (Some(6), Some(9))
}

/// SplitMix64.
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
    let Some(mut scene) = Scene::start("plain", &["--store", "host:8MiB"]) else { return };
    let file = scene.open();
    assert_eq!(file.metadata().unwrap().len(), 8 << 20);
    file.write_all_at(&stamped(3, 1), 3 * PAGE as u64).unwrap();
    let mut back = vec![0; PAGE];
    file.read_exact_at(&mut back, 3 * PAGE as u64).unwrap();
    assert_eq!(back, stamped(3, 1));
    drop(file);
    let status = Command::new(env!("CARGO_BIN_EXE_weir"))
        .args(["status", "--json", "--control"])
        .arg(scene.directory.join("control"))
        .output()
        .unwrap();
    let status: serde_json::Value = serde_json::from_slice(&status.stdout).unwrap();
    assert_eq!(status["exports"][0]["kind"], "fuse", "{status}");
    assert_eq!(status["protection"]["io_allocations"], 0, "{status}");
    assert_eq!(scene.terminate(), Some(0));
    assert!(!scene.file().exists() && !scene.directory.join("control").exists());
}

#[test]
fn nothing_stays_mounted_if_the_keeper_is_told_to_end_while_a_daemon_starts() {
    let Some(mut scene) = Scene::start("early", &["--keeper", "--store", "host:8MiB"]) else { return };
    let daemon = scene.daemon().unwrap();
    rustix::process::kill_process(daemon, rustix::process::Signal::KILL).unwrap();
    // The next one is there, and does not listen to signals yet; or listens already; or is not there yet.
    let begun = Instant::now();
    while scene.daemon().is_none_or(|next| next == daemon) && begun.elapsed() < PATIENCE {
        thread::sleep(Duration::from_micros(100));
    }
    assert!(scene.terminate().is_some());
    assert!(!is_mounted(&scene.file()) && !scene.file().exists());
}

#[test]
fn nothing_fails_and_every_page_survives_when_the_daemon_is_killed_under_load() {
    if !kernel_sends_again() {
        return println!("\nskipped: this kernel cannot send requests again (6.9 can)");
    }
    let number = |name: &str, default| std::env::var(name).map_or(default, |text| text.parse().unwrap());
    let (kills, seed): (u64, u64) = (number("WEIR_KILLS", 5), number("WEIR_SEED", 20_261_121));
    let flags = ["--keeper", "--store", "host:8MiB", "--fuse-threads", "3", "--spin-us", "20"];
    let Some(mut scene) = Scene::start("kills", &flags) else { return };
    let (stop, done) = (AtomicBool::new(false), AtomicU64::new(0));
    let mut stalls = Vec::new();
    thread::scope(|scope| {
        for writer in 0..WRITERS {
            let (file, stop, done) = (scene.open(), &stop, &done);
            scope.spawn(move || {
                let mut state = seed ^ writer;
                let mut known = vec![0; PAGES as usize];
                let mut back = vec![0; PAGE];
                let mut generation = 0;
                while !stop.load(Ordering::Relaxed) {
                    let page = random(&mut state) % (PAGES / WRITERS) * WRITERS + writer;
                    let at = page * PAGE as u64;
                    // No error at any moment: what the dead daemon had is done by the next.
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
        let mut state = !seed;
        for _ in 0..kills {
            thread::sleep(Duration::from_millis(20 + random(&mut state) % 200));
            let Some(daemon) = scene.daemon() else { continue };
            if rustix::process::kill_process(daemon, rustix::process::Signal::KILL).is_err() {
                continue;
            }
            let (killed, before) = (Instant::now(), done.load(Ordering::Relaxed));
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
        "{} kills, {} operations, 0 errors, 0 mismatches; stall median {median:.1?}, longest {longest:.1?}; seed {seed}",
        stalls.len(),
        done.load(Ordering::Relaxed)
    );
    assert_eq!(scene.terminate(), Some(0));
    assert!(!scene.file().exists(), "the file that the first daemon made is gone");
}
