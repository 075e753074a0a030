//! Measures give-back while the rest of the store is in use. Chunks are read into host memory and
//! released, as fast as possible. Meanwhile other threads read and write other chunks.

use super::BenchError;
use super::content::{is_stamped, stamp};
use super::load::{Kind, Part, together};
use crate::report::percentile;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU32, AtomicU64, Ordering};
use std::time::{Duration, Instant};
use weir_core::{PAGE_SIZE, PageBytes, Slot};
use weir_store::{Done, Fault, Lane, Progress, Store};

/// Number of pages in one batch when the chunks are filled.
const BATCH: u32 = 64;
/// Number of threads that use the chunks that are not given back.
const USERS: usize = 4;
/// Number of pages that are in use by other threads during the give-back.
const USED: u32 = 1 << 18;

/// The effort of a give-back: how many threads read chunks, and how much each reads at once. The
/// more pages a thread reads at once, the longer the store's other users wait.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Effort {
    /// Number of threads that read chunks.
    pub threads: usize,
    /// Number of pages that each of these threads reads at once.
    pub batch: u32,
}

impl std::str::FromStr for Effort {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        let wrong = || format!("{text:?} is not THREADSxPAGES, such as 3x32");
        let (threads, batch) = text.split_once('x').ok_or_else(wrong)?;
        let (threads, batch) = (threads.parse().map_err(|_| wrong())?, batch.parse().map_err(|_| wrong())?);
        if threads == 0 || batch == 0 { Err(wrong()) } else { Ok(Effort { threads, batch }) }
    }
}

impl std::fmt::Display for Effort {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "{}x{}", self.threads, self.batch)
    }
}

/// The figures of a give-back.
#[derive(Clone, Copy, Debug)]
pub struct Outcome {
    /// Bytes per second that are given back.
    pub rate: f64,
    /// The 99th percentile of the users' latencies before the give-back, in microseconds.
    pub quiet_p99: f64,
    /// The 99th percentile of the users' latencies during the give-back, in microseconds.
    pub busy_p99: f64,
    /// The mean time to release an emptied chunk, in milliseconds.
    pub release_ms: f64,
}

/// Gives `chunks` chunks back and takes them again; returns the figures.
///
/// # Errors
/// Fails on a fault, or on a page that is not what was written.
pub fn measure(store: &Arc<dyn Store>, chunks: u32, effort: Effort) -> Result<Outcome, BenchError> {
    let memory = store.reclaim().ok_or(BenchError::Fault(Fault::Unsupported))?;
    let slots = memory.chunk_slots();
    let first = USED.div_ceil(slots);
    // Write the chunks that are given back later, so that their pages can be checked then.
    let mut lane = store.lane(BATCH as usize)?;
    let mut page = [0x77; PAGE_SIZE];
    for slot in (first * slots..(first + chunks) * slots).map(Slot) {
        stamp(&mut page, slot.0, 1);
        finish(lane.as_mut(), |lane| lane.write(0, slot, &page))?;
    }
    drop(lane);
    let mut users = (0..USERS as u32)
        .map(|at| Ok((store.lane(16)?, Part::new(at * (USED / 4), USED / 4, 11))))
        .collect::<Result<Vec<_>, BenchError>>()?;
    together(&mut users, |lane, part| part.fill(lane).map(|()| 0))?;
    let (stop, next) = (AtomicBool::new(false), AtomicU32::new(first));
    let releasing = AtomicU64::new(0);
    let mut phase = |giving: bool| -> Result<(f64, f64), BenchError> {
        stop.store(false, Ordering::Relaxed);
        std::thread::scope(|scope| {
            let running: Vec<_> = users
                .iter_mut()
                .map(|(lane, part)| {
                    let stop = &stop;
                    scope.spawn(move || {
                        let mut times = Vec::with_capacity(1 << 20);
                        while !stop.load(Ordering::Relaxed) && times.len() < times.capacity() {
                            let kind = if times.len() % 2 == 0 { Kind::Read } else { Kind::Write };
                            times.push(part.once(lane, kind)?.as_nanos() as u64);
                        }
                        Ok(times)
                    })
                })
                .collect();
            let since = Instant::now();
            let gave = if giving {
                let drains: Vec<_> = (0..effort.threads)
                    .map(|_| {
                        let (next, releasing) = (&next, &releasing);
                        scope.spawn(move || {
                            drain(store.as_ref(), next, first + chunks, effort.batch, releasing)
                        })
                    })
                    .collect();
                drains.into_iter().try_for_each(|it| it.join().unwrap_or(Err(BenchError::Panic)))
            } else {
                std::thread::sleep(Duration::from_millis(500));
                Ok(())
            };
            let took = since.elapsed().as_secs_f64();
            stop.store(true, Ordering::Relaxed);
            let mut times = Vec::new();
            for user in running {
                times.extend(user.join().unwrap_or(Err(BenchError::Panic))?);
            }
            gave?;
            Ok((took, percentile(&mut times, 99.0) as f64 / 1e3))
        })
    };
    let (_, quiet_p99) = phase(false)?;
    let (took, busy_p99) = phase(true)?;
    for chunk in first..first + chunks {
        memory.take(chunk).map_err(BenchError::Fault)?;
    }
    let bytes = f64::from(chunks) * f64::from(slots) * PAGE_SIZE as f64;
    let release_ms = releasing.into_inner() as f64 / 1e6 / f64::from(chunks);
    Ok(Outcome { rate: bytes / took, quiet_p99, busy_p99, release_ms })
}

/// Reads chunk after chunk into host memory, checks it, and releases it.
fn drain(
    store: &dyn Store,
    next: &AtomicU32,
    end: u32,
    batch: u32,
    releasing: &AtomicU64,
) -> Result<(), BenchError> {
    let memory = store.reclaim().ok_or(BenchError::Fault(Fault::Unsupported))?;
    let slots = memory.chunk_slots();
    let mut lane = store.lane(2 * batch as usize)?;
    // Filling the memory touches its pages, so that the reads below cause no page faults.
    let mut host = vec![1u8; slots as usize * PAGE_SIZE];
    loop {
        let chunk = next.fetch_add(1, Ordering::Relaxed);
        if chunk >= end {
            return Ok(());
        }
        let base = chunk * slots;
        let (mut queued, mut landed, mut wrong) = (0, 0, None);
        while landed < slots {
            while queued < slots && queued - landed < batch {
                if queued % batch == 0 {
                    lane.plan(batch as usize, 0);
                }
                let at = queued as usize * PAGE_SIZE;
                let page: &mut PageBytes =
                    (&mut host[at..at + PAGE_SIZE]).try_into().expect("a page's worth");
                match lane.read(queued, Slot(base + queued), page) {
                    Progress::Done(result) => {
                        result.map_err(BenchError::Fault)?;
                        landed += 1;
                    }
                    Progress::Queued => {}
                    Progress::Full => break,
                }
                queued += 1;
            }
            lane.submit();
            lane.poll(Instant::now(), &mut |done: Done<'_>| {
                landed += 1;
                match (done.result, done.page) {
                    (Ok(()), Some(page)) => {
                        let at = done.ticket as usize * PAGE_SIZE;
                        host[at..at + PAGE_SIZE].copy_from_slice(page);
                    }
                    (Ok(()), None) => wrong = Some(Fault::Corrupt),
                    (Err(fault), _) => wrong = Some(fault),
                }
            });
            if let Some(fault) = wrong {
                return Err(BenchError::Fault(fault));
            }
        }
        for (at, page) in host.chunks_exact(PAGE_SIZE).enumerate() {
            let number = base + at as u32;
            if !is_stamped(page.try_into().expect("a page's worth"), number, 1) {
                return Err(BenchError::Mismatch { number, generation: 1 });
            }
        }
        let since = Instant::now();
        memory.release(chunk).map_err(BenchError::Fault)?;
        releasing.fetch_add(since.elapsed().as_nanos() as u64, Ordering::Relaxed);
    }
}

fn finish(lane: &mut dyn Lane, queue: impl FnOnce(&mut dyn Lane) -> Progress) -> Result<(), BenchError> {
    let mut result = None;
    match queue(lane) {
        Progress::Done(done) => result = Some(done),
        Progress::Queued => lane.submit(),
        Progress::Full => result = Some(Err(Fault::Full)),
    }
    while result.is_none() {
        lane.poll(Instant::now(), &mut |done: Done<'_>| result = Some(done.result));
    }
    result.unwrap_or(Ok(())).map_err(BenchError::Fault)
}
