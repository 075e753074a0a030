//! Reads and writes ranges of bytes in a volume, one request at a time, as FUSE sends them.
//!
//! Pages in host memory are verified, and then sent without a copy. All pages of a request that lie
//! in slow stores are fetched together, and the thread waits for them. Nothing here allocates
//! memory.

use super::pool::Pool;
use super::reply::{Reply, SLICES_MAX, header};
use super::wire::WriteIn;
use crate::buffer::Buffer;
use rustix::io::Errno;
use std::io::{self, IoSlice};
use std::sync::Arc;
use std::time::Instant;
use weir_core::{PAGE_SIZE, PageBytes, PageNo};
use weir_device::PageLane;
use weir_request::{Id, Op, Request, RequestMemory, Requests, Span, errno};

/// Bytes of the largest read or write.
pub const IO_MAX: u32 = 1 << 20;
/// Largest number of pages that a read or write touches.
const SPAN_MAX: usize = IO_MAX as usize / PAGE_SIZE + 1;

/// The number of a request at the request engine: a thread has only one request at a time.
const ONE: Id = 0;

/// Translates the pages of a range into pages of the volume.
pub trait Places {
    /// Whether page `n` of the range is page `n` of the volume.
    const LINEAR: bool;

    /// The volume's page for a page of the range. `None` is a hole, which reads as zeros.
    fn place(&self, page: u64) -> Option<PageNo>;
}

/// A range of the volume itself.
pub struct Volume;

impl Places for Volume {
    const LINEAR: bool = true;

    fn place(&self, page: u64) -> Option<PageNo> {
        Some(PageNo(page as u32))
    }
}

impl<F: Fn(u64) -> Option<PageNo>> Places for F {
    const LINEAR: bool = false;

    fn place(&self, page: u64) -> Option<PageNo> {
        self(page)
    }
}

/// A thread's lane into the volume, with memory for pages that slow stores bring.
pub(super) struct Ranges<L> {
    requests: Requests<L>,
    pages: Buffer,
    pool: Arc<Pool>,
}

/// The memory of the thread's request, as the request engine sees it.
struct Io<'a, P> {
    pages: &'a mut Buffer,
    data: &'a [u8],
    places: P,
}

impl<P: Places> RequestMemory for Io<'_, P> {
    const LINEAR: bool = P::LINEAR;

    fn place(&self, _id: Id, page: u64) -> Option<PageNo> {
        self.places.place(page)
    }

    fn data(&self, _id: Id) -> &[u8] {
        self.data
    }

    fn pages(&mut self, _id: Id, at: u32) -> &mut [PageBytes] {
        &mut self.pages.pages_mut()[at as usize..]
    }
}

impl<L: PageLane> Ranges<L> {
    /// Allocates the memory of one thread.
    ///
    /// # Errors
    /// Fails when there is not enough memory.
    pub fn new(lane: L, pool: Arc<Pool>) -> io::Result<Self> {
        Ok(Ranges { requests: Requests::new(lane, 1), pages: Buffer::new(SPAN_MAX * PAGE_SIZE)?, pool })
    }

    pub fn is_locked(&self) -> bool {
        self.pages.is_locked()
    }

    pub fn lane(&mut self) -> &mut L {
        self.requests.lane()
    }

    /// Answers a read of at most [`IO_MAX`] bytes.
    ///
    /// # Errors
    /// The outer error is the connection's. The inner one is the error that answers the request.
    pub fn read(
        &mut self,
        reply: &dyn Reply,
        unique: u64,
        span: Span,
        places: impl Places,
    ) -> rustix::io::Result<Result<(), Errno>> {
        let header = header(unique, span.length as usize);
        let Ranges { requests, pages, .. } = self;
        let mut io = Io { pages, data: &[], places };
        let sent = requests.view::<SLICES_MAX, _, _>((ONE, span), &io, &header, |slices| reply.send(slices));
        if let Some(sent) = sent {
            return sent.map(Ok);
        }
        let request = Request { op: Op::Read, span, fua: false };
        if let Err(errno) = finish(requests, &self.pool, request, &mut io) {
            reply.refuse(unique, errno)?;
            return Ok(Err(errno));
        }
        let mut slices = [IoSlice::new(&[]); SLICES_MAX];
        slices[0] = IoSlice::new(&header);
        for (at, page) in io.pages.pages()[..span.pages() as usize].iter().enumerate() {
            slices[1 + at] = IoSlice::new(&page[span.piece(at as u32).range()]);
        }
        reply.send(&slices[..1 + span.pages() as usize]).map(Ok)
    }

    /// Writes at most [`IO_MAX`] bytes of `data` at the offset in `what`. The volume must already
    /// have a page for every page of the range. If the file was opened with `O_SYNC` or `O_DSYNC`,
    /// each write is flushed, since the kernel leaves that to the server.
    ///
    /// # Errors
    /// Fails with the error that answers the request. Some of the request's pages may have been
    /// written by then.
    pub fn write(&mut self, what: &WriteIn, data: &[u8], places: impl Places) -> Result<(), Errno> {
        let span = Span { offset: what.offset, length: data.len() as u64 };
        // `O_SYNC` contains the bit of `O_DSYNC`, so one test finds both. (In `rustix` both
        // constants have all bits of `O_SYNC`.)
        let fua = what.flags & libc::O_DSYNC as u32 != 0;
        let Ranges { requests, pages, pool } = self;
        finish(requests, pool, Request { op: Op::Write, span, fua }, &mut Io { pages, data, places })
    }

    /// Makes all acknowledged writes as safe as the device can.
    ///
    /// # Errors
    /// Fails with the error that answers the request.
    pub fn flush(&mut self) -> Result<(), Errno> {
        let Ranges { requests, pages, pool } = self;
        let request = Request { op: Op::Flush, span: Span { offset: 0, length: 0 }, fua: false };
        finish(requests, pool, request, &mut Io { pages, data: &[], places: Volume })
    }

    /// Makes a range zero: whole pages are discarded, parts of pages overwritten.
    ///
    /// # Errors
    /// Fails with the error that answers the request.
    pub fn clear(&mut self, span: Span, places: impl Places) -> Result<(), Errno> {
        let Ranges { requests, pages, pool } = self;
        let request = Request { op: Op::Discard, span, fua: false };
        finish(requests, pool, request, &mut Io { pages, data: &[], places })
    }
}

/// Runs a request to its end. If it takes longer than one look at the stores, another thread looks
/// for requests meanwhile.
fn finish<L: PageLane, P: Places>(
    requests: &mut Requests<L>,
    pool: &Pool,
    request: Request,
    io: &mut Io<'_, P>,
) -> Result<(), Errno> {
    requests.announce(std::iter::once((ONE, request)), io);
    requests.begin(ONE, request, io);
    requests.submit();
    if requests.is_busy() {
        requests.turn(Instant::now(), io);
    }
    if requests.is_busy() {
        pool.away();
        while requests.is_busy() {
            // A wait fails only if a descriptor is closed, and the lane keeps its descriptors open.
            let _ = requests.wait(None);
            requests.turn(Instant::now(), io);
        }
        pool.back();
    }
    requests.finished().expect("it is not under way any more").result.map_err(errno)
}
