//! `torture`: runs the memory torture of this crate and reports the result.
//!
//! Exit codes: 0 if every page was what was written and no process was killed (one may be, by its
//! memory cgroup's limit), 1 otherwise, 2 for wrong usage.

use clap::Parser;
use std::fmt::Display;
use std::fs;
use std::io::{self, Write};
use std::path::{Path, PathBuf};
use std::process::{Child, Command, ExitCode, Stdio};
use std::time::{Duration, Instant};
use weir_core::{ByteSize, PAGE_SIZE};
use weir_torture::cgroup::Cgroup;
use weir_torture::pattern::Contents;
use weir_torture::worker::{self, Tally, Work};
use weir_torture::{disk, swap};

/// Time between two looks at swap use while the processes run.
const SAMPLE: Duration = Duration::from_millis(200);
/// Most processes that the kernel may kill at their memory cgroup's limit. While a daemon is
/// replaced, no page reaches the swap device for half a second. Linux 7 has then killed a process
/// whose pages were all on their way out, once in dozens of runs.
const AT_LIMIT: u64 = 1;

/// Touches more memory than it may have, and checks every page.
#[derive(Parser)]
#[command(name = "torture")]
struct Options {
    /// Memory to touch, over all processes
    #[arg(long)]
    size: ByteSize,
    /// RAM that all processes together may keep (a memory cgroup; needs root). Without: no limit
    #[arg(long)]
    limit: Option<ByteSize>,
    /// Instead of memory, write this block device: pages that it refuses for a while (EIO,
    /// ETIMEDOUT) are counted
    #[arg(long, value_name = "PATH", conflicts_with_all = ["limit", "until_swap"])]
    device: Option<PathBuf>,
    /// Touch no more once so much swap is in use, in the whole system
    #[arg(long)]
    until_swap: Option<ByteSize>,
    /// Processes that share the work
    #[arg(long, default_value_t = 2, value_parser = clap::value_parser!(u64).range(1..=1024))]
    processes: u64,
    /// The contents of pages
    #[arg(long, value_enum, default_value_t)]
    contents: Contents,
    /// Everything random follows from it
    #[arg(long, default_value_t = 1)]
    seed: u64,
    /// Then go on reading back and rewriting for at least this long
    #[arg(long, default_value_t = 0)]
    seconds: u64,
    /// Append the figures as lines of ID, METRIC, VALUE, BETTER, GOAL with tabs between
    #[arg(long)]
    figures: Option<PathBuf>,
    /// This is process N of a torture: enter the cgroup whose cgroup.procs is given, and work
    #[arg(long, hide = true, num_args = 2, value_names = ["N", "PROCS"])]
    worker: Option<Vec<String>>,
}

fn main() -> ExitCode {
    let options = Options::parse();
    let done = match &options.worker {
        Some(which) => work(&options, &which[0], &which[1]).map(|()| true),
        None => torture(&options),
    };
    match done {
        Ok(true) => ExitCode::SUCCESS,
        Ok(false) => ExitCode::FAILURE,
        Err(error) => {
            eprintln!("torture: {error}");
            ExitCode::FAILURE
        }
    }
}

/// The work of one process, which enters the limit before it touches its first page.
fn work(options: &Options, process: &str, entrance: &str) -> io::Result<()> {
    if !entrance.is_empty() {
        fs::write(entrance, "0")?;
    }
    let work = Work {
        seed: options.seed,
        process: process.parse().map_err(io::Error::other)?,
        pages: (options.size.0 / options.processes) as usize / PAGE_SIZE,
        contents: options.contents,
        until_swap_kib: options.until_swap.map(|most| most.0 >> 10),
        at_least: Duration::from_secs(options.seconds),
    };
    let complain = |line: &str| eprintln!("torture: process {process}: {line}");
    let tally = match &options.device {
        Some(device) => disk::run(work, device, complain)?,
        None => worker::run(work, complain),
    };
    writeln!(io::stdout(), "{}", tally.to_line())
}

/// The parent, outside of the limit: it starts the processes, watches swap, and adds up. Returns
/// true if all is well.
fn torture(options: &Options) -> io::Result<bool> {
    let name = format!("weir-torture-{}", std::process::id());
    let cgroup = options.limit.map(|limit| Cgroup::new(&name, limit.0)).transpose()?;
    let (in_before, out_before) = swap::pages_moved()?;
    let swap_before = swap::used_kib()?;
    let stalls_before = swap::direct_reclaims()?;
    let started = Instant::now();
    let entrance = cgroup.as_ref().map(Cgroup::entrance).unwrap_or_default();
    let mut children = (0..options.processes)
        .map(|process| start_worker(process, &entrance))
        .collect::<io::Result<Vec<Child>>>()?;

    let (mut swap_peak, mut free_least) = (0, u64::MAX);
    while children.iter_mut().map(Child::try_wait).collect::<io::Result<Vec<_>>>()?.contains(&None) {
        swap_peak = swap_peak.max(swap::used_kib()?.saturating_sub(swap_before));
        free_least = free_least.min(swap::free_kib()?);
        std::thread::sleep(SAMPLE);
    }
    let mut total = Tally::default();
    let mut lost: u64 = 0;
    for (process, child) in children.into_iter().enumerate() {
        let done = child.wait_with_output()?;
        match str::from_utf8(&done.stdout).ok().and_then(|line| Tally::from_line(line.trim_end())) {
            Some(tally) if done.status.success() => total.add(tally),
            _ => {
                lost += 1;
                eprintln!("torture: process {process} did not finish: {}", done.status);
            }
        }
    }
    let (in_after, out_after) = swap::pages_moved()?;
    let at_limit = cgroup.as_ref().map_or(0, Cgroup::killed);
    let killed = lost.saturating_sub(at_limit);

    let mut report = Report { file: options.figures.as_deref().map(open_to_append).transpose()? };
    let touched = total.touched * PAGE_SIZE as u64;
    report.row("touched_mib", touched >> 20, "")?;
    if let Some(limit) = options.limit {
        let over = touched as f64 / limit.0 as f64;
        report.row("touched_over_limit", format!("{over:.2}"), "higher")?;
    }
    report.row("processes", options.processes, "")?;
    report.row("seconds", format!("{:.2}", started.elapsed().as_secs_f64()), "lower")?;
    // If memory is above the limit and none of it is in swap, nothing was tested.
    let swaps = options.limit.is_some_and(|limit| options.size > limit);
    report.row("swap_peak_mib", swap_peak >> 10, if swaps { "higher\t1" } else { "" })?;
    report.row("free_least_kib", free_least, "")?;
    report.row("direct_reclaims", swap::direct_reclaims()? - stalls_before, "")?;
    report.row("pages_swapped_out", out_after - out_before, "")?;
    report.row("pages_swapped_in", in_after - in_before, "")?;
    report.row("pages_written", total.written, "")?;
    report.row("pages_checked", total.checked, "")?;
    if options.device.is_some() {
        report.row("refused", total.refused, "")?;
    }
    report.row("longest_touch_s", format!("{:.3}", total.longest_us as f64 / 1e6), "lower")?;
    report.row("killed", killed, "lower\t0")?;
    report.row("killed_at_limit", at_limit, &format!("lower\t{AT_LIMIT}"))?;
    report.row("mismatches", total.mismatches, "lower\t0")?;
    Ok(total.mismatches == 0 && killed == 0 && at_limit <= AT_LIMIT)
}

fn start_worker(process: u64, entrance: &Path) -> io::Result<Child> {
    Command::new(std::env::current_exe()?)
        .args(std::env::args_os().skip(1))
        .arg("--worker")
        .arg(process.to_string())
        .arg(entrance)
        .stdin(Stdio::null())
        .stdout(Stdio::piped())
        .spawn()
}

fn open_to_append(path: &Path) -> io::Result<fs::File> {
    fs::OpenOptions::new().create(true).append(true).open(path)
}

/// The figures, for people and for a file.
struct Report {
    file: Option<fs::File>,
}

impl Report {
    fn row(&mut self, metric: &str, value: impl Display, better_and_goal: &str) -> io::Result<()> {
        println!("  {metric:20} {value}");
        match &mut self.file {
            Some(file) => writeln!(file, "torture\t{metric}\t{value}\t{better_and_goal}"),
            None => Ok(()),
        }
    }
}
