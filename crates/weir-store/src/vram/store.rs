//! A `vram:` URL as a store: one card, or several with the chunks dealt out among them.
//!
//! Chunks are dealt out in proportion to each card's measured speed. So neighbouring chunks lie on
//! different cards, and a random load uses all of them.

use super::Drivers;
use super::gpu::Gpu;
use super::kept::{self, KeptStore};
use super::options::{Target, VramUrl};
use super::table::{self, Direction};
use crate::{
    Condition, Fault, Headroom, Keep, Lane, OpenError, OpenErrorKind, Reclaim, Report, State, Store, Stripe,
    Survive, Tell, TellChange,
};
use std::io;
use std::os::fd::OwnedFd;
use std::sync::Arc;
use std::time::Duration;
use weir_core::{ByteSize, Memory, Slot};

/// The memory of one GPU, or of all: a stripe with a card for each member.
#[derive(Debug)]
pub struct VramStore(Stripe<Arc<Gpu>>);

impl VramStore {
    /// Opens the memory that `url` names.
    ///
    /// # Errors
    /// Fails when no card is suitable, or its memory cannot be had. The error says what was found.
    pub fn open(url: &VramUrl) -> Result<Self, OpenError> {
        Self::open_with(url, &Drivers::default())
    }

    /// Does the same as [`open`](Self::open), with other libraries in place of NVIDIA's.
    ///
    /// # Errors
    /// Fails as [`open`](Self::open) does.
    pub fn open_with(url: &VramUrl, drivers: &Drivers) -> Result<Self, OpenError> {
        let gpus = match url.target {
            Target::Index(_) | Target::Software => vec![Gpu::open(url, drivers)?],
            Target::All => open_all(url, drivers)?,
        };
        let speeds: Vec<f64> = gpus.iter().map(|gpu| speed(gpu)).collect();
        Ok(VramStore(Stripe::by_speed(url.to_string(), gpus, &speeds)))
    }

    /// Opens the store of a process that has ended, with every page in it; `take` returns the
    /// descriptors that the keeper held.
    ///
    /// # Errors
    /// Fails when the keeper lacks a descriptor, or one cannot be imported. Then the keeper still
    /// holds the pages.
    pub fn reopen_with(
        url: &VramUrl,
        drivers: &Drivers,
        take: &mut dyn FnMut(&str) -> Option<OwnedFd>,
    ) -> Result<Self, OpenError> {
        let fail = |kind, what: &str| OpenError::new(kind, url.to_string(), what);
        let plan = take(kept::PLAN)
            .ok_or_else(|| fail(OpenErrorKind::NoDevice, "the keeper does not hold its plan"))?;
        let plan = Memory::adopt(plan)
            .map_err(|error| OpenError::io(url.to_string(), "cannot use what was kept", error))?;
        let plan = KeptStore::from_memory(&plan).ok_or_else(|| {
            fail(OpenErrorKind::Layout, "the plan that was kept is none that this version reads")
        })?;
        let mut gpus = Vec::new();
        for (index, kept) in plan.gpus.iter().enumerate() {
            let target = if url.target == Target::All { Target::Index(index as u32) } else { url.target };
            let options = VramUrl { target, ..url.clone() };
            let chunk = |chunk| take(&kept::chunk_name(index, chunk));
            gpus.push(Gpu::reopen(&options, drivers, kept, chunk)?);
        }
        Ok(VramStore(Stripe::dealt(url.to_string(), gpus, plan.deal)))
    }

    /// The cards of the store.
    pub fn gpus(&self) -> &[Arc<Gpu>] {
        self.0.parts()
    }
}

impl Drop for VramStore {
    fn drop(&mut self) {
        for gpu in self.gpus() {
            gpu.stop_watching();
        }
    }
}

/// Pages a second that a card takes or returns on its best path.
fn speed(gpu: &Gpu) -> f64 {
    let best = |direction| {
        let shared = |path| Some(gpu.table().get(path, direction)?.shared);
        table::Path::ALL.into_iter().filter_map(shared).fold(f64::INFINITY, f64::min)
    };
    2e9 / (best(Direction::Read) + best(Direction::Write))
}

fn open_all(url: &VramUrl, drivers: &Drivers) -> Result<Vec<Arc<Gpu>>, OpenError> {
    let cards = Gpu::count(&drivers.cuda).max(1) as u32;
    // The size is for all cards together. Each card gets an equal part, in whole chunks.
    let size = url.size.map(|size| ByteSize(size.0.div_ceil(u64::from(cards)).next_multiple_of(url.chunk.0)));
    (0..cards)
        .map(|index| Gpu::open(&VramUrl { target: Target::Index(index), size, ..url.clone() }, drivers))
        .collect()
}

impl Store for VramStore {
    fn name(&self) -> &str {
        self.0.name()
    }

    fn slots(&self) -> u32 {
        self.0.slots()
    }

    fn lane(&self, depth: usize) -> Result<Box<dyn Lane>, OpenError> {
        self.0.lane(depth)
    }

    fn members(&self) -> u32 {
        self.0.members()
    }

    fn member(&self, slot: Slot) -> u32 {
        self.0.member(slot)
    }

    fn state(&self, member: u32) -> State {
        self.0.state(member)
    }

    fn unfit_for_swap(&self) -> Option<String> {
        self.0.unfit_for_swap()
    }

    fn reclaim(&self) -> Option<&dyn Reclaim> {
        Some(&self.0)
    }

    fn survive(&self) -> Option<&dyn Survive> {
        Some(self)
    }

    fn report(&self) -> Option<&dyn Report> {
        Some(&self.0)
    }
}

impl Survive for VramStore {
    fn keep_with(&self, keep: Arc<dyn Keep>, held: bool) -> io::Result<()> {
        if !held {
            let gpus = self.gpus().iter().map(|gpu| gpu.to_keep()).collect();
            let plan = KeptStore { gpus, deal: self.0.deal().units().to_vec() }.to_memory()?;
            keep.hold(kept::PLAN, plan.fd().expect("it is a memfd"), true)?;
        }
        self.gpus().iter().enumerate().try_for_each(|(index, gpu)| gpu.keep_with(&keep, index, held))
    }

    /// Always true: the driver ends a process's operations on a card before the process is gone.
    fn is_quiet(&self) -> bool {
        true
    }

    fn forget(&self) {
        self.gpus().iter().for_each(|gpu| gpu.forget());
    }
}

/// A card is a member of its store.
impl Store for Arc<Gpu> {
    fn name(&self) -> &str {
        self.url()
    }

    fn slots(&self) -> u32 {
        Gpu::slots(self)
    }

    fn lane(&self, depth: usize) -> Result<Box<dyn Lane>, OpenError> {
        Ok(Box::new(Gpu::lane(self, depth)?))
    }

    fn state(&self, _member: u32) -> State {
        Gpu::state(self)
    }

    fn unfit_for_swap(&self) -> Option<String> {
        None
    }

    fn report(&self) -> Option<&dyn Report> {
        Some(self)
    }
}

impl Reclaim for Arc<Gpu> {
    fn chunk_slots(&self) -> u32 {
        Gpu::chunk_slots(self)
    }

    fn release(&self, chunk: u32) -> Result<(), Fault> {
        Gpu::release(self, chunk)
    }

    fn take(&self, chunk: u32) -> Result<(), Fault> {
        Gpu::take(self, chunk)
    }

    fn headroom(&self, _member: u32) -> Option<Headroom> {
        // The first call waits until the opening of late parts has found the card's other users.
        self.late.iter().for_each(|late| late.wait_for_owner());
        Gpu::headroom(self)
    }
}

impl Report for Arc<Gpu> {
    fn conditions(&self) -> Vec<Condition> {
        vec![self.condition()]
    }

    fn when_changed(&self, tell: TellChange) {
        Gpu::when_changed(self, &tell);
    }

    fn stages(&self) -> Vec<(&'static str, Duration)> {
        self.stages.clone()
    }

    fn when_joined(&self, tell: Tell) {
        self.late.iter().for_each(|late| late.when_over(Arc::clone(&tell)));
    }
}
