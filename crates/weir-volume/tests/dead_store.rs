//! The behaviour of a volume once one of its stores is gone.

mod driver;

use driver::{Driven as _, driver};
use std::sync::Arc;
use std::time::{Duration, Instant};
use weir_core::{PAGE_SIZE, PageNo};
use weir_store::{Fault, Progress, Sim, SimUrl, Store, StoreUrl};
use weir_volume::{Config, GiveBackError, Volume};

/// Two stores of two chunks, 1024 slots each, and a volume that a single chunk can hold.
fn volume() -> ([Arc<Sim>; 2], Arc<Volume>) {
    let url: SimUrl = match "sim:size=8MiB,chunk=4MiB".parse() {
        Ok(StoreUrl::Sim(url)) => url,
        other => panic!("{other:?}"),
    };
    let stores = [0, 1].map(|_| Arc::new(Sim::open(url.clone()).unwrap()));
    let config = Config { pages: 100, lanes: 2, depth: 4 };
    let as_stores = stores.iter().map(|store| Arc::clone(store) as Arc<dyn Store>).collect();
    let volume = Volume::create(config, as_stores).unwrap();
    (stores, volume)
}

/// A page that takes a slot, since it is not one repeated value.
fn page(number: u8) -> [u8; PAGE_SIZE] {
    std::array::from_fn(|at| at as u8 ^ number)
}

#[test]
fn its_pages_are_errors_and_never_zeros_until_they_are_written_again_elsewhere() {
    let (stores, volume) = volume();
    let mut lane = volume.lane().unwrap();
    assert_eq!(lane.write(0, PageNo(1), &page(1)), Progress::Done(Ok(())));
    stores[0].kill();
    let mut out = [0x5a; PAGE_SIZE];
    assert_eq!(lane.read(0, PageNo(1), &mut out), Progress::Done(Err(Fault::Lost)));
    assert_eq!(lane.write_part(0, PageNo(1), 8, &[1]), Progress::Done(Err(Fault::Lost)));
    assert_eq!(lane.write(0, PageNo(1), &page(2)), Progress::Done(Ok(())));
    assert_eq!(lane.read(0, PageNo(1), &mut out), Progress::Done(Ok(())));
    assert_eq!(out, page(2));
}

#[test]
fn writes_that_find_no_room_for_it_are_errors_of_a_lost_store_and_not_of_a_full_one() {
    let (stores, volume) = volume();
    let mut lane = volume.lane().unwrap();
    stores.iter().for_each(|store| store.kill());
    assert_eq!(lane.write(0, PageNo(1), &page(1)), Progress::Done(Err(Fault::Lost)));
    assert_eq!(lane.write_part(0, PageNo(2), 8, &[1]), Progress::Done(Err(Fault::Lost)));
}

#[test]
fn its_slots_are_no_room_to_give_another_stores_chunks_back_into() {
    let (stores, volume) = volume();
    let (mut lane, mut mover) = (volume.lane().unwrap(), volume.mover().unwrap());
    stores[0].kill();
    assert_eq!(lane.write(0, PageNo(1), &page(1)), Progress::Done(Ok(())));
    lane.submit();
    assert_eq!(
        mover.give_back(1, 0, &mut driver(|_| true)).unwrap(),
        1,
        "the other chunk of the living store has room"
    );
    let started = Instant::now();
    let refused = mover.give_back(1, 1, &mut driver(|_| true));
    assert!(matches!(refused, Err(GiveBackError::NoRoom { .. })), "{refused:?}");
    // An operation that waits does so for ten seconds.
    assert!(started.elapsed() < Duration::from_secs(8), "and it says so at once");
}
