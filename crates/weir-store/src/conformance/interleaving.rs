//! Any order of operations on several lanes, compared with a model of each slot's content.

use super::content::{content, label};
use super::harness::{Finished, Kind, Watched};
use crate::{Fault, Reclaim, Store};
use proptest::prelude::*;
use proptest::test_runner::{Config, FileFailurePersistence, TestRunner};
use std::collections::{HashMap, HashSet};
use weir_core::{PAGE_SIZE, Slot};

/// Depths of the lanes: room for one operation, for a few, and for a burst.
const DEPTHS: [usize; 3] = [1, 4, 32];

/// Number of slots under test: enough for runs of neighbours, and few enough that operations meet.
const PALETTE: usize = 40;

#[derive(Clone, Copy, Debug)]
enum Step {
    Write { lane: usize, at: usize },
    Read { lane: usize, at: usize },
    WriteRun { lane: usize, at: usize, count: usize },
    ReadRun { lane: usize, at: usize, count: usize },
    Plan { lane: usize, reads: usize, writes: usize },
    Submit { lane: usize },
    Poll { lane: usize },
    Drain { lane: usize },
    View { lane: usize, at: usize },
    Release { at: usize },
    Take { at: usize },
}

fn step() -> impl Strategy<Value = Step> {
    let lane = 0..DEPTHS.len();
    let at = 0..PALETTE;
    let count = 1..20usize;
    prop_oneof![
        8 => (lane.clone(), at.clone()).prop_map(|(lane, at)| Step::Write { lane, at }),
        8 => (lane.clone(), at.clone()).prop_map(|(lane, at)| Step::Read { lane, at }),
        3 => (lane.clone(), at.clone(), count.clone())
            .prop_map(|(lane, at, count)| Step::WriteRun { lane, at, count }),
        3 => (lane.clone(), at.clone(), count).prop_map(|(lane, at, count)| Step::ReadRun { lane, at, count }),
        1 => (lane.clone(), 0..9usize, 0..9usize)
            .prop_map(|(lane, reads, writes)| Step::Plan { lane, reads, writes }),
        4 => lane.clone().prop_map(|lane| Step::Submit { lane }),
        4 => lane.clone().prop_map(|lane| Step::Poll { lane }),
        1 => lane.clone().prop_map(|lane| Step::Drain { lane }),
        2 => (lane, at.clone()).prop_map(|(lane, at)| Step::View { lane, at }),
        1 => at.clone().prop_map(|at| Step::Release { at }),
        1 => at.prop_map(|at| Step::Take { at }),
    ]
}

/// Runs calls on several lanes in any order. Every read must return the last completed write of its
/// slot, every ticket must come back once, and only slots of released chunks may fault.
///
/// `source` is the file of the calling test; the seeds of failures are stored beside it.
pub fn any_interleaving_agrees_with_the_model(store: &dyn Store, source: &'static str) {
    let cases = std::env::var("PROPTEST_CASES").ok().and_then(|text| text.parse().ok()).unwrap_or(64);
    let persistence = FileFailurePersistence::SourceParallel("regressions");
    let config = Config {
        cases,
        source_file: Some(source),
        failure_persistence: Some(Box::new(persistence)),
        ..Config::default()
    };
    let steps = proptest::collection::vec(step(), 1..300);
    let run = TestRunner::new(config).run(&steps, |steps| {
        Model::new(store).run(&steps);
        Ok(())
    });
    if let Err(error) = run {
        panic!("{}: {error}", store.name());
    }
}

/// The content of a slot, as far as the model knows it.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
enum Known {
    /// The slot holds the write of this serial number.
    Serial(u32),
    /// The slot has no content: this case has not written it, or not since its chunk was last
    /// taken.
    Nothing,
}

struct Model<'a> {
    store: &'a dyn Store,
    lanes: Vec<Watched>,
    palette: Vec<Slot>,
    known: HashMap<Slot, Known>,
    writing: HashSet<Slot>,
    reading: HashMap<Slot, usize>,
    released: HashSet<u32>,
    releases_left: usize,
    serial: u32,
}

impl<'a> Model<'a> {
    fn new(store: &'a dyn Store) -> Self {
        // Take every chunk: an earlier case that failed may have left some of them released.
        if let Some(memory) = store.reclaim() {
            for chunk in 0..store.slots().div_ceil(memory.chunk_slots()) {
                let _ = memory.take(chunk);
            }
        }
        let lanes = DEPTHS.iter().map(|&depth| Watched::open(store, depth)).collect();
        let palette = palette(store);
        let known = palette.iter().map(|&slot| (slot, Known::Nothing)).collect();
        Model {
            store,
            lanes,
            palette,
            known,
            writing: HashSet::new(),
            reading: HashMap::new(),
            released: HashSet::new(),
            // Release large chunks only once: to take one again touches all of its memory, for tens
            // of milliseconds.
            releases_left: if chunk_slots(store) > 4096 { 1 } else { usize::MAX },
            serial: 0,
        }
    }

    fn run(mut self, steps: &[Step]) {
        for &step in steps {
            match step {
                Step::Write { lane, at } => self.write(lane, at),
                Step::Read { lane, at } => self.read(lane, at),
                Step::WriteRun { lane, at, count } => (at..at + count).for_each(|at| self.write(lane, at)),
                Step::ReadRun { lane, at, count } => (at..at + count).for_each(|at| self.read(lane, at)),
                Step::Plan { lane, reads, writes } => self.lanes[lane].plan(reads, writes),
                Step::Submit { lane } => self.lanes[lane].submit(),
                Step::Poll { lane } => {
                    let finished = self.lanes[lane].poll();
                    self.check(finished);
                }
                Step::Drain { lane } => self.drain(lane),
                Step::View { lane, at } => self.view(lane, at),
                Step::Release { at } => self.release(at),
                Step::Take { at } => self.take(at),
            }
        }
        (0..DEPTHS.len()).for_each(|lane| self.drain(lane));
        // At the end every slot is read once more, by another lane than its writer.
        for chunk in std::mem::take(&mut self.released) {
            self.take_chunk(chunk);
        }
        for at in 0..self.palette.len() {
            self.read(at % DEPTHS.len(), at);
        }
        (0..DEPTHS.len()).for_each(|lane| self.drain(lane));
    }

    fn slot(&self, at: usize) -> Slot {
        self.palette[at % self.palette.len()]
    }

    fn chunk(&self, slot: Slot) -> u32 {
        slot.0 / chunk_slots(self.store)
    }

    fn take_chunk(&self, chunk: u32) {
        let memory = self.store.reclaim().expect("it released a chunk");
        memory.take(chunk).expect("a released chunk can be taken again");
    }

    fn is_busy(&self, slot: Slot) -> bool {
        self.writing.contains(&slot) || self.reading.contains_key(&slot)
    }

    fn write(&mut self, lane: usize, at: usize) {
        let slot = self.slot(at);
        if self.is_busy(slot) {
            return;
        }
        self.serial += 1;
        self.writing.insert(slot);
        self.queue(lane, Kind::Write(self.serial), slot);
    }

    fn read(&mut self, lane: usize, at: usize) {
        let slot = self.slot(at);
        if self.writing.contains(&slot) {
            return;
        }
        *self.reading.entry(slot).or_default() += 1;
        self.queue(lane, Kind::Read, slot);
    }

    fn queue(&mut self, lane: usize, kind: Kind, slot: Slot) {
        let page = match kind {
            Kind::Write(serial) => content(slot, serial),
            Kind::Read => [0; PAGE_SIZE],
        };
        let mut finished = Vec::new();
        self.lanes[lane].run(kind, slot, &page, &mut finished);
        self.check(finished);
    }

    fn drain(&mut self, lane: usize) {
        let finished = self.lanes[lane].drain();
        self.check(finished);
    }

    fn view(&mut self, lane: usize, at: usize) {
        let slot = self.slot(at);
        if self.is_busy(slot) {
            return;
        }
        if let (Some(page), Known::Serial(serial)) = (self.lanes[lane].view(slot), self.known[&slot]) {
            assert_eq!(page, content(slot, serial), "a view of {slot:?} shows {}", label(&page));
        }
    }

    fn release(&mut self, at: usize) {
        if self.releases_left == 0 {
            return;
        }
        self.releases_left -= 1;
        let chunk = self.chunk(self.slot(at));
        (0..DEPTHS.len()).for_each(|lane| self.drain(lane)); // The caller empties a chunk first.
        let Some(memory) = self.store.reclaim() else { return };
        match memory.release(chunk) {
            Ok(()) => {
                self.released.insert(chunk);
                let chunk_slots = memory.chunk_slots();
                self.known
                    .iter_mut()
                    .filter(|(slot, _)| slot.0 / chunk_slots == chunk)
                    .for_each(|(_, known)| *known = Known::Nothing);
            }
            Err(fault) => assert_eq!(fault, Fault::Unsupported, "releasing chunk {chunk}"),
        }
    }

    fn take(&mut self, at: usize) {
        let chunk = self.chunk(self.slot(at));
        if self.released.remove(&chunk) {
            self.take_chunk(chunk);
        }
    }

    fn check(&mut self, finished: Vec<Finished>) {
        for Finished { kind, slot, result, page } in finished {
            let gone = self.released.contains(&self.chunk(slot));
            assert_eq!(result, if gone { Err(Fault::Lost) } else { Ok(()) }, "{kind:?} of {slot:?}");
            match kind {
                Kind::Write(serial) => {
                    self.writing.remove(&slot);
                    let known = if gone { Known::Nothing } else { Known::Serial(serial) };
                    self.known.insert(slot, known);
                }
                Kind::Read => {
                    let readers = self.reading.get_mut(&slot).expect("a read that was queued");
                    *readers -= 1;
                    if *readers == 0 {
                        self.reading.remove(&slot);
                    }
                    if let (Some(page), Known::Serial(serial)) = (page, self.known[&slot]) {
                        let held = label(&page);
                        assert_eq!(
                            *page,
                            content(slot, serial),
                            "{slot:?} was given write {serial}, holds {held}"
                        );
                    }
                }
            }
        }
    }
}

/// Slots of a chunk; all slots if the store gives nothing back.
fn chunk_slots(store: &dyn Store) -> u32 {
    store.reclaim().map_or_else(|| store.slots(), Reclaim::chunk_slots)
}

/// Slots where errors are likely: the first, the last, both sides of a chunk's edge, and a run in
/// the middle.
fn palette(store: &dyn Store) -> Vec<Slot> {
    let (slots, chunk) = (store.slots(), chunk_slots(store));
    let last = slots - 1;
    let mut palette = vec![0, 1, 2, chunk - 1, chunk, chunk + 1, last.saturating_sub(1), last];
    let run = (slots / 2).saturating_sub(PALETTE as u32 / 2);
    palette.extend(run..run + (PALETTE - palette.len()) as u32);
    palette.iter_mut().for_each(|slot| *slot = (*slot).min(last));
    palette.sort_unstable();
    palette.dedup();
    palette.into_iter().map(Slot).collect()
}
