//! The kernel's md and bcache, through mdadm, make-bcache, wipefs and sysfs.

use super::superblock::{self, Superblock};
use super::system::{Backing, Link, System};
use crate::cache::marks;
use crate::on::front;
use std::fs;
use std::io;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::thread;
use std::time::{Duration, Instant};
use weir_cli::failure::Failure;
use weir_core::ByteSize;
use weir_system::{Machine, program};

/// Longest time for which a tool is run again because a device is busy.
const BUSY: Duration = Duration::from_secs(5);
/// KiB of a stripe's unit.
const CHUNK_KIB: u32 = 512;
/// From this size on, a cache has large buckets. With large buckets a smaller cache would have too
/// few of them.
const LARGE: u64 = 16 << 30;

/// This machine.
#[derive(Debug)]
pub struct Kernel {
    machine: Machine,
}

impl Kernel {
    /// The machine that this process runs on.
    pub fn this() -> Self {
        Kernel { machine: Machine::this() }
    }

    /// A test's machine.
    #[cfg(test)]
    pub fn of(machine: Machine) -> Self {
        Kernel { machine }
    }

    /// A value of sysfs that bcache has for an array or disk.
    pub fn backing_value(&self, device: &Path, name: &str) -> Option<String> {
        self.machine.text(&format!("/sys/class/block/{}/bcache/{name}", base(device)))
    }

    /// A value of sysfs that bcache has for a set.
    pub fn set_value(&self, uuid: &str, name: &str) -> Option<String> {
        self.machine.text(&format!("/sys/fs/bcache/{uuid}/{name}"))
    }

    /// The size of a block device.
    pub fn size(&self, device: &Path) -> ByteSize {
        let sectors = self.machine.text(&format!("/sys/class/block/{}/size", base(device)));
        ByteSize(sectors.and_then(|text| text.parse::<u64>().ok()).unwrap_or(0) * 512)
    }

    /// The path `/dev/mdN` with the lowest number N that no array has.
    pub fn free_array(&self) -> PathBuf {
        let is_free = |number: &u32| !Path::new(&format!("/sys/block/md{number}")).exists();
        PathBuf::from(format!("/dev/md{}", (0..).find(is_free).unwrap_or(0)))
    }
}

/// The name of a device below /dev.
fn base(device: &Path) -> String {
    device.file_name().unwrap_or_default().to_string_lossy().into_owned()
}

/// Runs a program of a Debian package. Runs it again while a device is busy: udev opens each device
/// that changes, and bcache closes a device with a delay.
fn run(package: &str, words: &[&str], paths: &[&Path]) -> Result<(), Failure> {
    let begun = Instant::now();
    loop {
        let mut command = Command::new(words[0]);
        command.args(&words[1..]).args(paths).env("LC_ALL", "C");
        let error = match program::run(&mut command) {
            Ok(()) => return Ok(()),
            Err(error) if error.kind() == io::ErrorKind::NotFound => return Err(missing(words[0], package)),
            Err(error) => error.to_string(),
        };
        if begun.elapsed() > BUSY || !error.contains("busy") {
            return Err(Failure::Failed(format!("{}: {error}", words.join(" "))));
        }
        thread::sleep(BUSY / 50);
    }
}

/// The failure for a program that is not installed.
fn missing(program: &str, package: &str) -> Failure {
    Failure::Failed(format!("{program} is missing: install the package {package}"))
}

/// Checks that the programs that a stack needs are installed.
///
/// # Errors
/// Fails with the package of the first one that is missing.
pub fn check_programs(has_array: bool) -> Result<(), Failure> {
    if has_array {
        run("mdadm", &["mdadm", "--version"], &[])?;
    }
    // make-bcache has no option that only succeeds: after its help it exits with an error. So any
    // error counts as success here, except that the program is missing.
    match run("bcache-tools", &["make-bcache", "--help"], &[]) {
        Err(Failure::Failed(error)) if error.contains("is missing") => Err(Failure::Failed(error)),
        _ => Ok(()),
    }
}

/// A value that `mdadm --export` prints as `KEY=VALUE`.
fn exported(words: &[&str], device: &Path, key: &str) -> Option<String> {
    let path = std::env::var("PATH").unwrap_or_default() + ":/usr/sbin:/sbin";
    let output = Command::new("mdadm").args(words).arg(device).env("PATH", path).output().ok()?;
    let text = String::from_utf8_lossy(&output.stdout);
    text.lines().find_map(|line| Some(line.strip_prefix(key)?.strip_prefix('=')?.to_owned()))
}

/// Writes to a file of sysfs.
fn write(path: &str, value: &str) -> Result<(), Failure> {
    fs::write(path, value).map_err(|error| {
        Failure::Failed(format!("cannot write {value} to {path}: {error}; the kernel's log says why (dmesg)"))
    })
}

fn write_backing(device: &Path, name: &str, value: &str) -> Result<(), Failure> {
    write(&format!("/sys/class/block/{}/bcache/{name}", base(device)), value)
}

/// The bytes of a size that bcache prints, rounded to a tenth of a unit: `19.9M`.
pub fn rounded(text: &str) -> Option<u64> {
    let (number, shift) = match text.find(|letter: char| letter.is_ascii_alphabetic()) {
        None => (text, 0),
        Some(at) => (&text[..at], 10 * (1 + "kMGTPE".find(&text[at..])?)),
    };
    let (whole, tenths) = number.split_once('.').unwrap_or((number, "0"));
    let (whole, tenths): (u64, u64) = (whole.parse().ok()?, tenths.parse().ok()?);
    Some((whole << shift) + (tenths << shift) / 10)
}

impl System for Kernel {
    fn has_module(&self, name: &str) -> bool {
        let is_there = |path: &str| Path::new(path).exists();
        is_there(&format!("/sys/module/{name}"))
            || (name == "bcache" && is_there("/sys/fs/bcache"))
            || (name == "raid0" && self.machine.text("/proc/mdstat").is_some_and(|it| it.contains("[raid0]")))
    }

    fn array(&self, uuid: &str) -> Option<PathBuf> {
        let all = fs::read_dir("/sys/class/block").ok()?;
        let arrays = all.flatten().filter(|it| it.path().join("md").exists());
        arrays
            .map(|it| Path::new("/dev").join(it.file_name()))
            .find(|path| exported(&["--detail", "--export"], path, "MD_UUID").as_deref() == Some(uuid))
    }

    fn member(&self, disk: &Path) -> Option<String> {
        exported(&["--examine", "--export"], disk, "MD_UUID")
    }

    fn superblock(&self, device: &Path) -> Option<Superblock> {
        superblock::read(device).ok().flatten()
    }

    fn backing(&self, device: &Path) -> Option<Backing> {
        let link = match self.backing_value(device, "state")?.as_str() {
            "clean" => Link::Clean,
            "dirty" => Link::Dirty,
            "inconsistent" => Link::Inconsistent,
            _ => Link::NoCache,
        };
        let made = self.machine.link(&format!("/sys/class/block/{}/bcache/dev", base(device)));
        let dirty = self.backing_value(device, "dirty_data").and_then(|text| rounded(&text)).unwrap_or(0);
        Some(Backing { device: made.map(|path| base(&path)), link, dirty })
    }

    fn has_set(&self, uuid: &str) -> bool {
        self.set_value(uuid, "block_size").is_some()
    }

    fn load(&mut self, name: &str) -> Result<(), Failure> {
        if front::modprobe(&[name]) {
            return Ok(());
        }
        Err(Failure::Failed(format!(
            "the kernel has no {name}: install the modules of the kernel that runs, or boot one that has it"
        )))
    }

    fn unload(&mut self, name: &str) -> Result<(), Failure> {
        front::unload(name);
        Ok(())
    }

    fn make_array(&mut self, path: &Path, uuid: &str, members: &[PathBuf]) -> Result<(), Failure> {
        let (uuid, chunk) = (format!("--uuid={uuid}"), format!("--chunk={CHUNK_KIB}"));
        let number = format!("--raid-devices={}", members.len());
        let path = path.to_string_lossy();
        let words = ["mdadm", "--create", &path, "--run", "--level=0", "--metadata=1.2", "--name=weir"];
        let members: Vec<&Path> = members.iter().map(PathBuf::as_path).collect();
        run("mdadm", &[&words[..], &[&uuid, &chunk, &number]].concat(), &members)
    }

    fn stop_array(&mut self, path: &Path) -> Result<(), Failure> {
        run("mdadm", &["mdadm", "--stop"], &[path])
    }

    fn erase_member(&mut self, disk: &Path) -> Result<(), Failure> {
        run("mdadm", &["mdadm", "--zero-superblock"], &[disk])
    }

    fn make_backing(&mut self, device: &Path) -> Result<(), Failure> {
        run("bcache-tools", &["make-bcache", "-w", "4k", "-B"], &[device])
    }

    fn make_set(&mut self, device: &Path, uuid: &str, bytes: u64) -> Result<(), Failure> {
        let bucket = if bytes < LARGE { "64k" } else { "512k" };
        run("bcache-tools", &["make-bcache", "-w", "4k", "-b", bucket, "--cset-uuid", uuid, "-C"], &[device])
    }

    fn erase_superblock(&mut self, device: &Path) -> Result<(), Failure> {
        run("util-linux", &["wipefs", "--all", "--types", "bcache"], &[device])
    }

    fn erase_marks(&mut self, array: &Path) -> Result<(), Failure> {
        marks::wipe(array)
    }

    fn register(&mut self, device: &Path) -> Result<(), Failure> {
        // The kernel refuses the device if udev has already given it to bcache. So ignore an error:
        // the caller waits until bcache has the device.
        let _ = fs::write("/sys/fs/bcache/register_quiet", device.to_string_lossy().as_bytes());
        Ok(())
    }

    fn attach(&mut self, backing: &Path, set: &str) -> Result<(), Failure> {
        write_backing(backing, "attach", set)
    }

    fn detach(&mut self, backing: &Path) -> Result<(), Failure> {
        write_backing(backing, "detach", "1")
    }

    fn stop_backing(&mut self, backing: &Path) -> Result<(), Failure> {
        write_backing(backing, "stop", "1")
    }

    fn unregister(&mut self, set: &str) -> Result<(), Failure> {
        write(&format!("/sys/fs/bcache/{set}/unregister"), "1")
    }

    fn set_backing(&mut self, backing: &Path, name: &str, value: &str) -> Result<(), Failure> {
        write_backing(backing, name, value)
    }

    fn set_set(&mut self, set: &str, name: &str, value: &str) -> Result<(), Failure> {
        write(&format!("/sys/fs/bcache/{set}/{name}"), value)
    }

    fn pause(&mut self, time: Duration) -> Result<(), Failure> {
        thread::sleep(time);
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use weir_system::fixture::Fixture;

    #[test]
    fn a_size_that_bcache_rounds_is_read_in_each_of_its_units() {
        for (text, bytes) in [
            ("0.0k", Some(0)),
            ("512", Some(512)),
            ("4.0k", Some(4096)),
            ("19.5M", Some(39 << 19)),
            ("1.2G", Some((1 << 30) + (2 << 30) / 10)),
            ("3.0T", Some(3 << 40)),
            ("", None),
            ("4.0x", None),
            ("k", None),
        ] {
            assert_eq!(rounded(text), bytes, "{text}");
        }
    }

    #[test]
    fn what_bcache_says_of_an_array_is_read_and_an_array_that_it_does_not_have_is_none() {
        let fixture = Fixture::new("stack-sysfs")
            .with("/sys/class/block/md7/bcache/state", "dirty\n")
            .with("/sys/class/block/md7/bcache/dirty_data", "3.5M\n")
            .with("/sys/class/block/md7/size", "2048\n")
            .with("/sys/class/block/md8/bcache/state", "no cache\n");
        let kernel = Kernel { machine: fixture.machine() };
        let expected = Backing { device: None, link: Link::Dirty, dirty: 7 << 19 };
        assert_eq!(kernel.backing(Path::new("/dev/md7")), Some(expected));
        assert_eq!(kernel.backing(Path::new("/dev/md8")).map(|it| it.link), Some(Link::NoCache));
        assert_eq!(kernel.backing(Path::new("/dev/md9")), None);
        assert_eq!(kernel.size(Path::new("/dev/md7")), ByteSize(1 << 20));
        assert!(!kernel.has_set("1-2"));
    }

    #[test]
    fn a_program_that_is_missing_is_named_with_its_package() {
        let Err(Failure::Failed(said)) = run("weir-has-none", &["weir-has-no-program"], &[]) else {
            panic!("it runs")
        };
        assert_eq!(said, "weir-has-no-program is missing: install the package weir-has-none");
    }

    #[test]
    fn a_setting_that_the_kernel_does_not_take_is_named() {
        let Err(Failure::Failed(said)) = write("/proc/weir-has-none", "1") else { panic!("written") };
        assert!(said.starts_with("cannot write 1 to /proc/weir-has-none: "), "{said}");
        assert!(said.ends_with("; the kernel's log says why (dmesg)"), "{said}");
    }

    #[test]
    fn a_module_that_the_kernel_does_not_have_is_named() {
        let mut kernel = Kernel::this();
        let Err(Failure::Failed(said)) = kernel.load("weir_has_none") else { panic!("loaded") };
        let next = "install the modules of the kernel that runs, or boot one that has it";
        assert_eq!(said, format!("the kernel has no weir_has_none: {next}"));
    }
}
