//! Each store is told its own part of a batch that is announced.

use std::sync::{Arc, Mutex};
use weir_core::{PAGE_SIZE, PageBytes, PageNo, Slot};
use weir_store::{Host, Lane, OpenError, Progress, State, Store, Ticket};
use weir_volume::{Config, Volume};

/// Host memory that notes the announcements to it.
#[derive(Debug)]
struct Noting(Host, Arc<Mutex<Vec<(usize, usize)>>>);

struct NotingLane(Box<dyn Lane>, Arc<Mutex<Vec<(usize, usize)>>>);

impl Store for Noting {
    fn name(&self) -> &str {
        self.0.name()
    }

    fn slots(&self) -> u32 {
        self.0.slots()
    }

    fn lane(&self, depth: usize) -> Result<Box<dyn Lane>, OpenError> {
        Ok(Box::new(NotingLane(self.0.lane(depth)?, Arc::clone(&self.1))))
    }

    fn state(&self, member: u32) -> State {
        self.0.state(member)
    }

    fn unfit_for_swap(&self) -> Option<String> {
        None
    }
}

impl Lane for NotingLane {
    fn plan(&mut self, reads: usize, writes: usize) {
        self.1.lock().unwrap().push((reads, writes));
    }

    fn heeds_plan(&self) -> bool {
        true
    }

    fn write(&mut self, ticket: Ticket, slot: Slot, page: &PageBytes) -> Progress {
        self.0.write(ticket, slot, page)
    }

    fn read(&mut self, ticket: Ticket, slot: Slot, page: &mut PageBytes) -> Progress {
        self.0.read(ticket, slot, page)
    }
}

#[test]
fn each_store_hears_of_its_own_reads_and_the_one_with_room_of_the_writes() {
    let config = Config { pages: 200, lanes: 1, depth: 8 };
    let heard: [Arc<Mutex<Vec<_>>>; 2] = Default::default();
    let store = |at: usize, slots| -> Arc<dyn Store> {
        Arc::new(Noting(Host::new(slots).unwrap(), Arc::clone(&heard[at])))
    };
    let volume = Volume::create(config, vec![store(0, 64), store(1, config.slots())]).unwrap();
    let mut lane = volume.lane().unwrap();
    for at in 0..100 {
        let page = std::array::from_fn::<u8, PAGE_SIZE, _>(|byte| (byte as u32 + at) as u8);
        assert_eq!(lane.write(0, PageNo(at), &page), Progress::Done(Ok(())));
    }
    lane.submit();
    let mut batch = lane.batch().expect("both stores heed plans");
    batch.reads((0..80).map(PageNo));
    batch.reads((150..200).map(PageNo)); // never written: nothing is read for them
    batch.writes(7);
    batch.announce();
    assert_eq!(*heard[0].lock().unwrap(), [(64, 0)]);
    assert_eq!(*heard[1].lock().unwrap(), [(16, 7)]);
}

#[test]
fn where_no_store_heeds_plans_there_is_no_batch_to_count() {
    let config = Config { pages: 10, lanes: 1, depth: 1 };
    let volume = Volume::create(config, vec![Arc::new(Host::new(config.slots()).unwrap())]).unwrap();
    assert!(volume.lane().unwrap().batch().is_none());
}
