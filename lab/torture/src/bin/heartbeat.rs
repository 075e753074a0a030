//! Beats once a second and records the longest gap between two beats: a stall as a machine's user
//! feels it.
//!
//! `heartbeat FILE` writes the longest gap and the number of beats after each beat. It ends when
//! its standard input closes, and then counts the open gap too. A beat is real work: fresh memory
//! from the kernel, and a written file. So it stands still when allocation does.
//!
//! `heartbeat --of PROCESS LINE` needs only a processor and its clock: its memory is locked, its
//! thread is a real-time one, and LINE, a serial line, stays open. Each beat prints the functions
//! of the kernel in which the other heartbeat waits. So it tells a kernel that stands still from
//! one whose programs wait, and shows what they wait for.

use rustix::event::{PollFd, PollFlags, Timespec, poll};
use rustix::mm::{MapFlags, ProtFlags, mmap_anonymous, munmap};
use std::io::Write as _;
use std::time::{Duration, Instant};
use std::{env, fs, io, process};
use weir_core::swap_safety;

const PERIOD: Duration = Duration::from_secs(1);
/// Bytes of memory that each beat asks for, touches and frees.
const FRESH_BYTES: usize = 256 << 10;

fn main() {
    let arguments: Vec<_> = env::args().skip(1).collect();
    let (file, done) = match arguments.iter().map(String::as_str).collect::<Vec<_>>()[..] {
        [file] => (file, beat(file)),
        ["--of", process, line] => (line, watch(process, line)),
        _ => {
            eprintln!("usage: heartbeat FILE | --of PROCESS LINE");
            process::exit(2);
        }
    };
    if let Err(error) = done {
        eprintln!("heartbeat: {file}: {error}");
        process::exit(1);
    }
}

fn beat(file: &str) -> io::Result<()> {
    let mut last = Instant::now();
    let mut longest = Duration::ZERO;
    for beats in 1_u64.. {
        let stopped = sleep_until_stopped(PERIOD)?;
        touch_fresh_memory()?;
        longest = longest.max(last.elapsed());
        last = Instant::now();
        fs::write(file, format!("{:.3} {beats}\n", longest.as_secs_f64()))?;
        if stopped {
            break;
        }
    }
    Ok(())
}

fn watch(process: &str, line: &str) -> io::Result<()> {
    let mut line = fs::OpenOptions::new().write(true).open(line)?;
    swap_safety::lock_all_memory().map_err(io::Error::other)?;
    swap_safety::reach_reserves(swap_safety::Children::Ordinary)?;
    let stack = format!("/proc/{process}/stack");
    for beats in 1_u64.. {
        let stopped = sleep_until_stopped(PERIOD)?;
        // The process may have ended.
        let frames = fs::read_to_string(&stack).unwrap_or_default();
        let functions = frames.lines().filter_map(|frame| frame.split([' ', '+']).nth(1));
        writeln!(line, "{beats} {}", functions.collect::<Vec<_>>().join("<"))?;
        if stopped {
            break;
        }
    }
    Ok(())
}

/// Waits for a period, or until standard input closes, which is the sign to end.
fn sleep_until_stopped(period: Duration) -> io::Result<bool> {
    let stdin = rustix::stdio::stdin();
    let mut sign = [PollFd::new(&stdin, PollFlags::IN)];
    let timeout = Timespec { tv_sec: period.as_secs() as i64, tv_nsec: i64::from(period.subsec_nanos()) };
    Ok(poll(&mut sign, Some(&timeout))? > 0)
}

/// Takes new pages, writes to each, and frees them.
fn touch_fresh_memory() -> io::Result<()> {
    // SAFETY: a private mapping at an address of the kernel's choice. It is written within its
    // length, and unmapped before anything else can refer to it.
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
