//! A test of the pager with a simulated kernel, program and store. A seed determines each history.
//!
//! Only [`Work`] is real, with its tables, its policy and its decisions. The program's threads run
//! whenever the pager asks the kernel for something, so they run between any two steps of the
//! pager. A page must have the content that the program wrote there last. After a failed read of
//! the store, an access to the page may get SIGBUS, but never zeros or older content. No thread
//! waits for ever. In some histories the store is the one over the share transport, and its daemons
//! die.
//!
//! `WEIR_SIMULATOR_SEEDS=1000` plays that number of seeds, and `WEIR_SIMULATOR_SEED=7` only that
//! one. `WEIR_SIMULATOR_PAGE=70000` prints each event of one page. `WEIR_SCALE=full` plays 100,000
//! seeds, and `WEIR_SIMULATOR_PART=7` the eighth thousand of them. `tests/torture pager` plays all
//! parts.

mod daemon;
mod machine;
mod program;
mod random;
mod store;
mod world;

use super::helpers::Helpers;
use super::work::Work;
use super::{BELLS, Bells, Scope, Shared};
use crate::kernel::Waker;
use crate::{BLOCK_PAGES, Store, Tell};
use daemon::{Deaths, Mortal};
pub(super) use machine::Machine;
use program::{Program, Traits};
use random::{Random, number};
use std::io;
use std::sync::atomic::{AtomicU32, AtomicU64, Ordering};
use std::sync::{Arc, Mutex};
use std::time::Duration;
pub(super) use store::Simulated;
use store::{Faults, Said};
use weir_core::PageBytes;
pub(super) use world::{Area, Entry, address, page_of};
use world::{OWN, World};

/// One of the two kinds of simulated stores.
enum Either {
    Store(Simulated),
    Run(Mortal),
}

impl Either {
    fn said(&self) -> Arc<Mutex<Said>> {
        match self {
            Either::Store(store) => Arc::clone(&store.said),
            Either::Run(store) => Arc::clone(&store.said),
        }
    }

    fn store(&mut self) -> &mut dyn Store {
        match self {
            Either::Store(store) => store,
            Either::Run(store) => store,
        }
    }
}

impl Store for Either {
    fn claim(&mut self) -> Option<u64> {
        self.store().claim()
    }

    fn release(&mut self, first: u64) {
        self.store().release(first);
    }

    fn write(&mut self, first: u64, pages: &[PageBytes]) -> io::Result<()> {
        self.store().write(first, pages)
    }

    fn settle(&mut self) -> io::Result<()> {
        self.store().settle()
    }

    fn read(&mut self, first: u64, out: &mut [PageBytes]) -> io::Result<()> {
        self.store().read(first, out)
    }

    fn read_ahead(&mut self, first: u64, out: &mut [PageBytes]) -> io::Result<()> {
        self.store().read_ahead(first, out)
    }
}

/// Plays a history. Returns the number of its page faults.
fn play(seed: u64) -> u64 {
    let mut random = Random::new(seed.wrapping_mul(0x5851_f42d_4c95_7f2d));
    let changes = [0, 400, 60, 25][random.below(4) as usize];
    let limit = 6 + random.below(10) as usize;
    let is_adopted = random.one_in(2);
    let faults = Faults {
        rooms: if random.one_in(6) { 10 } else { 120 },
        refused: if random.one_in(6) { 3_000 } else { 0 },
        doomed: if random.one_in(4) { 3_000 } else { 0 },
        unreadable: if random.one_in(6) { 3_000 } else { 0 },
        dead_after: random.one_in(12).then(|| random.below(4_000)),
    };
    let limits = random.one_in(3);
    let deaths = random.one_in(3).then(|| Deaths {
        one_in: [0, 1_500, 6_000, 40_000][random.below(4) as usize],
        stalls: [0, 3_000][random.below(2) as usize],
        last: random.one_in(3).then(|| 1 + random.below(12)),
    });
    let is_immortal = deaths.is_none_or(|deaths| deaths.last.is_none());
    let may_lose = faults.unreadable > 0 || faults.dead_after.is_some() || !is_immortal;
    let is_sound = faults.rooms > 100 && faults.refused == 0 && faults.doomed == 0 && is_immortal;
    let traits = Traits {
        threads: 1 + random.below(4) as usize,
        accesses: 2_000 + random.below(12_000) as usize,
        limit,
        changes,
        maps: changes > 0 && random.one_in(2),
        churning: if changes > 0 { random.below(3) as usize } else { 0 },
        migrates: random.one_in(2),
        drops_lazily: random.one_in(2),
        limits,
        evicts: random.one_in(3),
        is_adopted,
        unmaps_at_the_end: random.one_in(2),
        keeps_limit: changes == 0 && !limits && is_adopted && is_sound,
    };
    if number("WEIR_SIMULATOR_SEED").is_some() {
        println!("{traits:?} {faults:?} {deaths:?}");
    }
    let (merges, migrates) = (random.one_in(2), if traits.migrates { 2_000 } else { 0 });
    let store = Random::new(random.next());
    let store = match deaths {
        None => Either::Store(Simulated::new(store, faults)),
        Some(deaths) => Either::Run(Mortal::new(store, faults, deaths)),
    };
    let said = store.said();
    let mut helpers = alone();
    if let Either::Run(store) = &store {
        let lanes = [0, 1, 3, 7][random.below(4) as usize];
        helpers.played.closed.extend((0..lanes).map(|_| Box::new(store.lane()) as Box<dyn Store>));
        store.begin_deaths();
    }
    let shared = Arc::new(Shared::new(limit, bells()));
    let pager = Arc::clone(&shared);
    shared.lends.store(random.one_in(4), Ordering::Relaxed);
    let mut world = World::new(Random::new(random.next()), merges, migrates);
    world.short = [0, 5_000][random.below(2) as usize];
    world.map(OWN, OWN + BELLS);
    let program = Program::new(&mut random, traits, Arc::clone(&shared), said);
    let machine = Machine { world, program };
    let scope = if is_adopted { Scope::Adopted } else { Scope::Process };
    let mut work =
        match Work::new(machine, store, helpers, Box::new(|_: &str| {}) as Tell, scope, None, shared) {
            Ok(work) => work,
            Err(error) => panic!("{error}"),
        };
    work.kernel_mut().program.has_begun = true;
    work.run();
    let Machine { world, program } = work.kernel_mut();
    program.check_end(world);
    let is_movable = traits.drops_lazily || work.have_ended();
    assert!(is_movable, "a block waits for the end of pages that are gone");
    let lost = pager.counters.lost.load(Ordering::Relaxed);
    assert!(lost == 0 || may_lose, "{lost} pages are lost, and every store answers in the end");
    pager.counters.faults.load(Ordering::Relaxed)
}

fn bells() -> Bells {
    Bells { base: address(OWN), next: AtomicU32::new(0) }
}

/// No helpers, so that the pager's thread does everything.
fn alone() -> Helpers {
    Helpers::start(Vec::new(), Duration::ZERO, Waker::new().unwrap()).expect("there are random numbers")
}

/// Makes a machine on which no thread runs, a store, and the state that a pager shares with other
/// threads. Also returns the number of a page at which a block can begin.
pub(super) fn at_rest() -> (Machine, Simulated, Arc<Shared>, usize) {
    let mut random = Random::new(1);
    let faults = Faults { rooms: 4, refused: 0, doomed: 0, unreadable: 0, dead_after: None };
    let traits = Traits {
        threads: 1,
        accesses: 1,
        limit: 6,
        changes: 0,
        maps: false,
        churning: 0,
        migrates: false,
        drops_lazily: false,
        limits: false,
        evicts: false,
        is_adopted: true,
        unmaps_at_the_end: false,
        keeps_limit: false,
    };
    let store = Simulated::new(Random::new(2), faults);
    let said = Arc::clone(&store.said);
    let shared = Arc::new(Shared::new(6, bells()));
    let mut world = World::new(Random::new(3), false, 0);
    world.map(OWN, OWN + BELLS);
    let mut program = Program::new(&mut random, traits, Arc::clone(&shared), said);
    program.rest();
    (Machine { world, program }, store, shared, (OWN + BELLS).next_multiple_of(BLOCK_PAGES))
}

/// Makes a pager's [`Work`] on a machine on which no thread runs ([`at_rest`]). Also returns the
/// number of a page at which a block can begin.
pub(super) fn work_at_rest() -> (Work<Machine, Simulated>, usize) {
    let (machine, store, shared, first) = at_rest();
    match Work::new(machine, store, alone(), Box::new(|_: &str| {}), Scope::Adopted, None, shared) {
        Ok(work) => (work, first),
        Err(error) => panic!("{error}"),
    }
}

#[test]
fn each_page_is_what_was_written_last_whatever_program_kernel_and_store_do() {
    let full = std::env::var_os("WEIR_SCALE").is_some_and(|scale| scale == "full");
    let seeds = match (number("WEIR_SIMULATOR_SEED"), number("WEIR_SIMULATOR_PART")) {
        (Some(seed), _) => seed..seed + 1,
        (None, Some(part)) => part * 1_000..(part + 1) * 1_000,
        (None, None) => 0..number("WEIR_SIMULATOR_SEEDS").unwrap_or(if full { 100_000 } else { 200 }),
    };
    let (histories, faults) = (seeds.end - seeds.start, AtomicU64::new(0));
    let seeds = Mutex::new(seeds);
    let processors = std::thread::available_parallelism().map_or(1, usize::from);
    std::thread::scope(|scope| {
        for _ in 0..processors {
            scope.spawn(|| {
                loop {
                    let Some(seed) = seeds.lock().expect("nothing panics under it").next() else { return };
                    let played = std::panic::catch_unwind(|| play(seed));
                    let Ok(its) = played else {
                        *seeds.lock().expect("nothing panics under it") = 0..0;
                        panic!("seed {seed} failed: WEIR_SIMULATOR_SEED={seed} plays it again")
                    };
                    faults.fetch_add(its, Ordering::Relaxed);
                }
            });
        }
    });
    println!("figure: pager histories {histories}");
    println!("figure: pager page_faults {} higher", faults.into_inner());
}
