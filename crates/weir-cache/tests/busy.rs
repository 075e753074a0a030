//! Operations on a page that another user has alone, or shares.

use std::sync::Arc;
use std::time::{Duration, Instant};
use weir_cache::{Cache, CacheLane, Config, Mode, Next, WriteBack};
use weir_core::{ByteSize, PAGE_SIZE, PageNo, Slot};
use weir_device::{Fault, PageDevice, PageLane, Progress};
use weir_store::{Host, Sim, SimUrl, Store as _};

#[test]
fn the_time_of_a_busy_page_begins_when_it_is_asked_for_however_long_the_lane_was_idle() {
    let home = SimUrl { size: ByteSize(1 << 20), delay: 1, ..SimUrl::default() };
    let home = Arc::new(Sim::open(home).unwrap());
    let cache = Cache::create(Arc::new(Host::new(2048).unwrap()), home, Config::default()).unwrap();
    let (mut first, mut second) = (cache.open().unwrap(), cache.open().unwrap());
    let (begun, mut out) = (Instant::now(), [0; PAGE_SIZE]);
    let at = |seconds| begun + Duration::from_secs(seconds);
    second.poll(at(0), &mut |done| panic!("{done:?}"));
    // The first lane is never polled, and so has the page alone.
    assert_eq!(first.read(1, PageNo(7), &mut out), Progress::Queued);
    assert_eq!(second.read(2, PageNo(7), &mut out), Progress::Full);
    second.poll(at(1), &mut |done| panic!("{done:?}"));
    // The operation is not asked for again before the next poll, so it counts as given up.
    second.poll(at(2), &mut |done| panic!("{done:?}"));
    assert_eq!(second.read(2, PageNo(7), &mut out), Progress::Full);
    for seconds in [10, 11, 69] {
        second.poll(at(seconds), &mut |done| panic!("{done:?}"));
        assert_eq!(second.read(2, PageNo(7), &mut out), Progress::Full, "after {seconds} s");
    }
    second.poll(at(70), &mut |done| panic!("{done:?}"));
    assert_eq!(second.read(2, PageNo(7), &mut out), Progress::Done(Err(Fault::Timeout)));
}

#[test]
fn a_clean_page_that_cannot_be_read_in_the_cache_is_read_at_its_home_by_all_who_share_it() {
    // The content repeats no value: the volume would store that in its map.
    let content = std::array::from_fn(|at| (at / 64) as u8);
    for delay in [0, 1] {
        let sim = |url| Arc::new(Sim::open(url).unwrap());
        let home = sim(SimUrl { size: ByteSize(1 << 20), ..SimUrl::default() });
        let frames = sim(SimUrl { size: ByteSize(8 << 20), read_error: 1.0, delay, ..SimUrl::default() });
        let mut below = home.lane(1).unwrap();
        assert_eq!(below.write(0, Slot(7), &content), Progress::Done(Ok(())));
        let cache = Cache::create(frames, home, Config::default()).unwrap();
        let mut lanes = [cache.open().unwrap(), cache.open().unwrap()];
        let now = Instant::now();
        let until_done = |lanes: &mut [CacheLane], reads: usize| {
            let mut answers = 0;
            for _ in 0..100 {
                for lane in lanes.iter_mut() {
                    lane.poll(now, &mut |done| {
                        assert_eq!(done.result, Ok(()), "with a delay of {delay}");
                        assert!(done.page == Some(&content), "what the home has");
                        answers += 1;
                    });
                }
            }
            assert_eq!(answers, reads);
        };
        let mut out = [0; PAGE_SIZE];
        let first = lanes[0].read(0, PageNo(7), &mut out);
        until_done(&mut lanes, usize::from(first == Progress::Queued));
        // Now the page is cached. Both share its frame before either finds that it cannot be read.
        let mut queued = 0;
        for lane in &mut lanes {
            lane.submit();
            match lane.read(1, PageNo(7), &mut out) {
                Progress::Queued => queued += 1,
                progress => {
                    assert_eq!(progress, Progress::Done(Ok(())));
                    assert!(out == content, "what the home has");
                }
            }
        }
        assert!(delay == 0 || queued == 2);
        until_done(&mut lanes, queued);
    }
}

/// A cache of a slow home. Its page 7 is dirty with 1, and `writer` has it alone to write 2.
fn page_held_by_a_writer() -> (Arc<Cache>, CacheLane, CacheLane) {
    let home = SimUrl { size: ByteSize(1 << 20), delay: 1, ..SimUrl::default() };
    let home = Arc::new(Sim::open(home).unwrap());
    let cache = Cache::create(Arc::new(Host::new(2048).unwrap()), home, Config::default()).unwrap();
    let (mut reader, mut writer) = (cache.open().unwrap(), cache.open().unwrap());
    assert_eq!(reader.write(1, PageNo(7), &[1; PAGE_SIZE]), Progress::Done(Ok(())));
    cache.set_mode(Mode::WriteThrough);
    assert_eq!(writer.write(2, PageNo(7), &[2; PAGE_SIZE]), Progress::Queued);
    assert_eq!(reader.read(3, PageNo(7), &mut [0; PAGE_SIZE]), Progress::Full);
    (cache, reader, writer)
}

#[test]
fn a_flush_waits_for_a_page_that_somebody_has_alone_and_does_not_spin() {
    let (cache, mut reader, mut writer) = page_held_by_a_writer();
    let mut write_back = WriteBack::open(&cache).unwrap();
    let now = Instant::now();
    assert_eq!(reader.flush(4), Progress::Queued);
    for _ in 0..3 {
        let steps = (0..100).find(|_| write_back.step(now) == Next::Answers);
        assert!(steps.is_some(), "it asks to be called again at once, a hundred times");
    }
    let mut answers = Vec::new();
    for _ in 0..100 {
        write_back.step(now);
        for lane in [&mut reader, &mut writer] {
            lane.poll(now, &mut |done| answers.push((done.ticket, done.result)));
        }
    }
    assert_eq!(answers, [(2, Ok(())), (4, Ok(()))]);
}

#[test]
fn a_page_that_a_dropped_lane_was_writing_home_is_served_on_and_fails_flushes() {
    let (cache, mut reader, writer) = page_held_by_a_writer();
    drop(writer);
    let mut out = [0; PAGE_SIZE];
    assert_eq!(reader.read(3, PageNo(7), &mut out), Progress::Done(Ok(())));
    assert!([[1; PAGE_SIZE], [2; PAGE_SIZE]].contains(&out), "what was acknowledged, or newer");
    assert_eq!(reader.flush(4), Progress::Queued);
    let mut write_back = WriteBack::open(&cache).unwrap();
    let (now, mut answer) = (Instant::now(), None);
    for _ in 0..100 {
        write_back.step(now);
        reader.poll(now, &mut |done| answer = Some(done.result));
    }
    assert!(matches!(answer, Some(Err(_))), "the home may have either: {answer:?}");
}
