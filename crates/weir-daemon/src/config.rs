//! The configuration of a daemon. The defaults are those of the command line.

use crate::address::Address;
use crate::backing::Backing;
use crate::error::{Error, ErrorKind};
use std::path::{Path, PathBuf};
use std::time::Duration;
use weir_core::ByteSize;
use weir_export::fuse;
use weir_store::StoreUrl;
use weir_volume::Compression;

/// A daemon's configuration. The default has no store and no front end yet.
#[derive(Clone, PartialEq, Debug)]
pub struct Config {
    /// The stores of the daemon's pages, the fastest first.
    pub stores: Vec<StoreUrl>,
    /// The stores below the others. Pages go there when the others are full, or give their memory
    /// back.
    pub backing: Vec<Backing>,
    /// The device's size; `None`: as much as the stores hold.
    pub size: Option<ByteSize>,
    /// If set, the daemon has no volume of its own, and this is the largest number of volumes that
    /// are made while it runs. Each then gets a ublk device and a FUSE file, if those are set.
    pub pool: Option<u16>,
    /// How pages are compressed, if they are.
    pub compress: Option<Compression>,
    /// The export's name for NBD clients, and the file's in a FUSE directory.
    pub name: String,
    /// The NBD server over the volume, if there is one.
    pub nbd: Option<Nbd>,
    /// The file over the volume, by FUSE, if there is one.
    pub fuse: Option<Fuse>,
    /// The share transport over the volume, for local programs, if there is one.
    pub share: Option<Share>,
    /// The block device over the volume, of the ublk driver, if there is one.
    pub ublk: Option<Ublk>,
    /// Time for which a thread polls for the next request before it sleeps.
    pub spin: Duration,
    /// Whether processors are kept out of deep sleep while requests come in bursts.
    pub cpu_latency: bool,
    /// Whether the device is to carry swap.
    pub swap: bool,
    /// Whether to start although the system denies the flusher flag.
    pub unsafe_no_flusher: bool,
    /// Whether a keeper makes the pages outlive a crash of the daemon.
    pub keeper: bool,
    /// The file for the [`StartProgress`](crate::StartProgress), and for the
    /// [`StartReport`](crate::StartReport) if the start fails.
    pub start_report: Option<PathBuf>,
    /// The control socket; `None`: [`default_path`](crate::control::default_path).
    pub control: Option<PathBuf>,
    /// The address of the metrics' endpoint, if there is one.
    pub metrics: Option<Address>,
    /// The socket for the pagers of the programs whose RAM `weir run` limits, if there is one.
    pub programs: Option<PathBuf>,
}

/// The settings of the NBD server.
#[derive(Clone, PartialEq, Debug)]
pub struct Nbd {
    /// The addresses at which the NBD server listens.
    pub addresses: Vec<Address>,
    /// Number of connections at a time. Each has a thread, and takes memory from the start.
    pub connections: u16,
    /// The directory with the certificates for TCP under TLS.
    pub tls: Option<PathBuf>,
    /// Whether TCP without TLS is allowed, on the loopback interface.
    pub insecure: bool,
}

/// The settings of a file that is served by FUSE.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct Fuse {
    /// The file that is mounted over, or the directory.
    pub file: PathBuf,
    /// Number of threads that serve the file.
    pub threads: u16,
}

/// The settings of the share server, which gives pages to local programs.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct Share {
    /// The path of the share server's socket.
    pub path: PathBuf,
    /// Whether clients may read pages in the memory of the host stores.
    pub in_place: bool,
    /// Number of share servers, each with a thread and a socket of its own.
    pub threads: u16,
}

/// The settings of a ublk device.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Ublk {
    /// Number of queues, each with a thread; `None`: by the number of processors.
    pub queues: Option<u16>,
    /// Number of requests that each queue may have in flight.
    pub depth: u16,
}

impl Default for Config {
    fn default() -> Self {
        Config {
            stores: Vec::new(),
            backing: Vec::new(),
            size: None,
            pool: None,
            compress: None,
            name: "weir".to_owned(),
            nbd: None,
            fuse: None,
            share: None,
            ublk: None,
            spin: Duration::ZERO,
            cpu_latency: false,
            swap: false,
            unsafe_no_flusher: false,
            keeper: false,
            start_report: None,
            control: None,
            metrics: None,
            programs: None,
        }
    }
}

impl Default for Nbd {
    fn default() -> Self {
        Nbd { addresses: Vec::new(), connections: 16, tls: None, insecure: false }
    }
}

impl Nbd {
    /// Refuses TCP in the clear, unless it is asked for, and TCP for swap.
    ///
    /// # Errors
    /// Fails with an error of kind [`ErrorKind::Config`], which names the flag and the accepted
    /// values.
    pub fn check(&self, swap: bool) -> Result<(), Error> {
        let is_tcp = |address: &&Address| matches!(address, Address::Tcp { .. });
        let Some(address) = self.addresses.iter().find(is_tcp) else { return Ok(()) };
        let refused = |why: String| Err(Error::new(ErrorKind::Config, why));
        if swap {
            return refused(format!(
                "--swap: --nbd {address} {}; accepted with --swap: --nbd unix:PATH, --ublk, --fuse FILE",
                if self.tls.is_some() {
                    "under --tls takes memory for each record, so swap by it can freeze"
                } else {
                    "lets every user of this machine read and write what other programs have swapped out"
                }
            ));
        }
        if !self.insecure && self.tls.is_none() {
            return refused(format!(
                "--nbd {address} would carry pages in the clear; accepted: unix:PATH, --tls DIRECTORY, or --insecure for the loopback interface"
            ));
        }
        Ok(())
    }
}

/// Refuses a ublk device beside a file by FUSE.
///
/// # Errors
/// Fails with an error of kind [`ErrorKind::Config`] if there are both.
pub fn check_disks(ublk: bool, fuse: bool) -> Result<(), Error> {
    if !(ublk && fuse) {
        return Ok(());
    }
    Err(Error::new(
        ErrorKind::Config,
        "--ublk and --fuse would be two disks with the same pages, and neither sees what the kernel caches for the other: leave one of them out",
    ))
}

impl Fuse {
    /// A front end that mounts its file over `file`, with the default number of threads.
    pub fn at(file: impl Into<PathBuf>) -> Self {
        Fuse { file: file.into(), threads: 4 }
    }

    /// The file of a pool's volume: the file of the options, with a dot and the volume's name.
    pub fn file_of(&self, volume: &str) -> PathBuf {
        let mut file = self.file.clone().into_os_string();
        file.push(".");
        file.push(volume);
        file.into()
    }
}

impl Share {
    /// A front end whose socket is at `path`, and whose clients get copies of pages.
    pub fn at(path: impl Into<PathBuf>) -> Self {
        Share { path: path.into(), in_place: false, threads: 1 }
    }
}

impl Default for Ublk {
    fn default() -> Self {
        Ublk { queues: None, depth: 64 }
    }
}

impl Config {
    /// Refuses a configuration that has no use, or that would be unsafe.
    ///
    /// # Errors
    /// Fails with an error of kind [`ErrorKind::Config`], which names the flag and the accepted
    /// values.
    pub fn check(&self) -> Result<(), Error> {
        let refused = |why: String| Err(Error::new(ErrorKind::Config, why));
        if self.nbd.is_none() && self.fuse.is_none() && self.ublk.is_none() && self.share.is_none() {
            return Err(Error::new(
                ErrorKind::Config,
                "--nbd, --ublk, --fuse and --share are missing, so nobody could connect; accepted: --ublk, --nbd unix:PATH, --nbd tcp:HOST:PORT, --fuse FILE, --share PATH",
            ));
        }
        check_disks(self.ublk.is_some(), self.fuse.is_some())?;
        if self.pool.is_some() {
            self.check_pool()?;
        }
        if self.fuse.is_some() && !fuse::is_file_name(&self.name) {
            let (name, accepted) = (&self.name, fuse::FILE_NAME);
            return refused(format!(
                "--name {name:?} is no name of a file, as --fuse needs; accepted: {accepted}"
            ));
        }
        self.nbd.as_ref().map_or(Ok(()), |nbd| nbd.check(self.swap))
    }

    /// Refuses what only a daemon with a volume of its own can do.
    fn check_pool(&self) -> Result<(), Error> {
        let what = match (&self.size, &self.fuse) {
            (Some(size), _) => {
                format!(
                    "--size {size} is that of the daemon's own volume, and --pool has none: leave one of them out"
                )
            }
            (_, Some(fuse)) if fuse.file.is_dir() => format!(
                "--fuse {} is a directory, and a volume of --pool gets a file beside: give --fuse FILE",
                fuse.file.display()
            ),
            _ => return Ok(()),
        };
        Err(Error::new(ErrorKind::Config, what))
    }

    /// The paths of the sockets and mounts in the file system.
    pub fn paths(&self) -> impl Iterator<Item = &Path> {
        let addresses = self.nbd.iter().flat_map(|nbd| &nbd.addresses).chain(&self.metrics);
        let sockets = addresses.filter_map(|address| match address {
            Address::Unix(path) => Some(path.as_path()),
            Address::Tcp { .. } => None,
        });
        let fuse = self.fuse.iter().map(|fuse| fuse.file.as_path());
        sockets.chain(fuse).chain(self.share.iter().map(|share| share.path.as_path()))
    }

    /// Whether store `at` must give its memory back on request. Files and disks need not: nobody
    /// else needs their room. The last of several stores need not either, because it takes the
    /// pages of the others.
    pub(crate) fn gives_back(&self, at: usize) -> bool {
        let is_last = at + 1 == self.stores.len() && self.backing.is_empty();
        match self.stores.get(at) {
            None | Some(StoreUrl::File(_) | StoreUrl::Stripe(_)) => false,
            Some(_) => at == 0 || !is_last,
        }
    }

    /// The name of a store of GPU memory that gives no memory back. It may lose its pages when the
    /// machine sleeps.
    pub(crate) fn stays(&self) -> Option<String> {
        let stays = |&at: &usize| matches!(self.stores[at], StoreUrl::Vram(_)) && !self.gives_back(at);
        (0..self.stores.len()).find(stays).map(|at| self.stores[at].to_string())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_needs_the_daemon_s_own_volume_is_refused_with_a_pool() {
        let pool = Config { pool: Some(2), nbd: Some(Nbd::default()), ..Config::default() };
        let refused = |config: &Config| config.check().expect_err("refused").to_string();
        pool.check().expect("volumes by NBD");
        let said = refused(&Config { size: Some(ByteSize(4096)), ..pool.clone() });
        assert!(
            said.starts_with("--size 4KiB is that of the daemon's own volume, and --pool has none"),
            "{said}"
        );
        Config { share: Some(Share::at("/s")), ..pool.clone() }.check().expect("clients name a volume");
        let said = refused(&Config { fuse: Some(Fuse::at("/")), ..pool.clone() });
        assert!(said.starts_with("--fuse / is a directory, and a volume of --pool gets a file"), "{said}");
        let fuse = Fuse::at("/nowhere/disk");
        assert_eq!(fuse.file_of("a.b"), Path::new("/nowhere/disk.a.b"));
        Config { fuse: Some(fuse), ..pool }.check().expect("a file for each");
    }

    #[test]
    fn two_disks_of_the_same_pages_are_refused() {
        for pool in [None, Some(2)] {
            let ublk = Config { pool, ublk: Some(Ublk::default()), ..Config::default() };
            ublk.check().expect("one disk");
            let both = Config { fuse: Some(Fuse::at("/nowhere/disk")), ..ublk };
            let said = both.check().expect_err("refused").to_string();
            assert!(said.starts_with("--ublk and --fuse would be two disks with the same pages"), "{said}");
        }
    }

    #[test]
    fn gpu_memory_that_no_store_lies_below_cannot_be_emptied_for_a_sleep() {
        let of = |stores: &[&str], backing: &[&str]| {
            let stores = stores.iter().map(|url| url.parse().expect("a store")).collect();
            let backing = backing.iter().map(|path| path.parse().expect("a path")).collect();
            Config { stores, backing, ..Config::default() }.stays()
        };
        let last = ["host:4GiB", "vram:0"];
        assert_eq!(of(&last, &[]).as_deref(), Some("vram:0"));
        assert_eq!(of(&last, &["/a"]), None);
        assert_eq!(of(&["vram:0", "host:4GiB"], &[]), None);
        assert_eq!(of(&["vram:0"], &[]), None, "the worker says what fits nowhere");
    }
}
