//! How a part of a store is, since when, and why.

use serde::{Deserialize, Serialize};
use std::fmt;
use std::time::{SystemTime, UNIX_EPOCH};

/// A part of a store that can fail by itself: a card.
#[derive(Clone, PartialEq, Debug, Serialize, Deserialize)]
pub struct Condition {
    /// Its name.
    pub part: String,
    /// `online`, `draining`, `unreachable` or `lost`.
    pub state: String,
    /// The ways to its memory that it has now.
    pub ways: Vec<String>,
    /// Those that it has not.
    pub missing: Vec<Missing>,
    /// Since when it is so, in seconds of the Unix epoch.
    pub since_unix_s: u64,
    /// The reason for the change; null: it was opened.
    pub why: Option<String>,
}

/// A way that there is not.
#[derive(Clone, PartialEq, Debug, Serialize, Deserialize)]
pub struct Missing {
    /// Which.
    pub way: String,
    /// Why not.
    pub why: String,
}

/// The processor's own way to a card's memory.
pub const WINDOW: &str = "mapped";

impl Condition {
    /// Its lines in `status`.
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

    /// Whether its fastest way is missing.
    pub fn is_slow(&self) -> bool {
        !self.ways.iter().any(|way| way == WINDOW)
    }
}

fn seconds(at: SystemTime) -> u64 {
    at.duration_since(UNIX_EPOCH).map_or(0, |since| since.as_secs())
}

/// One line without its line break: the part, its paths, the missing ones, and what happened when.
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
            write!(f, ", for {ago} s: {why}")?;
        }
        for Missing { way, why: without } in missing {
            // The reason is said already.
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
