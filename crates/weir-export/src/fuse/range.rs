//! Reading and writing ranges of bytes in a volume, one request at a time, as FUSE asks for them.
//!
//! Pages that lie in memory are answered from where they lie, verified; what a slow store must
//! fetch is started all at once and waited for. Nothing here allocates.

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
/// Pages that such a one touches at most.
const SPAN_MAX: usize = IO_MAX as usize / PAGE_SIZE + 1;

/// A thread has one request at a time.
const ONE: Id = 0;

/// The places of the pages of a range.
pub trait Places {
    /// Whether page `n` of the range is page `n` of the volume.
    const LINEAR: bool;

    /// Where a page lies: `None` is a hole, which reads as zeros.
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

/// A thread's way into the volume, with the memory for pages that slow stores bring.
pub(super) struct Ranges<L> {
    requests: Requests<L>,
    pages: Buffer,
    pool: Arc<Pool>,
}

/// The memory of the request under way.
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
    /// Takes the memory.
    ///
    /// # Errors
    /// When it cannot be had.
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
    /// Outer: the connection's. Inner: what the request was refused with.
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

    /// Writes `data`, at most [`IO_MAX`] bytes, where `what` says; every page has a place. A file
    /// that was opened with `O_SYNC` or `O_DSYNC` has each write flushed, as the kernel leaves that
    /// to us.
    ///
    /// # Errors
    /// What the request is to be refused with. Some of its pages may be written.
    pub fn write(&mut self, what: &WriteIn, data: &[u8], places: impl Places) -> Result<(), Errno> {
        let span = Span { offset: what.offset, length: data.len() as u64 };
        // `O_SYNC` has the bit of `O_DSYNC` in it. (`rustix` gives both the bits of `O_SYNC`.)
        let fua = what.flags & libc::O_DSYNC as u32 != 0;
        let Ranges { requests, pages, pool } = self;
        finish(requests, pool, Request { op: Op::Write, span, fua }, &mut Io { pages, data, places })
    }

    /// Makes what was acknowledged as safe as the device can.
    ///
    /// # Errors
    /// What the request is to be refused with.
    pub fn flush(&mut self) -> Result<(), Errno> {
        let Ranges { requests, pages, pool } = self;
        let request = Request { op: Op::Flush, span: Span { offset: 0, length: 0 }, fua: false };
        finish(requests, pool, request, &mut Io { pages, data: &[], places: Volume })
    }

    /// Makes a range zero: whole pages are forgotten, parts of pages overwritten.
    ///
    /// # Errors
    /// What the request is to be refused with.
    pub fn clear(&mut self, span: Span, places: impl Places) -> Result<(), Errno> {
        let Ranges { requests, pages, pool } = self;
        let request = Request { op: Op::Discard, span, fua: false };
        finish(requests, pool, request, &mut Io { pages, data: &[], places })
    }
}

/// Does a request to its end. If it takes longer than one look at the stores, another thread looks
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
            requests.wait();
            requests.turn(Instant::now(), io);
        }
        pool.back();
    }
    requests.finished().expect("it is not under way any more").result.map_err(errno)
}
