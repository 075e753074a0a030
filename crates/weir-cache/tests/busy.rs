//! What an operation does whose page somebody else has alone.

use std::sync::Arc;
use std::time::{Duration, Instant};
use weir_cache::{Cache, Config};
use weir_core::{ByteSize, PAGE_SIZE, PageNo};
use weir_device::{Fault, PageDevice, PageLane, Progress};
use weir_store::{Host, Sim, SimUrl};

#[test]
fn the_time_of_a_busy_page_begins_when_it_is_asked_for_however_long_the_lane_was_idle() {
    let home = SimUrl { size: ByteSize(1 << 20), delay: 1, ..SimUrl::default() };
    let home = Arc::new(Sim::open(home).unwrap());
    let cache = Cache::create(Arc::new(Host::new(2048).unwrap()), home, Config::default()).unwrap();
    let (mut first, mut second) = (cache.open().unwrap(), cache.open().unwrap());
    let (begun, mut out) = (Instant::now(), [0; PAGE_SIZE]);
    let at = |seconds| begun + Duration::from_secs(seconds);
    second.poll(at(0), &mut |done| panic!("{done:?}"));
    // It is never polled, and so has the page alone.
    assert_eq!(first.read(1, PageNo(7), &mut out), Progress::Queued);
    assert_eq!(second.read(2, PageNo(7), &mut out), Progress::Full);
    second.poll(at(1), &mut |done| panic!("{done:?}"));
    // Nobody asks again before the next poll, so that was given up.
    second.poll(at(2), &mut |done| panic!("{done:?}"));
    assert_eq!(second.read(2, PageNo(7), &mut out), Progress::Full);
    for seconds in [10, 11, 69] {
        second.poll(at(seconds), &mut |done| panic!("{done:?}"));
        assert_eq!(second.read(2, PageNo(7), &mut out), Progress::Full, "after {seconds} s");
    }
    second.poll(at(70), &mut |done| panic!("{done:?}"));
    assert_eq!(second.read(2, PageNo(7), &mut out), Progress::Done(Err(Fault::Timeout)));
}
