//! Writes pages by one path to a card's memory, and checks that another path reads the new content
//! at once, every time.
//!
//! Pairs of threads hand small batches back and forth over the same few slots. An old version of a
//! cache line may be left in a fill buffer of the processor or in the card's L1 or L2, or the write
//! of the new one may still be on its way. So the threads read the same lines again and again.

use super::BenchError;
use super::content::{is_stamped, stamp};
use std::sync::atomic::{AtomicBool, AtomicU32, Ordering};
use std::time::{Duration, Instant};
use weir_core::{PAGE_SIZE, Page, Slot};
use weir_store::vram::table::{Direction, Path};
use weir_store::vram::{Gpu, GpuLane};
use weir_store::{Done, Fault, Lane, Progress};

/// Number of slots that a pair hands over at a time.
const BATCH: u32 = 64;

/// Runs `pairs` pairs of threads for `time`. In each, one thread writes pages by one path, and the
/// other reads them by another path. Returns the number of pages checked.
///
/// # Errors
/// Fails on a stale page, or on a fault.
pub fn check(
    gpu: &std::sync::Arc<Gpu>,
    writes: Path,
    reads: Path,
    pairs: u32,
    time: Duration,
) -> Result<u64, BenchError> {
    let stop = AtomicBool::new(false);
    // For each pair of threads, the numbers of its last write and of its last read.
    let turns: Vec<[AtomicU32; 2]> = (0..pairs).map(|_| Default::default()).collect();
    std::thread::scope(|scope| {
        let mut threads = Vec::new();
        for pair in 0..pairs {
            let turn = &turns[pair as usize];
            let (mut writer, mut reader) = (gpu.lane(BATCH as usize)?, gpu.lane(BATCH as usize)?);
            writer.force(writes, Direction::Write);
            reader.force(reads, Direction::Read);
            let (first, stop) = (pair * BATCH, &stop);
            threads.push(scope.spawn(move || write(&mut writer, first, turn, stop)));
            threads.push(scope.spawn(move || read(&mut reader, first, turn, stop)));
        }
        if writes == Path::Ring || reads == Path::Ring {
            gpu.enter_ring();
        }
        let since = Instant::now();
        while since.elapsed() < time && threads.iter().all(|thread| !thread.is_finished()) {
            std::thread::sleep(Duration::from_millis(1));
        }
        stop.store(true, Ordering::Relaxed);
        threads.into_iter().map(|thread| thread.join().unwrap_or(Err(BenchError::Panic))).sum()
    })
}

fn wait(turn: &AtomicU32, wanted: u32, stop: &AtomicBool) -> bool {
    loop {
        match turn.load(Ordering::Acquire) == wanted {
            true => return true,
            false if stop.load(Ordering::Relaxed) => return false,
            false => std::hint::spin_loop(),
        }
    }
}

fn write(
    lane: &mut GpuLane,
    first: u32,
    turn: &[AtomicU32; 2],
    stop: &AtomicBool,
) -> Result<u64, BenchError> {
    let mut page = Page([0x3c; PAGE_SIZE]);
    for generation in 1.. {
        if !wait(&turn[1], generation - 1, stop) {
            break;
        }
        let mut waiting = 0;
        for slot in first..first + BATCH {
            stamp(&mut page, slot, generation);
            match lane.write(slot, Slot(slot), &page) {
                Progress::Done(result) => result.map_err(BenchError::Fault)?,
                Progress::Queued => waiting += 1,
                Progress::Full => return Err(BenchError::Fault(Fault::Full)),
            }
        }
        lane.submit();
        let mut result = Ok(());
        while waiting > 0 {
            lane.poll(Instant::now(), &mut |done: Done<'_>| {
                waiting -= 1;
                result = result.and(done.result);
            });
        }
        result.map_err(BenchError::Fault)?;
        turn[0].store(generation, Ordering::Release);
    }
    Ok(0)
}

fn read(lane: &mut GpuLane, first: u32, turn: &[AtomicU32; 2], stop: &AtomicBool) -> Result<u64, BenchError> {
    let mut page = Page::zeroed();
    let mut checked = 0;
    for generation in 1.. {
        if !wait(&turn[0], generation, stop) {
            break;
        }
        let (mut waiting, mut outcome) = (0, Ok(()));
        for slot in first..first + BATCH {
            match lane.read(slot, Slot(slot), &mut page) {
                Progress::Done(result) => {
                    result.map_err(BenchError::Fault)?;
                    if !is_stamped(&page, slot, generation) {
                        return Err(BenchError::Mismatch { number: slot, generation });
                    }
                }
                Progress::Queued => waiting += 1,
                Progress::Full => return Err(BenchError::Fault(Fault::Full)),
            }
        }
        lane.submit();
        while waiting > 0 {
            lane.poll(Instant::now(), &mut |done: Done<'_>| {
                waiting -= 1;
                match (done.result, done.page) {
                    (Err(fault), _) => outcome = Err(BenchError::Fault(fault)),
                    (Ok(()), Some(page)) if is_stamped(page, done.ticket, generation) => {}
                    _ => outcome = Err(BenchError::Mismatch { number: done.ticket, generation }),
                }
            });
        }
        outcome?;
        checked += u64::from(BATCH);
        turn[1].store(generation, Ordering::Release);
    }
    Ok(checked)
}
