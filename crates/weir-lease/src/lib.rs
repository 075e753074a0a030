//! A table of page references handed out to many connections.
//!
//! A server lends pages (of a dma-buf, a shared area, a GPU) to connections that use them in place
//! and give them back in batches. The table remembers who holds what. Linux keeps an xarray per
//! socket for this (`SO_DEVMEM_DONTNEED`); this table does the same in about a tenth of the time,
//! and more:
//!
//! - A [`Token`] is 32 bits and names a *slot* of its connection and the *lap* in which it was
//!   taken. The slot, 8 bytes, names the page: so 256 regions of 256 GiB each are within reach of
//!   32 bits.
//! - A stale, repeated or forged token is refused and counted; a token means nothing to another
//!   connection.
//! - One page may be out any number of times, in fragments; its last return is reported once
//!   ([`PageCounts`]).
//! - [`Table::close`] gives back whatever a connection holds, in time proportional to that.
//! - Slots go to connections 64 at a time. A connection that holds nothing costs 44 bytes.
//! - What matters lies in one slice of words ([`Geometry::image_words`]), in shared memory if you
//!   like: each change is one store of one word, and [`Table::recover`] rebuilds the rest by a
//!   scan.
//! - One owner, so no locks and no atomic read-modify-write; nothing is allocated after
//!   [`Table::new`]. Use one table a thread, with [`SharedCounts`] if they lend the same pages.
//!
//! A connection walks round its slots instead of reusing the one just freed. So the next token is
//! mostly the last one plus 1, a connection that returns in order needs one [`TokenRange`] for many
//! references, and a token's value comes back only after 2^20 laps.
//!
//! ```
//! use weir_lease::{Geometry, OwnedCounts, Place, Refusal, Table, TokenRange};
//!
//! // Two regions of 1,000 pages, up to 100 connections, up to 6,400 references out at a time.
//! let geometry = Geometry { connections: 100, references: 6_400, quota: 64 };
//! let mut table = Table::new(geometry, OwnedCounts::new(&[1_000, 1_000]))?;
//!
//! let reader = table.open(64)?;
//! let header = table.take(&reader, Place { region: 1, page: 42, fragment: 0 })?;
//! let body = table.take(&reader, Place { region: 1, page: 42, fragment: 1 })?;
//! table.take(&reader, Place::page(0, 7))?;
//!
//! // Both come back in one range; the page's last return is said once.
//! let mut free = Vec::new();
//! let both = TokenRange { start: header, count: 2 };
//! let returned = table.give_batch(&reader, &[both], |place, last| {
//!     if last {
//!         free.push(place.page);
//!     }
//! })?;
//! assert_eq!((returned.references, returned.refused), (2, 0));
//! assert_eq!(free, [42]);
//!
//! // A second return is refused and counted.
//! assert_eq!(table.give(&reader, body), Err(Refusal::Repeated));
//!
//! // A connection that goes away gives back what it holds.
//! table.close(reader, |place, last| assert!(last && place.page == 7));
//! # Ok::<(), Box<dyn std::error::Error>>(())
//! ```
//!
//! # Surviving a crash
//!
//! ```
//! use std::sync::Arc;
//! use std::sync::atomic::AtomicU64;
//! use weir_lease::{Geometry, NoCounts, Place, Table};
//!
//! let geometry = Geometry { connections: 10, references: 640, quota: 64 };
//! // Stands for a memory mapping that another process holds, too.
//! let mapping: Arc<[AtomicU64]> = (0..geometry.image_words()).map(|_| AtomicU64::new(0)).collect();
//!
//! let mut table = Table::create(mapping.clone(), geometry, NoCounts)?;
//! let connection = table.open(64)?;
//! let token = table.take(&connection, Place::page(0, 5))?;
//! drop(table); // the worker is killed
//!
//! let (mut table, mut open) = Table::recover(mapping, NoCounts)?;
//! let connection = open.pop().expect("the one that was open");
//! assert_eq!(table.give(&connection, token).map(|given| given.place), Ok(Place::page(0, 5)));
//! # Ok::<(), Box<dyn std::error::Error>>(())
//! ```

#![no_std]
#![forbid(unsafe_code)]

extern crate alloc;

mod connection;
mod counts;
mod error;
mod image;
mod recover;
mod table;
mod token;
mod words;

pub use connection::Connection;
pub use counts::{NoCounts, OwnedCounts, PageCounts, SharedCounts};
pub use error::{BatchError, OpenError, Refusal, Refusals, TakeError};
pub use image::{Geometry, ImageError};
pub use table::{Given, Returned, Table};
pub use token::{FRAGMENTS_MAX, Place, QUOTA_MAX, REGION_PAGES_MAX, Token, TokenRange};

/// Ranges in one batch: what `SO_DEVMEM_DONTNEED` takes (Linux, net/core/sock.c,
/// MAX_DONTNEED_TOKENS).
pub const BATCH_TOKENS_MAX: usize = 128;
/// References in one batch (MAX_DONTNEED_FRAGS).
pub const BATCH_REFERENCES_MAX: u64 = 1024;
