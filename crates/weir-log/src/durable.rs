//! The parts that only a durable log has: its superblock, its flushes, and the numbers of its
//! writes.

use crate::superblock::Superblock;
use std::sync::Mutex;
use std::sync::atomic::AtomicU64;
use std::sync::atomic::Ordering::{Relaxed, SeqCst};
use weir_store::Fault;

/// The position from which the next commit continues the journal.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) struct Journal {
    /// The half into which the next checkpoint goes.
    pub half: u32,
    /// The sequence number of the journal's next page.
    pub sequence: u64,
    /// The number of the last complete commit.
    pub commit: u64,
    /// The highest life that any segment may have had.
    pub floor: u32,
}

/// The parts that only a durable log has.
pub(crate) struct Durable {
    pub superblock: Superblock,
    /// The version of the latest write.
    clock: AtomicU64,
    /// Number of the last flush that a lane has asked for.
    asked: AtomicU64,
    /// Number of the last flush that has been answered, times 2; plus 1 if it succeeded.
    done: AtomicU64,
    /// The position from which the next commit continues the journal, until the cleaner takes it.
    pub journal: Mutex<Option<Journal>>,
    pub counters: Counters,
}

/// Counts of commits.
#[derive(Debug, Default)]
pub(crate) struct Counters {
    pub commits: AtomicU64,
    pub failed: AtomicU64,
    pub checkpoints: AtomicU64,
    pub pages: AtomicU64,
}

impl Durable {
    pub fn new(superblock: Superblock, journal: Journal, clock: u64) -> Self {
        Durable {
            superblock,
            clock: AtomicU64::new(clock),
            asked: AtomicU64::new(0),
            done: AtomicU64::new(1),
            journal: Mutex::new(Some(journal)),
            counters: Counters::default(),
        }
    }

    /// Returns the version of a write that begins.
    pub fn next_version(&self) -> u64 {
        self.clock.fetch_add(1, SeqCst) + 1
    }

    /// The highest version that any write has.
    pub fn clock(&self) -> u64 {
        self.clock.load(SeqCst)
    }

    /// Asks for a flush of all writes that have been answered so far. Returns the flush's number.
    pub fn ask(&self) -> u64 {
        self.asked.fetch_add(1, SeqCst) + 1
    }

    /// The number of the last flush that a lane has asked for, if it has no answer yet.
    pub fn asked(&self) -> Option<u64> {
        let asked = self.asked.load(SeqCst);
        (asked > self.done.load(SeqCst) / 2).then_some(asked)
    }

    /// Answers all flushes up to the one with this number.
    pub fn answer(&self, number: u64, result: Result<(), Fault>) {
        self.counters.failed.fetch_add(u64::from(result.is_err()), Relaxed);
        self.done.store(number * 2 + u64::from(result.is_ok()), SeqCst);
    }

    /// The answer to a flush; `None` while it has none.
    pub fn answer_to(&self, number: u64) -> Option<Result<(), Fault>> {
        let done = self.done.load(SeqCst);
        let result = if done & 1 == 1 { Ok(()) } else { Err(Fault::Io(EIO)) };
        (done / 2 >= number).then_some(result)
    }
}

/// The error number EIO.
const EIO: i32 = rustix::io::Errno::IO.raw_os_error();
