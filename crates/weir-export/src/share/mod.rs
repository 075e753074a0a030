//! The share server: local programs use a volume's pages in place (see [`weir_share`] for the
//! transport).
//!
//! One thread serves every client. A client's area is made when it connects and unmapped when it
//! goes, so nothing that one client left in a frame is ever seen by another, and a client that
//! keeps its mapping after its connection has closed holds memory of its own only. Who holds which
//! frame is a [`weir_lease::Table`]'s business.

mod loans;
mod server;
mod session;
mod stats;

pub use server::{Config, ServeError, Server};
pub use stats::Stats;
