//! A model of the ring: an exhaustive search of every interleaving of one lane, the controller and
//! the kernel.
//!
//! The model is as small as it can be. The ring has two slots. Sequence numbers are modulo 8 and
//! begin just before their wrap. What the lane stores waits in a buffer and reaches memory at any
//! time (x86's total store order). A later load of the lane may come before that, which is the
//! reason for the controller's `membarrier`. Ghost variables are numbers that never wrap: they tell
//! apart operations with the same sequence number.
//!
//! A search through all states checks two claims. First, when the kernel has left, it has served
//! every operation that the lane added, so no wake-up is lost. Second, the kernel serves every
//! operation once and in order, so no harm comes from numbers that wrap. Two control tests each
//! leave out a rule on which a claim rests. In these tests the search must find a failure.

use std::collections::{HashSet, VecDeque};

const DEPTH: u8 = 2;
const OPERATIONS: u8 = 5;
/// Number of store instructions that wait in the lane's buffer at most, as in a processor's store
/// buffer: those of two operations.
const BUFFER: usize = 5;

#[derive(Clone, Copy)]
struct Rules {
    /// Whether the controller runs `membarrier` between its store instruction and its load.
    membarrier: bool,
    /// The modulus of sequence numbers.
    modulus: u8,
}

const REAL: Rules = Rules { membarrier: true, modulus: 8 };

#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
enum Store {
    Adding(bool),
    /// The lane writes a descriptor with this number into its slot.
    Descriptor(u8),
    Added(u8),
}

#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
enum LaneAt {
    Start,
    Look,
    Write,
    Close,
}

#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
enum Controller {
    Absent,
    Resident,
    Barrier,
    Waiting,
    Stopping,
}

#[derive(Clone, PartialEq, Eq, Hash, Debug)]
struct World {
    // The lane's step, and its store instructions that have not reached memory yet. The numbers of
    // operations that it queued and got back are ghost variables.
    lane: LaneAt,
    buffer: VecDeque<Store>,
    queued: u8,
    finished: u8,
    // The memory that lane, controller and kernel share.
    adding: bool,
    added: u8,
    leaving_or_absent: bool,
    slots: [u8; DEPTH as usize],
    done: [u8; DEPTH as usize],
    stop: bool,
    // The controller's step, and the next operation that the kernel serves; `None` while no kernel
    // runs.
    controller: Controller,
    kernel: Option<u8>,
    /// The number of operations served: a ghost variable, which the real ring does not have.
    served: u8,
}

/// The sequence number of an operation. The first operation has the last number but one, so that
/// the numbers wrap soon.
fn number(operation: u8, rules: Rules) -> u8 {
    (operation + 6) % rules.modulus
}

fn slot(operation: u8) -> usize {
    usize::from(operation % DEPTH)
}

impl World {
    fn new(rules: Rules) -> Self {
        // At first, each slot has the number of an earlier operation, which counts as done. So the
        // kernel finds nothing new there.
        let past = |operation: u8| (operation + 6 + 2 * rules.modulus - DEPTH) % rules.modulus;
        World {
            lane: LaneAt::Start,
            buffer: VecDeque::new(),
            queued: 0,
            finished: 0,
            adding: false,
            added: 0,
            leaving_or_absent: true,
            slots: [past(0), past(1)],
            done: [past(0), past(1)],
            stop: false,
            controller: Controller::Absent,
            kernel: None,
            served: 0,
        }
    }

    fn drain_one(&mut self, rules: Rules) {
        match self.buffer.pop_front() {
            Some(Store::Adding(adding)) => self.adding = adding,
            Some(Store::Descriptor(operation)) => self.slots[slot(operation)] = number(operation, rules),
            Some(Store::Added(added)) => self.added = added,
            None => {}
        }
    }

    /// Whether an operation is done. Its slot in the ring has the number of the last operation that
    /// was served there. The controller and the lane both read that number.
    fn is_done(&self, operation: u8, rules: Rules) -> bool {
        self.done[slot(operation)] == number(operation, rules)
    }

    /// Every state that one step of the lane, the controller or the kernel leads to.
    fn next(&self, rules: Rules) -> Vec<World> {
        let mut worlds = Vec::new();
        let mut step = |change: &dyn Fn(&mut World)| {
            let mut world = self.clone();
            change(&mut world);
            worlds.push(world);
        };
        if !self.buffer.is_empty() {
            step(&|world| world.drain_one(rules));
        }
        // The lane's steps. To queue an operation it sets `adding`, reads the state, writes a
        // descriptor and clears `adding`. At any time it may hand over a finished operation. It
        // takes no step while its store buffer is full.
        match self.lane {
            _ if self.buffer.len() >= BUFFER => {}
            LaneAt::Start if self.queued < OPERATIONS && self.queued - self.finished < DEPTH => {
                step(&|world| {
                    world.buffer.push_back(Store::Adding(true));
                    world.lane = LaneAt::Look;
                });
            }
            LaneAt::Start => {}
            LaneAt::Look => step(&|world| match world.leaving_or_absent {
                true => {
                    world.buffer.push_back(Store::Adding(false));
                    world.lane = LaneAt::Start;
                }
                false => world.lane = LaneAt::Write,
            }),
            LaneAt::Write => step(&|world| {
                world.buffer.push_back(Store::Descriptor(world.queued));
                world.queued += 1;
                world.buffer.push_back(Store::Added(world.queued));
                world.lane = LaneAt::Close;
            }),
            LaneAt::Close => step(&|world| {
                world.buffer.push_back(Store::Adding(false));
                world.lane = LaneAt::Start;
            }),
        }
        if self.finished < self.queued && self.is_done(self.finished, rules) {
            step(&|world| world.finished += 1);
        }
        // The steps of the controller, which puts the kernel on the card and takes it off again.
        match self.controller {
            Controller::Absent => step(&|world| {
                world.stop = false;
                world.kernel = Some(world.added);
                world.leaving_or_absent = false;
                world.controller = Controller::Resident;
            }),
            Controller::Resident => step(&|world| {
                world.leaving_or_absent = true;
                world.controller = Controller::Barrier;
            }),
            Controller::Barrier => step(&|world| {
                while rules.membarrier && !world.buffer.is_empty() {
                    world.drain_one(rules);
                }
                world.controller = Controller::Waiting;
            }),
            Controller::Waiting => {
                let last = self.added.checked_sub(1);
                if !self.adding && last.is_none_or(|last| self.is_done(last, rules)) {
                    step(&|world| {
                        world.stop = true;
                        world.controller = Controller::Stopping;
                    });
                }
            }
            Controller::Stopping if self.kernel.is_none() => {
                step(&|world| world.controller = Controller::Absent);
            }
            Controller::Stopping => {}
        }
        // The kernel's steps: it serves the next operation if the slot has that operation's number,
        // or leaves if it was told to stop.
        if let Some(next) = self.kernel {
            if self.slots[slot(next)] == number(next, rules) {
                step(&|world| {
                    world.done[slot(next)] = number(next, rules);
                    world.kernel = Some(next + 1);
                    world.served += 1;
                });
            }
            if self.stop {
                step(&|world| world.kernel = None);
            }
        }
        worlds
    }

    /// The rule of the ring that this state breaks, if it breaks one.
    fn wrong(&self) -> Option<&'static str> {
        if self.served > self.queued {
            return Some("served an operation that was never added");
        }
        if self.finished > self.served {
            return Some("handed over an operation that was not served");
        }
        let unserved = self.queued > self.served;
        let promised = self.lane == LaneAt::Write;
        if self.controller == Controller::Absent && (unserved || promised) {
            return Some("the kernel left an operation behind");
        }
        None
    }
}

/// Visits every reachable state. Returns the first wrong one, or the number of states.
fn search(rules: Rules) -> Result<usize, (&'static str, World)> {
    let first = World::new(rules);
    let mut seen = HashSet::from([first.clone()]);
    let mut queue = VecDeque::from([first]);
    let mut finished = 0;
    while let Some(world) = queue.pop_front() {
        if let Some(wrong) = world.wrong() {
            return Err((wrong, world));
        }
        finished += usize::from(world.finished == OPERATIONS);
        for next in world.next(rules) {
            if seen.insert(next.clone()) {
                queue.push_back(next);
            }
        }
    }
    assert!(finished > 0, "no interleaving came to its end");
    Ok(seen.len())
}

#[test]
fn no_interleaving_loses_an_operation_or_serves_one_twice() {
    match search(REAL) {
        Ok(worlds) => assert!(worlds > 1_000, "only {worlds} worlds: the model does not move"),
        Err((wrong, world)) => panic!("{wrong}: {world:#?}"),
    }
}

#[test]
fn without_the_barrier_the_search_finds_the_lost_wake_up() {
    let (wrong, _) = search(Rules { membarrier: false, ..REAL }).expect_err("a lost wake-up");
    assert_eq!(wrong, "the kernel left an operation behind");
}

#[test]
fn with_numbers_as_few_as_slots_the_search_finds_the_confusion() {
    let (wrong, _) =
        search(Rules { modulus: DEPTH, ..REAL }).expect_err("a stale number taken for a new one");
    assert!(wrong.contains("never added") || wrong.contains("not served"), "{wrong}");
}
