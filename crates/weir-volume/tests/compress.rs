//! Promises of compression: the same pages take less room, and never more than without it. Room
//! that pages leave is free for others again. Compression takes no memory.

mod driver;

use driver::{Driven as _, driver};
use proptest::prelude::*;
use proptest::test_runner::TestRunner;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU32, Ordering};
use std::time::Instant;
use weir_core::seal::{self, SealedAllocator};
use weir_core::{PAGE_SIZE, PageBytes, PageNo};
use weir_store::{Host, Progress, Store};
use weir_volume::{Compression, Config, Kept, Lane, Mover, Volume};

#[global_allocator]
static ALLOCATOR: SealedAllocator = SealedAllocator;

const BOTH: [Compression; 2] = [Compression::Lz4, Compression::Zstd];

fn volume(config: Config, with: Compression) -> Arc<Volume> {
    let volume = Volume::create(config, vec![Arc::new(Host::new(config.slots()).unwrap())]).unwrap();
    volume.compress(with);
    volume
}

/// SplitMix64's mixing function, without its state.
fn noise(seed: u64) -> u64 {
    let z = seed.wrapping_mul(0x9e37_79b9_7f4a_7c15);
    let z = (z ^ (z >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
    let z = (z ^ (z >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
    z ^ (z >> 31)
}

/// A page that names its number and generation in its first words, with `noisy` bytes that do not
/// compress.
fn stamped(page: u32, generation: u32, noisy: usize) -> PageBytes {
    let mut bytes = [generation as u8; PAGE_SIZE];
    let seed = u64::from(page) << 32 | u64::from(generation);
    for (at, word) in bytes[..noisy.max(8)].chunks_exact_mut(8).enumerate().skip(1) {
        word.copy_from_slice(&noise(seed << 9 | at as u64).to_le_bytes());
    }
    bytes[..4].copy_from_slice(&page.to_le_bytes());
    bytes[4..8].copy_from_slice(&generation.to_le_bytes());
    bytes
}

/// The amount of noise in generation `generation` of a page: some pages compress to nothing, and
/// some not at all.
fn noisiness(page: u32, generation: u32) -> usize {
    [16, 64, 400, 1000, 1500, 2500, PAGE_SIZE][noise(u64::from(page ^ generation << 12)) as usize % 7]
}

/// The page's generation; fails if the page is not whole.
fn generation_of(page: u32, bytes: &PageBytes) -> u32 {
    let generation = u32::from_le_bytes(bytes[4..8].try_into().unwrap());
    assert!(*bytes == stamped(page, generation, noisiness(page, generation)), "page {page} is torn");
    generation
}

/// Writes these pages in one batch, and waits for all of it.
fn write(lane: &mut Lane, pages: impl Iterator<Item = (u32, PageBytes)>) {
    for (page, bytes) in pages {
        loop {
            match lane.write(page, PageNo(page), &bytes) {
                Progress::Done(result) => result.unwrap(),
                Progress::Queued => {}
                Progress::Full => {
                    finish(lane, true);
                    continue;
                }
            }
            break;
        }
    }
    finish(lane, false);
}

fn finish(lane: &mut Lane, some: bool) {
    let before = lane.in_flight();
    loop {
        lane.submit();
        if some && before == 0 {
            return lane.poll(Instant::now(), &mut |_| {});
        }
        if lane.in_flight() == 0 || some && lane.in_flight() < before {
            return;
        }
        lane.poll(Instant::now(), &mut |done| done.result.unwrap());
    }
}

fn read(lane: &mut Lane, page: u32) -> PageBytes {
    let mut bytes = [0xee; PAGE_SIZE];
    assert_eq!(lane.read(0, PageNo(page), &mut bytes), Progress::Done(Ok(())));
    bytes
}

#[test]
fn pages_that_shrink_share_slots_and_leave_them() {
    for with in BOTH {
        let volume = volume(Config { pages: 256, lanes: 2, depth: 32 }, with);
        let mut lane = volume.lane().unwrap();
        write(&mut lane, (0..256).map(|page| (page, stamped(page, 1, 1000))));
        let status = volume.status();
        assert_eq!((status.stored, status.packed, status.compression), (256, 256, Some(with)));
        // Three pages of about 1000 bytes share a slot, and the last slot of a batch has fewer.
        assert!((85..=100).contains(&status.stores[0].used), "{status:?}");
        assert_eq!(u64::from(status.stores[0].used), status.packs);
        for page in 0..256 {
            assert!(read(&mut lane, page) == stamped(page, 1, 1000));
        }
        lane.discard(PageNo(0), 128);
        lane.zero(PageNo(128), 127, false);
        lane.submit();
        assert_eq!(volume.status().stores[0].used, 1, "only the last page's slot is left");
        assert!(read(&mut lane, 255) == stamped(255, 1, 1000));
        lane.discard(PageNo(255), 1);
        let status = volume.status();
        assert_eq!((status.stores[0].used, status.packed, status.packs), (0, 0, 0));
    }
}

#[test]
fn a_page_alone_in_its_batch_lies_as_it_is() {
    let volume = volume(Config { pages: 8, lanes: 1, depth: 8 }, Compression::Lz4);
    let mut lane = volume.lane().unwrap();
    write(&mut lane, std::iter::once((3, stamped(3, 1, 64))));
    let status = volume.status();
    assert_eq!((status.stored, status.packed), (1, 0));
    assert!(
        matches!(lane.pin().view(PageNo(3)), weir_volume::View::Bytes(bytes) if *bytes == stamped(3, 1, 64))
    );
}

#[test]
fn a_part_written_into_a_page_of_a_pack_keeps_the_rest_and_its_neighbours() {
    let volume = volume(Config { pages: 8, lanes: 1, depth: 8 }, Compression::Zstd);
    let mut lane = volume.lane().unwrap();
    write(&mut lane, (0..8).map(|page| (page, stamped(page, 1, 64))));
    assert_eq!(volume.status().packed, 8);
    let _ = lane.write_part(0, PageNo(5), 4000, &[9; 50]);
    finish(&mut lane, false);
    let mut expected = stamped(5, 1, 64);
    expected[4000..4050].fill(9);
    assert!(read(&mut lane, 5) == expected);
    (0..8).filter(|page| *page != 5).for_each(|page| assert!(read(&mut lane, page) == stamped(page, 1, 64)));
}

#[test]
fn pages_that_do_not_shrink_any_more_always_find_the_room_that_was_promised() {
    for with in BOTH {
        // The store has exactly the slots that a volume of this size needs without compression.
        let volume = volume(Config { pages: 2048, lanes: 1, depth: 16 }, with);
        let mut lane = volume.lane().unwrap();
        for round in 0..4 {
            write(&mut lane, (0..2048).map(|page| (page, stamped(page, round, 64))));
            assert!(volume.status().stores[0].used < 300);
            // The first page of each pack stays, so that no pack becomes free.
            let last = |page: &u32| !page.is_multiple_of(9);
            write(&mut lane, (0..2048).filter(last).map(|page| (page, stamped(page, round, PAGE_SIZE))));
            for page in 0..2048 {
                let noisy = if last(&page) { PAGE_SIZE } else { 64 };
                assert!(read(&mut lane, page) == stamped(page, round, noisy), "page {page}");
            }
            lane.submit();
        }
        assert_eq!(volume.status().write_faults, 0);
    }
}

/// Empties the sparse packs of every store, as often as that pays; returns how many pages were
/// moved.
fn compact(mover: &mut Mover) -> u32 {
    let volume = Arc::clone(mover.pool());
    let mut moved = 0;
    for store in 0..volume.stores().count() {
        while let Some(sparse) = volume.sparse(store) {
            let (mut next, before) = (0, volume.status().stores[store].used);
            loop {
                let done =
                    mover.compact(store, &mut next, sparse, &mut driver(|fault| fault.is_none())).unwrap();
                moved += done.pages;
                if !done.more {
                    break;
                }
            }
            assert!(volume.status().stores[store].used < before, "it pays, or there is nothing to do");
        }
    }
    moved
}

fn used(volume: &Volume) -> u32 {
    volume.status().stores.iter().map(|store| store.used).sum()
}

#[test]
fn packs_that_others_have_left_come_together_again() {
    for with in BOTH {
        let volume = volume(Config { pages: 9000, lanes: 2, depth: 64 }, with);
        let (mut lane, mut worker) = (volume.lane().unwrap(), volume.mover().unwrap());
        let told = Arc::new(AtomicU32::new(0));
        let count = Arc::clone(&told);
        volume.when_packs_are_left(Box::new(move || {
            count.fetch_add(1, Ordering::Relaxed);
        }));
        write(&mut lane, (0..9000).map(|page| (page, stamped(page, 1, 400))));
        let full = used(&volume);
        assert_eq!(volume.sparse(0), None, "nobody has left yet: {:?}", volume.status());
        // Of nine pages that share a slot, one stays.
        let gone = |page: &u32| !page.is_multiple_of(9);
        (0..9000).filter(gone).for_each(|page| lane.discard(PageNo(page), 1));
        lane.submit();
        assert!(used(&volume) > full * 8 / 10, "one holds the room of nine");
        assert!((59..=62).contains(&told.load(Ordering::Relaxed)), "told {told:?} times that 8000 have left");
        // The exceptions are pages that were alone at the end of their batch, and are not
        // compressed.
        let moved = compact(&mut worker);
        assert!((950..=1000).contains(&moved), "{moved} pages moved");
        assert!(used(&volume) < full * 2 / 10, "{} of {full}", used(&volume));
        assert_eq!(volume.sparse(0), None, "and that was all");
        for page in 0..9000 {
            let bytes = read(&mut lane, page);
            assert!(bytes == if gone(&page) { [0; PAGE_SIZE] } else { stamped(page, 1, 400) }, "page {page}");
        }
        let status = volume.status();
        assert_eq!(
            (status.stored, status.packed, status.compacted),
            (1000, u64::from(moved), u64::from(moved))
        );
    }
}

#[test]
fn a_store_that_is_full_needs_no_room_to_make_room() {
    // The first store takes half of the pages, and has no free slot then.
    let config = Config { pages: 4096, lanes: 2, depth: 64 };
    let stores = [1024, config.slots()].map(|slots| Arc::new(Host::new(slots).unwrap()) as Arc<dyn Store>);
    let volume = Volume::create(config, stores.to_vec()).unwrap();
    volume.compress(Compression::Lz4);
    let (mut lane, mut worker) = (volume.lane().unwrap(), volume.mover().unwrap());
    let noisy = |page: u32| if page < 2700 { 1000 } else { PAGE_SIZE };
    write(&mut lane, (0..4096).map(|page| (page, stamped(page, 1, noisy(page)))));
    // Some pages move to the store below, and other pages take the first store's room at once.
    let gone = |page: &u32| *page < 2700 && !page.is_multiple_of(3);
    write(&mut lane, (0..4096).filter(gone).map(|page| (page, stamped(page, 2, PAGE_SIZE))));
    let before = volume.status().stores[0].used;
    assert!(before >= 1000, "{:?}", volume.status().stores);
    compact(&mut worker);
    let after = volume.status().stores[0].used;
    assert!(after < before / 2, "{before} slots became {after}");
    for page in 0..4096 {
        let (generation, noisy) = if gone(&page) { (2, PAGE_SIZE) } else { (1, noisy(page)) };
        assert!(read(&mut lane, page) == stamped(page, generation, noisy), "page {page}");
    }
}

/// An event of a volume, on one page or a few in a row.
#[derive(Clone, Copy, Debug)]
enum Event {
    Write {
        first: u32,
        pages: u32,
        step: u32,
    },
    Discard {
        first: u32,
        pages: u32,
    },
    Part {
        page: u32,
        offset: usize,
        length: usize,
    },
    /// Empties sparse packs while other lanes go on; after `stop_after` batches the daemon is
    /// killed.
    Compact {
        stop_after: Option<u32>,
    },
    Crash,
}

fn event() -> impl Strategy<Value = Event> {
    prop_oneof![
        6 => (0..MODEL_PAGES, 1..600u32, 1..40u32).prop_map(|(first, pages, step)| Event::Write { first, pages, step }),
        3 => (0..MODEL_PAGES, 1..200u32).prop_map(|(first, pages)| Event::Discard { first, pages }),
        1 => (0..MODEL_PAGES, 0..PAGE_SIZE, 0..200usize).prop_map(|(page, offset, length)| {
            Event::Part { page, offset, length: length.min(PAGE_SIZE - offset) }
        }),
        3 => prop::option::of(0..4u32).prop_map(|stop_after| Event::Compact { stop_after }),
        1 => Just(Event::Crash),
    ]
}

const MODEL_PAGES: u32 = 3000;

/// A volume with the expected content of its pages.
struct Modelled {
    memory: Vec<std::os::fd::OwnedFd>,
    volume: Arc<Volume>,
    lane: Option<Lane>,
    worker: Option<Mover>,
    pages: Vec<PageBytes>,
    with: Compression,
    generation: u32,
    compacted: u32,
}

impl Modelled {
    const CONFIG: Config = Config { pages: MODEL_PAGES, lanes: 2, depth: 32 };

    fn new(with: Compression) -> Self {
        let hosts = [Host::new(600).unwrap(), Host::new(Self::CONFIG.slots()).unwrap()];
        let memory = hosts.each_ref().map(|host| host.fd().try_clone_to_owned().unwrap()).into();
        let stores = hosts.into_iter().map(|host| Arc::new(host) as _).collect();
        let volume = Volume::create(Self::CONFIG, stores).unwrap();
        volume.compress(with);
        let (lane, worker) = (Some(volume.lane().unwrap()), Some(volume.mover().unwrap()));
        let pages = vec![[0; PAGE_SIZE]; MODEL_PAGES as usize];
        Modelled { memory, volume, lane, worker, pages, with, generation: 0, compacted: 0 }
    }

    fn happen(&mut self, event: Event) {
        match event {
            Event::Write { first, pages, step } => {
                self.generation += 1;
                let generation = self.generation;
                let range = (0..pages).map(|at| (first + at * step) % MODEL_PAGES);
                let batch: Vec<_> = range
                    .map(|page| (page, stamped(page, generation, noisiness(page, generation))))
                    .collect();
                let lane = self.lane.as_mut().unwrap();
                write(lane, batch.iter().copied());
                batch.into_iter().for_each(|(page, bytes)| self.pages[page as usize] = bytes);
            }
            Event::Discard { first, pages } => {
                let end = (first + pages).min(MODEL_PAGES);
                let lane = self.lane.as_mut().unwrap();
                lane.discard(PageNo(first), end - first);
                lane.submit();
                self.pages[first as usize..end as usize].fill([0; PAGE_SIZE]);
            }
            Event::Part { page, offset, length } => {
                let lane = self.lane.as_mut().unwrap();
                let _ = lane.write_part(0, PageNo(page), offset, &vec![7; length]);
                finish(lane, false);
                self.pages[page as usize][offset..offset + length].fill(7);
            }
            Event::Compact { stop_after } => self.compact(stop_after),
            Event::Crash => self.crash(),
        }
    }

    fn compact(&mut self, mut stop_after: Option<u32>) {
        for store in 0..2 {
            let Some(sparse) = self.volume.sparse(store) else { continue };
            let mut next = 0;
            loop {
                // While its pages are on their way, others are written and discarded.
                let mut worker = self.worker.take().unwrap();
                let mut driven = driver(|fault| {
                    assert_eq!(fault, None);
                    let first = noise(u64::from(self.generation)) as u32 % MODEL_PAGES;
                    self.happen(Event::Write { first, pages: 5, step: 7 });
                    self.happen(Event::Discard { first: first / 2, pages: 3 });
                    let stop = stop_after == Some(0);
                    stop_after = stop_after.map(|left| left.saturating_sub(1));
                    !stop
                });
                let done = worker.compact(store, &mut next, sparse, &mut driven);
                self.worker = Some(worker);
                match done {
                    Ok(done) => {
                        self.compacted += done.pages;
                        if !done.more {
                            break;
                        }
                    }
                    Err(_) => {
                        self.crash();
                        return;
                    }
                }
            }
        }
    }

    /// Kills the daemon, with its operations under way, and starts another.
    fn crash(&mut self) {
        self.lane.take().unwrap().abandon();
        self.worker.take().unwrap().abandon();
        let adopt = |fd: std::os::fd::OwnedFd| weir_core::Memory::adopt(fd).unwrap();
        let fds = self.volume.kept_fds();
        let copy = |fd: &std::os::fd::BorrowedFd<'_>| adopt(fd.try_clone_to_owned().unwrap());
        let kept = Kept { map: copy(&fds.map), records: fds.records.iter().map(copy).collect() };
        let stores = self.memory.iter().map(|fd| Host::adopt(adopt(fd.try_clone().unwrap())));
        let stores = stores.map(|host| Arc::new(host) as Arc<dyn Store>).collect();
        let (volume, lost) = Volume::take_over(Self::CONFIG, stores, kept).unwrap();
        assert_eq!(lost, 0);
        volume.compress(self.with);
        (self.lane, self.worker) = (Some(volume.lane().unwrap()), Some(volume.mover().unwrap()));
        self.volume = volume;
    }

    fn check(mut self) {
        let mut lane = self.lane.take().unwrap();
        for page in 0..MODEL_PAGES {
            assert!(read(&mut lane, page) == self.pages[page as usize], "page {page}");
        }
        lane.submit();
        let status = self.volume.status();
        assert_eq!(u64::from(used(&self.volume)), status.stored - status.packed + status.packs, "{status:?}");
        lane.discard(PageNo(0), MODEL_PAGES);
        lane.submit();
        let status = self.volume.status();
        assert_eq!((used(&self.volume), status.packed, status.packs), (0, 0, 0));
    }
}

#[test]
fn every_page_is_there_however_packs_are_filled_left_and_emptied() {
    let cases = std::env::var("WEIR_CASES").map_or(16, |text| text.parse().unwrap());
    let compacted = AtomicU32::new(0);
    let played =
        TestRunner::new(ProptestConfig { cases, failure_persistence: None, ..ProptestConfig::default() })
            .run(&(prop::collection::vec(event(), 1..80), any::<bool>()), |(events, zstd)| {
                let mut modelled = Modelled::new(if zstd { Compression::Zstd } else { Compression::Lz4 });
                events.into_iter().for_each(|event| modelled.happen(event));
                compacted.fetch_add(modelled.compacted, Ordering::Relaxed);
                modelled.check();
                Ok(())
            });
    played.unwrap();
    let compacted = compacted.into_inner();
    println!("{cases} histories moved {compacted} pages together");
    assert!(compacted > 100, "only {compacted} pages were brought together: nothing was tested");
}

#[test]
fn nothing_is_allocated_once_lanes_are_open() {
    for with in BOTH {
        let volume = volume(Config { pages: 4096, lanes: 2, depth: 32 }, with);
        let (mut lane, mut mover) = (volume.lane().unwrap(), volume.mover().unwrap());
        seal::seal(seal::Policy::Count);
        seal::on_io_thread(|| {
            for generation in 0..20 {
                write(
                    &mut lane,
                    (0..512).map(|page| (page, stamped(page, generation, noisiness(page, generation)))),
                );
                (0..512).for_each(|page| assert_eq!(generation_of(page, &read(&mut lane, page)), generation));
                let _ = lane.write_part(0, PageNo(7), 9, &[1; 100]);
                finish(&mut lane, false);
            }
            // Make full packs, of which a third of the pages stays.
            write(&mut lane, (0..4096).map(|page| (page, stamped(page, 99, 64))));
            (0..4096).filter(|page| page % 3 > 0).for_each(|page| lane.discard(PageNo(page), 1));
            lane.submit();
            let (sparse, mut next) = (volume.sparse(0), 0);
            while let Some(sparse) = sparse
                && mover.compact(0, &mut next, sparse, &mut driver(|fault| fault.is_none())).unwrap().more
            {
            }
        });
        assert_eq!(seal::violations(), 0, "{with}");
        assert!(volume.status().compacted > 100, "{:?}", volume.status());
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
fn under_load_chunks_come_and_go_and_another_daemon_finds_every_page() {
    const CHUNK: u32 = 32_768;
    let seconds = std::env::var("WEIR_SECONDS").map_or(1, |text| text.parse().unwrap());
    for with in BOTH {
        let (pages, threads) = (4096, 3);
        let config = Config { pages, lanes: threads as usize + 1, depth: 16 };
        let hosts = [Host::new(CHUNK).unwrap(), Host::new(config.slots()).unwrap()];
        let memory = hosts.each_ref().map(|host| host.fd().try_clone_to_owned().unwrap());
        let stores: Vec<Arc<dyn Store>> = hosts.into_iter().map(|host| Arc::new(host) as _).collect();
        let volume = Volume::create(config, stores).unwrap();
        volume.compress(with);
        let stop = AtomicBool::new(false);
        let last: Vec<Vec<u32>> = std::thread::scope(|scope| {
            let ends = Ends(&stop);
            let workers: Vec<_> = (0..threads)
                .map(|thread| {
                    let (volume, stop) = (&volume, &stop);
                    scope.spawn(move || {
                        let mut lane = volume.lane().unwrap();
                        let mut known = vec![0; (pages / threads) as usize];
                        let mut turn = u64::from(thread);
                        while !stop.load(Ordering::Relaxed) {
                            turn += u64::from(threads);
                            let first = noise(turn) as usize % known.len();
                            let many = 1 + noise(!turn) as usize % 24;
                            let range = first..(first + many).min(known.len());
                            let page = |at: usize| at as u32 * threads + thread;
                            for at in range.clone() {
                                let bytes = read(&mut lane, page(at));
                                match known[at] {
                                    0 => assert!(bytes == [0; PAGE_SIZE]),
                                    generation => assert_eq!(generation_of(page(at), &bytes), generation),
                                }
                            }
                            lane.submit();
                            if turn.is_multiple_of(16) {
                                range.clone().for_each(|at| lane.discard(PageNo(page(at)), 1));
                                lane.submit();
                                known[range].fill(0);
                                continue;
                            }
                            known[range.clone()].iter_mut().for_each(|known| *known = turn as u32);
                            let generation = turn as u32;
                            write(
                                &mut lane,
                                range.map(page).map(|page| {
                                    (page, stamped(page, generation, noisiness(page, generation)))
                                }),
                            );
                        }
                        known
                    })
                })
                .collect();
            let mut worker = volume.mover().unwrap();
            let begun = std::time::Instant::now();
            let mut rounds = 0;
            while begun.elapsed().as_secs() < seconds || rounds == 0 {
                // If the machine delays a lane for longer than the mover waits, the chunk stays,
                // whole.
                match worker.give_back(0, 0, &mut driver(|_| true)) {
                    Ok(_) => assert_eq!(volume.status().stores[0].used, 0),
                    Err(weir_volume::GiveBackError::Busy) => continue,
                    Err(error) => panic!("{error}"),
                }
                worker.take(0, 0).unwrap();
                for store in 0..2 {
                    let (sparse, mut next) = (volume.sparse(store), 0);
                    while let Some(sparse) = sparse
                        && worker
                            .compact(
                                store,
                                &mut next,
                                sparse,
                                &mut driver(|fault| {
                                    assert_eq!(fault, None);
                                    true
                                }),
                            )
                            .unwrap()
                            .more
                    {}
                }
                let mut next = 0;
                while worker.move_up(1, &mut next, &mut driver(|_| true)).unwrap().more {}
                rounds += 1;
            }
            drop(ends);
            workers.into_iter().map(|worker| worker.join().unwrap()).collect()
        });
        let before = volume.status();
        assert_eq!((before.corrupt, before.read_faults, before.write_faults), (0, 0, 0));
        assert!(before.packed > before.packs && before.packs > 0, "{before:?}");
        let fds = volume.kept_fds();
        let adopt = |fd: &std::os::fd::BorrowedFd<'_>| {
            weir_core::Memory::adopt(fd.try_clone_to_owned().unwrap()).unwrap()
        };
        let kept = Kept { map: adopt(&fds.map), records: fds.records.iter().map(adopt).collect() };
        drop(volume);

        let hosts = memory.map(|fd| Host::adopt(weir_core::Memory::adopt(fd).unwrap()));
        let stores: Vec<Arc<dyn Store>> = hosts.into_iter().map(|host| Arc::new(host) as _).collect();
        // The next daemon has no compression: it still reads compressed pages.
        let (volume, lost) = Volume::take_over(config, stores, kept).unwrap();
        let after = volume.status();
        assert_eq!(lost, 0);
        assert_eq!((after.stored, after.packed, after.packs), (before.stored, before.packed, before.packs));
        let used =
            |status: &weir_volume::VolumeStatus| status.stores.iter().map(|it| it.used).collect::<Vec<_>>();
        assert_eq!(used(&after), used(&before), "no slot had been lost");
        let mut lane = volume.lane().unwrap();
        for (thread, known) in last.iter().enumerate() {
            for (at, generation) in known.iter().enumerate() {
                let page = at as u32 * threads + thread as u32;
                let bytes = read(&mut lane, page);
                match generation {
                    0 => assert!(bytes == [0; PAGE_SIZE]),
                    generation => assert_eq!(generation_of(page, &bytes), *generation),
                }
            }
        }
        lane.discard(PageNo(0), pages);
        lane.submit();
        let status = volume.status();
        assert_eq!((used(&status), status.packed, status.packs), (vec![0, 0], 0, 0));
    }
}
