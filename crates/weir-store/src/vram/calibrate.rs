//! Measures the cost of each path on the store's own memory, before it holds pages: under 300 ms in
//! all.

use super::gpu::Gpu;
use super::lane::GpuLane;
use super::table::{Cost, Direction, Path, Table};
use crate::{Done, Fault, Lane, Progress};
use std::sync::{Arc, Barrier};
use std::time::{Duration, Instant};
use weir_core::{Page, Slot};

/// Distance between two slots that are measured one after the other. Copies at this distance cannot
/// become one. It is no power of two, so that the measurement does not use the same few slots again
/// and again.
const STRIDE: u32 = 7;
/// Number of pages in the batch that measures a further page's time ([`Cost::each`]).
const BATCH: usize = 32;
/// Number of neighbouring pages in the batch that measures the link.
const RUN: usize = 256;
/// Time for which one cost is measured.
const FIGURE: Duration = Duration::from_millis(5);
/// Number of threads that share a path when its limit is measured: three fill an H200's window,
/// eight its link.
const SHARERS: usize = 8;
/// Number of pages that each of the [`SHARERS`] has in flight.
const DEPTH: usize = 64;
/// Number of pages that each of the [`SHARERS`] threads starts at once.
const START: usize = 16;

/// Measures every path that `gpu` has.
///
/// # Errors
/// Fails when an operation fails: a store that fails now is not opened.
pub fn measure(gpu: &Arc<Gpu>) -> Result<Table, Fault> {
    let mut table = Table::default();
    let slots = gpu.slots().min(gpu.chunk_slots());
    for path in [Path::Mapped, Path::Engine, Path::Ring].into_iter().filter(|&path| gpu.has(path)) {
        let open = || gpu.lane(RUN).map_err(|_| Fault::Io(libc::ENOMEM));
        let mut lane = open()?;
        for direction in [Direction::Write, Direction::Read] {
            // Put the kernel on the card again each time, since a measurement with several lanes
            // ends by taking it off.
            if path == Path::Ring && !gpu.enter_ring() {
                continue;
            }
            lane.force(path, direction);
            // A first run, which does not count, brings the clocks to full speed and fills the
            // caches.
            timed(&mut lane, direction, 1, STRIDE, slots, FIGURE / 4)?;
            let first = timed(&mut lane, direction, 1, STRIDE, slots, FIGURE)?;
            let (each, neighbour) = match path {
                // Through the window, the processor copies each page by itself, so a page costs the
                // same in every batch.
                Path::Mapped => (first, first),
                Path::Engine | Path::Ring => {
                    let batch = timed(&mut lane, direction, BATCH, STRIDE, slots, FIGURE)?;
                    let each = ((batch * BATCH as f64 - first) / (BATCH - 1) as f64).max(batch / 2.0);
                    (each, timed(&mut lane, direction, RUN, 1, slots, FIGURE)?.min(each))
                }
            };
            let shared = match path {
                // The driver makes one copy at a time, for all threads together.
                Path::Engine => each,
                Path::Mapped | Path::Ring => shared(gpu, path, direction, slots)?.min(each),
            };
            let neighbour_shared = shared.min(neighbour);
            table.set(path, direction, Cost { first, each, neighbour, shared, neighbour_shared });
        }
        gpu.leave_ring();
    }
    // For runs of neighbours, the PCIe link alone limits engine and ring, and one thread cannot
    // fill it. So the engine's cost is set to the shortest time of a page that several threads have
    // reached on any path.
    if let Some(link) = table.link() {
        for direction in [Direction::Read, Direction::Write] {
            if let Some(cost) = table.get(Path::Engine, direction) {
                table.set(Path::Engine, direction, Cost { neighbour_shared: link, ..cost });
            }
        }
    }
    Ok(table)
}

/// Nanoseconds for each page in batches of `batch`: the median over the batches, divided by the
/// pages.
fn timed(
    lane: &mut GpuLane,
    direction: Direction,
    batch: usize,
    stride: u32,
    slots: u32,
    time: Duration,
) -> Result<f64, Fault> {
    let mut page = Page::zeroed();
    let mut took = Vec::with_capacity(1 << 16);
    let (since, mut slot) = (Instant::now(), 0u32);
    while took.len() < 3 || (since.elapsed() < time && took.len() < took.capacity()) {
        let begun = Instant::now();
        let (mut result, mut waiting) = (Ok(()), 0usize);
        for _ in 0..batch {
            slot = (slot + stride) % slots;
            let progress = match direction {
                Direction::Write => lane.write(0, Slot(slot), &page),
                Direction::Read => lane.read(0, Slot(slot), &mut page),
            };
            match progress {
                Progress::Done(done) => result = result.and(done),
                Progress::Queued => waiting += 1,
                Progress::Full => return Err(Fault::Full),
            }
        }
        lane.submit();
        while waiting > 0 {
            lane.poll(Instant::now(), &mut |done: Done<'_>| {
                waiting -= 1;
                result = result.and(done.result);
            });
        }
        result?;
        took.push(begun.elapsed().as_nanos() as f64);
    }
    took.sort_by(f64::total_cmp);
    Ok(took[took.len() / 2] / batch as f64)
}

/// Nanoseconds between pages while several threads use one path, each with as much in flight as a
/// busy lane. It is the mean, not the median: a full window takes most stores at once and then
/// delays one.
fn shared(gpu: &Arc<Gpu>, path: Path, direction: Direction, slots: u32) -> Result<f64, Fault> {
    let threads = SHARERS.min(std::thread::available_parallelism().map_or(1, std::num::NonZero::get));
    let mut lanes = (0..threads)
        .map(|_| match path {
            Path::Mapped => gpu.bare_lane().ok_or(Fault::Full),
            Path::Engine | Path::Ring => gpu.lane(DEPTH).map_err(|_| Fault::Io(libc::ENOMEM)),
        })
        .collect::<Result<Vec<_>, Fault>>()?;
    // Take the kernel off the card. If the ring is to be measured, put the kernel on the card
    // again: it serves only lanes that were open when it entered.
    gpu.leave_ring();
    if path == Path::Ring && !gpu.enter_ring() {
        return Err(Fault::Timeout);
    }
    let start = Barrier::new(threads);
    let rate: f64 = std::thread::scope(|scope| {
        let runs: Vec<_> = lanes
            .iter_mut()
            .enumerate()
            .map(|(at, lane)| {
                let (start, first) = (&start, (at * slots as usize / threads) as u32);
                scope.spawn(move || {
                    lane.force(path, direction);
                    start.wait();
                    flood(lane, direction, first, slots)
                })
            })
            .collect();
        runs.into_iter()
            .map(|run| run.join().unwrap_or(Err(Fault::Io(libc::EIO))))
            .sum::<Result<f64, Fault>>()
    })?;
    Ok(1.0 / rate.max(1e-9))
}

/// Returns the pages that one thread moves in a nanosecond if it always has pages in flight.
fn flood(lane: &mut GpuLane, direction: Direction, first: u32, slots: u32) -> Result<f64, Fault> {
    let mut page = Page::zeroed();
    let (mut slot, mut waiting, mut moved, mut result) = (first, 0usize, 0u64, Ok(()));
    let mut since = Instant::now();
    let mut is_warm = false;
    loop {
        if !is_warm && since.elapsed() > FIGURE {
            // Begin to count only now. Until here, operations met cold staging pages, and some
            // threads had not begun.
            (is_warm, since, moved) = (true, Instant::now(), 0);
        }
        let on = !is_warm || since.elapsed() < 2 * FIGURE;
        if on && waiting + START <= DEPTH {
            for _ in 0..START {
                slot = (slot + STRIDE) % slots;
                let progress = match direction {
                    Direction::Write => lane.write(0, Slot(slot), &page),
                    Direction::Read => lane.read(0, Slot(slot), &mut page),
                };
                match progress {
                    Progress::Done(done) => {
                        result = result.and(done);
                        moved += 1;
                    }
                    Progress::Queued => waiting += 1,
                    Progress::Full => return Err(Fault::Full),
                }
            }
            lane.submit();
        }
        lane.poll(Instant::now(), &mut |done: Done<'_>| {
            waiting -= 1;
            moved += 1;
            result = result.and(done.result);
        });
        result?;
        if !on && waiting == 0 {
            return Ok(moved as f64 / since.elapsed().as_nanos() as f64);
        }
    }
}
