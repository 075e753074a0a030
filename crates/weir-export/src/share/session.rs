//! One client: its area, its frames, its requests.

use std::io;
use std::os::fd::OwnedFd;
use std::sync::Arc;
use std::sync::atomic::{Ordering, fence};

use rustix::event::EventfdFlags;
use weir_core::{PAGE_SIZE, PageBytes, PageNo};
use weir_lease::{Connection, OwnedCounts, Place, Table, Token, TokenRange};
use weir_share::wire::{Completed, DISCARD_MAX, NO_FRAME, Op, Submission};
use weir_share::{Area, Layout, Ring};
use weir_store::Progress;
use weir_volume::{Lane, View};

use super::stats::{Stats, add};

/// Submissions taken from one client before the next one's turn.
const TURN: u32 = 64;

/// The client broke the format, and is cut off.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) struct Violation(pub &'static str);

/// A request that waits for a slow store.
#[derive(Clone, Copy, Debug)]
pub(super) struct Pending {
    pub seat: usize,
    /// Tells the session from a later one in its seat.
    pub session: u64,
    tag: u32,
    /// Where the page goes; [`NO_FRAME`] for a write.
    frame: u32,
}

/// What all sessions share, on the server's thread.
pub(super) struct Desk {
    pub table: Table<OwnedCounts>,
    /// By ticket, what waits for the volume.
    pub pending: Vec<Option<Pending>>,
    pub free_tickets: Vec<u32>,
    /// Between a frame, which the client may change at any time, and the volume.
    pub scratch: Box<PageBytes>,
    pub pages: u64,
    pub stats: Arc<Stats>,
}

/// A client that has been let in.
pub(super) struct Session {
    pub number: u64,
    seat: usize,
    area: Area,
    pub server_bell: OwnedFd,
    pub client_bell: OwnedFd,
    connection: Connection,
    /// The first page of the table's region that stands for a frame of this area.
    base: u32,
    free: Vec<u32>,
    taken: u32,
    completed: u32,
    in_flight: u32,
}

impl Session {
    pub(super) fn new(
        number: u64,
        seat: usize,
        base: u32,
        layout: Layout,
        connection: Connection,
    ) -> Result<Self, (Connection, io::Error)> {
        let bell = || rustix::event::eventfd(0, EventfdFlags::CLOEXEC | EventfdFlags::NONBLOCK);
        let made = Area::create(layout).and_then(|area| Ok((area, bell()?, bell()?)));
        let (area, server_bell, client_bell) = match made {
            Ok(made) => made,
            Err(error) => return Err((connection, error)),
        };
        let free = (0..layout.frames()).rev().collect();
        Ok(Session {
            number,
            seat,
            area,
            server_bell,
            client_bell,
            connection,
            base,
            free,
            taken: 0,
            completed: 0,
            in_flight: 0,
        })
    }

    pub(super) fn area(&self) -> &Area {
        &self.area
    }

    /// Whether submissions wait.
    pub(super) fn has_work(&self) -> bool {
        self.area.written(Ring::Submissions).load(Ordering::Acquire) != self.taken
    }

    /// Says whether the client has to ring before it is looked at again.
    pub(super) fn set_asleep(&self, asleep: bool) {
        self.area.server_asleep().store(u32::from(asleep), Ordering::Relaxed);
    }

    /// Takes what the client has submitted, a turn's worth of it, and says how many requests that were.
    pub(super) fn serve(&mut self, lane: &mut Lane, desk: &mut Desk) -> Result<u32, Violation> {
        let written = self.area.written(Ring::Submissions).load(Ordering::Acquire);
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
        while self.taken.wrapping_sub(first) < waiting.min(TURN) {
            let entry = self.area.load(Ring::Submissions, self.taken);
            let submission = Submission::decode(entry).ok_or(Violation("an entry that is no submission"))?;
            if submission.op == Op::Give {
                self.give(desk, submission)?;
            } else if room == 0 || !self.request(lane, desk, submission) {
                break;
            } else {
                room -= 1;
            }
            self.taken = self.taken.wrapping_add(1);
        }
        self.area.read(Ring::Submissions).store(self.taken, Ordering::Release);
        self.publish();
        Ok(self.taken.wrapping_sub(first))
    }

    /// Does what is asked, or begins it. `false`: the volume has no room now, ask again later.
    fn request(&mut self, lane: &mut Lane, desk: &mut Desk, submission: Submission) -> bool {
        let Submission { op, tag, page, token, count } = submission;
        let number = PageNo(page as u32);
        match op {
            Op::Read if page < desk.pages => return self.read(lane, desk, tag, number),
            Op::Write if page < desk.pages => return self.write(lane, desk, tag, number, Token(token)),
            Op::Reserve => match self.free.pop() {
                Some(frame) => self.hand_out(desk, tag, frame),
                None => self.over_quota(desk, tag),
            },
            Op::Discard if count <= DISCARD_MAX && page.saturating_add(count.into()) <= desk.pages => {
                lane.discard(number, count);
                self.complete(tag, 0, 0, NO_FRAME);
            }
            _ => self.fail(tag, rustix::io::Errno::INVAL),
        }
        true
    }

    fn read(&mut self, lane: &mut Lane, desk: &mut Desk, tag: u32, page: PageNo) -> bool {
        let Some(frame) = self.free.pop() else {
            self.over_quota(desk, tag);
            return true;
        };
        let guard = lane.pin();
        let result = match guard.view(page) {
            View::Bytes(bytes) => {
                fill(&self.area, frame, bytes);
                Some(Ok(()))
            }
            View::Fill(value) => {
                fill_with(&self.area, frame, value);
                Some(Ok(()))
            }
            View::Fault(fault) => Some(Err(fault)),
            View::Elsewhere => None,
        };
        if let Some(result) = result {
            guard.count_reads(1, u64::from(result.is_err()));
        }
        drop(guard);
        let result = match result {
            Some(result) => result,
            None => {
                let Some(ticket) = desk.free_tickets.pop() else {
                    self.free.push(frame);
                    return false;
                };
                match lane.read(ticket, page, &mut desk.scratch) {
                    Progress::Done(result) => {
                        desk.free_tickets.push(ticket);
                        if result.is_ok() {
                            fill(&self.area, frame, &desk.scratch);
                        }
                        result
                    }
                    Progress::Queued => {
                        self.begin(desk, ticket, tag, frame);
                        return true;
                    }
                    Progress::Full => {
                        desk.free_tickets.push(ticket);
                        self.free.push(frame);
                        return false;
                    }
                }
            }
        };
        self.end_read(desk, tag, frame, result.is_ok());
        true
    }

    fn end_read(&mut self, desk: &mut Desk, tag: u32, frame: u32, fine: bool) {
        if fine {
            add(&desk.stats.reads, 1);
            self.hand_out(desk, tag, frame);
        } else {
            self.free.push(frame);
            add(&desk.stats.faults, 1);
            self.fail(tag, rustix::io::Errno::IO);
        }
    }

    fn write(&mut self, lane: &mut Lane, desk: &mut Desk, tag: u32, page: PageNo, token: Token) -> bool {
        let Some(place) = desk.table.place(&self.connection, token) else {
            self.fail(tag, rustix::io::Errno::BADF);
            return true;
        };
        let Some(ticket) = desk.free_tickets.pop() else { return false };
        let scratch: *mut PageBytes = &raw mut *desk.scratch;
        // SAFETY: the frame lies in this area, as its place came from the table. The client may write it meanwhile: then
        // the copy is any mixture of its bytes, which is its own loss, and the copy is what is stored and checksummed.
        unsafe { std::ptr::copy_nonoverlapping(self.area.frame(place.page - self.base), scratch, 1) };
        match lane.write(ticket, page, &desk.scratch) {
            Progress::Done(result) => {
                desk.free_tickets.push(ticket);
                self.end_write(desk, tag, result.is_ok());
            }
            Progress::Queued => self.begin(desk, ticket, tag, NO_FRAME),
            Progress::Full => {
                desk.free_tickets.push(ticket);
                return false;
            }
        }
        true
    }

    fn end_write(&mut self, desk: &mut Desk, tag: u32, fine: bool) {
        if fine {
            add(&desk.stats.writes, 1);
            self.complete(tag, 0, 0, NO_FRAME);
        } else {
            add(&desk.stats.faults, 1);
            self.fail(tag, rustix::io::Errno::IO);
        }
    }

    fn begin(&mut self, desk: &mut Desk, ticket: u32, tag: u32, frame: u32) {
        desk.pending[ticket as usize] = Some(Pending { seat: self.seat, session: self.number, tag, frame });
        self.in_flight += 1;
    }

    /// Ends a request that waited for a slow store.
    pub(super) fn finish(&mut self, desk: &mut Desk, pending: Pending, fine: bool, page: Option<&PageBytes>) {
        self.in_flight -= 1;
        if pending.frame == NO_FRAME {
            self.end_write(desk, pending.tag, fine);
        } else {
            if let Some(page) = page {
                fill(&self.area, pending.frame, page);
            }
            self.end_read(desk, pending.tag, pending.frame, fine && page.is_some());
        }
        self.publish();
    }

    /// Lends a frame that is free to the client.
    fn hand_out(&mut self, desk: &mut Desk, tag: u32, frame: u32) {
        match desk.table.take(&self.connection, Place::page(0, self.base + frame)) {
            Ok(token) => {
                add(&desk.stats.taken, 1);
                self.complete(tag, 0, token.0, frame);
            }
            Err(_) => {
                self.free.push(frame);
                self.over_quota(desk, tag);
            }
        }
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
            if !last || free.len() == frames {
                add(&stats.double_frees, 1);
            } else {
                free.push(place.page - base);
            }
        });
        let returned = returned.map_err(|_| Violation("more tokens in one return than a batch has"))?;
        add(&stats.given, returned.references.into());
        add(&stats.refused, returned.refused.into());
        Ok(())
    }

    /// Ends a session that never began.
    pub(super) fn leave(self) -> Connection {
        self.connection
    }

    /// Takes back all that the client holds.
    pub(super) fn close(self, desk: &mut Desk) {
        let held = desk.table.close(self.connection, |_, last| {
            if !last {
                add(&desk.stats.double_frees, 1);
            }
        });
        add(&desk.stats.reclaimed, held.into());
        add(&desk.stats.sessions_ended, 1);
    }

    fn fail(&mut self, tag: u32, errno: rustix::io::Errno) {
        self.complete(tag, -errno.raw_os_error(), 0, NO_FRAME);
    }

    fn complete(&mut self, tag: u32, status: i32, token: u32, frame: u32) {
        let completed = Completed { tag, status, token, frame };
        self.area.store(Ring::Completions, self.completed, completed.encode());
        self.completed = self.completed.wrapping_add(1);
    }

    /// Tells the client of its completions.
    fn publish(&self) {
        self.area.written(Ring::Completions).store(self.completed, Ordering::Release);
        // The client looks at the ring after it has said that it sleeps: one of the two sees the other.
        fence(Ordering::SeqCst);
        if self.area.client_asleep().load(Ordering::Relaxed) != 0 {
            self.area.client_asleep().store(0, Ordering::Relaxed);
            // Full already if the client never reads it: then it is awake, or does not want to be.
            let _ = rustix::io::write(&self.client_bell, &1u64.to_ne_bytes());
        }
    }
}

fn fill(area: &Area, frame: u32, bytes: &PageBytes) {
    // SAFETY: the frame is free or being filled, so only a client that breaks the rules looks at it, and it sees bytes.
    unsafe { std::ptr::copy_nonoverlapping(bytes, area.frame(frame), 1) };
}

fn fill_with(area: &Area, frame: u32, value: u32) {
    let words: *mut u32 = area.frame(frame).cast();
    for word in 0..PAGE_SIZE / size_of::<u32>() {
        // SAFETY: as in `fill`; a frame is page-aligned and has this many words.
        unsafe { words.add(word).write(value) };
    }
}
