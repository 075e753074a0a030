//! The request engine: requests for byte ranges of a page device are cut into pages, issued, waited
//! for, and answered.
//!
//! A front end passes its requests to a [`Requests`]. The front end itself parses the requests, and
//! frames and sends the answers. A request has a number that its owner chooses ([`Id`]), and an
//! entry that counts its outstanding operations. All requests of a batch are issued before anything
//! is waited for. A request that finds the lane full waits in its entry, and goes on when another
//! operation has ended.
//!
//! The owner of requests provides their memory ([`RequestMemory`]). Nothing here allocates memory
//! after construction, reads a clock, or sleeps. Only [`sleep`] and [`wait`] are exceptions, and
//! the owner's thread calls them.

mod errno;
mod span;
mod wake;

pub use errno::errno;
pub use span::{Piece, Span};
pub use wake::{sleep, wait, wait_for_room};

use rustix::io::Errno;
use std::collections::VecDeque;
use std::io::IoSlice;
use std::os::fd::BorrowedFd;
use std::time::{Duration, Instant};
use weir_core::{PAGE_SIZE, PageBytes, PageNo, Rest};
use weir_device::{Coming, Done, Fault, PageGuard, PageLane, Progress, Ticket, View};

/// The number that the owner of the requests gives to one of them.
pub type Id = u16;

/// The bits of a ticket that hold the page's index in its request; the other bits hold the request.
const PAGE_BITS: u32 = 16;

/// Largest number of pages that a read or a write may touch.
pub const PAGES_MAX: u32 = (1 << PAGE_BITS) - 1;

/// Largest number of operations that one [`Requests::write_piece`] issues. Pages in a row that one
/// call of the lane writes at once do not count.
const PIECE: u32 = 16;

/// Number of pages that a discard or a zeroing changes in one turn, which takes a fraction of a
/// millisecond.
pub const STEP: u32 = 4096;

static ZEROS: PageBytes = [0; PAGE_SIZE];

/// The operation on a range.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Op {
    /// Reads the range into the owner's memory.
    Read,
    /// Writes the owner's bytes to the range.
    Write,
    /// Discards whole pages of the range, and zeroes parts of pages.
    Discard,
    /// Zeroes the range; the pages count as written.
    Zero,
    /// Zeroes the range; the pages count as discarded, and take no room.
    Hole,
    /// Makes all acknowledged writes as safe as the device can. Has no range.
    Flush,
}

/// A request.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Request {
    /// The operation on the range.
    pub op: Op,
    /// The range. A read or a write touches at most [`PAGES_MAX`] pages.
    pub span: Span,
    /// Whether the request is acknowledged only once its change is as safe as after a flush (FUA).
    pub fua: bool,
}

/// A request's answer.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Answer {
    /// The owner's number for the request.
    pub id: Id,
    /// The request.
    pub request: Request,
    /// The outcome of the request.
    pub result: Result<(), Fault>,
    /// For a read that failed: the first page that failed, counted from the span's first.
    pub at: u32,
}

/// The memory of requests, and the places of their pages in the device.
pub trait RequestMemory {
    /// Whether page `n` of a span is always page `n` of the device. Then one call of the lane can
    /// read or write several pages in a row.
    const LINEAR: bool = true;

    /// The page of the device for a page of a request's span. `None` is a hole: it reads as zeros,
    /// and a write to it fails with [`Fault::Full`].
    fn place(&self, _id: Id, page: u64) -> Option<PageNo> {
        Some(PageNo(page as u32))
    }

    /// Called before a write is issued, or goes on with the page at index `at`. From then on
    /// [`data`](RequestMemory::data) must return the bytes of that write; those of pages before
    /// `at` are not used. If all requests share one buffer, this call copies the bytes into it.
    fn fetch(&mut self, _id: Id, _at: u32) {}

    /// The bytes of a write that was begun as a whole. There are at least as many bytes as the
    /// write's span has.
    fn data(&self, id: Id) -> &[u8];

    /// Memory into which a read puts pages of its span, one after another from the page at index
    /// `at` on. Returns memory for at least one page, and possibly for more pages than are left of
    /// the read.
    fn pages(&mut self, id: Id, at: u32) -> &mut [PageBytes];

    /// Notes that `count` pages of a read have been filled, from index `at` on. From then on
    /// [`pages`](RequestMemory::pages) may return the same memory for another page.
    fn filled(&mut self, _id: Id, _at: u32, _count: u32) {}
}

/// Requests under way in one thread's lane.
pub struct Requests<L> {
    lane: L,
    flight: Flight,
    rest: Rest,
    /// The open write whose last piece found the lane full.
    waited: Option<Id>,
}

/// The state that completions change.
struct Flight {
    works: Box<[Work]>,
    /// Requests that still have operations to issue.
    waiting: VecDeque<Id>,
    /// Whether the first of the waiting requests found the lane full.
    stuck: bool,
    /// Requests whose answers nobody has taken yet.
    finished: VecDeque<Id>,
    unfinished: usize,
}

/// A request under way.
#[derive(Clone, Copy)]
struct Work {
    request: Request,
    /// The index of the page to issue next.
    next: u32,
    /// Number of outstanding operations, plus one until all have been issued; 0: the entry is idle.
    left: u32,
    /// Whether the request's change is done and is being flushed now.
    flushing: bool,
    /// The first fault, with the index of its page.
    fault: Option<(Fault, u32)>,
}

/// The progress of issuing a request.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Step {
    /// All operations of the request have been issued.
    Issued,
    /// The lane has no more room.
    Full,
    /// The request has more operations to issue, in a later turn.
    More,
}

impl<L: PageLane> Requests<L> {
    /// Makes room for requests `0..depth`. Takes all its memory now.
    pub fn new(lane: L, depth: u16) -> Requests<L> {
        let request = Request { op: Op::Flush, span: Span { offset: 0, length: 0 }, fua: false };
        let idle = Work { request, next: 0, left: 0, flushing: false, fault: None };
        let depth = usize::from(depth);
        Requests {
            lane,
            flight: Flight {
                works: vec![idle; depth].into_boxed_slice(),
                waiting: VecDeque::with_capacity(depth),
                stuck: false,
                finished: VecDeque::with_capacity(depth),
                unfinished: 0,
            },
            waited: None,
            rest: Rest::default(),
        }
    }

    /// The lane, for its owner's operations that are no requests.
    pub fn lane(&mut self) -> &mut L {
        &mut self.lane
    }

    /// The lane, without the requests that are under way.
    pub fn into_lane(self) -> L {
        self.lane
    }

    /// Announces a batch of requests that are about to begin.
    pub fn announce<M: RequestMemory>(&mut self, requests: impl Iterator<Item = (Id, Request)>, memory: &M) {
        self.lane.announce(requests.flat_map(|(id, Request { op, span, .. })| {
            let pages = span.pages();
            let (runs, length) = match op {
                Op::Read if M::LINEAR => (pages.min(1), pages),
                Op::Read => (pages, 1),
                Op::Write => (1, pages),
                Op::Discard | Op::Zero | Op::Hole | Op::Flush => (0, 0),
            };
            (0..runs).filter_map(move |at| match op {
                Op::Read => Some(Coming::Reads(memory.place(id, span.first() + u64::from(at))?, length)),
                _ => Some(Coming::Writes(length)),
            })
        }));
    }

    /// Begins a request; `id` must be idle. Operations that need not wait have ended when this
    /// function returns. [`submit`](Requests::submit) ends the batch.
    pub fn begin(&mut self, id: Id, request: Request, memory: &mut impl RequestMemory) {
        self.flight.open(id, request);
        // Requests that already wait go first.
        if self.flight.waiting.is_empty() {
            self.advance(id, memory);
        } else {
            self.flight.waiting.push_back(id);
        }
    }

    /// Begins a write whose bytes come in pieces; `id` is idle. It is answered once it has been
    /// [closed](Requests::close).
    pub fn open(&mut self, id: Id, request: Request) {
        self.waited = self.waited.filter(|waited| *waited != id);
        self.flight.open(id, request);
    }

    /// Issues the next bytes of a write that is [open](Requests::open), without a copy. The bytes
    /// go to the device from `offset` on. Returns the number of bytes taken: a bounded number, and
    /// 0 if the lane is full. If the write has failed already, takes all bytes and issues nothing.
    /// A write that has found the lane full takes effect behind the owner's next look at its
    /// client.
    pub fn write_piece(&mut self, id: Id, offset: u64, bytes: &[u8]) -> usize {
        let Requests { lane, flight, waited, .. } = self;
        if flight.has_failed(id) {
            return bytes.len();
        }
        let span = Span { offset, length: bytes.len() as u64 };
        let place = |page| Some(PageNo(page as u32));
        let has_waited = *waited == Some(id);
        lane.hold(has_waited);
        let at = flight.write(lane, id, (span, 0), bytes, (true, PIECE), place);
        lane.hold(false);
        let is_whole = at == span.pages() || flight.has_failed(id);
        let taken = if is_whole { bytes.len() } else { span.piece(at).from as usize };
        if taken == 0 {
            *waited = Some(id);
        }
        taken
    }

    /// Ends a write that was [open](Requests::open). If not all bytes of the write have come,
    /// `came` must be an error. The write then fails with that error.
    pub fn close(&mut self, id: Id, came: Result<(), Fault>) {
        if let Err(fault) = came {
            self.flight.fail(id, 0, fault);
        }
        self.flight.one_less(id);
    }

    /// Gives up the requests for which `whose` returns true. They have no further effect, and are
    /// answered with [`Fault::Forsaken`].
    pub fn forsake(&mut self, whose: impl Fn(Id) -> bool) {
        self.lane.forsake(|ticket| whose((ticket >> PAGE_BITS) as Id));
        for _ in 0..self.flight.waiting.len() {
            let id = self.flight.waiting.pop_front().expect("counted");
            if whose(id) {
                self.flight.fail(id, 0, Fault::Forsaken);
                self.flight.one_less(id);
            } else {
                self.flight.waiting.push_back(id);
            }
        }
    }

    /// Starts the operations that were issued.
    pub fn submit(&mut self) {
        self.lane.submit();
    }

    /// Takes the lane's completions, and continues each waiting request by a bounded number of
    /// pages.
    pub fn turn(&mut self, now: Instant, memory: &mut impl RequestMemory) {
        if self.flight.unfinished == 0 {
            return;
        }
        let Requests { lane, flight, rest, .. } = self;
        lane.poll(now, &mut |done| {
            rest.end();
            flight.complete(&done, memory);
        });
        if self.is_waiting() {
            // These writes begin behind the owner's look at their clients. They take effect behind
            // its next look.
            self.lane.hold(true);
            for _ in 0..self.flight.waiting.len() {
                let id = self.flight.waiting.pop_front().expect("counted");
                if self.advance(id, memory) == Step::Full {
                    break;
                }
            }
            self.lane.hold(false);
        }
        self.lane.submit();
    }

    /// Takes the next answer. Its entry is idle again.
    pub fn finished(&mut self) -> Option<Answer> {
        let id = self.flight.finished.pop_front()?;
        let Work { request, fault, .. } = self.flight.works[usize::from(id)];
        let (result, at) = fault.map_or((Ok(()), 0), |(fault, at)| (Err(fault), at));
        Some(Answer { id, request, result, at })
    }

    /// Whether an operation is under way, or a request waits to issue more of them. An
    /// [open](Requests::open) write counts only while pieces of it are being written.
    pub fn has_work(&self) -> bool {
        self.lane.in_flight() > 0 || !self.flight.waiting.is_empty()
    }

    /// Whether a request waits to issue more operations, which the next [`turn`](Requests::turn)
    /// does.
    pub fn is_waiting(&self) -> bool {
        !self.flight.waiting.is_empty()
    }

    /// Whether answers are outstanding.
    pub fn is_busy(&self) -> bool {
        self.flight.unfinished > 0
    }

    /// Whether the next [`turn`](Requests::turn) has something to do that no descriptor announces.
    pub fn must_poll(&self) -> bool {
        self.is_ready() || self.lane.must_poll() || (self.flight.stuck && self.lane.in_flight() == 0)
    }

    /// Whether a waiting request could go on at once, in the next [`turn`](Requests::turn).
    fn is_ready(&self) -> bool {
        self.is_waiting() && !self.flight.stuck
    }

    /// Pauses before the next [`turn`](Requests::turn), unless a request could go on at once. Call
    /// it while [`must_poll`](Requests::must_poll) is true.
    pub fn rest(&mut self) {
        if !self.is_ready() {
            self.rest.until_next();
        }
    }

    /// Waits until the next [`turn`](Requests::turn) may have something to do, or `also` is
    /// readable.
    ///
    /// # Errors
    /// Fails as [`sleep`] does, which never fails while its descriptors are open.
    pub fn wait(&mut self, also: Option<BorrowedFd<'_>>) -> Result<(), Errno> {
        if self.is_ready() { Ok(()) } else { wait(&mut self.rest, &self.lane, also) }
    }

    /// Waits until the next [`turn`](Requests::turn) may have something to do, or `to` takes more
    /// bytes.
    ///
    /// # Errors
    /// Fails as [`sleep`] does.
    pub fn wait_for_room(&mut self, to: BorrowedFd<'_>) -> Result<(), Errno> {
        if self.is_ready() { Ok(()) } else { wait_for_room(&mut self.rest, &self.lane, to) }
    }

    /// Sleeps as the function [`sleep`] does. Call it only while [`must_poll`](Requests::must_poll)
    /// is false.
    ///
    /// # Errors
    /// Fails as [`sleep`] does.
    pub fn sleep(&self, also: Option<BorrowedFd<'_>>, most: Option<Duration>) -> Result<(), Errno> {
        sleep(&self.lane, also, most)
    }

    /// Descriptors that become readable when [`turn`](Requests::turn) has something to do.
    pub fn wake_fds(&self) -> impl Iterator<Item = BorrowedFd<'_>> {
        self.lane.wake_fds()
    }

    /// Verifies the pages of a read. Passes `head` and then the read's bytes to `show`, without
    /// copying them. Returns `None` if a page must be fetched first: begin the read then. `SLICES`
    /// is one more than the pages that the read may touch.
    pub fn view<const SLICES: usize, M: RequestMemory, R>(
        &mut self,
        (id, span): (Id, Span),
        memory: &M,
        head: &[u8],
        show: impl FnOnce(&[IoSlice<'_>]) -> R,
    ) -> Option<R> {
        let pages = span.pages();
        let place = |at: u32| memory.place(id, span.first() + u64::from(at));
        let guard = self.lane.pin();
        let mut slices = [IoSlice::new(&[]); SLICES];
        slices[0] = IoSlice::new(head);
        for at in 0..pages {
            let bytes = match place(at).map(|page| guard.view(page)) {
                Some(View::Bytes(bytes)) => bytes,
                None | Some(View::Fill(0)) => &ZEROS,
                Some(View::Fill(_) | View::Elsewhere | View::Fault(_)) => return None,
            };
            if at + 2 < pages
                && let Some(ahead) = place(at + 2)
            {
                guard.prefetch(ahead);
            }
            slices[1 + at as usize] = IoSlice::new(&bytes[span.piece(at).range()]);
        }
        let shown = show(&slices[..1 + pages as usize]);
        guard.count_reads(pages.into(), 0);
        Some(shown)
    }

    /// Issues the next operations of a request: as many as one turn may issue.
    fn advance<M: RequestMemory>(&mut self, id: Id, memory: &mut M) -> Step {
        let work = self.flight.works[usize::from(id)];
        let step = match work.request.op {
            _ if work.flushing => self.flush(id),
            Op::Flush => self.flush(id),
            Op::Read => self.read(id, work, memory),
            Op::Write => self.write(id, work, memory),
            Op::Discard | Op::Zero | Op::Hole => self.clear(id, work, memory),
        };
        self.flight.stuck = step == Step::Full;
        match step {
            Step::Issued => self.flight.one_less(id),
            Step::Full => self.flight.waiting.push_front(id),
            Step::More => self.flight.waiting.push_back(id),
        }
        step
    }

    fn read<M: RequestMemory>(&mut self, id: Id, work: Work, memory: &mut M) -> Step {
        let Requests { lane, flight, .. } = self;
        let (span, mut at) = (work.request.span, work.next);
        let pages = span.pages();
        // A run of one page has no advantage over a single read.
        if M::LINEAR
            && pages - at > 1
            && let Some(first) = memory.place(id, span.first() + u64::from(at))
        {
            let out = memory.pages(id, at);
            let count = out.len().min((pages - at) as usize);
            let read = lane.read_run(first, &mut out[..count]) as u32;
            memory.filled(id, at, read);
            at += read;
        }
        // A request that has failed already needs no more operations.
        while at < pages && !flight.has_failed(id) {
            let place = memory.place(id, span.first() + u64::from(at));
            if let Some(first) = place.filter(|_| M::LINEAR && pages - at > 1) {
                let begun = lane.queue_reads(ticket(id, at), first, (pages - at) as usize) as u32;
                flight.works[usize::from(id)].left += begun;
                at += begun;
                if begun > 0 {
                    continue;
                }
            }
            let out = &mut memory.pages(id, at)[0];
            let progress = match place {
                None => {
                    *out = ZEROS;
                    Progress::Done(Ok(()))
                }
                Some(page) => lane.read(ticket(id, at), page, out),
            };
            if !flight.note(id, at, progress) {
                return Step::Full;
            }
            if progress == Progress::Done(Ok(())) {
                memory.filled(id, at, 1);
            }
            at += 1;
        }
        Step::Issued
    }

    fn write<M: RequestMemory>(&mut self, id: Id, work: Work, memory: &mut M) -> Step {
        let Requests { lane, flight, .. } = self;
        memory.fetch(id, work.next);
        let (memory, span) = (&*memory, work.request.span);
        let place = |page| memory.place(id, page);
        let at = flight.write(lane, id, (span, work.next), memory.data(id), (M::LINEAR, u32::MAX), place);
        if at == span.pages() || flight.has_failed(id) { Step::Issued } else { Step::Full }
    }

    fn clear<M: RequestMemory>(&mut self, id: Id, work: Work, memory: &M) -> Step {
        let Requests { lane, flight, .. } = self;
        if !L::CLEARS {
            flight.fail(id, 0, Fault::Unsupported);
            return Step::Issued;
        }
        let (Request { op, span, .. }, mut at) = (work.request, work.next);
        let (pages, mut room) = (span.pages(), STEP);
        while at < pages && !flight.has_failed(id) {
            let (piece, whole) = (span.piece(at), span.whole_from(at));
            let count = match whole {
                0 => 1,
                _ if M::LINEAR => whole.min(room),
                _ => room.min(1),
            };
            if count == 0 {
                flight.works[usize::from(id)].next = at;
                return Step::More;
            }
            match memory.place(id, piece.page) {
                None => {}
                Some(first) if whole > 0 && op == Op::Discard => lane.discard(first, count),
                Some(first) if whole > 0 => lane.zero(first, count, op == Op::Hole),
                Some(page) => {
                    // The parts of pages at both ends of a span get the same ticket. Their
                    // completions bring no page, so the request need not know which of them has
                    // completed.
                    let progress = lane.write_part(ticket(id, 0), page, piece.within, &ZEROS[..piece.len]);
                    if !flight.note(id, at, progress) {
                        return Step::Full;
                    }
                }
            }
            room -= if whole > 0 { count } else { 0 };
            at += count;
        }
        Step::Issued
    }

    fn flush(&mut self, id: Id) -> Step {
        let progress = self.lane.flush(ticket(id, 0));
        if self.flight.note(id, 0, progress) { Step::Issued } else { Step::Full }
    }
}

impl Flight {
    fn open(&mut self, id: Id, request: Request) {
        let work = &mut self.works[usize::from(id)];
        debug_assert!(work.left == 0, "request {id} is under way");
        *work = Work { request, next: 0, left: 1, flushing: false, fault: None };
        self.unfinished += 1;
    }

    /// Issues writes of the span's pages from index `at` on; `data` has the bytes of the whole
    /// span. Stops when the lane is full, when the request has failed, or after `most` operations;
    /// pages in a row that `write_run` writes at once do not count. Returns the index of the first
    /// page that is left. `linear` is the memory's [`RequestMemory::LINEAR`].
    #[inline]
    fn write(
        &mut self,
        lane: &mut impl PageLane,
        id: Id,
        (span, mut at): (Span, u32),
        data: &[u8],
        (linear, mut most): (bool, u32),
        place: impl Fn(u64) -> Option<PageNo>,
    ) -> u32 {
        let (pages, mut runs) = (span.pages(), linear);
        while at < pages && most > 0 && !self.has_failed(id) {
            let piece = span.piece(at);
            let Some(page) = place(piece.page) else {
                self.fail(id, at, Fault::Full);
                break;
            };
            let from = piece.from as usize;
            let whole = span.whole_from(at) as usize;
            if runs && whole > 1 {
                // `write_run` stops at a page that it cannot write at once. The calls below can
                // write that page and those after it. So call `write_run` once, and not again for
                // each page.
                runs = false;
                at += lane.write_run(page, data[from..from + whole * PAGE_SIZE].as_chunks().0) as u32;
                continue;
            }
            most -= 1;
            if linear && whole > 1 {
                let pages = data[from..from + whole * PAGE_SIZE].as_chunks().0;
                let begun = lane.queue_writes(ticket(id, at), page, pages) as u32;
                self.works[usize::from(id)].left += u32::from(begun > 0);
                at += begun;
                if begun > 0 {
                    continue;
                }
            }
            let bytes = &data[from..from + piece.len];
            let progress = match bytes.try_into() {
                Ok(bytes) => lane.write(ticket(id, at), page, bytes),
                Err(_) => lane.write_part(ticket(id, at), page, piece.within, bytes),
            };
            if !self.note(id, at, progress) {
                break;
            }
            at += 1;
        }
        at
    }

    /// Notes the progress of an operation on the page `at` of a request. Returns false if the lane
    /// had no room, so that the operation must be tried again.
    #[inline]
    fn note(&mut self, id: Id, at: u32, progress: Progress) -> bool {
        let work = &mut self.works[usize::from(id)];
        match progress {
            Progress::Done(Ok(())) => {}
            Progress::Done(Err(fault)) => self.fail(id, at, fault),
            Progress::Queued => work.left += 1,
            Progress::Full => {
                work.next = at;
                return false;
            }
        }
        true
    }

    #[inline]
    fn has_failed(&self, id: Id) -> bool {
        self.works[usize::from(id)].fault.is_some()
    }

    fn fail(&mut self, id: Id, at: u32, fault: Fault) {
        self.works[usize::from(id)].fault.get_or_insert((fault, at));
    }

    fn complete(&mut self, done: &Done<'_>, memory: &mut impl RequestMemory) {
        let (id, at) = ((done.ticket >> PAGE_BITS) as Id, done.ticket & PAGES_MAX);
        let reads = self.works[usize::from(id)].request.op == Op::Read;
        match (done.result, done.page) {
            (Err(fault), _) => self.fail(id, at, fault),
            (Ok(()), Some(page)) if reads => {
                memory.pages(id, at)[0] = *page;
                memory.filled(id, at, 1);
            }
            (Ok(()), None) if reads => self.fail(id, at, Fault::Lost),
            (Ok(()), _) => {}
        }
        self.one_less(id);
    }

    fn one_less(&mut self, id: Id) {
        let work = &mut self.works[usize::from(id)];
        work.left -= 1;
        if work.left > 0 {
            return;
        }
        let changed = !matches!(work.request.op, Op::Read | Op::Flush);
        if work.request.fua && changed && !work.flushing && work.fault.is_none() {
            (work.flushing, work.left) = (true, 1);
            self.waiting.push_back(id);
            return;
        }
        self.finished.push_back(id);
        self.unfinished -= 1;
    }
}

/// The ticket (the number that the lane returns with a completion) of the operation on the page at
/// index `at` of a request.
fn ticket(id: Id, at: u32) -> Ticket {
    Ticket::from(id) << PAGE_BITS | at
}
