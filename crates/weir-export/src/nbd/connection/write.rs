//! Writes: pages go to the volume from the input buffer.

use super::super::flight::Work;
use super::super::transmission::{Payload, Request, simple_reply};
use super::super::wire::{Errno, command_flag};
use super::{Connection, Ending, Write, whole, whole_pages};
use weir_core::PageNo;
use weir_device::PageLane;
use weir_request::{Op, Request as Change, Span};
use weir_store::Fault;

impl<L: PageLane> Connection<'_, L> {
    /// Begins a write, whose payload follows.
    pub(super) fn open_write(&mut self, request: &Request, refused: Option<Errno>) -> Result<(), Ending> {
        let mut write = Write { cookie: request.cookie, error: refused, index: None };
        if refused.is_none() {
            while !self.desk.flight.has_room(0) {
                self.make_room()?;
            }
            let index = self.desk.flight.begin(Work::Write, request.cookie, 0);
            self.desk.requests.open(index, change(request, Op::Write, whole(request)));
            write.index = Some(index);
        }
        self.desk.write = Some(write);
        if request.length == 0 { self.close_write(Ok(())) } else { Ok(()) }
    }

    pub(super) fn payload(&mut self, payload: &Payload<'_>) -> Result<(), Ending> {
        let write = self.desk.write.expect("the parser gives payload after its write");
        let (mut offset, mut bytes) = (payload.offset, payload.bytes);
        while let Some(index) = write.index.filter(|_| !bytes.is_empty()) {
            // The write may have waited long for a slot, so the client may have gone meanwhile.
            self.see_client()?;
            let issued = self.desk.requests.write_piece(index, offset, bytes);
            (offset, bytes) = (offset + issued as u64, &bytes[issued..]);
            if issued == 0 {
                self.make_room()?;
            }
        }
        if payload.left > 0 { Ok(()) } else { self.close_write(Ok(())) }
    }

    /// Notes that all payload of the write has come, or that no more will.
    pub(super) fn close_write(&mut self, came: Result<(), Fault>) -> Result<(), Ending> {
        let Some(Write { cookie, error, index }) = self.desk.write.take() else { return Ok(()) };
        let Some(index) = index else {
            self.count_error(error);
            return self.acknowledge(&simple_reply(cookie, error));
        };
        self.desk.requests.close(index, came);
        self.take_answers().map(drop)
    }

    /// Discards whole pages; parts of pages stay.
    pub(super) fn trim(&mut self, request: &Request) -> Result<(), Ending> {
        let pages = whole_pages(request);
        let span = Span::pages_from(PageNo(pages.start), pages.end.saturating_sub(pages.start));
        self.change(request, Op::Discard, span)
    }

    pub(super) fn write_zeroes(&mut self, request: &Request) -> Result<(), Ending> {
        if whole_pages(request).is_empty()
            && request.length > 0
            && request.flags & command_flag::FAST_ZERO != 0
        {
            // Zeroing parts of pages takes as long as writing them.
            return self.refuse(request, Errno::NotSupported);
        }
        let op = if request.flags & command_flag::NO_HOLE == 0 { Op::Hole } else { Op::Zero };
        self.change(request, op, whole(request))
    }

    /// Begins a request without data. If it is long, the calls that take completions continue it.
    pub(super) fn change(&mut self, request: &Request, op: Op, span: Span) -> Result<(), Ending> {
        self.see_client()?;
        self.begin_request(Work::Write, request.cookie, change(request, op, span)).map(drop)
    }
}

fn change(request: &Request, op: Op, span: Span) -> Change {
    Change { op, span, fua: request.flags & command_flag::FUA != 0 }
}
