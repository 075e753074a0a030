//! The value channel, from outside of the crate.
#![cfg(all(feature = "std", not(loom)))]

use std::sync::Arc;
use std::thread;

use weir_queue::{Closed, SendError, channel};

const VALUES: u64 = if cfg!(miri) { 200 } else { 100_000 };

#[test]
fn every_senders_values_arrive_once_and_in_its_order() {
    let (sender, mut receiver) = channel::<(usize, u64)>(64);
    let senders: Vec<_> = (0..8)
        .map(|id| {
            let mut sender = sender.clone();
            thread::spawn(move || (0..VALUES).for_each(|value| sender.send((id, value)).unwrap()))
        })
        .collect();
    drop(sender);
    let mut next = [0; 8];
    while let Ok(()) = receiver.drain(|batch| {
        for (id, value) in batch {
            assert_eq!(value, next[id]);
            next[id] += 1;
        }
    }) {}
    assert_eq!(next, [VALUES; 8]);
    for sender in senders {
        sender.join().unwrap();
    }
    assert_eq!(receiver.recv(), Err(Closed));
    assert_eq!(receiver.metrics().items, 8 * VALUES);
}

#[test]
fn a_full_channel_gives_the_value_back_until_the_receiver_has_caught_up() {
    let (mut sender, mut receiver) = channel(2);
    assert_eq!(sender.try_send("a"), Ok(()));
    assert_eq!(sender.try_send("b"), Ok(()));
    assert_eq!(sender.try_send("c"), Err(SendError::Full("c")));
    assert_eq!(receiver.recv(), Ok("a"));
    assert_eq!(receiver.recv(), Ok("b"));
    assert_eq!(sender.try_send("d"), Ok(()));
    assert_eq!(receiver.recv(), Ok("d"));
}

#[test]
fn every_sender_has_room_of_its_own() {
    let (mut one, mut receiver) = channel(1);
    let mut two = one.clone();
    assert_eq!(one.try_send(1), Ok(()));
    assert_eq!(one.try_send(1), Err(SendError::Full(1)));
    assert_eq!(two.try_send(2), Ok(()));
    let mut values: Vec<_> = receiver.try_drain().collect();
    values.sort_unstable();
    assert_eq!(values, [1, 2]);
    assert_eq!(receiver.try_drain().len(), 0);
}

#[test]
fn a_batch_keeps_what_was_not_taken_for_the_next() {
    let (mut sender, mut receiver) = channel(8);
    (0..5).for_each(|value| sender.send(value).unwrap());
    assert_eq!(receiver.drain(|batch| (batch.len(), batch.take(2).collect::<Vec<_>>())), Ok((5, vec![0, 1])));
    sender.send(5).unwrap();
    assert_eq!(receiver.drain(|batch| batch.collect::<Vec<_>>()), Ok(vec![2, 3, 4]));
    assert_eq!(receiver.drain(|batch| batch.collect::<Vec<_>>()), Ok(vec![5]));
}

#[test]
fn a_sender_learns_that_the_receiver_is_gone_even_while_it_waits() {
    let (mut sender, receiver) = channel(1);
    let mut late = sender.clone();
    sender.send(1).unwrap();
    let waiting = thread::spawn(move || sender.send(2));
    thread::yield_now();
    drop(receiver);
    assert_eq!(waiting.join().unwrap(), Err(SendError::Closed(2)));
    assert_eq!(late.try_send(3), Err(SendError::Closed(3)));
    assert_eq!(late.clone().try_send(4), Err(SendError::Closed(4)));
}

#[test]
fn nothing_is_lost_when_senders_go_and_nothing_leaks_when_the_receiver_goes() {
    let token = Arc::new(());
    let (mut sender, mut receiver) = channel(16);
    for _ in 0..10 {
        sender.send(Arc::clone(&token)).unwrap();
    }
    let mut second = sender.clone();
    second.send(Arc::clone(&token)).unwrap();
    drop(sender);
    assert!(receiver.recv().is_ok());
    second.send(Arc::clone(&token)).unwrap();
    assert_eq!(Arc::strong_count(&token), 12);
    drop(receiver);
    assert_eq!(Arc::strong_count(&token), 1);
    assert!(second.send(Arc::clone(&token)).is_err());
    assert_eq!(Arc::strong_count(&token), 1);
}

#[test]
fn senders_that_come_and_go_while_the_receiver_sleeps_are_heard() {
    let (sender, mut receiver) = channel(4);
    let rounds = if cfg!(miri) { 10 } else { 2000 };
    let parent = thread::spawn(move || {
        for round in 0..rounds {
            let mut child = sender.clone();
            child.send(round).unwrap();
            if round % 64 == 0 {
                thread::yield_now();
            }
        }
    });
    let mut sum = 0;
    while let Ok(value) = receiver.recv() {
        sum += value;
    }
    parent.join().unwrap();
    assert_eq!(sum, (0..rounds).sum());
}
