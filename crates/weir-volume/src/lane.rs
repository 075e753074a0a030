//! One thread's way into a volume.

use crate::batch::Batch;
use crate::entry::{Entry, Place};
use crate::looking::Looking;
use crate::records::{Cursor, Occupant};
use crate::status::LaneMetrics;
use crate::{Tier, Volume};
use std::os::fd::BorrowedFd;
use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::{Duration, Instant};
use weir_core::metrics::{Counter, Latencies};
use weir_core::{Checksum, PAGE_SIZE, PageBytes, PageNo, Slot, uniform_value};
use weir_store::{Done, Fault, OpenError, Progress, State, Ticket};

/// Slots that a lane remembers having freed, to use them again while their memory is still in the cache.
pub(crate) const HINTS: usize = 64;
/// Partial writes that a lane may have under way; more answer [`Progress::Full`].
pub(crate) const PARTS: usize = 8;
/// How long a write waits for a slot that other lanes are about to free, before it fails.
const SLOT_WAIT: Duration = Duration::from_secs(2);
/// One operation in so many is timed: reading the clock twice costs a tenth of a write to host memory.
const SAMPLE_EVERY: u32 = 16;

/// A lane of a [`Volume`]: reads, writes and discards pages, for one thread.
///
/// Operations that a store finishes at once answer [`Progress::Done`]; others answer [`Progress::Queued`] and are
/// started by [`submit`](Lane::submit) and handed over by [`poll`](Lane::poll). From the first operation to the `submit`
/// that finds nothing in flight is one batch: slots freed meanwhile, by any lane, may not be reused before it ends.
/// So end batches, by `submit`, before waiting for anything.
pub struct Lane {
    pub(crate) volume: Arc<Volume>,
    pub(crate) seat: usize,
    pub(crate) stores: Box<[StoreLane]>,
    /// Operations at slow stores; the index is the store's ticket.
    ops: Box<[Op]>,
    idle_ops: Vec<u32>,
    parts: Box<[Part]>,
    idle_parts: Vec<u32>,
    /// Stores, from the first on, in which this lane looks for a slot.
    pub(crate) reach: usize,
    /// Partial writes that found a store full, to be tried again by the next poll.
    stalled: Vec<u32>,
    /// What the poll under way has found finished.
    finished: Vec<(u32, Result<(), Fault>)>,
    in_flight: usize,
    /// Of these, operations that a store is working on.
    under_way: usize,
    /// The epochs this lane looks at.
    looking: Looking,
    /// What was retired before this epoch may be reused.
    safe: u64,
    claims_since_safe: u32,
    /// The store that the last slot was claimed in.
    pub(crate) taker: usize,
    until_sample: u32,
}

pub(crate) struct StoreLane {
    pub(crate) lane: Box<dyn weir_store::Lane>,
    cursor: Cursor,
    hints: Hints,
}

struct Op {
    ticket: Ticket,
    started: Option<Instant>,
    /// The epoch in which what is being read was found.
    found: u64,
    work: Work,
}

#[derive(Clone, Copy)]
enum Work {
    Idle,
    Read(Located),
    /// A whole page on its way to `entry`'s slot; published when it has arrived.
    Write {
        page: PageNo,
        entry: Entry,
    },
    /// A partial write: at first the old content on its way in (`from` says which), then the new on its way out.
    Part {
        part: u32,
        from: Located,
        to: Option<Entry>,
    },
}

/// What a partial write needs while it is under way. A page that moves is one, of nothing.
struct Part {
    base: Box<PageBytes>,
    patch: Box<PageBytes>,
    offset: usize,
    len: usize,
    /// Where a page lies that is only to move: once it lies elsewhere there is nothing left to do.
    moving: Option<Place>,
}

/// The last [`HINTS`] slots freed by this lane, oldest first.
struct Hints {
    slots: [Slot; HINTS],
    first: usize,
    len: usize,
}

/// What a read finds without touching a store, or where it must look.
pub enum View<'a> {
    /// The page, verified, where it lies.
    Bytes(&'a PageBytes),
    /// Every 32-bit word of the page has this value.
    Fill(u32),
    /// It must be read with [`Lane::read`].
    Elsewhere,
    /// It cannot be read.
    Fault(Fault),
}

/// Keeps what [`view`](Guard::view) shows in place, for as long as it lives. It holds back every slot that is
/// freed meanwhile, so not for longer than a millisecond or two.
pub struct Guard<'a> {
    pub(crate) lane: &'a mut Lane,
    /// When it began, where it is one of those that are timed.
    started: Option<Instant>,
}

/// Where a page was found, and what proves its content. Valid while the lane is pinned.
#[derive(Clone, Copy)]
pub(crate) struct Located {
    page: PageNo,
    pub(crate) entry: Entry,
    /// As the slot's record said while the map named it; the record itself may be gone by the time the content arrives.
    checksum: Option<Checksum>,
}

enum Written {
    Published,
    /// Somebody else wrote the page since the entry was read.
    Overtaken,
    Queued,
    Full,
    Failed(Fault),
}

impl Lane {
    /// Opens the lane in `seat`, for `parts` partial writes at a time.
    pub(crate) fn open(volume: Arc<Volume>, seat: usize, parts: usize) -> Result<Self, OpenError> {
        let depth = volume.config.depth.max(1);
        let lanes = volume.config.lanes;
        let open = |tier: &Tier| {
            Ok(StoreLane {
                lane: tier.store.lane(depth)?,
                cursor: tier.records.cursor(seat, lanes),
                hints: Hints { slots: [Slot(0); HINTS], first: 0, len: 0 },
            })
        };
        let stores: Box<[StoreLane]> = match volume.tiers.iter().map(open).collect() {
            Ok(stores) => stores,
            Err(error) => {
                volume.lanes[seat].taken.store(false, Ordering::Release);
                return Err(error);
            }
        };
        let op = || Op { ticket: 0, started: None, found: 0, work: Work::Idle };
        let blank = || Box::new([0; PAGE_SIZE]);
        let part = || Part { base: blank(), patch: blank(), offset: 0, len: 0, moving: None };
        Ok(Lane {
            volume,
            seat,
            reach: stores.len(),
            stores,
            ops: std::iter::repeat_with(op).take(depth).collect(),
            idle_ops: (0..depth as u32).rev().collect(),
            parts: std::iter::repeat_with(part).take(parts).collect(),
            idle_parts: (0..parts as u32).rev().collect(),
            stalled: Vec::with_capacity(parts),
            finished: Vec::with_capacity(depth),
            in_flight: 0,
            under_way: 0,
            looking: Looking::default(),
            safe: 0,
            claims_since_safe: 0,
            taker: 0,
            until_sample: 0,
        })
    }

    /// The volume this is a lane of.
    pub fn volume(&self) -> &Arc<Volume> {
        &self.volume
    }

    /// Announces a batch to every store, so that they can choose how to do it. Optional. Where it is known which pages
    /// will be read, [`batch`](Lane::batch) tells each store of its own alone.
    pub fn plan(&mut self, reads: usize, writes: usize) {
        for store in &mut self.stores {
            store.lane.plan(reads, writes);
        }
    }

    /// A batch to announce; `None` where no store would do anything differently for it.
    pub fn batch(&mut self) -> Option<Batch<'_>> {
        let heeded = self.stores.iter().any(|store| store.lane.heeds_plan());
        heeded.then(|| Batch::new(&self.volume, &mut self.stores, self.taker))
    }

    /// Reads a page. With [`Progress::Done`] `out` holds it; with [`Progress::Queued`] it comes with the completion.
    pub fn read(&mut self, ticket: Ticket, page: PageNo, out: &mut PageBytes) -> Progress {
        self.enter();
        let started = self.sample();
        count(&self.metrics().reads);
        let located = self.volume.locate(page);
        let result = match located.entry.place() {
            Place::Empty => {
                out.fill(0);
                Ok(())
            }
            Place::Fill(value) => {
                fill(out, value);
                Ok(())
            }
            Place::Lost => Err(Fault::Lost),
            Place::Stored { store, slot } => {
                let Some(&op) = self.idle_ops.last() else { return Progress::Full };
                match self.stores[store].lane.read(op, slot, out) {
                    Progress::Done(Ok(())) => located.verify(out),
                    Progress::Done(Err(fault)) => Err(fault),
                    Progress::Full => return Progress::Full,
                    Progress::Queued => {
                        self.under_way += 1;
                        self.start(ticket, started, Work::Read(located));
                        self.ops[op as usize].found = self.looking.begin();
                        return Progress::Queued;
                    }
                }
            }
        };
        self.volume.seat(self.seat).read_ended(started, result);
        Progress::Done(result)
    }

    /// Writes a whole page. `bytes` may be reused as soon as this returns; the write is acknowledged by
    /// [`Progress::Done`] or by its completion.
    pub fn write(&mut self, ticket: Ticket, page: PageNo, bytes: &PageBytes) -> Progress {
        self.enter();
        let started = self.sample();
        count(&self.metrics().writes);
        let Some(&op) = self.idle_ops.last() else { return Progress::Full };
        let was = self.volume.map.load(page);
        let result = match self.write_from(op, page, bytes, was, false) {
            (Written::Published | Written::Overtaken, _) => Ok(()),
            (Written::Failed(fault), _) => Err(fault),
            (Written::Full, _) => return Progress::Full,
            (Written::Queued, entry) => {
                self.start(ticket, started, Work::Write { page, entry });
                return Progress::Queued;
            }
        };
        self.volume.seat(self.seat).write_ended(started, result);
        Progress::Done(result)
    }

    /// Writes a part of a page, `offset + bytes.len()` at most a page, atomically: the rest keeps what it holds when this takes
    /// effect, also if another lane writes the page at the same time. Slower than a whole page; callers that
    /// can align do.
    pub fn write_part(&mut self, ticket: Ticket, page: PageNo, offset: usize, bytes: &[u8]) -> Progress {
        self.enter();
        let started = self.sample();
        count(&self.metrics().writes);
        let progress = self.start_part(ticket, started, page, (offset, bytes), None);
        if let Progress::Done(result) = progress {
            self.volume.seat(self.seat).write_ended(started, result);
        }
        progress
    }

    /// Writes `page` anew with the content that it has, if it still lies at `from`: into the first store that this lane reaches
    /// and that has room. Somebody who writes the page meanwhile has done as much.
    pub(crate) fn move_page(&mut self, ticket: Ticket, page: PageNo, from: Place) -> Progress {
        self.enter();
        self.start_part(ticket, None, page, (0, &[]), Some(from))
    }

    fn start_part(
        &mut self,
        ticket: Ticket,
        started: Option<Instant>,
        page: PageNo,
        (offset, bytes): (usize, &[u8]),
        moving: Option<Place>,
    ) -> Progress {
        let (Some(&part), Some(&op)) = (self.idle_parts.last(), self.idle_ops.last()) else {
            return Progress::Full;
        };
        self.idle_parts.pop();
        let state = &mut self.parts[part as usize];
        state.patch[..bytes.len()].copy_from_slice(bytes);
        (state.offset, state.len, state.moving) = (offset, bytes.len(), moving);
        assert!(offset + bytes.len() <= PAGE_SIZE, "a part lies within its page");
        let from = Located { page, entry: Entry::default(), checksum: None };
        self.start(ticket, started, Work::Part { part, from, to: None });
        match self.advance_part(op, None) {
            Progress::Queued => Progress::Queued,
            Progress::Full => {
                self.stalled.push(op);
                Progress::Queued
            }
            Progress::Done(result) => {
                self.end(op);
                Progress::Done(result)
            }
        }
    }

    /// Forgets pages `first..first + count`: they read as zeros, and their slots are free.
    pub fn discard(&mut self, first: PageNo, count: u32) {
        self.replace_all(first, count, Place::Empty);
        self.metrics().discards.add(u64::from(count));
    }

    /// Makes pages `first..first + count` zeros that count as written.
    pub fn zero(&mut self, first: PageNo, count: u32) {
        self.replace_all(first, count, Place::Fill(0));
        self.metrics().writes.add(u64::from(count));
    }

    fn replace_all(&mut self, first: PageNo, count: u32, place: Place) {
        for page in (first.0..first.0 + count).map(PageNo) {
            self.enter();
            let was = self.volume.map.load(page);
            if was.place() != place {
                self.publish(page, Entry::new(place, was.next_generation()), None);
            }
        }
    }

    /// Whether the page has been written since it was last discarded.
    pub fn mapped(&self, page: PageNo) -> bool {
        self.volume.map.load(page).place() != Place::Empty
    }

    /// Whether the page is known to read as zeros without looking into a store.
    pub fn known_zero(&self, page: PageNo) -> bool {
        matches!(self.volume.map.load(page).place(), Place::Empty | Place::Fill(0))
    }

    /// Starts what has been queued, and ends the batch if nothing is in flight.
    pub fn submit(&mut self) {
        for store in &mut self.stores {
            store.lane.submit();
        }
        self.leave();
    }

    /// Hands over every operation that has finished at a slow store. Never waits.
    pub fn poll(&mut self, done: &mut dyn FnMut(Done<'_>)) {
        if self.in_flight == 0 {
            return;
        }
        for at in 0..self.stores.len() {
            self.poll_store(at, done);
        }
        // Only those that were stalled before this poll: one that stalls again waits for the next.
        let stalled = self.stalled.len();
        let resume = stalled > 0 || !self.finished.is_empty();
        while let Some((op, result)) = self.finished.pop() {
            self.go_on(op, result, done);
        }
        for _ in 0..stalled {
            // One after another: what holds slots back may be this lane's own pin, and if each began again while another is under
            // way, that would stay where it is for ever.
            let parts_under_way = self.parts.len() - self.idle_parts.len() - self.stalled.len();
            if parts_under_way > 0 && self.under_way > 0 {
                break;
            }
            let op = self.stalled.remove(0);
            match self.advance_part(op, None) {
                Progress::Done(result) => self.hand_over(op, result, done),
                Progress::Queued => {}
                Progress::Full => self.stalled.push(op),
            }
        }
        // What went on may have queued its second half. Where nothing is under way any more the pin ends here: its owner may have
        // nothing more to submit, and until then no slot that others retire would be free.
        if resume {
            self.submit();
        } else {
            self.leave();
        }
    }

    /// Operations queued and not yet handed over.
    pub fn in_flight(&self) -> usize {
        self.in_flight
    }

    /// Descriptors that become readable when [`poll`](Lane::poll) has something to hand over.
    pub fn wake_fds(&self) -> impl Iterator<Item = BorrowedFd<'_>> {
        self.stores.iter().filter(|store| store.lane.in_flight() > 0).filter_map(|store| store.lane.wake_fd())
    }

    /// Whether something is in flight that no descriptor announces, so that the thread must not sleep.
    pub fn must_poll(&self) -> bool {
        !self.stalled.is_empty()
            || self.stores.iter().any(|store| store.lane.in_flight() > 0 && store.lane.wake_fd().is_none())
    }

    /// Gives the lane up as the death of its process would: what it has under way is neither finished nor undone. For
    /// tests of taking over; no other lane may use the volume afterwards.
    pub fn abandon(mut self) {
        self.in_flight = 0;
    }

    /// Keeps pages in place, to look at them where they lie.
    pub fn pin(&mut self) -> Guard<'_> {
        self.enter();
        let started = self.sample();
        Guard { lane: self, started }
    }

    /// Pins this lane; moves the pin on where nothing holds it, so that a long batch does not keep its own freed slots.
    #[inline]
    pub(crate) fn enter(&mut self) {
        self.looking.enter(&self.volume.epochs, self.seat);
    }

    #[inline]
    fn leave(&mut self) {
        self.looking.leave(&self.volume.epochs, self.seat);
    }

    /// Counts `pages` pages written together since `started`, if that is timed; each took its share.
    pub(crate) fn count_writes(&self, pages: u64, started: Option<Instant>) {
        let metrics = self.metrics();
        metrics.writes.add(pages);
        if let Some(started) = started
            && pages > 0
        {
            metrics.write_latencies.record(started.elapsed() / pages as u32, 1);
        }
    }

    pub(crate) fn metrics(&self) -> &LaneMetrics {
        self.volume.seat(self.seat)
    }

    #[inline]
    pub(crate) fn sample(&mut self) -> Option<Instant> {
        if self.until_sample == 0 {
            self.until_sample = SAMPLE_EVERY;
        }
        self.until_sample -= 1;
        (self.until_sample == 0).then(Instant::now)
    }

    /// Takes the next idle operation, which the caller has already used as a ticket.
    fn start(&mut self, ticket: Ticket, started: Option<Instant>, work: Work) {
        let op = self.idle_ops.pop().expect("the caller saw an idle operation");
        self.ops[op as usize] = Op { ticket, started, found: 0, work };
        self.in_flight += 1;
    }

    fn end(&mut self, op: u32) -> Op {
        let idle = Op { ticket: 0, started: None, found: 0, work: Work::Idle };
        let ended = std::mem::replace(&mut self.ops[op as usize], idle);
        if let Work::Part { part, .. } = ended.work {
            self.idle_parts.push(part);
        }
        self.idle_ops.push(op);
        self.in_flight -= 1;
        ended
    }

    /// Writes `bytes` as the successor of entry `was`, and publishes it if the store finishes at once. With `only_if_unchanged`
    /// it takes effect only while the page still is as `was` says. Returns the new entry with the outcome.
    fn write_from(
        &mut self,
        op: u32,
        page: PageNo,
        bytes: &PageBytes,
        was: Entry,
        only_if_unchanged: bool,
    ) -> (Written, Entry) {
        let condition = only_if_unchanged.then_some(was);
        if let Some(value) = uniform_value(bytes) {
            let entry = Entry::new(Place::Fill(value), was.next_generation());
            let published = self.publish(page, entry, condition);
            return (if published { Written::Published } else { Written::Overtaken }, entry);
        }
        let Some((store, slot)) = self.claim(page) else {
            // With operations under way this lane itself may be what holds slots back: they must be polled first.
            return (if self.under_way > 0 { Written::Full } else { Written::Failed(Fault::Full) }, was);
        };
        // The next write will most likely go there, and writing memory that is far away takes longer than all the rest of a
        // write.
        if let Some(next) = self.stores[store].hints.first() {
            self.stores[store].lane.prepare(next);
        }
        let entry = Entry::new(Place::Stored { store, slot }, was.next_generation());
        let checksum = Checksum::of(bytes, page, entry.generation());
        // The record may be complete before the content is: until the map names the slot, nobody looks.
        self.volume.tiers[store].records.fill_in(slot, Occupant { page, checksum });
        let outcome = match self.stores[store].lane.write(op, slot, bytes) {
            Progress::Done(Ok(())) if self.publish(page, entry, condition) => Written::Published,
            Progress::Done(Ok(())) => Written::Overtaken,
            Progress::Done(Err(fault)) => {
                self.unclaim(entry);
                Written::Failed(fault)
            }
            Progress::Full => {
                self.unclaim(entry);
                Written::Full
            }
            Progress::Queued => {
                self.under_way += 1;
                Written::Queued
            }
        };
        (outcome, entry)
    }

    /// Makes `entry` the page's, unless `condition` no longer holds; frees what it replaces, or `entry`'s own slot.
    ///
    /// Every write of a page counts its generation on by one, also when several lanes write it at once, so that no entry of a
    /// page ever comes back (before 2^26 writes) and `condition` means what it says.
    pub(crate) fn publish(&mut self, page: PageNo, mut entry: Entry, condition: Option<Entry>) -> bool {
        let map = &self.volume.map;
        let old = match condition {
            Some(was) if map.replace(page, was, entry) => was,
            Some(_) => {
                self.unclaim(entry);
                return false;
            }
            None => loop {
                let was = map.load(page);
                if entry.generation() != was.next_generation() {
                    entry = self.volume.renew(page, entry, was.next_generation());
                }
                if map.replace(page, was, entry) {
                    break was;
                }
            },
        };
        let metrics = self.volume.seat(self.seat);
        match entry.place() {
            Place::Stored { .. } => count(&metrics.stored),
            Place::Fill(_) => count(&metrics.filled),
            Place::Empty | Place::Lost => {}
        }
        match old.place() {
            Place::Stored { store, slot } => {
                count(&metrics.unstored);
                self.volume.tiers[store].records.retire(slot, self.volume.epochs.now());
                self.stores[store].hints.push(slot);
            }
            Place::Fill(_) => count(&metrics.unfilled),
            Place::Empty | Place::Lost => {}
        }
        true
    }

    /// Frees the slot of an entry that was never published.
    pub(crate) fn unclaim(&self, entry: Entry) {
        if let Place::Stored { store, slot } = entry.place() {
            self.volume.tiers[store].records.retire(slot, 0);
        }
    }

    /// A free slot in the first store that takes pages and has one. Where all are taken, waits for those that
    /// are about to be freed: every lane's pin ends, and the volume promised a slot for each page. Does not wait while it
    /// holds others up itself.
    fn claim(&mut self, page: PageNo) -> Option<(usize, Slot)> {
        if let Some(found) = self.claim_now(page) {
            return Some(found);
        }
        // What this lane knows of the epochs may be old, or nothing yet.
        self.refresh_safe();
        if let Some(found) = self.claim_now(page) {
            return Some(found);
        }
        // Waiting frees slots, and brings no store back. A page that is to move up waits for nothing: it lies well where it is.
        let any_left = self.volume.tiers.iter().any(|tier| tier.store.state() != State::Lost);
        if self.under_way > 0 || !any_left || self.reach < self.stores.len() {
            return None;
        }
        count(&self.metrics().waits);
        let started = Instant::now();
        loop {
            self.volume.end_quarantines();
            self.enter();
            self.refresh_safe();
            if let Some(found) = self.claim_now(page) {
                return Some(found);
            }
            if started.elapsed() > SLOT_WAIT {
                return None;
            }
            std::thread::yield_now();
        }
    }

    /// A store that is draining is asked last: its slots are part of what the volume promised.
    pub(crate) fn claim_now(&mut self, page: PageNo) -> Option<(usize, Slot)> {
        self.claims_since_safe += 1;
        let found = self.claim_in(page, State::Online);
        if found.is_some() || self.reach < self.stores.len() {
            return found;
        }
        self.claim_in(page, State::Draining)
    }

    #[inline]
    fn claim_in(&mut self, page: PageNo, state: State) -> Option<(usize, Slot)> {
        for at in 0..self.reach {
            let tier = &self.volume.tiers[at];
            if tier.store.state() != state {
                continue;
            }
            if self.claims_since_safe > HINTS as u32 / 2 && self.stores[at].hints.len > 0 {
                self.refresh_safe();
            }
            let tier = &self.volume.tiers[at];
            let store = &mut self.stores[at];
            if let Some(slot) = store.hints.first()
                && tier.records.try_claim(slot, page, self.safe)
            {
                store.hints.pop();
                self.taker = at;
                return Some((at, slot));
            }
            if let Some(slot) = tier.records.claim(&mut store.cursor, page, self.safe) {
                self.taker = at;
                return Some((at, slot));
            }
        }
        None
    }

    fn refresh_safe(&mut self) {
        self.safe = self.volume.epochs.safe();
        self.claims_since_safe = 0;
    }

    /// Takes what a store has finished. Reads are handed over on the spot, where their content lies; the rest is noted, for
    /// the store's lane is lent to its own poll.
    fn poll_store(&mut self, at: usize, done: &mut dyn FnMut(Done<'_>)) {
        let Lane { stores, ops, parts, finished, volume, seat, under_way, looking, .. } = self;
        stores[at].lane.poll(&mut |completion| {
            let op = &ops[completion.ticket as usize];
            let mut result = completion.result;
            match op.work {
                Work::Read(located) => {
                    let verified =
                        |()| completion.page.map_or(Err(Fault::Lost), |bytes| located.verify(bytes));
                    result = result.and_then(verified);
                    looking.end(op.found, &volume.epochs, *seat);
                    volume.seat(*seat).read_ended(op.started, result);
                    done(Done {
                        ticket: op.ticket,
                        result,
                        page: completion.page.filter(|_| result.is_ok()),
                    });
                }
                Work::Part { part, to: None, .. } => {
                    if let Some(bytes) = completion.page {
                        parts[part as usize].base.copy_from_slice(bytes);
                    }
                    looking.end(op.found, &volume.epochs, *seat);
                }
                Work::Write { .. } | Work::Part { .. } => {}
                Work::Idle => unreachable!("a store completed operation {} twice", completion.ticket),
            }
            *under_way -= 1;
            finished.push((completion.ticket, result));
        });
    }

    /// Goes on with an operation whose store has answered.
    fn go_on(&mut self, op: u32, result: Result<(), Fault>, done: &mut dyn FnMut(Done<'_>)) {
        let result = match self.ops[op as usize].work {
            Work::Read(_) => {
                self.end(op);
                return;
            }
            Work::Write { page, entry } => {
                match result {
                    Ok(()) => {
                        self.publish(page, entry, None);
                    }
                    Err(_) => self.unclaim(entry),
                }
                result
            }
            Work::Part { .. } => match self.advance_part(op, Some(result)) {
                Progress::Done(result) => result,
                Progress::Queued => return,
                Progress::Full => {
                    self.stalled.push(op);
                    return;
                }
            },
            Work::Idle => unreachable!("operation {op} is not under way"),
        };
        self.hand_over(op, result, done);
    }

    fn hand_over(&mut self, op: u32, result: Result<(), Fault>, done: &mut dyn FnMut(Done<'_>)) {
        let ended = self.end(op);
        let moved =
            matches!(ended.work, Work::Part { part, .. } if self.parts[part as usize].moving.is_some());
        if !moved {
            self.volume.seat(self.seat).write_ended(ended.started, result);
        }
        done(Done { ticket: ended.ticket, result, page: None });
    }

    /// Takes a partial write as far as it goes without waiting. `answer` is what the store said of the half under way.
    fn advance_part(&mut self, op: u32, mut answer: Option<Result<(), Fault>>) -> Progress {
        loop {
            let Work::Part { part, from, to } = self.ops[op as usize].work else {
                unreachable!("operation {op} is no partial write")
            };
            match (answer.take(), to) {
                // Nothing is under way: begin, or begin again, with what the page holds now.
                (None, _) => {
                    self.enter();
                    let from = self.volume.locate(from.page);
                    if self.parts[part as usize].moving.is_some_and(|place| place != from.entry.place()) {
                        return Progress::Done(Ok(()));
                    }
                    self.ops[op as usize].work = Work::Part { part, from, to: None };
                    let base = &mut self.parts[part as usize].base;
                    answer = Some(match from.entry.place() {
                        Place::Empty => {
                            base.fill(0);
                            Ok(())
                        }
                        Place::Fill(value) => {
                            fill(base, value);
                            Ok(())
                        }
                        Place::Lost => Err(Fault::Lost),
                        Place::Stored { store, slot } => match self.stores[store].lane.read(op, slot, base) {
                            Progress::Done(result) => result,
                            Progress::Full => return Progress::Full,
                            Progress::Queued => {
                                self.under_way += 1;
                                self.ops[op as usize].found = self.looking.begin();
                                return Progress::Queued;
                            }
                        },
                    });
                }
                // The old content is here: patch it and send it out.
                (Some(Ok(())), None) => {
                    let state = &mut self.parts[part as usize];
                    if let Err(fault) = from.verify(&state.base) {
                        return Progress::Done(Err(fault));
                    }
                    let range = state.offset..state.offset + state.len;
                    state.base[range].copy_from_slice(&state.patch[..state.len]);
                    let parts = std::mem::take(&mut self.parts);
                    let bytes = &parts[part as usize].base;
                    let (written, entry) = self.write_from(op, from.page, bytes, from.entry, true);
                    self.parts = parts;
                    match written {
                        Written::Published => return Progress::Done(Ok(())),
                        Written::Overtaken => {} // begin again
                        Written::Failed(fault) => return Progress::Done(Err(fault)),
                        Written::Full => return Progress::Full,
                        Written::Queued => {
                            self.ops[op as usize].work = Work::Part { part, from, to: Some(entry) };
                            return Progress::Queued;
                        }
                    }
                }
                // The new content is out.
                (Some(Ok(())), Some(entry)) => {
                    if self.publish(from.page, entry, Some(from.entry)) {
                        return Progress::Done(Ok(()));
                    }
                }
                (Some(Err(fault)), to) => {
                    if let Some(entry) = to {
                        self.unclaim(entry);
                    }
                    return Progress::Done(Err(fault));
                }
            }
        }
    }
}

impl Drop for Lane {
    fn drop(&mut self) {
        // Writes under way hold slots that nobody else knows of, so let them end; a store that hangs is given up on.
        let started = Instant::now();
        while self.in_flight > 0 && started.elapsed() < SLOT_WAIT {
            self.submit();
            self.poll(&mut |_| {});
            std::thread::yield_now();
        }
        self.volume.epochs.unpin(self.seat);
        self.volume.lanes[self.seat].taken.store(false, Ordering::Release);
    }
}

impl Guard<'_> {
    /// What a read of the page finds. A page shown as bytes has been verified.
    pub fn view(&self, page: PageNo) -> View<'_> {
        self.show(&self.lane.volume.locate(page))
    }

    #[inline]
    pub(crate) fn show(&self, located: &Located) -> View<'_> {
        match located.entry.place() {
            Place::Empty => View::Fill(0),
            Place::Fill(value) => View::Fill(value),
            Place::Lost => View::Fault(Fault::Lost),
            Place::Stored { store, slot } => {
                // SAFETY: the map named the slot after this lane was pinned, so no lane claims it, and so nobody writes it
                // or releases its chunk, before the pin ends; the result borrows the guard, whose end that is.
                match unsafe { self.lane.stores[store].lane.view(slot) } {
                    None => View::Elsewhere,
                    Some(bytes) => match located.verify(bytes) {
                        Ok(()) => View::Bytes(bytes),
                        Err(fault) => View::Fault(fault),
                    },
                }
            }
        }
    }

    /// Says that [`view`](Guard::view) of this page will follow that of one or two others: brings its record and its head
    /// near.
    #[inline]
    pub fn prefetch(&self, page: PageNo) {
        let volume = &self.lane.volume;
        if let Place::Stored { store, slot } = volume.map.load(page).place() {
            volume.tiers[store].records.prefetch(slot);
            // SAFETY: the map names the slot and this lane is pinned, as in `view`.
            if let Some(bytes) = unsafe { self.lane.stores[store].lane.view(slot) } {
                weir_core::prefetch(bytes);
            }
        }
    }

    /// Counts `pages` pages that have been looked at through this guard since it began, `faults` of them in vain. A page of
    /// those that are timed took its share of the time.
    pub fn count_reads(&self, pages: u64, faults: u64) {
        let metrics = self.lane.metrics();
        metrics.reads.add(pages);
        metrics.read_faults.add(faults);
        if let Some(started) = self.started
            && pages > 0
        {
            metrics.read_latencies.record(started.elapsed() / pages as u32, 1);
        }
    }
}

impl Drop for Guard<'_> {
    fn drop(&mut self) {
        self.lane.leave();
    }
}

impl Volume {
    pub(crate) fn seat(&self, seat: usize) -> &LaneMetrics {
        &self.lanes[seat].metrics
    }

    /// `entry`, not yet published, as generation `generation`.
    #[cold]
    fn renew(&self, page: PageNo, entry: Entry, generation: u32) -> Entry {
        if let Place::Stored { store, slot } = entry.place() {
            let records = &self.tiers[store].records;
            let written = records.occupant(slot).expect("the slot was claimed for this entry");
            let checksum = written.checksum.renewed(page, entry.generation(), generation);
            records.fill_in(slot, Occupant { page, checksum });
        }
        Entry::new(entry.place(), generation)
    }

    /// Where a page lies, with its checksum. The calling lane is pinned.
    ///
    /// The slot's record is read after the map named the slot. Nobody can claim the slot meanwhile, but whoever replaced the page
    /// may have retired it, and with that its checksum: then the map already says where the new content is.
    #[inline]
    pub(crate) fn locate(&self, page: PageNo) -> Located {
        let mut entry = self.map.load(page);
        loop {
            let Place::Stored { store, slot } = entry.place() else {
                return Located { page, entry, checksum: None };
            };
            if let Some(occupant) = self.tiers[store].records.occupant(slot) {
                let checksum = (occupant.page == page).then_some(occupant.checksum);
                return Located { page, entry, checksum };
            }
            let now = self.map.load(page);
            if now == entry {
                return Located { page, entry, checksum: None };
            }
            entry = now;
        }
    }
}

impl Located {
    /// Whether `bytes` are the page's content, where that lies in a store.
    #[inline]
    fn verify(&self, bytes: &PageBytes) -> Result<(), Fault> {
        let right = match self.entry.place() {
            Place::Stored { .. } => {
                self.checksum == Some(Checksum::of(bytes, self.page, self.entry.generation()))
            }
            _ => true,
        };
        if right { Ok(()) } else { Err(Fault::Corrupt) }
    }
}

impl LaneMetrics {
    #[inline]
    fn read_ended(&self, started: Option<Instant>, result: Result<(), Fault>) {
        ended(started, result, &self.read_latencies, &self.read_faults);
        if result == Err(Fault::Corrupt) {
            count(&self.corrupt);
        }
    }

    #[inline]
    fn write_ended(&self, started: Option<Instant>, result: Result<(), Fault>) {
        ended(started, result, &self.write_latencies, &self.write_faults);
    }
}

#[inline]
fn ended(started: Option<Instant>, result: Result<(), Fault>, latencies: &Latencies, faults: &Counter) {
    if let Some(started) = started {
        latencies.record(started.elapsed(), 1);
    }
    if result.is_err() {
        count(faults);
    }
}

#[inline]
fn count(counter: &Counter) {
    counter.add(1);
}

fn fill(page: &mut PageBytes, value: u32) {
    for word in page.chunks_exact_mut(4) {
        word.copy_from_slice(&value.to_ne_bytes());
    }
}

impl Hints {
    fn first(&self) -> Option<Slot> {
        (self.len > 0).then(|| self.slots[self.first])
    }

    fn pop(&mut self) {
        self.first = (self.first + 1) % HINTS;
        self.len -= 1;
    }

    /// Adds a slot; the oldest is forgotten when there are too many (a search still finds it).
    fn push(&mut self, slot: Slot) {
        if self.len == HINTS {
            self.pop();
        }
        self.slots[(self.first + self.len) % HINTS] = slot;
        self.len += 1;
    }
}
