//! The machine and the time of a benchmark, as the kernel reports them.

use std::fs;
use std::process::Command;
use std::time::{SystemTime, UNIX_EPOCH};

use serde::{Deserialize, Serialize};

/// The machine under the benchmark. A field for something that the machine lacks is "none".
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Machine {
    /// The processor's model name.
    pub cpu: String,
    /// Number of processors that this process may run on.
    pub cores: usize,
    /// The kernel's release.
    pub kernel: String,
    /// The NVIDIA cards, with the names that their driver gives them.
    pub gpu: String,
    /// The version of the cards' driver.
    pub driver: String,
}

impl Machine {
    /// The machine that this process runs on.
    pub fn this() -> Self {
        Machine {
            cpu: read("/proc/cpuinfo").and_then(|text| field(&text, "model name")).unwrap_or_else(none),
            cores: std::thread::available_parallelism().map_or(1, usize::from),
            kernel: read("/proc/sys/kernel/osrelease").unwrap_or_else(none),
            gpu: gpus().unwrap_or_else(none),
            driver: read("/proc/driver/nvidia/version")
                .and_then(|text| driver_version(&text))
                .unwrap_or_else(none),
        }
    }
}

fn none() -> String {
    "none".to_owned()
}

fn read(path: &str) -> Option<String> {
    fs::read_to_string(path).ok().map(|text| text.trim().to_owned())
}

/// The value of the first line `key : value` in a text such as `/proc/cpuinfo`.
fn field(text: &str, key: &str) -> Option<String> {
    text.lines().find_map(|line| {
        let (name, value) = line.split_once(':')?;
        (name.trim() == key).then(|| value.trim().to_owned())
    })
}

/// The cards; those of one model are counted, as "2 x NVIDIA H200".
fn gpus() -> Option<String> {
    let mut models: Vec<String> = fs::read_dir("/proc/driver/nvidia/gpus")
        .ok()?
        .filter_map(|entry| field(&fs::read_to_string(entry.ok()?.path().join("information")).ok()?, "Model"))
        .collect();
    models.sort();
    let mut names: Vec<String> = Vec::new();
    for same in models.chunk_by(|a, b| a == b) {
        names.push(if same.len() == 1 { same[0].clone() } else { format!("{} x {}", same.len(), same[0]) });
    }
    (!names.is_empty()).then(|| names.join(", "))
}

/// The version in a line such as "NVRM version: NVIDIA UNIX Open Kernel Module for x86_64
/// 580.159.04 Release Build ...".
fn driver_version(text: &str) -> Option<String> {
    let line = text.lines().find(|line| line.starts_with("NVRM version"))?;
    line.split_whitespace()
        .find(|word| word.contains('.') && word.chars().all(|c| c.is_ascii_digit() || c == '.'))
        .map(str::to_owned)
}

/// The commit under test: `WEIR_COMMIT` if it is set (on a machine without the repository), else
/// git's answer here, with "-dirty" if the tree has changes.
pub(super) fn commit() -> String {
    if let Ok(commit) = std::env::var("WEIR_COMMIT") {
        return commit;
    }
    let git =
        Command::new("git").args(["describe", "--always", "--abbrev=12", "--dirty", "--exclude=*"]).output();
    match git {
        Ok(output) if output.status.success() => String::from_utf8_lossy(&output.stdout).trim().to_owned(),
        _ => "unknown".to_owned(),
    }
}

/// The time now in UTC, as RFC 3339 writes it.
pub(super) fn utc_now() -> String {
    let seconds = SystemTime::now().duration_since(UNIX_EPOCH).map_or(0, |since| since.as_secs());
    rfc3339(seconds)
}

/// The date of a number of seconds since 1970 (days to civil date: Howard Hinnant,
/// "chrono-Compatible Low-Level Date Algorithms").
fn rfc3339(seconds: u64) -> String {
    let (days, second) = (seconds / 86_400 + 719_468, seconds % 86_400);
    let (era, day_of_era) = (days / 146_097, days % 146_097);
    let year_of_era = (day_of_era - day_of_era / 1_460 + day_of_era / 36_524 - day_of_era / 146_096) / 365;
    let day_of_year = day_of_era - (365 * year_of_era + year_of_era / 4 - year_of_era / 100);
    let shifted = (5 * day_of_year + 2) / 153;
    let day = day_of_year - (153 * shifted + 2) / 5 + 1;
    let month = if shifted < 10 { shifted + 3 } else { shifted - 9 };
    let year = era * 400 + year_of_era + u64::from(month <= 2);
    let (hour, minute, second) = (second / 3_600, second / 60 % 60, second % 60);
    format!("{year:04}-{month:02}-{day:02}T{hour:02}:{minute:02}:{second:02}Z")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn dates_are_those_of_the_calendar() {
        for (seconds, date) in [
            (0, "1970-01-01T00:00:00Z"),
            (951_782_399, "2000-02-28T23:59:59Z"),
            (951_782_400, "2000-02-29T00:00:00Z"),
            (1_798_761_599, "2026-12-31T23:59:59Z"),
            (4_107_542_400, "2100-03-01T00:00:00Z"),
        ] {
            assert_eq!(rfc3339(seconds), date);
        }
    }

    #[test]
    fn the_driver_is_known_by_its_version_only() {
        let text = "NVRM version: NVIDIA UNIX Open Kernel Module for x86_64  580.159.04  Release Build  (x@y)\n\
                    GCC version:  gcc version 13.3.0\n";
        assert_eq!(driver_version(text).as_deref(), Some("580.159.04"));
        assert_eq!(driver_version("GCC version: 13.3.0"), None);
    }

    #[test]
    fn this_machine_has_a_processor_and_a_kernel() {
        let machine = Machine::this();
        assert!(machine.cores >= 1);
        assert_ne!(machine.kernel, "none");
    }
}
