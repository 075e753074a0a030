//! The directory of a cache: the frame of each cached page, the users of each frame, and the choice
//! of the page that leaves next.
//!
//! Frames are grouped in sets of [`WAYS`]. A page can only lie in a frame of its own set. So the
//! index is one word a frame, and its size depends on the number of cached pages, not on the home.
//! Nothing here does I/O or takes a lock: every change is one compare-and-exchange.
//!
//! **One frame a page.** A lane that finds no frame of a page claims one, then searches the set
//! again. Of two claims of a page, the claim in the lower frame ends the other. A claim becomes
//! valid when no other claim of the page is left. For that the lane changes its claim by a
//! compare-and-exchange, which fails if another lane has ended the claim. So of two claims at most
//! one becomes valid.
//!
//! **Policy.** S3-FIFO (Yang et al., *FIFO queues are all you need for cache eviction*, SOSP 2023)
//! within each set. A new page is *young*. A tenth of a set is for young pages. A young page that
//! was not used again leaves first. A young page that was used again grows old. A clock hand goes
//! round the old pages. It passes an old page once for each use since, at most three times. Then
//! the page leaves. When a young page leaves, a fingerprint of 16 bits stays in the set for a
//! while. If the page comes back, it is old at once. So a scan passes through only a tenth of the
//! cache.

use crate::entry::{ALONE, Entry, Kind};
use std::io;
use std::sync::atomic::{AtomicBool, AtomicU32, AtomicU64, Ordering};
use weir_core::{Memory, PageNo};

/// Number of frames in a set.
pub const WAYS: u32 = 64;
/// If a set has more young pages than this, the next page to leave the set is a young one.
const YOUNG_MAX: u32 = WAYS / 10;
/// Largest number of entries in the list of sets in which a page found no frame.
const PRESSED: usize = 64;

/// A frame's number, which is also the number of its page in the cache's volume.
pub(crate) type Frame = u32;

/// A cache's index: the page in each frame, and the frame's users.
pub struct Directory {
    words: Memory,
    sets: u32,
    /// Number of frames that take pages: the first ones of each set. The frames behind this limit
    /// leave, or are closed.
    limit: AtomicU32,
    /// Whether frames behind the limit may still have pages.
    leaves: AtomicBool,
    dirty: AtomicU32,
    /// The sets in which a page found no frame, each as its number plus 1; 0: no set.
    pressed: [AtomicU32; PRESSED],
}

/// The result of a search for a page's frame.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) enum Found {
    /// This frame has the page. The caller shares it now.
    Hit(Frame),
    /// The page has no frame.
    Absent,
    /// Another user has the page's frame exclusively for now.
    Busy,
}

/// A frame that one user has exclusively.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) struct Held {
    pub frame: Frame,
    /// Whether the frame has the page's content.
    pub is_valid: bool,
    pub is_dirty: bool,
    /// Whether the client's request goes to the home, and the frame only serves as the page's lock.
    /// If so, no lane may write the page's content into the frame.
    pub passes: bool,
}

/// A frame's state on its way out of use.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) enum Closing {
    /// A lane or the write-back uses the frame, or the home lacks the frame's content.
    Waits,
    /// The frame is closed, and no page of the home is in it. The page of the volume that backs the
    /// frame may still have old content.
    Empty,
    /// The frame's page of the volume has been discarded.
    Vacant,
}

/// The state in which a user leaves a frame that it had exclusively.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) enum Outcome {
    /// The frame has the same content as the home.
    Clean,
    /// The frame has newer content than the home.
    Dirty,
    /// The frame has newer content than the home, and a write of it to the home may land at any
    /// time.
    Late,
    /// The frame has no content.
    Nothing,
}

impl Directory {
    /// Makes an empty directory for at most `frames` frames. It has whole sets only, and at least
    /// one.
    ///
    /// # Errors
    /// Fails when there is no memory for the directory.
    pub fn new(frames: u32) -> io::Result<Self> {
        let sets = (frames / WAYS).max(1);
        let words = Memory::anonymous((sets * WAYS) as usize * size_of::<u64>())?;
        Ok(Directory {
            words,
            sets,
            limit: AtomicU32::new(sets * WAYS),
            leaves: AtomicBool::new(false),
            dirty: AtomicU32::new(0),
            pressed: [const { AtomicU32::new(0) }; PRESSED],
        })
    }

    /// Number of frames.
    pub fn frames(&self) -> u32 {
        self.sets * WAYS
    }

    /// Number of frames that take pages.
    pub fn limit(&self) -> u32 {
        self.limit.load(Ordering::Acquire)
    }

    /// Sets the number of frames that may take pages. Frames with a higher number take no new page,
    /// and [`close`](Directory::close) takes them out of use.
    pub(crate) fn set_limit(&self, frames: u32) {
        self.limit.store(frames.min(self.frames()), Ordering::Release);
    }

    /// Whether the frame is behind the limit.
    pub(crate) fn is_behind(&self, frame: Frame) -> bool {
        self.is_beyond(frame, self.limit())
    }

    /// Whether the frame would be behind this limit. The limit counts the first frame of each set,
    /// then the second ones, and so on.
    pub(crate) fn is_beyond(&self, frame: Frame, limit: u32) -> bool {
        limit < self.frames() && frame % WAYS * self.sets + frame / WAYS >= limit
    }

    /// Whether frames behind the limit may still have pages.
    pub(crate) fn leaves(&self) -> bool {
        self.leaves.load(Ordering::Relaxed)
    }

    pub(crate) fn set_leaves(&self, leaves: bool) {
        self.leaves.store(leaves, Ordering::Relaxed);
    }

    /// Whether the frame takes no page any more.
    fn is_leaving(&self, frame: Frame, entry: Entry) -> bool {
        entry.is_closed() || self.is_behind(frame)
    }

    /// Takes a frame behind the limit out of use, as far as the frame's users allow. A frame
    /// becomes closed only while no user has the frame exclusively. So each user that has the frame
    /// exclusively after that sees that the frame is closed.
    pub(crate) fn close(&self, frame: Frame) -> Closing {
        loop {
            let was = self.load(frame);
            let (closed, state) = match was.kind() {
                _ if was.is_vacant() => return Closing::Vacant,
                Kind::Empty => (was.closed(), Closing::Empty),
                Kind::Valid if was.is_evictable() => (was.closed().emptied(), Closing::Empty),
                Kind::Valid if was.users() != ALONE => (was.closed(), Closing::Waits),
                Kind::Claimed | Kind::Held if was.is_closed() => return Closing::Empty,
                _ => return Closing::Waits,
            };
            if was == closed || self.replace(frame, was, closed) {
                return state;
            }
        }
    }

    /// Notes that the page of the volume of a closed frame has been discarded.
    pub(crate) fn vacate(&self, frame: Frame) {
        self.change(frame, |entry| Some(entry.vacated()));
    }

    /// Opens a frame again.
    pub(crate) fn open(&self, frame: Frame) {
        self.change(frame, |entry| entry.is_closed().then(|| entry.opened()));
    }

    /// Takes a frame exclusively, to drop its content. `None`: the frame has users, or the home may
    /// lack its content.
    pub(crate) fn seize(&self, frame: Frame) -> Option<Held> {
        let alone = |entry: Entry| entry.is_evictable().then(|| entry.with_users(ALONE));
        let taken = self.change(frame, alone).1;
        taken.then_some(Held { frame, is_valid: true, is_dirty: false, passes: true })
    }

    /// Bytes of memory that the directory takes.
    pub fn memory_bytes(&self) -> u64 {
        self.words.len() as u64
    }

    /// Number of pages that are dirty, or whose write to the home has not ended.
    pub fn dirty(&self) -> u32 {
        self.dirty.load(Ordering::Relaxed)
    }

    /// Number of frames that have a page. Reads each frame's word.
    pub fn used(&self) -> u32 {
        (0..self.frames()).filter(|frame| self.load(*frame).kind() != Kind::Empty).count() as u32
    }

    /// Changes the policy's state as a read of the page would, if the read took no time. Returns
    /// whether the page was cached. A replay of a trace calls this.
    pub fn replay(&self, page: PageNo) -> bool {
        match self.share(page, false) {
            Found::Hit(frame) => {
                self.leave(frame, false);
                true
            }
            Found::Absent | Found::Busy => {
                if let Some(held) = self.hold(page, 0) {
                    self.let_go(held, Outcome::Clean);
                }
                false
            }
        }
    }

    fn word(&self, frame: Frame) -> &AtomicU64 {
        assert!(frame < self.frames(), "frame {frame} of {}", self.frames());
        // SAFETY: the pointer is inside the mapping (checked above) and aligned (8-byte steps from
        // a page boundary). The word is only ever accessed as an atomic.
        unsafe { &*self.words.as_ptr().cast::<AtomicU64>().add(frame as usize) }
    }

    pub(crate) fn load(&self, frame: Frame) -> Entry {
        Entry(self.word(frame).load(Ordering::SeqCst))
    }

    fn replace(&self, frame: Frame, was: Entry, entry: Entry) -> bool {
        let word = self.word(frame);
        let replaced = word.compare_exchange(was.0, entry.0, Ordering::SeqCst, Ordering::Relaxed).is_ok();
        if replaced && was.is_ahead() != entry.is_ahead() {
            let step = if entry.is_ahead() { 1 } else { u32::MAX };
            self.dirty.fetch_add(step, Ordering::Relaxed);
        }
        replaced
    }

    /// Replaces a frame's word by the result of `change`; `None` leaves the word as it is. Returns
    /// the old word, and whether it was replaced.
    fn change(&self, frame: Frame, change: impl Fn(Entry) -> Option<Entry>) -> (Entry, bool) {
        loop {
            let was = self.load(frame);
            match change(was) {
                None => return (was, false),
                Some(entry) if self.replace(frame, was, entry) => return (was, true),
                Some(_) => {}
            }
        }
    }

    /// The first frame of a page's set, and the page's fingerprint.
    fn place(&self, page: PageNo) -> (Frame, u16) {
        let hash = u64::from(page.0).wrapping_mul(0x9e37_79b9_7f4a_7c15);
        let hash = hash ^ hash >> 29;
        let set = ((hash >> 32) * u64::from(self.sets)) >> 32;
        (set as u32 * WAYS, (hash as u16).max(1))
    }

    fn find(&self, first: Frame, page: PageNo) -> Option<(Frame, Entry)> {
        (first..first + WAYS)
            .map(|frame| (frame, self.load(frame)))
            .find(|(_, entry)| entry.page() == page && entry.kind() != Kind::Empty)
    }

    /// Shares the page's frame, if the page has one. While the frame is being taken out of use,
    /// only readers share it, and only if its page is dirty.
    pub(crate) fn share(&self, page: PageNo, to_write: bool) -> Found {
        let (first, _) = self.place(page);
        loop {
            let Some((frame, entry)) = self.find(first, page) else { return Found::Absent };
            if entry.kind() == Kind::Valid && self.is_leaving(frame, entry) {
                match () {
                    // A writer must take the frame exclusively. It then writes the page to the
                    // home.
                    () if to_write => return Found::Absent,
                    () if entry.is_evictable() => {
                        // Another user may have changed the entry before this. Then search for the
                        // page again.
                        self.replace(frame, entry, entry.emptied());
                        continue;
                    }
                    // The frame gets no new users, and its present users will end soon.
                    () if !entry.is_ahead() => return Found::Busy,
                    () => {}
                }
            }
            let Some(shared) = entry.shared().filter(|_| entry.kind() == Kind::Valid) else {
                return Found::Busy;
            };
            if self.replace(frame, entry, shared.hit()) {
                return Found::Hit(frame);
            }
        }
    }

    /// Ends one [`share`](Directory::share). `wrote` tells that the frame's content is now newer
    /// than the home's.
    pub(crate) fn leave(&self, frame: Frame, wrote: bool) {
        self.change(frame, |entry| {
            Some(entry.with_users(entry.users() - 1).with_dirty(entry.is_dirty() || wrote))
        });
    }

    /// Gives the frame exclusively to a caller that shares it. `None`: the frame has other users,
    /// or is not clean.
    pub(crate) fn upgrade(&self, frame: Frame) -> Option<Held> {
        let alone = |entry: Entry| {
            let may = entry.users() == 1 && !entry.is_dirty() && !entry.is_writing();
            may.then(|| entry.with_users(ALONE))
        };
        let (entry, upgraded) = self.change(frame, alone);
        let passes = self.is_leaving(frame, entry);
        upgraded.then_some(Held { frame, is_valid: true, is_dirty: false, passes })
    }

    /// Takes the page's frame exclusively, or a new frame if the page has none. `who` is the number
    /// of the caller's lane. `None`: another user has the frame, or no frame of the set is free.
    pub(crate) fn hold(&self, page: PageNo, who: u8) -> Option<Held> {
        let (first, fingerprint) = self.place(page);
        if let Some((frame, entry)) = self.find(first, page) {
            let may = entry.kind() == Kind::Valid && entry.users() == 0 && !entry.is_writing();
            let alone = entry.hit().with_users(ALONE);
            let passes = self.is_leaving(frame, entry);
            let held = Held { frame, is_valid: true, is_dirty: entry.is_dirty(), passes };
            return (may && self.replace(frame, entry, alone)).then_some(held);
        }
        let found = self.victim(first);
        let passes = found.is_some_and(|(frame, entry)| self.is_leaving(frame, entry));
        if found.is_none() || passes && !self.is_behind(first) {
            self.press(first / WAYS);
        }
        let (frame, victim) = found?;
        let young = !self.forgive(first, fingerprint);
        let left = if victim.kind() != Kind::Empty && victim.is_young() && frame != first {
            victim.with_ghost(self.place(victim.page()).1)
        } else {
            victim
        };
        let claim = left.claimed(page, who, young);
        (self.replace(frame, victim, claim) && self.confirm(first, frame, page, who)).then_some(Held {
            frame,
            is_valid: false,
            is_dirty: false,
            passes,
        })
    }

    /// Makes a lane's claim of a frame valid, so that the lane has the frame exclusively. Returns
    /// false if the page has another frame, or the claim has ended.
    fn confirm(&self, first: Frame, mine: Frame, page: PageNo, who: u8) -> bool {
        // Another lane may have ended this claim, and a third lane may have claimed the frame
        // since.
        let is_mine = |entry: Entry| {
            entry.kind() == Kind::Claimed && entry.page() == page && entry.users() == who.into()
        };
        let give_up = || {
            self.change(mine, |entry| is_mine(entry).then(|| entry.emptied()));
            false
        };
        for frame in (first..first + WAYS).filter(|frame| *frame != mine) {
            loop {
                let entry = self.load(frame);
                if entry.page() != page || entry.kind() == Kind::Empty {
                    break;
                }
                // Of two claims, the one with the lower frame wins and ends the other.
                if entry.kind() != Kind::Claimed || frame < mine {
                    return give_up();
                }
                if self.replace(frame, entry, entry.emptied()) {
                    break;
                }
            }
        }
        let held = |entry: Entry| entry.with_kind(Kind::Held).with_users(ALONE);
        self.change(mine, |entry| is_mine(entry).then(|| held(entry))).1
    }

    /// Ends the caller's exclusive use of a frame.
    pub(crate) fn let_go(&self, held: Held, outcome: Outcome) {
        self.change(held.frame, |entry| {
            let valid = entry.with_kind(Kind::Valid).with_users(0);
            Some(match outcome {
                Outcome::Clean if entry.is_closed() => entry.emptied(),
                Outcome::Clean => valid.with_dirty(false),
                Outcome::Dirty => valid.with_dirty(true),
                Outcome::Late => valid.with_dirty(true).with_writing(true),
                Outcome::Nothing => entry.emptied(),
            })
        });
    }

    /// Begins to write a frame's page to the home. From here on the frame is clean, unless a lane
    /// writes it again. Returns the old entry, and whether the write-back begins.
    pub(crate) fn begin_write_back(&self, frame: Frame) -> (Entry, bool) {
        self.change(frame, |entry| {
            let may = entry.kind() == Kind::Valid && entry.is_dirty() && !entry.is_writing();
            Some(entry.shared().filter(|_| may)?.with_dirty(false).with_writing(true))
        })
    }

    /// Ends the write-back of a frame. The outcome is clean if the home has the content, late if
    /// the write timed out, and else dirty.
    pub(crate) fn end_write_back(&self, frame: Frame, outcome: Outcome) {
        self.change(frame, |entry| {
            let entry = entry.with_users(entry.users() - 1);
            Some(match outcome {
                Outcome::Clean => entry.with_writing(false),
                Outcome::Dirty | Outcome::Nothing => entry.with_writing(false).with_dirty(true),
                Outcome::Late => entry.with_dirty(true),
            })
        });
    }

    /// Notes the end of a write to the home that had timed out.
    pub(crate) fn settle(&self, page: PageNo) {
        let (first, _) = self.place(page);
        if let Some((frame, _)) = self.find(first, page) {
            self.change(frame, |entry| entry.is_writing().then(|| entry.with_writing(false)));
        }
    }

    /// Takes one counted use from a dirty page.
    pub(crate) fn forget_use(&self, frame: Frame) {
        self.change(frame, |entry| {
            let has_uses = entry.kind() == Kind::Valid && entry.is_dirty() && entry.hits() > 0;
            has_uses.then(|| entry.with_hits(entry.hits() - 1))
        });
    }

    fn press(&self, set: u32) {
        self.pressed[set as usize % PRESSED].store(set + 1, Ordering::Relaxed);
    }

    /// Whether a page has found no frame since the last call of
    /// [`take_pressed`](Directory::take_pressed).
    pub(crate) fn has_pressed(&self) -> bool {
        self.pressed.iter().any(|slot| slot.load(Ordering::Relaxed) != 0)
    }

    /// Takes the list of sets in which pages have found no frame since the last call. Yields the
    /// first frame of each.
    pub(crate) fn take_pressed(&self) -> impl Iterator<Item = Frame> {
        let take = |slot: &AtomicU32| match slot.load(Ordering::Relaxed) {
            0 => None,
            _ => slot.swap(0, Ordering::Relaxed).checked_sub(1),
        };
        self.pressed.iter().filter_map(take).map(|set| set * WAYS)
    }

    /// Removes the page's fingerprint from its set. Returns whether the set had it.
    fn forgive(&self, first: Frame, fingerprint: u16) -> bool {
        // The first word of a set has no fingerprint. In that place it has the set's two clock
        // hands.
        let is_it = |entry: Entry| entry.ghost() == fingerprint;
        let Some(frame) = (first + 1..first + WAYS).find(|frame| is_it(self.load(*frame))) else {
            return false;
        };
        self.change(frame, |entry| is_it(entry).then(|| entry.with_ghost(0)));
        true
    }

    /// Finds the frame that the next page of a set gets. If there is none, finds a frame behind the
    /// limit that has no page. Through that frame a page can go between the client and the home
    /// without being cached. `None`: all frames are used, dirty, or being written.
    fn victim(&self, first: Frame) -> Option<(Frame, Entry)> {
        let (mut young, mut passing) = (0, None);
        for frame in first..first + WAYS {
            let entry = self.load(frame);
            match (entry.kind() == Kind::Empty, self.is_leaving(frame, entry)) {
                (true, false) => return Some((frame, entry)),
                (true, true) => passing = passing.or(Some((frame, entry))),
                (false, _) => young += u32::from(entry.is_young()),
            }
        }
        let queues = if young > YOUNG_MAX { [true, false] } else { [false, true] };
        queues.into_iter().find_map(|young| self.sweep(first, young)).or(passing)
    }

    /// Finds a frame of a set whose page may leave. Each set has two clock hands: one for young
    /// pages, which are new in the cache, and one for old pages, which were used again. This
    /// function advances one of the two hands.
    fn sweep(&self, first: Frame, young: bool) -> Option<(Frame, Entry)> {
        let shift = if young { 0 } else { 8 };
        let hand = u32::from(self.load(first).ghost() >> shift) % WAYS;
        // An old page counts at most three uses, so it leaves in the fourth round at the latest.
        let rounds = if young { 1 } else { 4 };
        for step in 0..rounds * WAYS {
            let way = (hand + step) % WAYS;
            let frame = first + way;
            let entry = self.load(frame);
            if !entry.is_evictable() || entry.is_young() != young || self.is_leaving(frame, entry) {
                continue;
            }
            if entry.hits() == 0 {
                let next = ((way + 1) % WAYS) as u16;
                self.change(first, |entry| {
                    let hands = entry.ghost() & !(0xff << shift) | next << shift;
                    Some(entry.with_ghost(hands))
                });
                // The change above is to the set's first word, which may also be this frame's word.
                // So load the frame's word again.
                return Some((frame, self.load(frame))).filter(|(_, entry)| entry.is_evictable());
            }
            let aged =
                if young { entry.with_young(false).with_hits(0) } else { entry.with_hits(entry.hits() - 1) };
            // Another user may have changed the word meanwhile. Then the page was used, and should
            // stay.
            let _ = self.replace(frame, entry, aged);
        }
        None
    }
}

impl std::fmt::Debug for Directory {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "Directory({} frames)", self.frames())
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;
    use std::collections::HashSet;

    fn pages_of(directory: &Directory) -> Vec<u32> {
        let entries = (0..directory.frames()).map(|frame| directory.load(frame));
        entries.filter(|entry| entry.kind() != Kind::Empty).map(|entry| entry.page().0).collect()
    }

    #[test]
    fn a_page_that_was_let_go_clean_is_found_and_one_that_failed_is_not() {
        let directory = Directory::new(256).unwrap();
        let held = directory.hold(PageNo(7), 0).unwrap();
        assert!(!held.is_valid);
        assert_eq!((directory.share(PageNo(7), false), directory.hold(PageNo(7), 0)), (Found::Busy, None));
        directory.let_go(held, Outcome::Clean);
        assert_eq!(directory.share(PageNo(7), false), Found::Hit(held.frame));
        assert_eq!(directory.hold(PageNo(7), 0), None, "somebody shares it");
        directory.leave(held.frame, false);
        let again = directory.hold(PageNo(7), 0).unwrap();
        assert_eq!((again.frame, again.is_valid), (held.frame, true));
        directory.let_go(again, Outcome::Nothing);
        assert_eq!(directory.share(PageNo(7), false), Found::Absent);
    }

    #[test]
    fn dirty_pages_stay_until_they_are_written_back_and_their_set_asks_for_that() {
        let directory = Directory::new(WAYS).unwrap();
        for page in 0..WAYS {
            let held = directory.hold(PageNo(page), 0).unwrap();
            directory.let_go(held, Outcome::Dirty);
        }
        assert_eq!((directory.dirty(), directory.hold(PageNo(1000), 0)), (WAYS, None));
        assert_eq!(directory.take_pressed().collect::<Vec<_>>(), [0]);
        assert_eq!(directory.take_pressed().count(), 0);
        assert!(directory.begin_write_back(3).1 && !directory.begin_write_back(3).1);
        assert_eq!(directory.hold(PageNo(1000), 0), None, "it is being written");
        directory.end_write_back(3, Outcome::Clean);
        assert_eq!(directory.hold(PageNo(1000), 0).unwrap().frame, 3);
        assert_eq!(directory.dirty(), WAYS - 1);
    }

    #[test]
    fn a_page_that_is_written_while_it_goes_home_is_dirty_afterwards_and_a_late_one_until_it_settled() {
        let directory = Directory::new(WAYS).unwrap();
        let held = directory.hold(PageNo(1), 0).unwrap();
        directory.let_go(held, Outcome::Dirty);
        assert!(directory.begin_write_back(held.frame).1);
        assert_eq!(directory.share(PageNo(1), false), Found::Hit(held.frame));
        directory.leave(held.frame, true);
        directory.end_write_back(held.frame, Outcome::Clean);
        assert!(directory.load(held.frame).is_dirty());
        assert!(directory.begin_write_back(held.frame).1);
        directory.end_write_back(held.frame, Outcome::Late);
        assert!(!directory.begin_write_back(held.frame).1, "the first may still land");
        directory.settle(PageNo(1));
        assert!(directory.begin_write_back(held.frame).1);
    }

    #[test]
    fn a_scan_leaves_the_pages_that_are_used_where_they_are() {
        let directory = Directory::new(4096).unwrap();
        for round in 0..20 {
            for page in 0..2000 {
                directory.replay(PageNo(page));
            }
            // The scan reads each page once.
            for page in 0..2000 {
                directory.replay(PageNo(1_000_000 + round * 2000 + page));
            }
        }
        let hits = (0..2000).filter(|page| directory.replay(PageNo(*page))).count();
        assert!(hits >= 1900, "{hits} of 2000");
    }

    proptest! {
        #[test]
        fn every_page_has_one_frame_at_most(pages in proptest::collection::vec(0u32..400, 1..2000)) {
            let directory = Directory::new(128).unwrap();
            for page in pages {
                directory.replay(PageNo(page));
                prop_assert!(directory.replay(PageNo(page)), "page {page} is there now");
            }
            let pages = pages_of(&directory);
            prop_assert_eq!(pages.iter().collect::<HashSet<_>>().len(), pages.len());
        }
    }

    #[test]
    fn threads_that_claim_the_same_pages_never_give_one_two_frames() {
        let directory = Directory::new(WAYS).unwrap();
        // Each holder writes its number, and must find the same number afterwards.
        let holders: Vec<AtomicU32> = (0..80).map(|_| AtomicU32::new(0)).collect();
        std::thread::scope(|scope| {
            for thread in 1..=4u32 {
                let (directory, holders) = (&directory, &holders);
                scope.spawn(move || {
                    let mut chance = thread;
                    for _ in 0..100_000 {
                        chance = chance.wrapping_mul(1_664_525).wrapping_add(1_013_904_223);
                        let page = (chance >> 16) % 80;
                        let Some(held) = directory.hold(PageNo(page), thread as u8) else { continue };
                        let holder = &holders[page as usize];
                        assert_eq!(holder.swap(thread, Ordering::SeqCst), 0, "page {page} is held twice");
                        assert_eq!(holder.swap(0, Ordering::SeqCst), thread);
                        let outcome = if chance & 1 == 0 { Outcome::Clean } else { Outcome::Nothing };
                        directory.let_go(held, outcome);
                    }
                });
            }
        });
        let pages = pages_of(&directory);
        assert_eq!(pages.iter().collect::<HashSet<_>>().len(), pages.len());
    }
}
