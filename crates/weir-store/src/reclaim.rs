//! Memory that is given back to its owner, chunk by chunk, and the memory that is free on a card.

use crate::Fault;

/// A store that gives its memory back by chunks, and takes it again.
pub trait Reclaim {
    /// Slots of a chunk. The last chunk may be shorter.
    fn chunk_slots(&self) -> u32;

    /// Gives a chunk's memory back to its owner. The caller has emptied the chunk, and its slots
    /// fault from here on. The call takes milliseconds, so a worker must make it.
    ///
    /// # Errors
    /// Fails when the memory cannot be given back; the chunk is unchanged then.
    fn release(&self, chunk: u32) -> Result<(), Fault>;

    /// Takes memory for a released chunk again. The call is slow, so a worker must make it.
    ///
    /// # Errors
    /// Fails when the memory's owner has none free now.
    fn take(&self, chunk: u32) -> Result<(), Fault>;

    /// The memory of a member that nobody has taken. `None` if the member does not report it. A
    /// call takes some ten microseconds; a governor calls a few times a second.
    fn headroom(&self, _member: u32) -> Option<Headroom> {
        None
    }
}

/// The memory of one card that is free at present, so that neither Weir nor another program has it.
/// The owner comes first: below `floor` free bytes, Weir must give memory back, and above `spare`
/// it may take more.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Headroom {
    /// Bytes that are free on the card.
    pub free: u64,
    /// Bytes of the card's memory in total.
    pub total: u64,
    /// Whether a display is connected to the card.
    pub display: bool,
    /// Free bytes below which memory is given back (`floor=` of the URL).
    pub floor: u64,
    /// Free bytes that stay free when memory is taken: 1 GiB, 3 GiB with a display, or the floor if
    /// that is more.
    pub spare: u64,
    /// Bytes of a chunk, the unit of give-back and take.
    pub chunk: u64,
}

impl Headroom {
    /// Whether Weir must give memory back.
    pub fn is_short(&self) -> bool {
        self.free < self.floor
    }

    /// Whether the floor is free, and the size of a chunk above it. With no more than the floor
    /// free, the next chunk that is taken would have to be given back at once.
    pub fn has_recovered(&self) -> bool {
        self.free >= self.floor + self.chunk
    }

    /// Number of chunks to give back now. It is 0 while at least the floor is free. If less is
    /// free, it is the least number of chunks after which the card [has
    /// recovered](Self::has_recovered).
    pub fn owed_chunks(&self) -> u32 {
        if !self.is_short() {
            return 0;
        }
        chunks((self.floor + self.chunk - self.free).div_ceil(self.chunk))
    }

    /// Number of chunks that may be taken now. Afterwards `spare` bytes must still be free, and the
    /// bytes of one more chunk. Without that chunk, a take could soon be followed by a give-back.
    pub fn spare_chunks(&self) -> u32 {
        chunks((self.free.saturating_sub(self.spare) / self.chunk).saturating_sub(1))
    }
}

fn chunks(count: u64) -> u32 {
    u32::try_from(count).unwrap_or(u32::MAX)
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    const MIB: u64 = 1 << 20;

    fn card(free: u64) -> Headroom {
        let (floor, spare, chunk) = (512 * MIB, 1024 * MIB, 128 * MIB);
        Headroom { free, total: 24 << 30, display: false, floor, spare, chunk }
    }

    #[test]
    fn what_is_owed_is_what_restores_the_floor_and_a_chunk() {
        assert_eq!(card(512 * MIB).owed_chunks(), 0);
        assert_eq!(card(511 * MIB).owed_chunks(), 2);
        assert_eq!(card(0).owed_chunks(), 5);
        assert_eq!((card(1024 * MIB).spare_chunks(), card(1280 * MIB).spare_chunks()), (0, 1));
    }

    proptest! {
        #[test]
        fn giving_and_taking_end_and_never_undo_each_other(free in 0u64..8 << 30) {
            let given = |room: Headroom| card(room.free + u64::from(room.owed_chunks()) * room.chunk);
            let taken = |room: Headroom| card(room.free - u64::from(room.spare_chunks()) * room.chunk);
            let after = given(card(free));
            prop_assert_eq!(after.owed_chunks(), 0);
            prop_assert!(!card(free).is_short() || after.has_recovered());
            let full = taken(after);
            prop_assert_eq!((full.owed_chunks(), full.spare_chunks()), (0, 0));
            prop_assert!(full.free >= full.spare.min(after.free));
        }
    }
}
