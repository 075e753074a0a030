//! Completions of operations at slow stores.

use super::packing::{Carried, expand_apart};
use super::{Lane, Work};
use std::time::Instant;
use weir_store::{Done, Fault, Progress, Ticket};

impl Lane {
    /// Starts the queued operations, and ends the batch if nothing is in flight.
    pub fn submit(&mut self) {
        if self.packing.is_some() {
            self.close_pack();
        }
        for store in &mut self.stores {
            store.lane.submit();
        }
        self.leave();
        // `settle_idle` polls only stores where this lane has nothing in flight. No deadline there
        // depends on the exact time, so the time of the last poll is good enough.
        if self.unsettled > 0
            && let Some(polled) = self.polled
        {
            self.settle_idle(polled);
        }
    }

    /// Frees slots whose late writes have settled, at stores where this lane has nothing in flight.
    /// The lane's owner does not wait for such a store, so the store is polled here.
    #[cold]
    pub(super) fn settle_idle(&mut self, now: Instant) {
        for at in 0..self.stores.len() {
            if self.stores[at].lane.in_flight() == 0 {
                self.stores[at]
                    .lane
                    .poll(now, &mut |done| unreachable!("operation {} was answered before", done.ticket));
                self.free_settled(at);
            }
        }
    }

    /// Frees slots whose writes timed out and have settled since.
    fn free_settled(&mut self, at: usize) {
        let Lane { stores, pool, unsettled, .. } = self;
        stores[at].lane.settled(&mut |slot| {
            pool.tiers[at].records.free_slot(slot, 0);
            *unsettled -= 1;
        });
    }

    /// Completes every operation that has finished at a slow store. Never waits. `now` is the time
    /// for all deadlines.
    pub fn poll(&mut self, now: Instant, done: &mut dyn FnMut(Done<'_>)) {
        if !self.slot_wait.is_idle() {
            self.wait_for_slot(now);
        }
        self.asks_for_look = false;
        self.polled = Some(now);
        if self.in_flight == 0 {
            return;
        }
        for at in 0..self.stores.len() {
            self.poll_store(now, at, done);
            if self.unsettled > 0 {
                self.free_settled(at);
            }
        }
        let resume = !self.stalled.is_empty() || !self.finished.is_empty() || self.has_open_pack();
        self.drop_stalled(done);
        // Try only writes that were stalled before this poll: one that stalls again waits for the
        // next.
        let stalled = self.stalled.len();
        while let Some((op, result)) = self.finished.pop() {
            self.go_on(op, result, done);
        }
        self.finished.extend(self.overtaken.drain(..).map(|op| (op, Ok(()))));
        // These writes get their numbers only now, behind the look at their clients.
        self.hold(true);
        for _ in 0..stalled {
            // Begin the stalled writes again one after another. They may wait for retired slots
            // that this lane's own pin holds back. The pin would never move if each write began
            // while another is under way.
            let parts_under_way = self.parts.len() - self.idle_parts.len() - self.stalled.len();
            if parts_under_way > 0 && self.under_way > 0 {
                break;
            }
            let op = self.stalled.remove(0);
            match self.advance_part(op, None) {
                Progress::Done(result) => {
                    // The write has ended in some way, so the lane no longer waits for a slot.
                    self.slot_wait.end();
                    self.hand_over(op, result, done);
                }
                Progress::Queued => {}
                Progress::Full => self.stalled.push(op),
            }
        }
        self.hold(false);
        // An operation that was continued may have queued its second half, which must be submitted.
        // If nothing is under way, end the pin here, because the lane's owner may submit nothing
        // more. While a lane stays pinned, no retired slot of any lane becomes free.
        if resume {
            self.submit();
        } else {
            self.leave();
        }
    }

    /// Takes the answers of one store. Reads are handed over at once, from where their content
    /// lies. Other answers are noted for later, because a store's lane takes no new operation while
    /// it is polled.
    fn poll_store(&mut self, now: Instant, at: usize, done: &mut dyn FnMut(Done<'_>)) {
        let (pin, metrics) = (&self.pin, &self.metrics);
        let Lane { stores, ops, parts, runs, finished, pool, under_way, looking, packing, .. } = self;
        stores[at].lane.poll(now, &mut |completion| {
            let op = &ops[completion.ticket as usize];
            let mut result = completion.result;
            match op.work {
                Work::Read(located) => {
                    let mut page = completion.page;
                    result = result.and_then(|()| {
                        let bytes = page.ok_or(Fault::Lost)?;
                        located.verify(bytes)?;
                        if located.packed {
                            page = Some(expand_apart(packing, bytes, located.page)?);
                        }
                        Ok(())
                    });
                    looking.end(op.found, &pool.epochs, pin);
                    metrics.read_ended(op.work.place(), op.started, result);
                    done(Done { ticket: op.ticket, result, page: page.filter(|_| result.is_ok()) });
                }
                Work::Part { part, to: None, .. } => {
                    if let Some(bytes) = completion.page {
                        parts[part as usize].base.copy_from_slice(bytes);
                    }
                    looking.end(op.found, &pool.epochs, pin);
                }
                Work::Run { run } => {
                    let run = &mut runs[run as usize];
                    let (at, verified) = run.answer(result, completion.page);
                    *under_way -= 1;
                    if !run.is_write() {
                        metrics.read_failed(verified);
                        let page = completion.page.filter(|_| verified.is_ok());
                        done(Done { ticket: op.ticket + at as Ticket, result: verified, page });
                    }
                    if run.has_ended() {
                        if !run.is_write() {
                            looking.end(op.found, &pool.epochs, pin);
                        }
                        finished.push((completion.ticket, Ok(())));
                    }
                    return;
                }
                Work::Write { .. } | Work::Part { .. } => {}
                Work::Idle => unreachable!("a store completed operation {} twice", completion.ticket),
            }
            *under_way -= 1;
            finished.push((completion.ticket, result));
        });
    }

    /// Continues an operation whose store has answered.
    pub(super) fn go_on(&mut self, op: u32, result: Result<(), Fault>, done: &mut dyn FnMut(Done<'_>)) {
        if let Carried::Leads { .. } = self.ops[op as usize].carried {
            self.end_pack(op, result, done);
            return;
        }
        if let Work::Run { run } = self.ops[op as usize].work {
            self.end_run(op, run, done);
            return;
        }
        if self.ops[op as usize].forsaken {
            self.drop_forsaken(op, result, done);
            return;
        }
        let result = match self.ops[op as usize].work {
            Work::Read(_) => {
                self.end(op);
                return;
            }
            Work::Write { page, entry } => {
                match result {
                    Ok(()) => {
                        if let Some(entry) = self.publish_slow(op, page, entry) {
                            self.ops[op as usize].work.goes_to(entry);
                            return self.wait_for_look(op);
                        }
                    }
                    Err(fault) => self.unclaim_failed(entry, fault),
                }
                result
            }
            Work::Part { .. } => match self.advance_part(op, Some(result)) {
                Progress::Done(result) => result,
                Progress::Queued => return,
                Progress::Full => {
                    self.stalled.push(op);
                    return;
                }
            },
            Work::Idle | Work::Run { .. } => unreachable!("operation {op} is not under way"),
        };
        self.hand_over(op, result, done);
    }

    /// Ends the stalled writes whose clients have gone. Such a write waits for no other.
    fn drop_stalled(&mut self, done: &mut dyn FnMut(Done<'_>)) {
        let mut at = 0;
        while let Some(&op) = self.stalled.get(at) {
            if self.ops[op as usize].forsaken {
                self.stalled.remove(at);
                self.drop_forsaken(op, Ok(()), done);
            } else {
                at += 1;
            }
        }
    }

    /// Ends a write whose client has gone. `result` is the store's answer.
    pub(super) fn drop_forsaken(
        &mut self,
        op: u32,
        result: Result<(), Fault>,
        done: &mut dyn FnMut(Done<'_>),
    ) {
        let ended = self.end(op);
        if let Work::Write { entry, .. } | Work::Part { to: Some(entry), .. } = ended.work {
            match result {
                Ok(()) => self.unclaim(entry),
                Err(fault) => self.unclaim_failed(entry, fault),
            }
        }
        done(Done { ticket: ended.ticket, result: Err(Fault::Forsaken), page: None });
    }

    pub(super) fn hand_over(&mut self, op: u32, result: Result<(), Fault>, done: &mut dyn FnMut(Done<'_>)) {
        let ended = self.end(op);
        let moved =
            matches!(ended.work, Work::Part { part, .. } if self.parts[part as usize].moving.is_some());
        if !moved {
            self.metrics().write_ended(ended.work.place(), ended.started, result);
        }
        done(Done { ticket: ended.ticket, result, page: None });
    }
}
