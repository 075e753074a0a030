//! The front ends that make a block device of a daemon's volume: which of them work on this
//! machine, and how each attaches and detaches.

use super::options::FrontChoice;
use super::service::{self, control_socket, fuse_file, nbd_socket};
use super::state::{Front, Journal, Step};
use crate::failure;
use std::fs;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use toml::Value;
use weir_cli::failure::{Failure, chain};
use weir_core::log::{self, Level};
use weir_daemon::Address;
use weir_daemon::attach::{self, Attach};
use weir_daemon::control::{self, Status};
use weir_system::Machine;
use weir_system::kernel_release::{self, version};
use weir_system::loop_device::LoopDevice;

impl Front {
    /// The front end's name on the command line.
    pub fn name(self) -> &'static str {
        match self {
            Front::Ublk => "ublk",
            Front::Nbd => "nbd",
            Front::Fuse => "fuse",
        }
    }

    /// The kernel modules that the front end needs, each with a file that exists once it is loaded.
    fn modules(self) -> &'static [(&'static str, &'static str)] {
        match self {
            Front::Ublk => &[("ublk_drv", "/dev/ublk-control")],
            Front::Nbd => &[("nbd", "/sys/module/nbd")],
            Front::Fuse => &[("fuse", "/dev/fuse"), ("loop", "/dev/loop-control")],
        }
    }

    /// The first kernel with all that the front end needs.
    fn since(self) -> (u32, u32) {
        match self {
            // The ublk front end needs a daemon that can be replaced under its device, and a driver
            // that takes commands as ioctls.
            Front::Ublk => kernel_release::UBLK,
            Front::Nbd => (5, 6),
            // The front end needs LOOP_CONFIGURE, which sets direct I/O at once.
            Front::Fuse => (5, 8),
        }
    }

    /// The first kernel on which the front end is chosen by default.
    fn trusted_since(self) -> (u32, u32) {
        match self {
            // Before this release, the kernel itself may crash when the daemon is killed under
            // load.
            Front::Ublk => kernel_release::UBLK_SURVIVES,
            Front::Nbd | Front::Fuse => self.since(),
        }
    }

    /// The front end's risk on this kernel release; `None` if there is none. A front end with a
    /// risk is chosen only by an explicit option.
    pub fn risk(self, release: &str) -> Option<String> {
        match self {
            Front::Ublk | Front::Nbd => None,
            Front::Fuse if self.outlives_its_daemon(release) => Some(FUSE_RISK.to_owned()),
            Front::Fuse => Some(format!(
                "{FUSE_RISK}; and before Linux 6.9 what the daemon has in hand when it dies is lost to whoever waits for it"
            )),
        }
    }

    /// Whether, on this kernel release, the next daemon completes the requests that a dead daemon
    /// left unfinished.
    pub fn outlives_its_daemon(self, release: &str) -> bool {
        self != Front::Fuse || version(release).is_none_or(|version| version >= kernel_release::FUSE_RESENDS)
    }

    /// The number of the kernel's own connections for each of `parts` devices: the number in the
    /// options that [`config`](Front::config) made, without the `SPARE_CONNECTIONS` of the daemon.
    pub fn connections(self, config: &toml::Table, parts: u8) -> u16 {
        let value = config.get("connections").and_then(Value::as_integer).unwrap_or_default();
        let all = u16::try_from(value).unwrap_or_default().saturating_sub(SPARE_CONNECTIONS);
        all / u16::from(parts.max(1))
    }

    /// The options of `weir serve` that make the front end of `parts` devices, for a daemon in
    /// `directory`.
    pub fn config(self, directory: &Path, connections: u16, parts: u8) -> Vec<(&'static str, Value)> {
        let text = |path: PathBuf| path.display().to_string();
        match self {
            Front::Ublk => vec![("ublk", Value::Boolean(true))],
            Front::Nbd => vec![
                ("nbd", service::list([format!("unix:{}", text(nbd_socket(directory)))])),
                (
                    "connections",
                    Value::Integer(i64::from(connections * u16::from(parts) + SPARE_CONNECTIONS)),
                ),
            ],
            Front::Fuse => vec![
                ("fuse", Value::String(text(fuse_file(directory)))),
                ("fuse-threads", Value::Integer(connections.into())),
            ],
        }
    }
}

/// The kernel's sources show the risk: in drivers/block/loop.c `loop_process_work` sets only
/// `PF_MEMALLOC_NOIO`, and in fs/fuse/file.c `fuse_io_alloc` allocates as any program does. So
/// neither may use the kernel's reserve of memory.
const FUSE_RISK: &str = "the kernel's loop and FUSE drivers take memory for each page that goes out and wait for it like anybody, so the \
     machine may freeze once no memory is free at all";

/// Connections that the daemon serves besides those of the kernel. One may be a dead connection
/// that the daemon has not noticed yet. Another is for a second client, such as nbdinfo.
const SPARE_CONNECTIONS: u16 = 2;

/// The front end that was chosen.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct Chosen {
    /// The chosen front end.
    pub front: Front,
    /// Kernel modules that must be loaded before the front end works.
    pub modules: Vec<&'static str>,
    /// The reason why no better front end was chosen.
    pub why: String,
}

/// All front ends, the best first.
const ALL: [Front; 3] = [Front::Ublk, Front::Nbd, Front::Fuse];

/// Chooses the front end that was asked for, or the best that this machine has. `loadable` says
/// whether a module can be loaded.
///
/// # Errors
/// Fails when no front end works here. The error says what each lacks.
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
    let release = machine.release();
    let mut lacking = Vec::new();
    for front in ALL.into_iter().filter(|front| asked.is_none_or(|asked| asked == *front)) {
        let absent: Vec<&str> = front
            .modules()
            .iter()
            .filter(|(_, sign)| !machine.has(sign))
            .map(|(module, _)| *module)
            .collect();
        let (major, minor) = if asked.is_some() { front.since() } else { front.trusted_since() };
        if version(&release).is_some_and(|version| version < (major, minor)) {
            lacking.push(format!("{} wants Linux {major}.{minor}, this is {release}", front.name()));
        } else if let Some(module) = absent.iter().find(|module| !loadable(module)) {
            lacking.push(format!("{} needs the kernel module {module}, which is not there", front.name()));
        } else if let (Some(risk), None) = (front.risk(&release), asked) {
            lacking.push(format!("{0} is there, but {risk} (--front {0} accepts that)", front.name()));
        } else {
            let why = if asked.is_some() { "as asked".to_owned() } else { lacking.join("; ") };
            return Ok(Chosen { front, modules: absent, why });
        }
    }
    Err(Failure::Failed(format!(
        "no block device can be made here: {}; install the modules of the kernel that runs, or boot one that has them",
        lacking.join("; ")
    )))
}

/// Whether the kernel's own module loader knows a module.
pub fn loadable(module: &str) -> bool {
    modprobe(&["--dry-run", "--quiet", module])
}

/// Loads a module, after the journal has recorded the step.
pub fn load(module: &str, journal: &mut Journal) -> Result<(), Failure> {
    journal.intend(Step::Module { name: module.to_owned() })?;
    if modprobe(&[module]) {
        Ok(())
    } else {
        Err(Failure::Failed(format!("modprobe {module} failed; see dmesg")))
    }
}

/// Unloads a module. A module that is in use stays loaded.
pub fn unload(module: &str) {
    modprobe(&["--remove", "--quiet", module]);
}

/// Runs modprobe, and returns whether it succeeded.
pub fn modprobe(arguments: &[&str]) -> bool {
    let helper = fs::read_to_string("/proc/sys/kernel/modprobe").unwrap_or_default();
    let helper = Some(helper.trim()).filter(|path| Path::new(path).exists()).unwrap_or("modprobe");
    let status = Command::new(helper).args(arguments).stdin(Stdio::null()).stderr(Stdio::null()).status();
    status.is_ok_and(|status| status.success())
}

/// Makes a block device of a daemon's volume. If `volume` is `None`, that is the daemon's own
/// volume. `directory` has the daemon's sockets. Returns the device's name.
///
/// # Errors
/// Fails with the kernel's error.
pub fn attach(
    front: Front,
    directory: &Path,
    connections: u16,
    volume: Option<&str>,
    status: &Status,
    journal: &mut Journal,
) -> Result<PathBuf, Failure> {
    let name = volume.map(str::to_owned);
    let exported = || {
        let export = status.exports.iter().find(|it| it.kind == front.name() && it.volume == name);
        export.map(|export| PathBuf::from(&export.address)).ok_or_else(|| {
            let kind = front.name();
            Failure::Failed(format!("the daemon does not say which {kind} device it has made"))
        })
    };
    match front {
        Front::Ublk => {
            let path = exported()?;
            journal.intend(Step::Device { path: path.clone(), front, file: None, by: None, volume: name })?;
            Ok(path)
        }
        Front::Nbd => {
            let path = free_nbd_device()?;
            let (file, by) = (Some(nbd_socket(directory)), Some(std::process::id()));
            journal.intend(Step::Device { path: path.clone(), front, file, by, volume: name })?;
            let options = nbd_options(directory, &path, connections, volume);
            attach::connect(&options, &log::to_stderr(Level::Warning)).map_err(failure::of)?;
            Ok(path)
        }
        Front::Fuse => {
            let file = exported()?;
            let step = |path| {
                let (file, volume) = (Some(file.clone()), name.clone());
                Step::Device { path, front, file, by: None, volume }
            };
            // The kernel picks the loop device, so at first only the file can be recorded.
            journal.intend(step(PathBuf::new()))?;
            let device = LoopDevice::attach(&file).map_err(|error| Failure::Failed(chain(&error)))?;
            journal.amend(step(device.path().to_owned()))?;
            Ok(device.path().to_owned())
        }
    }
}

/// Detaches a device that no program uses. A device that is gone already is no error.
pub fn detach(front: Front, path: &Path, file: Option<&Path>, by: Option<u32>) -> Result<(), Failure> {
    match front {
        // The daemon has ended before this call, and with it its ublk device.
        Front::Ublk => check_gone(path),
        Front::Nbd if !nbd_is_attached(path) || !nbd_is_ours(path, file, by) => Ok(()),
        Front::Nbd => {
            let control = file.and_then(Path::parent).map(control_socket);
            attach::detach(path, control.as_deref()).map_err(failure::of)
        }
        Front::Fuse => LoopDevice::over(file.unwrap_or(path))
            .into_iter()
            .try_for_each(|device| device.detach().map_err(|error| Failure::Failed(chain(&error)))),
    }
}

/// Checks that a device is gone after its daemon has ended. If the keeper was killed too, the
/// device is still there.
fn check_gone(device: &Path) -> Result<(), Failure> {
    let is_there = device.file_name().is_some_and(|name| Path::new("/sys/block").join(name).exists());
    if !is_there {
        return Ok(());
    }
    Err(Failure::Failed(format!(
        "{} is still there and has no daemon, so whoever touches it waits for ever: restart the machine",
        device.display()
    )))
}

fn nbd_options(directory: &Path, device: &Path, connections: u16, volume: Option<&str>) -> Attach {
    Attach {
        name: volume.unwrap_or_default().to_owned(),
        device: Some(device.to_owned()),
        connections,
        control: Some(control_socket(directory)),
        ..Attach::to(Address::Unix(nbd_socket(directory)))
    }
}

fn nbd_is_attached(path: &Path) -> bool {
    path.file_name().is_some_and(|name| Path::new("/sys/block").join(name).join("pid").exists())
}

/// Whether a connected device is the one in the journal: another program may have connected the
/// device meanwhile. The kernel gives the number of the process that connected the device. In a
/// process namespace that number means another process. So the device also counts as ours if the
/// daemon has it on its list.
fn nbd_is_ours(path: &Path, socket: Option<&Path>, by: Option<u32>) -> bool {
    let Some(by) = by else { return true };
    let who = path.file_name().map(|name| Path::new("/sys/block").join(name).join("pid"));
    let who = who.and_then(|file| fs::read_to_string(file).ok()?.trim().parse().ok());
    let knows = |directory| {
        control::status(&control_socket(directory))
            .is_ok_and(|it| it.attached.iter().any(|name| path == Path::new(name)))
    };
    who == Some(by) || socket.and_then(Path::parent).is_some_and(knows)
}

/// Finds an NBD device that is not in use. Weir chooses it instead of the kernel, so that the
/// journal can name it beforehand.
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
    use weir_system::fixture::Fixture;

    #[test]
    fn a_daemon_must_say_which_ublk_device_it_has_made() {
        let directory = std::env::temp_dir().join(format!("weir-front-{}", std::process::id()));
        let mut journal = Journal::open(&directory).expect("a journal");
        let mut status = Status::example(0);
        let attach = |status: &Status, journal: &mut Journal| {
            attach(Front::Ublk, &directory, 1, None, status, journal)
        };
        let Err(Failure::Failed(said)) = attach(&status, &mut journal) else { panic!("it has NBD alone") };
        assert_eq!(said, "the daemon does not say which ublk device it has made");
        assert_eq!(journal.state().steps, []);
        status.exports[0].kind = "ublk".into();
        status.exports[0].address = "/dev/ublkb7".to_owned();
        let device = attach(&status, &mut journal).expect("its device");
        assert_eq!(device, Path::new("/dev/ublkb7"));
        journal.delete().expect("removed");
    }

    #[test]
    fn the_best_that_the_machine_has_is_taken_and_only_missing_modules_are_loaded() {
        let nbd = |name, release| {
            Fixture::new(name).with("/proc/sys/kernel/osrelease", release).with("/sys/module/nbd/refcnt", "0")
        };
        let old = nbd("front-old", "6.1.0-9-amd64\n");
        let chosen = choose(&old.machine(), FrontChoice::Auto, &|_| true).expect("nbd is there");
        assert_eq!((chosen.front, chosen.modules.len()), (Front::Nbd, 0));
        assert_eq!(chosen.why, "ublk wants Linux 6.16, this is 6.1.0-9-amd64");
        let early = nbd("front-early", "6.12.1\n");
        let chosen = choose(&early.machine(), FrontChoice::Auto, &|_| true).expect("nbd is there");
        assert_eq!(
            chosen.front,
            Front::Nbd,
            "a kernel that may die with the daemon is not trusted with ublk"
        );
        let chosen = choose(&early.machine(), FrontChoice::Ublk, &|_| true).expect("it was asked for");
        assert_eq!(chosen.front, Front::Ublk);
        let new = nbd("front-new", "6.18.1\n");
        let chosen = choose(&new.machine(), FrontChoice::Auto, &|_| true).expect("ublk can be loaded");
        assert_eq!((chosen.front, chosen.modules), (Front::Ublk, vec!["ublk_drv"]));
        let chosen = choose(&new.machine(), FrontChoice::Fuse, &|module| module == "loop");
        assert!(chosen.is_err(), "there is no fuse");
        let chosen = choose(&new.machine(), FrontChoice::Fuse, &|_| true).expect("both can be loaded");
        assert_eq!((chosen.front, chosen.modules), (Front::Fuse, vec!["fuse", "loop"]));
    }

    #[test]
    fn fuse_is_taken_only_by_who_asks_for_it() {
        let machine = Fixture::new("front-fuse").with("/dev/fuse", "").with("/dev/loop-control", "");
        let Err(Failure::Failed(error)) = choose(&machine.machine(), FrontChoice::Auto, &|_| false) else {
            panic!("it may freeze the machine")
        };
        assert!(error.contains("may freeze") && error.contains("--front fuse"), "{error}");
        let chosen = choose(&machine.machine(), FrontChoice::Fuse, &|_| false).expect("asked for");
        let risk = |release| chosen.front.risk(release).expect("there is one");
        assert!(risk("6.1.0-9-amd64").contains("6.9") && !risk("6.18.1").contains("6.9"));
        assert!(Front::Nbd.risk("6.1.0").is_none() && Front::Nbd.outlives_its_daemon("6.1.0"));
    }

    #[test]
    fn a_device_that_its_daemon_left_behind_is_told_of() {
        check_gone(Path::new("/dev/weir-has-none")).expect("it has gone");
        let Some(device) = fs::read_dir("/sys/block").ok().and_then(|mut all| all.next()?.ok()) else {
            println!("skipped: a_device_that_its_daemon_left_behind_is_told_of: no block device");
            return;
        };
        let Err(Failure::Failed(error)) = check_gone(&Path::new("/dev").join(device.file_name())) else {
            panic!("it is there")
        };
        assert!(error.contains("has no daemon"), "{error}");
    }

    #[test]
    fn a_machine_without_any_is_told_what_is_missing() {
        let machine = Fixture::new("no-front");
        let Err(Failure::Failed(error)) = choose(&machine.machine(), FrontChoice::Auto, &|_| false) else {
            panic!("there is nothing to choose")
        };
        for module in ["module ublk_drv", "module nbd", "module fuse"] {
            assert!(error.contains(module), "{error}");
        }
    }

    #[test]
    fn a_release_is_read_as_far_as_it_counts() {
        assert_eq!(version("6.12.9-amd64"), Some((6, 12)));
        assert_eq!(version("7.2-rc1"), Some((7, 2)));
        assert_eq!(version(""), None);
    }
}
