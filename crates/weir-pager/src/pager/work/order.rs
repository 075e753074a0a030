//! Finds the order in which the kernel changed the address space, from events in another order.
//!
//! A thread changes the address space first, and sends the event afterwards. In between, the kernel
//! may stop that thread, and other threads may change the address space and send their events. So
//! the pager may read of a move to a place before it reads of the earlier move that made the place
//! free. In that order, the tables would confuse the pages of the two memories.
//!
//! Therefore the pager carries out no move and no unmapping before it has read the events of all
//! changes so far. The kernel tells the pager when no event is missing. Until then the kernel
//! refuses to fill any page, so no page fault waits longer for this.

use super::*;
use std::ops::Range;

/// Largest number of moves for which the pager keeps a list of the mappings.
const VIEWS_MAX: usize = 64;

/// A change of the address space that is not carried out in the tables yet.
#[derive(Debug)]
struct Change {
    event: Event,
    /// Whether another event says that the old place of a move was unmapped at the end of the move.
    has_end: bool,
    /// The mappings of the process at the time when the event was read.
    view: Option<Vec<Mapping>>,
}

/// Facts that the order of changes must agree with.
#[derive(Default)]
struct Facts {
    /// Managed memory before the changes that are not carried out yet.
    spans: BTreeMap<usize, usize>,
    /// The registered mappings after all changes, by address, as far as they lie where something
    /// has changed. `None` if they are not known.
    now: Option<Vec<Mapping>>,
    /// The parts of the targets of moves that have pages after all changes, if `now` is known.
    filled: Vec<Range<usize>>,
}

impl Facts {
    /// The registered mappings that have a byte of this range after all changes.
    fn mapped(&self, range: &Range<usize>) -> &[Mapping] {
        of_range(self.now.as_deref().unwrap_or_default(), range)
    }

    /// Whether one mapping lies on both sides of this address after all changes.
    fn is_crossed(&self, edge: usize) -> bool {
        self.mapped(&(edge..edge + 1)).first().is_some_and(|mapping| mapping.start < edge)
    }

    /// Whether a mapping ends at the beginning of `hole`, or begins at its end. Only what is in
    /// `range` and has not moved there by a change of `rest` counts.
    fn has_rest(&self, hole: &Range<usize>, range: &Range<usize>, rest: &[Change]) -> bool {
        let is_left = |address: usize| {
            range.contains(&address)
                && !self.mapped(&(address..address + 1)).is_empty()
                && !rest.iter().any(|change| change.to().contains(&address))
        };
        // Memory before the range may have grown up to the hole.
        let is_bounded = held_in(&self.spans, range.start.saturating_sub(1)..range.start).is_empty();
        is_bounded && !self.is_crossed(hole.start) && is_left(hole.start.saturating_sub(1))
            || !self.is_crossed(hole.end) && is_left(hole.end)
    }
}

impl Change {
    /// The memory that is changed, at the address that it had before the change.
    fn from(&self) -> Range<usize> {
        match self.event {
            Event::Fault(_) => 0..0,
            Event::Remap(from, _, bytes) => from..from + bytes,
            Event::Remove(start, end) | Event::Unmap(start, end) => start..end,
        }
    }

    /// The place to which the memory moves, or an empty range.
    fn to(&self) -> Range<usize> {
        match self.event {
            Event::Remap(_, to, bytes) => to..to + bytes,
            _ => 0..0,
        }
    }

    /// Whether the memory is no longer at its old place after the change.
    fn takes(&self) -> bool {
        matches!(self.event, Event::Unmap(..)) || self.has_end
    }

    /// Whether this range was not mapped when the pager read the event of this move. False if the
    /// pager has no list of the mappings at that time.
    fn has_not_seen(&self, range: &Range<usize>) -> bool {
        let is_there = |mapping: &Mapping| meet(&(mapping.start..mapping.end), range);
        self.view.as_ref().is_some_and(|view| !view.iter().any(is_there))
    }
}

/// Whether the unmapping `rest[at]` was done before the move `rest[move_in]`: later it would have
/// taken the beginning of what has moved, and that is still there. It was memory before the move's
/// place, with a new part by which it had grown. No event has told of the new part.
fn has_spared(rest: &[Change], at: usize, move_in: usize, facts: &Facts) -> bool {
    let Event::Unmap(start, end) = rest[at].event else { return false };
    let place = rest[move_in].to().start;
    let mut others = rest.iter().enumerate().filter(|&(other, _)| other != move_in);
    start < place
        && place < end
        && facts.mapped(&(place..place + 1)).first().is_some_and(|mapping| mapping.start == place)
        && !others.any(|(_, other)| meet(&other.to(), &(start..end)))
}

/// Whether the unmapping `rest[at]` was done before the move `rest[move_away]`, although the pager
/// read the move's event first. The memory before what was unmapped has grown over that place, and
/// has moved with its new part, which has no pages yet. Otherwise another thread has unmapped a
/// place that begins within the old place of the move and reaches beyond it. Without any page at
/// the new place nothing tells the two apart.
fn has_cut(rest: &[Change], at: usize, move_away: usize, facts: &Facts) -> bool {
    let (Event::Unmap(start, end), Event::Remap(_, to, _)) = (rest[at].event, rest[move_away].event) else {
        return false;
    };
    let moved = rest[move_away].from();
    if !(moved.start < start && start < moved.end) {
        return false;
    }
    let before = start - 1..start;
    let new = to + (start - moved.start)..to + (end.min(moved.end) - moved.start);
    let mut others = rest.iter().enumerate().filter(|&(other, _)| other != at && other != move_away);
    rest[move_away].has_not_seen(&(moved.end.min(end)..end))
        && facts.now.is_some()
        && facts.mapped(&before).is_empty()
        && !facts.filled.iter().any(|filled| meet(filled, &new))
        && !others.any(|(_, other)| {
            meet(&other.to(), &(before.start..end))
                || !matches!(other.event, Event::Remove(..)) && meet(&other.from(), &before)
        })
}

/// Whether memory that the move `rest[move_in]` brought to the place of `rest[at]` is not in
/// `kept`, and no other change from number `first` on has taken it.
fn is_gone(rest: &[Change], at: usize, move_in: usize, kept: &[Mapping], first: usize) -> bool {
    let (place, from) = (rest[move_in].to(), rest[at].from());
    let part = from.start.max(place.start)..from.end.min(place.end);
    let is_other = |&(other, change): &(usize, &Change)| {
        other >= first && other != at && other != move_in && change.takes()
    };
    let taken = rest.iter().enumerate().filter(is_other).map(|(_, other)| other.from());
    let kept = kept.iter().map(|mapping| mapping.start..mapping.end);
    let gone = kept.chain(taken).fold(vec![part], |gone, rest| without(gone, &rest));
    gone.iter().any(|part| part.start < part.end)
}

/// Whether the unmapping `rest[at]` was done after the move `rest[move_in]`: memory that the move
/// brought is gone, and no other change has taken it.
fn has_taken(rest: &[Change], at: usize, move_in: usize, facts: &Facts) -> bool {
    facts.now.as_ref().is_some_and(|now| is_gone(rest, at, move_in, now, 0))
}

/// Whether the move `rest[at]` took memory from the place to which `rest[move_in]` had brought it,
/// by the mappings at the time when the pager read the event of `rest[move_in]`.
fn has_holed(rest: &[Change], at: usize, move_in: usize, view: &[Mapping]) -> bool {
    rest[at].takes() && is_gone(rest, at, move_in, view, move_in + 1)
}

/// Whether the change `rest[at]` happened before the move `rest[move_in]`, although the pager read
/// the move's event first. Both changes concern the place to which the move brings memory.
fn is_before(rest: &[Change], at: usize, move_in: usize, facts: &Facts) -> bool {
    let (place, from) = (rest[move_in].to(), rest[at].from());
    match rest[at].event {
        Event::Fault(_) | Event::Remove(..) => false,
        // One `mremap` moves one mapping. If this move begins before the place, it moved other
        // memory, and not the memory that `move_in` brought. Otherwise the list of mappings
        // decides. The pager read the list when the call of `move_in` had not returned, or had just
        // returned. If the target of this move was mapped by then, this move was already done. It
        // was done after `move_in` if a part of the place was missing by then.
        Event::Remap(_, to, _) => {
            from.start < place.start
                || rest[move_in].view.as_ref().is_some_and(|view| {
                    let is_done = view
                        .iter()
                        .any(|mapping| mapping.is_plain && (mapping.start..mapping.end).contains(&to));
                    is_done && !has_holed(rest, at, move_in, view)
                })
        }
        Event::Unmap(..) if has_spared(rest, at, move_in, facts) => true,
        Event::Unmap(..) if has_taken(rest, at, move_in, facts) => false,
        // Some change freed the place before `move_in`. It was this one if later events cannot
        // explain why the whole place was free.
        Event::Unmap(..) => {
            let mut held = held_in(&facts.spans, from.start.max(place.start)..from.end.min(place.end));
            for later in at + 1..rest.len() {
                let part = rest[later].from();
                let frees = meet(&part, &place)
                    && match rest[later].event {
                        Event::Remap(..) => is_before(rest, later, move_in, facts),
                        Event::Unmap(..) => !has_taken(rest, later, move_in, facts),
                        _ => false,
                    };
                if frees {
                    held = without(held, &part);
                }
            }
            !held.is_empty()
        }
    }
}

/// Whether the event says that memory in `range` has changed.
pub(super) fn touches(event: &Event, range: &Range<usize>) -> bool {
    let (from, to) = match *event {
        Event::Fault(_) => (0..0, 0..0),
        Event::Remap(from, to, bytes) => (from..from + bytes, to..to + bytes),
        Event::Remove(start, end) | Event::Unmap(start, end) => (start..end, 0..0),
    };
    meet(&from, range) || meet(&to, range)
}

/// Whether two of the changes are about one place, and one of them unmaps it.
fn has_conflict(changes: &[Change]) -> bool {
    let unmaps = |change: &&Change| matches!(change.event, Event::Unmap(..));
    changes.iter().filter(unmaps).any(|unmaps| {
        let place = unmaps.from();
        let is_there = |change: &Change| meet(&change.to(), &place) || meet(&change.from(), &place);
        changes.iter().filter(|change| matches!(change.event, Event::Remap(..))).any(is_there)
    })
}

/// The mappings that have a byte of this range, of a list by address.
pub(super) fn of_range<'a>(mappings: &'a [Mapping], range: &Range<usize>) -> &'a [Mapping] {
    let first = mappings.partition_point(|mapping| mapping.end <= range.start);
    let past = mappings.partition_point(|mapping| mapping.start < range.end);
    &mappings[first..past.max(first)]
}

fn meet(one: &Range<usize>, other: &Range<usize>) -> bool {
    one.start < other.end && other.start < one.end
}

/// Removes `range` from each of the parts.
pub(super) fn without(parts: Vec<Range<usize>>, range: &Range<usize>) -> Vec<Range<usize>> {
    let rest =
        |part: Range<usize>| [part.start..part.end.min(range.start), part.start.max(range.end)..part.end];
    parts.into_iter().flat_map(rest).filter(|part| part.start < part.end).collect()
}

/// The parts of `range` that are in a span.
pub(super) fn held_in(spans: &BTreeMap<usize, usize>, range: Range<usize>) -> Vec<Range<usize>> {
    let before = spans.range(..range.start).next_back();
    let all = before.into_iter().chain(spans.range(range.start..range.end.max(range.start)));
    all.map(|(&start, &end)| start.max(range.start)..end.min(range.end))
        .filter(|part| part.start < part.end)
        .collect()
}

pub(super) fn add(spans: &mut BTreeMap<usize, usize>, range: Range<usize>) {
    let Range { mut start, mut end } = range;
    if let Some((&before, &its_end)) = spans.range(..=start).next_back()
        && its_end >= start
    {
        start = before;
        end = end.max(its_end);
    }
    while let Some((&after, &its_end)) = spans.range(start..=end).next() {
        end = end.max(its_end);
        spans.remove(&after);
    }
    spans.insert(start, end);
}

pub(super) fn forget(spans: &mut BTreeMap<usize, usize>, range: Range<usize>) {
    while let Some((&first, &last)) =
        spans.range(..range.end).next_back().filter(|(_, last)| **last > range.start)
    {
        spans.remove(&first);
        if first < range.start {
            spans.insert(first, range.start);
        }
        if last > range.end {
            spans.insert(range.end, last);
        }
    }
}

fn carry_out(spans: &mut BTreeMap<usize, usize>, event: &Event) {
    match *event {
        Event::Fault(_) | Event::Remove(..) => {}
        Event::Unmap(start, end) => forget(spans, start..end),
        Event::Remap(_, to, bytes) => {
            forget(spans, to..to + bytes);
            add(spans, to..to + bytes);
        }
    }
}

/// Whether `rest[change]` would have removed the memory that the later one `rest[at]` moves. The
/// pager read the event of `change` first, and yet `later` happened first. Between the two changes
/// other memory has grown to that place, and the kernel sends no event when memory grows.
fn would_be_gone(rest: &[Change], at: usize, change: usize, facts: &Facts) -> bool {
    let (later, change) = (&rest[at], &rest[change]);
    let (from, gone) = (later.from(), change.from());
    if !matches!(later.event, Event::Remap(..)) || !meet(&from, &gone) {
        return false;
    }
    match change.event {
        // All of `from` has moved away. So what lies beside the hole came later, and the hole too.
        Event::Unmap(..) if facts.has_rest(&gone, &from, rest) => return true,
        // Memory beside the memory that has moved would be gone too. So it has grown there after
        // the unmapping, and the memory that has moved was a part of it.
        Event::Unmap(..) if facts.has_rest(&from, &gone, rest) => return false,
        Event::Remap(..) => {
            // If `later` was not done when the pager read of `change`, it was done after it.
            let to = later.to();
            if change.has_not_seen(&to) && !rest.iter().any(|other| meet(&other.from(), &to)) {
                return false;
            }
        }
        _ => {}
    }
    // Another move may have brought the memory that `later` moves. It has not if it was done after
    // `later`.
    let is_brought = |(number, other): (usize, &Change)| {
        other.to().contains(&from.start) && (number > at || !is_before(rest, at, number, facts))
    };
    change.takes() && gone.contains(&from.start) && !rest.iter().enumerate().any(is_brought)
}

/// Whether the change `rest[at]` can be the next one. All changes before it in `rest` must wait.
fn is_next(rest: &[Change], at: usize, facts: &Facts) -> bool {
    let (before, after) = (&rest[..at], &rest[at + 1..]);
    let change = &rest[at];
    let (from, to) = (change.from(), change.to());
    let is_moved_over = |later: &Change| {
        let part = later.from();
        matches!(later.event, Event::Remap(..)) && meet(&part, &to) && part.start < to.start
    };
    if !held_in(&facts.spans, to.clone()).is_empty()
        || after.iter().any(is_moved_over)
        || (at + 1..rest.len())
            .any(|later| has_spared(rest, later, at, facts) || has_cut(rest, later, at, facts))
        || (at + 1..rest.len()).any(|later| would_be_gone(rest, later, at, facts))
    {
        return false;
    }
    let mut is_older = false;
    for (place, waiting) in before.iter().enumerate() {
        if meet(&waiting.from(), &to) || meet(&waiting.to(), &to) {
            return false;
        }
        let is_first = would_be_gone(rest, at, place, facts) || has_cut(rest, at, place, facts);
        if is_older || is_first {
            continue;
        }
        if meet(&waiting.from(), &from) {
            return false;
        }
        if meet(&waiting.to(), &from) {
            if !is_before(rest, at, place, facts) {
                return false;
            }
            is_older = true;
        }
    }
    true
}

/// Puts a complete list of events into the order of the changes. If a move's old place was unmapped
/// at its end, the event of that stands directly after the move.
fn in_order(mut rest: Vec<Change>, mut facts: Facts) -> Vec<Event> {
    let mut events = Vec::with_capacity(rest.len());
    while !rest.is_empty() {
        let next = (0..rest.len()).find(|&at| is_next(&rest, at, &facts));
        // If a list of the mappings is missing, perhaps no change is certain to be next. Then take
        // the first change that makes the target of the first move free.
        let next = next.or_else(|| {
            let held = held_in(&facts.spans, rest[0].to());
            (1..rest.len()).find(|&at| {
                let change = &rest[at];
                let frees = !matches!(change.event, Event::Remove(..))
                    && held.iter().any(|part| meet(part, &change.from()));
                frees && held_in(&facts.spans, change.to()).is_empty()
            })
        });
        // If there is no such change, a thread was killed after it had freed the place and before
        // it sent the event. The memory that the tables have at that place is gone.
        let change = rest.remove(next.unwrap_or(0));
        let from = change.from();
        let end = change.has_end.then_some(Event::Unmap(from.start, from.end));
        for event in [change.event].into_iter().chain(end) {
            carry_out(&mut facts.spans, &event);
            events.push(event);
        }
    }
    events
}

/// Takes each event that ends a move out of the list. Such an event unmaps the old place of the
/// move. If several moves before the event have this old place, the event ends the last of them. An
/// earlier one left its mapping behind (`MREMAP_DONTUNMAP`), and a later one may have moved that
/// mapping.
fn take_ends(changes: &mut Vec<Change>) {
    let mut at = 0;
    while at < changes.len() {
        let ends = |change: &Change| {
            let from = change.from();
            !change.has_end
                && matches!(change.event, Event::Remap(..))
                && changes[at].event == Event::Unmap(from.start, from.end)
        };
        match changes[..at].iter().rposition(ends) {
            Some(ended) => {
                changes.remove(at);
                changes[ended].has_end = true;
            }
            None => at += 1,
        }
    }
}

impl<K: Kernel, S: Store> Work<K, S> {
    pub(super) fn hear(&mut self) {
        while let Some(event) = self.kernel.event() {
            // Memory that the pager does not manage may be at the place too, and registered.
            if matches!(event, Event::Remap(..)) && self.views.len() < VIEWS_MAX {
                let mut view = Vec::new();
                if self.kernel.read_mappings(&mut view) {
                    self.views.push((event, view));
                }
            }
            self.events.push_back(event);
        }
    }

    /// Reads the kernel's events after the kernel has refused a request, since the address space is
    /// changing. The thread that changes it may need this processor to go on, so the pager sleeps
    /// until an event comes, or for a short time.
    pub(super) fn wait_and_hear(&mut self) {
        self.kernel.wait(Some(PAUSE));
        self.hear();
    }

    /// The registered mappings where these changes were made, by address. `None` if they cannot be
    /// had, or show a change of which no event was read.
    fn registered_at(&mut self, changes: &[Change]) -> Option<Vec<Mapping>> {
        let mut all = std::mem::take(&mut self.mappings_of_now);
        if !self.kernel.read_mappings(&mut all) {
            return None;
        }
        let ranges = changes.iter().flat_map(|change| [change.from(), change.to()]);
        let near = ranges.filter(|range| !range.is_empty()).flat_map(|range| of_range(&all, &range));
        let near: BTreeMap<usize, Mapping> = near.map(|&mapping| (mapping.start, mapping)).collect();
        self.mappings_of_now = all;
        let mut registered = Vec::new();
        for (start, mapping) in near {
            if self.kernel.is_registered(start).ok()? {
                registered.push(mapping);
            }
        }
        (!self.kernel.is_changing()).then_some(registered)
    }

    /// Puts the events that were read into the order of the changes. Returns false if there is a
    /// move or an unmapping among them, and events of earlier changes may be missing.
    pub(super) fn put_in_order(&mut self) -> bool {
        let (mut moves, mut takes) = (false, false);
        for event in self.events.range(self.ordered..) {
            moves |= matches!(event, Event::Remap(..));
            takes |= matches!(event, Event::Unmap(..));
        }
        if !moves && !takes {
            return true;
        }
        if self.kernel.is_changing() {
            return false;
        }
        if !moves {
            self.ordered = self.events.len();
            return true;
        }
        let read: Vec<Event> = self.events.drain(self.ordered..).collect();
        let (faults, read): (Vec<Event>, Vec<Event>) =
            read.into_iter().partition(|event| matches!(event, Event::Fault(_)));
        let mut changes = Vec::with_capacity(read.len());
        for event in read {
            let view = self.views.iter().position(|(of, _)| *of == event);
            let view = view.map(|at| self.views.remove(at).1);
            changes.push(Change { event, has_end: false, view });
        }
        self.views.clear();
        take_ends(&mut changes);
        let mut facts = Facts::default();
        if changes.len() > 1 {
            facts.spans.clone_from(&self.spans);
            self.events.iter().for_each(|event| carry_out(&mut facts.spans, event));
            if has_conflict(&changes) {
                facts.now = self.registered_at(&changes);
                for target in changes.iter().map(Change::to).filter(|target| !target.is_empty()) {
                    let add = |start, end| facts.filled.push(start..end);
                    let _ = self.kernel.populated(target.start, target.end, add);
                }
            }
        }
        self.events.extend(faults);
        self.events.extend(in_order(changes, facts));
        self.ordered = self.events.len();
        true
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::pager::simulator::{address, work_at_rest};

    const BYTES: usize = 4 * PAGE_SIZE;
    // Memory is at the first three of these places.
    const OLD: usize = 1 << 20;
    const SECOND: usize = 2 << 20;
    const THIRD: usize = 3 << 20;
    const TO: usize = 4 << 20;
    const OTHER: usize = 5 << 20;

    fn moved(from: usize, to: usize) -> Event {
        Event::Remap(from, to, BYTES)
    }

    fn unmapped(at: usize) -> Event {
        Event::Unmap(at, at + BYTES)
    }

    fn mapped(start: usize, end: usize) -> Mapping {
        Mapping { start, end, is_plain: true }
    }

    /// Orders these events. At the beginning memory lies at `OLD`, `SECOND` and `THIRD`. When the
    /// pager read the event of a move to one of these places, memory lay at `other` too.
    fn ordered(other: usize, events: &[Event]) -> Vec<Event> {
        let view = [OLD, SECOND, THIRD, other].map(|start| mapped(start, start + BYTES));
        let view = |event: &Event| matches!(*event, Event::Remap(_, to, _) if to < TO).then(|| view.to_vec());
        let spans = [OLD, SECOND, THIRD].map(|start| (start, start + BYTES));
        ordered_by(&spans, view, &[], events)
    }

    /// Orders these events. Managed memory is at `spans` before them. At last `now` is registered;
    /// empty: that is not known.
    fn ordered_by(
        spans: &[(usize, usize)],
        view: impl Fn(&Event) -> Option<Vec<Mapping>>,
        now: &[Mapping],
        events: &[Event],
    ) -> Vec<Event> {
        let change = |event| Change { event, has_end: false, view: view(&event) };
        let mut changes = events.iter().copied().map(change).collect();
        take_ends(&mut changes);
        let mut now = now.to_vec();
        now.sort_by_key(|mapping| mapping.start);
        let now = Some(now).filter(|now| !now.is_empty());
        in_order(changes, Facts { spans: spans.iter().copied().collect(), now, filled: Vec::new() })
    }

    #[test]
    fn a_move_waits_for_the_one_that_has_made_its_place_free() {
        let (first, second) = ([moved(OLD, TO), unmapped(OLD)], [moved(SECOND, OLD), unmapped(SECOND)]);
        let third = [moved(THIRD, SECOND), unmapped(THIRD)];
        let right = [first, second, third].concat();
        assert_eq!(ordered(TO, &[second, first, third].concat()), right);
        assert_eq!(ordered(TO, &[third, second, first].concat()), right);
        // The events that end the three moves come after the events of all three moves.
        let mixed = [third[0], second[0], first[0], second[1], first[1], third[1]];
        assert_eq!(ordered(TO, &mixed), right);
    }

    #[test]
    fn memory_that_moves_on_is_not_taken_for_the_memory_that_was_there_before() {
        let (second, second_on) =
            ([moved(SECOND, OLD), unmapped(SECOND)], [moved(OLD, OTHER), unmapped(OLD)]);
        let first = [moved(OLD, TO), unmapped(OLD)];
        let read = [second, second_on, first].concat();
        assert_eq!(ordered(TO, &read), [first, second, second_on].concat());
        // Here memory lay at `OTHER` when the pager read the first event. So the first memory has
        // moved there, and not the second one.
        assert_eq!(ordered(OTHER, &read), [second_on, second, first].concat());
    }

    #[test]
    fn memory_that_moves_on_at_once_leaves_a_hole_in_what_the_pager_sees() {
        let (hole, end) = (OLD + PAGE_SIZE, OLD + 3 * PAGE_SIZE);
        let on = [Event::Remap(hole, OTHER, end - hole), Event::Unmap(hole, end)];
        let (first, second) = (unmapped(OLD), [moved(SECOND, OLD), unmapped(SECOND)]);
        let read = [&[first][..], &second, &on].concat();
        let spans = [OLD, SECOND].map(|start| (start, start + BYTES));
        let ordered = |view: &[Mapping]| {
            let view = |event: &Event| (*event == second[0]).then(|| view.to_vec());
            ordered_by(&spans, view, &[], &read)
        };
        let target = mapped(OTHER, OTHER + end - hole);
        assert_eq!(ordered(&[mapped(OLD, hole), mapped(end, OLD + BYTES), target]), read);
        // Without a hole the first memory has moved on, before it was unmapped.
        assert_eq!(ordered(&[mapped(OLD, OLD + BYTES), target]), [&on[..], &[first], &second].concat());
    }

    #[test]
    fn an_unmapping_frees_a_place_for_a_move_only_if_nothing_else_has() {
        let second = [moved(SECOND, OLD), unmapped(SECOND)];
        assert_eq!(ordered(TO, &[&second[..], &[unmapped(OLD)]].concat())[0], unmapped(OLD));
        let first = [moved(OLD, TO), unmapped(OLD)];
        let read = [&second[..], &[unmapped(OLD)], &first].concat();
        assert_eq!(ordered(TO, &read), [&first[..], &second, &[unmapped(OLD)]].concat());
        // The pager reads that the second memory was cut before it reads that the first memory was
        // unmapped.
        let part = Event::Unmap(OLD, OLD + PAGE_SIZE);
        let read = [second[0], second[1], part, unmapped(OLD)];
        assert_eq!(ordered(TO, &read), [unmapped(OLD), second[0], second[1], part]);
        // The program drops the content of the second memory.
        let drop = Event::Remove(OLD, OLD + BYTES);
        let read = [second[0], second[1], drop, first[0], first[1]];
        assert_eq!(ordered(TO, &read), [first[0], first[1], second[0], second[1], drop]);
    }

    #[test]
    fn memory_that_has_grown_does_not_take_along_what_moves_to_where_its_new_part_was() {
        let behind = OLD + BYTES;
        let grown = [Event::Remap(OLD, TO, 2 * BYTES), Event::Unmap(OLD, OLD + 2 * BYTES)];
        let second = [moved(SECOND, behind), unmapped(SECOND)];
        assert_eq!(ordered(TO, &[second, grown].concat()), [grown, second].concat());
    }

    #[test]
    fn memory_that_grows_to_where_other_memory_was_does_not_take_it_along() {
        let before = OLD - BYTES;
        let first = [moved(OLD, TO), unmapped(OLD)];
        let grown_on = [Event::Remap(before, OTHER, 2 * BYTES), Event::Unmap(before, OLD + BYTES)];
        assert_eq!(ordered(TO, &[grown_on, first].concat()), [first, grown_on].concat());
        let shrunk = Event::Unmap(OLD, OLD + PAGE_SIZE);
        assert_eq!(ordered(TO, &[shrunk, first[0], first[1]]), [first[0], first[1], shrunk]);
    }

    #[test]
    fn memory_that_was_unmapped_with_its_new_part_was_gone_before_other_memory_moved_there() {
        let part = OLD + PAGE_SIZE;
        // Memory has grown from `part` by two pages. The new part overlaps the place of the move.
        let (grown, place) = (OLD..part + 2 * PAGE_SIZE, part..part + BYTES);
        let events = [
            Event::Remap(SECOND, place.start, BYTES),
            Event::Unmap(SECOND, SECOND + BYTES),
            Event::Unmap(grown.start, grown.end),
        ];
        let spans = [(OLD, part), (SECOND, SECOND + BYTES)];
        let ordered = |now: &[Mapping]| ordered_by(&spans, |_| None, now, &events);
        let right = [events[2], events[0], events[1]];
        assert_eq!(ordered(&[mapped(place.start, place.end)]), right);
        // Here the memory that has moved was cut, and the memory before it has grown again.
        assert_eq!(ordered(&[mapped(grown.end, place.end)]), events);
        assert_eq!(ordered(&[mapped(OLD, part + PAGE_SIZE), mapped(grown.end, place.end)]), events);
        // Here it was cut, and third memory has moved there.
        let third = [Event::Remap(THIRD, part, 2 * PAGE_SIZE), Event::Unmap(THIRD, THIRD + 2 * PAGE_SIZE)];
        let events = [&events[..], &third].concat();
        let spans = [&spans[..], &[(THIRD, THIRD + BYTES)]].concat();
        assert_eq!(ordered_by(&spans, |_| None, &[mapped(part, place.end)], &events), events);
    }

    #[test]
    fn memory_that_moves_shrinks_and_grows_again_has_lost_what_it_had_there() {
        let events = [moved(SECOND, OLD), unmapped(SECOND), Event::Unmap(OLD + BYTES / 2, OLD + BYTES)];
        let now = [mapped(OLD, OLD + BYTES)];
        assert_eq!(ordered_by(&[(SECOND, SECOND + BYTES)], |_| None, &now, &events), events);
    }

    #[test]
    fn what_is_registered_after_all_changes_tells_their_order() {
        // One thread has moved memory, unmapped its last part and then its first, and mapped other
        // memory there. Or the pager cannot tell what is there.
        for (is_new, is_changing) in [(true, false), (false, true)] {
            let (mut work, first) = work_at_rest();
            let [from, to] = [first, first + 2 * BLOCK_PAGES];
            let before = to - 4;
            let at = |page: usize| address(page);
            work.add_span(at(from), at(from + 8));
            work.add_span(at(before), at(to));
            work.kernel.world.map(to, to + 8);
            if !is_new {
                work.kernel.register(at(to), at(to + 8)).unwrap();
            }
            let grown = Event::Unmap(at(before), at(to + 4));
            let events =
                [Event::Remap(at(from), at(to), 8 * PAGE_SIZE), Event::Unmap(at(from), at(from + 8)), grown];
            work.events.extend(events);
            let changes = events.map(|event| Change { event, has_end: false, view: None });
            work.kernel.world.changing = usize::from(is_changing);
            let registered = work.registered_at(&changes);
            assert_eq!(registered.map(|found| found.len()), is_new.then_some(0));
            work.kernel.world.changing = 0;
            assert!(work.put_in_order());
            let right = if is_new { events } else { [grown, events[0], events[1]] };
            assert_eq!(Vec::from(work.events.clone()), right);
        }
        let (mut work, first) = work_at_rest();
        let event = Event::Unmap(address(first), address(first + 4));
        let changes = [Change { event, has_end: false, view: None }];
        assert_eq!(work.registered_at(&changes), Some(Vec::new()));
        work.kernel.world.changing = 1;
        assert_eq!(work.registered_at(&changes), None, "what is there may be new");
    }

    #[test]
    fn memory_that_has_moved_and_is_gone_was_unmapped_after_its_move() {
        let part = Event::Unmap(OLD + PAGE_SIZE, OLD + 2 * PAGE_SIZE);
        let events = [moved(SECOND, OLD), unmapped(SECOND), part, unmapped(OLD)];
        // Before the move there was memory at a part of the place.
        let spans = [(OLD + PAGE_SIZE, OLD + 2 * PAGE_SIZE), (SECOND, SECOND + BYTES)];
        let right = [part, events[0], events[1], unmapped(OLD)];
        // A small mapping is new.
        let now = [mapped(TO, TO + BYTES), mapped(OLD + 2 * PAGE_SIZE, OLD + 3 * PAGE_SIZE)];
        assert_eq!(ordered_by(&spans, |_| None, &now, &events), right);
        // The program drops its content before.
        let drop = Event::Remove(OLD, OLD + BYTES);
        let events = [events[0], events[1], drop, part, unmapped(OLD)];
        let right = [part, events[0], events[1], drop, unmapped(OLD)];
        assert_eq!(ordered_by(&spans, |_| None, &now, &events), right);
    }

    #[test]
    fn a_hole_in_memory_that_has_grown_is_not_cut_from_what_was_there_before() {
        let hole = OLD + PAGE_SIZE..OLD + 2 * PAGE_SIZE;
        let events = [Event::Unmap(hole.start, hole.end), moved(OLD, TO), unmapped(OLD)];
        let spans = [(OLD, OLD + BYTES)];
        let ordered = |now: &[Mapping]| ordered_by(&spans, |_| None, now, &events);
        let right = [events[1], events[2], events[0]];
        let grown = [mapped(TO, TO + BYTES), mapped(OLD - BYTES, hole.start)];
        assert_eq!(ordered(&grown), right);
        // Memory before it may have grown up to the hole.
        let spans = [(OLD - BYTES, OLD + BYTES)];
        assert_eq!(ordered_by(&spans, |_| None, &grown, &events), events);
        assert_eq!(ordered(&[mapped(TO, TO + BYTES), mapped(hole.end, OLD + BYTES)]), right);
        // Memory has grown over the hole, and moved as a whole.
        assert_eq!(ordered(&[mapped(TO, TO + BYTES)]), events);
        assert_eq!(ordered(&[mapped(TO, TO + BYTES), mapped(OLD, OLD + BYTES)]), events);
        // Other memory has moved to the place beside the hole.
        let other = Event::Remap(SECOND, OLD, PAGE_SIZE);
        let events = [&events[..], &[other, Event::Unmap(SECOND, SECOND + PAGE_SIZE)]].concat();
        let now = [mapped(TO, TO + BYTES), mapped(OLD, hole.start)];
        assert_eq!(ordered_by(&spans, |_| None, &now, &events), events);
    }

    #[test]
    fn memory_that_has_grown_over_a_hole_and_moved_was_cut_before() {
        let cut = OLD + PAGE_SIZE..OLD + 2 * BYTES;
        let events = [moved(OLD, TO), unmapped(OLD), Event::Unmap(cut.start, cut.end)];
        let spans = [(OLD, cut.end + BYTES), (SECOND, SECOND + BYTES)];
        let [to, left] = [mapped(TO, TO + BYTES), mapped(cut.end, cut.end + BYTES)];
        let ordered = |seen: &[Mapping], now: &[Mapping], events: &[Event]| {
            let view = |event: &Event| matches!(event, Event::Remap(..)).then(|| seen.to_vec());
            ordered_by(&spans, view, now, events)
        };
        let cut_first = [events[2], events[0], events[1]];
        assert_eq!(ordered(&[left, to], &[left, to], &events), cut_first);
        // Memory behind the memory that has moved was still there after the move.
        let behind = mapped(OLD + BYTES, cut.end + BYTES);
        assert_eq!(ordered(&[behind, to], &[left, to], &events), events);
        // Memory before it has grown after the move, and was cut.
        assert_eq!(ordered(&[left, to], &[mapped(OLD - BYTES, cut.start), left, to], &events), events);
        assert_eq!(ordered(&[left, to], &[], &events), events, "what is there now is not known");
        // Other memory has moved there after the move.
        let other = [moved(SECOND, OLD), unmapped(SECOND)];
        let events = [&events[..2], &other, &events[2..]].concat();
        assert_eq!(ordered(&[left, to], &[left, to], &events), events);
    }

    #[test]
    fn memory_that_moves_away_before_other_memory_comes_was_there_before_the_unmapping() {
        let (cut, second) = (Event::Unmap(OLD - BYTES, OLD + BYTES), [moved(SECOND, OLD), unmapped(SECOND)]);
        let away = [moved(OLD, TO), unmapped(OLD)];
        let events = [&[cut], &second[..], &away].concat();
        let right = [&away[..], &[cut], &second].concat();
        // At the time of the second move the first memory is at its new place.
        assert_eq!(ordered(TO, &events), right);
        // Here it is not. So the second memory has moved on.
        assert_eq!(ordered(OTHER, &events), events);
    }

    #[test]
    fn memory_that_has_pages_at_its_new_place_was_not_cut_before() {
        for page in [None, Some(0), Some(5), Some(6)] {
            let (mut work, first) = work_at_rest();
            let to = first + 2 * BLOCK_PAGES;
            work.add_span(address(first), address(first + 8));
            work.kernel.world.map(to, to + 6);
            work.kernel.register(address(to), address(to + 6)).unwrap();
            page.into_iter().for_each(|page| work.kernel.world.come(to + page, 7));
            let events = [
                Event::Remap(address(first), address(to), 6 * PAGE_SIZE),
                Event::Unmap(address(first), address(first + 6)),
                Event::Unmap(address(first + 3), address(first + 8)),
            ];
            work.events.extend(events);
            let mut view = Vec::new();
            assert!(work.kernel.read_mappings(&mut view));
            work.views.push((events[0], view));
            assert!(work.put_in_order());
            let is_cut = work.events[0] == events[2];
            // Pages 3 to 5 are of the part that was unmapped, or is new.
            assert_eq!(is_cut, page.is_none_or(|page| !(3..6).contains(&page)), "{page:?}");
        }
    }

    #[test]
    fn memory_that_has_grown_over_a_hole_and_moved_in_part_was_not_there_before() {
        let hole = OLD..OLD + 4 * BYTES;
        let from = OLD + BYTES;
        let events = [Event::Unmap(hole.start, hole.end), moved(from, TO), unmapped(from)];
        let spans = [(OLD - BYTES, hole.end)];
        let ordered = |now: &[Mapping]| ordered_by(&spans, |_| None, now, &events);
        let (before, to) = (mapped(OLD - BYTES, OLD), mapped(TO, TO + BYTES));
        let left = mapped(from + BYTES, from + 2 * BYTES);
        assert_eq!(ordered(&[before, to, left]), events);
        assert_eq!(ordered(&[mapped(OLD - BYTES, from), to, left]), events);
        // Nothing is left beside it, or the memory before it has grown after both.
        let moved_first = [events[1], events[2], events[0]];
        assert_eq!(ordered(&[before, to]), moved_first);
        assert_eq!(ordered(&[mapped(OLD - BYTES, from), to]), moved_first);
        assert_eq!(ordered(&[mapped(OLD - BYTES, left.end), to]), moved_first);
    }

    #[test]
    fn of_two_moves_from_one_place_that_one_was_first_which_has_not_seen_the_other() {
        let (first, second) = ([moved(OLD, TO), unmapped(OLD)], [moved(OLD, OTHER), unmapped(OLD)]);
        let view = |event: &Event| match event {
            Event::Remap(_, TO, _) => Some(vec![mapped(TO, TO + BYTES)]),
            _ => Some(vec![mapped(TO, TO + BYTES), mapped(OTHER, OTHER + BYTES)]),
        };
        let spans = [(OLD, OLD + BYTES)];
        let right = [first, second].concat();
        assert_eq!(ordered_by(&spans, view, &[], &right), right);
        assert_eq!(ordered_by(&spans, view, &[], &[second, first].concat()), right);
    }

    #[test]
    fn what_a_move_has_left_behind_moves_on_after_it() {
        // The first move has `MREMAP_DONTUNMAP`, so no event ends it. The second move takes the
        // mapping that the first one left behind.
        let read = [moved(OLD, TO), moved(OLD, OTHER), unmapped(OLD)];
        assert_eq!(ordered(TO, &read), read);
    }

    #[test]
    fn a_move_goes_on_though_the_event_that_frees_its_place_never_comes() {
        let second = [moved(SECOND, OLD), unmapped(SECOND)];
        assert_eq!(ordered(TO, &second), second);
        // The list of the mappings has no mapping at `TO`, so the list does not show the first
        // move.
        let first = [moved(OLD, TO), unmapped(OLD)];
        assert_eq!(ordered(0, &[second, first].concat()), [first, second].concat());
    }

    #[test]
    fn a_move_waits_until_all_is_read_and_the_mappings_at_its_time_tell_what_moved_on() {
        let (mut work, first) = work_at_rest();
        let place = |number: usize| first + 2 * number * BLOCK_PAGES;
        let [old, second, to, other] = [0, 1, 2, 3].map(|number| address(place(number)));
        work.add_span(old, old + BYTES);
        work.add_span(second, second + BYTES);
        work.kernel.world.changing = 1;
        let (first_ends, second_ends) = (unmapped(old), unmapped(second));
        // The first memory has moved from `old` to `to`, and the second one from `second` to `old`.
        // The second memory is still at `old` when the pager reads the event of its move.
        work.kernel.world.map(place(2), place(2) + 4);
        work.kernel.world.events.push_back((moved(second, old), 0));
        work.hear();
        assert!(!work.put_in_order(), "the first memory's move is not read yet");
        let later = [second_ends, moved(old, other), first_ends, moved(old, to), first_ends];
        work.kernel.world.events.extend(later.map(|event| (event, 0)));
        work.hear();
        work.kernel.world.changing = 0;
        assert!(work.put_in_order());
        let right =
            [moved(old, to), first_ends, moved(second, old), second_ends, moved(old, other), first_ends];
        assert_eq!(Vec::from(work.events.clone()), right);
    }
}
