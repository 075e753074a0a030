//! Devices of zram, the kernel's compressed memory.

use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};
use std::{fs, io};

/// The name of the file in a run's directory that has the numbers of the run's zram devices. A
/// command that cleans up after a killed run reads it.
pub const NOTE: &str = "zram";

/// A zram device that this process made, removed when dropped.
#[derive(Debug)]
pub struct Zram(pub u32);

impl Zram {
    /// Makes a zram device of `bytes` bytes, and adds its number to the file [`NOTE`] in `scratch`.
    ///
    /// # Errors
    /// Fails when the kernel has no zram, or this process may not use it.
    pub fn new(bytes: u64, scratch: &Path) -> io::Result<Zram> {
        let number = fs::read_to_string("/sys/class/zram-control/hot_add")?;
        let zram = Zram(number.trim().parse().map_err(io::Error::other)?);
        let note = scratch.join(NOTE);
        let before = fs::read_to_string(&note).unwrap_or_default();
        fs::write(&note, format!("{before}{}\n", zram.0))?;
        fs::write(format!("/sys/block/zram{}/disksize", zram.0), bytes.to_string())?;
        Ok(zram)
    }

    /// The path of the device's node.
    pub fn path(&self) -> PathBuf {
        PathBuf::from(format!("/dev/zram{}", self.0))
    }
}

impl Drop for Zram {
    fn drop(&mut self) {
        let begun = Instant::now();
        while let Err(error) = fs::write("/sys/class/zram-control/hot_remove", self.0.to_string()) {
            // The device is gone: another process has removed it already.
            if !Path::new(&format!("/sys/block/zram{}", self.0)).exists() {
                return;
            }
            if begun.elapsed() > Duration::from_secs(5) {
                eprintln!("weir: cannot remove zram{}: {error}", self.0);
                return;
            }
            std::thread::sleep(Duration::from_millis(20));
        }
    }
}

#[cfg(test)]
mod tests {
    use super::Zram;
    use crate::fixture;
    use rustix::mount::{MountFlags, mount};
    use std::fs;

    #[test]
    fn a_device_that_stays_is_named_and_one_that_has_gone_is_not() {
        let name = "zram::tests::a_device_that_stays_is_named_and_one_that_has_gone_is_not";
        let said = fixture::alone(name, || {
            // A kernel without the file that removes a device.
            mount("none", "/sys", "tmpfs", MountFlags::empty(), None).unwrap();
            fs::create_dir_all("/sys/block/zram7").unwrap();
            drop(Zram(6));
            drop(Zram(7));
        });
        let Some(said) = said else { return };
        let lines: Vec<&str> = said.lines().collect();
        assert_eq!(lines, ["weir: cannot remove zram7: No such file or directory (os error 2)"]);
    }
}
