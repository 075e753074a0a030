//! A store whose CUDA context dies: with an error after which nothing works, or without an answer.

use super::fake_cuda::{BatchCopy, FakeCuda};
use super::{Faked, PATIENCE, drivers, faked, lane, memory, page, read, report, soon, url, write};
use std::sync::atomic::{AtomicBool, AtomicU32, Ordering};
use std::sync::{Arc, Mutex};
use std::time::Instant;
use weir_core::Slot;
use weir_store::conformance::Shelf;
use weir_store::vram::{Target, VramStore};
use weir_store::{Condition, Done, Fault, Lane, Progress, State, Store, Survive};

/// Changes of condition that a store reports.
#[derive(Clone, Default)]
struct Told(Arc<Mutex<Vec<Condition>>>);

impl Told {
    fn of(store: &VramStore) -> Self {
        let told = Told::default();
        let list = Arc::clone(&told.0);
        report(store).when_changed(Arc::new(move |condition: &Condition| {
            list.lock().unwrap().push(condition.clone());
        }));
        told
    }

    fn all(&self) -> Vec<Condition> {
        self.0.lock().unwrap().clone()
    }
}

/// A store that uses CUDA alone.
fn alone(options: &str) -> Faked {
    let cuda = FakeCuda::build(BatchCopy::Cuda13);
    let mut url = url(options);
    url.target = Target::Index(0);
    let store = VramStore::open_with(&url, &drivers(cuda.path())).expect("a store by CUDA alone");
    Faked { store, cuda }
}

/// Queues and starts writes of `pages` slots, none of which are neighbours, so that each is a copy.
fn start(lane: &mut dyn Lane, pages: u32, seed: u32) {
    for number in 0..pages {
        assert_eq!(lane.write(number, Slot(number * 3), &page(seed + number)), Progress::Queued);
    }
    lane.submit();
}

/// The results of all operations in flight.
fn finish(lane: &mut dyn Lane, pages: u32) -> Vec<Result<(), Fault>> {
    let (mut results, since) = (vec![None; pages as usize], Instant::now());
    while results.contains(&None) {
        lane.poll(Instant::now(), &mut |done: Done<'_>| {
            assert_eq!(results[done.ticket as usize].replace(done.result), None, "twice");
        });
        assert!(since.elapsed() < PATIENCE, "no answer");
    }
    results.into_iter().flatten().collect()
}

#[test]
fn with_the_window_what_was_under_way_is_done_by_it_and_nothing_is_lost() {
    // The codes are illegal address, uncorrectable ECC error, launch failure, unknown. After each
    // the context is gone for good.
    for code in [700, 214, 719, 999] {
        let faked = faked("&path=engine&ring=off", BatchCopy::Cuda13);
        let told = Told::of(&faked.store);
        let (mut ours, mut others) = (lane(&faked), lane(&faked));
        write(others.as_mut(), 900, &page(900)).expect("written");
        start(ours.as_mut(), 32, 100);
        faked.cuda.die(code, false);
        assert_eq!(finish(ours.as_mut(), 32), [Ok(()); 32], "{code}");
        for number in 0..32 {
            assert_eq!(read(ours.as_mut(), number * 3), Ok(page(100 + number)), "{code}");
            assert_eq!(read(others.as_mut(), number * 3), Ok(page(100 + number)), "{code}");
        }
        write(others.as_mut(), 901, &page(901)).expect("written");
        assert_eq!(read(ours.as_mut(), 900), Ok(page(900)));
        assert_eq!(faked.store.state(0), State::Online, "{code}");
        soon("told", || !told.all().is_empty());
        let condition = &told.all()[0];
        let why = condition.why.as_deref().expect("a reason");
        assert!(why.contains(&format!("CUDA error {code}")), "{why}");
        assert_eq!((condition.state, condition.ways.as_slice()), (State::Online, ["mapped"].as_slice()));
        // Memory is released and taken, and a lane is opened and closed, all without the context.
        memory(&faked.store).release(1).expect("released");
        memory(&faked.store).take(1).expect("taken");
        let mut late = faked.store.lane(4).expect("a lane");
        write(late.as_mut(), 256, &page(1)).expect("written");
        assert_eq!(read(others.as_mut(), 256), Ok(page(1)));
        assert_eq!(told.all().len(), 1, "one line a change");
        assert_eq!(report(&faked.store).conditions()[0].why, condition.why);
    }
}

#[test]
fn each_page_of_a_run_that_was_under_way_is_written_and_read_by_the_window() {
    for is_write in [true, false] {
        let faked = faked("&path=engine&ring=off", BatchCopy::Cuda13);
        let mut lane = lane(&faked);
        let [old, new] = [0, 100].map(|seed| (0..16).map(|at| *page(seed + at)).collect::<Vec<_>>());
        for (slot, page) in (0..).zip(&old) {
            write(lane.as_mut(), slot, page).expect("written");
        }
        let taken = if is_write { lane.write_run(7, Slot(0), &new) } else { lane.read_run(7, Slot(0), 16) };
        assert_eq!(taken, 16);
        lane.submit();
        faked.cuda.die(719, false);
        let (mut seen, since) = (0, Instant::now());
        while seen < 16 {
            lane.poll(Instant::now(), &mut |done: Done<'_>| {
                assert_eq!((done.ticket, done.result), (7, Ok(())));
                assert_eq!(done.page, (!is_write).then_some(&old[seen]));
                seen += 1;
            });
            assert!(since.elapsed() < PATIENCE, "no answer");
        }
        assert_eq!(lane.in_flight(), 0);
        let expected = if is_write { &new } else { &old };
        assert!((0..16).all(|slot| *read(lane.as_mut(), slot).expect("read") == expected[slot as usize]));
    }
}

#[test]
fn reads_that_were_under_way_come_back_by_the_window() {
    let faked = faked("&path=engine&ring=off", BatchCopy::Cuda13);
    let mut lane = lane(&faked);
    for number in 0..16 {
        write(lane.as_mut(), number * 3, &page(number)).expect("written");
    }
    let mut nowhere = page(0);
    for number in 0..16 {
        assert_eq!(lane.read(number, Slot(number * 3), &mut nowhere), Progress::Queued);
    }
    lane.submit();
    faked.cuda.die(719, false);
    let (mut seen, since) = (0, Instant::now());
    while seen < 16 {
        lane.poll(Instant::now(), &mut |done: Done<'_>| {
            assert_eq!(done.page, Some(&*page(done.ticket)), "{:?}", done.result);
            seen += 1;
        });
        assert!(since.elapsed() < PATIENCE, "no answer");
    }
}

#[test]
fn under_load_no_page_is_lost_when_the_context_dies() {
    for options in ["&path=engine&ring=off", "&path=ring&ring=on", ""] {
        let faked = faked(options, BatchCopy::Cuda13);
        let (dead, rounds) = (AtomicBool::new(false), AtomicU32::new(0));
        std::thread::scope(|scope| {
            for worker in 0..3u32 {
                let (store, dead, rounds) = (&faked.store, &dead, &rounds);
                scope.spawn(move || {
                    let mut opened = None;
                    soon("open", || {
                        opened = store.lane(16).ok();
                        opened.is_some()
                    });
                    let mut lane = opened.expect("just opened");
                    let (mut round, mut after) = (0, 0);
                    while after < 20 {
                        after += u32::from(dead.load(Ordering::Acquire));
                        round += 1;
                        rounds.fetch_add(1, Ordering::Relaxed);
                        let first = worker * 300;
                        lane.plan(0, 16);
                        let mut waiting = 0;
                        for at in 0..16 {
                            let content = page(round * 1000 + at);
                            match lane.write(at, Slot(first + at * 3), &content) {
                                Progress::Queued => waiting += 1,
                                Progress::Done(result) => result.expect("written"),
                                Progress::Full => panic!("room for sixteen"),
                            }
                        }
                        lane.submit();
                        while waiting > 0 {
                            lane.poll(Instant::now(), &mut |done: Done<'_>| {
                                done.result.expect("written");
                                waiting -= 1;
                            });
                        }
                        for at in 0..16 {
                            let found = read(lane.as_mut(), first + at * 3);
                            assert_eq!(found, Ok(page(round * 1000 + at)), "{options}");
                        }
                    }
                });
            }
            soon("at work", || rounds.load(Ordering::Relaxed) > 30);
            faked.cuda.die(719, false);
            dead.store(true, Ordering::Release);
        });
        assert_eq!(faked.store.state(0), State::Online, "{options}");
        let mut later = faked.store.lane(4).expect("a lane without CUDA");
        write(later.as_mut(), 1000, &page(1000)).expect("written");
        assert_eq!(read(later.as_mut(), 1000), Ok(page(1000)), "{options}");
    }
}

#[test]
fn a_kernel_that_stops_serving_leaves_the_window() {
    let faked = faked("&path=ring&ring=on", BatchCopy::Cuda13);
    let told = Told::of(&faked.store);
    let mut lane = lane(&faked);
    write(lane.as_mut(), 1, &page(1)).expect("written");
    faked.cuda.fail("serve", 0, -1, 1);
    assert_eq!(read(lane.as_mut(), 1), Ok(page(1)));
    assert_eq!(write(lane.as_mut(), 2, &page(2)), Ok(()));
    assert_eq!((faked.store.state(0), read(lane.as_mut(), 2)), (State::Online, Ok(page(2))));
    soon("told", || !told.all().is_empty());
    let why = told.all()[0].why.clone().unwrap_or_default();
    assert!(why.contains("resident kernel") && why.contains("no answer"), "{why}");
}

#[test]
fn a_copy_that_never_ends_is_done_by_the_window() {
    let faked = faked("&path=engine&ring=off", BatchCopy::Cuda13);
    let mut lane = lane(&faked);
    faked.cuda.fail("cuEventQuery", 0, -1, 600);
    assert_eq!(write(lane.as_mut(), 2, &page(2)), Ok(()));
    assert_eq!((faked.store.state(0), read(lane.as_mut(), 2)), (State::Online, Ok(page(2))));
}

#[test]
fn by_cuda_alone_a_dead_context_loses_the_store_and_nothing_hangs() {
    for code in [700, 214, 719, 999] {
        let faked = alone("");
        let told = Told::of(&faked.store);
        let mut lane = faked.store.lane(32).expect("a lane");
        write(lane.as_mut(), 1, &page(1)).expect("written");
        start(lane.as_mut(), 16, 0);
        faked.cuda.die(code, true);
        assert_eq!(finish(lane.as_mut(), 16), [Err(Fault::Lost); 16], "{code}");
        assert_eq!(read(lane.as_mut(), 1), Err(Fault::Lost), "{code}");
        assert_eq!(memory(&faked.store).take(0), Err(Fault::Lost), "{code}");
        assert_eq!(faked.store.state(0), State::Lost, "{code}");
        soon("told", || told.all().iter().any(|it| it.state == State::Lost));
        let why = told.all()[0].why.clone().unwrap_or_default();
        assert!(why.contains(&format!("CUDA error {code}")), "{why}");
        assert!(!told.all()[0].wants_another_process, "nobody keeps its pages");
    }
}

#[test]
fn by_cuda_alone_a_copy_that_never_ends_times_out_and_loses_the_store() {
    let faked = alone("");
    let mut lane = faked.store.lane(4).expect("a lane");
    faked.cuda.fail("cuEventQuery", 0, -1, 600);
    assert_eq!(write(lane.as_mut(), 2, &page(2)), Err(Fault::Timeout));
    assert_eq!(faked.store.state(0), State::Lost);
}

/// How often this thread has slept or waited so far.
fn naps() -> u64 {
    let status = std::fs::read_to_string("/proc/thread-self/status").expect("procfs");
    let line = status.lines().find_map(|line| line.strip_prefix("voluntary_ctxt_switches:"));
    line.and_then(|number| number.trim().parse().ok()).expect("a number")
}

#[test]
fn under_a_keeper_operations_wait_by_the_caller_s_clock_and_the_lane_never_sleeps() {
    const POLLS: u64 = 1000;
    let faked = alone("");
    faked.store.keep_with(Arc::new(Shelf::default()), false).expect("kept");
    let mut lane = faked.store.lane(32).expect("a lane");
    start(lane.as_mut(), 16, 0);
    let now = Instant::now();
    faked.cuda.die(719, true);
    let before = naps();
    for _ in 0..POLLS {
        lane.poll(now, &mut |done: Done<'_>| panic!("{done:?} although another process may come"));
    }
    assert_eq!(lane.write(99, Slot(99), &page(99)), Progress::Full);
    let naps = naps() - before;
    assert!(naps < POLLS / 2, "{naps} naps in {POLLS} polls");
    assert_eq!((lane.in_flight(), lane.wake_fd().is_none()), (16, true), "so its owner polls, with pauses");
    let mut lost = 0;
    lane.poll(now + 2 * PATIENCE, &mut |done: Done<'_>| {
        assert_eq!(done.result, Err(Fault::Lost));
        lost += 1;
    });
    assert_eq!((lost, faked.store.state(0)), (16, State::Lost));
}

#[test]
fn of_two_cards_the_one_that_dies_is_lost_and_the_other_goes_on() {
    let cuda = FakeCuda::build(BatchCopy::Cuda13);
    let mut url = url("");
    url.target = Target::All;
    let store = VramStore::open_with(&url, &drivers(cuda.path())).expect("two fake GPUs");
    let on = |member| (0..store.slots()).find(|&slot| store.member(Slot(slot)) == member).expect("a slot");
    let (first, second) = (on(0), on(1));
    let mut lane = store.lane(4).expect("a lane");
    for slot in [first, second] {
        write(lane.as_mut(), slot, &page(slot)).expect("written");
    }
    cuda.fail("cuEventQuery", 0, 1, 719);
    assert_eq!(write(lane.as_mut(), second, &page(7)), Err(Fault::Lost));
    assert_eq!((store.state(0), store.state(1)), (State::Online, State::Lost));
    assert_eq!(read(lane.as_mut(), first), Ok(page(first)));
    assert_eq!(write(lane.as_mut(), first, &page(8)), Ok(()));
    assert_eq!(read(lane.as_mut(), second), Err(Fault::Lost));
    // A lane that is opened later works too.
    let mut lane = store.lane(4).expect("a lane");
    assert_eq!(read(lane.as_mut(), first), Ok(page(8)));
    assert_eq!(read(lane.as_mut(), second), Err(Fault::Lost));
}
