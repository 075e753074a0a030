//! Which block is where.

use crate::BLOCK;
use crate::BLOCK_PAGES;
use std::collections::BTreeMap;

/// The place of a block's content.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum State {
    /// Nowhere: zeros, as far as pages are missing.
    Empty,
    /// In place; pages that are missing are zeros.
    Resident,
    /// In a slot of the staging memory, on its way out.
    Writing(usize),
    /// In a slot, as far as it has come from the store.
    Filling(usize),
    /// In a slot, whole, and in the store too.
    Ready(usize),
    /// In a slot, whole, and nowhere else: on its way back into place.
    Back(usize),
    /// In the store, but for the pages that are [`there`](Block::there).
    Stored,
    /// Nowhere, though it was something.
    Lost,
}

/// 2 MiB of managed memory.
#[derive(Clone, Debug)]
pub struct Block {
    pub at: usize,
    pub state: State,
    /// Its room in the store.
    pub room: Option<u64>,
    /// Which of its pages are zeros that the store does not have.
    pub zeros: [u64; BLOCK_PAGES / 64],
    /// Single pages in place. What the store has of them may be older.
    pub there: [u64; BLOCK_PAGES / 64],
    /// The page that came alone last, and how many before it came one after the other.
    pub run: (usize, u8),
    /// Pages whose content the program has given up, and whose end has not been seen yet: till then
    /// it does not go out, or old content would come back.
    pub ending: Option<Box<[u64; BLOCK_PAGES / 64]>>,
}

impl Block {
    pub fn is_there(&self, page: usize) -> bool {
        self.there[page / 64] >> (page % 64) & 1 != 0
    }

    pub fn count_there(&self) -> usize {
        self.there.iter().map(|pages| pages.count_ones() as usize).sum()
    }

    pub fn is_zero(&self, page: usize) -> bool {
        self.zeros[page / 64] >> (page % 64) & 1 != 0
    }

    pub fn set_zero(&mut self, page: usize, is_zero: bool) {
        self.zeros[page / 64] =
            self.zeros[page / 64] & !(1 << (page % 64)) | u64::from(is_zero) << (page % 64);
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

    /// Whether a block has this number.
    pub fn is_known(&self, id: u32) -> bool {
        self.by_address.get(&self.all[id as usize].at) == Some(&id)
    }

    pub fn get_mut(&mut self, id: u32) -> &mut Block {
        &mut self.all[id as usize]
    }

    /// The block that has this byte.
    pub fn at(&self, address: usize) -> Option<u32> {
        let (&start, &id) = self.by_address.range(..=address).next_back()?;
        (address < start + BLOCK).then_some(id)
    }

    /// A block that has a byte of `start..end`, the first one at or after `start`.
    pub fn first_in(&self, start: usize, end: usize) -> Option<u32> {
        self.at(start).or_else(|| self.by_address.range(start..end).next().map(|(_, &id)| id))
    }

    pub fn add(&mut self, at: usize, state: State) -> u32 {
        let block = Block {
            at,
            state,
            room: None,
            zeros: [0; BLOCK_PAGES / 64],
            there: [0; BLOCK_PAGES / 64],
            run: (0, 0),
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
        self.by_address.insert(at, id);
        id
    }

    /// Takes it out of the tables; its number may be used again.
    pub fn remove(&mut self, id: u32) -> Block {
        let block = self.all[id as usize].clone();
        self.by_address.remove(&block.at);
        self.unused.push(id);
        block
    }

    /// Gives those that begin in `from..from + bytes` their place after a move of that memory.
    pub fn shift(&mut self, from: usize, to: usize, bytes: usize) {
        let mut moved = self.by_address.split_off(&from);
        let mut rest = moved.split_off(&(from + bytes));
        self.by_address.append(&mut rest);
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
        assert_eq!(blocks.first_in(to - BLOCK, to + 1), Some(ids[1]));
        assert_eq!(blocks.remove(ids[1]).at, to);
        assert_eq!(blocks.at(to), None);
    }
}
