//! A negotiation with a client that sends anything, in pieces of any size. The server consumes as
//! many bytes as it says, holds and answers no more than it announces, answers in well-formed
//! replies, and always makes progress.
#![no_main]

use libfuzzer_sys::fuzz_target;
use weir_export::nbd::handshake::{Catalog, Export, Handshake, INPUT_MAX, OUTPUT_MAX, Step, Tls};
use weir_export::nbd::wire::OPTION_REPLY_MAGIC;

/// So many devices, which all answer as one export. The first is the default one.
struct Devices(Export, usize);

impl Devices {
    fn names(&self) -> impl Iterator<Item = String> {
        let first = std::iter::once(self.0.name.clone());
        first.chain((1..self.1).map(|at| format!("{}{at}", self.0.name)))
    }
}

impl Catalog for Devices {
    type Device = String;

    fn find(&self, name: &[u8]) -> Option<(Export, String)> {
        let mut found = self.names().filter(|its| name.is_empty() || its.as_bytes() == name);
        found.next().map(|name| (self.0.clone(), name))
    }

    fn list(&self, each: &mut dyn FnMut(&str, &str)) {
        self.names().for_each(|name| each(&name, &self.0.description));
    }
}

fuzz_target!(|data: &[u8]| {
    let Some((&[how, piece], stream)) = data.split_first_chunk::<2>() else { return };
    let tls = [Tls::Off, Tls::Required, Tls::Active][usize::from(how % 3)];
    let room = how & 0x80 == 0;
    let export = Export {
        name: "weir".to_owned(),
        description: "pages".to_owned(),
        bytes: 1 << 30,
        read_only: how & 0x40 != 0,
        clears: how & 0x20 != 0,
    };
    let devices = Devices(export, if how & 0x10 == 0 { 1 } else { 300 });
    let mut handshake = Handshake::new(&devices, tls);
    let mut pending: Vec<u8> = Vec::with_capacity(INPUT_MAX);
    let mut output = Vec::with_capacity(OUTPUT_MAX);
    for part in stream.chunks(usize::from(piece).max(1)) {
        pending.extend_from_slice(part);
        loop {
            output.clear();
            let (consumed, step) = handshake.advance(&pending, room, &mut output);
            assert!(consumed <= pending.len());
            assert!(output.len() <= OUTPUT_MAX);
            pending.drain(..consumed);
            match step {
                Step::NeedMore => break,
                Step::Again => assert!(consumed > 0 || !output.is_empty(), "it stands still"),
                Step::Transmission(negotiated) => {
                    assert!(tls != Tls::Required && room);
                    assert!(negotiated.structured || !negotiated.allocation);
                    let device = handshake.take_device();
                    assert!(device.is_some_and(|name| devices.names().any(|its| its == name)));
                    return;
                }
                Step::StartTls => {
                    assert_eq!(tls, Tls::Required);
                    return;
                }
                Step::Close(ending) => {
                    assert!(!ending.to_string().is_empty());
                    return;
                }
            }
            let mut replies = &output[..];
            while let Some((head, rest)) = replies.split_first_chunk::<20>() {
                assert_eq!(head[..8], OPTION_REPLY_MAGIC.to_be_bytes());
                let length = u32::from_be_bytes([head[16], head[17], head[18], head[19]]);
                replies = &rest[length as usize..];
            }
            assert!(replies.is_empty());
        }
        assert!(pending.len() < INPUT_MAX, "it holds more than it announced");
    }
});
