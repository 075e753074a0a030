//! A simulated store, which can be slow or full, and can fail.

use super::random::Random;
use crate::{BLOCK_PAGES, Store};
use std::collections::BTreeSet;
use std::io;
use std::sync::{Arc, Mutex};
use weir_core::PageBytes;

/// The store's faults. A value of n means one operation in n, and 0 means none.
#[derive(Clone, Copy, Debug, Default)]
pub struct Faults {
    pub rooms: u64,
    /// One write in this many is refused when it begins.
    pub refused: u64,
    /// One write in this many is accepted, and fails later.
    pub doomed: u64,
    pub unreadable: u64,
    /// The number of reads after which every read fails.
    pub dead_after: Option<u64>,
}

/// The counts that the checks of the simulated program need.
#[derive(Debug, Default)]
pub struct Said {
    /// Number of reads that failed.
    pub unreadable: u64,
    /// Number of writes that failed, and of claims that found no room.
    pub refused: u64,
    pub rooms: usize,
}

pub struct Simulated {
    random: Random,
    faults: Faults,
    pages: Vec<u64>,
    /// Writes that the store has accepted. They end in any order.
    under_way: Vec<(u64, u64, bool)>,
    failed: bool,
    rooms: BTreeSet<u64>,
    reads: u64,
    /// Number of reads of pages that may not be needed.
    pub ahead: u64,
    /// Pages that cannot be read.
    spoilt: Vec<u64>,
    pub said: Arc<Mutex<Said>>,
}

/// The first word of a page, by which simulated pages differ. The rest of a page is zeros.
pub fn word(page: &PageBytes) -> u64 {
    u64::from_ne_bytes(page[..8].try_into().expect("eight bytes"))
}

pub fn set_word(page: &mut PageBytes, word: u64) {
    page[..8].copy_from_slice(&word.to_ne_bytes());
}

/// Random content that the program never wrote.
pub fn rubbish(random: &mut Random) -> u64 {
    1 << 63 | random.next()
}

impl Simulated {
    pub fn new(random: Random, faults: Faults) -> Self {
        Simulated {
            random,
            faults,
            pages: vec![0; faults.rooms as usize * BLOCK_PAGES],
            under_way: Vec::new(),
            failed: false,
            rooms: BTreeSet::new(),
            reads: 0,
            ahead: 0,
            spoilt: Vec::new(),
            said: Arc::default(),
        }
    }

    /// From now on, one write in `one_in` is accepted and fails later. With 0, no write does.
    pub fn doom(&mut self, one_in: u64) {
        self.faults.doomed = one_in;
    }

    /// From now on, no page can be read, or each can again.
    pub fn hide(&mut self, is_hidden: bool) {
        self.faults.dead_after = is_hidden.then_some(0);
    }

    /// From now on, this page cannot be read.
    pub fn spoil(&mut self, page: u64) {
        self.spoilt.push(page);
    }

    fn end_one(&mut self) {
        let at = self.random.below(self.under_way.len() as u64) as usize;
        let (page, word, is_doomed) = self.under_way.swap_remove(at);
        if !is_doomed {
            self.pages[page as usize] = word;
            return;
        }
        self.failed = true;
        self.said.lock().unwrap().refused += 1;
        // A failed write may leave rubbish in the page.
        if self.random.one_in(2) {
            let rubbish = rubbish(&mut self.random);
            self.pages[page as usize] = rubbish;
        }
    }

    fn has_room(&self, page: u64) {
        let room = page / BLOCK_PAGES as u64 * BLOCK_PAGES as u64;
        assert!(self.rooms.contains(&room), "page {page} of the store is not the pager's");
    }
}

impl Store for Simulated {
    fn claim(&mut self) -> Option<u64> {
        let free = (0..self.faults.rooms).map(|room| room * BLOCK_PAGES as u64);
        let free: Vec<u64> = free.filter(|room| !self.rooms.contains(room)).collect();
        if free.is_empty() {
            self.said.lock().unwrap().refused += 1;
            return None;
        }
        let room = free[self.random.below(free.len() as u64) as usize];
        for page in room..room + BLOCK_PAGES as u64 {
            self.pages[page as usize] = rubbish(&mut self.random);
        }
        self.rooms.insert(room);
        self.said.lock().unwrap().rooms = self.rooms.len();
        Some(room)
    }

    fn release(&mut self, first: u64) {
        assert!(self.rooms.remove(&first), "room {first} was not claimed");
        let room = first..first + BLOCK_PAGES as u64;
        let late = self.under_way.iter().find(|(page, ..)| room.contains(page));
        assert_eq!(late, None, "a write is under way to room that is given back");
        self.said.lock().unwrap().rooms = self.rooms.len();
    }

    fn write(&mut self, first: u64, pages: &[PageBytes]) -> io::Result<()> {
        for (page, bytes) in (first..).zip(pages) {
            self.has_room(page);
            while !self.under_way.is_empty() && self.random.one_in(3) {
                self.end_one();
            }
            if self.random.one_in(self.faults.refused) {
                self.said.lock().unwrap().refused += 1;
                return Err(io::ErrorKind::StorageFull.into());
            }
            let is_doomed = self.random.one_in(self.faults.doomed);
            self.under_way.push((page, word(bytes), is_doomed));
        }
        Ok(())
    }

    fn settle(&mut self) -> io::Result<()> {
        while !self.under_way.is_empty() {
            self.end_one();
        }
        match std::mem::take(&mut self.failed) {
            true => Err(io::ErrorKind::Other.into()),
            false => Ok(()),
        }
    }

    fn read_ahead(&mut self, first: u64, out: &mut [PageBytes]) -> io::Result<()> {
        self.ahead += 1;
        self.read(first, out)
    }

    fn read(&mut self, first: u64, out: &mut [PageBytes]) -> io::Result<()> {
        while !self.under_way.is_empty() {
            self.end_one();
        }
        self.reads += 1;
        let is_dead = self.faults.dead_after.is_some_and(|after| self.reads > after);
        for (page, out) in (first..).zip(out) {
            self.has_room(page);
            if is_dead || self.spoilt.contains(&page) || self.random.one_in(self.faults.unreadable) {
                self.said.lock().unwrap().unreadable += 1;
                return Err(io::ErrorKind::InvalidData.into());
            }
            set_word(out, self.pages[page as usize]);
        }
        Ok(())
    }
}
