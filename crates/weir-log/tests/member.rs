//! A member of the stripe below a log dies. Pages on it fail, all others do not, and new writes go
//! to the other members.

use std::sync::Arc;
use std::time::Instant;
use weir_core::{ByteSize, PAGE_SIZE, Slot};
use weir_log::{Cleaner, Config, Log};
use weir_store::{Lane, Progress, Sim, SimUrl, Store, Stripe};

const SEGMENT: u32 = 8;
const PAGES: u32 = 300;

fn write(lane: &mut dyn Lane, cleaner: &mut Cleaner, page: u32, value: u8) -> bool {
    let now = Instant::now();
    for _ in 0..1000 {
        match lane.write(0, Slot(page), &[value; PAGE_SIZE]) {
            Progress::Done(result) => return result.is_ok(),
            Progress::Queued => panic!("it is done at once"),
            Progress::Full => {}
        }
        lane.poll(now, &mut |done| panic!("{done:?}"));
        cleaner.step(now);
    }
    panic!("no room for page {page}");
}

/// The pages that cannot be read; all others must hold `value`.
fn unreadable(lane: &mut dyn Lane, value: u8) -> Vec<u32> {
    let mut page = [0; PAGE_SIZE];
    let mut read = |slot: u32| match lane.read(0, Slot(slot), &mut page) {
        Progress::Done(Ok(())) => {
            assert!(page.iter().all(|byte| *byte == value), "page {slot}");
            true
        }
        progress => {
            assert!(matches!(progress, Progress::Done(Err(_))), "{progress:?}");
            false
        }
    };
    (0..PAGES).filter(|slot| !read(*slot)).collect()
}

#[test]
fn a_dead_member_fails_what_lies_on_it_and_new_pages_go_to_the_others() {
    let size = ByteSize(u64::from(SEGMENT * 40) * PAGE_SIZE as u64);
    let chunk = Some(ByteSize(u64::from(SEGMENT) * PAGE_SIZE as u64));
    let member = |_| Sim::open(SimUrl { size, chunk, ..SimUrl::default() }).unwrap();
    let stripe = Arc::new(Stripe::by_speed("three".into(), (0..3).map(member).collect(), &[1.0; 3]));
    // Every summary is in memory. Otherwise a read could also fail because of the member with the
    // page's summary.
    let config = Config { pages: PAGES, segment_pages: SEGMENT, members: 3, lanes: 1, summaries: u32::MAX };
    let log = Log::create(Arc::clone(&stripe) as _, config).unwrap();
    let (mut lane, mut cleaner) = (log.lane(4).unwrap(), Cleaner::open(&log).unwrap());
    for page in 0..PAGES {
        assert!(write(&mut *lane, &mut cleaner, page, 1));
    }
    assert_eq!(unreadable(&mut *lane, 1), []);
    stripe.parts()[1].kill();
    let lost = unreadable(&mut *lane, 1).len() as u32;
    assert!((PAGES / 4..PAGES / 2).contains(&lost), "a third of {PAGES}: {lost}");
    let mut failures = 0;
    for page in 0..PAGES {
        while !write(&mut *lane, &mut cleaner, page, 2) {
            failures += 1;
            assert!(failures < 10, "it is passed over");
        }
    }
    assert_eq!(unreadable(&mut *lane, 2), []);
    let status = log.status();
    assert!(failures > 0 && status.member_errors[1] > 0, "{status:?}");
    assert_eq!((status.member_errors[0], status.member_errors[2]), (0, 0));
}

/// Writes fail at random, so the cleaner may be left without a segment for pages that it has read.
/// Then a write fails with an error: no write waits for ever.
#[test]
fn no_write_waits_for_ever_for_a_cleaner_whose_disk_fails() {
    let mut full = 0;
    for seed in 0..60 {
        let size = ByteSize(u64::from(SEGMENT * 30) * PAGE_SIZE as u64);
        let store = Sim::open(SimUrl { seed, size, write_error: 0.6, ..SimUrl::default() }).unwrap();
        let config = Config { pages: 0, segment_pages: SEGMENT, members: 1, lanes: 1, summaries: u32::MAX };
        let log = Log::create(Arc::new(store), config).unwrap();
        let (mut lane, mut cleaner) = (log.lane(4).unwrap(), Cleaner::open(&log).unwrap());
        let pages = log.status().pages;
        for turn in 0..3_000_u32 {
            let page = turn.wrapping_mul(2_654_435_761).rotate_left(9) % pages;
            full += u32::from(!write(&mut *lane, &mut cleaner, page, turn as u8));
        }
    }
    assert!(full > 0, "some writes fail");
}
