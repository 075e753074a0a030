//! A store over the share transport: pages lie with a daemon, whatever its stores are.

use crate::{BLOCK_PAGES, Store};
use rustix::fs::{MemfdFlags, OFlags};
use rustix::mm::{MapFlags, ProtFlags};
use std::fs::File;
use std::io;
use std::path::Path;
use std::sync::atomic::{AtomicU32, Ordering};
use weir_core::PageBytes;
use weir_share::{Client, Lease, Options};

/// Frames that writes go through.
const WRITE_FRAMES: usize = 128;
/// Writes after which the daemon is told: it works while more is copied.
const SUBMIT_EVERY: usize = 16;

/// Which process holds which block of the volume: one number a block, in memory that all bounded programs of one daemon share.
#[derive(Debug)]
pub struct Ledger {
    owners: *const AtomicU32,
    blocks: usize,
    next: usize,
}

// SAFETY: a mapping of atomic numbers, which lives as long as the process.
unsafe impl Send for Ledger {}

impl Ledger {
    /// Maps the file at `path`, whose length says how many blocks there are.
    ///
    /// # Errors
    /// When it is not there or empty.
    pub fn open(path: &Path) -> io::Result<Self> {
        let file = File::from(rustix::fs::open(path, OFlags::RDWR | OFlags::CLOEXEC, 0.into())?);
        Self::map(&file)
    }

    /// One of this process alone.
    ///
    /// # Errors
    /// When there is no memory.
    pub fn private(blocks: usize) -> io::Result<Self> {
        let file = File::from(rustix::fs::memfd_create("weir-ledger", MemfdFlags::CLOEXEC)?);
        file.set_len(Self::bytes(blocks))?;
        Self::map(&file)
    }

    /// The length of a file for so many blocks.
    pub fn bytes(blocks: usize) -> u64 {
        (blocks * size_of::<AtomicU32>()) as u64
    }

    fn map(file: &File) -> io::Result<Self> {
        let bytes = file.metadata()?.len() as usize;
        let flags = ProtFlags::READ | ProtFlags::WRITE;
        // SAFETY: a new mapping, which stays.
        let at = unsafe { rustix::mm::mmap(std::ptr::null_mut(), bytes, flags, MapFlags::SHARED, file, 0)? };
        Ok(Ledger { owners: at.cast(), blocks: bytes / size_of::<AtomicU32>(), next: 0 })
    }

    fn owners(&self) -> &[AtomicU32] {
        // SAFETY: mapped for so many, by whole pages.
        unsafe { std::slice::from_raw_parts(self.owners, self.blocks) }
    }

    /// Gives back what `process` holds.
    pub fn release_all(&self, process: u32) {
        for owner in self.owners() {
            let _ = owner.compare_exchange(process, 0, Ordering::AcqRel, Ordering::Relaxed);
        }
    }

    /// A block below `limit` for `process`: a free one, else one of a process that has ended.
    fn claim(&mut self, process: u32, limit: usize) -> Option<usize> {
        let blocks = self.blocks.min(limit);
        let take = |at: usize, from: u32| {
            self.owners()[at].compare_exchange(from, process, Ordering::AcqRel, Ordering::Relaxed).is_ok()
        };
        let free = (self.next..blocks).chain(0..self.next.min(blocks)).find(|&at| take(at, 0));
        let found = free.or_else(|| {
            let is_gone = |owner: u32| {
                rustix::process::Pid::from_raw(owner as i32)
                    .is_none_or(|pid| rustix::process::test_kill_process(pid) == Err(rustix::io::Errno::SRCH))
            };
            (0..blocks).find(|&at| {
                let owner = self.owners()[at].load(Ordering::Acquire);
                owner != process && is_gone(owner) && take(at, owner)
            })
        })?;
        self.next = found + 1;
        Some(found)
    }

    fn release(&mut self, block: usize) {
        self.owners()[block].store(0, Ordering::Release);
        self.next = self.next.min(block);
    }
}

/// Blocks with a daemon.
#[derive(Debug)]
pub struct ShareStore {
    client: Client,
    ledger: Ledger,
    process: u32,
    blocks: usize,
    /// Frames to write from, none of which is under way.
    frames: Vec<Lease>,
    /// Frames under way, by the tag of their write.
    writing: Vec<Option<Lease>>,
    unsubmitted: usize,
    failed: Option<io::Error>,
}

impl ShareStore {
    /// Connects to the daemon whose socket is at `path`.
    ///
    /// # Errors
    /// As [`Client::connect`].
    pub fn connect(path: &Path, ledger: Ledger) -> Result<Self, weir_share::Error> {
        let mut client = Client::connect(path, Options { frames: 256, entries: 512, ..Options::default() })?;
        let mut frames = Vec::with_capacity(WRITE_FRAMES);
        for tag in 0..WRITE_FRAMES {
            client.ask_frame(tag as u32)?;
            client.submit()?;
            frames.extend(client.wait()?.result?);
        }
        let process = std::process::id();
        // What this process held before it became another program.
        ledger.release_all(process);
        let blocks = client.pages() as usize / BLOCK_PAGES;
        let writing = (0..WRITE_FRAMES).map(|_| None).collect();
        Ok(ShareStore { client, ledger, process, blocks, frames, writing, unsubmitted: 0, failed: None })
    }

    /// Takes the end of one write.
    fn end_write(&mut self) -> io::Result<()> {
        self.submit()?;
        let completion = self.client.wait().map_err(io::Error::other)?;
        let lease = self.writing.get_mut(completion.tag as usize).and_then(Option::take);
        self.frames.extend(lease);
        if let Err(error) = completion.result {
            self.failed.get_or_insert(error);
        }
        Ok(())
    }

    fn submit(&mut self) -> io::Result<()> {
        self.unsubmitted = 0;
        self.client.submit().map_err(io::Error::other)
    }
}

impl Store for ShareStore {
    fn claim(&mut self) -> Option<u64> {
        Some((self.ledger.claim(self.process, self.blocks)? * BLOCK_PAGES) as u64)
    }

    fn release(&mut self, first: u64) {
        self.ledger.release(first as usize / BLOCK_PAGES);
    }

    fn write(&mut self, page: u64, bytes: &PageBytes) -> io::Result<()> {
        while self.frames.is_empty() {
            self.end_write()?;
        }
        let mut lease = self.frames.pop().expect("one is free");
        self.client.page_mut(&mut lease).ok_or(io::ErrorKind::InvalidData)?.copy_from_slice(bytes);
        let tag = self.writing.iter().position(Option::is_none).expect("as many places as frames");
        self.client.ask_write(tag as u32, page, &lease).map_err(io::Error::other)?;
        self.writing[tag] = Some(lease);
        self.unsubmitted += 1;
        if self.unsubmitted >= SUBMIT_EVERY {
            self.submit()?;
        }
        Ok(())
    }

    fn settle(&mut self) -> io::Result<()> {
        while self.client.in_flight() > 0 {
            self.end_write()?;
        }
        self.failed.take().map_or(Ok(()), Err)
    }

    fn read(&mut self, first: u64, out: &mut [PageBytes]) -> io::Result<()> {
        // Completions of writes would be taken for those of reads.
        while self.client.in_flight() > 0 {
            self.end_write()?;
        }
        // A frame is free again only once the server has read of its return, which comes behind the next question.
        let window = (self.client.frames() as usize - WRITE_FRAMES) / 2;
        let mut failed = None;
        let (mut asked, mut came) = (0, 0);
        while came < out.len() {
            while asked < out.len() && asked - came < window {
                self.client.ask_read(asked as u32, first + asked as u64).map_err(io::Error::other)?;
                asked += 1;
            }
            self.client.submit().map_err(io::Error::other)?;
            let completion = self.client.wait().map_err(io::Error::other)?;
            came += 1;
            match completion.result {
                Ok(Some(lease)) => {
                    if let Some(page) = out.get_mut(completion.tag as usize) {
                        page.copy_from_slice(self.client.page(&lease));
                    }
                    self.client.give_later(lease).map_err(io::Error::other)?;
                }
                Ok(None) => failed = Some(io::ErrorKind::InvalidData.into()),
                Err(error) => failed = Some(error),
            }
        }
        self.client.submit().map_err(io::Error::other)?;
        failed.map_or(Ok(()), Err)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_block_has_one_owner_and_is_free_once_that_has_ended() {
        let mut ledger = Ledger::private(3).unwrap();
        // As no process is numbered.
        let gone = i32::MAX as u32;
        let mine = std::process::id();
        assert_eq!(
            [ledger.claim(gone, 3), ledger.claim(mine, 3), ledger.claim(mine, 2)],
            [Some(0), Some(1), Some(0)]
        );
        assert_eq!(ledger.claim(mine, 2), None, "all below the volume's end are held by one that lives");
        ledger.release(1);
        assert_eq!(ledger.claim(mine, 3), Some(1));
        ledger.release_all(mine);
        assert_eq!(ledger.claim(mine, 3), Some(2));
    }
}
