//! A store of several members: one of them fails, and the others do not.

use std::sync::Arc;
use std::time::{Duration, Instant};
use weir_core::{ByteSize, PAGE_SIZE, PageBytes, PageNo};
use weir_store::{Fault, Host, Progress, Sim, SimUrl, State, Store, Stripe};
use weir_volume::{Config, Lane, Volume};

const CHUNK: u32 = 1024;
/// Number of slots of each of the two members.
const EACH: u32 = 4 * CHUNK;
const PAGES: u32 = 3 * CHUNK;
/// A number of pages that end within a chunk of the second member.
const FIRST: u32 = CHUNK + CHUNK / 2;
const CONFIG: Config = Config { pages: PAGES, lanes: 2, depth: 16 };

struct Rig {
    volume: Arc<Volume>,
    lane: Lane,
    stripe: Arc<Stripe<Sim>>,
}

impl Rig {
    /// A volume over a stripe of two members whose operations take a poll, and over `below` slots
    /// of memory.
    fn new(below: u32) -> Self {
        let bytes = |slots: u32| ByteSize(u64::from(slots) * PAGE_SIZE as u64);
        let member = |seed| {
            let (size, chunk) = (bytes(EACH), Some(bytes(CHUNK)));
            Sim::open(SimUrl { seed, size, chunk, delay: 1, ..SimUrl::default() }).expect("memory")
        };
        let stripe = Stripe::by_speed("two".to_owned(), vec![member(1), member(2)], &[1.0, 1.0]);
        let stripe = Arc::new(stripe);
        let mut stores: Vec<Arc<dyn Store>> = vec![Arc::clone(&stripe) as _];
        if below > 0 {
            stores.push(Arc::new(Host::new(below).expect("memory")));
        }
        let volume = Volume::create(CONFIG, stores).expect("a volume");
        let lane = volume.lane().expect("a lane");
        Rig { volume, lane, stripe }
    }

    fn write(&mut self, page: u32) -> Result<(), Fault> {
        let mut now = Instant::now();
        loop {
            let progress = self.lane.write(page, PageNo(page), &content(page));
            if progress != Progress::Full {
                return self.end(progress).0;
            }
            // The write waits for a slot.
            assert!(self.lane.must_poll());
            now += Duration::from_millis(100);
            self.lane.poll(now, &mut |done| panic!("nothing is in flight: {done:?}"));
        }
    }

    fn read(&mut self, page: u32) -> Result<PageBytes, Fault> {
        let mut here = [0; PAGE_SIZE];
        let progress = self.lane.read(page, PageNo(page), &mut here);
        let (result, there) = self.end(progress);
        result.map(|()| there.unwrap_or(here))
    }

    fn end(&mut self, progress: Progress) -> (Result<(), Fault>, Option<PageBytes>) {
        let mut ended = None;
        match progress {
            Progress::Done(result) => ended = Some((result, None)),
            Progress::Queued => {}
            Progress::Full => panic!("room for one operation"),
        }
        self.lane.submit();
        while ended.is_none() {
            self.lane.poll(Instant::now(), &mut |done| ended = Some((done.result, done.page.copied())));
        }
        self.lane.submit();
        ended.expect("it has ended")
    }

    /// The pages among `pages` that lie on the second member.
    fn on_second(&mut self, pages: std::ops::Range<u32>) -> Vec<u32> {
        self.stripe.parts()[1].part(true);
        let late = pages.filter(|&page| self.read(page) == Err(Fault::Timeout)).collect();
        self.stripe.parts()[1].part(false);
        late
    }

    /// Number of used slots of the stripe, and of the memory below.
    fn used(&self) -> [u32; 2] {
        let stores = self.volume.status().stores;
        [stores[0].used, stores.get(1).map_or(0, |store| store.used)]
    }
}

fn content(page: u32) -> PageBytes {
    std::array::from_fn(|at| (page as usize * 31 + at * 7 + at / 256) as u8)
}

#[test]
fn a_member_that_dies_loses_its_own_pages_and_stops_no_new_ones() {
    let mut rig = Rig::new(PAGES);
    // Both members have some pages.
    (0..FIRST).for_each(|page| rig.write(page).expect("written"));
    let lost = rig.on_second(0..FIRST);
    assert!(lost.len() >= 100 && lost.len() + 100 < FIRST as usize, "{} pages", lost.len());
    let room = rig.volume.spare_slots();
    rig.stripe.parts()[1].kill();
    assert_eq!(rig.volume.spare_slots(), room - EACH, "its slots are no room any more");
    (FIRST..PAGES).for_each(|page| rig.write(page).expect("the other member has room"));
    assert_eq!(rig.used()[1], 0, "nothing goes below while a member has room");
    for page in 0..PAGES {
        let wanted = if lost.contains(&page) { Err(Fault::Lost) } else { Ok(content(page)) };
        assert!(rig.read(page) == wanted, "page {page}");
    }
    // A lane that is opened now works too.
    rig.lane = rig.volume.lane().expect("a lane");
    assert_eq!(rig.write(0), Ok(()));
    assert_eq!(rig.volume.status().stores[0].state, State::Lost, "the worst is shown");
}

#[test]
fn a_member_that_drains_is_asked_when_nobody_else_has_a_slot() {
    let mut rig = Rig::new(PAGES - CHUNK);
    let drained = &rig.stripe.parts()[1];
    drained.drain(true);
    (0..PAGES).for_each(|page| rig.write(page).expect("written"));
    assert!(rig.on_second(0..PAGES).is_empty(), "the other member and the memory below have room");
    assert_eq!(rig.used(), [PAGES, 0], "the other member is asked before the memory below");
    // If all members drain, pages go to the memory below first, and to the members last.
    let mut rig = Rig::new(CHUNK);
    rig.stripe.parts().iter().for_each(|member| member.drain(true));
    (0..PAGES).for_each(|page| rig.write(page).expect("written"));
    assert_eq!(rig.used(), [PAGES - CHUNK, CHUNK]);
}

#[test]
fn a_member_out_of_reach_keeps_its_pages_and_takes_no_new_ones() {
    let mut rig = Rig::new(PAGES);
    (0..FIRST).for_each(|page| rig.write(page).expect("written"));
    let away = rig.on_second(0..FIRST);
    assert!(!away.is_empty());
    let room = rig.volume.spare_slots();
    rig.stripe.parts()[1].part(true);
    assert_eq!(rig.volume.spare_slots(), room, "its slots are room on");
    (FIRST..PAGES).for_each(|page| rig.write(page).expect("the other member has room"));
    assert_eq!(rig.read(away[0]), Err(Fault::Timeout));
    assert_eq!(rig.volume.status().stores[0].state, State::Unreachable);
    rig.stripe.parts()[1].part(false);
    for page in 0..PAGES {
        assert!(rig.read(page) == Ok(content(page)), "page {page}");
    }
}

#[test]
fn a_write_that_only_a_member_out_of_reach_has_room_for_times_out() {
    let mut rig = Rig::new(0);
    rig.stripe.parts().iter().for_each(|member| member.part(true));
    assert_eq!(rig.write(0), Err(Fault::Timeout));
    rig.stripe.parts().iter().for_each(|member| member.part(false));
    assert_eq!(rig.write(0), Ok(()));
}

#[test]
fn what_does_not_survive_its_process_is_not_taken_over() {
    use weir_core::Memory;
    #[derive(Debug)]
    struct Mortal(Host);
    impl Store for Mortal {
        fn name(&self) -> &str {
            "mortal"
        }
        fn slots(&self) -> u32 {
            self.0.slots()
        }
        fn lane(&self, depth: usize) -> Result<Box<dyn weir_store::Lane>, weir_store::OpenError> {
            self.0.lane(depth)
        }
        fn state(&self, member: u32) -> State {
            self.0.state(member)
        }
        fn unfit_for_swap(&self) -> Option<String> {
            None
        }
    }
    let store: Arc<dyn Store> = Arc::new(Mortal(Host::new(CONFIG.slots()).expect("memory")));
    let volume = Volume::create(CONFIG, vec![Arc::clone(&store)]).expect("a volume");
    let kept = volume.kept_fds();
    let adopt =
        |fd: std::os::fd::BorrowedFd<'_>| Memory::adopt(fd.try_clone_to_owned().expect("one")).expect("it");
    let kept =
        weir_volume::Kept { map: adopt(kept.map), records: kept.records.into_iter().map(adopt).collect() };
    drop(volume);
    let error = Volume::take_over(CONFIG, vec![store], kept).expect_err("its pages are gone").to_string();
    assert!(error.contains("the pages of mortal ended with it"), "{error}");
}
