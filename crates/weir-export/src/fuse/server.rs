//! The server as its owner sees it: mounted, started whole, stopped in bounded time.

use super::device::{Device, Incoming};
use super::disk::{Disk, Shape};
use super::mount::{Mount, MountError, Options, SUBTYPE, owner};
use super::pool::{Pool, THREADS_MAX};
use super::ram_disk::{self, RamDisk};
use super::range::{IO_MAX, Ranges};
use super::reply::Reply as _;
use super::request::{self, Request};
use super::ring::{self, Ring};
use super::serve::{Ending, Service, Worker};
use super::stats::{Counters, Stats};
use super::wire::{InitIn, InitOut, MAJOR, MINOR, MINOR_LEAST, init};
use crate::log::{Level, Log};
use rustix::event::{PollFd, PollFlags, Timespec};
use std::fmt;
use std::fs::{self, OpenOptions};
use std::io;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::os::unix::fs::OpenOptionsExt;
use std::path::{Path, PathBuf};
use std::sync::{Arc, mpsc};
use std::thread::JoinHandle;
use std::time::{Duration, Instant, SystemTime, UNIX_EPOCH};
use weir_core::PAGE_SIZE;
use weir_core::swap_safety::Unprotected;
use weir_store::OpenError;
use weir_volume::Volume;

/// Stack of a thread; with `mlockall` all of it is resident.
const STACK_BYTES: usize = 256 << 10;
/// How long the kernel takes at most to say hello.
const HELLO_WITHIN: Timespec = Timespec { tv_sec: 10, tv_nsec: 0 };
/// What the kernel wants to have room for before it says hello (`FUSE_MIN_READ_BUFFER`), and more.
const HELLO_BYTES: usize = 64 << 10;
/// Requests that the kernel may have in flight that nobody waits for: all of a loop device's.
const BACKGROUND_MAX: u16 = 512;

/// How a volume is served.
#[derive(Clone, Debug)]
pub struct Config {
    /// The file's name, where the mount point is a directory.
    pub name: String,
    /// Threads that serve: each has a lane and about 2 MiB of locked memory.
    pub threads: usize,
    /// How long a thread looks for the next request before it sleeps; zero for not at all.
    pub spin: Duration,
    /// The file is to carry swap: every thread must have the I/O flusher flag unless
    /// [`unsafe_no_flusher`](Config::unsafe_no_flusher) is set.
    pub swap: bool,
    /// Serve swap without the flusher flag.
    pub unsafe_no_flusher: bool,
}

impl Default for Config {
    fn default() -> Self {
        Config {
            name: "weir".to_owned(),
            threads: 4,
            spin: Duration::ZERO,
            swap: false,
            unsafe_no_flusher: false,
        }
    }
}

/// Why a server cannot start.
#[derive(Debug, thiserror::Error)]
pub enum ServeError {
    /// It cannot be mounted.
    #[error(transparent)]
    Mount(#[from] MountError),
    /// The file to mount over cannot be made.
    #[error("cannot make {path}, to mount over it")]
    Point {
        /// Which.
        path: PathBuf,
        /// Why.
        #[source]
        source: io::Error,
    },
    /// The kernel's FUSE is too old, or does not answer.
    #[error("{0}")]
    Kernel(String),
    /// A configuration that is no good.
    #[error("{0}")]
    Config(String),
    /// A thread's lane cannot be opened.
    #[error("FUSE thread {0} gets no lane")]
    Lane(usize, #[source] OpenError),
    /// A thread does not have the flusher flag.
    #[error("a thread that would serve swap lacks the I/O flusher flag")]
    Flusher(#[source] Unprotected),
    /// No memory, threads or descriptors.
    #[error("cannot take memory, threads and descriptors for {0} FUSE threads; ask for fewer")]
    Resources(usize, #[source] io::Error),
}

/// A descriptor that outlives this process in a keeper, for [`Server::take_over`].
#[derive(Debug)]
pub struct Keepsake<'a> {
    /// What it is.
    pub name: String,
    /// Its descriptor.
    pub fd: BorrowedFd<'a>,
}

/// The connection.
const CONNECTION: &str = "connection";
/// The connection, of a server that made the file it is mounted over.
const CONNECTION_OF_OURS: &str = "connection-made";

fn queue_name(number: usize) -> String {
    format!("queue.{number}")
}

/// A running server. Dropping it stops and unmounts it.
pub struct Server {
    pool: Arc<Pool>,
    counters: Arc<[Counters]>,
    threads: Vec<JoinHandle<()>>,
    /// The connection's own descriptor, and one for each thread.
    connection: Device,
    queues: Vec<Device>,
    can_resend: bool,
    mount: Option<Mount>,
    file: PathBuf,
    /// The mount point is a file that this server made.
    made: bool,
    memory_locked: bool,
}

impl fmt::Debug for Server {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Server").field("file", &self.file).finish_non_exhaustive()
    }
}

impl Server {
    /// Mounts over `point`, starts every thread and takes all memory; the process may be sealed afterwards. If `point` is a
    /// directory the file appears in it; a file that does not exist is made.
    ///
    /// # Errors
    /// See [`ServeError`]; nothing is left mounted or running then.
    pub fn start(
        volume: &Arc<Volume>,
        config: &Config,
        point: &Path,
        log: &Log,
    ) -> Result<Server, ServeError> {
        check(config)?;
        let made = make(point)?;
        let begun = Begun { made: made.then(|| point.to_owned()) };
        let owner = owner(point);
        let (mount, connection, flags, rings) = mounted(config, point, log)?;
        let can_resend = flags & init::HAS_RESEND != 0;
        if !can_resend {
            log(
                Level::Info,
                format_args!(
                    "fuse: this kernel cannot send requests again: those that a daemon has when it is killed fail"
                ),
            );
        }
        let opened = Opened { mount, connection, queues: Vec::new(), can_resend, made, rings };
        let server = Server::disk(volume, config, opened, owner, log)?;
        begun.keep();
        Ok(server)
    }

    /// Goes on where a server that is gone was killed. `take` gives its [`keepsakes`](Server::keepsakes) by name. Requests
    /// that it had read are done again.
    ///
    /// # Errors
    /// See [`ServeError`].
    pub fn take_over(
        volume: &Arc<Volume>,
        config: &Config,
        point: &Path,
        take: &mut dyn FnMut(&str) -> Option<OwnedFd>,
        log: &Log,
    ) -> Result<Server, ServeError> {
        check(config)?;
        let resources = |error| ServeError::Resources(config.threads, error);
        let ours = take(CONNECTION_OF_OURS);
        let made = ours.is_some();
        let connection = ours.or_else(|| take(CONNECTION)).ok_or_else(|| {
            ServeError::Kernel(format!("the keeper does not hold the connection of {}", point.display()))
        })?;
        let connection = Device::adopt(connection).map_err(resources)?;
        // More than there are threads now were of a configuration with more: what they had comes back by the resend too.
        let kept: Vec<OwnedFd> = (0..THREADS_MAX).map_while(|number| take(&queue_name(number))).collect();
        let queues: Vec<_> =
            kept.into_iter().map(Device::adopt).collect::<io::Result<_>>().map_err(resources)?;
        let can_resend = !queues.is_empty();
        if can_resend {
            connection.resend().map_err(|errno| {
                ServeError::Kernel(format!("the kernel does not send requests again: {errno}"))
            })?;
        }
        let mount = Mount::adopt(point).map_err(resources)?;
        // The mount point's owner is behind the mount, and a look at it would wait for this process.
        let owner = (rustix::process::geteuid().as_raw(), rustix::process::getegid().as_raw());
        let opened = Opened { mount, connection, queues, can_resend, made, rings: Vec::new() };
        Server::disk(volume, config, opened, owner, log)
    }

    /// Mounts an empty file system on the directory `point`, whose files' pages lie in the volume. All that it holds is gone
    /// when the server ends, which it does by itself when somebody unmounts it.
    ///
    /// # Errors
    /// See [`ServeError`]; nothing is left mounted or running then.
    pub fn ram_disk(
        volume: &Arc<Volume>,
        config: &Config,
        point: &Path,
        log: &Log,
    ) -> Result<Server, ServeError> {
        check(config)?;
        if fs::metadata(point).is_ok_and(|meta| !meta.is_dir()) {
            return Err(ServeError::Config(format!("{} is no directory", point.display())));
        }
        let owner = owner(point);
        let (mount, connection, _, rings) = mounted(config, point, log)?;
        let shared = ram_disk::Shared::new(volume.pages(), owner);
        let file = mount.point().to_owned();
        let opened = Opened { mount, connection, queues: Vec::new(), can_resend: false, made: false, rings };
        Server::new(volume, config, opened, file, log, || RamDisk {
            shared: Arc::clone(&shared),
            listing: Vec::with_capacity(IO_MAX as usize / 8),
        })
    }

    /// One file for the volume.
    fn disk(
        volume: &Arc<Volume>,
        config: &Config,
        opened: Opened,
        owner: (u32, u32),
        log: &Log,
    ) -> Result<Server, ServeError> {
        let mut file = opened.mount.point().to_owned();
        let is_file = is_file(&file);
        if !is_file {
            file.push(&config.name);
        }
        let shape = Arc::new(Shape {
            name: (!is_file).then(|| config.name.clone()),
            bytes: volume.bytes(),
            owner,
            born: SystemTime::now().duration_since(UNIX_EPOCH).map_or(0, |since| since.as_secs()),
        });
        Server::new(volume, config, opened, file, log, || Disk { shape: Arc::clone(&shape) })
    }

    /// A descriptor for each thread, and the threads.
    fn new<S: Service + 'static>(
        volume: &Arc<Volume>,
        config: &Config,
        opened: Opened,
        file: PathBuf,
        log: &Log,
        service: impl Fn() -> S,
    ) -> Result<Server, ServeError> {
        let resources = |error| ServeError::Resources(config.threads, error);
        let Opened { mount, connection, mut queues, can_resend, made, rings } = opened;
        while queues.len() < config.threads {
            queues.push(connection.clone_queue().map_err(resources)?);
        }
        queues.truncate(config.threads);
        let mut server = Server {
            pool: Arc::new(Pool::new(config.threads).map_err(resources)?),
            counters: (0..config.threads).map(|_| Counters::default()).collect(),
            threads: Vec::with_capacity(config.threads),
            connection,
            queues,
            can_resend,
            file,
            mount: Some(mount),
            made,
            memory_locked: true,
        };
        server.start_threads(volume, config, log, rings, service)?;
        Ok(server)
    }

    fn start_threads<S: Service + 'static>(
        &mut self,
        volume: &Arc<Volume>,
        config: &Config,
        log: &Log,
        rings: Vec<Ring>,
        service: impl Fn() -> S,
    ) -> Result<(), ServeError> {
        let mut rings = rings.into_iter();
        let resources = |error| ServeError::Resources(config.threads, error);
        let must_flush = config.swap && !config.unsafe_no_flusher;
        let (ready, started) = mpsc::channel();
        for number in 0..config.threads {
            let lane = volume.lane().map_err(|error| ServeError::Lane(number, error))?;
            let ranges = Ranges::new(lane, Arc::clone(&self.pool)).map_err(resources)?;
            let device = self.queues[number].as_fd().try_clone_to_owned().and_then(Device::adopt);
            let mut worker = Worker::new(
                number,
                device.map_err(resources)?,
                ranges,
                service(),
                Arc::clone(&self.pool),
                config.spin,
                Arc::clone(&self.counters),
                Arc::clone(log),
            )
            .map_err(resources)?;
            worker.ring = rings.next();
            self.memory_locked &= worker.is_locked();
            let ready = ready.clone();
            let serve = move || {
                let flusher = if must_flush { weir_core::swap_safety::has_io_flusher() } else { Ok(true) };
                let fine = matches!(flusher, Ok(true));
                let _ = ready.send(flusher);
                drop(ready);
                if fine && worker.run() == Ending::Unmounted {
                    worker.pool.gone();
                }
            };
            let name = format!("weir-fuse-{number}");
            let thread = std::thread::Builder::new().name(name).stack_size(STACK_BYTES).spawn(serve);
            self.threads.push(thread.map_err(resources)?);
        }
        for _ in 0..config.threads {
            match started.recv().expect("every thread answers") {
                Ok(true) => {}
                Ok(false) => {
                    let text = "the file is to carry swap, and the I/O flusher flag is not set: set it first in main";
                    return Err(ServeError::Config(text.to_owned()));
                }
                Err(missing) => return Err(ServeError::Flusher(missing)),
            }
        }
        Ok(())
    }

    /// The file that stands for the volume.
    pub fn file(&self) -> &Path {
        &self.file
    }

    /// Its counts.
    pub fn stats(&self) -> Stats {
        let mut stats = Stats { threads: self.counters.len() as u64, ..Stats::default() };
        self.counters.iter().for_each(|counters| stats.add(counters));
        stats
    }

    /// Becomes readable when somebody has unmounted it: then there is nothing left to serve.
    pub fn unmounted(&self) -> BorrowedFd<'_> {
        self.pool.unmounted()
    }

    /// Whether all its I/O memory is pinned in RAM.
    pub fn is_memory_locked(&self) -> bool {
        self.memory_locked
    }

    /// What a keeper must hold so that a new daemon can go on after this one was killed. Where the kernel cannot send requests
    /// again, the queues are not among it: then what a killed daemon had read fails at once, and does not wait for ever.
    pub fn keepsakes(&self) -> Vec<Keepsake<'_>> {
        let name = if self.made { CONNECTION_OF_OURS } else { CONNECTION };
        let mut all = vec![Keepsake { name: name.to_owned(), fd: self.connection.as_fd() }];
        if self.can_resend {
            let queues = self.queues.iter().enumerate();
            all.extend(
                queues.map(|(number, queue)| Keepsake { name: queue_name(number), fd: queue.as_fd() }),
            );
        }
        all
    }

    /// Answers what has been read, lets the threads end, and unmounts. Returns how many threads did not come back within
    /// `grace`, because a store answers nothing.
    pub fn stop(mut self, grace: Duration) -> usize {
        self.end(grace)
    }

    /// Gives the server up as the death of its process would: the threads end, and the mount stays. For tests of taking over.
    pub fn abandon(mut self) {
        if let Some(mount) = self.mount.take() {
            mount.leave();
        }
        self.end(Duration::from_secs(10));
    }

    fn end(&mut self, grace: Duration) -> usize {
        self.pool.stop();
        let deadline = Instant::now() + grace;
        while self.threads.iter().any(|thread| !thread.is_finished()) && Instant::now() < deadline {
            std::thread::sleep(Duration::from_millis(1));
        }
        let mut busy = 0;
        for thread in self.threads.drain(..) {
            if thread.is_finished() {
                // A panic there has been reported by the panic hook.
                let _ = thread.join();
            } else {
                busy += 1;
            }
        }
        if let Some(mount) = self.mount.take() {
            let point = mount.point().to_owned();
            // Where it cannot be unmounted it is dead all the same, as soon as the descriptors are closed.
            let _ = mount.unmount();
            if self.made {
                let _ = fs::remove_file(point);
            }
        }
        busy
    }
}

impl Drop for Server {
    fn drop(&mut self) {
        self.end(Duration::from_secs(2));
    }
}

/// A connection that is mounted, and what there is to it before there are threads.
struct Opened {
    mount: Mount,
    connection: Device,
    /// Those of a server before.
    queues: Vec<Device>,
    can_resend: bool,
    made: bool,
    rings: Vec<Ring>,
}

/// A start that may fail: what it made goes with it.
struct Begun {
    made: Option<PathBuf>,
}

impl Begun {
    fn keep(mut self) {
        self.made = None;
    }
}

impl Drop for Begun {
    fn drop(&mut self) {
        if let Some(path) = &self.made {
            let _ = fs::remove_file(path);
        }
    }
}

fn check(config: &Config) -> Result<(), ServeError> {
    if config.threads == 0 || config.threads > THREADS_MAX {
        let error = format!("{} FUSE threads; accepted: 1 to {THREADS_MAX}", config.threads);
        return Err(ServeError::Config(error));
    }
    if config.name.is_empty() || config.name.len() > 255 || config.name.contains(['/', '\0', ',']) {
        let error = format!(
            "the file cannot have the name {:?}; accepted: 1 to 255 bytes without / and ,",
            config.name
        );
        return Err(ServeError::Config(error));
    }
    Ok(())
}

/// Mounts on `point` and says hello: the mount, its connection, what both sides know, and the rings to use.
fn mounted(config: &Config, point: &Path, log: &Log) -> Result<(Mount, Device, u64, Vec<Ring>), ServeError> {
    let options =
        Options { source: &config.name, subtype: SUBTYPE, default_permissions: true, read_max: IO_MAX };
    let var = |name, default| {
        std::env::var(name).ok().and_then(|text: String| text.parse().ok()).unwrap_or(default)
    };
    let mut rings = Vec::new();
    if var("WEIR_RING", 0) > 0 && ring::is_enabled() {
        match Ring::prepare(config.threads, var("WEIR_RING", 0), IO_MAX as usize) {
            Ok(prepared) => rings = prepared,
            Err(error) => log(Level::Info, format_args!("fuse: no ring, /dev/fuse it is: {error}")),
        }
    }
    let (mount, connection) = Mount::new(point, &options)?;
    let flags = greet(&connection, !rings.is_empty())?;
    if flags & init::OVER_IO_URING == 0 {
        rings.clear();
    }
    Ok((mount, connection, flags, rings))
}

/// Makes the file to mount over, if there is nothing. Whether it did.
fn make(point: &Path) -> Result<bool, ServeError> {
    match OpenOptions::new().write(true).create_new(true).mode(0o600).open(point) {
        Ok(_) => Ok(true),
        Err(error) if error.kind() == io::ErrorKind::AlreadyExists => Ok(false),
        // What is mounted there is looked at later.
        Err(error) if error.raw_os_error() == Some(rustix::io::Errno::NOTCONN.raw_os_error()) => Ok(false),
        Err(source) => Err(ServeError::Point { path: point.to_owned(), source }),
    }
}

/// Whether the mount's root is a file. Asks the mount table's device only: a stat would wait for this process.
fn is_file(point: &Path) -> bool {
    // O_PATH resolves the mount without asking its server, and the type of a root inode is known from the mount.
    use rustix::fs::{AtFlags, Mode, OFlags, StatxFlags};
    let open = rustix::fs::open(point, OFlags::PATH | OFlags::CLOEXEC, Mode::empty());
    let kind = open.and_then(|fd| {
        rustix::fs::statx(&fd, "", AtFlags::EMPTY_PATH | AtFlags::STATX_DONT_SYNC, StatxFlags::TYPE)
    });
    kind.is_ok_and(|stat| u32::from(stat.stx_mode) & 0o170000 == 0o100000)
}

/// Answers the kernel's first request. Returns what both sides know, of what the kernel offered.
fn greet(connection: &Device, ring: bool) -> Result<u64, ServeError> {
    let failed =
        |error: io::Error| ServeError::Kernel(format!("the kernel's FUSE does not say hello: {error}"));
    let mut input = vec![0; HELLO_BYTES];
    let mut fds = [PollFd::from_borrowed_fd(connection.as_fd(), PollFlags::IN)];
    loop {
        if rustix::event::poll(&mut fds, Some(&HELLO_WITHIN)).map_err(|errno| failed(errno.into()))? == 0 {
            return Err(failed(io::ErrorKind::TimedOut.into()));
        }
        let Incoming::Request(length) = connection.read(&mut input).map_err(|errno| failed(errno.into()))?
        else {
            continue;
        };
        let message = request::parse(&input[..length]).map_err(|error| failed(io::Error::other(error)))?;
        let Request::Init { offer, flags } = message.request else {
            return Err(failed(io::Error::other("it began with another request")));
        };
        let (answer, more) = reply_to(&offer, flags, ring)?;
        connection.answer(message.header.unique, &answer.encode()).map_err(|errno| failed(errno.into()))?;
        if !more {
            return Ok(flags);
        }
    }
}

/// What to answer to the kernel's offer, and whether it will offer again.
fn reply_to(offer: &InitIn, flags: u64, ring: bool) -> Result<(InitOut, bool), ServeError> {
    if offer.major > MAJOR {
        // It comes back with our version.
        return Ok((InitOut { major: MAJOR, minor: MINOR, ..InitOut::default() }, true));
    }
    if offer.major < MAJOR || offer.minor < MINOR_LEAST {
        return Err(ServeError::Kernel(format!(
            "this kernel speaks FUSE {}.{}; {MAJOR}.{MINOR_LEAST} is needed (Linux 5.4)",
            offer.major, offer.minor
        )));
    }
    let want = init::ASYNC_READ
        | init::BIG_WRITES
        | init::ASYNC_DIO
        | init::PARALLEL_DIROPS
        | init::MAX_PAGES
        | init::INIT_EXT
        | init::HAS_RESEND;
    let want = if ring { want | init::OVER_IO_URING } else { want };
    let agreed = flags & want;
    let answer = InitOut {
        major: MAJOR,
        minor: MINOR.min(offer.minor),
        max_readahead: offer.max_readahead,
        flags: agreed as u32,
        flags2: (agreed >> 32) as u32,
        max_background: BACKGROUND_MAX,
        congestion_threshold: BACKGROUND_MAX,
        max_write: IO_MAX,
        time_gran: 1,
        max_pages: (IO_MAX as usize / PAGE_SIZE) as u16,
        ..InitOut::default()
    };
    Ok((answer, false))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_kernels_offer_is_answered_by_what_both_know() {
        let offer = |major, minor| InitIn { major, minor, max_readahead: 131_072, flags: 0 };
        let (answer, more) =
            reply_to(&offer(7, 45), init::HAS_RESEND | init::ASYNC_DIO | 1 << 60, false).unwrap();
        assert!(!more);
        assert_eq!((answer.minor, answer.max_pages, answer.max_write), (MINOR, 256, 1 << 20));
        assert_eq!((answer.flags, answer.flags2), (1 << 15, 1 << 7));
        let (answer, more) = reply_to(&offer(8, 0), 0, false).unwrap();
        assert!(more && answer.major == 7);
        for (major, minor) in [(7, 30), (6, 40)] {
            let error = reply_to(&offer(major, minor), 0, false).unwrap_err().to_string();
            assert!(error.contains("Linux 5.4"), "{error}");
        }
    }
}
