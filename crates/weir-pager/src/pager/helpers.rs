//! Helpers: threads that move pages between slots and the store while the pager's thread goes on.
//!
//! The pager's thread hands out a block, which is a load of several parts. Helpers take one part
//! after another, and the pager's thread takes parts of the load for which it waits. A load belongs
//! to its slot. Until the pager has ended or stopped it, no other thread touches the slot's pages.
//! The pager's tables are its own: a part has copies of what it needs. Each helper has a connection
//! to the store. It opens that connection when the pager first moves a block: most processes never
//! do.

use super::blocks::{Bits, has, set};
use crate::digest::Key;
use crate::kernel::{Kernel, Waker, call_system, is_filtered, own_pages};
use crate::{BLOCK_PAGES, Error, OpenLane, Store};
use rustix::thread::gettid;
use std::collections::VecDeque;
use std::fs::File;
use std::io;
use std::path::Path;
use std::sync::atomic::{AtomicBool, AtomicU32, AtomicUsize, Ordering};
use std::sync::mpsc::sync_channel;
use std::sync::{Arc, Condvar, Mutex, MutexGuard};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};
use weir_core::{PAGE_SIZE, PageBytes, uniform_value};
use weir_share::Offers;

/// If a thread of the pager panics, threads that wait for a page would wait for ever. So a panic
/// ends the process.
pub(super) struct AbortOnPanic;

impl Drop for AbortOnPanic {
    fn drop(&mut self) {
        if std::thread::panicking() {
            std::process::abort();
        }
    }
}

/// Number of slots. Each has one load at most.
pub(super) const SLOTS: usize = 24;
/// Least time between two attempts of a helper to open its connection.
const ASK_EVERY: Duration = Duration::from_millis(100);
/// Number of pages of a part, a multiple of 64. A page fault may have to wait while the pager's
/// thread carries one. A thread that waits for the block gets it in one part if there are no
/// helpers.
const PART: usize = 128;

/// All pages of one block on their way between a slot and the store.
pub(super) struct Load<'a> {
    pub is_write: bool,
    /// The address of the slot.
    pub at: usize,
    /// The number of the block's first page in the store.
    pub room: u64,
    /// The pages of the block that are zeros, and are not in the store.
    pub zeros: &'a Bits,
    /// For each page of the block the hash of its content in the store, or 0.
    pub stored: Option<&'a [u64]>,
}

/// The entries of a block that a load changes.
pub(super) struct Notes<'a> {
    pub zeros: &'a mut Bits,
    pub stored: Option<&'a mut [u64]>,
}

/// Numbers of pages that a write did not send to the store.
#[derive(Clone, Copy, Debug, Default)]
pub(super) struct Kept {
    pub zeros: u64,
    /// Pages whose content the store had already.
    pub clean: u64,
}

/// A part of a [`Load`]. All indexes are those of the part's pages.
#[derive(Debug, Default)]
struct Part {
    is_write: bool,
    at: usize,
    count: usize,
    page: u64,
    zeros: Bits,
    /// Empty for a block without hashes.
    stored: Vec<u64>,
    kept: Kept,
    trouble: Option<Trouble>,
}

/// The reason why a load could not be moved.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(super) enum Trouble {
    /// Its write was given up, since somebody could not wait for a store that stands still.
    GivenUp,
    Failed,
}

impl Part {
    /// Moves the part's pages, which lie in `pages`. A write that returns `Ok` may still be under
    /// way. `is_needed` says whether a read waits for a store that stands still.
    fn carry(
        &mut self,
        pages: &mut [PageBytes],
        store: &mut dyn Store,
        key: &Key,
        is_needed: bool,
    ) -> io::Result<()> {
        let result =
            if self.is_write { self.write(pages, store, key) } else { self.read(pages, store, is_needed) };
        self.trouble = None;
        self.note(result)
    }

    /// Notes the error of a call of the store.
    fn note(&mut self, result: io::Result<()>) -> io::Result<()> {
        if let Err(error) = &result {
            let is_given_up = error.kind() == io::ErrorKind::Interrupted;
            let trouble = if is_given_up { Trouble::GivenUp } else { Trouble::Failed };
            self.trouble = self.trouble.max(Some(trouble));
            // Nobody knows which pages the store has.
            self.stored.fill(0);
        }
        result
    }

    fn write(&mut self, pages: &[PageBytes], store: &mut dyn Store, key: &Key) -> io::Result<()> {
        // The first page that is not written yet. The pages from `first` to `at` are written
        // together. A page of zeros, or a page that the store has already, is skipped and ends such
        // a run.
        let mut first = 0;
        for at in 0..=pages.len() {
            let stays = pages.get(at).is_none_or(|page| {
                let is_zero = uniform_value(page) == Some(0);
                set(&mut self.zeros, at, is_zero);
                let is_clean = !is_zero
                    && self.stored.get_mut(at).is_some_and(|stored| {
                        let hash = key.hash(page);
                        std::mem::replace(stored, hash) == hash
                    });
                self.kept.zeros += u64::from(is_zero);
                self.kept.clean += u64::from(is_clean);
                is_zero || is_clean
            });
            if stays {
                if first < at {
                    store.write(self.page + first as u64, &pages[first..at])?;
                }
                first = at + 1;
            }
        }
        Ok(())
    }

    fn read(&self, pages: &mut [PageBytes], store: &mut dyn Store, is_needed: bool) -> io::Result<()> {
        let mut page = 0;
        while page < pages.len() {
            let is_zero = has(&self.zeros, page);
            let end = (page..pages.len()).find(|&other| has(&self.zeros, other) != is_zero);
            let end = end.unwrap_or(pages.len());
            if is_zero {
                pages[page..end].as_flattened_mut().fill(0);
            } else {
                let (first, out) = (self.page + page as u64, &mut pages[page..end]);
                if is_needed { store.read(first, out) } else { store.read_ahead(first, out) }?;
            }
            page = end;
        }
        Ok(())
    }
}

/// The loads, by their slots.
#[derive(Default)]
struct Loads {
    /// The parts of each slot's load. In the place of a part that a thread has taken is an empty
    /// one.
    parts: [Vec<Part>; SLOTS],
    /// Number of parts that have not ended.
    left: [usize; SLOTS],
    /// The parts that nobody has taken, of reads and of writes: slot, and number of the part.
    queue: [VecDeque<(usize, usize)>; 2],
}

impl Loads {
    /// Takes the next part, or the next one of a slot.
    fn take(&mut self, of: Option<usize>) -> Option<Taken> {
        let is_it = |&(slot, _): &(usize, usize)| of.is_none_or(|of| of == slot);
        let next = self.queue.iter_mut().find_map(|queue| queue.remove(queue.iter().position(is_it)?));
        let (slot, number) = next?;
        Some(Taken { slot, number, part: std::mem::take(&mut self.parts[slot][number]) })
    }

    /// Puts back a part that has ended. Returns whether it was the last one of its load.
    fn put(&mut self, Taken { slot, number, part }: Taken) -> bool {
        self.parts[slot][number] = part;
        self.left[slot] -= 1;
        self.left[slot] == 0
    }
}

/// A part that a thread is carrying.
struct Taken {
    slot: usize,
    number: usize,
    part: Part,
}

/// The state that the threads share.
struct Desk {
    key: Key,
    spin: Duration,
    /// A number that changes when there is something to do. Threads that spin look at it.
    news: AtomicU32,
    /// Number of helpers that have a connection.
    open: AtomicUsize,
    /// A bit for each slot: all parts of its load have ended.
    ended: AtomicU32,
    /// Number of helpers that still have to make the present call.
    calling: AtomicU32,
    /// Whether the pager's thread waits for helpers, and cannot wait for a store that stands still.
    hurry: Arc<AtomicBool>,
    state: Mutex<State>,
    /// There is something to do.
    come: Condvar,
    /// A load, or a call, has ended.
    done: Condvar,
    waker: Waker,
}

#[derive(Default)]
struct State {
    loads: Loads,
    /// A system call that each helper makes, and its number.
    call: ([usize; 6], u32),
    is_over: bool,
}

impl Desk {
    fn state(&self) -> MutexGuard<'_, State> {
        self.state.lock().expect("nothing panics under it")
    }

    /// Lets the threads know that the state has changed.
    fn post(&self, state: MutexGuard<'_, State>) {
        // Under the lock: else a thread could begin to wait just after this.
        self.news.fetch_add(1, Ordering::Release);
        drop(state);
        self.come.notify_all();
    }

    /// Notes that a part has ended. Returns whether its load has.
    fn put(&self, taken: Taken) -> bool {
        let slot = taken.slot;
        let mut state = self.state();
        let is_last = state.loads.put(taken);
        if is_last {
            self.ended.fetch_or(1 << slot, Ordering::Release);
            self.done.notify_all();
        }
        is_last
    }

    fn has_ended(&self, slot: usize) -> bool {
        self.ended.load(Ordering::Acquire) >> slot & 1 != 0
    }

    /// Waits until `is_so`, first for as long as the threads spin.
    fn wait<'a>(
        &'a self,
        offers: &mut Offers,
        change: &Condvar,
        is_so: impl Fn() -> bool,
    ) -> MutexGuard<'a, State> {
        let begun = Instant::now();
        while !is_so() && begun.elapsed() < self.spin && !offers.is_crowded() {
            for _ in 0..32 {
                std::hint::spin_loop();
            }
            offers.offer();
        }
        let mut state = self.state();
        while !is_so() {
            state = change.wait(state).expect("nothing panics under it");
        }
        state
    }
}

/// Has the helpers hurry until it is dropped.
struct Hurry<'a>(&'a Desk);

impl<'a> Hurry<'a> {
    fn new(desk: &'a Desk) -> Self {
        desk.hurry.store(true, Ordering::Relaxed);
        Hurry(desk)
    }
}

impl Drop for Hurry<'_> {
    fn drop(&mut self) {
        self.0.hurry.store(false, Ordering::Relaxed);
    }
}

/// The helpers, or none.
pub(super) struct Helpers {
    desk: Arc<Desk>,
    offers: Offers,
    /// The time at which helpers were last asked to open their connections.
    asked: Option<Instant>,
    /// A bit for each slot: this thread has written parts of its load, and they may be under way.
    unsettled: u32,
    threads: Vec<JoinHandle<()>>,
    /// For each thread an address in its stack, and its thread ID (TID).
    stacks: Vec<usize>,
    ids: Vec<i32>,
    #[cfg(test)]
    pub(super) played: played::Lanes,
}

impl Helpers {
    /// Starts a thread for each of these lanes. Each spins as the pager's thread does. `waker` ends
    /// the wait of the pager's thread.
    ///
    /// # Errors
    /// Fails with the system's error. If a thread cannot be started, there are fewer.
    pub(super) fn start(
        lanes: impl IntoIterator<Item = OpenLane>,
        spin: Duration,
        waker: Waker,
    ) -> Result<Self, Error> {
        let desk = Arc::new(Desk {
            key: Key::random()?,
            spin,
            news: AtomicU32::new(0),
            open: AtomicUsize::new(0),
            ended: AtomicU32::new(0),
            calling: AtomicU32::new(0),
            hurry: Arc::default(),
            state: Mutex::default(),
            come: Condvar::new(),
            done: Condvar::new(),
            waker,
        });
        let (mut threads, mut stacks, mut ids) = (Vec::new(), Vec::new(), Vec::new());
        for open in lanes {
            let (its, (say, hear)) = (Arc::clone(&desk), sync_channel(1));
            let builder = std::thread::Builder::new().name("weir-pager-help".into()).stack_size(256 << 10);
            let run = move || {
                let _abort = AbortOnPanic;
                let _ = say.send(((&raw const its).addr(), gettid().as_raw_nonzero().get()));
                drop(say);
                // It has the priority and the short turns of the pager's thread, which starts it.
                work(&its, open);
            };
            let Ok(thread) = builder.spawn(run) else { break };
            threads.push(thread);
            if let Ok((stack, id)) = hear.recv() {
                stacks.push(stack);
                ids.push(id);
            }
        }
        Ok(Helpers {
            desk,
            offers: Offers::default(),
            asked: None,
            unsettled: 0,
            threads,
            stacks,
            ids,
            #[cfg(test)]
            played: played::Lanes::default(),
        })
    }

    /// For each thread, an address in its stack.
    pub(super) fn stacks(&self) -> &[usize] {
        &self.stacks
    }

    /// The thread IDs (TIDs) of the helpers.
    pub(super) fn ids(&self) -> &[i32] {
        &self.ids
    }

    /// The key of the hashes by which the pager knows what the store has.
    pub(super) fn key(&self) -> &Key {
        &self.desk.key
    }

    /// Whether no helper has a connection, so that the pager's thread carries everything.
    pub(super) fn are_away(&self) -> bool {
        #[cfg(test)]
        if self.played.are_there() {
            return false;
        }
        self.desk.open.load(Ordering::Relaxed) == 0
    }

    /// Whether the end of a load wakes the pager's thread. The lanes of a test wake nobody.
    #[cfg_attr(not(test), expect(clippy::unused_self))]
    pub(super) fn wakes(&self) -> bool {
        #[cfg(test)]
        if self.played.are_there() && self.desk.state().loads.left.iter().any(|&left| left > 0) {
            return false;
        }
        true
    }

    /// Begins to move a block between a slot and the store. With `is_urgent` it goes before all
    /// that was begun earlier. [`end`](Self::end) or [`stop`](Self::stop) must follow.
    pub(super) fn begin(&mut self, slot: usize, load: &Load<'_>, is_urgent: bool) {
        let count = if is_urgent && self.are_away() { BLOCK_PAGES } else { PART };
        let desk = Arc::clone(&self.desk);
        let mut state = desk.state();
        let loads = &mut state.loads;
        debug_assert_eq!(loads.left[slot], 0, "a slot has one load");
        let parts = &mut loads.parts[slot];
        parts.resize_with(BLOCK_PAGES / count, Part::default);
        for (part, first) in parts.iter_mut().zip((0..).step_by(count)) {
            (part.is_write, part.at, part.count) = (load.is_write, load.at + first * PAGE_SIZE, count);
            (part.page, part.kept, part.trouble) = (load.room + first as u64, Kept::default(), None);
            part.zeros[..count / 64].copy_from_slice(&load.zeros[first / 64..(first + count) / 64]);
            part.stored.clear();
            if let Some(stored) = load.stored.filter(|_| load.is_write) {
                part.stored.extend_from_slice(&stored[first..first + count]);
            }
        }
        let numbers = 0..parts.len();
        loads.left[slot] = numbers.len();
        // Reads go before writes: a thread waits for them, or will soon.
        let queue = &mut loads.queue[usize::from(load.is_write)];
        match is_urgent {
            true => numbers.rev().for_each(|number| queue.push_front((slot, number))),
            false => queue.extend(numbers.map(|number| (slot, number))),
        }
        if !self.are_away() || self.asks_to_open() {
            desk.post(state);
        }
    }

    /// A bit for each slot whose load has no part left. It must still be ended.
    pub(super) fn ended<K: Kernel>(&mut self, kernel: &mut K) -> u32 {
        self.play(kernel, None);
        self.desk.ended.load(Ordering::Acquire)
    }

    /// Carries the next part of a slot's load on this thread. Returns false if others have taken
    /// all of them.
    pub(super) fn step<K: Kernel>(&mut self, slot: usize, store: &mut dyn Store, kernel: &mut K) -> bool {
        let Some(mut taken) = self.desk.state().loads.take(Some(slot)) else { return false };
        let part = &mut taken.part;
        // An error is noted in the part. The pages of a read are needed only once somebody waits
        // for all of them.
        let _ = part.carry(kernel.pages_mut(part.at, part.count), store, &self.desk.key, false);
        self.unsettled |= u32::from(part.is_write) << slot;
        self.desk.put(taken);
        true
    }

    /// Carries what is left of a slot's load, and waits for its end. Nothing of a write is under
    /// way afterwards. `is_needed` says whether a part of a read that has failed is tried again.
    ///
    /// # Errors
    /// A part could not be moved. The pages of a read are incomplete then.
    pub(super) fn end<K: Kernel>(
        &mut self,
        slot: usize,
        notes: Notes<'_>,
        store: &mut dyn Store,
        kernel: &mut K,
        is_needed: bool,
    ) -> Result<Kept, Trouble> {
        self.play(kernel, None);
        while self.step(slot, store, kernel) {}
        self.play(kernel, Some(slot));
        let desk = Arc::clone(&self.desk);
        let mut state = desk.wait(&mut self.offers, &desk.done, || desk.has_ended(slot));
        let mut parts = std::mem::take(&mut state.loads.parts[slot]);
        drop(state);
        let has_failed = self.is_unsettled(slot) && store.settle().is_err();
        for part in parts.iter_mut().filter(|part| part.trouble.is_some()) {
            // A thread's own connection may have failed. The pager's may still read the pages. It
            // must not write them again: the first write could come after a later one.
            if is_needed && !part.is_write {
                let _ = part.carry(kernel.pages_mut(part.at, part.count), store, &desk.key, true);
            }
        }
        let trouble = parts.iter().filter_map(|part| part.trouble).max();
        let kept = self.note(slot, parts, notes);
        trouble.max(has_failed.then_some(Trouble::Failed)).map_or(Ok(kept), Err)
    }

    /// Takes back what nobody has begun of a slot's load, and waits for the rest, but not for a
    /// store that stands still. Writes of this thread may be under way until the store is settled.
    ///
    /// # Errors
    /// A part could not be moved.
    pub(super) fn stop<K: Kernel>(
        &mut self,
        slot: usize,
        notes: Notes<'_>,
        kernel: &mut K,
    ) -> Result<(), Trouble> {
        self.play(kernel, None);
        let desk = Arc::clone(&self.desk);
        let _hurry = Hurry::new(&desk);
        let mut state = desk.state();
        let Loads { queue, left, .. } = &mut state.loads;
        queue.iter_mut().flatten().for_each(|&mut (other, _)| left[slot] -= usize::from(other == slot));
        queue.iter_mut().for_each(|queue| queue.retain(|&(other, _)| other != slot));
        if state.loads.left[slot] == 0 {
            desk.ended.fetch_or(1 << slot, Ordering::Relaxed);
        }
        drop(state);
        self.play(kernel, Some(slot));
        let mut state = desk.wait(&mut self.offers, &desk.done, || desk.has_ended(slot));
        let parts = std::mem::take(&mut state.loads.parts[slot]);
        drop(state);
        let trouble = parts.iter().filter_map(|part| part.trouble).max();
        self.is_unsettled(slot);
        self.note(slot, parts, notes);
        trouble.map_or(Ok(()), Err)
    }

    fn is_unsettled(&mut self, slot: usize) -> bool {
        let is_so = self.unsettled >> slot & 1 != 0;
        self.unsettled &= !(1 << slot);
        is_so
    }

    /// Notes what the parts of a load have found, and forgets the load.
    fn note(&mut self, slot: usize, parts: Vec<Part>, notes: Notes<'_>) -> Kept {
        let Notes { zeros, mut stored } = notes;
        let (mut kept, mut first) = (Kept::default(), 0);
        for part in &parts {
            let end = first + part.count;
            if part.is_write {
                zeros[first / 64..end / 64].copy_from_slice(&part.zeros[..part.count / 64]);
                if let Some(stored) = stored.as_deref_mut() {
                    stored[first..end].copy_from_slice(&part.stored);
                }
            }
            kept.zeros += part.kept.zeros;
            kept.clean += part.kept.clean;
            first = end;
        }
        self.desk.ended.fetch_and(!(1 << slot), Ordering::Relaxed);
        // Their memory is used again.
        self.desk.state().loads.parts[slot] = parts;
        kept
    }

    /// Whether helpers without a connection are to open one now. They are asked once in a while.
    fn asks_to_open(&mut self) -> bool {
        let is_due = self.asked.is_none_or(|asked| asked.elapsed() >= ASK_EVERY);
        if is_due && self.desk.open.load(Ordering::Relaxed) < self.threads.len() {
            self.asked = Some(Instant::now());
            return true;
        }
        false
    }

    /// Makes each helper make a system call that changes its rights, as
    /// [`Kernel::call`] does for the pager's thread.
    pub(super) fn call(&mut self, call: [usize; 6]) {
        if self.threads.is_empty() {
            return;
        }
        let desk = &self.desk;
        let _hurry = Hurry::new(desk);
        let mut state = desk.state();
        state.call = (call, state.call.1.wrapping_add(1));
        desk.calling.store(self.threads.len() as u32, Ordering::Relaxed);
        desk.post(state);
        let have_called = || desk.calling.load(Ordering::Acquire) == 0;
        drop(desk.wait(&mut self.offers, &desk.done, have_called));
    }

    /// Lets the lanes of a test carry parts: some, or all that are taken of one slot's load.
    #[cfg_attr(not(test), expect(clippy::unused_self, unused_variables))]
    fn play<K: Kernel>(&mut self, kernel: &mut K, of: Option<usize>) {
        #[cfg(test)]
        self.played.play(&self.desk, kernel, of);
    }
}

impl Drop for Helpers {
    fn drop(&mut self) {
        self.desk.hurry.store(true, Ordering::Relaxed);
        let mut state = self.desk.state();
        state.is_over = true;
        self.desk.post(state);
        for thread in self.threads.drain(..) {
            // A thread that has panicked has ended the process.
            let _ = thread.join();
        }
        // A thread that has been joined still counts for a moment. The caller of `Pager::stop` may
        // need to be the only thread.
        for id in self.ids.drain(..) {
            while Path::new(&format!("/proc/self/task/{id}")).exists() {
                std::thread::sleep(Duration::from_micros(100));
            }
        }
    }
}

/// Carries a part by a connection of its own. Once this has returned, nothing of it is under way.
fn in_lane(part: &mut Part, pages: &mut [PageBytes], lane: &mut dyn Store, key: &Key) -> io::Result<()> {
    let result = part.carry(pages, lane, key, false);
    let settled = if part.is_write { lane.settle() } else { Ok(()) };
    result.and(part.note(settled))
}

/// Whether an error says nothing of the connection: the store does not answer, or the write was
/// given up.
fn is_of_store(error: &io::Error) -> bool {
    matches!(error.kind(), io::ErrorKind::TimedOut | io::ErrorKind::Interrupted)
}

/// A helper.
fn work(desk: &Desk, open: OpenLane) {
    let (mut open, mut lane, mut tried) = (open, None, None);
    let (mut seen, mut called) = (0, 0);
    let mut offers = Offers::default();
    let status = File::open("/proc/thread-self/status").ok();
    loop {
        let state = desk.wait(&mut offers, &desk.come, || desk.news.load(Ordering::Acquire) != seen);
        seen = desk.news.load(Ordering::Acquire);
        if state.is_over {
            return;
        }
        let (call, number) = state.call;
        drop(state);
        if number != called {
            called = number;
            // SAFETY: the caller of `Pager::also` promises that the call changes only this thread's
            // rights.
            unsafe { call_system(call) };
            if desk.calling.fetch_sub(1, Ordering::AcqRel) == 1 {
                // Under the lock: else the pager's thread could begin to wait just after this.
                let _state = desk.state();
                desk.done.notify_all();
            }
        }
        if lane.is_none() && tried.is_none_or(|tried: Instant| tried.elapsed() >= ASK_EVERY) {
            tried = Some(Instant::now());
            lane = if is_filtered(status.as_ref()) { None } else { open() };
            desk.open.fetch_add(usize::from(lane.is_some()), Ordering::Relaxed);
            lane.iter_mut().for_each(|lane| lane.heed(Arc::clone(&desk.hurry)));
        }
        while let Some(store) = &mut lane {
            // Something else may be due, as a call.
            if desk.news.load(Ordering::Acquire) != seen {
                break;
            }
            let Some(mut taken) = desk.state().loads.take(None) else { break };
            let part = &mut taken.part;
            // SAFETY: the part's pages are the pager's own memory. All of them have memory, and no
            // other thread uses them until this part has ended.
            let pages = unsafe { own_pages(part.at, part.count) };
            let carried = in_lane(part, pages, store.as_mut(), &desk.key);
            if carried.is_err_and(|error| !is_of_store(&error)) {
                // The connection may be over. The next one may work. The pager's thread carries on
                // if this was the last one.
                lane = None;
                desk.open.fetch_sub(1, Ordering::Relaxed);
                desk.put(taken);
                desk.waker.wake();
            } else if desk.put(taken) {
                desk.waker.wake();
            }
        }
    }
}

/// Helpers of a simulator: lanes that the pager's own thread uses, in an order that a seed
/// determines.
#[cfg(test)]
mod played {
    use super::*;

    #[derive(Default)]
    pub struct Lanes {
        /// Each lane, with the part that it has taken.
        open: Vec<(Box<dyn Store>, Option<Taken>)>,
        /// Those that are opened later.
        pub closed: Vec<Box<dyn Store>>,
        plays: u64,
    }

    impl Lanes {
        pub fn open_one(&mut self, lane: Box<dyn Store>, hurry: &Arc<AtomicBool>) {
            let mut lane = lane;
            lane.heed(Arc::clone(hurry));
            self.open.push((lane, None));
        }

        pub fn are_there(&self) -> bool {
            !self.open.is_empty()
        }

        /// A number below `most`, which differs from call to call.
        fn number(&mut self, most: u64) -> u64 {
            self.plays += 1;
            self.plays.wrapping_mul(0x9e37_79b9_7f4a_7c15).rotate_left(23) % most
        }

        pub(super) fn play<K: Kernel>(&mut self, desk: &Desk, kernel: &mut K, of: Option<usize>) {
            // A lane opens now and then, also amid a block.
            if self.number(13) == 0 {
                self.closed.pop().into_iter().for_each(|lane| self.open_one(lane, &desk.hurry));
            }
            for at in 0..self.open.len() {
                let is_awaited = |taken: &Taken| of == Some(taken.slot);
                let is_due = self.open[at].1.as_ref().is_some_and(is_awaited) || self.number(3) == 0;
                let (lane, place) = &mut self.open[at];
                match place.take_if(|_| is_due) {
                    Some(mut taken) => {
                        let part = &mut taken.part;
                        let pages = kernel.pages_mut(part.at, part.count);
                        let _ = in_lane(part, pages, lane.as_mut(), &desk.key);
                        desk.put(taken);
                    }
                    None if place.is_none() && of.is_none() && is_due => {
                        *place = desk.state().loads.take(None);
                    }
                    None => {}
                }
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::kernel::reserve;
    use std::collections::BTreeMap;
    use std::sync::Barrier;
    use std::sync::atomic::AtomicUsize;

    /// The stores of one test: pages by their number, with the thread that has written each.
    #[derive(Default)]
    struct Kept {
        pages: Mutex<BTreeMap<u64, (PageBytes, std::thread::ThreadId)>>,
        /// Pages that were accepted, and are not stored before the next `settle`.
        under_way: AtomicUsize,
        opened: AtomicUsize,
    }

    struct Fake {
        kept: Arc<Kept>,
        under_way: Vec<(u64, PageBytes)>,
        /// Every read, or every write, fails.
        fails: [bool; 2],
        /// Writes wait here twice, if they are to be held up.
        gate: Option<Arc<Barrier>>,
    }

    impl Fake {
        fn of(kept: &Arc<Kept>, fails: [bool; 2]) -> Self {
            Fake { kept: Arc::clone(kept), under_way: Vec::new(), fails, gate: None }
        }
    }

    impl Store for Fake {
        fn claim(&mut self) -> Option<u64> {
            None
        }

        fn release(&mut self, _: u64) {}

        fn write(&mut self, first: u64, pages: &[PageBytes]) -> io::Result<()> {
            self.under_way.extend((first..).zip(pages.iter().copied()));
            self.kept.under_way.fetch_add(pages.len(), Ordering::Relaxed);
            if let Some(gate) = &self.gate {
                gate.wait();
                gate.wait();
            }
            // So that each thread gets some of the parts.
            std::thread::sleep(Duration::from_millis(20));
            Ok(())
        }

        fn settle(&mut self) -> io::Result<()> {
            self.kept.under_way.fetch_sub(self.under_way.len(), Ordering::Relaxed);
            let me = std::thread::current().id();
            let stored = self.under_way.drain(..).map(|(page, bytes)| (page, (bytes, me)));
            self.kept.pages.lock().unwrap().extend(stored);
            if self.fails[1] { Err(io::ErrorKind::Other.into()) } else { Ok(()) }
        }

        fn read(&mut self, first: u64, out: &mut [PageBytes]) -> io::Result<()> {
            std::thread::sleep(Duration::from_millis(20));
            if self.fails[0] {
                return Err(io::ErrorKind::InvalidData.into());
            }
            let pages = self.kept.pages.lock().unwrap();
            for (page, out) in (first..).zip(out) {
                *out = pages.get(&page).ok_or(io::ErrorKind::NotFound)?.0;
            }
            Ok(())
        }
    }

    /// The pager's thread and three helpers, whose lanes fail so.
    fn helpers(kept: &Arc<Kept>, fails: [bool; 2]) -> Helpers {
        let lane = |_| {
            let kept = Arc::clone(kept);
            let mut attempts = 0;
            // The first attempt to open each lane fails.
            let open = move || {
                attempts += 1;
                (attempts > 1).then(|| {
                    kept.opened.fetch_add(1, Ordering::Relaxed);
                    Box::new(Fake::of(&kept, fails)) as Box<dyn Store>
                })
            };
            Box::new(open) as OpenLane
        };
        Helpers::start((0..3).map(lane), Duration::ZERO, Waker::new().unwrap()).unwrap()
    }

    fn value(page: usize) -> u8 {
        // Pages 200 to 209 are zeros.
        if (200..210).contains(&page) { 0 } else { (page % 251) as u8 + 1 }
    }

    /// A block whose pages have their [`value`], in a slot.
    struct Carried {
        kernel: crate::kernel::System,
        slot: usize,
        zeros: Bits,
        stored: Vec<u64>,
    }

    impl Carried {
        fn new() -> Option<Self> {
            let Ok(mut kernel) = crate::kernel::System::open(Duration::ZERO) else {
                println!("skipped: helpers: no userfaultfd");
                return None;
            };
            let slot = reserve(BLOCK_PAGES * PAGE_SIZE).unwrap();
            for (page, bytes) in kernel.pages_mut(slot, BLOCK_PAGES).iter_mut().enumerate() {
                *bytes = [value(page); PAGE_SIZE];
            }
            Some(Carried { kernel, slot, zeros: [0; 8], stored: vec![0; BLOCK_PAGES] })
        }

        fn begin(&self, is_write: bool, helpers: &mut Helpers) {
            let (zeros, stored) = (&self.zeros, Some(&self.stored[..]));
            helpers.begin(0, &Load { is_write, at: self.slot, room: 1000, zeros, stored }, false);
        }

        fn carry(&mut self, is_write: bool, helpers: &mut Helpers, store: &mut Fake) -> Option<Counts> {
            self.begin(is_write, helpers);
            let Carried { kernel, zeros, stored, .. } = self;
            let kept = helpers.end(0, Notes { zeros, stored: Some(stored) }, store, kernel, true).ok()?;
            Some((kept.zeros, kept.clean))
        }

        /// Forgets the slot's content, so that a read must bring it.
        fn spoil(&mut self) {
            self.kernel.pages_mut(self.slot, BLOCK_PAGES).as_flattened_mut().fill(99);
        }

        fn check(&mut self) {
            for (page, bytes) in self.kernel.pages_mut(self.slot, BLOCK_PAGES).iter().enumerate() {
                assert_eq!(*bytes, [value(page); PAGE_SIZE], "page {page}");
            }
        }
    }

    type Counts = (u64, u64);

    #[test]
    fn all_threads_carry_and_nothing_of_others_is_under_way_afterwards() {
        let Some(mut block) = Carried::new() else { return };
        let kept = Arc::new(Kept::default());
        let (mut helpers, mut store) = (helpers(&kept, [false; 2]), Fake::of(&kept, [false; 2]));
        // No thread has a connection at first, so this one does everything.
        assert_eq!(block.carry(true, &mut helpers, &mut store).unwrap(), (10, 0));
        for round in 0.. {
            block.stored.fill(0);
            assert_eq!(block.carry(true, &mut helpers, &mut store).unwrap(), (10, 0));
            assert_eq!(kept.under_way.load(Ordering::Relaxed), 0, "all have settled");
            let pages = kept.pages.lock().unwrap();
            assert_eq!(pages.len(), BLOCK_PAGES - 10, "no page of zeros is in the store");
            let threads: std::collections::HashSet<_> = pages.values().map(|(_, thread)| *thread).collect();
            if threads.len() == 4 {
                break;
            }
            assert!(round < 50, "only {} threads carry", threads.len());
        }
        assert_eq!(kept.opened.load(Ordering::Relaxed), 3);
        // The store has all pages, so a second write sends none.
        assert_eq!(block.carry(true, &mut helpers, &mut store).unwrap(), (10, BLOCK_PAGES as u64 - 10));
        assert_eq!(kept.under_way.load(Ordering::Relaxed), 0);
        block.spoil();
        block.carry(false, &mut helpers, &mut store).unwrap();
        block.check();
    }

    #[test]
    fn what_a_lane_cannot_read_the_pager_reads_and_what_it_cannot_write_is_an_error() {
        let Some(mut block) = Carried::new() else { return };
        let kept = Arc::new(Kept::default());
        let mut store = Fake::of(&kept, [false; 2]);
        block.carry(true, &mut helpers(&kept, [false; 2]), &mut store).unwrap();
        let mut deaf = helpers(&kept, [true, true]);
        let mut failures = 0;
        for _ in 0..50 {
            block.spoil();
            block.carry(false, &mut deaf, &mut store).unwrap();
            block.check();
            block.stored.fill(0);
            failures += usize::from(block.carry(true, &mut deaf, &mut store).is_none());
            if failures > 1 {
                return;
            }
        }
        panic!("no other thread has carried a part");
    }

    /// A helper whose writes wait at a gate twice.
    fn held_up(kept: &Arc<Kept>) -> (Helpers, Arc<Barrier>) {
        let gate = Arc::new(Barrier::new(2));
        let (its, kept) = (Arc::clone(&gate), Arc::clone(kept));
        let open = move || {
            let store = Fake { gate: Some(Arc::clone(&its)), ..Fake::of(&kept, [false; 2]) };
            Some(Box::new(store) as Box<dyn Store>)
        };
        let lane = Box::new(open) as OpenLane;
        (Helpers::start([lane], Duration::ZERO, Waker::new().unwrap()).unwrap(), gate)
    }

    #[test]
    fn a_load_that_is_stopped_waits_for_the_part_that_a_helper_has_and_no_other_begins() {
        let Some(mut block) = Carried::new() else { return };
        let kept = Arc::new(Kept::default());
        let (mut helpers, gate) = held_up(&kept);
        block.begin(true, &mut helpers);
        gate.wait();
        assert!(!helpers.desk.has_ended(0));
        let desk = Arc::clone(&helpers.desk);
        let goes_on = std::thread::spawn(move || {
            let is_queued = || desk.state().loads.queue.iter().any(|queue| !queue.is_empty());
            let begun = Instant::now();
            while is_queued() {
                assert!(begun.elapsed() < Duration::from_secs(20), "the other parts are taken back");
                std::thread::sleep(Duration::from_millis(1));
            }
            gate.wait();
        });
        let Carried { kernel, zeros, stored, .. } = &mut block;
        assert_eq!(helpers.stop(0, Notes { zeros, stored: Some(stored) }, kernel), Ok(()));
        // The first part is in the store, with its hashes, and the slot is the pager's alone again.
        let first = kept.pages.lock().unwrap().len();
        assert_eq!(first, block.stored.iter().filter(|hash| **hash != 0).count());
        assert!(first > 0 && first < BLOCK_PAGES / 2 && !helpers.desk.has_ended(0));
        goes_on.join().unwrap();
        assert_eq!(kept.pages.lock().unwrap().len(), first);
    }

    #[test]
    fn reads_go_before_writes_and_what_a_thread_waits_for_before_both() {
        let Some(mut block) = Carried::new() else { return };
        let mut helpers = Helpers::start([], Duration::ZERO, Waker::new().unwrap()).unwrap();
        for (slot, is_write, is_urgent) in [(0, true, false), (1, false, false), (2, false, true)] {
            let load = Load { is_write, at: block.slot, room: 1000, zeros: &block.zeros, stored: None };
            helpers.begin(slot, &load, is_urgent);
        }
        let taken = || Some(helpers.desk.state().loads.take(None)?.slot);
        let mut order: Vec<usize> = std::iter::from_fn(taken).collect();
        order.dedup();
        assert_eq!(order, [2, 1, 0]);
        block.check();
    }

    #[test]
    fn each_thread_makes_a_call_once_also_while_nothing_is_carried() {
        let kept = Arc::new(Kept::default());
        let mut helpers = helpers(&kept, [false; 2]);
        let tasks = || std::fs::read_dir("/proc/self/task").unwrap();
        let has = |bit: &str| {
            let named = tasks().filter_map(|task| {
                let task = task.ok()?.path();
                let name = std::fs::read_to_string(task.join("comm")).ok()?;
                (name.trim() == "weir-pager-help").then_some(task)
            });
            named.filter(|task| std::fs::read_to_string(task.join("status")).unwrap().contains(bit)).count()
        };
        let before = has("NoNewPrivs:\t1");
        // prctl(PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0)
        helpers.call([libc::SYS_prctl as usize, libc::PR_SET_NO_NEW_PRIVS as usize, 1, 0, 0, 0]);
        helpers.call([libc::SYS_getpid as usize, 0, 0, 0, 0, 0]);
        assert_eq!(has("NoNewPrivs:\t1"), before + 3);
        drop(helpers);
    }
}
