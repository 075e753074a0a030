//! `weir cache create` and `weir cache open`: the cache in the foreground, until it is detached.

use super::control::{self, Request, Service};
use super::front::{FrontEnds, Wanted};
use super::home::{Home, HomeUrl};
use super::memory::{Job, Memory};
use super::options::{CacheOptions, CreateOptions};
use super::report::Report;
use super::trace;
use crate::{failure, progress};
use rustix::event::{PollFd, PollFlags};
use std::fmt::Display;
use std::io::Read as _;
use std::os::fd::{AsFd, OwnedFd};
use std::os::unix::net::UnixStream;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, PoisonError};
use std::thread;
use std::time::{Duration, Instant};
use weir_cache::{Cache, Config, Mode, WriteBack};
use weir_cli::failure::{Failure, chain};
use weir_core::log::{self, Level, Log as Logger};
use weir_core::{ByteSize, PAGE_SIZE};
use weir_daemon::control::{Export, Moved, Progress};
use weir_daemon::{Start, bug, core_dump, warn_of_unlocked_memory};
use weir_log::{Cleaner, Log};
use weir_store::Room;
use weir_system::signals;

/// Number of operations that each thread may have in flight.
const DEPTH: usize = 64;
/// Time that requests under way may take when the front ends end.
const GRACE: Duration = Duration::from_secs(10);
/// Time between two reports of a flush's or a detach's progress.
const TELL_EVERY: Duration = Duration::from_millis(200);
/// A detach gives up when no page could be written home for this long.
const STUCK: Duration = Duration::from_secs(15);

/// Serves a cache until it is detached. Its home is made as `create` says, or opened.
pub fn run(options: &CacheOptions, create: Option<&CreateOptions>) -> Result<(), Failure> {
    let log = log::to_stderr(Level::Info);
    signals::ignore_strays();
    core_dump::forbid().map_err(failure::of)?;
    bug::end_process(&log, false);
    // Install signal handlers first, so that an early SIGTERM also ends the cache in good order.
    let (mut told, tell) = UnixStream::pair().map_err(Failure::failed)?;
    told.set_nonblocking(true).map_err(Failure::failed)?;
    for signal in signals::END {
        let tell = tell.try_clone().map_err(Failure::failed)?;
        signal_hook::low_level::pipe::register(signal, tell).map_err(Failure::failed)?;
    }
    let wanted = Wanted::new(options)?;
    // One lane more for the cache's write-back.
    let lanes = wanted.lanes() as u32 + 1;
    let mut start =
        Start::new(progress::show(&log), || is_told(&mut told).then_some(signal_hook::consts::SIGTERM));
    let url: &dyn Display = match &options.home {
        HomeUrl::Log(url) => url,
        HomeUrl::Raw(_) => &options.store,
    };
    let opened = Home::open(options, create, lanes, &mut start.watch(url));
    let is_ended = start.ended_by().is_some();
    drop(start);
    if is_ended {
        return Err(Failure::Said);
    }
    let home = opened?;
    let mut start =
        Start::new(progress::show(&log), || is_told(&mut told).then_some(signal_hook::consts::SIGTERM));
    let opened = weir_store::open_watched(&options.store, Room::Reserved, &mut start.watch(&options.store));
    let is_ended = start.ended_by().is_some();
    drop(start);
    if is_ended {
        return Err(Failure::Said);
    }
    let store = opened.map_err(failure::of)?;
    let is_scratch_log = home.log.is_some() && home.is_scratch;
    let default = if is_scratch_log { Config::DIRTY_BEFORE_SCRATCH_LOG } else { Config::DIRTY };
    let config = Config {
        lanes: wanted.lanes(),
        depth: DEPTH,
        mode: options.mode,
        stream_pages: u32::try_from(options.stream.0 / PAGE_SIZE as u64).unwrap_or(u32::MAX),
        ..Default::default()
    };
    let config = config.with_dirty(options.dirty.unwrap_or(default));
    let behind = home.store();
    let names = [behind.name().to_owned(), store.name().to_owned()];
    let failed = |error: &dyn std::error::Error| Failure::Failed(chain(error));
    let cache = Cache::create(store, behind, config).map_err(|error| failed(&error))?;
    let cleaner = home.log.as_ref().map(Background::clean).transpose()?;
    let write_back = Background::write_back(&cache)?;
    let memory = Memory::new(&cache, &names[1]).map_err(|error| failed(&error))?;
    let front = wanted.start(&cache, options, &log)?;
    let unmounted = front.unmounted().map_err(Failure::failed)?;
    let daemon = Arc::new(Daemon {
        names,
        home,
        cache,
        memory,
        front: Mutex::new(Some(front)),
        detaching: Mutex::new(()),
        is_detached: AtomicBool::new(false),
        tell,
        log: Arc::clone(&log),
    });
    let control = control::listen(&options.control.path(), Arc::clone(&daemon) as _)?;
    let [home, store] = &daemon.names;
    let served: Vec<String> = daemon.exports().into_iter().map(|export| export.address).collect();
    (log)(
        Level::Info,
        format_args!(
            "{store} caches {home} ({}) at {}; status at {}",
            ByteSize(daemon.cache.bytes()),
            served.join(", "),
            control.path().display()
        ),
    );
    warn_of_unlocked_memory(&log);
    wait(&daemon, &mut told, unmounted, &log)?;
    control.end();
    write_back.stop();
    cleaner.into_iter().for_each(Background::stop);
    Ok(())
}

/// Whether a signal handler or another thread has written to the pipe. Takes the bytes out of the
/// pipe.
fn is_told(told: &mut UnixStream) -> bool {
    let mut bytes = [0; 64];
    told.read(&mut bytes).is_ok_and(|read| read > 0)
}

/// Returns once the cache is detached: by a request, a signal, or an unmount of the file.
fn wait(
    daemon: &Daemon,
    told: &mut UnixStream,
    mut unmounted: Option<OwnedFd>,
    log: &Logger,
) -> Result<(), Failure> {
    while !daemon.is_detached.load(Ordering::SeqCst) {
        let ended = {
            let fds = [Some(told.as_fd()), unmounted.as_ref().map(AsFd::as_fd)];
            let mut fds: Vec<_> =
                fds.into_iter().flatten().map(|fd| PollFd::from_borrowed_fd(fd, PollFlags::IN)).collect();
            match rustix::event::poll(&mut fds, None) {
                Err(rustix::io::Errno::INTR) => continue,
                result => result.map_err(Failure::failed)?,
            };
            fds.get(1).is_some_and(|fd| !fd.revents().is_empty())
        };
        // The cache is detached once for an unmount. After that, do not poll the descriptor any
        // more, because it stays readable.
        unmounted = unmounted.filter(|_| !ended);
        is_told(told);
        if daemon.is_detached.load(Ordering::SeqCst) {
            break;
        }
        if let Err(why) = daemon.detach(&mut |_| {}) {
            (log)(Level::Warning, format_args!("not stopping: {why}"));
        }
    }
    Ok(())
}

/// A cache that is served.
struct Daemon {
    /// Names of the home and the store.
    names: [String; 2],
    home: Home,
    cache: Arc<Cache>,
    memory: Memory,
    /// `None` once the front ends have ended.
    front: Mutex<Option<FrontEnds>>,
    detaching: Mutex<()>,
    is_detached: AtomicBool,
    /// Wakes the thread that waits for the cache's end.
    tell: UnixStream,
    log: Logger,
}

impl Daemon {
    fn exports(&self) -> Vec<Export> {
        let front = self.front.lock().unwrap_or_else(PoisonError::into_inner);
        front.as_ref().map(FrontEnds::exports).unwrap_or_default()
    }

    /// Writes all dirty pages home and has the home flush. Calls `tell` now and then with the
    /// number of bytes that are still dirty. Bytes that are dirty at the end were written during
    /// the flush.
    fn flush(&self, tell: &mut dyn FnMut(u64)) -> Result<(), String> {
        let mut tell = || tell(u64::from(self.cache.dirty()) * PAGE_SIZE as u64);
        tell();
        let mut told = Instant::now();
        let number = self.cache.ask_for_flush();
        let result = loop {
            if let Some(result) = self.cache.flush_result(number) {
                break result;
            }
            thread::sleep(Duration::from_millis(1));
            if told.elapsed() >= TELL_EVERY {
                tell();
                told = Instant::now();
            }
        };
        tell();
        let failed = |fault| {
            let home = &self.names[0];
            format!(
                "not every page is safe at {home} ({fault}); weir cache status says how many failed, the kernel's log why"
            )
        };
        result.map_err(failed)
    }

    /// Makes the device as large as its home is now.
    fn grow(&self) -> Result<(), String> {
        if self.home.log.is_some() {
            return Err(
                "a log keeps the size that it was made with; detach the cache, and make a larger log"
                    .to_owned(),
            );
        }
        let front = self.front.lock().unwrap_or_else(PoisonError::into_inner);
        let front = front.as_ref().ok_or_else(|| "the cache is about to end".to_owned())?;
        front.refuse_to_grow()?;
        self.home.disks.grow().map_err(|error| chain(&error))?;
        front.grow(self.cache.bytes());
        Ok(())
    }

    /// Stops the front ends if no program uses them, and writes every page home. After a failure,
    /// the caller may call this again.
    fn detach(&self, tell: &mut dyn FnMut(u64)) -> Result<(), String> {
        // Two detaches must not run at the same time. This process exits when a detach has ended,
        // and by then the client of the other detach would have no answer.
        let _one_at_a_time = self.detaching.lock().unwrap_or_else(PoisonError::into_inner);
        let mut front = self.front.lock().unwrap_or_else(PoisonError::into_inner);
        if let Some(running) = front.as_mut() {
            running.withdraw()?;
        }
        self.memory.end();
        if let Some(running) = front.take() {
            running.stop(GRACE, &self.log);
        }
        drop(front);
        if self.home.is_scratch {
            // No content of the log outlives this process. So there is no page to bring home.
            self.is_detached.store(true, Ordering::SeqCst);
            return Ok(());
        }
        self.cache.drain();
        wait_until_clean(&self.names[0], STUCK, || self.cache.dirty(), tell)?;
        self.flush(&mut |_| {})?;
        self.is_detached.store(true, Ordering::SeqCst);
        Ok(())
    }
}

/// Waits until no page is dirty. Meanwhile calls `tell` with the number of bytes that are still
/// dirty. Fails if no page goes home for `patience`.
fn wait_until_clean(
    home: &str,
    patience: Duration,
    dirty_pages: impl Fn() -> u32,
    tell: &mut dyn FnMut(u64),
) -> Result<(), String> {
    let (mut least, mut since) = (u32::MAX, Instant::now());
    loop {
        let dirty = dirty_pages();
        tell(u64::from(dirty) * PAGE_SIZE as u64);
        if dirty == 0 {
            return Ok(());
        }
        if dirty < least {
            (least, since) = (dirty, Instant::now());
        } else if since.elapsed() > patience {
            return Err(format!(
                "{} of pages do not go home to {home}; the kernel's log says why; weir cache detach tries again",
                ByteSize(u64::from(dirty) * PAGE_SIZE as u64),
            ));
        }
        thread::sleep(TELL_EVERY);
    }
}

impl Service for Daemon {
    fn report(&self) -> Report {
        let log = self.home.log.as_ref().map(weir_log::Log::status);
        let names = self.names.clone();
        Report::new(&self.cache.status(), names, self.exports(), log.as_ref(), &self.home.traffic())
    }

    fn trace(
        &self,
        requests: u64,
        seconds: Option<u32>,
        tell: &mut dyn FnMut(Vec<u32>) -> bool,
    ) -> Result<u64, String> {
        let ends = || self.is_detached.load(Ordering::SeqCst);
        trace::record(&self.cache, requests, seconds, ends, tell)
    }

    fn reclaim(&self, job: Job, tell: &mut dyn FnMut(Progress) -> bool) -> Result<Moved, String> {
        self.memory.run(job, tell)
    }

    fn serve(&self, request: &Request, tell: &mut dyn FnMut(u64)) -> Result<(), String> {
        match request {
            Request::Status
            | Request::Trace { .. }
            | Request::GiveBack { .. }
            | Request::Take { .. }
            | Request::Resize { .. }
            | Request::Sleep
            | Request::Wake => Ok(()),
            Request::Flush => self.flush(tell),
            Request::Grow => self.grow(),
            Request::Mode { mode } => {
                let mode: Mode = mode.parse()?;
                self.cache.set_mode(mode);
                Ok(())
            }
            Request::Detach => {
                self.detach(tell)?;
                // Wake the thread that waits for the cache's end. That thread does not answer the
                // client: the present thread does, when this function has returned.
                let _ = std::io::Write::write(&mut &self.tell, &[0]);
                Ok(())
            }
        }
    }
}

/// A thread that works behind the cache: it writes dirty pages home, or cleans the log.
struct Background {
    thread: thread::JoinHandle<()>,
    /// The end of a socket pair that is closed to end the thread.
    stop: UnixStream,
    ends: Arc<AtomicBool>,
}

impl Background {
    fn write_back(cache: &Arc<Cache>) -> Result<Self, Failure> {
        let mut write_back = WriteBack::open(cache).map_err(|error| Failure::Failed(chain(&error)))?;
        Self::start("weir-write-back", move |stopped| {
            let now = Instant::now();
            let next = write_back.step(now);
            write_back.wait(next, stopped.as_fd(), now);
        })
    }

    fn clean(log: &Log) -> Result<Self, Failure> {
        let mut cleaner = Cleaner::open(log).map_err(|error| Failure::Failed(chain(&error)))?;
        Self::start("weir-cleaner", move |stopped| {
            let next = cleaner.step(Instant::now());
            cleaner.wait(next, stopped.as_fd());
        })
    }

    /// Starts a thread that calls `work` again and again.
    fn start(name: &str, mut work: impl FnMut(&UnixStream) + Send + 'static) -> Result<Self, Failure> {
        let (stop, stopped) = UnixStream::pair().map_err(Failure::failed)?;
        let ends = Arc::new(AtomicBool::new(false));
        let ended = Arc::clone(&ends);
        let work = move || {
            while !ended.load(Ordering::SeqCst) {
                work(&stopped);
            }
        };
        let thread = thread::Builder::new().name(name.into()).spawn(work).map_err(Failure::failed)?;
        Ok(Background { thread, stop, ends })
    }

    fn stop(self) {
        self.ends.store(true, Ordering::SeqCst);
        drop(self.stop);
        // The panic hook has reported a panic of that thread.
        let _ = self.thread.join();
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::cell::Cell;

    #[test]
    fn pages_that_do_not_go_home_end_the_wait_and_those_that_go_do_not() {
        let told = Cell::new(0);
        let mut tell = |bytes| told.set(bytes);
        let stuck = wait_until_clean("/dev/home", Duration::ZERO, || 512, &mut tell);
        assert_eq!(told.get(), 2 << 20);
        let words = "2MiB of pages do not go home to /dev/home; the kernel's log says why; ";
        assert_eq!(stuck, Err(format!("{words}weir cache detach tries again")));
        let left = Cell::new(3_u32);
        let one_less = || left.replace(left.get().saturating_sub(1));
        assert_eq!(wait_until_clean("/dev/home", Duration::ZERO, one_less, &mut tell), Ok(()));
        assert_eq!(told.get(), 0);
    }
}
