//! `weir cache check`: verifies a durable log that nobody uses.

use super::home::{self, HomeUrl};
use serde::Serialize;
use weir_cli::failure::Failure;
use weir_core::{ByteSize, PAGE_SIZE};
use weir_log::{BadPage, CheckReport};

/// Largest number of bad pages that the report names one by one.
const NAMED_MAX: usize = 20;

/// A check's findings, as `--json` prints them.
#[derive(Debug, Serialize)]
struct Report {
    schema: u32,
    is_clean: bool,
    identity: String,
    bytes: u64,
    live_bytes: u64,
    segments: u32,
    used_segments: u32,
    commit: u64,
    damage: Vec<String>,
    damage_count: u64,
    bad_pages: Vec<Bad>,
    bad_page_count: u64,
}

/// A page whose content is not the written one.
#[derive(Debug, Serialize)]
struct Bad {
    page: u32,
    disk: String,
    /// The page's offset on the disk, in bytes.
    offset: u64,
    could_be_read: bool,
}

/// Verifies the log on `home`, and prints the findings.
///
/// # Errors
/// Fails when there is no log, the log cannot be read, or something is wrong with it.
pub fn run(home: &HomeUrl, json: bool) -> Result<(), Failure> {
    let found = home::check(home)?;
    let report = Report::new(home, &found);
    if json {
        println!("{}", serde_json::to_string_pretty(&report).map_err(Failure::failed)?);
    } else {
        report.print();
    }
    if found.is_clean() {
        return Ok(());
    }
    let count = found.damage_count + found.bad_count;
    Err(Failure::Failed(format!(
        "the durable log is damaged: {count} findings; copy what can be read, and look at the health of its disks"
    )))
}

impl Report {
    fn new(home: &HomeUrl, found: &CheckReport) -> Self {
        let bytes = |pages: u64| pages * PAGE_SIZE as u64;
        let bad = |bad: &BadPage| {
            let (disk, offset) = home.position(bad.slot);
            Bad { page: bad.page, disk: disk.display().to_string(), offset, could_be_read: bad.was_read }
        };
        Report {
            schema: 1,
            is_clean: found.is_clean(),
            identity: format!("{:032x}", found.identity),
            bytes: bytes(found.pages.into()),
            live_bytes: bytes(found.live),
            segments: found.segments,
            used_segments: found.used,
            commit: found.commit,
            damage: found.damage.iter().map(ToString::to_string).collect(),
            damage_count: found.damage_count,
            bad_pages: found.bad.iter().map(bad).collect(),
            bad_page_count: found.bad_count,
        }
    }

    fn print(&self) {
        println!(
            "log       {}: {} of {} live, {} of {} segments used, commit {}",
            self.identity,
            ByteSize(self.live_bytes),
            ByteSize(self.bytes),
            self.used_segments,
            self.segments,
            self.commit
        );
        for damage in &self.damage {
            println!("damage    {damage}");
        }
        if self.damage_count > self.damage.len() as u64 {
            println!("damage    and {} more", self.damage_count - self.damage.len() as u64);
        }
        for Bad { page, disk, offset, could_be_read } in self.bad_pages.iter().take(NAMED_MAX) {
            let what = if *could_be_read { "is not the written one" } else { "cannot be read" };
            println!("page {page} at byte {offset} of {disk} {what}");
        }
        let named = self.bad_pages.len().min(NAMED_MAX) as u64;
        if self.bad_page_count > named {
            println!("pages     and {} more", self.bad_page_count - named);
        }
        if self.is_clean {
            println!("clean     every live page is the written one");
        }
    }
}
