//! A memory limit around a process: the memory controller of either cgroup version.

use std::path::{Path, PathBuf};
use std::time::Duration;
use std::{fs, io, thread};

/// A memory cgroup, removed when dropped.
#[derive(Debug)]
pub(super) struct Cgroup(PathBuf);

impl Cgroup {
    /// Makes one that may keep `bytes` in RAM; swap is not limited.
    pub fn new(name: &str, bytes: u64) -> io::Result<Cgroup> {
        let root = Path::new("/sys/fs/cgroup");
        let unified = root.join("cgroup.controllers").exists();
        let parent = if unified { root.to_owned() } else { root.join("memory") };
        let say = |path: &Path| {
            let path = path.display().to_string();
            move |error: io::Error| io::Error::new(error.kind(), format!("{path}: {error}"))
        };
        if unified {
            // A controller must be handed down before a child has it; where it already is, this changes nothing.
            let _ = fs::write(parent.join("cgroup.subtree_control"), "+memory");
        }
        let path = parent.join(name);
        fs::create_dir(&path).map_err(say(&path))?;
        let cgroup = Cgroup(path);
        let limit = cgroup.0.join(if unified { "memory.max" } else { "memory.limit_in_bytes" });
        fs::write(&limit, bytes.to_string()).map_err(say(&limit))?;
        Ok(cgroup)
    }

    /// The file that a process writes 0 into to come under the limit.
    pub fn entrance(&self) -> PathBuf {
        self.0.join("cgroup.procs")
    }
}

impl Drop for Cgroup {
    fn drop(&mut self) {
        // The kernel lets go of the last exited process a moment after wait() saw it.
        for _ in 0..100 {
            match fs::remove_dir(&self.0) {
                Err(error) if error.kind() == io::ErrorKind::ResourceBusy => {
                    thread::sleep(Duration::from_millis(20));
                }
                _ => return,
            }
        }
    }
}
