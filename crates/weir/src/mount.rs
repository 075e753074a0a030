//! `weir mount`: a RAM disk for ordinary users, in GPU memory where there is any.

use crate::cli::MountOptions;
use crate::{failure, progress, some_store};
use rustix::event::{PollFd, PollFlags, Timespec};
use signal_hook::consts::{SIGHUP, SIGTERM};
use std::fs::OpenOptions;
use std::io::{self, Read as _, Write as _};
use std::os::fd::AsFd as _;
use std::os::unix::net::UnixStream;
use std::path::Path;
use std::process::{Command, Stdio};
use std::sync::Arc;
use std::time::Duration;
use weir_cli::failure::{Failure, chain};
use weir_core::ByteSize;
use weir_core::log::{self, Level, Log};
use weir_daemon::pages::{self, VolumeOptions};
use weir_daemon::{Start, bug, core_dump, warn_of_unlocked_memory};
use weir_export::fuse::mount::is_served;
use weir_export::fuse::{Config, Server};
use weir_store::{Room, StoreUrl};
use weir_system::signals;
use weir_volume::Volume;

/// Default room for the content of files.
const SIZE: ByteSize = ByteSize(1 << 30);
/// Time that requests under way may take when the disk ends.
const GRACE: Duration = Duration::from_secs(2);
/// Number of pages that one thread moves at a time in a slow store.
const DEPTH: usize = 64;
/// The line that the inner process prints once the disk is mounted.
const READY: &[u8] = b"ready\n";

/// Mounts a RAM disk. Returns once the disk is there; in the foreground, once it is gone.
pub fn run(options: &MountOptions) -> Result<(), Failure> {
    // The outer process has made this check before it started the inner process (`--announce`).
    if let Ok(directory) = std::path::absolute(&options.directory)
        && !options.announce
        && is_served(&directory)
    {
        let directory = directory.display();
        return Err(Failure::Failed(format!(
            "a disk is mounted at {directory} already; fusermount3 -u {directory} ends it, and everything on it is gone then"
        )));
    }
    if options.foreground { serve(options) } else { in_background() }
}

/// Starts this program again in the foreground, and waits until the disk is there.
fn in_background() -> Result<(), Failure> {
    let failed = |error: io::Error| Failure::Failed(format!("cannot start in the background: {error}"));
    let mut child = Command::new("/proc/self/exe")
        .args(std::env::args_os().skip(1))
        .args(["--foreground", "--announce"])
        .stdin(Stdio::null())
        .stdout(Stdio::piped())
        .spawn()
        .map_err(failed)?;
    let mut said = [0; READY.len()];
    let heard = child.stdout.take().expect("piped").read_exact(&mut said);
    if heard.is_ok() && said == READY {
        return Ok(());
    }
    // The inner process has printed the reason on standard error, which it inherited.
    let code = child.wait().map_err(failed)?.code();
    // Nothing is mounted, even if the inner process returned 0.
    Err(code.filter(|code| *code > 0).map_or(Failure::Said, |code| Failure::Ended(code as u8)))
}

fn serve(options: &MountOptions) -> Result<(), Failure> {
    let log = log::to_stderr(Level::Warning);
    signals::ignore_strays();
    // Ignore SIGHUP. Otherwise the files on the disk would be lost when the terminal closes.
    signals::ignore(SIGHUP);
    core_dump::forbid().map_err(failure::of)?;
    bug::end_process(&log, false);
    // Install signal handlers first, so that an early SIGTERM also ends the disk in good order.
    let (told, tell) = UnixStream::pair().map_err(Failure::failed)?;
    told.set_nonblocking(true).map_err(Failure::failed)?;
    for signal in signals::END.into_iter().filter(|signal| *signal != SIGHUP) {
        let tell = tell.try_clone().map_err(Failure::failed)?;
        signal_hook::low_level::pipe::register(signal, tell).map_err(Failure::failed)?;
    }
    Server::look_at(&options.directory).map_err(|error| Failure::Failed(chain(&error)))?;
    let shown = log::to_stderr(Level::Info);
    let mut start =
        Start::new(progress::show(&shown), || is_told(&told, options.announce).then_some(SIGTERM));
    let started = mount(options, &mut start, &log);
    if start.ended_by().is_some() {
        return Err(Failure::Said);
    }
    drop(start);
    let (store, server) = started?;
    warn_of_unlocked_memory(&log);
    if options.announce {
        if announce().is_err() {
            // The outer process, which should read the line, has gone. So end the disk.
            server.stop(GRACE);
            return Err(Failure::Said);
        }
    } else {
        // Use no eprintln!, which panics if the terminal is gone.
        (log::to_stderr(Level::Info))(
            Level::Info,
            format_args!(
                "a disk in {store} at {}; fusermount3 -u {} ends it, and everything on it is gone then",
                options.directory.display(),
                options.directory.display()
            ),
        );
    }
    until_unmounted(&server, told, &options.directory, &log).map_err(Failure::failed)?;
    server.stop(GRACE);
    Ok(())
}

/// Whether a signal has come, or the outer process, which waits for the disk, has gone.
fn is_told(signals: &UnixStream, announces: bool) -> bool {
    let stdout = io::stdout();
    let mut fds = [
        PollFd::from_borrowed_fd(signals.as_fd(), PollFlags::IN),
        PollFd::from_borrowed_fd(stdout.as_fd(), PollFlags::empty()),
    ];
    let now = Timespec { tv_sec: 0, tv_nsec: 0 };
    let watched = if announces { &mut fds[..] } else { &mut fds[..1] };
    rustix::event::poll(watched, Some(&now)).is_ok_and(|events| events > 0)
}

/// Returns once the disk is unmounted. A signal unmounts it if nobody has a file open there.
fn until_unmounted(server: &Server, mut told: UnixStream, directory: &Path, log: &Log) -> io::Result<()> {
    loop {
        let mut fds = [
            PollFd::from_borrowed_fd(told.as_fd(), PollFlags::IN),
            PollFd::from_borrowed_fd(server.unmounted(), PollFlags::IN),
        ];
        match rustix::event::poll(&mut fds, None) {
            Err(rustix::io::Errno::INTR) => continue,
            result => result?,
        };
        let [told_to_end, unmounted] = fds.map(|fd| !fd.revents().is_empty());
        if unmounted {
            return Ok(());
        }
        if told_to_end {
            let mut bytes = [0; 64];
            while told.read(&mut bytes).is_ok_and(|read| read > 0) {}
            if let Err(error) = server.unmount_unused() {
                let directory = directory.display();
                (log)(
                    Level::Warning,
                    format_args!(
                        "not stopping: {directory} is in use ({error}); fuser -vm {directory} says by whom, fusermount3 -u {directory} ends it after that"
                    ),
                );
            }
        }
    }
}

/// Mounts the disk on the store asked for, else on the first GPU's memory, else on host memory.
fn mount(options: &MountOptions, start: &mut Start<'_>, log: &Log) -> Result<(StoreUrl, Server), Failure> {
    let (store, volume) = some_store::open(options.store.as_ref(), options.size, SIZE, log, |store| {
        volume(store, options, start, log)
    })?;
    let config = Config {
        threads: usize::from(options.threads),
        allow_other: options.allow_other,
        ..Config::default()
    };
    match Server::ram_disk(&volume, &config, &options.directory, log) {
        Ok(server) => Ok((store, server)),
        Err(error) => Err(Failure::Failed(chain(&error))),
    }
}

fn volume(
    store: &StoreUrl,
    options: &MountOptions,
    start: &mut Start<'_>,
    log: &Log,
) -> Result<Arc<Volume>, Failure> {
    let lanes = usize::from(options.threads);
    pages::create_volume(
        &VolumeOptions {
            stores: std::slice::from_ref(store),
            name: "disk",
            size: options.size,
            backing: &[],
            lanes,
            depth: DEPTH,
            pool: None,
            compress: None,
            room: Room::Reserved,
        },
        start,
        log,
    )
    .map_err(failure::of)
}

/// Tells the outer process that the disk is there, and detaches from the terminal.
fn announce() -> io::Result<()> {
    let mut outer = io::stdout();
    outer.write_all(READY)?;
    outer.flush()?;
    let null = OpenOptions::new().read(true).write(true).open("/dev/null")?;
    rustix::stdio::dup2_stdin(&null)?;
    rustix::stdio::dup2_stdout(&null)?;
    rustix::stdio::dup2_stderr(&null)?;
    // setsid(2) fails only in the leader of a process group. This process is none, because the
    // outer process started it and stayed the leader.
    rustix::process::setsid()?;
    Ok(())
}
