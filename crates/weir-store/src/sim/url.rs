//! Parses `sim:[KEY=VALUE,...]`.

use crate::url::{Exact, Query, UrlProblem, pairs, size, value};
use std::fmt;
use std::time::Duration;
use weir_core::ByteSize;

const KEYS: &[&str] = &[
    "seed",
    "size",
    "chunk",
    "read_error",
    "write_error",
    "corrupt",
    "lose",
    "lost_slot",
    "delay",
    "latency_us",
    "die_after",
    "panic_after",
];

/// The faults of a simulated store, and their times. Probabilities are per operation, from 0 to 1,
/// default 0.
#[derive(Clone, PartialEq, Debug)]
pub struct SimUrl {
    /// The seed of each lane's random numbers. A lane's faults depend only on this, on the number
    /// of lanes opened before, and on the lane's own operations.
    pub seed: u64,
    /// Room for pages.
    pub size: ByteSize,
    /// Bytes of a chunk. `None`: the whole store is one chunk.
    pub chunk: Option<ByteSize>,
    /// Probability that a read fails with EIO.
    pub read_error: f64,
    /// Probability that a write fails with EIO and leaves the slot as it was.
    pub write_error: f64,
    /// Probability that a write is acknowledged and stored with one bit flipped.
    pub corrupt: f64,
    /// Probability that a write is acknowledged and not done.
    pub lose: f64,
    /// Every write to this slot is acknowledged and not done.
    pub lost_slot: Option<u32>,
    /// Each operation finishes in one of the next `delay` polls, evenly distributed, so operations
    /// overtake one another. 0: it finishes when it is queued, as in memory.
    pub delay: u32,
    /// Least time from an operation's submission to its end, by the clock.
    pub latency: Duration,
    /// After this many operations of all lanes together, the store is lost with all its pages.
    pub die_after: Option<u64>,
    /// After this many operations, each further one panics, as buggy code does.
    pub panic_after: Option<u64>,
}

impl Default for SimUrl {
    /// A store of 64 MiB without faults.
    fn default() -> Self {
        SimUrl {
            seed: 0,
            size: ByteSize(64 << 20),
            chunk: None,
            read_error: 0.0,
            write_error: 0.0,
            corrupt: 0.0,
            lose: 0.0,
            lost_slot: None,
            delay: 0,
            latency: Duration::ZERO,
            die_after: None,
            panic_after: None,
        }
    }
}

impl SimUrl {
    pub(crate) fn parse(text: &str) -> Result<Self, UrlProblem> {
        let mut url = SimUrl::default();
        for (key, text) in pairs(text, ',', KEYS)? {
            match key {
                "seed" => url.seed = value(key, text, "a whole number")?,
                "size" => url.size = size(key, text)?,
                "chunk" => url.chunk = Some(size(key, text)?),
                "read_error" => url.read_error = probability(key, text)?,
                "write_error" => url.write_error = probability(key, text)?,
                "corrupt" => url.corrupt = probability(key, text)?,
                "lose" => url.lose = probability(key, text)?,
                "lost_slot" => url.lost_slot = Some(value(key, text, "a slot's number")?),
                "delay" => url.delay = value(key, text, "a number of polls")?,
                "latency_us" => {
                    url.latency = Duration::from_micros(value(key, text, "a number of microseconds")?);
                }
                "die_after" => url.die_after = Some(value(key, text, "a number of operations")?),
                _ => url.panic_after = Some(value(key, text, "a number of operations")?),
            }
        }
        Ok(url)
    }
}

fn probability(key: &'static str, text: &str) -> Result<f64, UrlProblem> {
    let expected = "a probability from 0 to 1, such as 1e-4";
    let chance: f64 = value(key, text, expected)?;
    if (0.0..=1.0).contains(&chance) {
        return Ok(chance);
    }
    Err(UrlProblem::Value { key, value: text.to_owned(), expected })
}

impl fmt::Display for SimUrl {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let default = SimUrl::default();
        f.write_str("sim:")?;
        let mut query = Query::new(f, "", ",");
        query.pair(self.seed != default.seed, "seed", self.seed)?;
        query.pair(self.size != default.size, "size", Exact(self.size))?;
        query.pair(self.chunk.is_some(), "chunk", Exact(self.chunk.unwrap_or_default()))?;
        query.pair(self.read_error > 0.0, "read_error", self.read_error)?;
        query.pair(self.write_error > 0.0, "write_error", self.write_error)?;
        query.pair(self.corrupt > 0.0, "corrupt", self.corrupt)?;
        query.pair(self.lose > 0.0, "lose", self.lose)?;
        query.pair(self.lost_slot.is_some(), "lost_slot", self.lost_slot.unwrap_or_default())?;
        query.pair(self.delay > 0, "delay", self.delay)?;
        query.pair(self.latency > Duration::ZERO, "latency_us", self.latency.as_micros())?;
        query.pair(self.die_after.is_some(), "die_after", self.die_after.unwrap_or_default())?;
        query.pair(self.panic_after.is_some(), "panic_after", self.panic_after.unwrap_or_default())
    }
}
