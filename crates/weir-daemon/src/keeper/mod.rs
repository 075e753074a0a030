//! The keeper: a small process that outlives the daemon.
//!
//! `weir serve --keeper` is two processes. The outer one, the keeper, holds what must survive a
//! crash. It maps and locks the page map, the slot records and the pages of host stores, since a
//! descriptor alone does not keep a memfd from being swapped out. It also holds plain descriptors,
//! such as those of GPU memory. The inner process is the daemon. When the daemon dies, the keeper
//! starts another, which takes all of that over. The keeper first waits until the old daemon is
//! gone, since two would write the same map.
//!
//! The keeper can start a daemon while the machine has no free memory. It has set memory aside for
//! that start, and holds in memory the files that the next daemon reads before it serves
//! (`resident`). init could not do this: it may itself be swapped out to the very device that is
//! down. The keeper never calls a GPU's driver, and never waits for a reader of its log lines
//! (`crate::relay`).

mod copy;
mod link;
mod note;
mod resident;
mod supervise;
mod wire;

pub use copy::is_copy;
#[cfg(test)]
pub use link::played;
pub use link::{Held, Link, processors, upgrade_failed};
pub use note::{read_note, write_note};
pub use supervise::{Use, run};
