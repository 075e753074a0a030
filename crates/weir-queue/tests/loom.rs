//! Every interleaving of the core's protocols: the command is in the crate's README.
#![cfg(loom)]

use std::ptr::NonNull;
use std::time::Duration;

use loom::sync::Arc;
use loom::sync::atomic::{AtomicUsize, Ordering::*};
use loom::thread;
use weir_queue::stack::{Link, Pushed, Stack};
use weir_queue::{Item, Queue, Work, channel, has_item};

/// Links that live as long as the model's execution.
fn link() -> &'static Link {
    Box::leak(Box::new(Link::new()))
}

fn push(stack: &Stack, link: &'static Link) -> Pushed {
    // SAFETY: the link is leaked, and each test pushes a link once.
    unsafe { stack.push(NonNull::from(link)) }
}

/// Checks a model with a worker thread. Such models have too many interleavings to check all. So
/// there are at most two preemptions, which find most bugs of this kind (Musuvathi and Qadeer, PLDI
/// 2007), and as many of those as fit into ten seconds (`LOOM_MAX_DURATION=600` for more). The
/// parts of the queue are checked completely: above, and in `src`.
fn model(check: impl Fn() + Sync + Send + 'static) {
    let mut builder = loom::model::Builder::new();
    builder.preemption_bound = Some(2);
    builder.max_duration = builder.max_duration.or(Some(Duration::from_secs(10)));
    builder.check(check);
}

#[test]
fn no_push_is_lost_and_each_producers_order_holds() {
    loom::model(|| {
        let stack = Arc::new(Stack::new());
        let links = [link(), link(), link()];
        let producers = [vec![links[0], links[1]], vec![links[2]]].map(|own| {
            let stack = Arc::clone(&stack);
            thread::spawn(move || {
                own.into_iter().for_each(|link| assert_eq!(push(&stack, link), Pushed::Queued))
            })
        });
        let mut taken: Vec<_> = stack.take().collect();
        for producer in producers {
            producer.join().unwrap();
        }
        taken.extend(stack.take());
        let place =
            |link: &'static Link| taken.iter().position(|&taken| taken == NonNull::from(link)).unwrap();
        assert_eq!(taken.len(), 3);
        assert!(place(links[0]) < place(links[1]));
    });
}

#[test]
fn a_sleeping_consumer_is_woken_by_exactly_one_producer() {
    loom::model(|| {
        let stack = Arc::new(Stack::new());
        assert!(stack.sleep());
        let producers = [link(), link()].map(|link| {
            let stack = Arc::clone(&stack);
            thread::spawn(move || usize::from(push(&stack, link) == Pushed::Asleep))
        });
        let wakes: usize = producers.into_iter().map(|producer| producer.join().unwrap()).sum();
        assert_eq!(wakes, 1);
        assert_eq!(stack.take().count(), 2);
    });
}

#[test]
fn a_close_lets_in_nothing_that_is_not_taken() {
    loom::model(|| {
        let stack = Arc::new(Stack::new());
        let producer = thread::spawn({
            let stack = Arc::clone(&stack);
            move || [link(), link()].into_iter().filter(|link| push(&stack, link) != Pushed::Closed).count()
        });
        let closer = thread::spawn({
            let stack = Arc::clone(&stack);
            move || stack.close()
        });
        // Around the close: the links taken here, and those left for later, must be all that were
        // accepted.
        let mut taken = stack.take().count();
        closer.join().unwrap();
        while !stack.is_finished() {
            taken += stack.take().count();
        }
        assert_eq!(push(&stack, link()), Pushed::Closed);
        assert_eq!(producer.join().unwrap(), taken);
        assert_eq!(stack.take().count(), 0);
    });
}

struct Counted {
    runs: AtomicUsize,
    seen: AtomicUsize,
    written: AtomicUsize,
    item: Item<Counted>,
}
has_item!(Counted, item);

impl Work for Counted {
    type Pointer = std::sync::Arc<Counted>;
    fn run(this: Self::Pointer) {
        this.seen.store(this.written.load(Relaxed), Relaxed);
        this.runs.fetch_add(1, Relaxed);
    }
}

fn counted() -> std::sync::Arc<Counted> {
    std::sync::Arc::new(Counted {
        runs: AtomicUsize::new(0),
        seen: AtomicUsize::new(0),
        written: AtomicUsize::new(0),
        item: Item::new(),
    })
}

#[test]
fn a_worker_that_falls_asleep_misses_nothing() {
    model(|| {
        let queue = std::sync::Arc::new(Queue::builder().shards(2).linger(0).start().unwrap());
        let (first, second) = (counted(), counted());
        let producer = thread::spawn({
            let (queue, first) = (std::sync::Arc::clone(&queue), std::sync::Arc::clone(&first));
            move || assert!(queue.schedule(&first))
        });
        assert!(queue.schedule(&second));
        producer.join().unwrap();
        queue.stop();
        assert_eq!((first.runs.load(Relaxed), second.runs.load(Relaxed)), (1, 1));
    });
}

#[test]
fn a_flush_returns_after_what_came_before_it() {
    model(|| {
        let queue = Queue::builder().shards(1).linger(0).start().unwrap();
        let item = counted();
        assert!(queue.schedule(&item));
        assert!(queue.flush());
        assert_eq!(item.runs.load(Relaxed), 1);
    });
}

#[test]
fn a_pending_item_sees_what_its_refused_scheduler_wrote() {
    model(|| {
        let queue = Queue::builder().shards(1).linger(0).start().unwrap();
        let item = counted();
        assert!(queue.schedule(&item));
        item.written.store(1, Relaxed);
        queue.schedule(&item);
        queue.stop();
        assert_eq!(item.seen.load(Relaxed), 1);
    });
}

#[test]
fn a_flush_after_a_refusal_returns_after_the_run() {
    model(|| {
        let queue = std::sync::Arc::new(Queue::builder().shards(1).linger(0).start().unwrap());
        let item = counted();
        let other = thread::spawn({
            let (queue, item) = (std::sync::Arc::clone(&queue), std::sync::Arc::clone(&item));
            move || {
                queue.schedule(&item);
            }
        });
        // Scheduled here, or refused because the other thread is scheduling it.
        queue.schedule(&item);
        assert!(queue.flush());
        assert!(item.runs.load(Relaxed) >= 1, "refused, flushed, and the item has not run");
        other.join().unwrap();
    });
}

#[test]
fn a_slot_that_comes_back_wakes_the_sender_that_waits_for_it() {
    model(|| {
        let (mut sender, mut receiver) = channel(1);
        receiver.linger(0);
        let producer = thread::spawn(move || {
            sender.send(1).unwrap();
            sender.send(2).unwrap();
        });
        assert_eq!(receiver.recv(), Ok(1));
        assert_eq!(receiver.recv(), Ok(2));
        assert!(receiver.recv().is_err());
        producer.join().unwrap();
    });
}

#[test]
fn a_receiver_that_goes_releases_a_sender_that_waits() {
    model(|| {
        let (mut sender, receiver) = channel(1);
        let producer = thread::spawn(move || {
            let mut sent = 0;
            while sender.send(()).is_ok() {
                sent += 1;
            }
            sent
        });
        drop(receiver);
        assert!(producer.join().unwrap() <= 1);
    });
}
