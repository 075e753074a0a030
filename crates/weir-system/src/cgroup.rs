//! A memory limit for a process, by the memory controller of either cgroup version.

use rustix::process::{Pid, Signal, kill_process};
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};
use std::{fs, io, thread};

/// A memory cgroup, removed when dropped.
#[derive(Debug)]
pub struct Cgroup(PathBuf);

impl Cgroup {
    /// The cgroup of the benchmark whose process is `pid`. The cgroup need not exist.
    pub fn of(pid: u32) -> Cgroup {
        let root = Path::new("/sys/fs/cgroup");
        let parent = if Self::is_unified() { root.to_owned() } else { root.join("memory") };
        Cgroup(parent.join(format!("weir-bench-swap-{pid}")))
    }

    fn is_unified() -> bool {
        Path::new("/sys/fs/cgroup/cgroup.controllers").exists()
    }

    /// Makes the cgroup of the benchmark whose process is `pid`. The processes in it may keep
    /// `bytes` bytes in RAM; swap is not limited.
    ///
    /// # Errors
    /// Fails when the kernel refuses: there is no memory controller, or this process may not use
    /// it.
    pub fn new(pid: u32, bytes: u64) -> io::Result<Cgroup> {
        let unified = Self::is_unified();
        let cgroup = Self::of(pid);
        let say = |path: &Path| {
            let path = path.display().to_string();
            move |error: io::Error| io::Error::new(error.kind(), format!("{path}: {error}"))
        };
        if unified {
            // The memory controller must be enabled for child cgroups. If it is already, this
            // changes nothing.
            let _ = fs::write("/sys/fs/cgroup/cgroup.subtree_control", "+memory");
        }
        if let Err(error) = fs::create_dir(&cgroup.0) {
            // If the cgroup exists already, another run made it and removes it. So do not remove it
            // here.
            let path = std::mem::ManuallyDrop::new(cgroup).0.clone();
            return Err(say(&path)(error));
        }
        let limit = cgroup.0.join(if unified { "memory.max" } else { "memory.limit_in_bytes" });
        fs::write(&limit, bytes.to_string()).map_err(say(&limit))?;
        Ok(cgroup)
    }

    /// Kills the processes in the cgroup, and waits until they have left it, for `most` at most.
    /// Returns whether the cgroup is empty.
    pub fn empty(&self, most: Duration) -> bool {
        let begun = Instant::now();
        loop {
            let processes = fs::read_to_string(self.entrance()).unwrap_or_default();
            let pids = processes.lines().filter_map(|line| Pid::from_raw(line.parse().ok()?));
            let pids: Vec<Pid> = pids.collect();
            if pids.is_empty() {
                return true;
            }
            for pid in pids {
                // The process may have ended meanwhile, which is as good.
                let _ = kill_process(pid, Signal::KILL);
            }
            if begun.elapsed() > most {
                return false;
            }
            thread::sleep(Duration::from_millis(5));
        }
    }

    /// Whether the kernel has killed a process of the cgroup because of the limit.
    pub fn has_killed(&self) -> bool {
        let tables =
            ["memory.events", "memory.oom_control"].map(|name| fs::read_to_string(self.0.join(name)));
        let lines = tables.iter().flatten().flat_map(|table| table.lines());
        lines.filter_map(|line| line.strip_prefix("oom_kill ")).any(|count| count != "0")
    }

    /// The file that lists the cgroup's processes. A process that writes 0 to the file comes under
    /// the limit.
    pub fn entrance(&self) -> PathBuf {
        self.0.join("cgroup.procs")
    }
}

impl Drop for Cgroup {
    fn drop(&mut self) {
        // The kernel may keep an ended process in its cgroup for a moment after wait() has returned
        // for it.
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
