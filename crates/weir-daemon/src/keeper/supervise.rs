//! The keeper's side: it holds descriptors, watches the daemon, and starts the next one.

use super::copy::{self, Stamp};
use super::link::{ENVIRONMENT, GONE, PROCESSORS, REFUSED, now, processors};
use super::resident;
use super::wire::{FORMAT, Kind, Message, receive, send, split};
use crate::relay::Relay;
use crate::run_end;
use rustix::event::{PollFd, PollFlags, Timespec, poll};
use rustix::io::Errno;
use rustix::net::{AddressFamily, SocketFlags, SocketType};
use rustix::process::{
    Pid, PidfdFlags, Resource, Rlimit, Signal, WaitId, WaitIdOptions, getrlimit, setrlimit,
};
use std::collections::BTreeMap;
use std::fmt;
use std::io;
use std::os::fd::{AsFd, AsRawFd, OwnedFd};
use std::os::unix::net::UnixStream;
use std::os::unix::process::CommandExt as _;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::path::{Path, PathBuf};
use std::process::Command;
use std::time::{Duration, Instant};
use weir_core::log::{Level, Log};
use weir_core::swap_safety::{self, Children};
use weir_core::{Memory, Resident};
use weir_system::Machine;
use weir_system::signals;

/// Least memory that is set aside for the next daemon and freed while it starts. The daemon needs
/// it for its pages, stacks, heap and page tables (2 MiB for each GiB that it maps).
const SET_ASIDE_LEAST: usize = 64 << 20;
/// Time until the keeper tries again to set memory aside.
const SET_ASIDE_AGAIN: Timespec = Timespec { tv_sec: 5, tv_nsec: 0 };
/// A daemon that ends earlier than this counts as one that failed to start.
const SHORT_LIFE: Duration = Duration::from_secs(1);
/// A new program may be killed early by chance. After this many early deaths in a row it counts as
/// broken.
const SHORT_LIVES_MOST: u32 = 5;
/// Pause before the next start after several daemons in a row have died before they served.
const PAUSE: Duration = Duration::from_secs(1);
/// Longest time that a signal waits for a daemon that takes over. Only a serving daemon can say
/// whether it is in use.
const HEARING: Duration = Duration::from_secs(10);

/// Memory or a descriptor that the keeper holds for the next daemon.
enum Kept {
    Memory(Memory),
    Descriptor(OwnedFd),
}

/// The use of the daemon's pages.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Use {
    /// A kernel may swap on the volume. So the next daemon must start while memory is short.
    Swap,
    /// Anyone may use the volume, for as long as the daemon serves.
    Anyone,
    /// One `weir run` uses the volume. The pages are of no use after it, and the machine does not
    /// wait for them. So the keeper takes no memory for itself, and a signal is final.
    Run,
}

/// How a daemon ended.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
enum End {
    Exit(i32),
    Signal(i32),
}

impl fmt::Display for End {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            End::Exit(code) => write!(f, "ended with exit code {code}"),
            End::Signal(number) => write!(f, "was killed by signal {number}"),
        }
    }
}

/// The keeper's notes on one daemon's life.
struct Life {
    end: End,
    was_ready: bool,
    /// Whether the daemon has said that it ends, since no client needs its pages.
    is_done: bool,
    /// Whether the daemon was told to end, and has not answered yet whether it ends or stays.
    owes_answer: bool,
    makes_way: bool,
}

impl Life {
    /// The notes on a daemon that has just been started.
    fn begun() -> Self {
        Life { end: End::Exit(0), was_ready: false, is_done: false, owes_answer: false, makes_way: false }
    }
}

struct Keeper<'a> {
    log: &'a Log,
    kept: BTreeMap<String, Kept>,
    /// Whether a daemon has listened. From then on clients may need the pages that the keeper
    /// holds, and only a daemon can tell that they do not.
    is_needed: bool,
    set_aside: Vec<Memory>,
    /// Whether less memory is set aside than the next daemon will need.
    lacks: bool,
    /// The configuration's file, and its pages in memory.
    config: Option<&'a Path>,
    used_by: Use,
    config_pages: Option<Resident>,
    signals: UnixStream,
    /// A signal waits for the daemon to serve, until this time. Then it is passed on anyway.
    /// `None`: no signal waits.
    told_by: Option<Instant>,
    /// Whether a signal has ended the use of the pages, so that there is no next daemon.
    is_over: bool,
    /// The number of processors that every daemon plans its threads for.
    processors: usize,
    /// The time when the last daemon was gone, and how long its end took, from the first sign on.
    gone: Option<(u64, Duration)>,
}

/// Runs the daemon (this program again, with the same arguments), and starts another whenever it
/// dies. Returns the exit code once a daemon ended because it was told to.
///
/// # Errors
/// Fails when no daemon can be started at all.
pub fn run(log: &Log, config: Option<&Path>, used_by: Use) -> io::Result<i32> {
    if !copy::is_copy() && used_by != Use::Run {
        let error = copy::run(used_by == Use::Swap);
        (log)(
            Level::Warning,
            format_args!(
                "the keeper cannot run from memory ({error}), so an upgrade keeps its old file in use"
            ),
        );
    }
    let _relay = Relay::start()?;
    let _program_pages = (used_by != Use::Run).then(|| held(log, "its program", resident::program()));
    let (signals, tell) = UnixStream::pair()?;
    signals.set_nonblocking(true)?;
    for signal in signals::END {
        signal_hook::low_level::pipe::register(signal, tell.try_clone()?)?;
    }
    if used_by == Use::Run {
        run_end::watch()?;
    }
    let mut keeper = Keeper {
        log,
        kept: BTreeMap::new(),
        is_needed: false,
        set_aside: Vec::new(),
        lacks: false,
        config,
        used_by,
        config_pages: None,
        signals,
        told_by: None,
        is_over: false,
        processors: processors(),
        gone: None,
    };
    open_many_files();
    let mut programs = Programs::new(used_by);
    let mut stillborn = 0;
    let mut tries: u64 = 1;
    loop {
        if used_by == Use::Run && keeper.is_told_within(Duration::ZERO) {
            keeper.hear_signal();
        }
        if keeper.is_over {
            return Ok(0);
        }
        (keeper.set_aside, keeper.lacks) = (Vec::new(), false);
        let born = Instant::now();
        let life = match keeper.one_life(programs.next(), programs.failed()) {
            // The new program does not start: perhaps the upgrade has not written all of its file
            // yet. So start the keeper's own program.
            Err(_) if programs.is_new() => {
                programs.give_up();
                continue;
            }
            // The machine is short of processes, descriptors or memory. The shortage will end, but
            // lost pages would not come back. So try to start the daemon again.
            Err(error) if keeper.is_needed => {
                // Log only some attempts, since the shortage may last.
                if tries.is_power_of_two() {
                    (log)(
                        Level::Warning,
                        format_args!("another daemon cannot be started yet, trying again: {error}"),
                    );
                }
                tries += 1;
                if keeper.is_told_within(PAUSE) {
                    keeper.hear_signal();
                }
                if keeper.told_by.is_some() {
                    keeper.told_by = Some(Instant::now() + HEARING);
                }
                continue;
            }
            life => life?,
        };
        tries = 1;
        if programs.look_after(&life, born.elapsed()) {
            (log)(
                Level::Warning,
                format_args!("the program that is installed now does not serve; starting the one before it"),
            );
        }
        match life.end {
            _ if keeper.is_over => return Ok(0),
            End::Exit(0) if life.makes_way => {
                (log)(Level::Info, format_args!("the daemon makes way for another"));
            }
            End::Exit(code) if life.is_done || !keeper.is_needed => return Ok(code),
            End::Signal(number) if life.is_done || !keeper.is_needed => return Ok(128 + number),
            end => (log)(
                Level::Warning,
                format_args!(
                    "the daemon ended unasked: it {end}; starting another, which takes its pages over"
                ),
            ),
        }
        if life.owes_answer {
            // The daemon ended without an answer to a signal: it hung, or was killed. So pass the
            // signal on to the next daemon.
            keeper.told_by = Some(Instant::now() + HEARING);
        }
        stillborn = if born.elapsed() < SHORT_LIFE && !life.was_ready { stillborn + 1 } else { 0 };
        match pause_after(stillborn) {
            Some(pause) if used_by == Use::Run => _ = keeper.is_told_within(pause),
            Some(pause) => std::thread::sleep(pause),
            None => {}
        }
    }
}

/// The pause before the next daemon, after `stillborn` daemons in a row died before they served.
/// After only one such death there is no pause: that daemon may have been killed during its
/// takeover, and requests wait for the next daemon.
fn pause_after(stillborn: u32) -> Option<Duration> {
    (stillborn > 1).then_some(PAUSE)
}

/// Chooses the next daemon's program. If an upgrade has replaced the installed program, it is that
/// one, else the keeper's own copy, which needs no disk to start. If the installed program fails,
/// the keeper goes back to its copy.
#[derive(Debug)]
struct Programs {
    own: PathBuf,
    installed: PathBuf,
    /// The [`Stamp`] that the installed program had when the keeper was started from it.
    stamp: Option<Stamp>,
    /// The [`Stamp`] of the installed program, if it is new and is to be started.
    new: Option<Stamp>,
    given_up: Option<Stamp>,
    /// Number of daemons in a row that lived less than [`SHORT_LIFE`].
    short_lives: u32,
}

impl Programs {
    /// The first daemon runs the keeper's own program. Each daemon of a run does: the pagers of the
    /// run's programs are of that version.
    fn new(used_by: Use) -> Self {
        let (installed, stamp) = match used_by {
            Use::Run => (PathBuf::new(), None),
            _ => copy::original(),
        };
        Programs {
            own: PathBuf::from("/proc/self/exe"),
            installed,
            stamp,
            new: None,
            given_up: None,
            short_lives: 0,
        }
    }

    /// Checks which program is installed now. `makes_way`: the daemon ended to let another program
    /// take over, so the installed one is tried even if it was given up before.
    fn look(&mut self, makes_way: bool) {
        if makes_way {
            self.given_up = None;
        }
        let now = Stamp::of(&self.installed);
        self.new = now.filter(|now| self.stamp.as_ref() != Some(now) && self.given_up.as_ref() != Some(now));
    }

    /// Chooses the program of the daemon after this one, which lived for `lived`. Returns true if
    /// that gives the new program up.
    ///
    /// If the keeper's own program ends before it serves, the new program is tried again, although
    /// it was given up. Perhaps the new program was only killed by chance. And perhaps no other
    /// program understands what the keeper holds.
    fn look_after(&mut self, life: &Life, lived: Duration) -> bool {
        self.short_lives = if lived < SHORT_LIFE { self.short_lives + 1 } else { 0 };
        let serves = life.was_ready && self.short_lives < SHORT_LIVES_MOST;
        let gives_up = self.is_new() && !life.is_done && !life.makes_way && !serves;
        if gives_up {
            self.give_up();
        } else {
            let refuses = !life.was_ready && matches!(life.end, End::Exit(_));
            self.look(life.makes_way || refuses);
        }
        gives_up
    }

    fn is_new(&self) -> bool {
        self.new.is_some()
    }

    /// Gives the new program up, until yet another program replaces it.
    fn give_up(&mut self) {
        self.short_lives = 0;
        self.given_up = self.new.take();
    }

    /// Whether the program that is installed now was given up.
    fn failed(&self) -> bool {
        self.given_up.is_some() && self.given_up == Stamp::of(&self.installed)
    }

    fn next(&self) -> &Path {
        if self.is_new() { &self.installed } else { &self.own }
    }
}

impl Keeper<'_> {
    /// Starts `program` as the daemon, and serves it until it ends. `failed`: `program` runs
    /// because the installed program does not serve.
    fn one_life(&mut self, program: &Path, failed: bool) -> io::Result<Life> {
        let flags = SocketFlags::CLOEXEC;
        let (ours, theirs) =
            rustix::net::socketpair(AddressFamily::UNIX, SocketType::SEQPACKET, flags, None)?;
        // The child gets its end of the socket by number, so that end must outlive the exec. No
        // other child can inherit it: no other thread of this process starts one.
        rustix::io::fcntl_setfd(&theirs, rustix::io::FdFlags::empty())?;
        let mut arguments = std::env::args_os();
        // Let the new daemon use the kernel's reserve of memory until it serves. If the kernel
        // denies that, the start may be slow or fail, and the keeper starts another daemon.
        if self.used_by == Use::Swap {
            let _ = swap_safety::reach_reserves(Children::Inherit);
        }
        let child = Command::new(program)
            // Pass the process's name on too: a process that carries swap has a special one.
            .arg0(arguments.next().unwrap_or_else(|| "weir".into()))
            .args(arguments)
            .env(ENVIRONMENT, theirs.as_raw_fd().to_string())
            .env(PROCESSORS, self.processors.to_string())
            .envs(failed.then_some((REFUSED, "1")))
            .envs(self.gone.map(|(at, took)| (GONE, format!("{at} {}", took.as_nanos()))))
            .spawn();
        if self.used_by == Use::Swap {
            let _ = swap_safety::leave_reserves();
        }
        let pid = Pid::from_child(&child?);
        drop(theirs);
        // If the keeper died, the pages would be lost. So catch a panic here: it ends this daemon,
        // and the keeper lives on.
        let life = catch_unwind(AssertUnwindSafe(|| self.watch(pid, ours)))
            .unwrap_or_else(|_| Err(io::Error::other("a bug in the keeper, reported above")));
        if life.is_err() {
            // Kill this daemon before the next one starts: both would write the same map.
            let _ = rustix::process::kill_process(pid, Signal::KILL);
            reap(pid)?;
        }
        life
    }

    /// Serves one daemon until it ends.
    fn watch(&mut self, pid: Pid, line: OwnedFd) -> io::Result<Life> {
        let pidfd = rustix::process::pidfd_open(pid, PidfdFlags::empty())?;
        let mut life = Life::begun();
        let mut line = Some(line);
        let mut hung_up = None;
        // As soon as a daemon has handed something to the keeper, clients may use that daemon. So
        // if the keeper holds anything, the new daemon takes over.
        let takes_over = !self.kept.is_empty();
        if let Err(error) = self.hand_over(line.as_ref().expect("just made")) {
            // The daemon died before it got everything that the keeper holds. The loop below
            // notices its end.
            (self.log)(Level::Warning, format_args!("the new daemon did not take over: {error}"));
        }
        loop {
            let listens = life.was_ready || !takes_over || self.is_over;
            if self.told_by.is_some_and(|by| listens || Instant::now() >= by) {
                self.pass_on_signal(&pidfd, &mut life);
            }
            let fallback = pidfd.as_fd();
            let line_fd = line.as_ref().map_or(fallback, AsFd::as_fd);
            let mut fds = [
                PollFd::from_borrowed_fd(fallback, PollFlags::IN),
                PollFd::from_borrowed_fd(self.signals.as_fd(), PollFlags::IN),
                PollFd::from_borrowed_fd(line_fd, PollFlags::IN),
            ];
            // When the daemon began to serve, memory was too short to set enough aside. So try
            // again.
            let again = life.was_ready && self.lacks;
            let wait = match self.told_by {
                Some(by) => Timespec::try_from(by.saturating_duration_since(Instant::now())).ok(),
                None => again.then_some(SET_ASIDE_AGAIN),
            };
            let events = match poll(&mut fds, wait.as_ref()) {
                Err(Errno::INTR) => continue,
                result => result?,
            };
            let [ended, signalled, spoke] = fds.map(|fd| !fd.revents().is_empty());
            if events == 0 && again {
                self.set_aside(pid);
            }
            // If the daemon is dead, leave the signal unread for the next daemon.
            if signalled && !ended {
                self.hear_signal();
            }
            if spoke && let Some(socket) = &line {
                match receive(socket) {
                    Ok(Some(message)) => {
                        if let Err(error) = self.answer(socket, message, pid, &mut life) {
                            (self.log)(Level::Warning, format_args!("cannot answer the daemon: {error}"));
                        }
                        // Read the daemon's last messages before handling its end.
                        continue;
                    }
                    Ok(None) | Err(_) => (line, hung_up) = (None, Some(Instant::now())),
                }
            }
            if ended {
                life.end = reap(pid)?;
                self.gone = Some((now(), hung_up.map_or(Duration::ZERO, |since| since.elapsed())));
                return Ok(life);
            }
        }
    }

    /// Waits for this time, or until a signal tells the keeper to end. Returns whether a signal
    /// came.
    fn is_told_within(&self, wait: Duration) -> bool {
        let wait = Timespec { tv_sec: wait.as_secs() as i64, tv_nsec: wait.subsec_nanos().into() };
        let mut fds = [PollFd::from_borrowed_fd(self.signals.as_fd(), PollFlags::IN)];
        matches!(poll(&mut fds, Some(&wait)), Ok(ready) if ready > 0)
    }

    /// Sets memory aside for the next daemon's start. If memory is short now, no more is set aside:
    /// the present daemon serves on, and the next start may fail.
    fn set_aside(&mut self, daemon: Pid) {
        if self.used_by == Use::Run {
            return;
        }
        let have: usize = self.set_aside.iter().map(Memory::len).sum();
        let more = (own_memory(daemon) * 5 / 4).saturating_sub(have);
        self.lacks = false;
        if more > 0 {
            let taken = Memory::anonymous(more).ok();
            self.lacks = taken.is_none();
            self.set_aside.extend(taken);
        }
    }

    /// Gives a new daemon all that the keeper holds.
    fn hand_over(&self, line: &OwnedFd) -> io::Result<()> {
        for (name, kept) in &self.kept {
            let (kind, fd) = match kept {
                Kept::Memory(memory) => (Kind::Memory, memory.fd().expect("kept memory is a memfd")),
                Kept::Descriptor(fd) => (Kind::Descriptor, fd.as_fd()),
            };
            send(line, &format!("have {} {name}", kind.word()), Some(fd))?;
        }
        send(line, &format!("begin {FORMAT}"), None)
    }

    fn answer(&mut self, line: &OwnedFd, message: Message, daemon: Pid, life: &mut Life) -> io::Result<()> {
        let Message { text, fd } = message;
        match split(&text) {
            ("opening", _) => {
                self.is_needed = true;
                Ok(())
            }
            ("ready", _) => {
                (life.was_ready, self.is_needed) = (true, true);
                self.set_aside(daemon);
                // Read the configuration at each start, since an upgrade may have replaced the
                // file.
                let pages = self.config.map(resident::file);
                self.config_pages = pages.and_then(|pages| held(self.log, "the configuration", pages));
                Ok(())
            }
            ("ending", _) => {
                (life.is_done, life.owes_answer) = (true, false);
                Ok(())
            }
            ("staying", _) => {
                life.owes_answer = false;
                Ok(())
            }
            ("replacing", _) => {
                life.makes_way = true;
                Ok(())
            }
            ("hold", what) => {
                let held = match (what.split_once(' '), fd) {
                    (Some((kind, name)), Some(fd)) => self.hold(Kind::parse(kind), name, fd),
                    _ => Err(io::ErrorKind::InvalidInput.into()),
                };
                match held {
                    Ok(()) => send(line, "held", None),
                    Err(error) => send(line, &format!("refused {error}"), None),
                }
            }
            ("took", what) => self.lock_again(what),
            ("drop", name) => {
                self.kept.remove(name);
                send(line, "dropped", None)
            }
            _ => Err(io::Error::other(format!("it said {text:?}"))),
        }
    }

    fn hold(&mut self, kind: Option<Kind>, name: &str, fd: OwnedFd) -> io::Result<()> {
        let kept = match kind {
            Some(Kind::Memory) => Kept::Memory(Memory::adopt(fd)?),
            Some(Kind::Descriptor) => Kept::Descriptor(fd),
            None => return Err(io::ErrorKind::InvalidInput.into()),
        };
        self.kept.insert(name.to_owned(), kept);
        Ok(())
    }

    /// Locks new pages of memory that the keeper holds. The message is `NAME OFFSET BYTES`.
    fn lock_again(&self, what: &str) -> io::Result<()> {
        let mut words = what.rsplitn(3, ' ');
        let mut number = || words.next()?.parse::<usize>().ok();
        let (bytes, offset) = (number(), number());
        match (words.next().and_then(|name| self.kept.get(name)), offset, bytes) {
            (Some(Kept::Memory(memory)), Some(offset), Some(bytes))
                if offset.checked_add(bytes).is_some_and(|end| end <= memory.len()) =>
            {
                memory.populate_again(offset, bytes)
            }
            _ => Err(io::ErrorKind::InvalidInput.into()),
        }
    }

    /// Reads the signals that have come. The keeper of a run heeds them only once the run is over.
    fn hear_signal(&mut self) {
        use std::io::Read as _;
        let mut bytes = [0; 64];
        while self.signals.read(&mut bytes).is_ok_and(|read| read > 0) {}
        if self.used_by == Use::Run && !run_end::is_over() {
            return;
        }
        self.is_over = self.used_by == Use::Run;
        self.told_by.get_or_insert_with(|| Instant::now() + HEARING);
    }

    /// Passes a signal to the daemon, which says whether it ends or stays. A daemon that ends has
    /// no successor.
    fn pass_on_signal(&mut self, daemon: &OwnedFd, life: &mut Life) {
        self.told_by = None;
        life.owes_answer = true;
        // A daemon that is taking over would end only once it serves. If the run is over, nobody
        // needs such a daemon, so kill it.
        let signal = if self.is_over && !life.was_ready { Signal::KILL } else { Signal::TERM };
        if let Err(error) = rustix::process::pidfd_send_signal(daemon, signal) {
            (self.log)(Level::Warning, format_args!("cannot pass a signal on to the daemon: {error}"));
        }
    }
}

/// Bytes of memory that belong to this daemon alone, and that the next daemon must take anew: at
/// least [`SET_ASIDE_LEAST`].
fn own_memory(daemon: Pid) -> usize {
    let status = format!("/proc/{}/status", daemon.as_raw_nonzero());
    let of = |key| Machine::this().size(&status, key).unwrap_or_default().0 as usize;
    (of("RssAnon") + of("VmPTE")).max(SET_ASIDE_LEAST)
}

/// Returns a file's pages that are held in memory. Logs a warning if they cannot be held.
fn held(log: &Log, what: &str, pages: io::Result<Resident>) -> Option<Resident> {
    match pages {
        Ok(pages) => Some(pages),
        Err(error) => {
            (log)(
                Level::Warning,
                format_args!("the keeper cannot lock {what} in memory ({error}): raise RLIMIT_MEMLOCK"),
            );
            None
        }
    }
}

/// Raises the limit of open files. Each chunk of a GPU's memory takes a descriptor in the keeper,
/// and two or more in the daemon, which inherits the limit. If the system denies the higher limit,
/// the daemon fails later, when it needs more descriptors than the old limit allows.
fn open_many_files() {
    let limit = getrlimit(Resource::Nofile);
    let _ = setrlimit(Resource::Nofile, Rlimit { current: limit.maximum, maximum: limit.maximum });
}

/// Waits for the end of a child. The child's memory and descriptors are gone when this returns.
fn reap(pid: Pid) -> io::Result<End> {
    loop {
        match rustix::process::waitid(WaitId::Pid(pid), WaitIdOptions::EXITED) {
            Err(Errno::INTR) => {}
            Err(errno) => return Err(errno.into()),
            Ok(status) => {
                let status = status.expect("waitid without NOHANG returns a status");
                return Ok(match status.exit_status() {
                    Some(code) => End::Exit(code),
                    None => End::Signal(status.terminating_signal().unwrap_or(0)),
                });
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn keeper(log: &Log, signals: UnixStream) -> Keeper<'_> {
        Keeper {
            log,
            kept: BTreeMap::new(),
            is_needed: false,
            set_aside: Vec::new(),
            lacks: false,
            config: None,
            used_by: Use::Anyone,
            config_pages: None,
            signals,
            told_by: None,
            is_over: false,
            processors: 1,
            gone: None,
        }
    }

    #[test]
    fn a_daemon_that_says_nonsense_is_quoted() {
        let log = weir_core::log::to_stderr(Level::Warning);
        let (signals, _tell) = UnixStream::pair().unwrap();
        let mut keeper = keeper(&log, signals);
        let (line, _daemon) =
            rustix::net::socketpair(AddressFamily::UNIX, SocketType::SEQPACKET, SocketFlags::CLOEXEC, None)
                .unwrap();
        let mut life = Life::begun();
        let message = Message { text: "please 1".to_owned(), fd: None };
        let error = keeper.answer(&line, message, rustix::process::getpid(), &mut life).unwrap_err();
        assert_eq!(error.to_string(), "it said \"please 1\"");
    }

    /// The children of this process that run this program, or are about to.
    fn running(program: &Path) -> Vec<Pid> {
        let own = std::process::id().to_string();
        let child = |pid: i32| {
            let of = |file| std::fs::read_to_string(format!("/proc/{pid}/{file}")).unwrap_or_default();
            let is_own = of("status").lines().any(|line| line.strip_prefix("PPid:\t") == Some(&own));
            (is_own && of("cmdline").contains(program.to_str()?)).then(|| Pid::from_raw(pid))?
        };
        let all = std::fs::read_dir("/proc").unwrap();
        all.filter_map(|entry| child(entry.unwrap().file_name().to_str()?.parse().ok()?)).collect()
    }

    #[test]
    fn a_panic_over_one_daemon_ends_that_daemon_and_not_the_keeper() {
        let log = weir_core::log::to_stderr(Level::Warning);
        let (signals, _tell) = UnixStream::pair().unwrap();
        let mut keeper = keeper(&log, signals);
        // Only a bug can leave the keeper with memory like this, which has no descriptor to hand
        // over.
        let kept = Kept::Memory(Memory::anonymous(4096).unwrap());
        keeper.kept.insert("map".to_owned(), kept);
        // A daemon that does not end by itself.
        let program = std::env::temp_dir().join(format!("weir-endless-{}", std::process::id()));
        std::fs::write(&program, "#!/bin/sh\nwhile :; do sleep 0.1; done\n").unwrap();
        std::fs::set_permissions(&program, std::os::unix::fs::PermissionsExt::from_mode(0o700)).unwrap();
        let error = keeper.one_life(&program, false).map(|life| life.end).unwrap_err();
        assert_eq!(error.to_string(), "a bug in the keeper, reported above");
        let left = running(&program);
        left.iter().for_each(|&daemon| _ = rustix::process::kill_process(daemon, Signal::KILL));
        std::fs::remove_file(&program).unwrap();
        assert_eq!(left, [], "it lives on beside the next one");
        keeper.kept.clear();
        assert_eq!(keeper.one_life(Path::new("/bin/true"), false).unwrap().end, End::Exit(0));
    }

    #[test]
    fn a_new_program_that_was_given_up_is_tried_again_if_the_one_before_it_does_not_serve() {
        let installed = std::env::temp_dir().join(format!("weir-installed-{}", std::process::id()));
        std::fs::write(&installed, "a program").unwrap();
        let mut programs = Programs {
            own: PathBuf::from("/proc/self/exe"),
            installed: installed.clone(),
            stamp: None,
            new: None,
            given_up: None,
            short_lives: 0,
        };
        programs.look(false);
        let mut after = |was_ready, end| {
            let gives_up = programs.look_after(&Life { was_ready, end, ..Life::begun() }, SHORT_LIFE);
            (gives_up, programs.next() == installed)
        };
        // The new program is killed early. The program before it serves, and is killed later.
        assert_eq!(after(false, End::Signal(9)), (true, false));
        assert_eq!(after(true, End::Signal(9)), (false, false));
        // Then the program before it is killed early too, which does not prove it broken. The next
        // time it exits by itself, because it refuses what the keeper holds.
        assert_eq!(after(false, End::Signal(9)), (false, false));
        assert_eq!(after(false, End::Exit(1)), (false, true), "the new one is tried again");
        assert_eq!(after(false, End::Exit(1)), (true, false));
        std::fs::remove_file(&installed).unwrap();
    }

    #[test]
    fn one_that_is_killed_over_its_start_is_followed_at_once_and_only_a_series_is_slowed_down() {
        assert_eq!([0, 1, 2, 9].map(pause_after), [None, None, Some(PAUSE), Some(PAUSE)]);
    }
}
