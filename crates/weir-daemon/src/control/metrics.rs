//! The daemon's metrics: each has its name, unit and help once, in [`METRICS`], and its value from
//! a [`Status`].
//!
//! Names follow Prometheus' conventions: a base unit, and `_total` at the end of a counter's name.
//! The encoder adds both.

use super::program::Program;
use super::status::{Export, Status, Traffic};
use prometheus_client::collector::Collector;
use prometheus_client::encoding::text::encode;
use prometheus_client::encoding::{DescriptorEncoder, NoLabelSet};
use prometheus_client::metrics::MetricType;
use prometheus_client::registry::{Registry, Unit};
use std::fmt;

/// The text format of an answer to a scrape.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Format {
    /// The format that Prometheus asks for.
    OpenMetrics,
    /// The older text format. curl gets it, and promtool reads it.
    Text,
}

impl Format {
    /// The media type, as the `Content-Type` header has it.
    pub fn content_type(self) -> &'static str {
        match self {
            Format::OpenMetrics => "application/openmetrics-text; version=1.0.0; charset=utf-8",
            Format::Text => "text/plain; version=0.0.4; charset=utf-8",
        }
    }
}

/// A label and its value.
type Label<'a> = (&'static str, &'a str);

/// A function that takes the samples of a counter or a gauge.
type Counts<'a> = &'a mut dyn FnMut(&[Label<'_>], u64);
type Levels<'a> = &'a mut dyn FnMut(&[Label<'_>], f64);

/// One metric.
struct Metric {
    /// The metric's name, without unit and `_total`.
    name: &'static str,
    unit: Option<Unit>,
    help: &'static str,
    read: Read,
}

/// The function that reads a metric's samples.
enum Read {
    Counter(fn(&Status, Counts<'_>)),
    Gauge(fn(&Status, Levels<'_>)),
    Histogram(fn(&Status) -> &Traffic),
}

use Read::{Counter, Gauge, Histogram};

/// Upper bounds of the latencies' buckets, in nanoseconds: 1, 2 and 5 in each power of ten from 100
/// ns to 10 s.
const BOUNDS: [u64; 25] = {
    let mut bounds = [0; 25];
    let (mut at, mut decade) = (0, 100);
    while at < bounds.len() {
        bounds[at] = decade * [1, 2, 5][at % 3];
        if at % 3 == 2 {
            decade *= 10;
        }
        at += 1;
    }
    bounds
};

/// The labels of a front end's samples.
fn labels(export: &Export) -> [Label<'_>; 2] {
    [("kind", &export.kind), ("address", &export.address)]
}

fn of_programs(status: &Status, add: Levels<'_>, of: fn(&Program) -> f64) {
    for program in &status.programs {
        add(&[("pid", &program.pid.to_string()), ("name", &program.name)], of(program));
    }
}

fn count_programs(status: &Status, add: Counts<'_>, of: fn(&Program) -> u64) {
    for program in &status.programs {
        add(&[("pid", &program.pid.to_string()), ("name", &program.name)], of(program));
    }
}

const METRICS: &[Metric] = &[
    Metric {
        name: "weir_build_info",
        unit: None,
        help: "Always 1; the label has the daemon's version",
        read: Gauge(|status, add| add(&[("version", &status.version)], 1.0)),
    },
    Metric {
        name: "weir_uptime",
        unit: Some(Unit::Seconds),
        help: "Time since the daemon began to serve",
        read: Gauge(|status, add| add(&[], status.uptime_s as f64)),
    },
    Metric {
        name: "weir_volume_size",
        unit: Some(Unit::Bytes),
        help: "Size of the device",
        read: Gauge(|status, add| add(&[], status.volume.bytes as f64)),
    },
    Metric {
        name: "weir_volume_pages",
        unit: None,
        help: "Pages of the device: stored in a slot, filled with one value, or free",
        read: Gauge(|status, add| {
            let volume = &status.volume;
            for (state, pages) in
                [("stored", volume.stored), ("filled", volume.filled), ("free", volume.free)]
            {
                add(&[("state", state)], pages as f64);
            }
        }),
    },
    Metric {
        name: "weir_map_size",
        unit: Some(Unit::Bytes),
        help: "Memory for the page map and the slot records",
        read: Gauge(|status, add| add(&[], status.volume.map_bytes as f64)),
    },
    Metric {
        name: "weir_compressed_stored",
        unit: Some(Unit::Bytes),
        help: "Where pages are compressed: bytes of the pages in stores, before compression",
        read: Gauge(|status, add| {
            status.volume.compress.iter().for_each(|it| add(&[], it.stored_bytes as f64));
        }),
    },
    Metric {
        name: "weir_compressed_held",
        unit: Some(Unit::Bytes),
        help: "Where pages are compressed: bytes of the slots in which they lie",
        read: Gauge(|status, add| {
            status.volume.compress.iter().for_each(|it| add(&[], it.held_bytes as f64));
        }),
    },
    Metric {
        name: "weir_pages_read",
        unit: None,
        help: "Pages read",
        read: Counter(|status, add| add(&[], status.read.traffic.pages)),
    },
    Metric {
        name: "weir_pages_written",
        unit: None,
        help: "Pages written",
        read: Counter(|status, add| add(&[], status.write.traffic.pages)),
    },
    Metric {
        name: "weir_pages_discarded",
        unit: None,
        help: "Pages discarded",
        read: Counter(|status, add| add(&[], status.discarded)),
    },
    Metric {
        name: "weir_read_latency",
        unit: Some(Unit::Seconds),
        help: "Time that a read of pages took within the daemon, of a sample, to 6 %",
        read: Histogram(|status| &status.read.traffic),
    },
    Metric {
        name: "weir_write_latency",
        unit: Some(Unit::Seconds),
        help: "Time that a write of pages took within the daemon, of a sample, to 6 %",
        read: Histogram(|status| &status.write.traffic),
    },
    Metric {
        name: "weir_read_faults",
        unit: None,
        help: "Pages whose read failed",
        read: Counter(|status, add| add(&[], status.read.faults)),
    },
    Metric {
        name: "weir_write_faults",
        unit: None,
        help: "Pages whose write failed",
        read: Counter(|status, add| add(&[], status.write.faults)),
    },
    Metric {
        name: "weir_corrupt_pages",
        unit: None,
        help: "Among the read faults: pages whose content was not what had been written",
        read: Counter(|status, add| add(&[], status.read.corrupt)),
    },
    Metric {
        name: "weir_store_state",
        unit: None,
        help: "1 for the state that a store is in, 0 for the others",
        read: Gauge(|status, add| {
            for store in &status.stores {
                for state in ["online", "draining", "unreachable", "lost"] {
                    let is_in = f64::from(u8::from(store.state == state));
                    add(&[("store", &store.url), ("state", state)], is_in);
                }
            }
        }),
    },
    Metric {
        name: "weir_store_slots",
        unit: None,
        help: "Pages that a store has room for",
        read: Gauge(|status, add| {
            status.stores.iter().for_each(|store| add(&[("store", &store.url)], store.slots as f64));
        }),
    },
    Metric {
        name: "weir_store_slots_used",
        unit: None,
        help: "Slots of a store that are in use",
        read: Gauge(|status, add| {
            status.stores.iter().for_each(|store| add(&[("store", &store.url)], store.slots_used as f64));
        }),
    },
    Metric {
        name: "weir_store_memory",
        unit: Some(Unit::Bytes),
        help: "A store's memory: held with pages in it, in reserve, emptying, or given back to its owner",
        read: Gauge(|status, add| {
            for store in &status.stores {
                let chunks = store.chunks;
                for (state, count) in [
                    ("held", chunks.held),
                    ("reserve", chunks.reserve),
                    ("emptying", chunks.emptying),
                    ("given_back", chunks.given_back),
                ] {
                    let bytes = (count * store.chunk_bytes) as f64;
                    add(&[("store", &store.url), ("state", state)], bytes);
                }
            }
        }),
    },
    Metric {
        name: "weir_store_pages_read",
        unit: None,
        help: "Reads of pages that lay in a store",
        read: Counter(|status, add| {
            let reads = status.stores.iter().filter_map(|store| Some((store, store.read.as_ref()?)));
            reads.for_each(|(store, read)| add(&[("store", &store.url)], read.pages));
        }),
    },
    Metric {
        name: "weir_store_pages_written",
        unit: None,
        help: "Pages written to a store",
        read: Counter(|status, add| {
            let writes = status.stores.iter().filter_map(|store| Some((store, store.write.as_ref()?)));
            writes.for_each(|(store, write)| add(&[("store", &store.url)], write.pages));
        }),
    },
    Metric {
        name: "weir_given_back",
        unit: Some(Unit::Bytes),
        help: "Memory given back to its owner",
        read: Counter(|status, add| add(&[], status.background.given_back_bytes)),
    },
    Metric {
        name: "weir_taken",
        unit: Some(Unit::Bytes),
        help: "Memory taken again",
        read: Counter(|status, add| add(&[], status.background.taken_bytes)),
    },
    Metric {
        name: "weir_pages_moved",
        unit: None,
        help: "Pages moved: out of chunks that were given back, to a faster store, or together in packs",
        read: Counter(|status, add| {
            let moved = &status.background;
            for (task, pages) in
                [("give_back", moved.moved_out), ("promote", moved.moved_up), ("compact", moved.compacted)]
            {
                add(&[("task", task)], pages);
            }
        }),
    },
    Metric {
        name: "weir_front_end_connections",
        unit: None,
        help: "Connections of a front end that are in use; queues of a block device",
        read: Gauge(|status, add| {
            status.exports.iter().for_each(|export| add(&labels(export), export.connections as f64));
        }),
    },
    Metric {
        name: "weir_front_end_connections_limit",
        unit: None,
        help: "Connections of a front end that can be in use",
        read: Gauge(|status, add| {
            status.exports.iter().for_each(|export| add(&labels(export), export.connections_most as f64));
        }),
    },
    Metric {
        name: "weir_front_end_requests",
        unit: None,
        help: "Requests that came by a front end",
        read: Counter(|status, add| {
            status.exports.iter().for_each(|export| add(&labels(export), export.requests));
        }),
    },
    Metric {
        name: "weir_front_end_errors",
        unit: None,
        help: "Requests that were answered with an error",
        read: Counter(|status, add| {
            status.exports.iter().for_each(|export| add(&labels(export), export.errors));
        }),
    },
    Metric {
        name: "weir_program_limit",
        unit: Some(Unit::Bytes),
        help: "Memory of a bounded program that may be resident",
        read: Gauge(|status, add| of_programs(status, add, |program| program.limit_bytes as f64)),
    },
    Metric {
        name: "weir_program_resident",
        unit: Some(Unit::Bytes),
        help: "Memory of a bounded program that is resident and counts for its limit",
        read: Gauge(|status, add| of_programs(status, add, |program| program.resident_bytes as f64)),
    },
    Metric {
        name: "weir_program_blocks",
        unit: None,
        help: "Blocks of 2 MiB of a bounded program that are in place",
        read: Gauge(|status, add| of_programs(status, add, |program| program.blocks as f64)),
    },
    Metric {
        name: "weir_program_single_pages",
        unit: None,
        help: "Single pages of a bounded program that are in place",
        read: Gauge(|status, add| of_programs(status, add, |program| program.single_pages as f64)),
    },
    Metric {
        name: "weir_program_faults",
        unit: None,
        help: "Page faults of a bounded program that its pager has resolved",
        read: Counter(|status, add| count_programs(status, add, |program| program.faults)),
    },
    Metric {
        name: "weir_program_fault_time",
        unit: Some(Unit::Seconds),
        help: "Time that threads of a bounded program have waited for these, as its pager saw it",
        read: Gauge(|status, add| of_programs(status, add, |program| program.fault_s)),
    },
    Metric {
        name: "weir_program_prefetched",
        unit: None,
        help: "Blocks of a bounded program that were prefetched",
        read: Counter(|status, add| count_programs(status, add, |program| program.prefetched)),
    },
    Metric {
        name: "weir_program_prefetched_used",
        unit: None,
        help: "Prefetched blocks of a bounded program that were used",
        read: Counter(|status, add| count_programs(status, add, |program| program.prefetched_used)),
    },
    Metric {
        name: "weir_program_lost_blocks",
        unit: None,
        help: "Blocks of a bounded program that could not be read back",
        read: Counter(|status, add| count_programs(status, add, |program| program.lost_blocks)),
    },
    Metric {
        name: "weir_program_silent",
        unit: Some(Unit::Seconds),
        help: "Time for which the pager of a bounded program has not answered",
        read: Gauge(|status, add| of_programs(status, add, |program| program.silent_s)),
    },
    Metric {
        name: "weir_carries_swap",
        unit: None,
        help: "1 if the device is to carry swap",
        read: Gauge(|status, add| add(&[], f64::from(u8::from(status.protection.swap)))),
    },
    Metric {
        name: "weir_protection",
        unit: None,
        help: "1 for each protection against waiting for oneself under swap that is in force",
        read: Gauge(|status, add| {
            let protection = &status.protection;
            for (name, holds) in [
                ("io_flusher", protection.io_flusher),
                ("memory_locked", protection.memory_locked),
                ("oom_exempt", protection.oom_exempt),
            ] {
                add(&[("name", name)], f64::from(u8::from(holds)));
            }
        }),
    },
    Metric {
        name: "weir_io_allocations",
        unit: None,
        help: "Allocations on I/O threads since the start; anything but 0 is a bug",
        read: Counter(|status, add| add(&[], status.protection.io_allocations)),
    },
];

/// The metrics of a daemon at one moment.
pub fn render(status: Status, format: Format) -> String {
    let mut registry = Registry::default();
    registry.register_collector(Box::new(Snapshot(status)));
    let mut text = String::new();
    encode(&mut text, &registry).expect("writing into a string does not fail");
    match format {
        Format::OpenMetrics => text,
        Format::Text => text.lines().filter_map(older).collect(),
    }
}

/// Translates a line of OpenMetrics to the older format. That format has no lines of units and no
/// end line, and its lines about a counter name it with `_total`.
fn older(line: &str) -> Option<String> {
    let Some((what, rest)) = line.strip_prefix("# ").and_then(|line| line.split_once(' ')) else {
        return (line != "# EOF").then(|| format!("{line}\n"));
    };
    let (family, said) = rest.split_once(' ')?;
    let is_counter = |metric: &Metric| matches!(metric.read, Counter(_)) && metric.family() == family;
    let total = if METRICS.iter().any(is_counter) { "_total" } else { "" };
    (what != "UNIT").then(|| format!("# {what} {family}{total} {said}\n"))
}

#[derive(Debug)]
struct Snapshot(Status);

impl Collector for Snapshot {
    fn encode(&self, mut encoder: DescriptorEncoder<'_>) -> fmt::Result {
        METRICS.iter().try_for_each(|metric| metric.encode(&self.0, &mut encoder))
    }
}

impl Metric {
    /// The metric's name with its unit.
    fn family(&self) -> String {
        let unit = self.unit.as_ref().map_or(String::new(), |unit| format!("_{}", unit.as_str()));
        format!("{}{unit}", self.name)
    }

    fn kind(&self) -> MetricType {
        match self.read {
            Counter(_) => MetricType::Counter,
            Gauge(_) => MetricType::Gauge,
            Histogram(_) => MetricType::Histogram,
        }
    }

    fn encode(&self, status: &Status, encoder: &mut DescriptorEncoder<'_>) -> fmt::Result {
        let mut into = encoder.encode_descriptor(self.name, self.help, self.unit.as_ref(), self.kind())?;
        let mut outcome = Ok(());
        match self.read {
            Counter(read) => read(status, &mut |labels, value| {
                outcome = outcome.and_then(|()| match labels {
                    [] => into.encode_counter::<NoLabelSet, _, f64>(&value, None),
                    _ => into.encode_family(&labels)?.encode_counter::<NoLabelSet, _, f64>(&value, None),
                });
            }),
            Gauge(read) => read(status, &mut |labels, value| {
                outcome = outcome.and_then(|()| match labels {
                    [] => into.encode_gauge(&value),
                    _ => into.encode_family(&labels)?.encode_gauge(&value),
                });
            }),
            Histogram(read) => {
                let latencies = &read(status).latencies_ns;
                let count = latencies.iter().map(|(_, count)| count).sum();
                let sum =
                    latencies.iter().fold(0.0, |sum, &(ns, count)| sum + ns as f64 / 1e9 * count as f64);
                outcome = into.encode_histogram::<NoLabelSet>(sum, count, &buckets(latencies), None);
            }
        }
        outcome
    }
}

/// Counts pages by the buckets of [`BOUNDS`]. Takes pairs of a latency in nanoseconds and a number
/// of pages. Returns pairs of a bucket's upper bound in seconds and its number of pages. The last
/// bucket has no bound.
fn buckets(latencies_ns: &[(u64, u64)]) -> Vec<(f64, u64)> {
    let mut buckets: Vec<(f64, u64)> = BOUNDS.iter().map(|&ns| (ns as f64 / 1e9, 0)).collect();
    buckets.push((f64::INFINITY, 0));
    for &(ns, count) in latencies_ns {
        let at = BOUNDS.partition_point(|&bound| bound < ns);
        buckets[at].1 += count;
    }
    buckets
}

#[cfg(test)]
mod tests {
    use super::*;

    /// A table of the metrics as a scrape has them: names, kinds and help.
    fn table() -> String {
        let row = |metric: &Metric| {
            let (total, kind) = match metric.read {
                Counter(_) => ("_total", "counter"),
                Gauge(_) => ("", "gauge"),
                Histogram(_) => ("", "histogram"),
            };
            format!("| `{}{total}` | {kind} | {} |\n", metric.family(), metric.help)
        };
        METRICS.iter().map(row).collect()
    }

    #[test]
    fn the_page_about_metrics_has_each_of_them_and_no_other() {
        let page = include_str!("../../../../docs/metrics.md");
        let rows: String =
            page.lines().filter(|line| line.starts_with("| `")).map(|line| format!("{line}\n")).collect();
        assert!(rows == table(), "docs/metrics.md should have:\n{}", table());
    }

    #[test]
    fn a_latency_falls_into_the_bucket_whose_bound_it_does_not_exceed() {
        let found = buckets(&[(50, 1), (100, 2), (101, 3), (10_000_000_000, 4), (20_000_000_000, 5)]);
        let filled: Vec<_> = found.into_iter().filter(|(_, count)| *count > 0).collect();
        assert_eq!(filled, [(1e-7, 3), (2e-7, 3), (10.0, 4), (f64::INFINITY, 5)]);
    }

    #[test]
    fn the_older_format_names_counters_as_their_samples_and_has_no_units() {
        for (line, expected) in [
            ("# HELP weir_given_back_bytes Memory", Some("# HELP weir_given_back_bytes_total Memory\n")),
            ("# TYPE weir_given_back_bytes counter", Some("# TYPE weir_given_back_bytes_total counter\n")),
            ("# TYPE weir_uptime_seconds gauge", Some("# TYPE weir_uptime_seconds gauge\n")),
            ("# UNIT weir_uptime_seconds seconds", None),
            ("weir_given_back_bytes_total 5", Some("weir_given_back_bytes_total 5\n")),
            ("# EOF", None),
        ] {
            assert_eq!(older(line).as_deref(), expected, "{line}");
        }
    }

    #[test]
    fn names_are_told_apart_and_say_what_they_count() {
        for (at, metric) in METRICS.iter().enumerate() {
            assert!(METRICS[..at].iter().all(|other| other.name != metric.name), "{} twice", metric.name);
            assert!(metric.name.starts_with("weir_") && !metric.name.ends_with("_total"), "{}", metric.name);
            assert!(!metric.help.ends_with('.') && metric.help.len() <= 100, "{}", metric.name);
        }
    }
}
