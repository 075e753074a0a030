//! Volumes: each has a range of its pool's page numbers for itself. A [pool](Pool) is the stores
//! and the page map that several volumes share.
//!
//! If a volume's range begins at page `first` of the pool, page `n` of the volume is page `first +
//! n` of the pool. So a lane translates by one addition, and pages that follow one another in a
//! volume do so in the pool. Records, checksums and packs name pages of the pool. So everything
//! that moves pages serves all volumes at once.
//!
//! A range stays its volume's until [`Mover::remove`](crate::Mover::remove) has discarded the last
//! page. Only a volume that nobody holds can shrink or be removed, and each lane holds its volume.
//! So no late write can reach a later volume that has the same page numbers.

use crate::entry::{Entry, Place};
use crate::lane::{self, Lane};
use crate::map::words;
use crate::ranges::{PAGES_MAX, Ranges, whole};
use crate::{Config, CreateError, Pool};
use std::io;
use std::ops::{Deref, Range};
use std::sync::atomic::{AtomicU32, Ordering};
use std::sync::{Arc, MutexGuard, PoisonError};
use weir_core::{PAGE_SIZE, PageNo};
use weir_store::{OpenError, Store};

/// Largest number of pages whose entries are given back under one lock of the ranges. They are
/// 8 MiB of the map, which the kernel frees in a millisecond. Movers, status and give-back wait for
/// that lock.
const GIVE_AT_ONCE: u32 = if cfg!(test) { 1 << 10 } else { 1 << 20 };

/// A volume: pages by number, from 0 on. Its [`Pool`] has what volumes share.
#[derive(Debug)]
pub struct Volume {
    pool: Arc<Pool>,
    first: u32,
    pages: AtomicU32,
}

/// The removal of a volume's last pages, or of all. [`Mover::remove`](crate::Mover::remove)
/// continues it. If a `Removal` is dropped before every such page is discarded, the page numbers
/// stay taken.
#[derive(Debug)]
pub struct Removal {
    volume: Arc<Volume>,
    /// Number of pages that the volume keeps.
    rest: u32,
    /// The first page that is not discarded yet.
    next: u32,
}

impl Deref for Volume {
    type Target = Arc<Pool>;

    fn deref(&self) -> &Arc<Pool> {
        &self.pool
    }
}

impl Volume {
    /// Makes a pool over `stores`, and one volume of all its pages.
    ///
    /// # Errors
    /// Fails as [`Pool::create`] and [`Pool::volume`] do.
    pub fn create(config: Config, stores: Vec<Arc<dyn Store>>) -> Result<Arc<Self>, CreateError> {
        Pool::create(config, stores)?.volume(config.pages)
    }

    /// A volume that has all page numbers of the pool, for a mover.
    pub(crate) fn whole(pool: &Arc<Pool>) -> Arc<Self> {
        Self::over(pool, 0..PAGES_MAX)
    }

    pub(crate) fn over(pool: &Arc<Pool>, range: Range<u32>) -> Arc<Self> {
        let pages = AtomicU32::new(range.end - range.start);
        Arc::new(Volume { pool: Arc::clone(pool), first: range.start, pages })
    }

    /// The pool that keeps the volume's pages.
    pub fn pool(&self) -> &Arc<Pool> {
        &self.pool
    }

    /// The volume's size in pages.
    #[inline]
    pub fn pages(&self) -> u32 {
        self.pages.load(Ordering::Acquire)
    }

    /// The volume's size in bytes.
    pub fn bytes(&self) -> u64 {
        u64::from(self.pages()) * PAGE_SIZE as u64
    }

    /// Returns the number that the volume's page `page` has in the pool, for a
    /// [lane of all](Pool::lane_of_all) volumes. `None`: one of `count` pages from `page` on lies
    /// behind the volume's end.
    #[inline]
    pub fn page_in_pool(&self, page: u64, count: u32) -> Option<PageNo> {
        let fits = page.checked_add(count.into())? <= u64::from(self.pages());
        fits.then(|| PageNo(self.first + page as u32))
    }

    /// The volume's pages in its pool, by which [`Pool::take_over`] finds it again.
    pub fn range(&self) -> Range<u32> {
        self.first..self.first + self.pages()
    }

    /// Opens a lane, which belongs to one thread. It takes [`Config::lane_slots`] of the slack.
    /// Dropping a lane waits for nothing, and the lane's part of the slack is free again once the
    /// stores have ended its operations; see [`Pool::close_lanes`]. A write whose completion was
    /// not handed over before the drop takes no effect.
    ///
    /// # Errors
    /// Fails with [`OpenErrorKind::Slack`](weir_store::OpenErrorKind::Slack) when too few spare
    /// slots are left for the lane, or when a store has no memory for it.
    pub fn lane(self: &Arc<Self>) -> Result<Lane, OpenError> {
        Lane::open(Arc::clone(self), lane::PARTS, PAGE_SIZE)
    }

    /// Adds empty pages at the end, up to a size of `pages`. Open lanes know the new size when this
    /// returns. Before that, `note` is called with the volume's new range, and records it for the
    /// next daemon: what is written to the new pages must outlive this daemon. If `note` fails, it
    /// must have recorded nothing. `note` can take long, and must not change a volume itself.
    ///
    /// # Errors
    /// Fails as [`Pool::volume`] does, when another volume has the page numbers behind this one, or
    /// when `note` fails. The size then stays as it was.
    ///
    /// # Panics
    /// Panics when the volume has more than `pages` pages, or none.
    pub fn grow(
        &self,
        pages: u32,
        note: impl FnOnce(Range<u32>) -> io::Result<()>,
    ) -> Result<(), CreateError> {
        let _alone = self.pool.changing();
        let now = self.pages();
        assert!(now > 0, "no range belongs to a volume without pages");
        let more = pages.checked_sub(now).expect("a volume shrinks by `shrink`");
        let new = self.first + now..self.first.saturating_add(pages);
        if new.is_empty() {
            return Ok(());
        }
        // Reserve the page numbers first, and release the lock of the ranges. Then nobody waits for
        // that lock while memory is taken and the keeper answers.
        self.pool.reserve(more, |ranges| match ranges.most(self.first) {
            longest if pages > longest => Err(CreateError::NoRange { pages, longest }),
            _ => {
                ranges.resize(self.first, pages);
                Ok(())
            }
        })?;
        let taken = self.pool.map.take(new.clone()).map_err(|error| unmapped(&new, error));
        let noted = taken.and_then(|()| note(self.first..new.end).map_err(CreateError::Note));
        if let Err(error) = noted {
            self.pool.give(self.first, now, new.end);
            return Err(error);
        }
        self.pages.store(pages, Ordering::Release);
        Ok(())
    }

    /// Begins to shrink the volume to `pages` pages; with 0 the volume is removed. Calls `note`
    /// first, with the range that remains, while every page is still there; see
    /// [`grow`](Volume::grow). From then on the last pages count as gone, also for the next daemon,
    /// and [`Mover::remove`] discards them. No lane can be opened until [`Removal::rest`] returns
    /// the volume.
    ///
    /// # Errors
    /// Returns the volume unchanged if anybody else holds it, as each lane does, or if `note`
    /// fails.
    ///
    /// # Panics
    /// Panics when the volume has fewer than `pages` pages.
    ///
    /// [`Mover::remove`]: crate::Mover::remove
    pub fn shrink(
        self: Arc<Self>,
        pages: u32,
        note: impl FnOnce(Range<u32>) -> io::Result<()>,
    ) -> Result<Removal, (Arc<Self>, CreateError)> {
        assert!(pages <= self.pages(), "a volume grows by `grow`");
        let volume = Arc::new(Arc::try_unwrap(self).map_err(|volume| (volume, CreateError::InUse))?);
        let rest = volume.first..volume.first + pages;
        let noted = {
            let _alone = volume.pool.changing();
            note(rest.clone())
        };
        match noted {
            Ok(()) => Ok(Removal { next: rest.end, rest: pages, volume }),
            Err(error) => Err((volume, CreateError::Note(error))),
        }
    }
}

impl Pool {
    /// Opens a lane that is turned to no volume: it has no pages until it is
    /// [turned](Lane::turn) to one. See [`Volume::lane`].
    ///
    /// # Errors
    /// Fails as [`Volume::lane`] does.
    pub fn lane(self: &Arc<Self>) -> Result<Lane, OpenError> {
        let mut lane = Volume::over(self, 0..0).lane()?;
        // The volume above has no other owner, so the lane's first turn frees it. That happens
        // here, and not later on an I/O thread, which must not free memory.
        lane.turn(None);
        Ok(lane)
    }

    /// Opens a lane that reaches the pages of all volumes by their
    /// [numbers in the pool](Volume::page_in_pool). Its owner must hold a volume from before an
    /// operation on the volume's pages begins until that operation has ended.
    ///
    /// # Errors
    /// Fails as [`Volume::lane`] does.
    pub fn lane_of_all(self: &Arc<Self>) -> Result<Lane, OpenError> {
        Volume::whole(self).lane()
    }

    /// Makes a volume of `pages` pages, which are all empty. The caller must record its range for
    /// the next daemon before anything is written to it.
    ///
    /// # Errors
    /// Fails when the pool has promised too many pages to other volumes, no range of free page
    /// numbers is long enough, or there is no memory for the map.
    pub fn volume(self: &Arc<Self>, pages: u32) -> Result<Arc<Volume>, CreateError> {
        if pages == 0 {
            return Err(CreateError::Shape { pages, stores: self.tiers.len() });
        }
        let range = self.reserve(pages, |ranges| {
            let range = ranges.find(pages).map_err(|longest| CreateError::NoRange { pages, longest })?;
            let is_free = ranges.insert(range.clone());
            debug_assert!(is_free, "it was just found");
            Ok(range)
        })?;
        if let Err(error) = self.map.take(range.clone()) {
            self.give(range.start, 0, range.end);
            return Err(unmapped(&range, error));
        }
        Ok(Volume::over(self, range))
    }

    /// Calls `take` to reserve page numbers, if the pool has room for `pages` more pages.
    fn reserve<T>(
        &self,
        pages: u32,
        take: impl FnOnce(&mut Ranges) -> Result<T, CreateError>,
    ) -> Result<T, CreateError> {
        let mut ranges = self.ranges();
        let free = self.room(&ranges);
        if pages > free {
            return Err(CreateError::NoRoom { pages, free });
        }
        take(&mut ranges)
    }

    /// Shrinks the range that begins at `first` and ends at `end` to `pages` pages. Gives back the
    /// memory of the map's entries for the other pages.
    fn give(&self, first: u32, pages: u32, mut end: u32) {
        while end > first + pages {
            end = self.give_some(first, pages, end);
        }
    }

    /// Does a bounded part of what [`give`](Pool::give) does, from the end on. Returns the range's
    /// new end.
    fn give_some(&self, first: u32, pages: u32, end: u32) -> u32 {
        let rest = (first + pages).max(end.saturating_sub(GIVE_AT_ONCE));
        // This lock keeps movers from reading entries whose memory is given back: a read would take
        // the memory again.
        let mut ranges = self.ranges();
        self.map.give(whole(rest)..whole(end));
        ranges.resize(first, rest - first);
        rest
    }

    /// Number of pages by which the pool's volumes can still grow together.
    pub fn free_pages(&self) -> u32 {
        self.room(&self.ranges())
    }

    fn room(&self, ranges: &Ranges) -> u32 {
        let most = self.open_slots().saturating_sub(self.config.slack()).min(self.config.pages);
        most.saturating_sub(ranges.pages())
    }

    /// A page's entry, or `None` if no volume has the page. Movers read entries by this, because
    /// reading the entry of a page that no volume has would take memory.
    pub(crate) fn entry(&self, page: PageNo) -> Option<Entry> {
        let ranges = self.ranges();
        ranges.has(page).then(|| self.map.load(page))
    }

    /// Replaces a page's entry in the map, if a volume has the page and the entry is still `was`.
    /// Returns whether it did.
    pub(crate) fn replace(&self, page: PageNo, was: Entry, entry: Entry) -> bool {
        let ranges = self.ranges();
        ranges.has(page) && self.map.replace(page, was, entry)
    }

    /// Finds the first of `pages` that a volume has and whose place `there` accepts, and returns it
    /// with its place. `Err` is the page at which to go on.
    pub(crate) fn find(
        &self,
        pages: Range<u32>,
        there: impl Fn(Place) -> bool,
    ) -> Result<(PageNo, Place), u32> {
        let ranges = self.ranges();
        let Some(volume) = ranges.from(pages.start) else { return Err(PAGES_MAX) };
        let end = pages.end.min(volume.end).max(volume.start);
        let mut places =
            (pages.start.max(volume.start)..end).map(|at| (PageNo(at), self.map.load(PageNo(at)).place()));
        places.find(|(_, place)| there(*place)).ok_or(end)
    }

    pub(crate) fn ranges(&self) -> MutexGuard<'_, Ranges> {
        self.ranges.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Locks out other changes of volumes' sizes, so that changes and their notes come one after
    /// another.
    fn changing(&self) -> MutexGuard<'_, ()> {
        self.changing.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

fn unmapped(pages: &Range<u32>, source: io::Error) -> CreateError {
    CreateError::Memory { bytes: words(pages).1 as u64, source }
}

impl Removal {
    /// The first page to discard next, and the number of pages, at most `most`.
    pub(crate) fn next(&self, most: u32) -> (PageNo, u32) {
        (PageNo(self.next), most.min(self.volume.range().end - self.next))
    }

    /// Notes that `count` more pages were discarded. Returns true after the last page: then another
    /// volume may take the range.
    pub(crate) fn advance(&mut self, count: u32) -> bool {
        self.next += count;
        let Range { start, end } = self.volume.range();
        let has_ended = self.next == end;
        // Give the page numbers back only once. By a later call, another volume may have them.
        if has_ended && end - start > self.rest {
            let pool = &self.volume.pool;
            self.next = start + self.rest;
            self.volume.pages.store(self.rest, Ordering::Release);
            pool.give(start, self.rest, end);
        }
        has_ended
    }

    pub(crate) fn pool(&self) -> &Arc<Pool> {
        &self.volume.pool
    }

    /// Number of pages that are not discarded yet.
    pub fn pages_left(&self) -> u32 {
        self.volume.range().end - self.next
    }

    /// Returns the volume with the pages that it keeps, or `None` if it keeps none. `Err`: its last
    /// pages are not all discarded yet.
    pub fn rest(self) -> Result<Option<Arc<Volume>>, Self> {
        match self.volume.pages() {
            pages if pages > self.rest => Err(self),
            0 => Ok(None),
            _ => Ok(Some(self.volume)),
        }
    }
}

#[cfg(all(test, not(loom)))]
mod tests {
    use super::*;
    use crate::map::LOOKS;
    use std::time::Instant;
    use weir_core::ByteSize;
    use weir_store::{Progress, Sim, SimUrl};

    fn settle(lane: &mut Lane) {
        while lane.in_flight() > 0 {
            lane.submit();
            lane.poll(Instant::now(), &mut |_| {});
        }
        lane.submit();
    }

    fn write(lane: &mut Lane, page: u32, with: u8) {
        let bytes = std::array::from_fn(|at| at as u8 ^ with);
        assert_eq!(lane.write(page, PageNo(page), &bytes), Progress::Queued);
        settle(lane);
    }

    #[test]
    fn a_mover_looks_at_a_page_s_entry_only_while_no_volume_can_go() {
        let config = Config { pages: 64, lanes: 2, depth: 4 };
        let host = weir_store::Host::new(config.slots()).expect("memory");
        let pool = Pool::create(config, vec![Arc::new(host)]).expect("a pool");
        let volume = pool.volume(64).expect("room");
        let bytes = std::array::from_fn(|at| at as u8);
        assert_eq!(volume.lane().expect("a lane").write(0, PageNo(3), &bytes), Progress::Done(Ok(())));
        let mut mover = Lane::open(Volume::whole(&pool), 16, 0).expect("a lane");
        let (page, before) = (PageNo(3), pool.map.load(PageNo(3)));
        let its = Arc::clone(&pool);
        let look = move || assert!(its.ranges.try_lock().is_err(), "the volume could go now");
        LOOKS.set(Some(Box::new(look)));
        assert_eq!(mover.move_page(0, page, before.place()), Progress::Done(Ok(())));
        LOOKS.set(None);
        assert!(pool.map.load(page).place() != before.place(), "it was moved");
    }

    #[test]
    fn the_map_of_a_large_volume_is_given_back_a_part_at_a_time() {
        let config = Config { pages: 4 * GIVE_AT_ONCE, lanes: 1, depth: 4 };
        let host = weir_store::Host::new(config.slots()).expect("memory");
        let pool = Pool::create(config, vec![Arc::new(host)]).expect("a pool");
        let volume = pool.volume(GIVE_AT_ONCE * 2 + 700).expect("room");
        let range = volume.range();
        let rest = pool.give_some(range.start, 100, range.end);
        assert_eq!(pool.ranges().pages(), GIVE_AT_ONCE + 700, "others have the lock now");
        assert_eq!(rest, range.start + GIVE_AT_ONCE + 700);
        pool.give(range.start, 100, rest);
        assert_eq!(pool.ranges().pages(), 100);
        assert_eq!(pool.map_bytes(), 4096, "one part is left");
    }

    #[test]
    fn a_page_that_is_being_moved_never_shows_in_the_next_volume_that_has_its_number() {
        let config = Config { pages: 64, lanes: 3, depth: 16 };
        let size = ByteSize(u64::from(config.slots()) * PAGE_SIZE as u64);
        let sim = Sim::open(SimUrl { size, delay: 1, ..SimUrl::default() }).expect("memory");
        let pool = Pool::create(config, vec![Arc::new(sim)]).expect("a pool");
        let mut mover = Lane::open(Volume::whole(&pool), 16, 0).expect("a lane");
        let mut remover = pool.mover().expect("a mover");
        let volume = pool.volume(64).expect("room");
        write(&mut volume.lane().expect("a lane"), 0, 1);
        let before = pool.map.load(PageNo(0));
        // The page was read, and is on its way to its new place.
        assert_eq!(mover.move_page(0, PageNo(0), before.place()), Progress::Queued);
        mover.submit();
        mover.poll(Instant::now(), &mut |_| panic!("it is written yet"));
        let mut removal = volume.shrink(0, |_| Ok(())).expect("nobody holds it");
        while !remover.remove(&mut removal, 16) {}
        let next = pool.volume(64).expect("room");
        // The mover reads on, in another epoch: its pin does not hold the old place back any more.
        write(&mut next.lane().expect("a lane"), 5, 5);
        assert_eq!(mover.read(1, PageNo(5), &mut [0; PAGE_SIZE]), Progress::Queued);
        mover.submit();
        write(&mut next.lane().expect("a lane"), 0, 9);
        let after = pool.map.load(PageNo(0));
        assert_eq!((next.range(), after.place()), (0..64, before.place()), "the same number and slot");
        settle(&mut mover);
        let (mut lane, mut found) = (next.lane().expect("a lane"), None);
        assert_eq!(lane.read(0, PageNo(0), &mut [0; PAGE_SIZE]), Progress::Queued);
        lane.submit();
        lane.poll(Instant::now(), &mut |done| found = Some((done.result, done.page.map(|page| page[0]))));
        assert_eq!(found, Some((Ok(()), Some(9))), "what the new volume's client wrote");
    }
}
