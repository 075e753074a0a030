//! The daemon's side of an attached device. The keeper holds a list of these devices. The daemon
//! connects a device again after a crash, and whenever the kernel has given a connection up.

use super::attachment::Attachment;
use super::device::{DeadLinks, Kernel, Terms};
use super::negotiate;
use super::readers::Readers;
use super::replace::{Ends, Look, NotReplaced, Outcome, Pace, replace};
use crate::address::Address;
use crate::error::{Error, ErrorKind};
use crate::keeper::{Link, read_note, write_note};
use rustix::event::{PollFd, PollFlags, Timespec, poll};
use std::collections::BTreeMap;
use std::fmt;
use std::io;
use std::os::fd::{AsFd as _, OwnedFd};
use std::sync::{Arc, Mutex, MutexGuard, OnceLock};
use std::thread;
use std::time::Duration;
use weir_core::log::{Level, Log};
use weir_core::swap_safety::{self, Children};
use weir_export::nbd::KernelConnections;
use weir_export::nbd::client::Wish;
use weir_system::device_use;

/// The keeper's name for the list of attached devices.
pub const NOTE: &str = "attached";

/// Pauses before the further looks at a device, after a start or an event. One look is not enough:
/// possibly neither end knows yet that a connection is gone, or memory is short.
const LOOKS: [Duration; 3] = [Duration::from_millis(500), Duration::from_secs(3), Duration::from_secs(3)];

/// The devices that are attached to this daemon.
pub struct Attachments {
    list: Mutex<List>,
    /// The server's ends of the attached devices' connections.
    served: OnceLock<KernelConnections>,
    keeper: Option<Link>,
    log: Log,
}

#[derive(Default)]
struct List {
    devices: Vec<Attachment>,
    is_watched: bool,
    /// Whether the devices come from an earlier daemon. Their connections died with that daemon.
    is_taken_over: bool,
}

impl fmt::Debug for Attachments {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_list().entries(&self.list().devices).finish()
    }
}

impl Attachments {
    /// Makes an empty list, or the earlier daemon's list from that daemon's note.
    pub fn new(keeper: Option<Link>, note: Option<OwnedFd>, log: &Log) -> Arc<Self> {
        let devices = note.map(read_note).transpose().unwrap_or_else(|error| {
            log(Level::Warning, format_args!("the devices attached before are not known: {error}"));
            None
        });
        let devices: Vec<Attachment> = devices.unwrap_or_default();
        let list = List { is_taken_over: !devices.is_empty(), devices, is_watched: false };
        Arc::new(Attachments {
            list: Mutex::new(list),
            served: OnceLock::new(),
            keeper,
            log: Arc::clone(log),
        })
    }

    /// Connects the devices of the earlier daemon again. Call this as soon as this daemon listens.
    /// `served` counts this daemon's connections.
    pub fn resume(self: &Arc<Self>, served: KernelConnections) {
        let _ = self.served.set(served);
        let mut list = self.list();
        if list.is_taken_over {
            self.watch(&mut list);
        }
    }

    /// Remembers a device that was connected to this daemon.
    ///
    /// # Errors
    /// Fails with one line: the reason why the device cannot be put on the list.
    pub fn attached(self: &Arc<Self>, device: Attachment) -> Result<(), Error> {
        device.address.parse::<Address>().map_err(|error| Error::of(ErrorKind::Attach, error))?;
        let mut list = self.list();
        list.devices.retain(|other| other.device != device.device);
        list.devices.push(device);
        self.watch(&mut list);
        self.keep(&list)
    }

    /// Forgets a device that the kernel has disconnected.
    ///
    /// # Errors
    /// Fails as [`attached`](Attachments::attached) does.
    pub fn detached(&self, device: u32) -> Result<(), Error> {
        let mut list = self.list();
        list.devices.retain(|other| other.device != device);
        self.keep(&list)
    }

    /// The attached devices' names, such as `/dev/nbd0`.
    pub fn names(&self) -> Vec<String> {
        self.list().devices.iter().map(|device| format!("/dev/nbd{}", device.device)).collect()
    }

    /// The first device that is attached by this export name. It may lack its connections for a
    /// moment: after a crash, or when the kernel has given them up.
    pub fn device_of(&self, name: &str) -> Option<String> {
        let list = self.list();
        let found = list.devices.iter().find(|device| device.name == name);
        found.map(|found| format!("/dev/nbd{}", found.device))
    }

    /// Names the first device that a program uses, with the command that ends the use. If the
    /// daemon ended now, the device's pages would be lost.
    pub fn in_use(&self) -> Option<String> {
        self.in_use_by(device_use::user)
    }

    fn in_use_by(&self, user: impl Fn(&str) -> io::Result<Option<String>>) -> Option<String> {
        self.names().iter().find_map(|device| device_use::why_not_stop(device, user(device)))
    }

    fn list(&self) -> MutexGuard<'_, List> {
        self.list.lock().expect("nobody panics while holding it")
    }

    fn keep(&self, list: &List) -> Result<(), Error> {
        let Some(keeper) = &self.keeper else { return Ok(()) };
        write_note(&list.devices).and_then(|note| keeper.hold_memory(NOTE, note.as_fd())).map_err(|error| {
            Error::because(ErrorKind::Keeper, "the keeper does not remember the device", error)
        })
    }

    fn watch(self: &Arc<Self>, list: &mut List) {
        if list.is_watched {
            return;
        }
        let all = Arc::clone(self);
        let work = move || {
            if let Err(error) = all.run() {
                let what = "devices will not be connected again by themselves";
                (all.log)(Level::Warning, format_args!("{what}: {error}; use weir attach --reconnect"));
                all.list().is_watched = false;
            }
        };
        // Without this thread the device still works, until a connection is lost.
        match thread::Builder::new().name("weir-attached".into()).spawn(work) {
            Ok(_) => list.is_watched = true,
            Err(error) => (self.log)(Level::Warning, format_args!("cannot watch attached devices: {error}")),
        }
    }

    /// Replaces connections as they die, for as long as the daemon lives.
    fn run(&self) -> io::Result<()> {
        // Listen before the first look at the devices. Else a connection that is lost in between
        // would go unnoticed.
        let links = DeadLinks::open()?;
        let mut kernel = Kernel::open()?;
        // Devices that may have dead connections, each with the number of looks that are left.
        let mut suspects: BTreeMap<u32, usize> = BTreeMap::new();
        let mut suspect_all = std::mem::take(&mut self.list().is_taken_over);
        loop {
            if std::mem::take(&mut suspect_all) {
                suspects.extend(self.devices().iter().map(|device| (device.device, LOOKS.len())));
            }
            for device in self.devices() {
                let Some(left) = suspects.get_mut(&device.device) else { continue };
                let is_whole = self.reconnect(&mut kernel, &device);
                // Look again and again at a device that cannot be repaired now.
                *left = left.saturating_sub(usize::from(is_whole || *left > 1));
            }
            let known = self.devices();
            suspects.retain(|index, left| *left > 0 && known.iter().any(|device| device.device == *index));
            let most = suspects.values().max();
            let pause = most.map(|left| Timespec::try_from(LOOKS[LOOKS.len() - left]).expect("seconds"));
            match poll(&mut [PollFd::new(&links, PollFlags::IN)], pause.as_ref()) {
                Ok(0) | Err(rustix::io::Errno::INTR) => continue,
                heard => heard?,
            };
            match links.take(|device| suspects.extend([(device, LOOKS.len())])) {
                Ok(()) => {}
                // The kernel dropped some messages, so any device may have dead connections.
                Err(error) if error.raw_os_error() == Some(libc::ENOBUFS) => suspect_all = true,
                Err(error) => return Err(error),
            }
        }
    }

    fn devices(&self) -> Vec<Attachment> {
        self.list().devices.clone()
    }

    /// Replaces a device's dead connections. Returns false if the device needs another look, since
    /// some could not be replaced.
    fn reconnect(&self, kernel: &mut Kernel, device: &Attachment) -> bool {
        let say = |level, text: fmt::Arguments<'_>| {
            (self.log)(level, format_args!("/dev/nbd{}{text}", device.device));
        };
        let Some(mut connections) = self.connections(kernel, device) else { return true };
        let pace = Pace::within(Duration::from_secs(device.reconnect_timeout.into()));
        // All programs may wait for memory until the device is connected. So use the kernel's
        // reserve.
        let _ = swap_safety::reach_reserves(Children::Ordinary);
        let replaced = replace(&mut connections, device.connections.into(), pace);
        let _ = swap_safety::leave_reserves();
        match replaced {
            Ok(Outcome::Whole) => return true,
            Ok(Outcome::Replaced) => say(Level::Info, format_args!(": its lost connections are replaced")),
            Ok(Outcome::Forced(left)) => say(
                Level::Warning,
                format_args!(
                    ": its lost connections are replaced; the kernel still reads from {left} of them"
                ),
            ),
            Err(error @ (NotReplaced::Server(_) | NotReplaced::Unread)) => {
                say(Level::Info, format_args!(": {error}"));
            }
            Err(NotReplaced::Kernel(error)) if error.raw_os_error() == Some(libc::EINVAL) => {
                say(Level::Info, format_args!(" is no longer attached"));
                // Ignore a failure: only the next daemon reads the keeper's list, and it would
                // notice that the device is gone.
                let _ = self.detached(device.device);
            }
            Err(NotReplaced::Kernel(error)) => {
                say(Level::Warning, format_args!(" is not connected again: {error}"));
            }
        }
        false
    }

    /// Both ends of a device's connections; `None` if the device's address is invalid, or the
    /// daemon serves nothing by NBD.
    fn connections<'a>(&self, kernel: &'a mut Kernel, device: &'a Attachment) -> Option<Connections<'a>> {
        Some(Connections {
            kernel,
            device,
            address: device.address.parse().ok()?,
            served: self.served.get()?.clone(),
            readers: Readers::of(device.device),
            others: self
                .devices()
                .iter()
                .filter(|other| *other != device)
                .map(|o| Readers::of(o.device))
                .collect(),
        })
    }
}

/// The connections of one device.
struct Connections<'a> {
    kernel: &'a mut Kernel,
    device: &'a Attachment,
    address: Address,
    served: KernelConnections,
    readers: Readers,
    /// The kernel's reader threads for the daemon's other devices.
    others: Vec<Readers>,
}

impl Ends for Connections<'_> {
    fn look(&self) -> Look {
        let served = self.served.count();
        let Some(own) = self.readers.count() else {
            return Look { served, read: served, own: self.others.is_empty().then_some(served) };
        };
        let others: usize = self.others.iter().filter_map(Readers::count).sum();
        Look { served, read: own + others, own: Some(own) }
    }

    fn hang_up(&self) {
        self.served.hang_up();
    }

    fn offer(&mut self) -> Result<(), NotReplaced> {
        let wish = Wish { name: self.device.name.clone(), structured: false, allocation: false };
        let (socket, server) = negotiate(&self.address, &wish).map_err(NotReplaced::Server)?;
        let terms = Terms {
            bytes: server.bytes,
            flags: server.flags,
            request_timeout: Duration::from_secs(self.device.request_timeout.into()),
            reconnect_timeout: Duration::from_secs(self.device.reconnect_timeout.into()),
        };
        self.kernel.reconnect(self.device.device, &terms, &[socket]).map_err(NotReplaced::Kernel)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::keeper::played;
    use std::fs;

    #[test]
    fn an_attached_device_that_is_swap_or_mounted_is_in_use_and_others_are_not() {
        let root = std::env::temp_dir().join(format!("weir-attached-in-use-{}", std::process::id()));
        let write = |path: &str, text: &str| {
            let path = root.join(path);
            fs::create_dir_all(path.parent().expect("has one")).expect("directory");
            fs::write(path, text).expect("written");
        };
        write("proc/swaps", "Filename Type Size Used Priority\n/dev/nbd1 partition 1 0 -2\n");
        write("proc/1/mounts", "/dev/nbd3 /mnt ext4 rw 0 0\n");
        let in_use = |devices: &[u32]| {
            let attachment = |&device| Attachment {
                device,
                address: "unix:/run/weir/nbd.sock".into(),
                name: String::new(),
                connections: 1,
                request_timeout: 5,
                reconnect_timeout: 600,
            };
            let note = write_note(&devices.iter().map(attachment).collect::<Vec<_>>());
            let log: Log = Arc::new(|_, _| {});
            let attachments = Attachments::new(None, Some(note.expect("memory")), &log);
            attachments.in_use_by(|device| device_use::user_at(&root, device))
        };
        let said = [&[][..], &[0, 2], &[0, 1], &[3]].map(in_use);
        fs::remove_dir_all(&root).expect("removed");
        let lines = [
            None,
            None,
            Some("/dev/nbd1 is in use as swap: run swapoff /dev/nbd1"),
            Some("/dev/nbd3 is in use as a file system: run umount /dev/nbd3"),
        ];
        assert_eq!(said.each_ref().map(Option::as_deref), lines);
    }

    #[test]
    fn without_its_keeper_a_daemon_says_that_the_list_of_devices_is_not_kept() {
        let log: Log = Arc::new(|_, _| {});
        let attachments = Attachments::new(Some(played::gone()), None, &log);
        let said = weir_core::chain(&attachments.detached(7).expect_err("nobody keeps it"));
        assert_eq!(said, "the keeper does not remember the device: Broken pipe (os error 32)");
    }
}
