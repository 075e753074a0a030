//! The wire format, version 2. Everything is little-endian; docs/share.md describes the same in
//! prose.

/// "weirshar": the first word of every greeting.
pub const MAGIC: u64 = u64::from_le_bytes(*b"weirshar");
/// The version of the format in this module.
pub const VERSION: u32 = 2;
/// Bytes of a [`Hello`] before the volume's name.
pub const HELLO_BYTES: usize = 32;
/// Largest number of bytes of the volume's name in a [`Hello`].
pub const NAME_BYTES_MAX: usize = 255;
/// Bytes of a [`Welcome`].
pub const WELCOME_BYTES: usize = 64;
/// Number of words in an entry of either ring.
pub const ENTRY_WORDS: usize = 4;
/// The frame number in a completion that has no frame.
pub const NO_FRAME: u32 = u32::MAX;
/// Largest number of pages that one [`Op::Discard`] may name.
pub const DISCARD_MAX: u32 = 1 << 16;
/// Largest number of frames of an area: as many as a connection's tokens can name.
pub const FRAMES_MAX: u32 = weir_lease::QUOTA_MAX;
/// Largest number of entries of a ring.
pub const ENTRIES_MAX: u32 = 4096;
/// Largest number of windows of a client; each has a descriptor.
pub const WINDOWS_MAX: u32 = 4;

/// Largest number of pages of one [`Op::ReadRun`] or [`Op::WriteRun`].
pub const RUN_MAX: u32 = 64;

/// The flag in a [`Hello`] of a client that wants pages in the stores' memory.
const IN_PLACE: u32 = 1;

/// The client's first and only message on the socket. The server reads nothing after it.
///
/// Servers of earlier versions of Weir know no name. They refuse a message that has one, since it
/// is too long for them. Without a name the message is what earlier clients sent.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Hello<'a> {
    /// The client's version of the format.
    pub version: u32,
    /// Number of frames that the client wants; the server may give fewer.
    pub frames: u32,
    /// Number of entries of each ring that the client wants, a power of two; the server may give
    /// fewer.
    pub entries: u32,
    /// Whether the client wants to read pages in the stores' memory, if the server allows it.
    pub in_place: bool,
    /// The name of the volume that the client wants, at most [`NAME_BYTES_MAX`] bytes; empty: the
    /// daemon's own volume.
    pub volume: &'a [u8],
}

impl<'a> Hello<'a> {
    /// Encodes the message.
    pub fn encode(&self) -> Vec<u8> {
        let mut bytes = vec![0; HELLO_BYTES];
        bytes[0..8].copy_from_slice(&MAGIC.to_le_bytes());
        bytes[8..12].copy_from_slice(&self.version.to_le_bytes());
        bytes[12..16].copy_from_slice(&self.frames.to_le_bytes());
        bytes[16..20].copy_from_slice(&self.entries.to_le_bytes());
        bytes[20..24].copy_from_slice(&(u32::from(self.in_place) * IN_PLACE).to_le_bytes());
        bytes[24..28].copy_from_slice(&(self.volume.len() as u32).to_le_bytes());
        bytes.extend_from_slice(self.volume);
        bytes
    }

    /// Decodes the message. `None` if a length or the magic number is wrong, or a reserved byte is
    /// not zero.
    pub fn decode(bytes: &'a [u8]) -> Option<Self> {
        let (bytes, volume) = bytes.split_at_checked(HELLO_BYTES)?;
        let flags = half(bytes, 20);
        let known = flags & !IN_PLACE == 0 && half(bytes, 28) == 0;
        let known = known && half(bytes, 24) as usize == volume.len() && volume.len() <= NAME_BYTES_MAX;
        (word(bytes, 0) == MAGIC && known).then(|| Hello {
            version: half(bytes, 8),
            frames: half(bytes, 12),
            entries: half(bytes, 16),
            in_place: flags & IN_PLACE != 0,
            volume,
        })
    }
}

/// The server's answer. With status 0 it carries descriptors: the area's memfd, the eventfd that
/// wakes the server, and one for each window. Each later message on the socket is one byte that
/// wakes the client.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Welcome {
    /// The server's version of the format.
    pub version: u32,
    /// 0, or a negative errno: -EPROTO for an invalid greeting, -EPROTONOSUPPORT for another
    /// version, -ENOENT without a volume of this name, -EUSERS when every connection is taken,
    /// -ENOMEM without memory.
    pub status: i32,
    /// Number of frames in the area, which is the client's quota.
    pub frames: u32,
    /// Number of entries in each ring, a power of two.
    pub entries: u32,
    /// Number of pages of the volume.
    pub pages: u64,
    /// Number of windows: memory of stores, read-only, in which pages are lent in place. At most
    /// [`WINDOWS_MAX`].
    pub windows: u32,
    /// Largest number of pages of one [`Op::ReadRun`] or [`Op::WriteRun`]. It is 0 if the server is
    /// of an earlier version of Weir, which has neither.
    pub run_most: u32,
}

impl Welcome {
    /// Encodes the message.
    pub fn encode(&self) -> [u8; WELCOME_BYTES] {
        let mut bytes = [0; WELCOME_BYTES];
        bytes[0..8].copy_from_slice(&MAGIC.to_le_bytes());
        bytes[8..12].copy_from_slice(&self.version.to_le_bytes());
        bytes[12..16].copy_from_slice(&self.status.to_le_bytes());
        bytes[16..20].copy_from_slice(&self.frames.to_le_bytes());
        bytes[20..24].copy_from_slice(&self.entries.to_le_bytes());
        bytes[24..32].copy_from_slice(&self.pages.to_le_bytes());
        bytes[32..36].copy_from_slice(&self.windows.to_le_bytes());
        bytes[36..40].copy_from_slice(&self.run_most.to_le_bytes());
        bytes
    }

    /// Decodes the message. `None` if its length or magic number is wrong.
    pub fn decode(bytes: &[u8]) -> Option<Self> {
        let bytes: &[u8; WELCOME_BYTES] = bytes.try_into().ok()?;
        (word(bytes, 0) == MAGIC).then(|| Welcome {
            version: half(bytes, 8),
            status: half(bytes, 12) as i32,
            frames: half(bytes, 16),
            entries: half(bytes, 20),
            pages: word(bytes, 24),
            windows: half(bytes, 32),
            run_most: half(bytes, 36),
        })
    }
}

fn half(bytes: &[u8], at: usize) -> u32 {
    u32::from_le_bytes(bytes[at..at + 4].try_into().expect("4 bytes"))
}

fn word(bytes: &[u8], at: usize) -> u64 {
    u64::from_le_bytes(bytes[at..at + 8].try_into().expect("8 bytes"))
}

/// The operations that a client asks for.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
#[repr(u8)]
pub enum Op {
    /// Asks for a page, in a frame of the server's choice or in a window: completes with a token.
    Read = 1,
    /// Writes the content of the frame that `token` names to the page. The client still holds the
    /// frame, and must not change it until the completion.
    Write = 2,
    /// Asks for an empty frame, to fill it and then write it to a page: completes with a token.
    Reserve = 3,
    /// Returns `count` tokens from `token` on, at most
    /// [`BATCH_REFERENCES_MAX`](weir_lease::BATCH_REFERENCES_MAX). It has no completion, whatever
    /// the result.
    Give = 4,
    /// Discards `count` pages from `page` on, at most [`DISCARD_MAX`]: they read as zeros.
    Discard = 5,
    /// Reads `count` pages from `page` on into frames that the client holds. The frames are those
    /// of `count` tokens from `token` on, and lie one after another in the area. At most
    /// [`RUN_MAX`] pages.
    ReadRun = 6,
    /// Writes the content of frames to `count` pages from `page` on. `token` and `count` name the
    /// frames as for [`ReadRun`](Op::ReadRun). The client still holds the frames, and must not
    /// change them until the completion.
    WriteRun = 7,
}

/// One entry of the submission ring.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Submission {
    /// The operation.
    pub op: Op,
    /// A number that the client chooses, and that comes back with the completion.
    pub tag: u32,
    /// The page's number in the volume.
    pub page: u64,
    /// The token, if the operation has one.
    pub token: u32,
    /// The number of tokens to return, or of pages to discard, read or write.
    pub count: u32,
}

impl Submission {
    /// Whether this submission reads or writes a run of pages.
    #[inline]
    pub fn is_run(&self) -> bool {
        matches!(self.op, Op::ReadRun | Op::WriteRun)
    }

    /// Encodes the entry.
    #[inline]
    pub fn encode(&self) -> [u64; ENTRY_WORDS] {
        let first = u64::from(self.tag) << 32 | self.op as u64;
        [first, self.page, u64::from(self.count) << 32 | u64::from(self.token), 0]
    }

    /// Decodes the entry. `None` if its operation is unknown, or a reserved byte is not zero.
    #[inline]
    pub fn decode([first, page, tokens, reserved]: [u64; ENTRY_WORDS]) -> Option<Self> {
        let op = match first as u32 {
            1 => Op::Read,
            2 => Op::Write,
            3 => Op::Reserve,
            4 => Op::Give,
            5 => Op::Discard,
            6 => Op::ReadRun,
            7 => Op::WriteRun,
            _ => return None,
        };
        let (tag, token, count) = ((first >> 32) as u32, tokens as u32, (tokens >> 32) as u32);
        (reserved == 0).then_some(Submission { op, tag, page, token, count })
    }
}

/// One entry of the completion ring.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Completed {
    /// The tag of the submission.
    pub tag: u32,
    /// 0, or a negative errno. -EIO: the page cannot be read. -ENOBUFS: the client holds every
    /// frame. -EINVAL: there is no such page, or a run is too long. -EBADF: the client does not
    /// hold a token, or a token stands for a page of a window, or the frames of a run do not lie
    /// one after another. -EROFS: only reading is allowed.
    pub status: i32,
    /// The token of the page or frame that the completion hands out, if any.
    pub token: u32,
    /// The place of the token's page or frame.
    pub spot: Spot,
}

/// The place of a lent page.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Spot {
    /// The completion hands out no page or frame.
    Nowhere,
    /// The page is in this frame of the area, which the client may write.
    Frame(u32),
    /// The page is in a store's memory, `slot` pages from its beginning; the client may only read
    /// it.
    Window {
        /// The number of the window, in the order of the welcome's descriptors.
        window: u32,
        /// The slot in the window, counted in pages from the window's beginning.
        slot: u32,
    },
}

impl Spot {
    /// The two fields of a ring entry that name this place. The first has the frame's number. The
    /// second has the numbers of the window and of the slot together.
    fn words(self) -> (u32, u64) {
        match self {
            Spot::Nowhere => (NO_FRAME, 0),
            Spot::Frame(frame) => (frame, 0),
            Spot::Window { window, slot } => (NO_FRAME, u64::from(slot) << 32 | (u64::from(window) + 1)),
        }
    }

    fn from_words(frame: u32, place: u64) -> Self {
        match (frame, (place as u32).checked_sub(1)) {
            (NO_FRAME, None) => Spot::Nowhere,
            (NO_FRAME, Some(window)) => Spot::Window { window, slot: (place >> 32) as u32 },
            _ => Spot::Frame(frame),
        }
    }
}

impl Completed {
    /// Encodes the entry.
    #[inline]
    pub fn encode(&self) -> [u64; ENTRY_WORDS] {
        let first = u64::from(self.status as u32) << 32 | u64::from(self.tag);
        let (frame, place) = self.spot.words();
        [first, u64::from(frame) << 32 | u64::from(self.token), place, 0]
    }

    /// Decodes the entry.
    #[inline]
    pub fn decode([first, second, place, _]: [u64; ENTRY_WORDS]) -> Self {
        Completed {
            tag: first as u32,
            status: (first >> 32) as i32,
            token: second as u32,
            spot: Spot::from_words((second >> 32) as u32, place),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    proptest! {
        #[test]
        fn what_is_encoded_is_decoded(
            a: u32, b: u32, c in 0..NO_FRAME, d: u64, status: i32, in_place: bool, op in 1u8..=7,
            name in proptest::collection::vec(any::<u8>(), 0..=NAME_BYTES_MAX + 1),
        ) {
            let hello = Hello { version: a, frames: b, entries: c, in_place, volume: &name };
            let known = (name.len() <= NAME_BYTES_MAX).then_some(hello);
            let bytes = hello.encode();
            prop_assert_eq!(Hello::decode(&bytes), known);
            let welcome = Welcome { version: a, status, frames: b, entries: c, pages: d, windows: a, run_most: b };
            prop_assert_eq!(Welcome::decode(&welcome.encode()), Some(welcome));
            let ops = [
                Op::Read, Op::Write, Op::Reserve, Op::Give, Op::Discard, Op::ReadRun, Op::WriteRun,
            ];
            let op = ops[usize::from(op) - 1];
            let submission = Submission { op, tag: a, page: d, token: b, count: c };
            prop_assert_eq!(Submission::decode(submission.encode()), Some(submission));
            for spot in [Spot::Nowhere, Spot::Frame(c), Spot::Window { window: c, slot: a }] {
                let completed = Completed { tag: a, status, token: b, spot };
                prop_assert_eq!(Completed::decode(completed.encode()), completed);
            }
        }

        #[test]
        fn a_greeting_with_a_changed_reserved_byte_is_none(at in 20usize..32, value in 2u8..) {
            let mut bytes = hello(b"a").encode();
            bytes[at] = value;
            prop_assert_eq!(Hello::decode(&bytes), None);
        }
    }

    fn hello(volume: &[u8]) -> Hello<'_> {
        Hello { version: 2, frames: 0x0203_0405, entries: 64, in_place: true, volume }
    }

    #[test]
    fn greetings_lie_where_the_document_says_and_one_without_a_name_is_as_it_always_was() {
        let old = b"weirshar\x02\0\0\0\x05\x04\x03\x02\x40\0\0\0\x01\0\0\0\0\0\0\0\0\0\0\0";
        assert_eq!((hello(b"").encode().as_slice(), Hello::decode(old)), (&old[..], Some(hello(b""))));
        let named = hello(b"a.b").encode();
        assert_eq!((&named[..24], &named[24..]), (&old[..24], &b"\x03\0\0\0\0\0\0\0a.b"[..]));
        // The name is as long as the message says, and no shorter or longer.
        for length in (0..named.len()).filter(|length| *length != 0) {
            assert_eq!(Hello::decode(&named[..length]), None, "{length} bytes");
        }
        assert_eq!(Hello::decode(&[&named[..], b"c"].concat()), None);
    }
}
