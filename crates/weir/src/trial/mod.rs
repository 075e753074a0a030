//! `weir try`: starts the daemon with real connections to it, and compares every page with what was
//! written.
//!
//! The trial needs no root and no GPU. The daemon is the one that `weir serve` runs, but in this
//! process, on a socket in a directory of its own. The connections are NBD clients. Each page
//! carries its number and its generation, so that an answer with another page or an older version
//! is found. At the end each connection reads the pages that another one wrote.

mod connection;
mod report;
mod shadow;

use crate::cli::TryOptions;
use crate::{failure, some_store};
use connection::{Connection, Tally};
use indicatif::{ProgressBar, ProgressStyle};
use report::Report;
use shadow::{BLOCK, Shadow, next};
use std::fs;
use std::io::IsTerminal as _;
use std::os::unix::fs::DirBuilderExt as _;
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread;
use std::time::{Duration, Instant};
use weir_cli::failure::{Failure, chain};
use weir_core::log::{self, Level};
use weir_core::{ByteSize, PAGE_SIZE};
use weir_daemon::config::Nbd;
use weir_daemon::{Address, Config, Daemon, Environment, Start};
use weir_export::nbd::client::{Client, ClientError, Wish};

/// Default size of the trial's memory.
const SIZE: ByteSize = ByteSize(256 << 20);

/// Runs the trial and prints its report. Fails when a page or an answer was wrong.
pub fn run(options: &TryOptions) -> Result<(), Failure> {
    let directory = Directory::new()?;
    let socket = directory.0.join("nbd.sock");
    let daemon = start(options, &socket)?;
    let seed = options.seed.unwrap_or_else(|| u64::from(std::process::id()));

    let report = exercise(options, seed, &daemon, &socket)?;

    daemon.stop();
    print!("{report}");
    if report.passed() { Ok(()) } else { Err(Failure::Said) }
}

/// Starts a daemon on the store asked for, else on the first GPU's memory, else on host memory.
fn start(options: &TryOptions, socket: &Path) -> Result<Daemon, Failure> {
    let log = log::to_stderr(Level::Warning);
    let (_, daemon) = some_store::open(options.store.as_ref(), options.size, SIZE, &log, |store| {
        let nbd = Nbd {
            addresses: vec![Address::Unix(socket.to_owned())],
            connections: options.connections,
            ..Nbd::default()
        };
        let config =
            Config { stores: vec![store.clone()], size: options.size, nbd: Some(nbd), ..Config::default() };
        Daemon::start(&config, &mut Start::silent(), &Environment::of_machine(&log)).map_err(failure::of)
    })?;
    Ok(daemon)
}

fn exercise(options: &TryOptions, seed: u64, daemon: &Daemon, socket: &Path) -> Result<Report, Failure> {
    let connections = u32::from(options.connections);
    let blocks = (daemon.bytes() / (u64::from(BLOCK) * PAGE_SIZE as u64) / u64::from(connections)) as u32;
    if blocks == 0 {
        return Err(Failure::Failed(format!(
            "a device of {} is too small for {connections} connections; give a larger --size or --store",
            ByteSize(daemon.bytes())
        )));
    }
    let mut random = seed;
    let open = |index| -> Result<Connection, ClientError> {
        let client = Client::unix(socket, &Wish::default())?;
        Ok(Connection::new(client, Shadow::new(seed, index, connections, blocks), next(&mut random)))
    };
    let opened = (0..connections).map(open).collect::<Result<Vec<_>, _>>().map_err(|error| broken(&error))?;

    let length = Duration::from_secs(options.seconds.into());
    let bar = progress(length);
    let (begun, stop) = (Instant::now(), AtomicBool::new(false));
    let worked = each(opened, &stop, |connection| {
        connection.fill()?;
        connection.torment(begun + length, &stop, || bar.set_position(begun.elapsed().as_millis() as u64))
    })?;
    let took = begun.elapsed();
    bar.finish_and_clear();

    let status = daemon.status();
    let written = worked.iter().map(Connection::written).sum();
    let swept = sweep(worked, &stop)?;
    Ok(Report { seed, took, connections, status, written, tallies: swept })
}

/// Lets every connection read the pages of the next one.
fn sweep(connections: Vec<Connection>, stop: &AtomicBool) -> Result<Vec<Tally>, Failure> {
    let (shadows, clients): (Vec<_>, Vec<_>) = connections.into_iter().map(Connection::split).unzip();
    let mut shadows = shadows.into_iter();
    let first = shadows.next();
    let rotated = shadows.chain(first);
    let pairs: Vec<_> = clients.into_iter().zip(rotated).collect();
    let swept = each(pairs, stop, |(reader, shadow)| reader.sweep(shadow))?;
    swept.into_iter().map(|(reader, _)| reader.finish().map_err(|error| broken(&error))).collect()
}

/// Runs `work` on each of `items`, each on a thread of its own. If one fails, the others stop
/// early.
fn each<T: Send>(
    items: Vec<T>,
    stop: &AtomicBool,
    work: impl Fn(&mut T) -> Result<(), ClientError> + Sync,
) -> Result<Vec<T>, Failure> {
    thread::scope(|scope| {
        let work = &work;
        let threads: Vec<_> = items
            .into_iter()
            .map(|mut item| {
                scope.spawn(move || {
                    let outcome = work(&mut item);
                    if outcome.is_err() {
                        stop.store(true, Ordering::Relaxed);
                    }
                    outcome.map(|()| item)
                })
            })
            .collect();
        threads
            .into_iter()
            .map(|thread| thread.join().expect("no panic").map_err(|error| broken(&error)))
            .collect()
    })
}

fn broken(error: &ClientError) -> Failure {
    Failure::Failed(format!("a connection to the daemon failed: {}", chain(error)))
}

fn progress(length: Duration) -> ProgressBar {
    if !std::io::stderr().is_terminal() {
        return ProgressBar::hidden();
    }
    let style =
        ProgressStyle::with_template("{msg} {bar:30} {elapsed}, {eta} left").expect("a valid template");
    ProgressBar::new(length.as_millis() as u64).with_style(style).with_message("verifying every page")
}

/// A directory for the socket. Other users cannot enter the directory, and it is removed at the
/// end.
struct Directory(PathBuf);

impl Directory {
    fn new() -> Result<Self, Failure> {
        let path = std::env::temp_dir().join(format!("weir-try-{}", std::process::id()));
        fs::DirBuilder::new().mode(0o700).create(&path).map_err(|error| {
            Failure::Failed(format!("cannot make the directory {}: {error}; set TMPDIR", path.display()))
        })?;
        Ok(Directory(path))
    }
}

impl Drop for Directory {
    fn drop(&mut self) {
        let _ = fs::remove_dir_all(&self.0);
    }
}
