use super::*;
use crate::nbd::wire::{transmission_flag, u16_at};
use proptest::prelude::*;
use std::cell::RefCell;

fn export() -> Export {
    Export {
        name: "weir".into(),
        description: "a test".into(),
        bytes: 1 << 30,
        read_only: false,
        clears: true,
    }
}

/// The outcome of a negotiation about the device that `export` describes.
fn negotiated(structured: bool, allocation: bool) -> Negotiated {
    Negotiated { structured, allocation, bytes: 1 << 30, read_only: false, clears: true }
}

/// Devices that come and go; the first is the default one.
#[derive(Default)]
struct Devices(RefCell<Vec<Export>>);

impl Devices {
    fn add(&self, name: &str, bytes: u64, read_only: bool) {
        let description = format!("about {name}");
        let clears = !read_only;
        self.0.borrow_mut().push(Export { name: name.to_owned(), description, bytes, read_only, clears });
    }

    fn remove(&self, name: &str) {
        self.0.borrow_mut().retain(|export| export.name != name);
    }
}

impl Catalog for Devices {
    type Device = String;

    fn find(&self, name: &[u8]) -> Option<(Export, String)> {
        assert!(name.len() <= NAME_MAX, "a name that no device has");
        let found = |export: &&Export| name.is_empty() || export.name.as_bytes() == name;
        self.0.borrow().iter().find(found).map(|export| (export.clone(), export.name.clone()))
    }

    fn list(&self, each: &mut dyn FnMut(&str, &str)) {
        self.0.borrow().iter().for_each(|export| each(&export.name, &export.description));
    }
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

/// Runs a whole script through a handshake in pieces of `piece` bytes; returns the end and the
/// output.
fn run(tls: Tls, room: bool, script: &[Vec<u8>], piece: usize) -> (Option<Step>, Vec<u8>, usize) {
    let export = export();
    run_through(&mut Handshake::new(&export, tls), room, script, piece)
}

fn run_through<C: Catalog>(
    handshake: &mut Handshake<'_, C>,
    room: bool,
    script: &[Vec<u8>],
    piece: usize,
) -> (Option<Step>, Vec<u8>, usize) {
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
    let script = [flags(3), option(option::STRUCTURED_REPLY, &[]), go(option::GO, b"weir", &[1, 2, 3, 99])];
    let (end, output, _) = run(Tls::Off, true, &script, 1000);
    assert_eq!(end, Some(Step::Transmission(negotiated(true, false))));
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
        (vec![structured.clone(), set(b"", &[b"base:allocation"]), set(b"x", &[b"base:allocation"])], false),
        (vec![set(b"", &[b"base:allocation"]), structured], false),
    ] {
        let script = [vec![flags(3)], script, vec![go(option::GO, b"", &[])]].concat();
        let (end, ..) = run(Tls::Off, true, &script, 1000);
        let wanted = negotiated(true, expected);
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

    // Inside TLS a client sends no flags, and STARTTLS is refused. It is refused too if the server
    // offers no TLS.
    let script = [option(option::STARTTLS, b""), go(option::GO, b"", &[])];
    let (end, output, _) = run(Tls::Active, true, &script, 50);
    assert!(matches!(end, Some(Step::Transmission(_))));
    let refusal = (option::STARTTLS, option_reply::ERR_INVALID, b"TLS is active already".to_vec());
    assert_eq!(replies(&output)[0], refusal);
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

#[test]
fn each_name_is_answered_with_its_own_device_and_the_empty_name_with_the_default_one() {
    let devices = Devices::default();
    for (name, bytes, read_only) in [("one", 4096, false), ("two", 8192, true), ("three", 12288, false)] {
        devices.add(name, bytes, read_only);
    }
    for (asked, device) in [("one", "one"), ("two", "two"), ("three", "three"), ("", "one")] {
        let (export, _) = devices.find(device.as_bytes()).unwrap();
        let Export { bytes, read_only, clears, .. } = export;
        let expected = Negotiated { structured: false, allocation: false, bytes, read_only, clears };
        let told = [&bytes.to_be_bytes()[..], &export.flags(false).to_be_bytes()].concat();
        for by_go in [false, true] {
            let asks = if by_go {
                go(option::GO, asked.as_bytes(), &[info::NAME])
            } else {
                option(option::EXPORT_NAME, asked.as_bytes())
            };
            let mut handshake = Handshake::new(&devices, Tls::Off);
            let (end, output, _) = run_through(&mut handshake, true, &[flags(3), asks], 1000);
            assert_eq!(end, Some(Step::Transmission(expected)), "{asked}");
            if by_go {
                let replies = replies(&output);
                assert_eq!(replies[0].2[2..], told);
                assert_eq!(replies[2].2[2..], *device.as_bytes(), "clients are told the device's own name");
            } else {
                assert_eq!(output, told);
            }
            assert_eq!((handshake.take_device().as_deref(), handshake.take_device()), (Some(device), None));
        }
    }
    let long = "n".repeat(NAME_MAX + 1);
    for unknown in ["four", "on", "onetwo", "ONE", &long] {
        let mut handshake = Handshake::new(&devices, Tls::Off);
        let asks = go(option::GO, unknown.as_bytes(), &[]);
        let (end, output, _) = run_through(&mut handshake, true, &[flags(3), asks], 1000);
        assert_eq!((end, kinds(&output)), (None, vec![(option::GO, option_reply::ERR_UNKNOWN)]));
        let asks = option(option::EXPORT_NAME, unknown.as_bytes());
        let (end, ..) = run_through(&mut handshake, true, &[asks], 1000);
        assert_eq!(end, Some(Step::Close(Ending::NoSuchExport)));
        assert_eq!(handshake.take_device(), None);
    }
}

#[test]
fn a_device_that_goes_between_two_options_is_unknown_to_the_second() {
    let devices = Devices::default();
    devices.add("one", 4096, false);
    devices.add("two", 8192, false);
    let mut handshake = Handshake::new(&devices, Tls::Off);
    let asks = |number| go(number, b"two", &[]);
    let (end, output, _) = run_through(&mut handshake, true, &[flags(3), asks(option::INFO)], 1000);
    assert_eq!((end, kinds(&output).last()), (None, Some(&(option::INFO, option_reply::ACK))));
    assert_eq!(handshake.take_device(), None, "to ask about a device does not hold it");
    devices.remove("two");
    let (end, output, _) = run_through(&mut handshake, true, &[asks(option::GO)], 1000);
    assert_eq!((end, kinds(&output)), (None, vec![(option::GO, option_reply::ERR_UNKNOWN)]));
    // Another device may get the name of one that was removed.
    devices.add("two", 16384, true);
    let (end, ..) = run_through(&mut handshake, true, &[asks(option::GO)], 1000);
    let expected =
        Negotiated { structured: false, allocation: false, bytes: 16384, read_only: true, clears: false };
    assert_eq!(end, Some(Step::Transmission(expected)));
}

#[test]
fn block_status_that_was_selected_for_one_device_is_not_for_another() {
    let devices = Devices::default();
    devices.add("one", 1 << 30, false);
    devices.add("two", 1 << 30, false);
    for (selected, used) in [("one", "two"), ("two", "two"), ("two", "one"), ("", "two"), ("", "")] {
        let mut handshake = Handshake::new(&devices, Tls::Off);
        let script = [
            flags(3),
            option(option::STRUCTURED_REPLY, b""),
            contexts(option::SET_META_CONTEXT, selected.as_bytes(), &[b"base:allocation"]),
            go(option::GO, used.as_bytes(), &[]),
        ];
        let (end, ..) = run_through(&mut handshake, true, &script, 1000);
        let expected = Step::Transmission(negotiated(true, selected == used));
        assert_eq!(end, Some(expected), "{selected}, {used}");
    }
}

#[test]
fn a_long_list_is_answered_in_parts_with_each_device_once_and_the_session_goes_on() {
    for (count, length) in [(0, 1), (1, 1), (2, NAME_MAX), (500, 3), (500, 100), (300, NAME_MAX)] {
        let devices = Devices::default();
        for at in 0..count {
            // Descriptions of different lengths: if one device does not fit into an answer, a
            // shorter one behind it must wait too.
            let (name, description) = (format!("{at:0length$}"), "d".repeat(length * (at % 5) / 4));
            devices.0.borrow_mut().push(Export { name, description, ..export() });
        }
        let mut handshake = Handshake::new(&devices, Tls::Active);
        // The client sends one option for each list, though the answer comes in several parts.
        let script = [option(option::LIST, b""), option(option::LIST, b""), option(99, b"")];
        let (end, output, consumed) = run_through(&mut handshake, true, &script, 1000);
        assert_eq!((end, consumed), (None, script.concat().len()));
        let replies = replies(&output);
        let exports = devices.0.borrow();
        let list: Vec<_> = exports
            .iter()
            .map(|Export { name, description, .. }| {
                let length = (name.len() as u32).to_be_bytes();
                let data = [&length[..], name.as_bytes(), description.as_bytes()];
                (option::LIST, option_reply::SERVER, data.concat())
            })
            .chain([(option::LIST, option_reply::ACK, vec![])])
            .collect();
        assert_eq!(replies.len(), 2 * list.len() + 1, "{count} names of {length} bytes");
        assert!(replies[..list.len()] == list && replies[list.len()..2 * list.len()] == list);
        assert_eq!(replies[2 * list.len()].1, option_reply::ERR_UNSUP);
    }
}

#[test]
fn a_list_ends_though_devices_go_while_it_is_sent_and_though_one_has_a_name_that_is_too_long() {
    let devices = Devices::default();
    (0..200).for_each(|at| devices.add(&format!("{at:0100}"), 4096, false));
    let mut handshake = Handshake::new(&devices, Tls::Active);
    let (mut output, asked) = (Vec::new(), option(option::LIST, b""));
    assert_eq!(handshake.advance(&asked, true, &mut output), (asked.len(), Step::Again));
    devices.0.borrow_mut().truncate(2);
    assert_eq!(handshake.advance(&[], true, &mut output), (0, Step::Again));
    assert_eq!(handshake.advance(&[], true, &mut output), (0, Step::NeedMore));
    assert_eq!(kinds(&output).last(), Some(&(option::LIST, option_reply::ACK)));
    devices.add(&"n".repeat(OUTPUT_MAX), 4096, false);
    output.clear();
    let mut steps = 0;
    let mut input = &asked[..];
    while let (consumed, Step::Again) = handshake.advance(input, true, &mut output) {
        input = &input[consumed..];
        steps += 1;
        assert!(steps < 5 && output.len() <= OUTPUT_MAX);
    }
    assert_eq!(kinds(&output).last(), Some(&(option::LIST, option_reply::ACK)));
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
