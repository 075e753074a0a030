//! Starts and ends the daemon under its keeper, so that it outlives `weir on`.

use super::interrupt;
use super::options::DIRECTORY;
use super::settings::systemctl;
use super::state::{Journal, Process, Step};
use crate::failure;
use crate::progress::{Shown, Waiting};
use rustix::event::{PollFd, PollFlags, Timespec, poll};
use rustix::io::Errno;
use rustix::process::{Pid, PidfdFlags, Signal};
use std::fs;
use std::io;
use std::os::fd::{AsFd as _, BorrowedFd};
use std::os::unix::fs::MetadataExt as _;
use std::os::unix::net::UnixStream;
use std::os::unix::process::CommandExt as _;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::thread;
use std::time::{Duration, Instant};
use toml::{Table, Value};
use weir_cli::failure::Failure;
use weir_daemon::control::{self, Status};
use weir_daemon::{StartProgress, StartReport};
use weir_export::fuse;
use weir_system::{ProcessStat, device_use};

/// The unit that the package installs; its configuration is the file that [`Service`] writes.
pub const UNIT: &str = "weir.service";

/// Time that a daemon may take until it serves. It may have to take and clear a large card's
/// memory, or to write a backing file (a TiB at 300 MB/s). It shows its progress, and the user can
/// interrupt it.
const START: Duration = Duration::from_secs(3600);
/// Time that a daemon may take to end.
const END: Duration = Duration::from_secs(30);
/// Longest time that a daemon waits for a program that has its device open, with a margin.
const OPEN: Duration = Duration::from_secs(12);
/// Time between two looks while this process waits for a daemon.
const LOOK: Duration = Duration::from_millis(100);

/// The start of a command that runs a daemon in a system scope. In a user session's scope the
/// daemon would be killed some time after the user's logout. It would also freeze with all users'
/// processes before a sleep, while other programs wait for their pages. Without default
/// dependencies, the scope is not stopped at shutdown.
const SCOPE: [&str; 7] = [
    "--scope",
    "--quiet",
    "--collect",
    "--slice=system.slice",
    "--description=Weir, a daemon that keeps swapped pages",
    "--property=DefaultDependencies=no",
    "--property=SendSIGKILL=no",
];
/// One more property of the scope, only for the daemon in [`DIRECTORY`]. By it systemd runs the
/// package's timer, which checks the battery, while the scope exists.
const WATCHED: &str = "--property=Wants=weir-power.timer";

/// A daemon to start: its directory and its options.
#[derive(Clone, PartialEq, Debug)]
pub struct Service {
    /// The directory of configuration, sockets and log.
    pub directory: PathBuf,
    /// The systemd unit to start; `None`: a process with a session of its own.
    pub unit: Option<String>,
    /// The options of `weir serve` for this part's daemon.
    pub config: Table,
}

/// The socket where a daemon listens for the kernel's NBD client.
pub fn nbd_socket(directory: &Path) -> PathBuf {
    directory.join("nbd.sock")
}

/// The socket where a daemon answers `weir status`.
pub fn control_socket(directory: &Path) -> PathBuf {
    directory.join(control::SOCKET)
}

/// The file that a daemon in `directory` serves by FUSE. The file of a pool's volume has a dot and
/// the volume's name at the end.
pub fn fuse_file(directory: &Path) -> PathBuf {
    directory.join(FUSE_FILE)
}

const FUSE_FILE: &str = "disk";

/// All files that are there and that a daemon in `directory` serves by FUSE.
fn fuse_files(directory: &Path) -> Vec<PathBuf> {
    let names = fs::read_dir(directory).into_iter().flatten().flatten().map(|entry| entry.file_name());
    let is_of_a_volume = |name: &str| name.strip_prefix(FUSE_FILE).is_some_and(|rest| rest.starts_with('.'));
    let names = names.filter(|name| name.to_str().is_some_and(|it| it == FUSE_FILE || is_of_a_volume(it)));
    names.map(|name| directory.join(name)).collect()
}

/// The configuration file of a daemon.
pub fn config_file(directory: &Path) -> PathBuf {
    directory.join("weir.toml")
}

/// The file in which a daemon reports how far its start is, or that it failed.
pub fn start_report(directory: &Path) -> PathBuf {
    directory.join("start.json")
}

fn log_file(directory: &Path) -> PathBuf {
    directory.join("weir.log")
}

impl Service {
    /// Starts the daemon and waits until it serves.
    ///
    /// # Errors
    /// Fails with the daemon's last line if the daemon ends before it serves.
    pub fn start(&self, journal: &mut Journal) -> Result<Status, Failure> {
        let control = control_socket(&self.directory);
        if UnixStream::connect(&control).is_ok() {
            // A daemon that answers already would be taken for the new one. It may lack every
            // protection that swap needs.
            return Err(Failure::Failed(format!(
                "a daemon that weir on did not start answers at {}; end it first",
                control.display()
            )));
        }
        let step =
            |process| Step::Daemon { directory: self.directory.clone(), unit: self.unit.clone(), process };
        journal.intend(step(None))?;
        let failed = |error: io::Error| {
            Failure::Failed(format!("cannot start a daemon in {}: {error}", self.directory.display()))
        };
        fs::create_dir_all(&self.directory).map_err(failed)?;
        fs::write(config_file(&self.directory), self.config.to_string()).map_err(failed)?;
        // Remove the report of an earlier start, which would be taken for the new daemon's.
        let _ = fs::remove_file(start_report(&self.directory));
        let mut child = match &self.unit {
            Some(unit) => {
                systemctl(&["start", unit])?;
                None
            }
            None => {
                let child = self.spawn().map_err(failed)?;
                journal.amend(step(Some(identify(child.id()).map_err(failed)?)))?;
                Some(child)
            }
        };
        self.wait(child.as_mut(), START)
    }

    /// Starts the daemon in its own session, so that closing a terminal does not end it.
    fn spawn(&self) -> io::Result<Child> {
        let log = fs::File::create(log_file(&self.directory))?;
        let program = std::env::current_exe()?;
        let mut command = if systemd_runs() {
            let mut command = Command::new("systemd-run");
            command.args(SCOPE);
            if self.directory.starts_with(DIRECTORY) {
                command.arg(WATCHED);
            }
            command.arg("--").arg(program);
            command
        } else {
            Command::new(program)
        };
        command.args(["serve", "--config"]).arg(config_file(&self.directory));
        command.current_dir("/").stdin(Stdio::null()).stdout(log.try_clone()?).stderr(log);
        // SAFETY: between fork and exec only setsid is called, which is async-signal-safe.
        unsafe { command.pre_exec(|| Ok(rustix::process::setsid().map(drop)?)) };
        command.spawn()
    }

    /// The failure of a daemon that was killed, or could not even report.
    fn ended_in_silence(&self) -> Failure {
        Failure::Failed(match &self.unit {
            Some(unit) => format!("{unit} ended at once; see journalctl -u {unit}"),
            None => last_line(&self.directory).unwrap_or("the daemon ended without a word".to_owned()),
        })
    }

    /// Waits until the daemon serves, for `most` at most.
    fn wait(&self, mut child: Option<&mut Child>, most: Duration) -> Result<Status, Failure> {
        let (begun, mut starting) = (Instant::now(), Starting::default());
        loop {
            let status = control::status(&control_socket(&self.directory));
            // Read the start report after the status. If the daemon answers by now, its last report
            // is there too, and is shown before this function returns.
            starting.look(&start_report(&self.directory));
            if let Ok(status) = status {
                return Ok(status);
            }
            let ended = match (&mut child, &self.unit) {
                (Some(child), _) => child.try_wait().map_err(Failure::failed)?.is_some(),
                (None, Some(unit)) => systemctl(&["is-active", "--quiet", unit]).is_err(),
                (None, None) => false,
            };
            if ended {
                let report = StartReport::read(&start_report(&self.directory));
                return Err(report.map_or_else(|| self.ended_in_silence(), failure::reported));
            }
            if begun.elapsed() > most {
                return Err(Failure::Failed(format!(
                    "the daemon does not answer at {} after {} s",
                    control_socket(&self.directory).display(),
                    most.as_secs()
                )));
            }
            interrupt::check()?;
            thread::sleep(Duration::from_millis(20));
        }
    }
}

/// Shows how far a daemon's start is: one store after another.
#[derive(Default)]
struct Starting(Option<(String, Shown)>);

impl Starting {
    fn look(&mut self, report: &Path) {
        let Some(StartProgress { store, done_bytes, all_bytes, .. }) = StartProgress::read(report) else {
            return;
        };
        if self.0.as_ref().is_none_or(|(last, _)| *last != store) {
            // The previous store's bar must be gone before the next one is drawn.
            self.0 = None;
            let name = store.clone();
            let say = move |far: &str, left: &str| {
                let line = format!("starting: {far} of {name}{left}");
                eprintln!("weir: {line}");
            };
            self.0 = Some((store.clone(), Shown::new(store, say)));
        }
        if let Some((_, shown)) = &mut self.0 {
            shown.show(done_bytes, all_bytes);
        }
    }
}

/// Whether systemd is this machine's init (sd_booted(3)), and can start scopes.
fn systemd_runs() -> bool {
    Path::new("/run/systemd/system").is_dir()
        && Command::new("systemd-run").arg("--version").stdout(Stdio::null()).status().is_ok()
}

/// The last line of a daemon's log, without the program's name.
fn last_line(directory: &Path) -> Option<String> {
    last_of(&fs::read_to_string(log_file(directory)).ok()?)
}

fn last_of(text: &str) -> Option<String> {
    let line = text.lines().last()?;
    Some(line.strip_prefix("weir: ").unwrap_or(line).to_owned())
}

/// Ends a daemon, and removes its files. Nothing may use its device any more.
///
/// # Errors
/// Fails when the daemon does not end in time. The daemon is not killed then: a person should look
/// first.
pub fn stop(directory: &Path, unit: Option<&str>, process: Option<Process>) -> Result<(), Failure> {
    // End the unit by its process, because it refuses `systemctl stop`.
    if let Some(process) = process.or_else(|| unit.and_then(main_process)) {
        end(process, directory)?;
    }
    // The daemon's process id was not recorded, or its keeper was killed.
    if let Some(process) = keeper_of(directory) {
        end(process, directory)?;
    }
    fuse_files(directory).iter().for_each(|file| fuse::Left::by_others(file).clear());
    if let Some(unit) = unit {
        // systemd lists a failed unit until it is reset.
        let _ = systemctl(&["reset-failed", unit]);
    }
    // A killed daemon did not remove its files.
    for file in [config_file, log_file, start_report, nbd_socket, control_socket].map(|file| file(directory))
    {
        match fs::remove_file(&file) {
            // `NotADirectory`: the directory could not be made because a file is in its place.
            Err(error) if !matches!(error.kind(), io::ErrorKind::NotFound | io::ErrorKind::NotADirectory) => {
                return Err(Failure::Failed(format!("cannot remove {}: {error}", file.display())));
            }
            _ => {}
        }
    }
    // An earlier weir made a directory for each further part. That of `weir on` itself still holds
    // the state, so it stays.
    let _ = fs::remove_dir(directory);
    Ok(())
}

/// The keeper of a device that is on, or its daemon if only that is left. `None` if both have
/// ended.
pub fn running(directory: &Path, unit: Option<&str>, process: Option<Process>) -> Option<Process> {
    let known = process.or_else(|| unit.and_then(main_process));
    known.filter(|known| identify(known.pid).is_ok_and(|now| now == *known)).or_else(|| keeper_of(directory))
}

/// The process that a unit runs.
fn main_process(unit: &str) -> Option<Process> {
    let output =
        Command::new("systemctl").args(["show", "--property=MainPID", "--value", unit]).output().ok()?;
    identify(String::from_utf8_lossy(&output.stdout).trim().parse().ok()?).ok()
}

/// Finds the keeper that runs with this directory's configuration, for a `weir on` that died before
/// it recorded the process id. The daemon has the same command line, and the keeper is its parent.
/// If the keeper was killed, returns the daemon instead. Only processes with that command line are
/// considered.
fn keeper_of(directory: &Path) -> Option<Process> {
    let config = config_file(directory);
    let wanted = ["serve".as_bytes(), b"--config", config.as_os_str().as_encoded_bytes()];
    let own = rustix::process::geteuid().as_raw();
    let serves = |pid: &u32| {
        if !fs::metadata(format!("/proc/{pid}")).is_ok_and(|it| it.uid() == own) {
            return false;
        }
        let arguments = fs::read(format!("/proc/{pid}/cmdline")).unwrap_or_default();
        arguments.split(|byte| *byte == 0).skip(1).take(3).eq(wanted)
    };
    let pids: Vec<u32> = fs::read_dir("/proc")
        .ok()?
        .filter_map(|entry| entry.ok()?.file_name().to_str()?.parse().ok())
        .filter(serves)
        .collect();
    let parent = |pid: u32| ProcessStat::of(pid).map(|stat| stat.parent);
    let keeper = pids.iter().find(|pid| parent(**pid).is_ok_and(|parent| !pids.contains(&parent)))?;
    identify(*keeper).ok()
}

fn end(process: Process, directory: &Path) -> Result<(), Failure> {
    let Ok(now) = identify(process.pid) else { return Ok(()) };
    if now != process {
        return Ok(());
    }
    let failed = |error: io::Error| {
        Failure::Failed(format!("cannot end the daemon, process {}: {error}", process.pid))
    };
    let Some(pid) = Pid::from_raw(process.pid as i32) else { return Ok(()) };
    let pidfd = match rustix::process::pidfd_open(pid, PidfdFlags::empty()) {
        Ok(pidfd) => pidfd,
        Err(Errno::SRCH) => return Ok(()),
        Err(errno) => return Err(failed(errno.into())),
    };
    match rustix::process::pidfd_send_signal(&pidfd, Signal::TERM) {
        Ok(()) | Err(Errno::SRCH) => {}
        Err(errno) => return Err(failed(errno.into())),
    }
    let mut waiting = Waiting::new(format!("the daemon, process {}, to end", process.pid), OPEN + END);
    let mut has_ended =
        |within| ended(pidfd.as_fd(), within, &mut waiting).map_err(|errno| failed(errno.into()));
    if has_ended(OPEN)? {
        return Ok(());
    }
    if let Some(user) = open_device(directory) {
        return Err(Failure::Failed(format!(
            "{user}, then try again; nothing is swapped there any more, and the daemon, process {}, serves it until then",
            process.pid
        )));
    }
    if has_ended(END)? {
        return Ok(());
    }
    Err(Failure::Failed(format!(
        "the daemon, process {}, has not ended {} s after SIGTERM; {}",
        process.pid,
        (OPEN + END).as_secs(),
        next_step(directory)
    )))
}

/// The next step for a user whose daemon does not end. An NBD or loop device without a daemon gets
/// errors; a ublk device waits.
fn next_step(directory: &Path) -> &'static str {
    let options = fs::read_to_string(config_file(directory)).unwrap_or_default();
    let is_ublk = options.parse::<Table>().is_ok_and(|options| options.contains_key("ublk"));
    if is_ublk {
        "run weir off again, and do not kill it: whoever touches its ublk device would wait for ever"
    } else {
        "nothing uses its device any more, so it can be killed"
    }
}

/// Waits for a process to end, and shows that the wait goes on. Returns whether it ended in time.
fn ended(pidfd: BorrowedFd<'_>, within: Duration, waiting: &mut Waiting) -> Result<bool, Errno> {
    let begun = Instant::now();
    loop {
        let left = within.saturating_sub(begun.elapsed());
        let timeout = Timespec::try_from(left.min(LOOK)).expect("seconds");
        match poll(&mut [PollFd::from_borrowed_fd(pidfd, PollFlags::IN)], Some(&timeout)) {
            // Ctrl-C comes too late: the swap is off already, and a half removed device is of no
            // use.
            Err(Errno::INTR) => {}
            Ok(0) if !left.is_zero() => waiting.look(),
            ready => return ready.map(|ready| ready > 0),
        }
    }
}

/// Names the program that has the ublk device open and so keeps the daemon in `directory` from
/// ending. `None` if no program has the device open, or the daemon does not answer. A daemon that
/// is about to end does not answer; one that takes over has perhaps not heard the signal yet.
fn open_device(directory: &Path) -> Option<String> {
    let status = control::status(&control_socket(directory)).ok()?;
    let devices = status.exports.into_iter().filter(|export| export.kind == "ublk").map(|it| it.address);
    devices
        .into_iter()
        .find_map(|device| device_use::user_or_opener(&device).map(|user| device_use::in_use(&device, &user)))
}

/// Returns the running process with this number. A zombie counts as ended.
pub fn identify(pid: u32) -> io::Result<Process> {
    let stat = ProcessStat::of(pid)?;
    if stat.is_dead() {
        return Err(io::ErrorKind::NotFound.into());
    }
    Ok(Process { pid, started: stat.started })
}

/// The time at which a process began, in ticks since the machine's start. `None`: it has ended.
pub fn started(pid: u32) -> Option<u64> {
    identify(pid).ok().map(|process| process.started)
}

/// A list as a TOML value.
pub fn list(values: impl IntoIterator<Item = String>) -> Value {
    Value::Array(values.into_iter().map(Value::String).collect())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_process_is_known_by_number_and_start() {
        let own = identify(std::process::id()).expect("this process");
        assert_eq!(identify(std::process::id()).expect("again"), own);
        assert!(own.started > 0);
        assert!(identify(u32::MAX).is_err());
    }

    #[test]
    fn a_daemon_that_never_serves_is_given_up_after_a_while() {
        let directory = std::env::temp_dir().join(format!("weir-no-daemon-{}", std::process::id()));
        let service = Service { directory: directory.clone(), unit: None, config: Table::new() };
        let Err(Failure::Failed(said)) = service.wait(None, Duration::ZERO) else { panic!("it serves") };
        let control = directory.join("control.sock");
        assert_eq!(said, format!("the daemon does not answer at {} after 0 s", control.display()));
    }

    #[test]
    fn a_daemon_whose_ublk_device_would_wait_for_ever_is_not_to_be_killed() {
        let directory = std::env::temp_dir().join(format!("weir-next-step-{}", std::process::id()));
        fs::create_dir_all(&directory).expect("a directory");
        let said = |options: &str| {
            fs::write(config_file(&directory), options).expect("written");
            next_step(&directory)
        };
        let (ublk, nbd) = (said("ublk = true\nswap = true\n"), said("nbd = [\"unix:/ublk\"]\n"));
        fs::remove_dir_all(&directory).expect("removed");
        assert!(ublk.contains("do not kill") && ublk.contains("weir off"), "{ublk}");
        assert!(nbd.contains("can be killed"), "{nbd}");
    }

    #[test]
    fn a_process_that_is_gone_or_another_one_is_not_signalled() {
        let own = identify(std::process::id()).expect("this process");
        let pass_over = |process| end(process, Path::new("/nowhere"));
        pass_over(Process { started: own.started + 1, ..own }).expect("or this test would be dead");
        pass_over(Process { pid: u32::MAX - 7, started: 1 }).expect("nobody's");
    }
}
