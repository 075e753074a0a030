//! `weir stack status`: what bcache says of the stack.

use super::destroy::{is_stopped, lacks_pages};
use super::kernel::{Kernel, rounded};
use super::state::{self, Phase, State};
use super::system::{Link, System};
use serde::Serialize;
use std::fmt;
use std::path::Path;
use weir_cli::failure::Failure;
use weir_core::ByteSize;

/// The condition of a stack.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Serialize)]
#[serde(rename_all = "kebab-case")]
pub enum Condition {
    /// All that was written is on the disks too.
    Clean,
    /// The cache has pages that the disks lack.
    Dirty,
    /// The cache is alive. Bcache has stopped the array or disk, and can take the array or disk
    /// again.
    BackingStopped,
    /// The cache is gone. It had no page that the disks lack.
    CacheDead,
    /// Pages that only the cache had are lost.
    PagesLost,
    /// A create or destroy was interrupted, or still runs.
    Unfinished,
}

/// The state of a stack, as `--json` prints it.
#[derive(Clone, PartialEq, Debug, Serialize)]
struct Report {
    schema: u32,
    condition: Condition,
    /// The device to use. `None`: bcache shows no device, for instance because the cache is dead.
    device: Option<String>,
    bytes: u64,
    /// The stripe, or the single disk.
    backing: String,
    homes: Vec<String>,
    cache: String,
    cache_bytes: u64,
    /// Bytes that only the cache has, to three digits.
    dirty_bytes: u64,
    hits: u64,
    misses: u64,
    /// Bytes that went past the cache, to three digits.
    bypassed_bytes: u64,
    mode: String,
    sequential_cutoff: String,
    writeback_percent: String,
    congested_read_threshold_us: String,
    congested_write_threshold_us: String,
}

/// Prints the status of the stack whose journal is in a directory.
pub fn run(directory: &Path, json: bool) -> Result<(), Failure> {
    let Some(state) = state::read(directory)? else {
        return Err(Failure::Failed(format!(
            "no stack: {} has no journal; weir stack create makes one",
            directory.display()
        )));
    };
    let report = look(&Kernel::this(), &state);
    if json {
        println!("{}", serde_json::to_string_pretty(&report).map_err(Failure::failed)?);
    } else {
        print!("{report}");
    }
    Ok(())
}

/// The condition of the stack that a journal describes.
pub fn condition(system: &dyn System, state: &State) -> Condition {
    let backing = state.backing().unwrap_or(Path::new(""));
    let uuid = state.set().map_or("", |(_, uuid, _)| uuid);
    let link = system.backing(backing).map(|it| it.link);
    let is_there = system.has_set(uuid);
    // If the cache is alive and still has the pages, they are not lost.
    let can_come = is_there && (link == Some(Link::Dirty) || is_stopped(system, backing, uuid));
    match link {
        _ if !uuid.is_empty() && !can_come && lacks_pages(system, backing) => Condition::PagesLost,
        _ if state.phase != Phase::Up => Condition::Unfinished,
        None if can_come => Condition::BackingStopped,
        Some(Link::Dirty) => Condition::Dirty,
        Some(_) if is_there => Condition::Clean,
        _ => Condition::CacheDead,
    }
}

fn look(kernel: &Kernel, state: &State) -> Report {
    let backing = state.backing().unwrap_or(Path::new(""));
    let (cache, uuid, cache_bytes) = state.set().unwrap_or((Path::new(""), "", 0));
    let found = kernel.backing(backing);
    let value = |name: &str| kernel.backing_value(backing, name).unwrap_or_default();
    let count = |name: &str| value(&format!("stats_total/{name}"));
    let threshold = |name: &str| kernel.set_value(uuid, name).unwrap_or_default();
    let device = found.as_ref().and_then(|it| it.device.as_ref()).map(|name| format!("/dev/{name}"));
    Report {
        schema: 1,
        condition: condition(kernel, state),
        bytes: device.as_ref().map_or(0, |device| kernel.size(Path::new(device)).0),
        device,
        backing: backing.display().to_string(),
        homes: state.homes().iter().map(|path| path.display().to_string()).collect(),
        cache: cache.display().to_string(),
        cache_bytes,
        dirty_bytes: found.map_or(0, |it| it.dirty),
        hits: count("cache_hits").parse().unwrap_or(0),
        misses: count("cache_misses").parse().unwrap_or(0),
        bypassed_bytes: rounded(&count("bypassed")).unwrap_or(0),
        mode: chosen(&value("cache_mode")),
        sequential_cutoff: value("sequential_cutoff"),
        writeback_percent: value("writeback_percent"),
        congested_read_threshold_us: threshold("congested_read_threshold_us"),
        congested_write_threshold_us: threshold("congested_write_threshold_us"),
    }
}

/// The choice that sysfs marks among all: `writethrough [writeback] none`.
fn chosen(text: &str) -> String {
    let marked = text.split_whitespace().find_map(|word| word.strip_prefix('[')?.strip_suffix(']'));
    marked.unwrap_or_default().to_owned()
}

impl fmt::Display for Report {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let device = self.device.as_deref().unwrap_or("no device");
        let homes = self.homes.join(", ");
        let over = if self.homes.len() > 1 { format!("{} of {homes}", self.backing) } else { homes };
        writeln!(f, "{device}: {} on {over}", ByteSize(self.bytes))?;
        let condition = match self.condition {
            Condition::Clean => "well: all that was written is on the disks too",
            Condition::Dirty => "well: some pages are in the cache alone until they go home",
            Condition::CacheDead => "the cache is dead: no page is lost, and the disks serve all",
            Condition::BackingStopped => {
                "bcache has stopped the disks, and their cache lives: weir stack destroy brings its pages home"
            }
            Condition::PagesLost => "pages that only the cache had are lost: see weir stack destroy",
            Condition::Unfinished => "not finished: run weir stack destroy, or create again",
        };
        writeln!(f, "{condition}")?;
        writeln!(
            f,
            "cache: {} of {}, {}; about {} dirty",
            self.cache,
            ByteSize(self.cache_bytes),
            self.mode,
            ByteSize(self.dirty_bytes)
        )?;
        let asked = self.hits + self.misses;
        let rate = self.hits * 100 / asked.max(1);
        writeln!(
            f,
            "hits: {} of {asked} ({rate} %); about {} went past the cache",
            self.hits,
            ByteSize(self.bypassed_bytes)
        )?;
        writeln!(
            f,
            "settings: sequential_cutoff {}, writeback_percent {}, congested thresholds {} and {} us",
            self.sequential_cutoff,
            self.writeback_percent,
            self.congested_read_threshold_us,
            self.congested_write_threshold_us
        )
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::stack::state::Step;
    use weir_system::fixture::Fixture;

    fn state(phase: Phase) -> State {
        let steps = vec![
            Step::Array {
                path: "/dev/md7".into(),
                uuid: "1:2:3:4".into(),
                members: vec!["/dev/sdb".into(), "/dev/sdc".into()],
            },
            Step::Backing { device: "/dev/md7".into(), uuid: Some("b".into()) },
            Step::Set { device: "/dev/nbd0".into(), uuid: "1-2".into(), bytes: 64 << 20 },
        ];
        State { schema: 1, version: "0".into(), phase, steps, has_lost: false }
    }

    fn machine(name: &str) -> Fixture {
        Fixture::new(name)
            .with("/sys/class/block/md7/bcache/state", "dirty\n")
            .with("/sys/class/block/md7/bcache/dirty_data", "3.5M\n")
            .with("/sys/class/block/md7/bcache/cache_mode", "writethrough [writeback] writearound none\n")
            .with("/sys/class/block/md7/bcache/sequential_cutoff", "4.0M\n")
            .with("/sys/class/block/md7/bcache/writeback_percent", "40\n")
            .with("/sys/class/block/md7/bcache/stats_total/cache_hits", "30\n")
            .with("/sys/class/block/md7/bcache/stats_total/cache_misses", "10\n")
            .with("/sys/class/block/md7/bcache/stats_total/bypassed", "1.0M\n")
    }

    #[test]
    fn what_bcache_says_is_in_the_report() {
        let fixture = machine("stack-report")
            .with("/sys/fs/bcache/1-2/block_size", "4.0k\n")
            .with("/sys/fs/bcache/1-2/congested_read_threshold_us", "0\n")
            .with("/sys/fs/bcache/1-2/congested_write_threshold_us", "0\n");
        let report = look(&Kernel::of(fixture.machine()), &state(Phase::Up));
        assert_eq!((report.condition, report.dirty_bytes), (Condition::Dirty, 7 << 19));
        assert_eq!((report.hits, report.misses, report.bypassed_bytes), (30, 10, 1 << 20));
        assert_eq!((report.mode.as_str(), report.homes.len()), ("writeback", 2));
        let said = report.to_string();
        for line in [
            "no device: 0B on /dev/md7 of /dev/sdb, /dev/sdc\n",
            "\nwell: some pages are in the cache alone until they go home\n",
            "\ncache: /dev/nbd0 of 64MiB, writeback; about 3.5MiB dirty\n",
            "\nhits: 30 of 40 (75 %); about 1MiB went past the cache\n",
            "\nsettings: sequential_cutoff 4.0M, writeback_percent 40, congested thresholds 0 and 0 us\n",
        ] {
            assert!(said.contains(line), "{said}");
        }
    }

    #[test]
    fn a_cache_that_is_gone_is_told_from_one_that_took_pages_along_and_from_an_unfinished_stack() {
        let fixture = machine("stack-dead");
        let look = |fixture: &Fixture, phase| look(&Kernel::of(fixture.machine()), &state(phase)).condition;
        assert_eq!(look(&fixture, Phase::Up), Condition::PagesLost);
        assert_eq!(look(&fixture, Phase::Destroying), Condition::PagesLost);
        let clean = Fixture::new("stack-clean").with("/sys/class/block/md7/bcache/state", "clean\n");
        assert_eq!(look(&clean, Phase::Up), Condition::CacheDead);
        assert_eq!(look(&clean, Phase::Destroying), Condition::Unfinished);
    }
}
