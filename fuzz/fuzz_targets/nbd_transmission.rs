//! Requests from a client that sends anything, in pieces of any size, through a buffer of the
//! smallest size. The parser makes progress, payloads come out whole and split at pages, and
//! requests that pass the rules lie within the export. The same bytes go through the client's reply
//! decoder.
#![no_main]

use libfuzzer_sys::fuzz_target;
use weir_core::PAGE_SIZE;
use weir_export::nbd::transmission::{Event, Parser, ReplyHead, Rules};
use weir_export::nbd::wire::{PAYLOAD_MAX, command};

fuzz_target!(|data: &[u8]| {
    let Some((&[how, piece], stream)) = data.split_first_chunk::<2>() else { return };
    let rules = Rules {
        bytes: 1 << (how & 0x1f),
        read_only: how & 0x20 != 0,
        clears: piece & 1 != 0,
        structured: how & 0x40 != 0,
        allocation: how & 0x80 != 0,
        unfragmented_max: 1 << 16,
    };
    let mut parser = Parser::new();
    let mut buffer: Vec<u8> = Vec::with_capacity(Parser::BUFFER_MIN);
    let mut left = 0u32;
    let mut rest = stream;
    'stream: while !rest.is_empty() {
        let take = (usize::from(piece) * 16).max(1).min(Parser::BUFFER_MIN - buffer.len()).min(rest.len());
        assert!(take > 0, "a full buffer must hold an event");
        buffer.extend_from_slice(&rest[..take]);
        rest = &rest[take..];
        let mut input = &buffer[..];
        loop {
            match parser.next(&mut input) {
                Err(violation) => {
                    assert!(!violation.to_string().is_empty());
                    break 'stream;
                }
                Ok(None) => break,
                Ok(Some(Event::Request(request))) => {
                    assert_eq!(left, 0, "a request inside a payload");
                    if request.command == command::WRITE {
                        assert!(request.length <= PAYLOAD_MAX);
                        left = request.length;
                    }
                    let ranged = !matches!(request.command, command::DISC | command::FLUSH);
                    if rules.check(&request).is_ok() && ranged {
                        assert!(request.offset.checked_add(request.length.into()).unwrap() <= rules.bytes);
                    }
                }
                Ok(Some(Event::Payload(payload))) => {
                    let length = payload.bytes.len();
                    assert!(length > 0);
                    let within = (payload.offset % PAGE_SIZE as u64) as usize;
                    assert!((within == 0 && length % PAGE_SIZE == 0) || within + length <= PAGE_SIZE);
                    assert_eq!(payload.left, left - length as u32);
                    left = payload.left;
                }
            }
        }
        let keep = buffer.len() - input.len();
        buffer.drain(..keep);
    }
    let mut replies = stream;
    while let Ok(Some(_)) = ReplyHead::decode(&mut replies) {}
});
