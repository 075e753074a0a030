//! The front ends of a running daemon: those of its own volume, and those that come and go with the
//! volumes of a pool.

use super::{GRACE, Served};
use crate::control::Export;
use crate::environment::Environment;
use crate::error::{Error, ErrorKind};
use crate::volumes::Volumes;
use crate::worker::stopping;
use std::fmt;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::thread;
use std::time::Duration;
use weir_core::log::Level;
use weir_volume::Volume;

/// Longest wait for a program that has the device open. Such a program may be udev, which opens a
/// device for about a second after somebody has written to it.
const LET_GO: Duration = Duration::from_secs(10);
/// Pause between two tries to remove the device.
const TRY: Duration = Duration::from_millis(250);
/// The first and the longest pause before a volume without its device gets one again.
const AGAIN: (Duration, Duration) = (Duration::from_secs(1), Duration::from_secs(60));

/// Starts the front end that each volume of a pool has for itself.
pub trait StartEach: fmt::Debug + Send + Sync {
    /// Starts the front end of a volume.
    ///
    /// # Errors
    /// Fails when a device or a mount cannot be had; then nothing of the volume is served.
    fn serve(&self, name: &str, volume: &Arc<Volume>) -> Result<Served, Error>;
}

/// The front ends of a running daemon. Only the control plane takes their lock, never an I/O
/// thread.
#[derive(Debug)]
pub struct FrontEnds {
    list: Mutex<List>,
    /// Starts the front ends of a pool's volumes, if each volume has one for itself.
    each: Option<Box<dyn StartEach>>,
    /// Locked while a volume changes together with its front end.
    changing: Mutex<()>,
    environment: Environment,
}

#[derive(Debug)]
struct List {
    all: Vec<Served>,
    /// Whether the daemon is stopping. Then no further front end starts, since nobody would end it.
    is_closed: bool,
    /// The volumes that have no front end, because it could not be started so far.
    lacking: Vec<String>,
}

impl FrontEnds {
    /// Takes over front ends that run already.
    pub fn new(all: Vec<Served>, each: Option<Box<dyn StartEach>>, environment: &Environment) -> Arc<Self> {
        let list = Mutex::new(List { all, is_closed: false, lacking: Vec::new() });
        Arc::new(FrontEnds { list, each, changing: Mutex::new(()), environment: environment.clone() })
    }

    /// The front ends' addresses and connections, for status.
    pub fn exports(&self) -> Vec<Export> {
        self.list().all.iter().flat_map(Served::exports).collect()
    }

    /// Names a device that carries swap or a file system, with the command that ends that.
    pub fn in_use(&self) -> Option<String> {
        self.list().all.iter().find_map(|it| it.front_end.in_use())
    }

    /// Whether a volume of a pool has a front end for itself.
    pub fn has(&self, volume: &str) -> bool {
        self.list().all.iter().any(|it| it.is_of(volume))
    }

    /// Whether a volume of a pool should have a front end for itself, and has none.
    pub fn lacks(&self, volume: &str) -> bool {
        self.each.is_some() && !self.has(volume)
    }

    /// Whether the daemon is stopping.
    pub fn is_closed(&self) -> bool {
        self.list().is_closed
    }

    /// Waits for a change of a volume that is under way, and locks out others.
    ///
    /// # Errors
    /// Fails when the daemon stops.
    pub fn alone(&self) -> Result<MutexGuard<'_, ()>, Error> {
        let alone = self.changing.lock().unwrap_or_else(PoisonError::into_inner);
        if self.is_closed() { Err(stopping()) } else { Ok(alone) }
    }

    /// Removes all devices, and lets no new device come. If a program keeps a device open, returns
    /// the program's name and the next step. The devices that remain are then still served. No new
    /// device comes until [`reopen`](FrontEnds::reopen).
    pub fn let_go(&self) -> Option<String> {
        self.list().is_closed = true;
        self.each_goes(|it| it.front_end.let_go())
    }

    /// Lets new front ends come again, since the daemon does not stop after all.
    pub fn reopen(&self) {
        self.list().is_closed = false;
    }

    /// Ends every front end, also the one of a volume that is being made now.
    pub fn stop(&self) {
        let all = {
            let mut list = self.list();
            list.is_closed = true;
            std::mem::take(&mut list.all)
        };
        all.into_iter().for_each(|it| it.front_end.stop(GRACE));
    }

    /// Waits for the change that was under way when the front ends were closed.
    pub fn wait_for_change(&self) {
        drop(self.changing.lock());
    }

    /// Starts the front end that a pool's volume has for itself, if it has none yet. Returns
    /// whether the volume has one.
    ///
    /// # Errors
    /// Fails when a device or a mount cannot be had, and when the daemon stops.
    pub fn serve(&self, volumes: &Volumes, name: &str) -> Result<bool, Error> {
        let Some(each) = &self.each else { return Ok(false) };
        if self.has(name) {
            return Ok(true);
        }
        let Some((_, volume)) = volumes.find(name.as_bytes()) else { return Ok(false) };
        let served = each.serve(name, &volume)?;
        let mut list = self.list();
        if list.is_closed {
            drop(list);
            served.front_end.end(GRACE);
            return Err(stopping());
        }
        list.all.push(served);
        Ok(true)
    }

    /// Tries again and again to start the front end of a volume, in a thread.
    pub fn serve_later(self: &Arc<Self>, volumes: &Arc<Volumes>, name: &str) {
        let mut list = self.list();
        if list.lacking.iter().any(|it| it == name) {
            return;
        }
        list.lacking.push(name.to_owned());
        if list.lacking.len() > 1 {
            // The thread runs already.
            return;
        }
        let clock = Arc::clone(&self.environment.clock);
        let (front_ends, volumes) = (Arc::downgrade(self), Arc::downgrade(volumes));
        let work = move || {
            let mut pause = AGAIN.0;
            loop {
                clock.sleep(pause);
                pause = (pause * 2).min(AGAIN.1);
                let (Some(front_ends), Some(volumes)) = (front_ends.upgrade(), volumes.upgrade()) else {
                    return;
                };
                if front_ends.serve_lacking(&volumes) {
                    return;
                }
            }
        };
        if let Err(error) = thread::Builder::new().name("weir-again".into()).spawn(work) {
            list.lacking.clear();
            let log = &self.environment.log;
            (log)(Level::Warning, format_args!("volume {name} stays without its device: {error}"));
        }
    }

    /// Starts the front ends that volumes lack, as far as that is possible now. Returns whether no
    /// volume lacks one any more.
    fn serve_lacking(&self, volumes: &Volumes) -> bool {
        let Ok(_alone) = self.alone() else { return false };
        let lacking = self.list().lacking.clone();
        for name in lacking {
            let Ok(is_served) = self.serve(volumes, &name) else { continue };
            if is_served {
                (self.environment.log)(Level::Info, format_args!("volume {name} has its device again"));
            }
            self.list().lacking.retain(|it| *it != name);
        }
        self.list().lacking.is_empty()
    }

    /// Ends the front end that a pool's volume has for itself.
    ///
    /// # Errors
    /// Fails when a program uses the front end. Then the front end goes on serving.
    pub fn withdraw(&self, name: &str) -> Result<(), Error> {
        let user = self.list().all.iter().filter(|it| it.is_of(name)).find_map(|it| it.front_end.in_use());
        let withdraw = |it: &mut Served| it.is_of(name).then(|| it.front_end.withdraw()).flatten();
        if let Some(user) = user.or_else(|| self.each_goes(withdraw)) {
            return Err(Error::new(ErrorKind::Refused, format!("volume {name}: {user}, then try again")));
        }
        let its: Vec<Served> = self.list().all.extract_if(.., |it| it.is_of(name)).collect();
        its.into_iter().for_each(|it| it.front_end.end(GRACE));
        Ok(())
    }

    /// Makes front ends remove their devices by `remove`, which returns the reason if one cannot.
    /// Tries for a while, and answers status requests meanwhile.
    fn each_goes(&self, remove: impl Fn(&mut Served) -> Option<String>) -> Option<String> {
        let clock = &self.environment.clock;
        let begun = clock.now();
        loop {
            let user = self.list().all.iter_mut().find_map(&remove);
            if user.is_none() || clock.now() - begun >= LET_GO {
                return user;
            }
            clock.sleep(TRY);
        }
    }

    fn list(&self) -> MutexGuard<'_, List> {
        self.list.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

#[cfg(test)]
pub mod tests {
    use super::*;
    use crate::environment::Clock;
    use crate::environment::tests::{Quick, quiet};
    use crate::front_ends::FrontEnd;
    use std::io;
    use std::sync::atomic::{AtomicU32, Ordering};
    use std::time::Instant;

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

    /// A clock that looks whether status can be answered while somebody waits.
    #[derive(Debug)]
    struct Looking(Arc<Quick>, Mutex<std::sync::Weak<FrontEnds>>);

    impl Clock for Looking {
        fn now(&self) -> Instant {
            self.0.now()
        }

        fn sleep(&self, time: Duration) {
            let front_ends = self.1.lock().expect("no panic").upgrade().expect("they are there");
            assert!(front_ends.list.try_lock().is_ok(), "status is answered meanwhile");
            self.0.sleep(time);
        }

        fn wait(&self, fds: &mut [rustix::event::PollFd<'_>], most: Duration) {
            self.0.wait(fds, most);
        }
    }

    #[test]
    fn a_device_that_udev_looks_at_goes_and_one_that_stays_open_is_served_on() {
        let most = (LET_GO.as_millis() / TRY.as_millis()) as u32;
        for (open, user) in [(0, None), (3, None), (most, None), (most + 1, Some("in use".to_owned()))] {
            let clock = Arc::new(Looking(Quick::new(), Mutex::default()));
            let environment = Environment { clock: Arc::clone(&clock) as _, ..quiet() };
            let served = |open| Served { volume: None, front_end: Box::new(Open(open)) };
            let front_ends = FrontEnds::new(vec![served(0), served(open)], None, &environment);
            *clock.1.lock().expect("no panic") = Arc::downgrade(&front_ends);
            assert_eq!(front_ends.let_go(), user, "{open} more tries");
            assert_eq!(front_ends.list().all.len(), 2);
        }
    }

    /// The devices of a test's volumes: how many exist, and how many of the next attempts to make
    /// one will fail.
    #[derive(Clone, Debug, Default)]
    pub struct Devices {
        pub count: Arc<AtomicU32>,
        pub refused: Arc<AtomicU32>,
        /// Called while a device is being made.
        pub making: Making,
    }

    /// A test's callback.
    #[derive(Clone, Default)]
    pub struct Making(pub Option<Arc<dyn Fn() + Send + Sync>>);

    impl fmt::Debug for Making {
        fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
            f.write_str("Making")
        }
    }

    /// A test's device, which is counted as long as it is there.
    #[derive(Debug)]
    struct Device(Arc<AtomicU32>);

    impl FrontEnd for Device {
        fn exports(&self) -> Vec<Export> {
            Vec::new()
        }

        fn stop(self: Box<Self>, _grace: Duration) {
            self.0.fetch_sub(1, Ordering::SeqCst);
        }
    }

    impl StartEach for Devices {
        fn serve(&self, name: &str, _volume: &Arc<Volume>) -> Result<Served, Error> {
            let one_less = |left: u32| left.checked_sub(1);
            if self.refused.fetch_update(Ordering::SeqCst, Ordering::SeqCst, one_less).is_ok() {
                return Err(Error::of(ErrorKind::FrontEnd, io::Error::from(io::ErrorKind::NotFound)));
            }
            self.making.0.iter().for_each(|making| making());
            self.count.fetch_add(1, Ordering::SeqCst);
            Ok(Served { volume: Some(name.to_owned()), front_end: Box::new(Device(Arc::clone(&self.count))) })
        }
    }
}
