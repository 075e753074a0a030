//! The command line of `weir stack`.

use clap::{Args, Subcommand};
use std::path::PathBuf;
use weir_cache::Mode;
use weir_core::ByteSize;

/// The directory of the journal.
const DIRECTORY: &str = "/run/weir-stack";

/// The subcommands of `weir stack`.
#[derive(Debug, Subcommand)]
pub enum StackCommand {
    /// Stripe disks (md raid0), and put a block device of Weir in front of them as their cache
    /// (bcache). What the disks held is lost.
    #[command(
        after_help = "Needs the programs mdadm and make-bcache (packages mdadm, bcache-tools), and root. Prints the device to use. weir stack destroy brings all pages home and ends it: run it before the daemon of the cache ends, and before the machine goes down."
    )]
    Create(CreateOptions),

    /// Show how the stack is: dirty bytes, hit rates, its devices and settings.
    Status {
        /// Print one JSON object ("schema": 1) instead of lines.
        #[arg(long)]
        json: bool,

        #[command(flatten)]
        runtime: Runtime,
    },

    /// Write all that only the cache has to the disks, then undo what create did. Refused while
    /// something uses the device. The disks keep their content.
    Destroy(DestroyOptions),
}

/// The stack that a subcommand is about.
#[derive(Debug, Clone, Args)]
pub struct Runtime {
    /// The directory of the journal, which says what to undo. Another one is for another stack.
    #[arg(long = "runtime", value_name = "DIRECTORY", default_value = DIRECTORY)]
    pub path: PathBuf,
}

/// The devices and settings of a new stack.
#[derive(Debug, Clone, Args)]
pub struct CreateOptions {
    /// The disks or partitions for the stripe; one alone is used without a stripe.
    #[arg(value_name = "HOME", required = true)]
    pub homes: Vec<PathBuf>,

    /// The block device of the cache: /dev/nbdN that weir attach printed, or /dev/ublkbN of weir
    /// serve --ublk.
    #[arg(long, value_name = "DEVICE")]
    pub cache: PathBuf,

    /// Where writes go: write-through, write-back, write-around. With write-back, the loss of the
    /// cache loses written pages, flushed ones too.
    #[arg(long, value_name = "MODE", default_value_t = Mode::WriteThrough)]
    pub mode: Mode,

    /// A stream of more than this many bytes in a row goes past the cache; 0: never
    /// (sequential_cutoff).
    #[arg(long, value_name = "SIZE", default_value = "4MiB")]
    pub stream: ByteSize,

    /// Per cent of the cache that may be dirty before pages are written home faster than slowly
    /// (writeback_percent).
    #[arg(long, value_name = "N", default_value_t = 40, value_parser = clap::value_parser!(u8).range(1..=40))]
    pub dirty: u8,

    /// Erase the marks of this device's content (file system, partition table, RAID, LVM, swap).
    /// Repeat the option for each device that carries some.
    #[arg(long, value_name = "DEVICE")]
    pub wipe: Vec<PathBuf>,

    #[command(flatten)]
    pub runtime: Runtime,
}

/// How a stack ends.
#[derive(Debug, Clone, Args)]
pub struct DestroyOptions {
    /// Also erase the marks that create made on the disks. Nothing finds their content then.
    #[arg(long)]
    pub wipe: bool,

    /// End the stack although pages that only its dead cache had are lost.
    #[arg(long)]
    pub lose_dirty: bool,

    #[command(flatten)]
    pub runtime: Runtime,
}
