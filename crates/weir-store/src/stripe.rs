//! Striping: deals slots out among members, so that a load uses all of them at once (RAID-0).

use crate::{
    Condition, Done, Fault, Headroom, Lane, OpenError, Progress, Reclaim, Report, State, Store, Tell,
    TellChange, Ticket,
};
use std::sync::Arc;
use std::time::{Duration, Instant};
use weir_core::{PageBytes, Slot};

/// The rule that says on which member each slot of a store lies, and at which slot of the member.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct Deal(Rule);

#[derive(Clone, PartialEq, Eq, Debug)]
enum Rule {
    /// The members take units of `unit` slots in turns.
    Turns { members: u32, unit: u32 },
    /// A table with each unit's member, and the unit's number on that member. A unit has `1 <<
    /// shift` slots.
    Table { shift: u32, units: Box<[(u16, u32)]> },
}

impl Deal {
    /// A rule by which `members` members take units of `unit` slots in turns. It has no last slot.
    pub fn in_turns(members: u32, unit: u32) -> Self {
        Deal(Rule::Turns { members, unit })
    }

    /// A rule that is a table, for units of `unit` slots, which must be a power of two. `units` has
    /// each unit's member, and the unit's number on that member.
    pub fn by_table(unit: u32, units: Vec<(u16, u32)>) -> Self {
        Deal(Rule::Table { shift: unit.ilog2(), units: units.into() })
    }

    /// Deals units of `unit` slots to the members: `counts` of them to each. From the first unit
    /// on, the members get units in proportion to their speeds, until one of them has all its
    /// units.
    pub fn by_speed(unit: u32, counts: &[u32], speeds: &[f64]) -> Self {
        let mut given = vec![0u32; counts.len()];
        let total = counts.iter().sum::<u32>() as usize;
        let mut units = Vec::with_capacity(total);
        while units.len() < total {
            let due = |&member: &usize| (f64::from(given[member]) + 1.0) / speeds[member].max(1.0);
            let next = (0..counts.len())
                .filter(|&member| given[member] < counts[member])
                .min_by(|a, b| due(a).total_cmp(&due(b)))
                .expect("a member with units left, as not all are dealt");
            units.push((next as u16, given[next]));
            given[next] += 1;
        }
        Self::by_table(unit, units)
    }

    /// The units of a rule that is a table. Empty for a rule by which members take units in turns.
    pub fn units(&self) -> &[(u16, u32)] {
        match &self.0 {
            Rule::Turns { .. } => &[],
            Rule::Table { units, .. } => units,
        }
    }

    /// A slot's member, and the slot on that member. `None` if the rule is a table and the slot
    /// lies after its end.
    #[inline]
    pub fn locate(&self, slot: Slot) -> Option<(u32, Slot)> {
        match &self.0 {
            Rule::Turns { members: 1, .. } => Some((0, slot)),
            Rule::Turns { members, unit } => {
                let (turn, within) = (slot.0 / unit, slot.0 % unit);
                Some((turn % members, Slot(turn / members * unit + within)))
            }
            Rule::Table { shift, units } => {
                let &(member, there) = units.get((slot.0 >> shift) as usize)?;
                let within = slot.0 & ((1 << shift) - 1);
                Some((member.into(), Slot(there << shift | within)))
            }
        }
    }

    /// The store's slot that lies at slot `there` of `member`. If the rule is a table, the whole
    /// table is searched.
    pub fn slot(&self, member: u32, there: Slot) -> Option<Slot> {
        match &self.0 {
            Rule::Turns { members, unit } => {
                let (turn, within) = (there.0 / unit, there.0 % unit);
                Some(Slot((turn * members + member) * unit + within))
            }
            Rule::Table { shift, units } => {
                let unit = (member as u16, there.0 >> shift);
                let at = units.iter().position(|it| *it == unit)?;
                Some(Slot((at as u32) << shift | there.0 & ((1 << shift) - 1)))
            }
        }
    }
}

/// A store over other stores, its members, each with a state of its own. Each chunk lies on one
/// member.
#[derive(Debug)]
pub struct Stripe<M> {
    name: String,
    members: Vec<M>,
    deal: Arc<Deal>,
    slots: u32,
}

impl<M: Store + Reclaim> Stripe<M> {
    /// Makes a stripe over `members`. Their chunks must have one size, a power of two of slots.
    /// Member `n` moves `speeds[n]` pages a second.
    ///
    /// # Panics
    /// Panics when there is no member.
    pub fn by_speed(name: String, members: Vec<M>, speeds: &[f64]) -> Self {
        let unit = members[0].chunk_slots();
        if members.len() == 1 {
            return Self::over(name, members, Deal::in_turns(1, unit));
        }
        let counts: Vec<u32> = members.iter().map(|member| member.slots() / unit).collect();
        Self::over(name, members, Deal::by_speed(unit, &counts, speeds))
    }

    /// Makes a stripe over `members`, with the chunks dealt out as in an earlier stripe. `units` is
    /// that stripe's table, which is empty if that stripe had one member.
    ///
    /// # Panics
    /// Panics when there is no member.
    pub fn dealt(name: String, members: Vec<M>, units: Vec<(u16, u32)>) -> Self {
        let unit = members[0].chunk_slots();
        let deal = if units.is_empty() { Deal::in_turns(1, unit) } else { Deal::by_table(unit, units) };
        Self::over(name, members, deal)
    }

    fn over(name: String, members: Vec<M>, deal: Deal) -> Self {
        let dealt = deal.units().len() as u64 * u64::from(members[0].chunk_slots());
        let slots = match members.as_slice() {
            [member] => member.slots(),
            _ => dealt.min(u64::from(u32::MAX)) as u32,
        };
        Stripe { name, members, deal: Arc::new(deal), slots }
    }

    /// The members of the stripe.
    pub fn parts(&self) -> &[M] {
        &self.members
    }

    /// The rule by which the chunks are dealt out.
    pub fn deal(&self) -> &Deal {
        &self.deal
    }

    /// A chunk's member, and its number on that member.
    fn chunk(&self, chunk: u32) -> Result<(&M, u32), Fault> {
        let unit = self.chunk_slots();
        let first = chunk.checked_mul(unit).and_then(|first| self.deal.locate(Slot(first)));
        let (member, first) = first.ok_or(Fault::Io(libc::EINVAL))?;
        Ok((&self.members[member as usize], first.0 / unit))
    }

    fn reports(&self) -> impl Iterator<Item = &dyn Report> {
        self.members.iter().filter_map(|member| member.report())
    }
}

impl<M: Store + Reclaim> Store for Stripe<M> {
    fn name(&self) -> &str {
        &self.name
    }

    fn slots(&self) -> u32 {
        self.slots
    }

    fn lane(&self, depth: usize) -> Result<Box<dyn Lane>, OpenError> {
        let mut lanes =
            self.members.iter().map(|member| member.lane(depth)).collect::<Result<Vec<_>, _>>()?;
        if lanes.len() == 1 {
            return Ok(lanes.remove(0));
        }
        Ok(Box::new(StripedLane { lanes, deal: Arc::clone(&self.deal), flush: None }))
    }

    fn members(&self) -> u32 {
        self.members.len() as u32
    }

    fn member(&self, slot: Slot) -> u32 {
        self.deal.locate(slot).map_or(0, |(member, _)| member)
    }

    fn state(&self, member: u32) -> State {
        self.members[member as usize].state(0)
    }

    fn unfit_for_swap(&self) -> Option<String> {
        self.members.iter().find_map(|member| member.unfit_for_swap())
    }

    fn reclaim(&self) -> Option<&dyn Reclaim> {
        Some(self)
    }

    fn report(&self) -> Option<&dyn Report> {
        Some(self)
    }
}

impl<M: Store + Reclaim> Reclaim for Stripe<M> {
    fn chunk_slots(&self) -> u32 {
        self.members[0].chunk_slots()
    }

    fn release(&self, chunk: u32) -> Result<(), Fault> {
        let (member, chunk) = self.chunk(chunk)?;
        member.release(chunk)
    }

    fn take(&self, chunk: u32) -> Result<(), Fault> {
        let (member, chunk) = self.chunk(chunk)?;
        member.take(chunk)
    }

    fn headroom(&self, member: u32) -> Option<Headroom> {
        self.members[member as usize].headroom(0)
    }
}

impl<M: Store + Reclaim> Report for Stripe<M> {
    fn conditions(&self) -> Vec<Condition> {
        self.reports().flat_map(Report::conditions).collect()
    }

    fn when_changed(&self, tell: TellChange) {
        self.reports().for_each(|member| member.when_changed(Arc::clone(&tell)));
    }

    fn stages(&self) -> Vec<(&'static str, Duration)> {
        self.reports().flat_map(Report::stages).collect()
    }

    fn when_joined(&self, tell: Tell) {
        self.reports().for_each(|member| member.when_joined(Arc::clone(&tell)));
    }
}

/// A thread's lanes into several members.
struct StripedLane {
    lanes: Vec<Box<dyn Lane>>,
    deal: Arc<Deal>,
    /// The flush under way: its ticket, the number of members that have not answered, and the
    /// result so far.
    flush: Option<(Ticket, usize, Result<(), Fault>)>,
}

impl StripedLane {
    fn locate(&mut self, slot: Slot) -> Option<(&mut dyn Lane, Slot)> {
        let (member, slot) = self.deal.locate(slot)?;
        Some((&mut *self.lanes[member as usize], slot))
    }
}

impl Lane for StripedLane {
    fn plan(&mut self, reads: usize, writes: usize) {
        let members = self.lanes.len();
        for lane in &mut self.lanes {
            lane.plan(reads.div_ceil(members), writes.div_ceil(members));
        }
    }

    fn heeds_plan(&self) -> bool {
        self.lanes.iter().any(|lane| lane.heeds_plan())
    }

    fn write(&mut self, ticket: Ticket, slot: Slot, page: &PageBytes) -> Progress {
        match self.locate(slot) {
            Some((lane, slot)) => lane.write(ticket, slot, page),
            None => Progress::Done(Err(Fault::Lost)),
        }
    }

    fn read(&mut self, ticket: Ticket, slot: Slot, page: &mut PageBytes) -> Progress {
        match self.locate(slot) {
            Some((lane, slot)) => lane.read(ticket, slot, page),
            None => Progress::Done(Err(Fault::Lost)),
        }
    }

    /// Flushes each member.
    fn flush(&mut self, ticket: Ticket) -> Progress {
        if self.flush.is_some() {
            return Progress::Full;
        }
        let (mut left, mut result) = (0, Ok(()));
        for lane in &mut self.lanes {
            match lane.flush(ticket) {
                Progress::Queued => left += 1,
                Progress::Done(ended) => result = result.and(ended),
                Progress::Full => result = Err(Fault::Full),
            }
        }
        if left == 0 {
            return Progress::Done(result);
        }
        self.flush = Some((ticket, left, result));
        Progress::Queued
    }

    fn submit(&mut self) {
        self.lanes.iter_mut().for_each(|lane| lane.submit());
    }

    fn poll(&mut self, now: Instant, done: &mut dyn FnMut(Done<'_>)) {
        let StripedLane { lanes, flush, .. } = self;
        if flush.is_none() {
            return lanes.iter_mut().for_each(|lane| lane.poll(now, done));
        }
        for lane in lanes {
            lane.poll(now, &mut |ended| match flush {
                Some((ticket, left, result)) if *ticket == ended.ticket => {
                    *left -= 1;
                    *result = result.and(ended.result);
                }
                _ => done(ended),
            });
        }
        if let Some((ticket, 0, result)) = *flush {
            *flush = None;
            done(Done { ticket, result, page: None });
        }
    }

    fn settled(&mut self, free: &mut dyn FnMut(Slot)) {
        let deal = &self.deal;
        for (member, lane) in (0..).zip(&mut self.lanes) {
            lane.settled(&mut |there| {
                if let Some(slot) = deal.slot(member, there) {
                    free(slot);
                }
            });
        }
    }

    fn in_flight(&self) -> usize {
        self.lanes.iter().map(|lane| lane.in_flight()).sum()
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::{Sim, SimUrl};
    use proptest::prelude::*;
    use weir_core::{ByteSize, PAGE_SIZE};

    fn every_slot_has_a_place_of_its_own(deal: &Deal, slots: u32) {
        let mut places = std::collections::HashSet::new();
        for slot in (0..slots).map(Slot) {
            let (member, there) = deal.locate(slot).expect("a slot of the table");
            assert!(places.insert((member, there)), "{slot:?} shares its place");
            assert_eq!(deal.slot(member, there), Some(slot));
        }
    }

    #[test]
    fn turns_lay_a_unit_on_each_member_before_the_next_round() {
        let deal = Deal::in_turns(3, 4);
        for (slot, member, there) in [(0, 0, 0), (3, 0, 3), (4, 1, 0), (8, 2, 0), (12, 0, 4), (191, 2, 63)] {
            assert_eq!(deal.locate(Slot(slot)), Some((member, Slot(there))), "slot {slot}");
        }
        every_slot_has_a_place_of_its_own(&deal, 192);
    }

    proptest! {
        #[test]
        fn every_unit_is_dealt_once_and_speed_decides_the_order(
            counts in prop::collection::vec(1u32..40, 1..5), ratio in 1.0f64..4.0,
        ) {
            let speed = |member: usize| 1e6 * (1.0 + member as f64 * (ratio - 1.0));
            let speeds: Vec<f64> = (0..counts.len()).map(speed).collect();
            let deal = Deal::by_speed(8, &counts, &speeds);
            every_slot_has_a_place_of_its_own(&deal, 8 * counts.iter().sum::<u32>());
            let of = |&(member, _): &(u16, u32)| usize::from(member);
            for (member, &count) in counts.iter().enumerate() {
                prop_assert_eq!(deal.units().iter().filter(|it| of(it) == member).count() as u32, count);
            }
            // While every member has units left, each member gets units in proportion to its speed.
            // A member's number of units differs from its exact proportion by the number of members
            // at most.
            let least = counts.iter().map(|&count| f64::from(count)).fold(f64::INFINITY, f64::min) as usize;
            let sum: f64 = speeds.iter().sum();
            for (member, &speed) in speeds.iter().enumerate() {
                let given = deal.units()[..least].iter().filter(|it| of(it) == member).count();
                prop_assert!((given as f64 - least as f64 * speed / sum).abs() <= counts.len() as f64);
            }
        }
    }

    #[test]
    fn a_late_write_settles_under_the_slot_that_the_stripe_knows() {
        let sim = |_| {
            let url = SimUrl { size: ByteSize(64 * PAGE_SIZE as u64), delay: 1, ..SimUrl::default() };
            Sim::open(SimUrl { chunk: Some(ByteSize(8 * PAGE_SIZE as u64)), ..url }).expect("memory")
        };
        let stripe = Stripe::by_speed("two".to_owned(), (0..2).map(sim).collect(), &[1.0, 1.0]);
        let mut lane = stripe.lane(4).expect("a lane");
        let slot = (0..128).map(Slot).filter(|&slot| stripe.member(slot) == 1).nth(11).expect("a slot there");
        stripe.parts()[1].hang(true);
        assert_eq!(lane.write(7, slot, &[1; PAGE_SIZE]), Progress::Queued);
        lane.submit();
        let mut results = Vec::new();
        while lane.in_flight() > 0 {
            lane.poll(Instant::now(), &mut |done| results.push((done.ticket, done.result)));
        }
        assert_eq!(results, [(7, Err(Fault::Timeout))]);
        stripe.parts()[1].hang(false);
        lane.poll(Instant::now(), &mut |_| {});
        let mut settled = Vec::new();
        lane.settled(&mut |slot| settled.push(slot));
        assert_eq!(settled, [slot]);
    }
}
