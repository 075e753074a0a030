//! Measures how long an item waits from its scheduling to its run. Items come alone, while the
//! worker is asleep, and in bursts, as a driver's interrupts come. The last items of a burst wait
//! longest. Pull request 1050 of NVIDIA's open-gpu-kernel-modules calls their wait "frame pacing".

use std::thread;
use std::time::Duration;

use super::QueueError;
use super::batch::{self, BatchQueue};
use super::channels::{self, ChannelQueue, Crossbeam, Flume, Kanal, Std};
use super::design::{Design, Port};
use super::jobs::{TALLY, nanos};
use super::semaphore::{self, SemaphoreQueue};
use super::weir::{self, Embedded, Spinning, Values};
use crate::report::{Report, Row, percentile};
use crate::steps::Steps;

/// A rhythm: how many items are scheduled at once, and at which times.
struct Rhythm {
    id: &'static str,
    items: usize,
    gap: Duration,
    bursts: usize,
}

/// The rhythms in which items come: one item each half millisecond, and 64 items each millisecond.
const RHYTHMS: [Rhythm; 2] = [
    Rhythm { id: "sporadic", items: 1, gap: Duration::from_micros(500), bursts: 1000 },
    Rhythm { id: "burst64", items: 64, gap: Duration::from_millis(1), bursts: 500 },
];

/// The latencies of every design in one rhythm of items. Weir's design is the first.
pub(super) struct Latencies {
    id: &'static str,
    designs: Vec<(&'static str, [f64; 2])>,
}

impl Latencies {
    /// Adds the rows: Weir's queue beside every other, then Weir's queue with a worker that spins.
    pub(super) fn rows(&self, report: &mut Report) {
        for (at, metric) in ["p50_us", "p99_us"].into_iter().enumerate() {
            let (_, ours) = self.designs[0];
            for (name, control) in &self.designs[1..] {
                report.rows.push(Row::lower(self.id, metric, ours[at]).beside(*name, control[at]));
            }
        }
    }
}

/// Number of designs.
const DESIGNS: usize = 9;
/// Number of runs that [`measure`] makes.
pub(super) const RUNS: usize = RHYTHMS.len() * DESIGNS;

/// Measures the latencies of every design: with items that come alone, and with bursts of items.
pub(super) fn measure(bar: &Steps) -> Result<Vec<Latencies>, QueueError> {
    RHYTHMS
        .iter()
        .map(|rhythm| {
            bar.part(rhythm.id);
            let designs: [_; DESIGNS] = [
                (weir::EMBEDDED, latency::<Embedded>(rhythm, bar)?),
                (weir::SPINNING, latency::<Spinning>(rhythm, bar)?),
                (weir::VALUES, latency::<Values>(rhythm, bar)?),
                (semaphore::NAME, latency::<SemaphoreQueue>(rhythm, bar)?),
                (batch::NAME, latency::<BatchQueue>(rhythm, bar)?),
                (channels::CROSSBEAM, latency::<ChannelQueue<Crossbeam>>(rhythm, bar)?),
                (channels::FLUME, latency::<ChannelQueue<Flume>>(rhythm, bar)?),
                (channels::STD, latency::<ChannelQueue<Std>>(rhythm, bar)?),
                (channels::KANAL, latency::<ChannelQueue<Kanal>>(rhythm, bar)?),
            ];
            Ok(Latencies { id: rhythm.id, designs: designs.into() })
        })
        .collect()
}

/// Measures one design; returns its p50 and p99 in microseconds.
fn latency<D: Design>(rhythm: &Rhythm, bar: &Steps) -> Result<[f64; 2], QueueError> {
    let jobs: &'static [D::Job] = Box::leak((0..rhythm.items).map(|_| D::job()).collect());
    let queue = D::start()?;
    let mut port = queue.port(jobs);
    for _ in 0..rhythm.bursts {
        TALLY.expect(rhythm.items as u64);
        for index in 0..rhythm.items {
            port.schedule(index, nanos());
        }
        TALLY.wait();
        thread::sleep(rhythm.gap);
    }
    drop(port);
    queue.finish();
    bar.end();
    let mut latencies = TALLY.latencies();
    Ok([50.0, 99.0].map(|percent| percentile(&mut latencies, percent) as f64 / 1000.0))
}
