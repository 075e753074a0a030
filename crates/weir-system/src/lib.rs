//! Weir's view of its machine, and its requests to the kernel: memory, swaps, who uses a
//! device, loop devices, generic netlink, processors' idle states, releases, unix sockets.
//!
//! Nothing here knows of stores or volumes. What one part of Weir knows about the machine every
//! other part learns from here.

pub mod cgroup;
pub mod device_use;
pub mod kernel_release;
pub mod latency;
pub mod local_socket;
pub mod loop_device;
mod machine;
pub mod netlink;
pub mod program;
pub mod signals;
pub mod swaps;
pub mod vm;
pub mod zram;

pub use machine::Machine;
