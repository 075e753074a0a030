//! The requests of a connection that the request engine has, and the pages that their reads fill.
//!
//! Each request takes an entry of a table, and the request engine knows it by the entry's number.
//! The entry also has what the client's answer needs. The number of entries is fixed: requests that
//! do not fit wait in the socket.

use super::pool::{Loan, Pool};
use super::wire::Errno;
use crate::buffer::Buffer;
use std::collections::VecDeque;
use std::io;
use std::sync::Arc;
use weir_core::{PAGE_SIZE, PageBytes};
use weir_request::{Answer, Id, RequestMemory};
use weir_store::Fault;

/// Bytes of the longest piece of a read that slow stores fetch at once.
pub(super) const CHUNK_MAX: u32 = 256 << 10;
/// Largest number of pages that a piece of [`CHUNK_MAX`] bytes touches, if it does not begin at a
/// page.
pub(super) const SPAN_MAX: usize = CHUNK_MAX as usize / PAGE_SIZE + 1;
/// Number of pages that reads under way may fill. They are enough for a request of 1 MiB at any
/// offset, and for one more piece: while a piece is sent, the next one is read. The connection
/// itself has [`SPAN_MAX`] of these pages, and it borrows the others.
pub(super) const PAGES: usize = (1 + LOANS) * SPAN_MAX;
const LOANS: usize = 4;
/// Bytes of a borrowed buffer.
pub(super) const LOAN_BYTES: usize = SPAN_MAX * PAGE_SIZE;
/// Largest number of requests under way. Fewer reads than this use up all pages, but writes need no
/// pages.
pub(super) const ENTRIES: u16 = 256;
/// Marks the end of the list of a request's pages.
const END: u16 = u16::MAX;

/// The kind of request that an entry of the flight table holds.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) enum Work {
    /// The entry holds no request.
    Idle,
    /// A read of at most [`CHUNK_MAX`] bytes, or a piece of a long read. For a piece, `stream` is
    /// the number of the long read's entry.
    Read { offset: u64, length: u32, stream: Option<u16> },
    /// A read that one function handles to its end: it begins to fetch the pages, waits for them,
    /// and answers.
    Held { offset: u64, length: u32 },
    /// A long read. It counts its pieces, and is answered after them.
    Stream,
    /// A request that is answered only with success or an error.
    Write,
}

pub(super) struct Entry {
    pub work: Work,
    pub cookie: u64,
    /// The first error of the request, and its offset in the export.
    pub error: Option<(Errno, u64)>,
    /// The number of answers that the request still waits for. A long read waits for one answer for
    /// each unfinished piece that has begun, and counts one more until all pieces have begun. Any
    /// other request waits for one answer of the request engine.
    left: u32,
    /// The number of the request's first page.
    first: u16,
    /// The number of the page that was looked up last, and its index among the request's pages. The
    /// next look-up begins there.
    last: (u16, u32),
}

pub(super) struct Flight {
    entries: Box<[Entry]>,
    idle: Vec<u16>,
    /// For each page, the number of the next page of the same request.
    next_pages: Box<[u16]>,
    memory: Buffer,
    pool: Arc<Pool>,
    loans: [Option<Loan>; LOANS],
    idle_pages: Vec<u16>,
    ready: VecDeque<u16>,
    /// Number of entries that hold writes.
    writes: usize,
}

impl Flight {
    /// Makes the tables. The buffers of `pool` must have [`LOAN_BYTES`] bytes.
    pub fn new(pool: &Arc<Pool>) -> io::Result<Flight> {
        let entry =
            || Entry { work: Work::Idle, cookie: 0, error: None, left: 0, first: END, last: (END, 0) };
        Ok(Flight {
            entries: std::iter::repeat_with(entry).take(ENTRIES.into()).collect(),
            idle: (0..ENTRIES).rev().collect(),
            next_pages: vec![END; PAGES].into_boxed_slice(),
            memory: Buffer::new(SPAN_MAX * PAGE_SIZE)?,
            pool: Arc::clone(pool),
            loans: [const { None }; LOANS],
            idle_pages: Self::own_pages(Vec::with_capacity(PAGES)),
            ready: VecDeque::with_capacity(ENTRIES.into()),
            writes: 0,
        })
    }

    fn own_pages(mut idle: Vec<u16>) -> Vec<u16> {
        idle.clear();
        idle.extend((0..SPAN_MAX as u16).rev());
        idle
    }

    /// Whether a request with `span` pages can begin. If the request is a piece of a long read, the
    /// long read needs an entry too. So two entries must be free. Borrows buffers while too few
    /// pages are free.
    pub fn has_room(&mut self, span: usize) -> bool {
        while self.idle_pages.len() < span {
            let Some(place) = self.loans.iter().position(Option::is_none) else { return false };
            self.loans[place] = self.pool.borrow();
            if self.loans[place].is_none() {
                return false;
            }
            let first = (1 + place) * SPAN_MAX;
            self.idle_pages.extend((first as u16..(first + SPAN_MAX) as u16).rev());
        }
        self.idle.len() >= 2
    }

    /// Gives the borrowed buffers back. Nothing may be under way.
    fn give_back(&mut self) {
        self.loans = [const { None }; LOANS];
        self.idle_pages = Self::own_pages(std::mem::take(&mut self.idle_pages));
    }

    /// Takes an entry and `span` pages for a request; the caller has checked that there is room.
    /// The request engine knows the entry until [`end`](Flight::end). Of a long read it knows only
    /// the entries of the pieces, and not the entry of the whole.
    pub fn begin(&mut self, work: Work, cookie: u64, span: usize) -> u16 {
        let index = self.idle.pop().expect("the caller has seen that there is room");
        self.writes += usize::from(work == Work::Write);
        let (mut first, mut last) = (END, END);
        for _ in 0..span {
            let page = self.idle_pages.pop().expect("the caller has seen that there is room");
            self.next_pages[usize::from(page)] = END;
            match last {
                END => first = page,
                _ => self.next_pages[usize::from(last)] = page,
            }
            last = page;
        }
        self.entries[usize::from(index)] =
            Entry { work, cookie, error: None, left: 1, first, last: (first, 0) };
        if let Work::Read { stream: Some(stream), .. } = work {
            self.entries[usize::from(stream)].left += 1;
        }
        index
    }

    pub fn entry(&self, index: u16) -> &Entry {
        &self.entries[usize::from(index)]
    }

    pub fn page(&self, number: u16) -> &PageBytes {
        let (unit, at) = (usize::from(number) / SPAN_MAX, usize::from(number) % SPAN_MAX);
        match unit.checked_sub(1) {
            None => &self.memory.pages()[at],
            Some(loan) => &self.loans[loan].as_ref().expect("a page under way is kept").as_chunks().0[at],
        }
    }

    /// The numbers of a request's pages, in order.
    pub fn pages_of(&self, index: u16) -> impl Iterator<Item = u16> {
        let there = |page: u16| (page != END).then_some(page);
        std::iter::successors(there(self.entry(index).first), move |&page| {
            there(self.next_pages[usize::from(page)])
        })
    }

    fn page_mut(&mut self, number: u16) -> &mut PageBytes {
        let (unit, at) = (usize::from(number) / SPAN_MAX, usize::from(number) % SPAN_MAX);
        match unit.checked_sub(1) {
            None => &mut self.memory.pages_mut()[at],
            Some(loan) => {
                &mut self.loans[loan].as_mut().expect("a page under way is kept").as_chunks_mut().0[at]
            }
        }
    }

    /// Notes that a request failed at `offset`; its first error counts.
    fn fail(&mut self, index: u16, error: Errno, offset: u64) {
        let entry = &mut self.entries[usize::from(index)];
        entry.error.get_or_insert((error, offset));
        if let Work::Read { stream: Some(stream), .. } = entry.work {
            self.entries[usize::from(stream)].error.get_or_insert((error, offset));
        }
    }

    /// Notes that every piece of a long read has begun.
    pub fn issued(&mut self, stream: u16) {
        self.one_less(stream);
    }

    /// Notes the request engine's answer to the request of an entry.
    pub fn end(&mut self, answer: &Answer) {
        if let Err(fault) = answer.result {
            let at = match self.entry(answer.id).work {
                Work::Read { offset, .. } | Work::Held { offset, .. } => {
                    let page = offset / PAGE_SIZE as u64 + u64::from(answer.at);
                    (page * PAGE_SIZE as u64).max(offset)
                }
                _ => 0,
            };
            self.fail(answer.id, errno(fault), at);
        }
        self.one_less(answer.id);
    }

    /// Whether a [`Work::Held`] read is finished. The function that began it waits for this.
    pub fn is_finished(&self, index: u16) -> bool {
        self.entry(index).left == 0
    }

    fn one_less(&mut self, index: u16) {
        let entry = &mut self.entries[usize::from(index)];
        entry.left -= 1;
        if entry.left == 0 && matches!(entry.work, Work::Read { .. } | Work::Stream) {
            self.ready.push_back(index);
        }
    }

    /// The finished reads, in the order in which they finished.
    pub fn ready(&self) -> &VecDeque<u16> {
        &self.ready
    }

    /// Frees the entries of the first `count` finished reads, which have been answered.
    pub fn release_ready(&mut self, count: usize) {
        for _ in 0..count {
            let index = self.ready.pop_front().expect("as many as were answered");
            self.release(index);
        }
    }

    /// Frees the entry and the pages of a finished request.
    pub fn release(&mut self, index: u16) {
        let entry = &mut self.entries[usize::from(index)];
        let work = std::mem::replace(&mut entry.work, Work::Idle);
        self.writes -= usize::from(work == Work::Write);
        let mut page = std::mem::replace(&mut entry.first, END);
        while page != END {
            self.idle_pages.push(page);
            page = self.next_pages[usize::from(page)];
        }
        self.idle.push(index);
        if let Work::Read { stream: Some(stream), .. } = work {
            self.one_less(stream);
        }
        if self.is_empty() && self.loans[0].is_some() {
            self.give_back();
        }
    }

    /// Frees all entries and pages. No operation may be under way.
    pub fn reset(&mut self) {
        self.writes = 0;
        self.ready.clear();
        self.idle.clear();
        self.idle.extend((0..ENTRIES).rev());
        self.give_back();
    }

    /// Whether a write is under way.
    pub fn has_writes(&self) -> bool {
        self.writes > 0
    }

    /// Number of entries that hold a request.
    pub fn begun(&self) -> usize {
        usize::from(ENTRIES) - self.idle.len()
    }

    /// Whether nothing is under way and everything has been answered.
    pub fn is_empty(&self) -> bool {
        self.begun() == 0
    }
}

/// The memory of a read is its pages in this table. A write has no memory here, since its bytes
/// come in pieces.
impl RequestMemory for Flight {
    fn data(&self, _id: Id) -> &[u8] {
        &[]
    }

    fn pages(&mut self, id: Id, at: u32) -> &mut [PageBytes] {
        let entry = &mut self.entries[usize::from(id)];
        if entry.last.1 > at {
            entry.last = (entry.first, 0);
        }
        while entry.last.1 < at {
            entry.last = (self.next_pages[usize::from(entry.last.0)], entry.last.1 + 1);
        }
        let number = entry.last.0;
        std::slice::from_mut(self.page_mut(number))
    }
}

/// The protocol's error number of a fault.
pub(super) fn errno(fault: Fault) -> Errno {
    match weir_request::errno(fault) {
        rustix::io::Errno::NOSPC => Errno::NoSpace,
        _ => Errno::Io,
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use weir_request::{Op, Request, Span};

    /// The request engine's answer to a read.
    fn answer(id: Id, result: Result<(), (Fault, u32)>) -> Answer {
        let request = Request { op: Op::Read, span: Span { offset: 0, length: 0 }, fua: false };
        let (result, at) = result.map_or_else(|(fault, at)| (Err(fault), at), |()| (Ok(()), 0));
        Answer { id, request, result, at }
    }

    #[test]
    fn a_stream_is_ready_only_after_its_last_chunk_and_carries_the_first_error() {
        let mut flight = Flight::new(&Pool::new(4, LOAN_BYTES).unwrap()).unwrap();
        let stream = flight.begin(Work::Stream, 7, 0);
        let read = |offset| Work::Read { offset, length: 2 * PAGE_SIZE as u32, stream: Some(stream) };
        let (first, second) = (flight.begin(read(0), 7, 2), flight.begin(read(8192), 7, 2));
        flight.issued(stream);
        let ready = |flight: &Flight| flight.ready().iter().copied().collect::<Vec<_>>();
        flight.end(&answer(second, Err((Fault::Corrupt, 1))));
        assert_eq!(ready(&flight), [second]);
        flight.end(&answer(first, Err((Fault::Lost, 0))));
        assert_eq!(ready(&flight), [second, first]);
        flight.release_ready(2);
        assert_eq!(*flight.ready(), [stream], "only once its chunks were answered");
        assert_eq!(flight.entry(stream).error, Some((Errno::Io, 8192 + 4096)));
        flight.release_ready(1);
        assert!(flight.is_empty());
    }

    #[test]
    fn the_pages_of_an_entry_are_its_own_and_keep_their_order() {
        let mut flight = Flight::new(&Pool::new(4, LOAN_BYTES).unwrap()).unwrap();
        let read = Work::Read { offset: 0, length: 12288, stream: None };
        let [one, two] = [(); 2].map(|()| flight.begin(read, 1, 3));
        for (at, index) in [2, 0, 1].into_iter().flat_map(|at| [(at, one), (at, two)]) {
            flight.pages(index, at)[0].fill(10 * index as u8 + at as u8);
        }
        for index in [one, two] {
            let found: Vec<u8> = flight.pages_of(index).map(|number| flight.page(number)[9]).collect();
            assert_eq!(found, [0, 1, 2].map(|at| 10 * index as u8 + at));
        }
    }

    #[test]
    fn room_runs_out_and_comes_back() {
        let pool = Pool::new(6, LOAN_BYTES).unwrap();
        let mut flight = Flight::new(&pool).unwrap();
        let mut other = Flight::new(&pool).unwrap();
        let mut begun = Vec::new();
        while flight.has_room(SPAN_MAX) {
            begun.push(flight.begin(Work::Held { offset: 0, length: CHUNK_MAX }, 0, SPAN_MAX));
            let mark = begun.len() as u8;
            (0..SPAN_MAX as u32).for_each(|at| flight.pages(begun[begun.len() - 1], at)[0].fill(mark));
        }
        assert_eq!(begun.len(), 5);
        let marked = |index: u16, mark: u8| {
            flight.pages_of(index).all(|number| *flight.page(number) == [mark; PAGE_SIZE])
        };
        assert!(begun.iter().zip(1..).all(|(index, mark)| marked(*index, mark)), "no page is two entries'");
        // Another connection has room for three reads: one in its own memory, and one in each of
        // the two buffers that are left.
        let room = std::iter::from_fn(|| {
            other
                .has_room(SPAN_MAX)
                .then(|| other.begin(Work::Held { offset: 0, length: CHUNK_MAX }, 0, SPAN_MAX))
        });
        assert_eq!(room.count(), 3);
        assert!(flight.has_room(0), "writes need no pages");
        for index in begun {
            flight.end(&answer(index, Ok(())));
            assert!(flight.is_finished(index));
            flight.release(index);
        }
        assert!(flight.is_empty());
        assert!(
            std::iter::from_fn(|| pool.borrow()).collect::<Vec<_>>().len() == 4,
            "what was borrowed is given back"
        );
    }
}
