//! The daemon as a library: stores, the volume over them and the front ends before it, a worker, a
//! keeper that survives it, and the control socket at which others ask.
//!
//! A program gives it a [`Config`]. It asks two things of that program, which it runs again: with
//! the same arguments it is to serve, as the keeper's daemon, and as `look-at-cards --store URL` it
//! is to call [`cards::run`].

pub mod attach;
pub mod bug;
pub mod cards;
pub mod config;
pub mod control;
pub mod core_dump;
pub mod pages;
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
mod worker;

pub use address::{Address, AddressError};
pub use backing::Backing;
pub use config::Config;
pub use daemon::Daemon;
pub use environment::{Clock, Environment, MachineClock};
pub use error::{Class, Error, ErrorKind};
pub use report::StartReport;
pub use start::{Bar, Start, warn_of_unlocked_memory};
