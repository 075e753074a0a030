//! The keeper: acknowledged pages survive the daemon, however and whenever it dies.
//!
//! `tests/torture keeper-killed` is the full scale; `WEIR_KILLS` and `WEIR_SEED` choose by hand.

mod common;

use common::{Daemon, Ends, KILLS, PATIENCE, Stalls, WEIR, allow_cores, has_lavapipe, kill, kills, number};
use rustix::process::Pid;
use std::fs;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::thread;
use std::time::{Duration, Instant};

const PAGE: usize = 4096;
const PAGES: u64 = 2000;
const WRITERS: u64 = 2;
/// Number of pages in a row that belong to one writer, which writes them one by one or at once.
const RUN: u64 = 8;

fn start(name: &str, flags: &[&str]) -> Daemon {
    allow_cores();
    let flags = [&["--keeper"], flags].concat();
    Daemon::spawn(name, &flags, Daemon::with_nbd)
}

/// A random number generator: SplitMix64.
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

/// The possible generations of a page, as its one writer knows them: the acknowledged one, and
/// those that were sent to daemons which died meanwhile.
#[derive(Clone)]
struct Known(Vec<u64>);

impl Known {
    fn sent(&mut self, generation: u64) {
        self.0.push(generation);
    }

    fn acknowledged(&mut self, generation: u64) {
        self.0 = vec![generation];
    }

    /// Whether the bytes that were read are possible. From then on only they are: a dead daemon's
    /// write takes effect before its end, or never.
    fn allows(&mut self, page: u64, bytes: &[u8]) -> bool {
        let is = |generation: u64| match generation {
            0 => bytes.iter().all(|byte| *byte == 0),
            _ => bytes == stamped(page, generation),
        };
        let found = self.0.iter().copied().find(|generation| is(*generation));
        self.0 = found.into_iter().collect();
        found.is_some()
    }
}

#[test]
fn a_daemon_takes_nothing_over_from_a_keeper_of_another_format_and_says_so_in_one_line() {
    use rustix::net::{AddressFamily, SendFlags, SocketFlags, SocketType, send, socketpair};
    use std::os::fd::AsRawFd as _;
    for format in [1, 3] {
        let (keeper, daemon) =
            socketpair(AddressFamily::UNIX, SocketType::SEQPACKET, SocketFlags::CLOEXEC, None).unwrap();
        rustix::io::fcntl_setfd(&daemon, rustix::io::FdFlags::empty()).unwrap();
        send(&keeper, format!("begin {format}").as_bytes(), SendFlags::empty()).unwrap();
        let number = daemon.as_raw_fd().to_string();
        let mut refused = Daemon::spawn(&format!("format-{format}"), &["--store", "host:1MiB"], |it, at| {
            Daemon::with_nbd(it, at);
            it.env("WEIR_KEEPER_FD", number).stderr(std::process::Stdio::piped());
        });
        assert!(!refused.comes_up(|it| it.directory.join("nbd").exists()), "it serves");
        let mut said = String::new();
        std::io::Read::read_to_string(refused.process.stderr.as_mut().unwrap(), &mut said).unwrap();
        let line = format!(
            "the keeper holds pages in format \"{format}\", this weir knows 2; to change the program run weir off, then weir on"
        );
        assert!(said.contains(&line) && said.lines().count() == 1, "{said}");
    }
}

#[test]
fn a_page_that_was_read_as_new_is_never_allowed_to_be_old_again() {
    let mut page = Known(vec![3]);
    page.sent(4);
    page.sent(5);
    assert!(page.clone().allows(7, &stamped(7, 3)), "neither took effect");
    assert!(page.allows(7, &stamped(7, 4)), "the first of them did");
    for generation in [3, 5] {
        assert!(!page.clone().allows(7, &stamped(7, generation)));
    }
    assert!(page.allows(7, &stamped(7, 4)) && !page.allows(8, &stamped(7, 4)));
}

#[test]
fn the_keeper_runs_from_memory_so_that_an_upgrade_leaves_no_removed_file_in_use() {
    let mut scene = start("memory", &["--store", "host:8MiB"]);
    drop(scene.connect());
    let link = |what: &str| fs::read_link(format!("/proc/{}/{what}", scene.process.id())).unwrap();
    assert!(link("exe").starts_with("/memfd:weir (deleted)"), "{}", link("exe").display());
    let daemon = scene.daemon().unwrap().as_raw_nonzero().get() as u32;
    for process in [scene.process.id(), daemon] {
        assert_eq!(fs::read_to_string(format!("/proc/{process}/comm")).unwrap(), "weir\n");
    }
    assert_eq!(scene.terminate(), Some(0));
}

/// The final kill at shutdown passes over names that begin with @.
#[test]
fn keeper_and_daemon_of_swap_have_their_name_with_and_without_a_copy_in_memory() {
    // The copy is larger than the limit of file sizes. That acts like a system that lets no file in
    // memory be executed.
    for (name, limit) in [("copy", "unlimited"), ("no-copy", "32768")] {
        let directory = std::env::temp_dir().join(format!("weir-{}-{name}", std::process::id()));
        fs::create_dir_all(&directory).unwrap();
        let script = format!("trap '' XFSZ; ulimit -S -f {limit}; exec \"$0\" \"$@\"");
        let mut command = Command::new("sh");
        command.args(["-c", &script, WEIR, "serve", "--swap", "--unsafe-no-flusher", "--keeper"]);
        command.args(["--store", "host:1MiB", "--control"]).arg(directory.join("control"));
        Daemon::with_nbd(&mut command, &directory);
        let log = directory.join("log");
        let process = command.stderr(fs::File::create(&log).unwrap()).spawn().unwrap();
        let mut scene = Daemon { directory, process };
        drop(scene.connect());
        let is_copy = |process: u32| {
            fs::read_link(format!("/proc/{process}/exe")).unwrap().starts_with("/memfd:weir (deleted)")
        };
        assert_eq!(is_copy(scene.process.id()), name == "copy", "{}", fs::read_to_string(&log).unwrap());
        let daemon = scene.daemon().unwrap().as_raw_nonzero().get() as u32;
        for process in [scene.process.id(), daemon] {
            let line = fs::read(format!("/proc/{process}/cmdline")).unwrap();
            assert!(line.starts_with(b"@weir\0serve\0"), "{name}: {}", String::from_utf8_lossy(&line));
        }
        let said = fs::read_to_string(&log).unwrap().matches("cannot run from memory").count();
        assert_eq!(said, usize::from(name == "no-copy"), "{}", fs::read_to_string(&log).unwrap());
        assert_eq!(scene.terminate(), Some(0));
    }
}

#[test]
fn a_limit_of_file_sizes_below_the_page_map_is_an_error_and_no_signal() {
    let mut command = Command::new("sh");
    command.args(["-c", "ulimit -f 32768; exec \"$0\" \"$@\"", WEIR, "serve", "--store", "host:1MiB"]);
    Daemon::with_nbd(&mut command, &std::env::temp_dir().join(format!("weir-{}-limit", std::process::id())));
    let output = command.output().unwrap();
    let said = String::from_utf8_lossy(&output.stderr);
    assert_eq!(output.status.code(), Some(1), "{said}");
    assert!(
        said.contains("cannot map 16.0GiB of addresses for the page map: limits must allow ")
            && said.contains("File too large"),
        "{said}"
    );
}

/// The reader stands still, like a journal that was swapped out to the device that is down.
#[test]
fn a_daemon_is_replaced_though_nobody_takes_its_lines() {
    let (_nobody_reads, stderr) = rustix::pipe::pipe().unwrap();
    rustix::io::ioctl_fionbio(&stderr, true).unwrap();
    while rustix::io::write(&stderr, &[b'x'; PAGE]).is_ok() {}
    rustix::io::ioctl_fionbio(&stderr, false).unwrap();
    let scene = Daemon::spawn("mute", &["--keeper", "--store", "host:8MiB"], |command, directory| {
        Daemon::with_nbd(command, directory);
        command.stderr(stderr);
    });
    let page = stamped(7, 1);
    scene.connect().write(7 * PAGE as u64, &page).unwrap();
    let daemon = scene.daemon().unwrap();
    rustix::process::kill_process(daemon, rustix::process::Signal::KILL).unwrap();
    eventually("the end of the daemon", || scene.daemon() != Some(daemon));
    assert!(scene.connect().read(7 * PAGE as u64, PAGE as u32).unwrap() == page);
}

/// Otherwise a keeper on tmpfs would wait for the device that it is to bring back.
#[test]
fn what_the_next_daemon_reads_is_locked_in_the_keeper() {
    let directory = std::env::temp_dir().join(format!("weir-{}-resident", std::process::id()));
    fs::create_dir_all(&directory).unwrap();
    let file = directory.join("weir.toml");
    let [nbd, control] = ["nbd", "control"].map(|name| directory.join(name));
    let text = "store = ['host:1MiB']\nkeeper = true\n";
    fs::write(&file, format!("{text}nbd = ['unix:{}']\ncontrol = '{}'\n", nbd.display(), control.display()))
        .unwrap();
    let process = Command::new(WEIR).args(["serve", "--config"]).arg(&file).spawn().unwrap();
    let mut scene = Daemon { directory, process };
    drop(scene.connect());
    let read_maps = || fs::read_to_string(format!("/proc/{}/smaps", scene.process.id())).unwrap();
    // The keeper learns a little later than clients that the daemon serves.
    eventually("the configuration in the keeper", || read_maps().contains("weir.toml"));
    let maps = read_maps();
    for name in ["/memfd:weir (deleted)", "weir.toml"] {
        let mut lines = maps.lines().skip_while(|line| !(line.contains(" r--s ") && line.ends_with(name)));
        let mut of = |key: &str| {
            let line = lines.find(|line| line.starts_with(key));
            line.unwrap_or_else(|| panic!("{name} is not held in memory")).split_once(':').unwrap().1.trim()
        };
        let (size, present, flags) = (of("Size:"), of("Rss:"), of("VmFlags:"));
        assert_eq!(present, size, "{name}");
        assert!(flags.split(' ').any(|flag| flag == "lo"), "{name} is not locked: {flags}");
    }
    assert_eq!(scene.terminate(), Some(0));
}

fn eventually(what: &str, holds: impl Fn() -> bool) {
    let begun = Instant::now();
    while !holds() {
        assert!(begun.elapsed() < PATIENCE, "{what} did not come in {PATIENCE:?}");
        thread::sleep(Duration::from_millis(1));
    }
}

#[test]
fn every_acknowledged_page_survives_kills_at_random_moments() {
    survive(&start("kills", &["--store", "host:8MiB"]), "host");
}

#[test]
fn compressed_pages_survive_too() {
    let mut scenes = vec![("lz4", "host:8MiB"), ("zstd", "host:8MiB")];
    if has_lavapipe() {
        scenes.push(("zstd", "vram:lavapipe?size=8MiB&chunk=1MiB"));
    } else {
        println!(
            "skipped: compressed_pages_survive_too: lavapipe, Mesa's software renderer (package mesa-vulkan-drivers)"
        );
    }
    for (algorithm, store) in scenes {
        let name = format!("{algorithm}-{}", &store[..4]);
        let scene = start(&name, &["--store", store, "--compress", algorithm]);
        survive(&scene, &name);
        let status = scene.status();
        let compress = &status["volume"]["compress"];
        assert_eq!(compress["algorithm"], algorithm);
        let (packed, ratio) = (compress["packed"].as_u64().unwrap(), compress["ratio"].as_f64().unwrap());
        assert!(packed > PAGES / 4 && ratio > 1.2, "{compress}");
        assert_eq!(status["protection"]["io_allocations"], 0);
    }
}

#[test]
fn pages_in_gpu_memory_survive_too() {
    if !has_lavapipe() {
        println!("skipped: no lavapipe, Mesa's software renderer (package mesa-vulkan-drivers)");
        return;
    }
    survive(&start("vram-kills", &["--store", "vram:lavapipe?size=8MiB&chunk=1MiB"]), "vram");
}

/// A libcuda without a GPU, in whose `cuInit` a daemon waits while the returned file exists.
fn with_slow_cuda(command: &mut Command, directory: &Path) -> PathBuf {
    let source = concat!(env!("CARGO_MANIFEST_DIR"), "/../weir-store/tests/fake_cuda/fake_cuda.c");
    let built = Command::new("cc")
        .args(["-shared", "-fPIC", "-O1", "-pthread", "-w", "-DBATCH_13", "-o"])
        .arg(directory.join("libcuda.so.1"))
        .arg(source)
        .status()
        .expect("cc, the C compiler");
    assert!(built.success(), "cc {source}");
    let held = directory.join("held");
    command.env("LD_LIBRARY_PATH", directory).env("FAKE_CUDA_HOLDS", "cuInit").env("FAKE_CUDA_HELD", &held);
    held
}

#[test]
fn the_next_daemon_serves_before_cuda_is_open_and_by_it_afterwards() {
    if !has_lavapipe() {
        println!("skipped: no lavapipe, Mesa's software renderer (package mesa-vulkan-drivers)");
        return;
    }
    let mut held = PathBuf::new();
    let store = "vram:lavapipe?size=8MiB&chunk=1MiB&path=engine&ring=off";
    let mut scene = Daemon::spawn("late", &["--keeper", "--store", store], |command, directory| {
        Daemon::with_nbd(command, directory);
        held = with_slow_cuda(command, directory);
        command.stderr(fs::File::create(directory.join("log")).unwrap());
    });
    let log = scene.directory.join("log");
    let said = |what: &str| fs::read_to_string(&log).unwrap().matches(what).count();
    let mut client = scene.connect();
    (0..64).for_each(|page| client.write(page * PAGE as u64, &stamped(page, 1)).unwrap());
    fs::write(&held, "").unwrap();
    // The second daemon dies meanwhile: parts that are not open yet need no takeover.
    for round in 1..3 {
        let daemon = scene.daemon().unwrap();
        rustix::process::kill_process(daemon, rustix::process::Signal::KILL).unwrap();
        eventually("the end of the daemon", || scene.daemon() != Some(daemon));
        let mut client = scene.connect();
        for page in 0..64 {
            assert!(client.read(page * PAGE as u64, PAGE as u32).unwrap() == stamped(page, 1), "page {page}");
        }
        client.write(64 * PAGE as u64, &stamped(64, round)).unwrap();
        eventually("the line about the take-over", || said("taken over in ") as u64 == round);
        let text = fs::read_to_string(&log).unwrap();
        let stages = text.lines().filter(|line| line.contains("taken over in ") && line.contains("driver "));
        assert_eq!((stages.count(), said("all of it open")), (round as usize, 0));
    }
    let mut client = scene.connect();
    fs::remove_file(&held).unwrap();
    eventually("the rest", || said("all of it open after ") == 1);
    for page in 0..65 {
        let generation = if page == 64 { 2 } else { 1 };
        let bytes = client.read(page * PAGE as u64, PAGE as u32).unwrap();
        assert!(bytes == stamped(page, generation), "page {page} by the engine");
    }
    assert_eq!(scene.status()["protection"]["io_allocations"], 0);
    assert_eq!(scene.terminate(), Some(0));
}

/// Kills the daemon under load, again and again, and checks every page meanwhile and afterwards.
fn survive(scene: &Daemon, store: &str) {
    let kills = kills();
    let seed = number("WEIR_SEED", 20_261_120);
    // A daemon that never served has no successor.
    let begun = Instant::now();
    drop(scene.connect());
    let start = begun.elapsed();
    let (stop, done) = (AtomicBool::new(false), AtomicU64::new(0));
    let mut stalls = Stalls::default();
    thread::scope(|scope| {
        for writer in 0..WRITERS {
            let (stop, done) = (&stop, &done);
            scope.spawn(move || {
                let mut random = Random(seed ^ writer);
                let mut known = vec![Known(vec![0]); PAGES as usize];
                let mut client = scene.connect();
                let mut generation = 0;
                while !stop.load(Ordering::Relaxed) {
                    let run = random.next() % (PAGES / RUN / WRITERS) * WRITERS + writer;
                    let page = run * RUN + random.next() % RUN;
                    let outcome = if random.next().is_multiple_of(2) {
                        generation += 1;
                        let whole = run * RUN..(run + 1) * RUN;
                        let pages = if random.next().is_multiple_of(2) { whole } else { page..page + 1 };
                        pages.clone().for_each(|page| known[page as usize].sent(generation));
                        let bytes: Vec<u8> =
                            pages.clone().flat_map(|page| stamped(page, generation)).collect();
                        let written = client.write(pages.start * PAGE as u64, &bytes);
                        written.map(|()| {
                            pages.for_each(|page| known[page as usize].acknowledged(generation));
                        })
                    } else {
                        let state = &mut known[page as usize];
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
                for page in (0..PAGES).filter(|page| page / RUN % WRITERS == writer) {
                    let bytes = client.read(page * PAGE as u64, PAGE as u32).unwrap();
                    assert!(
                        known[page as usize].allows(page, &bytes),
                        "page {page} at the end (seed {seed})"
                    );
                }
            });
        }
        let ends = Ends(&stop);
        let mut random = Random(!seed);
        while stalls.count() < kills * KILLS.len() {
            thread::sleep(Duration::from_millis(20 + random.next() % 200));
            let Some(daemon) = scene.daemon() else { continue };
            let killed = Instant::now();
            if !kill(daemon, stalls.next()) {
                continue;
            }
            let before = done.load(Ordering::Relaxed);
            // Earlier operations may still be counted; after a hundred more, a daemon is at work.
            while done.load(Ordering::Relaxed) < before + 100 {
                assert!(killed.elapsed() < PATIENCE, "no daemon works {PATIENCE:?} after a kill");
                thread::sleep(Duration::from_micros(200));
            }
            stalls.push(killed.elapsed());
        }
        drop(ends);
    });
    println!("{} operations, 0 mismatches; seed {seed}", done.load(Ordering::Relaxed));
    println!("figure: {store} mismatches 0 lower 0");
    // A restart takes a fifth of a second, and longer on a machine with other work, as the first
    // start has shown.
    for (tenths, seconds) in [(5, 5), (9, 15)] {
        let (most, limit) = (stalls.most_of(tenths), Duration::from_secs(seconds) + 4 * start);
        let said = format!("the first daemon took {start:?} to start, {tenths} tenths of the next {most:?}");
        assert!(most < limit, "{said} at most: {stalls:?}");
    }
    stalls.print(store, kills);
    assert_eq!(scene.cores(), Vec::<PathBuf>::new(), "pages lie on a disk");
}

/// The kernel's pattern of core files, which is restored when this is dropped.
struct CorePattern(String);

impl CorePattern {
    const FILE: &str = "/proc/sys/kernel/core_pattern";

    /// Sets the pattern; `None` if this process may not.
    fn set(pattern: &str) -> Option<CorePattern> {
        let before = fs::read_to_string(Self::FILE).ok()?;
        fs::write(Self::FILE, pattern).ok()?;
        Some(CorePattern(before))
    }
}

impl Drop for CorePattern {
    fn drop(&mut self) {
        fs::write(Self::FILE, &self.0).expect("as before");
    }
}

/// The kernel calls a handler before the dead process's memory is free, and the handler may wait
/// for the very device that is down.
#[test]
fn a_crash_of_daemon_or_keeper_leaves_no_core_and_asks_no_handler() {
    use std::os::unix::fs::PermissionsExt as _;
    for is_handled in [false, true] {
        let mut scene = start(&format!("core-{is_handled}"), &["--store", "host:8MiB"]);
        let [core, asked, handler] = ["core.%p", "asked", "handler"].map(|name| scene.directory.join(name));
        fs::write(&handler, format!("#!/bin/sh\ncat > {}\n", asked.display())).unwrap();
        fs::set_permissions(&handler, fs::Permissions::from_mode(0o755)).unwrap();
        scene.connect().write(0, &stamped(0, 1)).unwrap();
        let handler = format!("|{} %p", handler.display());
        let pattern = if is_handled { handler } else { core.display().to_string() };
        let Some(_pattern) = CorePattern::set(&pattern) else {
            let name = "a_crash_of_daemon_or_keeper_leaves_no_core_and_asks_no_handler";
            return println!("\nskipped: {name}: the right to write {}", CorePattern::FILE);
        };
        let found = |scene: &Daemon| (scene.cores(), asked.exists());
        for (signal, _) in KILLS {
            let daemon = scene.daemon().unwrap();
            assert!(kill(daemon, signal));
            eventually("the end of the daemon", || scene.daemon() != Some(daemon));
            assert!(scene.connect().read(0, PAGE as u32).unwrap() == stamped(0, 1));
        }
        assert_eq!(found(&scene), (Vec::new(), false), "of the daemon, {pattern}");
        let daemon = scene.daemon().unwrap();
        assert!(kill(Pid::from_child(&scene.process), rustix::process::Signal::ABORT));
        scene.process.wait().unwrap();
        assert!(kill(daemon, rustix::process::Signal::KILL));
        assert_eq!(found(&scene), (Vec::new(), false), "of the keeper, {pattern}");
    }
}

#[test]
fn the_keeper_ends_with_its_daemon_when_told_and_leaves_nothing() {
    let mut scene = start("told", &["--store", "host:1MiB"]);
    drop(scene.connect());
    let daemon = scene.daemon().unwrap();
    assert_eq!(scene.terminate(), Some(0));
    assert!(rustix::process::test_kill_process(daemon).is_err(), "the daemon is gone");
    assert!(!scene.directory.join("nbd").exists() && !scene.directory.join("control").exists());
}

/// Only a daemon that serves can say that its device is in use.
#[test]
fn a_signal_waits_for_the_daemon_that_takes_another_s_place() {
    let mut scene = start("told-early", &["--store", "host:8MiB"]);
    drop(scene.connect());
    let daemon = scene.daemon().unwrap();
    rustix::process::kill_process(daemon, rustix::process::Signal::KILL).unwrap();
    let next = loop {
        if let Some(next) = scene.daemon().filter(|next| *next != daemon) {
            break next;
        }
    };
    // The signal comes while the daemon does not handle signals yet.
    assert!(common::kill(next, rustix::process::Signal::STOP));
    let status = fs::read_to_string(format!("/proc/{}/status", next.as_raw_nonzero())).unwrap();
    let caught = status.lines().find_map(|line| line.strip_prefix("SigCgt:")).unwrap().trim();
    let listens = u64::from_str_radix(caught, 16).unwrap() >> (libc::SIGTERM - 1) & 1 == 1;
    rustix::process::kill_process(Pid::from_child(&scene.process), rustix::process::Signal::TERM).unwrap();
    thread::sleep(Duration::from_millis(300));
    rustix::process::kill_process(next, rustix::process::Signal::CONT).unwrap();
    let begun = Instant::now();
    let code = loop {
        if let Some(status) = scene.process.try_wait().unwrap() {
            break status.code();
        }
        assert!(begun.elapsed() < PATIENCE, "the keeper stays");
        thread::sleep(Duration::from_millis(5));
    };
    // The exit code must be the daemon's own, and not the signal's, which would be 143.
    assert_eq!(code, Some(0), "it listened for signals: {listens}");
}

#[test]
fn a_daemon_that_never_served_is_not_started_again() {
    let begun = Instant::now();
    let mut scene = start("hopeless", &["--store", "host:1TiB"]);
    assert_eq!(scene.process.wait().unwrap().code(), Some(3), "the keeper ends as its daemon did");
    // Here the daemon finds out late, after it has listened for a moment.
    let mut scene =
        Daemon::spawn("hopeless-late", &["--keeper", "--store", "host:1MiB"], |command, directory| {
            fs::write(directory.join("control"), b"precious").unwrap();
            Daemon::with_nbd(command, directory);
        });
    assert_eq!(scene.process.wait().unwrap().code(), Some(1));
    assert_eq!(fs::read(scene.control()).unwrap(), b"precious");
    assert!(begun.elapsed() < PATIENCE);
}

#[test]
fn a_keeper_that_cannot_start_another_daemon_now_tries_again_and_keeps_the_pages() {
    use rustix::process::{Pid, Resource, Rlimit, Signal, kill_process, prlimit};
    let mut scene = start("short", &["--store", "host:8MiB"]);
    assert!(scene.comes_up(Daemon::listens));
    let page = stamped(7, 1);
    scene.connect().write(7 * PAGE as u64, &page).unwrap();
    let keeper = Pid::from_child(&scene.process);
    let none = Rlimit { current: Some(3), ..rustix::process::getrlimit(Resource::Nofile) };
    let enough = prlimit(Some(keeper), Resource::Nofile, none).unwrap();
    kill_process(scene.daemon().unwrap(), Signal::KILL).unwrap();
    eventually("the end of the daemon", || scene.daemon().is_none());
    thread::sleep(Duration::from_millis(500));
    assert_eq!(scene.process.try_wait().unwrap(), None, "the keeper gave the pages up");
    prlimit(Some(keeper), Resource::Nofile, enough).unwrap();
    assert!(scene.connect().read(7 * PAGE as u64, PAGE as u32).unwrap() == page);
    let before = scene.daemon();
    prlimit(Some(keeper), Resource::Nofile, none).unwrap();
    kill_process(before.unwrap(), Signal::KILL).unwrap();
    eventually("the end of the daemon", || scene.daemon() != before);
    // The keeper, told to end, asks the next daemon, as soon as there can be one.
    kill_process(keeper, Signal::TERM).unwrap();
    thread::sleep(Duration::from_millis(1500));
    assert_eq!(scene.process.try_wait().unwrap(), None, "the keeper gave the pages up");
    prlimit(Some(keeper), Resource::Nofile, enough).unwrap();
    assert_eq!(scene.process.wait().unwrap().code(), Some(0));
}

/// Only a daemon can tell that its pages are not needed. A daemon with clients is in
/// `tests/signals`.
#[test]
fn a_keeper_whose_daemon_is_killed_over_a_signal_asks_the_next_one_and_does_not_give_the_pages_up() {
    use rustix::process::{Pid, Signal, kill_process};
    let mut scene = start("hung", &["--store", "host:8MiB"]);
    assert!(scene.comes_up(Daemon::listens));
    let daemon = scene.daemon().unwrap();
    assert!(common::kill(daemon, Signal::STOP));
    kill_process(Pid::from_child(&scene.process), Signal::TERM).unwrap();
    // The keeper passes the signal on to a daemon that is stopped.
    eventually("the signal at the daemon", || Daemon::has_pending(daemon, Signal::TERM));
    kill_process(daemon, Signal::KILL).unwrap();
    eventually("the end of the daemon", || scene.daemon() != Some(daemon));
    // The next daemon ends in good order, for nothing uses what it serves, and the keeper with it.
    let begun = Instant::now();
    let code = loop {
        if let Some(status) = scene.process.try_wait().unwrap() {
            break status.code();
        }
        assert!(begun.elapsed() < PATIENCE, "the signal was lost with the daemon");
        thread::sleep(Duration::from_millis(5));
    };
    assert_eq!(code, Some(0), "the keeper gave the pages up for what it had said itself");
}

/// A daemon listens a little before it says that it is ready, and a fast client has pages there.
#[test]
fn the_pages_of_a_daemon_that_was_never_ready_are_kept_though_the_next_ones_cannot_start() {
    use rustix::process::{Signal, kill_process};
    let name = "the_pages_of_a_daemon_that_was_never_ready_are_kept_though_the_next_ones_cannot_start";
    if !rustix::process::geteuid().is_root() || !Path::new("/dev/fuse").exists() {
        return println!("\nskipped: {name}: root, and /dev/fuse");
    }
    let page = stamped(7, 1);
    let begun = Instant::now();
    // Repeat until a daemon is killed between its first front end and its last: the file takes it a
    // while.
    let mut scene = loop {
        assert!(begun.elapsed() < PATIENCE, "each was ready before it could be killed");
        let flags = ["--keeper", "--store", "host:8MiB", "--fuse-threads", "64"];
        let scene = Daemon::spawn("never-ready", &flags, |command, directory| {
            Daemon::with_nbd(command, directory);
            command.arg("--fuse").arg(directory.join("disk"));
        });
        scene.connect().write(7 * PAGE as u64, &page).unwrap();
        let Some(first) = scene.daemon() else { continue };
        assert!(common::kill(first, Signal::STOP));
        let control = scene.control();
        if !control.exists() {
            // A file that is no socket is not removed, so the next daemons end with exit code 1.
            fs::write(&control, b"").unwrap();
            kill_process(first, Signal::KILL).unwrap();
            break scene;
        }
    };
    for _ in 0..2 {
        let before = scene.daemon();
        eventually("the end of a daemon", || scene.daemon() != before);
    }
    thread::sleep(Duration::from_secs(3));
    assert_eq!(scene.process.try_wait().unwrap(), None, "the keeper gave the pages up");
    fs::remove_file(scene.control()).unwrap();
    assert!(scene.comes_up(Daemon::listens), "the keeper gave the pages up");
    assert!(scene.connect().read(7 * PAGE as u64, PAGE as u32).unwrap() == page);
    assert_eq!(scene.terminate(), Some(0));
}

/// The number of a daemon's threads decides how its stores are divided.
#[test]
fn a_daemon_that_finds_fewer_processors_than_the_one_before_takes_its_pages_over() {
    if thread::available_parallelism().is_ok_and(|count| count.get() < 8) {
        println!("skipped: a daemon has as many threads on this machine's processors as on one");
        return;
    }
    let scene = start("processors", &["--store", "host:8MiB"]);
    let page = stamped(7, 1);
    scene.connect().write(7 * PAGE as u64, &page).unwrap();
    let keeper = rustix::process::Pid::from_child(&scene.process);
    let all = rustix::thread::sched_getaffinity(Some(keeper)).unwrap();
    let mut one = rustix::thread::CpuSet::new();
    one.set((0..rustix::thread::CpuSet::MAX_CPU).find(|&cpu| all.is_set(cpu)).unwrap());
    rustix::thread::sched_setaffinity(Some(keeper), &one).unwrap();
    let before = scene.daemon().unwrap();
    rustix::process::kill_process(before, rustix::process::Signal::KILL).unwrap();
    eventually("the end of the daemon", || scene.daemon() != Some(before));
    assert!(scene.connect().read(7 * PAGE as u64, PAGE as u32).unwrap() == page);
}

/// Number of times that a process's threads have gone to sleep.
fn sleeps(process: u32) -> u64 {
    let tasks = fs::read_dir(format!("/proc/{process}/task")).unwrap();
    let of = |status: String| {
        let line = status.lines().find_map(|line| line.strip_prefix("voluntary_ctxt_switches:"));
        line.unwrap().trim().parse::<u64>().unwrap()
    };
    tasks.map(|task| of(fs::read_to_string(task.unwrap().path().join("status")).unwrap())).sum()
}

#[test]
fn an_idle_daemon_and_its_keeper_make_no_wake_ups() {
    let mut scene = start("idle", &["--store", "host:8MiB", "--spin-us", "50"]);
    assert!(scene.comes_up(Daemon::listens));
    let mut clients = [scene.connect(), scene.connect()];
    for client in &mut clients {
        client.write(0, &[7; 4096]).unwrap();
    }
    let both = [scene.process.id(), scene.daemon().unwrap().as_raw_nonzero().get() as u32];
    let begun = Instant::now();
    // The start has its last steps, and each reply a last spin: wait for those.
    loop {
        let before = both.map(sleeps);
        thread::sleep(Duration::from_secs(2));
        if both.map(sleeps) == before {
            break;
        }
        assert!(begun.elapsed() < PATIENCE, "idle threads wake up");
    }
    assert_eq!(scene.terminate(), Some(0));
}

/// A program that an upgrade replaces, with a keeper that was started from it.
struct Installed(Daemon);

impl Installed {
    fn start(name: &str) -> Self {
        let directory = std::env::temp_dir().join(format!("weir-{}-{name}", std::process::id()));
        fs::create_dir_all(&directory).unwrap();
        let program = directory.join("weir");
        fs::copy(WEIR, &program).unwrap();
        let mut command = Command::new(&program);
        command
            .args(["serve", "--keeper", "--store", "host:8MiB", "--control"])
            .arg(directory.join("control"));
        Daemon::with_nbd(&mut command, &directory);
        // Another test's child may hold the program's file open for writing at this moment.
        let begun = Instant::now();
        let process = loop {
            match command.spawn() {
                Ok(process) => break process,
                Err(error) => assert!(begun.elapsed() < PATIENCE, "{error}"),
            }
            thread::sleep(Duration::from_millis(5));
        };
        let mut daemon = Daemon { directory, process };
        assert!(daemon.comes_up(Daemon::listens));
        Installed(daemon)
    }

    /// Upgrades as a package does: a new file takes the old one's name.
    fn upgrade(&self, put: impl FnOnce(&Path)) {
        let new = self.0.directory.join("weir.new");
        put(&new);
        fs::rename(new, self.0.directory.join("weir")).unwrap();
    }

    /// The file that the living daemon runs.
    fn runs(&self) -> PathBuf {
        fs::read_link(format!("/proc/{}/exe", self.0.status()["pid"])).unwrap()
    }
}

#[test]
fn a_daemon_that_dies_after_an_upgrade_is_followed_by_the_new_program() {
    let mut weir = Installed::start("upgrade");
    let mut client = weir.0.connect();
    client.write(0, &stamped(0, 1)).unwrap();
    weir.0.kill_daemon();
    assert!(weir.runs().starts_with("/memfd:weir (deleted)"), "nothing was upgraded: {:?}", weir.runs());
    weir.upgrade(|new| {
        fs::copy(WEIR, new).unwrap();
    });
    for _ in 0..2 {
        weir.0.kill_daemon();
        assert_eq!(weir.runs(), weir.0.directory.join("weir"));
    }
    assert_eq!(weir.0.connect().read(0, PAGE as u32).unwrap(), stamped(0, 1));
    assert_eq!(weir.0.terminate(), Some(0));
}

#[test]
fn a_new_program_that_cannot_take_over_is_given_up_for_the_old_one() {
    use std::os::unix::fs::PermissionsExt as _;
    let mut weir = Installed::start("downgrade");
    let mut client = weir.0.connect();
    client.write(0, &stamped(0, 1)).unwrap();
    let script = |text: &'static str| {
        move |new: &Path| {
            fs::write(new, text).unwrap();
            fs::set_permissions(new, fs::Permissions::from_mode(0o755)).unwrap();
        }
    };
    assert_eq!(weir.0.status().get("upgrade_failed"), None);
    // The new programs: one that runs and does not serve, one that the kernel does not run, and
    // none.
    weir.upgrade(script("#!/bin/sh\nexit 1\n"));
    weir.0.kill_daemon();
    assert!(weir.runs().starts_with("/memfd:weir (deleted)"), "{:?}", weir.runs());
    assert_eq!(weir.0.status()["upgrade_failed"], true);
    weir.upgrade(script("half of a program"));
    weir.0.kill_daemon();
    assert_eq!(weir.0.status()["upgrade_failed"], true);
    fs::remove_file(weir.0.directory.join("weir")).unwrap();
    weir.0.kill_daemon();
    assert!(weir.runs().starts_with("/memfd:weir (deleted)"), "{:?}", weir.runs());
    assert_eq!(weir.0.status().get("upgrade_failed"), None, "no program is installed");
    assert_eq!(weir.0.connect().read(0, PAGE as u32).unwrap(), stamped(0, 1));
    assert_eq!(weir.0.terminate(), Some(0));
}
