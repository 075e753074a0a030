//! `weir serve` as a process, for the tests of this folder: with a directory of its own, both
//! removed when a test ends.
#![allow(dead_code, reason = "each test file uses its part of it")]

pub mod bounded;

use rustix::mount::{UnmountFlags, unmount};
use rustix::process::{Pid, Signal, kill_process};
use std::fs;
use std::os::unix::net::UnixStream;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Output, Stdio};
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread;
use std::time::{Duration, Instant};
use weir_export::nbd::client::{Client, Wish};
use weir_system::ProcessStat;

/// Time limit for actions that take almost no time, on a machine with other work. Only a hang takes
/// longer.
pub const PATIENCE: Duration = Duration::from_secs(60);

pub const WEIR: &str = env!("CARGO_BIN_EXE_weir");

/// Ends the other threads, even if the test fails: they would be waited for.
pub struct Ends<'a>(pub &'a AtomicBool);

impl Drop for Ends<'_> {
    fn drop(&mut self) {
        self.0.store(true, Ordering::Relaxed);
    }
}

/// Starts a `weir cache` and waits until it answers at `control`. `None`, after the reason is
/// printed, on a machine without FUSE. A cache that ends says why in the panic.
pub fn cache_comes_up(name: &str, mut command: Command, control: &Path) -> Option<Child> {
    let log = control.with_extension("log");
    let mut cache = command.stderr(fs::File::create(&log).unwrap()).spawn().unwrap();
    let said = || fs::read_to_string(&log).unwrap_or_default();
    let begun = Instant::now();
    while !control.exists() {
        if let Some(status) = cache.try_wait().unwrap() {
            assert!(!Path::new("/dev/fuse").exists(), "it comes up: {status}: {}", said());
            println!("\nskipped: {name}: no FUSE mount here: the cache ended");
            return None;
        }
        assert!(begun.elapsed() < 2 * PATIENCE, "it comes up: {}", said());
        thread::sleep(Duration::from_millis(5));
    }
    Some(cache)
}

/// A number from the environment, for choosing by hand.
pub fn number(name: &str, default: u64) -> u64 {
    std::env::var(name).map_or(default, |text| text.parse().unwrap())
}

/// Whether Mesa's software renderer is installed: pages lie in its memory as on a card.
pub fn has_lavapipe() -> bool {
    fs::read_dir("/usr/share/vulkan/icd.d").is_ok_and(|mut entries| {
        entries.any(|entry| entry.is_ok_and(|entry| entry.file_name().to_string_lossy().starts_with("lvp")))
    })
}

/// Runs a command on a terminal of its own. Returns its exit code and everything that it draws;
/// `None`, after a line that says so: the program `script` is missing.
pub fn on_a_terminal(name: &str, command: &Command) -> Option<(Option<i32>, String)> {
    if Command::new("script").arg("--version").output().is_err() {
        println!("\nskipped: {name}: the program script");
        return None;
    }
    let words = std::iter::once(command.get_program()).chain(command.get_args());
    let quoted: Vec<String> = words.map(|word| format!("'{}'", word.to_str().unwrap())).collect();
    let mut script = Command::new("script");
    script.args(["-qec", &quoted.join(" "), "/dev/null"]).env("TERM", "xterm").stdin(Stdio::null());
    let output = script.output().unwrap();
    Some((output.status.code(), String::from_utf8_lossy(&output.stdout).into_owned()))
}

/// Whether a bar of `what` was drawn, with its rate and the time left.
pub fn has_bar(drawn: &str, what: &str) -> bool {
    let is_control = |letter: char| letter.is_control();
    let is_bar =
        |line: &str| line.starts_with(what) && line.contains("/s, ") && line.trim_end().ends_with("s left");
    drawn.split(is_control).any(is_bar)
}

/// Whether output has no control character but the ends of its lines.
pub fn is_plain(bytes: &[u8]) -> bool {
    bytes.iter().all(|byte| *byte == b'\n' || *byte >= b' ')
}

/// The signals that kill a daemon: from outside, or as by a bug of its own or of a driver. The last
/// two write a core if that is allowed.
pub const KILLS: [(Signal, &str); 3] =
    [(Signal::KILL, ""), (Signal::ABORT, "-abrt"), (Signal::SEGV, "-segv")];

/// Times that users of a daemon waited for the next one, by the signal that killed it.
#[derive(Default, Debug)]
pub struct Stalls([Vec<Duration>; KILLS.len()]);

impl Stalls {
    /// The next signal. They take turns, so that all meet the same state of the machine.
    pub fn next(&self) -> Signal {
        KILLS[self.count() % KILLS.len()].0
    }

    pub fn push(&mut self, stall: Duration) {
        let at = self.count() % KILLS.len();
        self.0[at].push(stall);
    }

    pub fn count(&self) -> usize {
        self.0.iter().map(Vec::len).sum()
    }

    /// The longest wait among this many tenths of all.
    pub fn most_of(&self, tenths: usize) -> Duration {
        let mut all: Vec<Duration> = self.0.iter().flatten().copied().collect();
        all.sort();
        all[(all.len() * tenths).div_ceil(10).saturating_sub(1)]
    }

    /// Prints the figures, with `kills` by each signal.
    pub fn print(mut self, store: &str, kills: usize) {
        let mut by_kill = None;
        for (stalls, (signal, suffix)) in self.0.iter_mut().zip(KILLS) {
            stalls.sort();
            let [median, longest] = [stalls[stalls.len() / 2], stalls[stalls.len() - 1]];
            let most = stalls[(stalls.len() * 9).div_ceil(10) - 1];
            println!("{} by {signal:?}: stall median {median:.1?}, longest {longest:.1?}", stalls.len());
            println!("figure: {store}{suffix} kills {} higher {kills}", stalls.len());
            println!("figure: {store}{suffix} stall_p50_s {:.3} lower", median.as_secs_f64());
            println!("figure: {store}{suffix} stall_p90_s {:.3} lower", most.as_secs_f64());
            println!("figure: {store}{suffix} stall_max_s {:.3} lower", longest.as_secs_f64());
            let by_kill = *by_kill.get_or_insert(median);
            if signal != Signal::KILL {
                let beside = median.as_secs_f64() / by_kill.as_secs_f64();
                println!("figure: {store}{suffix} stall_p50_beside_kill {beside:.2} lower");
            }
        }
    }
}

/// Whether all threads of a process are stopped or have ended.
fn stands_still(process: Pid) -> bool {
    // A thread has an entry below `/proc` too, which a listing leaves out.
    let stat = |thread: fs::DirEntry| ProcessStat::of(thread.file_name().to_str()?.parse().ok()?).ok();
    let stands = |thread| stat(thread).is_none_or(|stat| stat.is_stopped() || stat.is_dead());
    let threads = fs::read_dir(format!("/proc/{}/task", process.as_raw_nonzero()));
    threads.map_or(true, |threads| threads.flatten().all(stands))
}

/// Kills a process by `signal`, or stops it; returns false if it was gone already. A process that
/// is to stop stands still when this returns, which may take a while on a busy machine.
pub fn kill(process: Pid, signal: Signal) -> bool {
    let is_sent = kill_process(process, signal).is_ok();
    let until = Instant::now() + PATIENCE;
    while signal == Signal::STOP && is_sent && !stands_still(process) {
        assert!(Instant::now() < until, "the process does not stop");
        thread::sleep(Duration::from_millis(1));
    }
    // Rust's handler for this signal looks for a stack overflow; for anything else it returns, so
    // that the signal comes again.
    while signal == Signal::SEGV && is_sent && is_alive(process.as_raw_nonzero().get().cast_unsigned()) {
        let _ = kill_process(process, signal);
        thread::sleep(Duration::from_micros(200));
    }
    is_sent
}

/// Whether a process exists, and is no zombie.
pub fn is_alive(process: u32) -> bool {
    ProcessStat::of(process).is_ok_and(|stat| !stat.is_dead())
}

/// Lets this process and its children write cores of any size, if the system allows it.
pub fn allow_cores() {
    use rustix::process::{Resource, Rlimit, getrlimit, setrlimit};
    let maximum = getrlimit(Resource::Core).maximum;
    setrlimit(Resource::Core, Rlimit { current: maximum, maximum }).unwrap();
}

/// Number of times to kill a daemon, by each of [`KILLS`].
pub fn kills() -> usize {
    let full = std::env::var_os("WEIR_SCALE").is_some_and(|scale| scale == "full");
    number("WEIR_KILLS", if full { 100 } else { 5 }) as usize
}

/// A daemon, or with `--keeper` its keeper. An allocation on an I/O thread aborts it.
pub struct Daemon {
    pub directory: PathBuf,
    pub process: Child,
}

impl Daemon {
    /// Starts a daemon with these flags besides its control socket; `more` adds flags that contain
    /// paths. It may not listen yet.
    pub fn spawn(name: &str, flags: &[&str], more: impl FnOnce(&mut Command, &Path)) -> Self {
        // The path must be short: a socket's has at most 107 bytes.
        let directory = std::env::temp_dir().join(format!("weir-{}-{name}", std::process::id()));
        fs::create_dir_all(&directory).unwrap();
        let mut command = Command::new(WEIR);
        command.arg("serve").arg("--control").arg(directory.join("control")).args(flags);
        // The daemon's core would be in this directory.
        command.env("WEIR_SEAL", "abort").current_dir(&directory);
        more(&mut command, &directory);
        let process = command.spawn().unwrap();
        Daemon { directory, process }
    }

    /// Waits until `up` holds; returns false if the process ends before.
    pub fn comes_up(&mut self, up: impl Fn(&Self) -> bool) -> bool {
        let begun = Instant::now();
        while !up(self) {
            assert!(begun.elapsed() < PATIENCE, "the daemon does not listen");
            if self.process.try_wait().unwrap().is_some() {
                return false;
            }
            thread::sleep(Duration::from_millis(5));
        }
        true
    }

    /// Whether the daemon answers at its control socket, which comes last.
    pub fn listens(&self) -> bool {
        UnixStream::connect(self.control()).is_ok()
    }

    pub fn control(&self) -> PathBuf {
        self.directory.join("control")
    }

    /// Runs a command that asks the daemon something.
    pub fn weir(&self, arguments: &[&str]) -> Output {
        Command::new(WEIR).args(arguments).arg("--control").arg(self.control()).output().unwrap()
    }

    /// The daemon's status, once it answers at the control socket: it answers clients a little
    /// earlier.
    pub fn status(&self) -> serde_json::Value {
        let begun = Instant::now();
        loop {
            let output = self.weir(&["status", "--json"]);
            if output.status.success() {
                return serde_json::from_slice(&output.stdout).unwrap();
            }
            assert!(begun.elapsed() < PATIENCE, "{output:?}");
            thread::sleep(Duration::from_millis(5));
        }
    }

    /// Adds the flags of an NBD server at the address that [`connect`](Self::connect) uses.
    pub fn with_nbd(command: &mut Command, directory: &Path) {
        let address = format!("unix:{}", directory.join("nbd").display());
        command.args(["--connections", "4", "--nbd", &address]);
    }

    /// Connects by NBD, as soon as a daemon accepts.
    pub fn connect(&self) -> Client {
        let begun = Instant::now();
        loop {
            match Client::unix(self.directory.join("nbd"), &Wish::default()) {
                Ok(client) => return client,
                Err(error) => assert!(begun.elapsed() < PATIENCE, "no daemon for {PATIENCE:?}: {error}"),
            }
            thread::sleep(Duration::from_millis(1));
        }
    }

    /// The process of a keeper's living daemon: its only child.
    pub fn daemon(&self) -> Option<Pid> {
        let pid = self.process.id();
        let children = fs::read_to_string(format!("/proc/{pid}/task/{pid}/children")).ok()?;
        Pid::from_raw(children.trim().parse().ok()?)
    }

    /// Whether this signal waits for a process, as it does for one that is stopped.
    pub fn has_pending(process: Pid, signal: Signal) -> bool {
        let status = fs::read_to_string(format!("/proc/{}/status", process.as_raw_nonzero()));
        let status = status.unwrap_or_default();
        let pending = status.lines().find_map(|line| line.strip_prefix("ShdPnd:"));
        let pending = pending.and_then(|bits| u64::from_str_radix(bits.trim(), 16).ok());
        pending.is_some_and(|bits| bits >> (signal.as_raw() - 1) & 1 == 1)
    }

    /// The cores in the daemon's directory.
    pub fn cores(&self) -> Vec<PathBuf> {
        let entries = fs::read_dir(&self.directory).unwrap().map(|entry| entry.unwrap().path());
        let is_core = |path: &PathBuf| {
            path.file_name().is_some_and(|name| name.as_encoded_bytes().starts_with(b"core"))
        };
        entries.filter(is_core).collect()
    }

    /// Kills the daemon of a keeper and waits until the next one answers.
    pub fn kill_daemon(&self) {
        let first = self.status()["pid"].as_i64().unwrap();
        kill_process(Pid::from_raw(first as i32).unwrap(), Signal::KILL).unwrap();
        let begun = Instant::now();
        // A daemon that is being killed may answer once, and then no more.
        let now = || {
            let output = self.weir(&["status", "--json"]);
            let status: serde_json::Value = serde_json::from_slice(&output.stdout).ok()?;
            status["pid"].as_i64()
        };
        while now().is_none_or(|pid| pid == first) {
            assert!(begun.elapsed() < PATIENCE, "no other daemon");
            thread::sleep(Duration::from_millis(10));
        }
    }

    /// Sends SIGTERM and returns the exit code, if the daemon ends.
    pub fn terminate(&mut self) -> Option<i32> {
        kill_process(Pid::from_child(&self.process), Signal::TERM).unwrap();
        let begun = Instant::now();
        while begun.elapsed() < PATIENCE {
            if let Some(status) = self.process.try_wait().unwrap() {
                return status.code();
            }
            thread::sleep(Duration::from_millis(5));
        }
        None
    }
}

impl Drop for Daemon {
    fn drop(&mut self) {
        let daemon = self.daemon();
        let _ = self.process.kill();
        let _ = self.process.wait();
        if let Some(daemon) = daemon {
            let _ = kill_process(daemon, Signal::KILL);
        }
        let _ = unmount(self.directory.join("disk"), UnmountFlags::DETACH);
        let _ = fs::remove_dir_all(&self.directory);
    }
}
