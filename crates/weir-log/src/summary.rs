//! A segment's last page is its summary: the page number and checksum of each place. A *row* is a
//! summary in memory.
//!
//! The format on disk, numbers with the lowest byte first (docs/log-format.md). The head has magic,
//! segment, life, a checksum, generation, and the log's identity in 8 bytes. The checksum is that
//! of the page with zeros in the checksum's place. From byte 32 on each place has 14 bytes: page,
//! checksum, and the version in 6 bytes. A scratch log has a random number for its identity, and no
//! versions.
//!
//! A *version* numbers the writes of a durable log. A record gets its version once the page is
//! written. Of several records of a page, the one with the highest version counts. A page that is
//! moved keeps its version.
//!
//! The rows of segments whose summary is not on the disk are *pinned*. The other rows are a cache,
//! which CLOCK replaces. A lane that finds no row reads the summary from disk. A row may change
//! while it is read, so readers check its tag before and after.

use crate::segment::Segments;
use crate::words::Words;
use std::io;
use std::sync::atomic::Ordering::{Acquire, Relaxed, SeqCst};
use std::sync::atomic::{AtomicBool, AtomicU32, AtomicU64, fence};
use weir_core::{Checksum, PAGE_SIZE, PageBytes, PageNo};

const MAGIC: u32 = 0x3247_4c57;
const HEAD: usize = 32;
/// Bytes of a record on disk.
pub(crate) const RECORD: usize = 14;
/// Largest number of places of a segment. The room in a page of the journal limits it.
pub(crate) const PLACES_MAX: u32 = 284;
const _: () = assert!(HEAD + PLACES_MAX as usize * RECORD <= PAGE_SIZE);
/// The page number of a place that holds no page.
pub(crate) const NOBODY: u32 = u32::MAX;
/// The bit of a place's fourth word in a row: it is set if the place's record has a version.
const HAS_VERSION: u32 = 1 << 31;

/// The record of a place: its page's number, checksum and version.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) struct Record {
    pub page: u32,
    pub checksum: Checksum,
    /// The number of the page's write. 0: the log is scratch, or the write has no answer yet.
    pub version: u64,
}

impl Record {
    pub fn of(page: u32, bytes: &PageBytes) -> Self {
        Record { page, checksum: Checksum::of(bytes, PageNo(page), 0), version: 0 }
    }

    pub fn proves(&self, page: u32, bytes: &PageBytes) -> bool {
        self.page == page && self.checksum == Checksum::of(bytes, PageNo(page), 0)
    }

    /// Encodes the record into its 14 bytes.
    pub fn put(&self, out: &mut [u8]) {
        out[..4].copy_from_slice(&self.page.to_le_bytes());
        out[4..8].copy_from_slice(&self.checksum.0.to_le_bytes());
        out[8..RECORD].copy_from_slice(&self.version.to_le_bytes()[..6]);
    }

    /// Decodes a record.
    pub fn take(bytes: &[u8]) -> Self {
        let word = |at: usize| u32::from_le_bytes([bytes[at], bytes[at + 1], bytes[at + 2], bytes[at + 3]]);
        let high = u64::from(u16::from_le_bytes([bytes[12], bytes[13]]));
        Record { page: word(0), checksum: Checksum(word(4)), version: high << 32 | u64::from(word(8)) }
    }
}

#[derive(Debug)]
struct Row {
    /// The segment plus 1 in the lower half, and in the upper half a number that no other tag has.
    /// 0: the row is free. [`BUSY`]: the row is between two owners.
    tag: AtomicU64,
    is_pinned: AtomicBool,
    is_used: AtomicBool,
}

const BUSY: u64 = u64::MAX;

/// The summaries in memory.
#[derive(Debug)]
pub(crate) struct Rows {
    rows: Box<[Row]>,
    records: Words,
    places: usize,
    /// Number of 32-bit words in a row for each place: page and checksum, and two more for the
    /// version in a durable log.
    stride: usize,
    hand: AtomicU32,
    tags: AtomicU32,
}

impl Rows {
    pub fn new(count: u32, places: u32, is_durable: bool) -> io::Result<Self> {
        let stride = Self::stride(is_durable);
        let row = || Row {
            tag: AtomicU64::new(0),
            is_pinned: AtomicBool::new(false),
            is_used: AtomicBool::new(false),
        };
        Ok(Rows {
            rows: (0..count).map(|_| row()).collect(),
            records: Words::new(count as usize * places as usize * stride)?,
            places: places as usize,
            stride,
            hand: AtomicU32::new(0),
            tags: AtomicU32::new(0),
        })
    }

    fn stride(is_durable: bool) -> usize {
        if is_durable { 4 } else { 2 }
    }

    /// Bytes of memory that one row takes.
    pub fn row_bytes(places: u32, is_durable: bool) -> u64 {
        (places as usize * Self::stride(is_durable) * 4 + size_of::<Row>()) as u64
    }

    pub fn bytes(&self) -> u64 {
        self.records.bytes() + (self.rows.len() * size_of::<Row>()) as u64
    }

    fn words(&self, row: u32, place: u32) -> (&AtomicU32, &AtomicU32) {
        let at = (row as usize * self.places + place as usize) * self.stride;
        (self.records.at(at), self.records.at(at + 1))
    }

    /// The two words of a summary's row that hold the version of a place. `None`: the log is
    /// scratch, and has no versions.
    fn version_words(&self, row: u32, place: u32) -> Option<(&AtomicU32, &AtomicU32)> {
        let at = (row as usize * self.places + place as usize) * self.stride;
        (self.stride == 4).then(|| (self.records.at(at + 2), self.records.at(at + 3)))
    }

    fn record(&self, row: u32, place: u32) -> Record {
        // Read the version first, because its writer stores it last. So a reader that sees the
        // version also sees the rest of the record.
        let version = self.version_words(row, place).map_or(0, |(low, high)| match high.load(SeqCst) {
            high if high & HAS_VERSION == 0 => 0,
            high => u64::from(high & !HAS_VERSION) << 32 | u64::from(low.load(SeqCst)),
        });
        let (page, checksum) = self.words(row, place);
        let page = page.load(SeqCst);
        Record { page, checksum: Checksum(checksum.load(Relaxed)), version }
    }

    /// Records the version of a place whose page has been written.
    pub fn publish_version(&self, row: u32, place: u32, version: u64) {
        if let Some((low, high)) = self.version_words(row, place) {
            low.store(version as u32, SeqCst);
            high.store(HAS_VERSION | (version >> 32) as u32, SeqCst);
        }
    }

    /// Opens an empty, pinned row for a new life of a segment. `None`: all rows are pinned.
    pub fn open(&self, segments: &Segments, segment: u32) -> Option<u32> {
        let row = self.claim(segments)?;
        for place in 0..self.places as u32 {
            self.words(row, place).0.store(NOBODY, Relaxed);
            if let Some((_, high)) = self.version_words(row, place) {
                high.store(0, Relaxed);
            }
        }
        self.publish(segments, row, segment, true);
        Some(row)
    }

    /// Writes the page number and checksum of a place into a row. Only the appender that opened the
    /// row calls it.
    pub fn set(&self, row: u32, place: u32, record: Record) {
        let (page, checksum) = self.words(row, place);
        checksum.store(record.checksum.0, Relaxed);
        page.store(record.page, SeqCst);
    }

    /// Unpins a row, since its summary is on the disk.
    pub fn unpin(&self, row: u32) {
        self.rows[row as usize].is_pinned.store(false, SeqCst);
    }

    /// The record of a place, if a row has it.
    pub fn get(&self, segments: &Segments, segment: u32, place: u32) -> Option<Record> {
        let mut found = None;
        self.read(segments, segment, |row| found = Some(self.record(row, place))).then_some(found?)
    }

    /// Copies the records of a segment's places, if a row has them.
    pub fn copy(&self, segments: &Segments, segment: u32, out: &mut Vec<Record>) -> bool {
        self.read(segments, segment, |row| {
            out.clear();
            out.extend((0..self.places as u32).map(|place| self.record(row, place)));
        })
    }

    /// Whether a segment has a row now.
    pub fn has(&self, segments: &Segments, segment: u32) -> bool {
        self.read(segments, segment, |_| {})
    }

    /// Runs `look` on the segment's row. Returns whether the row was the segment's the whole time.
    fn read(&self, segments: &Segments, segment: u32, look: impl FnOnce(u32)) -> bool {
        let Some(row) = segments.row(segment).load(SeqCst).checked_sub(1) else { return false };
        let Row { tag, is_used, .. } = &self.rows[row as usize];
        let was = tag.load(Acquire);
        if was == BUSY || was as u32 != segment + 1 {
            return false;
        }
        look(row);
        fence(Acquire);
        let is_same = tag.load(Relaxed) == was;
        if is_same && !is_used.load(Relaxed) {
            is_used.store(true, Relaxed);
        }
        is_same
    }

    /// Stores a summary that has been read, if a row can be freed for it.
    pub fn keep(&self, segments: &Segments, summary: &Summary<'_>) {
        let Summary { segment, life, .. } = *summary;
        if segments.row(segment).load(SeqCst) != 0 || segments.word(segment).life() != life {
            return;
        }
        let Some(row) = self.claim(segments) else { return };
        for (place, record) in (0..self.places as u32).zip(summary.records()) {
            let (page, checksum) = self.words(row, place);
            page.store(record.page, Relaxed);
            checksum.store(record.checksum.0, Relaxed);
            self.publish_version(row, place, record.version);
        }
        self.publish(segments, row, segment, false);
        if segments.word(segment).life() != life {
            // The segment began another life while its summary was read.
            self.forget_row(segments, row, segment);
        }
    }

    /// Drops the row of a segment whose life has ended.
    pub fn forget(&self, segments: &Segments, segment: u32) {
        if let Some(row) = segments.row(segment).load(SeqCst).checked_sub(1) {
            self.forget_row(segments, row, segment);
        }
    }

    fn forget_row(&self, segments: &Segments, row: u32, segment: u32) {
        let Row { tag, is_pinned, .. } = &self.rows[row as usize];
        let was = tag.load(SeqCst);
        if was == BUSY || was as u32 != segment + 1 {
            return;
        }
        if tag.compare_exchange(was, BUSY, SeqCst, Relaxed).is_ok() {
            let _ = segments.row(segment).compare_exchange(row + 1, 0, SeqCst, Relaxed);
            is_pinned.store(false, SeqCst);
            tag.store(0, SeqCst);
        }
    }

    /// Takes a row that is free. If none is, takes a row away from another segment. `None`: all
    /// rows are pinned or in use.
    fn claim(&self, segments: &Segments) -> Option<u32> {
        let count = self.rows.len() as u32;
        for _ in 0..count * 2 {
            let at = self.hand.fetch_add(1, Relaxed) % count;
            let Row { tag, is_pinned, is_used } = &self.rows[at as usize];
            let was = tag.load(SeqCst);
            if was == BUSY || is_pinned.load(SeqCst) || was != 0 && is_used.swap(false, Relaxed) {
                continue;
            }
            if tag.compare_exchange(was, BUSY, SeqCst, Relaxed).is_ok() {
                if let Some(segment) = (was as u32).checked_sub(1) {
                    let _ = segments.row(segment).compare_exchange(at + 1, 0, SeqCst, Relaxed);
                }
                return Some(at);
            }
        }
        None
    }

    fn publish(&self, segments: &Segments, row: u32, segment: u32, is_pinned: bool) {
        let number = self.tags.fetch_add(1, Relaxed) & 0x7fff_ffff;
        let Row { tag, is_pinned: pin, is_used } = &self.rows[row as usize];
        pin.store(is_pinned, SeqCst);
        is_used.store(false, Relaxed);
        tag.store(u64::from(number) << 32 | u64::from(segment + 1), SeqCst);
        let word = segments.row(segment);
        if is_pinned {
            // The segment may still have a row from an earlier life, because a lane stored it after
            // that life had ended. That row is replaced when CLOCK comes to it.
            word.store(row + 1, SeqCst);
        } else if word.compare_exchange(0, row + 1, SeqCst, Relaxed).is_err() {
            tag.store(0, SeqCst);
        }
    }
}

/// Writes the summary of a segment from its row. In a durable log it leaves out pages without a
/// version, since those were not written.
pub(crate) fn write(
    rows: &Rows,
    row: u32,
    (segment, life, generation): (u32, u32, usize),
    identity: u64,
    out: &mut PageBytes,
) {
    out.fill(0);
    for place in 0..PLACES_MAX {
        let mut record = Record { page: NOBODY, checksum: Checksum(0), version: 0 };
        if (place as usize) < rows.places {
            let found = rows.record(row, place);
            if rows.stride == 2 || found.version != 0 {
                record = found;
            }
        }
        record.put(&mut out[HEAD + place as usize * RECORD..]);
    }
    let mut put = |at: usize, value: u32| out[at..at + 4].copy_from_slice(&value.to_le_bytes());
    put(0, MAGIC);
    put(4, segment);
    put(8, life);
    put(16, generation as u32);
    out[20..28].copy_from_slice(&identity.to_le_bytes());
    let checksum = Checksum::of(out, PageNo(segment), life);
    out[12..16].copy_from_slice(&checksum.0.to_le_bytes());
}

/// A segment's summary, read from the disk.
pub(crate) struct Summary<'a> {
    bytes: &'a PageBytes,
    segment: u32,
    life: u32,
}

impl<'a> Summary<'a> {
    /// Parses the summary of this segment. `None`: the bytes are no summary of it.
    pub fn parse(bytes: &'a PageBytes, segment: u32) -> Option<Self> {
        let word = |at: usize| word(bytes, at);
        let mut copy = *bytes;
        copy[12..16].fill(0);
        let is_proven = Checksum::of(&copy, PageNo(segment), word(8)).0 == word(12);
        let is_it = word(0) == MAGIC && word(4) == segment && is_proven;
        is_it.then(|| Summary { bytes, segment, life: word(8) })
    }

    pub fn life(&self) -> u32 {
        self.life
    }

    /// The generation of the segment's pages.
    pub fn generation(&self) -> u32 {
        word(self.bytes, 16)
    }

    /// The identity of the segment's log.
    pub fn identity(&self) -> u64 {
        u64::from(word(self.bytes, 24)) << 32 | u64::from(word(self.bytes, 20))
    }

    pub fn record(&self, place: u32) -> Record {
        Record::take(&self.bytes[HEAD + place as usize * RECORD..])
    }

    pub fn records(&self) -> impl Iterator<Item = Record> {
        (0..PLACES_MAX).map(|place| self.record(place))
    }
}

fn word(bytes: &PageBytes, at: usize) -> u32 {
    u32::from_le_bytes(bytes[at..at + 4].try_into().expect("4 of 4096 bytes"))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn record(page: u32) -> Record {
        Record { page, checksum: Checksum(page ^ 0x5555), version: 0 }
    }

    #[test]
    fn a_summary_says_what_its_row_said_and_a_changed_bit_ends_it() {
        let segments = Segments::new(8, 1);
        let rows = Rows::new(4, 15, false).unwrap();
        let row = rows.open(&segments, 3).unwrap();
        (0..14).for_each(|place| rows.set(row, place, record(place + 100)));
        let mut page = [1; PAGE_SIZE];
        write(&rows, row, (3, 9, 0), 0, &mut page);
        let summary = Summary::parse(&page, 3).unwrap();
        assert_eq!((summary.life(), summary.record(13)), (9, record(113)));
        assert_eq!(summary.record(14).page, NOBODY);
        assert!(Summary::parse(&page, 4).is_none(), "another segment's");
        page[500] ^= 1;
        assert!(Summary::parse(&page, 3).is_none());
    }

    #[test]
    fn pinned_rows_stay_and_others_make_room() {
        let segments = Segments::new(8, 1);
        let rows = Rows::new(2, 15, false).unwrap();
        let first = rows.open(&segments, 0).unwrap();
        rows.set(first, 2, record(7));
        rows.open(&segments, 1).unwrap();
        assert_eq!(rows.open(&segments, 2), None, "both are pinned");
        rows.unpin(first);
        assert_eq!(rows.get(&segments, 0, 2), Some(record(7)));
        let second = rows.open(&segments, 2).unwrap();
        assert_eq!((second, rows.get(&segments, 0, 2)), (first, None));
        assert!(rows.has(&segments, 1));
        rows.forget(&segments, 1);
        assert!(!rows.has(&segments, 1) && rows.open(&segments, 5).is_some());
    }

    #[test]
    fn a_summary_of_an_earlier_life_is_not_kept() {
        let segments = Segments::new(8, 1);
        let rows = Rows::new(2, 15, false).unwrap();
        let life = segments.open(4, 0);
        let row = rows.open(&segments, 4).unwrap();
        let mut page = [0; PAGE_SIZE];
        write(&rows, row, (4, life, 0), 0, &mut page);
        rows.forget(&segments, 4);
        rows.keep(&segments, &Summary::parse(&page, 4).unwrap());
        assert!(rows.has(&segments, 4));
        rows.forget(&segments, 4);
        segments.open(4, 0);
        rows.keep(&segments, &Summary::parse(&page, 4).unwrap());
        assert!(!rows.has(&segments, 4));
    }
}
