//! Takes over the pages of a daemon that has died.
//!
//! The keeper holds three kinds of memory for a pool: the page map, the slot records of each store,
//! and (for a host store) the pages. The map decides which slots, and which pages of a pack, are
//! valid. A record that the map does not name belongs to a write that was never acknowledged, or to
//! a slot that was just freed. That slot is free at once. But if the write may still be on its way
//! to a disk, the slot is free only once that write is over. An entry that its record contradicts
//! is damaged. Its page is lost, and reading it fails.

use crate::entry::{Entry, Place};
use crate::map::Map;
use crate::ranges::Ranges;
use crate::records::{Occupant, Records};
use crate::{Config, CreateError, Pool, Tier, Volume, check, chunks, pages_as_size};
use std::ops::Range;
use std::os::fd::BorrowedFd;
use std::sync::Arc;
use weir_core::{Memory, PageNo, Slot};
use weir_store::Store;

/// The memory that must survive for a pool to be taken over; the stores keep the pages
/// themselves.
#[derive(Debug)]
pub struct Kept {
    /// The page map.
    pub map: Memory,
    /// The slot records, one for each store, in order.
    pub records: Vec<Memory>,
}

/// The descriptors of the memory in [`Kept`], for the keeper.
#[derive(Debug)]
pub struct KeptFds<'a> {
    /// The page map.
    pub map: BorrowedFd<'a>,
    /// The slot records, one for each store, in order.
    pub records: Vec<BorrowedFd<'a>>,
}

/// A pool that was taken over, its volumes, and the number of pages that were lost.
pub type TakenOver = (Arc<Pool>, Vec<Arc<Volume>>, u64);

impl Volume {
    /// Takes over a pool that has one volume of all its pages, from 0 on; see [`Pool::take_over`].
    ///
    /// # Errors
    /// Fails as [`Pool::take_over`] does.
    pub fn take_over(
        config: Config,
        stores: Vec<Arc<dyn Store>>,
        kept: Kept,
    ) -> Result<(Arc<Self>, u64), CreateError> {
        let all = 0..config.pages;
        let (_, mut volumes, lost) = Pool::take_over(config, stores, kept, &[all])?;
        Ok((volumes.remove(0), lost))
    }
}

/// A set of slots, one bit for each.
struct Bitmap(Vec<u64>);

impl Bitmap {
    fn new(slots: u32) -> Self {
        Bitmap(vec![0; slots.div_ceil(64) as usize])
    }

    fn insert(&mut self, slot: Slot) {
        self.0[slot.0 as usize / 64] |= 1 << (slot.0 % 64);
    }

    fn contains(&self, slot: Slot) -> bool {
        self.0[slot.0 as usize / 64] & 1 << (slot.0 % 64) != 0
    }
}

impl Pool {
    /// The descriptors that a keeper must map and lock, and hand to the next daemon.
    pub fn kept_fds(&self) -> KeptFds<'_> {
        KeptFds {
            map: self.map.memory().fd().expect("the map is a memfd"),
            records: self
                .tiers
                .iter()
                .map(|tier| tier.records.memory().fd().expect("records are a memfd"))
                .collect(),
        }
    }

    /// Takes over the pool that an earlier daemon left. That daemon must have ended: nothing here
    /// keeps it from writing. `stores` must be that daemon's, in the same order, and `volumes` the
    /// [ranges](Volume::range) of its volumes. Other pages belong to volumes that were being made
    /// or removed, and are dropped: without `volumes` every page is.
    ///
    /// Returns the pool, its volumes in the order of `volumes`, and the number of lost pages.
    ///
    /// # Errors
    /// Fails when the sizes of stores and memory do not match, when volumes overlap or are too
    /// large, or when a store does not keep its pages beyond its process.
    pub fn take_over(
        config: Config,
        stores: Vec<Arc<dyn Store>>,
        kept: Kept,
        volumes: &[Range<u32>],
    ) -> Result<TakenOver, CreateError> {
        check(&config, &stores)?;
        if kept.records.len() != stores.len() {
            let what = format!("it had {} stores, and {} were given", kept.records.len(), stores.len());
            return Err(CreateError::Kept(what));
        }
        if kept.map.len() != Map::BYTES {
            let what = format!("its page map has {} bytes, and one has {}", kept.map.len(), Map::BYTES);
            return Err(CreateError::Kept(what));
        }
        let mut ranges = Ranges::default();
        if let Some(volume) = volumes.iter().find(|volume| !ranges.insert((*volume).clone())) {
            let what = format!("one volume has the pages {volume:?}, and so has another");
            return Err(CreateError::Kept(what));
        }
        if ranges.pages() > config.pages {
            let [all, most] = [ranges.pages(), config.pages].map(pages_as_size);
            return Err(CreateError::Kept(format!(
                "its volumes are {all} large, and there is room for {most}"
            )));
        }
        if let Some(store) = stores.iter().find(|store| store.survive().is_none()) {
            return Err(CreateError::Kept(format!("the pages of {} ended with it", store.name())));
        }
        for (store, memory) in stores.iter().zip(&kept.records) {
            if memory.len() != Memory::whole(Records::bytes(store.slots(), chunks::count(&**store))) {
                let what =
                    format!("its records are not those of {} with {} slots", store.name(), store.slots());
                return Err(CreateError::Kept(what));
            }
        }
        let mut recovery = Recovery::begin(stores, kept, volumes.to_vec(), ranges);
        for step in Recovery::STEPS {
            step(&mut recovery)?;
        }
        Ok(recovery.end(config))
    }
}

/// A takeover under way. Its steps change the map and the records, which the keeper holds. If this
/// process dies after any of them, the next daemon begins again with the first step.
struct Recovery {
    map: Map,
    tiers: Vec<Tier>,
    volumes: Vec<Range<u32>>,
    ranges: Ranges,
    /// The slots of pages that belong to no volume.
    dropped: Vec<Bitmap>,
    /// The slots of pages that belong to a volume.
    named: Vec<Bitmap>,
    lost: u64,
    stored: u64,
    filled: u64,
    packed: u64,
    packs: u64,
}

type RecoveryStep = fn(&mut Recovery) -> Result<(), CreateError>;

impl Recovery {
    /// The steps, in order. A dropped page's record is freed before the map forgets the page. In
    /// the other order, a death between the two steps would leave a record that the map does not
    /// name. The next daemon would take that record for a write under way, and put the slot into
    /// quarantine.
    const STEPS: [RecoveryStep; 5] = [
        Self::find_dropped,
        Self::count_volumes,
        Self::free_dropped,
        Self::empty_the_map_outside,
        Self::keep_only_named,
    ];

    fn begin(stores: Vec<Arc<dyn Store>>, kept: Kept, volumes: Vec<Range<u32>>, ranges: Ranges) -> Self {
        let tiers: Vec<Tier> = stores
            .into_iter()
            .zip(kept.records)
            .map(|(store, memory)| {
                let records = Records::over(memory, store.slots());
                Tier::new(store, records)
            })
            .collect();
        let bitmaps = || tiers.iter().map(|tier| Bitmap::new(tier.records.slots())).collect();
        let (dropped, named) = (bitmaps(), bitmaps());
        let map = Map::over(kept.map);
        let (lost, stored, filled, packed, packs) = (0, 0, 0, 0, 0);
        Recovery { map, tiers, volumes, ranges, dropped, named, lost, stored, filled, packed, packs }
    }

    /// Finds the slots of pages that belong to no volume. Such a page was published, so no write to
    /// its slot is under way.
    fn find_dropped(&mut self) -> Result<(), CreateError> {
        let look = |page, entry: Entry| {
            if let Place::Stored { store, slot } = entry.place()
                && let Some(tier) = self.tiers.get(store).filter(|tier| slot.0 < tier.records.slots())
                && tier.records.occupant(slot).is_some_and(|it| it.is_pack() || it.page == page)
            {
                self.dropped[store].insert(slot);
            }
        };
        let bytes = Map::BYTES as u64;
        self.map.each_outside(&self.ranges, look).map_err(|source| CreateError::Memory { bytes, source })
    }

    /// Checks each entry of the volumes against its slot's record, and counts the pages of each
    /// pack anew.
    fn count_volumes(&mut self) -> Result<(), CreateError> {
        self.tiers.iter().for_each(|tier| tier.records.forget_pack_pages());
        for page in self.volumes.iter().cloned().flatten().map(PageNo) {
            let entry = self.map.load(page);
            match entry.place() {
                Place::Empty | Place::Lost => {}
                Place::Fill(_) => self.filled += 1,
                Place::Stored { store, slot } => {
                    let found = self.tiers.get(store).filter(|tier| slot.0 < tier.records.slots());
                    let occupant = found.and_then(|tier| tier.records.occupant(slot));
                    let is_pack = occupant.is_some_and(Occupant::is_pack);
                    // The record of a single page names that page, so two pages never share its
                    // slot by mistake. A pack's record names no page, so it fits any. A later read
                    // of the pack decides whether the page is in it.
                    if found.is_some_and(|tier| tier.records.names(slot, page)) {
                        self.packs += u64::from(is_pack && !self.named[store].contains(slot));
                        self.packed += u64::from(is_pack);
                        self.named[store].insert(slot);
                        self.stored += 1;
                    } else {
                        self.map.set(page, Entry::new(Place::Lost, entry.next_generation()));
                        self.lost += 1;
                    }
                }
            }
        }
        Ok(())
    }

    /// Frees the slots of dropped pages. A pack stays if a volume has one of its pages.
    fn free_dropped(&mut self) -> Result<(), CreateError> {
        for ((tier, named), dropped) in self.tiers.iter_mut().zip(&self.named).zip(&self.dropped) {
            tier.records.keep_only(|slot| named.contains(slot) || !dropped.contains(slot));
        }
        Ok(())
    }

    fn empty_the_map_outside(&mut self) -> Result<(), CreateError> {
        self.map.keep_only(&self.ranges);
        Ok(())
    }

    /// Frees the slots that no page names, or puts them into quarantine.
    fn keep_only_named(&mut self) -> Result<(), CreateError> {
        for (tier, named) in self.tiers.iter_mut().zip(&mut self.named) {
            // Ask the store before the slots are freed. If the dead daemon's I/O is over now, none
            // of it can begin again.
            if !tier.is_quiet() {
                let under_way = tier.records.claimed(|slot| named.contains(slot));
                under_way.iter().for_each(|slot| named.insert(*slot));
                tier.quarantine.fill(under_way);
            }
            tier.records.keep_only(|slot| named.contains(slot));
            tier.adopt_chunks();
        }
        Ok(())
    }

    fn end(self, config: Config) -> TakenOver {
        let pool = Pool::assemble(config, self.map, self.tiers);
        *pool.ranges() = self.ranges;
        // The first seat's counters begin with the numbers of pages that were taken over. No lane
        // has been opened yet, so no other thread writes the counters.
        let metrics = pool.seats.seat(0).metrics(pool.tiers.len());
        metrics.stored.add(self.stored);
        metrics.filled.add(self.filled);
        metrics.packed.add(self.packed);
        metrics.packs.add(self.packs);
        let volumes = self.volumes.iter().map(|range| Volume::over(&pool, range.clone())).collect();
        (pool, volumes, self.lost)
    }
}

#[cfg(all(test, not(loom)))]
mod tests {
    use super::*;
    use crate::Lane;
    use std::time::Instant;
    use weir_core::{ByteSize, PAGE_SIZE, PageBytes};
    use weir_store::{Fault, Host, Progress, Sim, SimUrl};

    #[test]
    fn of_two_pages_that_name_one_slot_the_one_that_its_record_names_is_there_and_the_other_lost() {
        let config = Config { pages: 8, lanes: 1, depth: 4 };
        let host = Host::new(config.slots()).expect("memory");
        let adopt = |fd: BorrowedFd<'_>| {
            Memory::adopt(fd.try_clone_to_owned().expect("a descriptor")).expect("a mapping")
        };
        let pages = adopt(host.fd());
        let volume = Volume::create(config, vec![Arc::new(host)]).expect("a volume");
        let content: PageBytes = std::array::from_fn(|at| ((at * 7) >> 3) as u8);
        let mut lane = volume.lane().expect("a lane");
        assert_eq!(lane.write(0, PageNo(3), &content), Progress::Done(Ok(())));
        lane.submit();
        // Three pages name one slot, whose record names page 3. Page 2 is looked at before page 3,
        // and page 5 after it.
        for page in [2, 5] {
            volume.map.set(PageNo(page), volume.map.load(PageNo(3)));
        }
        let fds = volume.kept_fds();
        let kept = Kept { map: adopt(fds.map), records: fds.records.into_iter().map(adopt).collect() };
        drop((lane, volume));
        let (volume, lost) =
            Volume::take_over(config, vec![Arc::new(Host::adopt(pages))], kept).expect("a volume");
        assert_eq!(lost, 2);
        let mut lane = volume.lane().expect("a lane");
        let mut read = |page| {
            let mut found = [0; PAGE_SIZE];
            (lane.read(0, PageNo(page), &mut found), found == content)
        };
        assert_eq!(read(3), (Progress::Done(Ok(())), true));
        assert_eq!([2, 5].map(|page| read(page).0), [Progress::Done(Err(Fault::Lost)); 2]);
    }

    /// Polls until the lane's operation is done, and returns the page that it read.
    fn answer(lane: &mut Lane) -> Option<PageBytes> {
        let mut page = None;
        while lane.in_flight() > 0 {
            lane.submit();
            lane.poll(Instant::now(), &mut |done| {
                assert_eq!(done.result, Ok(()));
                page = done.page.copied();
            });
        }
        page
    }

    #[test]
    fn a_death_after_any_step_leaves_the_next_daemon_the_same_pages_and_the_same_free_slots() {
        let config = Config { pages: 300, lanes: 2, depth: 16 };
        let content = |page: u32| std::array::from_fn::<u8, PAGE_SIZE, _>(|at| (at as u32 * 7 + page) as u8);
        for dies_after in 0..=Recovery::STEPS.len() {
            let size = ByteSize(u64::from(config.slots()) * PAGE_SIZE as u64);
            let sim = Arc::new(Sim::open(SimUrl { size, delay: 1, ..SimUrl::default() }).expect("a store"));
            let stores = || vec![Arc::clone(&sim) as Arc<dyn Store>];
            let pool = Pool::create(config, stores()).expect("a pool");
            let [removed, stays] = [100, 150].map(|pages| {
                let volume = pool.volume(pages).expect("a volume");
                let mut lane = volume.lane().expect("a lane");
                for page in 0..pages {
                    assert_eq!(lane.write(0, PageNo(page), &content(pages + page)), Progress::Queued);
                    answer(&mut lane);
                }
                volume
            });
            // The daemon dies while a write is under way, so the store is not quiet.
            let mut lane = stays.lane().expect("a lane");
            assert_eq!(lane.write(0, PageNo(0), &content(1)), Progress::Queued);
            lane.submit();
            sim.let_writes_outlive_lanes(true);
            lane.abandon();
            let fds = pool.kept_fds();
            let adopt = |fd: &BorrowedFd<'_>| {
                Memory::adopt(fd.try_clone_to_owned().expect("a descriptor")).expect("a mapping")
            };
            let kept = || Kept { map: adopt(&fds.map), records: fds.records.iter().map(adopt).collect() };
            let (noted, removed) = (stays.range(), removed.range());
            let mut ranges = Ranges::default();
            assert!(ranges.insert(noted.clone()) && !ranges.has(PageNo(removed.start)));
            let mut dying = Recovery::begin(stores(), kept(), vec![noted.clone()], ranges);
            Recovery::STEPS[..dies_after].iter().for_each(|step| step(&mut dying).expect("memory"));
            drop(dying);
            let (next, volumes, lost) = Pool::take_over(config, stores(), kept(), &[noted]).expect("a pool");
            let used = next.status().stores[0].used;
            assert_eq!((used, lost), (150 + 1, 0), "after {dies_after} steps: pages, and a write under way");
            let mut lane = volumes[0].lane().expect("a lane");
            for page in 0..150 {
                assert_eq!(lane.read(0, PageNo(page), &mut [0; PAGE_SIZE]), Progress::Queued);
                assert!(
                    answer(&mut lane) == Some(content(150 + page)),
                    "page {page} after {dies_after} steps"
                );
            }
        }
    }
}
