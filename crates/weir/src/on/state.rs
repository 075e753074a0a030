//! The journal of `weir on`: its changes to the machine, on disk before they are made. So `weir
//! off` can undo all of them, even after a crash between two steps.

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
    /// A kernel module that Weir loads. It was not loaded before.
    Module {
        /// The module's name for modprobe.
        name: String,
    },
    /// A file that Weir makes, and its directory. The file did not exist before.
    File {
        /// The file's path.
        path: PathBuf,
    },
    /// A daemon that Weir started, with its keeper.
    Daemon {
        /// The directory of the daemon's configuration, sockets and log.
        directory: PathBuf,
        /// The systemd unit that runs the daemon, if one does.
        unit: Option<String>,
        /// The keeper's process, if no unit runs the daemon.
        process: Option<Process>,
    },
    /// A block device that Weir made of a daemon's volume.
    Device {
        /// The device's path, such as `/dev/nbd0`.
        path: PathBuf,
        /// The front end that made the device.
        front: Front,
        /// The file under a loop device, or the socket behind an NBD device.
        #[serde(default, skip_serializing_if = "Option::is_none")]
        file: Option<PathBuf>,
        /// The process that connected an NBD device.
        #[serde(default, skip_serializing_if = "Option::is_none")]
        by: Option<u32>,
        /// The part's volume, if the device is one of several parts.
        #[serde(default, skip_serializing_if = "Option::is_none")]
        volume: Option<String>,
    },
    /// A kernel setting that Weir changed.
    Setting {
        /// The setting's file, below `/proc/sys` or `/sys`.
        path: PathBuf,
        /// The setting's value before the change.
        before: String,
        /// The setting's value after the change.
        after: String,
        /// The reason for the change of the setting.
        why: String,
    },
    /// systemd units that may not start while Weir is on, masked until the next boot at most.
    Mask {
        /// The names of the masked units.
        units: Vec<String>,
    },
    /// A part that was turned off to give its memory back, with the values that turn it on again.
    Away {
        /// The part's volume. An earlier weir had a daemon for each part, and wrote none.
        #[serde(default)]
        volume: Option<String>,
        /// The front end that made the part's device.
        front: Front,
        /// The priority of the part's device.
        priority: i32,
        /// The part's size in bytes.
        bytes: u64,
        /// The part is off only while the machine sleeps.
        #[serde(default)]
        asleep: bool,
    },
    /// A device on which the kernel swaps.
    Swap {
        /// The device's path.
        path: PathBuf,
        /// The device's priority among the swap devices.
        priority: i32,
    },
}

/// A process with the time of its start, which tells it from a later process of the same number.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Serialize, Deserialize)]
pub struct Process {
    /// The process's number.
    pub pid: u32,
    /// The time of the process's start: field 22 of `/proc/PID/stat`.
    pub started: u64,
}

/// The front end that makes a block device of the daemon's volume.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum Front {
    /// The kernel's ublk driver.
    Ublk,
    /// The kernel's NBD client.
    Nbd,
    /// A FUSE file under a loop device.
    Fuse,
}

/// The progress of `weir on` or `weir off`.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum Phase {
    /// `weir on` has done some of its steps.
    TurningOn,
    /// `weir on` has done all its steps.
    On,
    /// `weir off` has undone some of the steps.
    TurningOff,
}

/// The command line that turns the same device on again.
#[derive(Clone, PartialEq, Eq, Debug, Default, Serialize, Deserialize)]
pub struct Again {
    /// The arguments of `weir on`.
    #[serde(default)]
    pub arguments: Vec<String>,
    /// The working directory of `weir on`; empty means the root.
    #[serde(default)]
    pub directory: PathBuf,
}

/// The content of the journal's file.
#[derive(Clone, PartialEq, Eq, Debug, Serialize, Deserialize)]
pub struct State {
    /// The schema's version: [`SCHEMA`].
    pub schema: u32,
    /// The version of Weir that wrote the file.
    pub version: String,
    /// The progress of `weir on` or `weir off`.
    pub phase: Phase,
    /// The command line of `weir on`, to turn the same device on again.
    #[serde(flatten)]
    pub again: Again,
    /// The number of parts, with those that are away.
    #[serde(default)]
    pub parts: u8,
    /// The steps that were done, in order.
    pub steps: Vec<Step>,
}

impl State {
    /// The devices that carry swap, or were about to.
    pub fn swaps(&self) -> impl Iterator<Item = &Path> {
        self.steps.iter().filter_map(|step| match step {
            Step::Swap { path, .. } => Some(path.as_path()),
            _ => None,
        })
    }

    /// Whether each part has a daemon of its own, as an earlier weir made them.
    pub fn is_of_daemons(&self) -> bool {
        let has_no_volume =
            |step: &Step| matches!(step, Step::Device { volume: None, .. } | Step::Away { volume: None, .. });
        self.parts > 1 && self.steps.iter().any(has_no_volume)
    }

    /// Whether Weir is on and every part is away: then there is nothing to swap on.
    pub fn is_all_away(&self) -> bool {
        let is_away = |step: &Step| matches!(step, Step::Away { .. });
        self.phase == Phase::On && self.swaps().next().is_none() && self.steps.iter().any(is_away)
    }
}

impl journal::Record for State {
    const SCHEMA: u32 = SCHEMA;
    const COMMANDS: &str = "weir on, off or restart";
    type Step = Step;

    fn fresh() -> Self {
        State {
            schema: SCHEMA,
            version: env!("CARGO_PKG_VERSION").to_owned(),
            phase: Phase::TurningOn,
            again: Again::default(),
            parts: 0,
            steps: Vec::new(),
        }
    }

    fn steps(&mut self) -> &mut Vec<Step> {
        &mut self.steps
    }
}

/// The journal in the run-time directory, which no other `weir on` or `off` has at the same time.
pub type Journal = journal::Journal<State>;

impl Journal {
    /// Removes steps from the journal, because they are undone.
    pub fn remove(&mut self, which: impl Fn(&Step) -> bool) -> Result<(), Failure> {
        self.change(|state| state.steps.retain(|step| !which(step)))
    }

    /// Corrects any of the recorded steps.
    pub fn revise(&mut self, change: impl FnMut(&mut Step)) -> Result<(), Failure> {
        self.change(|state| state.steps.iter_mut().for_each(change))
    }

    /// Records the arguments of `weir on`.
    pub fn begin(&mut self, again: Again, parts: u8) -> Result<(), Failure> {
        self.change(|state| (state.again, state.parts, state.phase) = (again, parts, Phase::TurningOn))
    }

    /// Records the progress of `weir on` or `weir off`.
    pub fn enter(&mut self, phase: Phase) -> Result<(), Failure> {
        self.change(|state| state.phase = phase)
    }
}

/// The state in a directory, if there is one.
pub fn read(directory: &Path) -> Result<Option<State>, Failure> {
    journal::read(directory)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::journal::FILE;
    use std::fs;

    fn directory(name: &str) -> PathBuf {
        let path = std::env::temp_dir().join(format!("weir-state-{}-{name}", std::process::id()));
        let _ = fs::remove_dir_all(&path);
        path
    }

    fn swap() -> Step {
        Step::Swap { path: "/dev/nbd0".into(), priority: 100 }
    }

    #[test]
    fn what_is_intended_is_there_after_a_crash_and_gone_once_struck_out() {
        let directory = directory("crash");
        let mut journal = Journal::open(&directory).expect("a journal");
        journal.intend(Step::Module { name: "nbd".into() }).expect("written");
        journal.intend(swap()).expect("written");
        drop(journal);
        let mut journal = Journal::open(&directory).expect("again");
        assert_eq!(journal.state().phase, Phase::TurningOn);
        assert_eq!(journal.state().swaps().collect::<Vec<_>>(), [Path::new("/dev/nbd0")]);
        journal.remove(|_| true).expect("written");
        assert_eq!(read(&directory).expect("readable").expect("there").steps, []);
        journal.delete().expect("removed");
        assert!(!directory.exists());
    }

    #[test]
    fn two_cannot_have_it_at_once() {
        let directory = directory("lock");
        let journal = Journal::open(&directory).expect("a journal");
        let Err(Failure::Failed(error)) = Journal::open(&directory) else { panic!("both have it") };
        assert!(error.contains("another weir on, off or restart is at work in"), "{error}");
        journal.delete().expect("removed");
    }

    #[test]
    fn a_child_that_still_has_the_descriptor_does_not_keep_the_lock() {
        let directory = directory("child");
        let journal = Journal::open(&directory).expect("a journal");
        // The copied descriptor stands for the one of a child between fork and exec. Both have the
        // same open file.
        let child = journal.descriptor().expect("a descriptor");
        drop(journal);
        let again = fs::File::open(&directory).expect("there");
        let free = rustix::fs::flock(&again, rustix::fs::FlockOperation::NonBlockingLockExclusive);
        assert_eq!(free, Ok(()));
        drop(child);
        fs::remove_dir_all(&directory).expect("removed");
    }

    #[test]
    fn who_waited_for_a_directory_that_was_removed_has_the_one_that_is_there_now() {
        let directory = directory("removed");
        let off = Journal::open(&directory).expect("a journal");
        let waits = std::thread::spawn({
            let directory = directory.clone();
            move || Journal::open(&directory).expect("once the first has let it go")
        });
        // Waits until the other thread waits for the lock: then it has the directory open.
        let opened = |entry: fs::DirEntry| fs::read_link(entry.path()).is_ok_and(|path| path == directory);
        let twice = || {
            fs::read_dir("/proc/self/fd")
                .expect("descriptors")
                .flatten()
                .filter_map(|fd| opened(fd).then_some(()))
                .count()
                > 1
        };
        while !twice() {
            std::thread::yield_now();
        }
        off.delete().expect("removed");
        let mut on = waits.join().expect("no panic");
        on.intend(swap()).expect("it has a directory to write to");
        let Err(Failure::Failed(error)) = Journal::open(&directory) else { panic!("two have it") };
        assert!(error.contains("another weir on"), "{error}");
        on.delete().expect("removed");
    }

    #[test]
    fn a_file_of_another_schema_is_named_and_left_alone() {
        let directory = directory("schema");
        fs::create_dir_all(&directory).expect("made");
        for text in ["{", "{\"schema\":9,\"version\":\"9\",\"phase\":\"on\",\"steps\":[]}"] {
            fs::write(directory.join(FILE), text).expect("written");
            let Err(Failure::Failed(error)) = Journal::open(&directory) else { panic!("{text}") };
            assert!(error.contains("state.json"), "{error}");
            assert_eq!(fs::read_to_string(directory.join(FILE)).expect("there"), text);
        }
        fs::remove_dir_all(&directory).expect("removed");
    }
}
