//! A model of mainline Linux's design: one xarray per socket, which allocates the lowest free
//! index, as `xa_init_flags(&sk->sk_user_frags, XA_FLAGS_ALLOC1)` asks for.
//!
//! The model is written from the data structure's description (Documentation/core-api/xarray.rst)
//! and its sizes. It is a radix tree of nodes with 64 slots. Each node has a bitmap of free slots;
//! in an inner node, a bit says whether anything below is free. A spinlock is held for each change,
//! and a node is freed when its last entry goes. Nodes come from a free list, which makes the model
//! faster: the kernel's come from kmem_cache and go through RCU. As in `tcp_xa_pool_refill` and
//! `tcp_xa_pool_commit`, up to 17 indices are reserved under one lock and filled under another. As
//! in `sock_devmem_dontneed`, a batch is erased under one lock.
//!
//! The model is leaner than the kernel's code, which serves every use of an xarray and takes its
//! nodes through RCU: `lab/run lease` measures that code. The model also does less than
//! weir-lease's table. It does not count a page's references, which is the page pool's task in the
//! kernel. `no_counts_ns_net` measures the table without that count.

use std::hint::spin_loop;
use std::sync::atomic::{AtomicBool, Ordering};

use weir_lease::{Place, Token};

use super::design::Design;

const SHIFT: u32 = 6;
const SLOTS: usize = 1 << SHIFT;
/// `sizeof(struct xa_node)` on 64-bit kernels: 64 slots, three tags of 64 bits, parent, list and
/// counts.
const KERNEL_NODE_BYTES: usize = 576;
/// `sizeof(struct xarray)`: lock, flags, head.
const KERNEL_ROOT_BYTES: usize = 16;
/// `MAX_SKB_FRAGS`: the number of indices that are reserved together.
const REFILL: usize = 17;

/// XA_ZERO_ENTRY: an index that is taken and has no entry yet.
const RESERVED: u64 = u64::MAX;

type NodeId = u32;
const NONE: NodeId = u32::MAX;

/// A node of the tree. The slots of a leaf (`shift` 0) hold entries, those of an inner node hold
/// nodes. A slot of 0 is empty.
struct Node {
    shift: u32,
    offset: u32,
    count: u32,
    parent: NodeId,
    /// A bit for each slot that is free, or has something free below: XA_FREE_MARK.
    free: u64,
    slots: [u64; SLOTS],
}

/// Nodes of all arrays of one thread, reused as in a slab.
#[derive(Default)]
struct Slab {
    nodes: Vec<Node>,
    unused: Vec<NodeId>,
}

impl Slab {
    fn make(&mut self, shift: u32, offset: u32, parent: NodeId) -> NodeId {
        let node = Node { shift, offset, count: 0, parent, free: !0, slots: [0; SLOTS] };
        if let Some(id) = self.unused.pop() {
            self.nodes[id as usize] = node;
            return id;
        }
        self.nodes.push(node);
        (self.nodes.len() - 1) as NodeId
    }
}

struct XArray {
    lock: AtomicBool,
    head: NodeId,
}

/// The design: an xarray per connection.
pub struct XArrays {
    slab: Slab,
    arrays: Vec<XArray>,
}

impl XArrays {
    pub fn new(connections: u32) -> Self {
        let arrays = (0..connections).map(|_| XArray { lock: AtomicBool::new(false), head: NONE }).collect();
        XArrays { slab: Slab::default(), arrays }
    }
}

/// Holds the array's spinlock while `body` runs.
fn locked<T>(array: &mut XArray, body: impl FnOnce(&mut NodeId) -> T) -> T {
    while array.lock.compare_exchange_weak(false, true, Ordering::Acquire, Ordering::Relaxed).is_err() {
        spin_loop();
    }
    let result = body(&mut array.head);
    array.lock.store(false, Ordering::Release);
    result
}

/// Stores `entry` at the lowest free index and returns the index.
fn alloc(slab: &mut Slab, head: &mut NodeId, entry: u64) -> u32 {
    if *head == NONE {
        *head = slab.make(0, 0, NONE);
        // With XA_FLAGS_ALLOC1, index 0 is never given out.
        slab.nodes[*head as usize].free &= !1;
    }
    // A full tree grows at the top: the old head becomes the first child of a new one.
    while slab.nodes[*head as usize].free == 0 {
        let child = *head;
        let shift = slab.nodes[child as usize].shift + SHIFT;
        let top = slab.make(shift, 0, NONE);
        slab.nodes[child as usize].parent = top;
        let node = &mut slab.nodes[top as usize];
        node.slots[0] = u64::from(child) + 1;
        node.count = 1;
        node.free &= !1;
        *head = top;
    }
    let mut at = *head;
    let mut index = 0;
    loop {
        let node = &slab.nodes[at as usize];
        let (shift, offset) = (node.shift, node.free.trailing_zeros());
        index |= offset << shift;
        if shift == 0 {
            break;
        }
        let slot = node.slots[offset as usize];
        at = if slot == 0 {
            let child = slab.make(shift - SHIFT, offset, at);
            if index == 0 && shift == SHIFT {
                slab.nodes[child as usize].free &= !1;
            }
            let node = &mut slab.nodes[at as usize];
            node.slots[offset as usize] = u64::from(child) + 1;
            node.count += 1;
            child
        } else {
            (slot - 1) as NodeId
        };
    }
    let node = &mut slab.nodes[at as usize];
    node.slots[index as usize % SLOTS] = entry;
    node.count += 1;
    let mut offset = index % SLOTS as u32;
    // Clear the slot's free bit. If no free bit of the node is left, clear the node's own bit in
    // its parent, and so on upwards.
    while at != NONE {
        let node = &mut slab.nodes[at as usize];
        node.free &= !(1 << offset);
        if node.free != 0 {
            break;
        }
        (offset, at) = (node.offset, node.parent);
    }
    index
}

/// Replaces the entry at an index by `entry`, and returns the old one.
fn replace(slab: &mut Slab, head: NodeId, index: u32, entry: u64) -> u64 {
    let mut at = head;
    loop {
        let node = &mut slab.nodes[at as usize];
        let slot = &mut node.slots[(index >> node.shift) as usize % SLOTS];
        if node.shift == 0 {
            return std::mem::replace(slot, entry);
        }
        at = (*slot - 1) as NodeId;
    }
}

/// Removes the entry at `index` and returns it, 0 if there is none.
fn erase(slab: &mut Slab, head: &mut NodeId, index: u32) -> u64 {
    let mut at = *head;
    if at == NONE || u64::from(index) >> slab.nodes[at as usize].shift >= SLOTS as u64 {
        return 0;
    }
    loop {
        let node = &slab.nodes[at as usize];
        let slot = node.slots[(index >> node.shift) as usize % SLOTS];
        if slot == 0 {
            return 0;
        }
        if node.shift == 0 {
            break;
        }
        at = (slot - 1) as NodeId;
    }
    let node = &mut slab.nodes[at as usize];
    let entry = std::mem::take(&mut node.slots[index as usize % SLOTS]);
    node.count -= 1;
    let mut offset = index % SLOTS as u32;
    let mut up = at;
    while up != NONE {
        let node = &mut slab.nodes[up as usize];
        let marked = node.free >> offset & 1 != 0;
        node.free |= 1 << offset;
        if marked {
            break;
        }
        (offset, up) = (node.offset, node.parent);
    }
    // Free the nodes from which the last entry was removed.
    while slab.nodes[at as usize].count == 0 {
        let Node { parent, offset, .. } = slab.nodes[at as usize];
        slab.unused.push(at);
        if parent == NONE {
            *head = NONE;
            return entry;
        }
        let node = &mut slab.nodes[parent as usize];
        node.slots[offset as usize] = 0;
        node.count -= 1;
        at = parent;
    }
    entry
}

impl Design for XArrays {
    const NAME: &'static str = "xarray";

    fn take(&mut self, connection: u32, pages: &[Place], tokens: &mut [Token]) {
        let array = &mut self.arrays[connection as usize];
        for (pages, tokens) in pages.chunks(REFILL).zip(tokens.chunks_mut(REFILL)) {
            locked(array, |head| {
                for token in &mut *tokens {
                    token.0 = alloc(&mut self.slab, head, RESERVED);
                }
            });
            locked(array, |head| {
                for (token, place) in tokens.iter().zip(pages) {
                    let was = replace(&mut self.slab, *head, token.0, u64::from(place.page) + 1);
                    assert_eq!(was, RESERVED, "reserved under the lock before");
                }
            });
        }
    }

    fn give(&mut self, connection: u32, tokens: &[Token]) -> u32 {
        let array = &mut self.arrays[connection as usize];
        locked(array, |head| {
            for &Token(token) in tokens {
                let entry = erase(&mut self.slab, head, token);
                assert_ne!(entry, 0, "the harness gives back only what is out");
            }
        });
        0
    }

    fn give_pages(&mut self, connection: u32, tokens: &[Token], back: &mut Vec<u32>) {
        let array = &mut self.arrays[connection as usize];
        locked(array, |head| {
            for &Token(token) in tokens {
                let entry = erase(&mut self.slab, head, token);
                assert_ne!(entry, 0, "the client gives back what it holds");
                back.push((entry - 1) as u32);
            }
        });
    }

    /// Bytes that the kernel's structures would take for these arrays and for their nodes in use.
    fn bytes(&self) -> usize {
        (self.slab.nodes.len() - self.slab.unused.len()) * KERNEL_NODE_BYTES
            + self.arrays.len() * KERNEL_ROOT_BYTES
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::collections::BTreeMap;

    #[test]
    fn the_model_gives_the_lowest_free_index_and_finds_what_it_stored() {
        let mut slab = Slab::default();
        let mut head = NONE;
        let mut model = BTreeMap::new();
        let mut random = 1u64;
        for step in 1..100_000u64 {
            random = random.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1);
            // The test lets the tree grow past two levels and shrink to nothing, several times.
            let grow = (step / 10_000) % 2 == 0;
            if grow || model.is_empty() {
                let index = alloc(&mut slab, &mut head, step);
                if step % 64 == 0 {
                    let lowest = (1..).find(|index| !model.contains_key(index));
                    assert_eq!(Some(index), lowest);
                }
                assert_eq!(model.insert(index, step), None);
            } else {
                let nth = (random >> 33) as u32 % (model.last_key_value().unwrap().0 + 1);
                let (&index, &entry) = model.range(nth..).next().unwrap();
                assert_eq!(erase(&mut slab, &mut head, index), entry);
                assert_eq!(erase(&mut slab, &mut head, index), 0);
                model.remove(&index);
            }
        }
        while let Some((index, entry)) = model.pop_last() {
            assert_eq!(erase(&mut slab, &mut head, index), entry);
        }
        assert_eq!((head, slab.nodes.len()), (NONE, slab.unused.len()), "every node was freed");
    }

    #[test]
    fn sixty_four_references_take_three_nodes_as_in_the_kernel() {
        let mut arrays = XArrays::new(1);
        let mut tokens = [Token(0); 64];
        arrays.take(0, &[Place::page(0, 7); 64], &mut tokens);
        assert_eq!((tokens[0], tokens[63]), (Token(1), Token(64)));
        assert_eq!(arrays.bytes(), 3 * 576 + 16);
    }
}
