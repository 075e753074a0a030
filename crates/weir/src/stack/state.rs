//! The journal of a stack: its changes to the machine, on disk before they are made.

use crate::journal;
use serde::{Deserialize, Serialize};
use std::path::{Path, PathBuf};
use weir_cli::failure::Failure;

/// The version of the journal's file.
const SCHEMA: u32 = 1;

/// A change to the machine, with the values that undo it.
#[derive(Clone, PartialEq, Eq, Debug, Serialize, Deserialize)]
#[serde(tag = "step", rename_all = "kebab-case")]
pub enum Step {
    /// A kernel module that was not loaded before.
    Module {
        /// The module's name for modprobe.
        name: String,
    },
    /// A stripe over several disks.
    Array {
        /// The array's device, such as `/dev/md0`.
        path: PathBuf,
        /// The array's identity, which its disks carry.
        uuid: String,
        /// The disks, in the order of the stripe.
        members: Vec<PathBuf>,
    },
    /// The array or single disk that bcache stands in front of.
    Backing {
        /// The device of the array or disk.
        device: PathBuf,
        /// The identity of bcache's superblock there; `None` until it is made.
        uuid: Option<String>,
    },
    /// The cache of bcache, a set of one device.
    Set {
        /// The cache's device.
        device: PathBuf,
        /// The identity of the set.
        uuid: String,
        /// The size of the cache's device.
        bytes: u64,
    },
}

/// The progress of a stack.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum Phase {
    /// `create` has done some of its steps. Nobody was told of the device yet.
    Creating,
    /// `create` has done all its steps.
    Up,
    /// `destroy` has undone some of the steps.
    Destroying,
}

/// The content of the journal's file.
#[derive(Clone, PartialEq, Eq, Debug, Serialize, Deserialize)]
pub struct State {
    /// The schema's version: [`SCHEMA`].
    pub schema: u32,
    /// The version of Weir that wrote the file.
    pub version: String,
    /// The progress of the stack.
    pub phase: Phase,
    /// The steps that were done, in order.
    pub steps: Vec<Step>,
    /// Whether pages that only the cache had were given up.
    #[serde(default)]
    pub has_lost: bool,
}

impl State {
    /// The array or single disk that bcache stands in front of.
    pub fn backing(&self) -> Option<&Path> {
        self.steps.iter().find_map(|step| match step {
            Step::Backing { device, .. } => Some(device.as_path()),
            _ => None,
        })
    }

    /// The device, the identity and the size of the cache.
    pub fn set(&self) -> Option<(&Path, &str, u64)> {
        self.steps.iter().find_map(|step| match step {
            Step::Set { device, uuid, bytes } => Some((device.as_path(), uuid.as_str(), *bytes)),
            _ => None,
        })
    }

    /// The disks of the stripe, or the single disk.
    pub fn homes(&self) -> Vec<&Path> {
        let members = self.steps.iter().find_map(|step| match step {
            Step::Array { members, .. } => Some(members.iter().map(PathBuf::as_path).collect()),
            _ => None,
        });
        members.unwrap_or_else(|| self.backing().into_iter().collect())
    }
}

impl journal::Record for State {
    const SCHEMA: u32 = SCHEMA;
    const COMMANDS: &str = "weir stack create or destroy";
    type Step = Step;

    fn fresh() -> Self {
        State {
            schema: SCHEMA,
            version: env!("CARGO_PKG_VERSION").to_owned(),
            phase: Phase::Creating,
            steps: Vec::new(),
            has_lost: false,
        }
    }

    fn steps(&mut self) -> &mut Vec<Step> {
        &mut self.steps
    }
}

/// The journal, which no other `weir stack` has at the same time.
pub type Journal = journal::Journal<State>;

impl Journal {
    /// Removes the last step from the journal, because the step is undone.
    pub fn strike_last(&mut self) -> Result<(), Failure> {
        self.change(|state| drop(state.steps.pop()))
    }

    /// Records the progress of the stack.
    pub fn enter(&mut self, phase: Phase) -> Result<(), Failure> {
        self.change(|state| state.phase = phase)
    }

    /// Records that pages are given up.
    pub fn note_lost(&mut self) -> Result<(), Failure> {
        self.change(|state| state.has_lost = true)
    }
}

/// The state in a directory, if there is one.
pub fn read(directory: &Path) -> Result<Option<State>, Failure> {
    journal::read(directory)
}
