//! What compression promises: the same pages in less room, never more room than without, and no memory taken for it.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use weir_core::seal::{self, SealedAllocator};
use weir_core::{PAGE_SIZE, PageBytes, PageNo};
use weir_store::{Host, Progress, Store};
use weir_volume::{Compression, Config, Kept, Lane, Volume};

#[global_allocator]
static ALLOCATOR: SealedAllocator = SealedAllocator;

const BOTH: [Compression; 2] = [Compression::Lz4, Compression::Zstd];

fn volume(config: Config, with: Compression) -> Arc<Volume> {
    let volume = Volume::create(config, vec![Arc::new(Host::new(config.slots()).unwrap())]).unwrap();
    volume.compress(with);
    volume
}

/// SplitMix64, without its state.
fn noise(seed: u64) -> u64 {
    let z = seed.wrapping_mul(0x9e37_79b9_7f4a_7c15);
    let z = (z ^ (z >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
    let z = (z ^ (z >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
    z ^ (z >> 31)
}

/// A page that says which page and generation it is, in its first words, with `noisy` bytes that do not compress.
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

/// How much noise generation `generation` of a page has: from pages that shrink to nothing to such that do not.
fn noisiness(page: u32, generation: u32) -> usize {
    [16, 64, 400, 1000, 1500, 2500, PAGE_SIZE][noise(u64::from(page ^ generation << 12)) as usize % 7]
}

/// The page's generation, if it is whole.
fn generation_of(page: u32, bytes: &PageBytes) -> u32 {
    let generation = u32::from_le_bytes(bytes[4..8].try_into().unwrap());
    assert!(*bytes == stamped(page, generation, noisiness(page, generation)), "page {page} is torn");
    generation
}

/// Writes these pages in one batch, and sees all of it through.
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
        if lane.in_flight() == 0 || some && lane.in_flight() < before {
            return;
        }
        lane.poll(&mut |done| done.result.unwrap());
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
        // Three of about 1000 bytes to a slot, and a batch's last in company of fewer.
        assert!((85..=100).contains(&status.stores[0].used), "{status:?}");
        assert_eq!(u64::from(status.stores[0].used), status.packs);
        for page in 0..256 {
            assert!(read(&mut lane, page) == stamped(page, 1, 1000));
        }
        lane.discard(PageNo(0), 128);
        lane.zero(PageNo(128), 127);
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
        // Exactly the slots that a volume of this size asks for without compression.
        let volume = volume(Config { pages: 2048, lanes: 1, depth: 16 }, with);
        let mut lane = volume.lane().unwrap();
        for round in 0..4 {
            write(&mut lane, (0..2048).map(|page| (page, stamped(page, round, 64))));
            assert!(volume.status().stores[0].used < 300);
            // The first of each pack stays, so that no pack ever goes.
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

#[test]
fn nothing_is_allocated_once_lanes_are_open() {
    for with in BOTH {
        let volume = volume(Config { pages: 512, lanes: 1, depth: 32 }, with);
        let mut lane = volume.lane().unwrap();
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
        });
        assert_eq!(seal::violations(), 0, "{with}");
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
            let mut worker = volume.worker_lane().unwrap();
            let begun = std::time::Instant::now();
            let mut rounds = 0;
            while begun.elapsed().as_secs() < seconds || rounds == 0 {
                // On a machine that leaves a lane waiting for longer than this waits, it stays, whole.
                match worker.give_back(0, 0) {
                    Ok(_) => assert_eq!(volume.status().stores[0].used, 0),
                    Err(weir_volume::GiveBackError::Busy) => continue,
                    Err(error) => {
                        stop.store(true, Ordering::Relaxed);
                        panic!("{error}");
                    }
                }
                worker.take(0, 0).unwrap();
                let mut next = 0;
                while worker.move_up(1, &mut next).unwrap().more {}
                rounds += 1;
            }
            stop.store(true, Ordering::Relaxed);
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
        // The next daemon was not told to compress: it reads what is there.
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
