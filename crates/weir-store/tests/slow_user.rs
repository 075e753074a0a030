//! Time that a store's user takes does not count as the driver's. The test is alone in its process,
//! since it shortens the driver's time limit.

#[path = "fake_cuda/mod.rs"]
#[allow(dead_code, reason = "the other tests use the rest")]
mod fake_cuda;

use fake_cuda::{BatchCopy, FakeCuda};
use std::time::{Duration, Instant};
use weir_core::{PAGE_SIZE, Slot};
use weir_store::vram::{Drivers, VramStore};
use weir_store::{Condition, Done, Progress, Store, StoreUrl};

const PATIENCE: Duration = Duration::from_secs(60);

/// The condition of the store's only card.
fn condition(store: &VramStore) -> Condition {
    store.report().expect("cards tell how they are").conditions().remove(0)
}

#[test]
fn a_slow_user_of_what_came_back_is_not_taken_for_a_driver_that_hangs() {
    let cuda = FakeCuda::build(BatchCopy::Cuda13);
    let drivers = Drivers {
        cuda: cuda.path().into(),
        nvml: "/no/libnvidia-ml.so.1".into(),
        loaded: "/no/version".into(),
    };
    let url = match "vram:0?size=4MiB&chunk=2MiB".parse() {
        Ok(StoreUrl::Vram(url)) => url,
        other => panic!("{other:?}"),
    };
    let store = VramStore::open_with(&url, &drivers).expect("a store by CUDA alone");
    // A call may take twice as long.
    weir_store::vram::set_answer_limit(Duration::from_millis(500));
    let mut lane = store.lane(4).expect("a lane");
    let mut nowhere = [0; PAGE_SIZE];
    assert_eq!(lane.read(0, Slot(1), &mut nowhere), Progress::Queued);
    lane.submit();
    let (mut seen, since) = (false, Instant::now());
    while !seen {
        lane.poll(Instant::now(), &mut |done: Done<'_>| {
            std::thread::sleep(Duration::from_secs(3));
            seen = done.result == Ok(());
        });
        assert!(since.elapsed() < PATIENCE, "no answer");
    }
    assert_eq!(condition(&store).why, None, "the context lives");
    // A call that does hang is noticed.
    cuda.hold("cuEventQuery");
    std::thread::scope(|scope| {
        let hangs = scope.spawn(move || {
            assert_eq!(lane.read(0, Slot(1), &mut nowhere), Progress::Queued);
            lane.submit();
            let mut result = None;
            while result.is_none() {
                lane.poll(Instant::now(), &mut |done: Done<'_>| result = Some(done.result));
            }
            result
        });
        let since = Instant::now();
        while !condition(&store).why.as_ref().is_some_and(|why| why.contains("a call into the driver")) {
            assert!(since.elapsed() < PATIENCE, "nobody saw it: {:?}", condition(&store));
            std::thread::sleep(Duration::from_millis(10));
        }
        cuda.hold("");
        assert!(hangs.join().expect("no panic").is_some_and(|result| result.is_err()));
    });
}
