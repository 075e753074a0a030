//! The worker: takes all items, runs them, and looks again before it sleeps.

use std::panic::{AssertUnwindSafe, catch_unwind};

use crate::item::{Unplaced, run_link};
use crate::metrics::Counters;
use crate::shards::{Padded, Shards};
use crate::sleeper::Sleeper;
use crate::stack::Chain;
use crate::sync::pause;

/// A batch of fewer items than this is small. The worker then follows the producers so closely that
/// it disturbs them.
pub(crate) const SMALL_BATCH: usize = 256;

/// Default number of pauses after a small batch: about 0.7 us if a pause takes 40 cycles.
pub(crate) const LINGER: u32 = 64;

/// The state that a queue's producers and its worker share.
pub(crate) struct Core {
    pub(crate) shards: Shards,
    pub(crate) sleeper: Sleeper,
    pub(crate) counters: Padded<Counters>,
    /// The count of items that [`Unplaced`] describes. A flush waits until it is 0.
    pub(crate) unplaced: Padded<Unplaced>,
}

/// The limits of a worker's wait for items.
#[derive(Clone, Copy)]
pub(crate) struct Patience {
    /// Number of polls before the worker sleeps.
    pub(crate) spins: u32,
    /// Number of pauses after a small batch, before the worker polls again.
    pub(crate) linger: u32,
}

impl Core {
    /// Runs items until the queue is closed and empty.
    pub(crate) fn work(&self, patience: Patience) {
        loop {
            match self.sweep() {
                0 if self.shards.are_finished() => return,
                0 => self.sleeper.wait(self.shards.iter(), patience.spins),
                items if items < SMALL_BATCH => (0..patience.linger).for_each(|_| pause()),
                _ => {}
            }
        }
    }

    /// Takes each stack once and runs its items. Returns how many items ran.
    fn sweep(&self) -> usize {
        let mut items = 0;
        for chain in self.shards.take() {
            if chain.len() > 0 {
                items += chain.len();
                self.counters.0.batch(chain.len());
                self.run(chain);
            }
        }
        items
    }

    /// Runs a chain to its end, even past items that panic.
    fn run(&self, mut chain: Chain) {
        while chain.len() > 0 {
            let rest = AssertUnwindSafe(|| {
                for link in &mut chain {
                    // SAFETY: every link in a queue's stacks belongs to an item, and comes out of a
                    // chain once.
                    unsafe { run_link(link, &self.unplaced.0) };
                }
            });
            if catch_unwind(rest).is_err() {
                self.counters.0.panic();
            }
        }
    }
}
