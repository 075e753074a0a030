//! The kernel's swap devices: which there are, what they hold, and how Weir's stands among them.

use std::ffi::CString;
use std::io;
use std::os::unix::ffi::OsStrExt as _;
use std::path::Path;
use weir_core::ByteSize;

/// A line of `/proc/swaps`.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct Swap {
    /// The device or file.
    pub path: String,
    /// Its size.
    pub size: ByteSize,
    /// What lies on it.
    pub used: ByteSize,
    /// The higher is filled first; those that the kernel numbers itself are below zero.
    pub priority: i32,
}

impl Swap {
    fn is_zram(&self) -> bool {
        self.path.starts_with("/dev/zram")
    }
}

/// The table as `/proc/swaps` prints it.
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

/// The table now.
pub fn all() -> io::Result<Vec<Swap>> {
    Ok(parse(&std::fs::read_to_string("/proc/swaps")?))
}

/// One device, if it is swap now.
pub fn find(path: &Path) -> io::Result<Option<Swap>> {
    Ok(all()?.into_iter().find(|swap| Path::new(&swap.path) == path))
}

/// Whether a device is known to be swap now.
pub fn is_on(path: &Path) -> bool {
    matches!(find(path), Ok(Some(_)))
}

/// Where Weir's device goes among the others, and why, in words.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct Place {
    /// From 0 to 32767.
    pub priority: i32,
    /// One line.
    pub why: String,
}

/// What Weir's device has where nothing speaks against it; room above for those who want to be first.
const USUAL: i32 = 100;
const MOST: i32 = 32_767;

/// Finds a priority below every zram device (compressed RAM is nearer than any device) and above all others, which are
/// disks. Where zram stands below a disk, or has no priority of its own, disks decide.
pub fn place(others: &[Swap], asked: Option<i32>) -> Place {
    let names = |zram: bool| {
        let names = others.iter().filter(|swap| swap.is_zram() == zram);
        names.map(|swap| format!("{} ({})", swap.path, swap.priority)).collect::<Vec<_>>().join(", ")
    };
    if let Some(priority) = asked {
        return Place { priority, why: "as asked".to_owned() };
    }
    let zram = others.iter().filter(|swap| swap.is_zram()).map(|swap| swap.priority).min();
    let disk = others.iter().filter(|swap| !swap.is_zram()).map(|swap| swap.priority).max().unwrap_or(-1);
    let above = (disk + 1).clamp(0, MOST);
    match zram {
        Some(zram) if zram > above => Place {
            priority: (zram - 1).min(USUAL.max(above)),
            why: match names(false) {
                disks if disks.is_empty() => format!("after {}, which compresses in RAM", names(true)),
                disks => format!("after {}, which compresses in RAM, and before {disks}", names(true)),
            },
        },
        Some(_) => Place {
            priority: USUAL.max(above),
            why: format!(
                "before {} too: for zram to be filled first give it a higher priority, or --priority a lower one here",
                names(true)
            ),
        },
        None if others.is_empty() => Place { priority: USUAL, why: "the only swap".to_owned() },
        None => Place { priority: USUAL.max(above), why: format!("before {}", names(false)) },
    }
}

// include/linux/swap.h
const SWAP_FLAG_PREFER: libc::c_int = 0x8000;
const SWAP_FLAG_DISCARD: libc::c_int = 0x1_0000;
const SWAP_FLAG_DISCARD_PAGES: libc::c_int = 0x4_0000;

/// Starts to swap on a device. Freed clusters are discarded, so that the store gets their room back.
pub fn on(path: &Path, priority: i32) -> io::Result<()> {
    let path = c_path(path)?;
    let flags = SWAP_FLAG_PREFER | priority | SWAP_FLAG_DISCARD | SWAP_FLAG_DISCARD_PAGES;
    // SAFETY: the path is a string that outlives the call; nothing else of this process is touched.
    match unsafe { libc::swapon(path.as_ptr(), flags) } {
        0 => Ok(()),
        _ => Err(io::Error::last_os_error()),
    }
}

/// Brings every page back and stops swapping on a device. Takes as long as that takes; a signal to this thread ends it with
/// `EINTR`, and the device stays on (mm/swapfile.c, `try_to_unuse`).
pub fn off(path: &Path) -> io::Result<()> {
    let path = c_path(path)?;
    // SAFETY: as above.
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

    fn swap(path: &str, priority: i32) -> Swap {
        Swap { path: path.to_owned(), size: ByteSize(1 << 30), used: ByteSize(0), priority }
    }

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
    fn alone_it_gets_the_usual_priority() {
        assert_eq!(place(&[], None).priority, USUAL);
    }

    #[test]
    fn it_comes_before_disks_and_after_zram() {
        for (others, priority) in [
            (vec![swap("/dev/sda2", -2)], 100),
            (vec![swap("/swapfile", 500)], 501),
            (vec![swap("/dev/zram0", 100), swap("/dev/sda2", -2)], 99),
            (vec![swap("/dev/zram0", 5), swap("/dev/zram1", 32_767)], 4),
            (vec![swap("/dev/zram0", 32_767), swap("/dev/sda2", 10)], 100),
            (vec![swap("/dev/zram0", 32_767), swap("/dev/sda2", 200)], 201),
            (vec![swap("/dev/zram0", -2)], 100),
            (vec![swap("/dev/sda2", 32_767)], 32_767),
        ] {
            let place = place(&others, None);
            assert_eq!(place.priority, priority, "{others:?}: {}", place.why);
        }
    }

    #[test]
    fn zram_that_would_be_filled_after_it_is_explained() {
        assert!(place(&[swap("/dev/zram0", -2)], None).why.contains("higher priority"));
        assert!(place(&[swap("/dev/zram0", 100)], None).why.contains("after /dev/zram0 (100)"));
    }

    #[test]
    fn what_was_asked_for_is_taken() {
        assert_eq!(place(&[swap("/dev/zram0", 100)], Some(7)).priority, 7);
    }

    #[test]
    fn what_is_no_device_is_refused_by_the_kernel() {
        let error = on(Path::new("/no/such/device"), 1).expect_err("nothing there");
        assert!(matches!(error.raw_os_error(), Some(libc::ENOENT | libc::EPERM)), "{error}");
        assert!(off(Path::new("/no/such/device")).is_err());
    }
}
