//! A lane: one thread's access to a volume.

mod claim;
mod completion;
mod count;
mod located;
mod packing;
mod part;
mod publish;
mod queued_run;
mod run;
mod view;

pub(crate) use claim::HINTS;
use count::Started;
pub(crate) use located::Located;
pub(crate) use packing::OPENED_MAX;
pub(crate) use queued_run::Run;
pub use view::Guard;

use crate::batch::BatchCounts;
use crate::blocks::Item;
use crate::closing::Closing;
use crate::entry::{Entry, Place};
use crate::epoch::Pin;
use crate::looking::Looking;
use crate::records::Cursor;
use crate::status::LaneMetrics;
use crate::{Pool, Tier, Volume};
use claim::{Hints, SlotWait};
use packing::{Carried, Packed, Packing};
use part::Part;
use publish::Written;
use queued_run::RUNS;
use std::os::fd::BorrowedFd;
use std::sync::Arc;
use std::time::Instant;
use weir_core::{PAGE_SIZE, PageBytes, PageNo, Slot};
use weir_store::{Fault, OpenError, Progress, Ticket};

/// Number of partial writes that a lane may have under way; one more returns [`Progress::Full`].
pub(crate) const PARTS: usize = 8;

/// A lane of a [`Volume`]: reads, writes and discards pages, for one thread.
///
/// Operations that a store finishes at once return [`Progress::Done`]. Others return
/// [`Progress::Queued`]; [`submit`](Lane::submit) starts them, and [`poll`](Lane::poll) hands them
/// over. A batch begins with the first operation, and lasts until a `submit` finds nothing in
/// flight. Slots that any lane frees meanwhile may not be reused before the batch ends. So end a
/// batch, by `submit`, before waiting for anything.
pub struct Lane {
    pub(crate) pool: Arc<Pool>,
    volume: Arc<Volume>,
    /// The pool's number of the volume's first page.
    first: u32,
    /// A volume without pages. The lane is turned to it while the lane has no other volume.
    nowhere: Arc<Volume>,
    seat: usize,
    /// The lane's pin and its counts, which other threads read.
    pin: Item<Pin>,
    metrics: Arc<LaneMetrics>,
    pub(crate) stores: Box<[StoreLane]>,
    /// Operations at slow stores; an operation's index is its ticket at the store.
    ops: Box<[Op]>,
    idle_ops: Vec<u32>,
    parts: Box<[Part]>,
    idle_parts: Vec<u32>,
    /// Runs of pages that are one operation each.
    runs: Box<[Run]>,
    idle_runs: Vec<u32>,
    /// Number of stores, from the first on, in which this lane looks for a slot.
    pub(crate) reach: usize,
    /// Partial writes that found a store full; the next poll tries them again.
    stalled: Vec<u32>,
    /// Operations that the current poll has found finished, or that finished since the last poll.
    finished: Vec<(u32, Result<(), Fault>)>,
    /// Writes that the current poll has not published, because another lane has written their
    /// pages.
    overtaken: Vec<u32>,
    /// Whether a write returned [`Progress::Full`] because another lane had written its page, so
    /// that the caller will try again.
    asks_for_look: bool,
    in_flight: usize,
    /// Number of pages that a store is working on.
    under_way: usize,
    /// Number of slots of writes that a store did not answer in time. Those writes may still change
    /// the slots.
    unsettled: usize,
    /// The wait for a slot, if a write found none.
    slot_wait: SlotWait,
    /// Whether writes are [held](Lane::hold).
    holds: bool,
    /// The time of the last poll.
    polled: Option<Instant>,
    /// The pin of this lane, and the reads that need it.
    looking: Looking,
    /// The lane may reuse slots that were retired before this epoch.
    safe: u64,
    claims_since_safe: u32,
    /// The store that the last slot was claimed in.
    taker: usize,
    /// Number of pages of a long write that have no slot yet.
    long: u32,
    /// Whether the last search found no run of free slots for the long write.
    barren: bool,
    until_sample: u32,
    /// The lane's memory for compression, if the pool has compressed pages.
    packing: Option<Box<Packing>>,
}

/// A lane's state for one store.
pub(crate) struct StoreLane {
    pub(crate) lane: Box<dyn weir_store::Lane>,
    cursor: Cursor,
    hints: Hints,
    /// The run of free slots that a long write fills, and the slot at which the next search for a
    /// run starts.
    run: std::ops::Range<u32>,
    run_cursor: Cursor,
}

pub(crate) struct Op {
    ticket: Ticket,
    started: Option<Started>,
    /// The epoch in which the page to read was found.
    found: u64,
    work: Work,
    /// The operation's place in a pack.
    carried: Carried,
    /// Whether the write must have no effect, because its client has gone.
    forsaken: bool,
    /// Number of times that the page was found written by another lane.
    looks: u8,
}

#[derive(Clone, Copy)]
enum Work {
    Idle,
    Read(Located),
    /// A whole page is on its way to `entry`'s slot; it is published when it has arrived.
    Write {
        page: PageNo,
        entry: Entry,
    },
    /// A partial write: first the old content is on its way in, from `from`, then the new content
    /// is on its way out. (While a whole or partial write waits in a pack, its new entry names no
    /// slot yet.)
    Part {
        part: u32,
        from: Located,
        to: Option<Entry>,
    },
    /// A run of pages side by side: each is on its way in, or all are on their way out.
    Run {
        run: u32,
    },
}

impl Lane {
    /// Opens a lane. It can have `parts` partial writes under way at a time, each of at most
    /// `patch` bytes.
    pub(crate) fn open(volume: Arc<Volume>, parts: usize, patch: usize) -> Result<Self, OpenError> {
        let pool = Arc::clone(volume.pool());
        pool.take_slack(pool.config.lane_slots())?;
        let seat = pool.seats.take();
        let depth = pool.config.depth.max(1);
        let lanes = pool.config.lanes;
        let open = |tier: &Tier| {
            Ok(StoreLane {
                lane: tier.store.lane(depth)?,
                cursor: tier.records.cursor(seat, lanes),
                hints: Hints { slots: [Slot(0); HINTS], first: 0, len: 0 },
                run: 0..0,
                run_cursor: tier.records.cursor(seat, lanes),
            })
        };
        let stores: Box<[StoreLane]> = match pool.tiers.iter().map(open).collect() {
            Ok(stores) => stores,
            Err(error) => {
                pool.release_seat(seat);
                return Err(error);
            }
        };
        let packing = match Packing::of(&pool) {
            Ok(packing) => packing,
            Err(error) => {
                pool.release_seat(seat);
                return Err(OpenError::io("volume", weir_store::DENIED, error));
            }
        };
        let op = || Op::IDLE;
        let runs = depth.min(RUNS);
        let part = || Part {
            base: Box::new([0; PAGE_SIZE]),
            patch: vec![0; patch].into_boxed_slice(),
            offset: 0,
            len: 0,
            moving: None,
        };
        let (pin, metrics) = (pool.epochs.pin_of(seat), pool.seats.seat(seat).metrics(stores.len()));
        let nowhere = Volume::over(&pool, 0..0);
        Ok(Lane {
            pool,
            first: volume.range().start,
            volume,
            nowhere,
            seat,
            pin,
            metrics,
            reach: stores.len(),
            stores,
            ops: std::iter::repeat_with(op).take(depth).collect(),
            idle_ops: (0..depth as u32).rev().collect(),
            parts: std::iter::repeat_with(part).take(parts).collect(),
            idle_parts: (0..parts as u32).rev().collect(),
            runs: std::iter::repeat_with(Run::idle).take(runs).collect(),
            idle_runs: (0..runs as u32).rev().collect(),
            stalled: Vec::with_capacity(parts),
            finished: Vec::with_capacity(depth),
            overtaken: Vec::with_capacity(depth),
            asks_for_look: false,
            in_flight: 0,
            under_way: 0,
            unsettled: 0,
            slot_wait: SlotWait::default(),
            holds: false,
            polled: None,
            looking: Looking::default(),
            safe: 0,
            claims_since_safe: 0,
            taker: 0,
            long: 0,
            barren: false,
            until_sample: 0,
            packing,
        })
    }

    /// The volume to which this lane is turned. If it is turned to none, this is a volume without
    /// pages.
    pub fn volume(&self) -> &Arc<Volume> {
        &self.volume
    }

    /// Turns this lane to another volume of its pool. With `None` the lane has no pages, and holds
    /// no volume. The call takes no memory. If somebody else holds the lane's former volume, it
    /// frees none either.
    ///
    /// The lane keeps nothing of the former volume: only operations name its pages, and none is in
    /// flight. Writes that have timed out keep their slots until they have settled, but no page
    /// names such a slot.
    ///
    /// # Panics
    /// Panics when an operation is in flight, or the volume belongs to another pool.
    pub fn turn(&mut self, volume: Option<&Arc<Volume>>) {
        assert_eq!(self.in_flight, 0, "operations in flight when a lane is turned");
        let volume = volume.unwrap_or(&self.nowhere);
        assert!(Arc::ptr_eq(volume.pool(), &self.pool), "a lane is turned to a volume of another pool");
        self.first = volume.range().start;
        self.volume = Arc::clone(volume);
        // The first write to the next volume may wait for a slot as long as any other write.
        self.slot_wait = SlotWait::default();
        self.asks_for_look = false;
        self.long = 0;
        self.leave();
    }

    /// Returns the number that the volume's page `page` has in the pool.
    #[inline]
    pub(crate) fn at(&self, page: PageNo) -> PageNo {
        self.run_at(page, 1)
    }

    /// Returns the number that the volume's page `first` has in the pool. Checks that `count` pages
    /// from `first` on lie in the volume.
    ///
    /// Panics when one of these pages lies behind the volume's end. Pages there belong to other
    /// volumes.
    #[inline]
    pub(crate) fn run_at(&self, first: PageNo, count: usize) -> PageNo {
        let pages = self.volume.pages();
        let fits = first.0 <= pages && count <= (pages - first.0) as usize;
        assert!(fits, "{count} pages from page {} of {pages} on", first.0);
        PageNo(self.first + first.0)
    }

    /// Announces a batch to every store, so that each can choose how to do it. Callers may leave
    /// this out. A caller that knows which pages it will read uses [`batch`](Lane::batch), which
    /// tells each store only its own part.
    pub fn plan(&mut self, reads: usize, writes: usize) {
        for store in &mut self.stores {
            store.lane.plan(reads, writes);
        }
    }

    /// Begins to count a batch, to announce it to the stores. `None` if no store uses such
    /// announcements.
    pub fn batch(&mut self) -> Option<BatchCounts<'_>> {
        let heeded = self.stores.iter().any(|store| store.lane.heeds_plan());
        heeded.then(|| BatchCounts::new(&self.volume, &mut self.stores, self.taker))
    }

    /// Reads a page. With [`Progress::Done`] `out` holds the page; with [`Progress::Queued`] it
    /// comes with the completion.
    pub fn read(&mut self, ticket: Ticket, page: PageNo, out: &mut PageBytes) -> Progress {
        let page = self.at(page);
        self.enter();
        let started = self.sample();
        let located = self.pool.locate(page);
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
                let Some(op) = self.idle_op() else { return Progress::Full };
                match self.read_slot(op, &located, store, slot, out) {
                    Progress::Done(result) => result,
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
        self.metrics().read_ended(located.entry.place(), started, result);
        Progress::Done(result)
    }

    /// Writes a whole page. `bytes` may be reused as soon as this returns. [`Progress::Done`] or
    /// the completion acknowledges the write. With [`Progress::Full`] the caller polls and tries
    /// again. If every slot is taken, the lane notes how long the write has waited, and the write
    /// fails after 2 s. If another lane has written the page meanwhile, the caller checks that its
    /// client is still there before it tries again.
    pub fn write(&mut self, ticket: Ticket, page: PageNo, bytes: &PageBytes) -> Progress {
        let page = self.at(page);
        self.enter();
        let started = self.sample();
        let Some(op) = self.idle_op() else { return Progress::Full };
        let generation = self.pool.map.load(page).next_generation();
        if self.packing.is_some() {
            match self.pack(op, page, bytes) {
                Packed::Joined => {
                    let entry = Entry::new(Place::Empty, generation);
                    self.start(ticket, started, Work::Write { page, entry });
                    return Progress::Queued;
                }
                Packed::Full => return Progress::Full,
                Packed::Not => {}
            }
        }
        let (written, entry) = self.write_from(op, page, bytes, generation, None);
        let result = match written {
            Written::Published => Ok(()),
            Written::Failed(fault) => Err(fault),
            Written::Full => return Progress::Full,
            Written::Overtaken => {
                self.asks_for_look = true;
                return Progress::Full;
            }
            Written::Queued => {
                self.start(ticket, started, Work::Write { page, entry });
                return Progress::Queued;
            }
        };
        self.metrics().write_ended(entry.place(), started, result);
        Progress::Done(result)
    }

    /// Discards pages `first..first + count`: they read as zeros, and their slots are free. If a
    /// page was empty already, a write that another lane began before may still take effect; see
    /// [`zero`](Lane::zero).
    pub fn discard(&mut self, first: PageNo, count: u32) {
        // Replace no entry that is empty already. When a whole device is discarded, most pages were
        // never written, and their part of the map stays untouched.
        self.replace_all(first, count, Place::Empty, |was| was != Place::Empty);
        self.metrics().discards.add(u64::from(count));
    }

    /// Makes pages `first..first + count` read as zeros. They count as written, or with `holes` as
    /// discarded. An older write of a client that has gone cannot take effect after this.
    pub fn zero(&mut self, first: PageNo, count: u32, holes: bool) {
        let place = if holes { Place::Empty } else { Place::Fill(0) };
        self.replace_all(first, count, place, |_| true);
        self.metrics().traffic_of(None).writes.add(u64::from(count));
    }

    fn replace_all(&mut self, first: PageNo, count: u32, place: Place, which: impl Fn(Place) -> bool) {
        let first = self.run_at(first, count as usize);
        for page in (first.0..first.0 + count).map(PageNo) {
            self.enter();
            loop {
                let was = self.pool.map.load(page);
                if !which(was.place()) || self.publish(page, Entry::new(place, was.next_generation()), None) {
                    break;
                }
            }
        }
    }

    /// Gives up the writes under way whose tickets `whose` selects: they take no effect from here
    /// on, and end with [`Fault::Forsaken`]. It is for writes of a client that has gone. That
    /// client may have sent them again by another lane, and newer ones after them.
    ///
    /// Call `forsake` before each poll while a client is missing. Then no write of that client
    /// takes effect after a later one that it made by another lane. A write waits for the next poll
    /// if another lane has written its page since the write began, or since the last poll. So does
    /// a write that begins anew in a poll, and one that is [held](Lane::hold).
    pub fn forsake(&mut self, whose: impl Fn(Ticket) -> bool) {
        self.slot_wait.end();
        for op in &mut self.ops {
            let writes = match op.work {
                Work::Idle | Work::Read(_) => false,
                Work::Write { .. } => true,
                Work::Part { part, .. } => self.parts[part as usize].moving.is_none(),
                Work::Run { run } => self.runs[run as usize].is_write(),
            };
            op.forsaken |= writes && whose(op.ticket);
        }
    }

    /// From here on, or no longer, a write takes no effect before the next poll. This is for a
    /// write that has waited. Its owner has looked for the client before the last poll, and looks
    /// again before the next. If the client has left in between, it may have written the page by
    /// another lane. The held write has its number from before that look, so it is overtaken then.
    pub fn hold(&mut self, holds: bool) {
        self.holds = holds;
    }

    /// Whether the page has been written since it was last discarded.
    pub fn mapped(&self, page: PageNo) -> bool {
        self.pool.map.load(self.at(page)).place() != Place::Empty
    }

    /// Whether the page is known to read as zeros, without looking into a store.
    pub fn known_zero(&self, page: PageNo) -> bool {
        matches!(self.pool.map.load(self.at(page)).place(), Place::Empty | Place::Fill(0))
    }

    /// Number of operations that were queued and whose completions were not handed over yet.
    pub fn in_flight(&self) -> usize {
        self.in_flight
    }

    /// Descriptors that become readable when [`poll`](Lane::poll) has something to hand over.
    pub fn wake_fds(&self) -> impl Iterator<Item = BorrowedFd<'_>> {
        self.stores.iter().filter(|store| store.lane.in_flight() > 0).filter_map(|store| store.lane.wake_fd())
    }

    /// Whether the lane's owner must poll again after a short rest, because no descriptor announces
    /// the lane's next progress. This is so if a store with operations in flight has no descriptor,
    /// or if a write that returned [`Progress::Full`] is to be tried again.
    pub fn must_poll(&self) -> bool {
        !self.stalled.is_empty()
            || self.asks_for_look
            || self.waits_for_slot()
            || !self.finished.is_empty()
            || self.has_open_pack()
            || self.stores.iter().any(|store| store.lane.in_flight() > 0 && store.lane.wake_fd().is_none())
    }

    /// Abandons the lane as the death of its process would: its operations are neither finished nor
    /// undone. It serves tests of taking over; afterwards no other lane may use the volume.
    pub fn abandon(mut self) {
        (self.in_flight, self.unsettled) = (0, 0);
    }

    /// Pins this lane. If the lane is pinned already and no read needs the pin, the pin moves on to
    /// the present epoch. So a long batch does not hold back slots that were freed during it.
    #[inline]
    fn enter(&mut self) {
        self.looking.enter(&self.pool.epochs, &self.pin);
    }

    #[inline]
    fn leave(&mut self) {
        self.looking.leave(&self.pin);
    }

    pub(crate) fn metrics(&self) -> &LaneMetrics {
        &self.metrics
    }

    /// Finds the next idle operation. There is none if as many pages are under way as the lane can
    /// have operations. A run is one operation, but each of its pages counts here.
    fn idle_op(&self) -> Option<u32> {
        self.idle_ops.last().copied().filter(|_| self.under_way < self.ops.len())
    }

    /// Starts the operation whose index [`idle_op`](Lane::idle_op) has returned. The caller may
    /// already have given that index to a store, as the ticket of the store's operation. `ticket`
    /// is the ticket of the lane's own caller.
    fn start(&mut self, ticket: Ticket, started: Option<Started>, work: Work) {
        let op = self.idle_ops.pop().expect("the caller saw an idle operation");
        let begun = &mut self.ops[op as usize];
        (begun.ticket, begun.started, begun.found, begun.work) = (ticket, started, 0, work);
        self.in_flight += 1;
    }

    fn end(&mut self, op: u32) -> Op {
        let ended = std::mem::replace(&mut self.ops[op as usize], Op::IDLE);
        match ended.work {
            Work::Part { part, .. } => self.idle_parts.push(part),
            Work::Run { run } => self.idle_runs.push(run),
            Work::Idle | Work::Read(_) | Work::Write { .. } => {}
        }
        self.idle_ops.push(op);
        self.in_flight -= 1;
        ended
    }
}

impl Work {
    /// Sets the map entry that a write will publish.
    fn goes_to(&mut self, there: Entry) {
        match self {
            Work::Write { entry, .. } => *entry = there,
            Work::Part { to, .. } => *to = Some(there),
            Work::Idle | Work::Read(_) | Work::Run { .. } => {}
        }
    }

    /// The place of the page that is read, or of the page that is written.
    fn place(&self) -> Place {
        match self {
            Work::Idle | Work::Run { .. } | Work::Part { to: None, .. } => Place::Empty,
            Work::Read(located) => located.entry.place(),
            Work::Write { entry, .. } | Work::Part { to: Some(entry), .. } => entry.place(),
        }
    }
}

impl Op {
    /// The index of this operation's run of pages, if it has one.
    pub(crate) fn run(&self) -> Option<u32> {
        match self.work {
            Work::Run { run } => Some(run),
            _ => None,
        }
    }

    /// The store's index and the slot that this operation writes, if they are not published yet.
    pub(crate) fn unpublished(&self) -> Option<(usize, Slot)> {
        if let Carried::Leads { store, slot, .. } = self.carried {
            return Some((store, slot));
        }
        match (&self.work, self.work.place()) {
            (Work::Write { .. } | Work::Part { .. }, Place::Stored { store, slot }) => Some((store, slot)),
            _ => None,
        }
    }

    const IDLE: Op = Op {
        ticket: 0,
        started: None,
        found: 0,
        work: Work::Idle,
        carried: Carried::No,
        forsaken: false,
        looks: 0,
    };
}

impl Drop for Lane {
    fn drop(&mut self) {
        let Lane { pool, seat, metrics, stores, ops, runs, finished, .. } = self;
        if self.in_flight + self.unsettled == 0 {
            return pool.free_seat(*seat);
        }
        // Writes under way hold slots that no other lane knows of, and reads need the lane's pin.
        // So the pool keeps both until the stores have ended the operations.
        let (stores, ops, runs) = (std::mem::take(stores), std::mem::take(ops), std::mem::take(runs));
        let mut closing = Closing::new(pool, Arc::clone(metrics), stores, ops, runs, self.unsettled);
        finished.drain(..).for_each(|(op, result)| closing.end_single(pool, op, result));
        pool.close(*seat, closing);
    }
}

pub(super) fn fill(page: &mut PageBytes, value: u32) {
    for word in page.chunks_exact_mut(4) {
        word.copy_from_slice(&value.to_ne_bytes());
    }
}
