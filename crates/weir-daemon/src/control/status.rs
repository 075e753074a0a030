//! The daemon's status, as JSON and as lines for people.

use super::condition::Condition;
use super::health::{self, Problem};
use super::program::Program;
use serde::{Deserialize, Serialize};
use std::fmt;
use std::sync::{Mutex, PoisonError};
use std::time::Duration;
use weir_core::metrics::{Distribution, quantile};
use weir_core::{ByteSize, PAGE_SIZE};
use weir_volume::VolumeStatus;

/// The daemon's status at one moment.
#[derive(Clone, PartialEq, Debug, Serialize, Deserialize)]
pub struct Status {
    /// The schema's version: [`SCHEMA`](super::SCHEMA).
    pub schema: u32,
    /// The daemon's version.
    pub version: String,
    /// The daemon's process id.
    pub pid: u32,
    /// Whether an upgrade failed: the program that is installed now does not serve, so this daemon
    /// runs the one before it.
    #[serde(default, skip_serializing_if = "std::ops::Not::not")]
    pub upgrade_failed: bool,
    /// Seconds since the daemon began to serve.
    pub uptime_s: u64,
    /// The sizes and pages of all volumes together.
    pub volume: Volume,
    /// Each volume by name, the daemon's own first, if it has one.
    #[serde(default)]
    pub volumes: Vec<NamedVolume>,
    /// Bytes that further volumes may have together.
    #[serde(default)]
    pub free_bytes: u64,
    /// The stores that hold the device's pages, in the order in which they are filled.
    pub stores: Vec<Store>,
    /// Counts and latencies of reads.
    pub read: Io,
    /// Counts and latencies of writes.
    pub write: Io,
    /// Bytes read and written a second, over the last second or more.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub rates: Option<Rates>,
    /// Number of pages discarded.
    pub discarded: u64,
    /// Counts of the movers: memory given back and taken again.
    pub background: Background,
    /// The daemon's front ends.
    pub exports: Vec<Export>,
    /// Devices of the kernel's NBD client that are connected again if the daemon dies.
    #[serde(default)]
    pub attached: Vec<String>,
    /// The bounded programs: `weir run` limits their RAM, and this daemon's volume holds the rest
    /// of their memory.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub programs: Vec<Program>,
    /// The bound on how deeply processors may sleep during bursts of requests; null unless an
    /// option asked for it.
    #[serde(default)]
    pub cpu_latency: Option<CpuLatency>,
    /// The protections that keep the daemon from waiting for itself.
    pub protection: Protection,
}

/// The counts of the device's pages.
#[derive(Clone, PartialEq, Debug, Serialize, Deserialize)]
pub struct Volume {
    /// The device's size in bytes.
    pub bytes: u64,
    /// The device's size in pages.
    pub pages: u64,
    /// Number of pages that have a slot in a store.
    pub stored: u64,
    /// Number of pages that repeat one value and take no slot.
    pub filled: u64,
    /// Number of pages that were never written, or were discarded.
    pub free: u64,
    /// Bytes of memory for the page map and the slot records.
    pub map_bytes: u64,
    /// The gain of compression, if pages are or were compressed.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub compress: Option<Compress>,
}

/// A volume of the daemon, by name.
#[derive(Clone, PartialEq, Eq, Debug, Serialize, Deserialize)]
pub struct NamedVolume {
    /// The volume's name, by which NBD clients ask for it.
    pub name: String,
    /// The volume's size in bytes.
    pub bytes: u64,
    /// Whether the volume is the daemon's own, which lives as long as the daemon.
    #[serde(default)]
    pub is_own: bool,
    /// Whether the volume is losing pages, so that no client can have it now.
    #[serde(default, skip_serializing_if = "std::ops::Not::not")]
    pub is_changing: bool,
}

/// The gain of compression.
#[derive(Clone, PartialEq, Debug, Serialize, Deserialize)]
pub struct Compress {
    /// The algorithm, as `--compress` takes it; `none` if only an earlier daemon compressed pages.
    pub algorithm: String,
    /// Bytes of the pages in stores, before compression.
    pub stored_bytes: u64,
    /// Bytes of the slots that the stored pages take, compressed or not.
    pub held_bytes: u64,
    /// `stored_bytes` divided by `held_bytes`; null if nothing is stored.
    pub ratio: Option<f64>,
    /// Number of pages that share a slot with others.
    pub packed: u64,
    /// Number of slots that hold several compressed pages.
    pub packs: u64,
}

/// The status of a store.
#[derive(Clone, PartialEq, Debug, Serialize, Deserialize)]
pub struct Store {
    /// The store's URL.
    pub url: String,
    /// The store's state: `online`, `draining`, `unreachable` or `lost`.
    pub state: String,
    /// The condition of each card of the store: state, since when, and why. Daemons before 0.1.0 of
    /// November 2026 do not send it.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub conditions: Vec<Condition>,
    /// Number of the store's slots: pages that it has room for.
    pub slots: u64,
    /// Number of the store's slots that are in use.
    pub slots_used: u64,
    /// The size of the store's chunks in bytes.
    pub chunk_bytes: u64,
    /// The store's chunks, counted by state.
    pub chunks: Chunks,
    /// Number and latencies of the reads of pages that lay in the store, including reads that
    /// failed. Daemons before 0.1.0 of November 2026 do not send it.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub read: Option<Traffic>,
    /// Number and latencies of the writes to the store. Daemons before 0.1.0 of November 2026 do
    /// not send it.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub write: Option<Traffic>,
    /// The fraction of all reads whose page lay in the store; null before the first read. Pages of
    /// one repeated value lie in no store.
    #[serde(default)]
    pub hit_rate: Option<f64>,
}

/// Numbers of a store's chunks, the parts in which memory is given back and taken.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Serialize, Deserialize)]
pub struct Chunks {
    /// Number of chunks that hold pages.
    pub held: u64,
    /// Number of chunks that have their memory and hold no page.
    pub reserve: u64,
    /// Number of chunks whose pages are moving out.
    pub emptying: u64,
    /// Number of chunks whose memory was given back to its owner.
    pub given_back: u64,
}

/// Counts of the workers since the start.
#[derive(Clone, Copy, PartialEq, Eq, Default, Debug, Serialize, Deserialize)]
pub struct Background {
    /// Bytes of memory given back.
    pub given_back_bytes: u64,
    /// Bytes a second of the last give-back.
    pub give_back_bytes_per_s: u64,
    /// Bytes of memory taken again.
    pub taken_bytes: u64,
    /// Bytes a second of the last take.
    pub take_bytes_per_s: u64,
    /// Number of pages moved out of chunks that were given back.
    pub moved_out: u64,
    /// Number of pages that were promoted to a faster store.
    pub moved_up: u64,
    /// Number of pages that compaction moved out of half-empty packs.
    #[serde(default)]
    pub compacted: u64,
    /// Number of worker threads.
    pub threads: u64,
    /// Number of items that the workers' queues ran.
    pub items: u64,
    /// Number of batches in which the workers' queues ran their items.
    pub batches: u64,
    /// Largest number of items in one batch of the workers' queues.
    pub longest_batch: u64,
    /// Number of times that a sleeping thread was woken.
    pub wakes: u64,
}

/// Counts and latencies of the pages read, or of the pages written, since the start.
#[derive(Clone, PartialEq, Debug, Serialize, Deserialize)]
pub struct Io {
    /// The number of pages read or written, and their latencies.
    #[serde(flatten)]
    pub traffic: Traffic,
    /// Number of pages whose read or write failed.
    pub faults: u64,
    /// Number of the failed pages whose content was not what had been written.
    pub corrupt: u64,
}

/// Number and latencies of the pages read or written since the start. The latencies are those of a
/// sample, exact to 6 %.
#[derive(Clone, PartialEq, Default, Debug, Serialize, Deserialize)]
pub struct Traffic {
    /// Number of pages read or written.
    pub pages: u64,
    /// The median latency in microseconds; null before the first page.
    pub p50_us: Option<f64>,
    /// The 99th percentile of latency, in microseconds.
    pub p99_us: Option<f64>,
    /// The 99.9th percentile of latency, in microseconds.
    pub p999_us: Option<f64>,
    /// All sampled latencies, counted by interval: pairs of an interval's longest latency in
    /// nanoseconds and the number of pages in it, in rising order. The difference of the numbers of
    /// two statuses is the number of pages between them.
    #[serde(default)]
    pub latencies_ns: Vec<(u64, u64)>,
}

/// Rates of reading and writing since an earlier status, at least a second ago; in the first
/// status, since the daemon's start.
#[derive(Clone, Copy, PartialEq, Debug, Serialize, Deserialize)]
pub struct Rates {
    /// Seconds over which the rates are computed.
    pub seconds: f64,
    /// Bytes read a second.
    pub read_bytes_per_s: u64,
    /// Bytes written a second.
    pub write_bytes_per_s: u64,
}

/// Counts of bytes at two earlier status requests, from which the next rates are computed. Rates
/// are computed from the later one only once it is a second old. So if two clients ask in turns,
/// neither shortens the time over which the other's rates are computed.
#[derive(Default, Debug)]
pub struct Looks(Mutex<Kept>);

#[derive(Default, Debug)]
struct Kept {
    /// The counts of an earlier look, from which the present rates are computed.
    then: Look,
    /// The counts of a later look. They take the place of `then` once they are a second old.
    next: Look,
}

#[derive(Clone, Copy, Default, Debug)]
struct Look {
    /// The time of the status request, counted from the daemon's start.
    at: Duration,
    read: u64,
    written: u64,
}

/// The status of a front end.
#[derive(Clone, PartialEq, Eq, Debug, Serialize, Deserialize)]
pub struct Export {
    /// The front end's kind: `nbd`, `ublk`, `fuse` or `share`.
    pub kind: String,
    /// The name of the pool's volume that the front end serves. The name is missing if the front
    /// end serves the daemon's own volume, or every volume by its name.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub volume: Option<String>,
    /// The front end's address, as `--nbd`, `--fuse` or `--share` took it, or the block device.
    pub address: String,
    /// Number of connections in use now; for a block device, of its queues.
    pub connections: u64,
    /// Largest number of connections that can be in use.
    pub connections_most: u64,
    /// Number of requests so far.
    pub requests: u64,
    /// Number of requests answered with an error.
    pub errors: u64,
}

/// The bound on how deeply processors may sleep, by `/dev/cpu_dma_latency`.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Serialize, Deserialize)]
pub struct CpuLatency {
    /// Whether the bound is in force now, during a burst of requests.
    pub held: bool,
    /// Number of bursts of requests since the start.
    pub bursts: u64,
}

/// The protections of [`weir_core::swap_safety`], and the count of the sealed allocator.
#[derive(Clone, PartialEq, Eq, Debug, Serialize, Deserialize)]
pub struct Protection {
    /// Whether the device is to carry swap.
    pub swap: bool,
    /// Whether `PR_SET_IO_FLUSHER` is set.
    pub io_flusher: bool,
    /// Whether all memory of the daemon is locked.
    pub memory_locked: bool,
    /// Whether the OOM killer passes over the daemon.
    pub oom_exempt: bool,
    /// Number of allocations on I/O threads since the start: any but zero is a bug.
    pub io_allocations: u64,
}

impl Io {
    /// Counts and latencies of a volume's reads.
    pub fn reads(of: &VolumeStatus) -> Self {
        let traffic = Traffic::new(of.reads, &of.read_latencies);
        Io { traffic, faults: of.read_faults, corrupt: of.corrupt }
    }

    /// Counts and latencies of a volume's writes.
    pub fn writes(of: &VolumeStatus) -> Self {
        Io { traffic: Traffic::new(of.writes, &of.write_latencies), faults: of.write_faults, corrupt: 0 }
    }
}

impl Traffic {
    fn new(pages: u64, latencies: &Distribution) -> Self {
        Self::of_sample(pages, latencies.buckets().collect())
    }

    fn of_sample(pages: u64, latencies_ns: Vec<(u64, u64)>) -> Self {
        let quantile = |share| quantile(latencies_ns.iter().copied(), share).map(|ns| ns as f64 / 1000.0);
        Traffic {
            pages,
            p50_us: quantile(0.5),
            p99_us: quantile(0.99),
            p999_us: quantile(0.999),
            latencies_ns,
        }
    }

    /// The traffic since an earlier look at the same daemon.
    pub fn since(&self, then: &Traffic) -> Traffic {
        let pages = self.pages.saturating_sub(then.pages);
        let was = |bound: u64| {
            let found = then.latencies_ns.binary_search_by_key(&bound, |(at_most, _)| *at_most);
            found.map_or(0, |at| then.latencies_ns[at].1)
        };
        let more = self.latencies_ns.iter().map(|&(bound, count)| (bound, count.saturating_sub(was(bound))));
        Traffic::of_sample(pages, more.filter(|(_, count)| *count > 0).collect())
    }
}

impl Looks {
    /// Shortest time over which rates are computed. Over shorter times they vary too much.
    const APART: Duration = Duration::from_secs(1);

    /// Computes the rates at the time `at`, from the bytes read and written. All three count from
    /// the daemon's start.
    pub fn look(&self, at: Duration, read: u64, written: u64) -> Rates {
        let now = Look { at, read, written };
        let mut kept = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        if at.saturating_sub(kept.next.at) >= Self::APART {
            kept.then = std::mem::replace(&mut kept.next, now);
        }
        let seconds = at.saturating_sub(kept.then.at).as_secs_f64().max(1e-3);
        let rate =
            |now: u64, then: u64| (now.saturating_sub(then) as f64 * PAGE_SIZE as f64 / seconds) as u64;
        Rates {
            seconds,
            read_bytes_per_s: rate(read, kept.then.read),
            write_bytes_per_s: rate(written, kept.then.written),
        }
    }
}

impl fmt::Display for Rates {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Rates { seconds, read_bytes_per_s, write_bytes_per_s } = *self;
        let rate = |bytes: u64| format!("{:.1} MB/s", bytes as f64 / 1e6);
        let (read, written) = (rate(read_bytes_per_s), rate(write_bytes_per_s));
        writeln!(f, "rate      {read} read, {written} written in the last {seconds:.1} s")
    }
}

impl fmt::Display for Traffic {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{} pages", self.pages)?;
        match (self.p50_us, self.p99_us) {
            (Some(p50), Some(p99)) => write!(f, ", p50 {p50:.1} us, p99 {p99:.1} us"),
            _ => Ok(()),
        }
    }
}

impl Volume {
    /// The status of a volume whose tables take `map_bytes`.
    pub fn of(status: &VolumeStatus, map_bytes: u64) -> Self {
        let pages = u64::from(status.pages);
        Volume {
            bytes: pages * PAGE_SIZE as u64,
            pages,
            stored: status.stored,
            filled: status.filled,
            // Lanes change the counts while this thread reads one count after another. So there may
            // seem to be more stored and filled pages than the device has. Then the number of free
            // pages is zero.
            free: pages.saturating_sub(status.stored + status.filled),
            map_bytes,
            compress: Compress::of(status),
        }
    }
}

impl Compress {
    fn of(status: &VolumeStatus) -> Option<Self> {
        let VolumeStatus { stored, packed, packs, compression, .. } = *status;
        if compression.is_none() && packed == 0 {
            return None;
        }
        // Lanes change these counts while this thread reads one count after another. Where the
        // difference would fall below zero, it is zero.
        let slots = (stored + packs).saturating_sub(packed);
        Some(Compress {
            algorithm: compression.map_or_else(|| "none".to_owned(), |algorithm| algorithm.to_string()),
            stored_bytes: stored * PAGE_SIZE as u64,
            held_bytes: slots * PAGE_SIZE as u64,
            ratio: (slots > 0).then(|| stored as f64 / slots as f64),
            packed,
            packs,
        })
    }
}

impl fmt::Display for Compress {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Compress { algorithm, packed, packs, .. } = self;
        let (stored, held) = (ByteSize(self.stored_bytes), ByteSize(self.held_bytes));
        write!(f, "compress  {algorithm}: {stored} of pages held in {held}")?;
        if let Some(ratio) = self.ratio {
            write!(f, ", {ratio:.2} to 1")?;
        }
        writeln!(f, "; {packed} pages share {packs} slots")
    }
}

impl Store {
    /// The status of one store. `reads` is the number of pages read from the whole volume.
    pub fn of(status: &weir_volume::StoreStatus, reads: u64) -> Self {
        Store {
            url: status.name.clone(),
            state: format!("{:?}", status.state).to_lowercase(),
            conditions: status.conditions.iter().map(Condition::of).collect(),
            slots: status.slots.into(),
            slots_used: status.used.into(),
            chunk_bytes: u64::from(status.chunks.slots) * PAGE_SIZE as u64,
            chunks: Chunks {
                held: status.chunks.held.into(),
                reserve: status.chunks.reserve.into(),
                emptying: status.chunks.emptying.into(),
                given_back: status.chunks.given_back.into(),
            },
            read: Some(Traffic::new(status.reads, &status.read_latencies)),
            write: Some(Traffic::new(status.writes, &status.write_latencies)),
            hit_rate: (reads > 0).then(|| status.reads as f64 / reads as f64),
        }
    }

    /// Notes in the status of a bounded program which of its daemon's stores are not online. A
    /// pager knows of errors alone, and a store that is away for a while has none yet.
    pub(crate) fn tell(stores: &[Store], program: &mut Program) {
        let members = stores.iter().flat_map(|store| &store.conditions);
        program.troubled = members.filter(|member| member.state != "online").cloned().collect();
        let states = ["lost", "unreachable", "draining"];
        let found = states.into_iter().find(|state| stores.iter().any(|store| store.state == *state));
        if let Some(state) = found.filter(|_| program.store == "online") {
            state.clone_into(&mut program.store);
        }
    }
}

impl fmt::Display for Background {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Background {
            moved_out, moved_up, compacted, threads, items, batches, longest_batch, wakes, ..
        } = self;
        let rate = |bytes: u64| format!("{:.1} GB/s", bytes as f64 / 1e9);
        writeln!(
            f,
            "memory    {} given back ({} last), {} taken ({} last); pages moved: {moved_out} out, {moved_up} promoted, {compacted} compacted",
            ByteSize(self.given_back_bytes),
            rate(self.give_back_bytes_per_s),
            ByteSize(self.taken_bytes),
            rate(self.take_bytes_per_s),
        )?;
        writeln!(
            f,
            "worker    {threads} threads, {items} items in {batches} batches ({longest_batch} at most), {wakes} wakes"
        )
    }
}

/// Columns of a terminal's line.
const COLUMNS: usize = 80;
/// Columns that a line's name takes. A line that is too long goes on in the next line, from this
/// column on.
const NAMES: usize = 10;

/// Breaks lines between words at a terminal's width.
fn wrapped(text: &str) -> String {
    let mut out = String::with_capacity(text.len());
    for line in text.lines() {
        if line.chars().count() <= COLUMNS {
            out.push_str(line);
        } else {
            let mut width = 0;
            // Each word keeps the spaces after it, since spaces align columns.
            for word in line.split_inclusive(' ') {
                if width > NAMES && width + word.trim_end().chars().count() > COLUMNS {
                    out.truncate(out.trim_end().len());
                    out.push('\n');
                    out.extend(std::iter::repeat_n(' ', NAMES));
                    width = NAMES;
                }
                out.push_str(word);
                width += word.chars().count();
            }
        }
        out.push('\n');
    }
    out
}

impl fmt::Display for Status {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&wrapped(&self.lines()?))
    }
}

impl Status {
    /// Memory gained, whether all is well, and the next step if it is not.
    fn summary(&self, f: &mut impl fmt::Write) -> fmt::Result {
        let gained = ByteSize(health::gained_bytes(self));
        writeln!(f, "gained    {gained} of RAM; the device has {}", ByteSize(self.volume.bytes))?;
        let problems = health::problems(self);
        if problems.is_empty() {
            writeln!(f, "health    all well")?;
        }
        for Problem { what, next } in problems {
            writeln!(f, "problem   {what}\n  next    {next}")?;
        }
        Ok(())
    }

    fn lines(&self) -> Result<String, fmt::Error> {
        use fmt::Write as _;
        let mut text = String::new();
        let f = &mut text;
        self.summary(f)?;
        let size = |pages: u64| ByteSize(pages * PAGE_SIZE as u64);
        let Volume { bytes, stored, filled, free, map_bytes, ref compress, .. } = self.volume;
        writeln!(f, "weir {}, process {}, up {} s", self.version, self.pid, self.uptime_s)?;
        writeln!(
            f,
            "volume    {}: {} stored, {} of one value, {} free; tables {}",
            ByteSize(bytes),
            size(stored),
            size(filled),
            size(free),
            ByteSize(map_bytes)
        )?;
        let (count, room) = (self.volumes.len(), ByteSize(self.free_bytes));
        match self.volumes.iter().find(|volume| volume.is_own) {
            Some(own) if count > 1 => {
                let own = &own.name;
                writeln!(f, "volumes   {count}, of which {own} is the daemon's own; room for {room} more")?;
            }
            None if count > 0 => writeln!(f, "volumes   {count}; room for {room} more")?,
            _ => {}
        }
        if let Some(compress) = compress {
            write!(f, "{compress}")?;
        }
        for store in &self.stores {
            let (used, slots) = (size(store.slots_used), size(store.slots));
            writeln!(f, "store     {} {}: {used} of {slots} in use", store.url, store.state)?;
            for condition in &store.conditions {
                writeln!(f, "          {condition}")?;
            }
            let Chunks { held, reserve, emptying, given_back } = store.chunks;
            writeln!(
                f,
                "          chunks of {}: {held} held, {reserve} reserve, {emptying} emptying, {given_back} given back",
                ByteSize(store.chunk_bytes)
            )?;
            let hits =
                store.hit_rate.map_or(String::new(), |rate| format!(" ({:.1} % of all)", rate * 100.0));
            if let (Some(read), Some(write)) = (&store.read, &store.write) {
                writeln!(f, "          read{hits}: {read}; written: {write}")?;
            }
        }
        write!(f, "{}", self.background)?;
        for export in &self.exports {
            let Export { kind, address, connections, connections_most, requests, errors, .. } = export;
            writeln!(
                f,
                "{kind:<10}{address}: {connections} of {connections_most} connections; {requests} requests, {errors} failed"
            )?;
        }
        if !self.attached.is_empty() {
            writeln!(f, "{:<10}{}", "attached", self.attached.join(", "))?;
        }
        for program in &self.programs {
            write!(f, "{program}")?;
        }
        if let Some(CpuLatency { held, bursts }) = self.cpu_latency {
            let now = if held { "bounded now" } else { "not bounded now" };
            writeln!(f, "{:<10}processors' sleep is {now}; {bursts} bursts", "latency")?;
        }
        writeln!(
            f,
            "{:<10}{:>12} {:>8} {:>8} {:>9} {:>9} {:>9}",
            "", "pages", "faults", "corrupt", "p50 us", "p99 us", "p99.9 us"
        )?;
        for (name, io) in [("read", &self.read), ("write", &self.write)] {
            let Io { traffic, faults, corrupt } = io;
            write!(f, "{name:<10}{:>12} {faults:>8} {corrupt:>8}", traffic.pages)?;
            for quantile in [traffic.p50_us, traffic.p99_us, traffic.p999_us] {
                match quantile {
                    Some(us) => write!(f, " {us:>9.1}")?,
                    None => write!(f, " {:>9}", "-")?,
                }
            }
            writeln!(f)?;
        }
        if let Some(rates) = self.rates {
            write!(f, "{rates}")?;
        }
        let Protection { swap, io_flusher, memory_locked, oom_exempt, io_allocations } = self.protection;
        let yes = |holds| if holds { "yes" } else { "no" };
        writeln!(
            f,
            "swap      {}; flusher {}, memory locked {}, exempt from OOM {}, allocations on I/O threads {io_allocations}",
            yes(swap),
            yes(io_flusher),
            yes(memory_locked),
            yes(oom_exempt)
        )?;
        Ok(text)
    }
}

impl Status {
    /// An example status after reading and writing `pages` pages. The first page took 9 us, and
    /// each later page 1.5 us. The quantiles are the same for any number of pages.
    #[doc(hidden)]
    pub fn example(pages: u64) -> Self {
        let slow = pages.min(1);
        let io = format!(
            r#"{{"pages":{pages},"faults":0,"corrupt":0,"p50_us":9.0,"p99_us":9.0,"p999_us":9.0,
                "latencies_ns":[[1500,{}],[9000,{slow}]]}}"#,
            pages - slow
        );
        let text = format!(
            r#"{{"schema":1,"version":"0","pid":7,"uptime_s":3,
                "volume":{{"bytes":1048576,"pages":256,"stored":64,"filled":0,"free":192,"map_bytes":4096}},
                "stores":[{{"url":"host:1MiB","state":"online","slots":256,"slots_used":64,"chunk_bytes":1048576,
                            "chunks":{{"held":1,"reserve":0,"emptying":0,"given_back":2}}}}],
                "read":{io},"write":{io},"discarded":0,
                "background":{{"given_back_bytes":0,"give_back_bytes_per_s":0,"taken_bytes":0,"take_bytes_per_s":0,
                               "moved_out":0,"moved_up":0,"threads":1,"items":0,"batches":0,"longest_batch":0,"wakes":0}},
                "exports":[{{"kind":"nbd","address":"unix:/x","connections":2,"connections_most":4,"requests":9,"errors":0}}],
                "protection":{{"swap":true,"io_flusher":true,"memory_locked":true,"oom_exempt":true,"io_allocations":0}}}}"#
        );
        serde_json::from_str(&text).expect("a status")
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_status_begins_with_the_gain_and_the_health_and_fits_80_columns() {
        let mut status = Status::example(1000);
        status.volume.bytes = 16 << 40;
        status.stores[0].url = "vram:0?size=16399MiB".to_owned();
        let lines = status.to_string();
        let head: Vec<&str> = lines.lines().take(2).collect();
        assert_eq!(head, ["gained    256KiB of RAM; the device has 16TiB", "health    all well"]);
        status.background.moved_out = u64::MAX;
        status.stores[0].state = "lost".to_owned();
        status.exports[0].address = format!("unix:/{}", "long-name/".repeat(6));
        status.stores[0].conditions = vec![Condition {
            part: "NVIDIA H200, 140.4GiB mapped, driver 580.159.04".to_owned(),
            state: "online".to_owned(),
            ways: vec!["mapped".to_owned(), "ring".to_owned(), "engine".to_owned()],
            missing: vec![],
            since_unix_s: 0,
            why: Some("cuEventQuery answered CUDA error 719 (launch failed), twice".to_owned()),
        }];
        let lines = status.to_string();
        assert!(
            lines.contains("problem   store vram:0?size=16399MiB is lost\n  next    weir off"),
            "{lines}"
        );
        for line in lines.lines() {
            assert!(line.chars().count() <= COLUMNS, "{} columns: {line}", line.chars().count());
        }
        let all = |text: &str| text.split_whitespace().collect::<Vec<_>>().join(" ");
        assert_eq!(all(&lines), all(&status.lines().expect("written")), "a break loses no word");
    }

    #[test]
    fn a_program_tells_of_the_stores_below_it_that_are_not_online_and_of_their_members() {
        let mut stores = Status::example(10).stores;
        let online = Program { pid: 7, store: "online".to_owned(), ..Program::default() };
        let over = |stores: &[Store], program: &Program| {
            let mut program = program.clone();
            Store::tell(stores, &mut program);
            program
        };
        assert_eq!(over(&stores, &online), online);
        let away = Condition {
            part: "10.0.0.1:6379".to_owned(),
            state: "unreachable".to_owned(),
            ways: vec![],
            missing: vec![],
            since_unix_s: 0,
            why: Some("it does not answer in time".to_owned()),
        };
        let there =
            Condition { part: "10.0.0.2:6379".to_owned(), state: "online".to_owned(), ..away.clone() };
        stores[0].conditions = vec![there, away];
        // Another member may have a copy of each page.
        let lines = over(&stores, &online).to_string();
        assert!(!lines.contains("its store"), "{lines}");
        assert!(lines.contains("          10.0.0.1:6379: unreachable, by no way, for "), "{lines}");
        assert!(lines.contains(" s: it does not answer in time\n") && !lines.contains("10.0.0.2"), "{lines}");
        "unreachable".clone_into(&mut stores[0].state);
        let lines = over(&stores, &online).to_string();
        assert!(lines.contains("          its store is unreachable\n"), "{lines}");
        // The pager has met an error, which says more.
        let failed = over(&stores, &Program { store: "failed".to_owned(), ..Program::default() });
        assert_eq!((failed.store.as_str(), failed.troubled.len()), ("failed", 1));
    }

    #[test]
    fn rates_are_those_since_a_look_at_least_a_second_ago_and_at_first_since_the_start() {
        let looks = Looks::default();
        let look = |at_ms: u64, read: u64, written: u64| {
            let rates = looks.look(Duration::from_millis(at_ms), read, written);
            let pages = |bytes: u64| bytes / PAGE_SIZE as u64;
            (rates.seconds, pages(rates.read_bytes_per_s), pages(rates.write_bytes_per_s))
        };
        assert_eq!(look(500, 50, 0), (0.5, 100, 0));
        assert_eq!(look(4000, 400, 800), (4.0, 100, 200));
        assert_eq!(look(4500, 900, 900), (4.5, 200, 200), "the look before was half a second ago");
        assert_eq!(look(6000, 1400, 800), (2.0, 500, 0));
        assert_eq!(look(6000, 1400, 800), (2.0, 500, 0));
        assert_eq!(look(7000, 1400, 1000), (1.0, 0, 200));
    }

    #[test]
    fn lines_show_the_rates_with_their_time() {
        let rates = Rates { seconds: 12.34, read_bytes_per_s: 1_500_000, write_bytes_per_s: 0 };
        assert_eq!(rates.to_string(), "rate      1.5 MB/s read, 0.0 MB/s written in the last 12.3 s\n");
    }
}
