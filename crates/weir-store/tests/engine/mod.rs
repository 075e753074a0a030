//! Engines of the Redis protocol that the tests start, and pages on them.

#![allow(dead_code, reason = "each test file uses its part of it")]

use rustix::process::{Pid, Signal, kill_process};
use std::io::ErrorKind;
use std::net::{Ipv4Addr, TcpListener};
use std::os::unix::process::CommandExt as _;
use std::path::PathBuf;
use std::process::{Child, Command, Stdio};
use std::sync::atomic::{AtomicU32, Ordering};
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
}

impl Engine {
    /// Starts one; `None` where there is no `redis-check-rdb`.
    pub fn start(flags: &[&str]) -> Option<Self> {
        static NUMBER: AtomicU32 = AtomicU32::new(0);
        let number = NUMBER.fetch_add(1, Ordering::Relaxed);
        let directory = std::env::temp_dir().join(format!("weir-redis-{}-{number}", std::process::id()));
        std::fs::create_dir_all(&directory).unwrap();
        // Below the kernel's own range, and never dealt twice: else another engine could take the
        // port of one that is killed.
        let port = (0..100).map(|turn| 10_000 + (std::process::id() * 64 + number + turn * 640) % 20_000);
        let mut port = port.map(|port| port as u16);
        let port = port.find(|&port| TcpListener::bind((Ipv4Addr::LOCALHOST, port)).is_ok()).unwrap();
        let login = if flags.contains(&"--requirepass") { ":0123@" } else { "" };
        let engine = Self { child: spawn(port, &directory, flags)?, port, directory, login };
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
        let mut command = redis::cmd(words[0]);
        words[1..].iter().for_each(|word| {
            command.arg(*word);
        });
        let client = redis::Client::open(format!("redis://{}{}/", self.login, self.name())).unwrap();
        let mut connection = client.get_connection_with_timeout(Duration::from_secs(5)).ok()?;
        command.query(&mut connection).ok()
    }

    pub fn bytes(&self, key: &str) -> Vec<u8> {
        match self.call(&["GET", key]) {
            Some(redis::Value::BulkString(bytes)) => bytes,
            other => panic!("{key}: {other:?}"),
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
        lane.poll(Instant::now(), &mut |done| {
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
