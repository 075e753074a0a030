//! The protocol's numbers, with the names of the specification. Everything on the wire is
//! big-endian.

/// `NBDMAGIC`: the first eight bytes that a server sends.
pub const INIT_MAGIC: u64 = 0x4e42_444d_4147_4943;
/// `IHAVEOPT`: follows [`INIT_MAGIC`], and begins each option of the client.
pub const OPTION_MAGIC: u64 = 0x4948_4156_454f_5054;
/// The number that begins each reply to an option.
pub const OPTION_REPLY_MAGIC: u64 = 0x0003_e889_0455_65a9;
/// The number that begins each request.
pub const REQUEST_MAGIC: u32 = 0x2560_9513;
/// The number that begins a simple reply.
pub const SIMPLE_REPLY_MAGIC: u32 = 0x6744_6698;
/// The number that begins a chunk of a structured reply.
pub const STRUCTURED_REPLY_MAGIC: u32 = 0x668e_33ef;

/// Bytes of a request's header: magic, flags, type, cookie, offset, length.
pub const REQUEST_BYTES: usize = 28;
/// Bytes of a simple reply's header: magic, error, cookie.
pub const SIMPLE_REPLY_BYTES: usize = 16;
/// Bytes of a structured chunk's header: magic, flags, type, cookie, length.
pub const CHUNK_BYTES: usize = 20;
/// Bytes of an option's header: magic, option, length.
pub const OPTION_BYTES: usize = 16;

/// The longest string that the protocol allows (names, queries, messages).
pub const STRING_MAX: usize = 4096;
/// The largest payload of one read or write, which is announced and enforced. The specification
/// asks every server to take this much (2^25).
pub const PAYLOAD_MAX: u32 = 32 << 20;

/// Flags of the server's greeting.
pub mod handshake_flag {
    /// The server accepts options other than `EXPORT_NAME`, and answers unknown ones.
    pub const FIXED_NEWSTYLE: u16 = 1 << 0;
    /// The 124 zeros after `EXPORT_NAME` may be left out.
    pub const NO_ZEROES: u16 = 1 << 1;
}

/// Flags of the client's answer to the greeting.
pub mod client_flag {
    /// The client speaks fixed newstyle.
    pub const FIXED_NEWSTYLE: u32 = 1 << 0;
    /// The client wants the 124 zeros left out.
    pub const NO_ZEROES: u32 = 1 << 1;
}

/// Flags that say what an export can do.
pub mod transmission_flag {
    /// Says that the flags are valid; the server always sets it.
    pub const HAS_FLAGS: u16 = 1 << 0;
    /// The export refuses writes.
    pub const READ_ONLY: u16 = 1 << 1;
    /// The export takes `FLUSH`.
    pub const SEND_FLUSH: u16 = 1 << 2;
    /// The export takes the FUA flag.
    pub const SEND_FUA: u16 = 1 << 3;
    /// The export takes `TRIM`.
    pub const SEND_TRIM: u16 = 1 << 5;
    /// The export takes `WRITE_ZEROES`.
    pub const SEND_WRITE_ZEROES: u16 = 1 << 6;
    /// The export takes the DF flag. Only clients with structured replies may send that flag.
    pub const SEND_DF: u16 = 1 << 7;
    /// Flush and FUA on one connection cover the writes of every connection.
    pub const CAN_MULTI_CONN: u16 = 1 << 8;
    /// The export takes `CACHE`.
    pub const SEND_CACHE: u16 = 1 << 10;
    /// The export takes the fast-zero flag.
    pub const SEND_FAST_ZERO: u16 = 1 << 11;
}

/// Options that a client sends.
pub mod option {
    /// Chooses an export and begins transmission, without a way to report errors.
    pub const EXPORT_NAME: u32 = 1;
    /// Ends the session.
    pub const ABORT: u32 = 2;
    /// Lists the exports.
    pub const LIST: u32 = 3;
    /// Continues under TLS.
    pub const STARTTLS: u32 = 5;
    /// Asks for a description of an export.
    pub const INFO: u32 = 6;
    /// Asks for a description of an export and begins transmission.
    pub const GO: u32 = 7;
    /// Asks for structured replies.
    pub const STRUCTURED_REPLY: u32 = 8;
    /// Lists the metadata contexts.
    pub const LIST_META_CONTEXT: u32 = 9;
    /// Selects the metadata contexts.
    pub const SET_META_CONTEXT: u32 = 10;
}

/// Types of the server's replies to options.
pub mod option_reply {
    /// The option is done, or its list has ended.
    pub const ACK: u32 = 1;
    /// The reply holds an export's name.
    pub const SERVER: u32 = 2;
    /// The reply holds one piece of information about an export.
    pub const INFO: u32 = 3;
    /// The reply holds a metadata context.
    pub const META_CONTEXT: u32 = 4;
    /// The bit that is set in every error type.
    pub const ERROR: u32 = 1 << 31;
    /// The option is unknown.
    pub const ERR_UNSUP: u32 = ERROR | 1;
    /// The option is known and not allowed here.
    pub const ERR_POLICY: u32 = ERROR | 2;
    /// The option's data are invalid.
    pub const ERR_INVALID: u32 = ERROR | 3;
    /// The client must begin TLS first.
    pub const ERR_TLS_REQD: u32 = ERROR | 5;
    /// The export does not exist.
    pub const ERR_UNKNOWN: u32 = ERROR | 6;
    /// The server is going down.
    pub const ERR_SHUTDOWN: u32 = ERROR | 7;
    /// The option has more data than the server takes.
    pub const ERR_TOO_BIG: u32 = ERROR | 9;
}

/// Types of information in replies to `INFO` and `GO`.
pub mod info {
    /// The export's size and transmission flags; always sent.
    pub const EXPORT: u16 = 0;
    /// The export's canonical name.
    pub const NAME: u16 = 1;
    /// The export's description for people.
    pub const DESCRIPTION: u16 = 2;
    /// The export's minimum, preferred and maximum block size.
    pub const BLOCK_SIZE: u16 = 3;
}

/// Types of requests.
pub mod command {
    /// Reads a range.
    pub const READ: u16 = 0;
    /// Writes a range; the payload follows.
    pub const WRITE: u16 = 1;
    /// Ends the session; there is no reply.
    pub const DISC: u16 = 2;
    /// Waits until all acknowledged writes are safe.
    pub const FLUSH: u16 = 3;
    /// Discards the range.
    pub const TRIM: u16 = 4;
    /// Announces that the range will be read soon.
    pub const CACHE: u16 = 5;
    /// Makes the range read as zeros.
    pub const WRITE_ZEROES: u16 = 6;
    /// Asks which parts of the range are holes.
    pub const BLOCK_STATUS: u16 = 7;
}

/// Flags of requests.
pub mod command_flag {
    /// The server must reply only once the data are safe.
    pub const FUA: u16 = 1 << 0;
    /// The server must zero without making a hole.
    pub const NO_HOLE: u16 = 1 << 1;
    /// The server must answer a read in one content chunk.
    pub const DF: u16 = 1 << 2;
    /// The server must answer a block status with one extent.
    pub const REQ_ONE: u16 = 1 << 3;
    /// The server must zero only if that is faster than writing.
    pub const FAST_ZERO: u16 = 1 << 4;
}

/// Types of structured chunks, and their one flag.
pub mod chunk {
    /// The last chunk of a reply.
    pub const FLAG_DONE: u16 = 1 << 0;
    /// An empty chunk.
    pub const NONE: u16 = 0;
    /// A chunk of data at an offset.
    pub const OFFSET_DATA: u16 = 1;
    /// A chunk that stands for zeros at an offset.
    pub const OFFSET_HOLE: u16 = 2;
    /// A chunk with extents of one metadata context.
    pub const BLOCK_STATUS: u16 = 5;
    /// The bit that is set in every error type.
    pub const ERROR_BIT: u16 = 1 << 15;
    /// The request failed.
    pub const ERROR: u16 = ERROR_BIT | 1;
    /// The request failed at an offset.
    pub const ERROR_OFFSET: u16 = ERROR_BIT | 2;
}

/// Flags of an extent of `base:allocation`.
pub mod extent_flag {
    /// The extent is not allocated.
    pub const HOLE: u32 = 1 << 0;
    /// The extent reads as zeros.
    pub const ZERO: u32 = 1 << 1;
}

/// The one metadata context that the specification defines.
pub const BASE_ALLOCATION: &[u8] = b"base:allocation";
/// The number that this server gives to [`BASE_ALLOCATION`].
pub const BASE_ALLOCATION_ID: u32 = 1;

/// The error numbers that a reply can carry.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
#[repr(u32)]
pub enum Errno {
    /// The export is read-only.
    NotPermitted = 1,
    /// The data cannot be read, verified, or written.
    Io = 5,
    /// The server has no memory for the request.
    NoMemory = 12,
    /// The request is invalid.
    Invalid = 22,
    /// The export has no room, or the write goes beyond its end.
    NoSpace = 28,
    /// The request is too large to be answered in the way asked for.
    Overflow = 75,
    /// A fast zero would not be fast.
    NotSupported = 95,
    /// The server is going down.
    Shutdown = 108,
}

impl Errno {
    /// The error for a number on the wire; `None` for 0. A number that the specification does not
    /// list counts as [`Errno::Invalid`], as the specification demands of clients.
    pub fn from_wire(value: u32) -> Option<Errno> {
        Some(match value {
            0 => return None,
            1 => Errno::NotPermitted,
            5 => Errno::Io,
            12 => Errno::NoMemory,
            28 => Errno::NoSpace,
            75 => Errno::Overflow,
            95 => Errno::NotSupported,
            108 => Errno::Shutdown,
            _ => Errno::Invalid,
        })
    }
}

impl std::fmt::Display for Errno {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str(match self {
            Errno::NotPermitted => "not permitted",
            Errno::Io => "input/output error",
            Errno::NoMemory => "out of memory",
            Errno::Invalid => "invalid request",
            Errno::NoSpace => "no space left",
            Errno::Overflow => "too large",
            Errno::NotSupported => "not supported",
            Errno::Shutdown => "server is shutting down",
        })
    }
}

/// Reads the big-endian number of `N` bytes at offset `at`, if `bytes` reaches that far.
pub(crate) fn field<const N: usize>(bytes: &[u8], at: usize) -> Option<[u8; N]> {
    bytes.get(at..at.checked_add(N)?)?.try_into().ok()
}

pub(crate) fn u16_at(bytes: &[u8], at: usize) -> Option<u16> {
    field(bytes, at).map(u16::from_be_bytes)
}

pub(crate) fn u32_at(bytes: &[u8], at: usize) -> Option<u32> {
    field(bytes, at).map(u32::from_be_bytes)
}

pub(crate) fn u64_at(bytes: &[u8], at: usize) -> Option<u64> {
    field(bytes, at).map(u64::from_be_bytes)
}
