//! Keeps processors out of deep sleep while requests come in bursts.
//!
//! A processor in deep sleep takes tens of microseconds or more to wake, which delays a sporadic
//! page fault. Linux lets a process limit that time. A process opens `/dev/cpu_dma_latency` and
//! writes a number of microseconds to it. While the file is open, no processor enters an idle state
//! whose exit takes longer (Documentation/power/pm_qos_interface.rst). The limit ends with the
//! descriptor, and so with the process.
//!
//! The limit affects the whole machine and costs power. So it is in force only during a burst. A
//! burst begins with the second of two requests less than `QUIET` apart, and lasts until no request
//! has come for that long. Each change of the limit wakes all processors. So the limit does not
//! change with each request, and a separate thread changes it.

use std::fs::File;
use std::io::{self, Write};
use std::path::Path;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, OnceLock};
use std::thread::{self, Thread};
use std::time::{Duration, Instant};

/// The kernel's file that takes a limit on the time in which a sleeping processor must wake.
pub const DEVICE: &str = "/dev/cpu_dma_latency";

/// A burst is over when no request has come for this long.
const QUIET: Duration = Duration::from_millis(100);

/// The limit in microseconds. Only a processor's shallowest sleep ends within it: C1 takes 1 or 2
/// us (`drivers/idle/intel_idle.c`). With a lower limit the kernel would let idle processors spin.
const BOUND_US: i32 = 2;

/// The value that means no limit: `PM_QOS_CPU_LATENCY_DEFAULT_VALUE`.
const NO_BOUND_US: i32 = 2_000_000_000;

static HOLDER: OnceLock<Arc<Holder>> = OnceLock::new();

/// The state of the limit on processors' sleep.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Bursts {
    /// Whether the limit on processors' sleep is in force now.
    pub held: bool,
    /// Number of times that the limit on processors' sleep came into force.
    pub count: u64,
}

/// From now until the process ends, keeps processors out of deep sleep during each burst of
/// requests to the process.
///
/// # Errors
/// Fails when the device cannot be opened, or no thread can be started.
pub fn hold_in_bursts() -> io::Result<()> {
    if HOLDER.get().is_none() {
        let holder = Holder::start(Path::new(DEVICE))?;
        // This call fails if another thread has set its holder meanwhile. That thread's holder does
        // the same work as `holder` would.
        let _ = HOLDER.set(holder);
    }
    Ok(())
}

/// The state of the limit on processors' sleep. `None` if [`hold_in_bursts`] has not been called.
pub fn bursts() -> Option<Bursts> {
    let holder = HOLDER.get()?;
    Some(Bursts { held: holder.held.load(Ordering::Relaxed), count: holder.count.load(Ordering::Relaxed) })
}

/// Notes that a thread has served a request, and is about to wait for the next.
pub fn served() {
    if let Some(holder) = HOLDER.get() {
        holder.served(Instant::now());
    }
}

#[derive(Debug)]
struct Holder {
    begun: Instant,
    /// Microseconds from `begun` to the last request.
    last_us: AtomicU64,
    /// Whether a burst is going on. A serving thread sets it, and the thread that changes the limit
    /// clears it.
    burst: AtomicBool,
    held: AtomicBool,
    count: AtomicU64,
    thread: OnceLock<Thread>,
}

impl Holder {
    fn start(device: &Path) -> io::Result<Arc<Self>> {
        let file = File::options().write(true).open(device)?;
        let holder = Arc::new(Holder {
            begun: Instant::now(),
            // 0 stands for a time long ago, so that the first request begins no burst.
            last_us: AtomicU64::new(0),
            burst: AtomicBool::new(false),
            held: AtomicBool::new(false),
            count: AtomicU64::new(0),
            thread: OnceLock::new(),
        });
        let own = Arc::clone(&holder);
        let started = thread::Builder::new()
            .name("weir-latency".into())
            .stack_size(64 << 10)
            .spawn(move || own.run(file))?;
        let _ = holder.thread.set(started.thread().clone());
        Ok(holder)
    }

    fn served(&self, now: Instant) {
        let now_us = now.duration_since(self.begun).as_micros() as u64;
        // Several threads may write the value at once; any of their values will do.
        let before_us = self.last_us.load(Ordering::Relaxed);
        self.last_us.store(now_us, Ordering::Relaxed);
        let is_burst = before_us != 0 && now_us.saturating_sub(before_us) < QUIET.as_micros() as u64;
        if is_burst && !self.burst.load(Ordering::Relaxed) && !self.burst.swap(true, Ordering::Release) {
            self.thread.get().map(Thread::unpark);
        }
    }

    fn run(&self, mut device: File) {
        loop {
            while !self.burst.load(Ordering::Acquire) {
                thread::park();
            }
            if device.write_all(&BOUND_US.to_ne_bytes()).is_ok() {
                self.count.fetch_add(1, Ordering::Relaxed);
                self.held.store(true, Ordering::Relaxed);
            }
            while self.since_last() < QUIET {
                thread::park_timeout(QUIET - self.since_last().min(QUIET - Duration::from_millis(1)));
            }
            // If the value cannot be written, it stays as it was; the next burst tries again.
            if device.write_all(&NO_BOUND_US.to_ne_bytes()).is_ok() {
                self.held.store(false, Ordering::Relaxed);
            }
            self.burst.store(false, Ordering::Release);
        }
    }

    fn since_last(&self) -> Duration {
        self.begun.elapsed().saturating_sub(Duration::from_micros(self.last_us.load(Ordering::Relaxed)))
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::fs;

    #[test]
    fn a_burst_holds_the_bound_until_it_has_been_quiet_and_one_request_does_not() {
        let path = std::env::temp_dir().join(format!("weir-latency-{}", std::process::id()));
        fs::write(&path, "").expect("a file in the device's place");
        let holder = Holder::start(&path).expect("started");
        let written = || {
            let bytes = fs::read(&path).expect("there");
            bytes.chunks(4).map(|four| i32::from_ne_bytes(four.try_into().unwrap())).collect::<Vec<_>>()
        };
        let until = |what: &str, done: &dyn Fn() -> bool| {
            let begun = Instant::now();
            while !done() {
                assert!(begun.elapsed() < Duration::from_secs(20), "{what}");
                thread::sleep(Duration::from_millis(1));
            }
        };
        let at = |ms: u64| holder.begun + Duration::from_millis(ms);
        holder.served(at(10));
        holder.served(at(500));
        thread::sleep(Duration::from_millis(50));
        assert_eq!(written(), [], "requests that are half a second apart are no burst");
        // The time is far in the future, so that the burst goes on while the test looks.
        holder.served(at(20_000));
        holder.served(at(20_010));
        until("the bound comes", &|| holder.held.load(Ordering::Relaxed));
        assert_eq!(written(), [BOUND_US]);
        holder.last_us.store(1, Ordering::Relaxed);
        holder.thread.get().expect("started").unpark();
        until("the bound goes", &|| !holder.held.load(Ordering::Relaxed));
        assert_eq!(written(), [BOUND_US, NO_BOUND_US]);
        assert_eq!(holder.count.load(Ordering::Relaxed), 1);
        fs::remove_file(&path).expect("removed");
    }
}
