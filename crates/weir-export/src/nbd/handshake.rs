//! The server's half of the negotiation, without a socket: bytes in, bytes out.
//!
//! [`Handshake::advance`] is given what the client has sent and not yet been consumed, and handles at most one
//! option, so that what it says at once is bounded by [`OUTPUT_MAX`]; a client that does not read is not
//! answered further. What a client may make the server hold is bounded by [`INPUT_MAX`].

use super::wire::{
    self, BASE_ALLOCATION, BASE_ALLOCATION_ID, OPTION_BYTES, client_flag, handshake_flag, info, option,
    option_reply, transmission_flag, u16_at, u32_at, u64_at,
};
use std::fmt;

/// The longest option data that are looked at; longer ones are skipped and answered with `ERR_TOO_BIG`.
/// The longest legitimate ones are an export name and a few context queries of 4096 bytes each.
pub const OPTION_DATA_MAX: usize = 12 << 10;
/// Room for unconsumed input that the caller needs: one option with its header.
pub const INPUT_MAX: usize = OPTION_BYTES + OPTION_DATA_MAX;
/// Option data longer than this end the session: nobody means well with them.
const OPTION_SKIP_MAX: u32 = 1 << 20;
/// Options in one session; libnbd and QEMU send about ten.
const OPTIONS_MAX: u32 = 256;
/// Longest export name; short enough that no reply exceeds [`OUTPUT_MAX`].
pub const NAME_MAX: usize = 255;
/// An upper bound of what one call of [`Handshake::advance`] appends to its output.
pub const OUTPUT_MAX: usize = 2048;

/// What is exported, as clients see it.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct Export {
    /// The name that clients ask for; the empty name always means this export too. At most [`NAME_MAX`] bytes.
    pub name: String,
    /// For people, at most [`NAME_MAX`] bytes.
    pub description: String,
    /// Size in bytes.
    pub bytes: u64,
    /// Whether writes are refused.
    pub read_only: bool,
}

impl Export {
    /// The transmission flags for a connection with or without structured replies.
    pub fn flags(&self, structured: bool) -> u16 {
        use transmission_flag::{
            CAN_MULTI_CONN, HAS_FLAGS, READ_ONLY, SEND_CACHE, SEND_DF, SEND_FAST_ZERO, SEND_FLUSH, SEND_FUA,
            SEND_TRIM, SEND_WRITE_ZEROES,
        };
        let always = HAS_FLAGS | SEND_FLUSH | SEND_FUA | CAN_MULTI_CONN | SEND_CACHE;
        let access = if self.read_only { READ_ONLY } else { SEND_TRIM | SEND_WRITE_ZEROES | SEND_FAST_ZERO };
        always | access | if structured { SEND_DF } else { 0 }
    }
}

/// How TLS stands on a connection.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Tls {
    /// Not offered.
    Off,
    /// Required, and not yet begun.
    Required,
    /// The bytes given and taken are those inside TLS.
    Active,
}

/// What a connection carries into transmission.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Negotiated {
    /// Reads are answered by structured replies.
    pub structured: bool,
    /// `base:allocation` was selected, so that block status may be asked.
    pub allocation: bool,
}

/// What [`Handshake::advance`] came to.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
#[must_use]
pub enum Step {
    /// The input holds no further complete message.
    NeedMore,
    /// Something was consumed and perhaps answered; call again with the rest.
    Again,
    /// Send the output; TLS begins then. What follows is for a new [`Handshake`] with [`Tls::Active`].
    StartTls,
    /// Send the output; requests follow, the rest of the input first.
    Transmission(Negotiated),
    /// Send the output, then close the connection.
    Close(Ending),
}

/// Why a negotiation ended without transmission.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Ending {
    /// The client said goodbye.
    Abort,
    /// The client's flags hold ones that the server did not offer.
    ClientFlags(u32),
    /// An option does not begin as options do.
    Magic(u64),
    /// An option announces more data than any has.
    OptionLength {
        /// The option's number.
        option: u32,
        /// The length it announced.
        length: u32,
    },
    /// More options than any client needs.
    TooManyOptions,
    /// `EXPORT_NAME` for an export that does not exist; it has no error reply.
    NoSuchExport,
    /// `EXPORT_NAME` where TLS is required; it has no error reply.
    TlsRequired,
    /// `EXPORT_NAME` while every connection is in use; it has no error reply.
    NoRoom,
}

impl fmt::Display for Ending {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Ending::Abort => f.write_str("the client ended the negotiation"),
            Ending::ClientFlags(flags) => write!(f, "client flags {flags:#x} were not offered"),
            Ending::Magic(magic) => write!(f, "an option begins with {magic:#x}, not with IHAVEOPT"),
            Ending::OptionLength { option, length } => {
                write!(f, "option {option} announces {length} bytes of data; {OPTION_SKIP_MAX} is the limit")
            }
            Ending::TooManyOptions => write!(f, "more than {OPTIONS_MAX} options"),
            Ending::NoSuchExport => f.write_str("NBD_OPT_EXPORT_NAME asks for an export that does not exist"),
            Ending::TlsRequired => f.write_str("NBD_OPT_EXPORT_NAME without TLS, which is required"),
            Ending::NoRoom => f.write_str("every connection is in use; raise the limit of connections"),
        }
    }
}

/// Under which of its names a client asked for the export.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
enum Called {
    ByDefault,
    ByName,
}

#[derive(Clone, Copy, PartialEq, Eq, Debug)]
enum Phase {
    ClientFlags,
    Options,
    /// The rest of data too long to be looked at, then `ERR_TOO_BIG` to this option.
    Skip {
        option: u32,
        left: u32,
    },
    Over,
}

/// One connection's negotiation.
#[derive(Debug)]
pub struct Handshake<'e> {
    export: &'e Export,
    tls: Tls,
    phase: Phase,
    fixed: bool,
    no_zeroes: bool,
    structured: bool,
    /// The name under which `base:allocation` was selected, if it was.
    allocation: Option<Called>,
    options: u32,
}

impl<'e> Handshake<'e> {
    /// Begins a negotiation about `export`; [`greeting`](Handshake::greeting) is to be sent first, unless TLS
    /// is [`Tls::Active`].
    pub fn new(export: &'e Export, tls: Tls) -> Self {
        let phase = if tls == Tls::Active { Phase::Options } else { Phase::ClientFlags };
        Handshake {
            export,
            tls,
            phase,
            fixed: tls == Tls::Active,
            no_zeroes: false,
            structured: false,
            allocation: None,
            options: 0,
        }
    }

    /// What a server says first.
    pub fn greeting() -> [u8; 18] {
        let mut bytes = [0; 18];
        bytes[..8].copy_from_slice(&wire::INIT_MAGIC.to_be_bytes());
        bytes[8..16].copy_from_slice(&wire::OPTION_MAGIC.to_be_bytes());
        let flags = handshake_flag::FIXED_NEWSTYLE | handshake_flag::NO_ZEROES;
        bytes[16..].copy_from_slice(&flags.to_be_bytes());
        bytes
    }

    /// Consumes at most one message from the front of `input` and appends what is to be sent, at most
    /// [`OUTPUT_MAX`] bytes, to `output`. Returns how many bytes were consumed. `room` says whether another
    /// connection may enter transmission.
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
            option::LIST => self.list(data, output),
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
        let Some(called) = self.called(name) else {
            return self.close(Ending::NoSuchExport);
        };
        if !room {
            return self.close(Ending::NoRoom);
        }
        output.extend_from_slice(&self.export.bytes.to_be_bytes());
        output.extend_from_slice(&self.export.flags(self.structured).to_be_bytes());
        if !self.no_zeroes {
            output.extend_from_slice(&[0; 124]);
        }
        self.transmission(called)
    }

    fn info(&mut self, option: u32, data: &[u8], room: bool, output: &mut Vec<u8>) -> Step {
        let Some((name, requests)) = split_info(data) else {
            error(output, option, option_reply::ERR_INVALID, "lengths do not add up");
            return Step::Again;
        };
        let Some(called) = self.called(name) else {
            error(output, option, option_reply::ERR_UNKNOWN, "no such export");
            return Step::Again;
        };
        if option == option::GO && !room {
            let text = "every connection is in use; raise the limit of connections";
            error(output, option, option_reply::ERR_POLICY, text);
            return Step::Again;
        }
        let export = self.export;
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
        if option == option::GO { self.transmission(called) } else { Step::Again }
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

    fn list(&self, data: &[u8], output: &mut Vec<u8>) {
        if !data.is_empty() {
            error(output, option::LIST, option_reply::ERR_INVALID, "this option takes no data");
            return;
        }
        let name = self.export.name.as_bytes();
        let length = (name.len() as u32).to_be_bytes();
        let description = self.export.description.as_bytes();
        reply(output, option::LIST, option_reply::SERVER, &[&length, name, description]);
        reply(output, option::LIST, option_reply::ACK, &[]);
    }

    fn meta_context(&mut self, option: u32, data: &[u8], output: &mut Vec<u8>) {
        let set = option == option::SET_META_CONTEXT;
        if set {
            self.allocation = None; // whatever comes of it, the earlier selection is replaced
        }
        if !self.structured {
            error(output, option, option_reply::ERR_INVALID, "structured replies must be negotiated first");
            return;
        }
        let Some((name, queries)) = split_queries(data) else {
            error(output, option, option_reply::ERR_INVALID, "lengths do not add up");
            return;
        };
        let Some(called) = self.called(name) else {
            error(output, option, option_reply::ERR_UNKNOWN, "no such export");
            return;
        };
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
            self.allocation = Some(called);
        }
        reply(output, option, option_reply::ACK, &[]);
    }

    fn called(&self, name: &[u8]) -> Option<Called> {
        if name.is_empty() {
            Some(Called::ByDefault)
        } else {
            (name == self.export.name.as_bytes()).then_some(Called::ByName)
        }
    }

    fn transmission(&mut self, called: Called) -> Step {
        self.phase = Phase::Over;
        let allocation = self.structured && self.allocation == Some(called);
        Step::Transmission(Negotiated { structured: self.structured, allocation })
    }

    fn close(&mut self, ending: Ending) -> Step {
        self.phase = Phase::Over;
        Step::Close(ending)
    }
}

/// The name and the information requests of `INFO` and `GO`, if the lengths add up.
fn split_info(data: &[u8]) -> Option<(&[u8], &[u8])> {
    let length = u32_at(data, 0)? as usize;
    let name = data.get(4..length.checked_add(4)?)?;
    let count = u16_at(data, 4 + length)? as usize;
    let requests = &data[6 + length..];
    (requests.len() == 2 * count).then_some((name, requests))
}

/// The export's name and the queries of the two context options, if the lengths add up.
fn split_queries(data: &[u8]) -> Option<(&[u8], impl Iterator<Item = &[u8]>)> {
    let length = u32_at(data, 0)? as usize;
    let name = data.get(4..length.checked_add(4)?)?;
    let count = u32_at(data, 4 + length)?;
    let queries = &data[8 + length..];

    fn next<'a>(rest: &mut &'a [u8]) -> Option<&'a [u8]> {
        let length = u32_at(rest, 0)? as usize;
        let query = rest.get(4..length.checked_add(4)?)?;
        *rest = &rest[4 + length..];
        Some(query)
    }
    // Once to see that exactly `count` of them fill the data; each takes at least 4 bytes, so this ends.
    let mut rest = queries;
    for _ in 0..count {
        next(&mut rest)?;
    }
    if !rest.is_empty() {
        return None;
    }
    let mut rest = queries;
    Some((name, std::iter::from_fn(move || next(&mut rest))))
}

fn reply(output: &mut Vec<u8>, option: u32, kind: u32, data: &[&[u8]]) {
    output.extend_from_slice(&wire::OPTION_REPLY_MAGIC.to_be_bytes());
    output.extend_from_slice(&option.to_be_bytes());
    output.extend_from_slice(&kind.to_be_bytes());
    let length: usize = data.iter().map(|part| part.len()).sum();
    output.extend_from_slice(&(length as u32).to_be_bytes());
    for part in data {
        output.extend_from_slice(part);
    }
}

fn error(output: &mut Vec<u8>, option: u32, kind: u32, text: &str) {
    reply(output, option, kind, &[text.as_bytes()]);
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    fn export() -> Export {
        Export { name: "weir".into(), description: "a test".into(), bytes: 1 << 30, read_only: false }
    }

    fn option(number: u32, data: &[u8]) -> Vec<u8> {
        let mut bytes = wire::OPTION_MAGIC.to_be_bytes().to_vec();
        bytes.extend_from_slice(&number.to_be_bytes());
        bytes.extend_from_slice(&(data.len() as u32).to_be_bytes());
        bytes.extend_from_slice(data);
        bytes
    }

    fn go(number: u32, name: &[u8], requests: &[u16]) -> Vec<u8> {
        let mut data = (name.len() as u32).to_be_bytes().to_vec();
        data.extend_from_slice(name);
        data.extend_from_slice(&(requests.len() as u16).to_be_bytes());
        for request in requests {
            data.extend_from_slice(&request.to_be_bytes());
        }
        option(number, &data)
    }

    fn contexts(number: u32, name: &[u8], queries: &[&[u8]]) -> Vec<u8> {
        let mut data = (name.len() as u32).to_be_bytes().to_vec();
        data.extend_from_slice(name);
        data.extend_from_slice(&(queries.len() as u32).to_be_bytes());
        for query in queries {
            data.extend_from_slice(&(query.len() as u32).to_be_bytes());
            data.extend_from_slice(query);
        }
        option(number, &data)
    }

    fn flags(flags: u32) -> Vec<u8> {
        flags.to_be_bytes().to_vec()
    }

    /// Runs a whole script through a handshake in pieces of `piece` bytes; returns the end and the output.
    fn run(tls: Tls, room: bool, script: &[Vec<u8>], piece: usize) -> (Option<Step>, Vec<u8>, usize) {
        let export = export();
        let mut handshake = Handshake::new(&export, tls);
        let script = script.concat();
        let mut pending: Vec<u8> = Vec::new();
        let (mut output, mut consumed_in_all) = (Vec::new(), 0);
        for part in script.chunks(piece.max(1)) {
            pending.extend_from_slice(part);
            loop {
                let before = output.len();
                let (consumed, step) = handshake.advance(&pending, room, &mut output);
                assert!(output.len() - before <= OUTPUT_MAX);
                consumed_in_all += consumed;
                pending.drain(..consumed);
                match step {
                    Step::Again => {}
                    Step::NeedMore => break,
                    end => return (Some(end), output, consumed_in_all),
                }
            }
            assert!(pending.len() < INPUT_MAX, "more held than announced");
        }
        (None, output, consumed_in_all)
    }

    /// The replies in `output` as (option, type, data).
    fn replies(mut output: &[u8]) -> Vec<(u32, u32, Vec<u8>)> {
        let mut found = Vec::new();
        while !output.is_empty() {
            assert_eq!(u64_at(output, 0), Some(wire::OPTION_REPLY_MAGIC));
            let length = u32_at(output, 16).unwrap() as usize;
            found.push((
                u32_at(output, 8).unwrap(),
                u32_at(output, 12).unwrap(),
                output[20..20 + length].to_vec(),
            ));
            output = &output[20 + length..];
        }
        found
    }

    fn kinds(output: &[u8]) -> Vec<(u32, u32)> {
        replies(output).into_iter().map(|(option, kind, _)| (option, kind)).collect()
    }

    #[test]
    fn go_describes_the_export_and_enters_transmission() {
        let script =
            [flags(3), option(option::STRUCTURED_REPLY, &[]), go(option::GO, b"weir", &[1, 2, 3, 99])];
        let (end, output, _) = run(Tls::Off, true, &script, 1000);
        assert_eq!(end, Some(Step::Transmission(Negotiated { structured: true, allocation: false })));
        let replies = replies(&output);
        let info: Vec<&[u8]> = replies
            .iter()
            .filter(|(_, kind, _)| *kind == option_reply::INFO)
            .map(|(.., data)| &data[..])
            .collect();
        assert_eq!(info[0][..10], [&[0, 0][..], &(1u64 << 30).to_be_bytes()].concat());
        assert_eq!(info[1], [0, 3, 0, 0, 0, 1, 0, 0, 0x10, 0, 2, 0, 0, 0]);
        assert_eq!(info[2], b"\0\x01weir");
        assert_eq!(info[3], b"\0\x02a test");
        assert_eq!(replies.last().unwrap(), &(option::GO, option_reply::ACK, vec![]));
        let told = u16_at(info[0], 10).unwrap();
        assert_eq!(told, export().flags(true));
        assert_ne!(told & transmission_flag::CAN_MULTI_CONN, 0);
        assert_ne!(told & transmission_flag::SEND_DF, 0);
        assert_eq!(export().flags(false) & transmission_flag::SEND_DF, 0, "DF needs structured replies");
    }

    #[test]
    fn export_name_sends_zeros_unless_the_client_declined_them() {
        for (client, bytes) in [(1, 134), (3, 10), (0, 134)] {
            let (end, output, _) = run(Tls::Off, true, &[flags(client), option(option::EXPORT_NAME, b"")], 7);
            assert!(matches!(end, Some(Step::Transmission(_))));
            assert_eq!(output.len(), bytes);
        }
        let (end, output, _) = run(Tls::Off, true, &[flags(3), option(option::EXPORT_NAME, b"other")], 7);
        assert_eq!((end, output.len()), (Some(Step::Close(Ending::NoSuchExport)), 0));
    }

    #[test]
    fn what_follows_go_is_left_for_transmission() {
        let mut script = vec![flags(3), go(option::GO, b"", &[])];
        let length = script.concat().len();
        script.push(vec![0x25, 0x60, 0x95, 0x13]);
        let (_, _, consumed) = run(Tls::Off, true, &script, 1000);
        assert_eq!(consumed, length);
    }

    #[test]
    fn block_status_needs_the_context_under_the_name_that_is_used() {
        let set = |name: &[u8], queries: &[&[u8]]| contexts(option::SET_META_CONTEXT, name, queries);
        let structured = option(option::STRUCTURED_REPLY, &[]);
        for (script, expected) in [
            (vec![structured.clone(), set(b"", &[b"qemu:x", b"base:allocation"])], true),
            (vec![structured.clone(), set(b"", &[b"base:"])], false),
            (vec![structured.clone(), set(b"", &[])], false),
            (vec![structured.clone(), set(b"weir", &[b"base:allocation"])], false),
            (
                vec![structured.clone(), set(b"", &[b"base:allocation"]), set(b"x", &[b"base:allocation"])],
                false,
            ),
            (vec![set(b"", &[b"base:allocation"]), structured], false),
        ] {
            let script = [vec![flags(3)], script, vec![go(option::GO, b"", &[])]].concat();
            let (end, ..) = run(Tls::Off, true, &script, 1000);
            let wanted = Negotiated { structured: true, allocation: expected };
            assert_eq!(end, Some(Step::Transmission(wanted)), "{script:?}");
        }
    }

    #[test]
    fn contexts_are_listed_by_wildcard_and_by_name() {
        for (queries, found) in [
            (&[][..], true),
            (&[&b"base:"[..]][..], true),
            (&[&b"base:allocation"[..]][..], true),
            (&[&b"base:other"[..], b"x-y:z"][..], false),
        ] {
            let script = [
                flags(3),
                option(option::STRUCTURED_REPLY, &[]),
                contexts(option::LIST_META_CONTEXT, b"", queries),
            ];
            let (end, output, _) = run(Tls::Off, true, &script, 1000);
            assert_eq!(end, None);
            let context = (option::LIST_META_CONTEXT, option_reply::META_CONTEXT);
            assert_eq!(kinds(&output).contains(&context), found, "{queries:?}");
            assert_eq!(kinds(&output).last(), Some(&(option::LIST_META_CONTEXT, option_reply::ACK)));
        }
    }

    #[test]
    fn lengths_that_do_not_add_up_are_invalid_and_the_session_goes_on() {
        let mut beyond = go(option::INFO, b"weir", &[]);
        beyond[OPTION_BYTES + 3] = 5; // the name is said to reach past the data
        let mut huge = go(option::INFO, b"weir", &[]);
        huge[OPTION_BYTES..OPTION_BYTES + 4].copy_from_slice(&u32::MAX.to_be_bytes());
        let mut queries = contexts(option::SET_META_CONTEXT, b"", &[b"base:allocation"]);
        queries[OPTION_BYTES + 4..OPTION_BYTES + 8].copy_from_slice(&u32::MAX.to_be_bytes());
        let script = [
            flags(3),
            option(option::STRUCTURED_REPLY, b"data"),
            option(option::STRUCTURED_REPLY, b""),
            option(option::LIST, b"data"),
            option(option::INFO, b""),
            beyond,
            huge,
            queries,
            option(4, b"was PEEK_EXPORT"),
            option(11, b""),
            go(option::INFO, b"other", &[]),
            option(option::LIST, b""),
        ];
        let (end, output, _) = run(Tls::Off, true, &script, 3);
        assert_eq!(end, None);
        use option_reply::{ACK, ERR_INVALID, ERR_UNKNOWN, ERR_UNSUP, SERVER};
        assert_eq!(
            kinds(&output),
            [
                (option::STRUCTURED_REPLY, ERR_INVALID),
                (option::STRUCTURED_REPLY, ACK),
                (option::LIST, ERR_INVALID),
                (option::INFO, ERR_INVALID),
                (option::INFO, ERR_INVALID),
                (option::INFO, ERR_INVALID),
                (option::SET_META_CONTEXT, ERR_INVALID),
                (4, ERR_UNSUP),
                (11, ERR_UNSUP),
                (option::INFO, ERR_UNKNOWN),
                (option::LIST, SERVER),
                (option::LIST, ACK),
            ]
        );
    }

    #[test]
    fn long_options_are_skipped_and_absurd_ones_end_the_session() {
        let long = option(77, &vec![0; OPTION_DATA_MAX + 1]);
        let (end, output, _) = run(Tls::Off, true, &[flags(3), long, option(option::ABORT, b"why")], 1000);
        assert_eq!(end, Some(Step::Close(Ending::Abort)));
        assert_eq!(kinds(&output), [(77, option_reply::ERR_TOO_BIG), (option::ABORT, option_reply::ACK)]);

        let mut absurd = option(77, &[]);
        absurd[12..].copy_from_slice(&u32::MAX.to_be_bytes());
        let (end, ..) = run(Tls::Off, true, &[flags(3), absurd], 1000);
        assert_eq!(end, Some(Step::Close(Ending::OptionLength { option: 77, length: u32::MAX })));

        let many = vec![option(99, &[]); OPTIONS_MAX as usize + 1];
        let (end, ..) = run(Tls::Off, true, &[vec![flags(3)], many].concat(), 1000);
        assert_eq!(end, Some(Step::Close(Ending::TooManyOptions)));
    }

    #[test]
    fn unknown_client_flags_and_a_wrong_magic_end_the_session() {
        let (end, ..) = run(Tls::Off, true, &[flags(4)], 4);
        assert_eq!(end, Some(Step::Close(Ending::ClientFlags(4))));
        let (end, ..) = run(Tls::Off, true, &[flags(3), vec![7; 16]], 100);
        assert_eq!(end, Some(Step::Close(Ending::Magic(0x0707_0707_0707_0707))));
    }

    #[test]
    fn tls_when_required_comes_before_anything_else() {
        let script = [
            flags(3),
            option(option::LIST, b""),
            go(option::GO, b"", &[]),
            option(123, b""),
            option(option::STARTTLS, b""),
        ];
        let (end, output, _) = run(Tls::Required, true, &script, 50);
        assert_eq!(end, Some(Step::StartTls));
        use option_reply::{ACK, ERR_TLS_REQD};
        assert_eq!(
            kinds(&output),
            [
                (option::LIST, ERR_TLS_REQD),
                (option::GO, ERR_TLS_REQD),
                (123, ERR_TLS_REQD),
                (option::STARTTLS, ACK)
            ]
        );
        let (end, ..) = run(Tls::Required, true, &[flags(3), option(option::EXPORT_NAME, b"")], 50);
        assert_eq!(end, Some(Step::Close(Ending::TlsRequired)));

        // Inside TLS there are no client flags, and no second TLS; without TLS it is refused.
        let script = [option(option::STARTTLS, b""), go(option::GO, b"", &[])];
        let (end, output, _) = run(Tls::Active, true, &script, 50);
        assert!(matches!(end, Some(Step::Transmission(_))));
        assert_eq!(kinds(&output)[0], (option::STARTTLS, option_reply::ERR_INVALID));
        let (_, output, _) = run(Tls::Off, true, &[flags(3), option(option::STARTTLS, b"")], 50);
        assert_eq!(kinds(&output), [(option::STARTTLS, option_reply::ERR_POLICY)]);
    }

    #[test]
    fn go_is_refused_while_every_connection_is_in_use() {
        let script = [flags(3), go(option::INFO, b"", &[]), go(option::GO, b"", &[])];
        let (end, output, _) = run(Tls::Off, false, &script, 50);
        assert_eq!(end, None);
        assert_eq!(kinds(&output).last(), Some(&(option::GO, option_reply::ERR_POLICY)));
        let (end, ..) = run(Tls::Off, false, &[flags(3), option(option::EXPORT_NAME, b"")], 50);
        assert_eq!(end, Some(Step::Close(Ending::NoRoom)));
    }

    #[test]
    fn no_reply_exceeds_its_bound() {
        let export = Export { name: "n".repeat(NAME_MAX), description: "d".repeat(NAME_MAX), ..export() };
        let mut handshake = Handshake::new(&export, Tls::Active);
        let mut output = Vec::new();
        let _ = handshake.advance(&go(option::INFO, b"", &[1, 2, 3, 1, 2]), true, &mut output);
        assert!(output.len() <= OUTPUT_MAX && output.len() > 2 * NAME_MAX, "{}", output.len());
    }

    fn scripts() -> impl Strategy<Value = Vec<Vec<u8>>> {
        let name = prop_oneof![Just(b"".to_vec()), Just(b"weir".to_vec()), Just(b"other".to_vec())];
        let query = prop_oneof![
            Just(b"base:allocation".to_vec()),
            Just(b"base:".to_vec()),
            proptest::collection::vec(any::<u8>(), 0..20)
        ];
        let message = prop_oneof![
            (0u32..13, proptest::collection::vec(any::<u8>(), 0..40)).prop_map(|(n, data)| option(n, &data)),
            (6u32..8, name.clone(), proptest::collection::vec(0u16..5, 0..4))
                .prop_map(|(n, name, requests)| go(n, &name, &requests)),
            (9u32..11, name, proptest::collection::vec(query, 0..4)).prop_map(|(n, name, queries)| {
                contexts(n, &name, &queries.iter().map(Vec::as_slice).collect::<Vec<_>>())
            }),
        ];
        (0u32..5, proptest::collection::vec(message, 0..12))
            .prop_map(|(client, messages)| [vec![flags(client)], messages].concat())
    }

    proptest! {
        #[test]
        fn the_outcome_does_not_depend_on_how_the_bytes_arrive(
            script in scripts(), piece in 1usize..100, tls in prop_oneof![Just(Tls::Off), Just(Tls::Required)],
        ) {
            prop_assert_eq!(run(tls, true, &script, usize::MAX), run(tls, true, &script, piece));
        }
    }
}
