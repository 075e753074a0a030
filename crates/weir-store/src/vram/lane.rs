//! One thread's way to the card: the mapping at once, the engine and the ring by completion.

use super::chunks::Way;
use super::engine::BatchLane;
use super::gpu::Gpu;
use super::options::PathMode;
use super::ring::{Admission, RingLane};
use super::table::{Batch, Direction, Path};
use crate::{Done, Fault, Lane, Progress, Ticket};
use std::sync::Arc;
use weir_core::{PageBytes, Slot};

/// From so many slots in a row on, the next batch is taken to go on like that.
const NEIGHBOURS: u32 = 15;

/// A lane to one card. Operations that are in flight together have no order; one that was handed over is seen
/// by every later one of every lane.
pub struct GpuLane {
    // The lanes before the card: their memory is the card's.
    engine: Option<BatchLane>,
    ring: Option<RingLane>,
    gpu: Arc<Gpu>,
    pin: usize,
    reads: Path,
    writes: Path,
    /// What the choice was made for: reads and writes announced, and whether the kernel was there.
    planned: [usize; 2],
    resident: bool,
    /// The slot that would be the neighbour of the last, and how many neighbours came in a row.
    next: u32,
    neighbours: u32,
    /// The path is set for measuring and stays.
    forced: bool,
}

impl GpuLane {
    pub(super) fn new(gpu: &Arc<Gpu>, pin: usize, engine: Option<BatchLane>, ring: Option<RingLane>) -> Self {
        let mut lane = GpuLane {
            engine,
            ring,
            gpu: Arc::clone(gpu),
            pin,
            reads: Path::Mapped,
            writes: Path::Mapped,
            planned: [1, 1],
            resident: false,
            next: 0,
            neighbours: 0,
            forced: false,
        };
        lane.plan(1, 1);
        lane
    }

    /// Makes every operation of a direction go one way, for measuring it.
    pub fn force(&mut self, path: Path, direction: Direction) {
        self.forced = true;
        match direction {
            Direction::Read => self.reads = path,
            Direction::Write => self.writes = path,
        }
    }

    fn choose(&self, direction: Direction, pages: usize) -> Path {
        let resident = self.resident;
        let fixed = match self.gpu.path() {
            PathMode::Auto => None,
            PathMode::Mapped => Some(Path::Mapped),
            PathMode::Engine => Some(Path::Engine),
            PathMode::Ring if resident => Some(Path::Ring),
            PathMode::Ring => Some(Path::Mapped),
        };
        let fixed = fixed.filter(|&path| self.gpu.has(path));
        let batch = Batch {
            pages: pages + self.in_flight(),
            neighbours: self.neighbours >= NEIGHBOURS,
            busy: self.gpu.busy_lanes(),
            ring: resident,
        };
        fixed.or_else(|| self.gpu.table().choose(direction, batch)).unwrap_or(if self.gpu.has(Path::Mapped) {
            Path::Mapped
        } else {
            Path::Engine
        })
    }

    /// The way to take when the ring is away or full: the lane has room for its depth, whatever the ring has.
    fn otherwise(&self) -> Path {
        match &self.ring {
            Some(ring) if ring.in_flight() > 0 && self.gpu.has(Path::Engine) => Path::Engine,
            _ if self.gpu.has(Path::Mapped) => Path::Mapped,
            _ => Path::Engine,
        }
    }

    /// Whether an operation may begin. Chooses anew when the kernel came or went since the last plan.
    fn admit(&mut self, slot: Slot) -> Result<(), Fault> {
        self.neighbours = if slot.0 == self.next { self.neighbours.saturating_add(1) } else { 0 };
        self.next = slot.0.wrapping_add(1);
        if self.ring.is_some() && self.gpu.ring_is_resident() != self.resident {
            self.plan(self.planned[0], self.planned[1]);
        }
        match () {
            () if slot.0 >= self.gpu.slots() => Err(Fault::Io(libc::EINVAL)),
            () if self.gpu.is_lost() => Err(Fault::Lost),
            () => Ok(()),
        }
    }

    /// Queues by engine or ring what `queue` describes; `None`: the ring is away, take another way.
    fn later(
        &mut self,
        path: Path,
        slot: Slot,
        by_engine: impl FnOnce(&mut BatchLane, u64),
        by_ring: impl FnOnce(&mut RingLane, u64),
    ) -> Option<Progress> {
        let way = if path == Path::Ring { Way::Ring } else { Way::Engine };
        let (gpu, pin) = (&self.gpu, self.gpu.chunks().pin(self.pin));
        let Some(address) = gpu.chunks().begin(pin, way, slot) else {
            return Some(Progress::Done(Err(Fault::Lost)));
        };
        match (path, &mut self.engine, &mut self.ring) {
            (Path::Ring, _, Some(ring)) => match ring.admits() {
                Admission::Yes => {
                    by_ring(ring, address);
                    return Some(Progress::Queued);
                }
                Admission::Full | Admission::Away => {}
            },
            (Path::Engine, Some(engine), _) => {
                if engine.has_room() {
                    by_engine(engine, address);
                    return Some(Progress::Queued);
                }
                gpu.chunks().cancel(pin, way);
                return Some(Progress::Full);
            }
            _ => {}
        }
        gpu.chunks().cancel(pin, way);
        None
    }
}

impl Lane for GpuLane {
    fn plan(&mut self, reads: usize, writes: usize) {
        let resident = self.ring.is_some() && self.gpu.ring_is_resident();
        let alone = self.in_flight() == 0 && self.neighbours < NEIGHBOURS;
        // A page now and then is planned as the one before: after a pause every cache line of the choice is cold,
        // and they cost more than the page.
        let as_before = alone && self.planned == [reads, writes] && self.resident == resident;
        self.resident = resident;
        if self.forced || (as_before && reads + writes <= 1) {
            return;
        }
        self.planned = [reads, writes];
        self.reads = self.choose(Direction::Read, reads);
        self.writes = self.choose(Direction::Write, writes);
    }

    fn heeds_plan(&self) -> bool {
        true
    }

    fn write(&mut self, ticket: Ticket, slot: Slot, page: &PageBytes) -> Progress {
        if let Err(fault) = self.admit(slot) {
            return Progress::Done(Err(fault));
        }
        let mut path = self.writes;
        loop {
            if path == Path::Mapped {
                let copies = self.gpu.copies();
                let pin = self.gpu.chunks().pin(self.pin);
                // SAFETY: the address is a page of a chunk that stays while it is touched, aligned to a page; nobody
                // else writes this slot, by the contract of slots, and what races is bytes of another's memory.
                let stored = self
                    .gpu
                    .chunks()
                    .with_host(pin, slot, |host| unsafe { copies.to_device(page.as_ptr(), host) });
                pin.count_stored();
                return Progress::Done(stored.ok_or(Fault::Lost));
            }
            let queued = self.later(
                path,
                slot,
                |engine, address| engine.write(ticket, address, page),
                |ring, address| ring.write(ticket, address, page),
            );
            match queued {
                Some(progress) => return progress,
                None if path == self.otherwise() => return Progress::Done(Err(Fault::Unsupported)),
                None => path = self.otherwise(),
            }
        }
    }

    fn read(&mut self, ticket: Ticket, slot: Slot, page: &mut PageBytes) -> Progress {
        if let Err(fault) = self.admit(slot) {
            return Progress::Done(Err(fault));
        }
        let mut path = self.reads;
        loop {
            if path == Path::Mapped {
                let copies = self.gpu.copies();
                let pin = self.gpu.chunks().pin(self.pin);
                let to = page.as_mut_ptr();
                // SAFETY: as in `write`; `to` is a page of the caller's.
                let loaded =
                    self.gpu.chunks().with_host(pin, slot, |host| unsafe { copies.from_device(host, to) });
                return Progress::Done(loaded.ok_or(Fault::Lost));
            }
            let queued = self.later(
                path,
                slot,
                |engine, address| engine.read(ticket, address),
                |ring, address| ring.read(ticket, address),
            );
            match queued {
                Some(progress) => return progress,
                None if path == self.otherwise() => return Progress::Done(Err(Fault::Unsupported)),
                None => path = self.otherwise(),
            }
        }
    }

    fn submit(&mut self) {
        if let Some(ring) = &mut self.ring {
            ring.submit();
        }
        if let Some(engine) = &mut self.engine {
            engine.submit();
        }
    }

    fn poll(&mut self, done: &mut dyn FnMut(Done<'_>)) {
        let pin = self.gpu.chunks().pin(self.pin);
        if let Some(ring) = &mut self.ring {
            let before = ring.in_flight();
            if before > 0 {
                ring.poll(done);
                pin.finish(Way::Ring, (before - ring.in_flight()) as u64);
            }
        }
        if let Some(engine) = &mut self.engine {
            let before = engine.in_flight();
            if before > 0 {
                engine.poll(done);
                pin.finish(Way::Engine, (before - engine.in_flight()) as u64);
            }
        }
    }

    fn in_flight(&self) -> usize {
        self.ring.as_ref().map_or(0, RingLane::in_flight)
            + self.engine.as_ref().map_or(0, BatchLane::in_flight)
    }
}

impl Drop for GpuLane {
    fn drop(&mut self) {
        // Pinned memory is unmapped with the lanes, which a resident kernel would hold up.
        self.ring = None;
        let paused = self.gpu.pause_ring();
        self.engine = None;
        drop(paused);
        self.gpu.chunks().pin(self.pin).close();
    }
}
