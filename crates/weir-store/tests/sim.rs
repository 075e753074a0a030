//! The simulated store does what it was told, counts it exactly, and does the same again for the
//! same seed.

use proptest::prelude::*;
use std::time::Instant;
use weir_core::{ByteSize, PAGE_SIZE, PageBytes, Slot};
use weir_store::conformance::content;
use weir_store::{
    Damage, Done, Fault, Injected, Lane, Progress, Reclaim, Sim, SimUrl, State, Store, StoreUrl,
};

const EIO: Fault = Fault::Io(5);

fn sim(url: &str) -> Sim {
    match url.parse().expect("a URL") {
        StoreUrl::Sim(url) => Sim::open(url).expect("a store"),
        other => panic!("{other} is no sim"),
    }
}

#[test]
fn a_simulated_store_has_chunks_of_a_page_at_least() {
    let url = SimUrl { chunk: Some(ByteSize(1)), ..SimUrl::default() };
    let error = Sim::open(url).unwrap_err().to_string();
    assert!(error.contains("size and chunk must hold a page at least"), "{error}");
}

fn write(lane: &mut dyn Lane, slot: u32, page: &PageBytes) -> Result<(), Fault> {
    let queued = lane.write(0, Slot(slot), page);
    finish(lane, queued, &mut [0; PAGE_SIZE])
}

fn read(lane: &mut dyn Lane, slot: u32) -> Result<PageBytes, Fault> {
    let mut page = [0; PAGE_SIZE];
    let queued = lane.read(0, Slot(slot), &mut page);
    finish(lane, queued, &mut page).map(|()| page)
}

fn finish(lane: &mut dyn Lane, progress: Progress, into: &mut PageBytes) -> Result<(), Fault> {
    match progress {
        Progress::Done(result) => result,
        Progress::Full => panic!("one operation at a time never fills a lane"),
        Progress::Queued => {
            lane.submit();
            let mut answer = None;
            while answer.is_none() {
                lane.poll(Instant::now(), &mut |Done { result, page, .. }| {
                    page.inspect(|page| *into = **page);
                    answer = Some(result);
                });
            }
            answer.expect("just set")
        }
    }
}

/// Writes and reads every slot of `store` several times, and compares each result with the store's
/// own counts.
fn exercise(store: &Sim) -> Injected {
    let mut lane = store.lane(8).expect("a lane");
    let mut seen = Injected::default();
    for serial in 1..20 {
        for slot in 0..store.slots() {
            let before = store.damage(Slot(slot));
            match write(&mut *lane, slot, &content(Slot(slot), serial)) {
                Err(fault) => {
                    assert_eq!(fault, EIO);
                    seen.write_errors += 1;
                    assert_eq!(store.damage(Slot(slot)), before, "a failed write changes nothing");
                }
                Ok(()) => match store.damage(Slot(slot)) {
                    Some(Damage::Corrupt) => seen.corrupt_writes += 1,
                    Some(Damage::Stale) => seen.lost_writes += 1,
                    None => {}
                },
            }
            let acknowledged = store.damage(Slot(slot)).is_none() && before.is_none();
            match read(&mut *lane, slot) {
                Err(fault) => {
                    assert_eq!(fault, EIO);
                    seen.read_errors += 1;
                }
                Ok(page) if page == content(Slot(slot), serial) => {
                    assert_eq!(store.damage(Slot(slot)), None, "slot {slot} is whole");
                }
                Ok(_) if store.damage(Slot(slot)).is_some() => seen.damaged_reads += 1,
                Ok(page) => {
                    // Only a failed write leaves an older content that does not count as damage.
                    let older = (0..serial).any(|serial| page == content(Slot(slot), serial));
                    assert!(acknowledged && (older || page == [0; PAGE_SIZE]), "slot {slot}, write {serial}");
                }
            }
        }
    }
    seen
}

#[test]
fn it_counts_exactly_what_it_injects() {
    for delay in [0, 5] {
        let store = sim(&format!(
            "sim:size=1MiB,seed=3,read_error=0.02,write_error=0.03,corrupt=0.04,lose=0.05,delay={delay}"
        ));
        let seen = exercise(&store);
        assert_eq!(seen, store.injected());
        let all =
            [seen.read_errors, seen.write_errors, seen.corrupt_writes, seen.lost_writes, seen.damaged_reads];
        assert!(all.iter().all(|&count| count > 50), "too few to mean anything: {seen:?}");
    }
}

#[test]
fn a_store_told_nothing_does_nothing_wrong() {
    let store = sim("sim:size=256KiB");
    exercise(&store);
    assert_eq!(store.injected(), Injected::default());
}

#[test]
fn a_flipped_bit_is_one_bit() {
    let store = sim("sim:size=64KiB,corrupt=1");
    let mut lane = store.lane(1).unwrap();
    for slot in 0..16 {
        let page = content(Slot(slot), 1);
        assert_eq!(write(&mut *lane, slot, &page), Ok(()));
        let stored = read(&mut *lane, slot).unwrap();
        let flipped: u32 = stored.iter().zip(&page).map(|(is, was)| (is ^ was).count_ones()).sum();
        assert_eq!(flipped, 1);
    }
}

#[test]
fn a_lost_slot_acknowledges_every_write_and_keeps_none() {
    let store = sim("sim:size=64KiB,lost_slot=5");
    let mut lane = store.lane(1).unwrap();
    for slot in 0..16 {
        assert_eq!(write(&mut *lane, slot, &content(Slot(slot), 1)), Ok(()));
        let kept = read(&mut *lane, slot).unwrap() == content(Slot(slot), 1);
        assert_eq!(kept, slot != 5, "slot {slot}");
    }
    assert_eq!(store.injected().lost_writes, 1);
    assert_eq!(store.injected().damaged_reads, 1);
}

#[test]
fn a_store_that_dies_takes_everything_with_it() {
    let store = sim("sim:size=64KiB,die_after=10,delay=3");
    let mut lane = store.lane(4).unwrap();
    let mut bystander = store.lane(4).unwrap();
    for slot in 0..10 {
        assert_eq!(store.state(0), State::Online);
        assert_eq!(write(&mut *lane, slot, &content(Slot(slot), 1)), Ok(()));
    }
    assert_eq!(read(&mut *lane, 0), Err(Fault::Lost));
    assert_eq!(store.state(0), State::Lost);
    assert_eq!(read(&mut *bystander, 1), Err(Fault::Lost));
    assert_eq!(store.release(0), Err(Fault::Lost));
    assert_eq!(store.injected().gone, 2);
}

#[test]
fn delayed_operations_overtake_one_another() {
    let store = sim("sim:size=1MiB,seed=2,delay=8");
    let mut lane = store.lane(64).unwrap();
    for ticket in 0..64 {
        assert_eq!(lane.write(ticket, Slot(ticket), &[1; PAGE_SIZE]), Progress::Queued);
    }
    assert_eq!(lane.write(64, Slot(64), &[1; PAGE_SIZE]), Progress::Full);
    assert_eq!(lane.read(64, Slot(64), &mut [1; PAGE_SIZE]), Progress::Full);
    let mut order = Vec::new();
    lane.poll(Instant::now(), &mut |done| order.push(done.ticket));
    assert!(order.is_empty(), "nothing finishes before it is submitted");
    lane.submit();
    for _ in 0..8 {
        lane.poll(Instant::now(), &mut |done| order.push(done.ticket));
    }
    assert_eq!(order.len(), 64, "nothing takes longer than it may");
    assert!(!order.is_sorted(), "{order:?}");
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(16))]
    #[test]
    fn the_same_seed_does_the_same_to_each_lane(seed: u64, delay in 0u32..4) {
        let url = format!("sim:size=64KiB,seed={seed},read_error=0.1,write_error=0.1,corrupt=0.1,lose=0.1,delay={delay}");
        let history = |first: usize| {
            let store = sim(&url);
            let mut lanes = [store.lane(4).unwrap(), store.lane(4).unwrap()];
            let mut history = [Vec::new(), Vec::new()];
            // The lanes take turns in either order, each on its own half.
            for serial in 0..200u32 {
                for turn in [first, 1 - first] {
                    let slot = turn as u32 * 8 + serial % 8;
                    let wrote = write(&mut *lanes[turn], slot, &content(Slot(slot), serial));
                    history[turn].push((wrote, read(&mut *lanes[turn], slot)));
                }
            }
            history
        };
        let once = history(0);
        prop_assert!(once == history(1), "the order of lanes made a difference");
        prop_assert!(once[0].iter().map(|(wrote, _)| wrote).ne(once[1].iter().map(|(wrote, _)| wrote)));
    }
}
