//! Any sequence of operations, compared with a plain reference: a list, and a set of pending items.
#![cfg(all(feature = "std", not(loom), not(miri)))]

use std::collections::VecDeque;
use std::sync::atomic::{AtomicBool, Ordering::*};
use std::sync::{Arc, Mutex};
use std::thread;

use proptest::prelude::*;
use weir_queue::{Item, Queue, Work, channel, has_item};

/// Writes its number down when it runs; the one that is a gate holds the worker instead.
struct Scribe {
    number: usize,
    log: Arc<Mutex<Vec<usize>>>,
    held: AtomicBool,
    inside: AtomicBool,
    item: Item<Scribe>,
}
has_item!(Scribe, item);

impl Work for Scribe {
    type Pointer = Arc<Scribe>;
    fn run(this: Arc<Scribe>) {
        this.inside.store(true, Release);
        while this.held.load(Acquire) {
            thread::yield_now();
        }
        this.inside.store(false, Release);
        this.log.lock().unwrap().push(this.number);
    }
}

fn scribe(number: usize, log: &Arc<Mutex<Vec<usize>>>) -> Arc<Scribe> {
    let (held, inside) = (AtomicBool::new(false), AtomicBool::new(false));
    Arc::new(Scribe { number, log: Arc::clone(log), held, inside, item: Item::new() })
}

#[derive(Clone, Debug)]
enum Step {
    /// Schedules this item.
    Schedule(usize),
    /// Lets the worker run everything that is queued, and holds it again.
    Run,
    Flush,
    Stop,
}

fn step() -> impl Strategy<Value = Step> {
    prop_oneof![
        12 => (0_usize..6).prop_map(Step::Schedule),
        2 => Just(Step::Run),
        1 => Just(Step::Flush),
        1 => Just(Step::Stop),
    ]
}

const GATE: usize = usize::MAX;

/// Holds the worker: from here on no item runs, so that the pending ones are known.
fn hold(queue: &Queue, gate: &Arc<Scribe>) {
    gate.held.store(true, Release);
    if queue.schedule(gate) {
        while !gate.inside.load(Acquire) {
            thread::yield_now();
        }
    }
}

fn let_go(queue: &Queue, gate: &Scribe) {
    gate.held.store(false, Release);
    queue.flush();
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(400))]

    #[test]
    fn a_queue_does_what_a_list_and_a_set_would_do(steps in prop::collection::vec(step(), 1..60), shards in 1_usize..5) {
        let queue = Queue::builder().shards(shards).start().unwrap();
        let log = Arc::new(Mutex::new(Vec::new()));
        let items: Vec<_> = (0..6).map(|number| scribe(number, &log)).collect();
        let gate = scribe(GATE, &log);
        let (mut queued, mut expected, mut stopped) = (VecDeque::new(), Vec::new(), false);
        hold(&queue, &gate);
        for step in steps {
            match step {
                Step::Schedule(number) => {
                    let accepted = !stopped && !queued.contains(&number);
                    prop_assert_eq!(queue.schedule(&items[number]), accepted);
                    if accepted {
                        queued.push_back(number);
                    }
                    prop_assert_eq!(items[number].item.is_pending(), queued.contains(&number));
                }
                Step::Run | Step::Flush => {
                    let_go(&queue, &gate);
                    expected.extend(queued.drain(..));
                    let ran: Vec<_> = log.lock().unwrap().iter().copied().filter(|&number| number != GATE).collect();
                    prop_assert_eq!(&ran, &expected);
                    hold(&queue, &gate);
                }
                Step::Stop => {
                    gate.held.store(false, Release);
                    queue.stop();
                    expected.extend(queued.drain(..));
                    stopped = true;
                }
            }
        }
        gate.held.store(false, Release);
        queue.stop();
        expected.extend(queued);
        let ran: Vec<_> = log.lock().unwrap().iter().copied().filter(|&number| number != GATE).collect();
        prop_assert_eq!(ran, expected);
    }

    #[test]
    fn a_channel_does_what_bounded_lists_would_do(
        steps in prop::collection::vec((0_usize..3, 0_u8..4), 1..200),
        capacity in 1_usize..5,
    ) {
        let (first, mut receiver) = channel(capacity);
        let mut senders = vec![first.clone(), first.clone(), first];
        let mut sent = [0_u64; 3];
        let mut received = [0_u64; 3];
        for (sender, action) in steps {
            if action < 3 {
                let room = sent[sender] - received[sender] < capacity as u64;
                prop_assert_eq!(senders[sender].try_send((sender, sent[sender])).is_ok(), room);
                sent[sender] += u64::from(room);
            } else {
                for (sender, value) in receiver.try_drain() {
                    prop_assert_eq!(value, received[sender]);
                    received[sender] += 1;
                }
            }
        }
        senders.clear();
        while let Ok((sender, value)) = receiver.recv() {
            prop_assert_eq!(value, received[sender]);
            received[sender] += 1;
        }
        prop_assert_eq!(received, sent);
    }
}
