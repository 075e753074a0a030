//! `weir run` when somebody kills: its daemon, its keeper, its program, or itself. With a keeper a
//! killed daemon costs a wait. Without one it costs SIGBUS, and never wrong content.
//! `WEIR_SCALE=full` kills a hundred daemons in each test (`tests/torture run-killed`).

mod common;

use common::bounded::{
    self, LIMIT_MIB, PRELUDE, Scratch, Sweeping, can_run, children, directory_of, kill, python, sweeper,
};
use common::{PATIENCE, is_alive};
use std::fs;
use std::io::{BufRead as _, BufReader, Read as _, Write as _};
use std::os::unix::net::UnixStream;
use std::path::{Path, PathBuf};
use std::process::{Command, Output, Stdio};
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::thread;
use std::time::{Duration, Instant};

const WEIR: &str = env!("CARGO_BIN_EXE_weir");

fn weir(arguments: &[&str]) -> Output {
    let limit = format!("{LIMIT_MIB}MiB");
    // As many threads as there can be, so that daemons die while all of their connections have
    // pages under way.
    let stores = ["run", "--threads", "8", "--resident", &limit, "--store", "host:512MiB"];
    Command::new(WEIR).args(stores).args(arguments).stdin(Stdio::null()).output().expect("it runs")
}

fn is_full() -> bool {
    std::env::var_os("WEIR_SCALE").is_some_and(|scale| scale == "full")
}

/// Waits for something that takes almost no time. Returns how long it took.
fn eventually(what: &str, is_so: impl Fn() -> bool) -> Duration {
    let begun = Instant::now();
    while !is_so() {
        assert!(begun.elapsed() < PATIENCE, "{what} does not happen");
        thread::sleep(Duration::from_millis(1));
    }
    begun.elapsed()
}

#[test]
fn without_a_keeper_a_daemon_killed_at_any_moment_costs_sigbus_and_never_wrong_bytes() {
    let name = "without_a_keeper";
    let Some((_scratch, program)) = sweeper(name) else { return };
    let rounds = if is_full() { 34 } else { 2 };
    for round in 0..rounds {
        // Faults and writes are under way all the time, since the threads never stop.
        for order in [&[][..], &["evict"], &["limit", "32MiB"]] {
            let mut sweeping = Sweeping::start(&program, &["--keeper", "no"]);
            let (pid, daemon) = (sweeping.pid.to_string(), sweeping.keeper());
            thread::sleep(Duration::from_millis(round * 7 % 50));
            let command = order.split_first().map(|(&order, rest)| {
                let command = [&[order, &pid], rest].concat();
                Command::new(WEIR).args(command).stdout(Stdio::null()).stderr(Stdio::null()).spawn().unwrap()
            });
            thread::sleep(Duration::from_millis(round * 13 % 40));
            kill(daemon);
            let (code, said) = sweeping.ended();
            // The kernel writes to the control block of a thread that goes on (rseq). If that page
            // is lost, the signal is SIGSEGV.
            let ends = [libc::SIGBUS, libc::SIGSEGV].map(|signal| Some(128 + signal));
            assert!(ends.contains(&code), "{code:?}, {order:?}, round {round}: {said}");
            for line in ["no daemon has the pages of this process any more: ", "the program gets SIGBUS"] {
                assert!(said.contains(line), "{order:?}, round {round}: {said}");
            }
            // Nobody answers the command any more; it says so and ends.
            command.map(|mut command| command.wait().unwrap());
            let directory = directory_of(sweeping.run.id());
            assert!(!directory.exists(), "{} is left", directory.display());
        }
    }
    println!("figure: without-a-keeper kills {}", 3 * rounds);
    println!("figure: without-a-keeper wrong_pages 0 lower 0");
}

#[test]
fn without_a_keeper_a_daemon_that_dies_costs_sigbus_and_never_wrong_bytes() {
    let name = "without_a_keeper_a_daemon";
    let Some(python) = python().filter(|_| can_run(name)) else { return };
    let scratch = Scratch::new(name);
    let script = "
import os, signal
size = 160 << 20
memory = bytearray(size)
for at in range(0, size, 4096): memory[at] = at // 4096 % 251 + 1
parent = os.getppid()
for process in open(f'/proc/{parent}/task/{parent}/children').read().split():
    if int(process) != os.getpid(): os.kill(int(process), signal.SIGKILL)
for at in range(0, size, 4096):
    if memory[at] != at // 4096 % 251 + 1: os._exit(1)
os._exit(0)
";
    let input = scratch.file("script.py", script);
    let output = weir(&["--keeper", "no", "--", &python, input.to_str().unwrap()]);
    assert_eq!(output.status.code(), Some(128 + libc::SIGBUS), "{}", String::from_utf8_lossy(&output.stderr));
}

#[test]
fn status_tells_of_a_run_whose_daemon_has_died() {
    let script = "
print(os.getpid(), flush=True)
sys.stdin.read()
";
    let name = "status_tells_of_a_run";
    let Some((scratch, program)) = scripted(name, script) else { return };
    let running = Sweeping::of(bounded(&["--keeper", "no"]).args(&program));
    let daemon = running.keeper();
    kill(daemon);
    eventually("the end of the daemon", || !is_alive(daemon));
    let output = Command::new(WEIR).arg("status").env("XDG_RUNTIME_DIR", &scratch.0).output().unwrap();
    let said = String::from_utf8_lossy(&output.stdout);
    let line = format!("run       process {}: its daemon does not answer; its programs", running.run.id());
    assert!(
        output.status.success() && said.contains(&line),
        "{said}{}",
        String::from_utf8_lossy(&output.stderr)
    );
}

/// The line of a process that waits for the daemon's first answer. A busy machine may print it.
const SLOW: &str = "the daemon does not answer yet; waiting for it";

/// The lines that a run has said, besides those about its daemon's end.
fn besides(said: &str) -> Vec<&str> {
    let known = [
        "the daemon ended unasked",
        "the daemon has died; waiting",
        "the new daemon did not take over",
        SLOW,
    ];
    said.lines().filter(|line| !known.iter().any(|known| line.contains(known))).collect()
}

#[test]
fn a_daemon_killed_at_any_moment_costs_a_wait_and_no_byte() {
    let name = "a_daemon_killed_at_any_moment";
    let Some((_scratch, program)) = sweeper(name) else { return };
    let mut sweeping = Sweeping::start(&program, &[]);
    let pid = sweeping.pid.to_string();
    let (mut kills, mut daemon) = (0, 0);
    for round in 0..if is_full() { 34 } else { 2 } {
        for order in [&[][..], &["evict"], &["limit", "32MiB"]] {
            let command = order.split_first().map(|(&order, rest)| {
                let command = [&[order, &pid], rest].concat();
                Command::new(WEIR).args(command).stdout(Stdio::null()).stderr(Stdio::null()).spawn().unwrap()
            });
            thread::sleep(Duration::from_millis(round * 13 % 40));
            // In some rounds the next daemon is killed too, before or while the pager finds it.
            for again in 0..=round % 3 {
                daemon = sweeping.daemon_after(daemon);
                thread::sleep(Duration::from_millis(round * again * 7 % 60));
                kill(daemon);
                kills += 1;
            }
            sweeping.goes_on();
            command.map(|mut command| command.wait().unwrap());
        }
    }
    drop(sweeping.run.stdin.take());
    let (code, said) = sweeping.ended();
    assert_eq!((code, besides(&said)), (Some(0), vec![]), "{said}");
    assert!(!directory_of(sweeping.run.id()).exists());
    println!("figure: with-a-keeper kills {kills} higher 100");
    println!("figure: with-a-keeper wrong_pages 0 lower 0");
}

#[test]
fn children_and_later_programs_of_a_run_go_on_after_its_daemon_was_killed() {
    let name = "children_and_later_programs";
    let Some(python) = python().filter(|_| can_run(name)) else { return };
    let scratch = Scratch::new(name);
    let script = "
me = int(sys.argv[1])
memory = new(72 << 20)
fill(memory, me)
child = os.fork()
if child == 0: os._exit(check(memory, me))
assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 1
for round in range(3): assert check(memory, me)
";
    let input = scratch.file("script.py", &format!("{PRELUDE}{script}"));
    let one = format!("{python} {}", input.display());
    // Two at a time, each started while a daemon may be dead.
    let shell = format!(
        "echo $$; for me in 1 3 5; do {one} $me & {one} $((me+1)) || exit 1; wait $! || exit 1; done"
    );
    let limit = format!("{LIMIT_MIB}MiB");
    let mut command = Command::new(WEIR);
    command.args([
        "run",
        "--threads",
        "3",
        "--resident",
        &limit,
        "--store",
        "host:512MiB",
        "--",
        "sh",
        "-c",
        &shell,
    ]);
    let mut running = Sweeping::of(&mut command);
    let mut daemon = 0;
    let mut kills = 0;
    while kills < 40 && running.run.try_wait().unwrap().is_none() {
        thread::sleep(Duration::from_millis(kills * 37 % 400));
        // The run may be over.
        let Some(keeper) = children(running.run.id()).into_iter().find(|child| *child != running.pid) else {
            break;
        };
        let Some(next) = children(keeper).into_iter().find(|child| *child != daemon) else { continue };
        daemon = next;
        kill(daemon);
        kills += 1;
    }
    let (code, said) = running.ended();
    assert_eq!((code, besides(&said)), (Some(0), vec![]), "{kills} kills: {said}");
    assert!(kills > 3, "{kills}");
}

#[test]
fn a_program_that_has_another_root_by_now_finds_the_next_daemon() {
    let name = "a_program_that_has_another_root";
    let Some(python) = python().filter(|_| can_run(name)) else { return };
    let scratch = Scratch::new(name);
    let script = "
memory = new(96 << 20)
fill(memory, 3)
try: os.chroot(sys.argv[1])
except PermissionError: pass
print(os.getpid(), flush=True)
for line in sys.stdin: print(check(memory, 3), flush=True)
";
    let input = scratch.file("script.py", &format!("{PRELUDE}{script}"));
    let mut command = Command::new(WEIR);
    command.args(["run", "--resident", "32MiB", "--store", "host:256MiB", "--", &python]);
    let mut running = Sweeping::of(command.arg(&input).arg(&scratch.0));
    kill(running.daemon_after(0));
    running.run.stdin.as_mut().expect("piped").write_all(b"check\n").unwrap();
    assert_eq!(running.line(), "True");
    ends_well(running);
}

#[test]
fn a_run_that_is_killed_takes_its_keeper_its_daemon_and_its_files_along() {
    let name = "a_run_that_is_killed";
    let Some((_scratch, program)) = sweeper(name) else { return };
    let mut longest = Duration::ZERO;
    for flags in [&["--keeper", "yes"][..], &["--keeper", "no"]] {
        for is_between in [false, true] {
            let mut sweeping = Sweeping::start(&program, flags);
            let (keeper, pid) = (sweeping.keeper(), sweeping.pid);
            let daemon = sweeping.daemon(flags[1]);
            if is_between {
                kill(daemon);
            }
            let later = if flags[1] == "yes" && is_between { sweeping.daemon_after(daemon) } else { daemon };
            kill(sweeping.run.id());
            let all = [keeper, daemon, later];
            longest = longest.max(eventually("the end of all", || !all.into_iter().any(is_alive)));
            eventually("the end of its program by SIGBUS", || !is_alive(pid));
            let directory = directory_of(sweeping.run.id());
            if is_between && flags[1] == "no" {
                // All that could have removed the directory was killed. So the next run does.
                assert!(bounded(&[]).arg("/bin/true").status().unwrap().success());
            }
            eventually("the end of its directory", || !directory.exists());
            assert_eq!(sweeping.run.wait().unwrap().code(), None);
        }
    }
    println!("figure: killed-run seconds_until_all_is_free {:.3} lower 1", longest.as_secs_f64());
}

/// `weir run` with a small limit and these further flags. The program follows.
fn bounded(flags: &[&str]) -> Command {
    let mut command = Command::new(WEIR);
    command.args(["run", "--resident", "32MiB", "--store", "host:256MiB"]).args(flags).arg("--");
    command
}

/// The words that run a script in Python, behind [`PRELUDE`]. `None`: the test cannot run here.
fn scripted(name: &str, script: &str) -> Option<(Scratch, [PathBuf; 2])> {
    let python = python().filter(|_| can_run(name))?;
    let scratch = Scratch::new(name);
    let input = scratch.file("script.py", &format!("{PRELUDE}{script}"));
    Some((scratch, [python.into(), input]))
}

/// Prints its own number, and those of a child in a session of its own and of that one's children.
/// All of them wait for ever.
const FAMILY: &str = "
inner = '''
import os, subprocess, sys
both = [subprocess.Popen(['sleep', '1000']) for _ in range(2)]
print(os.getpid(), *(child.pid for child in both), flush=True)
for child in both: child.wait()
'''
child = subprocess.Popen([sys.executable, '-c', inner], stdout=subprocess.PIPE, start_new_session=True)
print(os.getpid(), flush=True)
print(child.stdout.readline().decode(), end='', flush=True)
child.wait()
";

/// Starts [`FAMILY`]. Returns the numbers of all of its processes too.
fn family(name: &str) -> Option<(Scratch, Sweeping, Vec<u32>)> {
    let (scratch, program) = scripted(name, FAMILY)?;
    let mut running = Sweeping::of(bounded(&[]).args(&program));
    let mut all: Vec<u32> = running.line().split(' ').map(|number| number.parse().unwrap()).collect();
    all.push(running.pid);
    Some((scratch, running, all))
}

#[test]
fn a_signal_to_a_run_reaches_all_of_its_processes_and_none_is_left() {
    use rustix::process::Signal;
    for (what, sent, number) in [("term", Signal::TERM, libc::SIGTERM), ("int", Signal::INT, libc::SIGINT)] {
        let Some((_scratch, mut running, all)) = family(&format!("a_signal_to_a_run_{what}")) else { return };
        signal(running.run.id(), sent);
        let (code, said) = running.ended();
        assert_eq!(code, Some(128 + number), "{what}: {said}");
        assert!(!all.iter().any(|process| is_alive(*process)), "{what}: {said}");
    }
}

#[test]
fn sigusr1_and_sigusr2_reach_the_program_and_end_neither_it_nor_its_children() {
    use rustix::process::Signal;
    let script = "
def took(number, _): os.write(1, f'{number}\\n'.encode())
for number in signal.SIGUSR1, signal.SIGUSR2: signal.signal(number, took)
child = subprocess.Popen(['sleep', '100'], stdout=subprocess.DEVNULL)
print(os.getpid(), flush=True)
sys.stdin.read()
print(child.poll(), flush=True)
child.kill()
";
    let Some((_scratch, program)) = scripted("sigusr1_and_sigusr2", script) else { return };
    let mut running = Sweeping::of(bounded(&[]).args(&program));
    for (sent, number) in [(Signal::USR1, libc::SIGUSR1), (Signal::USR2, libc::SIGUSR2)] {
        signal(running.run.id(), sent);
        assert_eq!(running.line(), number.to_string());
    }
    drop(running.run.stdin.take());
    assert_eq!(running.line(), "None", "its child does not expect them");
    ends_well(running);
}

#[test]
fn what_a_program_begins_when_a_signal_comes_goes_on_to_its_end() {
    use rustix::process::Signal;
    let name = "what_a_program_begins_when_a_signal_comes";
    if !can_run(name) {
        return;
    }
    let scratch = Scratch::new(name);
    let saved = scratch.file("saved", "");
    let script = format!(
        "trap 'sh -c \"sleep 0.3; sleep 0.3; echo all >{}\"; exit 3' TERM; for i in $(seq 100); do sleep 20 & done; echo $$; wait",
        saved.display()
    );
    let mut running = Sweeping::of(bounded(&[]).args(["sh", "-c", &script]));
    // Processes that begin in the tick of the signal or before it get it too. A hundred of them
    // keep this run busy until the program answers.
    thread::sleep(Duration::from_millis(100));
    signal(running.run.id(), Signal::TERM);
    let (code, said) = running.ended();
    assert_eq!((code, fs::read_to_string(saved).unwrap().as_str()), (Some(3), "all\n"), "{said}");
}

#[test]
fn a_run_that_is_killed_leaves_none_of_its_processes() {
    let Some((_scratch, mut running, all)) = family("a_run_that_is_killed_leaves_none") else { return };
    // The daemon knows the pager of each.
    eventually("pagers of all", || all.iter().all(|process| is_listed(*process)));
    kill(running.run.id());
    assert_eq!(running.run.wait().unwrap().code(), None);
    eventually("the end of all", || !all.iter().any(|process| is_alive(*process)));
    eventually("the end of its directory", || !directory_of(running.run.id()).exists());
}

#[test]
fn a_signal_to_the_daemon_of_a_run_ends_nothing_that_its_program_needs() {
    use rustix::process::Signal;
    let script = "
def end(*_): os._exit(7 if check(memory, 3) else 1)
memory = new(96 << 20)
fill(memory, 3)
signal.signal(signal.SIGTERM, end)
print(os.getpid(), flush=True)
while True: signal.pause()
";
    let name = "a_signal_to_the_daemon";
    let Some((_scratch, program)) = scripted(name, script) else { return };
    for keeper in ["yes", "no"] {
        let mut running = Sweeping::of(bounded(&["--keeper", keeper]).args(&program));
        let first = running.keeper();
        let daemon = running.daemon(keeper);
        // As a manager of services does, which signals all processes of a service.
        for _ in 0..20 {
            for sent in [Signal::TERM, Signal::INT, Signal::HUP] {
                [first, daemon].into_iter().for_each(|process| signal(process, sent));
            }
            thread::sleep(Duration::from_millis(10));
        }
        assert!(is_alive(first) && is_alive(daemon), "keeper {keeper}");
        signal(running.run.id(), Signal::TERM);
        let (code, said) = running.ended();
        assert_eq!((code, besides(&said)), (Some(7), vec![]), "keeper {keeper}");
    }
}

/// Stops the daemon of a program, and lets the program go on. Returns the daemon's process ID.
fn goes_on_without_its_daemon(running: &mut Sweeping, keeper: &str) -> u32 {
    let daemon = running.daemon(keeper);
    signal(daemon, rustix::process::Signal::STOP);
    running.run.stdin.as_mut().expect("piped").write_all(b".").unwrap();
    daemon
}

/// Waits for the end of a program, which must be a good one.
fn ends_well(mut running: Sweeping) {
    drop(running.run.stdin.take());
    let (code, said) = running.ended();
    assert_eq!((code, besides(&said)), (Some(0), vec![]), "{said}");
}

#[test]
fn a_process_that_meets_a_daemon_which_stands_still_waits_for_it_and_is_bounded() {
    use rustix::process::Signal;
    let script = "
print(os.getpid(), flush=True)
sys.stdin.read(1)
inner = 'import sys; print(1, flush=True); sys.stdin.read()'
child = subprocess.Popen([sys.executable, '-c', inner], stdin=subprocess.PIPE, stdout=subprocess.PIPE)
child.stdout.readline()
print(child.pid, flush=True)
sys.stdin.read(1)
";
    let name = "a_process_that_meets_a_daemon";
    let Some((_scratch, program)) = scripted(name, script) else { return };
    for keeper in ["yes", "no"] {
        let mut running = Sweeping::of(bounded(&["--keeper", keeper]).args(&program));
        let daemon = goes_on_without_its_daemon(&mut running, keeper);
        running.says("the daemon does not answer yet; waiting for it, for 60 s at most");
        signal(daemon, Signal::CONT);
        let child: u32 = running.line().parse().unwrap();
        eventually("the child's pager", || is_listed(child));
        ends_well(running);
    }
}

#[test]
fn a_process_that_waits_for_its_daemon_can_be_ended_by_a_signal() {
    use rustix::process::Signal;
    let script = "
print(os.getpid(), flush=True)
sys.stdin.read(1)
child = subprocess.Popen([sys.executable, '-c', ''])
print(child.pid, flush=True)
print(child.wait(), flush=True)
sys.stdin.read(1)
";
    let name = "a_process_that_waits_for_its_daemon";
    let Some((_scratch, program)) = scripted(name, script) else { return };
    let mut running = Sweeping::of(bounded(&["--keeper", "yes"]).args(&program));
    let daemon = goes_on_without_its_daemon(&mut running, "yes");
    let child = running.line().parse().unwrap();
    running.says("the daemon does not answer yet; waiting for it, for 60 s at most");
    signal(child, Signal::TERM);
    let (begun, ended) = (Instant::now(), running.line());
    signal(daemon, Signal::CONT);
    // Without the signal the wait would take 60 s.
    assert!(ended == format!("-{}", libc::SIGTERM) && begun.elapsed() < PATIENCE / 2, "{ended}");
    ends_well(running);
}

#[test]
fn a_fork_while_a_child_starts_its_pager_gives_a_child_that_is_bounded_too() {
    use rustix::process::Signal;
    let script = "
import threading
def end(child): return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
print(os.getpid(), flush=True)
sys.stdin.read(1)
child = os.fork()
if child == 0:
    threading.Thread(target=libc.malloc, args=(64 << 20,), daemon=True).start()
    os.read(0, 1)
    inner = os.fork()
    if inner == 0:
        print(os.getpid(), flush=True)
        memory = new(64 << 20)
        fill(memory, 1)
        os.read(0, 1)
        os._exit(not check(memory, 1))
    os._exit(end(inner))
sys.exit(end(child))
";
    let name = "a_fork_while_a_child_starts";
    let Some((_scratch, program)) = scripted(name, script) else { return };
    let mut running = Sweeping::of(bounded(&["--keeper", "yes"]).args(&program));
    let daemon = goes_on_without_its_daemon(&mut running, "yes");
    running.says("the daemon does not answer yet; waiting for it, for 60 s at most");
    running.run.stdin.as_mut().expect("piped").write_all(b".").unwrap();
    let inner: u32 = running.line().parse().unwrap();
    signal(daemon, Signal::CONT);
    eventually("the pager of the inner child", || is_listed(inner));
    ends_well(running);
}

#[test]
fn forks_beside_the_start_of_a_pager_copy_all_memory() {
    let script = "
import threading
memory = new(24 << 20)
fill(memory, 1)
lost = 0
for turn in range(TURNS):
    child = os.fork()
    if child == 0:
        threading.Thread(target=libc.malloc, args=(64 << 20,), daemon=True).start()
        for _ in range(12):
            inner = os.fork()
            if inner == 0: os._exit(not check(memory, 1))
            if os.waitpid(inner, 0)[1] != 0: os._exit(1)
        os._exit(0)
    lost += os.waitpid(child, 0)[1] != 0
print(lost, flush=True)
";
    let name = "forks_beside_the_start_of_a_pager";
    // Before, 2 to 8 of 100 children had lost memory of theirs.
    let script = script.replace("TURNS", if is_full() { "2000" } else { "60" });
    let Some((_scratch, program)) = scripted(name, &script) else { return };
    let output = bounded(&["--keeper", "no"]).args(&program).output().unwrap();
    let (said, lost) = (String::from_utf8_lossy(&output.stderr), String::from_utf8_lossy(&output.stdout));
    assert_eq!((output.status.code(), lost.trim(), besides(&said)), (Some(0), "0", vec![]), "{said}");
}

#[test]
fn what_a_killed_program_held_is_free_with_its_run() {
    let name = "what_a_killed_program_held_is_free_with_its_run";
    let Some((_scratch, program)) = sweeper(name) else { return };
    let mut longest = Duration::ZERO;
    for flags in [&["--keeper", "yes"][..], &["--keeper", "no"]] {
        let mut sweeping = Sweeping::start(&program, flags);
        let keeper = sweeping.keeper();
        let daemon = sweeping.daemon(flags[1]);
        kill(sweeping.pid);
        // The memory of both ends with them.
        longest = longest.max(eventually("the end of all", || ![keeper, daemon].into_iter().any(is_alive)));
        let (code, said) = sweeping.ended();
        assert_eq!((code, &*said), (Some(128 + 9), ""));
        assert!(!directory_of(sweeping.run.id()).exists());
    }
    println!("figure: killed-program seconds_until_all_is_free {:.3} lower 1", longest.as_secs_f64());
}

#[test]
fn a_keeper_that_is_killed_takes_nothing_along_and_its_daemon_ends_with_the_run() {
    let name = "a_keeper_that_is_killed";
    let Some((_scratch, program)) = sweeper(name) else { return };
    let mut sweeping = Sweeping::start(&program, &[]);
    let (keeper, daemon) = (sweeping.keeper(), sweeping.daemon_after(0));
    kill(keeper);
    sweeping.goes_on();
    let directory = directory_of(sweeping.run.id());
    let ledger = directory.join("ledger");
    eventually("the end of the promise", || weir_pager::Ledger::is_abandoned(&ledger));
    // Another run removes what killed runs have left. This one lives, and its next program needs
    // the sockets.
    assert!(bounded(&[]).arg("/bin/true").status().unwrap().success());
    assert!(directory.join("share").exists(), "another run has removed it");
    drop(sweeping.run.stdin.take());
    let (code, said) = sweeping.ended();
    assert_eq!((code, &*said), (Some(0), ""));
    assert!(!is_alive(daemon) && !directory_of(sweeping.run.id()).exists());
}

fn signal(process: u32, signal: rustix::process::Signal) {
    let process = rustix::process::Pid::from_raw(process.cast_signed()).expect("a process");
    common::kill(process, signal);
}

#[test]
fn a_program_that_waits_for_the_next_daemon_says_so_and_can_be_killed_or_told_that_none_comes() {
    use rustix::process::Signal;
    let name = "a_program_that_waits";
    let Some((_scratch, program)) = sweeper(name) else { return };
    for is_given_up in [false, true] {
        let mut sweeping = Sweeping::start(&program, &[]);
        let (keeper, daemon) = (sweeping.keeper(), sweeping.daemon_after(0));
        // A keeper that is stopped starts no daemon.
        signal(keeper, Signal::STOP);
        kill(daemon);
        sweeping.says("the daemon has died; waiting for the next one");
        assert!(is_alive(sweeping.pid));
        if is_given_up {
            kill(keeper);
        } else {
            signal(sweeping.pid, Signal::TERM);
            eventually("the end of the program", || !is_alive(sweeping.pid));
            signal(keeper, Signal::CONT);
        }
        let (code, said) = sweeping.ended();
        let expected = if is_given_up { libc::SIGBUS } else { libc::SIGTERM };
        assert_eq!(code, Some(128 + expected), "{said}");
        assert_eq!(said.matches("the daemon has died; waiting for the next one").count(), 1, "{said}");
        assert_eq!(said.contains("the program gets SIGBUS"), is_given_up, "{said}");
        assert!(!directory_of(sweeping.run.id()).exists());
    }
}

/// A connection to a Redis server.
struct Redis(BufReader<UnixStream>);

impl Redis {
    const KEY_BYTES: usize = 2048;

    fn connect(path: &Path) -> Option<Self> {
        UnixStream::connect(path).ok().map(|socket| Redis(BufReader::new(socket)))
    }

    /// The value of a key after so many changes.
    fn value(key: u32, version: u32) -> Vec<u8> {
        let word = u64::from(key) << 32 | u64::from(version);
        let words = (0..Self::KEY_BYTES as u64 / 8).map(|at| (word ^ at).wrapping_mul(0x9e37_79b9_7f4a_7c15));
        words.flat_map(u64::to_ne_bytes).collect()
    }

    /// Sends commands together, and returns the answers: a value, or the words of a status.
    fn ask(&mut self, commands: &[Vec<Vec<u8>>]) -> Vec<Vec<u8>> {
        let mut sent = Vec::new();
        for command in commands {
            sent.extend(format!("*{}\r\n", command.len()).into_bytes());
            for word in command {
                sent.extend(format!("${}\r\n", word.len()).into_bytes());
                sent.extend([word, &b"\r\n"[..]].concat());
            }
        }
        self.0.get_mut().write_all(&sent).unwrap();
        let answer = |_| {
            let mut line = String::new();
            self.0.read_line(&mut line).unwrap();
            let text = line.trim_end();
            let Some(bytes) = text.strip_prefix('$') else { return text.as_bytes().to_vec() };
            let mut value = vec![0; bytes.parse::<usize>().expect("the key is there") + 2];
            self.0.read_exact(&mut value).unwrap();
            value.truncate(value.len() - 2);
            value
        };
        commands.iter().map(answer).collect()
    }

    fn set(&mut self, keys: &[(u32, u32)]) {
        let command = |&(key, version): &(u32, u32)| {
            vec![b"SET".to_vec(), format!("page:{key}").into_bytes(), Self::value(key, version)]
        };
        let answers = self.ask(&keys.iter().map(command).collect::<Vec<_>>());
        assert!(answers.iter().all(|answer| answer == b"+OK"), "{}", String::from_utf8_lossy(&answers[0]));
    }

    /// The number of these keys that have another value than this version's.
    fn wrong(&mut self, keys: &[(u32, u32)]) -> usize {
        let command = |&(key, _): &(u32, u32)| vec![b"GET".to_vec(), format!("page:{key}").into_bytes()];
        let answers = self.ask(&keys.iter().map(command).collect::<Vec<_>>());
        let values = keys.iter().map(|&(key, version)| Self::value(key, version));
        answers.into_iter().zip(values).filter(|(found, right)| found != right).count()
    }
}

#[test]
fn redis_has_every_key_as_it_was_written_after_kills_of_its_daemon() {
    let name = "redis_has_every_key";
    let Some(program) = bounded::program("redis-check-rdb").filter(|_| can_run(name)) else { return };
    let scratch = Scratch::new(name);
    // By this name the program of `redis-tools` is the server. The package `redis-server` would
    // start a service.
    let server = scratch.0.join("redis-server");
    std::os::unix::fs::symlink(program, &server).unwrap();
    let socket = scratch.0.join("socket");
    let (keys, kills) = if is_full() { (50_000, 100) } else { (25_000, 4) };
    let shell = format!(
        "echo $$; exec {} --port 0 --unixsocket {} --save '' --appendonly no --loglevel warning",
        server.display(),
        socket.display()
    );
    let mut command = Command::new(WEIR);
    command.args(["run", "--resident", "32MiB", "--store", "host:512MiB", "--", "sh", "-c", &shell]);
    let mut running = Sweeping::of(&mut command);
    eventually("the start of the server", || Redis::connect(&socket).is_some());
    let mut redis = Redis::connect(&socket).expect("it is there");
    let mut versions = vec![0; keys as usize];
    for first in (0..keys).step_by(50) {
        redis.set(&(first..first + 50).map(|key| (key, 0)).collect::<Vec<_>>());
    }
    // Other clients write other keys meanwhile.
    let other = bounded::program("redis-benchmark").map(|benchmark| {
        let mut command = Command::new(benchmark);
        command.arg("-s").arg(&socket).args([
            "-t",
            "set,get",
            "-n",
            "1000000000",
            "-r",
            "20000",
            "-d",
            "512",
        ]);
        command.args(["-c", "4", "-q"]).stdout(Stdio::null()).stderr(Stdio::null()).spawn().unwrap()
    });
    let (batches, has_ended) = (AtomicU64::new(0), AtomicBool::new(false));
    let pid = running.pid;
    let (wrong, mut daemon) = (AtomicU64::new(0), 0);
    thread::scope(|scope| {
        scope.spawn(|| {
            let _end = common::Ends(&has_ended);
            let mut chance = 1_u64;
            while !has_ended.load(Ordering::Relaxed) {
                let mut batch: Vec<(u32, u32)> = Vec::new();
                for _ in 0..24 {
                    chance = chance
                        .wrapping_mul(6_364_136_223_846_793_005)
                        .wrapping_add(1_442_695_040_888_963_407);
                    let key = (chance >> 33) as u32 % keys;
                    if batch.iter().all(|(other, _)| *other != key) {
                        batch.push((key, versions[key as usize]));
                    }
                }
                wrong.fetch_add(redis.wrong(&batch) as u64, Ordering::Relaxed);
                batch.iter_mut().for_each(|(_, version)| *version += 1);
                redis.set(&batch);
                batch.iter().for_each(|&(key, version)| versions[key as usize] = version);
                batches.fetch_add(1, Ordering::Relaxed);
            }
        });
        let _end = common::Ends(&has_ended);
        for kill_number in 0..kills {
            thread::sleep(Duration::from_millis(kill_number * 37 % 150));
            daemon = running.daemon_after(daemon);
            kill(daemon);
            // The batch after the next one began after the kill.
            let before = batches.load(Ordering::Relaxed);
            eventually("an answer after a kill", || {
                batches.load(Ordering::Relaxed) > before + 1 || has_ended.load(Ordering::Relaxed)
            });
        }
    });
    if let Some(mut other) = other {
        let _ = other.kill();
        let _ = other.wait();
    }
    for first in (0..keys).step_by(50) {
        let batch: Vec<_> = (first..first + 50).map(|key| (key, versions[key as usize])).collect();
        wrong.fetch_add(redis.wrong(&batch) as u64, Ordering::Relaxed);
    }
    signal(pid, rustix::process::Signal::TERM);
    let (code, said) = running.ended();
    assert_eq!((code, besides(&said)), (Some(0), vec![]), "{said}");
    println!("figure: redis kills {kills} higher 100");
    println!("figure: redis checked {} higher", 24 * batches.into_inner() + u64::from(keys));
    println!("figure: redis wrong_values {} lower 0", wrong.load(Ordering::Relaxed));
    assert_eq!(wrong.into_inner(), 0);
}

/// Whether the daemon of a program's run has a report of its pager.
fn is_listed(program: u32) -> bool {
    let output = Command::new(WEIR).args(["status", "--json"]).output().unwrap();
    let status: serde_json::Value = serde_json::from_slice(&output.stdout).unwrap_or_default();
    let programs = status["programs"].as_array().cloned().unwrap_or_default();
    programs.iter().any(|one| one["pid"] == program && one["limit_bytes"].as_u64() > Some(0))
}

/// A circuit of a quantum simulator, Qrack. It prints the probabilities of some basis states.
const CIRCUIT: &str = "
import math, os, random, sys
from pyqrack import QrackSimulator
qubits, chance = 23, random.Random(26)
print(os.getpid(), flush=True)
simulator = QrackSimulator(qubits, is_gpu=False)
for qubit in range(qubits): simulator.h(qubit)
for layer in range(2):
    for qubit in range(qubits): simulator.u(qubit, *(chance.uniform(0, 2 * math.pi) for _ in range(3)))
    for qubit in range(layer % 2, qubits - 1, 2): simulator.mcx([qubit], qubit + 1)
places = [chance.getrandbits(qubits) for _ in range(256)]
bits = [[bool(place >> at & 1) for at in range(qubits)] for place in places]
print(*(simulator.prob_perm(list(range(qubits)), place) * 2**qubits for place in bits), flush=True)
";

#[test]
fn a_quantum_simulator_has_the_same_state_after_kills_of_its_daemon() {
    let name = "a_quantum_simulator";
    let Some(python) = python().filter(|_| can_run(name)) else { return };
    let has_qrack = Command::new(&python).args(["-c", "import pyqrack"]).output().unwrap().status.success();
    if !has_qrack {
        println!("\nskipped: {name}: pyqrack (pip install pyqrack-cpu numpy)");
        return;
    }
    let scratch = Scratch::new(name);
    let input = scratch.file("circuit.py", CIRCUIT);
    let states =
        |text: &str| -> Vec<f64> { text.split_whitespace().map(|number| number.parse().unwrap()).collect() };
    let alone = Command::new(&python).arg(&input).output().unwrap();
    let right = states(String::from_utf8_lossy(&alone.stdout).split_once('\n').expect("two lines").1);
    let (mut kills, mut rounds, mut apart) = (0_u64, 0, 0.0_f64);
    let most = if is_full() { 100 } else { 3 };
    while kills < most {
        let mut command = Command::new(WEIR);
        command.args(["run", "--resident", "32MiB", "--store", "host:512MiB", "--", &python]).arg(&input);
        let mut running = Sweeping::of(&mut command);
        let (run, pid, has_ended) = (running.run.id(), running.pid, AtomicBool::new(false));
        let found = thread::scope(|scope| {
            let reader = scope.spawn(|| {
                let _end = common::Ends(&has_ended);
                running.line()
            });
            let mut daemon = 0;
            while !has_ended.load(Ordering::Relaxed) {
                thread::sleep(Duration::from_millis(200 + kills * 37 % 300));
                let keeper = children(run).into_iter().find(|child| *child != pid);
                let next =
                    keeper.and_then(|keeper| children(keeper).into_iter().find(|child| *child != daemon));
                if let Some(next) = next.filter(|_| kills < most && !has_ended.load(Ordering::Relaxed)) {
                    daemon = next;
                    kill(daemon);
                    kills += 1;
                    // The next daemon lists the program once its pager waits no more.
                    eventually("a daemon that has the program", || {
                        has_ended.load(Ordering::Relaxed) || is_listed(pid)
                    });
                }
            }
            reader.join().unwrap()
        });
        let (code, said) = running.ended();
        assert_eq!((code, besides(&said)), (Some(0), vec![]), "{said}");
        let found = states(&found);
        assert_eq!(found.len(), right.len());
        apart = found.iter().zip(&right).map(|(one, other)| (one - other).abs()).fold(apart, f64::max);
        rounds += 1;
    }
    println!("figure: qrack kills {kills} higher 100");
    println!("figure: qrack states_compared {} higher", rounds * right.len());
    println!("figure: qrack most_apart {apart:.6} lower 0.001");
    // Sums whose order differs are about 1e-5 apart. A wrong page makes all states differ.
    assert!(apart < 1e-3, "{apart}");
}

#[test]
fn newcomers_never_take_the_place_of_a_program_that_has_pages_and_do_not_wait_for_one() {
    // The crowd comes after the death, while the program does nothing and knows of no new daemon.
    let script = "
memory = new(96 << 20)
fill(memory, 5)
print(os.getpid(), flush=True)
sys.stdin.read(1)
crowd = [subprocess.Popen(['sleep', '1000']) for _ in range(70)]
print('started', flush=True)
sys.stdin.read(1)
assert check(memory, 5)
for one in crowd: one.kill()
for one in crowd: one.wait()
print('good', flush=True)
";
    let name = "newcomers";
    let Some(python) = python().filter(|_| can_run(name)) else { return };
    let scratch = Scratch::new(name);
    let input = scratch.file("script.py", &format!("{PRELUDE}{script}"));
    let mut command = Command::new(WEIR);
    command.args(["run", "--resident", "32MiB", "--store", "host:512MiB", "--", &python]).arg(&input);
    let mut running = Sweeping::of(&mut command);
    let daemon = running.daemon_after(0);
    kill(daemon);
    running.daemon_after(daemon);
    let go_on = |running: &mut Sweeping| running.run.stdin.as_mut().expect("piped").write_all(b".").unwrap();
    go_on(&mut running);
    assert_eq!(running.line(), "started");
    // 63 of them find a place. Each other one says that it has none.
    running.says("is not bounded: ");
    running.says("as many processes of this run are bounded as its daemon serves");
    go_on(&mut running);
    assert_eq!(running.line(), "good");
    let (code, said) = running.ended();
    assert_eq!(code, Some(0), "{said}");
}

#[test]
fn a_keeper_is_refused_for_pages_that_end_with_the_daemon() {
    if !can_run("a_keeper_is_refused") {
        return;
    }
    let run = |flags: &[&str]| {
        let run = ["run", "--resident", "32MiB", "--store", "sim:size=64MiB"];
        Command::new(WEIR).args(run).args(flags).args(["--", "/bin/true"]).output().unwrap()
    };
    let output = run(&["--keeper", "yes"]);
    let said = String::from_utf8_lossy(&output.stderr);
    assert!(output.status.code() == Some(1) && said.contains("end with the daemon; accepted: "), "{said}");
    assert!(run(&[]).status.success() && run(&["--keeper", "no"]).status.success());
    let output = run(&["--keeper", "perhaps"]);
    let said = String::from_utf8_lossy(&output.stderr);
    assert!(output.status.code() == Some(2) && said.contains("accepted: yes, no"), "{said}");
}

#[test]
fn what_a_killed_program_held_is_free_for_the_next_one() {
    let script = "
size, me = 128 << 20, int(sys.argv[1])
memory = new(size)
fill(memory, me)
assert check(memory, me)
if me < 4: os.kill(os.getpid(), signal.SIGKILL)
print('good')
";
    let name = "what_a_killed_program_held";
    let Some(python) = python().filter(|_| can_run(name)) else { return };
    let scratch = Scratch::new(name);
    let input = scratch.file("script.py", &format!("{PRELUDE}{script}"));
    let one = format!("{python} {}", input.display());
    // There is room for one of them, not for two.
    let shell = format!("for me in 1 2 3 4; do {one} $me; done 2>/dev/null");
    let limit = format!("{LIMIT_MIB}MiB");
    let output = Command::new(WEIR)
        .args(["run", "--resident", &limit, "--store", "host:192MiB", "--", "sh", "-c", &shell])
        .output()
        .unwrap();
    let said = String::from_utf8_lossy(&output.stderr);
    assert_eq!(String::from_utf8_lossy(&output.stdout), "good\n", "{said}");
    assert!(!said.contains("the store is full"), "{said}");
}

/// `WEIR_RUN_DIRECTORY` has the sockets. With `all` the script takes the ledger too, by which the
/// processes of one run share out their daemon's room.
const SCRIBBLER: &str = "
import random
memory = new(128 << 20)
fill(memory, 9)
seed, which = sys.argv[1:]
chance = random.Random(int(seed))
shared = []
for line in open('/proc/self/maps'):
    span, rights, *rest = line.split()
    if rights == 'rw-s' and (which == 'all' or not rest[-1].endswith('/ledger')):
        start, end = (int(bound, 16) for bound in span.split('-'))
        shared.append((start, end - start))
assert len(shared) >= (2 if which == 'all' else 1), shared
print(os.getpid(), flush=True)
run = os.environ['WEIR_RUN_DIRECTORY']
for name in os.listdir(run):
    for kind in socket.SOCK_STREAM, socket.SOCK_SEQPACKET, socket.SOCK_DGRAM:
        end = socket.socket(socket.AF_UNIX, kind)
        try:
            end.settimeout(1)
            end.connect(os.path.join(run, name))
            for part in range(20): end.send(chance.randbytes(1 + part * 37))
        except OSError: pass
for round in range(20):
    for start, size in shared:
        for at in range(0, min(size, 1 << 20), 4096):
            ctypes.memmove(start + at, chance.randbytes(512), 512)
os.kill(os.getpid(), signal.SIGKILL)
";

#[test]
fn a_program_that_scribbles_over_all_that_it_shares_with_its_daemon_harms_nobody_else() {
    let name = "a_program_that_scribbles";
    let Some(python) = python() else { return };
    let Some((scratch, sweeper)) = sweeper(name) else { return };
    let input = scratch.file("script.py", &format!("{PRELUDE}{SCRIBBLER}"));
    let mut other = Sweeping::start(&sweeper, &[]);
    let environment = fs::read(format!("/proc/{}/environ", other.pid)).unwrap();
    let text = String::from_utf8_lossy(&environment).into_owned();
    let variables: Vec<_> = text.split('\0').filter_map(|variable| variable.split_once('=')).collect();
    for seed in 1..=3 {
        // One of the sweeper's own run, with the same daemon; then one with a run of its own.
        let mut neighbour = Command::new(&python);
        neighbour.env_clear().envs(variables.iter().copied()).arg(&input).args([&seed.to_string(), "most"]);
        let mut stranger = Command::new(WEIR);
        stranger.args(["run", "--resident", "48MiB", "--store", "host:512MiB", "--", &python]);
        stranger.arg(&input).args([&seed.to_string(), "all"]);
        for mut hostile in [neighbour, stranger] {
            let mut hostile = Sweeping::of(&mut hostile);
            let directory = directory_of(hostile.run.id());
            // It may get SIGBUS, or wait for a daemon that has cut it off, before it kills itself.
            for _ in 0..500 {
                if hostile.run.try_wait().unwrap().is_some() {
                    break;
                }
                thread::sleep(Duration::from_millis(20));
            }
            kill(hostile.pid);
            hostile.ended();
            assert!(!directory.exists(), "{} is left", directory.display());
        }
    }
    // The sweeper ends with 1 if a page was wrong.
    drop(other.run.stdin.take());
    let (code, said) = other.ended();
    assert_eq!(code, Some(0), "{said}");
}
