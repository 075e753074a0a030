//! A frame's entry in the directory: one word.
//!
//! ```text
//!  63         32 31      16 15    8 7  6   5       4      3     2    1  0
//! +-------------+----------+-------+----+-------+-------+-----+------+----+
//! |    page     |  ghost   | users |hits| young |writing|dirty|closed|kind|
//! +-------------+----------+-------+----+-------+-------+-----+------+----+
//! ```
//!
//! In a closed frame's word, the bit of `young` means that the frame is vacant.

use std::fmt;
use weir_core::PageNo;

/// A frame's entry, as one word.
#[derive(Clone, Copy, PartialEq, Eq)]
pub(crate) struct Entry(pub u64);

/// The state of a frame.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) enum Kind {
    /// The frame is free.
    Empty = 0,
    /// A lane has claimed the frame for a page. Other lanes may claim another frame for the same
    /// page at the same moment.
    Claimed = 1,
    /// One user has the frame exclusively for this page. The page's content is not in the frame
    /// yet.
    Held = 2,
    /// The frame has the page's content.
    Valid = 3,
}

/// Value of an entry's count of users while one user has the frame exclusively, and may change its
/// state.
pub(crate) const ALONE: u64 = 255;
/// Largest number of users that may share a frame.
const USERS_MAX: u64 = 254;
const HITS_MAX: u64 = 3;

const CLOSED: u64 = 1 << 2;
const DIRTY: u64 = 1 << 3;
const WRITING: u64 = 1 << 4;
const YOUNG: u64 = 1 << 5;
const VACANT: u64 = YOUNG;

impl Entry {
    const fn field(self, at: u32, bits: u32) -> u64 {
        (self.0 >> at) & ((1 << bits) - 1)
    }

    const fn with(self, at: u32, bits: u32, value: u64) -> Entry {
        let mask = ((1 << bits) - 1) << at;
        Entry(self.0 & !mask | (value << at) & mask)
    }

    /// The entry once lane `who` has claimed the frame for `page`. Only the fingerprint of the old
    /// word stays, and whether the frame is closed and vacant.
    pub fn claimed(self, page: PageNo, who: u8, young: bool) -> Entry {
        let entry = Entry(self.emptied().0 | u64::from(page.0) << 32).with(8, 8, who.into());
        let entry = if self.is_closed() { entry } else { entry.with_flag(YOUNG, young) };
        entry.with_kind(Kind::Claimed)
    }

    /// The entry after its page has left the frame. Only the fingerprint in the word stays, and
    /// whether the frame is closed and vacant.
    pub fn emptied(self) -> Entry {
        let closed = if self.is_closed() { self.0 & (CLOSED | VACANT) } else { 0 };
        Entry(closed).with(16, 16, self.ghost().into())
    }

    /// Whether the frame is closed. A user that has a closed frame exclusively leaves no page in
    /// the frame, except a page whose content the home lacks.
    pub fn is_closed(self) -> bool {
        self.0 & CLOSED != 0
    }

    /// The entry of a frame that is closed from now on. Nobody may have the frame exclusively.
    pub fn closed(self) -> Entry {
        self.with_flag(VACANT, false).with_flag(CLOSED, true)
    }

    /// The entry of a closed frame that is open again.
    pub fn opened(self) -> Entry {
        self.with_flag(VACANT | CLOSED, false)
    }

    /// Whether the frame is closed, and its page of the volume has no content.
    pub fn is_vacant(self) -> bool {
        self.0 & (CLOSED | VACANT) == CLOSED | VACANT
    }

    /// The entry of a closed frame that is vacant from now on.
    pub fn vacated(self) -> Entry {
        self.with_flag(VACANT, true)
    }

    pub fn page(self) -> PageNo {
        PageNo((self.0 >> 32) as u32)
    }

    pub fn kind(self) -> Kind {
        match self.0 & 3 {
            0 => Kind::Empty,
            1 => Kind::Claimed,
            2 => Kind::Held,
            _ => Kind::Valid,
        }
    }

    pub fn with_kind(self, kind: Kind) -> Entry {
        self.with(0, 2, kind as u64)
    }

    /// The fingerprint of a page that has left the set; see the policy of
    /// [`Directory`](crate::directory::Directory).
    pub fn ghost(self) -> u16 {
        self.field(16, 16) as u16
    }

    pub fn with_ghost(self, ghost: u16) -> Entry {
        self.with(16, 16, ghost.into())
    }

    /// The number of the frame's users. In a claimed entry, the number of the lane that claimed it.
    pub fn users(self) -> u64 {
        self.field(8, 8)
    }

    pub fn with_users(self, users: u64) -> Entry {
        self.with(8, 8, users)
    }

    /// The entry with one more user. `None`: one user has the frame exclusively, or the count is
    /// full.
    pub fn shared(self) -> Option<Entry> {
        (self.users() < USERS_MAX).then(|| self.with_users(self.users() + 1))
    }

    pub fn hits(self) -> u64 {
        self.field(6, 2)
    }

    pub fn hit(self) -> Entry {
        self.with_hits((self.hits() + 1).min(HITS_MAX))
    }

    pub fn with_hits(self, hits: u64) -> Entry {
        self.with(6, 2, hits)
    }

    fn with_flag(self, flag: u64, set: bool) -> Entry {
        Entry(if set { self.0 | flag } else { self.0 & !flag })
    }

    /// Whether the page is young, which means in the probation queue of S3-FIFO. A page of a closed
    /// frame is never young.
    pub fn is_young(self) -> bool {
        self.0 & (CLOSED | YOUNG) == YOUNG
    }

    pub fn with_young(self, young: bool) -> Entry {
        self.with_flag(YOUNG, young)
    }

    /// Whether the frame's content is newer than the home's.
    pub fn is_dirty(self) -> bool {
        self.0 & DIRTY != 0
    }

    pub fn with_dirty(self, dirty: bool) -> Entry {
        self.with_flag(DIRTY, dirty)
    }

    /// Whether a write of the page may reach the home at any time.
    pub fn is_writing(self) -> bool {
        self.0 & WRITING != 0
    }

    pub fn with_writing(self, writing: bool) -> Entry {
        self.with_flag(WRITING, writing)
    }

    /// Whether the home may lack the frame's content: the frame is dirty or being written.
    pub fn is_ahead(self) -> bool {
        self.is_dirty() || self.is_writing()
    }

    /// Whether another page may get the frame.
    pub fn is_evictable(self) -> bool {
        self.kind() == Kind::Valid && self.users() == 0 && !self.is_ahead()
    }
}

impl fmt::Debug for Entry {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{:?} of {:?} with {} users", self.kind(), self.page(), self.users())?;
        let flags = [
            (self.is_dirty(), " dirty"),
            (self.is_writing(), " writing"),
            (self.is_young(), " young"),
            (self.is_closed(), " closed"),
            (self.is_vacant(), " vacant"),
        ];
        flags.iter().filter(|(set, _)| *set).try_for_each(|(_, name)| f.write_str(name))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn no_part_of_an_entry_disturbs_another() {
        let entry = Entry(0).with_ghost(0xabcd).claimed(PageNo(0x8765_4321), 9, true);
        assert_eq!((entry.page(), entry.users(), entry.hits()), (PageNo(0x8765_4321), 9, 0));
        let entry = entry.with_kind(Kind::Valid).with_users(3).with_dirty(true).hit().hit().hit().hit();
        let entry = entry.with_writing(true).with_young(false).with_ghost(7);
        assert_eq!((entry.page(), entry.users(), entry.hits()), (PageNo(0x8765_4321), 3, 3));
        assert_eq!(
            (entry.is_dirty(), entry.is_writing(), entry.is_young(), entry.ghost()),
            (true, true, false, 7)
        );
        let entry = entry.with_dirty(false).with_writing(false);
        assert!(!entry.is_evictable() && entry.with_users(0).is_evictable());
        assert_eq!(entry.with_users(254).shared(), None);
        assert_eq!(entry.emptied(), Entry(0).with_ghost(7));
    }

    #[test]
    fn a_closed_frame_stays_closed_and_vacant_whoever_passes_by_until_it_is_opened() {
        let young = Entry(0).claimed(PageNo(1), 3, true).with_kind(Kind::Valid);
        assert!(young.is_young() && !young.closed().is_young() && !young.closed().is_vacant());
        let vacant = young.with_ghost(5).closed().emptied().vacated();
        let passing = vacant.claimed(PageNo(9), 200, true).with_kind(Kind::Held).with_users(ALONE);
        assert!(passing.is_vacant() && !passing.is_young() && passing.emptied() == vacant);
        assert_eq!(vacant.opened(), Entry(0).with_ghost(5));
    }
}
