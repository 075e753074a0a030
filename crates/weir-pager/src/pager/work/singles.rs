//! Single pages of blocks that are in the store, for programs that access memory in random order.
//!
//! Single pages are brought by copy. They are moved out by reference, many at a time. The oldest
//! ones move to a slot, are written from there, and are freed with the slot. A block has single
//! pages only while its state is `Stored`, or while the whole block is being brought.

use super::*;
use std::ops::Range;

/// Largest number of single pages that are moved out together. While the program accesses memory in
/// random order, the pager keeps room for as many single pages.
pub(super) const BATCH: usize = 64;
/// Number of single pages that are moved out in one step between page faults. A page fault may have
/// to wait until a step has ended, so larger steps would be too long. After each step the pager
/// waits for the store, so in smaller steps a page would cost more.
pub(super) const FEW: usize = 16;
const _: () = assert!(BLOCK_PAGES.is_multiple_of(FEW));
/// Number of pages of the outbox. Its memory is freed once less than a batch of it is left.
pub(super) const OUTBOX: usize = 2 * BATCH;
/// While whole blocks have much memory, the share of partial blocks among the victims is their
/// share of memory divided by this number.
const PARTIAL_EVERY: usize = 16;
/// In a program that accesses memory in random order, whole blocks may take the limit divided by
/// this number. Single pages may take the rest.
const WHOLE_SHARE: usize = 8;

impl<K: Kernel, S: Store> Work<K, S> {
    /// Brings one page of a block that is in the store, and perhaps pages beside it. Returns
    /// `false` if the page cannot be read.
    pub(super) fn bring_single(&mut self, id: u32, page: usize) -> Result<bool, Changed> {
        let Range { start, end } = self.window(id, page);
        if !self.blocks.get(id).is_there(page) {
            self.make_room_for_singles(end - start, self.blocks.get(id).is_partial);
            // A partial block whose last pages have made room is forgotten. The page fault begins
            // anew then.
            if !self.events.is_empty() || !self.blocks.is_known(id) {
                return Err(Changed);
            }
        }
        let at = self.blocks.get(id).at + page * PAGE_SIZE;
        let mut came = start;
        let mut brought = self.bring_pages(id, start, end - start);
        if end - start > 1 {
            // The pages may lie in more than one mapping, or only one of them may be unreadable. So
            // the page that a thread waits for may not be among those that came.
            let is_there = match brought {
                Some(Ok(pages)) => page < start + pages,
                Some(Err(Errno::AGAIN)) => true,
                _ => false,
            };
            if !is_there {
                if let Some(Ok(pages)) = brought {
                    self.came_singly(id, start..start + pages);
                }
                came = page;
                brought = self.bring_pages(id, page, 1);
            }
        }
        match brought {
            Some(Ok(pages)) => {
                self.blocks.get_mut(id).history.came_singly(came..came + pages);
                self.came_singly(id, came..came + pages);
                Ok(true)
            }
            Some(Err(why)) if may_pass(why) => Err(Changed),
            // The page is in place already, or is no longer mapped.
            Some(Err(_)) => {
                self.kernel.wake(at, PAGE_SIZE);
                Ok(true)
            }
            // The store cannot read the page. If the block is whole, the caller then brings the
            // whole block, and finds out whether the block is lost. If the block is partial, only
            // this page is lost.
            None => Ok(false),
        }
    }

    /// Puts pages of a block into place, which are all zeros or all in the store. Returns the
    /// number of these pages that are in place now, or `None` if the store cannot read them.
    fn bring_pages(&mut self, id: u32, page: usize, pages: usize) -> Option<Result<usize, Errno>> {
        let Work { blocks, store, single, kernel, shared, .. } = self;
        // Several pages may lie on several members of the store. One of these may stand still, and
        // nobody waits for its pages.
        let read = if pages > 1 { S::read_ahead } else { S::read };
        let block = blocks.get(id);
        let (at, bytes) = (block.at + page * PAGE_SIZE, pages * PAGE_SIZE);
        let brought = match block.room {
            _ if block.is_there(page) && !block.is_zero(page) => return Some(Err(Errno::EXIST)),
            _ if block.is_zero(page) => kernel.zero(at, bytes),
            Some(room) if read(store, room + page as u64, kernel.pages_mut(*single, pages)).is_ok() => {
                count(&shared.counters.singles, pages as u64);
                kernel.copy(at, *single, bytes)
            }
            _ => return None,
        };
        Some(match brought {
            Ok(()) => Ok(pages),
            Err(Stopped { done: done @ 1.., .. }) => Ok(done / PAGE_SIZE),
            Err(Stopped { why, .. }) => Err(why),
        })
    }

    /// The pages to bring for a page fault on this page: more with each page fault that continues a
    /// run, in the run's direction. A partial block never comes as a whole, so its first page fault
    /// already brings more pages.
    fn window(&self, id: u32, page: usize) -> Range<usize> {
        let block = self.blocks.get(id);
        let is_zero = block.is_zero(page);
        let most = match block.is_partial {
            true if is_zero => WINDOW,
            true => WINDOW.min(4 * block.history.most()),
            false => block.history.most(),
        };
        if block.is_there(page) || most == 1 {
            return page..page + 1;
        }
        let is_alike = |&other: &usize| !block.is_there(other) && block.is_zero(other) == is_zero;
        if block.history.is_down && !block.is_partial {
            let first = (page + 1).saturating_sub(most);
            return page - (first..page).rev().take_while(is_alike).count()..page + 1;
        }
        let at = block.at + page * PAGE_SIZE;
        let end = self.spans.range(..=at).next_back().map_or(at, |(_, &end)| end);
        let whole =
            self.blocks.ids_in(at, end.max(at + PAGE_SIZE)).filter(|&id| !self.blocks.get(id).is_partial);
        let end = whole
            .map(|id| self.blocks.get(id).at)
            .find(|&other| other > at)
            .map_or(end, |other| other.min(end));
        let last = BLOCK_PAGES.min(page + most).min(page + end.saturating_sub(at) / PAGE_SIZE);
        page..page + 1 + (page + 1..last).take_while(is_alike).count()
    }

    /// Notes that these pages of a block are in place as single pages.
    pub(super) fn came_singly(&mut self, id: u32, pages: Range<usize>) {
        self.last_single = self.kernel.now();
        let block = self.blocks.get_mut(id);
        for page in pages {
            if block.is_there(page) {
                continue;
            }
            block.there[page / 64] |= 1 << (page % 64);
            block.clear_ending(page);
            self.singles_there += 1;
            self.partial_there += usize::from(block.is_partial);
            self.singles.came(id, page, &block.ghosts);
        }
        if self.singles.len() > 2 * self.singles_there + BLOCK_PAGES {
            let mut singles = std::mem::take(&mut self.singles);
            singles.retain(|single| self.is_singly_there(*single));
            self.singles = singles;
        }
    }

    fn is_singly_there(&self, Single { id, page, .. }: Single) -> bool {
        self.blocks.is_known(id)
            && self.blocks.get(id).state == State::Stored
            && self.blocks.get(id).is_there(page.into())
    }

    /// Number of single pages that have come last and stay: one instruction may need several pages,
    /// and its thread runs after the last of them has come. Most single pages may be pages that
    /// cannot move out. Then the others would make room for each other for ever.
    fn fresh(&self) -> usize {
        let is_going_on = self.kernel.now().saturating_sub(self.last_single) <= STUCK;
        match is_going_on && self.eviction.is_none() && self.singles_there >= 2 * WINDOW {
            true => (self.singles_there / 2).saturating_sub(BATCH).clamp(WINDOW, BLOCK_PAGES),
            false => 0,
        }
    }

    fn make_room_for_singles(&mut self, pages: usize, is_partial: bool) {
        while self.room_for_singles() < pages {
            // A program that has ended to stream uses none of the blocks that were prefetched.
            if !self.policy.is_streaming() && self.drop_ready() {
                continue;
            }
            if self.find(Slot::Free).is_some() {
                self.scrub_free();
                continue;
            }
            // The pages in the outbox are in the store too. To free its memory takes no write.
            if self.outbox.is_some() {
                self.end_outbox();
                continue;
            }
            // Some blocks cannot be moved out: a child shares them, or devices use them. The pager
            // does not try those again for each page.
            let share = if is_partial { FRESH } else { self.whole_share() };
            if is_partial && self.write_singles_of_turn() {
                continue;
            }
            let is_whole = self.policy.len() > share && !self.is_stuck() && !self.spares_blocks();
            if !self.writing.is_empty() || is_whole && self.begin_write().is_some() {
                self.end_oldest_write();
                continue;
            }
            if is_whole {
                self.stuck = Some(self.kernel.now());
            }
            // Blocks that cannot be moved out may take the whole limit. Then up to `BLOCK_PAGES`
            // single pages may exceed the limit. If only one page could exceed it, every page fault
            // would have to write a page out first.
            if self.singles_there < BLOCK_PAGES || self.is_stuck_singly() || !self.write_singles(BATCH) {
                count(&self.shared.counters.beyond_limit, 1);
                return;
            }
        }
    }

    /// Number of single pages that can be brought before one must be moved out.
    fn room_for_singles(&self) -> usize {
        (self.limit() * BLOCK_PAGES).saturating_sub(self.managed())
    }

    /// Number of single pages that should be moved out now, so that the next page faults need not
    /// wait for room.
    pub(super) fn short_of_singles(&self) -> usize {
        // Blocks that cannot be moved out may have taken the room. A few single pages would make
        // room for each other only, as in `make_room_for_singles`.
        let few = if self.is_stuck() { BLOCK_PAGES } else { BATCH };
        if self.singles_of_whole() < few {
            return 0;
        }
        let short = BATCH.saturating_sub(self.room_for_singles());
        if short < FEW { 0 } else { short }
    }

    /// Whether the next victims are pages of partial blocks. The program uses small mappings more
    /// often than large ones. So while whole blocks have much memory, the share of partial blocks
    /// among the victims is only a small part of their share of memory. Once whole blocks have
    /// little memory, the two shares are equal.
    pub(super) fn is_turn_of_partial(&mut self) -> bool {
        if self.is_stuck_singly() {
            return false;
        }
        let frames = self.partial_there / BLOCK_PAGES;
        let times = if self.policy.len() > self.limit() / LEAST_SHARE { PARTIAL_EVERY } else { 1 };
        self.due += frames;
        let is_due = frames > 0 && self.due >= times * (self.policy.len() + frames);
        if is_due {
            self.due = 0;
        }
        is_due || self.policy.len() == 0
    }

    /// Number of single pages in place that belong to blocks which may come as a whole.
    pub(super) fn singles_of_whole(&self) -> usize {
        self.singles_there - self.partial_there
    }

    /// Number of whole blocks that stay, in a program that accesses memory in random order.
    fn whole_share(&self) -> usize {
        (self.limit() / WHOLE_SHARE).max(FRESH)
    }

    /// Whether single pages make room, and not whole blocks: single pages take nearly all memory,
    /// or the blocks that made room came back. The few blocks that are in place as a whole would
    /// come straight back if they are in use.
    pub(super) fn spares_blocks(&self) -> bool {
        self.singles_of_whole() >= BLOCK_PAGES
            && (self.policy.len() <= self.whole_share() || self.keeps_blocks())
            && !self.is_stuck_singly()
    }

    /// Whether single pages make room for each other since whole blocks came straight back.
    pub(super) fn keeps_blocks(&self) -> bool {
        self.policy.spares_blocks() && self.singles_of_whole() >= BATCH
    }

    /// Whether whole blocks make room for single pages before those need it. Else single pages make
    /// room for each other, and whole blocks that nobody uses stay for ever.
    pub(super) fn gives_blocks(&self) -> bool {
        self.policy.is_jumping()
            && self.policy.len() > self.whole_share()
            && !self.is_stuck()
            && !self.keeps_blocks()
    }

    /// Whether no block could be moved out a moment ago.
    fn is_stuck(&self) -> bool {
        self.stuck.is_some_and(|since| self.kernel.now() - since <= STUCK)
    }

    /// Whether no single page could be moved out a moment ago: the program has locked them, or a
    /// child shares them.
    pub(super) fn is_stuck_singly(&self) -> bool {
        self.stuck_singly.is_some_and(|since| self.kernel.now() - since <= STUCK)
    }

    /// Frees the frames that no block uses.
    fn scrub_free(&mut self) {
        while let Some(slot) = self.find(Slot::Free) {
            self.scrub(slot);
        }
    }

    /// Makes room for a block by moving single pages out. Returns `false` if no page could be
    /// moved.
    pub(super) fn write_block_of_singles(&mut self) -> bool {
        let before = self.singles_there;
        while before - self.singles_there < BLOCK_PAGES && self.write_singles(BATCH) {}
        self.end_outbox();
        self.singles_there < before
    }

    /// Moves the oldest single pages out, `most` at most. Returns `false` if no page could be
    /// moved.
    pub(super) fn write_singles(&mut self, most: usize) -> bool {
        if self.is_broken || self.is_held() || !self.events.is_empty() || self.is_heeding {
            return false;
        }
        let most = most.min(BATCH);
        let outbox = self.outbox.or_else(|| self.find(Slot::Vacant).map(|slot| Outbox { slot, used: 0 }));
        let Some(Outbox { slot, used }) = outbox else { return false };
        let first = self.slot(slot) + used * PAGE_SIZE;
        let mut gone = Vec::with_capacity(most);
        let (mut search, mut may_claim, mut is_changing) = (Search::default(), true, false);
        let (there, fresh) = (self.singles_there, self.fresh());
        // The loop may go through all entries: an outdated entry costs little, and there may be
        // many of them.
        while gone.len() < most {
            let Some(single) = self.singles.next(&mut search, there, fresh) else { break };
            // The entry is outdated: the page was unmapped, or its whole block was brought.
            if !self.is_singly_there(single) {
                continue;
            }
            if self.singles.is_among(single, fresh) {
                self.singles.put_back(&mut search, single, false);
                continue;
            }
            let (id, page) = (single.id, usize::from(single.page));
            let is_new = self.blocks.get(id).room.is_none();
            if is_new && (!may_claim || !self.claim_room(id)) {
                may_claim = false;
                self.singles.put_back(&mut search, single, true);
                continue;
            }
            let to = first + gone.len() * PAGE_SIZE;
            let from = self.blocks.get(id).at + page * PAGE_SIZE;
            let moved = match self.begin_move(from, PAGE_SIZE) {
                true => self.move_pages(to, from, PAGE_SIZE),
                false => Err(Stopped { why: Errno::BUSY, done: 0 }),
            };
            self.shared.endings.end_move();
            match moved {
                Ok(()) => gone.push(single),
                // The kernel has moved the page, and reports an error all the same.
                Err(Stopped { done: 1.., .. }) => gone.push(single),
                // The page stays: a device uses it, it is locked, a child shares it, a thread that
                // is about to end needs it, or it no longer exists. While the address space
                // changes, no page can go.
                Err(Stopped { why, .. }) => {
                    if is_new {
                        self.release_room(id);
                    }
                    is_changing = why == Errno::AGAIN;
                    if is_changing {
                        self.singles.put_first(&search, single);
                        break;
                    }
                    self.singles.put_back(&mut search, single, true);
                }
            }
        }
        if gone.is_empty() {
            if search.has_tried() && !is_changing {
                self.stuck_singly = Some(self.kernel.now());
            }
            return false;
        }
        self.slots[slot] = Slot::Busy;
        let gone_pages = gone.len();
        let mut result = Ok(());
        // Writes of the room's earlier owner may still be under way. Wait for their end, so that
        // they do not overwrite this block.
        if self.store.settle().is_err() {
            self.fail();
        }
        for (at, &Single { id, page, .. }) in gone.iter().enumerate() {
            let (from, page) = (first + at * PAGE_SIZE, usize::from(page));
            let bytes = self.kernel.pages(from, 1);
            let is_zero = uniform_value(&bytes[0]) == Some(0);
            if !is_zero {
                self.begin_hashes(id);
            }
            let bytes = self.kernel.pages(from, 1);
            let block = self.blocks.get_mut(id);
            let room = block.room.expect("what is in the store has room there");
            block.set_zero(page, is_zero);
            if is_zero || block.stores(page, || self.helpers.key().hash(&bytes[0])) {
                count(&self.shared.counters.clean_pages, u64::from(!is_zero));
            } else if result.is_ok() {
                result = self.store.write(room + page as u64, bytes);
            }
        }
        let result = result.and_then(|()| self.store.settle());
        if result.is_err() {
            self.fail();
            for (at, &single) in gone.iter().enumerate() {
                let to = self.blocks.get(single.id).at + usize::from(single.page) * PAGE_SIZE;
                self.copy_in(to, first + at * PAGE_SIZE);
                self.singles.keep(single);
            }
        } else {
            count(&self.shared.counters.singles_written, gone.len() as u64);
            for &Single { id, page, .. } in &gone {
                self.forget_singles(id, page.into()..usize::from(page) + 1);
                self.singles.went(page.into(), &mut self.blocks.get_mut(id).ghosts, there);
            }
            for single in gone {
                self.tidy(single.id);
            }
        }
        let mut used = used + gone_pages;
        if used + BATCH > OUTBOX {
            self.scrub(slot);
            self.slots[slot] = Slot::Busy;
            used = 0;
        }
        self.outbox = Some(Outbox { slot, used });
        result.is_ok()
    }

    /// Gives the outbox up.
    pub(super) fn end_outbox(&mut self) {
        if let Some(Outbox { slot, .. }) = self.outbox.take() {
            self.scrub(slot);
        }
    }

    /// Releases the room of a partial block of which the store has nothing. Forgets the block if
    /// nothing is known about it.
    pub(super) fn tidy(&mut self, id: u32) {
        if !self.blocks.is_known(id) || !self.blocks.get(id).is_partial {
            return;
        }
        if self.blocks.get(id).is_nothing() {
            self.forget(id);
        } else if self.blocks.get(id).zeros.iter().all(|pages| *pages == u64::MAX) {
            self.release_room(id);
        }
    }

    /// No longer counts these pages of the block as single pages. They are part of the whole block
    /// now, or the program has dropped them.
    pub(super) fn forget_singles(&mut self, id: u32, pages: Range<usize>) {
        let block = self.blocks.get_mut(id);
        for page in pages {
            if block.is_there(page) {
                block.there[page / 64] &= !(1 << (page % 64));
                self.singles_there -= 1;
                self.partial_there -= usize::from(block.is_partial);
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::pager::simulator::{Entry, Machine, Simulated, address, page_of, work_at_rest};

    /// Work with one block in the store, each page of which has its number's lowest byte in all
    /// bytes; the number of the block's first page, and its id.
    fn with_stored_block() -> (Work<Machine, Simulated>, usize, u32) {
        let (mut work, first) = work_at_rest();
        let room = work.store.claim().expect("room");
        for page in 0..BLOCK_PAGES {
            work.store.write(room + page as u64, &[[page as u8; PAGE_SIZE]]).unwrap();
        }
        work.store.settle().unwrap();
        work.kernel.world.map(first, first + BLOCK_PAGES);
        work.kernel.register(address(first), address(first + BLOCK_PAGES)).unwrap();
        work.add_span(address(first), address(first + BLOCK_PAGES));
        let id = work.blocks.add(address(first), State::Stored);
        work.blocks.get_mut(id).room = Some(room);
        work.rooms = 1;
        (work, first, id)
    }

    #[test]
    fn page_faults_in_a_row_bring_twice_as_many_pages_each_and_then_the_whole_block() {
        let (mut work, _, id) = with_stored_block();
        // Page 300 does not follow the pages before, so one page comes: another object may begin
        // there.
        for (page, there) in [(10, 1), (11, 3), (13, 7), (17, 15), (300, 16), (301, 18)] {
            assert!(!work.plan(id, page).is_whole);
            assert!(work.bring_single(id, page).unwrap());
            assert_eq!(work.blocks.get(id).count_there(), there);
        }
        let mut page = 303;
        while !work.plan(id, page).is_whole {
            assert!(work.bring_single(id, page).unwrap());
            page = (page..BLOCK_PAGES).find(|&page| !work.blocks.get(id).is_there(page)).unwrap();
        }
        assert_eq!(page, 300 + 127, "after 1, 2, 4, up to 64 pages the whole block comes");
    }

    /// A program uses a few whole blocks all the time. One that moved out would come straight back.
    #[test]
    fn a_few_whole_blocks_stay_while_single_pages_take_all_other_memory() {
        let (mut work, first) = work_at_rest();
        let (limit, whole) = (32, FRESH + 1);
        work.shared.limit.store(limit, Ordering::Relaxed);
        let ids: Vec<u32> = (0..limit)
            .map(|number| {
                let page = first + number * BLOCK_PAGES;
                work.kernel.world.map(page, page + BLOCK_PAGES);
                work.kernel.register(address(page), address(page + BLOCK_PAGES)).unwrap();
                (page..page + BLOCK_PAGES).for_each(|page| work.kernel.world.come(page, 7));
                let id = work.blocks.add(address(page), State::Stored);
                // The store has room for four of them: the oldest whole block, and single pages.
                if number == 0 || number >= whole {
                    work.claim_room(id);
                }
                if number >= whole {
                    work.came_singly(id, 0..BLOCK_PAGES);
                }
                id
            })
            .collect();
        for &id in &ids[..whole] {
            work.blocks.get_mut(id).state = State::Resident;
            work.policy.came(id);
        }
        assert_eq!(work.frames(), limit);
        (0..20).for_each(|_| _ = work.background());
        work.make_room();
        assert!(ids[..whole].iter().all(|&id| work.blocks.get(id).state == State::Resident));
        assert!(work.singles_there < (limit - whole) * BLOCK_PAGES);
    }

    /// A program jumps that has streamed before.
    #[test]
    fn whole_blocks_make_room_for_single_pages_unless_they_come_straight_back() {
        for comes_back in [false, true] {
            let (mut work, first, id) = with_stored_block();
            let limit = 16;
            let ids: Vec<u32> = (1..limit)
                .map(|number| {
                    let page = first + number * BLOCK_PAGES;
                    work.kernel.world.map(page, page + BLOCK_PAGES);
                    work.kernel.register(address(page), address(page + BLOCK_PAGES)).unwrap();
                    work.kernel.world.come(page, 7);
                    let id = work.blocks.add(address(page), State::Resident);
                    work.policy.came(id);
                    id
                })
                .collect();
            work.shared.limit.store(limit, Ordering::Relaxed);
            for page in 0..BLOCK_PAGES {
                assert!(work.bring_single(id, page).unwrap());
            }
            assert!(work.room_for_singles() == 0);
            // Page faults in the midst of a block.
            (0..2 * BLOCK_PAGES).for_each(|at| _ = work.plan(id, 101 * at % 500 + 1));
            assert!(work.policy.is_jumping());
            let mut came_back = 0;
            while came_back < 100 && work.background() {
                let mut going =
                    ids.iter().filter(|&&id| matches!(work.blocks.get(id).state, State::Writing(_)));
                if let Some(&id) = going.next().filter(|_| comes_back) {
                    work.fault(work.blocks.get(id).at + 200 * PAGE_SIZE, &mut None).unwrap();
                    came_back += 1;
                }
            }
            let stay = work.policy.len();
            match comes_back {
                true => assert!(came_back <= 3 && stay > limit / 2, "{came_back} {stay}"),
                false => assert!(stay < limit - 1 && work.singles_there == BLOCK_PAGES, "{stay}"),
            }
        }
    }

    /// A program that has ended to stream does not use what was prefetched for it.
    #[test]
    fn a_prefetched_block_makes_room_for_a_single_page_before_a_block_in_use_does() {
        let (mut work, first, id) = with_stored_block();
        let limit = 4;
        // All memory is whole blocks in use and one block that was prefetched.
        let ids: Vec<u32> = (1..=limit)
            .map(|number| {
                let page = first + number * BLOCK_PAGES;
                work.kernel.world.map(page, page + BLOCK_PAGES);
                work.kernel.register(address(page), address(page + BLOCK_PAGES)).unwrap();
                work.blocks.add(address(page), State::Resident)
            })
            .collect();
        let (&ahead, in_use) = ids.split_last().expect("there are some");
        for &id in in_use {
            work.kernel.world.come(page_of(work.blocks.get(id).at), 7);
            work.policy.came(id);
        }
        let slot = work.frame();
        work.claim_room(ahead);
        work.blocks.get_mut(ahead).state = State::Ready(slot);
        work.ready.push_back((ahead, work.wants));
        work.shared.limit.store(limit, Ordering::Relaxed);
        assert_eq!((work.frames(), work.room_for_singles()), (limit, 0));
        assert!(!work.policy.is_streaming());
        assert!(work.bring_single(id, 5).unwrap());
        let states: Vec<State> = ids.iter().map(|&id| work.blocks.get(id).state).collect();
        assert_eq!(states, [State::Resident, State::Resident, State::Resident, State::Stored]);
        assert_eq!((work.blocks_ready(), work.singles_there), (0, 1));
    }

    #[test]
    fn a_page_for_which_the_kernel_has_no_memory_is_not_taken_for_one_that_came() {
        let (mut work, first, id) = with_stored_block();
        for pages in [5..6, 6..14] {
            work.kernel.world.refusals.extend(pages.clone().map(|_| Errno::NOMEM));
            assert!(work.bring_single(id, pages.start).is_err());
            work.kernel.world.refusals.clear();
            assert!(!work.kernel.world.is_something(first + pages.start));
            assert!(work.bring_single(id, pages.start).unwrap());
            assert_eq!(work.kernel.world.word(first + pages.start) as u8, pages.start as u8);
        }
    }

    #[test]
    fn a_block_moves_out_once_the_pages_that_the_program_has_dropped_are_gone() {
        for is_late in [false, true] {
            let (mut work, first, id) = with_stored_block();
            (5..8).for_each(|page| assert!(work.bring_single(id, page).unwrap()));
            work.removed(address(first + 5), address(first + 7));
            if !is_late {
                work.kernel.world.go(first + 5);
                work.kernel.world.go(first + 6);
            }
            work.bring(id).unwrap();
            assert_eq!(work.has_ended(id), !is_late);
            if is_late {
                // The page fault of another thread, which the pager reads late, shows nothing.
                work.fault(address(first + 5), &mut None).unwrap();
                work.kernel.world.go(first + 6);
                assert!(!work.has_ended(id), "page 5 still has its old content");
                work.kernel.world.go(first + 5);
                work.fault(address(first + 5), &mut None).unwrap();
            }
            work.begin_write().expect("it can go");
            work.end_loads();
            work.bring(id).unwrap();
            assert_eq!([4, 5, 6, 7].map(|page| work.kernel.world.word(first + page) as u8), [4, 0, 0, 7]);
        }
    }

    #[test]
    fn single_pages_stay_for_a_while_though_blocks_that_cannot_be_moved_out_have_taken_the_limit() {
        let (mut work, first, id) = with_stored_block();
        let limit = 4;
        for number in 1..=limit {
            let page = first + number * BLOCK_PAGES;
            work.kernel.world.map(page, page + BLOCK_PAGES);
            work.kernel.register(address(page), address(page + BLOCK_PAGES)).unwrap();
            work.kernel.world.come(page, 7);
            work.kernel.world.entries[page].is_pinned = true;
            let id = work.blocks.add(address(page), State::Resident);
            work.policy.came(id);
        }
        work.shared.limit.store(limit, Ordering::Relaxed);
        for page in (0..BLOCK_PAGES - 2).step_by(2) {
            assert!(work.bring_single(id, page).unwrap());
            while work.background() {}
        }
        assert_eq!((work.policy.len(), work.singles_there), (limit, BLOCK_PAGES / 2 - 1));
    }

    #[test]
    fn a_page_that_is_dropped_and_used_again_and_again_has_one_entry() {
        let (mut work, first, id) = eight_pages_out();
        for round in 0..200 {
            for page in 0..8 {
                work.kernel.world.come(first + page, 7);
            }
            work.came_singly(id, 0..8);
            assert!(work.singles.len() <= 2 * BLOCK_PAGES, "{} in round {round}", work.singles.len());
            work.removed(address(first), address(first + 8));
            (0..8).for_each(|page| work.kernel.world.go(first + page));
        }
    }

    #[test]
    fn nothing_is_stuck_where_there_is_no_single_page() {
        let (mut work, _, id) = with_stored_block();
        assert!(!work.write_singles(BATCH) && !work.is_stuck_singly());
        assert!(work.bring_single(id, 0).unwrap());
        work.kernel.world.entries.iter_mut().for_each(|entry| entry.is_pinned = entry.is_there);
        assert!(!work.write_singles(BATCH) && work.is_stuck_singly());
    }

    #[test]
    fn the_oldest_page_stays_the_next_to_go_while_the_address_space_changes() {
        let (mut work, first, id) = eight_pages_out();
        for page in 0..8 {
            assert!(work.blocks.get(id).is_there(page) || work.bring_single(id, page).unwrap());
        }
        work.kernel.world.now += 2 * STUCK;
        work.kernel.world.changing = 1;
        assert!(!work.write_singles(1) && !work.is_stuck_singly());
        work.kernel.world.changing = 0;
        assert!(work.write_singles(1));
        let is_away = |page: usize| !work.kernel.world.entries[first + page].is_there;
        assert_eq!((0..8).filter(|&page| is_away(page)).collect::<Vec<_>>(), [0]);
    }

    /// Three whole blocks, and single pages of one partial block, under a limit of four.
    fn with_few_blocks(singles: usize) -> (Work<Machine, Simulated>, Vec<u32>) {
        let (mut work, first) = work_at_rest();
        work.shared.limit.store(4, Ordering::Relaxed);
        let end = first + 7 * BLOCK_PAGES - 1;
        work.kernel.world.map(first, end);
        work.kernel.register(address(first), address(end)).unwrap();
        work.add_span(address(first), address(end));
        for number in 0..singles.div_ceil(BLOCK_PAGES) {
            let at = first + (3 + number) * BLOCK_PAGES;
            let id = work.blocks.add_partial(address(at));
            let pages = (singles - number * BLOCK_PAGES).min(BLOCK_PAGES);
            (at..at + pages).for_each(|page| work.kernel.world.come(page, 7));
            work.came_singly(id, 0..pages);
        }
        let add = |number| work.blocks.add(address(first + number * BLOCK_PAGES), State::Empty);
        let ids = (0..3).map(add).collect();
        (work, ids)
    }

    /// Whether a thread that needs these blocks at once gets them by a few page faults.
    fn come_and_stay(work: &mut Work<Machine, Simulated>, ids: &[u32]) -> bool {
        for _ in 0..20 {
            let missing = ids.iter().find(|&&id| work.blocks.get(id).state != State::Resident);
            let Some(&id) = missing else { return true };
            let at = work.blocks.get(id).at;
            work.fault(at, &mut None).unwrap();
            while work.background() {}
        }
        false
    }

    #[test]
    fn three_blocks_that_a_thread_needs_at_once_may_use_the_last_frame() {
        let (mut work, ids) = with_few_blocks(10);
        assert!(come_and_stay(&mut work, &ids));
        assert_eq!((work.frames(), work.singles_there), (4, 10));
    }

    #[test]
    fn single_pages_go_before_the_few_blocks_that_a_thread_needs_at_once() {
        for limit in [4, 8] {
            let (mut work, ids) = with_few_blocks(2 * BLOCK_PAGES);
            work.shared.limit.store(limit, Ordering::Relaxed);
            assert!(come_and_stay(&mut work, &ids));
            work.shared.limit.store(4, Ordering::Relaxed);
            while work.background() {}
            assert!(ids.iter().all(|&id| work.blocks.get(id).state == State::Resident));
            assert_eq!(work.frames(), 4);
        }
    }

    #[test]
    fn a_few_blocks_stay_where_no_single_page_can_go() {
        let (mut work, ids) = with_few_blocks(3 * BLOCK_PAGES);
        work.kernel.world.entries.iter_mut().for_each(|entry| entry.is_pinned = entry.is_there);
        assert!(come_and_stay(&mut work, &ids));
        assert_eq!(work.frames(), 6, "they exceed the limit");
    }

    #[test]
    fn the_pages_that_came_last_stay_though_no_other_single_page_can_go() {
        let (mut work, _) = with_few_blocks(2 * BLOCK_PAGES);
        work.kernel.world.entries.iter_mut().for_each(|entry| entry.is_pinned = entry.is_there);
        let at = page_of(work.blocks.get(0).at) + 2 * BLOCK_PAGES;
        let id = work.blocks.add_partial(address(at));
        let mut came = 0;
        let mut come = |work: &mut Work<Machine, Simulated>, pages: usize| {
            (at + came..at + came + pages).for_each(|page| work.kernel.world.come(page, 7));
            work.came_singly(id, came..came + pages);
            came += pages;
            (0..10).for_each(|_| _ = work.write_singles(BATCH));
            (at..at + came).filter(|&page| work.kernel.world.is_something(page)).count()
        };
        assert_eq!(come(&mut work, 20), 20, "a thread may need them at once");
        assert_eq!(come(&mut work, 491), BLOCK_PAGES - 1);
        assert_eq!(come(&mut work, 1), BLOCK_PAGES - 1, "the first has gone");
        // They go if people evict them, and if no thread goes on.
        for is_evicted in [true, false] {
            work.eviction = is_evicted.then_some(Eviction { blocks: 0, singles: BLOCK_PAGES });
            work.kernel.world.now += if is_evicted { Duration::ZERO } else { 2 * STUCK };
            assert!(work.write_singles(BATCH));
        }
    }

    #[test]
    fn a_page_fault_that_is_tried_again_counts_once() {
        let (mut work, first, id) = with_stored_block();
        let mut plan = None;
        let mut seen = Vec::new();
        for _ in 0..20 {
            work.kernel.world.changing = 1;
            assert!(work.fault(address(first + 5), &mut plan).is_err());
            seen.push(format!("{:?} {:?}", work.policy, work.blocks.get(id).history));
        }
        assert!(seen.iter().all(|state| *state == seen[0]));
        assert_eq!(plan.map(|plan| plan.is_whole), Some(false));
    }

    #[test]
    fn runs_downwards_bring_the_pages_below() {
        let (mut work, first, id) = with_stored_block();
        for (number, (page, lowest)) in
            [(300, 300), (299, 298), (297, 294), (293, 286)].into_iter().enumerate()
        {
            assert!(!work.plan(id, page).is_whole);
            assert!(work.bring_single(id, page).unwrap());
            assert_eq!(work.store.ahead, number as u64, "nobody waits for the pages beside it");
            assert!((0..301).all(|page| work.blocks.get(id).is_there(page) == (page >= lowest)));
        }
        let is_right = |page: usize| work.kernel.world.word(first + page) as u8 == page as u8;
        assert!((286..301).all(is_right));
    }

    #[test]
    fn a_single_page_stays_while_its_whole_block_is_on_its_way_in() {
        let (mut work, first) = work_at_rest();
        let room = work.store.claim().expect("room");
        let mut old = [0; PAGE_SIZE];
        old[0] = 7;
        work.store.write(room + 5, &[old]).unwrap();
        work.store.settle().unwrap();
        work.kernel.world.map(first, first + BLOCK_PAGES);
        work.kernel.register(address(first), address(first + BLOCK_PAGES)).unwrap();
        let id = work.blocks.add(address(first), State::Stored);
        work.blocks.get_mut(id).room = Some(room);
        work.rooms = 1;
        assert!(work.bring_single(id, 5).unwrap());
        assert_eq!(work.kernel.world.word(first + 5), 7);
        work.kernel.world.set_word(first + 5, 8);
        // The block was read from the store, and the address space has changed before it was moved
        // into place.
        let slot = work.frame();
        assert!(work.read(id, slot));
        work.blocks.get_mut(id).state = State::Ready(slot);
        assert!(!work.write_singles(BATCH), "the slot's older page would take its place");
        work.bring(id).unwrap();
        assert_eq!(work.kernel.world.word(first + 5), 8);
        assert_eq!(work.singles_there, 0);
    }

    /// A pager with a partial block of eight pages, all of which are in the store alone. The words
    /// of the pages are 1 to 8. Returns the block's first page too, and its number.
    fn eight_pages_out() -> (Work<Machine, Simulated>, usize, u32) {
        let (mut work, first) = work_at_rest();
        work.kernel.world.map(first, first + 8);
        work.kernel.register(address(first), address(first + 8)).unwrap();
        work.add_span(address(first), address(first + 8));
        let id = work.blocks.add_partial(address(first));
        (0..8).for_each(|page| work.kernel.world.come(first + page, page as u64 + 1));
        work.came_singly(id, 0..8);
        assert!(work.write_singles(BATCH));
        (work, first, id)
    }

    #[test]
    fn a_page_of_a_partial_block_that_cannot_be_read_takes_no_other_page_along() {
        let (mut work, first, id) = eight_pages_out();
        assert!(work.bring_single(id, 0).unwrap());
        let there = work.singles_there;
        let room = work.blocks.get(id).room.unwrap();
        work.store.spoil(room + 5);
        // First a thread touches the page that cannot be read, and then the program forks.
        work.fault(address(first + 5), &mut None).unwrap();
        assert_eq!((work.singles_there, work.blocks.get(id).is_partial), (there, true));
        work.bring_singles(id).unwrap();
        let word = |page: usize| match work.kernel.world.entries[first + page] {
            Entry { is_there: true, .. } => work.kernel.world.word(first + page),
            Entry { is_poisoned, .. } => 100 + u64::from(is_poisoned),
        };
        assert_eq!([0, 1, 2, 3, 4, 5, 6, 7].map(word), [1, 2, 3, 4, 5, 101, 7, 8]);
        assert_eq!((work.singles_there, work.shared.counters.lost.load(Ordering::Relaxed)), (7, 1));
    }

    #[test]
    fn a_fork_gets_each_page_of_a_partial_block_that_can_be_read() {
        let (mut work, first, id) = eight_pages_out();
        let room = work.blocks.get(id).room.unwrap();
        work.store.spoil(room + 2);
        work.bring_singles(id).unwrap();
        let there = (0..8).filter(|page| work.kernel.world.entries[first + page].is_there).count();
        assert_eq!((there, work.kernel.world.entries[first + 2].is_poisoned), (7, true));
        assert!(work.blocks.is_known(id) && work.write_singles(BATCH), "they can go out again");
    }

    #[test]
    fn single_pages_make_room_before_a_page_fault_needs_it_and_the_outbox_is_part_of_the_limit() {
        let (mut work, first) = work_at_rest();
        work.kernel.world.map(first, first + BLOCK_PAGES);
        work.kernel.register(address(first), address(first + BLOCK_PAGES)).unwrap();
        work.add_span(address(first), address(first + BLOCK_PAGES));
        let id = work.blocks.add(address(first), State::Stored);
        (0..BLOCK_PAGES).for_each(|page| work.kernel.world.come(first + page, page as u64 + 1));
        work.came_singly(id, 0..BLOCK_PAGES);
        let mut there = |limit: usize, steps: &mut dyn FnMut(&mut Work<Machine, Simulated>)| {
            work.shared.limit.store(limit, Ordering::Relaxed);
            steps(&mut work);
            let outbox: Vec<_> = (0..SLOTS).filter(|&slot| work.slots[slot] == Slot::Busy).collect();
            let used = outbox.iter().map(|&slot| page_of(work.slot(slot))).map(|page| {
                (page..page + BLOCK_PAGES).filter(|&page| work.kernel.world.entries[page].is_there).count()
            });
            (work.singles_there, work.room_for_singles(), used.sum::<usize>(), outbox.len())
        };
        // The limit is one block, all of it single pages. The first step makes room for a batch,
        // and the outbox takes that room. More steps follow until there is room.
        assert_eq!(there(1, &mut |_| {}), (BLOCK_PAGES, 0, 0, 0));
        assert_eq!(there(1, &mut |work| assert!(work.background())), (BLOCK_PAGES - BATCH, 0, BATCH, 1));
        let steps = &mut |work: &mut Work<Machine, Simulated>| while work.background() {};
        let (singles, room, used, outboxes) = there(1, steps);
        assert_eq!(singles + room + OUTBOX, BLOCK_PAGES, "the outbox is part of the limit");
        assert!(room > BATCH - FEW && used + BATCH <= OUTBOX && outboxes == 1, "{room} {used} {outboxes}");
        // A block needs the frame of the outbox.
        let slot = work.frame();
        assert_eq!((work.outbox.is_none(), work.slots[slot]), (true, Slot::Busy));
        for page in 0..BLOCK_PAGES {
            assert!(work.blocks.get(id).is_there(page) || work.bring_single(id, page).unwrap());
            assert_eq!(work.kernel.world.word(first + page), page as u64 + 1);
        }
    }

    #[test]
    fn a_single_page_that_was_written_is_what_the_store_has_from_then_on() {
        let (mut work, first) = work_at_rest();
        work.kernel.world.map(first, first + BLOCK_PAGES);
        work.kernel.register(address(first), address(first + BLOCK_PAGES)).unwrap();
        let id = work.blocks.add(address(first), State::Resident);
        // In the second round the page has the same content as in the first. In between, the store
        // got other content of that page.
        for has_single in [true, false] {
            work.kernel.world.come(first + 5, 7);
            work.policy.came(id);
            work.begin_write().expect("it can go");
            work.end_loads();
            if has_single {
                assert!(work.bring_single(id, 5).unwrap());
                work.kernel.world.come(first + 5, 8);
                assert!(work.write_singles(BATCH));
            }
            work.bring(id).unwrap();
            work.policy.went(id);
        }
        assert_eq!(work.kernel.world.word(first + 5), 7);
    }
}
