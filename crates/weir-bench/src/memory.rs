//! `weir bench memory`: the memory that a volume takes besides the pages themselves.
//!
//! The volume is over a store that keeps nothing. So all memory that the process gains is the
//! volume's own: page map, slot records, their counts, lanes. Every page is written before the
//! count, so that no memory is left untouched and uncounted. Two counts must agree: the volume's
//! own, and the growth of the process as the system reports it.

use crate::report::{Goal, Report, Row};
use crate::steps::Steps;
use std::sync::Arc;
use weir_core::{PAGE_SIZE, PageBytes, PageNo, Slot};
use weir_store::{Lane, OpenError, Progress, State, Store, Ticket};
use weir_volume::{Config, Volume};

/// The plan of the memory benchmark.
#[derive(Clone, Copy, Debug)]
pub struct Plan {
    /// The volume's size in bytes.
    pub bytes: u64,
    /// Number of lanes that are open.
    pub lanes: usize,
    /// Operations that each lane may have in flight.
    pub depth: usize,
}

impl Default for Plan {
    fn default() -> Self {
        Plan { bytes: 64 << 30, lanes: 16, depth: 64 }
    }
}

/// The reason why nothing could be measured.
#[derive(Debug, thiserror::Error)]
pub enum MemoryError {
    /// The volume could not be made.
    #[error("cannot make the volume")]
    Volume(#[from] weir_volume::CreateError),
    /// A lane could not be opened.
    #[error("cannot open a lane")]
    Lane(#[from] OpenError),
    /// The size of this process could not be read.
    #[error("cannot read /proc/self/statm")]
    Size(#[from] std::io::Error),
}

/// A store of any size that drops every page.
#[derive(Debug)]
struct Forgetful(u32);

struct ForgetfulLane;

impl Store for Forgetful {
    fn name(&self) -> &str {
        "forgetful"
    }

    fn slots(&self) -> u32 {
        self.0
    }

    fn lane(&self, _depth: usize) -> Result<Box<dyn Lane>, OpenError> {
        Ok(Box::new(ForgetfulLane))
    }

    fn state(&self, _member: u32) -> State {
        State::Online
    }

    fn unfit_for_swap(&self) -> Option<String> {
        None
    }
}

impl Lane for ForgetfulLane {
    fn write(&mut self, _ticket: Ticket, _slot: Slot, _page: &PageBytes) -> Progress {
        Progress::Done(Ok(()))
    }

    fn read(&mut self, _ticket: Ticket, _slot: Slot, _page: &mut PageBytes) -> Progress {
        Progress::Done(Ok(()))
    }
}

/// Fills a volume as the plan describes it, and counts its memory.
///
/// # Errors
/// Fails when there is not enough memory for the volume.
pub fn run(plan: &Plan) -> Result<Report, MemoryError> {
    let pages = u32::try_from(plan.bytes / PAGE_SIZE as u64).unwrap_or(u32::MAX);
    let config = Config { pages, lanes: plan.lanes, depth: plan.depth };
    // The progress bar moves this many times. Make it before the first count of memory, so that its
    // own memory does not count as the volume's.
    const MOVES: u32 = 64;
    let step = pages.div_ceil(MOVES).max(1);
    let steps = Steps::new(pages.div_ceil(step) as usize);
    steps.part("writing");
    let before = resident_bytes()?;
    let volume = Volume::create(config, vec![Arc::new(Forgetful(config.slots()))])?;
    let mut lanes = (0..plan.lanes).map(|_| volume.lane()).collect::<Result<Vec<_>, _>>()?;
    let mut page = [1; PAGE_SIZE];
    for number in 0..pages {
        page[..4].copy_from_slice(&number.to_le_bytes());
        let lane = &mut lanes[number as usize % plan.lanes];
        assert_eq!(
            lane.write(0, PageNo(number), &page),
            Progress::Done(Ok(())),
            "the store takes everything"
        );
        lane.submit();
        if (number + 1).is_multiple_of(step) {
            steps.end();
        }
    }
    let grown = resident_bytes()?.saturating_sub(before);
    let stated = volume.memory_bytes();
    drop(lanes);

    let mut report = Report::new("memory", 1);
    let per_page = |bytes: u64| bytes as f64 / f64::from(pages);
    report
        .rows
        .push(Row::lower("map", "bytes_per_page", per_page(volume.map_bytes())).goal(Goal::Value(8.0)));
    let per_slot = (stated - volume.map_bytes()) as f64 / f64::from(config.slots());
    // The slot records, and the few words for each chunk, take whole pages of memory. The last of
    // these pages is only partly filled, so the goal allows one page more.
    let goal = 8.01 + PAGE_SIZE as f64 / f64::from(config.slots());
    report.rows.push(Row::lower("records", "bytes_per_slot", per_slot).goal(Goal::Value(goal)));
    report.rows.push(Row::lower("whole_process", "bytes_per_page", per_page(grown)));
    report.rows.push(Row::lower("whole_process", "mib", grown as f64 / f64::from(1 << 20)));
    Ok(report)
}

fn resident_bytes() -> std::io::Result<u64> {
    let statm = std::fs::read_to_string("/proc/self/statm")?;
    let pages = statm.split_whitespace().nth(1).and_then(|field| field.parse::<u64>().ok());
    pages.map(|pages| pages * PAGE_SIZE as u64).ok_or_else(|| std::io::ErrorKind::InvalidData.into())
}
