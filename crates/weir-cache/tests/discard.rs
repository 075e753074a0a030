//! A log that is not durable drops its copy of a page once the cache has a newer one, and not
//! before.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering::SeqCst};
use std::time::Instant;
use weir_cache::{Cache, CacheLane, Config, WriteBack};
use weir_core::{PAGE_SIZE, PageBytes, PageNo, Slot};
use weir_device::{Fault, PageDevice as _, PageLane as _, Progress, Ticket};
use weir_log::Log;
use weir_store::{Host, Lane, OpenError, State, Store};

/// A store in memory whose writes fail while a flag is set.
#[derive(Debug)]
struct Failing {
    host: Host,
    fails: Arc<AtomicBool>,
}

impl Store for Failing {
    fn name(&self) -> &str {
        "failing"
    }

    fn slots(&self) -> u32 {
        self.host.slots()
    }

    fn lane(&self, depth: usize) -> Result<Box<dyn Lane>, OpenError> {
        Ok(Box::new(FailingLane { host: self.host.lane(depth)?, fails: Arc::clone(&self.fails) }))
    }

    fn state(&self, _member: u32) -> State {
        State::Online
    }

    fn unfit_for_swap(&self) -> Option<String> {
        None
    }
}

struct FailingLane {
    host: Box<dyn Lane>,
    fails: Arc<AtomicBool>,
}

impl Lane for FailingLane {
    fn write(&mut self, ticket: Ticket, slot: Slot, page: &PageBytes) -> Progress {
        if self.fails.load(SeqCst) {
            return Progress::Done(Err(Fault::Io(5)));
        }
        self.host.write(ticket, slot, page)
    }

    fn read(&mut self, ticket: Ticket, slot: Slot, page: &mut PageBytes) -> Progress {
        self.host.read(ticket, slot, page)
    }
}

/// A page that is not one byte over and over, since a volume keeps such a page without a slot.
fn content(value: u8) -> PageBytes {
    std::array::from_fn(|at| value.wrapping_add((at / 8) as u8))
}

fn write(lane: &mut CacheLane, page: u32, value: u8) -> Result<(), Fault> {
    let Progress::Done(result) = lane.write(0, PageNo(page), &content(value)) else {
        panic!("memory answers at once");
    };
    result
}

#[test]
fn the_log_drops_a_page_that_is_newer_in_the_cache_and_none_whose_write_has_failed() {
    let config = weir_log::Config { segment_pages: 16, ..weir_log::Config::default() };
    let log = Log::create(Arc::new(Host::new(4096).unwrap()), config).unwrap();
    let mut home = log.lane(4).unwrap();
    let fails = Arc::new(AtomicBool::new(false));
    let store = Failing { host: Host::new(1024).unwrap(), fails: Arc::clone(&fails) };
    let cache = Cache::create(Arc::new(store), Arc::new(log.clone()), Config::default()).unwrap();
    let (mut lane, mut write_back) = (cache.open().unwrap(), WriteBack::open(&cache).unwrap());
    let mut flush = |lane: &mut CacheLane| {
        assert_eq!(lane.flush(1), Progress::Queued);
        let mut answer = None;
        while answer.is_none() {
            let _ = write_back.step(Instant::now());
            lane.poll(Instant::now(), &mut |done| answer = Some(done.result));
        }
        assert_eq!(answer, Some(Ok(())));
    };
    let mut live = |pages: u64, value: u8| {
        assert_eq!(log.status().live, pages);
        for page in [3, 4].into_iter().take(pages as usize) {
            let mut found = [0; PAGE_SIZE];
            assert_eq!(home.read(0, Slot(page), &mut found), Progress::Done(Ok(())));
            assert_eq!(found, content(value));
        }
    };
    // Page 3 is in the cache and in the log. Page 4 is in the log only.
    write(&mut lane, 3, 1).unwrap();
    flush(&mut lane);
    let mut other = log.lane(1).unwrap();
    assert_eq!(other.write(0, Slot(4), &content(1)), Progress::Done(Ok(())));
    live(2, 1);
    fails.store(true, SeqCst);
    assert!(write(&mut lane, 3, 2).is_err() && write(&mut lane, 4, 2).is_err());
    live(2, 1);
    fails.store(false, SeqCst);
    write(&mut lane, 4, 3).unwrap();
    live(1, 1);
    write(&mut lane, 3, 3).unwrap();
    live(0, 3);
    flush(&mut lane);
    live(2, 3);
}
