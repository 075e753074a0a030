//! Several volumes of one pool: each sees its own pages, and comes and goes without the others.

use std::ops::Range;
use std::os::fd::BorrowedFd;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::Arc;
use std::time::Instant;
use weir_core::{ByteSize, Memory, PAGE_SIZE, PageBytes, PageNo};
use weir_device::{Coming, PageLane};
use weir_store::{Fault, Host, Progress, Sim, SimUrl, Store};
use weir_volume::{
    Compression, Config, CreateError, GiveBackError, Kept, Lane, Mover, Pool, Removal, Sparse, Step, Task,
    View, Volume,
};

const CONFIG: Config = Config { pages: 300, lanes: 4, depth: 64 };

fn adopt(fd: BorrowedFd<'_>) -> Memory {
    Memory::adopt(fd.try_clone_to_owned().unwrap()).unwrap()
}

/// The memory that a keeper holds of a pool, besides its pages.
fn kept(pool: &Pool) -> Kept {
    let fds = pool.kept_fds();
    Kept { map: adopt(fds.map), records: fds.records.into_iter().map(adopt).collect() }
}

/// Bytes of memory that the map of a pool takes, besides the count of births.
fn map_memory(pool: &Pool) -> u64 {
    let map = std::fs::File::from(pool.kept_fds().map.try_clone_to_owned().unwrap());
    std::os::unix::fs::MetadataExt::blocks(&map.metadata().unwrap()) * 512 - 4096
}

/// Begins to shrink a volume that nobody holds.
fn shrink(volume: Arc<Volume>, pages: u32) -> Removal {
    volume.shrink(pages, |_| Ok(())).unwrap_or_else(|(_, error)| panic!("{error}"))
}

/// Shrinks a volume to its end.
fn shrunk(volume: Arc<Volume>, pages: u32) -> Option<Arc<Volume>> {
    let mut mover = volume.mover().unwrap();
    let mut removal = shrink(volume, pages);
    while !mover.remove(&mut removal, 50) {}
    removal.rest().unwrap()
}

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
    assert!(matches!(refused, CreateError::NoRoom { pages: 1, free: 0 }), "{refused}");
    let [first, middle, last] = volumes;
    let map = pool.map_bytes();
    let mut mover = pool.mover().unwrap();
    let mut removal = shrink(middle, 0);
    assert!(
        mover.remove(&mut removal, 9) && mover.remove(&mut removal, 9),
        "and a second end changes nothing"
    );
    assert_eq!((map, pool.map_bytes(), pool.free_pages()), (3 * 4096, 2 * 4096, 1));
    assert_eq!(map_memory(&pool), 2 * 4096, "and the system has the rest again");
    assert!(matches!(pool.volume(2), Err(CreateError::NoRoom { pages: 2, free: 1 })));
    assert!(matches!(pool.volume(0), Err(CreateError::Shape { pages: 0, .. })));
    let again = pool.volume(1).unwrap();
    assert!(mover.remove(&mut removal, 9), "and one that comes late");
    assert!(removal.rest().unwrap().is_none());
    assert!(matches!(pool.volume(1), Err(CreateError::NoRoom { free: 0, .. })));
    assert_eq!(pages(&again), vec![None], "nothing of the one before");
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
    let (volume, held) = volume.shrink(1, |_| panic!("nobody notes that")).unwrap_err();
    assert!(matches!(held, CreateError::InUse), "{held}");
    drop(lane);
    assert_eq!(pages(&volume), numbers(0, 100), "it is as it was");
    let (volume, unnoted) = volume.shrink(0, |_| Err(std::io::ErrorKind::BrokenPipe.into())).unwrap_err();
    assert!(matches!(unnoted, CreateError::Note(_)), "{unnoted}");
    assert_eq!(pages(&volume), numbers(0, 100), "and so it is now");
    let mut noted = None;
    let mut removal = volume
        .shrink(10, |rest| {
            assert_eq!((pool.status().stored, pool.free_pages()), (100, 0), "nothing is discarded yet");
            noted = Some(rest);
            Ok(())
        })
        .unwrap();
    assert_eq!(noted, Some(0..10));
    let mut mover = pool.mover().unwrap();
    assert!(!mover.remove(&mut removal, 89), "a page is left");
    drop(removal.rest().unwrap_err());
    assert!(matches!(pool.volume(1), Err(CreateError::NoRoom { free: 0, .. })));
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
    assert!(shrunk(volume, 0).is_none());
    let next = pool.volume(CONFIG.pages).unwrap();
    sim.hang(false);
    let now = Instant::now();
    (0..3).for_each(|_| pool.close_lanes(now));
    assert_eq!(pages(&next), vec![None; CONFIG.pages as usize]);
    assert_eq!(pool.status().stores[0].used, 0, "and its slots are free");
}

#[test]
fn a_pool_that_is_taken_over_has_its_volumes_where_they_were_and_drops_what_none_of_them_has() {
    let host = Host::new(CONFIG.slots()).unwrap();
    let memory = adopt(host.fd());
    let pool = Pool::create(CONFIG, vec![Arc::new(host) as Arc<dyn Store>]).unwrap();
    let ranges = [50, 150].map(|size| {
        let volume = pool.volume(size).unwrap();
        fill(&volume, size);
        volume.range()
    });
    let kept = kept(&pool);
    drop(pool);
    let (pool, volumes, lost) =
        Pool::take_over(CONFIG, vec![Arc::new(Host::adopt(memory))], kept, &ranges[1..]).unwrap();
    assert_eq!((lost, volumes.len()), (0, 1));
    assert_eq!((volumes[0].range(), pages(&volumes[0])), (ranges[1].clone(), numbers(150, 150)));
    assert_eq!(pool.status().stored, 150, "pages of no volume are dropped");
    assert_eq!(pool.status().stores[0].used, 150);
    let new = pool.volume(150).unwrap();
    assert_eq!(pages(&new), vec![None; 150]);
}

#[test]
fn a_removal_that_has_ended_frees_nothing_of_the_next_volume_there() {
    let pool = pool();
    let volume = pool.volume(300).unwrap();
    let range = volume.range();
    let mut removal = shrink(volume, 0);
    let mut mover = pool.mover().unwrap();
    assert!(mover.remove(&mut removal, 300));
    let next = pool.volume(300).unwrap();
    assert_eq!(next.range(), range);
    fill(&next, 5);
    assert!(mover.remove(&mut removal, 300), "it comes late");
    assert_eq!((pages(&next), pool.free_pages()), (numbers(5, 300), 0));
}

#[test]
#[expect(clippy::single_range_in_vec_init, reason = "a pool may have one volume")]
fn ranges_that_no_pool_can_have_are_not_taken_over() {
    let (large, twice) = ("its volumes are 1.2MiB large, and there is room for", "and so has another");
    let wrong: [(&[Range<u32>], &str); 5] = [
        (&[0..301], large),
        (&[0..200, 512..613], large),
        (&[0..100, 99..110], twice),
        (&[5..9], "one volume has the pages 5..9, and so has another"),
        (&[7..7], twice),
    ];
    for (volumes, said) in wrong {
        let host = Host::new(CONFIG.slots()).unwrap();
        let memory = adopt(host.fd());
        let pool = Pool::create(CONFIG, vec![Arc::new(host) as Arc<dyn Store>]).unwrap();
        let volume = pool.volume(300).unwrap();
        fill(&volume, 7);
        let [refused, next] = [(); 2].map(|()| kept(&pool));
        drop((volume, pool));
        let take_over = |kept, volumes: &[Range<u32>]| {
            let memory = adopt(memory.fd().unwrap());
            Pool::take_over(CONFIG, vec![Arc::new(Host::adopt(memory)) as Arc<dyn Store>], kept, volumes)
        };
        let error = take_over(refused, volumes).unwrap_err();
        assert!(matches!(&error, CreateError::Kept(what) if what.contains(said)), "{volumes:?}: {error}");
        let (_, volumes, lost) = take_over(next, &[0..300]).unwrap();
        assert_eq!((pages(&volumes[0]), lost), (numbers(7, 300), 0), "a refusal changes nothing");
    }
}

#[test]
fn a_volume_grows_under_an_open_lane_once_that_is_noted_and_shrinks_without_a_trace() {
    let pool = pool();
    let volume = pool.volume(100).unwrap();
    let other = pool.volume(50).unwrap();
    let mut lane = volume.lane().unwrap();
    let grown = || volume.grow(150, |_| Err(std::io::ErrorKind::BrokenPipe.into()));
    assert!(matches!(grown(), Err(CreateError::Note(_))));
    assert!(matches!(volume.grow(251, |_| Ok(())), Err(CreateError::NoRoom { pages: 151, free: 150 })));
    assert_eq!(volume.pages(), 100, "as it was");
    let mut noted = None;
    volume
        .grow(250, |range| {
            assert_eq!(volume.pages(), 100, "nobody can write to what is not noted");
            noted = Some(range);
            Ok(())
        })
        .unwrap();
    assert_eq!((noted, pool.free_pages()), (Some(volume.range()), 0));
    (0..250).for_each(|page| write(&mut lane, page, page));
    drop(lane);
    let volume = shrunk(volume, 30).unwrap();
    assert_eq!((pages(&volume), pool.status().stored), (numbers(0, 30), 30));
    volume.grow(200, |_| Ok(())).unwrap();
    let both = [numbers(0, 30), vec![None; 170]].concat();
    assert_eq!((pages(&volume), pages(&other)), (both, vec![None; 50]));
}

#[test]
fn a_volume_grows_only_up_to_the_numbers_of_the_next() {
    let config = Config { pages: 1000, ..CONFIG };
    let host = Host::new(config.slots()).unwrap();
    let memory = adopt(host.fd());
    let pool = Pool::create(config, vec![Arc::new(host) as Arc<dyn Store>]).unwrap();
    let kept = kept(&pool);
    drop(pool);
    let stores: Vec<Arc<dyn Store>> = vec![Arc::new(Host::adopt(memory))];
    let (_, volumes, _) = Pool::take_over(config, stores, kept, &[0..100, 512..600]).unwrap();
    let refused = volumes[0].grow(513, |_| Ok(())).unwrap_err();
    assert!(matches!(refused, CreateError::NoRange { pages: 513, longest: 512 }), "{refused}");
    assert_eq!(volumes[0].pages(), 100);
}

#[test]
fn memory_that_was_given_back_is_promised_to_no_volume_and_what_is_promised_is_not_given_back() {
    let config = Config { pages: 1500, lanes: 4, depth: 16 };
    let size = ByteSize(2 * 1024 * PAGE_SIZE as u64);
    let chunk = Some(ByteSize(1024 * PAGE_SIZE as u64));
    let sim = Arc::new(Sim::open(SimUrl { size, chunk, ..SimUrl::default() }).unwrap());
    let pool = Pool::create(config, vec![sim]).unwrap();
    assert_eq!(pool.free_pages(), 1500);
    let volume = pool.volume(100).unwrap();
    let mut mover = pool.mover().unwrap();
    pool.begin_give_back(0, &[1]).unwrap();
    mover.begin(Task::GiveBack { store: 0, chunk: 1 }).unwrap();
    while !matches!(mover.step(Instant::now()), Step::Ended(Ok(_))) {}
    let left = 1024 - config.slack() - 100;
    assert_eq!(pool.free_pages(), left);
    let free = |refused| matches!(refused, CreateError::NoRoom { free, .. } if free == left);
    assert!(free(pool.volume(left + 1).unwrap_err()));
    assert!(free(volume.grow(100 + left + 1, |_| Ok(())).unwrap_err()));
    mover.take(0, 1).unwrap();
    let spare = pool.spare_slots();
    volume.grow(100 + left + 1, |_| Ok(())).unwrap();
    assert_eq!((spare, pool.spare_slots()), (1024 + left, 1023), "room that nobody was promised is spare");
    let refused = pool.begin_give_back(0, &[1]).unwrap_err();
    assert!(matches!(refused, GiveBackError::NoRoom { missing: 1 }), "{refused}");
}

/// A pool over a simulated store whose writes are under way until a poll, with room for much more
/// than its volumes, and a mover's chunk for all of it.
fn roomy_pool(config: Config, slots: u64) -> (Arc<Pool>, Arc<Sim>) {
    let size = ByteSize(slots * PAGE_SIZE as u64);
    let sim = Arc::new(Sim::open(SimUrl { size, chunk: Some(size), delay: 1, ..SimUrl::default() }).unwrap());
    (Pool::create(config, vec![sim.clone() as Arc<dyn Store>]).unwrap(), sim)
}

/// The next daemon over the same store.
fn taken_over(pool: Arc<Pool>, sim: &Arc<Sim>, ranges: &[Range<u32>]) -> (Arc<Pool>, Vec<Arc<Volume>>) {
    let (config, kept) = (*pool.config(), kept(&pool));
    drop(pool);
    let (pool, volumes, lost) =
        Pool::take_over(config, vec![sim.clone() as Arc<dyn Store>], kept, ranges).unwrap();
    assert_eq!(lost, 0);
    (pool, volumes)
}

fn settle(lane: &mut Lane) {
    while lane.in_flight() > 0 {
        lane.submit();
        lane.poll(Instant::now(), &mut |done| assert_eq!(done.result, Ok(())));
    }
    lane.submit();
}

fn write_slowly(lane: &mut Lane, page: u32, number: u32) {
    assert_eq!(Lane::write(lane, page, PageNo(page), &content(number)), Progress::Queued);
    settle(lane);
}

fn read_slowly(lane: &mut Lane, page: u32) -> PageBytes {
    let mut found = [1; PAGE_SIZE];
    if Lane::read(lane, 0, PageNo(page), &mut found) == Progress::Queued {
        while lane.in_flight() > 0 {
            lane.submit();
            lane.poll(Instant::now(), &mut |done| found = *done.page.unwrap());
        }
    }
    lane.submit();
    found
}

/// Lets a mover read the pages of the store, and leaves them on their way to new places.
fn pages_on_their_way(mover: &mut Mover) {
    mover.begin(Task::MoveOut { store: 0, chunk: 0, part: (0, 1) }).unwrap();
    while !matches!(mover.step(Instant::now()), Step::Waits(..)) {}
}

fn ends(mover: &mut Mover) {
    while !matches!(mover.step(Instant::now()), Step::Ended(_)) {}
}

#[test]
fn a_page_that_is_being_moved_never_shows_in_the_next_volume_also_after_a_take_over() {
    // A lane that is new begins at the first slot. So one of these numbers of other pages brings
    // the next volume's page into the slot that the moving page has left.
    for (before, others) in (0..4).flat_map(|before| (0..16).map(move |others| (before, others))) {
        let (pool, sim) = roomy_pool(Config { pages: 64, lanes: 3, depth: 16 }, 1024);
        let volume = pool.volume(64).unwrap();
        let mut lane = volume.lane().unwrap();
        (0..=before).rev().for_each(|page| write_slowly(&mut lane, page, 1));
        let range = volume.range();
        drop((lane, volume));
        let (pool, mut volumes) = taken_over(pool, &sim, &[range]);
        let [mut mover, mut remover] = [(); 2].map(|()| pool.mover().unwrap());
        pages_on_their_way(&mut mover);
        let mut removal = shrink(volumes.remove(0), 0);
        while !remover.remove(&mut removal, 50) {}
        drop(remover);
        let next = pool.volume(64).unwrap();
        (0..others).for_each(|page| write_slowly(&mut next.lane().unwrap(), 20 + page, 5));
        write_slowly(&mut next.lane().unwrap(), 0, 9);
        let mut lane = next.lane().unwrap();
        ends(&mut mover);
        let found = read_slowly(&mut lane, 0);
        assert!(found == content(9), "{before} before, {others} others: {:?}", &found[..4]);
    }
}

#[test]
fn slots_of_a_volume_whose_removal_was_noted_are_free_at_once_though_writes_of_others_are_under_way() {
    let (pool, sim) = roomy_pool(Config { pages: 3000, lanes: 3, depth: 16 }, 8 * 1024);
    let [gone, other] = [2000, 1000].map(|size| pool.volume(size).unwrap());
    let mut lane = gone.lane().unwrap();
    (0..2000).for_each(|page| write_slowly(&mut lane, page, page));
    drop(lane);
    let mut lane = other.lane().unwrap();
    write_slowly(&mut lane, 1, 7);
    // The daemon dies after the first discards, while one write is under way.
    let mut removal = shrink(gone, 0);
    let mut mover = pool.mover().unwrap();
    assert!(!mover.remove(&mut removal, 10));
    sim.let_writes_outlive_lanes(true);
    assert_eq!(Lane::write(&mut lane, 2, PageNo(2), &content(8)), Progress::Queued);
    lane.submit();
    lane.abandon();
    sim.let_writes_outlive_lanes(false);
    let range = other.range();
    drop((removal, mover, other));
    let (pool, volumes) = taken_over(pool, &sim, &[range]);
    assert_eq!(sim.orphans(), 1, "the store is not quiet");
    assert_eq!(pool.status().stores[0].used, 2, "the other's page, and the write that is under way");
    let mut lane = volumes[0].lane().unwrap();
    (0..500).for_each(|page| write_slowly(&mut lane, page, 100 + page));
    assert!((0..500).all(|page| read_slowly(&mut lane, page) == content(100 + page)));
}

#[test]
fn a_mover_does_not_look_at_the_map_of_a_volume_that_has_gone() {
    for compression in [None, Some(Compression::Lz4)] {
        let (pool, _) = roomy_pool(Config { pages: 64, lanes: 4, depth: 16 }, 1024);
        compression.into_iter().for_each(|with| pool.compress(with));
        let volume = pool.volume(64).unwrap();
        let mut lane = volume.lane().unwrap();
        for page in 0..8 {
            assert_eq!(Lane::write(&mut lane, page, PageNo(page), &content(page)), Progress::Queued);
        }
        settle(&mut lane);
        drop(lane);
        let [mut mover, mut opener] = [(); 2].map(|()| pool.mover().unwrap());
        let now = Instant::now();
        if compression.is_some() {
            // A pack is being read.
            opener.begin(Task::Compact { store: 0, next: 0, sparse: Sparse::up_to(16) }).unwrap();
            while !matches!(opener.step(now), Step::Waits(..)) {}
        } else {
            pages_on_their_way(&mut mover);
        }
        assert!(shrunk(volume, 0).is_none());
        assert_eq!((map_memory(&pool), pool.map_bytes()), (0, 0));
        ends(&mut mover);
        ends(&mut opener);
        assert_eq!(map_memory(&pool), 0, "{compression:?}");
    }
}

#[test]
fn what_the_keeper_is_told_keeps_nobody_waiting_who_does_not_change_a_volume() {
    let pool = pool();
    let volume = pool.volume(100).unwrap();
    let other = pool.volume(50).unwrap();
    volume
        .grow(200, |_| {
            // All this ends while the keeper takes its time.
            assert_eq!((pool.free_pages(), pool.pages()), (50, 250), "what is being noted is promised");
            assert!(matches!(pool.volume(51), Err(CreateError::NoRoom { free: 50, .. })));
            let new = pool.volume(50).unwrap();
            fill(&new, 3);
            fill(&other, 4);
            pool.begin_give_back(0, &[0]).unwrap_err();
            let mut mover = pool.mover().unwrap();
            mover.begin(Task::MoveUp { from: 0, next: 0 }).unwrap();
            ends(&mut mover);
            Ok(())
        })
        .unwrap();
    assert_eq!(volume.pages(), 200);
}

/// A pool whose writes take two polls, as much room as `CONFIG` has pages, and its store.
fn hanging_pool() -> (Arc<Pool>, Arc<Sim>) {
    let size = ByteSize(u64::from(CONFIG.slots()) * PAGE_SIZE as u64);
    let sim = Arc::new(Sim::open(SimUrl { size, delay: 2, ..SimUrl::default() }).unwrap());
    (Pool::create(CONFIG, vec![sim.clone()]).unwrap(), sim)
}

/// Polls until nothing is in flight. Returns the results.
fn results(lane: &mut Lane) -> Vec<Result<(), Fault>> {
    let mut found = Vec::new();
    while lane.in_flight() > 0 {
        lane.submit();
        lane.poll(Instant::now(), &mut |done| found.push(done.result));
    }
    lane.submit();
    found
}

#[test]
fn a_lane_that_is_turned_reads_and_writes_the_pages_of_its_volume_alone() {
    let pool = pool();
    let volumes = [20, 30, 40].map(|size| pool.volume(size).unwrap());
    let mut lane = pool.lane().unwrap();
    let has_no_pages = |lane: &mut Lane| {
        assert_eq!(PageLane::pages(lane), 0);
        let reads = AssertUnwindSafe(|| Lane::read(lane, 0, PageNo(0), &mut content(0)));
        assert!(catch_unwind(reads).is_err(), "page 0 of nothing is another volume's");
    };
    has_no_pages(&mut lane);
    for from in [1000, 2000] {
        for (at, volume) in volumes.iter().enumerate() {
            lane.turn(Some(volume));
            assert_eq!(PageLane::pages(&lane), volume.pages());
            (0..volume.pages()).for_each(|page| write(&mut lane, page, from + at as u32 * 100 + page));
        }
        lane.turn(None);
        has_no_pages(&mut lane);
        for (volume, from) in volumes.iter().zip([from, from + 100, from + 200]) {
            assert_eq!(pages(volume), numbers(from, volume.pages()));
        }
    }
    lane.turn(Some(&volumes[1]));
    let mut found = content(0);
    assert_eq!(Lane::read(&mut lane, 0, PageNo(7), &mut found), Progress::Done(Ok(())));
    assert!(found == content(2107));
    volumes[1].grow(50, |_| Ok(())).unwrap();
    assert_eq!(PageLane::pages(&lane), 50, "a volume grows under it, too");
    // The numbers of no volume are nobody's to grow over.
    lane.turn(None);
    let nowhere = Arc::clone(lane.volume());
    assert!(catch_unwind(AssertUnwindSafe(|| nowhere.grow(1, |_| Ok(())))).is_err());
}

#[test]
fn a_lane_that_was_turned_away_holds_no_volume_and_no_slot_back() {
    let pool = pool();
    let [first, second] = [100, 200].map(|size| pool.volume(size).unwrap());
    [&first, &second].into_iter().for_each(|volume| fill(volume, 0));
    let mut lane = first.lane().unwrap();
    // The lane is in the middle of a batch, and so pinned.
    assert_eq!(Lane::read(&mut lane, 0, PageNo(0), &mut content(0)), Progress::Done(Ok(())));
    let (first, held) = first.shrink(0, |_| Ok(())).unwrap_err();
    assert!(matches!(held, CreateError::InUse), "{held}");
    lane.turn(Some(&second));
    assert!(shrunk(first, 0).is_none());
    let (second, _) = second.shrink(9, |_| Ok(())).unwrap_err();
    lane.turn(None);
    let second = shrunk(second, 9).unwrap();
    // Nobody looks at what went: all of it is room again.
    let third = pool.volume(291).unwrap();
    for round in 0..3 {
        fill(&third, 1000 * round);
        assert_eq!(pages(&third), numbers(1000 * round, 291));
    }
    assert_eq!(pages(&second), numbers(0, 9));
}

#[test]
fn a_lane_is_turned_only_at_rest_and_within_its_pool() {
    let (pool, _) = hanging_pool();
    let [one, two] = [100, 100].map(|size| pool.volume(size).unwrap());
    let mut lane = one.lane().unwrap();
    assert_eq!(Lane::write(&mut lane, 0, PageNo(0), &content(1)), Progress::Queued);
    for volume in [Some(&two), None] {
        assert!(catch_unwind(AssertUnwindSafe(|| lane.turn(volume))).is_err());
        assert!(Arc::ptr_eq(lane.volume(), &one), "it is where it was");
    }
    assert_eq!(results(&mut lane), [Ok(())]);
    let strange = slow_pool().0.volume(100).unwrap();
    assert!(catch_unwind(AssertUnwindSafe(|| lane.turn(Some(&strange)))).is_err());
    lane.turn(Some(&two));
}

#[test]
fn no_late_write_of_a_lane_reaches_the_volume_that_it_was_turned_to() {
    for compression in [None, Some(Compression::Lz4)] {
        let (pool, sim) = hanging_pool();
        compression.into_iter().for_each(|with| pool.compress(with));
        let volumes = [20, 20].map(|size| pool.volume(size).unwrap());
        let mut lane = pool.lane().unwrap();
        for round in 0..20 {
            for (at, volume) in volumes.iter().enumerate() {
                let number = 1000 * round + 100 * at as u32;
                let begin = |first: u32, lane: &mut Lane| {
                    for page in first..first + 5 {
                        let begun = Lane::write(lane, page, PageNo(page), &content(number + page));
                        assert_eq!(begun, Progress::Queued);
                    }
                };
                lane.turn(Some(volume));
                begin(0, &mut lane);
                assert_eq!(results(&mut lane), [Ok(()); 5]);
                // The client of these goes: some are forsaken, some were not answered in time.
                begin(0, &mut lane);
                begin(5, &mut lane);
                lane.forsake(|ticket| ticket < 5);
                sim.hang(true);
                assert!(results(&mut lane).iter().all(Result::is_err));
                lane.turn(None);
                // They land while the lane has another volume.
                sim.hang(false);
            }
            for (at, volume) in volumes.iter().enumerate() {
                lane.turn(Some(volume));
                let number = 1000 * round + 100 * at as u32;
                for page in 0..20 {
                    let expected = if page < 5 { content(number + page) } else { [0; PAGE_SIZE] };
                    assert!(read_slowly(&mut lane, page) == expected, "round {round}, page {page}");
                }
            }
        }
        volumes.iter().for_each(|volume| {
            lane.turn(Some(volume));
            lane.discard(PageNo(0), 20);
        });
        lane.submit();
        let status = pool.status();
        assert_eq!((status.stored, status.stores[0].used), (0, 0), "each slot is free again");
    }
}
