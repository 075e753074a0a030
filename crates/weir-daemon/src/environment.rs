//! The surroundings of a daemon, passed in so that tests can replace them: the receiver of its
//! lines, the time by which it plans, the processors that it plans threads for, and its own end.
//!
//! The time of requests is not here: front ends and stores measure it by the machine's clock.

use rustix::event::{PollFd, Timespec, poll};
use std::fmt;
use std::sync::Arc;
use std::time::{Duration, Instant};
use weir_core::log::Log;

/// A daemon's surroundings. Clones are the same ones.
#[derive(Clone)]
pub struct Environment {
    /// Its lines.
    pub log: Log,
    /// Its time.
    pub clock: Arc<dyn Clock>,
    /// The processors that it plans threads for.
    pub processors: usize,
    /// Ends it as if it had been killed, for a keeper to start another.
    pub die: Arc<dyn Fn() + Send + Sync>,
}

/// The time by which a daemon looks after its memory: when the governor looks, how long movers
/// rest, since when it runs.
pub trait Clock: Send + Sync + fmt::Debug {
    /// Now.
    fn now(&self) -> Instant;

    /// Returns after so long.
    fn sleep(&self, time: Duration);

    /// Returns once one of the descriptors is ready, or after `most`.
    fn wait(&self, fds: &mut [PollFd<'_>], most: Duration);
}

/// The machine's own.
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
    /// This machine's, with lines to `log`.
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

    /// The machine's, without a word.
    pub fn quiet() -> Environment {
        let log: Log = Arc::new(|_, _| {});
        Environment::of_machine(&log)
    }

    /// A clock that runs as fast as somebody waits for it.
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
