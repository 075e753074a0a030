//! `weir run` with programs of other projects: the same results, in a third of the memory.

mod common;

use common::Ends;
use common::bounded::{Scratch, build, can_run, compiled, directory_of};
use std::fs;
use std::io::Read as _;
use std::os::unix::fs::PermissionsExt as _;
use std::path::{Path, PathBuf};
use std::process::{Command, Output, Stdio};
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread;
use std::time::{Duration, Instant};

const WEIR: &str = env!("CARGO_BIN_EXE_weir");
const LIMIT_MIB: usize = 48;

fn weir(arguments: &[&str]) -> Output {
    let limit = format!("{LIMIT_MIB}MiB");
    let stores = ["run", "--resident", &limit, "--store", "host:512MiB"];
    Command::new(WEIR).args(stores).args(arguments).stdin(Stdio::null()).output().expect("it runs")
}

/// Runs a program. Returns its output, its exit code, and the largest resident size that `/proc`
/// showed for it or a child of it, in MiB.
fn watched(arguments: &[&str], stdin: &Path, program: &str) -> (Vec<u8>, Option<i32>, usize) {
    let mut child = Command::new(arguments[0])
        .args(&arguments[1..])
        .stdin(fs::File::open(stdin).unwrap())
        .stdout(Stdio::piped())
        .spawn()
        .unwrap();
    let mut stdout = child.stdout.take().expect("piped");
    let reader = thread::spawn(move || {
        let mut all = Vec::new();
        stdout.read_to_end(&mut all).map(|_| all)
    });
    let begun = Instant::now();
    let mut most = 0;
    let status = loop {
        if let Some(status) = child.try_wait().unwrap() {
            break status;
        }
        if begun.elapsed() > Duration::from_secs(300) {
            let _ = rustix::process::kill_process(
                rustix::process::Pid::from_child(&child),
                rustix::process::Signal::TERM,
            );
            panic!("{arguments:?} does not end");
        }
        most = most.max(resident(child.id(), program));
        thread::sleep(Duration::from_millis(2));
    };
    (reader.join().unwrap().unwrap(), status.code(), most / 1024)
}

/// The peak of the process or of a child of it that runs this program, in KiB.
fn resident(process: u32, program: &str) -> usize {
    let read =
        |process: u32, file: &str| fs::read_to_string(format!("/proc/{process}/{file}")).unwrap_or_default();
    let children = read(process, &format!("task/{process}/children"));
    let below = children.split_whitespace().filter_map(|child| child.parse().ok());
    let own = if read(process, "comm").trim().starts_with(program) {
        let status = read(process, "status");
        let peak = status.lines().find_map(|line| line.strip_prefix("VmHWM:"));
        peak.and_then(|peak| peak.split_whitespace().next()?.parse().ok()).unwrap_or(0)
    } else {
        0
    };
    below.map(|child| resident(child, program)).fold(own, usize::max)
}

/// Runs a program bounded and not, and compares the results.
fn same_in_less(arguments: &[&str], stdin: &Path) {
    let program = Path::new(arguments[0]).file_name().and_then(|name| name.to_str()).expect("a name");
    let (expected, code, alone) = watched(arguments, stdin, program);
    assert_eq!(code, Some(0), "{arguments:?} alone");
    let limit = format!("{LIMIT_MIB}MiB");
    let bounded = [&[WEIR, "run", "--resident", &limit, "--store", "host:512MiB", "--"], arguments].concat();
    assert!(alone >= 3 * LIMIT_MIB, "{program} takes {alone} MiB alone: too little to show anything");
    // The program's code, its libraries and its small mappings are not managed. Nor is new memory
    // that it touches before the pager has looked for it. A busy machine delays those looks, so one
    // run of several must keep the limit.
    let most_allowed = LIMIT_MIB * 105 / 100 + 32;
    let mut least = usize::MAX;
    for _ in 0..5 {
        let (found, code, most) = watched(&bounded, stdin, program);
        assert_eq!(code, Some(0), "{arguments:?} bounded");
        assert!(found == expected, "{arguments:?}: another result");
        println!("figure: {program}: {alone} MiB alone, {most} MiB with a limit of {LIMIT_MIB}");
        least = least.min(most);
        if least <= most_allowed {
            return;
        }
    }
    panic!("{program} took {least} MiB or more in each run");
}

/// The path of a program that is in PATH.
fn program(name: &str) -> Option<String> {
    let path = std::env::var_os("PATH")?;
    let found =
        std::env::split_paths(&path).map(|directory| directory.join(name)).find(|file| file.is_file());
    if found.is_none() {
        println!("skipped: {name}: not installed");
    }
    found?.to_str().map(str::to_owned)
}

/// Lines that come backwards in groups of 64, each group in random order. In a completely random
/// order the comparisons would jump through all of memory, which is slow with blocks of 2 MiB.
fn lines(count: u64) -> String {
    let number = |line: u64| (count - line) ^ (line.wrapping_mul(0x9e37_79b9_7f4a_7c15) >> 58);
    (0..count)
        .map(|line| format!("{:020} some words that make a line longer {line}\n", number(line)))
        .collect()
}

#[test]
fn sort_sorts_the_same_in_a_third_of_its_memory() {
    let name = "sort_sorts_the_same";
    let Some(sort) = program("sort").filter(|_| can_run(name)) else { return };
    let scratch = Scratch::new(name);
    let input = scratch.file("input", &lines(1_400_000));
    same_in_less(&[&sort, "--buffer-size=400M", "--parallel=2"], &input);
}

#[test]
fn sqlite_finds_the_same_by_an_index_in_memory() {
    let name = "sqlite_finds_the_same";
    let Some(sqlite) = program("sqlite3").filter(|_| can_run(name)) else { return };
    let scratch = Scratch::new(name);
    let script = "PRAGMA cache_size=1000000; CREATE TABLE t(a INTEGER, b TEXT);
        WITH RECURSIVE n(i) AS (SELECT 1 UNION ALL SELECT i+1 FROM n WHERE i<700000)
        INSERT INTO t SELECT (i*7919)%1000003, printf('%0120d', i*31) FROM n;
        CREATE INDEX x ON t(b, a);
        SELECT count(*), sum(a), min(b), max(b) FROM t;
        SELECT sum(a) FROM t WHERE b > printf('%0120d', 3000000) AND b < printf('%0120d', 9000000);
        PRAGMA integrity_check;";
    let input = scratch.file("script", script);
    // The kernel moves pages meanwhile, as on a machine that is short of memory.
    let has_ended = AtomicBool::new(false);
    thread::scope(|scope| {
        scope.spawn(|| {
            while !has_ended.load(Ordering::Relaxed) {
                let _ = fs::write("/proc/sys/vm/compact_memory", "1");
                thread::sleep(Duration::from_millis(50));
            }
        });
        let _end = Ends(&has_ended);
        same_in_less(&[&sqlite, ":memory:"], &input);
    });
}

#[test]
fn python_counts_the_same_with_threads_a_fork_and_a_child() {
    let name = "python_counts_the_same";
    let Some(python) = python().filter(|_| can_run(name)) else { return };
    let scratch = Scratch::new(name);
    let script = "
import os, subprocess, threading, hashlib
size = 160 << 20
memory = bytearray(size)
def fill(part):
    for at in range(part * 4096, size, 16384):
        memory[at:at + 8] = (at * 2654435761 % 2**64).to_bytes(8, 'little')
threads = [threading.Thread(target=fill, args=(part,)) for part in range(4)]
[thread.start() for thread in threads]
[thread.join() for thread in threads]
def digest():
    return hashlib.sha256(memory).hexdigest()
print(digest())
reader, writer = os.pipe()
child = os.fork()
if child == 0:
    os.write(writer, digest().encode())
    os._exit(7)
print(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]), os.read(reader, 64).decode())
print(subprocess.run(['/bin/echo', 'a child'], capture_output=True).stdout)
text = [str(number) for number in range(300000)]
memory += b'more' * (4 << 20)
del memory[:1 << 20]
print(len(memory), digest(), sum(map(len, text)))
with open('/dev/null', 'wb') as null: print(null.write(memory))
";
    let input = scratch.file("script.py", script);
    // The peak is not checked: a fork makes every block resident.
    let alone = Command::new(&python).arg(&input).output().unwrap();
    let bounded = weir(&["--", &python, input.to_str().unwrap()]);
    let said = String::from_utf8_lossy(&bounded.stderr);
    assert!(alone.status.success() && bounded.status.success(), "{said}");
    assert_eq!(String::from_utf8_lossy(&bounded.stdout), String::from_utf8_lossy(&alone.stdout));
    assert_eq!(said, "");
}

/// The path of the interpreter itself: the file in PATH may be a script that looks for it.
fn python() -> Option<String> {
    let any = program("python3")?;
    let output = Command::new(any).args(["-c", "import sys; print(sys.executable)"]).output().ok()?;
    Some(String::from_utf8(output.stdout).ok()?.trim().to_owned()).filter(|path| !path.is_empty())
}

#[test]
fn python_sweeps_the_same_in_a_third_of_its_memory() {
    let name = "python_sweeps_the_same";
    let Some(python) = python().filter(|_| can_run(name)) else { return };
    let scratch = Scratch::new(name);
    let script = "
memory = bytearray(160 << 20)
for round in range(3):
    for at in range(0, len(memory), 4096):
        memory[at] = (memory[at] * 31 + at // 4096 + round) % 256
print(sum(memory[::4096]))
";
    let input = scratch.file("script.py", script);
    same_in_less(&[&python, input.to_str().unwrap()], Path::new("/dev/null"));
}

#[test]
fn memory_that_moves_while_it_is_looked_for_is_kept() {
    let name = "memory_that_moves_while_it_is_looked_for";
    let Some(python) = python().filter(|_| can_run(name)) else { return };
    let scratch = Scratch::new(name);
    let script = "
import ctypes
libc = ctypes.CDLL(None, use_errno=True)
libc.mmap.restype = libc.mremap.restype = ctypes.c_void_p
libc.mmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int, ctypes.c_int, ctypes.c_int, ctypes.c_long]
libc.mremap.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_size_t, ctypes.c_int, ctypes.c_void_p]
MIB = 1 << 20
def room():
    return libc.mmap(None, 96 * MIB, 0, 0x4022, -1, 0)
places = [room() + 5 * 4096, room() + 300 * 4096]
size = 64 * MIB
at = libc.mmap(None, size, 3, 0x22, -1, 0)
def word(page):
    return ctypes.c_uint64.from_address(at + page * 4096)
for page in range(size // 4096):
    word(page).value = page + 1
wrong = 0
for move in range(60):
    # A mapping whose size changes is looked for.
    to = libc.mremap(at, size, size + 4096, 3, places[move % 2])
    assert to == places[move % 2], ctypes.get_errno()
    at, size = to, size + 4096
    for page in range(move * 37 % 1009, 64 * MIB // 4096, 1009):
        wrong += word(page).value != page + 1
wrong += sum(word(page).value != page + 1 for page in range(64 * MIB // 4096))
print(wrong)
";
    let input = scratch.file("script.py", script);
    let output = weir(&["--", &python, input.to_str().unwrap()]);
    let said = String::from_utf8_lossy(&output.stderr);
    assert_eq!((output.status.code(), &*said), (Some(0), ""));
    assert_eq!(String::from_utf8_lossy(&output.stdout).trim(), "0", "words that are not what was written");
}

#[test]
fn it_ends_as_the_program_does_and_leaves_nothing() {
    if !can_run("it_ends_as_the_program_does") {
        return;
    }
    assert_eq!(weir(&["--", "sh", "-c", "exit 3"]).status.code(), Some(3));
    assert_eq!(weir(&["--", "sh", "-c", "kill -KILL $$"]).status.code(), Some(128 + 9));
    let mut own = Command::new(WEIR);
    own.args(["run", "--resident", "64MiB", "--", "sh", "-c", "echo $PPID"]);
    let output = own.output().unwrap();
    let directory = directory_of(String::from_utf8_lossy(&output.stdout).trim());
    assert!(output.status.success() && !directory.exists());
}

#[test]
fn what_cannot_be_bounded_is_refused_in_one_line() {
    if !can_run("what_cannot_be_bounded") {
        return;
    }
    let scratch = Scratch::new("refused");
    let refused = |program: &Path, why: &str| {
        let output = weir(&["--", program.to_str().unwrap()]);
        let said = String::from_utf8_lossy(&output.stderr);
        assert_eq!(output.status.code(), Some(1), "{said}");
        assert!(said.contains(why) && said.lines().count() == 1, "{said}");
    };
    let text = scratch.file("text", "no program\n");
    fs::set_permissions(&text, fs::Permissions::from_mode(0o755)).unwrap();
    refused(&text, "no program of this machine");
    refused(&scratch.0.join("nothing"), "cannot read");
    refused(Path::new("no-such-program-anywhere"), "no program in PATH");
    let setuid = scratch.0.join("setuid");
    fs::copy("/bin/true", &setuid).unwrap();
    if std::os::unix::fs::chown(&setuid, Some(65534), None).is_ok() {
        fs::set_permissions(&setuid, fs::Permissions::from_mode(0o4755)).unwrap();
        refused(&setuid, "setuid");
    }
    let source = scratch.file("static.c", "int main(void) { return 0; }\n");
    let program = scratch.0.join("static");
    let mut compiler = Command::new("cc");
    compiler.arg("-static").arg(&source).arg("-o").arg(&program);
    match compiler.output() {
        Ok(output) if output.status.success() => refused(&program, "linked statically"),
        _ => println!("skipped: a static program: no compiler or no static libc"),
    }
}

#[test]
fn a_daemon_that_dies_costs_sigbus_and_never_wrong_bytes() {
    let name = "a_daemon_that_dies";
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
    let output = weir(&["--", &python, input.to_str().unwrap()]);
    assert_eq!(output.status.code(), Some(128 + libc::SIGBUS), "{}", String::from_utf8_lossy(&output.stderr));
}

/// Runs a Python script bounded; returns its output. `wrap` is a command that comes before it.
fn bounded(name: &str, wrap: &[&str], script: &str) -> Option<(Option<i32>, String, String)> {
    let python = python().filter(|_| can_run(name))?;
    let scratch = Scratch::new(name);
    let input = scratch.file("script.py", script);
    let output = weir(&[&["--"], wrap, &[&python, input.to_str().unwrap()]].concat());
    let text = |bytes: &[u8]| String::from_utf8_lossy(bytes).into_owned();
    Some((output.status.code(), text(&output.stdout), text(&output.stderr)))
}

/// Functions of libc, and memory that is filled with numbers and checked.
const PRELUDE: &str = "
import ctypes, mmap, os, signal, socket, subprocess, sys, time
libc = ctypes.CDLL(None, use_errno=True)
def new(size): return mmap.mmap(-1, size, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
def fill(memory, seed):
    for at in range(0, len(memory), 4096): memory[at:at + 8] = (at ^ seed).to_bytes(8, 'little')
def check(memory, seed):
    return all(memory[at:at + 8] == (at ^ seed).to_bytes(8, 'little') for at in range(0, len(memory), 4096))
";

#[test]
fn a_child_has_what_a_mapping_grew_by() {
    let script = "
libc.mremap.restype = libc.mmap.restype = ctypes.c_void_p
at = libc.mmap(None, 64 << 20, 3, 0x22, -1, 0)
memory = (ctypes.c_char * (64 << 20)).from_address(at)
memory[0] = b'a'
time.sleep(0.1)
size = (64 << 20) + (1 << 20)
at = libc.mremap(ctypes.c_void_p(at), 64 << 20, size, 1)
memory = (ctypes.c_char * size).from_address(at)
memory[size - 1] = b'z'
child = os.fork()
if child == 0: os._exit(memory[size - 1][0])
print(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == ord('z'), memory[0])
";
    let Some(found) = bounded("a_child_has_what", &[], &format!("{PRELUDE}{script}")) else { return };
    assert_eq!(found, (Some(0), "True b'a'\n".into(), String::new()));
}

#[test]
fn a_program_that_locks_all_its_memory_goes_on_and_so_do_its_children() {
    let script = "
memory = new(96 << 20)
fill(memory, 1)
assert libc.mlockall(1) == 0, ctypes.get_errno()
more = new(96 << 20)
fill(more, 2)
child = os.fork()
if child == 0: os._exit(check(memory, 1) and check(more, 2))
print(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))
for round in range(2): print(check(memory, 1), check(more, 2))
libc.munlockall()
print(check(memory, 1), check(more, 2))
";
    let Some((code, out, said)) = bounded("a_program_that_locks", &[], &format!("{PRELUDE}{script}")) else {
        return;
    };
    assert_eq!((code, out.as_str()), (Some(0), "1\nTrue True\nTrue True\nTrue True\n"), "{said}");
}

#[test]
fn pages_that_were_behind_a_guard_are_zeros() {
    let script = "
size = 128 << 20
memory = new(size)
fill(memory, 6)
at = ctypes.addressof(ctypes.c_char.from_buffer(memory))
libc.madvise.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int]
old = 0
for start in range(0, size, 8 << 20):
    for advice in 102, 103:
        if libc.madvise(at + start, 16 * 4096, advice) != 0:
            print('no guards')
            sys.exit()
    old += any(memory[start:start + 16 * 4096])
    behind = start + 16 * 4096
    old += memory[behind:behind + 8] != (behind ^ 6).to_bytes(8, 'little')
print(old, 'wrong')
";
    let name = "pages_that_were_behind_a_guard";
    let Some((code, out, said)) = bounded(name, &[], &format!("{PRELUDE}{script}")) else { return };
    if out == "no guards\n" {
        println!("skipped: {name}: a kernel without guard regions (before Linux 6.13)");
        return;
    }
    assert_eq!((code, &*out, &*said), (Some(0), "0 wrong\n", ""));
}

#[test]
fn what_the_kernel_reads_later_is_what_the_program_had_there() {
    let script = "
class Part(ctypes.Structure): _fields_ = [('at', ctypes.c_void_p), ('bytes', ctypes.c_size_t)]
size = 128 << 20
memory = new(size)
fill(memory, 3)
at = ctypes.addressof(ctypes.c_char.from_buffer(memory))
reader, writer = os.pipe()
for page in range(16):
    part = Part(at + page * (size // 16), 8)
    assert libc.vmsplice(writer, ctypes.byref(part), 1, 0) == 8, ctypes.get_errno()
# Other content in their frames.
other = new(size)
for round in range(3): fill(other, 1 << 60)
expected = [(page * (size // 16) ^ 3).to_bytes(8, 'little') for page in range(16)]
print([os.read(reader, 8) for page in range(16)] == expected, check(memory, 3))
";
    let Some(found) = bounded("what_the_kernel_reads", &[], &format!("{PRELUDE}{script}")) else { return };
    assert_eq!(found, (Some(0), "True True\n".into(), String::new()));
}

#[test]
fn pages_of_what_goes_on_in_the_background_stay_until_it_ends() {
    let script = "
memory = new(128 << 20)
fill(memory, 4)
time.sleep(1.5)
print(check(memory, 4))
";
    let name = "pages_of_what_goes_on";
    let Some(python) = python().filter(|_| can_run(name)) else { return };
    let scratch = Scratch::new(name);
    let input = scratch.file("script.py", &format!("{PRELUDE}{script}"));
    let shell = format!("{} {} & exit 5", python, input.display());
    let output = weir(&["--", "sh", "-c", &shell]);
    let said = String::from_utf8_lossy(&output.stderr);
    assert_eq!(output.status.code(), Some(5), "{said}");
    assert_eq!(String::from_utf8_lossy(&output.stdout), "True\n", "{said}");
    let words = "weir: the program has ended; 1 of its processes go on, and this ends with the last";
    assert_eq!(said.lines().filter(|line| *line == words).count(), 1, "{said}");
}

#[test]
fn programs_in_process_namespaces_of_their_own_do_not_take_each_others_pages() {
    // Both processes have number 1 in their namespaces.
    let script = "
seed = int(sys.argv[1]) if len(sys.argv) > 1 else 5
memory = new(96 << 20)
fill(memory, seed)
for round in range(4): assert check(memory, seed)
print(os.getpid(), 'good')
";
    let name = "programs_in_process_namespaces";
    let (Some(python), Some(unshare)) = (python().filter(|_| can_run(name)), program("unshare")) else {
        return;
    };
    let scratch = Scratch::new(name);
    let input = scratch.file("script.py", &format!("{PRELUDE}{script}"));
    let one = |seed: u32| {
        format!("{unshare} --pid --fork --kill-child --mount-proc {python} {} {seed}", input.display())
    };
    let shell = format!("{} & {}; wait", one(6), one(7));
    let output = weir(&["--", "sh", "-c", &shell]);
    let said = String::from_utf8_lossy(&output.stderr);
    if said.contains("unshare failed") || said.contains("Operation not permitted") {
        println!("skipped: {name}: {}", said.trim());
        return;
    }
    assert_eq!(String::from_utf8_lossy(&output.stdout), "1 good\n1 good\n", "{said}");
}

/// A program that is bounded, fills its memory, and then does a round of checks for each line that
/// it is sent.
struct Served {
    run: std::process::Child,
    lines: std::io::BufReader<std::process::ChildStdout>,
    pid: u32,
    scratch: Scratch,
}

impl Served {
    const BYTES: u64 = 160 << 20;

    fn start(name: &str) -> Option<Self> {
        let python = python().filter(|_| can_run(name))?;
        let scratch = Scratch::new(name);
        let script = "
memory = new(160 << 20)
fill(memory, 8)
print(os.getpid(), flush=True)
for line in sys.stdin:
    print(libc.mlockall(1) == 0 if line.strip() == 'lock' else check(memory, 8), flush=True)
";
        let input = scratch.file("script.py", &format!("{PRELUDE}{script}"));
        let limit = format!("{LIMIT_MIB}MiB");
        let metrics = format!("unix:{}", scratch.0.join("metrics").display());
        let mut command = Command::new(WEIR);
        command.args(["run", "--resident", &limit, "--store", "host:512MiB", "--metrics", &metrics]);
        // A program that becomes another one is bounded anew, under the same number.
        command.args(["--", "sh", "-c", &format!("exec {python} {}", input.display())]);
        let mut run = command.stdin(Stdio::piped()).stdout(Stdio::piped()).spawn().unwrap();
        let mut lines = std::io::BufReader::new(run.stdout.take().expect("piped"));
        let pid = line(&mut lines).parse().unwrap();
        Some(Served { run, lines, pid, scratch })
    }

    /// Has it check its memory.
    fn check(&mut self) {
        self.does("check");
    }

    fn does(&mut self, what: &str) {
        let stdin = self.run.stdin.as_mut().expect("piped");
        std::io::Write::write_all(stdin, format!("{what}\n").as_bytes()).unwrap();
        assert_eq!(line(&mut self.lines), "True");
    }

    /// The line of `weir status` about it.
    fn status(&self) -> serde_json::Value {
        let output = Command::new(WEIR).args(["status", "--json"]).output().unwrap();
        let status: serde_json::Value = serde_json::from_slice(&output.stdout).unwrap();
        let programs = status["programs"].as_array().expect("programs").clone();
        let mut own = programs.into_iter().filter(|program| program["pid"] == self.pid);
        let found = own.next().expect("it is listed");
        assert_eq!(own.next(), None, "it is listed once");
        found
    }

    /// The first line of `weir status` for which `is_so`. The line is of the last report.
    fn status_once(&self, what: &str, is_so: impl Fn(&serde_json::Value) -> bool) -> serde_json::Value {
        let begun = Instant::now();
        loop {
            let status = self.status();
            if is_so(&status) {
                return status;
            }
            assert!(begun.elapsed() < Duration::from_secs(60), "{what}: {status}");
            thread::sleep(Duration::from_millis(20));
        }
    }

    fn signal(&self, signal: rustix::process::Signal) {
        let process = rustix::process::Pid::from_raw(self.pid.cast_signed()).expect("a process");
        rustix::process::kill_process(process, signal).unwrap();
    }

    fn ends(mut self) {
        drop(self.run.stdin.take());
        assert!(self.run.wait().unwrap().success());
    }
}

fn line(lines: &mut impl std::io::BufRead) -> String {
    let mut text = String::new();
    lines.read_line(&mut text).unwrap();
    text.trim().to_owned()
}

/// Runs a command about a process; returns its exit code and what it has said.
fn about(arguments: &[&str]) -> (Option<i32>, String) {
    let output = Command::new(WEIR).args(arguments).output().unwrap();
    let said = [output.stdout, output.stderr].concat();
    (output.status.code(), String::from_utf8_lossy(&said).into_owned())
}

/// Runs such a command until it succeeds. On a busy machine pages may take longer to move than a
/// command waits. Returns what the last one said.
fn done(arguments: &[&str]) -> String {
    let begun = Instant::now();
    loop {
        let (code, said) = about(arguments);
        if code == Some(0) {
            return said;
        }
        let is_slow = said.contains("is not done after 10 s") || said.contains("are resident after 10 s");
        assert!(is_slow && begun.elapsed() < Duration::from_secs(120), "{said}");
    }
}

#[test]
fn a_bounded_program_is_listed_and_its_limit_and_memory_change_while_it_runs() {
    let Some(mut program) = Served::start("a_bounded_program_is_listed") else { return };
    let pid = program.pid.to_string();
    let bytes = |program: &Served, key: &str| program.status()[key].as_u64().expect("bytes");
    // A busy machine may have filled the memory before the pager has looked for it.
    program.check();
    let status = program.status_once("it has faults", |status| {
        status["faults"].as_u64() > Some(0) && status["fault_s"].as_f64() > Some(0.0)
    });
    assert_eq!(status["limit_bytes"].as_u64(), Some((LIMIT_MIB as u64) << 20), "{status}");
    let (_, text) = about(&["status"]);
    assert!(text.contains(&format!("program   {pid} ")) && text.contains("of 48MiB resident"), "{text}");

    done(&["limit", &pid, "128MiB"]);
    program.check();
    program.check();
    program.status_once("it uses its new limit", |status| {
        (100 << 20..=128 << 20).contains(&status["resident_bytes"].as_u64().expect("bytes"))
    });
    let said = done(&["limit", &pid, "32MiB"]);
    assert!(said.contains("of 32MiB resident"), "{said}");
    assert!(bytes(&program, "resident_bytes") <= 32 << 20);
    program.check();

    let said = done(&["evict", &pid]);
    assert!(said.contains("are now"), "{said}");
    let left = bytes(&program, "resident_bytes");
    assert!(left <= 4 << 20, "{left} are resident");
    program.check();

    let mut socket = std::os::unix::net::UnixStream::connect(program.scratch.0.join("metrics")).unwrap();
    std::io::Write::write_all(&mut socket, b"GET /metrics HTTP/1.1\r\n\r\n").unwrap();
    let mut scrape = String::new();
    socket.read_to_string(&mut scrape).unwrap();
    let sample = format!("weir_program_limit_bytes{{pid=\"{pid}\",name=\"python");
    assert!(scrape.contains(&sample), "{scrape}");
    program.ends();
    let (code, said) = about(&["evict", &pid]);
    assert!(code == Some(1) && said.contains(&format!("process {pid}")), "{said}");
}

#[test]
fn orders_to_a_program_that_is_stopped_hold_nobody_up_and_are_heeded_when_it_goes_on() {
    let Some(mut program) = Served::start("orders_to_a_program") else { return };
    let pid = program.pid.to_string();
    program.signal(rustix::process::Signal::STOP);
    let begun = Instant::now();
    let (code, said) = about(&["limit", &pid, "64MiB"]);
    let stopped = format!("process {pid} is not done after 10 s, silent for");
    assert!(
        code == Some(1) && said.contains(&stopped) && said.contains(&format!("kill -CONT {pid}")),
        "{said}"
    );
    // Each of these would come to the pager if the daemon asked it again and again.
    for _ in 0..400 {
        let _ = program.status();
        if begun.elapsed() > Duration::from_secs(20) {
            break;
        }
    }
    assert!(program.status()["silent_s"].as_f64() > Some(5.0), "{}", program.status());
    let (code, said) = about(&["evict", &pid]);
    assert!(code == Some(1) && said.contains("is stopped"), "{said}");
    program.signal(rustix::process::Signal::CONT);
    let begun = Instant::now();
    while program.status()["evictions"] != 1 {
        assert!(begun.elapsed() < Duration::from_secs(60), "{}", program.status());
        thread::sleep(Duration::from_millis(20));
    }
    assert_eq!(program.status()["limit_bytes"], 64 << 20);
    program.check();
    // The interpreter's own memory goes out too, in blocks of 2 MiB.
    let stored = program.status()["stored_bytes"].as_u64();
    assert!(stored <= Some(Served::BYTES + (32 << 20)), "{stored:?}");
    // Locked memory stays, and the answer says so.
    program.does("lock");
    let (code, said) = about(&["limit", &pid, "32MiB"]);
    assert!(code == Some(1) && said.contains("are resident after 10 s: what is locked"), "{said}");
    // One that dies while somebody waits for it.
    program.signal(rustix::process::Signal::STOP);
    let waits = Command::new(WEIR).args(["evict", &pid]).stderr(Stdio::piped()).spawn().unwrap();
    thread::sleep(Duration::from_millis(500));
    program.signal(rustix::process::Signal::KILL);
    let said = waits.wait_with_output().unwrap();
    assert_eq!(said.status.code(), Some(1));
    assert_eq!(program.run.wait().unwrap().code(), Some(128 + 9));
    let said = String::from_utf8_lossy(&said.stderr);
    assert!(said.contains("has ended, or runs another program"), "{said}");
}

#[test]
fn an_order_for_what_is_not_bounded_names_the_process_and_the_next_step() {
    build();
    for (arguments, code, said) in [
        (&["limit", "1", "64MiB"][..], 1, "process 1 ("),
        (&["limit", "1", "64MiB"][..], 1, "is not bounded, or is another user's"),
        (&["evict", "4294967295"][..], 1, "there is no process 4294967295"),
        (&["limit", "1", "1MiB"][..], 2, "accepted: 32MiB or more"),
    ] {
        let (found, text) = about(arguments);
        assert!(found == Some(code) && text.contains(said) && text.lines().count() == 1, "{text}");
    }
}

/// A program whose four threads go through its memory, two in order and two at random, write, and
/// compare with what they wrote before. It ends with 1 at the first difference.
const SWEEPER: &str = r#"
#include <pthread.h>
#include <stdio.h>
#include <sys/mman.h>
#include <unistd.h>
enum { PAGES = 40960, THREADS = 4, WORDS = 512 };
static unsigned long *memory;
static unsigned long written[PAGES]; /* static arrays are not managed */
static unsigned long word(unsigned long page, unsigned long round) { return page * 0x9e3779b97f4a7c15 ^ round; }
static void put(unsigned long page) {
    written[page]++;
    memory[page * WORDS] = memory[page * WORDS + WORDS - 1] = word(page, written[page]);
}
static void *sweep(void *number) {
    unsigned long me = (unsigned long)number, chance = me + 1;
    for (unsigned long at = 0;; at++) {
        chance = chance * 6364136223846793005 + 1442695040888963407;
        unsigned long page = (me < 2 ? at : chance >> 33) % (PAGES / THREADS) + me * (PAGES / THREADS);
        unsigned long right = word(page, written[page]);
        if (memory[page * WORDS] != right || memory[page * WORDS + WORDS - 1] != right) {
            dprintf(2, "page %lu is not what was written\n", page);
            _exit(1);
        }
        put(page);
    }
}
int main(void) {
    memory = mmap(0, PAGES * 4096ul, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    if (memory == MAP_FAILED) return 2;
    for (unsigned long page = 0; page < PAGES; page++) put(page);
    pthread_t thread;
    for (unsigned long me = 0; me < THREADS; me++)
        if (pthread_create(&thread, 0, sweep, (void *)me)) return 2;
    dprintf(1, "%d\n", getpid());
    char byte;
    while (read(0, &byte, 1) > 0) {}
    _exit(0);
}
"#;

/// Compiles [`SWEEPER`].
fn sweeper(name: &str, scratch: &Scratch) -> Option<PathBuf> {
    let source = scratch.file("sweeper.c", SWEEPER);
    compiled(name, &source, scratch)
}

/// A program under `weir run`. It is killed when this is dropped.
struct Sweeping {
    run: std::process::Child,
    pid: u32,
}

impl Sweeping {
    fn start(program: &Path) -> Self {
        let limit = format!("{LIMIT_MIB}MiB");
        let mut command = Command::new(WEIR);
        command.args(["run", "--resident", &limit, "--store", "host:512MiB", "--"]).arg(program);
        Self::of(&mut command)
    }

    /// Starts a program that prints its process number.
    fn of(command: &mut Command) -> Self {
        let piped = command.stdin(Stdio::piped()).stdout(Stdio::piped()).stderr(Stdio::piped());
        let mut run = piped.spawn().unwrap();
        let mut lines = std::io::BufReader::new(run.stdout.take().expect("piped"));
        let pid = line(&mut lines).parse().unwrap();
        Sweeping { run, pid }
    }

    fn daemon(&self) -> u32 {
        let run = self.run.id();
        let tasks = fs::read_dir(format!("/proc/{run}/task")).unwrap().flatten();
        let children: String =
            tasks.filter_map(|task| fs::read_to_string(task.path().join("children")).ok()).collect();
        let numbers = children.split_whitespace().map(|number| number.parse().unwrap());
        let others: Vec<u32> = numbers.filter(|number| *number != self.pid).collect();
        assert_eq!(others.len(), 1, "the run has its program and its daemon");
        others[0]
    }

    /// Waits for the end of the run; returns its exit code and its lines.
    fn ended(&mut self) -> (Option<i32>, String) {
        let begun = Instant::now();
        let status = loop {
            if let Some(status) = self.run.try_wait().unwrap() {
                break status;
            }
            assert!(begun.elapsed() < Duration::from_secs(120), "the program neither ends nor goes on");
            thread::sleep(Duration::from_millis(5));
        };
        let mut said = String::new();
        self.run.stderr.take().expect("piped").read_to_string(&mut said).unwrap();
        (status.code(), said)
    }
}

impl Drop for Sweeping {
    fn drop(&mut self) {
        if let Ok(None) = self.run.try_wait() {
            kill(self.pid);
            let _ = self.run.wait();
        }
    }
}

fn kill(process: u32) {
    let process = rustix::process::Pid::from_raw(process.cast_signed()).expect("a process");
    common::kill(process, rustix::process::Signal::KILL);
}

/// `WEIR_SCALE=full` kills 102 daemons; `WEIR_RECORD=FILE` writes the result.
#[test]
fn a_daemon_killed_at_any_moment_costs_sigbus_and_never_wrong_bytes() {
    let name = "a_daemon_killed_at_any_moment";
    if !can_run(name) {
        return;
    }
    let scratch = Scratch::new(name);
    let Some(program) = sweeper(name, &scratch) else { return };
    let full = std::env::var_os("WEIR_SCALE").is_some_and(|scale| scale == "full");
    let rounds = if full { 34 } else { 2 };
    for round in 0..rounds {
        // Faults and writes are under way all the time, since the threads never stop.
        for order in [&[][..], &["evict"], &["limit", "32MiB"]] {
            let mut sweeping = Sweeping::start(&program);
            let (pid, daemon) = (sweeping.pid.to_string(), sweeping.daemon());
            thread::sleep(Duration::from_millis(round * 7 % 50));
            let command = order.split_first().map(|(&order, rest)| {
                let command = [&[order, &pid], rest].concat();
                Command::new(WEIR).args(command).stdout(Stdio::null()).stderr(Stdio::null()).spawn().unwrap()
            });
            thread::sleep(Duration::from_millis(round * 13 % 40));
            kill(daemon);
            let (code, said) = sweeping.ended();
            assert_eq!(code, Some(128 + libc::SIGBUS), "{order:?}, round {round}: {said}");
            assert!(said.contains("the program gets SIGBUS"), "{order:?}, round {round}: {said}");
            // Nobody answers the command any more; it says so and ends.
            command.map(|mut command| command.wait().unwrap());
            let directory = directory_of(sweeping.run.id());
            assert!(!directory.exists(), "{} is left", directory.display());
        }
    }
    println!("figure: {} daemons killed, 0 pages wrong", 3 * rounds);
    if let Some(path) = std::env::var_os("WEIR_RECORD") {
        let record = serde_json::json!({
            "schema": 1,
            "command": "WEIR_SCALE=full WEIR_RECORD=FILE cargo test -p weir --test run a_daemon_killed",
            "keeper": false, "kills": 3 * rounds, "during": ["sweeps", "weir evict", "weir limit"],
            "wrong_pages": 0, "ended_by_sigbus": 3 * rounds, "directories_left": 0,
        });
        fs::write(path, format!("{record:#}\n")).unwrap();
    }
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
    let Some(python) = python().filter(|_| can_run(name)) else { return };
    let scratch = Scratch::new(name);
    let Some(sweeper) = sweeper(name, &scratch) else { return };
    let input = scratch.file("script.py", &format!("{PRELUDE}{SCRIBBLER}"));
    let mut other = Sweeping::start(&sweeper);
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
