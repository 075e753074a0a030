//! Loop devices: the kernel makes a block device of a file (include/uapi/linux/loop.h,
//! drivers/block/loop.c).
//!
//! `LOOP_CONFIGURE` (Linux 5.8) sets a loop device up. It gives the device blocks of 4 KiB, and
//! direct I/O, so that nothing of the file is cached twice.

use rustix::fs::{Mode, OFlags};
use rustix::io::Errno;
use rustix::ioctl::{Ioctl, IoctlOutput, Opcode};
use std::ffi::c_void;
use std::fs;
use std::io;
use std::os::fd::{AsFd, AsRawFd, OwnedFd};
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

const CTL_GET_FREE: Opcode = 0x4C82;
const CONFIGURE: Opcode = 0x4C0A;
const CLR_FD: Opcode = 0x4C01;
const GET_STATUS64: Opcode = 0x4C05;
const FLAG_DIRECT_IO: u32 = 16;

/// Number of tries to get a free loop device, which other programs may take first.
const TRIES: usize = 64;
/// Longest time that the kernel takes to release a device.
const SETTLE: Duration = Duration::from_secs(5);

/// A device's configuration: `struct loop_config`, with the one `struct loop_info64` in it.
#[repr(C)]
struct Config {
    fd: u32,
    block_size: u32,
    info: Info,
    reserved: [u64; 8],
}

/// A device's information: `struct loop_info64`.
#[repr(C)]
#[derive(Clone, Copy)]
struct Info {
    device: u64,
    inode: u64,
    rdevice: u64,
    offset: u64,
    size_limit: u64,
    number: u32,
    encrypt_type: u32,
    encrypt_key_size: u32,
    flags: u32,
    file_name: [u8; 64],
    crypt_name: [u8; 64],
    encrypt_key: [u8; 32],
    init: [u64; 2],
}

impl Info {
    const EMPTY: Info = Info {
        device: 0,
        inode: 0,
        rdevice: 0,
        offset: 0,
        size_limit: 0,
        number: 0,
        encrypt_type: 0,
        encrypt_key_size: 0,
        flags: 0,
        file_name: [0; 64],
        crypt_name: [0; 64],
        encrypt_key: [0; 32],
        init: [0; 2],
    };

    /// Makes the information with the file's name, cut to 63 bytes and with a zero at its end. The
    /// kernel stores the name for programs that ask for it, and opens nothing by it.
    fn named(file: &Path) -> Info {
        let mut info = Info::EMPTY;
        let name = file.as_os_str().as_encoded_bytes();
        let length = name.len().min(info.file_name.len() - 1);
        info.file_name[..length].copy_from_slice(&name[..length]);
        info
    }
}

const _: () = {
    assert!(size_of::<Config>() == 304);
    assert!(size_of::<Info>() == 232);
    assert!(std::mem::offset_of!(Config, info) == 8);
    assert!(std::mem::offset_of!(Info, flags) == 52);
    assert!(std::mem::offset_of!(Info, file_name) == 56);
    assert!(std::mem::offset_of!(Config, reserved) == 8 + 232);
};

/// The reason why there is no loop device.
#[derive(Debug, thiserror::Error)]
pub enum LoopError {
    /// There is no loop driver, or this process may not use it.
    #[error("cannot use {path}; load the module loop (modprobe loop), and run as root")]
    Control {
        /// The path of the driver's or the device's file.
        path: PathBuf,
        /// The error of the system call on the file at `path`.
        source: io::Error,
    },
    /// The file cannot be opened.
    #[error("cannot open {path}: {source}")]
    File {
        /// The path of the file that cannot be opened.
        path: PathBuf,
        /// The error of the system call that was to open the file.
        source: io::Error,
    },
    /// The kernel refused to make a loop device of the file.
    #[error("the kernel made no loop device of {path}: {source}")]
    Refused {
        /// The path of the file that the device was to be made of.
        path: PathBuf,
        /// The error of the ioctl of the loop driver.
        source: io::Error,
    },
    /// The file offers no direct I/O. A device over it would use the page cache, which swap must
    /// not do.
    #[error("{path} does not offer direct I/O, so a loop device over it would cache every page twice")]
    NoDirectIo {
        /// The path of the file without direct I/O.
        path: PathBuf,
    },
    /// The device is still there after it was detached.
    #[error("{0} is still in use: swapoff or unmount it first")]
    InUse(PathBuf),
}

/// A loop device that is set up. Dropping this leaves it; [`detach`](LoopDevice::detach) removes
/// it.
#[derive(Debug)]
pub struct LoopDevice {
    path: PathBuf,
    number: u32,
}

impl LoopDevice {
    /// Makes a loop device of `file`, as large as the file, with direct I/O and 4 KiB blocks.
    ///
    /// # Errors
    /// Fails with a [`LoopError`]; no device is left behind then.
    pub fn attach(file: &Path) -> Result<LoopDevice, LoopError> {
        let refused = |source: io::Error| LoopError::Refused { path: file.to_owned(), source };
        let control = open(Path::new("/dev/loop-control"))?;
        let backing = rustix::fs::open(file, OFlags::RDWR | OFlags::CLOEXEC, Mode::empty())
            .map_err(|errno| LoopError::File { path: file.to_owned(), source: errno.into() })?;
        for _ in 0..TRIES {
            let number =
                call(&control, CTL_GET_FREE, std::ptr::null_mut()).map_err(|errno| refused(errno.into()))?;
            let device =
                LoopDevice { path: PathBuf::from(format!("/dev/loop{number}")), number: number as u32 };
            node(&device.path, device.number);
            let opened = open(&device.path)?;
            match configure(&opened, &backing, file) {
                Ok(()) => {
                    // Close this descriptor first: while any is open, the kernel does not detach
                    // the device.
                    drop(opened);
                    return device.checked(file);
                }
                // Another program has taken the device.
                Err(Errno::BUSY) => {}
                Err(errno) => return Err(refused(errno.into())),
            }
        }
        Err(refused(Errno::BUSY.into()))
    }

    /// Finds the loop device at `path`, which is set up already.
    ///
    /// # Errors
    /// Fails when `path` is no loop device, or the device is not set up.
    pub fn find(path: &Path) -> Result<LoopDevice, LoopError> {
        let number = path.file_name().and_then(|name| name.to_str()?.strip_prefix("loop")?.parse().ok());
        let refused = |source| LoopError::Control { path: path.to_owned(), source };
        let device = LoopDevice {
            path: path.to_owned(),
            number: number.ok_or_else(|| refused(io::ErrorKind::InvalidInput.into()))?,
        };
        match device.backing_file() {
            Some(_) => Ok(device),
            None => Err(refused(Errno::NXIO.into())),
        }
    }

    /// All loop devices over `file`. The kernel no longer shows a file's path once the file's file
    /// system is unmounted. Finds the devices of such a file too.
    pub fn over(file: &Path) -> Vec<LoopDevice> {
        let names = fs::read_dir("/sys/block")
            .into_iter()
            .flatten()
            .filter_map(|entry| Some(entry.ok()?.file_name()));
        names
            .filter(|name| name.as_encoded_bytes().starts_with(b"loop"))
            .filter_map(|name| LoopDevice::find(&Path::new("/dev").join(name)).ok())
            .filter(|device| device.backing_file().as_deref() == Some(file) || device.was_made_of(file))
            .collect()
    }

    /// Whether the device was set up for a file of this name. This opens the device. The kernel
    /// then reads nothing from it, because it looks for no partitions on such a device.
    fn was_made_of(&self, file: &Path) -> bool {
        if file.as_os_str().len() >= Info::EMPTY.file_name.len() {
            return false; // The kernel stores only the beginning of such a name.
        }
        let flags = OFlags::RDONLY | OFlags::CLOEXEC;
        let Ok(opened) = rustix::fs::open(&self.path, flags, Mode::empty()) else { return false };
        let mut info = Info::EMPTY;
        let told = call(&opened, GET_STATUS64, (&raw mut info).cast());
        told.is_ok() && info.file_name == Info::named(file).file_name
    }

    /// The path of the device's node, such as `/dev/loop7`.
    pub fn path(&self) -> &Path {
        &self.path
    }

    /// The file behind the device; `None` once it has been detached.
    pub fn backing_file(&self) -> Option<PathBuf> {
        let path = fs::read_to_string(self.attribute("backing_file")).ok()?;
        Some(PathBuf::from(path.trim_end_matches('\n')))
    }

    /// Detaches the device, and waits until the kernel has released its file. Refused while
    /// something uses it.
    ///
    /// # Errors
    /// Fails with [`LoopError::InUse`] when swap or a file system is on the device. When that file
    /// system is unmounted, the kernel detaches the device by itself.
    pub fn detach(self) -> Result<(), LoopError> {
        if self.backing_file().is_none() {
            return Ok(());
        }
        if self.is_swap() {
            return Err(LoopError::InUse(self.path));
        }
        let opened = open(&self.path)?;
        match call(&opened, CLR_FD, std::ptr::null_mut()) {
            Ok(_) | Err(Errno::NXIO) => {}
            Err(errno) => return Err(LoopError::Control { path: self.path, source: errno.into() }),
        }
        // The kernel detaches the device when its last descriptor is closed.
        drop(opened);
        let begun = Instant::now();
        while self.backing_file().is_some() {
            if begun.elapsed() > SETTLE {
                return Err(LoopError::InUse(self.path));
            }
            std::thread::sleep(Duration::from_millis(2));
        }
        Ok(())
    }

    /// Whether the kernel swaps on the device.
    pub fn is_swap(&self) -> bool {
        let swaps = fs::read_to_string("/proc/swaps").unwrap_or_default();
        swaps.lines().any(|line| line.split_whitespace().next().map(Path::new) == Some(&self.path))
    }

    fn attribute(&self, name: &str) -> PathBuf {
        PathBuf::from(format!("/sys/block/loop{}/loop/{name}", self.number))
    }

    fn checked(self, file: &Path) -> Result<LoopDevice, LoopError> {
        let direct = fs::read_to_string(self.attribute("dio"));
        if direct.is_ok_and(|text| text.trim() == "0") {
            // No program uses the device yet, so it is detached at once. If that fails, the missing
            // direct I/O is still the error to report.
            let _ = self.detach();
            return Err(LoopError::NoDirectIo { path: file.to_owned() });
        }
        Ok(self)
    }
}

fn open(path: &Path) -> Result<OwnedFd, LoopError> {
    rustix::fs::open(path, OFlags::RDWR | OFlags::CLOEXEC, Mode::empty())
        .map_err(|errno| LoopError::Control { path: path.to_owned(), source: errno.into() })
}

/// Makes the device's node if no devtmpfs does, as in a container.
fn node(path: &Path, number: u32) {
    if !path.exists() {
        use rustix::fs::{CWD, FileType, makedev, mknodat};
        // If the node cannot be made, opening the device reports that.
        let _ = mknodat(CWD, path, FileType::BlockDevice, Mode::RUSR | Mode::WUSR, makedev(7, number));
    }
}

fn configure(device: &OwnedFd, backing: &OwnedFd, file: &Path) -> rustix::io::Result<()> {
    let mut config = Config {
        fd: backing.as_raw_fd() as u32,
        block_size: weir_core::PAGE_SIZE as u32,
        info: Info { flags: FLAG_DIRECT_IO, ..Info::named(file) },
        reserved: [0; 8],
    };
    call(device, CONFIGURE, (&raw mut config).cast()).map(drop)
}

/// An ioctl of the loop driver. Its argument is null, or points to a [`Config`] or an [`Info`]; its
/// result is a number.
struct Call(Opcode, *mut c_void);

// SAFETY: a command takes no argument, reads the `Config` behind the pointer, or fills the `Info`
// there, for which any bytes are valid. Both outlive the call.
unsafe impl Ioctl for Call {
    type Output = i32;
    const IS_MUTATING: bool = false;
    fn opcode(&self) -> Opcode {
        self.0
    }
    fn as_ptr(&mut self) -> *mut c_void {
        self.1
    }
    unsafe fn output_from_ptr(out: IoctlOutput, _: *mut c_void) -> rustix::io::Result<i32> {
        Ok(out)
    }
}

fn call(fd: impl AsFd, command: Opcode, argument: *mut c_void) -> rustix::io::Result<i32> {
    // SAFETY: see `Call`; the descriptor is the loop driver's, or the call fails with ENOTTY.
    unsafe { rustix::ioctl::ioctl(fd, Call(command, argument)) }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::fixture;
    use rustix::mount::{MountFlags, mount};

    #[test]
    fn what_is_no_loop_device_is_not_found() {
        for path in ["/dev/null", "/dev/loop", "/dev/loop99999", "loopy"] {
            assert!(LoopDevice::find(Path::new(path)).is_err(), "{path}");
        }
    }

    #[test]
    fn a_missing_file_and_one_of_the_kernel_s_own_are_refused() {
        if open(Path::new("/dev/loop-control")).is_err() {
            return println!("\nskipped: no loop devices here");
        }
        let missing = LoopDevice::attach(Path::new("/nowhere/disk")).unwrap_err().to_string();
        assert!(missing.starts_with("cannot open /nowhere/disk: "), "{missing}");
        // The kernel makes no loop device of a file in /proc.
        let own = LoopDevice::attach(Path::new("/proc/self/comm")).unwrap_err().to_string();
        assert!(own.starts_with("the kernel made no loop device of /proc/self/comm: "), "{own}");
    }

    #[test]
    fn a_file_that_every_access_would_cache_is_refused() {
        fixture::alone("loop_device::tests::a_file_that_every_access_would_cache_is_refused", || {
            if open(Path::new("/dev/loop-control")).is_err() {
                return println!("skipped: no loop devices here");
            }
            mount("none", "/mnt", "ramfs", MountFlags::empty(), None).unwrap();
            let file = PathBuf::from(format!("/mnt/disk-{}", std::process::id()));
            fs::write(&file, [0; 1 << 20]).unwrap();
            let begun = Instant::now();
            let attached = LoopDevice::attach(&file);
            let took = begun.elapsed();
            let left = LoopDevice::over(&file);
            let is_left = !left.is_empty();
            left.into_iter().for_each(|device| device.detach().unwrap());
            let error = attached.unwrap_err().to_string();
            let words = " does not offer direct I/O, so a loop device over it would cache every page twice";
            assert_eq!(error, format!("{}{words}", file.display()));
            assert!(took < SETTLE && !is_left, "its device did not go");
        });
    }
}
