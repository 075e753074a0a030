//! `weir give-back` and `weir take`: a daemon's memory goes and comes while clients use the device.

use std::fs;
use std::io::{BufRead as _, BufReader, Write as _};
use std::os::unix::net::UnixStream;
use std::path::PathBuf;
use std::process::{Child, Command, Output};
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread;
use std::time::{Duration, Instant};
use weir_export::nbd::client::{Client, Wish};

const PAGE: usize = 4096;
const PATIENCE: Duration = Duration::from_secs(30);
/// Two stores: four chunks of 4 MiB, and room for everything below them.
const STORES: [&str; 6] =
    ["--store", "sim:size=16MiB,chunk=4MiB", "--store", "host:16MiB", "--size", "16MiB"];

struct Scene {
    directory: PathBuf,
    daemon: Child,
}

impl Scene {
    fn start(name: &str, flags: &[&str]) -> Self {
        Self::try_start(name, flags, &[]).expect("the daemon starts")
    }

    /// `None` where the daemon ends at its start.
    fn try_start(name: &str, flags: &[&str], environment: &[(&str, &std::path::Path)]) -> Option<Self> {
        let directory = std::env::temp_dir().join(format!("weir-{}-{name}", std::process::id()));
        fs::create_dir_all(&directory).unwrap();
        let address = format!("unix:{}", directory.join("nbd").display());
        let daemon = Command::new(env!("CARGO_BIN_EXE_weir"))
            .args(["serve", "--log", "warn", "--connections", "4", "--nbd", &address, "--control"])
            .arg(directory.join("control"))
            .args(flags)
            .env("WEIR_SEAL", "abort")
            .envs(environment.iter().copied())
            .spawn()
            .unwrap();
        let mut scene = Scene { directory, daemon };
        let begun = Instant::now();
        while UnixStream::connect(scene.directory.join("control")).is_err() {
            assert!(begun.elapsed() < PATIENCE, "the daemon does not listen");
            if scene.daemon.try_wait().unwrap().is_some() {
                return None;
            }
            thread::sleep(Duration::from_millis(5));
        }
        Some(scene)
    }

    fn connect(&self) -> Client {
        Client::unix(self.directory.join("nbd"), &Wish::default()).expect("a connection")
    }

    fn weir(&self, arguments: &[&str]) -> Output {
        Command::new(env!("CARGO_BIN_EXE_weir"))
            .args(arguments)
            .arg("--control")
            .arg(self.directory.join("control"))
            .output()
            .unwrap()
    }

    fn status(&self) -> serde_json::Value {
        let output = self.weir(&["status", "--json"]);
        assert!(output.status.success(), "{output:?}");
        serde_json::from_slice(&output.stdout).unwrap()
    }

    /// Chunks of the first store that were given back.
    fn away(&self) -> u64 {
        self.status()["stores"][0]["chunks"]["given_back"].as_u64().unwrap()
    }
}

impl Drop for Scene {
    fn drop(&mut self) {
        let _ = self.daemon.kill();
        let _ = self.daemon.wait();
        let _ = fs::remove_dir_all(&self.directory);
    }
}

/// Ends the users also where the test fails.
struct Ends<'a>(&'a AtomicBool);

impl Drop for Ends<'_> {
    fn drop(&mut self) {
        self.0.store(true, Ordering::Relaxed);
    }
}

fn said(output: &Output) -> String {
    String::from_utf8_lossy(&output.stderr).trim().to_owned()
}

/// A page that says which page and round it is, all over.
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
    let scene = Scene::start("give-back", &STORES);
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
            let away = if round % 2 == 0 { 4 } else { 2 };
            assert_eq!(scene.away(), away, "6 MiB are two chunks of 4");
            let took = scene.weir(&["take", "all"]);
            assert!(took.status.success(), "{}", said(&took));
            assert_eq!(scene.away(), 0);
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
    let scene = Scene::start("rise", &STORES);
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
    let before = wakes();
    thread::sleep(Duration::from_millis(500));
    assert_eq!(wakes(), before, "a worker with nothing to do sleeps");
}

#[test]
fn backing_makes_the_device_larger_than_the_memory_and_holds_everything_when_that_goes() {
    let file = std::env::temp_dir().join(format!("weir-{}-backing-file", std::process::id()));
    let path = file.to_str().unwrap();
    let scene = Scene::start(
        "backing",
        &["--store", "sim:size=16MiB,chunk=4MiB", "--size", "32MiB", "--backing", path],
    );
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
    assert_eq!((&status["stores"][0]["slots_used"], scene.away()), (&0.into(), 4));
    // Every page can be written anew in what is left.
    (0..pages).for_each(|page| write(&mut client, page, 2));
    assert!(scene.weir(&["take", "8MiB"]).status.success());
    assert_eq!(scene.away(), 2);
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
    for (path, words) in [
        ("/nowhere/at/all/backing", "does not exist"),
        (data_path, "would be lost"),
        ("/tmp", "Directory"),
        (&format!("{data_path}.large?size=8TiB"), "free"),
    ] {
        let output = Command::new(env!("CARGO_BIN_EXE_weir"))
            .args(["serve", "--store", "host:1MiB", "--nbd", "unix:/tmp/never", "--backing", path])
            .output()
            .unwrap();
        let line = said(&output);
        assert_eq!(output.status.code(), Some(1), "{path}: {line}");
        assert!(!line.contains('\n') && line.contains(words), "{path}: {line}");
    }
    assert_eq!(fs::read(&data).unwrap(), b"somebody's");
    fs::remove_file(&data).unwrap();
}

#[test]
fn without_room_elsewhere_nothing_is_given_back_and_one_line_says_why() {
    let scene = Scene::start("no-room", &["--store", "sim:size=16MiB,chunk=4MiB"]);
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
    assert_eq!(scene.away(), 0);
    // Nothing was given back, so there is nothing to take: done.
    assert!(scene.weir(&["take", "all"]).status.success());
}

#[test]
fn a_long_request_is_answered_by_lines_of_progress_and_a_last_line() {
    let scene = Scene::start("lines", &STORES);
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
    let scene = Scene::start(
        "killed",
        &["--keeper", "--store", "host:128MiB", "--store", "host:40MiB", "--size", "32MiB"],
    );
    let mut client = scene.connect();
    (0..2000).for_each(|page| write(&mut client, page, 1));
    let gave = scene.weir(&["give-back", "all"]);
    assert!(gave.status.success(), "{}", said(&gave));
    assert_eq!(scene.away(), 1);
    let first = scene.status()["pid"].as_i64().unwrap();
    let pid = rustix::process::Pid::from_raw(first as i32).unwrap();
    rustix::process::kill_process(pid, rustix::process::Signal::KILL).unwrap();
    let begun = Instant::now();
    let answers = || scene.weir(&["status"]).status.success();
    while !answers() || scene.status()["pid"] == first {
        assert!(begun.elapsed() < PATIENCE, "no other daemon");
        thread::sleep(Duration::from_millis(10));
    }
    let second = scene.status()["pid"].as_i64().unwrap();
    let check_all = |round| {
        let mut client = scene.connect();
        (0..2000).for_each(|page| check(&mut client, page, round));
    };
    assert_eq!(scene.away(), 1, "the next daemon knows");
    check_all(1);
    let mut client = scene.connect();
    (0..2000).for_each(|page| write(&mut client, page, 2));
    assert!(scene.weir(&["take", "all"]).status.success());
    assert_eq!(scene.away(), 0);
    check_all(2);
    // The keeper goes with the test; its daemon would start to wonder.
    let pid = rustix::process::Pid::from_raw(scene.daemon.id() as i32).unwrap();
    rustix::process::kill_process(pid, rustix::process::Signal::TERM).unwrap();
    let process = std::path::PathBuf::from(format!("/proc/{second}"));
    while process.exists() && begun.elapsed() < PATIENCE {
        thread::sleep(Duration::from_millis(10));
    }
    assert!(!process.exists(), "the daemon ends with its keeper");
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

#[test]
fn a_card_that_runs_short_gets_its_memory_back_unasked_and_lends_it_again_when_nobody_needs_it() {
    let directory = std::env::temp_dir().join(format!("weir-{}-card", std::process::id()));
    fs::create_dir_all(&directory).unwrap();
    let card = directory.join("card");
    let free = |mib: u64| {
        let new = directory.join("card.new");
        fs::write(&new, format!("{} {} 0 0\n", mib << 20, 24u64 << 30)).unwrap();
        fs::rename(&new, &card).unwrap();
    };
    free(8192);
    if !fake_management_library(&directory) {
        println!("skipped: no C compiler for the fake management library");
        return;
    }
    let stores = [
        "--store",
        "vram:lavapipe?size=16MiB&chunk=4MiB&path=mapped",
        "--store",
        "host:16MiB",
        "--size",
        "16MiB",
    ];
    let environment = [("LD_LIBRARY_PATH", directory.as_path()), ("WEIR_FAKE_CARD", &card)];
    let Some(scene) = Scene::try_start("governed", &stores, &environment) else {
        println!("skipped: no software renderer for vram:lavapipe");
        return;
    };
    let mut client = scene.connect();
    (0..4096).for_each(|page| write(&mut client, page, 5));
    assert_eq!(scene.away(), 0, "there is enough for everybody");
    let wait_for = |away: u64| {
        let begun = Instant::now();
        while scene.away() != away {
            assert!(begun.elapsed() < PATIENCE, "{} chunks are away, not {away}", scene.away());
            thread::sleep(Duration::from_millis(5));
        }
        begun.elapsed()
    };
    // Somebody allocates: less than the floor is left.
    free(300);
    let took = wait_for(4);
    assert!(took < Duration::from_secs(5), "it took {took:?}");
    (0..4096).for_each(|page| check(&mut client, page, 5));
    free(8192);
    wait_for(0);
    (0..4096).for_each(|page| check(&mut client, page, 5));
    // What somebody gave back by hand stays away.
    assert!(scene.weir(&["give-back", "all"]).status.success());
    thread::sleep(Duration::from_secs(7));
    assert_eq!(scene.away(), 4);
    drop(scene);
    fs::remove_dir_all(&directory).unwrap();
}

#[test]
fn the_benchmark_drives_a_daemon_and_finds_every_page() {
    let json = std::env::temp_dir().join(format!("weir-{}-bench.json", std::process::id()));
    let output = Command::new(env!("CARGO_BIN_EXE_weir"))
        .args(["bench", "give-back", "--store", "sim:size=16MiB,chunk=4MiB", "--size", "16MiB"])
        .args(["--cycles", "2", "--users", "2", "--json", json.to_str().unwrap()])
        .output()
        .unwrap();
    let text = fs::read_to_string(&json).unwrap_or_else(|_| panic!("no report: {}", said(&output)));
    let report: serde_json::Value = serde_json::from_str(&text).unwrap();
    let row = |metric: &str| {
        let rows = report["rows"].as_array().unwrap();
        rows.iter().find(|row| row["metric"] == metric).map(|row| row["value"].as_f64().unwrap())
    };
    assert_eq!(row("mismatches"), Some(0.0), "{report}");
    assert!(row("checked") > Some(4000.0) && row("gb_s") > Some(0.0), "{report}");
    fs::remove_file(&json).unwrap();
}

#[test]
fn a_wrong_amount_is_a_mistake_in_usage() {
    for amount in ["0", "much", "-1GiB"] {
        let output = Command::new(env!("CARGO_BIN_EXE_weir")).args(["give-back", amount]).output().unwrap();
        assert_eq!(output.status.code(), Some(2), "{amount}: {}", said(&output));
    }
}
