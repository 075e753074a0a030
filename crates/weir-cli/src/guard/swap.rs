//! The names that a benchmark of swap makes, and the removal of what a killed one left.

use rustix::io::Errno;
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};
use std::{fs, io, thread};
use weir_system::cgroup::Cgroup;
use weir_system::loop_device::{LoopDevice, LoopError};
use weir_system::swaps;
use weir_system::vm::PageCluster;
use weir_system::zram::{self, Zram};

/// Time between two looks at a swap that another process turns on or off.
const LOOK: Duration = Duration::from_millis(10);
/// Time that another process may take to turn a swap on or off.
const OTHERS: Duration = Duration::from_secs(30);

/// The directory of a benchmark's process: it holds sockets, files, and notes of the changes.
pub fn scratch_path(pid: u32) -> PathBuf {
    PathBuf::from(format!("/var/tmp/weir-bench-swap-{pid}"))
}

/// Turns off the swap that the dead process `pid` has made, removes its devices and restores the
/// kernel's setting. The servers of those devices must live until this returns. `scratch` is the
/// directory of that process. Changes of other processes stay.
///
/// # Errors
/// Fails with the first thing that could not be undone. A later call tries again.
pub fn undo(scratch: &Path, pid: u32) -> io::Result<()> {
    undo_within(OTHERS, scratch, pid)
}

/// Does what [`undo`] does, and waits for another process for `patience` at most.
fn undo_within(patience: Duration, scratch: &Path, pid: u32) -> io::Result<()> {
    if scratch.file_name() != scratch_path(pid).file_name() {
        return Ok(());
    }
    // The kernel shows a loop device's file by its canonical path, so compare with that one.
    let scratch = &fs::canonicalize(scratch)?;
    let cgroup = Cgroup::of(pid);
    if !cgroup.empty(patience) {
        return Err(io::Error::other("a process that it limited does not end"));
    }
    let is_ours = |file: &Path| file.starts_with(scratch);
    let begun = Instant::now();
    for device in
        loops().into_iter().filter(|device| device.backing_file().is_some_and(|file| is_ours(&file)))
    {
        let path = device.path().to_owned();
        loop {
            swapoff(&path)?;
            // A process that is about to exit may still have the device open, or turn its swap on
            // at the last moment.
            match LoopDevice::find(&path).map(LoopDevice::detach) {
                Ok(Err(LoopError::InUse(_))) if begun.elapsed() < patience => thread::sleep(LOOK),
                Ok(Err(error)) => return Err(io::Error::other(error)),
                // The device is detached, or it is gone already.
                Ok(Ok(())) | Err(_) => break,
            }
        }
    }
    for file in fs::read_dir(scratch)?.flatten() {
        swapoff(&file.path())?;
    }
    for number in fs::read_to_string(scratch.join(zram::NOTE)).unwrap_or_default().lines() {
        let zram = Zram(number.parse().map_err(io::Error::other)?);
        swapoff(&zram.path())?;
        drop(zram);
    }
    PageCluster::put_back(scratch)?;
    drop(cgroup);
    Ok(())
}

fn loops() -> Vec<LoopDevice> {
    let entries = fs::read_dir("/sys/block").into_iter().flatten().flatten();
    let names =
        entries.map(|entry| entry.file_name()).filter(|name| name.as_encoded_bytes().starts_with(b"loop"));
    names.filter_map(|name| LoopDevice::find(&Path::new("/dev").join(name)).ok()).collect()
}

/// Turns swap off if it is on. The kernel also lists a swap on which swapon(2) or another
/// swapoff(2) is still at work. For such a swap it returns `EINVAL` (mm/swapfile.c: the area is not
/// `SWP_WRITEOK`). So try again after `EINVAL`: the other call is done a moment later.
fn swapoff(path: &Path) -> io::Result<()> {
    let begun = Instant::now();
    while swaps::is_on(path) {
        match swaps::off(path) {
            Err(error) if Errno::from_io_error(&error) == Some(Errno::INVAL) && begun.elapsed() < OTHERS => {
                thread::sleep(LOOK);
            }
            done => return done,
        }
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;
    use rustix::mount::{MountFlags, mount};
    use weir_system::fixture;

    #[test]
    fn a_limited_process_that_does_not_end_is_reported_and_nothing_is_undone() {
        let name =
            "guard::swap::tests::a_limited_process_that_does_not_end_is_reported_and_nothing_is_undone";
        fixture::alone(name, || {
            mount("none", "/sys/fs/cgroup", "tmpfs", MountFlags::empty(), None).unwrap();
            mount("none", "/mnt", "tmpfs", MountFlags::empty(), None).unwrap();
            // No process has the number that `cgroup.procs` names here. So no signal makes that
            // entry go away.
            let cgroup = Path::new("/sys/fs/cgroup/memory/weir-bench-swap-7");
            fs::create_dir_all(cgroup).unwrap();
            fs::write(cgroup.join("cgroup.procs"), format!("{}\n", i32::MAX)).unwrap();
            let scratch = Path::new("/mnt").join(scratch_path(7).file_name().unwrap());
            fs::create_dir(&scratch).unwrap();
            fs::write(scratch.join(zram::NOTE), "no number").unwrap();
            let error = undo_within(LOOK, &scratch, 7).unwrap_err();
            assert_eq!(error.to_string(), "a process that it limited does not end");
            fs::write(cgroup.join("cgroup.procs"), "").unwrap();
            let error = undo_within(LOOK, &scratch, 7).unwrap_err();
            assert_eq!(error.to_string(), "invalid digit found in string");
        });
    }
}
