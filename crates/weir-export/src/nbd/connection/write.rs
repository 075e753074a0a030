//! Writes: pages go to the volume from the input buffer.

use super::super::flight::{Flight, Work, errno};
use super::super::transmission::{Payload, Request, simple_reply};
use super::super::wire::{Errno, command_flag};
use super::{Connection, Ending, Write, ZEROS, whole_pages};
use std::ops::Range;
use weir_core::{PAGE_SIZE, PageNo};
use weir_request::{STEP, Span};
use weir_store::Progress;
use weir_volume::Lane;

impl Connection<'_> {
    pub(super) fn payload(&mut self, payload: &Payload<'_>) -> Result<(), Ending> {
        let mut write = self.desk.write.take().expect("the parser gives payload after its write");
        if write.error.is_none() {
            self.see_client()?;
            let first = (payload.offset / PAGE_SIZE as u64) as u32;
            let within = (payload.offset % PAGE_SIZE as u64) as usize;
            let (pages, part) = payload.bytes.as_chunks::<PAGE_SIZE>();
            if within == 0 && part.is_empty() {
                let mut done = self.desk.lane.write_run(PageNo(first), pages);
                while let Some(page) = pages.get(done) {
                    let (number, mut queued) = (PageNo(first + done as u32), 0);
                    self.write_with(&mut write, |lane, ticket| {
                        queued = lane.queue_writes(ticket, number, &pages[done..]);
                        if queued > 0 { Progress::Queued } else { lane.write(ticket, number, page) }
                    })?;
                    done += queued.max(1);
                    self.see_client()?;
                }
            } else {
                let bytes = payload.bytes;
                self.write_with(&mut write, |lane, ticket| {
                    lane.write_part(ticket, PageNo(first), within, bytes)
                })?;
            }
        }
        if payload.left > 0 {
            self.desk.write = Some(write);
            return Ok(());
        }
        self.end_write(write)
    }

    /// Issues one operation of `write`, which happens now or later.
    fn write_with(
        &mut self,
        write: &mut Write,
        mut operation: impl FnMut(&mut Lane, u32) -> Progress,
    ) -> Result<(), Ending> {
        loop {
            let Some(index) = write.entry.or(self.desk.flight.next()) else {
                self.make_room()?;
                continue;
            };
            match operation(&mut self.desk.lane, Flight::ticket(index, 0)) {
                Progress::Done(Ok(())) => {}
                Progress::Done(Err(fault)) => write.error = Some(errno(fault)),
                Progress::Queued => {
                    let flight = &mut self.desk.flight;
                    let entry =
                        *write.entry.get_or_insert_with(|| flight.begin(Work::Write, write.cookie, 0));
                    flight.queued(entry, 1);
                }
                Progress::Full => {
                    self.make_room()?;
                    // The write may have waited for a slot for long.
                    self.see_client()?;
                    continue;
                }
            }
            return Ok(());
        }
    }

    /// Notes that the last operation of `write` has been issued.
    pub(super) fn end_write(&mut self, write: Write) -> Result<(), Ending> {
        match write.entry {
            None => {
                self.count_error(write.error);
                self.acknowledge(&simple_reply(write.cookie, write.error))
            }
            Some(entry) => {
                if let Some(error) = write.error {
                    self.desk.flight.fail(entry, error, 0);
                }
                self.desk.flight.issued(entry);
                Ok(())
            }
        }
    }

    pub(super) fn write_zeroes(&mut self, request: &Request) -> Result<(), Ending> {
        let pages = whole_pages(request);
        if pages.is_empty() && request.length > 0 && request.flags & command_flag::FAST_ZERO != 0 {
            // Zeroing parts of pages takes as long as writing them.
            return self.refuse(request, Errno::NotSupported);
        }
        let mut write = Write { cookie: request.cookie, error: None, entry: None };
        let (head, _, tail) = Span { offset: request.offset, length: request.length.into() }.parts();
        for edge in [head, tail].iter().filter(|edge| edge.length > 0) {
            let (piece, page) = (edge.piece(0), PageNo(edge.first() as u32));
            let zeros = &ZEROS[..piece.len];
            self.write_with(&mut write, |lane, ticket| lane.write_part(ticket, page, piece.within, zeros))?;
        }
        let holes = request.flags & command_flag::NO_HOLE == 0;
        self.clear_pages(pages, |lane, first, count| lane.zero(first, count, holes))?;
        self.end_write(write)
    }

    /// Discards whole pages or makes them zero, by `clear`, a bounded number at a time. In between,
    /// answers are sent, and freed slots can be used.
    pub(super) fn clear_pages(
        &mut self,
        pages: Range<u32>,
        clear: impl Fn(&mut Lane, PageNo, u32),
    ) -> Result<(), Ending> {
        let mut first = pages.start;
        while first < pages.end {
            let count = (pages.end - first).min(STEP);
            clear(&mut self.desk.lane, PageNo(first), count);
            first += count;
            if first < pages.end {
                self.desk.lane.submit();
                self.take_completions()?;
                self.send_acks()?;
                self.see_client()?;
            }
        }
        Ok(())
    }
}
