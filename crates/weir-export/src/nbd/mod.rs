//! The Network Block Device protocol, after its specification (`doc/proto.md` of
//! NetworkBlockDevice/nbd).
//!
//! Decisions about the protocol need no socket: [`handshake`] and [`transmission`] take bytes and
//! return bytes, so they are tested and fuzzed as plain functions. [`wire`] holds the protocol's
//! numbers.
//!
//! [`Server`] runs the protocol on threads: one that negotiates with all clients, and one for each
//! connection in transmission. All threads are started before the process is sealed. [`client`] is
//! the client's side of the protocol.

pub mod client;
mod connection;
mod control;
mod exports;
mod flight;
pub mod handshake;
mod listen;
mod pool;
mod seat;
mod server;
mod slices;
mod stats;
mod tls;
pub mod transmission;
pub mod wire;

pub use control::{PATIENCE, PENDING_MAX};
pub use exports::{Exports, Single};
pub use handshake::Export;
pub use listen::{Listen, ListenError};
pub use server::{Config, KernelConnections, ServeError, Server};
pub use stats::Stats;
pub use tls::{Identity, IdentityError};
