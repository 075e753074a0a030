//! The page map's entry of a page: one 64-bit word, so that one store publishes a write.
//!
//! ```text
//!  63    62 61    58 57            32 31                     0
//! +--------+--------+----------------+------------------------+
//! |  kind  | store  |   generation   |  slot, or fill value   |
//! +--------+--------+----------------+------------------------+
//! ```
//!
//! The generation counts the writes of a page, modulo 2^26. It is part of the checksum, so an older
//! write of the same page does not pass for the newest. It also makes a compare-and-exchange on the
//! word fail if the page was written in between.

use weir_core::Slot;

/// A page's word in the map.
#[derive(Clone, Copy, PartialEq, Eq, Default)]
pub(crate) struct Entry(pub u64);

/// The meaning of a page's word.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) enum Place {
    /// The page was never written, or was discarded: it reads as zeros.
    Empty,
    /// The whole page repeats this 32-bit value; it has no slot.
    Fill(u32),
    /// The page lies in this slot of this store.
    Stored { store: usize, slot: Slot },
    /// The page was in a store that lost it. Reads fail until the page is written or discarded.
    Lost,
}

/// Largest number of stores that a volume can have: an entry has no room to name more.
pub const STORES_MAX: usize = 16;
const GENERATION_MASK: u32 = (1 << 26) - 1;
const KIND_FILL: u64 = 1;
const KIND_STORED: u64 = 2;
const KIND_LOST: u64 = 3;

impl Entry {
    pub fn new(place: Place, generation: u32) -> Self {
        let (kind, store, low) = match place {
            Place::Empty => (0, 0, 0),
            Place::Fill(value) => (KIND_FILL, 0, value),
            Place::Stored { store, slot } => (KIND_STORED, store as u64, slot.0),
            Place::Lost => (KIND_LOST, 0, 0),
        };
        let generation = u64::from(generation & GENERATION_MASK);
        Entry(kind << 62 | store << 58 | generation << 32 | u64::from(low))
    }

    #[inline]
    pub fn place(self) -> Place {
        let low = self.0 as u32;
        match self.0 >> 62 {
            0 => Place::Empty,
            KIND_FILL => Place::Fill(low),
            KIND_STORED => {
                Place::Stored { store: (self.0 >> 58) as usize & (STORES_MAX - 1), slot: Slot(low) }
            }
            _ => Place::Lost,
        }
    }

    pub fn generation(self) -> u32 {
        (self.0 >> 32) as u32 & GENERATION_MASK
    }

    /// The generation of the page's next write.
    pub fn next_generation(self) -> u32 {
        (self.generation() + 1) & GENERATION_MASK
    }
}

impl std::fmt::Debug for Entry {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "{:?} generation {}", self.place(), self.generation())
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    proptest! {
        #[test]
        fn an_entry_says_what_it_was_given(kind in 0..4, store in 0..STORES_MAX, low: u32, generation in 0u32..1 << 26) {
            let place = match kind {
                0 => Place::Empty,
                1 => Place::Fill(low),
                2 => Place::Stored { store, slot: Slot(low) },
                _ => Place::Lost,
            };
            let entry = Entry::new(place, generation);
            prop_assert_eq!(entry.place(), place);
            prop_assert_eq!(entry.generation(), generation);
        }
    }

    #[test]
    fn a_fresh_map_is_empty_and_generations_wrap() {
        assert_eq!(Entry::default().place(), Place::Empty);
        assert_eq!(Entry::new(Place::Empty, GENERATION_MASK).next_generation(), 0);
    }
}
