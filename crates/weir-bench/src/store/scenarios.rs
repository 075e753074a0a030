//! The rows: each measurement, its control, and its goal (SPECIFICATION.md).

use super::control::{BareCopy, CopyEngine};
use super::load::{Kind, Pages, Part, together};
use super::{BenchError, Plan, coherence, give_back};
use crate::report::{Goal, Report, Row, Runs, percentile};
use crate::steps::Steps;
use std::sync::Arc;
use std::time::{Duration, Instant};
use weir_store::vram::table::Path;
use weir_store::vram::{Gpu, VramStore};
use weir_store::{Store, StoreUrl};

/// Number of pages that single operations and deep loads use: 4 GiB, so that no cache of the card
/// (60 MB) helps.
const PAGES: u32 = 1 << 20;
/// Number of pages in a large operation: 1 MiB.
const LARGE: usize = 256;
/// Time between sporadic operations.
const PAUSE: Duration = Duration::from_millis(20);

/// The coherence row has a goal only if each pair of paths runs for at least this many seconds.
const FULL_COHERENCE: u64 = 5;

/// A row of single operations: its id and kind, the pause between two, their number, and its goals
/// for the median and for the 99th percentile.
type Single = (&'static str, Kind, Option<Duration>, usize, Option<f64>, Option<f64>);

const SINGLE: [Single; 4] = [
    ("qd1_write", Kind::Write, None, 50_000, Some(0.5), None),
    ("qd1_read", Kind::Read, None, 50_000, Some(3.3), None),
    ("sporadic_write", Kind::Write, Some(PAUSE), 200, Some(0.8), None),
    ("sporadic_read", Kind::Read, Some(PAUSE), 200, Some(6.1), Some(12.0)),
];
/// The rows that are measured with all threads at once: their ids, the reads in a hundred
/// operations, and their goals.
const DEEP: [(&str, u32, Option<f64>); 3] =
    [("deep_read", 100, Some(12.0)), ("deep_write", 0, Some(12.0)), ("deep_mixed", 70, Some(10.0))];
const LARGE_ROWS: [(&str, u32, Kind); 2] = [("large_read", 100, Kind::Read), ("large_write", 0, Kind::Write)];
/// The rows of the store under a volume.
const VOLUME: [&str; 4] = ["volume_write", "volume_read", "volume_deep_read", "volume_deep_write"];

/// A thread's lane and its part of the pages.
type Worker = (Box<dyn weir_store::Lane>, Part);

/// The state that the rows share.
struct Bench<'a> {
    plan: &'a Plan,
    store: Arc<dyn Store>,
    control: Option<CopyEngine>,
    /// The first card, if the store is on one.
    gpu: Option<Arc<Gpu>>,
    report: Report,
    pages: u32,
    steps: Steps,
}

/// The figures of all runs, of the store and of its control.
#[derive(Default)]
struct Pair {
    ours: Runs,
    control: Runs,
}

pub fn run(plan: &Plan) -> Result<Report, BenchError> {
    let vram = match &plan.url {
        StoreUrl::Vram(url) => Some(Arc::new(VramStore::open(url)?)),
        _ => None,
    };
    let store: Arc<dyn Store> = match &vram {
        Some(vram) => Arc::clone(vram) as Arc<dyn Store>,
        None => weir_store::open(&plan.url)?,
    };
    for gpu in vram.iter().flat_map(|vram| vram.gpus()) {
        eprintln!("{}", gpu.describe());
    }
    let control = vram.as_ref().and_then(|_| CopyEngine::open(1 << 30));
    let pages = PAGES.min(store.slots());
    let gpu = vram.as_ref().map(|vram| Arc::clone(&vram.gpus()[0]));
    let report = Report::new("store", plan.runs);
    let mut bench = Bench { plan, store, control, gpu, report, pages, steps: Steps::new(0) };
    bench.steps = Steps::new(bench.runs(vram.iter().flat_map(|vram| vram.gpus())));
    bench.single()?;
    bench.deep()?;
    bench.scaling()?;
    bench.large()?;
    bench.volume()?;
    bench.give_back()?;
    for gpu in vram.iter().flat_map(|vram| vram.gpus()) {
        bench.coherence(gpu)?;
        bench.power(gpu)?;
    }
    Ok(bench.report)
}

/// The median and the 99th percentile of `nanoseconds`, converted to microseconds.
pub(super) fn middle_and_tail(mut nanoseconds: Vec<u64>) -> (f64, f64) {
    (percentile(&mut nanoseconds, 50.0) as f64 / 1e3, percentile(&mut nanoseconds, 99.0) as f64 / 1e3)
}

impl Bench<'_> {
    fn wanted(&self, id: &str) -> bool {
        self.plan.is_wanted(id)
    }

    /// Number of runs of all rows together. The store is on the cards `gpus`.
    fn runs<'a>(&self, gpus: impl Iterator<Item = &'a Arc<Gpu>>) -> usize {
        let single = SINGLE.iter().filter(|(id, ..)| self.wanted(id)).count();
        let deep = DEEP.iter().filter(|(id, ..)| self.wanted(id)).count();
        let large = LARGE_ROWS.iter().filter(|(id, ..)| self.wanted(id)).count();
        let volume = if self.wants_volume() { VOLUME.len() } else { 0 };
        let give_back = self.given_back().map_or(0, |_| self.plan.efforts.len());
        let each = single + deep + self.scalings().len() + large + volume + give_back;
        let power = if self.wanted("power") { 2 } else { 0 };
        each * self.plan.runs + gpus.map(|gpu| self.paths(gpu).len() + power).sum::<usize>()
    }

    fn scaled(&self, full: Duration) -> Duration {
        if self.plan.short { full / 50 } else { full }
    }

    fn push(&mut self, row: Row, pair: &Pair, goal: Option<Goal>) {
        let row = match &self.control {
            Some(_) if !pair.control.is_empty() => row.beside("copy-engine", pair.control.median()),
            _ => row,
        };
        let row = match goal {
            Some(goal) => row.goal(goal),
            None => row,
        };
        let control = row.control_value.map(|value| format!("  control {value:>10.3}")).unwrap_or_default();
        self.steps.say(format_args!("{:<22} {:<8} {:>10.3}{control}", row.id, row.metric, row.value));
        self.report.rows.push(row);
    }

    /// Runs `count` operations of `kind` with `pause` between them; returns their times.
    fn times(
        &self,
        lane: &mut impl Pages,
        part: &mut Part,
        kind: Kind,
        count: usize,
        pause: Option<Duration>,
    ) -> Result<Vec<u64>, BenchError> {
        let mut times = Vec::with_capacity(count);
        if pause.is_none() {
            // First run operations without pause, long enough for the store to have chosen its
            // path.
            let since = Instant::now();
            while since.elapsed() < Duration::from_millis(100) {
                part.once(lane, kind)?;
            }
        }
        for _ in 0..count {
            if let Some(pause) = pause {
                std::thread::sleep(pause);
            }
            times.push(part.once(lane, kind)?.as_nanos() as u64);
        }
        Ok(times)
    }

    fn control_times(
        &self,
        kind: Kind,
        count: usize,
        pause: Option<Duration>,
    ) -> Result<Vec<u64>, BenchError> {
        let Some(control) = &self.control else { return Ok(Vec::new()) };
        let mut copier = control.copier(4096, 1)?;
        (0..100).try_for_each(|_| copier.once(kind).map(drop))?;
        (0..count)
            .map(|_| {
                if let Some(pause) = pause {
                    std::thread::sleep(pause);
                }
                Ok(copier.once(kind)?.as_nanos() as u64)
            })
            .collect()
    }

    /// The median microseconds of the mapped copy alone, with the same pauses as between the
    /// store's operations. What an operation takes beyond that is the store's own work.
    fn bare_times(&self, kind: Kind, count: usize, pause: Option<Duration>) -> Option<f64> {
        let mut copy = BareCopy::open(self.gpu.as_ref()?, self.pages)?;
        (0..100).for_each(|_| _ = copy.once(kind));
        let once = |_| {
            pause.into_iter().for_each(std::thread::sleep);
            copy.once(kind).as_nanos() as u64
        };
        Some(middle_and_tail((0..count).map(once).collect()).0)
    }

    /// Measures single operations, without pause and with pauses.
    fn single(&mut self) -> Result<(), BenchError> {
        for (id, kind, pause, count, goal, tail_goal) in SINGLE {
            if !self.wanted(id) {
                continue;
            }
            self.steps.part(id);
            let count = if self.plan.short { count / 100 + 2 } else { count };
            let (mut middle, mut tail) = (Pair::default(), Pair::default());
            let mut bare = Runs::default();
            for run in 0..self.plan.runs {
                let mut lane = self.store.lane(self.plan.depth)?;
                let mut part = Part::new(0, self.pages, run as u64);
                part.fill(&mut lane)?;
                let (p50, p99) = middle_and_tail(self.times(&mut lane, &mut part, kind, count, pause)?);
                middle.ours.push(p50);
                tail.ours.push(p99);
                drop(lane);
                let control = self.control_times(kind, count, pause)?;
                if !control.is_empty() {
                    let (p50, p99) = middle_and_tail(control);
                    middle.control.push(p50);
                    tail.control.push(p99);
                }
                self.bare_times(kind, count, pause).into_iter().for_each(|p50| bare.push(p50));
                self.steps.end();
            }
            if !bare.is_empty() {
                self.push(Row::lower(format!("{id}_bare"), "p50_us", bare.median()), &Pair::default(), None);
            }
            self.push(Row::lower(id, "p50_us", middle.ours.median()), &middle, goal.map(Goal::Value));
            self.push(Row::lower(id, "p99_us", tail.ours.median()), &tail, tail_goal.map(Goal::Value));
        }
        Ok(())
    }

    /// Gives every thread a lane and a part of the pages, and writes all pages once.
    fn workers(&self, threads: usize, depth: usize) -> Result<Vec<Worker>, BenchError> {
        let each = self.pages / threads as u32;
        let mut workers = (0..threads)
            .map(|at| Ok((self.store.lane(depth)?, Part::new(at as u32 * each, each, 7))))
            .collect::<Result<Vec<_>, BenchError>>()?;
        together(&mut workers, |lane, part| part.fill(lane).map(|()| 0))?;
        Ok(workers)
    }

    /// Prints which paths pages have taken since `before`, so that a wrong choice is seen.
    fn say_ways(&self, id: &str, before: [u64; 3]) {
        let Some(gpu) = &self.gpu else { return };
        let moved = std::array::from_fn::<_, 3, _>(|way| gpu.counters().pages[way] - before[way]);
        let all = moved.iter().sum::<u64>().max(1);
        let [mapped, engine, ring] = moved.map(|pages| 100.0 * pages as f64 / all as f64);
        self.steps
            .say(format_args!("{id:<22} went {mapped:.1}% mapped, {engine:.1}% engine, {ring:.1}% ring"));
    }

    fn moved(&self) -> [u64; 3] {
        self.gpu.as_ref().map_or([0; 3], |gpu| gpu.counters().pages)
    }

    /// Measures all threads, each with as many operations in flight as it has room for.
    fn deep(&mut self) -> Result<(), BenchError> {
        for (id, reads, goal) in DEEP {
            if !self.wanted(id) {
                continue;
            }
            let pair = self.crowd(id, reads, self.plan.threads, Duration::from_secs(1))?;
            self.push(Row::higher(id, "m_pages_s", pair.ours.median()), &pair, goal.map(Goal::Value));
        }
        Ok(())
    }

    /// Measures deep reads and writes with 1, 2, 4, ... threads, up to as many as the deep rows
    /// have.
    fn scaling(&mut self) -> Result<(), BenchError> {
        for (id, threads, reads) in self.scalings() {
            let pair = self.crowd(&id, reads, threads, Duration::from_millis(400))?;
            self.push(Row::higher(&id, "m_pages_s", pair.ours.median()), &pair, None);
        }
        Ok(())
    }

    /// The wanted rows with more and more threads: their ids, the threads, and the reads in a
    /// hundred operations.
    fn scalings(&self) -> Vec<(String, usize, u32)> {
        let most = self.plan.threads;
        let doubled = std::iter::successors(Some(1), |threads| Some(threads * 2)).take_while(|&it| it < most);
        let rows = doubled.chain([most]).flat_map(|threads| {
            [("read", 100), ("write", 0)]
                .map(|(kind, reads)| (format!("threads_{threads}_{kind}"), threads, reads))
        });
        rows.filter(|(id, ..)| self.wanted(id)).collect()
    }

    /// For each run, the millions of pages that `threads` threads move in a second. Of a hundred
    /// operations, `reads` are reads.
    fn crowd(&self, id: &str, reads: u32, threads: usize, time: Duration) -> Result<Pair, BenchError> {
        let (depth, time) = (self.plan.depth, self.scaled(time));
        let mut pair = Pair::default();
        self.steps.part(id);
        for _ in 0..self.plan.runs {
            let mut workers = self.workers(threads, depth)?;
            let warm = self.scaled(Duration::from_millis(300));
            together(&mut workers, |lane, part| part.deep(lane, reads, depth, 1, warm))?;
            let before = self.moved();
            let rate = together(&mut workers, |lane, part| part.deep(lane, reads, depth, 1, time))?;
            self.say_ways(id, before);
            pair.ours.push(rate / 1e6);
            drop(workers);
            if let Some(control) = &self.control {
                let kind = if reads > 50 { Kind::Read } else { Kind::Write };
                pair.control.push(control.rate(kind, threads, 4096, time / 2)? / 1e6);
            }
            self.steps.end();
        }
        Ok(pair)
    }

    /// Measures operations on 1 MiB of neighbouring pages.
    fn large(&mut self) -> Result<(), BenchError> {
        for (id, reads, kind) in LARGE_ROWS {
            if !self.wanted(id) {
                continue;
            }
            self.steps.part(id);
            let threads = self.plan.threads;
            let mut pair = Pair::default();
            for _ in 0..self.plan.runs {
                let mut workers = self.workers(threads, 4 * LARGE)?;
                let warm = self.scaled(Duration::from_millis(200));
                let time = self.scaled(Duration::from_secs(1));
                let run = |workers: &mut Vec<_>, time| {
                    together(workers, |lane: &mut Box<dyn weir_store::Lane>, part: &mut Part| {
                        part.deep(lane, reads, 4 * LARGE, LARGE, time)
                    })
                };
                run(&mut workers, warm)?;
                let before = self.moved();
                pair.ours.push(run(&mut workers, time)? * 4096.0 / 1e9);
                self.say_ways(id, before);
                drop(workers);
                if let Some(control) = &self.control {
                    pair.control
                        .push(control.rate(kind, threads, 1 << 20, time / 2)? * f64::from(1 << 20) / 1e9);
                }
                self.steps.end();
            }
            self.push(Row::higher(id, "gb_s", pair.ours.median()), &pair, Some(Goal::Value(50.0)));
        }
        Ok(())
    }

    fn wants_volume(&self) -> bool {
        VOLUME.iter().any(|id| self.wanted(id))
    }

    /// Measures the same store under a volume, which adds page map, records and checksums.
    fn volume(&mut self) -> Result<(), BenchError> {
        if !self.wants_volume() {
            return Ok(());
        }
        let threads = self.plan.threads;
        let config =
            weir_volume::Config { pages: self.pages / 2, lanes: threads + 1, depth: self.plan.depth };
        let volume = weir_volume::Volume::create(config, vec![Arc::clone(&self.store)])
            .map_err(|error| BenchError::Volume(error.to_string()))?;
        let count = if self.plan.short { 500 } else { 50_000 };
        for (id, kind, goal) in [("volume_write", Kind::Write, 0.75), ("volume_read", Kind::Read, 3.7)] {
            let (mut middle, mut tail) = (Pair::default(), Pair::default());
            self.steps.part(id);
            for run in 0..self.plan.runs {
                let mut lane = volume.lane()?;
                let mut part = Part::new(0, volume.pages(), run as u64);
                part.fill(&mut lane)?;
                let (p50, p99) = middle_and_tail(self.times(&mut lane, &mut part, kind, count, None)?);
                middle.ours.push(p50);
                tail.ours.push(p99);
                self.steps.end();
            }
            self.push(Row::lower(id, "p50_us", middle.ours.median()), &middle, Some(Goal::Value(goal)));
            self.push(Row::lower(id, "p99_us", tail.ours.median()), &tail, None);
        }
        for (id, reads, own) in
            [("volume_deep_read", 100, "deep_read"), ("volume_deep_write", 0, "deep_write")]
        {
            let mut ours = Runs::default();
            self.steps.part(id);
            for _ in 0..self.plan.runs {
                let each = volume.pages() / threads as u32;
                let mut workers = (0..threads)
                    .map(|at| Ok((volume.lane()?, Part::new(at as u32 * each, each, 9))))
                    .collect::<Result<Vec<_>, BenchError>>()?;
                together(&mut workers, |lane, part| part.fill(lane).map(|()| 0))?;
                let depth = self.plan.depth;
                for time in [self.scaled(Duration::from_millis(300)), self.scaled(Duration::from_secs(1))] {
                    let rate = together(&mut workers, |lane, part| part.deep(lane, reads, depth, 1, time))?;
                    if time > self.scaled(Duration::from_millis(300)) {
                        ours.push(rate / 1e6);
                    }
                }
                self.steps.end();
            }
            let mut row = Row::higher(id, "m_pages_s", ours.median());
            if let Some(store) = self.report.rows.iter().find(|row| row.id == own) {
                row = row.beside("store", store.value).goal(Goal::Ratio(0.75));
            }
            self.steps.say(format_args!(
                "{:<22} {:<8} {:>10.3}  ratio {:?}",
                row.id, row.metric, row.value, row.ratio
            ));
            self.report.rows.push(row);
        }
        Ok(())
    }

    /// Number of chunks that are given back; `None` if that row is not wanted, or the store has no
    /// room for it.
    fn given_back(&self) -> Option<u32> {
        let slots = self.store.reclaim().filter(|_| self.wanted("give_back"))?.chunk_slots();
        let sweep = self.plan.efforts.len() > 1;
        let chunks = ((if sweep { 4u64 } else { 16 } << 30) / (u64::from(slots) * 4096)) as u32;
        let used = (1u32 << 18).div_ceil(slots);
        (self.store.slots() / slots >= used + chunks).then_some(chunks)
    }

    /// Measures give-back: 16 GiB of chunks are read and released, while four threads use other
    /// chunks. If the plan compares several efforts, only 4 GiB are given back with each.
    fn give_back(&mut self) -> Result<(), BenchError> {
        let Some(chunks) = self.given_back() else { return Ok(()) };
        let sweep = self.plan.efforts.len() > 1;
        self.steps.part("give_back");
        for &effort in &self.plan.efforts {
            let (mut rate, mut tail, mut quiet) = (Runs::default(), Runs::default(), Runs::default());
            let mut release = Runs::default();
            for _ in 0..self.plan.runs {
                let outcome = give_back::measure(&self.store, chunks, effort)?;
                rate.push(outcome.rate / 1e9);
                tail.push(outcome.busy_p99);
                quiet.push(outcome.quiet_p99);
                release.push(outcome.release_ms);
                self.steps.end();
            }
            let id = if sweep { format!("give_back_{effort}") } else { "give_back".to_owned() };
            let (p99, before, ms) = (tail.median(), quiet.median(), release.median());
            self.steps.say(format_args!(
                "{id:<22} {:.2} GB/s, p99 {p99:.2} us, {before:.2} before, release {ms:.2} ms",
                rate.median()
            ));
            let rows = [
                Row::higher(&id, "gb_s", rate.median()).goal(Goal::Value(8.0)),
                Row::lower(&id, "user_p99_us", p99).beside("before", before).goal(Goal::Ratio(4.0)),
            ];
            self.report.rows.extend(rows);
        }
        Ok(())
    }

    /// The paths of a card between which coherence is checked: the writes' and the reads'.
    fn paths(&self, gpu: &Gpu) -> Vec<(Path, Path)> {
        let all = Path::ALL.into_iter().flat_map(|writes| Path::ALL.map(|reads| (writes, reads)));
        let are_there = |(writes, reads): &(Path, Path)| {
            self.wanted("coherence") && writes != reads && gpu.has(*writes) && gpu.has(*reads)
        };
        all.filter(are_there).collect()
    }

    /// Checks pages that are written by one path and read by another.
    fn coherence(&mut self, gpu: &Arc<Gpu>) -> Result<(), BenchError> {
        let time = self.scaled(Duration::from_secs(self.plan.coherence_seconds));
        let pairs = (self.plan.threads / 2).max(1) as u32;
        let mut total = 0;
        for (writes, reads) in self.paths(gpu) {
            let what = format!("coherence {} to {}", writes.name(), reads.name());
            self.steps.part(&what);
            let checked = coherence::check(gpu, writes, reads, pairs, time)?;
            self.steps.say(format_args!("{what}: {checked} pages"));
            self.steps.end();
            total += checked;
        }
        if total > 0 {
            // Every page was compared; a stale page ends the run with an error instead of a row.
            let row = Row::higher("coherence", "pages_none_stale", total as f64);
            let full = self.plan.coherence_seconds >= FULL_COHERENCE && !self.plan.short;
            self.report.rows.push(if full { row.goal(Goal::Value(1e8)) } else { row });
        }
        Ok(())
    }

    /// Measures the card's power with the store open, and again while the kernel of the path `ring`
    /// is on the card and idle.
    fn power(&mut self, gpu: &Arc<Gpu>) -> Result<(), BenchError> {
        if !self.wanted("power") {
            return Ok(());
        }
        let mut sample = |id: &str, held: bool| {
            self.steps.part(id);
            let since = Instant::now();
            let mut watts = Runs::default();
            while since.elapsed() < Duration::from_secs(3) {
                if held {
                    gpu.enter_ring();
                }
                std::thread::sleep(Duration::from_millis(2));
                let power = gpu.counters().power_mw.filter(|_| since.elapsed() > Duration::from_secs(1));
                power.into_iter().for_each(|power| watts.push(f64::from(power) / 1e3));
            }
            if !watts.is_empty() {
                self.report.rows.push(Row::lower(id, "watts", watts.median()));
            }
            self.steps.end();
        };
        sample("power_open", false);
        // After some idle milliseconds the kernel of the path `ring` leaves the card. Start it
        // again each time.
        let _lane = gpu.lane(16)?;
        sample("power_ring_idle", true);
        Ok(())
    }
}
