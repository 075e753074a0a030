//! The nodes of each slot, by rendezvous hashing (Thaler and Ravishankar, 1998). Each node has a
//! score for each extent of slots, and the nodes with the highest scores keep the extent. When a
//! node is added or removed, only extents of that node move.

use super::url::COPIES_MAX;
use std::sync::atomic::{AtomicU16, AtomicU32, Ordering};
use weir_core::Slot;

/// Number of hash slots of a cluster.
pub(super) const HASH_SLOTS: usize = 1 << 14;

/// Number of slots in an extent. A volume looks for free slots in extents of the same size. So
/// while a node is away, only the extents on it take no new pages.
pub(super) const EXTENT: u32 = 1024;

/// The nodes that keep each extent of slots.
#[derive(Debug)]
pub(super) struct Placement {
    extents: Box<[[u16; COPIES_MAX]]>,
    copies: usize,
    /// For a cluster, the node of each hash slot, else `None`. For a cluster, `extents` holds each
    /// extent's hash slot in place of its nodes.
    owners: Option<Owners>,
}

/// The node of each hash slot, and the number of hash slots of each node.
#[derive(Debug)]
struct Owners {
    nodes: Box<[AtomicU16]>,
    counts: Box<[AtomicU32]>,
}

impl Placement {
    /// Places `slots` slots on `nodes`, with `copies` copies of each.
    pub(super) fn new(nodes: &[String], slots: u32, copies: usize) -> Self {
        let names: Vec<u64> = nodes.iter().map(|name| fnv1a(name)).collect();
        let place = |extent: u32| {
            let score = |&node: &usize| mix(names[node] ^ mix(u64::from(extent)));
            let mut order: Vec<usize> = (0..names.len()).collect();
            order.sort_by_key(|node| std::cmp::Reverse(score(node)));
            std::array::from_fn(|copy| order[copy.min(copies - 1)] as u16)
        };
        Placement { extents: (0..slots.div_ceil(EXTENT)).map(place).collect(), copies, owners: None }
    }

    /// Decides by a cluster's hash slots on which node each of `slots` slots of a store lies.
    /// `store` is the number of that store.
    /// `owners` has the node of each hash slot. The cluster has at most `nodes` nodes.
    pub(super) fn of_cluster(store: u64, slots: u32, owners: &[u16], nodes: usize) -> Self {
        let count = |node| owners.iter().filter(|owner| usize::from(**owner) == node).count() as u32;
        let owners = Owners {
            nodes: owners.iter().copied().map(AtomicU16::new).collect(),
            counts: (0..nodes).map(|node| AtomicU32::new(count(node))).collect(),
        };
        let place = |extent| [hash_slot(&tag(store, extent)); COPIES_MAX];
        let extents = (0..slots.div_ceil(EXTENT)).map(place).collect();
        Placement { extents, copies: 1, owners: Some(owners) }
    }

    pub(super) fn is_cluster(&self) -> bool {
        self.owners.is_some()
    }

    /// Notes that a node of the cluster serves a hash slot now.
    pub(super) fn moved(&self, hash: usize, node: usize) {
        let Some(owners) = &self.owners else { return };
        let before = owners.nodes[hash].swap(node as u16, Ordering::Relaxed);
        owners.counts[node].fetch_add(1, Ordering::Relaxed);
        owners.counts[usize::from(before)].fetch_sub(1, Ordering::Relaxed);
    }

    /// Whether a node of the cluster has hash slots. A node without them has no pages.
    pub(super) fn has_hash_slots(&self, node: usize) -> bool {
        self.owners.as_ref().is_some_and(|owners| owners.counts[node].load(Ordering::Relaxed) > 0)
    }

    /// The Redis key of a slot, in the store with the number `store`.
    pub(super) fn key(&self, store: u64, slot: Slot) -> String {
        match self.owners {
            None => format!("weir:{store:016x}:{}", slot.0),
            Some(_) => format!("weir:{{{}}}:{}", tag(store, slot.0 / EXTENT), slot.0),
        }
    }

    /// A key of the store with the number `store` that never has a value.
    pub(super) fn no_page(&self, store: u64) -> String {
        match self.owners {
            None => format!("weir:{store:016x}:none"),
            Some(_) => format!("weir:{{{}}}:none", tag(store, 0)),
        }
    }

    /// The node of a copy of the slot; `None` past the last copy.
    pub(super) fn node(&self, slot: Slot, copy: usize) -> Option<usize> {
        if copy >= self.copies {
            return None;
        }
        let extent = self.extents.get((slot.0 / EXTENT) as usize)?;
        Some(usize::from(match &self.owners {
            None => extent[copy],
            Some(owners) => owners.nodes[usize::from(extent[0])].load(Ordering::Relaxed),
        }))
    }

    /// The copy of the slot that a node keeps; `None`: the node keeps none.
    pub(super) fn copy_on(&self, slot: Slot, node: usize) -> Option<usize> {
        (0..self.copies).find(|copy| self.node(slot, *copy) == Some(node))
    }

    /// Number of nodes that keep each slot.
    pub(super) fn copies(&self) -> usize {
        self.copies
    }
}

/// The tag of an extent's keys: the part of a key that a cluster hashes. All keys of an extent have
/// the same tag, so they stay on one node.
fn tag(store: u64, extent: u32) -> String {
    format!("{store:016x}-{extent}")
}

/// The hash slot of the keys with this tag, by CRC-16 (XMODEM), as the cluster's specification
/// defines it.
fn hash_slot(tag: &str) -> u16 {
    let crc = tag.bytes().fold(0u16, |crc, byte| {
        (0..8).fold(crc ^ u16::from(byte) << 8, |crc, _| crc << 1 ^ if crc >> 15 == 1 { 0x1021 } else { 0 })
    });
    crc % HASH_SLOTS as u16
}

/// The hash FNV-1a, with 64 bits.
fn fnv1a(text: &str) -> u64 {
    text.bytes().fold(0xcbf2_9ce4_8422_2325, |hash, byte| {
        (hash ^ u64::from(byte)).wrapping_mul(0x0000_0100_0000_01b3)
    })
}

/// Mixes the bits of a hash. This is the last step of SplitMix64.
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
    fn a_hash_slot_is_the_one_that_clusters_use() {
        // The example of the cluster's specification: the CRC of 123456789 is 31C3.
        assert_eq!(hash_slot("123456789"), 0x31c3);
        let owners: Vec<u16> = (0..HASH_SLOTS).map(|hash| hash as u16 % 3).collect();
        let placement = Placement::of_cluster(7, 3000 * EXTENT, &owners, 10);
        let slot = Slot(5 * EXTENT + 1);
        assert_eq!(placement.key(7, slot), "weir:{0000000000000007-5}:5121");
        let hash = usize::from(hash_slot("0000000000000007-5"));
        assert_eq!(placement.node(slot, 0), Some(hash % 3));
        assert!(placement.has_hash_slots(2) && !placement.has_hash_slots(9));
        (0..HASH_SLOTS).filter(|hash| hash % 3 == 2).for_each(|hash| placement.moved(hash, 1));
        placement.moved(hash, 9);
        assert!(!placement.has_hash_slots(2) && placement.has_hash_slots(9));
        assert_eq!((placement.node(slot, 0), placement.node(slot, 1)), (Some(9), None));
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
