//! The operations of a lane, which the lane shares with the threads of the nodes.
//!
//! A lane fills an operation and sends its number to a node's thread. The thread answers: it sets
//! the operation's bit and rings the lane's bell. Neither of the two allocates memory, and each
//! holds a lock only for the copy of one page.

use crate::Fault;
use rustix::event::EventfdFlags;
use std::io;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::sync::atomic::{AtomicU32, AtomicU64, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use weir_core::{Page, PageBytes, Slot};

/// All operations of a lane.
pub(super) struct Operations {
    cells: Box<[Cell]>,
    /// A bit for each operation, set when the operation has an answer.
    answered: Box<[AtomicU64]>,
    bell: OwnedFd,
}

struct Cell {
    /// Number of attempts of this operation. A job of an earlier attempt is void.
    attempt: AtomicU32,
    content: Mutex<Content>,
}

struct Content {
    page: Page,
    /// The stamp of a page that was read.
    stamp: u64,
    /// Another node to ask, which a node of a cluster has named.
    ask: Option<usize>,
    /// Number of nodes that have yet to answer this attempt.
    left: u32,
    /// The best answer of a node so far. A write has succeeded once one node has kept its copy.
    result: Option<Result<(), Fault>>,
    /// A bit for each copy whose node did not answer this attempt in time.
    silent: u8,
}

/// An operation's answer.
pub(super) struct Answer<'a> {
    pub(super) result: Result<(), Fault>,
    /// For a read that succeeded: the page and its stamp.
    pub(super) page: &'a PageBytes,
    pub(super) stamp: u64,
    /// Another node to ask instead, which a node of a cluster has named.
    pub(super) ask: Option<usize>,
    /// A bit for each copy whose node did not answer in time.
    pub(super) silent: u8,
}

/// A job for a node: its part of an operation.
pub(super) struct Job {
    pub(super) lane: Arc<Operations>,
    pub(super) operation: usize,
    pub(super) attempt: u32,
    pub(super) slot: Slot,
    /// The copy that the node reads or writes.
    pub(super) copy: usize,
    pub(super) kind: Kind,
    /// Whether the job waits while the node is away. If not, it is answered with a timeout at once.
    pub(super) waits: bool,
    /// Whether a cluster's node must serve the page though the page is still being moved to it.
    pub(super) asking: bool,
}

impl Job {
    /// Answers the job. The answer to a read that succeeded brings the page and its stamp.
    pub(super) fn answer(&self, result: Result<(), Fault>, page: Option<(&PageBytes, u64)>) {
        self.lane.answer(self.operation, self.attempt, self.copy, result, page);
    }

    /// Answers a job whose node does not serve the page. The lane must then ask another node: node
    /// `ask`, or if that is `None` the node that the placement names now.
    pub(super) fn redirect(&self, ask: Option<usize>) {
        self.lane.redirect(self.operation, self.attempt, ask);
        self.answer(Err(Fault::Timeout), None);
    }
}

#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) enum Kind {
    /// Read the page. Its stamp must be at least this one. 0: the slot was never written.
    Read(u64),
    /// Write the page, with this stamp.
    Write(u64),
    /// Write the same page again, for a node that lacks it. Without effect if the node has a newer
    /// write.
    Copy(u64),
    /// Ask whether the node answers.
    Probe,
}

fn hold(content: &Mutex<Content>) -> MutexGuard<'_, Content> {
    content.lock().unwrap_or_else(PoisonError::into_inner)
}

impl Operations {
    pub(super) fn new(depth: usize) -> io::Result<Self> {
        let cell = || Cell {
            attempt: AtomicU32::new(0),
            content: Mutex::new(Content {
                page: Page::zeroed(),
                stamp: 0,
                ask: None,
                left: 0,
                result: None,
                silent: 0,
            }),
        };
        Ok(Operations {
            cells: (0..depth).map(|_| cell()).collect(),
            answered: (0..depth.div_ceil(64)).map(|_| AtomicU64::new(0)).collect(),
            bell: rustix::event::eventfd(0, EventfdFlags::CLOEXEC | EventfdFlags::NONBLOCK)?,
        })
    }

    pub(super) fn bell(&self) -> BorrowedFd<'_> {
        self.bell.as_fd()
    }

    // Functions that the lane calls.

    /// Begins an attempt that `answers` nodes will answer, and returns its number. `page` is the
    /// page that a write stores.
    pub(super) fn begin(&self, operation: usize, answers: u32, page: Option<&PageBytes>) -> u32 {
        let cell = &self.cells[operation];
        let mut content = hold(&cell.content);
        if let Some(page) = page {
            content.page.copy_from_slice(page);
        }
        (content.left, content.result, content.ask, content.silent) = (answers, None, None, 0);
        self.clear(operation);
        // To answer, a node's thread needs the lock that this call holds. So a thread that still
        // has a job of the earlier attempt finds afterwards that the job is void.
        cell.attempt.fetch_add(1, Ordering::Relaxed).wrapping_add(1)
    }

    /// Adds the node of `copy` to an attempt of a read, and returns the attempt's number. The nodes
    /// that were asked before may still answer, and the first page that comes counts. `None`: the
    /// attempt has been answered by now.
    pub(super) fn add_copy(&self, operation: usize, copy: usize) -> Option<u32> {
        let cell = &self.cells[operation];
        let mut content = hold(&cell.content);
        if content.left == 0 {
            return None;
        }
        content.left += 1;
        content.silent &= !(1 << copy);
        Some(cell.attempt.load(Ordering::Relaxed))
    }

    /// Returns a bit for each copy whose node did not answer the present attempt in time.
    pub(super) fn silent(&self, operation: usize) -> u8 {
        hold(&self.cells[operation].content).silent
    }

    /// Makes every job of the operation void.
    pub(super) fn void(&self, operation: usize) {
        let cell = &self.cells[operation];
        let _content = hold(&cell.content);
        self.clear(operation);
        cell.attempt.fetch_add(1, Ordering::Relaxed);
    }

    /// Clears the operation's bit in `answered`, and so drops an answer that the lane has not
    /// taken. The caller has the operation's lock, and threads set the bit under that lock. So a
    /// set bit always belongs to the latest attempt.
    fn clear(&self, operation: usize) {
        self.answered[operation / 64].fetch_and(!(1 << (operation % 64)), Ordering::AcqRel);
    }

    /// Calls `take` with the number of each operation that was answered since the last call.
    pub(super) fn take_answered(&self, mut take: impl FnMut(usize)) {
        let mut count = [0; 8];
        // Clear the bell first, and then take the bits. So an answer whose bit is missed here rings
        // the bell again.
        let _ = rustix::io::read(&self.bell, &mut count);
        for (at, word) in self.answered.iter().enumerate() {
            let mut bits = word.swap(0, Ordering::AcqRel);
            while bits != 0 {
                take(at * 64 + bits.trailing_zeros() as usize);
                bits &= bits - 1;
            }
        }
    }

    /// Calls `take` with the operation's answer.
    pub(super) fn with_answer<R>(&self, operation: usize, take: impl FnOnce(Answer<'_>) -> R) -> R {
        let content = hold(&self.cells[operation].content);
        let result = content.result.unwrap_or(Err(Fault::Timeout));
        take(Answer {
            result,
            page: &content.page,
            stamp: content.stamp,
            ask: content.ask,
            silent: content.silent,
        })
    }

    /// Whether one copy of a write has been kept, and other answers are outstanding.
    pub(super) fn is_kept_alone(&self, operation: usize) -> bool {
        let content = hold(&self.cells[operation].content);
        content.left > 0 && content.result == Some(Ok(()))
    }

    // Functions that the nodes' threads call.

    /// Whether the job's lane still waits for the job.
    pub(super) fn is_wanted(&self, operation: usize, attempt: u32) -> bool {
        self.cells[operation].attempt.load(Ordering::Relaxed) == attempt
    }

    /// Copies the page of a write, if its lane still waits for the job.
    pub(super) fn copy_page(&self, operation: usize, attempt: u32, to: &mut PageBytes) -> bool {
        let content = hold(&self.cells[operation].content);
        let wanted = self.is_wanted(operation, attempt);
        if wanted {
            to.copy_from_slice(&*content.page);
        }
        wanted
    }

    /// Notes the node that the lane must ask instead.
    fn redirect(&self, operation: usize, attempt: u32, ask: Option<usize>) {
        let mut content = hold(&self.cells[operation].content);
        if self.is_wanted(operation, attempt) {
            content.ask = ask;
        }
    }

    /// Adds a node's answer to an operation. A write succeeds once one node has kept its copy. A
    /// read succeeds with the first page, and fails once each node that was asked has failed.
    fn answer(
        &self,
        operation: usize,
        attempt: u32,
        copy: usize,
        result: Result<(), Fault>,
        page: Option<(&PageBytes, u64)>,
    ) {
        let cell = &self.cells[operation];
        {
            let mut content = hold(&cell.content);
            if !self.is_wanted(operation, attempt) || content.left == 0 {
                return;
            }
            if result == Err(Fault::Timeout) {
                content.silent |= 1 << copy;
            }
            if content.result != Some(Ok(())) {
                content.result = Some(result);
            }
            content.left -= 1;
            if let Some((page, stamp)) = page {
                content.page.copy_from_slice(page);
                content.stamp = stamp;
                // The jobs of the other nodes are void from here on. So a page that comes later
                // cannot change this one while the lane hands it over.
                if std::mem::take(&mut content.left) > 0 {
                    cell.attempt.fetch_add(1, Ordering::Relaxed);
                }
            }
            if content.left > 0 {
                return;
            }
            self.answered[operation / 64].fetch_or(1 << (operation % 64), Ordering::AcqRel);
        }
        let _ = rustix::io::write(&self.bell, &1u64.to_ne_bytes());
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use weir_core::PAGE_SIZE;

    fn answered(operations: &Operations) -> Vec<usize> {
        let mut answered = Vec::new();
        operations.take_answered(|operation| answered.push(operation));
        answered
    }

    #[test]
    fn a_read_of_two_nodes_takes_the_first_page_and_a_later_one_reaches_no_other_request() {
        let operations = Operations::new(2).unwrap();
        let attempt = operations.begin(0, 1, None);
        assert_eq!(operations.add_copy(0, 1), Some(attempt));
        operations.answer(0, attempt, 0, Ok(()), Some((&[1; PAGE_SIZE], 7)));
        assert_eq!(answered(&operations), [0]);
        let is_first =
            |answer: Answer<'_>| (answer.result, answer.stamp, answer.page) == (Ok(()), 7, &[1; PAGE_SIZE]);
        assert!(operations.with_answer(0, is_first));
        assert!(!operations.is_wanted(0, attempt), "the other node still has a job");
        assert_eq!(operations.add_copy(0, 1), None);
        let is_late = || operations.answer(0, attempt, 1, Ok(()), Some((&[2; PAGE_SIZE], 8)));
        is_late();
        assert!(answered(&operations).is_empty() && operations.with_answer(0, is_first));
        // The lane uses the operation for a write of another page.
        let write = operations.begin(0, 1, Some(&[9; PAGE_SIZE]));
        is_late();
        let mut page = [0; PAGE_SIZE];
        assert!(operations.copy_page(0, write, &mut page) && page == [9; PAGE_SIZE]);
        assert!(answered(&operations).is_empty());
    }

    #[test]
    fn a_read_of_two_nodes_fails_only_once_both_have_failed() {
        let operations = Operations::new(1).unwrap();
        let attempt = operations.begin(0, 1, None);
        assert_eq!(operations.add_copy(0, 1), Some(attempt));
        operations.answer(0, attempt, 1, Err(Fault::Timeout), None);
        assert!(answered(&operations).is_empty());
        assert_eq!(operations.silent(0), 0b10);
        // The node that has failed is asked again.
        assert_eq!((operations.add_copy(0, 1), operations.silent(0)), (Some(attempt), 0));
        operations.answer(0, attempt, 1, Err(Fault::Lost), None);
        assert!(answered(&operations).is_empty());
        operations.answer(0, attempt, 0, Err(Fault::Timeout), None);
        assert_eq!(answered(&operations), [0]);
        let failed = operations.with_answer(0, |answer| (answer.result.is_err(), answer.silent));
        assert_eq!(failed, (true, 0b01));
    }
}
