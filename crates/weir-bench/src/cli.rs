//! The command line of `weir-bench`, which users call as `weir bench`.

use clap::{Args, Parser, Subcommand, ValueEnum};
use std::path::PathBuf;
use weir_bench::store::{self, Effort};
use weir_core::ByteSize;
use weir_store::StoreUrl;

/// Measure parts of Weir, each figure beside a control.
#[derive(Debug, Parser)]
#[command(name = "weir-bench", bin_name = "weir bench", version, max_term_width = 100)]
#[command(after_help = "Exit codes: 0 done, 1 failed or a goal missed, 2 usage.")]
pub struct Cli {
    /// Write the figures as one JSON object ("schema": 1).
    #[arg(long, value_name = "FILE", global = true)]
    pub json: Option<PathBuf>,

    /// Write a page of HTML with the table and a plot for each metric.
    #[arg(long, value_name = "FILE.html", global = true)]
    pub report: Option<PathBuf>,

    /// The benchmark.
    #[command(subcommand)]
    pub bench: Bench,
}

/// The benchmarks.
#[derive(Debug, Clone, Subcommand)]
pub enum Bench {
    /// The NBD server with a host store, asleep and spinning, beside nbdkit's memory plugin, driven
    /// by fio.
    Block(BenchBlockOptions),

    /// Requests of 1 MiB by one job and by four, to a store, with and without a card's window.
    /// Beside it run nbdkit, nbd-vram and a server that keeps nothing.
    Long(BenchLongOptions),

    /// The file store beside fio's own io_uring engine, on the same disk.
    Disk(BenchDiskOptions),

    /// The cost of a work item from the thread that schedules it to the one that runs it, beside
    /// other queues.
    Queue(BenchQueueOptions),

    /// The cost of a page reference that is handed out and comes back, beside the designs of the
    /// Linux kernel.
    Lease(BenchLeaseOptions),

    /// Pages used in place over the share transport, beside the same pages over NBD.
    Share {
        /// Rounds; the figures are medians.
        #[arg(long, value_name = "N", default_value_t = 5, value_parser = clap::value_parser!(u8).range(1..))]
        rounds: u8,
    },
    /// A store by itself and under a volume, beside the GPU's copy engine used call by call.
    Store(BenchStoreOptions),

    /// The cost of a page that comes back from swap: FUSE and a loop device, beside a RAM loop,
    /// zram, a file and nbdfuse.
    Swap(BenchSwapOptions),

    /// The cost for a program of keeping a quarter of its memory: weir run, beside swap, a bare
    /// handler and no limit.
    Fault(BenchFaultOptions),

    /// The child process that goes through its memory, for `fault`.
    #[command(hide = true)]
    FaultTouch {
        /// Memory to go through.
        #[arg(long)]
        size: ByteSize,
        /// Milliseconds for which single pages are touched.
        #[arg(long)]
        milliseconds: u64,
        /// The cgroup.procs file of the cgroup to enter.
        #[arg(long)]
        entrance: Option<PathBuf>,
        /// Bytes that a bare handler lets the child keep.
        #[arg(long, conflicts_with = "entrance")]
        bare: Option<usize>,
    },

    /// The speed of give-back and take while programs use the device, and what those programs
    /// notice.
    GiveBack(BenchGiveBackOptions),

    /// The child process that allocates most of the card, for `give-back`.
    #[command(hide = true)]
    Allocate {
        /// Bytes of one allocation.
        #[arg(long)]
        step: ByteSize,
    },

    /// The child process that a driver may crash, for `store --batch-sweep`.
    #[command(hide = true)]
    BatchBurn {
        /// The card, as a store's URL.
        #[arg(long)]
        store: StoreUrl,
        /// The load, as JSON.
        #[arg(long)]
        shape: store::batches::Shape,
        /// Seconds of the load.
        #[arg(long)]
        seconds: u64,
    },

    /// The child process that swaps, for `swap`.
    #[command(hide = true)]
    SwapTouch {
        /// Memory to touch.
        #[arg(long)]
        size: ByteSize,
        /// Milliseconds for which page faults are timed.
        #[arg(long)]
        milliseconds: u64,
        /// The cgroup.procs file of the cgroup to enter.
        #[arg(long)]
        entrance: PathBuf,
    },

    /// The time until the keeper's next daemon serves after a kill under load, and whether every
    /// page is right.
    Restart {
        /// The daemon's store, with some MiB more than is written.
        #[arg(long, value_name = "URL", default_value = "host:1088MiB")]
        store: StoreUrl,
        /// Bytes of the pages that are written, and compared after each kill.
        #[arg(long, default_value = "1GiB")]
        bytes: ByteSize,
        /// Number of kills.
        #[arg(long, value_name = "N", default_value_t = 3, value_parser = clap::value_parser!(u32).range(1..))]
        kills: u32,
    },

    /// Shows results that were saved; with --report or --plots, draws them.
    Show {
        /// The JSON files; only one with --json or --report.
        #[arg(required = true)]
        files: Vec<PathBuf>,
        /// Write a picture of each file into this directory, as FILE.svg: each figure that has a
        /// goal, beside its control.
        #[arg(long, value_name = "DIRECTORY")]
        plots: Option<PathBuf>,
    },

    /// The cost of compression for a page, and the room that it saves, beside a volume without.
    Compress {
        /// Pages to write and read, in bytes.
        #[arg(long, default_value = "256MiB")]
        size: ByteSize,

        /// Times that each volume is filled and read.
        #[arg(long, value_name = "N", default_value_t = 5, value_parser = clap::value_parser!(u8).range(1..=100))]
        runs: u8,
    },

    /// Print completions for a shell.
    #[command(hide = true)]
    Completions {
        /// The shell that is to complete.
        shell: clap_complete::Shell,
    },

    /// Write the man pages into a directory.
    #[command(hide = true)]
    Man {
        /// The directory for the man pages, made if it is not there.
        directory: PathBuf,
    },

    /// Hit rates of the cache's policy on traces of pages, beside LRU and OPT with as much room.
    Policy {
        /// A text file with a page number a line [default: made traces: Zipf, uniform, scans
        /// through a hot set].
        #[arg(long, value_name = "FILE")]
        trace: Option<PathBuf>,

        /// Size of the cache, in per cent of the trace's pages. May be repeated.
        #[arg(long, value_name = "PERCENT", default_values_t = [5, 10, 25, 50], value_parser = clap::value_parser!(u8).range(1..=100))]
        room: Vec<u8>,
    },

    /// Random 4 KiB requests on limited disks: bare, through a cache, through a cache over a log.
    Cache {
        /// Size of all simulated disks together. They take this much memory, and the cache takes a
        /// quarter of it on top.
        #[arg(long, default_value = "8GiB")]
        size: ByteSize,

        /// Number of disks.
        #[arg(long, value_name = "N", default_value_t = 4, value_parser = clap::value_parser!(u32).range(1..=64))]
        members: u32,

        /// Operations a second that each disk can do.
        #[arg(long, value_name = "N", default_value_t = 5000, value_parser = clap::value_parser!(u64).range(1..=1_000_000_000))]
        iops: u64,

        /// Bytes a second that each disk can move.
        #[arg(long, value_name = "SIZE", default_value = "400000000")]
        bandwidth: ByteSize,

        /// Seconds that each contender is measured.
        #[arg(long, value_name = "SECONDS", default_value_t = 10)]
        time: u64,

        /// Number of runs; a figure is the median.
        #[arg(long, value_name = "N", default_value_t = 3, value_parser = clap::value_parser!(u16).range(1..))]
        runs: u16,
    },

    /// The memory of a volume besides the pages themselves.
    Memory {
        /// The volume's size.
        #[arg(long, default_value = "64GiB")]
        size: ByteSize,
    },
}

/// The memory to swap, and the length of the measurement.
#[derive(Debug, Clone, Args)]
pub struct BenchSwapOptions {
    /// Memory that a child process writes.
    #[arg(long, default_value = "256MiB")]
    pub size: ByteSize,

    /// Memory of the child process that may stay in RAM.
    #[arg(long, default_value = "64MiB")]
    pub limit: ByteSize,

    /// Another store of Weir's to measure, without a size: vram:0
    #[arg(long, value_name = "URL")]
    pub store: Option<StoreUrl>,

    /// Seconds for which page faults are timed on each device, first one after the other, then one
    /// each 20 ms.
    #[arg(long, value_name = "N", default_value_t = 3, value_parser = clap::value_parser!(u16).range(1..))]
    pub seconds: u16,

    /// Number of runs; the figures are medians.
    #[arg(long, value_name = "N", default_value_t = 3, value_parser = clap::value_parser!(u16).range(1..))]
    pub runs: u16,

    /// Microseconds for which the spinning server spins: 20 is what `weir on` has it do by default.
    #[arg(long, value_name = "N", default_value_t = 20)]
    pub spin_us: u32,

    /// A device to measure beside the RAM loop: host, host-asleep, zram, file, nbdfuse, store; may
    /// be repeated [default: all].
    #[arg(long, value_name = "DEVICE")]
    pub only: Vec<String>,

    /// Values of vm.page-cluster to measure each device at: 0,3 compares a page a fault with the
    /// kernel's default.
    #[arg(long, value_name = "LIST", default_value = "0", value_delimiter = ',', value_parser = clap::value_parser!(u8).range(..=10))]
    pub page_cluster: Vec<u8>,
}

/// The child's memory, and its limit.
#[derive(Debug, Clone, Args)]
pub struct BenchFaultOptions {
    /// Memory that a child process goes through: a power of two.
    #[arg(long, default_value = "256MiB", value_parser = power_of_two)]
    pub size: ByteSize,

    /// Memory that the child may keep in RAM.
    #[arg(long, default_value = "64MiB")]
    pub limit: ByteSize,

    /// Another store for `weir run`, without a size: vram:0
    #[arg(long, value_name = "URL")]
    pub store: Option<StoreUrl>,

    /// Seconds for which single pages are touched.
    #[arg(long, value_name = "N", default_value_t = 2, value_parser = clap::value_parser!(u16).range(1..))]
    pub seconds: u16,

    /// Number of runs; the figures are medians.
    #[arg(long, value_name = "N", default_value_t = 3, value_parser = clap::value_parser!(u16).range(1..))]
    pub runs: u16,

    /// A way to measure beside no limit: run, run-store, bare, zram, ram-loop, host; may be
    /// repeated [default: all].
    #[arg(long, value_name = "WAY")]
    pub only: Vec<String>,
}

fn power_of_two(text: &str) -> Result<ByteSize, String> {
    let size: ByteSize = text.parse().map_err(|error| format!("{error}"))?;
    match size.0.is_power_of_two() && size.0 >= 2 << 20 {
        true => Ok(size),
        false => Err("accepted: a power of two from 2MiB on, such as 256MiB or 1GiB".into()),
    }
}

/// The memory to give back, the number of cycles, and the programs that use the device.
#[derive(Debug, Clone, Args)]
pub struct BenchGiveBackOptions {
    /// The store whose memory is given back and taken.
    #[arg(long, value_name = "URL", default_value = "vram:0")]
    pub store: StoreUrl,

    /// The store below the measured one; it must hold the whole device [default: host memory].
    #[arg(long, value_name = "URL")]
    pub below: Option<StoreUrl>,

    /// The device's size; every page of it is in use.
    #[arg(long, default_value = "16GiB")]
    pub size: ByteSize,

    /// Number of times that half of the device is given back and taken again.
    #[arg(long, value_name = "N", default_value_t = 20)]
    pub cycles: usize,

    /// Number of programs that use the device while memory is given back and taken.
    #[arg(long, value_name = "N", default_value_t = 4, value_parser = clap::value_parser!(u16).range(1..=64))]
    pub users: u16,

    /// After the cycles, let another process allocate 90% of the card in steps of this size, and
    /// end.
    #[arg(long, value_name = "SIZE")]
    pub steps: Option<ByteSize>,
}

/// The store to measure, and the load on it.
#[derive(Debug, Clone, Args)]
pub struct BenchStoreOptions {
    /// The store to measure.
    #[arg(long, value_name = "URL", default_value = "vram:0")]
    pub store: StoreUrl,

    /// Number of runs of each row; a figure is the median.
    #[arg(long, value_name = "N", default_value_t = 3)]
    pub runs: usize,

    /// Threads of the deep rows [default: one a processor].
    #[arg(long, value_name = "N")]
    pub threads: Option<usize>,

    /// Operations that each thread of the deep rows has in flight.
    #[arg(long, value_name = "N", default_value_t = 64)]
    pub depth: usize,

    /// Only the rows whose id begins with this text; may be repeated.
    #[arg(long, value_name = "ID")]
    pub only: Vec<String>,

    /// A way to give memory back: the number of drain threads, and of pages that each reads at
    /// once. May be repeated, to compare.
    #[arg(long, value_name = "THREADSxPAGES", default_value = "4x32")]
    pub give_back: Vec<Effort>,

    /// Seconds for each pair of paths of the coherence rows.
    #[arg(long, value_name = "N", default_value_t = 2)]
    pub coherence_seconds: u64,

    /// A fiftieth of each measurement's time: a test of the benchmark, not of the store.
    #[arg(long)]
    pub short: bool,

    /// Only read and write 100,000 pages a second, for this number of seconds, as a load for
    /// another benchmark.
    #[arg(long, value_name = "SECONDS")]
    pub hold: Option<u64>,

    /// Only show what each path of the card costs, as measured when the store is opened.
    #[arg(long)]
    pub calibrate: bool,

    /// Only find out how many copies a call to the card's driver may name. Each shape of load runs
    /// in a process of its own, since drivers crash. Takes minutes; a driver that fails leaves a
    /// line in the kernel's log.
    #[arg(long)]
    pub batch_sweep: bool,

    /// Number of copies in one call to the driver, for --batch-sweep; may be repeated.
    #[arg(long, value_name = "N", default_values_t = [16, 64, 256, 1024, 2048], value_parser = clap::value_parser!(u32).range(1..=4096))]
    pub sweep_copies: Vec<u32>,

    /// Seconds for each shape of --batch-sweep.
    #[arg(long, value_name = "N", default_value_t = 4)]
    pub sweep_seconds: u64,
}

/// The length and number of the runs of the block benchmark.
#[derive(Debug, Clone, Args)]
pub struct BenchBlockOptions {
    /// The server to run beside Weir.
    #[arg(long, value_enum, default_value_t)]
    pub against: BlockControl,

    /// The device's size.
    #[arg(long, default_value = "256MiB")]
    pub size: ByteSize,

    /// Weir's store [default: host memory].
    #[arg(long, value_name = "URL")]
    pub store: Option<StoreUrl>,

    /// Seconds that a case runs on each server.
    #[arg(long, value_name = "N", default_value_t = 2, value_parser = clap::value_parser!(u16).range(1..))]
    pub seconds: u16,

    /// Number of runs; the figures are medians.
    #[arg(long, value_name = "N", default_value_t = 5, value_parser = clap::value_parser!(u16).range(1..))]
    pub runs: u16,

    /// Microseconds for which the spinning server spins.
    #[arg(long, value_name = "N", default_value_t = 50)]
    pub spin_us: u32,

    /// A case to run, such as qd1_read, or the first part of several names, such as qd1. May be
    /// repeated [default: all].
    #[arg(long, value_name = "CASE")]
    pub only: Vec<String>,
}

/// The store, the program beside it, and the length and number of runs.
#[derive(Debug, Clone, Args)]
pub struct BenchLongOptions {
    /// The device's size.
    #[arg(long, default_value = "256MiB")]
    pub size: ByteSize,

    /// Weir's store [default: host memory].
    #[arg(long, value_name = "URL")]
    pub store: Option<StoreUrl>,

    /// The program of nbd-vram, to run beside it.
    #[arg(long, value_name = "PROGRAM")]
    pub nbd_vram: Option<PathBuf>,

    /// Seconds that a case runs on each server.
    #[arg(long, value_name = "N", default_value_t = 5, value_parser = clap::value_parser!(u16).range(1..))]
    pub seconds: u16,

    /// Number of runs; the figures are medians.
    #[arg(long, value_name = "N", default_value_t = 3, value_parser = clap::value_parser!(u16).range(1..))]
    pub runs: u16,
}

/// A server to run beside Weir.
#[derive(Debug, Clone, Copy, Default, ValueEnum)]
pub enum BlockControl {
    /// nbdkit with its memory plugin.
    #[default]
    Nbdkit,
}

/// The disk, and the length and number of runs.
#[derive(Debug, Clone, Args)]
pub struct BenchDiskOptions {
    /// A directory on the file system to measure; two files are made there and removed.
    #[arg(value_name = "DIRECTORY", default_value = "/var/tmp")]
    pub directory: PathBuf,

    /// The size of each of the two files.
    #[arg(long, default_value = "1GiB")]
    pub size: ByteSize,

    /// Seconds that each case runs each way.
    #[arg(long, value_name = "N", default_value_t = 1, value_parser = clap::value_parser!(u16).range(1..))]
    pub seconds: u16,

    /// Number of runs; the figures are medians.
    #[arg(long, value_name = "N", default_value_t = 5, value_parser = clap::value_parser!(u16).range(1..))]
    pub runs: u16,
}

/// The arguments of nv_kthread_q's own benchmark (there 300000 600000 8 10).
#[derive(Debug, Clone, Args)]
pub struct BenchQueueOptions {
    /// Jobs in a round of one producer.
    #[arg(default_value_t = 3_000_000, value_parser = clap::value_parser!(u32).range(1..))]
    pub single: u32,

    /// Jobs in a round of several producers.
    #[arg(default_value_t = 6_000_000, value_parser = clap::value_parser!(u32).range(1..))]
    pub multi: u32,

    /// Producers in a round of several producers.
    #[arg(default_value_t = 8, value_parser = clap::value_parser!(u32).range(1..=1024))]
    pub producers: u32,

    /// Number of rounds; the figures are medians.
    #[arg(default_value_t = 50, value_parser = clap::value_parser!(u32).range(1..))]
    pub rounds: u32,
}

/// The connections, and the references that each holds.
#[derive(Debug, Clone, Args)]
pub struct BenchLeaseOptions {
    /// Connections; may be repeated, each is a row [default: 1, 1000, 10000].
    #[arg(long, value_name = "N", value_parser = clap::value_parser!(u32).range(1..=1_000_000))]
    pub connections: Vec<u32>,

    /// References that each connection holds.
    #[arg(long, value_name = "N", default_value_t = 64)]
    pub outstanding: u32,

    /// Bytes of the region that the references are in.
    #[arg(long, default_value = "2GiB")]
    pub region: ByteSize,

    /// Threads; may be repeated, each is a column [default: 1, 2].
    #[arg(long, value_name = "N", value_parser = clap::value_parser!(u32).range(1..=64))]
    pub threads: Vec<u32>,

    /// Number of forged, stale and repeated tokens to try.
    #[arg(long, value_name = "N", default_value_t = 1_000_000)]
    pub trials: u64,

    /// Number of flows of the end-to-end run over the share transport; 0 leaves the run out.
    #[arg(long, value_name = "N", default_value_t = 4)]
    pub flows: u32,

    /// Workers that serve the flows. The benchmark measures how busy they are.
    #[arg(long, value_name = "N", default_value_t = 4)]
    pub workers: u32,
}
