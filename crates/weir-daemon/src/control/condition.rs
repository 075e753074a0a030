//! The condition of each member of a store: its state, since when, and why.

use serde::{Deserialize, Serialize};
use std::fmt;
use std::time::{SystemTime, UNIX_EPOCH};

/// The condition of a member of a store, such as a card: each member can fail by itself.
#[derive(Clone, PartialEq, Debug, Serialize, Deserialize)]
pub struct Condition {
    /// The member's name.
    pub part: String,
    /// The member's state: `online`, `draining`, `unreachable` or `lost`.
    pub state: String,
    /// The paths to the member's memory that work now.
    pub ways: Vec<String>,
    /// The paths that do not work now.
    pub missing: Vec<Missing>,
    /// Time of the last change of state, in seconds of the Unix epoch.
    pub since_unix_s: u64,
    /// The reason for the last change; null if the member has not changed since it was opened.
    pub why: Option<String>,
}

/// A path that does not work.
#[derive(Clone, PartialEq, Debug, Serialize, Deserialize)]
pub struct Missing {
    /// The path's name.
    pub way: String,
    /// The reason why the path does not work.
    pub why: String,
}

/// The processor's own path to a card's memory.
pub const WINDOW: &str = "mapped";

/// The only path to a node of a fleet: the network.
const NETWORK: &str = "redis";

impl Condition {
    /// Converts a condition that a store reports.
    pub fn of(condition: &weir_store::Condition) -> Self {
        let missing = condition.missing.iter();
        Condition {
            part: condition.part.clone(),
            state: format!("{:?}", condition.state).to_lowercase(),
            ways: condition.ways.iter().map(|&way| way.to_owned()).collect(),
            missing: missing.map(|(way, why)| Missing { way: (*way).to_owned(), why: why.clone() }).collect(),
            since_unix_s: seconds(condition.since),
            why: condition.why.clone(),
        }
    }

    /// Whether the member's fastest path does not work.
    pub fn is_slow(&self) -> bool {
        !self.ways.iter().any(|way| [WINDOW, NETWORK].contains(&way.as_str()))
    }
}

fn seconds(at: SystemTime) -> u64 {
    at.duration_since(UNIX_EPOCH).map_or(0, |since| since.as_secs())
}

/// Writes one line, without a line break: the member, its paths, the missing paths, and the last
/// change.
impl fmt::Display for Condition {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Condition { part, state, ways, missing, since_unix_s, why } = self;
        write!(f, "{part}: {state}")?;
        match ways.as_slice() {
            [] => write!(f, ", by no way")?,
            ways => write!(f, ", by {}", ways.join(" and "))?,
        }
        if let Some(why) = why {
            let ago = seconds(SystemTime::now()).saturating_sub(*since_unix_s);
            match ago {
                0 => write!(f, ": {why}")?,
                _ => write!(f, ", for {ago} s: {why}")?,
            }
        }
        for Missing { way, why: without } in missing {
            // `why` may contain this reason already. Do not print it twice.
            if !why.as_ref().is_some_and(|why| why.contains(without.as_str())) {
                write!(f, "; not by {way}: {without}")?;
            }
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_line_says_the_ways_what_is_missing_and_what_happened() {
        let mut condition = Condition {
            part: "NVIDIA H200, driver 580.159.04".to_owned(),
            state: "online".to_owned(),
            ways: vec!["engine".to_owned()],
            missing: vec![Missing { way: WINDOW.to_owned(), why: "no libvulkan.so.1".to_owned() }],
            since_unix_s: 0,
            why: None,
        };
        let line = "NVIDIA H200, driver 580.159.04: online, by engine; not by mapped: no libvulkan.so.1";
        assert_eq!(condition.to_string(), line);
        assert!(condition.is_slow());
        condition.why = Some("CUDA is lost: cuEventQuery answered CUDA error 719 (launch failed)".to_owned());
        condition.missing[0].why = "cuEventQuery answered CUDA error 719 (launch failed)".to_owned();
        let line = condition.to_string();
        assert_eq!(line.matches("719").count(), 1, "{line}");
        assert!(line.contains(" s: CUDA is lost"), "{line}");
    }
}
