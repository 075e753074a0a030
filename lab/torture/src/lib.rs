//! Memory torture: processes write more than they may keep in RAM, read it back in another order,
//! and check that each page is the one that was written.
//!
//! Swap cannot hide an error from `torture`. Each page names its writer, its number and its
//! generation, and has a body that follows from these. So a lost, stale, misplaced or torn page is
//! told from a good one, and from the others.

pub mod cgroup;
pub mod disk;
pub mod pattern;
pub mod swap;
pub mod worker;
