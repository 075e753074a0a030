//! The command line of `weir cache`.

use super::home::HomeUrl;
use crate::front_ends::{NbdOptions, UblkOptions, name};
use clap::{Args, Subcommand};
use std::path::PathBuf;
use std::str::FromStr;
use weir_cache::Mode;
use weir_core::ByteSize;
use weir_daemon::control::default_directory;
use weir_store::StoreUrl;

/// The subcommands of `weir cache`.
#[derive(Debug, Subcommand)]
pub enum CacheCommand {
    /// Put a fast store in front of a disk or file, and serve both as one device by NBD, ublk or
    /// FUSE, in the foreground.
    #[command(
        after_help = "Page n of the device is page n of the home: once the cache is detached, other programs can use the home as it is. Make a disk of an NBD export by weir attach, and of a file by losetup --direct-io=on --sector-size 4096 --find --show FILE. weir cache detach ends it."
    )]
    Create(Box<CreateOptions>),

    /// Serve a durable log again that create --durable has made, whether its daemon ended in good
    /// order or not.
    Open(Box<CacheOptions>),

    /// Verify a durable log that nobody uses: its own records, and each page by its checksum.
    /// Changes nothing. The exit code is 0 if nothing is wrong, and 1 otherwise.
    Check {
        /// The log's disks, in the order in which the log was made of them.
        #[arg(value_name = "log:PATH,...")]
        home: HomeUrl,

        /// Print one JSON object ("schema": 1) instead of lines.
        #[arg(long)]
        json: bool,
    },

    /// Show how the cache is: hit rates, dirty bytes, sizes of writes to the home.
    Status {
        /// Print one JSON object ("schema": 1) instead of lines.
        #[arg(long)]
        json: bool,

        #[command(flatten)]
        control: Control,
    },

    /// Write all dirty pages home now, and have the home flush.
    Flush {
        #[command(flatten)]
        control: Control,
    },

    /// Change where writes go from now on: write-back, write-through, write-around.
    Mode {
        /// The mode to change to.
        mode: Mode,

        #[command(flatten)]
        control: Control,
    },

    /// Change how much of its store the cache uses, or make the device as large as its home is now,
    /// while both are in use.
    #[command(
        after_help = "A smaller size takes dirty pages home first. Ctrl-C ends it: the cache keeps the size that it has then, and loses nothing. Memory that weir give-back gave back stays away. With --home, NBD clients see the new size once they connect again, and a loop device after losetup -c."
    )]
    Resize {
        /// Bytes of its store that the cache uses from now on, or all. Rounded up to whole chunks.
        #[arg(value_name = "SIZE|all", required_unless_present = "home")]
        size: Option<StoreSize>,

        /// Make the device as large as its home is now: a file or disk that has grown.
        #[arg(long, conflicts_with = "size")]
        home: bool,

        #[command(flatten)]
        control: Control,
    },

    /// Record which pages requests read and write from now on, for weir bench policy --trace FILE.
    /// Ends after so many requests, after so many seconds, or at Ctrl-C.
    Trace(TraceOptions),

    /// Take the device away, write all dirty pages home, and end. Refused while something uses the
    /// device.
    Detach {
        #[command(flatten)]
        control: Control,
    },
}

/// How much of its store a cache uses.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct StoreSize(pub Option<u64>);

impl FromStr for StoreSize {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        match text.parse() {
            _ if text == "all" => Ok(StoreSize(None)),
            Ok(ByteSize(bytes)) => Ok(StoreSize(Some(bytes))),
            Err(error) => Err(format!("{error}; or say all")),
        }
    }
}

/// A trace to be recorded.
#[derive(Debug, Clone, Args)]
pub struct TraceOptions {
    /// The file to make: a page number a line, of at most 11 bytes.
    pub file: PathBuf,

    /// End after this many requests.
    #[arg(long, value_name = "N", default_value_t = 10_000_000, value_parser = clap::value_parser!(u64).range(1..=1_000_000_000))]
    pub requests: u64,

    /// End after this many seconds.
    #[arg(long, value_name = "N")]
    pub seconds: Option<u32>,

    #[command(flatten)]
    pub control: Control,
}

/// The control socket of a cache for which no other is named.
pub fn default_socket() -> PathBuf {
    default_directory().join("cache.sock")
}

/// The cache that a subcommand asks.
#[derive(Debug, Clone, Args)]
pub struct Control {
    /// The cache's control socket [default: $XDG_RUNTIME_DIR/weir/cache.sock or
    /// /run/weir/cache.sock].
    #[arg(long = "control", value_name = "PATH")]
    path: Option<PathBuf>,
}

impl Control {
    /// The control socket's path.
    pub fn path(&self) -> PathBuf {
        self.path.clone().unwrap_or_else(default_socket)
    }
}

/// The options of a new cache.
#[derive(Debug, Clone, Args)]
pub struct CreateOptions {
    #[command(flatten)]
    pub cache: CacheOptions,

    /// Erase the marks of the home's content (file system, partition table, RAID, LVM, swap). PATH
    /// is the path that --home names. For a log of several disks, repeat the option for each.
    #[arg(long, value_name = "PATH", conflicts_with = "keep_content")]
    pub wipe: Vec<PathBuf>,

    /// Serve the home's present content, for instance a file system that an earlier cache served.
    #[arg(long)]
    pub keep_content: bool,

    /// Make a log that outlives the cache: what was flushed is there after a power cut. Its pages
    /// are not encrypted, so the home says ?encrypt=off.
    #[arg(long)]
    pub durable: bool,
}

/// The home, the store and the settings of a cache.
#[derive(Debug, Clone, Args)]
pub struct CacheOptions {
    /// The disk or file behind the cache, of whole pages of 4KiB. Or log:PATH,PATH,...[?size=SIZE]:
    /// disks or files that take pages as long sequential writes. What they hold is lost. Unless the
    /// log is durable, nothing on them outlives the cache. No other program may use the home.
    #[arg(long, value_name = "PATH|log:PATH,...")]
    pub home: HomeUrl,

    /// Where cached pages are kept: vram:0?size=8GiB, host:8GiB, file:/path?size=64GiB, ...
    #[arg(long, value_name = "URL")]
    pub store: StoreUrl,

    #[command(flatten)]
    pub nbd: NbdOptions,

    #[command(flatten)]
    pub ublk: UblkOptions,

    /// Serve the pages as this file. Makes FILE first if it does not exist. If FILE is a directory,
    /// the served file appears within it.
    #[arg(long, value_name = "FILE")]
    pub fuse: Option<PathBuf>,

    /// Threads that serve FUSE requests; one waits, the others come when there is more to do.
    #[arg(long, alias = "threads", value_name = "N", default_value_t = 4, value_parser = clap::value_parser!(u16).range(1..=64))]
    pub fuse_threads: u16,

    /// The name of the export for NBD clients, and of the file in a FUSE directory. NBD clients may
    /// also use the empty name.
    #[arg(long, value_name = "NAME", default_value = "weir", value_parser = name)]
    pub name: String,

    /// Where writes go: write-back, write-through, write-around.
    #[arg(long, value_name = "MODE", default_value_t = Mode::WriteBack)]
    pub mode: Mode,

    /// A stream of more than this many bytes in a row goes past the cache; 0: never.
    #[arg(long, value_name = "SIZE", default_value = "4MiB")]
    pub stream: ByteSize,

    /// Per cent of the cache that may be dirty before pages are written home; then as many as fill
    /// a tenth of the cache are written [default: 50; 70 before a log that is not durable].
    #[arg(long, value_name = "N", value_parser = clap::value_parser!(u8).range(0..=90))]
    pub dirty: Option<u8>,

    #[command(flatten)]
    pub control: Control,
}
