//! A page of a durable log's journal. The format is that of docs/log-format.md.
//!
//! The journal has two halves. A half begins with a *checkpoint*: a commit that names every segment
//! in use. Further commits follow, each of which names what has changed. A commit is a row of
//! pages, the last of which is marked as the last. If a half is full, a checkpoint goes into the
//! other half.

use crate::summary::{NOBODY, PLACES_MAX, RECORD, Record};
use weir_core::{Checksum, PAGE_SIZE, PageBytes, PageNo};

const MAGIC: u32 = 0x314a_4c57;
const HEAD: usize = 64;
const INLINE_HEAD: usize = HEAD + 12;
/// Largest number of segments that one page of the journal names.
pub(crate) const NAMES_MAX: usize = (PAGE_SIZE - HEAD) / 8;
const _: () = assert!(INLINE_HEAD + PLACES_MAX as usize * RECORD <= PAGE_SIZE);

/// The head of a page of the journal.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) struct Head {
    /// The log's [short identity](crate::superblock::Superblock::short_identity).
    pub identity: u64,
    /// The number of this page among all pages that were written to the journal.
    pub sequence: u64,
    /// The number of this commit among all commits.
    pub commit: u64,
    pub is_checkpoint: bool,
    pub is_last: bool,
    /// No segment has had a life above this number.
    pub floor: u32,
    /// No write that the commit covers has a version above this one.
    pub clock: u64,
}

const WRITTEN: u8 = 1;
const FREE: u8 = 2;
const INLINE: u8 = 3;

/// The content of a page of the journal: facts about segments.
#[derive(Clone, PartialEq, Eq, Debug)]
pub(crate) enum Entry<'a> {
    /// Segments whose summaries are on the disk, each with its life.
    Written(Names<'a>),
    /// Segments that have no live page, each with its last life.
    Free(Names<'a>),
    /// The segment has these records. Its summary is not on the disk yet, or will never be.
    Inline { segment: u32, life: u32, generation: u32, records: Records<'a> },
}

/// A list of segments in a page of the journal, each with its life.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) struct Names<'a>(&'a [u8]);

impl Names<'_> {
    pub fn iter(&self) -> impl Iterator<Item = (u32, u32)> + '_ {
        self.0.chunks_exact(8).map(|pair| (word(pair, 0), word(pair, 4)))
    }
}

/// The records of a segment's places, in order.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) struct Records<'a>(&'a [u8]);

impl Records<'_> {
    pub fn iter(&self) -> impl Iterator<Item = Record> + '_ {
        self.0.chunks_exact(RECORD).map(Record::take)
    }
}

fn word(bytes: &[u8], at: usize) -> u32 {
    u32::from_le_bytes([bytes[at], bytes[at + 1], bytes[at + 2], bytes[at + 3]])
}

fn long(bytes: &[u8], at: usize) -> u64 {
    u64::from(word(bytes, at + 4)) << 32 | u64::from(word(bytes, at))
}

/// Empties a page of the journal for new content. [`seal`] completes the page.
pub(crate) fn begin(page: &mut PageBytes) {
    page.fill(0);
}

/// Adds a segment with its life to a page of the journal. Returns false if the page is full, or has
/// entries of another kind.
pub(crate) fn add_name(page: &mut PageBytes, is_free: bool, segment: u32, life: u32) -> bool {
    let kind = if is_free { FREE } else { WRITTEN };
    let count = usize::from(u16::from_le_bytes([page[38], page[39]]));
    if count == NAMES_MAX || count > 0 && page[36] != kind {
        return false;
    }
    page[36] = kind;
    page[HEAD + count * 8..][..4].copy_from_slice(&segment.to_le_bytes());
    page[HEAD + count * 8 + 4..][..4].copy_from_slice(&life.to_le_bytes());
    page[38..40].copy_from_slice(&(count as u16 + 1).to_le_bytes());
    true
}

/// Fills a page of the journal with the records of a segment's places. Leaves out records without a
/// version, because their pages were not written yet.
pub(crate) fn put_records(
    page: &mut PageBytes,
    (segment, life, generation): (u32, u32, usize),
    records: &[Record],
) {
    page[36] = INLINE;
    page[38..40].copy_from_slice(&(records.len() as u16).to_le_bytes());
    for (at, value) in [segment, life, generation as u32].into_iter().enumerate() {
        page[HEAD + at * 4..][..4].copy_from_slice(&value.to_le_bytes());
    }
    for (at, record) in records.iter().enumerate() {
        let page_number = if record.version == 0 { NOBODY } else { record.page };
        Record { page: page_number, ..*record }.put(&mut page[INLINE_HEAD + at * RECORD..]);
    }
}

/// Gives a page of the journal its head and its checksum.
pub(crate) fn seal(page: &mut PageBytes, head: Head) {
    let Head { identity, sequence, commit, is_checkpoint, is_last, floor, clock } = head;
    page[..4].copy_from_slice(&MAGIC.to_le_bytes());
    page[4..8].fill(0);
    page[8..16].copy_from_slice(&identity.to_le_bytes());
    page[16..24].copy_from_slice(&sequence.to_le_bytes());
    page[24..32].copy_from_slice(&commit.to_le_bytes());
    page[32] = u8::from(is_checkpoint);
    page[33] = u8::from(is_last);
    page[40..44].copy_from_slice(&floor.to_le_bytes());
    page[48..56].copy_from_slice(&clock.to_le_bytes());
    let checksum = Checksum::of(page, PageNo(sequence as u32), commit as u32);
    page[4..8].copy_from_slice(&checksum.0.to_le_bytes());
}

impl Head {
    /// A head with these numbers, for [`seal`]. Its other fields are zero.
    pub fn new(identity: u64, sequence: u64, commit: u64) -> Self {
        Head { identity, sequence, commit, is_checkpoint: false, is_last: false, floor: 0, clock: 0 }
    }
}

/// Parses a page of the journal of the log with this identity. `None`: the bytes are no such page.
pub(crate) fn parse(page: &PageBytes, identity: u64) -> Option<(Head, Entry<'_>)> {
    let head = Head {
        identity: long(page, 8),
        sequence: long(page, 16),
        commit: long(page, 24),
        is_checkpoint: page[32] == 1,
        is_last: page[33] == 1,
        floor: word(page, 40),
        clock: long(page, 48),
    };
    if word(page, 0) != MAGIC || head.identity != identity {
        return None;
    }
    let mut copy = *page;
    copy[4..8].fill(0);
    let checksum = Checksum::of(&copy, PageNo(head.sequence as u32), head.commit as u32);
    if checksum.0 != word(page, 4) {
        return None;
    }
    let count = usize::from(u16::from_le_bytes([page[38], page[39]]));
    let entry = match page[36] {
        INLINE => Entry::Inline {
            segment: word(page, HEAD),
            life: word(page, HEAD + 4),
            generation: word(page, HEAD + 8),
            records: Records(page.get(INLINE_HEAD..INLINE_HEAD + count * RECORD)?),
        },
        FREE => Entry::Free(Names(page.get(HEAD..HEAD + count * 8)?)),
        // The page of a commit without changes names no segment.
        0 | WRITTEN => Entry::Written(Names(page.get(HEAD..HEAD + count * 8)?)),
        _ => return None,
    };
    Some((head, entry))
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;
    use weir_core::Checksum;

    fn head() -> Head {
        Head { is_last: true, is_checkpoint: true, floor: 7, clock: 1 << 40, ..Head::new(0xfeed, 41, 9) }
    }

    #[test]
    fn a_page_of_names_holds_as_many_as_fit_and_says_them_again() {
        let mut page = [9; PAGE_SIZE];
        begin(&mut page);
        let mut count = 0;
        while add_name(&mut page, true, count, count + 5) {
            count += 1;
        }
        assert!(!add_name(&mut page, false, 1, 1));
        seal(&mut page, head());
        let (found, entry) = parse(&page, 0xfeed).unwrap();
        assert_eq!((count as usize, found.sequence, found.commit), (NAMES_MAX, 41, 9));
        assert!(found.is_last && found.is_checkpoint && found.floor == 7 && found.clock == 1 << 40);
        let Entry::Free(names) = entry else { panic!("{entry:?}") };
        assert!(names.iter().eq((0..count).map(|segment| (segment, segment + 5))));
        assert_eq!(parse(&page, 0xfeee), None, "another log's");
    }

    #[test]
    fn records_without_a_version_are_left_out() {
        let record = |page, version| Record { page, checksum: Checksum(page * 3), version };
        let records: Vec<Record> =
            (0..PLACES_MAX).map(|page| record(page, u64::from(page % 2) << 47 | 1)).collect();
        let mut page = [9; PAGE_SIZE];
        begin(&mut page);
        put_records(&mut page, (3, 4, 1), &[records[0], record(5, 0), records[2]]);
        seal(&mut page, head());
        let (_, entry) = parse(&page, 0xfeed).unwrap();
        let Entry::Inline { segment: 3, life: 4, generation: 1, records: found } = entry else {
            panic!("{entry:?}")
        };
        let pages: Vec<u32> = found.iter().map(|record| record.page).collect();
        assert_eq!(pages, [0, NOBODY, 2]);
        put_records(&mut page, (3, 4, 1), &records);
        seal(&mut page, head());
        let Some((_, Entry::Inline { records: found, .. })) = parse(&page, 0xfeed) else { panic!("no page") };
        assert!(found.iter().eq(records));
    }

    proptest! {
        #[test]
        fn a_page_with_a_changed_bit_is_none_and_any_page_is_parsed(
            bit in 0..PAGE_SIZE * 8, bytes in proptest::collection::vec(any::<u8>(), 64),
        ) {
            let mut page = [0; PAGE_SIZE];
            begin(&mut page);
            add_name(&mut page, false, 3, 4);
            seal(&mut page, head());
            page[bit / 8] ^= 1 << (bit % 8);
            prop_assert_eq!(parse(&page, 0xfeed), None);
            // Give the page a random head, with the right checksum.
            page[8..64].copy_from_slice(&bytes[8..]);
            page[..4].copy_from_slice(&MAGIC.to_le_bytes());
            page[4..8].fill(0);
            let (sequence, commit) = (long(&page, 16), long(&page, 24));
            let checksum = Checksum::of(&page, PageNo(sequence as u32), commit as u32);
            page[4..8].copy_from_slice(&checksum.0.to_le_bytes());
            let identity = long(&page, 8);
            if let Some((_, Entry::Written(names) | Entry::Free(names))) = parse(&page, identity) {
                prop_assert!(names.iter().count() <= NAMES_MAX);
            }
        }
    }
}
