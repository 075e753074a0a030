//! Promises of a volume, on a store that never fails. (simulator.rs has stores that do.)

mod driver;

use driver::{Driven as _, driver};
use proptest::prelude::*;
use std::collections::HashMap;
use std::os::unix::fs::FileExt;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};
use weir_core::{ByteSize, PAGE_SIZE, PageBytes, PageNo, Rest};
use weir_store::{Fault, Host, OpenErrorKind, Progress, Sim, SimUrl, Store};
use weir_volume::{Config, GiveBackError, Kept, Lane, View, Volume};

const CHUNK: u32 = 32_768;

fn volume(pages: u32, lanes: usize) -> Arc<Volume> {
    let config = Config { pages, lanes, depth: 4 };
    Volume::create(config, vec![Arc::new(Host::new(config.slots()).unwrap())]).unwrap()
}

/// A page that names its number and generation in every word.
fn stamped(page: u32, generation: u32) -> PageBytes {
    let mut bytes = [0; PAGE_SIZE];
    for (at, chunk) in bytes.chunks_exact_mut(16).enumerate() {
        chunk[..4].copy_from_slice(&page.to_le_bytes());
        chunk[4..8].copy_from_slice(&generation.to_le_bytes());
        chunk[8..12].copy_from_slice(&(at as u32).to_le_bytes());
        chunk[12..].copy_from_slice(&(page ^ generation.rotate_left(16)).to_le_bytes());
    }
    bytes
}

fn stamp(bytes: &PageBytes) -> (u32, u32) {
    let word = |at: usize| u32::from_le_bytes(bytes[at..at + 4].try_into().unwrap());
    let (page, generation) = (word(0), word(4));
    assert!(*bytes == stamped(page, generation), "torn page: {page} {generation}");
    (page, generation)
}

fn write(lane: &mut Lane, page: u32, bytes: &PageBytes) {
    // If a lane's thread is kept from running for seconds, it holds freed slots back for that long,
    // and others' writes find none.
    let (begun, mut rest) = (Instant::now(), Rest::default());
    let mut done = lane.write(0, PageNo(page), bytes);
    while [Progress::Full, Progress::Done(Err(Fault::Full))].contains(&done)
        && begun.elapsed() < Duration::from_secs(60)
    {
        lane.submit();
        lane.poll(Instant::now(), &mut |_| {});
        rest.until_next();
        done = lane.write(0, PageNo(page), bytes);
    }
    assert_eq!(done, Progress::Done(Ok(())));
}

/// Writes as a front end does: in runs where possible, and the rest one by one. Returns how many
/// pages were written in runs.
fn write_run(lane: &mut Lane, first: u32, pages: &[PageBytes]) -> usize {
    let done = lane.write_run(PageNo(first), pages);
    for (page, bytes) in (first..).zip(pages).skip(done) {
        write(lane, page, bytes);
    }
    done
}

fn read(lane: &mut Lane, page: u32) -> PageBytes {
    let mut bytes = [0xee; PAGE_SIZE];
    assert_eq!(lane.read(0, PageNo(page), &mut bytes), Progress::Done(Ok(())));
    bytes
}

/// Reads as a front end does: in runs where possible, and the rest one by one.
fn read_run(lane: &mut Lane, first: u32, count: u32) -> Vec<PageBytes> {
    let mut pages = vec![[0xee; PAGE_SIZE]; count as usize];
    let done = lane.read_run(PageNo(first), &mut pages);
    assert!(pages[done..].iter().all(|page| *page == [0xee; PAGE_SIZE]), "what was not read is as it was");
    for (number, page) in (first..).zip(&mut pages).skip(done) {
        *page = read(lane, number);
    }
    pages
}

#[derive(Clone, Debug)]
enum Action {
    Write { page: u32, seed: u8 },
    Uniform { page: u32, value: u32 },
    Run { page: u32, seeds: Vec<u8> },
    Part { page: u32, offset: usize, len: usize, seed: u8 },
    Discard { page: u32, count: u32 },
    Zero { page: u32, count: u32 },
    Read { page: u32 },
    ReadRun { page: u32, count: u32 },
    EndBatch,
}

const PAGES: u32 = 24;

fn action() -> impl Strategy<Value = Action> {
    let page = 0..PAGES;
    prop_oneof![
        4 => (page.clone(), any::<u8>()).prop_map(|(page, seed)| Action::Write { page, seed }),
        1 => (page.clone(), any::<u32>()).prop_map(|(page, value)| Action::Uniform { page, value }),
        2 => (page.clone(), prop::collection::vec(any::<u8>(), 1..PAGES as usize))
            .prop_map(|(page, seeds)| Action::Run { page: page.min(PAGES - seeds.len() as u32), seeds }),
        2 => (page.clone(), 0..PAGE_SIZE, 1..PAGE_SIZE, any::<u8>())
            .prop_map(|(page, offset, len, seed)| Action::Part { page, offset, len: len.min(PAGE_SIZE - offset), seed }),
        1 => (page.clone(), 1..8u32).prop_map(|(page, count)| Action::Discard { page, count: count.min(PAGES - page) }),
        1 => (page.clone(), 1..8u32).prop_map(|(page, count)| Action::Zero { page, count: count.min(PAGES - page) }),
        4 => page.clone().prop_map(|page| Action::Read { page }),
        2 => (page, 1..8u32).prop_map(|(page, count)| Action::ReadRun { page, count: count.min(PAGES - page) }),
        2 => Just(Action::EndBatch),
    ]
}

proptest! {
    #[test]
    fn a_volume_is_an_array_of_pages(actions in prop::collection::vec((0..2usize, action()), 1..300)) {
        let volume = volume(PAGES, 2);
        let mut lanes = [volume.lane().unwrap(), volume.lane().unwrap()];
        let mut model: HashMap<u32, PageBytes> = HashMap::new();
        for (lane, action) in actions {
            let lane = &mut lanes[lane];
            match action {
                Action::Write { page, seed } => {
                    let bytes = stamped(page, u32::from(seed));
                    write(lane, page, &bytes);
                    model.insert(page, bytes);
                }
                Action::Uniform { page, value } => {
                    let mut bytes = [0; PAGE_SIZE];
                    bytes.chunks_exact_mut(4).for_each(|word| word.copy_from_slice(&value.to_ne_bytes()));
                    write(lane, page, &bytes);
                    model.insert(page, bytes);
                }
                Action::Run { page, seeds } => {
                    // Some pages are one repeated value, which takes no slot.
                    let bytes = |seed: u8| if seed < 50 { [seed; PAGE_SIZE] } else { stamped(page, seed.into()) };
                    let run: Vec<PageBytes> = seeds.iter().map(|seed| bytes(*seed)).collect();
                    write_run(lane, page, &run);
                    model.extend((page..).zip(run));
                }
                Action::Part { page, offset, len, seed } => {
                    let patch = vec![seed; len];
                    prop_assert_eq!(lane.write_part(0, PageNo(page), offset, &patch), Progress::Done(Ok(())));
                    model.entry(page).or_insert([0; PAGE_SIZE])[offset..offset + len].copy_from_slice(&patch);
                }
                Action::Discard { page, count } => {
                    lane.discard(PageNo(page), count);
                    (page..page + count).for_each(|page| { model.remove(&page); });
                }
                Action::Zero { page, count } => {
                    lane.zero(PageNo(page), count, false);
                    (page..page + count).for_each(|page| { model.insert(page, [0; PAGE_SIZE]); });
                }
                Action::Read { page } => {
                    let expected = model.get(&page).copied().unwrap_or([0; PAGE_SIZE]);
                    prop_assert!(read(lane, page) == expected);
                    prop_assert_eq!(lane.mapped(PageNo(page)), model.contains_key(&page));
                    let seen = match lane.pin().view(PageNo(page)) {
                        View::Bytes(bytes) => *bytes == expected,
                        View::Fill(value) => expected.chunks_exact(4).all(|word| word == value.to_ne_bytes()),
                        View::Elsewhere | View::Fault(_) => false,
                    };
                    prop_assert!(seen, "a view shows what a read returns");
                }
                Action::ReadRun { page, count } => {
                    for (number, bytes) in (page..).zip(read_run(lane, page, count)) {
                        prop_assert!(bytes == model.get(&number).copied().unwrap_or([0; PAGE_SIZE]));
                    }
                }
                Action::EndBatch => lane.submit(),
            }
        }
        let status = volume.status();
        prop_assert_eq!(status.stored + status.filled, model.len() as u64);
        prop_assert_eq!(u64::from(status.stores[0].used), status.stored);
        prop_assert_eq!(status.read_faults + status.write_faults + status.corrupt, 0);
    }
}

#[test]
fn a_full_volume_can_be_overwritten_for_ever_from_every_lane() {
    // Every page is in use, so each write needs the slack; threads end batches at odd moments.
    let (pages, threads) = (512, 4);
    let volume = volume(pages, threads);
    let rounds = if cfg!(miri) { 1 } else { 200 };
    std::thread::scope(|scope| {
        for thread in 0..threads as u32 {
            let volume = Arc::clone(&volume);
            scope.spawn(move || {
                let mut lane = volume.lane().unwrap();
                for round in 0..rounds {
                    for page in (thread..pages).step_by(threads) {
                        write(&mut lane, page, &stamped(page, round));
                        if (page + round) % 13 == 0 {
                            lane.submit();
                        }
                    }
                    for page in (thread..pages).step_by(threads) {
                        assert_eq!(stamp(&read(&mut lane, page)), (page, round));
                    }
                    lane.submit();
                }
            });
        }
    });
    let status = volume.status();
    assert_eq!(
        (status.stored, status.stores[0].used),
        (u64::from(pages), pages),
        "no slot leaked, none freed twice"
    );
}

#[test]
fn runs_from_every_lane_overwrite_a_full_volume_and_readers_see_only_whole_pages_of_them() {
    let (length, threads) = (if cfg!(miri) { 4 } else { 48u32 }, 3);
    let volume = volume(length * threads, 2 * threads as usize);
    let rounds = if cfg!(miri) { 3 } else { 300 };
    let together = std::sync::atomic::AtomicUsize::new(0);
    std::thread::scope(|scope| {
        for first in (0..threads).map(|thread| thread * length) {
            let (writing, reading, together) = (Arc::clone(&volume), Arc::clone(&volume), &together);
            scope.spawn(move || {
                let mut lane = writing.lane().unwrap();
                for round in 1..rounds {
                    let run: Vec<_> = (first..first + length).map(|page| stamped(page, round)).collect();
                    together
                        .fetch_add(write_run(&mut lane, first, &run), std::sync::atomic::Ordering::Relaxed);
                    lane.submit();
                }
            });
            scope.spawn(move || {
                let mut lane = reading.lane().unwrap();
                let mut newest = vec![0; length as usize];
                for at in 0..length * rounds {
                    let from = at % length;
                    let run = read_run(&mut lane, first + from, (1 + at % 5).min(length - from));
                    lane.submit();
                    for (at, bytes) in (from..).zip(&run) {
                        let (page, newest) = (first + at, &mut newest[at as usize]);
                        if *bytes == [0; PAGE_SIZE] && *newest == 0 {
                            continue; // not written yet
                        }
                        let (found, generation) = stamp(bytes);
                        assert_eq!(found, page);
                        assert!(generation >= *newest, "page {page} went back in time");
                        *newest = generation;
                    }
                }
            });
        }
    });
    let status = volume.status();
    let pages = u64::from(length * threads);
    assert_eq!(
        (status.stored, u64::from(status.stores[0].used)),
        (pages, pages),
        "no slot leaked, none freed twice"
    );
    assert_eq!(status.corrupt, 0);
    // A write that finds the volume full for the moment is counted again when it is tried again.
    assert!(status.writes >= pages * u64::from(rounds - 1), "{} writes", status.writes);
    assert!(together.into_inner() > 0, "some were written together");
}

#[test]
#[cfg_attr(miri, ignore = "a file is written")]
fn a_run_ends_before_a_page_that_its_store_has_changed() {
    let config = Config { pages: 16, lanes: 1, depth: 4 };
    let store = Arc::new(Host::new(config.slots()).unwrap());
    let memory = std::fs::File::from(store.fd().try_clone_to_owned().unwrap());
    let volume = Volume::create(config, vec![store]).unwrap();
    let mut lane = volume.lane().unwrap();
    let written: Vec<_> = (0..16).map(|page| stamped(page, 1)).collect();
    write_run(&mut lane, 0, &written);
    assert!(read_run(&mut lane, 0, 16) == written);
    // Only its stamp tells where page 9 lies.
    let mut slot = [0; PAGE_SIZE];
    let at = (0..u64::from(config.slots()))
        .map(|slot| slot * PAGE_SIZE as u64)
        .find(|at| memory.read_exact_at(&mut slot, *at).is_ok() && slot == written[9])
        .unwrap();
    memory.write_all_at(&[!written[9][100]], at + 100).unwrap();
    let mut back = vec![[0xee; PAGE_SIZE]; 16];
    assert_eq!(lane.read_run(PageNo(0), &mut back), 9);
    assert!(back[..9] == written[..9], "what lies before it is read");
    assert!(back[9..].iter().all(|page| *page == [0xee; PAGE_SIZE]), "and nothing of it is handed out");
    assert_eq!(lane.read(0, PageNo(9), &mut back[9]), Progress::Done(Err(Fault::Corrupt)));
    assert_eq!(lane.read_run(PageNo(10), &mut back[10..]), 6);
    assert_eq!(volume.status().corrupt, 1, "counted once");
}

#[test]
fn readers_of_contended_pages_see_whole_pages_and_never_older_ones_again() {
    let (pages, rounds) = (8u32, if cfg!(miri) { 20 } else { 30_000u32 });
    let volume = volume(pages, 4);
    write_all(&volume, pages, 0);
    std::thread::scope(|scope| {
        for writer in 0..2 {
            let volume = Arc::clone(&volume);
            scope.spawn(move || {
                let mut lane = volume.lane().unwrap();
                for round in 1..rounds {
                    let page = (round * 7) % (pages / 2) + writer * pages / 2;
                    write(&mut lane, page, &stamped(page, round));
                    lane.submit();
                }
            });
        }
        for _ in 0..2 {
            let volume = Arc::clone(&volume);
            scope.spawn(move || {
                let mut lane = volume.lane().unwrap();
                let mut newest = vec![0; pages as usize];
                for at in 0..rounds * 2 {
                    let page = at % pages;
                    let (found, generation) = stamp(&read(&mut lane, page));
                    assert_eq!(found, page);
                    assert!(generation >= newest[page as usize], "page {page} went back in time");
                    newest[page as usize] = generation;
                    lane.submit();
                }
            });
        }
    });
    assert_eq!(volume.status().corrupt, 0);
}

#[test]
fn partial_writes_from_two_lanes_lose_nothing_of_each_other() {
    let volume = volume(1, 2);
    let rounds = if cfg!(miri) { 10u32 } else { 5_000 };
    std::thread::scope(|scope| {
        for half in 0..2usize {
            let volume = Arc::clone(&volume);
            scope.spawn(move || {
                let mut lane = volume.lane().unwrap();
                let mine = half * PAGE_SIZE / 2;
                for round in 1..=rounds {
                    let mut progress = lane.write_part(0, PageNo(0), mine, &round.to_le_bytes());
                    // The other lane holds the last slot back.
                    while progress == Progress::Queued {
                        lane.poll(Instant::now(), &mut |done| progress = Progress::Done(done.result));
                        std::thread::yield_now();
                    }
                    assert_eq!(progress, Progress::Done(Ok(())));
                    assert_eq!(
                        read(&mut lane, 0)[mine..mine + 4],
                        round.to_le_bytes(),
                        "my own half, as I wrote it"
                    );
                    lane.submit();
                }
            });
        }
    });
}

fn write_all(volume: &Arc<Volume>, pages: u32, generation: u32) {
    let mut lane = volume.lane().unwrap();
    for page in 0..pages {
        write(&mut lane, page, &stamped(page, generation));
        lane.submit();
    }
}

/// Ends the other threads, even if the test fails: they would be waited for.
struct Ends<'a>(&'a AtomicBool);

impl Drop for Ends<'_> {
    fn drop(&mut self) {
        self.0.store(true, Ordering::Relaxed);
    }
}

#[test]
fn a_chunk_is_given_back_and_taken_again_under_load_and_no_page_changes() {
    let pages = 1000;
    let config = Config { pages, lanes: 4, depth: 4 };
    let first = Arc::new(Host::new(CHUNK).unwrap());
    let stores: Vec<Arc<dyn Store>> = vec![first.clone(), Arc::new(Host::new(config.slots()).unwrap())];
    let volume = Volume::create(config, stores).unwrap();
    write_all(&volume, pages, 0);
    assert_eq!(volume.status().stores[0].used, pages, "the first store fills first");
    let stop = AtomicBool::new(false);
    std::thread::scope(|scope| {
        let _ends = Ends(&stop);
        for thread in 0..2 {
            let (volume, stop) = (Arc::clone(&volume), &stop);
            scope.spawn(move || {
                let _ends = Ends(stop);
                let mut lane = volume.lane().unwrap();
                let mut generations = vec![0; pages as usize];
                let mut at = thread;
                while !stop.load(Ordering::Relaxed) {
                    let page = at % pages;
                    assert_eq!(stamp(&read(&mut lane, page)), (page, generations[page as usize]));
                    generations[page as usize] += 1;
                    write(&mut lane, page, &stamped(page, generations[page as usize]));
                    lane.submit();
                    at += 2;
                }
            });
        }
        let mut workers = [volume.mover().unwrap(), volume.mover().unwrap()];
        for _ in 0..20 {
            volume.begin_give_back(0, &[0]).unwrap();
            std::thread::scope(|scope| {
                for (worker, part) in workers.iter_mut().zip(0..) {
                    scope.spawn(move || worker.move_out(0, 0, (part, 2), &mut driver(|_| true)).unwrap());
                }
            });
            let [worker, _] = &mut workers;
            worker.finish_give_back(0, 0, &mut driver(|_| true)).unwrap();
            assert_eq!(volume.status().stores[0].used, 0);
            assert!(rustix_blocks(&first) == 0, "the memory has gone back");
            worker.take(0, 0).unwrap();
            // New writes go to the first store again; wait until some have.
            while volume.status().stores[0].used == 0 {
                assert!(!stop.load(Ordering::Relaxed), "nobody writes any more");
                std::thread::yield_now();
            }
        }
    });
    assert_eq!(volume.status().corrupt, 0);
}

#[test]
fn pages_are_counted_and_timed_by_the_store_that_they_lie_in() {
    const FIRST: u32 = 96;
    let config = Config { pages: 256, lanes: 1, depth: 4 };
    let stores: Vec<Arc<dyn Store>> =
        vec![Arc::new(Host::new(FIRST).unwrap()), Arc::new(Host::new(config.slots()).unwrap())];
    let volume = Volume::create(config, stores).unwrap();
    volume.time_with(Instant::now);
    let mut lane = volume.lane().unwrap();
    for page in 0..192 {
        write(&mut lane, page, &stamped(page, 1));
    }
    lane.submit();
    // These pages are one repeated value, so they are in no store: they are written one by one, and
    // 8 at once.
    (192..200).for_each(|page| write(&mut lane, page, &[7; PAGE_SIZE]));
    lane.zero(PageNo(200), 8, false);
    let in_first = u64::from(volume.status().stores[0].used);
    assert!(in_first > 0 && in_first <= u64::from(FIRST));

    for page in 0..200 {
        read(&mut lane, page);
    }
    assert_eq!(read_run(&mut lane, 0, 192).len(), 192);
    let guard = lane.pin();
    assert!(matches!(guard.view(PageNo(0)), View::Bytes(_)));
    assert!(matches!(guard.view(PageNo(191)), View::Bytes(_)));
    guard.count_reads(2, 0);
    drop(guard);

    let status = volume.status();
    let [first, second] = &status.stores[..] else { panic!("two stores") };
    assert_eq!((first.writes, second.writes, status.writes), (in_first, 192 - in_first, 192 + 8 + 8));
    assert_eq!(first.reads, 2 * in_first + 1);
    assert_eq!(second.reads, 2 * (192 - in_first) + 1);
    assert_eq!(status.reads, 2 * 192 + 8 + 2, "8 of them from no store");
    for store in [first, second] {
        assert!(store.read_latencies.count() > 0 && store.write_latencies.count() > 0);
    }
}

#[test]
fn what_waits_at_a_store_is_counted_once_and_what_only_moves_is_not() {
    // Pages in the first store can be viewed in place; those in the second are fetched, one
    // operation after another.
    let config = Config { pages: 256, lanes: 1, depth: 2 };
    let slow = SimUrl { size: ByteSize(2 << 20), delay: 3, ..SimUrl::default() };
    let stores: Vec<Arc<dyn Store>> =
        vec![Arc::new(Host::new(64).unwrap()), Arc::new(Sim::open(slow).unwrap())];
    let volume = Volume::create(config, stores).unwrap();
    let mut lane = volume.lane().unwrap();
    for page in 0..192 {
        finish(&mut lane, |lane| lane.write(0, PageNo(page), &stamped(page, 1)));
    }
    let in_first = u64::from(volume.status().stores[0].used);
    assert!(in_first > 0 && in_first < 192);
    let counts = || {
        let status = volume.status();
        let of = |at: usize| (status.stores[at].reads, status.stores[at].writes);
        (of(0), of(1), (status.reads, status.writes))
    };
    assert_eq!(counts(), ((0, in_first), (0, 192 - in_first), (0, 192)));

    // A run ends at the first page that cannot be viewed; the rest is fetched.
    let mut out = vec![[0; PAGE_SIZE]; 192];
    let seen = lane.read_run(PageNo(0), &mut out);
    lane.submit();
    assert_eq!(counts().2, (seen as u64, 192));
    for page in seen as u32..192 {
        let mut bytes = [0; PAGE_SIZE];
        finish(&mut lane, |lane| lane.read(0, PageNo(page), &mut bytes));
    }
    assert_eq!(counts(), ((in_first, in_first), (192 - in_first, 192 - in_first), (192, 192)));

    for page in [0, 191] {
        finish(&mut lane, |lane| lane.write_part(0, PageNo(page), 100, b"part"));
    }
    let (first, second, all) = counts();
    assert_eq!((first.1 + second.1, all), (194, (192, 194)), "a part is one write and no read");
}

/// Continues an operation until it is done.
fn finish(lane: &mut Lane, mut begin: impl FnMut(&mut Lane) -> Progress) {
    loop {
        match begin(lane) {
            Progress::Done(result) => return result.unwrap(),
            Progress::Queued => break,
            Progress::Full => {
                lane.submit();
                lane.poll(Instant::now(), &mut |_| {});
            }
        }
    }
    lane.submit();
    while lane.in_flight() > 0 {
        lane.poll(Instant::now(), &mut |done| done.result.unwrap());
        lane.submit();
    }
}

fn rustix_blocks(host: &Host) -> u64 {
    let file = std::fs::File::from(host.fd().try_clone_to_owned().unwrap());
    std::os::unix::fs::MetadataExt::blocks(&file.metadata().unwrap())
}

#[test]
fn a_chunk_goes_in_parts_and_what_stays_goes_with_the_last() {
    let config = Config { pages: 10, lanes: 2, depth: 4 };
    let stores: Vec<Arc<dyn Store>> =
        vec![Arc::new(Host::new(CHUNK).unwrap()), Arc::new(Host::new(config.slots()).unwrap())];
    let volume = Volume::create(config, stores).unwrap();
    write_all(&volume, 10, 1);
    let (mut lane, mut mover) = (volume.lane().unwrap(), volume.mover().unwrap());
    volume.begin_give_back(0, &[0]).unwrap();
    // A store's first slots are taken first.
    assert_eq!(mover.move_out(0, 0, (1, 2), &mut driver(|_| true)).unwrap(), 0);
    assert_eq!(
        mover.move_out(0, 0, (u32::MAX, u32::MAX), &mut driver(|_| true)).unwrap(),
        0,
        "there is no such part"
    );
    assert_eq!(
        mover.move_out(0, 0, (0, CHUNK / 4), &mut driver(|_| true)).unwrap(),
        4,
        "a part of four slots"
    );
    let stopped = mover.move_out(0, 0, (0, 2), &mut driver(|_| false));
    assert!(matches!(stopped, Err(GiveBackError::Stopped)), "{stopped:?}");
    assert_eq!(
        mover.finish_give_back(0, 0, &mut driver(|_| true)).unwrap(),
        2,
        "a batch went before the stop"
    );
    for page in 0..10 {
        assert_eq!(stamp(&read(&mut lane, page)), (page, 1));
    }
}

#[test]
fn a_chunk_that_the_volume_needs_stays() {
    let volume = volume(10, 2);
    let (mut lane, mut mover) = (volume.lane().unwrap(), volume.mover().unwrap());
    write(&mut lane, 3, &stamped(3, 1));
    let error = mover.give_back(0, 0, &mut driver(|_| true)).unwrap_err();
    assert!(matches!(error, GiveBackError::NoRoom { .. }), "{error}");
    assert!(error.to_string().contains("backing"), "{error}");
    assert_eq!(stamp(&read(&mut lane, 3)), (3, 1));
    write(&mut lane, 4, &stamped(4, 1));
    assert!(matches!(mover.give_back(0, 1, &mut driver(|_| true)), Err(GiveBackError::NoChunk { .. })));
    assert!(matches!(mover.give_back(1, 0, &mut driver(|_| true)), Err(GiveBackError::NoChunk { .. })));
}

#[test]
fn a_new_daemon_takes_over_every_page_of_a_dead_one() {
    let pages = 300;
    let config = Config { pages, lanes: 2, depth: 4 };
    let host = Host::new(config.slots()).unwrap();
    let pages_fd = host.fd().try_clone_to_owned().unwrap();
    let volume = Volume::create(config, vec![Arc::new(host)]).unwrap();
    write_all(&volume, pages, 1);
    let mut lane = volume.lane().unwrap();
    (0..50).for_each(|page| write(&mut lane, page, &stamped(page, 2)));
    lane.discard(PageNo(100), 20);
    write(&mut lane, 200, &[5; PAGE_SIZE]);
    let fds = volume.kept_fds();
    let adopt =
        |fd: std::os::fd::BorrowedFd<'_>| weir_core::Memory::adopt(fd.try_clone_to_owned().unwrap()).unwrap();
    let kept = Kept { map: adopt(fds.map), records: fds.records.into_iter().map(adopt).collect() };
    drop((lane, volume));

    let host = Arc::new(Host::adopt(weir_core::Memory::adopt(pages_fd).unwrap()));
    let (volume, lost) = Volume::take_over(config, vec![host], kept).unwrap();
    assert_eq!(lost, 0);
    let status = volume.status();
    assert_eq!((status.stored, status.filled, status.stores[0].used), (279, 1, 279));
    let mut lane = volume.lane().unwrap();
    for page in 0..pages {
        let bytes = read(&mut lane, page);
        match page {
            100..120 => assert_eq!(bytes, [0; PAGE_SIZE]),
            200 => assert_eq!(bytes, [5; PAGE_SIZE]),
            _ => assert_eq!(stamp(&bytes), (page, if page < 50 { 2 } else { 1 })),
        }
    }
    for round in 3..10 {
        (0..pages).for_each(|page| write(&mut lane, page, &stamped(page, round)));
        lane.submit();
    }
    assert_eq!(volume.status().stores[0].used, pages);
}

#[test]
fn a_volume_that_its_stores_cannot_hold_is_refused_with_the_numbers() {
    let config = Config { pages: 1000, lanes: 1, depth: 4 };
    let error = Volume::create(config, vec![Arc::new(Host::new(1000).unwrap())]).unwrap_err().to_string();
    assert!(error.contains("3.9MiB") && error.contains("make it smaller"), "{error}");
    let none = Volume::create(Config { pages: 0, ..config }, vec![]).unwrap_err().to_string();
    assert!(none.contains("0 pages on 0 stores"), "{none}");
}

#[test]
fn a_lane_that_finds_too_little_slack_is_refused_until_another_gives_its_part_back() {
    let volume = volume(1, 1);
    let wanted = volume.config().lane_slots();
    let refused = || volume.lane().err().map(|error| error.kind);
    let lane = volume.lane().unwrap();
    assert_eq!(refused(), Some(OpenErrorKind::Slack { wanted, left: 0 }));
    drop(lane);
    assert_eq!(refused(), None);
    let (lender, _) = volume.lender(1, 1).unwrap();
    assert_eq!(refused(), Some(OpenErrorKind::Slack { wanted, left: wanted - 1 }));
    drop(lender);
    assert_eq!(refused(), None);
    let lending = volume.lender(wanted + 1, 1).err().map(|error| error.kind);
    assert_eq!(lending, Some(OpenErrorKind::Slack { wanted: wanted + 1, left: wanted }));
    assert!(volume.lender(wanted, 1).is_ok(), "the one that was refused left nothing behind");
}

#[test]
fn the_hundredth_lane_holds_back_what_it_looks_at_and_counts_as_any_other() {
    let volume = volume(2, 150);
    let mut lanes: Vec<Lane> = (0..150).map(|_| volume.lane().unwrap()).collect();
    let content = |number: u32| {
        let mut page = [7; PAGE_SIZE];
        page[..4].copy_from_slice(&number.to_le_bytes());
        page
    };
    let (last, others) = lanes.split_last_mut().unwrap();
    assert_eq!(last.write(0, PageNo(0), &content(0)), Progress::Done(Ok(())));
    last.submit();
    let guard = last.pin();
    let View::Bytes(shown) = guard.view(PageNo(0)) else { panic!("it lies in host memory") };
    // The last of these search for slots where that page lay.
    for (number, lane) in (1..).zip(others) {
        assert_eq!(lane.write(0, PageNo(0), &content(number)), Progress::Done(Ok(())));
        lane.submit();
    }
    assert!(*shown == content(0), "its slot was used again under the guard");
    drop(guard);
    assert_eq!(volume.status().writes, 150);
}

#[test]
fn a_lane_that_always_has_something_under_way_runs_out_of_no_slots() {
    let config = Config { pages: 256, lanes: 2, depth: 16 };
    let url = SimUrl {
        size: ByteSize(u64::from(config.slots()) * PAGE_SIZE as u64),
        delay: 4,
        ..SimUrl::default()
    };
    let volume = Volume::create(config, vec![Arc::new(Sim::open(url).unwrap())]).unwrap();
    for reads in [false, true] {
        let mut lane = volume.lane().unwrap();
        let (mut page, mut out) = ([0; PAGE_SIZE], [0; PAGE_SIZE]);
        let mut done = 0;
        for at in 0..20_000u32 {
            // Each page differs from all others, so that it takes a slot.
            page[..4].copy_from_slice(&at.to_le_bytes());
            page[4] = 1;
            let number = PageNo(at % 256);
            let progress = if reads && at % 2 == 1 {
                lane.read(at % 16, number, &mut out)
            } else {
                lane.write(at % 16, number, &page)
            };
            match progress {
                Progress::Done(result) => result.unwrap(),
                Progress::Queued => done += 1,
                Progress::Full => panic!("operation {at} found no room"),
            }
            lane.submit();
            // Never wait for all: some operation is always under way.
            while lane.in_flight() > 8 {
                lane.poll(Instant::now(), &mut |completion| completion.result.unwrap());
            }
        }
        assert!(done > 10_000, "{done} went through the store's queue");
        while lane.in_flight() > 0 {
            lane.poll(Instant::now(), &mut |completion| completion.result.unwrap());
        }
    }
}
