//! Lends pages where they lie. A lent slot stays unchanged until the borrower returns it, even if
//! its page is written anew meanwhile.
//!
//! A lane's pin would keep a lent slot unchanged too. But a pin holds back every slot of the pool,
//! and a borrower may be slow. So each lent slot has a count, and a lane that unlinks a slot from
//! the map checks its count. The lender counts first and then reads the map once more. The writer
//! unlinks first and then reads the count. So at least one of the two sees the other. A slot that
//! was unlinked while it was lent keeps its record. So no lane can claim it, and its chunk cannot
//! be released. The return of the slot retires it.

use crate::entry::Place;
use crate::lane::Guard;
use crate::sync::{AtomicU8, Ordering, fence};
use crate::{Pool, Tier};
use std::fmt;
use std::io;
use std::os::fd::OwnedFd;
use std::sync::Arc;
use weir_core::{PageNo, Slot};
use weir_device::View;
use weir_store::{OpenError, OpenErrorKind, Share};

/// The bit of a lent slot's byte that is set once the map no longer names the slot. The last return
/// of the slot then frees it.
const UNLINKED: u8 = 1 << 7;
/// Largest number of borrowers that one slot can have at once.
const TIMES_MAX: u8 = UNLINKED - 1;

/// The number of borrowers of each slot of a store, a byte each.
pub(crate) struct Lent(Box<[AtomicU8]>);

impl Lent {
    pub fn new(slots: u32) -> Self {
        Lent((0..slots).map(|_| AtomicU8::new(0)).collect())
    }

    fn byte(&self, slot: Slot) -> &AtomicU8 {
        &self.0[slot.0 as usize]
    }

    /// Counts one more borrower of a slot; only the pool's one lender calls this. Returns `None` if
    /// the slot has [`TIMES_MAX`] borrowers, else whether this is its first. The caller must then
    /// check that the map still names the slot.
    fn lend(&self, slot: Slot) -> Option<bool> {
        let byte = self.byte(slot);
        let times = byte.load(Ordering::Relaxed) & TIMES_MAX;
        if times == TIMES_MAX {
            return None;
        }
        // A plain store would be wrong: a writer may set UNLINKED at this moment.
        byte.fetch_add(1, Ordering::SeqCst);
        fence(Ordering::SeqCst);
        Some(times == 0)
    }

    /// Whether a slot that was just unlinked from the map may be freed. If it is lent, it may not,
    /// and its last return frees it.
    #[inline]
    pub fn may_free(&self, slot: Slot) -> bool {
        fence(Ordering::SeqCst);
        let byte = self.byte(slot);
        let mut was = byte.load(Ordering::SeqCst);
        while was & TIMES_MAX > 0 {
            match byte.compare_exchange(was, was | UNLINKED, Ordering::SeqCst, Ordering::SeqCst) {
                Ok(_) => return false,
                Err(now) => was = now,
            }
        }
        true
    }

    /// Takes a slot back from one borrower; only the one lender calls this.
    fn give(&self, slot: Slot) -> Back {
        // This subtraction orders the borrower's reads before the writes of the slot's next owner.
        match self.byte(slot).fetch_sub(1, Ordering::SeqCst) - 1 {
            0 => Back::Last,
            UNLINKED => {
                self.byte(slot).store(0, Ordering::SeqCst);
                Back::LastAndFree
            }
            _ => Back::More,
        }
    }
}

impl fmt::Debug for Lent {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Lent({} slots)", self.0.len())
    }
}

/// The state of a slot after a return.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
enum Back {
    /// Other borrowers still have the slot.
    More,
    /// The borrower was the last one, and the page still lies in the slot.
    Last,
    /// The borrower was the last one, and the slot is free now.
    LastAndFree,
}

/// A lender: lends pages of a pool where they lie. A pool has at most one, and it belongs to
/// one thread.
///
/// A lent slot stays taken even if its page is written anew, so it takes room that the pool has
/// promised to writers. Therefore a lender takes a part of the slack, as lanes do. It never lends
/// more slots than that part has.
#[derive(Debug)]
pub struct Lender {
    pool: Arc<Pool>,
    /// For each store, whether its slots can be lent.
    lends: Vec<bool>,
    out: u32,
    most: u32,
}

/// The answer to a request for a page.
pub enum Loan<'a> {
    /// The page lies in this slot, verified, and stays unchanged until [`Lender::give`].
    Lent {
        /// The store's index.
        store: usize,
        /// The slot in that store.
        slot: Slot,
    },
    /// The page cannot be lent, at least not now. Instead it is shown, as [`Guard::view`] shows it.
    Shown(View<'a>),
}

/// A store's memory, for borrowers to map: the store's index, and a descriptor.
pub type Window = (usize, OwnedFd);

impl Lender {
    /// Number of slots that are lent now.
    pub fn out(&self) -> u32 {
        self.out
    }

    /// Largest number of slots that can be lent at a time.
    pub fn most(&self) -> u32 {
        self.most
    }

    /// The pool whose pages are lent.
    pub fn pool(&self) -> &Arc<Pool> {
        &self.pool
    }

    /// Takes the slot of a [`Loan`] back from one borrower. Returns whether no borrower has the
    /// slot any more.
    pub fn give(&mut self, store: usize, slot: Slot) -> bool {
        let records = &self.pool.tiers[store].records;
        let back = records.lent().map_or(Back::More, |lent| lent.give(slot));
        if back == Back::LastAndFree {
            records.retire(slot, || self.pool.epochs.now());
        }
        self.out -= u32::from(back != Back::More);
        back != Back::More
    }

    /// Lends the slot that the map named for `page`, unless the page has been written since.
    fn lend(&mut self, page: PageNo, here: Place) -> bool {
        let Place::Stored { store, slot } = here else { return false };
        let records = &self.pool.tiers[store].records;
        let Some(lent) = records.lent().filter(|_| self.out < self.most) else { return false };
        let Some(first) = lent.lend(slot) else { return false };
        self.out += u32::from(first);
        let still = self.pool.map.load(page).place() == here;
        if !still {
            self.give(store, slot);
        }
        still
    }
}

impl Drop for Lender {
    fn drop(&mut self) {
        // Slots that were not returned stay lent. So the lender's part of the slack stays taken.
        if self.out == 0 {
            self.pool.seats.give_slack(self.most);
            self.pool.lending.store(false, std::sync::atomic::Ordering::Release);
        }
    }
}

impl Pool {
    /// Makes the lender of this pool. At most `slots` slots can be on loan at the same time. The
    /// result has the memory windows of those of the first `stores` stores that can lend.
    ///
    /// # Errors
    /// Fails when too little slack is left, the pool has a lender already, or a store's memory
    /// cannot be shared.
    pub fn lender(self: &Arc<Self>, slots: u32, stores: usize) -> Result<(Lender, Vec<Window>), OpenError> {
        let failed = |why: String| OpenError::new(OpenErrorKind::InUse, "volume", why);
        let window = |tier: &Tier| tier.store.share().map(Share::window).transpose();
        let windows: io::Result<Vec<_>> = self.tiers.iter().map(window).collect();
        let windows = windows.map_err(|error| OpenError::io("volume", weir_store::DENIED, error))?;
        if self.lending.swap(true, std::sync::atomic::Ordering::Acquire) {
            return Err(failed("its pages are being lent already".to_owned()));
        }
        let windows: Vec<Window> =
            windows.into_iter().enumerate().filter_map(|(at, fd)| Some((at, fd?))).take(stores).collect();
        let lends = (0..self.tiers.len()).map(|at| windows.iter().any(|&(store, _)| store == at)).collect();
        let mut lender = Lender { pool: Arc::clone(self), out: 0, most: 0, lends };
        self.take_slack(slots)?;
        lender.most = slots;
        for (tier, _) in self.tiers.iter().zip(&lender.lends).filter(|&(_, &lends)| lends) {
            tier.records.begin_lending();
        }
        Ok((lender, windows))
    }
}

impl Guard<'_> {
    /// Lends a page where it lies, if possible; else returns what [`view`](Guard::view) shows. The
    /// page is verified either way.
    #[inline]
    pub fn lend(&self, page: PageNo, lender: &mut Lender) -> Loan<'_> {
        let pool = &self.lane.pool;
        debug_assert!(Arc::ptr_eq(pool, &lender.pool), "the lender is of another pool");
        let page = self.lane.at(page);
        let located = pool.locate(page);
        let here = located.entry.place();
        let view = self.show(&located);
        match (here, view) {
            (Place::Stored { store, slot }, View::Bytes(_))
                if lender.lends[store] && lender.lend(page, here) =>
            {
                Loan::Lent { store, slot }
            }
            (_, view) => Loan::Shown(view),
        }
    }

    /// Prefetches the page's entry in the map, for a page that will be asked for soon.
    #[inline]
    pub fn prefetch_entry(&self, page: PageNo) {
        self.lane.pool.map.prefetch(self.lane.at(page));
    }

    /// Prefetches the page's record and its first bytes, for a page that will be asked for after
    /// the next one or two.
    #[inline]
    pub fn prefetch_head(&self, page: PageNo) {
        let pool = &self.lane.pool;
        if let Place::Stored { store, slot } = pool.map.load(self.lane.at(page)).place() {
            pool.tiers[store].records.prefetch(slot);
            // SAFETY: the map names the slot and this lane is pinned, as in `view`.
            if let Some(bytes) = unsafe { self.lane.stores[store].lane.view(slot) } {
                weir_core::prefetch_head(bytes);
            }
        }
    }
}

#[cfg(all(test, not(loom)))]
mod tests {
    use super::*;

    #[test]
    fn a_slot_is_freed_by_its_last_return_if_it_was_unlinked_meanwhile_and_not_before() {
        let lent = Lent::new(2);
        assert!(lent.may_free(Slot(0)), "never lent");
        assert_eq!((lent.lend(Slot(0)), lent.lend(Slot(0))), (Some(true), Some(false)));
        assert!(!lent.may_free(Slot(0)));
        assert_eq!((lent.give(Slot(0)), lent.give(Slot(0))), (Back::More, Back::LastAndFree));
        assert_eq!(lent.lend(Slot(0)), Some(true), "as good as new");
        assert_eq!(lent.give(Slot(0)), Back::Last);
        assert!(lent.may_free(Slot(0)));
    }

    #[test]
    fn a_slot_is_lent_127_times_and_then_no_more() {
        let lent = Lent::new(1);
        assert_eq!((0..200).filter(|_| lent.lend(Slot(0)).is_some()).count(), 127);
        assert!(!lent.may_free(Slot(0)));
        assert_eq!((0..126).filter(|_| lent.give(Slot(0)) == Back::More).count(), 126);
        assert_eq!(lent.give(Slot(0)), Back::LastAndFree);
    }
}

/// Run the models with `RUSTFLAGS="--cfg loom" cargo test -p weir-volume --lib --release loom`.
#[cfg(all(test, loom))]
mod loom_tests {
    use super::*;
    use crate::sync::AtomicU64;
    use loom::sync::Arc;
    use loom::thread;

    #[test]
    fn loom_a_lent_slot_is_freed_once_and_never_under_its_borrower() {
        loom::model(|| {
            // In the model `map` names slot 0 or nothing, and `free` counts how often the slot was
            // freed.
            let (lent, map) = (Arc::new(Lent::new(1)), Arc::new(AtomicU64::new(1)));
            let free = Arc::new(AtomicU64::new(0));
            let writer = {
                let (lent, map, free) = (Arc::clone(&lent), Arc::clone(&map), Arc::clone(&free));
                thread::spawn(move || {
                    map.swap(0, Ordering::SeqCst);
                    if lent.may_free(Slot(0)) {
                        free.fetch_add(1, Ordering::SeqCst);
                    }
                })
            };
            if map.load(Ordering::SeqCst) == 1 {
                assert_eq!(lent.lend(Slot(0)), Some(true));
                if map.load(Ordering::SeqCst) == 1 {
                    // The slot is borrowed now, so nothing frees it until it is returned. (Before
                    // that a lane's pin keeps the slot. This model has no pins.)
                    assert_eq!(free.load(Ordering::SeqCst), 0, "freed under its borrower");
                }
                if lent.give(Slot(0)) == Back::LastAndFree {
                    free.fetch_add(1, Ordering::SeqCst);
                }
            }
            writer.join().unwrap();
            assert_eq!(free.load(Ordering::SeqCst), 1, "freed once");
        });
    }
}
