//! One connection in transmission, served by one thread. The thread takes all requests that the
//! client has sent, does them, and answers them.
//!
//! A batch is the bytes of one `recv`. Its writes are done while the bytes are parsed. Its reads
//! come afterwards. Pages in host memory are sent from where they lie, verified, in the same
//! `sendmsg` as the acknowledgements (the protocol allows replies in any order). Reads from a slow
//! store are started, and answered when their pages arrive. No step allocates: bytes that do not
//! fit wait in the socket.

mod block_status;
mod ending;
mod presence;
mod read;
mod slow;
mod write;

pub(super) use ending::Ending;

use super::flight::{CHUNK_MAX, ENTRIES, Flight, LOAN_BYTES, PAGES};
use super::handshake::Negotiated;
use super::pool::Pool;
use super::stats::Counters;
use super::transmission::{self as reply, Event, Parser, Request, Rules, none_chunk, simple_reply};
use super::wire::{Errno, command};
use crate::buffer::Buffer;
use crate::spin::Spin;
use presence::Presence;
use rustix::net::RecvFlags;
use std::io;
use std::os::fd::BorrowedFd;
use std::sync::Arc;
use std::sync::atomic::AtomicBool;
use std::time::Instant;
use weir_core::{PAGE_SIZE, PageNo};
use weir_device::{Coming, PageLane};
use weir_request::{Op, Requests, Span};
use weir_store::Fault;

/// Largest number of bytes of one `recv`: enough for 16 writes of 16 KiB at once. Larger payloads
/// stream through the buffer.
const INPUT_BYTES: usize = 256 << 10;
/// Largest number of payload bytes in one `sendmsg`. It is also the length of the longest piece of
/// a read that the thread verifies and then sends without a copy. Between the two steps, a piece of
/// this length stays in the processor's second-level cache. The thread borrows a buffer for the
/// whole piece, since it must copy the bytes that the client does not take.
const PIECE_MAX: u32 = 512 << 10;
/// The longest piece of a read that is sent without a borrowed buffer: the size of the connection's
/// own buffer.
const OWN_PIECE_MAX: u32 = 64 << 10;
/// Bytes of the buffer for the headers of one `sendmsg`, and for acknowledgements that wait for the
/// next one.
const HEADS_BYTES: usize = 32 << 10;
/// Bytes of the longest header, with some to spare.
const HEAD_MAX: usize = 64;
/// Largest number of reads of a batch that wait to be answered together.
const READS_MAX: usize = 256;

static ZEROS: [u8; PAGE_SIZE] = [0; PAGE_SIZE];

/// A read of the batch.
#[derive(Clone, Copy)]
struct Read {
    request: Request,
    /// Number of the read's bytes that have been answered so far.
    done: u32,
    /// The read cannot use the `sendmsg` of the batch. Its pages must be fetched from a slow store,
    /// or it takes several sends, between which no other reply may come.
    apart: bool,
}

/// The write whose payload is arriving, or whose operations are being issued.
#[derive(Clone, Copy)]
struct Write {
    cookie: u64,
    error: Option<Errno>,
    /// The write's entry, unless the write was refused.
    index: Option<u16>,
}

/// The state that all connections share: memory for long requests. The connections share it because
/// few of them answer a long request at a time.
pub(super) struct Shared {
    /// Buffers for the parts of long reads that clients have not taken yet.
    rests: Arc<Pool>,
    /// Memory for pages on their way from slow stores.
    chunks: Arc<Pool>,
}

/// Number of connections that can answer long requests at the same time without a wait for memory.
const LONG_AT_ONCE: usize = 4;

impl Shared {
    /// Allocates the memory that `connections` connections share.
    ///
    /// # Errors
    /// Fails when the memory cannot be had.
    pub fn new(connections: usize) -> io::Result<Self> {
        let busy = connections.min(LONG_AT_ONCE);
        Ok(Shared {
            rests: Pool::new(busy, PIECE_MAX as usize + 2 * HEADS_BYTES)?,
            // Each connection also has memory of its own, for one piece of a long read.
            chunks: Pool::new(3 * busy, LOAN_BYTES)?,
        })
    }

    /// Whether the shared memory is locked in RAM.
    pub fn is_locked(&self) -> bool {
        self.rests.is_locked() && self.chunks.is_locked()
    }
}

/// The memory of a connection's thread, all taken before the process is sealed.
pub(super) struct Worker<L> {
    input: Buffer,
    work: Desk<L>,
}

/// The state of a connection's thread, apart from its input buffer. The input buffer is a value of
/// its own, because it stays borrowed while the requests in it are done.
struct Desk<L> {
    requests: Requests<L>,
    flight: Flight,
    reads: Vec<Read>,
    acks: Vec<u8>,
    heads: Buffer,
    rest: Buffer,
    rests: Arc<Pool>,
    write: Option<Write>,
}

/// A connection and its thread's desk, while the thread serves the connection.
struct Connection<'a, L> {
    socket: BorrowedFd<'a>,
    rules: Rules,
    counters: &'a Counters,
    desk: &'a mut Desk<L>,
    presence: Presence<'a>,
}

impl<L: PageLane> Worker<L> {
    /// Allocates the memory of one thread.
    ///
    /// # Errors
    /// Fails when the memory cannot be had.
    pub fn new(lane: L, shared: &Shared) -> io::Result<Self> {
        Ok(Worker {
            input: Buffer::new(INPUT_BYTES)?,
            work: Desk {
                requests: Requests::new(lane, ENTRIES),
                flight: Flight::new(&shared.chunks)?,
                reads: Vec::with_capacity(READS_MAX),
                acks: Vec::with_capacity(HEADS_BYTES),
                heads: Buffer::new(HEADS_BYTES)?,
                rest: Buffer::new(OWN_PIECE_MAX as usize + 2 * HEADS_BYTES)?,
                rests: Arc::clone(&shared.rests),
                write: None,
            },
        })
    }

    /// The thread's lane. It is at rest between two connections.
    pub fn lane(&mut self) -> &mut L {
        self.work.requests.lane()
    }

    /// Whether the thread's memory is locked in RAM.
    pub fn is_locked(&self) -> bool {
        self.input.is_locked() && self.work.heads.is_locked() && self.work.rest.is_locked()
    }

    /// Serves a connection until it has ended and the lane is at rest. `early` holds bytes that the
    /// client sent after its last option. `closing` says that the server has shut the socket for
    /// reading.
    pub fn serve(
        &mut self,
        socket: BorrowedFd<'_>,
        negotiated: Negotiated,
        closing: &AtomicBool,
        early: &[u8],
        spin: &mut Spin<'_>,
        counters: &Counters,
    ) -> Ending {
        let there = u64::from(self.lane().pages()) * PAGE_SIZE as u64;
        let rules = Rules {
            // The client was told this size. It stays, though the device may grow meanwhile.
            bytes: negotiated.bytes.min(there),
            read_only: negotiated.read_only,
            clears: negotiated.clears,
            structured: negotiated.structured,
            allocation: negotiated.allocation,
            unfragmented_max: CHUNK_MAX,
        };
        let presence = Presence::new(closing);
        let mut connection = Connection { socket, rules, counters, desk: &mut self.work, presence };
        let ending = match connection.run(&mut self.input, early, spin) {
            Ok(ending) | Err(ending) => ending,
        };
        connection.clear();
        ending
    }
}

impl<L: PageLane> Connection<'_, L> {
    fn run(&mut self, input: &mut [u8], early: &[u8], spin: &mut Spin<'_>) -> Result<Ending, Ending> {
        let mut parser = Parser::new();
        input[..early.len()].copy_from_slice(early);
        let mut filled = early.len();
        self.presence.received(early);
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
            if last == Some(Ending::Disconnect) {
                self.presence.has_said_goodbye();
            }
            self.end_batch()?;
            if let Some(ending) = last {
                if ending == Ending::Disconnect {
                    self.finish_flight()?;
                }
                return Ok(ending);
            }
            // At most a page and a header are left to parse, so it is cheap to copy them to the
            // front.
            input.copy_within(filled - left..filled, 0);
            filled = left;
            let received = self.receive(&mut input[filled..], spin)?;
            if received == 0 {
                let torn = filled > 0 || self.desk.write.is_some();
                self.end_torn()?;
                return Ok(if torn { Ending::Torn } else { Ending::Closed });
            }
            filled += received;
            self.presence.received(&input[filled - received..filled]);
        }
    }

    /// Announces the received requests to the stores, before the first of their operations begins.
    /// So the stores know how much is coming.
    fn plan(&mut self, parser: &Parser, received: &[u8]) {
        let rules = self.rules;
        // The code in this iterator runs only if the device uses announcements.
        let coming = std::iter::once_with(|| {
            // Do not announce more pages than can be under way at once.
            let (mut reads, mut count, mut room) = ([None; PAGES], 0, PAGES as u32);
            let writes = parser.survey(received, |request| {
                let is_read = request.command == command::READ && request.length > 0;
                if is_read && room > 0 && rules.check(request).is_ok() {
                    let span = whole(request);
                    let pages = room.min(span.pages());
                    reads[count] = Some(Coming::Reads(PageNo(span.first() as u32), pages));
                    (count, room) = (count + 1, room - pages);
                }
            });
            reads.into_iter().map_while(|read| read).chain([Coming::Writes(writes as u32)])
        });
        self.desk.requests.lane().announce(coming.flatten());
    }

    /// Waits for bytes of the client. Returns their number; 0 means that no more will come.
    fn receive(&mut self, into: &mut [u8], spin: &mut Spin<'_>) -> Result<usize, Ending> {
        while self.is_busy() {
            // Look at the store first, since clients wait for completions.
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

    /// Sleeps until the client has sent bytes or a store has completions, and takes the bytes if
    /// there are any.
    fn listen(&mut self, into: &mut [u8]) -> Result<Option<usize>, Ending> {
        self.wait(true)?;
        receive_now(self.socket, into)
    }

    fn request(&mut self, request: Request) -> Result<(), Ending> {
        let counters = self.counters;
        counters.requests.add(1);
        let checked = self.rules.check(&request);
        match (request.command, checked) {
            // Begin a refused write too: its payload must be received before the next request can
            // be parsed.
            (command::WRITE, checked) => {
                counters.writes.add(1);
                counters.bytes_written.add(u64::from(request.length));
                self.open_write(&request, checked.err())
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
                self.trim(&request)
            }
            (command::WRITE_ZEROES, Ok(())) => {
                counters.trims.add(1);
                self.write_zeroes(&request)
            }
            (command::FLUSH, Ok(())) => self.change(&request, Op::Flush, Span { offset: 0, length: 0 }),
            (command::BLOCK_STATUS, Ok(())) => self.block_status(&request),
            // CACHE needs no work: the volume itself keeps each page in the fastest store with
            // room.
            _ => self.acknowledge(&simple_reply(request.cookie, None)),
        }
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
        self.desk.requests.submit();
        self.send::<2>(&[], |desk, slices| slices.push(&desk.acks))?;
        self.desk.acks.clear();
        Ok(())
    }

    /// Ends the requests of a client that sends no more bytes, if this server has shut the
    /// connection. Complete requests are answered. A write whose payload is incomplete fails, since
    /// nothing else would end the write.
    fn end_torn(&mut self) -> Result<(), Ending> {
        if !self.presence.is_closing() {
            return Ok(());
        }
        self.close_write(Err(Fault::Io(rustix::io::Errno::IO.raw_os_error())))?;
        self.send_acks()?;
        self.finish_flight()
    }

    /// Ends the batch, after all received bytes were parsed: starts the queued operations and
    /// answers the finished ones.
    fn end_batch(&mut self) -> Result<(), Ending> {
        self.answer_reads()?;
        self.send_acks()?;
        self.desk.requests.submit();
        if self.is_busy() {
            self.take_completions()?;
        }
        Ok(())
    }

    /// Clears the thread's desk for its next connection. Returns when no operation is under way.
    /// Writes under way take no effect any more, unless the client has disconnected in order. The
    /// client may have sent them again on another connection, and newer writes after them.
    fn clear(&mut self) {
        let Desk { requests, flight, reads, acks, write, .. } = &mut *self.desk;
        if !self.presence.is_leaving() {
            requests.forsake(|_| true);
        }
        if let Some(index) = write.take().and_then(|write| write.index) {
            requests.close(index, Err(Fault::Forsaken));
        }
        requests.submit();
        while requests.is_busy() {
            requests.turn(Instant::now(), flight);
            if requests.is_busy() {
                // The stores answer within [`weir_store::ANSWER_WITHIN`]. This thread takes no
                // other client before that, so the sleep delays nobody.
                std::thread::sleep(std::time::Duration::from_millis(1));
            }
        }
        while requests.finished().is_some() {}
        flight.reset();
        reads.clear();
        acks.clear();
    }
}

/// Receives the bytes that the client has sent, if there are any.
fn receive_now(socket: BorrowedFd<'_>, into: &mut [u8]) -> Result<Option<usize>, Ending> {
    match rustix::net::recv(socket, into, RecvFlags::DONTWAIT) {
        Ok((received, _)) => Ok(Some(received)),
        Err(rustix::io::Errno::AGAIN | rustix::io::Errno::INTR) => Ok(None),
        Err(errno) => Err(errno.into()),
    }
}

/// The range of a request.
fn whole(request: &Request) -> Span {
    Span { offset: request.offset, length: request.length.into() }
}

/// The pages that a range covers completely; an empty range if there are none.
pub(super) fn whole_pages(request: &Request) -> std::ops::Range<u32> {
    let (_, pages, _) = whole(request).parts();
    pages.start as u32..pages.end as u32
}
