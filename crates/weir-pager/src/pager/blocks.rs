//! The blocks of managed memory, and the place of each one's content.

use crate::BLOCK;
use crate::BLOCK_PAGES;
use crate::policy::History;
use std::collections::BTreeMap;

/// The state of a block: where its content is.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum State {
    /// No content is stored: missing pages are zeros.
    Empty,
    /// The block is in place; missing pages are zeros.
    Resident,
    /// The block is in a slot of the staging memory, and is being written to the store.
    Writing(usize),
    /// The block is being read from the store into a slot.
    Filling(usize),
    /// The whole block is in a slot of the staging memory, and in the store too.
    Ready(usize),
    /// The whole block is in a slot of the staging memory, and waits to be moved back into place.
    /// The store has no copy of it.
    Back(usize),
    /// The block is in the store. Its single pages, which [`there`](Block::there) marks, are in
    /// place.
    Stored,
    /// The block's content is lost.
    Lost,
}

/// A bit for each page of a block.
pub type Bits = [u64; BLOCK_PAGES / 64];

/// The bit of a page.
pub fn has(bits: &Bits, page: usize) -> bool {
    bits[page / 64] >> (page % 64) & 1 != 0
}

/// Sets or clears the bit of a page.
pub fn set(bits: &mut Bits, page: usize, is_set: bool) {
    bits[page / 64] = bits[page / 64] & !(1 << (page % 64)) | u64::from(is_set) << (page % 64);
}

/// The pages of one block that have gone a short while ago: in this epoch or in the last one.
#[derive(Clone, Debug, Default)]
pub struct Ghosts {
    epoch: u32,
    /// A bit for each page that has gone in `epoch`, and in the epoch before.
    now: Bits,
    before: Bits,
}

impl Ghosts {
    /// Notes that a page has gone in this epoch.
    pub fn note(&mut self, page: usize, epoch: u32) {
        let passed = epoch.wrapping_sub(self.epoch);
        if passed > 0 {
            let last = std::mem::take(&mut self.now);
            self.before = if passed == 1 { last } else { Bits::default() };
            self.epoch = epoch;
        }
        set(&mut self.now, page, true);
    }

    /// Whether a page had gone a short while before the beginning of this epoch, or later.
    pub fn has(&self, page: usize, epoch: u32) -> bool {
        match epoch.wrapping_sub(self.epoch) {
            0 => has(&self.now, page) || has(&self.before, page),
            1 => has(&self.now, page),
            _ => false,
        }
    }
}

/// The hashes of a block's pages, by page.
pub type Hashes = Box<[u64]>;

/// Makes hashes, all unknown. `None` without memory for them.
pub fn hashes() -> Option<Hashes> {
    let mut hashes = Vec::new();
    hashes.try_reserve_exact(BLOCK_PAGES).ok()?;
    hashes.resize(BLOCK_PAGES, 0);
    Some(hashes.into_boxed_slice())
}

/// A block: 2 MiB of address space.
#[derive(Clone, Debug)]
pub struct Block {
    pub at: usize,
    pub state: State,
    /// Whether the block is partial: a part of its 2 MiB is not managed memory, or belongs to a
    /// whole block at another address. A partial block begins at a multiple of 2 MiB. It has only
    /// single pages, and its state is `Stored`. A page of the 2 MiB that is not the block's own is
    /// marked in `zeros`, and not in `there`.
    pub is_partial: bool,
    /// The number of the first page of the block's room in the store; `None` without room.
    pub room: Option<u64>,
    /// For each page the hash of its content in the room, or 0 if the pager does not know this
    /// content. `None`: the pager knows the content of no page.
    pub stored: Option<Hashes>,
    /// A bit for each page that is zeros and is not in the store.
    pub zeros: Bits,
    /// A bit for each single page that is in place. The store may hold older content of it.
    pub there: Bits,
    /// The single pages that have gone a short while ago.
    pub ghosts: Ghosts,
    /// The page faults that the policy has seen on this block.
    pub history: History,
    /// A bit for each page whose content the program has dropped, and which the kernel may not have
    /// removed yet. The pager writes the block out only after the kernel has removed these pages.
    /// Otherwise their old content would come back.
    pub ending: Option<Box<Bits>>,
}

impl Block {
    pub fn is_there(&self, page: usize) -> bool {
        has(&self.there, page)
    }

    pub fn count_there(&self) -> usize {
        self.there.iter().map(|pages| pages.count_ones() as usize).sum()
    }

    /// Whether the page is in the store, and not in place.
    pub fn is_away(&self, page: usize) -> bool {
        !self.is_zero(page) && !self.is_there(page)
    }

    /// Whether the program has dropped the page, and the kernel may not have removed it yet.
    pub fn is_ending(&self, page: usize) -> bool {
        self.ending.as_ref().is_some_and(|ending| has(ending, page))
    }

    /// Notes that the dropped content of the page is gone.
    pub fn clear_ending(&mut self, page: usize) {
        if let Some(ending) = &mut self.ending {
            set(ending, page, false);
        }
    }

    /// Whether a partial block has no page in place, none in the store, and none in `ending`.
    pub fn is_nothing(&self) -> bool {
        let is_none = |pages: &Bits| pages.iter().all(|pages| *pages == 0);
        self.zeros.iter().all(|pages| *pages == u64::MAX)
            && is_none(&self.there)
            && self.ending.as_deref().is_none_or(is_none)
    }

    /// Notes that the room gets this page with this hash. Returns whether the room already had the
    /// page with the same hash. Returns false for a block without hashes.
    pub fn stores(&mut self, page: usize, hash: impl FnOnce() -> u64) -> bool {
        let Some(stored) = &mut self.stored else { return false };
        let hash = hash();
        std::mem::replace(&mut stored[page], hash) == hash
    }

    pub fn is_zero(&self, page: usize) -> bool {
        has(&self.zeros, page)
    }

    pub fn set_zero(&mut self, page: usize, is_zero: bool) {
        set(&mut self.zeros, page, is_zero);
    }
}

/// All blocks, by number and by address. A block that moves keeps its number.
#[derive(Debug, Default)]
pub struct Blocks {
    all: Vec<Block>,
    unused: Vec<u32>,
    by_address: BTreeMap<usize, u32>,
}

impl Blocks {
    pub fn get(&self, id: u32) -> &Block {
        &self.all[id as usize]
    }

    pub fn len(&self) -> usize {
        self.by_address.len()
    }

    /// Whether there is a block with this number.
    pub fn is_known(&self, id: u32) -> bool {
        self.by_address.get(&self.all[id as usize].at) == Some(&id)
    }

    pub fn get_mut(&mut self, id: u32) -> &mut Block {
        &mut self.all[id as usize]
    }

    /// The block to which this address belongs: a whole block, or else a partial one.
    pub fn at(&self, address: usize) -> Option<u32> {
        let mut around = self.ids_in(address, address + 1);
        let first = around.next()?;
        Some(around.find(|&id| !self.get(id).is_partial).unwrap_or(first))
    }

    /// The blocks whose address space contains a byte of `start..end`. A partial block among them
    /// may have no page in that range.
    pub fn ids_in(&self, start: usize, end: usize) -> impl Iterator<Item = u32> + '_ {
        self.by_address.range((start + 1).saturating_sub(BLOCK)..end).map(|(_, &id)| id)
    }

    pub fn add(&mut self, at: usize, state: State) -> u32 {
        let block = Block {
            at,
            state,
            is_partial: false,
            room: None,
            stored: None,
            zeros: [0; BLOCK_PAGES / 64],
            there: [0; BLOCK_PAGES / 64],
            ghosts: Ghosts::default(),
            history: History::default(),
            ending: None,
        };
        let id = match self.unused.pop() {
            Some(id) => {
                self.all[id as usize] = block;
                id
            }
            None => {
                self.all.push(block);
                self.all.len() as u32 - 1
            }
        };
        let before = self.by_address.insert(at, id);
        debug_assert!(before.is_none(), "two blocks at one address");
        id
    }

    /// Adds a partial block, of which nothing is known yet.
    pub fn add_partial(&mut self, at: usize) -> u32 {
        let id = self.add(at, State::Stored);
        let block = self.get_mut(id);
        block.is_partial = true;
        block.zeros = [u64::MAX; BLOCK_PAGES / 64];
        id
    }

    /// Removes the block from the tables; its number may be used again.
    pub fn remove(&mut self, id: u32) -> Block {
        let block = self.all[id as usize].clone();
        self.by_address.remove(&block.at);
        self.unused.push(id);
        block
    }

    /// Updates the addresses of whole blocks that begin in `from..from + bytes` after that memory
    /// was moved.
    pub fn shift(&mut self, from: usize, to: usize, bytes: usize) {
        let all = &self.all;
        let is_moved = |_: &usize, id: &mut u32| !all[*id as usize].is_partial;
        let moved: Vec<_> = self.by_address.extract_if(from..from + bytes, is_moved).collect();
        for (at, id) in moved {
            let at = at - from + to;
            self.all[id as usize].at = at;
            self.by_address.insert(at, id);
        }
    }

    pub fn ids(&self) -> impl Iterator<Item = u32> + '_ {
        self.by_address.values().copied()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_block_is_found_by_each_of_its_bytes_before_and_after_it_moved() {
        let mut blocks = Blocks::default();
        let ids: Vec<u32> = (10..14).map(|number| blocks.add(number * BLOCK, State::Empty)).collect();
        assert_eq!(blocks.at(10 * BLOCK - 1), None);
        assert_eq!(blocks.at(11 * BLOCK - 1), Some(ids[0]));
        let to = 100 * BLOCK + 4096;
        blocks.shift(11 * BLOCK, to, 2 * BLOCK);
        assert_eq!([blocks.at(11 * BLOCK), blocks.at(12 * BLOCK)], [None, None]);
        assert_eq!([blocks.at(to), blocks.at(to + 2 * BLOCK - 1)], [Some(ids[1]), Some(ids[2])]);
        assert_eq!([blocks.at(10 * BLOCK), blocks.at(13 * BLOCK)], [Some(ids[0]), Some(ids[3])]);
        assert_eq!(blocks.ids_in(to - BLOCK, to + 1).collect::<Vec<_>>(), [ids[1]]);
        assert_eq!(blocks.remove(ids[1]).at, to);
        assert_eq!(blocks.at(to), None);
    }
}
