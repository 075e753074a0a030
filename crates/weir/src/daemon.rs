//! The daemon: stores, the volume over them, and the ways in. `weir serve` runs it in the foreground, `weir try` drives one
//! in its own process.

use crate::address::Address;
use crate::cli::ServeOptions;
use crate::control::{Export, Io, Protection, SCHEMA, Status, Store, Volume as VolumeCounts};
use crate::failure::{Failure, chain};
use crate::keeper::{Held, Link};
use crate::pages::{self, Plan};
use std::sync::{Arc, Mutex, MutexGuard};
use std::time::{Duration, Instant};
use weir_core::seal;
use weir_core::swap_safety::Protections;
use weir_export::log::Log;
use weir_export::nbd::{self, Identity, Listen, Server};
use weir_volume::Volume;

/// How long requests that are under way may take when the daemon stops.
const GRACE: Duration = Duration::from_secs(2);

/// Pages that one connection moves at a time at slow stores.
const DEPTH: usize = 64;

/// A running daemon.
#[derive(Debug)]
pub struct Daemon {
    shared: Arc<Shared>,
}

/// What the control socket looks at.
#[derive(Debug)]
struct Shared {
    volume: Arc<Volume>,
    /// Until the daemon stops. The lock is the control plane's: no I/O thread takes it.
    nbd: Mutex<Option<Server>>,
    protections: Protections,
    swap: bool,
    begun: Instant,
}

impl Daemon {
    /// Opens the stores, makes the volume (or takes over the one that the keeper holds), listens, and seals the allocator: from here on the I/O path takes no memory.
    ///
    /// # Errors
    /// When a store or a socket cannot be had, or the stores are too small for the size asked for.
    pub fn start(
        options: &ServeOptions,
        protections: Protections,
        keeper: Option<(&Link, Held)>,
        log: &Log,
    ) -> Result<Self, Failure> {
        let connections = usize::from(options.connections);
        let plan = Plan { stores: &options.store, size: options.size, lanes: connections, depth: DEPTH };
        let volume = pages::open(&plan, keeper, log)?;

        let identity = options.tls.as_deref().map(Identity::from_directory).transpose();
        let identity =
            identity.map_err(|error| Failure::Failed(format!("--tls: {}", chain(&error))))?.map(Arc::new);
        let listen: Vec<Listen> =
            options.nbd.iter().map(|address| listen(address, identity.as_ref())).collect();
        let config = nbd::Config {
            name: options.name.clone(),
            connections,
            spin: Duration::from_micros(options.spin_us.into()),
            swap: options.swap,
            unsafe_no_flusher: options.unsafe_no_flusher,
            ..nbd::Config::default()
        };
        let nbd =
            Server::start(&volume, &config, &listen, log).map_err(|error| Failure::Failed(chain(&error)))?;
        seal::seal(seal::policy_from_environment());
        let shared = Shared {
            volume,
            nbd: Mutex::new(Some(nbd)),
            protections,
            swap: options.swap,
            begun: Instant::now(),
        };
        Ok(Daemon { shared: Arc::new(shared) })
    }

    /// Answers what has been received, then hangs up; the sockets are gone when this returns.
    pub fn stop(self) {
        if let Some(nbd) = self.shared.nbd().take() {
            nbd.shutdown(GRACE);
        }
    }

    /// The device's size.
    pub fn bytes(&self) -> u64 {
        self.shared.volume.bytes()
    }

    /// How it is.
    pub fn status(&self) -> Status {
        self.shared.status()
    }

    /// What says how it is, for another thread.
    pub fn watcher(&self) -> impl Fn() -> Status + Send + 'static {
        let shared = Arc::clone(&self.shared);
        move || shared.status()
    }
}

fn listen(address: &Address, identity: Option<&Arc<Identity>>) -> Listen {
    match (address.clone(), identity) {
        (Address::Unix(path), _) => Listen::Unix(path),
        (Address::Tcp { host, port }, Some(identity)) => {
            Listen::Tls { host, port, identity: Arc::clone(identity) }
        }
        (Address::Tcp { host, port }, None) => Listen::Insecure { host, port },
    }
}

/// A way in for each address; they share their connections.
fn exports(server: &Server) -> Vec<Export> {
    let stats = server.stats();
    let export = |address: &Listen| Export {
        kind: "nbd".to_owned(),
        address: address.to_string(),
        connections: stats.connected,
        connections_most: stats.connections_max,
    };
    server.addresses().iter().map(export).collect()
}

impl Shared {
    fn nbd(&self) -> MutexGuard<'_, Option<Server>> {
        self.nbd.lock().expect("nobody panics while holding it")
    }

    fn status(&self) -> Status {
        let volume = self.volume.status();
        Status {
            schema: SCHEMA,
            version: env!("CARGO_PKG_VERSION").to_owned(),
            pid: std::process::id(),
            uptime_s: self.begun.elapsed().as_secs(),
            volume: VolumeCounts::of(&volume, self.volume.memory_bytes()),
            stores: volume.stores.iter().map(Store::from).collect(),
            read: Io::reads(&volume),
            write: Io::writes(&volume),
            discarded: volume.discards,
            exports: self.nbd().as_ref().map(exports).unwrap_or_default(),
            protection: Protection {
                swap: self.swap,
                io_flusher: self.protections.io_flusher,
                memory_locked: self.protections.memory_locked,
                oom_exempt: self.protections.oom_exempt,
                io_allocations: seal::violations(),
            },
        }
    }
}
