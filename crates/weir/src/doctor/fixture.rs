//! A test's machine, made of files.

use std::fs;
use std::path::PathBuf;
use weir_daemon::cards::{Looked, Seen};
use weir_system::Machine;

/// The look at the cards of a machine that has none.
pub fn no_cards() -> Looked {
    Looked::Seen(Seen { refused: Some("no GPU".to_owned()), ..Seen::default() })
}

/// The directory of the machine's files, removed when dropped.
pub struct Fixture(PathBuf);

impl Fixture {
    /// An empty machine; `name` keeps tests apart.
    pub fn new(name: &str) -> Self {
        let root = std::env::temp_dir().join(format!("weir-doctor-{}-{name}", std::process::id()));
        fs::create_dir_all(&root).unwrap();
        Fixture(root)
    }

    /// Adds a file.
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
