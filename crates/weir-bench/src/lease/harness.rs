//! Drives a design as a server does: with many connections, each of which holds references all the
//! time.

use std::hint::black_box;
use std::sync::Barrier;
use std::time::Instant;

use weir_lease::{BATCH_TOKENS_MAX, Place, SharedCounts, Token};

use super::counters::{RegionCounters, SocketArrays};
use super::design::{Design, Nothing};
use super::kernel::KernelXArrays;
use super::table::Lease;
use super::xarray::XArrays;
use super::{DESIGN_BYTES_MAX, Plan};
use crate::report::Runs;
use crate::steps::Steps;

/// The load of one row.
#[derive(Clone, Copy, Debug)]
pub struct Workload {
    pub connections: u32,
    pub threads: u32,
    pub outstanding: u32,
    pub burst: u32,
    pub pages: u32,
    pub pairs: u64,
    pub seed: u64,
}

impl From<&Plan> for Workload {
    fn from(plan: &Plan) -> Self {
        Workload {
            connections: 1,
            threads: 1,
            outstanding: plan.outstanding,
            burst: plan.burst,
            pages: (plan.region / 4096) as u32,
            pairs: plan.pairs,
            seed: plan.seed,
        }
    }
}

impl Workload {
    /// Whether this is the load for which the goals are set.
    pub fn is_of_the_contract(&self) -> bool {
        self.outstanding == 64 && self.pages == (2 << 30) / 4096
    }

    /// Number of connections of thread `thread`.
    fn share(&self, thread: u32) -> u32 {
        self.connections / self.threads + u32::from(thread < self.connections % self.threads)
    }
}

/// A design's memory, and its time without that of the harness.
#[derive(Clone, Copy, Debug)]
pub struct Figure {
    /// Nanoseconds of one thread for one reference taken and returned.
    pub ns: f64,
    pub bytes: usize,
}

/// One row: every design, measured in the same rounds.
#[derive(Clone, Copy, Debug)]
pub struct Figures {
    /// Nanoseconds in which the design that does nothing takes and returns one reference.
    pub harness: f64,
    pub owned: Figure,
    pub shared: Figure,
    pub uncounted: Figure,
    pub xarray: Figure,
    pub kernel: Figure,
    pub region: Figure,
    /// The figure of the design with an array of counters for each connection. `None`: the arrays
    /// would take more memory than [`DESIGN_BYTES_MAX`].
    pub arrays: Option<Figure>,
}

/// One design under measurement: a part for each thread, and the tokens that its connections hold.
struct Bench<D> {
    parts: Vec<(D, Holdings)>,
    times: Runs,
}

impl<D: Design> Bench<D> {
    fn new(work: &Workload, parts: impl IntoIterator<Item = D>) -> Self {
        let parts = parts.into_iter().enumerate().map(|(thread, mut design)| {
            let mut holdings = Holdings::new(work, thread as u32);
            holdings.fill(&mut design);
            (design, holdings)
        });
        Bench { parts: parts.collect(), times: Runs::default() }
    }

    fn round(&mut self, work: &Workload) {
        let steps = work.pairs / u64::from(work.threads) / u64::from(work.burst);
        let barrier = Barrier::new(self.parts.len());
        let nanos: f64 = std::thread::scope(|scope| {
            let threads: Vec<_> = self
                .parts
                .iter_mut()
                .map(|(design, holdings)| {
                    scope.spawn(|| {
                        barrier.wait();
                        holdings.run(design, steps)
                    })
                })
                .collect();
            threads.into_iter().map(|thread| thread.join().expect("a measuring thread panicked")).sum()
        });
        let pairs = steps * u64::from(work.burst) * u64::from(work.threads);
        self.times.push(nanos / pairs as f64);
    }

    fn figure(&self, harness: f64) -> Figure {
        let own: usize = self.parts.iter().map(|(design, _)| design.bytes()).sum();
        let shared = self.parts.first().map_or(0, |(design, _)| design.shared_bytes());
        Figure { ns: self.times.median() - harness, bytes: own + shared }
    }
}

/// Measures every design, one after the other in each round, so that a slow change of the machine
/// affects all.
pub fn measure(work: &Workload, rounds: usize, with_arrays: bool, steps: &Steps) -> Figures {
    debug_assert!(!with_arrays || work.connections as u64 * u64::from(work.pages) * 4 <= DESIGN_BYTES_MAX);
    let shares = || (0..work.threads).map(|thread| work.share(thread));
    let counts = SharedCounts::new(&[work.pages]);

    let mut nothing = Bench::new(work, shares().map(|_| Nothing));
    let mut owned = Bench::new(work, shares().map(|n| Lease::owned(n, work.outstanding, work.pages)));
    let mut shared = Bench::new(work, shares().map(|n| Lease::shared(n, work.outstanding, counts.clone())));
    let mut uncounted = Bench::new(work, shares().map(|n| Lease::uncounted(n, work.outstanding)));
    let mut xarray = Bench::new(work, shares().map(XArrays::new));
    let mut kernel = Bench::new(work, KernelXArrays::parts(shares(), work.pages));
    let mut region = Bench::new(work, RegionCounters::parts(work.threads, work.pages));
    let mut arrays =
        with_arrays.then(|| Bench::new(work, shares().map(|n| SocketArrays::new(n, work.pages))));
    // The first round only fills caches and page tables.
    for round in 0..=rounds {
        if round == 1 {
            for times in [
                &mut nothing.times,
                &mut owned.times,
                &mut shared.times,
                &mut uncounted.times,
                &mut xarray.times,
                &mut kernel.times,
                &mut region.times,
            ] {
                *times = Runs::default();
            }
            if let Some(arrays) = &mut arrays {
                arrays.times = Runs::default();
            }
        }
        nothing.round(work);
        owned.round(work);
        shared.round(work);
        uncounted.round(work);
        xarray.round(work);
        kernel.round(work);
        region.round(work);
        if let Some(arrays) = &mut arrays {
            arrays.round(work);
        }
        steps.end();
    }
    let harness = nothing.times.median();
    Figures {
        harness,
        owned: owned.figure(harness),
        shared: shared.figure(harness),
        uncounted: uncounted.figure(harness),
        xarray: xarray.figure(harness),
        kernel: kernel.figure(harness),
        region: region.figure(harness),
        arrays: arrays.map(|arrays| arrays.figure(harness)),
    }
}

/// The tokens that one thread's connections hold. Each connection has a ring of `outstanding`
/// tokens; its entry in `heads` is the index of its oldest token.
struct Holdings {
    tokens: Vec<Token>,
    heads: Vec<u16>,
    outstanding: u32,
    burst: u32,
    pages: u32,
    random: u64,
    turn: u32,
}

impl Holdings {
    fn new(work: &Workload, thread: u32) -> Self {
        let connections = work.share(thread);
        // A connection's tokens are a ring, and each step replaces `burst` of them. Round down to
        // whole bursts, so that no step goes beyond the ring's end.
        let outstanding = work.outstanding - work.outstanding % work.burst;
        Holdings {
            tokens: vec![Token(0); (connections * outstanding) as usize],
            heads: vec![0; connections as usize],
            outstanding,
            burst: work.burst,
            pages: work.pages,
            random: (work.seed.wrapping_mul(0x9e37_79b9_7f4a_7c15) ^ (u64::from(thread) << 32)) | 1,
            turn: 0,
        }
    }

    /// A random number in 0..bound, by xorshift64* (Vigna, 2016).
    fn below(&mut self, bound: u32) -> u32 {
        self.random ^= self.random >> 12;
        self.random ^= self.random << 25;
        self.random ^= self.random >> 27;
        let high = self.random.wrapping_mul(0x2545_f491_4f6c_dd1d) >> 32;
        ((high * u64::from(bound)) >> 32) as u32
    }

    fn choose(&mut self, pages: &mut [Place]) {
        for page in pages {
            page.page = self.below(self.pages);
        }
    }

    fn fill(&mut self, design: &mut impl Design) {
        let mut pages = [Place::page(0, 0); BATCH_TOKENS_MAX];
        let pages = &mut pages[..self.burst as usize];
        for connection in 0..self.heads.len() {
            for first in (0..self.outstanding).step_by(self.burst as usize) {
                self.choose(pages);
                let at = connection * self.outstanding as usize + first as usize;
                design.take(connection as u32, pages, &mut self.tokens[at..at + pages.len()]);
            }
        }
    }

    /// Does `steps` steps: each returns the oldest tokens of a connection and takes as many new
    /// ones. Returns the nanoseconds of all steps together.
    fn run(&mut self, design: &mut impl Design, steps: u64) -> f64 {
        let mut pages = [Place::page(0, 0); BATCH_TOKENS_MAX];
        let pages = &mut pages[..self.burst as usize];
        let mut lasts = 0u64;
        let start = Instant::now();
        for _ in 0..steps {
            self.turn += 1;
            if self.turn == self.heads.len() as u32 {
                self.turn = 0;
            }
            let connection = self.turn;
            self.choose(pages);
            let head = &mut self.heads[connection as usize];
            let at = (connection * self.outstanding + u32::from(*head)) as usize;
            *head += self.burst as u16;
            if u32::from(*head) == self.outstanding {
                *head = 0;
            }
            let tokens = &mut self.tokens[at..at + pages.len()];
            lasts += u64::from(design.give(connection, tokens));
            design.take(connection, pages, tokens);
        }
        let elapsed = start.elapsed();
        black_box(lasts);
        elapsed.as_nanos() as f64
    }
}
