//! `weir run` with crowds: of mappings, of threads, of children. The programs verify each page by
//! themselves. They take a second or two each; with `WEIR_SCALE=full` a minute.

mod common;

use common::bounded::{Scratch, can_run, compiled, directory_of};
use common::{PATIENCE, WEIR};
use std::fs;
use std::io::{BufRead as _, BufReader, Read as _};
use std::path::{Path, PathBuf};
use std::process::{Child, ChildStdout, Command, Stdio};
use std::thread;
use std::time::{Duration, Instant};

/// The least limit that there is. Each program has four times as much memory, or more.
const LIMIT: &str = "32MiB";
/// A variable that a run and all processes below it have.
const MARK: &str = "WEIR_TEST_CROWD";

fn is_full() -> bool {
    std::env::var_os("WEIR_SCALE").is_some_and(|scale| scale == "full")
}

/// A bounded program, with a directory of its own for all files of its run. It is killed when this
/// is dropped.
struct Crowd {
    run: Child,
    pid: u32,
    lines: BufReader<ChildStdout>,
    _scratch: Scratch,
    mark: String,
    until: Instant,
}

impl Crowd {
    /// Starts one of the programs of the folder `crowd` for so many seconds.
    fn start(name: &str, program: &str, seconds: u32) -> Option<Self> {
        if !can_run(name) {
            return None;
        }
        let scratch = Scratch::new(name);
        let folder = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/crowd");
        let program = compiled(name, &folder.join(program).with_extension("c"), &scratch)?;
        Some(Self::of(&program, scratch, seconds))
    }

    fn of(program: &Path, scratch: Scratch, seconds: u32) -> Self {
        let seconds = if is_full() { 60 } else { seconds };
        let files = scratch.0.join("files");
        fs::create_dir_all(&files).unwrap();
        let mark = files.to_str().unwrap().to_owned();
        let mut command = Command::new(WEIR);
        command
            .args(["run", "--threads", "2", "--resident", LIMIT, "--store", "host:1GiB", "--"])
            .arg(program);
        command.args([&seconds.to_string(), "1"]).env("TMPDIR", &files).env(MARK, &mark);
        let piped = command.stdin(Stdio::piped()).stdout(Stdio::piped()).stderr(Stdio::piped());
        let mut run = piped.spawn().unwrap();
        let mut lines = BufReader::new(run.stdout.take().expect("piped"));
        let mut line = String::new();
        lines.read_line(&mut line).unwrap();
        let pid = line.trim().parse().unwrap();
        let until = Instant::now() + 3 * PATIENCE + 4 * Duration::from_secs(seconds.into());
        Crowd { run, pid, lines, _scratch: scratch, mark, until }
    }

    /// Whether it still runs.
    fn goes_on(&mut self) -> bool {
        assert!(Instant::now() < self.until, "the program neither ends nor goes on");
        self.run.try_wait().unwrap().is_none()
    }

    /// Waits for its end, which must be a good one. Returns its last line.
    fn ends_well(mut self) -> String {
        drop(self.run.stdin.take());
        while self.goes_on() {
            thread::sleep(Duration::from_millis(5));
        }
        let (mut out, mut said) = (String::new(), String::new());
        self.run.stderr.take().expect("piped").read_to_string(&mut said).unwrap();
        self.lines.read_to_string(&mut out).unwrap();
        // The daemon serves fewer processes at a time than a bomb has. One more is not bounded.
        // On a busy machine some wait for its first answer.
        let known = ["bounded as its daemon serves", "waiting for it, for 60 s at most"];
        let other = |line: &&str| !known.iter().any(|known| line.ends_with(known));
        let said: String = said.lines().filter(other).collect();
        assert_eq!((self.run.wait().unwrap().code(), &*said), (Some(0), ""), "{out}");
        assert_eq!(marked(&self.mark), Vec::<u32>::new(), "processes are left");
        let left: Vec<PathBuf> =
            fs::read_dir(&self.mark).unwrap().map(|entry| entry.unwrap().path()).collect();
        assert_eq!(left, Vec::<PathBuf>::new(), "files are left");
        assert!(!directory_of(self.run.id()).exists(), "the run's directory is left");
        println!("figure: {}", out.trim());
        out
    }
}

impl Drop for Crowd {
    fn drop(&mut self) {
        if let Ok(None) = self.run.try_wait() {
            // All of them are of this test: no other process has its mark.
            for process in marked(&self.mark).into_iter().filter(|process| *process != self.run.id()) {
                let process = rustix::process::Pid::from_raw(process.cast_signed()).expect("a process");
                common::kill(process, rustix::process::Signal::KILL);
            }
            let _ = self.run.wait();
        }
    }
}

/// The processes that have this mark.
fn marked(mark: &str) -> Vec<u32> {
    let text = format!("{MARK}={mark}");
    let has_mark = |process: &u32| {
        let environment = fs::read(format!("/proc/{process}/environ")).unwrap_or_default();
        environment.split(|byte| *byte == 0).any(|variable| variable == text.as_bytes())
    };
    let processes = fs::read_dir("/proc").unwrap().flatten();
    processes.filter_map(|entry| entry.file_name().to_str()?.parse().ok()).filter(has_mark).collect()
}

/// The number before these words.
fn number(line: &str, words: &str) -> u64 {
    let before = line.split_once(words).unwrap_or_else(|| panic!("{words:?} is missing: {line}")).0;
    before.rsplit(' ').next().unwrap().parse().unwrap()
}

/// Checks the memory that was resident before the mappings began to change. Static arrays count.
fn was_bounded(line: &str) {
    let resident = number(line, " KiB of memory at first");
    // A busy machine delays the pager's looks for new memory, so this is twice the limit.
    assert!(resident < 64 << 10, "{line}");
}

#[test]
fn ten_thousand_mappings_that_are_cut_moved_and_protected_keep_their_pages() {
    let Some(crowd) = Crowd::start("ten_thousand_mappings", "maps", 3) else { return };
    was_bounded(&crowd.ends_well());
}

#[test]
fn a_program_with_as_many_mappings_as_the_kernel_allows_is_bounded_on() {
    let Some(crowd) = Crowd::start("as_many_mappings", "splits", 2) else { return };
    let said = crowd.ends_well();
    if said.starts_with("skipped") {
        println!("\nskipped: as_many_mappings: {said}");
        return;
    }
    was_bounded(&said);
    assert!(number(&said, " KiB at the end") < 64 << 10, "{said}");
}

#[test]
fn a_page_of_each_block_of_far_more_address_space_than_memory_takes_no_more_than_the_limit() {
    let name = "a_page_of_each_block";
    let Some(crowd) = Crowd::start(name, "sparse", 1) else { return };
    let said = crowd.ends_well();
    if said.starts_with("skipped") {
        println!("\nskipped: {name}: {said}");
        return;
    }
    // The tables of the pager count too.
    assert!(number(&said, " KiB of memory at the end") < 96 << 10, "{said}");
}

#[test]
fn sixty_four_threads_that_fault_on_one_block_while_it_is_evicted_all_go_on() {
    let Some(mut crowd) = Crowd::start("sixty_four_threads", "block", 4) else { return };
    drop(crowd.run.stdin.take());
    let mut evictions = 0;
    while crowd.goes_on() {
        let evicted = Command::new(WEIR).args(["evict", &crowd.pid.to_string()]).output().unwrap();
        evictions += u32::from(evicted.status.success());
    }
    let said = crowd.ends_well();
    assert!(number(&said, " rounds") > 1 && evictions > 1, "{evictions} evictions, {said}");
}

#[test]
fn each_child_of_a_fork_bomb_has_its_own_memory_and_nothing_is_left_of_them() {
    let name = "each_child_of_a_fork_bomb";
    // One that has nothing to do with the bomb.
    let Some(mut other) = Crowd::start(&format!("{name}_other"), "block", 0) else { return };
    let Some(crowd) = Crowd::start(name, "bomb", 1) else { return };
    crowd.ends_well();
    assert!(other.goes_on(), "it waits for the end of its input");
    other.ends_well();
}

#[test]
fn threads_that_give_up_fork_and_move_one_memory_at_once_lose_none_of_it() {
    let Some(mut crowd) = Crowd::start("threads_that_give_up", "storm", 4) else { return };
    while crowd.goes_on() {
        let _ = Command::new(WEIR).args(["evict", &crowd.pid.to_string()]).output().unwrap();
        thread::sleep(Duration::from_millis(100));
    }
    let said = crowd.ends_well();
    assert!(number(&said, " moves") > 10 && number(&said, " forks") > 1, "{said}");
}

#[test]
fn memory_and_what_moves_to_its_old_place_before_the_pager_knows_of_its_move_are_both_kept() {
    let Some(crowd) = Crowd::start("memory_and_what_moves", "places", 2) else { return };
    let said = crowd.ends_well();
    assert!(number(&said, " rounds") > 2, "{said}");
}
