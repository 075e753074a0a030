//! A daemon, and a bounded program, over an engine that speaks the Redis protocol.

mod common;

use common::bounded::{PRELUDE, Scratch, Sweeping, can_run, python};
use common::{Daemon, PATIENCE, kill};
use rustix::process::{Pid, Signal};
use std::net::{Ipv4Addr, TcpListener};
use std::os::unix::process::CommandExt as _;
use std::path::PathBuf;
use std::process::{Child, Command, Stdio};
use std::sync::atomic::{AtomicUsize, Ordering};
use std::thread;
use std::time::{Duration, Instant};

const WEIR: &str = env!("CARGO_BIN_EXE_weir");

/// An engine, ended when it is dropped.
struct Engine {
    child: Child,
    port: u16,
    directory: PathBuf,
}

impl Engine {
    /// Starts one; `None`, and a line that says so, where there is none.
    fn start(test: &str) -> Option<Self> {
        static ENGINES: AtomicUsize = AtomicUsize::new(0);
        // Below the kernel's own range.
        let port = (0..1000).map(|turn| (30_000 + (std::process::id() * 8 + turn) % 2000) as u16);
        // Tests run at the same time, each with an engine of its own.
        let mut port = port.skip(30 * ENGINES.fetch_add(1, Ordering::Relaxed));
        let port = port.find(|&port| TcpListener::bind((Ipv4Addr::LOCALHOST, port)).is_ok()).unwrap();
        let directory = std::env::temp_dir().join(format!("weir-fleet-{}-{port}", std::process::id()));
        std::fs::create_dir_all(&directory).unwrap();
        // By this name the program of `redis-tools` is the server.
        let mut command = Command::new("redis-check-rdb");
        command.arg0("redis-server").args(["--bind", "127.0.0.1", "--port", &port.to_string(), "--save", ""]);
        command.arg("--dir").arg(&directory).stdout(Stdio::null()).stderr(Stdio::null());
        let Ok(child) = command.spawn() else {
            println!("\nskipped: {test}: redis-tools is not installed");
            return None;
        };
        let mut engine = Engine { child, port, directory };
        // Another program may have taken the port meanwhile. Then this server ends.
        let own = format!("process_id:{}", engine.child.id());
        let begun = Instant::now();
        while !engine.call(&["INFO", "server"]).lines().any(|line| line.trim_end() == own) {
            assert!(engine.child.try_wait().unwrap().is_none(), "redis-server has ended: is its port taken?");
            assert!(begun.elapsed() < Duration::from_secs(60), "redis-server does not answer");
            thread::sleep(Duration::from_millis(20));
        }
        Some(engine)
    }

    fn call(&self, words: &[&str]) -> String {
        let port = self.port.to_string();
        let output = Command::new("redis-cli").args(["-p", &port]).args(words).output().unwrap();
        String::from_utf8_lossy(&output.stdout).trim().to_owned()
    }
}

impl Drop for Engine {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
        let _ = std::fs::remove_dir_all(&self.directory);
    }
}

#[test]
fn a_daemon_keeps_pages_on_an_engine_and_leaves_none_there() {
    let name = "a_daemon_keeps_pages_on_an_engine_and_leaves_none_there";
    let Some(engine) = Engine::start(name) else { return };
    let store = format!("redis://127.0.0.1:{}?size=16MiB", engine.port);
    let mut daemon = Daemon::spawn("fleet", &["--store", &store], Daemon::with_nbd);
    assert!(daemon.comes_up(Daemon::listens), "it does not come up");
    let mut client = daemon.connect();
    let pages: Vec<u8> =
        (0..1024 * 1024_u32).flat_map(|word| word.wrapping_mul(0x9e37_79b9).to_le_bytes()).collect();
    client.write(0, &pages).unwrap();
    assert_eq!(engine.call(&["DBSIZE"]), "1024");
    let read = client.read(0, pages.len() as u32).unwrap();
    assert!(read == pages, "it is not what was written");
    let status = daemon.status();
    assert!(status.to_string().contains(&format!("127.0.0.1:{}", engine.port)), "{status}");
    drop(client);
    assert_eq!(daemon.terminate(), Some(0));
    assert_eq!(engine.call(&["DBSIZE"]), "0", "keys are left behind");
}

#[test]
fn values_that_a_killed_daemon_leaves_are_sealed_and_one_command_deletes_them() {
    let name = "values_that_a_killed_daemon_leaves_are_sealed_and_one_command_deletes_them";
    let Some(engine) = Engine::start(name) else { return };
    let store = format!("redis://127.0.0.1:{}?size=16MiB", engine.port);
    let mut daemon = Daemon::spawn("fleet-killed", &["--store", &store], Daemon::with_nbd);
    assert!(daemon.comes_up(Daemon::listens), "it does not come up");
    let mut client = daemon.connect();
    let line = b"a line that anybody could read. ";
    client.write(0, &line.repeat(64 * 128)).unwrap();
    daemon.process.kill().unwrap();
    daemon.process.wait().unwrap();
    assert_eq!(engine.call(&["DBSIZE"]), "64");
    // Other keys of the engine stay.
    assert_eq!(engine.call(&["SET", "another", "a line"]), "OK");
    engine.call(&["SAVE"]);
    let file = std::fs::read(engine.directory.join("dump.rdb")).unwrap();
    assert!(file.len() > 64 * 4096 && !file.windows(16).any(|window| line.starts_with(window)));
    // The command of docs/fleet.md.
    let scan = format!("redis-cli -p {}", engine.port);
    let command = format!("{scan} --scan --pattern 'weir:*' | xargs -r -n 500 {scan} unlink");
    assert!(Command::new("sh").args(["-c", &command]).stdout(Stdio::null()).status().unwrap().success());
    assert_eq!(engine.call(&["DBSIZE"]), "1");
}

#[test]
fn swap_on_an_engine_is_refused() {
    let name = "swap_on_an_engine_is_refused";
    let Some(engine) = Engine::start(name) else { return };
    let store = format!("redis://127.0.0.1:{}?size=16MiB", engine.port);
    let flags = ["serve", "--swap", "--unsafe-no-flusher", "--store", &store, "--nbd", "unix:/nonexistent/x"];
    let output = Command::new(WEIR).args(flags).output().unwrap();
    let said = String::from_utf8_lossy(&output.stderr);
    assert!(!output.status.success() && said.contains("the network may need memory"), "{said}");
}

/// An engine, and a program of 96 MiB in 48 MiB over it. It runs `each_line` for each line that it
/// gets.
fn bounded_over_an_engine(name: &str, each_line: &str, size: &str) -> Option<(Engine, Scratch, Sweeping)> {
    let engine = Engine::start(name)?;
    let python = python().filter(|_| can_run(name))?;
    let scratch = Scratch::new(name);
    let script = format!(
        "
memory = new(96 << 20)
fill(memory, 8)
print(os.getpid(), flush=True)
for line in sys.stdin: {each_line}
"
    );
    let input = scratch.file("script.py", &format!("{PRELUDE}{script}"));
    let store = format!("redis://127.0.0.1:{}?size={size}", engine.port);
    let mut command = Command::new(WEIR);
    command.args(["run", "--resident", "48MiB", "--store", &store, "--", &python]).arg(&input);
    let running = Sweeping::of(&mut command);
    Some((engine, scratch, running))
}

#[test]
fn status_names_the_node_that_is_away_from_a_bounded_program_and_an_eviction_fails_with_it() {
    let name = "status_names_the_node";
    let each_line = "print(check(memory, 8), flush=True)";
    let Some((engine, _scratch, mut running)) = bounded_over_an_engine(name, each_line, "128MiB") else {
        return;
    };
    let pid = running.pid.to_string();
    let about = |arguments: &[&str]| {
        let output = Command::new(WEIR).args(arguments).output().unwrap();
        let said = [output.stdout, output.stderr].concat();
        (output.status.code(), String::from_utf8_lossy(&said).into_owned())
    };
    let own = |json: &str| {
        let status: serde_json::Value = serde_json::from_str(json).unwrap();
        let programs = status["programs"].as_array().expect("programs").clone();
        programs.into_iter().find(|program| program["pid"] == running.pid).expect("it is listed")
    };
    let mut quiet = own(&about(&["status", "--json"]).1);
    assert_eq!(quiet["store"], "online");
    // A write that is under way has the pager wait for the store, and give it up after a while.
    let begun = Instant::now();
    loop {
        thread::sleep(Duration::from_secs(1));
        let now = own(&about(&["status", "--json"]).1);
        let counts = |program: &serde_json::Value| {
            ["faults", "resident_bytes", "stored_bytes"].map(|count| program[count].as_u64())
        };
        if counts(&now) == counts(&quiet) {
            break;
        }
        assert!(begun.elapsed() < PATIENCE, "{now}");
        quiet = now;
    }
    // An engine that stands still answers nobody.
    let server = Pid::from_child(&engine.child);
    kill(server, Signal::STOP);
    let begun = Instant::now();
    let node = format!("127.0.0.1:{}", engine.port);
    let program = loop {
        let program = own(&about(&["status", "--json"]).1);
        if program["troubled"].is_array() {
            break program;
        }
        assert!(begun.elapsed() < PATIENCE, "{program}");
        thread::sleep(Duration::from_millis(200));
    };
    assert_eq!(program["store"], "unreachable", "{program}");
    let member = &program["troubled"][0];
    assert!(member["part"].to_string().contains(&node) && member["state"] == "unreachable", "{program}");
    assert!(member["since_unix_s"].as_u64() > Some(0) && member["why"].is_string(), "{program}");
    let (_, text) = about(&["status"]);
    let text = text.split_once(&format!("program   {pid} ")).expect("it is listed").1;
    assert!(text.contains("its store is unreachable\n"), "{text}");
    assert!(text.contains(&format!("          {node}: unreachable, ")), "{text}");
    let (code, said) = about(&["evict", &pid]);
    let reasons =
        ["its store is unreachable (", "its store has failed ("].map(|why| format!("{why}{node}: "));
    assert!(code == Some(1) && reasons.iter().any(|why| said.contains(why)), "{code:?} {said}");
    kill(server, Signal::CONT);
    std::io::Write::write_all(running.run.stdin.as_mut().expect("piped"), b"check\n").unwrap();
    let checked = running.line();
    drop(running.run.stdin.take());
    let (code, said) = running.ended();
    assert!(checked == "True" && code == Some(0), "{checked:?} {code:?} {said}");
}

#[test]
fn a_bounded_program_waits_for_a_node_that_stands_still() {
    let name = "a_bounded_program_waits";
    let each_line = "print(check(memory, 8), flush=True); fill(memory, 8)";
    let Some((engine, _scratch, mut running)) = bounded_over_an_engine(name, each_line, "160MiB") else {
        return;
    };
    let server = Pid::from_child(&engine.child);
    // The daemon gives a request up after two seconds. The program needs its pages for longer.
    kill(server, Signal::STOP);
    std::io::Write::write_all(running.run.stdin.as_mut().expect("piped"), b"check\n").unwrap();
    running.says("the store does not answer; waiting for it");
    kill(server, Signal::CONT);
    assert_eq!(running.line(), "True");
    std::io::Write::write_all(running.run.stdin.as_mut().expect("piped"), b"check\n").unwrap();
    assert_eq!(running.line(), "True");
    drop(running.run.stdin.take());
    let (code, said) = running.ended();
    assert_eq!(code, Some(0), "{said}");
    assert!(!said.contains("fails") && !said.contains("cannot be had back"), "{said}");
}
