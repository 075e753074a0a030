//! Moves pages between their place in memory, a slot and the store. Frees frames for them.

use super::*;
use std::ops::Range;

impl<K: Kernel, S: Store> Work<K, S> {
    pub(super) fn slot(&self, slot: usize) -> usize {
        self.staging + slot * BLOCK
    }

    /// Moves pages of one or more mappings. One request to the kernel moves pages within one
    /// mapping only, so each mapping has its own requests.
    pub(super) fn move_pages(&mut self, to: usize, from: usize, bytes: usize) -> Result<(), Stopped> {
        let mut some = bytes;
        let mut is_unlocked = false;
        loop {
            match self.kernel.move_pages(to, from, some) {
                Err(Stopped { why: Errno::INVAL, done: 0 }) if some > PAGE_SIZE => {
                    some = (some / 2).next_multiple_of(PAGE_SIZE);
                }
                Err(Stopped { why: Errno::INVAL, done: 0 }) if !is_unlocked => {
                    // The kernel moves no page between locked and unlocked memory. So unlock the
                    // pager's own memory, and try again.
                    is_unlocked = true;
                    self.unlock();
                    some = bytes;
                }
                Ok(()) if some < bytes => return Err(Stopped { why: Errno::INVAL, done: some }),
                // After any error, count the pages that have moved. An earlier request may have
                // moved more pages than it reported.
                Err(Stopped { why, done: 0 }) => {
                    return Err(Stopped { why, done: self.moved_unsaid(to, from, bytes) });
                }
                result => return result,
            }
        }
    }

    /// Bytes at `from` that the kernel has moved without reporting them. Linux 6.18 waits for a
    /// page under migration, moves the page and does not count it. Then it tries the page again and
    /// stops, since nothing is left at `from`.
    fn moved_unsaid(&mut self, to: usize, from: usize, bytes: usize) -> usize {
        // Usually nothing has moved unsaid, and one page shows that.
        let mut is_left = false;
        let looked = self.kernel.populated(from, from + PAGE_SIZE, |_, _| is_left = true);
        if is_left || looked.is_err() {
            return 0;
        }
        let mut gone = bytes;
        let left = self.kernel.populated(from, from + bytes, |start, _| gone = gone.min(start - from));
        if left.is_err() {
            return 0;
        }
        // A page may be missing at `from` because the kernel moved it, or because it never was
        // there. A slot had all its pages, so each missing page was moved. A block in place may
        // have had holes, so count the pages that arrived at `to` instead.
        if !(self.staging..self.staging + SLOTS * BLOCK).contains(&from) {
            let mut came = 0;
            let _ = self.kernel.populated(to, to + gone, |start, end| {
                if start == to + came {
                    came = end - to;
                }
            });
            gone = came;
        }
        gone
    }

    /// Moves a slot's pages into a block's place. A page that is in place already stays. It may be
    /// one that the program has dropped. The pages that came are no longer in the block's `ending`.
    pub(super) fn move_in(&mut self, id: u32, slot: usize) -> Result<(), Changed> {
        let (at, from) = (self.blocks.get(id).at, self.slot(slot));
        // The kernel refuses to move pages until this thread has read all events. The tables are
        // right only once it has handled the events too.
        if self.is_heeding || self.has_changed() {
            return Err(Changed);
        }
        let (mut done, mut is_whole) = (0, true);
        while done < BLOCK {
            if self.has_changed() {
                is_whole = false;
                self.copy_page_in(id, slot, done / PAGE_SIZE);
                done += PAGE_SIZE;
                continue;
            }
            let before = done;
            match self.move_pages(at + done, from + done, BLOCK - done) {
                Ok(()) => done = BLOCK,
                Err(Stopped { done: more, .. }) if more > 0 => done += more,
                Err(Stopped { why, .. }) if done == 0 && may_pass(why) => {
                    self.refused_block = Some(id);
                    return Err(Changed);
                }
                Err(_) => {
                    // Some pages are in place already, are write-protected, or lie in several
                    // mappings. So move or copy the block page by page.
                    is_whole = false;
                    self.copy_page_in(id, slot, done / PAGE_SIZE);
                    done += PAGE_SIZE;
                    continue;
                }
            }
            let block = self.blocks.get_mut(id);
            (before..done).step_by(PAGE_SIZE).for_each(|offset| block.clear_ending(offset / PAGE_SIZE));
        }
        self.slots[slot] = Slot::Vacant;
        if !is_whole {
            self.scrub(slot);
        }
        // The kernel wakes threads only for pages that it reports as moved. Wake the threads that
        // wait for the block's other pages.
        self.kernel.wake(at, BLOCK);
        Ok(())
    }

    /// Copies a page to the present place of `to`. A page that is in place already stays. A page
    /// that is no longer mapped, or that the program has dropped, is not needed. Returns whether
    /// the page came. The caller may then free its own copy: a page that cannot come is poisoned.
    pub(super) fn copy_in(&mut self, to: usize, from: usize) -> bool {
        while let Some(at) = self.now_at(to) {
            match self.kernel.copy(at, from, PAGE_SIZE) {
                Err(Stopped { why, .. }) if may_pass(why) => self.wait_and_hear(),
                Err(Stopped { why: Errno::EXIST | Errno::NOENT | Errno::SRCH, .. }) => {
                    self.kernel.wake(at, PAGE_SIZE);
                    return false;
                }
                Err(_) => {
                    self.count_lost();
                    return self.poison(to);
                }
                Ok(()) => {
                    self.kernel.wake(at, PAGE_SIZE);
                    return true;
                }
            }
        }
        false
    }

    /// Copies a page of a slot to its place in a block.
    pub(super) fn copy_page_in(&mut self, id: u32, slot: usize, page: usize) {
        let (at, offset) = (self.blocks.get(id).at, page * PAGE_SIZE);
        if self.copy_in(at + offset, self.slot(slot) + offset) {
            self.blocks.get_mut(id).clear_ending(page);
        }
    }

    /// The present address of memory that the tables still have at `address`. Applies the moves of
    /// all events that the pager has read and not handled yet. `None`: the program has dropped the
    /// content.
    pub(super) fn now_at(&mut self, address: usize) -> Option<usize> {
        while !self.put_in_order() {
            self.wait_and_hear();
        }
        let mut at = address;
        for event in &self.events {
            match *event {
                Event::Remap(from, to, bytes) if (from..from + bytes).contains(&at) => at = at - from + to,
                // Other memory has moved to this address. So the block's memory is gone, although
                // no event says so.
                Event::Remap(_, to, bytes) if (to..to + bytes).contains(&at) => return None,
                Event::Remove(start, end) | Event::Unmap(start, end) if (start..end).contains(&at) => {
                    return None;
                }
                _ => {}
            }
        }
        Some(at)
    }

    /// Begins to move pages out of their place. Returns false if a thread that is about to end
    /// needs one of them.
    pub(super) fn begin_move(&mut self, at: usize, bytes: usize) -> bool {
        let Work { shared, kernel, .. } = self;
        shared.endings.begin_move(at..at + bytes, |thread| kernel.is_thread(thread))
    }

    /// Moves a block's pages from their place into a slot of the staging memory. Where the block
    /// has no page, the slot gets a page of zeros.
    pub(super) fn move_out(&mut self, at: usize, slot: usize) -> bool {
        let to = self.slot(slot);
        let mut done = 0;
        let may_go = self.begin_move(at, BLOCK);
        while done < BLOCK && may_go {
            match self.move_pages(to + done, at + done, BLOCK - done) {
                Ok(()) => done = BLOCK,
                Err(Stopped { done: more, .. }) if more > 0 => done += more,
                Err(Stopped { why: Errno::NOENT, .. }) if self.kernel.zero(to + done, PAGE_SIZE).is_ok() => {
                    done += PAGE_SIZE;
                }
                Err(_) => break,
            }
        }
        self.shared.endings.end_move();
        if done == BLOCK {
            self.slots[slot] = Slot::Busy;
            return true;
        }
        // The kernel refuses to move a page that a device uses, that is locked, or that a child
        // shares. Or a thread is about to end. So the whole block stays in place.
        let mut back = 0;
        while back < done {
            if !self.has_changed() {
                match self.move_pages(at + back, to + back, done - back) {
                    Ok(()) => break,
                    Err(Stopped { done: more, .. }) if more > 0 => {
                        back += more;
                        continue;
                    }
                    Err(Stopped { why: Errno::AGAIN, .. }) => {
                        self.wait_and_hear();
                        continue;
                    }
                    Err(_) => {}
                }
            }
            self.copy_in(at + back, to + back);
            back += PAGE_SIZE;
        }
        if done > 0 {
            self.scrub(slot);
        }
        false
    }

    /// Unlocks the pager's own memory, which the program's `mlockall()` locks too. The kernel would
    /// move no page between locked and unlocked memory.
    fn unlock(&mut self) {
        for (at, bytes) in [(self.staging, SLOTS * BLOCK), (self.nursery, BLOCK)] {
            self.kernel.unlock(at, bytes);
        }
    }

    /// Frees a slot whose content is no longer needed.
    pub(super) fn leave(&mut self, slot: usize) {
        self.slots[slot] = Slot::Free;
        if self.shared.lends.load(Ordering::SeqCst) {
            self.scrub(slot);
        }
    }

    /// Frees the memory of a slot.
    pub(super) fn scrub(&mut self, slot: usize) {
        self.free(slot, 0..BLOCK_PAGES, false);
        self.slots[slot] = Slot::Vacant;
    }

    /// Fills pages of a slot with zeros. If the kernel may still read their memory for others, they
    /// get other memory: what was lent stays as it was.
    pub(super) fn clear(&mut self, slot: usize, pages: Range<usize>) {
        if self.shared.lends.load(Ordering::SeqCst) {
            self.free(slot, pages, true);
        } else {
            let at = self.slot(slot) + pages.start * PAGE_SIZE;
            self.kernel.pages_mut(at, pages.len()).as_flattened_mut().fill(0);
        }
    }

    /// Frees the memory of pages of a slot. With `is_filled` they get other memory, with zeros.
    /// Meanwhile the slot is not registered with userfaultfd. Otherwise this thread would deadlock:
    /// `madvise` waits until the event of the removal is read, and only this thread reads events.
    fn free(&mut self, slot: usize, pages: Range<usize>, is_filled: bool) {
        let (start, end) = (self.slot(slot), self.slot(slot) + BLOCK);
        let (at, bytes) = (start + pages.start * PAGE_SIZE, pages.len() * PAGE_SIZE);
        let freed = self.kernel.unregister(start, end).and_then(|()| {
            if self.kernel.advise(at, bytes, Advice::LinuxDontNeed).is_err() {
                self.unlock();
                self.kernel.advise(at, bytes, Advice::LinuxDontNeed)?;
            }
            if is_filled {
                self.kernel.pages_mut(at, pages.len()).as_flattened_mut().fill(0);
            }
            self.kernel.register(start, end)
        });
        assert!(freed.is_ok(), "staging memory is this thread's own");
    }

    /// The number of frames that managed memory may have: the limit without the memory that is not
    /// managed.
    pub(super) fn limit(&self) -> usize {
        let limit = self.shared.limit.load(Ordering::Relaxed);
        let least = (limit / LEAST_SHARE).max(LEAST).min(limit);
        limit.saturating_sub(self.beside.div_ceil(BLOCK_PAGES)).max(least)
    }

    /// Memory in use, in frames of a block's size: the blocks in place, the slots that have memory,
    /// and the single pages in place.
    pub(super) fn frames(&self) -> usize {
        self.managed().div_ceil(BLOCK_PAGES)
    }

    /// Pages of managed memory in use.
    pub(super) fn managed(&self) -> usize {
        let slots = self.slots.iter().filter(|slot| **slot != Slot::Vacant).count();
        // The outbox counts as if all of it were used. Else moving pages out would make no room
        // until the outbox is full.
        let unused = self.outbox.map_or(0, |_| BLOCK_PAGES - singles::OUTBOX);
        (self.policy.len() + slots) * BLOCK_PAGES - unused + self.singles_there
    }

    pub(super) fn is_above(&self) -> bool {
        self.frames() > self.limit()
    }

    pub(super) fn find(&self, what: Slot) -> Option<usize> {
        self.slots.iter().position(|slot| *slot == what)
    }

    /// Returns a slot in which every page has memory. Its content is arbitrary.
    pub(super) fn frame(&mut self) -> usize {
        let is_short = |work: &Self| {
            work.find(Slot::Free).is_none()
                && (work.frames() >= work.limit() || work.find(Slot::Vacant).is_none())
        };
        if is_short(self) {
            self.collect();
        }
        if is_short(self) {
            self.end_outbox();
        }
        if is_short(self) {
            self.make_room();
        }
        if let Some(slot) = self.find(Slot::Free) {
            self.slots[slot] = Slot::Busy;
            return slot;
        }
        if self.frames() >= self.limit() {
            count(&self.shared.counters.beyond_limit, 1);
        }
        let slot = self.find(Slot::Vacant).expect("of slots at most a few are in use");
        // Write a word to each page, so that the kernel gives memory to all pages.
        for page in self.kernel.pages_mut(self.nursery, BLOCK_PAGES) {
            page[0] = 0;
        }
        let (to, mut done) = (self.slot(slot), 0);
        while done < BLOCK {
            match self.move_pages(to + done, self.nursery + done, BLOCK - done) {
                Ok(()) => done = BLOCK,
                Err(Stopped { done: more, .. }) if more > 0 => done += more,
                Err(Stopped { why: Errno::AGAIN, .. }) => self.wait_and_hear(),
                // The kernel refuses to move this page, for instance while it splits or migrates
                // the page. The slot may have any content, so a page of zeros will do as well.
                Err(_) => match self.kernel.zero(to + done, PAGE_SIZE) {
                    Ok(()) | Err(Stopped { why: Errno::EXIST, .. }) => done += PAGE_SIZE,
                    Err(Stopped { why, .. }) if may_pass(why) => self.wait_and_hear(),
                    Err(Stopped { why, .. }) => panic!("a slot cannot be filled: {why}"),
                },
            }
        }
        self.slots[slot] = Slot::Busy;
        slot
    }

    /// Frees a frame without delay, for a page fault that waits.
    pub(super) fn make_room(&mut self) {
        // A streaming program needs frames for blocks. The single pages from its earlier random
        // accesses are no longer used, so they are moved out first.
        if self.writing.is_empty()
            && (self.policy.is_streaming() && self.singles_of_whole() >= BLOCK_PAGES
                || self.singles_go_first(BLOCK_PAGES)
                || self.is_turn_of_partial())
            && self.write_block_of_singles()
        {
            return;
        }
        if self.writing.is_empty() && (self.keeps_few() || self.begin_write().is_none()) {
            // No block can be moved out. A prefetched block can still be dropped, because the store
            // has a copy of that block.
            if let Some(id) = self.unused() {
                self.drop_copy(id);
            }
        }
        self.end_oldest_write();
    }

    /// Finds a prefetched block that the program has not used.
    pub(super) fn unused(&self) -> Option<u32> {
        self.blocks.ids().find(|&id| matches!(self.blocks.get(id).state, State::Ready(_) | State::Filling(_)))
    }

    /// Drops a block's copy from a slot; the store has the block too.
    pub(super) fn drop_copy(&mut self, id: u32) {
        if let State::Ready(slot) | State::Filling(slot) = self.blocks.get(id).state {
            self.stop(id);
            self.ready.retain(|&(other, _)| other != id);
            self.blocks.get_mut(id).state = State::Stored;
            self.leave(slot);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::pager::simulator::{Area, address, work_at_rest};

    #[test]
    fn while_the_address_space_changes_the_pager_leaves_the_processor_to_others() {
        let (mut work, first) = work_at_rest();
        work.kernel.world.map(first, first + 2);
        work.kernel.register(address(first), address(first + 2)).unwrap();
        let elsewhere = address(first + BLOCK_PAGES);
        let event = Event::Remove(elsewhere, elsewhere + PAGE_SIZE);
        let staging = work.frame();
        // The thread that changes the address space goes on only while the pager's thread sleeps.
        for request in 0..3 {
            work.kernel.world.changing = 1;
            work.kernel.program.end_change(event);
            match request {
                0 => assert!(work.copy_in(address(first), work.slot(staging))),
                1 => assert!(work.poison(address(first + 1))),
                _ => {
                    work.frame();
                }
            }
            assert_eq!(work.kernel.world.changing, 0);
            assert!(work.kernel.world.is_something(first + request % 2));
            work.events.clear();
        }
    }

    #[test]
    fn without_memory_the_kernel_gets_a_page_again_and_what_never_comes_is_poisoned() {
        let (mut work, first) = work_at_rest();
        work.kernel.world.map(first, first + 4);
        work.kernel.register(address(first), address(first + 4)).unwrap();
        let staging = work.frame();
        work.kernel.world.refusals.extend([Errno::NOMEM, Errno::NOMEM]);
        assert!(work.copy_in(address(first), work.slot(staging)), "the page came");
        work.kernel.world.refusals.push_back(Errno::NOMEM);
        assert!(work.poison(address(first + 1)), "zeros must not come in its place");
        assert!(!work.copy_in(address(first), work.slot(staging)), "a page is in place");
        assert_eq!(work.shared.counters.lost.load(Ordering::Relaxed), 0);
        work.kernel.world.refusals.push_back(Errno::FAULT);
        assert!(work.copy_in(address(first + 2), work.slot(staging)));
        assert_eq!([1, 2].map(|page| work.kernel.world.entries[first + page].is_poisoned), [true; 2]);
        assert_eq!(work.shared.counters.lost.load(Ordering::Relaxed), 1);
        // A block whose page table has no memory waits for its turn. A page of it would need more.
        work.kernel.world.map(first + BLOCK_PAGES, first + 2 * BLOCK_PAGES);
        work.kernel.register(address(first + BLOCK_PAGES), address(first + 2 * BLOCK_PAGES)).unwrap();
        let id = work.blocks.add(address(first + BLOCK_PAGES), State::Empty);
        work.leave(staging);
        work.kernel.world.refusals.push_back(Errno::NOMEM);
        assert!(work.bring(id).is_err() && !work.kernel.world.is_something(first + BLOCK_PAGES));
        work.bring(id).unwrap();
        assert!(work.kernel.world.is_something(first + BLOCK_PAGES));
        assert!(work.kernel.world.refusals.is_empty());
    }

    #[test]
    fn blocks_that_the_kernel_has_no_memory_for_hold_few_frames() {
        let (mut work, first) = work_at_rest();
        let end = first + 30 * BLOCK_PAGES;
        work.kernel.world.map(first, end);
        work.kernel.register(address(first), address(end)).unwrap();
        let ids: Vec<u32> = (first..end)
            .step_by(BLOCK_PAGES)
            .map(|page| work.blocks.add(address(page), State::Empty))
            .collect();
        // The first block takes this frame.
        let frame = work.frame();
        work.leave(frame);
        work.kernel.world.refusals.push_back(Errno::NOMEM);
        assert!(work.bring(ids[0]).is_err());
        // Another one may come, if the kernel has what it needs.
        work.kernel.world.refusals.push_back(Errno::NOMEM);
        work.bring(ids[1]).unwrap();
        work.bring(ids[0]).unwrap();
        assert_eq!([ids[0], ids[1]].map(|id| work.blocks.get(id).state), [State::Resident; 2]);
        work.shared.limit.store(60, Ordering::Relaxed);
        let frames: Vec<usize> = (0..SLOTS - 2).map(|_| work.frame()).collect();
        frames.into_iter().for_each(|slot| work.leave(slot));
        for &id in &ids[2..] {
            work.kernel.world.refusals.extend([Errno::NOMEM, Errno::NOMEM]);
            assert!(work.bring(id).is_err());
            work.kernel.world.refusals.clear();
        }
        let held = |slots: &[Slot]| slots.iter().filter(|slot| **slot == Slot::Busy).count();
        let most = held(&work.slots);
        assert!(most <= SLOTS / 2 + 1, "{most} frames are held");
        // Any block that comes later brings the last one too.
        work.bring(ids[29]).unwrap();
        assert!(held(&work.slots) < most);
    }

    #[test]
    fn what_a_thread_needs_at_its_end_stays_in_place_until_it_is_gone() {
        let (mut work, first) = work_at_rest();
        let part = first + 2 * BLOCK_PAGES..first + 2 * BLOCK_PAGES + 64;
        for pages in [first..first + BLOCK_PAGES, part.clone()] {
            work.kernel.world.map(pages.start, pages.end);
            pages.clone().for_each(|page| work.kernel.world.come(page, 7));
            assert!(work.adopt(&[(address(pages.start), address(pages.end))]));
        }
        let needed = [first + 5, part.start + 9];
        for (thread, page) in (1..).zip(needed) {
            assert!(work.shared.endings.note(thread, address(page)..address(page + 1)));
            work.kernel.world.threads.insert(thread);
        }
        assert!(work.begin_write().is_none(), "the block has a page that a thread needs");
        while work.write_singles(super::super::singles::BATCH) && work.singles_there > 1 {}
        assert_eq!(needed.map(|page| work.kernel.world.is_something(page)), [true; 2]);
        assert_eq!(work.singles_there, 1, "all others went");
        work.kernel.world.threads.clear();
        work.begin_write().expect("it can go");
        work.end_loads();
        assert!(work.write_singles(1));
        assert_eq!(needed.map(|page| work.kernel.world.is_something(page)), [false; 2]);
    }

    #[test]
    fn what_the_kernel_still_reads_for_others_stays_as_it_was_when_the_program_drops_it() {
        for lends in [true, false] {
            let (mut work, first) = work_at_rest();
            work.kernel.world.map(first, first + BLOCK_PAGES);
            work.kernel.register(address(first), address(first + BLOCK_PAGES)).unwrap();
            for page in first..first + BLOCK_PAGES {
                work.kernel.world.come(page, 7);
                work.kernel.world.entries[page].is_lent = true;
            }
            let id = work.blocks.add(address(first), State::Resident);
            work.policy.came(id);
            work.shared.lends.store(lends, Ordering::SeqCst);
            work.begin_write().expect("it can go");
            let State::Writing(slot) = work.blocks.get(id).state else { panic!("it is being written") };
            let at = (work.slot(slot) - address(0)) / PAGE_SIZE;
            work.removed(address(first + 3), address(first + 9));
            for page in 0..BLOCK_PAGES {
                let is_dropped = (3..9).contains(&page);
                assert_eq!(work.kernel.world.word(at + page), if is_dropped { 0 } else { 7 }, "{page}");
                let is_lent = work.kernel.world.entries[at + page].is_lent;
                assert_eq!(is_lent, !(is_dropped && lends), "the same memory has other content: {page}");
            }
            work.end_loads();
            work.bring(id).unwrap();
            assert_eq!([2, 3].map(|page| work.kernel.world.word(first + page)), [7, 0]);
        }
    }

    #[test]
    fn a_block_whose_write_fails_while_its_move_is_handled_comes_back_at_its_new_place() {
        let (mut work, first) = work_at_rest();
        let (moved, end, to) = (first + 10, first + 2 * BLOCK_PAGES, first + 4 * BLOCK_PAGES + 10);
        work.kernel.world.map(first, end);
        work.kernel.register(address(first), address(end)).unwrap();
        work.add_span(address(first), address(end));
        // The move cuts this block, which is in the store. The pager needs a frame to read it.
        let id = work.blocks.add(address(first), State::Stored);
        work.blocks.get_mut(id).room = work.store.claim();
        work.blocks.get_mut(id).zeros = [u64::MAX; BLOCK_PAGES / 64];
        work.rooms = 1;
        // This block moves too, while the pager is writing it.
        for page in 0..BLOCK_PAGES {
            work.kernel.world.come(first + BLOCK_PAGES + page, page as u64 + 1);
        }
        let id = work.blocks.add(address(first + BLOCK_PAGES), State::Resident);
        work.policy.came(id);
        work.begin_write().expect("it can go");
        work.shared.limit.store(1, Ordering::Relaxed);
        work.store.doom(1);
        for (start, area) in work.kernel.world.take_areas(moved, end) {
            work.kernel.world.insert(to + start - moved, Area { end: to + area.end - moved, ..area });
        }
        work.is_heeding = true;
        work.apply(Event::Remap(address(moved), address(to), (end - moved) * PAGE_SIZE));
        work.is_heeding = false;
        assert!(matches!(work.blocks.get(id).state, State::Back(_)), "its old place is no longer mapped");
        work.bring(id).unwrap();
        for page in 0..BLOCK_PAGES {
            assert_eq!(work.kernel.world.word(to + first + BLOCK_PAGES - moved + page), page as u64 + 1);
        }
    }
}
