//! The request engine over a volume, and over a filter that answers late, has no room, and fails.

mod common;

use common::{Mood, Moody};
use proptest::prelude::*;
use std::time::Instant;
use weir_core::{PAGE_SIZE, PageBytes, PageNo};
use weir_device::{Fault, PageDevice, PageLane, Progress};
use weir_request::{Answer, Id, Op, Request, RequestMemory, Requests, STEP, Span};
use weir_store::{Host, StoreUrl};
use weir_volume::{Config, Lane, Volume};

const PAGE: u64 = PAGE_SIZE as u64;
const IDS: u16 = 6;
/// Number of pages of the device that one request's owner uses.
const REGION: u64 = 16;

/// For each request the bytes that it writes, and those that it has read.
struct Pages {
    data: Vec<Vec<u8>>,
    read: Vec<Vec<PageBytes>>,
    /// The memory that it shows, for one request at a time, if it has no more.
    narrow: Option<(Vec<u8>, PageBytes)>,
}

impl Pages {
    fn new() -> Self {
        let read = vec![vec![[0xee; PAGE_SIZE]; REGION as usize]; usize::from(IDS)];
        Pages { data: vec![Vec::new(); usize::from(IDS)], read, narrow: None }
    }
}

impl RequestMemory for Pages {
    fn fetch(&mut self, id: Id, _at: u32) {
        if let Some((shown, _)) = &mut self.narrow {
            shown.clone_from(&self.data[usize::from(id)]);
        }
    }
    fn data(&self, id: Id) -> &[u8] {
        self.narrow.as_ref().map_or(&self.data[usize::from(id)], |(shown, _)| shown)
    }
    fn pages(&mut self, id: Id, at: u32) -> &mut [PageBytes] {
        if let Some((_, page)) = &mut self.narrow {
            return std::slice::from_mut(page);
        }
        // In two halves: memory need not be of one piece.
        let (at, half) = (at as usize, REGION as usize / 2);
        let end = if at < half { half } else { 2 * half };
        &mut self.read[usize::from(id)][at..end]
    }
    fn filled(&mut self, id: Id, at: u32, count: u32) {
        if let Some((_, page)) = &mut self.narrow {
            assert!(count <= 1, "more pages than there were");
            self.read[usize::from(id)][at as usize..(at + count) as usize].fill(*page);
        }
    }
}

fn volume(pages: u32, url: Option<&str>) -> std::sync::Arc<Volume> {
    let config = Config { pages, lanes: 2, depth: 8 };
    let store = match url {
        Some(url) => weir_store::open(&url.parse::<StoreUrl>().unwrap()).unwrap(),
        None => std::sync::Arc::new(Host::new(config.slots()).unwrap()),
    };
    Volume::create(config, vec![store]).unwrap()
}

fn turns<L: PageLane>(requests: &mut Requests<L>, memory: &mut Pages, most: usize) {
    for _ in 0..most {
        if !requests.is_busy() {
            return;
        }
        requests.turn(Instant::now(), memory);
    }
    assert!(!requests.is_busy(), "busy after {most} turns");
}

/// The next answer.
fn next<L: PageLane>(requests: &mut Requests<L>) -> Option<(Id, Result<(), Fault>)> {
    requests.finished().map(|answer| (answer.id, answer.result))
}

fn one<L: PageLane>(requests: &mut Requests<L>, memory: &mut Pages, request: Request) -> Result<(), Fault> {
    requests.begin(0, request, memory);
    requests.submit();
    turns(requests, memory, 10_000);
    let answer = requests.finished().expect("an answer");
    assert_eq!((answer.id, answer.request, requests.finished()), (0, request, None), "one answer");
    answer.result
}

/// The device's content, read page by page by a lane of its own.
fn content(lane: &mut Lane, first: u64, pages: u64) -> Vec<u8> {
    let mut all = Vec::new();
    for page in first..first + pages {
        let mut bytes = [0; PAGE_SIZE];
        assert_eq!(lane.read(0, PageNo(page as u32), &mut bytes), Progress::Done(Ok(())));
        all.extend(bytes);
    }
    lane.submit();
    all
}

/// Writes as who receives the bytes piece by piece, three pages at a time.
fn write_in_pieces<L: PageLane>(requests: &mut Requests<L>, memory: &mut Pages, id: Id, request: Request) {
    requests.open(id, request);
    let (Span { mut offset, length }, bytes) = (request.span, memory.data[usize::from(id)].clone());
    let end = offset + length;
    let mut unheard = bytes.as_slice();
    while offset < end {
        let until = end.min((offset / PAGE + 3) * PAGE);
        let issued = requests.write_piece(id, offset, &unheard[..(until - offset) as usize]);
        (offset, unheard) = (offset + issued as u64, &unheard[issued..]);
        if issued == 0 {
            requests.submit();
            requests.turn(Instant::now(), memory);
        }
    }
    // From here on the memory may be anything else's.
    requests.close(id, Ok(()));
}

fn any_request() -> impl Strategy<Value = (Op, u64, u64, bool, u8)> {
    let op = prop_oneof![
        3 => Just(Op::Read), 4 => Just(Op::Write), 1 => Just(Op::Discard), 1 => Just(Op::Zero), 1 => Just(Op::Hole),
        1 => Just(Op::Flush)
    ];
    let at = prop_oneof![(0..REGION).prop_map(|page| page * PAGE), 0..REGION * PAGE];
    let length = prop_oneof![(1..=REGION).prop_map(|pages| pages * PAGE), 1..REGION * PAGE];
    (op, at, length, any::<bool>(), any::<u8>())
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 256, ..ProptestConfig::default() })]

    #[test]
    fn each_request_is_answered_once_and_truly_whatever_the_device_answers(
        batches in proptest::collection::vec(proptest::collection::vec(any_request(), 1..usize::from(IDS)), 1..12),
        (late, full, fails, polls) in (0u64..80, 0u64..60, prop_oneof![Just(0u64), 0u64..10], 1u64..6),
        (narrow, in_pieces) in any::<(bool, bool)>(),
        seed: u64,
    ) {
        let pages = u64::from(IDS) * REGION;
        let volume = volume(pages as u32, None);
        let mut other = volume.lane().unwrap();
        let mood = Mood { late, full: full.min(90 - late.min(80)), fails, polls };
        let mut requests = Requests::new(Moody::new(volume.open().unwrap(), mood, seed), IDS);
        let (mut memory, mut model) = (Pages::new(), vec![0u8; (pages * PAGE) as usize]);
        memory.narrow = narrow.then(|| (Vec::new(), [0; PAGE_SIZE]));
        for batch in &batches {
            let before = model.clone();
            let mut asked = Vec::new();
            for (id, &(op, at, length, fua, seed)) in batch.iter().enumerate() {
                let base = id as u64 * REGION * PAGE;
                let span = match op {
                    Op::Flush => Span { offset: 0, length: 0 },
                    _ => Span { offset: base + at, length: length.min(REGION * PAGE - at) },
                };
                let range = span.offset as usize..(span.offset + span.length) as usize;
                memory.data[id] = (0..span.length).map(|n| (n as u8).wrapping_mul(31) ^ seed ^ (n >> 12) as u8).collect();
                match op {
                    Op::Write => model[range].copy_from_slice(&memory.data[id]),
                    Op::Discard | Op::Zero | Op::Hole => model[range].fill(0),
                    Op::Read | Op::Flush => {}
                }
                asked.push((Request { op, span, fua }, None));
            }
            let coming: Vec<_> = asked.iter().enumerate().map(|(id, (request, _))| (id as Id, *request)).collect();
            requests.announce(coming.iter().copied(), &memory);
            for (id, request) in coming {
                if request.op == Op::Write && in_pieces {
                    write_in_pieces(&mut requests, &mut memory, id, request);
                } else {
                    requests.begin(id, request, &mut memory);
                }
            }
            requests.submit();
            turns(&mut requests, &mut memory, 5000);
            while let Some(Answer { id, result, .. }) = requests.finished() {
                prop_assert!(asked[usize::from(id)].1.replace(result).is_none(), "answered twice");
            }
            for (id, (Request { op, span, .. }, answer)) in asked.iter().enumerate() {
                let result = answer.expect("an answer");
                prop_assert!(fails > 0 || result.is_ok(), "{op:?}: {result:?}");
                let range = span.offset as usize..(span.offset + span.length) as usize;
                if *op == Op::Read && result.is_ok() {
                    let bytes = memory.read[id].as_flattened();
                    let from = span.offset as usize % PAGE_SIZE;
                    prop_assert!(bytes[from..from + range.len()] == before[range.clone()], "{id} read {span:?}");
                }
                if result.is_err() {
                    // Each page has its old content or the new one.
                    let first = id as u64 * REGION;
                    let found = content(&mut other, first, REGION);
                    let at = (first * PAGE) as usize;
                    for (page, bytes) in found.chunks(PAGE_SIZE).enumerate() {
                        let here = at + page * PAGE_SIZE..at + (page + 1) * PAGE_SIZE;
                        prop_assert!(bytes == &before[here.clone()] || bytes == &model[here.clone()]);
                        model[here].copy_from_slice(bytes);
                    }
                }
            }
            prop_assert!(content(&mut other, 0, pages) == model, "something else was changed");
        }
    }
}

const LATE: Mood = Mood { late: 100, full: 0, fails: 0, polls: 3 };

#[test]
fn a_change_with_fua_is_flushed_before_it_is_acknowledged_and_one_without_is_not() {
    let volume = volume(64, None);
    let mut requests = Requests::new(Moody::new(volume.open().unwrap(), LATE, 1), IDS);
    let mut memory = Pages::new();
    memory.data[0] = vec![7; 3 * PAGE_SIZE];
    let span = Span { offset: 100, length: 2 * PAGE };
    for (op, fua, flushes) in [
        (Op::Write, false, 0),
        (Op::Write, true, 1),
        (Op::Read, true, 1),
        (Op::Discard, true, 2),
        (Op::Zero, true, 3),
        (Op::Flush, false, 4),
        (Op::Flush, true, 5),
    ] {
        assert_eq!(one(&mut requests, &mut memory, Request { op, span, fua }), Ok(()));
        assert_eq!(requests.lane().flushes, flushes, "{op:?} {fua}");
    }
}

#[test]
fn a_long_discard_takes_a_step_a_turn_and_lets_others_through() {
    let pages = 3 * STEP + 5;
    for op in [Op::Discard, Op::Zero, Op::Hole] {
        let volume = volume(pages, None);
        let mut requests = Requests::new(volume.open().unwrap(), IDS);
        let mut memory = Pages::new();
        memory.data[1] = vec![7; PAGE_SIZE];
        let write = |page| Request { op: Op::Write, span: Span::pages_from(PageNo(page), 1), fua: false };
        requests.begin(1, write(STEP), &mut memory);
        requests.begin(
            0,
            Request { op, span: Span::pages_from(PageNo(0), pages - 1), fua: false },
            &mut memory,
        );
        requests.begin(
            2,
            Request { op: Op::Read, span: Span::pages_from(PageNo(pages - 1), 1), fua: false },
            &mut memory,
        );
        requests.submit();
        assert_eq!(next(&mut requests), Some((1, Ok(()))));
        assert!(!requests.lane().known_zero(PageNo(STEP)), "the first step ends before it");
        assert!(requests.must_poll(), "nobody announces the next step");
        requests.turn(Instant::now(), &mut memory);
        assert_eq!((next(&mut requests), next(&mut requests)), (Some((2, Ok(()))), None), "{op:?}");
        assert!(requests.lane().known_zero(PageNo(STEP)));
        requests.turn(Instant::now(), &mut memory);
        assert!(requests.is_busy());
        requests.turn(Instant::now(), &mut memory);
        assert_eq!((next(&mut requests), requests.is_busy()), (Some((0, Ok(()))), false));
    }
}

#[test]
fn a_thread_that_waits_for_a_slow_store_sleeps_until_it_has_its_answer() {
    let volume = volume(64, Some("sim:seed=1,size=4MiB,delay=20"));
    let mut requests = Requests::new(volume.open().unwrap(), IDS);
    let mut memory = Pages::new();
    memory.data[0] = (0..REGION * PAGE).map(|at| (at >> 3) as u8).collect();
    for op in [Op::Write, Op::Read] {
        requests.begin(
            0,
            Request { op, span: Span { offset: 3, length: 9 * PAGE }, fua: false },
            &mut memory,
        );
        requests.submit();
        while requests.is_busy() {
            requests.wait(None).unwrap();
            requests.turn(Instant::now(), &mut memory);
        }
        assert_eq!(next(&mut requests), Some((0, Ok(()))));
    }
    assert!(memory.read[0].as_flattened()[3..3 + 9 * PAGE_SIZE] == memory.data[0][..9 * PAGE_SIZE]);
}

#[test]
fn bytes_are_shown_where_they_lie_and_never_those_that_must_be_fetched() {
    let mut memory = Pages::new();
    memory.data[0] = (0..REGION * PAGE).map(|at| (at >> 3) as u8 | 1).collect();
    for (url, shown) in [(None, true), (Some("sim:seed=1,size=4MiB,delay=20"), false)] {
        let volume = volume(64, url);
        let mut requests = Requests::new(volume.open().unwrap(), IDS);
        let span = Span { offset: 4000, length: 3 * PAGE };
        assert_eq!(one(&mut requests, &mut memory, Request { op: Op::Write, span, fua: false }), Ok(()));
        let found = requests.view::<{ 1 + REGION as usize }, _, _>((0, span), &memory, b"head", |slices| {
            slices.iter().flat_map(|slice| slice.to_vec()).collect::<Vec<u8>>()
        });
        let expected = [b"head", &memory.data[0][..3 * PAGE_SIZE]].concat();
        assert_eq!(found, shown.then_some(expected));
    }
}

#[test]
fn a_request_that_is_forsaken_takes_no_effect_and_is_answered_so() {
    // A lane that takes nothing, and one that takes all and finishes it late.
    for mood in [Mood { late: 0, full: 100, fails: 0, polls: 1 }, Mood { polls: 1000, ..LATE }] {
        let takes = mood.full == 0;
        let volume = volume(64, None);
        let mut requests = Requests::new(Moody::new(volume.open().unwrap(), mood, 1), IDS);
        let mut memory = Pages::new();
        memory.data = vec![vec![7; PAGE_SIZE]; usize::from(IDS)];
        let write = |page| Request { op: Op::Write, span: Span::pages_from(PageNo(page), 1), fua: false };
        (0..4u16).for_each(|id| requests.begin(id, write(id.into()), &mut memory));
        requests.submit();
        assert_eq!(requests.finished(), None);
        requests.forsake(|id| id % 2 == 1);
        requests.lane().mood.full = 0;
        turns(&mut requests, &mut memory, 2000);
        let mut answers: Vec<_> = std::iter::from_fn(|| next(&mut requests)).collect();
        answers.sort_by_key(|(id, _)| *id);
        let expected = |id| if id % 2 == 1 { Err(Fault::Forsaken) } else { Ok(()) };
        assert_eq!(answers, [0, 1, 2, 3].map(|id| (id, expected(id))), "{takes}");
        let found = content(&mut volume.lane().unwrap(), 0, 4);
        let written = found.chunks(PAGE_SIZE).map(|page| page == [7; PAGE_SIZE]).collect::<Vec<_>>();
        assert_eq!(written, [true, false, true, false], "{takes}");
    }
}

#[test]
fn a_write_that_has_waited_for_a_piece_takes_effect_behind_another_look_at_its_client() {
    for (begins, length) in [(0, PAGE_SIZE), (1000, 500)] {
        let volume = volume(64, None);
        let full = Mood { late: 0, full: 100, fails: 0, polls: 1 };
        let mut requests = Requests::new(Moody::new(volume.open().unwrap(), full, 1), IDS);
        let (mut memory, mut other) = (Pages::new(), volume.lane().unwrap());
        let span = Span { offset: 3 * PAGE + begins, length: length as u64 };
        requests.open(0, Request { op: Op::Write, span, fua: false });
        let piece: Vec<u8> = (0..length).map(|at| (at / 7) as u8).collect();
        assert_eq!(requests.write_piece(0, span.offset, &piece), 0);
        requests.turn(Instant::now(), &mut memory);
        requests.lane().mood.full = 0;
        // The owner has looked. The client leaves now, and writes the page by another connection.
        assert_eq!(requests.write_piece(0, span.offset, &piece), length);
        requests.close(0, Ok(()));
        assert!(content(&mut other, 3, 1) == [0; PAGE_SIZE], "the page is changed too soon");
        assert_eq!(other.write(0, PageNo(3), &[9; PAGE_SIZE]), Progress::Done(Ok(())));
        other.submit();
        requests.forsake(|_| true);
        requests.turn(Instant::now(), &mut memory);
        assert_eq!(next(&mut requests), Some((0, Err(Fault::Forsaken))));
        assert!(content(&mut other, 3, 1) == [9; PAGE_SIZE]);
    }
}

#[test]
fn a_write_that_has_waited_takes_effect_behind_another_look_at_its_client() {
    let bytes = |first: u8| std::array::from_fn(|at| first.wrapping_add((at / 7) as u8));
    for (page, begins, length) in [(3, 0, PAGE), (4, 1000, 500), (5, 0, 6 * PAGE)] {
        let volume = volume(64, None);
        let full = Mood { late: 0, full: 100, fails: 0, polls: 1 };
        let mut requests = Requests::new(Moody::new(volume.open().unwrap(), full, 1), IDS);
        let (mut memory, mut other) = (Pages::new(), volume.lane().unwrap());
        memory.data[0] = bytes(1).repeat(6)[..length as usize].to_vec();
        let span = Span { offset: page * PAGE + begins, length };
        requests.begin(0, Request { op: Op::Write, span, fua: false }, &mut memory);
        requests.lane().mood.full = 0;
        // The client leaves in the middle of this turn, and writes the page by another connection.
        requests.turn(Instant::now(), &mut memory);
        assert!(requests.must_poll() && next(&mut requests).is_none());
        assert!(content(&mut other, page, 1) == [0; PAGE_SIZE], "page {page} is changed too soon");
        assert_eq!(other.write(0, PageNo(page as u32), &bytes(2)), Progress::Done(Ok(())));
        other.submit();
        requests.forsake(|_| true);
        requests.turn(Instant::now(), &mut memory);
        assert_eq!(next(&mut requests), Some((0, Err(Fault::Forsaken))));
        assert!(content(&mut other, page, 1) == bytes(2), "page {page}");
    }
}

#[test]
fn a_write_whose_bytes_are_still_to_come_is_work_only_while_the_device_works_for_it() {
    let volume = volume(16, None);
    let mut memory = Pages::new();
    let request = Request { op: Op::Write, span: Span { offset: 0, length: 2 * PAGE }, fua: false };
    let mut requests = Requests::new(volume.open().unwrap(), IDS);
    requests.open(0, request);
    assert!(!requests.has_work(), "nothing has come");
    assert_eq!(requests.write_piece(0, 0, &[7; PAGE_SIZE]), PAGE_SIZE);
    requests.submit();
    assert!(!requests.has_work() && requests.is_busy(), "its page is written");
    drop(requests);
    let mut requests = Requests::new(Moody::new(volume.open().unwrap(), LATE, 1), IDS);
    requests.open(0, request);
    assert_eq!(requests.write_piece(0, 0, &[8; PAGE_SIZE]), PAGE_SIZE);
    requests.submit();
    assert!(requests.has_work(), "the device has its page");
    for _ in 0..100 {
        requests.turn(Instant::now(), &mut memory);
    }
    assert!(!requests.has_work() && requests.is_busy(), "the device has answered");
    assert_eq!(requests.write_piece(0, PAGE, &[9; PAGE_SIZE]), PAGE_SIZE);
    requests.close(0, Ok(()));
    assert!(requests.has_work());
    turns(&mut requests, &mut memory, 100);
    assert_eq!((next(&mut requests), requests.has_work()), (Some((0, Ok(()))), false));
    assert_eq!(content(&mut volume.lane().unwrap(), 0, 2), [[8; PAGE_SIZE], [9; PAGE_SIZE]].concat());
}

#[test]
fn a_write_of_which_no_more_comes_fails_and_a_read_says_at_which_page_it_did() {
    let volume = volume(64, None);
    let mut requests = Requests::new(volume.open().unwrap(), IDS);
    let span = Span::pages_from(PageNo(3), 2);
    requests.open(2, Request { op: Op::Write, span, fua: true });
    assert_eq!(requests.write_piece(2, 3 * PAGE, &[5; PAGE_SIZE]), PAGE_SIZE);
    assert_eq!((requests.is_busy(), next(&mut requests)), (true, None));
    requests.close(2, Err(Fault::Io(5)));
    assert_eq!((next(&mut requests), requests.is_busy()), (Some((2, Err(Fault::Io(5)))), false));
    // Its lane reads some pages at once, and fails at the next.
    let mood = Mood { late: 0, full: 0, fails: 100, polls: 1 };
    let mut places = Vec::new();
    for seed in 0..20 {
        let mut requests = Requests::new(Moody::new(volume.open().unwrap(), mood, seed), IDS);
        let (mut memory, span) = (Pages::new(), Span { offset: 100, length: 3 * PAGE });
        requests.begin(1, Request { op: Op::Read, span, fua: false }, &mut memory);
        turns(&mut requests, &mut memory, 10);
        let answer = requests.finished().expect("an answer");
        if answer.result.is_err() {
            let read = memory.read[1].iter().take_while(|page| **page == [0; PAGE_SIZE]).count();
            assert_eq!(answer.at, read as u32);
            places.push(read);
        }
    }
    assert!(places.iter().any(|at| *at > 0) && places.contains(&0), "{places:?}");
}
