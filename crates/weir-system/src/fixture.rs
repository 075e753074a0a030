//! A machine for a test: a directory with files such as `proc/meminfo`.

use crate::Machine;
use std::fs;
use std::path::PathBuf;

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
