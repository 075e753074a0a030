//! Real threads on one log: each page is what its thread wrote last, whatever the cleaner moves
//! meanwhile.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Instant;
use weir_core::{PAGE_SIZE, Slot};
use weir_log::{Cleaner, Config, Log};
use weir_store::{Host, Lane, Progress, Store};

const THREADS: u32 = 3;
const PAGES: u32 = 1200;
const ROUNDS: u32 = 30_000;

#[test]
fn pages_that_threads_write_are_theirs_while_the_cleaner_moves_them() {
    let below = Arc::new(Host::new(16 * 140).unwrap());
    let config = Config { pages: PAGES, segment_pages: 16, members: 2, lanes: THREADS, summaries: 1 };
    let log = Log::create(below, config).unwrap();
    let is_over = AtomicBool::new(false);
    std::thread::scope(|scope| {
        let mut cleaner = Cleaner::open(&log).unwrap();
        let is_over = &is_over;
        scope.spawn(move || {
            while !is_over.load(Ordering::SeqCst) {
                cleaner.step(Instant::now());
            }
        });
        let writers: Vec<_> = (0..THREADS)
            .map(|thread| {
                let lane = log.lane(4).unwrap();
                scope.spawn(move || work(lane, thread))
            })
            .collect();
        let results: Vec<_> = writers.into_iter().map(|writer| writer.join()).collect();
        is_over.store(true, Ordering::SeqCst);
        results.into_iter().for_each(|result| result.unwrap());
    });
    let status = log.status();
    assert!(status.cleaned > 1000 && status.corrupt == 0, "{status:?}");
    assert_eq!(status.live, PAGES.into());
}

/// Writes and reads the pages whose number divided by the number of threads leaves `thread`.
fn work(mut lane: Box<dyn Lane>, thread: u32) {
    let mut values = vec![0u8; (PAGES / THREADS) as usize];
    let mut chance = thread + 1;
    let mut page = [0; PAGE_SIZE];
    for round in 0..ROUNDS + PAGES / THREADS {
        chance = chance.wrapping_mul(1_664_525).wrapping_add(1_013_904_223);
        // At the end, read each page once.
        let at = if round < ROUNDS { (chance >> 16) % (PAGES / THREADS) } else { round - ROUNDS };
        let slot = Slot(at * THREADS + thread);
        let value = &mut values[at as usize];
        if chance & 0x100 == 0 || round >= ROUNDS {
            *value = value.wrapping_add(1).max(1);
            while lane.write(0, slot, &[*value; PAGE_SIZE]) != Progress::Done(Ok(())) {
                lane.poll(Instant::now(), &mut |done| panic!("{done:?}"));
                std::thread::yield_now();
            }
        }
        read(&mut *lane, slot, &mut page);
        assert!(page.iter().all(|byte| byte == value), "{slot:?} is not {value}");
    }
}

fn read(lane: &mut dyn Lane, slot: Slot, page: &mut [u8; PAGE_SIZE]) {
    match lane.read(0, slot, page) {
        Progress::Done(result) => assert_eq!(result, Ok(()), "{slot:?}"),
        Progress::Queued => {
            let mut found = None;
            while found.is_none() {
                lane.poll(Instant::now(), &mut |done| {
                    found = Some(done.result.map(|()| *page = *done.page.expect("a read brings a page")));
                });
            }
            assert_eq!(found, Some(Ok(())), "{slot:?}");
        }
        Progress::Full => panic!("nothing is under way"),
    }
}
