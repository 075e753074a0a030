//! The front ends of a cache: a file by FUSE, an NBD server, a block device of the ublk driver.

use super::options::CacheOptions;
use crate::failure;
use std::os::fd::OwnedFd;
use std::sync::Arc;
use std::thread;
use std::time::Duration;
use weir_cache::Cache;
use weir_cli::failure::{Failure, chain};
use weir_core::log::{Level, Log};
use weir_daemon::config::{self, Nbd, Ublk};
use weir_daemon::control::{Export, make_run_time_directory};
use weir_daemon::{Address, exports_of_fuse, exports_of_nbd, exports_of_ublk, serve_by_nbd, ublk_queues};
use weir_export::nbd::Single;
use weir_export::{fuse, nbd, ublk};
use weir_system::device_use;

/// Longest wait for the kernel to report that no program uses the file any more.
const REPORT: Duration = Duration::from_secs(1);

/// The front ends that the options ask for.
#[derive(Debug)]
pub struct Wanted {
    fuse: Option<fuse::Config>,
    nbd: Option<Nbd>,
    ublk: Option<Ublk>,
    queues: usize,
}

impl Wanted {
    /// Checks the options of the front ends.
    ///
    /// # Errors
    /// Fails if there is none, or the options contradict each other.
    pub fn new(options: &CacheOptions) -> Result<Self, Failure> {
        let (nbd, ublk) = (options.nbd.clone().nbd()?, options.ublk.clone().ublk()?);
        if options.fuse.is_none() && nbd.is_none() && ublk.is_none() {
            return Err(Failure::Usage(
                "--nbd, --ublk and --fuse are missing, so nobody could connect; accepted: --ublk, --nbd unix:PATH, --nbd tcp:HOST:PORT, --fuse FILE"
                    .to_owned(),
            ));
        }
        config::check_disks(ublk.is_some(), options.fuse.is_some()).map_err(failure::of)?;
        if let Some(nbd) = &nbd {
            nbd.check(false).map_err(failure::of)?;
        }
        let processors = thread::available_parallelism().map_or(1, usize::from);
        let fuse = options.fuse.as_ref().map(|_| fuse::Config {
            name: options.name.clone(),
            threads: usize::from(options.fuse_threads),
            ..fuse::Config::default()
        });
        Ok(Wanted { fuse, queues: ublk.as_ref().map_or(0, |ublk| ublk_queues(ublk, processors)), nbd, ublk })
    }

    /// Number of lanes that the front ends take together.
    pub fn lanes(&self) -> usize {
        let fuse = self.fuse.as_ref().map_or(0, |fuse| fuse.threads);
        fuse + self.nbd.as_ref().map_or(0, |nbd| usize::from(nbd.connections)) + self.queues
    }

    /// Starts all wanted front ends.
    ///
    /// # Errors
    /// Fails when a front end cannot start. The front ends that have started are stopped then.
    pub fn start(&self, cache: &Arc<Cache>, options: &CacheOptions, log: &Log) -> Result<FrontEnds, Failure> {
        let failed = |error: &dyn std::error::Error| Failure::Failed(chain(error));
        let mut front = FrontEnds { fuse: None, nbd: None, ublk: None };
        if let (Some(config), Some(file)) = (&self.fuse, &options.fuse) {
            let server = fuse::Server::start_device(cache, cache.bytes(), config, file, log);
            front.fuse = Some(server.map_err(|error| failed(&error))?);
        }
        if let Some(nbd) = &self.nbd {
            for address in &nbd.addresses {
                if let Address::Unix(path) = address {
                    make_run_time_directory(path).map_err(failure::of)?;
                }
            }
            let device = Arc::new(Single::new(cache, &options.name, "Weir cache", false));
            let server = serve_by_nbd(device, &nbd::Config::default(), nbd, log).map_err(failure::of)?;
            front.nbd = Some(server);
        }
        if let Some(ublk) = &self.ublk {
            let config =
                ublk::Config { queues: self.queues as u16, depth: ublk.depth, ..ublk::Config::default() };
            let server = ublk::Server::create(cache, &config, log, |_| {});
            front.ublk = Some(server.map_err(|error| failed(&error))?);
        }
        Ok(front)
    }
}

/// The running front ends.
#[derive(Debug)]
pub struct FrontEnds {
    fuse: Option<fuse::Server>,
    nbd: Option<nbd::Server>,
    ublk: Option<ublk::Server>,
}

impl FrontEnds {
    /// The front ends with their counts, for the status.
    pub fn exports(&self) -> Vec<Export> {
        let fuse = self.fuse.as_ref().map(exports_of_fuse);
        let nbd = self.nbd.as_ref().map(exports_of_nbd);
        let ublk = self.ublk.as_ref().map(exports_of_ublk);
        [fuse, nbd, ublk].into_iter().flatten().flatten().collect()
    }

    /// A descriptor that becomes readable when another program has unmounted the file. `None`: the
    /// cache serves no file.
    pub fn unmounted(&self) -> std::io::Result<Option<OwnedFd>> {
        self.fuse.as_ref().map(|server| server.unmounted().try_clone_to_owned()).transpose()
    }

    /// Fails if a front end cannot change its size.
    ///
    /// # Errors
    /// The error names the front end that cannot grow, and the next step.
    pub fn refuse_to_grow(&self) -> Result<(), String> {
        self.ublk.as_ref().map_or(Ok(()), |server| Err(keeps_size(&server.device().to_string())))
    }

    /// Changes the size of the front ends to `bytes`. NBD clients see the new size only after they
    /// have connected again.
    pub fn grow(&self, bytes: u64) {
        if let Some(server) = &self.fuse {
            server.grow(bytes);
        }
    }

    /// Removes the file and the block device, if no program uses the cache.
    ///
    /// # Errors
    /// The error says which program uses the cache, and the next step. The front ends that were not
    /// removed go on serving.
    pub fn withdraw(&mut self) -> Result<(), String> {
        if let Some(server) = &self.nbd {
            refuse_clients(server.stats().connected, server.addresses())?;
        }
        if let Some(server) = &self.fuse {
            unmount(server)?;
        }
        if let Some(server) = &mut self.ublk {
            let device = server.device().to_string();
            if let Some(why) = device_use::why_not_stop(&device, device_use::user_or_owner(&device)) {
                return Err(why);
            }
            match server.stop() {
                Ok(true) => {}
                Ok(false) => return Err(device_use::why_open(&device)),
                Err(error) => return Err(chain(&error)),
            }
        }
        Ok(())
    }

    /// Waits at most `grace` for the requests under way, and stops all front ends.
    pub fn stop(self, grace: Duration, log: &Log) {
        let FrontEnds { fuse, nbd, ublk } = self;
        if let Some(server) = nbd {
            server.shutdown(grace);
        }
        if let Some(server) = fuse {
            server.stop(grace);
        }
        if let Some(server) = ublk {
            let device = server.device();
            if let Err(error) = server.remove() {
                (log)(Level::Warning, format_args!("{device} is not removed: {}", chain(&error)));
            }
        }
    }
}

/// The error for a ublk device: the driver cannot make the device larger.
fn keeps_size(device: &str) -> String {
    format!(
        "{device} keeps its size; detach the cache and create it with --keep-content, and it is as large as its home"
    )
}

/// Refuses to end while clients are connected: what they write next would be lost.
fn refuse_clients(clients: u64, addresses: &[nbd::Listen]) -> Result<(), String> {
    if clients == 0 {
        return Ok(());
    }
    let addresses: Vec<String> = addresses.iter().map(ToString::to_string).collect();
    let are = if clients == 1 { "1 client is" } else { &format!("{clients} clients are") };
    Err(format!(
        "{are} connected at {}; end them (for the kernel's, umount and weir detach /dev/nbdN), and detach the cache after that",
        addresses.join(", ")
    ))
}

/// Unmounts the file if no program uses it. If another program has already unmounted the file,
/// checks that no program still uses it.
fn unmount(server: &fuse::Server) -> Result<(), String> {
    let file = server.file();
    let Err(error) = server.unmount_unused() else { return Ok(()) };
    if fuse::mount::is_served(file) {
        let file = file.display();
        return Err(format!(
            "{file} is in use ({error}); fuser -v {file} says by whom, losetup -d ends a loop device; detach it after that"
        ));
    }
    if has_ended(server) {
        return Ok(());
    }
    let file = file.display();
    Err(format!(
        "{file} is unmounted and in use still; losetup -a names a loop device over it, lsof {file} a program; detach it after that"
    ))
}

/// Whether no program uses the unmounted file any more. Waits for the kernel's report, which comes
/// a moment after the last program has closed the file.
fn has_ended(server: &fuse::Server) -> bool {
    use rustix::event::{PollFd, PollFlags, Timespec};
    let patience = Timespec::try_from(REPORT).expect("a second");
    let mut fds = [PollFd::from_borrowed_fd(server.unmounted(), PollFlags::IN)];
    rustix::event::poll(&mut fds, Some(&patience)).is_ok_and(|ready| ready > 0)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_block_device_that_cannot_grow_says_what_to_do() {
        let said = keeps_size("/dev/ublkb3");
        assert!(
            said.starts_with("/dev/ublkb3 keeps its size; detach the cache and create it with"),
            "{said}"
        );
    }

    #[test]
    fn a_cache_with_connected_clients_says_where_they_are_and_how_they_end() {
        let at = [nbd::Listen::Unix("/run/weir/cache.nbd".into())];
        assert_eq!(refuse_clients(0, &at), Ok(()));
        let one = refuse_clients(1, &at).unwrap_err();
        assert!(one.starts_with("1 client is connected at unix:/run/weir/cache.nbd; end them"), "{one}");
        assert!(refuse_clients(2, &at).unwrap_err().starts_with("2 clients are connected"));
    }
}
