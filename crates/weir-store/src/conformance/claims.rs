//! Tests of the conformance suite that need no model of the slots' content.

use super::content::{content, label};
use super::harness::{Kind, PATIENCE, Watched};
use crate::{Done, Fault, Lane, Store};
use std::sync::Barrier;
use std::time::Instant;
use weir_core::{PAGE_SIZE, Slot};

/// A lane opened for `depth` operations queues as many before it says that it is full. None of them
/// is lost.
pub fn a_lane_has_room_for_its_depth(store: &dyn Store) {
    for depth in [1, 2, 7, 64] {
        let mut lane = Watched::open(store, depth);
        lane.plan(0, depth);
        let mut finished = Vec::new();
        let slots = || (0..depth as u32).map(|at| Slot(at % store.slots()));
        let distinct = depth.min(store.slots() as usize);
        for slot in slots().take(distinct) {
            let done =
                lane.queue(Kind::Write(1), slot, &content(slot, 1)).expect("room for the lane's depth");
            finished.extend(done);
        }
        finished.append(&mut lane.drain());
        assert_eq!(finished.len(), distinct);
        assert!(finished.iter().all(|done| done.result.is_ok()), "{:?}", finished[0].result);
        for slot in slots().take(distinct) {
            assert_eq!(
                *lane.read_now(slot).expect("a written slot reads"),
                content(slot, 1),
                "slot {slot:?}"
            );
        }
    }
}

/// One lane writes pages past the caches and then calls [`settle`](Lane::settle). After that every
/// lane, on any thread, reads these pages. A store without such writes refuses them, and changes
/// nothing.
pub fn pages_written_past_the_caches_are_there_once_settled(store: &dyn Store) {
    let mut writer = store.lane(4).expect("a lane");
    let slots: Vec<Slot> = (0..64.min(store.slots())).rev().map(Slot).collect();
    for slot in &slots {
        let mut reader = Watched::open(store, 4);
        assert_eq!(reader.write_now(*slot, &content(*slot, 1)), Ok(()));
    }
    let possible = writer.writes_past_caches();
    for serial in 2..6 {
        for slot in &slots {
            let wanted = if possible { Ok(()) } else { Err(Fault::Unsupported) };
            assert_eq!(writer.write_past_caches(*slot, &content(*slot, serial)), wanted);
        }
        writer.settle();
        std::thread::scope(|scope| {
            scope.spawn(|| {
                let mut reader = Watched::open(store, 4);
                let expected = if possible { serial } else { 1 };
                for slot in &slots {
                    let page = reader.read_now(*slot).expect("a written slot reads");
                    assert_eq!(*page, content(*slot, expected), "slot {slot:?} holds {}", label(&page));
                }
            });
        });
    }
    assert!(writer.write_past_caches(Slot(store.slots()), &content(Slot(0), 1)).is_err());
}

/// Neighbouring slots are written, and read, as one operation, which answers with the pages in the
/// order of the slots. A store that cannot do that at present queues no page of the run.
pub fn a_run_is_one_operation_and_comes_back_in_order(store: &dyn Store) {
    const DEPTH: usize = 16;
    for (serial, start) in (1..).zip((0..store.slots()).step_by(7).take(30)) {
        let mut lane = store.lane(DEPTH).expect("a lane");
        lane.plan(0, DEPTH);
        let slots: Vec<Slot> = (start..store.slots()).map(Slot).take(DEPTH).collect();
        let pages: Vec<_> = slots.iter().map(|slot| content(*slot, serial)).collect();
        let written = lane.write_run(9, slots[0], &pages);
        assert!(written <= slots.len() && lane.in_flight() == written, "{written}");
        let mut answered = 0;
        drain(&mut *lane, &mut |done| {
            assert_eq!((done.ticket, done.result), (9, Ok(())));
            answered += 1;
        });
        assert_eq!(answered, written);
        let mut watched = Watched::open(store, DEPTH);
        for slot in &slots[written..] {
            assert_eq!(watched.write_now(*slot, &content(*slot, serial)), Ok(()));
        }
        for slot in &slots {
            let page = watched.read_now(*slot).expect("a written slot reads");
            assert_eq!(*page, content(*slot, serial), "slot {slot:?} holds {}", label(&page));
        }
        lane.plan(DEPTH, 0);
        let begun = lane.read_run(5, slots[0], slots.len());
        assert!(begun <= slots.len() && lane.in_flight() == begun, "{begun}");
        let mut expected = slots[..begun].iter();
        drain(&mut *lane, &mut |done| {
            let slot = expected.next().expect("a completion a page");
            let page = done.page.expect("a written slot reads");
            assert_eq!((done.ticket, *page), (5, content(*slot, serial)), "slot {slot:?}: {}", label(page));
        });
        assert_eq!(expected.len(), 0, "every page is answered");
    }
}

fn drain(lane: &mut dyn Lane, done: &mut dyn FnMut(Done<'_>)) {
    let started = Instant::now();
    lane.submit();
    while lane.in_flight() > 0 {
        assert!(started.elapsed() < PATIENCE, "{} in flight", lane.in_flight());
        lane.poll(Instant::now(), done);
    }
}

/// Once a lane is dropped, its operations in flight have no effect on a later lane.
pub fn a_lane_may_be_dropped_with_operations_in_flight(store: &dyn Store) {
    for serial in 1..20 {
        let mut dropped = Watched::open(store, 8);
        let slots = || (0..8.min(store.slots())).map(Slot);
        for slot in slots() {
            let _ = dropped.queue(Kind::Write(0), slot, &content(slot, 0));
        }
        if serial % 2 == 0 {
            dropped.submit();
        }
        drop(dropped);
        let mut lane = Watched::open(store, 8);
        for slot in slots() {
            assert_eq!(lane.write_now(slot, &content(slot, serial)), Ok(()));
        }
        for slot in slots() {
            let page = lane.read_now(slot).expect("a written slot reads");
            assert_eq!(*page, content(slot, serial), "slot {slot:?} holds {}", label(&page));
        }
    }
}

/// A lane that was opened and used on one thread works on another thread too. Each of the two
/// threads reads, by that lane, the pages that the other thread wrote.
pub fn a_lane_may_move_to_another_thread(store: &dyn Store) {
    let mut lane = Watched::open(store, 4);
    let slot = Slot(store.slots() - 1);
    assert_eq!(lane.write_now(slot, &content(slot, 1)), Ok(()));
    let mut lane = std::thread::scope(|scope| {
        let moved = scope.spawn(|| {
            assert_eq!(*lane.read_now(slot).expect("a written slot reads"), content(slot, 1));
            assert_eq!(lane.write_now(slot, &content(slot, 2)), Ok(()));
            lane
        });
        moved.join().expect("the other thread")
    });
    assert_eq!(*lane.read_now(slot).expect("a written slot reads"), content(slot, 2));
    let mut other = Watched::open(store, 1);
    assert_eq!(*other.read_now(slot).expect("a written slot reads"), content(slot, 2));
    drop(lane.into_lane());
}

/// Operations on a released chunk end with [`Fault::Lost`]. A chunk that was taken again works, and
/// shows nothing of its old content. A store that cannot release chunks refuses to.
pub fn a_released_chunk_faults_and_comes_back_empty(store: &dyn Store) {
    let Some(memory) = store.reclaim() else { return };
    let chunks = store.slots().div_ceil(memory.chunk_slots());
    let chunk = chunks - 1;
    let first = Slot(chunk * memory.chunk_slots());
    let last = Slot(store.slots() - 1);
    let mut lane = Watched::open(store, 4);
    let mut elsewhere = Watched::open(store, 4);
    // A disk that cannot discard gives no chunk back, so there is nothing to check.
    if memory.release(chunk) == Err(Fault::Unsupported) {
        return;
    }
    memory.take(chunk).expect("the chunk just released");
    for round in 0..3 {
        for slot in [first, last] {
            assert_eq!(lane.write_now(slot, &content(slot, round)), Ok(()));
        }
        assert_eq!(memory.release(chunk), Ok(()));
        for slot in [first, last] {
            assert_eq!(lane.read_now(slot).map(|page| label(&page)), Err(Fault::Lost));
            assert_eq!(elsewhere.write_now(slot, &content(slot, round)), Err(Fault::Lost));
        }
        assert_eq!(memory.take(chunk), Ok(()));
        for slot in [first, last] {
            let page = elsewhere.read_now(slot).expect("a chunk taken again reads");
            let same = page.iter().zip(&content(slot, round)).filter(|(is, was)| is == was).count();
            assert!(same < PAGE_SIZE / 4, "{same} bytes of what slot {slot:?} held are back");
        }
    }
    assert!(memory.release(chunks).is_err(), "there is no chunk {chunks}");
    assert!(memory.take(chunks).is_err(), "there is no chunk {chunks}");
}

/// An operation on a slot that the store does not have ends with a fault. Operations on the store's
/// own slots still succeed.
pub fn a_slot_outside_the_store_is_a_fault(store: &dyn Store) {
    let mut lane = Watched::open(store, 8);
    let inside = Slot(store.slots() - 1);
    for outside in [Slot(store.slots()), Slot(u32::MAX)] {
        assert!(lane.read_now(outside).is_err(), "{outside:?} read");
        assert!(lane.write_now(outside, &[1; PAGE_SIZE]).is_err(), "{outside:?} written");
        assert!(lane.view(outside).is_none(), "{outside:?} seen");
        assert_eq!(lane.write_now(inside, &content(inside, outside.0)), Ok(()));
        assert_eq!(*lane.read_now(inside).expect("a written slot reads"), content(inside, outside.0));
    }
}

/// Four threads work at once. Each has a lane of its own on every fourth slot, and finds what it
/// wrote last.
pub fn threads_with_lanes_of_their_own_do_not_disturb_one_another(store: &dyn Store) {
    const THREADS: u32 = 4;
    const SLOTS_EACH: u32 = 64;
    const ROUNDS: u32 = 40;
    assert!(store.slots() >= THREADS, "conformance needs a store of {THREADS} slots");
    let slots_each = SLOTS_EACH.min(store.slots() / THREADS);
    let start = Barrier::new(THREADS as usize);
    let work = |thread: u32| {
        let slots = || (0..slots_each).map(move |at| Slot(at * THREADS + thread));
        let mut lane = Watched::open(store, 1 + 9 * thread as usize);
        start.wait();
        for serial in 0..ROUNDS {
            let mut finished = Vec::new();
            slots()
                .for_each(|slot| lane.run(Kind::Write(serial), slot, &content(slot, serial), &mut finished));
            finished.append(&mut lane.drain());
            slots().for_each(|slot| lane.run(Kind::Read, slot, &[0; PAGE_SIZE], &mut finished));
            finished.append(&mut lane.drain());
            assert_eq!(finished.len(), 2 * slots_each as usize);
            for done in finished {
                assert_eq!(done.result, Ok(()), "{:?} of {:?}", done.kind, done.slot);
                if let Some(page) = done.page {
                    assert_eq!(*page, content(done.slot, serial), "{:?} holds {}", done.slot, label(&page));
                }
            }
        }
    };
    std::thread::scope(|scope| {
        for thread in 0..THREADS {
            scope.spawn(move || work(thread));
        }
    });
}

/// A thread that sleeps on the wake_fd between polls gets every completion, and is not woken when
/// there is none.
pub fn waiting_on_the_wake_fd_finds_every_completion(store: &dyn Store) {
    let mut lane = Watched::open(store, 16);
    let slots = 16.min(store.slots());
    for serial in 0..100 {
        let mut finished = Vec::new();
        for slot in (0..slots).map(Slot) {
            lane.run(Kind::Write(serial), slot, &content(slot, serial), &mut finished);
        }
        finished.append(&mut lane.drain());
        assert_eq!(finished.len(), slots as usize);
        // After a poll that found several completions, the wake-up descriptor may still be
        // readable. The next poll finds none, and must clear it.
        assert!(lane.poll().is_empty());
        assert_ne!(lane.wakes(), Some(true), "an idle lane keeps its thread awake");
    }
}
