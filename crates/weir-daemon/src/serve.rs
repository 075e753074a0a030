//! Runs the daemon in the foreground, with its keeper around it if there is one. The daemon runs
//! until a signal tells it to stop and no program uses it.

use crate::cards::{self, Looked};
use crate::config::Config;
use crate::control::{Endpoint, Server, default_path, make_run_time_directory};
use crate::daemon::Daemon;
use crate::environment::Environment;
use crate::error::{Error, ErrorKind};
use crate::keeper::Held;
use crate::relay::Relay;
use crate::report::{StartProgress, StartReport};
use crate::run_end;
use crate::start::{Bar, Start, warn_of_unlocked_memory};
use crate::{bug, core_dump, keeper};
use signal_hook::consts::SIGUSR1;
use signal_hook::iterator::Signals;
use std::io;
use std::path::Path;
use weir_core::log::{Level, Log};
use weir_core::swap_safety::{self, Children, Protections};
use weir_core::{ByteSize, Memory, chain};
use weir_export::fuse;
use weir_store::StoreUrl;
use weir_store::vram::{PathMode, Target, VramUrl};
use weir_system::signals;

/// Runs the daemon until a signal tells it to stop. `file` is the configuration's file, which a
/// keeper holds in memory. `show` shows the progress of the start. Returns the exit code of the
/// last daemon.
///
/// # Errors
/// Fails when the configuration is refused, or a store or a socket that it names cannot be opened.
pub fn run(
    options: &Config,
    file: Option<&Path>,
    log: &Log,
    show: impl Fn(String) -> Bar,
) -> Result<u8, Error> {
    let mut is_first = true;
    let outcome = serve(options, file, log, show, &mut is_first);
    if let (Err(error), Some(path), true) = (&outcome, &options.start_report, is_first) {
        StartReport::of(error).write(path);
    }
    if let Some(socket) = &options.programs {
        run_end::clear(socket);
    }
    outcome
}

/// Does the work of [`run`]. Sets `is_first` to whether this is the first daemon, as soon as that
/// is known.
fn serve(
    options: &Config,
    file: Option<&Path>,
    log: &Log,
    show: impl Fn(String) -> Bar,
    is_first: &mut bool,
) -> Result<u8, Error> {
    options.check()?;
    signals::ignore_strays();
    core_dump::forbid()?;
    // Sockets and mounts may lie in the run-time directory, so make it first.
    options.paths().try_for_each(make_run_time_directory)?;
    // Take the protections before any thread starts, because threads inherit the flusher flag.
    let protections =
        if options.swap { protect(options.unsafe_no_flusher, log)? } else { Protections::default() };
    let keeper = keeper::Link::open().map_err(unkept)?;
    let is_kept = options.keeper || (keeper.is_none() && (keeper::is_copy() || needs_keeper(options, log)));
    if is_kept && keeper.is_none() {
        let fuse = options.fuse.as_ref();
        let left = fuse.filter(|_| options.pool.is_none()).map(|fuse| fuse::Left::before(&fuse.file));
        let used_by = match (options.swap, &options.programs) {
            (true, _) => keeper::Use::Swap,
            (false, Some(_)) => keeper::Use::Run,
            (false, None) => keeper::Use::Anyone,
        };
        let code = keeper::run(log, file, used_by).map_err(|error| {
            let what = format!(
                "--keeper: no daemon can be started: {error}; look at the limits on open files and processes"
            );
            Error::new(ErrorKind::Keeper, what)
        })?;
        // A daemon that died during its start may have left the mount of an earlier daemon. Remove
        // that mount here.
        if let Some(left) = left {
            left.clear();
        }
        if let Some(fuse) = fuse.filter(|_| options.pool.is_some()) {
            fuse::Left::beside(&fuse.file).into_iter().for_each(fuse::Left::clear);
        }
        return Ok(code as u8);
    }
    // Swap needs a relay in front of standard error. Under a keeper the keeper has it, so this
    // process needs none.
    let relay = (options.swap && keeper.is_none()).then(Relay::start).transpose().map_err(denied)?;
    if options.swap && keeper.is_some() {
        // The keeper started this process with access to the kernel's memory reserve. Keep the
        // access for this thread, but not for the threads that it starts: they ask if they need it.
        let _ = swap_safety::reach_reserves(Children::Ordinary);
    }
    bug::end_process(log, relay.is_some());
    // Install signal handlers first, so that an early SIGTERM also ends the daemon in good order.
    let mut signals = Signals::new(signals::END.into_iter().chain([SIGUSR1])).map_err(denied)?;

    if options.programs.is_some() {
        run_end::watch().map_err(denied)?;
    }

    let (link, held) = keeper.unzip();
    *is_first = held.as_ref().is_none_or(Held::is_empty);
    let is_first = *is_first;
    if !is_first {
        Memory::take_over();
    }
    let progress = options.start_report.as_ref().filter(|_| is_first);
    let show = |store: String| match progress {
        Some(path) => StartProgress::written(path.clone(), store.clone(), show(store)),
        None => show(store),
    };
    let is_of_run = options.programs.is_some();
    let ends = |signal: &i32| signals::END.contains(signal) && (!is_of_run || run_end::is_over());
    let mut start = Start::new(show, || signals.pending().find(ends));
    let environment = Environment::of_machine(log);
    let path = options.control.clone().unwrap_or_else(default_path);
    let started = Daemon::start_kept(options, protections, link.as_ref().zip(held), &mut start, &environment)
        .and_then(|daemon| {
            let metrics = options.metrics.as_ref().map(|address| Endpoint::start(address, daemon.service()));
            let metrics = match metrics.transpose() {
                // Another program has taken the port meanwhile. To serve the pages that the keeper
                // holds is worth more than the port.
                Err(why) if !is_first => {
                    log(Level::Warning, format_args!("{}; going on without", chain(&why)));
                    None
                }
                metrics => metrics?,
            };
            let control = Server::start(&path, daemon.service())?;
            Ok(((control, metrics), daemon))
        });
    if let Some(signal) = start.ended_by() {
        // No client has connected yet, so none needs this daemon's pages. The keeper need not start
        // another daemon.
        if let Some(link) = &link {
            let _ = link.ending();
        }
        log(Level::Info, format_args!("stopping on signal {signal}, before anything is served"));
        return Ok(0);
    }
    drop(start);
    let (control, daemon) = started.inspect_err(|_| {
        if let Some(link) = link.as_ref().filter(|_| is_first) {
            // The daemon holds no client's pages yet, so it ends and says why it cannot serve.
            let _ = link.ending();
        }
    })?;
    let backing = options.backing.iter().map(|backing| format!("{backing} below"));
    let what = if options.pool.is_some() { "volumes of up to " } else { "" };
    let stores: Vec<String> = options.stores.iter().map(ToString::to_string).chain(backing).collect();
    let addresses: Vec<String> = daemon.status().exports.into_iter().map(|export| export.address).collect();
    let at = if addresses.is_empty() { String::new() } else { format!(" at {}", addresses.join(", ")) };
    log(
        Level::Info,
        format_args!(
            "serving {what}{} on {}{at}; status at {}",
            ByteSize(daemon.bytes()),
            stores.join(", "),
            path.display()
        ),
    );

    warn_of_unlocked_memory(log);
    daemon.mind_stores(link.is_some());
    if let Some(link) = &link {
        link.ready().map_err(unkept)?;
    }
    let line = link.clone();
    daemon.when_joined(move || {
        // Tell the keeper once more that the daemon serves. The daemon has taken more memory since,
        // and the keeper must set as much aside for the next daemon.
        let _ = line.as_ref().map(|link| link.ready());
    });
    if options.swap {
        let _ = swap_safety::leave_reserves();
    }
    let mut told = signals.forever();
    let signal = loop {
        let signal = told.next();
        if signal == Some(SIGUSR1) {
            if let Some(link) = &link {
                // End as if killed, which the keeper is prepared for. An orderly end would remove
                // the devices.
                log(Level::Info, format_args!("making way for another daemon"));
                link.replacing().map_err(unkept)?;
                std::process::exit(0);
            }
            log(Level::Warning, format_args!("no keeper holds the pages, so this daemon cannot be replaced"));
            continue;
        }
        if signal.is_some() && is_of_run && !run_end::is_over() {
            if let Some(link) = &link {
                let _ = link.staying();
            }
            continue;
        }
        let user = daemon.in_use().or_else(|| daemon.let_go());
        let Some(user) = user.filter(|_| signal.is_some()) else { break signal };
        if let Some(link) = &link {
            let _ = link.staying();
        }
        log(Level::Warning, format_args!("not stopping: {user}, then stop weir again"));
    };
    if let Some(link) = &link {
        // Without the keeper, no process can start another daemon.
        let _ = link.ending();
    }
    log(Level::Info, format_args!("stopping on signal {}", signal.unwrap_or_default()));
    drop(control);
    daemon.stop();

    Ok(0)
}

fn unkept(error: io::Error) -> Error {
    Error::of(ErrorKind::Keeper, error)
}

fn denied(error: io::Error) -> Error {
    Error::of(ErrorKind::System, error)
}

/// Whether pages would lie in a card's memory that only CUDA reaches. After some errors of the CUDA
/// driver, only another process can reach that memory. So a keeper must hold it.
fn needs_keeper(options: &Config, log: &Log) -> bool {
    let needs = |url: &VramUrl| {
        if url.target == Target::Software || url.path == Some(PathMode::Mapped) {
            return false;
        }
        match cards::look(url) {
            Looked::Seen(seen) => seen.cards.iter().any(|card| !card.has("mapped")),
            // The card is not known, so assume that it needs a keeper. If the drivers do not answer
            // later either, the opening of the store fails and says so.
            Looked::NoAnswer(_) | Looked::Died(_) => true,
        }
    };
    let vram = options.stores.iter().filter_map(|store| match store {
        StoreUrl::Vram(url) => Some((store, url)),
        _ => None,
    });
    let Some((store, _)) = vram.into_iter().find(|(_, url)| needs(url)) else { return false };
    (log)(
        Level::Info,
        format_args!(
            "{store}: CUDA is the only way to it, and an error of its driver is survived by another process alone: as with --keeper"
        ),
    );
    true
}

/// Takes every protection that swap needs. Fails with the name of a protection that the system
/// denies.
fn protect(unsafe_no_flusher: bool, log: &Log) -> Result<Protections, Error> {
    let (protections, missing) = swap_safety::protect();
    for missing in &missing {
        if !unsafe_no_flusher {
            let what = format!(
                "--swap: {missing}; --unsafe-no-flusher starts without it, and the machine may freeze when memory is short"
            );
            return Err(Error::new(ErrorKind::Protection, what));
        }
        (log)(Level::Warning, format_args!("--unsafe-no-flusher: {missing}"));
    }
    Ok(protections)
}
