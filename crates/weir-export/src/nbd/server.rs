//! The NBD server as its owner uses it: it starts completely or not at all, has counts, and shuts
//! down in bounded time.

use super::connection::{Shared, Worker};
use super::control::{Bell, Control};
use super::exports::{Exports, Single};
use super::handshake::NAME_MAX;
use super::listen::{Listen, ListenError, Listener};
use super::seat::{Seating, Seats};
use super::stats::Stats;
use std::fmt;
use std::io;
use std::sync::{Arc, mpsc};
use std::thread::JoinHandle;
use std::time::Duration;
use weir_core::log::Log;
use weir_core::swap_safety::{self, Children, NOT_PROTECTED, Unprotected};
use weir_device::PageDevice;
use weir_store::OpenError;

/// Bytes of a thread's stack. With `mlockall` the whole stack is resident.
const STACK_BYTES: usize = 256 << 10;

/// The settings of a server.
#[derive(Clone, Debug)]
pub struct Config {
    /// The export's name. Clients may also ask for the default export, which is the same. `name`,
    /// `description` and `read_only` are for [`Server::start`]: with [`Server::start_exports`] each
    /// device has its own.
    pub name: String,
    /// The export's description, for people.
    pub description: String,
    /// Whether writes are refused.
    pub read_only: bool,
    /// Largest number of connections that are served at once. Each takes a thread, a lane and about
    /// 1 MiB of locked memory, and they share some more.
    pub connections: usize,
    /// Time that a thread spins for a client's next request before it sleeps; zero: it sleeps at
    /// once.
    pub spin: Duration,
    /// Longest time that a client may leave its replies unread before its connection is dropped.
    pub send_patience: Duration,
    /// The export is to carry swap: TLS is refused, and every thread must have the I/O flusher flag
    /// unless [`unsafe_no_flusher`](Config::unsafe_no_flusher) is set.
    pub swap: bool,
    /// Serve swap even with threads that lack the I/O flusher flag.
    pub unsafe_no_flusher: bool,
}

impl Default for Config {
    fn default() -> Self {
        Config {
            name: "weir".to_owned(),
            description: "Weir volume".to_owned(),
            read_only: false,
            connections: 32,
            spin: Duration::ZERO,
            send_patience: Duration::from_secs(60),
            swap: false,
            unsafe_no_flusher: false,
        }
    }
}

/// The reason why a server cannot start.
#[derive(Debug, thiserror::Error)]
pub enum ServeError {
    /// The server cannot listen on an address.
    #[error(transparent)]
    Listen(#[from] ListenError),
    /// The configuration is invalid.
    #[error("{0}")]
    Config(String),
    /// A thread's lane cannot be opened.
    #[error(transparent)]
    Lane(#[from] OpenError),
    /// A thread lacks the I/O flusher flag, without which it must not serve swap.
    #[error("a thread that would serve swap lacks the I/O flusher flag")]
    Flusher(#[source] Unprotected),
    /// The system has no memory, threads or descriptors left.
    #[error("cannot take memory and threads for {connections} connections; ask for fewer")]
    Resources {
        /// The number of connections asked for.
        connections: usize,
        /// The system's error.
        #[source]
        source: io::Error,
    },
}

/// A running NBD server. Dropping it shuts it down at once.
pub struct Server {
    seats: Arc<dyn Seating>,
    bell: Arc<Bell>,
    addresses: Vec<Listen>,
    control: Option<JoinHandle<()>>,
    threads: Vec<JoinHandle<()>>,
    memory_locked: bool,
}

impl fmt::Debug for Server {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Server").field("addresses", &self.addresses).finish_non_exhaustive()
    }
}

/// The server's connections that may be those of the kernel's NBD client.
#[derive(Clone)]
pub struct KernelConnections(Arc<dyn Seating>);

impl fmt::Debug for KernelConnections {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "KernelConnections({})", self.count())
    }
}

impl KernelConnections {
    /// Number of connections that may be those of the kernel's NBD client.
    pub fn count(&self) -> usize {
        self.0.kernels()
    }

    /// Ends the connections that may be those of the kernel's NBD client.
    pub fn hang_up(&self) {
        self.0.hang_up_kernels();
    }
}

impl Server {
    /// Serves one device, under the name in `config` and by default. See
    /// [`start_exports`](Server::start_exports).
    ///
    /// # Errors
    /// Fails with a [`ServeError`]; nothing is left running or listening then.
    pub fn start<D>(
        device: &Arc<D>,
        config: &Config,
        listen: &[Listen],
        log: &Log,
    ) -> Result<Server, ServeError>
    where
        D: PageDevice<Error = OpenError> + 'static,
        D::Lane: 'static,
    {
        let single = Single::new(device, &config.name, &config.description, config.read_only);
        Server::start_exports(Arc::new(single), config, listen, log)
    }

    /// Listens, starts every thread and takes all memory; the process may be sealed afterwards.
    /// Clients are served from here on, each with the device of the name that it asks for.
    ///
    /// # Errors
    /// Fails with a [`ServeError`]; nothing is left running or listening then.
    pub fn start_exports<E: Exports>(
        exports: Arc<E>,
        config: &Config,
        listen: &[Listen],
        log: &Log,
    ) -> Result<Server, ServeError> {
        check(&*exports, config, listen)?;
        let resources = |source| ServeError::Resources { connections: config.connections, source };
        let listeners = listen.iter().map(Listener::bind).collect::<Result<Vec<_>, _>>()?;
        let addresses = listeners.iter().map(|listener| listener.bound.clone()).collect();
        let bell = Arc::new(Bell::new().map_err(resources)?);
        let seats = Arc::new(Seats::new(config.connections, config.spin, Arc::clone(log)));
        let mut server = Server {
            seats: Arc::<Seats<E::Device>>::clone(&seats),
            bell: Arc::clone(&bell),
            addresses,
            control: None,
            threads: Vec::with_capacity(config.connections),
            memory_locked: true,
        };
        server.start_seats(&exports, &seats, config)?;
        let (ready, started) = mpsc::channel();
        let log = Arc::clone(log);
        let send_patience = config.send_patience;
        let negotiate = move || {
            let mut control = match Control::new(&listeners, &*exports, &seats, send_patience, &bell, log) {
                Ok(control) => control,
                Err(error) => return drop(ready.send(Err(error))),
            };
            let _ = ready.send(Ok(()));
            control.run();
        };
        let thread = thread("weir-nbd").spawn(negotiate).map_err(resources)?;
        server.control = Some(thread);
        started.recv().expect("the thread answers").map_err(resources)?;
        Ok(server)
    }

    fn start_seats<E: Exports>(
        &mut self,
        exports: &Arc<E>,
        seats: &Arc<Seats<E::Device>>,
        config: &Config,
    ) -> Result<(), ServeError> {
        let connections = config.connections;
        let resources = |source| ServeError::Resources { connections, source };
        let (ready, started) = mpsc::channel();
        let shared = Shared::new(connections).map_err(resources)?;
        self.memory_locked &= shared.is_locked();
        for number in 0..connections {
            let lane = exports.open()?;
            let mut worker = Worker::new(lane, &shared).map_err(resources)?;
            self.memory_locked &= worker.is_locked();
            let (theirs, exports) = (Arc::clone(seats), Arc::clone(exports));
            let arrive = arrival(config, &ready);
            let serve = move || {
                let _sitting = theirs.vacate_at_end(number);
                if arrive() {
                    theirs.sit(number, &mut worker, &*exports);
                }
            };
            seats.open(number);
            let spawned = thread(&format!("weir-nbd-{number}")).spawn(serve);
            self.threads.push(spawned.map_err(|error| {
                seats.vacate(number);
                resources(error)
            })?);
        }
        for _ in 0..self.threads.len() {
            match started.recv().expect("every thread answers") {
                Ok(true) => {}
                Ok(false) => return Err(ServeError::Config(NOT_PROTECTED.to_owned())),
                Err(missing) => return Err(ServeError::Flusher(missing)),
            }
        }
        Ok(())
    }

    /// The addresses on which the server listens, with the ports that the system chose.
    pub fn addresses(&self) -> &[Listen] {
        &self.addresses
    }

    /// The server's connections that may be those of the kernel's NBD client.
    pub fn kernel_connections(&self) -> KernelConnections {
        KernelConnections(Arc::clone(&self.seats))
    }

    /// The server's counts.
    pub fn stats(&self) -> Stats {
        self.seats.stats()
    }

    /// Whether all I/O memory of the server is locked in RAM.
    pub fn is_memory_locked(&self) -> bool {
        self.memory_locked
    }

    /// Takes no more connections and requests, answers those received, and cuts the remaining
    /// connections after `grace`. Returns how many threads had not ended 2 s after that, because a
    /// store does not answer.
    pub fn shutdown(mut self, grace: Duration) -> usize {
        self.stop(grace)
    }

    fn stop(&mut self, grace: Duration) -> usize {
        self.bell.ring();
        if let Some(control) = self.control.take() {
            // If the thread panicked, the panic hook has reported that.
            let _ = control.join();
        }
        let busy = self.seats.close(grace);
        for thread in self.threads.drain(..) {
            // A thread that waits for a store may never end, so it is not joined.
            if busy == 0 || thread.is_finished() {
                let _ = thread.join();
            }
        }
        busy
    }
}

impl Drop for Server {
    fn drop(&mut self) {
        self.stop(Duration::ZERO);
    }
}

/// Prepares a serving thread as its first step. Returns whether the thread may go on.
fn arrival(
    config: &Config,
    ready: &mpsc::Sender<Result<bool, Unprotected>>,
) -> impl FnOnce() -> bool + Send + 'static {
    let (swap, must_flush) = (config.swap, config.swap && !config.unsafe_no_flusher);
    let ready = ready.clone();
    move || {
        if swap {
            // Each reply takes a buffer of the kernel. So let the thread use the kernel's memory
            // reserve. If that is denied, the thread must wait for memory like any other.
            let _ = swap_safety::reach_reserves(Children::Ordinary);
        }
        let flusher = if must_flush { swap_safety::has_io_flusher() } else { Ok(true) };
        let fine = matches!(flusher, Ok(true));
        let _ = ready.send(flusher);
        fine
    }
}

fn thread(name: &str) -> std::thread::Builder {
    std::thread::Builder::new().name(name.to_owned()).stack_size(STACK_BYTES)
}

fn check(exports: &impl Exports, config: &Config, listen: &[Listen]) -> Result<(), ServeError> {
    let mut too_long = None;
    exports.list(&mut |name, description| {
        let texts = [("name", name), ("description", description)];
        too_long = too_long.or(texts
            .into_iter()
            .map(|(what, text)| (what, text.len()))
            .find(|(_, length)| *length > NAME_MAX));
    });
    if let Some((what, length)) = too_long {
        let error = format!("the export's {what} has {length} bytes; at most {NAME_MAX} are accepted");
        return Err(ServeError::Config(error));
    }
    if config.connections == 0 {
        return Err(ServeError::Config("0 connections: a server needs at least 1".to_owned()));
    }
    if config.swap
        && let Some(tls) = listen.iter().find(|listen| matches!(listen, Listen::Tls { .. }))
    {
        let error =
            format!("{tls}: TLS allocates for every record, so swap on it can deadlock; use a unix socket");
        return Err(ServeError::Config(error));
    }
    Ok(())
}
