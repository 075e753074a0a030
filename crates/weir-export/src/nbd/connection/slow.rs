//! Requests at slow stores: begun, waited for, and answered as the pages arrive.

use super::super::flight::{CHUNK_MAX, Flight, SPAN_MAX, Work};
use super::super::slices::{Slices, take_front};
use super::super::transmission::{data_chunk, error_offset_chunk, none_chunk, simple_reply};
use super::{Connection, Desk, Ending, HEAD_MAX, Read};
use std::time::Instant;
use weir_core::PAGE_SIZE;
use weir_device::PageLane;
use weir_request::{Op, Request, Span};

/// Bytes of the smallest piece of a read that is submitted to its store at once. Smaller pieces are
/// submitted together with the rest of the batch.
const PIPED: u32 = 64 << 10;

impl<L: PageLane> Connection<'_, L> {
    /// Waits until a slow store may have a completion. If `client`, the wait also ends when the
    /// client has sent bytes.
    pub(super) fn wait(&mut self, client: bool) -> Result<(), Ending> {
        Ok(self.desk.requests.wait(client.then_some(self.socket))?)
    }

    /// Begins to fetch from slow stores the part of a read that has not been answered yet.
    pub(super) fn fetch(&mut self, read: &Read) -> Result<(), Ending> {
        let (request, mut done) = (&read.request, read.done);
        let mut stream = None;
        if request.length - done > CHUNK_MAX || done > 0 {
            while !self.desk.flight.has_room(0) {
                self.make_room()?;
            }
            stream = Some(self.desk.flight.begin(Work::Stream, request.cookie, 0));
        }
        while done < request.length {
            let offset = request.offset + u64::from(done);
            // Cut a long read between pages, so that no page is read for two pieces. A read of one
            // piece is not cut.
            let whole = CHUNK_MAX - (offset % PAGE_SIZE as u64) as u32;
            let left = request.length - done;
            let length = if stream.is_some() { left.min(whole) } else { left };
            self.begin(Work::Read { offset, length, stream }, request.cookie, offset, length)?;
            if length >= PIPED {
                // Submit this piece now. So the store works on it while the next piece is begun,
                // and on the next piece while this one is verified and sent.
                self.desk.requests.submit();
            }
            done += length;
        }
        if let Some(stream) = stream {
            self.desk.flight.issued(stream);
        }
        Ok(())
    }

    /// Begins a read: takes an entry of the flight table, and passes the range to the request
    /// engine.
    pub(super) fn begin(&mut self, work: Work, cookie: u64, offset: u64, length: u32) -> Result<u16, Ending> {
        let span = Span { offset, length: length.into() };
        self.begin_request(work, cookie, Request { op: Op::Read, span, fua: false })
    }

    /// Begins a request: takes an entry of the flight table, and passes the request to the request
    /// engine.
    pub(super) fn begin_request(&mut self, work: Work, cookie: u64, request: Request) -> Result<u16, Ending> {
        let pages = if request.op == Op::Read { request.span.pages() as usize } else { 0 };
        while !self.desk.flight.has_room(pages) {
            self.make_room()?;
        }
        let Desk { requests, flight, .. } = &mut *self.desk;
        let index = flight.begin(work, cookie, pages);
        requests.begin(index, request, flight);
        self.take_answers()?;
        Ok(index)
    }

    /// Takes the request engine's answers. The next send acknowledges requests without data; reads
    /// become ready to be answered. Returns whether there were any answers.
    pub(super) fn take_answers(&mut self) -> Result<bool, Ending> {
        let mut any = false;
        while let Some(answer) = self.desk.requests.finished() {
            any = true;
            let flight = &mut self.desk.flight;
            flight.end(&answer);
            let entry = flight.entry(answer.id);
            if entry.work == Work::Write {
                let (cookie, error) = (entry.cookie, entry.error.map(|(error, _)| error));
                flight.release(answer.id);
                self.count_error(error);
                self.acknowledge(&simple_reply(cookie, error))?;
            }
        }
        Ok(any)
    }

    /// Whether a request is under way, or finished and not answered yet. A write whose payload is
    /// still arriving counts only while a store works for it.
    pub(super) fn is_busy(&self) -> bool {
        self.has_begun() || self.desk.requests.has_work()
    }

    /// Whether any request has begun, apart from a write whose payload is still arriving.
    fn has_begun(&self) -> bool {
        let arriving = self.desk.write.is_some_and(|write| write.index.is_some());
        self.desk.flight.begun() > usize::from(arriving)
    }

    /// Waits until an operation under way has ended, and answers the finished requests.
    pub(super) fn make_room(&mut self) -> Result<(), Ending> {
        self.desk.requests.submit();
        let before = self.desk.requests.lane().in_flight();
        // Any operation that has ended makes room in the lane, even if its request is not finished.
        if self.take_completions()? || self.desk.requests.lane().in_flight() < before {
            return Ok(());
        }
        // With nothing in flight no completion will come, but a write may wait for a slot. Do not
        // sleep then.
        if before == 0 && !self.desk.requests.must_poll() {
            return Ok(());
        }
        self.send_acks()?;
        self.wait(false)?;
        self.take_completions().map(drop)
    }

    /// Answers all requests under way, except a write whose payload is still arriving: this thread
    /// must receive it.
    pub(super) fn finish_flight(&mut self) -> Result<(), Ending> {
        while self.has_begun() {
            self.make_room()?;
        }
        Ok(())
    }

    /// Takes completions of slow stores, and answers the requests that are then finished. Returns
    /// whether any request was finished.
    pub(super) fn take_completions(&mut self) -> Result<bool, Ending> {
        self.collect()?;
        let any = self.take_answers()? || !self.desk.flight.ready().is_empty();
        while !self.desk.flight.ready().is_empty() {
            self.answer_ready()?;
        }
        if any {
            self.send_acks()?;
        }
        Ok(any)
    }

    /// Takes completions of slow stores.
    fn collect(&mut self) -> Result<(), Ending> {
        if self.desk.flight.has_writes() {
            // Check again that the client is there: the next poll publishes writes that have ended
            // at their store. Since the last check the client may have gone, and sent newer writes
            // on another connection.
            self.look_for_client()?;
        }
        let Desk { requests, flight, .. } = &mut *self.desk;
        requests.turn(Instant::now(), flight);
        Ok(())
    }

    /// Sends `head` and the slices that `gather` adds after it, however slowly the client takes
    /// them.
    ///
    /// While this lane has operations under way, slots that other lanes free cannot be used again.
    /// So this thread takes completions until none is under way, and only then blocks. Requests
    /// that finish meanwhile are answered later. `gather` is called again after each poll of the
    /// store. Each time it must append the same bytes to the reply.
    pub(super) fn send<const SLICES: usize>(
        &mut self,
        head: &[u8],
        mut gather: impl for<'a> FnMut(&'a mut Desk<L>, &mut Slices<'a, SLICES>),
    ) -> Result<(), Ending> {
        let mut sent = 0;
        loop {
            let is_idle = self.desk.requests.lane().in_flight() == 0;
            let mut slices = Slices::new();
            slices.push(head);
            gather(self.desk, &mut slices);
            match slices.send(self.socket, &mut sent, is_idle) {
                Ok(true) => return Ok(()),
                Ok(false) => self.collect_until_room()?,
                Err(errno) => return self.unless_leaving(Err(errno)),
            }
        }
    }

    /// Takes completions of slow stores without answering them. Waits until there are more, or the
    /// client has room.
    fn collect_until_room(&mut self) -> Result<(), Ending> {
        self.desk.requests.submit();
        self.collect()?;
        Ok(self.desk.requests.wait_for_room(self.socket)?)
    }

    /// Sends one `sendmsg` with the acknowledgements and the answers to finished reads.
    fn answer_ready(&mut self) -> Result<(), Ending> {
        let structured = self.rules.structured;
        let (mut count, mut errors) = (usize::MAX, 0);
        let sent = self.send(&[], |desk, slices| {
            slices.push(&desk.acks);
            (count, errors) = gather_ready(&desk.flight, count, &mut desk.heads, structured, slices);
        });
        self.desk.acks.clear();
        self.desk.flight.release_ready(count);
        self.counters.errors.add(errors);
        sent
    }
}

/// Adds answers to finished reads to `slices`: as many as fit, and `most` at most. Returns the
/// number of answers, and how many of them report an error.
fn gather_ready<'a>(
    flight: &'a Flight,
    most: usize,
    mut heads: &'a mut [u8],
    structured: bool,
    slices: &mut Slices<'a>,
) -> (usize, u64) {
    let (mut count, mut errors) = (0, 0);
    for &index in flight.ready().iter().take(most) {
        if slices.room() < SPAN_MAX + 1 || heads.len() < HEAD_MAX {
            break;
        }
        let entry = flight.entry(index);
        let cookie = entry.cookie;
        count += 1;
        errors +=
            u64::from(entry.error.is_some() && !matches!(entry.work, Work::Read { stream: Some(_), .. }));
        match (entry.work, entry.error) {
            // The long read reports this piece's error at its end.
            (Work::Read { stream: Some(_), .. }, Some(_)) => {}
            (Work::Read { offset, length, stream }, None) => {
                let head = if structured {
                    take_front(&mut heads, &data_chunk(cookie, stream.is_none(), offset, length))
                } else {
                    take_front(&mut heads, &simple_reply(cookie, None))
                };
                slices.push(head);
                push_pages(flight, index, offset, length, slices);
            }
            (Work::Stream, None) => slices.push(take_front(&mut heads, &none_chunk(cookie))),
            (Work::Stream | Work::Read { .. }, Some((error, at))) if structured => {
                slices.push(take_front(&mut heads, &error_offset_chunk(cookie, error, at)));
            }
            (_, error) => {
                let error = error.map(|(error, _)| error);
                slices.push(take_front(&mut heads, &simple_reply(cookie, error)));
            }
        }
    }
    (count, errors)
}

/// Appends to `slices` the bytes that a read has fetched into its pages.
pub(super) fn push_pages<'a>(
    flight: &'a Flight,
    index: u16,
    offset: u64,
    length: u32,
    slices: &mut Slices<'a>,
) {
    let span = Span { offset, length: length.into() };
    for (at, number) in (0..span.pages()).zip(flight.pages_of(index)) {
        slices.push(&flight.page(number)[span.piece(at).range()]);
    }
}
