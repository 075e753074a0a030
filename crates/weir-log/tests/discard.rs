//! Pages that nobody needs until they are written again.

use std::sync::Arc;
use std::time::Instant;
use weir_core::{PAGE_SIZE, Slot};
use weir_log::{Config, Log};
use weir_store::{Host, Lane, Progress, Store};

const DONE: Progress = Progress::Done(Ok(()));
const SEGMENT: u32 = 8;
/// Number of pages that a segment holds.
const PLACES: u32 = SEGMENT - 1;

fn config() -> Config {
    Config { segment_pages: SEGMENT, lanes: 1, ..Config::default() }
}

fn read(lane: &mut dyn Lane, page: u32) -> u8 {
    let mut bytes = [9; PAGE_SIZE];
    assert_eq!(lane.read(0, Slot(page), &mut bytes), DONE);
    assert_eq!(bytes, [bytes[0]; PAGE_SIZE]);
    bytes[0]
}

#[test]
fn a_segment_whose_pages_were_discarded_is_free_and_the_pages_are_zeros_until_they_are_written() {
    let log = Log::create(Arc::new(Host::new(200 * SEGMENT).unwrap()), config()).unwrap();
    let mut lane = log.lane(4).unwrap();
    let free = log.status().free;
    for page in 0..2 * PLACES {
        assert_eq!(lane.write(0, Slot(page), &[1; PAGE_SIZE]), DONE);
    }
    assert_eq!(log.status().free, free - 2);
    (0..PLACES + 1).for_each(|page| lane.discard(Slot(page)));
    let status = log.status();
    assert_eq!((status.free, status.live), (free - 1, u64::from(PLACES) - 1));
    assert_eq!((read(&mut *lane, 0), read(&mut *lane, PLACES + 1)), (0, 1));
    // Of a page that has no content, and of one that does not exist, nothing is discarded.
    [0, u32::MAX].into_iter().for_each(|page| lane.discard(Slot(page)));
    assert_eq!(lane.write(0, Slot(0), &[2; PAGE_SIZE]), DONE);
    assert_eq!((read(&mut *lane, 0), log.status().live), (2, u64::from(PLACES)));
}

#[test]
fn a_durable_log_keeps_what_is_discarded_because_it_may_have_been_flushed() {
    let below = Arc::new(Host::new(400 * SEGMENT).unwrap()) as Arc<dyn Store>;
    Log::make(&below, config(), 7, &mut Instant::now).unwrap();
    let log = Log::open(&below, config(), &mut Instant::now, &mut weir_core::unwatched).unwrap();
    let mut lane = log.lane(4).unwrap();
    assert_eq!(lane.write(0, Slot(3), &[1; PAGE_SIZE]), DONE);
    lane.discard(Slot(3));
    assert_eq!((read(&mut *lane, 3), log.status().live), (1, 1));
}
