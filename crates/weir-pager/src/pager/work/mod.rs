//! The work of the pager's thread, in order: page faults, then the kernel's events about the
//! address space, then writing out and prefetching. The last come in steps short enough for a page
//! fault to wait for.

mod background;
mod moves;
mod singles;
mod space;

use super::blocks::{Block, Blocks, State};
use super::{BELLS, Scope, Shared, count, reserve};
use crate::maps::{Mapping, Maps};
use crate::uffd::{Event, Stopped, Uffd, populated};
use crate::{BLOCK, BLOCK_PAGES, Error, Policy, Store, Tell};
use rustix::event::{PollFd, PollFlags, Timespec, poll};
use rustix::io::Errno;
use rustix::mm::Advice;
use std::collections::{BTreeMap, VecDeque};
use std::fs::File;
use std::io;
use std::os::unix::fs::FileExt as _;
use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::{Duration, Instant};
use weir_core::{PAGE_SIZE, PageBytes, uniform_value};

/// Number of blocks of staging memory.
const SLOTS: usize = 16;
/// Number of pages that are written or read in one step.
const STEP: usize = 64;
/// Most blocks that are prefetched and not used yet.
const READY_MAX: usize = 2;
/// Most victims that are tried one after the other.
const TRIES: usize = 16;
/// Number of zero pages that a page fault outside of any block brings.
const WINDOW: usize = 16;
/// Time between two looks for new memory, and the least size of a mapping to manage.
const LOOK_EVERY: Duration = Duration::from_millis(2);
const SPAN_MIN: usize = 2 * BLOCK;

/// The address space changes: the kernel's events must be read first.
#[derive(Debug)]
struct Changed;

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Slot {
    /// The slot has no pages.
    Vacant,
    /// The slot has all its pages, and belongs to no block.
    Free,
    /// The slot belongs to a block.
    Busy,
}

/// A block on its way, and its next page.
#[derive(Clone, Copy, Debug)]
struct Transfer {
    id: u32,
    slot: usize,
    next: usize,
}

pub(super) struct Work<S> {
    uffd: Uffd,
    store: S,
    tell: Tell,
    /// The store failed: no more blocks are written out.
    is_broken: bool,
    is_full: bool,
    scope: Scope,
    shared: Arc<Shared>,
    maps: Maps,
    mappings: Vec<Mapping>,
    pagemap: File,
    size: File,
    looked: Instant,
    /// The size of the process's address space at the last look, as text.
    seen: [u8; 24],
    blocks: Blocks,
    /// The registered spans: the first byte, and the byte after the last.
    spans: BTreeMap<usize, usize>,
    /// Memory that is left alone because it was mapped before the pager began, the pager's own
    /// memory too, and not one byte more. If only a part of a mapping is registered, the kernel
    /// makes two mappings of it, and `mremap` refuses to grow them.
    excluded: Vec<(usize, usize)>,
    staging: usize,
    nursery: usize,
    slots: [Slot; SLOTS],
    policy: Policy,
    writing: Option<Transfer>,
    filling: Option<Transfer>,
    wanted: VecDeque<usize>,
    /// Single pages in place, in the order in which they came: block and page. Entries of other
    /// pages are old.
    singles: VecDeque<(u32, u32)>,
    singles_there: usize,
    /// The time when no block could make room for single pages.
    stuck: Option<Instant>,
    /// A buffer for a page that is brought alone.
    single: Box<[PageBytes; 1]>,
    /// Events that were read and are not handled yet.
    events: VecDeque<Event>,
    /// An event is being handled. Meanwhile the tables may have blocks whose memory is gone, or
    /// belongs to another block.
    is_heeding: bool,
    faults: VecDeque<usize>,
    has_ended_all: bool,
}

impl<S: Store> Work<S> {
    pub(super) fn new(
        uffd: Uffd,
        store: S,
        tell: Tell,
        scope: Scope,
        shared: Arc<Shared>,
    ) -> Result<Self, Error> {
        let system = |error: Errno| Error::System(error.into());
        let (staging, nursery) = (reserve(SLOTS * BLOCK)?, reserve(BLOCK)?);
        for (at, bytes) in [(staging, SLOTS * BLOCK), (nursery, BLOCK)] {
            // The pager works without huge pages too, but slower.
            let _ = advise(at, bytes, Advice::LinuxHugepage);
            advise(at, bytes, Advice::LinuxDontFork).map_err(system)?;
        }
        uffd.register(staging, staging + SLOTS * BLOCK).map_err(system)?;
        let bells = shared.bells.base;
        uffd.register(bells, bells + BELLS * PAGE_SIZE).map_err(system)?;
        let mut work = Work {
            uffd,
            store,
            tell,
            is_broken: false,
            is_full: false,
            scope,
            shared,
            maps: Maps::open()?,
            mappings: Vec::new(),
            // Open the file as this thread: its descriptors are its own.
            pagemap: File::open("/proc/thread-self/pagemap")?,
            size: File::open("/proc/self/statm")?,
            looked: Instant::now(),
            seen: [0; 24],
            blocks: Blocks::default(),
            spans: BTreeMap::new(),
            excluded: Vec::new(),
            staging,
            nursery,
            slots: [Slot::Vacant; SLOTS],
            policy: Policy::default(),
            writing: None,
            filling: None,
            wanted: VecDeque::new(),
            singles: VecDeque::new(),
            singles_there: 0,
            stuck: None,
            single: Box::new([[0; PAGE_SIZE]]),
            events: VecDeque::new(),
            is_heeding: false,
            faults: VecDeque::new(),
            has_ended_all: false,
        };
        work.excluded.extend(work.maps.read()?.map(|mapping| (mapping.start, mapping.end)));
        Ok(work)
    }

    pub(super) fn run(&mut self) {
        loop {
            self.hear();
            let is_idle = self.events.is_empty() && self.faults.is_empty();
            for _ in 0..self.events.len() {
                match self.events.pop_front() {
                    Some(Event::Fault(address)) => self.faults.push_back(address),
                    Some(event) => {
                        self.is_heeding = true;
                        self.apply(event);
                        self.is_heeding = false;
                    }
                    None => {}
                }
            }
            for _ in 0..self.faults.len() {
                // Events that were read meanwhile change the addresses of blocks.
                if !self.events.is_empty() {
                    break;
                }
                let Some(address) = self.faults.pop_front() else { break };
                if let Err(Changed) = self.fault(address) {
                    self.faults.push_back(address);
                }
            }
            if self.has_ended_all {
                return;
            }
            if !self.events.is_empty() {
                continue;
            }
            if self.looked.elapsed() >= LOOK_EVERY {
                self.look_if_changed();
            }
            if !self.background() && is_idle {
                let mut fds = [PollFd::new(&self.uffd, PollFlags::IN)];
                let wait = Timespec { tv_sec: 0, tv_nsec: LOOK_EVERY.subsec_nanos().into() };
                let forever = (self.scope == Scope::Adopted && !self.is_above()).then_some(None);
                let _ = poll(&mut fds, forever.unwrap_or(Some(&wait)));
            }
        }
    }

    fn fault(&mut self, address: usize) -> Result<(), Changed> {
        if self.shared.bells.is_one(address) {
            return self.answer(address);
        }
        count(&self.shared.counters.faults, 1);
        let Some(id) = self.blocks.at(address).or_else(|| self.begin(address)) else {
            return self.zero(address, WINDOW);
        };
        match self.blocks.get(id).state {
            State::Resident => {
                let block = self.blocks.get_mut(id);
                let page = (address - block.at) / PAGE_SIZE;
                if let Some(ending) = &mut block.ending {
                    ending[page / 64] &= !(1 << (page % 64));
                }
                return self.zero(address, 1);
            }
            State::Lost => {
                self.poison(address);
                return Ok(());
            }
            _ => {}
        }
        let at = self.blocks.get(id).at;
        let (number, rest) = ((at / BLOCK) as i64, at % BLOCK);
        let blocks = &self.blocks;
        let is_resident = |other: i64| {
            let id = blocks.at((other as usize).wrapping_mul(BLOCK).wrapping_add(rest));
            id.is_some_and(|id| blocks.get(id).state == State::Resident)
        };
        let page = (address - at) / PAGE_SIZE;
        let stride = match self.is_next_single(id, page) {
            true => None,
            false => self.policy.fault(number, is_resident),
        };
        if self.blocks.get(id).state == State::Stored
            && self.is_single(id, page, stride)
            && self.bring_single(id, page)?
        {
            return Ok(());
        }
        self.bring(id)?;
        if let Some(stride) = stride {
            self.wanted.clear();
            let ahead = (1..=READY_MAX as i64)
                .filter_map(|step| at.checked_add_signed((stride * step * BLOCK as i64) as isize));
            self.wanted.extend(ahead);
        }
        Ok(())
    }

    /// Answers a thread that called: looks for new memory, and makes every block resident if that
    /// is asked for.
    fn answer(&mut self, bell: usize) -> Result<(), Changed> {
        let [start, end] = self.shared.adopt.each_ref().map(|bound| bound.load(Ordering::Relaxed));
        if end > start {
            self.adopt(start, end)?;
        }
        self.look()?;
        if self.is_held() {
            self.advise_spans(Advice::LinuxDoFork);
            let ids: Vec<u32> = self.blocks.ids().collect();
            for id in ids {
                if !matches!(self.blocks.get(id).state, State::Resident | State::Empty | State::Lost) {
                    self.bring(id)?;
                }
            }
        } else {
            self.advise_spans(Advice::LinuxDontFork);
        }
        self.zero(bell, 1)?;
        self.has_ended_all = self.shared.stop.load(Ordering::SeqCst);
        Ok(())
    }

    fn is_held(&self) -> bool {
        self.shared.holds.load(Ordering::SeqCst) > 0
    }

    fn advise_spans(&self, advice: Advice) {
        for (&start, &end) in &self.spans {
            let _ = advise(start, end - start, advice);
        }
    }

    /// Makes a block around an address that has none yet, if the whole block is registered.
    fn begin(&mut self, address: usize) -> Option<u32> {
        let at = address / BLOCK * BLOCK;
        let (&start, &end) = self.spans.range(..=address).next_back()?;
        let is_whole = start <= at && at + BLOCK <= end && self.blocks.first_in(at, at + BLOCK).is_none();
        is_whole.then(|| self.blocks.add(at, State::Empty))
    }

    /// Makes a block resident.
    fn bring(&mut self, id: u32) -> Result<(), Changed> {
        let slot = match self.blocks.get(id).state {
            State::Resident | State::Lost => return Ok(()),
            State::Writing(slot) => {
                // Stopping this write loses nothing: the slot holds the whole block. The block's
                // room in the store is written again before it is read.
                self.writing = None;
                count(&self.shared.counters.taken_back, 1);
                slot
            }
            State::Ready(slot) | State::Back(slot) => slot,
            State::Filling(_) => {
                while self.filling.is_some() {
                    self.fill();
                }
                return self.bring(id);
            }
            State::Empty => {
                let slot = self.frame_now()?;
                // SAFETY: the slot is this thread's, and all its pages are mapped.
                unsafe { page_at(self.slot(slot)).cast::<u8>().write_bytes(0, BLOCK) };
                slot
            }
            State::Stored => {
                let slot = self.frame_now()?;
                count(&self.shared.counters.reads, 1);
                if !self.read(id, slot, 0, BLOCK_PAGES) {
                    self.lose(id, slot, |address| address);
                    return Ok(());
                }
                slot
            }
        };
        let block = self.blocks.get_mut(id);
        let (at, was) = (block.at, block.state);
        // A block that the store also has may be dropped if this must be tried again.
        block.state = match was {
            State::Stored | State::Ready(_) => State::Ready(slot),
            _ => State::Back(slot),
        };
        self.move_in(at, slot)?;
        if matches!(was, State::Ready(_)) {
            count(&self.shared.counters.prefetched, 1);
        }
        self.blocks.get_mut(id).state = State::Resident;
        self.forget_singles(id, 0..BLOCK_PAGES);
        self.policy.came(id);
        Ok(())
    }

    /// Returns a frame, unless the address space has changed meanwhile.
    fn frame_now(&mut self) -> Result<usize, Changed> {
        let slot = self.frame();
        if self.events.is_empty() {
            return Ok(slot);
        }
        self.slots[slot] = Slot::Free;
        Err(Changed)
    }

    /// Marks a block's content as lost: a thread that touches it gets SIGBUS.
    fn lose(&mut self, id: u32, slot: usize, place: impl Fn(usize) -> usize) {
        self.slots[slot] = Slot::Free;
        if self.shared.counters.lost.fetch_add(1, Ordering::Relaxed) == 0 {
            (self.tell)("pages cannot be had back; the program gets SIGBUS where it touches them");
        }
        let at = self.blocks.get(id).at;
        self.blocks.get_mut(id).state = State::Lost;
        self.forget_singles(id, 0..BLOCK_PAGES);
        for page in 0..BLOCK_PAGES {
            self.poison(place(at + page * PAGE_SIZE));
        }
    }

    /// Poisons a page at its present address. Without that it would read as zeros.
    fn poison(&mut self, address: usize) {
        let page = address / PAGE_SIZE * PAGE_SIZE;
        while let Err(Stopped { why: Errno::AGAIN, .. }) = self.uffd.poison(self.now_at(page), PAGE_SIZE) {
            self.hear();
        }
        self.uffd.wake(self.now_at(page), PAGE_SIZE);
    }

    fn zero(&mut self, address: usize, pages: usize) -> Result<(), Changed> {
        let at = address / PAGE_SIZE * PAGE_SIZE;
        let end = self.spans.range(..=at).next_back().map_or(at + PAGE_SIZE, |(_, &end)| end);
        let next = self.blocks.first_in(at + PAGE_SIZE, end.max(at + PAGE_SIZE));
        let end = next.map_or(end, |id| self.blocks.get(id).at).clamp(at + PAGE_SIZE, at + pages * PAGE_SIZE);
        match self.uffd.zero(at, end - at) {
            Err(Stopped { why: Errno::AGAIN, done: 0 }) => Err(Changed),
            _ => {
                self.uffd.wake(at, PAGE_SIZE);
                Ok(())
            }
        }
    }
}

impl<S> Drop for Work<S> {
    fn drop(&mut self) {
        for (at, bytes) in [(self.staging, SLOTS * BLOCK), (self.nursery, BLOCK)] {
            // Unregister the memory first: otherwise this thread would wait for itself to read the
            // event.
            let _ = self.uffd.unregister(at, at + bytes);
            let _ = advise(at, bytes, Advice::LinuxDontNeed);
        }
    }
}

fn page_at(address: usize) -> *mut PageBytes {
    std::ptr::with_exposed_provenance_mut(address)
}

fn advise(start: usize, bytes: usize, advice: Advice) -> Result<(), Errno> {
    // SAFETY: advice that frees memory is given only for this thread's own memory.
    unsafe { rustix::mm::madvise(std::ptr::with_exposed_provenance_mut(start), bytes, advice) }
}
