//! The knowledge of the clients: their calls, and the content that each sector may have.

use std::collections::VecDeque;
use weir_core::PAGE_SIZE;
use weir_request::{Op, Request};
use weir_store::conformance::{Chance, Race};

pub const SECTOR: usize = 512;
pub const PAGE_SECTORS: usize = PAGE_SIZE / SECTOR;

/// The number of a write is in the low bits of its content, and its sector in the high bits.
const SECTOR_SHIFT: u32 = 40;

/// The content of a sector by a write. Number 0 stands for zeros. A quarter of all contents do not
/// compress.
pub fn fill(bytes: &mut [u8], sector: usize, number: u64) {
    let word = if number == 0 { 0 } else { (sector as u64) << SECTOR_SHIFT | number };
    bytes[..8].copy_from_slice(&word.to_le_bytes());
    let mut done = 8;
    while done < bytes.len() {
        let more = done.min(bytes.len() - done);
        bytes.copy_within(..more, done);
        done += more;
    }
    if number > 0 && number.is_multiple_of(4) {
        let mut chance = Chance(word);
        for bytes in bytes[8..].chunks_exact_mut(4) {
            bytes.copy_from_slice(&(chance.below(1 << 31) as u32).to_le_bytes());
        }
    }
}

/// The number of the write that a sector's content is from.
fn number(bytes: &[u8], sector: usize) -> u64 {
    let word = u64::from_le_bytes(bytes[..8].try_into().expect("8 bytes"));
    let number = word & ((1 << SECTOR_SHIFT) - 1);
    let mut expected = [0; SECTOR];
    fill(&mut expected, sector, number);
    assert!(bytes == expected, "sector {sector} is torn, or another's: {:02x?}", &bytes[..16]);
    number
}

/// A request of a client, which it may send several times.
#[derive(Clone, Debug)]
pub struct Call {
    pub request: Request,
    /// The first of its sectors, counted over all volumes, and their number.
    pub first: usize,
    pub count: usize,
    /// The number of its write; 0 for zeros.
    pub number: u64,
    /// The identity of its write.
    identity: u64,
    /// How often it is under way at a server.
    attempts: u32,
    /// Whether its client has an answer.
    answered: bool,
}

/// The number of a call.
pub type CallId = usize;

#[derive(Default)]
pub struct Books {
    calls: Vec<Option<Call>>,
    /// For each client, what it sends again before anything new.
    pub again: Vec<VecDeque<CallId>>,
    sectors: Vec<Race>,
    /// The beginnings of reads under way.
    reads: Vec<u64>,
    numbers: u64,
    events: u64,
}

impl Books {
    pub fn new(clients: usize, pages: u32) -> Self {
        let sectors = (0..pages as usize * PAGE_SECTORS).map(|_| Race::of(0)).collect();
        Books { again: vec![VecDeque::new(); clients], sectors, ..Books::default() }
    }

    pub fn event(&mut self) -> u64 {
        self.events += 1;
        self.events
    }

    pub fn call(&self, call: CallId) -> &Call {
        self.calls[call].as_ref().expect("a call under way")
    }

    fn races(&mut self, first: usize, count: usize) -> impl Iterator<Item = (usize, &mut Race)> {
        let races = self.sectors[first..first + count].iter_mut();
        races.enumerate().map(move |(at, race)| (first + at, race))
    }

    /// Whether some write of these sectors may still take effect.
    pub fn is_written(&mut self, first: usize, count: usize) -> bool {
        self.races(first, count).any(|(_, race)| race.is_written())
    }

    /// A client has something to ask.
    pub fn open(&mut self, request: Request, first: usize, count: usize) -> CallId {
        self.numbers += 1;
        let changes = !matches!(request.op, Op::Read | Op::Flush);
        let identity = self.numbers;
        let number = if request.op == Op::Write { identity } else { 0 };
        if changes {
            let (time, oldest) = (self.event(), self.reads.iter().min().copied());
            let oldest = oldest.unwrap_or(time);
            self.races(first, count).for_each(|(_, race)| race.begin(identity, number, time, oldest));
        }
        let call = Call { request, first, count, number, identity, attempts: 0, answered: false };
        let free = self.calls.iter().position(Option::is_none).unwrap_or(self.calls.len());
        self.calls.resize(self.calls.len().max(free + 1), None);
        self.calls[free] = Some(call);
        free
    }

    /// A call goes to a server. Returns the time.
    pub fn send(&mut self, call: CallId) -> u64 {
        let time = self.event();
        let it = self.calls[call].as_mut().expect("a call under way");
        it.attempts += 1;
        if it.request.op == Op::Read {
            self.reads.push(time);
        }
        time
    }

    /// A server has no more to do with a call that was sent at a time.
    pub fn withdraw(&mut self, call: CallId, sent: u64) {
        let it = self.calls[call].as_mut().expect("a call under way");
        it.attempts -= 1;
        if it.request.op == Op::Read {
            let at = self.reads.iter().position(|time| *time == sent).expect("it was sent");
            self.reads.swap_remove(at);
        }
        self.close(call);
    }

    /// A client has an answer to a call, and needs none any more.
    pub fn answer(&mut self, call: CallId, is_ok: bool) {
        let time = self.event();
        let it = self.calls[call].as_mut().expect("a call under way");
        it.answered = true;
        let Call { first, count, identity, request, .. } = *it;
        if is_ok && !matches!(request.op, Op::Read | Op::Flush) {
            self.races(first, count).for_each(|(_, race)| race.end(identity, time, true));
        }
        self.close(call);
    }

    /// Forgets a call that is over for its client and for every server.
    fn close(&mut self, call: CallId) {
        let it = self.call(call);
        if !it.answered || it.attempts > 0 {
            return;
        }
        let Call { first, count, identity, .. } = *it;
        let time = self.event();
        self.races(first, count).for_each(|(_, race)| race.end(identity, time, false));
        self.calls[call] = None;
    }

    /// A client has read this, by a request that was sent at a time.
    pub fn check(&mut self, call: CallId, sent: u64, bytes: &[u8]) {
        let Call { first, count, .. } = *self.call(call);
        let now = self.event();
        for ((sector, race), bytes) in self.races(first, count).zip(bytes.chunks_exact(SECTOR)) {
            let found = number(bytes, sector);
            assert!(race.allows(found, sent, now), "sector {sector} is read as write {found}: {race:?}");
        }
    }

    /// Whether a call is under way that any client waits for.
    pub fn is_busy(&self) -> bool {
        self.calls.iter().flatten().any(|call| !call.answered)
    }
}
