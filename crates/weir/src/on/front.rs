//! What makes a block device of a daemon's volume: which ways there are here, and each way's attach and detach.

use super::options::FrontChoice;
use super::service::nbd_socket;
use super::state::{Front, Journal, Step};
use crate::address::Address;
use crate::attach;
use crate::cli::{AttachOptions, DetachOptions};
use crate::doctor::Machine;
use crate::failure::Failure;
use std::fs;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};

impl Front {
    /// As the command line has it.
    pub fn name(self) -> &'static str {
        match self {
            Front::Ublk => "ublk",
            Front::Nbd => "nbd",
            Front::Fuse => "fuse",
        }
    }

    /// The kernel module that it needs, and what is there once it is loaded.
    fn module(self) -> (&'static str, &'static str) {
        match self {
            Front::Ublk => ("ublk_drv", "/dev/ublk-control"),
            Front::Nbd => ("nbd", "/sys/module/nbd"),
            Front::Fuse => ("loop", "/dev/loop-control"),
        }
    }
}

/// A way that was chosen.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Chosen {
    /// The way.
    pub front: Front,
    /// The module to load first.
    pub module: Option<&'static str>,
}

/// The ways that this version can set up, the best first.
const OFFERED: [Front; 1] = [Front::Nbd];

/// Picks the way that was asked for, or the best that this machine has. `loadable` says whether a module can be loaded.
///
/// # Errors
/// When it has none: what each lacks.
pub fn choose(
    machine: &Machine,
    asked: FrontChoice,
    loadable: &dyn Fn(&str) -> bool,
) -> Result<Chosen, Failure> {
    let asked = match asked {
        FrontChoice::Auto => None,
        FrontChoice::Ublk => Some(Front::Ublk),
        FrontChoice::Nbd => Some(Front::Nbd),
        FrontChoice::Fuse => Some(Front::Fuse),
    };
    let mut lacking = Vec::new();
    for front in OFFERED.into_iter().filter(|front| asked.is_none_or(|asked| asked == *front)) {
        let (module, sign) = front.module();
        if machine.has(sign) {
            return Ok(Chosen { front, module: None });
        }
        if loadable(module) {
            return Ok(Chosen { front, module: Some(module) });
        }
        lacking.push(format!("{} needs the kernel module {module}, which is not there", front.name()));
    }
    if let Some(front) = asked.filter(|front| !OFFERED.contains(front)) {
        lacking.push(format!("--front {} is not built into this weir", front.name()));
    }
    Err(Failure::Failed(format!(
        "no block device can be made here: {}; install the kernel's modules, or boot the kernel that they belong to",
        lacking.join("; ")
    )))
}

/// Whether the kernel's own module loader knows a module.
pub fn loadable(module: &str) -> bool {
    modprobe(&["--dry-run", "--quiet", module])
}

/// Loads a module, once the journal has it.
pub fn load(module: &str, journal: &mut Journal) -> Result<(), Failure> {
    journal.intend(Step::Module { name: module.to_owned() })?;
    if modprobe(&[module]) {
        Ok(())
    } else {
        Err(Failure::Failed(format!("modprobe {module} failed; see dmesg")))
    }
}

/// Takes a module out again; one that somebody uses by now stays.
pub fn unload(module: &str) {
    modprobe(&["--remove", "--quiet", module]);
}

fn modprobe(arguments: &[&str]) -> bool {
    let helper = fs::read_to_string("/proc/sys/kernel/modprobe").unwrap_or_default();
    let helper = Some(helper.trim()).filter(|path| Path::new(path).exists()).unwrap_or("modprobe");
    let status = Command::new(helper).args(arguments).stdin(Stdio::null()).stderr(Stdio::null()).status();
    status.is_ok_and(|status| status.success())
}

/// Makes a block device of the daemon in `directory`, and returns its name.
///
/// # Errors
/// What the kernel says.
pub fn attach(
    front: Front,
    directory: &Path,
    connections: u16,
    journal: &mut Journal,
) -> Result<PathBuf, Failure> {
    match front {
        Front::Nbd => {
            let path = free_nbd_device()?;
            journal.intend(Step::Device { path: path.clone(), front })?;
            attach::connect(&nbd_options(directory, &path, connections, false))?;
            Ok(path)
        }
        Front::Ublk | Front::Fuse => {
            Err(Failure::Failed(format!("--front {} is not built into this weir", front.name())))
        }
    }
}

/// Gives an NBD device new connections to the daemon in `directory`.
pub fn reconnect(directory: &Path, device: &Path, connections: u16) -> Result<(), Failure> {
    attach::connect(&nbd_options(directory, device, connections, true)).map(drop)
}

/// How many connections an NBD device has: as many as hardware queues.
pub fn connections(device: &Path) -> u16 {
    let name = device.file_name().unwrap_or_default();
    let queues = fs::read_dir(Path::new("/sys/block").join(name).join("mq")).map_or(0, Iterator::count);
    queues.clamp(1, 256) as u16
}

/// Lets a device go that nothing uses; one that is gone already is no error.
pub fn detach(front: Front, path: &Path) -> Result<(), Failure> {
    match front {
        Front::Nbd if !nbd_is_attached(path) => Ok(()),
        Front::Nbd => attach::detach(&DetachOptions { device: path.to_owned() }),
        Front::Ublk | Front::Fuse => {
            Err(Failure::Failed(format!("--front {} is not built into this weir", front.name())))
        }
    }
}

fn nbd_options(directory: &Path, device: &Path, connections: u16, reconnect: bool) -> AttachOptions {
    AttachOptions {
        address: Address::Unix(nbd_socket(directory)),
        device: Some(device.to_owned()),
        name: String::new(),
        connections,
        request_timeout: 5,
        reconnect_timeout: 600,
        reconnect,
    }
}

fn nbd_is_attached(path: &Path) -> bool {
    path.file_name().is_some_and(|name| Path::new("/sys/block").join(name).join("pid").exists())
}

/// An NBD device that nobody has. It is chosen here and not by the kernel, so that the journal can name it beforehand.
fn free_nbd_device() -> Result<PathBuf, Failure> {
    let is_free = |number: &u32| {
        let size = fs::read_to_string(format!("/sys/block/nbd{number}/size"));
        size.is_ok_and(|size| size.trim() == "0") && !nbd_is_attached(Path::new(&format!("nbd{number}")))
    };
    let number = (0..1024).find(is_free).ok_or_else(|| {
        Failure::Failed(
            "every NBD device is in use: let one go, or load the module with more (modprobe nbd nbds_max=64)"
                .into(),
        )
    })?;
    Ok(PathBuf::from(format!("/dev/nbd{number}")))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::doctor::Fixture;

    #[test]
    fn a_module_is_loaded_only_where_it_is_missing() {
        let loaded = Fixture::new("nbd-loaded").with("/sys/module/nbd/refcnt", "0");
        let chosen = choose(&loaded.machine(), FrontChoice::Auto, &|_| false).expect("nbd is there");
        assert_eq!(chosen, Chosen { front: Front::Nbd, module: None });
        let missing = Fixture::new("nbd-loadable");
        let chosen = choose(&missing.machine(), FrontChoice::Nbd, &|_| true).expect("nbd can be loaded");
        assert_eq!(chosen, Chosen { front: Front::Nbd, module: Some("nbd") });
    }

    #[test]
    fn a_machine_without_any_is_told_what_is_missing() {
        let machine = Fixture::new("no-front");
        let Err(Failure::Failed(error)) = choose(&machine.machine(), FrontChoice::Auto, &|_| false) else {
            panic!("there is nothing to choose")
        };
        assert!(error.contains("module nbd"), "{error}");
    }
}
