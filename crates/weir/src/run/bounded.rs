//! The programs that `weir run` bounds on this machine: found, listed, and given orders.
//!
//! No file lists the bounded programs. Each `weir run` has a daemon that listens at a socket.
//! `/proc/net/unix` shows that socket for as long as the daemon lives.

use crate::cli::{EvictOptions, LimitOptions};
use crate::failure;
use std::collections::BTreeSet;
use std::fs;
use std::os::unix::fs::MetadataExt as _;
use std::path::{Path, PathBuf};
use std::thread;
use std::time::{Duration, Instant};
use weir_cli::failure::Failure;
use weir_core::ByteSize;
use weir_daemon::control::{self, Program, Request};
use weir_daemon::run_end;
use weir_pager::BLOCK;
use weir_pager::directory::{CONTROL, MESSAGES};
use weir_system::ProcessStat;

/// Longest wait for a program to follow an order.
const PATIENCE: Duration = Duration::from_secs(10);
/// Time between two looks at a program that is to follow an order.
const LOOK: Duration = Duration::from_millis(50);

/// Every bounded program that this user may see.
pub fn all() -> Vec<Program> {
    let mut programs: Vec<Program> = found().into_iter().map(|(_, program)| program).collect();
    programs.sort_by_key(|program| program.pid);
    programs
}

/// The control socket of a bounded program's daemon. If there are several programs, returns the
/// socket for the lowest PID.
pub fn first_control() -> Option<PathBuf> {
    found().into_iter().min_by_key(|(_, program)| program.pid).map(|(path, _)| path)
}

/// Changes a program's limit.
pub fn limit(options: &LimitOptions) -> Result<(), Failure> {
    let LimitOptions { pid, size } = *options;
    let (socket, _) = find(pid)?;
    control::order(&socket, Request::Limit { pid, bytes: size.0 }).map_err(failure::of)?;
    let whole = size.0 / BLOCK as u64 * BLOCK as u64;
    let seen = wait(&socket, pid, |program| program.limit_bytes == whole && program.resident_bytes <= whole)?;
    let resident = ByteSize(seen.resident_bytes);
    if seen.limit_bytes != whole {
        return Err(silent(&seen, "takes the limit"));
    }
    if seen.resident_bytes > whole {
        let stays = || {
            "what was there at its start, is locked, or a child has too, stays; \
             weir status shows how it goes on"
                .to_owned()
        };
        let why = why_not_out(&seen).unwrap_or_else(stays);
        return Err(Failure::Failed(format!(
            "process {pid} has the limit of {}, and {resident} are resident after {} s: {why}",
            ByteSize(whole),
            PATIENCE.as_secs()
        )));
    }
    println!("process {pid}: {resident} of {} resident", ByteSize(whole));
    Ok(())
}

/// Moves all resident memory of a program out to its stores.
pub fn evict(options: EvictOptions) -> Result<(), Failure> {
    let pid = options.pid;
    let (socket, before) = find(pid)?;
    control::order(&socket, Request::Evict { pid }).map_err(failure::of)?;
    let seen = wait(&socket, pid, |program| program.evictions > before.evictions)?;
    if seen.evictions <= before.evictions {
        return Err(silent(&seen, "goes on moving its memory out"));
    }
    let (was, is) = (ByteSize(before.resident_bytes), ByteSize(seen.resident_bytes));
    // Less than a block may be memory without content.
    match why_not_out(&seen).filter(|_| seen.resident_bytes >= BLOCK as u64) {
        Some(why) => Err(Failure::Failed(format!(
            "process {pid} has {is} resident after the eviction, and had {was}: {why}"
        ))),
        None => {
            println!("process {pid}: {was} were resident, {is} are now");
            Ok(())
        }
    }
}

/// The reason why a program's store takes no more of its memory, and the next step. `None`: the
/// store takes all of it.
fn why_not_out(program: &Program) -> Option<String> {
    let members: Vec<_> = program.troubled.iter().map(ToString::to_string).collect();
    let named = if members.is_empty() { String::new() } else { format!(" ({})", members.join("; ")) };
    match program.store.as_str() {
        "online" | "draining" => None,
        "full" => Some("its store is full; weir run --store takes a larger one".to_owned()),
        "failed" => Some(format!("its store has failed{named}; weir run has said why")),
        state => Some(format!("its store is {state}{named}; weir status shows how it goes on")),
    }
}

/// The failure if a program has got an order, and has not followed it in time.
fn silent(program: &Program, later: &str) -> Failure {
    let Program { pid, silent_s, .. } = *program;
    let busy =
        || "it waits for its store, or is busy with page faults; weir status shows how it goes on".to_owned();
    let why = match ProcessStat::of(pid).is_ok_and(|stat| stat.is_stopped()) {
        true => format!("it is stopped (kill -CONT {pid})"),
        false => why_not_out(program).unwrap_or_else(busy),
    };
    let silence = if silent_s > 1.0 { format!(", silent for {silent_s:.0} s") } else { String::new() };
    Failure::Failed(format!(
        "process {pid} is not done after {} s{silence}: {why}; it {later} then",
        PATIENCE.as_secs()
    ))
}

/// Looks at a program until `is_done` is true, or [`PATIENCE`] is over. Returns the last look.
fn wait(socket: &Path, pid: u32, is_done: impl Fn(&Program) -> bool) -> Result<Program, Failure> {
    let begun = Instant::now();
    loop {
        let programs = match control::programs(socket) {
            Ok((_, programs)) => programs,
            // The process has ended, and so has the `weir run` that started it.
            Err(_) if !Path::new(&format!("/proc/{pid}")).exists() => Vec::new(),
            // The daemon may have died. The next one knows the process once its pager has found it.
            Err(_) if begun.elapsed() <= PATIENCE => {
                thread::sleep(LOOK);
                continue;
            }
            Err(error) => return Err(failure::of(error)),
        };
        let Some(program) = programs.into_iter().rev().find(|program| program.pid == pid) else {
            return Err(Failure::Failed(format!("process {pid} has ended, or runs another program")));
        };
        if is_done(&program) || begun.elapsed() > PATIENCE {
            return Ok(program);
        }
        thread::sleep(LOOK);
    }
}

/// The control socket of the daemon that has a program's pages, and the program.
fn find(pid: u32) -> Result<(PathBuf, Program), Failure> {
    let found = found();
    let there: BTreeSet<u32> = found.iter().map(|(_, program)| program.pid).collect();
    found.into_iter().rev().find(|(_, program)| program.pid == pid).ok_or_else(|| {
        let what = match fs::read_to_string(format!("/proc/{pid}/comm")) {
            Ok(name) => format!(
                "process {pid} ({}) is not bounded, or is another user's",
                control::printable(name.trim_end())
            ),
            Err(_) => format!("there is no process {pid}"),
        };
        let others = match there.is_empty() {
            true => "none is bounded here; weir run --resident SIZE -- program bounds one".to_owned(),
            false => {
                format!("bounded are {}", there.iter().map(u32::to_string).collect::<Vec<_>>().join(", "))
            }
        };
        Failure::Failed(format!("{what}; {others}"))
    })
}

/// Asks the daemons of all runs in parallel. So several daemons that do not answer cost no more
/// time than one.
fn found() -> Vec<(PathBuf, Program)> {
    let sockets =
        fs::read_to_string("/proc/net/unix").map(|text| sockets(&text, CONTROL)).unwrap_or_default();
    let ask = |socket: PathBuf| {
        let (user, programs) = control::programs(&socket).ok()?;
        // Believe a daemon only about processes of its own user. The daemon of another user could
        // name any process.
        let is_its_own = |program: &Program| {
            user == 0
                || fs::metadata(format!("/proc/{}", program.pid)).is_ok_and(|process| process.uid() == user)
        };
        Some(
            programs
                .into_iter()
                .filter(is_its_own)
                .map(|program| (socket.clone(), program))
                .collect::<Vec<_>>(),
        )
    };
    thread::scope(|scope| {
        let asked: Vec<_> = sockets.into_iter().map(|socket| scope.spawn(move || ask(socket))).collect();
        asked.into_iter().filter_map(|thread| thread.join().ok().flatten()).flatten().collect()
    })
}

/// The runs whose daemon does not answer, by the PIDs of their `weir run`. It has a socket for
/// messages as long as it lives.
pub fn without_daemon() -> Vec<u32> {
    let text = fs::read_to_string("/proc/net/unix").unwrap_or_default();
    let controls = sockets(&text, CONTROL);
    let runs = sockets(&text, MESSAGES).into_iter();
    let runs = runs.filter(|messages| !controls.contains(&messages.with_file_name(CONTROL)));
    runs.filter_map(|messages| run_of(&messages)).collect()
}

/// The PID of the `weir run` whose directory has this socket.
fn run_of(socket: &Path) -> Option<u32> {
    run_end::process_of(socket.parent()?.file_name()?)
}

/// The sockets of runs that have this name, from the text of `/proc/net/unix`. A connection is
/// listed with its listener's path, so a path may be there several times.
fn sockets(text: &str, name: &str) -> BTreeSet<PathBuf> {
    let is_run = |path: &Path| {
        path.is_absolute() && path.file_name().is_some_and(|file| file == name) && run_of(path).is_some()
    };
    let paths = text.lines().filter_map(|line| line.splitn(8, ' ').nth(7));
    paths.map(|path| PathBuf::from(path.trim_start())).filter(|path| is_run(path)).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn runs_are_found_by_the_sockets_of_their_daemons_and_nothing_else_is_taken_for_one() {
        let text = "Num       RefCount Protocol Flags    Type St Inode Path
0000000000000000: 00000002 00000000 00010000 0001 01 20190 /tmp/a b/weir-run-12-0123abcd/control
0000000000000000: 00000003 00000000 00000000 0001 03 20191 /tmp/a b/weir-run-12-0123abcd/control
0000000000000000: 00000002 00000000 00010000 0001 01 20192 /tmp/weir-run-13-0123abcd/share
0000000000000000: 00000002 00000000 00010000 0001 01 20193 @/tmp/weir-run-14-0123abcd/control
0000000000000000: 00000002 00000000 00010000 0001 01 20194 weir-run-15-0123abcd/control
0000000000000000: 00000002 00000000 00010000 0001 01 20195 /tmp/weir-run-x-0123abcd/control
0000000000000000: 00000002 00000000 00010000 0001 01 20197 /tmp/weir-run-16/control
0000000000000000: 00000003 00000000 00000000 0001 03 20196
";
        assert_eq!(
            Vec::from_iter(sockets(text, CONTROL)),
            [PathBuf::from("/tmp/a b/weir-run-12-0123abcd/control")]
        );
    }

    #[test]
    fn a_store_that_takes_no_more_is_named_with_the_next_step() {
        let mut program = Program { store: "online".to_owned(), ..Program::default() };
        assert_eq!(why_not_out(&program), None);
        for (state, why) in [
            ("full", "its store is full; weir run --store takes a larger one"),
            ("failed", "its store has failed; weir run has said why"),
            ("unreachable", "its store is unreachable; weir status shows how it goes on"),
        ] {
            state.clone_into(&mut program.store);
            assert_eq!(why_not_out(&program).as_deref(), Some(why));
        }
    }
}
