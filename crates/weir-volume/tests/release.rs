//! A chunk's memory is released only when no lane reads it any more.

mod driver;

use driver::{Driven as _, driver};
use std::cell::UnsafeCell;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, OnceLock, Weak};
use std::time::{Duration, Instant};
use weir_core::{ByteSize, Memory, PAGE_SIZE, PageBytes, PageNo, Slot};
use weir_store::{Fault, Lane, OpenError, Progress, Reclaim, Sim, SimUrl, State, Store};
use weir_volume::{ChunkState, Config, Kept, View, Volume};

/// So many slots that searching their records takes a while. Only used slots take memory.
const SLOTS: u32 = 1 << 18;

#[derive(Debug)]
struct Pages {
    memory: UnsafeCell<Vec<PageBytes>>,
    written: Mutex<Vec<Slot>>,
}

// SAFETY: the volume never writes a slot while a lane reads it.
unsafe impl Sync for Pages {}

impl Pages {
    fn at(&self, slot: Slot) -> *mut PageBytes {
        assert!(slot.0 < SLOTS);
        // SAFETY: the vector itself never changes, and the slot lies within it.
        unsafe { (*self.memory.get()).as_ptr().add(slot.0 as usize).cast_mut() }
    }
}

/// A store of one large chunk; its content is overwritten when it is released.
#[derive(Debug)]
struct Wide(Arc<Pages>);

impl Store for Wide {
    fn name(&self) -> &str {
        "wide"
    }

    fn slots(&self) -> u32 {
        SLOTS
    }

    fn lane(&self, _depth: usize) -> Result<Box<dyn Lane>, OpenError> {
        Ok(Box::new(WideLane(Arc::clone(&self.0))))
    }

    fn state(&self, _member: u32) -> State {
        State::Online
    }

    fn unfit_for_swap(&self) -> Option<String> {
        None
    }

    fn reclaim(&self) -> Option<&dyn Reclaim> {
        Some(self)
    }
}

impl Reclaim for Wide {
    fn chunk_slots(&self) -> u32 {
        SLOTS
    }

    fn release(&self, _chunk: u32) -> Result<(), Fault> {
        for slot in self.0.written.lock().unwrap().drain(..) {
            // SAFETY: no lane uses a released chunk.
            unsafe { self.0.at(slot).write_volatile([0xdd; PAGE_SIZE]) };
        }
        Ok(())
    }

    fn take(&self, _chunk: u32) -> Result<(), Fault> {
        Ok(())
    }
}

struct WideLane(Arc<Pages>);

impl Lane for WideLane {
    fn write(&mut self, _ticket: u32, slot: Slot, page: &PageBytes) -> Progress {
        self.0.written.lock().unwrap().push(slot);
        // SAFETY: the lane that writes a slot has claimed it.
        unsafe { self.0.at(slot).write(*page) };
        Progress::Done(Ok(()))
    }

    fn read(&mut self, _ticket: u32, slot: Slot, page: &mut PageBytes) -> Progress {
        // SAFETY: the slot is not written while the lane is pinned.
        *page = unsafe { self.0.at(slot).read() };
        Progress::Done(Ok(()))
    }

    unsafe fn view(&self, slot: Slot) -> Option<&PageBytes> {
        // SAFETY: the caller guarantees that the slot is not written.
        Some(unsafe { &*self.0.at(slot) })
    }
}

fn page(number: u32) -> PageBytes {
    std::array::from_fn(|at| (at as u32 ^ number) as u8)
}

#[test]
fn a_page_that_is_looked_at_stays_though_its_chunk_is_given_back_and_it_is_written_anew() {
    let config = Config { pages: 1, lanes: 3, depth: 1 };
    let memory = || UnsafeCell::new(vec![[0; PAGE_SIZE]; SLOTS as usize]);
    let wide = || Arc::new(Wide(Arc::new(Pages { memory: memory(), written: Mutex::default() })));
    let volume = Volume::create(config, vec![wide(), wide()]).unwrap();
    let mut worker = volume.mover().unwrap();
    let [mut reader, mut writer] = [(); 2].map(|()| volume.lane().unwrap());
    let stop = AtomicBool::new(false);
    let goes_on = || !stop.load(Ordering::Relaxed);
    std::thread::scope(|scope| {
        scope.spawn(|| {
            for number in (0..).take_while(|_| goes_on()) {
                assert_eq!(writer.write(0, PageNo(0), &page(number)), Progress::Done(Ok(())));
                writer.submit();
                std::thread::sleep(Duration::from_micros(500));
            }
        });
        scope.spawn(|| {
            while goes_on() {
                let guard = reader.pin();
                let View::Bytes(bytes) = guard.view(PageNo(0)) else { continue };
                let (seen, begun) = (*bytes, Instant::now());
                while begun.elapsed() < Duration::from_micros(200) {
                    std::hint::spin_loop();
                }
                if *bytes != seen {
                    stop.store(true, Ordering::Relaxed);
                    panic!("it changed under its reader");
                }
            }
        });
        let begun = Instant::now();
        while goes_on() && begun.elapsed() < Duration::from_secs(2) {
            worker.give_back(0, 0, &mut driver(|_| true)).unwrap();
            worker.take(0, 0).unwrap();
            while goes_on() && volume.status().stores[0].used == 0 {
                std::thread::yield_now();
            }
        }
        stop.store(true, Ordering::Relaxed);
    });
}

/// A store that checks, whenever its memory was released or is about to be taken, what a next
/// daemon would find if this one died at that moment.
#[derive(Debug)]
struct Followed {
    sim: Sim,
    volume: OnceLock<Weak<Volume>>,
    found: Mutex<Vec<ChunkState>>,
}

impl Followed {
    const SLOTS: u32 = 1024;

    fn sim() -> Sim {
        let bytes = |slots: u32| ByteSize(u64::from(slots) * PAGE_SIZE as u64);
        let (size, chunk) = (bytes(2 * Self::SLOTS), Some(bytes(Self::SLOTS)));
        Sim::open(SimUrl { size, chunk, ..SimUrl::default() }).unwrap()
    }

    fn follow(&self, chunk: u32) {
        let volume = self.volume.get().and_then(Weak::upgrade).unwrap();
        // The keeper's memory continues to belong to the daemon that lives.
        let copy = |fd: std::os::fd::BorrowedFd<'_>, part: Option<std::ops::Range<u32>>| {
            let original = Memory::adopt(fd.try_clone_to_owned().unwrap()).unwrap();
            let copy = Memory::sparse("weir-test", original.len()).unwrap();
            let (offset, bytes) =
                part.map_or((0, original.len()), |pages| (pages.start as usize * 8, pages.len() * 8));
            copy.take_more(offset, bytes).unwrap();
            // SAFETY: both have the same length, nothing else uses the copy, and the test has no
            // thread that writes the original.
            unsafe {
                copy.as_ptr().add(offset).copy_from_nonoverlapping(original.as_ptr().add(offset), bytes);
            }
            copy
        };
        let fds = volume.kept_fds();
        let kept = Kept {
            map: copy(fds.map, Some(volume.range())),
            records: fds.records.into_iter().map(|fd| copy(fd, None)).collect(),
        };
        let config = Config { pages: 64, lanes: 2, depth: 4 };
        let (next, lost) = Volume::take_over(config, vec![Arc::new(Self::sim())], kept).unwrap();
        assert_eq!(lost, 0);
        self.found.lock().unwrap().push(next.chunks(0).nth(chunk as usize).unwrap().state);
    }
}

impl Store for Followed {
    fn name(&self) -> &str {
        "followed"
    }

    fn slots(&self) -> u32 {
        self.sim.slots()
    }

    fn lane(&self, depth: usize) -> Result<Box<dyn Lane>, OpenError> {
        self.sim.lane(depth)
    }

    fn state(&self, member: u32) -> State {
        self.sim.state(member)
    }

    fn unfit_for_swap(&self) -> Option<String> {
        None
    }

    fn reclaim(&self) -> Option<&dyn Reclaim> {
        Some(self)
    }
}

impl Reclaim for Followed {
    fn chunk_slots(&self) -> u32 {
        self.sim.chunk_slots()
    }

    fn release(&self, chunk: u32) -> Result<(), Fault> {
        self.sim.release(chunk)?;
        self.follow(chunk);
        Ok(())
    }

    fn take(&self, chunk: u32) -> Result<(), Fault> {
        self.follow(chunk);
        self.sim.take(chunk)
    }
}

#[test]
fn a_daemon_that_dies_while_memory_goes_or_comes_leaves_a_chunk_that_the_next_one_does_not_use() {
    let store = Arc::new(Followed { sim: Followed::sim(), volume: OnceLock::new(), found: Mutex::default() });
    let config = Config { pages: 64, lanes: 2, depth: 4 };
    let volume = Volume::create(config, vec![Arc::clone(&store) as _]).unwrap();
    store.volume.set(Arc::downgrade(&volume)).unwrap();
    let mut lane = volume.lane().unwrap();
    for number in 0..64 {
        assert_eq!(lane.write(0, PageNo(number), &page(number)), Progress::Done(Ok(())));
    }
    lane.submit();
    let mut mover = volume.mover().unwrap();
    mover.give_back(0, 0, &mut driver(|_| true)).unwrap();
    mover.take(0, 0).unwrap();
    assert_eq!(*store.found.lock().unwrap(), [ChunkState::GivenBack; 2]);
    assert_eq!(volume.chunks(0).next().unwrap().state, ChunkState::Held);
}
