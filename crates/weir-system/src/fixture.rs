//! A test's machine, made of files.

use crate::Machine;
use std::fs;
use std::path::PathBuf;

/// The directory of the machine's files, removed when dropped.
#[derive(Debug)]
pub struct Fixture(PathBuf);

impl Fixture {
    /// Makes an empty machine. Each test has a `name` of its own.
    ///
    /// # Panics
    /// Panics when the machine's directory cannot be made.
    pub fn new(name: &str) -> Self {
        let root = std::env::temp_dir().join(format!("weir-machine-{}-{name}", std::process::id()));
        fs::create_dir_all(&root).unwrap();
        Fixture(root)
    }

    /// Adds a file.
    ///
    /// # Panics
    /// Panics when the file cannot be written.
    pub fn with(self, path: &str, text: &str) -> Self {
        let path = self.0.join(path.trim_start_matches('/'));
        fs::create_dir_all(path.parent().unwrap()).unwrap();
        fs::write(path, text).unwrap();
        self
    }

    /// The machine that has these files.
    pub fn machine(&self) -> Machine {
        Machine::below(&self.0)
    }
}

impl Drop for Fixture {
    fn drop(&mut self) {
        let _ = fs::remove_dir_all(&self.0);
    }
}
