//! A bounded program (one that `weir run` started with limited RAM), as its pager reports it.

use super::condition::Condition;
use serde::{Deserialize, Serialize};
use std::fmt;
use weir_core::ByteSize;

/// When a pager's last report is older than this, the status line tells its age.
const SILENT_S: f64 = 2.0;

/// The state of a store, or of a member of one, that works.
const ONLINE: &str = "online";

/// A bounded program: `weir run` limits its RAM, and the daemon's volume holds the rest of its
/// memory.
#[derive(Clone, PartialEq, Default, Debug, Serialize, Deserialize)]
pub struct Program {
    /// The number of the program's process.
    pub pid: u32,
    /// The name of the program's process.
    pub name: String,
    /// Bytes of managed memory that may be resident; 0 before the pager's first report.
    pub limit_bytes: u64,
    /// Bytes of managed memory that are resident.
    pub resident_bytes: u64,
    /// Number of blocks of 2 MiB that are resident.
    pub blocks: u64,
    /// Number of resident pages that were brought alone, while the rest of their block is in the
    /// store.
    pub single_pages: u64,
    /// Bytes in the stores that are set aside for the program's blocks.
    pub stored_bytes: u64,
    /// Number of page faults that the pager has resolved.
    pub faults: u64,
    /// Page faults a second over the last second or more.
    pub faults_per_s: f64,
    /// Seconds that threads have waited for page faults, as far as the pager saw it.
    pub fault_s: f64,
    /// Number of blocks that were prefetched.
    pub prefetched: u64,
    /// Number of prefetched blocks that the program then used.
    pub prefetched_used: u64,
    /// `prefetched_used` divided by `prefetched`; null if no block was prefetched.
    pub prefetch_hit_rate: Option<f64>,
    /// Number of blocks that could not be read back from a store.
    pub lost_blocks: u64,
    /// Number of evictions that have ended.
    pub evictions: u64,
    /// The state of the program's store: `full` or `failed` as its pager says, or else that of the
    /// daemon's stores: `online`, `draining`, `unreachable` or `lost`.
    pub store: String,
    /// The conditions of the stores' members that are not online.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub troubled: Vec<Condition>,
    /// Seconds for which the pager has not answered.
    pub silent_s: f64,
}

/// A process's name without characters that a terminal would interpret.
pub fn printable(name: &str) -> String {
    name.chars().map(|letter| if letter.is_control() { '?' } else { letter }).collect()
}

impl fmt::Display for Program {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Program {
            pid, blocks, single_pages, lost_blocks, faults, faults_per_s, fault_s, silent_s, ..
        } = *self;
        let (resident, limit) = (ByteSize(self.resident_bytes), ByteSize(self.limit_bytes));
        // The name may come from another user's daemon, so it may contain any characters.
        let name = printable(&self.name);
        writeln!(
            f,
            "program   {pid} {name}: {resident} of {limit} resident, {blocks} blocks and {single_pages} pages"
        )?;
        write!(f, "          {faults} faults, {faults_per_s:.0}/s, {fault_s:.1} s lost to them")?;
        if let Some(rate) = self.prefetch_hit_rate {
            write!(f, "; prefetch {:.0} % used", rate * 100.0)?;
        }
        writeln!(f)?;
        if silent_s > SILENT_S {
            writeln!(f, "          no answer for {silent_s:.0} s: it is stopped, or waits for its store")?;
        }
        match self.store.as_str() {
            "full" => writeln!(f, "          its store is full: it takes more memory than its limit")?,
            "failed" => writeln!(f, "          its store has failed: it takes more memory than its limit")?,
            ONLINE => {}
            state => writeln!(f, "          its store is {state}")?,
        }
        for member in &self.troubled {
            writeln!(f, "          {}", printable(&member.to_string()))?;
        }
        if lost_blocks > 0 {
            writeln!(f, "          {lost_blocks} blocks are lost: it gets SIGBUS where it touches them")?;
        }
        Ok(())
    }
}
