//! `weir cache` as processes: served by FUSE and NBD, switched between modes, flushed and detached.
//! Homes with content are refused.

mod common;

use common::{has_bar, is_plain, on_a_terminal};
use std::fs::{self, File, OpenOptions};
use std::os::unix::fs::{FileExt as _, OpenOptionsExt as _};
use std::os::unix::net::UnixStream;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Output, Stdio};
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread;
use std::time::Duration;
use weir_export::nbd::client::{Client, Operation, Wish};
use weir_export::nbd::transmission::Request;
use weir_export::nbd::wire::command;

const PAGE: usize = 4096;
const PAGES: u64 = 4096;

/// A directory, with the cache that runs in it.
struct Scene {
    directory: PathBuf,
    cache: Option<Child>,
}

impl Scene {
    fn new(name: &str) -> Self {
        let directory = std::env::temp_dir().join(format!("weir-cache-{name}-{}", std::process::id()));
        fs::create_dir_all(&directory).unwrap();
        let scene = Scene { directory, cache: None };
        File::create(scene.home()).unwrap().set_len(PAGES * PAGE as u64).unwrap();
        scene
    }

    fn home(&self) -> PathBuf {
        self.directory.join("home")
    }

    fn file(&self) -> PathBuf {
        self.directory.join("disk")
    }

    fn control(&self) -> PathBuf {
        self.directory.join("control.sock")
    }

    fn command(&self, arguments: &[&str]) -> Command {
        let mut command = Command::new(env!("CARGO_BIN_EXE_weir"));
        command.arg("cache").args(arguments).arg("--control").arg(self.control());
        command.env("WEIR_SEAL", "abort").stdin(Stdio::null());
        command
    }

    fn create(&self, flags: &[&str]) -> Command {
        let mut command = self.command(&["create"]);
        if !flags.contains(&"--store") {
            command.args(["--store", "host:10MiB"]);
        }
        if !flags.contains(&"--home") {
            command.arg("--home").arg(self.home());
        }
        if !flags.contains(&"--nbd") && !flags.contains(&"--fuse") {
            command.arg("--fuse").arg(self.file());
        }
        command.args(flags);
        command
    }

    fn socket(&self) -> PathBuf {
        self.directory.join("nbd")
    }

    /// Starts the cache with an NBD server on [`socket`](Self::socket).
    fn start_by_nbd(&mut self, name: &str, flags: &[&str]) {
        let address = format!("unix:{}", self.socket().display());
        let flags: Vec<&str> =
            flags.iter().copied().chain(["--nbd", &address, "--connections", "5"]).collect();
        assert!(self.start(name, &flags), "nothing is mounted, so nothing can be missing");
    }

    /// A client. Waits for a free connection: the server may not have seen yet that another client
    /// has gone.
    fn client(&self) -> Client {
        let is_full =
            |error: &dyn std::fmt::Display| error.to_string().contains("every connection is in use");
        loop {
            match Client::unix(self.socket(), &Wish::default()) {
                Err(error) if is_full(&error) => thread::sleep(Duration::from_millis(5)),
                client => return client.unwrap(),
            }
        }
    }

    /// Waits until the cache has seen that its clients have gone, and detaches it.
    fn detach_after_clients(&mut self) {
        eventually(|| !self.shown().contains("nbd ") || self.shown().contains(", 0 of "));
        self.done(&["detach"]);
        self.ended();
    }

    fn shown(&self) -> String {
        String::from_utf8(self.ask(&["status"]).stdout).unwrap()
    }

    /// Starts the cache. Returns false, after printing the reason, if this machine cannot mount.
    fn start(&mut self, name: &str, flags: &[&str]) -> bool {
        self.cache = common::cache_comes_up(name, self.create(flags), &self.control());
        self.cache.is_some()
    }

    fn ask(&self, arguments: &[&str]) -> Output {
        self.command(arguments).output().unwrap()
    }

    fn done(&self, arguments: &[&str]) {
        let output = self.ask(arguments);
        assert!(output.status.success(), "{arguments:?}: {}", String::from_utf8_lossy(&output.stderr));
    }

    fn number(&self, key: &str) -> u64 {
        let output = self.ask(&["status", "--json"]);
        let status: serde_json::Value = serde_json::from_slice(&output.stdout).unwrap();
        assert_eq!(status["schema"], 1);
        status[key].as_u64().unwrap_or_else(|| panic!("{key} in {status}"))
    }

    /// Waits until the cache has ended, with success.
    fn ended(&mut self) {
        let status = self.cache.take().unwrap().wait().unwrap();
        assert!(status.success(), "{status}");
    }
}

impl Drop for Scene {
    fn drop(&mut self) {
        if let Some(mut cache) = self.cache.take() {
            let _ = cache.kill();
            let _ = cache.wait();
            let _ = Command::new("umount").arg("--lazy").arg(self.file()).status();
        }
        let _ = fs::remove_dir_all(&self.directory);
    }
}

fn open(path: &Path) -> File {
    OpenOptions::new().read(true).write(true).open(path).unwrap()
}

fn stamp(page: u64, round: u64) -> Vec<u8> {
    (page << 8 | round).to_le_bytes().repeat(PAGE / 8)
}

fn write(file: &File, round: u64, step: usize) {
    for page in (0..PAGES).step_by(step) {
        file.write_all_at(&stamp(page, round), page * PAGE as u64).unwrap();
    }
}

fn pages_of(path: &Path) -> Vec<u64> {
    let bytes = fs::read(path).unwrap();
    bytes
        .chunks(PAGE)
        .map(|page| {
            let word = u64::from_le_bytes(page[..8].try_into().unwrap());
            assert!(page.chunks(8).all(|other| other == &page[..8]), "a page is whole");
            word
        })
        .collect()
}

fn eventually(mut is: impl FnMut() -> bool) {
    while !is() {
        thread::sleep(Duration::from_millis(10));
    }
}

#[test]
fn what_was_written_through_a_cache_is_at_home_once_it_was_flushed_or_detached() {
    let mut scene = Scene::new("detach");
    if !scene.start("detach", &["--stream", "0"]) {
        return;
    }
    let file = open(&scene.file());
    write(&file, 1, 3);
    assert!(scene.number("dirty_bytes") > 0, "it is a write-back cache");
    file.sync_all().unwrap();
    assert_eq!(scene.number("dirty_bytes"), 0, "fsync brings every page home");
    write(&file, 2, 5);
    // Write a part of a page, and of a page that is read back.
    file.write_all_at(&stamp(7, 3)[..8], 7 * PAGE as u64 + 16).unwrap();
    file.write_all_at(&stamp(7, 0), 7 * PAGE as u64).unwrap();
    let mut page = vec![0; PAGE];
    file.read_exact_at(&mut page, 5 * PAGE as u64).unwrap();
    assert_eq!(page, stamp(5, 2));
    let refused = scene.ask(&["detach"]);
    assert!(!refused.status.success(), "somebody has the file open");
    assert!(String::from_utf8_lossy(&refused.stderr).contains("is in use"));
    drop(file);
    scene.done(&["detach"]);
    scene.ended();
    let expected = |page: u64| match page {
        7 => 7 << 8,
        page if page.is_multiple_of(5) => page << 8 | 2,
        page if page.is_multiple_of(3) => page << 8 | 1,
        _ => 0,
    };
    let found = pages_of(&scene.home());
    assert!((0..PAGES).all(|page| found[page as usize] == expected(page)));
}

#[test]
fn a_flush_and_a_detach_draw_a_bar_on_a_terminal_and_nothing_into_a_pipe() {
    let mut scene = Scene::new("bar");
    if !scene.start("bar", &["--stream", "0"]) {
        return;
    }
    write(&open(&scene.file()), 1, 3);
    let Some((code, drawn)) = on_a_terminal("bar", &scene.command(&["flush"])) else { return };
    assert!(code == Some(0) && has_bar(&drawn, "flushing "), "{drawn:?}");
    write(&open(&scene.file()), 2, 3);
    let flush = scene.ask(&["flush"]);
    assert!(flush.status.success() && is_plain(&flush.stderr) && is_plain(&flush.stdout), "{flush:?}");
    write(&open(&scene.file()), 3, 3);
    let (code, drawn) = on_a_terminal("bar", &scene.command(&["detach"])).unwrap();
    assert!(code == Some(0) && has_bar(&drawn, "detaching "), "{drawn:?}");
    scene.ended();
}

#[test]
fn a_trace_of_a_running_cache_has_its_requests_in_order() {
    let mut scene = Scene::new("trace");
    if !scene.start("trace", &["--stream", "0"]) {
        return;
    }
    let trace = scene.directory.join("trace").display().to_string();
    let file = open(&scene.file());
    let read = |page: u64| file.read_exact_at(&mut [0; PAGE], page * PAGE as u64).unwrap();
    read(1);
    let mut recorder = scene.command(&["trace", &trace, "--requests", "20000"]);
    let mut recorder = recorder.stdout(Stdio::piped()).spawn().unwrap();
    eventually(|| {
        read(9);
        fs::read_to_string(&trace).is_ok_and(|pages| !pages.is_empty())
    });
    let other = scene.directory.join("other").display().to_string();
    for (file, words) in
        [(&other, "another trace of this cache is being recorded"), (&trace, "name a new file")]
    {
        let refused = scene.ask(&["trace", file, "--seconds", "0"]);
        let said = String::from_utf8_lossy(&refused.stderr).into_owned();
        assert!(refused.status.code() == Some(1) && said.contains(words), "{said}");
    }
    assert!(!Path::new(&other).exists(), "what was refused leaves no file");
    let used: Vec<u64> = (0..300).map(|at| at % 100 * 7 + 10).collect();
    used.iter().for_each(|page| read(*page));
    eventually(|| {
        (0..1000).for_each(|_| read(9));
        recorder.try_wait().unwrap().is_some()
    });
    let output = recorder.wait_with_output().unwrap();
    let said = String::from_utf8_lossy(&output.stdout).into_owned();
    assert!(
        output.status.success() && said.contains("trace has 20000 requests; weir bench policy"),
        "{said}"
    );
    let pages = fs::read_to_string(&trace).unwrap();
    let pages: Vec<u64> = pages.lines().map(|page| page.parse().unwrap()).collect();
    assert_eq!(pages.len(), 20_000);
    assert_eq!(pages.iter().copied().filter(|page| *page != 9).collect::<Vec<_>>(), used);
    let weir = Path::new(env!("CARGO_BIN_EXE_weir"));
    // A build of this package alone makes no benchmarks.
    if weir.with_file_name("weir-bench").exists() {
        let mut policy = Command::new(weir);
        let policy = policy.args(["bench", "policy", "--trace", &trace, "--room", "100"]).output().unwrap();
        assert!(policy.status.success(), "{policy:?}");
    }
    // A trace that runs when the cache ends has what came before.
    let late = scene.directory.join("late").display().to_string();
    let recorder = scene.command(&["trace", &late]).stdout(Stdio::piped()).spawn().unwrap();
    eventually(|| {
        read(9);
        fs::read_to_string(&late).is_ok_and(|pages| pages.starts_with("9\n"))
    });
    drop(file);
    scene.done(&["detach"]);
    scene.ended();
    let output = recorder.wait_with_output().unwrap();
    assert!(output.status.success(), "{output:?}");
    assert!(fs::read_to_string(&late).unwrap().lines().all(|page| page == "9"));
}

#[test]
fn in_write_through_a_cache_that_is_killed_takes_no_acknowledged_page_with_it() {
    let mut scene = Scene::new("through");
    if !scene.start("through", &[]) {
        return;
    }
    let file = open(&scene.file());
    write(&file, 1, 4);
    scene.done(&["mode", "write-through"]);
    write(&file, 2, 4);
    let refused = scene.ask(&["mode", "write-up"]);
    assert_eq!(refused.status.code(), Some(2));
    let mut cache = scene.cache.take().unwrap();
    cache.kill().unwrap();
    cache.wait().unwrap();
    drop(file);
    assert!(Command::new("umount").arg(scene.file()).status().unwrap().success());
    let found = pages_of(&scene.home());
    assert!((0..PAGES).step_by(4).all(|page| found[page as usize] == page << 8 | 2));
}

#[test]
fn a_home_that_carries_a_file_system_is_refused_served_or_wiped_as_asked() {
    let mut scene = Scene::new("marks");
    let mut mkfs = Command::new("mkfs.ext4");
    mkfs.arg("-q").arg(scene.home()).env("PATH", "/usr/sbin:/sbin:/usr/bin:/bin");
    if !mkfs.status().is_ok_and(|status| status.success()) {
        println!("\nskipped: marks: mkfs.ext4 is missing (package e2fsprogs)");
        return;
    }
    let refusal = |flags: &[&str]| {
        let output = scene.create(flags).output().unwrap();
        (output.status.code(), String::from_utf8_lossy(&output.stderr).into_owned())
    };
    let (code, said) = refusal(&[]);
    assert_eq!(code, Some(1), "{said}");
    assert!(said.contains("carries ext4") && said.contains("--wipe"), "{said}");
    let (code, said) = refusal(&["--wipe", "/dev/another"]);
    assert_eq!(code, Some(2), "{said}");
    let home = scene.home().display().to_string();
    if !scene.start("marks", &["--keep-content"]) {
        return;
    }
    let mut magic = [0; 2];
    open(&scene.file()).read_exact_at(&mut magic, 0x438).unwrap();
    assert_eq!(magic, [0x53, 0xef], "it is there as it was");
    scene.done(&["detach"]);
    scene.ended();
    assert!(scene.start("marks", &["--wipe", &home]));
    open(&scene.file()).read_exact_at(&mut magic, 0x438).unwrap();
    assert_eq!(magic, [0, 0]);
    // A signal detaches the cache too.
    let cache = scene.cache.as_ref().unwrap();
    let pid = rustix::process::Pid::from_child(cache);
    rustix::process::kill_process(pid, rustix::process::Signal::TERM).unwrap();
    scene.ended();
}

#[test]
fn a_write_to_a_file_that_was_opened_for_synchronous_writes_is_at_home_once_it_returns() {
    let mut scene = Scene::new("sync");
    if !scene.start("sync", &["--stream", "0"]) {
        return;
    }
    for (round, flag) in [(1, libc::O_DSYNC), (2, libc::O_SYNC)] {
        let file = OpenOptions::new().write(true).custom_flags(flag).open(scene.file()).unwrap();
        file.write_all_at(&stamp(round, round), round * PAGE as u64).unwrap();
        assert_eq!(scene.number("dirty_bytes"), 0, "round {round}");
        assert_eq!(pages_of(&scene.home())[round as usize], round << 8 | round);
    }
    scene.done(&["detach"]);
    scene.ended();
}

#[test]
fn a_file_that_was_unmounted_while_it_is_in_use_is_served_until_its_last_user_goes() {
    let mut scene = Scene::new("lazy");
    if !scene.start("lazy", &["--stream", "0"]) {
        return;
    }
    let file = open(&scene.file());
    write(&file, 1, 3);
    assert!(Command::new("umount").arg("--lazy").arg(scene.file()).status().unwrap().success());
    let refused = scene.ask(&["detach"]);
    let said = String::from_utf8_lossy(&refused.stderr).into_owned();
    assert!(!refused.status.success() && said.contains("in use still"), "{said}");
    write(&file, 2, 3);
    drop(file);
    scene.ended();
    let found = pages_of(&scene.home());
    assert!((0..PAGES).step_by(3).all(|page| found[page as usize] == page << 8 | 2));
}

#[test]
fn a_home_that_a_loop_device_serves_is_refused_and_so_is_a_store_without_room() {
    let scene = Scene::new("refused");
    let mut command = scene.command(&["create", "--store", "host:15TiB"]);
    command.arg("--home").arg(scene.home()).arg("--fuse").arg(scene.file());
    let output = command.output().unwrap();
    assert_eq!(output.status.code(), Some(3), "{}", String::from_utf8_lossy(&output.stderr));
    let losetup = |arguments: &[&str]| {
        Command::new("losetup").args(arguments).env("PATH", "/usr/sbin:/sbin:/usr/bin:/bin").output()
    };
    let home = scene.home().display().to_string();
    let device = match losetup(&["--find", "--show", &home]) {
        Ok(output) if output.status.success() => String::from_utf8(output.stdout).unwrap(),
        _ => return println!("\nskipped: refused: no loop device here"),
    };
    let device = device.trim();
    let output = scene.create(&[]).output().unwrap();
    losetup(&["--detach", device]).unwrap();
    let said = String::from_utf8_lossy(&output.stderr).into_owned();
    assert_eq!(output.status.code(), Some(1), "{said}");
    assert!(
        said.contains(&format!("is in use: {device} serves it; losetup -d {device} ends that")),
        "{said}"
    );
}

#[test]
fn a_log_over_several_files_serves_what_was_written_and_reaches_them_in_long_writes() {
    let mut scene = Scene::new("log");
    let paths = ["a", "b", "c"].map(|name| scene.directory.join(name).display().to_string());
    let home = format!("log:{}?size=192MiB", paths.join(","));
    let refusal = |flags: &[&str]| {
        let mut command = scene.command(&["create", "--store", "host:8MiB", "--home", &home]);
        let output = command.arg("--fuse").arg(scene.file()).args(flags).output().unwrap();
        (output.status.code(), String::from_utf8_lossy(&output.stderr).into_owned())
    };
    let (code, said) = refusal(&["--keep-content"]);
    assert!(code == Some(2) && said.contains("keeps nothing"), "{code:?} {said}");
    let (code, said) = refusal(&["--wipe", "/dev/another"]);
    assert!(code == Some(2) && said.contains("name the home again"), "{code:?} {said}");
    let mut mkfs = Command::new("mkfs.ext4");
    mkfs.args(["-q", &paths[1], "64M"]).env("PATH", "/usr/sbin:/sbin:/usr/bin:/bin");
    if mkfs.stdout(Stdio::null()).stderr(Stdio::null()).status().is_ok_and(|status| status.success()) {
        let (code, said) = refusal(&[]);
        assert!(code == Some(1) && said.contains("b carries ext4; --wipe"), "{code:?} {said}");
        fs::remove_file(&paths[1]).unwrap();
    }
    if !scene.start("log", &["--stream", "0", "--home", &home]) {
        return;
    }
    let file = open(&scene.file());
    let pages = file.metadata().unwrap().len() / PAGE as u64;
    assert!((30_000..192 * 256).contains(&pages), "{pages} pages");
    // Each page is used three times in a random order: 7919 has no factor in common with the number
    // of pages.
    assert_ne!(pages % 7919, 0);
    for round in 1..=3 {
        for at in 0..pages {
            let page = at * 7919 % pages;
            file.write_all_at(&stamp(page, round), page * PAGE as u64).unwrap();
        }
    }
    file.sync_all().unwrap();
    let mut page = vec![0; PAGE];
    for at in 0..pages {
        file.read_exact_at(&mut page, at * PAGE as u64).unwrap();
        assert!(page == stamp(at, 3), "page {at}");
    }
    let output = scene.ask(&["status", "--json"]);
    let status: serde_json::Value = serde_json::from_slice(&output.stdout).unwrap();
    let log = &status["log"];
    let amplification = log["amplification"].as_f64().unwrap();
    assert!((1.0..4.0).contains(&amplification), "{log}");
    assert_eq!((log["corrupt"].as_u64(), log["stuck_segments"].as_u64()), (Some(0), Some(0)), "{log}");
    let disks = status["disks"].as_array().unwrap();
    assert_eq!(disks.len(), 3);
    for disk in disks {
        let writes: Vec<u64> =
            disk["writes"].as_array().unwrap().iter().map(|n| n.as_u64().unwrap()).collect();
        // The last two counters are of writes from 512 KiB and from 1 MiB on. How many short writes
        // there are beside them depends on the machine's speed. Most of the bytes do not.
        let long = (writes[7] << 19) + (writes[8] << 20);
        let written = disk["written_bytes"].as_u64().unwrap();
        assert!(long * 2 > written && disk["errors"] == 0, "{disk}");
    }
    let shown = String::from_utf8(scene.ask(&["status"]).stdout).unwrap();
    assert!(shown.contains("live on 192MiB") && shown.contains("c: "), "{shown}");
    drop(file);
    scene.done(&["detach"]);
    scene.ended();
}

/// Memory of the daemon that is in RAM and shared, as the pages of a host store are.
fn shared_bytes(cache: &Child) -> u64 {
    let status = fs::read_to_string(format!("/proc/{}/status", cache.id())).unwrap();
    let line = status.lines().find_map(|line| line.strip_prefix("RssShmem:")).unwrap();
    line.trim().trim_end_matches(" kB").parse::<u64>().unwrap() << 10
}

/// A disk of the cache, as a program or a client sees it.
trait Disk {
    fn write_page(&mut self, page: u64, bytes: &[u8]);
    fn read_page(&mut self, page: u64) -> Vec<u8>;
}

impl Disk for File {
    fn write_page(&mut self, page: u64, bytes: &[u8]) {
        self.write_all_at(bytes, page * PAGE as u64).unwrap();
    }

    fn read_page(&mut self, page: u64) -> Vec<u8> {
        let mut found = vec![0; PAGE];
        self.read_exact_at(&mut found, page * PAGE as u64).unwrap();
        found
    }
}

impl Disk for Client {
    fn write_page(&mut self, page: u64, bytes: &[u8]) {
        self.write(page * PAGE as u64, bytes).unwrap();
    }

    fn read_page(&mut self, page: u64) -> Vec<u8> {
        self.read(page * PAGE as u64, PAGE as u32).unwrap()
    }
}

/// Writes and reads pages without a break, each thread those of its own, and compares what comes.
/// Returns the number of operations, and the round in which each page was written last.
fn load(mut disk: impl Disk, ends: &AtomicBool, thread: u64) -> (u64, Vec<u64>) {
    let mut rounds = vec![0u64; PAGES as usize];
    let (mut chance, mut operations) = (thread + 1, 0);
    while !ends.load(Ordering::Relaxed) {
        chance = chance.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
        let page = (chance >> 33) % (PAGES / 4) * 4 + thread;
        let round = &mut rounds[page as usize];
        if chance >> 20 & 1 == 0 {
            *round = *round % 255 + 1;
            disk.write_page(page, &varied(page, *round));
        } else if *round > 0 {
            let found = disk.read_page(page);
            assert!(found == varied(page, *round), "page {page} of round {round}");
        }
        operations += 1;
    }
    (operations, rounds)
}

/// The content of a page that repeats no value. A volume would keep such a page in its map.
fn varied(page: u64, round: u64) -> Vec<u8> {
    (0..PAGE as u64 / 8).flat_map(|at| (page << 24 | round << 16 | at).to_le_bytes()).collect()
}

/// Ends the load when it is dropped, so that a test that fails ends too.
struct EndsLoad<'a>(&'a AtomicBool);

impl Drop for EndsLoad<'_> {
    fn drop(&mut self) {
        self.0.store(true, Ordering::Relaxed);
    }
}

/// Runs `meanwhile` while `clients` threads write and read, each by a disk of its own. `meanwhile`
/// is given a function that waits for `more` writes. Returns what [`load`] did in each thread.
fn under_load<D: Disk>(
    scene: &Scene,
    (clients, more): (u64, u64),
    disk: impl Fn() -> D + Sync,
    meanwhile: impl FnOnce(&dyn Fn()),
) -> Vec<(u64, Vec<u64>)> {
    let ends = AtomicBool::new(false);
    thread::scope(|scope| {
        let (end, ends, disk) = (EndsLoad(&ends), &ends, &disk);
        let threads: Vec<_> =
            (0..clients).map(|thread| scope.spawn(move || load(disk(), ends, thread))).collect();
        let written = || scene.number("write_hits") + scene.number("write_misses");
        meanwhile(&|| {
            let before = written();
            eventually(|| written() > before + more);
        });
        drop(end);
        threads.into_iter().map(|thread| thread.join().unwrap()).collect()
    })
}

/// Checks that the home of a detached cache has what each thread of a load wrote last. Returns the
/// home's bytes.
fn home_after(scene: &Scene, written: &[(u64, Vec<u64>)]) -> Vec<u8> {
    let bytes = fs::read(scene.home()).unwrap();
    for (thread, (operations, rounds)) in written.iter().enumerate() {
        assert!(*operations > 300, "{operations}");
        for (page, round) in (0..).zip(rounds).skip(thread).step_by(4).filter(|(_, round)| **round > 0) {
            let at_home = &bytes[page as usize * PAGE..(page as usize + 1) * PAGE];
            assert!(at_home == varied(page, *round), "page {page} of round {round}");
        }
    }
    bytes
}

#[test]
fn a_cache_under_load_gives_all_its_memory_back_goes_on_without_it_and_takes_it_again() {
    const STORE: u64 = 64 << 20;
    let mut scene = Scene::new("memory");
    if !scene.start("memory", &["--stream", "0", "--store", "host:64MiB"]) {
        return;
    }
    let memory = |arguments: &[&str]| {
        let mut command = Command::new(env!("CARGO_BIN_EXE_weir"));
        command.args(arguments).arg("--control").arg(scene.control());
        command.stdin(Stdio::null()).output().unwrap()
    };
    let said = |arguments: &[&str]| {
        let output = memory(arguments);
        assert!(output.status.success(), "{arguments:?}: {}", String::from_utf8_lossy(&output.stderr));
        String::from_utf8(output.stdout).unwrap()
    };
    let daemon = scene.cache.as_ref().unwrap();
    let held = shared_bytes(daemon);
    assert!(held >= STORE, "{held}");
    let file = scene.file();
    let written = under_load(
        &scene,
        (4, 500),
        || open(&file),
        |goes_on| {
            for round in 0..3 {
                eventually(|| scene.number("dirty_bytes") > 1 << 20);
                let all = if round == 1 { "--sleep" } else { "all" };
                assert!(said(&["give-back", all]).starts_with("gave back 64MiB in "));
                assert_eq!((scene.number("open_bytes"), scene.number("given_back_bytes")), (0, STORE));
                let left = shared_bytes(daemon);
                assert!(left <= held - STORE, "{left} of {held} are still in memory");
                let status = String::from_utf8(scene.ask(&["status"]).stdout).unwrap();
                assert!(status.contains("memory    64MiB of the store given back; weir take"), "{status}");
                goes_on();
                assert_eq!(scene.number("dirty_bytes"), 0, "writes go home");
                assert!(said(&["give-back", "all"]).starts_with("gave back 0B in "), "there is no more");
                let more = memory(&["give-back", "4MiB"]);
                let words = "cannot give back 4MiB: only 0B is held; ask for that, or for all";
                assert!(String::from_utf8_lossy(&more.stderr).contains(words), "{more:?}");
                // All of the memory was given back meanwhile, and not for the sleep alone.
                let woken = said(&["take", "--sleep"]);
                assert_eq!(woken, "nothing is given back for a sleep, so there is nothing to take\n");
                let hits = scene.number("read_hits");
                assert!(said(&["take", "all"]).starts_with("took 64MiB in "));
                assert_eq!(scene.number("open_bytes"), scene.number("cache_bytes"));
                eventually(|| scene.number("read_hits") > hits + 500);
                assert!(shared_bytes(daemon) >= STORE);
            }
            assert!(said(&["give-back", "--sleep"]).starts_with("gave back 64MiB in "));
            assert!(said(&["take", "--sleep"]).starts_with("took 64MiB in "));
        },
    );
    let operations: u64 = written.iter().map(|(operations, _)| operations).sum();
    assert!(operations > 1000, "{operations}");
    scene.done(&["detach"]);
    scene.ended();
}

#[test]
fn a_flush_by_nbd_takes_every_client_s_writes_home_and_a_connected_client_keeps_the_cache() {
    let mut scene = Scene::new("nbd");
    scene.start_by_nbd("nbd", &["--stream", "0"]);
    let (mut client, mut other) = (scene.client(), scene.client());
    assert_eq!(client.terms().bytes, PAGES * PAGE as u64);
    assert!(client.terms().multi_conn(), "a flush covers the writes of every connection");
    for page in (0..PAGES).step_by(3) {
        client.write_page(page, &stamp(page, 1));
    }
    assert!(scene.number("dirty_bytes") > 0, "it is a write-back cache");
    other.perform(Operation::Flush).unwrap();
    assert_eq!(scene.number("dirty_bytes"), 0);
    let found = pages_of(&scene.home());
    assert!((0..PAGES).step_by(3).all(|page| found[page as usize] == page << 8 | 1));
    // One write that must be safe at once, a part of a page, and a read over both.
    other.perform(Operation::Write { offset: PAGE as u64, data: &stamp(1, 2), fua: true }).unwrap();
    assert_eq!(pages_of(&scene.home())[1], 1 << 8 | 2, "FUA");
    client.write(2 * PAGE as u64 + 512, &stamp(2, 2)[..512]).unwrap();
    let read = other.read(PAGE as u64, 2 * PAGE as u32).unwrap();
    assert_eq!((&read[..PAGE], &read[PAGE + 512..PAGE + 1024]), (&*stamp(1, 2), &stamp(2, 2)[..512]));
    assert_eq!(read[PAGE..PAGE + 512], [0; 512]);
    client.write_page(2, &stamp(2, 2));
    // The home could only write zeros, so no client is offered to discard or to zero.
    other.perform(Operation::Trim { offset: 0, length: PAGE as u32 }).unwrap_err();
    let shown = scene.shown();
    let at = format!("nbd       unix:{}, 2 of 5 connections", scene.socket().display());
    assert!(shown.contains(&at), "{shown}");
    client.write_page(9, &stamp(9, 3));
    client.disconnect().unwrap();
    eventually(|| scene.shown().contains(", 1 of 5 connections"));
    let refused = scene.ask(&["detach"]);
    let said = String::from_utf8_lossy(&refused.stderr).into_owned();
    let words = format!("1 client is connected at unix:{}; end them", scene.socket().display());
    assert!(!refused.status.success() && said.contains(&words), "{said}");
    other.write_page(10, &stamp(10, 3));
    other.disconnect().unwrap();
    scene.detach_after_clients();
    let found = pages_of(&scene.home());
    assert_eq!((found[9], found[10], found[12]), (9 << 8 | 3, 10 << 8 | 3, 12 << 8 | 1));
    assert!(!scene.socket().exists());
}

/// A client that goes in the middle of a write: half of the page has been sent.
fn hang_up_within_a_write(scene: &Scene, page: u64, bytes: &[u8]) {
    use std::io::Write as _;
    let (stream, client) = loop {
        let stream = UnixStream::connect(scene.socket()).unwrap();
        match Client::over(Box::new(stream.try_clone().unwrap()), &Wish::default()) {
            Ok(client) => break (stream, client),
            Err(_) => thread::sleep(Duration::from_millis(5)),
        }
    };
    let request = Request {
        flags: 0,
        command: command::WRITE,
        cookie: 1,
        offset: page * PAGE as u64,
        length: bytes.len() as u32,
    };
    (&stream).write_all(&request.encode()).unwrap();
    (&stream).write_all(&bytes[..bytes.len() / 2]).unwrap();
    drop(client);
}

#[test]
fn a_cache_by_nbd_under_load_changes_its_mode_gives_its_memory_back_and_loses_clients_within_writes() {
    let mut scene = Scene::new("nbd-load");
    scene.start_by_nbd("nbd-load", &["--stream", "0", "--store", "host:64MiB"]);
    let memory = |arguments: &[&str]| {
        let mut command = Command::new(env!("CARGO_BIN_EXE_weir"));
        let output = command.args(arguments).arg("--control").arg(scene.control()).output().unwrap();
        assert!(output.status.success(), "{arguments:?}: {}", String::from_utf8_lossy(&output.stderr));
    };
    // The last of each four pages is for clients that go within a write.
    let torn = |at: u64| at % 100 * 4 + 3;
    let written = under_load(
        &scene,
        (3, 300),
        || scene.client(),
        |goes_on| {
            let mut times = 0;
            for mode in ["write-through", "write-around", "write-back", "write-through", "write-back"] {
                memory(&["give-back", "all"]);
                goes_on();
                scene.done(&["mode", mode]);
                for _ in 0..20 {
                    let page = torn(times);
                    let mut client = scene.client();
                    client.write_page(page, &stamp(page, 1));
                    client.disconnect().unwrap();
                    hang_up_within_a_write(&scene, page, &stamp(page, 2));
                    times += 1;
                }
                memory(&["take", "all"]);
                goes_on();
            }
        },
    );
    scene.detach_after_clients();
    let bytes = home_after(&scene, &written);
    let at_home = |page: u64| &bytes[page as usize * PAGE..(page as usize + 1) * PAGE];
    // Half a page was never written, whatever the mode was.
    for at in 0..100 {
        assert!(at_home(torn(at)) == stamp(torn(at), 1), "page {}", torn(at));
    }
}

#[test]
fn a_cache_takes_the_same_words_for_its_front_ends_as_weir_serve() {
    let scene = Scene::new("words");
    let refusal = |flags: &[&str]| {
        let mut command = scene.command(&["create", "--store", "host:10MiB"]);
        let output = command.arg("--home").arg(scene.home()).args(flags).output().unwrap();
        (output.status.code(), String::from_utf8_lossy(&output.stderr).into_owned())
    };
    for (flags, words) in [
        (&[][..], "--nbd, --ublk and --fuse are missing, so nobody could connect"),
        (&["--ublk", "--fuse", "/f"], "--ublk and --fuse would be two disks with the same pages"),
        (&["--nbd", "tcp:127.0.0.1:9"], "tcp:127.0.0.1:9 would carry pages in the clear"),
        (&["--nbd", "unix:/n", "--insecure"], "--insecure is about TCP, and no --nbd tcp:HOST:PORT"),
        (&["--fuse", "/f", "--queues", "2"], "--queues are those of a ublk device"),
    ] {
        let (code, said) = refusal(flags);
        assert!(code == Some(2) && said.contains(words), "{flags:?}: {code:?} {said}");
    }
    let (code, said) = refusal(&["--nbd", "unix:/n", "--connections", "300"]);
    assert!(code == Some(1) && said.contains("a cache has 1 to 250 lanes"), "{code:?} {said}");
    let directory = scene.directory.display().to_string();
    let (code, said) = refusal(&["--nbd", "tcp:127.0.0.1:9", "--tls", &directory]);
    assert!(code == Some(1) && said.contains("server-cert.pem"), "{code:?} {said}");
}

/// A store of eight chunks, each of 8 MiB.
fn chunks(scene: &Scene) -> String {
    format!("file:{}?size=64MiB&chunk=8MiB", scene.directory.join("store").display())
}

#[test]
fn a_cache_under_load_is_resized_and_keeps_its_size_and_an_interrupted_resize_loses_nothing() {
    const CHUNK: u64 = 8 << 20;
    let mut scene = Scene::new("resize");
    let store = chunks(&scene);
    scene.start_by_nbd("resize", &["--stream", "0", "--store", &store]);
    let said = |arguments: &[&str]| {
        let output = scene.ask(arguments);
        assert!(output.status.success(), "{arguments:?}: {}", String::from_utf8_lossy(&output.stderr));
        String::from_utf8(output.stdout).unwrap()
    };
    let held = || scene.number("size_bytes") - scene.number("given_back_bytes");
    let written = under_load(
        &scene,
        (3, 300),
        || scene.client(),
        |goes_on| {
            for (size, chunks) in [("20MiB", 3), ("20MiB", 3), ("0B", 0), ("33MiB", 5), ("all", 8)] {
                goes_on();
                let words = format!("the cache uses {}MiB of its store's 64MiB now", chunks * 8);
                let words = words.replace(" 0MiB", " 0B");
                assert!(said(&["resize", size]).starts_with(&words), "{size}");
                assert_eq!((scene.number("size_bytes"), held()), (chunks * CHUNK, chunks * CHUNK));
                // A take brings no more than that.
                let mut take = Command::new(env!("CARGO_BIN_EXE_weir"));
                assert!(
                    take.args(["take", "all", "--control"])
                        .arg(scene.control())
                        .output()
                        .unwrap()
                        .status
                        .success()
                );
                assert_eq!(held(), chunks * CHUNK);
                let line = format!("size      {} of the store's 64MiB", weir_core::ByteSize(chunks * CHUNK));
                assert_eq!(scene.shown().contains(&line), chunks < 8);
            }
            for at in 0..10 {
                let mut resize = scene.command(&["resize", if at % 2 == 0 { "0B" } else { "all" }]);
                let mut resize = resize.stdout(Stdio::null()).stderr(Stdio::null()).spawn().unwrap();
                thread::sleep(Duration::from_millis(at * 10));
                let pid = rustix::process::Pid::from_child(&resize);
                let _ = rustix::process::kill_process(pid, rustix::process::Signal::INT);
                resize.wait().unwrap();
                // The next resize waits until the daemon has ended the one before.
                said(&["resize", "all"]);
                assert_eq!(held(), 8 * CHUNK);
                goes_on();
            }
        },
    );
    scene.detach_after_clients();
    home_after(&scene, &written);
}

#[test]
fn a_cache_that_is_killed_within_a_resize_has_lost_nothing_that_was_flushed() {
    let mut scene = Scene::new("resize-killed");
    let store = chunks(&scene);
    for delay in [0, 20, 60] {
        // The store is made anew for each cache.
        let _ = fs::remove_file(scene.directory.join("store"));
        scene.start_by_nbd("resize-killed", &["--stream", "0", "--store", &store]);
        let mut client = scene.client();
        (0..PAGES).for_each(|page| client.write_page(page, &stamp(page, delay + 1)));
        client.perform(Operation::Flush).unwrap();
        // These pages were not flushed: each may have gone home or not.
        (0..PAGES).step_by(4).for_each(|page| client.write_page(page, &stamp(page, delay + 2)));
        let mut resize = scene.command(&["resize", "0B"]);
        let mut resize = resize.stdout(Stdio::null()).stderr(Stdio::null()).spawn().unwrap();
        thread::sleep(Duration::from_millis(delay));
        let mut cache = scene.cache.take().unwrap();
        cache.kill().unwrap();
        cache.wait().unwrap();
        resize.wait().unwrap();
        drop(client);
        let found = pages_of(&scene.home());
        for page in 0..PAGES {
            let (old, new) = (page << 8 | (delay + 1), page << 8 | (delay + 2));
            let found = found[page as usize];
            assert!(found == old || page % 4 == 0 && found == new, "page {page}: {found:x}");
        }
        let _ = fs::remove_file(scene.control());
        let _ = fs::remove_file(scene.socket());
    }
}

#[test]
fn a_device_grows_with_its_home_once_or_twice_and_a_home_that_cannot_is_refused() {
    let mut scene = Scene::new("grow");
    let address = format!("unix:{}", scene.socket().display());
    let file = scene.file().display().to_string();
    if !scene.start("grow", &["--stream", "0", "--fuse", &file, "--nbd", &address, "--connections", "4"]) {
        return;
    }
    let home = open(&scene.home());
    let (bytes, more) = (PAGES * PAGE as u64, 512 * PAGE as u64);
    let mut early = scene.client();
    let size = || fs::metadata(scene.file()).unwrap().len();
    let grow = || {
        let output = scene.ask(&["resize", "--home"]);
        let said = [output.stdout, output.stderr].map(|said| String::from_utf8(said).unwrap());
        (output.status.success(), said.concat())
    };
    assert_eq!(grow(), (true, "the device has 16MiB now\n".to_owned()), "nothing has changed");
    home.set_len(bytes + more).unwrap();
    assert_eq!(size(), bytes, "nobody has asked");
    assert_eq!(grow(), (true, "the device has 18MiB now\n".to_owned()));
    assert_eq!(grow(), (true, "the device has 18MiB now\n".to_owned()), "twice");
    assert_eq!((size(), scene.number("bytes")), (bytes + more, bytes + more));
    open(&scene.file()).write_all_at(&stamp(PAGES, 1), bytes).unwrap();
    // A client keeps the size that it was told, and goes on.
    early.write(bytes, &stamp(PAGES, 2)).unwrap_err();
    early.write_page(PAGES - 1, &stamp(PAGES - 1, 1));
    let mut late = scene.client();
    assert_eq!(late.terms().bytes, bytes + more);
    assert_eq!(late.read_page(PAGES), stamp(PAGES, 1));
    late.write_page(PAGES + 511, &stamp(PAGES + 511, 1));
    // A home without whole pages, and one that is smaller now.
    home.set_len(bytes + more + 1).unwrap();
    let (done, said) = grow();
    assert!(!done && said.contains("give one of whole pages of 4KiB"), "{said}");
    home.set_len(bytes + more).unwrap();
    assert_eq!(size(), bytes + more);
    drop((early, late));
    scene.detach_after_clients();
    let found = pages_of(&scene.home());
    let last = PAGES as usize + 511;
    assert_eq!((found[PAGES as usize - 1], found[PAGES as usize]), ((PAGES - 1) << 8 | 1, PAGES << 8 | 1));
    assert_eq!((found.len(), found[last]), (last + 1, (last as u64) << 8 | 1));
    home.set_len(bytes).unwrap();
    let log = format!("log:{}?size=64MiB", scene.directory.join("log").display());
    scene.start_by_nbd("grow", &["--home", &log]);
    let refused = scene.ask(&["resize", "--home"]);
    let said = String::from_utf8_lossy(&refused.stderr).into_owned();
    assert!(
        !refused.status.success() && said.contains("a log keeps the size that it was made with"),
        "{said}"
    );
    scene.detach_after_clients();
}
