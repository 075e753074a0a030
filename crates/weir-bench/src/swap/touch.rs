//! The child process of the swap benchmark. It writes more memory than its limit lets it keep in
//! RAM, and times the pages that come back.

use super::devices::Device;
use super::{Plan, SwapError};
use crate::report::percentile;
use crate::splitmix;
use crate::steps::Steps;
use rustix::mm::{Advice, MapFlags, ProtFlags};
use serde::{Deserialize, Serialize};
use std::io;
use std::path::Path;
use std::process::{Command, Stdio};
use std::time::{Duration, Instant};
use weir_cli::guard::die_together;
use weir_core::PAGE_SIZE;
use weir_system::cgroup::Cgroup;

/// Pause before each sporadic page fault.
const PAUSE: Duration = Duration::from_millis(20);
/// Number of pages that are read in order from each random place: 64 KiB, such as a small record or
/// a column of a matrix.
const STRETCH: usize = 16;
/// Largest number of page faults that are timed.
const FAULTS_MAX: usize = 200_000;
/// Largest number of attempts to run a child, if the kernel kills it.
const TRIES: u32 = 4;
/// Largest number of touches in a row that find their page in RAM. After so many, swap counts as
/// empty.
const VAIN_MAX: u32 = 100_000;

/// The figures that one child process measured.
#[derive(Clone, Debug, Default, Serialize, Deserialize)]
pub struct Touch {
    /// Median microseconds of a major page fault, when page faults come one after the other.
    pub fault_p50_us: f64,
    /// 99th percentile of the microseconds of a major page fault, when page faults come one after
    /// the other.
    pub fault_p99_us: f64,
    /// Number of major page faults that were timed.
    pub faults: u64,
    /// Pages that came in for each page fault: more than one if the kernel read ahead.
    pub pages_per_fault: f64,
    /// Median microseconds of a major page fault, when one comes each 20 ms.
    pub sporadic_p50_us: f64,
    /// 99th percentile of the microseconds of a major page fault, when one comes each 20 ms.
    pub sporadic_p99_us: f64,
    /// Speed at which pages went out to swap while the memory was written for the first time, in MB
    /// a second.
    pub out_mb_per_s: f64,
    /// Speed of reading all of the program's memory in order, in MB a second.
    pub in_mb_per_s: f64,
    /// Speed of reading stretches of `STRETCH` pages at random places of the program's memory, in
    /// MB a second.
    pub mixed_mb_per_s: f64,
    /// Number of pages that were not what had been written.
    pub mismatches: u64,
}

/// Runs a child with this device as the swap that the kernel fills first.
pub(super) fn run(plan: &Plan, device: &Device, steps: &Steps) -> Result<Touch, SwapError> {
    for _ in 1..TRIES {
        if let Some(touched) = attempt(plan, device, false)? {
            return Ok(touched);
        }
        let name = device.name();
        steps.say(format_args!(
            "weir: {name}: the kernel killed the child at its limit, since its pages left too slowly; again"
        ));
    }
    Ok(attempt(plan, device, true)?.expect("the last attempt ends"))
}

/// Runs one child. Returns `None` if the kernel killed it at its limit. The kernel does so if the
/// device's thread gets no processor, so that none of the started writes ends.
fn attempt(plan: &Plan, device: &Device, is_last: bool) -> Result<Option<Touch>, SwapError> {
    let failed = |what: &str| SwapError::failed(format!("{}: {what}", device.name()));
    let cgroup = Cgroup::new(std::process::id(), plan.limit.0)
        .map_err(SwapError::failed("cannot limit a child's memory (a memory cgroup, as root)"))?;
    let mut command = Command::new("/proc/self/exe");
    die_together(&mut command);
    let output = command
        .args(["swap-touch", "--size", &plan.size.0.to_string()])
        .args(["--milliseconds", &plan.time.as_millis().to_string(), "--entrance"])
        .arg(cgroup.entrance())
        .stdin(Stdio::null())
        .stderr(Stdio::inherit())
        .output()
        .map_err(failed("the child does not start"))?;
    if !output.status.success() {
        let killed = cgroup.has_killed();
        if killed && !is_last {
            return Ok(None);
        }
        let why = if killed { ": the kernel killed it at its limit; let less run beside it" } else { "" };
        let why = io::Error::other(format!("{}{why}", output.status));
        return Err(failed("the child did not finish")(why));
    }
    let text = String::from_utf8_lossy(&output.stdout);
    serde_json::from_str(text.trim()).map(Some).map_err(|error| failed("the child")(error.into()))
}

/// Does the work of the child process. The child enters its memory limit before it touches a page.
///
/// # Errors
/// Fails when the child cannot enter its limit or has no memory, or when nothing was swapped.
pub fn touch(bytes: u64, time: Duration, entrance: &Path) -> io::Result<Touch> {
    std::fs::write(entrance, "0")?;
    let mut region = Region::new(bytes as usize)?;
    let mut touch = Touch::default();
    let (_, out_before) = swapped()?;
    let begun = Instant::now();
    for page in 0..region.pages {
        region.write(page);
    }
    touch.out_mb_per_s = rate(swapped()?.1 - out_before, begun);

    let mut random = 0x9e37_79b9_7f4a_7c15;
    let (in_before, _) = swapped()?;
    let begun = Instant::now();
    let mut taken = Vec::with_capacity(FAULTS_MAX);
    while begun.elapsed() < time && taken.len() < FAULTS_MAX {
        taken.push(region.fault(&mut random, &mut touch.mismatches)?);
    }
    touch.faults = taken.len() as u64;
    touch.pages_per_fault = (swapped()?.0 - in_before) as f64 / touch.faults.max(1) as f64;
    (touch.fault_p50_us, touch.fault_p99_us) = percentiles(&mut taken);

    let begun = Instant::now();
    for page in 0..region.pages {
        touch.mismatches += u64::from(!region.is_right(page));
    }
    touch.in_mb_per_s = rate(region.pages as u64, begun);

    let begun = Instant::now();
    let mut read = 0;
    while begun.elapsed() < time {
        let first = splitmix(&mut random) as usize % (region.pages - STRETCH);
        for page in first..first + STRETCH {
            touch.mismatches += u64::from(!region.is_right(page));
        }
        read += STRETCH as u64;
    }
    touch.mixed_mb_per_s = rate(read, begun);

    let begun = Instant::now();
    let mut taken = Vec::new();
    while begun.elapsed() < time {
        std::thread::sleep(PAUSE);
        taken.push(region.fault(&mut random, &mut touch.mismatches)?);
    }
    (touch.sporadic_p50_us, touch.sporadic_p99_us) = percentiles(&mut taken);
    Ok(touch)
}

/// Memory that the kernel may swap.
struct Region {
    start: *mut u8,
    pages: usize,
    template: [u8; PAGE_SIZE],
}

impl Region {
    fn new(bytes: usize) -> io::Result<Region> {
        let pages = bytes / PAGE_SIZE;
        let bytes = pages * PAGE_SIZE;
        let protection = ProtFlags::READ | ProtFlags::WRITE;
        // SAFETY: a fresh private mapping at an address of the kernel's choice overlaps no other.
        // It is never unmapped.
        let start = unsafe {
            let start =
                rustix::mm::mmap_anonymous(std::ptr::null_mut(), bytes, protection, MapFlags::PRIVATE)?;
            // Ask for small pages, since the benchmark measures those. A kernel without huge pages
            // returns EINVAL.
            match rustix::mm::madvise(start, bytes, Advice::LinuxNoHugepage) {
                Ok(()) | Err(rustix::io::Errno::INVAL) => {}
                Err(error) => return Err(error.into()),
            }
            start
        };
        // Half of the page compresses to nothing, and the other half does not compress. The memory
        // of programs is like that on average.
        let mut template = [0; PAGE_SIZE];
        let mut state = 1u64;
        for byte in &mut template[..PAGE_SIZE / 2] {
            *byte = (splitmix(&mut state) >> 32) as u8;
        }
        Ok(Region { start: start.cast(), pages, template })
    }

    fn at(&self, page: usize) -> *mut u8 {
        assert!(page < self.pages);
        // SAFETY: the address is within the mapping.
        unsafe { self.start.add(page * PAGE_SIZE) }
    }

    fn write(&mut self, page: usize) {
        let at = self.at(page);
        // SAFETY: the page lies within the mapping, which only this thread uses; both sides are
        // aligned.
        unsafe {
            at.copy_from_nonoverlapping(self.template.as_ptr(), PAGE_SIZE);
            at.cast::<u64>().write(page as u64);
            at.add(PAGE_SIZE - 8).cast::<u64>().write(!(page as u64));
        }
    }

    fn is_right(&self, page: usize) -> bool {
        let at = self.at(page);
        // SAFETY: the page lies within the mapping, which only this thread uses.
        let bytes = unsafe { std::slice::from_raw_parts(at, PAGE_SIZE) };
        bytes[..8] == (page as u64).to_ne_bytes()
            && bytes[PAGE_SIZE - 8..] == (!(page as u64)).to_ne_bytes()
            && bytes[8..PAGE_SIZE - 8] == self.template[8..PAGE_SIZE - 8]
    }

    /// Touches pages at random until one has to come from swap; returns its latency in nanoseconds.
    fn fault(&self, random: &mut u64, mismatches: &mut u64) -> io::Result<u64> {
        for _ in 0..VAIN_MAX {
            let page = (splitmix(random) % self.pages as u64) as usize;
            let at = self.at(page);
            let before = major_faults();
            let begun = Instant::now();
            // SAFETY: the page lies within the mapping. The read is volatile, so that it happens
            // here.
            unsafe { at.cast::<u64>().read_volatile() };
            let taken = begun.elapsed();
            if major_faults() > before {
                *mismatches += u64::from(!self.is_right(page));
                return Ok(taken.as_nanos() as u64);
            }
        }
        Err(io::Error::other("nothing is in swap: is the limit smaller than the memory touched?"))
    }
}

fn percentiles(taken: &mut [u64]) -> (f64, f64) {
    (percentile(taken, 50.0) as f64 / 1e3, percentile(taken, 99.0) as f64 / 1e3)
}

/// Number of major page faults of this thread since its start.
fn major_faults() -> i64 {
    // SAFETY: a `rusage` of zeros is valid, and the call fills in the one that it is given.
    unsafe {
        let mut usage: libc::rusage = std::mem::zeroed();
        libc::getrusage(libc::RUSAGE_THREAD, &raw mut usage);
        usage.ru_majflt
    }
}

/// Number of pages swapped in and out by the whole machine since it booted.
fn swapped() -> io::Result<(u64, u64)> {
    let text = std::fs::read_to_string("/proc/vmstat")?;
    let number = |key: &str| {
        let value = text.lines().find_map(|line| line.strip_prefix(key)?.strip_prefix(' '));
        value.and_then(|value| value.trim().parse().ok()).unwrap_or(0)
    };
    Ok((number("pswpin"), number("pswpout")))
}

fn rate(pages: u64, begun: Instant) -> f64 {
    (pages * PAGE_SIZE as u64) as f64 / 1e6 / begun.elapsed().as_secs_f64()
}
