//! Makes a durable log, and opens it again after it was closed or interrupted.
//!
//! The last complete commit (see [`crate::commit`]) names the segments in use. Their summaries name
//! the page of each place. Of several places with one page, the place with the highest version
//! counts. If the log has many pages, the summaries are read several times. Each pass finds the
//! places of a part of the pages, so that the versions fit within the bound on the log's memory.

use crate::blocking::{Blocking, Clock, Ended};
use crate::commit::{Committer, Stepped};
use crate::config::{Config, DamagedError, LogError, OPEN_MAX};
use crate::durable::{Durable, Journal};
use crate::journal::{self, Entry, Head, NAMES_MAX};
use crate::segment::{GENERATIONS, Segments};
use crate::size::{Kind, Sizes};
use crate::summary::{self, NOBODY, Record, Summary};
use crate::superblock::{NoSuperblock, Superblock};
use crate::words::Words;
use crate::{Log, Shared};
use std::collections::BTreeMap;
use std::sync::atomic::Ordering::Relaxed;
use std::sync::{Arc, PoisonError};
use weir_core::{PAGE_SIZE, Page, Rest, Watch, unwatched};
use weir_store::Store;

/// Largest number of journal pages in memory while the journal is read.
const CHUNK: u32 = 256;
/// Largest number of findings of damage that are listed.
const FINDINGS_MAX: usize = 100;
/// Largest number that a log's commits, journal pages and writes can have reached. A higher one
/// shows that the log is damaged.
const COUNT_MAX: u64 = 1 << 47;
const LIFE_MAX: u32 = u32::MAX - (1 << 20);

/// Findings of damage: the first hundred, and the number of all.
#[derive(Default)]
pub(crate) struct Findings {
    pub first: Vec<DamagedError>,
    pub count: u64,
}

impl Findings {
    pub fn add(&mut self, finding: DamagedError) {
        self.count += 1;
        if self.first.len() < FINDINGS_MAX {
            self.first.push(finding);
        }
    }
}

/// A segment whose records lie in the journal instead of a summary.
pub(crate) struct Inline {
    pub generation: u32,
    pub records: Vec<Record>,
}

/// The journal's content, up to its last complete commit.
pub(crate) struct Table {
    /// The life of each segment; 0: the segment holds nothing.
    pub lives: Vec<u32>,
    pub generations: Vec<u8>,
    pub inline: BTreeMap<u32, Inline>,
    pub journal: Journal,
    pub clock: u64,
}

/// Reads the superblocks of all members. Returns the first member's.
pub(crate) fn read_superblocks(
    io: &mut Blocking<'_>,
    below: &dyn Store,
    config: &Config,
    findings: &mut Findings,
) -> Result<Superblock, LogError> {
    let name = || below.name().to_owned();
    let wrong = |what: String| LogError::Members { store: name(), what };
    let Config { members, segment_pages, .. } = *config;
    let most = u64::from(below.slots()) / u64::from(segment_pages.max(1));
    if u64::from(members) > most || members == 0 {
        return Err(LogError::NoLog(name()));
    }
    let mut first: Option<Superblock> = None;
    for member in 0..members {
        let mut copies = [const { Err(NoSuperblock::Damaged) }; 2];
        io.read(Superblock::slots(member, segment_pages).into_iter(), |at, page| {
            copies[at] = page.map_or(Err(NoSuperblock::Damaged), Superblock::decode);
        });
        let later = copies.iter().find_map(|copy| match copy {
            Err(NoSuperblock::Later(version)) => Some(*version),
            _ => None,
        });
        // A copy may be whole and still be the wrong one, written for another disk or another log.
        // Choose the copy of this disk and this log.
        let is_right =
            |copy: &&Superblock| copy.member == member && first.is_none_or(|first| first.is_same_log(copy));
        let whole = || copies.iter().filter_map(|copy| copy.as_ref().ok());
        let Some(found) = whole().find(is_right).or_else(|| whole().next()) else {
            return Err(match later {
                Some(version) => LogError::Later { store: name(), version },
                None if copies.contains(&Err(NoSuperblock::Damaged)) => {
                    LogError::Damaged(DamagedError::Superblock(member + 1))
                }
                None if member == 0 => LogError::NoLog(name()),
                None => wrong(format!("disk {} carries no part of the log: name its own disks", member + 1)),
            });
        };
        if copies.iter().any(|copy| copy.as_ref() != Ok(found)) {
            findings.add(DamagedError::Copy(member + 1));
        }
        if found.members != members {
            return Err(wrong(format!(
                "the log lies on {} disks, and {members} are named: name all of them, in the order of its making",
                found.members
            )));
        }
        if found.member != member || first.is_some_and(|first| !first.is_same_log(found)) {
            return Err(wrong(match first {
                Some(first) if !first.is_same_log(found) => {
                    format!("disk {} is part of another log: name the log's own disks", member + 1)
                }
                _ => format!(
                    "disk {} is the log's disk {}: name the disks in the order of its making",
                    member + 1,
                    found.member + 1
                ),
            }));
        }
        first = first.or(Some(*found));
    }
    let found = first.expect("a member at least");
    if found.segment_pages != segment_pages || found.segments > below.slots() / segment_pages {
        return Err(wrong(format!(
            "the log has {} segments of {} pages, and there is room for {} of {segment_pages}: has a disk been replaced or cut?",
            found.segments,
            found.segment_pages,
            below.slots() / segment_pages
        )));
    }
    Ok(found)
}

/// The pages of a journal half up to its last complete commit.
struct Chain {
    /// The number of the last complete commit.
    commit: u64,
    /// The sequence number of the half's first page.
    sequence: u64,
    /// Number of pages from the half's first page to the end of its last complete commit.
    pages: u32,
}

/// Finds the complete commits of a half, beginning with its checkpoint.
fn chain(heads: &[Option<Head>]) -> Option<Chain> {
    let first = heads.first().copied().flatten().filter(|first| first.is_checkpoint)?;
    let mut found = None;
    let (mut commit, mut is_checkpoint) = (first.commit, true);
    for (at, head) in heads.iter().enumerate() {
        let Some(head) = head else { break };
        let follows = head.sequence == first.sequence + at as u64
            && head.commit == commit
            && head.is_checkpoint == is_checkpoint;
        if !follows {
            break;
        }
        if head.is_last {
            found = Some(Chain { commit, sequence: first.sequence, pages: at as u32 + 1 });
            (commit, is_checkpoint) = (commit + 1, false);
        }
    }
    found
}

/// Reads the journal up to its last complete commit.
pub(crate) fn read_journal(io: &mut Blocking<'_>, superblock: &Superblock) -> Result<Table, LogError> {
    let identity = superblock.short_identity();
    let half_pages = superblock.half_pages();
    let (mut seen, mut sequence) = (0, 0);
    let mut truth: Option<(u32, Chain)> = None;
    for half in 0..2 {
        let mut heads: Vec<Option<Head>> = vec![None; half_pages as usize];
        let slots = (0..half_pages).map(|page| superblock.journal_slot(half, page));
        io.read(slots, |at, page| {
            let head = page.ok().and_then(|page| journal::parse(page, identity)).map(|(head, _)| head);
            heads[at] = head.filter(|head| head.commit < COUNT_MAX && head.sequence < COUNT_MAX);
        });
        for head in heads.iter().flatten() {
            seen = seen.max(head.commit);
            sequence = sequence.max(head.sequence);
        }
        if let Some(chain) = chain(&heads) {
            let rank = |chain: &Chain| (chain.commit, chain.sequence);
            if truth.as_ref().is_none_or(|(_, best)| rank(&chain) > rank(best)) {
                truth = Some((half, chain));
            }
        }
    }
    // A confirmed commit was complete. If the journal lacks it now, the journal is damaged.
    let mut confirmed = 0;
    io.read([0, 1].map(|commit| superblock.confirmation_slot(commit)).into_iter(), |_, page| {
        let head = page.ok().and_then(|page| journal::parse(page, identity)).map(|(head, _)| head);
        confirmed = confirmed.max(head.map_or(0, |head| head.commit));
    });
    let (half, chain) = truth.ok_or(LogError::Damaged(DamagedError::NoCheckpoint))?;
    // A log has only one commit under way at a time, so only one can be incomplete. If the journal
    // lacks more, it is damaged.
    if seen > chain.commit + 1 || confirmed > chain.commit {
        let seen = seen.max(confirmed);
        return Err(LogError::Damaged(DamagedError::Journal { last: chain.commit, seen }));
    }
    let mut table = Table {
        lives: vec![0; superblock.segments as usize],
        generations: vec![0; superblock.segments as usize],
        inline: BTreeMap::new(),
        journal: Journal { half: half ^ 1, sequence: sequence + 1, commit: chain.commit, floor: 0 },
        clock: 0,
    };
    let mut pages = vec![Page::zeroed(); CHUNK.min(half_pages) as usize];
    for first in (0..chain.pages).step_by(CHUNK as usize) {
        let count = CHUNK.min(chain.pages - first);
        let slots = (first..first + count).map(|page| superblock.journal_slot(half, page));
        io.read(slots, |at, page| match page {
            Ok(page) => *pages[at] = *page,
            Err(_) => *pages[at] = [0; PAGE_SIZE],
        });
        for page in &pages[..count as usize] {
            let Some((head, entry)) = journal::parse(page, identity) else {
                // The page was whole when its head was read earlier in this opening. So it is
                // damaged now.
                return Err(LogError::Damaged(DamagedError::Journal { last: chain.commit, seen }));
            };
            table.apply(superblock, &head, &entry).map_err(LogError::Damaged)?;
        }
    }
    Ok(table)
}

impl Table {
    fn apply(&mut self, superblock: &Superblock, head: &Head, entry: &Entry<'_>) -> Result<(), DamagedError> {
        let known = superblock.reserved()..superblock.segments;
        let possible = |segment: u32, life: u32| {
            let is_possible = known.contains(&segment) && (1..LIFE_MAX).contains(&life);
            if is_possible { Ok(segment as usize) } else { Err(DamagedError::Entry(segment)) }
        };
        if head.floor >= LIFE_MAX || head.clock >= COUNT_MAX {
            return Err(DamagedError::Entry(0));
        }
        self.journal.floor = self.journal.floor.max(head.floor);
        self.clock = self.clock.max(head.clock);
        match entry {
            Entry::Written(names) => {
                for (segment, life) in names.iter() {
                    self.lives[possible(segment, life)?] = life;
                    self.inline.remove(&segment);
                }
            }
            Entry::Free(names) => {
                for (segment, life) in names.iter() {
                    self.lives[possible(segment, life)?] = 0;
                    self.inline.remove(&segment);
                }
            }
            Entry::Inline { segment, life, generation, records } => {
                let at = possible(*segment, *life)?;
                let records: Vec<Record> = records.iter().collect();
                if records.len() >= superblock.segment_pages as usize || *generation >= GENERATIONS as u32 {
                    return Err(DamagedError::Entry(*segment));
                }
                self.lives[at] = *life;
                self.inline.insert(*segment, Inline { generation: *generation, records });
            }
        }
        Ok(())
    }

    /// The segments in use whose records lie in a summary, and not in the journal.
    pub fn with_summary(&self) -> impl Iterator<Item = u32> + '_ {
        let used = self.lives.iter().enumerate().filter(|(_, life)| **life > 0);
        used.map(|(segment, _)| segment as u32).filter(|segment| !self.inline.contains_key(segment))
    }
}

/// Parses the summary of a segment in use. Fails if the summary is another log's, or of a life that
/// `table` does not name for the segment.
pub(crate) fn summary_of<'p>(
    superblock: &Superblock,
    table: &Table,
    segment: u32,
    page: Option<&'p weir_core::PageBytes>,
) -> Result<Summary<'p>, DamagedError> {
    page.and_then(|page| Summary::parse(page, segment))
        .filter(|found| found.identity() == superblock.short_identity())
        .filter(|found| found.life() == table.lives[segment as usize])
        .filter(|found| found.generation() < GENERATIONS as u32)
        .ok_or(DamagedError::Summary(segment))
}

/// One pass over all records, which fills the map for a part of the log's pages. `versions` has the
/// highest version found so far of each of these pages.
struct Pass<'a> {
    superblock: &'a Superblock,
    lives: &'a [u32],
    map: &'a Words,
    clock: u64,
    first: u32,
    versions: &'a mut [u64],
}

impl Pass<'_> {
    fn note(&mut self, segment: u32, place: u32, record: Record) -> Result<(), DamagedError> {
        if record.page == NOBODY {
            return Ok(());
        }
        if record.page >= self.superblock.pages || record.version == 0 || record.version > self.clock {
            return Err(DamagedError::Record(segment));
        }
        let at = record.page.checked_sub(self.first).map(|at| at as usize);
        let Some(version) = at.and_then(|at| self.versions.get_mut(at)) else { return Ok(()) };
        let place = segment * self.superblock.segment_pages + place;
        let word = self.map.at(record.page as usize);
        // A page that the cleaner has moved lies with one version in two places. The place in the
        // later life counts, in whatever order the summaries are read. Otherwise a check could
        // verify one copy, and a later opening could use the other.
        let rank = |place: u32| (self.lives[(place / self.superblock.segment_pages) as usize], place);
        let is_later = record.version > *version
            || record.version == *version && rank(place) > rank(word.load(Relaxed) - 1);
        if is_later {
            *version = record.version;
            word.store(place + 1, Relaxed);
        }
        Ok(())
    }
}

/// Fills the log's map from the records of all segments in use.
pub(crate) fn replay(
    io: &mut Blocking<'_>,
    superblock: &Superblock,
    table: &mut Table,
    pass: u64,
    map: &Words,
    findings: &mut Findings,
) -> Result<(), LogError> {
    let places = superblock.segment_pages - 1;
    let pass = u32::try_from(pass).unwrap_or(u32::MAX).clamp(1, superblock.pages);
    let segments: Vec<u32> = table.with_summary().collect();
    let passes = u64::from(superblock.pages.div_ceil(pass));
    let all = passes * segments.len() as u64;
    let mut versions = vec![0; pass as usize];
    for first in (0..superblock.pages).step_by(pass as usize) {
        versions.fill(0);
        let count = pass.min(superblock.pages - first) as usize;
        let mut pass_now = Pass {
            superblock,
            lives: &table.lives,
            map,
            clock: table.clock,
            first,
            versions: &mut versions[..count],
        };
        for (segment, inline) in &table.inline {
            for (place, record) in (0..).zip(&inline.records) {
                let noted = pass_now.note(*segment, place, *record);
                let _ = noted.map_err(|finding| findings.add(finding));
            }
        }
        for (number, some) in segments.chunks(4096).enumerate() {
            let done = u64::from(first / pass) * segments.len() as u64 + number as u64 * 4096;
            // One page is read for each segment: its summary.
            let bytes = |pages: u64| pages * PAGE_SIZE as u64;
            io.tell(bytes(done), bytes(all)).map_err(|ended| stopped(superblock, ended))?;
            let mut generations = Vec::new();
            let slots = some.iter().map(|segment| segment * superblock.segment_pages + places);
            io.read(slots, |at, page| {
                let segment = some[at];
                let found = summary_of(superblock, table, segment, page.ok()).and_then(|summary| {
                    generations.push((segment, summary.generation() as u8));
                    let mut records = (0..places).zip(summary.records());
                    records.try_for_each(|(place, record)| pass_now.note(segment, place, record))
                });
                if let Err(finding) = found {
                    findings.add(finding);
                }
            });
            for (segment, generation) in generations {
                table.generations[segment as usize] = generation;
            }
        }
        if findings.count > 0 && first == 0 && pass < superblock.pages {
            // The other passes would find the same damage.
            break;
        }
    }
    Ok(())
}

fn stopped(superblock: &Superblock, ended: Ended) -> LogError {
    match ended {
        Ended::Stopped(error) => LogError::Stopped(error),
        Ended::Fault(fault) => {
            LogError::Write { store: format!("the log {:032x}", superblock.identity), fault }
        }
    }
}

impl Log {
    /// Makes an empty durable log on `below`. The former content of `below` is lost. `identity` is
    /// a random number. The log is not open afterwards. Waits for the disks.
    ///
    /// # Errors
    /// Fails when the store is too small, or cannot be written.
    pub fn make(
        below: &Arc<dyn Store>,
        config: Config,
        identity: u128,
        clock: Clock<'_>,
    ) -> Result<(), LogError> {
        let sizes = Sizes::of(below.name(), below.slots(), &config, Kind::New)?;
        let Config { members, segment_pages, .. } = config;
        let superblock = Superblock {
            identity,
            member: 0,
            members,
            segment_pages,
            segments: sizes.segments,
            pages: sizes.pages,
            half: sizes.half,
        };
        let mut watch = unwatched;
        let mut io = Blocking::open(&**below, clock, &mut watch)?;
        let failed = |ended| stopped(&superblock, ended);
        let mut page = Page::zeroed();
        journal::begin(&mut page);
        let head =
            Head { is_checkpoint: true, is_last: true, ..Head::new(superblock.short_identity(), 1, 1) };
        journal::seal(&mut page, head);
        io.write([(superblock.journal_slot(0, 0), &*page)].into_iter()).map_err(failed)?;
        io.flush().map_err(failed)?;
        // Write the superblock's first copies on all members before the second copies. An opening
        // prefers a first copy. So the first copies of an earlier log must be overwritten first.
        for copy in 0..2 {
            for member in 0..members {
                Superblock { member, ..superblock }.encode(&mut page);
                let slot = Superblock::slots(member, segment_pages)[copy];
                io.write([(slot, &*page)].into_iter()).map_err(failed)?;
            }
        }
        io.flush().map_err(failed)
    }

    /// Opens the durable log on `below`. Only the log may use `below` from then on. The members and
    /// the segment's size in `config` must be the log's own, and the log's size in `config` is
    /// ignored. `watch` gets the progress, and may end the work. Waits for the disks.
    ///
    /// # Errors
    /// Fails when there is no log, it is damaged, its disks are not in order, or memory is missing.
    pub fn open(
        below: &Arc<dyn Store>,
        config: Config,
        clock: Clock<'_>,
        watch: Watch<'_>,
    ) -> Result<Self, LogError> {
        let mut findings = Findings::default();
        let mut io = Blocking::open(&**below, clock, watch)?;
        let superblock = read_superblocks(&mut io, &**below, &config, &mut findings)?;
        let sizes = sizes_of(&superblock, &**below, &config)?;
        let mut table = read_journal(&mut io, &superblock)?;
        let map = Words::new(superblock.pages as usize).map_err(LogError::Memory)?;
        // If one copy of a superblock is whole, damage to the other does no harm. So forget the
        // findings about the other.
        findings = Findings::default();
        replay(&mut io, &superblock, &mut table, sizes.pass(), &map, &mut findings)?;
        if let Some(finding) = findings.first.into_iter().next() {
            return Err(LogError::Damaged(finding));
        }
        let Table { lives, generations, inline, journal, clock } = table;
        let life = |segment: u32| {
            let at = segment as usize;
            let has_summary = !inline.contains_key(&segment);
            let generation = inline.get(&segment).map_or(generations[at].into(), |inline| inline.generation);
            (lives[at] > 0).then_some((lives[at], generation as usize, has_summary))
        };
        // Just before the crash, a segment may have begun a life that no commit has named. That
        // life has the next number. So skip this number, and give it to no later life.
        let floor = journal.floor + 1;
        let segments =
            Segments::recovered(superblock.segments, superblock.members, superblock.reserved(), floor, life);
        let durable = Durable::new(superblock, Journal { floor, ..journal }, clock);
        let log = Log::over(Arc::clone(below), &config, &sizes, segments, map, Some(durable))?;
        log.shared.settle(&lives);
        let unfinished: Vec<(u32, u32, u32)> = inline
            .into_iter()
            .filter_map(|(segment, inline)| {
                let row = log.shared.remember(segment, &inline)?;
                Some((segment, row, lives[segment as usize]))
            })
            .collect();
        // A commit that was under way at the crash may be damaged now and become readable later.
        // The new checkpoint makes it void.
        log.shared.begin_anew(io.clock())?;
        for about in unfinished {
            log.shared.finish(&mut io, about);
        }
        Ok(log)
    }
}

/// The sizes of the parts of a log that exists, from its superblock.
pub(crate) fn sizes_of(
    superblock: &Superblock,
    below: &dyn Store,
    config: &Config,
) -> Result<Sizes, LogError> {
    let Superblock { segments, segment_pages, pages, half, .. } = *superblock;
    let open = config.lanes.saturating_add(1).saturating_mul(OPEN_MAX as u32);
    let needs = u64::from(open) + u64::from(segments.div_ceil(NAMES_MAX as u32));
    if needs > u64::from(superblock.half_pages()) {
        return Err(LogError::Shape(format!("{} lanes for a log that was made for fewer", config.lanes)));
    }
    let config = Config { pages, segment_pages, ..*config };
    Sizes::of(below.name(), segments * segment_pages, &config, Kind::Made(half))
}

impl Shared {
    /// Counts the live pages of each segment, and frees segments that have none.
    fn settle(&self, lives: &[u32]) {
        for page in 0..self.shape.pages {
            if let Some(place) = self.find(page) {
                self.segments.add_live(self.shape.split(place).0);
            }
        }
        for (segment, _) in (0..).zip(lives).filter(|(_, life)| **life > 0) {
            if self.segments.leave(segment, crate::segment::State::Closed) {
                self.free(segment);
            }
        }
    }

    /// Puts the records of a segment that was being written at the crash into a row, and returns
    /// the row. `None`: the segment has no live page.
    fn remember(&self, segment: u32, inline: &Inline) -> Option<u32> {
        if self.segments.word(segment).live() == 0 {
            return None;
        }
        let row = self.rows.open(&self.segments, segment)?;
        for (place, record) in (0..).zip(&inline.records) {
            self.rows.set(row, place, *record);
            if record.version > 0 {
                self.rows.publish_version(row, place, record.version);
            }
        }
        Some(row)
    }

    /// Commits the state that was found on the disks, as a checkpoint.
    fn begin_anew(&self, clock: Clock<'_>) -> Result<(), LogError> {
        let durable = self.durable.as_ref().expect("a durable log");
        let mut committer = Committer::open(self, durable)?;
        let number = durable.ask();
        let mut rest = Rest::default();
        while durable.answer_to(number).is_none() || committer.in_flight() > 0 {
            if committer.step(self, durable, clock()) == Stepped::Waits {
                rest.until_next();
            }
        }
        let failed = |fault| LogError::Write { store: self.below.name().to_owned(), fault };
        durable.answer_to(number).unwrap_or(Ok(())).map_err(failed)?;
        *durable.journal.lock().unwrap_or_else(PoisonError::into_inner) = Some(committer.end());
        Ok(())
    }

    /// Writes the summary of a segment that was being written at the crash. If the write fails, the
    /// segment's records stay in memory, and each checkpoint has them.
    fn finish(&self, io: &mut Blocking<'_>, (segment, row, life): (u32, u32, u32)) {
        let mut page = Page::zeroed();
        let about = (segment, life, self.segments.word(segment).generation());
        summary::write(&self.rows, row, about, self.identity(), &mut page);
        let slot = self.shape.place(segment, self.shape.places());
        if io.write([(slot, &*page)].into_iter()).is_ok() {
            self.segments.has_summary(segment);
            self.rows.unpin(row);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use weir_core::Checksum;

    #[test]
    fn of_two_places_with_one_version_that_in_the_later_life_counts_in_any_order() {
        let superblock = Superblock {
            identity: 1,
            member: 0,
            members: 1,
            segment_pages: 8,
            segments: 10,
            pages: 20,
            half: 1,
        };
        let record = |version| Record { page: 12, checksum: Checksum(0), version };
        // Three segments have version 6 of page 12. Segment 7 is in the latest life, so its place
        // counts. Segment 3 has an older version of the page too.
        let lives = [0, 0, 0, 5, 0, 0, 0, 9, 4, 0];
        let records = [(3, 2, record(6)), (3, 1, record(5)), (7, 0, record(6)), (8, 6, record(6))];
        for turn in 0..records.len() {
            let map = Words::new(20).expect("memory");
            let mut versions = [0; 10];
            let mut pass = Pass {
                superblock: &superblock,
                lives: &lives,
                map: &map,
                clock: 6,
                first: 10,
                versions: &mut versions,
            };
            for (segment, place, record) in records.iter().cycle().skip(turn).take(records.len()) {
                pass.note(*segment, *place, *record).expect("no damage");
            }
            assert_eq!(map.at(12).load(Relaxed), 7 * 8 + 1, "turn {turn}");
        }
    }
}
