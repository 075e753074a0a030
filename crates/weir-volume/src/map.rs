//! The page map: one [`Entry`] a page, in memory that a keeper can hold beyond the daemon's death.
//!
//! The map has an address for the entry of every page number, and memory only for the numbers that
//! volumes have. That memory is taken part by part, before the pages are used. To read any other
//! entry would take memory too: see [`Pool::entry`](crate::Pool::entry).
//!
//! The map's last word counts the volumes and growths that there ever were. The first generations
//! of new pages come from this count. So the count must outlive the daemon, as the pages do.

use crate::entry::{Entry, Place};
use crate::ranges::{PAGES_MAX, PART, Ranges, generation, whole};
use std::io;
use std::ops::Range;
use std::sync::atomic::{AtomicU64, Ordering};
use weir_core::{Memory, PAGE_SIZE, PageNo};

// Each part of the map is a page of memory.
const _: () = assert!(PART as usize * size_of::<Entry>() == PAGE_SIZE);

#[derive(Debug)]
pub(crate) struct Map {
    memory: Memory,
    /// Bytes of the map's memory that the system refused to take back.
    refused: AtomicU64,
}

/// The place of the entries of `pages` in the map's memory: offset and length in bytes.
pub(crate) fn words(pages: &Range<u32>) -> (usize, usize) {
    (pages.start as usize * 8, (pages.end - pages.start) as usize * 8)
}

impl Map {
    /// Bytes of address space that a map takes.
    pub const BYTES: usize = PAGES_MAX as usize * 8 + PAGE_SIZE;

    pub fn new() -> io::Result<Self> {
        let memory = Memory::sparse("weir-map", Self::BYTES)?;
        memory.take_more(PAGES_MAX as usize * 8, PAGE_SIZE)?;
        Ok(Self::over(memory))
    }

    pub fn over(memory: Memory) -> Self {
        assert!(memory.len() == Self::BYTES, "the map covers every page");
        Map { memory, refused: AtomicU64::new(0) }
    }

    pub fn memory(&self) -> &Memory {
        &self.memory
    }

    /// Bytes of the map's memory that the system refused to take back.
    pub fn refused(&self) -> u64 {
        self.refused.load(Ordering::Relaxed)
    }

    /// Takes memory for the entries of new pages, which nobody uses yet. The entries are empty, and
    /// each call gives them another first generation. On failure a part of the memory may have been
    /// taken.
    pub fn take(&self, pages: Range<u32>) -> io::Result<()> {
        let (offset, bytes) = words(&pages);
        let start = offset / PAGE_SIZE * PAGE_SIZE;
        self.memory.take_more(start, offset + bytes - start)?;
        let birth = self.raw(PAGES_MAX as usize).fetch_add(1, Ordering::Relaxed);
        let born = Entry::new(Place::Empty, generation(birth));
        // If the system has not taken an entry's memory back, the entry may still have its old
        // value: see `give`.
        for page in pages.map(PageNo).filter(|page| self.load(*page) != born) {
            self.set(page, born);
        }
        Ok(())
    }

    /// Empties the entries of `pages`, which are whole parts of the map, and gives the memory back
    /// to the system. Nobody may be using the pages. If the system refuses, the entries are emptied
    /// one by one, and their bytes count as [refused](Map::refused).
    pub fn give(&self, pages: Range<u32>) {
        let (offset, bytes) = words(&pages);
        if pages.is_empty() || self.memory.punch(offset, bytes).is_ok() {
            return;
        }
        // If the system does not even tell which parts have memory, the entries keep their values
        // until `take` sets them.
        let _ = self.each_part(&pages, |kept| {
            self.refused.fetch_add(words(&kept).1 as u64, Ordering::Relaxed);
            kept.for_each(|page| self.set(PageNo(page), Entry::default()));
        });
    }

    /// Calls `of` with each range of `pages` whose entries have memory.
    fn each_part(&self, pages: &Range<u32>, mut of: impl FnMut(Range<u32>)) -> io::Result<()> {
        let (offset, bytes) = words(pages);
        self.memory.each_part(offset, bytes, |at, bytes| {
            of((at / 8) as u32..((at + bytes) / 8) as u32);
            Ok(())
        })
    }

    /// Calls `of` with each page that belongs to none of these ranges and may have an entry.
    pub fn each_outside(&self, ranges: &Ranges, mut of: impl FnMut(PageNo, Entry)) -> io::Result<()> {
        let mut look = |pages: Range<u32>| pages.map(PageNo).for_each(|page| of(page, self.load(page)));
        ranges.gaps().try_for_each(|gap| self.each_part(&gap, &mut look))
    }

    /// Empties the entries of all pages outside of these ranges, and gives the entries' memory
    /// back. Nobody uses the map yet.
    pub fn keep_only(&self, ranges: &Ranges) {
        for gap in ranges.gaps() {
            let start = whole(gap.start).min(gap.end);
            // The page numbers that no volume has can begin within the last part of the map that a
            // range uses. That part's memory stays, so empty the entries there one by one.
            (gap.start..start).for_each(|page| self.set(PageNo(page), Entry::default()));
            self.give(start..gap.end);
        }
    }

    /// Returns the map's word for page `at`. If `at` is [`PAGES_MAX`], returns the map's last word,
    /// which counts volumes and growths.
    #[inline]
    fn raw(&self, at: usize) -> &AtomicU64 {
        assert!(at <= PAGES_MAX as usize, "word {at} of {PAGES_MAX}");
        // SAFETY: the pointer is inside the mapping (checked above, and by `over`) and aligned
        // (8-byte steps from a page boundary). The word is only ever accessed as an atomic, in this
        // process and in the keeper that holds the memfd.
        unsafe { &*self.memory.as_ptr().cast::<AtomicU64>().add(at) }
    }

    #[inline]
    fn word(&self, page: PageNo) -> &AtomicU64 {
        assert!(page.0 < PAGES_MAX, "page {} of {PAGES_MAX}", page.0);
        self.raw(page.0 as usize)
    }

    #[inline]
    pub fn load(&self, page: PageNo) -> Entry {
        #[cfg(all(test, not(loom)))]
        LOOKS.with_borrow(|look| look.iter().for_each(|look| look()));
        Entry(self.word(page).load(Ordering::Acquire))
    }

    /// Prefetches a page's entry.
    #[inline]
    pub fn prefetch(&self, page: PageNo) {
        weir_core::prefetch_value(self.word(page));
    }

    /// Sets a page's entry while no other thread uses it.
    pub fn set(&self, page: PageNo, entry: Entry) {
        self.word(page).store(entry.0, Ordering::SeqCst);
    }

    /// Publishes `entry` if the page's entry is still `was`.
    #[inline]
    pub fn replace(&self, page: PageNo, was: Entry, entry: Entry) -> bool {
        self.word(page).compare_exchange(was.0, entry.0, Ordering::SeqCst, Ordering::Relaxed).is_ok()
    }
}

#[cfg(all(test, not(loom)))]
thread_local! {
    /// A callback that runs each time before this thread reads an entry.
    pub(crate) static LOOKS: std::cell::RefCell<Option<Box<dyn Fn()>>> = const { std::cell::RefCell::new(None) };
}

#[cfg(all(test, not(loom)))]
mod tests {
    use super::*;
    use rustix::fs::{MemfdFlags, SealFlags};
    use rustix::mm::{MprotectFlags, mprotect};
    use std::os::fd::OwnedFd;
    use weir_core::Slot;

    fn stored(slot: u32) -> Entry {
        Entry::new(Place::Stored { store: 0, slot: Slot(slot) }, 9)
    }

    fn blocks(fd: &OwnedFd) -> i64 {
        rustix::fs::fstat(fd).expect("a memfd").st_blocks * 512
    }

    /// A map whose memory the system does not take back.
    fn held_fast() -> Map {
        let flags = MemfdFlags::CLOEXEC | MemfdFlags::ALLOW_SEALING;
        let fd = rustix::fs::memfd_create("weir-test", flags).expect("a memfd");
        rustix::fs::ftruncate(&fd, Map::BYTES as u64).expect("a size");
        rustix::fs::fcntl_add_seals(&fd, SealFlags::SHRINK | SealFlags::GROW).expect("seals");
        let map = Map::over(Memory::adopt(fd.try_clone().expect("a descriptor")).expect("a mapping"));
        rustix::fs::fcntl_add_seals(&fd, SealFlags::FUTURE_WRITE).expect("a seal");
        assert!(map.memory().punch(0, PAGE_SIZE).is_err(), "the seal forbids it");
        map
    }

    #[test]
    fn memory_that_the_system_does_not_take_back_shows_nothing_in_the_next_volume_and_is_counted() {
        let map = held_fast();
        map.take(0..600).expect("memory");
        (0..600).for_each(|page| map.set(PageNo(page), stored(page)));
        map.give(512..1024);
        assert_eq!(map.load(PageNo(511)), stored(511));
        assert!((512..600).all(|page| map.load(PageNo(page)).place() == Place::Empty));
        assert_eq!(map.refused(), PAGE_SIZE as u64);
        // `take` empties these entries too, whatever they held.
        map.take(300..900).expect("memory");
        assert_eq!(map.load(PageNo(299)), stored(299));
        assert!((300..900).all(|page| map.load(PageNo(page)).place() == Place::Empty));
        let mut ranges = Ranges::default();
        assert!(ranges.insert(0..100));
        (0..900).for_each(|page| map.set(PageNo(page), stored(page)));
        map.keep_only(&ranges);
        for page in (0..900).map(PageNo) {
            let kept = if page.0 < 100 { stored(page.0).place() } else { Place::Empty };
            assert_eq!(map.load(page).place(), kept, "{page:?}");
        }
    }

    #[test]
    fn a_look_outside_of_the_ranges_sees_every_entry_there_and_takes_no_memory() {
        let map = Map::new().expect("memory");
        let fd = map.memory().fd().expect("a memfd").try_clone_to_owned().expect("a descriptor");
        let far = PAGES_MAX / 2;
        map.take(0..1100).expect("memory");
        map.take(far..far + 3).expect("memory");
        map.take(PAGES_MAX - 1..PAGES_MAX).expect("memory");
        let before = blocks(&fd);
        let mut ranges = Ranges::default();
        assert!(ranges.insert(0..700) && ranges.insert(far..far + 2));
        let there = [0, 699, 700, 1024, far - 1, far, far + 2, PAGES_MAX - 1];
        there.into_iter().filter(|at| *at != far - 1).for_each(|page| map.set(PageNo(page), stored(page)));
        let mut seen = Vec::new();
        let look =
            |page: PageNo, entry: Entry| seen.extend((entry.place() != Place::Empty).then_some(page.0));
        map.each_outside(&ranges, look).expect("it can be read");
        assert_eq!((seen, blocks(&fd)), (vec![700, 1024, far + 2, PAGES_MAX - 1], before));
        map.keep_only(&ranges);
        assert_eq!(blocks(&fd), 4 * PAGE_SIZE as i64, "two parts, one, and the count");
    }

    #[test]
    fn births_are_counted_beyond_the_process() {
        let map = Map::new().expect("memory");
        map.take(0..1).expect("memory");
        let fd = map.memory().fd().expect("a memfd").try_clone_to_owned().expect("a descriptor");
        drop(map);
        let next = Map::over(Memory::adopt(fd).expect("a mapping"));
        next.take(512..513).expect("memory");
        assert_eq!([0, 512].map(|page| next.load(PageNo(page)).generation()), [0, generation(1)]);
    }

    #[test]
    fn a_pool_gives_back_what_it_took_for_a_volume_that_it_could_not_make() {
        use crate::{Config, CreateError, Pool, Volume};
        let config = Config { pages: 3000, lanes: 1, depth: 4 };
        let host = weir_store::Host::new(config.slots()).expect("memory");
        let pool = Pool::create(config, vec![std::sync::Arc::new(host)]).expect("a pool");
        let memory = pool.map.memory();
        let fd = memory.fd().expect("a memfd").try_clone_to_owned().expect("a descriptor");
        let protect = |part: usize, flags| {
            // SAFETY: this part of the map is inside the mapping, and nobody uses it.
            unsafe { mprotect(memory.as_ptr().add(part * PAGE_SIZE).cast(), PAGE_SIZE, flags) }
                .expect("a mapping");
        };
        // From here on the system gives no memory for part 2 of the map, which is the third of its
        // parts.
        protect(2, MprotectFlags::empty());
        let empty = blocks(&fd);
        let refused = pool.volume(2000).expect_err("it has no memory there");
        let said = "cannot take 15.6KiB of memory for the page map and slot records";
        assert_eq!(refused.to_string(), said);
        assert_eq!((blocks(&fd), pool.free_pages(), pool.map_bytes()), (empty, 3000, 0));
        let volume: std::sync::Arc<Volume> = pool.volume(700).expect("two parts can be had");
        let before = blocks(&fd);
        let refused = volume.grow(2000, |_| panic!("nobody notes that")).expect_err("it has no memory there");
        assert!(matches!(refused, CreateError::Memory { .. }), "{refused}");
        assert_eq!((blocks(&fd), pool.free_pages(), volume.pages()), (before, 2300, 700));
        protect(2, MprotectFlags::READ | MprotectFlags::WRITE);
        volume.grow(2000, |_| Ok(())).expect("now it has");
    }
}
