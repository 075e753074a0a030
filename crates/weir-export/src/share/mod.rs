//! The share server: local programs use a volume's pages in place (see [`weir_share`] for the
//! transport).
//!
//! One thread serves every client of a server. A daemon may have several servers, each at a
//! [socket](path_of) of its own, and a client may connect to each. A client's area is made when it
//! connects and unmapped when it goes. So no client ever sees what another one left in a frame. A
//! client that keeps its mapping after its connection has closed holds only memory of its own. A
//! [`weir_lease::Table`] records which client holds which frame.
//!
//! A client names the volume that it wants. The server's thread has one lane for all volumes, since
//! a lane takes slots of the pool's slack. So a session translates page numbers, and keeps its
//! volume until the last of its requests has ended.

mod loans;
mod server;
mod session;
mod stats;

pub use server::{Config, Find, ServeError, Server};
pub use stats::Stats;
pub use weir_share::{THREADS_MOST, path_of};
