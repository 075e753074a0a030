//! Reads from host memory: verified pages are sent from where they lie.

use super::super::flight::{CHUNK_MAX, Work, errno};
use super::super::pool::Loan;
use super::super::slices::{Slices, take_front};
use super::super::transmission::{Request, data_chunk, error_offset_chunk, hole_chunk, simple_reply};
use super::super::wire::{Errno, command_flag};
use super::slow::push_pages;
use super::{Connection, Desk, Ending, HEAD_MAX, OWN_PIECE_MAX, PIECE_MAX, Read, ZEROS};
use std::time::Duration;
use weir_core::{PAGE_SIZE, PageNo};
use weir_device::{PageGuard, PageLane, View};
use weir_request::Span;

/// Longest time that pages stay in place in their store while the client takes them. After that,
/// the bytes that it has not taken are copied. A client that reads makes room for more within
/// microseconds.
const PINNED_WAIT: Duration = Duration::from_millis(1);

impl<L: PageLane> Connection<'_, L> {
    /// Answers the reads of the batch together with its acknowledgements, and begins reads from
    /// slow stores.
    pub(super) fn answer_reads(&mut self) -> Result<(), Ending> {
        if self.desk.reads.is_empty() {
            return Ok(());
        }
        self.desk.requests.submit();
        let mut at = 0;
        while at < self.desk.reads.len() {
            at = self.round(at)?;
        }
        for at in 0..self.desk.reads.len() {
            let read = self.desk.reads[at];
            match (read.apart, self.rules.structured || read.request.length <= CHUNK_MAX) {
                (false, _) => {}
                (true, true) => self.fetch(&read)?,
                (true, false) => self.stream(&read.request)?,
            }
        }
        self.desk.reads.clear();
        Ok(())
    }

    /// Sends one `sendmsg`: the acknowledgements, and as many reads from index `at` on as fit.
    /// Returns the first read that was not reached, or not completely answered.
    fn round(&mut self, mut at: usize) -> Result<usize, Ending> {
        let Desk { requests, reads, acks, heads, rest, rests, .. } = &mut *self.desk;
        // Borrow a buffer if the waiting reads need more bytes than the connection's own buffer
        // has.
        let mut loan = is_long(&reads[at..]).then(|| rests.borrow()).flatten();
        let (rest, piece_max): (&mut [u8], u32) = match &mut loan {
            Some(loan) => (loan, PIECE_MAX),
            None => (rest, OWN_PIECE_MAX),
        };
        let guard = requests.lane().pin();
        let mut heads: &mut [u8] = heads;
        let mut slices = Slices::new();
        if !acks.is_empty() {
            slices.push(acks);
        }
        let (mut payload, mut faults) = (0, 0);
        while at < reads.len() {
            let ahead =
                reads.get(at + 2).map(|ahead| PageNo((ahead.request.offset / PAGE_SIZE as u64) as u32));
            let read = &mut reads[at];
            if read.apart {
                at += 1;
                continue;
            }
            if !self.rules.structured && read.request.length > piece_max {
                // A simple reply cannot be sent in pieces.
                read.apart = true;
                continue;
            }
            let length = (read.request.length - read.done).min(piece_max);
            let fits = payload == 0 || payload + length <= piece_max;
            if !fits || slices.room() < span(length) + 1 || heads.len() < HEAD_MAX {
                break;
            }
            if let Some(ahead) = ahead {
                guard.prefetch(ahead);
            }
            match compose(&guard, read, length, self.rules.structured, &mut heads, &mut slices) {
                Composed::Answered => {
                    payload += length;
                    read.done += length;
                    at += usize::from(read.done == read.request.length);
                }
                Composed::Apart => read.apart = true,
                Composed::Failed => {
                    faults += 1;
                    at += 1;
                }
            }
        }
        guard.count_reads(u64::from(payload.div_ceil(PAGE_SIZE as u32)), faults);
        let left = slices.send_or_copy(self.socket, rest, PINNED_WAIT);
        drop(guard);
        acks.clear();
        self.counters.errors.add(faults);
        let left = left?;
        self.send_rest(left, loan.as_ref())?;
        Ok(at)
    }

    /// Sends the first `left` bytes of `loan`, or of the connection's own buffer.
    fn send_rest(&mut self, left: usize, loan: Option<&Loan>) -> Result<(), Ending> {
        if left == 0 {
            return Ok(());
        }
        match loan {
            Some(loan) => self.send::<2>(&loan[..left], |_, _| {}),
            None => self.send::<2>(&[], |desk, slices| slices.push(&desk.rest[..left])),
        }
    }

    /// Answers a long read by one simple reply. Once its header has left, an error can no longer be
    /// reported. So all pages are verified first, and again while they are sent, since they may be
    /// rewritten in between.
    fn stream(&mut self, request: &Request) -> Result<(), Ending> {
        self.send_acks()?;
        self.finish_flight()?;
        let mut loan = self.desk.rests.borrow();
        let chunk_max = if loan.is_some() { CHUNK_MAX } else { OWN_PIECE_MAX };
        let chunks = (0..request.length)
            .step_by(chunk_max as usize)
            .map(|done| (request.offset + u64::from(done), (request.length - done).min(chunk_max)));
        for (offset, length) in chunks.clone() {
            if let Err(error) = self.with_chunk(offset, length, None, false, &mut loan)? {
                return self.refuse(request, error);
            }
        }
        let mut head = Some(simple_reply(request.cookie, None));
        for (offset, length) in chunks {
            if self.with_chunk(offset, length, head.take(), true, &mut loan)?.is_err() {
                return Err(Ending::Lost);
            }
        }
        Ok(())
    }

    /// Verifies a range and, if `send`, sends it after `head`. Bytes that the client does not take
    /// are copied into `loan`, or else into the connection's own buffer. So the range may have
    /// [`CHUNK_MAX`] bytes with a `loan`, and [`OWN_PIECE_MAX`] without.
    fn with_chunk(
        &mut self,
        offset: u64,
        length: u32,
        head: Option<[u8; 16]>,
        send: bool,
        loan: &mut Option<Loan>,
    ) -> Result<Result<(), Errno>, Ending> {
        let head = head.as_ref().map_or(&[][..], |head| head);
        let Desk { requests, rest, .. } = &mut *self.desk;
        let rest: &mut [u8] = match loan {
            Some(loan) => loan,
            None => rest,
        };
        let guard = requests.lane().pin();
        let mut slices = Slices::new();
        slices.push(head);
        let found = view_range(&guard, offset, length, &mut slices);
        let mut left = Ok(0);
        if send && matches!(found, Found::Bytes { .. }) {
            guard.count_reads(u64::from(length.div_ceil(PAGE_SIZE as u32)), 0);
            left = slices.send_or_copy(self.socket, rest, PINNED_WAIT);
        }
        drop(guard);
        match found {
            Found::Bytes { .. } => {
                self.send_rest(left?, loan.as_ref())?;
                return Ok(Ok(()));
            }
            Found::Fault { error, .. } => return Ok(Err(error)),
            Found::Elsewhere => {}
        }
        let index = self.begin(Work::Held { offset, length }, 0, offset, length)?;
        while !self.desk.flight.is_finished(index) {
            self.make_room()?;
        }
        let entry = self.desk.flight.entry(index);
        let result = entry.error.map_or(Ok(()), |(error, _)| Err(error));
        if send && result.is_ok() {
            self.send(head, |desk, slices| {
                push_pages(&desk.flight, index, offset, length, slices);
            })?;
        }
        self.desk.flight.release(index);
        Ok(result)
    }
}

/// Whether the waiting reads need more bytes than the connection's own buffer has.
fn is_long(reads: &[Read]) -> bool {
    let mut bytes = 0;
    reads.iter().any(|read| {
        bytes += read.request.length - read.done;
        bytes > OWN_PIECE_MAX
    })
}

enum Composed {
    Answered,
    Apart,
    Failed,
}

/// Adds the answer for the next `length` bytes of `read` to `slices`, if those lie in memory.
fn compose<'a>(
    guard: &'a impl PageGuard,
    read: &Read,
    length: u32,
    structured: bool,
    heads: &mut &'a mut [u8],
    slices: &mut Slices<'a>,
) -> Composed {
    let cookie = read.request.cookie;
    let offset = read.request.offset + u64::from(read.done);
    let last = read.done + length == read.request.length;
    let mark = slices.mark();
    let head = slices.reserve();
    match view_range(guard, offset, length, slices) {
        Found::Bytes { zeros } if structured => {
            if zeros && read.request.flags & command_flag::DF == 0 {
                slices.rewind(mark);
                slices.push(take_front(heads, &hole_chunk(cookie, last, offset, length)));
            } else {
                slices.set(head, take_front(heads, &data_chunk(cookie, last, offset, length)));
            }
            Composed::Answered
        }
        Found::Bytes { .. } => {
            slices.set(head, take_front(heads, &simple_reply(cookie, None)));
            Composed::Answered
        }
        Found::Elsewhere => {
            slices.rewind(mark);
            Composed::Apart
        }
        Found::Fault { error, at } => {
            slices.rewind(mark);
            slices.push(if structured {
                take_front(heads, &error_offset_chunk(cookie, error, at))
            } else {
                take_front(heads, &simple_reply(cookie, Some(error)))
            });
            Composed::Failed
        }
    }
}

enum Found {
    /// All bytes of the range, verified. `zeros`: all are known to be zeros.
    Bytes { zeros: bool },
    /// Some bytes lie in a store that only [`PageLane::read`] reaches.
    Elsewhere,
    /// The page that contains byte `at` cannot be read.
    Fault { error: Errno, at: u64 },
}

/// Adds the bytes of a range to `slices`, page by page, from where they lie.
fn view_range<'a>(guard: &'a impl PageGuard, offset: u64, length: u32, slices: &mut Slices<'a>) -> Found {
    let (span, mut zeros) = (Span { offset, length: length.into() }, true);
    let pages = span.pages();
    for number in 0..pages {
        let piece = span.piece(number);
        if number + 2 < pages {
            guard.prefetch(PageNo(piece.page as u32 + 2));
        }
        let bytes = match guard.view(PageNo(piece.page as u32)) {
            View::Bytes(bytes) => {
                zeros = false;
                bytes
            }
            View::Fill(0) => &ZEROS,
            View::Fill(_) | View::Elsewhere => return Found::Elsewhere,
            View::Fault(fault) => return Found::Fault { error: errno(fault), at: offset + piece.from },
        };
        slices.push(&bytes[piece.range()]);
    }
    Found::Bytes { zeros }
}

/// Largest number of pages that a range of `length` bytes touches.
fn span(length: u32) -> usize {
    length as usize / PAGE_SIZE + 2
}
