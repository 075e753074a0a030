//! A block device of the kernel's ublk driver. Under a keeper the device outlives the daemon. The
//! keeper holds a page with the device's number, and the next daemon takes the device over. (The
//! device's own descriptor must close with the daemon: by that the driver learns that its server is
//! gone.)

use super::FrontEnd;
use crate::config;
use crate::control::Export;
use crate::environment::Environment;
use crate::error::{Error, ErrorKind};
use crate::keeper::{Held, Link};
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;
use weir_core::log::{Level, Log};
use weir_core::{Memory, PAGE_SIZE, chain};
use weir_export::ublk::{Config, Device, Found, Server};
use weir_system::device_use;
use weir_volume::Volume;

/// The keeper's name for the page with the number of the device of the daemon's own volume.
pub const NUMBER: &str = "ublk";

/// Largest number of queues by default. More would take memory that a desktop's swap does not need.
const QUEUES_MOST: usize = 4;

/// A device that is not served yet: a new one, or one that a dead daemon left.
#[derive(Debug)]
pub struct PreparedUblk {
    config: Config,
    found: Option<Found>,
    number: Option<Number>,
    /// The keeper, and its name for the page with the number.
    kept: Option<(Link, String)>,
}

/// A page that outlives the daemon and holds its device's number plus one; 0 if there is no device.
#[derive(Debug)]
struct Number(Memory);

impl Number {
    fn word(&self) -> &AtomicU64 {
        // SAFETY: the mapping is a page, aligned and as long-lived as `self`. All access to its
        // first word is atomic.
        unsafe { AtomicU64::from_ptr(self.0.as_ptr().cast()) }
    }

    fn get(&self) -> Option<Device> {
        let number = self.word().load(Ordering::Relaxed).checked_sub(1)?;
        u32::try_from(number).ok().map(Device)
    }

    fn set(&self, device: Device) {
        self.word().store(u64::from(device.0) + 1, Ordering::Relaxed);
    }
}

impl PreparedUblk {
    /// Looks for a device of an earlier daemon, to take it over: the keeper holds its number under
    /// `name`. Call this before the volume is made: a device that is taken over has as many queues
    /// as before, and each takes a lane.
    ///
    /// # Errors
    /// Fails when the driver is missing or does not hand over the device.
    pub fn new(
        options: &config::Config,
        ublk: &config::Ublk,
        name: &str,
        keeper: Option<(&Link, &mut Held)>,
        environment: &Environment,
    ) -> Result<Self, Error> {
        let config = Config {
            queues: Self::queues(ublk, environment) as u16,
            depth: ublk.depth,
            spin: options.spin,
            swap: options.swap,
            unsafe_no_flusher: options.unsafe_no_flusher,
            recoverable: keeper.is_some(),
            ..Config::default()
        };
        let unkept = |error: std::io::Error| Error::of(ErrorKind::Keeper, error);
        let kept = keeper.as_ref().map(|(link, _)| ((*link).clone(), name.to_owned()));
        let number = match keeper {
            None => None,
            Some((link, held)) => Some(match held.take(name) {
                Some(fd) => Number(Memory::adopt(fd).map_err(unkept)?),
                None => {
                    let page = Memory::shared("weir-ublk", PAGE_SIZE).map_err(unkept)?;
                    link.hold_memory(name, page.fd().expect("shared memory has a descriptor"))
                        .map_err(unkept)?;
                    Number(page)
                }
            }),
        };
        let found = match number.as_ref().and_then(Number::get) {
            Some(device) => Server::find(device, &environment.log)
                .map_err(|error| Error::of(ErrorKind::FrontEnd, error))?,
            None => None,
        };
        Ok(PreparedUblk { config, found, number, kept })
    }

    /// Whether this is a device that a dead daemon left.
    pub fn is_found(&self) -> bool {
        self.found.is_some()
    }

    /// Number of queues of a new device, each of which takes a lane.
    pub fn queues(ublk: &config::Ublk, environment: &Environment) -> usize {
        ublk_queues(ublk, environment.processors)
    }

    /// Number of the volume's lanes that the device takes.
    pub fn lanes(&self) -> usize {
        self.found.as_ref().map_or(self.config.queues, Found::queues).into()
    }

    /// Begins to serve the device.
    ///
    /// # Errors
    /// Fails when a thread cannot be had, or the driver refuses.
    pub fn start(self, volume: &Arc<Volume>, log: &Log) -> Result<Ublk, Error> {
        let PreparedUblk { config, found, number, kept } = self;
        let server = match found {
            Some(found) => {
                let server = Server::take_over(volume, &config, found, log);
                server.inspect(|server| {
                    (log)(Level::Info, format_args!("took {} over from the daemon before", server.device()));
                })
            }
            None => Server::create(volume, &config, log, |device| {
                number.iter().for_each(|number| number.set(device));
            }),
        };
        let server = server.map_err(|error| Error::because(ErrorKind::FrontEnd, "--ublk", error))?;
        Ok(Ublk { server, log: Arc::clone(log), kept })
    }
}

/// Number of queues of a new device on a machine with so many processors.
pub fn ublk_queues(ublk: &config::Ublk, processors: usize) -> usize {
    ublk.queues.map_or(processors.min(QUEUES_MOST), usize::from)
}

/// A ublk device, for the status.
pub fn exports_of_ublk(server: &Server) -> Vec<Export> {
    let stats = server.stats();
    vec![Export {
        kind: "ublk".to_owned(),
        volume: None,
        address: server.device().to_string(),
        connections: server.queues() as u64,
        connections_most: server.queues() as u64,
        requests: stats.requests,
        errors: stats.errors,
    }]
}

/// A device that is served.
pub struct Ublk {
    server: Server,
    log: Log,
    /// The keeper, and the name under which it holds the page that has the number of the device.
    kept: Option<(Link, String)>,
}

impl std::fmt::Debug for Ublk {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        self.server.fmt(f)
    }
}

impl FrontEnd for Ublk {
    fn exports(&self) -> Vec<Export> {
        exports_of_ublk(&self.server)
    }

    fn in_use(&self) -> Option<String> {
        let device = self.server.device().to_string();
        device_use::why_not_stop(&device, device_use::user_or_owner(&device))
    }

    fn let_go(&mut self) -> Option<String> {
        match self.server.stop() {
            Ok(true) => None,
            Ok(false) => Some(device_use::why_open(&self.server.device().to_string())),
            Err(error) => Some(chain(&error)),
        }
    }

    fn stop(self: Box<Self>, _grace: Duration) {
        let device = self.server.device();
        if let Err(error) = self.server.remove() {
            (self.log)(Level::Warning, format_args!("{device} is not removed: {}", chain(&error)));
        }
    }

    fn end(self: Box<Self>, grace: Duration) {
        let kept = self.kept.clone();
        self.stop(grace);
        // The keeper lets go last. Without the number, nobody would find a device that this daemon
        // leaves if it dies before.
        if let Some((link, name)) = kept {
            let _ = link.let_go(&name);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_number_is_read_by_who_maps_the_page_next() {
        let number = Number(Memory::shared("weir-test", PAGE_SIZE).expect("memory"));
        assert_eq!(number.get(), None);
        number.set(Device(0));
        let fd = number.0.fd().expect("shared").try_clone_to_owned().expect("descriptor");
        drop(number);
        assert_eq!(Number(Memory::adopt(fd).expect("sealed")).get(), Some(Device(0)));
    }
}
