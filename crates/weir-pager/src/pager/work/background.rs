//! Background work while no thread waits: writing blocks out, and prefetching.

use super::*;

impl<K: Kernel, S: Store> Work<K, S> {
    /// Does one step of background work. Returns whether there may be another step at once.
    pub(super) fn background(&mut self) -> bool {
        if self.is_held() {
            return false;
        }
        self.collect();
        let is_alone = self.helpers.are_away();
        if is_alone && let Some(&id) = self.filling.front() {
            self.carry(id);
            return true;
        }
        if let Some(goes_on) = self.evict() {
            return goes_on;
        }
        if self.is_above()
            && let Some(slot) = self.find(Slot::Free)
        {
            self.scrub(slot);
            return true;
        }
        let short = self.short_of_singles();
        if short > 0 {
            if self.policy.is_jumping()
                && let Some(slot) = self.find(Slot::Free)
            {
                self.scrub(slot);
                return true;
            }
            if self.gives_blocks() {
                let goes_on = match self.writing.is_empty() {
                    true => self.begin_write().is_some(),
                    false => self.carry_write(),
                };
                if goes_on {
                    return true;
                }
                if self.is_full {
                    self.stuck = Some(self.kernel.now());
                }
            }
            if self.write_singles(short) {
                return true;
            }
        }
        if self.place() {
            return true;
        }
        if self.find(Slot::Free).is_some() && !(is_alone && self.has_writes()) && self.begin_fill() {
            return true;
        }
        if self.has_writes() {
            return self.carry_write();
        }
        let spares_blocks = self.spares_blocks();
        // Each block that is being written makes room.
        let is_above = self.frames() > self.limit() + self.writing.len();
        let is_short = self.is_short_of_frames() && !spares_blocks;
        (is_above || is_short)
            && (self.write_singles_of_turn()
                || self.singles_go_first(1) && self.write_singles(singles::FEW)
                || !self.keeps_few() && self.begin_write().is_some())
    }

    /// Whether there are fewer frames for the next blocks than there should be, with those that are
    /// being written. A few blocks may use the last frame. So may blocks that come straight back.
    fn is_short_of_frames(&self) -> bool {
        let free = self.slots.iter().filter(|slot| **slot == Slot::Free).count();
        let target = (self.limit() / 8).clamp(1, WRITES_MOST);
        self.frames() >= self.limit()
            && free + self.writing.len() < target
            && !self.has_few()
            && !self.keeps_blocks()
    }

    /// Whether so few whole blocks are in place that a thread may need all of them at once.
    fn has_few(&self) -> bool {
        (1..=FRESH).contains(&self.policy.len())
    }

    /// Whether single pages make room, and not whole blocks. Where only a few blocks are in place,
    /// they do if there are at least `least` of them.
    pub(super) fn singles_go_first(&self, least: usize) -> bool {
        self.spares_blocks() || self.has_few() && self.singles_there >= least && !self.is_stuck_singly()
    }

    /// Whether no whole block goes: there are few, and no single page can go in their place.
    pub(super) fn keeps_few(&self) -> bool {
        self.has_few() && self.is_stuck_singly()
    }

    /// Begins to write a block for the frame that a page fault will take, while helpers bring the
    /// block of that page fault.
    pub(super) fn write_beside(&mut self) {
        if !self.has_writes()
            && !self.helpers.are_away()
            && self.is_short_of_frames()
            && !self.spares_blocks()
        {
            self.begin_write();
        }
    }

    /// Whether as many blocks are being written as may be at a time.
    pub(super) fn has_writes(&self) -> bool {
        self.writing.len() >= if self.helpers.are_away() { 1 } else { WRITES_MOST }
    }

    /// Writes a part of a block, if no helper does. Returns whether it did.
    pub(super) fn carry_write(&mut self) -> bool {
        let Some(&id) = self.writing.front().filter(|_| self.helpers.are_away()) else { return false };
        self.carry(id);
        true
    }

    /// Carries the next part of a block that is being written or prefetched.
    fn carry(&mut self, id: u32) {
        if let State::Writing(slot) | State::Filling(slot) = self.blocks.get(id).state {
            self.helpers.step(slot, &mut self.store, &mut self.kernel);
        }
    }

    /// Moves a batch of single pages out, if it is the turn of partial blocks. Such a turn takes
    /// several short steps, since page faults wait until a step has ended.
    pub(super) fn write_singles_of_turn(&mut self) -> bool {
        if self.batches == 0 && self.is_turn_of_partial() {
            self.batches = BLOCK_PAGES / singles::FEW;
        }
        let has_written = self.batches > 0 && self.write_singles(singles::FEW);
        self.batches = if has_written { self.batches - 1 } else { 0 };
        has_written
    }

    /// Chooses a victim, moves it into a slot, and begins to write it to the store. `None` if no
    /// block can be moved out now.
    pub(super) fn begin_write(&mut self) -> Option<()> {
        let slot = self.find(Slot::Vacant).filter(|_| !self.is_broken && !self.is_held())?;
        for _ in 0..TRIES.min(self.policy.len()) {
            // The tables have the right addresses of blocks only once every event that was read is
            // handled.
            if !self.events.is_empty() || self.is_heeding {
                return None;
            }
            let id = self.victim()?;
            let is_new = self.blocks.get(id).room.is_none();
            if is_new && !self.claim_room(id) {
                return None;
            }
            let at = self.blocks.get(id).at;
            if self.has_ended(id) && self.move_out(at, slot) {
                self.placed.retain(|&(other, _)| other != id);
                self.was_tried();
                let for_singles = self.singles_of_whole() >= singles::BATCH && self.eviction.is_none();
                let block = self.blocks.get_mut(id);
                self.policy.evicted(id, &mut block.history, for_singles);
                block.state = State::Writing(slot);
                self.begin_hashes(id);
                self.begin_load(id, slot, false);
                return Some(());
            }
            // A block that stays in place needs no room in the store. If a child shares all blocks
            // with its parent, all of them stay, and other processes need the store too.
            if is_new {
                self.release_room(id);
            }
            // While the address space changes, no block can be moved out. This block keeps its
            // place in the order.
            if self.kernel.is_changing() {
                return None;
            }
            self.policy.spared(id);
            self.was_tried();
        }
        self.stuck = Some(self.kernel.now());
        None
    }

    /// Claims room in the store for a block that has none. Returns false if the store is full. For
    /// a while after that, partial blocks get no room, since a whole block uses more of its room.
    pub(super) fn claim_room(&mut self, id: u32) -> bool {
        let is_scarce = self.refused.is_some_and(|since| self.kernel.now() - since <= STUCK);
        if is_scarce && self.blocks.get(id).is_partial {
            return false;
        }
        let room = self.store.claim().or_else(|| self.take_spare_room());
        // A full store gets room when a block comes back, and is full again after the next block.
        // People do not need a line each time.
        if self.full_at.is_some_and(|rooms| self.rooms < rooms / 4 * 3) {
            self.full_at = None;
        }
        self.is_full = room.is_none();
        if self.is_full {
            self.refused = Some(self.kernel.now());
            if self.full_at.is_none() {
                self.full_at = Some(self.rooms);
                self.outside.tell("the store is full; the program may take more memory than its limit (a larger --store helps)");
            }
        }
        self.rooms += usize::from(room.is_some());
        self.blocks.get_mut(id).room = room;
        room.is_some()
    }

    /// Whether the kernel has removed all of a block's pages whose content the program has dropped.
    pub(super) fn has_ended(&mut self, id: u32) -> bool {
        let at = self.blocks.get(id).at;
        let Some(mut ending) = self.blocks.get_mut(id).ending.take() else { return true };
        let mut there = [0; BLOCK_PAGES / 64];
        let seen = self.kernel.populated(at, at + BLOCK, |start, end| {
            for page in (start - at) / PAGE_SIZE..(end - at) / PAGE_SIZE {
                there[page / 64] |= 1 << (page % 64);
            }
        });
        if seen.is_ok() {
            for (ending, there) in ending.iter_mut().zip(there) {
                *ending &= there;
            }
        }
        if ending.iter().any(|pages| *pages != 0) {
            self.blocks.get_mut(id).ending = Some(ending);
            return false;
        }
        true
    }

    /// Begins to move the pages of a block between its slot and the store: to write it if its state
    /// says so, else to read it.
    pub(super) fn begin_load(&mut self, id: u32, slot: usize, is_urgent: bool) {
        let is_write = matches!(self.blocks.get(id).state, State::Writing(_));
        // Writes of this thread to the room may still be under way: of its earlier owner, or of
        // this block before it was taken back. Wait for their end, so that they do not overwrite
        // this content.
        if is_write && self.store.settle().is_err() {
            self.fail();
        }
        let block = self.blocks.get(id);
        // A block of zeros alone needs no room.
        let room = block.room.unwrap_or_default();
        let (zeros, stored) = (&block.zeros, block.stored.as_deref());
        let load = Load { is_write, at: self.slot(slot), room, zeros, stored };
        self.helpers.begin(slot, &load, is_urgent);
        match block.state {
            State::Writing(_) => self.writing.push_back(id),
            State::Filling(_) => self.filling.push_back(id),
            _ => {}
        }
    }

    fn forget_load(&mut self, id: u32) {
        self.writing.retain(|&other| other != id);
        self.filling.retain(|&other| other != id);
    }

    /// Waits until all of a block has moved between its slot and the store, or has not. `is_needed`
    /// says whether what cannot be read is tried once more.
    fn end_load(&mut self, id: u32, slot: usize, is_needed: bool) -> Result<Kept, Trouble> {
        self.forget_load(id);
        let Block { zeros, stored, .. } = self.blocks.get_mut(id);
        let notes = Notes { zeros, stored: stored.as_deref_mut() };
        self.helpers.end(slot, notes, &mut self.store, &mut self.kernel, is_needed)
    }

    /// Stops what is under way between a block's slot and the store. Returns whether the block was
    /// being written.
    pub(super) fn stop(&mut self, id: u32) -> bool {
        self.forget_load(id);
        let Block { state, zeros, stored, .. } = self.blocks.get_mut(id);
        let (State::Writing(slot) | State::Filling(slot)) = *state else { return false };
        let is_write = matches!(state, State::Writing(_));
        let notes = Notes { zeros, stored: stored.as_deref_mut() };
        let stopped = self.helpers.stop(slot, notes, &mut self.kernel);
        if is_write && stopped == Err(Trouble::Failed) {
            self.fail();
        }
        is_write
    }

    /// Notes which blocks have been written or prefetched.
    pub(super) fn collect(&mut self) {
        let ended = self.helpers.ended(&mut self.kernel);
        if ended == 0 {
            return;
        }
        let blocks = &self.blocks;
        let has_ended = |id: &&u32| match blocks.get(**id).state {
            State::Writing(slot) | State::Filling(slot) => ended >> slot & 1 != 0,
            _ => false,
        };
        let written: Vec<u32> = self.writing.iter().filter(has_ended).copied().collect();
        let filled: Vec<u32> = self.filling.iter().filter(has_ended).copied().collect();
        for id in written {
            self.end_write(id);
        }
        for id in filled {
            self.end_fill(id);
        }
    }

    /// Waits for the end of all that is under way between slots and the store.
    pub(super) fn end_loads(&mut self) {
        while let Some(&id) = self.writing.front() {
            self.end_write(id);
        }
        while let Some(&id) = self.filling.front() {
            self.end_fill(id);
        }
    }

    /// Waits until the oldest of the blocks that are being written is written.
    pub(super) fn end_oldest_write(&mut self) {
        if let Some(&id) = self.writing.front() {
            self.end_write(id);
        }
    }

    /// Waits until a block is written, if it is being written.
    pub(super) fn end_write(&mut self, id: u32) {
        let State::Writing(slot) = self.blocks.get(id).state else { return };
        let written = self.end_load(id, slot, true);
        // An earlier call of the store may have got the error of a failed write. That error names
        // no page, so pages of this block may be missing in the store.
        let kept = match written {
            Ok(kept) if !self.is_broken => kept,
            _ => {
                // A write that was given up is begun anew. The store may answer by then.
                if written.err() != Some(Trouble::GivenUp) {
                    self.fail();
                }
                // If the block does not go back into place now, its next page fault brings it back.
                self.blocks.get_mut(id).state = State::Back(slot);
                if self.bring(id).is_err() && written.err() == Some(Trouble::GivenUp) {
                    // Nobody may touch it for long, and it would keep its slot.
                    self.blocks.get_mut(id).state = State::Writing(slot);
                    self.begin_load(id, slot, false);
                }
                return;
            }
        };
        count(&self.shared.counters.zero_pages, kept.zeros);
        count(&self.shared.counters.clean_pages, kept.clean);
        count(&self.shared.counters.writes, 1);
        let block = self.blocks.get_mut(id);
        // A block of zeros needs no room in the store. This matters for a program that reads one
        // page in each block of an area far larger than the store.
        if block.zeros.iter().all(|pages| *pages == u64::MAX) {
            block.state = State::Empty;
            self.release_room(id);
        } else {
            block.state = State::Stored;
        }
        self.leave(slot);
    }

    pub(super) fn fail(&mut self) {
        if !self.is_broken {
            self.outside.tell("the store fails; the program may take more memory than its limit from here on (start it again)");
        }
        self.is_broken = true;
    }

    /// Begins to read the block that the streams predict next.
    pub(super) fn begin_fill(&mut self) -> bool {
        let most = self.ready_most();
        while let Some(&at) = self.wanted.front() {
            if !self.is_all_away(at) {
                self.wanted.pop_front();
                continue;
            }
            let is_free = self.blocks_ready() < most || self.is_outdated() && self.drop_ready();
            let Some(slot) = self.find(Slot::Free).filter(|_| is_free) else { return false };
            self.wanted.pop_front();
            let id = self.blocks.at(at).expect("it is in the store");
            self.slots[slot] = Slot::Busy;
            self.blocks.get_mut(id).state = State::Filling(slot);
            self.begin_load(id, slot, false);
            return true;
        }
        false
    }

    /// Whether nobody has used the oldest prefetched block for a while. Such blocks, of streams
    /// that have ended, would keep those of others from being prefetched.
    fn is_outdated(&self) -> bool {
        self.ready.front().is_some_and(|&(_, since)| self.wants - since >= READY_FOR)
    }

    /// Drops the oldest prefetched block that nobody has used. Returns false if there is none.
    pub(super) fn drop_ready(&mut self) -> bool {
        while let Some((id, _)) = self.ready.pop_front() {
            if self.blocks.is_known(id) && matches!(self.blocks.get(id).state, State::Ready(_)) {
                self.drop_copy(id);
                return true;
            }
        }
        false
    }

    pub(super) fn blocks_ready(&self) -> usize {
        let others = self.writing.len() + usize::from(self.outbox.is_some());
        self.slots.iter().filter(|slot| **slot == Slot::Busy).count() - others
    }

    /// Waits until a block is prefetched, if it is being prefetched. A block that cannot be read
    /// stays in the store: perhaps it can be read once a thread touches it.
    pub(super) fn end_fill(&mut self, id: u32) {
        let State::Filling(slot) = self.blocks.get(id).state else { return };
        let is_asked = self.asked.contains(&id);
        if self.end_load(id, slot, false).is_ok() {
            count(&self.shared.counters.ahead, u64::from(!is_asked));
            self.blocks.get_mut(id).state = State::Ready(slot);
            self.ready.push_back((id, self.wants));
        } else {
            self.blocks.get_mut(id).state = State::Stored;
            self.leave(slot);
        }
    }

    /// Reads a block into a slot. Returns false if one of its pages cannot be read.
    pub(super) fn read(&mut self, id: u32, slot: usize) -> bool {
        self.begin_load(id, slot, true);
        self.write_beside();
        self.end_load(id, slot, true).is_ok()
    }

    /// Takes the room of a block that is in place. Such a block keeps its room until the store is
    /// full, and claims another one when it moves out.
    fn take_spare_room(&mut self) -> Option<u64> {
        if !self.may_spare_room {
            return None;
        }
        let blocks = &self.blocks;
        let found = self.policy.newest_first().find(|&id| blocks.get(id).room.is_some());
        self.may_spare_room = found.is_some();
        self.release_room(found?);
        self.store.claim()
    }

    /// Gives a block memory for hashes, unless the hashes of all blocks already fill their share of
    /// the limit. If they exceed their share, because the limit was lowered, the block loses its
    /// hashes.
    pub(super) fn begin_hashes(&mut self, id: u32) {
        let limit = self.shared.limit.load(Ordering::Relaxed);
        let most = (limit.saturating_mul(BLOCK / HASHED_SHARE / HASHES)).min(HASHED_MAX);
        let stored = &mut self.blocks.get_mut(id).stored;
        if self.hashed > most {
            self.hashed -= usize::from(stored.take().is_some());
        } else if self.hashed < most && stored.is_none() {
            *stored = hashes();
            self.hashed += usize::from(stored.is_some());
        }
    }

    pub(super) fn release_room(&mut self, id: u32) {
        // Settle before the release: otherwise a late write of this block could overwrite the
        // content of the room's next owner.
        if self.blocks.get(id).room.is_some() && self.store.settle().is_err() {
            self.fail();
        }
        let block = self.blocks.get_mut(id);
        self.hashed -= usize::from(block.stored.take().is_some());
        if let Some(room) = block.room.take() {
            self.rooms -= 1;
            self.store.release(room);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::pager::simulator::{Machine, Simulated, address, work_at_rest};
    use std::io;
    use weir_core::PageBytes;

    #[test]
    fn a_block_of_zeros_takes_no_room_in_the_store() {
        let (mut work, first) = work_at_rest();
        work.kernel.world.map(first, first + BLOCK_PAGES);
        work.kernel.register(address(first), address(first + BLOCK_PAGES)).unwrap();
        let id = work.blocks.add(address(first), State::Resident);
        for (word, state, rooms) in [(0, State::Empty, 0), (7, State::Stored, 1)] {
            work.kernel.world.come(first + 5, word);
            work.policy.came(id);
            work.begin_write().expect("it can go");
            work.end_loads();
            assert_eq!((work.blocks.get(id).state, work.rooms), (state, rooms));
            assert_eq!(work.store.said.lock().unwrap().rooms, rooms);
            work.bring(id).unwrap();
            assert_eq!([5, 6].map(|page| work.kernel.world.word(first + page)), [word, 0]);
            work.policy.went(id);
        }
    }

    #[test]
    fn a_block_goes_to_the_room_of_one_in_place_where_the_store_has_no_other() {
        let (mut work, first) = work_at_rest();
        let ids = [0, 1].map(|number| {
            let page = first + number * BLOCK_PAGES;
            work.kernel.world.map(page, page + BLOCK_PAGES);
            work.kernel.register(address(page), address(page + BLOCK_PAGES)).unwrap();
            work.kernel.world.come(page + 5, page as u64);
            let id = work.blocks.add(address(page), State::Resident);
            work.policy.came(id);
            id
        });
        // The first block moves out and back in. It keeps its room.
        work.begin_write().expect("it can go");
        work.end_loads();
        work.bring(ids[0]).unwrap();
        assert!(work.blocks.get(ids[0]).room.is_some());
        while work.store.claim().is_some() {}
        // The second block moves out and takes the room of the first block. The first block has no
        // room then.
        work.begin_write().expect("it can go");
        work.end_loads();
        assert_eq!(work.blocks.get(ids[1]).state, State::Stored);
        assert_eq!((work.blocks.get(ids[0]).room, work.rooms), (None, 1));
        assert!(work.begin_write().is_none(), "nothing else has room");
        work.bring(ids[1]).unwrap();
        let words = [0, 1].map(|number| work.kernel.world.word(first + number * BLOCK_PAGES + 5));
        assert_eq!(words, [first as u64, (first + BLOCK_PAGES) as u64]);
    }

    #[test]
    fn a_block_that_cannot_be_prefetched_is_not_lost_and_one_that_is_needed_is() {
        let (mut work, first) = work_at_rest();
        work.kernel.world.map(first, first + BLOCK_PAGES);
        work.kernel.register(address(first), address(first + BLOCK_PAGES)).unwrap();
        work.kernel.world.come(first + 5, 7);
        let id = work.blocks.add(address(first), State::Resident);
        work.policy.came(id);
        work.begin_write().expect("it can go");
        work.end_loads();
        work.store.hide(true);
        work.wanted.push_back(address(first));
        assert!(work.begin_fill());
        work.background();
        assert!(work.store.ahead > 0, "nobody waits for a store that stands still");
        work.end_loads();
        let lost = |work: &Work<_, _>| work.shared.counters.lost.load(Ordering::Relaxed);
        assert_eq!((work.blocks.get(id).state, work.blocks_ready(), lost(&work)), (State::Stored, 0, 0));
        work.store.hide(false);
        work.bring(id).unwrap();
        assert_eq!(work.kernel.world.word(first + 5), 7);
        work.begin_write().expect("it can go");
        work.end_loads();
        work.store.hide(true);
        work.bring(id).unwrap();
        assert_eq!((work.blocks.get(id).state, lost(&work)), (State::Lost, 1));
    }

    /// A connection by which no write ends before somebody cannot wait for it.
    struct Stalled;

    impl Store for Stalled {
        fn claim(&mut self) -> Option<u64> {
            None
        }

        fn release(&mut self, _: u64) {}

        fn write(&mut self, _: u64, _: &[PageBytes]) -> io::Result<()> {
            Ok(())
        }

        fn settle(&mut self) -> io::Result<()> {
            Err(io::ErrorKind::Interrupted.into())
        }

        fn read(&mut self, _: u64, _: &mut [PageBytes]) -> io::Result<()> {
            Err(io::ErrorKind::TimedOut.into())
        }
    }

    #[test]
    fn a_write_that_was_given_up_costs_neither_the_limit_nor_a_page() {
        let (mut work, first) = work_at_rest();
        work.helpers.played.open_one(Box::new(Stalled), &Arc::default());
        work.kernel.world.map(first, first + BLOCK_PAGES);
        work.kernel.register(address(first), address(first + BLOCK_PAGES)).unwrap();
        for page in 0..BLOCK_PAGES {
            work.kernel.world.come(first + page, page as u64 + 1);
        }
        let id = work.blocks.add(address(first), State::Resident);
        // It is wanted back while it is written, or comes back as its write has ended.
        for is_wanted in [true, false] {
            work.policy.came(id);
            work.begin_write().expect("it can go");
            work.begin_hashes(id);
            match is_wanted {
                true => work.bring(id).unwrap(),
                false => work.end_loads(),
            }
            assert_eq!((work.blocks.get(id).state, work.is_broken), (State::Resident, false));
            work.policy.went(id);
        }
        // Nobody takes its pages for stored ones. While events are handled, the block cannot come
        // back, and nobody may touch it later. So it goes on its way. This connection takes parts
        // now and then.
        for round in 0..10 {
            work.policy.came(id);
            work.begin_write().expect("it can go");
            work.is_heeding = true;
            (0..round).for_each(|_| work.collect());
            work.end_loads();
            work.is_heeding = false;
            assert_eq!(work.blocks.get(id).state, State::Stored);
            work.bring(id).unwrap();
            work.policy.went(id);
        }
        for page in 0..BLOCK_PAGES {
            assert_eq!(work.kernel.world.word(first + page), page as u64 + 1);
        }
    }

    #[test]
    fn a_page_that_the_store_has_is_not_written_again() {
        let (mut work, first) = work_at_rest();
        work.kernel.world.map(first, first + BLOCK_PAGES);
        work.kernel.register(address(first), address(first + BLOCK_PAGES)).unwrap();
        for page in 0..BLOCK_PAGES {
            work.kernel.world.come(first + page, page as u64 + 1);
        }
        let id = work.blocks.add(address(first), State::Resident);
        let clean = |work: &Work<_, _>| work.shared.counters.clean_pages.load(Ordering::Relaxed);
        // In each of the three middle rounds one page changes: the first page, page 100, the last
        // page.
        for (round, changed) in
            [None, Some(0), Some(100), Some(BLOCK_PAGES - 1), None].into_iter().enumerate()
        {
            if let Some(page) = changed {
                work.kernel.world.come(first + page, 7000 + page as u64);
            }
            let before = clean(&work);
            work.policy.came(id);
            work.begin_write().expect("it can go");
            work.end_loads();
            let written = if round == 0 { BLOCK_PAGES } else { usize::from(changed.is_some()) };
            assert_eq!(clean(&work) - before, (BLOCK_PAGES - written) as u64);
            work.bring(id).unwrap();
            work.policy.went(id);
        }
        for page in 0..BLOCK_PAGES {
            let has_changed = [0, 100, BLOCK_PAGES - 1].contains(&page);
            let word = if has_changed { 7000 + page as u64 } else { page as u64 + 1 };
            assert_eq!(work.kernel.world.word(first + page), word);
        }
    }

    #[test]
    fn hashes_take_no_more_than_their_share_of_the_limit() {
        let (mut work, first) = work_at_rest();
        let ids = [0, 1].map(|number| work.blocks.add(address(first + number * BLOCK_PAGES), State::Stored));
        let has = |work: &Work<_, _>, number: usize| work.blocks.get(ids[number]).stored.is_some();
        // A limit of one block is 2 MiB, of which 64 KiB are for hashes: those of 16 blocks.
        work.shared.limit.store(1, Ordering::Relaxed);
        work.hashed = 15;
        ids.iter().for_each(|&id| work.begin_hashes(id));
        assert_eq!((has(&work, 0), has(&work, 1), work.hashed), (true, false, 16));
        work.release_room(ids[0]);
        work.begin_hashes(ids[1]);
        assert_eq!((has(&work, 0), has(&work, 1), work.hashed), (false, true, 16));
        // A block that goes out under a lower limit loses its hashes.
        work.shared.limit.store(0, Ordering::Relaxed);
        work.begin_hashes(ids[1]);
        assert_eq!((has(&work, 1), work.hashed), (false, 15));
        // However high the limit, hashes take no more than the pager's address space has for them.
        work.shared.limit.store(usize::MAX, Ordering::Relaxed);
        work.hashed = HASHED_MAX;
        work.begin_hashes(ids[1]);
        assert!(!has(&work, 1));
        work.hashed = 0;
    }

    #[test]
    fn a_block_with_another_room_is_written_whole() {
        let (mut work, first) = work_at_rest();
        work.kernel.world.map(first, first + BLOCK_PAGES);
        work.kernel.register(address(first), address(first + BLOCK_PAGES)).unwrap();
        work.kernel.world.come(first + 5, 7);
        let id = work.blocks.add(address(first), State::Resident);
        for _ in 0..2 {
            work.policy.came(id);
            work.begin_write().expect("it can go");
            work.end_loads();
            work.bring(id).unwrap();
            work.policy.went(id);
            assert_eq!(work.kernel.world.word(first + 5), 7);
            work.release_room(id);
        }
    }

    #[test]
    fn a_full_store_is_asked_once_for_many_pages_and_people_hear_of_it_once() {
        let (mut work, first) = work_at_rest();
        let told = Arc::new(std::sync::atomic::AtomicUsize::new(0));
        let count = Arc::clone(&told);
        work.outside = Box::new(move |_: &str| {
            count.fetch_add(1, Ordering::Relaxed);
        });
        work.rooms = 4;
        let rooms: Vec<u64> = std::iter::from_fn(|| work.store.claim()).collect();
        let refused = |work: &Work<Machine, Simulated>| work.store.said.lock().unwrap().refused;
        let before = refused(&work);
        // A page in each of eight partial blocks.
        for number in 0..8 {
            let page = first + number * BLOCK_PAGES;
            work.kernel.world.map(page, page + 1);
            work.kernel.register(address(page), address(page + 1)).unwrap();
            work.add_span(address(page), address(page + 1));
            work.kernel.world.come(page, 7);
            let id = work.blocks.add_partial(address(page));
            work.came_singly(id, 0..1);
        }
        assert!(!work.write_singles(singles::BATCH));
        assert_eq!(refused(&work) - before, 1);
        // Release the rooms, one after the other. Each time no partial block takes the free room,
        // and then a whole block does.
        for (number, &room) in rooms.iter().enumerate() {
            work.store.release(room);
            assert!(!work.write_singles(singles::BATCH), "a whole block may need the room");
            let id = work.blocks.add(address(first + (20 + 2 * number) * BLOCK_PAGES), State::Resident);
            assert!(work.claim_room(id));
            let id = work.blocks.add(address(first + (21 + 2 * number) * BLOCK_PAGES), State::Resident);
            assert!(!work.claim_room(id));
            work.rooms -= 1;
        }
        assert_eq!(told.load(Ordering::Relaxed), 1);
        // After a pause, partial blocks get room too.
        work.kernel.world.now += STUCK + PAUSE;
        let id = work.blocks.at(address(first + 20 * BLOCK_PAGES)).unwrap();
        work.rooms += 1;
        work.release_room(id);
        assert!(work.write_singles(singles::BATCH));
        assert_eq!((told.load(Ordering::Relaxed), work.singles_there), (1, 7));
    }

    #[test]
    fn the_turn_of_partial_blocks_goes_in_short_steps() {
        let (mut work, first) = work_at_rest();
        work.kernel.world.map(first, first + BLOCK_PAGES - 1);
        work.kernel.register(address(first), address(first + BLOCK_PAGES - 1)).unwrap();
        work.add_span(address(first), address(first + BLOCK_PAGES - 1));
        let id = work.blocks.add_partial(address(first));
        for page in 0..BLOCK_PAGES - 1 {
            work.kernel.world.come(first + page, 7);
        }
        work.came_singly(id, 0..BLOCK_PAGES - 1);
        work.shared.limit.store(0, Ordering::Relaxed);
        for step in 1..=BLOCK_PAGES / singles::FEW {
            assert!(work.background());
            let left = (BLOCK_PAGES - 1).saturating_sub(step * singles::FEW);
            assert_eq!(work.singles_there, left, "a page fault waits for the end of a step");
        }
        assert_eq!(work.batches, 0);
    }

    #[test]
    fn a_block_that_cannot_be_moved_out_takes_no_room_in_the_store() {
        let (mut work, first) = work_at_rest();
        work.kernel.world.map(first, first + BLOCK_PAGES);
        work.kernel.register(address(first), address(first + BLOCK_PAGES)).unwrap();
        let id = work.blocks.add(address(first), State::Resident);
        work.kernel.world.come(first + 5, 7);
        work.policy.came(id);
        // The program has dropped a page that the kernel has not removed yet.
        work.blocks.get_mut(id).ending = Some(Box::new([1 << 5; BLOCK_PAGES / 64]));
        assert!(work.begin_write().is_none());
        assert_eq!((work.rooms, work.store.said.lock().unwrap().rooms), (0, 0));
        assert_eq!(work.blocks.get(id).room, None);
    }

    #[test]
    fn a_block_comes_back_if_the_failure_of_its_write_was_heard_by_another_call() {
        let (mut work, first) = work_at_rest();
        work.kernel.world.map(first, first + BLOCK_PAGES);
        work.kernel.register(address(first), address(first + BLOCK_PAGES)).unwrap();
        for page in 0..BLOCK_PAGES {
            work.kernel.world.come(first + page, page as u64 + 1);
        }
        let id = work.blocks.add(address(first), State::Resident);
        work.policy.came(id);
        work.begin_write().expect("it can go");
        work.store.doom(1);
        assert!(work.carry_write());
        work.store.doom(0);
        // Release another block's room while a write is failing. The release waits for all writes,
        // so the release gets the error of the failing write.
        let other = work.blocks.add(address(first + 2 * BLOCK_PAGES), State::Stored);
        work.blocks.get_mut(other).room = work.store.claim();
        work.rooms += 1;
        work.release_room(other);
        work.end_loads();
        assert_eq!(work.blocks.get(id).state, State::Resident, "the store lacks some of its pages");
        for page in 0..BLOCK_PAGES {
            assert_eq!(work.kernel.world.word(first + page), page as u64 + 1);
        }
    }
}
