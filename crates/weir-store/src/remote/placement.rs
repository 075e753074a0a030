//! The nodes of each slot, by rendezvous hashing (Thaler and Ravishankar, 1998): each node has a
//! score for each extent of slots, and the highest keep it. A node more or less moves only the
//! extents that it wins or had.

use super::url::COPIES_MAX;
use weir_core::Slot;

/// Slots of an extent: as many as a volume places together, so that a node that is away stops new
/// pages on its own extents only.
const EXTENT: u32 = 1024;

/// For each extent its nodes, the first one first.
#[derive(Debug)]
pub(super) struct Placement {
    extents: Box<[[u16; COPIES_MAX]]>,
    copies: usize,
}

impl Placement {
    /// Places `slots` slots on `nodes`, `copies` of each.
    pub(super) fn new(nodes: &[String], slots: u32, copies: usize) -> Self {
        let names: Vec<u64> = nodes.iter().map(|name| fnv1a(name)).collect();
        let place = |extent: u32| {
            let score = |&node: &usize| mix(names[node] ^ mix(u64::from(extent)));
            let mut order: Vec<usize> = (0..names.len()).collect();
            order.sort_by_key(|node| std::cmp::Reverse(score(node)));
            std::array::from_fn(|copy| order[copy.min(copies - 1)] as u16)
        };
        Placement { extents: (0..slots.div_ceil(EXTENT)).map(place).collect(), copies }
    }

    /// The node of a copy of the slot; `None` past the last copy.
    pub(super) fn node(&self, slot: Slot, copy: usize) -> Option<usize> {
        if copy >= self.copies {
            return None;
        }
        let extent = self.extents.get((slot.0 / EXTENT) as usize)?;
        Some(usize::from(extent[copy]))
    }

    /// The copy of the slot that a node keeps; `None` if it keeps none.
    pub(super) fn copy_on(&self, slot: Slot, node: usize) -> Option<usize> {
        (0..self.copies).find(|copy| self.node(slot, *copy) == Some(node))
    }

    /// How many nodes keep each slot.
    pub(super) fn copies(&self) -> usize {
        self.copies
    }
}

/// FNV-1a, 64 bits.
fn fnv1a(text: &str) -> u64 {
    text.bytes().fold(0xcbf2_9ce4_8422_2325, |hash, byte| {
        (hash ^ u64::from(byte)).wrapping_mul(0x0000_0100_0000_01b3)
    })
}

/// The finaliser of SplitMix64.
fn mix(bits: u64) -> u64 {
    let z = (bits ^ (bits >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
    let z = (z ^ (z >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
    z ^ (z >> 31)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn nodes(count: usize) -> Vec<String> {
        (0..count).map(|node| format!("10.0.0.{node}:6379")).collect()
    }

    #[test]
    fn each_node_has_its_share_and_two_copies_lie_on_two_nodes() {
        let placement = Placement::new(&nodes(3), 3000 * EXTENT, 2);
        let mut counts = [0; 3];
        for extent in 0..3000 {
            let slot = Slot(extent * EXTENT + 5);
            let (first, second) = (placement.node(slot, 0).unwrap(), placement.node(slot, 1).unwrap());
            assert_ne!(first, second);
            assert_eq!(placement.node(slot, 2), None);
            counts[first] += 1;
        }
        assert!(counts.iter().all(|count| (900..1100).contains(count)), "{counts:?}");
    }

    #[test]
    fn a_node_more_takes_extents_and_moves_no_other() {
        let (three, four) = (nodes(3), nodes(4));
        let (before, after) =
            (Placement::new(&three, 1000 * EXTENT, 1), Placement::new(&four, 1000 * EXTENT, 1));
        let mut moved = 0;
        for slot in (0..1000).map(|extent| Slot(extent * EXTENT)) {
            let (was, is) = (before.node(slot, 0), after.node(slot, 0));
            assert!(was == is || is == Some(3), "{slot:?} moved from {was:?} to {is:?}");
            moved += usize::from(was != is);
        }
        assert!((200..300).contains(&moved), "{moved} of 1000");
    }
}
