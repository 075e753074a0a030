//! A session: one client's area, frames and requests.

use std::io;
use std::os::fd::OwnedFd;
use std::sync::Arc;
use std::sync::atomic::{Ordering, fence};

use rustix::event::EventfdFlags;
use rustix::io::Errno;
use weir_core::{PageBytes, PageNo, copy};
use weir_device::Fault;
use weir_lease::{Connection, Place, Table, Token, TokenRange};
use weir_request::{Answer, Id, Request, RequestMemory, Requests, Span};
use weir_share::wire::{Completed, DISCARD_MAX, Op, RUN_MAX, Spot, Submission};
use weir_share::{Area, Layout, Ring};
use weir_volume::{Guard, Lane, Loan, View, Volume};

use super::loans::{FRAMES, Loans};
use super::stats::{Stats, add};

/// Number of submissions that are taken from one client before the next client has its turn. A run
/// counts as many as it has pages.
const TURN: u32 = 64;
/// Numbers of submissions by which the thread looks ahead. At the first distance it prefetches a
/// page's entry in the page map, and at the second the page's record and first bytes.
const PLACE_AHEAD: u32 = 6;
const HEAD_AHEAD: u32 = 2;

/// The client violated the format, and is disconnected.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) struct Violation(pub &'static str);

/// The client and the frame of a request that the request engine has, or had.
#[derive(Clone, Copy, Debug, Default)]
pub(super) struct Asked {
    pub seat: usize,
    /// The session's number. A later session in the same seat has another number.
    pub session: u64,
    tag: u32,
    /// The first frame.
    frame: u32,
    /// Number of frames.
    count: u32,
    /// Whether the client already holds the frames. If so, a read hands out none.
    is_held: bool,
}

/// Memory for the copies of a run of pages.
pub(super) type Scratch = [PageBytes; RUN_MAX as usize];

/// The frames of requests, as the memory that the request engine works with. A client may change a
/// frame at any time, so the volume gets a copy.
pub(super) struct Frames<'a> {
    /// Finds the area of a request's session; `None` once the client has gone.
    pub area: &'a dyn Fn(&Asked) -> Option<&'a Area>,
    pub asked: &'a [Asked],
    pub scratch: &'a mut Scratch,
}

impl RequestMemory for Frames<'_> {
    fn fetch(&mut self, id: Id, at: u32) {
        let asked = &self.asked[usize::from(id)];
        if let Some(area) = (self.area)(asked) {
            for (at, page) in (at..asked.count).zip(&mut self.scratch[at as usize..]) {
                // SAFETY: the frame lies in this area, since its number came from the token table,
                // and frames are page-aligned. The client may write the frame meanwhile: then the
                // copy is a mixture of old and new bytes, which harms only the client. The copy is
                // what is stored.
                unsafe { copy::page_from_shared(page, area.frame(asked.frame + at).cast()) };
            }
        }
    }

    fn data(&self, id: Id) -> &[u8] {
        self.scratch[..self.asked[usize::from(id)].count as usize].as_flattened()
    }

    fn pages(&mut self, _id: Id, _at: u32) -> &mut [PageBytes] {
        &mut self.scratch[..]
    }

    fn filled(&mut self, id: Id, at: u32, count: u32) {
        let asked = &self.asked[usize::from(id)];
        if let Some(area) = (self.area)(asked) {
            for (page, bytes) in (at..at + count).zip(&*self.scratch) {
                fill(area, asked.frame + page, bytes);
            }
        }
    }
}

/// The state that all sessions share, on the server's thread.
pub(super) struct Desk {
    pub table: Table<Loans>,
    /// The clients' requests, by their numbers at the request engine.
    pub asked: Vec<Asked>,
    /// The request numbers that are free.
    pub idle: Vec<Id>,
    /// A copy of the pages of one request, between frames and the volume. The client may change its
    /// frames at any time, so the volume gets this copy.
    pub scratch: Box<Scratch>,
    /// The sessions that have ended while some of their requests were under way.
    pub left: Vec<Left>,
    /// Whether clients may only read.
    pub read_only: bool,
    pub stats: Arc<Stats>,
}

/// A session that has ended while some of its requests were under way at a store. This value keeps
/// the session's volume. Until a request has ended, it may look at the page map's entries of its
/// pages.
pub(super) struct Left {
    session: u64,
    /// Number of requests under way.
    requests: u32,
    _volume: Arc<Volume>,
}

impl Desk {
    /// Ends a request whose client has gone.
    pub fn end_of_left(&mut self, id: Id) {
        self.idle.push(id);
        let session = self.asked[usize::from(id)].session;
        if let Some(at) = self.left.iter().position(|left| left.session == session) {
            self.left[at].requests -= 1;
            if self.left[at].requests == 0 {
                self.left.swap_remove(at);
            }
        }
    }
}

/// The frames of a request.
#[derive(Clone, Copy, Default)]
struct Held {
    first: u32,
    /// Whether the client holds them already.
    is_held: bool,
}

/// Pages that a run of reads has found, to be lent together.
struct Found {
    len: usize,
    tags: [u32; TURN as usize],
    places: [Place; TURN as usize],
    spots: [Spot; TURN as usize],
    tokens: [Token; TURN as usize],
}

impl Found {
    fn new() -> Self {
        const LEN: usize = TURN as usize;
        Found {
            len: 0,
            tags: [0; LEN],
            places: [Place::page(FRAMES, 0); LEN],
            spots: [Spot::Nowhere; LEN],
            tokens: [Token(0); LEN],
        }
    }

    fn push(&mut self, tag: u32, place: Place, spot: Spot) {
        (self.tags[self.len], self.places[self.len], self.spots[self.len]) = (tag, place, spot);
        self.len += 1;
    }
}

/// A client that was accepted.
pub(super) struct Session {
    pub number: u64,
    seat: usize,
    area: Area,
    /// The eventfd that the client writes to wake the server. The server never reads it, since the
    /// client can change its flags so that a read blocks.
    pub server_bell: OwnedFd,
    connection: Connection,
    /// The page number of this area's first frame, in the token table's region of frames.
    base: u32,
    /// Whether the client got the windows, and so may read pages in place.
    in_place: bool,
    /// The client's volume, which neither shrinks nor goes while this session holds it.
    volume: Arc<Volume>,
    free: Vec<u32>,
    taken: u32,
    completed: u32,
    /// Number of completions that the server has announced to the client.
    published: u32,
    in_flight: u32,
    /// Whether the last look at the submissions could serve none of them, because the client left
    /// no room for completions, or the volume had no room.
    stalled: bool,
}

impl Session {
    pub(super) fn new(
        number: u64,
        seat: usize,
        base: u32,
        in_place: bool,
        layout: Layout,
        volume: Arc<Volume>,
        connection: Connection,
    ) -> Result<Self, (Connection, io::Error)> {
        let bell = || rustix::event::eventfd(0, EventfdFlags::CLOEXEC | EventfdFlags::NONBLOCK);
        let made = Area::create(layout).and_then(|area| Ok((area, bell()?)));
        let (area, server_bell) = match made {
            Ok(made) => made,
            Err(error) => return Err((connection, error)),
        };
        let free = (0..layout.frames()).rev().collect();
        Ok(Session {
            number,
            seat,
            area,
            server_bell,
            connection,
            base,
            in_place,
            volume,
            free,
            taken: 0,
            completed: 0,
            published: 0,
            in_flight: 0,
            stalled: false,
        })
    }

    pub(super) fn in_place(&self) -> bool {
        self.in_place
    }

    /// The size of the client's volume in pages.
    pub(super) fn pages(&self) -> u64 {
        self.volume.pages().into()
    }

    pub(super) fn area(&self) -> &Area {
        &self.area
    }

    /// Whether submissions wait.
    pub(super) fn has_work(&self) -> bool {
        self.area.written(Ring::Submissions).load(Ordering::Acquire) != self.taken
    }

    /// Whether the waiting submissions cannot be served now. No bell will say when they can, so the
    /// server must look again by itself.
    pub(super) fn is_stalled(&self) -> bool {
        self.stalled
    }

    /// Sets the flag that tells the client whether to ring after a submission.
    pub(super) fn set_asleep(&self, asleep: bool) {
        self.area.server_asleep().store(u32::from(asleep), Ordering::Relaxed);
    }

    /// Takes the client's submissions, at most as many as one turn allows. Returns how many it
    /// took.
    pub(super) fn serve(&mut self, requests: &mut Requests<Lane>, desk: &mut Desk) -> Result<u32, Violation> {
        let written = self.area.written(Ring::Submissions).load(Ordering::Acquire);
        self.stalled = false;
        if written == self.taken {
            return Ok(0);
        }
        let entries = self.area.layout().entries();
        let waiting = written.wrapping_sub(self.taken);
        if waiting > entries {
            return Err(Violation("more submissions than the ring has entries"));
        }
        let seen = self.area.read(Ring::Completions).load(Ordering::Acquire);
        let unread = self.completed.wrapping_sub(seen);
        if unread > entries {
            return Err(Violation("more completions seen than were written"));
        }
        let mut room = entries.saturating_sub(unread + self.in_flight);
        let first = self.taken;
        let end = first.wrapping_add(waiting.min(TURN));
        let mut pages = 0;
        while self.taken != end && pages < TURN {
            let entry = self.area.load(Ring::Submissions, self.taken);
            let submission = Submission::decode(entry).ok_or(Violation("an entry that is no submission"))?;
            pages += if submission.is_run() { submission.count.min(TURN) } else { 1 };
            if submission.op == Op::Give {
                self.give(desk, submission)?;
            } else if room == 0 {
                break;
            } else if let Some((_, page)) = self.page_asked(self.taken) {
                let done = self.read_run(requests.lane(), desk, end, room);
                room -= done;
                if done > 0 {
                    continue;
                }
                if !self.read(requests, desk, submission.tag, page) {
                    break;
                }
                room -= 1;
            } else if !self.request(requests, desk, submission) {
                break;
            } else {
                room -= 1;
            }
            self.taken = self.taken.wrapping_add(1);
        }
        self.area.read(Ring::Submissions).store(self.taken, Ordering::Release);
        self.stalled = self.taken == first;
        Ok(self.taken.wrapping_sub(first))
    }

    /// Does a request, or begins it. Returns false if the volume has no room now, so that the
    /// caller must try again later.
    fn request(&mut self, requests: &mut Requests<Lane>, desk: &mut Desk, submission: Submission) -> bool {
        let Submission { op, tag, page, token, count } = submission;
        let pages = if op == Op::Discard || submission.is_run() { count } else { 1 };
        let first = self.volume.page_in_pool(page, pages);
        match (op, first) {
            (Op::Write | Op::WriteRun | Op::Discard, _) if desk.read_only => {
                self.fail(tag, rustix::io::Errno::ROFS);
            }
            (Op::Write, Some(page)) => {
                let place = desk.table.place(&self.connection, Token(token));
                let Some(place) = place.filter(|place| place.region == FRAMES) else {
                    self.fail(tag, rustix::io::Errno::BADF);
                    return true;
                };
                let frames = Held { first: place.page - self.base, is_held: true };
                return self.begin(requests, desk, (weir_request::Op::Write, page, 1), (tag, frames));
            }
            (Op::ReadRun | Op::WriteRun, Some(page)) if (1..=RUN_MAX).contains(&count) => {
                let Some(frame) = self.frames_of(desk, token, count) else {
                    self.fail(tag, rustix::io::Errno::BADF);
                    return true;
                };
                let frames = Held { first: frame, is_held: true };
                if op == Op::WriteRun {
                    return self.begin(requests, desk, (weir_request::Op::Write, page, count), (tag, frames));
                }
                return self.fill_run(requests, desk, (page, count), (tag, frames));
            }
            (Op::Reserve, _) => match self.free.pop() {
                Some(frame) => self.hand_out_frame(desk, tag, frame),
                None => self.over_quota(desk, tag),
            },
            (Op::Discard, Some(page)) if count <= DISCARD_MAX => {
                return self.begin(
                    requests,
                    desk,
                    (weir_request::Op::Discard, page, count),
                    (tag, Held::default()),
                );
            }
            _ => self.fail(tag, rustix::io::Errno::INVAL),
        }
        true
    }

    /// Gives a request for pages to the request engine. Returns false if the engine has no room.
    fn begin(
        &mut self,
        requests: &mut Requests<Lane>,
        desk: &mut Desk,
        (op, page, count): (weir_request::Op, PageNo, u32),
        (tag, frames): (u32, Held),
    ) -> bool {
        let Some(id) = desk.idle.pop() else { return false };
        let Held { first: frame, is_held } = frames;
        desk.asked[usize::from(id)] =
            Asked { seat: self.seat, session: self.number, tag, frame, count, is_held };
        self.in_flight += 1;
        let span = Span::pages_from(page, count);
        let area = &self.area;
        let mut frames = Frames { area: &|_| Some(area), asked: &desk.asked, scratch: &mut desk.scratch };
        let request = Request { op, span, fua: false };
        if count > 1 {
            // Announce the whole run, since some stores choose their path by the size of a batch.
            requests.announce(std::iter::once((id, request)), &frames);
        }
        requests.begin(id, request, &mut frames);
        // Only this session's answers can come now, because each session has taken the answers to
        // its earlier requests.
        while let Some(answer) = requests.finished() {
            self.finish(desk, &answer);
        }
        true
    }

    /// Ends a request that the request engine has answered.
    pub(super) fn finish(&mut self, desk: &mut Desk, answer: &Answer) {
        let Asked { tag, frame, count, is_held, .. } = desk.asked[usize::from(answer.id)];
        desk.idle.push(answer.id);
        self.in_flight -= 1;
        let op = answer.request.op;
        match answer.result {
            Ok(()) if op == weir_request::Op::Read && !is_held => {
                add(&desk.stats.reads, 1);
                self.hand_out_frame(desk, tag, frame);
            }
            Ok(()) => {
                match op {
                    weir_request::Op::Read => add(&desk.stats.reads, count.into()),
                    weir_request::Op::Write => add(&desk.stats.writes, count.into()),
                    _ => {}
                }
                self.complete(tag, 0, 0, Spot::Nowhere);
            }
            Err(fault) => {
                if op == weir_request::Op::Read && !is_held {
                    self.free.push(frame);
                }
                add(&desk.stats.faults, 1);
                self.fail(tag, errno(fault));
            }
        }
    }

    /// The page that submission `number` asks for, if it asks for a page that exists.
    #[inline]
    fn page_asked(&self, number: u32) -> Option<(u32, PageNo)> {
        match Submission::decode(self.area.load(Ring::Submissions, number)) {
            Some(Submission { op: Op::Read, tag, page, .. }) => {
                Some((tag, self.volume.page_in_pool(page, 1)?))
            }
            _ => None,
        }
    }

    /// Serves reads from the next submission on, as long as their pages lie in host memory, and at
    /// most `room` of them. Returns the number served.
    fn read_run(&mut self, lane: &mut Lane, desk: &mut Desk, end: u32, room: u32) -> u32 {
        let guard = lane.pin();
        let mut found = Found::new();
        let (mut done, mut faults) = (0, 0);
        self.look_ahead(&guard, self.taken, HEAD_AHEAD.min(end.wrapping_sub(self.taken)));
        while done < room && self.taken != end {
            let Some((tag, page)) = self.page_asked(self.taken) else { break };
            let left = end.wrapping_sub(self.taken);
            if left > PLACE_AHEAD
                && let Some((_, page)) = self.page_asked(self.taken.wrapping_add(PLACE_AHEAD))
            {
                guard.prefetch_entry(page);
            }
            if left > HEAD_AHEAD {
                self.look_ahead(&guard, self.taken.wrapping_add(HEAD_AHEAD), 1);
            }
            let view = match desk.table.counts_mut().lender.as_mut().filter(|_| self.in_place) {
                Some(lender) => match guard.lend(page, lender) {
                    Loan::Lent { store, slot } => {
                        let window = desk.table.counts().window(store);
                        let spot = Spot::Window { window: u32::from(window) - 1, slot: slot.0 };
                        found.push(tag, Place::page(window, slot.0), spot);
                        self.taken = self.taken.wrapping_add(1);
                        done += 1;
                        continue;
                    }
                    Loan::Shown(view) => view,
                },
                None => guard.view(page),
            };
            match view {
                View::Elsewhere => break,
                View::Fault(fault) => {
                    faults += 1;
                    self.fail(tag, errno(fault));
                }
                View::Bytes(_) | View::Fill(_) => match (self.free.pop(), view) {
                    (None, _) => self.over_quota(desk, tag),
                    (Some(frame), View::Fill(value)) => {
                        fill_with(&self.area, frame, value, &mut desk.scratch[0]);
                        found.push(tag, Place::page(FRAMES, self.base + frame), Spot::Frame(frame));
                    }
                    (Some(frame), View::Bytes(bytes)) => {
                        fill(&self.area, frame, bytes);
                        found.push(tag, Place::page(FRAMES, self.base + frame), Spot::Frame(frame));
                    }
                    (Some(frame), _) => self.free.push(frame),
                },
            }
            self.taken = self.taken.wrapping_add(1);
            done += 1;
        }
        guard.count_reads(found.len as u64 + faults, faults);
        drop(guard);
        add(&desk.stats.faults, faults);
        add(&desk.stats.reads, found.len as u64);
        self.hand_out(desk, &mut found);
        done
    }

    /// The first frame of a run, if the client holds all of its frames, and they lie one after
    /// another in the area.
    fn frames_of(&self, desk: &Desk, token: u32, count: u32) -> Option<u32> {
        let frame = |at: u32| {
            let place = desk.table.place(&self.connection, Token(token.wrapping_add(at)))?;
            (place.region == FRAMES).then(|| place.page - self.base)
        };
        let first = frame(0)?;
        (1..count).all(|at| frame(at) == Some(first + at)).then_some(first)
    }

    /// Reads a run of pages into frames that the client holds. Pages in host memory are copied from
    /// where they lie. Returns false if the engine has no room for the others.
    fn fill_run(
        &mut self,
        requests: &mut Requests<Lane>,
        desk: &mut Desk,
        (page, count): (PageNo, u32),
        (tag, frames): (u32, Held),
    ) -> bool {
        let guard = requests.lane().pin();
        let (mut done, mut fault) = (0, None);
        for ahead in 0..HEAD_AHEAD.min(count) {
            guard.prefetch_head(PageNo(page.0 + ahead));
        }
        while done < count && fault.is_none() {
            if count - done > PLACE_AHEAD {
                guard.prefetch_entry(PageNo(page.0 + done + PLACE_AHEAD));
            }
            if count - done > HEAD_AHEAD {
                guard.prefetch_head(PageNo(page.0 + done + HEAD_AHEAD));
            }
            match guard.view(PageNo(page.0 + done)) {
                View::Elsewhere => break,
                View::Fault(found) => fault = Some(found),
                View::Fill(value) => fill_with(&self.area, frames.first + done, value, &mut desk.scratch[0]),
                View::Bytes(bytes) => fill(&self.area, frames.first + done, bytes),
            }
            done += u32::from(fault.is_none());
        }
        // A run that the engine has no room for is tried again, from its first page on.
        if fault.is_none() && done < count && desk.idle.is_empty() {
            return false;
        }
        guard.count_reads(u64::from(done) + u64::from(fault.is_some()), fault.is_some().into());
        drop(guard);
        add(&desk.stats.reads, done.into());
        match fault {
            Some(fault) => {
                add(&desk.stats.faults, 1);
                self.fail(tag, errno(fault));
            }
            None if done == count => self.complete(tag, 0, 0, Spot::Nowhere),
            None => {
                let rest = (weir_request::Op::Read, PageNo(page.0 + done), count - done);
                let frames = Held { first: frames.first + done, ..frames };
                return self.begin(requests, desk, rest, (tag, frames));
            }
        }
        true
    }

    #[inline]
    fn look_ahead(&self, guard: &Guard<'_>, from: u32, count: u32) {
        for ahead in 0..count {
            if let Some((_, page)) = self.page_asked(from.wrapping_add(ahead)) {
                guard.prefetch_head(page);
            }
        }
    }

    /// Reads a page that does not lie in host memory.
    fn read(&mut self, requests: &mut Requests<Lane>, desk: &mut Desk, tag: u32, page: PageNo) -> bool {
        let Some(frame) = self.free.pop() else {
            self.over_quota(desk, tag);
            return true;
        };
        let frames = Held { first: frame, is_held: false };
        let begun = self.begin(requests, desk, (weir_request::Op::Read, page, 1), (tag, frames));
        if !begun {
            self.free.push(frame);
        }
        begun
    }

    /// Lends the found pages to the client.
    fn hand_out(&mut self, desk: &mut Desk, found: &mut Found) {
        let Found { len, tags, places, spots, tokens } = found;
        let len = *len;
        let taken = match len {
            0 => 0,
            _ => desk.table.take_batch(&self.connection, &places[..len], &mut tokens[..len]).unwrap_or(0),
        };
        add(&desk.stats.taken, taken as u64);
        for at in 0..taken {
            add(&desk.stats.in_place, u64::from(matches!(spots[at], Spot::Window { .. })));
            self.complete(tags[at], 0, tokens[at].0, spots[at]);
        }
        // The client has reached its quota of pages.
        for at in taken..len {
            match spots[at] {
                Spot::Frame(frame) => self.free.push(frame),
                _ => desk.table.counts_mut().never_lent(places[at]),
            }
            self.over_quota(desk, tags[at]);
        }
    }

    /// Lends a free frame to the client.
    fn hand_out_frame(&mut self, desk: &mut Desk, tag: u32, frame: u32) {
        let mut found = Found::new();
        found.push(tag, Place::page(FRAMES, self.base + frame), Spot::Frame(frame));
        self.hand_out(desk, &mut found);
    }

    fn over_quota(&mut self, desk: &mut Desk, tag: u32) {
        add(&desk.stats.over_quota, 1);
        self.fail(tag, rustix::io::Errno::NOBUFS);
    }

    fn give(&mut self, desk: &mut Desk, submission: Submission) -> Result<(), Violation> {
        let range = TokenRange { start: Token(submission.token), count: submission.count };
        let (free, base, stats) = (&mut self.free, self.base, &desk.stats);
        let frames = self.area.layout().frames() as usize;
        let returned = desk.table.give_batch(&self.connection, &[range], |place, last| {
            if place.region == FRAMES {
                if !last || free.len() == frames {
                    add(&stats.double_frees, 1);
                } else {
                    free.push(place.page - base);
                }
            }
        });
        let returned = returned.map_err(|_| Violation("more tokens in one return than a batch has"))?;
        add(&stats.given, returned.references.into());
        add(&stats.refused, returned.refused.into());
        Ok(())
    }

    /// Gives up a session that has not begun. Returns its connection to the token table.
    pub(super) fn leave(self) -> Connection {
        self.connection
    }

    /// Ends a session, and takes back all pages that the client holds.
    pub(super) fn close(self, desk: &mut Desk) {
        let held = desk.table.close(self.connection, |place, last| {
            if place.region == FRAMES && !last {
                add(&desk.stats.double_frees, 1);
            }
        });
        add(&desk.stats.reclaimed, held.into());
        add(&desk.stats.sessions_ended, 1);
        if self.in_flight > 0 {
            desk.left.push(Left { session: self.number, requests: self.in_flight, _volume: self.volume });
        }
    }

    fn fail(&mut self, tag: u32, errno: Errno) {
        self.complete(tag, -errno.raw_os_error(), 0, Spot::Nowhere);
    }

    #[inline]
    fn complete(&mut self, tag: u32, status: i32, token: u32, spot: Spot) {
        let completed = Completed { tag, status, token, spot };
        self.area.store(Ring::Completions, self.completed, completed.encode());
        self.completed = self.completed.wrapping_add(1);
    }

    /// Announces the new completions to the client.
    pub(super) fn publish(&mut self, socket: &OwnedFd) {
        if self.published == self.completed {
            return;
        }
        self.published = self.completed;
        self.area.written(Ring::Completions).store(self.completed, Ordering::Release);
        // The client first notes that it sleeps, and then looks at the ring. The server first
        // writes the ring, and then looks whether the client sleeps. So at least one of the two
        // notices the other.
        fence(Ordering::SeqCst);
        if self.area.client_asleep().load(Ordering::Relaxed) != 0 {
            self.area.client_asleep().store(0, Ordering::Relaxed);
            weir_share::ring(socket);
        }
    }
}

/// The errno of a fault for a client. A client may ask again after ETIMEDOUT: the store has not
/// answered in time, and nothing is known to be lost.
fn errno(fault: Fault) -> Errno {
    match fault {
        Fault::Timeout | Fault::Io(libc::ETIMEDOUT) => Errno::TIMEDOUT,
        fault => weir_request::errno(fault),
    }
}

fn fill(area: &Area, frame: u32, bytes: &PageBytes) {
    // SAFETY: the frame is free or being filled, so only a client that breaks the rules accesses
    // it, and the copy tolerates a race.
    unsafe { copy::page_to_shared(area.frame(frame).cast(), bytes) };
}

fn fill_with(area: &Area, frame: u32, value: u32, scratch: &mut PageBytes) {
    for word in scratch.chunks_exact_mut(size_of::<u32>()) {
        word.copy_from_slice(&value.to_ne_bytes());
    }
    fill(area, frame, scratch);
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_client_can_tell_a_store_that_is_late_from_a_page_that_is_lost() {
        for fault in [Fault::Timeout, Fault::Io(libc::ETIMEDOUT)] {
            assert_eq!(errno(fault), Errno::TIMEDOUT);
        }
        for fault in [Fault::Lost, Fault::Corrupt, Fault::Io(libc::ENXIO)] {
            assert_eq!(errno(fault), Errno::IO);
        }
        assert_eq!(errno(Fault::Full), Errno::NOSPC);
    }
}
