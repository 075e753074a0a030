//! The daemon: stores, the volume over them, and the front ends. `weir serve` runs one in the
//! foreground, and `weir try` runs one in its own process.

use crate::attach::{Attachment, Attachments, NOTE};
use crate::config::Config;
use crate::control::{
    Condition, CpuLatency, Io, Looks, Moved, Progress, Protection, SCHEMA, Service, Status, Store,
    Volume as VolumeCounts,
};
use crate::environment::Environment;
use crate::error::{Error, ErrorKind};
use crate::front_ends::{self, Each, FrontEnd, Fuse, GRACE, Nbd, PreparedUblk, Served, Share};
use crate::keeper::{self, Held, Link};
use crate::pages::{self, VolumeOptions};
use crate::programs::{self, Programs};
use crate::stages::{self, Stages};
use crate::start::Start;
use crate::volumes::Volumes;
use crate::worker::{self, Worker};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};
use weir_core::log::Level;
use weir_core::swap_safety::Protections;
use weir_core::{ByteSize, PAGE_SIZE, chain, seal};
use weir_pager::link::Order;
use weir_store::{Joined, Room, Survive, Tell};
use weir_system::latency;
use weir_volume::Pool;

/// Longest wait for a program that has the device open. Such a program may be udev, which opens a
/// device for about a second after somebody has written to it.
const LET_GO: Duration = Duration::from_secs(10);
/// Longest wait for the connections of a volume that is to be removed.
const CLIENTS: Duration = Duration::from_secs(2);
/// Pause between two looks at these connections.
const CLIENTS_TRY: Duration = Duration::from_millis(10);
/// Pause between two tries to remove the device.
const TRY: Duration = Duration::from_millis(250);

/// Number of pages that one connection moves at a time at slow stores: a request of 1 MiB.
const DEPTH: usize = 256;

/// A running daemon.
#[derive(Debug)]
pub struct Daemon {
    shared: Arc<Shared>,
}

/// The part of the daemon that the control socket reads.
#[derive(Debug)]
struct Shared {
    volumes: Arc<Volumes>,
    /// The front ends, until the daemon stops. Only the control plane takes the lock, never an I/O
    /// thread.
    front_ends: Mutex<Vec<Served>>,
    /// The front ends of a pool's volumes, if each volume has some for itself.
    each: Option<Each>,
    /// Locked while a volume is made or removed with its front ends.
    changing: Mutex<()>,
    worker: Worker,
    attachments: Arc<Attachments>,
    protections: Protections,
    swap: bool,
    begun: Instant,
    environment: Environment,
    looks: Looks,
    programs: Option<Programs>,
    /// The name of a store that cannot be emptied before the machine sleeps, and that may lose its
    /// pages then.
    stays: Option<String>,
}

impl Daemon {
    /// Opens the stores, makes the volume, listens, and seals the allocator. The daemon ends with
    /// this process, and has no protection for swap.
    ///
    /// # Errors
    /// Fails when a store cannot be opened, a socket cannot be made, or the stores are too small
    /// for the requested size.
    pub fn start(options: &Config, start: &mut Start<'_>, environment: &Environment) -> Result<Self, Error> {
        Self::start_kept(options, Protections::default(), None, start, environment)
    }

    /// Opens the stores and makes the volume, or takes over the volume that the keeper holds. Then
    /// listens, and seals the allocator: from here on the I/O path allocates nothing.
    ///
    /// # Errors
    /// Fails when a store cannot be opened, a socket cannot be made, or the stores are too small
    /// for the requested size.
    pub(crate) fn start_kept(
        options: &Config,
        protections: Protections,
        mut keeper: Option<(&Link, Held)>,
        start: &mut Start<'_>,
        environment: &Environment,
    ) -> Result<Self, Error> {
        let log = &environment.log;
        let took_over = keeper.as_ref().is_some_and(|(_, held)| !held.is_empty());
        let note = keeper.as_mut().and_then(|(_, held)| held.take(NOTE));
        let attachments = Attachments::new(keeper.as_ref().map(|(link, _)| (*link).clone()), note, log);
        let mut each = Each::new(options, reborrow(&mut keeper), environment)?;
        let ublk = match options.ublk.as_ref().filter(|_| options.pool.is_none()) {
            Some(ublk) => {
                let number = front_ends::NUMBER;
                Some(PreparedUblk::new(options, ublk, number, reborrow(&mut keeper), environment)?)
            }
            None => None,
        };
        let lanes = front_ends::lanes(options)
            + ublk.as_ref().map_or(0, PreparedUblk::lanes)
            + each.as_ref().map_or(0, Each::lanes)
            + worker::lanes(environment.processors);
        let volume_options = VolumeOptions {
            stores: &options.stores,
            backing: &options.backing,
            name: &options.name,
            size: options.size,
            pool: options.pool,
            lanes,
            depth: DEPTH,
            compress: options.compress,
            room: if options.swap { Room::Written } else { Room::Reserved },
        };
        let mut stages = keeper.as_ref().map_or_else(Stages::default, |(_, held)| held.stages());
        let volumes = pages::open(&volume_options, reborrow(&mut keeper), &mut stages, start, log)?;
        let volumes = Arc::new(volumes);
        volumes.mind(&attachments);
        let pool = volumes.pool();
        if options.swap {
            fit_for_swap(pool)?;
        }

        if options.cpu_latency
            && let Err(error) = latency::hold_in_bursts()
        {
            (log)(
                Level::Warning,
                format_args!(
                    "--cpu-latency: cannot open {} ({error}), so processors sleep as deeply as ever",
                    latency::DEVICE
                ),
            );
        }
        if let Some((link, _)) = &keeper {
            link.opening().map_err(|error| Error::of(ErrorKind::Keeper, error))?;
        }
        let mut front_ends: Vec<Served> = Vec::new();
        let mut serve = |front_end: Box<dyn FrontEnd>| front_ends.push(Served { volume: None, front_end });
        if let Some(nbd) = &options.nbd {
            let nbd = Nbd::start(&volumes, options, nbd, log)?;
            attachments.resume(nbd.kernel_connections());
            serve(Box::new(nbd));
            stages.end("connections");
        }
        if let Some(volume) = volumes.own() {
            if let Some(fuse) = &options.fuse {
                let (file, held) = ((fuse, &*fuse.file), reborrow(&mut keeper));
                serve(Box::new(Fuse::start(volume, options, file, front_ends::FUSE, held, log)?));
            }
            if let Some(ublk) = ublk {
                serve(Box::new(ublk.start(volume, log)?));
            }
            if let Some(share) = &options.share {
                serve(Box::new(Share::start(volume, options, share, log)?));
            }
        }
        if let Some(each) = &mut each {
            front_ends.extend(each.resume(&volumes, keeper.as_mut().map(|(_, held)| held))?);
        }
        let gives_back: Vec<bool> = (0..pool.stores().count()).map(|at| options.gives_back(at)).collect();
        let worker = Worker::start(pool, &gives_back, environment)?;
        let programs =
            options.programs.as_deref().map(|path| Programs::start(path, environment)).transpose()?;
        seal::seal(seal::policy_from_environment());
        let shared = Shared {
            volumes,
            front_ends: Mutex::new(front_ends),
            each,
            changing: Mutex::new(()),
            worker,
            attachments,
            protections,
            swap: options.swap,
            begun: environment.clock.now(),
            environment: environment.clone(),
            looks: Looks::default(),
            programs,
            stays: options.stays(),
        };
        if took_over {
            (log)(
                Level::Info,
                format_args!("taken over in {:.1} ms: {stages}", stages.total().as_secs_f64() * 1e3),
            );
        }
        Ok(Daemon { shared: Arc::new(shared) })
    }

    /// Some parts of stores are opened after the start. Once they are open, logs the outcome and
    /// calls `then`. Returns at once.
    pub fn when_joined(&self, then: impl Fn() + Send + Sync + 'static) {
        let log = Arc::clone(&self.shared.environment.log);
        let tell: Tell = Arc::new(move |joined: &Joined| {
            let Joined { store, stages, missing, after } = joined;
            let (after, stages) = (after.as_secs_f64() * 1e3, stages::line(stages));
            match missing {
                None => {
                    (log)(Level::Info, format_args!("{store}: all of it open after {after:.1} ms: {stages}"));
                }
                Some(why) => (log)(
                    Level::Warning,
                    format_args!("{store}: goes on by the window alone, which is slower ({why}): {stages}"),
                ),
            }
            then();
        });
        let reports = self.shared.pool().stores().filter_map(|store| store.report());
        reports.for_each(|store| store.when_joined(Arc::clone(&tell)));
    }

    /// Logs the condition of each member of the stores, and every later change. If another process
    /// could reach a member that this one cannot, this process ends as if it had been killed, and
    /// the keeper starts another daemon.
    pub fn mind_stores(&self, has_keeper: bool) {
        let Environment { log, die, .. } = &self.shared.environment;
        for store in self.shared.pool().stores() {
            let Some(report) = store.report() else { continue };
            for condition in report.conditions() {
                let condition = Condition::of(&condition);
                let (level, more) = match condition.is_slow() {
                    true => (
                        Level::Warning,
                        "; slower by far than through the window: weir doctor says what to do",
                    ),
                    false => (Level::Info, ""),
                };
                (log)(level, format_args!("{}: {condition}{more}", store.name()));
            }
            let (name, log, die) = (store.name().to_owned(), Arc::clone(log), Arc::clone(die));
            report.when_changed(Arc::new(move |changed| {
                (log)(Level::Warning, format_args!("{name}: {}", Condition::of(changed)));
                if changed.wants_another_process && has_keeper {
                    (log)(
                        Level::Warning,
                        format_args!("{name}: its pages are there for another process, so this one ends"),
                    );
                    // End the process as if it had been killed. The keeper is prepared for that.
                    die();
                }
            }));
        }
    }

    /// Names a device that would lose its pages if the daemon stopped now, and the next step; see
    /// `FrontEnd::in_use`. The check covers NBD clients of this machine's kernel, but not those of
    /// other machines.
    pub fn in_use(&self) -> Option<String> {
        let front_end = self.shared.front_ends().iter().find_map(|it| it.front_end.in_use());
        front_end.or_else(|| self.shared.attachments.in_use())
    }

    /// Removes the daemon's devices. If a program keeps a device open, returns the program's name
    /// and the next step, and the daemon serves on. Call this before [`stop`](Daemon::stop).
    pub fn let_go(&self) -> Option<String> {
        let clock = &self.shared.environment.clock;
        let begun = clock.now();
        let_go(
            &self.shared.front_ends,
            |it| it.front_end.let_go(),
            || {
                clock.sleep(TRY);
                clock.now() - begun < LET_GO
            },
        )
    }

    /// Answers the requests that were received, then disconnects. Removes the sockets before it
    /// returns.
    pub fn stop(self) {
        let front_ends = std::mem::take(&mut *self.shared.front_ends());
        for Served { front_end, .. } in front_ends {
            front_end.stop(GRACE);
        }
        self.shared.worker.stop();
        // The daemon was told to stop. So the keeper need not hold the stores' memory any longer.
        self.shared.pool().stores().filter_map(|store| store.survive()).for_each(Survive::forget);
        self.shared.pool().stores().for_each(|store| store.end());
    }

    /// The size of the daemon's own volume; or that of all volumes that its pool has room for.
    pub fn bytes(&self) -> u64 {
        let volumes = &self.shared.volumes;
        volumes.own().map_or_else(|| volumes.bytes() + volumes.free_bytes(), |own| own.bytes())
    }

    /// The daemon's status.
    pub fn status(&self) -> Status {
        self.shared.status()
    }

    /// The control socket's view of the daemon.
    pub fn service(&self) -> Arc<dyn Service> {
        Arc::clone(&self.shared) as _
    }
}

/// Makes every front end remove its device, by `remove`, which returns the reason if it cannot.
/// `again` waits a little, answers status requests meanwhile, and returns whether to try again.
fn let_go(
    front_ends: &Mutex<Vec<Served>>,
    remove: impl Fn(&mut Served) -> Option<String>,
    mut again: impl FnMut() -> bool,
) -> Option<String> {
    loop {
        let mut all = lock(front_ends);
        let user = all.iter_mut().find_map(&remove);
        drop(all);
        if user.is_none() || !again() {
            return user;
        }
    }
}

fn lock(front_ends: &Mutex<Vec<Served>>) -> MutexGuard<'_, Vec<Served>> {
    front_ends.lock().expect("nobody panics while holding it")
}

/// Whether the kernel may swap onto every store.
fn fit_for_swap(pool: &Pool) -> Result<(), Error> {
    let unfit = pool.stores().find_map(|store| Some((store, store.unfit_for_swap()?)));
    unfit.map_or(Ok(()), |(store, why)| {
        let what = format!("--swap: --store {} cannot carry swap: {why}", store.name());
        Err(Error::new(ErrorKind::Volume, what))
    })
}

impl Service for Shared {
    fn status(&self) -> Status {
        Shared::status(self)
    }

    fn give_back(&self, bytes: Option<u64>, tell: &mut dyn FnMut(Progress)) -> Result<Moved, Error> {
        self.worker.give_back(bytes, tell)
    }

    fn give_back_spare(&self, tell: &mut dyn FnMut(Progress)) -> Result<Moved, Error> {
        self.worker.give_back_spare(tell)
    }

    fn take(&self, bytes: Option<u64>, tell: &mut dyn FnMut(Progress)) -> Result<Moved, Error> {
        self.worker.take(bytes, tell)
    }

    fn sleep(&self, tell: &mut dyn FnMut(Progress)) -> Result<Moved, Error> {
        if let Some(store) = &self.stays {
            let what = format!(
                "cannot give back for a sleep: {store} is the last store, so nothing takes its pages; weir serve takes --backing PATH, or that store first"
            );
            return Err(Error::new(ErrorKind::Memory, what));
        }
        self.worker.sleep(tell)
    }

    fn wake(&self, tell: &mut dyn FnMut(Progress)) -> Result<Moved, Error> {
        self.worker.wake(tell)
    }

    fn create_volume(&self, name: &str, bytes: u64) -> Result<Moved, Error> {
        let _alone = self.alone();
        self.change(|volumes| {
            volumes.create(name, ByteSize(bytes), &self.worker)?;
            self.serve(name).inspect_err(|_| {
                // Nobody can have the new volume but a client that guessed its name.
                let _ = volumes.remove(name, &self.worker, &mut |_| {});
            })
        })
    }

    fn resize_volume(&self, name: &str, bytes: u64, tell: &mut dyn FnMut(Progress)) -> Result<Moved, Error> {
        let _alone = self.alone();
        if self.front_ends().iter().any(|it| it.volume.as_deref() == Some(name)) {
            let what = format!("volume {name} has a device of its size; remove it and make it again");
            return Err(Error::new(ErrorKind::Refused, what));
        }
        self.change(|volumes| volumes.resize(name, ByteSize(bytes), &self.worker, tell))
    }

    fn remove_volume(&self, name: &str, tell: &mut dyn FnMut(Progress)) -> Result<Moved, Error> {
        let _alone = self.alone();
        self.withdraw(name)?;
        self.wait_for_clients(name);
        let removed = self.change(|volumes| volumes.remove(name, &self.worker, tell));
        if removed.is_err()
            && let Err(error) = self.serve(name)
        {
            (self.environment.log)(
                Level::Warning,
                format_args!("volume {name} has no device: {}; remove it and make it again", chain(&error)),
            );
        }
        removed
    }

    fn attached(&self, device: Attachment) -> Result<(), Error> {
        self.attachments.attached(device)
    }

    fn detached(&self, device: u32) -> Result<(), Error> {
        self.attachments.detached(device)
    }

    fn order(&self, pid: u32, order: Order) -> Result<(), Error> {
        self.programs
            .as_ref()
            .map_or_else(|| Err(programs::unbound(pid)), |programs| programs.order(pid, order))
    }
}

fn reborrow<'a>(keeper: &'a mut Option<(&Link, Held)>) -> Option<(&'a Link, &'a mut Held)> {
    keeper.as_mut().map(|(link, held)| (&**link, held))
}

impl Shared {
    fn front_ends(&self) -> MutexGuard<'_, Vec<Served>> {
        lock(&self.front_ends)
    }

    fn alone(&self) -> MutexGuard<'_, ()> {
        self.changing.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Starts the front ends that a pool's volume has for itself, if it has none yet.
    fn serve(&self, name: &str) -> Result<(), Error> {
        let is_served = || self.front_ends().iter().any(|it| it.volume.as_deref() == Some(name));
        if let (Some(each), Some((_, volume))) = (&self.each, self.volumes.find(name.as_bytes()))
            && !is_served()
        {
            let served = each.serve(name, &volume)?;
            self.front_ends().extend(served);
        }
        Ok(())
    }

    /// Waits for clients of a volume that have gone a moment ago: their connections are still being
    /// taken down. A client that stays is not waited for.
    fn wait_for_clients(&self, name: &str) {
        let clock = &self.environment.clock;
        let begun = clock.now();
        while self.volumes.is_in_use(name)
            && self.attachments.device_of(name).is_none()
            && clock.now() - begun < CLIENTS
        {
            clock.sleep(CLIENTS_TRY);
        }
    }

    /// Ends the front ends that a pool's volume has for itself.
    ///
    /// # Errors
    /// Fails when a program uses one of them, or an attached device the volume. Then all of them
    /// serve on.
    fn withdraw(&self, name: &str) -> Result<(), Error> {
        let is_its = |it: &Served| it.volume.as_deref() == Some(name);
        if self.attachments.device_of(name).is_some() {
            // The removal of the volume is refused, with the reason.
            return Ok(());
        }
        let clock = &self.environment.clock;
        let begun = clock.now();
        let user = self.front_ends().iter().filter(|it| is_its(it)).find_map(|it| it.front_end.in_use());
        let user = user.or_else(|| {
            let withdraw = |it: &mut Served| is_its(it).then(|| it.front_end.withdraw()).flatten();
            let_go(&self.front_ends, withdraw, || {
                clock.sleep(TRY);
                clock.now() - begun < LET_GO
            })
        });
        if let Some(user) = user {
            return Err(Error::new(ErrorKind::Refused, format!("volume {name}: {user}, then try again")));
        }
        let its: Vec<Served> = self.front_ends().extract_if(.., |it| is_its(it)).collect();
        its.into_iter().for_each(|it| it.front_end.end(GRACE));
        Ok(())
    }

    /// Changes a volume, and reports how many bytes the volumes' sizes changed by.
    fn change(&self, change: impl FnOnce(&Volumes) -> Result<(), Error>) -> Result<Moved, Error> {
        let begun = self.environment.clock.now();
        let before = self.volumes.bytes();
        change(&self.volumes)?;
        let bytes = self.volumes.bytes().abs_diff(before);
        let seconds = (self.environment.clock.now() - begun).as_secs_f64();
        Ok(Moved { bytes, left_bytes: 0, pages: bytes / PAGE_SIZE as u64, seconds })
    }

    fn pool(&self) -> &Arc<Pool> {
        self.volumes.pool()
    }

    fn status(&self) -> Status {
        let volume = self.pool().status();
        let up = self.environment.clock.now() - self.begun;
        Status {
            schema: SCHEMA,
            version: env!("CARGO_PKG_VERSION").to_owned(),
            pid: std::process::id(),
            upgrade_failed: keeper::upgrade_failed(),
            uptime_s: up.as_secs(),
            volume: VolumeCounts::of(&volume, self.pool().memory_bytes()),
            volumes: self.volumes.list(),
            free_bytes: self.volumes.free_bytes(),
            stores: volume.stores.iter().map(|store| Store::of(store, volume.reads)).collect(),
            read: Io::reads(&volume),
            write: Io::writes(&volume),
            rates: Some(self.looks.look(up, volume.reads, volume.writes)),
            discarded: volume.discards,
            background: self.worker.status(),
            exports: self.front_ends().iter().flat_map(Served::exports).collect(),
            attached: self.attachments.names(),
            programs: self.programs.as_ref().map(Programs::list).unwrap_or_default(),
            cpu_latency: latency::bursts().map(|it| CpuLatency { held: it.held, bursts: it.count }),
            protection: Protection {
                swap: self.swap,
                io_flusher: self.protections.io_flusher,
                memory_locked: self.protections.memory_locked,
                oom_exempt: self.protections.oom_exempt,
                io_allocations: seal::violations(),
            },
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::control::Export;

    /// A front end with a device that a program keeps open. The first attempts to remove the device
    /// fail; the number says how many.
    #[derive(Debug)]
    struct Open(u32);

    impl FrontEnd for Open {
        fn exports(&self) -> Vec<Export> {
            Vec::new()
        }

        fn let_go(&mut self) -> Option<String> {
            self.0 = self.0.checked_sub(1)?;
            Some("in use".to_owned())
        }

        fn stop(self: Box<Self>, _grace: Duration) {}
    }

    #[test]
    fn a_device_that_udev_looks_at_goes_and_one_that_stays_open_is_served_on() {
        for (open, most, user) in [(0, 0, None), (3, 9, None), (3, 2, Some("in use".to_owned()))] {
            let served = |open| Served { volume: None, front_end: Box::new(Open(open)) };
            let front_ends = Mutex::new(vec![served(0), served(open)]);
            let mut tries = 0;
            let told = let_go(
                &front_ends,
                |it| it.front_end.let_go(),
                || {
                    assert!(front_ends.try_lock().is_ok(), "status is answered meanwhile");
                    tries += 1;
                    tries <= most
                },
            );
            assert_eq!(told, user, "{open} more tries, of {most}");
        }
    }
}
