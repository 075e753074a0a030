//! The ledger: names the process that holds each block of a volume that many processes share.

use rustix::fs::{FallocateFlags, OFlags};
use rustix::io::Errno;
use rustix::mm::{Advice, MapFlags, ProtFlags};
use std::fs::File;
use std::io::{self, Read as _};
use std::ops::Range;
use std::os::fd::{AsFd as _, AsRawFd as _, BorrowedFd};
use std::path::Path;
use std::sync::atomic::{AtomicU32, Ordering};

/// The file offset of the owners' locks: beyond every byte of a ledger.
const LOCKS: i64 = 1 << 40;

/// The number of the lock that `weir run` holds. No owner has this number.
const RUN: u32 = 0;

/// Largest number of owners at a time.
pub const OWNERS_MOST: u32 = 64;

/// A file that all processes of one run map. It holds the number that was given to an owner last,
/// and then the number of each block's owner.
///
/// Each owner has a number, which is used once in a run. The owner holds the lock of that number on
/// an open file of its own (`F_OFD_SETLK`). The kernel ends the lock with the process, or when the
/// process becomes another program. PIDs would not do: processes in two namespaces can have the
/// same PID.
///
/// The daemon has the owner's open file too. So the lock outlives a process whose writes are still
/// under way.
#[derive(Debug)]
pub struct Ledger {
    lock: Witness,
    words: *const AtomicU32,
    blocks: usize,
    next: usize,
    me: u32,
}

// SAFETY: the words are a mapping of atomic numbers, which lives as long as the process.
unsafe impl Send for Ledger {}

/// The open file that holds an owner's lock. The daemon gets a copy of the descriptor, and closes
/// the copy once the process's requests have ended. Until then no other process takes the owner's
/// blocks.
#[derive(Debug)]
pub(crate) struct Witness(File);

impl Witness {
    pub(crate) fn as_fd(&self) -> BorrowedFd<'_> {
        self.0.as_fd()
    }

    /// Another descriptor of the same open file.
    pub(crate) fn try_clone(&self) -> io::Result<Self> {
        self.0.try_clone().map(Witness)
    }

    /// Whether `weir run` promises that another daemon comes if the present one dies.
    pub(crate) fn is_promised(&self) -> bool {
        is_held(&self.0, RUN)
    }
}

/// The promise of `weir run` to the programs of its run: the daemon is there, or another one comes.
/// The promise ends when this value is dropped, or when the process ends.
#[derive(Debug)]
pub struct Promise(File);

impl Promise {
    /// Gives the ledger its length and its blocks on the disk, so that owners can open it. They map
    /// it, and a page without room on the disk would be SIGBUS for them.
    ///
    /// # Errors
    /// Fails with the system's error.
    pub fn set_blocks(&self, blocks: usize) -> io::Result<()> {
        let bytes = ((1 + blocks) * size_of::<AtomicU32>()) as u64;
        match rustix::fs::fallocate(&self.0, FallocateFlags::empty(), 0, bytes) {
            // A file system that sets no blocks aside gets zeros.
            Err(Errno::OPNOTSUPP | Errno::NOSYS) => {
                io::copy(&mut io::repeat(0).take(bytes), &mut &self.0).map(|_| ())
            }
            set => Ok(set?),
        }
    }
}

/// Runs a lock command (`fcntl`) on the locks of these numbers. Returns a lock that another open
/// file holds, as `F_OFD_GETLK` tells it.
fn ask(file: &File, command: i32, numbers: Range<u32>) -> io::Result<libc::flock> {
    let mut lock = libc::flock {
        l_type: libc::F_WRLCK as i16,
        l_whence: libc::SEEK_SET as i16,
        l_start: LOCKS + i64::from(numbers.start),
        l_len: numbers.len() as i64,
        l_pid: 0,
    };
    // SAFETY: each lock command of fcntl(2) takes a pointer to this structure.
    match unsafe { libc::fcntl(file.as_raw_fd(), command, &raw mut lock) } {
        0 => Ok(lock),
        _ => Err(io::Error::last_os_error()),
    }
}

fn is_held(file: &File, number: u32) -> bool {
    // If the system does not tell, assume that another open file holds the lock.
    held_in(file, number..number + 1).map_or(true, |held| held.is_some())
}

/// Finds one of these numbers whose lock another open file holds. `numbers` must not be empty.
fn held_in(file: &File, numbers: Range<u32>) -> io::Result<Option<u32>> {
    let lock = ask(file, libc::F_OFD_GETLK, numbers.clone())?;
    let first = lock.l_start.saturating_sub(LOCKS).clamp(numbers.start.into(), i64::from(numbers.end) - 1);
    Ok((i32::from(lock.l_type) != libc::F_UNLCK).then_some(first as u32))
}

impl Ledger {
    /// Makes the file, which is empty until [`Promise::set_blocks`].
    ///
    /// # Errors
    /// Fails with the system's error.
    pub fn create(path: &Path) -> io::Result<Promise> {
        // Give the file its final name only once its lock is held. A daemon of an earlier run in
        // the same directory would take a file without a lock for abandoned, and remove it.
        let new = path.with_extension("new");
        let file = File::options().read(true).write(true).create_new(true).open(&new)?;
        ask(&file, libc::F_OFD_SETLK, RUN..RUN + 1)?;
        std::fs::rename(&new, path)?;
        Ok(Promise(file))
    }

    /// Whether the `weir run` that made this file has ended, or given its [`Promise`] up. False if
    /// there is no such file.
    pub fn is_abandoned(path: &Path) -> bool {
        File::options().read(true).write(true).open(path).is_ok_and(|file| !is_held(&file, RUN))
    }

    /// Opens the file as another owner. The calling thread must have a descriptor table that no
    /// other thread shares. Otherwise a child could inherit the new descriptor, and keep the owner
    /// alive.
    ///
    /// # Errors
    /// Fails when the file is missing or empty, and when [`OWNERS_MOST`] others have it.
    pub fn open(path: &Path) -> io::Result<Self> {
        // Open the file twice. A lock lasts as long as its open file, and a mapping keeps its open
        // file alive. So the lock is on an open file of its own, which has no mapping.
        let open = || rustix::fs::open(path, OFlags::RDWR | OFlags::CLOEXEC, 0.into());
        let (file, lock) = (File::from(open()?), File::from(open()?));
        let bytes = file.metadata()?.len() as usize;
        let blocks = (bytes / size_of::<AtomicU32>()).saturating_sub(1);
        let flags = ProtFlags::READ | ProtFlags::WRITE;
        // SAFETY: a new mapping, which is never unmapped.
        let at = unsafe { rustix::mm::mmap(std::ptr::null_mut(), bytes, flags, MapFlags::SHARED, &file, 0)? };
        // SAFETY: the mapping was just made. A child must not inherit it, since a child has no
        // pager and may belong to another user.
        unsafe { rustix::mm::madvise(at, bytes, Advice::LinuxDontFork)? };
        let mut ledger = Ledger { lock: Witness(lock), words: at.cast(), blocks, next: 0, me: 0 };
        ledger.me = ledger.words()[0].fetch_add(1, Ordering::Relaxed) + 1;
        ask(&ledger.lock.0, libc::F_OFD_SETLK, ledger.me..ledger.me + 1)?;
        if ledger.others() >= OWNERS_MOST {
            return Err(io::Error::other("as many processes of this run are bounded as its daemon serves"));
        }
        Ok(ledger)
    }

    /// Number of owners that came before this one and have not ended. The count stops at
    /// [`OWNERS_MOST`]. A process that waits for its daemon counts too, so no later process takes
    /// its place among the owners.
    fn others(&self) -> u32 {
        let mut count = 0;
        let mut ranges: Vec<_> = std::iter::once(RUN + 1..self.me).collect();
        while let Some(range) = ranges.pop().filter(|_| count < OWNERS_MOST) {
            if !range.is_empty()
                && let Ok(Some(held)) = held_in(&self.lock.0, range.clone())
            {
                count += 1;
                ranges.extend([range.start..held, held + 1..range.end]);
            }
        }
        count
    }

    fn words(&self) -> &[AtomicU32] {
        // SAFETY: the file is mapped for this many words, in whole pages.
        unsafe { std::slice::from_raw_parts(self.words, 1 + self.blocks) }
    }

    fn owners(&self) -> &[AtomicU32] {
        &self.words()[1..]
    }

    /// The open file that holds this owner's lock.
    pub(crate) fn witness(&self) -> &Witness {
        &self.lock
    }

    fn has_ended(&self, owner: u32) -> bool {
        owner != self.me && !is_held(&self.lock.0, owner)
    }

    /// Claims a block whose number is below `limit`: a free block, or one whose owner has ended.
    pub(crate) fn claim(&mut self, limit: usize) -> Option<usize> {
        let blocks = self.blocks.min(limit);
        let take = |at: usize, from: u32| {
            self.owners()[at].compare_exchange(from, self.me, Ordering::AcqRel, Ordering::Relaxed).is_ok()
        };
        let free = (self.next..blocks).chain(0..self.next.min(blocks)).find(|&at| take(at, 0));
        let found = free.or_else(|| {
            (0..blocks).find(|&at| {
                let owner = self.owners()[at].load(Ordering::Acquire);
                self.has_ended(owner) && take(at, owner)
            })
        })?;
        self.next = found + 1;
        Some(found)
    }

    pub(crate) fn release(&mut self, block: usize) {
        self.owners()[block].store(0, Ordering::Release);
        self.next = self.next.min(block);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_block_has_one_owner_and_is_free_once_that_has_ended() {
        let path = std::env::temp_dir().join(format!("weir-ledger-{}", std::process::id()));
        let promise = Ledger::create(&path).unwrap();
        promise.set_blocks(3).unwrap();
        let [mut first, mut second, third] = [(); 3].map(|()| Ledger::open(&path).unwrap());
        std::fs::remove_file(&path).unwrap();
        assert_eq!([first.claim(3), second.claim(3), first.claim(2)], [Some(0), Some(1), None]);
        assert_eq!([second.claim(3), second.claim(3)], [Some(2), None], "all are held by those that live");
        second.release(1);
        assert_eq!(second.claim(3), Some(1));
        let witness = first.witness().try_clone().unwrap();
        drop((first, third));
        assert_eq!(second.claim(3), None, "the daemon has requests of the first under way");
        drop(witness);
        assert_eq!([second.claim(3), second.claim(3)], [Some(0), None]);
    }

    #[test]
    fn nobody_ever_takes_a_new_run_for_one_that_has_ended() {
        let path = std::env::temp_dir().join(format!("weir-new-{}", std::process::id()));
        let is_over = std::sync::atomic::AtomicBool::new(false);
        std::thread::scope(|scope| {
            let looks = scope.spawn(|| {
                while !is_over.load(Ordering::Relaxed) {
                    assert!(!Ledger::is_abandoned(&path));
                }
            });
            // The other thread may have opened a file before this thread removed that file. So keep
            // all promises until the end.
            let promise = |_| {
                let promise = Ledger::create(&path).unwrap();
                std::fs::remove_file(&path).unwrap();
                promise
            };
            let promises: Vec<Promise> = (0..500).map(promise).collect();
            is_over.store(true, Ordering::Relaxed);
            looks.join().unwrap();
            drop(promises);
        });
    }

    #[test]
    fn an_owner_without_a_daemon_keeps_its_place() {
        let path = std::env::temp_dir().join(format!("weir-places-{}", std::process::id()));
        let promise = Ledger::create(&path).unwrap();
        promise.set_blocks(1).unwrap();
        let open = || Ledger::open(&path);
        let mut owners: Vec<Ledger> = (0..OWNERS_MOST).map(|_| open().unwrap()).collect();
        for place in [0, 20, OWNERS_MOST as usize - 1] {
            let said = open().unwrap_err().to_string();
            assert_eq!(said, "as many processes of this run are bounded as its daemon serves");
            drop(owners.swap_remove(place));
            owners.push(open().unwrap());
        }
        std::fs::remove_file(&path).unwrap();
    }

    #[test]
    fn a_run_promises_a_daemon_for_as_long_as_it_wants() {
        let path = std::env::temp_dir().join(format!("weir-promise-{}", std::process::id()));
        assert!(!Ledger::is_abandoned(&path), "there is no such run");
        let promise = Ledger::create(&path).unwrap();
        promise.set_blocks(1).unwrap();
        let owner = Ledger::open(&path).unwrap();
        assert!(owner.witness().is_promised() && !Ledger::is_abandoned(&path));
        drop(promise);
        assert!(!owner.witness().is_promised() && Ledger::is_abandoned(&path), "an owner is no run");
        std::fs::remove_file(&path).unwrap();
    }
}
