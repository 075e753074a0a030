//! The image: the part of a table that must survive a crash. It is a slice of words, in the table's
//! own memory or in memory shared with the next owner.

use core::fmt;
use core::sync::atomic::{AtomicU64, Ordering};

use crate::token::QUOTA_MAX;
use crate::words::{ChunkWord, ConnectionWord};

/// The magic number: "weir" and "leas", little-endian. The version of the layout follows it.
const MAGIC: u64 = u64::from_le_bytes(*b"weirleas");
const VERSION: u64 = 1;
/// Number of words before the first connection's: magic, version, connections, chunks, quota;
/// rounded up to a cache line.
const HEADER_WORDS: usize = 8;
/// Slots in a chunk: as many as a mask has bits.
pub(crate) const CHUNK_SLOTS: u32 = 64;

/// The size of a table. All memory is taken when the table is made; nothing grows later.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Geometry {
    /// Largest number of connections that can be open at a time, up to 2^24.
    pub connections: u32,
    /// Largest number of references that all connections together can hold at a time. Connections
    /// get slots 64 at a time, so leave room for one partly used chunk of each connection. The
    /// number is rounded up to 64, and is at most 2^30.
    pub references: u32,
    /// The largest quota of a connection, at most [`QUOTA_MAX`].
    pub quota: u32,
}

/// The reason why a geometry or an image cannot be used.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum ImageError {
    /// A number of the geometry is zero or too large.
    Geometry(Geometry),
    /// The memory is shorter than [`Geometry::image_words`] says.
    TooShort {
        /// Number of words that the geometry needs.
        needed: usize,
        /// Number of words in the memory.
        found: usize,
    },
    /// The memory does not begin as an image of this version.
    NotAnImage {
        /// The memory's first word.
        magic: u64,
        /// The memory's second word.
        version: u64,
    },
    /// A word contradicts the rest: another program has written into the image.
    Damaged {
        /// The word's index in the image.
        word: usize,
        /// The word's value.
        value: u64,
    },
}

impl fmt::Display for ImageError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match *self {
            ImageError::Geometry(Geometry { connections, references, quota }) => write!(
                f,
                "a table of {connections} connections, {references} references and a quota of {quota} cannot be \
                 made: use 1 to 2^24, 1 to 2^30 and 1 to {QUOTA_MAX}"
            ),
            ImageError::TooShort { needed, found } => {
                write!(f, "the memory has {found} words, the table needs {needed}: map all of it")
            }
            ImageError::NotAnImage { magic, version } => write!(
                f,
                "no image of a lease table of version {VERSION} (begins {magic:#x}, {version}): make a new table"
            ),
            ImageError::Damaged { word, value } => write!(
                f,
                "word {word} of the lease table's image is {value:#x}, which it cannot be: close every connection \
                 and make a new table"
            ),
        }
    }
}

impl core::error::Error for ImageError {}

impl Geometry {
    /// Number of 64-bit words in the image of a table of this size. The geometry must be in range.
    pub const fn image_words(&self) -> usize {
        self.slots_at() + (self.chunks() * CHUNK_SLOTS) as usize
    }

    pub(crate) const fn chunks(&self) -> u32 {
        self.references.div_ceil(CHUNK_SLOTS)
    }

    /// Number of entries in a directory: the chunks that one connection can have.
    pub(crate) const fn positions(&self) -> u32 {
        self.quota.div_ceil(CHUNK_SLOTS)
    }

    const fn chunks_at(&self) -> usize {
        HEADER_WORDS + self.connections as usize
    }

    /// The index of the first slot, which begins a cache line.
    const fn slots_at(&self) -> usize {
        (self.chunks_at() + self.chunks() as usize).next_multiple_of(8)
    }

    pub(crate) fn checked(self) -> Result<Self, ImageError> {
        let fits = (1..=1 << 24).contains(&self.connections)
            && (1..=1 << 30).contains(&self.references)
            && (1..=QUOTA_MAX).contains(&self.quota);
        if fits { Ok(self) } else { Err(ImageError::Geometry(self)) }
    }
}

/// The words of an image, and the index where each kind of them begins. Each word is written with a
/// release store, so the compiler may not change the order of stores. If a word has its new value
/// after a crash, every earlier store has reached the memory too. On x86 a release store takes no
/// longer than a plain one.
#[derive(Debug)]
pub(crate) struct Image<M> {
    words: M,
    pub(crate) geometry: Geometry,
    chunks_at: usize,
    slots_at: usize,
}

impl<M: AsRef<[AtomicU64]>> Image<M> {
    /// Clears `words` and makes an image of them.
    pub(crate) fn create(words: M, geometry: Geometry) -> Result<Self, ImageError> {
        let image = Self::over(words, geometry)?;
        let words = image.words.as_ref();
        // Clear the magic number first, so that a half-made image is not taken for one.
        words[0].store(0, Ordering::Release);
        let header = [
            VERSION,
            u64::from(geometry.connections),
            u64::from(geometry.references),
            u64::from(geometry.quota),
            0,
            0,
            0,
        ];
        for (word, value) in words[1..].iter().zip(header) {
            word.store(value, Ordering::Release);
        }
        for word in &words[HEADER_WORDS..geometry.image_words()] {
            // Words that are zero already are not written. So their memory takes no RAM until the
            // table uses it.
            if word.load(Ordering::Relaxed) != 0 {
                word.store(0, Ordering::Release);
            }
        }
        words[0].store(MAGIC, Ordering::Release);
        Ok(image)
    }

    /// Opens the image that another table left in `words`.
    pub(crate) fn open(words: M) -> Result<Self, ImageError> {
        let header = words.as_ref();
        let word = |at: usize| header.get(at).map_or(0, |word| word.load(Ordering::Acquire));
        if (word(0), word(1)) != (MAGIC, VERSION) {
            return Err(ImageError::NotAnImage { magic: word(0), version: word(1) });
        }
        let figure = |at: usize| {
            u32::try_from(word(at)).map_err(|_| ImageError::Damaged { word: at, value: word(at) })
        };
        let geometry = Geometry { connections: figure(2)?, references: figure(3)?, quota: figure(4)? };
        Self::over(words, geometry)
    }

    fn over(words: M, geometry: Geometry) -> Result<Self, ImageError> {
        let geometry = geometry.checked()?;
        let (needed, found) = (geometry.image_words(), words.as_ref().len());
        if found < needed {
            return Err(ImageError::TooShort { needed, found });
        }
        Ok(Image { words, geometry, chunks_at: geometry.chunks_at(), slots_at: geometry.slots_at() })
    }

    /// The slots of a chunk.
    #[inline]
    pub(crate) fn slots(&self, chunk: u32) -> &[AtomicU64; CHUNK_SLOTS as usize] {
        let first = self.slot_at(chunk, 0);
        let words = &self.words.as_ref()[first..][..CHUNK_SLOTS as usize];
        words.try_into().expect("as many as asked for")
    }

    #[inline]
    pub(crate) fn slot_at(&self, chunk: u32, bit: u32) -> usize {
        self.slots_at + (chunk * CHUNK_SLOTS + bit) as usize
    }

    pub(crate) fn chunk(&self, chunk: u32) -> ChunkWord {
        ChunkWord(self.word(self.chunk_at(chunk)))
    }

    pub(crate) fn set_chunk(&self, chunk: u32, word: ChunkWord) {
        self.set_word(self.chunk_at(chunk), word.0);
    }

    pub(crate) fn chunk_at(&self, chunk: u32) -> usize {
        self.chunks_at + chunk as usize
    }

    pub(crate) fn connection(&self, connection: u32) -> ConnectionWord {
        ConnectionWord(self.word(Self::connection_at(connection)))
    }

    pub(crate) fn set_connection(&self, connection: u32, word: ConnectionWord) {
        self.set_word(Self::connection_at(connection), word.0);
    }

    pub(crate) fn connection_at(connection: u32) -> usize {
        HEADER_WORDS + connection as usize
    }

    /// The error that names the word at `at`.
    pub(crate) fn damaged(&self, at: usize) -> ImageError {
        ImageError::Damaged { word: at, value: self.word(at) }
    }

    #[inline]
    fn word(&self, at: usize) -> u64 {
        self.words.as_ref()[at].load(Ordering::Acquire)
    }

    #[inline]
    fn set_word(&self, at: usize, value: u64) {
        self.words.as_ref()[at].store(value, Ordering::Release);
    }
}
