//! The outcome of a trial, as a small table.

use super::connection::{KINDS, Tally};
use std::fmt;
use std::time::Duration;
use weir_core::ByteSize;
use weir_core::metrics::Distribution;
use weir_daemon::control::Status;

/// The results of a finished trial.
#[derive(Debug)]
pub struct Report {
    /// The seed of the random requests.
    pub seed: u64,
    /// Time from the first request to the last, without the final check of all pages.
    pub took: Duration,
    /// Number of connections.
    pub connections: u32,
    /// The daemon's status before the final check of all pages.
    pub status: Status,
    /// Number of pages that held content at the end.
    pub written: u64,
    /// The counts of each connection.
    pub tallies: Vec<Tally>,
}

impl Report {
    fn mismatches(&self) -> u64 {
        self.tallies.iter().map(|tally| tally.mismatches).sum()
    }

    fn errors(&self) -> u64 {
        self.tallies.iter().map(|tally| tally.errors).sum()
    }

    /// Whether every page had the expected content and every request was answered without error.
    pub fn passed(&self) -> bool {
        self.mismatches() == 0 && self.errors() == 0
    }
}

impl fmt::Display for Report {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let stores: Vec<&str> = self.status.stores.iter().map(|store| store.url.as_str()).collect();
        writeln!(
            f,
            "{} on {}, {} connections, {:.1} s, seed {}\n",
            ByteSize(self.status.volume.bytes),
            stores.join(", "),
            self.connections,
            self.took.as_secs_f64(),
            self.seed
        )?;
        writeln!(
            f,
            "{:<8} {:>10} {:>11} {:>9} {:>9} {:>9}",
            "", "requests", "pages", "IOPS", "p50 us", "p99 us"
        )?;
        let mut total = 0;
        for (row, (_, name)) in KINDS.iter().enumerate() {
            let requests: u64 = self.tallies.iter().map(|tally| tally.requests[row]).sum();
            let pages: u64 = self.tallies.iter().map(|tally| tally.pages[row]).sum();
            let mut latencies = Distribution::default();
            self.tallies.iter().for_each(|tally| tally.latencies[row].add_to(&mut latencies));
            let us =
                |quantile| latencies.quantile(quantile).map_or(0.0, |took| took.as_nanos() as f64 / 1000.0);
            let iops = requests as f64 / self.took.as_secs_f64();
            writeln!(
                f,
                "{name:<8} {requests:>10} {pages:>11} {iops:>9.0} {:>9.1} {:>9.1}",
                us(0.5),
                us(0.99)
            )?;
            total += requests;
        }
        writeln!(f, "{:<8} {total:>10} {:>11} {:>9.0}\n", "all", "", total as f64 / self.took.as_secs_f64())?;

        let volume = &self.status.volume;
        writeln!(
            f,
            "pages: {} in the device, {} written and held, {} in a store, {} of one value, {} free",
            volume.pages, self.written, volume.stored, volume.filled, volume.free
        )?;
        for complaint in self.tallies.iter().flat_map(|tally| &tally.complaints) {
            writeln!(f, "  {complaint}")?;
        }
        let verdict = if self.passed() { "passed: every page verified" } else { "FAILED" };
        writeln!(f, "{verdict}, {} mismatches, {} errors", self.mismatches(), self.errors())
    }
}
