//! The kernel's swap devices: their list and use, and swapon and swapoff.

use std::ffi::CString;
use std::io;
use std::os::unix::ffi::OsStrExt as _;
use std::path::Path;
use weir_core::ByteSize;

/// A line of `/proc/swaps`.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct Swap {
    /// The path of the device or file.
    pub path: String,
    /// The device's size.
    pub size: ByteSize,
    /// Bytes in use on the device.
    pub used: ByteSize,
    /// The priority: the highest is filled first. Priorities that the kernel chooses itself are
    /// below zero.
    pub priority: i32,
}

impl Swap {
    /// Whether the device is zram, which is compressed memory.
    pub fn is_zram(&self) -> bool {
        self.path.starts_with("/dev/zram")
    }
}

/// Parses the table that `/proc/swaps` prints.
pub fn parse(table: &str) -> Vec<Swap> {
    let line = |line: &str| {
        let mut columns = line.split_whitespace();
        let path = columns.next()?.replace("\\040(deleted)", "").replace("\\040", " ");
        let mut columns = columns.skip(1);
        let mut kibibytes = || Some(ByteSize(columns.next()?.parse::<u64>().ok()? << 10));
        let (size, used) = (kibibytes()?, kibibytes()?);
        Some(Swap { path, size, used, priority: columns.next()?.parse().ok()? })
    };
    table.lines().skip(1).filter_map(line).collect()
}

/// Reads `/proc/swaps` now.
///
/// # Errors
/// Fails when there is no `/proc`, or no swap in this kernel.
pub fn all() -> io::Result<Vec<Swap>> {
    Ok(parse(&std::fs::read_to_string("/proc/swaps")?))
}

/// Finds the device or file at `path` in `/proc/swaps`. `None` if the kernel does not swap on it
/// now.
///
/// # Errors
/// Fails as [`all`] does.
pub fn find(path: &Path) -> io::Result<Option<Swap>> {
    Ok(all()?.into_iter().find(|swap| Path::new(&swap.path) == path))
}

/// Whether a device is known to be swap now.
pub fn is_on(path: &Path) -> bool {
    matches!(find(path), Ok(Some(_)))
}

// The values of the flags are from include/linux/swap.h.
const SWAP_FLAG_PREFER: libc::c_int = 0x8000;
const SWAP_FLAG_DISCARD: libc::c_int = 0x1_0000;
const SWAP_FLAG_DISCARD_PAGES: libc::c_int = 0x4_0000;

/// Starts to swap on a device. The kernel discards clusters of swap slots that are free again, so
/// that the store gets their room back.
///
/// # Errors
/// Fails with the error of swapon(2).
pub fn on(path: &Path, priority: i32) -> io::Result<()> {
    swapon(path, priority | SWAP_FLAG_DISCARD | SWAP_FLAG_DISCARD_PAGES)
}

/// Starts to swap on a device as [`on`] does, but without discards.
///
/// # Errors
/// Fails as [`on`] does.
pub fn on_without_discard(path: &Path, priority: i32) -> io::Result<()> {
    swapon(path, priority)
}

fn swapon(path: &Path, flags: libc::c_int) -> io::Result<()> {
    let (path, flags) = (c_path(path)?, SWAP_FLAG_PREFER | flags);
    // SAFETY: the path is a string that outlives the call; nothing else of this process is touched.
    match unsafe { libc::swapon(path.as_ptr(), flags) } {
        0 => Ok(()),
        _ => Err(io::Error::last_os_error()),
    }
}

/// Brings every page back into memory and stops swapping on a device, which may take long. A signal
/// to this thread ends the call with `EINTR`, and the kernel swaps on (mm/swapfile.c,
/// `try_to_unuse`).
///
/// # Errors
/// Fails with the error of swapoff(2).
pub fn off(path: &Path) -> io::Result<()> {
    let path = c_path(path)?;
    // SAFETY: the path is a string that outlives the call, which touches nothing else of this
    // process.
    match unsafe { libc::swapoff(path.as_ptr()) } {
        0 => Ok(()),
        _ => Err(io::Error::last_os_error()),
    }
}

fn c_path(path: &Path) -> io::Result<CString> {
    Ok(CString::new(path.as_os_str().as_bytes())?)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_kernels_table_is_read() {
        let table = "Filename\t\t\t\tType\t\tSize\t\tUsed\t\tPriority\n\
                     /dev/nbd0                               partition\t4194300\t\t2048\t\t100\n\
                     /swap\\040file                           file\t\t1024\t\t0\t\t-2\n";
        let swaps = parse(table);
        assert_eq!(swaps.len(), 2);
        assert_eq!((swaps[0].used, swaps[0].priority), (ByteSize(2 << 20), 100));
        assert_eq!((swaps[1].path.as_str(), swaps[1].priority), ("/swap file", -2));
    }

    #[test]
    fn what_is_no_device_is_refused_by_the_kernel() {
        let error = on(Path::new("/no/such/device"), 1).expect_err("nothing there");
        assert!(matches!(error.raw_os_error(), Some(libc::ENOENT | libc::EPERM)), "{error}");
        assert!(off(Path::new("/no/such/device")).is_err());
    }
}
