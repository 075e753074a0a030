//! The server's half of the negotiation, without a socket: bytes in, bytes out.
//!
//! [`Handshake::advance`] takes the bytes that the client has sent and that were not yet consumed.
//! It handles at most one option, and sends a long list in parts. So [`OUTPUT_MAX`] bounds each
//! answer, and a client that does not read gets no further answers. [`INPUT_MAX`] bounds the memory
//! that a client can make the server hold.

mod catalog;
mod ending;
mod export;
mod message;

pub use catalog::Catalog;
pub use ending::Ending;
pub use export::Export;

use super::wire::{
    self, BASE_ALLOCATION, BASE_ALLOCATION_ID, OPTION_BYTES, client_flag, handshake_flag, info, option,
    option_reply, u32_at, u64_at,
};
use message::{REPLY_BYTES, error, reply, split_info, split_queries};
use std::fmt;

/// Longest option data that are read; longer ones are skipped and answered with `ERR_TOO_BIG`. The
/// longest legitimate data are an export name and a few context queries of 4096 bytes each.
pub const OPTION_DATA_MAX: usize = 12 << 10;
/// Room that the caller needs for unconsumed input: one option with its header.
pub const INPUT_MAX: usize = OPTION_BYTES + OPTION_DATA_MAX;
/// Option data longer than this end the session. No honest client sends as much.
const OPTION_SKIP_MAX: u32 = 1 << 20;
/// Largest number of options in one session; libnbd and QEMU send about ten.
const OPTIONS_MAX: u32 = 256;
/// Longest export name; it is short enough that no reply exceeds [`OUTPUT_MAX`].
pub const NAME_MAX: usize = 255;
/// Upper bound of the bytes that one call of [`Handshake::advance`] appends to its output.
pub const OUTPUT_MAX: usize = 2048;

/// The state of TLS on a connection.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Tls {
    /// TLS is not offered.
    Off,
    /// TLS is required, and has not begun yet.
    Required,
    /// TLS is active. The handshake takes and returns the plaintext that TLS carries.
    Active,
}

/// The results of the negotiation that a connection keeps in transmission.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Negotiated {
    /// Whether reads are answered by structured replies.
    pub structured: bool,
    /// Whether `base:allocation` was selected, so that the client may ask for block status.
    pub allocation: bool,
    /// The export's size in bytes, as the client was told.
    pub bytes: u64,
    /// Whether writes are refused.
    pub read_only: bool,
    /// Whether pages can be discarded and zeroed.
    pub clears: bool,
}

/// The result of [`Handshake::advance`].
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
#[must_use]
pub enum Step {
    /// The input holds no further complete message: read more.
    NeedMore,
    /// A message was consumed and perhaps answered, or a part of a list was answered. Send the
    /// output, and call again with the rest of the input.
    Again,
    /// Send the output; then TLS begins. Give later bytes to a new [`Handshake`] with
    /// [`Tls::Active`].
    StartTls,
    /// Send the output; then requests follow, first those in the rest of the input. They are for
    /// the device that [`take_device`](Handshake::take_device) returns.
    Transmission(Negotiated),
    /// Send the output, then close the connection.
    Close(Ending),
}

#[derive(Clone, Copy, PartialEq, Eq, Debug)]
enum Phase {
    ClientFlags,
    Options,
    /// Skip the rest of data that are too long, then answer this option with `ERR_TOO_BIG`.
    Skip {
        option: u32,
        left: u32,
    },
    /// Send the rest of the list, from the device with this index on.
    List {
        next: usize,
    },
    Over,
}

/// One connection's negotiation.
pub struct Handshake<'c, C: Catalog> {
    catalog: &'c C,
    tls: Tls,
    phase: Phase,
    fixed: bool,
    no_zeroes: bool,
    structured: bool,
    /// The name of the export for which the client selected `base:allocation`; `None` if it has
    /// not selected it.
    allocation: Option<Box<[u8]>>,
    options: u32,
    /// The device with which the client enters transmission.
    device: Option<C::Device>,
}

impl<C: Catalog> fmt::Debug for Handshake<'_, C> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Handshake").field("phase", &self.phase).finish_non_exhaustive()
    }
}

/// The first bytes that a server sends.
pub fn greeting() -> [u8; 18] {
    let mut bytes = [0; 18];
    bytes[..8].copy_from_slice(&wire::INIT_MAGIC.to_be_bytes());
    bytes[8..16].copy_from_slice(&wire::OPTION_MAGIC.to_be_bytes());
    let flags = handshake_flag::FIXED_NEWSTYLE | handshake_flag::NO_ZEROES;
    bytes[16..].copy_from_slice(&flags.to_be_bytes());
    bytes
}

impl<'c, C: Catalog> Handshake<'c, C> {
    /// Begins a negotiation about the devices of `catalog`. Send the [`greeting`] first, unless TLS
    /// is [`Tls::Active`].
    pub fn new(catalog: &'c C, tls: Tls) -> Self {
        let phase = if tls == Tls::Active { Phase::Options } else { Phase::ClientFlags };
        Handshake {
            catalog,
            tls,
            phase,
            fixed: tls == Tls::Active,
            no_zeroes: false,
            structured: false,
            allocation: None,
            options: 0,
            device: None,
        }
    }

    /// Takes the device that the client has chosen, after [`Step::Transmission`]. `None` if it was
    /// taken before.
    pub fn take_device(&mut self) -> Option<C::Device> {
        self.device.take()
    }

    /// Consumes at most one message from the front of `input`. Appends the answer, or a part of it,
    /// to `output`: at most [`OUTPUT_MAX`] bytes. Returns the number of bytes consumed. `room` says
    /// whether another connection may enter transmission.
    pub fn advance(&mut self, input: &[u8], room: bool, output: &mut Vec<u8>) -> (usize, Step) {
        match self.phase {
            Phase::ClientFlags => match u32_at(input, 0) {
                None => (0, Step::NeedMore),
                Some(flags) => (4, self.client_flags(flags)),
            },
            Phase::Skip { option, left } => {
                let skipped = input.len().min(left as usize);
                let left = left - skipped as u32;
                if left > 0 {
                    self.phase = Phase::Skip { option, left };
                    return (skipped, Step::NeedMore);
                }
                self.phase = Phase::Options;
                error(output, option, option_reply::ERR_TOO_BIG, "the option's data are too long");
                (skipped, Step::Again)
            }
            Phase::Options => self.option(input, room, output),
            Phase::List { next } => (0, self.list_from(next, output)),
            Phase::Over => (0, Step::NeedMore),
        }
    }

    fn client_flags(&mut self, flags: u32) -> Step {
        if flags & !(client_flag::FIXED_NEWSTYLE | client_flag::NO_ZEROES) != 0 {
            return self.close(Ending::ClientFlags(flags));
        }
        self.fixed = flags & client_flag::FIXED_NEWSTYLE != 0;
        self.no_zeroes = flags & client_flag::NO_ZEROES != 0;
        self.phase = Phase::Options;
        Step::Again
    }

    fn option(&mut self, input: &[u8], room: bool, output: &mut Vec<u8>) -> (usize, Step) {
        let (Some(magic), Some(option), Some(length)) =
            (u64_at(input, 0), u32_at(input, 8), u32_at(input, 12))
        else {
            return (0, Step::NeedMore);
        };
        if magic != wire::OPTION_MAGIC {
            return (0, self.close(Ending::Magic(magic)));
        }
        if length > OPTION_SKIP_MAX {
            return (0, self.close(Ending::OptionLength { option, length }));
        }
        if length as usize > OPTION_DATA_MAX {
            if option == option::EXPORT_NAME {
                return (0, self.close(Ending::NoSuchExport));
            }
            self.options += 1;
            self.phase = Phase::Skip { option, left: length };
            return (OPTION_BYTES, Step::Again);
        }
        let Some(data) = input.get(OPTION_BYTES..OPTION_BYTES + length as usize) else {
            return (0, Step::NeedMore);
        };
        self.options += 1;
        let step = if self.options > OPTIONS_MAX {
            self.close(Ending::TooManyOptions)
        } else {
            self.answer(option, data, room, output)
        };
        (OPTION_BYTES + data.len(), step)
    }

    fn answer(&mut self, option: u32, data: &[u8], room: bool, output: &mut Vec<u8>) -> Step {
        if option == option::ABORT {
            reply(output, option, option_reply::ACK, &[]);
            return self.close(Ending::Abort);
        }
        if self.tls == Tls::Required && option != option::STARTTLS {
            if option == option::EXPORT_NAME {
                return self.close(Ending::TlsRequired);
            }
            error(output, option, option_reply::ERR_TLS_REQD, "this server requires TLS");
            return Step::Again;
        }
        match option {
            option::EXPORT_NAME => return self.export_name(data, room, output),
            option::INFO | option::GO => return self.info(option, data, room, output),
            option::STARTTLS => return self.start_tls(data, output),
            option::LIST if data.is_empty() => return self.list_from(0, output),
            option::LIST => error(output, option, option_reply::ERR_INVALID, "this option takes no data"),
            option::STRUCTURED_REPLY => {
                if data.is_empty() {
                    self.structured = true;
                    reply(output, option, option_reply::ACK, &[]);
                } else {
                    error(output, option, option_reply::ERR_INVALID, "this option takes no data");
                }
            }
            option::LIST_META_CONTEXT | option::SET_META_CONTEXT => self.meta_context(option, data, output),
            _ => error(output, option, option_reply::ERR_UNSUP, "unknown option"),
        }
        Step::Again
    }

    fn export_name(&mut self, name: &[u8], room: bool, output: &mut Vec<u8>) -> Step {
        let Some((export, device)) = self.find(name) else {
            return self.close(Ending::NoSuchExport);
        };
        if !room {
            return self.close(Ending::NoRoom);
        }
        output.extend_from_slice(&export.bytes.to_be_bytes());
        output.extend_from_slice(&export.flags(self.structured).to_be_bytes());
        if !self.no_zeroes {
            output.extend_from_slice(&[0; 124]);
        }
        self.transmission(name, &export, device)
    }

    fn info(&mut self, option: u32, data: &[u8], room: bool, output: &mut Vec<u8>) -> Step {
        let Some((name, requests)) = split_info(data) else {
            error(output, option, option_reply::ERR_INVALID, "lengths do not add up");
            return Step::Again;
        };
        let Some((export, device)) = self.find(name) else {
            error(output, option, option_reply::ERR_UNKNOWN, "no such export");
            return Step::Again;
        };
        if option == option::GO && !room {
            let text = "every connection is in use; raise the limit of connections";
            error(output, option, option_reply::ERR_POLICY, text);
            return Step::Again;
        }
        let mut about = [0; 12];
        about[..2].copy_from_slice(&info::EXPORT.to_be_bytes());
        about[2..10].copy_from_slice(&export.bytes.to_be_bytes());
        about[10..].copy_from_slice(&export.flags(self.structured).to_be_bytes());
        reply(output, option, option_reply::INFO, &[&about]);

        let mut sizes = [0; 14];
        sizes[..2].copy_from_slice(&info::BLOCK_SIZE.to_be_bytes());
        for (at, size) in [1, weir_core::PAGE_SIZE as u32, wire::PAYLOAD_MAX].into_iter().enumerate() {
            sizes[2 + 4 * at..6 + 4 * at].copy_from_slice(&size.to_be_bytes());
        }
        reply(output, option, option_reply::INFO, &[&sizes]);

        let asked = |what: u16| requests.chunks_exact(2).any(|request| request == what.to_be_bytes());
        for (what, text) in [(info::NAME, &export.name), (info::DESCRIPTION, &export.description)] {
            if asked(what) {
                reply(output, option, option_reply::INFO, &[&what.to_be_bytes(), text.as_bytes()]);
            }
        }
        reply(output, option, option_reply::ACK, &[]);
        if option == option::GO { self.transmission(name, &export, device) } else { Step::Again }
    }

    fn start_tls(&mut self, data: &[u8], output: &mut Vec<u8>) -> Step {
        let option = option::STARTTLS;
        if !data.is_empty() {
            error(output, option, option_reply::ERR_INVALID, "this option takes no data");
            return Step::Again;
        }
        match self.tls {
            Tls::Off => {
                error(output, option, option_reply::ERR_POLICY, "this server was started without TLS");
                Step::Again
            }
            Tls::Active => {
                error(output, option, option_reply::ERR_INVALID, "TLS is active already");
                Step::Again
            }
            Tls::Required if !self.fixed => self.close(Ending::TlsRequired),
            Tls::Required => {
                reply(output, option, option_reply::ACK, &[]);
                self.phase = Phase::Over;
                Step::StartTls
            }
        }
    }

    /// Sends the list, from the device with this index on. Devices that do not fit into one answer
    /// come in the next. If a device comes or goes between two answers, the indices of others
    /// change: these may be listed twice, or not at all.
    fn list_from(&mut self, from: usize, output: &mut Vec<u8>) -> Step {
        let begun = output.len();
        let (mut at, mut next) = (0, from);
        self.catalog.list(&mut |name, description| {
            let bytes = REPLY_BYTES + 4 + name.len() + description.len();
            let fits = output.len() - begun + bytes + REPLY_BYTES <= OUTPUT_MAX;
            if at == next && fits {
                let length = (name.len() as u32).to_be_bytes();
                let data = [&length, name.as_bytes(), description.as_bytes()];
                reply(output, option::LIST, option_reply::SERVER, &data);
                next += 1;
            }
            at += 1;
        });
        if next < at && next > from {
            self.phase = Phase::List { next };
        } else {
            reply(output, option::LIST, option_reply::ACK, &[]);
            self.phase = Phase::Options;
        }
        Step::Again
    }

    fn meta_context(&mut self, option: u32, data: &[u8], output: &mut Vec<u8>) {
        let set = option == option::SET_META_CONTEXT;
        if set {
            self.allocation = None; // the earlier selection ends, even if this option is refused
        }
        if !self.structured {
            error(output, option, option_reply::ERR_INVALID, "structured replies must be negotiated first");
            return;
        }
        let Some((name, queries)) = split_queries(data) else {
            error(output, option, option_reply::ERR_INVALID, "lengths do not add up");
            return;
        };
        if self.find(name).is_none() {
            error(output, option, option_reply::ERR_UNKNOWN, "no such export");
            return;
        }
        let mut any = false;
        let mut found = false;
        for query in queries {
            any = true;
            found |= query == BASE_ALLOCATION || (!set && query == b"base:");
        }
        if found || (!set && !any) {
            let id = if set { BASE_ALLOCATION_ID } else { 0 };
            reply(output, option, option_reply::META_CONTEXT, &[&id.to_be_bytes(), BASE_ALLOCATION]);
        }
        if set && found {
            self.allocation = Some(name.into());
        }
        reply(output, option, option_reply::ACK, &[]);
    }

    fn find(&self, name: &[u8]) -> Option<(Export, C::Device)> {
        if name.len() > NAME_MAX { None } else { self.catalog.find(name) }
    }

    fn transmission(&mut self, name: &[u8], export: &Export, device: C::Device) -> Step {
        self.phase = Phase::Over;
        self.device = Some(device);
        let Export { bytes, read_only, clears, .. } = *export;
        let structured = self.structured;
        let allocation = structured && self.allocation.as_deref() == Some(name);
        Step::Transmission(Negotiated { structured, allocation, bytes, read_only, clears })
    }

    fn close(&mut self, ending: Ending) -> Step {
        self.phase = Phase::Over;
        Step::Close(ending)
    }
}

#[cfg(test)]
mod tests;
