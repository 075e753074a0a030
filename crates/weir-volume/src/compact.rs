//! Compaction: moves pages of half-empty packs together.
//!
//! A pack's slot is free when the last of its pages has gone. If pages are replaced in random
//! order, packs grow sparse, and a whole slot holds few pages. So compaction empties the sparsest
//! packs. Their pages go into new packs without being compressed again, and each is published by
//! itself, like any page that moves. Readers and writers go on. A page that is written meanwhile
//! need not be moved any more.
//!
//! A pool has a slot for each of its pages, even if none is compressed. So no write depends on
//! compaction, which is done only when it pays: emptying two half-full packs frees only one slot.
//! It allocates no memory, and in a full store it takes one additional slot at a time.

use crate::Pool;
use crate::records::Occupant;
use crate::status::LaneMetrics;
use weir_core::Slot;
use weir_core::metrics::Counter;

/// Which packs are emptied: all that are at most this full.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Sparse {
    /// Packs that are at most this full are emptied; in sixteenths ([`WHOLE`]).
    fill_most: u32,
}

impl Sparse {
    /// Chooses packs that are at most `sixteenths` sixteenths full. [`Pool::sparse`] makes a better
    /// choice.
    pub fn up_to(sixteenths: u32) -> Self {
        Sparse { fill_most: sixteenths.min(WHOLE) }
    }

    /// Whether a slot holds a pack that is to be emptied.
    pub(crate) fn has(self, occupant: Option<Occupant>) -> bool {
        fill(occupant).is_some_and(|fill| fill <= self.fill_most)
    }
}

/// Number of parts in which the fullness of a pack is counted: a full pack has sixteen sixteenths.
const WHOLE: u32 = 16;
/// Packs that are fuller than this are not emptied. To empty them would move many pages for little
/// room.
const FILL_MOST: u32 = 11;
/// Least number of wasted slots that is worth compaction.
const WASTE_LEAST: u64 = 32;
/// Compaction begins when the packs waste at least one in this many of their slots. The first
/// number is for most stores. The second is for a store with little room, where compaction begins
/// earlier.
const WASTE_ONE_IN: (u64, u64) = (6, 12);
/// A store has little room if fewer than one in this many of its slots are free.
const ROOM_ONE_IN: u32 = 16;
/// Another look for packs to empty is worthwhile once enough pages have left packs since the last
/// look. Enough are at least [`LEFT_LEAST`] pages, and at least one page for each [`LEFT_ONE_IN`]
/// packs.
const LEFT_LEAST: u64 = 256;
const LEFT_ONE_IN: u64 = 8;

/// Returns the fullness of a pack, in sixteenths; `None` for a slot without a pack.
fn fill(occupant: Option<Occupant>) -> Option<u32> {
    let (pages, room) = occupant?.fill()?;
    (pages > 0).then(|| (pages * WHOLE).div_ceil(room))
}

impl Pool {
    /// Sets the callback that lanes call whenever many more pages have left packs. Only the first
    /// call of this function sets one.
    pub fn when_packs_are_left(&self, told: Box<dyn Fn() + Send + Sync>) {
        let _ = self.when_left.set(told);
    }

    pub(crate) fn packs_are_left(&self) {
        if let Some(told) = self.when_left.get() {
            told();
        }
    }

    /// Whether enough pages have left packs since the last look for packs to make another look
    /// worthwhile. If the result is true, this call counts as the last look from then on. `looked`
    /// belongs to the caller. It is `None` at first, and later the number of pages that had left
    /// packs at the last look.
    pub fn packs_were_left(&self, looked: &mut Option<u64>) -> bool {
        let sum = |count: fn(&LaneMetrics) -> &Counter| -> u64 {
            self.seats.metrics().fold(0, |sum, lane| sum.wrapping_add(count(lane).get()))
        };
        let packs = sum(|lane| &lane.packs).wrapping_sub(sum(|lane| &lane.unpacks));
        // Compacted pages have left their packs too, but that is no reason to look again.
        let left = sum(|lane| &lane.unpacked).wrapping_sub(sum(|lane| &lane.compacted));
        let enough = LEFT_LEAST.max(packs / LEFT_ONE_IN);
        if looked.is_some_and(|before| left.wrapping_sub(before) < enough) {
            return false;
        }
        *looked = Some(left);
        true
    }

    /// Chooses the packs of a store that are worth emptying, if too many slots are wasted. Reads
    /// every record.
    pub fn sparse(&self, store: usize) -> Option<Sparse> {
        let tier = self.tiers.get(store).filter(|tier| tier.records.has_packs())?;
        self.compression()?;
        let mut packs = [0u64; WHOLE as usize + 1];
        for slot in (0..tier.records.slots()).map(Slot) {
            if let Some(fill) = fill(tier.records.occupant(slot)) {
                packs[fill as usize] += 1;
            }
        }
        let little_room = tier.records.open_free(|_| true) < tier.records.slots() / ROOM_ONE_IN;
        let one_in = if little_room { WASTE_ONE_IN.1 } else { WASTE_ONE_IN.0 };
        sparse(&packs, one_in)
    }
}

/// Chooses the packs to empty. `packs[n]` is the number of packs that are `n` sixteenths full.
/// Compaction begins when one slot in `one_in` is wasted. It ends when the packs that stay waste
/// half of that, or when all of them are fuller than [`FILL_MOST`].
fn sparse(packs: &[u64], one_in: u64) -> Option<Sparse> {
    let total: u64 = packs.iter().sum();
    let wasted = |(fill, count): (usize, &u64)| count * (u64::from(WHOLE) - fill as u64);
    // Waste is counted in sixteenths of a slot. `waste` is the present waste, and `left` is the
    // waste once the packs that are up to `fill_most` full are emptied.
    let waste: u64 = packs.iter().enumerate().map(wasted).sum();
    let whole = u64::from(WHOLE);
    if waste * one_in < total * whole {
        return None;
    }
    let mut left = waste;
    for (fill_most, count) in packs.iter().enumerate().take(FILL_MOST as usize + 1) {
        left -= wasted((fill_most, count));
        if left * 2 * one_in <= total * whole || fill_most == FILL_MOST as usize {
            return (waste - left >= WASTE_LEAST * whole).then_some(Sparse { fill_most: fill_most as u32 });
        }
    }
    None
}

#[cfg(all(test, not(loom)))]
mod tests {
    use super::*;

    #[test]
    fn the_emptiest_go_as_far_as_it_takes_and_none_that_are_nearly_full() {
        let of = |counts: &[(usize, u64)]| {
            let mut packs = [0; WHOLE as usize + 1];
            counts.iter().for_each(|&(fill, count)| packs[fill] = count);
            sparse(&packs, WASTE_ONE_IN.0).map(|it| it.fill_most)
        };
        assert_eq!(of(&[(16, 1000)]), None, "all are full");
        assert_eq!(of(&[(8, 100), (16, 1000)]), None, "a twentieth is wasted");
        assert_eq!(of(&[(1, 20)]), None, "not worth beginning for");
        assert_eq!(of(&[(4, 500), (8, 100), (16, 1000)]), Some(4), "those suffice");
        assert_eq!(of(&[(4, 100), (8, 500), (16, 500)]), Some(8));
        assert_eq!(of(&[(12, 1000)]), None, "moving three pages for the room of one is not worth it");
        assert_eq!(of(&[(11, 1000)]), Some(FILL_MOST));
    }
}
