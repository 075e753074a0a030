//! A command that is interrupted undoes all its changes to a machine. If it was killed, the next
//! command does.
//!
//! With `WEIR_SCALE=full` the test interrupts twenty times.

mod common;

use common::{PATIENCE, WEIR, is_alive, number};
use rustix::process::{Pid, Signal, kill_process, kill_process_group};
use std::fs;
use std::os::unix::process::CommandExt as _;
use std::path::Path;
use std::process::{Child, Command, Stdio};
use std::sync::{Mutex, MutexGuard, PoisonError};
use std::thread;
use std::time::{Duration, Instant};

/// One test at a time: each looks at the whole machine.
static MACHINE: Mutex<()> = Mutex::new(());

fn alone() -> MutexGuard<'static, ()> {
    MACHINE.lock().unwrap_or_else(PoisonError::into_inner)
}

/// As much of the machine as a benchmark of swap changes: swaps, loop devices, control groups, its
/// directories, the kernel's setting, and processes, so far as they are a benchmark's. Those of
/// benchmarks and trials that others run at the same time are theirs.
fn machine() -> Vec<String> {
    let mut found = Vec::new();
    let names = |directory: &str, what: &str| -> Vec<String> {
        let entries = fs::read_dir(directory).into_iter().flatten().flatten();
        let names = entries.map(|entry| entry.file_name().to_string_lossy().into_owned());
        names.filter(|name| name.starts_with(what)).map(|name| format!("{directory}/{name}")).collect()
    };
    for device in names("/sys/block", "loop") {
        let file = fs::read_to_string(Path::new(&device).join("loop/backing_file")).unwrap_or_default();
        if file.contains("weir-bench-swap-") {
            let device = device.replace("/sys/block/", "/dev/");
            let is_on =
                fs::read_to_string("/proc/swaps").unwrap().lines().any(|line| line.starts_with(&device));
            let on = is_on.then(|| format!("swap on {device} over {file}"));
            found.extend([Some(file), on].into_iter().flatten());
        }
    }
    for directory in ["/sys/fs/cgroup/memory", "/sys/fs/cgroup", "/var/tmp", "/tmp"] {
        found.extend(names(directory, "weir-bench-"));
        found.extend(names(directory, "weir-try-"));
    }
    for process in names("/proc", "") {
        let line = fs::read(Path::new(&process).join("cmdline")).unwrap_or_default();
        let line = String::from_utf8_lossy(&line).replace('\0', " ");
        let is_served = line.contains("/weir-bench-") || line.contains("swap-touch");
        let is_worker = line.contains("bench swap") && guard(&process).is_some_and(|guard| !is_alive(guard));
        found.extend(((is_served || is_worker) && !line.contains("interrupted")).then_some(line));
    }
    found.retain(|line| maker(line).is_none_or(|maker| !is_alive(maker)));
    let setting = fs::read_to_string("/proc/sys/vm/page-cluster").unwrap_or_default();
    found.push(format!("vm.page-cluster {setting}"));
    found
}

/// The process whose number is in a name that it made.
fn maker(line: &str) -> Option<u32> {
    let name = &line[line.find("/weir-bench-").or_else(|| line.find("/weir-try-"))?..];
    let digits = &name[name.find(|it: char| it.is_ascii_digit())?..];
    digits.split(|it: char| !it.is_ascii_digit()).next()?.parse().ok()
}

/// The guard of a process of ours.
fn guard(process: &str) -> Option<u32> {
    let environment = fs::read(Path::new(process).join("environ")).ok()?;
    let mut variables = environment.split(|byte| *byte == 0);
    let guard = variables.find_map(|it| it.strip_prefix(b"WEIR_GUARD="))?;
    std::str::from_utf8(guard).ok()?.parse().ok()
}

/// As many swaps of benchmarks as are on.
fn swaps_on() -> usize {
    fs::read_to_string("/proc/swaps")
        .unwrap()
        .lines()
        .filter(|line| line.trim_end().ends_with("32000"))
        .count()
}

/// Waits until the machine is as it was: what another test has changed goes too.
fn is_as_it_was(before: &[String], when: &str) {
    let begun = Instant::now();
    loop {
        let now = machine();
        if now == before {
            return;
        }
        assert!(begun.elapsed() < PATIENCE, "{when}: {now:#?}, and it was {before:#?}");
        thread::sleep(Duration::from_millis(100));
    }
}

fn start(words: &[&str]) -> Child {
    let mut command = Command::new(WEIR);
    command.args(words).process_group(0).stdout(Stdio::null()).stderr(Stdio::null());
    command.spawn().unwrap()
}

fn end(mut child: Child) -> Option<i32> {
    let begun = Instant::now();
    while begun.elapsed() < PATIENCE {
        if let Some(status) = child.try_wait().unwrap() {
            return status.code();
        }
        thread::sleep(Duration::from_millis(5));
    }
    let _ = child.kill();
    panic!("it goes on though it was interrupted");
}

const SWAP: [&str; 9] =
    ["bench", "swap", "--size", "64MiB", "--limit", "32MiB", "--seconds", "2", "--runs=1"];

#[test]
fn a_benchmark_of_swap_that_is_interrupted_leaves_the_machine_as_it_was() {
    let _alone = alone();
    let name = "a_benchmark_of_swap_that_is_interrupted_leaves_the_machine_as_it_was";
    let begun = Instant::now();
    let probe = Command::new(WEIR).args(SWAP).args(["--only", "ram-loop"]).output().unwrap();
    if !probe.status.success() {
        let why = String::from_utf8_lossy(&probe.stderr).trim().to_owned();
        // The kernel ends a child whose pages leave too slowly: the machine has too much to do.
        assert!(!why.contains("did not finish") || why.contains("let less run beside it"), "{why}");
        return println!("\nskipped: {name}: {why}");
    }
    // A run of two devices takes longer than this one.
    let most = begun.elapsed().as_millis() as u64;
    let full = std::env::var_os("WEIR_SCALE").is_some_and(|scale| scale == "full");
    let times = number("WEIR_INTERRUPTS", if full { 20 } else { 5 });
    let mut state = number("WEIR_SEED", 20_261_123);
    let before = machine();
    let mut on = 0;
    for round in 0..times {
        let child = start(&[&SWAP[..], &["--only", "host"]].concat());
        // SplitMix64.
        state = state.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let z = (state ^ (state >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        thread::sleep(Duration::from_millis((z ^ (z >> 27)) % most));
        on += usize::from(swaps_on() > 0);
        let pid = Pid::from_child(&child);
        let signal = [Signal::INT, Signal::TERM, Signal::HUP, Signal::KILL][round as usize % 4];
        // A terminal's signals reach the whole group.
        let sent =
            if signal == Signal::INT { kill_process_group(pid, signal) } else { kill_process(pid, signal) };
        sent.unwrap();
        let code = end(child);
        assert_ne!(code, Some(0), "round {round}: it was over before {signal:?}");
        if signal == Signal::KILL {
            // After SIGKILL nothing could undo the changes; the next run does. It measures nothing.
            let next = Command::new(WEIR).args(SWAP).args(["--only", "nothing"]).output().unwrap();
            assert_eq!(next.status.code(), Some(1), "{next:?}");
        }
        is_as_it_was(&before, &format!("round {round}, {signal:?}"));
    }
    println!("{times} times interrupted, {on} of them while it swapped");
    println!("figure: bench-swap interrupted {times} higher {times}");
    println!("figure: bench-swap left_behind 0 lower 0");
}

#[test]
fn what_a_killed_benchmark_left_goes_with_weir_off() {
    let _alone = alone();
    let name = "what_a_killed_benchmark_left_goes_with_weir_off";
    let before = machine();
    let mut child = start(&[&SWAP[..], &["--only", "ram-loop"]].concat());
    let begun = Instant::now();
    while swaps_on() == 0 {
        if child.try_wait().unwrap().is_some() {
            return println!("\nskipped: {name}: no benchmark of swap here");
        }
        assert!(begun.elapsed() < PATIENCE, "it does not swap");
        thread::sleep(Duration::from_millis(5));
    }
    kill_process(Pid::from_child(&child), Signal::KILL).unwrap();
    child.wait().unwrap();
    let runtime = std::env::temp_dir().join(format!("weir-off-{}", std::process::id()));
    let off = Command::new(WEIR).arg("off").arg("--runtime").arg(&runtime).output().unwrap();
    assert!(off.status.success(), "{off:?}");
    is_as_it_was(&before, "after weir off");
}

#[test]
fn a_trial_that_is_interrupted_leaves_no_directory() {
    let _alone = alone();
    for signal in [Signal::INT, Signal::HUP, Signal::TERM] {
        let child = start(&["try", "--seconds", "60", "--store", "host:16MiB"]);
        let begun = Instant::now();
        let of = |child: u32| format!("/proc/{child}/task/{child}/children");
        // The trial is the child of the process that was started.
        let directory = loop {
            let inner = fs::read_to_string(of(child.id())).unwrap_or_default();
            let directory = std::env::temp_dir().join(format!("weir-try-{}", inner.trim()));
            if !inner.is_empty() && directory.join("nbd.sock").exists() {
                break directory;
            }
            assert!(begun.elapsed() < PATIENCE, "no trial");
            thread::sleep(Duration::from_millis(5));
        };
        kill_process(Pid::from_child(&child), signal).unwrap();
        assert_eq!(end(child), Some(1));
        assert!(!directory.exists(), "after {signal:?}");
    }
}
