//! All queues of a device: started before the process is sealed, joined when the device has gone.

use super::control::{Control, ControlError};
use super::device::{Device, Shape};
use super::engine::{Engine, REQUEST_BYTES_MAX};
use super::queue::Queue;
use super::stats::{Counters, Stats};
use super::uapi::{DeviceInfo, FEATURE_QUIESCE, QUEUE_DEPTH_MAX};
use crate::spin::{Spin, SpinGate};
use rustix::fs::{Mode, OFlags};
use rustix::io::Errno;
use rustix::thread::{CpuSet, MembarrierCommand};
use std::fmt;
use std::io;
use std::os::fd::OwnedFd;
use std::sync::{Arc, mpsc};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};
use weir_core::PAGE_SIZE;
use weir_core::log::{Level, Log};
use weir_core::swap_safety::{self, Children, Unprotected};
use weir_store::OpenError;
use weir_volume::Volume;

/// Stack of a thread; with `mlockall` all of it is resident.
const STACK_BYTES: usize = 256 << 10;
/// How long the driver may take to clear up after a dead server, or to show a device.
const PATIENCE: Duration = Duration::from_secs(30);
/// How long whoever was interrupted has for putting a request back, where the kernel does not say
/// when he has.
const RETURN: Duration = Duration::from_millis(250);
/// How often to look.
const LOOK: Duration = Duration::from_millis(2);

/// How a volume is served.
#[derive(Clone, Debug)]
pub struct Config {
    /// Hardware queues, each with a thread and a lane of the volume.
    pub queues: u16,
    /// Requests that each may have in flight.
    pub depth: u16,
    /// The longest request; a power of two. Each queue takes `depth` buffers of this size.
    pub request_bytes: u32,
    /// How long a thread looks for the next request before it sleeps; zero for not at all.
    pub spin: Duration,
    /// The device is to carry swap: its buffers must be locked, and every thread must have the I/O
    /// flusher flag unless [`unsafe_no_flusher`](Config::unsafe_no_flusher) is set.
    pub swap: bool,
    /// Serve swap without the flusher flag.
    pub unsafe_no_flusher: bool,
    /// The device outlives this process, and waits for another server.
    pub recoverable: bool,
}

impl Default for Config {
    fn default() -> Self {
        Config {
            queues: 1,
            depth: 64,
            request_bytes: 128 << 10,
            spin: Duration::ZERO,
            swap: false,
            unsafe_no_flusher: false,
            recoverable: false,
        }
    }
}

/// Why a device cannot be served.
#[derive(Debug, thiserror::Error)]
pub enum UblkError {
    /// The driver is not there, or refuses.
    #[error(transparent)]
    Control(#[from] ControlError),
    /// A configuration that is no good.
    #[error("{0}")]
    Config(String),
    /// The character device does not open.
    #[error("{path} does not open")]
    Open {
        /// Which.
        path: String,
        /// Why.
        #[source]
        source: io::Error,
    },
    /// A queue's lane cannot be opened.
    #[error("queue {queue} of {queues} gets no lane")]
    Lane {
        /// Which, from 0.
        queue: u16,
        /// Of how many.
        queues: u16,
        /// Why.
        #[source]
        source: OpenError,
    },
    /// A queue's thread cannot serve.
    #[error("queue {queue} of {queues} cannot serve; fewer or shallower queues need less memory")]
    Queue {
        /// Which, from 0.
        queue: u16,
        /// Of how many.
        queues: u16,
        /// Why.
        #[source]
        source: io::Error,
    },
    /// A thread does not have the flusher flag.
    #[error("a thread that would serve swap lacks the I/O flusher flag")]
    Flusher(#[source] Unprotected),
}

/// A device being served. Dropping it leaves the device to the driver as the process's death does;
/// [`Server::stop`] and [`Server::remove`] take it away.
pub struct Server {
    device: Device,
    control: Control,
    counters: Arc<[Counters]>,
    threads: Vec<JoinHandle<()>>,
}

impl fmt::Debug for Server {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Server").field("device", &self.device).finish_non_exhaustive()
    }
}

/// The word of a queue's thread when it is about to serve, or why it will not.
type Ready = Result<(), (u16, ReadyError)>;

enum ReadyError {
    Io(io::Error),
    Flusher(Option<Unprotected>),
}

impl Server {
    /// The device of a dead server of this volume, if it can still be taken over; it has the shape
    /// that it was made with.
    ///
    /// # Errors
    /// When there is one, and the driver does not let go of the dead server's remains.
    pub fn find(device: Device, log: &Log) -> Result<Option<Found>, UblkError> {
        let mut control = Control::open()?;
        let begun = Instant::now();
        let info = device.begin_recovery(&mut control, || {
            std::thread::sleep(LOOK);
            begun.elapsed() < PATIENCE
        })?;
        if info.is_none() {
            (log)(Level::Warning, format_args!("{device} of the daemon before is gone: making another"));
        }
        Ok(info.map(|info| Found { device, control, info }))
    }

    /// Makes a device, starts its threads, and publishes it. `made` hears its number before that.
    /// The process may be sealed afterwards.
    ///
    /// # Errors
    /// See [`UblkError`]; no device is left then.
    pub fn create(
        volume: &Arc<Volume>,
        config: &Config,
        log: &Log,
        made: impl FnOnce(Device),
    ) -> Result<Server, UblkError> {
        check(config)?;
        let mut control = Control::open()?;
        clear_up(&mut control, log);
        if control.features() & FEATURE_QUIESCE == 0 {
            (log)(
                Level::Warning,
                format_args!(
                    "ublk: before Linux 6.16 the kernel may crash when this process is killed under load; see weir doctor"
                ),
            );
        }
        let shape = Shape {
            pages: volume.pages(),
            queues: config.queues,
            depth: config.depth,
            request_bytes: config.request_bytes,
            recoverable: config.recoverable,
        };
        let features = control.features();
        let (device, info) = Device::add(&mut control, features, &shape, made)?;
        let mut server = Server::new(device, control, &info);
        match server.start(volume, config, &info, log, Device::start) {
            Ok(()) => Ok(server),
            Err(error) => {
                // Threads that have started wait for requests of a device that nobody has seen.
                let _ = device.abandon(&mut server.control);
                server.join();
                let _ = device.forget(&mut server.control);
                Err(error)
            }
        }
    }

    /// Goes on where a dead server stopped: requests that it had not answered come again.
    ///
    /// # Errors
    /// See [`UblkError`]; the device keeps its requests for another try then.
    pub fn take_over(
        volume: &Arc<Volume>,
        config: &Config,
        found: Found,
        log: &Log,
    ) -> Result<Server, UblkError> {
        let Found { device, control, info } = found;
        let mut server = Server::new(device, control, &info);
        server.start(volume, config, &info, log, |device, control| {
            let_requests_return();
            device.end_recovery(control)
        })?;
        Ok(server)
    }

    fn new(device: Device, control: Control, info: &DeviceInfo) -> Server {
        let counters = std::iter::repeat_with(Counters::default).take(info.queues.into()).collect();
        Server { device, control, counters, threads: Vec::with_capacity(info.queues.into()) }
    }

    fn start(
        &mut self,
        volume: &Arc<Volume>,
        config: &Config,
        info: &DeviceInfo,
        log: &Log,
        publish: impl FnOnce(Device, &mut Control) -> Result<(), ControlError>,
    ) -> Result<(), UblkError> {
        let queues = info.queues;
        let character = Arc::new(open(&self.device.character())?);
        let processors = std::thread::available_parallelism().map_or(1, usize::from);
        let gate = Arc::new(SpinGate::new(processors));
        let (ready, started) = mpsc::channel::<Ready>();
        for number in 0..queues {
            let lane = volume.lane().map_err(|source| UblkError::Lane { queue: number, queues, source })?;
            let failed = |source| UblkError::Queue { queue: number, queues, source };
            let engine = Engine::new(lane, info.depth, info.buffer_bytes)
                .map_err(|error| failed(doing("taking its buffers", &error)))?;
            if config.swap && !engine.is_locked() {
                return Err(failed(io::Error::other(
                    "its buffers cannot be locked in memory, as swap needs: raise RLIMIT_MEMLOCK",
                )));
            }
            let thread = Thread {
                number,
                depth: info.depth,
                engine,
                character: Arc::clone(&character),
                // A thread that spins would be in the way of those that it serves, on their own
                // processor.
                processors: config.spin.is_zero().then(|| self.affinity(number)).flatten(),
                gate: Arc::clone(&gate),
                spin: config.spin,
                swap: config.swap,
                must_flush: config.swap && !config.unsafe_no_flusher,
                counters: Arc::clone(&self.counters),
                log: Arc::clone(log),
            };
            let ready = ready.clone();
            let builder =
                std::thread::Builder::new().name(format!("weir-ublk-{number}")).stack_size(STACK_BYTES);
            let spawned = builder.spawn(move || thread.run(&ready));
            self.threads.push(spawned.map_err(|error| failed(doing("starting its thread", &error)))?);
        }
        drop(ready);
        for _ in 0..queues {
            started.recv().expect("every thread answers").map_err(|(queue, error)| match error {
                ReadyError::Io(source) => UblkError::Queue { queue, queues, source },
                ReadyError::Flusher(Some(missing)) => UblkError::Flusher(missing),
                ReadyError::Flusher(None) => UblkError::Config(
                    "the device is to carry swap, and the I/O flusher flag is not set: set it first in main"
                        .to_owned(),
                ),
            })?;
        }
        publish(self.device, &mut self.control)?;
        self.shown();
        Ok(())
    }

    /// Waits for the block device's name, which the kernel or udev makes.
    fn shown(&self) {
        let path = self.device.to_string();
        let begun = Instant::now();
        while !std::path::Path::new(&path).exists() && begun.elapsed() < Duration::from_secs(5) {
            std::thread::sleep(LOOK);
        }
    }

    fn affinity(&mut self, queue: u16) -> Option<CpuSet> {
        let mask = self.device.affinity(&mut self.control, queue).ok()?;
        let mut processors = CpuSet::new();
        for number in 0..CpuSet::MAX_CPU {
            if mask[number / 8] & 1 << (number % 8) != 0 {
                processors.set(number);
            }
        }
        (processors.count() > 0).then_some(processors)
    }

    /// The device.
    pub fn device(&self) -> Device {
        self.device
    }

    /// Its queues.
    pub fn queues(&self) -> usize {
        self.counters.len()
    }

    /// Its counts.
    pub fn stats(&self) -> Stats {
        let mut stats = Stats::default();
        self.counters.iter().for_each(|counters| stats.add(counters));
        stats
    }

    /// Takes the block device away. The caller has seen that nobody uses it: the kernel would take
    /// it from whoever does, unless it can tell (Linux 7.0), and then refuses. False where somebody
    /// has it open, be it to read: it is served on.
    ///
    /// # Errors
    /// What else the driver refuses; the device is served on.
    pub fn stop(&mut self) -> Result<bool, UblkError> {
        let features = self.control.features();
        Ok(self.device.stop(&mut self.control, features)?)
    }

    /// Removes what is left of a device that has been stopped.
    ///
    /// # Errors
    /// What the driver refuses.
    pub fn remove(mut self) -> Result<(), UblkError> {
        self.join();
        self.device.forget(&mut self.control)?;
        Ok(())
    }

    fn join(&mut self) {
        for thread in self.threads.drain(..) {
            // A panic there has been reported by the panic hook.
            let _ = thread.join();
        }
    }
}

/// A dead server's device, whose recovery has begun.
#[derive(Debug)]
pub struct Found {
    device: Device,
    control: Control,
    info: DeviceInfo,
}

impl Found {
    /// Its hardware queues, which take as many lanes.
    pub fn queues(&self) -> u16 {
        self.info.queues
    }
}

/// A queue's thread before it runs.
struct Thread {
    number: u16,
    depth: u16,
    engine: Engine,
    character: Arc<OwnedFd>,
    processors: Option<CpuSet>,
    gate: Arc<SpinGate>,
    spin: Duration,
    swap: bool,
    must_flush: bool,
    counters: Arc<[Counters]>,
    log: Log,
}

impl Thread {
    fn run(self, ready: &mpsc::Sender<Ready>) {
        let number = self.number;
        if self.must_flush {
            match swap_safety::has_io_flusher() {
                Ok(true) => {}
                Ok(false) => return drop(ready.send(Err((number, ReadyError::Flusher(None))))),
                Err(missing) => return drop(ready.send(Err((number, ReadyError::Flusher(Some(missing)))))),
            }
        }
        if let Some(processors) = &self.processors {
            // Nearness only; a control group may forbid it.
            let _ = rustix::thread::sched_setaffinity(None, processors);
        }
        let spin = (!self.spin.is_zero()).then(|| Spin::new(&self.gate, self.spin));
        let counters = &self.counters[usize::from(number)];
        if self.swap {
            // The kernel makes the ring's memory in one go, or not at all. Denied, it may take
            // another daemon to succeed.
            let _ = swap_safety::reach_reserves(Children::Ordinary);
        }
        let queue = Queue::open(number, self.depth, &self.character, self.engine, spin, counters, &self.log);
        if self.swap {
            let _ = swap_safety::leave_reserves();
        }
        let mut queue = match queue {
            Ok(queue) => queue,
            Err(error) => return drop(ready.send(Err((number, ReadyError::Io(error))))),
        };
        let _ = ready.send(Ok(()));
        let served = weir_core::seal::on_io_thread(|| queue.serve());
        if let Err(error) = served {
            // Its requests would wait for ever. The process decides what a panic ends; the next
            // daemon has them sent again.
            panic!("ublk: queue {number} serves no more: {error}");
        }
    }
}

/// Waits until every processor that found no server has put its request back where the end of the
/// recovery finds it. Since Linux 6.15 (and 6.14.6) the driver hands requests out from the moment
/// when all buffers are offered, a queue's own since 7.0; a processor that looked just before puts
/// its request on a list that only the end of the recovery looks at, and after that nobody would
/// (docs/ublk.md).
fn let_requests_return() {
    // It looks and puts back within one read-side section of RCU, whose end the kernel waits for
    // here: if there are several processors, none of them a nohz_full one.
    let several = std::thread::available_parallelism().is_ok_and(|processors| processors.get() > 1);
    if !several || rustix::thread::membarrier(MembarrierCommand::Global).is_err() {
        std::thread::sleep(RETURN);
    }
}

/// The same error, with what was being done.
pub(super) fn doing(what: &str, error: &io::Error) -> io::Error {
    io::Error::new(error.kind(), format!("{what}: {error}"))
}

fn open(path: &str) -> Result<OwnedFd, UblkError> {
    let begun = Instant::now();
    loop {
        match rustix::fs::open(path, OFlags::RDWR | OFlags::CLOEXEC, Mode::empty()) {
            // Its name may come a moment after the device, and a dead server may still be going.
            Err(Errno::NOENT | Errno::BUSY | Errno::NXIO) if begun.elapsed() < PATIENCE => {
                std::thread::sleep(LOOK);
            }
            Err(errno) => return Err(UblkError::Open { path: path.to_owned(), source: errno.into() }),
            Ok(fd) => return Ok(fd),
        }
    }
}

/// Removes devices of ours whose server died without a keeper: the driver has stopped them already.
fn clear_up(control: &mut Control, log: &Log) {
    let Ok(entries) = std::fs::read_dir("/sys/class/ublk-char") else { return };
    let lives = |process: u32| std::path::Path::new(&format!("/proc/{process}")).exists();
    for entry in entries.flatten() {
        let number = entry.file_name().to_str().and_then(|name| name.strip_prefix("ublkc")?.parse().ok());
        if let Some(device) = number.map(Device)
            && device.clear_up(control, lives)
        {
            (log)(Level::Info, format_args!("removed {device}, which a dead daemon had left"));
        }
    }
}

fn check(config: &Config) -> Result<(), UblkError> {
    let refuse = |text: String| Err(UblkError::Config(text));
    let Config { queues, depth, request_bytes, .. } = *config;
    if queues == 0 || depth == 0 || depth > QUEUE_DEPTH_MAX {
        return refuse(format!(
            "a ublk device with {queues} queues of {depth} requests: accepted: at least 1 queue, of 1 to {QUEUE_DEPTH_MAX}"
        ));
    }
    let accepted = PAGE_SIZE as u32..=REQUEST_BYTES_MAX;
    if !request_bytes.is_power_of_two() || !accepted.contains(&request_bytes) {
        return refuse(format!(
            "requests of {request_bytes} bytes: accepted: a power of two from {} to {}",
            accepted.start(),
            accepted.end()
        ));
    }
    Ok(())
}
