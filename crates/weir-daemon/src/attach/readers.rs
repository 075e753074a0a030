//! The kernel's threads that read from a device's connections.
//!
//! No interface lists these threads, but their names tell. A kernel worker at work is called
//! `kworker/u8:3+nbd0-recv`. A rescuer, which works when memory is short, is called
//! `kworker/R-nbd0-recv+nbd0-recv`; before Linux 6.8, `nbd0-recv+nbd0-recv`. Before 5.16 the name
//! was `knbd0-recv`.

use std::fs;
use std::path::{Path, PathBuf};

/// The kernel's reader threads for one device.
#[derive(Debug)]
pub struct Readers {
    proc: PathBuf,
    /// The two names that the kernel gives to the work of this device's readers.
    works: [String; 2],
    /// Whether this process sees the kernel's threads. In a container it does not.
    are_seen: bool,
}

impl Readers {
    /// Finds the kernel's reader threads for `/dev/nbd<device>`.
    pub fn of(device: u32) -> Readers {
        Readers::at(device, Path::new("/proc"))
    }

    fn at(device: u32, proc: &Path) -> Readers {
        let are_seen = name(proc, "2") == "kthreadd";
        let works = [format!("nbd{device}-recv"), format!("knbd{device}-recv")];
        Readers { proc: proc.to_owned(), works, are_seen }
    }

    /// Counts the readers; `None` where this process does not see them. A reader that has not begun
    /// yet is not counted.
    pub fn count(&self) -> Option<usize> {
        let is_one = |process: &str| {
            let name = name(&self.proc, process);
            let Some((worker, work)) = name.rsplit_once('+') else { return false };
            let works = |name| self.works.iter().any(|work| work == name);
            works(work) && (worker.starts_with("kworker/") || works(worker))
        };
        let count = match fs::read_to_string(self.proc.join("2/task/2/children")) {
            Ok(all) => all.split_whitespace().filter(|process| is_one(process)).count(),
            // Only a kernel without CONFIG_PROC_CHILDREN needs this scan of every process.
            Err(_) => fs::read_dir(&self.proc).map_or(0, |entries| {
                entries.flatten().filter(|entry| entry.file_name().to_str().is_some_and(is_one)).count()
            }),
        };
        self.are_seen.then_some(count)
    }
}

/// A process's name; empty if the process has gone.
fn name(proc: &Path, process: &str) -> String {
    let mut path = proc.join(process);
    path.push("comm");
    fs::read_to_string(path).map_or_else(|_| String::new(), |name| name.trim_end().to_owned())
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Makes a directory like /proc with these processes, and counts the readers in it. With
    /// `children`, the processes are listed as children of process 2.
    fn count(test: &str, processes: &[(u32, &str)], children: bool) -> Option<usize> {
        let proc = std::env::temp_dir().join(format!("weir-readers-{}-{test}", std::process::id()));
        for (process, name) in processes {
            let directory = proc.join(process.to_string());
            fs::create_dir_all(&directory).expect("directory");
            fs::write(directory.join("comm"), format!("{name}\n")).expect("written");
        }
        if children {
            fs::create_dir_all(proc.join("2/task/2")).expect("directory");
            let numbers: Vec<_> = processes.iter().map(|(process, _)| process.to_string()).collect();
            fs::write(proc.join("2/task/2/children"), numbers.join(" ")).expect("written");
        }
        let count = Readers::at(0, &proc).count();
        fs::remove_dir_all(&proc).expect("removed");
        count
    }

    #[test]
    fn workers_at_work_for_this_device_are_counted() {
        let processes = [
            (1, "init"),
            (2, "kthreadd"),
            (30, "kworker/u8:0+nbd0-recv"),
            (31, "kworker/u8:1-nbd0-recv"),
            (32, "kworker/u8:2+nbd10-recv"),
            (33, "kworker/R-nbd0-recv+nbd0-recv"),
            (34, "kworker/u8:3+events"),
            (35, "mine+nbd0-recv"),
            (36, "nbd0-recv+nbd0-recv"),
            (37, "kworker/u8:3+knbd0-recv"),
            (38, "nbd0-recv"),
        ];
        for children in [true, false] {
            let test = format!("counted-{children}");
            assert_eq!(count(&test, &processes, children), Some(4), "by their parent's list: {children}");
        }
    }

    #[test]
    fn where_the_kernel_s_threads_are_not_seen_nothing_is_said() {
        assert_eq!(count("unseen", &[(1, "init"), (2, "sh"), (30, "kworker/u8:0+nbd0-recv")], true), None);
    }
}
