//! A thread's turn on a processor, for threads that wait for each other on a busy machine.
//!
//! A thread that spins offers its processor to other threads now and then (`sched_yield`). If other
//! threads are ready to run, each of them runs first, for a whole turn of some milliseconds. A
//! thread that sleeps and is woken need not wait that long: the scheduler lets it run soon, since
//! it has used little time. So a thread should spin only while no other thread takes the offer.

use std::time::{Duration, Instant};

/// An offer of the processor that takes longer than this was taken by a thread with other work. The
/// thread at the other end of a connection answers sooner.
const TAKEN: Duration = Duration::from_micros(300);
/// After another thread has taken an offer, this thread makes no offer for this many times the
/// duration of that one. So on a busy machine the offers take at most a ninth of a thread's time.
/// With 50 in place of 8, page faults took longer. Other threads often stop to need the processor
/// soon, and from then on a thread that sleeps is slower than one that spins.
const TIMES: u32 = 8;
/// Length of a [`short_turns`] turn.
const SHORT: Duration = Duration::from_micros(100);

/// The offers of a thread, and whether the machine seems crowded.
#[derive(Clone, Copy, Debug, Default)]
pub struct Offers {
    crowded_until: Option<Instant>,
}

impl Offers {
    /// Offers the processor to other threads.
    pub fn offer(&mut self) {
        let begun = Instant::now();
        std::thread::yield_now();
        self.note(begun, Instant::now());
    }

    fn note(&mut self, begun: Instant, ended: Instant) {
        let taken = ended - begun;
        if taken > TAKEN {
            self.crowded_until = Some(ended + taken * TIMES);
        }
    }

    /// Whether a thread that waits should sleep at once, since others need its processor.
    pub fn is_crowded(&mut self) -> bool {
        // Most machines are not crowded, so the clock is read only after an offer was taken.
        let is_crowded = self.crowded_until.is_some_and(|until| Instant::now() < until);
        if !is_crowded {
            self.crowded_until = None;
        }
        is_crowded
    }
}

/// The kernel's `struct sched_attr`, first version.
#[repr(C)]
#[derive(Default)]
struct Attributes {
    size: u32,
    policy: u32,
    flags: u64,
    nice: i32,
    priority: u32,
    runtime: u64,
    deadline: u64,
    period: u64,
}

impl Attributes {
    const SIZE: u32 = size_of::<Attributes>() as u32;

    fn of_this_thread() -> Option<Self> {
        let mut attributes = Attributes::default();
        // SAFETY: the call takes this thread (0), and writes as many bytes as it is told.
        let got = unsafe { libc::syscall(libc::SYS_sched_getattr, 0, &raw mut attributes, Self::SIZE, 0) };
        (got == 0).then_some(attributes)
    }

    /// Returns false where the system forbids this.
    fn set(&self) -> bool {
        // SAFETY: the call takes this thread (0), and reads as many bytes as the structure says.
        unsafe { libc::syscall(libc::SYS_sched_setattr, 0, std::ptr::from_ref(self), 0) == 0 }
    }
}

/// Gives the calling thread short turns on its processor. The thread's share of the processor stays
/// the same, but the thread begins to run sooner after it was woken. That suits a thread which does
/// a little work for another thread that waits. Linux before 6.12 has no length of turns for each
/// thread, and ignores the request. If the system forbids the call, this function does nothing.
/// Then the other thread waits longer on a busy machine.
pub fn short_turns() {
    prefer(0);
}

/// The length of a thread's turns, which it can change and restore. Two threads that share one
/// processor do a tenth more work with turns of the kernel's usual length than with short ones.
#[derive(Debug)]
pub struct Turns {
    /// Nanoseconds of a turn; 0 means the kernel's own choice. `None`: the thread is no ordinary
    /// one, and its turns stay.
    usual: Option<u64>,
}

impl Turns {
    /// Takes the present turns of the calling thread as its usual ones.
    pub fn of_this_thread() -> Self {
        Turns { usual: ordinary().map(|now| now.runtime) }
    }

    /// Gives the calling thread its usual turns again, after [`short_turns`].
    pub fn restore(&self) {
        if let (Some(runtime), Some(now)) = (self.usual, ordinary()) {
            Attributes { runtime, ..now }.set();
        }
    }
}

/// Gives the calling thread short turns. If this process has the right (`CAP_SYS_NICE`), also
/// raises the thread's priority by ten steps. That suits a thread for which all other threads of
/// its program wait. The priority holds for all work of the thread, also for work that no thread
/// waits for. So the thread must limit such work itself.
pub fn first_turns() {
    prefer(10);
}

/// The attributes of this thread, if it is scheduled as ordinary threads are.
fn ordinary() -> Option<Attributes> {
    Attributes::of_this_thread().filter(|now| now.policy == libc::SCHED_OTHER as u32)
}

fn prefer(steps: i32) {
    let Some(now) = ordinary() else { return };
    let short = Attributes { runtime: SHORT.as_nanos() as u64, ..now };
    if steps == 0 || !(Attributes { nice: (now.nice - steps).max(-20), ..short }.set()) {
        short.set();
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_thread_whose_offer_was_taken_makes_none_for_a_while() {
        let mut offers = Offers::default();
        let begun = Instant::now();
        offers.note(begun, begun + TAKEN);
        assert!(!offers.is_crowded(), "the other end of the connection may have worked so long");
        // After an offer of 60 s, the machine counts as crowded for longer than this test takes.
        offers.note(begun, begun + Duration::from_secs(60));
        assert!(offers.is_crowded());
        offers.crowded_until = Some(begun);
        assert!(!offers.is_crowded(), "the while is over");
    }

    #[test]
    fn a_thread_has_short_turns_where_the_kernel_knows_them_and_is_first_where_it_may() {
        let now = || Attributes::of_this_thread().map(|now| (now.policy, now.nice, now.runtime));
        let run = move || {
            let (before, turns) = (now(), Turns::of_this_thread());
            short_turns();
            let short = now();
            turns.restore();
            let usual = now();
            first_turns();
            (before, short, usual, now())
        };
        let (before, short, usual, first) = std::thread::spawn(run).join().unwrap();
        let turn = SHORT.as_nanos() as u64;
        // The kernel tells the length of turns if it knows them.
        let Some((0, nice, 1..)) = before else {
            return println!("skipped: turn: Linux 6.12 and an ordinary thread");
        };
        assert_eq!(short, Some((0, nice, turn)));
        assert_eq!(usual, before);
        let higher = Some((0, (nice - 10).max(-20), turn));
        match rustix::process::geteuid().is_root() {
            // Root may lack this right, as in a container.
            true => assert!(first == higher || first == short, "{first:?}"),
            false => assert_eq!(first.map(|(.., turn)| turn), Some(turn)),
        }
    }
}
