//! The interface between a stack and the machine. One implementation calls the kernel and its
//! tools. The other is a model in memory, in which a test kills the process after each change.

use super::superblock::Superblock;
use std::path::{Path, PathBuf};
use std::time::Duration;
use weir_cli::failure::Failure;

/// An array or disk that the kernel's bcache has.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct Backing {
    /// The block device that bcache makes of the array or disk, such as `bcache0`. `None`: bcache
    /// waits for a cache.
    pub device: Option<String>,
    /// The relation between the array or disk and its cache.
    pub link: Link,
    /// Bytes that only the cache has.
    pub dirty: u64,
}

/// The relation between an array or disk and its cache, as sysfs shows it.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Link {
    /// The array or disk has no cache.
    NoCache,
    /// The cache has no page that the disks lack.
    Clean,
    /// The cache has pages that the disks lack.
    Dirty,
    /// The array goes on without its cache, which had dirty pages.
    Inconsistent,
}

/// The machine. Each change is one call, which may be the last one before the process is killed.
pub trait System {
    /// Whether a module is loaded, or built in.
    fn has_module(&self, name: &str) -> bool;
    /// The device of the array with this identity, if the array runs. udev may have given it
    /// another name than the one that was asked for.
    fn array(&self, uuid: &str) -> Option<PathBuf>;
    /// The identity of the array to which a disk belongs, as the disk says.
    fn member(&self, disk: &Path) -> Option<String>;
    /// The superblock of bcache on a device; `None` if it has none or cannot be read.
    fn superblock(&self, device: &Path) -> Option<Superblock>;
    /// The state of an array or disk in bcache; `None` if bcache does not know the device.
    fn backing(&self, device: &Path) -> Option<Backing>;
    /// Whether bcache has this set.
    fn has_set(&self, uuid: &str) -> bool;

    /// Loads a module.
    fn load(&mut self, name: &str) -> Result<(), Failure>;
    /// Unloads a module, unless it is in use.
    fn unload(&mut self, name: &str) -> Result<(), Failure>;
    /// Makes and starts an array.
    fn make_array(&mut self, path: &Path, uuid: &str, members: &[PathBuf]) -> Result<(), Failure>;
    /// Stops an array.
    fn stop_array(&mut self, path: &Path) -> Result<(), Failure>;
    /// Erases what an array wrote on a disk of it.
    fn erase_member(&mut self, disk: &Path) -> Result<(), Failure>;
    /// Writes the superblock of an array or disk without a cache.
    fn make_backing(&mut self, device: &Path) -> Result<(), Failure>;
    /// Writes the superblock of a cache.
    fn make_set(&mut self, device: &Path, uuid: &str, bytes: u64) -> Result<(), Failure>;
    /// Erases a superblock of bcache.
    fn erase_superblock(&mut self, device: &Path) -> Result<(), Failure>;
    /// Erases the marks of all content on an array.
    fn erase_marks(&mut self, array: &Path) -> Result<(), Failure>;
    /// Hands a device to bcache, which may have it already.
    fn register(&mut self, device: &Path) -> Result<(), Failure>;
    /// Puts a set in front of an array or disk.
    fn attach(&mut self, backing: &Path, set: &str) -> Result<(), Failure>;
    /// Has bcache write all dirty pages of an array or disk home, and then leave its set.
    fn detach(&mut self, backing: &Path) -> Result<(), Failure>;
    /// Takes an array or disk from bcache.
    fn stop_backing(&mut self, backing: &Path) -> Result<(), Failure>;
    /// Takes a set from bcache.
    fn unregister(&mut self, set: &str) -> Result<(), Failure>;
    /// Writes a setting of an array or disk.
    fn set_backing(&mut self, backing: &Path, name: &str, value: &str) -> Result<(), Failure>;
    /// Writes a setting of a set.
    fn set_set(&mut self, set: &str, name: &str, value: &str) -> Result<(), Failure>;
    /// Waits. Meanwhile the machine goes on.
    fn pause(&mut self, time: Duration) -> Result<(), Failure>;
}
