//! The keeper: a small process that outlives the daemon.
//!
//! `weir serve --keeper` is two processes. The outer one, the keeper, holds what must survive: the
//! page map, the slot records and the pages of host stores, mapped and locked (a descriptor alone
//! does not keep a memfd from being swapped out), and plain descriptors, such as those of GPU
//! memory. The inner one is the daemon. When the daemon dies, the keeper starts another, which
//! takes all of that over; not sooner than the old one is gone, or two would write the same map.
//! The keeper has no GPU code, and memory set aside for the start: the machine may be out of
//! memory, and init, which would restart a service, may itself be swapped out to the very device
//! that is down. What the next daemon reads before it serves is held in memory too (`resident`),
//! and nobody's lines are waited for (`crate::relay`).

mod copy;
mod link;
mod resident;
mod supervise;
mod wire;

pub use copy::is_copy;
pub use link::{Held, Link, processors};
pub use supervise::run;
