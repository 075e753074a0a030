//! Weir's view of its machine, and its requests to the kernel. They are about memory, swaps, the
//! use of devices, loop devices, generic netlink, processors' idle states, kernel releases and unix
//! sockets.
//!
//! Nothing here knows about stores or volumes. Weir asks the machine here, but for questions that
//! one place alone has: about its own device (ublk, NBD, FUSE's rings), its own service, or a
//! benchmark's report.

pub mod cgroup;
pub mod device_use;
pub mod file_lock;
#[doc(hidden)]
pub mod fixture;
pub mod kernel_release;
pub mod latency;
pub mod local_socket;
pub mod loop_device;
mod machine;
pub mod netlink;
mod process_stat;
pub mod program;
pub mod signals;
pub mod swap_area;
pub mod swaps;
pub mod vm;
pub mod zram;

pub use machine::Machine;
pub use process_stat::ProcessStat;
