//! The watching thread: puts the resident kernel on the card and takes it off, counts active lanes,
//! and checks the free memory.

use super::answer_limit;
use super::chunks::LANES_MAX;
use super::condition::Death;
use super::contest::Contest;
use super::gpu::{CROWD, Gpu};
use super::ring::{Policy, Seen, Step};
use super::table::{BatchShape, Direction, Path};
use crate::State;
use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::{Duration, Instant};

/// Time between two looks of the watching thread. `TICK_BUSY` is for times when many pages move, or
/// the resident kernel is on the card. `TICK_IDLE` is for times when few pages move. `TICK_ASLEEP`
/// begins after a second without a page, and the next page then wakes the thread.
const TICK_BUSY: Duration = Duration::from_millis(1);
const TICK_IDLE: Duration = Duration::from_millis(20);
const TICK_ASLEEP: Duration = Duration::from_secs(1);
/// After this time without a page, the watching thread only looks each [`TICK_ASLEEP`].
const QUIET: Duration = Duration::from_secs(1);
/// The load counts as heavy if at least this many pages moved between two looks of the watching
/// thread.
const MANY: u64 = 32;
/// Time between two questions to the driver: how much memory is free, and, while the resident
/// kernel is on the card, who else uses it. `ASK_BUSY` is for times when many pages move or the
/// kernel is on the card, and `ASK_IDLE` for all others. An answer takes as long as a hundred
/// pages.
const ASK_BUSY: Duration = Duration::from_millis(250);
const ASK_IDLE: Duration = Duration::from_secs(1);

/// From this many pages a second on, the watching thread measures which path is fastest for the
/// writes of many threads.
const THRONG: f64 = 1e6;
/// Number of pages that each thread has in a batch while many threads write.
const BATCH_OF_CROWD: usize = 64;

/// Longest time that a thread may be inside the driver. If a call takes longer, the driver counts
/// as dead. On a working machine, no thread waits so long for a processor.
fn call_limit() -> Duration {
    2 * answer_limit()
}

/// Declares CUDA lost if a lane has been in one call into the driver for too long. `since` has, for
/// each lane, the count of its calls, and the time when the watching thread first saw that count.
fn mind_calls(gpu: &Gpu, since: &mut [(u32, Instant)]) {
    for (lane, count) in gpu.chunks.inside() {
        if since[lane].0 != count {
            since[lane] = (count, Instant::now());
        } else if since[lane].1.elapsed() > call_limit()
            && let Some(cuda) = gpu.source().cuda()
        {
            cuda.declare_lost(Death::NoAnswer("a call into the driver"));
        }
    }
}

/// Chooses the path that has moved the most pages, for the writes of many threads.
fn contend(gpu: &Gpu, contests: &mut [Contest; 2], elapsed: Duration, pages: u64, busy: usize, runs: bool) {
    let ring = gpu.ring_is_resident();
    let batch = BatchShape { pages: BATCH_OF_CROWD, neighbours: runs, busy, ring };
    let mut contenders = gpu.table().contenders(Direction::Write, batch);
    // For runs of neighbouring slots, the copy engine and the ring each fill the PCIe link. The
    // window cannot, so it does not compete.
    if runs && contenders.iter().any(|&path| path != Path::Mapped) {
        contenders.retain(|&path| path != Path::Mapped);
    }
    let path = contests[usize::from(runs)].step(elapsed, pages, &contenders);
    gpu.crowd[usize::from(runs)].store(path.map_or(0, |path| path as u8 + 1), Ordering::Relaxed);
    contests[usize::from(!runs)].pause();
}

/// Watches the card until it is told to stop.
pub fn watch(gpu: &Arc<Gpu>, mut policy: Policy) {
    let (mut is_dead, mut is_lost) = (false, false);
    let (mut looked, mut asked) = (Instant::now(), Instant::now());
    let total = || gpu.chunks.pages().iter().sum::<u64>();
    let (mut pages, mut others) = (total(), 0);
    let mut written = gpu.chunks.written();
    let mut contests = [Contest::default(), Contest::default()];
    let mut seen_by_lane = vec![0u64; LANES_MAX];
    let (mut moved, mut quiet) = (0, Duration::ZERO);
    let mut calls = vec![(0, Instant::now()); LANES_MAX];
    gpu.mind_headroom();
    while !gpu.stopping.load(Ordering::Acquire) {
        let tick = match () {
            () if moved >= MANY || gpu.ring_is_resident() => TICK_BUSY,
            () if quiet < QUIET || policy.always || gpu.chunks.inside().next().is_some() => TICK_IDLE,
            () if gpu.nvml().is_some() => TICK_ASLEEP,
            // The card does not report its free memory, so there is nothing to check.
            () => Duration::MAX,
        };
        let asleep = &gpu.chunks.hot().gate().asleep;
        asleep.store(tick >= TICK_ASLEEP, Ordering::Release);
        std::thread::park_timeout(tick);
        asleep.store(false, Ordering::Release);
        mind_calls(gpu, &mut calls);
        if gpu.cuda_is_lost() && !is_dead {
            is_dead = true;
            gpu.mind_death();
        }
        if gpu.state() == State::Lost && !is_lost {
            is_lost = true;
            let why = gpu.condition().why.into_iter().chain(gpu.loss.get().map(|&why| why.to_owned()));
            gpu.turn(Some(why.collect::<Vec<_>>().join("; ")));
        }
        let elapsed = looked.elapsed();
        looked = Instant::now();
        moved = total().wrapping_sub(pages);
        pages = pages.wrapping_add(moved);
        quiet = if moved == 0 { quiet + elapsed } else { Duration::ZERO };
        let before = std::mem::replace(&mut written, gpu.chunks.written());
        let through = written[0].wrapping_sub(before[0]);
        let sent = written[1].wrapping_sub(before[1]);
        // Until the window is full, it takes writes faster than the ring, and only many lanes can
        // fill it. So while few lanes write, pages written through the window are no reason to put
        // the kernel on the card.
        let crowded = gpu.busy.load(Ordering::Relaxed) >= CROWD;
        let asking = if crowded { moved } else { moved.saturating_sub(through) };
        let (busy, runs) = gpu.chunks.busy(&mut seen_by_lane);
        gpu.busy.store(busy, Ordering::Relaxed);
        let rate = moved as f64 / elapsed.as_secs_f64().max(1e-6);
        if busy >= CROWD && rate >= THRONG && through + sent > 0 {
            contend(gpu, &mut contests, elapsed, moved, busy, 2 * runs > busy);
        } else {
            contests.iter_mut().for_each(Contest::pause);
        }
        let resident = gpu.ring_is_resident();
        let ask_every = if resident || moved >= MANY { ASK_BUSY } else { ASK_IDLE };
        if asked.elapsed() >= ask_every {
            gpu.mind_headroom();
            others = if resident { gpu.others() } else { 0 };
            asked = Instant::now();
        }
        let Some(ring) = gpu.ring.get().filter(|_| !gpu.cuda_is_lost()) else { continue };
        let stalls = ring.take_stalls();
        if stalls > 0 {
            ring.ask();
        }
        let seen =
            Seen { elapsed, pages: asking, others, stalls, resident, uncovered: ring.has_uncovered_lanes() };
        let step = policy.step(seen);
        // `others` is soon out of date. So the policy uses each answer of NVML once, and NVML is
        // asked again before the kernel enters.
        others = 0;
        match step {
            Step::Stay => {}
            Step::Enter => {
                others = gpu.others();
                if others == 0 {
                    gpu.enter_ring();
                }
            }
            Step::Leave => gpu.leave_ring(),
        }
    }
    gpu.leave_ring();
}
