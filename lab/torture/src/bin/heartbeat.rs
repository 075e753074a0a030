//! Beats once a second and keeps the longest gap between two beats: how a machine's user feels a stall.
//!
//! `heartbeat FILE` writes the longest gap and the number of beats after each beat, and ends, counting the gap
//! then open, once its standard input closes. A beat is real work: fresh memory from the kernel and a
//! file written, so it stands still when allocation does.

use rustix::event::{PollFd, PollFlags, Timespec, poll};
use rustix::mm::{MapFlags, ProtFlags, mmap_anonymous, munmap};
use std::time::{Duration, Instant};
use std::{env, fs, io, process};

const PERIOD: Duration = Duration::from_secs(1);
/// Memory that each beat asks for, touches and gives back.
const FRESH_BYTES: usize = 256 << 10;

fn main() {
    let Some(file) = env::args_os().nth(1) else {
        eprintln!("usage: heartbeat FILE");
        process::exit(2);
    };
    let mut last = Instant::now();
    let mut longest = Duration::ZERO;
    for beats in 1_u64.. {
        let stopped = sleep_until_stopped(PERIOD);
        let done = stopped.and_then(|stopped| touch_fresh_memory().map(|()| stopped));
        longest = longest.max(last.elapsed());
        last = Instant::now();
        let text = format!("{:.3} {beats}\n", longest.as_secs_f64());
        match done.and_then(|stopped| fs::write(&file, text).map(|()| stopped)) {
            Ok(true) => return,
            Ok(false) => {}
            Err(error) => {
                eprintln!("heartbeat: {}: {error}", file.display());
                process::exit(1);
            }
        }
    }
}

/// Waits for a period, or less when standard input closes: that is the sign to end.
fn sleep_until_stopped(period: Duration) -> io::Result<bool> {
    let stdin = rustix::stdio::stdin();
    let mut sign = [PollFd::new(&stdin, PollFlags::IN)];
    let timeout = Timespec { tv_sec: period.as_secs() as i64, tv_nsec: i64::from(period.subsec_nanos()) };
    Ok(poll(&mut sign, Some(&timeout))? > 0)
}

/// Takes pages that nobody had, writes to each, and gives them back.
fn touch_fresh_memory() -> io::Result<()> {
    // SAFETY: a private mapping at an address of the kernel's choosing; written within its length, and unmapped
    // before anything else can hold a reference to it.
    unsafe {
        let (access, kind) = (ProtFlags::READ | ProtFlags::WRITE, MapFlags::PRIVATE);
        let start = mmap_anonymous(std::ptr::null_mut(), FRESH_BYTES, access, kind)?;
        for offset in (0..FRESH_BYTES).step_by(weir_core::PAGE_SIZE) {
            start.cast::<u8>().add(offset).write_volatile(1);
        }
        munmap(start, FRESH_BYTES)?;
    }
    Ok(())
}
