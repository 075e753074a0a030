//! The 64-bit words of a table's image. Each word can be read by itself, and each change of state
//! is one store of one word. So a process that finds the image after a crash sees the state before
//! a change or after it.

use core::sync::atomic::{AtomicU64, Ordering};

use crate::token::{LAP_BITS, Place, Token};

const IN_USE: u64 = 1 << 63;
const PAGE_BITS: u32 = 26;
const REGION_AT: u32 = PAGE_BITS;
const FRAGMENT_AT: u32 = REGION_AT + 8;
const LAP_AT: u32 = FRAGMENT_AT + 6;
const LAP_MASK: u64 = (1 << LAP_BITS) - 1;
const _: () = assert!(LAP_AT + LAP_BITS < 63);

/// The word of a slot: one reference, with its lap and its place, or none.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) struct SlotWord(pub u64);

impl SlotWord {
    /// Loads the word of a slot. Loads and stores of it are ordered as those of the
    /// [`image`](crate::image).
    #[inline]
    pub(crate) fn load(slot: &AtomicU64) -> Self {
        SlotWord(slot.load(Ordering::Acquire))
    }

    #[inline]
    pub(crate) fn store(self, slot: &AtomicU64) {
        slot.store(self.0, Ordering::Release);
    }

    pub(crate) const fn taken(lap: u32, place: Place) -> Self {
        SlotWord(
            IN_USE
                | (lap as u64) << LAP_AT
                | (place.fragment as u64) << FRAGMENT_AT
                | (place.region as u64) << REGION_AT
                | place.page as u64,
        )
    }

    /// The word of the slot once its reference is returned. Lap and place stay readable, so that a
    /// second return can be told from a forgery.
    pub(crate) const fn returned(self) -> Self {
        SlotWord(self.0 & !IN_USE)
    }

    pub(crate) const fn in_use(self) -> bool {
        self.0 & IN_USE != 0
    }

    pub(crate) const fn lap(self) -> u32 {
        (self.0 >> LAP_AT & LAP_MASK) as u32
    }

    /// Whether the reference that `token` stands for is held now. `token` must name this slot.
    pub(crate) const fn holds(self, token: Token) -> bool {
        let expected = IN_USE >> LAP_AT | token.lap() as u64;
        (self.0 >> LAP_AT) & (IN_USE >> LAP_AT | LAP_MASK) == expected
    }

    pub(crate) const fn place(self) -> Place {
        Place {
            region: (self.0 >> REGION_AT) as u8,
            page: (self.0 & ((1 << PAGE_BITS) - 1)) as u32,
            fragment: (self.0 >> FRAGMENT_AT & 63) as u8,
        }
    }
}

/// The word of a chunk of 64 slots. The chunk is free, or has a connection's slots from
/// `64 * position` on.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) struct ChunkWord(pub u64);

impl ChunkWord {
    pub(crate) const FREE: Self = ChunkWord(0);

    pub(crate) const fn attached(connection: u32, position: u32) -> Self {
        ChunkWord(IN_USE | (position as u64) << 32 | connection as u64)
    }

    pub(crate) const fn owner(self) -> Option<(u32, u32)> {
        if self.0 & IN_USE == 0 { None } else { Some((self.0 as u32, (self.0 >> 32) as u32 & 0x7fff_ffff)) }
    }
}

/// The word of a connection: open or closed, its quota, and its lap.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) struct ConnectionWord(pub u64);

impl ConnectionWord {
    pub(crate) const fn new(open: bool, quota: u32, lap: u32) -> Self {
        ConnectionWord((open as u64) << 63 | (quota as u64) << 32 | lap as u64)
    }

    pub(crate) const fn open(self) -> bool {
        self.0 >> 63 != 0
    }

    pub(crate) const fn quota(self) -> u32 {
        (self.0 >> 32) as u32 & 0x7fff_ffff
    }

    pub(crate) const fn lap(self) -> u32 {
        (self.0 & LAP_MASK) as u32
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::token::{FRAGMENTS_MAX, QUOTA_MAX, REGION_PAGES_MAX};
    use proptest::prelude::*;

    proptest! {
        #![proptest_config(ProptestConfig::with_cases(if cfg!(miri) { 2 } else { 256 }))]

        #[test]
        fn a_slot_gives_back_what_it_was_told(
            region: u8, page in 0..REGION_PAGES_MAX, fragment in 0..FRAGMENTS_MAX,
            lap in 0u32..1 << LAP_BITS, index in 0..QUOTA_MAX, other in 1u32..1 << LAP_BITS,
        ) {
            let place = Place { region, page, fragment };
            let word = SlotWord::taken(lap, place);
            prop_assert_eq!((word.place(), word.lap(), word.in_use()), (place, lap, true));
            prop_assert!(word.holds(Token::new(lap, index)));
            prop_assert!(!word.holds(Token::new(lap ^ other, index)));
            let word = word.returned();
            prop_assert_eq!((word.place(), word.lap(), word.in_use()), (place, lap, false));
            prop_assert!(!word.holds(Token::new(lap, index)));
        }

        #[test]
        fn a_chunk_and_a_connection_give_back_what_they_were_told(
            connection: u32, position in 0u32..64, open: bool, quota in 0..=QUOTA_MAX, lap in 0u32..1 << LAP_BITS,
        ) {
            prop_assert_eq!(ChunkWord::attached(connection, position).owner(), Some((connection, position)));
            let word = ConnectionWord::new(open, quota, lap);
            prop_assert_eq!((word.open(), word.quota(), word.lap()), (open, quota, lap));
        }
    }

    #[test]
    fn zeroed_memory_is_an_image_of_nothing() {
        assert!(!SlotWord(0).in_use() && ChunkWord(0).owner().is_none() && !ConnectionWord(0).open());
    }
}
