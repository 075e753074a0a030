//! A RAM disk: a file system for ordinary users. The pages of its files lie in a volume. Its
//! content ends with the server.
//!
//! Names and attributes are in [`tree`], under one lock. A thread that reads or writes data takes
//! the lock shared. A thread that changes a name, a size or a page's place takes it exclusively. So
//! a page is never read or written after it was given to another file.

mod room;
mod tree;

use super::range::{IO_MAX, Ranges};
use super::reply::Reply;
use super::request::{Message, Request};
use super::serve::Service;
use super::stats::Counters;
use super::wire::{
    AttrOut, CreateIn, Dirent, EntryOut, FallocateIn, InHeader, LseekIn, NAME_MAX, OpenOut, ReadIn,
    SetattrIn, StatfsOut, WriteIn, WriteOut, open_flag, setattr,
};
use rustix::io::Errno;
use std::sync::{Arc, PoisonError, RwLock, RwLockReadGuard, RwLockWriteGuard};
use std::time::{Duration, SystemTime, UNIX_EPOCH};
use tree::{Change, DIRECTORY, FILE, KIND, New, SIZE_MAX, SYMLINK, Time, Tree};
use weir_core::{PAGE_SIZE, PageNo};
use weir_request::Span;
use weir_volume::Lane;

/// Seconds that the kernel may keep names and attributes. They change only by the kernel's own
/// requests.
const VALID: u64 = 3600;

const PAGE: u64 = PAGE_SIZE as u64;
const KEEP_SIZE: u32 = 0x01;
const PUNCH_HOLE: u32 = 0x02;
const ZERO_RANGE: u32 = 0x10;
const SEEK_DATA: u32 = 3;
const SEEK_HOLE: u32 = 4;
const FIFO: u32 = 0o010000;
const SOCKET: u32 = 0o140000;

/// The file system, shared by all threads.
#[derive(Debug)]
pub(super) struct Shared(RwLock<Tree>);

impl Shared {
    /// Makes an empty file system over a volume of `pages` pages; the root belongs to `owner`.
    pub fn new(pages: u32, owner: (u32, u32)) -> Arc<Shared> {
        Arc::new(Shared(RwLock::new(Tree::new(pages, owner, 0o755, now()))))
    }

    // If a thread panicked while it held the lock, the panic hook has reported that. The tree stays
    // usable.
    fn read(&self) -> RwLockReadGuard<'_, Tree> {
        self.0.read().unwrap_or_else(PoisonError::into_inner)
    }

    fn write(&self) -> RwLockWriteGuard<'_, Tree> {
        self.0.write().unwrap_or_else(PoisonError::into_inner)
    }
}

/// One thread's part of the file system.
pub(super) struct RamDisk {
    pub shared: Arc<Shared>,
    /// The bytes of a directory listing that is being sent.
    pub listing: Vec<u8>,
}

/// The answer to a request.
type Answer<T> = Result<T, Errno>;

impl Service<Lane> for RamDisk {
    fn serve(
        &mut self,
        message: &Message<'_>,
        ranges: &mut Ranges<Lane>,
        reply: &dyn Reply,
        counters: &Counters,
    ) -> rustix::io::Result<()> {
        let (header, node, unique) = (&message.header, message.header.nodeid, message.header.unique);
        let finish = |answer: Answer<Vec<u8>>| match answer {
            Ok(body) => reply.answer(unique, &body),
            Err(errno) => reply.refuse(unique, errno),
        };
        match message.request {
            Request::Read { what } => {
                counters.reads.add(1);
                self.read(node, unique, &what, ranges, reply, counters)
            }
            Request::Write { what, data } => {
                counters.writes.add(1);
                counters.bytes_written.add(data.len() as u64);
                match self.write(node, &what, data, ranges) {
                    Ok(()) => reply.answer(unique, &WriteOut { size: what.size, padding: 0 }.encode()),
                    Err(errno) => {
                        counters.errors.add(1);
                        reply.refuse(unique, errno)
                    }
                }
            }
            Request::Readdir { what } => match self.list(node, &what) {
                Ok(()) => reply.answer(unique, &self.listing),
                Err(errno) => reply.refuse(unique, errno),
            },
            // FORGET and BATCH_FORGET have no answer.
            Request::Forget { lookups } => {
                let mut tree = self.shared.write();
                discard(&tree.forget(node, lookups), ranges);
                Ok(())
            }
            Request::BatchForget { list } => {
                let mut tree = self.shared.write();
                for one in list {
                    discard(&tree.forget(one.nodeid, one.lookups), ranges);
                }
                Ok(())
            }
            _ => finish(self.other(header, &message.request, ranges)),
        }
    }
}

impl RamDisk {
    /// Answers requests about names and attributes.
    fn other(&self, header: &InHeader, request: &Request<'_>, ranges: &mut Ranges<Lane>) -> Answer<Vec<u8>> {
        let node = header.nodeid;
        let new = |mode, rdev, target: &[u8]| New {
            mode,
            uid: header.uid,
            gid: header.gid,
            rdev,
            target: target.to_vec(),
        };
        match *request {
            Request::Lookup { name } => {
                let mut tree = self.shared.write();
                let found = tree.lookup(node, name)?;
                entry(&mut tree, found)
            }
            Request::Getattr => attr(&self.shared.read(), node),
            Request::Setattr { change } => self.change(node, &change, ranges),
            Request::Readlink => Ok(self.shared.read().target(node)?.to_vec()),
            Request::Symlink { name, target } => self.make(node, name, new(SYMLINK | 0o777, 0, target)),
            Request::Mknod { how, name } if matches!(how.mode & KIND, FILE | FIFO | SOCKET) => {
                self.make(node, name, new(how.mode, how.rdev, &[]))
            }
            Request::Mknod { .. } => Err(Errno::PERM),
            Request::Mkdir { how, name } => self.make(node, name, new(DIRECTORY | how.mode, 0, &[])),
            Request::Create { how: CreateIn { mode, .. }, name } => {
                let mut answer = self.make(node, name, new(FILE | mode, 0, &[]))?;
                answer.extend(opened());
                Ok(answer)
            }
            Request::Unlink { name } => {
                let mut tree = self.shared.write();
                discard(&tree.unlink(node, name, now())?, ranges);
                Ok(Vec::new())
            }
            Request::Rmdir { name } => {
                let mut tree = self.shared.write();
                discard(&tree.rmdir(node, name, now())?, ranges);
                Ok(Vec::new())
            }
            Request::Rename { to_directory, flags, from, to } => {
                let mut tree = self.shared.write();
                discard(&tree.rename((node, from), (to_directory, to), flags, now())?, ranges);
                Ok(Vec::new())
            }
            Request::Link { node: linked, name } => {
                let mut tree = self.shared.write();
                tree.link(linked, node, name, now())?;
                entry(&mut tree, linked)
            }
            Request::Open { .. } => Ok(opened().to_vec()),
            Request::Opendir => Ok(OpenOut::default().encode().to_vec()),
            Request::Release { .. } | Request::Releasedir { .. } | Request::Destroy => Ok(Vec::new()),
            Request::Statfs => Ok(self.statfs()),
            Request::Fallocate { what } => self.allocate(node, &what, ranges).map(|()| Vec::new()),
            Request::Lseek { what: LseekIn { offset, whence, .. } } => {
                let data = match whence {
                    SEEK_DATA => true,
                    SEEK_HOLE => false,
                    _ => return Err(Errno::INVAL),
                };
                Ok(self.shared.read().seek(node, offset, data)?.to_ne_bytes().to_vec())
            }
            // FLUSH and FSYNC have nothing to wait for, and there are no extended attributes. After
            // one ENOSYS the kernel sends no further ones.
            _ => Err(Errno::NOSYS),
        }
    }

    fn make(&self, parent: u64, name: &[u8], new: New) -> Answer<Vec<u8>> {
        let mut tree = self.shared.write();
        let made = tree.make(parent, name, new, now())?;
        entry(&mut tree, made)
    }

    fn read(
        &self,
        node: u64,
        unique: u64,
        what: &ReadIn,
        ranges: &mut Ranges<Lane>,
        reply: &dyn Reply,
        counters: &Counters,
    ) -> rustix::io::Result<()> {
        let tree = self.shared.read();
        let size = match tree.size(node) {
            Ok(size) => size,
            Err(errno) => return reply.refuse(unique, errno),
        };
        let length = size.saturating_sub(what.offset).min(u64::from(what.size.min(IO_MAX)));
        counters.bytes_read.add(length);
        if length == 0 {
            return reply.answer(unique, &[]);
        }
        let span = Span { offset: what.offset, length };
        let result = ranges.read(reply, unique, span, |page| tree.place(node, page))?;
        counters.errors.add(u64::from(result.is_err()));
        Ok(())
    }

    fn write(&self, node: u64, what: &WriteIn, data: &[u8], ranges: &mut Ranges<Lane>) -> Answer<()> {
        let end =
            what.offset.checked_add(data.len() as u64).filter(|end| *end <= SIZE_MAX).ok_or(Errno::FBIG)?;
        if data.is_empty() {
            return Ok(());
        }
        let mut tree = self.shared.write();
        tree.reserve(node, what.offset / PAGE..end.div_ceil(PAGE))?;
        let tree = RwLockWriteGuard::downgrade(tree);
        ranges.write(what, data, |page| tree.place(node, page))?;
        drop(tree);
        // The file cannot be truncated meanwhile: the kernel allows one change of a file's size at
        // a time.
        self.shared.write().written(node, end, now())
    }

    fn change(&self, node: u64, change: &SetattrIn, ranges: &mut Ranges<Lane>) -> Answer<Vec<u8>> {
        let has = |flag| change.valid & flag != 0;
        let time = |given, now_flag, seconds, nanoseconds| match (has(now_flag), has(given)) {
            (true, _) => Some(now()),
            (false, true) => Some(Duration::new(seconds, nanoseconds)),
            (false, false) => None,
        };
        let mut tree = self.shared.write();
        if has(setattr::SIZE) {
            let was = tree.size(node)?;
            discard(&tree.resize(node, change.size, now())?, ranges);
            // Zero the last page's bytes after the file's new end. Else they would come back if the
            // file grew again.
            let end = if change.size < was { change.size.next_multiple_of(PAGE) } else { change.size };
            let tail = Span { offset: change.size, length: end - change.size };
            ranges.clear(tail, |page| tree.place(node, page))?;
        }
        let wanted = Change {
            mode: has(setattr::MODE).then_some(change.mode),
            uid: has(setattr::UID).then_some(change.uid),
            gid: has(setattr::GID).then_some(change.gid),
            atime: time(setattr::ATIME, setattr::ATIME_NOW, change.atime, change.atimensec.min(999_999_999)),
            mtime: time(setattr::MTIME, setattr::MTIME_NOW, change.mtime, change.mtimensec.min(999_999_999)),
        };
        tree.change(node, &wanted, now())?;
        attr(&tree, node)
    }

    fn allocate(&self, node: u64, what: &FallocateIn, ranges: &mut Ranges<Lane>) -> Answer<()> {
        let end = what.offset.checked_add(what.length).filter(|end| *end <= SIZE_MAX).ok_or(Errno::FBIG)?;
        let mut tree = self.shared.write();
        let size = tree.size(node)?;
        match what.mode & !KEEP_SIZE {
            0 => tree.reserve(node, what.offset / PAGE..end.div_ceil(PAGE))?,
            PUNCH_HOLE | ZERO_RANGE => {
                let (head, whole, tail) = Span { offset: what.offset, length: what.length }.parts();
                if !whole.is_empty() {
                    discard(&tree.punch(node, whole)?, ranges);
                }
                for edge in [head, tail] {
                    ranges.clear(edge, |page| tree.place(node, page))?;
                }
            }
            _ => return Err(Errno::OPNOTSUPP),
        }
        let grown = if what.mode & KEEP_SIZE != 0 { size } else { end };
        tree.written(node, grown, now())
    }

    fn statfs(&self) -> Vec<u8> {
        let tree = self.shared.read();
        let (blocks, free) = (u64::from(tree.room().pages()), u64::from(tree.room().free()));
        let files = tree.nodes_max() as u64;
        let stat = StatfsOut {
            blocks,
            bfree: free,
            bavail: free,
            files,
            ffree: files.saturating_sub(tree.nodes() as u64),
            bsize: PAGE_SIZE as u32,
            namelen: NAME_MAX,
            frsize: PAGE_SIZE as u32,
            ..StatfsOut::default()
        };
        stat.encode().to_vec()
    }

    /// Fills `listing` with as many entries of a directory as fit the request.
    fn list(&mut self, node: u64, what: &ReadIn) -> Answer<()> {
        let RamDisk { shared, listing } = self;
        listing.clear();
        let tree = shared.read();
        for listed in tree.list(node, what.offset)? {
            let bytes = (Dirent::BYTES + listed.name.len()).next_multiple_of(8);
            if listing.len() + bytes > what.size.min(IO_MAX) as usize {
                break;
            }
            let (name_bytes, kind) = (listed.name.len() as u32, (listed.mode & KIND) >> 12);
            let end = listing.len() + bytes;
            listing.extend(Dirent { ino: listed.node, offset: listed.cookie, name_bytes, kind }.encode());
            listing.extend(listed.name);
            listing.resize(end, 0);
        }
        Ok(())
    }
}

/// Answers an open. The kernel may keep cached pages of the file, since all changes go through the
/// kernel.
fn opened() -> [u8; OpenOut::BYTES] {
    OpenOut { fh: 0, open_flags: open_flag::KEEP_CACHE, padding: 0 }.encode()
}

fn attr(tree: &Tree, node: u64) -> Answer<Vec<u8>> {
    Ok(AttrOut { attr_valid: VALID, attr: tree.attr(node)?, ..AttrOut::default() }.encode().to_vec())
}

/// Answers with a node's attributes. Adds one to the number of times that the kernel was told of
/// the node.
fn entry(tree: &mut Tree, node: u64) -> Answer<Vec<u8>> {
    let attr = tree.attr(node)?;
    tree.remember(node);
    let entry = EntryOut { nodeid: node, entry_valid: VALID, attr_valid: VALID, attr, ..EntryOut::default() };
    Ok(entry.encode().to_vec())
}

/// Discards freed pages, so that they read as zeros in their next file. The caller holds the tree's
/// lock.
fn discard(freed: &[PageNo], ranges: &mut Ranges<Lane>) {
    if freed.is_empty() {
        return;
    }
    let lane = ranges.lane();
    for page in freed {
        lane.discard(*page, 1);
    }
    lane.submit();
}

fn now() -> Time {
    SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default()
}
