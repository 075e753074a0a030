//! The daemon as a library: stores, the volume over them, front ends, a worker, a keeper that
//! outlives the daemon, and the control socket.
//!
//! A program gives the daemon a [`Config`]. The daemon starts this program again for two purposes,
//! and the program must be ready for both. With the same arguments it must serve again, now as the
//! keeper's daemon. With `look-at-cards --store URL` it must call [`cards::run`].

pub mod attach;
pub mod bug;
pub mod cards;
pub mod config;
pub mod control;
pub mod core_dump;
pub mod pages;
pub mod run_end;
pub mod serve;

mod address;
mod backing;
mod daemon;
mod environment;
mod error;
mod front_ends;
mod keeper;
mod programs;
mod relay;
mod report;
mod stages;
mod start;
mod volumes;
mod worker;

pub use address::{Address, AddressError, PATH_MOST};
pub use backing::Backing;
pub use config::Config;
pub use daemon::Daemon;
pub use environment::{Clock, Environment, MachineClock};
pub use error::{Class, Error, ErrorKind};
pub use front_ends::{exports_of_fuse, exports_of_nbd, exports_of_ublk, serve_by_nbd, ublk_queues};
pub use report::{StartProgress, StartReport};
pub use start::{Bar, Start, warn_of_unlocked_memory};
