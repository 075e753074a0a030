//! The base of all of Weir. It has pages and their checksums, sizes as people write them, locked
//! memory, and the set-up of I/O threads. Its allocator notices an allocation on an I/O thread.
//!
//! Nothing here knows about stores, volumes or block devices.

mod available;
mod chain;
pub mod clock;
pub mod copy;
mod file_kind;
pub mod log;
mod memory;
pub mod metrics;
mod page;
mod resident;
mod rest;
pub mod seal;
mod size;
pub mod swap_safety;

pub use available::{available, available_below, available_to_all_below};
pub use chain::chain;
pub use file_kind::file_kind;
pub use memory::{Memory, Watch, sealed_memfd, unlocked, unwatched};
pub use page::{
    Checksum, PAGE_SIZE, Page, PageBytes, PageNo, Slot, prefetch, prefetch_head, prefetch_value,
    uniform_value,
};
pub use resident::Resident;
pub use rest::Rest;
pub use size::{ByteSize, SizeError};
