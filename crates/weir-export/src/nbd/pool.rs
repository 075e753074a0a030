//! Memory that connections share. A long request needs more memory than its connection has, and
//! only a few requests are long at a time.
//!
//! All memory of the pool is taken at the start. A connection borrows a buffer by one atomic
//! operation and gives it back soon. If no buffer is left, the connection uses its own memory, in
//! smaller pieces.

use crate::buffer::Buffer;
use std::io;
use std::ops::{Deref, DerefMut};
use std::ptr;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

/// A pool of buffers of one size.
#[derive(Debug)]
pub(super) struct Pool {
    memory: Buffer,
    unit: usize,
    /// A bit for each buffer that is free.
    idle: AtomicU64,
}

/// A borrowed buffer. Dropping it returns the buffer to the pool.
#[derive(Debug)]
pub(super) struct Loan {
    pool: Arc<Pool>,
    number: u32,
}

impl Pool {
    /// Makes a pool of `units` buffers (64 at most), each of `unit` bytes in whole pages.
    ///
    /// # Errors
    /// Fails when the memory cannot be had.
    pub fn new(units: usize, unit: usize) -> io::Result<Arc<Self>> {
        let units = units.clamp(1, 64);
        let memory = Buffer::new(units * unit)?;
        Ok(Arc::new(Pool { memory, unit, idle: AtomicU64::new(u64::MAX >> (64 - units)) }))
    }

    /// Borrows a buffer, if one is left.
    pub fn borrow(self: &Arc<Self>) -> Option<Loan> {
        let lowest = |idle: u64| (idle != 0).then(|| idle & (idle - 1));
        let before = self.idle.fetch_update(Ordering::Acquire, Ordering::Relaxed, lowest).ok()?;
        Some(Loan { pool: Arc::clone(self), number: before.trailing_zeros() })
    }

    /// Whether the pool's memory is locked in RAM.
    pub fn is_locked(&self) -> bool {
        self.memory.is_locked()
    }
}

impl Loan {
    fn start(&self) -> *mut u8 {
        // SAFETY: `number` is that of one of the pool's buffers, which lie one after another in the
        // pool's memory. So the offset lies within that memory.
        unsafe { self.pool.memory.as_mut_ptr().add(self.number as usize * self.pool.unit) }
    }
}

impl Deref for Loan {
    type Target = [u8];

    fn deref(&self) -> &[u8] {
        // SAFETY: while the loan lives, the buffer is the loan's alone, and it lies in memory that
        // the pool keeps.
        unsafe { &*ptr::slice_from_raw_parts(self.start(), self.pool.unit) }
    }
}

impl DerefMut for Loan {
    fn deref_mut(&mut self) -> &mut [u8] {
        // SAFETY: while the loan lives, the buffer is the loan's alone, and `self` is borrowed
        // exclusively.
        unsafe { &mut *ptr::slice_from_raw_parts_mut(self.start(), self.pool.unit) }
    }
}

impl Drop for Loan {
    fn drop(&mut self) {
        self.pool.idle.fetch_or(1 << self.number, Ordering::Release);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn units_are_one_borrower_s_and_come_back() {
        let pool = Pool::new(3, 4096).unwrap();
        let mut loans: Vec<Loan> = std::iter::from_fn(|| pool.borrow()).collect();
        assert_eq!(loans.len(), 3);
        for (loan, value) in loans.iter_mut().zip(1..) {
            loan.fill(value);
        }
        assert!(loans.iter().zip(1..).all(|(loan, value)| loan.iter().all(|byte| *byte == value)));
        drop(loans.remove(1));
        assert!(pool.borrow().is_some_and(|again| again.iter().all(|byte| *byte == 2)));
        drop(loans);
        assert_eq!(std::iter::from_fn(|| pool.borrow()).collect::<Vec<_>>().len(), 3);
    }

    #[test]
    fn threads_never_have_the_same_unit() {
        let pool = Pool::new(2, 4096).unwrap();
        std::thread::scope(|scope| {
            for mark in 1..=4 {
                let pool = &pool;
                scope.spawn(move || {
                    for _ in 0..2000 {
                        if let Some(mut loan) = pool.borrow() {
                            loan.fill(mark);
                            assert!(loan.iter().all(|byte| *byte == mark));
                        }
                    }
                });
            }
        });
    }
}
