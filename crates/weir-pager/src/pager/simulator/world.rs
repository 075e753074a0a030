//! The state of the simulated kernel: mappings, pages, userfaultfd.

use super::random::{Random, number};
use super::store::{set_word, word};
use crate::pager::helpers::SLOTS;
use crate::uffd::Event;
use crate::{BLOCK, BLOCK_PAGES};
use rustix::io::Errno;
use std::collections::{BTreeMap, BTreeSet, VecDeque};
use std::fmt::Display;
use std::ops::Range;
use std::time::Duration;
use weir_core::{PAGE_SIZE, PageBytes};

/// The address of page 0 of the simulated address space.
pub const BASE: usize = 1 << 40;
/// Number of pages in the simulated address space.
pub const PAGES: usize = OWN + 200 * BLOCK_PAGES;

/// Number of pages of the pager's own memory. All bytes of these pages are stored. Of each other
/// page only one word is stored.
pub const OWN: usize = (SLOTS + 4) * BLOCK_PAGES;

/// A page table entry. The content of the pager's own pages is stored elsewhere.
#[derive(Clone, Copy, Debug, Default)]
pub struct Entry {
    pub is_there: bool,
    pub is_poisoned: bool,
    /// Whether a child shares the page.
    pub is_shared: bool,
    /// Whether a device reads or writes the page.
    pub is_pinned: bool,
    /// Whether the kernel is migrating the page.
    pub is_migrating: bool,
    /// Whether the kernel may free the page (MADV_FREE).
    pub is_lazy: bool,
    /// Whether the kernel may still read the page's memory for others, as for `vmsplice`.
    pub is_lent: bool,
    word: u64,
}

/// A mapping up to page `end`. All its pages have these attributes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Area {
    pub end: usize,
    pub is_registered: bool,
    pub is_readonly: bool,
    pub is_locked: bool,
    pub is_left_out_of_forks: bool,
    /// Whether the kernel was told that accesses are random.
    pub is_random: bool,
}

/// The simulated address space. Page n lies at the address `BASE` plus n pages, and `entries[n]` is
/// its page table entry.
pub struct World {
    pub random: Random,
    /// Threads that have noted that they are about to end, and have not.
    pub threads: BTreeSet<i32>,
    pub now: Duration,
    pub entries: Vec<Entry>,
    pub own: Vec<PageBytes>,
    pub own_next: usize,
    pub areas: BTreeMap<usize, Area>,
    /// Changes of the address space whose event was not handled yet.
    pub changing: usize,
    /// Threads that wait for a page, and whose fault was not read yet.
    pub faults: VecDeque<(usize, usize)>,
    /// Events that the pager has not read, each with the thread that waits until it has.
    pub events: VecDeque<(Event, usize)>,
    /// Whether the kernel merges neighbouring mappings with equal attributes.
    pub merges: bool,
    /// Of this many pages that the pager moves, the kernel is migrating one on average. 0: none.
    pub migrates: u64,
    /// Of this many pages that the pager fills, and requests to move pages, the kernel has no
    /// memory for one on average. 0: none.
    pub short: u64,
    /// The errors of the next such pages and requests.
    pub refusals: VecDeque<Errno>,
    /// The time that it takes to read all mappings.
    pub reading: Duration,
    /// The page whose every event is printed.
    page: Option<usize>,
}

pub fn address(page: usize) -> usize {
    BASE + page * PAGE_SIZE
}

pub fn page_of(address: usize) -> usize {
    (address - BASE) / PAGE_SIZE
}

impl World {
    pub fn new(random: Random, merges: bool, migrates: u64) -> Self {
        World {
            random,
            threads: BTreeSet::new(),
            now: Duration::ZERO,
            entries: vec![Entry::default(); PAGES],
            own: vec![[0; PAGE_SIZE]; OWN],
            own_next: 0,
            areas: BTreeMap::new(),
            changing: 0,
            faults: VecDeque::new(),
            events: VecDeque::new(),
            merges,
            migrates,
            short: 0,
            refusals: VecDeque::new(),
            reading: Duration::ZERO,
            page: number("WEIR_SIMULATOR_PAGE").map(|page| page as usize),
        }
    }

    /// The error of the next page that the pager fills, or request to move pages.
    pub fn refusal(&mut self) -> Option<Errno> {
        let is_short = self.random.one_in(self.short);
        self.refusals.pop_front().or(is_short.then_some(Errno::NOMEM))
    }

    /// Prints an event of the traced page, for people who look for the reason of a failure.
    pub fn say(&self, pages: Range<usize>, what: impl Display) {
        if self.page.is_some_and(|page| pages.contains(&page)) {
            println!("{:?} {}..{} {what}", self.now, pages.start, pages.end);
        }
    }

    pub fn word(&self, page: usize) -> u64 {
        self.own.get(page).map_or(self.entries[page].word, word)
    }

    pub fn set_word(&mut self, page: usize, word: u64) {
        match self.own.get_mut(page) {
            Some(own) => set_word(own, word),
            None => self.entries[page].word = word,
        }
    }

    pub fn come(&mut self, page: usize, word: u64) {
        self.say(page..page + 1, format_args!("comes: {word:#x}"));
        self.entries[page] = Entry { is_there: true, ..Entry::default() };
        self.set_word(page, word);
    }

    pub fn go(&mut self, page: usize) {
        self.say(page..page + 1, "goes");
        self.entries[page] = Entry::default();
    }

    /// The mapping that contains the page: the mapping's first page, and its attributes.
    pub fn area(&self, page: usize) -> Option<(usize, Area)> {
        let (&start, &area) = self.areas.range(..=page).next_back()?;
        (page < area.end).then_some((start, area))
    }

    fn split(&mut self, at: usize) {
        if let Some((start, area)) = self.area(at)
            && start < at
        {
            self.areas.insert(start, Area { end: at, ..area });
            self.areas.insert(at, area);
        }
    }

    fn merge(&mut self, at: usize) {
        if !self.merges {
            return;
        }
        let Some((&start, &before)) = self.areas.range(..at).next_back() else { return };
        if let Some(&after) = self.areas.get(&at)
            && before.end == at
            && before == (Area { end: at, ..after })
        {
            self.areas.remove(&at);
            self.areas.insert(start, after);
        }
    }

    pub fn map(&mut self, start: usize, end: usize) {
        let area = Area {
            end,
            is_registered: false,
            is_readonly: false,
            is_locked: false,
            is_left_out_of_forks: false,
            is_random: false,
        };
        self.insert(start, area);
    }

    pub fn insert(&mut self, start: usize, area: Area) {
        assert!(self.areas.range(start..area.end).next().is_none() && self.area(start).is_none());
        self.areas.insert(start, area);
        self.merge(start);
        self.merge(area.end);
    }

    /// Removes the mappings in `start..end`, and returns them. A mapping that goes beyond `start`
    /// or `end` is split there. The pages stay.
    pub fn take_areas(&mut self, start: usize, end: usize) -> Vec<(usize, Area)> {
        self.split(start);
        self.split(end);
        let taken: Vec<_> = self.areas.range(start..end).map(|(&start, &area)| (start, area)).collect();
        for (start, _) in &taken {
            self.areas.remove(start);
        }
        taken
    }

    pub fn change(&mut self, start: usize, end: usize, change: impl Fn(&mut Area)) {
        self.split(start);
        self.split(end);
        let starts: Vec<_> = self.areas.range(start..end).map(|(&start, _)| start).collect();
        for at in &starts {
            change(self.areas.get_mut(at).expect("just found"));
        }
        starts.into_iter().for_each(|at| self.merge(at));
        self.merge(end);
    }

    /// Checks whether a request of the pager may put pages into `start..end`.
    pub fn may_fill(&self, start: usize, end: usize) -> Result<(), Errno> {
        if self.changing > 0 {
            return Err(Errno::AGAIN);
        }
        match self.area(start) {
            None if start == end => Err(Errno::INVAL),
            Some((_, area)) if area.is_registered && end <= area.end => Ok(()),
            _ => Err(Errno::NOENT),
        }
    }
}

impl World {
    pub fn is_something(&self, page: usize) -> bool {
        self.entries[page].is_there || self.entries[page].is_poisoned
    }
}

const _: () = assert!(BASE.is_multiple_of(BLOCK));
