//! A simulator: a whole volume on stores that lie, lose, delay and die, compared with a model of
//! every page's content.
//!
//! One thread plays all lanes, so a seed is a history: the settings of the volume, the stores and
//! their faults, and every step. A read returns either the last content acknowledged when it began,
//! or an error. Each error is one that a store injected, and each injected error is seen once.
//! After each history no slot is lost and all counts agree.
//!
//! `cargo test -p weir-volume --test simulator` plays the seeds in `seeds.txt` and 300 others.
//! `WEIR_SIMULATOR_SEEDS=1000` plays that many, and `WEIR_SIMULATOR_SEED=17` plays one. A failure
//! names its seed: add it to `seeds.txt`.
//!
//! `tests/torture simulator` plays 100,000 histories of 10,000 events each, in parts of 1,000.
//! Their seeds are the same each time. `WEIR_SIMULATOR_PART=7` plays one part, and
//! `WEIR_SIMULATOR_EVENTS=10000` any seed for so long.

mod chance;
mod history;
mod model;

use chance::Chance;
use history::{History, Tally};
use std::time::{Instant, SystemTime, UNIX_EPOCH};

/// The full scale: parts, the histories of each, and the events of each history.
const PARTS: u64 = 100;
const PART: u64 = 1000;
const EVENTS: u64 = 10_000;

/// Seeds that once found a bug, or that are known to reach a rare case.
const KEPT: &str = include_str!("seeds.txt");

fn kept() -> impl Iterator<Item = u64> {
    KEPT.lines()
        .filter_map(|line| line.split('#').next()?.split_whitespace().next())
        .map(|seed| seed.parse().expect("a seed on each line of seeds.txt"))
}

fn number(name: &str) -> Option<u64> {
    let text = std::env::var(name).ok()?;
    Some(text.parse().unwrap_or_else(|_| panic!("{name}={text} is no number")))
}

/// The number of histories begun. It is named if one fails, for `tests/mutants`.
struct Begun {
    histories: u64,
    /// Each history has so many events at least.
    least: u64,
}

impl Begun {
    fn play(&mut self, seed: u64) -> Tally {
        self.histories += 1;
        History::play(seed, self.least)
    }
}

impl Drop for Begun {
    fn drop(&mut self) {
        if std::thread::panicking() {
            eprintln!("history {} failed", self.histories);
        }
    }
}

/// The seeds of a part of the full scale, the same each time.
fn part(number: u64) -> impl Iterator<Item = u64> {
    (number * PART..(number + 1) * PART).map(|number| Chance::new(number).bits())
}

#[test]
fn every_acknowledged_page_is_read_back_or_an_error_and_every_error_was_injected() {
    let full = std::env::var_os("WEIR_SCALE").is_some_and(|scale| scale == "full");
    let one_part = number("WEIR_SIMULATOR_PART");
    let is_long = full || one_part.is_some();
    let least = number("WEIR_SIMULATOR_EVENTS").unwrap_or(if is_long { EVENTS } else { 0 });
    if let Some(seed) = number("WEIR_SIMULATOR_SEED") {
        println!("{:#?}", History::play(seed, least));
        return;
    }
    let started = Instant::now();
    let (mut total, mut begun) = (Tally::default(), Begun { histories: 0, least });
    if is_long {
        for number in one_part.map_or(0..PARTS, |part| part..part + 1) {
            part(number).for_each(|seed| total.add(&begun.play(seed)));
            println!("{} histories, {} events, {:.0?}", begun.histories, total.count(), started.elapsed());
        }
    } else {
        begun.least = 0;
        kept().for_each(|seed| total.add(&begun.play(seed)));
        begun.least = least;
        // A simulator without events would prove nothing: the seeds in the file alone must have
        // every kind of event.
        for (what, times) in total.events() {
            assert!(times > 0, "none of the kept histories has {what}");
        }
        // The seeds are new each time, so that one run may find what another misses. A failing seed
        // is named.
        let now = SystemTime::now().duration_since(UNIX_EPOCH).expect("a clock past 1970");
        let mut fresh = Chance::new(now.as_nanos() as u64);
        for _ in 0..number("WEIR_SIMULATOR_SEEDS").unwrap_or(300) {
            total.add(&begun.play(fresh.bits()));
        }
    }
    println!("{} histories in {:.1?}: {total:#?}", begun.histories, started.elapsed());
    println!("figure: simulator histories {} higher", begun.histories);
    println!("figure: simulator events {} higher", total.count());
    for (what, times) in total.events() {
        println!("figure: events {} {times} higher 1", what.replace(' ', "_"));
    }
    println!("figure: simulator wrong_pages 0 lower 0");
}

#[test]
fn a_seed_is_a_history() {
    for seed in kept().chain(0..20) {
        assert_eq!(History::play(seed, 0), History::play(seed, 0), "seed {seed} went another way");
    }
}
