//! The work of the pager's thread, in order: page faults, then the kernel's events about the
//! address space, then writing out and prefetching. Helpers write and read beside this thread.
//! Without helpers it does so itself, in short steps, since a page fault waits for the end of a
//! step.

mod background;
mod eviction;
mod moves;
mod order;
mod singles;
mod space;

use super::blocks::{Block, Blocks, State, hashes};
use super::helpers::{Helpers, Kept, Load, Notes, SLOTS, Trouble};
use super::queues::{Queues, Search, Single};
use super::{BELLS, LIMIT_MIN, Scope, Shared, count};
use crate::kernel::Kernel;
use crate::link::{Order, Report};
use crate::maps::Mapping;
use crate::policy::{FRESH, Fault, Plan, Policy, SINGLES_MOST};
use crate::uffd::{Event, Stopped};
use crate::{BLOCK, BLOCK_PAGES, Error, Store, Tell};
use rustix::io::Errno;
use rustix::mm::Advice;
use std::collections::{BTreeMap, VecDeque};
use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::Duration;
use weir_core::{PAGE_SIZE, uniform_value};

/// Largest number of blocks that helpers write at a time, and that the pager's thread writes alone.
const WRITES_MOST: usize = 3;
/// Largest number of prefetched blocks that the program has not used yet. Fewer under a small
/// limit.
const READY_MAX: usize = 8;
/// Largest number of blocks that streams want next.
const WANTED_MAX: usize = 2 * READY_MAX;
/// After so many page faults in streams, a prefetched block that was not used makes room for
/// another.
const READY_FOR: u64 = 12;
/// Number of blocks of a stream that are prefetched. The last of them waits for its page fault, by
/// which the stream is seen to go on. The ones before it come into place.
const AHEAD: i64 = 3;
/// Largest number of victims that one search tries.
const TRIES: usize = 16;
/// Largest number of pages that a page fault on a partial block brings.
pub(super) const WINDOW: usize = 16;
/// Mappings of fewer bytes than this are not managed, unless they lie beside managed memory.
const SMALLEST: usize = 64 << 10;
/// The limit divided by this number is what the hashes of stored pages may take.
const HASHED_SHARE: usize = 32;
/// Bytes of the hashes of one block.
const HASHES: usize = BLOCK_PAGES * size_of::<u64>();
/// Largest number of blocks that have hashes. They take 128 MiB then: a quarter of the pager's
/// address space for tables.
const HASHED_MAX: usize = 32 << 10;
/// Longest wait for an event. Without it, the order of the events that were read is not certain.
pub(super) const PAUSE: Duration = Duration::from_micros(20);
/// Managed memory may always take the limit divided by this number, however much memory is not
/// managed.
const LEAST_SHARE: usize = 4;
/// The least number of blocks that the pager needs to work with.
const LEAST: usize = 4;
/// Largest number of waits until the pager has read the events of all changes of the address space.
const WAITS: usize = 8;
/// Pause after an attempt in which no block could be moved out, or none got room in the store.
const STUCK: Duration = Duration::from_millis(20);
/// Least time between two looks for new memory.
const LOOK_EVERY: Duration = Duration::from_millis(2);
/// After a look for new memory, the pager waits for this many times the look's duration before the
/// next look. If a thread asks for a look, the pager looks earlier. In a process with many mappings
/// a look takes long, and the pager's thread may have a higher priority than the program's.
const LOOK_REST: u32 = 10;

/// The address space changes: the kernel's events must be read first.
#[derive(Debug)]
struct Changed;

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Slot {
    /// The slot has no pages.
    Vacant,
    /// All pages of the slot have memory, and the slot belongs to no block.
    Free,
    /// The slot belongs to a block.
    Busy,
}

/// A slot of which single pages on their way out use the first [`singles::OUTBOX`] pages, in order.
/// The first `used` of these have memory, and their content is in the store. Memory is freed for
/// many pages together, since that takes several system calls.
#[derive(Clone, Copy, Debug)]
struct Outbox {
    slot: usize,
    used: usize,
}

/// The address at a distance in blocks.
fn ahead(at: usize, blocks: i64) -> Option<usize> {
    at.checked_add_signed((blocks * BLOCK as i64) as isize)
}

/// The part of an eviction that is still to do. Blocks are moved out in the order in which they
/// became resident. A block that becomes resident meanwhile is behind the others, so the eviction
/// has an end.
#[derive(Clone, Copy, Debug)]
struct Eviction {
    /// Number of blocks that the eviction still has to look at, whether or not they can be moved
    /// out.
    blocks: usize,
    /// Number of single pages that are still to be moved out.
    singles: usize,
}

pub(super) struct Work<K: Kernel, S> {
    kernel: K,
    store: S,
    helpers: Helpers,
    outside: Tell,
    /// Whether the store has failed. Then no more blocks are written out.
    is_broken: bool,
    is_full: bool,
    /// The time of the last claim of room that the store has refused.
    refused: Option<Duration>,
    /// The block that the kernel has last refused to move into place, for lack of memory or because
    /// the address space was changing. It has a frame.
    refused_block: Option<u32>,
    /// Number of blocks that had room when the pager printed that the store is full. The pager
    /// prints that line again only after a quarter of these blocks have given up their room.
    full_at: Option<usize>,
    scope: Scope,
    shared: Arc<Shared>,
    mappings: Vec<Mapping>,
    mappings_of_now: Vec<Mapping>,
    looked: Duration,
    /// The time before which the pager makes no other look.
    look_again: Duration,
    /// The bell of the call for which the pager has looked for new memory already.
    looked_for: Option<usize>,
    /// Size of the address space, in pages, at the last search for new memory. 0 if that search has
    /// left some memory for the next one.
    seen: usize,
    /// Anonymous pages in memory that are not managed, when the pager looked last. They count
    /// against the limit.
    beside: usize,
    blocks: Blocks,
    /// The registered spans: the first byte, and the byte after the last.
    spans: BTreeMap<usize, usize>,
    /// Managed memory that the program has left out of its forks: the first byte, and the byte
    /// after the last.
    left_out: BTreeMap<usize, usize>,
    /// Ranges for which the kernel got the advice that no child inherits them while the address
    /// space changed: the first byte, and the byte after the last. Other memory may have got the
    /// advice.
    doubtful: BTreeMap<usize, usize>,
    /// Whether a block in place may have a room in the store.
    may_spare_room: bool,
    /// Memory that stays unmanaged, to the exact byte: what was mapped before the pager began, and
    /// its own memory. If only a part of one of the program's mappings were managed, the kernel
    /// would split the mapping, and `mremap` would refuse to grow it.
    excluded: Vec<(usize, usize)>,
    staging: usize,
    nursery: usize,
    slots: [Slot; SLOTS],
    policy: Policy,
    /// The blocks that are being written to the store, and those that are being prefetched, the
    /// oldest one first.
    writing: VecDeque<u32>,
    filling: VecDeque<u32>,
    outbox: Option<Outbox>,
    /// Prefetched blocks, or blocks of `filling`, that are read because threads wait for them.
    asked: Vec<u32>,
    /// The addresses of blocks that streams want next, the most urgent one first.
    wanted: VecDeque<usize>,
    /// Number of page faults in streams.
    wants: u64,
    /// Prefetched blocks that nobody has used, the oldest one first, each with its time in page
    /// faults in streams.
    ready: VecDeque<(u32, u64)>,
    /// The addresses of blocks that come into place once they are prefetched.
    near: VecDeque<usize>,
    /// Blocks that came into place before their page fault, and that no stream has passed since, as
    /// in `ready`.
    placed: VecDeque<(u32, u64)>,
    /// Single pages in place. An entry is outdated once its page is no longer a single page in
    /// place.
    singles: Queues,
    singles_there: usize,
    /// The time at which the last single page came into place.
    last_single: Duration,
    /// Number of single pages in place that belong to partial blocks.
    partial_there: usize,
    /// A sum that grows with each victim while partial blocks have memory. Once it is large enough,
    /// it is the turn of partial blocks to make room.
    due: usize,
    /// Number of batches of single pages that are still to be moved out in the turn of partial
    /// blocks.
    batches: usize,
    /// The time of the last attempt in which no block could make room for single pages.
    stuck: Option<Duration>,
    /// The time of the last attempt in which no single page could be moved out.
    stuck_singly: Option<Duration>,
    /// The address of pages of the pager's own, into which single pages are read before they come
    /// into place.
    single: usize,
    eviction: Option<Eviction>,
    /// Number of blocks that have room in the store.
    rooms: usize,
    /// Number of blocks that have hashes.
    hashed: usize,
    /// Events that were read, and are not handled yet.
    events: VecDeque<Event>,
    /// Number of events, from the first one on, that are in the order of the changes.
    ordered: usize,
    /// Moves of memory whose order is not certain, each with the mappings at the time when the
    /// event was read.
    views: Vec<(Event, Vec<Mapping>)>,
    /// Whether the pager is handling an event. Meanwhile a block in the tables may have no memory,
    /// or its address may be that of another block's memory.
    is_heeding: bool,
    /// Pages that threads wait for, each with the time of its page fault, and the policy's choice
    /// once it was made. While the address space changes, a page fault is tried again. It must not
    /// count twice.
    faults: VecDeque<(usize, Duration, Option<Plan>)>,
    has_ended_all: bool,
}

impl<K: Kernel, S: Store> Work<K, S> {
    pub(super) fn new(
        mut kernel: K,
        store: S,
        helpers: Helpers,
        outside: Tell,
        scope: Scope,
        excluded: Option<Vec<(usize, usize)>>,
        shared: Arc<Shared>,
    ) -> Result<Self, Error> {
        let system = |error: Errno| Error::System(error.into());
        let (staging, nursery) = (kernel.reserve(SLOTS * BLOCK)?, kernel.reserve(BLOCK)?);
        let single = kernel.reserve(SINGLES_MOST * PAGE_SIZE)?;
        kernel.register(staging, staging + SLOTS * BLOCK).map_err(system)?;
        // Give every second slot other advice. The kernel merges only mappings with equal flags, so
        // each slot stays a mapping of its own. If slots were merged, freeing a slot's memory would
        // first split the mapping. The kernel refuses that once a process has `vm.max_map_count`
        // mappings.
        for slot in (1..SLOTS).step_by(2) {
            kernel.advise(staging + slot * BLOCK, BLOCK, Advice::Random).map_err(system)?;
        }
        let bells = shared.bells.base;
        kernel.register(bells, bells + BELLS * PAGE_SIZE).map_err(system)?;
        let mut mappings = Vec::new();
        kernel.read_mappings(&mut mappings);
        let looked = kernel.now();
        let excluded = excluded.map_or_else(
            || mappings.iter().map(|mapping| (mapping.start, mapping.end)).collect(),
            |mut excluded| {
                // Two kinds of present mappings are the pager's own: its threads' stacks, and the
                // memory that it has reserved.
                let stack = (&raw const looked).addr();
                let own = [helpers.stacks(), &[stack, staging, nursery, single, bells]].concat();
                let is_own =
                    |mapping: &&Mapping| own.iter().any(|at| (mapping.start..mapping.end).contains(at));
                excluded.extend(mappings.iter().filter(is_own).map(|mapping| (mapping.start, mapping.end)));
                excluded.extend([(staging, staging + SLOTS * BLOCK), (bells, bells + BELLS * PAGE_SIZE)]);
                excluded
            },
        );
        let _ = shared.excluded.set(excluded.clone());
        Ok(Work {
            kernel,
            store,
            helpers,
            outside,
            is_broken: false,
            is_full: false,
            refused: None,
            refused_block: None,
            full_at: None,
            scope,
            shared,
            looked,
            look_again: Duration::ZERO,
            looked_for: None,
            seen: 0,
            beside: 0,
            blocks: Blocks::default(),
            spans: BTreeMap::new(),
            left_out: BTreeMap::new(),
            doubtful: BTreeMap::new(),
            may_spare_room: true,
            excluded,
            mappings,
            mappings_of_now: Vec::new(),
            staging,
            nursery,
            slots: [Slot::Vacant; SLOTS],
            policy: Policy::default(),
            writing: VecDeque::new(),
            filling: VecDeque::new(),
            outbox: None,
            asked: Vec::new(),
            wanted: VecDeque::new(),
            wants: 0,
            ready: VecDeque::new(),
            near: VecDeque::new(),
            placed: VecDeque::new(),
            singles: Queues::default(),
            singles_there: 0,
            last_single: Duration::ZERO,
            partial_there: 0,
            due: 0,
            batches: 0,
            stuck: None,
            stuck_singly: None,
            single,
            eviction: None,
            rooms: 0,
            hashed: 0,
            events: VecDeque::new(),
            ordered: 0,
            views: Vec::new(),
            is_heeding: false,
            faults: VecDeque::new(),
            has_ended_all: false,
        })
    }

    #[cfg(test)]
    pub(super) fn kernel_mut(&mut self) -> &mut K {
        &mut self.kernel
    }

    /// Whether no block that could be moved out waits for the end of dropped pages.
    #[cfg(test)]
    pub(super) fn have_ended(&mut self) -> bool {
        let ids: Vec<u32> = self.blocks.ids().collect();
        ids.into_iter().all(|id| self.blocks.get(id).state == State::Lost || self.has_ended(id))
    }

    pub(super) fn run(&mut self) {
        loop {
            let heard = self.kernel.now();
            self.hear();
            let is_idle = self.events.is_empty() && self.faults.is_empty();
            if !self.put_in_order() {
                self.attend();
                self.kernel.wait(Some(PAUSE));
                continue;
            }
            for _ in 0..self.events.len() {
                self.ordered = self.ordered.saturating_sub(1);
                match self.events.pop_front() {
                    Some(Event::Fault(address)) => self.faults.push_back((address, heard, None)),
                    Some(event) => {
                        self.is_heeding = true;
                        self.apply(event);
                        self.is_heeding = false;
                    }
                    None => {}
                }
            }
            self.end_doubt();
            self.begin_reads();
            for _ in 0..self.faults.len() {
                // Events that were read meanwhile change the addresses of blocks. Handle them
                // first.
                if !self.events.is_empty() {
                    break;
                }
                let Some((address, since, mut plan)) = self.faults.pop_front() else { break };
                match self.fault(address, &mut plan) {
                    Err(Changed) => self.faults.push_back((address, since, plan)),
                    Ok(()) if self.shared.bells.is_one(address) => {}
                    Ok(()) => {
                        let waited = self.kernel.now().saturating_sub(since);
                        count(&self.shared.counters.waited_ns, waited.as_nanos() as u64);
                    }
                }
            }
            if self.has_ended_all {
                return;
            }
            if self.faults.is_empty() {
                self.asked.clear();
            }
            if !self.events.is_empty() {
                continue;
            }
            if self.kernel.now() - self.looked >= LOOK_EVERY {
                self.attend();
                self.look_if_changed();
            }
            let is_idle = !self.background() && is_idle;
            // The kernel has refused to fill these pages, or the eviction can go no further, since
            // the address space is changing.
            let is_stopped = !self.faults.is_empty() || self.eviction.is_some() && self.kernel.is_changing();
            if is_stopped && self.events.is_empty() {
                self.kernel.wait(Some(PAUSE));
                continue;
            }
            // The thread must not sleep while an event that it has read waits to be handled.
            if is_idle && self.events.is_empty() && self.helpers.wakes() {
                let is_quiet = self.scope == Scope::Adopted && !self.is_above();
                self.kernel.wait((!is_quiet).then_some(LOOK_EVERY));
            }
        }
    }

    fn fault(&mut self, address: usize, planned: &mut Option<Plan>) -> Result<(), Changed> {
        if self.shared.bells.is_one(address) {
            return self.answer(address);
        }
        count(&self.shared.counters.faults, 1);
        let Some(id) = self.blocks.at(address).or_else(|| self.begin(address)) else {
            return self.zero(address).map(|_| ());
        };
        match self.blocks.get(id).state {
            State::Resident => {
                let page = (address - self.blocks.get(id).at) / PAGE_SIZE;
                if self.zero(address)? {
                    self.blocks.get_mut(id).clear_ending(page);
                }
                return Ok(());
            }
            State::Lost => {
                let page = (address - self.blocks.get(id).at) / PAGE_SIZE;
                if self.poison(address) {
                    self.blocks.get_mut(id).clear_ending(page);
                }
                return self.woken();
            }
            _ => {}
        }
        let at = self.blocks.get(id).at;
        let page = (address - at) / PAGE_SIZE;
        let plan = *planned.get_or_insert_with(|| self.plan(id, page));
        let block = self.blocks.get(id);
        if block.state == State::Stored && (!plan.is_whole || block.is_partial) {
            if self.bring_single(id, page)? {
                return Ok(());
            }
            if self.blocks.get(id).is_partial {
                self.lose_single(id, page);
                return self.woken();
            }
        }
        let is_prefetched = matches!(self.blocks.get(id).state, State::Ready(_) | State::Filling(_))
            && !self.asked.contains(&id);
        self.bring(id)?;
        if self.blocks.get(id).state == State::Lost {
            return self.woken();
        }
        count(&self.shared.counters.prefetched, u64::from(is_prefetched));
        if let Some(stride) = plan.stride {
            self.want(at, stride);
        } else if let Some(next) = plan.guess.and_then(|stride| ahead(at, stride)) {
            self.wanted.retain(|&other| other != next);
            self.wanted.push_front(next);
            self.wanted.truncate(WANTED_MAX);
        }
        Ok(())
    }

    /// Whether the thread that waited for a poisoned page was woken. If an event says that the
    /// program has dropped the page, the page was not poisoned, and nothing has woken the thread.
    fn woken(&self) -> Result<(), Changed> {
        if self.has_changed() { Err(Changed) } else { Ok(()) }
    }

    /// Begins to read the blocks for which threads wait, as far as there are frames. So helpers
    /// read several of them at a time.
    fn begin_reads(&mut self) {
        if self.faults.len() < 2 || !self.events.is_empty() || self.helpers.are_away() || self.is_held() {
            return;
        }
        // Blocks of which single pages will come. A second page fault of such a block is planned
        // only once the first one has noted which pages came.
        let mut singly = Vec::new();
        for at in 0..self.faults.len() {
            let (address, _, plan) = self.faults[at];
            let Some(id) = self.blocks.at(address) else { continue };
            let Block { at: first, state, is_partial, .. } = *self.blocks.get(id);
            if state != State::Stored || is_partial || singly.contains(&id) {
                continue;
            }
            let plan = plan.unwrap_or_else(|| self.plan(id, (address - first) / PAGE_SIZE));
            self.faults[at].2 = Some(plan);
            // A block with single pages in place stays as it is until its turn.
            if !plan.is_whole || self.blocks.get(id).count_there() > 0 {
                singly.push(id);
                continue;
            }
            let Some(slot) = self.find(Slot::Free) else { return };
            count(&self.shared.counters.reads, 1);
            self.slots[slot] = Slot::Busy;
            self.blocks.get_mut(id).state = State::Filling(slot);
            self.asked.push(id);
            self.begin_load(id, slot, true);
        }
    }

    /// Notes a page fault, and asks the policy what it brings.
    pub(super) fn plan(&mut self, id: u32, page: usize) -> Plan {
        let Work { policy, blocks, singles_there, .. } = self;
        let block = blocks.get(id);
        let mut history = block.history;
        let plan = if block.is_partial {
            policy.fault_singly(page, &mut history)
        } else {
            let rest = block.at % BLOCK;
            let is_in_place = |other: i64| {
                let id = blocks.at((other as usize).wrapping_mul(BLOCK).wrapping_add(rest));
                id.is_some_and(|id| blocks.get(id).state == State::Resident)
            };
            let fault = Fault {
                number: (block.at / BLOCK) as i64,
                page,
                is_stored: block.state == State::Stored,
                there: block.count_there(),
                there_of_all: *singles_there,
                blocks: blocks.len(),
            };
            policy.fault(fault, &mut history, is_in_place)
        };
        blocks.get_mut(id).history = history;
        plan
    }

    /// Notes the next blocks of a stream, to be prefetched. The next block of each stream comes
    /// before the second next one of any: a program may have several streams at a time.
    fn want(&mut self, at: usize, stride: i64) {
        self.wants += 1;
        let step = |steps: i64| ahead(at, stride * steps);
        // The stream has passed these.
        for at in (1..=AHEAD).filter_map(|steps| step(-steps)) {
            let id = self.blocks.at(at);
            let before = self.placed.len();
            self.placed.retain(|&(other, _)| Some(other) != id);
            count(&self.shared.counters.prefetched, (before - self.placed.len()) as u64);
        }
        while self.placed.pop_front_if(|&mut (_, since)| self.wants - since >= READY_FOR).is_some() {}
        let next: Vec<usize> = (1..=AHEAD).filter_map(step).collect();
        self.wanted.retain(|other| *other != at && !next.contains(other));
        self.near.retain(|other| *other != at && !next.contains(other));
        for (place, &at) in next.iter().enumerate() {
            if self.is_all_away(at) {
                match place {
                    0 => self.wanted.push_front(at),
                    _ => self.wanted.push_back(at),
                }
            }
            if place + 1 < AHEAD as usize {
                self.near.push_front(at);
            }
        }
        self.wanted.truncate(WANTED_MAX);
        self.near.truncate(WANTED_MAX);
    }

    /// Puts a prefetched block into place before its page fault, if its stream is near. Returns
    /// whether it did.
    fn place(&mut self) -> bool {
        if !self.policy.is_streaming() || self.placed.len() >= self.ready_most() {
            return false;
        }
        let is_near = |&&(id, _): &&(u32, u64)| {
            self.blocks.is_known(id)
                && matches!(self.blocks.get(id).state, State::Ready(_))
                && self.near.contains(&self.blocks.get(id).at)
        };
        let Some(&(id, _)) = self.ready.iter().find(is_near) else { return false };
        let is_there = self.bring(id).is_ok();
        if is_there {
            let at = self.blocks.get(id).at;
            self.near.retain(|&other| other != at);
            self.placed.push_back((id, self.wants));
        }
        is_there
    }

    /// Largest number of prefetched blocks that wait for their page fault, and of those in place.
    fn ready_most(&self) -> usize {
        (self.limit() / 8).clamp(1, READY_MAX)
    }

    /// Whether the block at this address is whole, and all of it is in the store.
    pub(super) fn is_all_away(&self, at: usize) -> bool {
        self.blocks.at(at).is_some_and(|id| {
            let block = self.blocks.get(id);
            block.state == State::Stored && block.count_there() == 0 && !block.is_partial
        })
    }

    /// Answers a thread's call: looks for new memory. While a thread holds all blocks in place, for
    /// a fork, also makes every block resident.
    fn answer(&mut self, bell: usize) -> Result<(), Changed> {
        let [start, end] = self.shared.adopt.each_ref().map(|bound| bound.load(Ordering::Relaxed));
        if end > start && !self.adopt(&[(start, end)]) {
            return Err(Changed);
        }
        let Work { shared, kernel, .. } = self;
        shared.endings.forget_ended(|thread| kernel.is_thread(thread));
        let call = self.shared.call.each_ref().map(|word| word.load(Ordering::Relaxed));
        if call[0] != 0 {
            self.kernel.call(call);
            self.helpers.call(call);
        }
        // One look is enough for a call, even if the pager must try the rest of the call again. A
        // later look finds the memory that cannot be managed yet. A child inherits that memory in
        // any case.
        if self.looked_for != Some(bell) {
            self.look();
            self.looked_for = Some(bell);
        }
        self.note_left_out();
        let is_end = self.shared.stop.load(Ordering::SeqCst);
        if self.is_held() || is_end {
            // A block that is being written is in memory still. The store may be slow, or die. That
            // holds for one that no child inherits too: the end of its write would be waited for.
            for id in Vec::from_iter(self.writing.iter().copied()) {
                self.bring(id)?;
            }
            self.end_loads();
        }
        // Other memory may be where a span was, and no later call would take the advice back.
        if self.has_changed() || self.kernel.is_changing() {
            return Err(Changed);
        }
        let spans: Vec<(usize, usize)> = self.spans.iter().map(|(&start, &end)| (start, end)).collect();
        if !self.advise(&spans, self.advice()) {
            return Err(Changed);
        }
        if self.is_held() {
            self.advise_leftovers()?;
            if !self.leave_out() {
                return Err(Changed);
            }
            let ids: Vec<u32> = self.blocks.ids().collect();
            for id in ids {
                // One that was taken back above, and not put in place yet, must not keep its slot.
                let is_back = matches!(self.blocks.get(id).state, State::Back(_));
                if self.is_left_out(self.blocks.get(id).at) && !is_end && !is_back {
                    continue;
                }
                if !matches!(self.blocks.get(id).state, State::Resident | State::Empty | State::Lost) {
                    self.bring(id)?;
                }
            }
        }
        // Memory may have moved before the kernel got the advice. Then the advice changed the old
        // place, and the caller must try again.
        if self.has_changed() {
            return Err(Changed);
        }
        self.zero(bell)?;
        self.looked_for = None;
        self.has_ended_all = is_end;
        Ok(())
    }

    /// Whether the pager has read an event, other than a page fault, and not handled it.
    fn has_changed(&self) -> bool {
        self.events.iter().any(|event| !matches!(event, Event::Fault(_)))
    }

    fn is_held(&self) -> bool {
        self.shared.holds.load(Ordering::SeqCst) > 0
    }

    /// Lets child processes inherit mappings that are registered and not managed. Such mappings
    /// arise in two ways. When `mremap` enlarges a registered mapping, the new part is registered
    /// too, and the kernel sends no event of the growth. The program may make that part read-only,
    /// or unmap the memory next to it, before the pager manages it. And a move with
    /// `MREMAP_DONTUNMAP` leaves a registered mapping at the old place.
    fn advise_leftovers(&mut self) -> Result<(), Changed> {
        let mut advised = Vec::new();
        // A mapping may grow between the look and the advice, and the kernel sends no event of the
        // growth. If a mapping grows after the advice, the new part has the mapping's flags. So
        // repeat the look until it finds no new mapping.
        loop {
            self.kernel.read_mappings(&mut self.mappings);
            let mut leftovers = Vec::new();
            for at in 0..self.mappings.len() {
                let Mapping { start, end, .. } = self.mappings[at];
                let span = self.spans.range(..=start).next_back();
                if span.is_some_and(|(_, &last)| last >= end) || self.is_own(start) {
                    continue;
                }
                match self.kernel.is_registered(start) {
                    Ok(true) => leftovers.push((start, end)),
                    Ok(false) => {}
                    Err(_) => return Err(Changed),
                }
            }
            if leftovers == advised {
                return Ok(());
            }
            for &(start, end) in &leftovers {
                let _ = self.kernel.advise(start, end - start, Advice::LinuxDoFork);
            }
            advised = leftovers;
        }
    }

    /// Whether this address is in registered memory of the pager itself, which no child inherits.
    fn is_own(&self, address: usize) -> bool {
        let bells = (self.shared.bells.base, BELLS * PAGE_SIZE);
        let own = [(self.staging, SLOTS * BLOCK), (self.nursery, BLOCK), bells];
        own.into_iter().any(|(at, bytes)| (at..at + bytes).contains(&address))
    }

    /// Makes a block resident.
    fn bring(&mut self, id: u32) -> Result<(), Changed> {
        let slot = match self.blocks.get(id).state {
            State::Resident | State::Lost => return Ok(()),
            State::Writing(slot) => {
                // Stopping this write loses nothing, because the slot has the whole block. The part
                // that has reached the store is written again before anything reads it.
                self.stop(id);
                count(&self.shared.counters.taken_back, 1);
                slot
            }
            State::Ready(slot) | State::Back(slot) => slot,
            State::Filling(_) => {
                self.end_fill(id);
                return self.bring(id);
            }
            State::Empty => {
                let slot = self.frame_now()?;
                let at = self.slot(slot);
                self.kernel.pages_mut(at, BLOCK_PAGES).as_flattened_mut().fill(0);
                slot
            }
            State::Stored if self.blocks.get(id).is_partial => return self.bring_singles(id),
            State::Stored => {
                let slot = self.frame_now()?;
                count(&self.shared.counters.reads, 1);
                if !self.read(id, slot) {
                    self.slots[slot] = Slot::Free;
                    self.lose(id, Some);
                    return Ok(());
                }
                slot
            }
        };
        let block = self.blocks.get_mut(id);
        let was = block.state;
        // The address space may change before the block is in place. Then the state tells whether
        // the slot may be dropped: `Ready` if the store has the content too, and `Back` if not.
        block.state = match was {
            State::Stored | State::Ready(_) => State::Ready(slot),
            _ => State::Back(slot),
        };
        self.move_in(id, slot)?;
        self.ready.retain(|&(other, _)| other != id);
        let block = self.blocks.get_mut(id);
        block.state = State::Resident;
        // A block that is wanted back while it is being written is in use too.
        let is_early = block.history.is_early || matches!(was, State::Writing(_));
        block.history.came();
        self.forget_singles(id, 0..BLOCK_PAGES);
        // An eviction goes through the order, and has an end since blocks that come are behind it.
        match is_early && self.eviction.is_none() {
            true => self.policy.came_back(id),
            false => self.policy.came(id),
        }
        self.may_spare_room = true;
        Ok(())
    }

    /// Brings every page of a partial block that is in the store.
    fn bring_singles(&mut self, id: u32) -> Result<(), Changed> {
        for page in 0..BLOCK_PAGES {
            if self.blocks.get(id).is_away(page) && !self.bring_single(id, page)? {
                self.lose_single(id, page);
            }
        }
        Ok(())
    }

    /// Gives up the content of one page of a partial block. The block's other pages, perhaps of
    /// other mappings, stay as they are. Memory that is mapped there later is not lost.
    fn lose_single(&mut self, id: u32, page: usize) {
        self.count_lost();
        let block = self.blocks.get_mut(id);
        block.set_zero(page, true);
        if let Some(stored) = &mut block.stored {
            // Forget the hash, so that the pager writes the page again even if its content is the
            // same.
            stored[page] = 0;
        }
        let at = block.at + page * PAGE_SIZE;
        self.poison(at);
    }

    /// Returns a frame, or an error if the address space has changed meanwhile.
    fn frame_now(&mut self) -> Result<usize, Changed> {
        // Its block could not come into place now. Many page faults would take many frames.
        if self.kernel.is_changing() {
            return Err(Changed);
        }
        // Without memory the kernel refuses each block, and each would keep a frame.
        if let Some(id) = self.refused_block
            && self.blocks.is_known(id)
            && matches!(self.blocks.get(id).state, State::Ready(_) | State::Back(_))
            && self.bring(id).is_err()
        {
            // Another block may come all the same, if its page table is there.
            if self.slots.iter().filter(|slot| **slot == Slot::Busy).count() > SLOTS / 2 {
                return Err(Changed);
            }
        } else {
            self.refused_block = None;
        }
        let slot = self.frame();
        if self.events.is_empty() {
            return Ok(slot);
        }
        self.slots[slot] = Slot::Free;
        Err(Changed)
    }

    /// Gives up the content of a whole block that cannot be read. A thread that touches it gets
    /// SIGBUS.
    fn lose(&mut self, id: u32, place: impl Fn(usize) -> Option<usize>) {
        self.count_lost();
        // Its single pages in place stay there, and count against the limit.
        self.blocks.get_mut(id).state = State::Lost;
        self.poison_block(id, place);
    }

    /// Poisons each page of a block where `place` says that it is.
    fn poison_block(&mut self, id: u32, place: impl Fn(usize) -> Option<usize>) {
        let at = self.blocks.get(id).at;
        for page in 0..BLOCK_PAGES {
            if place(at + page * PAGE_SIZE).is_some_and(|to| self.poison(to)) {
                self.blocks.get_mut(id).clear_ending(page);
            }
        }
    }

    fn count_lost(&mut self) {
        if self.shared.counters.lost.fetch_add(1, Ordering::Relaxed) == 0 {
            self.outside.tell("pages cannot be had back; the program gets SIGBUS where it touches them");
        }
    }

    /// Poisons a page at its present address. Otherwise the page would read as zeros. Returns false
    /// if a page is in place there already, or none can be.
    fn poison(&mut self, address: usize) -> bool {
        let page = address / PAGE_SIZE * PAGE_SIZE;
        while let Some(at) = self.now_at(page) {
            match self.kernel.poison(at, PAGE_SIZE) {
                Err(Stopped { why, .. }) if may_pass(why) => self.wait_and_hear(),
                poisoned => {
                    self.kernel.wake(at, PAGE_SIZE);
                    return poisoned.is_ok();
                }
            }
        }
        false
    }

    /// Fills a page with zeros. Returns false if a page is in place there already, or none can be.
    fn zero(&mut self, address: usize) -> Result<bool, Changed> {
        let at = address / PAGE_SIZE * PAGE_SIZE;
        match self.kernel.zero(at, PAGE_SIZE) {
            Err(Stopped { why, .. }) if may_pass(why) => Err(Changed),
            filled => {
                self.kernel.wake(at, PAGE_SIZE);
                Ok(filled.is_ok())
            }
        }
    }
}

/// Whether the kernel may fill a page a little later: the address space changes, or the kernel has
/// no memory for the page now, as at the limit of a memory cgroup.
fn may_pass(why: Errno) -> bool {
    matches!(why, Errno::AGAIN | Errno::NOMEM)
}

impl<K: Kernel, S> Drop for Work<K, S> {
    fn drop(&mut self) {
        for (at, bytes) in [(self.staging, SLOTS * BLOCK), (self.nursery, BLOCK)] {
            // Unregister the memory before it is removed. Otherwise the kernel would wait in the
            // removal until this thread reads an event, and this thread waits for the removal.
            let _ = self.kernel.unregister(at, at + bytes);
            let _ = self.kernel.advise(at, bytes, Advice::LinuxDontNeed);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::pager::simulator::{Machine, Simulated, address, work_at_rest};
    use std::io;
    use weir_core::PageBytes;

    /// A store of which nothing is read, since all pages are zeros.
    struct Nothing;

    impl Store for Nothing {
        fn claim(&mut self) -> Option<u64> {
            None
        }

        fn release(&mut self, _: u64) {}

        fn write(&mut self, _: u64, _: &[PageBytes]) -> io::Result<()> {
            Err(io::ErrorKind::Unsupported.into())
        }

        fn settle(&mut self) -> io::Result<()> {
            Ok(())
        }

        fn read(&mut self, _: u64, _: &mut [PageBytes]) -> io::Result<()> {
            Err(io::ErrorKind::Unsupported.into())
        }
    }

    /// Work with this many whole blocks in the store, side by side.
    fn with_stored_blocks(blocks: usize) -> (Work<Machine, Simulated>, Vec<u32>) {
        let (mut work, first) = work_at_rest();
        work.shared.limit.store(64, Ordering::Relaxed);
        let first = first / BLOCK_PAGES * BLOCK_PAGES;
        let (start, end) = (first, first + blocks * BLOCK_PAGES);
        work.kernel.world.map(start, end);
        work.kernel.register(address(start), address(end)).unwrap();
        let ids = (0..blocks)
            .map(|number| {
                let id = work.blocks.add(address(first + number * BLOCK_PAGES), State::Stored);
                work.blocks.get_mut(id).zeros = [u64::MAX; BLOCK_PAGES / 64];
                id
            })
            .collect();
        (work, ids)
    }

    fn free_frames(work: &mut Work<Machine, Simulated>, count: usize) {
        let slots: Vec<usize> = (0..count).map(|_| work.frame()).collect();
        slots.into_iter().for_each(|slot| work.slots[slot] = Slot::Free);
    }

    fn states(work: &Work<Machine, Simulated>, ids: &[u32]) -> Vec<u8> {
        let letter = |id: &u32| match work.blocks.get(*id).state {
            State::Stored => b'S',
            State::Filling(_) => b'F',
            State::Ready(_) => b'r',
            State::Resident => b'R',
            _ => b'?',
        };
        ids.iter().map(letter).collect()
    }

    #[test]
    fn the_next_blocks_of_a_stream_come_into_place_and_the_last_one_waits_for_its_page_fault() {
        let (mut work, ids) = with_stored_blocks(40);
        let at = |work: &Work<_, _>, number: usize| work.blocks.get(ids[number]).at;
        let mut number = 0;
        while !work.policy.is_streaming() {
            assert!(number < 30, "a sweep is a stream");
            let address = at(&work, number);
            if work.blocks.get(ids[number]).state != State::Resident {
                work.fault(address, &mut None).unwrap();
            }
            number += 1;
        }
        let shared = Arc::clone(&work.shared);
        let used = || shared.counters.prefetched.load(Ordering::Relaxed);
        let before = used();
        free_frames(&mut work, 6);
        while work.background() {}
        let next = number
            + ids[number..].iter().position(|&id| work.blocks.get(id).state != State::Resident).unwrap();
        assert_eq!(next - number, AHEAD as usize - 1);
        assert_eq!(states(&work, &ids[number..number + 4]), b"RRrS");
        assert_eq!((work.placed.len(), used() - before), (2, 0), "no stream has passed them");
        let address = at(&work, next);
        work.fault(address, &mut None).unwrap();
        assert_eq!((work.placed.len(), used() - before), (0, 3));
    }

    #[test]
    fn page_faults_take_no_frames_while_the_address_space_changes() {
        let blocks = 2 * SLOTS;
        let (mut work, ids) = with_stored_blocks(blocks);
        ids.iter().step_by(2).for_each(|&id| work.blocks.get_mut(id).state = State::Empty);
        // The thread that changes it waits until its event is read.
        work.kernel.world.changing = 1;
        for &id in &ids {
            let address = work.blocks.get(id).at;
            assert!(work.fault(address, &mut None).is_err());
        }
        assert_eq!(work.frames(), 0);
        work.kernel.world.changing = 0;
        let address = work.blocks.get(ids[0]).at;
        work.fault(address, &mut None).unwrap();
        assert_eq!(work.blocks.get(ids[0]).state, State::Resident);
    }

    #[test]
    fn blocks_that_several_threads_wait_for_are_read_at_the_same_time() {
        let (mut work, ids) = with_stored_blocks(4);
        free_frames(&mut work, 2);
        work.helpers.played.open_one(Box::new(Nothing), &Arc::default());
        let faults = ids.iter().map(|&id| (work.blocks.get(id).at, Duration::ZERO, None));
        work.faults = faults.collect();
        // The policy of a program that streams brings whole blocks.
        work.faults
            .iter_mut()
            .for_each(|(_, _, plan)| *plan = Some(Plan { stride: None, guess: None, is_whole: true }));
        work.blocks.get_mut(ids[1]).state = State::Empty;
        work.begin_reads();
        assert_eq!(states(&work, &ids), b"F?FS", "there are two frames");
        assert_eq!(work.shared.counters.reads.load(Ordering::Relaxed), 2);
        let address = work.blocks.get(ids[2]).at;
        work.fault(address, &mut Some(Plan { stride: None, guess: None, is_whole: true })).unwrap();
        assert_eq!(states(&work, &ids), b"F?RS");
        let counters = &work.shared.counters;
        let counted = [&counters.ahead, &counters.prefetched].map(|counter| counter.load(Ordering::Relaxed));
        assert_eq!(counted, [0, 0], "nobody has prefetched it");
        work.end_loads();
    }
}
