//! The ublk server: all queues of a device, started before the process is sealed, joined when the
//! device has gone.

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
use weir_core::swap_safety::{self, Children, NOT_PROTECTED, Unprotected};
use weir_device::{PageDevice, PageLane};
use weir_store::OpenError;

/// Bytes of a thread's stack. With `mlockall` the whole stack is resident.
const STACK_BYTES: usize = 256 << 10;
/// Time that the driver may take to clear up after a dead server, or to show a device.
const PATIENCE: Duration = Duration::from_secs(30);
/// Time that processors get to put their requests back on the driver's list, if the kernel cannot
/// say when they have done so; see [`let_requests_return`].
const RETURN: Duration = Duration::from_millis(250);
/// Pause between two looks at the driver, or at a device's file that may appear soon.
const LOOK: Duration = Duration::from_millis(2);

/// The settings of a ublk server.
#[derive(Clone, Debug)]
pub struct Config {
    /// Number of hardware queues, each with a thread and a lane of the page device.
    pub queues: u16,
    /// Largest number of requests that each queue may have in flight.
    pub depth: u16,
    /// Bytes of the longest request; a power of two. Each queue takes `depth` buffers of this size.
    pub request_bytes: u32,
    /// Time that a thread spins for the next request before it sleeps; zero: it sleeps at once.
    pub spin: Duration,
    /// The device is to carry swap: its buffers must be locked, and every thread must have the I/O
    /// flusher flag unless [`unsafe_no_flusher`](Config::unsafe_no_flusher) is set.
    pub swap: bool,
    /// Serve swap even with threads that lack the I/O flusher flag.
    pub unsafe_no_flusher: bool,
    /// Whether the device outlives this process, and waits for another server.
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

/// The reason why a device cannot be served.
#[derive(Debug, thiserror::Error)]
pub enum UblkError {
    /// The driver is missing, or refuses a command.
    #[error(transparent)]
    Control(#[from] ControlError),
    /// The configuration is invalid.
    #[error("{0}")]
    Config(String),
    /// The character device cannot be opened.
    #[error("{path} does not open")]
    Open {
        /// The character device's path.
        path: String,
        /// The system's error.
        #[source]
        source: io::Error,
    },
    /// A queue's lane cannot be opened.
    #[error(transparent)]
    Lane(#[from] OpenError),
    /// A queue's thread cannot serve.
    #[error("queue {queue} of {queues} cannot serve; fewer or shallower queues need less memory")]
    Queue {
        /// The queue's number, from 0.
        queue: u16,
        /// The number of queues.
        queues: u16,
        /// The system's error.
        #[source]
        source: io::Error,
    },
    /// A thread lacks the I/O flusher flag, without which it must not serve swap.
    #[error("a thread that would serve swap lacks the I/O flusher flag")]
    Flusher(#[source] Unprotected),
}

/// A device being served. Dropping it leaves the device to the driver, as the process's death does.
/// [`Server::stop`] and [`Server::remove`] remove it.
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

/// A queue thread's message: the thread is about to serve, or the reason why it cannot.
type Ready = Result<(), (u16, ReadyError)>;

enum ReadyError {
    Io(io::Error),
    Flusher(Option<Unprotected>),
}

impl Server {
    /// Finds the device of a dead server of these pages, if it can still be taken over. The device
    /// keeps the size, the number of queues and the depth that it was made with.
    ///
    /// # Errors
    /// Fails if there is such a device, but the driver does not finish clearing up after the dead
    /// server.
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

    /// Makes a device of these pages, starts its threads, and publishes it. `made` gets the
    /// device's number before the device is published. The process may be sealed afterwards.
    ///
    /// # Errors
    /// Fails with a [`UblkError`]; no device is left then.
    pub fn create<D>(
        pages: &Arc<D>,
        config: &Config,
        log: &Log,
        made: impl FnOnce(Device),
    ) -> Result<Server, UblkError>
    where
        D: PageDevice<Error = OpenError>,
        D::Lane: 'static,
    {
        check(config)?;
        let lanes = lanes(pages, config.queues)?;
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
            pages: pages.pages(),
            clears: D::Lane::CLEARS,
            flushes: D::Lane::FLUSHES,
            queues: config.queues,
            depth: config.depth,
            request_bytes: config.request_bytes,
            recoverable: config.recoverable,
        };
        let features = control.features();
        let (device, info) = Device::add(&mut control, features, &shape, made)?;
        let mut server = Server::new(device, control, &info);
        match server.start(lanes, config, &info, log, Device::start) {
            Ok(()) => Ok(server),
            Err(error) => {
                // The device is not published, so the threads that did start would wait for
                // requests for ever. Giving up the device ends that wait.
                let _ = device.abandon(&mut server.control);
                server.join();
                let _ = device.forget(&mut server.control);
                Err(error)
            }
        }
    }

    /// Takes over from a dead server: requests that it had not answered come again.
    ///
    /// # Errors
    /// Fails with a [`UblkError`]; the device then holds its requests for another try.
    pub fn take_over<D>(pages: &Arc<D>, config: &Config, found: Found, log: &Log) -> Result<Server, UblkError>
    where
        D: PageDevice<Error = OpenError>,
        D::Lane: 'static,
    {
        let Found { device, control, info } = found;
        let mut server = Server::new(device, control, &info);
        server.start(lanes(pages, info.queues)?, config, &info, log, |device, control| {
            let_requests_return();
            device.end_recovery(control)
        })?;
        Ok(server)
    }

    fn new(device: Device, control: Control, info: &DeviceInfo) -> Server {
        let counters = std::iter::repeat_with(Counters::default).take(info.queues.into()).collect();
        Server { device, control, counters, threads: Vec::with_capacity(info.queues.into()) }
    }

    /// Starts a thread for each queue with its lane, and publishes the device.
    fn start<L: PageLane + 'static>(
        &mut self,
        lanes: Vec<L>,
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
        for (number, lane) in (0..queues).zip(lanes) {
            let failed = |source| UblkError::Queue { queue: number, queues, source };
            let engine = engine(lane, info, config.swap).map_err(failed)?;
            let thread = Thread {
                number,
                depth: info.depth,
                engine,
                character: Arc::clone(&character),
                // A thread that spins is not pinned: it would block those clients that run on its
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
                ReadyError::Flusher(None) => UblkError::Config(NOT_PROTECTED.to_owned()),
            })?;
        }
        publish(self.device, &mut self.control)?;
        self.shown();
        Ok(())
    }

    /// Waits until the block device's file appears; the kernel or udev makes it.
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

    /// The device that is served.
    pub fn device(&self) -> Device {
        self.device
    }

    /// Number of queues of the device.
    pub fn queues(&self) -> usize {
        self.counters.len()
    }

    /// The device's counts.
    pub fn stats(&self) -> Stats {
        let mut stats = Stats::default();
        self.counters.iter().for_each(|counters| stats.add(counters));
        stats
    }

    /// Removes the block device. The caller must have checked that nothing uses it: a kernel before
    /// Linux 7.0 removes it even while it is in use. From 7.0 on the driver refuses that. Returns
    /// false if a program has the device open, even only for reading. The server then goes on
    /// serving the device.
    ///
    /// # Errors
    /// Fails if the driver refuses for another reason. The server then goes on serving the device.
    pub fn stop(&mut self) -> Result<bool, UblkError> {
        let features = self.control.features();
        Ok(self.device.stop(&mut self.control, features)?)
    }

    /// Joins the threads of a device that was stopped, and removes the device from the driver.
    ///
    /// # Errors
    /// Fails with the driver's refusal.
    pub fn remove(mut self) -> Result<(), UblkError> {
        self.join();
        self.device.forget(&mut self.control)?;
        Ok(())
    }

    fn join(&mut self) {
        for thread in self.threads.drain(..) {
            // If the thread panicked, the panic hook has reported that.
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
    /// Number of the device's hardware queues, each of which takes a lane.
    pub fn queues(&self) -> u16 {
        self.info.queues
    }
}

/// All that a queue's thread is given when it starts.
struct Thread<L> {
    number: u16,
    depth: u16,
    engine: Engine<L>,
    character: Arc<OwnedFd>,
    processors: Option<CpuSet>,
    gate: Arc<SpinGate>,
    spin: Duration,
    swap: bool,
    must_flush: bool,
    counters: Arc<[Counters]>,
    log: Log,
}

impl<L: PageLane> Thread<L> {
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
            // Pinning only makes the queue faster, and a control group may forbid it.
            let _ = rustix::thread::sched_setaffinity(None, processors);
        }
        let spin = (!self.spin.is_zero()).then(|| Spin::new(&self.gate, self.spin));
        let counters = &self.counters[usize::from(number)];
        if self.swap {
            // The kernel allocates the io_uring's memory in one piece, or refuses. So use the
            // kernel's memory reserve. If the system denies that, the next daemon may have to try
            // again.
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
            // Without this thread, the requests of its queue would wait for ever. So panic: the
            // program's panic hook can end the process. The next daemon gets the requests again.
            panic!("ublk: queue {number} serves no more: {error}");
        }
    }
}

/// Waits until each processor that saw no server has put its request on the driver's list. Only the
/// end of the recovery reads that list. A request that comes to the list after that would wait for
/// ever (docs/ublk.md). Since Linux 6.15 (and 6.14.6) the driver gives requests to the server as
/// soon as all buffers are offered. Since 7.0 the buffers of one queue are enough.
fn let_requests_return() {
    // A processor looks for the server and puts its request back within one read-side section of
    // RCU. This membarrier waits for the end of such sections. The membarrier needs several
    // processors, none of them a nohz_full one.
    let several = std::thread::available_parallelism().is_ok_and(|processors| processors.get() > 1);
    if !several || rustix::thread::membarrier(MembarrierCommand::Global).is_err() {
        std::thread::sleep(RETURN);
    }
}

/// An error of the same kind as `error`, whose message also says what was being done.
pub(super) fn doing(what: &str, error: &io::Error) -> io::Error {
    io::Error::new(error.kind(), format!("{what}: {error}"))
}

/// Opens a lane for each queue.
fn lanes<D>(pages: &Arc<D>, queues: u16) -> Result<Vec<D::Lane>, OpenError>
where
    D: PageDevice<Error = OpenError>,
{
    (0..queues).map(|_| pages.open()).collect()
}

/// Makes a queue's engine, with its buffers.
fn engine<L: PageLane>(lane: L, info: &DeviceInfo, swap: bool) -> io::Result<Engine<L>> {
    let engine = Engine::new(lane, info.depth, info.buffer_bytes)
        .map_err(|error| doing("taking its buffers", &error))?;
    if swap && !engine.is_locked() {
        return Err(io::Error::other(
            "its buffers cannot be locked in memory, as swap needs: raise RLIMIT_MEMLOCK",
        ));
    }
    Ok(engine)
}

fn open(path: &str) -> Result<OwnedFd, UblkError> {
    let begun = Instant::now();
    loop {
        match rustix::fs::open(path, OFlags::RDWR | OFlags::CLOEXEC, Mode::empty()) {
            // Try again: the file may appear a moment after the device, and a dead server may still
            // hold it.
            Err(Errno::NOENT | Errno::BUSY | Errno::NXIO) if begun.elapsed() < PATIENCE => {
                std::thread::sleep(LOOK);
            }
            Err(errno) => return Err(UblkError::Open { path: path.to_owned(), source: errno.into() }),
            Ok(fd) => return Ok(fd),
        }
    }
}

/// Removes Weir's devices whose server died without a keeper: the driver has stopped them already.
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

#[cfg(test)]
mod tests {
    use super::*;
    use rustix::process::{Resource, Rlimit, setrlimit};
    use rustix::thread::{CapabilitySet, capabilities, set_capabilities};
    use weir_core::chain;
    use weir_system::fixture;
    use weir_volume::{Lane, Volume};

    fn lane() -> Lane {
        let config = weir_volume::Config { pages: 8, lanes: 1, depth: 8 };
        let store = weir_store::open(&"host:1MiB".parse().unwrap()).unwrap();
        Volume::create(config, vec![store]).unwrap().lane().unwrap()
    }

    #[test]
    fn a_character_device_that_cannot_be_opened_is_named() {
        let error = open("/dev/full/ublkc0").unwrap_err();
        assert_eq!(chain(&error), "/dev/full/ublkc0 does not open: Not a directory (os error 20)");
    }

    #[test]
    fn a_queue_whose_buffers_no_memory_can_hold_does_not_serve() {
        let info = DeviceInfo { depth: u16::MAX, buffer_bytes: u32::MAX, ..DeviceInfo::default() };
        let source = engine(lane(), &info, false).err().unwrap();
        let error = chain(&UblkError::Queue { queue: 1, queues: 4, source });
        let words = "queue 1 of 4 cannot serve; fewer or shallower queues need less memory: ";
        assert_eq!(error, format!("{words}taking its buffers: Cannot allocate memory (os error 12)"));
    }

    #[test]
    fn buffers_that_may_be_swapped_out_carry_no_swap() {
        fixture::alone("ublk::server::tests::buffers_that_may_be_swapped_out_carry_no_swap", || {
            setrlimit(Resource::Memlock, Rlimit { current: Some(0), maximum: Some(0) }).unwrap();
            let mut rights = capabilities(None).unwrap();
            rights.effective -= CapabilitySet::IPC_LOCK;
            set_capabilities(None, rights).unwrap();
            let info = DeviceInfo { depth: 4, buffer_bytes: 4096, ..DeviceInfo::default() };
            let error = engine(lane(), &info, true).err().unwrap().to_string();
            assert_eq!(error, "its buffers cannot be locked in memory, as swap needs: raise RLIMIT_MEMLOCK");
            engine(lane(), &info, false).unwrap_or_else(|error| panic!("{error}"));
        });
    }
}
