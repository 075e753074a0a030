//! Requests whose pages are under way at slow stores, and the pages that their reads will fill.
//!
//! A request is an entry that counts its outstanding operations. A completion names its entry by
//! the ticket. After the last one, the entry is ready to be answered. The size is fixed: requests
//! that do not fit wait in the socket.

use super::pool::{Loan, Pool};
use super::wire::Errno;
use crate::buffer::Buffer;
use std::collections::VecDeque;
use std::io;
use std::sync::Arc;
use weir_core::{PAGE_SIZE, PageBytes};
use weir_store::{Done, Fault, Ticket};

/// Bytes of the longest piece of a read that slow stores fetch at once.
pub(super) const CHUNK_MAX: u32 = 256 << 10;
/// Pages that such a piece touches when it is not aligned.
pub(super) const SPAN_MAX: usize = CHUNK_MAX as usize / PAGE_SIZE + 1;
/// Pages that reads under way may fill: a request of 1 MiB at any offset, and one chunk more, so
/// that the next is read while one is sent. The first chunk's pages are the connection's own; the
/// others are borrowed.
pub(super) const PAGES: usize = (1 + LOANS) * SPAN_MAX;
const LOANS: usize = 4;
/// Bytes of a borrowed unit.
pub(super) const LOAN_BYTES: usize = SPAN_MAX * PAGE_SIZE;
/// Most requests under way. More would not fit the pages, but writes need none.
const ENTRIES: usize = 256;

/// The kind of request that an entry holds.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) enum Work {
    /// The entry is free.
    Idle,
    /// A range of at most [`CHUNK_MAX`] bytes to be answered with data, by itself or as a part of a
    /// `stream`.
    Read { offset: u64, length: u32, stream: Option<u16> },
    /// A read that one function begins, waits for and answers.
    Held { offset: u64, length: u32 },
    /// The end of a long read; it counts the chunks that belong to it.
    Stream,
    /// A request that is answered only with success or an error.
    Write,
}

pub(super) struct Entry {
    pub work: Work,
    pub cookie: u64,
    /// The first error, and its offset in the export.
    pub error: Option<(Errno, u64)>,
    /// Outstanding operations, plus one until all have been issued.
    left: u32,
    span: usize,
    pages: [u16; SPAN_MAX],
}

impl Entry {
    /// The indices of the entry's pages in [`Flight::pages`], in order.
    pub fn pages(&self) -> &[u16] {
        &self.pages[..self.span]
    }
}

pub(super) struct Flight {
    entries: Box<[Entry]>,
    idle: Vec<u16>,
    memory: Buffer,
    pool: Arc<Pool>,
    loans: [Option<Loan>; LOANS],
    idle_pages: Vec<u16>,
    ready: VecDeque<u16>,
    /// Number of entries that write.
    writes: usize,
}

impl Flight {
    /// Makes the tables; `pool` must have units of [`LOAN_BYTES`].
    pub fn new(pool: &Arc<Pool>) -> io::Result<Flight> {
        let entry =
            || Entry { work: Work::Idle, cookie: 0, error: None, left: 0, span: 0, pages: [0; SPAN_MAX] };
        Ok(Flight {
            entries: std::iter::repeat_with(entry).take(ENTRIES).collect(),
            idle: (0..ENTRIES as u16).rev().collect(),
            memory: Buffer::new(SPAN_MAX * PAGE_SIZE)?,
            pool: Arc::clone(pool),
            loans: [const { None }; LOANS],
            idle_pages: Self::own_pages(Vec::with_capacity(PAGES)),
            ready: VecDeque::with_capacity(ENTRIES),
            writes: 0,
        })
    }

    fn own_pages(mut idle: Vec<u16>) -> Vec<u16> {
        idle.clear();
        idle.extend((0..SPAN_MAX as u16).rev());
        idle
    }

    /// Whether an entry with `span` pages can begin, with one entry to spare for its stream.
    /// Borrows pages for it if that helps.
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

    /// Gives the borrowed units back. Nothing may be under way.
    fn give_back(&mut self) {
        self.loans = [const { None }; LOANS];
        self.idle_pages = Self::own_pages(std::mem::take(&mut self.idle_pages));
    }

    /// The entry that [`begin`](Flight::begin) would take next, if there is room.
    pub fn next(&self) -> Option<u16> {
        self.idle.last().copied()
    }

    /// Takes an entry and `span` pages for it; the caller has checked that there is room. The entry
    /// is not ready before [`issued`](Flight::issued), however fast its operations are.
    pub fn begin(&mut self, work: Work, cookie: u64, span: usize) -> u16 {
        let index = self.idle.pop().expect("the caller has seen that there is room");
        self.writes += usize::from(work == Work::Write);
        let entry = &mut self.entries[usize::from(index)];
        (entry.work, entry.cookie, entry.error, entry.left, entry.span) = (work, cookie, None, 1, span);
        for page in &mut entry.pages[..span] {
            *page = self.idle_pages.pop().expect("the caller has seen that there is room");
        }
        if let Work::Read { stream: Some(stream), .. } = work {
            self.entries[usize::from(stream)].left += 1;
        }
        index
    }

    /// The ticket of the operation on the page at index `at` of an entry.
    pub fn ticket(index: u16, at: usize) -> Ticket {
        Ticket::from(index) << 8 | at as Ticket
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

    /// The memory of the page at index `at` of an entry.
    pub fn page_of(&mut self, index: u16, at: usize) -> &mut PageBytes {
        let number = usize::from(self.entries[usize::from(index)].pages[at]);
        let (unit, at) = (number / SPAN_MAX, number % SPAN_MAX);
        match unit.checked_sub(1) {
            None => &mut self.memory.pages_mut()[at],
            Some(loan) => {
                &mut self.loans[loan].as_mut().expect("a page under way is kept").as_chunks_mut().0[at]
            }
        }
    }

    /// Adds this many outstanding operations to the entry.
    pub fn queued(&mut self, index: u16, operations: usize) {
        self.entries[usize::from(index)].left += operations as u32;
    }

    /// Notes that the entry's request failed at `offset`; the first error counts.
    pub fn fail(&mut self, index: u16, error: Errno, offset: u64) {
        let entry = &mut self.entries[usize::from(index)];
        entry.error.get_or_insert((error, offset));
        if let Work::Read { stream: Some(stream), .. } = entry.work {
            self.entries[usize::from(stream)].error.get_or_insert((error, offset));
        }
    }

    /// Notes that every operation of the entry has been issued. Returns whether it is finished
    /// already.
    pub fn issued(&mut self, index: u16) -> bool {
        self.one_less(index)
    }

    /// Takes a completion of the volume.
    pub fn complete(&mut self, done: &Done<'_>) {
        let (index, at) = ((done.ticket >> 8) as u16, (done.ticket & 0xff) as usize);
        match (self.entry(index).work, done.result) {
            (Work::Read { offset, .. } | Work::Held { offset, .. }, Err(fault)) => {
                let page = offset / PAGE_SIZE as u64 + at as u64;
                self.fail(index, errno(fault), (page * PAGE_SIZE as u64).max(offset));
            }
            (_, Err(fault)) => self.fail(index, errno(fault), 0),
            (Work::Read { .. } | Work::Held { .. }, Ok(())) => match done.page {
                Some(page) => *self.page_of(index, at) = *page,
                None => self.fail(index, Errno::Io, 0),
            },
            (_, Ok(())) => {}
        }
        self.one_less(index);
    }

    /// Whether a held entry is finished. The function that began it waits for this.
    pub fn is_finished(&self, index: u16) -> bool {
        self.entry(index).left == 0
    }

    fn one_less(&mut self, index: u16) -> bool {
        let entry = &mut self.entries[usize::from(index)];
        entry.left -= 1;
        if entry.left == 0 && !matches!(entry.work, Work::Held { .. }) {
            self.ready.push_back(index);
        }
        entry.left == 0
    }

    /// The finished entries, in the order in which they finished.
    pub fn ready(&self) -> &VecDeque<u16> {
        &self.ready
    }

    /// Frees the first `count` finished entries, which have been answered.
    pub fn release_ready(&mut self, count: usize) {
        for _ in 0..count {
            let index = self.ready.pop_front().expect("as many as were answered");
            self.release(index);
        }
    }

    /// Frees a finished entry and its pages.
    pub fn release(&mut self, index: u16) {
        let entry = &mut self.entries[usize::from(index)];
        let work = std::mem::replace(&mut entry.work, Work::Idle);
        self.writes -= usize::from(work == Work::Write);
        self.idle_pages.extend_from_slice(&entry.pages[..entry.span]);
        self.idle.push(index);
        if let Work::Read { stream: Some(stream), .. } = work {
            self.one_less(stream);
        }
        if self.is_empty() && self.loans[0].is_some() {
            self.give_back();
        }
    }

    /// Clears all entries, once nothing is under way.
    pub fn reset(&mut self) {
        self.writes = 0;
        self.ready.clear();
        self.idle.clear();
        self.idle.extend((0..ENTRIES as u16).rev());
        self.give_back();
    }

    /// Whether a write is under way.
    pub fn has_writes(&self) -> bool {
        self.writes > 0
    }

    /// Number of entries that have begun and are not released.
    pub fn begun(&self) -> usize {
        ENTRIES - self.idle.len()
    }

    /// Whether nothing is under way and everything has been answered.
    pub fn is_empty(&self) -> bool {
        self.begun() == 0
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

    #[test]
    fn a_stream_is_ready_only_after_its_last_chunk_and_carries_the_first_error() {
        let mut flight = Flight::new(&Pool::new(4, LOAN_BYTES).unwrap()).unwrap();
        let stream = flight.begin(Work::Stream, 7, 0);
        let read = |offset| Work::Read { offset, length: 2 * PAGE_SIZE as u32, stream: Some(stream) };
        let (first, second) = (flight.begin(read(0), 7, 2), flight.begin(read(8192), 7, 2));
        for index in [first, second] {
            flight.queued(index, 1);
            flight.queued(index, 1);
            assert!(!flight.issued(index));
        }
        flight.issued(stream);
        let page = [3; PAGE_SIZE];
        let mut done = |index, at, result: Result<(), Fault>| {
            let page = result.is_ok().then_some(&page);
            flight.complete(&Done { ticket: Flight::ticket(index, at), result, page });
            flight.ready().iter().copied().collect::<Vec<_>>()
        };
        assert_eq!(done(second, 1, Err(Fault::Corrupt)), []);
        assert_eq!(done(second, 0, Ok(())), [second]);
        assert_eq!(done(first, 0, Ok(())), [second]);
        assert_eq!(done(first, 1, Err(Fault::Lost)), [second, first]);
        flight.release_ready(2);
        assert_eq!(*flight.ready(), [stream], "only once its chunks were answered");
        assert_eq!(flight.entry(stream).error, Some((Errno::Io, 8192 + 4096)));
        flight.release_ready(1);
        assert!(flight.is_empty());
    }

    #[test]
    fn the_bytes_of_a_completion_land_in_their_page() {
        let mut flight = Flight::new(&Pool::new(4, LOAN_BYTES).unwrap()).unwrap();
        let index = flight.begin(Work::Read { offset: 0, length: 8192, stream: None }, 1, 2);
        flight.queued(index, 1);
        *flight.page_of(index, 0) = [1; PAGE_SIZE];
        assert!(!flight.issued(index));
        flight.complete(&Done {
            ticket: Flight::ticket(index, 1),
            result: Ok(()),
            page: Some(&[2; PAGE_SIZE]),
        });
        let numbers = flight.entry(index).pages();
        assert_eq!((flight.page(numbers[0])[9], flight.page(numbers[1])[9]), (1, 2));
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
            (0..SPAN_MAX).for_each(|at| flight.page_of(begun[begun.len() - 1], at).fill(mark));
        }
        assert_eq!(begun.len(), 5);
        let marked = |index: u16, mark: u8| {
            flight.entry(index).pages().iter().all(|number| *flight.page(*number) == [mark; PAGE_SIZE])
        };
        assert!(begun.iter().zip(1..).all(|(index, mark)| marked(*index, mark)), "no page is two entries'");
        // The room left for another entry becomes less, but never zero.
        let room = std::iter::from_fn(|| {
            other
                .has_room(SPAN_MAX)
                .then(|| other.begin(Work::Held { offset: 0, length: CHUNK_MAX }, 0, SPAN_MAX))
        });
        assert_eq!(room.count(), 3);
        assert!(flight.has_room(0), "writes need no pages");
        for index in begun {
            assert!(flight.issued(index) && flight.is_finished(index));
            flight.release(index);
        }
        assert!(flight.is_empty());
        assert!(
            std::iter::from_fn(|| pool.borrow()).collect::<Vec<_>>().len() == 4,
            "what was borrowed is given back"
        );
    }
}
