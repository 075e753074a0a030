//! A lane into a file: an io_uring of its own, with registered memory and files.
//!
//! Operations wait in the order in which they were queued. [`Lane::submit`] joins neighbours (the
//! same direction, the next slot, the next staging page) into runs of up to [`RUN_PAGES`], one I/O
//! each. When a full run waits, it is started without `submit`: the disk works while the next pages
//! are encrypted. A run that fails is tried again page by page, so that each operation gets its own
//! result.
//!
//! A disk may retry for minutes, or its file system may be frozen. A lane does not wait for that:
//! an operation that the io_uring has not completed within [`LIMIT`] ends with a timeout. Until the
//! io_uring completes it, the kernel still has its staging page, and a write still has its slot.

use super::staging::Staging;
use super::{Position, Shared};
use crate::lateness::Lateness;
use crate::{ANSWER_WITHIN, Done, Fault, Lane, OpenError, OpenErrorKind, POLL_EVERY, Progress, Ticket};
use io_uring::{IoUring, opcode, squeue, types};
use std::mem::ManuallyDrop;
use std::os::fd::{AsRawFd, BorrowedFd, RawFd};
use std::sync::Arc;
use std::time::{Duration, Instant};
use weir_core::{ByteSize, PAGE_SIZE, PageBytes, Slot};

/// Number of pages of the longest I/O. It has 1 MiB, which is enough for the full rate of a disk.
const RUN_PAGES: usize = 256;

/// Entries of the largest io_uring (IORING_MAX_ENTRIES).
const DEPTH_MOST: usize = 1 << 15;

/// The user data of an io_uring entry that flushes a member. All other entries have a staging
/// page's number.
const FLUSH: u64 = u64::MAX;

/// Largest number of restarts of an I/O that the kernel interrupts. After that it counts as failed.
const RETRIES: u8 = 16;

/// Time that the disk has for an operation, retries included. A poll may notice up to
/// [`POLL_EVERY`] late that the time is over.
pub(super) const LIMIT: Duration = ANSWER_WITHIN.saturating_sub(POLL_EVERY);

pub(super) struct FileLane {
    name: Box<str>,
    ring: ManuallyDrop<IoUring>,
    shared: Arc<Shared>,
    staging: ManuallyDrop<Staging>,
    /// For each staging page, its operation.
    operations: Box<[Operation]>,
    /// For each staging page, the run that begins with it.
    runs: Box<[Run]>,
    /// Staging pages of operations that wait for [`Lane::submit`], in the order in which they came.
    queued: Vec<usize>,
    /// Number of runs that the io_uring has not completed yet.
    running: usize,
    /// The time limits of the operations, by their staging pages.
    lateness: Lateness,
    /// Slots of timed-out writes that the io_uring has completed since.
    settled: Vec<Slot>,
    /// Whether the staging memory is registered with the io_uring, so that it need not be pinned
    /// for each I/O.
    is_registered: bool,
    /// The flush under way.
    flush: Option<Flush>,
    /// Whether the kernel refused the last entries that were submitted. Then the lane must be
    /// polled, since no completion will wake its owner.
    is_refused: bool,
}

#[derive(Clone, Copy)]
struct Operation {
    ticket: Ticket,
    slot: Slot,
    place: Position,
    direction: Direction,
}

/// A flush under way.
#[derive(Clone, Copy)]
struct Flush {
    ticket: Ticket,
    /// Number of members whose part of the flush has not ended.
    left: usize,
    result: Result<(), Fault>,
}

#[derive(Clone, Copy, PartialEq, Eq, Debug)]
enum Direction {
    Read,
    Write,
}

/// One I/O: `pages` staging pages from the first one on, to or from a member.
#[derive(Clone, Copy)]
struct Run {
    pages: usize,
    /// Bytes that earlier, shorter transfers of the run have moved.
    done: usize,
    retries: u8,
}

impl FileLane {
    pub(super) fn open(name: &str, shared: Arc<Shared>, depth: usize) -> Result<Self, OpenError> {
        if depth + shared.members.len() > DEPTH_MOST {
            return Err(OpenError::new(
                OpenErrorKind::Layout,
                name,
                format!("a lane of {depth} operations; at most {DEPTH_MOST} fit a ring"),
            ));
        }
        let bytes = (depth * PAGE_SIZE) as u64;
        let staging = Staging::new(depth).map_err(|error| OpenError::no_memory(name, bytes, error))?;
        let ring = IoUring::builder().build((depth + shared.members.len()) as u32).map_err(|error| {
            let what = "io_uring is refused here; allow it (sysctl kernel.io_uring_disabled=0, or the \
                        container's seccomp profile)";
            OpenError::io(name, what, error)
        })?;
        // The last file is the writing end of a pipe, and no I/O uses it. It closes once this
        // process has died and the io_uring is gone. The reading end then shows that.
        let files = shared.members.iter().map(|member| member.file.as_raw_fd());
        let files: Vec<RawFd> = files.chain([shared.quiet.token().as_raw_fd()]).collect();
        ring.submitter()
            .register_files(&files)
            .map_err(|error| OpenError::io(name, "cannot register its files with io_uring", error))?;
        let memory =
            libc::iovec { iov_base: staging.memory().as_ptr().cast(), iov_len: staging.memory().len() };
        // SAFETY: the memory is a mapping that `staging` owns. `Drop` closes the io_uring before it
        // unmaps that memory.
        let registered = unsafe { ring.submitter().register_buffers(&[memory]) };
        let is_registered = match registered {
            Ok(()) => true,
            // RLIMIT_MEMLOCK forbids the registration without CAP_IPC_LOCK. The lane works without
            // the registration, a little slower.
            Err(error) if error.raw_os_error() == Some(libc::ENOMEM) => false,
            Err(error) => {
                let what = format!("cannot register {} with io_uring", ByteSize(bytes));
                return Err(OpenError::io(name, what, error));
            }
        };
        let nothing = Operation {
            ticket: 0,
            slot: Slot(0),
            place: Position { member: 0, offset: 0 },
            direction: Direction::Read,
        };
        let limit = shared.limit;
        Ok(FileLane {
            name: name.into(),
            ring: ManuallyDrop::new(ring),
            shared,
            staging: ManuallyDrop::new(staging),
            operations: vec![nothing; depth].into(),
            runs: vec![Run { pages: 0, done: 0, retries: 0 }; depth].into(),
            queued: Vec::with_capacity(depth),
            running: 0,
            lateness: Lateness::new(depth, limit),
            settled: Vec::with_capacity(depth),
            is_registered,
            flush: None,
            is_refused: false,
        })
    }

    /// Takes a staging page for an operation, queues the operation, and returns the page's number.
    /// If no staging page is free, fails with the answer that the lane's caller gets.
    fn queue(
        &mut self,
        ticket: Ticket,
        slot: Slot,
        place: Position,
        direction: Direction,
    ) -> Result<usize, Progress> {
        let Some(page) = self.staging.take().or_else(|| self.take_late()) else {
            // If all operations of the lane have timed out, the disk hangs, and no poll frees a
            // staging page soon.
            let hangs = self.in_flight() == 0;
            return Err(if hangs { Progress::Done(Err(Fault::Io(libc::ETIMEDOUT))) } else { Progress::Full });
        };
        self.operations[page] = Operation { ticket, slot, place, direction };
        self.queued.push(page);
        Ok(page)
    }

    /// Takes a staging page of a late operation that the disk has ended meanwhile. If all
    /// operations of a lane are late, the lane's owner waits for none of them, and does not poll
    /// the lane. So this function takes the completions itself.
    fn take_late(&mut self) -> Option<usize> {
        if self.in_flight() > 0 {
            return None;
        }
        while let Some((first, _)) = self.next_completion() {
            for page in first..first + self.runs[first].pages {
                self.finish(page, Ok(()), &mut |done| unreachable!("{} was answered before", done.ticket));
            }
        }
        self.staging.take()
    }

    /// Whether the operation of staging page `page` continues the I/O that ends with page
    /// `previous`.
    fn continues(&self, previous: usize, page: usize) -> bool {
        let (before, after) = (&self.operations[previous], &self.operations[page]);
        page == previous + 1
            && after.direction == before.direction
            && after.place.member == before.place.member
            && after.place.offset == before.place.offset + PAGE_SIZE as u64
    }

    /// Starts or continues the run that begins at staging page `first`.
    fn start(&mut self, first: usize) {
        let run = self.runs[first];
        let Operation { place, direction, .. } = self.operations[first];
        let file = types::Fixed(place.member);
        // SAFETY: the address is within the run's pages, which are within the staging memory.
        let address = unsafe { self.staging.address(first).add(run.done) };
        let length = (run.pages * PAGE_SIZE - run.done) as u32;
        let offset = place.offset + run.done as u64;
        let entry = match (direction, self.is_registered) {
            (Direction::Read, true) => {
                opcode::ReadFixed::new(file, address, length, 0).offset(offset).build()
            }
            (Direction::Read, false) => opcode::Read::new(file, address, length).offset(offset).build(),
            (Direction::Write, true) => {
                opcode::WriteFixed::new(file, address, length, 0).offset(offset).build()
            }
            (Direction::Write, false) => opcode::Write::new(file, address, length).offset(offset).build(),
        };
        self.push(&entry.user_data(first as u64));
        self.running += 1;
        let traffic = &self.shared.traffic[place.member as usize];
        traffic.begun(direction == Direction::Write, length);
    }

    fn push(&mut self, entry: &squeue::Entry) {
        // SAFETY: the entry's memory is staging pages that stay taken until its completion; they
        // and the files outlive the io_uring (`Drop` waits).
        unsafe { self.ring.submission().push(entry) }.expect("an entry for each staging page and member");
    }

    /// Hands the entries of the submission queue to the kernel. The kernel may leave some for a
    /// later call.
    fn enter(&mut self) {
        if self.ring.submission().is_empty() {
            return;
        }
        // After EAGAIN, EBUSY or EINTR the entries stay in the queue, and the next poll tries
        // again.
        let _ = self.ring.submit();
        self.is_refused = !self.ring.submission().is_empty();
    }

    /// Takes the next completion of the io_uring: the run's first staging page, and the kernel's
    /// result.
    fn next_completion(&mut self) -> Option<(usize, i32)> {
        let entry = self.ring.completion().next()?;
        self.running -= 1;
        Some((entry.user_data() as usize, entry.result()))
    }

    /// Handles the kernel's `result` for a run. Returns the number of the run's pages once all of
    /// them are done. If some are left, starts the rest of the run again and returns 0. Returns the
    /// fault if the run failed.
    fn advance(&mut self, first: usize, result: i32) -> Result<usize, Fault> {
        let run = &mut self.runs[first];
        let total = run.pages * PAGE_SIZE;
        match result {
            1.. => {
                run.done = (run.done + result as usize).min(total);
                run.retries = 0;
                if run.done == total {
                    return Ok(run.pages);
                }
            }
            // The read was past the end of a file that another program has truncated.
            0 => return Err(Fault::Io(libc::EIO)),
            error if [-libc::EINTR, -libc::EAGAIN].contains(&error) && run.retries < RETRIES => {
                run.retries += 1;
            }
            error => {
                let member = self.operations[first].place.member;
                self.shared.traffic[member as usize].failed();
                return Err(Fault::Io(-error));
            }
        }
        self.start(first);
        Ok(0)
    }

    /// Completes the operation of one staging page, unless that has been done.
    fn finish(&mut self, page: usize, result: Result<(), Fault>, done: &mut dyn FnMut(Done<'_>)) {
        let Operation { ticket, slot, direction, .. } = self.operations[page];
        if self.lateness.end(page) {
            if direction == Direction::Write {
                self.settled.push(slot);
            }
        } else if direction == Direction::Read && result.is_ok() {
            // SAFETY: the I/O on this page has completed.
            let content = unsafe { self.staging.page(page) };
            if let Some(cipher) = &self.shared.cipher {
                cipher.decrypt(slot, content);
            }
            done(Done { ticket, result, page: Some(content) });
        } else {
            done(Done { ticket, result, page: None });
        }
        self.staging.give(page);
    }

    /// Ends a run that failed. The pages that were transferred before the failure are done. Each
    /// other page is tried alone, unless the run had only one page.
    fn fail(&mut self, first: usize, fault: Fault, done: &mut dyn FnMut(Done<'_>)) {
        let run = self.runs[first];
        let whole = run.done / PAGE_SIZE;
        for page in first..first + whole {
            self.finish(page, Ok(()), done);
        }
        for page in first + whole..first + run.pages {
            if run.pages == 1 || self.lateness.is_late(page) {
                self.finish(page, Err(fault), done);
            } else {
                self.runs[page] = Run { pages: 1, done: 0, retries: 0 };
                self.start(page);
            }
        }
    }

    /// Handles a member's answer to its part of the flush.
    fn flushed(&mut self, result: i32, done: &mut dyn FnMut(Done<'_>)) {
        let Some(flush) = &mut self.flush else { return };
        flush.left -= 1;
        if result < 0 {
            flush.result = Err(Fault::Io(-result));
        }
        if flush.left == 0 {
            let Flush { ticket, result, .. } = *flush;
            self.flush = None;
            done(Done { ticket, result, page: None });
        }
    }
}

impl Lane for FileLane {
    fn write(&mut self, ticket: Ticket, slot: Slot, page: &PageBytes) -> Progress {
        let place = match self.shared.place(slot) {
            Ok(place) => place,
            Err(fault) => return Progress::Done(Err(fault)),
        };
        let staged = match self.queue(ticket, slot, place, Direction::Write) {
            Ok(staged) => staged,
            Err(answer) => return answer,
        };
        // SAFETY: the page was free until now, so no I/O is on it.
        let content = unsafe { self.staging.page(staged) };
        match &self.shared.cipher {
            Some(cipher) => cipher.encrypt(slot, page, content),
            None => *content = *page,
        }
        if self.queued.len() == RUN_PAGES {
            self.submit();
        }
        Progress::Queued
    }

    fn read(&mut self, ticket: Ticket, slot: Slot, _page: &mut PageBytes) -> Progress {
        match self.shared.place(slot) {
            Ok(place) => match self.queue(ticket, slot, place, Direction::Read) {
                Ok(_) => {
                    if self.queued.len() == RUN_PAGES {
                        self.submit();
                    }
                    Progress::Queued
                }
                Err(answer) => answer,
            },
            Err(fault) => Progress::Done(Err(fault)),
        }
    }

    fn flush(&mut self, ticket: Ticket) -> Progress {
        if self.flush.is_some() {
            return Progress::Full;
        }
        let members = self.shared.members.len();
        self.flush = Some(Flush { ticket, left: members, result: Ok(()) });
        for member in 0..members as u32 {
            let entry = opcode::Fsync::new(types::Fixed(member)).flags(types::FsyncFlags::DATASYNC).build();
            self.push(&entry.user_data(FLUSH));
            self.running += 1;
        }
        Progress::Queued
    }

    fn submit(&mut self) {
        if !self.queued.is_empty() {
            self.queued.iter().for_each(|page| self.lateness.submitted(*page));
        }
        let mut at = 0;
        while at < self.queued.len() {
            let first = self.queued[at];
            let mut pages = 1;
            while at + pages < self.queued.len()
                && pages < RUN_PAGES
                && self.continues(self.queued[at + pages - 1], self.queued[at + pages])
            {
                pages += 1;
            }
            self.runs[first] = Run { pages, done: 0, retries: 0 };
            self.start(first);
            at += pages;
        }
        self.queued.clear();
        self.enter();
    }

    fn poll(&mut self, now: Instant, done: &mut dyn FnMut(Done<'_>)) {
        self.lateness.stamp(now);
        while let Some((first, result)) = self.next_completion() {
            if first == FLUSH as usize {
                self.flushed(result, done);
                continue;
            }
            let pages = first..first + self.runs[first].pages;
            if pages.clone().all(|page| self.lateness.is_late(page)) {
                pages.for_each(|page| self.finish(page, Ok(()), done));
                continue;
            }
            match self.advance(first, result) {
                Ok(pages) => (first..first + pages).for_each(|page| self.finish(page, Ok(()), done)),
                Err(fault) => self.fail(first, fault, done),
            }
        }
        // Hand the queued entries to the kernel: runs to be continued, runs to be tried again, and
        // entries that the kernel refused before.
        self.enter();
        if self.in_flight() > 0 {
            let FileLane { lateness, operations, .. } = self;
            lateness.expire(now, |page| {
                let ticket = operations[page].ticket;
                done(Done { ticket, result: Err(Fault::Timeout), page: None });
            });
        }
    }

    fn settled(&mut self, free: &mut dyn FnMut(Slot)) {
        self.settled.drain(..).for_each(free);
    }

    fn in_flight(&self) -> usize {
        self.staging.in_use() - self.lateness.late() + usize::from(self.flush.is_some())
    }

    /// The descriptor of the io_uring itself, which is readable while completions wait. An eventfd
    /// would have to be cleared after each poll.
    fn wake_fd(&self) -> Option<BorrowedFd<'_>> {
        // SAFETY: the io_uring keeps its descriptor open as long as `self` is borrowed.
        let fd = unsafe { BorrowedFd::borrow_raw(self.ring.as_raw_fd()) };
        (!self.is_refused).then_some(fd)
    }
}

impl Drop for FileLane {
    /// Waits for every I/O that has been started: the kernel may write to the staging memory until
    /// then. If the disk hangs, memory and io_uring stay as long as the process lives. Otherwise
    /// the files are unregistered explicitly. An io_uring that is only closed releases them later,
    /// and their locks would outlive the store.
    fn drop(&mut self) {
        let until = Instant::now() + self.lateness.limit;
        let nap = types::Timespec::from(POLL_EVERY);
        while self.running > 0 {
            if self.next_completion().is_some() {
                continue;
            }
            if Instant::now() >= until {
                let bytes = ByteSize(self.staging.memory().len() as u64);
                eprintln!(
                    "store {}: {} I/Os have no answer; the {bytes} that they use stay taken until this process ends",
                    self.name, self.running
                );
                return;
            }
            let wait = types::SubmitArgs::new().timespec(&nap);
            match self.ring.submitter().submit_with_args(1, &wait) {
                Err(error) if error.raw_os_error() != Some(libc::ETIME) => {
                    std::thread::sleep(POLL_EVERY / 100);
                }
                _ => {}
            }
        }
        let _ = self.ring.submitter().unregister_files();
        // SAFETY: both are dropped only here, the io_uring before the memory that is registered
        // with it.
        unsafe {
            ManuallyDrop::drop(&mut self.ring);
            ManuallyDrop::drop(&mut self.staging);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::super::backing::Backing;
    use super::super::quiet::Quiet;
    use super::*;
    use crate::Deal;
    use crate::{FileStore, FileUrl, StripeUrl};
    use std::fs::File;
    use std::io::{Read, Write};
    use std::path::PathBuf;
    use std::sync::atomic::AtomicBool;

    fn path(name: &str) -> PathBuf {
        std::env::temp_dir().join(format!("weir-lane-{}-{name}", std::process::id()))
    }

    fn lane(store: &FileStore) -> FileLane {
        FileLane::open("test", Arc::clone(&store.shared), 512).unwrap()
    }

    /// Queues and submits reads of these slots. Returns the number of I/Os, if there are no more
    /// than [`RUN_PAGES`] pages.
    fn ios(lane: &mut FileLane, slots: impl IntoIterator<Item = u32>) -> usize {
        for slot in slots {
            assert_eq!(lane.read(0, Slot(slot), &mut [0; PAGE_SIZE]), Progress::Queued);
        }
        lane.submit();
        let running = lane.running;
        while lane.in_flight() > 0 {
            lane.poll(Instant::now(), &mut |done| assert_eq!(done.result, Ok(())));
        }
        running
    }

    #[test]
    fn neighbours_go_out_as_one_io() {
        let url = FileUrl { size: Some(ByteSize(4 << 20)), ..FileUrl::new(path("joined")) };
        let store = FileStore::open(&url).unwrap();
        std::fs::remove_file(&url.path).unwrap();
        let mut lane = lane(&store);
        assert_eq!(ios(&mut lane, 100..200), 1);
        assert_eq!(ios(&mut lane, (0..100).step_by(2)), 50, "with gaps between them");
        assert_eq!(ios(&mut lane, (0..100).rev()), 100, "backwards");
        assert_eq!(
            ios(&mut lane, 0..512),
            3,
            "no longer than {RUN_PAGES} pages, and once around the staging area"
        );
        assert_eq!(lane.write(0, Slot(7), &[1; PAGE_SIZE]), Progress::Queued);
        assert_eq!(ios(&mut lane, 8..16), 2, "a write and the reads after it");
    }

    #[test]
    fn a_stripes_units_go_out_as_one_io_each() {
        let url = StripeUrl {
            size: Some(ByteSize(4 << 20)),
            unit: ByteSize(64 << 10),
            ..StripeUrl::new([path("a"), path("b")])
        };
        let store = FileStore::open_stripe(&url).unwrap();
        url.paths.iter().for_each(|path| std::fs::remove_file(path).unwrap());
        assert_eq!(ios(&mut lane(&store), 0..64), 4);
    }

    #[test]
    fn a_store_that_is_opened_answers_within_the_time_that_a_request_has() {
        let url = FileUrl { size: Some(ByteSize(4 << 20)), ..FileUrl::new(path("in-time")) };
        let store = FileStore::open(&url).unwrap();
        std::fs::remove_file(&url.path).unwrap();
        assert!(lane(&store).lateness.limit < ANSWER_WITHIN);
    }

    /// A lane into a pipe, and the pipe's ends. The lane's I/O hangs as long as a test wants.
    fn hanging() -> (FileLane, File, File) {
        let (reading, writing) = rustix::pipe::pipe().unwrap();
        let (reading, writing) = (File::from(reading), File::from(writing));
        let member = |file: &File| Backing {
            file: file.try_clone().unwrap(),
            room: 64 << 12,
            is_device: false,
            is_direct: false,
        };
        // Slot 0 lies on member 0, the pipe's reading end. Slot 1 lies on member 1, its writing
        // end.
        let shared = Shared {
            members: Box::new([member(&reading), member(&writing)]),
            start: super::super::HEADER,
            cipher: None,
            room: crate::Room::Reserved,
            slots: 128.into(),
            deal: Deal::in_turns(2, 1),
            chunk_slots: 128,
            released: Box::new([AtomicBool::new(false)]),
            quiet: Quiet::new().unwrap(),
            limit: LIMIT,
            traffic: super::super::traffic::Traffic::of(&[PathBuf::new(), PathBuf::new()]),
        };
        let mut lane = FileLane::open("pipe", Arc::new(shared), 4).unwrap();
        lane.lateness.limit = Duration::from_millis(300);
        (lane, reading, writing)
    }

    type Ended = (Ticket, Result<(), Fault>);

    /// Polls until `enough` is true. Returns the completions, and the slots that have settled.
    fn poll_until(
        lane: &mut FileLane,
        enough: impl Fn(&[Ended], &[Slot]) -> bool,
    ) -> (Vec<Ended>, Vec<Slot>) {
        let (begun, mut ended, mut settled) = (Instant::now(), Vec::new(), Vec::new());
        while !enough(&ended, &settled) {
            lane.poll(Instant::now(), &mut |done| ended.push((done.ticket, done.result)));
            lane.settled(&mut |slot| settled.push(slot));
            assert!(begun.elapsed() < Duration::from_secs(60), "{ended:?} {settled:?}");
            std::thread::sleep(Duration::from_millis(1));
        }
        (ended, settled)
    }

    #[test]
    fn a_write_that_the_disk_does_not_answer_ends_in_time_and_its_slot_is_settled_only_by_the_disk() {
        let (mut lane, mut reading, _writing) = hanging();
        // The pipe has room for 16 pages. All later writes hang until the test reads from the pipe.
        for ticket in 0..20 {
            assert_eq!(lane.write(ticket, Slot(1), &[ticket as u8; PAGE_SIZE]), Progress::Queued);
            lane.submit();
            let (ended, settled) = poll_until(&mut lane, |ended, _| !ended.is_empty());
            let expected = if ticket < 16 { Ok(()) } else { Err(Fault::Timeout) };
            assert_eq!((ended, settled), (vec![(ticket, expected)], vec![]));
        }
        assert_eq!(lane.in_flight(), 0, "everything has been answered");
        // The kernel has all four staging pages: a new operation fails at once, and is not begun.
        let refused = Progress::Done(Err(Fault::Io(libc::ETIMEDOUT)));
        assert_eq!(lane.write(99, Slot(1), &[99; PAGE_SIZE]), refused);
        assert_eq!(lane.read(99, Slot(0), &mut [0; PAGE_SIZE]), refused);
        // The disk comes back: the late writes land, and only now may their slots be used.
        let mut landed = vec![0; 20 * PAGE_SIZE];
        let reader = std::thread::spawn(move || {
            reading.read_exact(&mut landed).unwrap();
            landed
        });
        let (ended, settled) = poll_until(&mut lane, |_, settled| settled.len() == 4);
        assert_eq!((ended, settled), (vec![], vec![Slot(1); 4]), "nobody is told twice");
        let mut landed: Vec<u8> = reader.join().unwrap().chunks(PAGE_SIZE).map(|page| page[0]).collect();
        landed.sort_unstable();
        assert_eq!(landed, (0..20).collect::<Vec<u8>>());
        assert_eq!(lane.write(7, Slot(1), &[7; PAGE_SIZE]), Progress::Queued);
        lane.submit();
        assert_eq!(poll_until(&mut lane, |ended, _| !ended.is_empty()).0, [(7, Ok(()))]);
    }

    #[test]
    fn a_read_that_the_disk_does_not_answer_ends_in_time_and_nothing_follows() {
        let (mut lane, _reading, mut writing) = hanging();
        assert_eq!(lane.read(5, Slot(0), &mut [0; PAGE_SIZE]), Progress::Queued);
        lane.submit();
        let (ended, settled) = poll_until(&mut lane, |ended, _| !ended.is_empty());
        assert_eq!((ended, settled), (vec![(5, Err(Fault::Timeout))], vec![]));
        assert_eq!(lane.lateness.late(), 1);
        writing.write_all(&[5; PAGE_SIZE]).unwrap();
        let begun = Instant::now();
        while lane.lateness.late() > 0 {
            lane.poll(Instant::now(), &mut |done| panic!("{done:?}"));
            lane.settled(&mut |slot| panic!("{slot:?}"));
            assert!(begun.elapsed() < Duration::from_secs(60));
        }
        assert_eq!(lane.staging.in_use(), 0);
    }

    #[test]
    fn a_lane_whose_operations_were_all_late_works_again_though_nobody_has_polled_it() {
        let (mut lane, _reading, mut writing) = hanging();
        for ticket in 0..4 {
            assert_eq!(lane.read(ticket, Slot(0), &mut [0; PAGE_SIZE]), Progress::Queued);
        }
        lane.submit();
        poll_until(&mut lane, |ended, _| ended.len() == 4);
        writing.write_all(&[5; 4 * PAGE_SIZE]).unwrap();
        let begun = Instant::now();
        while lane.read(9, Slot(0), &mut [0; PAGE_SIZE]) != Progress::Queued {
            assert!(begun.elapsed() < Duration::from_secs(60), "it refuses for ever");
        }
    }

    #[test]
    fn an_operation_that_waits_for_its_submission_does_not_end() {
        let (mut lane, _reading, _writing) = hanging();
        assert_eq!(lane.write(1, Slot(1), &[1; PAGE_SIZE]), Progress::Queued);
        std::thread::sleep(2 * lane.lateness.limit);
        lane.poll(Instant::now(), &mut |done| panic!("{done:?}"));
        lane.submit();
        assert_eq!(poll_until(&mut lane, |ended, _| !ended.is_empty()).0, [(1, Ok(()))]);
    }

    #[test]
    fn dropping_a_lane_whose_disk_hangs_takes_no_longer_than_the_limit() {
        let (mut lane, _reading, writing) = hanging();
        assert_eq!(lane.read(5, Slot(0), &mut [0; PAGE_SIZE]), Progress::Queued);
        lane.submit();
        let memory = lane.staging.address(0);
        let (dropped, ended) = std::sync::mpsc::channel();
        std::thread::spawn(move || {
            drop(lane);
            dropped.send(()).unwrap();
        });
        ended.recv_timeout(Duration::from_secs(60)).expect("nobody waits for a disk that hangs");
        // The disk may write to the lane's memory later, so this memory must still be mapped.
        (&writing).write_all(&[5; PAGE_SIZE]).unwrap();
        let begun = Instant::now();
        // SAFETY: the dropped lane has left the memory to the kernel for good.
        while unsafe { memory.read_volatile() } != 5 {
            assert!(begun.elapsed() < Duration::from_secs(60));
            std::thread::sleep(Duration::from_millis(1));
        }
    }
}
