//! Volumes: each has a range of its pool's pages for itself.
//!
//! A page of a volume is the page of the pool that lies as far behind the range's first. So a lane
//! translates by one addition, and pages that follow one another in a volume do so in the pool.
//! Records, checksums and packs name pages of the pool. So everything that moves pages serves all
//! volumes at once.
//!
//! A range stays its volume's until [`Mover::remove`](crate::Mover::remove) has discarded the last
//! page. Only a volume that nobody holds can be removed, and each lane holds its own. So nothing
//! that is late can write to the pages of the next volume there.

use crate::entry::Place;
use crate::lane::{self, Lane};
use crate::{Config, CreateError, Pool};
use std::ops::{Deref, Range};
use std::sync::{Arc, MutexGuard, PoisonError};
use weir_core::{PAGE_SIZE, PageNo};
use weir_store::{OpenError, Store};

/// A volume: pages by number, from 0 on. What volumes share is asked of their [`Pool`].
#[derive(Debug)]
pub struct Volume {
    pool: Arc<Pool>,
    range: Range<u32>,
}

/// A volume that is being removed; [`Mover::remove`](crate::Mover::remove) goes on. If this is
/// dropped before its end, the pages stay taken.
#[derive(Debug)]
pub struct Removal {
    pool: Arc<Pool>,
    range: Range<u32>,
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
    /// Fails as [`Pool::create`] does.
    pub fn create(config: Config, stores: Vec<Arc<dyn Store>>) -> Result<Arc<Self>, CreateError> {
        Pool::create(config, stores)?.reopen(0..config.pages)
    }

    /// Every page of a pool, for a mover.
    pub(crate) fn whole(pool: &Arc<Pool>) -> Arc<Self> {
        Arc::new(Volume { pool: Arc::clone(pool), range: 0..pool.pages() })
    }

    /// The pool that keeps its pages.
    pub fn pool(&self) -> &Arc<Pool> {
        &self.pool
    }

    /// The volume's size in pages.
    pub fn pages(&self) -> u32 {
        self.range.end - self.range.start
    }

    /// The volume's size in bytes.
    pub fn bytes(&self) -> u64 {
        u64::from(self.pages()) * PAGE_SIZE as u64
    }

    /// The volume's pages in its pool, by which [`Pool::reopen`] finds it again.
    pub fn range(&self) -> Range<u32> {
        self.range.clone()
    }

    /// Opens a lane, which belongs to one thread. It takes [`Config::lane_slots`] of the slack.
    /// Dropping it waits for nothing. It gives its part of the slack back at once, or, if a store
    /// still works for it, [once that has ended](Pool::close_lanes). A write that was not handed
    /// over by then takes no effect.
    ///
    /// # Errors
    /// Fails with [`OpenErrorKind::Slack`](weir_store::OpenErrorKind::Slack) when too little slack
    /// is left, or when a store has no memory for the lane.
    pub fn lane(self: &Arc<Self>) -> Result<Lane, OpenError> {
        Lane::open(Arc::clone(self), lane::PARTS, PAGE_SIZE)
    }

    /// Begins to remove the volume. From here on nobody can open a lane of it.
    ///
    /// # Errors
    /// Returns the volume if anybody else holds it, as a lane does.
    pub fn remove(self: Arc<Self>) -> Result<Removal, Arc<Self>> {
        let Volume { pool, range } = Arc::try_unwrap(self)?;
        Ok(Removal { pool, next: range.start, range })
    }
}

impl Pool {
    /// Makes a volume of `pages` pages, which are all empty.
    ///
    /// # Errors
    /// Fails when no range of free pages is that long.
    pub fn volume(self: &Arc<Self>, pages: u32) -> Result<Arc<Volume>, CreateError> {
        if pages == 0 {
            return Err(CreateError::Shape { pages, stores: self.tiers.len() });
        }
        let mut taken = self.taken();
        let (mut first, mut longest) = (0, 0);
        for at in 0..=taken.len() {
            let end = taken.get(at).map_or(self.pages(), |next| next.start);
            let mut start = first;
            for page in first..end {
                // After a take-over, pages that nobody has named yet may be those of a volume.
                if self.map.load(PageNo(page)).place() != Place::Empty {
                    start = page + 1;
                } else if page + 1 - start == pages {
                    taken.insert(at, start..page + 1);
                    return Ok(Arc::new(Volume { pool: Arc::clone(self), range: start..page + 1 }));
                }
                longest = longest.max(page + 1 - start);
            }
            first = taken.get(at).map_or(end, |next| next.end);
        }
        Err(CreateError::NoRange { pages, longest })
    }

    /// Opens the volume that an earlier daemon had in this [range](Volume::range) of the pool's
    /// pages, with all that it holds.
    ///
    /// # Errors
    /// Fails when the pool has no such pages, or another volume has one of them.
    pub fn reopen(self: &Arc<Self>, range: Range<u32>) -> Result<Arc<Volume>, CreateError> {
        let mut taken = self.taken();
        let at = taken.partition_point(|it| it.end <= range.start);
        let end = taken.get(at).map_or(self.pages(), |next| next.start);
        if range.is_empty() || range.end > end {
            let what = format!("pages {range:?} are not free in the pool of {} pages", self.pages());
            return Err(CreateError::Kept(what));
        }
        taken.insert(at, range.clone());
        Ok(Arc::new(Volume { pool: Arc::clone(self), range }))
    }

    fn taken(&self) -> MutexGuard<'_, Vec<Range<u32>>> {
        self.taken.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl Removal {
    pub(crate) fn pool(&self) -> &Arc<Pool> {
        &self.pool
    }

    /// The pages to discard next, at most `most`.
    pub(crate) fn next(&self, most: u32) -> (PageNo, u32) {
        (PageNo(self.next), most.min(self.range.end - self.next))
    }

    /// Notes that so many pages were discarded. After the last another volume may take the range;
    /// then this returns true.
    pub(crate) fn advance(&mut self, count: u32) -> bool {
        self.next += count;
        let has_ended = self.next == self.range.end;
        if has_ended && !self.range.is_empty() {
            self.pool.taken().retain(|range| *range != self.range);
            // A second end frees nothing: the range may be another's by then.
            (self.range, self.next) = (0..0, 0);
        }
        has_ended
    }
}
