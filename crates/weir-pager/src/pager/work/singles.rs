//! Single pages of blocks that are in the store, for programs that jump.
//!
//! They come by copy and go by reference, many at a time: the pages that came first move to a slot,
//! are written, and are freed with it. A block has single pages only while its state is `Stored`,
//! or while it is being brought as a whole.

use super::*;

/// Pages that go at a time.
const BATCH: usize = 64;
/// Faults on pages one after the other, after which the rest of the block comes too.
const RUN: u8 = 3;
/// Single pages of a block from which on it may be worth to have all of it, and how many times as
/// many as a block has on average.
const MANY: usize = 64;
const TIMES_AVERAGE: usize = 4;
/// How long blocks are left alone of which none could go.
const STUCK: Duration = Duration::from_millis(20);
/// While a program jumps, so many blocks of the limit may be whole.
const WHOLE_SHARE: usize = 8;

impl<S: Store> Work<S> {
    /// Whether a fault on a block in the store is for one page of it, not for all.
    pub(super) fn is_single(&mut self, id: u32, page: usize, stride: Option<i64>) -> bool {
        let blocks = self.blocks.len();
        let block = self.blocks.get_mut(id);
        let (last, run) = block.run;
        let run = if page == last + 1 { run + 1 } else { 0 };
        block.run = (page, run);
        let there = block.count_there();
        // A stream enters a block at one of its ends.
        let enters = stride.is_some() && (page == 0 || page == BLOCK_PAGES - 1);
        let is_dense = there >= MANY && there * blocks > TIMES_AVERAGE * self.singles_there;
        !(self.policy.is_streaming() || enters || is_dense || run >= RUN)
    }

    /// Whether the page before it was the last that came alone.
    pub(super) fn is_next_single(&self, id: u32, page: usize) -> bool {
        let block = self.blocks.get(id);
        block.state == State::Stored && page == block.run.0 + 1
    }

    /// Brings one page of a block that is in the store. `false` when it cannot be had.
    pub(super) fn bring_single(&mut self, id: u32, page: usize) -> Result<bool, Changed> {
        if !self.blocks.get(id).is_there(page) {
            self.make_room_for_singles();
            if !self.events.is_empty() {
                return Err(Changed);
            }
        }
        let Work { blocks, store, single, uffd, shared, .. } = self;
        let block = blocks.get_mut(id);
        let at = block.at + page * PAGE_SIZE;
        let brought = match block.room {
            _ if block.is_there(page) => Err(Errno::EXIST),
            _ if block.is_zero(page) => uffd.zero(at, PAGE_SIZE).map_err(|stopped| stopped.why),
            Some(room) if store.read(room + page as u64, single.as_mut_slice()).is_ok() => {
                count(&shared.counters.singles, 1);
                let from = single.as_ptr().expose_provenance();
                uffd.copy(at, from, PAGE_SIZE).map_err(|stopped| stopped.why)
            }
            // The block says what is lost of it.
            _ => return Ok(false),
        };
        match brought {
            Ok(()) => {
                block.there[page / 64] |= 1 << (page % 64);
                if let Some(ending) = &mut block.ending {
                    ending[page / 64] &= !(1 << (page % 64));
                }
                self.singles_there += 1;
                self.singles.push_back((id, page as u32));
                if self.singles.len() > 2 * self.singles_there + BLOCK_PAGES {
                    let mut singles = std::mem::take(&mut self.singles);
                    singles.retain(|&(id, page)| self.is_singly_there(id, page as usize));
                    self.singles = singles;
                }
                Ok(true)
            }
            Err(Errno::AGAIN) => Err(Changed),
            // There already, or mapped no more.
            Err(_) => {
                uffd.wake(at, PAGE_SIZE);
                Ok(true)
            }
        }
    }

    fn is_singly_there(&self, id: u32, page: usize) -> bool {
        self.blocks.is_known(id)
            && self.blocks.get(id).state == State::Stored
            && self.blocks.get(id).is_there(page)
    }

    fn make_room_for_singles(&mut self) {
        while self.room_for_singles() == 0 {
            if self.find(Slot::Free).is_some() {
                self.scrub_free();
                continue;
            }
            // Blocks that a child shares or a device uses are not tried anew for each page.
            let is_whole = self.policy.len() > self.limit() / WHOLE_SHARE
                && self.stuck.is_none_or(|since| since.elapsed() > STUCK);
            if self.writing.is_some() || is_whole && self.begin_write().is_some() {
                while self.writing.is_some() {
                    self.write();
                }
                continue;
            }
            if is_whole {
                self.stuck = Some(Instant::now());
            }
            // If blocks that stay take the whole limit, a few pages come and go beyond it, not one.
            if self.singles_there < BLOCK_PAGES || !self.write_singles() {
                count(&self.shared.counters.beyond_limit, 1);
                return;
            }
        }
    }

    /// Single pages that may come before one must go.
    fn room_for_singles(&self) -> usize {
        let whole = self.frames() - self.singles_there.div_ceil(BLOCK_PAGES);
        (self.limit().saturating_sub(whole) * BLOCK_PAGES).saturating_sub(self.singles_there)
    }

    /// Whether pages should go before the next fault has to wait for that.
    pub(super) fn is_short_of_singles(&self) -> bool {
        self.singles_there >= BATCH && self.room_for_singles() < BATCH
    }

    /// Frees the frames that nobody uses.
    fn scrub_free(&mut self) {
        while let Some(slot) = self.find(Slot::Free) {
            self.scrub(slot);
        }
    }

    /// Makes room for a block. `false` when no page could go.
    pub(super) fn write_block_of_singles(&mut self) -> bool {
        let before = self.singles_there;
        while before - self.singles_there < BLOCK_PAGES && self.write_singles() {}
        self.singles_there < before
    }

    /// Takes the pages that came first out of place. `false` when none could go.
    pub(super) fn write_singles(&mut self) -> bool {
        if self.is_broken || self.is_held() || !self.events.is_empty() || self.is_heeding {
            return false;
        }
        let Some(slot) = self.find(Slot::Vacant) else { return false };
        let mut gone = Vec::with_capacity(BATCH);
        for _ in 0..self.singles.len().min(4 * BATCH) {
            if gone.len() == BATCH {
                break;
            }
            let Some((id, page)) = self.singles.pop_front() else { break };
            let page = page as usize;
            // An entry of a block that has gone, or came as a whole, is old.
            if !self.is_singly_there(id, page) {
                continue;
            }
            let to = self.slot(slot) + gone.len() * PAGE_SIZE;
            match self.move_pages(to, self.blocks.get(id).at + page * PAGE_SIZE, PAGE_SIZE) {
                Ok(()) => gone.push((id, page)),
                // Moved, and not said so.
                Err(Stopped { done: 1.., .. }) => gone.push((id, page)),
                // In use by a device, locked, shared with a child, or gone.
                Err(_) => self.singles.push_back((id, page as u32)),
            }
        }
        if gone.is_empty() {
            return false;
        }
        self.slots[slot] = Slot::Busy;
        let mut result = Ok(());
        // Writes under way to the same room are older.
        if self.store.settle().is_err() {
            self.fail();
        }
        for (at, &(id, page)) in gone.iter().enumerate() {
            // SAFETY: a page that has just come to the slot, and no other thread's.
            let bytes = unsafe { &*page_at(self.slot(slot) + at * PAGE_SIZE) };
            let is_zero = uniform_value(bytes) == Some(0);
            let block = self.blocks.get_mut(id);
            let room = block.room.expect("what is in the store has room there");
            block.set_zero(page, is_zero);
            if !is_zero && result.is_ok() {
                result = self.store.write(room + page as u64, bytes);
            }
        }
        let result = result.and_then(|()| self.store.settle());
        if result.is_err() {
            self.fail();
            for (at, &(id, page)) in gone.iter().enumerate() {
                self.copy_in(self.blocks.get(id).at + page * PAGE_SIZE, self.slot(slot) + at * PAGE_SIZE);
                self.singles.push_back((id, page as u32));
            }
        } else {
            count(&self.shared.counters.singles_written, gone.len() as u64);
            for &(id, page) in &gone {
                self.blocks.get_mut(id).there[page / 64] &= !(1 << (page % 64));
            }
            self.singles_there -= gone.len();
        }
        self.scrub(slot);
        result.is_ok()
    }

    /// The block has no single pages any more: they are part of the whole, or gone.
    pub(super) fn forget_singles(&mut self, id: u32, pages: std::ops::Range<usize>) {
        let block = self.blocks.get_mut(id);
        for page in pages {
            if block.is_there(page) {
                block.there[page / 64] &= !(1 << (page % 64));
                self.singles_there -= 1;
            }
        }
    }
}
