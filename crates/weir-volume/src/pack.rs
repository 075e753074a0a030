//! A pack: one slot that holds several compressed pages.
//!
//! ```text
//!  0       1       2                                               4096
//! +-------+-------+--------------------------+--------+------------+
//! | how   | pages | page (4), start (2), ... |  free  | ... second, first page
//! +-------+-------+--------------------------+--------+------------+
//! ```
//!
//! Numbers are little-endian. The first page's bytes end where the slot ends. Each other page's
//! bytes end where those of the previous page begin. A page is in a pack at most once. A pack is
//! written whole and never changed.

use crate::compress::Compression;
use crate::ranges::PAGES_MAX;
use weir_core::{Checksum, PAGE_SIZE, Page, PageBytes, PageNo};

/// Largest number of pages in a pack, and so of pages that are lost with one slot.
pub(crate) const MEMBERS_MAX: usize = 32;
/// Largest number of bytes of a compressed page that goes into a pack: two such pages fill one.
pub(crate) const MEMBER_MAX: usize = (PAGE_SIZE - HEAD) / 2 - PLACE;
const HEAD: usize = 2;
/// Bytes that a pack's head has for each page: the page's number, and where its bytes start.
const PLACE: usize = 6;

/// The checksum of a pack. Its head is part of the content, so the checksum also covers which pages
/// are in it.
pub(crate) fn checksum(pack: &PageBytes) -> Checksum {
    Checksum::of(pack, PageNo(PAGES_MAX), 0)
}

/// Finds a page in a pack. Returns the algorithm and the page's compressed bytes.
pub(crate) fn find(pack: &PageBytes, page: PageNo) -> Option<(Compression, &[u8])> {
    let compression = Compression::of_code(pack[0])?;
    let places = pack[HEAD..].chunks_exact(PLACE).take(usize::from(pack[1]).min(MEMBERS_MAX));
    let mut end = PAGE_SIZE;
    for place in places {
        let number = u32::from_le_bytes(place[..4].try_into().expect("4 of 6 bytes"));
        let start = usize::from(u16::from_le_bytes(place[4..].try_into().expect("2 of 6 bytes")));
        let bytes = pack.get(start..end)?;
        if number == page.0 {
            return Some((compression, bytes));
        }
        end = start;
    }
    None
}

/// The pages of a pack, in order.
pub(crate) fn members(pack: &PageBytes) -> impl Iterator<Item = PageNo> {
    let places = pack[HEAD..].chunks_exact(PLACE).take(usize::from(pack[1]).min(MEMBERS_MAX));
    places.map(|place| PageNo(u32::from_le_bytes(place[..4].try_into().expect("4 of 6 bytes"))))
}

/// The algorithm of a pack's pages.
pub(crate) fn compression(pack: &PageBytes) -> Option<Compression> {
    Compression::of_code(pack[0])
}

/// A pack that is being filled.
pub(crate) struct OpenPack {
    bytes: Box<Page>,
    pages: usize,
    start: usize,
    /// Whether a page has not fitted into the pack.
    full: bool,
}

impl OpenPack {
    pub fn new() -> Self {
        OpenPack { bytes: Box::new(Page::zeroed()), pages: 0, start: PAGE_SIZE, full: false }
    }

    pub fn pages(&self) -> usize {
        self.pages
    }

    pub fn bytes(&self) -> &PageBytes {
        &self.bytes
    }

    /// Whether `page`, compressed to `length` bytes, can be added to the pack.
    pub fn takes(&self, compression: Compression, page: PageNo, length: usize) -> bool {
        self.pages == 0
            || self.has_room(length)
                && self.bytes[0] == compression.code()
                && find(&self.bytes, page).is_none()
    }

    fn has_room(&self, length: usize) -> bool {
        self.pages < MEMBERS_MAX && HEAD + (self.pages + 1) * PLACE + length <= self.start
    }

    /// Notes that a page of `length` bytes was refused. If it did not fit, the pack is full.
    pub fn refuse(&mut self, length: usize) {
        self.full |= !self.has_room(length);
    }

    /// Number of pages that the pack has room for, if all have the average size of those in it.
    /// Once a page did not fit, it is the number of pages in the pack.
    pub fn room(&self) -> usize {
        if self.full || self.pages == 0 {
            return self.pages;
        }
        let each = (PAGE_SIZE - self.start).div_ceil(self.pages) + PLACE;
        ((PAGE_SIZE - HEAD) / each).clamp(self.pages, MEMBERS_MAX)
    }

    /// Adds a page that the pack [`takes`](OpenPack::takes), of at most [`MEMBER_MAX`] bytes.
    pub fn add(&mut self, compression: Compression, page: PageNo, bytes: &[u8]) {
        debug_assert!(self.takes(compression, page, bytes.len()) && bytes.len() <= MEMBER_MAX);
        let start = self.start - bytes.len();
        self.bytes[start..self.start].copy_from_slice(bytes);
        let place = HEAD + self.pages * PLACE;
        self.bytes[place..place + 4].copy_from_slice(&page.0.to_le_bytes());
        self.bytes[place + 4..place + PLACE].copy_from_slice(&(start as u16).to_le_bytes());
        (self.start, self.pages) = (start, self.pages + 1);
        (self.bytes[0], self.bytes[1]) = (compression.code(), self.pages as u8);
    }

    /// Empties the pack, to begin a new one.
    pub fn clear(&mut self) {
        (self.pages, self.start, self.full, self.bytes[1]) = (0, PAGE_SIZE, false, 0);
    }
}

#[cfg(all(test, not(loom)))]
mod tests {
    use super::*;
    use proptest::prelude::*;

    proptest! {
        #[test]
        fn what_was_added_is_found_and_nothing_else(
            members in prop::collection::vec((0..100u32, prop::collection::vec(any::<u8>(), 0..=MEMBER_MAX)), 1..40),
            zstd: bool,
        ) {
            let compression = if zstd { Compression::Zstd } else { Compression::Lz4 };
            let mut pack = OpenPack::new();
            for _ in 0..2 {
                let mut added = std::collections::HashMap::new();
                for (page, bytes) in &members {
                    if !pack.takes(compression, PageNo(*page), bytes.len()) {
                        continue;
                    }
                    pack.add(compression, PageNo(*page), bytes);
                    prop_assert!(added.insert(*page, bytes).is_none(), "a page is in a pack once");
                }
                prop_assert_eq!(pack.pages(), added.len());
                prop_assert!(super::members(pack.bytes()).all(|page| added.contains_key(&page.0)));
                prop_assert_eq!(super::members(pack.bytes()).count(), added.len());
                prop_assert!((added.len()..=MEMBERS_MAX).contains(&pack.room()));
                for page in 0..100 {
                    let found = find(pack.bytes(), PageNo(page));
                    prop_assert_eq!(found, added.get(&page).map(|bytes| (compression, &bytes[..])));
                }
                pack.clear();
                prop_assert_eq!(find(pack.bytes(), PageNo(members[0].0)), None);
            }
        }

        #[test]
        fn rubbish_is_searched_without_harm(bytes in prop::collection::vec(any::<u8>(), PAGE_SIZE), page: u32) {
            let bytes: PageBytes = bytes.try_into().unwrap();
            let _ = find(&bytes, PageNo(page));
            assert!(members(&bytes).count() <= MEMBERS_MAX);
        }
    }

    #[test]
    fn room_is_for_pages_of_the_same_size_until_one_is_refused() {
        let mut pack = OpenPack::new();
        pack.add(Compression::Lz4, PageNo(0), &[1; 1000]);
        assert_eq!(pack.room(), 4);
        pack.refuse(1000);
        assert_eq!(pack.room(), 4);
        pack.refuse(4000);
        assert_eq!(pack.room(), 1);
        pack.clear();
        pack.add(Compression::Lz4, PageNo(0), &[1; 10]);
        assert_eq!(pack.room(), MEMBERS_MAX);
    }

    #[test]
    fn two_of_the_largest_fill_a_pack() {
        let mut pack = OpenPack::new();
        for page in 0..2 {
            assert!(pack.takes(Compression::Lz4, PageNo(page), MEMBER_MAX));
            pack.add(Compression::Lz4, PageNo(page), &[1; MEMBER_MAX]);
        }
        assert!(!pack.takes(Compression::Lz4, PageNo(2), 0));
    }
}
