//! `weir run`: runs a program in less memory than it uses.
//!
//! A daemon of the run's own holds the pages, and an object that is preloaded into the program
//! bounds its memory. So every store of `weir serve` works here too. Only the daemon opens a card.
//! The program and its children need no context of CUDA or Vulkan.

mod bounded;
mod program;
mod vm;

pub use bounded::{all, evict, first_control, limit, without_daemon};
pub use vm::vm;

use crate::cli::{BoundOptions, RunOptions};
use rustix::event::{PollFd, PollFlags};
use rustix::io::Errno;
use rustix::process::{Pid, PidfdFlags, Resource, Signal, WaitOptions, getrlimit};
use signal_hook::consts::{SIGHUP, SIGINT, SIGQUIT, SIGTERM, SIGUSR1, SIGUSR2};
use signal_hook::iterator::SignalsInfo;
use signal_hook::iterator::exfiltrator::WithOrigin;
use signal_hook::low_level::siginfo::{Cause, Origin};
use std::collections::BTreeMap;
use std::ffi::OsString;
use std::fs;
use std::io::{self, Write as _};
use std::os::unix::ffi::OsStrExt as _;
use std::os::unix::net::{UnixDatagram, UnixStream};
use std::os::unix::process::{CommandExt as _, ExitStatusExt as _};
use std::path::{Path, PathBuf};
use std::process::{Child, Command, ExitStatus, Stdio};
use std::thread::{self, JoinHandle};
use std::time::{Duration, Instant};
use weir_cli::failure::{Failure, chain};
use weir_core::PAGE_SIZE;
use weir_daemon::{PATH_MOST, run_end};
use weir_pager::{BLOCK_PAGES, Ledger, Promise, directory};
use weir_share::{Client, THREADS_MOST, path_of};
use weir_store::StoreUrl;

/// The object that is preloaded into the program.
const OBJECT: &str = "libweir_preload.so";
/// Time that background processes may go on before a line reports them.
const SAY_AFTER: Duration = Duration::from_secs(1);
/// Default size of the store: bytes of host memory for each byte that may be resident.
const TIMES: u64 = 4;
/// Default of `--spin-us` on a machine with at least `PROCESSORS` processors. On a single one, a
/// thread that spins takes the processor that the program needs. With two, a processor that goes
/// idle takes longer to wake than all else that a page fault costs.
const SPIN_US: u32 = 50;
const PROCESSORS: usize = 2;
/// Open files that a process needs for the most connections to its daemon. 48 are too few.
const FILES: u64 = 64;

/// Runs the program to its end, and ends with its exit status.
pub fn run(options: &RunOptions) -> Result<(), Failure> {
    let (status, ()) = execute(&options.program, &options.bound, |_| Ok(()), |_| ())?;
    end(status)
}

/// Ends this process in the way in which the program ended: by its exit code, or that of a signal.
fn end(status: ExitStatus) -> ! {
    // `exit` runs no destructors, so nothing may be left to clean up.
    std::process::exit(status.code().unwrap_or_else(|| 128 + status.signal().unwrap_or_default()));
}

/// Runs the program to its end. `fits` is given the number of bytes that the stores have room for,
/// and may refuse the program. `begun` is given the program's process.
fn execute<T>(
    program: &[OsString],
    bound: &BoundOptions,
    fits: impl FnOnce(u64) -> Result<(), Failure>,
    begun: impl FnOnce(&Child) -> T,
) -> Result<(ExitStatus, T), Failure> {
    let (name, arguments) = program.split_first().expect("clap wants one at least");
    let path = program::find(name)?;
    program::check(&path)?;
    let object = object()?;
    weir_pager::probe().map_err(|error| Failure::Failed(chain(&error)))?;
    // A signal that ends the program ends this process after it.
    let passed = [SIGINT, SIGQUIT, SIGTERM, SIGHUP, SIGUSR1, SIGUSR2];
    let mut signals = SignalsInfo::<WithOrigin>::new(passed).map_err(Failure::failed)?;
    let daemon = Daemon::start(bound, &mut signals)?;
    fits(daemon.room)?;
    // From here on this process becomes the parent of each descendant whose own parent ends.
    let _ = rustix::process::set_child_subreaper(Some(rustix::process::getpid()));
    let mut command = Command::new(&path);
    command
        .arg0(name)
        .args(arguments)
        .env("LD_PRELOAD", preload(&object))
        .env("WEIR_RUN_RESIDENT", bound.resident.0.to_string())
        .env("WEIR_RUN_DIRECTORY", &daemon.directory)
        .env("WEIR_RUN_PARENT", std::process::id().to_string())
        .env("WEIR_RUN_SPIN_US", spin_us(bound).to_string())
        .env("WEIR_RUN_THREADS", threads(bound).to_string());
    let parent = rustix::process::getpid();
    // SAFETY: the child makes only two system calls before it becomes the program.
    unsafe {
        command.pre_exec(move || {
            // If this process is killed, the pages end with the daemon, and so does the program.
            rustix::process::set_parent_process_death_signal(Some(Signal::KILL))?;
            // The parent may have died before the death signal was set.
            match rustix::process::getppid() == Some(parent) {
                true => Ok(()),
                false => Err(io::ErrorKind::Interrupted.into()),
            }
        });
    }
    let child = command
        .spawn()
        .map_err(|error| Failure::Failed(format!("cannot run {}: {error}", path.display())))?;
    let kept = begun(&child);
    let status = wait(child, &daemon, signals).map_err(Failure::failed)?;
    Ok((status, kept))
}

/// Waits for the program, then for the processes that it left in the background, since the daemon
/// has their pages too. Passes signals on as [`pass_on`] does.
fn wait(mut child: Child, daemon: &Daemon, mut signals: SignalsInfo<WithOrigin>) -> io::Result<ExitStatus> {
    let group = daemon.group();
    let handle = signals.handle();
    thread::spawn(move || {
        for origin in &mut signals {
            pass_on(&origin, group);
        }
    });
    let status = child.wait();
    let ended = Instant::now();
    let mut is_said = false;
    loop {
        // Without descriptors or memory a look fails. Then nobody knows whether processes are left.
        let Ok(left) = left_behind(group) else {
            thread::sleep(SAY_AFTER);
            continue;
        };
        if left.is_empty() {
            break;
        }
        if !is_said && ended.elapsed() > SAY_AFTER {
            is_said = true;
            let count = left.len();
            say(&format!(
                "weir: the program has ended; {count} of its processes go on, and this ends with the last"
            ));
        }
        for process in left {
            // No caller needs the exit code of a background process.
            let _ = rustix::process::waitpid(Some(process), WaitOptions::NOHANG);
        }
        thread::sleep(Duration::from_millis(10));
    }
    handle.close();
    status
}

/// Passes a signal on that this process got. SIGTERM goes to all processes of the run. SIGINT and
/// SIGQUIT do too, if a process has sent them: a terminal itself sends them to each process.
/// SIGHUP, SIGUSR1 and SIGUSR2 go to the children of this process alone. They ask many servers to
/// do something, and end a process that does not expect them.
fn pass_on(origin: &Origin, daemon: Option<Pid>) {
    let is_sent = !matches!(origin.cause, Cause::Kernel);
    let (signal, is_for_all) = match origin.signal {
        SIGTERM => (Signal::TERM, true),
        SIGINT if is_sent => (Signal::INT, true),
        SIGQUIT if is_sent => (Signal::QUIT, true),
        SIGHUP => (Signal::HUP, false),
        SIGUSR1 => (Signal::USR1, false),
        SIGUSR2 => (Signal::USR2, false),
        _ => return,
    };
    // A process may start others while this goes on, so look again until a look finds none that has
    // to get the signal. A process that began after its parent had got the signal is part of the
    // parent's answer, such as a clean-up. It does not get the signal. An orphan becomes a child of
    // this process.
    let (mut told, mut latest) = (BTreeMap::new(), ticks());
    loop {
        let left = left_behind(daemon).unwrap_or_default();
        let mut found: Vec<(Pid, u64)> = left.into_iter().map(|process| (process, latest)).collect();
        let mut at = 0;
        while let Some(&(process, latest)) = found.get(at).filter(|_| is_for_all) {
            let latest = told.get(&process.as_raw_nonzero()).copied().unwrap_or(latest);
            let number = process.as_raw_nonzero().to_string();
            found.extend(children(&number).unwrap_or_default().into_iter().map(|child| (child, latest)));
            at += 1;
        }
        found.retain(|(process, latest)| {
            !told.contains_key(&process.as_raw_nonzero()) && started(*process).is_some_and(|at| at <= *latest)
        });
        for (process, _) in &found {
            // A process that begins in the same tick may be an answer.
            told.insert(process.as_raw_nonzero(), ticks().saturating_sub(1));
            let _ = rustix::process::kill_process(*process, signal);
        }
        if found.is_empty() || !is_for_all {
            break;
        }
        latest = latest.min(ticks().saturating_sub(1));
    }
}

/// The time since the machine's start in ticks of 10 ms, as `/proc/PID/stat` counts it.
fn ticks() -> u64 {
    let now = rustix::time::clock_gettime(rustix::time::ClockId::Boottime);
    now.tv_sec as u64 * 100 + now.tv_nsec as u64 / 10_000_000
}

/// The time at which a process began, in [`ticks`].
fn started(process: Pid) -> Option<u64> {
    crate::on::started(process.as_raw_nonzero().get() as u32)
}

/// Prints a line for people. Standard error may be a pipe that nobody reads any more.
fn say(line: &str) {
    let _ = writeln!(io::stderr(), "{line}");
}

/// The children of a process that `/proc` shows under this name. A kernel without lists of children
/// shows none.
fn children(process: &str) -> io::Result<Vec<Pid>> {
    let mut all = String::new();
    for task in fs::read_dir(format!("/proc/{process}/task"))? {
        match fs::read_to_string(task?.path().join("children")) {
            Ok(of_task) => all.push_str(&of_task),
            // The thread has ended.
            Err(error) if error.kind() == io::ErrorKind::NotFound => {}
            Err(error) if error.raw_os_error() == Some(libc::ESRCH) => {}
            Err(error) => return Err(error),
        }
    }
    Ok(all.split_ascii_whitespace().filter_map(|number| Pid::from_raw(number.parse().ok()?)).collect())
}

/// The children of this process that do not belong to the daemon. If the keeper was killed, its
/// daemon has become a child of this process. The keeper and its daemons are all in one process
/// group.
fn left_behind(daemon: Option<Pid>) -> io::Result<Vec<Pid>> {
    let is_daemon_s = |process: Pid| rustix::process::getpgid(Some(process)).ok() == daemon;
    let is_left = |process: &Pid| Some(*process) != daemon && !is_daemon_s(*process);
    Ok(children("self")?.into_iter().filter(is_left).collect())
}

/// Finds the object to preload: beside this program, or where a package installs it.
fn object() -> Result<PathBuf, Failure> {
    let program = std::env::current_exe().map_err(|error| {
        Failure::Failed(format!("cannot tell where this program lies: {error}; mount /proc"))
    })?;
    let beside = program.with_file_name(OBJECT);
    let packaged = program.with_file_name("../lib/weir").join(OBJECT);
    let found = [&beside, &packaged].into_iter().find(|path| path.exists()).ok_or_else(|| {
        let shown = beside.display();
        Failure::Failed(format!(
            "{shown} is not there; build it (cargo build --release) and put it beside weir"
        ))
    })?;
    // The loader takes the first two for the end of a name, and the third for that of a variable.
    // It goes on without the object then, and the program would run without a limit.
    if found.as_os_str().as_bytes().iter().any(|byte| b" :$".contains(byte)) {
        return Err(Failure::Failed(format!(
            "LD_PRELOAD cannot name {}, since the path has a space, a colon or a dollar sign; install weir and {OBJECT} at a path without",
            found.display()
        )));
    }
    Ok(found.clone())
}

/// The value of LD_PRELOAD: Weir's object, then the objects that LD_PRELOAD names already.
fn preload(object: &Path) -> OsString {
    let mut all = object.as_os_str().to_owned();
    if let Some(others) = std::env::var_os("LD_PRELOAD").filter(|others| !others.is_empty()) {
        all.push(":");
        all.push(others);
    }
    all
}

/// A daemon for one program, in a directory of its own; both are removed when this is dropped. The
/// process is the daemon's keeper, or the daemon itself if there is no keeper. It leads a process
/// group.
struct Daemon {
    directory: PathBuf,
    process: Option<Child>,
    /// Bytes that the stores have room for.
    room: u64,
    /// The thread that prints the pagers' lines, and the socket from which it reads them.
    relay: Option<(JoinHandle<()>, PathBuf)>,
    /// The directory's lock. While this process holds it, no other run removes the directory.
    _lock: fs::File,
}

/// Prints the lines of the pagers; an empty line ends the thread. A pager must not write to
/// standard error itself, because standard error may be a pipe. Another thread may be in the middle
/// of a write to that pipe, from memory that is moved out. The pager would wait for that thread,
/// and that thread for the pager: a deadlock.
fn relay(messages: &UnixDatagram) {
    let mut line = [0; 512];
    while let Ok(bytes @ 1..) = messages.recv(&mut line) {
        let line = String::from_utf8_lossy(&line[..bytes]);
        let line: String =
            line.chars().map(|letter| if letter.is_control() { '?' } else { letter }).collect();
        say(&format!("weir: {line}"));
    }
}

impl Daemon {
    fn start(bound: &BoundOptions, signals: &mut SignalsInfo<WithOrigin>) -> Result<Self, Failure> {
        let parent = match std::env::temp_dir() {
            empty if empty.as_os_str().is_empty() => PathBuf::from("/tmp"),
            parent => std::path::absolute(parent).map_err(Failure::failed)?,
        };
        check_length(&parent)?;
        check_files()?;
        run_end::clear_abandoned(&parent);
        let (directory, lock) = run_end::make(&parent).map_err(|error| {
            let parent = parent.display();
            Failure::Failed(format!(
                "cannot make a directory in {parent}: {error}; set TMPDIR to another place"
            ))
        })?;
        let mut daemon = Daemon { directory, process: None, room: 0, relay: None, _lock: lock };
        let unmade = |path: &Path, error: io::Error| {
            let path = path.display();
            Failure::Failed(format!("cannot make {path}: {error}; set TMPDIR to another place"))
        };
        let ledger = daemon.directory.join(directory::LEDGER);
        let promise = Ledger::create(&ledger).map_err(|error| unmade(&ledger, error))?;
        let default = [StoreUrl::Host { size: weir_core::ByteSize(bound.resident.0 * TIMES) }];
        let stores = if bound.store.is_empty() { &default[..] } else { &bound.store };
        let control = daemon.directory.join(directory::CONTROL);
        let mut command = Command::new("/proc/self/exe");
        command.args(["serve", "--log", "warn"]);
        command.arg("--share").arg(daemon.share()).arg("--control").arg(&control);
        command.arg("--programs").arg(daemon.directory.join(directory::PROGRAMS));
        command.args(["--spin-us", &spin_us(bound).to_string()]);
        command.args(["--share-threads", &threads(bound).to_string()]);
        if let Some(address) = &bound.metrics {
            command.args(["--metrics", &address.to_string()]);
        }
        for store in stores {
            command.args(["--store", &store.to_string()]);
        }
        if keeps(bound.keeper, stores)? {
            command.arg("--keeper");
        }
        // A terminal's signals are meant for the program, which may handle them and run on. So the
        // daemon must not get them. The daemon ends when its standard input does, thus with this
        // process.
        command.stdin(Stdio::piped()).process_group(0);
        daemon.process = Some(command.spawn().map_err(Failure::failed)?);
        daemon.comes_up(&control, signals)?;
        let pages = Client::connect(&daemon.share(), weir_share::Options::default())
            .map_err(|error| Failure::Failed(chain(&error)))?
            .pages();
        daemon.room = pages * PAGE_SIZE as u64;
        promise.set_blocks(pages as usize / BLOCK_PAGES).map_err(|error| unmade(&ledger, error))?;
        daemon.hold(promise).map_err(Failure::failed)?;
        let path = daemon.directory.join(directory::MESSAGES);
        let messages = UnixDatagram::bind(&path).map_err(|error| unmade(&path, error))?;
        daemon.relay = Some((thread::spawn(move || relay(&messages)), path));
        Ok(daemon)
    }

    /// Waits until the daemon answers. A signal ends the wait, since a store may take long to open.
    fn comes_up(&mut self, control: &Path, signals: &mut SignalsInfo<WithOrigin>) -> Result<(), Failure> {
        let process = self.process.as_mut().expect("just started");
        while UnixStream::connect(control).is_err() {
            if let Some(origin) = signals.pending().next() {
                return Err(Failure::Ended(128 + origin.signal as u8));
            }
            if process.try_wait().map_err(Failure::failed)?.is_some() {
                // The daemon has printed why it ended.
                return Err(Failure::Said);
            }
            thread::sleep(Duration::from_millis(2));
        }
        Ok(())
    }

    fn share(&self) -> PathBuf {
        self.directory.join(directory::SHARE)
    }

    /// The number of the daemon's process group.
    fn group(&self) -> Option<Pid> {
        self.process.as_ref().map(Pid::from_child)
    }

    /// Keeps the promise of a next daemon valid until the keeper, which would start that daemon,
    /// has ended.
    fn hold(&self, promise: Promise) -> io::Result<()> {
        let process = Pid::from_child(self.process.as_ref().expect("just started"));
        let ended = rustix::process::pidfd_open(process, PidfdFlags::empty())?;
        thread::spawn(move || {
            let mut fds = [PollFd::new(&ended, PollFlags::IN)];
            while rustix::event::poll(&mut fds, None) == Err(Errno::INTR) {}
            drop(promise);
        });
        Ok(())
    }
}

/// Refuses a `TMPDIR` in which a run's directory could have no socket, before anything starts.
fn check_length(parent: &Path) -> Result<(), Failure> {
    let longest =
        directory::PROGRAMS.len().max(path_of(directory::SHARE.as_ref(), THREADS_MOST - 1).as_os_str().len());
    let bytes = parent.join(run_end::LONGEST_NAME).as_os_str().len() + 1 + longest;
    match bytes.checked_sub(PATH_MOST) {
        None | Some(0) => Ok(()),
        Some(excess) => Err(Failure::Failed(format!(
            "{} is too long for sockets, by {excess} bytes; set TMPDIR to a shorter path, such as /tmp",
            parent.display()
        ))),
    }
}

/// Refuses a limit of open files with which the pager's connections could not be made.
fn check_files() -> Result<(), Failure> {
    match getrlimit(Resource::Nofile).current {
        Some(files) if files < FILES => Err(Failure::Failed(format!(
            "a process may have {files} files open, and a run needs {FILES}; ulimit -n {FILES} allows that"
        ))),
        _ => Ok(()),
    }
}

/// Microseconds for which the pager and the daemon look for the next page fault before they sleep.
fn spin_us(bound: &BoundOptions) -> u32 {
    let has_enough = || thread::available_parallelism().is_ok_and(|count| count.get() >= PROCESSORS);
    bound.spin_us.unwrap_or_else(|| if has_enough() { SPIN_US } else { 0 })
}

/// Number of threads that move blocks, in the program and in the daemon.
fn threads(bound: &BoundOptions) -> u16 {
    let of_machine = || threads_on(thread::available_parallelism().map_or(1, usize::from));
    bound.threads.unwrap_or_else(of_machine)
}

/// Number of threads that move blocks by default, on a machine with so many processors. Measured
/// with 16 processors, where eight threads are faster than four, and with two.
fn threads_on(processors: usize) -> u16 {
    match processors {
        16.. => THREADS_MOST,
        _ => (processors / 4).max(1) as u16,
    }
}

/// Whether the daemon of these stores has a keeper. By default it has one if every store outlives
/// the daemon.
fn keeps(asked: Option<bool>, stores: &[StoreUrl]) -> Result<bool, Failure> {
    let ends = stores.iter().find(|store| !store.outlives_its_process());
    match (asked, ends) {
        (Some(true), Some(store)) => Err(Failure::Failed(format!(
            "--keeper yes: the pages of {store} end with the daemon; accepted: host memory, cards, files, or --keeper no"
        ))),
        (Some(asked), _) => Ok(asked),
        (None, ends) => Ok(ends.is_none()),
    }
}

impl Drop for Daemon {
    fn drop(&mut self) {
        if let Some(process) = &mut self.process {
            let group = Pid::from_child(process);
            // The end of its standard input tells the daemon that the run is over.
            drop(process.stdin.take());
            let _ = process.wait();
            // If the keeper was killed, its daemon reads the end of its standard input and exits.
            // Wait for that too.
            while let Ok(Some(_)) = rustix::process::waitpgid(group, WaitOptions::empty()) {}
        }
        if let Some((relay, path)) = self.relay.take() {
            let told = UnixDatagram::unbound().and_then(|socket| socket.send_to(&[], path));
            if told.is_ok() {
                let _ = relay.join();
            }
        }
        let _ = fs::remove_dir_all(&self.directory);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_quarter_of_the_processors_moves_blocks_and_eight_threads_where_there_are_many() {
        for (processors, threads) in [(1, 1), (2, 1), (4, 1), (8, 2), (15, 3), (16, 8), (256, 8)] {
            assert_eq!(threads_on(processors), threads, "with {processors} processors");
        }
    }
}
