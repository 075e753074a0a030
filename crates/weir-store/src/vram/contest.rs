//! Tries out which path is fastest for the writes of many threads.
//!
//! The cost of a path that many threads use is hard to measure in advance. A window may be full,
//! reads may use the same link, or another thread may hold a driver's lock. So while several lanes
//! write, each path that the measured costs do not rule out gets a few milliseconds now and then.
//! The path that moved the most pages stays in use. The contest is a pure function of the watching
//! thread's figures, so that tests can run it on a simulated machine.

use super::table::Path;
use std::time::Duration;

/// Time from a change of path to its measurement: operations queued on the earlier path finish
/// meanwhile.
const SETTLE: Duration = Duration::from_millis(2);
/// Time for which a path is measured.
const MEASURE: Duration = Duration::from_millis(4);
/// Time for which the path that won stays in use. Each time that the same path wins again, the time
/// doubles, up to a limit.
const HOLD: Duration = Duration::from_secs(1);
const HOLD_MAX: Duration = Duration::from_secs(16);
/// A path must be faster than the last winner by this factor to replace it.
const MARGIN: f64 = 1.05;

/// The contest of the paths under one kind of load.
#[derive(Clone, Debug, Default)]
pub struct Contest {
    best: Option<Path>,
    held_for: Duration,
    hold: Duration,
    trial: Option<Trial>,
}

#[derive(Clone, Debug)]
struct Trial {
    contenders: Vec<Path>,
    /// The index of the path under measurement.
    at: usize,
    settled: Duration,
    measured: Duration,
    pages: u64,
    /// Pages a second on each path that was measured.
    rates: Vec<f64>,
}

impl Contest {
    /// Returns the path to use until the next look, after `pages` were moved in `elapsed`.
    /// `contenders` begins with the path that has the lowest measured cost. `None`: there is no
    /// contender.
    pub fn step(&mut self, elapsed: Duration, pages: u64, contenders: &[Path]) -> Option<Path> {
        if contenders.len() < 2 {
            self.pause();
            return contenders.first().copied();
        }
        if self.best.is_some_and(|best| !contenders.contains(&best)) {
            self.best = None;
        }
        match &mut self.trial {
            Some(trial) if same(&trial.contenders, contenders) => {
                if let Some(rates) = trial.step(elapsed, pages) {
                    let best = winner(&trial.contenders, &rates, self.best);
                    let again = self.best == Some(best);
                    self.hold = if again { (self.hold * 2).min(HOLD_MAX) } else { HOLD };
                    self.best = Some(best);
                    (self.trial, self.held_for) = (None, Duration::ZERO);
                }
            }
            Some(_) => self.trial = None,
            None => {
                self.held_for += elapsed;
                if self.best.is_none() || self.held_for >= self.hold {
                    self.trial = Some(Trial::new(contenders));
                }
            }
        }
        let tried = self.trial.as_ref().map(|trial| trial.contenders[trial.at]);
        tried.or(self.best).or(contenders.first().copied())
    }

    /// Notes that the load has ended. Drops the measurement under way, and keeps earlier results.
    pub fn pause(&mut self) {
        self.trial = None;
    }

    /// The path that won last.
    #[cfg(test)]
    fn best(&self) -> Option<Path> {
        self.best
    }
}

impl Trial {
    fn new(contenders: &[Path]) -> Self {
        Trial {
            contenders: contenders.to_vec(),
            at: 0,
            settled: Duration::ZERO,
            measured: Duration::ZERO,
            pages: 0,
            rates: Vec::new(),
        }
    }

    /// Counts the pages moved; returns all rates once every contender had its time.
    fn step(&mut self, elapsed: Duration, pages: u64) -> Option<Vec<f64>> {
        if self.settled < SETTLE {
            self.settled += elapsed;
            return None;
        }
        self.measured += elapsed;
        self.pages += pages;
        if self.measured < MEASURE {
            return None;
        }
        self.rates.push(self.pages as f64 / self.measured.as_secs_f64());
        (self.settled, self.measured, self.pages) = (Duration::ZERO, Duration::ZERO, 0);
        self.at += 1;
        if self.at < self.contenders.len() {
            return None;
        }
        self.at = 0;
        Some(std::mem::take(&mut self.rates))
    }
}

/// Whether both lists have the same paths, in any order: the order of costs changes as lanes come
/// and go.
fn same(a: &[Path], b: &[Path]) -> bool {
    a.len() == b.len() && a.iter().all(|path| b.contains(path))
}

/// Returns the fastest path. The last winner, or the first path if none has won yet, only loses to
/// a path that is faster by [`MARGIN`].
fn winner(contenders: &[Path], rates: &[f64], before: Option<Path>) -> Path {
    let favourite = before.unwrap_or(contenders[0]);
    let handicapped = |(path, rate): &(Path, f64)| if *path == favourite { rate * MARGIN } else { *rate };
    let all = contenders.iter().copied().zip(rates.iter().copied());
    all.max_by(|a, b| handicapped(a).total_cmp(&handicapped(b))).map_or(favourite, |(path, _)| path)
}

#[cfg(test)]
mod tests {
    use super::*;
    use Path::{Engine, Mapped, Ring};
    use proptest::prelude::*;

    const TICK: Duration = Duration::from_millis(1);

    /// Simulates a machine whose paths move `rates` pages a second, for `ticks`; returns the winner
    /// and the number of pages moved.
    fn run(contest: &mut Contest, contenders: &[Path], rates: [f64; 3], ticks: u32) -> (Option<Path>, f64) {
        let (mut path, mut moved) = (contenders[0], 0.0);
        for _ in 0..ticks {
            let pages = rates[path as usize] * TICK.as_secs_f64();
            moved += pages;
            path = contest.step(TICK, pages as u64, contenders).expect("there is a way");
        }
        (contest.best(), moved)
    }

    #[test]
    fn a_full_window_loses_to_the_ring_whatever_the_costs_foretold() {
        // On an H200 the window took 4.3 million pages a second and the ring 12 million, while the
        // measured costs favoured the window.
        let mut contest = Contest::default();
        let (best, moved) = run(&mut contest, &[Mapped, Ring], [4.3e6, 0.0, 12e6], 2000);
        assert_eq!(best, Some(Ring));
        assert!(moved > 0.98 * 12e6 * 2.0, "trials cost {}", 1.0 - moved / 24e6);
    }

    #[test]
    fn equals_stay_with_what_the_costs_favour() {
        let mut contest = Contest::default();
        assert_eq!(run(&mut contest, &[Engine, Ring], [0.0, 50e6, 51e6], 3000).0, Some(Engine));
    }

    #[test]
    fn costs_that_change_places_do_not_end_a_trial() {
        let mut contest = Contest::default();
        let (mut path, rates) = (Mapped, [34e6, 38e6, 50e6]);
        for tick in 0..100 {
            let contenders = if tick % 2 == 0 { [Engine, Ring, Mapped] } else { [Mapped, Engine, Ring] };
            path = contest.step(TICK, (rates[path as usize] * 1e-3) as u64, &contenders).expect("a way");
        }
        assert_eq!((contest.best(), path), (Some(Ring), Ring));
    }

    #[test]
    fn a_way_that_is_gone_is_not_taken() {
        let mut contest = Contest::default();
        run(&mut contest, &[Mapped, Ring], [1e6, 0.0, 9e6], 100);
        assert_eq!(contest.step(TICK, 1, &[Mapped]), Some(Mapped));
        assert_eq!(contest.step(TICK, 1, &[Mapped, Engine]), Some(Mapped));
        assert_eq!(contest.step(TICK, 1, &[]), None);
    }

    proptest! {
        #[test]
        fn the_best_is_found_and_found_again_when_it_changes(
            first in prop::array::uniform3(1e5f64..2e7), second in prop::array::uniform3(1e5f64..2e7),
        ) {
            let mut contest = Contest::default();
            for rates in [first, second] {
                let (best, _) = run(&mut contest, &[Mapped, Engine, Ring], rates, 2500);
                let most = rates.into_iter().fold(0.0, f64::max);
                let got = rates[best.expect("it was tried") as usize];
                prop_assert!(got * 1.06 >= most, "{best:?} of {rates:?}");
            }
        }
    }
}
