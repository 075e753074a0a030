//! One connection in transmission, served by one thread: take what the client has sent, do all of it, answer all
//! of it.
//!
//! A batch is what one `recv` brought. Its writes are done while it is parsed. Its reads come afterwards: pages
//! that lie in memory go out from where they lie, verified, in the same `sendmsg` as the acknowledgements
//! (the protocol lets replies change places). What a slow store must fetch is started, and answered when it
//! arrives. Nothing here allocates: what does not fit waits in the socket.

use super::flight::{CHUNK_MAX, Flight, PAGES, SPAN_MAX, Work, errno};
use super::handshake::Negotiated;
use super::slices::{Slices, take_front};
use super::stats::Counters;
use super::transmission::{
    self as reply, Event, Parser, Payload, Request, Rules, Violation, data_chunk, error_offset_chunk,
    hole_chunk, none_chunk, simple_reply,
};
use super::wire::{Errno, command, command_flag, extent_flag};
use crate::buffer::Buffer;
use crate::spin::Spin;
use rustix::event::{PollFd, PollFlags, Timespec};
use rustix::net::RecvFlags;
use std::fmt;
use std::io;
use std::os::fd::BorrowedFd;
use std::time::Duration;
use weir_core::{PAGE_SIZE, PageNo};
use weir_store::Progress;
use weir_volume::{Guard, Lane, View};

/// What one `recv` takes at most: a queue depth of 16 with 16 KiB each; larger payloads stream through it.
const INPUT_BYTES: usize = 256 << 10;
/// Payload of one `sendmsg`, and the longest piece of a read that is proven intact and sent at once from where it lies:
/// it stays in the second-level cache from the one to the other. What the client does not take is copied, so
/// this bounds that buffer too.
const PIECE_MAX: u32 = 512 << 10;
/// How long pages may be kept in place while the client takes them; what it has not taken by then is copied. A client that reads
/// has room for more within microseconds.
const PINNED_WAIT: Duration = Duration::from_millis(1);
/// Room for the headers of one round and for acknowledgements that wait for it.
const HEADS_BYTES: usize = 32 << 10;
/// The longest header with its slack.
const HEAD_MAX: usize = 64;
/// Reads of a batch that wait to be answered together.
const READS_MAX: usize = 256;
/// Extents of one block status.
const EXTENTS_MAX: usize = 512;
/// How long a thread sleeps at most while slow stores work; they wake it earlier.
const STORE_NAP: Timespec = Timespec { tv_sec: 1, tv_nsec: 0 };

static ZEROS: [u8; PAGE_SIZE] = [0; PAGE_SIZE];

/// How a connection ended.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) enum Ending {
    /// The client said so.
    Disconnect,
    /// The client closed the connection, or the server is going down.
    Closed,
    /// The same, in the middle of a request.
    Torn,
    /// The client does not keep to the protocol.
    Violation(Violation),
    /// The system reports an error.
    Broken(rustix::io::Errno),
    /// The client does not take its replies.
    Stalled,
    /// A page could no longer be proven intact after the header of its reply had left.
    Lost,
}

impl Ending {
    /// Whether it is the client's usual way to leave.
    pub fn is_usual(&self) -> bool {
        matches!(self, Ending::Disconnect | Ending::Closed)
    }
}

impl fmt::Display for Ending {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Ending::Disconnect => f.write_str("the client disconnected"),
            Ending::Closed => f.write_str("the connection was closed"),
            Ending::Torn => f.write_str("the client left in the middle of a request"),
            Ending::Violation(violation) => write!(f, "{violation}"),
            // By its number: its name comes from libc, through the allocator.
            Ending::Broken(errno) => write!(f, "the connection broke: errno {}", errno.raw_os_error()),
            Ending::Stalled => f.write_str("the client does not read its replies; connection dropped"),
            Ending::Lost => f.write_str("a page was lost while it was being sent; connection dropped"),
        }
    }
}

impl From<rustix::io::Errno> for Ending {
    fn from(errno: rustix::io::Errno) -> Self {
        match errno {
            // The socket's own timeout on sends.
            rustix::io::Errno::AGAIN => Ending::Stalled,
            // The client closed the connection, with bytes unread or replies under way.
            rustix::io::Errno::CONNRESET | rustix::io::Errno::PIPE => Ending::Closed,
            errno => Ending::Broken(errno),
        }
    }
}

/// A read of the batch.
#[derive(Clone, Copy)]
struct Read {
    request: Request,
    /// Bytes answered.
    done: u32,
    /// It is not for the common `sendmsg`: it must be fetched from a slow store, or takes several sends between
    /// which no other reply may come.
    apart: bool,
}

/// The write whose payload is arriving, or whose parts are being issued.
#[derive(Clone, Copy)]
struct Write {
    cookie: u64,
    error: Option<Errno>,
    /// Its entry, once an operation of it did not finish at once.
    entry: Option<u16>,
}

/// What the thread of a connection works with, all of it taken before the process is sealed.
pub(super) struct Worker {
    input: Buffer,
    work: Desk,
}

/// All of a worker but its input, which is being looked at while this works.
struct Desk {
    lane: Lane,
    flight: Flight,
    reads: Vec<Read>,
    acks: Vec<u8>,
    heads: Buffer,
    rest: Buffer,
    write: Option<Write>,
}

/// A connection, for as long as it is served.
struct Connection<'a> {
    socket: BorrowedFd<'a>,
    rules: Rules,
    counters: &'a Counters,
    desk: &'a mut Desk,
}

impl Worker {
    /// Takes the memory.
    ///
    /// # Errors
    /// When it cannot be had.
    pub fn new(lane: Lane) -> io::Result<Worker> {
        Ok(Worker {
            input: Buffer::new(INPUT_BYTES)?,
            work: Desk {
                lane,
                flight: Flight::new()?,
                reads: Vec::with_capacity(READS_MAX),
                acks: Vec::with_capacity(HEADS_BYTES),
                heads: Buffer::new(HEADS_BYTES)?,
                rest: Buffer::new(PIECE_MAX as usize + 2 * HEADS_BYTES)?,
                write: None,
            },
        })
    }

    /// Whether its memory is pinned in RAM.
    pub fn is_locked(&self) -> bool {
        self.input.is_locked() && self.work.heads.is_locked() && self.work.rest.is_locked()
    }

    /// Serves a connection until it ends. `early` is what the client has sent after its last option.
    pub fn serve(
        &mut self,
        socket: BorrowedFd<'_>,
        negotiated: Negotiated,
        read_only: bool,
        early: &[u8],
        spin: &mut Spin<'_>,
        counters: &Counters,
    ) -> Ending {
        let rules = Rules {
            bytes: self.work.lane.volume().bytes(),
            read_only,
            structured: negotiated.structured,
            allocation: negotiated.allocation,
            unfragmented_max: CHUNK_MAX,
        };
        let mut connection = Connection { socket, rules, counters, desk: &mut self.work };
        let ending = match connection.run(&mut self.input, early, spin) {
            Ok(ending) | Err(ending) => ending,
        };
        connection.clear();
        ending
    }
}

impl Connection<'_> {
    fn run(&mut self, input: &mut [u8], early: &[u8], spin: &mut Spin<'_>) -> Result<Ending, Ending> {
        let mut parser = Parser::new();
        input[..early.len()].copy_from_slice(early);
        let mut filled = early.len();
        loop {
            self.plan(&parser, &input[..filled]);
            let mut unparsed = &input[..filled];
            let last = loop {
                match parser.next(&mut unparsed) {
                    Ok(Some(Event::Request(request))) if request.command == command::DISC => {
                        break Some(Ending::Disconnect);
                    }
                    Ok(Some(Event::Request(request))) => self.request(request)?,
                    Ok(Some(Event::Payload(payload))) => self.payload(&payload)?,
                    Ok(None) => break None,
                    Err(violation) => break Some(Ending::Violation(violation)),
                }
            };
            let left = unparsed.len();
            self.end_batch()?;
            if let Some(ending) = last {
                self.finish_flight()?;
                return Ok(ending);
            }
            // Less than a page and a header, so this is cheap.
            input.copy_within(filled - left..filled, 0);
            filled = left;
            let received = self.receive(&mut input[filled..], spin)?;
            if received == 0 {
                self.finish_flight()?;
                let torn = filled > 0 || self.desk.write.is_some();
                return Ok(if torn { Ending::Torn } else { Ending::Closed });
            }
            filled += received;
        }
    }

    /// Announces what has been received, so that the stores know how much comes before the first of it.
    fn plan(&mut self, parser: &Parser, received: &[u8]) {
        let Some(mut batch) = self.desk.lane.batch() else { return };
        // More than can be under way at once would be counted for nothing.
        let mut room = PAGES as u32;
        let writes = parser.survey(received, |request| {
            if request.command == command::READ && request.length > 0 && self.rules.check(request).is_ok() {
                let first = (request.offset / PAGE_SIZE as u64) as u32;
                let last = ((request.offset + u64::from(request.length) - 1) / PAGE_SIZE as u64) as u32;
                let pages = room.min(last - first + 1);
                room -= pages;
                batch.reads((first..first + pages).map(PageNo));
            }
        });
        batch.writes(writes);
        batch.announce();
    }

    /// Waits for bytes of the client. 0 means that there will be none.
    fn receive(&mut self, into: &mut [u8], spin: &mut Spin<'_>) -> Result<usize, Ending> {
        while !self.desk.flight.is_empty() {
            // Looking at the store first: its completions are what clients wait for.
            if !self.take_completions()?
                && let Some(received) = self.listen(into)?
            {
                self.counters.batches.add(1);
                return Ok(received);
            }
        }
        if let Some(received) = spin.attempt(|| receive_now(self.socket, into))? {
            self.counters.batches.add(1);
            return Ok(received);
        }
        loop {
            match rustix::net::recv(self.socket, &mut *into, RecvFlags::empty()) {
                Ok((received, _)) => {
                    spin.woke();
                    self.counters.batches.add(1);
                    return Ok(received);
                }
                Err(rustix::io::Errno::INTR) => {}
                Err(errno) => return Err(errno.into()),
            }
        }
    }

    /// With operations at slow stores: sleeps until the client or a store has something; takes it if it is the
    /// client.
    fn listen(&mut self, into: &mut [u8]) -> Result<Option<usize>, Ending> {
        if !self.desk.lane.must_poll() {
            self.sleep_for(true)?;
        }
        receive_now(self.socket, into)
    }

    /// Sleeps until a slow store has something, or, if `client`, until the client has.
    fn sleep_for(&self, client: bool) -> Result<(), Ending> {
        const FDS_MAX: usize = 17;
        let listen = |fd| PollFd::from_borrowed_fd(fd, PollFlags::IN);
        let mut fds: [PollFd<'_>; FDS_MAX] = std::array::from_fn(|_| listen(self.socket));
        let mut count = usize::from(client);
        for fd in self.desk.lane.wake_fds().take(FDS_MAX - 1) {
            fds[count] = listen(fd);
            count += 1;
        }
        match rustix::event::poll(&mut fds[..count], Some(&STORE_NAP)) {
            Ok(_) | Err(rustix::io::Errno::INTR) => Ok(()),
            Err(errno) => Err(errno.into()),
        }
    }

    fn request(&mut self, request: Request) -> Result<(), Ending> {
        let counters = self.counters;
        counters.requests.add(1);
        let checked = self.rules.check(&request);
        match (request.command, checked) {
            // A refused write's payload must be consumed all the same.
            (command::WRITE, checked) => {
                counters.writes.add(1);
                counters.bytes_written.add(u64::from(request.length));
                let write = Write { cookie: request.cookie, error: checked.err(), entry: None };
                if request.length == 0 {
                    return self.end_write(write);
                }
                self.desk.write = Some(write);
                Ok(())
            }
            (_, Err(error)) => self.refuse(&request, error),
            (command::READ, Ok(())) => {
                counters.reads.add(1);
                counters.bytes_read.add(u64::from(request.length));
                if request.length == 0 {
                    return if self.rules.structured {
                        self.acknowledge(&none_chunk(request.cookie))
                    } else {
                        self.acknowledge(&simple_reply(request.cookie, None))
                    };
                }
                if self.desk.reads.len() == READS_MAX {
                    self.answer_reads()?;
                }
                let apart = !self.rules.structured && request.length > PIECE_MAX;
                self.desk.reads.push(Read { request, done: 0, apart });
                Ok(())
            }
            (command::TRIM, Ok(())) => {
                counters.trims.add(1);
                let pages = whole_pages(&request);
                if !pages.is_empty() {
                    self.desk.lane.discard(PageNo(pages.start), pages.end - pages.start);
                }
                self.acknowledge(&simple_reply(request.cookie, None))
            }
            (command::WRITE_ZEROES, Ok(())) => {
                counters.trims.add(1);
                self.write_zeroes(&request)
            }
            (command::BLOCK_STATUS, Ok(())) => self.block_status(&request),
            // A flush has nothing to wait for: what was acknowledged is where it will stay, in the map that every
            // connection shares. A page that will be read lies in the fastest place already.
            _ => self.acknowledge(&simple_reply(request.cookie, None)),
        }
    }

    fn payload(&mut self, payload: &Payload<'_>) -> Result<(), Ending> {
        let mut write = self.desk.write.take().expect("the parser gives payload after its write");
        if write.error.is_none() {
            let first = (payload.offset / PAGE_SIZE as u64) as u32;
            let within = (payload.offset % PAGE_SIZE as u64) as usize;
            let (pages, part) = payload.bytes.as_chunks::<PAGE_SIZE>();
            if within == 0 && part.is_empty() {
                let done = self.desk.lane.write_run(PageNo(first), pages);
                for (page, number) in pages.iter().zip(first..).skip(done) {
                    self.write_with(&mut write, |lane, ticket| lane.write(ticket, PageNo(number), page))?;
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

    /// Makes one operation of `write` happen, now or later.
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
                    flight.queued(entry);
                }
                Progress::Full => {
                    self.make_room()?;
                    continue;
                }
            }
            return Ok(());
        }
    }

    /// The last operation of `write` has been issued.
    fn end_write(&mut self, write: Write) -> Result<(), Ending> {
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

    fn write_zeroes(&mut self, request: &Request) -> Result<(), Ending> {
        let pages = whole_pages(request);
        let end = request.offset + u64::from(request.length);
        let (whole_start, whole_end) =
            (u64::from(pages.start) * PAGE_SIZE as u64, u64::from(pages.end) * PAGE_SIZE as u64);
        if pages.is_empty() && request.length > 0 && request.flags & command_flag::FAST_ZERO != 0 {
            // Parts of pages cost as much as writing them.
            return self.refuse(request, Errno::NotSupported);
        }
        let mut write = Write { cookie: request.cookie, error: None, entry: None };
        let edges = if whole_start <= whole_end {
            [(request.offset, whole_start.min(end)), (whole_end.max(request.offset), end)]
        } else {
            // Within one page, touching neither of its ends.
            [(request.offset, end), (end, end)]
        };
        for (from, to) in edges {
            if from < to {
                let page = PageNo((from / PAGE_SIZE as u64) as u32);
                let within = (from % PAGE_SIZE as u64) as usize;
                let zeros = &ZEROS[..(to - from) as usize];
                self.write_with(&mut write, |lane, ticket| lane.write_part(ticket, page, within, zeros))?;
            }
        }
        if !pages.is_empty() {
            let (first, count) = (PageNo(pages.start), pages.end - pages.start);
            if request.flags & command_flag::NO_HOLE != 0 {
                self.desk.lane.zero(first, count);
            } else {
                self.desk.lane.discard(first, count);
            }
        }
        self.end_write(write)
    }

    fn block_status(&mut self, request: &Request) -> Result<(), Ending> {
        let lane = &self.desk.lane;
        let flags = |page: u64| {
            let page = PageNo(page as u32);
            match (lane.mapped(page), lane.known_zero(page)) {
                (false, _) => extent_flag::HOLE | extent_flag::ZERO,
                (true, true) => extent_flag::ZERO,
                (true, false) => 0,
            }
        };
        let end = request.offset + u64::from(request.length);
        let most = if request.flags & command_flag::REQ_ONE != 0 { 1 } else { EXTENTS_MAX };
        let mut extents = [[0u8; 8]; EXTENTS_MAX];
        let (mut count, mut at) = (0, request.offset);
        while at < end && count < most {
            let start = at;
            let kind = flags(at / PAGE_SIZE as u64);
            while at < end && flags(at / PAGE_SIZE as u64) == kind {
                at = (at / PAGE_SIZE as u64 + 1) * PAGE_SIZE as u64;
            }
            extents[count] = reply::extent((at.min(end) - start) as u32, kind);
            count += 1;
        }
        self.make_ack_room(HEAD_MAX + 8 * count)?;
        self.acknowledge(&reply::block_status_chunk(request.cookie, count))?;
        self.acknowledge(extents[..count].as_flattened())
    }

    /// Answers a request with an error.
    fn refuse(&mut self, request: &Request, error: Errno) -> Result<(), Ending> {
        self.count_error(Some(error));
        let structured =
            self.rules.structured && matches!(request.command, command::READ | command::BLOCK_STATUS);
        if structured {
            self.acknowledge(&reply::error_chunk(request.cookie, error))
        } else {
            self.acknowledge(&simple_reply(request.cookie, Some(error)))
        }
    }

    fn count_error(&self, error: Option<Errno>) {
        self.counters.errors.add(u64::from(error.is_some()));
    }

    /// Queues a reply without data for the next send.
    fn acknowledge(&mut self, reply: &[u8]) -> Result<(), Ending> {
        self.make_ack_room(reply.len())?;
        self.desk.acks.extend_from_slice(reply);
        Ok(())
    }

    fn make_ack_room(&mut self, bytes: usize) -> Result<(), Ending> {
        if self.desk.acks.len() + bytes > HEADS_BYTES { self.send_acks() } else { Ok(()) }
    }

    fn send_acks(&mut self) -> Result<(), Ending> {
        if self.desk.acks.is_empty() {
            return Ok(());
        }
        self.desk.lane.submit();
        let mut slices = Slices::new();
        slices.push(&self.desk.acks);
        slices.send_all(self.socket)?;
        self.desk.acks.clear();
        Ok(())
    }

    /// Everything received has been looked at: starts what is queued and answers what is done.
    fn end_batch(&mut self) -> Result<(), Ending> {
        self.answer_reads()?;
        self.send_acks()?;
        self.desk.lane.submit();
        if !self.desk.flight.is_empty() {
            self.take_completions()?;
        }
        Ok(())
    }

    /// Answers the reads of the batch, together with its acknowledgements; those for slow stores are begun.
    fn answer_reads(&mut self) -> Result<(), Ending> {
        if self.desk.reads.is_empty() {
            return Ok(());
        }
        self.desk.lane.submit();
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

    /// One `sendmsg`: the acknowledgements, and as many reads from the `at`th on as fit. Returns the first that was not
    /// reached, or not completely answered.
    fn round(&mut self, mut at: usize) -> Result<usize, Ending> {
        let Desk { lane, reads, acks, heads, rest, .. } = &mut *self.desk;
        let guard = lane.pin();
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
            let length = (read.request.length - read.done).min(PIECE_MAX);
            let fits = payload == 0 || payload + length <= PIECE_MAX;
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
        if left > 0 {
            let mut slices = Slices::new();
            slices.push(&rest[..left]);
            slices.send_all(self.socket)?;
        }
        Ok(at)
    }

    /// Begins the rest of a read at slow stores.
    fn fetch(&mut self, read: &Read) -> Result<(), Ending> {
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
            // Chunks meet between pages, so that no page is read for two of them.
            let whole = CHUNK_MAX - (offset % PAGE_SIZE as u64) as u32;
            let length = (request.length - done).min(whole);
            let index = self.begin(Work::Read { offset, length, stream }, request.cookie, offset, length)?;
            self.desk.flight.issued(index);
            done += length;
        }
        if let Some(stream) = stream {
            self.desk.flight.issued(stream);
        }
        Ok(())
    }

    /// Begins an entry and queues its reads.
    fn begin(&mut self, work: Work, cookie: u64, offset: u64, length: u32) -> Result<u16, Ending> {
        let first = offset / PAGE_SIZE as u64;
        let span = ((offset + u64::from(length)).div_ceil(PAGE_SIZE as u64) - first) as usize;
        while !self.desk.flight.has_room(span) {
            self.make_room()?;
        }
        let index = self.desk.flight.begin(work, cookie, span);
        let mut at = 0;
        while at < span {
            let Desk { lane, flight, .. } = &mut *self.desk;
            let number = first + at as u64;
            match lane.read(Flight::ticket(index, at), PageNo(number as u32), flight.page_of(index, at)) {
                Progress::Done(Ok(())) => {}
                Progress::Done(Err(fault)) => {
                    flight.fail(index, errno(fault), (number * PAGE_SIZE as u64).max(offset));
                }
                Progress::Queued => flight.queued(index),
                Progress::Full => {
                    self.make_room()?;
                    continue;
                }
            }
            at += 1;
        }
        Ok(index)
    }

    /// Answers a long read by one simple reply: once its header has left there is no way to report an error, so
    /// all of it is proven intact first, and again while it is sent, as it may be rewritten in between.
    fn stream(&mut self, request: &Request) -> Result<(), Ending> {
        self.send_acks()?;
        self.finish_flight()?;
        let chunks = (0..request.length)
            .step_by(CHUNK_MAX as usize)
            .map(|done| (request.offset + u64::from(done), (request.length - done).min(CHUNK_MAX)));
        for (offset, length) in chunks.clone() {
            if let Err(error) = self.with_chunk(offset, length, None, false)? {
                return self.refuse(request, error);
            }
        }
        let mut head = Some(simple_reply(request.cookie, None));
        for (offset, length) in chunks {
            if self.with_chunk(offset, length, head.take(), true)?.is_err() {
                return Err(Ending::Lost);
            }
        }
        Ok(())
    }

    /// Proves a range of at most [`CHUNK_MAX`] bytes intact and, if `send`, sends it behind `head`.
    fn with_chunk(
        &mut self,
        offset: u64,
        length: u32,
        head: Option<[u8; 16]>,
        send: bool,
    ) -> Result<Result<(), Errno>, Ending> {
        let head = head.as_ref().map_or(&[][..], |head| head);
        let Desk { lane, rest, .. } = &mut *self.desk;
        let guard = lane.pin();
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
                let mut slices = Slices::new();
                slices.push(&rest[..left?]);
                slices.send_all(self.socket)?;
                return Ok(Ok(()));
            }
            Found::Fault { error, .. } => return Ok(Err(error)),
            Found::Elsewhere => {}
        }
        let index = self.begin(Work::Held { offset, length }, 0, offset, length)?;
        self.desk.flight.issued(index);
        while !self.desk.flight.is_finished(index) {
            self.make_room()?;
        }
        let entry = self.desk.flight.entry(index);
        let result = entry.error.map_or(Ok(()), |(error, _)| Err(error));
        if send && result.is_ok() {
            let mut slices = Slices::new();
            slices.push(head);
            push_pages(&self.desk.flight, index, offset, length, &mut slices);
            slices.send_all(self.socket)?;
        }
        self.desk.flight.release(index);
        Ok(result)
    }

    /// Waits until something that is under way has come back, and answers what is finished.
    fn make_room(&mut self) -> Result<(), Ending> {
        self.desk.lane.submit();
        let before = self.desk.lane.in_flight();
        // An operation that has come back made room, whether or not its request is finished.
        if self.take_completions()? || self.desk.lane.in_flight() < before || before == 0 {
            return Ok(());
        }
        self.send_acks()?;
        if !self.desk.lane.must_poll() {
            self.sleep_for(false)?;
        }
        self.take_completions().map(drop)
    }

    /// Answers everything that is under way.
    fn finish_flight(&mut self) -> Result<(), Ending> {
        while !self.desk.flight.is_empty() {
            self.make_room()?;
        }
        Ok(())
    }

    /// Takes what slow stores have finished, and answers the requests of which that was the last. Returns whether
    /// there were any.
    fn take_completions(&mut self) -> Result<bool, Ending> {
        let Desk { lane, flight, .. } = &mut *self.desk;
        lane.poll(&mut |done| flight.complete(&done));
        let any = !flight.ready().is_empty();
        while !self.desk.flight.ready().is_empty() {
            self.answer_ready()?;
        }
        Ok(any)
    }

    /// One `sendmsg` with the answers to finished requests.
    fn answer_ready(&mut self) -> Result<(), Ending> {
        let Desk { flight, heads, .. } = &mut *self.desk;
        let structured = self.rules.structured;
        let mut heads: &mut [u8] = heads;
        let mut slices = Slices::new();
        let (mut count, mut errors) = (0, 0);
        for &index in flight.ready() {
            if slices.room() < SPAN_MAX + 1 || heads.len() < HEAD_MAX {
                break;
            }
            let entry = flight.entry(index);
            let cookie = entry.cookie;
            count += 1;
            errors +=
                u64::from(entry.error.is_some() && !matches!(entry.work, Work::Read { stream: Some(_), .. }));
            match (entry.work, entry.error) {
                (Work::Read { stream: Some(_), .. }, Some(_)) => {} // its stream says so, at the end
                (Work::Read { offset, length, stream }, None) => {
                    let head = if structured {
                        take_front(&mut heads, &data_chunk(cookie, stream.is_none(), offset, length))
                    } else {
                        take_front(&mut heads, &simple_reply(cookie, None))
                    };
                    slices.push(head);
                    push_pages(flight, index, offset, length, &mut slices);
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
        slices.send_all(self.socket)?;
        flight.release_ready(count);
        self.counters.errors.add(errors);
        Ok(())
    }

    /// Leaves the desk as a new connection expects it: nothing of this one may come back later.
    fn clear(&mut self) {
        let Desk { lane, flight, reads, acks, write, .. } = &mut *self.desk;
        lane.submit();
        loop {
            lane.poll(&mut |done| flight.complete(&done));
            if lane.in_flight() == 0 {
                break;
            }
            // Stores answer or fail in bounded time; until then a short nap costs nobody anything.
            std::thread::sleep(std::time::Duration::from_millis(1));
        }
        flight.reset();
        reads.clear();
        acks.clear();
        *write = None;
    }
}

enum Composed {
    Answered,
    Apart,
    Failed,
}

/// Adds the answer to the next `length` bytes of `read` to `slices`, if they lie in memory.
fn compose<'a>(
    guard: &'a Guard<'_>,
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
    /// All of it, verified. `zeros`: known to be nothing but zeros.
    Bytes { zeros: bool },
    /// Some of it lies where only [`Lane::read`] reaches.
    Elsewhere,
    /// The page with the byte `at` cannot be read.
    Fault { error: Errno, at: u64 },
}

/// Adds the bytes of a range to `slices`, page by page, from where they lie.
fn view_range<'a>(guard: &'a Guard<'_>, offset: u64, length: u32, slices: &mut Slices<'a>) -> Found {
    let (end, mut at, mut zeros) = (offset + u64::from(length), offset, true);
    while at < end {
        let page = at / PAGE_SIZE as u64;
        let next = end.min((page + 1) * PAGE_SIZE as u64);
        let within = (at % PAGE_SIZE as u64) as usize;
        if next + (PAGE_SIZE as u64) < end {
            guard.prefetch(PageNo(page as u32 + 2));
        }
        let bytes = match guard.view(PageNo(page as u32)) {
            View::Bytes(bytes) => {
                zeros = false;
                bytes
            }
            View::Fill(0) => &ZEROS,
            View::Fill(_) | View::Elsewhere => return Found::Elsewhere,
            View::Fault(fault) => return Found::Fault { error: errno(fault), at },
        };
        slices.push(&bytes[within..within + (next - at) as usize]);
        at = next;
    }
    Found::Bytes { zeros }
}

/// Adds the bytes that an entry has read.
fn push_pages<'a>(flight: &'a Flight, index: u16, offset: u64, length: u32, slices: &mut Slices<'a>) {
    let (end, mut at) = (offset + u64::from(length), offset);
    for &number in flight.entry(index).pages() {
        let within = (at % PAGE_SIZE as u64) as usize;
        let take = (PAGE_SIZE - within).min((end - at) as usize);
        slices.push(&flight.page(number)[within..within + take]);
        at += take as u64;
    }
}

/// Pages that a range of `length` bytes touches, wherever it begins.
fn span(length: u32) -> usize {
    length as usize / PAGE_SIZE + 2
}

/// The pages that a range covers completely; empty, with its ends anywhere, where there is none.
fn whole_pages(request: &Request) -> std::ops::Range<u32> {
    let end = request.offset + u64::from(request.length);
    let first = request.offset.div_ceil(PAGE_SIZE as u64) as u32;
    first..((end / PAGE_SIZE as u64) as u32)
}

/// What the client has sent, if it has sent anything.
fn receive_now(socket: BorrowedFd<'_>, into: &mut [u8]) -> Result<Option<usize>, Ending> {
    match rustix::net::recv(socket, into, RecvFlags::DONTWAIT) {
        Ok((received, _)) => Ok(Some(received)),
        Err(rustix::io::Errno::AGAIN | rustix::io::Errno::INTR) => Ok(None),
        Err(errno) => Err(errno.into()),
    }
}
