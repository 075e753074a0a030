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
    /// The NBD server with a host store, asleep and spinning between requests, beside nbdkit's
    /// memory plugin. fio is the client.
    Block(BenchBlockOptions),

    /// Requests of 1 MiB by one job and by four, to a store, with and without a card's window.
    /// The controls are nbdkit, nbd-vram and a server that keeps nothing.
    Long(BenchLongOptions),

    /// The file store beside fio's own io_uring engine on the same disk.
    Disk(BenchDiskOptions),

    /// The cost of a work item from the thread that schedules it to the one that runs it, beside
    /// other queues.
    Queue(BenchQueueOptions),

    /// The cost of a page reference that is handed out and comes back, beside the designs of the
    /// Linux kernel.
    Lease(BenchLeaseOptions),

    /// Pages used in place over the share transport, beside the same pages over NBD.
    Share {
        /// Number of rounds; the figures are medians.
        #[arg(long, value_name = "N", default_value_t = 5, value_parser = clap::value_parser!(u8).range(1..))]
        rounds: u8,
    },
    /// A store by itself and under a volume, beside the GPU's copy engine with one call for each
    /// request.
    Store(BenchStoreOptions),

    /// The time of a page that comes back from swap: on a loop device over Weir's FUSE server,
    /// beside a RAM loop, zram, a file and nbdfuse.
    Swap(BenchSwapOptions),

    /// The cost for a program when it may keep a quarter of its memory in RAM: under weir run,
    /// beside swap, a bare handler and no limit.
    Fault(BenchFaultOptions),

    /// The child process of `fault`: it goes through its memory.
    #[command(hide = true)]
    FaultTouch {
        /// Bytes of memory to go through.
        #[arg(long)]
        size: ByteSize,
        /// Milliseconds for which single pages are touched.
        #[arg(long)]
        milliseconds: u64,
        /// The cgroup.procs file of the cgroup that the process enters.
        #[arg(long)]
        entrance: Option<PathBuf>,
        /// Bytes that a bare handler lets the child keep in RAM.
        #[arg(long, conflicts_with = "entrance")]
        bare: Option<usize>,
    },

    /// The speed of give-back and take while programs use the device, and what those programs
    /// notice.
    GiveBack(BenchGiveBackOptions),

    /// The child process of `give-back`: it allocates most of the card.
    #[command(hide = true)]
    Allocate {
        /// Bytes of one allocation on the card.
        #[arg(long)]
        step: ByteSize,
    },

    /// The child process of `store --batch-sweep`: a driver may crash it.
    #[command(hide = true)]
    BatchBurn {
        /// The card, as a store's URL.
        #[arg(long)]
        store: StoreUrl,
        /// The load to run, as JSON.
        #[arg(long)]
        shape: store::batches::Shape,
        /// Seconds for which the load runs.
        #[arg(long)]
        seconds: u64,
    },

    /// The child process of `swap`: its memory is swapped.
    #[command(hide = true)]
    SwapTouch {
        /// Bytes of memory to touch.
        #[arg(long)]
        size: ByteSize,
        /// Milliseconds for which page faults are timed.
        #[arg(long)]
        milliseconds: u64,
        /// The cgroup.procs file of the cgroup that the process enters.
        #[arg(long)]
        entrance: PathBuf,
    },

    /// The time until the keeper's next daemon serves after a kill under load, and whether every
    /// page is right.
    Restart {
        /// The daemon's store. It must be some MiB larger than --bytes.
        #[arg(long, value_name = "URL", default_value = "host:1088MiB")]
        store: StoreUrl,
        /// Bytes of the pages that are written, and compared after each kill.
        #[arg(long, default_value = "1GiB")]
        bytes: ByteSize,
        /// Number of times that the daemon is killed.
        #[arg(long, value_name = "N", default_value_t = 3, value_parser = clap::value_parser!(u32).range(1..))]
        kills: u32,
    },

    /// Shows saved results as a table. With --report or --plots, draws them.
    Show {
        /// The saved JSON files. With --json or --report there may be only one.
        #[arg(required = true)]
        files: Vec<PathBuf>,
        /// For each file, write a picture into this directory as FILE.svg: each figure that has a
        /// goal, beside its control.
        #[arg(long, value_name = "DIRECTORY")]
        plots: Option<PathBuf>,
    },

    /// The time that compression costs a page, and the room that it saves, beside a volume without
    /// compression.
    Compress {
        /// Bytes of the pages to write and read.
        #[arg(long, default_value = "256MiB")]
        size: ByteSize,

        /// Number of times that each volume is filled and read.
        #[arg(long, value_name = "N", default_value_t = 5, value_parser = clap::value_parser!(u8).range(1..=100))]
        runs: u8,
    },

    /// Print the script by which a shell completes arguments.
    #[command(hide = true)]
    Completions {
        /// The shell that is to complete arguments.
        shell: clap_complete::Shell,
    },

    /// Write the man pages into a directory.
    #[command(hide = true)]
    Man {
        /// The directory for the man pages, made if it is not there.
        directory: PathBuf,
    },

    /// Hit rates of the cache's policy on traces of pages, beside LRU and OPT with a cache of the
    /// same size.
    Policy {
        /// A text file with a page number in each line [default: made traces: Zipf, uniform, scans
        /// through a hot set].
        #[arg(long, value_name = "FILE")]
        trace: Option<PathBuf>,

        /// Size of the cache, in per cent of the trace's pages. May be repeated.
        #[arg(long, value_name = "PERCENT", default_values_t = [5, 10, 25, 50], value_parser = clap::value_parser!(u8).range(1..=100))]
        room: Vec<u8>,
    },

    /// Random 4 KiB requests on simulated disks: directly, through a cache, and through a cache
    /// over a log.
    Cache {
        /// Size of all simulated disks together. They take this much memory, and the cache takes a
        /// quarter as much in addition.
        #[arg(long, default_value = "8GiB")]
        size: ByteSize,

        /// Number of simulated disks.
        #[arg(long, value_name = "N", default_value_t = 4, value_parser = clap::value_parser!(u32).range(1..=64))]
        members: u32,

        /// Number of operations a second that each disk can do.
        #[arg(long, value_name = "N", default_value_t = 5000, value_parser = clap::value_parser!(u64).range(1..=1_000_000_000))]
        iops: u64,

        /// Number of bytes a second that each disk can move.
        #[arg(long, value_name = "SIZE", default_value = "400000000")]
        bandwidth: ByteSize,

        /// The card whose memory is the cache, without a size: vram:0?chunk=1MiB. Whole chunks are
        /// taken, so small ones come closest to a quarter [default: host memory].
        #[arg(long, value_name = "URL")]
        store: Option<StoreUrl>,

        /// Seconds for which each contender is measured.
        #[arg(long, value_name = "SECONDS", default_value_t = 10)]
        time: u64,

        /// Number of runs; a figure is the median.
        #[arg(long, value_name = "N", default_value_t = 3, value_parser = clap::value_parser!(u16).range(1..))]
        runs: u16,
    },

    /// The memory that a volume takes besides the pages themselves.
    Memory {
        /// The size of the volume.
        #[arg(long, default_value = "64GiB")]
        size: ByteSize,
    },
}

/// The memory to swap, and the length of the measurement.
#[derive(Debug, Clone, Args)]
pub struct BenchSwapOptions {
    /// Bytes of memory that a child process writes.
    #[arg(long, default_value = "256MiB")]
    pub size: ByteSize,

    /// Bytes of the child process that may stay in RAM.
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

    /// Microseconds for which the spinning server spins before it sleeps: 20 is the default of
    /// `weir on`.
    #[arg(long, value_name = "N", default_value_t = 20)]
    pub spin_us: u32,

    /// A device to measure beside the loop device over RAM: host, host-asleep, zram, file, nbdfuse,
    /// store; may be repeated [default: all].
    #[arg(long, value_name = "DEVICE")]
    pub only: Vec<String>,

    /// Values of vm.page-cluster at which each device is measured: 0,3 compares one page for each
    /// page fault with the kernel's default.
    #[arg(long, value_name = "LIST", default_value = "0", value_delimiter = ',', value_parser = clap::value_parser!(u8).range(..=10))]
    pub page_cluster: Vec<u8>,
}

/// The child's memory, and its limit.
#[derive(Debug, Clone, Args)]
pub struct BenchFaultOptions {
    /// Bytes of memory that a child process goes through: a power of two.
    #[arg(long, default_value = "256MiB", value_parser = power_of_two)]
    pub size: ByteSize,

    /// Bytes of the child process that may stay in RAM.
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

    /// A way to keep the limit, to measure beside no limit: run, run-asleep, run-store,
    /// run-store-asleep, bare, zram, ram-loop, host; may be repeated [default: all].
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

    /// The size of the block device; every page of it is in use.
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

    /// Number of threads in the deep rows [default: one a processor].
    #[arg(long, value_name = "N")]
    pub threads: Option<usize>,

    /// Number of operations that each thread of the deep rows has in flight.
    #[arg(long, value_name = "N", default_value_t = 64)]
    pub depth: usize,

    /// Only the rows whose id begins with this text; may be repeated.
    #[arg(long, value_name = "ID")]
    pub only: Vec<String>,

    /// The effort of a give-back: the number of threads that read chunks, and the number of pages
    /// that each reads at once. May be repeated, to compare.
    #[arg(long, value_name = "THREADSxPAGES", default_value = "4x32")]
    pub give_back: Vec<Effort>,

    /// Seconds for which the coherence rows check each pair of paths.
    #[arg(long, value_name = "N", default_value_t = 2)]
    pub coherence_seconds: u64,

    /// Measure for a fiftieth of the time: this tests the benchmark, not the store.
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

    /// Seconds for which --batch-sweep runs each shape of load.
    #[arg(long, value_name = "N", default_value_t = 4)]
    pub sweep_seconds: u64,
}

/// The length and number of the runs of the block benchmark.
#[derive(Debug, Clone, Args)]
pub struct BenchBlockOptions {
    /// The server to run beside Weir.
    #[arg(long, value_enum, default_value_t)]
    pub against: BlockControl,

    /// The size of the block device.
    #[arg(long, default_value = "256MiB")]
    pub size: ByteSize,

    /// Weir's store [default: host memory].
    #[arg(long, value_name = "URL")]
    pub store: Option<StoreUrl>,

    /// Seconds for which a case runs on each server.
    #[arg(long, value_name = "N", default_value_t = 2, value_parser = clap::value_parser!(u16).range(1..))]
    pub seconds: u16,

    /// Number of runs; the figures are medians.
    #[arg(long, value_name = "N", default_value_t = 5, value_parser = clap::value_parser!(u16).range(1..))]
    pub runs: u16,

    /// Microseconds for which the spinning server spins before it sleeps.
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
    /// The size of the block device.
    #[arg(long, default_value = "256MiB")]
    pub size: ByteSize,

    /// Weir's store [default: host memory].
    #[arg(long, value_name = "URL")]
    pub store: Option<StoreUrl>,

    /// The path of nbd-vram's program, to run it beside Weir.
    #[arg(long, value_name = "PROGRAM")]
    pub nbd_vram: Option<PathBuf>,

    /// Seconds for which a case runs on each server.
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

    /// Seconds for which each case runs on Weir with encryption, on Weir without, and on fio.
    #[arg(long, value_name = "N", default_value_t = 1, value_parser = clap::value_parser!(u16).range(1..))]
    pub seconds: u16,

    /// Number of runs; the figures are medians.
    #[arg(long, value_name = "N", default_value_t = 5, value_parser = clap::value_parser!(u16).range(1..))]
    pub runs: u16,
}

/// The arguments of nv_kthread_q's own benchmark (there 300000 600000 8 10).
#[derive(Debug, Clone, Args)]
pub struct BenchQueueOptions {
    /// Number of jobs in a round with one producer.
    #[arg(default_value_t = 3_000_000, value_parser = clap::value_parser!(u32).range(1..))]
    pub single: u32,

    /// Number of jobs in a round with several producers.
    #[arg(default_value_t = 6_000_000, value_parser = clap::value_parser!(u32).range(1..))]
    pub multi: u32,

    /// Number of producers in a round with several producers.
    #[arg(default_value_t = 8, value_parser = clap::value_parser!(u32).range(1..=1024))]
    pub producers: u32,

    /// Number of rounds; the figures are medians.
    #[arg(default_value_t = 50, value_parser = clap::value_parser!(u32).range(1..))]
    pub rounds: u32,
}

/// The connections, and the references that each holds.
#[derive(Debug, Clone, Args)]
pub struct BenchLeaseOptions {
    /// Number of connections; may be repeated, each is a row [default: 1, 1000, 10000].
    #[arg(long, value_name = "N", value_parser = clap::value_parser!(u32).range(1..=1_000_000))]
    pub connections: Vec<u32>,

    /// Number of references that each connection holds.
    #[arg(long, value_name = "N", default_value_t = 64)]
    pub outstanding: u32,

    /// Bytes of the memory region whose pages the connections reference.
    #[arg(long, default_value = "2GiB")]
    pub region: ByteSize,

    /// Number of threads; may be repeated, each is a column [default: 1, 2].
    #[arg(long, value_name = "N", value_parser = clap::value_parser!(u32).range(1..=64))]
    pub threads: Vec<u32>,

    /// Number of forged, stale and repeated tokens to try.
    #[arg(long, value_name = "N", default_value_t = 1_000_000)]
    pub trials: u64,

    /// Number of flows of the end-to-end run over the share transport; 0 leaves the run out.
    #[arg(long, value_name = "N", default_value_t = 4)]
    pub flows: u32,

    /// Number of workers that serve the flows. The benchmark measures how busy they are.
    #[arg(long, value_name = "N", default_value_t = 4)]
    pub workers: u32,
}
