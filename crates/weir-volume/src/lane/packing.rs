//! Compression in a lane: pages that are written in one batch share slots.
//!
//! A page that shrinks enough waits, unacknowledged, in the lane's open pack until the pack is full
//! or the batch is submitted. Then the pack is written like a page, and each of its pages is
//! published by itself. So a slot is still written whole, once, before the map names it, and stores
//! do not know about packs. A page that is alone in its pack is written uncompressed.
//!
//! The operations that wait in a pack are linked. The first leads the list, and its number is the
//! ticket of the pack's write.

use super::count::count;
use super::{Lane, Located, Part, Work};
use crate::Pool;
use crate::compress::{Codec, WORST};
use crate::entry::{Entry, Place};
use crate::pack::{self, MEMBER_MAX, MEMBERS_MAX, OpenPack};
use crate::ranges::PAGES_MAX;
use crate::records::Occupant;
use std::io;
use weir_core::{Checksum, PAGE_SIZE, PageBytes, PageNo, Slot, uniform_value};
use weir_store::{Done, Fault, Progress, Ticket};

/// A lane's memory for compression.
pub(super) struct Packing {
    codec: Codec,
    open: OpenPack,
    /// The first and the last of the operations that wait in the open pack.
    first: u32,
    last: u32,
    /// Buffer for one page's compressed bytes, which begin at its front.
    small: Box<[u8; WORST]>,
    page: Box<PageBytes>,
    /// Number of pages that have left packs since the lane last told the pool so.
    left: u32,
    /// The pages that [`Lane::open_up`] found.
    found: Vec<(PageNo, Slot)>,
}

/// A lane tells the pool each time that this many pages have left packs.
const TELL_EVERY: u32 = 128;
/// Largest number of packs that a lane reads whole at a time.
pub(crate) const OPENED_MAX: usize = 32;
/// Stands for a page's number when a whole pack is read.
pub(super) const EVERY_MEMBER: PageNo = PageNo(u32::MAX);

/// An operation's place in a pack.
#[derive(Clone, Copy)]
pub(super) enum Carried {
    /// The operation is in no pack.
    No,
    /// The operation waits in the open pack, or in a pack that is being written, and is not the
    /// first there. `next` is the operation behind it.
    Waits { next: Option<u32> },
    /// The operation is the first one of a pack that is being written to this slot. `next` is the
    /// operation behind it.
    Leads { store: usize, slot: Slot, next: Option<u32> },
}

/// The outcome of packing a page.
pub(super) enum Packed {
    /// The page waits in the open pack.
    Joined,
    /// The page must be written uncompressed.
    Not,
    /// The page finds no room in the pack until the lane has been polled.
    Full,
}

impl Packing {
    /// Makes a lane's memory for compression; `None` if the pool has no compressed pages.
    ///
    /// # Errors
    /// Fails when there is no memory for compression.
    pub fn of(pool: &Pool) -> io::Result<Option<Box<Self>>> {
        if !pool.tiers.iter().any(|tier| tier.records.has_packs()) {
            return Ok(None);
        }
        // Packs of an earlier daemon may use another algorithm.
        let codec = Codec::new(pool.compression(), true)?;
        let (small, page) = (Box::new([0; WORST]), Box::new([0; PAGE_SIZE]));
        let found = Vec::with_capacity(OPENED_MAX * MEMBERS_MAX);
        Ok(Some(Box::new(Packing {
            codec,
            open: OpenPack::new(),
            first: 0,
            last: 0,
            small,
            page,
            left: 0,
            found,
        })))
    }

    /// Whether the lane compresses pages, or only expands those that an earlier daemon compressed.
    pub fn compresses(&self) -> bool {
        self.codec.compression().is_some()
    }

    /// Expands `page` out of the verified pack in `slot`. Fails if the page is not in it, as when
    /// the store returned another slot's content.
    fn expand(&mut self, slot: &PageBytes, page: PageNo) -> Result<&PageBytes, Fault> {
        let (compression, bytes) = pack::find(slot, page).ok_or(Fault::Corrupt)?;
        if !self.codec.expand(compression, bytes, &mut self.page) {
            return Err(Fault::Corrupt);
        }
        Ok(&self.page)
    }
}

/// Expands a page out of a pack that lies outside of the lane's memory.
pub(super) fn expand_apart<'a>(
    packing: &'a mut Option<Box<Packing>>,
    slot: &PageBytes,
    page: PageNo,
) -> Result<&'a PageBytes, Fault> {
    packing.as_mut().ok_or(Fault::Corrupt)?.expand(slot, page)
}

impl Lane {
    pub(super) fn has_open_pack(&self) -> bool {
        self.packing.as_ref().is_some_and(|packing| packing.open.pages() > 0)
    }

    /// Reads the page that was located in `slot`. With [`Progress::Done`] it is verified, and
    /// expanded if it was compressed.
    #[inline]
    pub(super) fn read_slot(
        &mut self,
        op: u32,
        located: &Located,
        store: usize,
        slot: Slot,
        out: &mut PageBytes,
    ) -> Progress {
        if located.packed {
            // SAFETY: the map named the slot after this lane was pinned. So no lane writes it or
            // releases its chunk before the pin ends, and the view does not outlive this call.
            if let Some(bytes) = unsafe { self.stores[store].lane.view(slot) } {
                let expanded =
                    located.verify(bytes).and_then(|()| expand_apart(&mut self.packing, bytes, located.page));
                return Progress::Done(expanded.map(|page| *out = *page));
            }
        }
        match self.stores[store].lane.read(op, slot, out) {
            Progress::Done(Ok(())) => {}
            other => return other,
        }
        let result = located.verify(out);
        if located.packed && result.is_ok() {
            let expanded = expand_apart(&mut self.packing, out, located.page).copied();
            return Progress::Done(expanded.map(|page| *out = page));
        }
        Progress::Done(result)
    }

    /// Puts a page into the open pack, if it shrinks enough. Operation `op`, which is not started
    /// yet, writes the page.
    pub(super) fn pack(&mut self, op: u32, page: PageNo, bytes: &PageBytes) -> Packed {
        let Some(packing) = &mut self.packing else { return Packed::Not };
        if uniform_value(bytes).is_some() {
            return Packed::Not;
        }
        match packing.codec.compress(bytes, &mut packing.small) {
            Some(length) if length <= MEMBER_MAX => self.join(op, page, length),
            _ => Packed::Not,
        }
    }

    /// Puts the page of a partial write into the open pack, if it shrinks enough. The write's state
    /// has the old content in `base`, verified. If the old content is a pack, the expanded page
    /// replaces it there, unless the page only moves and joins the open pack.
    pub(super) fn pack_part(&mut self, op: u32, part: u32, from: &Located) -> Result<Packed, Fault> {
        let Some(packing) = &mut self.packing else { return Ok(Packed::Not) };
        let state = &mut self.parts[part as usize];
        if from.packed {
            let (compression, bytes) = pack::find(&state.base, from.page).ok_or(Fault::Corrupt)?;
            if state.moving.is_some() && packing.codec.compression() == Some(compression) {
                // A page that only moves stays compressed as it is.
                let length = bytes.len();
                packing.small[..length].copy_from_slice(bytes);
                return Ok(self.join(op, from.page, length));
            }
            let page = *packing.expand(&state.base, from.page)?;
            *state.base = page;
        }
        if state.moving.is_some() {
            return Ok(Packed::Not);
        }
        let range = state.offset..state.offset + state.len;
        state.base[range].copy_from_slice(&state.patch[..state.len]);
        let base = *state.base;
        Ok(self.pack(op, from.page, &base))
    }

    /// Adds the compressed page in `small` to the open pack, for operation `op`.
    fn join(&mut self, op: u32, page: PageNo, length: usize) -> Packed {
        let Some(packing) = &mut self.packing else { return Packed::Not };
        let Some(compression) = packing.codec.compression() else { return Packed::Not };
        if !packing.open.takes(compression, page, length) {
            packing.open.refuse(length);
            if !self.close_pack() {
                return Packed::Full;
            }
        }
        let Some(packing) = &mut self.packing else { return Packed::Not };
        if packing.open.pages() == 0 {
            packing.first = op;
        } else {
            self.ops[packing.last as usize].carried = Carried::Waits { next: Some(op) };
        }
        packing.last = op;
        packing.open.add(compression, page, &packing.small[..length]);
        self.ops[op as usize].carried = Carried::Waits { next: None };
        Packed::Joined
    }

    /// Sends the open pack to its store. Returns `false` if the pack must wait for the next poll.
    pub(super) fn close_pack(&mut self) -> bool {
        let Some((op, pages)) = self.packing.as_ref().map(|packing| (packing.first, packing.open.pages()))
        else {
            return true;
        };
        if pages == 0 {
            return true;
        }
        if self.is_forsaken(op) {
            let packing = self.packing.as_mut().expect("a pack is open");
            packing.open.clear();
            return self.fail_pack(op, Fault::Forsaken);
        }
        let page = match self.ops[op as usize].work {
            Work::Write { page, .. } => page,
            Work::Part { from, .. } => from.page,
            Work::Idle | Work::Read(_) | Work::Run { .. } => {
                unreachable!("operation {op} waits in a pack and writes nothing")
            }
        };
        let claimed = self.claim(page);
        if claimed.is_none() && (self.holds_slots() || self.waits_for_slot()) {
            return false;
        }
        let sent = match claimed {
            None => self.fail_pack(op, self.no_slot()),
            Some((store, slot)) if pages == 1 => self.send_single(op, page, store, slot),
            Some((store, slot)) => self.send_pack(op, pages, store, slot),
        };
        if let Some(packing) = self.packing.as_mut().filter(|_| sent) {
            packing.open.clear();
        }
        sent
    }

    /// Whether each write of the open pack is forsaken. Such a pack waits for no slot.
    fn is_forsaken(&self, first: u32) -> bool {
        let next = |op: &u32| match self.ops[*op as usize].carried {
            Carried::No => None,
            Carried::Waits { next } | Carried::Leads { next, .. } => next,
        };
        std::iter::successors(Some(first), next).all(|op| self.ops[op as usize].forsaken)
    }

    /// Fails the pages of the open pack.
    fn fail_pack(&mut self, first: u32, fault: Fault) -> bool {
        let mut next = Some(first);
        while let Some(op) = next {
            next = self.leave_pack(op);
            self.finished.push((op, Err(fault)));
        }
        true
    }

    /// Takes an operation out of its pack, and returns the operation behind it.
    fn leave_pack(&mut self, op: u32) -> Option<u32> {
        match std::mem::replace(&mut self.ops[op as usize].carried, Carried::No) {
            Carried::No => None,
            Carried::Waits { next } | Carried::Leads { next, .. } => next,
        }
    }

    fn send_pack(&mut self, first: u32, pages: usize, store: usize, slot: Slot) -> bool {
        let Some(packing) = &self.packing else { return true };
        let records = &self.pool.tiers[store].records;
        let (room, checksum) = (packing.open.room() as u32, pack::checksum(packing.open.bytes()));
        records.fill_in(slot, Occupant::unpublished_pack(pages as u32, room, checksum));
        match self.stores[store].lane.write(first, slot, packing.open.bytes()) {
            Progress::Full => {
                records.free_slot(slot, 0);
                return false;
            }
            Progress::Done(result) => self.finished.push((first, result)),
            Progress::Queued => self.under_way += 1,
        }
        let Carried::Waits { next } = self.ops[first as usize].carried else {
            unreachable!("operation {first} leads no pack")
        };
        self.ops[first as usize].carried = Carried::Leads { store, slot, next };
        true
    }

    /// Sends the only page of the open pack uncompressed: it takes a slot anyway.
    fn send_single(&mut self, op: u32, page: PageNo, store: usize, slot: Slot) -> bool {
        let entry = Entry::new(Place::Stored { store, slot }, self.generation_in_pack(op));
        let Some(packing) = &mut self.packing else { return true };
        let records = &self.pool.tiers[store].records;
        let Packing { codec, open, page: bytes, .. } = &mut **packing;
        let small = pack::find(open.bytes(), page);
        let whole = small.is_some_and(|(compression, small)| codec.expand(compression, small, bytes));
        if !whole {
            // The compressed bytes must expand to the page again: otherwise the write fails, and
            // wrong content is never stored.
            records.free_slot(slot, 0);
            self.leave_pack(op);
            self.finished.push((op, Err(Fault::Corrupt)));
            return true;
        }
        let checksum = Checksum::of(bytes, page, entry.generation());
        records.fill_in(slot, Occupant { page, checksum });
        match self.stores[store].lane.write(op, slot, bytes) {
            Progress::Full => {
                records.free_slot(slot, 0);
                return false;
            }
            Progress::Done(result) => self.finished.push((op, result)),
            Progress::Queued => self.under_way += 1,
        }
        self.leave_pack(op);
        self.ops[op as usize].work.goes_to(entry);
        true
    }

    /// Publishes the pages of a pack whose store has answered, each by itself.
    pub(super) fn end_pack(&mut self, first: u32, result: Result<(), Fault>, done: &mut dyn FnMut(Done<'_>)) {
        let Carried::Leads { store, slot, .. } = self.ops[first as usize].carried else {
            unreachable!("operation {first} leads no pack")
        };
        match result {
            Ok(()) => count(&self.metrics().packs),
            Err(Fault::Timeout) => self.unsettled += 1,
            Err(_) => self.pool.tiers[store].records.free_slot(slot, 0),
        }
        let mut next = Some(first);
        while let Some(op) = next {
            next = self.leave_pack(op);
            if let Err(fault) = result {
                self.hand_over(op, Err(fault), done);
                continue;
            }
            // If another lane has written a page meanwhile, this lane's write of that whole page is
            // not published yet. The write keeps its place in the pack, and the next poll tries
            // again.
            let entry = Entry::new(Place::Stored { store, slot }, self.generation_in_pack(op));
            self.ops[op as usize].work.goes_to(entry);
            self.go_on(op, Ok(()), done);
        }
        if result.is_ok() {
            let gone = self.pool.tiers[store].records.published(slot, || self.pool.epochs.now());
            self.metrics().unpacks.add(u64::from(gone));
        }
    }

    /// The generation of the page that an operation has in a pack. It follows from the page's entry
    /// at the start of the write.
    fn generation_in_pack(&self, op: u32) -> u32 {
        match self.ops[op as usize].work {
            Work::Write { entry, .. } => entry.generation(),
            Work::Part { part, from, .. } if self.parts[part as usize].moving.is_some() => {
                from.entry.generation()
            }
            Work::Part { from, .. } => from.entry.next_generation(),
            Work::Idle | Work::Read(_) | Work::Run { .. } => {
                unreachable!("operation {op} is in a pack and writes nothing")
            }
        }
    }

    /// Counts a page that has left a pack. Tells the pool after every [`TELL_EVERY`] pages, because
    /// compaction may pay then.
    #[cold]
    pub(super) fn left_pack(&mut self) {
        let Some(packing) = &mut self.packing else { return };
        packing.left += 1;
        if packing.left >= TELL_EVERY {
            packing.left = 0;
            self.pool.packs_are_left();
        }
    }

    /// Reads the pack in a slot, if there is one. Adds the pages that still lie in it to
    /// [`opened`](Lane::opened). A pack of another algorithm adds no pages.
    pub(crate) fn open_up(&mut self, ticket: Ticket, store: usize, slot: Slot) -> Progress {
        self.enter();
        let (Some(&part), Some(&op)) = (self.idle_parts.last(), self.idle_ops.last()) else {
            return Progress::Full;
        };
        // A slot published after this lane was pinned stays unchanged until the pin ends.
        let occupant = self.pool.tiers[store].records.occupant(slot);
        let Some(occupant) = occupant.filter(|it| it.fill().is_some()) else { return Progress::Done(Ok(())) };
        let here = Place::Stored { store, slot };
        let from = Located {
            page: EVERY_MEMBER,
            entry: Entry::new(here, 0),
            checksum: Some(occupant.checksum),
            packed: true,
        };
        self.idle_parts.pop();
        let state = &mut self.parts[part as usize];
        (state.offset, state.len, state.moving) = (0, 0, Some(here));
        self.start(ticket, None, Work::Part { part, from, to: None });
        match self.stores[store].lane.read(op, slot, &mut self.parts[part as usize].base) {
            Progress::Done(result) => {
                let progress = self.advance_part(op, Some(result));
                self.end(op);
                progress
            }
            Progress::Queued => {
                self.under_way += 1;
                self.ops[op as usize].found = self.looking.begin();
                Progress::Queued
            }
            Progress::Full => {
                self.end(op);
                Progress::Full
            }
        }
    }

    /// Notes which pages of a pack still lie in its slot. The pack's content is in `base` of
    /// partial write `part`.
    pub(super) fn note_members(&mut self, part: u32) {
        let Lane { packing: Some(packing), parts, pool, .. } = self else { return };
        let Part { base, moving, .. } = &parts[part as usize];
        let Some(Place::Stored { slot, .. }) = *moving else { return };
        if pack::compression(base) != packing.codec.compression() {
            return;
        }
        let there = |page: &PageNo| page.0 < PAGES_MAX && pool.entry(*page).map(Entry::place) == *moving;
        for page in pack::members(base).filter(there) {
            if packing.found.len() < packing.found.capacity() {
                packing.found.push((page, slot));
            }
        }
    }

    /// Returns the last of the pages that [`open_up`](Lane::open_up) found and that are left, with
    /// its slot.
    pub(crate) fn opened(&mut self) -> Option<(PageNo, Slot)> {
        self.packing.as_mut()?.found.pop()
    }
}

#[cfg(all(test, not(loom)))]
mod tests {
    use super::*;
    use crate::{Compression, Config, Volume};
    use std::sync::Arc;
    use std::time::Instant;
    use weir_store::Host;

    #[test]
    fn a_pack_that_is_left_by_its_last_page_while_it_is_published_waits_for_those_who_look_at_it() {
        let config = Config { pages: 8, lanes: 3, depth: 8 };
        let store = Arc::new(Host::new(config.slots()).expect("memory"));
        let volume = Volume::create(config, vec![store]).expect("a volume");
        volume.compress(Compression::Lz4);
        let [mut writer, mut other, mut reader] = [(); 3].map(|()| volume.lane().expect("a lane"));
        for page in 0..3 {
            let content = std::array::from_fn(|at| (at / 512) as u8 + page as u8);
            assert_eq!(writer.write(page, PageNo(page), &content), Progress::Queued);
        }
        writer.submit();
        let mut packs = Vec::new();
        writer.poll(Instant::now(), &mut |done| {
            let page = PageNo(done.ticket);
            let Place::Stored { slot, .. } = volume.map.load(page).place() else {
                panic!("it was published")
            };
            packs.push(slot);
            // This reader comes before all pages are written anew, so it may have found the first
            // page in the pack.
            reader.enter();
            assert_eq!(other.write(0, page, &[0; PAGE_SIZE]), Progress::Done(Ok(())));
            other.submit();
        });
        assert_eq!(packs, [packs[0]; 3], "one pack");
        let records = &volume.tiers[0].records;
        assert!(records.occupant(packs[0]).is_none(), "nobody is left in it");
        assert!(records.claimable(packs[0], volume.epochs.safe()).is_none(), "a reader is looking at it");
        reader.leave();
        assert!(records.claimable(packs[0], volume.epochs.safe()).is_some());
    }

    #[test]
    fn a_pack_whose_last_page_was_never_published_is_counted_no_more() {
        for is_dropped in [false, true] {
            let config = Config { pages: 8, lanes: 2, depth: 8 };
            let store = Arc::new(Host::new(config.slots()).expect("memory"));
            let volume = Volume::create(config, vec![store]).expect("a volume");
            volume.compress(Compression::Lz4);
            let [mut writer, mut other] = [(); 2].map(|()| volume.lane().expect("a lane"));
            for page in 0..2 {
                let content = std::array::from_fn(|at| (at / 512) as u8 + page as u8);
                assert_eq!(writer.write(page, PageNo(page), &content), Progress::Queued);
            }
            writer.submit();
            // Page 1 is written by another lane meanwhile, so it waits in its pack. Then page 0
            // leaves the pack.
            assert_eq!(other.write(0, PageNo(1), &[0; PAGE_SIZE]), Progress::Done(Ok(())));
            writer.poll(Instant::now(), &mut |done| assert_eq!(done.ticket, 0));
            assert_eq!(volume.status().packs, 1);
            assert_eq!(other.write(0, PageNo(0), &[0; PAGE_SIZE]), Progress::Done(Ok(())));
            if is_dropped {
                drop(writer);
            } else {
                writer.forsake(|_| true);
                writer.poll(Instant::now(), &mut |done| assert_eq!(done.result, Err(Fault::Forsaken)));
            }
            let status = volume.status();
            assert_eq!((status.packs, status.stores[0].used), (0, 0), "dropped: {is_dropped}");
        }
    }
}
