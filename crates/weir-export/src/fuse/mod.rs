//! FUSE: a volume as a file that every kernel with FUSE can use, as a disk by way of a loop device.
//!
//! The protocol is that of the kernel's `include/uapi/linux/fuse.h`. What can be decided without a
//! descriptor is: [`request`] takes bytes and gives requests, [`wire`] holds numbers and
//! structures. [`device`] reads and answers, where the kernel offers it `ring` does, [`mount`] puts
//! a connection into the file system. [`Server`] serves one file with several threads, all of them
//! started before the process is sealed.
//!
//! There is no page cache on the way to that file: is opened for direct I/O, so each request of the
//! loop device is one request here. [`Server::ram_disk`] serves a whole file system instead, with
//! the page cache, to ordinary users.

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
