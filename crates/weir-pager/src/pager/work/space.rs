//! Handles the kernel's events about the address space, and finds mappings in it.

use super::*;

impl<K: Kernel, S: Store> Work<K, S> {
    pub(super) fn apply(&mut self, event: Event) {
        match event {
            Event::Fault(_) => {}
            Event::Remove(start, end) => self.removed(start, end),
            Event::Unmap(start, end) => {
                self.unmapped(start, end);
                order::forget(&mut self.left_out, start..end);
            }
            Event::Remap(from, to, bytes) => {
                self.fill_holes(from, to, bytes);
                // Nothing is there, unless an event is missing.
                self.forget_all(to, to + bytes);
                // The spans change first, since the pager may read and order further events below.
                self.forget_span(from, from + bytes);
                self.add_span(to, to + bytes);
                let left_out = order::held_in(&self.left_out, from..from + bytes);
                order::forget(&mut self.left_out, to..to + bytes);
                order::forget(&mut self.left_out, from..from + bytes);
                for part in left_out {
                    order::add(&mut self.left_out, part.start - from + to..part.end - from + to);
                }
                self.cut(from, from + bytes, Some(to));
                self.blocks.shift(from, to, bytes);
                // An earlier move may have taken a part of a block away, and so have dissolved the
                // block. This move may bring that part back. So look for whole blocks without a
                // record.
                self.record(to, to + bytes);
            }
        }
    }

    /// Handles the event that the program has unmapped `start..end`. A block of which a part stays
    /// keeps that part, page by page.
    fn unmapped(&mut self, start: usize, end: usize) {
        self.forget_span(start, end);
        for edge in [start, end] {
            let Some(id) = self.blocks.at(edge) else { continue };
            let at = self.blocks.get(id).at;
            if at != edge && (at < start || at + BLOCK > end) {
                self.punch(id, start.max(at), end.min(at + BLOCK));
            }
        }
        let mut from = start;
        while from < end
            && let Some(id) = self.blocks.first_in(from, end)
        {
            let at = self.blocks.get(id).at;
            if start <= at && at + BLOCK <= end {
                self.forget(id);
            }
            from = at + BLOCK;
        }
    }

    /// Makes a hole in a block: its pages in `start..end` are unmapped. The other pages become
    /// single pages.
    fn punch(&mut self, id: u32, start: usize, end: usize) {
        while matches!(self.blocks.get(id).state, State::Filling(_)) && self.filling.is_some() {
            self.fill();
        }
        self.drop_copy(id);
        let at = self.blocks.get(id).at;
        let place = |address: usize| (!(start..end).contains(&address)).then_some(address);
        let has_content = !matches!(self.blocks.get(id).state, State::Empty | State::Lost);
        if has_content && self.blocks.get(id).room.is_none() && !self.is_broken {
            let room = self.store.claim();
            self.rooms += usize::from(room.is_some());
            self.blocks.get_mut(id).room = room;
        }
        if !has_content || self.blocks.get(id).room.is_none() {
            // Its pages stay in place for good.
            return self.dissolve(id, place);
        }
        if let State::Writing(slot) | State::Back(slot) = self.blocks.get(id).state {
            for address in (at..at + BLOCK).step_by(PAGE_SIZE) {
                if let Some(to) = place(address) {
                    self.copy_in(to, self.slot(slot) + (address - at));
                }
            }
            self.writing = self.writing.filter(|writing| writing.id != id);
            self.leave(slot);
            self.take_apart(id);
        } else if self.blocks.get(id).state == State::Resident {
            self.policy.went(id);
            self.take_apart(id);
        }
        let gone = (start - at) / PAGE_SIZE..(end - at) / PAGE_SIZE;
        self.forget_singles(id, gone.clone());
        let block = self.blocks.get_mut(id);
        gone.clone().for_each(|page| block.set_zero(page, true));
        let holes = block.holes.get_or_insert_default();
        gone.for_each(|page| holes[page / 64] |= 1 << (page % 64));
        if holes.iter().all(|pages| *pages == u64::MAX) {
            self.forget(id);
        }
    }

    /// Dissolves the blocks into whose holes memory moves. Other pages of such a block may be among
    /// that memory.
    fn fill_holes(&mut self, from: usize, to: usize, bytes: usize) {
        for edge in [to, to + bytes - 1] {
            let has_holes = |id: &u32| self.blocks.get(*id).holes.is_some();
            if let Some(id) = self.blocks.at(edge).filter(has_holes) {
                self.dissolve(id, |address| match (from..from + bytes).contains(&address) {
                    true => Some(address - from + to),
                    false => (!(to..to + bytes).contains(&address)).then_some(address),
                });
            }
        }
    }

    /// Makes a block whole again whose holes have all been mapped anew.
    fn close_holes(&mut self, id: u32) {
        if let Some(holes) = self.blocks.get_mut(id).holes.take() {
            self.find_singles(id, |page| holes[page / 64] >> (page % 64) & 1 != 0);
        }
    }

    /// Turns a block that is in place into single pages.
    fn take_apart(&mut self, id: u32) {
        let block = self.blocks.get_mut(id);
        block.state = State::Stored;
        block.zeros = [u64::MAX; BLOCK_PAGES / 64];
        self.find_singles(id, |_| true);
    }

    /// Notes which of these pages of a block are in place. The store has none of them. So each is
    /// marked as zeros: if it is not in place after all, it has no content.
    fn find_singles(&mut self, id: u32, is_asked: impl Fn(usize) -> bool) {
        let Work { kernel, blocks, singles, singles_there, .. } = self;
        let block = blocks.get_mut(id);
        let at = block.at;
        let _ = kernel.populated(at, at + BLOCK, |start, end| {
            for page in (start - at) / PAGE_SIZE..(end - at) / PAGE_SIZE {
                let is_ending =
                    block.ending.as_ref().is_some_and(|ending| ending[page / 64] >> (page % 64) & 1 != 0);
                if is_asked(page) && !is_ending && !block.is_there(page) {
                    block.there[page / 64] |= 1 << (page % 64);
                    *singles_there += 1;
                    singles.push_back((id, page as u32));
                }
            }
        });
    }

    fn forget_all(&mut self, start: usize, end: usize) {
        self.forget_span(start, end);
        self.cut(start, end, None);
        while let Some(id) = self.blocks.first_in(start, end) {
            self.forget(id);
        }
    }

    /// Dissolves the blocks that have pages both inside `start..end` and outside of it. The pages
    /// inside have moved to `moved_to`, or are gone if that is `None`. All pages that are left are
    /// brought into memory, at the addresses that they now have.
    pub(super) fn cut(&mut self, start: usize, end: usize, moved_to: Option<usize>) {
        for edge in [start, end] {
            let Some(id) = self.blocks.at(edge) else { continue };
            let at = self.blocks.get(id).at;
            if at == edge || (start <= at && at + BLOCK <= end) {
                continue;
            }
            self.dissolve(id, |address| match (start..end).contains(&address) {
                true => moved_to.map(|to| address - start + to),
                false => Some(address),
            });
        }
    }

    pub(super) fn dissolve(&mut self, id: u32, place: impl Fn(usize) -> Option<usize>) {
        while matches!(self.blocks.get(id).state, State::Filling(_)) && self.filling.is_some() {
            self.fill();
        }
        let at = self.blocks.get(id).at;
        let was = self.blocks.get(id).clone();
        let place = |address: usize| {
            let is_hole = was.is_hole((address - at) / PAGE_SIZE);
            if is_hole { None } else { place(address) }
        };
        let slot = match self.blocks.get(id).state {
            State::Writing(slot) | State::Ready(slot) | State::Back(slot) => Some(slot),
            State::Stored => {
                let slot = self.frame();
                if self.read(id, slot, 0, BLOCK_PAGES) {
                    Some(slot)
                } else {
                    self.lose(id, slot, place);
                    None
                }
            }
            _ => None,
        };
        if let Some(slot) = slot {
            for offset in (0..BLOCK).step_by(PAGE_SIZE) {
                if let Some(to) = place(at + offset) {
                    self.copy_in(to, self.slot(slot) + offset);
                }
            }
            self.writing = self.writing.filter(|writing| writing.id != id);
            self.leave(slot);
            self.blocks.get_mut(id).state = State::Resident;
        } else if self.blocks.get(id).state == State::Resident {
            self.policy.went(id);
        }
        self.release_room(id);
        self.forget_singles(id, 0..BLOCK_PAGES);
        self.blocks.remove(id);
    }

    /// Removes a block that is no longer mapped.
    pub(super) fn forget(&mut self, id: u32) {
        match self.blocks.get(id).state {
            State::Writing(slot) | State::Filling(slot) | State::Ready(slot) | State::Back(slot) => {
                self.writing = self.writing.filter(|writing| writing.id != id);
                self.filling = self.filling.filter(|filling| filling.id != id);
                self.leave(slot);
            }
            State::Resident => self.policy.went(id),
            State::Empty | State::Stored | State::Lost => {}
        }
        self.release_room(id);
        self.forget_singles(id, 0..BLOCK_PAGES);
        self.blocks.remove(id);
    }

    /// Handles the event that the program drops the content of `start..end`. The range reads as
    /// zeros from now on.
    pub(super) fn removed(&mut self, start: usize, end: usize) {
        let mut from = start;
        while let Some(id) = self.blocks.first_in(from, end) {
            let at = self.blocks.get(id).at;
            let pages = (start.max(at) - at) / PAGE_SIZE..(end.min(at + BLOCK) - at) / PAGE_SIZE;
            from = at + BLOCK;
            self.removed_in(id, pages);
            if from >= end {
                break;
            }
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
            State::Stored if is_whole && self.blocks.get(id).holes.is_none() => {
                self.release_room(id);
                self.blocks.get_mut(id).state = State::Empty;
            }
            State::Stored => pages.for_each(|page| self.blocks.get_mut(id).set_zero(page, true)),
            State::Writing(slot) | State::Ready(slot) | State::Filling(slot) | State::Back(slot) => {
                let at = self.slot(slot) + pages.start * PAGE_SIZE;
                self.kernel.pages_mut(at, pages.len()).as_flattened_mut().fill(0);
                if let Some(writing) = self.writing.as_mut().filter(|writing| writing.id == id) {
                    // The pages that were already written to the store are older than this change.
                    // So write the block from the beginning.
                    writing.next = 0;
                    if self.store.settle().is_err() {
                        self.fail();
                    }
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
    /// call. Notes no memory that the pager does not manage: the kernel does not say when that
    /// goes, and new memory may come there.
    pub(super) fn note_left_out(&mut self) {
        let [start, end] = self.shared.inherit.each_ref();
        // A thread has written the end last.
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
    /// all managed memory was the opposite.
    pub(super) fn leave_out(&mut self) {
        for (&start, &end) in &self.left_out {
            let _ = self.kernel.advise(start, end - start, Advice::LinuxDontFork);
        }
    }

    /// Whether the program has left the whole block at this address out of its forks.
    pub(super) fn is_left_out(&self, block: usize) -> bool {
        let before = self.left_out.range(..=block).next_back();
        before.is_some_and(|(_, &end)| block + BLOCK <= end)
    }

    /// Looks for new memory if the size of the address space has changed since the last look. Then
    /// counts the memory that is not managed.
    pub(super) fn look_if_changed(&mut self) {
        self.looked = self.kernel.now();
        let mapped = self.kernel.size().mapped;
        if mapped != self.seen {
            if self.look().is_err() {
                return;
            }
            self.seen = mapped;
        }
        if self.scope == Scope::Process {
            self.beside = self.kernel.size().anonymous.saturating_sub(self.managed());
        }
    }

    pub(super) fn look(&mut self) -> Result<(), Changed> {
        if self.scope != Scope::Process {
            return Ok(());
        }
        if !self.kernel.read_mappings(&mut self.mappings) {
            return Ok(());
        }
        for at in 0..self.mappings.len() {
            let Mapping { start, end, is_plain } = self.mappings[at];
            if !is_plain {
                continue;
            }
            let mut from = start;
            while from < end {
                let known = self.known(from, end);
                let to = known.map_or(end, |(start, _)| start.max(from));
                let is_next = self.spans.range(..from).next_back().is_some_and(|(_, &end)| end == from);
                // When a registered mapping grows, its new part is registered too, and no child
                // inherits it until the pager changes that for a fork (`MADV_DOFORK`). So the pager
                // manages the new part, however small it is.
                let is_same = is_next && from > start || to < end && self.spans.contains_key(&to);
                let has_block = from.next_multiple_of(BLOCK) + BLOCK <= to;
                if to > from && (is_same || has_block || is_next && to - from >= BLOCK) {
                    self.adopt(from, to)?;
                }
                from = known.map_or(end, |(_, end)| end);
            }
        }
        Ok(())
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

    /// Registers and manages `start..end` too, unless the address space changed meanwhile.
    pub(super) fn adopt(&mut self, start: usize, end: usize) -> Result<(), Changed> {
        if self.kernel.register(start, end).is_err() {
            return Ok(());
        }
        // From here on the kernel sends an event for each change of the range. But the list of
        // mappings was read before. It may lack a later change, or show a change whose event is not
        // handled yet. New blocks could then cover a hole, or overlap blocks that the event brings.
        // So check that nothing has changed.
        if self.scope == Scope::Process && !self.is_one_mapping(start, end) {
            return Err(Changed);
        }
        self.hear();
        if self.has_changed() || self.kernel.is_changing() {
            return Err(Changed);
        }
        let advice = if self.is_held() { Advice::LinuxDoFork } else { Advice::LinuxDontFork };
        let _ = self.kernel.advise(start, end - start, advice);
        self.add_span(start, end);
        // Some pages may have been touched before the registration.
        self.record(start, end);
        Ok(())
    }

    /// Makes a record of each block that has a byte in `start..end` and has pages in place, if
    /// there is no record yet. Only a block with a record can be moved out. A block at an end of
    /// the range may also have pages of its span that lie outside of the range.
    fn record(&mut self, start: usize, end: usize) {
        let Some((&first, &last)) = self.spans.range(..=start).next_back() else { return };
        let (from, to) = (first.max(start / BLOCK * BLOCK), last.min(end.next_multiple_of(BLOCK)));
        let mut next = from;
        while next < to
            && let Some(id) = self.blocks.first_in(next, to)
        {
            let at = self.blocks.get(id).at;
            if first <= at && at + BLOCK <= last {
                self.close_holes(id);
            }
            next = at + BLOCK;
        }
        let Work { kernel, blocks, policy, .. } = self;
        let _ = kernel.populated(from, to, |begin, end| {
            let mut at = begin / BLOCK * BLOCK;
            while at < end {
                if at >= first && at + BLOCK <= last && blocks.first_in(at, at + BLOCK).is_none() {
                    policy.came(blocks.add(at, State::Resident));
                }
                at += BLOCK;
            }
        });
    }

    /// Whether the range is part of one plain mapping. The kernel never merges memory that is
    /// registered with userfaultfd with other memory.
    fn is_one_mapping(&mut self, start: usize, end: usize) -> bool {
        let covers = |mapping: Mapping| mapping.is_plain && mapping.start <= start && end <= mapping.end;
        let mut mappings = std::mem::take(&mut self.mappings_of_now);
        let is_one = self.kernel.read_mappings(&mut mappings) && mappings.iter().copied().any(covers);
        self.mappings_of_now = mappings;
        is_one
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::pager::simulator::{Machine, Simulated, address, work_at_rest};

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
            while work.writing.is_some() {
                work.write();
            }
            id
        });
        assert_eq!(ids.map(|id| work.blocks.get(id).state), [State::Stored; 2]);
        let [start, end] = work.shared.inherit.each_ref();
        start.store(address(first), Ordering::Relaxed);
        end.store(address(first) + BLOCK, Ordering::Relaxed);
        work.shared.holds.store(1, Ordering::SeqCst);
        let bell = work.shared.bells.base;
        work.fault(bell).unwrap();
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
        work.fault(bell).unwrap();
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
        while work.writing.is_some() {
            work.write();
        }
        order::add(&mut work.left_out, address(first)..address(first) + BLOCK);
        work.shared.stop.store(true, Ordering::SeqCst);
        work.shared.holds.store(1, Ordering::SeqCst);
        let bell = work.shared.bells.base;
        work.fault(bell).unwrap();
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
        // The kernel sends a second event for each move: it unmaps the old place. Here both of
        // these come after the second move.
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
        assert_eq!((work.frames(), work.singles_there, work.rooms), (1, 100, 1), "it counts");
        while work.write_singles() {}
        assert_eq!((work.frames(), work.singles_there), (0, 0));
        assert!((first..hole).all(|page| !work.kernel.world.is_something(page)), "all of it is out");
        work.kernel.world.map(hole, end);
        work.kernel.register(address(hole), address(end)).unwrap();
        work.adopt(address(hole), address(end)).unwrap();
        assert!(work.blocks.get(id).holes.is_none());
        work.bring(id).unwrap();
        for page in first..end {
            assert_eq!(work.kernel.world.word(page), if page < hole { page as u64 } else { 0 });
        }
        work.apply(Event::Unmap(address(first), address(hole)));
        work.apply(Event::Unmap(address(hole), address(end)));
        assert_eq!((work.blocks.len(), work.rooms), (0, 0), "nothing is left of it");
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
        work.apply(Event::Remap(home, away, 5 * PAGE_SIZE));
        assert_eq!((work.blocks.len(), work.policy.len()), (0, 0), "it has a hole");
        work.apply(Event::Remap(away, home, 5 * PAGE_SIZE));
        assert_eq!(work.blocks.at(home).map(|id| work.blocks.get(id).state), Some(State::Resident));
        assert_eq!(work.policy.len(), 1);
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
