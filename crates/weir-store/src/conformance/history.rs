//! Chance, and the possible contents of a place: the common part of the models whose stores fail
//! and lose power.

/// Random numbers from a seed, by a linear congruence (Knuth 3.3.4).
#[derive(Clone, Debug)]
pub struct Chance(pub u64);

impl Chance {
    /// The next number, less than `below`.
    pub fn below(&mut self, below: u64) -> u64 {
        self.0 = self.0.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
        ((self.0 >> 33) * below) >> 31
    }
}

/// The writes of a page, or of another place, that may be its content. The oldest comes first.
#[derive(Clone, Debug)]
pub struct History<T> {
    /// The writes; there is always one.
    pub writes: Vec<Write<T>>,
    /// Whether the last write is under way.
    pub is_written: bool,
}

/// A write of a [`History`].
#[derive(Clone, Copy, Debug)]
pub struct Write<T> {
    /// The content that it writes.
    pub value: T,
    /// The time when the write was acknowledged.
    pub acknowledged: Option<u64>,
}

impl<T: Copy + PartialEq> History<T> {
    /// A place that certainly has this content.
    pub fn of(value: T) -> Self {
        History { writes: vec![Write { value, acknowledged: Some(0) }], is_written: false }
    }

    /// Begins a write.
    pub fn begin(&mut self, value: T) {
        self.writes.push(Write { value, acknowledged: None });
        self.is_written = true;
    }

    /// Ends the write with index `at`. `acknowledged` is the time of the write's acknowledgement;
    /// `None`: the write failed.
    pub fn end(&mut self, at: usize, acknowledged: Option<u64>) {
        self.writes[at].acknowledged = acknowledged;
        self.is_written = false;
    }

    /// Returns the index of the oldest write that a read may find, if the read begins at `time`.
    /// This is the last write that was acknowledged by `time`.
    pub fn oldest(&self, time: u64) -> usize {
        let before = |write: &Write<T>| write.acknowledged.is_some_and(|at| at <= time);
        self.writes.iter().rposition(before).unwrap_or(0)
    }

    /// Whether the place may hold `value`, if it holds the write with index `oldest` or a later
    /// write.
    pub fn allows(&self, value: T, oldest: usize) -> bool {
        self.writes[oldest..].iter().any(|write| write.value == value)
    }
}

/// Returns the 8-byte word that `bytes` repeats. `None`: `bytes` has different words, as after a
/// torn write.
///
/// # Panics
/// Panics when there are fewer than 8 bytes.
pub fn repeated(bytes: &[u8]) -> Option<u64> {
    let word = u64::from_ne_bytes(bytes[..8].try_into().expect("8 bytes"));
    bytes.chunks_exact(8).all(|other| other == word.to_ne_bytes()).then_some(word)
}

/// The writes of a place by several writers, which may write at the same time.
#[derive(Clone, Debug)]
pub struct Race {
    writes: Vec<Interval>,
}

/// A write of a [`Race`].
#[derive(Clone, Copy, Debug)]
struct Interval {
    number: u64,
    value: u64,
    began: u64,
    /// The time from which on the write cannot take effect any more; `None`: the write may still
    /// take effect.
    over: Option<u64>,
    /// A time by which the write had certainly taken effect: it was acknowledged then, or a read
    /// had found it.
    seen: Option<u64>,
}

impl Race {
    /// A place that certainly has this content.
    pub fn of(value: u64) -> Self {
        let first = Interval { number: 0, value, began: 0, over: Some(0), seen: Some(0) };
        Race { writes: vec![first] }
    }

    /// Begins a write with this number. Every read that is under way began at `oldest` or later.
    pub fn begin(&mut self, number: u64, value: u64, time: u64, oldest: u64) {
        let writes = std::mem::take(&mut self.writes);
        let gone = |it: &Interval| writes.iter().any(|other| other.replaces(it, oldest));
        self.writes = writes.iter().filter(|it| !gone(it)).copied().collect();
        self.writes.push(Interval { number, value, began: time, over: None, seen: None });
    }

    /// Ends the write with this number at `time`. The write was acknowledged, or it takes no effect
    /// from then on. A write that has ended already stays as it is.
    pub fn end(&mut self, number: u64, time: u64, acknowledged: bool) {
        let write = self.writes.iter_mut().find(|write| write.number == number && write.over.is_none());
        if let Some(write) = write {
            write.over = Some(time);
            write.seen = write.seen.or(acknowledged.then_some(time));
        }
    }

    /// Whether some write may still take effect.
    pub fn is_written(&self) -> bool {
        self.writes.iter().any(|write| write.over.is_none())
    }

    /// Whether a read that began at `began`, and ends at `now`, may return `value`. The read may do
    /// so if some write of `value` was not certainly replaced by a later write. If there is only
    /// one such write, the read has found it. Then later reads must not find an older write.
    pub fn allows(&mut self, value: u64, began: u64, now: u64) -> bool {
        let replaced = |it: &Interval| self.writes.iter().any(|other| other.replaces(it, began));
        let may = |(_, it): &(usize, &Interval)| it.value == value && !replaced(it);
        let found: Vec<usize> = self.writes.iter().enumerate().filter(may).map(|(at, _)| at).collect();
        if let [at] = found[..] {
            let seen = &mut self.writes[at].seen;
            *seen = Some(seen.map_or(now, |seen| seen.min(now)));
        }
        !found.is_empty()
    }
}

impl Interval {
    /// Whether every read from `time` on finds this write or a later one, and so cannot find
    /// `other`.
    fn replaces(&self, other: &Interval, time: u64) -> bool {
        self.seen.is_some_and(|seen| seen <= time) && other.over.is_some_and(|over| over < self.began)
    }
}
