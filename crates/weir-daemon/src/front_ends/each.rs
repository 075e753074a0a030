//! The front ends that each volume of a pool has for itself: a ublk device, or a file by FUSE.

use super::{Fuse, PreparedUblk, Served};
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
            let is_taken_over = found.is_some()
                || held.as_ref().is_some_and(|held| held.any(|kept| kept.starts_with(&fuse_prefix(&name))));
            let mut none = Held::default();
            match self.serve_with(&name, &volume, found, held.as_deref_mut().unwrap_or(&mut none)) {
                Ok(served) => all.extend(served),
                Err(error) if !is_taken_over => (self.environment.log)(
                    Level::Warning,
                    format_args!(
                        "volume {name} has no device: {}; remove it and make it again",
                        chain(&error)
                    ),
                ),
                Err(error) => return Err(error),
            }
        }
        self.found.clear();
        Ok(all)
    }

    /// Serves a new volume.
    ///
    /// # Errors
    /// Fails when a device or a mount cannot be had; then nothing of the volume is served.
    pub fn serve(&self, name: &str, volume: &Arc<Volume>) -> Result<Vec<Served>, Error> {
        self.serve_with(name, volume, None, &mut Held::default())
    }

    fn serve_with(
        &self,
        name: &str,
        volume: &Arc<Volume>,
        found: Option<PreparedUblk>,
        held: &mut Held,
    ) -> Result<Vec<Served>, Error> {
        let Each { options, environment, .. } = self;
        let is_found = found.is_some();
        let served = |front_end| Served { volume: Some(name.to_owned()), front_end };
        let mut all = Vec::new();
        if let Some(fuse) = &options.fuse {
            let file = fuse.file_of(name);
            let keeper = self.keeper.as_ref().map(|link| (link, &mut *held));
            let prefix = fuse_prefix(name);
            let fuse = Fuse::start(volume, options, (fuse, &file), &prefix, keeper, &environment.log)?;
            all.push(served(Box::new(fuse)));
        }
        if let Some(ublk) = &options.ublk {
            let kept = format!("{UBLK}{name}");
            let keeper = self.keeper.as_ref().map(|link| (link, &mut *held));
            let prepared = match found {
                Some(found) => Ok(found),
                None => PreparedUblk::new(options, ublk, &kept, keeper, environment),
            };
            match prepared.and_then(|prepared| prepared.start(volume, &environment.log)) {
                Ok(ublk) => all.push(served(Box::new(ublk))),
                // The next daemon tries again: the keeper holds all of it.
                Err(error) if is_found => return Err(error),
                Err(error) => {
                    let _ = self.keeper.as_ref().map(|link| link.let_go(&kept));
                    all.into_iter().for_each(|served: Served| served.front_end.end(super::GRACE));
                    return Err(error);
                }
            }
        }
        Ok(all)
    }
}

/// The start of the keeper's names for the mount of a volume. No volume's name has a colon.
fn fuse_prefix(volume: &str) -> String {
    format!("fuse:{volume}:")
}
