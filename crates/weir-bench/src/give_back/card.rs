//! The process that needs the card. It allocates most of the card's memory step by step, as a game
//! does while it loads, and then ends.

use super::GiveBackError;
use crate::report::percentile;
use serde::{Deserialize, Serialize};
use std::path::Path;
use std::time::{Duration, Instant};
use weir_core::ByteSize;
use weir_store::vram::engine::{BatchCopies, Context, Which};

/// Time that a step may take before it is given up.
const PATIENCE: Duration = Duration::from_secs(10);
/// The fraction of the card's memory that the process allocates.
const SHARE: f64 = 0.9;

/// The memory that the process got, and its waiting times.
#[derive(Clone, Copy, Debug, Serialize, Deserialize)]
pub struct Allocated {
    /// Number of bytes that the process has allocated.
    pub bytes: u64,
    /// Bytes of the card's whole memory.
    pub total: u64,
    /// Number of steps in which the process allocated.
    pub steps: usize,
    /// The median time of a step, in milliseconds.
    pub p50_ms: f64,
    /// The longest step, from the first attempt until it got the memory.
    pub longest_ms: f64,
}

/// Allocates in steps of `step` until one more would exceed 90% of the card's memory. Each step
/// follows as soon as the one before has succeeded; a refused step is tried again at once.
///
/// # Errors
/// Fails without CUDA, or when a step does not succeed in 10 s.
pub fn allocate(step: ByteSize) -> Result<Allocated, GiveBackError> {
    let failed = |why: String| GiveBackError::Process { what: "CUDA", why };
    let context =
        Context::open(Path::new("libcuda.so.1"), Which::Index(0), BatchCopies { reads: 1, writes: 1 })
            .map_err(failed)?;
    let (_, total) = context.memory().map_err(|error| failed(error.to_string()))?;
    let most = (total as f64 * SHARE) as u64;
    let (mut held, mut times) = (Vec::new(), Vec::new());
    while (held.len() as u64 + 1) * step.0 <= most {
        let began = Instant::now();
        loop {
            match context.allocate(step.0) {
                Ok(memory) => {
                    held.push(memory);
                    break;
                }
                Err(error) if began.elapsed() > PATIENCE => {
                    let bytes = ByteSize(held.len() as u64 * step.0);
                    return Err(failed(format!("no memory after {bytes} of it: {error}")));
                }
                Err(_) => std::thread::sleep(Duration::from_millis(1)),
            }
        }
        times.push(began.elapsed().as_nanos() as u64);
    }
    let longest = times.iter().copied().max().unwrap_or(0);
    Ok(Allocated {
        bytes: held.len() as u64 * step.0,
        total,
        steps: times.len(),
        p50_ms: percentile(&mut times, 50.0) as f64 / 1e6,
        longest_ms: longest as f64 / 1e6,
    })
}
