//! The state of another process, as `/proc/PID/stat` shows it (proc_pid_stat(5)).

use std::{fs, io};

/// A process as the kernel shows it.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct ProcessStat {
    state: char,
    flags: u32,
    /// The process ID of the parent.
    pub parent: u32,
    /// Ticks of processor time in user mode and in the kernel, of all threads.
    pub ticks: [u64; 2],
    /// The time at which the process began, in ticks since the machine's start.
    pub started: u64,
}

impl ProcessStat {
    /// Reads the state of the process with this process ID.
    ///
    /// # Errors
    /// Fails with `NotFound`, or `ESRCH`, if there is no such process, and with `Other` if its file
    /// is not as proc_pid_stat(5) says.
    pub fn of(pid: u32) -> io::Result<Self> {
        // A program's name may be no UTF-8.
        Self::read(pid, &String::from_utf8_lossy(&fs::read(format!("/proc/{pid}/stat"))?))
    }

    fn read(pid: u32, stat: &str) -> io::Result<Self> {
        Self::parse(stat).ok_or_else(|| io::Error::other(format!("/proc/{pid}/stat makes no sense")))
    }

    fn parse(stat: &str) -> Option<Self> {
        // The second field is the program's name, which may contain blanks and parentheses. So
        // count from its end: the first field after it is number three.
        let rest: Vec<&str> = stat.rsplit_once(')')?.1.split_whitespace().collect();
        let field = |number: usize| rest.get(number - 3).copied();
        Some(ProcessStat {
            state: field(3)?.chars().next()?,
            parent: field(4)?.parse().ok()?,
            flags: field(9)?.parse().ok()?,
            ticks: [field(14)?.parse().ok()?, field(15)?.parse().ok()?],
            started: field(22)?.parse().ok()?,
        })
    }

    /// Whether the process has ended. Its parent may not have waited for it yet.
    pub fn is_dead(&self) -> bool {
        matches!(self.state, 'Z' | 'X')
    }

    /// Whether a signal or a debugger has stopped the process.
    pub fn is_stopped(&self) -> bool {
        matches!(self.state, 'T' | 't')
    }

    /// Whether the process is about to end. It may still free its memory, and has no environment
    /// any more.
    pub fn is_exiting(&self) -> bool {
        // The flag's value is from include/linux/sched.h.
        const PF_EXITING: u32 = 4;
        self.flags & PF_EXITING != 0
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const STAT: &str = "7 (a) b) (c) T 5 7 7 0 -1 4194564 1 0 0 0 31 17 0 0 20 0 1 0 4711 1 1 0";

    #[test]
    fn a_name_with_parentheses_does_not_shift_the_fields() {
        let stat = ProcessStat::parse(STAT).unwrap();
        assert_eq!((stat.parent, stat.ticks, stat.started), (5, [31, 17], 4711));
        assert!(stat.is_stopped() && stat.is_exiting() && !stat.is_dead());
        let dead = ProcessStat::parse(&STAT.replace(" T ", " Z ").replace("4194564", "4194560")).unwrap();
        assert!(dead.is_dead() && !dead.is_stopped() && !dead.is_exiting());
    }

    #[test]
    fn a_file_that_is_cut_short_makes_no_sense() {
        for end in [0, STAT.len() - 12] {
            let refused = ProcessStat::read(7, &STAT[..end]).unwrap_err();
            assert_eq!(refused.to_string(), "/proc/7/stat makes no sense");
        }
    }

    #[test]
    fn this_process_lives_and_no_process_has_number_zero() {
        let own = ProcessStat::of(std::process::id()).unwrap();
        assert_eq!(own.parent, std::os::unix::process::parent_id());
        assert!(!own.is_dead() && !own.is_stopped());
        assert_eq!(ProcessStat::of(0).unwrap_err().kind(), io::ErrorKind::NotFound);
    }
}
