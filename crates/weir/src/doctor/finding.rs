//! A finding: one line of the report of `weir doctor`.

use serde::Serialize;
use std::fmt;

/// The meaning of a finding for a user who wants to swap on Weir.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Debug, Serialize)]
#[serde(rename_all = "lowercase")]
pub enum Level {
    /// All is as it should be.
    Ok,
    /// Weir works, with less speed, safety or choice.
    Warn,
    /// A part of Weir cannot work here.
    Fail,
}

/// One line of the report of `weir doctor`.
#[derive(Debug, Serialize)]
pub struct Finding {
    /// The check's name. Stable: scripts may select by it.
    pub id: &'static str,
    pub level: Level,
    /// The value that the check saw.
    pub seen: String,
    /// The next step, if there is one.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub next: Option<String>,
}

impl Finding {
    pub fn ok(id: &'static str, seen: impl Into<String>) -> Self {
        Finding { id, level: Level::Ok, seen: seen.into(), next: None }
    }

    pub fn warn(id: &'static str, seen: impl Into<String>, next: impl Into<String>) -> Self {
        Finding { id, level: Level::Warn, seen: seen.into(), next: Some(next.into()) }
    }

    pub fn fail(id: &'static str, seen: impl Into<String>, next: impl Into<String>) -> Self {
        Finding { id, level: Level::Fail, seen: seen.into(), next: Some(next.into()) }
    }
}

impl fmt::Display for Finding {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let level = match self.level {
            Level::Ok => "ok",
            Level::Warn => "warn",
            Level::Fail => "FAIL",
        };
        write!(f, "{level:<5}{:<18}{}", self.id, self.seen)?;
        match &self.next {
            Some(next) => write!(f, "\n{:23}-> {next}", ""),
            None => Ok(()),
        }
    }
}
