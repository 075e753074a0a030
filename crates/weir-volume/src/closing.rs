//! Lanes that were dropped with operations under way.
//!
//! A store may still write into slots that such a lane had claimed, and read slots that its pin
//! holds. Nobody waits for that: the lane's stores go over to its seat, which stays taken. A lane
//! that needs slots asks how far they are, and a worker or the next that opens a lane frees the
//! seat, by [`close_lanes`](Volume::close_lanes). Nothing of what was under way is published.

use crate::Volume;
use crate::lane::{Op, Run, StoreLane};
use crate::records::Occupant;
use std::sync::PoisonError;
use std::sync::atomic::Ordering;
use std::time::Instant;
use weir_core::Slot;
use weir_store::Fault;

/// The operations that a dropped lane left under way.
pub(crate) struct Closing {
    stores: Box<[StoreLane]>,
    ops: Box<[Op]>,
    runs: Box<[Run]>,
    /// Slots of writes that a store did not answer in time, and that may still land.
    unsettled: usize,
    /// Stores are done with it. A worker drops it: that may wait for a disk, and frees memory.
    ended: bool,
}

impl Closing {
    /// Allocates nothing: an I/O thread may drop a lane.
    pub fn new(
        volume: &Volume,
        mut stores: Box<[StoreLane]>,
        ops: Box<[Op]>,
        runs: Box<[Run]>,
        unsettled: usize,
    ) -> Self {
        stores.iter_mut().for_each(|store| store.lane.submit());
        let mut closing = Closing { stores, ops, runs: Box::default(), unsettled, ended: false };
        for op in 0..closing.ops.len() {
            let Some(run) = closing.ops[op].run() else { continue };
            let run = &runs[run as usize];
            run.answers().for_each(|(at, result)| closing.end_slot(volume, run.slot(at), result));
        }
        Closing { runs, ..closing }
    }

    /// A store has answered an operation, or the next page of one.
    fn end(&mut self, volume: &Volume, op: u32, result: Result<(), Fault>) {
        let Some(run) = self.ops[op as usize].run() else { return self.end_single(volume, op, result) };
        let run = &mut self.runs[run as usize];
        let (at, _) = run.answer(result, None);
        let slot = run.slot(at);
        self.end_slot(volume, slot, result);
    }

    /// A store has answered an operation of one page. What it said of the pages of a run is known.
    pub fn end_single(&mut self, volume: &Volume, op: u32, result: Result<(), Fault>) {
        self.end_slot(volume, self.ops[op as usize].unpublished(), result);
    }

    fn end_slot(&mut self, volume: &Volume, slot: Option<(usize, Slot)>, result: Result<(), Fault>) {
        match (slot, result) {
            (None, _) => {}
            (Some(_), Err(Fault::Timeout)) => self.unsettled += 1,
            (Some((store, slot)), _) => volume.free_unpublished(store, slot),
        }
    }

    /// Takes what stores have finished.
    fn step(&mut self, volume: &Volume, seat: usize, now: Instant) {
        if self.ended {
            return;
        }
        let mut stores = std::mem::take(&mut self.stores);
        let mut in_flight = 0;
        for (at, store) in stores.iter_mut().enumerate() {
            store.lane.poll(now, &mut |done| self.end(volume, done.ticket, done.result));
            store.lane.settled(&mut |slot| {
                volume.free_unpublished(at, slot);
                self.unsettled -= 1;
            });
            in_flight += store.lane.in_flight();
        }
        self.stores = stores;
        if in_flight == 0 {
            volume.epochs.unpin(seat);
        }
        self.ended = in_flight + self.unsettled == 0;
    }
}

impl Volume {
    /// Keeps the seat of a dropped lane until its stores are done.
    pub(crate) fn close(&self, seat: usize, closing: Closing) {
        *self.lanes[seat].closing.lock().unwrap_or_else(PoisonError::into_inner) = Some(closing);
        self.closing.fetch_add(1, Ordering::Release);
    }

    /// Frees slots and pins that dropped lanes had under way, as far as stores are done with them.
    /// Never waits, frees no memory: a lane whose write finds no slot does so by itself.
    pub(crate) fn step_closing(&self, now: Instant) {
        self.each_closing(|seat, closing| {
            if let Some(closing) = closing {
                closing.step(self, seat, now);
            }
        });
    }

    /// The same, and frees the seats of those that are done. Closes stores' lanes, which may wait:
    /// for workers, and for who opens a lane.
    pub fn close_lanes(&self, now: Instant) {
        self.each_closing(|seat, it| {
            if let Some(closing) = it {
                closing.step(self, seat, now);
            }
            if it.take_if(|closing| closing.ended).is_some() {
                self.closing.fetch_sub(1, Ordering::Release);
                self.free_seat(seat);
            }
        });
    }

    fn each_closing(&self, mut each: impl FnMut(usize, &mut Option<Closing>)) {
        if self.closing.load(Ordering::Acquire) == 0 {
            return;
        }
        for (seat, it) in self.lanes.iter().enumerate() {
            // If it is locked, somebody else is at it.
            if let Ok(mut closing) = it.closing.try_lock() {
                each(seat, &mut closing);
            }
        }
    }

    /// A lane with nothing under way has gone.
    pub(crate) fn free_seat(&self, seat: usize) {
        self.epochs.unpin(seat);
        self.release_seat(seat);
    }

    fn free_unpublished(&self, store: usize, slot: Slot) {
        let records = &self.tiers[store].records;
        match records.occupant(slot).and_then(Occupant::fill) {
            // It was to be published in a pack whose other pages are.
            Some(_) => self.retire_unpublished(store, slot),
            None => records.free_slot(slot, 0),
        }
    }
}
