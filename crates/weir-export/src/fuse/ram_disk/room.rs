//! The pages of the volume that files may use: which are free, and which are in use.

use weir_core::PageNo;

/// A set of free pages, one bit each. Pages are taken in order, from the last taken one on, so that
/// pages written together lie together.
#[derive(Debug)]
pub(super) struct Room {
    taken: Vec<u64>,
    pages: u32,
    free: u32,
    cursor: usize,
}

impl Room {
    pub fn new(pages: u32) -> Room {
        let mut taken = vec![0; (pages as usize).div_ceil(64)];
        let over = pages % 64;
        if over > 0 {
            *taken.last_mut().expect("at least one page") = u64::MAX << over;
        }
        Room { taken, pages, free: pages, cursor: 0 }
    }

    pub fn pages(&self) -> u32 {
        self.pages
    }

    pub fn free(&self) -> u32 {
        self.free
    }

    pub fn take(&mut self) -> Option<PageNo> {
        if self.free == 0 {
            return None;
        }
        while self.taken[self.cursor] == u64::MAX {
            self.cursor = (self.cursor + 1) % self.taken.len();
        }
        let bit = self.taken[self.cursor].trailing_ones();
        self.taken[self.cursor] |= 1 << bit;
        self.free -= 1;
        Some(PageNo(self.cursor as u32 * 64 + bit))
    }

    pub fn give_back(&mut self, page: PageNo) {
        let (word, bit) = ((page.0 / 64) as usize, 1 << (page.0 % 64));
        assert!(self.taken[word] & bit != 0, "page {page:?} is given back twice");
        self.taken[word] &= !bit;
        self.free += 1;
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::collections::HashSet;

    #[test]
    fn every_page_is_taken_once_and_comes_back() {
        let mut room = Room::new(130);
        let all: HashSet<_> = std::iter::from_fn(|| room.take()).collect();
        assert_eq!((all.len(), room.free()), (130, 0));
        assert!(all.iter().all(|page| page.0 < 130));
        room.give_back(PageNo(77));
        assert_eq!((room.take(), room.take()), (Some(PageNo(77)), None));
    }
}
