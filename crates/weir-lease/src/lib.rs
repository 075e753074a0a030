//! A table of references to pages, which are handed out to many connections.
//!
//! A server lends pages (of a dma-buf, a shared area, a GPU) to connections, which use them in
//! place and return them in batches. The table records which connection holds which page. Linux has
//! an xarray per socket for this (`SO_DEVMEM_DONTNEED`). This table does the same in about a tenth
//! of the time, and it does more:
//!
//! - A [`Token`] is 32 bits and names a *slot* of its connection and the *lap* in which it was
//!   taken. The slot, 8 bytes, names the page. So 32 bits suffice for 256 regions of 256 GiB each.
//! - A stale, repeated or forged token is refused and counted; a token of one connection means
//!   nothing to another.
//! - One page may be out any number of times, in fragments; its last return is reported once
//!   ([`PageCounts`]).
//! - [`Table::close`] returns everything that a connection holds, in time proportional to that.
//! - Connections get slots 64 at a time. A connection that holds nothing takes 44 bytes.
//! - All state that must survive lies in one slice of words ([`Geometry::image_words`]), in shared
//!   memory if wanted. Each change is one store of one word, and [`Table::recover`] rebuilds the
//!   rest by a scan.
//! - A table has one owner, so it needs no locks and no atomic read-modify-write. Nothing is
//!   allocated after [`Table::new`]. Use one table in each thread, with [`SharedCounts`] if the
//!   tables lend the same pages.
//!
//! A connection goes round its slots instead of reusing the one just freed. So the next token is
//! mostly the last one plus 1. A connection that returns in order needs one [`TokenRange`] for many
//! references. And a token's value comes back only after 2^20 laps.
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
//! // Both come back in one range, and the page's last return is reported once.
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

/// Largest number of ranges in one batch: the limit of `SO_DEVMEM_DONTNEED` (Linux,
/// net/core/sock.c, MAX_DONTNEED_TOKENS).
pub const BATCH_TOKENS_MAX: usize = 128;
/// Largest number of references in one batch, over all its ranges. `SO_DEVMEM_DONTNEED` has the
/// same limit (MAX_DONTNEED_FRAGS).
pub const BATCH_REFERENCES_MAX: u64 = 1024;
