//! The few kernel settings that `weir on` changes, each with its reason, and how each is restored.

use super::state::{Front, Journal, Step};
use std::fs;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use weir_cli::failure::Failure;
use weir_system::Machine;

/// A kernel setting, and the value that it is to have.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct Wish {
    /// The setting's file, below `/proc/sys` or `/sys`.
    pub path: PathBuf,
    /// The setting's value now.
    pub before: String,
    /// The setting's new value.
    pub after: String,
    /// The reason for the change, in a few words.
    pub why: &'static str,
}

/// The changes for this machine. A setting that the machine lacks, or that is right already, is
/// left alone. docs/desktop.md has a figure for each change, and for a setting that is not changed:
/// vm.page-cluster.
pub fn wishes(machine: &Machine, front: Front) -> Vec<Wish> {
    reserve(machine, front).into_iter().collect()
}

/// Raises the kernel's reserve of free memory. Every NBD reply takes a kernel buffer, even when no
/// memory is free, and the kernel's NBD threads may take it from this reserve.
fn reserve(machine: &Machine, front: Front) -> Option<Wish> {
    const MIN_FREE: &str = "/proc/sys/vm/min_free_kbytes";
    if front != Front::Nbd {
        return None;
    }
    let wanted = reserve_kib(machine.size("/proc/meminfo", "MemTotal")?.0 >> 10);
    let before = machine.text(MIN_FREE)?;
    (wanted > before.parse().ok()?).then(|| Wish {
        path: MIN_FREE.into(),
        before,
        after: wanted.to_string(),
        why: "a reserve for the server's replies",
    })
}

/// The size of the kernel's reserve in KiB: a twentieth of the memory, at least 16 MiB and at most
/// 128 MiB.
fn reserve_kib(total_kib: u64) -> u64 {
    (total_kib / 20).clamp(16 << 10, 128 << 10)
}

/// Changes one setting, after the journal has recorded the change.
pub fn apply(wish: &Wish, journal: &mut Journal) -> Result<(), Failure> {
    journal.intend(Step::Setting {
        path: wish.path.clone(),
        before: wish.before.clone(),
        after: wish.after.clone(),
        why: wish.why.to_owned(),
    })?;
    write(&wish.path, &wish.after)
}

/// Restores one setting, unless another program has changed it meanwhile: then that value stays.
pub fn restore(path: &Path, before: &str, after: &str) -> Result<(), Failure> {
    match fs::read_to_string(path) {
        Ok(now) if now.trim() == after => write(path, before),
        Ok(now) if now.trim() == before => Ok(()),
        Ok(now) => {
            println!(
                "{} is {} by now, not the {after} that weir on set: left alone",
                path.display(),
                now.trim()
            );
            Ok(())
        }
        Err(error) => Err(Failure::Failed(format!("cannot read {}: {error}", path.display()))),
    }
}

fn write(path: &Path, value: &str) -> Result<(), Failure> {
    fs::write(path, value)
        .map_err(|error| Failure::Failed(format!("cannot set {} to {value}: {error}", path.display())))
}

/// Runs `systemctl` and hides its output.
pub fn systemctl(arguments: &[&str]) -> Result<(), Failure> {
    let output = Command::new("systemctl")
        .args(arguments)
        .stdin(Stdio::null())
        .output()
        .map_err(|error| Failure::Failed(format!("cannot run systemctl: {error}")))?;
    if output.status.success() {
        return Ok(());
    }
    let said = String::from_utf8_lossy(&output.stderr).trim().to_owned();
    Err(Failure::Failed(format!("systemctl {}: {said}", arguments.join(" "))))
}

#[cfg(test)]
mod tests {
    use super::*;
    use weir_system::fixture::Fixture;

    #[test]
    fn what_the_kernel_reads_ahead_is_left_to_it() {
        let machine = Fixture::new("cluster").with("/proc/sys/vm/page-cluster", "3\n");
        for front in [Front::Ublk, Front::Nbd, Front::Fuse] {
            assert_eq!(wishes(&machine.machine(), front), []);
        }
    }

    #[test]
    fn nbd_gets_a_reserve_unless_there_is_a_larger_one() {
        let machine = |reserve: &str| {
            Fixture::new("reserve")
                .with("/proc/meminfo", "MemTotal:  1048576 kB\n")
                .with("/proc/sys/vm/min_free_kbytes", reserve)
        };
        let small = machine("4096\n");
        assert_eq!(wishes(&small.machine(), Front::Nbd)[0].after, "52428");
        assert_eq!(wishes(&small.machine(), Front::Ublk), []);
        let large = machine("90000\n");
        assert_eq!(wishes(&large.machine(), Front::Nbd), []);
        assert_eq!((reserve_kib(1 << 10), reserve_kib(1 << 30)), (16 << 10, 128 << 10));
    }

    #[test]
    fn a_setting_goes_back_unless_somebody_else_changed_it() {
        let path = std::env::temp_dir().join(format!("weir-setting-{}", std::process::id()));
        for (now, then) in [("0\n", "3"), ("3\n", "3\n"), ("5\n", "5\n")] {
            fs::write(&path, now).expect("written");
            restore(&path, "3", "0").expect("restored");
            assert_eq!(fs::read_to_string(&path).expect("there"), then, "from {now:?}");
        }
        fs::remove_file(&path).expect("removed");
    }
}
