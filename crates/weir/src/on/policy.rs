//! Policies that trade power for latency.
//!
//! A sporadic page fault costs mostly the wake-up of processors. A thread that spins for the next
//! request before it sleeps answers a burst without that cost. It keeps a processor awake for the
//! time of its spinning after each burst. An idle daemon makes no wake-ups under any policy.

use clap::ValueEnum;

/// The three policies.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, ValueEnum)]
pub enum Policy {
    /// Threads sleep as soon as they have no request. No processor is awake for longer than a
    /// request takes.
    Battery,
    /// Threads spin for the next request for 20 microseconds.
    #[default]
    Balanced,
    /// Threads spin for the next request for 25 milliseconds. So a processor is busy while page
    /// faults come one by one. The other processors are kept out of deep sleep meanwhile.
    LowLatency,
}

impl Policy {
    /// Time that a connection's thread spins for the next request before it sleeps.
    pub fn spin_us(self) -> u32 {
        match self {
            Policy::Battery => 0,
            Policy::Balanced => 20,
            // A desktop's page faults are some 20 ms apart.
            Policy::LowLatency => 25_000,
        }
    }

    /// Whether processors are kept out of deep sleep while requests come in bursts.
    pub fn bounds_cpu_latency(self) -> bool {
        self == Policy::LowLatency
    }
}
