//! Helpers: threads that write and read parts of a block beside the pager's thread.
//!
//! The pager's thread hands out the parts of one block, takes parts itself, and goes on once all of
//! them have ended. So no other thread works while the pager's thread decides anything, and the
//! pager's tables need no lock. Each helper has a connection to the store. It opens
//! that connection when the pager first moves pages of a block: most processes never do.

use super::blocks::{Bits, has, set};
use crate::digest::Key;
use crate::kernel::{Kernel, call_system, is_filtered, own_pages};
use crate::{BLOCK_PAGES, Error, OpenLane, Store};
use rustix::thread::gettid;
use std::fs::File;
use std::io;
use std::ops::Range;
use std::path::Path;
use std::sync::atomic::{AtomicU32, AtomicUsize, Ordering};
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

/// Least time between two attempts of a helper to open its connection.
const ASK_EVERY: Duration = Duration::from_millis(100);
/// Largest number of parts of a block. A part has a multiple of 64 pages.
const PARTS: usize = BLOCK_PAGES / 64;

/// Pages of one block on their way between a slot and the store.
pub(super) struct Load<'a> {
    pub is_write: bool,
    /// The address of the slot.
    pub slot: usize,
    /// The number of the block's first page in the store.
    pub room: u64,
    /// The pages of the block that are to be moved: a multiple of 64, and so is the first.
    pub pages: Range<usize>,
    /// The pages of the block that are zeros, and are not in the store. A write notes them here.
    pub zeros: &'a mut Bits,
    /// For each page of the block the hash of its content in the store, or 0. A write notes them
    /// here.
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
    has_failed: bool,
}

impl Part {
    /// Moves the part's pages, which lie in `pages`. A write that returns `Ok` may still be under
    /// way.
    fn carry(&mut self, pages: &mut [PageBytes], store: &mut dyn Store, key: &Key) -> io::Result<()> {
        if self.is_write { self.write(pages, store, key) } else { self.read(pages, store) }
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

    fn read(&self, pages: &mut [PageBytes], store: &mut dyn Store) -> io::Result<()> {
        let mut page = 0;
        while page < pages.len() {
            let is_zero = has(&self.zeros, page);
            let end = (page..pages.len()).find(|&other| has(&self.zeros, other) != is_zero);
            let end = end.unwrap_or(pages.len());
            if is_zero {
                pages[page..end].as_flattened_mut().fill(0);
            } else {
                store.read(self.page + page as u64, &mut pages[page..end])?;
            }
            page = end;
        }
        Ok(())
    }
}

/// The state that the threads share.
struct Desk {
    key: Key,
    spin: Duration,
    /// A number that changes when there is something to do. Threads that spin look at it.
    news: AtomicU32,
    /// Number of helpers that have a connection.
    open: AtomicUsize,
    /// Number of parts, or of threads that a call waits for, that have not ended.
    left: AtomicU32,
    state: Mutex<State>,
    /// There is something to do.
    come: Condvar,
    /// Nothing is left.
    done: Condvar,
}

#[derive(Default)]
struct State {
    parts: Vec<Part>,
    /// The next part that nobody has taken.
    next: usize,
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

    fn end_one(&self) {
        if self.left.fetch_sub(1, Ordering::AcqRel) == 1 {
            // Under the lock, for the same reason.
            let _state = self.state();
            self.done.notify_all();
        }
    }

    /// Waits until `is_so`, first for as long as the threads spin.
    fn wait<'a>(
        &'a self,
        offers: &mut Offers,
        change: &Condvar,
        mut is_so: impl FnMut(&State) -> bool,
        mut is_likely: impl FnMut() -> bool,
    ) -> MutexGuard<'a, State> {
        let begun = Instant::now();
        while !is_likely() && begun.elapsed() < self.spin && !offers.is_crowded() {
            for _ in 0..32 {
                std::hint::spin_loop();
            }
            offers.offer();
        }
        let mut state = self.state();
        while !is_so(&state) {
            state = change.wait(state).expect("nothing panics under it");
        }
        state
    }

    /// Carries parts until none is left to take. A part that has failed is marked.
    fn carry<'a>(&'a self, state: MutexGuard<'a, State>, mut one: impl FnMut(&mut Part) -> Result<(), ()>) {
        let mut state = state;
        while state.next < state.parts.len() {
            let number = state.next;
            state.next += 1;
            let mut part = std::mem::take(&mut state.parts[number]);
            drop(state);
            part.has_failed = one(&mut part).is_err();
            state = self.state();
            state.parts[number] = part;
            drop(state);
            self.end_one();
            state = self.state();
        }
    }
}

/// The helpers, or none.
pub(super) struct Helpers {
    desk: Arc<Desk>,
    offers: Offers,
    /// The time at which helpers were last asked to open their connections.
    asked: Option<Instant>,
    threads: Vec<JoinHandle<()>>,
    /// For each thread an address in its stack, and its thread ID (TID).
    stacks: Vec<usize>,
    ids: Vec<i32>,
    /// In tests, connections that this thread uses in turn, in place of other threads.
    #[cfg(test)]
    pub(super) lanes: Vec<Box<dyn Store>>,
    /// Those that are opened later.
    #[cfg(test)]
    pub(super) closed: Vec<Box<dyn Store>>,
    #[cfg(test)]
    carried: usize,
}

impl Helpers {
    /// Starts a thread for each of these lanes. Each spins as the pager's thread does.
    ///
    /// # Errors
    /// Fails with the system's error. If a thread cannot be started, there are fewer.
    pub(super) fn start(lanes: impl IntoIterator<Item = OpenLane>, spin: Duration) -> Result<Self, Error> {
        let desk = Arc::new(Desk {
            key: Key::random()?,
            spin,
            news: AtomicU32::new(0),
            open: AtomicUsize::new(0),
            left: AtomicU32::new(0),
            state: Mutex::default(),
            come: Condvar::new(),
            done: Condvar::new(),
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
            threads,
            stacks,
            ids,
            #[cfg(test)]
            lanes: Vec::new(),
            #[cfg(test)]
            closed: Vec::new(),
            #[cfg(test)]
            carried: 0,
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

    /// Number of threads that have a connection, with the pager's.
    fn carriers(&self) -> usize {
        #[cfg(test)]
        if !self.lanes.is_empty() {
            return 1 + self.lanes.len();
        }
        1 + self.desk.open.load(Ordering::Relaxed)
    }

    /// Number of pages of a block that are moved in one step, of `alone` for a thread alone. Page
    /// faults wait for the end of a step, which takes about as long with more threads.
    pub(super) fn step(&self, alone: usize) -> usize {
        match self.carriers() {
            1 => alone,
            several => (several.next_power_of_two() * 2 * alone).min(BLOCK_PAGES),
        }
    }

    /// Moves pages between a slot and the store. A write that has returned may still be under way,
    /// until `store` is settled.
    ///
    /// # Errors
    /// Fails if a part could not be moved. Pages that were read are then incomplete.
    pub(super) fn carry<K: Kernel>(
        &mut self,
        load: Load<'_>,
        store: &mut dyn Store,
        kernel: &mut K,
    ) -> io::Result<Kept> {
        #[cfg(test)]
        self.open_one_more();
        let Load { is_write, slot, room, pages, zeros, mut stored } = load;
        let mut parts = self.carriers().next_power_of_two().min(PARTS);
        while !(pages.len() / 64).is_multiple_of(parts) {
            parts /= 2;
        }
        let count = pages.len() / parts;
        let desk = Arc::clone(&self.desk);
        let mut state = desk.state();
        state.parts.resize_with(parts, Part::default);
        for (number, part) in state.parts.iter_mut().enumerate() {
            let first = pages.start + number * count;
            (part.is_write, part.at, part.count) = (is_write, slot + first * PAGE_SIZE, count);
            (part.page, part.kept, part.has_failed) = (room + first as u64, Kept::default(), false);
            part.zeros[..count / 64].copy_from_slice(&zeros[first / 64..(first + count) / 64]);
            part.stored.clear();
            if let Some(stored) = stored.as_deref().filter(|_| is_write) {
                part.stored.extend_from_slice(&stored[first..first + count]);
            }
        }
        state.next = 0;
        desk.left.store(parts as u32, Ordering::Relaxed);
        if !self.threads.is_empty() && (parts > 1 || self.asks_to_open()) {
            desk.post(state);
            state = desk.state();
        }
        let mut failure = None;
        #[cfg(test)]
        let (mut lanes, mut turn) = (std::mem::take(&mut self.lanes), 0);
        desk.carry(state, |part| {
            let pages = kernel.pages_mut(part.at, part.count);
            #[cfg(test)]
            if let Some(lane) = lanes.get_mut(turn) {
                turn += 1;
                return in_lane(part, pages, lane.as_mut(), &desk.key).map_err(drop);
            }
            part.carry(pages, store, &desk.key).map_err(|error| {
                failure.get_or_insert(error);
            })
        });
        #[cfg(test)]
        {
            self.lanes = lanes;
        }
        let nothing_left = || desk.left.load(Ordering::Acquire) == 0;
        let mut state = desk.wait(&mut self.offers, &desk.done, |_| nothing_left(), nothing_left);
        let mut kept = Kept::default();
        for (number, part) in state.parts.iter_mut().enumerate() {
            let first = pages.start + number * count;
            // A thread's own connection may have failed. The pager's may still read the pages. It
            // must not write them again: the first write could come after a later one.
            if part.has_failed && failure.is_none() {
                let again = match is_write {
                    true => Err(io::ErrorKind::Other.into()),
                    false => part.carry(kernel.pages_mut(part.at, part.count), store, &desk.key),
                };
                failure = again.err();
            }
            if is_write {
                zeros[first / 64..(first + count) / 64].copy_from_slice(&part.zeros[..count / 64]);
                if let Some(stored) = stored.as_deref_mut() {
                    stored[first..first + count].copy_from_slice(&part.stored);
                }
            }
            kept.zeros += part.kept.zeros;
            kept.clean += part.kept.clean;
        }
        failure.map_or(Ok(kept), Err)
    }

    /// Opens a connection of a test now and then, also amid a block.
    #[cfg(test)]
    fn open_one_more(&mut self) {
        self.carried += 1;
        if self.carried.is_multiple_of(13) {
            self.lanes.extend(self.closed.pop());
        }
    }

    /// Whether helpers without a connection are to open one now. They are asked once in a while.
    fn asks_to_open(&mut self) -> bool {
        let is_due = self.asked.is_none_or(|asked| asked.elapsed() >= ASK_EVERY);
        if is_due && self.carriers() <= self.threads.len() {
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
        let mut state = self.desk.state();
        state.call = (call, state.call.1.wrapping_add(1));
        self.desk.left.store(self.threads.len() as u32, Ordering::Relaxed);
        self.desk.post(state);
        let nothing_left = || self.desk.left.load(Ordering::Acquire) == 0;
        drop(self.desk.wait(&mut self.offers, &self.desk.done, |_| nothing_left(), nothing_left));
    }
}

impl Drop for Helpers {
    fn drop(&mut self) {
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
    let result = part.carry(pages, lane, key);
    let settled = if part.is_write { lane.settle() } else { Ok(()) };
    result.and(settled)
}

/// A helper.
fn work(desk: &Desk, open: OpenLane) {
    let (mut open, mut lane, mut tried) = (open, None, None);
    let (mut seen, mut called) = (0, 0);
    let mut offers = Offers::default();
    let status = File::open("/proc/thread-self/status").ok();
    loop {
        let is_news = |seen: u32| desk.news.load(Ordering::Acquire) != seen;
        let state = desk.wait(&mut offers, &desk.come, |_| is_news(seen), || is_news(seen));
        seen = desk.news.load(Ordering::Acquire);
        if state.is_over {
            return;
        }
        let (call, number) = state.call;
        if number != called {
            called = number;
            drop(state);
            // SAFETY: the caller of `Pager::also` promises that the call changes only this thread's
            // rights.
            unsafe { call_system(call) };
            desk.end_one();
            continue;
        }
        let mut state = state;
        if lane.is_none() && tried.is_none_or(|tried: Instant| tried.elapsed() >= ASK_EVERY) {
            drop(state);
            tried = Some(Instant::now());
            lane = if is_filtered(status.as_ref()) { None } else { open() };
            desk.open.fetch_add(usize::from(lane.is_some()), Ordering::Relaxed);
            state = desk.state();
        }
        let mut has_failed = false;
        if let Some(lane) = &mut lane {
            desk.carry(state, |part| {
                // SAFETY: the part's pages are the pager's own memory. All of them have memory, and
                // no other thread uses them until this part has ended.
                let pages = unsafe { own_pages(part.at, part.count) };
                let result = in_lane(part, pages, lane.as_mut(), &desk.key);
                has_failed |= result.is_err();
                result.map_err(drop)
            });
        }
        if has_failed {
            // The connection may be over. The next one may work.
            lane = None;
            desk.open.fetch_sub(1, Ordering::Relaxed);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::kernel::reserve;
    use std::collections::BTreeMap;
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
    }

    impl Fake {
        fn of(kept: &Arc<Kept>, fails: [bool; 2]) -> Self {
            Fake { kept: Arc::clone(kept), under_way: Vec::new(), fails }
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
        Helpers::start((0..3).map(lane), Duration::ZERO).unwrap()
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

        fn carry(&mut self, is_write: bool, helpers: &mut Helpers, store: &mut Fake) -> io::Result<Counts> {
            let Carried { kernel, slot, zeros, stored } = self;
            let stored = Some(&mut stored[..]);
            let pages = 0..BLOCK_PAGES;
            let load = Load { is_write, slot: *slot, room: 1000, pages, zeros, stored };
            let kept = helpers.carry(load, store, kernel)?;
            Ok((kept.zeros, kept.clean))
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
        store.settle().unwrap();
        for round in 0.. {
            block.stored.fill(0);
            assert_eq!(block.carry(true, &mut helpers, &mut store).unwrap(), (10, 0));
            let own = store.under_way.len();
            assert_eq!(kept.under_way.load(Ordering::Relaxed), own, "the others have settled");
            store.settle().unwrap();
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
        store.settle().unwrap();
        let mut deaf = helpers(&kept, [true, true]);
        let mut failures = 0;
        for _ in 0..50 {
            block.spoil();
            block.carry(false, &mut deaf, &mut store).unwrap();
            block.check();
            block.stored.fill(0);
            failures += usize::from(block.carry(true, &mut deaf, &mut store).is_err());
            store.settle().unwrap();
            if failures > 1 {
                return;
            }
        }
        panic!("no other thread has carried a part");
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
