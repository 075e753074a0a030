//! The kernel's threads that read from a device's connections, and connections replaced only when those of the dead have gone.
//!
//! A thread that has read the header of a reply may wait for whoever sent the request, a program that waits for a processor with the
//! request's lock held. Then it takes the reply's data from the socket that the connection has by that time (drivers/block/nbd.c,
//! nbd_handle_reply): from the replacement, where another reply begins. The page is damaged, and so is every reply behind it
//! (docs/nbd.md). No interface says when such a thread has gone, but its name does: a kernel worker at work is called
//! `kworker/u8:3+nbd0-recv` (Linux 5.4).

use super::device::{Kernel, Terms};
use std::fs;
use std::io;
use std::os::fd::OwnedFd;
use std::path::{Path, PathBuf};
use std::thread;
use std::time::{Duration, Instant};

/// How long the number of threads stays the same before one of a connection that the kernel gave up is taken to have gone.
const STEADY: Duration = Duration::from_millis(200);
/// How long a dead connection's thread may take to notice, and a new one's to begin, which takes memory where there are too few.
const PATIENCE: Duration = Duration::from_secs(5);
const LONGEST_NAP: Duration = Duration::from_millis(20);

/// What is known of a device's connections.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Known {
    /// All of them died, just now.
    AllDied,
    /// Some may have died.
    SomeMayHave,
    /// Some may have, and long ago: whoever would read from a dead one has noticed.
    SomeMayHaveLongAgo,
}

/// Why connections are not replaced.
#[derive(Debug, thiserror::Error)]
pub enum NotReplaced {
    /// No new one can be made.
    #[error("{0}")]
    Server(String),
    /// The kernel refuses it.
    #[error("the kernel refuses a new connection")]
    Kernel(#[source] io::Error),
    /// It took a new one and does not read from it yet.
    #[error("the kernel does not read from a new connection yet")]
    Unread,
}

/// Replaces those of a device's `connections` that are dead, each by what `open` makes. Returns how many; what it cannot know counts
/// as none.
///
/// # Errors
/// See [`NotReplaced`]; some may have been replaced.
pub fn replace(
    kernel: &mut Kernel,
    device: u32,
    connections: u16,
    known: Known,
    mut open: impl FnMut() -> Result<(OwnedFd, Terms), String>,
) -> Result<u16, NotReplaced> {
    let readers = Readers::of(device, Path::new("/proc"));
    let (mut reading, dead) = match known {
        // One that is still there waits for a request that waits for a new connection: it will see that its reply is an old one.
        Known::AllDied => (readers.none(), connections),
        Known::SomeMayHave => {
            let reading = readers.steady();
            (reading, connections.saturating_sub(reading as u16))
        }
        Known::SomeMayHaveLongAgo => (0, connections),
    };
    let mut replaced = 0;
    for _ in 0..dead {
        // One at a time: where only one is dead, the server may have a seat for one only.
        let (socket, terms) = open().map_err(NotReplaced::Server)?;
        // It is not used where none is dead, which the kernel does not tell.
        kernel.reconnect(device, &terms, &[socket]).map_err(NotReplaced::Kernel)?;
        if known == Known::SomeMayHaveLongAgo {
            continue;
        }
        reading = readers.more_than(reading).ok_or(NotReplaced::Unread)?;
        replaced += 1;
    }
    Ok(replaced)
}

/// Threads at work for one device.
struct Readers {
    proc: PathBuf,
    /// How their names end.
    ending: String,
    /// Whether this process sees the kernel's threads at all: not from within a container.
    are_seen: bool,
}

impl Readers {
    fn of(device: u32, proc: &Path) -> Readers {
        let are_seen = name(proc, "2") == "kthreadd";
        Readers { proc: proc.to_owned(), ending: format!("+nbd{device}-recv"), are_seen }
    }

    fn count(&self) -> usize {
        let is_one = |process: &str| {
            let name = name(&self.proc, process);
            name.starts_with("kworker/") && name.ends_with(&self.ending)
        };
        match fs::read_to_string(self.proc.join("2/task/2/children")) {
            Ok(all) => all.split_whitespace().filter(|process| is_one(process)).count(),
            // Only a kernel without CONFIG_PROC_CHILDREN takes a look at every process.
            Err(_) => fs::read_dir(&self.proc).map_or(0, |entries| {
                entries.flatten().filter(|entry| entry.file_name().to_str().is_some_and(is_one)).count()
            }),
        }
    }

    /// Waits until there is none; returns how many are left where that does not happen.
    fn none(&self) -> usize {
        let mut left = 0;
        if self.are_seen {
            self.wait(|count, since| {
                left = count;
                left == 0 || since > PATIENCE
            });
        }
        left
    }

    /// Waits until their number does not change, and returns it.
    fn steady(&self) -> usize {
        let (mut last, mut changed) = (None, Duration::ZERO);
        if self.are_seen {
            self.wait(|count, since| {
                if last.replace(count) != Some(count) {
                    changed = since;
                }
                since - changed >= STEADY
            });
        }
        last.unwrap_or(0)
    }

    /// Waits until there are more than `before` and returns how many; nothing where that does not happen.
    fn more_than(&self, before: usize) -> Option<usize> {
        let mut now = before + 1;
        if self.are_seen {
            self.wait(|count, since| {
                now = count;
                count > before || since > PATIENCE
            });
        }
        (now > before).then_some(now)
    }

    /// Asks `enough`, of their number and the time that has passed, until it is.
    fn wait(&self, mut enough: impl FnMut(usize, Duration) -> bool) {
        let (begun, mut nap) = (Instant::now(), Duration::from_millis(1));
        while !enough(self.count(), begun.elapsed()) {
            thread::sleep(nap);
            nap = (2 * nap).min(LONGEST_NAP);
        }
    }
}

/// What a process is called; nothing where it has gone.
fn name(proc: &Path, process: &str) -> String {
    let mut path = proc.join(process);
    path.push("comm");
    fs::read_to_string(path).map_or_else(|_| String::new(), |name| name.trim_end().to_owned())
}

#[cfg(test)]
mod tests {
    use super::*;

    /// A directory like /proc, with these processes; children of the second where `children`.
    struct Proc(PathBuf);

    impl Proc {
        fn new(test: &str, processes: &[(u32, &str)], children: bool) -> Proc {
            let proc = Proc(std::env::temp_dir().join(format!("weir-readers-{}-{test}", std::process::id())));
            processes.iter().for_each(|(process, name)| proc.call(*process, name));
            if children {
                fs::create_dir_all(proc.0.join("2/task/2")).expect("directory");
                let numbers: Vec<_> = processes.iter().map(|(process, _)| process.to_string()).collect();
                fs::write(proc.0.join("2/task/2/children"), numbers.join(" ")).expect("written");
            }
            proc
        }

        fn call(&self, process: u32, name: &str) {
            let directory = self.0.join(process.to_string());
            fs::create_dir_all(&directory).expect("directory");
            fs::write(directory.join("comm"), format!("{name}\n")).expect("written");
        }

        fn readers(&self) -> Readers {
            Readers::of(0, &self.0)
        }
    }

    impl Drop for Proc {
        fn drop(&mut self) {
            let _ = fs::remove_dir_all(&self.0);
        }
    }

    const PROCESSES: [(u32, &str); 8] = [
        (1, "init"),
        (2, "kthreadd"),
        (30, "kworker/u8:0+nbd0-recv"),
        (31, "kworker/u8:1-nbd0-recv"),
        (32, "kworker/u8:2+nbd10-recv"),
        (33, "kworker/R-nbd0-recv+nbd0-recv"),
        (34, "kworker/u8:3+events"),
        (35, "mine+nbd0-recv"),
    ];

    #[test]
    fn workers_at_work_for_this_device_are_counted() {
        for children in [true, false] {
            let proc = Proc::new(&format!("counted-{children}"), &PROCESSES, children);
            assert_eq!(proc.readers().count(), 2, "by their parent's list: {children}");
        }
    }

    #[test]
    fn nothing_is_waited_for_where_the_kernel_s_threads_are_not_seen() {
        let proc = Proc::new("unseen", &[(1, "init"), (2, "sh"), (30, "kworker/u8:0+nbd0-recv")], true);
        let readers = proc.readers();
        assert_eq!(readers.none(), 0);
        assert_eq!(readers.steady(), 0);
        assert_eq!(readers.more_than(7), Some(8));
    }

    #[test]
    fn the_last_reader_of_a_dead_connection_is_waited_for() {
        let proc = Proc::new("last", &PROCESSES, true);
        proc.call(33, "kworker/R-nbd0-recv-nbd0-recv");
        assert_eq!(proc.readers().steady(), 1, "a live one is not");
        thread::scope(|scope| {
            let waiter = scope.spawn(|| proc.readers().none());
            thread::sleep(Duration::from_millis(50));
            assert!(!waiter.is_finished(), "it reads still");
            proc.call(30, "kworker/u8:0-nbd0-recv");
            assert_eq!(waiter.join().expect("no panic"), 0);
        });
        assert_eq!(proc.readers().count(), 0);
        thread::scope(|scope| {
            let waiter = scope.spawn(|| proc.readers().more_than(0));
            thread::sleep(Duration::from_millis(50));
            assert!(!waiter.is_finished(), "the new one has not begun");
            proc.call(31, "kworker/u8:1+nbd0-recv");
            assert_eq!(waiter.join().expect("no panic"), Some(1));
        });
    }
}
