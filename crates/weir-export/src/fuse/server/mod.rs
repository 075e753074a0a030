//! The FUSE server as its owner uses it: it starts completely or not at all, and stops in bounded
//! time.

mod config;
mod hello;
mod open;

pub use config::{Config, FILE_NAME, ServeError, is_file_name};

use super::device::Device;
use super::disk::{Disk, Shape};
use super::mount::{self, Mount, owner};
use super::pool::{Pool, THREADS_MAX};
use super::ram_disk::{self, RamDisk};
use super::range::{IO_MAX, Ranges};
use super::ring::Uring;
use super::serve::{Ending, Service, Worker};
use super::stats::{Counters, Stats};
use config::check;
use open::{Begun, Opened, is_file, lies_in_memory, make, mounted};
use std::fmt;
use std::fs;
use std::io;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::path::{Path, PathBuf};
use std::sync::atomic::Ordering;
use std::sync::{Arc, mpsc};
use std::thread::JoinHandle;
use std::time::{Duration, Instant, SystemTime, UNIX_EPOCH};
use weir_core::log::{Level, Log};
use weir_core::swap_safety::NOT_PROTECTED;
use weir_device::PageDevice;
use weir_store::OpenError;
use weir_volume::Volume;

/// Bytes of a thread's stack. They are few, because `mlockall` makes all of them resident.
const STACK_BYTES: usize = 256 << 10;
/// A descriptor that a keeper holds beyond this process's end, for [`Server::take_over`].
#[derive(Debug)]
pub struct Handoff<'a> {
    /// The handoff's name.
    pub name: String,
    /// The handoff's descriptor.
    pub fd: BorrowedFd<'a>,
}

/// The name of the handoff that holds the connection.
const CONNECTION: &str = "connection";
/// The name of the handoff that holds the connection, if the server made the file under the mount.
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
    /// Number of threads that have an io_uring.
    rings: usize,
    mount: Option<Mount>,
    file: PathBuf,
    /// Whether the mount point is a file that this server made.
    made: bool,
    memory_locked: bool,
    /// The one file's size, if that may grow.
    shape: Option<Arc<Shape>>,
}

impl fmt::Debug for Server {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Server").field("file", &self.file).finish_non_exhaustive()
    }
}

impl Server {
    /// Mounts over `point`, starts every thread and takes all memory; the process may be sealed
    /// afterwards. If `point` is a directory, the file appears in it. A file that does not exist is
    /// made.
    ///
    /// # Errors
    /// Fails with a [`ServeError`]; nothing is left mounted or running then.
    pub fn start(
        volume: &Arc<Volume>,
        config: &Config,
        point: &Path,
        log: &Log,
    ) -> Result<Server, ServeError> {
        let (bytes, may_ring) = (volume.bytes(), lies_in_memory(volume));
        Server::start_over(volume, (bytes, false), may_ring, config, point, log)
    }

    /// Does the same as [`start`](Server::start), for any page device of `bytes` bytes, which may
    /// [grow](Server::grow). Requests come only by `/dev/fuse`, and not by io_uring.
    ///
    /// # Errors
    /// Fails with a [`ServeError`]; nothing is left mounted or running then.
    pub fn start_device<D>(
        device: &Arc<D>,
        bytes: u64,
        config: &Config,
        point: &Path,
        log: &Log,
    ) -> Result<Server, ServeError>
    where
        D: PageDevice<Error = OpenError>,
        D::Lane: 'static,
    {
        Server::start_over(device, (bytes, true), false, config, point, log)
    }

    fn start_over<D>(
        device: &Arc<D>,
        (bytes, grows): (u64, bool),
        may_ring: bool,
        config: &Config,
        point: &Path,
        log: &Log,
    ) -> Result<Server, ServeError>
    where
        D: PageDevice<Error = OpenError>,
        D::Lane: 'static,
    {
        check(config)?;
        mount::replace_dead(point)?;
        let made = make(point)?;
        let begun = Begun { made: made.then(|| point.to_owned()) };
        let owner = owner(point);
        let opened = Opened { made, ..mounted(may_ring, config, point, log)? };
        if !opened.can_resend && opened.rings.is_empty() {
            log(
                Level::Info,
                format_args!(
                    "fuse: this kernel cannot send requests again: those that a daemon has when it is killed fail"
                ),
            );
        }
        let server = Server::disk(device, (bytes, grows), config, opened, owner, log)?;
        begun.keep();
        Ok(server)
    }

    /// Takes over from a server that was killed. `take` returns its [`handoffs`](Server::handoffs)
    /// by name. Requests that it had read are done again.
    ///
    /// # Errors
    /// Fails with a [`ServeError`].
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
        // Take all queues of the dead server, even if it had more queues than this server has
        // threads. The resend brings the requests of all these queues.
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
        // The files belong to this process's user. The mount hides the real owner of the mount
        // point, and a look at the mount would wait for this process itself.
        let owner = (rustix::process::geteuid().as_raw(), rustix::process::getegid().as_raw());
        let opened = Opened { mount, connection, queues, can_resend, made, rings: Vec::new() };
        Server::disk(volume, (volume.bytes(), false), config, opened, owner, log)
    }

    /// Mounts an empty file system on the directory `point`; its files' pages lie in the volume.
    /// All content is gone when the server ends. An unmount ends the server.
    ///
    /// # Errors
    /// Fails with a [`ServeError`]; nothing is left mounted or running then.
    pub fn ram_disk(
        volume: &Arc<Volume>,
        config: &Config,
        point: &Path,
        log: &Log,
    ) -> Result<Server, ServeError> {
        check(config)?;
        Server::look_at(point)?;
        let owner = owner(point);
        let opened = mounted(lies_in_memory(volume), config, point, log)?;
        let shared = ram_disk::Shared::new(volume.pages(), owner);
        let file = opened.mount.point().to_owned();
        Server::new(volume, config, opened, file, log, || RamDisk {
            shared: Arc::clone(&shared),
            listing: Vec::with_capacity(IO_MAX as usize / 8),
        })
    }

    /// Checks whether a [`ram_disk`](Server::ram_disk) can be mounted at `point`, before its memory
    /// is taken. Removes the mount of a dead server.
    ///
    /// # Errors
    /// Fails as [`ram_disk`](Server::ram_disk) does if `point` is no directory, or has a dead mount
    /// that cannot be removed.
    pub fn look_at(point: &Path) -> Result<(), ServeError> {
        mount::replace_dead(point)?;
        match fs::metadata(point) {
            Ok(meta) if meta.is_dir() => Ok(()),
            Ok(_) => Err(ServeError::Config(format!("{} is no directory", point.display()))),
            Err(source) => Err(mount::MountError::Point { path: point.to_owned(), source }.into()),
        }
    }

    /// Starts to serve a file system of one file, which holds the bytes of a page device.
    fn disk<D>(
        device: &Arc<D>,
        (bytes, grows): (u64, bool),
        config: &Config,
        opened: Opened,
        owner: (u32, u32),
        log: &Log,
    ) -> Result<Server, ServeError>
    where
        D: PageDevice<Error = OpenError>,
        D::Lane: 'static,
    {
        let mut file = opened.mount.point().to_owned();
        let is_file = is_file(&file);
        if !is_file {
            file.push(&config.name);
        }
        let shape = Arc::new(Shape {
            name: (!is_file).then(|| config.name.clone()),
            bytes: bytes.into(),
            grows,
            owner,
            born: SystemTime::now().duration_since(UNIX_EPOCH).map_or(0, |since| since.as_secs()),
        });
        let mut server =
            Server::new(device, config, opened, file, log, || Disk { shape: Arc::clone(&shape) })?;
        server.shape = grows.then_some(shape);
        Ok(server)
    }

    /// Makes a descriptor of the connection for each thread, and starts the threads.
    fn new<D, S>(
        device: &Arc<D>,
        config: &Config,
        opened: Opened,
        file: PathBuf,
        log: &Log,
        service: impl Fn() -> S,
    ) -> Result<Server, ServeError>
    where
        D: PageDevice<Error = OpenError>,
        D::Lane: 'static,
        S: Service<D::Lane> + 'static,
    {
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
            rings: rings.len(),
            file,
            mount: Some(mount),
            made,
            memory_locked: true,
            shape: None,
        };
        server.start_threads(device, config, log, rings, service)?;
        Ok(server)
    }

    fn start_threads<D, S>(
        &mut self,
        device: &Arc<D>,
        config: &Config,
        log: &Log,
        rings: Vec<Uring>,
        service: impl Fn() -> S,
    ) -> Result<(), ServeError>
    where
        D: PageDevice<Error = OpenError>,
        D::Lane: 'static,
        S: Service<D::Lane> + 'static,
    {
        let mut rings = rings.into_iter();
        let resources = |error| ServeError::Resources(config.threads, error);
        let must_flush = config.swap && !config.unsafe_no_flusher;
        let (ready, started) = mpsc::channel();
        for number in 0..config.threads {
            let lane = device.open()?;
            let ranges = Ranges::new(lane, Arc::clone(&self.pool)).map_err(resources)?;
            let queue = self.queues[number].as_fd().try_clone_to_owned().and_then(Device::adopt);
            let mut worker = Worker::new(
                number,
                queue.map_err(resources)?,
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
                if !fine {
                    return;
                }
                match worker.run() {
                    Ending::Unmounted => worker.pool.gone(),
                    // Without this thread, requests that only it serves would wait for ever. So
                    // panic: the program's panic hook can end the process.
                    Ending::Broken(errno) if !worker.pool.is_stopping() => {
                        panic!("fuse: thread {number} cannot serve: {errno}");
                    }
                    Ending::Broken(_) | Ending::Stopped => {}
                }
            };
            let name = format!("weir-fuse-{number}");
            let thread = std::thread::Builder::new().name(name).stack_size(STACK_BYTES).spawn(serve);
            self.threads.push(thread.map_err(resources)?);
        }
        for _ in 0..config.threads {
            match started.recv().expect("every thread answers") {
                Ok(true) => {}
                Ok(false) => return Err(ServeError::Config(NOT_PROTECTED.to_owned())),
                Err(missing) => return Err(ServeError::Flusher(missing)),
            }
        }
        Ok(())
    }

    /// The path of the file that holds the volume's bytes.
    pub fn file(&self) -> &Path {
        &self.file
    }

    /// Makes the file `bytes` bytes long, which is the page device's present size. Programs that
    /// ask for the file's size get the new one from then on. A loop device over the file keeps its
    /// old size until a user runs `losetup -c`.
    ///
    /// # Panics
    /// Panics if the server was not started by [`start_device`](Server::start_device).
    pub fn grow(&self, bytes: u64) {
        let shape = self.shape.as_ref().expect("its file can grow");
        shape.bytes.store(bytes, Ordering::Relaxed);
        // A loop device does not ask this server: it takes the size that the kernel has seen last.
        // So make the kernel ask for the size now. This call fails if the file is unmounted, and
        // then no program can see the file.
        let _ = fs::metadata(&self.file);
    }

    /// The server's counts.
    pub fn stats(&self) -> Stats {
        let mut stats = Stats { threads: self.counters.len() as u64, ..Stats::default() };
        self.counters.iter().for_each(|counters| stats.add(counters));
        stats
    }

    /// Becomes readable when the file system was unmounted: then there is nothing left to serve.
    pub fn unmounted(&self) -> BorrowedFd<'_> {
        self.pool.unmounted()
    }

    /// Whether all I/O memory of the server is locked in RAM.
    pub fn is_memory_locked(&self) -> bool {
        self.memory_locked
    }

    /// The descriptors that a keeper must hold so that a new daemon can take over from this one. If
    /// the kernel cannot send requests again, the queues are not among them. Then requests that a
    /// killed daemon had read fail at once, and do not wait for ever. The list is empty if requests
    /// come by io_uring, which cannot be taken over.
    pub fn handoffs(&self) -> Vec<Handoff<'_>> {
        if self.rings > 0 {
            return Vec::new();
        }
        let name = if self.made { CONNECTION_OF_OURS } else { CONNECTION };
        let mut all = vec![Handoff { name: name.to_owned(), fd: self.connection.as_fd() }];
        if self.can_resend {
            let queues = self.queues.iter().enumerate();
            all.extend(queues.map(|(number, queue)| Handoff { name: queue_name(number), fd: queue.as_fd() }));
        }
        all
    }

    /// Unmounts the file system if no program has anything open there; then
    /// [`unmounted`](Server::unmounted) becomes readable.
    ///
    /// # Errors
    /// Fails with the reason why the file system stays mounted: `EBUSY`, or the message of
    /// `fusermount3`.
    pub fn unmount_unused(&self) -> io::Result<()> {
        self.mount.as_ref().map_or(Ok(()), Mount::unmount_unused)
    }

    /// Answers the requests that were read, ends the threads, and unmounts. Returns how many
    /// threads did not end within `grace`, because a store does not answer.
    pub fn stop(mut self, grace: Duration) -> usize {
        self.end(grace)
    }

    /// Abandons the server as the death of its process would: the threads end, and the mount stays.
    /// Only tests of taking over call this.
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
                // If the thread panicked, the panic hook has reported that.
                let _ = thread.join();
            } else {
                busy += 1;
            }
        }
        if let Some(mount) = self.mount.take() {
            let point = mount.point().to_owned();
            // Ignore an error. A mount that cannot be removed now still loses its connection, as
            // soon as the descriptors are closed.
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
        // This server took over, and then could not start. It leaves the mount as it was, for the
        // next server.
        if self.mount.as_ref().is_some_and(Mount::stays) {
            self.mount.take();
        }
        self.end(Duration::from_secs(2));
    }
}
