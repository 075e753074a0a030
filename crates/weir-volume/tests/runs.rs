//! Runs: pages that follow one another and lie side by side in a slow store are one operation.

use std::sync::Arc;
use std::time::Instant;
use weir_core::{ByteSize, PAGE_SIZE, PageBytes, PageNo};
use weir_store::{Fault, Progress, Sim, SimUrl};
use weir_volume::{Config, Lane, Volume};

const CONFIG: Config = Config { pages: 200, lanes: 2, depth: 32 };

fn volume(url: &SimUrl) -> (Arc<Volume>, Arc<Sim>) {
    let size = ByteSize(u64::from(2 * CONFIG.slots()) * PAGE_SIZE as u64);
    let sim = Arc::new(Sim::open(SimUrl { size, ..url.clone() }).unwrap());
    (Volume::create(CONFIG, vec![Arc::clone(&sim) as _]).unwrap(), sim)
}

fn slow() -> SimUrl {
    SimUrl { delay: 2, ..SimUrl::default() }
}

fn stamped(page: u32, generation: u32) -> PageBytes {
    let mut bytes = [0; PAGE_SIZE];
    for (at, chunk) in bytes.chunks_exact_mut(16).enumerate() {
        for (word, value) in chunk.chunks_exact_mut(4).zip([page, generation, at as u32, !page]) {
            word.copy_from_slice(&value.to_le_bytes());
        }
    }
    bytes
}

fn content(first: u32, count: u32, generation: u32) -> Vec<PageBytes> {
    (first..first + count).map(|page| stamped(page, generation)).collect()
}

/// Waits until everything is done; returns tickets and results.
fn finish(lane: &mut Lane) -> Vec<(u32, Result<(), Fault>)> {
    let mut ended = Vec::new();
    while lane.in_flight() > 0 {
        lane.submit();
        lane.poll(Instant::now(), &mut |done| ended.push((done.ticket, done.result)));
    }
    lane.submit();
    ended
}

/// Writes as a front end does: runs where the volume takes them, else page by page. Returns the
/// number of operations, and the first fault.
fn write(lane: &mut Lane, first: u32, pages: &[PageBytes]) -> (usize, Option<Fault>) {
    let (mut operations, mut fault) = (0, None);
    let mut done = lane.write_run(PageNo(first), pages);
    while done < pages.len() {
        operations += 1;
        let page = PageNo(first + done as u32);
        let queued = lane.queue_writes(operations, page, &pages[done..]);
        if queued > 0 {
            done += queued;
            continue;
        }
        match lane.write(operations, page, &pages[done]) {
            Progress::Full => {
                let ended = finish(lane);
                fault = fault.or(ended.iter().find_map(|(_, result)| result.err()));
                operations -= 1;
            }
            Progress::Done(result) => (fault, done) = (fault.or(result.err()), done + 1),
            Progress::Queued => done += 1,
        }
    }
    let ended = finish(lane);
    (operations as usize, fault.or(ended.iter().find_map(|(_, result)| result.err())))
}

const UNREAD: Result<PageBytes, Fault> = Err(Fault::Unsupported);

/// Takes the pages of every read under way, by ticket.
fn take(lane: &mut Lane, pages: &mut [Result<PageBytes, Fault>]) {
    lane.submit();
    while lane.in_flight() > 0 {
        lane.poll(Instant::now(), &mut |done| {
            let page = &mut pages[done.ticket as usize];
            assert!(*page == UNREAD, "page {} came twice", done.ticket);
            *page = done.result.map(|()| *done.page.expect("a read's content"));
        });
    }
}

/// Reads as a front end does: runs where possible, else page by page.
fn read(lane: &mut Lane, first: u32, count: u32) -> (usize, Vec<Result<PageBytes, Fault>>) {
    let mut pages = vec![UNREAD; count as usize];
    let (mut operations, mut at) = (0, 0);
    while at < count {
        let page = PageNo(first + at);
        let queued = lane.queue_reads(at, page, (count - at) as usize) as u32;
        let mut out = [0; PAGE_SIZE];
        let done = if queued > 0 { Progress::Queued } else { lane.read(at, page, &mut out) };
        match done {
            Progress::Full => {
                take(lane, &mut pages);
                continue;
            }
            Progress::Done(result) => pages[at as usize] = result.map(|()| out),
            Progress::Queued => {}
        }
        operations += 1;
        at += queued.max(1);
        if at == count {
            take(lane, &mut pages);
        }
    }
    lane.submit();
    (operations, pages)
}

#[test]
fn pages_side_by_side_are_one_operation_each_way() {
    let (volume, _) = volume(&slow());
    let mut lane = volume.lane().unwrap();
    let pages = content(10, 32, 1);
    assert_eq!(lane.write_run(PageNo(10), &pages), 0);
    assert_eq!(lane.queue_writes(7, PageNo(10), &pages), 32);
    assert_eq!(lane.in_flight(), 1);
    assert_eq!(
        lane.queue_writes(8, PageNo(10), &pages),
        0,
        "as many pages as the lane's depth are under way"
    );
    assert_eq!(lane.write(9, PageNo(10), &pages[0]), Progress::Full);
    assert_eq!(finish(&mut lane), [(7, Ok(()))]);
    assert_eq!(lane.queue_reads(100, PageNo(10), 40), 32, "what follows was never written");
    assert_eq!(lane.in_flight(), 1);
    let expected: Vec<_> = (100..132).map(|ticket| (ticket, Ok(()))).collect();
    assert_eq!(finish(&mut lane), expected);
    let status = volume.status();
    assert_eq!((status.stored, status.stores[0].used), (32, 32));
    assert_eq!((status.stores[0].reads, status.stores[0].writes), (32, 32));
    assert!(read(&mut lane, 10, 32).1.into_iter().eq(pages.into_iter().map(Ok)));
}

#[test]
fn a_run_that_is_forsaken_takes_no_effect_after_a_newer_write_was_acknowledged() {
    let (volume, _) = volume(&slow());
    let (mut gone, mut other) = (volume.lane().unwrap(), volume.lane().unwrap());
    assert_eq!(write(&mut other, 0, &content(0, 16, 1)), (1, None));
    let pages = content(0, 16, 2);
    assert_eq!(gone.write_run(PageNo(0), &pages), 0);
    assert_eq!(gone.queue_writes(5, PageNo(0), &pages), 16);
    gone.submit();
    gone.forsake(|ticket| ticket == 5);
    assert_eq!(write(&mut other, 0, &content(0, 16, 3)).1, None);
    assert_eq!(finish(&mut gone), [(5, Err(Fault::Forsaken))]);
    assert!(read(&mut other, 0, 16).1.into_iter().eq(content(0, 16, 3).into_iter().map(Ok)));
    let status = volume.status();
    assert_eq!((status.stores[0].used, status.write_faults), (16, 0), "what was forsaken has no slot");
}

#[test]
fn of_a_run_the_page_that_was_damaged_fails_alone() {
    let (volume, _) = volume(&SimUrl { lost_slot: Some(9), ..slow() });
    let mut lane = volume.lane().unwrap();
    assert_eq!(write(&mut lane, 0, &content(0, 32, 1)), (1, None));
    let (operations, pages) = read(&mut lane, 0, 32);
    assert_eq!(operations, 1);
    let failed: Vec<_> = (0..32).filter(|at| pages[*at].is_err()).collect();
    assert_eq!(failed, [9]);
    assert_eq!(pages[9], Err(Fault::Corrupt));
    assert!((0..32).all(|at| at == 9 || pages[at] == Ok(stamped(at as u32, 1))));
    assert_eq!((volume.status().read_faults, volume.status().corrupt), (1, 1));
}

#[test]
fn a_run_of_which_a_page_cannot_be_written_changes_nothing_and_keeps_no_slot() {
    let (volume, sim) = volume(&SimUrl { write_error: 0.03, seed: 3, ..slow() });
    let mut lane = volume.lane().unwrap();
    let (mut expected, mut failures) = (None, 0);
    for generation in 1..60 {
        let (operations, fault) = write(&mut lane, 40, &content(40, 16, generation));
        assert_eq!(operations, 1);
        match fault {
            None => expected = Some(generation),
            Some(fault) => (_, failures) = (assert_eq!(fault, Fault::Io(5)), failures + 1),
        }
        let used = volume.status().stores[0].used;
        match expected {
            None => assert_eq!(used, 0),
            Some(expected) => {
                assert_eq!(used, 16);
                let found = read(&mut lane, 40, 16).1;
                assert!(found.into_iter().eq(content(40, 16, expected).into_iter().map(Ok)));
            }
        }
    }
    assert!((10..50).contains(&failures), "{failures}");
    assert!(sim.injected().write_errors >= failures);
}

#[test]
fn slots_of_a_run_that_was_not_answered_in_time_are_used_again_only_once_it_has_ended() {
    let (volume, sim) = volume(&slow());
    let mut lane = volume.lane().unwrap();
    assert_eq!(write(&mut lane, 0, &content(0, 16, 1)), (1, None));
    sim.hang(true);
    assert_eq!(write(&mut lane, 0, &content(0, 16, 2)), (1, Some(Fault::Timeout)));
    assert_eq!(volume.status().stores[0].used, 32, "they may still land");
    sim.hang(false);
    assert_eq!(write(&mut lane, 100, &content(100, 16, 3)), (1, None));
    lane.submit();
    assert_eq!(volume.status().stores[0].used, 32, "16 and 16");
    assert!(read(&mut lane, 0, 16).1.into_iter().eq(content(0, 16, 1).into_iter().map(Ok)));
    assert!(read(&mut lane, 100, 16).1.into_iter().eq(content(100, 16, 3).into_iter().map(Ok)));
}

/// A random number generator: SplitMix64.
struct Random(u64);

impl Random {
    fn below(&mut self, limit: u32) -> u32 {
        self.0 = self.0.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let z = (self.0 ^ (self.0 >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        let z = (z ^ (z >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        ((z ^ (z >> 31)) % u64::from(limit)) as u32
    }
}

#[test]
fn runs_and_single_pages_in_any_order_agree_with_an_array_of_pages() {
    let (mut runs, mut pages) = (0, 0);
    for seed in 0..20 {
        let (volume, _) = volume(&SimUrl { seed, delay: 5, ..SimUrl::default() });
        let mut lanes = [volume.lane().unwrap(), volume.lane().unwrap()];
        let (mut random, mut model) = (Random(seed), vec![[0; PAGE_SIZE]; CONFIG.pages as usize]);
        for generation in 1..300 {
            let lane = &mut lanes[random.below(2) as usize];
            let first = random.below(CONFIG.pages);
            let longest = [1, 20, 100][random.below(3) as usize];
            let count = (1 + random.below(longest)).min(CONFIG.pages - first);
            let range = first as usize..(first + count) as usize;
            match random.below(5) {
                0 | 1 => {
                    let mut written = content(first, count, generation);
                    if random.below(2) == 0 {
                        written[random.below(count) as usize] = [generation as u8; PAGE_SIZE];
                    }
                    assert_eq!(write(lane, first, &written).1, None);
                    model[range].copy_from_slice(&written);
                }
                2 => {
                    lane.discard(PageNo(first), count);
                    lane.submit();
                    model[range].fill([0; PAGE_SIZE]);
                }
                _ => {
                    let (operations, found) = read(lane, first, count);
                    (runs, pages) = (runs + operations, pages + count as usize);
                    let expected = model[range].iter().map(|page| Ok(*page));
                    assert!(found.into_iter().eq(expected), "seed {seed}, generation {generation}");
                }
            }
        }
        let stored = model.iter().filter(|page| page.iter().any(|byte| *byte != page[0])).count() as u64;
        assert_eq!(volume.status().stored, stored);
        assert_eq!(u64::from(volume.status().stores[0].used), stored);
    }
    assert!(runs * 3 < pages * 2, "{runs} operations for {pages} pages");
}
