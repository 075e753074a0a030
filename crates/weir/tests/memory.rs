//! The memory of `weir serve`: progress and end of taking it, whether it is locked or reported as
//! not, and that no core file has it.

mod common;

use common::{Daemon, PATIENCE, WEIR};
use std::fs;
use std::io::{BufRead as _, BufReader};
use std::process::{Command, Stdio};
use std::thread;
use std::time::{Duration, Instant};

use rustix::process::{Pid, Signal, kill_process};

/// The mappings of a process that may hold bytes from clients: writable, of more than a MiB, and
/// not of a program's file. Each comes with whether core files leave it out. Its heap and stack
/// hold single pages for moments, and no advice can leave them out for good: the process must have
/// no core files.
fn mappings(pid: u32) -> Vec<(String, bool)> {
    let smaps = fs::read_to_string(format!("/proc/{pid}/smaps")).unwrap();
    let is_header =
        |line: &str| line.split_once('-').is_some_and(|(from, _)| u64::from_str_radix(from, 16).is_ok());
    let mut mappings: Vec<Vec<&str>> = Vec::new();
    for line in smaps.lines() {
        match is_header(line) {
            true => mappings.push(vec![line]),
            false => mappings.last_mut().expect("a header comes first").push(line),
        }
    }
    let of = |mapping: &[&str], key: &str| {
        let line = mapping.iter().find_map(|line| line.strip_prefix(key)).expect("a field of smaps");
        line.trim().to_owned()
    };
    let may_hold_pages = |mapping: &&Vec<&str>| {
        let mut words = mapping[0].split_whitespace();
        let (writable, name) = (words.nth(1).is_some_and(|flags| flags.contains('w')), words.nth(3));
        let rss: u64 = of(mapping, "Rss:").strip_suffix(" kB").unwrap().parse().unwrap();
        let of_a_file = name.is_some_and(|name| name.starts_with('/') && !name.starts_with("/memfd:weir-"));
        let of_all = name.is_some_and(|name| name.starts_with('['));
        writable && rss > 1024 && !of_a_file && !of_all
    };
    let found = mappings.iter().filter(may_hold_pages);
    found
        .map(|mapping| (mapping[0].to_owned(), of(mapping, "VmFlags:").split(' ').any(|flag| flag == "dd")))
        .collect()
}

#[test]
fn no_core_file_of_daemon_or_keeper_has_memory_in_which_pages_lie() {
    let file = std::env::temp_dir().join(format!("weir-{}-core-file", std::process::id()));
    let store = format!("file:{}?size=32MiB", file.display());
    let flags =
        ["--log", "warn", "--keeper", "--store", "host:32MiB", "--store", &store, "--compress", "lz4"];
    let mut scene = Daemon::spawn("core", &flags, Daemon::with_nbd);
    assert!(scene.comes_up(Daemon::listens));
    let mut client = scene.connect();
    let bytes: Vec<u8> = (0..1 << 20).map(|at: u32| (at.wrapping_mul(0x9e37_79b9) >> 16) as u8).collect();
    (0..60).for_each(|at| client.write(at << 20, &bytes).unwrap());
    let daemon = scene.daemon().unwrap().as_raw_nonzero().get() as u32;
    for pid in [daemon, scene.process.id()] {
        let mappings = mappings(pid);
        assert!(mappings.iter().any(|(name, _)| name.contains("/memfd:weir-host")), "{mappings:#?}");
        let dumped: Vec<_> = mappings.iter().filter(|(_, left_out)| !left_out).collect();
        assert!(dumped.is_empty(), "{dumped:#?}");
    }
    fs::remove_file(&file).unwrap();
}

#[test]
fn what_is_not_locked_is_said_once_at_the_start_with_the_next_step() {
    let test = "what_is_not_locked_is_said_once_at_the_start_with_the_next_step";
    let directory = std::env::temp_dir().join(format!("weir-{}-unlocked", std::process::id()));
    fs::create_dir_all(&directory).unwrap();
    let serve = |before: &[&str]| {
        let mut daemon = Command::new(before[0])
            .args(&before[1..])
            .args(["serve", "--store", "host:16MiB", "--control"])
            .arg(directory.join("control"))
            .arg("--nbd")
            .arg(format!("unix:{}", directory.join("nbd").display()))
            .stderr(Stdio::piped())
            .spawn()
            .ok()?;
        let mut lines = Vec::new();
        let mut said = BufReader::new(daemon.stderr.take().unwrap());
        // If the daemon warns, it does so before it handles signals.
        let mut line = String::new();
        while !line.contains("serving") && said.read_line(&mut line).is_ok_and(|read| read > 0) {
            lines.push(std::mem::take(&mut line));
            if lines.last().is_some_and(|line| line.contains("serving")) {
                break;
            }
        }
        kill_process(Pid::from_child(&daemon), Signal::TERM).unwrap();
        lines.extend(said.lines().map_while(Result::ok));
        daemon.wait().unwrap();
        lines.retain(|line| line.contains("not locked"));
        Some(lines)
    };
    let limited = ["setpriv", "--bounding-set", "-ipc_lock", "--inh-caps", "-ipc_lock", "bash", "-c"];
    let script = format!("ulimit -l 64; exec {WEIR} \"$@\"");
    match serve(&[&limited[..], &[&script, "weir"]].concat()) {
        None => println!("skipped: {test}: setpriv"),
        Some(lines) => {
            assert_eq!(lines.len(), 1, "{lines:?}");
            assert!(lines[0].contains("ulimit -l") && lines[0].contains("CAP_IPC_LOCK"), "{lines:?}");
        }
    }
    let free = "ulimit -l unlimited 2>/dev/null; exec \"$0\" \"$@\"";
    if rustix::process::geteuid().is_root() {
        assert_eq!(serve(&["bash", "-c", free, WEIR]), Some(Vec::new()), "all of it is locked");
    }
    fs::remove_dir_all(&directory).unwrap();
}

/// Whether a process is a daemon that handles SIGTERM and SIGUSR1; a keeper does not handle the
/// latter.
fn catches_signals(pid: u32) -> bool {
    const BOTH: u64 = 1 << 14 | 1 << 9;
    let status = fs::read_to_string(format!("/proc/{pid}/status")).unwrap_or_default();
    let caught = status.lines().find_map(|line| line.strip_prefix("SigCgt:"));
    caught.is_some_and(|mask| u64::from_str_radix(mask.trim(), 16).is_ok_and(|mask| mask & BOTH == BOTH))
}

#[test]
fn a_start_that_takes_long_ends_when_it_is_told_to() {
    const TRIES: usize = 10;
    for keeper in [&[][..], &["--keeper"]] {
        let ended = (0..TRIES).any(|_| {
            let name = format!("told-early-{}", keeper.len());
            let flags = [&["--store", "host:2GiB"][..], keeper].concat();
            let mut scene = Daemon::spawn(&name, &flags, |command, directory| {
                Daemon::with_nbd(command, directory);
                command.stderr(fs::File::create(directory.join("said")).unwrap());
            });
            let begun = Instant::now();
            let serves = |scene: &Daemon| match keeper.is_empty() {
                true => Some(scene.process.id()),
                false => scene.daemon().map(|pid| pid.as_raw_nonzero().get() as u32),
            };
            while !serves(&scene).is_some_and(catches_signals) {
                assert!(begun.elapsed() < PATIENCE, "it never looks for signals");
                thread::sleep(Duration::from_millis(1));
            }
            assert_eq!(scene.terminate(), Some(0), "{keeper:?}");
            let said = fs::read_to_string(scene.directory.join("said")).unwrap();
            // The daemon may have been ready first.
            let early = said.contains("before anything is served");
            assert_ne!(early, said.contains("serving 2"), "{said}");
            early
        });
        assert!(ended, "{keeper:?}: told to end {TRIES} times, it was ready first each time");
    }
}

#[test]
fn a_store_that_cannot_be_had_is_called_as_it_was_asked_for() {
    let output = Command::new(WEIR)
        .args(["serve", "--store", "host:4TiB", "--nbd", "unix:/nowhere/nbd"])
        .output()
        .unwrap();
    let line = String::from_utf8_lossy(&output.stderr);
    assert_eq!(output.status.code(), Some(3), "less of it might be had: {line}");
    assert!(line.contains("store host:4TiB:"), "{line}");
}

#[test]
fn a_start_that_fails_is_reported_with_its_class_also_by_the_daemon_of_a_keeper() {
    let file = std::env::temp_dir().join(format!("weir-start-report-of-{}", std::process::id()));
    let report = |arguments: &[&str]| {
        let _ = fs::remove_file(&file);
        let output = Command::new(WEIR)
            .args(["serve", "--nbd", "unix:/nowhere/nbd", "--start-report", file.to_str().expect("UTF-8")])
            .args(arguments)
            .output()
            .unwrap();
        let line = String::from_utf8_lossy(&output.stderr).into_owned();
        let report: serde_json::Value = serde_json::from_slice(&fs::read(&file).expect(&line)).unwrap();
        let _ = fs::remove_file(&file);
        assert_eq!(report["schema"], 1);
        let text = report["text"].as_str().expect("a text").to_owned();
        assert!(line.contains(&text), "{line} {text}");
        (output.status.code(), report["class"].as_str().expect("a class").to_owned())
    };
    let no_room = (Some(3), "no-room".to_owned());
    assert_eq!(report(&["--store", "host:4TiB"]), no_room);
    assert_eq!(report(&["--store", "host:4TiB", "--keeper"]), no_room);
    assert_eq!(report(&["--store", "host:1MiB"]), (Some(1), "failed".to_owned()));
    assert_eq!(report(&["--store", "host:1MiB", "--size", "9TiB"]), (Some(2), "usage".to_owned()));
}
