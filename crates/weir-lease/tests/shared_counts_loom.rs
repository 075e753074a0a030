//! Every interleaving of two tables that lend one page. Run with `RUSTFLAGS="--cfg loom" cargo test
//! --release -p weir-lease --test shared_counts_loom`.
#![cfg(loom)]

use loom::cell::UnsafeCell;
use loom::sync::Arc;
use loom::thread;
use weir_lease::{PageCounts, Place, SharedCounts};

/// The content of a page: its users read it, and the thread that learns of the last return writes
/// it.
struct Content(UnsafeCell<u32>);

// SAFETY: loom's cell reports accesses that could race; the test shows that there are none.
unsafe impl Sync for Content {}
// SAFETY: a number may move to any thread.
unsafe impl Send for Content {}

impl Content {
    fn read(&self) -> u32 {
        // SAFETY: called only while the caller holds a reference to the page.
        self.0.with(|value| unsafe { *value })
    }

    fn reuse(&self) {
        // SAFETY: called only by the thread that learnt of the last return.
        self.0.with_mut(|value| unsafe { *value += 1 });
    }
}

const PAGE: Place = Place::page(0, 0);

#[test]
fn exactly_one_table_learns_of_the_last_return_and_no_use_comes_after_it() {
    loom::model(|| {
        let mut counts = SharedCounts::new(&[1]);
        let content = Arc::new(Content(UnsafeCell::new(7)));
        // Each of two threads has one reference.
        assert!(counts.take(PAGE) && counts.take(PAGE));
        let table = |mut counts: SharedCounts, content: Arc<Content>| {
            move || {
                // A fragment of the same page is lent while the first is held.
                assert!(counts.take(PAGE));
                assert_eq!(content.read(), 7);
                let early = counts.give(PAGE);
                assert_eq!(content.read(), 7);
                let last = counts.give(PAGE);
                if last {
                    content.reuse();
                }
                u32::from(early) + u32::from(last)
            }
        };
        let other = thread::spawn(table(counts.clone(), content.clone()));
        let here = table(counts.clone(), content.clone())();
        assert_eq!(here + other.join().unwrap(), 1);
        assert_eq!(counts.of(PAGE), Some(0));
    });
}
