//! The command line. Man pages and completions are made from these definitions, and the
//! configuration file's keys are the names of these flags.

use crate::cache::CacheCommand;
use crate::compress::Algorithm;
use crate::front_ends::{NbdOptions, UblkOptions, name};
use crate::on::{BatteryOptions, OffOptions, OnOptions, RestartOptions, StoreChoice, TopOptions};
use crate::stack::StackCommand;
use clap::{Args, Parser, Subcommand, ValueEnum};
use std::ffi::OsString;
use std::path::PathBuf;
use std::str::FromStr;
use weir_core::{ByteSize, PAGE_SIZE};
use weir_daemon::{Address, Backing};
use weir_share::THREADS_MOST;
use weir_store::StoreUrl;

/// Lets memory overflow where you chose: into idle GPU memory, host memory or files.
#[derive(Debug, Parser)]
#[command(name = "weir", version, propagate_version = true, max_term_width = 100)]
#[command(after_help = "Exit codes: 0 done, 1 failed, 2 usage, 3 not so much memory or room.")]
pub struct Cli {
    /// The command.
    #[command(subcommand)]
    pub command: Command,
}

/// The program's commands.
#[derive(Debug, Subcommand)]
pub enum Command {
    /// Write, read and discard real pages through a real NBD connection for some seconds, and
    /// verify every one.
    Try(TryOptions),

    /// Turn idle memory into swap: start a daemon, make a block device, run swapon. weir off undoes
    /// all of it.
    On(OnOptions),

    /// Bring every page back, and undo what weir on did. If the pages do not fit into memory, it
    /// says so and changes nothing.
    Off(OffOptions),

    /// Replace the daemon under a device in use, as after an upgrade; no page is lost.
    Restart(RestartOptions),

    /// Keep pages in stores and serve them as a block device, in the foreground.
    Serve(ServeOptions),

    /// Turn weir off when the battery is low, and on again on mains power. It looks once and ends,
    /// for a timer or a udev rule.
    Battery(BatteryOptions),

    /// Watch a running daemon: rates, latencies, stores, chunks. q ends.
    Top(TopOptions),

    /// Show how a running daemon is: the memory gained, its health, stores and rates. Lists the
    /// programs that weir run bounds.
    Status(StatusOptions),

    /// Give memory of the daemon's stores back to its owner, chunk by chunk; the device stays as
    /// large as it is, and in use.
    GiveBack(MemoryOptions),

    /// Take memory again that was given back, and bring pages back into it.
    Take(MemoryOptions),

    /// Further volumes of a running daemon, beside its own: create, list, resize, remove.
    Volume {
        /// The subcommand.
        #[command(subcommand)]
        command: VolumeCommand,
    },

    /// A fast store as a cache in front of a disk: create, open, check, status, flush, mode,
    /// resize, detach.
    Cache {
        /// The subcommand.
        #[command(subcommand)]
        command: CacheCommand,
    },

    /// The kernel's own cache and stripe (bcache over md raid0) with a block device of Weir as the
    /// cache: create, status, destroy.
    Stack {
        /// The subcommand.
        #[command(subcommand)]
        command: StackCommand,
    },

    /// Run a program in less memory than it uses: pages above the limit go to stores. Experimental:
    /// docs/pager.md has its known defects. Needs root, or access to /dev/userfaultfd.
    Run(RunOptions),

    /// Run a virtual machine in less memory than its guest has: pages above the limit go to stores.
    /// For QEMU as it is. Experimental: docs/vm.md says what cannot be bounded. Needs root, or
    /// access to /dev/userfaultfd.
    Vm(VmOptions),

    /// Change how much of a bounded program may be resident, while it runs. Returns once no more
    /// than that is resident.
    Limit(LimitOptions),

    /// Move all resident memory of a bounded program out to its stores. What the program uses comes
    /// back.
    Evict(EvictOptions),

    /// Connect the kernel's NBD client to a server, and print the device's name.
    Attach(AttachOptions),

    /// Let a device of the kernel's NBD client go; refused while something uses it.
    Detach(DetachOptions),

    /// Mount a RAM disk on a directory: a file system in GPU memory where there is any, else in
    /// host memory.
    Mount(MountOptions),

    /// Say what this machine offers, and what to do about what it lacks.
    Doctor(DoctorOptions),

    /// Open cards in a process of its own, which drivers may crash or hold up; for doctor and
    /// serve.
    #[command(hide = true)]
    LookAtCards {
        /// The store whose cards to open.
        #[arg(long)]
        store: StoreUrl,
    },

    /// Measure parts of Weir, each figure beside a control.
    #[command(disable_help_flag = true, disable_version_flag = true)]
    Bench {
        /// The benchmark and its options: weir bench --help lists them.
        #[arg(trailing_var_arg = true, allow_hyphen_values = true)]
        arguments: Vec<OsString>,
    },

    /// Print completions for a shell.
    Completions {
        /// The shell that is to complete.
        shell: clap_complete::Shell,
    },

    /// Write the man pages into a directory.
    Man {
        /// The directory for the man pages, made if it does not exist.
        directory: PathBuf,
    },
}

/// The length and the load of a trial.
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

    /// The seed of the random requests, to repeat a run [default: another one each time].
    #[arg(long, value_name = "N")]
    pub seed: Option<u64>,
}

/// The flags of `weir serve`. The configuration file's keys are these flags' names.
#[derive(Debug, Clone, PartialEq, Args)]
pub struct ServeOptions {
    /// Read these options from a TOML file instead of the command line.
    #[arg(long, value_name = "FILE", exclusive = true)]
    pub config: Option<PathBuf>,

    /// The device's size: 512MiB, 8G, ... [default: what all stores hold; with --backing what the
    /// stores hold or the backing, whichever is more].
    #[arg(long, value_parser = whole_pages)]
    pub size: Option<ByteSize>,

    /// Begin without a volume. weir volume create makes volumes while the daemon runs, at most N.
    /// Each has an NBD export of its name, with --ublk a device, or with --fuse FILE the file
    /// FILE.NAME. Programs of --share name the volume.
    #[arg(long, value_name = "N", value_parser = clap::value_parser!(u16).range(1..=64))]
    pub pool: Option<u16>,

    /// Where pages are kept, the fastest first: vram:, vram:0?size=8GiB, host:8GiB,
    /// file:/path?size=64GiB, stripe:/dev/a,/dev/b, redis://HOST:PORT?size=8GiB,
    /// sim:seed=1,read_error=1e-4. May be repeated.
    #[arg(long, value_name = "URL", required_unless_present = "config")]
    pub store: Vec<StoreUrl>,

    /// A file or block device below the other stores, encrypted and with all its room taken at the
    /// start: pages go there when the stores are full or give their memory back. As large as the
    /// device, unless it says otherwise (PATH?size=64GiB). May be repeated.
    #[arg(long, value_name = "PATH")]
    pub backing: Vec<Backing>,

    /// Compress pages that are written together, if several of them then fit into the room of one.
    /// So more pages stay in the first stores, and fewer bytes move when memory is given back. The
    /// device stays as large as it is.
    #[arg(long, value_name = "ALGORITHM", value_enum)]
    pub compress: Option<Algorithm>,

    #[command(flatten)]
    pub nbd: NbdOptions,

    /// Serve as a file, by FUSE: mounted over FILE, which is made if it does not exist, or within
    /// it if it is a directory. A loop device makes a disk of it (losetup --direct-io=on
    /// --sector-size 4096).
    #[arg(long, value_name = "FILE")]
    pub fuse: Option<PathBuf>,

    /// Threads that serve FUSE requests; one waits, the others come when there is more to do.
    #[arg(long, value_name = "N", default_value_t = 4, value_parser = clap::value_parser!(u16).range(1..=64))]
    pub fuse_threads: u16,

    /// Let local programs use pages through shared memory, at this unix socket (mode 0600). With
    /// --swap they may only read.
    #[arg(long, value_name = "PATH")]
    pub share: Option<PathBuf>,

    /// Let the programs of --share read pages in the memory of host stores, without a copy. A
    /// program that asks for it can read the whole store.
    #[arg(long, requires = "share")]
    pub share_in_place: bool,

    /// Threads that serve the programs of --share, each at a socket of its own: PATH, PATH.1,
    /// PATH.2. A program may use several, to move pages faster.
    #[arg(long, value_name = "N", requires = "share", default_value_t = 1, value_parser = clap::value_parser!(u16).range(1..=i64::from(THREADS_MOST)))]
    pub share_threads: u16,

    /// The name of the export for NBD clients, and of the file in a FUSE directory. NBD clients may
    /// also use the empty name.
    #[arg(long, value_name = "NAME", default_value = "weir", value_parser = name)]
    pub name: String,

    #[command(flatten)]
    pub ublk: UblkOptions,

    /// Microseconds that a thread looks for the next request before it sleeps. Saves the wake-up
    /// when requests come in bursts, and keeps a processor busy for that time after each request.
    #[arg(long, value_name = "N", default_value_t = 0, value_parser = clap::value_parser!(u32).range(..=1_000_000))]
    pub spin_us: u32,

    /// While requests come in bursts, keep the machine's processors out of deep sleep
    /// (/dev/cpu_dma_latency). Costs power then.
    #[arg(long)]
    pub cpu_latency: bool,

    /// The device carries swap: take every protection against a daemon that waits for its own
    /// pages, or refuse to start.
    #[arg(long)]
    pub swap: bool,

    /// With --swap, start although the system denies PR_SET_IO_FLUSHER. The machine may then freeze
    /// when memory is short.
    #[arg(long, requires = "swap")]
    pub unsafe_no_flusher: bool,

    /// Survive a crash: a second process, the keeper, holds the pages of host stores and starts the
    /// daemon again.
    #[arg(long)]
    pub keeper: bool,

    /// Write to this file how far the start is, and why it failed if it did.
    #[arg(long, value_name = "PATH", hide = true)]
    pub start_report: Option<PathBuf>,

    /// The socket that `weir status` asks [default: $XDG_RUNTIME_DIR/weir/control.sock or
    /// /run/weir/control.sock].
    #[arg(long, value_name = "PATH")]
    pub control: Option<PathBuf>,

    /// Answer GET /metrics with OpenMetrics text, for Prometheus: unix:PATH (only its owner
    /// reads it), or tcp:127.0.0.1:PORT (every user of this machine reads it).
    #[arg(long, value_name = "ADDRESS")]
    pub metrics: Option<Address>,

    /// The socket of the pagers of bounded programs.
    #[arg(long, value_name = "PATH", hide = true)]
    pub programs: Option<PathBuf>,

    /// How much to say on standard error.
    #[arg(long, value_name = "LEVEL", value_enum, default_value_t)]
    pub log: LogLevel,
}

/// Parses the size of a device: whole pages, at least one.
fn whole_pages(text: &str) -> Result<ByteSize, String> {
    let size: ByteSize = text.parse().map_err(|error| format!("{error}"))?;
    if size.0 == 0 || !size.0.is_multiple_of(PAGE_SIZE as u64) {
        return Err("accepted: a multiple of 4KiB above 0, such as 8GiB".into());
    }
    Ok(size)
}

/// How much the daemon says.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, ValueEnum)]
pub enum LogLevel {
    /// Failures of the daemon and of its clients.
    Warn,
    /// Failures, and also events: clients that connect, devices that are made and removed.
    #[default]
    Info,
}

/// The daemon that `status` asks, and how its answer is printed.
#[derive(Debug, Clone, Args)]
pub struct StatusOptions {
    /// Print one JSON object ("schema": 1) instead of lines.
    #[arg(long)]
    pub json: bool,

    /// The daemon's control socket [default: as for weir serve].
    #[arg(long, value_name = "PATH")]
    pub control: Option<PathBuf>,
}

/// The amount of memory, and the daemon that holds it.
#[derive(Debug, Clone, Args)]
pub struct MemoryOptions {
    /// How much: 512MiB, 4G, ..., or all. Rounded up to whole chunks (128 MiB, unless the store's
    /// URL says otherwise).
    #[arg(value_name = "SIZE|all", required_unless_present = "sleep")]
    pub amount: Option<Amount>,

    /// For the sleep of the machine. give-back --sleep gives back all memory. take --sleep takes
    /// the same memory again, as far as other programs leave it. Memory that was given back before
    /// stays away.
    #[arg(long, conflicts_with = "amount")]
    pub sleep: bool,

    /// The control socket of the daemon or of the cache [default: as for weir serve, or else as for
    /// weir cache].
    #[arg(long, value_name = "PATH")]
    pub control: Option<PathBuf>,
}

/// The subcommands of `weir volume`.
#[derive(Debug, Clone, Subcommand)]
pub enum VolumeCommand {
    /// Make an empty volume in the room that the daemon's stores have beside its other volumes. NBD
    /// clients ask for it by its name.
    #[command(
        after_help = "The daemon's own volume takes all room unless weir serve --size leaves some. A daemon that dies and is started again by its keeper has every volume again."
    )]
    Create {
        /// The volume's name: letters, digits, dots, dashes and underscores.
        name: String,

        /// The volume's size: 512MiB, 4G [default: all the room that is left].
        #[arg(value_parser = whole_pages)]
        size: Option<ByteSize>,

        #[command(flatten)]
        control: Control,
    },

    /// List the volumes and their sizes, and the room for more.
    List {
        /// Print one JSON object ("schema": 1) instead of lines.
        #[arg(long)]
        json: bool,

        #[command(flatten)]
        control: Control,
    },

    /// Give a volume another size. Clients see the new size when they connect anew. The volume can
    /// become smaller only while no client has it; the pages behind its new end are discarded.
    Resize {
        /// The volume's name.
        name: String,

        /// The volume's new size.
        #[arg(value_parser = whole_pages)]
        size: ByteSize,

        #[command(flatten)]
        control: Control,
    },

    /// Remove a volume with all that it holds. Refused while a client has it.
    Remove {
        /// The volume's name.
        name: String,

        #[command(flatten)]
        control: Control,
    },
}

/// The daemon that a command asks.
#[derive(Debug, Clone, Args)]
pub struct Control {
    /// The daemon's control socket [default: as for weir serve].
    #[arg(long, value_name = "PATH")]
    control: Option<PathBuf>,
}

impl Control {
    /// The socket that was given, or the one of a daemon that is probably running.
    pub fn socket(&self) -> PathBuf {
        self.control.clone().unwrap_or_else(weir_daemon::control::find)
    }
}

/// An amount of memory.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Amount {
    /// All memory that the daemon can give back or take.
    All,
    /// A number of bytes.
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

/// The program to run, and its limit of memory.
#[derive(Debug, Clone, Args)]
#[command(
    after_help = "The limit holds for each process, and for its private anonymous memory (heap, malloc, mmap, stacks). Areas of less than 64 KiB, and what is \
there at the start, are not moved out, but count; at least a quarter of the limit is for the rest. Files and shared memory do not count. The exit code is the program's; if a signal ended it, 128 and the signal's number. It is 1 where the program was not started, and a line says so."
)]
pub struct RunOptions {
    #[command(flatten)]
    pub bound: BoundOptions,

    /// The program and its arguments.
    #[arg(required = true, trailing_var_arg = true)]
    pub program: Vec<OsString>,
}

/// The virtual machine to run, and its limit of memory.
#[derive(Debug, Clone, Args)]
#[command(
    after_help = "The limit holds for the guest's memory and QEMU's own heap together. It does not hold for memory that other processes or devices use: \
files, shared memory, huge pages from a pool, vfio. Such a guest is refused. weir limit and weir evict change the limit while the guest runs. \
The exit code is QEMU's; if a signal ended it, 128 and the signal's number. It is 1 where QEMU was not started, and a line says so."
)]
pub struct VmOptions {
    #[command(flatten)]
    pub bound: BoundOptions,

    /// QEMU and its arguments.
    #[arg(required = true, trailing_var_arg = true)]
    pub qemu: Vec<OsString>,
}

/// A limit of memory, and where pages beyond it go.
#[derive(Debug, Clone, Args)]
pub struct BoundOptions {
    /// Memory that may be resident: 32MiB or more.
    #[arg(long, value_name = "SIZE", value_parser = resident)]
    pub resident: ByteSize,

    /// The store of pages beyond the limit, as for weir serve. May be repeated [default: host
    /// memory, four times --resident, and for weir vm at least as much as the guest has].
    #[arg(long, value_name = "URL")]
    pub store: Vec<StoreUrl>,

    /// Answer GET /metrics until the program ends, as for weir serve.
    #[arg(long, value_name = "ADDRESS")]
    pub metrics: Option<Address>,

    /// Survive a crash of the daemon that has the pages, by a second process, as for weir serve
    /// [default: yes, unless a store's pages end with the daemon].
    #[arg(long, value_name = "yes|no", value_parser = yes_or_no)]
    pub keeper: Option<bool>,

    /// Microseconds that Weir's threads look for the next page fault before they sleep. Saves two
    /// wake-ups when page faults come in bursts. Keeps two processors busy for that time after each
    /// page fault, and two for each of --threads after a block of 2 MiB [default: 50 with two
    /// processors or more, else 0].
    #[arg(long, value_name = "N", value_parser = clap::value_parser!(u32).range(..=1_000_000))]
    pub spin_us: Option<u32>,

    /// Threads in the program, and as many in the daemon, that move blocks of 2 MiB together
    /// [default: a quarter of the processors, 1 at least; 8 from 16 processors on].
    #[arg(long, value_name = "N", value_parser = clap::value_parser!(u16).range(1..=i64::from(THREADS_MOST)))]
    pub threads: Option<u16>,
}

/// A bounded program, and its new limit.
#[derive(Debug, Clone, Args)]
#[command(
    after_help = "Exit code 1 where more stays resident after ten seconds, or the program does not answer; the limit holds all the same. \
It ends when the process runs another program."
)]
pub struct LimitOptions {
    /// The number of the bounded program's process; weir status lists it.
    pub pid: u32,

    /// Memory that may be resident: 32MiB or more.
    #[arg(value_name = "SIZE", value_parser = resident)]
    pub size: ByteSize,
}

/// A bounded program.
#[derive(Debug, Clone, Copy, Args)]
pub struct EvictOptions {
    /// The number of the bounded program's process; weir status lists it.
    pub pid: u32,
}

fn yes_or_no(text: &str) -> Result<bool, String> {
    match text {
        "yes" => Ok(true),
        "no" => Ok(false),
        _ => Err("accepted: yes, no".to_owned()),
    }
}

/// Parses the resident limit: at least as much as a pager can work with.
fn resident(text: &str) -> Result<ByteSize, String> {
    let size: ByteSize = text.parse().map_err(|error| format!("{error}"))?;
    let is_without_unit = text.bytes().all(|byte| byte.is_ascii_digit());
    match size.0 {
        bytes if bytes >= 32 << 20 => {}
        bytes if is_without_unit => {
            return Err(format!(
                "without a unit these are {bytes} bytes; accepted: 32MiB or more, such as 64MiB"
            ));
        }
        _ => return Err("accepted: 32MiB or more".into()),
    }
    Ok(size)
}

/// The server and the device to connect.
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

    /// Replace the dead connections of a device that is there. A daemon does so by itself for
    /// devices of which it knows.
    #[arg(long, requires = "device")]
    pub reconnect: bool,

    /// The control socket of the daemon that is told of the device [default: the user's own
    /// daemon's, else the system's].
    #[arg(long, value_name = "PATH")]
    pub control: Option<PathBuf>,
}

/// The device to disconnect.
#[derive(Debug, Clone, Args)]
pub struct DetachOptions {
    /// The device that `weir attach` printed.
    #[arg(value_name = "/dev/nbdN")]
    pub device: PathBuf,

    /// The control socket of the daemon that is told that the device is gone [default: the user's
    /// own daemon's, else the system's].
    #[arg(long, value_name = "PATH")]
    pub control: Option<PathBuf>,
}

/// The directory that a RAM disk is mounted on, and the store of its files.
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
    /// kernel lets in only the user who mounts it. For users other than root /etc/fuse.conf must
    /// say user_allow_other.
    #[arg(long)]
    pub allow_other: bool,

    /// Threads that serve; one waits, the others come when there is more to do.
    #[arg(long, value_name = "N", default_value_t = 4, value_parser = clap::value_parser!(u16).range(1..=64))]
    pub threads: u16,

    /// Stay in the foreground until it is unmounted.
    #[arg(long, short)]
    pub foreground: bool,

    /// Print a line on standard output once the disk is mounted.
    #[arg(long, hide = true, requires = "foreground")]
    pub announce: bool,
}

/// The form of `doctor`'s report.
#[derive(Debug, Clone, Copy, Args)]
pub struct DoctorOptions {
    /// Print one JSON object ("schema": 1) instead of lines.
    #[arg(long)]
    pub json: bool,
}

#[cfg(test)]
mod tests {
    use super::*;
    use weir_cli::failure::complaint;

    #[test]
    fn what_is_missing_is_shown_and_what_is_no_number_is_called_so() {
        let complaint = |arguments: &[&str]| complaint(&Cli::try_parse_from(arguments).expect_err("wrong"));
        let missing = complaint(&["weir", "give-back"]);
        assert!(missing.ends_with("usage: weir give-back <SIZE|all>"), "{missing}");
        let number = complaint(&["weir", "serve", "--store", "host:1MiB", "--connections", "many"]);
        assert!(number.ends_with("not a whole number"), "{number}");
        // A mistyped option is no program. What follows the program is the program's.
        for command in ["run", "vm"] {
            let typed = complaint(&["weir", command, "--residnet", "32MiB", "--", "true"]);
            assert!(typed.contains("'--residnet'") && typed.contains("'--resident'"), "{typed}");
            let given = ["weir", command, "--resident", "32MiB", "echo", "-n", "--store", "x", "--help"];
            assert!(Cli::try_parse_from(given).is_ok());
        }
    }

    #[test]
    fn a_login_in_the_address_of_a_store_is_refused_and_not_shown() {
        let url = "redis://bob:secret@127.0.0.1:6401?size=1GiB";
        for arguments in [
            &["weir", "run", "--resident", "64MiB", "--store", url, "--", "true"][..],
            &["weir", "serve", "--store", url, "--nbd", "unix:n.sock"],
            &["weir", "serve", url],
            &["weir", "mount", "--store", url, "disk"],
        ] {
            let said = complaint(&Cli::try_parse_from(arguments).expect_err("it is refused"));
            assert!(said.contains("redis://***@127.0.0.1:6401") && !said.contains("secret"), "{said}");
        }
    }

    #[test]
    fn the_help_of_serve_names_every_kind_of_store() {
        use clap::CommandFactory as _;
        let mut all = Cli::command();
        let help = all.find_subcommand_mut("serve").expect("a command").render_long_help().to_string();
        for kind in ["vram:", "host:", "file:", "stripe:", "redis:", "sim:"] {
            assert!(help.contains(kind), "{kind} is missing: {help}");
        }
    }
}
