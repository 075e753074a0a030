//! The parts of the kernel's userfaultfd that no available crate has: MOVE, POISON, the events.
//!
//! Layouts and numbers are from `include/uapi/linux/userfaultfd.h` and `fs.h` (PAGEMAP_SCAN).

use crate::{BLOCK, Error};
use rustix::io::Errno;
use std::fs::File;
use std::io;
use std::os::fd::{AsFd, AsRawFd, BorrowedFd, FromRawFd, OwnedFd};
use weir_core::PAGE_SIZE;

const API: u64 = 0xAA;
const EVENT_REMAP: u64 = 1 << 2;
const EVENT_REMOVE: u64 = 1 << 3;
const EVENT_UNMAP: u64 = 1 << 6;
const POISON: u64 = 1 << 14;
const MOVE: u64 = 1 << 16;
const FEATURES: u64 = EVENT_REMAP | EVENT_REMOVE | EVENT_UNMAP | POISON | MOVE;

const fn request(direction: u64, number: u64, bytes: usize) -> u64 {
    direction << 30 | (bytes as u64) << 16 | API << 8 | number
}
const UFFDIO_API: u64 = request(3, 0x3F, size_of::<[u64; 3]>());
const UFFDIO_REGISTER: u64 = request(3, 0x00, size_of::<[u64; 4]>());
const UFFDIO_UNREGISTER: u64 = request(2, 0x01, size_of::<[u64; 2]>());
const UFFDIO_WAKE: u64 = request(2, 0x02, size_of::<[u64; 2]>());
const UFFDIO_COPY: u64 = request(3, 0x03, size_of::<[u64; 5]>());
const UFFDIO_ZEROPAGE: u64 = request(3, 0x04, size_of::<[u64; 4]>());
const UFFDIO_MOVE: u64 = request(3, 0x05, size_of::<[u64; 5]>());
const UFFDIO_CONTINUE: u64 = request(3, 0x07, size_of::<[u64; 4]>());
const UFFDIO_POISON: u64 = request(3, 0x08, size_of::<[u64; 4]>());
const USERFAULTFD_IOC_NEW: u64 = API << 8;
const PAGEMAP_SCAN: u64 = 3 << 30 | 96 << 16 | (b'f' as u64) << 8 | 16;
const PRESENT_OR_SWAPPED: u64 = 1 << 3 | 1 << 4;
const MODE_MISSING: u64 = 1;

/// A message of the kernel about managed memory.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Event {
    /// A thread waits for the page at this address.
    Fault(usize),
    /// Memory was moved: old address, new address, bytes.
    Remap(usize, usize, usize),
    /// The kernel is about to drop the content of `start..end`.
    Remove(usize, usize),
    /// `start..end` is no longer mapped.
    Unmap(usize, usize),
}

/// A request that stopped early.
#[derive(Clone, Copy, Debug)]
pub struct Stopped {
    /// Number of bytes that the request handled before it stopped.
    pub done: usize,
    /// The reason why the request stopped.
    pub why: Errno,
}

/// A userfaultfd of this process.
#[derive(Debug)]
pub struct Uffd(OwnedFd);

impl Uffd {
    /// Opens a userfaultfd: by `/dev/userfaultfd`, else by the system call.
    ///
    /// # Errors
    /// Fails with [`Error::Denied`] or [`Error::Kernel`].
    pub fn open() -> Result<Self, Error> {
        let fd = match File::options().read(true).write(true).open("/dev/userfaultfd") {
            // SAFETY: the call takes flags, and returns a descriptor.
            Ok(device) => unsafe {
                libc::ioctl(device.as_raw_fd(), USERFAULTFD_IOC_NEW, libc::O_CLOEXEC | libc::O_NONBLOCK)
            },
            // SAFETY: the call takes flags, and returns a descriptor.
            Err(_) => unsafe {
                libc::syscall(libc::SYS_userfaultfd, libc::O_CLOEXEC | libc::O_NONBLOCK) as i32
            },
        };
        if fd < 0 {
            return Err(Error::Denied(io::Error::last_os_error()));
        }
        // SAFETY: the descriptor was just opened, and nothing else owns it.
        let uffd = Uffd(unsafe { OwnedFd::from_raw_fd(fd) });
        let mut api = [API, FEATURES, 0];
        uffd.ioctl(UFFDIO_API, &mut api).map_err(|error| Error::Kernel(error.into()))?;
        Ok(uffd)
    }

    fn ioctl<const N: usize>(&self, request: u64, argument: &mut [u64; N]) -> Result<(), Errno> {
        ioctl(self.0.as_fd(), request, argument)
    }

    /// Registers `start..end`: page faults on missing pages become events of this userfaultfd.
    ///
    /// # Errors
    /// Fails with the kernel's error.
    pub fn register(&self, start: usize, end: usize) -> Result<(), Errno> {
        self.ioctl(UFFDIO_REGISTER, &mut [start as u64, (end - start) as u64, MODE_MISSING, 0])
    }

    /// Ends the registration of `start..end`.
    ///
    /// # Errors
    /// Fails with the kernel's error.
    pub fn unregister(&self, start: usize, end: usize) -> Result<(), Errno> {
        self.ioctl(UFFDIO_UNREGISTER, &mut [start as u64, (end - start) as u64])
    }

    /// Wakes threads that wait for a page in `at..at + bytes`, so that they try their access again.
    pub fn wake(&self, at: usize, bytes: usize) {
        let _ = self.ioctl(UFFDIO_WAKE, &mut [at as u64, bytes as u64]);
    }

    /// Moves pages by reference.
    ///
    /// # Errors
    /// Fails with the number of bytes done, and the reason why the kernel stopped.
    pub fn move_pages(&self, to: usize, from: usize, bytes: usize) -> Result<(), Stopped> {
        let mut argument = [to as u64, from as u64, bytes as u64, 0, 0];
        let result = self.ioctl(UFFDIO_MOVE, &mut argument);
        stopped(result, argument[4])
    }

    /// Copies pages into place.
    ///
    /// # Errors
    /// Fails with the number of bytes done, and the reason why the kernel stopped.
    pub fn copy(&self, to: usize, from: usize, bytes: usize) -> Result<(), Stopped> {
        let mut argument = [to as u64, from as u64, bytes as u64, 0, 0];
        let result = self.ioctl(UFFDIO_COPY, &mut argument);
        stopped(result, argument[4])
    }

    /// Puts pages of zeros into place.
    ///
    /// # Errors
    /// Fails with the number of bytes done, and the reason why the kernel stopped.
    pub fn zero(&self, at: usize, bytes: usize) -> Result<(), Stopped> {
        let mut argument = [at as u64, bytes as u64, 0, 0];
        let result = self.ioctl(UFFDIO_ZEROPAGE, &mut argument);
        stopped(result, argument[3])
    }

    /// Poisons pages: a thread that touches one gets SIGBUS.
    ///
    /// # Errors
    /// Fails with the number of bytes done, and the reason why the kernel stopped.
    pub fn poison(&self, at: usize, bytes: usize) -> Result<(), Stopped> {
        let mut argument = [at as u64, bytes as u64, 0, 0];
        let result = self.ioctl(UFFDIO_POISON, &mut argument);
        stopped(result, argument[3])
    }

    /// Whether the anonymous mapping with this page is registered.
    ///
    /// # Errors
    /// Fails with `EAGAIN` while the address space is changing.
    pub fn is_registered(&self, page: usize) -> Result<bool, Errno> {
        // The kernel refuses this request for anonymous memory with `EINVAL`. Before that, the
        // kernel checks whether the mapping is registered, and refuses an unregistered one with
        // `ENOENT`.
        match self.ioctl(UFFDIO_CONTINUE, &mut [page as u64, PAGE_SIZE as u64, 0, 0]) {
            Err(Errno::AGAIN) => Err(Errno::AGAIN),
            Err(Errno::NOENT) => Ok(false),
            _ => Ok(true),
        }
    }

    /// Reads one event, if there is one.
    ///
    /// # Errors
    /// Fails with the kernel's error.
    pub fn read(&self) -> Result<Option<Event>, Errno> {
        loop {
            let mut message = [0; 32];
            match rustix::io::read(&self.0, &mut message) {
                Ok(32) => {}
                Ok(_) | Err(Errno::AGAIN) => return Ok(None),
                Err(Errno::INTR) => continue,
                Err(error) => return Err(error),
            }
            let word =
                |at: usize| usize::from_ne_bytes(message[at..at + 8].try_into().expect("eight of 32 bytes"));
            return Ok(Some(match message[0] {
                0x12 => Event::Fault(word(16)),
                0x14 => Event::Remap(word(8), word(16), word(24)),
                0x15 => Event::Remove(word(8), word(16)),
                0x16 => Event::Unmap(word(8), word(16)),
                // The pager has asked for no other kind of event. Skip this one.
                _ => continue,
            }));
        }
    }
}

impl AsFd for Uffd {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.0.as_fd()
    }
}

fn stopped(result: Result<(), Errno>, done: u64) -> Result<(), Stopped> {
    // If the kernel has done nothing, it may write the error as a negative number in place of the
    // bytes.
    let done = usize::try_from(done as i64).unwrap_or(0);
    result.map_err(|why| Stopped { done, why })
}

fn ioctl<const N: usize>(fd: BorrowedFd<'_>, request: u64, argument: &mut [u64; N]) -> Result<(), Errno> {
    // SAFETY: the argument has the size that the request reads and writes. The caller manages the
    // memory that the request changes.
    match unsafe { libc::ioctl(fd.as_raw_fd(), request, argument.as_mut_ptr()) } {
        0.. => Ok(()),
        _ => Err(Errno::from_io_error(&io::Error::last_os_error()).unwrap_or(Errno::IO)),
    }
}

/// Calls `found` with each range of `start..end` that has pages.
///
/// # Errors
/// Fails with the kernel's error.
pub fn populated(
    pagemap: &File,
    start: usize,
    end: usize,
    mut found: impl FnMut(usize, usize),
) -> Result<(), Errno> {
    let mut regions = [[0_u64; 3]; 64];
    let mut from = start as u64;
    while from < end as u64 {
        let mut scan = [0; 12];
        scan[0] = 96;
        scan[2] = from;
        scan[3] = end as u64;
        scan[5] = regions.as_mut_ptr() as u64;
        scan[6] = regions.len() as u64;
        scan[10] = PRESENT_OR_SWAPPED;
        scan[11] = PRESENT_OR_SWAPPED;
        // SAFETY: the scan has the kernel's layout, and room for as many regions as it says.
        let count = unsafe { libc::ioctl(pagemap.as_raw_fd(), PAGEMAP_SCAN, scan.as_mut_ptr()) };
        if count < 0 {
            return Err(Errno::from_io_error(&io::Error::last_os_error()).unwrap_or(Errno::IO));
        }
        for region in &regions[..count as usize] {
            found(region[0] as usize, region[1] as usize);
        }
        if scan[4] <= from {
            break;
        }
        from = scan[4];
    }
    Ok(())
}

const _: () = assert!(BLOCK.is_multiple_of(PAGE_SIZE));
