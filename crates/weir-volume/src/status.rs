//! A pool's status. Reading it costs the I/O path nothing: each lane counts in memory that only
//! it writes, and the reader of the status adds up.

use crate::entry::Place;
use crate::{ChunkCounts, Compression, Pool};
use weir_core::metrics::{Counter, Distribution, Latencies};
use weir_store::{Condition, Report, State};

/// The counts of one lane with one store, in cache lines of their own. The lane is their only
/// writer.
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
#[repr(align(128))]
pub(crate) struct LaneMetrics {
    /// The traffic by store. The last element counts pages that lie in no store: of one value,
    /// never written, or lost.
    pub traffic: Box<[Traffic]>,
    pub discards: Counter,
    /// Pages that took a slot, and pages that gave one up. Both numbers wrap.
    pub stored: Counter,
    pub unstored: Counter,
    /// Pages that went into a pack, and pages that left one; packs that were made, and packs that
    /// were freed.
    pub packed: Counter,
    pub unpacked: Counter,
    pub packs: Counter,
    pub unpacks: Counter,
    /// Pages that became one repeated value, and pages that no longer are one; both numbers wrap.
    pub filled: Counter,
    pub unfilled: Counter,
    pub read_faults: Counter,
    pub write_faults: Counter,
    /// Number of reads that failed because the content did not match its checksum.
    pub corrupt: Counter,
    /// Number of writes that had to wait for a slot.
    pub waits: Counter,
    /// Pages that a worker moved out of chunks that were given back, and pages that it promoted
    /// again.
    pub moved_out: Counter,
    pub moved_up: Counter,
    /// Pages that a worker moved out of packs that were no longer full.
    pub compacted: Counter,
}

impl LaneMetrics {
    pub fn new(stores: usize) -> Self {
        LaneMetrics { traffic: (0..=stores).map(|_| Traffic::default()).collect(), ..LaneMetrics::default() }
    }

    /// The counts for the store that `place` names, or for pages in no store.
    #[inline]
    pub fn traffic(&self, place: Place) -> &Traffic {
        match place {
            Place::Stored { store, .. } => self.traffic_of(Some(store)),
            _ => self.traffic_of(None),
        }
    }

    /// The counts for this store, or with `None` those for pages in no store.
    #[inline]
    pub fn traffic_of(&self, store: Option<usize>) -> &Traffic {
        &self.traffic[store.unwrap_or(self.traffic.len() - 1)]
    }
}

/// The status of a pool at one moment. Counts begin when the pool is made. Those of lanes at work
/// may be a little behind.
#[derive(Clone, Debug)]
pub struct VolumeStatus {
    /// The pool's size in pages.
    pub pages: u32,
    /// Number of pages that lie in a slot of a store.
    pub stored: u64,
    /// Number of stored pages that lie compressed in packs.
    pub packed: u64,
    /// Number of slots that packs take; see [`packed`](VolumeStatus::packed).
    pub packs: u64,
    /// The compression algorithm, if pages are compressed.
    pub compression: Option<Compression>,
    /// Number of pages that repeat one value, which only the map holds.
    pub filled: u64,
    /// Number of pages read.
    pub reads: u64,
    /// Number of pages written.
    pub writes: u64,
    /// Number of pages discarded.
    pub discards: u64,
    /// Number of pages whose read failed.
    pub read_faults: u64,
    /// Number of pages whose write failed.
    pub write_faults: u64,
    /// Number of [`read_faults`](VolumeStatus::read_faults) where the content did not match its
    /// checksum.
    pub corrupt: u64,
    /// Number of writes that had to wait for a slot.
    pub waits: u64,
    /// Number of pages moved out of chunks that were given back.
    pub moved_out: u64,
    /// Number of pages promoted into faster stores that had room again.
    pub moved_up: u64,
    /// Number of pages that compaction moved out of half-empty packs.
    pub compacted: u64,
    /// Latency of reads, sampled.
    pub read_latencies: Distribution,
    /// Latency of writes, sampled.
    pub write_latencies: Distribution,
    /// The status of each store, in order.
    pub stores: Vec<StoreStatus>,
}

/// The status of one store of a pool at one moment.
#[derive(Clone, Debug)]
pub struct StoreStatus {
    /// The store's URL.
    pub name: String,
    /// The state of the store's worst member.
    pub state: State,
    /// The condition of each member, if the store reports it.
    pub conditions: Vec<Condition>,
    /// Number of slots in the store.
    pub slots: u32,
    /// Number of slots that hold a page.
    pub used: u32,
    /// The numbers of the store's chunks by state.
    pub chunks: ChunkCounts,
    /// Number of pages read from the store.
    pub reads: u64,
    /// Number of pages written to the store; see [`reads`](StoreStatus::reads).
    pub writes: u64,
    /// Latency of the reads from this store, sampled.
    pub read_latencies: Distribution,
    /// Latency of the writes to this store, sampled.
    pub write_latencies: Distribution,
}

impl Pool {
    /// Number of pages read, written and discarded so far: the sum of those counts in
    /// [`status`](Pool::status), for a caller that only checks whether the pool is in use.
    pub fn operations(&self) -> u64 {
        let of = |lane: &LaneMetrics| {
            let moved = |traffic: &Traffic| traffic.reads.get().wrapping_add(traffic.writes.get());
            lane.traffic.iter().fold(lane.discards.get(), |sum, traffic| sum.wrapping_add(moved(traffic)))
        };
        self.seats.metrics().fold(0, |sum, lane| sum.wrapping_add(of(lane)))
    }

    /// The pool's counts, and the condition of its stores.
    pub fn status(&self) -> VolumeStatus {
        self.end_quarantines();
        let sum = |counter: fn(&LaneMetrics) -> &Counter| -> u64 {
            self.seats.metrics().fold(0, |sum, lane| sum.wrapping_add(counter(lane).get()))
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

    /// The sum of all lanes' counts for the store with index `at`. The index behind the last store
    /// stands for pages in no store.
    fn summed(&self, at: usize) -> Summed {
        let mut sum = Summed::default();
        for Traffic { reads, writes, read_latencies, write_latencies } in
            self.seats.metrics().map(|lane| &lane.traffic[at])
        {
            // A histogram has 4.7 KiB, and most lanes have never used most stores. So unused
            // histograms are skipped.
            for (count, latencies, all, sampled) in [
                (reads, read_latencies, &mut sum.reads, &mut sum.read_latencies),
                (writes, write_latencies, &mut sum.writes, &mut sum.write_latencies),
            ] {
                *all += count.get();
                if count.get() > 0 {
                    latencies.add_to(sampled);
                }
            }
        }
        sum
    }
}

/// The [`Traffic`] of several lanes or stores, added up.
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
