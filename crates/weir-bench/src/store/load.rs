//! Loads: one operation at a time; one operation after each pause; and as many operations as the
//! lane has room for. Each page is checked.

use super::BenchError;
use super::content::{Random, is_stamped, stamp};
use std::sync::Barrier;
use std::time::{Duration, Instant};
use weir_core::{PAGE_SIZE, Page, PageBytes, PageNo, Slot};
use weir_store::{Done, Fault, Progress, Ticket};

/// A lane that a load uses: of a store, or of a volume.
pub trait Pages: Send {
    /// Announces a batch; see [`weir_store::Lane::plan`].
    fn plan(&mut self, reads: usize, writes: usize);
    /// Queues a write; see [`weir_store::Lane::write`].
    fn write(&mut self, ticket: Ticket, number: u32, page: &PageBytes) -> Progress;
    /// Queues a read; see [`weir_store::Lane::read`].
    fn read(&mut self, ticket: Ticket, number: u32, page: &mut PageBytes) -> Progress;
    /// Starts the queued operations; see [`weir_store::Lane::submit`].
    fn submit(&mut self);
    /// Hands over finished operations; see [`weir_store::Lane::poll`].
    fn poll(&mut self, now: Instant, done: &mut dyn FnMut(Done<'_>));
}

impl Pages for Box<dyn weir_store::Lane> {
    fn plan(&mut self, reads: usize, writes: usize) {
        (**self).plan(reads, writes);
    }
    fn write(&mut self, ticket: Ticket, number: u32, page: &PageBytes) -> Progress {
        (**self).write(ticket, Slot(number), page)
    }
    fn read(&mut self, ticket: Ticket, number: u32, page: &mut PageBytes) -> Progress {
        (**self).read(ticket, Slot(number), page)
    }
    fn submit(&mut self) {
        (**self).submit();
    }
    fn poll(&mut self, now: Instant, done: &mut dyn FnMut(Done<'_>)) {
        (**self).poll(now, done);
    }
}

impl Pages for weir_volume::Lane {
    fn plan(&mut self, reads: usize, writes: usize) {
        weir_volume::Lane::plan(self, reads, writes);
    }
    fn write(&mut self, ticket: Ticket, number: u32, page: &PageBytes) -> Progress {
        loop {
            let progress = weir_volume::Lane::write(self, ticket, PageNo(number), page);
            if progress != Progress::Full || self.in_flight() > 0 {
                return progress;
            }
            // No slot is free, so the write must wait. Work on the lane's queue until a slot is
            // free.
            weir_volume::Lane::submit(self);
            weir_volume::Lane::poll(self, Instant::now(), &mut |_| {});
            std::hint::spin_loop();
        }
    }
    fn read(&mut self, ticket: Ticket, number: u32, page: &mut PageBytes) -> Progress {
        weir_volume::Lane::read(self, ticket, PageNo(number), page)
    }
    fn submit(&mut self) {
        weir_volume::Lane::submit(self);
    }
    fn poll(&mut self, now: Instant, done: &mut dyn FnMut(Done<'_>)) {
        weir_volume::Lane::poll(self, now, done);
    }
}

/// The kind of an operation.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Kind {
    /// The operation reads.
    Read,
    /// The operation writes.
    Write,
}

/// A thread's part of the pages. Only this thread writes them, so it knows each one's generation.
#[derive(Debug)]
pub struct Part {
    first: u32,
    generations: Vec<u32>,
    random: Random,
    page: Box<Page>,
}

impl Part {
    /// Makes the part with `count` pages from page `first` on, for one thread.
    pub fn new(first: u32, count: u32, seed: u64) -> Self {
        let generations = vec![0; count as usize];
        Part {
            first,
            generations,
            random: Random::new(seed ^ u64::from(first)),
            page: Box::new(Page([0x5a; PAGE_SIZE])),
        }
    }

    fn pick(&mut self) -> (u32, usize) {
        let index = self.random.below(self.generations.len() as u32);
        (self.first + index, index as usize)
    }

    /// Writes every page once, so that every later read has something to check.
    ///
    /// # Errors
    /// Fails when a write ends with a fault.
    pub fn fill(&mut self, lane: &mut impl Pages) -> Result<(), BenchError> {
        /// Number of pages that are written together. Every lane of the benchmark has room for so
        /// many.
        const BATCH: usize = 16;
        for start in (0..self.generations.len()).step_by(BATCH) {
            let end = (start + BATCH).min(self.generations.len());
            lane.plan(0, end - start);
            let mut waiting = 0;
            for index in start..end {
                let number = self.first + index as u32;
                self.generations[index] += 1;
                stamp(&mut self.page, number, self.generations[index]);
                match lane.write(0, number, &self.page) {
                    Progress::Done(result) => result.map_err(BenchError::Fault)?,
                    Progress::Queued => waiting += 1,
                    Progress::Full => return Err(BenchError::Fault(Fault::Full)),
                }
            }
            lane.submit();
            drain(lane, waiting)?;
        }
        Ok(())
    }

    /// Runs one operation, and checks the page that it reads. Returns the operation's time, without
    /// the time for stamping and checking the page.
    ///
    /// # Errors
    /// Fails on a fault, or on a page that is not what was written.
    pub fn once(&mut self, lane: &mut impl Pages, kind: Kind) -> Result<Duration, BenchError> {
        let (number, index) = self.pick();
        match kind {
            Kind::Write => {
                self.generations[index] += 1;
                stamp(&mut self.page, number, self.generations[index]);
                // Read the clock twice, and use the second time: the first reading after a pause
                // takes longer.
                let _ = Instant::now();
                let since = Instant::now();
                lane.plan(0, 1);
                let progress = lane.write(0, number, &self.page);
                lane.submit();
                match progress {
                    Progress::Done(result) => result.map_err(BenchError::Fault)?,
                    Progress::Queued => drain(lane, 1)?,
                    Progress::Full => return Err(BenchError::Fault(Fault::Full)),
                }
                Ok(since.elapsed())
            }
            Kind::Read => {
                let generation = self.generations[index];
                let _ = Instant::now();
                let since = Instant::now();
                lane.plan(1, 0);
                let progress = lane.read(0, number, &mut self.page);
                lane.submit();
                let (took, right) = match progress {
                    Progress::Done(result) => {
                        result.map_err(BenchError::Fault)?;
                        (since.elapsed(), is_stamped(&self.page, number, generation))
                    }
                    Progress::Queued => {
                        let mut outcome = None;
                        while outcome.is_none() {
                            lane.poll(Instant::now(), &mut |done: Done<'_>| {
                                let took = since.elapsed();
                                let right = done.page.map(|page| is_stamped(page, number, generation));
                                outcome = Some(done.result.map(|()| (took, right.unwrap_or(false))));
                            });
                        }
                        outcome.expect("just filled").map_err(BenchError::Fault)?
                    }
                    Progress::Full => return Err(BenchError::Fault(Fault::Full)),
                };
                if right { Ok(took) } else { Err(BenchError::Mismatch { number, generation }) }
            }
        }
    }

    /// Holds `depth` operations in flight until `time` is over; returns how many finished.
    ///
    /// Operations come in batches of a quarter of the depth, much as a server's thread gets several
    /// requests from its socket at once. `reads` in a hundred are reads. No page is in flight
    /// twice.
    ///
    /// # Errors
    /// Fails on a fault, or on a page that is not what was written.
    pub fn deep(
        &mut self,
        lane: &mut impl Pages,
        reads: u32,
        depth: usize,
        run: usize,
        time: Duration,
    ) -> Result<u64, BenchError> {
        let mut flying: Vec<Option<(u32, usize, bool)>> = vec![None; depth];
        let mut free: Vec<usize> = (0..depth).collect();
        let mut busy = vec![0u64; self.generations.len().div_ceil(64)];
        let (mut finished, mut wrong) = (0u64, None);
        let mut back = Box::new(Page::zeroed());
        let batch = (depth / 4).max(1).next_multiple_of(run).min(depth);
        let since = Instant::now();
        let mut stopping = false;
        while !stopping || free.len() < depth {
            stopping = stopping || since.elapsed() >= time;
            if !stopping && free.len() >= batch {
                let reading = self.random.below(100) < reads;
                // An operation of `run` neighbouring pages begins at a page whose number is a
                // multiple of `run`.
                let mut queued = 0;
                lane.plan(if reading { batch } else { 0 }, if reading { 0 } else { batch });
                while queued < batch {
                    let base = self.random.below((self.generations.len() / run) as u32) as usize * run;
                    if (base..base + run).any(|index| busy[index / 64] >> (index % 64) & 1 == 1) {
                        continue;
                    }
                    for index in base..base + run {
                        let number = self.first + index as u32;
                        let ticket = free.pop().expect("a batch has room");
                        let progress = if reading {
                            lane.read(ticket as Ticket, number, &mut back)
                        } else {
                            self.generations[index] += 1;
                            stamp(&mut self.page, number, self.generations[index]);
                            lane.write(ticket as Ticket, number, &self.page)
                        };
                        match progress {
                            Progress::Done(result) => {
                                result.map_err(BenchError::Fault)?;
                                if reading && !is_stamped(&back, number, self.generations[index]) {
                                    wrong = Some((number, self.generations[index]));
                                }
                                finished += 1;
                                free.push(ticket);
                            }
                            Progress::Queued => {
                                busy[index / 64] |= 1 << (index % 64);
                                flying[ticket] = Some((number, index, reading));
                            }
                            Progress::Full => return Err(BenchError::Fault(Fault::Full)),
                        }
                        queued += 1;
                    }
                }
                lane.submit();
            }
            let generations = &self.generations;
            let mut fault = None;
            lane.poll(Instant::now(), &mut |done: Done<'_>| {
                let ticket = done.ticket as usize;
                let Some((number, index, reading)) = flying[ticket].take() else { return };
                busy[index / 64] &= !(1 << (index % 64));
                free.push(ticket);
                finished += 1;
                match (done.result, done.page) {
                    (Err(it), _) => fault = Some(it),
                    (Ok(()), Some(page)) if !is_stamped(page, number, generations[index]) => {
                        wrong = Some((number, generations[index]));
                    }
                    (Ok(()), None) if reading => wrong = Some((number, generations[index])),
                    _ => {}
                }
            });
            if let Some(fault) = fault {
                return Err(BenchError::Fault(fault));
            }
            if let Some((number, generation)) = wrong {
                return Err(BenchError::Mismatch { number, generation });
            }
        }
        Ok(finished)
    }
}

fn drain(lane: &mut impl Pages, mut waiting: usize) -> Result<(), BenchError> {
    let mut result = Ok(());
    while waiting > 0 {
        lane.poll(Instant::now(), &mut |done: Done<'_>| {
            waiting -= 1;
            result = result.and(done.result);
        });
    }
    result.map_err(BenchError::Fault)
}

/// Runs `work` on `threads` threads at once. Each thread has a lane, and a part of the pages.
/// Returns the sum of the threads' results, divided by the time of the slowest thread.
///
/// # Errors
/// Fails with the first error of any thread.
pub fn together<L: Pages>(
    lanes: &mut [(L, Part)],
    work: impl Fn(&mut L, &mut Part) -> Result<u64, BenchError> + Sync,
) -> Result<f64, BenchError> {
    let start = Barrier::new(lanes.len());
    let results = std::thread::scope(|scope| {
        let threads: Vec<_> = lanes
            .iter_mut()
            .map(|(lane, part)| {
                let (start, work) = (&start, &work);
                scope.spawn(move || {
                    start.wait();
                    let since = Instant::now();
                    work(lane, part).map(|finished| (finished, since.elapsed()))
                })
            })
            .collect();
        threads
            .into_iter()
            .map(|it| it.join().unwrap_or(Err(BenchError::Panic)))
            .collect::<Result<Vec<_>, _>>()
    })?;
    let finished: u64 = results.iter().map(|&(finished, _)| finished).sum();
    let longest = results.iter().map(|&(_, took)| took).max().unwrap_or_default();
    Ok(finished as f64 / longest.as_secs_f64())
}
