//! The write-back: writes dirty pages home in address order, so that the home's lane can join
//! neighbours. A home that is a log gets whole segments of pages at a time.
//!
//! [`WriteBack::step`] does a bounded piece of work and says what it needs next. There are three
//! reasons for work:
//!
//! - A set has no frame that could be given to another page. The set's dirty pages go home first.
//! - A flush is asked for, or all pages must go home. Then the write-back goes through all pages
//!   once, from the first on.
//! - More frames are dirty than the upper watermark. Then the write-back goes on from where it
//!   stopped, until the lower watermark is reached.
//!
//! A sweep for the watermark begins where the last one stopped, and goes round through all pages.
//! It prefers pages that were not used again, since a page that is often written would go home
//! often. Each sweep takes one counted use from the pages that it leaves in the cache. So a page
//! that is not used for a few sweeps goes home too. If such pages are not enough, a sweep takes all
//! pages.
//!
//! A page whose write fails stays dirty in the cache, where lanes can read it. A sweep for the
//! watermark tries again after a second at the earliest. A flush fails if one of its own writes
//! does. A home that has failed to flush may have lost earlier writes, so no later flush succeeds.

use crate::directory::{Directory, Frame, Outcome, WAYS};
use crate::entry::{Entry, Kind};
use crate::{Cache, CacheError};
use rustix::event::{PollFd, PollFlags, Timespec};
use std::os::fd::BorrowedFd;
use std::sync::Arc;
use std::sync::atomic::Ordering::{Relaxed, SeqCst};
use std::time::{Duration, Instant};
use weir_core::{Page, PageNo, Rest, Slot};
use weir_device::{Fault, POLL_EVERY, Progress, Ticket};
use weir_store::Lane as HomeLane;
use weir_volume::Lane as FrameLane;

/// Largest number of pages in a [`Group`]: 4 MiB. The write-back reads and writes them together.
const GROUP: usize = 1024;
/// Number of groups. While the home writes one of them, the next one is read from its frames.
const GROUPS: usize = 2;
/// Largest number of pages that one search through the directory finds. In unit tests it is small,
/// so that a sweep has several batches.
const BATCH: usize = if cfg!(test) { 2 << 10 } else { 16 << 10 };
/// Number of frames that one step looks at. In unit tests it is small, so that a look takes several
/// steps.
const LOOK: u32 = if cfg!(test) { 64 } else { 1 << 18 };
/// Time for which the write-back leaves pages alone whose write failed.
const AGAIN: Duration = Duration::from_secs(1);
/// The ticket of the home's flush. Any other ticket is the number of a group times [`GROUP`], plus
/// an index in [`Group::members`].
const FLUSH: Ticket = Ticket::MAX;

/// The event that the write-back needs before its next step.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Next {
    /// The next step can follow at once.
    Step,
    /// Before the next step, the home or the cache's store must answer an operation.
    Answers,
    /// The write-back waits for work, or for this time.
    Work(Option<Instant>),
}

/// Writes dirty pages home. Each cache has one.
pub struct WriteBack {
    cache: Arc<Cache>,
    frames: FrameLane,
    home: Box<dyn HomeLane>,
    /// The dirty pages that go home next, in address order.
    batch: Vec<(PageNo, Frame)>,
    at: usize,
    /// Whether the last search found more pages than a batch has room for.
    more: bool,
    /// Dirty pages of sets without a free frame. They are written before the batch.
    urgent: Vec<(PageNo, Frame)>,
    /// Whether the last group was of urgent pages alone.
    was_urgent: bool,
    groups: [Group; GROUPS],
    /// The group that was begun last. The home has all pages of the others.
    current: usize,
    sweep: Option<Sweep>,
    /// The page number at which the next sweep for the watermark begins.
    cursor: u32,
    /// Number of timed-out writes whose end the home has not reported.
    late: u32,
    /// Whether the next sweep for the watermark also takes pages that were used again since they
    /// were cached.
    takes_hot: bool,
    /// Whether the last search found no dirty page that could be written home.
    found_nobody: bool,
    /// The time until which pages whose write failed are left alone.
    again_at: Option<Instant>,
    /// Whether the home has failed to flush.
    is_broken: bool,
    rest: Rest,
}

/// The pages that the write-back moves together from their frames to the home.
struct Group {
    pages: Box<[Page]>,
    members: Vec<Member>,
    /// The pages are read and written in order. `read` is the number of pages whose read has begun;
    /// `written` counts those whose write has begun or is skipped.
    read: usize,
    written: usize,
    /// Number of operations on these pages that have no answer yet.
    waits: usize,
    /// The run of neighbouring pages that is being written: the page after its end, and its number
    /// of pages.
    row: (u32, u64),
}

#[derive(Clone, Copy)]
struct Member {
    page: PageNo,
    frame: Frame,
    state: MemberState,
}

#[derive(Clone, Copy, PartialEq, Eq)]
enum MemberState {
    /// The page's content is being read from its frame.
    Reads,
    /// The page's content is in the memory of the [`Group`].
    Ready,
    /// The page's write to the home is under way.
    Writes,
    /// The write-back has ended for this page, with success or with an error.
    Done,
}

/// A sweep through all dirty pages.
#[derive(Clone, Copy)]
struct Sweep {
    /// The page at which the sweep begins. The sweep goes on to the last page, and then from page 0
    /// to the page before this one.
    start: u32,
    /// The sweep still looks for pages that are at least this number of pages behind `start`.
    from: u32,
    /// The next frame that the sweep looks at.
    look: Frame,
    looked: bool,
    /// The reason for the sweep.
    reason: Reason,
    /// Whether the sweep only looks for pages to write together with the urgent ones. Any other
    /// sweep for the watermark takes one counted use from the pages that it leaves in the cache.
    is_company: bool,
    failed: bool,
    /// Whether a page was skipped because another user had its frame exclusively.
    skipped: bool,
    /// Whether the home's flush for this sweep is under way.
    flushing: bool,
}

impl Sweep {
    /// The number of pages that `page` is behind the first page of the sweep.
    fn behind(self, page: PageNo) -> u32 {
        page.0.wrapping_sub(self.start)
    }
}

#[derive(Clone, Copy, PartialEq, Eq)]
enum Reason {
    /// The sweep serves all flushes up to this number.
    Flush(u64),
    /// The sweep goes on until fewer frames are dirty than the lower watermark.
    Watermark,
}

impl WriteBack {
    /// Opens the write-back of a cache. Takes all memory that it will need.
    ///
    /// # Errors
    /// Fails when the cache's volume or the home gives no lane.
    pub fn open(cache: &Arc<Cache>) -> Result<Self, CacheError> {
        Ok(WriteBack {
            frames: cache.frames.lane()?,
            home: cache.home.lane(GROUPS * GROUP)?,
            cache: Arc::clone(cache),
            batch: Vec::with_capacity(BATCH * 2),
            at: 0,
            more: false,
            urgent: Vec::with_capacity(WAYS as usize * 4),
            was_urgent: false,
            groups: std::array::from_fn(|_| Group {
                pages: vec![Page::zeroed(); GROUP].into(),
                members: Vec::with_capacity(GROUP),
                read: 0,
                written: 0,
                waits: 0,
                row: (0, 0),
            }),
            current: 0,
            sweep: None,
            cursor: 0,
            late: 0,
            takes_hot: false,
            found_nobody: false,
            again_at: None,
            is_broken: false,
            rest: Rest::default(),
        })
    }

    /// Does one bounded piece of work. Returns what the write-back needs before the next one.
    pub fn step(&mut self, now: Instant) -> Next {
        self.take_answers(now);
        self.go_on();
        self.groups.iter_mut().filter(|group| group.is_over()).for_each(Group::clear);
        if !self.groups[self.current].is_at_home() || self.groups.iter().all(|group| !group.is_idle()) {
            return Next::Answers;
        }
        if self.sweep.is_some_and(|sweep| sweep.flushing) {
            return Next::Answers;
        }
        // A flush comes before all else. A page that is on its way home may have been written again
        // since. So a flush's sweep begins once all pages before it are there.
        match (self.sweep, self.flush_wanted()) {
            (None, Some(wanted)) if self.is_idle() => {
                return self.begin_sweep(Reason::Flush(wanted), 0, false);
            }
            (None, Some(_)) => return Next::Answers,
            (Some(sweep @ Sweep { reason: Reason::Watermark, .. }), Some(_)) => {
                let next = self.batch.get(self.at).filter(|_| sweep.looked).map(|(page, _)| page.0);
                self.stop_watermark(next.unwrap_or(sweep.start.wrapping_add(sweep.from)), now);
                return Next::Step;
            }
            (Some(sweep @ Sweep { reason: Reason::Flush(_), looked: true, .. }), _)
                if self.at == self.batch.len() =>
            {
                return self.look(sweep, now);
            }
            (Some(sweep @ Sweep { looked: false, .. }), _) if self.is_turn_of_flush() => {
                return self.look(sweep, now);
            }
            _ => {}
        }
        self.find_urgent();
        // A batch is in address order only once the sweep has looked at the whole directory.
        let is_sorted = self.sweep.is_none_or(|sweep| sweep.looked);
        let begins = self.batch.get(self.at).filter(|_| is_sorted).map(|(page, _)| page.0);
        if let (Some(page), true, true) = (begins, self.urgent.is_empty(), self.has_done_enough()) {
            self.stop_watermark(page, now);
            return Next::Step;
        }
        let is_watermark = self.sweep.is_some_and(|sweep| sweep.reason == Reason::Watermark);
        if is_watermark && is_sorted && begins.is_none() && !self.more && !self.urgent.is_empty() {
            // This sweep has looked at every frame, and its pages are written. End it, so that the
            // next sweep can look for neighbours of the urgent pages. They are then written
            // together.
            self.end_watermark(None, now);
        }
        if (!self.urgent.is_empty() || begins.is_some()) && !self.wants_company(begins.is_some()) {
            self.begin_group(is_sorted);
            return Next::Step;
        }
        match self.sweep {
            Some(sweep) => self.look(sweep, now),
            None if !self.urgent.is_empty() => self.begin_sweep(Reason::Watermark, self.cursor, true),
            None => self.choose(now),
        }
    }

    /// Whether a flush goes on before urgent pages do. Those may come without end, so a flush has
    /// every second turn.
    fn is_turn_of_flush(&self) -> bool {
        self.was_urgent && self.sweep.is_some_and(|sweep| matches!(sweep.reason, Reason::Flush(_)))
    }

    /// Whether no group is under way.
    fn is_idle(&self) -> bool {
        self.groups.iter().all(Group::is_idle)
    }

    /// Number of dirty pages that are not on their way home.
    fn dirty(&self) -> u32 {
        let under_way = self.groups.iter().map(|group| group.waits as u32).sum();
        self.directory().dirty().saturating_sub(under_way)
    }

    /// Whether to search for more pages before the urgent ones are written. The search is worth its
    /// time if the urgent pages are fewer than the home best writes in a row. The search must also
    /// have a chance to find more pages.
    fn wants_company(&self, has_some: bool) -> bool {
        let Some((first, _)) = self.home.best_runs() else { return false };
        !self.urgent.is_empty()
            && self.urgent.len() < first
            && !has_some
            && !self.found_nobody
            && self.dirty() > first as u32
            && self.flush_wanted().is_none()
    }

    /// Sleeps until the event that the last step needs, or until `also` is readable. No other
    /// function of the write-back sleeps.
    pub fn wait(&mut self, next: Next, also: BorrowedFd<'_>, now: Instant) {
        let until = match next {
            Next::Step => return,
            // A home without a descriptor announces no answers, so the thread must poll.
            Next::Answers if self.home.wake_fd().is_none() || self.frames.must_poll() => {
                return self.rest.until_next();
            }
            Next::Answers => Some(POLL_EVERY),
            Next::Work(until) => {
                self.cache.asleep.store(true, SeqCst);
                // A lane that made work before `asleep` was set believed the thread awake, and did
                // not wake it. So look for work once more.
                if self.has_work(now) {
                    return;
                }
                until.map(|until| until.saturating_duration_since(now))
            }
        };
        let listen = |fd| PollFd::from_borrowed_fd(fd, PollFlags::IN);
        let bell = self.cache.bell();
        let mut fds = vec![listen(also), listen(bell)];
        if next == Next::Answers {
            fds.remove(1);
            fds.extend(self.wakes().map(listen));
        }
        let until =
            until.map(|most| Timespec { tv_sec: most.as_secs() as i64, tv_nsec: most.subsec_nanos().into() });
        // An error is ignored: a signal only makes the sleep shorter.
        let _ = rustix::event::poll(&mut fds, until.as_ref());
        let _ = rustix::io::read(bell, &mut [0; 8]);
    }

    fn wakes(&self) -> impl Iterator<Item = BorrowedFd<'_>> {
        self.home.wake_fd().into_iter().chain(self.frames.wake_fds())
    }

    fn directory(&self) -> &Directory {
        &self.cache.directory
    }

    fn flush_wanted(&self) -> Option<u64> {
        let wanted = self.cache.flush_wanted.load(SeqCst);
        (wanted > self.cache.flush_done.load(SeqCst) / 2).then_some(wanted)
    }

    fn wants_less_dirt(&self, now: Instant) -> bool {
        let most = if self.cache.must_clean() { 0 } else { self.cache.share(self.cache.config.dirty_high) };
        self.dirty() > most && self.again_at.is_none_or(|at| now >= at)
    }

    /// Whether a sweep for the watermark has reached the lower watermark.
    fn has_done_enough(&self) -> bool {
        if !self.urgent.is_empty() && self.sweep.is_some_and(|sweep| sweep.is_company) {
            return false;
        }
        let config = &self.cache.config;
        // A sweep of pages that are often used stops at the upper watermark, because such pages
        // soon become dirty again.
        let least = if self.takes_hot { config.dirty_high } else { config.dirty_low };
        let least = if self.cache.must_clean() { 0 } else { self.cache.share(least) };
        let is_for_watermark = self.sweep.is_some_and(|sweep| sweep.reason == Reason::Watermark);
        is_for_watermark && self.dirty() <= least
    }

    fn has_work(&self, now: Instant) -> bool {
        self.flush_wanted().is_some() || self.wants_less_dirt(now) || self.directory().has_pressed()
    }

    /// Begins a sweep if there is too much dirt. Otherwise returns what the next step needs.
    fn choose(&mut self, now: Instant) -> Next {
        if self.wants_less_dirt(now) {
            return self.begin_sweep(Reason::Watermark, self.cursor, false);
        }
        if !self.is_idle() {
            return Next::Answers;
        }
        let settles = (self.late > 0).then_some(now + POLL_EVERY);
        Next::Work(settles.into_iter().chain(self.again_at.filter(|at| *at > now)).min())
    }

    fn begin_sweep(&mut self, reason: Reason, start: u32, is_company: bool) -> Next {
        self.sweep = Some(Sweep {
            start,
            from: 0,
            look: 0,
            looked: false,
            reason,
            is_company,
            failed: false,
            skipped: false,
            flushing: false,
        });
        (self.at, self.more) = (0, false);
        self.batch.clear();
        Next::Step
    }

    /// Continues the sweep's search for dirty pages. The found pages with the lowest numbers become
    /// the next batch.
    fn look(&mut self, mut sweep: Sweep, now: Instant) -> Next {
        let Reason::Flush(wanted) = sweep.reason else { return self.look_for_watermark(sweep, now) };
        if !sweep.looked {
            self.gather(&mut sweep);
            self.sweep = Some(sweep);
            return Next::Step;
        }
        if self.next_batch(&mut sweep) {
            self.sweep = Some(sweep);
            return Next::Step;
        }
        if !self.is_idle() {
            return Next::Answers;
        }
        if sweep.skipped {
            // A page was skipped that may still be dirty, because another user had its frame
            // exclusively. That user lets the frame go when the home answers. So the sweep waits
            // for an answer, and begins again.
            self.sweep = Some(Sweep { from: 0, look: 0, looked: false, skipped: false, ..sweep });
            return Next::Answers;
        }
        sweep.flushing = true;
        self.sweep = Some(sweep);
        match self.home.flush(FLUSH) {
            Progress::Done(result) => self.end_flush(wanted, result),
            Progress::Queued => self.home.submit(),
            // The home refuses the flush. Only one sweep runs at a time, so no earlier flush is
            // under way for which this one could wait. So this flush has failed.
            Progress::Full => self.end_flush(wanted, Err(Fault::Full)),
        }
        Next::Step
    }

    fn look_for_watermark(&mut self, mut sweep: Sweep, now: Instant) -> Next {
        let is_enough = self.has_done_enough();
        if !sweep.looked && !is_enough {
            self.gather(&mut sweep);
            self.sweep = Some(sweep);
            return Next::Step;
        }
        if !is_enough && self.next_batch(&mut sweep) {
            self.sweep = Some(sweep);
            return Next::Step;
        }
        // Whether a write has failed is known only once all are answered.
        if !self.is_idle() {
            return Next::Answers;
        }
        match is_enough {
            true => self.stop_watermark(sweep.start.wrapping_add(sweep.from), now),
            false => self.end_watermark(None, now),
        }
        Next::Step
    }

    /// Stops a sweep for the watermark before it has written its batch. The next one begins at
    /// `page`.
    fn stop_watermark(&mut self, page: u32, now: Instant) {
        self.end_watermark(Some(page), now);
        (self.at, self.more) = (0, false);
        self.batch.clear();
    }

    /// Ends a sweep for the watermark. `stopped` is the page at which it stopped; `None`: it went
    /// through all pages.
    fn end_watermark(&mut self, stopped: Option<u32>, now: Instant) {
        if self.sweep.take().is_some_and(|sweep| sweep.failed) {
            self.again_at = Some(now + AGAIN);
        }
        self.cursor = stopped.unwrap_or(0);
        self.takes_hot = stopped.is_none() && !self.takes_hot;
    }

    /// Looks at the sweep's next frames, and adds their dirty pages to the batch.
    fn gather(&mut self, sweep: &mut Sweep) {
        let WriteBack { cache, batch, more, takes_hot, groups, .. } = self;
        let takes_all = *takes_hot || sweep.reason != Reason::Watermark || cache.must_clean();
        let end = cache.directory.frames().min(sweep.look + LOOK);
        for frame in sweep.look..end {
            let entry = cache.directory.load(frame);
            if entry.kind() != Kind::Valid || !entry.is_dirty() || sweep.behind(entry.page()) < sweep.from {
                continue;
            }
            if !takes_all && entry.hits() > 0 {
                if !sweep.is_company && sweep.from == 0 {
                    cache.directory.forget_use(frame);
                }
                continue;
            }
            if entry.is_writing() {
                sweep.failed |= is_late(groups, frame);
                continue;
            }
            batch.push((entry.page(), frame));
            if batch.len() == BATCH * 2 {
                batch.select_nth_unstable_by_key(BATCH, |(page, _)| sweep.behind(*page));
                batch.truncate(BATCH);
                *more = true;
            }
        }
        sweep.look = end;
        if end < cache.directory.frames() {
            return;
        }
        sweep.looked = true;
        batch.sort_unstable_by_key(|(page, _)| sweep.behind(*page));
        if batch.len() > BATCH {
            batch.truncate(BATCH);
            *more = true;
        }
        // The batch is written first, and the sweep goes on after that.
        self.at = 0;
        self.found_nobody = self.batch.is_empty();
    }

    /// Makes the next search begin after the written batch, if more pages wait. Returns whether
    /// they do.
    fn next_batch(&mut self, sweep: &mut Sweep) -> bool {
        let last = self.batch.last().map(|(page, _)| sweep.behind(*page));
        let more = std::mem::take(&mut self.more);
        self.batch.clear();
        self.at = 0;
        let Some(from) = last.filter(|_| more).and_then(|last| last.checked_add(1)) else { return false };
        (sweep.from, sweep.look, sweep.looked) = (from, 0, false);
        true
    }

    /// Finds the dirty pages of sets without a free frame.
    fn find_urgent(&mut self) {
        let WriteBack { cache, urgent, .. } = self;
        if !urgent.is_empty() {
            return;
        }
        let directory = &cache.directory;
        for first in directory.take_pressed() {
            let dirty = (first..first + WAYS).map(|frame| (directory.load(frame), frame));
            let may_go =
                |entry: &Entry| entry.kind() == Kind::Valid && entry.is_dirty() && !entry.is_writing();
            let dirty = dirty.filter(|(entry, _)| may_go(entry));
            let room = urgent.capacity() - urgent.len();
            urgent.extend(dirty.map(|(entry, frame)| (entry.page(), frame)).take(room));
        }
        urgent.sort_unstable();
    }

    fn begin_group(&mut self, is_sorted: bool) {
        let is_turn_of_flush = is_sorted && self.is_turn_of_flush();
        let WriteBack { cache, home, batch, at, urgent, groups, current, sweep, .. } = self;
        *current = groups.iter().position(Group::is_idle).expect("step has looked for one");
        let runs = home.best_runs();
        let most = runs.map_or(GROUP, |(first, then)| match GROUP.checked_sub(first) {
            Some(rest) => first + rest / then * then,
            None => GROUP,
        });
        // A home that is a log takes urgent pages and the batch together. Any other home gets them
        // one after another, each in address order.
        let mixes = is_sorted && (urgent.is_empty() || runs.is_some());
        let others = if mixes || is_turn_of_flush { &batch[*at..] } else { &[] };
        let urgent_now = if mixes || others.is_empty() { urgent.len() } else { 0 };
        let most = match (runs, urgent_now + others.len()) {
            // Only whole runs are written. The pages beyond the last whole run wait until more
            // pages make their run whole.
            (Some((first, then)), some) if (first..most).contains(&some) => {
                first + (some - first) / then * then
            }
            _ => most,
        };
        let hasty = urgent_now.min(most);
        let others = &others[..others.len().min(most - hasty)];
        for (_, frame) in urgent[..hasty].iter().chain(others) {
            // Read the frame's state again: its user may have let the frame go since the search.
            let (entry, begins) = cache.directory.begin_write_back(*frame);
            if begins {
                let member = Member { page: entry.page(), frame: *frame, state: MemberState::Reads };
                groups[*current].members.push(member);
            } else if let Some(sweep) = sweep.as_mut().filter(|_| entry.is_dirty()) {
                sweep.skipped |= !entry.is_writing();
                sweep.failed |= entry.is_writing() && is_late(groups, *frame);
            }
        }
        *at += others.len();
        urgent.drain(..hasty);
        self.was_urgent = others.is_empty();
        self.found_nobody = false;
        self.go_on();
    }

    /// Issues the operations that the pages of the [`Group`] still need: reads first, then writes
    /// in order.
    fn go_on(&mut self) {
        let WriteBack { cache, frames, home, groups, current, sweep, .. } = self;
        let (group, first) = (&mut groups[*current], *current * GROUP);
        while let Some(member) = group.members.get_mut(group.read) {
            let ticket = (first + group.read) as Ticket;
            match frames.read(ticket, PageNo(member.frame), &mut group.pages[group.read]) {
                Progress::Done(Ok(())) => member.state = MemberState::Ready,
                Progress::Done(Err(_)) => fail(cache, member, sweep, Outcome::Dirty),
                Progress::Queued => group.waits += 1,
                Progress::Full => break,
            }
            group.read += 1;
        }
        frames.submit();
        if group.is_at_home() || group.read < group.members.len() || (group.written == 0 && group.waits > 0) {
            return;
        }
        while let Some(member) = group.members.get_mut(group.written) {
            if member.state == MemberState::Ready {
                let (ticket, page) = ((first + group.written) as Ticket, member.page.0);
                match home.write(ticket, Slot(page), &group.pages[group.written]) {
                    Progress::Done(Ok(())) => finish(cache, member),
                    Progress::Done(Err(_)) => fail(cache, member, sweep, Outcome::Dirty),
                    Progress::Queued => {
                        member.state = MemberState::Writes;
                        group.waits += 1;
                    }
                    Progress::Full => break,
                }
                if group.row.0 != page {
                    cache.write_back.row(std::mem::take(&mut group.row.1));
                }
                group.row = (page + 1, group.row.1 + 1);
            }
            group.written += 1;
        }
        if group.written == group.members.len() {
            cache.write_back.row(std::mem::take(&mut group.row.1));
        }
        home.submit();
    }

    fn take_answers(&mut self, now: Instant) {
        let WriteBack { cache, frames, home, groups, sweep, late, rest, .. } = self;
        frames.poll(now, &mut |done| {
            rest.end();
            let (group, at) = (&mut groups[done.ticket as usize / GROUP], done.ticket as usize % GROUP);
            group.waits -= 1;
            match done.page {
                Some(page) if done.result.is_ok() => {
                    *group.pages[at] = *page;
                    group.members[at].state = MemberState::Ready;
                }
                _ => fail(cache, &mut group.members[at], sweep, Outcome::Dirty),
            }
        });
        let mut flushed = None;
        home.poll(now, &mut |done| {
            rest.end();
            if done.ticket == FLUSH {
                flushed = Some(done.result);
                return;
            }
            let group = &mut groups[done.ticket as usize / GROUP];
            group.waits -= 1;
            let member = &mut group.members[done.ticket as usize % GROUP];
            match done.result {
                Ok(()) => finish(cache, member),
                Err(Fault::Timeout) => {
                    *late += 1;
                    fail(cache, member, sweep, Outcome::Late);
                }
                Err(_) => fail(cache, member, sweep, Outcome::Dirty),
            }
        });
        home.settled(&mut |slot| {
            *late -= 1;
            cache.directory.settle(PageNo(slot.0));
        });
        if let (Some(result), Some(Sweep { reason: Reason::Flush(wanted), .. })) = (flushed, self.sweep) {
            self.end_flush(wanted, result);
        }
    }

    fn end_flush(&mut self, wanted: u64, result: Result<(), Fault>) {
        let failed = self.sweep.take().is_none_or(|sweep| sweep.failed);
        self.was_urgent = false;
        self.is_broken |= result.is_err();
        let ok = !failed && !self.is_broken;
        let counters = &self.cache.write_back;
        counters.flushes.fetch_add(1, Relaxed);
        counters.flushes_failed.fetch_add(u64::from(!ok), Relaxed);
        self.cache.flush_done.store(wanted * 2 + u64::from(ok), SeqCst);
    }
}

/// Whether the write of a frame's page is late. Otherwise a group has the page on its way home. A
/// flush needs nothing that was written to the page since: the flush was asked for before that.
fn is_late(groups: &[Group], frame: Frame) -> bool {
    let goes = |member: &Member| member.frame == frame && member.state != MemberState::Done;
    !groups.iter().any(|group| group.members.iter().any(goes))
}

impl Group {
    /// Whether the group has no pages.
    fn is_idle(&self) -> bool {
        self.members.is_empty()
    }

    /// Whether the home has all pages of the group, or has written them.
    fn is_at_home(&self) -> bool {
        self.written == self.members.len()
    }

    /// Whether the write-back is done with all pages of the group.
    fn is_over(&self) -> bool {
        self.waits == 0 && self.is_at_home()
    }

    fn clear(&mut self) {
        self.members.clear();
        (self.read, self.written) = (0, 0);
    }
}

impl Drop for WriteBack {
    fn drop(&mut self) {
        // Writes under way at the home may still land, so their frames stay marked as being
        // written.
        let is_here = |member: &&Member| matches!(member.state, MemberState::Reads | MemberState::Ready);
        for member in self.groups.iter().flat_map(|group| &group.members).filter(is_here) {
            self.cache.directory.end_write_back(member.frame, Outcome::Dirty);
        }
        // A flush that waits has failed: only the write-back answers it, and it ends here.
        if let Some(wanted) = self.flush_wanted() {
            self.cache.flush_done.store(wanted * 2, SeqCst);
        }
    }
}

fn finish(cache: &Cache, member: &mut Member) {
    member.state = MemberState::Done;
    cache.directory.end_write_back(member.frame, Outcome::Clean);
}

fn fail(cache: &Cache, member: &mut Member, sweep: &mut Option<Sweep>, outcome: Outcome) {
    member.state = MemberState::Done;
    cache.write_back.failed.fetch_add(1, Relaxed);
    cache.directory.end_write_back(member.frame, outcome);
    if let Some(sweep) = sweep {
        sweep.failed = true;
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::Config;
    use weir_core::{ByteSize, PAGE_SIZE};
    use weir_device::{PageDevice as _, PageLane as _};
    use weir_store::{Host, Sim, SimUrl};

    /// A cache over a home of the simulator, with a lane.
    fn over(home: &Arc<Sim>, slots: u32) -> (Arc<Cache>, crate::CacheLane) {
        let store = Arc::new(Host::new(slots).unwrap());
        let config = Config { stream_pages: 0, ..Config::default() };
        let cache = Cache::create(store, Arc::clone(home) as _, config).unwrap();
        let lane = cache.open().unwrap();
        (cache, lane)
    }

    /// A home of so many bytes that takes a second for each operation.
    fn slow(bytes: u64) -> Arc<Sim> {
        let home = SimUrl { size: ByteSize(bytes), latency: Duration::from_secs(1), ..SimUrl::default() };
        Arc::new(Sim::open(home).unwrap())
    }

    /// Writes the first pages into the cache.
    fn fill(lane: &mut crate::CacheLane, pages: u32) {
        for page in 0..pages {
            assert_eq!(lane.write(1, PageNo(page), &content(page)), Progress::Done(Ok(())));
        }
    }

    fn content(page: u32) -> [u8; PAGE_SIZE] {
        std::array::from_fn(|at| (at as u32 / 64 + page) as u8)
    }

    #[test]
    fn the_next_pages_are_read_while_the_home_writes_and_a_flush_waits_for_all_of_them() {
        const PAGES: u32 = 3 * GROUP as u32;
        let home = slow(16 << 20);
        let (cache, mut lane) = over(&home, 8192);
        fill(&mut lane, PAGES);
        let mut write_back = WriteBack::open(&cache).unwrap();
        assert_eq!(lane.flush(2), Progress::Queued);
        let (begun, mut answer) = (Instant::now(), None);
        let mut run = |write_back: &mut WriteBack, answer: &mut Option<_>, now: Instant| {
            for _ in 0..1000 {
                write_back.step(now);
                lane.poll(now, &mut |done| *answer = Some(done.result));
            }
        };
        run(&mut write_back, &mut answer, begun);
        let under_way =
            |it: &WriteBack| it.groups.iter().map(|group| group.members.len()).collect::<Vec<_>>();
        assert_eq!(under_way(&write_back), [GROUP, GROUP], "the home has not answered");
        assert_eq!(answer, None);
        (1..=3).for_each(|seconds| run(&mut write_back, &mut answer, begun + Duration::from_secs(seconds)));
        assert_eq!((answer, under_way(&write_back)), (Some(Ok(())), vec![0; GROUPS]));
        assert_eq!(cache.status().written_back, PAGES.into());
    }

    #[test]
    fn pages_on_their_way_home_are_counted_once_where_the_watermark_is_looked_at() {
        let home = slow(16 << 20);
        let (cache, mut lane) = over(&home, 4096);
        let mut write_back = WriteBack::open(&cache).unwrap();
        fill(&mut lane, cache.directory.frames() * 2 / 3);
        let begun = Instant::now();
        for at in 0..3000 {
            write_back.step(begun + at * Duration::from_millis(2));
        }
        let (dirty, low) = (cache.dirty(), cache.share(cache.config.dirty_low));
        assert!(dirty <= low && dirty + GROUP as u32 > low, "{dirty} pages are dirty, {low} may be");
    }

    #[test]
    fn a_flush_brings_home_what_was_written_while_older_content_was_on_its_way() {
        let home = slow(32 << 20);
        let (cache, mut lane) = over(&home, 8192);
        let mut write_back = WriteBack::open(&cache).unwrap();
        let begun = Instant::now();
        // More than may be dirty, by two groups at least.
        fill(&mut lane, cache.directory.frames() * 2 / 3);
        let are_busy = |it: &mut WriteBack| !it.groups.iter().any(Group::is_idle);
        let begin = |_| {
            write_back.step(begun);
            are_busy(&mut write_back)
        };
        assert!((0..1000).any(begin));
        // The home has looked at the first group, and looks at the second half a second later. So
        // that one ends as much later.
        let mut at = 250;
        let page = write_back.groups[1].members[7].page;
        assert_eq!(lane.write(1, page, &content(77)), Progress::Done(Ok(())));
        assert_eq!(lane.flush(2), Progress::Queued);
        let mut answer = None;
        while answer.is_none() {
            at += 1;
            assert!(at < 10_000, "the flush does not end");
            let now = begun + at * Duration::from_millis(2);
            write_back.step(now);
            lane.poll(now, &mut |done| answer = Some(done.result));
        }
        assert_eq!(answer, Some(Ok(())));
        let mut is_there = false;
        home.change(Slot(page.0), |bytes| is_there = *bytes == content(77));
        assert!(is_there, "the home has older content");
    }

    #[test]
    fn a_flush_ends_though_sets_without_a_free_frame_press_on() {
        // A home that is no log gets the pages of such sets first.
        let home = Arc::new(Sim::open(SimUrl { size: ByteSize(64 << 20), ..SimUrl::default() }).unwrap());
        let (cache, mut lane) = over(&home, 4096);
        let mut write_back = WriteBack::open(&cache).unwrap();
        let (now, mut page, mut answer) = (Instant::now(), 0, None);
        let mut press = |lane: &mut crate::CacheLane| {
            // Until a page finds no frame.
            while lane.write(1, PageNo(page % (16 << 10)), &content(page)) == Progress::Done(Ok(())) {
                page += 1;
            }
            lane.poll(now, &mut |_| {});
        };
        press(&mut lane);
        (0..20).for_each(|_| _ = write_back.step(now));
        assert!(write_back.sweep.is_some_and(|sweep| sweep.reason == Reason::Watermark));
        let mut flusher = cache.open().unwrap();
        assert_eq!(flusher.flush(2), Progress::Queued);
        let steps = 12 * cache.directory.frames() / LOOK;
        for _ in 0..steps {
            press(&mut lane);
            write_back.step(now);
            flusher.poll(now, &mut |done| answer = Some(done.result));
        }
        assert_eq!(answer, Some(Ok(())), "after {steps} steps: {:?}", cache.status());
    }

    #[test]
    fn a_flush_fails_if_the_write_back_ends_before_it() {
        let home = Arc::new(Sim::open(SimUrl { size: ByteSize(4 << 20), ..SimUrl::default() }).unwrap());
        let (cache, mut lane) = over(&home, 4096);
        fill(&mut lane, 8);
        let write_back = WriteBack::open(&cache).unwrap();
        assert_eq!(lane.flush(2), Progress::Queued);
        drop(write_back);
        let mut answer = None;
        lane.poll(Instant::now(), &mut |done| answer = Some(done.result));
        assert!(matches!(answer, Some(Err(_))), "{answer:?}");
    }

    #[test]
    fn pages_go_home_in_address_order_though_a_look_takes_several_steps() {
        const PAGES: u32 = 512;
        let home = Arc::new(Sim::open(SimUrl { size: ByteSize(4 << 20), ..SimUrl::default() }).unwrap());
        let (cache, mut lane) = over(&home, 4096);
        assert!(cache.directory.frames() > 4 * LOOK);
        fill(&mut lane, PAGES);
        assert_eq!(lane.flush(2), Progress::Queued);
        let mut write_back = WriteBack::open(&cache).unwrap();
        let (now, mut answer) = (Instant::now(), None);
        for _ in 0..1000 {
            write_back.step(now);
            lane.poll(now, &mut |done| answer = Some(done.result));
        }
        let status = cache.status();
        assert_eq!((answer, status.written_back, status.dirty), (Some(Ok(())), PAGES.into(), 0));
        assert_eq!(status.rows, [0, 0, 0, 0, 0, 0, 0, 0, 1], "all of them side by side");
    }
}
