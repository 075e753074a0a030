//! `host:SIZE`: a store in RAM. Tests and `weir try` use it, and give-back moves pages there if
//! there is no disk. It is also the control that shows the cost of the rest of Weir, since this
//! store costs almost nothing.

use crate::{Fault, Keep, Lane, OpenError, Progress, Reclaim, Share, State, Store, Survive, Ticket};
use std::io;
use std::os::fd::{BorrowedFd, OwnedFd};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, OnceLock};
use weir_core::{ByteSize, Memory, PAGE_SIZE, PageBytes, Slot, Watch, copy, unwatched};

/// Slots of a chunk: 128 MiB, as for a GPU's chunks.
const CHUNK_SLOTS: u32 = 32_768;

/// The name under which a keeper holds the memfd with the pages.
pub(crate) const HANDOFF: &str = "pages";

/// A store in RAM, all of it taken, touched and (if allowed) locked at the start.
///
/// The memory is a memfd: a keeper that maps and locks it preserves the pages when the daemon dies.
#[derive(Debug)]
pub struct Host {
    name: String,
    shared: Arc<Shared>,
}

#[derive(Debug)]
struct Shared {
    memory: Memory,
    slots: u32,
    /// Chunks whose memory has been given back.
    released: Box<[AtomicBool]>,
    /// The keeper, which also locks the pages. The store tells it of pages that are added later.
    keep: OnceLock<Arc<dyn Keep>>,
}

impl Host {
    /// Bytes of a chunk: memory is given back in whole chunks.
    pub const CHUNK: ByteSize = ByteSize(CHUNK_SLOTS as u64 * PAGE_SIZE as u64);

    /// Takes `slots` pages of RAM.
    ///
    /// # Errors
    /// Fails when there is not enough memory.
    pub fn new(slots: u32) -> Result<Self, OpenError> {
        Self::watched(slots, &mut unwatched)
    }

    /// Does the same as [`Host::new`], with progress reports and a way to stop, for a large number
    /// of slots.
    ///
    /// # Errors
    /// Fails as [`Host::new`] does. If `watch` returns an error, fails with that error too.
    pub fn watched(slots: u32, watch: Watch<'_>) -> Result<Self, OpenError> {
        let bytes = u64::from(slots) * PAGE_SIZE as u64;
        let name = format!("host:{}", ByteSize(bytes));
        match Memory::shared_watched("weir-host", bytes as usize, watch) {
            Ok(memory) => Ok(Self::over(name, memory, slots)),
            Err(error) => Err(OpenError::no_memory(name, bytes, error)),
        }
    }

    /// Takes over the memory of a `Host` whose process has ended.
    pub fn adopt(memory: Memory) -> Self {
        let slots = u32::try_from(memory.len() / PAGE_SIZE).unwrap_or(u32::MAX);
        Self::over(format!("host:{}", ByteSize(memory.len() as u64)), memory, slots)
    }

    fn over(name: String, memory: Memory, slots: u32) -> Self {
        let chunks = slots.div_ceil(CHUNK_SLOTS);
        let released = (0..chunks).map(|_| AtomicBool::new(false)).collect();
        Host { name, shared: Arc::new(Shared { memory, slots, released, keep: OnceLock::new() }) }
    }

    /// The descriptor of the memory, for the keeper.
    pub fn fd(&self) -> BorrowedFd<'_> {
        self.shared.memory.fd().expect("Host memory is always a memfd")
    }

    /// Whether the memory is locked in RAM, as swap needs.
    pub fn is_locked(&self) -> bool {
        self.shared.memory.is_locked()
    }
}

impl Shared {
    /// The slot's address, unless it is outside of the store or its chunk has been released.
    #[inline]
    fn at(&self, slot: Slot) -> Result<*mut u8, Fault> {
        if slot.0 >= self.slots || self.released[(slot.0 / CHUNK_SLOTS) as usize].load(Ordering::Relaxed) {
            return Err(Fault::Lost);
        }
        // SAFETY: the address is inside the mapping, which is `slots` pages long.
        Ok(unsafe { self.memory.as_ptr().add(slot.0 as usize * PAGE_SIZE) })
    }

    /// A chunk's first byte and length.
    fn chunk(&self, chunk: u32) -> Result<(u64, u64), Fault> {
        let first = u64::from(chunk) * u64::from(CHUNK_SLOTS);
        if first >= u64::from(self.slots) {
            return Err(Fault::Lost);
        }
        let slots = u64::from(CHUNK_SLOTS).min(u64::from(self.slots) - first);
        Ok((first * PAGE_SIZE as u64, slots * PAGE_SIZE as u64))
    }
}

impl Store for Host {
    fn name(&self) -> &str {
        &self.name
    }

    fn slots(&self) -> u32 {
        self.shared.slots
    }

    fn lane(&self, _depth: usize) -> Result<Box<dyn Lane>, OpenError> {
        Ok(Box::new(HostLane(Arc::clone(&self.shared))))
    }

    fn state(&self, _member: u32) -> State {
        State::Online
    }

    fn unfit_for_swap(&self) -> Option<String> {
        None
    }

    fn reclaim(&self) -> Option<&dyn Reclaim> {
        Some(self)
    }

    fn survive(&self) -> Option<&dyn Survive> {
        Some(self)
    }

    fn share(&self) -> Option<&dyn Share> {
        Some(self)
    }
}

impl Survive for Host {
    fn keep_with(&self, keep: Arc<dyn Keep>, held: bool) -> io::Result<()> {
        if !held {
            keep.hold(HANDOFF, self.fd(), true)?;
        }
        // The store gets a keeper only once, so `set` cannot fail.
        let _ = self.shared.keep.set(keep);
        Ok(())
    }

    /// Always true: only threads of the store's process write the memory, and they end before their
    /// process does.
    fn is_quiet(&self) -> bool {
        true
    }

    /// Does nothing: the kernel clears the memory when no process maps it any more.
    fn forget(&self) {}
}

impl Share for Host {
    fn window(&self) -> io::Result<OwnedFd> {
        self.shared.memory.read_only()
    }
}

impl Reclaim for Host {
    fn chunk_slots(&self) -> u32 {
        CHUNK_SLOTS
    }

    fn release(&self, chunk: u32) -> Result<(), Fault> {
        let (offset, bytes) = self.shared.chunk(chunk)?;
        // Punch a hole into the file. That frees locked pages too, while MADV_REMOVE refuses them.
        let punched = self.shared.memory.punch(offset as usize, bytes as usize);
        punched.map_err(|error| Fault::Io(error.raw_os_error().unwrap_or(libc::EIO)))?;
        // Mark the chunk as released only now, after a success. After a failure the chunk still
        // takes pages.
        self.shared.released[chunk as usize].store(true, Ordering::SeqCst);
        Ok(())
    }

    fn take(&self, chunk: u32) -> Result<(), Fault> {
        self.take_of(chunk, weir_core::available())
    }
}

impl Host {
    /// Takes a chunk's memory again, if `available` has room for it. Populating more memory than
    /// there is would not fail. Instead the OOM killer would end a process.
    fn take_of(&self, chunk: u32, available: Option<u64>) -> Result<(), Fault> {
        let (offset, bytes) = self.shared.chunk(chunk)?;
        if available.is_some_and(|available| bytes > available) {
            return Err(Fault::Io(libc::ENOMEM));
        }
        let taken = self.shared.memory.take(offset as usize, bytes as usize, &mut unwatched);
        taken.map_err(|error| Fault::Io(error.raw_os_error().unwrap_or(libc::ENOMEM)))?;
        if let Some(keep) = self.shared.keep.get() {
            // The keeper must map these pages too. Otherwise no process would map them once this
            // one dies, and the kernel would swap them out first of all. If the call fails, the
            // keeper is gone, and the pages could not outlive this process anyway.
            let _ = keep.took(HANDOFF, offset, bytes);
        }
        self.shared.released[chunk as usize].store(false, Ordering::SeqCst);
        Ok(())
    }
}

/// A lane into RAM: every operation is a copy, which is finished when the call returns.
#[derive(Debug)]
struct HostLane(Arc<Shared>);

impl Lane for HostLane {
    fn write(&mut self, _ticket: Ticket, slot: Slot, page: &PageBytes) -> Progress {
        Progress::Done(self.0.at(slot).map(|at| {
            // SAFETY: `at` is a page of the mapping, and no safe reference overlaps it.
            unsafe { copy::page_to_shared(at, page) }
        }))
    }

    fn read(&mut self, _ticket: Ticket, slot: Slot, page: &mut PageBytes) -> Progress {
        Progress::Done(self.0.at(slot).map(|at| {
            // SAFETY: `at` is a page of the mapping, as in `write`.
            unsafe { copy::page_from_shared(page, at) }
        }))
    }

    fn writes_past_caches(&self) -> bool {
        true
    }

    fn write_past_caches(&mut self, slot: Slot, page: &PageBytes) -> Result<(), Fault> {
        // SAFETY: `at` is a page of the mapping, as in `write`, and slots are aligned to pages.
        self.0.at(slot).map(|at| unsafe { copy::page_past_caches(at, page) })
    }

    fn settle(&mut self) {
        copy::settle();
    }

    fn prepare(&self, slot: Slot) {
        if let Ok(at) = self.0.at(slot) {
            copy::prefetch_for_write(at);
        }
    }

    unsafe fn view(&self, slot: Slot) -> Option<&PageBytes> {
        // SAFETY: `at` is a page of the mapping, which lives as long as `self`. The caller
        // guarantees that the page is not written.
        self.0.at(slot).ok().map(|at| unsafe { &*at.cast::<PageBytes>() })
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::OpenErrorKind;
    use rustix::fs::{MemfdFlags, SealFlags};
    use std::sync::Mutex;

    #[test]
    fn a_released_chunk_frees_its_memory_and_faults_until_it_is_taken_again() {
        let host = Host::new(CHUNK_SLOTS + 10).unwrap();
        let mut lane = host.lane(1).unwrap();
        let last = Slot(CHUNK_SLOTS + 9);
        assert_eq!(lane.write(0, last, &[7; PAGE_SIZE]), Progress::Done(Ok(())));
        let blocks = || rustix::fs::fstat(host.fd()).unwrap().st_blocks;
        let before = blocks();
        host.release(1).unwrap();
        assert!(blocks() < before, "memory goes back to the system");
        let mut page = [1; PAGE_SIZE];
        assert_eq!(lane.read(0, last, &mut page), Progress::Done(Err(Fault::Lost)));
        assert_eq!(lane.write(0, Slot(0), &[8; PAGE_SIZE]), Progress::Done(Ok(())), "the other chunk stays");
        host.take(1).unwrap();
        assert_eq!(lane.read(0, last, &mut page), Progress::Done(Ok(())));
        assert_eq!(page, [0; PAGE_SIZE], "a chunk taken anew holds nothing old");
        assert_eq!(host.release(2), Err(Fault::Lost), "there is no third chunk");
    }

    #[test]
    fn a_chunk_that_cannot_be_released_takes_pages_on() {
        let flags = MemfdFlags::CLOEXEC | MemfdFlags::ALLOW_SEALING;
        let fd = rustix::fs::memfd_create("weir-test", flags).unwrap();
        rustix::fs::ftruncate(&fd, 8 * PAGE_SIZE as u64).unwrap();
        rustix::fs::fcntl_add_seals(&fd, SealFlags::SHRINK).unwrap();
        let host = Host::adopt(Memory::adopt(fd).unwrap());
        // With F_SEAL_FUTURE_WRITE on a memfd, the kernel refuses to punch a hole into it.
        rustix::fs::fcntl_add_seals(host.fd(), SealFlags::FUTURE_WRITE).unwrap();
        assert_eq!(host.release(0), Err(Fault::Io(libc::EPERM)));
        let mut lane = host.lane(1).unwrap();
        assert_eq!(lane.write(0, Slot(3), &[7; PAGE_SIZE]), Progress::Done(Ok(())));
    }

    #[test]
    fn a_chunk_that_the_machine_has_no_room_for_is_not_taken() {
        let host = Host::new(CHUNK_SLOTS + 10).unwrap();
        host.release(1).unwrap();
        let blocks = || rustix::fs::fstat(host.fd()).unwrap().st_blocks;
        let before = blocks();
        assert_eq!(host.take_of(1, Some(9 * PAGE_SIZE as u64)), Err(Fault::Io(libc::ENOMEM)));
        assert_eq!(blocks(), before);
        let mut lane = host.lane(1).unwrap();
        let last = Slot(CHUNK_SLOTS + 9);
        assert_eq!(lane.write(0, last, &[7; PAGE_SIZE]), Progress::Done(Err(Fault::Lost)));
        host.take_of(1, Some(10 * PAGE_SIZE as u64)).unwrap();
        assert_eq!(lane.write(0, last, &[7; PAGE_SIZE]), Progress::Done(Ok(())));
    }

    #[test]
    fn memory_that_was_given_back_stays_away_when_the_store_is_taken_over() {
        let host = Host::new(3 * CHUNK_SLOTS).unwrap();
        let blocks = |host: &Host| rustix::fs::fstat(host.fd()).unwrap().st_blocks;
        host.release(1).unwrap();
        let given_back = blocks(&host);
        for _ in 0..3 {
            let fd = host.fd().try_clone_to_owned().unwrap();
            assert_eq!(blocks(&Host::adopt(Memory::adopt(fd).unwrap())), given_back);
        }
    }

    #[derive(Debug, Default)]
    struct Hears(Mutex<Vec<String>>);

    impl Keep for Hears {
        fn hold(&self, name: &str, _fd: BorrowedFd<'_>, is_memory: bool) -> io::Result<()> {
            self.0.lock().unwrap().push(format!("{name} {is_memory}"));
            Ok(())
        }

        fn took(&self, name: &str, offset: u64, bytes: u64) -> io::Result<()> {
            self.0.lock().unwrap().push(format!("{name} {offset} {bytes}"));
            Ok(())
        }

        fn let_go(&self, _name: &str) -> io::Result<()> {
            unreachable!("its memory is kept for as long as it lives")
        }
    }

    #[test]
    fn the_keeper_hears_which_pages_have_come_again() {
        let host = Host::new(CHUNK_SLOTS + 10).unwrap();
        let keep = Arc::new(Hears::default());
        host.keep_with(Arc::clone(&keep) as _, false).unwrap();
        host.release(1).unwrap();
        host.take(1).unwrap();
        assert_eq!(*keep.0.lock().unwrap(), ["pages true".to_owned(), format!("pages {} 40960", 128 << 20)]);
    }

    #[test]
    fn a_slot_outside_the_store_is_a_fault() {
        let host = Host::new(3).unwrap();
        let mut lane = host.lane(1).unwrap();
        assert_eq!(lane.write(0, Slot(3), &[7; PAGE_SIZE]), Progress::Done(Err(Fault::Lost)));
        assert_eq!(lane.read(0, Slot(u32::MAX), &mut [0; PAGE_SIZE]), Progress::Done(Err(Fault::Lost)));
    }

    #[test]
    fn more_memory_than_there_is_is_an_error_that_says_so() {
        let error = Host::new(u32::MAX).unwrap_err();
        assert!(
            matches!(error.kind, OpenErrorKind::NoMemory { wanted, .. } if wanted >> 12 == u64::from(u32::MAX))
        );
        let error = error.to_string();
        assert!(error.contains("host:") && error.contains("16.0TiB"), "{error}");
    }

    #[test]
    fn pages_outlive_the_store_that_wrote_them() {
        let first = Host::new(16).unwrap();
        let _ = first.lane(1).unwrap().write(0, Slot(5), &[9; PAGE_SIZE]);
        let fd = first.fd().try_clone_to_owned().unwrap();
        drop(first);
        let second = Host::adopt(Memory::adopt(fd).unwrap());
        let mut page = [0; PAGE_SIZE];
        assert_eq!(second.lane(1).unwrap().read(0, Slot(5), &mut page), Progress::Done(Ok(())));
        assert_eq!(page, [9; PAGE_SIZE]);
    }
}
