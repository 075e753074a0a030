//! A daemon's surroundings, which tests can replace: its log, its clock, the number of processors,
//! and the way to end its process.
//!
//! Front ends and stores measure the time of requests by the machine's clock, and not by the clock
//! of these surroundings.

use rustix::event::{PollFd, Timespec, poll};
use std::fmt;
use std::sync::Arc;
use std::time::{Duration, Instant};
use weir_core::log::Log;

/// A daemon's surroundings. Clones share them.
#[derive(Clone)]
pub struct Environment {
    /// The daemon's log.
    pub log: Log,
    /// The daemon's clock.
    pub clock: Arc<dyn Clock>,
    /// Number of processors for which the daemon plans threads.
    pub processors: usize,
    /// Ends the process as if it had been killed, so that a keeper starts another daemon.
    pub die: Arc<dyn Fn() + Send + Sync>,
}

/// The clock of a daemon's background work: the governor's looks, the movers' pauses, and the
/// uptime.
pub trait Clock: Send + Sync + fmt::Debug {
    /// The present time.
    fn now(&self) -> Instant;

    /// Waits for this time.
    fn sleep(&self, time: Duration);

    /// Returns once one of the descriptors is ready, or after `most`.
    fn wait(&self, fds: &mut [PollFd<'_>], most: Duration);
}

/// The clock of the machine.
#[derive(Clone, Copy, Debug)]
pub struct MachineClock;

impl Clock for MachineClock {
    fn now(&self) -> Instant {
        Instant::now()
    }

    fn sleep(&self, time: Duration) {
        std::thread::sleep(time);
    }

    fn wait(&self, fds: &mut [PollFd<'_>], most: Duration) {
        let most = Timespec { tv_sec: most.as_secs() as _, tv_nsec: most.subsec_nanos().into() };
        let _ = poll(fds, Some(&most));
    }
}

impl Environment {
    /// The surroundings on this machine. The daemon logs to `log`.
    pub fn of_machine(log: &Log) -> Self {
        Environment {
            log: Log::clone(log),
            clock: Arc::new(MachineClock),
            processors: crate::keeper::processors(),
            die: Arc::new(|| {
                let _ =
                    rustix::process::kill_process(rustix::process::getpid(), rustix::process::Signal::KILL);
            }),
        }
    }
}

impl fmt::Debug for Environment {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Environment { clock, processors, .. } = self;
        f.debug_struct("Environment")
            .field("clock", clock)
            .field("processors", processors)
            .finish_non_exhaustive()
    }
}

#[cfg(test)]
pub mod tests {
    use super::*;
    use std::sync::atomic::{AtomicU64, Ordering};

    /// The environment of this machine, whose log lines go nowhere.
    pub fn quiet() -> Environment {
        let log: Log = Arc::new(|_, _| {});
        Environment::of_machine(&log)
    }

    /// A clock that jumps ahead whenever a thread waits for it.
    #[derive(Debug)]
    pub struct Quick {
        begun: Instant,
        passed_ns: AtomicU64,
    }

    impl Quick {
        pub fn new() -> Arc<Self> {
            Arc::new(Quick { begun: Instant::now(), passed_ns: AtomicU64::new(0) })
        }

        pub fn passed(&self) -> Duration {
            Duration::from_nanos(self.passed_ns.load(Ordering::Relaxed))
        }
    }

    impl Clock for Quick {
        fn now(&self) -> Instant {
            self.begun + self.passed()
        }

        fn sleep(&self, time: Duration) {
            self.passed_ns.fetch_add(time.as_nanos() as u64, Ordering::Relaxed);
            std::thread::yield_now();
        }

        fn wait(&self, fds: &mut [PollFd<'_>], most: Duration) {
            let at_once = Timespec { tv_sec: 0, tv_nsec: 0 };
            if poll(fds, Some(&at_once)) == Ok(0) {
                self.sleep(most);
            }
        }
    }
}
