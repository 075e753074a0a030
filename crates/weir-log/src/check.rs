//! Verifies a durable log that nobody uses: superblocks, journal, summaries, and each live page by
//! its checksum. Changes nothing.

use crate::blocking::{Blocking, Clock};
use crate::config::{Config, DamagedError, LogError};
use crate::recover::{Findings, read_journal, read_superblocks, replay, sizes_of, summary_of};
use crate::summary::Record;
use crate::words::Words;
use std::sync::Arc;
use std::sync::atomic::Ordering::Relaxed;
use weir_core::{PAGE_SIZE, Watch};
use weir_store::Store;

/// Maximum number of bad pages that a report lists.
const LISTED_MAX: usize = 1000;

/// A page of the log whose content is not what was written.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct BadPage {
    /// The page's number in the log.
    pub page: u32,
    /// The page's slot in the store below.
    pub slot: u32,
    /// Whether the slot could be read. If so, its content is wrong.
    pub was_read: bool,
}

/// The findings of a check of a durable log.
#[derive(Clone, PartialEq, Eq, Debug, Default)]
pub struct CheckReport {
    /// The number that tells the log from all others.
    pub identity: u128,
    /// The log's size in pages.
    pub pages: u32,
    /// Number of pages that were written at least once.
    pub live: u64,
    /// Number of segments that can hold pages: all but the reserved ones.
    pub segments: u32,
    /// Number of segments in use.
    pub used: u32,
    /// The number of the last complete commit.
    pub commit: u64,
    /// Damage to superblocks, journal and summaries: the first hundred findings.
    pub damage: Vec<DamagedError>,
    /// Number of all findings of damage, also of those that `damage` leaves out.
    pub damage_count: u64,
    /// Live pages whose content is not what was written: the first thousand.
    pub bad: Vec<BadPage>,
    /// Number of all live pages whose content is not what was written.
    pub bad_count: u64,
}

impl CheckReport {
    /// Whether the check found no damage and no bad page.
    pub fn is_clean(&self) -> bool {
        self.damage_count == 0 && self.bad_count == 0
    }

    fn found(&mut self, record: Record, slot: u32, bytes: Option<&weir_core::PageBytes>) {
        self.live += 1;
        if bytes.is_some_and(|bytes| record.proves(record.page, bytes)) {
            return;
        }
        self.bad_count += 1;
        if self.bad.len() < LISTED_MAX {
            self.bad.push(BadPage { page: record.page, slot, was_read: bytes.is_some() });
        }
    }
}

/// Verifies the durable log on `below`. The members and the segment's size in `config` must be the
/// log's own. Waits for the disks.
///
/// # Errors
/// Fails when there is no log, its disks are not in order, memory is missing, or `watch` ends the
/// work. Damage is no error, but is reported.
pub fn check(
    below: &Arc<dyn Store>,
    config: Config,
    clock: Clock<'_>,
    watch: Watch<'_>,
) -> Result<CheckReport, LogError> {
    let mut report = CheckReport::default();
    let mut findings = Findings::default();
    let looked = look(below, config, clock, watch, &mut report, &mut findings);
    match looked {
        Err(LogError::Damaged(damage)) => findings.add(damage),
        other => other?,
    }
    report.damage = findings.first;
    report.damage_count = findings.count;
    Ok(report)
}

fn look(
    below: &Arc<dyn Store>,
    config: Config,
    clock: Clock<'_>,
    watch: Watch<'_>,
    report: &mut CheckReport,
    findings: &mut Findings,
) -> Result<(), LogError> {
    let mut io = Blocking::open(&**below, clock, watch)?;
    let superblock = read_superblocks(&mut io, &**below, &config, findings)?;
    report.identity = superblock.identity;
    report.pages = superblock.pages;
    report.segments = superblock.segments - superblock.reserved();
    let sizes = sizes_of(&superblock, &**below, &config)?;
    let mut table = read_journal(&mut io, &superblock)?;
    report.commit = table.journal.commit;
    report.used = table.lives.iter().filter(|life| **life > 0).count() as u32;
    let map = Words::new(superblock.pages as usize).map_err(LogError::Memory)?;
    replay(&mut io, &superblock, &mut table, sizes.pass(), &map, findings)?;
    let places = superblock.segment_pages - 1;
    let used: Vec<u32> = (0..).zip(&table.lives).filter(|(_, life)| **life > 0).map(|(at, _)| at).collect();
    let mut live: Vec<(u32, Record)> = Vec::new();
    let stopped = |ended| match ended {
        crate::blocking::Ended::Stopped(error) => LogError::Stopped(error),
        crate::blocking::Ended::Fault(fault) => LogError::Write { store: below.name().to_owned(), fault },
    };
    let bytes = |segments: usize| segments as u64 * u64::from(superblock.segment_pages) * PAGE_SIZE as u64;
    for (number, segment) in used.iter().enumerate() {
        io.tell(bytes(number), bytes(used.len())).map_err(stopped)?;
        let first = segment * superblock.segment_pages;
        live.clear();
        let mut gather = |place: u32, record: Record| {
            let is_live = record.page < superblock.pages
                && map.at(record.page as usize).load(Relaxed) == first + place + 1;
            if is_live {
                live.push((first + place, record));
            }
        };
        match table.inline.get(segment) {
            Some(inline) => (0..).zip(&inline.records).for_each(|(place, record)| gather(place, *record)),
            None => io.read(std::iter::once(first + places), |_, page| {
                // If the summary is damaged, `replay` has reported that already.
                if let Ok(summary) = summary_of(&superblock, &table, *segment, page.ok()) {
                    (0..places).zip(summary.records()).for_each(|(place, record)| gather(place, record));
                }
            }),
        }
        io.read(live.iter().map(|(slot, _)| *slot), |at, page| {
            let (slot, record) = live[at];
            report.found(record, slot, page.ok());
        });
    }
    io.tell(bytes(used.len()), bytes(used.len())).map_err(stopped)
}
