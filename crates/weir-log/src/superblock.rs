//! The superblock of a durable log: the log's description, and the position of its parts.
//! docs/log-format.md describes the format.
//!
//! Each member has two copies of the superblock, in the first and in the middle page of its first
//! segment. They are written once, when the log is made, and never change. The two pages after the
//! first copy on the first member confirm commits in turns.

use crate::summary::PLACES_MAX;
use weir_core::{Checksum, PAGE_SIZE, PageBytes, PageNo};

/// The first bytes of a member of a durable log.
pub const MAGIC: &[u8] = b"WEIR DURABLE LOG\n";
const NOTICE: &[u8] = b"A disk of a durable log of weir cache. weir cache check says how it is.\n";
/// The version of the format that this program writes.
pub(crate) const VERSION: u32 = 1;
/// Smallest number of pages of a segment. With fewer pages, the first segment would have no room
/// for the copies of the superblock and for the confirmations.
pub(crate) const SEGMENT_LEAST: u32 = 8;
/// Offset of the fields in the superblock's page, in bytes.
const FIELDS: usize = 512;
/// Number of the superblock's fields, each of 4 bytes. The log's identity takes four of them.
const COUNT: usize = 17;
const CHECKSUM: usize = PAGE_SIZE - 4;

/// The description of a durable log.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) struct Superblock {
    /// A random number that no other log has.
    pub identity: u128,
    /// The member on which this copy lies.
    pub member: u32,
    /// Number of members.
    pub members: u32,
    pub segment_pages: u32,
    /// Number of segments, the reserved ones included.
    pub segments: u32,
    /// The log's size in pages.
    pub pages: u32,
    /// Number of segments of each half of the journal. The first half begins after the first
    /// segments of all members.
    pub half: u32,
}

/// The reason why a page is no superblock.
#[derive(Clone, PartialEq, Eq, Debug)]
pub(crate) enum NoSuperblock {
    /// The page does not begin with the magic bytes.
    Absent,
    /// The page cannot be read. Or it begins with the magic bytes, but its checksum or a field is
    /// wrong.
    Damaged,
    /// A later version of Weir wrote the page.
    Later(u32),
}

impl Superblock {
    /// Number of segments that hold the log's own records: superblocks and journal.
    pub fn reserved(&self) -> u32 {
        self.members + self.half * 2
    }

    /// The slot of a page of the journal.
    pub fn journal_slot(&self, half: u32, page: u32) -> u32 {
        (self.members + half * self.half) * self.segment_pages + page
    }

    /// Number of pages of each half of the journal.
    pub fn half_pages(&self) -> u32 {
        self.half * self.segment_pages
    }

    /// The slots of the two copies of a member's superblock.
    pub fn slots(member: u32, segment_pages: u32) -> [u32; 2] {
        [0, segment_pages / 2].map(|page| member * segment_pages + page)
    }

    /// The slot of the page that confirms a commit.
    pub fn confirmation_slot(&self, commit: u64) -> u32 {
        1 + (commit % 2) as u32
    }

    /// The part of the log's identity that the journal and the summaries carry.
    pub fn short_identity(&self) -> u64 {
        self.identity as u64
    }

    pub fn encode(&self, out: &mut PageBytes) {
        out.fill(0);
        out[..MAGIC.len()].copy_from_slice(MAGIC);
        out[MAGIC.len()..][..NOTICE.len()].copy_from_slice(NOTICE);
        let identity = [0, 32, 64, 96].map(|at| (self.identity >> at) as u32);
        // The two zeros are for feature flags. An older program must refuse a log with an unknown
        // flag in the first, and may ignore one in the second.
        let fields = [VERSION, 0, 0].into_iter().chain(identity).chain([
            self.member,
            self.members,
            self.segment_pages,
            self.segments,
            self.pages,
            self.half,
        ]);
        for (at, field) in fields.enumerate() {
            out[FIELDS + at * 4..][..4].copy_from_slice(&field.to_le_bytes());
        }
        let checksum = Checksum::of(out, PageNo(self.member), VERSION);
        out[CHECKSUM..].copy_from_slice(&checksum.0.to_le_bytes());
    }

    pub fn decode(bytes: &PageBytes) -> Result<Self, NoSuperblock> {
        if !bytes.starts_with(MAGIC) {
            return Err(NoSuperblock::Absent);
        }
        let word = |at: usize| u32::from_le_bytes(bytes[at..at + 4].try_into().expect("4 of 4096 bytes"));
        let field: [u32; COUNT] = std::array::from_fn(|at| word(FIELDS + at * 4));
        let [version, needs, _, ..] = field;
        let identity = (0..4).map(|at| u128::from(field[3 + at]) << (32 * at)).sum();
        let [member, members, segment_pages, segments, pages, half] = std::array::from_fn(|at| field[7 + at]);
        let mut copy = *bytes;
        copy[CHECKSUM..].fill(0);
        if Checksum::of(&copy, PageNo(member), version).0 != word(CHECKSUM) {
            return Err(NoSuperblock::Damaged);
        }
        if version != VERSION || needs != 0 {
            return Err(NoSuperblock::Later(version));
        }
        let found = Superblock { identity, member, members, segment_pages, segments, pages, half };
        if found.is_possible() { Ok(found) } else { Err(NoSuperblock::Damaged) }
    }

    /// Whether a log can have the sizes in these fields. If so, no later computation with them
    /// overflows.
    fn is_possible(&self) -> bool {
        let Superblock { member, members, segment_pages, segments, pages, half, .. } = *self;
        let slots = u64::from(segments) * u64::from(segment_pages);
        let reserved = u64::from(members) + u64::from(half) * 2;
        (SEGMENT_LEAST..=PLACES_MAX + 1).contains(&segment_pages)
            && member < members
            && half > 0
            && slots < u64::from(u32::MAX)
            && reserved < u64::from(segments)
            && (1..=slots).contains(&u64::from(pages))
    }

    /// Whether two copies of a superblock describe the same log.
    pub fn is_same_log(&self, other: &Superblock) -> bool {
        Superblock { member: other.member, ..*self } == *other
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    const ONE: Superblock = Superblock {
        identity: 0x1234_5678_9abc_def0_1122_3344_5566_7788,
        member: 1,
        members: 3,
        segment_pages: 256,
        segments: 1000,
        pages: 200_000,
        half: 5,
    };

    #[test]
    fn a_superblock_is_read_as_it_was_written_and_a_later_version_says_so() {
        let mut page = [1; PAGE_SIZE];
        ONE.encode(&mut page);
        assert_eq!(Superblock::decode(&page), Ok(ONE));
        assert!(page.starts_with(b"WEIR DURABLE LOG\nA disk of"));
        // Two valid pages: one of a later version, and one with a feature that this program does
        // not know.
        for (at, value) in [(0, 2), (1, 8)] {
            let mut later = page;
            later[FIELDS + at * 4] = value;
            later[CHECKSUM..].fill(0);
            let version = if at == 0 { 2 } else { 1 };
            let checksum = Checksum::of(&later, PageNo(1), version);
            later[CHECKSUM..].copy_from_slice(&checksum.0.to_le_bytes());
            assert_eq!(Superblock::decode(&later), Err(NoSuperblock::Later(version)));
        }
        assert_eq!(Superblock::decode(&[0; PAGE_SIZE]), Err(NoSuperblock::Absent));
    }

    proptest! {
        #[test]
        fn a_superblock_with_a_changed_bit_is_none(bit in 0..PAGE_SIZE * 8) {
            let mut page = [0; PAGE_SIZE];
            ONE.encode(&mut page);
            page[bit / 8] ^= 1 << (bit % 8);
            prop_assert!(Superblock::decode(&page).is_err());
        }
    }
}
