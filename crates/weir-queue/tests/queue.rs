//! The contract of `nv_kthread_q`, in the manner of the driver's own self-test.
#![cfg(all(feature = "std", not(loom)))]

use std::sync::atomic::{AtomicBool, AtomicU32, AtomicU64, Ordering::*};
use std::sync::{Arc, Barrier, Weak};
use std::thread;
use std::time::{Duration, Instant};

use weir_queue::{Item, Queue, Work, has_item};

/// Number of items: Miri interprets, so there it is a hundredth or less.
const ITEMS: u64 = if cfg!(miri) { 100 } else { 100_000 };

/// An item that counts its runs.
#[derive(Debug)]
struct Tally {
    runs: AtomicU64,
    item: Item<Tally>,
}
has_item!(Tally, item);

impl Tally {
    fn new() -> Self {
        Tally { runs: AtomicU64::new(0), item: Item::new() }
    }
}

impl Work for Tally {
    type Pointer = Arc<Tally>;
    fn run(this: Arc<Tally>) {
        this.runs.fetch_add(1, Relaxed);
    }
}

fn queue() -> Queue {
    Queue::builder().name("test").start().unwrap()
}

/// Holds the worker inside a callback until the gate opens.
struct Gate {
    entered: AtomicBool,
    open: AtomicBool,
    item: Item<Gate>,
}
has_item!(Gate, item);

impl Gate {
    /// Returns with the worker inside the gate's callback.
    fn hold(queue: &Queue) -> Arc<Gate> {
        let gate = Arc::new(Gate { entered: false.into(), open: false.into(), item: Item::new() });
        assert!(queue.schedule(&gate));
        while !gate.entered.load(Acquire) {
            thread::yield_now();
        }
        gate
    }

    fn open(&self) {
        self.open.store(true, Release);
    }
}

impl Work for Gate {
    type Pointer = Arc<Gate>;
    fn run(this: Arc<Gate>) {
        this.entered.store(true, Release);
        while !this.open.load(Acquire) {
            thread::yield_now();
        }
    }
}

#[test]
fn eight_threads_of_a_hundred_thousand_items_each_run_all_of_them_in_their_order() {
    struct Step {
        number: u64,
        last: Arc<AtomicU64>,
        disorder: Arc<AtomicU64>,
        item: Item<Step>,
    }
    has_item!(Step, item);
    impl Work for Step {
        type Pointer = Box<Step>;
        fn run(this: Box<Step>) {
            if this.last.swap(this.number, Relaxed) + 1 != this.number {
                this.disorder.fetch_add(1, Relaxed);
            }
        }
    }
    let queue = queue();
    let disorder = Arc::new(AtomicU64::new(0));
    thread::scope(|scope| {
        for _ in 0..8 {
            scope.spawn(|| {
                let last = Arc::new(AtomicU64::new(0));
                for number in 1..=ITEMS {
                    let (last, disorder) = (Arc::clone(&last), Arc::clone(&disorder));
                    assert!(queue.give(Box::new(Step { number, last, disorder, item: Item::new() })).is_ok());
                }
                queue.flush();
                assert_eq!(last.load(Relaxed), ITEMS);
            });
        }
    });
    assert_eq!(disorder.load(Relaxed), 0);
    let metrics = queue.metrics();
    // Flush markers count too: eight threads, two rounds, eight stacks.
    assert_eq!(metrics.items, 8 * ITEMS + 8 * 2 * 8);
    assert_eq!(metrics.sizes.iter().sum::<u64>(), metrics.batches);
    assert!(metrics.wakes <= metrics.batches);
}

#[test]
fn an_item_that_is_pending_is_not_queued_twice() {
    let queue = queue();
    let gate = Gate::hold(&queue);
    let tally = Arc::new(Tally::new());
    assert!(!tally.item.is_pending());
    assert!(queue.schedule(&tally));
    for _ in 0..10 {
        assert!(!queue.schedule(&tally));
    }
    assert!(tally.item.is_pending());
    gate.open();
    assert!(queue.flush());
    assert_eq!(tally.runs.load(Relaxed), 1);
    assert!(!tally.item.is_pending());
}

#[test]
fn many_threads_that_schedule_one_item_run_it_once_for_each_true() {
    let queue = queue();
    let tally = Arc::new(Tally::new());
    let accepted: u64 = thread::scope(|scope| {
        let schedule = || (0..ITEMS).filter(|_| queue.schedule(&tally)).count() as u64;
        let threads: Vec<_> = (0..8).map(|_| scope.spawn(schedule)).collect();
        threads.into_iter().map(|thread| thread.join().unwrap()).sum()
    });
    queue.flush();
    assert_eq!(tally.runs.load(Relaxed), accepted);
    assert!(accepted >= 1);
    assert_eq!(Arc::strong_count(&tally), 1, "the queue keeps nothing that has run");
}

#[test]
fn whoever_is_told_pending_has_its_update_seen() {
    // This shows the lost update that a flag cleared by a plain store would allow. A caller sets
    // `dirty` and is told "pending", while the pending run has read `dirty` before it was set.
    struct Mirror {
        dirty: AtomicU64,
        seen: AtomicU64,
        item: Item<Mirror>,
    }
    has_item!(Mirror, item);
    impl Work for Mirror {
        type Pointer = Arc<Mirror>;
        fn run(this: Arc<Mirror>) {
            this.seen.store(this.dirty.load(Relaxed), Relaxed);
        }
    }
    let queue = Queue::builder().spin(1000).linger(0).start().unwrap();
    let mirror = Arc::new(Mirror { dirty: 0.into(), seen: 0.into(), item: Item::new() });
    for round in 0..ITEMS / 50 {
        for step in 1..=4 {
            mirror.dirty.store(round * 4 + step, Relaxed);
            queue.schedule(&mirror);
        }
        while mirror.item.is_pending() {
            std::hint::spin_loop();
        }
        queue.flush();
        assert_eq!(mirror.seen.load(Relaxed), round * 4 + 4);
    }
}

/// An item that schedules itself until it has run `left` more times.
struct Again {
    left: AtomicU32,
    queue: Weak<Queue>,
    refused: AtomicBool,
    item: Item<Again>,
}
has_item!(Again, item);

impl Work for Again {
    type Pointer = Arc<Again>;
    fn run(this: Arc<Again>) {
        assert!(!this.item.is_pending(), "out of the queue before its function runs");
        if this.left.load(Relaxed) > 0 {
            this.left.fetch_sub(1, Relaxed);
            if let Some(queue) = this.queue.upgrade()
                && !queue.schedule(&this)
            {
                this.refused.store(true, Relaxed);
            }
        }
    }
}

fn again(queue: &Arc<Queue>, times: u32) -> Arc<Again> {
    let queue = Arc::downgrade(queue);
    Arc::new(Again { left: times.into(), queue, refused: false.into(), item: Item::new() })
}

#[test]
fn an_item_may_schedule_itself_and_one_flush_sees_it_run_twice() {
    let queue = Arc::new(queue());
    let item = again(&queue, 1);
    assert!(queue.schedule(&item));
    queue.flush();
    assert_eq!(item.left.load(Relaxed), 0);
    let item = again(&queue, ITEMS as u32);
    assert!(queue.schedule(&item));
    while item.left.load(Relaxed) > 0 {
        queue.flush();
    }
}

#[test]
fn an_item_that_schedules_itself_for_ever_is_ended_by_stop() {
    let queue = Arc::new(queue());
    let item = again(&queue, u32::MAX);
    assert!(queue.schedule(&item));
    thread::sleep(Duration::from_millis(2));
    queue.stop();
    assert!(item.refused.load(Relaxed));
    assert!(!item.item.is_pending());
}

#[test]
fn a_callback_may_drop_the_last_of_its_owner() {
    struct Mortal {
        died: Arc<AtomicU64>,
        item: Item<Mortal>,
    }
    has_item!(Mortal, item);
    impl Drop for Mortal {
        fn drop(&mut self) {
            self.died.fetch_add(1, Relaxed);
        }
    }
    impl Work for Mortal {
        type Pointer = Arc<Mortal>;
        fn run(this: Arc<Mortal>) {
            drop(this);
        }
    }
    let queue = queue();
    let died = Arc::new(AtomicU64::new(0));
    for _ in 0..100 {
        assert!(queue.schedule(&Arc::new(Mortal { died: Arc::clone(&died), item: Item::new() })));
    }
    queue.flush();
    assert_eq!(died.load(Relaxed), 100);
}

#[test]
fn a_type_may_have_several_items_and_a_static_owner() {
    struct Gpu {
        faults: AtomicU32,
        resets: AtomicU32,
        fault: Item<Gpu>,
        reset: Item<Gpu, 1>,
    }
    has_item!(Gpu, fault);
    has_item!(Gpu, reset, 1);
    impl Work for Gpu {
        type Pointer = &'static Gpu;
        fn run(this: &'static Gpu) {
            this.faults.fetch_add(1, Relaxed);
        }
    }
    impl Work<1> for Gpu {
        type Pointer = &'static Gpu;
        fn run(this: &'static Gpu) {
            this.resets.fetch_add(1, Relaxed);
        }
    }
    let queue = queue();
    let gate = Gate::hold(&queue);
    static GPU: std::sync::OnceLock<Gpu> = std::sync::OnceLock::new();
    let gpu = GPU.get_or_init(|| Gpu {
        faults: 0.into(),
        resets: 0.into(),
        fault: Item::new(),
        reset: Item::new(),
    });
    assert!(queue.schedule::<_, 0>(&gpu));
    assert!(queue.schedule::<_, 1>(&gpu));
    assert!(!queue.schedule::<_, 1>(&gpu));
    gate.open();
    queue.flush();
    assert_eq!((gpu.faults.load(Relaxed), gpu.resets.load(Relaxed)), (1, 1));
}

#[test]
fn what_was_accepted_runs_and_what_comes_after_stop_is_refused() {
    let queue = queue();
    let gate = Gate::hold(&queue);
    let tallies: Vec<_> = (0..100).map(|_| Arc::new(Tally::new())).collect();
    assert!(tallies.iter().all(|tally| queue.schedule(tally)));
    gate.open();
    queue.stop();
    assert!(tallies.iter().all(|tally| tally.runs.load(Relaxed) == 1));
    assert!(!queue.schedule(&tallies[0]));
    assert!(!tallies[0].item.is_pending(), "a refused item is free");
    assert_eq!(Arc::strong_count(&tallies[0]), 1);
    assert!(queue.flush(), "nothing left to wait for");
    queue.stop();
}

#[test]
fn stopping_under_load_runs_exactly_what_was_accepted() {
    for _ in 0..if cfg!(miri) { 2 } else { 200 } {
        let queue = queue();
        let barrier = Barrier::new(4);
        let runs = thread::scope(|scope| {
            let producers: Vec<_> = (0..3)
                .map(|_| {
                    scope.spawn(|| {
                        barrier.wait();
                        let mut accepted = Vec::new();
                        for _ in 0..200 {
                            let tally = Arc::new(Tally::new());
                            if queue.schedule(&tally) {
                                accepted.push(tally);
                            }
                        }
                        accepted
                    })
                })
                .collect();
            barrier.wait();
            queue.stop();
            producers.into_iter().flat_map(|producer| producer.join().unwrap()).collect::<Vec<_>>()
        });
        assert!(runs.iter().all(|tally| tally.runs.load(Relaxed) == 1));
        assert_eq!(queue.metrics().items, runs.len() as u64);
    }
}

#[test]
fn flushing_under_load_from_many_threads_ends() {
    let queue = queue();
    thread::scope(|scope| {
        for _ in 0..4 {
            scope.spawn(|| {
                for _ in 0..if cfg!(miri) { 3 } else { 500 } {
                    let tally = Arc::new(Tally::new());
                    assert!(queue.schedule(&tally));
                    assert!(queue.flush());
                    assert_eq!(tally.runs.load(Relaxed), 1);
                }
            });
        }
    });
}

#[test]
fn a_callback_that_flushes_or_stops_its_own_queue_does_not_hang() {
    struct Bold {
        queue: Weak<Queue>,
        flushed: AtomicBool,
        item: Item<Bold>,
    }
    has_item!(Bold, item);
    impl Work for Bold {
        type Pointer = Arc<Bold>;
        fn run(this: Arc<Bold>) {
            let queue = this.queue.upgrade().unwrap();
            this.flushed.store(queue.flush(), Relaxed);
            queue.stop();
        }
    }
    let queue = Arc::new(queue());
    let bold = Arc::new(Bold { queue: Arc::downgrade(&queue), flushed: true.into(), item: Item::new() });
    assert!(queue.schedule(&bold));
    while !queue.schedule(&bold) && bold.item.is_pending() {
        thread::yield_now();
    }
    queue.stop();
    assert!(!bold.flushed.load(Relaxed));
}

#[test]
fn a_callback_that_panics_is_counted_and_the_worker_goes_on() {
    struct Faulty {
        item: Item<Faulty>,
    }
    has_item!(Faulty, item);
    impl Work for Faulty {
        type Pointer = Box<Faulty>;
        fn run(_: Box<Faulty>) {
            // Panics, but without a message on the test's output.
            std::panic::resume_unwind(Box::new("on purpose"));
        }
    }
    let queue = queue();
    let gate = Gate::hold(&queue);
    let tally = Arc::new(Tally::new());
    assert!(queue.give(Box::new(Faulty { item: Item::new() })).is_ok());
    assert!(queue.schedule(&tally));
    gate.open();
    queue.flush();
    assert_eq!((tally.runs.load(Relaxed), queue.metrics().panics), (1, 1));
}

#[test]
#[cfg(not(miri))]
fn a_burst_costs_one_wake() {
    let queue = queue();
    let start = Instant::now();
    while queue.metrics().wakes == 0 && start.elapsed() < Duration::from_secs(60) {
        // The worker counts a wake when it goes to sleep.
        thread::yield_now();
    }
    let before = queue.metrics();
    let gate = Gate::hold(&queue);
    let tallies: Vec<_> = (0..1000).map(|_| Arc::new(Tally::new())).collect();
    assert!(tallies.iter().all(|tally| queue.schedule(tally)));
    gate.open();
    while tallies.iter().any(|tally| tally.runs.load(Relaxed) == 0) {
        thread::yield_now();
    }
    let after = queue.metrics();
    assert!(after.wakes - before.wakes <= 2, "{before} then {after}");
    assert!(after.longest >= 1000, "{after}");
}

#[cfg(all(feature = "numa", target_os = "linux", not(miri)))]
mod numa {
    use super::*;
    use weir_queue::StartError;

    #[test]
    fn a_node_without_processors_is_refused_by_its_number() {
        let error = Queue::builder().node(4000).start().unwrap_err();
        assert!(matches!(error, StartError::Node(4000, _)), "{error:?}");
        assert!(error.to_string().contains("4000"));
    }

    #[test]
    fn a_worker_on_a_node_works() {
        if !std::path::Path::new("/sys/devices/system/node/node0").exists() {
            return;
        }
        let queue = Queue::builder().node(0).start().unwrap();
        let tally = Arc::new(Tally::new());
        assert!(queue.schedule(&tally));
        queue.flush();
        assert_eq!(tally.runs.load(Relaxed), 1);
    }
}
