//! Threads of the program that are about to end.
//!
//! When a thread ends, the kernel clears a word of the thread's control block, for which another
//! thread may wait (`CLONE_CHILD_CLEARTID`). It reports no page fault of a thread that ends. If the
//! word's page is out, the word stays, and the other thread waits for ever. So a thread notes the
//! pages of its control block before it ends, and the pager leaves those in place until the thread
//! is gone.

use std::ops::Range;
use std::sync::atomic::{AtomicBool, AtomicI32, AtomicU32, AtomicUsize, Ordering};

/// Number of threads that can be about to end at a time.
const ROWS: usize = 512;
/// A row that a thread is writing.
const TAKEN: i32 = -1;

#[derive(Debug)]
struct Row {
    /// The thread ID (TID), 0 for a free row, or `TAKEN`.
    thread: AtomicI32,
    start: AtomicUsize,
    end: AtomicUsize,
}

impl Row {
    /// Whether the row has a thread that needs one of these pages.
    fn meets(&self, pages: &Range<usize>) -> bool {
        // The other two are right once the thread is there. If the row changes meanwhile, the new
        // thread waits for this move.
        self.thread.load(Ordering::SeqCst) > 0
            && self.start.load(Ordering::Relaxed) < pages.end
            && pages.start < self.end.load(Ordering::Relaxed)
    }
}

/// The table of these threads. They write it, and the pager's thread reads it.
#[derive(Debug)]
pub(crate) struct Endings {
    rows: [Row; ROWS],
    /// Number of rows in use.
    used: AtomicUsize,
    /// An odd number while the pager may be moving pages out that it has found to be free to go.
    moves: AtomicU32,
    /// Whether the pager could not find out if a thread has ended. A seccomp filter may forbid it
    /// to ask.
    is_blind: AtomicBool,
}

impl Endings {
    pub(super) fn new() -> Self {
        let row = || Row { thread: AtomicI32::new(0), start: AtomicUsize::new(0), end: AtomicUsize::new(0) };
        Endings {
            rows: std::array::from_fn(|_| row()),
            used: AtomicUsize::new(0),
            moves: AtomicU32::new(0),
            is_blind: AtomicBool::new(false),
        }
    }

    /// Notes that this thread, which is about to end, needs its control block in `place`. Returns
    /// as [`keep`](Self::keep) does.
    pub(super) fn note(&self, thread: i32, place: Range<usize>) -> bool {
        // An earlier thread has had its control block in the same place, so that thread is gone.
        // Its row, with the same place, protects this thread from the start.
        let is_of_place = |row: &&Row| {
            let before = row.thread.load(Ordering::SeqCst);
            before > 0
                && row.start.load(Ordering::Relaxed) == place.start
                && row.end.load(Ordering::Relaxed) == place.end
                && row.thread.compare_exchange(before, thread, Ordering::SeqCst, Ordering::SeqCst).is_ok()
        };
        if self.used.load(Ordering::SeqCst) > 0 && self.rows.iter().any(|row| is_of_place(&row)) {
            self.wait_for_move();
            return true;
        }
        self.keep(thread, place)
    }

    /// Notes that this thread needs its memory in `place`. Other threads may need the same place.
    /// Pages that the thread touches there after this call stay in place. Returns false if the
    /// table is full.
    pub(super) fn keep(&self, thread: i32, place: Range<usize>) -> bool {
        let is_free =
            |row: &&Row| row.thread.compare_exchange(0, TAKEN, Ordering::SeqCst, Ordering::SeqCst).is_ok();
        self.used.fetch_add(1, Ordering::SeqCst);
        let Some(row) = self.rows.iter().find(is_free) else {
            self.used.fetch_sub(1, Ordering::SeqCst);
            return false;
        };
        row.start.store(place.start, Ordering::Relaxed);
        row.end.store(place.end, Ordering::Relaxed);
        row.thread.store(thread, Ordering::SeqCst);
        self.wait_for_move();
        true
    }

    /// Forgets that this thread needs its memory in `place`.
    pub(super) fn forget(&self, thread: i32, place: &Range<usize>) {
        let is_it = |row: &&Row| {
            row.start.load(Ordering::Relaxed) == place.start
                && row.end.load(Ordering::Relaxed) == place.end
                && row.thread.compare_exchange(thread, 0, Ordering::SeqCst, Ordering::SeqCst).is_ok()
        };
        if self.rows.iter().any(|row| is_it(&row)) {
            self.used.fetch_sub(1, Ordering::SeqCst);
        }
    }

    /// Whether a full table may stay full, because the pager cannot find out who has ended.
    pub(super) fn is_blind(&self) -> bool {
        self.is_blind.load(Ordering::SeqCst)
    }

    /// Waits for a move that began before this thread had its row. The next move sees the row.
    fn wait_for_move(&self) {
        let before = self.moves.load(Ordering::SeqCst);
        while before % 2 == 1 && self.moves.load(Ordering::SeqCst) == before {
            std::thread::yield_now();
        }
    }

    /// Begins to move pages out. Returns false if a thread that has not ended needs one of them.
    /// [`end_move`](Self::end_move) follows in both cases. `is_thread` says whether a thread is
    /// there, or `None` if it cannot find out.
    pub(super) fn begin_move(
        &self,
        pages: Range<usize>,
        mut is_thread: impl FnMut(i32) -> Option<bool>,
    ) -> bool {
        self.moves.fetch_add(1, Ordering::SeqCst);
        if self.used.load(Ordering::SeqCst) == 0 {
            return true;
        }
        let mut may_go = true;
        for row in self.rows.iter().filter(|row| row.meets(&pages)) {
            may_go &= !self.lives(row, &mut is_thread);
        }
        may_go
    }

    pub(super) fn end_move(&self) {
        self.moves.fetch_add(1, Ordering::SeqCst);
    }

    /// Forgets all threads that have ended.
    pub(super) fn forget_ended(&self, mut is_thread: impl FnMut(i32) -> Option<bool>) {
        if self.used.load(Ordering::SeqCst) > 0 {
            self.rows.iter().for_each(|row| _ = self.lives(row, &mut is_thread));
        }
    }

    /// Whether the row has a thread that may still be there. Forgets one that has ended.
    fn lives(&self, row: &Row, is_thread: &mut impl FnMut(i32) -> Option<bool>) -> bool {
        let thread = row.thread.load(Ordering::SeqCst);
        if thread <= 0 {
            return false;
        }
        match is_thread(thread) {
            Some(true) => return true,
            Some(false) => {}
            None => {
                self.is_blind.store(true, Ordering::SeqCst);
                return true;
            }
        }
        // Meanwhile another thread may have taken the row over.
        let has_ended = row.thread.compare_exchange(thread, 0, Ordering::SeqCst, Ordering::SeqCst).is_ok();
        if has_ended {
            self.used.fetch_sub(1, Ordering::SeqCst);
        }
        !has_ended
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::sync::atomic::AtomicBool;

    #[test]
    fn a_page_that_a_thread_needs_at_its_end_goes_once_the_thread_is_gone() {
        let endings = Endings::new();
        assert!(endings.begin_move(0..100, |_| Some(true)), "nobody ends");
        endings.end_move();
        assert!(endings.note(7, 50..60));
        for (pages, lives, goes) in [
            (0..50, true, true),
            (0..51, true, false),
            (59..99, true, false),
            (60..99, true, true),
            (50..60, false, true),
        ] {
            assert_eq!(endings.begin_move(pages, |thread| Some(thread == 7 && lives)), goes);
            endings.end_move();
        }
        assert_eq!(endings.used.load(Ordering::SeqCst), 0);
    }

    #[test]
    fn a_thread_that_needs_a_page_for_a_while_gives_back_its_own_row_alone() {
        let endings = Endings::new();
        assert!(endings.keep(7, 50..60) && endings.keep(7, 60..70) && endings.keep(8, 90..99));
        endings.forget(7, &(50..60));
        for (pages, goes) in [(50..60, true), (60..61, false), (90..91, false)] {
            assert_eq!(endings.begin_move(pages, |_| Some(true)), goes);
            endings.end_move();
        }
        // Two threads may need one place, as a list that both pass on.
        assert!(endings.keep(7, 90..99));
        endings.forget(8, &(90..99));
        assert!(!endings.begin_move(90..91, |_| Some(true)), "thread 7 needs it still");
        endings.end_move();
        endings.forget(7, &(90..99));
        assert!(endings.note(8, 90..99));
        // Neither the row of another thread goes, nor one that is gone.
        endings.forget(7, &(90..99));
        endings.forget(7, &(50..60));
        endings.forget(7, &(60..70));
        assert_eq!(endings.used.load(Ordering::SeqCst), 1);
        assert!(!endings.begin_move(0..100, |thread| Some(thread == 8)));
    }

    #[test]
    fn a_full_table_has_room_again_for_threads_once_others_have_ended() {
        let endings = Endings::new();
        assert!((1..=ROWS).all(|thread| endings.note(thread as i32, thread..thread + 1)));
        assert!(!endings.note(9999, 9999..10_000));
        endings.forget_ended(|thread| Some(thread != 5));
        assert!(!endings.is_blind());
        assert!(endings.note(9999, 9999..10_000) && !endings.note(9998, 9998..9999));
    }

    #[test]
    fn where_nobody_can_tell_who_has_ended_threads_at_one_place_take_one_row() {
        let endings = Endings::new();
        assert!((1..=2 * ROWS).all(|thread| endings.note(thread as i32, 40..50)));
        assert_eq!(endings.used.load(Ordering::SeqCst), 1);
        assert!(!endings.begin_move(0..100, |_| None), "the last one may be there");
        endings.end_move();
        assert!(endings.is_blind(), "a full table would stay full");
        // Another one takes the row over while the pager finds that the one before has ended.
        let found = endings.begin_move(0..100, |_| {
            endings.rows[0].thread.store(9999, Ordering::SeqCst);
            Some(false)
        });
        assert!(!found && endings.rows[0].thread.load(Ordering::SeqCst) == 9999);
    }

    #[test]
    fn a_thread_that_is_about_to_end_waits_for_a_move_that_did_not_see_it() {
        for _ in 0..100 {
            let (endings, has_ended) = (Endings::new(), AtomicBool::new(false));
            assert!(endings.begin_move(0..1, |_| Some(true)));
            std::thread::scope(|scope| {
                let noting = scope.spawn(|| endings.note(7, 0..1) && has_ended.load(Ordering::SeqCst));
                while endings.rows[0].thread.load(Ordering::SeqCst) != 7 {
                    std::thread::yield_now();
                }
                has_ended.store(true, Ordering::SeqCst);
                endings.end_move();
                assert!(noting.join().unwrap(), "until then the move may still take its page");
            });
            assert!(!endings.begin_move(0..1, |_| Some(true)));
        }
    }
}
