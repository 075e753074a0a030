//! The output of `weir cache status`.

use serde::{Deserialize, Serialize};
use std::fmt;
use weir_cache::CacheStatus;
use weir_core::{ByteSize, PAGE_SIZE};
use weir_daemon::control::Export;
use weir_log::LogStatus;
use weir_store::MemberTraffic;

/// The state of a cache at one moment, as the control socket sends it and as `--json` prints it.
#[derive(Clone, PartialEq, Debug, Serialize, Deserialize)]
pub struct Report {
    schema: u32,
    home: String,
    store: String,
    /// The file that is served by FUSE, if there is one.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    file: Option<String>,
    /// The front ends, with their counts.
    #[serde(default)]
    exports: Vec<Export>,
    mode: String,
    bytes: u64,
    /// Bytes that the cache can hold with all of its memory.
    cache_bytes: u64,
    /// Bytes that the cache can hold now.
    #[serde(default)]
    open_bytes: u64,
    /// Bytes of the store.
    #[serde(default)]
    store_bytes: u64,
    /// Bytes of the store that the cache may use.
    #[serde(default)]
    size_bytes: u64,
    /// Bytes that were given back, of those that the cache may use.
    #[serde(default)]
    given_back_bytes: u64,
    used_bytes: u64,
    dirty_bytes: u64,
    index_bytes: u64,
    read_hits: u64,
    read_misses: u64,
    write_hits: u64,
    write_misses: u64,
    bypassed: u64,
    faults: u64,
    written_back_bytes: u64,
    /// Counts of runs of neighbouring pages that were written home together: of 1 page, 2 to 3, 4
    /// to 7, ..., 256 and more.
    written_back_rows: Vec<u64>,
    write_back_failed: u64,
    flushes: u64,
    flushes_failed: u64,
    #[serde(default)]
    disks: Vec<Disk>,
    /// The log's figures, if the home is a log.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    log: Option<LogReport>,
}

/// The traffic of a disk of the home.
#[derive(Clone, PartialEq, Debug, Serialize, Deserialize)]
struct Disk {
    path: String,
    written_bytes: u64,
    /// Counts of writes of 1 page, 2 to 3, 4 to 7, ..., 256.
    writes: Vec<u64>,
    read_bytes: u64,
    reads: u64,
    errors: u64,
}

/// A log at one moment.
#[derive(Clone, PartialEq, Debug, Serialize, Deserialize)]
struct LogReport {
    live_bytes: u64,
    disk_bytes: u64,
    segments: u32,
    free_segments: u32,
    stuck_segments: u32,
    written_bytes: u64,
    moved_bytes: u64,
    amplification: f64,
    corrupt: u64,
    map_bytes: u64,
    /// The figures of a durable log.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    durable: Option<DurableReport>,
}

/// A durable log at one moment.
#[derive(Clone, PartialEq, Debug, Serialize, Deserialize)]
struct DurableReport {
    identity: String,
    /// Number of commits, which are made for flushes and to free segments.
    commits: u64,
    failed_flushes: u64,
    journal_bytes: u64,
    /// Number of segments that are free after the next commit.
    dead_segments: u32,
}

impl Report {
    /// Bytes of the device.
    pub fn device_bytes(&self) -> u64 {
        self.bytes
    }

    /// Bytes of the store that the cache may use, and all of them.
    pub fn store_bytes(&self) -> (u64, u64) {
        (self.size_bytes, self.store_bytes)
    }

    /// The status of a cache. The two names are those of the home and of the store.
    pub fn new(
        status: &CacheStatus,
        [home, store]: [String; 2],
        exports: Vec<Export>,
        log: Option<&LogStatus>,
        disks: &[MemberTraffic],
    ) -> Self {
        let of_pages = |pages: u64| pages * PAGE_SIZE as u64;
        let bytes = |pages: u32| u64::from(pages) * PAGE_SIZE as u64;
        Report {
            schema: weir_daemon::control::SCHEMA,
            home,
            store,
            file: exports.iter().find(|it| it.kind == "fuse").map(|it| it.address.clone()),
            exports,
            mode: status.mode.to_string(),
            bytes: bytes(status.pages),
            cache_bytes: bytes(status.frames),
            open_bytes: bytes(status.open),
            store_bytes: status.store_bytes,
            size_bytes: status.size_bytes,
            given_back_bytes: status.given_back_bytes,
            used_bytes: bytes(status.used),
            dirty_bytes: bytes(status.dirty),
            index_bytes: status.index_bytes,
            read_hits: status.read_hits,
            read_misses: status.read_misses,
            write_hits: status.write_hits,
            write_misses: status.write_misses,
            bypassed: status.bypassed,
            faults: status.faults,
            written_back_bytes: status.written_back * PAGE_SIZE as u64,
            written_back_rows: status.rows.to_vec(),
            write_back_failed: status.write_back_failed,
            flushes: status.flushes,
            flushes_failed: status.flushes_failed,
            disks: disks
                .iter()
                .map(|disk| Disk {
                    path: disk.path.display().to_string(),
                    written_bytes: disk.written,
                    writes: disk.write_sizes.to_vec(),
                    read_bytes: disk.read,
                    reads: disk.reads,
                    errors: disk.failed,
                })
                .collect(),
            log: log.map(|log| LogReport {
                live_bytes: of_pages(log.live),
                disk_bytes: bytes(log.below_pages),
                segments: log.segments,
                free_segments: log.free,
                stuck_segments: log.stuck,
                written_bytes: of_pages(log.written),
                moved_bytes: of_pages(log.moved),
                amplification: log.amplification(),
                corrupt: log.corrupt,
                map_bytes: log.map_bytes + log.segment_bytes,
                durable: log.durable.map(|durable| DurableReport {
                    identity: format!("{:032x}", durable.identity),
                    commits: durable.commits,
                    failed_flushes: durable.failed_flushes,
                    journal_bytes: of_pages(durable.journal_pages),
                    dead_segments: durable.dead,
                }),
            }),
        }
    }
}

/// The share of `part` in the sum `part + rest`, in per cent.
fn share(part: u64, rest: u64) -> f64 {
    100.0 * part as f64 / ((part + rest).max(1)) as f64
}

impl fmt::Display for Report {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let size = ByteSize;
        writeln!(
            f,
            "cache     {} in front of {} ({}), {}",
            self.store,
            self.home,
            size(self.bytes),
            self.mode
        )?;
        for Export { kind, address, connections, connections_most, .. } in &self.exports {
            match kind.as_str() {
                "nbd" => {
                    writeln!(f, "nbd       {address}, {connections} of {connections_most} connections")?;
                }
                "ublk" => writeln!(f, "ublk      {address}, {connections} queues")?,
                _ => writeln!(f, "file      {address}")?,
            }
        }
        writeln!(
            f,
            "holds     {} of {}, {} of it dirty; index {}",
            size(self.used_bytes),
            size(self.open_bytes),
            size(self.dirty_bytes),
            size(self.index_bytes)
        )?;
        if self.size_bytes < self.store_bytes {
            let (size, all) = (size(self.size_bytes), size(self.store_bytes));
            writeln!(f, "size      {size} of the store's {all}; weir cache resize changes it")?;
        }
        if self.given_back_bytes > 0 {
            let away = size(self.given_back_bytes);
            writeln!(f, "memory    {away} of the store given back; weir take brings it again")?;
        }
        let Report { read_hits, read_misses, write_hits, write_misses, .. } = self;
        writeln!(
            f,
            "reads     {} pages, {:.1} % of them hits",
            read_hits + read_misses,
            share(*read_hits, *read_misses)
        )?;
        writeln!(
            f,
            "writes    {} pages, {:.1} % of them hits",
            write_hits + write_misses,
            share(*write_hits, *write_misses)
        )?;
        writeln!(f, "streams   {} pages went past the cache", self.bypassed)?;
        let rows: u64 = self.written_back_rows.iter().sum();
        let mean = self.written_back_bytes / rows.max(1);
        writeln!(
            f,
            "home      {} written back, {} at a time on average",
            size(self.written_back_bytes),
            size(mean)
        )?;
        for Disk { path, written_bytes, writes, errors, .. } in &self.disks {
            let count: u64 = writes.iter().sum();
            let mean = size(written_bytes / count.max(1));
            write!(
                f,
                "disk      {path}: {} written in {count} writes of {mean} on average",
                size(*written_bytes)
            )?;
            if *errors > 0 {
                write!(f, ", {errors} I/Os failed")?;
            }
            writeln!(f)?;
        }
        if let Some(log) = &self.log {
            writeln!(
                f,
                "log       {} live on {}, {:.2} times as much written as handed to it; {} of {} segments free; map {}",
                size(log.live_bytes),
                size(log.disk_bytes),
                log.amplification,
                log.free_segments,
                log.segments,
                size(log.map_bytes)
            )?;
            if let Some(durable) = &log.durable {
                writeln!(
                    f,
                    "durable   {}; {} commits, {} in the journal, {} segments wait for a commit",
                    durable.identity,
                    durable.commits,
                    size(durable.journal_bytes),
                    durable.dead_segments
                )?;
            }
            if log.corrupt > 0 || log.stuck_segments > 0 {
                writeln!(
                    f,
                    "log       {} pages were not what was written, {} segments cannot be cleaned",
                    log.corrupt, log.stuck_segments
                )?;
            }
        }
        writeln!(f, "flushes   {}, {} of them failed", self.flushes, self.flushes_failed)?;
        if self.faults > 0 || self.write_back_failed > 0 {
            writeln!(
                f,
                "errors    {} pages of requests, {} of the write-back",
                self.faults, self.write_back_failed
            )?;
        }
        Ok(())
    }
}
