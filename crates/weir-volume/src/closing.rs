//! Lanes that were dropped with operations under way.
//!
//! A store may still write into slots that a dropped lane had claimed, and read slots that the
//! lane's pin holds. No thread waits for that: the lane's seat stays taken, and keeps the lane's
//! operations. A lane that needs slots takes the stores' answers to these operations. A worker, or
//! the next thread that opens a lane, frees the seat by [`close_lanes`](Pool::close_lanes). Nothing
//! that was under way is published.

use crate::Pool;
use crate::lane::{Op, Run, StoreLane};
use crate::records::Occupant;
use crate::status::LaneMetrics;
use std::sync::atomic::Ordering;
use std::sync::{Arc, PoisonError};
use std::time::Instant;
use weir_core::Slot;
use weir_store::Fault;

/// The operations that a dropped lane left under way.
pub(crate) struct Closing {
    /// The counts of the lane's seat, which no other lane has meanwhile.
    metrics: Arc<LaneMetrics>,
    stores: Box<[StoreLane]>,
    ops: Box<[Op]>,
    runs: Box<[Run]>,
    /// Number of slots of writes that a store did not answer in time. Those writes may still change
    /// the slots.
    unsettled: usize,
    /// Whether the stores have ended every operation. Then a worker drops this `Closing`. The drop
    /// may wait for a disk, and it frees memory, so an I/O thread must not do it.
    ended: bool,
}

impl Closing {
    /// Takes over a lane's operations. Allocates nothing: an I/O thread may drop a lane.
    pub fn new(
        pool: &Pool,
        metrics: Arc<LaneMetrics>,
        mut stores: Box<[StoreLane]>,
        ops: Box<[Op]>,
        runs: Box<[Run]>,
        unsettled: usize,
    ) -> Self {
        stores.iter_mut().for_each(|store| store.lane.submit());
        let mut closing = Closing { metrics, stores, ops, runs: Box::default(), unsettled, ended: false };
        for op in 0..closing.ops.len() {
            let Some(run) = closing.ops[op].run() else { continue };
            let run = &runs[run as usize];
            run.answers().for_each(|(at, result)| closing.end_slot(pool, run.slot(at), result));
        }
        Closing { runs, ..closing }
    }

    /// Handles a store's answer to an operation, or to the next page of a run.
    fn end(&mut self, pool: &Pool, op: u32, result: Result<(), Fault>) {
        let Some(run) = self.ops[op as usize].run() else { return self.end_single(pool, op, result) };
        let run = &mut self.runs[run as usize];
        let (at, _) = run.answer(result, None);
        let slot = run.slot(at);
        self.end_slot(pool, slot, result);
    }

    /// Handles a store's answer to an operation of one page, or of a run whose pages have all been
    /// answered.
    pub fn end_single(&mut self, pool: &Pool, op: u32, result: Result<(), Fault>) {
        self.end_slot(pool, self.ops[op as usize].unpublished(), result);
    }

    fn end_slot(&mut self, pool: &Pool, slot: Option<(usize, Slot)>, result: Result<(), Fault>) {
        match (slot, result) {
            (None, _) => {}
            (Some(_), Err(Fault::Timeout)) => self.unsettled += 1,
            (Some((store, slot)), _) => pool.free_unpublished(store, slot, &self.metrics),
        }
    }

    /// Takes the stores' answers to the operations of the dropped lane that had this seat.
    fn step(&mut self, pool: &Pool, seat: usize, now: Instant) {
        if self.ended {
            return;
        }
        let mut stores = std::mem::take(&mut self.stores);
        let mut in_flight = 0;
        for (at, store) in stores.iter_mut().enumerate() {
            store.lane.poll(now, &mut |done| self.end(pool, done.ticket, done.result));
            store.lane.settled(&mut |slot| {
                pool.free_unpublished(at, slot, &self.metrics);
                self.unsettled -= 1;
            });
            in_flight += store.lane.in_flight();
        }
        self.stores = stores;
        if in_flight == 0 {
            pool.epochs.pin_of(seat).end();
        }
        self.ended = in_flight + self.unsettled == 0;
    }
}

impl Pool {
    /// Keeps the seat of a dropped lane taken until the stores have ended the lane's operations.
    pub(crate) fn close(&self, seat: usize, closing: Closing) {
        *self.seats.seat(seat).closing.lock().unwrap_or_else(PoisonError::into_inner) = Some(closing);
        self.closing.fetch_add(1, Ordering::Release);
    }

    /// Takes the stores' answers for dropped lanes, and frees the slots and pins that the ended
    /// operations had. Never waits, and frees no memory, because an I/O thread calls this when a
    /// write finds no slot.
    pub(crate) fn step_closing(&self, now: Instant) {
        self.each_closing(|seat, closing| {
            if let Some(closing) = closing {
                closing.step(self, seat, now);
            }
        });
    }

    /// Takes the stores' answers for dropped lanes, and frees the seats of lanes whose operations
    /// have all ended. Closing a store's lane may wait, so only workers and threads that open a
    /// lane call this.
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
        for (seat, it) in self.seats.iter().enumerate() {
            // If the seat is locked, another thread is working on it.
            if let Ok(mut closing) = it.closing.try_lock() {
                each(seat, &mut closing);
            }
        }
    }

    /// Frees the seat of a lane that has nothing under way. Its part of the slack is free again.
    pub(crate) fn free_seat(&self, seat: usize) {
        self.epochs.pin_of(seat).end();
        self.release_seat(seat);
    }

    fn free_unpublished(&self, store: usize, slot: Slot, metrics: &LaneMetrics) {
        let records = &self.tiers[store].records;
        match records.occupant(slot).and_then(Occupant::fill) {
            // The slot has a published pack, in which this page was to be published too. The pack's
            // other pages stay.
            Some(_) => self.retire_unpublished(store, slot, metrics),
            None => records.free_slot(slot, 0),
        }
    }
}
