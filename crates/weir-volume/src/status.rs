//! A volume's status. Reading it costs the I/O path nothing: lanes count for
//! themselves, in memory that only they write, and whoever asks sums up.

use crate::entry::Place;
use crate::{ChunkCounts, Compression, Volume};
use weir_core::metrics::{Counter, Distribution, Latencies};
use weir_store::{Condition, Report, State};

/// The counts of one lane with one store; the lane is the only writer, and shares no cache line.
#[derive(Debug, Default)]
#[repr(align(128))]
pub(crate) struct Traffic {
    pub reads: Counter,
    pub writes: Counter,
    pub read_latencies: Latencies,
    pub write_latencies: Latencies,
}

/// One lane's counters; the lane is their only writer.
#[derive(Debug, Default)]
pub(crate) struct LaneMetrics {
    /// By store; the last is of pages that lie in none: of one value, never written, or lost.
    pub traffic: Box<[Traffic]>,
    pub discards: Counter,
    /// Pages that took a slot, and pages that gave one up; either wraps.
    pub stored: Counter,
    pub unstored: Counter,
    /// Of these pages, those that took a place in a pack, and those that gave one up; and packs
    /// made and gone.
    pub packed: Counter,
    pub unpacked: Counter,
    pub packs: Counter,
    pub unpacks: Counter,
    /// Pages that became one repeated value, and that ceased to be.
    pub filled: Counter,
    pub unfilled: Counter,
    pub read_faults: Counter,
    pub write_faults: Counter,
    /// Among the read faults: content that was not what had been written.
    pub corrupt: Counter,
    /// Slots found only after waiting for other lanes.
    pub waits: Counter,
    /// Pages that a worker moved out of chunks that were given back, and up again afterwards.
    pub moved_out: Counter,
    pub moved_up: Counter,
    /// Pages that it moved out of packs that were no longer full.
    pub compacted: Counter,
}

impl LaneMetrics {
    pub fn new(stores: usize) -> Self {
        LaneMetrics { traffic: (0..=stores).map(|_| Traffic::default()).collect(), ..LaneMetrics::default() }
    }

    /// The counts of pages that lie there.
    #[inline]
    pub fn traffic(&self, place: Place) -> &Traffic {
        match place {
            Place::Stored { store, .. } => self.traffic_of(Some(store)),
            _ => self.traffic_of(None),
        }
    }

    /// Where pages of this store, or of none, are counted.
    #[inline]
    pub fn traffic_of(&self, store: Option<usize>) -> &Traffic {
        &self.traffic[store.unwrap_or(self.traffic.len() - 1)]
    }
}

/// A volume at one moment. Counts are since it was made; those of lanes at work may be a little
/// behind.
#[derive(Clone, Debug)]
pub struct VolumeStatus {
    /// Its size.
    pub pages: u32,
    /// Pages that lie in a slot of a store.
    pub stored: u64,
    /// Among these, pages that lie compressed in packs, and the slots that these packs take.
    pub packed: u64,
    /// See [`packed`](VolumeStatus::packed).
    pub packs: u64,
    /// How pages are compressed, if they are.
    pub compression: Option<Compression>,
    /// Pages that repeat one value, which the map alone holds.
    pub filled: u64,
    /// Pages read.
    pub reads: u64,
    /// Pages written.
    pub writes: u64,
    /// Pages discarded.
    pub discards: u64,
    /// Pages whose read failed.
    pub read_faults: u64,
    /// Pages whose write failed.
    pub write_faults: u64,
    /// Among [`read_faults`](VolumeStatus::read_faults): content that did not match its checksum.
    pub corrupt: u64,
    /// Writes that had to wait for a slot.
    pub waits: u64,
    /// Pages moved out of chunks that were given back.
    pub moved_out: u64,
    /// Pages moved up again into faster stores that had room.
    pub moved_up: u64,
    /// Pages moved together that were left in packs which others had left.
    pub compacted: u64,
    /// Latency of reads, sampled.
    pub read_latencies: Distribution,
    /// Latency of writes, sampled.
    pub write_latencies: Distribution,
    /// Its stores, in order.
    pub stores: Vec<StoreStatus>,
}

/// A store of a volume at one moment.
#[derive(Clone, Debug)]
pub struct StoreStatus {
    /// Its URL.
    pub name: String,
    /// The state of its worst member.
    pub state: State,
    /// The condition of each member, where the store tells.
    pub conditions: Vec<Condition>,
    /// Slots it has.
    pub slots: u32,
    /// Slots that hold a page.
    pub used: u32,
    /// Its chunks: held, reserve, emptying, given back.
    pub chunks: ChunkCounts,
    /// Pages that were read from it, and that were written to it.
    pub reads: u64,
    /// See [`reads`](StoreStatus::reads).
    pub writes: u64,
    /// Latency of these reads, sampled.
    pub read_latencies: Distribution,
    /// Latency of these writes, sampled.
    pub write_latencies: Distribution,
}

impl Volume {
    /// Pages read, written and discarded so far: what [`status`](Volume::status) adds up, for
    /// whoever only wants to know whether the volume is in use.
    pub fn operations(&self) -> u64 {
        let of = |lane: &LaneMetrics| {
            let moved = |traffic: &Traffic| traffic.reads.get().wrapping_add(traffic.writes.get());
            lane.traffic.iter().fold(lane.discards.get(), |sum, traffic| sum.wrapping_add(moved(traffic)))
        };
        self.lanes.iter().fold(0, |sum, seat| sum.wrapping_add(of(&seat.metrics)))
    }

    /// Its counts and the condition of its stores.
    pub fn status(&self) -> VolumeStatus {
        self.end_quarantines();
        let sum = |counter: fn(&LaneMetrics) -> &Counter| -> u64 {
            self.lanes.iter().fold(0, |sum, seat| sum.wrapping_add(counter(&seat.metrics).get()))
        };
        let traffic: Vec<Summed> = (0..=self.tiers.len()).map(|at| self.summed(at)).collect();
        let mut all = Summed::default();
        traffic.iter().for_each(|of| all.add(of));
        let stores = self.tiers.iter().zip(traffic).map(|(tier, traffic)| StoreStatus {
            name: tier.store.name().to_owned(),
            state: tier.worst_state(),
            conditions: tier.store.report().map_or_else(Vec::new, Report::conditions),
            slots: tier.records.slots(),
            used: tier.records.slots() - tier.records.free(),
            chunks: tier.chunk_counts(),
            reads: traffic.reads,
            writes: traffic.writes,
            read_latencies: traffic.read_latencies,
            write_latencies: traffic.write_latencies,
        });
        VolumeStatus {
            pages: self.pages(),
            stored: sum(|lane| &lane.stored).wrapping_sub(sum(|lane| &lane.unstored)),
            packed: sum(|lane| &lane.packed).wrapping_sub(sum(|lane| &lane.unpacked)),
            packs: sum(|lane| &lane.packs).wrapping_sub(sum(|lane| &lane.unpacks)),
            compression: self.compression(),
            filled: sum(|lane| &lane.filled).wrapping_sub(sum(|lane| &lane.unfilled)),
            reads: all.reads,
            writes: all.writes,
            discards: sum(|lane| &lane.discards),
            read_faults: sum(|lane| &lane.read_faults),
            write_faults: sum(|lane| &lane.write_faults),
            corrupt: sum(|lane| &lane.corrupt),
            waits: sum(|lane| &lane.waits),
            moved_out: sum(|lane| &lane.moved_out),
            moved_up: sum(|lane| &lane.moved_up),
            compacted: sum(|lane| &lane.compacted),
            stores: stores.collect(),
            read_latencies: all.read_latencies,
            write_latencies: all.write_latencies,
        }
    }

    /// The counts of all lanes with the store at a place of the list.
    fn summed(&self, at: usize) -> Summed {
        let mut sum = Summed::default();
        for Traffic { reads, writes, read_latencies, write_latencies } in
            self.lanes.iter().map(|seat| &seat.metrics.traffic[at])
        {
            sum.reads += reads.get();
            sum.writes += writes.get();
            read_latencies.add_to(&mut sum.read_latencies);
            write_latencies.add_to(&mut sum.write_latencies);
        }
        sum
    }
}

/// The [`Traffic`] of several lanes or stores.
#[derive(Default)]
struct Summed {
    reads: u64,
    writes: u64,
    read_latencies: Distribution,
    write_latencies: Distribution,
}

impl Summed {
    fn add(&mut self, other: &Summed) {
        self.reads += other.reads;
        self.writes += other.writes;
        self.read_latencies += &other.read_latencies;
        self.write_latencies += &other.write_latencies;
    }
}
