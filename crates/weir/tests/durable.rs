//! `weir cache` over durable logs, as processes: killed under load and opened again, checked,
//! damaged, and never taken by mistake.
//!
//! `WEIR_SCALE=full` kills the daemon 200 times; without it, a few times. `WEIR_RECORD=FILE` writes
//! the counts of that as JSON.

mod common;

use common::{has_bar, is_plain, on_a_terminal};
use std::fs::{self, File, OpenOptions};
use std::os::unix::fs::FileExt as _;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Output, Stdio};
use std::time::{Duration, Instant};

const PAGE: usize = 4096;

struct Chance(u64);

impl Chance {
    fn below(&mut self, below: u64) -> u64 {
        self.0 = self.0.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
        ((self.0 >> 33) * below) >> 31
    }
}

/// A directory with the disks of a log, and the cache that runs in it.
struct Scene {
    directory: PathBuf,
    cache: Option<Child>,
}

impl Scene {
    fn new(name: &str) -> Self {
        let directory = std::env::temp_dir().join(format!("weir-durable-{name}-{}", std::process::id()));
        fs::create_dir_all(&directory).unwrap();
        Scene { directory, cache: None }
    }

    fn disk(&self, at: usize) -> PathBuf {
        self.directory.join(["a", "b"][at])
    }

    /// The home's URL, with a query.
    fn home(&self, query: &str) -> String {
        format!("log:{},{}{query}", self.disk(0).display(), self.disk(1).display())
    }

    fn file(&self) -> PathBuf {
        self.directory.join("disk")
    }

    fn control(&self) -> PathBuf {
        self.directory.join("control.sock")
    }

    fn serve(&self, arguments: &[&str]) -> Command {
        let mut command = Command::new(env!("CARGO_BIN_EXE_weir"));
        command.arg("cache").args(arguments).args(["--store", "host:16MiB", "--stream", "0"]);
        command.arg("--fuse").arg(self.file()).arg("--control").arg(self.control());
        command.env("WEIR_SEAL", "abort").stdin(Stdio::null());
        command
    }

    fn create(&self, flags: &[&str]) -> Command {
        let home = self.home("?size=256MiB&encrypt=off");
        self.serve(&[&["create", "--durable", "--home", &home], flags].concat())
    }

    fn open(&self) -> Command {
        self.serve(&["open", "--home", &self.home("")])
    }

    /// Starts the cache. Returns false, after printing the reason, if this machine cannot mount.
    fn start(&mut self, name: &str, command: Command) -> bool {
        self.cache = common::cache_comes_up(name, command, &self.control());
        self.cache.is_some()
    }

    fn weir(&self, arguments: &[&str]) -> Output {
        let mut command = Command::new(env!("CARGO_BIN_EXE_weir"));
        command.arg("cache").args(arguments).stdin(Stdio::null()).output().unwrap()
    }

    /// A check draws a bar on a terminal, over all segments in use, and nothing into a pipe.
    fn draws_a_bar(&self) {
        let mut command = Command::new(env!("CARGO_BIN_EXE_weir"));
        command.args(["cache", "check", &self.home("")]);
        let Some((code, drawn)) = on_a_terminal("a bar of a check", &command) else { return };
        assert!(code == Some(0) && has_bar(&drawn, "checking "), "{drawn:?}");
        let used = self.check().1["used_segments"].as_u64().unwrap();
        assert!(drawn.contains(&format!("{used}.00 MiB of {used}.00 MiB, ")), "{used} in {drawn:?}");
        let piped = command.output().unwrap();
        assert!(piped.status.success() && is_plain(&piped.stderr) && is_plain(&piped.stdout), "{piped:?}");
    }

    fn check(&self) -> (Option<i32>, serde_json::Value, String) {
        let output = self.weir(&["check", "--json", &self.home("")]);
        let said = String::from_utf8_lossy(&output.stderr).into_owned();
        let found = serde_json::from_slice(&output.stdout).unwrap_or_default();
        (output.status.code(), found, said)
    }

    fn refusal(&self, mut command: Command) -> (Option<i32>, String) {
        let output = command.output().unwrap();
        (output.status.code(), String::from_utf8_lossy(&output.stderr).into_owned())
    }

    /// Kills the daemon, and takes its mount away.
    fn kill(&mut self) {
        let mut cache = self.cache.take().unwrap();
        cache.kill().unwrap();
        cache.wait().unwrap();
        let begun = Instant::now();
        while !Command::new("umount").arg(self.file()).stderr(Stdio::null()).status().unwrap().success() {
            assert!(begun.elapsed() < Duration::from_secs(60), "the dead daemon's file is unmounted");
            std::thread::sleep(Duration::from_millis(10));
        }
        let _ = fs::remove_file(self.control());
    }

    fn detach(&mut self) {
        let control = self.control().display().to_string();
        let output = self.weir(&["detach", "--control", &control]);
        assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
        assert!(self.cache.take().unwrap().wait().unwrap().success());
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

fn stamp(value: u64) -> Vec<u8> {
    value.to_le_bytes().repeat(PAGE / 8)
}

/// The value of a page; `None`: it is torn.
fn value(bytes: &[u8]) -> Option<u64> {
    let value = u64::from_le_bytes(bytes[..8].try_into().unwrap());
    bytes.chunks(8).all(|word| word == value.to_le_bytes()).then_some(value)
}

/// The values that a page may have after a kill, the oldest first: the first one was flushed.
type Pages = Vec<Vec<u64>>;

/// Writes random pages and flushes now and then, until the daemon is gone. Returns the number of
/// flushes.
fn load(file: &File, pages: &mut Pages, chance: &mut Chance, next: &mut u64) -> u64 {
    let mut flushes = 0;
    loop {
        for _ in 0..chance.below(300) {
            // Half of the writes use an eighth of the pages.
            let all = pages.len() as u64;
            let below = if chance.below(2) == 0 { all / 8 } else { all };
            let page = chance.below(below);
            *next += 1;
            pages[page as usize].push(*next);
            if file.write_all_at(&stamp(*next), page * PAGE as u64).is_err() {
                return flushes;
            }
        }
        if file.sync_data().is_err() {
            return flushes;
        }
        flushes += 1;
        for values in pages.iter_mut().filter(|values| values.len() > 1) {
            values.drain(..values.len() - 1);
        }
    }
}

#[test]
fn a_daemon_that_is_killed_under_load_takes_no_flushed_page_of_a_durable_log_with_it() {
    let full = std::env::var("WEIR_SCALE").is_ok_and(|scale| scale == "full");
    let kills = if full { 200 } else { 5 };
    let mut scene = Scene::new("kills");
    if !scene.start("kills", scene.create(&[])) {
        return;
    }
    let count = fs::metadata(scene.file()).unwrap().len() / PAGE as u64;
    let mut pages: Pages = vec![vec![0]; count as usize];
    let (mut chance, mut next, mut flushes, mut newer, mut read) = (Chance(15), 0, 0, 0, 0u64);
    for kill in 0..kills {
        let file = open(&scene.file());
        let cache = rustix::process::Pid::from_child(scene.cache.as_ref().unwrap());
        // The load must reach a flush at times, however slow the machine is; at others it dies in
        // the first one.
        let delay = Duration::from_millis(chance.below(if kill % 3 == 0 { 100 } else { 1500 }));
        flushes += std::thread::scope(|scope| {
            scope.spawn(move || {
                std::thread::sleep(delay);
                rustix::process::kill_process(cache, rustix::process::Signal::KILL).unwrap();
            });
            load(&file, &mut pages, &mut chance, &mut next)
        });
        drop(file);
        scene.kill();
        let (code, found, said) = scene.check();
        assert!(code == Some(0) && found["is_clean"] == true, "kill {kill}: {found} {said}");
        assert!(scene.start("kills", scene.open()));
        let file = open(&scene.file());
        let mut bytes = vec![0; PAGE * 256];
        for first in (0..count).step_by(256) {
            let some = (count - first).min(256) as usize;
            file.read_exact_at(&mut bytes[..some * PAGE], first * PAGE as u64).unwrap();
            for (page, bytes) in (first..).zip(bytes[..some * PAGE].chunks(PAGE)) {
                let (allowed, found) = (&mut pages[page as usize], value(bytes));
                let is_allowed = found.is_some_and(|found| allowed.contains(&found));
                assert!(is_allowed, "kill {kill}: page {page} is {found:?}, not of {allowed:?}");
                newer += u64::from(found != Some(allowed[0]));
                *allowed = vec![found.unwrap()];
                read += 1;
            }
        }
    }
    let counts = serde_json::json!({
        "schema": 1, "command": "WEIR_SCALE=full WEIR_RECORD=FILE cargo test -p weir --test durable killed",
        "kills": kills, "writes": next, "flushes": flushes, "pages_read": read, "pages_lost": 0, "pages_torn": 0,
        "pages_newer_than_flushed": newer, "checks_clean": kills,
    });
    println!("{counts}");
    if let Some(path) = std::env::var_os("WEIR_RECORD") {
        fs::write(path, format!("{counts:#}\n")).unwrap();
    }
    assert!(next > 0 && (flushes > 0 || !full), "the load has written: {counts}");
    scene.detach();
    let (code, found, said) = scene.check();
    assert!(code == Some(0) && found["is_clean"] == true, "{found} {said}");
}

#[test]
fn a_durable_log_is_opened_again_checked_and_never_taken_by_mistake() {
    let mut scene = Scene::new("again");
    let (code, said) =
        scene.refusal(scene.serve(&["create", "--durable", "--home", &scene.home("?size=256MiB")]));
    assert!(code == Some(2) && said.contains("add ?encrypt=off"), "{code:?} {said}");
    let (code, said) =
        scene.refusal(scene.serve(&["create", "--durable", "--home", &scene.home("?encrypt=off")]));
    assert!(code == Some(2) && said.contains("how large shall"), "{code:?} {said}");
    assert!(!scene.disk(0).exists(), "nothing was made");
    let huge = scene.home("?size=15TiB&encrypt=off");
    let (code, said) = scene.refusal(scene.serve(&["create", "--durable", "--home", &huge]));
    assert!(code == Some(1) && said.contains("is there room?"), "{code:?} {said}");
    assert!(!scene.disk(0).exists() && !scene.disk(1).exists(), "nothing is left of it");
    fs::write(scene.disk(0), vec![0; 4 << 20]).unwrap();
    let (code, said) = scene.refusal(scene.create(&[]));
    assert!(code == Some(2) && said.contains("and other parts of the log do"), "{code:?} {said}");
    assert_eq!(fs::metadata(scene.disk(0)).unwrap().len(), 4 << 20, "and nothing is changed");
    fs::remove_file(scene.disk(0)).unwrap();
    let raw = scene.disk(0).display().to_string();
    let (code, said) = scene.refusal(scene.serve(&["create", "--durable", "--home", &raw]));
    assert!(code == Some(2) && said.contains("is durable anyway: leave it away"), "{code:?} {said}");
    let (code, said) = scene.refusal(scene.serve(&["open", "--home", &raw]));
    assert!(
        code == Some(2) && said.contains("carries nothing of the cache's: write log:"),
        "{code:?} {said}"
    );
    if !scene.start("again", scene.create(&[])) {
        return;
    }
    let file = open(&scene.file());
    let pages = file.metadata().unwrap().len() / PAGE as u64;
    for page in 0..pages {
        file.write_all_at(&stamp(page + 7), page * PAGE as u64).unwrap();
    }
    let (code, _, said) = scene.check();
    assert!(code == Some(1) && said.contains("in use"), "{code:?} {said}");
    drop(file);
    scene.detach();

    // Neither a new log nor another cache takes it.
    let twice = scene.serve(&["create", "--durable", "--home", &scene.home("?encrypt=off")]);
    let (code, said) = scene.refusal(twice);
    assert!(
        code == Some(1) && said.contains("a carries a durable log (weir cache open serves it)"),
        "{said}"
    );
    let (code, said) = scene.refusal(scene.serve(&["create", "--home", &raw]));
    assert!(code == Some(1) && said.contains("carries a durable log"), "{said}");
    let scratch = scene.serve(&["create", "--home", &scene.home("?size=256MiB")]);
    let (code, said) = scene.refusal(scratch);
    assert!(code == Some(1) && said.contains("carries a durable log"), "{said}");
    let swapped = format!("log:{},{}", scene.disk(1).display(), scene.disk(0).display());
    let (code, said) = scene.refusal(scene.serve(&["open", "--home", &swapped]));
    assert!(code == Some(1) && said.contains("name the disks in the order of its making"), "{said}");
    let (code, found, said) = scene.check();
    assert!(code == Some(0) && found["is_clean"] == true, "{found} {said}");
    assert_eq!(found["live_bytes"], pages * PAGE as u64);
    scene.draws_a_bar();

    assert!(scene.start("again", scene.open()));
    let file = open(&scene.file());
    let mut bytes = vec![0; PAGE];
    for page in 0..pages {
        file.read_exact_at(&mut bytes, page * PAGE as u64).unwrap();
        assert_eq!(value(&bytes), Some(page + 7), "page {page}");
    }
    let control = scene.control().display().to_string();
    let shown = String::from_utf8(scene.weir(&["status", "--control", &control]).stdout).unwrap();
    assert!(shown.contains("durable   ") && shown.contains(" commits, "), "{shown}");
    drop(file);
    scene.detach();

    // A changed byte of a page is found, and so is a summary that is gone.
    let (number, at) = (0..2)
        .find_map(|disk| {
            let whole = fs::read(scene.disk(disk)).unwrap();
            let at = whole.chunks(PAGE).rposition(|page| value(page) == Some(9))?;
            Some((disk, (at * PAGE) as u64))
        })
        .expect("page 2 lies on a disk");
    let disk = open(&scene.disk(number));
    let is_damaged = |code: Option<i32>, said: &str| {
        assert!(code == Some(1) && said.contains("the durable log is damaged"), "{said}");
    };
    disk.write_all_at(&[0xff], at).unwrap();
    let (code, found, said) = scene.check();
    is_damaged(code, &said);
    assert_eq!(found["bad_page_count"], 1, "{found}");
    assert_eq!(found["bad_pages"][0]["page"], 2);
    assert_eq!(found["bad_pages"][0]["disk"], scene.disk(number).display().to_string());
    assert_eq!(found["bad_pages"][0]["offset"], at);
    let output = scene.weir(&["check", &scene.home("")]);
    let shown = String::from_utf8(output.stdout).unwrap();
    assert!(shown.contains("page 2 at byte") && !shown.contains("clean"), "{shown}");
    let summary = (at / (1 << 20) + 1) * (1 << 20) - PAGE as u64;
    disk.write_all_at(&[0; PAGE], summary).unwrap();
    let (code, found, said) = scene.check();
    is_damaged(code, &said);
    assert!(found["damage"][0].as_str().unwrap().contains("its summary is damaged"), "{found}");
    let (code, said) = scene.refusal(scene.open());
    assert!(code == Some(1) && said.contains("weir cache check says what is left"), "{said}");

    // Named again, it is erased.
    let wipes = [scene.disk(0), scene.disk(1)].map(|disk| disk.display().to_string());
    let home = scene.home("?encrypt=off");
    let again =
        scene.serve(&["create", "--durable", "--home", &home, "--wipe", &wipes[0], "--wipe", &wipes[1]]);
    assert!(scene.start("again", again));
    open(&scene.file()).read_exact_at(&mut bytes, 2 * PAGE as u64).unwrap();
    assert_eq!(value(&bytes), Some(0));
    scene.detach();
}
