//! The operations of a lane as a node's threads see them.
//!
//! A lane's thread fills an operation and sends its number to a node's thread. That thread answers
//! by setting the operation's bit and ringing the lane's bell. Nothing is allocated on the way, and
//! each lock is held for the copy of one page.

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
    /// A bit for each operation that was answered.
    answered: Box<[AtomicU64]>,
    bell: OwnedFd,
}

struct Cell {
    /// Counts the times that this operation was sent anew. A job of another attempt is void.
    attempt: AtomicU32,
    content: Mutex<Content>,
}

struct Content {
    page: Page,
    /// The stamp of a page that was read.
    stamp: u64,
    /// Another node to ask, as a node of a cluster said.
    ask: Option<usize>,
    /// Answers that are still to come.
    left: u32,
    /// The best answer so far: a copy that was kept is enough.
    result: Option<Result<(), Fault>>,
}

/// The answer of an operation.
pub(super) struct Answer<'a> {
    pub(super) result: Result<(), Fault>,
    /// The page, and its stamp, of a read that succeeded.
    pub(super) page: &'a PageBytes,
    pub(super) stamp: u64,
    /// The node of a cluster that is to be asked instead.
    pub(super) ask: Option<usize>,
}

/// A node's part of an operation.
pub(super) struct Job {
    pub(super) lane: Arc<Operations>,
    pub(super) operation: usize,
    pub(super) attempt: u32,
    pub(super) slot: Slot,
    pub(super) kind: Kind,
    /// Whether it waits for a node that is away; else it is answered with a timeout at once.
    pub(super) waits: bool,
    /// Whether the node of a cluster is to serve it though the page is only on its way there.
    pub(super) asking: bool,
}

#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) enum Kind {
    /// Read the page; its stamp must be at least this one, or 0 if it was never written.
    Read(u64),
    /// Write the page, with this stamp.
    Write(u64),
    /// The same page again, for a node that lacks it. It has no effect where a newer write came
    /// before.
    Copy(u64),
    /// Nothing: whether the node answers.
    Probe,
}

fn hold(content: &Mutex<Content>) -> MutexGuard<'_, Content> {
    content.lock().unwrap_or_else(PoisonError::into_inner)
}

impl Operations {
    pub(super) fn new(depth: usize) -> io::Result<Self> {
        let cell = || Cell {
            attempt: AtomicU32::new(0),
            content: Mutex::new(Content { page: Page::zeroed(), stamp: 0, ask: None, left: 0, result: None }),
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

    // The lane's side.

    /// Begins an attempt that `answers` nodes will answer; a write brings its page.
    pub(super) fn begin(&self, operation: usize, answers: u32, page: Option<&PageBytes>) -> u32 {
        let cell = &self.cells[operation];
        let mut content = hold(&cell.content);
        if let Some(page) = page {
            content.page.copy_from_slice(page);
        }
        (content.left, content.result, content.ask) = (answers, None, None);
        self.clear(operation);
        // Within the lock: a thread that answers the attempt before finds itself void.
        cell.attempt.fetch_add(1, Ordering::Relaxed).wrapping_add(1)
    }

    /// Makes every job of the operation void.
    pub(super) fn void(&self, operation: usize) {
        let cell = &self.cells[operation];
        let _content = hold(&cell.content);
        self.clear(operation);
        cell.attempt.fetch_add(1, Ordering::Relaxed);
    }

    /// Forgets an answer that nobody has taken. The caller has the operation's lock, under which
    /// its bit is set too. So a bit is always of the attempt that holds.
    fn clear(&self, operation: usize) {
        self.answered[operation / 64].fetch_and(!(1 << (operation % 64)), Ordering::AcqRel);
    }

    /// Hands over the numbers of what was answered since the last call.
    pub(super) fn take_answered(&self, mut take: impl FnMut(usize)) {
        let mut count = [0; 8];
        // Read the bell before the bits. An answer that comes after the bits were read rings it
        // again.
        let _ = rustix::io::read(&self.bell, &mut count);
        for (at, word) in self.answered.iter().enumerate() {
            let mut bits = word.swap(0, Ordering::AcqRel);
            while bits != 0 {
                take(at * 64 + bits.trailing_zeros() as usize);
                bits &= bits - 1;
            }
        }
    }

    /// Hands over the answer of an operation.
    pub(super) fn with_answer<R>(&self, operation: usize, take: impl FnOnce(Answer<'_>) -> R) -> R {
        let content = hold(&self.cells[operation].content);
        let result = content.result.unwrap_or(Err(Fault::Timeout));
        take(Answer { result, page: &content.page, stamp: content.stamp, ask: content.ask })
    }

    /// Whether one copy of a write is kept, and others have not answered.
    pub(super) fn is_kept_alone(&self, operation: usize) -> bool {
        let content = hold(&self.cells[operation].content);
        content.left > 0 && content.result == Some(Ok(()))
    }

    // The node's side.

    /// Whether the job's lane still waits for it.
    pub(super) fn is_wanted(&self, operation: usize, attempt: u32) -> bool {
        self.cells[operation].attempt.load(Ordering::Relaxed) == attempt
    }

    /// Copies a write's page, if it is still wanted.
    pub(super) fn copy_page(&self, operation: usize, attempt: u32, to: &mut PageBytes) -> bool {
        let content = hold(&self.cells[operation].content);
        let wanted = self.is_wanted(operation, attempt);
        if wanted {
            to.copy_from_slice(&*content.page);
        }
        wanted
    }

    /// Answers a job that another node of the cluster serves by now: `ask`, or else the one that
    /// the placement names.
    pub(super) fn redirect(&self, operation: usize, attempt: u32, ask: Option<usize>) {
        {
            let mut content = hold(&self.cells[operation].content);
            if self.is_wanted(operation, attempt) {
                content.ask = ask;
            }
        }
        self.answer(operation, attempt, Err(Fault::Timeout), None);
    }

    /// Answers a job; a read that succeeded brings its page and stamp. Of several copies of a write
    /// one that was kept is enough.
    pub(super) fn answer(
        &self,
        operation: usize,
        attempt: u32,
        result: Result<(), Fault>,
        page: Option<(&PageBytes, u64)>,
    ) {
        let cell = &self.cells[operation];
        {
            let mut content = hold(&cell.content);
            if !self.is_wanted(operation, attempt) || content.left == 0 {
                return;
            }
            if let Some((page, stamp)) = page {
                content.page.copy_from_slice(page);
                content.stamp = stamp;
            }
            if content.result != Some(Ok(())) {
                content.result = Some(result);
            }
            content.left -= 1;
            if content.left > 0 {
                return;
            }
            self.answered[operation / 64].fetch_or(1 << (operation % 64), Ordering::AcqRel);
        }
        let _ = rustix::io::write(&self.bell, &1u64.to_ne_bytes());
    }
}
