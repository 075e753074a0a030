//! Settings of the kernel's memory management that are changed for a while.

use std::path::Path;
use std::{fs, io};

/// The kernel's setting `vm.page-cluster`. With the value n, a page fault reads at most 2^n pages
/// from swap. Dropping this restores the earlier value.
#[derive(Debug)]
pub struct PageCluster(String);

impl PageCluster {
    const FILE: &str = "/proc/sys/vm/page-cluster";
    /// The name of the file with the setting's earlier value, and with the boot in which it was
    /// read.
    const NOTE: &str = "page-cluster";
    const BOOT: &str = "/proc/sys/kernel/random/boot_id";

    /// Reads the present value, and writes it to a file in `scratch`, where a command that cleans
    /// up after a killed process finds it.
    ///
    /// # Errors
    /// Fails when the setting cannot be read, or the file in `scratch` cannot be written.
    pub fn kept(scratch: &Path) -> io::Result<PageCluster> {
        let was = fs::read_to_string(Self::FILE)?;
        let boot = fs::read_to_string(Self::BOOT)?;
        fs::write(scratch.join(Self::NOTE), format!("{}\n{boot}", was.trim()))?;
        Ok(PageCluster(was))
    }

    /// Gives the setting its earlier value, from the file that a killed run has left, unless the
    /// machine was booted since.
    ///
    /// # Errors
    /// Fails when this process may not change the setting.
    pub fn put_back(scratch: &Path) -> io::Result<()> {
        let note = fs::read_to_string(scratch.join(Self::NOTE)).unwrap_or_default();
        match note.split_once('\n') {
            Some((was, boot)) if boot == fs::read_to_string(Self::BOOT)? => fs::write(Self::FILE, was),
            _ => Ok(()),
        }
    }

    /// Sets `vm.page-cluster` to `value`.
    ///
    /// # Errors
    /// Fails when this process may not change the setting.
    pub fn set(&self, value: u8) -> io::Result<()> {
        fs::write(Self::FILE, value.to_string())
    }
}

impl Drop for PageCluster {
    fn drop(&mut self) {
        if let Err(error) = fs::write(Self::FILE, &self.0) {
            eprintln!("weir: cannot put {} back to {}: {error}", Self::FILE, self.0.trim());
        }
    }
}

#[cfg(test)]
mod tests {
    use super::PageCluster;
    use crate::fixture;
    use rustix::mount::mount_bind;

    #[test]
    fn a_setting_that_cannot_be_put_back_is_named_with_its_value() {
        let said =
            fixture::alone("vm::tests::a_setting_that_cannot_be_put_back_is_named_with_its_value", || {
                let scratch = std::env::temp_dir().join(format!("weir-vm-{}", std::process::id()));
                std::fs::create_dir(&scratch).unwrap();
                let kept = PageCluster::kept(&scratch).unwrap();
                std::fs::remove_dir_all(&scratch).unwrap();
                // No write to this file succeeds.
                mount_bind("/dev/full", PageCluster::FILE).unwrap();
                drop(kept);
            });
        let Some(said) = said else { return };
        let value = std::fs::read_to_string(PageCluster::FILE).unwrap();
        let expected = format!(
            "weir: cannot put /proc/sys/vm/page-cluster back to {}: No space left on device (os error 28)",
            value.trim()
        );
        assert!(said.lines().any(|line| line == expected), "{said}");
    }
}
