//! Parts that the tests of FUSE through real mounts share.
#![allow(dead_code, reason = "each test file uses its part of it")]

use std::collections::HashMap;
use std::fs::{File, OpenOptions};
use std::os::fd::OwnedFd;
use std::path::Path;
use std::sync::Arc;
use std::time::{Duration, Instant};
use weir_core::log::{Level, Log};
use weir_core::seal::{Policy, seal};
use weir_export::fuse::{Config, ServeError, Server};
use weir_store::Host;
use weir_volume::Volume;

pub const GRACE: Duration = Duration::from_secs(60);

pub fn quiet() -> Log {
    Arc::new(|level, line| {
        if level == Level::Warning {
            panic!("{line}");
        }
    })
}

pub fn volume(pages: u32, threads: usize) -> Arc<Volume> {
    let shape = weir_volume::Config { pages, lanes: threads, depth: 64 };
    Volume::create(shape, vec![Arc::new(Host::new(shape.slots()).unwrap())]).unwrap()
}

/// Starts a server over a file of its own. `None`, after printing the reason, if this machine
/// cannot mount.
pub fn serve(volume: &Arc<Volume>, config: &Config, point: &Path) -> Option<Server> {
    match Server::start(volume, config, point, &quiet()) {
        Ok(server) => {
            seal(Policy::Abort);
            Some(server)
        }
        Err(ServeError::Mount(error)) => {
            println!("\nskipped: no FUSE mount here: {error}");
            None
        }
        Err(error) => panic!("{error}"),
    }
}

/// The descriptors that a keeper would hold for a server, by name.
pub fn kept(server: &Server) -> HashMap<String, OwnedFd> {
    let handoffs = server.handoffs().into_iter();
    handoffs.map(|handoff| (handoff.name, handoff.fd.try_clone_to_owned().unwrap())).collect()
}

pub fn open(path: &Path) -> File {
    OpenOptions::new().read(true).write(true).open(path).unwrap()
}

pub fn content(seed: u64, bytes: usize) -> Vec<u8> {
    let mut state = seed;
    let mut byte = || {
        state = state.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
        (state >> 33) as u8
    };
    (0..bytes).map(|_| byte()).collect()
}

/// Waits for an action of the kernel or another process.
pub fn eventually(what: &str, mut done: impl FnMut() -> bool) {
    let begun = Instant::now();
    while !done() {
        assert!(begun.elapsed() < GRACE, "{what}");
        std::thread::sleep(Duration::from_millis(10));
    }
}
