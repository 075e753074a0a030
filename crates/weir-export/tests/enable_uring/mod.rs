//! The parameter of the kernel's module that says whether FUSE may use rings, set for the time of a
//! test.

use std::fs::{self, File};
use std::path::Path;

const PARAMETER: &str = "/sys/module/fuse/parameters/enable_uring";

/// The parameter as a test needs it. It is restored when dropped; one test of the machine at a time
/// has it.
pub struct EnableUring {
    was: String,
    _lock: File,
}

impl EnableUring {
    /// Sets the parameter. `None`, after printing the reason, if that is impossible.
    pub fn set(value: &str) -> Option<EnableUring> {
        if !Path::new(PARAMETER).exists() {
            println!("\nskipped: this kernel has no FUSE over io_uring (no {PARAMETER})");
            return None;
        }
        let path = std::env::temp_dir().join("weir-test-enable-uring.lock");
        let lock = match File::options().create(true).append(true).open(&path) {
            Ok(lock) => lock,
            Err(error) => {
                println!("\nskipped: cannot lock {}: {error}", path.display());
                return None;
            }
        };
        rustix::fs::flock(&lock, rustix::fs::FlockOperation::LockExclusive).unwrap();
        let was = fs::read_to_string(PARAMETER).unwrap();
        if was.trim() != value
            && let Err(error) = fs::write(PARAMETER, value)
        {
            println!("\nskipped: cannot set {PARAMETER} to {value}: {error}");
            return None;
        }
        Some(EnableUring { was, _lock: lock })
    }
}

impl Drop for EnableUring {
    fn drop(&mut self) {
        let _ = fs::write(PARAMETER, self.was.trim());
    }
}
