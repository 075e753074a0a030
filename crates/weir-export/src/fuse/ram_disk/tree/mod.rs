//! Files, directories and links: names, attributes, and which page of the volume holds which page
//! of a file. The tree does no I/O: it returns the pages that its caller must discard.

use super::super::wire::{Attr, ROOT};
use super::room::Room;
use rustix::io::Errno;
use std::collections::{BTreeMap, HashMap};
use std::time::Duration;
use weir_core::{PAGE_SIZE, PageNo};

pub(super) const KIND: u32 = 0o170000;
pub(super) const DIRECTORY: u32 = 0o040000;
pub(super) const FILE: u32 = 0o100000;
pub(super) const SYMLINK: u32 = 0o120000;
const SET_GID: u32 = 0o2000;
const PERMISSIONS: u32 = 0o7777;

/// Flags of renameat2(2).
const NO_REPLACE: u32 = 1;
const EXCHANGE: u32 = 2;

/// Bytes of the longest name.
const NAME_MAX: usize = super::super::wire::NAME_MAX as usize;
/// Bytes of the largest file. With this limit no sum of an offset and a length overflows.
pub(super) const SIZE_MAX: u64 = 1 << 44;
/// Number of nodes that a tree may have beyond one for each page. Empty files need a limit too:
/// their nodes take the server's memory.
const NODES_SPARE: usize = 4096;

/// Pages in a leaf of a file's page table.
const LEAF: u64 = 512;
/// Marks a hole: no page.
const HOLE: u32 = u32::MAX;

/// Pages that belong to no file any more. The caller must discard them before it does anything else
/// with the tree.
pub(super) type Freed = Vec<PageNo>;
pub(super) type Result<T> = std::result::Result<T, Errno>;

/// A time, as the duration since the beginning of 1970.
pub(super) type Time = Duration;

#[derive(Debug)]
pub(super) struct Tree {
    nodes: HashMap<u64, Node>,
    /// Number of the names of all nodes. A node may have any number of names.
    names: usize,
    next: u64,
    room: Room,
}

#[derive(Debug)]
struct Node {
    mode: u32,
    uid: u32,
    gid: u32,
    links: u32,
    rdev: u32,
    atime: Time,
    mtime: Time,
    ctime: Time,
    /// Number of times that the kernel was told of the node, less those that it has forgotten.
    /// While it is above zero the node stays, with or without a name.
    lookups: u64,
    body: Body,
}

#[derive(Debug)]
enum Body {
    File(File),
    Directory(Directory),
    Symlink(Vec<u8>),
    Special,
}

#[derive(Debug, Default)]
struct File {
    size: u64,
    held: u64,
    leaves: BTreeMap<u64, Box<[u32; LEAF as usize]>>,
}

#[derive(Debug)]
struct Directory {
    parent: u64,
    names: BTreeMap<Box<[u8]>, Entry>,
    /// The names in the order in which they were added. So a listing can go on at the same point
    /// after names have been added or removed.
    order: BTreeMap<u64, Box<[u8]>>,
    /// The next name's number; 1 and 2 are `.` and `..`.
    next: u64,
}

#[derive(Clone, Copy, Debug)]
struct Entry {
    node: u64,
    cookie: u64,
}

/// The attributes of a new node.
#[derive(Clone, Debug)]
pub(super) struct New {
    /// The node's kind and permissions.
    pub mode: u32,
    pub uid: u32,
    pub gid: u32,
    pub rdev: u32,
    /// A symbolic link's target.
    pub target: Vec<u8>,
}

/// Changes of a node's attributes, other than its size.
#[derive(Clone, Copy, Debug, Default)]
pub(super) struct Change {
    pub mode: Option<u32>,
    pub uid: Option<u32>,
    pub gid: Option<u32>,
    pub atime: Option<Time>,
    pub mtime: Option<Time>,
}

/// One name in the listing of a directory.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct Listed<'a> {
    pub name: &'a [u8],
    pub node: u64,
    pub mode: u32,
    /// The cookie from which the listing continues after this name.
    pub cookie: u64,
}

impl Tree {
    /// Makes a tree with a root directory and `pages` pages for files.
    pub fn new(pages: u32, owner: (u32, u32), permissions: u32, now: Time) -> Tree {
        let root = Node {
            mode: DIRECTORY | permissions & PERMISSIONS,
            uid: owner.0,
            gid: owner.1,
            links: 2,
            rdev: 0,
            atime: now,
            mtime: now,
            ctime: now,
            lookups: 1,
            body: Body::Directory(Directory::new(ROOT)),
        };
        Tree { nodes: HashMap::from([(ROOT, root)]), names: 0, next: ROOT + 1, room: Room::new(pages) }
    }

    pub fn room(&self) -> &Room {
        &self.room
    }

    pub fn nodes(&self) -> usize {
        self.nodes.len()
    }

    pub fn nodes_max(&self) -> usize {
        self.room.pages() as usize + NODES_SPARE
    }

    fn node(&self, node: u64) -> Result<&Node> {
        self.nodes.get(&node).ok_or(Errno::STALE)
    }

    fn node_mut(&mut self, node: u64) -> Result<&mut Node> {
        self.nodes.get_mut(&node).ok_or(Errno::STALE)
    }

    fn directory(&self, node: u64) -> Result<&Directory> {
        match &self.node(node)?.body {
            Body::Directory(directory) => Ok(directory),
            _ => Err(Errno::NOTDIR),
        }
    }

    fn directory_mut(&mut self, node: u64) -> Result<&mut Directory> {
        match &mut self.node_mut(node)?.body {
            Body::Directory(directory) => Ok(directory),
            _ => Err(Errno::NOTDIR),
        }
    }

    fn file(&self, node: u64) -> Result<&File> {
        match &self.node(node)?.body {
            Body::File(file) => Ok(file),
            Body::Directory(_) => Err(Errno::ISDIR),
            _ => Err(Errno::INVAL),
        }
    }

    fn file_mut(&mut self, node: u64) -> Result<(&mut File, &mut Room)> {
        match &mut self.nodes.get_mut(&node).ok_or(Errno::STALE)?.body {
            Body::File(file) => Ok((file, &mut self.room)),
            Body::Directory(_) => Err(Errno::ISDIR),
            _ => Err(Errno::INVAL),
        }
    }

    fn entry(&self, parent: u64, name: &[u8]) -> Result<Entry> {
        self.directory(parent)?.names.get(name).copied().ok_or(Errno::NOENT)
    }

    fn is_directory(&self, node: u64) -> bool {
        self.directory(node).is_ok()
    }

    /// Finds the node for which a name in a directory stands.
    pub fn lookup(&self, parent: u64, name: &[u8]) -> Result<u64> {
        if name.len() > NAME_MAX {
            return Err(Errno::NAMETOOLONG);
        }
        match name {
            b"." => self.directory(parent).map(|_| parent),
            b".." => self.directory(parent).map(|directory| directory.parent),
            name => self.entry(parent, name).map(|entry| entry.node),
        }
    }

    pub fn attr(&self, node: u64) -> Result<Attr> {
        let found = self.node(node)?;
        let (size, blocks) = match &found.body {
            Body::File(file) => (file.size, file.held * (PAGE_SIZE / 512) as u64),
            Body::Symlink(target) => (target.len() as u64, 0),
            Body::Directory(_) | Body::Special => (0, 0),
        };
        Ok(Attr {
            ino: node,
            size,
            blocks,
            atime: found.atime.as_secs(),
            mtime: found.mtime.as_secs(),
            ctime: found.ctime.as_secs(),
            atimensec: found.atime.subsec_nanos(),
            mtimensec: found.mtime.subsec_nanos(),
            ctimensec: found.ctime.subsec_nanos(),
            mode: found.mode,
            nlink: found.links,
            uid: found.uid,
            gid: found.gid,
            rdev: found.rdev,
            blksize: PAGE_SIZE as u32,
            flags: 0,
        })
    }

    pub fn target(&self, node: u64) -> Result<&[u8]> {
        match &self.node(node)?.body {
            Body::Symlink(target) => Ok(target),
            _ => Err(Errno::INVAL),
        }
    }

    /// Makes a node, and gives it a name in a directory.
    pub fn make(&mut self, parent: u64, name: &[u8], new: New, now: Time) -> Result<u64> {
        self.vacant(parent, name)?;
        if self.nodes.len().max(self.names) >= self.nodes_max() {
            return Err(Errno::NOSPC);
        }
        let above = self.node(parent)?;
        let (mut mode, mut gid) = (new.mode & (KIND | PERMISSIONS), new.gid);
        let is_directory = mode & KIND == DIRECTORY;
        if above.mode & SET_GID != 0 {
            gid = above.gid;
            mode |= if is_directory { SET_GID } else { 0 };
        }
        let body = match mode & KIND {
            FILE => Body::File(File::default()),
            DIRECTORY => Body::Directory(Directory::new(parent)),
            SYMLINK => Body::Symlink(new.target),
            _ => Body::Special,
        };
        let node = self.next;
        self.next += 1;
        let links = if is_directory { 2 } else { 1 };
        let (uid, rdev) = (new.uid, new.rdev);
        let made = Node { mode, uid, gid, links, rdev, atime: now, mtime: now, ctime: now, lookups: 0, body };
        self.nodes.insert(node, made);
        self.add(parent, name, node, now)?;
        Ok(node)
    }

    /// Gives a node another name. The node must not be a directory.
    pub fn link(&mut self, node: u64, parent: u64, name: &[u8], now: Time) -> Result<()> {
        self.vacant(parent, name)?;
        if self.is_directory(node) {
            return Err(Errno::PERM);
        }
        if self.names >= self.nodes_max() {
            return Err(Errno::NOSPC);
        }
        let linked = self.node_mut(node)?;
        linked.links += 1;
        linked.ctime = now;
        self.add(parent, name, node, now)
    }

    /// Removes a name of a node that is no directory.
    pub fn unlink(&mut self, parent: u64, name: &[u8], now: Time) -> Result<Freed> {
        let entry = self.entry(parent, name)?;
        if self.is_directory(entry.node) {
            return Err(Errno::ISDIR);
        }
        self.remove(parent, name, now)
    }

    /// Removes an empty directory.
    pub fn rmdir(&mut self, parent: u64, name: &[u8], now: Time) -> Result<Freed> {
        let entry = self.entry(parent, name)?;
        if !self.directory(entry.node)?.names.is_empty() {
            return Err(Errno::NOTEMPTY);
        }
        self.remove(parent, name, now)
    }

    /// Renames a node. A node that has the new name is removed, or the two exchange their names.
    pub fn rename(
        &mut self,
        (parent, name): (u64, &[u8]),
        (to_parent, to_name): (u64, &[u8]),
        flags: u32,
        now: Time,
    ) -> Result<Freed> {
        if flags & !(NO_REPLACE | EXCHANGE) != 0 || flags == NO_REPLACE | EXCHANGE {
            return Err(Errno::INVAL);
        }
        if to_name.len() > NAME_MAX {
            return Err(Errno::NAMETOOLONG);
        }
        let moved = self.entry(parent, name)?.node;
        self.directory(to_parent)?;
        let replaced = match self.entry(to_parent, to_name) {
            Ok(entry) => Some(entry.node),
            Err(Errno::NOENT) => None,
            Err(errno) => return Err(errno),
        };
        if self.is_within(to_parent, moved)
            || (flags & EXCHANGE != 0 && replaced.is_some_and(|other| self.is_within(parent, other)))
        {
            return Err(Errno::INVAL);
        }
        match replaced {
            None if flags & EXCHANGE != 0 => return Err(Errno::NOENT),
            Some(_) if flags & NO_REPLACE != 0 => return Err(Errno::EXIST),
            // Both names belong to one node, so nothing happens (rename(2)).
            Some(other) if other == moved => return Ok(Freed::new()),
            Some(other) if flags & EXCHANGE != 0 => {
                self.take_name(parent, name, now)?;
                self.take_name(to_parent, to_name, now)?;
                self.add(parent, name, other, now)?;
                self.add(to_parent, to_name, moved, now)?;
                self.node_mut(other)?.ctime = now;
                self.node_mut(moved)?.ctime = now;
                return Ok(Freed::new());
            }
            Some(other) => match (self.is_directory(moved), self.is_directory(other)) {
                (true, false) => return Err(Errno::NOTDIR),
                (false, true) => return Err(Errno::ISDIR),
                (true, true) if !self.directory(other)?.names.is_empty() => return Err(Errno::NOTEMPTY),
                _ => {}
            },
            None => {}
        }
        let freed = match replaced {
            Some(_) => self.remove(to_parent, to_name, now)?,
            None => Freed::new(),
        };
        self.take_name(parent, name, now)?;
        self.add(to_parent, to_name, moved, now)?;
        self.node_mut(moved)?.ctime = now;
        Ok(freed)
    }

    /// The entries of a directory after the cookie `after` (0: from the beginning).
    pub fn list(&self, node: u64, after: u64) -> Result<impl Iterator<Item = Listed<'_>>> {
        let directory = self.directory(node)?;
        let dots = [(b".".as_slice(), node, 1), (b"..", directory.parent, 2)];
        let dots = dots.into_iter().filter(move |(_, _, cookie)| *cookie > after);
        let named = directory.order.range(after.saturating_add(1).max(3)..).map(|(cookie, name)| {
            let entry = directory.names[name];
            (&**name, entry.node, *cookie)
        });
        let mode = |node| self.nodes.get(&node).map_or(0, |node| node.mode);
        Ok(dots.chain(named).map(move |(name, node, cookie)| Listed { name, node, mode: mode(node), cookie }))
    }

    /// Adds one to the number of times that the kernel was told of a node.
    pub fn remember(&mut self, node: u64) {
        if let Some(node) = self.nodes.get_mut(&node) {
            node.lookups += 1;
        }
    }

    /// Subtracts `lookups` from the number of times that the kernel was told of a node. Frees the
    /// node if nothing uses it any more.
    pub fn forget(&mut self, node: u64, lookups: u64) -> Freed {
        if let Some(found) = self.nodes.get_mut(&node) {
            found.lookups = found.lookups.saturating_sub(lookups);
        }
        self.drop_if_unused(node)
    }

    pub fn change(&mut self, node: u64, change: &Change, now: Time) -> Result<()> {
        let node = self.node_mut(node)?;
        node.mode = change.mode.map_or(node.mode, |mode| node.mode & KIND | mode & PERMISSIONS);
        node.uid = change.uid.unwrap_or(node.uid);
        node.gid = change.gid.unwrap_or(node.gid);
        node.atime = change.atime.unwrap_or(node.atime);
        node.mtime = change.mtime.unwrap_or(node.mtime);
        node.ctime = now;
        Ok(())
    }

    /// The page of the volume that holds page `page` of a file.
    pub fn place(&self, node: u64, page: u64) -> Option<PageNo> {
        self.file(node).ok()?.place(page)
    }

    pub fn size(&self, node: u64) -> Result<u64> {
        self.file(node).map(|file| file.size)
    }

    /// Gives each page in a range of a file a page of the volume. Gives none if there is not room
    /// for all.
    pub fn reserve(&mut self, node: u64, pages: std::ops::Range<u64>) -> Result<()> {
        let (file, room) = self.file_mut(node)?;
        let most = file.held + u64::from(room.free());
        if pages.end.saturating_sub(pages.start) > most {
            // Refuse a range that is too long here. The code below goes through all its pages, and
            // it may be as long as the largest file.
            return Err(Errno::NOSPC);
        }
        let missing = pages.clone().filter(|page| file.place(*page).is_none()).count() as u64;
        if missing > u64::from(room.free()) {
            return Err(Errno::NOSPC);
        }
        for page in pages {
            if file.place(page).is_none() {
                file.put(page, room.take().expect("counted before").0);
            }
        }
        Ok(())
    }

    /// Notes a write that ended at byte `end`: the file is at least that long, and was changed at
    /// `now`.
    pub fn written(&mut self, node: u64, end: u64, now: Time) -> Result<()> {
        let (file, _) = self.file_mut(node)?;
        file.size = file.size.max(end);
        let node = self.node_mut(node)?;
        (node.mtime, node.ctime) = (now, now);
        Ok(())
    }

    /// Truncates a file or makes it longer. The caller must clear the rest of its last page.
    pub fn resize(&mut self, node: u64, size: u64, now: Time) -> Result<Freed> {
        if size > SIZE_MAX {
            return Err(Errno::FBIG);
        }
        let freed = self.punch(node, size.div_ceil(PAGE_SIZE as u64)..SIZE_MAX / PAGE_SIZE as u64)?;
        self.file_mut(node)?.0.size = size;
        let node = self.node_mut(node)?;
        (node.mtime, node.ctime) = (now, now);
        Ok(freed)
    }

    /// Frees the pages of a range of a file, which becomes a hole.
    pub fn punch(&mut self, node: u64, pages: std::ops::Range<u64>) -> Result<Freed> {
        let (file, room) = self.file_mut(node)?;
        let mut freed = Freed::new();
        let leaves = pages.start / LEAF..pages.end.div_ceil(LEAF);
        let mut empty = Vec::new();
        for (number, leaf) in file.leaves.range_mut(leaves) {
            for (at, slot) in leaf.iter_mut().enumerate() {
                if *slot != HOLE && pages.contains(&(number * LEAF + at as u64)) {
                    freed.push(PageNo(std::mem::replace(slot, HOLE)));
                }
            }
            if leaf.iter().all(|slot| *slot == HOLE) {
                empty.push(*number);
            }
        }
        for number in empty {
            file.leaves.remove(&number);
        }
        file.held -= freed.len() as u64;
        freed.iter().for_each(|page| room.give_back(*page));
        Ok(freed)
    }

    /// The first byte from `offset` on that is data; without `data`, the first that is a hole.
    pub fn seek(&self, node: u64, offset: u64, data: bool) -> Result<u64> {
        let file = self.file(node)?;
        if offset >= file.size {
            return Err(Errno::NXIO);
        }
        let mut page = offset / PAGE_SIZE as u64;
        let end = file.size.div_ceil(PAGE_SIZE as u64);
        while page < end && file.place(page).is_some() != data {
            // Skip the whole gap to the next leaf in one step.
            page = match file.leaves.range(page / LEAF..).next() {
                None if data => end,
                Some((leaf, _)) if data && leaf * LEAF > page => leaf * LEAF,
                _ => page + 1,
            };
        }
        match (page < end, data) {
            (true, _) => Ok(offset.max(page * PAGE_SIZE as u64)),
            (false, true) => Err(Errno::NXIO),
            (false, false) => Ok(file.size),
        }
    }

    /// Whether `node` is `ancestor`, or lies below it.
    fn is_within(&self, mut node: u64, ancestor: u64) -> bool {
        while node != ancestor {
            match self.directory(node) {
                Ok(directory) if node != ROOT => node = directory.parent,
                _ => return false,
            }
        }
        true
    }

    fn vacant(&self, parent: u64, name: &[u8]) -> Result<()> {
        if name.len() > NAME_MAX {
            return Err(Errno::NAMETOOLONG);
        }
        let directory = self.directory(parent)?;
        // A directory that was removed while a program uses it takes no new names.
        if self.node(parent)?.links == 0 {
            return Err(Errno::NOENT);
        }
        if name == b"." || name == b".." || directory.names.contains_key(name) {
            return Err(Errno::EXIST);
        }
        Ok(())
    }

    /// Adds a name that does not exist yet.
    fn add(&mut self, parent: u64, name: &[u8], node: u64, now: Time) -> Result<()> {
        if let Ok(directory) = self.directory_mut(node) {
            directory.parent = parent;
            self.node_mut(parent)?.links += 1;
        }
        let directory = self.directory_mut(parent)?;
        let cookie = directory.next;
        directory.next += 1;
        directory.names.insert(name.into(), Entry { node, cookie });
        directory.order.insert(cookie, name.into());
        self.names += 1;
        self.touched(parent, now)
    }

    /// Removes a name, but not its node. Returns the node's number.
    fn take_name(&mut self, parent: u64, name: &[u8], now: Time) -> Result<u64> {
        let directory = self.directory_mut(parent)?;
        let entry = directory.names.remove(name).ok_or(Errno::NOENT)?;
        directory.order.remove(&entry.cookie);
        self.names -= 1;
        if self.is_directory(entry.node) {
            self.node_mut(parent)?.links -= 1;
        }
        self.touched(parent, now)?;
        Ok(entry.node)
    }

    /// Removes a name, and its node too if that was the last name.
    fn remove(&mut self, parent: u64, name: &[u8], now: Time) -> Result<Freed> {
        let node = self.take_name(parent, name, now)?;
        let is_directory = self.is_directory(node);
        let unlinked = self.node_mut(node)?;
        unlinked.links = if is_directory { 0 } else { unlinked.links - 1 };
        unlinked.ctime = now;
        Ok(self.drop_if_unused(node))
    }

    fn touched(&mut self, node: u64, now: Time) -> Result<()> {
        let node = self.node_mut(node)?;
        (node.mtime, node.ctime) = (now, now);
        Ok(())
    }

    fn drop_if_unused(&mut self, node: u64) -> Freed {
        let unused = self.nodes.get(&node).is_some_and(|node| node.links == 0 && node.lookups == 0);
        if !unused {
            return Freed::new();
        }
        let freed = self.punch(node, 0..SIZE_MAX / PAGE_SIZE as u64).unwrap_or_default();
        self.nodes.remove(&node);
        freed
    }
}

impl File {
    fn place(&self, page: u64) -> Option<PageNo> {
        let slot = self.leaves.get(&(page / LEAF))?[(page % LEAF) as usize];
        (slot != HOLE).then_some(PageNo(slot))
    }

    fn put(&mut self, page: u64, slot: u32) {
        let leaf = self.leaves.entry(page / LEAF).or_insert_with(|| Box::new([HOLE; LEAF as usize]));
        leaf[(page % LEAF) as usize] = slot;
        self.held += 1;
    }
}

impl Directory {
    fn new(parent: u64) -> Directory {
        Directory { parent, names: BTreeMap::new(), order: BTreeMap::new(), next: 3 }
    }
}

#[cfg(test)]
mod tests;
