//! The machine as files: the content of `/proc`, `/sys`, `/dev` and the library directories.

use std::fs;
use std::path::{Path, PathBuf};
use weir_core::ByteSize;

/// A machine, seen through the directory that holds its files.
#[derive(Debug)]
pub struct Machine {
    root: PathBuf,
}

impl Machine {
    /// The machine that this process runs on.
    pub fn this() -> Self {
        Machine::below(Path::new("/"))
    }

    /// A test's machine, whose files are below `root`.
    pub fn below(root: &Path) -> Self {
        Machine { root: root.to_owned() }
    }

    fn at(&self, path: &str) -> PathBuf {
        self.root.join(path.trim_start_matches('/'))
    }

    /// A file's text without the white space around it, if it can be read.
    pub fn text(&self, path: &str) -> Option<String> {
        let bytes = fs::read(self.at(path)).ok()?;
        Some(String::from_utf8_lossy(&bytes).trim().to_owned())
    }

    /// The target of a symbolic link, if there is one.
    pub fn link(&self, path: &str) -> Option<PathBuf> {
        fs::read_link(self.at(path)).ok()
    }

    /// The value of `key` in a file of `key: value` lines, as `/proc/meminfo` is.
    pub fn value(&self, path: &str, key: &str) -> Option<String> {
        let text = self.text(path)?;
        text.lines().find_map(|line| Some(line.strip_prefix(key)?.strip_prefix(':')?.trim().to_owned()))
    }

    /// A size in `/proc/meminfo` or in a process's `status`.
    pub fn size(&self, path: &str, key: &str) -> Option<ByteSize> {
        let kib: u64 = self.value(path, key)?.strip_suffix(" kB")?.parse().ok()?;
        Some(ByteSize(kib << 10))
    }

    /// The memory that this process can take without making the kernel swap: what the machine has
    /// available, and what its cgroups still allow. `None` if that is unknown.
    pub fn available(&self) -> Option<ByteSize> {
        weir_core::available_below(&self.root).map(ByteSize)
    }

    /// The memory that all processes together can take, whatever this process's cgroups allow. It
    /// limits pages that are swapped in: the kernel charges these to the cgroups of their owners,
    /// and not to those of this process.
    pub fn available_to_all(&self) -> Option<ByteSize> {
        weir_core::available_to_all_below(&self.root).map(ByteSize)
    }

    /// The kernel's release, as `uname -r` has it; empty if that cannot be read.
    pub fn release(&self) -> String {
        self.text("/proc/sys/kernel/osrelease").unwrap_or_default()
    }

    /// The SMBIOS type of the machine's case, if it is a portable one.
    pub fn portable(&self) -> Option<u8> {
        // The types of a portable, laptop, notebook, sub-notebook, tablet, convertible and
        // detachable (SMBIOS 3.7, 7.4.1).
        const PORTABLE: [u8; 7] = [8, 9, 10, 14, 30, 31, 32];
        let case = self.text("/sys/class/dmi/id/chassis_type")?.parse().ok()?;
        PORTABLE.contains(&case).then_some(case)
    }

    /// Whether a file exists at this path.
    pub fn has(&self, path: &str) -> bool {
        self.at(path).exists()
    }

    /// Whether this process may open the file for reading and writing.
    pub fn may_use(&self, path: &str) -> bool {
        use rustix::fs::Access;
        rustix::fs::access(self.at(path), Access::READ_OK | Access::WRITE_OK).is_ok()
    }

    /// The bytes that a process without root's rights can still write in this path's file system.
    pub fn room(&self, path: &str) -> Option<ByteSize> {
        let file_system = rustix::fs::statvfs(self.at(path)).ok()?;
        Some(ByteSize(file_system.f_bavail.saturating_mul(file_system.f_frsize)))
    }

    /// The names in a directory that `wanted` accepts, sorted; none if there is no directory.
    pub fn names(&self, directory: &str, wanted: impl Fn(&str) -> bool) -> Vec<String> {
        let Ok(entries) = fs::read_dir(self.at(directory)) else { return Vec::new() };
        let mut names: Vec<String> = entries
            .filter_map(|entry| entry.ok()?.file_name().into_string().ok())
            .filter(|name| wanted(name))
            .collect();
        names.sort_unstable();
        names
    }

    /// The path of a shared library, from the loader's directories: those of distributions, WSL's,
    /// and those of `LD_LIBRARY_PATH`.
    pub fn library(&self, name: &str) -> Option<String> {
        let more = std::env::var("LD_LIBRARY_PATH").unwrap_or_default();
        let usual = [
            "/usr/lib/x86_64-linux-gnu",
            "/lib/x86_64-linux-gnu",
            "/usr/lib64",
            "/lib64",
            "/usr/lib",
            "/usr/local/lib",
            "/usr/lib/aarch64-linux-gnu",
            "/usr/lib/wsl/lib",
            "/usr/local/nvidia/lib64",
            "/run/opengl-driver/lib",
        ];
        more.split(':')
            .filter(|directory| Path::new(directory).is_absolute())
            .chain(usual)
            .map(|directory| format!("{directory}/{name}"))
            .find(|path| self.has(path))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_cgroup_bounds_what_one_process_may_take_and_not_what_all_may() {
        let root = std::env::temp_dir().join(format!("weir-machine-{}", std::process::id()));
        for (path, text) in [
            ("proc/meminfo", "MemTotal: 8192 kB\nMemAvailable:    4096 kB\n"),
            ("proc/self/cgroup", "0::/a\n"),
            ("sys/fs/cgroup/a/memory.max", "3000000\n"),
            ("sys/fs/cgroup/a/memory.current", "1000000\n"),
        ] {
            let path = root.join(path);
            fs::create_dir_all(path.parent().expect("it has one")).expect("made");
            fs::write(path, text).expect("written");
        }
        let machine = Machine::below(&root);
        let found =
            [machine.available(), machine.available_to_all(), machine.size("/proc/meminfo", "MemTotal")];
        fs::remove_dir_all(&root).expect("removed");
        assert_eq!(found, [Some(ByteSize(2_000_000)), Some(ByteSize(4 << 20)), Some(ByteSize(8 << 20))]);
        assert_eq!(machine.available(), None, "nobody says");
    }
}
