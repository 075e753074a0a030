//! Decides when the kernel should be on the card: a pure function of the figures seen, so that it
//! can be tested alone.
//!
//! The card's owner comes first. The kernel stays away while another process has a context on the
//! card, or after an operation waited as long as a time slice. Otherwise it enters under load and
//! leaves soon after it.

use std::time::Duration;

/// The figures since the policy's last step.
#[derive(Clone, Copy, Debug, Default)]
pub struct Seen {
    /// Time since the policy's last step.
    pub elapsed: Duration,
    /// Number of pages moved since the policy's last step, by any path.
    pub pages: u64,
    /// Other processes that have a context on the card.
    pub others: u32,
    /// Number of the ring's operations that waited as long as a time slice.
    pub stalls: u32,
    /// Whether the kernel is on the card.
    pub resident: bool,
    /// Whether there are lanes that the resident kernel does not serve.
    pub uncovered: bool,
}

/// The next step of the watching thread.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Step {
    /// Do nothing.
    Stay,
    /// Put the kernel on the card.
    Enter,
    /// Take the kernel off the card.
    Leave,
}

/// The conditions under which the kernel enters and leaves. Also the time for which the kernel has
/// been idle, and the time for which it must still stay away.
#[derive(Clone, Debug)]
pub struct Policy {
    /// Pages a second from which on the kernel is worth the time slice and the power that it takes.
    pub enter_at: u64,
    /// Pages a second below which the kernel counts as idle.
    pub leave_at: u64,
    /// Time without enough pages after which the kernel leaves.
    pub idle: Duration,
    /// Time for which the kernel stays away after it has left for another process.
    pub shy: Duration,
    /// Whether the kernel enters at once and never leaves for idleness: `ring=on`, for benchmarks.
    pub always: bool,
    idle_for: Duration,
    shy_for: Duration,
}

impl Default for Policy {
    fn default() -> Self {
        Policy {
            enter_at: 20_000,
            leave_at: 2_000,
            idle: Duration::from_millis(10),
            shy: Duration::from_secs(2),
            always: false,
            idle_for: Duration::ZERO,
            shy_for: Duration::ZERO,
        }
    }
}

impl Policy {
    /// Decides the next step from the figures seen.
    pub fn step(&mut self, seen: Seen) -> Step {
        self.shy_for = self.shy_for.saturating_sub(seen.elapsed);
        if seen.others > 0 || (seen.stalls > 0 && !self.always) {
            self.shy_for = self.shy;
        }
        let rate = (seen.pages as f64 / seen.elapsed.as_secs_f64().max(1e-6)) as u64;
        self.idle_for = if rate < self.leave_at { self.idle_for + seen.elapsed } else { Duration::ZERO };
        let busy = rate >= self.enter_at || self.always;
        match seen.resident {
            true if !self.shy_for.is_zero() || seen.uncovered => Step::Leave,
            true if self.idle_for >= self.idle && !self.always => Step::Leave,
            false if busy && self.shy_for.is_zero() => Step::Enter,
            _ => Step::Stay,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const TICK: Duration = Duration::from_millis(1);

    fn seen(pages: u64, resident: bool) -> Seen {
        Seen { elapsed: TICK, pages, resident, ..Seen::default() }
    }

    #[test]
    fn it_enters_under_load_and_leaves_after_idle_milliseconds() {
        let mut policy = Policy::default();
        assert_eq!(policy.step(seen(1, false)), Step::Stay, "a sporadic page pays for nothing");
        assert_eq!(policy.step(seen(190, false)), Step::Enter);
        assert_eq!(policy.step(seen(190, true)), Step::Stay);
        let quiet = (1..).find(|_| policy.step(seen(0, true)) == Step::Leave).expect("it leaves");
        assert_eq!(quiet, policy.idle.as_millis());
    }

    #[test]
    fn another_context_or_a_stall_sends_it_away_for_a_while() {
        for trouble in [Seen { others: 1, ..seen(500, true) }, Seen { stalls: 1, ..seen(500, true) }] {
            let mut policy = Policy::default();
            assert_eq!(policy.step(trouble), Step::Leave);
            let shy = (1..).find(|_| policy.step(seen(500, false)) == Step::Enter).expect("it comes back");
            assert_eq!(shy, policy.shy.as_millis());
        }
    }

    #[test]
    fn a_lane_that_was_opened_meanwhile_is_let_in() {
        let mut policy = Policy::default();
        assert_eq!(policy.step(Seen { uncovered: true, ..seen(500, true) }), Step::Leave);
        assert_eq!(policy.step(seen(500, false)), Step::Enter, "and it is back at the next look");
    }

    #[test]
    fn made_to_stay_it_yields_to_others_only() {
        let mut policy = Policy { always: true, ..Policy::default() };
        assert_eq!(policy.step(seen(0, false)), Step::Enter);
        assert!((0..1000).all(|_| policy.step(seen(0, true)) == Step::Stay));
        assert_eq!(policy.step(Seen { stalls: 3, ..seen(0, true) }), Step::Stay);
        assert_eq!(policy.step(Seen { others: 1, ..seen(0, true) }), Step::Leave);
    }
}
