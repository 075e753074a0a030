//! A store's reports about itself while it is open.

use crate::State;
use std::sync::Arc;
use std::time::{Duration, SystemTime};

/// A store that tells how its members are.
pub trait Report {
    /// The condition of each member.
    fn conditions(&self) -> Vec<Condition>;

    /// Has `tell` called whenever a member's condition changes, once for each change, by a thread
    /// that may wait.
    fn when_changed(&self, tell: TellChange);

    /// The time of its opening until the first operation, stage by stage.
    fn stages(&self) -> Vec<(&'static str, Duration)>;

    /// Calls `tell` once what a member opens behind its first operations is there, or will not
    /// come; at once where that is over already, and never where there is nothing of the kind.
    fn when_joined(&self, tell: Tell);
}

/// The listener that is told how the opening of a store went on; see [`Report::when_joined`].
pub type Tell = Arc<dyn Fn(&Joined) + Send + Sync>;

/// The callback for changes; see [`Report::when_changed`].
pub type TellChange = Arc<dyn Fn(&Condition) + Send + Sync>;

/// How a member of a store is, since when, and why.
#[derive(Clone, PartialEq, Debug)]
pub struct Condition {
    /// Its name: `NVIDIA H200, driver 580.159.04`.
    pub part: String,
    /// Whether it can be relied on.
    pub state: State,
    /// The ways to it that it has now.
    pub ways: Vec<&'static str>,
    /// Each fast way that it has not, and why.
    pub missing: Vec<(&'static str, String)>,
    /// Since when it is so.
    pub since: SystemTime,
    /// The reason for the change; `None`: it was opened.
    pub why: Option<String>,
    /// Another process could reach all that is kept of it.
    pub wants_another_process: bool,
}

/// How what a store opens behind its first operations went.
#[derive(Clone, Debug)]
pub struct Joined {
    /// The store, or the part of it.
    pub store: String,
    /// The time of each stage.
    pub stages: Vec<(&'static str, Duration)>,
    /// The part that is not there, and why.
    pub missing: Option<String>,
    /// Since the opening of the store began.
    pub after: Duration,
}
