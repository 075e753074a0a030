//! Takes down what a run left that was killed.

use super::cgroup::Cgroup;
use super::devices::{PageCluster, ZRAM, Zram, memory_name, program};
use std::path::{Path, PathBuf};
use std::process::Command;
use std::{fs, io};
use weir_system::loop_device::LoopDevice;

/// Turns off the swap of run `pid`, which is dead, takes its devices away and puts the kernel's
/// setting back. What serves those devices must live until this returns. `scratch` is the directory
/// of that run; of any other nothing is undone.
///
/// # Errors
/// The first thing that stays, to be tried again.
pub fn undo(scratch: &Path, pid: u32) -> io::Result<()> {
    if scratch.file_name() != super::devices::scratch_path(pid).file_name() {
        return Ok(());
    }
    // As the kernel shows it.
    let scratch = &fs::canonicalize(scratch)?;
    let cgroup = Cgroup::of(pid);
    cgroup.kill();
    let memory = PathBuf::from(format!("/{} (deleted)", memory_name(pid)));
    let is_ours = |file: &Path| file.starts_with(scratch) || file == memory;
    for device in
        loops().into_iter().filter(|device| device.backing_file().is_some_and(|file| is_ours(&file)))
    {
        swapoff(device.path())?;
        device.detach().map_err(io::Error::other)?;
    }
    for file in fs::read_dir(scratch)?.flatten() {
        swapoff(&file.path())?;
    }
    for number in fs::read_to_string(scratch.join(ZRAM)).unwrap_or_default().lines() {
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

/// Turns swap off where it is on.
fn swapoff(path: &Path) -> io::Result<()> {
    let swaps = fs::read_to_string("/proc/swaps")?;
    let is_on = swaps.lines().any(|line| line.split_whitespace().next().map(Path::new) == Some(path));
    if is_on { program(Command::new("swapoff").arg(path)) } else { Ok(()) }
}
