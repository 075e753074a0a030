//! Helpers of tests: a directory with files such as `proc/meminfo` stands for a machine, and a test
//! can have a mount namespace of its own.

use crate::Machine;
use std::fs;
use std::path::PathBuf;
use std::process::Command;

/// The environment variable that is set in a process which [`alone`] has started.
const ALONE: &str = "WEIR_TEST_ALONE";

/// Runs the test `name` of this program again, in a process with a mount namespace of its own. In
/// that process this function calls `mount` and returns `None`. In the first process it returns
/// what the other one wrote to standard error. It returns `None`, with a line on standard error, if
/// this machine denies such a namespace.
///
/// # Panics
/// Panics when the process cannot be started, or its test fails.
pub fn alone(name: &str, mount: impl FnOnce()) -> Option<String> {
    if std::env::var_os(ALONE).is_some() {
        mount();
        return None;
    }
    let mut again = Command::new("unshare");
    again.args(if rustix::process::geteuid().is_root() { ["-m"] } else { ["-rm"] });
    again.arg(std::env::current_exe().unwrap()).args(["--exact", name, "--nocapture", "--test-threads=1"]);
    let output = again.env(ALONE, "1").output().unwrap();
    let said = String::from_utf8_lossy(&output.stderr).into_owned();
    if said.starts_with("unshare: ") {
        eprintln!("skipped: {name}: {said}");
        return None;
    }
    let listed = String::from_utf8_lossy(&output.stdout);
    assert!(output.status.success() && listed.contains("1 passed"), "{listed}{said}");
    Some(said)
}

/// The directory of the machine's files, removed when dropped.
#[derive(Debug)]
pub struct Fixture(PathBuf);

impl Fixture {
    /// Makes a machine without files. `name` tells it from the machines of other tests.
    ///
    /// # Panics
    /// Panics when the machine's directory cannot be made.
    pub fn new(name: &str) -> Self {
        let root = std::env::temp_dir().join(format!("weir-machine-{}-{name}", std::process::id()));
        fs::create_dir_all(&root).unwrap();
        Fixture(root)
    }

    /// Adds a file with this text to the machine.
    ///
    /// # Panics
    /// Panics when the file cannot be written.
    pub fn with(self, path: &str, text: &str) -> Self {
        let path = self.0.join(path.trim_start_matches('/'));
        fs::create_dir_all(path.parent().unwrap()).unwrap();
        fs::write(path, text).unwrap();
        self
    }

    /// The machine that consists of the files added so far.
    pub fn machine(&self) -> Machine {
        Machine::below(&self.0)
    }
}

impl Drop for Fixture {
    fn drop(&mut self) {
        let _ = fs::remove_dir_all(&self.0);
    }
}
