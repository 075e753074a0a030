//! Functions for the tests of `weir run`.

use super::WEIR;
use std::fs;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::sync::Once;

/// Builds the object that is preloaded, beside the program.
pub fn build() {
    static BUILD: Once = Once::new();
    BUILD.call_once(|| {
        let directory = Path::new(WEIR).parent().expect("it lies somewhere");
        let profile = match directory.file_name().and_then(|name| name.to_str()) {
            Some("debug") | None => "dev",
            Some(other) => other,
        };
        let cargo = std::env::var_os("CARGO").unwrap_or_else(|| "cargo".into());
        let built = Command::new(cargo)
            .args(["build", "--locked", "--package", "weir-preload", "--profile", profile, "--target-dir"])
            .arg(directory.parent().expect("the target directory"))
            .output()
            .expect("cargo runs");
        assert!(built.status.success(), "{}", String::from_utf8_lossy(&built.stderr));
    });
}

/// Whether this machine allows programs to be bounded; if not, prints that.
pub fn can_run(name: &str) -> bool {
    build();
    let run = ["run", "--resident", "32MiB", "--", "/bin/true"];
    let output = Command::new(WEIR).args(run).stdin(Stdio::null()).output().expect("it runs");
    let said = String::from_utf8_lossy(&output.stderr);
    if said.contains("userfaultfd") {
        println!("skipped: {name}: {}", said.trim());
        return false;
    }
    assert!(output.status.success(), "{said}");
    true
}

/// A directory of a test.
pub struct Scratch(pub PathBuf);

impl Scratch {
    pub fn new(name: &str) -> Self {
        let directory = std::env::temp_dir().join(format!("weir-test-run-{}-{name}", std::process::id()));
        fs::create_dir_all(&directory).unwrap();
        Scratch(directory)
    }

    pub fn file(&self, name: &str, content: &str) -> PathBuf {
        let file = self.0.join(name);
        fs::write(&file, content).unwrap();
        file
    }
}

impl Drop for Scratch {
    fn drop(&mut self) {
        let _ = fs::remove_dir_all(&self.0);
    }
}

/// The directory of a run, by the process number of `weir run`.
pub fn directory_of(run: impl std::fmt::Display) -> PathBuf {
    std::env::temp_dir().join(format!("weir-run-{run}"))
}

/// Compiles a C program.
pub fn compiled(name: &str, source: &Path, scratch: &Scratch) -> Option<PathBuf> {
    let program = scratch.0.join(source.file_stem().expect("a file"));
    match Command::new("cc").args(["-O1", "-pthread", "-o"]).args([&program, source]).output() {
        Ok(output) => {
            assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
            Some(program)
        }
        Err(error) => {
            println!("skipped: {name}: no C compiler: {error}");
            None
        }
    }
}
