//! A model of all the work that mainline Linux does for a page reference that a socket hands out
//! and takes back. The model in [`xarray`](super::xarray) does only the least work that such a tree
//! needs.
//!
//! The model is written from the data structure's promises (Documentation/core-api/xarray.rst) and
//! the calls of the devmem code. It does more than the model in `xarray`, because the kernel does
//! each of these for every reference:
//!
//! | cost | the kernel's code |
//! |---|---|
//! | each step of a tree operation is a function call | `lib/xarray.c` is compiled once for every user; its steps are exported functions |
//! | an erase tests all three marks of the entry, and of the nodes above it | `xas_store()` of NULL: "marks of an empty entry are as those of a new one" |
//! | a top node that has only its first child is freed, and is made again later | `xas_store()` keeps the tree as low as it can be |
//! | a freed node is zeroed, and is used again only after a grace period | nodes go through `call_rcu()` to their slab |
//! | a page's count changes by atomic operations, in the page's own cache line | `tcp_recvmsg_dmabuf()` adds to `net_iov.pp_ref_count`, `napi_pp_put_page()` subtracts |
//! | the lock is released after each 16 returns | `sock_devmem_dontneed()` collects 16 pages under the lock, and drops their references after its release |
//!
//! [`weir_lease::Table`], which runs beside this model, counts a page's references too. Its counts
//! are bytes that one owner writes. The kernel has further costs that are not in the model:
//! softirqs off, `READ_ONCE` and RCU checks, retpolines, and the page pool's recycling.

use std::hint::spin_loop;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicI64, Ordering};

use weir_lease::{Place, Token};

use super::design::Design;

const SHIFT: u32 = 6;
const SLOTS: usize = 1 << SHIFT;
/// `MAX_SKB_FRAGS`: the number of indices that are reserved together.
const REFILL: usize = 17;
/// Number of pages whose references are dropped together.
const PUT: usize = 16;
/// Largest number of freed nodes that wait for the end of an RCU grace period.
const RESTING: usize = 64;

const MARKS: usize = 3;
/// The mark of free indices: XA_MARK_0.
const FREE: usize = 0;

/// Entries have the kernel's coding: 0 is none, odd is a value, 2 modulo 4 is internal to the tree.
const RESERVED: u64 = 257 << 2 | 2;

const fn value(page: u32) -> u64 {
    (page as u64) << 1 | 1
}

/// The lowest number of a node. Lower numbers would be taken for the tree's own constants, as low
/// addresses would be in the kernel.
const FIRST_NODE: u64 = 1025;

const fn node_of(entry: u64) -> Option<usize> {
    if entry & 3 == 2 && entry >> 2 >= FIRST_NODE { Some((entry >> 2) as usize) } else { None }
}

/// A node: `struct xa_node`, 576 bytes.
#[repr(C, align(64))]
struct Node {
    shift: u8,
    offset: u8,
    count: u8,
    values: u8,
    parent: u32,
    rcu: [u64; 4],
    slots: [u64; SLOTS],
    marks: [u64; MARKS],
}

const _: () = assert!(size_of::<Node>() == 576 || size_of::<Node>() == 640);

const NONE: u32 = u32::MAX;
const EMPTY: Node = Node {
    shift: 0,
    offset: 0,
    count: 0,
    values: 0,
    parent: NONE,
    rcu: [0; 4],
    slots: [0; SLOTS],
    marks: [0; MARKS],
};

/// The nodes of one thread's arrays.
#[derive(Default)]
struct Slab {
    nodes: Vec<Node>,
    ready: Vec<u32>,
    /// Freed nodes that a reader may still be reading.
    resting: Vec<u32>,
}

impl Slab {
    fn at(&mut self, id: u32) -> &mut Node {
        &mut self.nodes[id as usize]
    }

    #[inline(never)]
    fn make(&mut self, shift: u8, offset: u8, parent: u32) -> u32 {
        let id = self.ready.pop().unwrap_or_else(|| {
            self.nodes.push(EMPTY);
            (self.nodes.len() - 1) as u32
        });
        let node = self.at(id);
        (node.shift, node.offset, node.parent) = (shift, offset, parent);
        // Every index below this node is free.
        node.marks[FREE] = !0;
        id
    }

    #[inline(never)]
    fn free(&mut self, id: u32) {
        self.resting.push(id);
        if self.resting.len() == RESTING {
            while let Some(id) = self.resting.pop() {
                *self.at(id) = EMPTY;
                self.ready.push(id);
            }
        }
    }

    fn in_use(&self) -> usize {
        self.nodes.len() - self.ready.len() - self.resting.len()
    }
}

/// A tree: `struct xarray`.
struct Tree {
    lock: AtomicBool,
    head: u64,
}

/// The position of an operation in a tree: `struct xa_state`.
struct At {
    index: u32,
    node: u32,
    offset: u8,
}

const fn entry_of(id: u32) -> u64 {
    (id as u64 + FIRST_NODE) << 2 | 2
}

const fn id_of(entry: u64) -> Option<u32> {
    match node_of(entry) {
        Some(number) => Some((number as u64 - FIRST_NODE) as u32),
        None => None,
    }
}

/// The lowest index that is marked as free; if there is none, the first index beyond the tree.
#[inline(never)]
fn find_free(tree: &Tree, slab: &mut Slab) -> At {
    let Some(mut id) = id_of(tree.head) else { return At { index: 1, node: NONE, offset: 0 } };
    let top = slab.at(id);
    if top.marks[FREE] == 0 {
        return At { index: 1 << (u32::from(top.shift) + SHIFT), node: NONE, offset: 0 };
    }
    let mut index = 0;
    loop {
        let node = slab.at(id);
        let offset = node.marks[FREE].trailing_zeros();
        index |= offset << node.shift;
        match id_of(node.slots[offset as usize]) {
            Some(below) if node.shift > 0 => id = below,
            // The search ends at a leaf, or where a subtree does not exist yet. Index 0 is never
            // given out, so the lowest result is 1.
            _ => return At { index: index.max(1), node: id, offset: offset as u8 },
        }
    }
}

/// Goes down the tree to an index. Returns the position, and the entry there.
#[inline(never)]
fn walk(tree: &Tree, slab: &mut Slab, index: u32) -> (At, u64) {
    let mut at = At { index, node: NONE, offset: 0 };
    let mut entry = tree.head;
    while let Some(id) = id_of(entry) {
        let node = slab.at(id);
        if at.node == NONE && u64::from(index) >> node.shift >= SLOTS as u64 {
            return (at, 0);
        }
        (at.node, at.offset) = (id, (index >> node.shift) as u8 & (SLOTS as u8 - 1));
        entry = node.slots[usize::from(at.offset)];
    }
    (at, entry)
}

/// Makes the tree's missing nodes on the way to a position: from the root to the leaf that holds
/// it.
#[inline(never)]
fn create(tree: &mut Tree, slab: &mut Slab, at: &mut At) {
    if at.node == NONE {
        if tree.head == 0 {
            let mut shift = 0;
            while u64::from(at.index) >> shift >= SLOTS as u64 {
                shift += SHIFT as u8;
            }
            let id = slab.make(shift, 0, NONE);
            // With XA_FLAGS_ALLOC1, index 0 is never given out.
            slab.at(id).marks[FREE] &= !1;
            tree.head = entry_of(id);
        }
        while let Some(child) = id_of(tree.head)
            && u64::from(at.index) >> slab.at(child).shift >= SLOTS as u64
        {
            let (shift, has_free) = (slab.at(child).shift, slab.at(child).marks[FREE] != 0);
            let top = slab.make(shift + SHIFT as u8, 0, NONE);
            slab.at(child).parent = top;
            let node = slab.at(top);
            (node.slots[0], node.count) = (tree.head, 1);
            if !has_free {
                node.marks[FREE] &= !1;
            }
            tree.head = entry_of(top);
        }
        at.node = id_of(tree.head).expect("made above");
    }
    loop {
        let node = slab.at(at.node);
        let shift = node.shift;
        at.offset = (at.index >> shift) as u8 & (SLOTS as u8 - 1);
        if shift == 0 {
            return;
        }
        let below = match id_of(node.slots[usize::from(at.offset)]) {
            Some(below) => below,
            None => {
                let below = slab.make(shift - SHIFT as u8, at.offset, at.node);
                if at.index < SLOTS as u32 {
                    slab.at(below).marks[FREE] &= !1;
                }
                let node = slab.at(at.node);
                node.slots[usize::from(at.offset)] = entry_of(below);
                node.count += 1;
                below
            }
        };
        at.node = below;
    }
}

#[inline(never)]
fn set_mark(slab: &mut Slab, at: &At, mark: usize) {
    let (mut id, mut offset) = (at.node, at.offset);
    while id != NONE {
        let node = slab.at(id);
        if node.marks[mark] >> offset & 1 != 0 {
            return;
        }
        node.marks[mark] |= 1 << offset;
        (offset, id) = (node.offset, node.parent);
    }
}

#[inline(never)]
fn clear_mark(slab: &mut Slab, at: &At, mark: usize) {
    let (mut id, mut offset) = (at.node, at.offset);
    while id != NONE {
        let node = slab.at(id);
        if node.marks[mark] >> offset & 1 == 0 {
            return;
        }
        node.marks[mark] &= !(1 << offset);
        if node.marks[mark] != 0 {
            return;
        }
        (offset, id) = (node.offset, node.parent);
    }
}

/// Puts an entry at position `at`, and returns the old entry.
#[inline(never)]
fn store(tree: &mut Tree, slab: &mut Slab, at: &mut At, entry: u64) -> u64 {
    if entry != 0 && (at.node == NONE || slab.at(at.node).shift > 0) {
        create(tree, slab, at);
    }
    let was = slab.at(at.node).slots[usize::from(at.offset)];
    if was == entry {
        return was;
    }
    if entry == 0 {
        for mark in 0..MARKS {
            if mark == FREE { set_mark(slab, at, mark) } else { clear_mark(slab, at, mark) }
        }
    }
    let node = slab.at(at.node);
    node.slots[usize::from(at.offset)] = entry;
    node.count = node.count + u8::from(entry != 0) - u8::from(was != 0);
    node.values = node.values + (entry & 1) as u8 - (was & 1) as u8;
    if entry == 0 {
        prune(tree, slab, at.node);
    }
    was
}

/// Frees empty nodes from a leaf upwards. Then lowers the tree: while the top node has only its
/// first child, that child becomes the top.
#[inline(never)]
fn prune(tree: &mut Tree, slab: &mut Slab, from: u32) {
    let mut id = from;
    while slab.at(id).count == 0 {
        let (parent, offset) = (slab.at(id).parent, slab.at(id).offset);
        slab.free(id);
        if parent == NONE {
            tree.head = 0;
            return;
        }
        let node = slab.at(parent);
        node.slots[usize::from(offset)] = 0;
        node.count -= 1;
        id = parent;
    }
    while slab.at(id).parent == NONE
        && slab.at(id).count == 1
        && slab.at(id).shift > 0
        && let Some(only) = id_of(slab.at(id).slots[0])
    {
        tree.head = entry_of(only);
        slab.at(only).parent = NONE;
        slab.free(id);
        id = only;
    }
}

/// The model of `__xa_alloc()`.
#[inline(never)]
fn alloc(tree: &mut Tree, slab: &mut Slab, entry: u64) -> u32 {
    let mut at = find_free(tree, slab);
    store(tree, slab, &mut at, entry);
    clear_mark(slab, &at, FREE);
    // The lowest free index of a missing subtree is the subtree's first index.
    let leaf = slab.at(at.node);
    debug_assert_eq!(leaf.shift, 0);
    at.index
}

/// The model of `__xa_cmpxchg()`.
#[inline(never)]
fn exchange(tree: &mut Tree, slab: &mut Slab, index: u32, old: u64, entry: u64) -> u64 {
    let (mut at, was) = walk(tree, slab, index);
    if was == old {
        store(tree, slab, &mut at, entry);
        clear_mark(slab, &at, FREE);
    }
    was
}

/// The model of `__xa_erase()`.
#[inline(never)]
fn erase(tree: &mut Tree, slab: &mut Slab, index: u32) -> u64 {
    let (mut at, was) = walk(tree, slab, index);
    if was == 0 { 0 } else { store(tree, slab, &mut at, 0) }
}

/// A page of a binding: `struct net_iov`.
#[repr(C, align(64))]
#[derive(Default)]
struct Page {
    pool: u64,
    refs: AtomicI64,
}

/// An xarray for each connection of one thread, and the pages of the binding that all threads
/// share.
pub struct KernelXArrays {
    slab: Slab,
    trees: Vec<Tree>,
    pages: Arc<Box<[Page]>>,
}

impl KernelXArrays {
    /// Makes a part of the design for each entry of `connections`: one thread's part, with that
    /// many connections. All parts share the pages.
    pub fn parts(connections: impl IntoIterator<Item = u32>, pages: u32) -> Vec<Self> {
        let pages: Arc<Box<[Page]>> = Arc::new((0..pages).map(|_| Page::default()).collect());
        let part = |connections| KernelXArrays {
            slab: Slab::default(),
            trees: (0..connections).map(|_| Tree { lock: AtomicBool::new(false), head: 0 }).collect(),
            pages: Arc::clone(&pages),
        };
        connections.into_iter().map(part).collect()
    }
}

/// Holds the tree's spinlock while `body` runs.
fn locked<T>(tree: &mut Tree, body: impl FnOnce(&mut Tree) -> T) -> T {
    while tree.lock.compare_exchange_weak(false, true, Ordering::Acquire, Ordering::Relaxed).is_err() {
        spin_loop();
    }
    let result = body(tree);
    tree.lock.store(false, Ordering::Release);
    result
}

impl KernelXArrays {
    /// Erases the tokens' entries under the tree's lock, and drops the pages' references after its
    /// release. Calls `put` with each page, and with whether that was the page's last reference.
    fn give_each(&mut self, connection: u32, tokens: &[Token], mut put: impl FnMut(u32, bool)) {
        let tree = &mut self.trees[connection as usize];
        for tokens in tokens.chunks(PUT) {
            let mut back = [0; PUT];
            locked(tree, |tree| {
                for (back, &Token(token)) in back.iter_mut().zip(tokens) {
                    *back = erase(tree, &mut self.slab, token);
                    assert!(*back & 1 != 0, "the harness gives back only what is out");
                }
            });
            for &entry in &back[..tokens.len()] {
                let page = (entry >> 1) as u32;
                put(page, put_page(&self.pages[page as usize]));
            }
        }
    }
}

/// The model of `napi_pp_put_page()` for a page that may have other references. Returns whether the
/// dropped reference was the last one.
#[inline(never)]
fn put_page(page: &Page) -> bool {
    assert_eq!(page.pool, 0, "it is the pool's");
    page.refs.fetch_sub(1, Ordering::AcqRel) == 1
}

impl Design for KernelXArrays {
    const NAME: &'static str = "xarray-kernel";

    fn take(&mut self, connection: u32, pages: &[Place], tokens: &mut [Token]) {
        let tree = &mut self.trees[connection as usize];
        for (pages, tokens) in pages.chunks(REFILL).zip(tokens.chunks_mut(REFILL)) {
            locked(tree, |tree| {
                tokens.iter_mut().for_each(|token| token.0 = alloc(tree, &mut self.slab, RESERVED));
            });
            for place in pages {
                self.pages[place.page as usize].refs.fetch_add(1, Ordering::Relaxed);
            }
            locked(tree, |tree| {
                for (token, place) in tokens.iter().zip(pages) {
                    let was = exchange(tree, &mut self.slab, token.0, RESERVED, value(place.page));
                    assert_eq!(was, RESERVED, "reserved under the lock before");
                }
            });
        }
    }

    fn give(&mut self, connection: u32, tokens: &[Token]) -> u32 {
        let mut lasts = 0;
        self.give_each(connection, tokens, |_, last| lasts += u32::from(last));
        lasts
    }

    fn give_pages(&mut self, connection: u32, tokens: &[Token], back: &mut Vec<u32>) {
        self.give_each(connection, tokens, |page, _| back.push(page));
    }

    /// Bytes of the xarrays: their heads, and their nodes in use. A page's own structure
    /// (`net_iov`) does not count, since every design has one for each page.
    fn bytes(&self) -> usize {
        self.slab.in_use() * 576 + self.trees.len() * 16
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::collections::BTreeMap;

    #[test]
    fn the_model_gives_the_lowest_free_index_and_keeps_its_tree_low() {
        let (mut slab, mut tree) = (Slab::default(), Tree { lock: AtomicBool::new(false), head: 0 });
        let mut model = BTreeMap::new();
        let mut random = 1u64;
        for step in 1..60_000u32 {
            random = random.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1);
            // The test lets the tree grow past two levels and shrink to nothing, several times.
            if (step / 6_000) % 2 == 0 || model.is_empty() {
                let index = alloc(&mut tree, &mut slab, RESERVED);
                if step % 64 == 0 {
                    assert_eq!(Some(index), (1..).find(|index| !model.contains_key(index)));
                }
                assert_eq!(exchange(&mut tree, &mut slab, index, RESERVED, value(step)), RESERVED);
                assert_eq!(model.insert(index, step), None);
            } else {
                let nth = (random >> 33) as u32 % (model.last_key_value().unwrap().0 + 1);
                let (&index, &step) = model.range(nth..).next().unwrap();
                assert_eq!(erase(&mut tree, &mut slab, index), value(step));
                assert_eq!(erase(&mut tree, &mut slab, index), 0);
                model.remove(&index);
            }
            let levels = id_of(tree.head).map_or(0, |top| u32::from(slab.at(top).shift) / SHIFT + 1);
            let highest = model.last_key_value().map_or(0, |(&index, _)| index);
            assert_eq!(levels, if highest == 0 { 0 } else { highest.ilog(SLOTS as u32) + 1 }, "{highest}");
        }
        while let Some((index, step)) = model.pop_last() {
            assert_eq!(erase(&mut tree, &mut slab, index), value(step));
        }
        assert_eq!((tree.head, slab.in_use()), (0, 0), "every node was freed");
    }

    #[test]
    fn a_pages_last_return_is_seen_across_connections_and_threads() {
        let mut parts = KernelXArrays::parts([2, 1], 8);
        let (mut here, mut there) = ([Token(0); 2], [Token(0)]);
        parts[0].take(1, &[Place::page(0, 3); 2], &mut here);
        parts[1].take(0, &[Place::page(0, 3)], &mut there);
        assert_eq!((parts[0].give(1, &here), parts[1].give(0, &there)), (0, 1));
    }
}
