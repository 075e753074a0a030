//! Several volumes of one pool: each sees its own pages, and comes and goes without the others.

use std::os::fd::BorrowedFd;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::Arc;
use std::time::Instant;
use weir_core::{ByteSize, Memory, PAGE_SIZE, PageBytes, PageNo};
use weir_device::{Coming, PageLane};
use weir_store::{Host, Progress, Sim, SimUrl, Store};
use weir_volume::{Config, CreateError, Kept, Lane, Pool, View, Volume};

const CONFIG: Config = Config { pages: 300, lanes: 4, depth: 64 };

fn pool() -> Arc<Pool> {
    Pool::create(CONFIG, vec![Arc::new(Host::new(CONFIG.slots()).unwrap())]).unwrap()
}

/// A pool whose writes are under way until a poll.
fn slow_pool() -> (Arc<Pool>, Arc<Sim>) {
    let size = ByteSize(u64::from(CONFIG.slots()) * PAGE_SIZE as u64);
    let sim = Arc::new(Sim::open(SimUrl { size, delay: 1, ..SimUrl::default() }).unwrap());
    (Pool::create(CONFIG, vec![sim.clone()]).unwrap(), sim)
}

fn content(number: u32) -> PageBytes {
    let mut page = [7; PAGE_SIZE];
    page[..4].copy_from_slice(&number.to_le_bytes());
    page
}

fn write(lane: &mut Lane, page: u32, number: u32) {
    assert_eq!(Lane::write(lane, 0, PageNo(page), &content(number)), Progress::Done(Ok(())));
    lane.submit();
}

/// Fills a volume with the numbers from `from` on.
fn fill(volume: &Arc<Volume>, from: u32) {
    let mut lane = volume.lane().unwrap();
    (0..volume.pages()).for_each(|page| write(&mut lane, page, from + page));
}

/// A volume's pages, `None` for zeros.
fn pages(volume: &Arc<Volume>) -> Vec<Option<u32>> {
    let mut lane = volume.lane().unwrap();
    let mut read = |page| {
        let mut found = [1; PAGE_SIZE];
        assert_eq!(Lane::read(&mut lane, 0, PageNo(page), &mut found), Progress::Done(Ok(())));
        let number = u32::from_le_bytes(found[..4].try_into().unwrap());
        let is_zero = found == [0; PAGE_SIZE];
        assert!(is_zero || found == content(number), "page {page}");
        (!is_zero).then_some(number)
    };
    (0..volume.pages()).map(&mut read).collect()
}

fn numbers(from: u32, count: u32) -> Vec<Option<u32>> {
    (from..from + count).map(Some).collect()
}

#[test]
fn volumes_of_one_pool_keep_their_own_pages_and_free_ranges_are_found_again() {
    let pool = pool();
    let volumes = [100, 1, 199].map(|size| pool.volume(size).unwrap());
    for (volume, from) in volumes.iter().zip([1000, 2000, 3000]) {
        fill(volume, from);
    }
    for (volume, from) in volumes.iter().zip([1000, 2000, 3000]) {
        assert_eq!(pages(volume), numbers(from, volume.pages()));
    }
    let refused = pool.volume(1).unwrap_err();
    assert!(matches!(refused, CreateError::NoRange { pages: 1, longest: 0 }), "{refused}");
    let [first, middle, last] = volumes;
    let mut mover = pool.mover().unwrap();
    let mut removal = middle.remove().unwrap();
    assert!(mover.remove(&mut removal) && mover.remove(&mut removal), "and a second end changes nothing");
    assert!(matches!(pool.volume(2), Err(CreateError::NoRange { pages: 2, longest: 1 })));
    assert!(matches!(pool.volume(0), Err(CreateError::Shape { pages: 0, .. })));
    let again = pool.volume(1).unwrap();
    assert!(mover.remove(&mut removal), "and one that comes late");
    assert!(matches!(pool.volume(1), Err(CreateError::NoRange { longest: 0, .. })));
    assert_eq!((again.range(), pages(&again)), (100..101, vec![None]), "nothing of the one before");
    assert_eq!(pages(&first), numbers(1000, 100));
    assert_eq!(pages(&last), numbers(3000, 199));
    assert_eq!(pool.status().stored, 299);
}

#[test]
fn no_operation_reaches_beyond_its_volumes_last_page() {
    const PAGES: u32 = 20;
    let pool = pool();
    let volumes = [PAGES, PAGES, PAGES].map(|size| pool.volume(size).unwrap());
    volumes.iter().for_each(|volume| fill(volume, 500));
    let mut lane = volumes[1].lane().unwrap();
    let (page, mut out) = (content(1), content(0));
    let many = vec![page; 18];
    let mut into = many.clone();
    type Operation<'a> = &'a mut dyn FnMut(&mut Lane, PageNo);
    let alone: [Operation<'_>; 9] = [
        &mut |lane, at| _ = Lane::read(lane, 0, at, &mut out),
        &mut |lane, at| _ = Lane::write(lane, 0, at, &page),
        &mut |lane, at| _ = Lane::write_part(lane, 0, at, 9, &[1]),
        &mut |lane, at| Lane::discard(lane, at, 1),
        &mut |lane, at| Lane::zero(lane, at, 1, true),
        &mut |lane, at| _ = Lane::mapped(lane, at),
        &mut |lane, at| _ = Lane::known_zero(lane, at),
        &mut |lane, at| _ = matches!(Lane::pin(lane).view(at), View::Fault(_)),
        &mut |lane, at| Lane::pin(lane).prefetch(at),
    ];
    for (number, operation) in alone.into_iter().enumerate() {
        for page in [PAGES, PAGES + 1, u32::MAX] {
            let outcome = catch_unwind(AssertUnwindSafe(|| operation(&mut lane, PageNo(page))));
            assert!(outcome.is_err(), "operation {number} on page {page} of {PAGES}");
        }
    }
    // Of a run the first pages are the volume's.
    let runs: [Operation<'_>; 6] = [
        &mut |lane, at| _ = Lane::read_run(lane, at, &mut into),
        &mut |lane, at| _ = Lane::write_run(lane, at, &many),
        &mut |lane, at| _ = Lane::queue_reads(lane, 0, at, 18),
        &mut |lane, at| _ = Lane::queue_writes(lane, 0, at, &many),
        &mut |lane, at| Lane::discard(lane, at, 18),
        &mut |lane, at| Lane::zero(lane, at, 18, false),
    ];
    for (number, operation) in runs.into_iter().enumerate() {
        let outcome = catch_unwind(AssertUnwindSafe(|| operation(&mut lane, PageNo(PAGES - 17))));
        assert!(outcome.is_err(), "run {number}");
    }
    // An announcement is a hint.
    PageLane::announce(&mut lane, [Coming::Reads(PageNo(PAGES - 1), 300)].into_iter());
    drop(lane);
    for volume in &volumes {
        assert_eq!(pages(volume), numbers(500, PAGES), "nothing of all that took effect");
    }
}

#[test]
fn a_volume_that_a_lane_holds_is_not_removed_and_a_removal_that_ends_early_keeps_its_pages_taken() {
    let pool = pool();
    let [volume, other] = [100, 200].map(|size| pool.volume(size).unwrap());
    fill(&volume, 0);
    let lane = volume.lane().unwrap();
    let volume = volume.remove().unwrap_err();
    drop(lane);
    assert_eq!(pages(&volume), numbers(0, 100), "it is as it was");
    drop(volume.remove().unwrap());
    assert!(matches!(pool.volume(1), Err(CreateError::NoRange { longest: 0, .. })));
    assert_eq!(pages(&other), vec![None; 200]);
}

#[test]
fn a_write_that_a_removed_volume_left_at_a_slow_store_never_shows_in_the_next_volume_there() {
    let (pool, sim) = slow_pool();
    let volume = pool.volume(CONFIG.pages).unwrap();
    let mut lane = volume.lane().unwrap();
    for page in 0..8 {
        assert_eq!(Lane::write(&mut lane, page, PageNo(page), &content(page)), Progress::Queued);
    }
    lane.submit();
    sim.hang(true);
    drop(lane);
    let mut mover = pool.mover().unwrap();
    let mut removal = volume.remove().unwrap();
    while !mover.remove(&mut removal) {}
    let next = pool.volume(CONFIG.pages).unwrap();
    sim.hang(false);
    let now = Instant::now();
    (0..3).for_each(|_| pool.close_lanes(now));
    assert_eq!(pages(&next), vec![None; CONFIG.pages as usize]);
    assert_eq!(pool.status().stores[0].used, 0, "and its slots are free");
}

#[test]
fn a_pool_that_is_taken_over_has_its_volumes_where_they_were_and_shows_their_pages_to_no_other() {
    let host = Host::new(CONFIG.slots()).unwrap();
    let adopt = |fd: BorrowedFd<'_>| Memory::adopt(fd.try_clone_to_owned().unwrap()).unwrap();
    let memory = adopt(host.fd());
    let pool = Pool::create(CONFIG, vec![Arc::new(host) as Arc<dyn Store>]).unwrap();
    let ranges = [50, 150].map(|size| {
        let volume = pool.volume(size).unwrap();
        fill(&volume, size);
        volume.range()
    });
    let fds = pool.kept_fds();
    let kept = Kept { map: adopt(fds.map), records: fds.records.into_iter().map(adopt).collect() };
    drop(pool);
    let (pool, lost) = Pool::take_over(CONFIG, vec![Arc::new(Host::adopt(memory))], kept).unwrap();
    assert_eq!(lost, 0);
    let new = pool.volume(100).unwrap();
    assert_eq!(new.range(), 200..300, "the first pages are somebody's");
    for range in [0..201, 299..300, 300..301, 5..5] {
        let refused = pool.reopen(range.clone()).unwrap_err();
        assert!(matches!(refused, CreateError::Kept(_)), "{range:?}");
        assert!(refused.to_string().ends_with(" are not free in the pool of 300 pages"), "{refused}");
    }
    let [second, first] = [&ranges[1], &ranges[0]].map(|range| pool.reopen(range.clone()).unwrap());
    assert_eq!((pages(&first), pages(&second)), (numbers(50, 50), numbers(150, 150)));
    assert_eq!(pages(&new), vec![None; 100]);
    assert!(pool.reopen(ranges[0].clone()).is_err(), "it is open");
}
