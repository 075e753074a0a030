//! The kernel's clocks, read by the C library. The C library finds the vDSO when the program
//! starts. Without a vDSO it makes a system call. Weir uses rustix elsewhere, but rustix looks for
//! the vDSO at the first call. Before Linux 6.4 that look allocates memory, and on User-Mode Linux
//! 7.2 it panics.

use std::time::Duration;

/// Time since the machine started, at the last timer tick: it takes a few nanoseconds to read, and
/// is accurate to some milliseconds.
pub fn coarse() -> Duration {
    read(libc::CLOCK_MONOTONIC_COARSE)
}

/// Time since the machine started.
pub fn monotonic() -> Duration {
    read(libc::CLOCK_MONOTONIC)
}

fn read(clock: libc::clockid_t) -> Duration {
    let mut now = libc::timespec { tv_sec: 0, tv_nsec: 0 };
    // SAFETY: the output outlives the call, which cannot fail for these clocks: every Linux has
    // them.
    unsafe { libc::clock_gettime(clock, &mut now) };
    Duration::new(now.tv_sec as u64, now.tv_nsec as u32)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_coarse_clock_is_the_other_one_a_little_earlier() {
        let (coarse, fine) = (coarse(), monotonic());
        assert!(!coarse.is_zero() && coarse <= fine, "{coarse:?} {fine:?}");
    }
}
