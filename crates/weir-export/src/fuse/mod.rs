//! FUSE: serves a volume as a file that every kernel with FUSE can use. A loop device makes a disk
//! of the file.
//!
//! The protocol is that of the kernel's `include/uapi/linux/fuse.h`. Everything that needs no
//! descriptor is a plain function: [`request`] takes bytes and gives requests, [`wire`] holds
//! numbers and structures. [`device`] reads and answers requests; so does `ring`, if the kernel
//! offers it. [`mount`] puts a connection into the file system. [`Server`] serves one file with
//! several threads, all of them started before the process is sealed.
//!
//! The file that [`Server::start`] serves has no page cache. It is opened for direct I/O, so each
//! request of the loop device is one request of FUSE. [`Server::ram_disk`] serves a whole file
//! system to ordinary users instead, with the page cache.

pub mod device;
mod disk;
pub mod mount;
mod pool;
mod ram_disk;
mod range;
mod reply;
pub mod request;
mod ring;
mod serve;
mod server;
mod stats;
pub mod wire;

pub use mount::Left;
pub use pool::THREADS_MAX;
pub use range::IO_MAX;
pub use server::{Config, FILE_NAME, Handoff, ServeError, Server, is_file_name};
pub use stats::Stats;
