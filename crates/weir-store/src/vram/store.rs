//! A `vram:` URL as a store: one card, or several with their chunks dealt out among them.
//!
//! Chunks go round the cards in proportion to each one's measured speed, so that neighbouring chunks lie on
//! different cards and a random load meets them all.

use super::Drivers;
use super::gpu::Gpu;
use super::headroom::Headroom;
use super::kept::{self, KeptStore};
use super::lane::GpuLane;
use super::options::{Target, VramUrl};
use super::table::{self, Direction};
use crate::{
    Condition, Done, Fault, Keep, Lane, OpenError, Progress, State, Store, Tell, TellChange, Ticket,
};
use std::io;
use std::os::fd::OwnedFd;
use std::sync::Arc;
use std::time::{Duration, Instant};
use weir_core::{ByteSize, Memory, PageBytes, Slot};

/// The memory of one GPU, or of all.
#[derive(Debug)]
pub struct VramStore {
    url: String,
    gpus: Vec<Arc<Gpu>>,
    /// Which card, and which of its chunks, a chunk is. Empty with one card, where both count the same.
    deal: Arc<[(u16, u32)]>,
    slots: u32,
}

impl VramStore {
    /// Opens the memory that `url` names.
    ///
    /// # Errors
    /// When no card will do, or its memory cannot be had. The sentence says what was found.
    pub fn open(url: &VramUrl) -> Result<Self, OpenError> {
        Self::open_with(url, &Drivers::default())
    }

    /// As [`open`](Self::open), with other libraries in place of NVIDIA's.
    ///
    /// # Errors
    /// As [`open`](Self::open).
    pub fn open_with(url: &VramUrl, drivers: &Drivers) -> Result<Self, OpenError> {
        let gpus = match url.target {
            Target::Index(_) | Target::Software => vec![Gpu::open(url, drivers)?],
            Target::All => open_all(url, drivers)?,
        };
        Ok(Self::over(url.to_string(), gpus))
    }

    /// Opens the store of a process that has ended, with every page that it held; `take` hands over what was kept of it.
    ///
    /// # Errors
    /// When something is missing or cannot be imported; then the pages stay where they are kept.
    pub fn reopen_with(
        url: &VramUrl,
        drivers: &Drivers,
        take: &mut dyn FnMut(&str) -> Option<OwnedFd>,
    ) -> Result<Self, OpenError> {
        let fail = |what: &str| OpenError::new(url.to_string(), what);
        let plan = take(kept::PLAN).ok_or_else(|| fail("the keeper does not hold its plan"))?;
        let plan = Memory::adopt(plan)
            .map_err(|error| OpenError::io(url.to_string(), "cannot map the plan that was kept", error))?;
        let plan = KeptStore::from_memory(&plan)
            .ok_or_else(|| fail("the plan that was kept is none that this version reads"))?;
        let mut gpus = Vec::new();
        for (index, kept) in plan.gpus.iter().enumerate() {
            let target = if url.target == Target::All { Target::Index(index as u32) } else { url.target };
            let options = VramUrl { target, ..url.clone() };
            let chunk = |chunk| take(&kept::chunk_name(index, chunk));
            gpus.push(Gpu::reopen(&options, drivers, kept, chunk)?);
        }
        let (slots, deal) = (slots(&gpus, plan.deal.len()), plan.deal.into());
        Ok(VramStore { url: url.to_string(), gpus, deal, slots })
    }

    fn over(url: String, gpus: Vec<Arc<Gpu>>) -> Self {
        if gpus.len() == 1 {
            let slots = slots(&gpus, 0);
            return VramStore { url, gpus, deal: Arc::new([]), slots };
        }
        let chunks: Vec<u32> = gpus.iter().map(|gpu| gpu.slots() / gpu.chunk_slots()).collect();
        let speeds: Vec<f64> = gpus.iter().map(|gpu| speed(gpu)).collect();
        let deal = deal(&chunks, &speeds);
        let slots = slots(&gpus, deal.len());
        VramStore { url, gpus, deal: deal.into(), slots }
    }

    /// The cards.
    pub fn gpus(&self) -> &[Arc<Gpu>] {
        &self.gpus
    }

    fn locate(&self, chunk: u32) -> Result<(&Arc<Gpu>, u32), Fault> {
        if self.deal.is_empty() {
            return Ok((&self.gpus[0], chunk));
        }
        let &(gpu, chunk) = self.deal.get(chunk as usize).ok_or(Fault::Io(libc::EINVAL))?;
        Ok((&self.gpus[usize::from(gpu)], chunk))
    }
}

impl Drop for VramStore {
    fn drop(&mut self) {
        for gpu in &self.gpus {
            gpu.stop_watching();
        }
    }
}

/// Slots of one card, or of so many chunks dealt out among several.
fn slots(gpus: &[Arc<Gpu>], dealt: usize) -> u32 {
    match gpus {
        [gpu] => gpu.slots(),
        _ => (dealt as u64 * u64::from(gpus[0].chunk_slots())).min(u64::from(u32::MAX)) as u32,
    }
}

/// Pages a second that a card takes and gives, at its best.
fn speed(gpu: &Gpu) -> f64 {
    let best = |direction| {
        let shared = |path| Some(gpu.table().get(path, direction)?.shared);
        table::Path::ALL.into_iter().filter_map(shared).fold(f64::INFINITY, f64::min)
    };
    2e9 / (best(Direction::Read) + best(Direction::Write))
}

/// Deals chunks out so that after any number of them every card has its share, as long as it has chunks.
fn deal(chunks: &[u32], speeds: &[f64]) -> Vec<(u16, u32)> {
    let mut given = vec![0u32; chunks.len()];
    let total = chunks.iter().sum::<u32>() as usize;
    let mut deal = Vec::with_capacity(total);
    while deal.len() < total {
        let due = |&gpu: &usize| (f64::from(given[gpu]) + 1.0) / speeds[gpu].max(1.0);
        let next = (0..chunks.len())
            .filter(|&gpu| given[gpu] < chunks[gpu])
            .min_by(|a, b| due(a).total_cmp(&due(b)))
            .expect("a card with chunks left, as not all are dealt");
        deal.push((next as u16, given[next]));
        given[next] += 1;
    }
    deal
}

fn open_all(url: &VramUrl, drivers: &Drivers) -> Result<Vec<Arc<Gpu>>, OpenError> {
    let cards = Gpu::count(&drivers.cuda).max(1) as u32;
    // A size is the sum over the cards, in equal parts of whole chunks.
    let size = url.size.map(|size| ByteSize(size.0.div_ceil(u64::from(cards)).next_multiple_of(url.chunk.0)));
    (0..cards)
        .map(|index| Gpu::open(&VramUrl { target: Target::Index(index), size, ..url.clone() }, drivers))
        .collect()
}

impl Store for VramStore {
    fn name(&self) -> &str {
        &self.url
    }

    fn slots(&self) -> u32 {
        self.slots
    }

    fn chunk_slots(&self) -> u32 {
        self.gpus[0].chunk_slots()
    }

    fn lane(&self, depth: usize) -> Result<Box<dyn Lane>, OpenError> {
        if let [gpu] = self.gpus.as_slice() {
            return Ok(Box::new(gpu.lane(depth)?));
        }
        let lanes = self.gpus.iter().map(|gpu| gpu.lane(depth)).collect::<Result<Vec<_>, _>>()?;
        Ok(Box::new(StripedLane { lanes, deal: Arc::clone(&self.deal), shift: self.chunk_slots().ilog2() }))
    }

    /// The worst of its cards'.
    fn state(&self) -> State {
        let states = || self.gpus.iter().map(|gpu| gpu.state());
        match () {
            () if states().any(|state| state == State::Lost) => State::Lost,
            () if states().any(|state| state == State::Draining) => State::Draining,
            () => State::Online,
        }
    }

    fn keep_with(&self, keep: Arc<dyn Keep>, held: bool) -> io::Result<()> {
        if !held {
            let gpus = self.gpus.iter().map(|gpu| gpu.to_keep()).collect();
            let plan = KeptStore { gpus, deal: self.deal.to_vec() }.to_memory()?;
            keep.hold(kept::PLAN, plan.fd().expect("it is a memfd"), true)?;
        }
        self.gpus.iter().enumerate().try_for_each(|(index, gpu)| gpu.keep_with(&keep, index, held))
    }

    fn conditions(&self) -> Vec<Condition> {
        self.gpus.iter().map(|gpu| gpu.condition()).collect()
    }

    fn when_changed(&self, tell: TellChange) {
        self.gpus.iter().for_each(|gpu| gpu.when_changed(&tell));
    }

    fn stages(&self) -> Vec<(&'static str, Duration)> {
        self.gpus.iter().flat_map(|gpu| gpu.stages.iter().copied()).collect()
    }

    fn when_joined(&self, tell: Tell) {
        for late in self.gpus.iter().filter_map(|gpu| gpu.late.as_ref()) {
            late.when_over(Arc::clone(&tell));
        }
    }

    fn forget(&self) {
        self.gpus.iter().for_each(|gpu| gpu.forget());
    }

    fn headroom(&self) -> Vec<Option<Headroom>> {
        // Whoever asks first asks whether there is anything to ask.
        self.gpus.iter().filter_map(|gpu| gpu.late.as_ref()).for_each(|late| late.wait_for_owner());
        self.gpus.iter().map(|gpu| gpu.headroom()).collect()
    }

    fn card(&self, chunk: u32) -> usize {
        self.deal.get(chunk as usize).map_or(0, |&(gpu, _)| usize::from(gpu))
    }

    fn release(&self, chunk: u32) -> Result<(), Fault> {
        let (gpu, chunk) = self.locate(chunk)?;
        gpu.release(chunk)
    }

    fn take(&self, chunk: u32) -> Result<(), Fault> {
        let (gpu, chunk) = self.locate(chunk)?;
        gpu.take(chunk)
    }
}

/// One thread's lanes to several cards.
struct StripedLane {
    lanes: Vec<GpuLane>,
    deal: Arc<[(u16, u32)]>,
    shift: u32,
}

impl StripedLane {
    fn locate(&mut self, slot: Slot) -> Option<(&mut GpuLane, Slot)> {
        let &(gpu, chunk) = self.deal.get((slot.0 >> self.shift) as usize)?;
        let within = slot.0 & ((1 << self.shift) - 1);
        Some((&mut self.lanes[usize::from(gpu)], Slot(chunk << self.shift | within)))
    }
}

impl Lane for StripedLane {
    fn plan(&mut self, reads: usize, writes: usize) {
        let cards = self.lanes.len();
        for lane in &mut self.lanes {
            lane.plan(reads.div_ceil(cards), writes.div_ceil(cards));
        }
    }

    fn heeds_plan(&self) -> bool {
        true
    }

    fn write(&mut self, ticket: Ticket, slot: Slot, page: &PageBytes) -> Progress {
        match self.locate(slot) {
            Some((lane, slot)) => lane.write(ticket, slot, page),
            None => Progress::Done(Err(Fault::Lost)),
        }
    }

    fn read(&mut self, ticket: Ticket, slot: Slot, page: &mut PageBytes) -> Progress {
        match self.locate(slot) {
            Some((lane, slot)) => lane.read(ticket, slot, page),
            None => Progress::Done(Err(Fault::Lost)),
        }
    }

    fn submit(&mut self) {
        self.lanes.iter_mut().for_each(Lane::submit);
    }

    fn poll(&mut self, now: Instant, done: &mut dyn FnMut(Done<'_>)) {
        for lane in &mut self.lanes {
            lane.poll(now, done);
        }
    }

    fn in_flight(&self) -> usize {
        self.lanes.iter().map(Lane::in_flight).sum()
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    proptest! {
        #[test]
        fn every_chunk_is_dealt_once_and_speed_decides_the_order(
            chunks in prop::collection::vec(1u32..40, 1..5), ratio in 1.0f64..4.0,
        ) {
            let speeds: Vec<f64> = (0..chunks.len()).map(|gpu| 1e6 * (1.0 + gpu as f64 * (ratio - 1.0))).collect();
            let deal = deal(&chunks, &speeds);
            let mut sorted = deal.clone();
            sorted.sort_unstable();
            let all: Vec<(u16, u32)> =
                (0..).zip(&chunks).flat_map(|(gpu, &count)| (0..count).map(move |chunk| (gpu, chunk))).collect();
            prop_assert_eq!(sorted, all);
            // While all have chunks left, each has its share to within one.
            let whole = chunks.iter().map(|&count| f64::from(count)).fold(f64::INFINITY, f64::min) as usize;
            let sum: f64 = speeds.iter().sum();
            for (gpu, &speed) in speeds.iter().enumerate() {
                let given = deal[..whole].iter().filter(|&&(it, _)| usize::from(it) == gpu).count();
                prop_assert!((given as f64 - whole as f64 * speed / sum).abs() <= chunks.len() as f64);
            }
        }
    }
}
