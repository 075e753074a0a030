//! Reading and writing ranges of bytes in a volume, one request at a time, as FUSE asks for them.
//!
//! Pages that lie in memory are answered from where they lie, verified; what a slow store must fetch is started all at once
//! and waited for. Nothing here allocates.

use super::pool::Pool;
use super::reply::{Reply, SLICES_MAX, header};
use crate::buffer::Buffer;
use rustix::event::{PollFd, PollFlags, Timespec};
use rustix::io::Errno;
use std::io::{self, IoSlice};
use std::sync::Arc;
use std::time::Instant;
use weir_core::{PAGE_SIZE, PageBytes, PageNo};
use weir_store::{Fault, POLL_EVERY, Progress};
use weir_volume::{Lane, View};

/// Bytes of the largest read or write.
pub const IO_MAX: u32 = 1 << 20;
/// Pages that such a one touches at most.
const SPAN_MAX: usize = IO_MAX as usize / PAGE_SIZE + 1;
/// How long a thread sleeps at most while slow stores work: they wake it earlier, or must be asked.
const STORE_NAP: Timespec = Timespec { tv_sec: 0, tv_nsec: POLL_EVERY.as_nanos() as i64 };

static ZEROS: PageBytes = [0; PAGE_SIZE];

/// Where a page of a range lies: `None` is a hole, which reads as zeros.
pub type Place = Option<PageNo>;

/// A thread's way into the volume, with the memory for pages that slow stores bring.
pub(super) struct Ranges {
    lane: Lane,
    pages: Buffer,
    pool: Arc<Pool>,
    /// The first fault of the request under way.
    fault: Option<Fault>,
}

impl Ranges {
    /// Takes the memory.
    ///
    /// # Errors
    /// When it cannot be had.
    pub fn new(lane: Lane, pool: Arc<Pool>) -> io::Result<Ranges> {
        Ok(Ranges { lane, pages: Buffer::new(SPAN_MAX * PAGE_SIZE)?, pool, fault: None })
    }

    pub fn is_locked(&self) -> bool {
        self.pages.is_locked()
    }

    pub fn lane(&mut self) -> &mut Lane {
        &mut self.lane
    }

    /// Answers a read of `length` bytes, at most [`IO_MAX`], that begin at byte `within` of the range's page 0; `place` says where
    /// its pages lie.
    ///
    /// # Errors
    /// Outer: the connection's. Inner: what the request was refused with.
    pub fn read(
        &mut self,
        reply: &dyn Reply,
        unique: u64,
        within: usize,
        length: usize,
        place: impl Fn(usize) -> Place,
    ) -> rustix::io::Result<Result<(), Errno>> {
        let span = (within + length).div_ceil(PAGE_SIZE);
        let header = header(unique, length);
        {
            let guard = self.lane.pin();
            let mut slices = [IoSlice::new(&[]); SLICES_MAX];
            slices[0] = IoSlice::new(&header);
            let mut found = 0;
            for at in 0..span {
                let bytes = match place(at).map(|page| guard.view(page)) {
                    Some(View::Bytes(bytes)) => bytes,
                    None | Some(View::Fill(0)) => &ZEROS,
                    Some(View::Fill(_) | View::Elsewhere | View::Fault(_)) => break,
                };
                if let Some(Some(ahead)) = (at + 2 < span).then(|| place(at + 2)) {
                    guard.prefetch(ahead);
                }
                slices[1 + at] = IoSlice::new(&bytes[part(at, within, length)]);
                found += 1;
            }
            if found == span {
                let sent = reply.send(&slices[..1 + span]);
                guard.count_reads(span as u64, 0);
                return sent.map(Ok);
            }
        }
        if let Err(fault) = self.fetch(span, &place) {
            let errno = errno(fault);
            reply.refuse(unique, errno)?;
            return Ok(Err(errno));
        }
        let mut slices = [IoSlice::new(&[]); SLICES_MAX];
        slices[0] = IoSlice::new(&header);
        for (at, page) in self.pages.pages()[..span].iter().enumerate() {
            slices[1 + at] = IoSlice::new(&page[part(at, within, length)]);
        }
        reply.send(&slices[..1 + span]).map(Ok)
    }

    /// Brings the first `span` pages of a range into `pages`.
    fn fetch(&mut self, span: usize, place: &impl Fn(usize) -> Place) -> Result<(), Fault> {
        self.fault = None;
        self.lane.plan(span, 0);
        for at in 0..span {
            let Some(page) = place(at) else {
                self.pages.pages_mut()[at] = ZEROS;
                continue;
            };
            loop {
                match self.lane.read(at as u32, page, &mut self.pages.pages_mut()[at]) {
                    Progress::Done(Ok(())) | Progress::Queued => break,
                    Progress::Done(Err(fault)) => {
                        self.fault.get_or_insert(fault);
                        break;
                    }
                    Progress::Full => self.wait(),
                }
            }
        }
        self.finish()
    }

    /// Writes `data`, at most [`IO_MAX`] bytes, from byte `within` of the range's page 0 on; every page has a place.
    ///
    /// # Errors
    /// What the request is to be refused with. Pages that did not fail are written.
    pub fn write(
        &mut self,
        within: usize,
        data: &[u8],
        place: impl Fn(usize) -> PageNo,
    ) -> Result<(), Errno> {
        self.fault = None;
        let span = (within + data.len()).div_ceil(PAGE_SIZE);
        if span > 1 {
            self.lane.plan(0, span);
        }
        let mut data = data;
        for at in 0..span {
            let from = if at == 0 { within } else { 0 };
            let (bytes, rest) = data.split_at(data.len().min(PAGE_SIZE - from));
            data = rest;
            loop {
                let progress = match bytes.try_into() {
                    Ok(whole) => self.lane.write(at as u32, place(at), whole),
                    Err(_) => self.lane.write_part(at as u32, place(at), from, bytes),
                };
                match progress {
                    Progress::Done(Ok(())) | Progress::Queued => break,
                    Progress::Done(Err(fault)) => {
                        self.fault.get_or_insert(fault);
                        break;
                    }
                    Progress::Full => self.wait(),
                }
            }
        }
        self.finish().map_err(errno)
    }

    /// Makes `length` bytes zero, from byte `offset` of a run of pages that begins with page `first`: whole pages are forgotten,
    /// parts of pages overwritten.
    ///
    /// # Errors
    /// What the request is to be refused with.
    pub fn clear(&mut self, first: PageNo, offset: u64, length: u64) -> Result<(), Errno> {
        let page = |offset: u64| PageNo(first.0 + (offset / PAGE_SIZE as u64) as u32);
        let end = offset + length;
        let (whole_start, whole_end) =
            (offset.next_multiple_of(PAGE_SIZE as u64), end / PAGE_SIZE as u64 * PAGE_SIZE as u64);
        let edges = if whole_start <= whole_end {
            [(offset, whole_start), (whole_end, end)]
        } else {
            // Within one page, touching neither of its ends.
            [(offset, end), (end, end)]
        };
        for (from, to) in edges {
            if from < to {
                let within = (from % PAGE_SIZE as u64) as usize;
                self.write(within, &ZEROS[..(to - from) as usize], |_| page(from))?;
            }
        }
        if whole_start < whole_end {
            let count = ((whole_end - whole_start) / PAGE_SIZE as u64) as u32;
            let long = count > 4096;
            if long {
                self.pool.away();
            }
            self.lane.discard(page(whole_start), count);
            self.lane.submit();
            if long {
                self.pool.back();
            }
        }
        Ok(())
    }

    /// Ends the batch: waits for what is under way, and says whether something failed.
    fn finish(&mut self) -> Result<(), Fault> {
        self.lane.submit();
        if self.lane.in_flight() > 0 {
            self.take_completions();
            if self.lane.in_flight() > 0 {
                self.pool.away();
                while self.lane.in_flight() > 0 {
                    self.nap();
                    self.take_completions();
                }
                self.pool.back();
            }
        }
        self.fault.take().map_or(Ok(()), Err)
    }

    /// Waits until something that is under way has come back.
    fn wait(&mut self) {
        self.lane.submit();
        let before = self.lane.in_flight();
        self.take_completions();
        if self.lane.in_flight() == before && before > 0 {
            self.pool.away();
            while self.lane.in_flight() == before {
                self.nap();
                self.take_completions();
            }
            self.pool.back();
        }
    }

    fn nap(&mut self) {
        if self.lane.must_poll() {
            return self.lane.rest();
        }
        const FDS_MAX: usize = 16;
        let mut wake = self.lane.wake_fds();
        let Some(first) = wake.next() else { return };
        let mut fds: [PollFd<'_>; FDS_MAX] =
            std::array::from_fn(|_| PollFd::from_borrowed_fd(first, PollFlags::IN));
        let mut count = 1;
        for fd in wake.take(FDS_MAX - 1) {
            fds[count] = PollFd::from_borrowed_fd(fd, PollFlags::IN);
            count += 1;
        }
        // An interrupted sleep is a short one, and nothing else can fail with descriptors that are open.
        let _ = rustix::event::poll(&mut fds[..count], Some(&STORE_NAP));
    }

    fn take_completions(&mut self) {
        let Ranges { lane, pages, fault, .. } = self;
        lane.poll(Instant::now(), &mut |done| match (done.result, done.page) {
            (Ok(()), Some(page)) => pages.pages_mut()[done.ticket as usize] = *page,
            (Ok(()), None) => {}
            (Err(failed), _) => {
                fault.get_or_insert(failed);
            }
        });
    }
}

/// The bytes of a range's page `at` that are asked for.
fn part(at: usize, within: usize, length: usize) -> std::ops::Range<usize> {
    let start = if at == 0 { within } else { 0 };
    start..(within + length - at * PAGE_SIZE).min(PAGE_SIZE)
}

/// What a client is told of a fault: content that cannot be had or proven is an I/O error, never zeros.
fn errno(fault: Fault) -> Errno {
    match fault {
        Fault::Full => Errno::NOSPC,
        Fault::Io(_)
        | Fault::Lost
        | Fault::Timeout
        | Fault::Corrupt
        | Fault::Unsupported
        | Fault::Forsaken => Errno::IO,
    }
}

#[cfg(test)]
mod tests {
    use super::part;

    #[test]
    fn the_parts_of_a_range_add_up() {
        for (within, length) in
            [(0usize, 4096usize), (0, 1), (4095, 1), (4095, 2), (100, 8192), (1, 4096 * 3 - 1)]
        {
            let span = (within + length).div_ceil(4096);
            let sum: usize = (0..span).map(|at| part(at, within, length).len()).sum();
            assert_eq!(sum, length, "{within} {length}");
        }
    }
}
