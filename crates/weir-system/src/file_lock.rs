//! The processes that hold locks of files (flock), as `/proc/locks` lists them.

use crate::Machine;

/// The process that locked a file.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Owner {
    /// The process that locked the file runs.
    Living,
    /// The process has ended, and the file is still locked. Either the kernel has not closed the
    /// files of the process's io_uring yet, or another process has inherited the file.
    Ended,
    /// The kernel lists no owner: nobody locked the file, or a process of another PID namespace
    /// did.
    Unlisted,
}

/// The owner of the locks of a file with this inode number, on whatever file system it lies.
pub fn owner(machine: &Machine, inode: u64) -> Owner {
    let locks = machine.text("/proc/locks").unwrap_or_default();
    // A line looks like `1: FLOCK  ADVISORY  WRITE 4312 fe:00:10027 0 EOF`. If the process waits
    // for the lock, `->` comes before `FLOCK`.
    let processes = locks.lines().filter_map(|line| {
        let words: Vec<_> = line.split_whitespace().collect();
        let at = words.iter().position(|word| *word == "FLOCK")?;
        let file = words.get(at + 4)?.rsplit(':').next()?;
        (file.parse() == Ok(inode)).then_some(words[at + 3])
    });
    processes.fold(Owner::Unlisted, |owner, process| {
        if owner == Owner::Living || runs(machine, process) { Owner::Living } else { Owner::Ended }
    })
}

/// Whether a process runs. A zombie does not: it has ended, and only its exit status is left.
fn runs(machine: &Machine, process: &str) -> bool {
    let state = machine.value(&format!("/proc/{process}/status"), "State");
    state.is_some_and(|state| !state.starts_with(['Z', 'X']))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::fixture::Fixture;

    #[test]
    fn a_lock_belongs_to_a_process_that_runs_or_to_one_that_has_ended() {
        let fixture = Fixture::new("locks").with(
            "/proc/locks",
            "1: POSIX  ADVISORY  WRITE 5 fe:00:30 0 EOF\n2: FLOCK  ADVISORY  WRITE 5 fe:00:10 0 EOF\n\
             3: FLOCK  ADVISORY  WRITE 6 00:1f:20 0 EOF\n3: -> FLOCK  ADVISORY  WRITE 7 00:1f:20 0 EOF\n\
             4: FLOCK  ADVISORY  WRITE 7 00:1f:40 0 EOF\n5: FLOCK  ADVISORY  WRITE 8 00:1f:50 0 EOF\n",
        );
        let fixture = fixture
            .with("/proc/5/status", "Name:\tweir\nState:\tS (sleeping)\n")
            .with("/proc/7/status", "Name:\tweir\nState:\tZ (zombie)\n");
        let owner = |inode| owner(&fixture.machine(), inode);
        assert_eq!(owner(10), Owner::Living);
        assert_eq!(owner(20), Owner::Ended);
        assert_eq!(owner(30), Owner::Unlisted);
        assert_eq!(owner(40), Owner::Ended);
        assert_eq!(owner(50), Owner::Ended);
        assert_eq!(owner(1), Owner::Unlisted);
    }
}
