//! The policy: decides which block is moved out next, and whether a page fault brings a whole block
//! or single pages. It has no clock, and touches no managed memory.
//!
//! A program that goes through memory in order enters most blocks at their first or last page. One
//! that jumps does so once in 256 page faults. So a block that is entered there is a sign of a
//! stream. It continues one if the blocks before it, at equal distances, were entered a short while
//! ago. The program's threads may take turns in any order.

use crate::BLOCK_PAGES;
use std::collections::VecDeque;

/// Number of streams that are tracked at a time. A thread that changes pairs of places far apart
/// has two.
const STREAMS: usize = 64;
/// Largest distance, in blocks, of two successive blocks of one stream.
const STRIDE_MAX: i64 = 16;
/// Up to this distance, two blocks before a block show a stream. At larger distances it takes three
/// of them, since a program that enters blocks in random order has many distances.
const STRIDE_SHORT: i64 = 2;
/// Largest number of blocks in place that a stream passes over unseen.
const SKIPS_MAX: i64 = 64;
/// A block counts as entered a short while ago for this many page faults. A page fault in the midst
/// of a block counts only those among fewer. A stream ends after so many without one of its own.
const ENTERED_FOR: u64 = 128;
const ENTERED_FOR_MIDST: u64 = 32;
/// The program begins to stream when `STREAMING` of its last `RECENT` page faults were in streams.
/// It ends to stream when `JUMPING` of them or fewer were. In between it goes on as before.
const RECENT: u32 = 16;
const STREAMING: u32 = 12;
const JUMPING: u32 = 4;
/// The program ends to stream too if fewer than this many of the last 64 blocks that were entered
/// at their first or last page continued a stream. At the beginning of a pass all streams are new.
const CONTINUING: u32 = 24;
/// Number of places in a block at which its last runs of single pages ended. Threads may share a
/// block, and each may have two runs there.
const RUNS: usize = 16;
/// Each page fault that directly follows the end of a run brings twice as many pages as the one
/// before it. After this many such page faults in a row the whole block comes. A whole block costs
/// as much as hundreds of single pages, and many objects have only a few pages.
const RUN: u8 = 7;
/// The same for a run that began at the block's first or last page, as that of a sweep does. It
/// holds while at least `SWEEPING` of the last 64 blocks that were entered there continued a
/// stream. Objects that begin there, and are visited in random order, continue none.
const RUN_FROM_EDGE: u8 = 2;
const SWEEPING: u32 = 8;
/// Largest number of pages that one page fault on a block in the store brings, if not the whole
/// block.
pub const SINGLES_MOST: usize = 1 << (RUN - 1);
/// The whole block comes after this many page faults that brought single pages of it, if they came
/// more than `TIMES_RATE` times as fast as on the average block.
const OFTEN: u32 = 12;
/// The whole block comes too, while the program streams, after this many of its page faults among
/// the last `ENTERED_FOR_MIDST` of all: several threads have entered it together.
const TOGETHER: u32 = 3;
const TIMES_RATE: u64 = 8;
/// The whole block comes too if it has at least this many single pages, and more than
/// `TIMES_AVERAGE` times the average of all blocks.
const MANY: usize = 64;
const TIMES_AVERAGE: usize = 4;
/// Smallest number of the newest blocks that stay in place while the program streams, because they
/// are in use.
const LAG: usize = 4;
/// Number of the blocks that came last, and stay whatever else goes. An instruction may need
/// several at once. If each of them went before the next one came, its thread would not go on.
pub const FRESH: usize = 3;
/// A block was moved out too early if it has a page fault in its midst before twice the lag, and
/// this many, other blocks were moved out.
const EARLY: u64 = 8;
/// After this many whole blocks of which none had gone too early, the lag is a quarter smaller.
const CALM: u32 = 256;
/// The program has more streams than blocks if this many of the last 32 whole blocks had gone too
/// early.
const CROWDED: u32 = 28;
/// Number of page faults for which a crowded program gets single pages, the first time and at most.
const CROWDED_FOR: u64 = 256;
const CROWDED_FOR_MOST: u64 = 1 << 12;
/// In a program that jumps, whole blocks make room for single pages. If such a block comes back
/// after fewer page faults than `SOON`, blocks stay for `SPARED_FOR` page faults, and for longer
/// where most of them come back so.
const SOON: u64 = 1 << 12;
const SPARED_FOR: u64 = 1 << 9;
const SPARED_FOR_MOST: u64 = 1 << 16;
/// The program counts as one that jumps after this many page faults during which it did not stream.
/// Between two passes through its memory a program jumps for a short while.
const JUMPS_AFTER: u64 = 1 << 9;
/// While the program streams, one victim of this many is the oldest block, and the others are new
/// ones. Otherwise blocks that are no longer used would stay in place for ever.
const OLDEST_EVERY: u32 = 16;

/// Whether this page is the first or last one of its block.
fn is_edge(page: usize) -> bool {
    page == 0 || page == BLOCK_PAGES - 1
}

/// A stream: blocks that follow each other at a constant distance.
#[derive(Clone, Copy, Debug, Default)]
struct Stream {
    last: i64,
    stride: i64,
    /// The time of the stream's last use, counted in page faults. 0: there is no stream.
    used: u64,
}

impl Stream {
    /// Whether block `number` is the stream's next one. It passes over blocks that are in place: an
    /// access to those causes no page fault.
    fn continues_at(&self, number: i64, is_in_place: impl Fn(i64) -> bool) -> bool {
        let (distance, stride) = (number - self.last, self.stride);
        let steps = distance / stride;
        distance % stride == 0
            && (1..=1 + SKIPS_MAX).contains(&steps)
            && (1..steps).all(|step| is_in_place(self.last + step * stride))
    }
}

/// The page faults of one block, as far as the policy needs them.
#[derive(Clone, Copy, Debug, Default)]
pub struct History {
    /// The pages at which the last runs of single pages ended, as many as `runs` says.
    ends: [u16; RUNS],
    runs: u8,
    /// The run of the last page fault, and the run whose place the next new one takes.
    run: u8,
    oldest: u8,
    /// Number of page faults in a row of which each continued a run.
    length: u8,
    /// Whether the last of these went towards smaller addresses.
    pub is_down: bool,
    /// A bit for each run: whether it began at the first or last page of the block.
    from_edge: u16,
    /// Number of page faults that brought single pages, since this time in page faults.
    faults: u32,
    since: u64,
    /// The time of the last page fault on this block that counted for or against streaming, and
    /// whether it counted for it. 0: none did.
    counted: u64,
    is_counted_for: bool,
    /// Whether the block had gone too early.
    pub is_early: bool,
    /// The page at which the block was entered when it came as a whole last.
    entry: u16,
    /// Number of blocks that had been moved out when this one was last. 0: it never was, or it had
    /// been in place for long.
    evicted: u64,
    /// The time, in page faults, at which the block was moved out to make room for single pages. 0:
    /// it was not.
    jumped_at: u64,
}

impl History {
    /// Notes that the block is in place as a whole. Its runs have ended.
    pub fn came(&mut self) {
        *self = History { evicted: self.evicted, entry: self.entry, ..History::default() };
    }

    /// Notes that single pages came, for the last page fault.
    pub fn came_singly(&mut self, pages: std::ops::Range<usize>) {
        if self.runs > 0 {
            let end = if self.is_down { pages.start } else { pages.end - 1 };
            self.ends[usize::from(self.run)] = end as u16;
        }
    }

    /// Notes a page fault on a page. Returns whether the page lies beside the end of a run.
    fn follow(&mut self, page: usize) -> bool {
        let ends = &self.ends[..usize::from(self.runs)];
        let found = ends.iter().position(|&end| usize::from(end).abs_diff(page) <= 1);
        self.length = if found.is_some() { self.length.saturating_add(1) } else { 0 };
        self.is_down = found.is_some_and(|at| page < usize::from(self.ends[at]));
        let at = found.unwrap_or(usize::from(self.oldest));
        if found.is_none() {
            self.oldest = (self.oldest + 1) % RUNS as u8;
            self.runs = (self.runs + 1).min(RUNS as u8);
            self.from_edge = self.from_edge & !(1 << at) | u16::from(is_edge(page)) << at;
        }
        self.run = at as u8;
        self.ends[at] = page as u16;
        found.is_some()
    }

    /// Whether so many page faults have continued runs that the whole block comes. `sweeps`: the
    /// program has gone through memory in order lately.
    fn is_long(&self, sweeps: bool) -> bool {
        let is_from_edge = sweeps && self.from_edge >> self.run & 1 != 0;
        self.length >= if is_from_edge { RUN_FROM_EDGE } else { RUN }
    }

    /// Number of pages that a page fault brings: more with each one that continues a run.
    pub fn most(&self) -> usize {
        1 << self.length.min(RUN - 1)
    }

    /// Notes a page fault that may bring a single page, at this time in page faults. Returns
    /// whether the block has had many of them in a short time, compared with all `blocks`, or a few
    /// at once while the program `streams`.
    fn is_used_much(&mut self, now: u64, blocks: usize, streams: bool) -> bool {
        let blocks = blocks as u64;
        if self.faults == 0 || now - self.since > TIMES_RATE * blocks {
            (self.faults, self.since) = (0, now);
        }
        self.faults += 1;
        let are_together = self.faults == TOGETHER
            && u32::from(self.runs) >= TOGETHER
            && now - self.since < ENTERED_FOR_MIDST.min(blocks / 8);
        streams && are_together
            || self.faults >= OFTEN && u64::from(self.faults) * blocks > TIMES_RATE * (now - self.since + 1)
    }
}

/// A page fault, as the policy sees it.
#[derive(Clone, Copy, Debug)]
pub struct Fault {
    /// The block's address, counted in blocks.
    pub number: i64,
    /// The index of the page in its block.
    pub page: usize,
    /// Whether the block is in the store, so that single pages of it can come.
    pub is_stored: bool,
    /// Number of the block's single pages in place, and of all blocks' single pages.
    pub there: usize,
    pub there_of_all: usize,
    /// Number of all blocks.
    pub blocks: usize,
}

/// The policy's choice for a page fault.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Plan {
    /// The distance to the stream's next block, if the page fault is in a stream.
    pub stride: Option<i64>,
    /// The distance to the next block if the page fault begins a stream like the last one.
    pub guess: Option<i64>,
    /// Whether the whole block comes, and not only single pages of it.
    pub is_whole: bool,
}

/// The policy sees only the order of page faults, and no accessed bits.
///
/// A cyclic sweep over more memory than the limit would miss every block under FIFO and LRU. So
/// while the program streams, one of the newest blocks is moved out. The older ones are still in
/// place in the next round (MRU with a lag). The lag grows where blocks go while they are in use.
/// The next page fault on such a block comes soon, and in its midst.
#[derive(Debug)]
pub struct Policy {
    /// Resident blocks, in the order in which they came into place, each with the number of blocks
    /// that had come by then.
    order: VecDeque<(u32, u64)>,
    came: u64,
    streams: [Stream; STREAMS],
    /// Blocks that were entered a short while ago, each with the time in page faults.
    entered: VecDeque<(i64, u64)>,
    /// A bit for each of the last page faults, the newest one lowest: whether it was in a stream.
    recent: u16,
    /// A bit for each of the last blocks that were entered at an edge: whether it continued a
    /// stream.
    edges: u64,
    is_streaming: bool,
    /// The time, in page faults, at which the program streamed last.
    streamed_at: u64,
    /// The stride of the last page fault in a stream. 0: there was none.
    last_stride: i64,
    faults: u64,
    victims: u32,
    /// Number of blocks that were moved out.
    evicted: u64,
    lag: usize,
    /// The number of blocks that had been moved out when the lag grew last. Those went with a
    /// smaller lag, and say nothing about this one.
    evicted_before: u64,
    /// A bit for each of the last whole blocks: whether it went with this lag, and too early.
    early_of_lag: u16,
    calm: u32,
    /// A bit for each of the last whole blocks: whether it had gone too early.
    early: u32,
    /// The time, in page faults, until which the program counts as crowded, and how long that
    /// state lasted the last time.
    crowded_until: u64,
    crowded_for: u64,
    /// The time, in page faults, until which whole blocks stay in place of single pages, and how
    /// long that lasted the last time.
    spared_until: u64,
    spared_for: u64,
}

impl Default for Policy {
    fn default() -> Self {
        Policy {
            order: VecDeque::new(),
            came: 0,
            streams: [Stream::default(); STREAMS],
            entered: VecDeque::new(),
            recent: 0,
            // The first pass through memory is a stream until it shows otherwise.
            edges: u64::MAX,
            is_streaming: false,
            streamed_at: 0,
            last_stride: 0,
            faults: 0,
            victims: 0,
            evicted: 0,
            lag: LAG,
            evicted_before: 0,
            early_of_lag: 0,
            calm: 0,
            early: 0,
            crowded_until: 0,
            crowded_for: CROWDED_FOR,
            spared_until: 0,
            spared_for: 0,
        }
    }
}

impl Policy {
    /// Notes that a block is in place now.
    pub fn came(&mut self, id: u32) {
        self.came += 1;
        self.order.push_back((id, self.came));
    }

    /// Notes that a block is in place which had gone too early. It is in use, and stays longer than
    /// one that a stream passes.
    pub fn came_back(&mut self, id: u32) {
        self.came += 1;
        let len = self.order.len();
        let at = if self.is_streaming { len / 2 } else { len };
        self.order.insert(at, (id, self.came));
    }

    /// Notes that a block is no longer in place.
    pub fn went(&mut self, id: u32) {
        // The newest blocks are moved out most often, so search from the end.
        if let Some(at) = self.order.iter().rposition(|&(other, _)| other == id) {
            self.order.remove(at);
        }
    }

    /// Notes that a block was moved out, to be written to the store. A block that had been in place
    /// for more than one pass through all memory in place may come back at any time, and did not go
    /// too early. `for_singles`: if the program jumps, the block makes room for single pages.
    pub fn evicted(&mut self, id: u32, history: &mut History, for_singles: bool) {
        let came = self.order.iter().rfind(|(other, _)| *other == id).map_or(0, |&(_, came)| came);
        let is_old = self.came - came > self.order.len() as u64 + EARLY;
        self.went(id);
        self.evicted += 1;
        history.evicted = if is_old { 0 } else { self.evicted };
        if for_singles && !self.is_streaming {
            history.jumped_at = self.faults;
            self.spared_for -= self.spared_for / 4;
        }
    }

    /// Number of blocks in place.
    pub fn len(&self) -> usize {
        self.order.len()
    }

    /// Notes a page fault, and decides what it brings. `is_in_place` is true for the number of a
    /// block whose pages are in place.
    pub fn fault(&mut self, fault: Fault, history: &mut History, is_in_place: impl Fn(i64) -> bool) -> Plan {
        let Fault { number, page, is_stored, there, there_of_all, blocks } = fault;
        self.faults += 1;
        let in_run = is_stored && history.follow(page);
        // A page fault beside a run says nothing about streams: the block is known to be in use.
        let (stride, is_entered) = match in_run {
            true => (None, false),
            false => self.enter(number, page, blocks, history, is_in_place),
        };
        let is_often = is_stored && history.is_used_much(self.faults, blocks, self.is_streaming);
        let is_many = there >= MANY && there * blocks > TIMES_AVERAGE * there_of_all;
        let is_used = is_often || is_many || history.is_long(self.edges.count_ones() >= SWEEPING);
        let is_whole = !is_stored || !self.is_crowded() && (is_entered || is_used);
        if is_whole {
            self.note_whole(history.is_early, history.evicted > self.evicted_before);
            history.entry = page as u16;
            let is_back = history.jumped_at > 0 && self.faults - history.jumped_at < SOON;
            if is_back && !self.is_streaming && !self.spares_blocks() {
                self.spared_for = (2 * self.spared_for).clamp(SPARED_FOR, SPARED_FOR_MOST);
                self.spared_until = self.faults + self.spared_for;
            }
            if is_used && !self.was_entered(number, 0) {
                self.entered.push_back((number, self.faults));
            }
        }
        let may_begin = self.is_streaming && is_entered && stride.is_none();
        let guess = Some(self.last_stride).filter(|&last| may_begin && last != 0);
        self.last_stride = stride.unwrap_or(self.last_stride);
        Plan { stride, guess, is_whole }
    }

    /// Notes a page fault on a block that never comes as a whole. It says nothing about streams.
    pub fn fault_singly(&mut self, page: usize, history: &mut History) -> Plan {
        self.faults += 1;
        history.follow(page);
        Plan { stride: None, guess: None, is_whole: false }
    }

    /// Looks for the stream of a page fault that continues no run of single pages. Returns its
    /// stride, and whether the whole block should come. Notes whether the block had gone too early.
    fn enter(
        &mut self,
        number: i64,
        page: usize,
        blocks: usize,
        history: &mut History,
        is_in_place: impl Fn(i64) -> bool,
    ) -> (Option<i64>, bool) {
        let now = self.faults;
        let is_edge = is_edge(page);
        while self.entered.pop_front_if(|&mut (_, at)| at + ENTERED_FOR < now).is_some() {}
        let since = now.saturating_sub(if is_edge { ENTERED_FOR } else { ENTERED_FOR_MIDST });
        let was_entered = self.was_entered(number, 0);
        // After a sweep, jumps would find streams that have just ended.
        let may_continue = is_edge || self.is_streaming;
        let known = self.streams.iter().position(|stream| {
            may_continue
                && stream.used > 0
                && stream.used + ENTERED_FOR >= now
                && stream.continues_at(number, &is_in_place)
        });
        let stride = match known {
            Some(at) => Some(self.streams[at].stride),
            None => self.begun(number, since, &is_in_place),
        };
        if let Some(stride) = stride.filter(|_| may_continue) {
            let oldest = || (0..STREAMS).min_by_key(|&at| self.streams[at].used);
            let at = known.or_else(oldest).expect("there are streams");
            self.streams[at] = Stream { last: number, stride, used: now };
        }
        if is_edge {
            self.edges = self.edges << 1 | u64::from(stride.is_some());
        }
        // A block that is entered at its edge and continues no stream may begin one. While the
        // program streams, it is no sign of jumps.
        let is_in_stream = stride.is_some() || self.was_entered(number, since);
        let may_begin = is_edge && self.is_streaming;
        // Threads that share a block enter it together, at several pages. They count once.
        let is_counted =
            history.counted > 0 && history.counted + ENTERED_FOR_MIDST.min(blocks as u64 / 8) >= now;
        if is_counted {
            if is_in_stream && !history.is_counted_for {
                // The first of them counted against it. Change the newest such bit.
                history.is_counted_for = true;
                self.recent |= self.recent.wrapping_add(1);
            }
        } else if is_in_stream || !may_begin {
            (history.counted, history.is_counted_for) = (now, is_in_stream);
            self.recent = self.recent << 1 | u16::from(is_in_stream);
        }
        if self.is_streaming && self.edges.count_ones() < CONTINUING {
            self.recent = 0;
        }
        const { assert!(RECENT == u16::BITS) }
        match self.recent.count_ones() {
            STREAMING.. => self.is_streaming = true,
            ..=JUMPING => self.is_streaming = false,
            _ => {}
        }
        if self.is_streaming {
            self.streamed_at = now;
        }
        if (is_edge || stride.is_some() && may_continue) && !was_entered {
            self.entered.push_back((number, now));
        }
        // A sweep comes back to each block by the page at which it entered it before.
        let comes_back = is_edge || page == usize::from(history.entry);
        history.is_early |= !comes_back
            && history.evicted > 0
            && self.evicted - history.evicted <= 2 * self.lag as u64 + EARLY;
        let is_whole = stride.is_some() || self.is_streaming && (is_in_stream || is_edge);
        (stride, is_whole)
    }

    fn was_entered(&self, number: i64, since: u64) -> bool {
        self.entered.iter().any(|&(other, time)| other == number && time >= since)
    }

    /// The smallest distance at which the blocks before `number` were entered since a time in page
    /// faults, one after the other. While the program streams, blocks in place are passed over.
    fn begun(&self, number: i64, since: u64, is_in_place: impl Fn(i64) -> bool) -> Option<i64> {
        const FAR: i64 = 3 * STRIDE_MAX;
        // For each distance the time at which the block there was entered, or 0.
        let mut times = [0; 2 * FAR as usize + 1];
        for &(other, time) in self.entered.iter().filter(|&&(_, time)| time >= since) {
            let distance = number.saturating_sub(other);
            if (-FAR..=FAR).contains(&distance) {
                times[(distance + FAR) as usize] = time;
            }
        }
        let at = |distance: i64| times[(distance + FAR) as usize];
        // The block before one that was entered at a time: its step, and the time of its own entry.
        let before = |stride: i64, (step, time): (i64, u64)| {
            let mut steps = step + 1..=FAR / stride.abs();
            let is_passed = |step: i64| self.is_streaming && is_in_place(number - stride * step);
            let found = steps.find(|&step| at(stride * step) > 0 || !is_passed(step))?;
            let earlier = at(stride * found);
            (earlier > 0 && earlier <= time).then_some((found, earlier))
        };
        let mut strides = (1..=STRIDE_MAX).flat_map(|stride| [stride, -stride]);
        strides.find(|&stride| {
            let count = if stride.abs() <= STRIDE_SHORT { 2 } else { 3 };
            (0..count).try_fold((0, u64::MAX), |last, _| before(stride, last)).is_some()
        })
    }

    /// Notes that a whole block comes. If blocks go too early, more of the newest ones stay in
    /// place. One of sixteen proves nothing: it may be a jump into a block that a sweep has left.
    /// Nor does a block that went before the lag grew last, as `is_of_lag` says.
    fn note_whole(&mut self, is_early: bool, is_of_lag: bool) {
        self.early = self.early << 1 | u32::from(is_early);
        self.early_of_lag = self.early_of_lag << 1 | u16::from(is_early && is_of_lag);
        if !is_early {
            self.calm += 1;
        } else if self.early_of_lag.count_ones() >= 2 {
            self.lag = (self.lag * 2).min(self.order.len().max(LAG));
            (self.evicted_before, self.early_of_lag) = (self.evicted, 0);
            self.calm = 0;
        }
        if self.calm >= CALM {
            self.lag = (self.lag - self.lag / 4).max(LAG);
            self.calm = 0;
        }
        if self.early.count_ones() >= CROWDED && !self.is_crowded() {
            let is_again = self.crowded_until > 0 && self.faults - self.crowded_until < 4 * self.crowded_for;
            self.crowded_for = match is_again {
                true => CROWDED_FOR_MOST.min(self.crowded_for * 2),
                false => CROWDED_FOR,
            };
            self.crowded_until = self.faults + self.crowded_for;
            self.early = 0;
        }
    }

    /// Whether the program streams.
    pub fn is_streaming(&self) -> bool {
        self.is_streaming
    }

    /// Whether the program has jumped for a while.
    pub fn is_jumping(&self) -> bool {
        !self.is_streaming && self.faults >= self.streamed_at + JUMPS_AFTER
    }

    /// Whether blocks that made room for single pages came straight back.
    pub fn spares_blocks(&self) -> bool {
        !self.is_streaming && self.faults < self.spared_until
    }

    /// Whether the program has more streams than blocks have room. Whole blocks would go before
    /// they are used.
    fn is_crowded(&self) -> bool {
        self.faults < self.crowded_until
    }

    /// The next block to move out. It stays in the order until [`evicted`](Self::evicted) is called
    /// for it. `ahead`: number of the newest blocks that came before their page fault.
    pub fn victim(&mut self, ahead: usize) -> Option<u32> {
        self.victims = self.victims.wrapping_add(1);
        let len = self.order.len();
        let at = if self.is_streaming() && !self.victims.is_multiple_of(OLDEST_EVERY) {
            len.saturating_sub(self.lag + ahead)
        } else {
            0
        };
        let fresh = FRESH.min(len.saturating_sub(1)) as u64;
        let may_go = |at: &usize| self.came - self.order[*at].1 >= fresh;
        (0..len.min(at + 1)).rev().chain(at + 1..len).find(may_go).map(|at| self.order[at].0)
    }

    /// The oldest of the blocks in place.
    pub fn oldest(&self) -> Option<u32> {
        self.order.front().map(|&(id, _)| id)
    }

    /// The blocks in place, the newest one first.
    pub fn newest_first(&self) -> impl Iterator<Item = u32> + '_ {
        self.order.iter().rev().map(|&(id, _)| id)
    }

    /// Notes that a block could not be moved out. All others go before it from now on, but for
    /// those that came last.
    pub fn spared(&mut self, id: u32) {
        let Some(at) = self.order.iter().position(|&(other, _)| other == id) else { return };
        let entry = self.order.remove(at).expect("it is there");
        // A stream's blocks go from near the end. Blocks that stay must not fill that place.
        if self.is_streaming && at > 0 {
            self.order.push_front(entry);
        } else {
            self.order.push_back(entry);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;
    use std::collections::{BTreeMap, BTreeSet};

    /// Number of victims that the pager tries at most for one block.
    const TRIES: usize = 16;

    /// A program's memory under the policy, without a kernel and a store. It counts what comes.
    struct Memory {
        policy: Policy,
        /// The limit in pages, and the pages in place.
        limit: usize,
        used: usize,
        resident: BTreeSet<i64>,
        blocks: BTreeMap<i64, (History, BTreeSet<usize>)>,
        singles: VecDeque<(i64, usize)>,
        singles_there: usize,
        whole: usize,
        single: usize,
    }

    impl Memory {
        /// A memory with room for `limit` blocks. A pass through `blocks` blocks has filled it.
        fn new(limit: usize, blocks: usize) -> Self {
            let mut memory = Memory {
                policy: Policy::default(),
                limit: limit * BLOCK_PAGES,
                used: 0,
                resident: BTreeSet::new(),
                blocks: (0..blocks as i64).map(|number| (number, Default::default())).collect(),
                singles: VecDeque::new(),
                singles_there: 0,
                whole: 0,
                single: 0,
            };
            memory.play(0..blocks * BLOCK_PAGES);
            memory
        }

        fn make_room(&mut self, pages: usize) {
            while self.used + pages > self.limit {
                let is_whole = self.policy.len() * BLOCK_PAGES > self.limit / 8 || self.singles.is_empty();
                if let Some(victim) = is_whole.then(|| self.policy.victim(0)).flatten() {
                    let number = i64::from(victim);
                    let history = &mut self.blocks.get_mut(&number).expect("it came").0;
                    self.policy.evicted(victim, history, true);
                    assert!(self.resident.remove(&number), "a victim is resident");
                    self.used -= BLOCK_PAGES;
                } else {
                    let (number, page) = self.singles.pop_front().expect("something is in place");
                    let was_there = self.blocks.get_mut(&number).expect("it came").1.remove(&page);
                    self.used -= usize::from(was_there);
                    self.singles_there -= usize::from(was_there);
                }
            }
        }

        fn touch(&mut self, page: usize) {
            let (number, page) = ((page / BLOCK_PAGES) as i64, page % BLOCK_PAGES);
            let blocks = self.blocks.len();
            let (history, there) = self.blocks.get_mut(&number).expect("a block");
            if there.contains(&page) || self.resident.contains(&number) {
                return;
            }
            let (there, there_of_all) = (there.len(), self.singles_there);
            let fault = Fault { number, page, is_stored: true, there, there_of_all, blocks };
            let resident = &self.resident;
            let plan = self.policy.fault(fault, history, |other| resident.contains(&other));
            if plan.is_whole {
                let is_early = history.is_early;
                history.came();
                (self.used, self.singles_there) = (self.used - there, self.singles_there - there);
                self.blocks.get_mut(&number).expect("a block").1.clear();
                self.make_room(BLOCK_PAGES);
                self.used += BLOCK_PAGES;
                self.resident.insert(number);
                match is_early {
                    true => self.policy.came_back(number as u32),
                    false => self.policy.came(number as u32),
                }
                self.whole += 1;
                return;
            }
            let (most, is_down) = (history.most(), history.is_down);
            self.make_room(most);
            let (history, there) = self.blocks.get_mut(&number).expect("a block");
            let is_away = |page: &usize| !there.contains(page);
            let pages = match is_down {
                true => {
                    page - ((page + 1).saturating_sub(most)..page).rev().take_while(is_away).count()..page + 1
                }
                false => {
                    page..page + 1 + (page + 1..BLOCK_PAGES.min(page + most)).take_while(is_away).count()
                }
            };
            history.came_singly(pages.clone());
            self.used += pages.len();
            self.singles_there += pages.len();
            there.extend(pages.clone());
            self.singles.extend(pages.map(|page| (number, page)));
            self.single += 1;
        }

        /// Numbers of whole blocks, and of page faults that brought single pages, of a program that
        /// touches these pages.
        fn play(&mut self, pages: impl IntoIterator<Item = usize>) -> (usize, usize) {
            let before = (self.whole, self.single);
            pages.into_iter().for_each(|page| self.touch(page));
            (self.whole - before.0, self.single - before.1)
        }
    }

    /// Threads that share pieces of work, and whose page faults are handled one after another. A
    /// thread that has ended its piece takes the next one.
    struct Together {
        /// For each thread its time, in microseconds, its piece and the next page there.
        threads: Vec<(u64, usize, usize)>,
        next: usize,
        /// The time until which the pager handles page faults that it has read.
        busy: u64,
        /// The time at which the last page fault of each block was handled.
        came: BTreeMap<usize, u64>,
        /// The state of a generator of random numbers.
        chance: u64,
    }

    impl Together {
        /// Microseconds of a thread's work on a page, and of the two kinds of page faults.
        const PAGE: u64 = 26;
        const SINGLE: u64 = 20;
        const WHOLE: u64 = 900;

        fn new(threads: usize) -> Self {
            Together { threads: vec![(0, 0, 0); threads], next: 0, busy: 0, came: BTreeMap::new(), chance: 7 }
        }

        /// Plays all pieces, as [`Memory::play`] does.
        fn play(&mut self, memory: &mut Memory, pieces: &[&[usize]]) -> (usize, usize) {
            let begun = self.threads.iter().map(|thread| thread.0).max().unwrap();
            let before = (memory.whole, memory.single);
            self.next = 0;
            for thread in &mut self.threads {
                *thread = (begun, self.next, 0);
                self.next += 1;
            }
            loop {
                let working = self.threads.iter_mut().filter(|thread| thread.1 < pieces.len());
                let Some(thread) = working.min_by_key(|thread| thread.0) else { break };
                let page = pieces[thread.1][thread.2];
                let counts = (memory.whole, memory.single);
                memory.touch(page);
                let cost = match (memory.whole - counts.0, memory.single - counts.1) {
                    (0, 0) => 0,
                    (0, _) => Self::SINGLE,
                    _ => Self::WHOLE,
                };
                if cost > 0 {
                    self.busy = self.busy.max(thread.0) + cost;
                    self.came.insert(page / BLOCK_PAGES, self.busy);
                }
                let came = self.came.get(&(page / BLOCK_PAGES)).copied().unwrap_or(0);
                self.chance = self.chance.wrapping_mul(0x5851_f42d_4c95_7f2d).wrapping_add(1);
                thread.0 = thread.0.max(came) + Self::PAGE / 2 + (self.chance >> 33) % Self::PAGE;
                thread.2 += 1;
                if thread.2 == pieces[thread.1].len() {
                    (thread.1, thread.2) = (self.next, 0);
                    self.next += 1;
                }
            }
            (memory.whole - before.0, memory.single - before.1)
        }
    }

    /// The pages of a gate on this bit of a page's number, over `blocks` blocks. `threads` threads
    /// take turns, each with its own part of the pairs. With `control` only pages whose number has
    /// that bit are touched.
    fn gate(blocks: usize, bit: u32, control: Option<u32>, threads: usize) -> impl Iterator<Item = usize> {
        let each = blocks * BLOCK_PAGES / 2 / threads;
        let pair = move |at: usize| (at >> bit << (bit + 1)) | at & ((1 << bit) - 1);
        let pages = move |at: usize| [pair(at), pair(at) | 1 << bit];
        let all =
            (0..each).flat_map(move |at| (0..threads).flat_map(move |thread| pages(thread * each + at)));
        all.filter(move |page| control.is_none_or(|control| page >> control & 1 == 1))
    }

    /// Pages in random order.
    fn jumps(blocks: usize, count: u64) -> impl Iterator<Item = usize> {
        (1..=count).map(move |at| {
            let mixed = (at ^ at >> 31).wrapping_mul(0x9e37_79b9_7f4a_7c15);
            ((mixed ^ mixed >> 29).wrapping_mul(0xbf58_476d_1ce4_e5b9) >> 20) as usize
                % (blocks * BLOCK_PAGES)
        })
    }

    #[test]
    fn a_cyclic_sweep_hits_what_fits_where_fifo_would_miss_all() {
        for (blocks, backwards, strays) in
            [(256, false, 0), (256, true, 0), (96, false, 0), (70, false, 0), (96, false, 2)]
        {
            let mut memory = Memory::new(64, blocks);
            let pages = blocks * BLOCK_PAGES;
            let sweep = || (0..pages).map(move |at| if backwards { pages - 1 - at } else { at });
            memory.play(sweep());
            let mut strays = jumps(blocks, 10 * strays);
            let (mut whole, mut single) = (0, 0);
            for _ in 0..10 {
                let stray = strays.by_ref().take(2).collect::<Vec<_>>();
                let half = |at: usize| sweep().skip(at * pages / 2).take(pages / 2);
                let mixed = (0..2).flat_map(|at| half(at).chain(stray.get(at).copied()));
                let found = memory.play(mixed.collect::<Vec<_>>());
                (whole, single) = (whole + found.0, single + found.1);
            }
            let least = 10 * (blocks - 64);
            assert!(whole < least + 10 * 14, "{blocks} blocks: {whole} came, {least} had to");
            assert!(single < 30, "{single}");
        }
    }

    /// A sweep that touches neither the first nor the last page of a block, over little more than
    /// there is room for.
    #[test]
    fn a_sweep_that_enters_blocks_in_their_midst_brings_whole_blocks() {
        for blocks in [65, 72, 80, 96] {
            let mut memory = Memory::new(64, blocks);
            let sweep = || (0..blocks * BLOCK_PAGES).filter(|page| !matches!(page % BLOCK_PAGES, 0 | 511));
            (0..3).for_each(|_| _ = memory.play(sweep()));
            let (whole, single) = memory.play((0..10).flat_map(|_| sweep()));
            assert!(
                whole <= 10 * blocks && single < 24 * whole,
                "{blocks} blocks: {whole} whole, {single} single"
            );
        }
    }

    /// In every second round the program touches a page of a block that the sweep has just left.
    /// With a larger lag the sweep would miss the blocks that stayed in place for it.
    #[test]
    fn one_stray_jump_into_a_block_that_a_sweep_has_left_does_not_make_the_lag_larger() {
        let (limit, blocks) = (64, 96);
        let mut memory = Memory::new(limit, blocks);
        for round in 0..20 {
            let at = 80 + round % 10;
            let (before, _) = memory.play(0..at * BLOCK_PAGES);
            if round % 2 == 1 {
                let gone = (0..at).rev().find(|&number| !memory.resident.contains(&(number as i64)));
                memory.play([gone.expect("not all fit") * BLOCK_PAGES + 100 + round]);
            }
            let (after, _) = memory.play(at * BLOCK_PAGES..blocks * BLOCK_PAGES);
            let (whole, least) = (before + after, blocks - limit);
            assert!(whole < least + 10, "round {round}: {whole} came, {least} had to");
        }
    }

    #[test]
    fn a_loop_that_fits_misses_nothing() {
        let found = Memory::new(64, 60).play((0..100).flat_map(|_| 0..60 * BLOCK_PAGES));
        assert_eq!(found, (0, 0));
    }

    #[test]
    fn gates_on_any_bit_bring_whole_blocks_by_any_number_of_threads() {
        for (threads, blocks, limit, most) in [(1, 128, 32, 1.2), (2, 128, 32, 1.2), (16, 256, 64, 1.7)] {
            let mut memory = Memory::new(limit, blocks);
            for bit in (0..16).rev() {
                let (whole, single) = memory.play(gate(blocks, bit, None, threads));
                let least = (blocks - limit) as f64;
                assert!(
                    (whole as f64) < least * most && single <= 100 * threads,
                    "{threads} threads, bit {bit}: {whole} of {least} blocks, {single} single faults"
                );
            }
        }
    }

    /// Only pages with one bit of their number are touched. So no block is entered at its edge.
    #[test]
    fn gates_with_a_control_bring_whole_blocks() {
        for threads in [1, 2, 4] {
            let mut memory = Memory::new(64, 256);
            for control in [8, 6, 4, 2, 0] {
                memory.play(gate(256, 9, None, threads));
                let (whole, single) = memory.play(gate(256, 9, Some(control), threads));
                assert!(
                    whole <= 256 && single < 12 * 256,
                    "{threads} threads, control {control}: {whole} blocks, {single} single faults"
                );
            }
        }
    }

    /// Threads take pieces of 32 pairs of pages in turn, so most page faults are in the midst of a
    /// block. With an offset all are.
    #[test]
    fn threads_that_share_blocks_stream() {
        let (threads, piece) = (16, 32);
        for (offset, most) in [(0, 100), (137, 8000)] {
            let mut memory = Memory::new(64, 257);
            for bit in (8..16).rev() {
                let alone: Vec<usize> = gate(256, bit, None, 1).map(|page| page + offset).collect();
                let pieces = alone.chunks(2 * piece * threads);
                let pages = pieces.flat_map(|pieces| {
                    let of = move |thread: usize, at: usize| &pieces[2 * (thread * piece + at)..][..2];
                    (0..piece).flat_map(move |at| (0..threads).flat_map(move |thread| of(thread, at)))
                });
                let (whole, single) = memory.play(pages.copied());
                assert!(
                    whole <= 280 && single < most,
                    "offset {offset}, bit {bit}: {whole} blocks, {single} single faults"
                );
            }
        }
    }

    /// A simulator whose threads take pieces of eight pages in turn, in memory that begins in the
    /// midst of a block. So a block is entered by many threads at once, and seldom at its edge.
    /// Before the passes the program jumps.
    #[test]
    fn threads_that_enter_blocks_together_bring_whole_blocks_and_keep_the_lag_short() {
        let (blocks, limit, offset) = (256, 60, 6);
        for threads in [2, 16] {
            let mut memory = Memory::new(limit, blocks + 1);
            memory.play(jumps(blocks, 4000));
            let mut together = Together::new(threads);
            let passes = (0..9).map(|_| None).chain((0..17).map(Some));
            for (pass, bit) in passes.enumerate() {
                let (pages, piece): (Vec<usize>, usize) = match bit {
                    None => ((0..blocks * BLOCK_PAGES).collect(), 8),
                    Some(bit) => (gate(blocks, bit, None, 1).collect(), 16),
                };
                let pages: Vec<usize> = pages.into_iter().map(|page| page + offset).collect();
                let pieces: Vec<&[usize]> = pages.chunks(piece).collect();
                let (whole, single) = together.play(&mut memory, &pieces);
                let least = blocks + 1 - limit;
                assert!(
                    whole < least * 5 / 4 && single < 150,
                    "{threads} threads, pass {pass}: {whole} of {least} blocks, {single} single faults"
                );
            }
        }
    }

    /// Sixteen threads with two streams each use 32 blocks at a time.
    #[test]
    fn a_block_that_came_back_early_stays_while_a_stream_passes() {
        let mut policy = Policy { is_streaming: true, ..Policy::default() };
        (0..40).for_each(|id| policy.came(id));
        policy.came_back(100);
        for id in 200..230 {
            let victim = policy.victim(0).expect("there are blocks");
            assert_ne!(victim, 100);
            policy.evicted(victim, &mut History::default(), true);
            policy.came(id);
        }
        // Nor do blocks go that came before their page fault.
        let newest: Vec<u32> = policy.newest_first().take(3 + LAG).collect();
        for _ in 1..OLDEST_EVERY {
            assert!(policy.victim(3).is_some_and(|victim| !newest[..2 + LAG].contains(&victim)));
        }
    }

    /// A sweep over new blocks, beside blocks that the program has locked.
    #[test]
    fn blocks_that_stay_do_not_fill_the_place_from_which_a_stream_s_blocks_go() {
        for (stuck, limit) in [(5, 16), (20, 24), (100, 128), (300, 350)] {
            let mut policy = Policy { is_streaming: true, ..Policy::default() };
            (0..stuck).for_each(|id| policy.came(id));
            let (mut tries, mut most) = (0, 0);
            for id in stuck..stuck + 2_000 {
                policy.came(id);
                for _ in 0..TRIES {
                    if policy.len() <= limit {
                        break;
                    }
                    tries += 1;
                    match policy.victim(0).expect("there are blocks") {
                        victim if victim < stuck => policy.spared(victim),
                        victim => policy.evicted(victim, &mut History::default(), true),
                    }
                }
                most = most.max(policy.len());
            }
            assert!(most <= limit + FRESH, "{most} blocks with a limit of {limit}");
            assert!(tries < 3 * 2_000, "{tries} tries for 2000 blocks");
        }
    }

    #[test]
    fn a_block_that_three_threads_enter_at_once_comes_whole_while_the_program_streams() {
        for is_streaming in [true, false] {
            let mut memory = Memory::new(16, 256);
            memory.play((0..64 * BLOCK_PAGES).chain(jumps(if is_streaming { 1 } else { 128 }, 1000)));
            assert_eq!(memory.policy.is_streaming(), is_streaming);
            let far = 200 * BLOCK_PAGES;
            let came = memory.play([100, 200, 300].map(|page| far + page));
            assert_eq!(came, if is_streaming { (1, 2) } else { (0, 3) });
        }
    }

    #[test]
    fn more_streams_than_blocks_come_by_runs_of_single_pages() {
        for (limit, backwards) in [(31, false), (24, false), (12, true)] {
            let mut memory = Memory::new(limit, 256);
            for bit in (9..16).rev() {
                let pages = gate(256, bit, None, 16);
                let (whole, single) = match backwards {
                    true => memory.play(pages.map(|page| 256 * BLOCK_PAGES - 1 - page)),
                    false => memory.play(pages),
                };
                // Each page comes once: 256 blocks would be best. Without this mode thousands come.
                assert!(
                    whole < 450 && single < 4500,
                    "limit {limit}, bit {bit}: {whole} blocks, {single} single faults"
                );
            }
        }
    }

    #[test]
    fn jumps_bring_single_pages_also_after_a_sweep_and_in_little_memory() {
        for (blocks, limit) in [(24, 16), (128, 32), (1000, 32)] {
            let mut memory = Memory::new(limit, blocks);
            (0..9).for_each(|bit| _ = memory.play(gate(blocks / 8 * 8, bit, None, 2)));
            let (whole, single) = memory.play(jumps(blocks, 60_000));
            assert!(whole < 60 && single > 10_000, "{blocks} blocks: {whole} whole, {single} single faults");
        }
    }

    /// The jumps are in the midst of blocks, beside blocks that the sweep has just entered. If each
    /// of them began a stream, later jumps would continue it.
    #[test]
    fn jumps_beside_what_a_sweep_has_entered_begin_no_streams() {
        let programs = 60;
        let whole = (0..programs).map(|program| {
            let mut memory = Memory::new(16, 24);
            let edges = [0, BLOCK_PAGES - 1];
            let midst = jumps(24, u64::MAX).filter(|page| !edges.contains(&(page % BLOCK_PAGES)));
            memory.play(midst.skip(8000 * program).take(200)).0
        });
        let whole: usize = whole.sum();
        assert!(whole < 23 * programs, "{whole} whole blocks");
    }

    /// Four threads go through each block, each through its own quarter. Others jump elsewhere, so
    /// no block has page faults often.
    #[test]
    fn each_of_the_threads_that_share_a_block_has_its_own_run_there() {
        let mut memory = Memory::new(64, 256);
        let mut others = jumps(128, u64::MAX);
        memory.play(others.by_ref().take(2000));
        let quarter = BLOCK_PAGES / 4;
        for block in 128..160 {
            let mut faults = 0;
            for at in 1..quarter {
                for thread in 0..4 {
                    if memory.play([block * BLOCK_PAGES + thread * quarter + at]) != (0, 0) {
                        faults += 1;
                        memory.play(others.by_ref().take(100));
                    }
                }
            }
            assert!(faults < 20, "block {block}: {faults} page faults");
        }
    }

    #[test]
    fn jumps_to_first_pages_do_not_stay_a_stream() {
        let mut memory = Memory::new(64, 400);
        let (whole, _) = memory.play(jumps(400, 5000).map(|page| page / BLOCK_PAGES * BLOCK_PAGES));
        assert!(whole < 800, "{whole} whole blocks");
    }

    #[test]
    fn a_sweep_beside_jumps_brings_whole_blocks_and_single_pages() {
        let mut memory = Memory::new(32, 128);
        let sweep = (0..).map(|at| 64 * BLOCK_PAGES + at % (64 * BLOCK_PAGES));
        let mixed = jumps(64, 40_000).zip(sweep.step_by(10)).flat_map(|(jump, at)| {
            let end = if (at + 10) / BLOCK_PAGES < 128 { at + 10 } else { 128 * BLOCK_PAGES };
            std::iter::once(jump).chain(at..end)
        });
        let (whole, single) = memory.play(mixed);
        assert!(whole < 1000 && (20_000..38_000).contains(&single), "{whole} blocks, {single} single faults");
    }

    #[test]
    fn a_page_in_each_block_is_a_single_page_if_it_is_in_the_midst() {
        let mut memory = Memory::new(32, 128);
        memory.play(jumps(128, 2000));
        let columns =
            (0..64).flat_map(|column| (0..128).map(move |row| row * BLOCK_PAGES + 200 + 3 * column));
        assert!(memory.play(columns).0 <= 2);
    }

    #[test]
    fn objects_of_some_pages_come_singly() {
        let mut memory = Memory::new(32, 128);
        let objects = jumps(127, 20_000).flat_map(|page| page..page + 8);
        let (whole, single) = memory.play(objects);
        assert!(whole < 500 && single > 40_000, "{whole} whole blocks, {single} single faults");
    }

    #[test]
    fn a_run_from_the_edge_of_a_block_brings_it_sooner_than_one_in_its_midst() {
        let mut memory = Memory::new(32, 128);
        // The jumps leave three blocks alone, and the sweep before them has left those.
        let [up, down, midst] = [10, 57, 90];
        let is_other = |page: &usize| ![up, down, midst].contains(&(page / BLOCK_PAGES));
        memory.play(jumps(127, 4000).filter(is_other));
        let page = |block: usize, page: usize| block * BLOCK_PAGES + page;
        let pass = memory.play(page(up, 0)..page(up, BLOCK_PAGES));
        assert_eq!(pass, (1, 2), "upwards");
        let pass = memory.play((page(down, 0)..page(down, BLOCK_PAGES)).rev());
        assert_eq!(pass, (1, 2), "downwards");
        let pass = memory.play(page(midst, 100)..page(midst, BLOCK_PAGES));
        assert_eq!(pass, (1, usize::from(RUN)), "from page 100 on");
    }

    #[test]
    fn objects_at_the_edges_of_blocks_come_singly_if_they_are_visited_in_random_order() {
        let mut memory = Memory::new(64, 1000);
        let objects = |count| jumps(1000, count).map(|page| page / BLOCK_PAGES * BLOCK_PAGES);
        memory.play(objects(2000).flat_map(|page| page..page + 8));
        let (whole, _) = memory.play(objects(10_000).flat_map(|page| page..page + 8));
        assert!(whole < 100, "{whole} whole blocks for 1000 objects of 8 pages");
    }

    /// Enters the blocks of these numbers at their first page. Returns the stride that the policy
    /// finds for each of them.
    fn enter(policy: &mut Policy, numbers: impl IntoIterator<Item = i64>) -> Vec<Option<i64>> {
        let mut enter = |number| {
            let fault =
                Fault { number, page: 0, is_stored: true, there: 0, there_of_all: 0, blocks: 1 << 20 };
            policy.fault(fault, &mut History::default(), |other| (13..40).contains(&other)).stride
        };
        numbers.into_iter().map(&mut enter).collect()
    }

    #[test]
    fn strides_of_both_directions_are_streams_and_jumps_are_not() {
        for stride in [1, -1, 2, -5, 16] {
            let mut policy = Policy::default();
            let said = enter(&mut policy, (0..30).map(|step| 10_000 + step * stride));
            assert!(said[3..].iter().all(|said| *said == Some(stride)), "{stride}: {said:?}");
            assert!(policy.is_streaming());
        }
        let mut policy = Policy::default();
        let said = enter(&mut policy, (1..64).map(|step| step * step * 1_000));
        assert!(said.iter().all(Option::is_none), "{said:?}");
        assert!(!policy.is_streaming());
    }

    #[test]
    fn a_stream_passes_over_blocks_in_place() {
        let said = enter(&mut Policy::default(), [10, 11, 12, 40, 41, 50]);
        assert_eq!(said, [None, None, Some(1), Some(1), Some(1), None], "block 42 is not in place");
    }

    #[test]
    fn a_program_that_has_streamed_jumps_only_after_a_while() {
        let mut memory = Memory::new(16, 64);
        assert!(memory.policy.is_streaming() && !memory.policy.is_jumping());
        let mut jumps = jumps(64, 5_000);
        let mut count = 0;
        while !memory.policy.is_jumping() {
            let before = memory.policy.faults;
            memory.play(jumps.by_ref().take(1));
            count += memory.policy.faults - before;
        }
        assert!((JUMPS_AFTER..JUMPS_AFTER + 64).contains(&count), "{count}");
        memory.play((0..64 * BLOCK_PAGES).chain(0..16 * BLOCK_PAGES));
        assert!(!memory.policy.is_jumping());
    }

    #[test]
    fn whole_blocks_stay_for_longer_each_time_that_one_comes_straight_back() {
        let mut policy = Policy::default();
        let mut history = History::default();
        let fault = |page, is_stored| {
            let none = Fault { number: 0, page, is_stored, there: 0, there_of_all: 0, blocks: 100 };
            Fault { number: 1000 * page as i64, ..none }
        };
        // Page faults in the midst of blocks that bring single pages.
        let jump = |policy: &mut Policy, count: u64| {
            (0..count).for_each(|at| {
                policy.fault(fault(1 + at as usize % 500, true), &mut History::default(), |_| false);
            });
        };
        jump(&mut policy, 100);
        let mut spared = Vec::new();
        for away in [10, 10, 10, SOON, 10] {
            policy.came(1);
            policy.evicted(1, &mut history, true);
            jump(&mut policy, away);
            policy.fault(fault(7, false), &mut history, |_| false);
            history.came();
            policy.went(1);
            let mut count = 0;
            while policy.spares_blocks() {
                jump(&mut policy, 1);
                count += 1;
            }
            spared.push(count);
        }
        // A block that goes for good makes the next time shorter again.
        assert_eq!(spared, [512, 768, 1152, 0, 1296]);
        policy.is_streaming = true;
        policy.spared_until = u64::MAX;
        assert!(!policy.spares_blocks(), "streams need frames");
    }

    proptest! {
        #[test]
        fn a_thread_gets_all_blocks_that_it_needs_at_once(
            // Each with whether it comes back early, and whether it can be moved out.
            before in prop::collection::vec(any::<(bool, bool)>(), 0..40),
            (needed, room) in (1..=FRESH as u32).prop_flat_map(|needed| (Just(needed), needed as usize..20)),
            early in prop::collection::vec(any::<bool>(), 1..4),
            (is_streaming, lag) in (any::<bool>(), LAG..20),
        ) {
            let mut policy = Policy { is_streaming, lag, ..Policy::default() };
            let (mut resident, mut stuck) = (BTreeSet::new(), BTreeSet::new());
            let mut come = |id, is_early, is_stuck: bool| {
                match is_early {
                    true => policy.came_back(id),
                    false => policy.came(id),
                }
                resident.insert(id);
                stuck.extend(is_stuck.then_some(id));
                // The pager makes room for the next block before the thread looks again.
                for _ in 0..TRIES {
                    let Some(victim) = policy.victim(0).filter(|_| policy.len() > room) else { break };
                    if stuck.contains(&victim) {
                        policy.spared(victim);
                        continue;
                    }
                    policy.evicted(victim, &mut History::default(), true);
                    resident.remove(&victim);
                }
                (0..needed).find(|id| !resident.contains(id))
            };
            let mut missing = Some(0);
            for (id, (is_early, is_stuck)) in (100..).zip(before) {
                missing = come(id, is_early, is_stuck);
            }
            for is_early in early.into_iter().cycle().take(FRESH) {
                let Some(id) = missing else { return Ok(()) };
                missing = come(id, is_early, false);
            }
            prop_assert_eq!(missing, None);
        }

        #[test]
        fn whatever_happens_the_victim_is_one_that_came_and_did_not_go(
            steps in prop::collection::vec((0u8..4, 0u32..40), 1..400)
        ) {
            let mut policy = Policy::default();
            let mut resident = BTreeSet::new();
            let mut histories = [History::default(); 40];
            for (what, id) in steps {
                match what {
                    0 => {
                        let (number, page) = (i64::from(id), id as usize % 3);
                        let fault = Fault { number, page, is_stored: id % 5 > 0, there: 0, there_of_all: 0, blocks: 9 };
                        policy.fault(fault, &mut histories[id as usize], |_| false);
                    }
                    1 if resident.insert(id) => policy.came(id),
                    2 if resident.remove(&id) => policy.evicted(id, &mut histories[id as usize], true),
                    3 if resident.contains(&id) => policy.spared(id),
                    _ => {}
                }
                prop_assert_eq!(policy.len(), resident.len());
                prop_assert_eq!(policy.victim(0).is_some(), !resident.is_empty());
                prop_assert!(policy.victim(0).is_none_or(|victim| resident.contains(&victim)));
            }
        }
    }
}
