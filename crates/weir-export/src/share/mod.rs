//! The share server: local programs use a volume's pages in place (see [`weir_share`] for the
//! transport).
//!
//! One thread serves every client. A client's area is made when it connects and unmapped when it
//! goes. So no client ever sees what another one left in a frame. A client that keeps its mapping
//! after its connection has closed holds only memory of its own. A [`weir_lease::Table`] records
//! which client holds which frame.

mod loans;
mod server;
mod session;
mod stats;

pub use server::{Config, ServeError, Server};
pub use stats::Stats;
