//! The cost of cleaning: pages written to the disks for each page written to the log. One thread
//! writes, so the figures are the same each time.

use std::sync::Arc;
use std::time::Instant;
use weir_core::{PAGE_SIZE, Slot};
use weir_log::{Cleaner, Config, Log, Next};
use weir_store::{Host, Progress, Store};

/// A random number generator: SplitMix64.
struct Chance(u64);

impl Chance {
    fn next(&mut self) -> u64 {
        self.0 = self.0.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let mut z = self.0;
        z = (z ^ (z >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        z = (z ^ (z >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        z ^ (z >> 31)
    }

    fn unit(&mut self) -> f64 {
        (self.next() >> 11) as f64 / (1u64 << 53) as f64
    }
}

/// Draws numbers below `count` by Zipf's law with exponent `theta` (Gray et al., *Quickly
/// generating billion-record synthetic databases*, SIGMOD 1994), scattered.
struct Zipf {
    count: u64,
    theta: f64,
    zeta: f64,
    eta: f64,
}

impl Zipf {
    fn new(count: u32, theta: f64) -> Self {
        let zeta = (1..=count).map(|n| f64::from(n).powf(-theta)).sum::<f64>();
        let two = 1.0 + 0.5f64.powf(theta);
        let eta = (1.0 - (2.0 / f64::from(count)).powf(1.0 - theta)) / (1.0 - two / zeta);
        Zipf { count: count.into(), theta, zeta, eta }
    }

    fn next(&self, chance: &mut Chance) -> u32 {
        let u = chance.unit();
        let uz = u * self.zeta;
        let rank = if uz < 1.0 {
            0
        } else if uz < 1.0 + 0.5f64.powf(self.theta) {
            1
        } else {
            (self.count as f64 * (self.eta * u - self.eta + 1.0).powf(1.0 / (1.0 - self.theta))) as u64
        };
        // A multiplication by an odd number that has no factor in common with most counts scatters
        // the ranks.
        (rank * 2_654_435_761 % self.count) as u32
    }
}

/// Fills `full` of a log's store and then writes as much again three times. Returns the
/// amplification of the last time.
fn amplification(segments: u32, segment_pages: u32, full: f64, zipf: bool) -> f64 {
    let below = segments * segment_pages;
    let pages = (f64::from(below) * full) as u32;
    let config = Config { pages, segment_pages, lanes: 1, ..Config::default() };
    let log = Log::create(Arc::new(Host::new(below).unwrap()), config).unwrap();
    let mut lane = log.lane(4).unwrap();
    let mut cleaner = Cleaner::open(&log).unwrap();
    let (mut chance, law) = (Chance(1), zipf.then(|| Zipf::new(pages, 0.99)));
    let now = Instant::now();
    let mut write = |page: u32| {
        while lane.write(0, Slot(page), &[1; PAGE_SIZE]) != Progress::Done(Ok(())) {
            lane.poll(now, &mut |done| panic!("{done:?}"));
            while cleaner.step(now) != Next::Work {}
        }
        // The cleaner runs as its own thread would, before a writer waits.
        if page.is_multiple_of(8) {
            cleaner.step(now);
        }
    };
    (0..pages).for_each(&mut write);
    let mut before = log.status();
    for round in 0..4 {
        for _ in 0..pages {
            write(match &law {
                Some(law) => law.next(&mut chance),
                None => (chance.next() % u64::from(pages)) as u32,
            });
        }
        if round == 2 {
            before = log.status();
        }
    }
    let after = log.status();
    let written = after.written - before.written;
    let all = written + after.moved - before.moved + after.summaries - before.summaries;
    all as f64 / written as f64
}

#[test]
fn cleaning_costs_what_is_stated() {
    let bounds = [(0.5, false, 1.4), (0.8, false, 3.2), (0.5, true, 1.5), (0.8, true, 2.5)];
    for (full, zipf, most) in bounds {
        let found = amplification(2048, 32, full, zipf);
        println!("{full} full, Zipf {zipf}: {found:.3}");
        assert!(found <= most, "{full} full, Zipf {zipf}: {found}");
    }
}
