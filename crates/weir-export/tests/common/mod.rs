//! Servers for the tests of this folder, in a process that is sealed once the first of them runs.
//! An allocation on an I/O thread, on any path through the server, aborts the test.
#![allow(dead_code, reason = "each test file uses its part of it")]

pub mod gated;

use std::fmt::Write;
use std::path::PathBuf;
use std::process::Command;
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};
use weir_core::PAGE_SIZE;
use weir_core::log::Log;
use weir_core::seal::{Policy, SealedAllocator, seal};
use weir_export::nbd::client::{Client, Wish};
use weir_export::nbd::{Config, Listen, Server};
use weir_store::{Host, Store};
use weir_volume::Volume;

/// Time limit for actions that take almost no time, on a machine with other work. Only a hang takes
/// longer.
pub const PATIENCE: Duration = Duration::from_secs(60);

#[global_allocator]
static ALLOCATOR: SealedAllocator = SealedAllocator;

/// Lines of a log, in memory taken in advance: logging happens on I/O threads.
struct Lines(String);

impl Write for Lines {
    fn write_str(&mut self, text: &str) -> std::fmt::Result {
        if self.0.len() + text.len() <= self.0.capacity() {
            self.0.push_str(text);
        }
        Ok(())
    }
}

/// A server on a unix socket of its own, with the lines that it logged.
pub struct Served {
    pub server: Option<Server>,
    pub volume: Arc<Volume>,
    pub socket: PathBuf,
    lines: Arc<Mutex<Lines>>,
}

impl Served {
    /// Serves `pages` pages of host memory.
    pub fn host(name: &str, pages: u32, config: &Config) -> Served {
        Served::over(name, pages, config, |slots| Arc::new(Host::new(slots).unwrap()))
    }

    /// Serves `pages` pages of the store that `open` makes with that many slots.
    pub fn over(name: &str, pages: u32, config: &Config, open: impl FnOnce(u32) -> Arc<dyn Store>) -> Served {
        let shape = weir_volume::Config { pages, lanes: config.connections, depth: 256 };
        let volume = Volume::create(shape, vec![open(shape.slots())]).unwrap();
        let socket = std::env::temp_dir().join(format!("weir-test-{name}-{}", std::process::id()));
        let lines = Arc::new(Mutex::new(Lines(String::with_capacity(1 << 20))));
        let log: Log = {
            let lines = Arc::clone(&lines);
            Arc::new(move |_, line| {
                let _ = writeln!(lines.lock().unwrap(), "{line}");
            })
        };
        let listen = [Listen::Unix(socket.clone())];
        let server = Server::start(&volume, config, &listen, &log).unwrap();
        seal(Policy::Abort);
        Served { server: Some(server), volume, socket, lines }
    }

    pub fn server(&self) -> &Server {
        self.server.as_ref().unwrap()
    }

    pub fn client(&self) -> Client {
        Client::unix(&self.socket, &Wish::default()).unwrap()
    }

    /// A client that takes only simple replies, as the kernel does.
    pub fn simple_client(&self) -> Client {
        let wish = Wish { structured: false, allocation: false, ..Wish::default() };
        Client::unix(&self.socket, &wish).unwrap()
    }

    pub fn uri(&self) -> String {
        format!("nbd+unix:///?socket={}", self.socket.display())
    }

    /// Whether a line with `text` has been logged.
    pub fn logs_now(&self, text: &str) -> bool {
        self.lines.lock().unwrap().0.contains(text)
    }

    /// Whether a line with `text` was logged, now or soon.
    pub fn logs(&self, text: &str) -> bool {
        let begun = Instant::now();
        while !self.logs_now(text) {
            if begun.elapsed() > PATIENCE {
                return false;
            }
            std::thread::sleep(Duration::from_millis(10));
        }
        true
    }

    pub fn shutdown(mut self) {
        let busy = self.server.take().unwrap().shutdown(PATIENCE);
        assert_eq!(busy, 0, "threads that did not come back");
    }
}

/// A configuration with few connections: each takes about a megabyte.
pub fn few() -> Config {
    Config { connections: 4, ..Config::default() }
}

/// Pseudo-random bytes from a seed (SplitMix64).
pub fn noise(seed: u64, bytes: usize) -> Vec<u8> {
    let mut state = seed;
    let mut next = || {
        state = state.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let mut z = state;
        z = (z ^ (z >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        z = (z ^ (z >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        z ^ (z >> 31)
    };
    let mut out = Vec::with_capacity(bytes + 8);
    while out.len() < bytes {
        out.extend_from_slice(&next().to_le_bytes());
    }
    out.truncate(bytes);
    out
}

/// A page of noise.
pub fn page(seed: u64) -> Vec<u8> {
    noise(seed, PAGE_SIZE)
}

/// Whether a program can be run; if not, prints once that the test is skipped.
pub fn have(program: &str, package: &str) -> bool {
    let found = Command::new(program).arg("--version").output().is_ok();
    if !found {
        eprintln!("skipped: {program} is not installed (apt-get install {package})");
    }
    found
}
