//! A memory limit for processes: the memory controller of either cgroup version.

use std::path::{Path, PathBuf};
use std::time::Duration;
use std::{fs, io, thread};

/// A memory cgroup that this program made, removed when dropped.
#[derive(Debug)]
pub struct Cgroup {
    path: PathBuf,
    unified: bool,
}

impl Cgroup {
    /// Makes a cgroup whose processes may keep `bytes` in RAM; swap is not limited.
    ///
    /// # Errors
    /// Fails when neither version's memory controller is mounted and writable, or the name is
    /// taken.
    pub fn new(name: &str, bytes: u64) -> io::Result<Cgroup> {
        let root = Path::new("/sys/fs/cgroup");
        let unified = root.join("cgroup.controllers").exists();
        let path = if unified {
            // A controller must be enabled for children; if it already is, this changes nothing.
            let _ = fs::write(root.join("cgroup.subtree_control"), "+memory");
            root.join(name)
        } else {
            root.join("memory").join(name)
        };
        fs::create_dir(&path).map_err(|error| describe(&path, &error))?;
        let cgroup = Cgroup { path, unified };
        let limit = cgroup.path.join(if unified { "memory.max" } else { "memory.limit_in_bytes" });
        fs::write(&limit, bytes.to_string()).map_err(|error| describe(&limit, &error))?;
        Ok(cgroup)
    }

    /// The file into which a process writes 0 to enter the cgroup.
    pub fn entrance(&self) -> PathBuf {
        self.path.join("cgroup.procs")
    }

    /// Number of processes that the kernel has killed for want of memory under this limit.
    pub fn killed(&self) -> u64 {
        let file = self.path.join(if self.unified { "memory.events" } else { "memory.oom_control" });
        fs::read_to_string(file).ok().and_then(|text| field(&text, "oom_kill")).unwrap_or(0)
    }
}

impl Drop for Cgroup {
    fn drop(&mut self) {
        // The kernel releases the last exited process a moment after wait() saw it.
        let busy = rustix::io::Errno::BUSY.raw_os_error();
        for _ in 0..50 {
            match fs::remove_dir(&self.path) {
                Err(error) if error.raw_os_error() == Some(busy) => thread::sleep(Duration::from_millis(20)),
                _ => return,
            }
        }
    }
}

fn describe(path: &Path, error: &io::Error) -> io::Error {
    io::Error::new(error.kind(), format!("{}: {error} (a memory limit needs root)", path.display()))
}

/// The number after a key at the start of a line.
fn field(text: &str, key: &str) -> Option<u64> {
    text.lines().find_map(|line| line.strip_prefix(key)?.strip_prefix(' ')?.trim().parse().ok())
}

#[cfg(test)]
mod tests {
    use super::field;

    #[test]
    fn a_count_is_found_by_its_whole_key() {
        let events = "low 0\nhigh 0\nmax 71\noom 3\noom_kill 2\noom_group_kill 1\n";
        assert_eq!(field(events, "oom_kill"), Some(2));
        assert_eq!(field(events, "oom"), Some(3));
        assert_eq!(field(events, "kill"), None);
    }
}
