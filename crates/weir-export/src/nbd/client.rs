//! A small blocking client with several requests in flight: for `weir try`, for benches and for tests.
//!
//! It trusts the server no more than the protocol allows: a reply to a request that was not made, data outside of
//! what was asked for, or a read answered in part is an error of the connection.

use super::transmission::{ReplyHead, Request};
use super::wire::{
    self, Errno, SIMPLE_REPLY_BYTES, chunk, client_flag, command, command_flag, info, option, option_reply,
    transmission_flag, u16_at, u32_at, u64_at,
};
use std::collections::{HashMap, VecDeque};
use std::io::{self, BufReader, Read, Write};
use std::net::{TcpStream, ToSocketAddrs};
use std::os::unix::net::UnixStream;
use std::path::Path;
use std::time::Duration;

/// How long a client waits for the server before it gives up.
const PATIENCE: Duration = Duration::from_secs(30);
/// What a server may say about one option; longer replies are nonsense.
const OPTION_REPLY_MAX: u32 = 64 << 10;

/// Something to speak NBD over.
pub trait Stream: Read + Write + Send {}

impl<T: Read + Write + Send> Stream for T {}

/// What to ask for.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct Wish {
    /// The export's name; empty for the default one.
    pub name: String,
    /// Ask for structured replies.
    pub structured: bool,
    /// Ask for `base:allocation`, which needs structured replies.
    pub allocation: bool,
}

impl Default for Wish {
    fn default() -> Self {
        Wish { name: String::new(), structured: true, allocation: true }
    }
}

/// What the server said about the export.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub struct Terms {
    /// Size in bytes.
    pub bytes: u64,
    /// [`transmission_flag`]s.
    pub flags: u16,
    /// Minimum, preferred and maximum block size, where the server named them.
    pub block_sizes: Option<[u32; 3]>,
    /// Whether replies are structured.
    pub structured: bool,
    /// The number of `base:allocation`, where it was granted.
    pub allocation: Option<u32>,
}

impl Terms {
    /// Whether several connections may be used.
    pub fn multi_conn(&self) -> bool {
        self.flags & transmission_flag::CAN_MULTI_CONN != 0
    }
}

/// Why a connection is of no more use, or one request failed.
#[derive(Debug, thiserror::Error)]
pub enum ClientError {
    /// The server cannot be reached.
    #[error("cannot connect to {address}: is the server running?")]
    Connect {
        /// Where it was looked for.
        address: String,
        /// What the system said.
        #[source]
        source: io::Error,
    },
    /// The connection broke, or the server was silent for too long.
    #[error("the connection broke")]
    Broken(#[from] io::Error),
    /// The server refused the negotiation.
    #[error("the server refused {what}: {message}")]
    Refused {
        /// What was asked for.
        what: &'static str,
        /// The server's words.
        message: String,
    },
    /// The server does not keep to the protocol.
    #[error("the server breaks the protocol: {0}")]
    Protocol(String),
    /// The server answered this request with an error. The connection is fine.
    #[error("{0}")]
    Failed(Errno),
}

/// A request to be made.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Operation<'a> {
    /// Read a range.
    Read {
        /// In bytes.
        offset: u64,
        /// In bytes.
        length: u32,
        /// Ask for the answer in one chunk.
        unfragmented: bool,
    },
    /// Write a range.
    Write {
        /// In bytes.
        offset: u64,
        /// What to write.
        data: &'a [u8],
        /// Wait until it is safe.
        fua: bool,
    },
    /// Wait until everything acknowledged is safe.
    Flush,
    /// Give a range up.
    Trim {
        /// In bytes.
        offset: u64,
        /// In bytes.
        length: u32,
    },
    /// Make a range zeros.
    WriteZeroes {
        /// In bytes.
        offset: u64,
        /// In bytes.
        length: u32,
        /// Only if it is faster than writing.
        fast: bool,
        /// Keep it allocated.
        no_hole: bool,
    },
    /// Say that a range will be read.
    Cache {
        /// In bytes.
        offset: u64,
        /// In bytes.
        length: u32,
    },
    /// Ask which parts of a range are holes.
    BlockStatus {
        /// In bytes.
        offset: u64,
        /// In bytes.
        length: u32,
        /// One extent is enough.
        one: bool,
    },
}

impl<'a> Operation<'a> {
    /// A read that may come in several chunks.
    pub fn read(offset: u64, length: u32) -> Self {
        Operation::Read { offset, length, unfragmented: false }
    }

    /// A write that need not wait for permanent storage.
    pub fn write(offset: u64, data: &'a [u8]) -> Self {
        Operation::Write { offset, data, fua: false }
    }

    fn request(&self, cookie: u64) -> Request {
        let flag = |set: bool, flag: u16| if set { flag } else { 0 };
        let (command, flags, offset, length) = match *self {
            Operation::Read { offset, length, unfragmented } => {
                (command::READ, flag(unfragmented, command_flag::DF), offset, length)
            }
            Operation::Write { offset, data, fua } => {
                (command::WRITE, flag(fua, command_flag::FUA), offset, data.len() as u32)
            }
            Operation::Flush => (command::FLUSH, 0, 0, 0),
            Operation::Trim { offset, length } => (command::TRIM, 0, offset, length),
            Operation::WriteZeroes { offset, length, fast, no_hole } => {
                let flags = flag(fast, command_flag::FAST_ZERO) | flag(no_hole, command_flag::NO_HOLE);
                (command::WRITE_ZEROES, flags, offset, length)
            }
            Operation::Cache { offset, length } => (command::CACHE, 0, offset, length),
            Operation::BlockStatus { offset, length, one } => {
                (command::BLOCK_STATUS, flag(one, command_flag::REQ_ONE), offset, length)
            }
        };
        Request { flags, command, cookie, offset, length }
    }
}

/// A part of the export and what `base:allocation` says of it.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Extent {
    /// In bytes.
    pub length: u32,
    /// [`extent_flag`](wire::extent_flag)s.
    pub flags: u32,
}

/// A finished request.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct Reply {
    /// What [`Client::queue`] returned for it.
    pub cookie: u64,
    /// Whether it succeeded.
    pub result: Result<(), Errno>,
    /// A read's data, where it succeeded.
    pub data: Vec<u8>,
    /// A block status's extents, where it succeeded.
    pub extents: Vec<Extent>,
    /// Chunks that it came in; 1 for a simple reply.
    pub chunks: u32,
}

/// A request whose reply is not complete.
struct InFlight {
    request: Request,
    covered: u64,
    reply: Reply,
}

/// A connection in transmission.
///
/// Nothing is read while it writes: keep what is in flight below the socket's buffer (some 200 KiB) or the
/// connection below two such directions at once, as a server may stop reading while its replies are not read.
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
    /// Connects to a unix socket.
    ///
    /// # Errors
    /// When nothing listens there, or the negotiation fails.
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
    /// When nothing listens there, or the negotiation fails.
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
    /// When the negotiation fails.
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

    /// What the server said about the export.
    pub fn terms(&self) -> &Terms {
        &self.terms
    }

    /// Requests sent or queued whose replies were not yet returned by [`receive`](Client::receive).
    pub fn in_flight(&self) -> usize {
        self.in_flight.len() + self.finished.len()
    }

    /// Queues a request; [`send`](Client::send) sends what is queued. Returns the cookie of its reply.
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

    /// Sends everything queued, in one go.
    ///
    /// # Errors
    /// When the connection breaks.
    pub fn send(&mut self) -> Result<(), ClientError> {
        let sent = self.stream.get_mut().write_all(&self.output);
        self.output.clear();
        Ok(sent?)
    }

    /// Waits for the next reply, in the server's order.
    ///
    /// # Errors
    /// When the connection breaks or the server does; not when the request failed, which the reply says.
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

    /// Performs one operation and waits for its reply; replies to others are kept for
    /// [`receive`](Client::receive).
    ///
    /// # Errors
    /// As [`receive`](Client::receive), and [`ClientError::Failed`] when the server reports an error.
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
    /// As [`perform`](Client::perform).
    pub fn read(&mut self, offset: u64, length: u32) -> Result<Vec<u8>, ClientError> {
        self.perform(Operation::read(offset, length)).map(|reply| reply.data)
    }

    /// Writes `data` at `offset`.
    ///
    /// # Errors
    /// As [`perform`](Client::perform).
    pub fn write(&mut self, offset: u64, data: &[u8]) -> Result<(), ClientError> {
        self.perform(Operation::write(offset, data)).map(drop)
    }

    /// Says goodbye, which lets the server finish what is in flight, and closes.
    ///
    /// # Errors
    /// When the connection breaks before that.
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
            _ if kind & chunk::ERROR_BIT != 0 && (6..=OPTION_REPLY_MAX).contains(&length) => {
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

/// A server's reply to an option: its type and data.
type OptionReply = (u32, Vec<u8>);

fn negotiate(stream: &mut BufReader<Box<dyn Stream>>, wish: &Wish) -> Result<Terms, ClientError> {
    let greeting: [u8; 18] = read_array(stream)?;
    if u64_at(&greeting, 0) != Some(wire::INIT_MAGIC) || u64_at(&greeting, 8) != Some(wire::OPTION_MAGIC) {
        return Err(violation("the greeting is not that of a newstyle NBD server"));
    }
    let flags = client_flag::FIXED_NEWSTYLE | client_flag::NO_ZEROES;
    stream.get_mut().write_all(&flags.to_be_bytes())?;

    let mut terms = Terms::default();
    if wish.structured {
        terms.structured = ask(stream, option::STRUCTURED_REPLY, &[])?.0 == option_reply::ACK;
    }
    let name = [&(wish.name.len() as u32).to_be_bytes()[..], wish.name.as_bytes()].concat();
    if wish.allocation && terms.structured {
        let query = wire::BASE_ALLOCATION;
        let count_and_length = [1u32.to_be_bytes(), (query.len() as u32).to_be_bytes()].concat();
        send_option(stream, option::SET_META_CONTEXT, &[&name, &count_and_length, query])?;
        loop {
            match receive_option(stream, option::SET_META_CONTEXT)? {
                (option_reply::META_CONTEXT, data) => terms.allocation = u32_at(&data, 0),
                (option_reply::ACK, _) => break,
                _ => {
                    terms.allocation = None;
                    break;
                }
            }
        }
    }
    let request = [1u16.to_be_bytes(), info::BLOCK_SIZE.to_be_bytes()].concat();
    send_option(stream, option::GO, &[&name, &request])?;
    let mut described = false;
    loop {
        let (kind, data) = receive_option(stream, option::GO)?;
        match kind {
            option_reply::INFO => match (u16_at(&data, 0), data.len()) {
                (Some(info::EXPORT), 12) => {
                    described = true;
                    terms.bytes = u64_at(&data, 2).expect("12 bytes");
                    terms.flags = u16_at(&data, 10).expect("12 bytes");
                }
                (Some(info::BLOCK_SIZE), 14) => {
                    terms.block_sizes = Some([2, 6, 10].map(|at| u32_at(&data, at).expect("14 bytes")));
                }
                _ => {}
            },
            option_reply::ACK if described => return Ok(terms),
            option_reply::ACK => return Err(violation("an export was accepted and not described")),
            _ => {
                let message = format!("{} (type {kind:#x})", String::from_utf8_lossy(&data));
                return Err(ClientError::Refused { what: "the export", message });
            }
        }
    }
}

fn ask(
    stream: &mut BufReader<Box<dyn Stream>>,
    number: u32,
    data: &[u8],
) -> Result<OptionReply, ClientError> {
    send_option(stream, number, &[data])?;
    receive_option(stream, number)
}

fn send_option(stream: &mut BufReader<Box<dyn Stream>>, number: u32, data: &[&[u8]]) -> io::Result<()> {
    let length: usize = data.iter().map(|part| part.len()).sum();
    let mut bytes = wire::OPTION_MAGIC.to_be_bytes().to_vec();
    bytes.extend_from_slice(&number.to_be_bytes());
    bytes.extend_from_slice(&(length as u32).to_be_bytes());
    for part in data {
        bytes.extend_from_slice(part);
    }
    stream.get_mut().write_all(&bytes)
}

fn receive_option(stream: &mut BufReader<Box<dyn Stream>>, number: u32) -> Result<OptionReply, ClientError> {
    let head: [u8; 20] = read_array(stream)?;
    let (kind, length) = (u32_at(&head, 12).expect("20 bytes"), u32_at(&head, 16).expect("20 bytes"));
    if u64_at(&head, 0) != Some(wire::OPTION_REPLY_MAGIC) || u32_at(&head, 8) != Some(number) {
        return Err(violation("no reply to the option that was sent"));
    }
    if length > OPTION_REPLY_MAX {
        return Err(violation("a reply to an option that is longer than any"));
    }
    let mut data = vec![0; length as usize];
    stream.read_exact(&mut data)?;
    Ok((kind, data))
}

#[cfg(test)]
mod tests {
    use super::super::transmission::{data_chunk, error_chunk, hole_chunk, none_chunk, simple_reply};
    use super::*;

    /// A client in transmission whose server has already said everything it will say.
    fn client(structured: bool, server: Vec<u8>) -> Client {
        struct Canned(io::Cursor<Vec<u8>>);
        impl Read for Canned {
            fn read(&mut self, buffer: &mut [u8]) -> io::Result<usize> {
                self.0.read(buffer)
            }
        }
        impl Write for Canned {
            fn write(&mut self, buffer: &[u8]) -> io::Result<usize> {
                Ok(buffer.len())
            }
            fn flush(&mut self) -> io::Result<()> {
                Ok(())
            }
        }
        let stream: Box<dyn Stream> = Box::new(Canned(io::Cursor::new(server)));
        Client {
            stream: BufReader::new(stream),
            terms: Terms { structured, ..Terms::default() },
            output: Vec::new(),
            in_flight: HashMap::new(),
            finished: VecDeque::new(),
            next_cookie: 1,
        }
    }

    #[test]
    fn chunks_of_interleaved_replies_are_put_together() {
        let server = [
            &data_chunk(2, false, 102, 2)[..],
            b"cd",
            &hole_chunk(1, false, 0, 3),
            &data_chunk(2, true, 100, 2),
            b"ab",
            &data_chunk(1, false, 3, 1),
            b"x",
            &none_chunk(1),
        ]
        .concat();
        let mut client = client(true, server);
        client.queue(Operation::read(0, 4));
        client.queue(Operation::read(100, 4));
        client.send().unwrap();
        let replies = [client.receive().unwrap(), client.receive().unwrap()];
        assert_eq!(replies.clone().map(|reply| (reply.cookie, reply.chunks)), [(2, 2), (1, 3)]);
        assert_eq!(replies.map(|reply| reply.data), [b"abcd".to_vec(), b"\0\0\0x".to_vec()]);
    }

    #[test]
    fn an_error_fails_its_request_only() {
        let mut client = client(false, [simple_reply(1, Some(Errno::Io)), simple_reply(2, None)].concat());
        let first = client.perform(Operation::Flush);
        assert!(matches!(first, Err(ClientError::Failed(Errno::Io))));
        client.perform(Operation::Flush).unwrap();
    }

    #[test]
    fn a_server_that_lies_is_found_out() {
        for (structured, server, what) in [
            (true, simple_reply(1, None).to_vec(), "a simple reply to a read"),
            (false, none_chunk(1).to_vec(), "a structured reply"),
            (true, none_chunk(9).to_vec(), "that was not made"),
            (true, none_chunk(1).to_vec(), "answered in part"),
            (true, hole_chunk(1, true, 4096, 4096).to_vec(), "outside"),
            (true, hole_chunk(1, true, u64::MAX, u32::MAX).to_vec(), "outside"),
            (true, data_chunk(1, true, 0, 5000).to_vec(), "outside"),
            (true, vec![1; 20], "out of step"),
        ] {
            let error = client(structured, server).read(0, 4096).unwrap_err().to_string();
            assert!(error.contains(what), "{error} does not say {what}");
        }
        let error = client(true, error_chunk(1, Errno::Io).to_vec()).read(0, 4096).unwrap_err();
        assert!(matches!(error, ClientError::Failed(Errno::Io)));
        assert!(matches!(client(true, vec![]).read(0, 1), Err(ClientError::Broken(_))));
    }
}
