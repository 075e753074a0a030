//! `file:` and `stripe:`: stores in files and on block devices, by io_uring.
//!
//! Such a store is also the `--backing` of a volume. It takes all its room before the first page,
//! so the device never meets a full disk. Pages hold swapped memory, and overwriting an SSD does
//! not reliably erase them. So they are encrypted with a key that exists only while the store is
//! open. A store over several members puts units on them in turns (RAID-0).

mod backing;
mod cipher;
mod lane;
mod quiet;
mod raw;
mod signature;
mod staging;
mod stripe_url;
mod traffic;
mod url;

pub use backing::is_left_over;
pub use stripe_url::StripeUrl;
pub use traffic::MemberTraffic;
pub use url::FileUrl;

use crate::{
    DENIED, Deal, Fault, Keep, Lane, OpenError, OpenErrorKind, Reclaim, Room, State, Store, Survive,
};
use backing::{Backing, HEADER};
use cipher::Cipher;
use lane::FileLane;
use quiet::Quiet;
use std::io;
use std::os::fd::{AsFd, OwnedFd};
use std::path::PathBuf;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU32, Ordering};
use std::time::Duration;
use traffic::Traffic;
use weir_core::{ByteSize, PAGE_SIZE, Slot, Watch, unwatched};

/// Takes the descriptor that a keeper held under a name. Each descriptor can be taken once.
type Take<'a> = &'a mut dyn FnMut(&str) -> Option<OwnedFd>;

/// The name under which the keeper holds the key.
const KEY: &str = "key";

/// The name under which the keeper holds an open member.
fn member_name(at: usize) -> String {
    format!("member.{at}")
}

/// A store in a file, on a block device, or striped over several of them.
#[derive(Debug)]
pub struct FileStore {
    name: String,
    shared: Arc<Shared>,
}

#[derive(Debug)]
struct Shared {
    members: Box<[Backing]>,
    /// The offset of the first page on each member.
    start: u64,
    cipher: Option<Cipher>,
    /// Number of slots. It only grows, and only that of a raw disk.
    slots: AtomicU32,
    deal: Deal,
    chunk_slots: u32,
    released: Box<[AtomicBool]>,
    quiet: Quiet,
    room: Room,
    /// Time limit of an operation at the disk.
    limit: Duration,
    traffic: Box<[Traffic]>,
}

/// The place of a slot in the store's files.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
struct Position {
    member: u32,
    /// The offset in bytes from the member's start.
    offset: u64,
}

/// The parameters that `file:` and `stripe:` share.
struct Layout<'a> {
    paths: &'a [PathBuf],
    /// Bytes of room for pages on each member.
    size_each: Option<ByteSize>,
    encrypt: bool,
    overwrite: bool,
    unit: ByteSize,
    chunk: ByteSize,
}

impl<'a> Layout<'a> {
    fn of_file(url: &'a FileUrl) -> Self {
        Layout {
            paths: std::slice::from_ref(&url.path),
            size_each: url.size,
            encrypt: url.encrypt,
            overwrite: url.overwrite,
            unit: url.chunk,
            chunk: url.chunk,
        }
    }

    fn of_stripe(url: &'a StripeUrl) -> Result<Self, OpenError> {
        // All members have the same number of whole units.
        let round = url.round();
        let size_each = match url.size {
            Some(size) if !size.0.is_multiple_of(round) => {
                let what =
                    format!("size={size} is not a multiple of {} units of {}", url.paths.len(), url.unit);
                let what = format!("{what}; give a multiple of {}", ByteSize(round));
                return Err(OpenError::new(OpenErrorKind::Layout, url.to_string(), what));
            }
            size => size.map(|size| ByteSize(size.0 / url.paths.len() as u64)),
        };
        Ok(Layout {
            paths: &url.paths,
            size_each,
            encrypt: url.encrypt,
            overwrite: url.overwrite,
            unit: url.unit,
            // A chunk takes the same range of bytes on every member.
            chunk: ByteSize(FileUrl::CHUNK.0.next_multiple_of(round)),
        })
    }
}

impl FileStore {
    /// Opens the file or device that `url` names, and takes all its room.
    ///
    /// # Errors
    /// Fails when the file or device cannot be opened or locked, holds foreign content, or has too
    /// little room.
    pub fn open(url: &FileUrl) -> Result<Self, OpenError> {
        Self::open_watched(url, Room::Reserved, &mut unwatched)
    }

    /// Does the same as [`FileStore::open`]. `watch` gets the progress while room is written.
    ///
    /// # Errors
    /// Fails as [`FileStore::open`] does. If `watch` returns an error, fails with that error too.
    pub fn open_watched(url: &FileUrl, room: Room, watch: Watch<'_>) -> Result<Self, OpenError> {
        let (name, layout) = (url.to_string(), Layout::of_file(url));
        Ok(Self::named(url, Shared::open(&name, &layout, room, watch)?))
    }

    /// Takes over the file and the key of a daemon that has ended. `take` returns the keeper's
    /// descriptors by name.
    ///
    /// # Errors
    /// Fails if a file is missing, or if the files do not belong to this URL.
    pub fn reopen(url: &FileUrl, room: Room, take: Take<'_>) -> Result<Self, OpenError> {
        let (name, layout) = (url.to_string(), Layout::of_file(url));
        Ok(Self::named(url, Shared::reopen(&name, &layout, room, take)?))
    }

    fn named(url: &FileUrl, shared: Shared) -> Self {
        let size = Some(shared.size());
        FileStore { name: FileUrl { size, ..url.clone() }.to_string(), shared: Arc::new(shared) }
    }

    /// Opens all the files or devices that `url` names, and takes their room.
    ///
    /// # Errors
    /// Fails when [`FileStore::open`] would fail for one of the files or devices.
    pub fn open_stripe(url: &StripeUrl) -> Result<Self, OpenError> {
        Self::open_stripe_watched(url, Room::Reserved, &mut unwatched)
    }

    /// Does the same as [`FileStore::open_watched`], for all files or devices that `url` names.
    ///
    /// # Errors
    /// Fails as [`FileStore::open_watched`] does.
    pub fn open_stripe_watched(url: &StripeUrl, room: Room, watch: Watch<'_>) -> Result<Self, OpenError> {
        let (name, layout) = (url.to_string(), Layout::of_stripe(url)?);
        Ok(Self::named_stripe(url, Shared::open(&name, &layout, room, watch)?))
    }

    /// Does the same as [`FileStore::reopen`], for all files or devices that `url` names.
    ///
    /// # Errors
    /// Fails as [`FileStore::reopen`] does.
    pub fn reopen_stripe(url: &StripeUrl, room: Room, take: Take<'_>) -> Result<Self, OpenError> {
        let (name, layout) = (url.to_string(), Layout::of_stripe(url)?);
        Ok(Self::named_stripe(url, Shared::reopen(&name, &layout, room, take)?))
    }

    fn named_stripe(url: &StripeUrl, shared: Shared) -> Self {
        let size = Some(shared.size());
        FileStore { name: StripeUrl { size, ..url.clone() }.to_string(), shared: Arc::new(shared) }
    }

    /// Sets the time limit of the disk's operations to that of the kernel's block layer. Call this
    /// for a disk whose programs would wait just as long without Weir.
    ///
    /// # Panics
    /// Panics when a lane is open.
    #[must_use]
    pub fn patient(mut self) -> Self {
        Arc::get_mut(&mut self.shared).expect("a store that nobody uses yet").limit = raw::LIMIT;
        self
    }

    /// The traffic of each file or device, and its failures.
    pub fn traffic(&self) -> Vec<MemberTraffic> {
        self.shared.traffic.iter().map(Traffic::get).collect()
    }

    /// Whether I/O bypasses the page cache on all members.
    pub fn is_direct(&self) -> bool {
        self.shared.members.iter().all(|member| member.is_direct)
    }

    /// Whether the key is locked in RAM; `None` if nothing is encrypted.
    pub fn key_is_locked(&self) -> Option<bool> {
        self.shared.cipher.as_ref().map(Cipher::is_locked)
    }
}

impl Shared {
    fn open(name: &str, layout: &Layout<'_>, room: Room, watch: Watch<'_>) -> Result<Self, OpenError> {
        let make = || Cipher::ephemeral().map_err(|error| OpenError::io(name, DENIED, error));
        let cipher = layout.encrypt.then(make).transpose()?;
        let count = layout.paths.len() as u64;
        let open = |(at, path): (usize, &PathBuf)| {
            let mut watch = |done, all| watch(all * at as u64 + done, all * count);
            Backing::open(name, path, layout.size_each, layout.overwrite, room, &mut watch)
        };
        let members = layout.paths.iter().enumerate().map(open).collect::<Result<_, _>>()?;
        let quiet = Quiet::new().map_err(|error| OpenError::io(name, DENIED, error))?;
        Self::over(name, layout, cipher, members, quiet, room)
    }

    fn reopen(name: &str, layout: &Layout<'_>, room: Room, take: Take<'_>) -> Result<Self, OpenError> {
        let mut kept = |what: String| {
            let missing = |what: &str| format!("the keeper does not hold its {what}");
            take(&what).ok_or_else(|| OpenError::new(OpenErrorKind::NoDevice, name, missing(&what)))
        };
        let cipher = match layout.encrypt {
            false => None,
            true => Some(
                Cipher::adopt(kept(KEY.to_owned())?)
                    .map_err(|error| OpenError::io(name, "cannot use what was kept", error))?,
            ),
        };
        let adopt = |at| Backing::adopt(name, kept(member_name(at))?, layout.size_each);
        let members = (0..layout.paths.len()).map(adopt).collect::<Result<_, _>>()?;
        let quiet = Quiet::after(take).map_err(|error| OpenError::io(name, DENIED, error))?;
        let shared = Self::over(name, layout, cipher, members, quiet, room)?;
        for (chunk, released) in shared.released.iter().enumerate() {
            // Try to take the chunks that the last daemon had released. For a chunk that still has
            // its room this changes nothing.
            let (offset, bytes) = shared.chunk(chunk as u32).expect("a chunk of this store");
            let has_room = |member: &Backing| member.refill(offset, bytes, Room::Reserved).is_ok();
            released.store(!shared.members.iter().all(has_room), Ordering::Relaxed);
        }
        Ok(shared)
    }

    fn over(
        name: &str,
        layout: &Layout<'_>,
        cipher: Option<Cipher>,
        members: Vec<Backing>,
        quiet: Quiet,
        room: Room,
    ) -> Result<Self, OpenError> {
        let page = PAGE_SIZE as u64;
        let smallest = members.iter().map(|member| member.room).min().unwrap_or(0);
        let share = if members.len() == 1 { smallest } else { smallest / layout.unit.0 * layout.unit.0 };
        let slots = (share / page * members.len() as u64).min(u64::from(u32::MAX)) as u32;
        let deal = Deal::in_turns(members.len() as u32, (layout.unit.0 / page) as u32);
        if slots == 0 {
            let what =
                format!("{} on each member is less than one unit of {}", ByteSize(smallest), layout.unit);
            return Err(OpenError::new(OpenErrorKind::Layout, name, what));
        }
        let chunk_slots = (layout.chunk.0 / page).clamp(1, slots.into()) as u32;
        Ok(Shared {
            members: members.into(),
            start: HEADER,
            cipher,
            slots: slots.into(),
            deal,
            chunk_slots,
            released: (0..slots.div_ceil(chunk_slots)).map(|_| AtomicBool::new(false)).collect(),
            quiet,
            room,
            limit: lane::LIMIT,
            traffic: Traffic::of(layout.paths),
        })
    }

    #[inline]
    fn slots(&self) -> u32 {
        self.slots.load(Ordering::Relaxed)
    }

    fn size(&self) -> ByteSize {
        ByteSize(u64::from(self.slots()) * PAGE_SIZE as u64)
    }

    /// The place of a slot in the store's files. Fails if the slot is outside of the store, or its
    /// chunk has been released.
    #[inline]
    fn place(&self, slot: Slot) -> Result<Position, Fault> {
        if slot.0 >= self.slots()
            || self.released[(slot.0 / self.chunk_slots) as usize].load(Ordering::Relaxed)
        {
            return Err(Fault::Lost);
        }
        Ok(self.locate(slot.0))
    }

    #[inline]
    fn locate(&self, slot: u32) -> Position {
        let (member, there) = self.deal.locate(Slot(slot)).expect("turns end nowhere");
        Position { member, offset: self.start + u64::from(there.0) * PAGE_SIZE as u64 }
    }

    /// The range of each member that a chunk takes, in bytes: its start and its length.
    fn chunk(&self, chunk: u32) -> Result<(u64, u64), Fault> {
        let first = u64::from(chunk) * u64::from(self.chunk_slots);
        if first >= u64::from(self.slots()) {
            return Err(Fault::Lost);
        }
        let slots = u64::from(self.chunk_slots).min(u64::from(self.slots()) - first);
        let share = |slots: u64| slots / self.members.len() as u64 * PAGE_SIZE as u64;
        Ok((self.start + share(first), share(slots)))
    }
}

impl Store for FileStore {
    fn name(&self) -> &str {
        &self.name
    }

    fn slots(&self) -> u32 {
        self.shared.slots()
    }

    fn lane(&self, depth: usize) -> Result<Box<dyn Lane>, OpenError> {
        FileLane::open(&self.name, Arc::clone(&self.shared), depth.max(1)).map(|lane| Box::new(lane) as _)
    }

    fn unfit_for_swap(&self) -> Option<String> {
        let next = "give a block device, or a file on ext4, xfs or btrfs";
        if !self.is_direct() {
            return Some(format!(
                "it goes through the page cache, so that writing a page out takes memory; {next}"
            ));
        }
        if self.shared.members.iter().any(Backing::is_in_memory) {
            return Some(format!("it lies on a tmpfs, which is memory; {next}"));
        }
        (self.key_is_locked() == Some(false)).then(|| {
            "its key is not locked in RAM and could be written to the disk; raise RLIMIT_MEMLOCK".to_owned()
        })
    }

    /// Always online: a disk that fails shows it only by the faults of operations.
    fn state(&self, _member: u32) -> State {
        State::Online
    }

    /// A raw disk keeps its content, so it gives no chunk back.
    fn reclaim(&self) -> Option<&dyn Reclaim> {
        (self.shared.start > 0).then_some(self as _)
    }

    fn survive(&self) -> Option<&dyn Survive> {
        (self.shared.start > 0).then_some(self as _)
    }
}

impl Survive for FileStore {
    /// Hands the keeper the key, the open files with their locks, and the pipes that tell when each
    /// daemon's I/O is over.
    fn keep_with(&self, keep: Arc<dyn Keep>, held: bool) -> io::Result<()> {
        let Shared { members, cipher, quiet, .. } = &*self.shared;
        if !held {
            for (at, member) in members.iter().enumerate() {
                keep.hold(&member_name(at), member.file.as_fd(), false)?;
            }
            cipher.iter().try_for_each(|cipher| keep.hold(KEY, cipher.secret(), true))?;
        }
        // Give the keeper the pipes after a takeover too: this store has added a pipe of its own,
        // and so their names have changed. The keeper holds the files and the key already.
        quiet.pipes().try_for_each(|(name, fd)| keep.hold(&name, fd, false))
    }

    fn is_quiet(&self) -> bool {
        self.shared.quiet.is_quiet()
    }

    /// Does nothing: the kernel clears the key's memory when the last process closes it.
    fn forget(&self) {}
}

impl Reclaim for FileStore {
    fn chunk_slots(&self) -> u32 {
        self.shared.chunk_slots
    }

    /// Gives the blocks back to the file system, or tells the device that they are free.
    fn release(&self, chunk: u32) -> Result<(), Fault> {
        let (offset, bytes) = self.shared.chunk(chunk)?;
        let released = &self.shared.released[chunk as usize];
        released.store(true, Ordering::SeqCst);
        let members = &self.shared.members;
        for (at, member) in members.iter().enumerate() {
            let Err(errno) = member.punch(offset, bytes) else { continue };
            // This member did not give back its bytes of the chunk, so the chunk must stay and
            // needs all its room again. The members before this one have given theirs back, and
            // this one may have given back some.
            let changes_nothing = errno == rustix::io::Errno::OPNOTSUPP;
            let holed = &members[..if changes_nothing { at } else { at + 1 }];
            if !holed.iter().all(|member| member.refill(offset, bytes, self.shared.room).is_ok()) {
                // Another program has taken disk space that this chunk needs again. So the chunk
                // counts as given back, and its other bytes on these members are given back too.
                for member in holed {
                    let _ = member.punch(offset, bytes);
                }
                return Ok(());
            }
            released.store(false, Ordering::SeqCst);
            return Err(if changes_nothing { Fault::Unsupported } else { Fault::Io(errno.raw_os_error()) });
        }
        Ok(())
    }

    /// Allocates the chunk's blocks again. Fails with ENOSPC if another program has taken the room
    /// meanwhile.
    fn take(&self, chunk: u32) -> Result<(), Fault> {
        let (offset, bytes) = self.shared.chunk(chunk)?;
        for member in &self.shared.members {
            let refilled = member.refill(offset, bytes, self.shared.room);
            refilled.map_err(|error| Fault::Io(error.raw_os_error().unwrap_or(libc::EIO)))?;
        }
        self.shared.released[chunk as usize].store(false, Ordering::SeqCst);
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::fs::File;

    #[test]
    fn a_stripe_lays_units_on_its_members_in_turns_and_no_two_slots_in_one_place() {
        let file = || std::fs::File::open("/dev/null").unwrap();
        let member = || Backing { file: file(), room: 64 << 12, is_device: false, is_direct: false };
        let shared = Shared {
            members: Box::new([member(), member(), member()]),
            start: HEADER,
            cipher: None,
            slots: 192.into(),
            deal: Deal::in_turns(3, 4),
            chunk_slots: 24,
            released: (0..8).map(|_| AtomicBool::new(false)).collect(),
            quiet: Quiet::new().unwrap(),
            room: Room::Reserved,
            limit: lane::LIMIT,
            traffic: Traffic::of(&[PathBuf::new(), PathBuf::new(), PathBuf::new()]),
        };
        let page = PAGE_SIZE as u64;
        for (slot, member, page_there) in
            [(0, 0, 0), (3, 0, 3), (4, 1, 0), (8, 2, 0), (12, 0, 4), (191, 2, 63)]
        {
            assert_eq!(
                shared.locate(slot),
                Position { member, offset: HEADER + page_there * page },
                "slot {slot}"
            );
        }
        let places: std::collections::HashSet<_> =
            (0..192).map(|slot| (shared.locate(slot).member, shared.locate(slot).offset)).collect();
        assert_eq!(places.len(), 192);
        // A chunk's range on each member contains the chunk's own slots, and no other slot.
        for slot in 0..192 {
            let offset = shared.locate(slot).offset;
            for chunk in 0..8 {
                let (start, bytes) = shared.chunk(chunk).unwrap();
                assert_eq!(
                    (start..start + bytes).contains(&offset),
                    slot / 24 == chunk,
                    "slot {slot}, chunk {chunk}"
                );
            }
        }
    }

    /// A stripe over a memfd and `second`, of one chunk.
    fn two_members(second: File) -> FileStore {
        let first = memfd();
        let member = |file| Backing { file, room: 64 << 12, is_device: false, is_direct: false };
        let shared = Shared {
            start: HEADER,
            members: Box::new([member(first), member(second)]),
            cipher: None,
            slots: 128.into(),
            deal: Deal::in_turns(2, 4),
            chunk_slots: 128,
            released: Box::new([AtomicBool::new(false)]),
            quiet: Quiet::new().unwrap(),
            room: Room::Reserved,
            limit: lane::LIMIT,
            traffic: Traffic::of(&[PathBuf::new(), PathBuf::new(), PathBuf::new()]),
        };
        FileStore { name: "stripe".to_owned(), shared: Arc::new(shared) }
    }

    fn memfd() -> File {
        use rustix::fs::MemfdFlags;
        let fd = rustix::fs::memfd_create("weir-stripe", MemfdFlags::CLOEXEC | MemfdFlags::ALLOW_SEALING);
        let file = File::from(fd.unwrap());
        rustix::fs::fallocate(&file, rustix::fs::FallocateFlags::empty(), 0, HEADER + (64 << 12)).unwrap();
        file
    }

    fn blocks(store: &FileStore) -> i64 {
        rustix::fs::fstat(&store.shared.members[0].file).unwrap().st_blocks
    }

    #[test]
    fn a_chunk_that_one_member_does_not_release_stays_whole_on_the_others() {
        let sealed = memfd();
        rustix::fs::fcntl_add_seals(&sealed, rustix::fs::SealFlags::WRITE).unwrap();
        let store = two_members(sealed);
        let before = blocks(&store);
        assert_eq!(store.release(0), Err(Fault::Io(libc::EPERM)));
        assert_eq!(blocks(&store), before, "the first has its blocks again");
        assert!(store.shared.place(Slot(0)).is_ok(), "and the chunk holds pages");
    }

    #[test]
    fn a_chunk_that_cannot_be_made_whole_again_counts_as_released() {
        let writable = memfd();
        let path = format!("/proc/self/fd/{}", std::os::fd::AsRawFd::as_raw_fd(&writable));
        let store = two_members(File::open(path).unwrap());
        let before = blocks(&store);
        assert_eq!(store.release(0), Ok(()));
        assert!(blocks(&store) < before);
        assert_eq!(store.shared.place(Slot(0)).err(), Some(Fault::Lost), "nothing is written into a hole");
    }
}
