//! The policy: decides which block is moved out next, and which is brought next. It has no clock,
//! and touches no managed memory.

use std::collections::VecDeque;

/// Number of streams that are tracked at a time.
const STREAMS: usize = 16;
/// Largest distance, in blocks, of two successive page faults of one stream.
const STRIDE_MAX: i64 = 64;
/// The program streams if at least `STREAMING` of its last `RECENT` page faults were in a stream.
const RECENT: u32 = 16;
const STREAMING: u32 = 12;
/// Number of the newest blocks that stay in place while the program streams, because they are in
/// use.
const LAG: usize = 4;
/// While the program streams, one victim of this many is the oldest block, and the others are new
/// ones. Otherwise blocks that are no longer used would stay in place for ever.
const OLDEST_EVERY: u32 = 16;

/// A stream: page faults that follow each other at a constant distance of blocks.
#[derive(Clone, Copy, Debug, Default)]
struct Stream {
    last: i64,
    stride: i64,
    /// The time of the stream's last use, counted in page faults.
    used: u64,
}

/// The policy sees only the order of page faults, and no accessed bits.
///
/// A cyclic sweep over more memory than the limit would miss every block under FIFO and LRU. So
/// while the program streams, one of the newest blocks is moved out. The older ones are still in
/// place in the next round (MRU with a lag).
#[derive(Debug, Default)]
pub struct Policy {
    /// Resident blocks, in the order in which they came into place.
    order: VecDeque<u32>,
    streams: [Stream; STREAMS],
    recent: u16,
    faults: u64,
    victims: u32,
}

impl Policy {
    /// Notes that a block is in place now.
    pub fn came(&mut self, id: u32) {
        self.order.push_back(id);
    }

    /// Notes that a block is no longer in place.
    pub fn went(&mut self, id: u32) {
        // The newest blocks are moved out most often, so search from the end.
        if let Some(at) = self.order.iter().rposition(|&other| other == id) {
            self.order.remove(at);
        }
    }

    /// Number of blocks in place.
    pub fn len(&self) -> usize {
        self.order.len()
    }

    /// Notes a page fault on a block. A block's number is its address, counted in blocks. `skips`
    /// is true for a block whose pages are in place: an access to it causes no page fault, so a
    /// stream passes over it unseen. Returns the distance to the stream's next page fault, if this
    /// one is in a stream.
    pub fn fault(&mut self, number: i64, skips: impl Fn(i64) -> bool) -> Option<i64> {
        self.faults += 1;
        let follows = |stream: &Stream| {
            let mut next = stream.last + stream.stride;
            let mut steps = 0;
            while next != number && steps < STRIDE_MAX && skips(next) {
                next += stream.stride;
                steps += 1;
            }
            next == number
        };
        let known =
            self.streams.iter().position(|stream| stream.used > 0 && stream.stride != 0 && follows(stream));
        let stride = match known {
            Some(at) => {
                let stream = &mut self.streams[at];
                (stream.last, stream.used) = (number, self.faults);
                Some(stream.stride)
            }
            None => {
                self.begin(number);
                None
            }
        };
        self.recent = self.recent << 1 | u16::from(stride.is_some());
        stride
    }

    /// Notes a page fault on block `number` that continues no stream. If a stream had its last page
    /// fault near that block, the distance between the two becomes its new stride. Otherwise the
    /// block begins a stream, in place of the least recently used one.
    fn begin(&mut self, number: i64) {
        let near = |stream: &&mut Stream| {
            let distance = (number - stream.last).abs();
            stream.used > 0 && distance > 0 && distance <= STRIDE_MAX
        };
        let faults = self.faults;
        if let Some(stream) =
            self.streams.iter_mut().filter(near).min_by_key(|stream| (number - stream.last).abs())
        {
            *stream = Stream { last: number, stride: number - stream.last, used: faults };
        } else if let Some(stream) = self.streams.iter_mut().min_by_key(|stream| stream.used) {
            *stream = Stream { last: number, stride: 0, used: faults };
        }
    }

    /// Whether the program streams.
    pub fn is_streaming(&self) -> bool {
        const { assert!(RECENT == u16::BITS) }
        self.recent.count_ones() >= STREAMING
    }

    /// The next block to move out. It stays in the order until [`went`](Self::went) is called for
    /// it.
    pub fn victim(&mut self) -> Option<u32> {
        self.victims = self.victims.wrapping_add(1);
        let at = if self.is_streaming() && !self.victims.is_multiple_of(OLDEST_EVERY) {
            self.order.len().saturating_sub(LAG)
        } else {
            0
        };
        self.order.get(at).copied()
    }

    /// The oldest of the blocks in place.
    pub fn oldest(&self) -> Option<u32> {
        self.order.front().copied()
    }

    /// The blocks in place, the newest one first.
    pub fn newest_first(&self) -> impl Iterator<Item = u32> + '_ {
        self.order.iter().rev().copied()
    }

    /// Notes that a block could not be moved out. It counts as the newest block from now on.
    pub fn spared(&mut self, id: u32) {
        self.went(id);
        self.came(id);
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;
    use std::collections::BTreeSet;

    /// Number of page faults of a program that goes through blocks in this order, if `room` blocks
    /// may be resident.
    fn faults(room: usize, accesses: impl Iterator<Item = i64>) -> usize {
        let mut policy = Policy::default();
        let mut resident = BTreeSet::new();
        let mut count = 0;
        for number in accesses {
            if resident.contains(&number) {
                continue;
            }
            count += 1;
            policy.fault(number, |other| resident.contains(&other));
            if resident.len() == room {
                let victim = policy.victim().expect("one is there");
                policy.went(victim);
                assert!(resident.remove(&i64::from(victim)), "a victim is resident");
            }
            resident.insert(number);
            policy.came(number as u32);
        }
        count
    }

    #[test]
    fn a_cyclic_sweep_hits_what_fits_where_fifo_would_miss_all() {
        let rounds = 20;
        let sweep = faults(64, (0..rounds * 256).map(|at| at % 256));
        let all = rounds as usize * 256;
        assert!(sweep * 100 < all * 82, "{sweep} of {all}: three quarters and a little must miss");
    }

    #[test]
    fn a_loop_that_fits_misses_once() {
        assert_eq!(faults(64, (0..6400).map(|at| at % 60)), 60);
    }

    #[test]
    fn strides_of_both_directions_are_streams_and_jumps_are_not() {
        for stride in [1, -1, 2, -5, 64] {
            let mut policy = Policy::default();
            let said: Vec<_> = (0..20).map(|step| policy.fault(10_000 + step * stride, |_| false)).collect();
            assert!(said[2..].iter().all(|said| *said == Some(stride)), "{stride}: {said:?}");
            assert!(policy.is_streaming());
        }
        let mut policy = Policy::default();
        let jumps = (0..64).filter(|step: &i64| policy.fault(step * step * 1_000, |_| false).is_some());
        assert_eq!(jumps.count(), 0);
        assert!(!policy.is_streaming());
    }

    #[test]
    fn two_streams_at_once_are_both_known() {
        let mut policy = Policy::default();
        for step in 0..20 {
            let said = [policy.fault(step, |_| false), policy.fault(1_000_000 - 3 * step, |_| false)];
            if step > 1 {
                assert_eq!(said, [Some(1), Some(-3)]);
            }
        }
    }

    proptest! {
        #[test]
        fn whatever_happens_the_victim_is_one_that_came_and_did_not_go(
            steps in prop::collection::vec((0u8..4, 0u32..40), 1..400)
        ) {
            let mut policy = Policy::default();
            let mut resident = BTreeSet::new();
            for (what, id) in steps {
                match what {
                    0 => { policy.fault(i64::from(id), |_| false); }
                    1 if resident.insert(id) => policy.came(id),
                    2 if resident.remove(&id) => policy.went(id),
                    3 if resident.contains(&id) => policy.spared(id),
                    _ => {}
                }
                prop_assert_eq!(policy.len(), resident.len());
                prop_assert_eq!(policy.victim().is_some(), !resident.is_empty());
                prop_assert!(policy.victim().is_none_or(|victim| resident.contains(&victim)));
            }
        }
    }
}
