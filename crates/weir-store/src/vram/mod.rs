//! GPU memory as a store: three paths to one allocation.
//!
//! | path | how | good for |
//! |---|---|---|
//! | [`mapped`] | the processor's own streaming stores and loads, through the PCIe window | single writes (0.4 us on an H200), reads when few are in flight |
//! | [`engine`] | batches for the card's copy engines | large and many; whenever the card's owner computes |
//! | [`ring`] | a resident kernel that polls descriptors | deep load, while nobody else uses the card |
//!
//! All three paths reach the same bytes: Vulkan allocates a chunk on the card, maps it, and exports
//! it as a file descriptor, which CUDA imports. Without CUDA (AMD, Intel) there is only the first
//! path; without Vulkan (a headless server) there is only the second. The cost of each path is
//! measured when the store is opened, and every batch takes the cheapest ([`table`]).
//!
//! The same Vulkan code serves AMD's and Intel's cards. It has run on NVIDIA's cards and on Mesa's
//! software renderer. Nobody has reported a run on AMD's or Intel's yet.

mod bare;
mod calibrate;
mod chunks;
mod condition;
mod contest;
pub mod engine;
mod gpu;
mod inventory;
mod kept;
mod lane;
mod late;
mod look;
pub mod mapped;
mod membarrier;
mod nvml;
mod options;
pub mod ring;
mod setup;
mod store;
pub mod table;
mod watch;

pub use bare::Bare;
pub use gpu::{Counters, Gpu};
pub use inventory::{GpuMemory, inventory};
pub use lane::GpuLane;
pub use look::{Seen, look, why_not_loaded};
pub use options::{PathMode, RingMode, Target, VramUrl};
pub use store::VramStore;

use engine::CallError;
use mapped::VulkanError;
use std::path::PathBuf;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

/// Milliseconds that a card may take to answer before it counts as gone. A client that waits for a
/// page must get an answer before its own time limit.
static ANSWER_MS: AtomicU64 = AtomicU64::new(2000);

pub(crate) fn answer_limit() -> Duration {
    Duration::from_millis(ANSWER_MS.load(Ordering::Relaxed))
}

/// Sets the time that a card has to answer, for the whole process. Tests need it: a program that
/// plays the card may be slow on a busy machine.
#[doc(hidden)]
pub fn set_answer_limit(limit: Duration) {
    ANSWER_MS.store(limit.as_millis() as u64, Ordering::Relaxed);
}

/// The vendor's libraries, found at run time. Tests put other libraries in their place, to inject
/// errors.
#[derive(Clone, Debug)]
pub struct Drivers {
    /// CUDA's driver interface.
    pub cuda: PathBuf,
    /// NVIDIA's management library (NVML).
    pub nvml: PathBuf,
    /// The file in which the kernel's loaded NVIDIA module gives its version.
    pub loaded: PathBuf,
}

impl Default for Drivers {
    fn default() -> Self {
        Drivers {
            cuda: "libcuda.so.1".into(),
            nvml: "libnvidia-ml.so.1".into(),
            loaded: "/proc/driver/nvidia/version".into(),
        }
    }
}

/// An error of a card's drivers, or another reason why the store cannot use them.
#[derive(Clone, Copy, Debug, thiserror::Error)]
pub(crate) enum Trouble {
    /// A call of Vulkan failed.
    #[error(transparent)]
    Vulkan(#[from] VulkanError),
    /// A call of CUDA failed.
    #[error(transparent)]
    Cuda(#[from] CallError),
    /// The process has no descriptor left.
    #[error("no file descriptor is left: raise the limit on open files")]
    NoDescriptor,
    /// The machine has neither CUDA nor Vulkan.
    #[error("neither Vulkan nor CUDA is there")]
    NoDriver,
    /// A lane did not finish its operations in flight.
    #[error("a lane did not finish its operations in time")]
    LaneBusy,
}

impl Trouble {
    /// Whether the card is gone for good.
    fn is_lost(self) -> bool {
        match self {
            Trouble::Vulkan(error) => error.is_lost(),
            Trouble::Cuda(error) => error.error.is_sticky(),
            Trouble::NoDescriptor | Trouble::NoDriver | Trouble::LaneBusy => false,
        }
    }

    fn fault(self) -> crate::Fault {
        match self {
            _ if self.is_lost() => crate::Fault::Lost,
            Trouble::Vulkan(error) if error.is_out_of_memory() => crate::Fault::Full,
            Trouble::Cuda(error) if error.error == engine::CudaError::OUT_OF_MEMORY => crate::Fault::Full,
            Trouble::LaneBusy => crate::Fault::Timeout,
            _ => crate::Fault::Io(libc::EIO),
        }
    }
}
