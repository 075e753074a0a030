//! A bug that is found on an I/O thread ends its process, which can be replaced: no live process is
//! left that does not serve.

mod common;

use common::{Daemon, PATIENCE};
use std::fs::{self, File};
use std::os::unix::fs::FileExt as _;
use std::os::unix::process::ExitStatusExt as _;
use std::path::Path;
use std::process::Command;
use std::thread;
use std::time::{Duration, Instant};
use weir_export::fuse::mount::is_mounted;

const PAGE: usize = 4096;
/// A store whose third operation panics, on the thread that has the request.
const STORE: &str = "sim:size=8MiB,panic_after=2";

/// Starts a daemon over such a store. It must not abort for an allocation on an I/O thread before
/// the panic ends it.
fn start(name: &str, flags: &[&str], way_in: impl FnOnce(&mut Command, &Path)) -> Daemon {
    let flags = [&["--store", STORE], flags].concat();
    Daemon::spawn(&format!("bug-{name}"), &flags, |command, directory| {
        command.env_remove("WEIR_SEAL").stderr(File::create(directory.join("log")).unwrap());
        way_in(command, directory);
    })
}

fn log(scene: &Daemon) -> String {
    fs::read_to_string(scene.directory.join("log")).unwrap()
}

/// Waits for the end of a daemon without a keeper, and returns the signal that ended it.
fn end(scene: &mut Daemon) -> Option<i32> {
    let begun = Instant::now();
    while begun.elapsed() < PATIENCE {
        if let Some(status) = scene.process.try_wait().unwrap() {
            return status.signal();
        }
        thread::sleep(Duration::from_millis(5));
    }
    panic!("it lives and serves nobody: {}", log(scene));
}

fn write_until_it_breaks(scene: &Daemon) {
    let mut client = scene.connect();
    let written = (0..4u64).find(|at| client.write(at * PAGE as u64, &pattern(*at)).is_err());
    assert!(written.is_some(), "it serves on: {}", log(scene));
}

/// Bytes that repeat no value, so that a store has them.
fn pattern(seed: u64) -> Vec<u8> {
    (0..PAGE as u64).map(|at| ((at + seed).wrapping_mul(0x9e37_79b9_7f4a_7c15) >> 56) as u8).collect()
}

#[test]
fn a_daemon_whose_nbd_thread_panics_ends_with_one_line() {
    for swap in [&[][..], &["--swap", "--unsafe-no-flusher"]] {
        let mut scene = start("nbd", &[&["--log", "warn"], swap].concat(), Daemon::with_nbd);
        assert!(scene.comes_up(Daemon::listens), "{}", log(&scene));
        write_until_it_breaks(&scene);
        assert_eq!(end(&mut scene), Some(libc::SIGABRT), "{}", log(&scene));
        let log = log(&scene);
        let lines: Vec<_> = log.lines().filter(|line| !line.contains("--unsafe-no-flusher")).collect();
        assert_eq!(lines.len(), 1, "{log}");
        assert!(lines[0].starts_with("weir: ending, for there is a bug at "), "{log}");
        assert!(lines[0].contains("weir-nbd") && lines[0].ends_with("as the store's URL says"), "{log}");
    }
}

#[test]
fn a_daemon_whose_fuse_thread_panics_ends_and_does_not_leave_a_request_waiting() {
    let mut scene = start("fuse", &[], |command, directory| {
        command.arg("--fuse").arg(directory.join("disk"));
    });
    let disk = scene.directory.join("disk");
    if !scene.comes_up(|scene| scene.listens() && is_mounted(&disk)) {
        let name = "a_daemon_whose_fuse_thread_panics_ends_and_does_not_leave_a_request_waiting";
        return println!("\nskipped: {name}: no FUSE mount here");
    }
    let file = File::options().write(true).open(&disk).unwrap();
    // Use a thread, since the write may wait for ever.
    thread::spawn(move || (0..4).any(|at| file.write_all_at(&pattern(at), at * PAGE as u64).is_err()));
    assert_eq!(end(&mut scene), Some(libc::SIGABRT), "{}", log(&scene));
}

/// The pages of this kind of store end with the daemon. For all other stores see `tests/keeper`,
/// where daemons are killed by SIGABRT.
#[test]
fn a_keeper_replaces_a_daemon_whose_thread_panics() {
    let mut scene = start("keeper", &["--keeper"], Daemon::with_nbd);
    assert!(scene.comes_up(Daemon::listens));
    let first = scene.daemon().unwrap();
    write_until_it_breaks(&scene);
    let begun = Instant::now();
    while scene.daemon() == Some(first) {
        assert!(begun.elapsed() < PATIENCE, "it lives and serves nobody: {}", log(&scene));
        thread::sleep(Duration::from_millis(5));
    }
    let said = format!("ended unasked: it was killed by signal {}; starting another", libc::SIGABRT);
    while !log(&scene).contains(&said) {
        assert!(begun.elapsed() < PATIENCE, "{}", log(&scene));
        thread::sleep(Duration::from_millis(5));
    }
}
