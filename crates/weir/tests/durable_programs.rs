//! ext4, XFS, SQLite and PostgreSQL on a durable log whose daemon is killed while they work. Their
//! own checkers find nothing afterwards. What they were told is safe is there.
//!
//! Needs root, FUSE and loop devices. A program that is missing is skipped. Mounts are in a
//! namespace of the test's own, so that they and the loop devices go with it, however it ends.
//!
//! `WEIR_SCALE=full` kills the daemon 100 times for each program; without it, twice. `WEIR_KILLS`
//! and `WEIR_SEED` choose by hand.

mod common;

use common::{PATIENCE, number};
use rustix::mount::{MountPropagationFlags, mount_change};
use rustix::process::{Pid, Signal, kill_process};
use rustix::thread::{UnshareFlags, unshare_unsafe};
use std::fs::{self, File, OpenOptions};
use std::io::{self, BufRead as _, BufReader, Write as _};
use std::os::unix::fs::{FileExt as _, chown};
use std::os::unix::process::{CommandExt as _, ExitStatusExt as _};
use std::path::{Path, PathBuf};
use std::process::{Child, ChildStdin, ChildStdout, Command, Stdio};
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread;
use std::time::{Duration, Instant};

const PAGE: usize = 4096;

struct Random(u64);

impl Random {
    fn next(&mut self) -> u64 {
        self.0 = self.0.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
        self.0 >> 33
    }

    fn below(&mut self, below: u64) -> u64 {
        (self.next() * below) >> 31
    }

    fn milliseconds(&mut self, below: u64) -> Duration {
        Duration::from_millis(self.below(below))
    }
}

/// The content that a key stands for: the key, and bytes that follow from it.
fn content(key: u64, length: usize) -> Vec<u8> {
    let mut random = Random(key ^ 0x5eed << 40);
    let words = (0..length.div_ceil(4)).map(|_| (random.next() as u32).to_le_bytes());
    let mut bytes: Vec<u8> = words.flatten().collect();
    bytes.truncate(length);
    bytes[..8].copy_from_slice(&key.to_le_bytes());
    bytes
}

fn key(bytes: &[u8]) -> u64 {
    bytes.first_chunk().map_or(0, |bytes| u64::from_le_bytes(*bytes))
}

/// A program of the system, also where the path of an ordinary user does not lead.
fn tool(name: &str) -> Command {
    let mut command = Command::new(name);
    command.env("PATH", "/usr/sbin:/sbin:/usr/bin:/bin:/usr/local/bin").stdin(Stdio::null());
    command
}

/// Output of a program that succeeds; otherwise everything that it said.
fn said(command: &mut Command) -> Result<String, String> {
    let name = command.get_program().to_string_lossy().into_owned();
    let output = command.output().map_err(|error| format!("{name}: {error}"))?;
    let text = |bytes| String::from_utf8_lossy(bytes).trim().to_owned();
    match output.status.success() {
        true => Ok(text(&output.stdout)),
        false => Err(format!("{name}: {}: {} {}", output.status, text(&output.stdout), text(&output.stderr))),
    }
}

/// Tries until it succeeds. Fails after a long time.
fn until<T, E: std::fmt::Debug>(what: &str, mut attempt: impl FnMut() -> Result<T, E>) -> T {
    let begun = Instant::now();
    loop {
        match attempt() {
            Ok(value) => return value,
            Err(error) => assert!(begun.elapsed() < 2 * PATIENCE, "{what}: {error:?}"),
        }
        thread::sleep(Duration::from_millis(10));
    }
}

/// A loop device. It goes once nobody has it open, also if this process is killed.
struct Loop {
    path: PathBuf,
    device: File,
    /// The file below it.
    file: PathBuf,
}

impl Loop {
    fn over(file: &Path) -> Result<Self, String> {
        let options = ["--find", "--show", "--direct-io=on", "--sector-size", "4096"];
        let path = PathBuf::from(said(tool("losetup").args(options).arg(file))?);
        let device = File::open(&path).map_err(|error| error.to_string());
        // The kernel takes the device away at its last close.
        said(tool("losetup").arg("--detach").arg(&path))?;
        Ok(Loop { path, device: device?, file: file.to_owned() })
    }

    fn end(self) {
        let Loop { path, device, file } = self;
        drop(device);
        let state = Path::new("/sys/block").join(path.file_name().unwrap()).join("loop/backing_file");
        // Another test may have the device next.
        until("the loop device goes", || match fs::read_to_string(&state) {
            Ok(other) if other.contains(&file.display().to_string()) => Err(other),
            _ => Ok(()),
        });
    }
}

#[derive(Clone, Copy, PartialEq, Eq)]
enum System {
    Ext4,
    Xfs,
}

impl System {
    fn name(self) -> &'static str {
        match self {
            System::Ext4 => "ext4",
            System::Xfs => "xfs",
        }
    }

    /// The log's size: XFS needs 300 MiB.
    fn size(self) -> &'static str {
        match self {
            System::Ext4 => "256MiB",
            System::Xfs => "512MiB",
        }
    }

    fn make(self) -> Command {
        let mut command = tool(&format!("mkfs.{}", self.name()));
        command.arg("-q");
        command
    }

    /// The program that finds faults, and changes nothing.
    fn checker(self) -> Command {
        let (name, flag) = match self {
            System::Ext4 => ("e2fsck", "-fn"),
            System::Xfs => ("xfs_repair", "-n"),
        };
        let mut command = tool(name);
        command.arg(flag);
        command
    }
}

/// A file system on a loop device over the FUSE file of a durable log.
struct Disk {
    system: System,
    directory: PathBuf,
    cache: Option<Child>,
    device: Option<Loop>,
    is_mounted: bool,
    kills: u64,
    kills_in_replay: u64,
}

impl Disk {
    /// Makes all of it. `None`, after the reason is printed, where something is missing.
    fn make(name: &str, system: System) -> Option<Self> {
        let skip = |why: &str| println!("\nskipped: {name}: {why}");
        if !rustix::process::geteuid().is_root() {
            skip("needs root");
            return None;
        }
        let checker = system.checker();
        for mut tool in [system.make(), checker] {
            let is_there = tool.arg("-V").stdout(Stdio::null()).stderr(Stdio::null()).status().is_ok();
            if !is_there {
                skip(&format!("no {}", tool.get_program().display()));
                return None;
            }
        }
        // SAFETY: a new mount namespace changes nothing that memory safety depends on.
        let is_private = unsafe { unshare_unsafe(UnshareFlags::NEWNS) }
            .and_then(|()| mount_change("/", MountPropagationFlags::PRIVATE | MountPropagationFlags::REC));
        if let Err(errno) = is_private {
            skip(&format!("no mount namespace here: {errno}"));
            return None;
        }
        let directory = std::env::temp_dir().join(format!("weir-programs-{}-{name}", std::process::id()));
        fs::create_dir_all(directory.join("mount")).unwrap();
        let mut disk = Disk {
            system,
            directory,
            cache: None,
            device: None,
            is_mounted: false,
            kills: 0,
            kills_in_replay: 0,
        };
        let query = format!("?size={}&encrypt=off", system.size());
        if !disk.serve(&["create", "--durable", "--home", &disk.home(&query)]) {
            return None;
        }
        match Loop::over(&disk.file()) {
            Ok(device) => disk.device = Some(device),
            Err(error) => {
                skip(&error);
                return None;
            }
        }
        said(system.make().arg(disk.device())).unwrap();
        if let Err(error) = disk.mount() {
            skip(&error);
            return None;
        }
        Some(disk)
    }

    fn home(&self, query: &str) -> String {
        let [a, b] = ["a", "b"].map(|name| self.directory.join(name));
        format!("log:{},{}{query}", a.display(), b.display())
    }

    fn file(&self) -> PathBuf {
        self.directory.join("disk")
    }

    fn root(&self) -> PathBuf {
        self.directory.join("mount")
    }

    fn control(&self) -> PathBuf {
        self.directory.join("control.sock")
    }

    fn device(&self) -> &Path {
        &self.device.as_ref().unwrap().path
    }

    /// Starts the cache's daemon. It dies with this thread.
    fn serve(&mut self, arguments: &[&str]) -> bool {
        let mut command = tool("setpriv");
        command.args(["--pdeathsig", "KILL", common::WEIR, "cache"]).args(arguments);
        command.args(["--store", "host:16MiB", "--stream", "0", "--fuse"]).arg(self.file());
        command.arg("--control").arg(self.control()).env("WEIR_SEAL", "abort");
        self.cache = common::cache_comes_up(self.system.name(), command, &self.control());
        self.cache.is_some()
    }

    fn mount(&mut self) -> Result<(), String> {
        let device = self.device().to_owned();
        said(tool("mount").args(["-t", self.system.name()]).arg(device).arg(self.root()))?;
        self.is_mounted = true;
        Ok(())
    }

    fn unmount(&mut self) {
        if self.is_mounted {
            until("the file system is unmounted", || said(tool("umount").arg(self.root())));
            self.is_mounted = false;
        }
    }

    /// Kills the daemon after a while, during the work. Takes everything away that used its file.
    /// Returns whether the work had ended before the kill.
    fn kill_during(&mut self, delay: Duration, work: impl FnOnce(&mut Self, &AtomicBool)) -> bool {
        let process = Pid::from_child(self.cache.as_ref().unwrap());
        let is_killed = AtomicBool::new(false);
        let ended_early = thread::scope(|scope| {
            scope.spawn(|| {
                thread::sleep(delay);
                is_killed.store(true, Ordering::SeqCst);
                kill_process(process, Signal::KILL).unwrap();
            });
            work(self, &is_killed);
            !is_killed.load(Ordering::SeqCst)
        });
        let status = self.cache.take().unwrap().wait().unwrap();
        assert_eq!(
            status.signal(),
            Some(Signal::KILL.as_raw()),
            "the daemon ended before the kill: {status}"
        );
        self.unmount();
        self.device.take().unwrap().end();
        until("the dead daemon's file is unmounted", || said(tool("umount").arg(self.file())));
        let _ = fs::remove_file(self.control());
        self.kills += 1;
        self.check_log();
        ended_early
    }

    fn check_log(&self) {
        let mut command = Command::new(common::WEIR);
        let found = said(command.args(["cache", "check", "--json", &self.home("")]).stdin(Stdio::null()));
        let found = found.unwrap_or_else(|error| panic!("kill {}: {error}", self.kills));
        let report: serde_json::Value = serde_json::from_str(&found).unwrap();
        assert_eq!(report["is_clean"], true, "kill {}: {found}", self.kills);
    }

    fn check_files(&self) {
        let checked = said(self.system.checker().arg(self.device()));
        checked.unwrap_or_else(|error| panic!("kill {}: {error}", self.kills));
    }

    /// Opens the log again, and mounts the file system once it is found to be clean. At times the
    /// daemon is killed once more, while the file system's journal is replayed.
    fn come_back(&mut self, random: &mut Random) {
        let mut dies_again = random.below(4) == 0;
        loop {
            assert!(self.serve(&["open", "--home", &self.home("")]));
            self.device = Some(until("a loop device", || Loop::over(&self.file())));
            if !std::mem::take(&mut dies_again) {
                break;
            }
            let delay = random.milliseconds(60);
            self.kill_during(delay, |disk, _| {
                let _ = disk.mount();
            });
            self.kills_in_replay += 1;
        }
        // The journal is replayed by this mount.
        self.mount().unwrap_or_else(|error| panic!("kill {}: {error}", self.kills));
        self.unmount();
        self.check_files();
        self.mount().unwrap();
    }

    /// Ends all of it in order.
    fn end(mut self) {
        self.unmount();
        self.check_files();
        self.device.take().unwrap().end();
        let mut detach = Command::new(common::WEIR);
        said(detach.args(["cache", "detach", "--control"]).arg(self.control())).unwrap();
        assert!(self.cache.take().unwrap().wait().unwrap().success());
        self.check_log();
    }
}

impl Drop for Disk {
    fn drop(&mut self) {
        // A kill ends every I/O that is under way, so that nothing below waits for it.
        if let Some(mut cache) = self.cache.take() {
            let _ = cache.kill();
            let _ = cache.wait();
        }
        for path in [self.root(), self.file()] {
            let _ = tool("umount").arg("--lazy").arg(path).stderr(Stdio::null()).status();
        }
        self.device = None;
        let _ = fs::remove_dir_all(&self.directory);
    }
}

/// A program that works on the disk.
trait Program {
    /// Writes what the work needs, and has it safe.
    fn begin(&mut self, disk: &Disk);

    /// Works until the disk is gone. No process of it is left then. The flag is set just before the
    /// kill.
    fn work(&mut self, root: &Path, turn: u64, is_killed: &AtomicBool);

    /// Panics unless everything is there that was safe before the kill, with the right content.
    fn check(&mut self, root: &Path, turn: u64);

    /// Ends the processes that are left.
    fn end(&mut self) {}

    /// The name and number of what was safe so far.
    fn safe(&self) -> (&'static str, u64);
}

/// Kills the daemon below a program again and again.
fn survives(name: &str, system: System, program: &mut dyn Program) {
    let full = std::env::var_os("WEIR_SCALE").is_some_and(|scale| scale == "full");
    let kills = number("WEIR_KILLS", if full { 100 } else { 2 });
    let seed = number("WEIR_SEED", u64::from(std::process::id()));
    let Some(mut disk) = Disk::make(name, system) else { return };
    println!("{name}: seed {seed}");
    let mut random = Random(seed);
    program.begin(&disk);
    for turn in 0..kills {
        // The work must reach many flushes at times, however slow the machine is. At others it dies
        // in one of the first.
        let delay = random.milliseconds(if turn % 3 == 2 { 100 } else { 1500 });
        let ended_early =
            disk.kill_during(delay, |disk, is_killed| program.work(&disk.root(), turn, is_killed));
        assert!(!ended_early, "turn {turn}: an error while the daemon was there");
        disk.come_back(&mut random);
        program.check(&disk.root(), turn);
    }
    program.end();
    let (what, safe) = program.safe();
    println!("figure: {name} kills {kills} higher {kills}");
    println!("figure: {name} kills_in_replay {} higher", disk.kills_in_replay);
    println!("figure: {name} {what} {safe} higher 1");
    println!("figure: {name} lost 0 lower 0");
    println!("figure: {name} faults_of_checkers 0 lower 0");
    disk.end();
    assert!(safe > 0, "nothing was safe before a kill");
}

/// The values that a file or a block may have: one that is safe, or one of those that came later.
#[derive(Debug)]
struct Known<T> {
    safe: T,
    later: Vec<T>,
}

impl<T: PartialEq + Copy> Known<T> {
    fn new(safe: T) -> Self {
        Known { safe, later: Vec::new() }
    }

    /// Everything so far is safe.
    fn settle(&mut self) {
        if let Some(last) = self.later.last() {
            self.safe = *last;
            self.later.clear();
        }
    }

    fn allows(&self, found: T) -> bool {
        self.safe == found || self.later.contains(&found)
    }
}

/// Number of files that are replaced as a whole, or removed.
const WHOLE: usize = 24;
/// Number of blocks of the file that is written in place.
const BLOCKS: usize = 256;

/// A thread that writes files in a directory of its own.
struct Writer {
    name: String,
    random: Random,
    next: u64,
    /// For each file the key of its content; `None`: there is no such file.
    whole: Vec<Known<Option<u64>>>,
    blocks: Vec<Known<u64>>,
    /// The keys of the records that were appended and are safe.
    records: Vec<u64>,
    safe: u64,
    /// Whether a sync counts that succeeds after the kill.
    believes: bool,
    /// Number of syncs that succeeded after the kill and did not count.
    untrue: u64,
}

/// The content of a file that is replaced, or of a record: its length follows from the key too.
fn piece(key: u64, most: u64) -> Vec<u8> {
    content(key, 16 + Random(key).below(most) as usize)
}

fn block(key: u64) -> Vec<u8> {
    content(key, PAGE)
}

const LONGEST_FILE: u64 = 100_000;
const LONGEST_RECORD: u64 = 2000;

impl Writer {
    fn new(at: u64, believes: bool) -> Self {
        Writer {
            name: format!("writer-{at}"),
            random: Random(at),
            next: at << 40,
            whole: (0..WHOLE).map(|_| Known::new(None)).collect(),
            blocks: (0..BLOCKS).map(|_| Known::new(0)).collect(),
            records: Vec::new(),
            safe: 0,
            believes,
            untrue: 0,
        }
    }

    fn key(&mut self) -> u64 {
        self.next += 1;
        self.next
    }

    fn begin(&mut self, root: &Path) {
        let directory = root.join(&self.name);
        fs::create_dir(&directory).unwrap();
        File::open(root).unwrap().sync_all().unwrap();
        let file = File::create(directory.join("blocks")).unwrap();
        for at in 0..BLOCKS {
            let key = self.key();
            self.blocks[at] = Known::new(key);
            file.write_all_at(&block(key), (at * PAGE) as u64).unwrap();
        }
        file.sync_all().unwrap();
        File::create(directory.join("records")).unwrap().sync_all().unwrap();
        File::open(&directory).unwrap().sync_all().unwrap();
    }

    /// Writes until an error.
    fn work(&mut self, root: &Path, is_killed: &AtomicBool) {
        let directory = root.join(&self.name);
        let error = loop {
            let done = match self.random.below(8) {
                0..=3 => self.replace(&directory, is_killed),
                4 => self.remove(&directory, is_killed),
                5 | 6 => self.write_blocks(&directory, is_killed),
                _ => self.append(&directory, is_killed),
            };
            match done {
                Ok(()) => self.safe += 1,
                Err(error) => break error,
            }
        };
        assert_ne!(error.kind(), io::ErrorKind::StorageFull, "the disk is gone, and never full");
    }

    fn replace(&mut self, directory: &Path, is_killed: &AtomicBool) -> io::Result<()> {
        let (at, key) = (self.random.below(WHOLE as u64) as usize, self.key());
        let path = directory.join(format!("file-{at}"));
        let new = directory.join(format!("file-{at}.new"));
        let mut file = File::create(&new)?;
        file.write_all(&piece(key, LONGEST_FILE))?;
        file.sync_all()?;
        self.whole[at].later.push(Some(key));
        fs::rename(new, path)?;
        let result = File::open(directory)?.sync_all();
        self.synced(result, is_killed)?;
        self.whole[at].settle();
        Ok(())
    }

    fn remove(&mut self, directory: &Path, is_killed: &AtomicBool) -> io::Result<()> {
        let at = self.random.below(WHOLE as u64) as usize;
        if self.whole[at].safe.is_none() {
            return Ok(());
        }
        self.whole[at].later.push(None);
        fs::remove_file(directory.join(format!("file-{at}")))?;
        let result = File::open(directory)?.sync_all();
        self.synced(result, is_killed)?;
        self.whole[at].settle();
        Ok(())
    }

    /// The result of a sync, which counts if it came in time.
    fn synced(&mut self, result: io::Result<()>, is_killed: &AtomicBool) -> io::Result<()> {
        if result.is_ok() && !self.believes && is_killed.load(Ordering::SeqCst) {
            self.untrue += 1;
            return Err(io::Error::other("it came after the kill"));
        }
        result
    }

    /// Writes some blocks in place, each once: the kernel may write a block home while it changes.
    fn write_blocks(&mut self, directory: &Path, is_killed: &AtomicBool) -> io::Result<()> {
        let file = OpenOptions::new().write(true).open(directory.join("blocks"))?;
        let mut chosen: Vec<usize> =
            (0..1 + self.random.below(40)).map(|_| self.random.below(BLOCKS as u64) as usize).collect();
        chosen.sort_unstable();
        chosen.dedup();
        for &at in &chosen {
            let key = self.key();
            self.blocks[at].later.push(key);
            file.write_all_at(&block(key), (at * PAGE) as u64)?;
        }
        self.synced(file.sync_data(), is_killed)?;
        chosen.iter().for_each(|&at| self.blocks[at].settle());
        Ok(())
    }

    fn append(&mut self, directory: &Path, is_killed: &AtomicBool) -> io::Result<()> {
        let mut file = OpenOptions::new().append(true).open(directory.join("records"))?;
        let keys: Vec<u64> = (0..1 + self.random.below(20)).map(|_| self.key()).collect();
        for &key in &keys {
            file.write_all(&piece(key, LONGEST_RECORD))?;
        }
        self.synced(file.sync_data(), is_killed)?;
        self.records.extend(keys);
        Ok(())
    }

    fn check(&mut self, root: &Path, turn: u64) {
        let directory = root.join(&self.name);
        for (at, known) in self.whole.iter_mut().enumerate() {
            let found = match fs::read(directory.join(format!("file-{at}"))) {
                Ok(bytes) => {
                    let key = key(&bytes);
                    let is_whole = bytes == piece(key, LONGEST_FILE);
                    let length = bytes.len();
                    assert!(
                        is_whole,
                        "turn {turn}: file {at} of {known:x?} is torn: {length} bytes, {key:x}"
                    );
                    Some(key)
                }
                Err(error) if error.kind() == io::ErrorKind::NotFound => None,
                Err(error) => panic!("turn {turn}: file {at}: {error}"),
            };
            assert!(known.allows(found), "turn {turn}: file {at} is {found:x?}, not {known:x?}");
            *known = Known::new(found);
        }
        let bytes = fs::read(directory.join("blocks")).unwrap();
        assert_eq!(bytes.len(), BLOCKS * PAGE, "turn {turn}");
        for (at, (bytes, known)) in bytes.chunks(PAGE).zip(&mut self.blocks).enumerate() {
            let found = key(bytes);
            assert!(bytes == block(found), "turn {turn}: block {at} of {known:x?} is torn: {found:x}");
            assert!(known.allows(found), "turn {turn}: block {at} is {found:x}, not {known:x?}");
            *known = Known::new(found);
        }
        let path = directory.join("records");
        let (bytes, mut at) = (fs::read(&path).unwrap(), 0);
        for &key in &self.records {
            let record = piece(key, LONGEST_RECORD);
            let is_there = bytes[at.min(bytes.len())..].starts_with(&record);
            assert!(is_there, "turn {turn}: record {key:x} at {at} of {} is lost", bytes.len());
            at += record.len();
        }
        // The rest was not safe. Long files begin again.
        if at > 1 << 20 {
            (at, self.records) = (0, Vec::new());
        }
        let file = OpenOptions::new().write(true).open(path).unwrap();
        file.set_len(at as u64).unwrap();
        file.sync_all().unwrap();
    }
}

/// Threads that write files.
struct Files([Writer; 2]);

impl Files {
    /// XFS may answer a sync with success while it shuts down, though the change is not on the
    /// disk: after 64 ms without a daemon once, also on a cache whose writes go through to a plain
    /// file. So on XFS a sync counts that succeeded before the kill.
    fn new(system: System) -> Self {
        Files([1, 2].map(|at| Writer::new(at, system != System::Xfs)))
    }
}

impl Program for Files {
    fn begin(&mut self, disk: &Disk) {
        self.0.iter_mut().for_each(|writer| writer.begin(&disk.root()));
    }

    fn work(&mut self, root: &Path, _turn: u64, is_killed: &AtomicBool) {
        thread::scope(|scope| {
            for writer in &mut self.0 {
                scope.spawn(|| writer.work(root, is_killed));
            }
        });
    }

    fn check(&mut self, root: &Path, turn: u64) {
        self.0.iter_mut().for_each(|writer| writer.check(root, turn));
    }

    fn end(&mut self) {
        let untrue: u64 = self.0.iter().map(|writer| writer.untrue).sum();
        println!("{untrue} syncs succeeded after a kill and did not count");
    }

    fn safe(&self) -> (&'static str, u64) {
        ("synced", self.0.iter().map(|writer| writer.safe).sum())
    }
}

/// A database's own shell, that gets SQL and answers line by line. It ends at an error.
struct Shell {
    process: Child,
    input: ChildStdin,
    output: BufReader<ChildStdout>,
}

impl Shell {
    /// Starts a shell. Its messages about errors go to the file.
    fn new(arguments: &[&str], errors: &Path) -> Self {
        // Each line comes at once, though nobody sits before it.
        let mut command = tool("stdbuf");
        command.arg("-oL").args(arguments).stdin(Stdio::piped()).stdout(Stdio::piped());
        let mut process = command.stderr(File::create(errors).unwrap()).spawn().unwrap();
        let (input, output) = (process.stdin.take().unwrap(), process.stdout.take().unwrap());
        Shell { process, input, output: BufReader::new(output) }
    }

    /// Lines that the database answers with. `None`: the shell has ended.
    fn ask(&mut self, sql: &str) -> Option<Vec<String>> {
        self.input.write_all(format!("{sql}\nSELECT 'that was all';\n").as_bytes()).ok()?;
        let mut lines = Vec::new();
        loop {
            let mut line = String::new();
            if self.output.read_line(&mut line).ok()? == 0 {
                return None;
            }
            match line.trim_end() {
                "that was all" => return Some(lines),
                line => lines.push(line.to_owned()),
            }
        }
    }
}

impl Drop for Shell {
    fn drop(&mut self) {
        let _ = self.process.kill();
        let _ = self.process.wait();
    }
}

const ACCOUNTS: usize = 50;
/// Number of the last transactions whose rows are kept.
const KEPT: u64 = 300;

/// Transactions that follow from their numbers, and the accounts after the last one that is safe.
struct Ledger {
    safe: u64,
    balances: Vec<i64>,
}

impl Ledger {
    fn new() -> Self {
        Ledger { safe: 0, balances: vec![0; ACCOUNTS] }
    }

    const MAKE: &str = "CREATE TABLE ledger(number INTEGER PRIMARY KEY, body TEXT);
        CREATE TABLE accounts(id INTEGER PRIMARY KEY, balance INTEGER);
        CREATE INDEX bodies ON ledger(substr(body, 1, 40));";

    fn make() -> String {
        let accounts: Vec<String> = (0..ACCOUNTS).map(|id| format!("({id}, 0)")).collect();
        format!("{}\nINSERT INTO accounts VALUES {};", Self::MAKE, accounts.join(", "))
    }

    /// Two accounts, and what goes from one to the other.
    fn transfer(number: u64) -> (usize, usize, i64) {
        let mut random = Random(number << 8);
        let [from, to] = [(); 2].map(|()| random.below(ACCOUNTS as u64) as usize);
        (from, to, random.below(1000) as i64)
    }

    /// The text of a transaction's row: short or long.
    fn body(number: u64) -> String {
        let mut random = Random(number << 8 | 1);
        let most = if random.below(10) == 0 { 3000 } else { 100 };
        let words = 1 + random.below(most);
        (0..words).map(|_| format!("{:08x}", random.next())).collect()
    }

    /// Commits one transaction. `None`: the disk is gone.
    fn commit(&mut self, shell: &mut Shell) -> Option<()> {
        let number = self.safe + 1;
        let ((from, to, amount), body) = (Self::transfer(number), Self::body(number));
        let old = number.saturating_sub(KEPT);
        shell.ask(&format!(
            "BEGIN; INSERT INTO ledger VALUES ({number}, '{body}');
            UPDATE accounts SET balance = balance - {amount} WHERE id = {from};
            UPDATE accounts SET balance = balance + {amount} WHERE id = {to};
            DELETE FROM ledger WHERE number <= {old}; COMMIT;"
        ))?;
        self.count();
        Some(())
    }

    fn count(&mut self) {
        self.safe += 1;
        let (from, to, amount) = Self::transfer(self.safe);
        self.balances[from] -= amount;
        self.balances[to] += amount;
    }

    /// Panics unless the database has each transaction that was committed. It may have one more,
    /// whose commit was not answered.
    fn check(&mut self, shell: &mut Shell, turn: u64) {
        let rows = shell.ask("SELECT number, body FROM ledger ORDER BY number;").expect("the ledger");
        let last = rows.last().map_or(0, |row| row.split_once('|').unwrap().0.parse().unwrap());
        let safe = self.safe;
        assert!(
            last == safe || last == safe + 1,
            "turn {turn}: transaction {safe} was safe, {last} is there"
        );
        if last > safe {
            self.count();
        }
        let first = last.saturating_sub(KEPT) + 1;
        let wanted = (first..=last).map(|number| format!("{number}|{}", Self::body(number)));
        assert!(rows.into_iter().eq(wanted), "turn {turn}: rows {first} to {last} are others");
        let found = shell.ask("SELECT id, balance FROM accounts ORDER BY id;").expect("the accounts");
        let wanted = self.balances.iter().enumerate().map(|(id, balance)| format!("{id}|{balance}"));
        assert!(found.into_iter().eq(wanted), "turn {turn}: the balances are not those after {last}");
    }
}

/// SQLite, in turns with a log of what is new (`WAL`) and of what was before (`DELETE`).
struct Sqlite {
    ledger: Ledger,
    errors: PathBuf,
}

impl Sqlite {
    fn shell(&self, root: &Path) -> Shell {
        let path = root.join("base.db").display().to_string();
        Shell::new(&["sqlite3", "-batch", "-bail", &path], &self.errors)
    }

    fn said(&self) -> String {
        fs::read_to_string(&self.errors).unwrap_or_default()
    }
}

impl Program for Sqlite {
    fn begin(&mut self, disk: &Disk) {
        self.errors = disk.directory.join("errors");
        self.shell(&disk.root()).ask(&Ledger::make()).unwrap_or_else(|| panic!("{}", self.said()));
        File::open(disk.root()).unwrap().sync_all().unwrap();
    }

    fn work(&mut self, root: &Path, turn: u64, _is_killed: &AtomicBool) {
        let mut shell = self.shell(root);
        // By FULL the removal of a journal that has done its work may be lost, and a commit with
        // it. SQLite has EXTRA for that.
        let (mode, synchronous) = if turn.is_multiple_of(2) { ("wal", "FULL") } else { ("delete", "EXTRA") };
        let pragmas = format!("PRAGMA journal_mode={mode}; PRAGMA synchronous={synchronous};");
        let Some(found) = shell.ask(&pragmas) else { return };
        assert_eq!(found, [mode]);
        while self.ledger.commit(&mut shell).is_some() {}
    }

    fn check(&mut self, root: &Path, turn: u64) {
        let mut shell = self.shell(root);
        let found = shell.ask("PRAGMA integrity_check;");
        assert_eq!(found, Some(vec!["ok".to_owned()]), "turn {turn}: {}", self.said());
        self.ledger.check(&mut shell, turn);
    }

    fn safe(&self) -> (&'static str, u64) {
        ("committed", self.ledger.safe)
    }
}

/// PostgreSQL: a server with data checksums, and one client.
struct Postgres {
    ledger: Ledger,
    programs: PathBuf,
    user: u32,
    group: u32,
    /// A directory outside of the disk.
    directory: PathBuf,
    server: Option<Child>,
}

impl Postgres {
    /// `None`, after the reason is printed, where it is not installed.
    fn find() -> Option<Self> {
        let numbers: Option<Vec<u32>> = ["-u", "-g"]
            .iter()
            .map(|flag| said(tool("id").args([flag, "postgres"])).ok()?.parse().ok())
            .collect();
        let versions = fs::read_dir("/usr/lib/postgresql").into_iter().flatten().flatten();
        let programs = versions.map(|version| version.path().join("bin"));
        let programs =
            programs.filter(|path| path.join("initdb").exists() && path.join("psql").exists()).max();
        let (Some(numbers), Some(programs)) = (numbers, programs) else {
            println!("\nskipped: postgresql: it is not installed");
            return None;
        };
        let (user, group) = (numbers[0], numbers[1]);
        let directory = PathBuf::new();
        Some(Postgres { ledger: Ledger::new(), programs, user, group, directory, server: None })
    }

    /// One of its programs, as its user, in a directory that this user may see.
    fn program(&self, name: &str) -> Command {
        let mut command = tool(&self.programs.join(name).display().to_string());
        command.uid(self.user).gid(self.group).current_dir(&self.directory);
        command
    }

    fn data(root: &Path) -> PathBuf {
        root.join("data")
    }

    /// Starts the server, and waits until it has recovered.
    fn start(&mut self, root: &Path) {
        let mut command = tool("setpriv");
        command.uid(self.user).gid(self.group).current_dir(&self.directory);
        // Killed with this thread, it would leave its shared memory.
        command.args(["--pdeathsig", "QUIT"]).arg(self.programs.join("postgres"));
        command.arg("-D").arg(Self::data(root)).arg("-k").arg(&self.directory);
        for option in ["listen_addresses=", "shared_buffers=8MB", "max_wal_size=16MB", "min_wal_size=4MB"] {
            command.args(["-c", option]);
        }
        let said = self.directory.join("server");
        let log = File::create(&said).unwrap();
        command.stdout(log.try_clone().unwrap()).stderr(log);
        self.server = Some(command.spawn().unwrap());
        until("the server accepts", || {
            let server = self.server.as_mut().unwrap();
            let said = || fs::read_to_string(&said).unwrap_or_default();
            assert!(server.try_wait().unwrap().is_none(), "the server has ended: {}", said());
            self.shell().ask("").ok_or_else(said)
        });
    }

    fn shell(&self) -> Shell {
        let (psql, host) = (self.programs.join("psql"), self.directory.display().to_string());
        let psql = psql.display().to_string();
        let flags = ["-X", "-q", "-A", "-t", "-v", "ON_ERROR_STOP=1", "-U", "postgres", "-h", &host];
        Shell::new(&[&[psql.as_str()], &flags[..], &["postgres"]].concat(), &self.directory.join("errors"))
    }

    /// Ends the server by a signal: `INT` in order, `QUIT` at once.
    fn stop(&mut self, signal: Signal) {
        let Some(mut server) = self.server.take() else { return };
        let _ = kill_process(Pid::from_child(&server), signal);
        let begun = Instant::now();
        while server.try_wait().unwrap().is_none() {
            if begun.elapsed() > PATIENCE {
                let _ = server.kill();
            }
            thread::sleep(Duration::from_millis(10));
        }
    }
}

impl Drop for Postgres {
    fn drop(&mut self) {
        self.stop(Signal::QUIT);
    }
}

impl Program for Postgres {
    fn begin(&mut self, disk: &Disk) {
        self.directory = disk.directory.join("server");
        let data = Self::data(&disk.root());
        for path in [&self.directory, &data] {
            fs::create_dir(path).unwrap();
            chown(path, Some(self.user), Some(self.group)).unwrap();
        }
        let mut make = self.program("initdb");
        make.args(["-k", "--wal-segsize=1", "-A", "trust", "-U", "postgres", "-D"]).arg(&data);
        said(&mut make).unwrap();
        self.start(&disk.root());
        let sql = format!("CREATE EXTENSION amcheck;\n{}", Ledger::make());
        self.shell().ask(&sql).expect("its tables");
    }

    fn work(&mut self, _root: &Path, _turn: u64, _is_killed: &AtomicBool) {
        let mut shell = self.shell();
        while self.ledger.commit(&mut shell).is_some() {
            if self.ledger.safe.is_multiple_of(64) && shell.ask("CHECKPOINT;").is_none() {
                break;
            }
        }
        drop(shell);
        self.stop(Signal::QUIT);
    }

    fn check(&mut self, root: &Path, turn: u64) {
        self.start(root);
        self.ledger.check(&mut self.shell(), turn);
        let mut check = self.program("pg_amcheck");
        check.args(["--heapallindexed", "--parent-check", "-U", "postgres", "-d", "postgres", "-h"]);
        said(check.arg(&self.directory)).unwrap_or_else(|error| panic!("turn {turn}: {error}"));
        // Checksums of the whole are read while no server runs.
        if turn.is_multiple_of(4) {
            self.stop(Signal::INT);
            let checked = said(self.program("pg_checksums").args(["--check", "-D"]).arg(Self::data(root)));
            checked.unwrap_or_else(|error| panic!("turn {turn}: {error}"));
            self.start(root);
        }
    }

    fn end(&mut self) {
        self.stop(Signal::INT);
    }

    fn safe(&self) -> (&'static str, u64) {
        ("committed", self.ledger.safe)
    }
}

#[test]
fn files_of_ext4_that_were_synced_outlive_kills() {
    survives("ext4", System::Ext4, &mut Files::new(System::Ext4));
}

#[test]
fn files_of_xfs_that_were_synced_outlive_kills() {
    survives("xfs", System::Xfs, &mut Files::new(System::Xfs));
}

#[test]
fn transactions_of_sqlite_that_were_committed_outlive_kills() {
    if tool("sqlite3").arg("-version").output().is_err() {
        return println!("\nskipped: sqlite: no sqlite3");
    }
    let mut sqlite = Sqlite { ledger: Ledger::new(), errors: PathBuf::new() };
    survives("sqlite", System::Ext4, &mut sqlite);
}

#[test]
fn transactions_of_postgresql_that_were_committed_outlive_kills() {
    if let Some(mut postgres) = Postgres::find() {
        survives("postgresql", System::Ext4, &mut postgres);
    }
}
