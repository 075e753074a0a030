//! Places for the tests of stores on disks: directories, small file systems, loop devices. All are
//! removed when dropped.

use std::path::{Path, PathBuf};
use std::process::Command;
use std::sync::atomic::{AtomicU32, Ordering};

/// A directory of a test's own.
pub struct Directory(PathBuf);

impl Directory {
    pub fn new() -> Self {
        static NEXT: AtomicU32 = AtomicU32::new(0);
        let number = NEXT.fetch_add(1, Ordering::Relaxed);
        let path = Path::new("/var/tmp").join(format!("weir-store-{}-{number}", std::process::id()));
        std::fs::create_dir(&path).expect("a new directory");
        Directory(path)
    }

    pub fn file(&self, name: &str) -> PathBuf {
        self.0.join(name)
    }

    /// Mounts a tmpfs of `bytes` over the directory, which only the calling thread (and processes
    /// it starts) sees. `None`, with a line on stderr, for a user who may not mount.
    pub fn mount_tmpfs(&self, bytes: u64) -> Option<()> {
        use rustix::mount::{MountFlags, MountPropagationFlags, mount, mount_change};
        let private = MountPropagationFlags::PRIVATE | MountPropagationFlags::REC;
        // SAFETY: a new mount namespace changes nothing that memory safety depends on.
        let mounted = unsafe { rustix::thread::unshare_unsafe(rustix::thread::UnshareFlags::NEWNS) }
            .and_then(|()| mount_change("/", private))
            .and_then(|()| mount("none", &self.0, c"tmpfs", MountFlags::empty(), &*size_option(bytes)));
        match mounted {
            Ok(()) => Some(()),
            Err(errno) => {
                eprintln!("skipped: mounting a tmpfs needs root here ({errno})");
                None
            }
        }
    }
}

fn size_option(bytes: u64) -> std::ffi::CString {
    std::ffi::CString::new(format!("size={bytes}")).expect("no zero byte")
}

impl Drop for Directory {
    fn drop(&mut self) {
        let _ = rustix::mount::unmount(&self.0, rustix::mount::UnmountFlags::DETACH);
        let _ = std::fs::remove_dir_all(&self.0);
    }
}

/// A block device over a file.
pub struct Loop(pub PathBuf);

impl Loop {
    /// Attaches `file`. `None`, with a line on stderr, if that is not allowed.
    pub fn over(file: &Path) -> Option<Self> {
        let output = Command::new("losetup").args(["--find", "--show"]).arg(file).output().expect("losetup");
        if !output.status.success() {
            eprintln!("skipped: losetup: {}", String::from_utf8_lossy(&output.stderr).trim());
            return None;
        }
        Some(Loop(String::from_utf8(output.stdout).expect("a path").trim().into()))
    }
}

impl Drop for Loop {
    fn drop(&mut self) {
        let _ = Command::new("losetup").arg("--detach").arg(&self.0).status();
    }
}
