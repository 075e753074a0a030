//! Finds out what uses a block device. A daemon does not remove its device while a kernel swaps on
//! it.

use rustix::fs::{Mode, OFlags};
use rustix::io::Errno;
use std::fs;
use std::io;
use std::os::unix::fs::{FileTypeExt as _, MetadataExt as _};
use std::path::Path;

/// Returns the use of a device such as `/dev/nbd0`, with the command that ends it: `as swap: run
/// swapoff /dev/nbd0`. `None` if nothing uses the device, or it does not exist.
///
/// # Errors
/// Fails when the use of the device cannot be found out.
pub fn user(device: &str) -> io::Result<Option<String>> {
    user_at(Path::new("/"), device)
}

/// Does the same as [`user`], for the system whose files are below `root`.
pub fn user_at(root: &Path, device: &str) -> io::Result<Option<String>> {
    let numbers = numbers(root, device);
    let swaps = fs::read_to_string(root.join("proc/swaps"))?;
    if is_listed(&swaps, device) || swaps.lines().any(|line| is_node_of(root, line, &numbers)) {
        return Ok(Some(format!("as swap: run swapoff {device}")));
    }
    // This process may have a mount namespace of its own; process 1 sees the mounts of the
    // machine's users.
    let mounts = ["proc/self/mounts", "proc/1/mounts"]
        .map(|path| fs::read_to_string(root.join(path)).unwrap_or_default());
    let mounted = ["proc/self/mountinfo", "proc/1/mountinfo"]
        .map(|path| fs::read_to_string(root.join(path)).unwrap_or_default());
    let mut mounted = mounted.iter().flat_map(|table| table.lines());
    let is_mounted =
        mounted.any(|line| line.split(' ').nth(2).is_some_and(|it| numbers.iter().any(|of| of == it)));
    if is_mounted || mounts.iter().any(|mounts| is_listed(mounts, device)) {
        return Ok(Some(format!("as a file system: run umount {device}")));
    }
    let name = device.strip_prefix("/dev/").unwrap_or(device);
    if fs::read_dir(root.join(format!("sys/block/{name}/holders"))).map_or(0, Iterator::count) > 0 {
        return Ok(Some("by another block device: stop that".to_owned()));
    }
    Ok(None)
}

/// The sentence that tells why a daemon does not stop now; `None` if it may stop. `user` is the
/// result of [`user`] or [`user_or_owner`]. A device whose use is unknown counts as in use.
pub fn why_not_stop(device: &str, user: io::Result<Option<String>>) -> Option<String> {
    let user = user.unwrap_or_else(|error| Some(format!("for all that can be told ({error}): try again")))?;
    Some(in_use(device, &user))
}

/// The sentence for people about a device in use; `user` is the result of [`user`] or of a function
/// like it.
pub fn in_use(device: &str, user: &str) -> String {
    format!("{device} is in use {user}")
}

/// Does the same as [`user`], and also finds a program that has the device open exclusively, in any
/// namespace. The device must answer: opening it may read from it.
///
/// # Errors
/// Fails when the use of the device cannot be found out.
pub fn user_or_owner(device: &str) -> io::Result<Option<String>> {
    if let Some(user) = user(device)? {
        return Ok(Some(user));
    }
    let alone = OFlags::RDONLY | OFlags::EXCL | OFlags::CLOEXEC | OFlags::NONBLOCK;
    match rustix::fs::open(device, alone, Mode::empty()) {
        Err(Errno::BUSY) => Ok(Some("by a program that has it for itself: end that".to_owned())),
        Err(Errno::NOENT | Errno::NXIO | Errno::NODEV) | Ok(_) => Ok(None),
        Err(errno) => Err(errno.into()),
    }
}

/// A daemon's message about a device that the driver does not remove because a program has it open,
/// even only for reading.
pub fn why_open(device: &str) -> String {
    let user = user_or_opener(device).unwrap_or_else(|| {
        format!("by a program that has it open: run fuser -v {device} as root, and end what it names")
    });
    in_use(device, &user)
}

/// Does the same as [`user`], and also finds a program that has the device open, even only for
/// reading. `None` also if the use of the device cannot be found out.
pub fn user_or_opener(device: &str) -> Option<String> {
    user(device).ok().flatten().or_else(|| opener_at(Path::new("/"), device))
}

/// The first process that has a device open, with the command that ends the process. Looks in
/// `proc` below `root`, at processes that this one may look into.
pub fn opener_at(root: &Path, device: &str) -> Option<String> {
    let identity = |found: fs::Metadata| (found.file_type(), found.rdev());
    let wanted = fs::metadata(device).map(identity).ok()?;
    let is_it = |file: fs::DirEntry| {
        // Check the name first. The metadata of an open file may lie on a network server that is
        // away, and reading it would wait for that server.
        let is_device = fs::read_link(file.path()).is_ok_and(|name| name.starts_with("/dev"));
        is_device && fs::metadata(file.path()).is_ok_and(|found| identity(found) == wanted)
    };
    fs::read_dir(root.join("proc")).ok()?.flatten().find_map(|process| {
        let pid: u32 = process.file_name().to_str()?.parse().ok()?;
        let name = || fs::read_to_string(process.path().join("comm")).unwrap_or_default();
        let has_it = fs::read_dir(process.path().join("fd")).ok()?.flatten().any(is_it);
        has_it.then(|| format!("by {}, process {pid}, which has it open: end that", name().trim_end()))
    })
}

/// The numbers of a device and its partitions, such as `43:0`. They stay the same whatever happens
/// to the device's node in /dev.
fn numbers(root: &Path, device: &str) -> Vec<String> {
    let name = device.strip_prefix("/dev/").unwrap_or(device);
    let block = root.join("sys/block").join(name);
    let parts = fs::read_dir(&block).into_iter().flatten().flatten().map(|entry| entry.path());
    let files = std::iter::once(block).chain(parts).map(|path| path.join("dev"));
    files.filter_map(|file| Some(fs::read_to_string(file).ok()?.trim().to_owned())).collect()
}

/// Whether a line of /proc/swaps begins with the path of a block device that has one of these
/// numbers.
fn is_node_of(root: &Path, line: &str, numbers: &[String]) -> bool {
    let name = line.split_whitespace().next().unwrap_or_default();
    let is_it = |found: fs::Metadata| {
        let (major, minor) = (rustix::fs::major(found.rdev()), rustix::fs::minor(found.rdev()));
        found.file_type().is_block_device() && numbers.contains(&format!("{major}:{minor}"))
    };
    fs::metadata(root.join(name.trim_start_matches('/'))).is_ok_and(is_it)
}

/// Whether a table such as /proc/swaps names the device, or a partition of it, in the first column
/// of a line.
fn is_listed(table: &str, device: &str) -> bool {
    table.lines().filter_map(|line| line.split_whitespace().next()).any(|name| {
        // The kernel appends this mark to the name of a device whose node was removed.
        let name = name.strip_suffix("\\040(deleted)").unwrap_or(name);
        name.strip_prefix(device).is_some_and(|rest| {
            let partition = rest.strip_prefix('p').unwrap_or("x");
            rest.is_empty() || (!partition.is_empty() && partition.bytes().all(|byte| byte.is_ascii_digit()))
        })
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_device_and_its_partitions_are_listed_and_its_namesakes_are_not() {
        let table = "Filename Type\n/dev/ublkb1 partition 1 0 -2\n/dev/nbd0p3 /mnt ext4 rw 0 0\n/dev/nbd5\\040(deleted) partition 1 0 -3\n";
        for (device, listed) in [
            ("/dev/ublkb1", true),
            ("/dev/nbd0", true),
            ("/dev/nbd5", true),
            ("/dev/ublkb", false),
            ("/dev/ublkb11", false),
            ("/dev/nb", false),
        ] {
            assert_eq!(is_listed(table, device), listed, "{device}");
        }
    }

    #[test]
    fn a_device_is_known_by_its_number_whatever_its_node_is_called() {
        let root = std::env::temp_dir().join(format!("weir-device-number-{}", std::process::id()));
        let write = |path: &str, text: &str| {
            let path = root.join(path);
            fs::create_dir_all(path.parent().expect("has one")).expect("directory");
            fs::write(path, text).expect("written");
        };
        write("sys/block/nbd3/dev", "43:96\n");
        write("sys/block/nbd4/dev", "43:128\n");
        write("sys/block/nbd4/nbd4p1/dev", "43:129\n");
        write("proc/swaps", "Filename Type\n/dev/elsewhere partition 1 0 -2\n");
        write("proc/self/mountinfo", "36 35 43:129 / /mnt rw - ext4 /dev/gone rw\n");
        fs::create_dir_all(root.join("dev")).expect("directory");
        let block = rustix::fs::FileType::BlockDevice;
        let number = rustix::fs::makedev(43, 96);
        let made =
            rustix::fs::mknodat(rustix::fs::CWD, root.join("dev/elsewhere"), block, Mode::RUSR, number);
        let users =
            ["/dev/nbd3", "/dev/nbd4", "/dev/nbd5"].map(|device| user_at(&root, device).expect("told"));
        fs::remove_dir_all(&root).expect("removed");
        if made.is_ok() {
            assert_eq!(users[0].as_deref(), Some("as swap: run swapoff /dev/nbd3"));
        }
        assert_eq!(users[1].as_deref(), Some("as a file system: run umount /dev/nbd4"));
        assert_eq!(users[2], None);
    }

    #[test]
    fn a_device_that_is_not_there_has_no_user() {
        assert_eq!(user_or_owner("/dev/weir-has-none").expect("told"), None);
    }

    #[test]
    fn who_has_a_device_open_is_named() {
        let root = std::env::temp_dir().join(format!("weir-device-opener-{}", std::process::id()));
        for (pid, name, device) in [("7", "shell", "/dev/zero"), ("12", "hexdump", "/dev/null")] {
            let process = root.join("proc").join(pid);
            fs::create_dir_all(process.join("fd")).expect("directory");
            fs::write(process.join("comm"), format!("{name}\n")).expect("written");
            std::os::unix::fs::symlink(device, process.join("fd/3")).expect("link");
        }
        let told = ["/dev/null", "/dev/full"].map(|device| opener_at(&root, device));
        fs::remove_dir_all(&root).expect("removed");
        assert_eq!(told, [Some("by hexdump, process 12, which has it open: end that".to_owned()), None]);
        let line = why_open("/dev/weir-has-none");
        assert!(line.starts_with("/dev/weir-has-none is in use by a program"), "{line}");
    }

    #[test]
    fn what_cannot_be_told_keeps_a_daemon() {
        let line = why_not_stop("/dev/nbd0", Err(io::ErrorKind::PermissionDenied.into())).expect("a reason");
        assert!(line.starts_with("/dev/nbd0 is in use for all that can be told ("), "{line}");
        assert_eq!(why_not_stop("/dev/nbd0", Ok(None)), None);
    }
}
