//! The directory of a `weir run`, and the end of a run whose daemon or keeper this is. The run may
//! be killed, and so may the keeper.
//!
//! Signals do not end them before: a manager of services sends SIGTERM to all processes of a
//! service. The program may still need its pages then, to save what it has.
//!
//! Two runs in different PID namespaces may have the same PID and the same `TMPDIR`. So the name of
//! a directory has random digits too, and each run makes a directory of its own.

use rustix::fs::{FlockOperation, Mode, OFlags, flock};
use rustix::process::{Signal, geteuid, getpid, kill_process};
use rustix::rand::{GetRandomFlags, getrandom};
use std::ffi::OsStr;
use std::fs::{DirBuilder, File};
use std::io::{self, Read as _};
use std::os::fd::AsRawFd as _;
use std::os::unix::fs::{DirBuilderExt as _, MetadataExt as _};
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread;
use weir_export::share::{THREADS_MOST, path_of};
use weir_pager::{Ledger, directory};

/// Whether the run has ended. Until then this process heeds no signal that would end it.
static IS_OVER: AtomicBool = AtomicBool::new(false);

/// Sends this process SIGTERM as soon as the run has ended. Standard input is a pipe whose other
/// end the run holds, so standard input ends with the run.
///
/// # Errors
/// Fails when the system has no thread left.
pub fn watch() -> io::Result<()> {
    thread::Builder::new().name("weir-run-end".into()).spawn(|| {
        let mut input = io::stdin();
        while matches!(input.read(&mut [0; 16]), Ok(1..)) {}
        IS_OVER.store(true, Ordering::Release);
        let _ = kill_process(getpid(), Signal::TERM);
    })?;
    Ok(())
}

/// Whether the run has ended.
pub fn is_over() -> bool {
    IS_OVER.load(Ordering::Acquire)
}

/// The start of the name of a run's directory. The PID of the `weir run` process follows, a hyphen,
/// and `DIGITS` random hexadecimal digits.
const START: &str = "weir-run-";
const DIGITS: usize = 8;

/// A name as long as that of a run's directory can be.
pub const LONGEST_NAME: &str = "weir-run-4194304-01234567";

/// Largest number of names that are tried for a new directory.
const NAMES_MOST: usize = 100;

/// The PID in the name of a run's directory. `None`: the name is another one.
pub fn process_of(name: &OsStr) -> Option<u32> {
    let (process, random) = name.to_str()?.strip_prefix(START)?.split_once('-')?;
    let is_digit = |byte: u8| matches!(byte, b'0'..=b'9' | b'a'..=b'f');
    let is_run = process.bytes().all(|byte| byte.is_ascii_digit())
        && random.len() == DIGITS
        && random.bytes().all(is_digit);
    process.parse().ok().filter(|_| is_run)
}

/// Makes a directory in `parent` for a run of this process. The run lives for as long as the
/// returned file is open: it holds the directory's lock.
///
/// # Errors
/// Fails with the system's error.
pub fn make(parent: &Path) -> io::Result<(PathBuf, File)> {
    make_with(parent, || {
        let mut bytes = [0; DIGITS / 2];
        getrandom(&mut bytes, GetRandomFlags::empty())?;
        Ok(u32::from_ne_bytes(bytes))
    })
}

fn make_with(parent: &Path, mut draw: impl FnMut() -> io::Result<u32>) -> io::Result<(PathBuf, File)> {
    let mut tries = 0;
    loop {
        tries += 1;
        let path = parent.join(format!("{START}{}-{:0DIGITS$x}", std::process::id(), draw()?));
        match DirBuilder::new().mode(0o700).create(&path) {
            // The directory is another run's, or anybody's. It stays as it is.
            Err(error) if error.kind() == io::ErrorKind::AlreadyExists && tries < NAMES_MOST => {}
            Err(error) => return Err(error),
            Ok(()) => {
                let held = open(&path)?;
                // A file system without such locks has none to take either. Nobody removes what is
                // left there.
                let _ = flock(&held, FlockOperation::NonBlockingLockExclusive);
                return Ok((path, held));
            }
        }
    }
}

/// Opens a directory. Follows no link in its place.
fn open(path: &Path) -> io::Result<File> {
    let flags = OFlags::RDONLY | OFlags::DIRECTORY | OFlags::NOFOLLOW | OFlags::CLOEXEC;
    Ok(rustix::fs::open(path, flags, Mode::empty())?.into())
}

/// Removes the directory of a run that cannot do so itself, because it was killed. `socket` is the
/// pagers' socket, in that directory.
pub fn clear(socket: &Path) {
    let Some(path) = socket.parent() else { return };
    // Another process may take the directory away and make one of the same name at any moment. So
    // name this one by its descriptor.
    let Ok(held) = open(path) else { return };
    if is_abandoned(&held) {
        remove(path, &held);
    }
}

/// Removes the directories in `parent` that killed runs of this user have left. A run's daemon may
/// have been killed too, and then it could not do so.
pub fn clear_abandoned(parent: &Path) {
    let entries = std::fs::read_dir(parent).into_iter().flatten().flatten();
    for entry in entries.filter(|entry| process_of(&entry.file_name()).is_some()) {
        let Ok(held) = open(&entry.path()) else { continue };
        let is_own = held.metadata().is_ok_and(|about| about.uid() == geteuid().as_raw());
        // A run whose keeper was killed goes on without the promise in its ledger. It still holds
        // the lock of its directory.
        let is_dead = || flock(&held, FlockOperation::NonBlockingLockExclusive).is_ok();
        if is_own && is_abandoned(&held) && is_dead() {
            remove(&entry.path(), &held);
        }
    }
}

/// The path of a directory by its descriptor.
fn by_descriptor(held: &File) -> PathBuf {
    PathBuf::from(format!("/proc/self/fd/{}", held.as_raw_fd()))
}

/// Whether the run of a directory has given its ledger up.
fn is_abandoned(held: &File) -> bool {
    let ledger = by_descriptor(held).join(directory::LEDGER);
    // A link would lead to a file of somebody else.
    ledger.symlink_metadata().is_ok_and(|about| about.is_file()) && Ledger::is_abandoned(&ledger)
}

/// Removes the files of a run, and the directory if it holds nothing else.
fn remove(path: &Path, held: &File) {
    let run = by_descriptor(held);
    // A daemon that was killed has left its sockets.
    for name in [directory::SHARE, directory::CONTROL, directory::PROGRAMS, directory::MESSAGES] {
        let _ = std::fs::remove_file(run.join(name));
    }
    for number in 1..THREADS_MOST {
        let _ = std::fs::remove_file(path_of(&run.join(directory::SHARE), number));
    }
    let _ = std::fs::remove_file(run.join(directory::LEDGER));
    // This call fails if the directory holds anything else. The directory then stays.
    let _ = std::fs::remove_dir(path);
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_directory_of_a_run_goes_only_once_the_run_has_ended_and_only_what_is_a_run_s() {
        let run = std::env::temp_dir().join(format!("weir-run-end-{}", std::process::id()));
        std::fs::create_dir(&run).unwrap();
        let clear = || clear(&run.join(directory::PROGRAMS));
        clear();
        assert!(run.exists(), "no run has made it");
        let promise = Ledger::create(&run.join(directory::LEDGER)).unwrap();
        std::fs::write(run.join("precious"), "").unwrap();
        clear();
        assert!(run.join(directory::LEDGER).exists(), "the run goes on");
        drop(promise);
        clear();
        assert!(!run.join(directory::LEDGER).exists() && run.join("precious").exists());
        std::fs::remove_file(run.join("precious")).unwrap();
        drop(Ledger::create(&run.join(directory::LEDGER)).unwrap());
        for number in 0..THREADS_MOST {
            std::fs::write(path_of(&run.join(directory::SHARE), number), "").unwrap();
        }
        clear();
        assert!(!run.exists());
    }

    /// A directory of a test.
    struct Parent(PathBuf);

    impl Parent {
        fn new(name: &str) -> Self {
            let parent = std::env::temp_dir().join(format!("weir-runs-{name}-{}", std::process::id()));
            std::fs::create_dir(&parent).unwrap();
            Parent(parent)
        }
    }

    impl Drop for Parent {
        fn drop(&mut self) {
            let _ = std::fs::remove_dir_all(&self.0);
        }
    }

    #[test]
    fn a_run_takes_no_directory_that_is_there_and_makes_one_that_nobody_else_may_enter() {
        let parent = Parent::new("new");
        let mut draws = [7, 7, 8].into_iter();
        let mut make = || make_with(&parent.0, || Ok(draws.next().expect("three draws")));
        let (first, _held) = make().unwrap();
        std::fs::write(first.join("precious"), "").unwrap();
        let (second, _held) = make().unwrap();
        assert!(first.join("precious").exists() && first != second);
        for (path, digits) in [(first, "-00000007"), (second, "-00000008")] {
            assert_eq!(path.metadata().unwrap().mode() & 0o777, 0o700);
            let name = path.file_name().unwrap().to_str().unwrap();
            assert!(
                process_of(name.as_ref()) == Some(std::process::id()) && name.ends_with(digits),
                "{name}"
            );
        }
        assert!(process_of(LONGEST_NAME.as_ref()).is_some());
        let (drawn, again) = (super::make(&parent.0).unwrap().0, super::make(&parent.0).unwrap().0);
        assert!(drawn != again, "{drawn:?}");
    }

    #[test]
    fn only_names_with_a_number_and_eight_random_digits_are_those_of_runs() {
        for (name, is_run) in [
            ("weir-run-12-0123abcd", true),
            ("weir-run-12", false),
            ("weir-run-12-", false),
            ("weir-run--0123abcd", false),
            ("weir-run-+2-0123abcd", false),
            ("weir-run-12-0123ABCD", false),
            ("weir-run-12-0123abcd0", false),
            ("weir-run-99999999999-0123abcd", false),
            ("xweir-run-12-0123abcd", false),
        ] {
            assert_eq!(process_of(name.as_ref()), is_run.then_some(12), "{name}");
        }
    }

    #[test]
    fn what_killed_runs_have_left_goes_and_what_lives_or_is_another_s_stays() {
        let parent = Parent::new("left");
        let made = || make(&parent.0).unwrap();
        let (ledger, with) =
            (directory::LEDGER, |path: &Path| Ledger::create(&path.join(directory::LEDGER)).unwrap());
        // It begins, and has no ledger yet.
        let (begins, _held) = made();
        let (lives, _lock) = made();
        let _promise = with(&lives);
        // Its keeper was killed, so its ledger has no promise.
        let (unkept, lock) = made();
        drop(with(&unkept));
        let (dead, held) = made();
        drop((with(&dead), held));
        std::fs::write(dead.join(directory::CONTROL), "").unwrap();
        let (foreign, held) = made();
        drop((with(&foreign), held));
        std::fs::write(foreign.join("precious"), "").unwrap();
        // A link to a ledger that nobody holds, and a link to a directory with one.
        let (linked, held) = made();
        drop(held);
        let elsewhere = parent.0.join("elsewhere");
        std::fs::create_dir(&elsewhere).unwrap();
        drop(with(&elsewhere));
        std::os::unix::fs::symlink(elsewhere.join(ledger), linked.join(ledger)).unwrap();
        let link = parent.0.join("weir-run-1-00000001");
        std::os::unix::fs::symlink(&elsewhere, &link).unwrap();

        clear_abandoned(&parent.0);
        assert!(begins.exists() && lives.join(ledger).exists() && unkept.join(ledger).exists());
        assert!(!dead.exists(), "a killed run has left it");
        assert!(!foreign.join(ledger).exists() && foreign.join("precious").exists());
        assert!(linked.join(ledger).symlink_metadata().is_ok() && elsewhere.join(ledger).exists());
        assert!(link.symlink_metadata().is_ok());
        drop(lock);
        clear_abandoned(&parent.0);
        assert!(!unkept.exists());
    }
}
