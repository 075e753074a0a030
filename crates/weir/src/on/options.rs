//! The command lines of `weir on`, `off`, `restart` and `top`.

use super::policy::Policy;
use crate::compress::Algorithm;
use clap::{Args, ValueEnum};
use std::fmt;
use std::io;
use std::path::{Path, PathBuf};
use std::str::FromStr;
use weir_core::ByteSize;
use weir_daemon::{Address, Backing};
use weir_store::vram::Target;
use weir_store::{StoreUrl, UrlError, VramUrl};

/// The directory in which `weir on` keeps its files.
pub use weir_daemon::control::SYSTEM as DIRECTORY;

/// The options of the device. Weir chooses and prints a value that is not given.
#[derive(Debug, Clone, Args)]
pub struct OnOptions {
    /// The device's size [default: for vram what the cards have, less 1GiB each, or 3GiB with a
    /// display].
    #[arg(long)]
    pub size: Option<ByteSize>,

    /// The front end that makes the block device [default: ublk if it works on this machine, else
    /// nbd].
    #[arg(long, value_enum, default_value_t)]
    pub front: FrontChoice,

    /// Where pages are kept: vram (every GPU), host, or a store's URL such as vram:0.
    #[arg(long, value_name = "vram|host|URL", default_value = "vram")]
    pub store: StoreChoice,

    /// A file or block device below the store, as large as the device, and encrypted. Pages go
    /// there when GPU memory is given back. auto: /var/lib/weir/backing, if the store is GPU memory
    /// and the disk has twice that room free. none: no backing. Or a path, as weir serve takes it.
    /// May be repeated.
    #[arg(long, value_name = "auto|none|PATH", default_value = "auto")]
    pub backing: Vec<BackingChoice>,

    /// Compress pages, as weir serve does: more of them stay in the store, and fewer bytes move to
    /// the backing.
    #[arg(long, value_name = "ALGORITHM", value_enum)]
    pub compress: Option<Algorithm>,

    /// Number of equal devices, of one daemon. weir give-back turns off as many as are needed, and
    /// weir take turns them on again.
    #[arg(long, value_name = "N", default_value_t = 1, value_parser = clap::value_parser!(u8).range(1..=16))]
    pub parts: u8,

    /// Priority among swap devices, 0 to 32767 [default: after zram, before disks].
    #[arg(long, value_name = "N", value_parser = clap::value_parser!(u16).range(0..=32767))]
    pub priority: Option<u16>,

    /// Have the daemon answer Prometheus, as weir serve does: unix:PATH or tcp:127.0.0.1:PORT.
    #[arg(long, value_name = "ADDRESS")]
    pub metrics: Option<Address>,

    /// How the daemon trades power for latency.
    #[arg(long, value_enum, default_value_t)]
    pub policy: Policy,

    /// Go on although the system denies PR_SET_IO_FLUSHER. Under memory pressure the machine may
    /// freeze.
    #[arg(long)]
    pub unsafe_no_flusher: bool,

    /// Go on although hibernation could write its image to the device, and would lose pages in GPU
    /// memory in any case. Do not hibernate then, or run weir off before.
    #[arg(long)]
    pub allow_hibernation: bool,

    /// Turn a device on again as this note says. weir off --remember wrote the note. If there is no
    /// note, do nothing.
    #[arg(long, value_name = "FILE", hide = true, exclusive = true)]
    pub again: Option<PathBuf>,

    /// The directory for state, sockets and log.
    #[arg(long, value_name = "DIRECTORY", default_value = DIRECTORY, value_parser = runtime)]
    pub runtime: PathBuf,
}

impl OnOptions {
    /// Makes every path absolute, for a daemon that runs in another directory.
    pub fn absolute(mut self) -> io::Result<Self> {
        for choice in &mut self.backing {
            if let BackingChoice::At(backing) = choice {
                *backing = backing.clone().absolute()?;
            }
        }
        if let StoreChoice::Url(url) = self.store {
            self.store = StoreChoice::Url(url.absolute()?);
        }
        if let Some(Address::Unix(path)) = &mut self.metrics {
            *path = std::path::absolute(&path)?;
        }
        Ok(self)
    }
}

/// Parses a run-time directory and makes it absolute. Resolves symbolic links in the part that
/// exists, since the kernel names files by their resolved paths.
fn runtime(text: &str) -> Result<PathBuf, String> {
    let path = std::path::absolute(text).map_err(|error| error.to_string())?;
    let found = path.ancestors().find_map(|there| Some((there, there.canonicalize().ok()?)));
    Ok(match found {
        Some((there, real)) => {
            real.components().chain(path.strip_prefix(there).unwrap_or(Path::new("")).components()).collect()
        }
        None => path,
    })
}

/// The device to turn off.
#[derive(Debug, Clone, Args)]
pub struct OffOptions {
    /// The --runtime directory of weir on.
    #[arg(long, value_name = "DIRECTORY", default_value = DIRECTORY, value_parser = runtime)]
    pub runtime: PathBuf,

    /// Write down what is turned off, for weir on --again.
    #[arg(long, value_name = "FILE", hide = true)]
    pub remember: Option<PathBuf>,

    /// Only stop swapping on this device: what weir off runs in a process of its own.
    #[arg(long, value_name = "DEVICE", hide = true)]
    pub swapoff: Option<PathBuf>,
}

/// The daemon to replace.
#[derive(Debug, Clone, Args)]
pub struct RestartOptions {
    /// The --runtime directory of weir on.
    #[arg(long, value_name = "DIRECTORY", default_value = DIRECTORY, value_parser = runtime)]
    pub runtime: PathBuf,
}

/// The battery level at which Weir turns off.
#[derive(Debug, Clone, Args)]
pub struct BatteryOptions {
    /// Percent of charge below which Weir turns off, without mains.
    #[arg(long, value_name = "PERCENT", default_value_t = 30, value_parser = clap::value_parser!(u8).range(1..=100))]
    pub below: u8,

    /// The --runtime directory of weir on.
    #[arg(long, value_name = "DIRECTORY", default_value = DIRECTORY, value_parser = runtime)]
    pub runtime: PathBuf,

    /// The directory in which the kernel lists power supplies; for tests.
    #[arg(long, value_name = "DIRECTORY", default_value = "/sys/class/power_supply", hide = true)]
    pub supplies: String,
}

/// The daemon to watch.
#[derive(Debug, Clone, Args)]
pub struct TopOptions {
    /// Print the daemon's present state once, as lines, and exit.
    #[arg(long)]
    pub once: bool,

    /// Milliseconds between two looks at the daemon.
    #[arg(long, value_name = "N", default_value_t = 1000, value_parser = clap::value_parser!(u16).range(100..))]
    pub interval_ms: u16,

    /// The daemon's control socket [default: as for weir status].
    #[arg(long, value_name = "PATH")]
    pub control: Option<PathBuf>,
}

/// The front end that makes a block device of the volume.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, ValueEnum)]
pub enum FrontChoice {
    /// ublk if it works on this machine, else nbd.
    #[default]
    Auto,
    /// The kernel's ublk driver. auto takes it from Linux 6.16 on; it works from 6.5 on.
    Ublk,
    /// The kernel's NBD client.
    Nbd,
    /// A FUSE file under a loop device. It needs no ublk or NBD in the kernel. The loop and FUSE
    /// drivers take memory for each page that goes out, so the machine may freeze once no memory is
    /// free.
    Fuse,
}

/// The store for the pages.
#[derive(Debug, Clone, PartialEq)]
pub enum StoreChoice {
    /// Memory of the GPUs, with the options of a vram URL.
    Vram(VramUrl),
    /// Host memory.
    Host,
    /// Any other store, with its size in its URL.
    Url(StoreUrl),
}

/// The backing: room on a disk below the store.
#[derive(Debug, Clone, PartialEq)]
pub enum BackingChoice {
    /// A backing is used if it helps and the disk has room.
    Auto,
    /// No backing.
    None,
    /// The file or block device that the user named.
    At(Backing),
}

impl FromStr for BackingChoice {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        match text {
            "auto" => Ok(BackingChoice::Auto),
            "none" => Ok(BackingChoice::None),
            _ => text.parse().map(BackingChoice::At),
        }
    }
}

impl FromStr for StoreChoice {
    type Err = UrlError;

    fn from_str(text: &str) -> Result<Self, UrlError> {
        match text {
            "vram" => Ok(StoreChoice::Vram(VramUrl::new(Target::All))),
            "host" => Ok(StoreChoice::Host),
            _ => Ok(match text.parse()? {
                StoreUrl::Vram(url) => StoreChoice::Vram(url),
                url => StoreChoice::Url(url),
            }),
        }
    }
}

impl fmt::Display for StoreChoice {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            StoreChoice::Vram(url) => url.fmt(f),
            StoreChoice::Host => f.write_str("host memory"),
            StoreChoice::Url(url) => url.fmt(f),
        }
    }
}
