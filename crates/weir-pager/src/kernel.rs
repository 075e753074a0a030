//! The pager's requests to the kernel: userfaultfd, the process's mappings, the pager's own memory,
//! the clock. Tests have a simulator in the kernel's place.

use crate::maps::{Mapping, Maps};
use crate::uffd::{self, Event, Stopped, Uffd};
use crate::{BLOCK, Error};
use rustix::event::{EventfdFlags, PollFd, PollFlags, Timespec, eventfd, poll};
use rustix::io::Errno;
use rustix::mm::{Advice, MapFlags, ProtFlags};
use std::fs::File;
use std::io;
use std::os::fd::OwnedFd;
use std::os::unix::fs::FileExt as _;
use std::sync::Arc;
use std::time::{Duration, Instant};
use weir_core::PageBytes;
use weir_share::Offers;

/// The pager's requests to userfaultfd have the meaning that `ioctl_userfaultfd(2)` describes. They
/// only fill missing pages.
pub(crate) trait Kernel {
    /// Reserves address space for this thread's own memory, aligned to a block. A child process
    /// does not inherit this memory.
    fn reserve(&mut self, bytes: usize) -> Result<usize, Error>;

    fn register(&mut self, start: usize, end: usize) -> Result<(), Errno>;

    fn unregister(&mut self, start: usize, end: usize) -> Result<(), Errno>;

    /// Wakes threads that wait for a page in `at..at + bytes`, so that they try their access again.
    fn wake(&mut self, at: usize, bytes: usize);

    fn move_pages(&mut self, to: usize, from: usize, bytes: usize) -> Result<(), Stopped>;

    fn copy(&mut self, to: usize, from: usize, bytes: usize) -> Result<(), Stopped>;

    fn zero(&mut self, at: usize, bytes: usize) -> Result<(), Stopped>;

    fn poison(&mut self, at: usize, bytes: usize) -> Result<(), Stopped>;

    /// Whether the mapping with this page is registered. Fails with `EAGAIN` while the address
    /// space is changing.
    fn is_registered(&mut self, page: usize) -> Result<bool, Errno>;

    /// Returns the kernel's next event, if there is one.
    fn event(&mut self) -> Option<Event>;

    /// Whether the address space has changed, or is about to, and the pager has not read the event
    /// of that change.
    fn is_changing(&mut self) -> bool {
        // While the address space is changing, the kernel refuses each request before it looks at
        // the request's range. So an empty request shows whether it is changing.
        self.zero(0, 0).is_err_and(|Stopped { why, .. }| why == Errno::AGAIN)
    }

    /// Waits for an event or a [`Waker`], for `longest` at most.
    fn wait(&mut self, longest: Option<Duration>);

    /// Calls `found` with each stretch of `start..end` that has pages.
    fn populated(&mut self, start: usize, end: usize, found: impl FnMut(usize, usize)) -> Result<(), Errno>;

    /// Gives the kernel advice about memory (madvise(2)). Advice that frees memory is for this
    /// thread's own memory alone.
    fn advise(&mut self, at: usize, bytes: usize, advice: Advice) -> Result<(), Errno>;

    /// Unlocks this thread's own memory.
    fn unlock(&mut self, at: usize, bytes: usize);

    /// Fills `mappings` with the memory of this process that can be managed. Returns false if the
    /// mappings cannot be read.
    fn read_mappings(&mut self, mappings: &mut Vec<Mapping>) -> bool;

    /// The size of this process's memory.
    fn size(&mut self) -> Size;

    /// Pages of this thread's own memory, for reading. All of them have memory, and no other thread
    /// uses them.
    fn pages(&self, at: usize, count: usize) -> &[PageBytes];

    /// Pages of this thread's own memory, for writing. The kernel adds memory to pages that have
    /// none.
    fn pages_mut(&mut self, at: usize, count: usize) -> &mut [PageBytes];

    /// Makes a system call that changes this thread's rights. `call` has the number of the system
    /// call and its arguments.
    fn call(&mut self, call: [usize; 6]);

    /// Whether this thread of the process is still there, by its thread ID (TID). `None` if the
    /// pager cannot ask, because the process has a seccomp filter.
    fn is_thread(&mut self, thread: i32) -> Option<bool>;

    /// The time since a fixed moment.
    fn now(&self) -> Duration;
}

/// Ends the wait of the pager's thread.
#[derive(Clone, Debug)]
pub(crate) struct Waker(Arc<OwnedFd>);

impl Waker {
    /// # Errors
    /// Fails without descriptors.
    pub(crate) fn new() -> Result<Self, Error> {
        let flags = EventfdFlags::CLOEXEC | EventfdFlags::NONBLOCK;
        Ok(Waker(Arc::new(eventfd(0, flags).map_err(|error| Error::System(error.into()))?)))
    }

    pub(crate) fn wake(&self) {
        // It fails only if billions of calls were not heard. Then the thread is awake already.
        let _ = rustix::io::write(&*self.0, &1_u64.to_ne_bytes());
    }

    /// Forgets the calls of [`wake`](Self::wake) until now.
    fn hear(&self) {
        let _ = rustix::io::read(&*self.0, &mut [0_u8; 8]);
    }
}

/// The size of a process's memory, in pages.
#[derive(Clone, Copy, Debug, Default)]
pub(crate) struct Size {
    /// Pages of the address space. This number changes whenever memory is mapped or unmapped.
    pub mapped: usize,
    /// Anonymous pages in memory.
    pub anonymous: usize,
}

/// Decides when the pager's thread looks for its next event without sleeping. A thread that sleeps
/// is woken some microseconds after its event. A program that has just had a page fault often has
/// the next one soon.
#[derive(Debug)]
struct Watch {
    /// Time for which the thread looks after a page fault.
    time: Duration,
    /// Whether a page fault has come since the thread slept.
    is_due: bool,
}

/// Number of looks between two offers of the processor to other threads.
const LOOKS: usize = 8;

impl Watch {
    fn note(&mut self, event: Option<&Event>) {
        self.is_due |= matches!(event, Some(Event::Fault(_)));
    }

    /// Looks for an event, for `longest` at most, and while `may_go_on` says so. Returns whether
    /// there is an event. If not, the thread should sleep.
    fn look(
        &mut self,
        longest: Option<Duration>,
        now: impl Fn() -> Duration,
        mut may_go_on: impl FnMut() -> bool,
        mut has_event: impl FnMut() -> bool,
    ) -> bool {
        if !std::mem::take(&mut self.is_due) {
            return false;
        }
        let time = longest.map_or(self.time, |longest| longest.min(self.time));
        let begun = now();
        while now() - begun < time && may_go_on() {
            for _ in 0..LOOKS {
                if has_event() {
                    return true;
                }
                std::hint::spin_loop();
            }
        }
        false
    }
}

/// The kernel of this machine.
#[derive(Debug)]
pub(crate) struct System {
    uffd: Uffd,
    watch: Watch,
    offers: Offers,
    waker: Waker,
    maps: Maps,
    pagemap: File,
    size: File,
    status: Option<File>,
    began: Instant,
}

impl System {
    /// Opens the descriptors of the pager, in the descriptor table of the calling thread. After
    /// each page fault the thread looks for the next one for as long as `spin`, before it sleeps.
    pub fn open(spin: Duration) -> Result<Self, Error> {
        Ok(System {
            uffd: Uffd::open()?,
            watch: Watch { time: spin, is_due: false },
            offers: Offers::default(),
            waker: Waker::new()?,
            maps: Maps::open()?,
            // The `pagemap` file of any thread shows the memory of the whole process.
            pagemap: File::open("/proc/thread-self/pagemap")?,
            size: File::open("/proc/self/statm")?,
            status: File::open("/proc/thread-self/status").ok(),
            began: Instant::now(),
        })
    }

    /// Ends this thread's [`wait`](Kernel::wait).
    pub fn waker(&self) -> Waker {
        self.waker.clone()
    }
}

/// Reserves `bytes` bytes of address space, which take no memory before they are used.
pub(crate) fn reserve(bytes: usize) -> Result<usize, Error> {
    let protection = ProtFlags::READ | ProtFlags::WRITE;
    let flags = MapFlags::PRIVATE | MapFlags::NORESERVE;
    // SAFETY: a new mapping at an address of the kernel's choice overlaps no other.
    let at = unsafe { rustix::mm::mmap_anonymous(std::ptr::null_mut(), bytes + BLOCK, protection, flags) };
    let at = at.map_err(|error| Error::System(error.into()))?;
    // The mapping is larger by one block than asked for, so that an aligned part fits. The rest at
    // both ends stays reserved, and the kernel merges no other mapping with the aligned part.
    Ok(at.expose_provenance().next_multiple_of(BLOCK))
}

fn page_at(address: usize) -> *mut PageBytes {
    std::ptr::with_exposed_provenance_mut(address)
}

/// Pages of the pager's own memory.
///
/// # Safety
/// The pages are mapped, and nothing else uses them as long as the slice lives.
pub(crate) unsafe fn own_pages<'a>(at: usize, count: usize) -> &'a mut [PageBytes] {
    // SAFETY: the caller promises it.
    unsafe { std::slice::from_raw_parts_mut(page_at(at), count) }
}

/// Makes the system call with this number and these arguments.
///
/// # Safety
/// The call changes only the calling thread's rights.
pub(crate) unsafe fn call_system([number, first, second, third, fourth, fifth]: [usize; 6]) {
    // SAFETY: the caller promises it.
    unsafe { libc::syscall(number as i64, first, second, third, fourth, fifth) };
}

impl Kernel for System {
    fn reserve(&mut self, bytes: usize) -> Result<usize, Error> {
        let at = reserve(bytes)?;
        // Without huge pages the pager works too, and is slower.
        let _ = self.advise(at, bytes, Advice::LinuxHugepage);
        self.advise(at, bytes, Advice::LinuxDontFork).map_err(|error| Error::System(error.into()))?;
        Ok(at)
    }

    fn register(&mut self, start: usize, end: usize) -> Result<(), Errno> {
        self.uffd.register(start, end)
    }

    fn unregister(&mut self, start: usize, end: usize) -> Result<(), Errno> {
        self.uffd.unregister(start, end)
    }

    fn wake(&mut self, at: usize, bytes: usize) {
        self.uffd.wake(at, bytes);
    }

    fn move_pages(&mut self, to: usize, from: usize, bytes: usize) -> Result<(), Stopped> {
        self.uffd.move_pages(to, from, bytes)
    }

    fn copy(&mut self, to: usize, from: usize, bytes: usize) -> Result<(), Stopped> {
        self.uffd.copy(to, from, bytes)
    }

    fn zero(&mut self, at: usize, bytes: usize) -> Result<(), Stopped> {
        self.uffd.zero(at, bytes)
    }

    fn poison(&mut self, at: usize, bytes: usize) -> Result<(), Stopped> {
        self.uffd.poison(at, bytes)
    }

    fn is_registered(&mut self, page: usize) -> Result<bool, Errno> {
        self.uffd.is_registered(page)
    }

    fn event(&mut self) -> Option<Event> {
        let event = self.uffd.read().ok().flatten();
        self.watch.note(event.as_ref());
        event
    }

    fn wait(&mut self, longest: Option<Duration>) {
        let System { uffd, watch, offers, waker, began, .. } = self;
        let mut fds = [PollFd::new(uffd, PollFlags::IN), PollFd::new(&*waker.0, PollFlags::IN)];
        let now = || began.elapsed();
        let may_go_on = || {
            if !offers.is_crowded() {
                offers.offer();
            }
            !offers.is_crowded()
        };
        let at_once = Timespec { tv_sec: 0, tv_nsec: 0 };
        if !watch.look(longest, now, may_go_on, || poll(&mut fds, Some(&at_once)) != Ok(0)) {
            let longest = longest.map(|longest| Timespec {
                tv_sec: longest.as_secs().cast_signed(),
                tv_nsec: longest.subsec_nanos().into(),
            });
            let _ = poll(&mut fds, longest.as_ref());
        }
        if fds[1].revents().contains(PollFlags::IN) {
            waker.hear();
            // The next page fault may follow soon all the same.
            watch.is_due = true;
        }
    }

    fn populated(&mut self, start: usize, end: usize, found: impl FnMut(usize, usize)) -> Result<(), Errno> {
        uffd::populated(&self.pagemap, start, end, found)
    }

    fn advise(&mut self, at: usize, bytes: usize, advice: Advice) -> Result<(), Errno> {
        // SAFETY: advice may free memory. Callers give such advice for this thread's own memory
        // alone.
        unsafe { rustix::mm::madvise(page_at(at).cast(), bytes, advice) }
    }

    fn unlock(&mut self, at: usize, bytes: usize) {
        // SAFETY: the range is this thread's own memory, and unlocking it changes no content.
        let _ = unsafe { rustix::mm::munlock(page_at(at).cast(), bytes) };
    }

    fn read_mappings(&mut self, mappings: &mut Vec<Mapping>) -> bool {
        mappings.clear();
        self.maps.read().map(|found| mappings.extend(found)).is_ok()
    }

    fn size(&mut self) -> Size {
        let mut text = [0; 128];
        let read = self.size.read_at(&mut text, 0).unwrap_or(0);
        // `/proc/self/statm` begins with three numbers of pages: those of the address space, those
        // in memory, and those in memory that belong to files.
        let words = str::from_utf8(&text[..read]).unwrap_or_default().split_ascii_whitespace();
        let mut numbers = words.map(|word| word.parse().unwrap_or(0));
        let [mapped, there, files] = [(); 3].map(|()| numbers.next().unwrap_or(0));
        Size { mapped, anonymous: there.saturating_sub(files) }
    }

    fn pages(&self, at: usize, count: usize) -> &[PageBytes] {
        // SAFETY: this is the thread's own memory. Only a `&mut self` call could unmap it, and the
        // slice borrows `self`.
        unsafe { std::slice::from_raw_parts(page_at(at), count) }
    }

    fn pages_mut(&mut self, at: usize, count: usize) -> &mut [PageBytes] {
        // SAFETY: this is the thread's own memory, which no other thread uses. The slice borrows
        // `self` alone, so no other slice exists.
        unsafe { own_pages(at, count) }
    }

    fn call(&mut self, call: [usize; 6]) {
        // SAFETY: the caller of `Pager::also` promises that the call changes only this thread's
        // rights.
        unsafe { call_system(call) };
    }

    fn is_thread(&mut self, thread: i32) -> Option<bool> {
        if is_filtered(self.status.as_ref()) {
            return None;
        }
        // SAFETY: the signal 0 is not sent. The call only finds out whether the thread is there.
        let found = unsafe { libc::syscall(libc::SYS_tgkill, libc::getpid(), thread, 0) };
        let is_gone = found == -1 && io::Error::last_os_error().raw_os_error() == Some(libc::ESRCH);
        Some(!is_gone)
    }

    fn now(&self) -> Duration {
        self.began.elapsed()
    }
}

/// Whether the process has forbidden itself system calls (seccomp). Then the pager makes no call
/// that it has not made before: the kernel could end the process for it.
pub(crate) fn is_filtered(status: Option<&File>) -> bool {
    let mut text = [0; 4096];
    let read = status.and_then(|status| status.read_at(&mut text, 0).ok()).unwrap_or(0);
    !String::from_utf8_lossy(&text[..read]).contains("Seccomp:\t0\n")
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::cell::Cell;

    /// The looks of a watch of 40 us, after a page fault or after none. Each reading of the clock
    /// takes 1 us. The event comes after `comes` us, and the processor is needed after `needed` us.
    /// Returns whether the event was seen, and the time after the looks.
    fn looks(has_fault: bool, longest: Option<u64>, comes: u64, needed: u64) -> (bool, u64) {
        let mut watch = Watch { time: Duration::from_micros(40), is_due: false };
        watch.note(Some(&Event::Remove(0, 0)));
        if has_fault {
            watch.note(Some(&Event::Fault(0)));
            watch.note(None);
        }
        let clock = Cell::new(0);
        let now = || Duration::from_micros(clock.replace(clock.get() + 1));
        let longest = longest.map(Duration::from_micros);
        let is_seen = watch.look(longest, now, || clock.get() < needed, || clock.get() >= comes);
        let after = clock.get();
        assert!(!watch.look(None, || Duration::ZERO, || false, || true), "a page fault begins one look");
        (is_seen, after)
    }

    #[test]
    fn after_a_page_fault_the_thread_looks_for_the_next_one_for_a_while() {
        assert_eq!(looks(false, None, 0, 1_000), (false, 0), "other events begin no look");
        assert_eq!(looks(true, None, 30, 1_000), (true, 30));
        assert_eq!(looks(true, None, 1_000, 1_000), (false, 41));
        assert_eq!(looks(true, Some(2_000), 1_000, 1_000), (false, 41));
        assert_eq!(looks(true, Some(20), 1_000, 1_000), (false, 21), "no longer than it may wait");
        assert_eq!(looks(true, None, 30, 10), (false, 10), "others need the processor");
    }
}
