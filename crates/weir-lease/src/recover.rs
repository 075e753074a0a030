//! Rebuilds a table from the image that a dead owner left.

use alloc::vec::Vec;
use core::sync::atomic::AtomicU64;

use crate::connection::{Connection, Root};
use crate::counts::PageCounts;
use crate::image::{CHUNK_SLOTS, Image, ImageError};
use crate::table::Table;
use crate::words::{ChunkWord, ConnectionWord, SlotWord};

impl<C: PageCounts, M: AsRef<[AtomicU64]>> Table<C, M> {
    /// Rebuilds a table from its image. Also returns every connection that was open, lowest number
    /// first.
    ///
    /// `counts` must be empty; each reference that is out is counted in it again. The scan reads
    /// each word once: about 2 ms for 10,000 connections that hold 64 references each. The previous
    /// owner must be gone.
    ///
    /// If the previous owner died before it told a connection about a reference, that reference
    /// stays out until the connection closes.
    ///
    /// # Errors
    /// Fails with an [`ImageError`] when the words are no image, or contradict one another.
    pub fn recover(words: M, counts: C) -> Result<(Self, Vec<Connection>), ImageError> {
        let mut table = Self::over(Image::open(words)?, counts);
        let mut open = Vec::new();
        for index in 0..table.image.geometry.connections {
            let word = table.image.connection(index);
            let record = &mut table.records[index as usize];
            record.lap = word.lap();
            // The connection's place in the lap is unknown, so begin the next lap.
            record.next_lap();
            if word.open() {
                if word.quota() == 0 || word.quota() > table.image.geometry.quota {
                    return Err(table.image.damaged(Image::<M>::connection_at(index)));
                }
                record.quota = word.quota() as u16;
                open.push(Connection { index });
            }
        }
        for chunk in (0..table.image.geometry.chunks()).rev() {
            table.adopt(chunk)?;
        }
        // Closed connections are opened again in the reverse order of their closing. That order is
        // lost, so the lowest number is opened first.
        let closed = |index: &u32| table.records[*index as usize].quota == 0;
        table.closed.extend((0..table.image.geometry.connections).rev().filter(closed));
        for connection in &open {
            let record = &table.records[connection.index as usize];
            let word = ConnectionWord::new(true, u32::from(record.quota), record.lap);
            table.image.set_connection(connection.index, word);
        }
        Ok((table, open))
    }

    /// Gives one chunk to the connection that owns it. If no connection owns it, adds it to the
    /// free chunks. Counts the references in its slots.
    fn adopt(&mut self, chunk: u32) -> Result<(), ImageError> {
        let mut free = !0u64;
        for (bit, slot) in (0..CHUNK_SLOTS).zip(self.image.slots(chunk)) {
            let word = SlotWord::load(slot);
            if word.in_use() {
                free &= !(1 << bit);
                if !self.counts.take(word.place()) {
                    return Err(self.image.damaged(self.image.slot_at(chunk, bit)));
                }
            }
        }
        let Some((owner, position)) = self.image.chunk(chunk).owner() else {
            // Only an empty chunk may have no owner.
            return if free == !0 {
                self.free_chunks.push(chunk);
                Ok(())
            } else {
                Err(self.image.damaged(self.image.chunk_at(chunk)))
            };
        };
        if free == !0 {
            // The owner of the table died before the first use of the chunk, or before it detached
            // the chunk after the last return.
            self.image.set_chunk(chunk, ChunkWord::FREE);
            self.free_chunks.push(chunk);
            return Ok(());
        }
        self.masks[chunk as usize] = free;
        self.give_to(owner, position, chunk).ok_or_else(|| self.image.damaged(self.image.chunk_at(chunk)))
    }

    /// Gives `chunk` to connection `owner`, at `position`. `None` if that is impossible.
    fn give_to(&mut self, owner: u32, position: u32, chunk: u32) -> Option<()> {
        let positions = self.image.geometry.positions();
        let record = self.records.get_mut(owner as usize)?;
        if record.quota == 0 || position >= positions || record.has(position) {
            return None;
        }
        let entry = |directory: u32, position: u32| (directory * positions + position) as usize;
        match record.root() {
            _ if record.present == 0 => record.set_root(Root::Chunk(chunk)),
            Root::Chunk(only) => {
                let directory = self.free_directories.pop()?;
                let at = record.present.trailing_zeros();
                record.set_root(Root::Directory(directory));
                self.directories[entry(directory, at)] = only;
                self.directories[entry(directory, position)] = chunk;
            }
            Root::Directory(directory) => self.directories[entry(directory, position)] = chunk,
        }
        let free = self.masks[chunk as usize];
        record.present |= 1 << position;
        record.open |= u64::from(free != 0) << position;
        record.held += free.count_zeros() as u16;
        Some(())
    }
}
