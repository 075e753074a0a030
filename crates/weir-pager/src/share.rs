//! A store over the share transport: a daemon keeps the pages in its stores.

use crate::{BLOCK_PAGES, Ledger, Store};
use std::io;
use std::path::Path;
use weir_core::PageBytes;
use weir_share::{Client, Lease, Options};

/// Number of the share connection's frames that are used for writes.
const WRITE_FRAMES: usize = 128;
/// Number of queued writes after which the daemon is told, so that it writes while more pages are
/// copied.
const SUBMIT_EVERY: usize = 16;

/// A store of blocks that a daemon keeps.
#[derive(Debug)]
pub struct ShareStore {
    client: Client,
    ledger: Ledger,
    blocks: usize,
    /// Free frames, from which pages are written.
    frames: Vec<Lease>,
    /// Frames whose write is under way, by the tag of the write.
    writing: Vec<Option<Lease>>,
    unsubmitted: usize,
    failed: Option<io::Error>,
}

impl ShareStore {
    /// Connects to the daemon whose socket is at `path`.
    ///
    /// # Errors
    /// Fails as [`Client::connect`] does.
    pub fn connect(path: &Path, ledger: Ledger) -> Result<Self, weir_share::Error> {
        let mut client = Client::connect(path, Options { frames: 256, entries: 512, ..Options::default() })?;
        let mut frames = Vec::with_capacity(WRITE_FRAMES);
        for tag in 0..WRITE_FRAMES {
            client.ask_frame(tag as u32)?;
            client.submit()?;
            frames.extend(client.wait()?.result?);
        }
        let blocks = client.pages() as usize / BLOCK_PAGES;
        let writing = (0..WRITE_FRAMES).map(|_| None).collect();
        Ok(ShareStore { client, ledger, blocks, frames, writing, unsubmitted: 0, failed: None })
    }

    /// Waits for the completion of one write, frees its frame, and keeps its error.
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
        Some((self.ledger.claim(self.blocks)? * BLOCK_PAGES) as u64)
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
        // Wait for all writes first, since `read` takes each completion for that of a read.
        while self.client.in_flight() > 0 {
            self.end_write()?;
        }
        // The server learns that a frame was returned only with the next request. So only half of
        // the frames are used at a time.
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
