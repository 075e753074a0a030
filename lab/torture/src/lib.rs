//! Memory torture: processes that write more than they may keep in RAM, read it back in another
//! order, and say of each page whether it is the one that was written.
//!
//! The point of `torture` is that swap has nowhere to hide: each page carries who wrote it, its
//! number, its generation and a body that follows from these, so that a lost, stale, misplaced or
//! torn page is told from a good one, and from each other.

pub mod cgroup;
pub mod disk;
pub mod pattern;
pub mod swap;
pub mod worker;
