//! A file system of one file. The file holds a volume's bytes and is as large as the volume. A loop
//! device makes a disk of the file.

use super::range::{IO_MAX, Ranges, Volume};
use super::reply::Reply;
use super::request::{Message, Request};
use super::serve::Service;
use super::stats::Counters;
use super::wire::{
    Attr, AttrOut, Dirent, EntryOut, FallocateIn, LseekIn, NAME_MAX, OpenOut, ROOT, ReadIn, StatfsOut,
    WriteOut, opcode, open_flag, setattr,
};
use rustix::io::Errno;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use weir_core::{PAGE_SIZE, PageNo};
use weir_device::PageLane;
use weir_request::Span;

/// Seconds that the kernel may keep names and attributes that never change.
const FOR_EVER: u64 = 1 << 40;

const KEEP_SIZE: u32 = 0x01;
const PUNCH_HOLE: u32 = 0x02;
const ZERO_RANGE: u32 = 0x10;
const SEEK_DATA: u32 = 3;
const SEEK_HOLE: u32 = 4;

/// The properties of the file system and of its one file.
#[derive(Debug)]
pub(super) struct Shape {
    /// The file's name in the directory; `None`: the root is the file itself.
    pub name: Option<String>,
    /// The file's size. It may grow if [`grows`](Shape::grows) is set.
    pub bytes: AtomicU64,
    pub grows: bool,
    pub owner: (u32, u32),
    /// Every time stamp in the file system, in seconds since 1970.
    pub born: u64,
}

/// One thread's part of the file system.
pub(super) struct Disk {
    pub shape: Arc<Shape>,
}

impl Shape {
    pub fn bytes(&self) -> u64 {
        self.bytes.load(Ordering::Relaxed)
    }

    /// Seconds that the kernel may keep attributes.
    fn valid(&self) -> u64 {
        if self.grows { 0 } else { FOR_EVER }
    }

    fn file(&self) -> u64 {
        if self.name.is_some() { ROOT + 1 } else { ROOT }
    }

    fn attr(&self, node: u64) -> Option<Attr> {
        let mut attr = Attr {
            ino: node,
            atime: self.born,
            mtime: self.born,
            ctime: self.born,
            uid: self.owner.0,
            gid: self.owner.1,
            blksize: PAGE_SIZE as u32,
            ..Attr::default()
        };
        if node == self.file() {
            (attr.size, attr.blocks) = (self.bytes(), self.bytes() / 512);
            (attr.mode, attr.nlink) = (0o100600, 1);
        } else if node == ROOT {
            (attr.mode, attr.nlink) = (0o040700, 2);
        } else {
            return None;
        }
        Some(attr)
    }

    /// The number of a range's bytes that lie within the file.
    fn clip(&self, offset: u64, length: u64) -> u64 {
        self.bytes().saturating_sub(offset).min(length)
    }
}

impl<L: PageLane> Service<L> for Disk {
    fn serve(
        &mut self,
        message: &Message<'_>,
        ranges: &mut Ranges<L>,
        reply: &dyn Reply,
        counters: &Counters,
    ) -> rustix::io::Result<()> {
        let (shape, node, unique) = (&*self.shape, message.header.nodeid, message.header.unique);
        let answer = |body: &[u8]| reply.answer(unique, body);
        let refuse = |errno| reply.refuse(unique, errno);
        let on_file = node == shape.file();
        match message.request {
            Request::Read { what } if on_file => self.read(unique, &what, ranges, reply, counters),
            Request::Write { what, data } if on_file => {
                counters.writes.add(1);
                counters.bytes_written.add(data.len() as u64);
                let fits = shape.clip(what.offset, data.len() as u64) == data.len() as u64;
                let result = if fits { ranges.write(&what, data, Volume) } else { Err(Errno::FBIG) };
                match result {
                    Ok(()) => answer(&WriteOut { size: what.size, padding: 0 }.encode()),
                    Err(errno) => {
                        counters.errors.add(1);
                        refuse(errno)
                    }
                }
            }
            Request::Fallocate { what } if on_file => {
                counters.discards.add(1);
                match self.allocate(&what, ranges) {
                    Ok(()) => answer(&[]),
                    Err(errno) => {
                        counters.errors.add(1);
                        refuse(errno)
                    }
                }
            }
            Request::Lseek { what } if on_file => match self.seek(&what, ranges) {
                Ok(offset) => answer(&offset.to_ne_bytes()),
                Err(errno) => refuse(errno),
            },
            Request::Lookup { name } => match &shape.name {
                Some(known) if node == ROOT && known.as_bytes() == name => {
                    let attr = shape.attr(shape.file()).expect("the file has attributes");
                    let (entry_valid, attr_valid) = (FOR_EVER, shape.valid());
                    let entry =
                        EntryOut { nodeid: attr.ino, entry_valid, attr_valid, attr, ..EntryOut::default() };
                    answer(&entry.encode())
                }
                _ => refuse(Errno::NOENT),
            },
            Request::Getattr => match shape.attr(node) {
                Some(attr) => {
                    answer(&AttrOut { attr_valid: shape.valid(), attr, ..AttrOut::default() }.encode())
                }
                None => refuse(Errno::NOENT),
            },
            // Like a block device, the file keeps its size and its time, even if a program
            // truncates it.
            Request::Setattr { change }
                if change.valid & (setattr::MODE | setattr::UID | setattr::GID) == 0 =>
            {
                match shape.attr(node) {
                    Some(attr) => {
                        answer(&AttrOut { attr_valid: shape.valid(), attr, ..AttrOut::default() }.encode())
                    }
                    None => refuse(Errno::NOENT),
                }
            }
            Request::Setattr { .. } => refuse(Errno::PERM),
            Request::Open { .. } if on_file => {
                let open_flags = open_flag::DIRECT_IO | open_flag::PARALLEL_DIRECT_WRITES;
                answer(&OpenOut { fh: 0, open_flags, padding: 0 }.encode())
            }
            Request::Opendir if node == ROOT && !on_file => answer(&OpenOut::default().encode()),
            Request::Readdir { what } if node == ROOT && !on_file => self.list(unique, &what, reply),
            Request::Release { .. } | Request::Releasedir { .. } | Request::Destroy => answer(&[]),
            Request::Statfs => {
                // The file takes all the room of the file system.
                let stat = StatfsOut {
                    blocks: shape.bytes() / PAGE_SIZE as u64,
                    files: 1,
                    bsize: PAGE_SIZE as u32,
                    frsize: PAGE_SIZE as u32,
                    namelen: NAME_MAX,
                    ..StatfsOut::default()
                };
                answer(&stat.encode())
            }
            Request::Forget { .. } | Request::BatchForget { .. } => Ok(()),
            Request::Create { .. }
            | Request::Mknod { .. }
            | Request::Mkdir { .. }
            | Request::Unlink { .. } => refuse(Errno::PERM),
            Request::Unknown { opcode: opcode::FSYNC } if on_file && L::FLUSHES => match ranges.flush() {
                Ok(()) => answer(&[]),
                Err(errno) => {
                    counters.errors.add(1);
                    refuse(errno)
                }
            },
            // An acknowledged page is safe already, or becomes safe by FSYNC. So FLUSH never has
            // anything to do. FSYNC has something to do only if the page device can flush. ENOSYS
            // makes the kernel count such a request as done, and send no further ones.
            _ => refuse(Errno::NOSYS),
        }
    }
}

impl Disk {
    fn read<L: PageLane>(
        &self,
        unique: u64,
        what: &ReadIn,
        ranges: &mut Ranges<L>,
        reply: &dyn Reply,
        counters: &Counters,
    ) -> rustix::io::Result<()> {
        let length = self.shape.clip(what.offset, u64::from(what.size.min(IO_MAX)));
        counters.reads.add(1);
        counters.bytes_read.add(length);
        if length == 0 {
            return reply.answer(unique, &[]);
        }
        let result = ranges.read(reply, unique, Span { offset: what.offset, length }, Volume)?;
        counters.errors.add(u64::from(result.is_err()));
        Ok(())
    }

    fn allocate<L: PageLane>(&self, what: &FallocateIn, ranges: &mut Ranges<L>) -> Result<(), Errno> {
        let inside = self.shape.clip(what.offset, what.length);
        match what.mode & !KEEP_SIZE {
            // There is nothing to do: the volume has room for every page of the file from the
            // start.
            0 if inside == what.length || what.mode & KEEP_SIZE != 0 => Ok(()),
            0 => Err(Errno::FBIG),
            PUNCH_HOLE | ZERO_RANGE if inside == 0 => Ok(()),
            PUNCH_HOLE | ZERO_RANGE => ranges.clear(Span { offset: what.offset, length: inside }, Volume),
            _ => Err(Errno::OPNOTSUPP),
        }
    }

    fn seek<L: PageLane>(&self, what: &LseekIn, ranges: &mut Ranges<L>) -> Result<u64, Errno> {
        if what.offset >= self.shape.bytes() {
            return Err(Errno::NXIO);
        }
        let data = match what.whence {
            SEEK_DATA => true,
            SEEK_HOLE => false,
            _ => return Err(Errno::INVAL),
        };
        if !L::CLEARS {
            // A page device that cannot discard pages has no holes: the file is data up to its end.
            return Ok(if data { what.offset } else { self.shape.bytes() });
        }
        let lane = ranges.lane();
        let first = (what.offset / PAGE_SIZE as u64) as u32;
        let found = (first..lane.pages()).find(|page| lane.known_zero(PageNo(*page)) != data);
        match found {
            Some(page) => Ok(what.offset.max(u64::from(page) * PAGE_SIZE as u64)),
            // After the file's end there is a hole, and no data.
            None if data => Err(Errno::NXIO),
            None => Ok(self.shape.bytes()),
        }
    }

    fn list(&self, unique: u64, what: &ReadIn, reply: &dyn Reply) -> rustix::io::Result<()> {
        const DIRECTORY: u32 = 4;
        const FILE: u32 = 8;
        let name = self.shape.name.as_deref().unwrap_or_default();
        let mut bytes = [0; 1024];
        let mut length = 0;
        let all = [(".", ROOT, DIRECTORY), ("..", ROOT, DIRECTORY), (name, ROOT + 1, FILE)];
        for (at, (name, ino, kind)) in all.into_iter().enumerate().skip(what.offset as usize) {
            let entry = Dirent { ino, offset: at as u64 + 1, name_bytes: name.len() as u32, kind };
            let end = (length + Dirent::BYTES + name.len()).next_multiple_of(8);
            if end > bytes.len().min(what.size as usize) {
                break;
            }
            bytes[length..length + Dirent::BYTES].copy_from_slice(&entry.encode());
            bytes[length + Dirent::BYTES..][..name.len()].copy_from_slice(name.as_bytes());
            length = end;
        }
        reply.answer(unique, &bytes[..length])
    }
}
