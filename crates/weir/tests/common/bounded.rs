//! Functions for the tests of `weir run`.

use super::{WEIR, is_alive};
use std::fs;
use std::io::Read as _;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::sync::Once;
use std::thread;
use std::time::{Duration, Instant};

pub const LIMIT_MIB: usize = 48;

/// Builds the object that is preloaded, beside the program.
pub fn build() {
    static BUILD: Once = Once::new();
    BUILD.call_once(|| {
        let directory = Path::new(WEIR).parent().expect("it lies somewhere");
        let profile = match directory.file_name().and_then(|name| name.to_str()) {
            Some("debug") | None => "dev",
            Some(other) => other,
        };
        let cargo = std::env::var_os("CARGO").unwrap_or_else(|| "cargo".into());
        let built = Command::new(cargo)
            .args(["build", "--locked", "--package", "weir-preload", "--profile", profile, "--target-dir"])
            .arg(directory.parent().expect("the target directory"))
            .output()
            .expect("cargo runs");
        assert!(built.status.success(), "{}", String::from_utf8_lossy(&built.stderr));
    });
}

/// Whether this machine allows programs to be bounded; if not, prints that.
pub fn can_run(name: &str) -> bool {
    build();
    let run = ["run", "--resident", "32MiB", "--", "/bin/true"];
    let output = Command::new(WEIR).args(run).stdin(Stdio::null()).output().expect("it runs");
    let said = String::from_utf8_lossy(&output.stderr);
    if said.contains("userfaultfd") {
        println!("skipped: {name}: {}", said.trim());
        return false;
    }
    assert!(output.status.success(), "{said}");
    true
}

/// A directory of a test.
pub struct Scratch(pub PathBuf);

impl Scratch {
    pub fn new(name: &str) -> Self {
        let directory = std::env::temp_dir().join(format!("weir-test-run-{}-{name}", std::process::id()));
        fs::create_dir_all(&directory).unwrap();
        Scratch(directory)
    }

    pub fn file(&self, name: &str, content: &str) -> PathBuf {
        let file = self.0.join(name);
        fs::write(&file, content).unwrap();
        file
    }
}

impl Drop for Scratch {
    fn drop(&mut self) {
        let _ = fs::remove_dir_all(&self.0);
    }
}

/// The directory of a run, by the process number of `weir run`. If the run has no directory, this
/// is a path that does not exist.
pub fn directory_of(run: impl std::fmt::Display) -> PathBuf {
    directory_in(&std::env::temp_dir(), run)
}

/// The directory of a run whose `TMPDIR` was this one.
pub fn directory_in(parent: &Path, run: impl std::fmt::Display) -> PathBuf {
    let start = format!("weir-run-{run}-");
    let entries = fs::read_dir(parent).into_iter().flatten().flatten();
    let mut names = entries.map(|entry| entry.file_name());
    let name = names.find(|name| name.to_str().is_some_and(|name| name.starts_with(&start)));
    parent.join(name.unwrap_or(start.into()))
}

/// Compiles a C program.
pub fn compiled(name: &str, source: &Path, scratch: &Scratch) -> Option<PathBuf> {
    let program = scratch.0.join(source.file_stem().expect("a file"));
    match Command::new("cc").args(["-O1", "-pthread", "-o"]).args([&program, source]).output() {
        Ok(output) => {
            assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
            Some(program)
        }
        Err(error) => {
            println!("skipped: {name}: no C compiler: {error}");
            None
        }
    }
}

/// The path of a program that is in PATH.
pub fn program(name: &str) -> Option<String> {
    let path = std::env::var_os("PATH")?;
    let found =
        std::env::split_paths(&path).map(|directory| directory.join(name)).find(|file| file.is_file());
    if found.is_none() {
        println!("skipped: {name}: not installed");
    }
    found?.to_str().map(str::to_owned)
}

/// The path of the interpreter itself: the file in PATH may be a script that looks for it.
pub fn python() -> Option<String> {
    let any = program("python3")?;
    let output = Command::new(any).args(["-c", "import sys; print(sys.executable)"]).output().ok()?;
    Some(String::from_utf8(output.stdout).ok()?.trim().to_owned()).filter(|path| !path.is_empty())
}

/// Functions of libc, and memory that is filled with numbers and checked.
pub const PRELUDE: &str = "
import ctypes, mmap, os, signal, socket, subprocess, sys, time
libc = ctypes.CDLL(None, use_errno=True)
def new(size): return mmap.mmap(-1, size, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
def fill(memory, seed):
    for at in range(0, len(memory), 4096): memory[at:at + 8] = (at ^ seed).to_bytes(8, 'little')
def check(memory, seed):
    return all(memory[at:at + 8] == (at ^ seed).to_bytes(8, 'little') for at in range(0, len(memory), 4096))
";

pub fn line(lines: &mut impl std::io::BufRead) -> String {
    let mut text = String::new();
    lines.read_line(&mut text).unwrap();
    text.trim().to_owned()
}

/// A program whose four threads go through its memory, two in order and two at random, write, and
/// compare with what they wrote before. It ends with 1 at the first difference. For each byte that
/// it reads it prints how many pages they have checked.
pub const SWEEPER: &str = r#"
#include <pthread.h>
#include <stdio.h>
#include <sys/mman.h>
#include <unistd.h>
enum { PAGES = 40960, THREADS = 4, WORDS = 512 };
static unsigned long *memory;
static unsigned long written[PAGES]; /* static arrays are not managed */
static unsigned long word(unsigned long page, unsigned long round) { return page * 0x9e3779b97f4a7c15 ^ round; }
static volatile unsigned long done[THREADS];
static void put(unsigned long page) {
    written[page]++;
    memory[page * WORDS] = memory[page * WORDS + WORDS - 1] = word(page, written[page]);
}
static void *sweep(void *number) {
    unsigned long me = (unsigned long)number, chance = me + 1;
    for (unsigned long at = 0;; at++) {
        chance = chance * 6364136223846793005 + 1442695040888963407;
        unsigned long page = (me < 2 ? at : chance >> 33) % (PAGES / THREADS) + me * (PAGES / THREADS);
        unsigned long right = word(page, written[page]);
        if (memory[page * WORDS] != right || memory[page * WORDS + WORDS - 1] != right) {
            dprintf(2, "page %lu is not what was written\n", page);
            _exit(1);
        }
        put(page);
        done[me]++;
    }
}
int main(void) {
    memory = mmap(0, PAGES * 4096ul, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    if (memory == MAP_FAILED) return 2;
    for (unsigned long page = 0; page < PAGES; page++) put(page);
    pthread_t thread;
    for (unsigned long me = 0; me < THREADS; me++)
        if (pthread_create(&thread, 0, sweep, (void *)me)) return 2;
    dprintf(1, "%d\n", getpid());
    char byte;
    while (read(0, &byte, 1) > 0) dprintf(1, "%lu\n", done[0] + done[1] + done[2] + done[3]);
    _exit(0);
}
"#;

/// Compiles [`SWEEPER`] in a directory of the test. Where the machine cannot run it, says why in a
/// line, and returns `None`.
pub fn sweeper(name: &str) -> Option<(Scratch, PathBuf)> {
    if !can_run(name) {
        return None;
    }
    let scratch = Scratch::new(name);
    let source = scratch.file("sweeper.c", SWEEPER);
    let program = compiled(name, &source, &scratch)?;
    Some((scratch, program))
}

/// A program under `weir run`. It is killed when this is dropped.
pub struct Sweeping {
    pub run: std::process::Child,
    pub pid: u32,
    lines: std::io::BufReader<std::process::ChildStdout>,
    errors: std::io::BufReader<std::process::ChildStderr>,
    said: String,
}

impl Sweeping {
    /// Starts a program under `weir run`, with these further flags.
    pub fn start(program: &Path, flags: &[&str]) -> Self {
        let limit = format!("{LIMIT_MIB}MiB");
        let mut command = Command::new(WEIR);
        // Several threads, so that daemons die while each of their connections has pages under way.
        let threads = ["run", "--threads", "3"];
        command.args(threads).args(["--resident", &limit, "--store", "host:512MiB"]).args(flags);
        Self::of(command.arg("--").arg(program))
    }

    /// Starts a program that prints its process number.
    pub fn of(command: &mut Command) -> Self {
        let piped = command.stdin(Stdio::piped()).stdout(Stdio::piped()).stderr(Stdio::piped());
        let mut run = piped.spawn().unwrap();
        let mut lines = std::io::BufReader::new(run.stdout.take().expect("piped"));
        let pid = line(&mut lines).parse().unwrap();
        let errors = std::io::BufReader::new(run.stderr.take().expect("piped"));
        Sweeping { run, pid, lines, errors, said: String::new() }
    }

    /// The keeper of the run; without a keeper, the daemon.
    pub fn keeper(&self) -> u32 {
        let others: Vec<u32> =
            children(self.run.id()).into_iter().filter(|number| *number != self.pid).collect();
        assert_eq!(others.len(), 1, "the run has its program and its keeper or daemon");
        others[0]
    }

    /// The daemon of a run with `--keeper yes`, or with `--keeper no`.
    pub fn daemon(&self, keeper: &str) -> u32 {
        if keeper == "yes" { self.daemon_after(0) } else { self.keeper() }
    }

    /// The daemon that the keeper has started after this one.
    pub fn daemon_after(&self, before: u32) -> u32 {
        let keeper = self.keeper();
        let begun = Instant::now();
        loop {
            if let Some(daemon) = children(keeper).into_iter().find(|number| *number != before) {
                return daemon;
            }
            assert!(begun.elapsed() < Duration::from_secs(120), "the keeper starts no daemon");
            thread::sleep(Duration::from_millis(1));
        }
    }

    /// Returns once the run has said these words.
    pub fn says(&mut self, words: &str) {
        while !self.said.contains(words) {
            let read = std::io::BufRead::read_line(&mut self.errors, &mut self.said).unwrap();
            assert!(read > 0, "it has ended without {words:?}: {}", self.said);
        }
    }

    /// The next line of its output.
    pub fn line(&mut self) -> String {
        line(&mut self.lines)
    }

    /// The number of pages that the sweeper has checked.
    pub fn checked(&mut self) -> u64 {
        std::io::Write::write_all(self.run.stdin.as_mut().expect("piped"), b".").unwrap();
        line(&mut self.lines).parse().unwrap_or_else(|_| panic!("it has ended: {:?}", self.ended()))
    }

    /// Returns once the sweeper has checked more pages.
    pub fn goes_on(&mut self) {
        let before = self.checked();
        let begun = Instant::now();
        while self.checked() < before + 1000 {
            assert!(begun.elapsed() < Duration::from_secs(120), "it stands still");
            thread::sleep(Duration::from_millis(5));
        }
    }

    /// Waits for the end of the run; returns its exit code and its lines.
    pub fn ended(&mut self) -> (Option<i32>, String) {
        let begun = Instant::now();
        let status = loop {
            if let Some(status) = self.run.try_wait().unwrap() {
                break status;
            }
            assert!(begun.elapsed() < Duration::from_secs(120), "the program neither ends nor goes on");
            thread::sleep(Duration::from_millis(5));
        };
        self.errors.read_to_string(&mut self.said).unwrap();
        (status.code(), std::mem::take(&mut self.said))
    }
}

impl Drop for Sweeping {
    fn drop(&mut self) {
        if let Ok(None) = self.run.try_wait() {
            kill(self.pid);
            let _ = self.run.wait();
        }
    }
}

/// The children of a process that have not ended.
pub fn children(process: u32) -> Vec<u32> {
    let tasks = fs::read_dir(format!("/proc/{process}/task")).into_iter().flatten().flatten();
    let children: String =
        tasks.filter_map(|task| fs::read_to_string(task.path().join("children")).ok()).collect();
    children
        .split_whitespace()
        .map(|number| number.parse().unwrap())
        .filter(|child| is_alive(*child))
        .collect()
}

pub fn kill(process: u32) {
    let process = rustix::process::Pid::from_raw(process.cast_signed()).expect("a process");
    super::kill(process, rustix::process::Signal::KILL);
}
