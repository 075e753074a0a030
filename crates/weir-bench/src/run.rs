//! Turns flags into a benchmark's plan, and its report into table, JSON and HTML.

use crate::cli::{
    Bench, BenchBlockOptions, BenchDiskOptions, BenchFaultOptions, BenchGiveBackOptions, BenchLeaseOptions,
    BenchLongOptions, BenchQueueOptions, BenchStoreOptions, BenchSwapOptions, BlockControl, Cli,
};
use clap::CommandFactory as _;
use std::fs::{self, OpenOptions};
use std::io;
use std::path::{Path, PathBuf};
use std::time::Duration;
use weir_bench::report::Report;
use weir_bench::{
    block, compress, disk, fault, give_back, lease, memory, queue, restart, share, store, swap,
};
use weir_cli::failure::{Failure, chain};
use weir_cli::{guard, manual};
use weir_store::{StoreUrl, VramUrl};

/// The rate of `--hold`, in pages per second.
const HOLD_RATE: f64 = 100_000.0;

/// Runs a benchmark, prints the table, and writes the files. Fails if a goal was missed. Changes to
/// the machine are undone in any case.
pub fn run(options: &Cli) -> Result<(), Failure> {
    // Check the output files first, since a run may take an hour.
    for path in options.json.iter().chain(&options.report) {
        check_writable(path).map_err(|error| {
            Failure::Failed(format!("cannot write {}: {error}; name another file", path.display()))
        })?;
    }
    match &options.bench {
        // These commands need no [`guard::run`], which undoes a command's changes to the machine
        // even if it is killed. They change nothing, or are children of a command that has a guard.
        Bench::Show { .. }
        | Bench::SwapTouch { .. }
        | Bench::FaultTouch { .. }
        | Bench::Allocate { .. }
        | Bench::Completions { .. }
        | Bench::Man { .. } => measure(options),
        Bench::Disk(disk) => guard::run(Some(&disk.directory), || measure(options)),
        _ => guard::run(None, || measure(options)),
    }
}

fn measure(options: &Cli) -> Result<(), Failure> {
    let report = match &options.bench {
        Bench::Block(options) => block::run(&block_plan(options)).map_err(|error| failed(&error))?,
        Bench::Long(options) => block::run_long(&long_plan(options)).map_err(|error| failed(&error))?,
        Bench::Disk(options) => disk::run(&disk_options(options)).map_err(|error| failed(&error))?,
        Bench::Queue(options) => queue::run(&queue_options(options)).map_err(|error| failed(&error))?,
        Bench::Lease(options) => lease::run(&lease_plan(options)).map_err(|error| failed(&error))?,
        Bench::Share { rounds } => {
            share::run(&share::Plan { rounds: usize::from(*rounds), ..share::Plan::default() })
                .map_err(|error| failed(&error))?
        }
        Bench::Store(BenchStoreOptions { hold: Some(seconds), store, .. }) => {
            let rate = store::hold(store, HOLD_RATE, *seconds).map_err(|error| failed(&error))?;
            eprintln!("{rate:.0} pages/s, every one checked");
            return Ok(());
        }
        Bench::Swap(options) => swap::run(&swap_plan(options)).map_err(|error| failed(&error))?,
        Bench::Fault(options) => fault::run(&fault_plan(options)).map_err(|error| failed(&error))?,
        Bench::FaultTouch { size, milliseconds, entrance, bare } => {
            let time = Duration::from_millis(*milliseconds);
            let bound = match (entrance, bare) {
                (Some(entrance), _) => fault::Bound::Cgroup(entrance),
                (None, Some(limit)) => fault::Bound::Bare(*limit),
                (None, None) => fault::Bound::Outside,
            };
            let touched = fault::touch(size.0, time, bound).map_err(|error| failed(&error))?;
            println!("{}", serde_json::to_string(&touched).expect("numbers always serialise"));
            return Ok(());
        }
        Bench::GiveBack(options) => {
            give_back::run(&give_back_plan(options)).map_err(|error| failed(&error))?
        }
        Bench::Allocate { step } => {
            let allocated = give_back::allocate(*step).map_err(|error| failed(&error))?;
            println!("{}", serde_json::to_string(&allocated).expect("numbers always serialise"));
            return Ok(());
        }
        Bench::SwapTouch { size, milliseconds, entrance } => {
            let time = Duration::from_millis(*milliseconds);
            let touched = swap::touch(size.0, time, entrance).map_err(|error| failed(&error))?;
            println!("{}", serde_json::to_string(&touched).expect("numbers always serialise"));
            return Ok(());
        }
        Bench::BatchBurn { store, shape, seconds } => {
            let burnt =
                store::batches::burn(card(store)?, *shape, *seconds).map_err(|error| failed(&error))?;
            println!("{}", serde_json::to_string(&burnt).expect("numbers always serialise"));
            return Ok(());
        }
        Bench::Store(options) if options.batch_sweep => {
            let sweep = store::batches::Sweep {
                program: "/proc/self/exe".into(),
                store: card(&options.store)?.clone(),
                seconds: options.sweep_seconds,
                copies: options.sweep_copies.clone(),
            };
            store::batches::sweep(&sweep).map_err(|error| failed(&error))?
        }
        Bench::Store(options) if options.calibrate => {
            store::calibrate(&options.store).map_err(|error| failed(&error))?
        }
        Bench::Store(options) => {
            let plan = store_plan(options);
            let mut report = store::run(&plan).map_err(|error| failed(&error))?;
            report.rows.extend(store::remote::rows(&plan).map_err(|error| failed(&error))?);
            report
        }
        Bench::Restart { store, bytes, kills } => {
            let weir = weir_bench::weir();
            restart::run(&restart::Plan { weir, store: store.to_string(), bytes: bytes.0, kills: *kills })
                .map_err(|error| failed(&error))?
        }
        Bench::Completions { shell } => {
            manual::completions(Cli::command(), *shell, |script| script);
            return Ok(());
        }
        Bench::Man { directory } => return manual::pages(Cli::command(), directory, example),
        Bench::Show { files, plots: Some(directory) } => return draw(files, directory),
        Bench::Show { files, plots: None } => {
            let (last, others) = files.split_last().expect("clap wants one at least");
            if !others.is_empty() && (options.json.is_some() || options.report.is_some()) {
                let what = "--json and --report are for one file; accepted for several: --plots DIRECTORY";
                return Err(Failure::Usage(format!("{} files: {what}", files.len())));
            }
            for file in others {
                println!("{}", saved(file)?);
            }
            saved(last)?
        }
        Bench::Compress { size, runs } => {
            compress::run(&compress::Plan { bytes: size.0, runs: usize::from(*runs) })
                .map_err(|error| failed(&error))?
        }
        Bench::Policy { trace, room } => {
            weir_bench::policy::run(trace.as_deref(), room).map_err(|error| failed(&error))?
        }
        Bench::Cache { size, members, iops, bandwidth, store, time, runs } => {
            weir_bench::cache::run(&weir_bench::cache::Options {
                size: *size,
                members: *members,
                operations: *iops,
                bytes: *bandwidth,
                card: store.as_ref().map(card_without_size).transpose()?.cloned(),
                time: Duration::from_secs(*time),
                runs: usize::from(*runs),
            })
            .map_err(|error| failed(&error))?
        }
        Bench::Memory { size } => memory::run(&memory::Plan { bytes: size.0, ..Default::default() })
            .map_err(|error| failed(&error))?,
    };
    println!("{report}");
    if let Some(path) = &options.json {
        report.write_json(path).map_err(|error| failed(&error))?;
    }
    if let Some(path) = &options.report {
        report.write_html(path).map_err(|error| failed(&error))?;
    }
    verdict(&report)
}

/// Checks that the file can be written, without changing it.
fn check_writable(path: &Path) -> io::Result<()> {
    match OpenOptions::new().write(true).create_new(true).open(path) {
        Ok(_) => fs::remove_file(path),
        Err(error) if error.kind() == io::ErrorKind::AlreadyExists => {
            OpenOptions::new().write(true).open(path).map(drop)
        }
        Err(error) => Err(error),
    }
}

/// The URL of the card, for a benchmark that is only about GPU memory.
fn card(store: &StoreUrl) -> Result<&VramUrl, Failure> {
    match store {
        StoreUrl::Vram(url) => Ok(url),
        other => Err(Failure::Usage(format!("--store {other} is on no card; accepted: vram:0, vram:N"))),
    }
}

/// The URL of the card, for a benchmark that chooses the store's size.
fn card_without_size(store: &StoreUrl) -> Result<&VramUrl, Failure> {
    match card(store)? {
        url if url.size.is_none() => Ok(url),
        _ => Err(Failure::Usage(format!(
            "--store {store} has a size, which follows from --size; leave it out"
        ))),
    }
}

/// Reads a saved report.
fn saved(file: &Path) -> Result<Report, Failure> {
    let text = std::fs::read_to_string(file)
        .map_err(|error| Failure::Failed(format!("cannot read {}: {error}", file.display())))?;
    Report::from_json(&text)
        .map_err(|error| Failure::Failed(format!("{}: {}", file.display(), chain(&error))))
}

/// Draws each file's picture into `directory`.
fn draw(files: &[PathBuf], directory: &Path) -> Result<(), Failure> {
    std::fs::create_dir_all(directory)
        .map_err(|error| Failure::Failed(format!("cannot make {}: {error}", directory.display())))?;
    for file in files {
        let picture = directory.join(file.file_name().unwrap_or_default()).with_extension("svg");
        saved(file)?.write_plot(&picture).map_err(|error| failed(&error))?;
        println!("{}", picture.display());
    }
    Ok(())
}

fn verdict(report: &Report) -> Result<(), Failure> {
    let missed: Vec<_> =
        report.rows.iter().filter(|row| row.met == Some(false)).map(|row| &*row.id).collect();
    if missed.is_empty() {
        return Ok(());
    }
    Err(Failure::Failed(format!(
        "{} of {} goals missed: {}",
        missed.len(),
        report.rows.len(),
        missed.join(", ")
    )))
}

fn failed(error: &dyn std::error::Error) -> Failure {
    Failure::Failed(chain(error))
}

fn block_plan(options: &BenchBlockOptions) -> block::Plan {
    // nbdkit is so far the only server that the benchmark can run beside Weir.
    let BlockControl::Nbdkit = options.against;
    block::Plan {
        size: options.size,
        store: options.store.as_ref().map(ToString::to_string),
        time: Duration::from_secs(options.seconds.into()),
        runs: options.runs.into(),
        spin_us: options.spin_us,
        only: options.only.clone(),
        ..block::Plan::default()
    }
}

fn long_plan(options: &BenchLongOptions) -> block::Long {
    let plan = block::Plan {
        size: options.size,
        store: options.store.as_ref().map(ToString::to_string),
        time: Duration::from_secs(options.seconds.into()),
        runs: options.runs.into(),
        ..block::Plan::default()
    };
    block::Long { plan, nbd_vram: options.nbd_vram.clone() }
}

fn swap_plan(options: &BenchSwapOptions) -> swap::Plan {
    swap::Plan {
        size: options.size,
        limit: options.limit,
        store: options.store.as_ref().map(ToString::to_string),
        time: Duration::from_secs(options.seconds.into()),
        runs: options.runs.into(),
        spin_us: options.spin_us,
        only: options.only.clone(),
        page_clusters: options.page_cluster.clone(),
        ..swap::Plan::default()
    }
}

fn fault_plan(options: &BenchFaultOptions) -> fault::Plan {
    fault::Plan {
        size: options.size,
        limit: options.limit,
        store: options.store.as_ref().map(ToString::to_string),
        time: Duration::from_secs(options.seconds.into()),
        runs: options.runs.into(),
        only: options.only.clone(),
    }
}

fn give_back_plan(options: &BenchGiveBackOptions) -> give_back::Plan {
    // Beside the device's pages the store below needs some room for writes under way.
    let below = format!("host:{}", options.size.0 + (64 << 20));
    give_back::Plan {
        weir: weir_bench::weir(),
        store: options.store.to_string(),
        below: options.below.as_ref().map_or(below, ToString::to_string),
        size: options.size,
        cycles: options.cycles,
        users: options.users.into(),
        steps: options.steps,
    }
}

fn disk_options(options: &BenchDiskOptions) -> disk::Options {
    disk::Options {
        directory: options.directory.clone(),
        size: options.size,
        time: Duration::from_secs(options.seconds.into()),
        runs: options.runs.into(),
    }
}

fn queue_options(options: &BenchQueueOptions) -> queue::Options {
    let &BenchQueueOptions { single, multi, producers, rounds } = options;
    let [single, multi, producers, rounds] = [single, multi, producers, rounds].map(|number| number as usize);
    queue::Options { single, multi, producers, rounds }
}

fn lease_plan(options: &BenchLeaseOptions) -> lease::Plan {
    let mut plan = lease::Plan {
        outstanding: options.outstanding,
        region: options.region.0,
        trials: options.trials,
        flows: options.flows,
        workers: options.workers,
        ..lease::Plan::default()
    };
    if !options.connections.is_empty() {
        plan.connections.clone_from(&options.connections);
    }
    if !options.threads.is_empty() {
        plan.threads.clone_from(&options.threads);
    }
    plan
}

fn store_plan(options: &BenchStoreOptions) -> store::Plan {
    let processors = std::thread::available_parallelism().map_or(1, std::num::NonZero::get);
    store::Plan {
        url: options.store.clone(),
        runs: options.runs.max(1),
        threads: options.threads.unwrap_or(processors).max(1),
        depth: options.depth.max(1),
        efforts: options.give_back.clone(),
        coherence_seconds: options.coherence_seconds,
        short: options.short,
        only: options.only.clone(),
    }
}

/// The examples of a benchmark's man page: a command, and a line about it.
fn example(page: &str) -> Vec<(String, String)> {
    let benchmark = page.strip_prefix("weir-bench-").unwrap_or("block");
    let (command, about) = match benchmark {
        "show" => ("weir bench show block.json".to_owned(), "Results that were saved."),
        "completions" => ("weir-bench completions bash".to_owned(), "The script for a shell."),
        "man" => ("weir-bench man .".to_owned(), "A page for each benchmark."),
        _ => {
            (format!("weir bench {benchmark} --json {benchmark}.json"), "A table, and the figures in a file.")
        }
    };
    vec![(command, about.to_owned())]
}
