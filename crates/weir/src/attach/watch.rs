//! The daemon's side of an attached device: remembers it in the keeper, and connects it again, after a crash of the daemon
//! before or whenever the kernel has given a connection up.

use super::attachment::{Attachment, read_note, write_note};
use super::device::{DeadLinks, Kernel, Terms};
use super::negotiate;
use super::readers::{self, Known, NotReplaced};
use crate::address::Address;
use crate::device_use;
use crate::keeper::Link;
use rustix::event::{PollFd, PollFlags, Timespec, poll};
use std::collections::BTreeSet;
use std::fmt;
use std::io;
use std::os::fd::{AsFd as _, OwnedFd};
use std::sync::{Arc, Mutex, MutexGuard};
use std::thread;
use std::time::Duration;
use weir_export::log::{Level, Log};
use weir_export::nbd::client::Wish;

/// The keeper's name for the list.
pub const NOTE: &str = "attached";

/// When to look again after a start, or after an event that brought no success: the server has no seat free before it has
/// noticed that a connection is gone, or memory is short just now.
const LOOKS: [Duration; 3] = [Duration::from_millis(500), Duration::from_secs(3), Duration::from_secs(3)];

/// The devices that are attached to this daemon.
pub struct Attachments {
    list: Mutex<List>,
    keeper: Option<Link>,
    log: Log,
}

#[derive(Default)]
struct List {
    devices: Vec<Attachment>,
    /// Those that the daemon before had: its connections died with it.
    lost: BTreeSet<u32>,
    is_watched: bool,
}

impl fmt::Debug for Attachments {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_list().entries(&self.list().devices).finish()
    }
}

impl Attachments {
    /// None, or those of the daemon before, by its note.
    pub fn new(keeper: Option<Link>, note: Option<OwnedFd>, log: &Log) -> Arc<Self> {
        let devices = note.map(read_note).transpose().unwrap_or_else(|error| {
            log(Level::Warning, format_args!("the devices attached before are not known: {error}"));
            None
        });
        let devices = devices.unwrap_or_default();
        let lost = devices.iter().map(|device| device.device).collect();
        let list = List { devices, lost, is_watched: false };
        Arc::new(Attachments { list: Mutex::new(list), keeper, log: Arc::clone(log) })
    }

    /// Connects again what was attached to the daemon before. To be called once this one listens.
    pub fn resume(self: &Arc<Self>) {
        let mut list = self.list();
        if !list.devices.is_empty() {
            self.watch(&mut list);
        }
    }

    /// Remembers a device that was connected to this daemon.
    ///
    /// # Errors
    /// One line: why it cannot be remembered.
    pub fn attached(self: &Arc<Self>, device: Attachment) -> Result<(), String> {
        device.address.parse::<Address>().map_err(|error| error.to_string())?;
        let mut list = self.list();
        list.devices.retain(|other| other.device != device.device);
        list.devices.push(device);
        self.watch(&mut list);
        self.keep(&list)
    }

    /// Forgets a device.
    ///
    /// # Errors
    /// As [`attached`](Attachments::attached).
    pub fn detached(&self, device: u32) -> Result<(), String> {
        let mut list = self.list();
        list.devices.retain(|other| other.device != device);
        self.keep(&list)
    }

    /// The devices, as `/dev/nbd0`.
    pub fn names(&self) -> Vec<String> {
        self.list().devices.iter().map(|device| format!("/dev/nbd{}", device.device)).collect()
    }

    /// The first that something uses, and what ends that: with the daemon its pages would be gone.
    pub fn in_use(&self) -> Option<String> {
        self.in_use_by(device_use::user)
    }

    fn in_use_by(&self, user: impl Fn(&str) -> io::Result<Option<String>>) -> Option<String> {
        self.names().iter().find_map(|device| device_use::why_not_stop(device, user(device)))
    }

    fn list(&self) -> MutexGuard<'_, List> {
        self.list.lock().expect("nobody panics while holding it")
    }

    fn keep(&self, list: &List) -> Result<(), String> {
        let Some(keeper) = &self.keeper else { return Ok(()) };
        write_note(&list.devices)
            .and_then(|note| keeper.hold_memory(NOTE, note.as_fd()))
            .map_err(|error| format!("the keeper does not remember the device: {error}"))
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
        // Without the thread the device works all the same, until a connection is lost.
        match thread::Builder::new().name("weir-attached".into()).spawn(work) {
            Ok(_) => list.is_watched = true,
            Err(error) => (self.log)(Level::Warning, format_args!("cannot watch attached devices: {error}")),
        }
    }

    /// Replaces connections as they die, for as long as the daemon lives.
    fn run(&self) -> io::Result<()> {
        // First the ear, then the look: what dies in between is heard.
        let links = DeadLinks::open()?;
        let mut kernel = Kernel::open()?;
        let lost = std::mem::take(&mut self.list().lost);
        for device in self.devices() {
            let known = if lost.contains(&device.device) { Known::AllDied } else { Known::SomeMayHave };
            self.reconnect(&mut kernel, &device, known);
        }
        let mut looks = LOOKS.iter();
        loop {
            let pause = looks.next().map(|pause| Timespec::try_from(*pause).expect("seconds"));
            let mut fds = [PollFd::new(&links, PollFlags::IN)];
            match poll(&mut fds, pause.as_ref()) {
                Err(rustix::io::Errno::INTR) => continue,
                heard => heard?,
            };
            let mut dead = Vec::new();
            match links.take(|device| dead.push(device)) {
                Ok(()) => {}
                Err(error) if error.raw_os_error() == Some(libc::ENOBUFS) => dead.clear(),
                Err(error) => return Err(error),
            }
            // A look without an event, or with lost ones, is at all of them.
            let all = dead.is_empty();
            let last = all && looks.len() == 0;
            let mut missed = false;
            for device in self.devices() {
                if all || dead.contains(&device.device) {
                    let known = if last { Known::SomeMayHaveLongAgo } else { Known::SomeMayHave };
                    let replaced = self.reconnect(&mut kernel, &device, known);
                    // An event without a dead connection: the kernel has not noticed yet, or it is an old one.
                    missed |= replaced.is_none() || (!all && replaced == Some(0));
                }
            }
            if missed && (!all || looks.len() == 0) {
                looks = LOOKS.iter();
            }
        }
    }

    fn devices(&self) -> Vec<Attachment> {
        self.list().devices.clone()
    }

    /// Replaces a device's dead connections. Returns how many, or nothing where it is to be tried again.
    fn reconnect(&self, kernel: &mut Kernel, device: &Attachment, known: Known) -> Option<u16> {
        let Ok(address) = device.address.parse::<Address>() else { return Some(0) };
        let wish = Wish { name: device.name.clone(), structured: false, allocation: false };
        let say = |level, text: fmt::Arguments<'_>| {
            (self.log)(level, format_args!("/dev/nbd{}{text}", device.device));
        };
        let open = || {
            let (socket, server) = negotiate(&address, &wish)?;
            let terms = Terms {
                bytes: server.bytes,
                flags: server.flags,
                request_timeout: Duration::from_secs(device.request_timeout.into()),
                reconnect_timeout: Duration::from_secs(device.reconnect_timeout.into()),
            };
            Ok((socket, terms))
        };
        match readers::replace(kernel, device.device, device.connections, known, open) {
            Ok(0) => Some(0),
            Ok(count) => {
                say(Level::Info, format_args!(": its lost connections are replaced"));
                Some(count)
            }
            Err(error @ (NotReplaced::Server(_) | NotReplaced::Unread)) => {
                say(Level::Info, format_args!(": {error}"));
                None
            }
            Err(NotReplaced::Kernel(error)) if error.raw_os_error() == Some(libc::EINVAL) => {
                say(Level::Info, format_args!(" is no longer attached"));
                // What the keeper remembers matters to the next daemon only, which would find the same.
                let _ = self.detached(device.device);
                Some(0)
            }
            Err(NotReplaced::Kernel(error)) => {
                say(Level::Warning, format_args!(" is not connected again: {error}"));
                None
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
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
}
