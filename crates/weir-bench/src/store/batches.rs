//! `weir bench store --batch-sweep`: finds out how many copies one call to the card's driver may
//! name.
//!
//! When a call of NVIDIA's `cuMemcpyBatchAsync` named too many copies, the process has lost
//! everything that it had on the card. The limit is not documented. A driver may also crash or
//! hang. So each load runs in a process of its own, with a time limit. Every page that is read is
//! checked.

use super::BenchError;
use super::content::{Random, is_stamped, stamp};
use crate::report::{Goal, Report, Row};
use crate::steps::Steps;
use serde::{Deserialize, Serialize};
use std::path::PathBuf;
use std::process::{Command, Stdio};
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};
use weir_core::{PAGE_SIZE, Page, Slot};
use weir_store::vram::{PathMode, RingMode, VramUrl};
use weir_store::{Done, Lane, Progress, Store, StoreUrl};

/// Number of pages that each thread reads and writes.
const PART: u32 = 16_384;
/// Largest number of pages that a call moves, so that staging memory stays small.
const CALL_PAGES: u32 = 4096;
/// Time limit for opening and closing the store.
const OPENING: Duration = Duration::from_secs(20);

/// The directions of a load's copies: to the card, from the card, or both.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Serialize, Deserialize)]
pub enum Ways {
    /// All copies go to the card.
    Write,
    /// All copies come from the card.
    Read,
    /// Some copies go to the card, and some come from it.
    Mixed,
}

/// The load of one run.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Serialize, Deserialize)]
pub struct Shape {
    /// Number of threads, each with a stream.
    pub threads: u32,
    /// Number of copies that a call names.
    pub copies: u32,
    /// Number of calls that each thread has in flight.
    pub calls: u32,
    /// Every fourth copy is of 1 to `longest` pages; the others are of one page.
    pub longest: u32,
    /// The directions of the load's copies: to the card, from the card, or both.
    pub ways: Ways,
}

impl Shape {
    fn id(self) -> String {
        let Shape { threads, copies, calls, longest, ways } = self;
        let ways = match ways {
            Ways::Write => "write",
            Ways::Read => "read",
            Ways::Mixed => "mixed",
        };
        format!("{ways}_{copies}x{calls}x{threads}_runs_to_{longest}")
    }
}

/// The plan of a batch sweep: the loads to run.
#[derive(Clone, Debug)]
pub struct Sweep {
    /// The path of this program, for the child processes.
    pub program: PathBuf,
    /// The URL of the card under test.
    pub store: VramUrl,
    /// Number of seconds for which each load runs.
    pub seconds: u64,
    /// Numbers of copies in a call, to try one after another.
    pub copies: Vec<u32>,
}

/// The report of a child process about its load. A process that the driver has killed gives none.
#[derive(Clone, Copy, Debug, Serialize, Deserialize)]
pub struct Burnt {
    /// Number of pages moved. Each page that was read was checked.
    pub pages: u64,
    /// Seconds that the load took.
    pub seconds: f64,
}

/// The shapes of load with `copies` copies in each call. Some have many small calls in flight, and
/// some few large ones; some have many threads, and some few.
fn shapes(copies: u32) -> [Shape; 5] {
    let shape = |threads, calls, longest, ways| Shape { threads, copies, calls, longest, ways };
    [
        shape(16, 8, 1, Ways::Mixed),
        shape(16, 8, 64, Ways::Write),
        shape(16, 8, 64, Ways::Mixed),
        shape(4, 4, 4, Ways::Write),
        shape(16, 4, 1, Ways::Read),
    ]
}

/// Runs all loads. Each load has a row with its pages a second, and a row that is 1 if its process
/// died. A load with as many copies as the store itself names in a call must not die.
///
/// # Errors
/// Fails when no process can be started.
pub fn sweep(plan: &Sweep) -> Result<Report, BenchError> {
    let mut report = Report::new("store", 1);
    let steps = Steps::new(plan.copies.iter().map(|&copies| shapes(copies).len()).sum());
    for &copies in &plan.copies {
        for shape in shapes(copies) {
            steps.part(shape.id());
            let before = kernel_lines().len();
            let outcome = burn_apart(plan, shape)?;
            let said: Vec<String> = kernel_lines().into_iter().skip(before).collect();
            let outcome = match (outcome, said.is_empty()) {
                (Ok(burnt), true) => Ok(burnt),
                (Ok(_), false) => Err(said.join("; ")),
                (Err(why), _) => Err([vec![why], said].concat().join("; ")),
            };
            let id = shape.id();
            let rate = outcome.as_ref().map_or(0.0, |burnt| burnt.pages as f64 / burnt.seconds);
            match &outcome {
                Ok(_) => steps.say(format_args!("{id}: {:.2} M pages/s", rate / 1e6)),
                Err(why) => steps.say(format_args!("{id}: DEAD: {why}")),
            }
            steps.end();
            report.rows.push(Row::higher(id.clone(), "pages_per_s", rate));
            let died = Row::lower(id, "died", f64::from(u8::from(outcome.is_err())));
            // Only loads that a store on a card makes by default have a goal. For reads, such a
            // store names several pages in one call. For writes it does so only if its URL asks for
            // that.
            let is_shipped = copies <= VramUrl::ENGINE_BATCH && shape.ways == Ways::Read || copies == 1;
            report.rows.push(if is_shipped { died.goal(Goal::Value(0.0)) } else { died });
        }
    }
    Ok(report)
}

/// The driver's lines in the kernel's log, if this process may read it.
fn kernel_lines() -> Vec<String> {
    let Ok(output) = Command::new("dmesg").stderr(Stdio::null()).output() else { return Vec::new() };
    let text = String::from_utf8_lossy(&output.stdout);
    text.lines().filter(|line| line.contains("NVRM: Xid")).map(ToOwned::to_owned).collect()
}

/// Runs one load in a process of its own.
fn burn_apart(plan: &Sweep, shape: Shape) -> Result<Result<Burnt, String>, BenchError> {
    let shape_text = serde_json::to_string(&shape).expect("numbers always serialise");
    let failed = |what: std::io::Error| BenchError::Process(what);
    let mut child = Command::new(&plan.program)
        .args(["batch-burn", "--store", &StoreUrl::Vram(plan.store.clone()).to_string()])
        .args(["--shape", &shape_text, "--seconds", &plan.seconds.to_string()])
        .stdin(Stdio::null())
        .stdout(Stdio::piped())
        .stderr(Stdio::piped())
        .spawn()
        .map_err(failed)?;
    let limit = Instant::now() + Duration::from_secs(plan.seconds) + OPENING;
    while child.try_wait().map_err(failed)?.is_none() {
        if Instant::now() > limit {
            child.kill().map_err(failed)?;
            child.wait().map_err(failed)?;
            return Ok(Err("no answer".to_owned()));
        }
        std::thread::sleep(Duration::from_millis(20));
    }
    let output = child.wait_with_output().map_err(failed)?;
    if output.status.success() {
        return Ok(serde_json::from_slice(&output.stdout).map_err(|error| error.to_string()));
    }
    let said = String::from_utf8_lossy(&output.stderr);
    Ok(Err(format!("{}: {}", output.status, said.lines().last().unwrap_or_default())))
}

/// Runs one load in this process, by CUDA's copy engine alone.
///
/// # Errors
/// Fails when the store cannot be opened, an operation fails, or a page is wrong.
pub fn burn(url: &VramUrl, shape: Shape, seconds: u64) -> Result<Burnt, BenchError> {
    let bytes = u64::from(shape.threads * PART) * PAGE_SIZE as u64;
    let url = VramUrl {
        size: Some(weir_core::ByteSize(bytes)),
        window: false,
        path: Some(PathMode::Engine),
        ring: RingMode::Off,
        engine_batch: Some(shape.copies),
        ..url.clone()
    };
    let store = weir_store::open(&StoreUrl::Vram(url))?;
    let stop = AtomicBool::new(false);
    let since = Instant::now();
    let pages = std::thread::scope(|scope| {
        let threads: Vec<_> = (0..shape.threads)
            .map(|thread| {
                let (store, stop) = (store.as_ref(), &stop);
                scope.spawn(move || {
                    let moved = burn_part(store, shape, thread, seconds, stop);
                    stop.store(true, Ordering::Relaxed);
                    moved
                })
            })
            .collect();
        let moved = threads.into_iter().map(|thread| thread.join().unwrap_or(Err(BenchError::Panic)));
        moved.sum::<Result<u64, BenchError>>()
    })?;
    Ok(Burnt { pages, seconds: since.elapsed().as_secs_f64() })
}

/// One thread's load on its own pages. A page's content is its number, so the order of two writes
/// does not matter.
fn burn_part(
    store: &dyn Store,
    shape: Shape,
    thread: u32,
    seconds: u64,
    stop: &AtomicBool,
) -> Result<u64, BenchError> {
    let mean = 0.75 + (f64::from(shape.longest) + 1.0) / 8.0;
    let call_pages = ((f64::from(shape.copies) * mean) as u32).clamp(1, CALL_PAGES).min(PART / 2);
    let mut lane = store.lane((call_pages * shape.calls) as usize)?;
    let lane = lane.as_mut();
    let first = thread * PART;
    let mut load = Burning { page: Page::zeroed(), waiting: 0, moved: 0, result: Ok(()) };
    for number in first..first + PART {
        load.queue(lane, number, true)?;
        if (number + 1) % call_pages == 0 {
            lane.submit();
        }
    }
    load.until(lane, 0)?;
    load.moved = 0;
    let mut random = Random::new(u64::from(thread) + 1);
    let until = Instant::now() + Duration::from_secs(seconds);
    while !stop.load(Ordering::Relaxed) && Instant::now() < until {
        load.until(lane, (call_pages * (shape.calls - 1)) as usize)?;
        let mut left = call_pages;
        let writes = shape.ways == Ways::Write;
        while left > 0 {
            let is_run = shape.longest > 1 && random.below(4) == 0;
            let run = if is_run { 1 + random.below(shape.longest) } else { 1 }.min(left);
            let at = first + random.below(PART - run);
            let write = if shape.ways == Ways::Mixed { random.below(2) == 0 } else { writes };
            for number in at..at + run {
                load.queue(lane, number, write)?;
            }
            left -= run;
        }
        lane.submit();
    }
    load.until(lane, 0)?;
    Ok(load.moved)
}

struct Burning {
    page: Page,
    waiting: usize,
    moved: u64,
    result: Result<(), BenchError>,
}

impl Burning {
    fn queue(&mut self, lane: &mut dyn Lane, number: u32, write: bool) -> Result<(), BenchError> {
        loop {
            let progress = if write {
                stamp(&mut self.page, number, 1);
                lane.write(number, Slot(number), &self.page)
            } else {
                lane.read(number, Slot(number), &mut self.page)
            };
            match progress {
                Progress::Queued => {
                    self.waiting += 1;
                    return Ok(());
                }
                Progress::Full => {
                    lane.submit();
                    self.poll(lane)?;
                }
                Progress::Done(result) => {
                    self.moved += 1;
                    return result.map_err(BenchError::Fault);
                }
            }
        }
    }

    fn poll(&mut self, lane: &mut dyn Lane) -> Result<(), BenchError> {
        let Burning { waiting, moved, result, .. } = self;
        lane.poll(Instant::now(), &mut |done: Done<'_>| {
            *waiting -= 1;
            *moved += 1;
            let number = done.ticket;
            let right = done.page.is_none_or(|page| is_stamped(page, number, 1));
            let outcome = match done.result {
                Ok(()) if !right => Err(BenchError::Mismatch { number, generation: 1 }),
                other => other.map_err(BenchError::Fault),
            };
            if result.is_ok() {
                *result = outcome;
            }
        });
        std::mem::replace(&mut self.result, Ok(()))
    }

    /// Polls until no more than `most` operations are in flight.
    fn until(&mut self, lane: &mut dyn Lane, most: usize) -> Result<(), BenchError> {
        while self.waiting > most {
            self.poll(lane)?;
        }
        Ok(())
    }
}

impl std::str::FromStr for Shape {
    type Err = serde_json::Error;

    fn from_str(text: &str) -> Result<Self, Self::Err> {
        serde_json::from_str(text)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_shape_goes_to_its_process_and_back() {
        for shape in shapes(64) {
            let text = serde_json::to_string(&shape).unwrap();
            assert_eq!(text.parse::<Shape>().unwrap(), shape);
        }
    }

    #[test]
    fn a_thread_s_load_is_whole_over_a_store_that_answers() {
        let store = weir_store::open(&"host:64MiB".parse().unwrap()).unwrap();
        for shape in shapes(16) {
            let moved = burn_part(store.as_ref(), shape, 0, 0, &AtomicBool::new(false)).unwrap();
            assert_eq!(moved, 0, "no time was given, and nothing failed");
        }
    }

    #[test]
    fn a_process_that_dies_is_a_row_and_the_sweep_goes_on() {
        let store = match "vram:0".parse() {
            Ok(StoreUrl::Vram(url)) => url,
            other => panic!("{other:?}"),
        };
        let plan = Sweep { program: "/bin/false".into(), store, seconds: 0, copies: vec![64, 128] };
        let report = sweep(&plan).unwrap();
        assert_eq!(report.rows.len(), 20);
        assert!(report.rows.iter().filter(|row| row.metric == "died").all(|row| row.value == 1.0));
        assert!(!report.all_met(), "what is shipped died: reads of 64");
    }
}
