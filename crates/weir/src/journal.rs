//! A directory with a journal in it: changes to the machine, on disk before they are made. One
//! process at a time has the directory. After a crash, the next one reads which changes to undo.

use serde::Serialize;
use serde::de::DeserializeOwned;
use std::fs;
use std::io::{self, Write as _};
use std::os::unix::fs::{DirBuilderExt as _, MetadataExt as _};
use std::path::{Path, PathBuf};
use weir_cli::failure::Failure;

/// The journal's file in its directory.
pub const FILE: &str = "state.json";

/// Takes the lock, and tries again for a while after a refusal. A child of a killed `weir on` may
/// hold the lock until it runs its own program.
fn lock_soon(file: &fs::File) -> rustix::io::Result<()> {
    const TRIES: u32 = 25;
    let mut result = Ok(());
    for _ in 0..TRIES {
        result = rustix::fs::flock(file, rustix::fs::FlockOperation::NonBlockingLockExclusive);
        if result != Err(rustix::io::Errno::WOULDBLOCK) {
            break;
        }
        std::thread::sleep(std::time::Duration::from_millis(20));
    }
    result
}

/// Whether this open directory is still the one at the path.
fn is_at(open: &fs::File, path: &Path) -> bool {
    let identity = |found: io::Result<fs::Metadata>| found.map(|found| (found.dev(), found.ino())).ok();
    let there = identity(fs::metadata(path));
    there.is_some() && there == identity(open.metadata())
}

/// A directory for a journal, locked against other processes.
#[derive(Debug)]
struct Directory {
    path: PathBuf,
    _lock: Lock,
}

/// The lock of the directory, which is unlocked explicitly. If the descriptor were only closed, the
/// directory could stay locked. A child that another thread has just started has a copy of the
/// descriptor, until the child runs its own program.
#[derive(Debug)]
struct Lock(fs::File);

impl Drop for Lock {
    fn drop(&mut self) {
        // If the unlocking fails, the kernel ends the lock once every copy of this descriptor is
        // closed.
        let _ = rustix::fs::flock(&self.0, rustix::fs::FlockOperation::Unlock);
    }
}

impl Directory {
    /// Locks the directory, and makes it if it is missing. `commands` are those that use it, for
    /// the error's text.
    ///
    /// # Errors
    /// Fails when the directory cannot be made, or another process has it.
    fn open(path: &Path, commands: &str) -> Result<Self, Failure> {
        let failed = |error: io::Error| {
            let is_root = rustix::process::geteuid().is_root();
            let next = if is_root { "give another --runtime DIRECTORY" } else { "use sudo" };
            Failure::Failed(format!("cannot use {}: {error}; {next}", path.display()))
        };
        loop {
            fs::DirBuilder::new().recursive(true).mode(0o700).create(path).map_err(failed)?;
            let lock = match fs::File::open(path) {
                // The process that had locked the directory has just removed it.
                Err(error) if error.kind() == io::ErrorKind::NotFound => continue,
                lock => lock.map_err(failed)?,
            };
            match lock_soon(&lock) {
                Ok(()) => {}
                Err(rustix::io::Errno::WOULDBLOCK) => {
                    let path = path.display();
                    return Err(Failure::Failed(format!(
                        "another {commands} is at work in {path}; wait for it"
                    )));
                }
                Err(errno) => return Err(failed(errno.into())),
            }
            // The lock of a removed directory does not protect the new directory at the path.
            if is_at(&lock, path) {
                return Ok(Directory { path: path.to_owned(), _lock: Lock(lock) });
            }
        }
    }

    /// Writes the journal whole or not at all: a new file replaces the old one.
    ///
    /// # Errors
    /// Fails when the file cannot be written.
    fn save(&self, state: &impl Serialize) -> Result<(), Failure> {
        let path = self.path.join(FILE);
        let save = || -> io::Result<()> {
            let new = self.path.join(format!("{FILE}.new"));
            let mut file = fs::File::create(&new)?;
            file.write_all(&serde_json::to_vec_pretty(state)?)?;
            file.sync_all()?;
            fs::rename(&new, &path)
        };
        save().map_err(|error| Failure::Failed(format!("cannot write {}: {error}", path.display())))
    }

    /// Removes the journal's file, and the directory if it is then empty.
    ///
    /// # Errors
    /// Fails when they cannot be removed.
    fn delete(self) -> Result<(), Failure> {
        for name in [FILE, "state.json.new"] {
            match fs::remove_file(self.path.join(name)) {
                Err(error) if error.kind() != io::ErrorKind::NotFound => return Err(Failure::failed(error)),
                _ => {}
            }
        }
        match fs::remove_dir(&self.path) {
            // The directory may be gone: systemd itself removes a unit's run-time directory. Or it
            // may stay, because it has files that are not Weir's. Neither is a failure.
            Ok(()) => Ok(()),
            Err(error)
                if matches!(error.raw_os_error(), Some(libc::ENOENT | libc::ENOTEMPTY | libc::EBUSY)) =>
            {
                Ok(())
            }
            Err(error) => Err(Failure::failed(error)),
        }
    }
}

/// The content of a journal.
pub trait Record: Serialize + DeserializeOwned {
    /// The version of the file, in its key `schema`.
    const SCHEMA: u32;
    /// The commands that use the journal, for the text of an error.
    const COMMANDS: &str;
    /// A change to the machine, with the values that undo it.
    type Step;

    /// The content of a new journal.
    fn fresh() -> Self;

    /// The steps that were done, in order.
    fn steps(&mut self) -> &mut Vec<Self::Step>;
}

/// The journal in a directory that no other process has at the same time.
#[derive(Debug)]
pub struct Journal<R> {
    directory: Directory,
    state: R,
}

impl<R: Record> Journal<R> {
    /// Locks the directory, makes it if it is missing, and reads the journal in it.
    ///
    /// # Errors
    /// Fails when the directory cannot be made, another process has it, or the file has another
    /// schema.
    pub fn open(path: &Path) -> Result<Self, Failure> {
        let directory = Directory::open(path, R::COMMANDS)?;
        let state = read(path)?.unwrap_or_else(R::fresh);
        Ok(Journal { directory, state })
    }

    /// The state as recorded so far.
    pub fn state(&self) -> &R {
        &self.state
    }

    /// Changes the state, and records it.
    pub fn change(&mut self, change: impl FnOnce(&mut R)) -> Result<(), Failure> {
        change(&mut self.state);
        self.directory.save(&self.state)
    }

    /// Records a step that is about to be done.
    pub fn intend(&mut self, step: R::Step) -> Result<(), Failure> {
        self.change(|state| state.steps().push(step))
    }

    /// Corrects the last step when more is known about it.
    pub fn amend(&mut self, step: R::Step) -> Result<(), Failure> {
        self.change(|state| {
            state.steps().pop();
            state.steps().push(step);
        })
    }

    /// Removes the journal's file, and the directory if it is then empty.
    ///
    /// # Errors
    /// Fails when they cannot be removed.
    pub fn delete(self) -> Result<(), Failure> {
        self.directory.delete()
    }

    /// A copy of the descriptor that has the lock, as a child has it between fork and exec.
    #[cfg(test)]
    pub fn descriptor(&self) -> io::Result<fs::File> {
        self.directory._lock.0.try_clone()
    }
}

/// The journal in a directory, if there is one.
///
/// # Errors
/// Fails when the file cannot be read, or has another schema.
pub fn read<R: Record>(directory: &Path) -> Result<Option<R>, Failure> {
    let path = directory.join(FILE);
    let text = match fs::read(&path) {
        Ok(text) => text,
        Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(None),
        Err(error) => {
            return Err(Failure::Failed(format!("cannot read {}: {error}; run as root", path.display())));
        }
    };
    let broken = |problem: String| {
        Failure::Failed(format!(
            "{} cannot be understood: {problem}; use the weir that wrote it to turn off",
            path.display()
        ))
    };
    let value: serde_json::Value =
        serde_json::from_slice(&text).map_err(|error| broken(error.to_string()))?;
    let found = value.get("schema").and_then(serde_json::Value::as_u64);
    if found.is_some_and(|found| found != u64::from(R::SCHEMA)) {
        let (found, known) = (found.unwrap_or_default(), R::SCHEMA);
        return Err(broken(format!("it is of schema {found}, this weir knows {known}")));
    }
    serde_json::from_value(value).map(Some).map_err(|error| broken(error.to_string()))
}
