//! Rounds of many jobs from one producer and from several: nanoseconds for each item, and how often
//! the worker slept.

use std::sync::{Arc, Barrier};
use std::thread;

use super::batch::{self, BatchQueue};
use super::channels::{self, ChannelQueue, Crossbeam, Flume, Kanal, Std};
use super::design::{Design, Port};
use super::jobs::{TALLY, nanos};
use super::semaphore::{self, SemaphoreQueue};
use super::weir::{self, Embedded, Values};
use super::{Options, QueueError};
use crate::report::Runs;
use crate::steps::Steps;

/// The figures of one design. Each figure has one value a round.
#[derive(Default)]
pub(super) struct Rounds {
    pub(super) ns: Runs,
    /// Number of the worker's sleeps for each thousand items.
    pub(super) wakes: Runs,
    /// Number of items that the worker takes at once, on average, for designs that count it.
    pub(super) batch: Runs,
}

/// The figures of every design, all with the same number of producers.
#[derive(Default)]
pub(super) struct Figures(Vec<(&'static str, Rounds)>);

impl Figures {
    /// The figures of the design called `name`.
    pub(super) fn of(&self, name: &str) -> &Rounds {
        &self.0.iter().find(|(own, _)| *own == name).expect("every design has run").1
    }

    /// The designs other than Weir's.
    pub(super) fn controls(&self) -> impl Iterator<Item = (&'static str, &Rounds)> {
        let ours = [weir::EMBEDDED, weir::VALUES];
        self.0.iter().filter(move |(name, _)| !ours.contains(name)).map(|(name, rounds)| (*name, rounds))
    }

    fn add(&mut self, name: &'static str, round: &Round) {
        let at = self.0.iter().position(|(own, _)| *own == name).unwrap_or_else(|| {
            self.0.push((name, Rounds::default()));
            self.0.len() - 1
        });
        let rounds = &mut self.0[at].1;
        rounds.ns.push(round.ns_per_item);
        rounds.wakes.push(round.wakes_per_1000);
        if let Some(batch) = round.items_per_batch {
            rounds.batch.push(batch);
        }
    }
}

struct Round {
    ns_per_item: f64,
    wakes_per_1000: f64,
    items_per_batch: Option<f64>,
}

/// Number of designs.
const DESIGNS: usize = 8;

/// Number of runs that [`measure`] makes.
pub(super) fn runs(options: &Options) -> usize {
    (options.rounds + 1) * 2 * DESIGNS
}

/// Runs every round of every design: with one producer first, then with several.
pub(super) fn measure(options: &Options, bar: &Steps) -> Result<[Figures; 2], QueueError> {
    let most = options.single.max(options.multi);
    let steps = kept::<Embedded>(most);
    let items = kept::<SemaphoreQueue>(most);
    let none = kept::<Values>(most);
    let mut all = [Figures::default(), Figures::default()];
    // Round 0 only warms up memory and clocks. Its figures do not count.
    for number in 0..=options.rounds {
        for (figures, (jobs, producers)) in
            all.iter_mut().zip([(options.single, 1), (options.multi, options.producers)])
        {
            bar.part(format_args!("{producers} producers"));
            let rounds: [_; DESIGNS] = [
                (weir::EMBEDDED, round::<Embedded>(&steps[..jobs], producers, bar)?),
                (semaphore::NAME, round::<SemaphoreQueue>(&items[..jobs], producers, bar)?),
                (batch::NAME, round::<BatchQueue>(&items[..jobs], producers, bar)?),
                (weir::VALUES, round::<Values>(&none[..jobs], producers, bar)?),
                (channels::CROSSBEAM, round::<ChannelQueue<Crossbeam>>(&none[..jobs], producers, bar)?),
                (channels::FLUME, round::<ChannelQueue<Flume>>(&none[..jobs], producers, bar)?),
                (channels::STD, round::<ChannelQueue<Std>>(&none[..jobs], producers, bar)?),
                (channels::KANAL, round::<ChannelQueue<Kanal>>(&none[..jobs], producers, bar)?),
            ];
            for (name, round) in rounds.iter().filter(|_| number > 0) {
                figures.add(name, round);
            }
        }
    }
    Ok(all)
}

/// Makes jobs that live as long as the process.
fn kept<D: Design>(jobs: usize) -> &'static [D::Job] {
    Box::leak((0..jobs).map(|_| D::job()).collect())
}

/// One round: `producers` threads schedule their shares of `jobs` as fast as they can.
fn round<D: Design>(jobs: &'static [D::Job], producers: usize, bar: &Steps) -> Result<Round, QueueError> {
    let queue = D::start()?;
    TALLY.expect(jobs.len() as u64);
    let start = Arc::new(Barrier::new(producers));
    let threads: Vec<_> = (0..producers)
        .map(|number| {
            let share = &jobs[number * jobs.len() / producers..(number + 1) * jobs.len() / producers];
            let (mut port, start) = (queue.port(share), Arc::clone(&start));
            thread::spawn(move || {
                start.wait();
                let begun = nanos();
                for index in 0..share.len() {
                    port.schedule(index, 0);
                }
                begun
            })
        })
        .collect();
    TALLY.wait();
    // The time counts from the first producer's start to the last job's end. The producers and the
    // worker read the clock, because this thread may run late at both moments.
    let begun = threads.into_iter().map(|thread| thread.join().expect("a producer does not panic")).min();
    let ns = begun.map_or(0, |begun| TALLY.finished() - begun) as f64;
    let wakes = TALLY.sleeps() as f64;
    let items = jobs.len() as f64;
    let items_per_batch = queue.finish();
    bar.end();
    Ok(Round { ns_per_item: ns / items, wakes_per_1000: wakes * 1000.0 / items, items_per_batch })
}
