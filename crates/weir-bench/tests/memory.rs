//! The memory of a volume, as the system counts it. The test has a process of its own, since other
//! tests change theirs.

use weir_bench::memory::{Plan, run};

#[test]
fn a_volume_takes_sixteen_bytes_a_page_and_the_system_agrees() {
    let report = run(&Plan { bytes: 4 << 30, lanes: 4, depth: 64 }).expect("4 GiB of map and records fit");
    assert!(report.all_met(), "{report}");
    let grown = report.rows.iter().find(|row| row.id == "whole_process").expect("there is such a row").value;
    assert!((15.9..17.5).contains(&grown), "the process grew by {grown} bytes a page");
}
