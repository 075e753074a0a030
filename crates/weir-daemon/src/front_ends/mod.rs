//! A daemon's front ends: each serves volumes to one kind of client, with lanes of its own.

mod each;
mod running;
mod ublk;

pub use each::Each;
pub use running::FrontEnds;
#[cfg(test)]
pub use running::tests as played;
pub use ublk::{NUMBER, PreparedUblk, exports_of_ublk, ublk_queues};

use crate::address::Address;
use crate::config::{self, Config};
use crate::control::Export;
use crate::error::{Error, ErrorKind};
use crate::keeper::{Held, Link};
use crate::volumes::Volumes;
use std::fmt;
use std::path::Path;
use std::sync::Arc;
use std::time::Duration;
use weir_core::log::{Level, Log};
use weir_export::fuse;
use weir_export::nbd::{self, Exports, Identity, KernelConnections, Listen, ListenError, ServeError, Server};
use weir_export::share;
use weir_system::device_use;
use weir_system::loop_device::LoopDevice;
use weir_volume::Volume;

/// Time that requests under way may take when a front end stops.
pub const GRACE: Duration = Duration::from_secs(2);

/// A running front end.
pub trait FrontEnd: fmt::Debug + Send {
    /// The front end's address and number of connections, for status.
    fn exports(&self) -> Vec<Export>;

    /// Names the program that still uses the device, with the command that ends that use; `None` if
    /// the front end may stop. A device that only this process keeps alive, such as one that
    /// carries swap, must not stop.
    fn in_use(&self) -> Option<String> {
        None
    }

    /// Removes the block device before [`stop`](FrontEnd::stop), since a program that touches a
    /// device without a server waits for ever. Returns `None` once the device has gone. Otherwise
    /// returns the reason and the next step, and goes on serving the device.
    fn let_go(&mut self) -> Option<String> {
        None
    }

    /// Does what [`let_go`](FrontEnd::let_go) does, for a front end that will be
    /// [ended](FrontEnd::end) while the daemon goes on. If a program has the front end's file open,
    /// returns the reason, and goes on serving the file.
    fn withdraw(&mut self) -> Option<String> {
        self.let_go()
    }

    /// Answers received requests for at most `grace`, then disconnects its clients. Nothing of the
    /// front end is left in the file system.
    fn stop(self: Box<Self>, grace: Duration);

    /// Does what [`stop`](FrontEnd::stop) does, for a daemon that goes on. The keeper then lets go
    /// of all that it holds of the front end.
    fn end(self: Box<Self>, grace: Duration) {
        self.stop(grace);
    }
}

/// A front end with what it serves.
#[derive(Debug)]
pub struct Served {
    /// The volume of a pool that the front end serves. `None`: it serves the daemon's own volume,
    /// or every volume by its name.
    pub volume: Option<String>,
    /// The front end.
    pub front_end: Box<dyn FrontEnd>,
}

impl Served {
    /// Whether the front end serves this volume alone.
    fn is_of(&self, volume: &str) -> bool {
        self.volume.as_deref() == Some(volume)
    }

    /// The front end's address and number of connections, for status.
    pub fn exports(&self) -> impl Iterator<Item = Export> {
        let exports = self.front_end.exports().into_iter();
        exports.map(|export| Export { volume: self.volume.clone(), ..export })
    }
}

/// Number of lanes that the front ends take together. The lanes of ublk devices do not count, and
/// neither do those of front ends that each volume of a pool has for itself.
pub fn lanes(options: &Config) -> usize {
    let nbd = options.nbd.as_ref().map_or(0, |nbd| usize::from(nbd.connections));
    let fuse = options.fuse.as_ref().filter(|_| options.pool.is_none());
    let fuse = fuse.map_or(0, |fuse| usize::from(fuse.threads));
    let share = match &options.share {
        None => 0,
        // A volume keeps some slots free for each lane. Pages on loan to clients take slots too, so
        // count them as [`IN_PLACE_LANES`] more lanes.
        Some(share) => usize::from(share.threads) + if share.in_place { IN_PLACE_LANES } else { 0 },
    };
    nbd + fuse + share
}

/// Number of lanes whose free slots the pages on loan to clients may take. The free slots of 8
/// lanes hold 10 MiB of pages.
const IN_PLACE_LANES: usize = 8;

/// The NBD server on all its addresses. It offers every volume by its name.
#[derive(Debug)]
pub struct Nbd(Server);

impl Nbd {
    /// Listens on every `--nbd` address.
    ///
    /// # Errors
    /// Fails when a socket cannot be made, or a certificate cannot be read.
    pub fn start(
        volumes: &Arc<Volumes>,
        options: &Config,
        nbd: &config::Nbd,
        log: &Log,
    ) -> Result<Self, Error> {
        let config = nbd::Config {
            spin: options.spin,
            swap: options.swap,
            unsafe_no_flusher: options.unsafe_no_flusher,
            ..nbd::Config::default()
        };
        Ok(Nbd(serve_by_nbd(Arc::clone(volumes), &config, nbd, log)?))
    }

    /// The NBD server's connections with the kernel.
    pub fn kernel_connections(&self) -> KernelConnections {
        self.0.kernel_connections()
    }
}

/// Listens on every address of `nbd`. The other settings are those of `config`.
///
/// # Errors
/// Fails when a socket cannot be made, or a certificate cannot be read.
pub fn serve_by_nbd<E: Exports>(
    exports: Arc<E>,
    config: &nbd::Config,
    nbd: &config::Nbd,
    log: &Log,
) -> Result<Server, Error> {
    let identity = nbd.tls.as_deref().map(Identity::from_directory).transpose();
    let identity =
        identity.map_err(|error| Error::because(ErrorKind::FrontEnd, "--tls", error))?.map(Arc::new);
    if identity.as_ref().is_some_and(|identity| !identity.checks_clients()) {
        (log)(
            Level::Warning,
            format_args!(
                "--tls: clients need no certificate, so whoever reaches the port can read and write; a ca-cert.pem there says whose they must be"
            ),
        );
    }
    let listen: Vec<Listen> =
        nbd.addresses.iter().map(|address| listen(address, identity.as_ref())).collect();
    let config = nbd::Config { connections: usize::from(nbd.connections), ..config.clone() };
    Server::start_exports(exports, &config, &listen, log).map_err(|error| match error {
        ServeError::Listen(ListenError::Exposed { .. }) => {
            Error::because(ErrorKind::Config, "--insecure", error)
        }
        _ => Error::of(ErrorKind::FrontEnd, error),
    })
}

/// An NBD server for the status: each of its addresses.
pub fn exports_of_nbd(server: &Server) -> Vec<Export> {
    let stats = server.stats();
    let export = |address: &Listen| Export {
        kind: "nbd".to_owned(),
        volume: None,
        address: address.to_string(),
        connections: stats.connected,
        connections_most: stats.connections_max,
        requests: stats.requests,
        errors: stats.errors,
    };
    server.addresses().iter().map(export).collect()
}

/// A file that is served by FUSE, for the status.
pub fn exports_of_fuse(server: &fuse::Server) -> Vec<Export> {
    let stats = server.stats();
    vec![Export {
        kind: "fuse".to_owned(),
        volume: None,
        address: server.file().display().to_string(),
        connections: stats.threads,
        connections_most: stats.threads,
        requests: stats.requests,
        errors: stats.errors,
    }]
}

impl FrontEnd for Nbd {
    fn exports(&self) -> Vec<Export> {
        exports_of_nbd(&self.0)
    }

    fn stop(self: Box<Self>, grace: Duration) {
        self.0.shutdown(grace);
    }
}

/// A volume as a file, by FUSE.
pub struct Fuse {
    server: fuse::Server,
    /// The keeper, and the start of the names under which it holds the mount.
    kept: Option<(Link, String)>,
    /// Whether the mount is gone already, because its volume is to be removed.
    is_unmounted: bool,
}

impl fmt::Debug for Fuse {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.server.fmt(f)
    }
}

/// The start of the names under which the keeper holds the mount of the daemon's own volume.
pub const FUSE: &str = "fuse.";

impl Fuse {
    /// Mounts over `file`; or takes over the mount of a daemon that was killed, if the keeper has
    /// it under names that begin with `prefix`.
    ///
    /// # Errors
    /// Fails when the file cannot be mounted, or the kernel's FUSE is too old.
    pub fn start(
        volume: &Arc<Volume>,
        options: &Config,
        (fuse, file): (&config::Fuse, &Path),
        prefix: &str,
        keeper: Option<(&Link, &mut Held)>,
        log: &Log,
    ) -> Result<Self, Error> {
        let config = fuse::Config {
            name: options.name.clone(),
            threads: usize::from(fuse.threads),
            spin: options.spin,
            swap: options.swap,
            unsafe_no_flusher: options.unsafe_no_flusher,
            // The next daemon cannot take over a server that uses io_uring, so a server under a
            // keeper does not use it. Nor does a server whose threads spin: they spin on
            // `/dev/fuse`.
            ring: keeper.is_none() && !options.swap && options.spin.is_zero(),
            allow_other: false,
        };
        let failed = |error: fuse::ServeError| Error::because(ErrorKind::FrontEnd, "--fuse", error);
        let Some((link, held)) = keeper else {
            let server = fuse::Server::start(volume, &config, file, log).map_err(failed)?;
            return Ok(Fuse { server, kept: None, is_unmounted: false });
        };
        let kept = Some((link.clone(), prefix.to_owned()));
        let name = |kept: &str| format!("{prefix}{kept}");
        if held.any(|kept| kept.starts_with(prefix)) {
            let mut take = |kept: &str| held.take(&name(kept));
            let server = fuse::Server::take_over(volume, &config, file, &mut take, log).map_err(failed)?;
            return Ok(Fuse { server, kept, is_unmounted: false });
        }
        let server = fuse::Server::start(volume, &config, file, log).map_err(failed)?;
        let fuse = Fuse { server, kept, is_unmounted: false };
        match fuse.keep() {
            Ok(()) => Ok(fuse),
            Err(error) => {
                fuse.unkeep();
                Err(Error::of(ErrorKind::Keeper, error))
            }
        }
    }
}

impl FrontEnd for Fuse {
    fn exports(&self) -> Vec<Export> {
        exports_of_fuse(&self.server)
    }

    /// Looks for programs that use loop devices over the file. If one of these devices carries
    /// swap, the swap would be lost with this process.
    fn in_use(&self) -> Option<String> {
        // The kernel reports the path of a loop device's file with the directory's symbolic links
        // resolved. So resolve them here too; the file itself is no link.
        let file = self.server.file();
        let directory = file.parent().and_then(|parent| parent.canonicalize().ok());
        let file =
            directory.zip(file.file_name()).map_or(file.to_owned(), |(parent, name)| parent.join(name));
        LoopDevice::over(&file).iter().find_map(|device| {
            let device = device.path().display().to_string();
            device_use::why_not_stop(&device, device_use::user_or_owner(&device))
        })
    }

    fn stop(self: Box<Self>, grace: Duration) {
        self.server.stop(grace);
    }

    fn withdraw(&mut self) -> Option<String> {
        if self.is_unmounted {
            return None;
        }
        // Make the keeper let go before the unmount. If this daemon died between the two steps, the
        // next daemon could not take over a connection without a mount.
        self.unkeep();
        let file = self.server.file();
        match self.server.unmount_unused() {
            // Another program may have unmounted the file.
            Err(error)
                if error.kind() == std::io::ErrorKind::ResourceBusy || fuse::mount::is_mounted(file) =>
            {
                // Ignore an error of the keeper: it is gone then, and no other daemon takes over.
                let _ = self.keep();
                let file = file.display();
                Some(format!("{file} is in use ({error}); run fuser -v {file}, and end what it names"))
            }
            _ => {
                self.is_unmounted = true;
                None
            }
        }
    }

    fn end(self: Box<Self>, grace: Duration) {
        if !self.is_unmounted {
            self.unkeep();
        }
        self.server.stop(grace);
    }
}

impl Fuse {
    /// Hands the keeper what another daemon needs to take the mount over.
    fn keep(&self) -> std::io::Result<()> {
        let Some((link, prefix)) = &self.kept else { return Ok(()) };
        let mut handoffs = self.server.handoffs().into_iter();
        handoffs.try_for_each(|it| link.hold_open(&format!("{prefix}{}", it.name), it.fd))
    }

    /// Has the keeper let go of the mount.
    fn unkeep(&self) {
        let Some((link, prefix)) = &self.kept else { return };
        let names: Vec<String> = self.server.handoffs().into_iter().map(|it| it.name).collect();
        let_go_in_order(&names, |name| drop(link.let_go(&format!("{prefix}{name}"))));
    }
}

/// Lets go of what a keeper holds of a mount: first of the queues, the last one first, and at the
/// end of the connection. This daemon may die meanwhile, and no other one can take the mount over
/// without the connection.
fn let_go_in_order(names: &[String], let_go: impl FnMut(&String)) {
    names.iter().rev().for_each(let_go);
}

/// Largest number of clients that the daemon of a `weir run` serves at a time. They are the owners
/// of the run's ledger, and some owners that have just ended.
const RUN_CLIENTS: u32 = weir_pager::OWNERS_MOST + 16;

/// Pages for local programs, through shared memory. A program may name any volume.
#[derive(Debug)]
pub struct Share {
    servers: Vec<share::Server>,
    clients: u64,
}

impl Share {
    /// Starts the share servers. The first listens at the path in the options, and the others at
    /// the [paths](share::path_of) after it.
    ///
    /// # Errors
    /// Fails when a socket cannot be made.
    pub fn start(
        volumes: &Arc<Volumes>,
        options: &Config,
        share: &config::Share,
        log: &Log,
    ) -> Result<Self, Error> {
        let lane_slots = volumes.pool().config().lane_slots();
        let defaults = share::Config::at(&share.path);
        let clients = if options.programs.is_some() { RUN_CLIENTS } else { defaults.clients };
        let in_place = if share.in_place { IN_PLACE_LANES as u32 * lane_slots } else { 0 };
        let config = |number| share::Config {
            path: share::path_of(&share.path, number),
            clients,
            spin: options.spin,
            // A pool lends its pages to one server only.
            in_place: if number == 0 { in_place } else { 0 },
            // Only the kernel may write to a device that carries swap, since only it knows the
            // content.
            read_only: options.swap,
            serves_pagers: options.programs.is_some(),
            ..defaults.clone()
        };
        let start = |number| {
            let its = Arc::clone(volumes);
            let find = move |name: &[u8]| its.find(name).map(|(_, volume)| volume);
            share::Server::start_all(volumes.pool(), Box::new(find), &config(number), Arc::clone(log))
                .map_err(|error| Error::because(ErrorKind::FrontEnd, "--share", error))
        };
        let servers = (0..share.threads).map(start).collect::<Result<_, _>>()?;
        Ok(Share { servers, clients: clients.into() })
    }
}

impl FrontEnd for Share {
    fn exports(&self) -> Vec<Export> {
        let export = |server: &share::Server| {
            let stats = server.stats();
            Export {
                kind: "share".to_owned(),
                volume: None,
                address: format!("unix:{}", server.path().display()),
                connections: stats.sessions() - stats.sessions_ended(),
                connections_most: self.clients,
                requests: stats.reads() + stats.writes() + stats.faults(),
                errors: stats.faults(),
            }
        };
        self.servers.iter().map(export).collect()
    }

    fn stop(self: Box<Self>, _grace: Duration) {
        // No grace is needed: requests that have no answer yet still lie in the clients' own
        // memory. Dropping the servers disconnects the clients.
    }
}

fn listen(address: &Address, identity: Option<&Arc<Identity>>) -> Listen {
    match (address.clone(), identity) {
        (Address::Unix(path), _) => Listen::Unix(path),
        (Address::Tcp { host, port }, Some(identity)) => {
            Listen::Tls { host, port, identity: Arc::clone(identity) }
        }
        (Address::Tcp { host, port }, None) => Listen::Insecure { host, port },
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_keeper_that_holds_any_part_of_a_mount_holds_its_connection_too() {
        let names = ["connection-made", "queue.0", "queue.1", "queue.2"].map(str::to_owned);
        let mut held = names.to_vec();
        let_go_in_order(&names, |name| {
            held.retain(|it| it != name);
            assert_eq!(held, names[..held.len()], "a daemon takes over queues from 0 on");
        });
        assert!(held.is_empty());
    }
}
