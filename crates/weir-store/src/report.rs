//! Reports of an open store about its members.

use crate::State;
use std::sync::Arc;
use std::time::{Duration, SystemTime};

/// A store that reports the conditions of its members.
pub trait Report {
    /// The condition of each member.
    fn conditions(&self) -> Vec<Condition>;

    /// Calls `tell` once for each change of a member's condition, on a thread that may wait.
    fn when_changed(&self, tell: TellChange);

    /// The time from the store's opening to its first operation, stage by stage.
    fn stages(&self) -> Vec<(&'static str, Duration)>;

    /// Calls `tell` once the parts that a member opens after its first operations are ready, or
    /// have failed. Calls `tell` at once if they are ready or failed already, and never for a
    /// member without such parts.
    fn when_joined(&self, tell: Tell);
}

/// The listener for the late parts of a store; see [`Report::when_joined`].
pub type Tell = Arc<dyn Fn(&Joined) + Send + Sync>;

/// The callback for changes; see [`Report::when_changed`].
pub type TellChange = Arc<dyn Fn(&Condition) + Send + Sync>;

/// The condition of a store's member: its state, since when, and why.
#[derive(Clone, PartialEq, Debug)]
pub struct Condition {
    /// The member's name, such as `NVIDIA H200, driver 580.159.04`.
    pub part: String,
    /// The member's state.
    pub state: State,
    /// The paths to the member that work now.
    pub ways: Vec<&'static str>,
    /// Each fast path that does not work, and why.
    pub missing: Vec<(&'static str, String)>,
    /// The time when the member's state last changed.
    pub since: SystemTime,
    /// The reason for the last change of the state; `None` if the member was only opened.
    pub why: Option<String>,
    /// Whether this process cannot reach what the member holds, but a new process could.
    pub wants_another_process: bool,
}

/// The outcome of opening the parts that a store opens after its first operations.
#[derive(Clone, Debug)]
pub struct Joined {
    /// The name of the store. For a store with several cards, the name of the card.
    pub store: String,
    /// Each stage of the opening, with its time.
    pub stages: Vec<(&'static str, Duration)>,
    /// The part that is missing, and why. `None` if every part is open.
    pub missing: Option<String>,
    /// Time since the opening of the store began.
    pub after: Duration,
}
