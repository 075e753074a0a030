//! `weir bench disk`: a `file:` store beside fio's own io_uring engine, on the same file system, in
//! turns.
//!
//! The loads are random pages, one at a time and 32 at a time, and runs of 1 MiB. Each case runs
//! three ways. Weir with encryption is the usual way. Weir without encryption (`*_clear`) shows the
//! cost of the cipher. fio runs on a second file, with O_DIRECT, registered buffers and registered
//! files. That is as close to the disk as user space gets. Both files are written once first, so
//! that no run pays for the first touch of an allocated block.

mod fio;
mod load;

use crate::report::{Goal, Report, Row, Runs};
use crate::steps::Steps;
use std::path::PathBuf;
use std::time::Duration;
use weir_core::ByteSize;
use weir_store::{FileStore, FileUrl, OpenError};

/// The place and length of the measurement.
#[derive(Clone, Debug)]
pub struct Options {
    /// A directory on the file system under test.
    pub directory: PathBuf,
    /// The size of each of the two files.
    pub size: ByteSize,
    /// Time that a case runs for reads, and again for writes.
    pub time: Duration,
    /// Number of runs.
    pub runs: usize,
}

impl Default for Options {
    fn default() -> Self {
        Options {
            directory: "/var/tmp".into(),
            size: ByteSize(1 << 30),
            time: Duration::from_secs(1),
            runs: 5,
        }
    }
}

/// The reason why nothing could be measured.
#[derive(Debug, thiserror::Error)]
pub enum DiskError {
    /// The store cannot be opened.
    #[error(transparent)]
    Open(#[from] OpenError),
    /// An operation of the store failed.
    #[error("the store failed in the middle of {case}: {fault}; look at the kernel's log")]
    Fault {
        /// The name of the case that was running.
        case: &'static str,
        /// The fault of the store's operation.
        fault: weir_store::Fault,
    },
    /// fio, which is the control, failed.
    #[error("fio cannot run: {0}; install the package fio")]
    Fio(String),
    /// A file of the benchmark cannot be removed.
    #[error("{path}: cannot be removed")]
    Remove {
        /// The path of the file.
        path: PathBuf,
        /// The system's error.
        source: std::io::Error,
    },
}

/// The load on the disk.
#[derive(Clone, Copy, Debug)]
struct Case {
    name: &'static str,
    write: bool,
    /// Number of operations that are submitted together, each of `pages` slots in a row.
    batch: usize,
    pages: usize,
}

const CASES: [Case; 6] = [
    Case { name: "qd1_read", write: false, batch: 1, pages: 1 },
    Case { name: "qd1_write", write: true, batch: 1, pages: 1 },
    Case { name: "1x32_read", write: false, batch: 32, pages: 1 },
    Case { name: "1x32_write", write: true, batch: 32, pages: 1 },
    Case { name: "seq_read", write: false, batch: 4, pages: 256 },
    Case { name: "seq_write", write: true, batch: 4, pages: 256 },
];

/// The figures of one run of a case, on Weir or the control.
#[derive(Clone, Copy, Debug, Default)]
struct Figures {
    pages_per_second: f64,
    p50_us: f64,
    p99_us: f64,
}

/// The figures of several runs of a case, on Weir or the control.
#[derive(Default)]
struct Way {
    pages_per_second: Runs,
    p50_us: Runs,
    p99_us: Runs,
}

impl Way {
    fn push(&mut self, figures: Figures) {
        self.pages_per_second.push(figures.pages_per_second);
        self.p50_us.push(figures.p50_us);
        self.p99_us.push(figures.p99_us);
    }
}

/// Runs every case on Weir with encryption, on Weir without, and on fio, in turns. Compares them.
///
/// # Errors
/// Fails when a file cannot be made, fio cannot be run, or an operation fails.
pub fn run(options: &Options) -> Result<Report, DiskError> {
    let path = |name: &str| options.directory.join(format!("weir-bench-{}-{name}", std::process::id()));
    let url = |name: &str| FileUrl { size: Some(options.size), ..FileUrl::new(path(name)) };
    let sealed = FileStore::open(&url("sealed"))?;
    let clear = FileStore::open(&FileUrl { encrypt: false, ..url("clear") })?;
    let control = fio::Control { path: path("clear"), size: options.size, time: options.time };
    load::fill(&sealed)?;
    load::fill(&clear)?;
    let mut report = Report::new("disk", options.runs);
    let steps = Steps::new(CASES.len() * options.runs * 3);
    for case in CASES {
        steps.part(case.name);
        let mut ways: [Way; 3] = Default::default();
        for run in 0..options.runs {
            // Each run begins with another of the three ways, so that none is always the first.
            for turn in 0..3 {
                let way = (run + turn) % 3;
                ways[way].push(match way {
                    0 => load::run(&sealed, case, options.time, run as u64)?,
                    1 => load::run(&clear, case, options.time, run as u64)?,
                    _ => control.run(case)?,
                });
                steps.end();
            }
        }
        report.rows.extend(rows(case, &ways));
    }
    for name in ["sealed", "clear"] {
        let path = path(name);
        std::fs::remove_file(&path).map_err(|source| DiskError::Remove { path, source })?;
    }
    Ok(report)
}

fn rows(case: Case, [sealed, clear, fio]: &[Way; 3]) -> Vec<Row> {
    const CONTROL: &str = "fio-io_uring";
    let rows = [("", sealed), ("_clear", clear)].into_iter().flat_map(|(suffix, way)| {
        let id = format!("{}{suffix}", case.name);
        if case.batch == 1 {
            let row = |metric: &str, ours: &Runs, theirs: &Runs| {
                Row::lower(id.clone(), metric, ours.median()).beside(CONTROL, theirs.median())
            };
            return vec![
                row("p50_us", &way.p50_us, &fio.p50_us).goal(Goal::Ratio(1.1)),
                row("p99_us", &way.p99_us, &fio.p99_us),
            ];
        }
        let (ours, theirs) = (way.pages_per_second.median(), fio.pages_per_second.median());
        let (metric, scale) = if case.pages == 1 {
            ("pages_per_s", 1.0)
        } else {
            ("mb_per_s", weir_core::PAGE_SIZE as f64 / 1e6)
        };
        let row = Row::higher(id, metric, ours * scale).beside(CONTROL, theirs * scale);
        // The cipher takes a microsecond a page on any disk, however fast the disk is. So the rows
        // with encryption have no goal.
        vec![if suffix.is_empty() { row } else { row.goal(Goal::Ratio(0.9)) }]
    });
    rows.collect()
}
