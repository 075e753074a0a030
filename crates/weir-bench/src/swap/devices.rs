//! The devices that are compared. Each is set up as the swap that the kernel fills first, and
//! removed again.

use super::{Plan, RAM_LOOP, SwapError};
use rustix::mount::{MountFlags, UnmountFlags};
use std::fs::{self, File};
use std::io::{self, Write as _};
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::time::{Duration, Instant};
use weir_cli::guard::swap::scratch_path;
use weir_core::ByteSize;
use weir_export::fuse::mount::is_mounted;
use weir_system::loop_device::LoopDevice;
use weir_system::vm::PageCluster;
use weir_system::zram::Zram;
use weir_system::{swap_area, swaps};

/// The priority of the measured swap: above every other swap of the machine.
const PRIORITY: i32 = 32000;
/// Time that a server may take to start, or to end.
const PATIENCE: Duration = Duration::from_secs(60);

/// The kinds of devices that can carry swap.
#[derive(Clone, Debug)]
pub(crate) enum Kind {
    /// The device is a loop device over memory.
    RamLoop,
    /// The device is zram, the kernel's compressed memory.
    Zram,
    /// The device is a file on the disk of /var/tmp.
    File,
    /// The device is a loop device over libnbd's nbdfuse, over nbdkit's memory plugin.
    Nbdfuse,
    /// The device is a loop device over Weir's FUSE server.
    Weir {
        spin_us: u32,
        /// The URL of the store that the server serves; `None` for host memory.
        store: Option<String>,
    },
}

impl Kind {
    pub fn all(plan: &Plan) -> Vec<Kind> {
        let weir = |spin_us, store: Option<&String>| Kind::Weir { spin_us, store: store.cloned() };
        let mut all = vec![
            Kind::RamLoop,
            weir(plan.spin_us.max(1), None),
            weir(0, None),
            Kind::Zram,
            Kind::File,
            Kind::Nbdfuse,
        ];
        if let Some(store) = &plan.store {
            all.extend([weir(plan.spin_us.max(1), Some(store)), weir(0, Some(store))]);
        }
        all
    }

    pub fn name(&self) -> &str {
        match self {
            Kind::RamLoop => RAM_LOOP,
            Kind::Zram => "zram",
            Kind::File => "file",
            Kind::Nbdfuse => "nbdfuse",
            Kind::Weir { spin_us: 0, store: None } => "host-asleep",
            Kind::Weir { store: None, .. } => "host",
            Kind::Weir { spin_us: 0, store: Some(_) } => "store-asleep",
            Kind::Weir { store: Some(_), .. } => "store",
        }
    }
}

/// A directory that is removed with everything in it.
pub(crate) struct Scratch(PathBuf);

impl Scratch {
    pub fn new() -> io::Result<Scratch> {
        let path = scratch_path(std::process::id());
        fs::create_dir(&path)?;
        Ok(Scratch(path))
    }

    /// Notes the value of vm.page-cluster, also for a command that cleans up after this process.
    pub fn page_cluster(&self) -> io::Result<PageCluster> {
        PageCluster::kept(&self.0)
    }
}

impl Drop for Scratch {
    fn drop(&mut self) {
        // If the directory cannot be removed now, it stays until the system cleans its temporary
        // directory.
        let _ = fs::remove_dir_all(&self.0);
    }
}

/// A device that carries swap. Its parts are removed in the order of its fields.
pub(crate) struct Device {
    name: String,
    swap: Option<Swap>,
    looped: Option<Looped>,
    zram: Option<Zram>,
    server: Option<Server>,
    memory: Option<MemoryMount>,
    file: Option<PathBuf>,
}

impl Device {
    /// Sets up a device of this kind, and turns it on as swap.
    pub fn new(kind: &Kind, plan: &Plan, bytes: u64, scratch: &Scratch) -> Result<Device, SwapError> {
        let say = |what: &str| SwapError::failed(format!("{}: {what}", kind.name()));
        let mut device = Device {
            name: kind.name().to_owned(),
            swap: None,
            looped: None,
            zram: None,
            server: None,
            memory: None,
            file: None,
        };
        let path = match kind {
            Kind::RamLoop => {
                let memory = device.memory.insert(
                    MemoryMount::mount(&scratch.0.join("tmpfs"))
                        .map_err(say("cannot mount tmpfs with noswap (Linux 6.4)"))?,
                );
                let path = memory.0.join("swap");
                fill(&mut File::create(&path).map_err(say("cannot take memory"))?, bytes)
                    .map_err(say("cannot take memory"))?;
                device.over(&path)?
            }
            Kind::Zram => {
                let zram = Zram::new(bytes, &scratch.0)
                    .map_err(say("cannot make a device (modprobe zram, as root)"))?;
                device.zram.insert(zram).path()
            }
            Kind::File => {
                let path = scratch.0.join("swap");
                fill(&mut File::create(&path).map_err(say("cannot make a file"))?, bytes)
                    .map_err(say("cannot fill a file"))?;
                device.file.insert(path).clone()
            }
            Kind::Nbdfuse => {
                let file = scratch.0.join("nbdfuse");
                File::create(&file).map_err(say("cannot make a file"))?;
                let mut command = Command::new("nbdfuse");
                command.arg(&file).args(["[", "nbdkit", "--exit-with-parent", "memory"]);
                command.args([&bytes.to_string(), "]"]);
                device.server = Some(
                    Server::start(command, &file)
                        .map_err(say("nbdfuse (packages nbdkit, libnbd-bin, fuse3)"))?,
                );
                device.over(&file)?
            }
            Kind::Weir { spin_us, store } => {
                let file = scratch.0.join("weir");
                let store = match store {
                    None => format!("host:{bytes}"),
                    Some(url) if url.contains("size=") => url.clone(),
                    Some(url) => format!("{url}{}size={bytes}", if url.contains('?') { "&" } else { "?" }),
                };
                let mut command = Command::new(&plan.weir);
                command.args([
                    "serve",
                    "--swap",
                    "--unsafe-no-flusher",
                    "--log",
                    "warn",
                    "--store",
                    &store,
                    "--fuse",
                ]);
                command.arg(&file).args(["--spin-us", &spin_us.to_string(), "--control"]);
                command.arg(scratch.0.join("control")).stderr(Stdio::null());
                device.server = Some(Server::start(command, &file).map_err(say("weir serve --fuse"))?);
                device.over(&file)?
            }
        };
        device.swap = Some(Swap::on(&path, bytes).map_err(say("cannot swap to it"))?);
        Ok(device)
    }

    pub fn name(&self) -> &str {
        &self.name
    }

    /// Turns the swap off, and removes the device.
    pub fn end(mut self) -> Result<(), SwapError> {
        let name = self.name.clone();
        let swap = self.swap.take().expect("taken down once");
        swap.off().map_err(SwapError::failed(format!("{name}: swapoff")))
    }

    fn over(&mut self, file: &Path) -> Result<PathBuf, SwapError> {
        let device = LoopDevice::attach(file)
            .map_err(|error| SwapError::Machine(format!("{}: {error}", self.name)))?;
        let path = device.path().to_owned();
        self.looped = Some(Looped(Some(device)));
        Ok(path)
    }
}

impl Drop for Device {
    fn drop(&mut self) {
        // Drop the parts in this order, since each part lies on the next one: the swap on the loop
        // device, and so on.
        self.swap = None;
        self.looped = None;
        self.zram = None;
        self.server = None;
        self.memory = None;
        if let Some(file) = &self.file {
            let _ = fs::remove_file(file);
        }
    }
}

/// A file system in memory that the kernel never swaps out, even after this process's end
/// (`noswap`, Linux 6.4). Locked memory would not do: its lock ends with its process. Then the
/// memory of the loop device could be swapped out to that very loop device. Its pages would wait
/// for themselves for ever, and all of the machine's swap with them.
struct MemoryMount(PathBuf);

impl MemoryMount {
    fn mount(at: &Path) -> io::Result<MemoryMount> {
        fs::create_dir(at)?;
        rustix::mount::mount(
            "weir-bench",
            at,
            "tmpfs",
            MountFlags::NOSUID | MountFlags::NODEV,
            c"mode=0700,noswap,size=100%",
        )?;
        Ok(MemoryMount(at.to_owned()))
    }
}

impl Drop for MemoryMount {
    fn drop(&mut self) {
        let unmounted = rustix::mount::unmount(&self.0, UnmountFlags::NOFOLLOW);
        if let Err(error) = unmounted.map_err(io::Error::from).and_then(|()| fs::remove_dir(&self.0)) {
            eprintln!("weir: {} cannot be unmounted: {error}; run umount {0}", self.0.display());
        }
    }
}

fn fill(file: &mut File, bytes: u64) -> io::Result<()> {
    let zeros = vec![0; 1 << 20];
    for at in (0..bytes).step_by(zeros.len()) {
        file.write_all(&zeros[..(bytes - at).min(zeros.len() as u64) as usize])?;
    }
    file.sync_all()
}

/// A device in use as swap.
struct Swap(Option<PathBuf>);

impl Swap {
    /// Turns swap on by system calls, and not by the program swapon. If this process were killed,
    /// swapon could run on, and turn swap on after another process has cleaned up.
    fn on(path: &Path, bytes: u64) -> io::Result<Swap> {
        swap_area::make(path, ByteSize(bytes))?;
        swaps::on_without_discard(path, PRIORITY)?;
        Ok(Swap(Some(path.to_owned())))
    }

    fn off(mut self) -> io::Result<()> {
        self.0.take().map_or(Ok(()), |path| swaps::off(&path))
    }
}

impl Drop for Swap {
    fn drop(&mut self) {
        let Some(path) = self.0.take() else { return };
        if let Err(error) = swaps::off(&path) {
            eprintln!("weir: swapoff {}: {error}; do it by hand", path.display());
        }
    }
}

struct Looped(Option<LoopDevice>);

impl Drop for Looped {
    fn drop(&mut self) {
        if let Some(Err(error)) = self.0.take().map(LoopDevice::detach) {
            eprintln!("weir: {error}");
        }
    }
}

/// A FUSE server that is a process of its own.
struct Server(Child);

impl Server {
    fn start(mut command: Command, file: &Path) -> io::Result<Server> {
        let child = command.stdin(Stdio::null()).stdout(Stdio::null()).spawn()?;
        let mut server = Server(child);
        let begun = Instant::now();
        // The mount appears before the server answers. Reading the file's size waits for the
        // server.
        while !is_mounted(file) || !fs::metadata(file).is_ok_and(|meta| meta.len() > 0) {
            if let Some(status) = server.0.try_wait()? {
                return Err(io::Error::other(format!("it ended at its start: {status}")));
            }
            if begun.elapsed() > PATIENCE {
                return Err(io::ErrorKind::TimedOut.into());
            }
            std::thread::sleep(Duration::from_millis(10));
        }
        Ok(server)
    }
}

impl Drop for Server {
    fn drop(&mut self) {
        if let Some(pid) = rustix::process::Pid::from_raw(self.0.id() as i32) {
            let _ = rustix::process::kill_process(pid, rustix::process::Signal::TERM);
        }
        let begun = Instant::now();
        while begun.elapsed() < PATIENCE && matches!(self.0.try_wait(), Ok(None)) {
            std::thread::sleep(Duration::from_millis(10));
        }
        let _ = self.0.kill();
        let _ = self.0.wait();
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_is_swapped_to_is_never_swapped_out_itself() {
        let at = std::env::temp_dir().join(format!("weir-bench-{}-memory", std::process::id()));
        let memory = match MemoryMount::mount(&at) {
            Ok(memory) => memory,
            Err(error) => {
                let _ = fs::remove_dir(&at);
                println!("\nskipped: what_is_swapped_to_is_never_swapped_out_itself: {error}");
                return;
            }
        };
        fill(&mut File::create(at.join("swap")).expect("a file"), 4 << 20).expect("room");
        let mounts = fs::read_to_string("/proc/self/mounts").expect("a table");
        let line = mounts.lines().find(|line| line.contains(at.to_str().expect("text"))).expect("mounted");
        assert!(line.contains(" tmpfs ") && line.contains("noswap"), "{line}");
        drop(memory);
        assert!(!at.exists(), "nothing is left");
    }
}
