//! Claims a free slot for a write.

use super::count::count;
use super::{Lane, StoreLane};
use crate::Tier;
use crate::records::EXTENT_SLOTS;
use std::time::{Duration, Instant};
use weir_core::{PageNo, Slot};
use weir_store::{Fault, State};

/// Number of freed slots that a lane keeps in a list, to use them again while their memory is still
/// in the cache.
pub(crate) const HINTS: usize = 64;
/// Least number of pages written together for which slots side by side pay off. A copy engine and
/// long reads handle neighbours at once.
pub(super) const LONG: usize = 16;
/// Lengths of runs of free slots: the longest that a lane reserves, the one at which a search
/// stops, and the shortest that is better than single slots.
const RUN_MAX: u32 = 256;
const RUN_FINE: u32 = 64;
const RUN_LEAST: usize = 8;
/// Longest time that a write waits for a slot that other lanes are about to free, before it fails.
pub(crate) const SLOT_WAIT: Duration = Duration::from_secs(2);

/// A lane's wait for a slot. Each poll gives it the present time.
#[derive(Debug, Default)]
pub(super) struct SlotWait {
    phase: Phase,
    /// Whether a write has found no slot since the last poll.
    asked: bool,
}

#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
enum Phase {
    /// No write waits for a slot.
    #[default]
    Idle,
    /// A write waits, at most until this time.
    Until(Instant),
    /// A write has waited as long as it may, and fails if it finds no slot now.
    Due(Instant),
    /// A write has waited in vain, and has failed. Until this time, another write of the batch that
    /// finds no slot fails at the first poll, without a wait of its own.
    Refused(Instant),
    /// The next write that finds no slot fails without a wait.
    Refuses(Instant),
}

impl SlotWait {
    #[inline]
    pub(super) fn is_idle(&self) -> bool {
        self.phase == Phase::Idle && !self.asked
    }

    /// Records that a write has found no slot. The write waits for one, or fails if its time is
    /// over.
    fn ask(&mut self) {
        match self.phase {
            Phase::Due(until) | Phase::Refuses(until) => self.phase = Phase::Refused(until),
            _ => self.asked = true,
        }
    }

    /// Ends the wait: the write has found a slot, or its owner has given it up.
    pub(super) fn end(&mut self) {
        self.asked = false;
        self.phase = match self.phase {
            Phase::Until(_) | Phase::Due(_) => Phase::Idle,
            // This write was refused. The next write that finds no slot may come an hour later, and
            // must not fail at once. In `Refused` that write first waits for a poll, which knows
            // the time.
            Phase::Refuses(until) => Phase::Refused(until),
            phase => phase,
        };
    }

    fn tick(&mut self, now: Instant) {
        let asked = std::mem::take(&mut self.asked);
        let waits = || if asked { Phase::Until(now + SLOT_WAIT) } else { Phase::Idle };
        self.phase = match self.phase {
            Phase::Idle => waits(),
            Phase::Until(end) if now < end => self.phase,
            // If no write has asked for a slot long after the end of the wait, the lane's owner has
            // given up the write that waited.
            Phase::Until(end) if asked || now < end + SLOT_WAIT => Phase::Due(now + SLOT_WAIT),
            Phase::Refused(until) if asked && now < until => Phase::Refuses(until),
            Phase::Due(until) | Phase::Refuses(until) | Phase::Refused(until) if now < until => self.phase,
            Phase::Until(_) | Phase::Due(_) | Phase::Refuses(_) | Phase::Refused(_) => waits(),
        };
    }
}

/// The last [`HINTS`] slots that this lane freed, oldest first.
pub(super) struct Hints {
    pub(super) slots: [Slot; HINTS],
    pub(super) first: usize,
    pub(super) len: usize,
}

impl Lane {
    /// Claims a free slot in the first store that takes pages and has one. If no slot is free,
    /// other lanes will free some soon: the pool has a slot for each page, and every lane's pin
    /// ends. So the lane [waits](Lane::waits_for_slot) from the next poll on, unless it holds slots
    /// itself that other lanes wait for.
    pub(super) fn claim(&mut self, page: PageNo) -> Option<(usize, Slot)> {
        // A lane must be pinned when it claims a slot. A worker that closes a chunk then waits for
        // the pins of all lanes, since a pinned lane may still claim slots of the chunk. A poll
        // that sends a pack may come here without a pin.
        if !self.looking.is_pinned() {
            self.enter();
        }
        if let Some(found) = self.claim_now(page) {
            return Some(found);
        }
        // The epoch in `safe` may be out of date, or was never read. So read the present one, and
        // try again.
        self.refresh_safe();
        if let Some(found) = self.claim_now(page) {
            return Some(found);
        }
        // If every store is lost, no wait brings one back. A promotion does not wait either: its
        // page can stay in its present slot.
        let any_left = self.pool.tiers.iter().any(|tier| !tier.is_lost());
        if !self.holds_slots() && any_left && self.reach == self.stores.len() {
            if self.slot_wait.phase == Phase::Idle && !self.slot_wait.asked {
                count(&self.metrics().waits);
            }
            self.slot_wait.ask();
        }
        None
    }

    /// Whether a write has found no slot and will be tried again after the next poll.
    pub(super) fn waits_for_slot(&self) -> bool {
        self.slot_wait.asked || matches!(self.slot_wait.phase, Phase::Until(_))
    }

    /// Drops the wait: no write that waited for a slot is tried again.
    pub(crate) fn forget_slot_wait(&mut self) {
        self.slot_wait.end();
    }

    /// Continues a write's wait for a slot. Frees slots in quarantine, slots of dropped lanes, and
    /// slots whose late writes have settled.
    #[cold]
    pub(super) fn wait_for_slot(&mut self, now: Instant) {
        self.slot_wait.tick(now);
        self.pool.end_quarantines();
        self.pool.step_closing(now);
        if self.unsettled > 0 {
            self.settle_idle(now);
        }
    }

    /// Whether this lane has slots that are neither free nor published: a poll must free or publish
    /// them.
    pub(super) fn holds_slots(&self) -> bool {
        self.under_way > 0 || !self.finished.is_empty() || !self.overtaken.is_empty()
    }

    /// Upper bound of the slots that this lane keeps neither free nor published.
    fn slots_held(&self) -> usize {
        self.under_way + self.finished.len() + self.unsettled
    }

    /// Claims a slot without waiting. Slots of draining members come last. They are not left out,
    /// since the volume's promised size includes them. Members that are lost or unreachable are
    /// skipped.
    pub(super) fn claim_now(&mut self, page: PageNo) -> Option<(usize, Slot)> {
        self.claims_since_safe += 1;
        let mut found = self.claim_in(page, State::Online);
        if found.is_none() && self.reach == self.stores.len() {
            found = self.claim_in(page, State::Draining);
        }
        if found.is_some() && !self.slot_wait.is_idle() {
            self.slot_wait.end();
        }
        found
    }

    #[inline]
    fn claim_in(&mut self, page: PageNo, state: State) -> Option<(usize, Slot)> {
        for at in 0..self.reach {
            let tier = &self.pool.tiers[at];
            if !tier.has_member(state) {
                continue;
            }
            if tier.is_quarantined() && self.slots_held() >= self.pool.share_in_quarantine() as usize {
                continue;
            }
            if self.claims_since_safe > HINTS as u32 / 2 && self.stores[at].hints.len > 0 {
                self.refresh_safe();
            }
            if self.long > 0
                && let Some(slot) = self.claim_in_run(at, page, state)
            {
                self.taker = at;
                return Some((at, slot));
            }
            let tier = &self.pool.tiers[at];
            let may = |extent| tier.lies_on(extent, state);
            let store = &mut self.stores[at];
            while let Some(slot) = store.hints.first() {
                let may_be_used = may(slot.0 / EXTENT_SLOTS);
                if may_be_used && tier.records.try_claim(slot, page, self.safe) {
                    store.hints.pop();
                    self.taker = at;
                    return Some((at, slot));
                }
                if may_be_used && tier.records.waits_for_epoch(slot) {
                    break;
                }
                // The slot of this hint is taken, its chunk is closed, or its member takes no pages
                // now. Drop the hint, and try the next.
                store.hints.pop();
            }
            if let Some(slot) = tier.records.claim(&mut store.cursor, page, self.safe, may) {
                self.taker = at;
                return Some((at, slot));
            }
        }
        None
    }

    /// Claims the next slot of the run that this lane writes into, or the first slot of a new run.
    fn claim_in_run(&mut self, at: usize, page: PageNo, state: State) -> Option<Slot> {
        if self.stores[at].run.is_empty() {
            if self.barren {
                return None;
            }
            self.refresh_safe();
            let tier = &self.pool.tiers[at];
            let StoreLane { run, run_cursor, .. } = &mut self.stores[at];
            let may = |extent| tier.lies_on(extent, state);
            *run = tier.records.find_run(run_cursor, RUN_FINE, RUN_MAX, self.safe, may);
            self.barren = run.len() < RUN_LEAST;
            if self.barren {
                *run = 0..0;
            }
        }
        let slot = Slot(self.stores[at].run.next()?);
        let tier = &self.pool.tiers[at];
        if tier.lies_on(slot.0 / EXTENT_SLOTS, state) && tier.records.try_claim(slot, page, self.safe) {
            self.long -= 1;
            return Some(slot);
        }
        // Another lane took the slot, or the slot's member takes no more pages. So give up the run.
        self.stores[at].run = 0..0;
        None
    }

    /// Claims `slot` for `page`, if it is the next of the run that this lane writes into.
    pub(super) fn claim_neighbour(&mut self, at: usize, slot: Slot, page: PageNo) -> bool {
        let run = &self.stores[at].run;
        let is_next = run.start == slot.0 && !run.is_empty();
        self.long > 0 && is_next && self.claim_in_run(at, page, State::Online).is_some()
    }

    /// The fault of a write that finds no slot. The volume promises a slot for each page. So the
    /// reason is a store that is lost, or a disk that hangs and keeps slots. A worker that moves
    /// pages gets [`Fault::Full`] if a disk hangs, because its page can stay in its slot.
    pub(super) fn no_slot(&self) -> Fault {
        let tiers = &self.pool.tiers;
        let is_worker = self.parts.iter().any(|part| part.patch.is_empty());
        let is_late = |tier: &Tier| tier.is_quarantined() || tier.has_member(State::Unreachable);
        if tiers.iter().any(|tier| tier.has_member(State::Lost)) {
            Fault::Lost
        } else if !is_worker && (self.unsettled > 0 || tiers.iter().any(is_late)) {
            Fault::Timeout
        } else {
            Fault::Full
        }
    }

    fn refresh_safe(&mut self) {
        self.safe = self.pool.epochs.safe();
        self.claims_since_safe = 0;
    }
}

impl Hints {
    pub(super) fn first(&self) -> Option<Slot> {
        (self.len > 0).then(|| self.slots[self.first])
    }

    pub(super) fn pop(&mut self) {
        self.first = (self.first + 1) % HINTS;
        self.len -= 1;
    }

    /// Remembers a freed slot. If there are too many, the oldest is forgotten; a search still finds
    /// it.
    pub(super) fn push(&mut self, slot: Slot) {
        if self.len == HINTS {
            self.pop();
        }
        self.slots[(self.first + self.len) % HINTS] = slot;
        self.len += 1;
    }
}

#[cfg(all(test, not(loom)))]
mod tests {
    use super::SLOT_WAIT;
    use crate::entry::{Entry, Place};
    use crate::records::{EXTENT_SLOTS, Occupant};
    use crate::{Awaited, Config, Step, Task, Volume};
    use std::sync::Arc;
    use std::time::{Duration, Instant};
    use weir_core::{ByteSize, Checksum, PAGE_SIZE, PageBytes, PageNo, Slot};
    use weir_store::{Fault, Host, Progress, Sim, SimUrl, Store};

    #[test]
    fn a_lane_that_claims_a_slot_is_pinned() {
        let config = Config { pages: 64, lanes: 1, depth: 4 };
        let store = Arc::new(Host::new(config.slots()).expect("memory"));
        let volume = Volume::create(config, vec![store]).expect("a volume");
        let mut lane = volume.lane().expect("a lane");
        assert!(!lane.looking.is_pinned());
        assert!(lane.claim(PageNo(3)).is_some());
        assert!(lane.looking.is_pinned(), "who empties the slot's chunk would not wait for it");
        lane.leave();
        assert!(!lane.looking.is_pinned());
    }

    #[test]
    fn a_page_whose_slot_was_claimed_just_before_its_chunk_was_closed_is_moved_before_the_chunk_goes() {
        let config = Config { pages: 64, lanes: 3, depth: 4 };
        let store = || {
            let size = ByteSize(u64::from(2 * EXTENT_SLOTS) * PAGE_SIZE as u64);
            let chunk = Some(ByteSize(u64::from(EXTENT_SLOTS) * PAGE_SIZE as u64));
            Arc::new(Sim::open(SimUrl { size, chunk, ..SimUrl::default() }).expect("memory"))
        };
        let volume = Volume::create(config, vec![store()]).expect("a volume");
        let [mut late, mut reader] = [(); 2].map(|()| volume.lane().expect("a lane"));
        let mut worker = volume.mover().expect("a lane");
        let (page, slot, content) = (PageNo(3), Slot(77), unique());
        let records = &volume.tiers[0].records;
        // The lane does the first half of a claim, which finds a free slot. Then the slot's chunk
        // is closed.
        late.enter();
        let free = records.claimable(slot, volume.epochs.safe()).expect("a free slot");
        volume.begin_give_back(0, &[0]).expect("room elsewhere");
        worker.begin(Task::GiveBack { store: 0, chunk: 0 }).expect("a chunk");
        let now = Instant::now();
        for _ in 0..3 {
            let step = worker.step(now);
            assert!(
                matches!(step, Step::Waits(Awaited::Lanes, _)),
                "a lane is in the middle of a claim: {step:?}"
            );
        }
        // The lane does the second half of the claim, which takes the slot. Then it writes the
        // page.
        assert!(records.claim_if(slot, free, page));
        let entry = Entry::new(Place::Stored { store: 0, slot }, volume.map.load(page).next_generation());
        let checksum = Checksum::of(&content, page, entry.generation());
        records.fill_in(slot, Occupant { page, checksum });
        assert_eq!(late.stores[0].lane.write(0, slot, &content), Progress::Done(Ok(())));
        assert!(late.publish(page, entry, None));
        late.leave();
        let moved = loop {
            if let Step::Ended(result) = worker.step(now) {
                break result.expect("room elsewhere");
            }
        };
        assert_eq!(moved.pages, 1);
        let mut found = [0; PAGE_SIZE];
        assert_eq!(reader.read(0, page, &mut found), Progress::Done(Ok(())));
        assert!(found == content);
    }

    fn unique() -> PageBytes {
        std::array::from_fn(|at| ((at * 7) >> 3) as u8)
    }

    #[test]
    fn a_hint_that_cannot_be_had_gives_way_to_the_next() {
        let config = Config { pages: 64, lanes: 1, depth: 4 };
        let store = Arc::new(Host::new(3 * EXTENT_SLOTS).expect("memory"));
        let volume = Volume::create(config, vec![store]).expect("a volume");
        let mut lane = volume.lane().expect("a lane");
        let records = &volume.tiers[0].records;
        let (closed, taken, free) = (Slot(5), Slot(EXTENT_SLOTS + 5), Slot(2 * EXTENT_SLOTS + 77));
        assert!(records.try_claim(taken, PageNo(1), 1));
        records.close(0..1);
        for hint in [closed, taken, free] {
            lane.stores[0].hints.push(hint);
        }
        assert_eq!(lane.claim(PageNo(3)), Some((0, free)));
        assert_eq!(lane.stores[0].hints.len, 0);
    }

    #[test]
    fn a_hint_whose_epoch_has_not_passed_is_kept() {
        let config = Config { pages: 64, lanes: 2, depth: 4 };
        let store = Arc::new(Host::new(2 * EXTENT_SLOTS).expect("memory"));
        let volume = Volume::create(config, vec![store]).expect("a volume");
        let (mut lane, mut reader) = (volume.lane().expect("a lane"), volume.lane().expect("a lane"));
        reader.enter();
        let records = &volume.tiers[0].records;
        let slot = Slot(EXTENT_SLOTS + 77);
        assert!(records.try_claim(slot, PageNo(1), 1));
        records.retire(slot, || volume.epochs.now());
        lane.stores[0].hints.push(slot);
        assert_ne!(lane.claim(PageNo(3)), Some((0, slot)), "somebody may be looking at it");
        reader.leave();
        lane.leave();
        lane.refresh_safe();
        assert_eq!(lane.claim(PageNo(4)), Some((0, slot)));
    }

    /// Returns two lanes of one volume. The first holds back every slot that was freed, and the
    /// volume has no other free slot.
    fn held_back() -> (crate::Lane, crate::Lane) {
        let config = Config { pages: 64, lanes: 2, depth: 4 };
        let store = Arc::new(Host::new(config.slots()).expect("memory"));
        let volume = Volume::create(config, vec![store]).expect("a volume");
        let (mut holder, mut writer) = (volume.lane().expect("a lane"), volume.lane().expect("a lane"));
        holder.enter();
        for number in 0..config.slots() {
            assert_eq!(write(&mut writer, number), Progress::Done(Ok(())));
        }
        (holder, writer)
    }

    fn write(lane: &mut crate::Lane, number: u32) -> Progress {
        let mut page = unique();
        page[0] = number as u8;
        let written = lane.write(0, PageNo(number % 64), &page);
        lane.submit();
        written
    }

    fn poll(lane: &mut crate::Lane, now: Instant) {
        lane.poll(now, &mut |done| panic!("nothing is in flight: {done:?}"));
    }

    const FULL: Progress = Progress::Done(Err(Fault::Full));
    const SHORT: Duration = Duration::from_millis(1);

    #[test]
    fn a_write_that_finds_no_slot_fails_at_its_deadline_and_the_next_of_its_batch_at_once() {
        let (_holder, mut writer) = held_back();
        let begun = Instant::now();
        assert_eq!(write(&mut writer, 0), Progress::Full);
        assert!(writer.must_poll(), "nothing else tells its owner to poll");
        for now in [begun, begun + SHORT, begun + SLOT_WAIT - SHORT] {
            poll(&mut writer, now);
            assert_eq!(write(&mut writer, 0), Progress::Full);
        }
        poll(&mut writer, begun + SLOT_WAIT);
        assert_eq!(write(&mut writer, 0), FULL);
        for number in 1..10 {
            assert_eq!(write(&mut writer, number), Progress::Full, "the lane does not know the time");
            poll(&mut writer, begun + SLOT_WAIT + number * SHORT);
            assert_eq!(write(&mut writer, number), FULL);
        }
        assert_eq!(writer.volume().status().waits, 1);
    }

    #[test]
    fn long_after_a_write_was_refused_the_next_waits_as_long() {
        let (_holder, mut writer) = held_back();
        let mut now = Instant::now();
        for _ in 0..2 {
            assert_eq!(write(&mut writer, 0), Progress::Full);
            for wait in [Duration::ZERO, SLOT_WAIT - SHORT] {
                poll(&mut writer, now + wait);
                assert_eq!(write(&mut writer, 0), Progress::Full);
            }
            poll(&mut writer, now + SLOT_WAIT);
            assert_eq!(write(&mut writer, 0), FULL);
            now += 5 * SLOT_WAIT;
        }
    }

    #[test]
    fn a_batch_that_was_refused_and_then_served_makes_no_later_write_fail_at_once() {
        let (mut holder, mut writer) = held_back();
        let begun = Instant::now();
        assert_eq!(write(&mut writer, 0), Progress::Full);
        poll(&mut writer, begun);
        poll(&mut writer, begun + SLOT_WAIT);
        assert_eq!(write(&mut writer, 0), FULL);
        assert_eq!(write(&mut writer, 1), Progress::Full);
        poll(&mut writer, begun + SLOT_WAIT + SHORT);
        holder.leave();
        assert_eq!(write(&mut writer, 1), Progress::Done(Ok(())));
        // For a while nobody polls the writer's lane, because it has nothing under way. Then slots
        // are short again.
        holder.enter();
        let shortage = (0..u32::MAX).find_map(|number| match write(&mut writer, number) {
            Progress::Done(Ok(())) => None,
            short => Some(short),
        });
        assert_eq!(shortage, Some(Progress::Full), "it waits like any other");
        poll(&mut writer, begun + 100 * SLOT_WAIT);
        assert_eq!(write(&mut writer, 0), Progress::Full);
    }

    #[test]
    fn after_a_lane_was_turned_its_first_write_waits_though_one_for_the_volume_before_was_refused() {
        let (_holder, mut writer) = held_back();
        let (volume, begun) = (Arc::clone(writer.volume()), Instant::now());
        assert_eq!(write(&mut writer, 0), Progress::Full);
        poll(&mut writer, begun);
        poll(&mut writer, begun + SLOT_WAIT);
        assert_eq!(write(&mut writer, 0), FULL);
        writer.turn(None);
        assert!(!writer.must_poll());
        writer.turn(Some(&volume));
        for wait in [Duration::ZERO, SHORT, SLOT_WAIT - SHORT] {
            assert_eq!(write(&mut writer, 1), Progress::Full);
            poll(&mut writer, begun + SLOT_WAIT + SHORT + wait);
        }
        poll(&mut writer, begun + 2 * SLOT_WAIT + SHORT);
        assert_eq!(write(&mut writer, 1), FULL);
    }

    #[test]
    fn a_write_that_waits_has_the_first_slot_that_others_let_go() {
        let (mut holder, mut writer) = held_back();
        let begun = Instant::now();
        assert_eq!(write(&mut writer, 0), Progress::Full);
        poll(&mut writer, begun);
        assert_eq!(write(&mut writer, 0), Progress::Full);
        holder.leave();
        poll(&mut writer, begun + SLOT_WAIT - SHORT);
        assert_eq!(write(&mut writer, 0), Progress::Done(Ok(())));
        assert!(!writer.must_poll(), "nothing waits any more");
    }

    #[test]
    fn a_part_of_a_page_waits_for_a_slot_by_itself_and_no_longer_than_a_page() {
        let (_holder, mut writer) = held_back();
        let begun = Instant::now();
        assert_eq!(writer.write_part(7, PageNo(3), 9, &[1, 2, 3]), Progress::Queued);
        for now in [begun, begun + SLOT_WAIT - SHORT] {
            poll(&mut writer, now);
        }
        assert!(writer.must_poll());
        let mut ended = Vec::new();
        writer.poll(begun + SLOT_WAIT, &mut |done| ended.push((done.ticket, done.result)));
        assert_eq!(ended, [(7, Err(Fault::Full))]);
    }

    /// Writes 64 pages from `first` on together, as a server does for one long request.
    fn write_piece(lane: &mut crate::Lane, first: u32, generation: u32) {
        let mut pages = vec![[0; PAGE_SIZE]; 64];
        for (page, number) in pages.iter_mut().zip(first..) {
            page[..4].copy_from_slice(&number.to_le_bytes());
            page[4..8].copy_from_slice(&generation.to_le_bytes());
        }
        let done = lane.write_run(PageNo(first), &pages);
        for (page, number) in pages.iter().zip(first..).skip(done) {
            while lane.write(0, PageNo(number), page) == Progress::Full {
                lane.submit();
                lane.poll(Instant::now(), &mut |done| done.result.unwrap());
            }
        }
        lane.submit();
    }

    #[test]
    fn long_writes_over_long_writes_keep_pages_that_follow_one_another_side_by_side() {
        const PAGES: u32 = 8192;
        let config = Config { pages: PAGES, lanes: 3, depth: 256 };
        let slots = config.slots() + PAGES / 8;
        let size = ByteSize(u64::from(slots) * PAGE_SIZE as u64);
        let sim = || Arc::new(Sim::open(SimUrl { size, delay: 3, ..SimUrl::default() }).unwrap());
        let stores: [Arc<dyn Store>; 2] = [sim(), Arc::new(Host::new(slots).unwrap())];
        for store in stores {
            let volume = Volume::create(config, vec![store]).unwrap();
            let mut lanes = [(); 3].map(|()| volume.lane().unwrap());
            let mut dice = 7u64;
            for round in 0..600 {
                dice = dice.wrapping_mul(6364136223846793005).wrapping_add(1442695040888963407);
                let block = (dice >> 33) as u32 % (PAGES / 256);
                for piece in 0..4 {
                    write_piece(&mut lanes[round as usize % 3], block * 256 + piece * 64, round);
                }
            }
            for lane in &mut lanes {
                while lane.in_flight() > 0 {
                    lane.submit();
                    lane.poll(Instant::now(), &mut |done| done.result.unwrap());
                }
            }
            let slot = |page| match volume.map.load(PageNo(page)).place() {
                Place::Stored { slot, .. } => slot.0,
                _ => panic!("page {page} was written"),
            };
            let breaks = (1..PAGES).filter(|page| slot(*page) != slot(page - 1) + 1).count() as u32;
            assert!(breaks * 10 < PAGES, "{breaks} of {PAGES} pages do not lie behind the one before");
        }
    }
}
