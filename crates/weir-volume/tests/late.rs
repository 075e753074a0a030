//! Late writes: those of a client that has gone take no effect, and those that a store does not
//! answer keep their slot.

use std::os::fd::BorrowedFd;
use std::sync::Arc;
use std::time::{Duration, Instant};
use weir_core::{ByteSize, Memory, PAGE_SIZE, PageBytes, PageNo};
use weir_store::{Fault, Host, Progress, Sim, SimUrl, Store};
use weir_volume::{Compression, Config, Kept, Lane, Volume};

/// A volume on a store whose operations take two polls, and that hangs when told to.
fn volume(config: Config) -> (Arc<Volume>, Arc<Sim>) {
    let size = ByteSize(u64::from(config.slots()) * PAGE_SIZE as u64);
    let sim = Arc::new(Sim::open(SimUrl { size, delay: 2, ..SimUrl::default() }).unwrap());
    (Volume::create(config, vec![Arc::clone(&sim) as _]).unwrap(), sim)
}

/// A page that compresses to a third, if compression is on.
fn stamped(page: u32, generation: u32) -> PageBytes {
    let mut bytes = [generation as u8; PAGE_SIZE];
    for (at, word) in bytes[..1000].chunks_exact_mut(4).enumerate() {
        let value = (page << 20 ^ generation << 10 ^ at as u32).wrapping_mul(0x9e37_79b9);
        word.copy_from_slice(&value.rotate_left(at as u32).to_le_bytes());
    }
    bytes
}

/// Waits until everything is done; returns tickets and results.
fn finish(lane: &mut Lane) -> Vec<(u32, Result<(), Fault>)> {
    let mut ended = Vec::new();
    loop {
        lane.submit();
        lane.poll(Instant::now(), &mut |done| ended.push((done.ticket, done.result)));
        if lane.in_flight() == 0 {
            break;
        }
    }
    lane.submit();
    ended.sort_unstable_by_key(|(ticket, _)| *ticket);
    ended
}

fn write(lane: &mut Lane, page: u32, bytes: &PageBytes) {
    assert_eq!(lane.write(page, PageNo(page), bytes), Progress::Queued);
}

fn read(lane: &mut Lane, page: u32) -> PageBytes {
    let mut back = [0xee; PAGE_SIZE];
    match lane.read(0, PageNo(page), &mut back) {
        Progress::Done(result) => result.unwrap(),
        Progress::Full => panic!("room for one read"),
        Progress::Queued => {
            lane.submit();
            while lane.in_flight() > 0 {
                lane.poll(Instant::now(), &mut |done| back = *done.page.expect("it can be read"));
            }
        }
    }
    lane.submit();
    back
}

const CONFIG: Config = Config { pages: 64, lanes: 2, depth: 16 };

#[test]
fn a_write_that_is_forsaken_takes_no_effect_after_a_newer_one_was_acknowledged() {
    let (volume, _) = volume(CONFIG);
    let (mut gone, mut other) = (volume.lane().unwrap(), volume.lane().unwrap());
    // Page 1 is written as a whole, page 2 in part, and page 3 by a client that stays.
    for page in 1..=3 {
        write(&mut other, page, &stamped(page, 1));
    }
    finish(&mut other);
    write(&mut gone, 1, &stamped(1, 2));
    assert_eq!(gone.write_part(2, PageNo(2), 100, &[2; 100]), Progress::Queued);
    write(&mut gone, 3, &stamped(3, 2));
    gone.submit();
    gone.forsake(|ticket| ticket < 3);
    for page in 1..=2 {
        write(&mut other, page, &stamped(page, 3));
    }
    assert!(finish(&mut other).iter().all(|(_, result)| *result == Ok(())));
    let ended = finish(&mut gone);
    assert_eq!(ended, [(1, Err(Fault::Forsaken)), (2, Err(Fault::Forsaken)), (3, Ok(()))]);
    for (page, generation) in [(1, 3), (2, 3), (3, 2)] {
        assert!(read(&mut other, page) == stamped(page, generation), "page {page}");
    }
    let status = volume.status();
    assert_eq!((status.stored, status.stores[0].used), (3, 3), "what was forsaken has no slot");
    assert_eq!((status.write_faults, status.read_faults), (0, 0));
}

#[test]
fn a_partial_write_is_forsaken_also_between_its_halves() {
    for polls in 0..5 {
        let (volume, _) = volume(CONFIG);
        let (mut gone, mut other) = (volume.lane().unwrap(), volume.lane().unwrap());
        write(&mut other, 2, &stamped(2, 1));
        finish(&mut other);
        assert_eq!(gone.write_part(2, PageNo(2), 100, &[2; 100]), Progress::Queued);
        gone.submit();
        let mut is_done = false;
        for _ in 0..polls {
            gone.poll(Instant::now(), &mut |_| is_done = true);
        }
        gone.forsake(|_| true);
        write(&mut other, 2, &stamped(2, 3));
        finish(&mut other);
        assert!(is_done || finish(&mut gone) == [(2, Err(Fault::Forsaken))], "after {polls} polls");
        assert!(read(&mut other, 2) == stamped(2, 3), "after {polls} polls");
        assert_eq!(volume.status().stores[0].used, 1);
    }
}

#[test]
fn pages_that_wait_in_a_pack_are_forsaken_one_by_one() {
    // The pack is sent before the writes are forsaken, or after.
    for sent in [false, true] {
        let (volume, _) = volume(CONFIG);
        volume.compress(Compression::Lz4);
        let (mut gone, mut other) = (volume.lane().unwrap(), volume.lane().unwrap());
        for page in 0..3 {
            write(&mut gone, page, &stamped(page, 1));
        }
        if sent {
            gone.submit();
        }
        gone.forsake(|ticket| ticket != 1);
        for page in [0, 2] {
            write(&mut other, page, &stamped(page, 2));
        }
        finish(&mut other);
        let ended = finish(&mut gone);
        assert_eq!(ended, [(0, Err(Fault::Forsaken)), (1, Ok(())), (2, Err(Fault::Forsaken))]);
        for (page, generation) in [(0, 2), (1, 1), (2, 2)] {
            assert!(read(&mut other, page) == stamped(page, generation), "page {page}");
        }
        other.discard(PageNo(0), 3);
        other.submit();
        let status = volume.status();
        assert_eq!((status.stored, status.packs, status.stores[0].used), (0, 0, 0), "no pack is left behind");
    }
}

/// Two lanes of a volume. The first holds back every slot that was freed, and no other is free.
fn short_of_slots(store: Arc<dyn Store>, compress: bool) -> (Arc<Volume>, [Lane; 2]) {
    let (config, volume) = (CONFIG, Volume::create(CONFIG, vec![store]).unwrap());
    if compress {
        volume.compress(Compression::Lz4);
    }
    let [mut holder, mut writer] = [(); 2].map(|()| volume.lane().unwrap());
    assert_eq!(holder.read(0, PageNo(0), &mut [0; PAGE_SIZE]), Progress::Done(Ok(())));
    for number in 0..config.slots() {
        let page = number % (config.pages / 2);
        assert_ne!(writer.write(page, PageNo(page), &stamped(page, 1)), Progress::Full);
        finish(&mut writer);
    }
    (volume, [holder, writer])
}

#[test]
fn a_part_that_has_waited_takes_effect_behind_another_look_at_its_client() {
    for stays in [false, true] {
        let store = Arc::new(Host::new(CONFIG.slots()).unwrap());
        let (volume, [mut other, mut gone]) = short_of_slots(store, false);
        // Page 3 lies in a slot, and page 60 reads as zeros.
        for page in [3, 60] {
            assert_eq!(gone.write_part(page, PageNo(page), 100, &[2; 100]), Progress::Queued);
        }
        gone.submit();
        other.submit();
        // From here on there are free slots. The client leaves in the middle of this poll, and
        // writes the pages by another lane.
        gone.poll(Instant::now(), &mut |done| panic!("too soon: {done:?}"));
        assert!(gone.must_poll());
        let new = [3, 60].map(|page| overtake(&mut other, page, "one value"));
        if !stays {
            gone.forsake(|_| true);
        }
        let result = if stays { Ok(()) } else { Err(Fault::Forsaken) };
        assert_eq!(finish(&mut gone), [(3, result), (60, result)]);
        for (page, mut last) in [3, 60].into_iter().zip(new) {
            if stays {
                last[100..200].fill(2);
            }
            assert!(read(&mut other, page) == last, "the client stays: {stays}, page {page}");
        }
        other.discard(PageNo(0), CONFIG.pages);
        other.submit();
        assert_eq!((volume.status().stored, volume.status().stores[0].used), (0, 0));
    }
}

#[test]
fn a_part_that_waits_for_a_slot_while_another_is_under_way_is_forsaken_at_once() {
    let (_, sim) = volume(CONFIG);
    let (_volume, [_holder, mut gone]) = short_of_slots(Arc::clone(&sim) as _, false);
    // Page 60 needs no store before its slot. Page 3 is read first, from a store that hangs.
    for page in [60, 3] {
        assert_eq!(gone.write_part(page, PageNo(page), 100, &[2; 100]), Progress::Queued);
    }
    gone.submit();
    sim.hang(true);
    gone.forsake(|_| true);
    let mut ended = Vec::new();
    gone.poll(Instant::now(), &mut |done| ended.push((done.ticket, done.result)));
    assert_eq!(ended[..1], [(60, Err(Fault::Forsaken))]);
}

#[test]
fn a_pack_of_which_every_page_is_forsaken_waits_for_no_slot() {
    for stays in [false, true] {
        let store = Arc::new(Host::new(CONFIG.slots()).unwrap());
        let (_volume, [_holder, mut gone]) = short_of_slots(store, true);
        for page in 60..63 {
            write(&mut gone, page, &stamped(page, 2));
        }
        gone.submit();
        gone.forsake(|ticket| !stays || ticket != 61);
        // The time stands still, so no wait ends by its limit.
        let (now, mut ended) = (Instant::now(), Vec::new());
        for _ in 0..5 {
            gone.poll(now, &mut |done| ended.push((done.ticket, done.result)));
        }
        ended.sort_unstable_by_key(|(ticket, _)| *ticket);
        let all = [60, 61, 62].map(|ticket| (ticket, Err(Fault::Forsaken)));
        assert_eq!(ended, if stays { vec![] } else { all.to_vec() });
    }
}

/// The operations by which another lane writes a page.
const WAYS: [&str; 5] = ["a page", "a part", "one value", "zeros", "a hole"];

const WIDE: Config = Config { pages: 64, lanes: 2, depth: 64 };

fn overtake(lane: &mut Lane, page: u32, way: &str) -> PageBytes {
    match way {
        "a page" => write(lane, page, &stamped(page, 3)),
        "a part" => drop(lane.write_part(page, PageNo(page), 0, &stamped(page, 3))),
        "one value" => assert_eq!(lane.write(page, PageNo(page), &[3; PAGE_SIZE]), Progress::Done(Ok(()))),
        "zeros" => lane.zero(PageNo(page), 1, false),
        "a hole" => lane.zero(PageNo(page), 1, true),
        _ => panic!("{way}"),
    }
    assert!(finish(lane).iter().all(|(_, result)| *result == Ok(())));
    read(lane, page)
}

/// The writes that a client has begun before it goes.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
enum Begun {
    Pages,
    InPacks,
    Run,
}

#[test]
fn a_write_that_somebody_else_overtakes_waits_for_a_look_at_its_client() {
    let rounds = [Begun::Pages, Begun::InPacks, Begun::Run]
        .into_iter()
        .flat_map(|begun| WAYS.into_iter().flat_map(move |way| [(begun, way, false), (begun, way, true)]));
    for (begun, way, stays) in rounds {
        let what = format!("{begun:?} and {way}, the client stays: {stays}");
        let (volume, _) = volume(WIDE);
        if begun == Begun::InPacks {
            volume.compress(Compression::Lz4);
        }
        let (mut gone, mut other) = (volume.lane().unwrap(), volume.lane().unwrap());
        // Zeros over zeros, and a hole over a hole, count as writes too.
        other.zero(PageNo(0), 1, way == "a hole");
        write(&mut other, 4, &stamped(4, 1));
        finish(&mut other);
        // No other lane writes page 2. The store finishes a run one poll earlier.
        let (overtaken, alone, polls) = if begun == Begun::Run {
            let run: Vec<PageBytes> = (0..16).map(|page| stamped(page, 2)).collect();
            assert_eq!(gone.write_run(PageNo(0), &run), 0, "the store is slow");
            assert_eq!(gone.queue_writes(0, PageNo(0), &run), 16);
            (vec![0, 7], None, 1)
        } else {
            for page in 0..3 {
                write(&mut gone, page, &stamped(page, 2));
            }
            assert_eq!(gone.write_part(3, PageNo(3), 100, &[2; 100]), Progress::Queued);
            // The write first reads the old content, and then it needs no store.
            assert_eq!(gone.write_part(4, PageNo(4), 0, &[2; PAGE_SIZE]), Progress::Queued);
            (vec![0, 1, 3, 4], Some(2), 2)
        };
        gone.submit();
        let new: Vec<PageBytes> = overtaken.iter().map(|page| overtake(&mut other, *page, way)).collect();
        // The store has finished long ago. The client was not looked for since.
        let mut ended = Vec::new();
        for _ in 0..polls {
            gone.poll(Instant::now(), &mut |done| ended.push((done.ticket, done.result)));
        }
        assert_eq!(ended, Vec::from_iter(alone.map(|ticket| (ticket, Ok(())))), "{what}");
        if !stays {
            gone.forsake(|_| true);
        }
        let left = finish(&mut gone);
        let expected = if stays { Ok(()) } else { Err(Fault::Forsaken) };
        assert!(!left.is_empty() && left.iter().all(|(_, result)| *result == expected), "{what}: {left:?}");
        for (page, new) in overtaken.into_iter().zip(new) {
            let last = match page {
                _ if !stays => new,
                3 => std::array::from_fn(|at| if (100..200).contains(&at) { 2 } else { new[at] }),
                4 => [2; PAGE_SIZE],
                _ => stamped(page, 2),
            };
            assert!(read(&mut other, page) == last, "{what}: page {page}");
        }
        let status = volume.status();
        assert_eq!(u64::from(status.stores[0].used), status.stored - status.packed + status.packs, "{what}");
        other.discard(PageNo(0), 64);
        other.submit();
        let status = volume.status();
        assert_eq!((status.stored, status.packs, status.stores[0].used), (0, 0, 0), "{what}");
    }
}

#[test]
fn a_lane_that_is_dropped_with_overtaken_writes_keeps_no_slot() {
    for compress in [false, true] {
        let (volume, _) = volume(WIDE);
        if compress {
            volume.compress(Compression::Lz4);
        }
        let (mut gone, mut other) = (volume.lane().unwrap(), volume.lane().unwrap());
        for page in 0..4 {
            write(&mut gone, page, &stamped(page, 2));
        }
        let run: Vec<PageBytes> = (10..26).map(|page| stamped(page, 2)).collect();
        gone.write_run(PageNo(10), &run);
        assert_eq!(gone.queue_writes(10, PageNo(10), &run), if compress { 0 } else { 16 });
        gone.submit();
        for page in [1, 12] {
            overtake(&mut other, page, "a page");
        }
        let mut ended = 0;
        for _ in 0..2 {
            gone.poll(Instant::now(), &mut |_| ended += 1);
        }
        assert_eq!(ended, 3);
        drop(gone);
        volume.close_lanes(Instant::now());
        let status = volume.status();
        assert_eq!(u64::from(status.stores[0].used), status.stored - status.packed + status.packs);
        for page in [1, 12] {
            assert!(read(&mut other, page) == stamped(page, 3), "page {page}");
        }
        for page in [0, 2, 3] {
            assert!(read(&mut other, page) == stamped(page, 2), "page {page}");
        }
        other.discard(PageNo(0), 64);
        other.submit();
        let status = volume.status();
        assert_eq!((status.stored, status.packs, status.stores[0].used), (0, 0, 0));
    }
}

#[test]
fn the_slot_of_a_write_that_has_no_answer_is_used_again_only_after_it_has_landed() {
    for compress in [false, true] {
        let (volume, sim) = volume(CONFIG);
        if compress {
            volume.compress(Compression::Lz4);
        }
        let (mut late, mut other) = (volume.lane().unwrap(), volume.lane().unwrap());
        for page in 0..3 {
            write(&mut late, page, &stamped(page, 1));
        }
        assert_eq!(late.write_part(3, PageNo(3), 0, &[3; 100]), Progress::Queued);
        late.submit();
        sim.hang(true);
        let ended = finish(&mut late);
        assert!(
            ended.len() == 4 && ended.iter().all(|(_, result)| *result == Err(Fault::Timeout)),
            "{ended:?}"
        );
        let held = volume.status().stores[0].used;
        assert!(held == if compress { 2 } else { 4 } || compress && held == 1, "{held} slots");
        sim.hang(false);
        // Others use every other slot.
        for generation in 2..6 {
            for page in 0..64 {
                while other.write(page, PageNo(page), &stamped(page, generation)) == Progress::Full {
                    finish(&mut other);
                }
            }
            assert!(finish(&mut other).iter().all(|(_, result)| *result == Ok(())));
        }
        late.submit();
        for page in 0..64 {
            assert!(read(&mut other, page) == stamped(page, 5), "page {page}");
        }
        let status = volume.status();
        assert_eq!(u64::from(status.stores[0].used), status.stored - status.packed + status.packs);
    }
}

#[test]
fn a_disk_that_hangs_again_and_again_uses_no_slot_up() {
    let (volume, sim) = volume(CONFIG);
    let mut lane = volume.lane().unwrap();
    for round in 0..20 {
        sim.hang(true);
        for page in 0..64 {
            // The lane has too little room: a write that it cannot begin fails at once.
            match lane.write(page, PageNo(page), &stamped(page, round)) {
                Progress::Queued => {}
                Progress::Full => assert!(finish(&mut lane).iter().all(|(_, result)| result.is_err())),
                Progress::Done(result) => assert!(matches!(result, Err(Fault::Io(_))), "{result:?}"),
            }
        }
        finish(&mut lane);
        sim.hang(false);
        lane.submit();
        assert_eq!(volume.status().stores[0].used, 0, "round {round}");
    }
}

#[test]
fn a_lane_that_is_dropped_waits_for_no_store_and_its_slots_and_seat_are_free_when_that_has_answered() {
    for compress in [false, true] {
        let (volume, sim) = volume(CONFIG);
        if compress {
            volume.compress(Compression::Lz4);
        }
        let (mut gone, mut other) = (volume.lane().unwrap(), volume.lane().unwrap());
        write(&mut other, 0, &stamped(0, 1));
        finish(&mut other);
        for page in 0..3 {
            write(&mut gone, page, &stamped(page, 2));
        }
        assert_eq!(gone.read(9, PageNo(0), &mut [0; PAGE_SIZE]), Progress::Queued);
        gone.submit();
        sim.hang(true);
        drop(gone);
        let now = Instant::now();
        let held = volume.status().stores[0].used;
        assert!(held > 1, "the store may write there");
        for _ in 0..5 {
            volume.close_lanes(now);
            assert!(volume.lane().is_err(), "its store has not answered");
            assert_eq!(volume.status().stores[0].used, held);
        }
        sim.hang(false);
        for _ in 0..2 {
            volume.close_lanes(now);
        }
        assert_eq!(volume.status().stores[0].used, 1);
        assert!(volume.lane().is_ok(), "its seat is free");
        assert!(read(&mut other, 0) == stamped(0, 1), "what was not acknowledged takes no effect");
    }
}

/// Fills the lanes with writes under way, and has the daemon die.
fn die_at_work(volume: &Arc<Volume>, sim: &Sim, round: u32) -> Arc<Volume> {
    let config = *volume.config();
    let mut lanes: Vec<Lane> = (0..config.lanes).map(|_| volume.lane().unwrap()).collect();
    for lane in &mut lanes {
        for page in (0..config.pages).cycle() {
            if lane.write(page, PageNo(page), &stamped(page, 1000 + round)) != Progress::Queued {
                break;
            }
        }
        lane.submit();
        assert!(lane.in_flight() > 0, "a lane may write");
    }
    sim.let_writes_outlive_lanes(true);
    lanes.into_iter().for_each(Lane::abandon);
    sim.let_writes_outlive_lanes(false);
    let fds = volume.kept_fds();
    let adopt = |fd: &BorrowedFd<'_>| Memory::adopt(fd.try_clone_to_owned().unwrap()).unwrap();
    let kept = Kept { map: adopt(&fds.map), records: fds.records.iter().map(adopt).collect() };
    let stores: Vec<Arc<dyn Store>> = volume.stores().cloned().collect();
    let (next, lost) = Volume::take_over(config, stores, kept).unwrap();
    assert_eq!(lost, 0);
    next
}

#[test]
fn daemons_that_die_one_after_the_other_over_a_disk_that_hangs_leave_the_next_slots_enough() {
    // Of the 384 slots beyond the pages', each daemon has up to 256 under way when it dies.
    let (mut volume, sim) = volume(Config { pages: 64, lanes: 2, depth: 128 });
    for round in 0..8 {
        let mut lanes = [volume.lane().unwrap(), volume.lane().unwrap()];
        for again in 0..4 {
            for page in 0..64 {
                let (lane, bytes) = (&mut lanes[page as usize % 2], stamped(page, 4 * round + again));
                while lane.write(page, PageNo(page), &bytes) == Progress::Full {
                    assert!(finish(lane).iter().all(|(_, result)| *result == Ok(())), "round {round}");
                }
            }
            for lane in &mut lanes {
                assert!(finish(lane).iter().all(|(_, result)| *result == Ok(())), "round {round}");
            }
        }
        for page in 0..64 {
            assert!(read(&mut lanes[0], page) == stamped(page, 4 * round + 3), "round {round}, page {page}");
        }
        drop(lanes);
        volume = die_at_work(&volume, &sim, round);
    }
    // The disk comes back, and every write that the daemons left lands, in slots that no page uses.
    while sim.orphans() > 0 {
        sim.land(0);
    }
    let mut lane = volume.lane().unwrap();
    for page in 0..64 {
        assert!(read(&mut lane, page) == stamped(page, 31), "page {page}");
    }
    assert_eq!(volume.status().stores[0].used, 64);
}

#[test]
fn a_write_after_33_deaths_is_refused_in_time_and_the_next_succeeds_once_the_disk_is_quiet() {
    let (mut volume, sim) = volume(CONFIG);
    let mut lane = volume.lane().unwrap();
    for page in 0..CONFIG.pages {
        write(&mut lane, page, &stamped(page, 1));
        finish(&mut lane);
    }
    drop(lane);
    for round in 0..33 {
        assert!(volume.quarantined() <= CONFIG.quarantine(), "every lane may write after {round} deaths");
        volume = die_at_work(&volume, &sim, round);
    }
    assert!(volume.quarantined() > CONFIG.quarantine());
    let (mut lane, begun) = (volume.lane().unwrap(), Instant::now());
    let again = |lane: &mut Lane, time: Duration| {
        lane.poll(begun + time, &mut |done| panic!("nothing is under way: {done:?}"));
        lane.write(7, PageNo(7), &stamped(7, 2))
    };
    let limit = Duration::from_secs(2);
    for time in [Duration::ZERO, Duration::from_millis(1), limit] {
        assert_eq!(again(&mut lane, time), Progress::Full);
    }
    let refused = again(&mut lane, limit + Duration::from_millis(1));
    assert_eq!(refused, Progress::Done(Err(Fault::Timeout)));
    for page in 0..CONFIG.pages {
        assert!(read(&mut lane, page) == stamped(page, 1), "page {page}");
    }
    while sim.orphans() > 0 {
        sim.land(0);
    }
    let written = (0..2).map(|_| again(&mut lane, 3 * limit)).find(|progress| *progress != Progress::Full);
    assert_eq!(written, Some(Progress::Queued));
    assert_eq!(finish(&mut lane), [(7, Ok(()))]);
    for page in 0..CONFIG.pages {
        assert!(read(&mut lane, page) == stamped(page, 1 + u32::from(page == 7)), "page {page}");
    }
    assert_eq!(volume.status().stores[0].used, CONFIG.pages);
}
