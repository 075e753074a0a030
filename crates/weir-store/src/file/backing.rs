//! A file or block device that is prepared for pages: locked for this process, fully allocated,
//! with its header written.
//!
//! Weir may take these: a path where no file is; an empty file; a file or device with Weir's
//! header; and a block device without a known mark. Content under Weir's header was encrypted with
//! a key that is gone, so nothing is lost. Anything else may be somebody's data and needs
//! `overwrite=on`.

use super::signature;
use crate::{OpenError, OpenErrorKind, Room};
use rustix::fs::{FallocateFlags, FileType, FlockOperation, Mode, OFlags, SeekFrom};
use rustix::io::Errno;
use std::fs::File;
use std::io::ErrorKind::{FileTooLarge, QuotaExceeded, StorageFull};
use std::os::fd::{AsFd, OwnedFd};
use std::os::unix::fs::FileExt;
use std::path::Path;
use std::time::Duration;
use weir_core::{ByteSize, PAGE_SIZE, Page, Watch, unwatched};
use weir_system::Machine;
use weir_system::file_lock::{self, Owner};

/// The offset of the first page: after the header, at a multiple of any disk's block size.
pub(super) const HEADER: u64 = 1 << 20;

const MAGIC: &[u8] = b"WEIR BACKING STORE 1\n";
const NOTICE: &[u8] = b"Pages in here were encrypted with a key that was never written down.\n\
    When no Weir is running, nothing in here is of use to anyone: delete it as you like.\n";

/// One file or block device: open, locked, and with room for all its pages.
#[derive(Debug)]
pub(super) struct Backing {
    pub file: File,
    /// Bytes of room for pages, after the header.
    pub room: u64,
    pub is_device: bool,
    /// Whether I/O bypasses the page cache (O_DIRECT).
    pub is_direct: bool,
}

impl Backing {
    /// Prepares the file or device at `path`. `size` is the room for pages. `None` means all of a
    /// device, or as much as a Weir file has already.
    pub(super) fn open(
        name: &str,
        path: &Path,
        size: Option<ByteSize>,
        overwrite: bool,
        room: Room,
        watch: Watch<'_>,
    ) -> Result<Self, OpenError> {
        let shown = path.display();
        let (is_device, is_new) = match rustix::fs::stat(path) {
            Ok(stat) => match FileType::from_raw_mode(stat.st_mode) {
                FileType::BlockDevice => (true, false),
                FileType::RegularFile => (false, false),
                _ => {
                    let kind = weir_core::file_kind(stat.st_mode);
                    let what = format!("{shown} is {kind}; give a file or a block device");
                    return Err(OpenError::new(OpenErrorKind::Layout, name, what));
                }
            },
            Err(Errno::NOENT) if is_for_devices(path) => {
                let what = format!("{shown} does not exist; lsblk lists the devices that there are");
                return Err(OpenError::new(OpenErrorKind::NoDevice, name, what));
            }
            Err(Errno::NOENT) => (false, true),
            Err(errno) => return Err(OpenError::io(name, format!("cannot look at {shown}"), errno)),
        };
        let (file, is_direct) = soon(path, || open_file(path, is_device, is_new))
            .map_err(|errno| OpenError::io(name, format!("{shown} {}", refusal(errno)), errno))?;
        let backing = Backing { file, room: 0, is_device, is_direct };
        let ready = backing.take(name, path, size, overwrite).and_then(|backing| {
            if room == Room::Written {
                backing.write_out(0, HEADER + backing.room, watch).map_err(|error| {
                    OpenError::io(name, format!("cannot write all the room of {shown}"), error)
                })?;
            }
            Ok(backing)
        });
        if ready.is_err() && is_new {
            // The file is new, or was empty. Remove it after the failure: it may have filled the
            // disk.
            let _ = std::fs::remove_file(path);
        }
        ready
    }

    /// Opens `path` without changing its content, and locks out other processes. Also returns its
    /// length in bytes.
    pub(super) fn open_raw(name: &str, path: &Path) -> Result<(Self, u64), OpenError> {
        let is_device = match rustix::fs::stat(path).map(|stat| FileType::from_raw_mode(stat.st_mode)) {
            Ok(FileType::BlockDevice) => true,
            Ok(FileType::RegularFile) => false,
            Ok(_) => {
                let what = "it is neither a file nor a block device; give one of these";
                return Err(OpenError::new(OpenErrorKind::Layout, name, what));
            }
            Err(Errno::NOENT) => {
                let what =
                    "it does not exist; truncate -s makes a file, lsblk lists the devices that there are";
                return Err(OpenError::new(OpenErrorKind::NoDevice, name, what));
            }
            Err(errno) => return Err(OpenError::io(name, "cannot look at it", errno)),
        };
        let (file, is_direct) = soon(path, || open_file(path, is_device, false))
            .map_err(|errno| OpenError::io(name, format!("it {}", refusal(errno)), errno))?;
        let backing = Backing { file, room: 0, is_device, is_direct };
        match soon(path, || rustix::fs::flock(&backing.file, FlockOperation::NonBlockingLockExclusive)) {
            Ok(()) => {}
            Err(Errno::WOULDBLOCK) => {
                let what = "it is in use by another process; stop that first";
                return Err(OpenError::new(OpenErrorKind::InUse, name, what));
            }
            Err(errno) => return Err(OpenError::io(name, "cannot lock it", errno)),
        }
        let bytes = backing.length(name)?;
        Ok((Backing { room: bytes, ..backing }, bytes))
    }

    /// Takes over the open file or device of a daemon that has ended. Its lock comes with the
    /// descriptor.
    pub(super) fn adopt(name: &str, fd: OwnedFd, size: Option<ByteSize>) -> Result<Self, OpenError> {
        let failed = |errno| OpenError::io(name, "cannot look at it", errno);
        let mode = rustix::fs::fstat(&fd).map_err(failed)?.st_mode;
        let flags = rustix::fs::fcntl_getfl(&fd).map_err(failed)?;
        let mut backing = Backing {
            file: File::from(fd),
            room: 0,
            is_device: FileType::from_raw_mode(mode) == FileType::BlockDevice,
            is_direct: flags.contains(OFlags::DIRECT),
        };
        let length = backing.length(name)?;
        let has = length.saturating_sub(HEADER) / PAGE_SIZE as u64 * PAGE_SIZE as u64;
        backing.room = size.map_or(has, |size| size.0);
        if backing.content(name, length)? != Content::Weir || backing.room == 0 || backing.room > has {
            let (has, asked) = (ByteSize(has), ByteSize(backing.room));
            let what = format!(
                "a file that was kept is not the one of this URL: it holds {has}, the URL asks for {asked}"
            );
            return Err(OpenError::new(OpenErrorKind::Layout, name, what));
        }
        Ok(backing)
    }

    /// Whether this is a file on a file system without a disk. Such a file takes O_DIRECT since
    /// Linux 6.6. A device's name lies on such a file system too, but the device does not.
    pub(super) fn is_in_memory(&self) -> bool {
        const TMPFS: i64 = 0x0102_1994; // include/uapi/linux/magic.h
        const RAMFS: i64 = 0x8584_58f6;
        !self.is_device && rustix::fs::fstatfs(&self.file).is_ok_and(|fs| [TMPFS, RAMFS].contains(&fs.f_type))
    }

    pub(super) fn length(&self, name: &str) -> Result<u64, OpenError> {
        // Seek to the end, whose position is the length of a file and of a device. fstat gives 0
        // for a device.
        rustix::fs::seek(&self.file, SeekFrom::End(0))
            .map_err(|errno| OpenError::io(name, "cannot tell its length", errno))
    }

    fn take(
        mut self,
        name: &str,
        path: &Path,
        size: Option<ByteSize>,
        overwrite: bool,
    ) -> Result<Self, OpenError> {
        let shown = path.display();
        match soon(path, || rustix::fs::flock(&self.file, FlockOperation::NonBlockingLockExclusive)) {
            Ok(()) => {}
            Err(Errno::WOULDBLOCK) => {
                return Err(OpenError::new(
                    OpenErrorKind::InUse,
                    name,
                    format!("{shown} is in use by another process; stop that first"),
                ));
            }
            Err(errno) => return Err(OpenError::io(name, format!("cannot lock {shown}"), errno)),
        }
        // The process that had the file locked before may have removed it. So check that `path`
        // still names the file that was opened.
        let identity = |stat: rustix::fs::Stat| (stat.st_dev, stat.st_ino);
        let here = rustix::fs::fstat(&self.file).map(identity);
        if rustix::fs::stat(path).map(identity) != here {
            return Err(OpenError::new(
                OpenErrorKind::InUse,
                name,
                format!("{shown} was taken away while it was opened; try again"),
            ));
        }
        // A file that is refused may be anybody's. It keeps its content, and its mode.
        let before = self.length(name)?;
        let content = self.content(name, before)?;
        if let Content::Other(whose) = content
            && !overwrite
        {
            let what = format!(
                "{shown} holds {whose}, which would be lost; choose another, or add overwrite=on to the URL"
            );
            return Err(OpenError::new(OpenErrorKind::Layout, name, what));
        }
        self.room = match (size, self.is_device) {
            (Some(size), _) => size.0,
            (None, false) if content != Content::Weir => {
                return Err(OpenError::new(
                    OpenErrorKind::Layout,
                    name,
                    format!("how large shall {shown} be? Add ?size=64GiB, for example"),
                ));
            }
            (None, _) => before.saturating_sub(HEADER) / PAGE_SIZE as u64 * PAGE_SIZE as u64,
        };
        if self.room == 0 || (self.is_device && HEADER + self.room > before) {
            let (has, asked) = (ByteSize(before.saturating_sub(HEADER)), ByteSize(self.room));
            let kind = OpenErrorKind::NoMemory { wanted: asked.0, had: has.0 };
            return Err(OpenError::new(
                kind,
                name,
                format!("{shown} has room for {has}, {asked} is asked for"),
            ));
        }
        let total = HEADER + self.room;
        if !self.is_device && self.lacks_room(total) {
            return Err(self.not_given(name, path, total, Errno::NOSPC.into()));
        }
        self.make_private(name, path)?;
        if matches!(content, Content::Other(_)) {
            self.forget(name, before)?;
        }
        if !self.is_device {
            self.allocate(name, path, before)?;
        }
        self.write_header(name)?;
        Ok(self)
    }

    /// Denies other users access to a file, because the file may hold unencrypted pages. A device
    /// stays as it is: the system owns the device, and lets a group read it.
    fn make_private(&self, name: &str, path: &Path) -> Result<(), OpenError> {
        let failed = |errno| {
            let what = format!("others may read {0}; chmod 600 {0}, or choose another file", path.display());
            OpenError::io(name, what, errno)
        };
        let own = Mode::RUSR | Mode::WUSR;
        let mode = Mode::from_raw_mode(rustix::fs::fstat(&self.file).map_err(failed)?.st_mode);
        let others = Mode::RWXG | Mode::RWXO;
        if self.is_device || !mode.intersects(others) {
            return Ok(());
        }
        rustix::fs::fchmod(&self.file, own).map_err(failed)
    }

    /// Finds out which kind of content the file has.
    fn content(&mut self, name: &str, bytes: u64) -> Result<Content, OpenError> {
        if bytes == 0 {
            return Ok(Content::Nothing);
        }
        let look = (signature::LOOK as u64).min(bytes);
        let start = self.read(name, 0, look as usize)?;
        if start.starts_with(MAGIC) {
            return Ok(Content::Weir);
        }
        if !self.is_device {
            return Ok(Content::Other("data that is not Weir's"));
        }
        // O_DIRECT needs a read that begins at a multiple of the page size, so this one may begin
        // too early. That does no harm: a mark at the device's end is found by its distance from
        // the last byte.
        let from = (bytes - look) / PAGE_SIZE as u64 * PAGE_SIZE as u64;
        let end = self.read(name, from, (bytes - from) as usize)?;
        Ok(signature::find(&start, &end).map_or(Content::Nothing, Content::Other))
    }

    /// Reads `bytes` from `offset` on, through a buffer that O_DIRECT accepts.
    fn read(&mut self, name: &str, offset: u64, bytes: usize) -> Result<Vec<u8>, OpenError> {
        let mut all = Vec::with_capacity(bytes);
        let mut page = Page::zeroed();
        while all.len() < bytes {
            match self.file.read_at(&mut page.0, offset + all.len() as u64) {
                Ok(0) => break,
                Ok(got) => all.extend_from_slice(&page[..got.min(bytes - all.len())]),
                Err(error) if self.loses_direct(&error) => {}
                Err(error) => return Err(OpenError::io(name, "cannot read it", error)),
            }
        }
        Ok(all)
    }

    /// Whether O_DIRECT is the cause of `error`: the blocks are larger than a page, or the file
    /// system refuses O_DIRECT after opening. If so, later I/O on the file is done without
    /// O_DIRECT.
    fn loses_direct(&mut self, error: &std::io::Error) -> bool {
        let lost = self.is_direct && error.raw_os_error() == Some(libc::EINVAL);
        if lost {
            self.is_direct = false;
            let plain = rustix::fs::fcntl_getfl(&self.file)
                .and_then(|flags| rustix::fs::fcntl_setfl(&self.file, flags - OFlags::DIRECT));
            return plain.is_ok();
        }
        false
    }

    /// Clears the marks of earlier content, so that no program takes the file or device for what it
    /// was before.
    fn forget(&mut self, name: &str, bytes: u64) -> Result<(), OpenError> {
        if !self.is_device {
            return rustix::fs::ftruncate(&self.file, 0)
                .map_err(|errno| OpenError::io(name, "cannot empty it", errno));
        }
        let end = bytes.saturating_sub(signature::LOOK as u64) / PAGE_SIZE as u64 * PAGE_SIZE as u64;
        let places = (0..HEADER.min(bytes)).chain(end..bytes).step_by(PAGE_SIZE);
        for offset in places {
            let length = (bytes - offset).min(PAGE_SIZE as u64) as usize;
            self.write(name, &Page::zeroed(), length, offset)?;
        }
        Ok(())
    }

    fn write(&mut self, name: &str, page: &Page, length: usize, offset: u64) -> Result<(), OpenError> {
        loop {
            match self.file.write_all_at(&page[..length], offset) {
                Ok(()) => return Ok(()),
                Err(error) if self.loses_direct(&error) => {}
                Err(error) => return Err(OpenError::io(name, "cannot write it", error)),
            }
        }
    }

    /// Gives a file its length and all its blocks. On failure the file is as long as it was.
    fn allocate(&mut self, name: &str, path: &Path, before: u64) -> Result<(), OpenError> {
        let total = HEADER + self.room;
        if before == 0 {
            // On a copy-on-write file system, a write goes to a new block, whatever was allocated
            // before. So turn copying off while the file is empty (Btrfs; others do not know the
            // flag).
            if let Ok(flags) = rustix::fs::ioctl_getflags(&self.file) {
                let _ = rustix::fs::ioctl_setflags(&self.file, flags | rustix::fs::IFlags::NOCOW);
            }
        } else if before > total {
            rustix::fs::ftruncate(&self.file, total)
                .map_err(|errno| OpenError::io(name, "cannot shorten it", errno))?;
        }
        let done = loop {
            // Look at the free room first: fallocate takes all of it before it fails.
            if self.lacks_room(total) {
                break Err(Errno::NOSPC.into());
            }
            match rustix::fs::fallocate(&self.file, FallocateFlags::empty(), 0, total) {
                Err(Errno::INTR) => {}
                Err(Errno::OPNOTSUPP) => break self.fill(total),
                other => break other.map_err(Into::into),
            }
        };
        let done = done.and_then(|()| {
            // A file system that compresses has allocated no blocks for zeros. Some others allocate
            // a block only when it is written.
            let stat = rustix::fs::fstat(&self.file)?;
            match (stat.st_blocks as u64).saturating_mul(512) {
                has if has >= total => Ok(()),
                has => Err(std::io::Error::other(format!(
                    "its file system has set only {} of that aside; choose one that does, such as ext4 or xfs, or a block device",
                    ByteSize(has)
                ))),
            }
        });
        done.map_err(|error| {
            // Free what was allocated, before the error is returned.
            let _ = rustix::fs::ftruncate(&self.file, before.min(total));
            self.not_given(name, path, total, error)
        })
    }

    /// The error for a file that cannot be given `total` bytes.
    fn not_given(&self, name: &str, path: &Path, total: u64, error: std::io::Error) -> OpenError {
        let free = rustix::fs::fstatvfs(&self.file).map_or(0, |stat| stat.f_bavail * stat.f_frsize);
        let what = format!(
            "{} cannot be given {}, its file system has {} free; ask for less, or make room",
            path.display(),
            ByteSize(total),
            ByteSize(free)
        );
        let is_room = matches!(error.kind(), StorageFull | QuotaExceeded | FileTooLarge);
        let error = OpenError::io(name, what, error);
        let kind = if is_room { OpenErrorKind::NoMemory { wanted: total, had: free } } else { error.kind };
        OpenError { kind, ..error }
    }

    /// Whether the file system has less free room than the file still needs.
    fn lacks_room(&self, total: u64) -> bool {
        let has = rustix::fs::fstat(&self.file).map_or(0, |stat| (stat.st_blocks as u64).saturating_mul(512));
        let free = rustix::fs::fstatvfs(&self.file)
            .map_or(u64::MAX, |stat| stat.f_bavail.saturating_mul(stat.f_frsize));
        total.saturating_sub(has) > free
    }

    /// The slow way to allocate, for file systems without fallocate: write zeros.
    fn fill(&mut self, total: u64) -> std::io::Result<()> {
        let zeros = zeros();
        let mut at = 0;
        while at < total {
            match self.write_zeros(&zeros, at, total) {
                Ok(written) => at += written,
                Err(error) if self.loses_direct(&error) => {}
                Err(error) => return Err(error),
            }
        }
        Ok(())
    }

    /// Writes zeros from `at` to `end`, but no more bytes than `zeros` has. Returns the number of
    /// bytes.
    fn write_zeros(&self, zeros: &[Page], at: u64, end: u64) -> std::io::Result<u64> {
        let length = (end - at).min(size_of_val(zeros) as u64) as usize;
        // SAFETY: `Page` is 4096 bytes without padding, so a row of them is a row of bytes.
        let bytes = unsafe { std::slice::from_raw_parts(zeros.as_ptr().cast::<u8>(), length) };
        self.file.write_all_at(bytes, at)?;
        Ok(length as u64)
    }

    /// Writes zeros to blocks that the file system has reserved, and that were never written. They
    /// hold no data.
    ///
    /// A first write into a block that is only reserved is a transaction of the file system. That
    /// takes memory and room in the journal, just when memory is short.
    fn write_out(&self, offset: u64, bytes: u64, watch: Watch<'_>) -> std::io::Result<()> {
        if self.is_device {
            return Ok(());
        }
        let (mut at, end) = (offset, offset + bytes);
        let zeros = zeros();
        while at < end {
            let data = match rustix::fs::seek(&self.file, SeekFrom::Data(at)) {
                Err(Errno::NXIO) => end,
                // Round up to whole pages, as O_DIRECT requires.
                data => data?.next_multiple_of(PAGE_SIZE as u64).min(end),
            };
            while at < data {
                at += self.write_zeros(&zeros, at, data)?;
                watch(at - offset, bytes)?;
            }
            if at < end {
                let hole = rustix::fs::seek(&self.file, SeekFrom::Hole(at))?.min(end);
                let written = hole / PAGE_SIZE as u64 * PAGE_SIZE as u64;
                // If the hole begins within a page, write that page as a whole: O_DIRECT requires
                // it.
                at = if written > at { written } else { at + self.write_zeros(&zeros[..1], at, end)? };
                watch(at - offset, bytes)?;
            }
        }
        // If the file is not open with O_DIRECT, the zeros may still be in the page cache only.
        // This call writes them to the disk.
        self.file.sync_data()
    }

    fn write_header(&mut self, name: &str) -> Result<(), OpenError> {
        let mut header = Page::zeroed();
        header[..MAGIC.len()].copy_from_slice(MAGIC);
        header[MAGIC.len()..MAGIC.len() + NOTICE.len()].copy_from_slice(NOTICE);
        self.write(name, &header, PAGE_SIZE, 0)
    }

    /// Gives blocks back to the file system; their content is lost.
    pub(super) fn punch(&self, offset: u64, bytes: u64) -> Result<(), Errno> {
        let flags = FallocateFlags::PUNCH_HOLE | FallocateFlags::KEEP_SIZE;
        rustix::fs::fallocate(self.file.as_fd(), flags, offset, bytes)
    }

    /// Allocates blocks again that [`punch`](Self::punch) gave back.
    pub(super) fn refill(&self, offset: u64, bytes: u64, room: Room) -> std::io::Result<()> {
        if self.is_device {
            return Ok(()); // Its blocks were only discarded; they are still its own.
        }
        let flags = FallocateFlags::KEEP_SIZE;
        let mut done = rustix::fs::fallocate(self.file.as_fd(), flags, offset, bytes).map_err(Into::into);
        if room == Room::Written {
            done = done.and_then(|()| self.write_out(offset, bytes, &mut unwatched));
        }
        if done.is_err() {
            // A chunk that is only partly allocated is useless. So free the part.
            let _ = self.punch(offset, bytes);
        }
        done
    }
}

/// Makes the zero pages that one write takes, 4 MiB in all.
fn zeros() -> Vec<Page> {
    vec![Page::zeroed(); (4 << 20) / PAGE_SIZE]
}

/// Whether the path lies in /dev, on the file system of /dev itself, which is for devices only. A
/// regular file there would take memory, and stay after Weir has ended.
fn is_for_devices(path: &Path) -> bool {
    let parent = path.parent().filter(|parent| !parent.as_os_str().is_empty()).unwrap_or(Path::new("."));
    let directory = parent.canonicalize().unwrap_or_else(|_| parent.to_owned());
    let file_system = |path: &Path| rustix::fs::stat(path).map(|stat| stat.st_dev).ok();
    let (here, devices) = (file_system(&directory), file_system(Path::new("/dev")));
    directory.starts_with("/dev") && (here.is_none() || here == devices)
}

/// Whether a file is a Weir file that no process has open, for instance after a crash of the
/// machine. Its encryption key is gone.
pub fn is_left_over(path: &Path) -> bool {
    let is_ours = || -> std::io::Result<bool> {
        let flags = OFlags::RDONLY | OFlags::CLOEXEC | OFlags::NOFOLLOW | OFlags::NONBLOCK;
        let file = File::from(rustix::fs::open(path, flags, Mode::empty())?);
        let mut start = [0; MAGIC.len()];
        file.read_exact_at(&mut start, 0)?;
        if start != MAGIC || !file.metadata()?.is_file() {
            return Ok(false);
        }
        soon(path, || rustix::fs::flock(&file, FlockOperation::NonBlockingLockExclusive))?;
        Ok(true)
    };
    is_ours().unwrap_or(false)
}

/// Repeats `attempt` while `path` is in use: for half a second if a running process holds it, else
/// for ten seconds. When a process that used io_uring has ended, a worker of the kernel closes its
/// files a little later. That took 90 ms beside six busy processes on two cores, and may take as
/// long as a slow disk.
fn soon<T>(path: &Path, attempt: impl Fn() -> Result<T, Errno>) -> Result<T, Errno> {
    const EACH: Duration = Duration::from_millis(20);
    const HELD: u32 = 25;
    const LET_GO: u32 = 500;
    let owner = || {
        let inode = rustix::fs::stat(path).map_or(0, |stat| stat.st_ino);
        file_lock::owner(&Machine::this(), inode)
    };
    let mut tries = 1;
    loop {
        match attempt() {
            Err(errno @ (Errno::WOULDBLOCK | Errno::BUSY)) if tries < LET_GO => {
                // For a device that is mounted, the kernel lists no process that holds it. There,
                // EBUSY alone says that the device is in use.
                let is_held =
                    |owner| owner == Owner::Living || (owner, errno) == (Owner::Unlisted, Errno::BUSY);
                if tries >= HELD && is_held(owner()) {
                    return Err(errno);
                }
                std::thread::sleep(EACH);
                tries += 1;
            }
            answer => return answer,
        }
    }
}

/// The reason why a file or device cannot be opened, with the next step.
fn refusal(errno: Errno) -> &'static str {
    match errno {
        Errno::BUSY => "is in use (mounted, swap, part of an array, or another Weir's); detach it first",
        Errno::NOENT => "is in a directory that does not exist; create that first",
        Errno::ROFS => "is on a read-only file system; choose another place",
        Errno::ACCESS if rustix::process::geteuid().is_root() => {
            "cannot be written, as this root lacks CAP_DAC_OVERRIDE (a unit's or a container's bounds); choose another place"
        }
        Errno::ACCESS => "cannot be written; run as root, or choose another place",
        _ => "cannot be opened",
    }
}

/// Opens with O_DIRECT if the file system accepts it; returns whether it did.
fn open_file(path: &Path, is_device: bool, is_new: bool) -> Result<(File, bool), Errno> {
    let flags = OFlags::RDWR | OFlags::CLOEXEC;
    if is_device {
        // O_EXCL on a block device fails while the device is mounted, used as swap, or part of an
        // array.
        let fd = rustix::fs::open(path, flags | OFlags::EXCL | OFlags::DIRECT, Mode::empty())?;
        return Ok((File::from(fd), true));
    }
    if is_new {
        // Create the file without O_DIRECT. If the file system refuses O_DIRECT, an open with it
        // would fail and still leave a new file.
        rustix::fs::open(path, flags | OFlags::CREATE | OFlags::EXCL, Mode::RUSR | Mode::WUSR)?;
    }
    match rustix::fs::open(path, flags | OFlags::DIRECT, Mode::empty()) {
        Ok(fd) => Ok((File::from(fd), true)),
        Err(Errno::INVAL) => Ok((File::from(rustix::fs::open(path, flags, Mode::empty())?), false)),
        Err(errno) => Err(errno),
    }
}

/// The content of a file or device before Weir takes it.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
enum Content {
    Nothing,
    Weir,
    Other(&'static str),
}
