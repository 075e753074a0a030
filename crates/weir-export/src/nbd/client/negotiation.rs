//! A client's negotiation: its wishes before the first request, and the server's answers.

use super::super::wire::{
    self, client_flag, info, option, option_reply, transmission_flag, u16_at, u32_at, u64_at,
};
use super::{ClientError, MESSAGE_MAX, Stream, read_array, violation};
use std::io::{self, BufReader, Read, Write};

/// The wishes of a client.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct Wish {
    /// The export's name; empty for the default one.
    pub name: String,
    /// Whether to ask for structured replies.
    pub structured: bool,
    /// Whether to ask for `base:allocation`, which needs structured replies.
    pub allocation: bool,
}

impl Default for Wish {
    fn default() -> Self {
        Wish { name: String::new(), structured: true, allocation: true }
    }
}

/// The export as the server described it.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub struct Terms {
    /// The export's size in bytes.
    pub bytes: u64,
    /// The export's [`transmission_flag`]s.
    pub flags: u16,
    /// Minimum, preferred and maximum block size, if the server named them.
    pub block_sizes: Option<[u32; 3]>,
    /// Whether replies are structured.
    pub structured: bool,
    /// The context's number for `base:allocation`, if the server granted it.
    pub allocation: Option<u32>,
}

impl Terms {
    /// Whether a client may use several connections to the export.
    pub fn multi_conn(&self) -> bool {
        self.flags & transmission_flag::CAN_MULTI_CONN != 0
    }
}

/// A server's reply to an option: its type and data.
type OptionReply = (u32, Vec<u8>);

pub(super) fn negotiate(stream: &mut BufReader<Box<dyn Stream>>, wish: &Wish) -> Result<Terms, ClientError> {
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
    if length > MESSAGE_MAX {
        return Err(violation("a reply to an option that is longer than any"));
    }
    let mut data = vec![0; length as usize];
    stream.read_exact(&mut data)?;
    Ok((kind, data))
}
