//! The table itself: taking, returning, closing.

use alloc::boxed::Box;
use alloc::vec;
use alloc::vec::Vec;
use core::sync::atomic::AtomicU64;

use crate::connection::{Connection, Record, Root};
use crate::counts::PageCounts;
use crate::error::{BatchError, OpenError, Refusal, Refusals, TakeError};
use crate::image::{CHUNK_SLOTS, Geometry, Image, ImageError};
use crate::token::{Place, Token, TokenRange};
use crate::words::{ChunkWord, ConnectionWord, SlotWord};
use crate::{BATCH_REFERENCES_MAX, BATCH_TOKENS_MAX};

/// A table of references to pages, by connection. The [crate's page](crate) explains it.
///
/// `C` counts the references of each page; `M` is the memory of the image.
#[derive(Debug)]
pub struct Table<C, M = Vec<AtomicU64>> {
    pub(crate) image: Image<M>,
    pub(crate) counts: C,
    pub(crate) records: Box<[Record]>,
    /// For each chunk a mask of its free slots.
    pub(crate) masks: Box<[u64]>,
    /// For each connection with several chunks, a row of [`Geometry::positions`] entries: the chunk
    /// at each position.
    pub(crate) directories: Box<[u32]>,
    /// Numbers of the chunks, directories and connections that are not in use. The lists have room
    /// for all of them from the start.
    pub(crate) free_chunks: Vec<u32>,
    pub(crate) free_directories: Vec<u32>,
    pub(crate) closed: Vec<u32>,
    pub(crate) refusals: Refusals,
    /// References that the present run of returns has given back. A separate loop counts them
    /// later, so that its cache misses overlap.
    back: [SlotWord; RUN],
}

/// A reference that was returned.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Given {
    /// The place that the returned reference named.
    pub place: Place,
    /// Whether the page has no reference any more.
    pub last: bool,
}

/// Largest number of references that are taken back in one go: those of a chunk.
const RUN: usize = CHUNK_SLOTS as usize;

/// References of one chunk that were returned and are not recorded yet.
struct Run {
    position: u32,
    chunk: u32,
    freed: u64,
    len: usize,
}

impl Default for Run {
    /// An empty run, for no chunk: no chunk has the position `u32::MAX`.
    fn default() -> Self {
        Run { position: u32::MAX, chunk: 0, freed: 0, len: 0 }
    }
}

/// The result of returning a batch of tokens.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub struct Returned {
    /// Number of references that came back in the batch.
    pub references: u32,
    /// Number of tokens that were refused. [`Table::refusals`] counts them by reason.
    pub refused: u32,
}

impl<C: PageCounts> Table<C> {
    /// Makes an empty table in memory of its own.
    ///
    /// # Errors
    /// Fails with [`ImageError::Geometry`] when a number of the geometry is out of range.
    pub fn new(geometry: Geometry, counts: C) -> Result<Self, ImageError> {
        let words = (0..geometry.checked()?.image_words()).map(|_| AtomicU64::new(0)).collect();
        Self::create(words, geometry, counts)
    }
}

impl<C: PageCounts, M: AsRef<[AtomicU64]>> Table<C, M> {
    /// Makes an empty table whose image lies in `words`; their old content is overwritten.
    ///
    /// If another process also maps `words`, [`Table::recover`] finds the table there again after
    /// this process's death. `words` must refer to the same memory at each call.
    ///
    /// # Errors
    /// Fails with [`ImageError::Geometry`] or [`ImageError::TooShort`].
    pub fn create(words: M, geometry: Geometry, counts: C) -> Result<Self, ImageError> {
        let mut table = Self::over(Image::create(words, geometry)?, counts);
        // The lowest chunk is used first.
        table.free_chunks.extend((0..geometry.chunks()).rev());
        table.closed.extend((0..geometry.connections).rev());
        Ok(table)
    }

    /// Makes a table over an image. Its chunks and connections are not yet filled in.
    pub(crate) fn over(image: Image<M>, counts: C) -> Self {
        let geometry = image.geometry;
        let (connections, chunks) = (geometry.connections as usize, geometry.chunks() as usize);
        // Only a connection with two chunks or more has a directory.
        let directories = if geometry.positions() > 1 { (chunks / 2).min(connections) } else { 0 };
        Table {
            image,
            counts,
            records: vec![Record::default(); connections].into_boxed_slice(),
            masks: vec![!0; chunks].into_boxed_slice(),
            directories: vec![0; directories * geometry.positions() as usize].into_boxed_slice(),
            free_chunks: Vec::with_capacity(chunks),
            free_directories: (0..directories as u32).rev().collect(),
            closed: Vec::with_capacity(connections),
            refusals: Refusals::default(),
            back: [SlotWord(0); RUN],
        }
    }

    /// Opens a connection that may hold `quota` references at a time.
    ///
    /// # Errors
    /// Fails with [`OpenError::Full`] when every connection is open, and with [`OpenError::Quota`]
    /// when the quota is out of range.
    pub fn open(&mut self, quota: u32) -> Result<Connection, OpenError> {
        let Geometry { connections, quota: limit, .. } = self.image.geometry;
        if quota == 0 || quota > limit {
            return Err(OpenError::Quota { asked: quota, limit });
        }
        let index = self.closed.pop().ok_or(OpenError::Full { connections })?;
        let record = &mut self.records[index as usize];
        // An earlier connection may have had this number. The laps go on from its last one, so that
        // its tokens do not become valid again.
        record.next_lap();
        record.quota = quota as u16;
        self.image.set_connection(index, ConnectionWord::new(true, quota, record.lap));
        Ok(Connection { index })
    }

    /// Takes a reference to a page for a connection.
    ///
    /// # Errors
    /// Fails with a [`TakeError`], which says which limit is reached; nothing has changed then.
    #[inline]
    pub fn take(&mut self, connection: &Connection, place: Place) -> Result<Token, TakeError> {
        let mut token = [Token(0)];
        self.take_batch(connection, &[place], &mut token)?;
        Ok(token[0])
    }

    /// Takes a reference for each of `places`, until one is refused or a limit is reached, and
    /// writes the tokens. Returns the number of references taken. If there are fewer than were
    /// asked for, a further call fails with the reason.
    ///
    /// # Errors
    /// Fails with a [`TakeError`] when not even the first could be taken; nothing has changed then.
    #[inline]
    pub fn take_batch(
        &mut self,
        connection: &Connection,
        places: &[Place],
        tokens: &mut [Token],
    ) -> Result<usize, TakeError> {
        let index = connection.index;
        let Some(record) = self.records.get(index as usize) else { return Err(TakeError::NotOpen) };
        let room = usize::from(record.quota - record.held.min(record.quota));
        let wanted = places.len().min(tokens.len());
        let limit = wanted.min(room);
        if limit == 0 && wanted > 0 {
            return Err(self.refuse_take(connection));
        }
        let mut taken = 0;
        while taken < limit {
            let (chunk, position, free) = match self.find(index) {
                Ok(found) => found,
                Err(error) => return if taken == 0 { Err(error) } else { Ok(taken) },
            };
            let run = (limit - taken).min(free.count_ones() as usize);
            // Pages are counted in a loop of their own, where their cache misses overlap.
            let places = &places[taken..taken + run];
            let known = places.iter().take_while(|&&place| place.fits() && self.counts.take(place)).count();
            self.fill(index, (chunk, position, free), &places[..known], &mut tokens[taken..taken + known]);
            taken += known;
            if known < run {
                let error = self.refuse_place(index, position, chunk, places[known]);
                return if taken == 0 { Err(error) } else { Ok(taken) };
            }
        }
        Ok(taken)
    }

    /// Takes the first of a chunk's `free` slots for `places`. There are at least as many slots as
    /// places.
    #[inline]
    fn fill(
        &mut self,
        connection: u32,
        (chunk, position, mut free): (u32, u32, u64),
        places: &[Place],
        tokens: &mut [Token],
    ) {
        let record = &mut self.records[connection as usize];
        let slots = self.image.slots(chunk);
        let before = free;
        let mut bit = 0;
        for (token, &place) in tokens.iter_mut().zip(places) {
            bit = free.trailing_zeros();
            free &= free.wrapping_sub(1);
            SlotWord::taken(record.lap, place).store(&slots[bit as usize % slots.len()]);
            *token = Token::new(record.lap, position * CHUNK_SLOTS + bit);
        }
        record.held += places.len() as u16;
        let mask = &mut self.masks[chunk as usize];
        *mask &= !(before ^ free);
        if *mask == 0 {
            record.open &= !(1 << position);
        }
        if !places.is_empty() && record.pass(position * CHUNK_SLOTS + bit) {
            self.next_lap(connection);
        }
    }

    /// Takes one reference back from a connection.
    ///
    /// # Errors
    /// Fails with the reason why this connection does not hold the token; [`Table::refusals`]
    /// counts it.
    #[inline]
    pub fn give(&mut self, connection: &Connection, token: Token) -> Result<Given, Refusal> {
        let (index, bit) = (token.index(), token.index() % CHUNK_SLOTS);
        let position = index / CHUNK_SLOTS;
        let record = match self.records.get(connection.index as usize) {
            Some(record) if record.has(position) => record,
            _ => return Err(self.refusals.count(Refusal::Unknown)),
        };
        let chunk = self.chunk(record, position);
        let slot = &self.image.slots(chunk)[bit as usize];
        let word = SlotWord::load(slot);
        if !word.holds(token) {
            return Err(self.refuse(word, token));
        }
        word.returned().store(slot);
        self.free(connection.index, position, chunk, 1 << bit);
        let place = word.place();
        Ok(Given { place, last: self.counts.give(place) })
    }

    /// Takes a batch of ranges of tokens back, as `SO_DEVMEM_DONTNEED` does. Refused tokens are
    /// counted, and the others are taken back all the same. `on_return` is called for every
    /// reference, and told whether it was its page's last.
    ///
    /// # Errors
    /// Fails with a [`BatchError`] when the batch exceeds [`BATCH_TOKENS_MAX`] or
    /// [`BATCH_REFERENCES_MAX`]; then none of it was looked at.
    pub fn give_batch(
        &mut self,
        connection: &Connection,
        ranges: &[TokenRange],
        on_return: impl FnMut(Place, bool),
    ) -> Result<Returned, BatchError> {
        if ranges.len() > BATCH_TOKENS_MAX {
            return Err(BatchError::Tokens(ranges.len()));
        }
        let references = ranges.iter().map(|range| u64::from(range.count)).sum();
        if references > BATCH_REFERENCES_MAX {
            return Err(BatchError::References(references));
        }
        let tokens = ranges
            .iter()
            .flat_map(|range| (0..range.count).map(|offset| Token(range.start.0.wrapping_add(offset))));
        Ok(self.give_all(connection, tokens, on_return))
    }

    /// Takes single tokens back in one go, as [`Table::give_batch`] does with ranges.
    ///
    /// # Errors
    /// Fails with [`BatchError::Tokens`] when there are more than [`BATCH_TOKENS_MAX`].
    #[inline]
    pub fn give_tokens(
        &mut self,
        connection: &Connection,
        tokens: &[Token],
        on_return: impl FnMut(Place, bool),
    ) -> Result<Returned, BatchError> {
        if tokens.len() > BATCH_TOKENS_MAX {
            return Err(BatchError::Tokens(tokens.len()));
        }
        Ok(self.give_all(connection, tokens.iter().copied(), on_return))
    }

    #[inline]
    fn give_all(
        &mut self,
        connection: &Connection,
        tokens: impl Iterator<Item = Token>,
        mut on_return: impl FnMut(Place, bool),
    ) -> Returned {
        let mut returned = Returned::default();
        let mut run = Run::default();
        tokens.for_each(|token| {
            let position = token.index() / CHUNK_SLOTS;
            if position != run.position || run.len == RUN {
                returned.references += self.settle(connection.index, &run, &mut on_return);
                run = self.begin(connection, position);
            }
            let bit = token.index() % CHUNK_SLOTS;
            if run.position == position
                && let slot = &self.image.slots(run.chunk)[bit as usize]
                && let word = SlotWord::load(slot)
                && word.holds(token)
            {
                word.returned().store(slot);
                run.freed |= 1 << bit;
                self.back[run.len] = word;
                run.len += 1;
            } else {
                returned.refused += 1;
                self.refuse_give(&run, token);
            }
        });
        returned.references += self.settle(connection.index, &run, &mut on_return);
        returned
    }

    /// Begins a run of tokens that come back for the chunk at `position`, or for none if there is
    /// no such chunk.
    #[inline]
    fn begin(&self, connection: &Connection, position: u32) -> Run {
        match self.records.get(connection.index as usize) {
            Some(record) if record.has(position) => {
                Run { position, chunk: self.chunk(record, position), ..Run::default() }
            }
            _ => Run::default(),
        }
    }

    /// Records that the references of a run have come back. Returns their number.
    #[inline]
    fn settle(&mut self, connection: u32, run: &Run, on_return: &mut impl FnMut(Place, bool)) -> u32 {
        if run.len == 0 {
            return 0;
        }
        self.free(connection, run.position, run.chunk, run.freed);
        for word in &self.back[..run.len] {
            let place = word.place();
            on_return(place, self.counts.give(place));
        }
        run.len as u32
    }

    /// Notes that the slots `freed` of a chunk are free.
    #[inline]
    fn free(&mut self, connection: u32, position: u32, chunk: u32, freed: u64) {
        let record = &mut self.records[connection as usize];
        record.held -= freed.count_ones() as u16;
        record.open |= 1 << position;
        let mask = &mut self.masks[chunk as usize];
        *mask |= freed;
        if *mask == !0 {
            self.detach(connection, position, chunk);
        }
    }

    /// Closes a connection and takes back all references that it holds, in time proportional to
    /// their number. `on_return` is called for every reference. Returns how many there were.
    #[expect(clippy::needless_pass_by_value, reason = "what is closed must not be used again")]
    pub fn close(&mut self, connection: Connection, mut on_return: impl FnMut(Place, bool)) -> u32 {
        let index = connection.index;
        let Some(record) = self.records.get(index as usize).filter(|record| record.quota > 0) else {
            return 0;
        };
        let held = u32::from(record.held);
        let mut present = record.present;
        while present != 0 {
            let position = present.trailing_zeros();
            present &= present - 1;
            let chunk = self.chunk(&self.records[index as usize], position);
            let mut taken = !self.masks[chunk as usize];
            while taken != 0 {
                let bit = taken.trailing_zeros();
                taken &= taken - 1;
                let slot = &self.image.slots(chunk)[bit as usize];
                let word = SlotWord::load(slot);
                word.returned().store(slot);
                let place = word.place();
                on_return(place, self.counts.give(place));
            }
            self.masks[chunk as usize] = !0;
            self.detach(index, position, chunk);
        }
        let record = &mut self.records[index as usize];
        record.held = 0;
        record.quota = 0;
        self.image.set_connection(index, ConnectionWord::new(false, 0, record.lap));
        self.closed.push(index);
        held
    }

    /// The place behind a token, if the connection holds it.
    pub fn place(&self, connection: &Connection, token: Token) -> Option<Place> {
        let position = token.index() / CHUNK_SLOTS;
        let record = self.records.get(connection.index as usize).filter(|record| record.has(position))?;
        let word = SlotWord::load(
            &self.image.slots(self.chunk(record, position))[(token.index() % CHUNK_SLOTS) as usize],
        );
        word.holds(token).then(|| word.place())
    }

    /// Every reference that a connection holds.
    pub fn held(&self, connection: &Connection) -> impl Iterator<Item = (Token, Place)> {
        let record = self.records.get(connection.index as usize);
        record.into_iter().flat_map(move |record| {
            let slots = (0..u64::BITS).filter(|&position| record.has(position)).flat_map(move |position| {
                let chunk = self.chunk(record, position);
                let words = self.image.slots(chunk).iter().map(SlotWord::load);
                (position * CHUNK_SLOTS..).zip(words)
            });
            slots
                .filter(|(_, word)| word.in_use())
                .map(|(index, word)| (Token::new(word.lap(), index), word.place()))
        })
    }

    /// Number of references that a connection holds.
    pub fn outstanding(&self, connection: &Connection) -> u32 {
        self.records.get(connection.index as usize).map_or(0, |record| u32::from(record.held))
    }

    /// Number of open connections.
    pub fn connections(&self) -> u32 {
        self.image.geometry.connections - self.closed.len() as u32
    }

    /// Number of tokens refused so far, by reason.
    pub fn refusals(&self) -> Refusals {
        self.refusals
    }

    /// The reference counts of the pages.
    pub fn counts(&self) -> &C {
        &self.counts
    }

    /// The reference counts of the pages, to be changed by the caller. References that the table
    /// took or returned are counted already.
    pub fn counts_mut(&mut self) -> &mut C {
        &mut self.counts
    }

    /// Bytes of the table when all of it is in use: image, records, masks, directories and free
    /// lists, without the counts.
    pub fn bytes(&self) -> usize {
        let ids = self.free_chunks.capacity() + self.free_directories.capacity() + self.closed.capacity();
        self.image.geometry.image_words() * size_of::<u64>()
            + size_of_val(&self.records[..])
            + size_of_val(&self.masks[..])
            + size_of_val(&self.directories[..])
            + ids * size_of::<u32>()
            + size_of::<Self>()
    }

    /// Bytes of memory that a connection takes while it holds no reference.
    pub const fn bytes_per_idle_connection() -> usize {
        size_of::<Record>() + size_of::<ConnectionWord>() + size_of::<u32>()
    }

    #[inline]
    fn chunk(&self, record: &Record, position: u32) -> u32 {
        match record.root() {
            Root::Chunk(chunk) => chunk,
            Root::Directory(directory) => self.directories[self.entry(directory, position)],
        }
    }

    fn entry(&self, directory: u32, position: u32) -> usize {
        (directory * self.image.geometry.positions() + position) as usize
    }

    /// Finds a chunk for the connection's next slots. Returns the chunk, its position, and a mask
    /// of its free slots that the lap has not passed.
    #[inline]
    fn find(&mut self, connection: u32) -> Result<(u32, u32, u64), TakeError> {
        let record = &self.records[connection as usize];
        let (position, ahead) = record.ahead();
        if record.open >> position & 1 != 0 {
            let chunk = self.chunk(record, position);
            let free = self.masks[chunk as usize] & ahead;
            if free != 0 {
                return Ok((chunk, position, free));
            }
        }
        self.find_elsewhere(connection)
    }

    /// Finds free slots outside of the cursor's chunk: later in this lap, in the next lap, or in a
    /// new chunk.
    #[cold]
    fn find_elsewhere(&mut self, connection: u32) -> Result<(u32, u32, u64), TakeError> {
        let record = &self.records[connection as usize];
        let position = match record.later() {
            Some(position) => position,
            None if record.open != 0 => {
                self.next_lap(connection);
                self.records[connection as usize].open.trailing_zeros()
            }
            None => self.attach(connection)?,
        };
        let record = &self.records[connection as usize];
        let chunk = self.chunk(record, position);
        let (at, ahead) = record.ahead();
        let ahead = if at == position { ahead } else { !0 };
        Ok((chunk, position, self.masks[chunk as usize] & ahead))
    }

    fn next_lap(&mut self, connection: u32) {
        let record = &mut self.records[connection as usize];
        record.next_lap();
        let word = ConnectionWord::new(true, u32::from(record.quota), record.lap);
        self.image.set_connection(connection, word);
    }

    /// Gives a connection without a free slot one more chunk, at the first position that has none.
    fn attach(&mut self, connection: u32) -> Result<u32, TakeError> {
        let chunk = self.free_chunks.pop().ok_or(TakeError::Exhausted)?;
        let record = &mut self.records[connection as usize];
        let position = (!record.present).trailing_zeros();
        match record.root() {
            _ if record.present == 0 => record.set_root(Root::Chunk(chunk)),
            Root::Chunk(only) => {
                let Some(directory) = self.free_directories.pop() else {
                    self.free_chunks.push(chunk);
                    return Err(TakeError::Exhausted);
                };
                let at = record.present.trailing_zeros();
                record.set_root(Root::Directory(directory));
                let (old, new) = (self.entry(directory, at), self.entry(directory, position));
                self.directories[old] = only;
                self.directories[new] = chunk;
            }
            Root::Directory(directory) => {
                let new = self.entry(directory, position);
                self.directories[new] = chunk;
            }
        }
        self.image.set_chunk(chunk, ChunkWord::attached(connection, position));
        let record = &mut self.records[connection as usize];
        record.present |= 1 << position;
        record.open |= 1 << position;
        // The connection may have had another chunk at this position before, and the present lap
        // may have passed that chunk. Then the new slots belong to the next lap.
        if position < record.ahead().0 {
            self.next_lap(connection);
        }
        Ok(position)
    }

    /// Takes an empty chunk from a connection.
    fn detach(&mut self, connection: u32, position: u32, chunk: u32) {
        self.image.set_chunk(chunk, ChunkWord::FREE);
        self.free_chunks.push(chunk);
        let record = &mut self.records[connection as usize];
        record.present &= !(1 << position);
        record.open &= !(1 << position);
        if let Root::Directory(directory) = record.root()
            && record.present.count_ones() == 1
        {
            let left = record.present.trailing_zeros();
            let only = self.directories[self.entry(directory, left)];
            self.records[connection as usize].set_root(Root::Chunk(only));
            self.free_directories.push(directory);
        }
    }

    #[cold]
    fn refuse_give(&mut self, run: &Run, token: Token) -> Refusal {
        if run.position == u32::MAX {
            return self.refusals.count(Refusal::Unknown);
        }
        let slot = &self.image.slots(run.chunk)[(token.index() % CHUNK_SLOTS) as usize];
        self.refuse(SlotWord::load(slot), token)
    }

    #[cold]
    fn refuse(&mut self, word: SlotWord, token: Token) -> Refusal {
        let repeated = !word.in_use() && word.lap() == token.lap();
        self.refusals.count(if repeated { Refusal::Repeated } else { Refusal::Stale })
    }

    /// Refuses to take a reference to `place`. If the chunk is empty, it was attached only for this
    /// take. Then it is detached again.
    #[cold]
    fn refuse_place(&mut self, connection: u32, position: u32, chunk: u32, place: Place) -> TakeError {
        if self.masks[chunk as usize] == !0 {
            self.detach(connection, position, chunk);
        }
        TakeError::Place(place)
    }

    #[cold]
    fn refuse_take(&self, connection: &Connection) -> TakeError {
        match self.records[connection.index as usize].quota {
            0 => TakeError::NotOpen,
            quota => TakeError::Quota { quota: u32::from(quota) },
        }
    }
}
