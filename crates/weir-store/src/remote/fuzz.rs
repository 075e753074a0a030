//! Checks that must hold for any answer of a node, and for any URL. The fuzzer calls these checks
//! with bytes of its own, and a test calls them with the fuzzer's seeds.

use super::answers::{Meaning, meaning, plain, run_id};
use super::cluster::{ranges, redirection};
use super::node::{Cluster, Node};
use super::operations::Kind;
use super::placement::{HASH_SLOTS, Placement};
use super::seal::{SEALED, Seal};
use super::url::RemoteUrl;
use crate::StoreUrl;
use redis::Value;
use std::sync::Arc;
use weir_core::{ByteSize, PAGE_SIZE, PageBytes, Slot};

/// Address of the node that answers.
const ASKED: &str = "10.0.0.7:6379";
const NODES: usize = 10;
const STAMP: u64 = 41;
const SLOT: Slot = Slot(3);

/// The key of a store, a page that is sealed with this key, and a cluster.
struct Fixture {
    seal: Seal,
    page: PageBytes,
    sealed: [u8; SEALED],
    placement: Placement,
    cluster: Cluster,
}

thread_local! {
    static FIXTURE: Fixture = Fixture::new();
}

impl Fixture {
    fn new() -> Self {
        let (seal, page, mut sealed) = (Seal::ephemeral().unwrap(), [7; PAGE_SIZE], [0; SEALED]);
        seal.close(SLOT, STAMP, &page, &mut sealed);
        let url = RemoteUrl::new([ASKED.to_owned()], ByteSize(1 << 30));
        let nodes = (0..NODES).map(|number| Arc::new(Node::new(number, &url, None).unwrap())).collect();
        let placement = Placement::of_cluster(7, 1 << 18, &[0; HASH_SLOTS], NODES);
        let cluster = Cluster::new(nodes);
        assert_eq!(cluster.find(ASKED), Some(0));
        Fixture { seal, page, sealed, placement, cluster }
    }
}

/// Runs one of four checks on an input. The first byte of the input chooses the check, and the
/// check reads the other bytes.
pub fn remote(bytes: &[u8]) {
    let Some((&what, rest)) = bytes.split_first() else { return };
    FIXTURE.with(|fixture| match what % 4 {
        0 => url(rest),
        1 => answers(rest, fixture),
        2 => sealed(rest, fixture),
        _ => text(rest),
    });
}

fn url(bytes: &[u8]) {
    let Ok(text) = std::str::from_utf8(bytes) else { return };
    match format!("redis:{text}").parse::<StoreUrl>() {
        Ok(StoreUrl::Remote(url)) => {
            assert!((1..=64).contains(&url.nodes.len()) && url.size.0 > 0);
            assert!(url.size.0.is_multiple_of(PAGE_SIZE as u64));
            assert!((1..=2).contains(&url.copies) && usize::from(url.copies) <= url.nodes.len());
            assert_eq!(url.to_string().parse(), Ok(StoreUrl::Remote(url.clone())));
            for (number, name) in url.nodes.iter().enumerate() {
                Node::new(number, &url, Some("secret")).unwrap().assign(name);
            }
        }
        Ok(other) => panic!("{other:?}"),
        Err(error) => assert!(!error.to_string().is_empty()),
    }
}

fn answers(bytes: &[u8], fixture: &Fixture) {
    let (mut reader, mut parser) = (bytes, redis::Parser::new());
    while let Ok(value) = parser.parse_value(&mut reader) {
        for kind in [Kind::Read(0), Kind::Read(STAMP), Kind::Write(STAMP), Kind::Copy(1), Kind::Probe] {
            answer(kind, &value, fixture);
        }
        for (first, last, address) in ranges(&value, ASKED) {
            assert!(first < HASH_SLOTS && last < HASH_SLOTS);
            is_address(&address);
        }
    }
}

fn answer(kind: Kind, value: &Value, fixture: &Fixture) {
    let (mut page, mut opened) = ([0; PAGE_SIZE], None);
    let open = |sealed: &[u8]| {
        opened = fixture.seal.open(SLOT, sealed, &mut page).ok();
        opened
    };
    match meaning(kind, value, open) {
        Meaning::Kept => assert!(kind == Kind::Probe || *value == Value::Okay),
        Meaning::Page(stamp) => {
            let Kind::Read(least) = kind else { panic!("{kind:?} brought a page") };
            assert!(opened == Some(stamp) && stamp >= least && page == fixture.page);
        }
        Meaning::Zeros => assert!(kind == Kind::Read(0) && *value == Value::Nil),
        Meaning::Missing => assert!(matches!(kind, Kind::Read(1..)) && *value == Value::Nil),
        Meaning::Wrong(stamp) => assert!(matches!(kind, Kind::Read(_)) && stamp == opened),
        Meaning::Moved(details) | Meaning::Ask(details) => {
            let Some((hash, address)) = redirection(&details, ASKED) else { return };
            is_address(&address);
            if let Some(node) = fixture.cluster.find(&address) {
                fixture.placement.moved(hash, node);
                assert!(fixture.placement.has_hash_slots(node));
            }
        }
        Meaning::Away(why) => is_plain(&why),
        Meaning::Later | Meaning::Refused(_) => {}
    }
}

/// Checks that a sealed page opens only if it is unchanged, and only for its own slot. The first
/// byte of `bytes` is the slot. Each further group of three bytes changes the sealed page: two
/// bytes give an offset, and the third one the change. An offset past the end shortens the sealed
/// page instead.
fn sealed(bytes: &[u8], fixture: &Fixture) {
    let Some((&slot, changes)) = bytes.split_first() else { return };
    let mut value = fixture.sealed.to_vec();
    for change in changes.chunks_exact(3) {
        let place = usize::from(u16::from_le_bytes([change[0], change[1]]));
        match value.get_mut(place) {
            Some(byte) => *byte ^= change[2],
            None => value.truncate(place % SEALED),
        }
    }
    let mut page = [0; PAGE_SIZE];
    let opened = fixture.seal.open(Slot(u32::from(slot)), &value, &mut page).ok();
    let is_same = value == fixture.sealed && u32::from(slot) == SLOT.0;
    assert_eq!(opened, is_same.then_some(STAMP));
    assert!(!is_same || page == fixture.page);
    assert!(fixture.seal.open(SLOT, bytes, &mut page).is_err(), "it was made up");
}

fn text(bytes: &[u8]) {
    let text = String::from_utf8_lossy(bytes);
    is_plain(&plain(&text));
    if let Some(run) = run_id(&text) {
        assert!(!run.is_empty() && !run.contains('\n'));
    }
    if let Some((hash, address)) = redirection(&text, ASKED) {
        assert!(hash < HASH_SLOTS);
        is_address(&address);
    }
}

fn is_plain(text: &str) {
    assert!(text.chars().count() <= 300 && !text.chars().any(char::is_control));
}

fn is_address(address: &str) {
    is_plain(address);
    let (host, port) = address.rsplit_once(':').expect("a host and a port");
    assert!(!host.is_empty() && port.parse::<u16>().is_ok_and(|port| port > 0), "{address}");
}

#[cfg(test)]
mod tests {
    #[test]
    fn each_seed_of_the_fuzzer_is_read() {
        let seeds = concat!(env!("CARGO_MANIFEST_DIR"), "/../../fuzz/seeds/remote_answers");
        let seeds: Vec<_> = std::fs::read_dir(seeds).unwrap().map(|seed| seed.unwrap().path()).collect();
        assert!(seeds.len() > 8);
        seeds.iter().for_each(|seed| super::remote(&std::fs::read(seed).unwrap()));
    }
}
