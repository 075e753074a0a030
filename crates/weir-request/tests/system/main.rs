//! The simulator of the whole system: clients with a kernel's habits over the request engine, a
//! volume with its movers, and stores that stall, fail, lie and die, on one clock.
//!
//! One thread plays all of them, so a seed is a history. Others also act in the middle of a call:
//! within a claim, where a page of a read has come, and around each operation of a store. The
//! daemon may die at any of these places. The next one has the page map, the records and the
//! memory that was not given back, as from a keeper.
//!
//! - A client leaves a connection after 5 s, or sooner. It sends what has no answer on another
//!   connection, before anything new, and again after a death. The first client has one write of a
//!   page under way. Others write over each other, and send a write's bytes in pieces, or not all.
//! - A read gives a write that no later one has replaced for certain. A write has an effect only
//!   until its client has the answer, or its servers have given it up.
//! - A request fails only where a store has failed, and never for want of a slot. Each request is
//!   answered in time, and no step of an actor lasts until others have acted.
//!
//! `WEIR_SIMULATOR_SEED=17` plays one seed, `WEIR_SIMULATOR_SEEDS=1000` so many from 0 on, and
//! `WEIR_SIMULATOR_EVENTS=10000` gives each history so many events. `tests/torture system` plays
//! parts of 1,000 histories of 10,000 events: `WEIR_SIMULATOR_PART=7` plays one of them. A history
//! that fails is cut to the numbers that make it fail, and printed as a test. The simulator needs
//! debug assertions, by which the volume lets others run within a claim.
#![cfg(debug_assertions)]

mod books;
mod disk;
mod draws;
mod world;

use draws::{Draws, shrink};
use std::any::Any;
use std::panic::{catch_unwind, resume_unwind, set_hook, take_hook};
use world::{FAILED, Tally, World};

/// The events of a history.
const EVENTS: u64 = 3000;
/// The histories of a part of the full scale, and the events of each.
const PART: u64 = 1000;
const FULL: u64 = 10_000;

fn number(name: &str) -> Option<u64> {
    std::env::var(name).ok().map(|text| text.parse().expect("a number"))
}

/// The beginning of a failure's text.
fn text(failure: &(dyn Any + Send)) -> String {
    let text = failure.downcast_ref::<String>().cloned();
    let text = text.or_else(|| failure.downcast_ref::<&str>().map(|text| (*text).to_owned()));
    text.unwrap_or_default().chars().take_while(|char| !char.is_numeric()).take(40).collect()
}

/// Plays a seed. A history that fails is cut to one that fails in the same way, and printed.
fn play(seed: u64, events: u64) -> Tally {
    let failure = match catch_unwind(|| World::play(Draws::of_seed(seed), events)) {
        Ok(tally) => return tally,
        Err(failure) => failure,
    };
    eprintln!("seed {seed} failed: history {} failed", seed + 1);
    if number("WEIR_SIMULATOR_SHRINK") != Some(0) {
        let said = take_hook();
        set_hook(Box::new(|_| {}));
        let cut = shrink(FAILED.take(), |lists| {
            let played = catch_unwind(|| World::play(Draws::of(lists.clone()), u64::MAX));
            played.is_err_and(|other| text(&*other) == text(&*failure))
        });
        set_hook(said);
        let lists: Vec<String> = cut.iter().map(|list| format!("vec!{list:?}")).collect();
        let lists = lists.join(", ");
        eprintln!("#[test]\nfn seed_{seed}() {{\n    World::play(Draws::of(vec![{lists}]), u64::MAX);\n}}");
        World::play(Draws::of(cut), u64::MAX);
    }
    resume_unwind(failure)
}

#[test]
fn no_page_is_older_than_what_was_acknowledged_and_every_request_is_answered() {
    let part = number("WEIR_SIMULATOR_PART");
    let events = number("WEIR_SIMULATOR_EVENTS").unwrap_or(if part.is_some() { FULL } else { EVENTS });
    if let Some(seed) = number("WEIR_SIMULATOR_SEED") {
        println!("{:#?}", play(seed, events));
        return;
    }
    let first = part.map_or(0, |part| part * PART);
    let seeds = number("WEIR_SIMULATOR_SEEDS").unwrap_or(if part.is_some() { PART } else { 100 });
    let mut total = Tally::default();
    (first..first + seeds).for_each(|seed| total.add(&play(seed, events)));
    println!("figure: system histories {seeds} higher");
    println!("{total:#?}");
    for (what, times) in total.events() {
        println!("figure: system {what} {times} higher 1");
        assert!(times > 0, "the histories have none of the {what}");
    }
}

#[test]
fn a_seed_is_one_history() {
    for seed in 0..5 {
        let play = || World::play(Draws::of_seed(seed), EVENTS);
        assert_eq!(play(), play(), "seed {seed} went another way");
    }
}
