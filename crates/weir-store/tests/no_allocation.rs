//! No store uses the allocator between two operations, even after faults: a thread that serves swap
//! must not.

use std::sync::Arc;
use std::time::Instant;
use weir_core::seal::{self, Policy, SealedAllocator};
use weir_core::{PAGE_SIZE, Slot};
use weir_store::{Lane, Progress, Store, open};

#[global_allocator]
static ALLOCATOR: SealedAllocator = SealedAllocator;

const DEPTH: u32 = 32;

/// Writes and reads in batches; some slots are outside of the store, some in a released chunk.
/// Returns how many operations succeeded and how many faulted.
fn work(lane: &mut dyn Lane, slots: u32) -> (u32, u32) {
    let (mut good, mut bad) = (0, 0);
    let mut page = [7; PAGE_SIZE];
    for round in 0..50 {
        for ticket in 0..2 * DEPTH {
            // The slots are runs of neighbours, then scattered, then outside of the store.
            let slot = Slot(match round % 3 {
                0 => round + ticket,
                1 => (ticket * 37) % slots,
                _ => slots - DEPTH + ticket,
            });
            let progress = match ticket % 2 {
                0 => lane.write(ticket, slot, &page),
                _ => lane.read(ticket, slot, &mut page),
            };
            match progress {
                Progress::Done(Ok(())) => good += 1,
                Progress::Done(Err(_)) => bad += 1,
                Progress::Queued => {}
                Progress::Full => {
                    lane.submit();
                    lane.poll(Instant::now(), &mut |done| {
                        *if done.result.is_ok() { &mut good } else { &mut bad } += 1;
                    });
                }
            }
        }
        lane.submit();
        while lane.in_flight() > 0 {
            lane.poll(Instant::now(), &mut |done| {
                *if done.result.is_ok() { &mut good } else { &mut bad } += 1;
            });
        }
    }
    (good, bad)
}

#[test]
fn no_store_touches_the_allocator_on_an_io_thread() {
    let dir = format!("/var/tmp/weir-no-allocation-{}", std::process::id());
    std::fs::create_dir(&dir).unwrap();
    let stores: Vec<Arc<dyn Store>> = [
        "host:1MiB".to_owned(),
        "sim:size=1MiB,read_error=0.1,write_error=0.1,lose=0.1,corrupt=0.1".to_owned(),
        "sim:size=1MiB,read_error=0.1,write_error=0.1,delay=4,latency_us=5".to_owned(),
        format!("file:{dir}/file?size=1MiB&chunk=256KiB"),
        format!("stripe:{dir}/a,{dir}/b?size=1MiB&unit=64KiB"),
    ]
    .iter()
    .map(|url| open(&url.parse().unwrap()).unwrap())
    .collect();
    // The file is truncated under the store, so that runs fail and are split.
    let cut = std::fs::OpenOptions::new().write(true).open(format!("{dir}/file")).unwrap();
    cut.set_len((1 << 20) + 100 * PAGE_SIZE as u64).unwrap();
    std::fs::remove_dir_all(&dir).unwrap();

    seal::seal(Policy::Count);
    for store in stores {
        let mut lane = store.lane(DEPTH as usize).unwrap();
        let slots = store.slots();
        let before = seal::violations();
        let (good, bad) = seal::on_io_thread(|| work(&mut *lane, slots));
        assert_eq!(seal::violations() - before, 0, "{}", store.name());
        assert!(good > 100 && bad > 100, "{}: {good} good, {bad} bad", store.name());
    }
    // The control: the allocator would have noticed an allocation.
    let before = seal::violations();
    seal::on_io_thread(|| drop(std::hint::black_box(Box::new(1))));
    assert!(seal::violations() > before);
}
