//! Spinning: a thread looks for the next request for a short time before it sleeps.
//!
//! Waking a sleeping thread takes several microseconds, more than serving a page. A client that
//! waits for each reply sends its next request sooner than that. A thread that spins until that
//! request comes answers such a client twice as fast. Three limits bound the cost. Each spin has a
//! time limit. At most half of the machine's processors spin at once. And each spin without success
//! halves the time limit of the next one, down to none. The limit becomes full again when a request
//! comes so soon after the thread fell asleep that a full spin would have caught it. An idle
//! connection costs nothing.

use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::{Duration, Instant};

/// Shortest time of a spin: a shorter one is not worth its clock reads.
const LEAST: Duration = Duration::from_micros(2);

/// Number of pause instructions between two looks; half a microsecond or so.
const PAUSES: u32 = 16;

/// A thread that spins for longer than this yields its processor to any other thread. By then the
/// spin has cost as much as a sleep.
const POLITE: Duration = Duration::from_micros(200);

/// Limits how many threads spin at once.
#[derive(Debug)]
pub(crate) struct SpinGate {
    most: usize,
    spinning: AtomicUsize,
}

impl SpinGate {
    /// Allows half of `processors` to spin. With one processor none may, since the client that is
    /// to send the next request needs it.
    pub fn new(processors: usize) -> Self {
        SpinGate { most: processors / 2, spinning: AtomicUsize::new(0) }
    }

    fn enter(&self) -> bool {
        // The limit is advisory: one thread too many for a moment does no harm.
        if self.spinning.load(Ordering::Relaxed) >= self.most {
            return false;
        }
        self.spinning.fetch_add(1, Ordering::Relaxed);
        true
    }

    fn leave(&self) {
        self.spinning.fetch_sub(1, Ordering::Relaxed);
    }
}

/// The spinning of one thread, and the time limit of its next spin.
#[derive(Debug)]
pub(crate) struct Spin<'a> {
    gate: &'a SpinGate,
    most: Duration,
    now: Duration,
    /// The time when the thread stopped spinning, to learn how soon the request came.
    waiting_since: Option<Instant>,
}

impl<'a> Spin<'a> {
    pub fn new(gate: &'a SpinGate, most: Duration) -> Self {
        Spin { gate, most, now: most, waiting_since: None }
    }

    /// Calls `look` until it finds something or the time is over.
    ///
    /// # Errors
    /// Fails with the errors of `look`.
    pub fn attempt<T, E>(&mut self, mut look: impl FnMut() -> Result<Option<T>, E>) -> Result<Option<T>, E> {
        weir_system::latency::served();
        if self.most < LEAST {
            return Ok(None);
        }
        let start = Instant::now();
        self.waiting_since = Some(start);
        if self.now < LEAST || !self.gate.enter() {
            return Ok(None);
        }
        let found = loop {
            let found = look();
            let looked = start.elapsed();
            if !matches!(found, Ok(None)) || looked >= self.now {
                break found;
            }
            // Pause between two looks: a look takes the socket's locks, and the client must not
            // wait for them.
            (0..PAUSES).for_each(|_| std::hint::spin_loop());
            if looked >= POLITE {
                std::thread::yield_now();
            }
        };
        self.gate.leave();
        self.now = if matches!(found, Ok(None)) { self.now / 2 } else { self.most };
        found
    }

    /// Notes that a request has come after a spin without success. If it came soon enough that a
    /// spin of the full time would have caught it, the next spin takes the full time.
    pub fn woke(&mut self) {
        if self.waiting_since.take().is_some_and(|since| since.elapsed() <= self.most) {
            self.now = self.most;
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    type Looked = Result<Option<()>, ()>;

    #[test]
    fn attempts_in_vain_halve_down_to_none_and_a_quick_request_brings_them_back() {
        let gate = SpinGate::new(2);
        let mut spin = Spin::new(&gate, Duration::from_millis(1));
        let mut attempts = 0;
        loop {
            let mut looks = 0;
            let looked: Looked = spin.attempt(|| {
                looks += 1;
                Ok(None)
            });
            assert_eq!(looked, Ok(None));
            if looks == 0 {
                break;
            }
            attempts += 1;
        }
        assert_eq!(attempts, 9, "1 ms halves 9 times before it falls below 2 us");
        // Set so long a limit that it has no effect, however long this thread is kept from running.
        spin.most = Duration::from_secs(3600);
        spin.woke();
        let mut looked = false;
        let _: Looked = spin.attempt(|| {
            looked = true;
            Ok(Some(()))
        });
        assert!(looked, "the request came within the limit of the attempt");
        spin.most = Duration::from_millis(1);
        spin.now = Duration::ZERO;
        assert_eq!(spin.attempt(|| -> Looked { Ok(None) }), Ok(None));
        std::thread::sleep(Duration::from_millis(3));
        spin.woke();
        assert_eq!(spin.now, Duration::ZERO, "3 ms is too late");
    }

    #[test]
    fn no_more_than_half_of_the_processors_spin() {
        let gate = SpinGate::new(2);
        let (mut first, mut second) =
            (Spin::new(&gate, Duration::from_millis(1)), Spin::new(&gate, Duration::from_millis(1)));
        let looked: Looked = first.attempt(|| {
            let other: Looked = second.attempt(|| panic!("the only place is taken"));
            assert_eq!(other, Ok(None));
            Ok(Some(()))
        });
        assert_eq!(looked, Ok(Some(())));
        let again: Looked = second.attempt(|| Ok(Some(())));
        assert_eq!(again, Ok(Some(())));
        let gate = SpinGate::new(1);
        let alone: Looked =
            Spin::new(&gate, Duration::from_millis(1)).attempt(|| panic!("who sends needs it"));
        assert_eq!(alone, Ok(None));
    }
}
