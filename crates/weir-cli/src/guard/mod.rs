//! Work that changes the machine for a while runs in a child of this process. This process undoes
//! the changes, whatever ends the child: the end of its work, a signal, a crash. If both are
//! killed, the next command with a guard undoes them, and so does `weir off`.
//!
//! The child's PID is part of the name of everything that the child makes. So all that the child
//! leaves behind can be found.

pub mod swap;

use crate::failure::Failure;
use rustix::event::{PollFd, PollFlags, poll};
use rustix::io::Errno;
use rustix::mount::UnmountFlags;
use rustix::process::{Pid, PidfdFlags, Signal, WaitId, WaitIdOptions, kill_process};
use std::fmt::Display;
use std::fs;
use std::io::{self, Read as _};
use std::os::fd::AsFd as _;
use std::os::unix::ffi::OsStrExt as _;
use std::os::unix::fs::MetadataExt as _;
use std::os::unix::net::UnixStream;
use std::os::unix::process::{CommandExt as _, ExitStatusExt as _};
use std::path::{Path, PathBuf};
use std::process::{Child, Command, ExitStatus};
use std::thread;
use std::time::{Duration, Instant};
use weir_system::{ProcessStat, signals};

/// The environment variable that tells the child which process guards it.
const ENVIRONMENT: &str = "WEIR_GUARD";
/// Time that a server may take to end in good order.
const PATIENCE: Duration = Duration::from_secs(10);
/// Pause between two signals to a process that is to end.
const AGAIN: Duration = Duration::from_millis(250);
/// The beginnings of the names that a guarded child gives to its files and directories.
const OURS: [&str; 2] = ["weir-bench-", "weir-try-"];

/// Runs `work` in a child, and undoes the changes that the child leaves. `elsewhere` is one more
/// directory in which the child makes files.
///
/// # Errors
/// Fails with the errors of `work`. Also fails when the child was interrupted, or a change cannot
/// be undone.
pub fn run(elsewhere: Option<&Path>, work: impl FnOnce() -> Result<(), Failure>) -> Result<(), Failure> {
    let guard = std::env::var(ENVIRONMENT).ok().and_then(|text| text.parse().ok());
    if guard.is_some() && guard == parent() {
        // If the guard is killed, the kernel kills this child too. So this child changes nothing
        // any more once another command undoes what it has changed.
        rustix::process::set_parent_process_death_signal(Some(Signal::KILL)).map_err(Failure::failed)?;
        return if guard == parent() { work() } else { Err(Failure::Said) };
    }
    clear_up(elsewhere)?;
    let (mut told, tell) = UnixStream::pair().map_err(Failure::failed)?;
    told.set_nonblocking(true).map_err(Failure::failed)?;
    for signal in signals::END {
        let tell = tell.try_clone().map_err(Failure::failed)?;
        signal_hook::low_level::pipe::register(signal, tell).map_err(Failure::failed)?;
    }
    // Make this process the subreaper: when the child is dead, programs that the child started
    // become children of this process.
    rustix::process::set_child_subreaper(Some(rustix::process::getpid())).map_err(Failure::failed)?;
    let mut words = std::env::args_os();
    let mut child = Command::new("/proc/self/exe")
        // The child's first argument is this process's own, so that `ps` shows the same name for
        // both.
        .arg0(words.next().unwrap_or_default())
        .args(words)
        .env(ENVIRONMENT, std::process::id().to_string())
        .spawn()
        .map_err(Failure::failed)?;
    let status = watch(&mut child, &told).map_err(Failure::failed)?;
    undo(child.id(), elsewhere)?;
    if told.read(&mut [0; 1]).is_ok() {
        return Err(Failure::Failed("interrupted; what was changed on this machine is as it was".to_owned()));
    }
    match (status.code(), status.signal()) {
        (Some(0), _) => Ok(()),
        // The child has printed the reason of its failure.
        (Some(code), _) => std::process::exit(code),
        (None, signal) => Err(Failure::Failed(format!(
            "the process that did the work was ended by signal {}; what it changed is as it was",
            signal.unwrap_or_default()
        ))),
    }
}

/// Undoes the changes of commands that were killed with their guards.
///
/// # Errors
/// Fails with the first thing that cannot be undone.
pub fn clear_up(elsewhere: Option<&Path>) -> Result<(), Failure> {
    let mut pids: Vec<u32> = entries(elsewhere).iter().filter_map(|path| maker(path)).collect();
    pids.sort_unstable();
    pids.dedup();
    for pid in pids {
        if is_left(pid)? {
            undo(pid, elsewhere)?;
        }
    }
    Ok(())
}

/// Whether process `pid` has ended. If the process still runs although its guard has gone, this
/// function kills the process, and the process counts as ended.
fn is_left(pid: u32) -> Result<bool, Failure> {
    let Some(process) = Pid::from_raw(pid as i32) else { return Ok(true) };
    let environment = fs::read(format!("/proc/{pid}/environ")).unwrap_or_default();
    let mut variables = environment.split(|byte| *byte == 0);
    let guard = variables.find_map(|it| it.strip_prefix(format!("{ENVIRONMENT}=").as_bytes()));
    let guard = guard.and_then(|number| Pid::from_raw(std::str::from_utf8(number).ok()?.parse().ok()?));
    // A process whose environment names no guard is another program, which has got the same PID
    // since.
    if guard.is_some_and(is_gone) || is_exiting(process) {
        end(&[process], Signal::KILL);
        // The process may be in a system call that changes the machine after everything was undone.
        // So wait for its end.
        if !is_gone(process) {
            return Err(not_undone(&format!("process {pid}"), &"it was killed and does not end"));
        }
    }
    Ok(is_gone(process))
}

/// Makes the program that `command` starts die with this process, even if this process dies during
/// the start.
pub fn die_together(command: &mut Command) {
    let parent = rustix::process::getpid();
    // SAFETY: two system calls, which take no memory and no lock.
    unsafe {
        command.pre_exec(move || {
            rustix::process::set_parent_process_death_signal(Some(Signal::KILL))?;
            // If the parent died before the system call above, no signal comes. So check that the
            // parent still lives.
            if rustix::process::getppid() == Some(parent) { Ok(()) } else { Err(Errno::SRCH.into()) }
        });
    }
}

fn parent() -> Option<u32> {
    Some(rustix::process::getppid()?.as_raw_nonzero().get() as u32)
}

/// Waits for the child's end. If this process gets a signal to end, kills the child.
fn watch(child: &mut Child, told: &UnixStream) -> io::Result<ExitStatus> {
    let pidfd = rustix::process::pidfd_open(Pid::from_child(child), PidfdFlags::empty())?;
    loop {
        let mut fds = [
            PollFd::from_borrowed_fd(pidfd.as_fd(), PollFlags::IN),
            PollFd::from_borrowed_fd(told.as_fd(), PollFlags::IN),
        ];
        match poll(&mut fds, None) {
            Err(Errno::INTR) => continue,
            result => result?,
        };
        if !fds[1].revents().is_empty() {
            child.kill()?;
        }
        return child.wait();
    }
}

/// Undoes the changes of process `pid`, which is dead.
fn undo(pid: u32, elsewhere: Option<&Path>) -> Result<(), Failure> {
    let left: Vec<PathBuf> = entries(elsewhere).into_iter().filter(|path| maker(path) == Some(pid)).collect();
    // A device's servers must live until nothing uses the device. So all other children end
    // first. Children of a server that ends become children of this process, and are found too.
    let begun = Instant::now();
    while begun.elapsed() < PATIENCE {
        let others: Vec<Pid> = children().into_iter().filter(|child| !names(*child, &left)).collect();
        if others.is_empty() {
            break;
        }
        end(&others, Signal::KILL);
    }
    for directory in left.iter().filter(|path| path.is_dir()) {
        swap::undo(directory, pid).map_err(|error| not_undone(&directory.display(), &error))?;
    }
    let servers: Vec<Pid> = processes().into_iter().filter(|process| names(*process, &left)).collect();
    end(&servers, Signal::TERM);
    for point in mounts().into_iter().filter(|point| left.iter().any(|path| point.starts_with(path))) {
        let _ = rustix::mount::unmount(&point, UnmountFlags::DETACH | UnmountFlags::NOFOLLOW);
    }
    for path in &left {
        let removed = if path.is_dir() { fs::remove_dir_all(path) } else { fs::remove_file(path) };
        match removed {
            Err(error) if error.kind() != io::ErrorKind::NotFound => {
                return Err(Failure::Failed(format!("cannot remove {}: {error}; remove it", path.display())));
            }
            _ => {}
        }
    }
    Ok(())
}

fn not_undone(what: &dyn Display, why: &dyn Display) -> Failure {
    Failure::Failed(format!("{what}: not all is undone: {why}; run weir off"))
}

/// Files and directories of this user whose names begin like those that a guarded child makes.
fn entries(elsewhere: Option<&Path>) -> Vec<PathBuf> {
    let mut places = vec![std::env::temp_dir(), PathBuf::from("/var/tmp")];
    places.extend(elsewhere.map(Path::to_owned));
    places.dedup();
    let us = rustix::process::geteuid().as_raw();
    let is_ours = |path: &PathBuf| {
        let name = path.file_name().unwrap_or_default().as_bytes();
        OURS.iter().any(|ours| name.starts_with(ours.as_bytes()))
            && fs::symlink_metadata(path).is_ok_and(|it| it.uid() == us && !it.is_symlink())
    };
    let entries = places.iter().filter_map(|place| fs::read_dir(place).ok()).flatten().flatten();
    entries.map(|entry| entry.path()).filter(is_ours).collect()
}

/// The process that made a file: the first number between the dashes of its name.
fn maker(path: &Path) -> Option<u32> {
    let name = path.file_name().unwrap_or_default().to_string_lossy();
    name.split('-').find_map(|part| part.parse().ok())
}

/// The children of this process.
fn children() -> Vec<Pid> {
    let pid = std::process::id();
    let text = fs::read_to_string(format!("/proc/{pid}/task/{pid}/children")).unwrap_or_default();
    text.split_whitespace().filter_map(|word| Pid::from_raw(word.parse().ok()?)).collect()
}

fn processes() -> Vec<Pid> {
    let entries = fs::read_dir("/proc").into_iter().flatten().flatten();
    let own = rustix::process::getpid();
    let pids = entries.filter_map(|entry| Pid::from_raw(entry.file_name().to_str()?.parse().ok()?));
    pids.filter(|pid| *pid != own).collect()
}

/// Whether the command line of a process has one of `paths`, or a path below one.
fn names(process: Pid, paths: &[PathBuf]) -> bool {
    let line = fs::read(format!("/proc/{}/cmdline", process.as_raw_nonzero())).unwrap_or_default();
    let is_named = |path: &PathBuf| {
        let path = path.as_os_str().as_bytes();
        let mut at = line.windows(path.len()).enumerate().filter(|(_, window)| *window == path);
        // Each path of a guarded command ends with the command's PID. If a digit follows, the path
        // has a longer PID, and belongs to another command.
        at.any(|(at, _)| !line.get(at + path.len()).is_some_and(u8::is_ascii_digit))
    };
    paths.iter().any(is_named)
}

/// Ends processes, and waits for them. Uses SIGKILL if they take too long. A server ignores the
/// signal while its device is in use, and the kernel may release the device only after the signal.
/// So the signal is repeated.
fn end(processes: &[Pid], signal: Signal) {
    let mut left = processes.to_vec();
    let (begun, mut told) = (Instant::now(), None::<Instant>);
    while !left.is_empty() && begun.elapsed() < 2 * PATIENCE {
        if told.is_none_or(|told| told.elapsed() > AGAIN) {
            told = Some(Instant::now());
            let signal = if begun.elapsed() > PATIENCE { Signal::KILL } else { signal };
            left.retain(|process| kill_process(*process, signal).is_ok());
        }
        left.retain(|process| !is_gone(*process));
        thread::sleep(Duration::from_millis(5));
    }
}

/// Whether a process is dead. Waits for it if it is a child of this process.
fn is_gone(process: Pid) -> bool {
    match rustix::process::waitid(WaitId::Pid(process), WaitIdOptions::EXITED | WaitIdOptions::NOHANG) {
        Ok(found) => found.is_some(),
        Err(_) => stat(process).is_none_or(|stat| stat.is_dead()),
    }
}

/// Whether a process is about to exit. An exiting process soon has no environment, and so names no
/// guard any more. Then it may live on for as long as the kernel needs to free its memory.
fn is_exiting(process: Pid) -> bool {
    stat(process).is_some_and(|stat| stat.is_exiting())
}

fn stat(process: Pid) -> Option<ProcessStat> {
    ProcessStat::of(process.as_raw_nonzero().get().cast_unsigned()).ok()
}

/// The paths of all mount points.
fn mounts() -> Vec<PathBuf> {
    let table = fs::read_to_string("/proc/self/mounts").unwrap_or_default();
    // Split at blanks: `/proc/self/mounts` shows a blank in a path as an escape, and no path that
    // is looked up here has one.
    table.lines().filter_map(|line| line.split(' ').nth(1).map(PathBuf::from)).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_name_belongs_to_the_process_whose_number_it_has_between_dashes() {
        let of = |name: &str| maker(Path::new(name));
        assert_eq!(of("/var/tmp/weir-bench-swap-123"), Some(123));
        assert_eq!(of("/var/tmp/weir-bench-123-sealed"), Some(123));
        assert_eq!(of("/tmp/weir-bench-flow-7-0"), Some(7));
        assert_eq!(of("/tmp/weir-bench-swap"), None);
    }

    #[test]
    fn a_process_is_known_by_a_path_that_it_was_started_with() {
        let directory = std::env::temp_dir().join("weir-bench-guard-12");
        let mut sleeper =
            Command::new("sh").args(["-c", "sleep 60", "sh"]).arg(directory.join("x")).spawn().unwrap();
        let pid = Pid::from_child(&sleeper);
        // The new process has the command line of this test until it has executed `sh`.
        let begun = Instant::now();
        while !names(pid, std::slice::from_ref(&directory)) && begun.elapsed() < PATIENCE {
            thread::sleep(Duration::from_millis(1));
        }
        let found = [&directory, &directory.with_file_name("weir-bench-guard-1")]
            .map(|it| names(pid, std::slice::from_ref(it)));
        sleeper.kill().unwrap();
        sleeper.wait().unwrap();
        assert_eq!(found, [true, false]);
    }
}
