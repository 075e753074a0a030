//! The traffic of each file or device of a store.

use std::path::PathBuf;
use std::sync::atomic::{AtomicU64, Ordering::Relaxed};
use weir_core::PAGE_SIZE;

/// Number of size classes of I/Os: below 8 KiB, below 16 KiB, ..., 1 MiB.
const SIZES: usize = 9;

/// The counts of one member. Each I/O adds to them once, whichever lane it comes from.
#[derive(Debug)]
pub(super) struct Traffic {
    path: PathBuf,
    write_sizes: [AtomicU64; SIZES],
    written: AtomicU64,
    read: AtomicU64,
    reads: AtomicU64,
    failed: AtomicU64,
}

/// The traffic of one file or device of a store.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct MemberTraffic {
    /// The path of the file or device.
    pub path: PathBuf,
    /// Counts of writes of 1 page, 2 to 3, 4 to 7, ..., 256.
    pub write_sizes: [u64; SIZES],
    /// Bytes written.
    pub written: u64,
    /// Bytes read.
    pub read: u64,
    /// Number of reads.
    pub reads: u64,
    /// Number of I/Os that failed, also those that were tried again page by page.
    pub failed: u64,
}

impl Traffic {
    pub fn of(paths: &[PathBuf]) -> Box<[Traffic]> {
        let traffic = |path: &PathBuf| Traffic {
            path: path.clone(),
            write_sizes: Default::default(),
            written: AtomicU64::new(0),
            read: AtomicU64::new(0),
            reads: AtomicU64::new(0),
            failed: AtomicU64::new(0),
        };
        paths.iter().map(traffic).collect()
    }

    pub fn begun(&self, is_write: bool, bytes: u32) {
        if is_write {
            let size = (bytes as usize / PAGE_SIZE).checked_ilog2().unwrap_or(0) as usize;
            self.write_sizes[size.min(SIZES - 1)].fetch_add(1, Relaxed);
            self.written.fetch_add(bytes.into(), Relaxed);
        } else {
            self.reads.fetch_add(1, Relaxed);
            self.read.fetch_add(bytes.into(), Relaxed);
        }
    }

    pub fn failed(&self) {
        self.failed.fetch_add(1, Relaxed);
    }

    pub fn get(&self) -> MemberTraffic {
        MemberTraffic {
            path: self.path.clone(),
            write_sizes: std::array::from_fn(|size| self.write_sizes[size].load(Relaxed)),
            written: self.written.load(Relaxed),
            read: self.read.load(Relaxed),
            reads: self.reads.load(Relaxed),
            failed: self.failed.load(Relaxed),
        }
    }
}
