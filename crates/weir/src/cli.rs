//! The command line. Man pages and completions are made from these definitions, and the configuration file's keys
//! are the names of these flags.

use crate::address::Address;
use crate::backing::Backing;
use crate::compress::Algorithm;
use crate::on::{BatteryOptions, OffOptions, OnOptions, RestartOptions, StoreChoice, TopOptions};
use clap::{Args, Parser, Subcommand, ValueEnum};
use std::path::PathBuf;
use std::str::FromStr;
use weir_bench::store::Effort;
use weir_core::{ByteSize, PAGE_SIZE};
use weir_store::StoreUrl;

/// Lets memory overflow where you chose: into idle GPU memory, host memory or files.
#[derive(Debug, Parser)]
#[command(name = "weir", version, propagate_version = true, max_term_width = 100)]
#[command(after_help = "Exit codes: 0 done, 1 failed, 2 usage.")]
pub struct Cli {
    /// What to do.
    #[command(subcommand)]
    pub command: Command,
}

/// What the program can do.
#[derive(Debug, Subcommand)]
pub enum Command {
    /// Write, read and discard real pages through a real NBD connection for some seconds, and verify every one.
    Try(TryOptions),

    /// Make memory that lies idle into swap: a daemon, a block device and swapon, all of which weir off undoes.
    On(OnOptions),

    /// Bring every page back and undo what weir on did. What would not fit is said first, and nothing changed.
    Off(OffOptions),

    /// Replace the daemon under a device in use, as after an upgrade; no page is lost.
    Restart(RestartOptions),

    /// Keep pages in stores and serve them as a block device, in the foreground.
    Serve(ServeOptions),

    /// Turn off when the battery is low, and on again with mains: looks once and does what is due, for a timer or a udev rule.
    Battery(BatteryOptions),

    /// Watch a running daemon: rates, latencies, stores, chunks. q ends.
    Top(TopOptions),

    /// Ask a running daemon how it is.
    Status(StatusOptions),

    /// Give memory of the daemon's stores back to its owner, chunk by chunk; the device stays as large as it is, and in use.
    GiveBack(MemoryOptions),

    /// Take memory again that was given back, and bring pages back into it.
    Take(MemoryOptions),

    /// Connect the kernel's NBD client to a server, and print the device's name.
    Attach(AttachOptions),

    /// Let a device of the kernel's NBD client go; refused while something uses it.
    Detach(DetachOptions),

    /// Mount a RAM disk on a directory: a file system in GPU memory where there is any, else in host memory.
    Mount(MountOptions),

    /// Say what this machine offers, and what to do about what it lacks.
    Doctor(DoctorOptions),

    /// The process that drivers may crash or hold up, for `doctor` and `serve`.
    #[command(hide = true)]
    LookAtCards {
        /// Which.
        #[arg(long)]
        store: StoreUrl,
    },

    /// Measure, each figure beside its control.
    Bench(BenchOptions),

    /// Print completions for a shell.
    Completions {
        /// The shell that is to complete.
        shell: clap_complete::Shell,
    },

    /// Write the man pages into a directory.
    Man {
        /// Where to; it is made where it does not exist.
        directory: PathBuf,
    },
}

/// How long and how hard `try` tries.
#[derive(Debug, Clone, Args)]
pub struct TryOptions {
    /// Seconds of work, besides start and the final check.
    #[arg(long, value_name = "N", default_value_t = 10, value_parser = clap::value_parser!(u16).range(1..=3600))]
    pub seconds: u16,

    /// Memory to use [default: 256MiB, or what --store says].
    #[arg(long, value_parser = whole_pages)]
    pub size: Option<ByteSize>,

    /// The store: vram, host, vram:0, file:/path, ... [default: GPU memory if there is any, else
    /// host memory].
    #[arg(long, value_name = "URL")]
    pub store: Option<StoreChoice>,

    /// NBD connections to use at once.
    #[arg(long, value_name = "N", default_value_t = 4, value_parser = clap::value_parser!(u16).range(1..=64))]
    pub connections: u16,

    /// What the requests are drawn from, to repeat a run [default: another one each time].
    #[arg(long, value_name = "N")]
    pub seed: Option<u64>,
}

/// What the daemon serves, and how. The configuration file's keys are these flags' names.
#[derive(Debug, Clone, PartialEq, Default, Args)]
pub struct ServeOptions {
    /// Read these options from a TOML file instead of the command line.
    #[arg(long, value_name = "FILE", exclusive = true)]
    pub config: Option<PathBuf>,

    /// The device's size: 512MiB, 8G, ... [default: what all stores hold; with --backing what the stores hold or the backing, whichever is
    /// more].
    #[arg(long, value_parser = whole_pages)]
    pub size: Option<ByteSize>,

    /// Where pages are kept, the fastest first: vram:, vram:0?size=8GiB, host:8GiB, file:/path?size=64GiB,
    /// sim:seed=1,read_error=1e-4. May be repeated.
    #[arg(long, value_name = "URL", required_unless_present = "config")]
    pub store: Vec<StoreUrl>,

    /// A file or block device below the other stores, encrypted and with all its room taken at the start: pages go there when the
    /// stores are full or give their memory back. As large as the device, unless it says otherwise (PATH?size=64GiB). May be
    /// repeated.
    #[arg(long, value_name = "PATH")]
    pub backing: Vec<Backing>,

    /// Compress pages that are written together, where several of them then fit into the room of one: more pages stay in the first
    /// stores, and less moves when memory is given back. The device stays as large as it is.
    #[arg(long, value_name = "ALGORITHM", value_enum)]
    pub compress: Option<Algorithm>,

    /// Serve by NBD at unix:PATH or tcp:HOST:PORT. May be repeated.
    #[arg(long, value_name = "ADDRESS")]
    pub nbd: Vec<Address>,

    /// Serve as a file, by FUSE: mounted over FILE, which is made if it does not exist, or within it if it is a directory.
    /// A loop device makes a disk of it (losetup --direct-io=on --sector-size 4096).
    #[arg(long, value_name = "FILE")]
    pub fuse: Option<PathBuf>,

    /// Threads that serve FUSE requests; one waits, the others come when there is more to do.
    #[arg(long, value_name = "N", default_value_t = 4, value_parser = clap::value_parser!(u16).range(1..=64))]
    pub fuse_threads: u16,

    /// Let local programs use pages through shared memory, at this unix socket (mode 0600). With --swap they may only read.
    #[arg(long, value_name = "PATH")]
    pub share: Option<PathBuf>,

    /// Let them read pages where host stores keep them, if they ask for it: nothing is copied, and the whole store lies
    /// before them, read-only.
    #[arg(long, requires = "share")]
    pub share_in_place: bool,

    /// The export's name for NBD clients (the empty name means it too), and the file's in a FUSE directory.
    #[arg(long, value_name = "NAME", default_value = "weir", value_parser = name)]
    pub name: String,

    /// Serve as a block device of the kernel's ublk driver; `weir status` has its name, /dev/ublkbN. As root, Linux 6.5 or newer.
    #[arg(long)]
    pub ublk: bool,

    /// Queues of the ublk device, each with a thread and its memory [default: one a processor, 4 at most].
    #[arg(long, value_name = "N", value_parser = clap::value_parser!(u16).range(1..=256))]
    pub queues: Option<u16>,

    /// Requests of 128 KiB that each of these queues may have in flight.
    #[arg(long, value_name = "N", default_value_t = 64, value_parser = clap::value_parser!(u16).range(1..=1024))]
    pub depth: u16,

    /// Microseconds for which a thread looks for the next request before it sleeps. Costs a CPU for so long after
    /// each request, and saves the wake-up when requests come in bursts.
    #[arg(long, value_name = "N", default_value_t = 0, value_parser = clap::value_parser!(u32).range(..=1_000_000))]
    pub spin_us: u32,

    /// While requests come in bursts, keep the machine's processors out of deep sleep (/dev/cpu_dma_latency). Costs power then.
    #[arg(long)]
    pub cpu_latency: bool,

    /// Serve TCP under TLS, with server-cert.pem and server-key.pem of this directory; if it has a ca-cert.pem,
    /// clients must show a certificate that it has signed. Not for swap.
    #[arg(long, value_name = "DIRECTORY", conflicts_with = "insecure")]
    pub tls: Option<PathBuf>,

    /// Serve TCP without TLS; on the loopback interface only.
    #[arg(long)]
    pub insecure: bool,

    /// Connections that can be served at a time; each has a thread and its memory from the start.
    #[arg(long, value_name = "N", default_value_t = 16, value_parser = clap::value_parser!(u16).range(1..=1024))]
    pub connections: u16,

    /// The device is to carry swap: take every protection against waiting for oneself, or refuse to start.
    #[arg(long)]
    pub swap: bool,

    /// With --swap, start although the system denies PR_SET_IO_FLUSHER. Under memory pressure it may freeze.
    #[arg(long, requires = "swap")]
    pub unsafe_no_flusher: bool,

    /// Survive a crash: a second process, the keeper, holds the pages of host stores and starts the daemon again.
    #[arg(long)]
    pub keeper: bool,

    /// The socket that `weir status` asks [default: $XDG_RUNTIME_DIR/weir/control.sock or /run/weir/control.sock].
    #[arg(long, value_name = "PATH")]
    pub control: Option<PathBuf>,

    /// How much to say on standard error.
    #[arg(long, value_name = "LEVEL", value_enum, default_value_t)]
    pub log: LogLevel,
}

/// The size of a device: pages, and one at least.
fn whole_pages(text: &str) -> Result<ByteSize, String> {
    let size: ByteSize = text.parse().map_err(|error| format!("{error}"))?;
    if size.0 == 0 || !size.0.is_multiple_of(PAGE_SIZE as u64) {
        return Err("accepted: a multiple of 4KiB above 0, such as 8GiB".into());
    }
    Ok(size)
}

/// A name that a line can hold.
fn name(text: &str) -> Result<String, String> {
    if text.contains(char::is_control) {
        return Err("accepted: a name without control characters, such as a newline".into());
    }
    Ok(text.to_owned())
}

/// How much the daemon says.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, ValueEnum)]
pub enum LogLevel {
    /// What went wrong, on this side or a client's.
    Warn,
    /// And what happened: who connected, what was made and removed.
    #[default]
    Info,
}

/// Whom `status` asks, and how it answers.
#[derive(Debug, Clone, Args)]
pub struct StatusOptions {
    /// Print one JSON object ("schema": 1) instead of lines.
    #[arg(long)]
    pub json: bool,

    /// The daemon's control socket [default: as for weir serve].
    #[arg(long, value_name = "PATH")]
    pub control: Option<PathBuf>,
}

/// How much memory, and of which daemon.
#[derive(Debug, Clone, Args)]
pub struct MemoryOptions {
    /// How much: 512MiB, 4G, ..., or all. Rounded up to whole chunks (128 MiB, unless the store's URL says otherwise).
    #[arg(value_name = "SIZE|all", required_unless_present = "sleep")]
    pub amount: Option<Amount>,

    /// Around the sleep of the machine: give-back gives all there is, and take takes what that gave, no more than the cards' owners
    /// leave; what was away before stays so.
    #[arg(long, conflicts_with = "amount")]
    pub sleep: bool,

    /// The daemon's control socket [default: as for weir serve].
    #[arg(long, value_name = "PATH")]
    pub control: Option<PathBuf>,
}

/// An amount of memory.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Amount {
    /// All there is.
    All,
    /// So much.
    Size(ByteSize),
}

impl FromStr for Amount {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        match text.parse() {
            _ if text == "all" => Ok(Amount::All),
            Ok(ByteSize(0)) => Err("accepted: a size above 0 such as 4GiB, or all".into()),
            Ok(size) => Ok(Amount::Size(size)),
            Err(error) => Err(format!("{error}; or say all")),
        }
    }
}

/// Which server and which device.
#[derive(Debug, Clone, Args)]
pub struct AttachOptions {
    /// The server: unix:PATH or tcp:HOST:PORT.
    pub address: Address,

    /// The device to use [default: a free one].
    #[arg(long, value_name = "/dev/nbdN")]
    pub device: Option<PathBuf>,

    /// The export's name.
    #[arg(long, value_name = "NAME", default_value = "")]
    pub name: String,

    /// Connections, each a hardware queue of the device.
    #[arg(long, value_name = "N", default_value_t = 2, value_parser = clap::value_parser!(u16).range(1..=256))]
    pub connections: u16,

    /// Seconds that one request may take before its connection is given up.
    #[arg(long, value_name = "S", default_value_t = 5, value_parser = clap::value_parser!(u16).range(1..))]
    pub request_timeout: u16,

    /// Seconds that requests wait for a new connection when none is left, before they fail.
    #[arg(long, value_name = "S", default_value_t = 600, value_parser = clap::value_parser!(u16).range(1..))]
    pub reconnect_timeout: u16,

    /// Replace the dead connections of a device that is there. A daemon does so by itself for devices of which it
    /// knows.
    #[arg(long, requires = "device")]
    pub reconnect: bool,

    /// The daemon's control socket, where it is told of the device [default: the user's own daemon's, else the system's].
    #[arg(long, value_name = "PATH")]
    pub control: Option<PathBuf>,
}

/// Which device.
#[derive(Debug, Clone, Args)]
pub struct DetachOptions {
    /// The device, as `weir attach` printed it.
    #[arg(value_name = "/dev/nbdN")]
    pub device: PathBuf,

    /// The daemon's control socket, where it is told [default: the user's own daemon's, else the system's].
    #[arg(long, value_name = "PATH")]
    pub control: Option<PathBuf>,
}

/// Where a RAM disk is mounted, and what it is made of.
#[derive(Debug, Clone, Args)]
#[command(
    after_help = "Ends by fusermount3 -u DIR (or umount DIR); everything on it is gone then. Needs no root where fusermount3 is installed (package fuse3)."
)]
pub struct MountOptions {
    /// The directory to mount on.
    #[arg(value_name = "DIR")]
    pub directory: PathBuf,

    /// Room for the content of files [default: 1GiB, or what --store says].
    #[arg(long, value_parser = whole_pages)]
    pub size: Option<ByteSize>,

    /// The store of all files: vram, host, vram:0, host:8GiB, file:/path, ... [default: the first
    /// GPU's memory, else host memory].
    #[arg(long, value_name = "URL")]
    pub store: Option<StoreChoice>,

    /// Let other users in too, as far as the modes and owners of its files let them: otherwise the
    /// kernel lets in only the user who mounts it. For users other than root /etc/fuse.conf must say
    /// user_allow_other.
    #[arg(long)]
    pub allow_other: bool,

    /// Threads that serve; one waits, the others come when there is more to do.
    #[arg(long, value_name = "N", default_value_t = 4, value_parser = clap::value_parser!(u16).range(1..=64))]
    pub threads: u16,

    /// Stay in the foreground until it is unmounted.
    #[arg(long, short)]
    pub foreground: bool,

    /// Say on standard output when the disk is there.
    #[arg(long, hide = true, requires = "foreground")]
    pub announce: bool,
}

/// How `doctor` reports.
#[derive(Debug, Clone, Copy, Args)]
pub struct DoctorOptions {
    /// Print one JSON object ("schema": 1) instead of lines.
    #[arg(long)]
    pub json: bool,
}

/// What to measure, and where the figures go.
#[derive(Debug, Clone, Args)]
pub struct BenchOptions {
    /// Write the figures as one JSON object ("schema": 1).
    #[arg(long, value_name = "FILE", global = true)]
    pub json: Option<PathBuf>,

    /// Write a page of HTML with the table and a plot for each metric.
    #[arg(long, value_name = "FILE.html", global = true)]
    pub report: Option<PathBuf>,

    /// What to measure.
    #[command(subcommand)]
    pub bench: Bench,
}

/// What can be measured.
#[derive(Debug, Clone, Subcommand)]
pub enum Bench {
    /// The NBD server with a host store, asleep and spinning, beside nbdkit's memory plugin, driven by fio.
    Block(BenchBlockOptions),

    /// Requests of 1 MiB by one job and by four: a store, with and without a card's window, beside nbdkit, nbd-vram and a
    /// server that keeps nothing.
    Long(BenchLongOptions),

    /// The file store beside fio's own io_uring engine, on the same disk.
    Disk(BenchDiskOptions),

    /// What a work item costs from the thread that schedules it to the one that runs it, beside other queues.
    Queue(BenchQueueOptions),

    /// What a page reference costs that is handed out and comes back, beside the designs of the Linux kernel.
    Lease(BenchLeaseOptions),

    /// Pages used in place over the share transport, beside the same pages over NBD.
    Share {
        /// Rounds; the figures are medians.
        #[arg(long, value_name = "N", default_value_t = 5, value_parser = clap::value_parser!(u8).range(1..))]
        rounds: u8,
    },
    /// A store by itself and under a volume, beside the GPU's copy engine used call by call.
    Store(BenchStoreOptions),

    /// What a page costs that comes back from swap: FUSE and a loop device, beside a RAM loop, zram, a file and nbdfuse.
    Swap(BenchSwapOptions),

    /// Memory given back and taken again while programs use the device, and what they notice.
    GiveBack(BenchGiveBackOptions),

    /// The process that allocates the card, for `give-back`.
    #[command(hide = true)]
    Allocate {
        /// How much at a time.
        #[arg(long)]
        step: ByteSize,
    },

    /// The process that a driver may crash, for `store --batch-sweep`.
    #[command(hide = true)]
    BatchBurn {
        /// The card.
        #[arg(long)]
        store: StoreUrl,
        /// The load, as JSON.
        #[arg(long)]
        shape: weir_bench::store::batches::Shape,
        /// How long.
        #[arg(long)]
        seconds: u64,
    },

    /// The process that swaps, for `swap`.
    #[command(hide = true)]
    SwapTouch {
        /// Memory to touch.
        #[arg(long)]
        size: ByteSize,
        /// How long faults are timed.
        #[arg(long)]
        milliseconds: u64,
        /// The cgroup.procs to enter.
        #[arg(long)]
        entrance: PathBuf,
    },

    /// Kills a daemon under load: how long until the keeper's next one serves, and whether every page is what it was.
    Restart {
        /// Its store, with some MiB more than is written.
        #[arg(long, value_name = "URL", default_value = "host:1088MiB")]
        store: StoreUrl,
        /// Bytes that are written and compared.
        #[arg(long, default_value = "1GiB")]
        bytes: ByteSize,
        /// Kills.
        #[arg(long, value_name = "N", default_value_t = 3, value_parser = clap::value_parser!(u32).range(1..))]
        kills: u32,
    },

    /// Shows results that were saved; with --report or --plots, draws them.
    Show {
        /// The JSON files; with --json or --report, one.
        #[arg(required = true)]
        files: Vec<PathBuf>,
        /// Write a picture of each into this directory: FILE.svg, each figure that has a goal beside its control.
        #[arg(long, value_name = "DIRECTORY")]
        plots: Option<PathBuf>,
    },

    /// What compression costs a page and holds less, beside a volume without.
    Compress {
        /// Pages to write and read, in bytes.
        #[arg(long, default_value = "256MiB")]
        size: ByteSize,

        /// Times that each volume is filled and read.
        #[arg(long, value_name = "N", default_value_t = 5, value_parser = clap::value_parser!(u8).range(1..=100))]
        runs: u8,
    },

    /// What memory a volume takes besides the pages themselves.
    Memory {
        /// The volume's size.
        #[arg(long, default_value = "64GiB")]
        size: ByteSize,
    },
}

/// How much is swapped, and how long and how often it is measured.
#[derive(Debug, Clone, Args)]
pub struct BenchSwapOptions {
    /// Memory that a child process writes.
    #[arg(long, default_value = "256MiB")]
    pub size: ByteSize,

    /// Of which it may keep so much.
    #[arg(long, default_value = "64MiB")]
    pub limit: ByteSize,

    /// Another store of Weir's to measure, without a size: vram:0
    #[arg(long, value_name = "URL")]
    pub store: Option<StoreUrl>,

    /// Seconds for which faults are timed on each device, one after the other and then one each 20 ms.
    #[arg(long, value_name = "N", default_value_t = 3, value_parser = clap::value_parser!(u16).range(1..))]
    pub seconds: u16,

    /// How often; the figures are medians.
    #[arg(long, value_name = "N", default_value_t = 3, value_parser = clap::value_parser!(u16).range(1..))]
    pub runs: u16,

    /// Microseconds for which the spinning server spins: 20 is what `weir on` has it do by default.
    #[arg(long, value_name = "N", default_value_t = 20)]
    pub spin_us: u32,

    /// A device to measure beside the RAM loop: host, host-asleep, zram, file, nbdfuse, store; may be repeated [default: all].
    #[arg(long, value_name = "DEVICE")]
    pub only: Vec<String>,

    /// Values of vm.page-cluster to measure each device at: 0,3 compares a page a fault with the kernel's default.
    #[arg(long, value_name = "LIST", default_value = "0", value_delimiter = ',', value_parser = clap::value_parser!(u8).range(..=10))]
    pub page_cluster: Vec<u8>,
}

/// Which memory, how often, and beside whom.
#[derive(Debug, Clone, Args)]
pub struct BenchGiveBackOptions {
    /// The store whose memory goes and comes.
    #[arg(long, value_name = "URL", default_value = "vram:0")]
    pub store: StoreUrl,

    /// What is below it; it must hold the whole device [default: host memory].
    #[arg(long, value_name = "URL")]
    pub below: Option<StoreUrl>,

    /// The device's size; every page of it is in use.
    #[arg(long, default_value = "16GiB")]
    pub size: ByteSize,

    /// How often half of the device is given back and taken again.
    #[arg(long, value_name = "N", default_value_t = 20)]
    pub cycles: usize,

    /// Programs that use the device meanwhile.
    #[arg(long, value_name = "N", default_value_t = 4, value_parser = clap::value_parser!(u16).range(1..=64))]
    pub users: u16,

    /// Then let another process allocate 90% of the card in steps of this size, and end.
    #[arg(long, value_name = "SIZE")]
    pub steps: Option<ByteSize>,
}

/// Which store, how hard.
#[derive(Debug, Clone, Args)]
pub struct BenchStoreOptions {
    /// The store.
    #[arg(long, value_name = "URL", default_value = "vram:0")]
    pub store: StoreUrl,

    /// How often each row is measured; a row is the median.
    #[arg(long, value_name = "N", default_value_t = 3)]
    pub runs: usize,

    /// Threads of the deep rows [default: one a processor].
    #[arg(long, value_name = "N")]
    pub threads: Option<usize>,

    /// Operations that each of them has in flight.
    #[arg(long, value_name = "N", default_value_t = 64)]
    pub depth: usize,

    /// Only rows whose id begins like this; may be repeated.
    #[arg(long, value_name = "ID")]
    pub only: Vec<String>,

    /// How memory is given back, as drain threads and pages that each reads at once; may be repeated, to compare.
    #[arg(long, value_name = "THREADSxPAGES", default_value = "4x32")]
    pub give_back: Vec<Effort>,

    /// Seconds for each pair of paths of the coherence rows.
    #[arg(long, value_name = "N", default_value_t = 2)]
    pub coherence_seconds: u64,

    /// A fiftieth of each measurement's time: a test of the benchmark, not of the store.
    #[arg(long)]
    pub short: bool,

    /// Only read and write 100,000 pages a second, for so many seconds: something to run another job beside.
    #[arg(long, value_name = "SECONDS")]
    pub hold: Option<u64>,

    /// Only show what each path of the card costs, as measured when the store is opened.
    #[arg(long)]
    pub calibrate: bool,

    /// Only find out how many copies a call to the card's driver may name: each shape of load in a process of its own, since drivers
    /// crash. Takes minutes; a driver that fails leaves a line in the kernel's log.
    #[arg(long)]
    pub batch_sweep: bool,

    /// Copies of a call for --batch-sweep; may be repeated.
    #[arg(long, value_name = "N", default_values_t = [16, 64, 256, 1024, 2048], value_parser = clap::value_parser!(u32).range(1..=4096))]
    pub sweep_copies: Vec<u32>,

    /// Seconds for each shape of --batch-sweep.
    #[arg(long, value_name = "N", default_value_t = 4)]
    pub sweep_seconds: u64,
}

/// How long and how often each case of the block benchmark runs.
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

    /// How often; the figures are medians.
    #[arg(long, value_name = "N", default_value_t = 5, value_parser = clap::value_parser!(u16).range(1..))]
    pub runs: u16,

    /// Microseconds for which the spinning server spins.
    #[arg(long, value_name = "N", default_value_t = 50)]
    pub spin_us: u32,

    /// A case to run, such as qd1_read, or several by what they begin with (qd1); may be repeated [default: all].
    #[arg(long, value_name = "CASE")]
    pub only: Vec<String>,
}

/// Which store, beside which program, how long and how often.
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

    /// How often; the figures are medians.
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

/// Which disk, and how long and how often each case runs.
#[derive(Debug, Clone, Args)]
pub struct BenchDiskOptions {
    /// A directory on the file system to measure; two files are made there and removed.
    #[arg(value_name = "DIRECTORY", default_value = "/var/tmp")]
    pub directory: PathBuf,

    /// The size of each of the two files.
    #[arg(long, default_value = "1GiB")]
    pub size: ByteSize,

    /// Seconds that a case runs each way.
    #[arg(long, value_name = "N", default_value_t = 1, value_parser = clap::value_parser!(u16).range(1..))]
    pub seconds: u16,

    /// How often; the figures are medians.
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

    /// Producers in such a round.
    #[arg(default_value_t = 8, value_parser = clap::value_parser!(u32).range(1..=1024))]
    pub producers: u32,

    /// Rounds; the figures are medians.
    #[arg(default_value_t = 50, value_parser = clap::value_parser!(u32).range(1..))]
    pub rounds: u32,
}

/// How many connections hold how much.
#[derive(Debug, Clone, Args)]
pub struct BenchLeaseOptions {
    /// Connections; may be repeated, each is a row [default: 1, 1000, 10000].
    #[arg(long, value_name = "N", value_parser = clap::value_parser!(u32).range(1..=1_000_000))]
    pub connections: Vec<u32>,

    /// References that each connection holds.
    #[arg(long, value_name = "N", default_value_t = 64)]
    pub outstanding: u32,

    /// The region that they lie in.
    #[arg(long, default_value = "2GiB")]
    pub region: ByteSize,

    /// Threads; may be repeated, each is a column [default: 1, 2].
    #[arg(long, value_name = "N", value_parser = clap::value_parser!(u32).range(1..=64))]
    pub threads: Vec<u32>,

    /// Forged, stale and repeated tokens to try.
    #[arg(long, value_name = "N", default_value_t = 1_000_000)]
    pub trials: u64,

    /// Flows of the end-to-end run over the share transport; 0 leaves it out.
    #[arg(long, value_name = "N", default_value_t = 4)]
    pub flows: u32,

    /// Workers that serve the flows; how busy they are is what it measures.
    #[arg(long, value_name = "N", default_value_t = 4)]
    pub workers: u32,
}
