//! The slot records of one store: the page in each slot, its checksum, and which slots are free.
//!
//! A record is one 64-bit word:
//!
//! ```text
//!  63  62                32 31                      0
//! +---+--------------------+-------------------------+
//! | 1 |  page (31 bits)    |  checksum               |   in use
//! +---+--------------------+-------------------------+
//! | 0 |  epoch in which it was retired, or 0         |   free
//! +---+--------------------------------------------- +
//! ```
//!
//! No volume has the last [`PACKS`] page numbers. A record with one of them stands for a
//! [pack](crate::pack). The number encodes two counts: the pages that the pack has room for, and
//! those of its pages that the map names. The
//! last page that leaves a pack frees its slot.
//!
//! The records are the free list as well. A compare-and-exchange on a slot's record claims the
//! slot, and the record of a retired slot has its epoch. So the free list takes no more memory, and
//! only counts must be rebuilt after a crash. No slot waits for a sleeping thread. To find free
//! slots without a long search, slots are counted by extents of [`EXTENT_SLOTS`].

use crate::lend::Lent;
use crate::pack::MEMBERS_MAX;
use crate::ranges::{PACKS, PAGES_MAX};
use crate::sync::others_may_run_within_a_claim;
use std::sync::OnceLock;
use std::sync::atomic::{AtomicBool, AtomicU16, AtomicU64, Ordering};
use weir_core::{Checksum, Memory, PageNo, Slot};

/// Slots of an extent, which are counted together: 4 MiB of pages, 8 KiB of records.
pub(crate) const EXTENT_SLOTS: u32 = 1024;
/// Largest number of records, and of extents, that one search for a run of free slots looks at.
const LOOKS_MAX: u32 = 8192;
const EXTENTS_MAX: u32 = 256;
// A pack's record has one of the [`PACKS`] reserved page numbers in place of a page's number. That
// number encodes two values: the pack's room, and its count of pages. So there must be a number for
// each possible pair of these values.
const _: () = assert!(PACKS == 64 * PACK_COUNTS);
/// Number of values that a pack's count of pages can have, 0 included.
const PACK_COUNTS: u32 = 128;
/// Added to a pack's count of pages until all its pages are published. So the count cannot reach 0
/// before that, and other lanes see that the pack is not yet published.
const UNPUBLISHED: u32 = 64;
/// The value that one page adds to a record's count of pages.
const ONE_PAGE: u64 = 1 << 32;

const IN_USE: u64 = 1 << 63;
const PAGE_MASK: u32 = (1 << 31) - 1;
/// The bit in an extent's count of free slots that forbids lanes to claim the extent's slots,
/// because its chunk is being given back.
const CLOSED: u16 = 1 << 15;
// Lanes count a slot as free before they free the slot. Even then an extent's count must not reach
// the bit `CLOSED`.
const _: () = assert!(EXTENT_SLOTS < CLOSED as u32 / 2);

/// The content of a slot in use, as its record tells.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) struct Occupant {
    pub page: PageNo,
    pub checksum: Checksum,
}

impl Occupant {
    /// A pack with room for `room` pages, of which the map names `pages`.
    pub fn pack(pages: u32, room: u32, checksum: Checksum) -> Self {
        debug_assert!(pages < PACK_COUNTS && room < PACKS / PACK_COUNTS);
        Occupant { page: PageNo(PAGES_MAX + room * PACK_COUNTS + pages), checksum }
    }

    /// A pack of `pages` pages that the map is about to name; see [`Records::published`].
    pub fn unpublished_pack(pages: u32, room: u32, checksum: Checksum) -> Self {
        Self::pack(pages + UNPUBLISHED, room, checksum)
    }

    /// The number of a pack's pages that the map names, and the number for which there is room.
    /// `None` if the slot has no pack, or its pack is not yet published.
    #[inline]
    pub fn fill(self) -> Option<(u32, u32)> {
        let of_pack = self.page.0.checked_sub(PAGES_MAX)?;
        let (room, pages) = (of_pack / PACK_COUNTS, of_pack % PACK_COUNTS);
        (pages < UNPUBLISHED).then_some((pages, room.max(pages)))
    }

    /// Whether the slot holds a pack.
    #[inline]
    pub fn is_pack(self) -> bool {
        self.page.0 >= PAGES_MAX
    }
}

/// The outcome of [`Records::retire`].
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) struct Retired {
    /// Whether the slot is free now.
    pub freed: bool,
    /// Whether the slot holds, or held, a pack.
    pub pack: bool,
}

/// The records of one store.
#[derive(Debug)]
pub(crate) struct Records {
    memory: Memory,
    slots: u32,
    /// For each extent the number of its free slots, and the bit [`CLOSED`]. The number is never
    /// too low: it rises before a slot is freed, and falls after a slot was claimed.
    extents: Box<[AtomicU16]>,
    /// For each slot its number of borrowers, once slots can be lent.
    lent: OnceLock<Lent>,
    /// Whether the store has packs, or can get some. Without packs no search looks for them.
    packs: AtomicBool,
}

/// The slot at which a lane's next search begins. Each lane has its own, so that two lanes seldom
/// try to claim the same slot.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Cursor(u32);

impl Records {
    /// Bytes of the records of `slots` slots, with the words of `chunks` chunks behind them.
    pub fn bytes(slots: u32, chunks: u32) -> usize {
        (slots as usize + chunks as usize) * 8
    }

    /// Records for `slots` slots, all free, and words for `chunks` chunks, all 0.
    pub fn new(slots: u32, chunks: u32) -> std::io::Result<Self> {
        let memory = Memory::shared("weir-records", Self::bytes(slots, chunks))?;
        let mut records = Self::over(memory, slots);
        records.count();
        Ok(records)
    }

    /// Takes over records that another process left; [`Records::keep_only`] must follow.
    pub fn over(memory: Memory, slots: u32) -> Self {
        assert!(memory.len() >= slots as usize * 8, "records cover every slot");
        let extents = (0..slots.div_ceil(EXTENT_SLOTS)).map(|_| AtomicU16::new(0)).collect();
        Records { memory, slots, extents, lent: OnceLock::new(), packs: AtomicBool::new(false) }
    }

    /// Frees every slot for which `referenced` is false, and counts the free slots anew. No other
    /// thread may be using the records.
    pub fn keep_only(&mut self, referenced: impl Fn(Slot) -> bool) {
        for slot in (0..self.slots).map(Slot) {
            if !referenced(slot) {
                self.record(slot).store(0, Ordering::Relaxed);
            }
        }
        self.count();
    }

    /// The slots in use for which `referenced` is false. A write to each was under way when the
    /// daemon that left the records died.
    pub fn claimed(&self, referenced: impl Fn(Slot) -> bool) -> Vec<Slot> {
        (0..self.slots)
            .map(Slot)
            .filter(|slot| self.occupant(*slot).is_some() && !referenced(*slot))
            .collect()
    }

    fn count(&mut self) {
        for extent in 0..self.extents.len() as u32 {
            let free = self
                .range(extent)
                .filter(|&slot| self.record(Slot(slot)).load(Ordering::Relaxed) & IN_USE == 0);
            self.extents[extent as usize].store(free.count() as u16, Ordering::Relaxed);
        }
    }

    /// The slots of an extent.
    fn range(&self, extent: u32) -> std::ops::Range<u32> {
        let first = extent * EXTENT_SLOTS;
        first..first.saturating_add(EXTENT_SLOTS).min(self.slots)
    }

    #[inline]
    fn record(&self, slot: Slot) -> &AtomicU64 {
        assert!(slot.0 < self.slots, "slot {} of {}", slot.0, self.slots);
        // SAFETY: the pointer is inside the mapping (checked above) and aligned (8-byte steps from
        // a page boundary). The word is only ever accessed as an atomic, in this process and in the
        // keeper that holds the memfd.
        unsafe { &*self.memory.as_ptr().cast::<AtomicU64>().add(slot.0 as usize) }
    }

    /// The word with a chunk's state, which is stored behind the records.
    pub fn chunk_word(&self, chunk: u32) -> &AtomicU64 {
        let at = self.slots as usize + chunk as usize;
        assert!((at + 1) * 8 <= self.memory.len(), "there is a word for each chunk");
        // SAFETY: the pointer is inside the mapping (checked above) and aligned. The word is only
        // ever accessed as an atomic.
        unsafe { &*self.memory.as_ptr().cast::<AtomicU64>().add(at) }
    }

    pub fn slots(&self) -> u32 {
        self.slots
    }

    pub fn memory(&self) -> &Memory {
        &self.memory
    }

    /// Bytes of memory of the extents' counts, besides the records themselves.
    pub fn overhead_bytes(&self) -> usize {
        size_of_val(&*self.extents)
    }

    /// The slot at which the search of lane `lane` starts. The starts of `lanes` lanes are spread
    /// over the store.
    pub fn cursor(&self, lane: usize, lanes: usize) -> Cursor {
        let extent = self.extents.len() * (lane % lanes.max(1)) / lanes.max(1);
        Cursor(extent as u32 * EXTENT_SLOTS)
    }

    /// Number of free slots, with the retired ones that wait for their epoch; exact while nothing
    /// changes.
    pub fn free(&self) -> u32 {
        self.free_in(0..self.extents.len() as u32)
    }

    /// Number of free slots in open extents for which `may` is true.
    pub fn open_free(&self, may: impl Fn(u32) -> bool) -> u32 {
        let counts = (0..).zip(&self.extents).map(|(extent, free)| (extent, free.load(Ordering::Relaxed)));
        counts
            .filter(|&(extent, free)| free & CLOSED == 0 && may(extent))
            .map(|(_, free)| u32::from(free))
            .sum()
    }

    /// Number of [free](Records::free) slots in these extents.
    pub fn free_in(&self, extents: std::ops::Range<u32>) -> u32 {
        let extents = &self.extents[extents.start as usize..extents.end as usize];
        extents.iter().map(|extent| u32::from(extent.load(Ordering::Relaxed) & !CLOSED)).sum()
    }

    /// Claims a free slot for `page` in an extent for which `may` is true. The search goes from
    /// `cursor` on, around the whole store. `safe` is a past result of
    /// [`Epochs::safe`](crate::epoch::Epochs::safe). `None`: no such slot was retired before that
    /// epoch.
    pub fn claim(
        &self,
        cursor: &mut Cursor,
        page: PageNo,
        safe: u64,
        may: impl Fn(u32) -> bool,
    ) -> Option<Slot> {
        let extents = self.extents.len() as u32;
        let start = (cursor.0 / EXTENT_SLOTS).min(extents.checked_sub(1)?);
        // The extent of the cursor is searched twice: first from the cursor on, and last as a
        // whole.
        for step in 0..=extents {
            let extent = (start + step) % extents;
            let count = &self.extents[extent as usize];
            let free = count.load(Ordering::Relaxed);
            if free == 0 || free & CLOSED != 0 || !may(extent) {
                continue;
            }
            let mut range = self.range(extent);
            if step == 0 {
                range.start = cursor.0.clamp(range.start, range.end);
            }
            for slot in range.map(Slot) {
                // Records in use are above every epoch. A search of a full store sees nothing else.
                if self.record(slot).load(Ordering::Relaxed) < safe && self.try_claim(slot, page, safe) {
                    *cursor = Cursor(slot.0 + 1);
                    return Some(slot);
                }
            }
        }
        None
    }

    /// Finds a run of `want` to `most` free slots, for pages that are written together. The search
    /// goes from `cursor` on, in extents for which `may` is true. If it finds no such run within
    /// its bounds, it returns the longest that it saw. The caller must claim each slot by itself:
    /// other lanes may be faster.
    pub fn find_run(
        &self,
        cursor: &mut Cursor,
        want: u32,
        most: u32,
        safe: u64,
        may: impl Fn(u32) -> bool,
    ) -> std::ops::Range<u32> {
        let extents = self.extents.len() as u32;
        let (mut best, mut looks) = (0..0, LOOKS_MAX);
        let mut extent = cursor.0 / EXTENT_SLOTS;
        let mut start = cursor.0;
        for _ in 0..=extents.min(EXTENTS_MAX) {
            if extent >= extents {
                (extent, start) = (0, 0);
            }
            let range = self.range(extent);
            let free = self.extents[extent as usize].load(Ordering::Relaxed);
            let mut run = 0..0;
            if free & CLOSED == 0 && free as usize > best.len() && may(extent) {
                for slot in start.max(range.start)..range.end {
                    let record = self.record(Slot(slot)).load(Ordering::Relaxed);
                    looks -= 1;
                    if record & IN_USE == 0 && record < safe {
                        run = if run.end == slot { run.start..slot + 1 } else { slot..slot + 1 };
                        if run.len() > best.len() {
                            best = run.clone();
                        }
                    } else if best.len() as u32 >= want {
                        break;
                    }
                    if looks == 0 || best.len() as u32 == most {
                        break;
                    }
                }
            }
            if looks == 0 || best.len() as u32 >= want {
                break;
            }
            (extent, start) = (extent + 1, 0);
        }
        *cursor = Cursor(if best.is_empty() { (extent + 1) * EXTENT_SLOTS } else { best.end });
        best
    }

    /// Claims this slot for `page`, if it is free and was retired before epoch `safe`.
    #[inline]
    pub fn try_claim(&self, slot: Slot, page: PageNo, safe: u64) -> bool {
        let Some(free) = self.claimable(slot, safe) else { return false };
        others_may_run_within_a_claim();
        self.claim_if(slot, free, page)
    }

    /// The record of a free slot that can be claimed now, or `None`.
    #[inline]
    pub(crate) fn claimable(&self, slot: Slot, safe: u64) -> Option<u64> {
        let free = self.record(slot).load(Ordering::Relaxed);
        let count = &self.extents[(slot.0 / EXTENT_SLOTS) as usize];
        (free < safe && free & IN_USE == 0 && count.load(Ordering::Relaxed) & CLOSED == 0).then_some(free)
    }

    /// Claims a slot whose record is still `free`, even if its chunk was closed meanwhile. The
    /// worker that closed the chunk waits until this lane's pin ends.
    #[inline]
    pub(crate) fn claim_if(&self, slot: Slot, free: u64, page: PageNo) -> bool {
        let claimed = in_use(Occupant { page, checksum: Checksum(0) });
        let swapped =
            self.record(slot).compare_exchange(free, claimed, Ordering::SeqCst, Ordering::Relaxed).is_ok();
        if swapped {
            self.extents[(slot.0 / EXTENT_SLOTS) as usize].fetch_sub(1, Ordering::Relaxed);
        }
        swapped
    }

    /// Whether a slot that could not be claimed can be claimed once its epoch has passed.
    pub fn waits_for_epoch(&self, slot: Slot) -> bool {
        let is_free = self.record(slot).load(Ordering::Relaxed) & IN_USE == 0;
        is_free && self.extents[(slot.0 / EXTENT_SLOTS) as usize].load(Ordering::Relaxed) & CLOSED == 0
    }

    /// Records the content of a claimed slot. The map may name the slot only after that, by a
    /// `SeqCst` write.
    #[inline]
    pub fn fill_in(&self, slot: Slot, occupant: Occupant) {
        self.record(slot).store(in_use(occupant), Ordering::Release);
    }

    /// The occupant of a slot that the map names.
    #[inline]
    pub fn occupant(&self, slot: Slot) -> Option<Occupant> {
        let record = self.record(slot).load(Ordering::Acquire);
        (record & IN_USE != 0).then_some(Occupant {
            page: PageNo((record >> 32) as u32 & PAGE_MASK),
            checksum: Checksum(record as u32),
        })
    }

    /// Prefetches a slot's record.
    #[inline]
    pub fn prefetch(&self, slot: Slot) {
        weir_core::prefetch_value(self.record(slot));
    }

    /// Makes the counts of borrowers, unless they are there already.
    pub fn begin_lending(&self) {
        self.lent.get_or_init(|| Lent::new(self.slots));
    }

    pub fn lent(&self) -> Option<&Lent> {
        self.lent.get()
    }

    /// From here on searches look for packs too, since the store has some or can get some.
    pub fn begin_packs(&self) {
        self.packs.store(true, Ordering::Relaxed);
    }

    #[inline]
    pub fn has_packs(&self) -> bool {
        self.packs.load(Ordering::Relaxed)
    }

    /// Takes an unlinked page out of its slot, and frees the slot if that was its last page.
    /// `epoch` returns the epoch of the unlinking, or 0 if the map never named the slot. A lent
    /// slot stays in use until it is returned.
    #[inline]
    pub fn retire(&self, slot: Slot, epoch: impl FnOnce() -> u64) -> Retired {
        let pack = self.is_pack(slot);
        if pack && self.leave_pack(slot, 1) > 0 {
            return Retired { freed: false, pack };
        }
        if let Some(lent) = self.lent.get()
            && !lent.may_free(slot)
        {
            return Retired { freed: false, pack };
        }
        // Read the epoch only now: every page that left the pack before was unlinked before this
        // moment.
        self.free_slot(slot, epoch());
        Retired { freed: true, pack }
    }

    /// Whether a slot holds a pack.
    #[inline]
    pub fn is_pack(&self, slot: Slot) -> bool {
        self.has_packs() && self.occupant(slot).is_some_and(Occupant::is_pack)
    }

    /// Ends the publication of a pack: from here on its record counts only the pages that the map
    /// names. Returns whether no page was left, so that the slot is free.
    pub fn published(&self, slot: Slot, epoch: impl FnOnce() -> u64) -> bool {
        let gone = self.leave_pack(slot, UNPUBLISHED) == 0;
        if gone {
            self.free_slot(slot, epoch());
        }
        gone
    }

    /// Frees a slot that the map does not name.
    #[inline]
    pub fn free_slot(&self, slot: Slot, epoch: u64) {
        debug_assert!(epoch & IN_USE == 0);
        self.extents[(slot.0 / EXTENT_SLOTS) as usize].fetch_add(1, Ordering::Relaxed);
        self.record(slot).store(epoch, Ordering::Release);
    }

    /// Subtracts `by` from a pack's count of pages, and returns the count that is left.
    fn leave_pack(&self, slot: Slot, by: u32) -> u32 {
        let was = self.record(slot).fetch_sub(u64::from(by) * ONE_PAGE, Ordering::SeqCst);
        let of_pack = ((was >> 32) as u32 & PAGE_MASK).checked_sub(PAGES_MAX);
        let pages = of_pack.map_or(0, |of_pack| of_pack % PACK_COUNTS);
        assert!(was & IN_USE != 0 && pages >= by, "slot {} holds no page of a pack", slot.0);
        pages - by
    }

    /// Resets each pack's count of pages, to count the pages anew. No other thread may be using the
    /// records.
    pub fn forget_pack_pages(&self) {
        for slot in (0..self.slots).map(Slot) {
            if let Some(occupant) = self.occupant(slot)
                && occupant.is_pack()
            {
                self.begin_packs();
                let room = (occupant.page.0 - PAGES_MAX) / PACK_COUNTS;
                self.fill_in(slot, Occupant::pack(0, room, occupant.checksum));
            }
        }
    }

    /// Whether the record of `slot` allows the map to name the slot for `page`. If the slot has a
    /// pack, counts the page in it. No other thread may be using the records.
    pub fn names(&self, slot: Slot, page: PageNo) -> bool {
        match self.occupant(slot) {
            Some(occupant) if occupant.is_pack() => {
                let more = occupant.fill().is_some_and(|(pages, _)| pages < MEMBERS_MAX as u32);
                if more {
                    self.record(slot).fetch_add(ONE_PAGE, Ordering::Relaxed);
                }
                more
            }
            Some(occupant) => occupant.page == page,
            None => false,
        }
    }

    /// Keeps slots of these extents from being claimed. A claim that is under way ends before the
    /// pin of its lane does.
    pub fn close(&self, extents: std::ops::Range<u32>) {
        for extent in &self.extents[extents.start as usize..extents.end as usize] {
            extent.fetch_or(CLOSED, Ordering::SeqCst);
        }
    }

    /// Lets slots of these extents be claimed again.
    pub fn open(&self, extents: std::ops::Range<u32>) {
        for extent in &self.extents[extents.start as usize..extents.end as usize] {
            extent.fetch_and(!CLOSED, Ordering::SeqCst);
        }
    }

    /// Number of all slots in open extents for which `may` is true.
    pub fn open_slots(&self, may: impl Fn(u32) -> bool) -> u32 {
        let open = |&extent: &u32| {
            self.extents[extent as usize].load(Ordering::Relaxed) & CLOSED == 0 && may(extent)
        };
        (0..self.extents.len() as u32).filter(open).map(|extent| self.range(extent).len() as u32).sum()
    }
}

fn in_use(occupant: Occupant) -> u64 {
    IN_USE | u64::from(occupant.page.0) << 32 | u64::from(occupant.checksum.0)
}

#[cfg(all(test, not(loom)))]
mod tests {
    use super::*;
    use proptest::prelude::*;

    #[test]
    fn every_slot_is_claimed_once_and_then_none() {
        let records = Records::new(2 * EXTENT_SLOTS + 100, 0).unwrap();
        let mut cursors = [records.cursor(0, 2), records.cursor(1, 2)];
        let mut seen = std::collections::HashSet::new();
        for at in 0..records.slots() {
            let slot = records.claim(&mut cursors[at as usize % 2], PageNo(at), 1, |_| true).unwrap();
            assert!(seen.insert(slot));
        }
        assert_eq!(records.free(), 0);
        assert_eq!(records.claim(&mut cursors[0], PageNo(0), 1, |_| true), None);
    }

    #[test]
    fn a_slot_behind_the_cursor_of_the_same_extent_is_found() {
        let records = Records::new(100, 0).unwrap();
        let mut cursor = records.cursor(0, 1);
        while records.claim(&mut cursor, PageNo(0), 1, |_| true).is_some() {}
        records.retire(Slot(3), || 0);
        assert_eq!(records.claim(&mut cursor, PageNo(1), 1, |_| true), Some(Slot(3)));
    }

    #[test]
    fn a_retired_slot_waits_for_its_epoch() {
        let records = Records::new(1, 0).unwrap();
        let mut cursor = records.cursor(0, 1);
        let slot = records.claim(&mut cursor, PageNo(5), 1, |_| true).unwrap();
        records.retire(slot, || 7);
        assert_eq!(records.free(), 1, "it is room, though not yet");
        assert_eq!(records.claim(&mut cursor, PageNo(5), 7, |_| true), None);
        assert_eq!(records.claim(&mut cursor, PageNo(5), 8, |_| true), Some(slot));
    }

    #[test]
    fn a_closed_extent_gives_no_slots_until_it_is_opened() {
        let records = Records::new(2 * EXTENT_SLOTS, 0).unwrap();
        records.close(0..1);
        assert_eq!(records.open_slots(|_| true), EXTENT_SLOTS);
        let mut cursor = records.cursor(0, 1);
        let claimed: Vec<_> =
            std::iter::from_fn(|| records.claim(&mut cursor, PageNo(0), 1, |_| true)).collect();
        assert_eq!(claimed.len() as u32, EXTENT_SLOTS);
        assert!(claimed.iter().all(|slot| slot.0 >= EXTENT_SLOTS));
        assert!(!records.try_claim(Slot(0), PageNo(0), 1));
        records.open(0..1);
        assert!(records.claim(&mut cursor, PageNo(0), 1, |_| true).is_some());
    }

    #[test]
    fn records_left_by_another_process_are_kept_or_freed_by_what_the_map_says() {
        let records = Records::new(10, 0).unwrap();
        let mut cursor = records.cursor(0, 1);
        let slots: Vec<_> =
            (0..4).map(|page| records.claim(&mut cursor, PageNo(page), 1, |_| true).unwrap()).collect();
        let kept = Occupant { page: PageNo(1), checksum: Checksum(77) };
        records.fill_in(slots[1], kept);
        records.retire(slots[3], || 5);
        let fd = records.memory().fd().unwrap().try_clone_to_owned().unwrap();
        drop(records);
        let mut found = Records::over(Memory::adopt(fd).unwrap(), 10);
        found.keep_only(|slot| slot == slots[1]);
        assert_eq!(found.free(), 9);
        assert_eq!(found.occupant(slots[1]), Some(kept));
        assert_eq!(found.occupant(slots[0]), None);
    }

    #[test]
    fn a_pack_is_freed_by_the_last_of_its_pages_in_the_epoch_of_that_moment() {
        let records = Records::new(2, 0).unwrap();
        records.begin_packs();
        let mut cursor = records.cursor(0, 1);
        let slot = records.claim(&mut cursor, PageNo(5), 1, |_| true).unwrap();
        records.fill_in(slot, Occupant::pack(3, 5, Checksum(9)));
        let kept = Retired { freed: false, pack: true };
        assert_eq!([0, 0].map(|_| records.retire(slot, || panic!("not yet"))), [kept, kept]);
        assert_eq!(records.occupant(slot), Some(Occupant::pack(1, 5, Checksum(9))));
        assert_eq!(records.retire(slot, || 7), Retired { freed: true, pack: true });
        assert!(!records.try_claim(slot, PageNo(0), 7) && records.try_claim(slot, PageNo(0), 8));
    }

    #[test]
    fn a_pack_says_how_full_it_is_once_it_is_published_and_never_before() {
        let records = Records::new(2, 0).unwrap();
        records.begin_packs();
        let mut cursor = records.cursor(0, 1);
        for (pages, room, left) in [(3, 9, 0), (32, 32, 32), (2, 3, 1)] {
            let slot = records.claim(&mut cursor, PageNo(5), 1, |_| true).unwrap();
            records.fill_in(slot, Occupant::unpublished_pack(pages, room, Checksum(9)));
            (left..pages).for_each(|_| assert!(!records.retire(slot, || panic!("not yet")).freed));
            assert_eq!(records.occupant(slot).unwrap().fill(), None);
            assert_eq!(records.published(slot, || 0), left == 0);
            let found = records.occupant(slot).and_then(Occupant::fill);
            assert_eq!(found, (left > 0).then_some((left, room)));
        }
        assert_eq!(Occupant { page: PageNo(PAGES_MAX - 1), checksum: Checksum(0) }.fill(), None);
    }

    #[test]
    fn pages_of_a_pack_are_counted_anew_by_what_the_map_says() {
        let records = Records::new(1, 0).unwrap();
        let slot = records.claim(&mut records.cursor(0, 1), PageNo(5), 1, |_| true).unwrap();
        records.fill_in(slot, Occupant::unpublished_pack(9, 10, Checksum(9)));
        records.forget_pack_pages();
        assert!(records.has_packs() && records.names(slot, PageNo(1)) && records.names(slot, PageNo(2)));
        assert_eq!(records.occupant(slot), Some(Occupant::pack(2, 10, Checksum(9))));
    }

    proptest! {
        #[test]
        fn a_record_says_what_it_was_given(page in 0..PAGES_MAX, checksum: u32) {
            let records = Records::new(1, 0).unwrap();
            let occupant = Occupant { page: PageNo(page), checksum: Checksum(checksum) };
            records.fill_in(Slot(0), occupant);
            prop_assert_eq!(records.occupant(Slot(0)), Some(occupant));
        }
    }
}
