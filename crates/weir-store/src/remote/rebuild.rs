//! Decides which slots are copied to nodes that lack their pages, and when. It is a pure function
//! of the time that its caller gives.

use std::time::{Duration, Instant};
use weir_core::Slot;

/// Number of pages in a batch of copies.
pub(super) const BATCH: usize = 16;
/// Largest number of pages copied each second: 32 MiB.
const RATE: u32 = 8192;
/// Number of slots that one step of a pass looks at.
const LOOKS: u32 = 1 << 14;

/// Decides which slots are copied, and when.
#[derive(Debug)]
pub(super) struct Rebuild {
    slots: u32,
    /// The slot that the pass looks at next; `None`: no pass is under way.
    next: Option<u32>,
    /// The time of the next batch.
    due: Option<Instant>,
    /// Number of pages copied since the pass over the slots began.
    copied: u32,
    /// Whether another pass over the slots follows the present one.
    again: bool,
}

/// The caller's next action.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) enum Step {
    /// Copy the slots of the batch.
    Copy,
    /// Do nothing before this time.
    Rest(Instant),
    /// Do nothing before the next call of [`Rebuild::wake`].
    Idle,
}

impl Rebuild {
    pub(super) fn new(slots: u32) -> Self {
        Rebuild { slots, next: None, due: None, copied: 0, again: false }
    }

    /// Notes that copies may be missing, so that a pass begins.
    pub(super) fn wake(&mut self) {
        match self.next {
            None => (self.next, self.copied) = (Some(0), 0),
            Some(_) => self.again = true,
        }
    }

    /// Notes that this many pages of a batch were copied.
    pub(super) fn copied(&mut self, pages: u32) {
        self.copied += pages;
    }

    /// Decides the next action at time `now`. Fills `batch` with slots for which `can_mend` is
    /// true.
    pub(super) fn step(
        &mut self,
        now: Instant,
        can_mend: impl Fn(Slot) -> bool,
        batch: &mut Vec<Slot>,
    ) -> Step {
        batch.clear();
        if let Some(due) = self.due.filter(|due| now < *due) {
            return Step::Rest(due);
        }
        let Some(mut next) = self.next else { return Step::Idle };
        let end = self.slots.min(next.saturating_add(LOOKS));
        while next < end && batch.len() < BATCH {
            batch.extend(Some(Slot(next)).filter(|slot| can_mend(*slot)));
            next += 1;
        }
        self.next = Some(next);
        if !batch.is_empty() {
            self.due = Some(now + Duration::from_secs(1) * batch.len() as u32 / RATE);
            return Step::Copy;
        }
        if next == self.slots {
            // Begin another pass only if this one copied a page, or if copies went missing
            // meanwhile. Else the next pass would find nothing new.
            self.next = (self.copied > 0 || self.again).then_some(0);
            (self.copied, self.again) = (0, false);
            if self.next.is_none() {
                return Step::Idle;
            }
        }
        Step::Rest(now)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::cell::RefCell;

    const LATER: Duration = Duration::from_secs(10);

    #[test]
    fn what_is_lacking_is_copied_once_at_the_rate_and_then_it_rests() {
        let begun = Instant::now();
        let mut now = begun;
        let lacking = RefCell::new(vec![true; 100_000]);
        let mut rebuild = Rebuild::new(100_000);
        let (mut batch, mut copied) = (Vec::new(), 0);
        assert_eq!(rebuild.step(now, |_| true, &mut batch), Step::Idle, "nobody has woken it");
        rebuild.wake();
        loop {
            match rebuild.step(now, |slot| lacking.borrow()[slot.0 as usize], &mut batch) {
                Step::Copy => {
                    batch.iter().for_each(|slot| assert!(lacking.borrow_mut()[slot.0 as usize]));
                    batch.iter().for_each(|slot| lacking.borrow_mut()[slot.0 as usize] = false);
                    rebuild.copied(batch.len() as u32);
                    copied += batch.len();
                }
                Step::Rest(until) => now = now.max(until),
                Step::Idle => break,
            }
        }
        assert_eq!(copied, 100_000);
        let took = now - begun;
        let least = Duration::from_secs(100_000 / u64::from(RATE));
        assert!((least..least + Duration::from_secs(2)).contains(&took), "{took:?}");
    }

    #[test]
    fn what_cannot_be_copied_is_tried_again_only_when_something_has_changed() {
        let now = Instant::now();
        let mut rebuild = Rebuild::new(100);
        let mut batch = Vec::new();
        let mut tries = |rebuild: &mut Rebuild, mut now: Instant| {
            let mut tries = 0;
            loop {
                match rebuild.step(now, |slot| slot == Slot(7), &mut batch) {
                    Step::Copy => tries += 1,
                    Step::Rest(until) => now = until,
                    Step::Idle => return tries,
                }
            }
        };
        rebuild.wake();
        assert_eq!(tries(&mut rebuild, now), 1);
        assert_eq!(tries(&mut rebuild, now + LATER), 0);
        rebuild.wake();
        rebuild.wake();
        assert_eq!(tries(&mut rebuild, now + LATER), 2, "woken while it was at it");
    }
}
