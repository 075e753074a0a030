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
use crate::front_ends::{self, Each, FrontEnd, FrontEnds, Fuse, Nbd, PreparedUblk, Served, Share};
use crate::keeper::{self, Held, Link};
use crate::pages::{self, VolumeOptions};
use crate::programs::{self, Programs};
use crate::stages::{self, Stages};
use crate::start::Start;
use crate::volumes::Volumes;
use crate::worker::{self, Worker, stopping};
use std::sync::Arc;
use std::time::{Duration, Instant};
use weir_core::log::Level;
use weir_core::swap_safety::Protections;
use weir_core::{ByteSize, PAGE_SIZE, seal};
use weir_pager::link::Order;
use weir_store::{Joined, Room, Survive, Tell};
use weir_system::latency;
use weir_volume::Pool;

/// Longest wait for the connections of a volume that is to be removed.
const CLIENTS: Duration = Duration::from_secs(2);
/// Pause between two looks at these connections.
const CLIENTS_TRY: Duration = Duration::from_millis(10);

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
    front_ends: Arc<FrontEnds>,
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
        }
        if let Some(share) = &options.share {
            serve(Box::new(Share::start(&volumes, options, share, log)?));
        }
        if let Some(each) = &mut each {
            front_ends.extend(each.resume(&volumes, keeper.as_mut().map(|(_, held)| held))?);
        }
        let gives_back: Vec<bool> = (0..pool.stores().count()).map(|at| options.gives_back(at)).collect();
        let worker = Worker::start(pool, &gives_back, environment)?;
        let programs =
            options.programs.as_deref().map(|path| Programs::start(path, environment)).transpose()?;
        seal::seal(seal::policy_from_environment());
        let front_ends = FrontEnds::new(front_ends, each.map(|each| Box::new(each) as _), environment);
        for volume in volumes.list().iter().filter(|volume| front_ends.lacks(&volume.name)) {
            front_ends.serve_later(&volumes, &volume.name);
        }
        let shared = Shared {
            volumes,
            front_ends,
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

    /// Calls `then` once those parts of the stores are open that are opened after the start. Before
    /// each call, logs the outcome. This function itself returns without a wait.
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
        self.shared.front_ends.in_use().or_else(|| self.shared.attachments.in_use())
    }

    /// Removes the daemon's devices, and lets no new one come. If a program keeps a device open,
    /// returns the program's name and the next step, and the daemon serves on. Call this before
    /// [`stop`](Daemon::stop).
    pub fn let_go(&self) -> Option<String> {
        let Shared { front_ends, attachments, .. } = &*self.shared;
        // A device may have been attached before the front ends let no new one come.
        let user = front_ends.let_go().or_else(|| attachments.in_use());
        if user.is_some() {
            front_ends.reopen();
        }
        user
    }

    /// Answers the requests that were received, then disconnects. Removes the sockets before it
    /// returns. A change of a volume that is under way fails, and leaves no device behind. Programs
    /// of a run that are still there are killed: their pages end with the daemon.
    pub fn stop(self) {
        if let Some(programs) = &self.shared.programs {
            programs.end();
        }
        self.shared.front_ends.stop();
        self.shared.worker.stop();
        self.shared.front_ends.wait_for_change();
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

    fn create_volume(&self, name: &str, bytes: Option<u64>) -> Result<Moved, Error> {
        let _alone = self.front_ends.alone()?;
        self.change(|volumes| {
            volumes.create(name, bytes.map(ByteSize), &self.worker)?;
            let served = self.front_ends.serve(volumes, name).map(drop);
            served.map_err(|error| {
                // Clients do not know the new volume yet. Only a client that guessed its name can
                // have it, and make this removal fail.
                let undone = volumes.remove(name, &self.worker, &mut |_| {});
                let left = || format!("volume {name} stays without a device; weir volume remove {name}");
                error.unless_undone(undone, left)
            })
        })
    }

    fn resize_volume(&self, name: &str, bytes: u64, tell: &mut dyn FnMut(Progress)) -> Result<Moved, Error> {
        let _alone = self.front_ends.alone()?;
        if self.front_ends.has(name) {
            let what = format!("volume {name} has a device of its size; remove it and make it again");
            return Err(Error::new(ErrorKind::Refused, what));
        }
        self.change(|volumes| volumes.resize(name, ByteSize(bytes), &self.worker, tell))
    }

    fn remove_volume(&self, name: &str, tell: &mut dyn FnMut(Progress)) -> Result<Moved, Error> {
        let _alone = self.front_ends.alone()?;
        // With an attached device, the removal of the volume is refused, with the reason.
        if self.attachments.device_of(name).is_none() {
            self.front_ends.withdraw(name)?;
            self.wait_for_clients(name);
        }
        let removed = self.change(|volumes| volumes.remove(name, &self.worker, tell));
        removed.map_err(|error| {
            let served = self.front_ends.serve(&self.volumes, name).map(drop);
            if served.is_err() && !self.front_ends.is_closed() {
                // Threads of its old front end may hold the memory that a new one needs, for as
                // long as a store does not answer them.
                self.front_ends.serve_later(&self.volumes, name);
            }
            error.unless_undone(served, || format!("volume {name} has no device, and gets one when it can"))
        })
    }

    fn attached(&self, device: Attachment) -> Result<(), Error> {
        let number = device.device;
        self.attachments.attached(device)?;
        if self.front_ends.is_closed() {
            // The daemon is stopping, and does not check again whether a program uses the device.
            // So the daemon must not have the device.
            self.attachments.detached(number)?;
            return Err(stopping());
        }
        Ok(())
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
    /// Waits for clients of a volume that have gone a moment ago: their connections are still being
    /// taken down. A client that stays is not waited for.
    fn wait_for_clients(&self, name: &str) {
        let clock = &self.environment.clock;
        let begun = clock.now();
        while self.volumes.is_in_use(name) && clock.now() - begun < CLIENTS {
            clock.sleep(CLIENTS_TRY);
        }
    }

    /// Changes a volume, and reports how many bytes the volumes' sizes changed by.
    fn change(&self, change: impl FnOnce(&Volumes) -> Result<(), Error>) -> Result<Moved, Error> {
        let begun = self.environment.clock.now();
        let (before, refused) = (self.volumes.bytes(), self.pool().map_bytes_refused());
        let changed = change(&self.volumes);
        let refused = self.pool().map_bytes_refused() - refused;
        if refused > 0 {
            (self.environment.log)(
                Level::Warning,
                format_args!(
                    "the system does not take back {} of the page map (fallocate of a memfd fails), so Weir keeps that memory until the daemon ends",
                    ByteSize(refused)
                ),
            );
        }
        changed?;
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
        let stores: Vec<_> = volume.stores.iter().map(|store| Store::of(store, volume.reads)).collect();
        let mut programs = self.programs.as_ref().map(Programs::list).unwrap_or_default();
        programs.iter_mut().for_each(|program| Store::tell(&stores, program));
        Status {
            schema: SCHEMA,
            version: env!("CARGO_PKG_VERSION").to_owned(),
            pid: std::process::id(),
            upgrade_failed: keeper::upgrade_failed(),
            uptime_s: up.as_secs(),
            volume: VolumeCounts::of(&volume, self.pool().memory_bytes()),
            volumes: self.volumes.list(),
            free_bytes: self.volumes.free_bytes(),
            programs,
            stores,
            read: Io::reads(&volume),
            write: Io::writes(&volume),
            rates: Some(self.looks.look(up, volume.reads, volume.writes)),
            discarded: volume.discards,
            background: self.worker.status(),
            exports: self.front_ends.exports(),
            attached: self.attachments.names(),
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
    use crate::control::{self, Request};
    use crate::environment::tests::{Quick, quiet};
    use crate::front_ends::played::{Devices, Making};
    use std::sync::Mutex;
    use std::sync::atomic::Ordering;
    use std::sync::mpsc::channel;
    use std::thread;
    use weir_core::chain;
    use weir_store::Host;

    /// A daemon with a pool of at most two volumes, each of which has one of these devices.
    fn daemon(devices: &Devices) -> Daemon {
        let environment = Environment { clock: Quick::new(), ..quiet() };
        let config =
            weir_volume::Config { pages: 100, lanes: worker::lanes(environment.processors), depth: 4 };
        let host = Host::new(config.slots()).expect("memory");
        let pool = Pool::create(config, vec![Arc::new(host)]).expect("a pool");
        let attachments = Attachments::new(None, None, &environment.log);
        let volumes = Arc::new(Volumes::new(&pool, false, Vec::new(), 2, None));
        volumes.mind(&attachments);
        let shared = Shared {
            volumes,
            front_ends: FrontEnds::new(Vec::new(), Some(Box::new(devices.clone())), &environment),
            worker: Worker::start(&pool, &[true], &environment).expect("threads"),
            attachments,
            protections: Protections::default(),
            swap: false,
            begun: environment.clock.now(),
            environment,
            looks: Looks::default(),
            programs: None,
            stays: None,
        };
        Daemon { shared: Arc::new(shared) }
    }

    fn make(service: &dyn Service, name: &str, pages: u64) -> Result<Moved, String> {
        service.create_volume(name, Some(pages * PAGE_SIZE as u64)).map_err(|error| chain(&error))
    }

    #[test]
    fn a_volume_that_is_made_while_the_daemon_stops_leaves_no_device_behind() {
        let (making, is_made) = channel();
        let (go_on, wait) = channel();
        let wait = Mutex::new(wait);
        let making = move || {
            let _ = making.send(());
            let _ = wait.lock().expect("no panic").recv();
        };
        let devices = Devices { making: Making(Some(Arc::new(making))), ..Devices::default() };
        let daemon = daemon(&devices);
        let service = daemon.service();
        let maker = thread::spawn({
            let service = daemon.service();
            move || make(&*service, "a", 10)
        });
        is_made.recv().expect("its device is being made");
        let front_ends = Arc::clone(&daemon.shared.front_ends);
        let stopper = thread::spawn(move || daemon.stop());
        while !front_ends.is_closed() {
            thread::yield_now();
        }
        assert!(!stopper.is_finished(), "it waits for the volume");
        go_on.send(()).expect("the maker waits");
        let said = maker.join().expect("no panic").expect_err("the daemon stops");
        assert!(said.starts_with("the daemon is stopping"), "{said}");
        stopper.join().expect("no panic");
        assert_eq!(devices.count.load(Ordering::SeqCst), 0);
        let said = make(&*service, "b", 10).expect_err("the daemon has stopped");
        assert!(said.starts_with("the daemon is stopping"), "{said}");
    }

    #[test]
    fn a_device_that_is_attached_while_the_daemon_stops_is_refused_and_forgotten() {
        let daemon = daemon(&Devices::default());
        let attach = || {
            daemon.shared.attached(Attachment {
                device: 7,
                address: "unix:/run/weir/nbd.sock".into(),
                name: "a".into(),
                connections: 1,
                request_timeout: 5,
                reconnect_timeout: 600,
            })
        };
        attach().expect("the daemon serves");
        assert_eq!((daemon.let_go(), daemon.status().attached.len()), (None, 1), "nothing uses it");
        let refused = attach().expect_err("the daemon stops");
        assert_eq!((refused.kind(), daemon.status().attached.len()), (ErrorKind::Stopping, 0));
        daemon.stop();
    }

    #[test]
    fn a_volume_whose_removal_is_refused_gets_its_device_again_as_soon_as_it_can() {
        let devices = Devices::default();
        let daemon = daemon(&devices);
        let service = daemon.service();
        make(&*service, "a", 10).expect("there is room");
        // A thread of the device still waits for a store.
        let (_, held) = daemon.shared.volumes.find(b"a").expect("it is there");
        devices.refused.store(3, Ordering::SeqCst);
        let refused = service.remove_volume("a", &mut |_| {}).expect_err("it is in use");
        let said = chain(&refused);
        assert!(said.starts_with("volume a is in use"), "{said}");
        let more = "; volume a has no device, and gets one when it can: entity not found";
        assert!(said.ends_with(more), "{said}");
        let begun = Instant::now();
        while devices.count.load(Ordering::SeqCst) == 0 {
            assert!(begun.elapsed() < Duration::from_secs(60));
            thread::yield_now();
        }
        drop(held);
        service.remove_volume("a", &mut |_| {}).expect("nobody has it");
        assert_eq!((devices.count.load(Ordering::SeqCst), daemon.status().volumes.len()), (0, 0));
        daemon.stop();
    }

    #[test]
    fn a_volume_that_can_be_neither_made_nor_unmade_is_told_of_with_both_reasons() {
        let devices = Devices::default();
        let daemon = daemon(&devices);
        let service = daemon.service();
        devices.refused.store(2, Ordering::SeqCst);
        assert_eq!(make(&*service, "a", 10), Err("entity not found".to_owned()));
        assert_eq!(daemon.status().volumes.len(), 0);
        daemon.shared.worker.stop();
        let said = make(&*service, "a", 10).expect_err("no device");
        let both = "entity not found; volume a stays without a device; weir volume remove a: \
                    the daemon is stopping, so the volume does not change now";
        assert_eq!(said, both);
    }

    #[test]
    fn however_many_changes_of_volumes_wait_memory_is_given_back_for_a_sleep_and_devices_are_noted() {
        let (making, is_made) = channel();
        let (go_on, wait) = channel::<()>();
        let wait = Mutex::new(wait);
        let making = move || {
            let _ = making.send(());
            let _ = wait.lock().expect("no panic").recv();
        };
        let devices = Devices { making: Making(Some(Arc::new(making))), ..Devices::default() };
        let daemon = daemon(&devices);
        let path = std::env::temp_dir().join(format!("weir-control-{}", std::process::id()));
        let server = control::Server::start(&path, daemon.service()).expect("a socket");
        let ask = |request| control::ask_for(&path, request, |_| {}).map_err(|error| error.to_string());
        let create = || ask(Request::VolumeCreate { name: "a".to_owned(), bytes: None });
        thread::scope(|scope| {
            let first = scope.spawn(create);
            is_made.recv().expect("the first one is under way");
            let more: Vec<_> = (0..30).map(|_| scope.spawn(create)).collect();
            let is_refused = |said: &Result<Moved, String>| {
                said.as_ref().is_err_and(|said| said.contains("16 such requests are under way; wait"))
            };
            let begun = Instant::now();
            while more.iter().filter(|one| one.is_finished()).count() < 15 {
                assert!(begun.elapsed() < Duration::from_secs(60), "the others are refused");
                thread::yield_now();
            }
            for request in [Request::Sleep, Request::Take { bytes: None }] {
                assert!(!is_refused(&ask(request.clone())), "{request:?}");
            }
            control::detached(&path, 7).expect("it is noted");
            drop(go_on);
            let ended = more.into_iter().map(|one| one.join().expect("no panic"));
            assert_eq!(ended.filter(is_refused).count(), 15);
            first.join().expect("no panic").expect("there is room");
        });
        drop(server);
        daemon.stop();
    }

    #[test]
    fn a_volume_without_a_size_has_all_the_room_that_is_left() {
        let daemon = daemon(&Devices::default());
        let service = daemon.service();
        make(&*service, "a", 30).expect("there is room");
        let made = service.create_volume("b", None).expect("there is room");
        assert_eq!((made.pages, daemon.status().free_bytes), (70, 0));
        let removed = service.remove_volume("a", &mut |_| {}).expect("nobody has it");
        assert_eq!(removed.pages, 30);
        service.create_volume("c", None).expect("there is room");
        service.remove_volume("c", &mut |_| {}).expect("nobody has it");
        make(&*service, "a", 30).expect("there is room");
        let said = chain(&service.create_volume("d", None).expect_err("there is none"));
        assert!(said.starts_with("there is no room for another volume"), "{said}");
        daemon.stop();
    }
}
