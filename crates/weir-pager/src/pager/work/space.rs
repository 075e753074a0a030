//! Handles the kernel's events about the address space, and finds mappings in it.

use super::*;

impl<K: Kernel, S: Store> Work<K, S> {
    pub(super) fn apply(&mut self, event: Event) {
        match event {
            Event::Fault(_) => {}
            Event::Remove(start, end) => self.removed(start, end),
            Event::Unmap(start, end) => {
                self.take_advice_back(start..end);
                self.unmapped(start, end);
                order::forget(&mut self.left_out, start..end);
            }
            Event::Remap(from, to, bytes) => {
                // The tables have no memory at the target of a move, unless the pager missed an
                // event. If they do, drop that memory.
                self.unmapped(to, to + bytes);
                // The spans change first, since the pager may read and order further events below.
                // If no event follows that unmaps the old place, the move has left a registered
                // mapping there (`MREMAP_DONTUNMAP`). It is managed like before.
                if self.events.front() == Some(&Event::Unmap(from, from + bytes)) {
                    self.forget_span(from, from + bytes);
                }
                self.add_span(to, to + bytes);
                let doubtful = order::held_in(&self.doubtful, from..from + bytes);
                if !doubtful.is_empty() && !self.is_held() {
                    self.advise(&[(to, to + bytes)], Advice::LinuxDontFork);
                    // That memory may have gone on already.
                    order::add(&mut self.doubtful, to..to + bytes);
                }
                let left_out = order::held_in(&self.left_out, from..from + bytes);
                order::forget(&mut self.left_out, to..to + bytes);
                order::forget(&mut self.left_out, from..from + bytes);
                for part in left_out {
                    order::add(&mut self.left_out, part.start - from + to..part.end - from + to);
                }
                self.move_singles(from, to, bytes);
                let cut = self.cut(from, from + bytes, to);
                self.blocks.shift(from, to, bytes);
                // Only now: a partial block at the target is not whole if a block moves there.
                cut.into_iter().for_each(|(at, dropped)| self.record_cut(at, dropped));
                // Pages in place have moved too, so make records of them. They may also make a
                // partial block whole again, if an earlier move had taken a part of that block
                // away.
                self.record(to, to + bytes);
            }
        }
    }

    /// Handles the event that the program has unmapped `start..end`. A block of which a part stays
    /// keeps that part, page by page.
    fn unmapped(&mut self, start: usize, end: usize) {
        self.forget_span(start, end);
        let ids: Vec<u32> = self.blocks.ids_in(start, end).collect();
        for id in ids {
            // The parts of one block may have ended the record of another.
            if !self.blocks.is_known(id) {
                continue;
            }
            let Block { at, is_partial, .. } = *self.blocks.get(id);
            if start <= at && at + BLOCK <= end {
                self.forget(id);
            } else if is_partial {
                self.drop_pages(id, start, end);
            } else if at.is_multiple_of(BLOCK) {
                self.take_apart(id, start, end);
            } else {
                let dropped =
                    self.dissolve(id, |address| (!(start..end).contains(&address)).then_some(address));
                self.record_cut(at, dropped);
            }
        }
    }

    /// Makes a block partial: its memory in `start..end` is unmapped. The other pages that are in
    /// place become single pages.
    fn take_apart(&mut self, id: u32, start: usize, end: usize) {
        self.drop_copy(id);
        self.stop(id);
        let Block { at, state, .. } = *self.blocks.get(id);
        match state {
            State::Lost => return self.forget(id),
            State::Writing(slot) | State::Back(slot) => {
                for address in (at..at + BLOCK).step_by(PAGE_SIZE) {
                    if !(start..end).contains(&address) {
                        self.copy_page_in(id, slot, (address - at) / PAGE_SIZE);
                    }
                }
                self.leave(slot);
            }
            State::Resident => self.went(id),
            _ => {}
        }
        let block = self.blocks.get_mut(id);
        block.is_partial = true;
        self.partial_there += block.count_there();
        if state != State::Stored {
            block.state = State::Stored;
            block.zeros = [u64::MAX; BLOCK_PAGES / 64];
            self.release_room(id);
        }
        self.drop_pages(id, start, end);
        self.record(at, at + BLOCK);
        self.tidy(id);
    }

    /// Drops the pages of a partial block that are in `start..end`: they are no longer mapped.
    fn drop_pages(&mut self, id: u32, start: usize, end: usize) {
        let block = self.blocks.get_mut(id);
        let at = block.at;
        let pages = (start.max(at) - at) / PAGE_SIZE..(end.min(at + BLOCK) - at) / PAGE_SIZE;
        for page in pages.clone() {
            block.set_zero(page, true);
            block.clear_ending(page);
        }
        self.forget_singles(id, pages);
        self.tidy(id);
    }

    /// Handles the move of `bytes` bytes from `from` to `to` for the partial blocks there. Their
    /// pages in the store come into memory at the new place.
    fn move_singles(&mut self, from: usize, to: usize, bytes: usize) {
        let is_partial = |id: &u32| self.blocks.get(*id).is_partial;
        let ids: Vec<u32> = self.blocks.ids_in(from, from + bytes).filter(is_partial).collect();
        for id in ids {
            let mut has_lost = false;
            for page in 0..BLOCK_PAGES {
                let block = self.blocks.get(id);
                let address = block.at + page * PAGE_SIZE;
                if !block.is_away(page) || !(from..from + bytes).contains(&address) {
                    continue;
                }
                let room = block.room.expect("what is in the store has room there");
                let (place, single) = (address - from + to, self.single);
                if self.store.read(room + page as u64, self.kernel.pages_mut(single, 1)).is_ok() {
                    self.copy_in(place, single);
                } else {
                    has_lost = true;
                    self.poison(place);
                }
            }
            if has_lost {
                self.count_lost();
            }
            self.drop_pages(id, from, from + bytes);
        }
    }

    /// Dissolves the whole blocks that have pages both inside `start..end` and outside of it. The
    /// pages inside have moved to `moved_to`. All pages are brought into memory, at the addresses
    /// that they now have. Returns the blocks' old addresses, each with what
    /// [`dissolve`](Self::dissolve) returned. Their pages outside have no records.
    fn cut(&mut self, start: usize, end: usize, moved_to: usize) -> Vec<(usize, Vec<usize>)> {
        let mut cut = Vec::new();
        for edge in [start, end] {
            let Some(id) = self.blocks.at(edge) else { continue };
            let Block { at, is_partial, .. } = *self.blocks.get(id);
            if is_partial || at == edge || (start <= at && at + BLOCK <= end) {
                continue;
            }
            let dropped = self.dissolve(id, |address| match (start..end).contains(&address) {
                true => Some(address - start + moved_to),
                false => Some(address),
            });
            cut.push((at, dropped));
        }
        cut
    }

    /// Makes records of what stays of a block at its old address.
    fn record_cut(&mut self, at: usize, dropped: Vec<usize>) {
        self.record(at, at + BLOCK);
        dropped.into_iter().for_each(|page| self.removed(page, page + PAGE_SIZE));
    }

    /// Brings all of a whole block into memory, and forgets the block. Returns the old addresses of
    /// its pages that the program has dropped, and that the kernel may still remove there.
    pub(super) fn dissolve(&mut self, id: u32, place: impl Fn(usize) -> Option<usize>) -> Vec<usize> {
        if let State::Filling(_) = self.blocks.get(id).state {
            self.end_fill(id);
        }
        self.stop(id);
        let at = self.blocks.get(id).at;
        let slot = match self.blocks.get(id).state {
            State::Writing(slot) | State::Ready(slot) | State::Back(slot) => Some(slot),
            State::Stored => {
                let slot = self.frame();
                if self.read(id, slot) {
                    Some(slot)
                } else {
                    self.slots[slot] = Slot::Free;
                    self.lose(id, &place);
                    None
                }
            }
            _ => None,
        };
        if let Some(slot) = slot {
            for offset in (0..BLOCK).step_by(PAGE_SIZE) {
                if place(at + offset).is_some_and(|to| self.copy_in(to, self.slot(slot) + offset)) {
                    self.blocks.get_mut(id).clear_ending(offset / PAGE_SIZE);
                }
            }
            self.leave(slot);
            self.blocks.get_mut(id).state = State::Resident;
        } else if self.blocks.get(id).state == State::Resident {
            self.went(id);
        } else if self.blocks.get(id).state == State::Lost {
            // It may have been lost at its old place, while events of its move waited.
            self.poison_block(id, place);
        }
        self.release_room(id);
        self.forget_singles(id, 0..BLOCK_PAGES);
        let is_dropped = |&page: &usize| self.blocks.get(id).is_ending((page - at) / PAGE_SIZE);
        let dropped = (at..at + BLOCK).step_by(PAGE_SIZE).filter(is_dropped).collect();
        self.blocks.remove(id);
        dropped
    }

    /// Notes that a block which was in place is no longer whole, or no longer mapped.
    fn went(&mut self, id: u32) {
        self.policy.went(id);
        self.placed.retain(|&(other, _)| other != id);
    }

    /// Removes a block that is no longer mapped.
    pub(super) fn forget(&mut self, id: u32) {
        match self.blocks.get(id).state {
            State::Writing(slot) | State::Filling(slot) | State::Ready(slot) | State::Back(slot) => {
                self.stop(id);
                self.ready.retain(|&(other, _)| other != id);
                self.leave(slot);
            }
            State::Resident => self.went(id),
            State::Empty | State::Stored | State::Lost => {}
        }
        self.release_room(id);
        self.forget_singles(id, 0..BLOCK_PAGES);
        self.blocks.remove(id);
    }

    /// Handles the event that the program drops the content of `start..end`. The range reads as
    /// zeros from now on.
    pub(super) fn removed(&mut self, start: usize, end: usize) {
        let ids: Vec<u32> = self.blocks.ids_in(start, end).collect();
        for id in ids {
            let at = self.blocks.get(id).at;
            let pages = (start.max(at) - at) / PAGE_SIZE..(end.min(at + BLOCK) - at) / PAGE_SIZE;
            self.removed_in(id, pages);
        }
    }

    pub(super) fn removed_in(&mut self, id: u32, pages: std::ops::Range<usize>) {
        self.drop_copy(id);
        let is_whole = pages.len() == BLOCK_PAGES;
        let block = self.blocks.get_mut(id);
        if block.count_there() > 0 {
            let ending = block.ending.get_or_insert_default();
            for page in pages.clone() {
                ending[page / 64] |= block.there[page / 64] & 1 << (page % 64);
            }
            self.forget_singles(id, pages.clone());
        }
        match self.blocks.get(id).state {
            State::Empty | State::Lost => {}
            State::Stored if is_whole && !self.blocks.get(id).is_partial => {
                self.release_room(id);
                self.blocks.get_mut(id).state = State::Empty;
            }
            State::Stored => {
                pages.for_each(|page| self.blocks.get_mut(id).set_zero(page, true));
                self.tidy(id);
            }
            State::Writing(slot) | State::Ready(slot) | State::Filling(slot) | State::Back(slot) => {
                let is_written = self.stop(id);
                self.clear(slot, pages);
                if is_written {
                    // The pages that were already written to the store are older than this change.
                    // So write the block from the beginning.
                    self.begin_load(id, slot, false);
                }
            }
            State::Resident => {
                let block = self.blocks.get_mut(id);
                let ending = block.ending.get_or_insert_default();
                for page in pages {
                    ending[page / 64] |= 1 << (page % 64);
                }
            }
        }
    }

    pub(super) fn add_span(&mut self, start: usize, end: usize) {
        order::add(&mut self.spans, start..end);
    }

    pub(super) fn forget_span(&mut self, start: usize, end: usize) {
        order::forget(&mut self.spans, start..end);
    }

    /// Reads which memory the program has left out of its forks, or included again, since the last
    /// call. Ignores memory that the pager does not manage. The kernel sends no event when such
    /// memory is unmapped, and new memory may then get its address.
    pub(super) fn note_left_out(&mut self) {
        let [start, end] = self.shared.inherit.each_ref();
        // The thread that wrote the range wrote its end last. So read the end first.
        let end = end.load(Ordering::Acquire);
        let range = start.load(Ordering::Relaxed)..end;
        if range.is_empty() {
            return;
        }
        if self.shared.is_inherited.load(Ordering::Relaxed) {
            order::forget(&mut self.left_out, range);
            return;
        }
        for part in order::held_in(&self.spans, range) {
            order::add(&mut self.left_out, part);
        }
    }

    /// Has no child inherit the memory that the program has left out of its forks. The advice for
    /// all managed memory was the opposite. Returns false if the address space changes meanwhile.
    pub(super) fn leave_out(&mut self) -> bool {
        let left_out: Vec<(usize, usize)> = self.left_out.iter().map(|(&start, &end)| (start, end)).collect();
        self.advise(&left_out, Advice::LinuxDontFork)
    }

    /// Whether the program has left the whole block at this address out of its forks.
    pub(super) fn is_left_out(&self, block: usize) -> bool {
        let before = self.left_out.range(..=block).next_back();
        before.is_some_and(|(_, &end)| block + BLOCK <= end)
    }

    /// Looks for new memory if the address space has changed its size since the last look. Also
    /// looks if the last look left memory for a later one. Does not look again soon after a look
    /// that took long. Then counts the memory that is not managed.
    pub(super) fn look_if_changed(&mut self) {
        self.looked = self.kernel.now();
        if self.kernel.size().mapped != self.seen && self.looked >= self.look_again {
            self.look();
            let now = self.kernel.now();
            self.look_again = now + (now - self.looked) * LOOK_REST;
        }
        if self.scope == Scope::Process {
            self.beside = self.kernel.size().anonymous.saturating_sub(self.managed());
        }
    }

    /// Looks for new memory. What changes meanwhile is left for the next look.
    pub(super) fn look(&mut self) {
        if self.scope != Scope::Process {
            return;
        }
        if !self.outside.may_manage() {
            self.seen = 0;
            return;
        }
        self.seen = self.kernel.size().mapped;
        if !self.kernel.read_mappings(&mut self.mappings) {
            return;
        }
        let mut found: Vec<(usize, usize)> = Vec::new();
        for &Mapping { start, end, is_plain } in &self.mappings {
            if !is_plain {
                continue;
            }
            let mut from = start;
            while from < end {
                let known = self.known(from, end);
                let to = known.map_or(end, |(start, _)| start.max(from));
                let is_next = found.last().is_some_and(|&(_, end)| end == from)
                    || self.spans.range(..from).next_back().is_some_and(|(_, &end)| end == from);
                // When a registered mapping grows, its new part is registered too, and no child
                // inherits it until the pager changes that for a fork (`MADV_DOFORK`). So the pager
                // manages the new part, however small it is.
                let is_same = is_next && from > start || to < end && self.spans.contains_key(&to);
                if to > from && (is_same || is_next || to - from >= SMALLEST) {
                    found.push((from, to));
                }
                from = known.map_or(end, |(_, end)| end);
            }
        }
        if !found.is_empty() && !self.adopt(&found) {
            self.seen = 0;
        }
    }

    /// The first range in `start..end` that must not be adopted: it is managed already, or is
    /// excluded from management.
    pub(super) fn known(&self, start: usize, end: usize) -> Option<(usize, usize)> {
        let overlaps = |&(first, last): &(usize, usize)| first < end && last > start;
        let before = self.spans.range(..=start).next_back();
        let after = self.spans.range(start..end).next();
        let spans = before.into_iter().chain(after).map(|(&first, &last)| (first, last));
        self.excluded.iter().copied().chain(spans).filter(overlaps).min()
    }

    /// Registers these ranges and manages them from now on, except those that change meanwhile.
    /// Returns true if no range has changed.
    pub(super) fn adopt(&mut self, ranges: &[(usize, usize)]) -> bool {
        let mut ranges = ranges.to_vec();
        ranges.retain(|&(start, end)| self.kernel.register(start, end).is_ok());
        // From here on the kernel sends an event for each change of a range. But the list of
        // mappings was read before. It may lack a later change, or show a change whose event is not
        // handled yet. New blocks could then cover a hole, or overlap blocks that the event brings.
        // So leave out the ranges that such a change touches.
        let registered = ranges.len();
        if self.scope == Scope::Process {
            self.retain_mappings(&mut ranges);
        }
        self.hear();
        for _ in 0..WAITS {
            if !self.kernel.is_changing() {
                break;
            }
            self.wait_and_hear();
        }
        if self.kernel.is_changing() {
            return false;
        }
        ranges.retain(|&(start, end)| !self.events.iter().any(|event| order::touches(event, &(start..end))));
        let are_all = ranges.len() == registered;
        self.advise(&ranges, self.advice());
        for (start, end) in ranges {
            self.add_span(start, end);
            // Some pages may have been touched before the registration.
            self.record(start, end);
        }
        are_all
    }

    /// Whether children inherit managed memory: while a thread holds all blocks in place.
    pub(super) fn advice(&self) -> Advice {
        if self.is_held() { Advice::LinuxDoFork } else { Advice::LinuxDontFork }
    }

    /// Gives the kernel advice about forks for these ranges of managed memory. Returns false if the
    /// address space changes meanwhile: other memory may have got the advice.
    pub(super) fn advise(&mut self, ranges: &[(usize, usize)], advice: Advice) -> bool {
        for &(start, end) in ranges {
            let _ = self.kernel.advise(start, end - start, advice);
        }
        let is_sure = !self.kernel.is_changing();
        if !is_sure && advice == Advice::LinuxDontFork {
            ranges.iter().for_each(|&(start, end)| order::add(&mut self.doubtful, start..end));
        }
        is_sure
    }

    /// Takes back the advice that other memory has got in the place of managed memory that is gone.
    fn take_advice_back(&mut self, range: std::ops::Range<usize>) {
        let doubtful = order::held_in(&self.doubtful, range.clone());
        if doubtful.is_empty() {
            return;
        }
        order::forget(&mut self.doubtful, range);
        let mut mappings = std::mem::take(&mut self.mappings_of_now);
        self.kernel.read_mappings(&mut mappings);
        for part in doubtful {
            for mapping in order::of_range(&mappings, &part) {
                let (start, end) = (mapping.start.max(part.start), mapping.end.min(part.end));
                // Registered memory there is managed, or will be.
                if self.kernel.is_registered(start) != Ok(true) {
                    let _ = self.kernel.advise(start, end - start, Advice::LinuxDoFork);
                }
            }
        }
        self.mappings_of_now = mappings;
    }

    /// Ends the doubt about the advice once all changes of the address space are handled.
    pub(super) fn end_doubt(&mut self) {
        if !self.doubtful.is_empty() && self.events.is_empty() && !self.kernel.is_changing() {
            self.doubtful.clear();
        }
    }

    /// Makes a block around an address of managed memory that has none yet.
    pub(super) fn begin(&mut self, address: usize) -> Option<u32> {
        let at = address / BLOCK * BLOCK;
        if order::held_in(&self.spans, address..address + 1).is_empty() {
            return None;
        }
        let is_whole = self.is_managed(at) && self.blocks.ids_in(at, at + BLOCK).next().is_none();
        Some(if is_whole { self.blocks.add(at, State::Empty) } else { self.blocks.add_partial(at) })
    }

    /// Whether all memory of the block at this address is managed.
    fn is_managed(&self, block: usize) -> bool {
        self.spans.range(..=block).next_back().is_some_and(|(_, &end)| block + BLOCK <= end)
    }

    /// Makes records of the managed pages in `start..end` that are in place and in no record yet.
    /// Only memory with a record can be moved out.
    fn record(&mut self, start: usize, end: usize) {
        for part in order::held_in(&self.spans, start..end) {
            let mut found = Vec::new();
            let _ = self.kernel.populated(part.start, part.end, |start, end| found.push((start, end)));
            for (start, end) in found {
                self.record_pages(start, end);
            }
        }
        let (start, end) = (start / BLOCK * BLOCK, end.next_multiple_of(BLOCK));
        let is_alone = |id: &u32| {
            let at = self.blocks.get(*id).at;
            self.blocks.get(*id).is_partial
                && self.is_managed(at)
                && self.blocks.ids_in(at, at + BLOCK).nth(1).is_none()
        };
        let whole: Vec<u32> = self.blocks.ids_in(start, end).filter(is_alone).collect();
        for id in whole {
            self.make_whole(id);
        }
    }

    /// Makes a partial block whole: all of its memory is managed now.
    fn make_whole(&mut self, id: u32) {
        let block = self.blocks.get_mut(id);
        block.is_partial = false;
        self.partial_there -= block.count_there();
        if (0..BLOCK_PAGES).any(|page| block.is_away(page)) {
            return;
        }
        let is_empty = block.count_there() == 0;
        block.state = if is_empty { State::Empty } else { State::Resident };
        self.forget_singles(id, 0..BLOCK_PAGES);
        self.release_room(id);
        if !is_empty {
            self.policy.came(id);
        }
    }

    /// Makes records of managed pages that are in place and in no record yet. If a block's page is
    /// in the store, a page in its place belongs to other memory: a later event moves the block.
    fn record_pages(&mut self, start: usize, end: usize) {
        let mut next = start;
        while next < end {
            let at = next / BLOCK * BLOCK;
            let (from, to) = (next, end.min(at + BLOCK));
            next = to;
            if self.blocks.ids_in(at, at + BLOCK).next().is_none() && self.is_managed(at) {
                self.policy.came(self.blocks.add(at, State::Resident));
                continue;
            }
            for address in (from..to).step_by(PAGE_SIZE) {
                let page = (address - at) / PAGE_SIZE;
                let id = self.blocks.at(address).unwrap_or_else(|| self.blocks.add_partial(at));
                let block = self.blocks.get(id);
                if block.is_partial && !block.is_away(page) && !block.is_ending(page) {
                    self.came_singly(id, page..page + 1);
                }
            }
        }
    }

    /// Keeps those ranges that are each part of one plain mapping. The kernel never merges memory
    /// that is registered with userfaultfd with other memory.
    fn retain_mappings(&mut self, ranges: &mut Vec<(usize, usize)>) {
        let mut mappings = std::mem::take(&mut self.mappings_of_now);
        let has_read = self.kernel.read_mappings(&mut mappings);
        let is_one = |&(start, end): &(usize, usize)| {
            let after = mappings.partition_point(|mapping| mapping.start <= start);
            after > 0 && mappings[after - 1].is_plain && end <= mappings[after - 1].end
        };
        ranges.retain(|range| has_read && is_one(range));
        self.mappings_of_now = mappings;
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::pager::simulator::{Area, Machine, Simulated, address, work_at_rest};

    #[test]
    fn memory_that_is_not_managed_counts_against_the_limit_and_leaves_a_quarter_of_it() {
        let (mut work, first) = work_at_rest();
        work.shared.limit.store(24, Ordering::Relaxed);
        work.look_if_changed();
        assert_eq!(work.limit(), 24);
        work.scope = Scope::Process;
        work.kernel.world.map(first, first + 40 * BLOCK_PAGES);
        work.excluded.push((address(first), address(first + 40 * BLOCK_PAGES)));
        let there = |work: &mut Work<Machine, Simulated>, blocks: usize| {
            (first..first + blocks * BLOCK_PAGES).for_each(|page| work.kernel.world.come(page, 7));
            work.look_if_changed();
            work.limit()
        };
        assert_eq!([0, 3, 18, 30].map(|blocks| there(&mut work, blocks)), [24, 21, 6, 6]);
        // Managed memory does not count twice.
        work.policy.came(work.blocks.add(address(first), State::Resident));
        work.kernel.world.entries.iter_mut().for_each(|entry| entry.is_there = false);
        assert_eq!(there(&mut work, 3), 22);
    }

    #[test]
    fn memory_that_changes_while_the_pager_looks_does_not_keep_it_from_managing_other_memory() {
        let (mut work, first) = work_at_rest();
        work.scope = Scope::Process;
        work.look();
        let place = |number: usize| first + 2 * number * BLOCK_PAGES;
        let bytes = |number: usize| (address(place(number)), address(place(number)) + BLOCK);
        let unmapped = |number: usize| (Event::Unmap(bytes(number).0, bytes(number).1), 0);
        [0, 1, 2]
            .iter()
            .for_each(|&number| work.kernel.world.map(place(number), place(number) + BLOCK_PAGES));
        work.kernel.world.come(place(0), 7);
        // Of the ranges 0 to 3, an event says that range 1 is unmapped, and range 3 has no mapping.
        // The event about range 4 concerns none of these.
        work.kernel.world.events.extend([1, 4].map(unmapped));
        assert!(!work.adopt(&[0, 1, 2, 3].map(bytes)));
        assert_eq!(work.spans, BTreeMap::from([bytes(0), bytes(2)]));
        assert_eq!(work.singles_there + work.policy.len(), 1, "only what has a record can go out");
        // The next look finds the rest.
        work.events.clear();
        work.look_if_changed();
        assert_eq!(work.spans, BTreeMap::from([0, 1, 2].map(bytes)));
    }

    #[test]
    fn looks_for_new_memory_take_a_tenth_of_the_time_at_most() {
        let (mut work, first) = work_at_rest();
        work.scope = Scope::Process;
        work.kernel.world.reading = Duration::from_millis(5);
        let (mut looks, begun) = (0, work.kernel.world.now);
        for number in 0..100 {
            // Small mappings come all the time.
            work.kernel.world.map(first + 2 * number, first + 2 * number + 1);
            let before = work.kernel.world.now;
            work.look_if_changed();
            looks += u32::from(work.kernel.world.now > before);
            work.kernel.world.now += LOOK_EVERY;
        }
        let all = work.kernel.world.now - begun;
        assert!(looks > 1, "new memory is found all the same");
        assert!((looks - 1) * work.kernel.world.reading * LOOK_REST <= all, "{looks} looks in {all:?}");
    }

    #[test]
    fn no_memory_is_managed_while_that_is_forbidden_and_it_is_found_afterwards() {
        struct Forbids(std::rc::Rc<std::cell::Cell<bool>>);
        impl crate::Outside for Forbids {
            fn tell(&mut self, _: &str) {}
            fn may_manage(&mut self) -> bool {
                !self.0.get()
            }
        }
        let (mut work, first) = work_at_rest();
        let forbids = std::rc::Rc::new(std::cell::Cell::new(true));
        (work.scope, work.outside) = (Scope::Process, Box::new(Forbids(forbids.clone())));
        work.kernel.world.map(first, first + BLOCK_PAGES);
        work.seen = work.kernel.size().mapped;
        work.look();
        assert!(work.spans.is_empty());
        forbids.set(false);
        // Nothing has changed since, and the next look comes by itself.
        work.look_if_changed();
        assert_eq!(work.spans.len(), 1);
    }

    #[test]
    fn memory_that_is_not_managed_counts_though_the_address_space_changes_all_the_time() {
        let (mut work, first) = work_at_rest();
        work.scope = Scope::Process;
        work.look();
        work.kernel.world.map(first, first + BLOCK_PAGES);
        (first..first + 3).for_each(|page| work.kernel.world.come(page, 7));
        work.kernel.world.changing = 1;
        work.look_if_changed();
        assert_eq!((work.beside, work.spans.len()), (3, 0));
        work.kernel.world.changing = 0;
        work.kernel.world.now = work.look_again;
        work.look_if_changed();
        assert_eq!(work.spans.len(), 1, "the next look manages it");
    }

    #[test]
    fn what_the_program_leaves_out_of_its_forks_stays_in_the_store_and_moves_with_its_memory() {
        let (mut work, first) = work_at_rest();
        work.kernel.world.map(first, first + 2 * BLOCK_PAGES);
        work.kernel.register(address(first), address(first + 2 * BLOCK_PAGES)).unwrap();
        work.add_span(address(first), address(first + 2 * BLOCK_PAGES));
        let ids = [0, 1].map(|number| {
            work.kernel.world.come(first + number * BLOCK_PAGES, 7);
            let id = work.blocks.add(address(first + number * BLOCK_PAGES), State::Resident);
            work.policy.came(id);
            work.begin_write().expect("it can go");
            work.end_loads();
            id
        });
        assert_eq!(ids.map(|id| work.blocks.get(id).state), [State::Stored; 2]);
        let [start, end] = work.shared.inherit.each_ref();
        start.store(address(first), Ordering::Relaxed);
        end.store(address(first) + BLOCK, Ordering::Relaxed);
        work.shared.holds.store(1, Ordering::SeqCst);
        let bell = work.shared.bells.base;
        work.fault(bell, &mut None).unwrap();
        assert_eq!(ids.map(|id| work.blocks.get(id).state), [State::Stored, State::Resident]);
        let is_left_out = |page| work.kernel.world.area(page).expect("mapped").1.is_left_out_of_forks;
        assert!(is_left_out(first) && !is_left_out(first + BLOCK_PAGES));
        let (to, past) = (address(first + 8 * BLOCK_PAGES), address(first + 9 * BLOCK_PAGES));
        work.apply(Event::Remap(address(first), to, BLOCK));
        assert_eq!(Vec::from_iter(work.left_out.clone()), [(to, past)]);
        work.apply(Event::Unmap(to, to + BLOCK / 2));
        assert_eq!(Vec::from_iter(work.left_out.clone()), [(to + BLOCK / 2, past)]);
    }

    #[test]
    fn other_memory_where_a_span_was_gets_no_advice_about_forks() {
        let is_left_out = |work: &Work<Machine, Simulated>, page| {
            work.kernel.world.area(page).expect("mapped").1.is_left_out_of_forks
        };
        // The event that the span is unmapped is not sent yet, or is read and not handled yet.
        for is_read in [false, true] {
            let (mut work, first) = work_at_rest();
            let (start, end) = (address(first), address(first + BLOCK_PAGES));
            work.add_span(start, end);
            work.kernel.world.map(first, first + BLOCK_PAGES);
            match is_read {
                true => work.events.push_back(Event::Unmap(start, end)),
                false => work.kernel.world.changing = 1,
            }
            let bell = work.shared.bells.base;
            assert!(work.fault(bell, &mut None).is_err());
            assert!(!is_left_out(&work, first));
        }
        // The span is unmapped while it gets the advice.
        let (mut work, first) = work_at_rest();
        let [old, from, to] = [0, 2, 4].map(|blocks| first + blocks * BLOCK_PAGES);
        let pages = [old, from].map(|page| (address(page), address(page) + BLOCK));
        pages.iter().for_each(|&(start, end)| work.add_span(start, end));
        [old, to].iter().for_each(|&page| work.kernel.world.map(page, page + BLOCK_PAGES));
        work.kernel.world.changing = 1;
        for range in pages {
            assert!(!work.advise(&[range], Advice::LinuxDontFork));
        }
        work.kernel.world.changing = 0;
        work.events.push_back(Event::Unmap(pages[0].0, pages[0].1));
        work.end_doubt();
        work.apply(Event::Unmap(pages[0].0, pages[0].1));
        work.apply(Event::Remap(pages[1].0, address(to), BLOCK));
        assert_eq!([old, to].map(|page| is_left_out(&work, page)), [false, true]);
        // It had gone on already, and other memory had come there.
        work.apply(Event::Unmap(address(to), address(to) + BLOCK));
        assert!(!is_left_out(&work, to));
        // Once there is no doubt, what the program itself leaves out of its forks stays so.
        let again = |work: &mut Work<Machine, Simulated>| {
            work.kernel.advise(pages[0].0, BLOCK, Advice::LinuxDontFork).unwrap();
            work.apply(Event::Unmap(pages[0].0, pages[0].1));
            is_left_out(work, old)
        };
        assert!(again(&mut work), "it was taken back already");
        work.kernel.world.changing = 1;
        work.advise(&pages, Advice::LinuxDontFork);
        work.kernel.world.changing = 0;
        work.events.clear();
        work.end_doubt();
        assert!(again(&mut work));
        // The same holds for memory that the program has left out of its forks before.
        order::add(&mut work.left_out, pages[0].0..pages[0].1);
        work.kernel.world.changing = 1;
        assert!(!work.leave_out());
        assert!(!again(&mut work));
    }

    #[test]
    fn memory_that_is_not_managed_is_not_noted_as_left_out_of_forks() {
        let (mut work, first) = work_at_rest();
        let [start, end] = [0, 2].map(|blocks| address(first + blocks * BLOCK_PAGES));
        work.kernel.world.map(first, first + 2 * BLOCK_PAGES);
        work.kernel.register(end - BLOCK, end).unwrap();
        work.add_span(end - BLOCK, end);
        for (shared, bound) in work.shared.inherit.each_ref().into_iter().zip([start, end]) {
            shared.store(bound, Ordering::Relaxed);
        }
        let bell = work.shared.bells.base;
        work.fault(bell, &mut None).unwrap();
        assert_eq!(Vec::from_iter(work.left_out.clone()), [(end - BLOCK, end)]);
    }

    #[test]
    fn at_the_end_comes_also_what_no_child_inherits() {
        let (mut work, first) = work_at_rest();
        work.kernel.world.map(first, first + BLOCK_PAGES);
        work.kernel.register(address(first), address(first) + BLOCK).unwrap();
        work.add_span(address(first), address(first) + BLOCK);
        work.kernel.world.come(first, 7);
        let id = work.blocks.add(address(first), State::Resident);
        work.policy.came(id);
        work.begin_write().expect("it can go");
        work.end_loads();
        order::add(&mut work.left_out, address(first)..address(first) + BLOCK);
        work.shared.stop.store(true, Ordering::SeqCst);
        work.shared.holds.store(1, Ordering::SeqCst);
        let bell = work.shared.bells.base;
        work.fault(bell, &mut None).unwrap();
        assert_eq!(work.blocks.get(id).state, State::Resident);
    }

    #[test]
    fn a_block_that_is_lost_while_a_part_of_it_moves_is_lost_at_the_new_place_too() {
        let (mut work, first) = work_at_rest();
        let (moved, end, to) = (first + 100, first + BLOCK_PAGES, first + 4 * BLOCK_PAGES + 10);
        work.kernel.world.map(first, end);
        work.kernel.register(address(first), address(end)).unwrap();
        work.add_span(address(first), address(end));
        let id = work.blocks.add(address(first), State::Stored);
        let room = work.store.claim().expect("room");
        work.blocks.get_mut(id).room = Some(room);
        work.rooms = 1;
        work.store.spoil(room + 200);
        // It is being prefetched when its part moves.
        let slot = work.frame();
        work.blocks.get_mut(id).state = State::Filling(slot);
        work.begin_load(id, slot, false);
        for (start, area) in work.kernel.world.take_areas(moved, end) {
            work.kernel.world.insert(to + start - moved, Area { end: to + area.end - moved, ..area });
        }
        work.is_heeding = true;
        work.apply(Event::Remap(address(moved), address(to), (end - moved) * PAGE_SIZE));
        work.is_heeding = false;
        for page in [to, to + 100, first] {
            assert!(work.kernel.world.entries[page].is_poisoned, "it would read as zeros");
        }
    }

    #[test]
    fn a_thread_that_waits_for_a_page_of_a_lost_block_is_woken_though_the_page_was_dropped() {
        for is_lost in [false, true] {
            let (mut work, first) = work_at_rest();
            let (start, end) = (address(first), address(first + BLOCK_PAGES));
            work.kernel.world.map(first, first + BLOCK_PAGES);
            work.kernel.register(start, end).unwrap();
            work.add_span(start, end);
            let id = work.blocks.add(start, State::Stored);
            let room = work.store.claim().expect("room");
            work.blocks.get_mut(id).room = Some(room);
            work.rooms = 1;
            work.store.spoil(room + 200);
            if is_lost {
                work.lose(id, |_| None);
            } else {
                let slot = work.frame();
                work.blocks.get_mut(id).state = State::Filling(slot);
                work.begin_load(id, slot, false);
            }
            let drop = Event::Remove(start + PAGE_SIZE, start + 2 * PAGE_SIZE);
            work.events.push_back(drop);
            let mut plan = Some(Plan { stride: None, guess: None, is_whole: true });
            assert!(work.fault(start + PAGE_SIZE, &mut plan).is_err(), "nobody has woken it");
            work.events.clear();
            work.apply(drop);
            work.fault(start + PAGE_SIZE, &mut plan).unwrap();
            assert!(work.kernel.world.entries[first + 1].is_poisoned);
        }
    }

    #[test]
    fn what_stays_of_a_lost_block_waits_for_no_page_that_is_gone() {
        for is_touched in [false, true] {
            let (mut work, first) = work_at_rest();
            let (at, cut, end) = (first + 100, first + 300, first + 100 + BLOCK_PAGES);
            work.kernel.world.map(at, end);
            work.kernel.register(address(at), address(end)).unwrap();
            work.add_span(address(at), address(end));
            let id = work.blocks.add(address(at), State::Stored);
            work.kernel.world.come(at + 5, 7);
            work.came_singly(id, 5..6);
            work.lose(id, Some);
            work.removed(address(at + 5), address(at + 6));
            work.kernel.world.go(at + 5);
            if is_touched {
                work.fault(address(at + 5), &mut None).unwrap();
            }
            unmapped(&mut work, cut..end);
            assert!(work.kernel.world.entries[at + 5].is_poisoned);
            assert!(work.have_ended());
        }
    }

    #[test]
    fn what_is_in_the_store_moves_with_its_memory_though_other_memory_is_at_its_place_already() {
        let (mut work, first) = work_at_rest();
        let (hole, moved) = (first + 10..first + 74, first + 100..first + 164);
        let to = first + 4 * BLOCK_PAGES;
        adopted(&mut work, first..first + BLOCK_PAGES);
        work.begin_write().expect("it can go");
        work.end_loads();
        work.kernel.world.take_areas(hole.start, hole.end);
        let areas = work.kernel.world.take_areas(moved.start, moved.end);
        work.kernel.world.insert(to, Area { end: to + moved.len(), ..areas[0].1 });
        work.kernel.world.map(moved.start, moved.end);
        moved.clone().for_each(|page| work.kernel.world.come(page, 0));
        work.apply(Event::Unmap(address(hole.start), address(hole.end)));
        work.apply(Event::Remap(address(moved.start), address(to), moved.len() * PAGE_SIZE));
        assert!((to..).zip(moved).all(|(page, word)| work.kernel.world.word(page) == word as u64));
    }

    #[test]
    fn a_partial_block_beside_a_cut_one_stays_partial_if_a_whole_block_moves_to_it() {
        let (mut work, first) = work_at_rest();
        let near = first + 4 * BLOCK_PAGES;
        let (from, end, to) = (near - 1155, near + 185, near + 185);
        work.kernel.world.map(from, end);
        work.kernel.register(address(from), address(end)).unwrap();
        work.add_span(address(from), address(end));
        // The second whole block is cut. It reaches into the partial one.
        let [whole, _] = [near - 991, near - 479].map(|page| {
            let id = work.blocks.add(address(page), State::Stored);
            work.blocks.get_mut(id).zeros = [u64::MAX; BLOCK_PAGES / 64];
            id
        });
        work.blocks.add_partial(address(near));
        let moved_end = from + 864;
        for (start, area) in work.kernel.world.take_areas(from, moved_end) {
            work.kernel.world.insert(to + start - from, Area { end: to + area.end - from, ..area });
        }
        moved(&mut work, address(from), address(to), 864 * PAGE_SIZE);
        assert_eq!(work.blocks.get(whole).at, address(near - 991 - from + to));
        let partial = work.blocks.at(address(near)).expect("the cut block's last pages are there");
        assert!(work.blocks.get(partial).is_partial);
        assert_eq!(work.policy.len(), 0, "its pages would move out, and zeros come back");
    }

    #[test]
    fn a_fork_takes_back_what_is_being_written_and_asks_the_store_for_nothing() {
        let (mut work, first) = work_at_rest();
        work.kernel.world.map(first, first + BLOCK_PAGES);
        work.kernel.register(address(first), address(first) + BLOCK).unwrap();
        work.add_span(address(first), address(first) + BLOCK);
        work.kernel.world.come(first + 5, 7);
        let id = work.blocks.add(address(first), State::Resident);
        work.policy.came(id);
        work.begin_write().expect("it can go");
        let room = work.blocks.get(id).room.expect("it was claimed");
        work.store.spoil(room + 5);
        work.shared.holds.store(1, Ordering::SeqCst);
        let bell = work.shared.bells.base;
        work.fault(bell, &mut None).unwrap();
        assert_eq!(work.blocks.get(id).state, State::Resident);
        assert_eq!(work.kernel.world.word(first + 5), 7);
        // The same for memory that the child does not inherit: a slow store would hold up the fork.
        work.shared.holds.store(0, Ordering::SeqCst);
        work.begin_write().expect("it can go");
        order::add(&mut work.left_out, address(first)..address(first) + BLOCK);
        work.shared.holds.store(1, Ordering::SeqCst);
        // The kernel refuses it at first. Nobody may touch it for long, and it would keep its slot.
        work.kernel.world.refusals.push_back(Errno::NOMEM);
        assert!(work.fault(bell, &mut None).is_err());
        work.fault(bell, &mut None).unwrap();
        assert_eq!(work.blocks.get(id).state, State::Resident);
    }

    #[test]
    fn memory_that_moves_to_where_other_memory_was_outlives_the_end_of_that_move() {
        let (mut work, first) = work_at_rest();
        let [old, other, new] = [0, 2, 4].map(|blocks| address(first + blocks * BLOCK_PAGES));
        let ids = [old, other].map(|at| {
            work.add_span(at, at + BLOCK);
            work.blocks.add(at, State::Empty)
        });
        let moves = [Event::Remap(old, new, BLOCK), Event::Remap(other, old, BLOCK)];
        // The kernel sends a second event for each move, which unmaps the old place. Here the
        // second events of both moves come after the second move.
        let ends = [Event::Unmap(old, old + BLOCK), Event::Unmap(other, other + BLOCK)];
        work.events.extend(moves.into_iter().chain(ends));
        assert!(work.put_in_order());
        while let Some(event) = work.events.pop_front() {
            work.apply(event);
        }
        assert_eq!([new, old, other].map(|at| work.blocks.at(at)), [Some(ids[0]), Some(ids[1]), None]);
        let spans: Vec<(usize, usize)> = work.spans.clone().into_iter().collect();
        assert_eq!(spans, [(old, old + BLOCK), (new, new + BLOCK)]);
    }

    #[test]
    fn what_stays_of_a_block_is_moved_out_page_by_page_and_is_whole_again_once_its_hole_is_mapped() {
        let (mut work, first) = work_at_rest();
        let (hole, end) = (first + 100, first + BLOCK_PAGES);
        work.kernel.world.map(first, end);
        work.kernel.register(address(first), address(end)).unwrap();
        work.add_span(address(first), address(end));
        for page in first..end {
            work.kernel.world.come(page, page as u64);
        }
        let id = work.blocks.add(address(first), State::Resident);
        work.policy.came(id);
        work.kernel.world.take_areas(hole, end);
        (hole..end).for_each(|page| work.kernel.world.go(page));
        work.apply(Event::Unmap(address(hole), address(end)));
        assert_eq!((work.frames(), work.singles_there, work.rooms), (1, 100, 0), "it counts");
        while work.write_singles(singles::BATCH) {}
        work.end_outbox();
        assert_eq!((work.frames(), work.singles_there, work.rooms), (0, 0, 1));
        assert!((first..hole).all(|page| !work.kernel.world.is_something(page)), "all of it is out");
        work.kernel.world.map(hole, end);
        work.kernel.register(address(hole), address(end)).unwrap();
        assert!(work.adopt(&[(address(hole), address(end))]));
        assert!(!work.blocks.get(id).is_partial);
        work.bring(id).unwrap();
        for page in first..end {
            assert_eq!(work.kernel.world.word(page), if page < hole { page as u64 } else { 0 });
        }
        work.apply(Event::Unmap(address(first), address(hole)));
        work.apply(Event::Unmap(address(hole), address(end)));
        assert_eq!((work.blocks.len(), work.rooms), (0, 0), "nothing is left of it");
    }

    /// Maps pages, fills them, each with its number, and has them managed.
    fn adopted(work: &mut Work<Machine, Simulated>, pages: std::ops::Range<usize>) {
        work.kernel.world.map(pages.start, pages.end);
        pages.clone().for_each(|page| work.kernel.world.come(page, page as u64));
        assert!(work.adopt(&[(address(pages.start), address(pages.end))]));
    }

    /// Applies the events of a move whose old place is unmapped at its end.
    fn moved(work: &mut Work<Machine, Simulated>, from: usize, to: usize, bytes: usize) {
        work.events.push_front(Event::Unmap(from, from + bytes));
        work.apply(Event::Remap(from, to, bytes));
        let end = work.events.pop_front().expect("just added");
        work.apply(end);
    }

    #[test]
    fn a_mapping_that_a_move_leaves_behind_is_managed_like_before() {
        let (mut work, first) = work_at_rest();
        let [old, new] = [0, 4].map(|blocks| address(first + blocks * BLOCK_PAGES));
        work.kernel.world.map(first, first + 2 * BLOCK_PAGES);
        work.kernel.register(old, old + 2 * BLOCK).unwrap();
        work.add_span(old, old + 2 * BLOCK);
        let id = work.blocks.add(old, State::Stored);
        work.kernel.world.map(first + 4 * BLOCK_PAGES, first + 5 * BLOCK_PAGES);
        work.apply(Event::Remap(old, new, BLOCK));
        assert_eq!((work.blocks.at(new), work.blocks.at(old)), (Some(id), None));
        work.fault(old, &mut None).unwrap();
        let left = work.blocks.at(old).expect("it is managed");
        assert_eq!(work.blocks.get(left).state, State::Resident);
        moved(&mut work, new, old + 8 * BLOCK, BLOCK);
        assert_eq!(
            Vec::from_iter(work.spans.clone()),
            [(old, old + 2 * BLOCK), (old + 8 * BLOCK, old + 9 * BLOCK)]
        );
    }

    /// Takes memory away as `munmap` does.
    fn unmapped(work: &mut Work<Machine, Simulated>, pages: std::ops::Range<usize>) {
        work.kernel.world.take_areas(pages.start, pages.end);
        pages.clone().for_each(|page| work.kernel.world.go(page));
        work.apply(Event::Unmap(address(pages.start), address(pages.end)));
    }

    #[test]
    fn small_mappings_in_one_block_share_a_room_until_the_last_of_them_is_unmapped() {
        let (mut work, first) = work_at_rest();
        let (one, other) = (first + 10..first + 74, first + 100..first + 164);
        for pages in [&one, &other] {
            adopted(&mut work, pages.clone());
        }
        assert_eq!((work.blocks.len(), work.managed()), (1, 128));
        while work.write_singles(singles::BATCH) {}
        work.end_outbox();
        assert_eq!((work.rooms, work.managed()), (1, 0));
        unmapped(&mut work, one);
        let id = work
            .fault(address(other.start), &mut None)
            .map(|()| work.blocks.at(address(other.start)).unwrap())
            .unwrap();
        work.bring(id).unwrap();
        assert!(other.clone().all(|page| work.kernel.world.word(page) == page as u64));
        // The old content of the first mapping does not come back.
        work.kernel.world.map(first + 10, first + 74);
        work.kernel.register(address(first + 10), address(first + 74)).unwrap();
        work.add_span(address(first + 10), address(first + 74));
        work.fault(address(first + 10), &mut None).unwrap();
        assert_eq!(work.kernel.world.word(first + 10), 0);
        unmapped(&mut work, first + 10..first + 74);
        unmapped(&mut work, other);
        assert_eq!((work.blocks.len(), work.rooms, work.managed()), (0, 0, 0));
    }

    #[test]
    fn the_pages_beside_a_whole_block_that_begins_elsewhere_are_bounded_and_its_own_are_left_alone() {
        let (mut work, first) = work_at_rest();
        let (at, end) = (first + 100, first + 2 * BLOCK_PAGES);
        adopted(&mut work, first + 96..first + 100);
        let id = work.blocks.add(address(at), State::Stored);
        work.blocks.get_mut(id).room = work.store.claim();
        work.rooms += 1;
        work.kernel.world.map(at, end);
        work.kernel.register(address(at), address(end)).unwrap();
        work.add_span(address(at), address(end));
        (first + 96..first + 100).for_each(|page| work.kernel.world.go(page));
        work.removed(address(first + 96), address(first + 100));
        // A page fault beside the block brings pages of zeros up to the block.
        work.fault(address(first + 96), &mut None).unwrap();
        assert_eq!(work.blocks.at(address(at)), Some(id));
        assert!((first + 96..first + 100).all(|page| work.kernel.world.is_something(page)));
        assert!(!work.kernel.world.is_something(at), "this page is in the store");
        work.fault(address(at + BLOCK_PAGES), &mut None).unwrap();
        assert_eq!(work.singles_there, 4 + WINDOW);
    }

    #[test]
    fn mappings_of_64_kib_are_managed_and_smaller_ones_where_they_lie_beside_managed_memory() {
        let (mut work, first) = work_at_rest();
        work.scope = Scope::Process;
        let places = [(first, 16), (first + 32, 15), (first + 64, 64), (first + 128, 4)];
        for (at, pages) in places {
            work.kernel.world.map(at, at + pages);
        }
        work.look();
        let spans: Vec<_> = work.spans.iter().map(|(&start, &end)| (start, end)).collect();
        assert_eq!(
            spans,
            [(address(first), address(first + 16)), (address(first + 64), address(first + 132))]
        );
    }

    #[test]
    fn a_block_of_which_a_part_moves_away_and_back_can_be_moved_out_again() {
        let (mut work, first) = work_at_rest();
        for page in 0..BLOCK_PAGES {
            work.kernel.world.come(first + page, page as u64 + 1);
        }
        work.add_span(address(first), address(first + BLOCK_PAGES));
        let id = work.blocks.add(address(first), State::Resident);
        work.policy.came(id);
        let (home, away) = (address(first + 10), address(first + 4 * BLOCK_PAGES));
        moved(&mut work, home, away, 5 * PAGE_SIZE);
        assert_eq!((work.singles_there, work.policy.len()), (BLOCK_PAGES - 5, 0), "it has a hole");
        moved(&mut work, away, home, 5 * PAGE_SIZE);
        assert_eq!(work.blocks.at(home).map(|id| work.blocks.get(id).state), Some(State::Resident));
        assert_eq!(work.policy.len(), 1);
    }

    #[test]
    fn a_page_that_was_given_up_stays_out_of_the_store_though_its_block_is_cut_meanwhile() {
        for is_moved in [false, true] {
            let (mut work, first) = work_at_rest();
            let (at, end) = (first + 100, first + 100 + BLOCK_PAGES);
            work.kernel.world.map(at, end);
            work.kernel.register(address(at), address(end)).unwrap();
            work.add_span(address(at), address(end));
            (at..end).for_each(|page| work.kernel.world.come(page, 7));
            let id = work.blocks.add(address(at), State::Resident);
            work.policy.came(id);
            work.removed(address(at + 5), address(at + 6));
            // Another thread moves a part away, or unmaps it.
            let (cut, to) = (at + 300, first + 4 * BLOCK_PAGES);
            for (start, area) in work.kernel.world.take_areas(cut, end) {
                if is_moved {
                    let area = Area { end: to + area.end - cut, ..area };
                    work.kernel.world.insert(to + start - cut, area);
                }
            }
            (cut..end).for_each(|page| work.kernel.world.go(page));
            work.apply(match is_moved {
                true => Event::Remap(address(cut), address(to), (end - cut) * PAGE_SIZE),
                false => Event::Unmap(address(cut), address(end)),
            });
            assert_eq!(work.singles_there, 300 - 1);
            while work.write_singles(singles::BATCH) {}
            assert_eq!(work.singles_there, 0);
            assert!(work.kernel.world.is_something(at + 5), "the kernel has not removed it yet");
            work.kernel.world.go(at + 5);
            work.fault(address(at + 5), &mut None).unwrap();
            assert_eq!([4, 5].map(|page| work.kernel.world.word(at + page)), [0, 0]);
            work.fault(address(at + 4), &mut None).unwrap();
            assert_eq!(work.kernel.world.word(at + 4), 7);
        }
    }

    #[test]
    fn a_block_stays_until_each_single_page_that_was_given_up_is_seen_to_be_gone() {
        let (mut work, first) = work_at_rest();
        let id = work.blocks.add(address(first), State::Stored);
        work.blocks.get_mut(id).there[0] = 1 << 5 | 1 << 6;
        work.singles_there = 2;
        work.kernel.world.come(first + 5, 7);
        work.kernel.world.come(first + 6, 8);
        // The kernel sends the event before it removes the page.
        work.removed_in(id, 5..6);
        assert!(!work.has_ended(id), "old content would go to the store, and come back");
        work.kernel.world.go(first + 5);
        assert!(work.has_ended(id));
        assert_eq!(work.singles_there, 1);
    }
}
