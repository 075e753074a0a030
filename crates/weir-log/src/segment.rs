//! The state of each segment, in one 64-bit word and two more numbers, and the stacks of free
//! segments.
//!
//! ```text
//!  63              32 31    24 23        8 7 6     5     4        3 2     0
//! +------------------+--------+-----------+---+-------+----------+-------+
//! |       life       |   -    |   live    | - |summary|generation| state |
//! +------------------+--------+-----------+---+-------+----------+-------+
//! ```
//!
//! *Live* counts the segment's pages that the map names. A closed segment becomes free when its
//! last page dies. A page dies when a lane writes it anew, or when the cleaner moves it. The lane
//! or the cleaner then frees the segment. A *life* is one filling of a segment. *Summary* says
//! whether the segment's summary is on the disk.
//!
//! In a durable log a closed segment without a live page is *dead* first: a crash before the next
//! commit would bring its pages back. A dead segment becomes free by a commit which says that the
//! segment holds nothing.

use std::sync::atomic::Ordering::{Acquire, Relaxed, SeqCst};
use std::sync::atomic::{AtomicU32, AtomicU64};

/// Number of generations of pages. Written pages have generation 0. A page that the cleaner moves
/// gets the next generation, up to the last.
pub(crate) const GENERATIONS: usize = 4;

#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) enum State {
    /// The segment has no live page, and can take new ones.
    Free = 0,
    /// A lane or the cleaner appends to the segment, or some of its writes have no answer yet.
    Open = 1,
    /// The segment takes no more pages, and its writes have answers. It can be cleaned.
    Closed = 2,
    /// The cleaner moves the segment's pages.
    Cleaning = 3,
    /// The cleaner cannot move a page of the segment. The segment is free once no page of it is
    /// live.
    Stuck = 4,
    /// In a durable log: the segment has no live page, but no commit says so yet.
    Dead = 5,
    /// The segment holds the log's own records.
    Reserved = 6,
}

#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) struct Word(u64);

impl Word {
    fn new(state: State, generation: usize, life: u32) -> Self {
        Word(u64::from(life) << 32 | (generation as u64) << 3 | state as u64)
    }

    pub fn state(self) -> State {
        match self.0 & 7 {
            0 => State::Free,
            1 => State::Open,
            2 => State::Closed,
            3 => State::Cleaning,
            4 => State::Stuck,
            5 => State::Dead,
            _ => State::Reserved,
        }
    }

    pub fn generation(self) -> usize {
        (self.0 >> 3 & 3) as usize
    }

    pub fn live(self) -> u32 {
        (self.0 >> 8 & 0xffff) as u32
    }

    pub fn life(self) -> u32 {
        (self.0 >> 32) as u32
    }

    fn with_state(self, state: State) -> Self {
        Word(self.0 & !7 | state as u64)
    }

    /// Whether the segment's summary is on the disk.
    pub fn has_summary(self) -> bool {
        self.0 & SUMMARY != 0
    }

    /// The word with the state `over`, if the segment is closed or stuck and has no live page.
    /// Otherwise the unchanged word.
    fn settled(self, over: State) -> Self {
        let rests = matches!(self.state(), State::Closed | State::Stuck);
        if rests && self.live() == 0 { self.with_state(over) } else { self }
    }

    /// Whether the segment is free or dead, so that none of its pages counts.
    fn is_over(self) -> bool {
        matches!(self.state(), State::Free | State::Dead)
    }
}

const SUMMARY: u64 = 1 << 5;
const LIVE: u64 = 1 << 8;

#[derive(Debug, Default)]
struct Segment {
    word: AtomicU64,
    /// Of a free or dead segment: the number of the next one in its stack, plus 1; 0: there is
    /// none. Of a closed segment: the value of `clock` when it was closed.
    next_or_closed: AtomicU32,
    /// The number of the row that has the segment's summary, plus 1; 0: no row has it.
    row: AtomicU32,
}

/// Bytes of memory for one segment's record.
pub(crate) const SEGMENT_BYTES: u64 = size_of::<Segment>() as u64;

/// A member's free segments, as a stack. The head has a tag against the ABA problem: the same
/// segment may be taken and pushed again between two accesses.
#[derive(Debug, Default)]
#[repr(align(128))]
struct Stack {
    head: AtomicU64,
    /// Number of turns for which this member is still skipped, because a write to it failed. The
    /// members take turns to give a free segment.
    skips: AtomicU32,
    failures: AtomicU32,
}

/// The records of all segments.
#[derive(Debug)]
pub(crate) struct Segments {
    all: Box<[Segment]>,
    stacks: Box<[Stack]>,
    free: AtomicU32,
    /// Number of segments closed so far.
    clock: AtomicU32,
    /// In a durable log: the dead segments, and their number.
    dead: Stack,
    dead_count: AtomicU32,
    /// In a durable log: a bit for each segment, set if the segment has a record that no commit
    /// has.
    changed: Box<[AtomicU64]>,
}

impl Segments {
    /// Makes `count` free segments, which lie on `members` members in turns.
    pub fn new(count: u32, members: u32) -> Self {
        let segments = Self::without_free(count, members, 0);
        (0..count).rev().for_each(|segment| segments.push(segment));
        segments
    }

    /// Makes the segments of a durable log. The first `reserved` hold the log's own records. `life`
    /// names the life of each segment in use, its generation, and whether it has a summary. Those
    /// segments are closed, and none of their pages is counted yet. The others are free, and begin
    /// their next life above `floor`.
    pub fn recovered(
        count: u32,
        members: u32,
        reserved: u32,
        floor: u32,
        life: impl Fn(u32) -> Option<(u32, usize, bool)>,
    ) -> Self {
        let segments = Self::without_free(count, members, count.div_ceil(64));
        for segment in 0..count {
            let word = match life(segment) {
                _ if segment < reserved => Word::new(State::Reserved, 0, 0),
                Some((life, generation, has_summary)) => {
                    let word = Word::new(State::Closed, generation, life);
                    if has_summary { Word(word.0 | SUMMARY) } else { word }
                }
                None => Word::new(State::Free, 0, floor),
            };
            segments.all[segment as usize].word.store(word.0, SeqCst);
        }
        let is_free = |segment: &u32| segments.word(*segment).state() == State::Free;
        (reserved..count).rev().filter(is_free).for_each(|segment| segments.push(segment));
        segments
    }

    fn without_free(count: u32, members: u32, changed: u32) -> Self {
        Segments {
            all: (0..count).map(|_| Segment::default()).collect(),
            stacks: (0..members).map(|_| Stack::default()).collect(),
            free: AtomicU32::new(0),
            clock: AtomicU32::new(0),
            dead: Stack::default(),
            dead_count: AtomicU32::new(0),
            changed: (0..changed).map(|_| AtomicU64::new(0)).collect(),
        }
    }

    /// Whether these are the segments of a durable log. There a segment without a live page is dead
    /// first, and free after a commit.
    pub fn are_durable(&self) -> bool {
        !self.changed.is_empty()
    }

    fn over(&self) -> State {
        if self.are_durable() { State::Dead } else { State::Free }
    }

    /// Number of dead segments.
    pub fn dead(&self) -> u32 {
        self.dead_count.load(SeqCst)
    }

    /// Moves the numbers of all dead segments to `out`.
    pub fn take_dead(&self, out: &mut Vec<u32>) {
        let mut head = self.dead.head.swap(0, SeqCst) as u32;
        let before = out.len();
        while let Some(segment) = head.checked_sub(1) {
            out.push(segment);
            head = self.all[segment as usize].next_or_closed.load(SeqCst);
        }
        self.dead_count.fetch_sub((out.len() - before) as u32, SeqCst);
    }

    /// Adds a segment to the dead ones, which [`take_dead`](Segments::take_dead) takes.
    fn bury(&self, segment: u32) {
        self.dead_count.fetch_add(1, SeqCst);
        let mut head = self.dead.head.load(SeqCst);
        loop {
            self.all[segment as usize].next_or_closed.store(head as u32, SeqCst);
            // Dead segments are taken all at once and never singly. So the head needs no tag
            // against the ABA problem.
            match self.dead.head.compare_exchange_weak(head, u64::from(segment + 1), SeqCst, SeqCst) {
                Ok(_) => return,
                Err(other) => head = other,
            }
        }
    }

    /// Marks a segment that has no live page: as dead in a durable log, as free in a scratch log.
    pub fn end(&self, segment: u32) {
        if self.are_durable() { self.bury(segment) } else { self.push(segment) }
    }

    /// Frees a dead segment that a commit has named.
    pub fn free_dead(&self, segment: u32) {
        let word = &self.all[segment as usize].word;
        let life = Word(word.load(SeqCst)).life();
        word.store(Word::new(State::Free, 0, life).0, SeqCst);
        self.push(segment);
    }

    /// Notes that the segment has a record that no commit has.
    pub fn mark(&self, segment: u32) {
        if let Some(bits) = self.changed.get(segment as usize / 64) {
            bits.fetch_or(1 << (segment % 64), SeqCst);
        }
    }

    /// Calls `each` for every segment with a record that no commit has, and clears the segments'
    /// marks.
    pub fn take_marked(&self, mut each: impl FnMut(u32)) {
        for (at, bits) in self.changed.iter().enumerate() {
            if bits.load(SeqCst) == 0 {
                continue;
            }
            let mut bits = bits.swap(0, SeqCst);
            while bits != 0 {
                each(at as u32 * 64 + bits.trailing_zeros());
                bits &= bits - 1;
            }
        }
    }

    /// Notes that the segment's summary is on the disk.
    pub fn has_summary(&self, segment: u32) {
        self.all[segment as usize].word.fetch_or(SUMMARY, SeqCst);
        self.mark(segment);
    }

    /// Bytes of memory that the segments' records take.
    pub fn bytes(&self) -> u64 {
        self.all.len() as u64 * SEGMENT_BYTES + self.changed.len() as u64 * 8
    }

    pub fn count(&self) -> u32 {
        self.all.len() as u32
    }

    pub fn free(&self) -> u32 {
        self.free.load(SeqCst)
    }

    pub fn members(&self) -> u32 {
        self.stacks.len() as u32
    }

    pub fn word(&self, segment: u32) -> Word {
        Word(self.all[segment as usize].word.load(SeqCst))
    }

    pub fn row(&self, segment: u32) -> &AtomicU32 {
        &self.all[segment as usize].row
    }

    /// Number of segments closed since this segment was closed.
    pub fn age(&self, segment: u32) -> u32 {
        self.clock.load(Relaxed).wrapping_sub(self.all[segment as usize].next_or_closed.load(Relaxed))
    }

    /// Notes that one more page of the segment is live, or is about to be.
    pub fn add_live(&self, segment: u32) {
        self.all[segment as usize].word.fetch_add(LIVE, SeqCst);
    }

    /// Notes that one page of the segment is no longer live. Returns true if the segment has no
    /// live page and no work under way any more. The caller must then [end](Segments::end) it.
    #[must_use]
    pub fn drop_live(&self, segment: u32) -> bool {
        self.change(segment, |word| Some(Word(word.0 - LIVE).settled(self.over()))).is_some_and(Word::is_over)
    }

    /// Begins the next life of a segment that [`pop`](Segments::pop) has taken. Returns the life.
    pub fn open(&self, segment: u32, generation: usize) -> u32 {
        let word = &self.all[segment as usize].word;
        let life = Word(word.load(SeqCst)).life().wrapping_add(1);
        word.store(Word::new(State::Open, generation, life).0, SeqCst);
        life
    }

    /// Closes a segment that takes no more pages. Returns true if it has no live page. The caller
    /// must then [end](Segments::end) it.
    #[must_use]
    pub fn close(&self, segment: u32) -> bool {
        let clock = self.clock.fetch_add(1, Relaxed) + 1;
        self.all[segment as usize].next_or_closed.store(clock, Relaxed);
        self.leave(segment, State::Closed)
    }

    /// Begins to clean a closed segment, if its word is still `word`. Returns false if the word has
    /// changed.
    pub fn begin_cleaning(&self, segment: u32, word: Word) -> bool {
        let now = word.with_state(State::Cleaning);
        let word = self.all[segment as usize].word.compare_exchange(word.0, now.0, SeqCst, Relaxed);
        word.is_ok()
    }

    /// Gives a segment the state `state` after work on it. Returns true if the segment has no live
    /// page. The caller must then [end](Segments::end) it.
    #[must_use]
    pub fn leave(&self, segment: u32, state: State) -> bool {
        self.change(segment, |word| Some(word.with_state(state).settled(self.over())))
            .is_some_and(Word::is_over)
    }

    fn change(&self, segment: u32, change: impl Fn(Word) -> Option<Word>) -> Option<Word> {
        let word = &self.all[segment as usize].word;
        let mut was = word.load(SeqCst);
        loop {
            let now = change(Word(was))?;
            match word.compare_exchange_weak(was, now.0, SeqCst, Relaxed) {
                Ok(_) => return Some(now),
                Err(other) => was = other,
            }
        }
    }

    /// Adds a segment that has become free to its member's stack.
    pub fn push(&self, segment: u32) {
        let stack = &self.stacks[(segment % self.members()) as usize].head;
        let mut head = stack.load(Acquire);
        loop {
            self.all[segment as usize].next_or_closed.store(head as u32, Relaxed);
            let tag = (head >> 32).wrapping_add(1) << 32;
            match stack.compare_exchange_weak(head, tag | u64::from(segment + 1), SeqCst, Acquire) {
                Ok(_) => break,
                Err(other) => head = other,
            }
        }
        self.free.fetch_add(1, SeqCst);
    }

    /// Takes a free segment while more than `reserve` are free. The members take turns. A member
    /// without a free segment, or one that has failed lately, misses its turn.
    pub fn pop(&self, turn: &mut u32, reserve: u32) -> Option<u32> {
        self.free.fetch_update(SeqCst, SeqCst, |free| (free > reserve).then(|| free - 1)).ok()?;
        // One free segment is reserved for this call now. The loop finds the member that has it.
        loop {
            for passes_failed in [true, false] {
                for _ in 0..self.members() {
                    *turn = (*turn + 1) % self.members();
                    let stack = &self.stacks[*turn as usize];
                    if passes_failed && stack.skips.load(Relaxed) > 0 {
                        let skip = |skips: u32| skips.checked_sub(1);
                        let _ = stack.skips.fetch_update(Relaxed, Relaxed, skip);
                        continue;
                    }
                    if let Some(segment) = self.pop_from(stack) {
                        return Some(segment);
                    }
                }
            }
            // `push` puts a segment into its stack before it counts the segment. So each segment
            // that was counted is in a stack, and the loop ends.
            std::hint::spin_loop();
        }
    }

    fn pop_from(&self, stack: &Stack) -> Option<u32> {
        let mut head = stack.head.load(Acquire);
        loop {
            let segment = (head as u32).checked_sub(1)?;
            let next = self.all[segment as usize].next_or_closed.load(Relaxed);
            let tag = (head >> 32).wrapping_add(1) << 32;
            match stack.head.compare_exchange_weak(head, tag | u64::from(next), SeqCst, Acquire) {
                Ok(_) => return Some(segment),
                Err(other) => head = other,
            }
        }
    }

    /// Notes that a write to the member of `segment` has failed. The member then misses its next
    /// turns to give a free segment, and more of them after each failure.
    pub fn blame(&self, segment: u32) {
        let stack = &self.stacks[(segment % self.members()) as usize];
        let failures = stack.failures.fetch_add(1, Relaxed);
        stack.skips.store(64 << failures.min(10), Relaxed);
    }

    /// Number of failed writes to a member.
    pub fn failures(&self, member: u32) -> u32 {
        self.stacks[member as usize].failures.load(Relaxed)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_closed_segment_is_free_when_its_last_page_dies_and_an_open_one_when_it_closes() {
        let segments = Segments::new(2, 1);
        let mut turn = 0;
        let (first, second) = (segments.pop(&mut turn, 0).unwrap(), segments.pop(&mut turn, 0).unwrap());
        assert_eq!(segments.pop(&mut turn, 0), None);
        segments.open(first, 1);
        segments.add_live(first);
        assert!(!segments.drop_live(first), "it is open");
        assert!(segments.close(first));
        segments.open(second, 3);
        segments.add_live(second);
        assert!(!segments.close(second));
        assert_eq!((segments.word(second).generation(), segments.word(second).live()), (3, 1));
        let word = segments.word(second);
        assert!(segments.begin_cleaning(second, word) && !segments.begin_cleaning(second, word));
        assert!(!segments.drop_live(second), "the cleaner has it");
        assert!(segments.leave(second, State::Closed));
    }

    #[test]
    fn members_take_turns_and_one_that_failed_is_passed_over() {
        let segments = Segments::new(30, 3);
        let mut turn = 0;
        let mut next = || segments.pop(&mut turn, 4).map(|segment| segment % 3);
        assert_eq!([next(), next(), next(), next()], [Some(1), Some(2), Some(0), Some(1)]);
        segments.blame(2);
        assert_eq!([next(), next(), next()], [Some(0), Some(1), Some(0)]);
        assert_eq!((segments.failures(2), segments.failures(0)), (1, 0));
        // If no other member has a free segment, this member's segments are taken, down to the
        // reserve.
        assert_eq!(std::iter::from_fn(next).count(), 30 - 7 - 4);
    }

    #[test]
    fn threads_that_take_and_give_back_segments_never_share_one() {
        let segments = Segments::new(16, 2);
        let holders: Vec<AtomicU32> = (0..16).map(|_| AtomicU32::new(0)).collect();
        std::thread::scope(|scope| {
            for thread in 1..=4u32 {
                let (segments, holders) = (&segments, &holders);
                scope.spawn(move || {
                    let mut turn = thread;
                    for _ in 0..20_000 {
                        let Some(segment) = segments.pop(&mut turn, 1) else { continue };
                        let holder = &holders[segment as usize];
                        assert_eq!(holder.swap(thread, SeqCst), 0, "segment {segment} is taken twice");
                        assert_eq!(holder.swap(0, SeqCst), thread);
                        segments.push(segment);
                    }
                });
            }
        });
        assert_eq!(segments.free(), 16);
    }
}
