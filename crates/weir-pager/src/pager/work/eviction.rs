//! Eviction: all resident memory moves out once, when a person or the program asks for it. Also the
//! orders and reports of the pager's link.

use super::*;

/// Largest number of the daemon's orders that the pager carries out between two steps.
const ORDERS: usize = 16;

impl<K: Kernel, S: Store> Work<K, S> {
    /// Carries out the orders that the daemon has sent.
    pub(super) fn attend(&mut self) {
        for _ in 0..ORDERS {
            match self.outside.order() {
                Some(Order::Limit(bytes)) => {
                    let blocks = usize::try_from(bytes).unwrap_or(usize::MAX) / BLOCK;
                    self.shared.limit.store(blocks.max(LIMIT_MIN), Ordering::Relaxed);
                }
                Some(Order::Evict) => self.shared.evict.store(true, Ordering::SeqCst),
                Some(Order::Report) => {
                    let report = self.report();
                    self.outside.report(&report);
                }
                None => return,
            }
        }
    }

    fn report(&self) -> Report {
        let counters = &self.shared.counters;
        let of = |counter: &std::sync::atomic::AtomicU64| counter.load(Ordering::Relaxed);
        let store = match (self.is_broken, self.is_full) {
            (true, _) => Report::FAILED,
            (false, true) => Report::FULL,
            _ => 0,
        };
        Report {
            limit: (self.shared.limit.load(Ordering::Relaxed) as u64).saturating_mul(BLOCK as u64),
            resident: ((self.managed() + self.beside) * PAGE_SIZE) as u64,
            blocks: self.policy.len() as u64,
            singles: self.singles_there as u64,
            stored: (self.rooms * BLOCK) as u64,
            faults: of(&counters.faults),
            waited_ns: of(&counters.waited_ns),
            ahead: of(&counters.ahead),
            ahead_used: of(&counters.prefetched),
            lost: of(&counters.lost),
            evictions: of(&counters.evictions),
            store,
        }
    }

    /// The next block to move out. An eviction tries each block once.
    pub(super) fn victim(&mut self) -> Option<u32> {
        match self.eviction {
            Some(_) => self.policy.oldest(),
            None => self.policy.victim(self.placed.len()),
        }
    }

    /// Notes that an eviction has tried a block, whether the block could be moved out or not.
    pub(super) fn was_tried(&mut self) {
        if let Some(eviction) = &mut self.eviction {
            eviction.blocks = eviction.blocks.saturating_sub(1);
        }
    }

    /// Does one step of an eviction, if one is under way. Returns whether there may be another step
    /// at once.
    pub(super) fn evict(&mut self) -> Option<bool> {
        if self.shared.evict.load(Ordering::Relaxed) {
            self.shared.evict.store(false, Ordering::SeqCst);
            self.eviction = Some(Eviction { blocks: self.policy.len(), singles: self.singles_there });
        }
        let Eviction { blocks, singles } = self.eviction?;
        if !self.events.is_empty() {
            return Some(false);
        }
        if self.has_writes() {
            return Some(self.carry_write());
        }
        if let Some(slot) = self.find(Slot::Free) {
            self.scrub(slot);
        } else if blocks.min(self.policy.len()) > 0 {
            if self.begin_write().is_none() && (self.is_broken || self.is_full) {
                self.eviction = Some(Eviction { blocks: 0, singles });
            }
        } else if !self.writing.is_empty() {
            return Some(self.carry_write());
        } else if singles > 0 {
            let before = self.singles_there;
            let has_written = self.write_singles(singles::BATCH);
            let gone = before.saturating_sub(self.singles_there);
            // While the address space changes, no page can be moved out.
            let goes_on = has_written || self.kernel.is_changing();
            self.eviction =
                Some(Eviction { blocks: 0, singles: if goes_on { singles.saturating_sub(gone) } else { 0 } });
        } else if let Some(id) = self.unused() {
            self.drop_copy(id);
        } else {
            self.end_outbox();
            self.eviction = None;
            count(&self.shared.counters.evictions, 1);
        }
        Some(true)
    }
}
