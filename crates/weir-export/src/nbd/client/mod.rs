//! A small blocking NBD client with several requests in flight: for `weir try`, for benchmarks and
//! for tests.
//!
//! The client trusts the server no more than the protocol allows. It is an error of the connection
//! if a reply answers no request, brings data outside of the range, or answers only part of a read.

mod error;
mod negotiation;
mod operation;

pub use error::ClientError;
pub use negotiation::{Terms, Wish};
pub use operation::{Extent, Operation, Reply};

use super::transmission::{ReplyHead, Request};
use super::wire::{self, Errno, SIMPLE_REPLY_BYTES, chunk, command, u32_at};
use negotiation::negotiate;
use std::collections::{HashMap, VecDeque};
use std::io::{self, BufReader, Read, Write};
use std::net::{TcpStream, ToSocketAddrs};
use std::os::unix::net::UnixStream;
use std::path::Path;
use std::time::Duration;

/// Longest wait for the server before the client gives up.
const PATIENCE: Duration = Duration::from_secs(30);

/// Longest message of a server. A longer one counts as a violation.
const MESSAGE_MAX: u32 = 64 << 10;

/// A byte stream that carries NBD.
pub trait Stream: Read + Write + Send {}

impl<T: Read + Write + Send> Stream for T {}

/// A request whose reply has not arrived completely.
struct InFlight {
    request: Request,
    covered: u64,
    reply: Reply,
}

/// A connection in transmission.
///
/// The client does not read while it writes, and a server may stop reading while its replies are
/// not read. So keep the bytes in flight, in both directions, below the socket's buffer (some 200
/// KiB).
pub struct Client {
    stream: BufReader<Box<dyn Stream>>,
    terms: Terms,
    output: Vec<u8>,
    in_flight: HashMap<u64, InFlight>,
    finished: VecDeque<Reply>,
    next_cookie: u64,
}

impl std::fmt::Debug for Client {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "Client({:?}, {} in flight)", self.terms, self.in_flight.len())
    }
}

impl Client {
    /// Connects to a server's unix socket.
    ///
    /// # Errors
    /// Fails when nothing listens there, or the negotiation fails.
    pub fn unix(path: impl AsRef<Path>, wish: &Wish) -> Result<Client, ClientError> {
        let path = path.as_ref();
        let connect = || {
            let stream = UnixStream::connect(path)?;
            stream.set_read_timeout(Some(PATIENCE))?;
            stream.set_write_timeout(Some(PATIENCE))?;
            Ok(stream)
        };
        let stream = connect()
            .map_err(|source| ClientError::Connect { address: path.display().to_string(), source })?;
        Client::over(Box::new(stream), wish)
    }

    /// Connects to a TCP address, without TLS.
    ///
    /// # Errors
    /// Fails when nothing listens there, or the negotiation fails.
    pub fn tcp(address: impl ToSocketAddrs + std::fmt::Display, wish: &Wish) -> Result<Client, ClientError> {
        let connect = || {
            let stream = TcpStream::connect(&address)?;
            stream.set_nodelay(true)?;
            stream.set_read_timeout(Some(PATIENCE))?;
            stream.set_write_timeout(Some(PATIENCE))?;
            Ok(stream)
        };
        let stream =
            connect().map_err(|source| ClientError::Connect { address: address.to_string(), source })?;
        Client::over(Box::new(stream), wish)
    }

    /// Negotiates over a stream of any kind.
    ///
    /// # Errors
    /// Fails when the negotiation fails.
    pub fn over(stream: Box<dyn Stream>, wish: &Wish) -> Result<Client, ClientError> {
        let mut stream = BufReader::with_capacity(64 << 10, stream);
        let terms = negotiate(&mut stream, wish)?;
        Ok(Client {
            stream,
            terms,
            output: Vec::with_capacity(64 << 10),
            in_flight: HashMap::new(),
            finished: VecDeque::new(),
            next_cookie: 1,
        })
    }

    /// The export as the server described it.
    pub fn terms(&self) -> &Terms {
        &self.terms
    }

    /// Number of requests, sent or queued, whose replies [`receive`](Client::receive) has not
    /// returned yet.
    pub fn in_flight(&self) -> usize {
        self.in_flight.len() + self.finished.len()
    }

    /// Queues a request, which [`send`](Client::send) sends. Returns the cookie of its reply.
    pub fn queue(&mut self, operation: Operation<'_>) -> u64 {
        let cookie = self.next_cookie;
        self.next_cookie += 1;
        let request = operation.request(cookie);
        self.output.extend_from_slice(&request.encode());
        if let Operation::Write { data, .. } = operation {
            self.output.extend_from_slice(data);
        }
        let data =
            if request.command == command::READ { vec![0; request.length as usize] } else { Vec::new() };
        let reply = Reply { cookie, result: Ok(()), data, extents: Vec::new(), chunks: 0 };
        self.in_flight.insert(cookie, InFlight { request, covered: 0, reply });
        cookie
    }

    /// Sends everything that is queued, at once.
    ///
    /// # Errors
    /// Fails when the connection breaks.
    pub fn send(&mut self) -> Result<(), ClientError> {
        let sent = self.stream.get_mut().write_all(&self.output);
        self.output.clear();
        Ok(sent?)
    }

    /// Waits for the next reply, in the server's order.
    ///
    /// # Errors
    /// Fails when the connection breaks or the server violates the protocol. A failed request is no
    /// such error: its reply says so.
    pub fn receive(&mut self) -> Result<Reply, ClientError> {
        loop {
            if let Some(reply) = self.finished.pop_front() {
                return Ok(reply);
            }
            if self.in_flight.is_empty() {
                return Err(io::Error::new(io::ErrorKind::InvalidInput, "no request is in flight").into());
            }
            self.receive_message()?;
        }
    }

    /// Runs one operation and waits for its reply. Replies to other requests are stored for
    /// [`receive`](Client::receive).
    ///
    /// # Errors
    /// Fails as [`receive`](Client::receive) does, and with [`ClientError::Failed`] when the server
    /// reports an error.
    pub fn perform(&mut self, operation: Operation<'_>) -> Result<Reply, ClientError> {
        let cookie = self.queue(operation);
        self.send()?;
        loop {
            if let Some(at) = self.finished.iter().position(|reply| reply.cookie == cookie) {
                let reply = self.finished.remove(at).expect("just found");
                return match reply.result {
                    Ok(()) => Ok(reply),
                    Err(error) => Err(ClientError::Failed(error)),
                };
            }
            self.receive_message()?;
        }
    }

    /// Reads `length` bytes at `offset`.
    ///
    /// # Errors
    /// Fails as [`perform`](Client::perform) does.
    pub fn read(&mut self, offset: u64, length: u32) -> Result<Vec<u8>, ClientError> {
        self.perform(Operation::read(offset, length)).map(|reply| reply.data)
    }

    /// Writes `data` at `offset`.
    ///
    /// # Errors
    /// Fails as [`perform`](Client::perform) does.
    pub fn write(&mut self, offset: u64, data: &[u8]) -> Result<(), ClientError> {
        self.perform(Operation::write(offset, data)).map(drop)
    }

    /// Asks for a disconnect, which lets the server finish what is in flight, and closes.
    ///
    /// # Errors
    /// Fails when the request to disconnect cannot be sent.
    pub fn disconnect(mut self) -> Result<(), ClientError> {
        let request = Request { flags: 0, command: command::DISC, cookie: 0, offset: 0, length: 0 };
        self.output.extend_from_slice(&request.encode());
        self.send()
    }

    fn receive_message(&mut self) -> Result<(), ClientError> {
        let mut head = [0; wire::CHUNK_BYTES];
        self.stream.read_exact(&mut head[..SIMPLE_REPLY_BYTES])?;
        if u32_at(&head, 0) == Some(wire::STRUCTURED_REPLY_MAGIC) {
            self.stream.read_exact(&mut head[SIMPLE_REPLY_BYTES..])?;
        }
        let head = ReplyHead::decode(&mut &head[..])
            .map_err(|error| ClientError::Protocol(error.to_string()))?
            .expect("a whole head was read");
        match head {
            ReplyHead::Simple { cookie, error } => self.simple(cookie, error),
            ReplyHead::Chunk { cookie, done, kind, length } => self.chunk(cookie, done, kind, length),
        }
    }

    fn simple(&mut self, cookie: u64, error: u32) -> Result<(), ClientError> {
        let entry = in_flight(&mut self.in_flight, cookie)?;
        if entry.request.command == command::READ {
            if self.terms.structured {
                return Err(violation("a simple reply to a read where structured ones were agreed on"));
            }
            if error == 0 {
                self.stream.read_exact(&mut entry.reply.data)?;
                entry.covered = u64::from(entry.request.length);
            }
        }
        if let Some(error) = Errno::from_wire(error) {
            entry.reply.result = Err(error);
        }
        entry.reply.chunks += 1;
        self.finish(cookie)
    }

    fn chunk(&mut self, cookie: u64, done: bool, kind: u16, length: u32) -> Result<(), ClientError> {
        if !self.terms.structured {
            return Err(violation("a structured reply where none was agreed on"));
        }
        let entry = in_flight(&mut self.in_flight, cookie)?;
        let (start, end) =
            (entry.request.offset, entry.request.offset.saturating_add(u64::from(entry.request.length)));
        let inside = |offset: u64, length: u64| {
            if offset < start || offset.checked_add(length).is_none_or(|to| to > end) {
                return Err(violation("a chunk outside of what was asked for"));
            }
            let from = (offset - start) as usize;
            Ok(from..from + length as usize)
        };
        let reads = entry.request.command == command::READ;
        match kind {
            chunk::NONE if length == 0 && done => {}
            chunk::OFFSET_DATA if reads && length > 8 => {
                let offset = u64::from_be_bytes(read_array(&mut self.stream)?);
                let range = inside(offset, u64::from(length) - 8)?;
                entry.covered += range.len() as u64;
                self.stream.read_exact(&mut entry.reply.data[range])?;
            }
            chunk::OFFSET_HOLE if reads && length == 12 => {
                let offset = u64::from_be_bytes(read_array(&mut self.stream)?);
                let hole = u32::from_be_bytes(read_array(&mut self.stream)?);
                let range = inside(offset, u64::from(hole))?;
                entry.covered += range.len() as u64;
                entry.reply.data[range].fill(0);
            }
            chunk::BLOCK_STATUS
                if entry.request.command == command::BLOCK_STATUS
                    && (12..=4 + (8 << 20)).contains(&length)
                    && length % 8 == 4 =>
            {
                let id = u32::from_be_bytes(read_array(&mut self.stream)?);
                if Some(id) != self.terms.allocation {
                    return Err(violation("extents of a context that was not selected"));
                }
                for _ in 0..length / 8 {
                    let length = u32::from_be_bytes(read_array(&mut self.stream)?);
                    let flags = u32::from_be_bytes(read_array(&mut self.stream)?);
                    entry.reply.extents.push(Extent { length, flags });
                }
            }
            _ if kind & chunk::ERROR_BIT != 0 && (6..=MESSAGE_MAX).contains(&length) => {
                let error = u32::from_be_bytes(read_array(&mut self.stream)?);
                let mut rest = vec![0; length as usize - 4];
                self.stream.read_exact(&mut rest)?;
                entry.reply.result = Err(Errno::from_wire(error).unwrap_or(Errno::Invalid));
            }
            _ => return Err(ClientError::Protocol(format!("a chunk of type {kind} and {length} bytes"))),
        }
        entry.reply.chunks += 1;
        if done { self.finish(cookie) } else { Ok(()) }
    }

    fn finish(&mut self, cookie: u64) -> Result<(), ClientError> {
        let mut entry = self.in_flight.remove(&cookie).expect("its reply was just received");
        if entry.reply.result.is_err() {
            entry.reply.data.clear();
            entry.reply.extents.clear();
        } else if entry.request.command == command::READ && entry.covered != u64::from(entry.request.length) {
            return Err(violation("a read that was answered in part"));
        }
        self.finished.push_back(entry.reply);
        Ok(())
    }
}

fn violation(what: &str) -> ClientError {
    ClientError::Protocol(what.to_owned())
}

fn in_flight(table: &mut HashMap<u64, InFlight>, cookie: u64) -> Result<&mut InFlight, ClientError> {
    table.get_mut(&cookie).ok_or_else(|| violation("a reply to a request that was not made"))
}

fn read_array<const N: usize>(stream: &mut impl Read) -> io::Result<[u8; N]> {
    let mut bytes = [0; N];
    stream.read_exact(&mut bytes)?;
    Ok(bytes)
}

#[cfg(test)]
mod tests;
