//! `weir give-back` and `weir take`: a daemon's memory is given back and taken while clients use
//! the device.

mod common;

use common::{Daemon, Ends, PATIENCE};
use std::fs;
use std::io::{BufRead as _, BufReader, Write as _};
use std::os::unix::net::UnixStream;
use std::path::{Path, PathBuf};
use std::process::{Command, Output};
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread;
use std::time::{Duration, Instant};
use weir_export::nbd::client::Client;

const PAGE: usize = 4096;
/// Two stores: four chunks of 4 MiB, and below them room for everything.
const STORES: [&str; 6] =
    ["--store", "sim:size=16MiB,chunk=4MiB", "--store", "host:16MiB", "--size", "16MiB"];

fn start(name: &str, flags: &[&str]) -> Daemon {
    try_start(name, flags, &[]).expect("the daemon starts")
}

/// Starts a daemon; `None` if it ends at its start.
fn try_start(name: &str, flags: &[&str], environment: &[(&str, &Path)]) -> Option<Daemon> {
    let flags = [&["--log", "warn"], flags].concat();
    let mut daemon = Daemon::spawn(name, &flags, |command, directory| {
        Daemon::with_nbd(command, directory);
        command.envs(environment.iter().copied());
    });
    daemon.comes_up(Daemon::listens).then_some(daemon)
}

/// Number of chunks of the first store that were given back.
fn away(scene: &Daemon) -> u64 {
    scene.status()["stores"][0]["chunks"]["given_back"].as_u64().unwrap()
}

fn said(output: &Output) -> String {
    String::from_utf8_lossy(&output.stderr).trim().to_owned()
}

/// A page that names its number and round in every word.
fn stamped(page: u64, round: u64) -> [u8; PAGE] {
    let mut bytes = [0; PAGE];
    for (at, word) in bytes.chunks_exact_mut(8).enumerate() {
        word.copy_from_slice(
            &((page << 40 | round << 10 | at as u64).wrapping_mul(0x9e37_79b9_7f4a_7c15)).to_le_bytes(),
        );
    }
    bytes
}

fn write(client: &mut Client, page: u64, round: u64) {
    client.write(page * PAGE as u64, &stamped(page, round)).unwrap();
}

fn check(client: &mut Client, page: u64, round: u64) {
    let found = client.read(page * PAGE as u64, PAGE as u32).unwrap();
    assert!(found == stamped(page, round), "page {page} is not what round {round} wrote");
}

#[test]
fn memory_goes_and_comes_while_clients_use_every_page() {
    let scene = start("give-back", &STORES);
    let pages = (16 << 20) / PAGE as u64;
    let mut client = scene.connect();
    (0..pages).for_each(|page| write(&mut client, page, 0));
    let stop = AtomicBool::new(false);
    let rounds = thread::scope(|scope| {
        let users: Vec<_> = (0..2)
            .map(|user| {
                let (mut client, stop) = (scene.connect(), &stop);
                scope.spawn(move || {
                    let mut rounds = vec![0; pages as usize];
                    let mut page = user;
                    while !stop.load(Ordering::Relaxed) {
                        check(&mut client, page, rounds[page as usize]);
                        rounds[page as usize] += 1;
                        write(&mut client, page, rounds[page as usize]);
                        page = user + (page + 14) % pages / 2 * 2;
                    }
                    rounds
                })
            })
            .collect();
        let ends = Ends(&stop);
        for round in 0..4 {
            let gave = scene.weir(&["give-back", if round % 2 == 0 { "all" } else { "6MiB" }]);
            assert!(gave.status.success(), "{}", said(&gave));
            let gone = if round % 2 == 0 { 4 } else { 2 };
            assert_eq!(away(&scene), gone, "6 MiB are two chunks of 4");
            let took = scene.weir(&["take", "all"]);
            assert!(took.status.success(), "{}", said(&took));
            assert_eq!(away(&scene), 0);
        }
        drop(ends);
        users.into_iter().map(|user| user.join().unwrap()).collect::<Vec<_>>()
    });
    for page in 0..pages {
        check(&mut client, page, rounds[page as usize % 2][page as usize]);
    }
    let background = &scene.status()["background"];
    assert_eq!(background["given_back_bytes"], 48 << 20, "{background}");
    assert_eq!(background["taken_bytes"], 48 << 20, "{background}");
    assert!(background["moved_out"].as_u64().unwrap() > 0, "{background}");
}

#[test]
fn pages_come_back_up_once_there_is_room_and_nobody_is_at_work() {
    let scene = start("rise", &STORES);
    let mut client = scene.connect();
    (0..2000).for_each(|page| write(&mut client, page, 7));
    let used = || {
        let status = scene.status();
        [0, 1].map(|store: usize| status["stores"][store]["slots_used"].as_u64().unwrap())
    };
    assert_eq!(used(), [2000, 0]);
    assert!(scene.weir(&["give-back", "all"]).status.success());
    assert_eq!(used(), [0, 2000]);
    assert!(scene.weir(&["take", "all"]).status.success());
    let begun = Instant::now();
    while used() != [2000, 0] {
        assert!(begun.elapsed() < PATIENCE, "pages stay below: {:?}", used());
        thread::sleep(Duration::from_millis(20));
    }
    (0..2000).for_each(|page| check(&mut client, page, 7));
    let wakes = || scene.status()["background"]["wakes"].as_u64().unwrap();
    // The daemon may look once more for work that is left.
    let begun = Instant::now();
    loop {
        let before = wakes();
        thread::sleep(Duration::from_millis(500));
        if wakes() == before {
            break;
        }
        assert!(begun.elapsed() < PATIENCE, "a worker with nothing to do sleeps");
    }
}

#[test]
fn backing_makes_the_device_larger_than_the_memory_and_holds_everything_when_that_goes() {
    let file = std::env::temp_dir().join(format!("weir-{}-backing-file", std::process::id()));
    let path = file.to_str().unwrap();
    let scene =
        start("backing", &["--store", "sim:size=16MiB,chunk=4MiB", "--size", "32MiB", "--backing", path]);
    let blocks = std::os::unix::fs::MetadataExt::blocks(&fs::metadata(&file).unwrap()) * 512;
    assert!(blocks >= 32 << 20, "all of its room is taken at the start: {blocks}");
    let pages = (32 << 20) / PAGE as u64;
    let mut client = scene.connect();
    (0..pages).for_each(|page| write(&mut client, page, 1));
    let status = scene.status();
    assert_eq!(
        (&status["stores"][0]["slots_used"], &status["volume"]["stored"]),
        (&4096.into(), &8192.into())
    );
    let gave = scene.weir(&["give-back", "all"]);
    assert!(gave.status.success(), "{}", said(&gave));
    let status = scene.status();
    assert_eq!((&status["stores"][0]["slots_used"], away(&scene)), (&0.into(), 4));
    // Every page can be written anew in the remaining memory.
    (0..pages).for_each(|page| write(&mut client, page, 2));
    assert!(scene.weir(&["take", "8MiB"]).status.success());
    assert_eq!(away(&scene), 2);
    (0..pages).for_each(|page| check(&mut client, page, 2));
    let kept = fs::read(&file).unwrap();
    let needle = &stamped(5, 2)[..64];
    assert!(!kept.windows(64).any(|window| window == needle), "what lies on the disk is encrypted");
    drop(scene);
    fs::remove_file(&file).unwrap();
}

#[test]
fn backing_that_cannot_be_had_is_refused_in_one_line_before_anything_serves() {
    let data = std::env::temp_dir().join(format!("weir-{}-data", std::process::id()));
    fs::write(&data, "somebody's").unwrap();
    let data_path = data.to_str().unwrap();
    for (path, words, code) in [
        ("/nowhere/at/all/backing", "does not exist", 1),
        (data_path, "would be lost", 1),
        ("/tmp", "a directory", 1),
        (&format!("{data_path}.large?size=8TiB"), "free", 3),
    ] {
        let output = Command::new(env!("CARGO_BIN_EXE_weir"))
            .args(["serve", "--store", "host:1MiB", "--nbd", "unix:/tmp/never", "--backing", path])
            .output()
            .unwrap();
        let line = said(&output);
        assert_eq!(output.status.code(), Some(code), "{path}: {line}");
        assert!(!line.contains('\n') && line.contains(words), "{path}: {line}");
    }
    assert_eq!(fs::read(&data).unwrap(), b"somebody's");
    fs::remove_file(&data).unwrap();
}

#[test]
fn without_room_elsewhere_nothing_is_given_back_and_one_line_says_why() {
    let scene = start("no-room", &["--store", "sim:size=16MiB,chunk=4MiB"]);
    let mut client = scene.connect();
    write(&mut client, 3, 1);
    for amount in ["all", "4MiB"] {
        let output = scene.weir(&["give-back", amount]);
        let line = said(&output);
        assert_eq!(output.status.code(), Some(1), "{line}");
        assert!(!line.contains('\n') && line.contains("--backing") && line.contains("MiB"), "{line}");
    }
    let more = scene.weir(&["give-back", "1GiB"]);
    assert_eq!(more.status.code(), Some(1));
    assert!(said(&more).contains("only 2"), "{}", said(&more));
    check(&mut client, 3, 1);
    assert_eq!(away(&scene), 0);
    // Nothing was given back, so there is nothing to take: the command succeeds.
    assert!(scene.weir(&["take", "all"]).status.success());
}

#[test]
fn a_long_request_is_answered_by_lines_of_progress_and_a_last_line() {
    let scene = start("lines", &STORES);
    let mut stream = UnixStream::connect(scene.directory.join("control")).unwrap();
    stream.set_read_timeout(Some(PATIENCE)).unwrap();
    stream.write_all(b"{\"schema\":1,\"request\":\"give-back\",\"bytes\":4194304}\n").unwrap();
    let lines: Vec<serde_json::Value> =
        BufReader::new(stream).lines().map(|line| serde_json::from_str(&line.unwrap()).unwrap()).collect();
    let (last, progress) = lines.split_last().expect("a last line");
    assert_eq!((&last["schema"], &last["result"]["bytes"]), (&1.into(), &4_194_304.into()), "{last}");
    assert!(progress.iter().all(|line| line["schema"] == 1 && line["progress"].is_object()), "{progress:?}");
}

#[test]
fn what_was_given_back_stays_given_back_when_the_daemon_is_killed() {
    let mut scene =
        start("killed", &["--keeper", "--store", "host:128MiB", "--store", "host:40MiB", "--size", "32MiB"]);
    let mut client = scene.connect();
    (0..2000).for_each(|page| write(&mut client, page, 1));
    let gave = scene.weir(&["give-back", "all"]);
    assert!(gave.status.success(), "{}", said(&gave));
    assert_eq!(away(&scene), 1);
    scene.kill_daemon();
    let second = scene.status()["pid"].as_i64().unwrap();
    let check_all = |round| {
        let mut client = scene.connect();
        (0..2000).for_each(|page| check(&mut client, page, round));
    };
    assert_eq!(away(&scene), 1, "the next daemon knows");
    check_all(1);
    let mut client = scene.connect();
    (0..2000).for_each(|page| write(&mut client, page, 2));
    assert!(scene.weir(&["take", "all"]).status.success());
    assert_eq!(away(&scene), 0);
    check_all(2);
    assert_eq!(scene.terminate(), Some(0));
    assert!(!Path::new(&format!("/proc/{second}")).exists(), "the daemon ends with its keeper");
}

/// Reads the keeper's mapping of the largest host store: KiB resident, KiB locked, and the blocks
/// of the memory.
fn kept_pages(keeper: u32) -> (u64, u64, u64) {
    let smaps = fs::read_to_string(format!("/proc/{keeper}/smaps")).unwrap();
    let lines: Vec<&str> = smaps.lines().collect();
    let bytes = |header: &str| {
        let (from, to) = header.split_once(' ')?.0.split_once('-')?;
        Some(u64::from_str_radix(to, 16).ok()? - u64::from_str_radix(from, 16).ok()?)
    };
    let of_a_store = |&at: &usize| lines[at].contains("/memfd:weir-host");
    let largest = (0..lines.len()).filter(of_a_store).max_by_key(|&at| bytes(lines[at])).expect("a store");
    let mapping = &lines[largest..];
    let kib = |key: &str| {
        let line = mapping.iter().find_map(|line| line.strip_prefix(key)).expect("a mapping of the keeper");
        line.trim().strip_suffix(" kB").unwrap().parse().unwrap()
    };
    let address = mapping[0].split(' ').next().unwrap();
    let file = fs::metadata(format!("/proc/{keeper}/map_files/{address}")).unwrap();
    (kib("Rss:"), kib("Locked:"), std::os::unix::fs::MetadataExt::blocks(&file))
}

#[test]
fn memory_that_was_given_back_stays_away_across_any_number_of_deaths() {
    for swap in [&[][..], &["--swap", "--unsafe-no-flusher"]] {
        let stores = ["--keeper", "--store", "host:256MiB", "--store", "host:40MiB", "--size", "32MiB"];
        let mut scene = start("away", &[&stores[..], swap].concat());
        let keeper = scene.process.id();
        let mut client = scene.connect();
        (0..2000).for_each(|page| write(&mut client, page, 1));
        let all = kept_pages(keeper);
        assert!(scene.weir(&["give-back", "128MiB"]).status.success());
        let given_back = kept_pages(keeper);
        assert_eq!(all.2 - given_back.2, 128 << 11, "a chunk went");
        for kill in 1..=3 {
            let stop = AtomicBool::new(false);
            let most = thread::scope(|scope| {
                let watch = scope.spawn(|| {
                    let mut most = 0;
                    while !stop.load(Ordering::Relaxed) {
                        most = most.max(kept_pages(keeper).2);
                    }
                    most
                });
                let ends = Ends(&stop);
                scene.kill_daemon();
                assert_eq!(away(&scene), 1);
                drop(ends);
                watch.join().unwrap()
            });
            assert_eq!(most, given_back.2, "{swap:?}: kill {kill}");
        }
        let mut client = scene.connect();
        (0..2000).for_each(|page| check(&mut client, page, 1));
        assert!(scene.weir(&["take", "all"]).status.success());
        // The keeper is told a little later.
        let begun = Instant::now();
        while kept_pages(keeper).0 != all.0 {
            assert!(begun.elapsed() < PATIENCE, "the keeper maps {:?}, not {all:?}", kept_pages(keeper));
            thread::sleep(Duration::from_millis(5));
        }
        let taken = kept_pages(keeper);
        assert_eq!((taken.2, taken.1 > 0), (all.2, all.1 > 0), "{swap:?}");
        assert_eq!(scene.terminate(), Some(0));
    }
}

#[test]
fn what_went_for_a_sleep_and_nothing_else_comes_again_also_from_the_next_daemon() {
    let scene =
        start("asleep", &["--keeper", "--store", "host:256MiB", "--store", "host:40MiB", "--size", "32MiB"]);
    let asked = |arguments: &[&str]| {
        let output = scene.weir(arguments);
        assert!(output.status.success(), "{arguments:?}: {}", said(&output));
        String::from_utf8_lossy(&output.stdout).into_owned()
    };
    let nothing = asked(&["take", "--sleep"]);
    assert!(nothing.contains("nothing is given back for a sleep"), "{nothing}");
    asked(&["give-back", "1MiB"]);
    assert_eq!(away(&scene), 1, "a chunk is 128 MiB");
    asked(&["give-back", "--sleep"]);
    assert_eq!(away(&scene), 2);
    scene.kill_daemon();
    assert_eq!(away(&scene), 2);
    asked(&["take", "--sleep"]);
    assert_eq!(away(&scene), 1);
}

/// A management library whose card is what a file says: "free total display others".
fn fake_management_library(directory: &std::path::Path) -> bool {
    let fake = concat!(env!("CARGO_MANIFEST_DIR"), "/../weir-store/tests/fake_nvml/fake_nvml.c");
    let start = directory.join("start.c");
    let code = "char *getenv(const char *); void fake_nvml_file(const char *);\n\
        __attribute__((constructor)) static void start(void) { fake_nvml_file(getenv(\"WEIR_FAKE_CARD\")); }\n";
    fs::write(&start, code).unwrap();
    let built = Command::new("cc")
        .args(["-shared", "-fPIC", "-w", "-o"])
        .arg(directory.join("libnvidia-ml.so.1"))
        .args([fake.as_ref(), start.as_os_str()])
        .status();
    built.is_ok_and(|status| status.success())
}

/// A daemon on a card whose free memory the test sets.
struct Governed {
    scene: Daemon,
    directory: PathBuf,
}

impl Governed {
    /// Starts it. `None`, after printing the reason, if this machine has no such card.
    fn start(name: &str, flags: &[&str]) -> Option<Self> {
        let directory = std::env::temp_dir().join(format!("weir-{}-{name}-card", std::process::id()));
        fs::create_dir_all(&directory).unwrap();
        set_free(&directory, 8192);
        if !fake_management_library(&directory) {
            println!("skipped: no C compiler for the fake management library");
            return None;
        }
        let store = "vram:lavapipe?size=16MiB&chunk=4MiB&path=mapped";
        let flags = [&["--store", store, "--store", "host:16MiB", "--size", "16MiB"], flags].concat();
        let card = directory.join("card");
        let environment = [("LD_LIBRARY_PATH", directory.as_path()), ("WEIR_FAKE_CARD", &card)];
        let Some(scene) = try_start(name, &flags, &environment) else {
            println!("skipped: no software renderer for vram:lavapipe");
            return None;
        };
        Some(Governed { scene, directory })
    }

    fn free(&self, mib: u64) {
        set_free(&self.directory, mib);
    }

    fn wait_for(&self, chunks: u64) -> Duration {
        let begun = Instant::now();
        while away(&self.scene) != chunks {
            assert!(begun.elapsed() < PATIENCE, "{} chunks are away, not {chunks}", away(&self.scene));
            thread::sleep(Duration::from_millis(5));
        }
        begun.elapsed()
    }
}

impl Drop for Governed {
    fn drop(&mut self) {
        let _ = fs::remove_dir_all(&self.directory);
    }
}

fn set_free(directory: &Path, mib: u64) {
    let new = directory.join("card.new");
    fs::write(&new, format!("{} {} 0 0\n", mib << 20, 24u64 << 30)).unwrap();
    fs::rename(&new, directory.join("card")).unwrap();
}

#[test]
fn a_card_that_runs_short_gets_its_memory_back_unasked_and_lends_it_again_when_nobody_needs_it() {
    let Some(card) = Governed::start("governed", &[]) else { return };
    let mut client = card.scene.connect();
    (0..4096).for_each(|page| write(&mut client, page, 5));
    assert_eq!(away(&card.scene), 0, "there is enough for everybody");
    // A program allocates: less than the floor is left. The policy's own tests check how soon
    // memory must be given back.
    card.free(300);
    println!("given back after {:?}", card.wait_for(4));
    (0..4096).for_each(|page| check(&mut client, page, 5));
    card.free(8192);
    card.wait_for(0);
    (0..4096).for_each(|page| check(&mut client, page, 5));
    // Memory that a user gave back by hand stays away.
    assert!(card.scene.weir(&["give-back", "all"]).status.success());
    thread::sleep(Duration::from_secs(7));
    assert_eq!(away(&card.scene), 4);
}

#[test]
fn a_daemon_that_follows_another_takes_back_what_that_one_gave_unasked_and_nothing_else() {
    let Some(card) = Governed::start("heir", &["--keeper"]) else { return };
    let gave = card.scene.weir(&["give-back", "4MiB"]);
    assert!(gave.status.success(), "{}", said(&gave));
    card.free(300);
    card.wait_for(4);
    card.scene.kill_daemon();
    assert_eq!(away(&card.scene), 4);
    card.free(8192);
    card.wait_for(1);
    // Once a user asks for all of the memory, memory that the governor gave back is not taken again
    // either.
    card.free(300);
    card.wait_for(4);
    let gave = card.scene.weir(&["give-back", "all"]);
    assert!(gave.status.success(), "{}", said(&gave));
    card.free(8192);
    thread::sleep(Duration::from_secs(7));
    assert_eq!(away(&card.scene), 4);
}

#[test]
fn a_wrong_amount_is_a_mistake_in_usage() {
    for amount in [&["0"][..], &["much"], &["-1GiB"], &[], &["all", "--sleep"]] {
        let mut weir = Command::new(env!("CARGO_BIN_EXE_weir"));
        let output = weir.arg("give-back").args(amount).output().unwrap();
        assert_eq!(output.status.code(), Some(2), "{amount:?}: {}", said(&output));
    }
}
