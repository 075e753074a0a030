//! Two copies on real engines: nodes that die, stand still, and come back empty or older.

mod engine;

use engine::{PATIENCE, Stop, all, engines, open, page, read, url, write};
use rustix::process::Signal;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};
use weir_core::{PageBytes, Slot};
use weir_store::{Fault, Lane, RemoteStore, State, Store};

/// Waits until `gone` copies were missed with processes that have ended, and no page lacks one.
fn wait_for_copies(store: &RemoteStore, gone: u64) {
    let begun = Instant::now();
    while store.counts().gone < gone || store.counts().lacking > 0 {
        assert!(begun.elapsed() < PATIENCE, "copies are not made anew: {:?}", store.counts());
        std::thread::sleep(Duration::from_millis(5));
    }
}

fn wait_until_online(store: &RemoteStore, member: u32) {
    let begun = Instant::now();
    while store.state(member) != State::Online {
        assert!(begun.elapsed() < PATIENCE, "{:?}", store.report().unwrap().conditions());
        std::thread::sleep(Duration::from_millis(5));
    }
}

/// Some slots of every extent.
fn slots(store: &RemoteStore) -> Vec<Slot> {
    (0..store.slots()).step_by(64).map(Slot).collect()
}

/// Writes generation `by` of every page.
fn fill(lane: &mut dyn Lane, slots: &[Slot], by: u32) -> Vec<Result<(), Fault>> {
    let writes: Vec<(Slot, Option<PageBytes>)> =
        slots.iter().map(|slot| (*slot, Some(page(slot.0.wrapping_add(by))))).collect();
    all(lane, &writes).into_iter().map(|(result, _)| result).collect()
}

/// Checks that every page is of generation `by`.
fn verify(lane: &mut dyn Lane, slots: &[Slot], by: u32) {
    let reads: Vec<_> = slots.iter().map(|slot| (*slot, None)).collect();
    for (slot, (result, content)) in slots.iter().zip(all(lane, &reads)) {
        assert_eq!(result, Ok(()), "{slot:?}");
        assert!(content == page(slot.0.wrapping_add(by)), "{slot:?} is not of generation {by}");
    }
}

/// One full round: each node dies in turn, and an empty one takes its place. At full scale twenty.
#[test]
fn each_node_may_be_replaced_by_an_empty_one_in_turn_and_no_page_is_lost() {
    let name = "each_node_may_be_replaced_by_an_empty_one_in_turn_and_no_page_is_lost";
    let Some(mut engines) = engines(3, name) else { return };
    let full = std::env::var_os("WEIR_SCALE").is_some_and(|scale| scale == "full");
    let store = open(&url(&engines, "size=64MiB&copies=2"));
    let mut lane = store.lane(32).unwrap();
    let slots = slots(&store);
    assert!(fill(&mut *lane, &slots, 0).iter().all(Result::is_ok));
    let (mut generation, mut gone) = (0, 0);
    for victim in (0..3).cycle().take(if full { 60 } else { 3 }) {
        gone += u64::try_from(engines[victim].keys()).unwrap();
        engines[victim].kill();
        // Half of the pages are newer than what the node had.
        generation += 1;
        let (newer, older) = slots.split_at(slots.len() / 2);
        assert_eq!(fill(&mut *lane, newer, generation), vec![Ok(()); newer.len()]);
        verify(&mut *lane, newer, generation);
        verify(&mut *lane, older, generation - 1);
        engines[victim].restart();
        wait_until_online(&store, victim as u32);
        // Written while copies are made.
        assert_eq!(fill(&mut *lane, older, generation), vec![Ok(()); older.len()]);
        wait_for_copies(&store, gone);
        verify(&mut *lane, &slots, generation);
    }
    let counts = store.counts();
    assert!(counts.copied > 0 && counts.forged == 0, "{counts:?}");
    println!("{generation} replacements, 0 of {} pages lost: {counts:?}", slots.len());
    println!("figure: replaced replacements {generation} higher");
    println!("figure: replaced copies_made_anew {} higher", counts.copied);
    println!("figure: replaced lost_pages 0 lower 0");
}

/// Random reads and writes, each read checked, until `stop`. Returns how many operations were done,
/// and the pages as they are then.
fn load(store: &RemoteStore, slots: &[Slot], seed: u64, stop: &AtomicBool) -> (u64, Vec<u32>) {
    let mut lane = store.lane(32).unwrap();
    let mut versions = vec![0; slots.len()];
    let (mut state, mut done) = (seed | 1, 0);
    let mut random = |below: usize| {
        state ^= state << 13;
        state ^= state >> 7;
        state ^= state << 17;
        (state >> 33) as usize % below
    };
    while !stop.load(Ordering::Relaxed) {
        // A run of neighbours, so that no slot is in a batch twice.
        let first = random(slots.len() - 16);
        let batch: Vec<usize> = (first..first + 16).filter(|_| random(2) == 0).collect();
        let writes: Vec<bool> = batch.iter().map(|_| random(2) == 0).collect();
        let operation = |(&at, &write): (&usize, &bool)| {
            versions[at] += u32::from(write);
            (slots[at], write.then(|| page(slots[at].0.wrapping_add(versions[at]))))
        };
        let operations: Vec<_> = batch.iter().zip(&writes).map(operation).collect();
        for ((at, write), (result, content)) in batch.iter().zip(writes).zip(all(&mut *lane, &operations)) {
            assert_eq!(result, Ok(()), "{:?} write {write} {:?}", slots[*at], store.counts());
            assert!(write || content == page(slots[*at].0.wrapping_add(versions[*at])), "{:?}", slots[*at]);
        }
        done += batch.len() as u64;
    }
    (done, versions)
}

/// At full scale for ten minutes; `WEIR_SEED` is another course of events.
#[test]
fn under_load_a_node_may_die_stand_still_or_be_replaced_again_and_again() {
    let name = "under_load_a_node_may_die_stand_still_or_be_replaced_again_and_again";
    let Some(mut engines) = engines(3, name) else { return };
    let full = std::env::var_os("WEIR_SCALE").is_some_and(|scale| scale == "full");
    let seed = std::env::var("WEIR_SEED").map_or(7, |seed| seed.parse().unwrap());
    let store = open(&url(&engines, "size=64MiB&copies=2"));
    let slots = slots(&store);
    assert!(fill(&mut *store.lane(32).unwrap(), &slots, 0).iter().all(Result::is_ok));
    let stop = AtomicBool::new(false);
    let begun = Instant::now();
    let mut faults = 0;
    let (done, versions) = std::thread::scope(|scope| {
        let stopping = Stop(&stop);
        let worker = scope.spawn(|| load(&store, &slots, seed, &stop));
        let mut state = seed;
        while !worker.is_finished() && (faults < 6 || full && begun.elapsed() < Duration::from_secs(600)) {
            state = state.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1);
            let victim = (state >> 33) as usize % 3;
            let rest = Duration::from_millis(state >> 40 & 0x7ff);
            let gone = store.counts().gone;
            let replaced = state >> 60 & 1 == 0;
            if replaced {
                engines[victim].kill();
                std::thread::sleep(rest);
                engines[victim].restart();
            } else {
                engines[victim].signal(Signal::STOP);
                std::thread::sleep(4 * rest);
                engines[victim].signal(Signal::CONT);
            }
            faults += 1;
            // Only one node at a time: the next is hurt once every page has two copies.
            let begun = Instant::now();
            let is_whole = || {
                let counts = store.counts();
                counts.lacking == 0 && (!replaced || counts.gone > gone)
            };
            while !is_whole() && !worker.is_finished() {
                assert!(begun.elapsed() < PATIENCE, "{:?}", store.counts());
                std::thread::sleep(Duration::from_micros(200));
            }
        }
        drop(stopping);
        worker.join().unwrap()
    });
    let mut lane = store.lane(32).unwrap();
    let reads: Vec<_> = slots.iter().map(|slot| (*slot, None)).collect();
    for ((slot, version), (result, content)) in slots.iter().zip(versions).zip(all(&mut *lane, &reads)) {
        assert_eq!(result, Ok(()), "{slot:?}");
        assert!(content == page(slot.0.wrapping_add(version)), "{slot:?}");
    }
    let counts = store.counts();
    println!("{faults} faults, {done} operations, 0 errors, 0 of {} pages wrong: {counts:?}", slots.len());
    println!("figure: two_copies_under_load faults {faults} higher");
    println!("figure: two_copies_under_load operations {done} higher");
    println!("figure: two_copies_under_load wrong_or_refused 0 lower 0");
    // A read that waits as its node is replaced finds nothing there, and asks the other one.
    assert_eq!(counts.forged, 0);
}

#[test]
fn a_node_that_is_replaced_by_an_older_one_is_brought_up_to_date_and_never_believed() {
    let name = "a_node_that_is_replaced_by_an_older_one_is_brought_up_to_date_and_never_believed";
    for copies in [1, 2] {
        let Some(mut engines) = engines(2, name) else { return };
        let store = open(&url(&engines, &format!("size=64MiB&copies={copies}")));
        let mut lane = store.lane(32).unwrap();
        let slots = slots(&store);
        assert!(fill(&mut *lane, &slots, 0).iter().all(Result::is_ok));
        engines[1].call(&["SAVE"]).unwrap();
        assert!(fill(&mut *lane, &slots, 5).iter().all(Result::is_ok));
        engines[1].kill();
        engines[1].restart();
        if copies == 1 {
            for &slot in &slots {
                match (store.member(slot), read(&mut *lane, slot.0)) {
                    (0, Ok(content)) => assert!(content == page(slot.0 + 5)),
                    (1, Err(Fault::Lost | Fault::Corrupt)) => {}
                    (member, other) => panic!("{slot:?} of {member}: {:?}", other.map(|page| page[0])),
                }
            }
            continue;
        }
        verify(&mut *lane, &slots, 5);
        wait_for_copies(&store, slots.len() as u64);
        assert_eq!(store.counts().forged, 0, "{:?}", store.counts());
        engines[0].kill();
        verify(&mut *lane, &slots, 5);
    }
}

#[test]
fn a_node_that_stands_still_fails_no_write_and_has_its_copies_made_later() {
    let name = "a_node_that_stands_still_fails_no_write_and_has_its_copies_made_later";
    let Some(mut engines) = engines(2, name) else { return };
    let store = open(&url(&engines, "size=16MiB&copies=2"));
    let mut lane = store.lane(32).unwrap();
    let slots = slots(&store);
    assert!(fill(&mut *lane, &slots, 0).iter().all(Result::is_ok));
    engines[1].signal(Signal::STOP);
    let begun = Instant::now();
    // The node may be stuck for the first of these, and known as away for the others.
    for generation in 1..8 {
        assert_eq!(fill(&mut *lane, &slots, generation), vec![Ok(()); slots.len()], "{generation}");
        verify(&mut *lane, &slots, generation);
    }
    println!("standing still: {:?}", begun.elapsed());
    assert!(store.counts().degraded > 0);
    engines[1].signal(Signal::CONT);
    wait_until_online(&store, 1);
    wait_for_copies(&store, 0);
    engines[0].kill();
    verify(&mut *lane, &slots, 7);
    assert_eq!(store.counts().forged, 0, "{:?}", store.counts());
}

#[test]
fn a_node_that_nobody_uses_is_found_to_be_another_process_all_the_same() {
    let name = "a_node_that_nobody_uses_is_found_to_be_another_process_all_the_same";
    let Some(mut engines) = engines(2, name) else { return };
    let store = open(&url(&engines, "size=16MiB&copies=2"));
    let mut lane = store.lane(32).unwrap();
    let slots = slots(&store);
    assert!(fill(&mut *lane, &slots, 0).iter().all(Result::is_ok));
    engines[1].kill();
    engines[1].restart();
    wait_for_copies(&store, slots.len() as u64);
    engines[0].kill();
    verify(&mut *lane, &slots, 0);
}

#[test]
fn an_engine_that_evicts_is_not_taken_in_place_of_one_that_does_not() {
    let name = "an_engine_that_evicts_is_not_taken_in_place_of_one_that_does_not";
    let Some(mut engines) = engines(1, name) else { return };
    let store = open(&url(&engines, "size=1MiB"));
    let mut lane = store.lane(8).unwrap();
    assert_eq!(write(&mut *lane, 0, 1), Ok(()));
    engines[0].kill();
    engines[0].restart_with(&["--maxmemory", "1gb", "--maxmemory-policy", "allkeys-lru"]);
    assert_eq!(write(&mut *lane, 1, 1), Err(Fault::Timeout));
    let said = store.report().unwrap().conditions()[0].why.clone().unwrap();
    assert!(said.contains("allkeys-lru): set it to noeviction"), "{said}");
    engines[0].call(&["CONFIG", "SET", "maxmemory-policy", "noeviction"]).unwrap();
    wait_until_online(&store, 0);
    assert_eq!(read(&mut *lane, 0), Err(Fault::Lost), "it is gone with the process");
    assert_eq!(write(&mut *lane, 2, 1), Ok(()));
}

#[test]
fn a_copy_that_was_changed_or_thrown_away_is_read_from_the_other_node_and_made_anew() {
    let name = "a_copy_that_was_changed_or_thrown_away_is_read_from_the_other_node_and_made_anew";
    let Some(mut engines) = engines(2, name) else { return };
    let store = open(&url(&engines, "size=128MiB&copies=2"));
    let mut lane = store.lane(32).unwrap();
    let slots = slots(&store);
    assert!(fill(&mut *lane, &slots, 0).iter().all(Result::is_ok));
    // The node that is asked first, and whose copy goes.
    let first = |slot: &Slot| store.member(*slot) as usize;
    let of = |member: usize| slots.iter().copied().find(|slot| first(slot) == member).unwrap();
    let (changed, other) = (of(0), of(1));
    let mut value = engines[0].bytes(&store.key(changed));
    value[100] ^= 1;
    engines[0].put(&store.key(changed), &value);
    assert_eq!(read(&mut *lane, changed.0), Ok(page(changed.0)));
    assert_eq!(store.counts().forged, 1);
    wait_for_copies(&store, 0);
    // The same process, without its values.
    engines[1].call(&["FLUSHALL"]).unwrap();
    verify(&mut *lane, &slots, 0);
    assert!(store.counts().lost > 0);
    wait_for_copies(&store, 0);
    let mended = |engine: &engine::Engine, slot| match engine.call(&["GET", &store.key(slot)]) {
        Some(redis::Value::BulkString(found)) => found != value,
        _ => false,
    };
    assert!(mended(&engines[0], changed) && mended(&engines[1], other));
    engines[1].kill();
    assert_eq!(read(&mut *lane, changed.0), Ok(page(changed.0)));
}
