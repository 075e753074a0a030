//! The front end that each volume of a pool has for itself: a ublk device, or a file by FUSE.

use super::running::StartEach;
use super::{FrontEnd, Fuse, PreparedUblk, Served};
use crate::config::Config;
use crate::environment::Environment;
use crate::error::Error;
use crate::keeper::{Held, Link};
use crate::volumes::Volumes;
use std::sync::Arc;
use weir_core::chain;
use weir_core::log::Level;
use weir_volume::Volume;

/// The start of the keeper's names for the pages with the numbers of ublk devices.
const UBLK: &str = "ublk:";

/// Starts the front ends of a pool's volumes.
#[derive(Debug)]
pub struct Each {
    options: Config,
    keeper: Option<Link>,
    environment: Environment,
    /// The ublk devices of an earlier daemon, each with its volume's name.
    found: Vec<(String, PreparedUblk)>,
}

impl Each {
    /// Prepares to serve the volumes of a pool; `None` if the options ask for no pool, or for no
    /// such front end. Looks for devices of an earlier daemon: the number of lanes depends on them.
    ///
    /// # Errors
    /// Fails when a driver does not hand over a device.
    pub fn new(
        options: &Config,
        mut keeper: Option<(&Link, &mut Held)>,
        environment: &Environment,
    ) -> Result<Option<Self>, Error> {
        if options.pool.is_none() || (options.ublk.is_none() && options.fuse.is_none()) {
            return Ok(None);
        }
        let mut found = Vec::new();
        if let (Some(ublk), Some((link, held))) = (&options.ublk, &mut keeper) {
            let names = held.names().filter_map(|name| name.strip_prefix(UBLK));
            for name in names.map(str::to_owned).collect::<Vec<_>>() {
                let kept = format!("{UBLK}{name}");
                let device = PreparedUblk::new(options, ublk, &kept, Some((link, &mut **held)), environment)?;
                found.push((name, device));
            }
        }
        let keeper = keeper.map(|(link, _)| link.clone());
        Ok(Some(Each { options: options.clone(), keeper, environment: environment.clone(), found }))
    }

    /// Number of lanes that the front ends of all volumes may take together.
    pub fn lanes(&self) -> usize {
        let most = self.options.pool.map_or(0, usize::from);
        let fuse = self.options.fuse.as_ref().map_or(0, |fuse| usize::from(fuse.threads));
        let ublk = self.options.ublk.as_ref().map_or(0, |ublk| PreparedUblk::queues(ublk, &self.environment));
        let found = self.found.iter().map(|(_, device)| device.lanes());
        // An earlier daemon's device keeps the number of queues that it was made with.
        most * fuse
            + found.map(|lanes| lanes.max(ublk)).sum::<usize>()
            + most.saturating_sub(self.found.len()) * ublk
    }

    /// Serves every volume of the earlier daemon. Takes over what that daemon has served; the rest
    /// is served anew.
    ///
    /// # Errors
    /// Fails when a front end cannot be taken over. A volume that cannot be served anew is still
    /// there, and the log says so.
    pub fn resume(&mut self, volumes: &Volumes, mut held: Option<&mut Held>) -> Result<Vec<Served>, Error> {
        let mut all = Vec::new();
        let names: Vec<String> = volumes.list().into_iter().map(|volume| volume.name).collect();
        for name in names {
            let Some((_, volume)) = volumes.find(name.as_bytes()) else { continue };
            let found = self.found.iter().position(|(of, _)| *of == name);
            let found = found.map(|at| self.found.swap_remove(at).1);
            // A volume without a device may be in `found` too. An earlier daemon hands the keeper a
            // page for the device's number before it makes the device. That daemon may have died
            // between these two steps.
            let is_taken_over = found.as_ref().is_some_and(PreparedUblk::is_found)
                || held.as_ref().is_some_and(|held| held.any(|kept| kept.starts_with(&fuse_prefix(&name))));
            let mut none = Held::default();
            match self.serve_with(&name, &volume, found, held.as_deref_mut().unwrap_or(&mut none)) {
                Ok(served) => all.push(served),
                Err(error) if !is_taken_over => (self.environment.log)(
                    Level::Warning,
                    format_args!("volume {name} has no device, and gets one when it can: {}", chain(&error)),
                ),
                Err(error) => return Err(error),
            }
        }
        self.found.clear();
        Ok(all)
    }

    fn serve_with(
        &self,
        name: &str,
        volume: &Arc<Volume>,
        found: Option<PreparedUblk>,
        held: &mut Held,
    ) -> Result<Served, Error> {
        let Each { options, environment, .. } = self;
        let keeper = self.keeper.as_ref().map(|link| (link, held));
        let front_end: Box<dyn FrontEnd> = if let Some(ublk) = &options.ublk {
            let kept = format!("{UBLK}{name}");
            let is_found = found.as_ref().is_some_and(PreparedUblk::is_found);
            let prepared =
                found.map_or_else(|| PreparedUblk::new(options, ublk, &kept, keeper, environment), Ok);
            let started = prepared.and_then(|prepared| prepared.start(volume, &environment.log));
            // If the device is an earlier daemon's, the keeper goes on holding its page. The next
            // daemon then tries again to take the device over.
            if started.is_err() && !is_found {
                let _ = self.keeper.as_ref().map(|link| link.let_go(&kept));
            }
            Box::new(started?)
        } else {
            let fuse = options.fuse.as_ref().expect("the options ask for one of the two");
            let file = fuse.file_of(name);
            let prefix = fuse_prefix(name);
            Box::new(Fuse::start(volume, options, (fuse, &file), &prefix, keeper, &environment.log)?)
        };
        Ok(Served { volume: Some(name.to_owned()), front_end })
    }
}

impl StartEach for Each {
    fn serve(&self, name: &str, volume: &Arc<Volume>) -> Result<Served, Error> {
        self.serve_with(name, volume, None, &mut Held::default())
    }
}

/// The start of the keeper's names for the mount of a volume. No volume's name has a colon.
fn fuse_prefix(volume: &str) -> String {
    format!("fuse:{volume}:")
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::config::Ublk;
    use crate::environment::tests::quiet;
    use crate::keeper::played::Keeper;
    use std::os::fd::AsFd as _;
    use weir_core::{Memory, PAGE_SIZE};
    use weir_store::Host;
    use weir_volume::Pool;

    #[test]
    fn a_volume_whose_device_was_never_made_counts_as_not_taken_over() {
        let config = weir_volume::Config { pages: 8, lanes: 1, depth: 4 };
        let host = Host::new(config.slots()).expect("memory");
        let pool = Pool::create(config, vec![Arc::new(host)]).expect("a pool");
        let volume = pool.volume(8).expect("room");
        let volumes = Volumes::new(&pool, false, vec![("a".to_owned(), volume)], 1, None);
        // The earlier daemon died between two steps. It had handed the keeper the page for the
        // device's number, and had not made the device yet.
        let keeper = Keeper::default();
        let page = Memory::shared("weir-test", PAGE_SIZE).expect("memory");
        let fd = page.fd().expect("shared").as_fd().try_clone_to_owned().expect("a descriptor");
        keeper.0.lock().expect("no panic").insert(format!("{UBLK}a"), fd);
        // Every driver refuses a device of depth 0.
        let ublk = Some(Ublk { queues: Some(1), depth: 0 });
        let options = Config { pool: Some(1), ublk, ..Config::default() };
        let (link, mut held) = (keeper.link(), keeper.held());
        let each = Each::new(&options, Some((&link, &mut held)), &quiet()).expect("no device");
        let mut each = each.expect("a pool");
        assert_eq!(each.found.len(), 1);
        let served = each.resume(&volumes, Some(&mut held)).expect("the daemon goes on without it");
        assert!(served.is_empty() && keeper.0.lock().expect("no panic").is_empty());
    }
}
