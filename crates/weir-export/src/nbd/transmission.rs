//! Requests and replies without a socket: a parser that takes requests out of a buffer, the rules
//! that a request must keep, and encoders of replies into arrays on the stack.

use super::wire::{
    self, CHUNK_BYTES, Errno, PAYLOAD_MAX, REQUEST_BYTES, SIMPLE_REPLY_BYTES, chunk, command, command_flag,
    u16_at, u32_at, u64_at,
};
use std::fmt;
use weir_core::PAGE_SIZE;

/// A request's header, as sent by the client.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Request {
    /// The request's [`command_flag`]s.
    pub flags: u16,
    /// The request's type, one of [`command`].
    pub command: u16,
    /// The client's name for the request, which comes back in the reply.
    pub cookie: u64,
    /// The offset of the range's first byte.
    pub offset: u64,
    /// The range's length in bytes.
    pub length: u32,
}

impl Request {
    /// The header's bytes on the wire.
    pub fn encode(&self) -> [u8; REQUEST_BYTES] {
        let mut bytes = [0; REQUEST_BYTES];
        bytes[..4].copy_from_slice(&wire::REQUEST_MAGIC.to_be_bytes());
        bytes[4..6].copy_from_slice(&self.flags.to_be_bytes());
        bytes[6..8].copy_from_slice(&self.command.to_be_bytes());
        bytes[8..16].copy_from_slice(&self.cookie.to_be_bytes());
        bytes[16..24].copy_from_slice(&self.offset.to_be_bytes());
        bytes[24..].copy_from_slice(&self.length.to_be_bytes());
        bytes
    }
}

/// A violation of the protocol. Nothing more can be parsed, and the connection must be closed.
#[derive(Clone, Copy, PartialEq, Eq, Debug, thiserror::Error)]
pub enum Violation {
    /// A request does not begin with the magic number.
    #[error("a request begins with {0:#010x}, not with 0x25609513: the stream is out of step")]
    Magic(u32),
    /// A write announces more payload than is allowed.
    #[error("a write announces {0} bytes; {PAYLOAD_MAX} is the announced maximum")]
    PayloadLength(u32),
}

/// The next thing that the parser found.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Event<'a> {
    /// A request. If it is a write with a length above 0, its payload follows in pieces.
    Request(Request),
    /// The next piece of the current write's payload.
    Payload(Payload<'a>),
}

/// A piece of a write's payload. It is either whole pages, aligned to pages of the export, or the
/// part of one page with which an unaligned write begins or ends.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Payload<'a> {
    /// The piece's offset in the export. If the range of a write goes beyond 2^64 bytes, the offset
    /// wraps around; [`Rules::check`] refuses that write.
    pub offset: u64,
    /// The piece's bytes, never empty.
    pub bytes: &'a [u8],
    /// Number of bytes of the write that are still to come.
    pub left: u32,
}

/// Takes requests out of received bytes. It stores no bytes: the caller must present unconsumed
/// bytes again, with more after them. A buffer of [`Parser::BUFFER_MIN`] bytes is always enough.
#[derive(Debug, Default)]
pub struct Parser {
    offset: u64,
    left: u32,
}

impl Parser {
    /// Largest number of bytes that must be in the buffer in one piece: a page of payload.
    pub const BUFFER_MIN: usize = PAGE_SIZE;

    /// Makes a parser for the beginning of a transmission.
    pub fn new() -> Self {
        Parser::default()
    }

    /// Takes the next event from the front of `input`; `None` if `input` holds no complete one.
    ///
    /// # Errors
    /// Fails when the client violates the protocol; the parser must not be used further.
    pub fn next<'a>(&mut self, input: &mut &'a [u8]) -> Result<Option<Event<'a>>, Violation> {
        if self.left > 0 {
            return Ok(self.payload(input).map(Event::Payload));
        }
        let Some((header, rest)) = input.split_first_chunk::<REQUEST_BYTES>() else {
            return match input.first_chunk().map(|magic| u32::from_be_bytes(*magic)) {
                Some(magic) if magic != wire::REQUEST_MAGIC => Err(Violation::Magic(magic)),
                _ => Ok(None),
            };
        };
        let request = decode(header)?;
        if request.command == command::WRITE {
            if request.length > PAYLOAD_MAX {
                return Err(Violation::PayloadLength(request.length));
            }
            (self.offset, self.left) = (request.offset, request.length);
        }
        *input = rest;
        Ok(Some(Event::Request(request)))
    }

    /// Looks ahead: passes every request whose header lies in `input` to `see`, and consumes
    /// nothing. Returns how many pages of payload are in `input`.
    pub fn survey(&self, mut input: &[u8], mut see: impl FnMut(&Request)) -> usize {
        let (mut pages, mut left) = (0, self.left as usize);
        loop {
            let there = left.min(input.len());
            pages += if there == left { there.div_ceil(PAGE_SIZE) } else { there / PAGE_SIZE };
            input = &input[there..];
            let Some((header, rest)) = input.split_first_chunk::<REQUEST_BYTES>() else { return pages };
            let Ok(request) = decode(header) else { return pages };
            see(&request);
            left = if request.command == command::WRITE { request.length as usize } else { 0 };
            input = rest;
        }
    }

    fn payload<'a>(&mut self, input: &mut &'a [u8]) -> Option<Payload<'a>> {
        let left = self.left as usize;
        let available = input.len().min(left);
        let into_page = (self.offset % PAGE_SIZE as u64) as usize;
        let take = if into_page > 0 {
            left.min(PAGE_SIZE - into_page)
        } else if available >= PAGE_SIZE {
            available - available % PAGE_SIZE
        } else {
            left
        };
        if available < take {
            return None;
        }
        let (bytes, rest) = input.split_at(take);
        *input = rest;
        let offset = self.offset;
        self.offset = offset.wrapping_add(take as u64);
        self.left -= take as u32;
        Some(Payload { offset, bytes, left: self.left })
    }
}

fn decode(header: &[u8; REQUEST_BYTES]) -> Result<Request, Violation> {
    let fields = || {
        Some((
            u32_at(header, 0)?,
            Request {
                flags: u16_at(header, 4)?,
                command: u16_at(header, 6)?,
                cookie: u64_at(header, 8)?,
                offset: u64_at(header, 16)?,
                length: u32_at(header, 24)?,
            },
        ))
    };
    let (magic, request) = fields().expect("a header holds every field");
    if magic == wire::REQUEST_MAGIC { Ok(request) } else { Err(Violation::Magic(magic)) }
}

/// The limits that a connection's requests must keep.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Rules {
    /// The export's size in bytes.
    pub bytes: u64,
    /// Whether writes are refused.
    pub read_only: bool,
    /// Whether pages can be discarded and zeroed.
    pub clears: bool,
    /// Whether structured replies were negotiated.
    pub structured: bool,
    /// Whether `base:allocation` was selected.
    pub allocation: bool,
    /// The longest read that is answered in one chunk, for the DF flag.
    pub unfragmented_max: u32,
}

impl Rules {
    /// Checks whether `request` may be done. A request that passes lies within the export. The
    /// payload of a refused write must still be consumed.
    ///
    /// # Errors
    /// Fails with the error to answer, by the specification's section on error values.
    pub fn check(&self, request: &Request) -> Result<(), Errno> {
        use command::{BLOCK_STATUS, CACHE, DISC, FLUSH, READ, TRIM, WRITE, WRITE_ZEROES};
        // FUA is allowed on every command: existing clients set it even on commands for which it
        // has no meaning.
        let flags = command_flag::FUA
            | match request.command {
                READ if self.structured => command_flag::DF,
                TRIM | WRITE_ZEROES if !self.clears => return Err(Errno::Invalid),
                WRITE_ZEROES => command_flag::NO_HOLE | command_flag::FAST_ZERO,
                BLOCK_STATUS => command_flag::REQ_ONE,
                READ | WRITE | DISC | FLUSH | TRIM | CACHE => 0,
                _ => return Err(Errno::Invalid),
            };
        if request.flags & !flags != 0 {
            return Err(Errno::Invalid);
        }
        if matches!(request.command, DISC | FLUSH) {
            return Ok(());
        }
        if self.read_only && matches!(request.command, WRITE | TRIM | WRITE_ZEROES) {
            return Err(Errno::NotPermitted);
        }
        let end = request.offset.checked_add(u64::from(request.length));
        if end.is_none_or(|end| end > self.bytes) {
            return Err(match request.command {
                WRITE | WRITE_ZEROES => Errno::NoSpace,
                _ => Errno::Invalid,
            });
        }
        match request.command {
            READ if request.flags & command_flag::DF != 0 && request.length > self.unfragmented_max => {
                Err(Errno::Overflow)
            }
            READ if request.length > PAYLOAD_MAX => Err(Errno::Invalid),
            BLOCK_STATUS if !self.allocation || request.length == 0 => Err(Errno::Invalid),
            _ => Ok(()),
        }
    }
}

/// Encodes a simple reply. The data of a successful read must follow it.
pub fn simple_reply(cookie: u64, error: Option<Errno>) -> [u8; SIMPLE_REPLY_BYTES] {
    let mut bytes = [0; SIMPLE_REPLY_BYTES];
    bytes[..4].copy_from_slice(&wire::SIMPLE_REPLY_MAGIC.to_be_bytes());
    bytes[4..8].copy_from_slice(&error.map_or(0, |error| error as u32).to_be_bytes());
    bytes[8..].copy_from_slice(&cookie.to_be_bytes());
    bytes
}

/// Returns an array of a chunk's header, which has 20 bytes, and `N - 20` zeros. The caller puts
/// the first bytes of the payload in place of the zeros. `more` bytes of payload follow the array.
fn chunk_header<const N: usize>(cookie: u64, done: bool, kind: u16, more: u32) -> [u8; N] {
    let mut bytes = [0; N];
    bytes[..4].copy_from_slice(&wire::STRUCTURED_REPLY_MAGIC.to_be_bytes());
    bytes[4..6].copy_from_slice(&(if done { chunk::FLAG_DONE } else { 0 }).to_be_bytes());
    bytes[6..8].copy_from_slice(&kind.to_be_bytes());
    bytes[8..16].copy_from_slice(&cookie.to_be_bytes());
    bytes[16..20].copy_from_slice(&((N - CHUNK_BYTES) as u32 + more).to_be_bytes());
    bytes
}

/// Encodes an empty last chunk.
pub fn none_chunk(cookie: u64) -> [u8; 20] {
    chunk_header(cookie, true, chunk::NONE, 0)
}

/// Encodes the head of a chunk of data; `length` bytes from `offset` follow.
pub fn data_chunk(cookie: u64, done: bool, offset: u64, length: u32) -> [u8; 28] {
    let mut bytes: [u8; 28] = chunk_header(cookie, done, chunk::OFFSET_DATA, length);
    bytes[20..].copy_from_slice(&offset.to_be_bytes());
    bytes
}

/// Encodes a chunk that says that `length` bytes from `offset` are zeros.
pub fn hole_chunk(cookie: u64, done: bool, offset: u64, length: u32) -> [u8; 32] {
    let mut bytes: [u8; 32] = chunk_header(cookie, done, chunk::OFFSET_HOLE, 0);
    bytes[20..28].copy_from_slice(&offset.to_be_bytes());
    bytes[28..].copy_from_slice(&length.to_be_bytes());
    bytes
}

/// Encodes the last chunk of a failed request.
pub fn error_chunk(cookie: u64, error: Errno) -> [u8; 26] {
    let mut bytes: [u8; 26] = chunk_header(cookie, true, chunk::ERROR, 0);
    bytes[20..24].copy_from_slice(&(error as u32).to_be_bytes());
    bytes
}

/// Encodes the last chunk of a request that failed at `offset`.
pub fn error_offset_chunk(cookie: u64, error: Errno, offset: u64) -> [u8; 34] {
    let mut bytes: [u8; 34] = chunk_header(cookie, true, chunk::ERROR_OFFSET, 0);
    bytes[20..24].copy_from_slice(&(error as u32).to_be_bytes());
    bytes[26..].copy_from_slice(&offset.to_be_bytes());
    bytes
}

/// Encodes the head of the one chunk that answers a block status; `extents` extents follow.
pub fn block_status_chunk(cookie: u64, extents: usize) -> [u8; 24] {
    let mut bytes: [u8; 24] = chunk_header(cookie, true, chunk::BLOCK_STATUS, 8 * extents as u32);
    bytes[20..].copy_from_slice(&wire::BASE_ALLOCATION_ID.to_be_bytes());
    bytes
}

/// Encodes one extent of a block status: its length and its [`extent_flag`](wire::extent_flag)s.
pub fn extent(length: u32, flags: u32) -> [u8; 8] {
    let mut bytes = [0; 8];
    bytes[..4].copy_from_slice(&length.to_be_bytes());
    bytes[4..].copy_from_slice(&flags.to_be_bytes());
    bytes
}

/// The head of a reply, as a client reads it.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum ReplyHead {
    /// A simple reply, which is the whole answer. The data of a successful read follow it.
    Simple {
        /// The request's cookie.
        cookie: u64,
        /// 0, or the error's number.
        error: u32,
    },
    /// A chunk of a structured reply, with a payload of `length` bytes.
    Chunk {
        /// The request's cookie.
        cookie: u64,
        /// Whether the chunk is the last.
        done: bool,
        /// The chunk's type, one of [`chunk`].
        kind: u16,
        /// Bytes of the chunk's payload.
        length: u32,
    },
}

/// A reply begins with neither of the two magics.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct NotAReply(
    /// The first four bytes of the supposed reply.
    pub u32,
);

impl fmt::Display for NotAReply {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "a reply begins with {:#010x}, which no reply does: the stream is out of step", self.0)
    }
}

impl std::error::Error for NotAReply {}

impl ReplyHead {
    /// Takes a reply's head from the front of `input`; `None` if more bytes are needed.
    ///
    /// # Errors
    /// Fails when `input` does not begin with a reply.
    pub fn decode(input: &mut &[u8]) -> Result<Option<ReplyHead>, NotAReply> {
        let Some(magic) = u32_at(input, 0) else {
            return Ok(None);
        };
        let (head, bytes) = match magic {
            wire::SIMPLE_REPLY_MAGIC => (simple_head(input), SIMPLE_REPLY_BYTES),
            wire::STRUCTURED_REPLY_MAGIC => (chunk_head(input), CHUNK_BYTES),
            _ => return Err(NotAReply(magic)),
        };
        if head.is_some() {
            *input = &input[bytes..];
        }
        Ok(head)
    }
}

fn simple_head(input: &[u8]) -> Option<ReplyHead> {
    Some(ReplyHead::Simple { error: u32_at(input, 4)?, cookie: u64_at(input, 8)? })
}

fn chunk_head(input: &[u8]) -> Option<ReplyHead> {
    let (flags, kind) = (u16_at(input, 4)?, u16_at(input, 6)?);
    let (cookie, length) = (u64_at(input, 8)?, u32_at(input, 16)?);
    Some(ReplyHead::Chunk { cookie, done: flags & chunk::FLAG_DONE != 0, kind, length })
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    fn rules() -> Rules {
        Rules {
            bytes: 1 << 30,
            read_only: false,
            clears: true,
            structured: true,
            allocation: true,
            unfragmented_max: 1 << 18,
        }
    }

    fn request(command: u16, offset: u64, length: u32) -> Request {
        Request { flags: 0, command, cookie: 7, offset, length }
    }

    /// The requests of a stream, and each written byte with its offset.
    type Parsed = (Vec<Request>, Vec<(u64, u8)>);

    /// Parses `stream`, which arrives in pieces, with a buffer of `room` bytes, as the server does.
    fn parse(stream: &[u8], piece: usize, room: usize) -> Result<Parsed, Violation> {
        let mut parser = Parser::new();
        let (mut requests, mut written) = (Vec::new(), Vec::new());
        let mut buffer: Vec<u8> = Vec::new();
        let mut rest = stream;
        while !rest.is_empty() {
            let take = piece.min(room - buffer.len()).min(rest.len());
            assert!(take > 0, "a full buffer holds no event");
            buffer.extend_from_slice(&rest[..take]);
            rest = &rest[take..];
            let mut input = &buffer[..];
            while let Some(event) = parser.next(&mut input)? {
                match event {
                    Event::Request(request) => requests.push(request),
                    Event::Payload(payload) => {
                        let within = (payload.offset % PAGE_SIZE as u64) as usize;
                        let whole = within == 0 && payload.bytes.len().is_multiple_of(PAGE_SIZE);
                        assert!(whole || within + payload.bytes.len() <= PAGE_SIZE, "a piece crosses pages");
                        for (at, byte) in payload.bytes.iter().enumerate() {
                            written.push((payload.offset.wrapping_add(at as u64), *byte));
                        }
                    }
                }
            }
            let left = input.len();
            buffer.drain(..buffer.len() - left);
        }
        assert!(buffer.is_empty(), "the end of the stream was not understood");
        Ok((requests, written))
    }

    fn requests() -> impl Strategy<Value = Vec<(Request, Vec<u8>)>> {
        let one = (0u16..9, any::<u64>(), prop_oneof![0u64..20_000, any::<u64>()], 0u32..20_000, any::<u8>())
            .prop_map(|(command, cookie, offset, length, fill)| {
                let payload = if command == command::WRITE {
                    (0..length).map(|at| fill.wrapping_add((at / 3) as u8)).collect()
                } else {
                    Vec::new()
                };
                (Request { flags: 0, command, cookie, offset, length }, payload)
            });
        proptest::collection::vec(one, 0..8)
    }

    proptest! {
        #[test]
        fn every_request_and_byte_comes_out_once_however_they_arrive(
            sent in requests(), piece in 1usize..9000, room in Parser::BUFFER_MIN..20_000,
        ) {
            let stream: Vec<u8> =
                sent.iter().flat_map(|(r, payload)| [&r.encode()[..], payload].concat()).collect();
            let (requests, written) = parse(&stream, piece, room).unwrap();
            prop_assert_eq!(&requests, &sent.iter().map(|(r, _)| *r).collect::<Vec<_>>());
            let mut ahead = Vec::new();
            let pages = Parser::new().survey(&stream, |request| ahead.push(*request));
            prop_assert_eq!(requests, ahead, "what is seen ahead is what comes");
            let payloads = sent.iter().map(|(_, payload)| payload.len().div_ceil(PAGE_SIZE));
            prop_assert_eq!(pages, payloads.sum::<usize>());
            let expected: Vec<(u64, u8)> = sent
                .iter()
                .flat_map(|(r, payload)| {
                    payload.iter().enumerate().map(|(at, byte)| (r.offset.wrapping_add(at as u64), *byte))
                })
                .collect();
            prop_assert!(written == expected);
        }

        #[test]
        fn a_request_that_passes_lies_within_the_export(
            flags in 0u16..64, command in 0u16..10, offset: u64, length: u32, bytes in 0u64..1 << 40,
            read_only: bool, structured: bool, allocation: bool,
        ) {
            let rules = Rules { bytes, read_only, clears: true, structured, allocation, unfragmented_max: 1 << 18 };
            for offset in [offset, offset % (bytes + 2)] {
                let request = Request { flags, command, cookie: 0, offset, length };
                if rules.check(&request).is_ok() && !matches!(command, command::DISC | command::FLUSH) {
                    prop_assert!(offset.checked_add(u64::from(length)).unwrap() <= bytes);
                    prop_assert!(command != command::READ || length <= PAYLOAD_MAX);
                    prop_assert!(!read_only || !matches!(command, 1 | 4 | 6));
                }
            }
        }

        #[test]
        fn replies_are_read_back_as_they_were_written(cookie: u64, offset: u64, length in 1u32..1 << 25, done: bool) {
            let chunk = |kind, done, length| ReplyHead::Chunk { cookie, done, kind, length };
            let simple = |error| ReplyHead::Simple { cookie, error };
            for (bytes, head, rest) in [
                (&simple_reply(cookie, None)[..], simple(0), 0),
                (&simple_reply(cookie, Some(Errno::Io))[..], simple(5), 0),
                (&none_chunk(cookie)[..], chunk(chunk::NONE, true, 0), 0),
                (&data_chunk(cookie, done, offset, length)[..], chunk(chunk::OFFSET_DATA, done, 8 + length), 8),
                (&hole_chunk(cookie, done, offset, length)[..], chunk(chunk::OFFSET_HOLE, done, 12), 12),
                (&error_chunk(cookie, Errno::Io)[..], chunk(chunk::ERROR, true, 6), 6),
                (&error_offset_chunk(cookie, Errno::Io, offset)[..], chunk(chunk::ERROR_OFFSET, true, 14), 14),
                (&block_status_chunk(cookie, 3)[..], chunk(chunk::BLOCK_STATUS, true, 28), 4),
            ] {
                let mut input = bytes;
                prop_assert_eq!(ReplyHead::decode(&mut input), Ok(Some(head)));
                prop_assert_eq!(input.len(), rest);
                let mut short = &bytes[..bytes.len() - rest - 1];
                prop_assert_eq!(ReplyHead::decode(&mut short), Ok(None));
            }
        }
    }

    #[test]
    fn a_stream_out_of_step_is_noticed_at_its_first_four_bytes() {
        assert_eq!(parse(&[1, 2, 3, 4], 4, 4096), Err(Violation::Magic(0x0102_0304)));
        let mut stream = request(command::READ, 0, 1).encode().to_vec();
        stream.extend_from_slice(&[0xff; 28]);
        assert_eq!(parse(&stream, 100, 4096), Err(Violation::Magic(u32::MAX)));
        assert_eq!(ReplyHead::decode(&mut &[9u8; 16][..]), Err(NotAReply(0x0909_0909)));
    }

    #[test]
    fn a_write_of_4_gib_ends_the_connection_and_other_commands_of_that_length_do_not() {
        let write = request(command::WRITE, 0, u32::MAX).encode();
        assert_eq!(parse(&write, 100, 4096), Err(Violation::PayloadLength(u32::MAX)));
        let (requests, _) = parse(&request(command::TRIM, 0, u32::MAX).encode(), 100, 4096).unwrap();
        assert_eq!(requests.len(), 1);
    }

    #[test]
    fn errors_are_the_ones_that_the_specification_names() {
        use command::{BLOCK_STATUS, CACHE, FLUSH, READ, TRIM, WRITE, WRITE_ZEROES};
        let check = |rules: Rules, flags, command, offset, length| {
            rules.check(&Request { flags, ..request(command, offset, length) })
        };
        let end = rules().bytes;
        for (command, error) in [
            (READ, Errno::Invalid),
            (WRITE, Errno::NoSpace),
            (WRITE_ZEROES, Errno::NoSpace),
            (TRIM, Errno::Invalid),
            (CACHE, Errno::Invalid),
            (BLOCK_STATUS, Errno::Invalid),
        ] {
            assert_eq!(check(rules(), 0, command, end - 4096, 4096), Ok(()), "{command}");
            assert_eq!(check(rules(), 0, command, end - 4096, 4097), Err(error), "{command}");
            assert_eq!(check(rules(), 0, command, u64::MAX, 4096), Err(error), "{command}");
            let read_only = Rules { read_only: true, ..rules() };
            let writes = matches!(command, WRITE | TRIM | WRITE_ZEROES);
            let expected = if writes { Err(Errno::NotPermitted) } else { Ok(()) };
            assert_eq!(check(read_only, 0, command, 0, 4096), expected, "{command}");
            let disk = Rules { clears: false, ..rules() };
            let expected = if matches!(command, TRIM | WRITE_ZEROES) { Err(Errno::Invalid) } else { Ok(()) };
            assert_eq!(check(disk, 0, command, 0, 4096), expected, "{command}");
            assert_eq!(check(rules(), command_flag::FUA, command, 0, 4096), Ok(()), "{command}");
            assert_eq!(check(rules(), 1 << 9, command, 0, 4096), Err(Errno::Invalid), "{command}");
        }
        assert_eq!(check(rules(), 0, FLUSH, 0, 0), Ok(()));
        assert_eq!(check(rules(), 0, 8, 0, 0), Err(Errno::Invalid));
        assert_eq!(check(rules(), 0, READ, 0, PAYLOAD_MAX + 1), Err(Errno::Invalid));
        assert_eq!(check(rules(), command_flag::DF, READ, 0, 1 << 18), Ok(()));
        assert_eq!(check(rules(), command_flag::DF, READ, 0, (1 << 18) + 1), Err(Errno::Overflow));
        let simple = Rules { structured: false, allocation: false, ..rules() };
        assert_eq!(check(simple, command_flag::DF, READ, 0, 1), Err(Errno::Invalid));
        assert_eq!(check(simple, 0, BLOCK_STATUS, 0, 4096), Err(Errno::Invalid));
    }
}
