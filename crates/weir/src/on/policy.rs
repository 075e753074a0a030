//! Power against latency.
//!
//! Most of what a sporadic fault costs is processors waking up. A thread that looks for the next
//! request for some time before it sleeps answers the requests of a burst without that cost, and
//! keeps a processor awake for that long after each burst: an idle daemon makes no wake-ups under
//! any policy.

use clap::ValueEnum;

/// The three settings.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, ValueEnum)]
pub enum Policy {
    /// Sleep at once. No processor is awake for longer than a request takes.
    Battery,
    /// Look for the next request for 20 microseconds.
    #[default]
    Balanced,
    /// Look for the next request for 25 milliseconds, so that a processor is busy while faults come
    /// one by one, and keep the others out of deep sleep meanwhile.
    LowLatency,
}

impl Policy {
    /// For how long a connection's thread looks for the next request before it sleeps.
    pub fn spin_us(self) -> u32 {
        match self {
            Policy::Battery => 0,
            Policy::Balanced => 20,
            // A desktop feels faults that are some 20 ms apart.
            Policy::LowLatency => 25_000,
        }
    }

    /// Whether processors may not sleep deeply while requests come in bursts.
    pub fn bounds_cpu_latency(self) -> bool {
        self == Policy::LowLatency
    }
}
