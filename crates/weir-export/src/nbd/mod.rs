//! The Network Block Device protocol, after its specification (`doc/proto.md` of NetworkBlockDevice/nbd).
//!
//! What can be decided without a socket is: [`handshake`] and [`transmission`] take bytes and give bytes, so
//! that they are tested and fuzzed as plain functions. [`wire`] holds the numbers.

pub mod client;
pub mod handshake;
pub mod transmission;
pub mod wire;
