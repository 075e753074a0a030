//! A block device of the kernel's ublk driver (`Documentation/block/ublk.rst`), served from this
//! process.
//!
//! The driver hands each request to a thread of this process through that thread's own io_uring,
//! with one command for each request. The command that answers a request also asks for the next.
//! Nothing on the way is a socket, and nothing allocates. So a ublk device is safer under swap than
//! a network block device.
//!
//! | file | holds |
//! |---|---|
//! | [`uapi`] | the driver's numbers and layouts |
//! | [`request`] | the request of a descriptor, and the order of a batch: pure functions |
//! | [`control`] | control commands, over a ring or over a fake |
//! | `device` | the order of commands that makes, takes over and removes a device |
//! | `engine` | a queue's requests against its lane of the volume, without a ring |
//! | `queue` | the thread: ring, engine, sleep |
//! | `server` | all queues of a device |
//!
//! A device made with [`Config::recoverable`] outlives the process. The driver holds requests until
//! another server takes the device over, and gives it those that the dead server had not answered.

pub mod control;
mod device;
mod engine;
mod queue;
pub mod request;
mod server;
mod stats;
pub mod uapi;

pub use control::ControlError;
pub use device::{Device, Shape};
pub use server::{Config, Found, Server, UblkError};
pub use stats::Stats;
