//! `weir on` and `off` on this very machine, by FUSE and a loop device. It runs as root, if both
//! are there.

mod common;

use common::{Ends, has_bar, is_plain, on_a_terminal};
use std::fs;
use std::io::{BufRead as _, BufReader, Read as _};
use std::path::{Path, PathBuf};
use std::process::{Command, Output, Stdio};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Mutex, MutexGuard};
use std::thread;
use std::time::{Duration, Instant};
use weir_daemon::control::{self, Status};

/// Settings of the kernel affect all tests, so one runs at a time.
static MACHINE: Mutex<()> = Mutex::new(());

struct Host {
    directory: PathBuf,
    weir: PathBuf,
    _machine: MutexGuard<'static, ()>,
}

impl Host {
    /// A run-time directory; `None` if this machine lacks what the tests need.
    fn new(name: &str) -> Option<Self> {
        let machine = MACHINE.lock().unwrap_or_else(std::sync::PoisonError::into_inner);
        let is_root = fs::metadata("/proc/self").is_ok_and(|own| {
            use std::os::unix::fs::MetadataExt as _;
            own.uid() == 0
        });
        if !is_root || !Path::new("/dev/fuse").exists() || !Path::new("/dev/loop-control").exists() {
            println!("skipped: needs root, /dev/fuse and loop devices");
            return None;
        }
        let directory = PathBuf::from(format!("/run/weir-on-test-{}-{name}", std::process::id()));
        Some(Host { directory, weir: env!("CARGO_BIN_EXE_weir").into(), _machine: machine })
    }

    fn weir(&self, command: &str, arguments: &[&str]) -> Command {
        let mut weir = Command::new(&self.weir);
        weir.arg(command).arg("--runtime").arg(&self.directory).args(arguments);
        weir
    }

    fn on(&self) -> Command {
        let options = ["--front", "fuse", "--store", "host", "--size", "64MiB", "--unsafe-no-flusher"];
        self.weir("on", &[&options[..], &["--allow-hibernation"]].concat())
    }

    /// Parts of the least size that host memory can be given back in: a chunk of 128 MiB.
    fn on_in_parts(&self, parts: u64) -> Command {
        let (size, parts) = (format!("{}MiB", parts * 128), parts.to_string());
        let options = ["--front", "fuse", "--store", "host", "--size", &size, "--parts", &parts];
        self.weir("on", &[&options[..], &["--unsafe-no-flusher", "--allow-hibernation"]].concat())
    }

    /// Asks the daemon of this directory for an amount of memory.
    fn ask(&self, command: &str, amount: &str) -> Command {
        let mut weir = Command::new(&self.weir);
        weir.args([command, amount, "--control"]).arg(self.directory.join("control.sock"));
        weir
    }

    /// The daemon's status, once it answers.
    fn status(&self) -> Status {
        let begun = Instant::now();
        loop {
            match control::status(&self.directory.join("control.sock")) {
                Ok(status) => return status,
                Err(error) => assert!(begun.elapsed() < Duration::from_secs(60), "{error}"),
            }
            thread::sleep(Duration::from_millis(5));
        }
    }

    /// Number of processes that run with this directory's configuration: keepers and daemons.
    fn processes(&self) -> usize {
        let config = self.directory.join("weir.toml");
        let config = config.to_str().expect("text");
        let of = |entry: fs::DirEntry| fs::read(entry.path().join("cmdline")).unwrap_or_default();
        let runs = |line: &Vec<u8>| line.split(|byte| *byte == 0).any(|word| word == config.as_bytes());
        fs::read_dir("/proc").expect("proc").flatten().map(of).filter(runs).count()
    }

    fn off(&self) -> Output {
        self.weir("off", &[]).output().expect("weir runs")
    }

    /// Everything that is on the machine because of this directory.
    fn left(&self) -> Vec<String> {
        let begun = Instant::now();
        loop {
            let left = self.left_now();
            // The kernel removes a loop device when the last program that looks at it has closed
            // it: udev looks at each.
            if left.is_empty() || begun.elapsed() > Duration::from_secs(30) {
                return left;
            }
            thread::sleep(Duration::from_millis(20));
        }
    }

    fn left_now(&self) -> Vec<String> {
        let directory = self.directory.to_str().expect("text");
        let mut left = Vec::new();
        for entry in fs::read_dir("/proc").expect("proc").flatten() {
            let command_line = fs::read(entry.path().join("cmdline")).unwrap_or_default();
            let text = String::from_utf8_lossy(&command_line).replace('\0', " ");
            if text.contains(directory) {
                left.push(text);
            }
        }
        for entry in fs::read_dir("/sys/block").expect("sysfs").flatten() {
            let file = fs::read_to_string(entry.path().join("loop/backing_file")).unwrap_or_default();
            if file.contains(directory) {
                left.push(format!("{} over {file}", entry.path().display()));
            }
        }
        let mounts = fs::read_to_string("/proc/mounts").expect("mounts");
        left.extend(mounts.lines().filter(|line| line.contains(directory)).map(String::from));
        if self.directory.exists() {
            left.push(directory.to_owned());
        }
        left
    }

    /// The swap devices of this directory, with their priorities. Other programs have others.
    fn swaps(&self) -> Vec<String> {
        let directory = self.directory.to_str().expect("text");
        let table = fs::read_to_string("/proc/swaps").expect("swap");
        let is_ours = |line: &&str| {
            let name = line.split_whitespace().next().and_then(|path| path.strip_prefix("/dev/"));
            let file = name.map(|name| fs::read_to_string(format!("/sys/block/{name}/loop/backing_file")));
            file.is_some_and(|file| file.is_ok_and(|file| file.contains(directory)))
        };
        table.lines().filter(is_ours).map(String::from).collect()
    }
}

impl Drop for Host {
    fn drop(&mut self) {
        if self.directory.exists() {
            self.off();
        }
    }
}

/// The settings that `weir on` can change.
fn settings() -> Vec<String> {
    let read = |name| fs::read_to_string(format!("/proc/sys/vm/{name}")).expect("a setting");
    ["page-cluster", "min_free_kbytes"].map(read).to_vec()
}

fn text(output: &Output) -> String {
    format!("{}{}", String::from_utf8_lossy(&output.stdout), String::from_utf8_lossy(&output.stderr))
}

#[test]
fn on_and_off_leave_the_machine_as_it_was() {
    let Some(host) = Host::new("whole") else { return };
    let before = (host.swaps(), settings());
    let on = host.on().output().expect("weir runs");
    assert!(on.status.success(), "{}", text(&on));
    assert_eq!(host.swaps().len(), 1, "{}", text(&on));
    assert_eq!(settings(), before.1, "by FUSE none has to be another");
    let again = host.on().output().expect("weir runs");
    assert!(again.status.success() && text(&again).starts_with("already on: /dev/loop"), "{}", text(&again));

    let restart = host.weir("restart", &[]).output().expect("weir runs");
    assert!(restart.status.success(), "{}", text(&restart));

    assert!(text(&on).contains("on: room for 64MiB of pages more than RAM holds; "), "{}", text(&on));
    let off = host.off();
    assert!(
        text(&off).contains("off: ") && text(&off).contains(" of pages are back in memory"),
        "{}",
        text(&off)
    );
    assert!(off.status.success(), "{}", text(&off));
    assert_eq!((host.swaps(), settings()), before);
    assert_eq!(host.left(), Vec::<String>::new());
    let again = host.off();
    assert!(again.status.success() && text(&again).starts_with("not on"), "{}", text(&again));
}

#[test]
fn a_restart_that_leaves_the_old_program_serving_is_a_failure() {
    use std::os::unix::fs::PermissionsExt as _;
    let Some(mut host) = Host::new("upgrade") else { return };
    let installed = std::env::temp_dir().join(format!("weir-on-test-{}-installed", std::process::id()));
    fs::create_dir(&installed).expect("a directory");
    let whole = host.weir.clone();
    host.weir = installed.join("weir");
    fs::copy(&whole, &host.weir).expect("a copy");
    let on = host.on().output().expect("weir runs");
    assert!(on.status.success(), "{}", text(&on));
    // A package puts a program in place that does not serve.
    let new = installed.join("new");
    fs::write(&new, "#!/bin/sh\nexit 1\n").expect("a file");
    fs::set_permissions(&new, fs::Permissions::from_mode(0o755)).expect("a mode");
    fs::rename(&new, &host.weir).expect("a file");
    host.weir = whole;
    let restart = host.weir("restart", &[]).output().expect("weir runs");
    let said = text(&restart);
    assert_eq!(restart.status.code(), Some(1), "{said}");
    assert!(said.contains("the program that is installed now does not serve, so weir "), "{said}");
    let control = host.directory.join("control.sock");
    let status = Command::new(&host.weir).args(["status", "--control"]).arg(control).output();
    let status = text(&status.expect("weir runs"));
    assert!(status.contains("the program that is installed now does not serve"), "{status}");
    assert_eq!(host.swaps().len(), 1, "the device stays");
    let off = host.off();
    assert!(off.status.success(), "{}", text(&off));
    fs::remove_dir_all(installed).expect("it is there");
}

/// `weir on` fails after its daemon's start, since it can make no loop device. So the test does not
/// depend on how long the start takes, and turns no swap on.
#[test]
fn a_start_draws_a_bar_on_a_terminal_and_nothing_into_a_pipe() {
    let Some(host) = Host::new("bar") else { return };
    let before = host.swaps();
    let hidden = "mount --bind /dev/null /dev/loop-control && exec \"$0\" \"$@\"";
    let mut on = Command::new("unshare");
    on.args(["--mount", "--propagation", "private", "sh", "-c", hidden]);
    on.arg(host.on().get_program()).args(host.on().get_args());
    let Some((code, drawn)) = on_a_terminal("bar", &on) else { return };
    assert!(code != Some(0) && drawn.contains("loop"), "{drawn:?}");
    assert!(has_bar(&drawn, "host:64MiB "), "{drawn:?}");
    let output = on.output().expect("weir runs");
    assert!(!output.status.success() && text(&output).contains("loop"), "{}", text(&output));
    assert!(is_plain(&output.stderr) && is_plain(&output.stdout), "{}", text(&output));
    assert_eq!((host.swaps(), host.left()), (before, Vec::new()));
}

/// The keepers that `weir on` has started, by its journal.
fn keepers(host: &Host) -> Vec<u32> {
    let text = fs::read(host.directory.join("state.json")).expect("a journal");
    let state: serde_json::Value = serde_json::from_slice(&text).expect("JSON");
    let steps = state["steps"].as_array().expect("steps").iter();
    steps.filter_map(|step| step["process"]["pid"].as_u64()).map(|pid| pid as u32).collect()
}

fn signal(pid: u32, signal: rustix::process::Signal) {
    let pid = rustix::process::Pid::from_raw(pid as i32).expect("a process");
    rustix::process::kill_process(pid, signal).expect("there");
}

#[test]
fn a_daemon_whose_file_carries_swap_stays_when_it_is_told_to_end() {
    let Some(host) = Host::new("told") else { return };
    let on = host.on().output().expect("weir runs");
    assert!(on.status.success(), "{}", text(&on));
    let keeper = keepers(&host)[0];
    let log = || fs::read_to_string(host.directory.join("weir.log")).expect("a log");
    signal(keeper, rustix::process::Signal::TERM);
    let begun = Instant::now();
    while !log().contains("not stopping") {
        assert!(Path::new(&format!("/proc/{keeper}")).exists(), "it went, and its pages with it: {}", log());
        assert!(begun.elapsed() < Duration::from_secs(30), "{}", log());
        thread::sleep(Duration::from_millis(20));
    }
    assert!(log().contains("is in use as swap: run swapoff /dev/loop"), "{}", log());
    assert_eq!(host.swaps().len(), 1);
    assert!(host.off().status.success());
    assert_eq!(host.left(), Vec::<String>::new());
}

#[test]
fn after_daemon_and_keeper_were_killed_off_takes_away_the_mount_and_the_device() {
    let Some(host) = Host::new("both") else { return };
    for mut on in [host.on(), host.on_in_parts(2)] {
        let on = on.output().expect("weir runs");
        assert!(on.status.success(), "{}", text(&on));
        let keeper = keepers(&host)[0];
        let children =
            fs::read_to_string(format!("/proc/{keeper}/task/{keeper}/children")).expect("a keeper");
        let daemon = children.trim().parse().expect("its daemon");
        signal(keeper, rustix::process::Signal::KILL);
        signal(daemon, rustix::process::Signal::KILL);
        let off = host.off();
        // The kernel may have swapped a page out meanwhile.
        let is_off = off.status.success() || text(&off).contains("the device is off, but the daemon");
        assert!(is_off, "{}", text(&off));
        assert_eq!(host.left(), Vec::<String>::new());
    }

    // Pages that were swapped out are lost, and `off` says so.
    let on = host.on().output().expect("weir runs");
    assert!(on.status.success(), "{}", text(&on));
    let memory: Vec<u64> = (0..4 << 20).map(|at: u64| at.wrapping_mul(0x9e37_79b9_7f4a_7c15)).collect();
    page_out(&memory);
    let used = host.swaps()[0].split_whitespace().nth(3).and_then(|used| used.parse().ok());
    let keeper = keepers(&host)[0];
    let daemon = fs::read_to_string(format!("/proc/{keeper}/task/{keeper}/children")).expect("a keeper");
    signal(keeper, rustix::process::Signal::KILL);
    signal(daemon.trim().parse().expect("its daemon"), rustix::process::Signal::KILL);
    let off = host.off();
    if used != Some(0) {
        assert_eq!(off.status.code(), Some(1), "{used:?}: {}", text(&off));
        // A killed process may still be there for a moment, and only not answer.
        let said = "the device is off, but the daemon";
        assert!(text(&off).contains(said) && text(&off).contains("lost;"), "{}", text(&off));
    }
    assert_eq!(host.left(), Vec::<String>::new());
    // No page of it may be touched any more.
    drop(memory);

    // If only the keeper is gone, the daemon goes on serving until it is turned off.
    let on = host.on().output().expect("weir runs");
    assert!(on.status.success(), "{}", text(&on));
    signal(keepers(&host)[0], rustix::process::Signal::KILL);
    assert_eq!(host.swaps().len(), 1);
    let off = host.off();
    assert!(off.status.success(), "{}", text(&off));
    assert_eq!(host.left(), Vec::<String>::new());

    // The same, with the file out of the device's sight.
    let on = host.on().output().expect("weir runs");
    assert!(on.status.success(), "{}", text(&on));
    let device = host.swaps()[0].split_whitespace().next().expect("a device").replace("/dev/", "/sys/block/");
    let unmount = Command::new("umount").arg("-l").arg(host.directory.join("disk")).status();
    assert!(unmount.expect("umount").success());
    let off = host.off();
    assert!(off.status.success(), "{}", text(&off));
    assert_eq!(host.left(), Vec::<String>::new());
    let file = fs::read_to_string(Path::new(&device).join("loop/backing_file")).unwrap_or_default();
    assert_ne!(file, "/\n", "{device} is still there");
}

#[test]
fn a_daemon_of_somebody_else_in_its_directory_is_neither_taken_for_its_own_nor_disturbed() {
    let Some(host) = Host::new("other") else { return };
    let at = |name: &str| host.directory.join(name);
    let mut other = Command::new(env!("CARGO_BIN_EXE_weir"));
    other.args(["serve", "--store", "host:8MiB", "--fuse"]).arg(at("disk"));
    fs::create_dir(&host.directory).expect("made");
    let mut other = other.arg("--control").arg(at("control.sock")).spawn().expect("weir runs");
    let begun = Instant::now();
    while !at("control.sock").exists() {
        assert!(begun.elapsed() < Duration::from_secs(30) && other.try_wait().expect("told").is_none());
        thread::sleep(Duration::from_millis(10));
    }
    let before = host.swaps();
    let on = host.on().output().expect("weir runs");
    let (socket, swaps) = (at("control.sock").exists(), host.swaps());
    host.off();
    other.kill().expect("killed");
    other.wait().expect("gone");
    // The next `weir on` works as usual.
    assert!(host.on().status().expect("weir runs").success());
    assert!(host.off().status.success());
    assert_eq!(on.status.code(), Some(1), "{}", text(&on));
    assert!(text(&on).contains("did not start answers at"), "{}", text(&on));
    assert!(socket, "its socket was removed");
    assert_eq!(swaps, before);
    assert_eq!(host.left(), Vec::<String>::new());
}

#[test]
fn names_are_those_of_where_it_was_said_and_a_file_that_it_made_goes_with_it() {
    let Some(host) = Host::new("names") else { return };
    // The directory must not be on a tmpfs: that cannot carry swap.
    let here =
        PathBuf::from(env!("CARGO_TARGET_TMPDIR")).join(format!("weir-on-test-{}", std::process::id()));
    fs::create_dir_all(&here).expect("a directory");
    fs::create_dir(&host.directory).expect("a directory");
    std::os::unix::fs::symlink(&host.directory, here.join("link")).expect("a link");
    let on = || {
        let mut on = host.on();
        on.current_dir(&here).args(["--backing", "pages"]);
        on
    };
    let output = on().output().expect("weir runs");
    assert!(output.status.success(), "{}", text(&output));
    assert!(here.join("pages").exists() && !Path::new("/pages").exists(), "{}", text(&output));
    let mut off = Command::new(env!("CARGO_BIN_EXE_weir"));
    let off = off.args(["off", "--runtime", "link"]).current_dir(&here).output().expect("weir runs");
    assert!(off.status.success(), "{}", text(&off));
    assert!(!here.join("pages").exists(), "it was made by weir on");
    assert_eq!(host.left(), Vec::<String>::new());

    // A file that was there belongs to its owner.
    fs::write(here.join("pages"), b"").expect("a file");
    fs::create_dir(&host.directory).expect("a directory");
    let mut by_link = Command::new(env!("CARGO_BIN_EXE_weir"));
    by_link.args(["on", "--runtime", "link", "--front", "fuse", "--store", "host", "--size", "64MiB"]);
    by_link.args(["--unsafe-no-flusher", "--allow-hibernation", "--backing", "pages"]).current_dir(&here);
    let output = by_link.output().expect("weir runs");
    assert!(output.status.success(), "{}", text(&output));
    let off = host.off();
    assert!(off.status.success(), "{}", text(&off));
    assert!(here.join("pages").exists());
    assert_eq!(host.left(), Vec::<String>::new());
    fs::remove_dir_all(&here).expect("removed");
}

#[test]
fn it_goes_off_and_leaves_nothing_where_its_directory_is_full() {
    let Some(host) = Host::new("full") else { return };
    let umount = || Command::new("umount").arg(&host.directory).output().expect("umount").status.success();
    fs::create_dir(&host.directory).expect("a directory");
    let mut mount = Command::new("mount");
    mount.args(["-t", "tmpfs", "-o", "size=256k,mode=700", "weir-on-test"]).arg(&host.directory);
    if !mount.status().expect("mount").success() {
        return println!("skipped: no tmpfs can be mounted here");
    }
    let fill = |but: usize| {
        let mut file = fs::File::create(host.directory.join("fill")).expect("a file");
        while std::io::Write::write(&mut file, &[1; 4096]).is_ok_and(|written| written == 4096) {}
        let bytes = file.metadata().expect("a file").len() as usize;
        file.set_len((bytes - 4096 * but) as u64).expect("shorter");
    };
    let before = (host.swaps(), settings());
    let is_as_before = |when: &str| {
        let after = (host.swaps(), settings());
        assert_eq!(after, before, "{when}");
        let directory = host.directory.to_str().expect("text");
        let left = || {
            host.left_now().into_iter().filter(|left| left != directory && !left.starts_with("weir-on-test "))
        };
        let begun = Instant::now();
        while left().next().is_some() {
            assert!(begun.elapsed() < Duration::from_secs(30), "{when}: {:?}", left().collect::<Vec<_>>());
            thread::sleep(Duration::from_millis(20));
        }
        fs::remove_file(host.directory.join("fill")).expect("removed");
    };
    let on = host.on().output().expect("weir runs");
    assert!(on.status.success(), "{}", text(&on));
    fill(0);
    let off = host.off();
    assert!(off.status.success(), "{}", text(&off));
    is_as_before("off");
    for pages in 0..4 {
        fill(pages);
        let on = host.on().output().expect("weir runs");
        if on.status.success() {
            let off = host.off();
            assert!(off.status.success(), "{}", text(&off));
        } else {
            assert!(
                text(&on).contains("No space left") && !text(&on).contains("run weir off"),
                "{}",
                text(&on)
            );
        }
        is_as_before(&format!("on, with {pages} pages left"));
    }
    assert!(umount());
    fs::remove_dir(&host.directory).expect("removed");
}

#[test]
fn off_removes_no_directory_that_it_did_not_make() {
    let Some(host) = Host::new("empty") else { return };
    fs::create_dir(&host.directory).expect("made");
    let mode = |mode| {
        use std::os::unix::fs::PermissionsExt as _;
        fs::set_permissions(&host.directory, fs::Permissions::from_mode(mode)).expect("its mode");
    };
    mode(0o755);
    assert!(host.off().status.success() && host.directory.exists(), "somebody's empty directory");
    mode(0o700);
    assert!(host.off().status.success() && !host.directory.exists(), "what a killed weir on leaves");
}

#[test]
fn a_device_in_parts_is_given_back_and_taken_part_by_part() {
    let Some(host) = Host::new("parts") else { return };
    let before = (host.swaps(), settings());
    let on = host.on_in_parts(3).output().expect("weir runs");
    assert!(on.status.success(), "{}", text(&on));
    let ours = || host.swaps().len();
    assert_eq!(ours(), 3);
    let ask = |command: &str, amount: &str| {
        let output = host.ask(command, amount).output().expect("weir runs");
        (output.status.code(), text(&output))
    };
    let refused = ask("give-back", "1GiB");
    assert!(refused.0 == Some(1) && refused.1.contains("ask for that, or for all"), "{refused:?}");
    for (command, amount, left) in [
        ("give-back", "129MiB", 1),
        ("take", "1MiB", 2),
        ("give-back", "all", 0),
        ("take", "all", 3),
        ("give-back", "128MiB", 2),
        // Memory that was away before a sleep stays away after it.
        ("give-back", "--sleep", 0),
        ("take", "--sleep", 2),
        // Once a user asks for it, the memory is not away for the sleep alone.
        ("give-back", "--sleep", 0),
        ("give-back", "all", 0),
        ("take", "--sleep", 0),
        ("take", "all", 3),
    ] {
        let asked = ask(command, amount);
        assert!(asked.0 == Some(0), "{command} {amount}: {}", asked.1);
        assert_eq!(ours(), left, "{command} {amount}: {}", asked.1);
        let status = host.status();
        let away = 3 - left as u64;
        assert_eq!((status.volumes.len(), status.stores[0].chunks.given_back), (left, away), "{}", asked.1);
    }
    let off = host.off();
    assert!(off.status.success(), "{}", text(&off));
    assert_eq!((host.swaps(), settings()), before);
    assert_eq!(host.left(), Vec::<String>::new());
}

/// Memory that a thread pages out and reads back again and again, until it is told to stop.
fn page_out_and_verify(megabytes: usize, stop: &AtomicBool) -> u64 {
    let words = megabytes << 17;
    let number = |at: usize| (at as u64 ^ 0x5eed).wrapping_mul(0x9e37_79b9_7f4a_7c15);
    let memory: Vec<u64> = (0..words).map(number).collect();
    let mut rounds = 0;
    while !stop.load(Ordering::Relaxed) {
        page_out(&memory);
        for (at, word) in memory.iter().enumerate() {
            assert_eq!(*word, number(at), "word {at} in round {rounds}");
        }
        rounds += 1;
    }
    rounds
}

/// Asks the kernel to swap the memory out.
fn page_out(memory: &[u64]) {
    // SAFETY: the range belongs to this slice; paging it out does not change its content.
    unsafe {
        let from = memory.as_ptr().addr().next_multiple_of(4096) - memory.as_ptr().addr();
        let start = memory.as_ptr().byte_add(from).cast_mut().cast();
        let bytes = (size_of_val(memory) - from) & !4095;
        rustix::mm::madvise(start, bytes, rustix::mm::Advice::LinuxPageOut).expect("paged out");
    }
}

#[test]
fn parts_of_one_daemon_come_and_go_under_load_and_every_page_survives_when_it_is_killed() {
    let Some(host) = Host::new("volumes") else { return };
    let on = host.on_in_parts(4).output().expect("weir runs");
    assert!(on.status.success(), "{}", text(&on));
    assert_eq!((host.swaps().len(), host.processes()), (4, 2), "one daemon and its keeper");
    // Before Linux 6.9 a FUSE file does not outlive its daemon.
    let outlives = host.weir("restart", &[]).output().expect("weir runs").status.success();
    let stop = AtomicBool::new(false);
    thread::scope(|scope| {
        let load = scope.spawn(|| page_out_and_verify(48, &stop));
        let ends = Ends(&stop);
        let steps = [
            ("give-back", "256MiB", 2),
            ("take", "all", 4),
            ("give-back", "384MiB", 1),
            ("take", "128MiB", 2),
            ("take", "all", 4),
        ];
        for (round, milliseconds) in [None, Some(0), Some(20), Some(80)].into_iter().enumerate() {
            let Some(milliseconds) = milliseconds.map_or(Some(None), |it| outlives.then_some(Some(it)))
            else {
                break;
            };
            for (command, amount, left) in steps {
                let child = host.ask(command, amount);
                let child =
                    { child }.stdout(Stdio::piped()).stderr(Stdio::piped()).spawn().expect("weir runs");
                if let Some(milliseconds) = milliseconds {
                    let daemon = host.status().pid;
                    thread::sleep(Duration::from_millis(milliseconds));
                    signal(daemon, rustix::process::Signal::KILL);
                }
                let output = child.wait_with_output().expect("it ends");
                let said = format!("round {round}, {command} {amount}: {}", text(&output));
                assert!(output.status.success(), "{said}");
                assert_eq!((host.swaps().len(), host.status().volumes.len()), (left, left), "{said}");
            }
        }
        drop(ends);
        assert!(load.join().expect("no page came back wrong") > 0);
    });
    assert_eq!((host.swaps().len(), host.processes()), (4, 2));
    assert!(host.off().status.success());
    assert_eq!(host.left(), Vec::<String>::new());
}

#[test]
fn what_a_killed_give_back_or_take_has_half_done_is_finished_by_the_next_command() {
    let Some(host) = Host::new("half-part") else { return };
    let on = host.on_in_parts(2).output().expect("weir runs");
    assert!(on.status.success(), "{}", text(&on));
    let killed = |command: &str, milliseconds: u64| {
        let mut child = host.ask(command, "all").stdout(Stdio::null()).spawn().expect("weir runs");
        thread::sleep(Duration::from_millis(milliseconds));
        child.kill().expect("killed");
        child.wait().expect("gone");
    };
    for milliseconds in [0, 10, 20, 40, 60, 80, 120, 160, 240] {
        for (before, after, left) in [("give-back", "take", 2), ("take", "give-back", 0)] {
            // The other command, so that the killed one has all of it to do.
            let ready =
                host.ask(if left == 2 { "take" } else { "give-back" }, "all").output().expect("weir runs");
            assert!(ready.status.success(), "{}", text(&ready));
            killed(before, milliseconds);
            let output = host.ask(after, "all").output().expect("weir runs");
            let said = format!("{before} killed after {milliseconds} ms: {}", text(&output));
            assert!(output.status.success(), "{said}");
            let status = host.status();
            let found =
                (host.swaps().len(), status.volumes.len(), status.stores[0].chunks.given_back as usize);
            assert_eq!(found, (left, left, 2 - left), "{said}");
        }
    }
    assert!(host.off().status.success());
    assert_eq!(host.left(), Vec::<String>::new());
}

#[test]
fn off_ends_the_daemons_of_parts_that_an_earlier_weir_made() {
    let Some(host) = Host::new("earlier") else { return };
    // That weir had a daemon for each part, the second one in the directory 2.
    let second = host.directory.join("2");
    let on = host.on().output().expect("weir runs");
    assert!(on.status.success(), "{}", text(&on));
    let other = host.on();
    let other: Vec<_> = other.get_args().map(std::ffi::OsStr::to_owned).collect();
    let other = other.into_iter().map(|it| if it == host.directory { second.clone().into() } else { it });
    let on = Command::new(&host.weir).args(other).output().expect("weir runs");
    assert!(on.status.success(), "{}", text(&on));
    let read = |directory: &Path| -> serde_json::Value {
        serde_json::from_slice(&fs::read(directory.join("state.json")).expect("a journal")).expect("JSON")
    };
    let (mut state, of_second) = (read(&host.directory), read(&second));
    let steps = state["steps"].as_array_mut().expect("steps");
    steps.extend(of_second["steps"].as_array().expect("steps").iter().cloned());
    steps.push(serde_json::json!({
        "step": "away", "directory": host.directory.join("3"), "config": "", "front": "fuse", "priority": 7,
        "bytes": 4096, "asleep": false,
    }));
    state["parts"] = 3.into();
    fs::write(host.directory.join("state.json"), state.to_string()).expect("written");
    fs::remove_file(second.join("state.json")).expect("it is there");
    assert_eq!((host.swaps().len(), host.processes()), (2, 2));
    for command in ["give-back", "take"] {
        let output = host.ask(command, "all").output().expect("weir runs");
        assert!(
            text(&output).contains("weir off, then weir on makes them parts of one"),
            "{}",
            text(&output)
        );
    }
    let restart = host.weir("restart", &[]).output().expect("weir runs");
    assert!(restart.status.success(), "{}", text(&restart));
    let off = host.off();
    assert!(off.status.success(), "{}", text(&off));
    assert_eq!(host.left(), Vec::<String>::new());
}

#[test]
fn an_off_that_fails_leaves_every_part_as_it_was_and_forgets_none() {
    let Some(host) = Host::new("forgets") else { return };
    let before = host.swaps();
    let on = host.on_in_parts(3).output().expect("weir runs");
    assert!(on.status.success(), "{}", text(&on));
    let ask = |command: &str, amount: &str| {
        let output = host.ask(command, amount).output().expect("weir runs");
        assert!(output.status.success(), "{command} {amount}: {}", text(&output));
        host.swaps().len()
    };
    assert_eq!(ask("give-back", "128MiB"), 2);
    // A user without administrator rights cannot turn swap off.
    let mut off = Command::new("setpriv");
    off.args(["--bounding-set", "-sys_admin", env!("CARGO_BIN_EXE_weir"), "off", "--runtime"]);
    let off = off.arg(&host.directory).output().expect("setpriv");
    assert!(!off.status.success() && text(&off).contains("stays on"), "{}", text(&off));
    assert_eq!(host.swaps().len(), 2);
    assert_eq!(ask("take", "all"), 3, "the part that was away is still known");
    // A `weir off` that cannot write the note does nothing, even if all of swap was off by then.
    let nowhere = host.directory.join("nowhere/note");
    let off = host.weir("off", &["--remember", nowhere.to_str().expect("text")]).output().expect("weir runs");
    assert!(!off.status.success() && text(&off).contains("cannot write"), "{}", text(&off));
    assert_eq!(host.swaps().len(), 3, "{}", text(&off));
    assert_eq!(ask("give-back", "all"), 0);
    assert_eq!(ask("take", "all"), 3);
    assert!(host.off().status.success());
    assert_eq!(host.swaps(), before);
    assert_eq!(host.left(), Vec::<String>::new());
}

#[test]
fn it_goes_off_on_a_low_battery_and_comes_back_with_mains_as_it_was() {
    let Some(host) = Host::new("battery") else { return };
    let before = host.swaps();
    let supplies = std::env::temp_dir().join(format!("weir-supplies-{}", std::process::id()));
    let supply = |name: &str, key: &str, value: &str| {
        fs::create_dir_all(supplies.join(name)).expect("a supply");
        fs::write(supplies.join(name).join(key), value).expect("a supply");
    };
    let look = || {
        let output = host.weir("battery", &["--supplies", supplies.to_str().expect("text")]).output();
        let output = output.expect("weir runs");
        assert!(output.status.success(), "{}", text(&output));
        text(&output)
    };
    supply("AC", "type", "Mains\n");
    supply("AC", "online", "0\n");
    supply("BAT0", "type", "Battery\n");
    supply("BAT0", "capacity", "29\n");
    assert_eq!(look(), "", "what is off stays off");
    let on = host.on().args(["--priority", "77"]).output().expect("weir runs");
    assert!(on.status.success(), "{}", text(&on));
    let said = look();
    assert!(said.contains("below 30 %"), "{said}");
    assert_eq!(host.swaps(), before);
    assert_eq!(look(), "", "not before mains is back");
    supply("AC", "online", "1\n");
    let said = look();
    assert!(said.contains("mains is back"), "{said}");
    assert!(host.swaps().iter().any(|line| line.ends_with("\t77")), "{:?}", host.swaps());

    // A charger that is connected while Weir turns off starts no second run.
    supply("AC", "online", "0\n");
    let mut battery = host.weir("battery", &["--supplies", supplies.to_str().expect("text")]);
    let mut battery = battery.stdout(Stdio::piped()).spawn().expect("weir runs");
    let mut said = String::new();
    let mut lines = BufReader::new(battery.stdout.take().expect("a pipe"));
    lines.read_line(&mut said).expect("text");
    assert!(said.contains("turning off"), "{said}");
    supply("AC", "online", "1\n");
    lines.read_to_string(&mut said).expect("text");
    assert!(battery.wait().expect("ended").success() && said.contains("mains is back"), "{said}");
    assert!(host.swaps().iter().any(|line| line.ends_with("\t77")), "{:?}", host.swaps());

    assert!(host.off().status.success());
    assert_eq!(look(), "", "what the user turned off stays off");
    fs::remove_dir_all(&supplies).expect("removed");
}

#[test]
fn a_swapoff_says_where_another_is_at_work_and_every_page_comes_back() {
    let Some(host) = Host::new("elsewhere") else { return };
    let numbers =
        |seed: u64| (0..32 << 20).map(move |at: u64| (at ^ seed).wrapping_mul(0x9e37_79b9_7f4a_7c15));
    let memory: Vec<u64> = numbers(7).collect();
    {
        let options = [
            "--front",
            "fuse",
            "--store",
            "host",
            "--size",
            "384MiB",
            "--unsafe-no-flusher",
            "--allow-hibernation",
        ];
        let on = host.weir("on", &options).output().expect("weir runs");
        assert!(on.status.success(), "{}", text(&on));
        page_out(&memory);
        let swap = host.swaps()[0].clone();
        let mut columns = swap.split_whitespace();
        let device = columns.next().expect("a device");
        let used: u64 = columns.nth(2).expect("a number").parse().expect("KiB");
        if used < 128 << 10 {
            return println!("skipped: only {used} KiB were swapped to {device}, others have swap too");
        }
        // The device is as a killed weir off would leave it.
        let swapoff = |_| {
            Command::new(env!("CARGO_BIN_EXE_weir"))
                .args(["off", "--swapoff", device])
                .spawn()
                .expect("weir runs")
        };
        let at_once: Vec<_> = (0..4).map(swapoff).collect();
        let codes: Vec<_> = at_once.into_iter().map(|mut child| child.wait().expect("gone").code()).collect();
        assert!(codes.contains(&Some(0)) && codes.contains(&Some(4)), "{codes:?}");
        let off = host.off();
        assert!(off.status.success(), "{}", text(&off));
        assert!(numbers(7).eq(memory.iter().copied()), "a page came back wrong");
        assert_eq!(host.left(), Vec::<String>::new());
    }
}

#[test]
fn what_was_turned_off_for_a_sleep_comes_back_as_it_was_unless_the_user_decides_otherwise() {
    let Some(host) = Host::new("sleep") else { return };
    let note = host.directory.with_extension("sleep");
    let note_text = note.to_str().expect("text");
    let sleep = || host.weir("off", &["--remember", note_text]).output().expect("weir runs");
    let wake = || {
        let mut weir = Command::new(env!("CARGO_BIN_EXE_weir"));
        let output = weir.args(["on", "--again", note_text]).output().expect("weir runs");
        assert!(output.status.success(), "{}", text(&output));
    };
    let on = host.on().args(["--priority", "78"]).output().expect("weir runs");
    assert!(on.status.success(), "{}", text(&on));
    let slept = sleep();
    assert!(slept.status.success() && note.exists(), "{}", text(&slept));
    assert_eq!(host.swaps(), Vec::<String>::new());
    wake();
    assert!(host.swaps().iter().any(|line| line.ends_with("\t78")), "{:?}", host.swaps());
    assert!(!note.exists());
    assert!(sleep().status.success());
    assert!(host.off().status.success(), "the user's last word");
    wake();
    assert!(sleep().status.success() && !note.exists(), "what was off is not turned on");
    assert_eq!(host.swaps(), Vec::<String>::new());
    assert_eq!(host.left(), Vec::<String>::new());
}

#[test]
fn what_was_turned_off_for_a_sleep_comes_back_also_where_the_rest_could_not_be_undone() {
    let Some(host) = Host::new("half") else { return };
    let note = host.directory.with_extension("sleep");
    let note_text = note.to_str().expect("text");
    let sleep = || host.weir("off", &["--remember", note_text]).output().expect("weir runs");
    // The file cannot be removed, since it is a directory.
    let obstacle = host.directory.join("obstacle");
    let on_with_obstacle = || {
        let on = host.on().args(["--priority", "79"]).output().expect("weir runs");
        assert!(on.status.success(), "{}", text(&on));
        fs::create_dir(&obstacle).expect("a directory");
        let journal = host.directory.join("state.json");
        let mut state: serde_json::Value =
            serde_json::from_slice(&fs::read(&journal).expect("a journal")).expect("JSON");
        let step = serde_json::json!({ "step": "file", "path": obstacle });
        state["steps"].as_array_mut().expect("steps").push(step);
        fs::write(&journal, state.to_string()).expect("written");
    };
    on_with_obstacle();
    for _ in 0..2 {
        let slept = sleep();
        assert!(!slept.status.success() && text(&slept).contains("cannot remove"), "{}", text(&slept));
        assert_eq!(host.swaps(), Vec::<String>::new());
        assert!(note.exists(), "nobody knows that it is to come back");
    }
    fs::remove_dir(&obstacle).expect("removed");
    let mut wake = Command::new(env!("CARGO_BIN_EXE_weir"));
    let woken = wake.args(["on", "--again", note_text]).output().expect("weir runs");
    assert!(woken.status.success() && !note.exists(), "{}", text(&woken));
    assert!(host.swaps().iter().any(|line| line.ends_with("\t79")), "{:?}", host.swaps());
    assert!(host.off().status.success());

    // A device that the user has turned off does not come back because a sleep did the rest.
    on_with_obstacle();
    assert!(!host.off().status.success() && !sleep().status.success());
    fs::remove_dir(&obstacle).expect("removed");
    assert!(sleep().status.success() && !note.exists());
    assert_eq!(host.left(), Vec::<String>::new());
}

#[test]
fn what_a_killed_weir_on_has_done_by_then_is_undone_by_weir_off() {
    let Some(host) = Host::new("killed") else { return };
    let before = (host.swaps(), settings());
    for milliseconds in [0, 5, 10, 20, 40, 60, 80, 120, 160, 240] {
        let mut on = host.on().stdout(Stdio::null()).spawn().expect("weir runs");
        thread::sleep(Duration::from_millis(milliseconds));
        on.kill().expect("killed");
        on.wait().expect("gone");
        let off = host.off();
        assert!(off.status.success(), "killed after {milliseconds} ms: {}", text(&off));
        assert_eq!(host.left(), Vec::<String>::new(), "killed after {milliseconds} ms");
        let after = (host.swaps(), settings());
        assert_eq!(after, before, "killed after {milliseconds} ms");
    }
}

#[test]
fn a_step_that_fails_takes_back_those_before_it() {
    let Some(host) = Host::new("fails") else { return };
    let before = host.swaps();
    // The kernel needs a second page: a device of one page is no swap area.
    let mut on = host.weir("on", &["--front", "fuse", "--store", "host:4KiB", "--unsafe-no-flusher"]);
    let on = on.arg("--allow-hibernation").output().expect("weir runs");
    assert_eq!(on.status.code(), Some(1), "{}", text(&on));
    assert!(text(&on).contains("cannot make a swap area on /dev/loop"), "{}", text(&on));
    assert_eq!(host.left(), Vec::<String>::new());
    assert_eq!(host.swaps(), before);
}

#[test]
fn without_the_flusher_it_is_refused_and_nothing_is_changed() {
    let Some(host) = Host::new("refused") else { return };
    let status = fs::read_to_string("/proc/self/status").expect("status");
    let mask = status.lines().find_map(|line| line.strip_prefix("CapEff:")).expect("capabilities");
    if u64::from_str_radix(mask.trim(), 16).expect("a number") >> 24 & 1 == 1 {
        println!("skipped: this system grants CAP_SYS_RESOURCE");
        return;
    }
    let on = host.weir("on", &["--store", "host", "--size", "64MiB"]).output().expect("weir runs");
    assert_eq!(on.status.code(), Some(1));
    assert!(text(&on).contains("--unsafe-no-flusher"), "{}", text(&on));
    assert_eq!(host.left(), Vec::<String>::new());
}
