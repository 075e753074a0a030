//! Benchmarks: every figure that Weir states comes from here. Each benchmark runs the measured
//! program and its control in one run, several times over. It returns a [`report::Report`] that
//! prints as a table, saves as JSON and draws itself as a page of HTML.
//!
//! ```
//! use weir_bench::report::{Goal, Report, Row, Runs};
//!
//! let ours = Runs::from_iter([11.9, 11.8, 11.2]);
//! let theirs = Runs::from_iter([17.3, 17.5, 18.0]);
//! let mut report = Report::new("block", ours.len());
//! report.rows.push(
//!     Row::lower("qd1_read", "p50_us", ours.median()).beside("nbdkit-memory", theirs.median()).goal(Goal::Value(12.0)),
//! );
//! assert!(report.all_met());
//! println!("{report}");
//! ```

pub mod block;
pub mod cache;
pub mod compress;
pub mod disk;
pub mod fault;
pub mod give_back;
pub mod lease;
pub mod memory;
pub mod policy;
pub mod queue;
pub mod report;
pub mod restart;
pub mod share;
mod steps;
pub mod store;
pub mod swap;

/// The path of the program `weir`, which is installed beside this one.
pub fn weir() -> std::path::PathBuf {
    std::env::current_exe().map_or_else(|_| "weir".into(), |program| program.with_file_name("weir"))
}

/// The next random number, by SplitMix64.
pub(crate) fn splitmix(state: &mut u64) -> u64 {
    *state = state.wrapping_add(0x9e37_79b9_7f4a_7c15);
    let z = (*state ^ (*state >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
    let z = (z ^ (z >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
    z ^ (z >> 31)
}
