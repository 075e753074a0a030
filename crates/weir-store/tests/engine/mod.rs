//! Engines of the Redis protocol that the tests start, and pages on them.

#![allow(dead_code, reason = "each test file uses its part of it")]

pub mod fake;

use rustix::process::{Pid, Signal, kill_process};
use std::io::ErrorKind;
use std::net::{Ipv4Addr, TcpListener};
use std::os::unix::process::CommandExt as _;
use std::path::PathBuf;
use std::process::{Child, Command, Stdio};
use std::sync::atomic::{AtomicBool, AtomicU32, Ordering};
use std::time::{Duration, Instant};
use weir_core::{PAGE_SIZE, PageBytes, Slot};
use weir_store::{Fault, Lane, Progress, RemoteStore, StoreUrl};

pub const PATIENCE: Duration = Duration::from_secs(60);
/// Of an engine that wants one.
pub const PASSWORD: &str = "0123";

/// An engine, killed when it is dropped.
pub struct Engine {
    child: Child,
    pub port: u16,
    pub directory: PathBuf,
    login: &'static str,
    /// The port on which engines of a cluster speak to each other.
    pub bus: String,
}

impl Engine {
    /// Starts one; `None` where there is no `redis-check-rdb`.
    pub fn start(flags: &[&str]) -> Option<Self> {
        let port = free_port();
        let directory = std::env::temp_dir().join(format!("weir-redis-{}-{port}", std::process::id()));
        std::fs::create_dir_all(&directory).unwrap();
        let login = if flags.contains(&"--requirepass") { ":0123@" } else { "" };
        let engine =
            Engine { child: spawn(port, &directory, flags)?, port, directory, login, bus: String::new() };
        engine.wait();
        Some(engine)
    }

    pub fn wait(&self) {
        let begun = Instant::now();
        while self.call(&["PING"]).is_none() {
            assert!(begun.elapsed() < PATIENCE, "redis-server does not answer");
            std::thread::sleep(Duration::from_millis(20));
        }
    }

    pub fn restart(&mut self) {
        self.restart_with(&[]);
    }

    pub fn restart_with(&mut self, flags: &[&str]) {
        self.child = spawn(self.port, &self.directory, flags).unwrap();
        self.wait();
    }

    pub fn name(&self) -> String {
        format!("127.0.0.1:{}", self.port)
    }

    pub fn signal(&self, signal: Signal) {
        kill_process(Pid::from_child(&self.child), signal).unwrap();
    }

    pub fn kill(&mut self) {
        self.child.kill().unwrap();
        self.child.wait().unwrap();
    }

    pub fn call(&self, words: &[&str]) -> Option<redis::Value> {
        self.try_call(words).ok()
    }

    /// Calls an engine that wants a password since it was started.
    pub fn call_with(&self, password: &str, words: &[&str]) -> Option<redis::Value> {
        self.try_call_as(&format!(":{password}@"), words).ok()
    }

    fn try_call(&self, words: &[&str]) -> redis::RedisResult<redis::Value> {
        self.try_call_as(self.login, words)
    }

    fn try_call_as(&self, login: &str, words: &[&str]) -> redis::RedisResult<redis::Value> {
        let mut command = redis::cmd(words[0]);
        words[1..].iter().for_each(|word| {
            command.arg(*word);
        });
        let client = redis::Client::open(format!("redis://{login}{}/", self.name())).unwrap();
        let mut connection = client.get_connection_with_timeout(Duration::from_secs(5))?;
        command.query(&mut connection)
    }

    pub fn bytes(&self, key: &str) -> Vec<u8> {
        match self.call(&["GET", key]) {
            Some(redis::Value::BulkString(bytes)) => bytes,
            other => panic!("{key}: {other:?}"),
        }
    }

    pub fn text(&self, words: &[&str]) -> String {
        match self.try_call(words) {
            Ok(redis::Value::BulkString(bytes)) => String::from_utf8(bytes).unwrap(),
            Ok(redis::Value::SimpleString(text)) => text,
            Ok(redis::Value::Okay) => "OK".to_owned(),
            other => panic!("{words:?}: {other:?}"),
        }
    }

    pub fn put(&self, key: &str, bytes: &[u8]) {
        let client = redis::Client::open(format!("redis://{}{}/", self.login, self.name())).unwrap();
        let mut connection = client.get_connection().unwrap();
        let _: () = redis::cmd("SET").arg(key).arg(bytes).query(&mut connection).unwrap();
    }

    pub fn keys(&self) -> i64 {
        match self.call(&["DBSIZE"]) {
            Some(redis::Value::Int(keys)) => keys,
            other => panic!("{other:?}"),
        }
    }
}

fn spawn(port: u16, directory: &PathBuf, flags: &[&str]) -> Option<Child> {
    // By this name the program of `redis-tools` is the server. The package `redis-server` would
    // start a server of its own.
    let mut command = Command::new("redis-check-rdb");
    command.arg0("redis-server").args([
        "--bind",
        "127.0.0.1",
        "--port",
        &port.to_string(),
        "--save",
        "",
        "--appendonly",
        "no",
    ]);
    command.arg("--dir").arg(directory).args(flags).stdout(Stdio::null()).stderr(Stdio::null());
    match command.spawn() {
        Ok(child) => Some(child),
        Err(error) if error.kind() == ErrorKind::NotFound => None,
        Err(error) => panic!("redis-server: {error}"),
    }
}

impl Drop for Engine {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
        let _ = std::fs::remove_dir_all(&self.directory);
    }
}

/// Stops a thread of a test that fails, which would run for ever.
pub struct Stop<'a>(pub &'a AtomicBool);

impl Drop for Stop<'_> {
    fn drop(&mut self) {
        self.0.store(true, Ordering::Relaxed);
    }
}

/// A port that no other engine of this process had. Ports are below the kernel's own range, and
/// never given out twice: else another engine could take the port of one that is killed.
fn free_port() -> u16 {
    static NUMBER: AtomicU32 = AtomicU32::new(0);
    let number = NUMBER.fetch_add(1, Ordering::Relaxed);
    let port = (0..100).map(|turn| 10_000 + (std::process::id() * 64 + number + turn * 640) % 20_000);
    let mut port = port.map(|port| port as u16);
    port.find(|&port| TcpListener::bind((Ipv4Addr::LOCALHOST, port)).is_ok()).unwrap()
}

/// A cluster of `count` engines, of which the first `owners` share the hash slots; `None`, and a
/// line that says so, where there are no engines.
pub fn cluster(count: usize, owners: usize, test: &str) -> Option<Vec<Engine>> {
    let mut engines = Vec::new();
    for _ in 0..count {
        let bus = free_port().to_string();
        let mut flags = vec!["--cluster-enabled", "yes", "--cluster-port", &bus];
        flags.extend(["--cluster-node-timeout", "5000", "--cluster-require-full-coverage", "no"]);
        // Else a node whose last hash slot moves away becomes a replica.
        flags.extend(["--cluster-allow-replica-migration", "no"]);
        let Some(mut engine) = Engine::start(&flags) else {
            println!("\nskipped: {test}: redis-tools is not installed");
            return None;
        };
        engine.bus = bus;
        engines.push(engine);
    }
    for (at, engine) in engines[..owners].iter().enumerate() {
        let bound = |at: usize| at * 16_384 / owners;
        let (first, last) = (bound(at).to_string(), (bound(at + 1) - 1).to_string());
        engine.call(&["CLUSTER", "ADDSLOTSRANGE", &first, &last]).unwrap();
    }
    for engine in &engines[1..] {
        let port = engine.port.to_string();
        engines[0].call(&["CLUSTER", "MEET", "127.0.0.1", &port, &engine.bus]).unwrap();
    }
    let begun = Instant::now();
    let is_whole = |engine: &Engine| {
        let about = String::from_utf8(match engine.call(&["CLUSTER", "INFO"]) {
            Some(redis::Value::BulkString(about)) => about,
            Some(redis::Value::VerbatimString { text, .. }) => text.into_bytes(),
            other => panic!("{other:?}"),
        });
        let about = about.unwrap();
        // Without full coverage the state is also ok where a node does not know all owners yet.
        ["cluster_state:ok\r", "cluster_slots_assigned:16384\r", &format!("cluster_known_nodes:{count}\r")]
            .iter()
            .all(|line| about.contains(line))
    };
    while !engines.iter().all(is_whole) {
        assert!(begun.elapsed() < PATIENCE, "the engines are no cluster");
        std::thread::sleep(Duration::from_millis(50));
    }
    Some(engines)
}

/// So many engines; `None`, and a line that says so, where there are none.
pub fn engines(count: usize, test: &str) -> Option<Vec<Engine>> {
    let engines: Option<Vec<Engine>> = (0..count).map(|_| Engine::start(&[])).collect();
    if engines.is_none() {
        println!("\nskipped: {test}: redis-tools is not installed");
    }
    engines
}

pub fn url(engines: &[Engine], options: &str) -> String {
    let names: Vec<String> = engines.iter().map(Engine::name).collect();
    format!("redis://{}?{options}", names.join(","))
}

pub fn open(url: &str) -> RemoteStore {
    match url.parse() {
        Ok(StoreUrl::Remote(url)) => RemoteStore::open(&url).expect("a store"),
        other => panic!("{other:?}"),
    }
}

pub fn page(of: u32) -> PageBytes {
    let mut page = [0; PAGE_SIZE];
    page.chunks_exact_mut(4)
        .for_each(|word| word.copy_from_slice(&of.wrapping_mul(0x9e37_79b9).to_le_bytes()));
    page
}

/// Does operations, and waits for each of them: slot, result, page.
pub fn all(
    lane: &mut dyn Lane,
    operations: &[(Slot, Option<PageBytes>)],
) -> Vec<(Result<(), Fault>, PageBytes)> {
    let mut results = vec![None; operations.len()];
    let mut next = 0;
    // A stall of this machine is no time that a node has had.
    let (mut now, mut seen) = (Instant::now(), Instant::now());
    while results.iter().any(Option::is_none) {
        while let Some((slot, write)) = operations.get(next) {
            let progress = match write {
                Some(page) => lane.write(next as u32, *slot, page),
                None => lane.read(next as u32, *slot, &mut [0; PAGE_SIZE]),
            };
            match progress {
                Progress::Full => break,
                Progress::Queued => {}
                Progress::Done(result) => results[next] = Some((result, [0; PAGE_SIZE])),
            }
            next += 1;
        }
        lane.submit();
        now += seen.elapsed().min(Duration::from_millis(100));
        seen = Instant::now();
        lane.poll(now, &mut |done| {
            let page = done.page.copied().unwrap_or([0; PAGE_SIZE]);
            assert!(results[done.ticket as usize].replace((done.result, page)).is_none());
        });
        std::thread::sleep(Duration::from_micros(200));
    }
    results.into_iter().flatten().collect()
}

pub fn write(lane: &mut dyn Lane, slot: u32, of: u32) -> Result<(), Fault> {
    all(lane, &[(Slot(slot), Some(page(of)))])[0].0
}

pub fn read(lane: &mut dyn Lane, slot: u32) -> Result<PageBytes, Fault> {
    let (result, page) = all(lane, &[(Slot(slot), None)])[0];
    result.map(|()| page)
}
