//! The refusals of a volume, in the words that people read.

mod driver;

use driver::{Driven as _, driver};
use std::os::fd::BorrowedFd;
use std::sync::Arc;
use std::time::{Duration, Instant};
use weir_core::{ByteSize, Memory, PAGE_SIZE, PageBytes, PageNo};
use weir_store::{Fault, Host, Lane, OpenError, Progress, Reclaim, Sim, SimUrl, State, Store};
use weir_volume::{Config, Kept, Step, Task, Volume};

const CONFIG: Config = Config { pages: 8, lanes: 4, depth: 4 };

#[test]
fn a_volume_that_cannot_be_is_refused_with_what_was_asked_for() {
    let host = || Arc::new(Host::new(CONFIG.slots()).unwrap()) as Arc<dyn Store>;
    for (config, stores, words) in [
        (Config { pages: 0, ..CONFIG }, vec![host()], "; asked for 0 pages on 1 stores"),
        (CONFIG, Vec::new(), "; asked for 8 pages on 0 stores"),
        (CONFIG, (0..17).map(|_| host()).collect(), "a volume has 1 to"),
        (Config { pages: 8000, ..CONFIG }, vec![host()], "a volume of 31.2MiB needs"),
    ] {
        let error = Volume::create(config, stores).unwrap_err().to_string();
        assert!(error.contains(words), "{error}");
    }
}

#[test]
fn a_daemon_of_another_configuration_takes_over_no_volume() {
    let host = |slots: u32| Arc::new(Host::new(slots).unwrap()) as Arc<dyn Store>;
    let volume = Volume::create(CONFIG, vec![host(CONFIG.slots())]).unwrap();
    let other_map = Memory::shared("weir-test", 8192).unwrap();
    for (map, stores, words) in [
        (None, vec![host(CONFIG.slots()), host(8)], "it had 1 stores, and 2 were given"),
        (Some(other_map), vec![host(CONFIG.slots())], "its page map has 8192 bytes, and one has 17179807744"),
        (None, vec![host(100_000)], "its records are not those of host:390.6MiB with 100000 slots"),
    ] {
        let adopt = |fd: BorrowedFd<'_>| Memory::adopt(fd.try_clone_to_owned().unwrap()).unwrap();
        let fds = volume.kept_fds();
        let map = map.unwrap_or_else(|| adopt(fds.map));
        let kept = Kept { map, records: fds.records.into_iter().map(adopt).collect() };
        let error = Volume::take_over(CONFIG, stores, kept).unwrap_err().to_string();
        assert_eq!(error, format!("cannot take over the pages of the former daemon: {words}"));
    }
}

#[test]
fn a_volume_lends_its_pages_once_and_says_what_its_lanes_have_left() {
    let volume = Volume::create(CONFIG, vec![Arc::new(Host::new(CONFIG.slots()).unwrap())]).unwrap();
    let (lender, _) = volume.lender(1, 1).unwrap();
    let error = volume.lender(1, 1).err().unwrap().to_string();
    assert!(error.contains("its pages are being lent already"), "{error}");
    drop(lender);
    let _lanes = [(); 4].map(|()| volume.lane().unwrap());
    let error = volume.lane().err().unwrap().to_string();
    assert!(error.contains(" for writes under way are wanted, and "), "{error}");
    assert!(error.ends_with("are left: close a connection or thread, or configure more"), "{error}");
}

/// A store of one chunk whose memory cannot be given back.
#[derive(Debug)]
struct Stubborn(Host);

impl Store for Stubborn {
    fn name(&self) -> &str {
        "stubborn"
    }

    fn slots(&self) -> u32 {
        self.0.slots()
    }

    fn lane(&self, depth: usize) -> Result<Box<dyn Lane>, OpenError> {
        self.0.lane(depth)
    }

    fn state(&self, member: u32) -> State {
        self.0.state(member)
    }

    fn unfit_for_swap(&self) -> Option<String> {
        None
    }

    fn reclaim(&self) -> Option<&dyn Reclaim> {
        Some(self)
    }
}

impl Reclaim for Stubborn {
    fn chunk_slots(&self) -> u32 {
        self.0.slots()
    }

    fn release(&self, _chunk: u32) -> Result<(), Fault> {
        Err(Fault::Io(5))
    }

    fn take(&self, _chunk: u32) -> Result<(), Fault> {
        Err(Fault::Io(5))
    }
}

/// A page that is no repeated value, so it takes a slot.
fn page() -> PageBytes {
    let mut page = [0; PAGE_SIZE];
    page[0] = 7;
    page
}

fn over_a_backing(fast: impl Store + 'static) -> Arc<Volume> {
    over_a_backing_of(Arc::new(fast))
}

fn over_a_backing_of(fast: Arc<dyn Store>) -> Arc<Volume> {
    let backing = Host::new(CONFIG.slots()).unwrap();
    Volume::create(CONFIG, vec![fast, Arc::new(backing)]).unwrap()
}

#[test]
fn a_chunk_that_cannot_go_says_why() {
    let volume = over_a_backing(Stubborn(Host::new(CONFIG.slots()).unwrap()));
    let mut mover = volume.mover().unwrap();
    volume.begin_give_back(0, &[0]).unwrap();
    let twice = volume.begin_give_back(0, &[0]).unwrap_err().to_string();
    assert_eq!(twice, "chunk 0 of store 0 is being given back, or was");
    let missing = volume.begin_give_back(0, &[7]).unwrap_err().to_string();
    assert_eq!(missing, "store 0 has no chunk 7");
    let refused = mover.finish_give_back(0, 0, &mut driver(|_| true)).unwrap_err().to_string();
    assert!(refused.starts_with("the store cannot do it: I/O error 5"), "{refused}");
}

#[test]
fn a_page_that_cannot_be_moved_keeps_its_chunk() {
    let fast = SimUrl { size: ByteSize(1 << 20), read_error: 1.0, ..SimUrl::default() };
    let volume = over_a_backing(Sim::open(fast).unwrap());
    let (mut writer, mut mover) = (volume.lane().unwrap(), volume.mover().unwrap());
    assert_eq!(writer.write(0, PageNo(3), &page()), Progress::Done(Ok(())));
    drop(writer);
    let error = mover.give_back(0, 0, &mut driver(|_| true)).unwrap_err().to_string();
    assert!(error.starts_with("page 3 cannot be moved: I/O error 5"), "{error}");
    assert!(error.ends_with("(1 such pages were met)"), "{error}");
}

#[test]
fn a_lane_that_is_busy_for_too_long_is_said() {
    let volume = over_a_backing(Host::new(CONFIG.slots()).unwrap());
    let (mut writer, mut mover) = (volume.lane().unwrap(), volume.mover().unwrap());
    assert_eq!(writer.write(0, PageNo(0), &page()), Progress::Done(Ok(())));
    drop(writer);
    let mut reader = volume.lane().unwrap();
    // The reader looks at pages for as long as it has this.
    let looks = reader.pin();
    volume.begin_give_back(0, &[0]).unwrap();
    mover.begin(Task::GiveBack { store: 0, chunk: 0 }).unwrap();
    let mut now = Instant::now();
    let error = loop {
        match mover.step(now) {
            Step::Ended(result) => break result.unwrap_err().to_string(),
            Step::Waits(_, until) => now = until + Duration::from_millis(1),
            Step::More { .. } => {}
        }
    };
    drop(looks);
    assert_eq!(error, "a lane has been busy for 10s");
}

#[test]
fn a_chunk_stays_while_a_dead_daemons_write_may_still_land_in_it() {
    let slow = SimUrl { size: ByteSize(1 << 20), latency: Duration::from_secs(1), ..SimUrl::default() };
    let disk = Arc::new(Sim::open(slow).unwrap());
    let volume = over_a_backing_of(Arc::clone(&disk) as _);
    let mut writer = volume.lane().unwrap();
    assert_eq!(writer.write(0, PageNo(3), &page()), Progress::Queued);
    writer.submit();
    disk.let_writes_outlive_lanes(true);
    writer.abandon();
    disk.let_writes_outlive_lanes(false);
    let adopt = |fd: BorrowedFd<'_>| Memory::adopt(fd.try_clone_to_owned().unwrap()).unwrap();
    let fds = volume.kept_fds();
    let kept = Kept { map: adopt(fds.map), records: fds.records.into_iter().map(adopt).collect() };
    drop(volume);
    assert_eq!(disk.orphans(), 1);
    let backing = Arc::new(Host::new(CONFIG.slots()).unwrap());
    let (volume, _) = Volume::take_over(CONFIG, vec![Arc::clone(&disk) as _, backing], kept).unwrap();
    let refused = volume.begin_give_back(0, &[0]).unwrap_err().to_string();
    assert_eq!(
        refused,
        "what the daemon before had begun to write is still under way; try again when the disk has done it"
    );
    disk.land(0);
    volume.begin_give_back(0, &[0]).unwrap();
}
