//! `weir stack create`: checks everything that could stand in the way, then does its steps in
//! order.

use super::destroy::{self, Watch, Wish, wait};
use super::kernel::{self, Kernel};
use super::options::CreateOptions;
use super::state::{Journal, Phase, Step};
use super::superblock;
use super::system::{Link, System};
use crate::cache::marks;
use crate::on::interrupt;
use std::os::unix::fs::FileTypeExt as _;
use std::path::{Path, PathBuf};
use weir_cache::Mode;
use weir_cli::failure::Failure;
use weir_core::ByteSize;
use weir_system::device_use;

/// The smallest cache that the kernel takes: 513 buckets of 64 KiB, in whole MiB. A reserve of it
/// has a 1024th of the buckets, once their number is rounded up to a power of two, and may not be
/// empty (`cache_alloc` in drivers/md/bcache/super.c).
const SMALLEST: u64 = 33 << 20;

/// The devices and settings of a stack to be made.
#[derive(Clone, Debug)]
pub struct Plan {
    /// The disks.
    pub homes: Vec<PathBuf>,
    /// The device of the stripe.
    pub array: PathBuf,
    /// The cache's device, and its size in bytes.
    pub cache: (PathBuf, u64),
    /// The identities of the array and of the set.
    pub uuids: (String, String),
    /// The settings of bcache for the array.
    pub backing_settings: Vec<(&'static str, String)>,
    /// The settings of bcache for the set.
    pub set_settings: Vec<(&'static str, String)>,
}

/// Makes a stack, and prints its device.
pub fn run(options: &CreateOptions) -> Result<(), Failure> {
    destroy::check_root()?;
    interrupt::watch()?;
    let directory = &options.runtime.path;
    let mut journal = Journal::open(directory)?;
    if journal.state().phase == Phase::Up {
        return Err(Failure::Failed(format!(
            "there is a stack already, noted in {}: weir stack destroy ends it, --runtime is for another one",
            directory.display()
        )));
    }
    if !journal.state().steps.is_empty() {
        println!("an earlier weir stack create or destroy did not come to its end: undoing what it left");
        destroy::finish(journal, Wish::default())?;
        journal = Journal::open(directory)?;
    }
    let mut kernel = Kernel::this();
    let made = plan(options, &kernel).and_then(|plan| {
        erase(options, &plan)?;
        build(&mut kernel, &mut journal, &plan, &mut |_| interrupt::check())?;
        Ok(plan)
    });
    let plan = match made {
        Ok(plan) => plan,
        Err(failure) => {
            interrupt::forget();
            if let Err(also) = destroy::finish(journal, Wish::default()) {
                // The journal stays, so the next create or destroy undoes the steps that are left.
                also.report();
            }
            return Err(failure);
        }
    };
    let device = backing_of(&plan);
    let name = kernel.backing(&device).and_then(|it| it.device).unwrap_or_default();
    eprintln!("{}", told(options.mode, &plan.cache.0));
    println!("/dev/{name}");
    Ok(())
}

/// Tells the user which pages a loss of the cache would lose.
fn told(mode: Mode, cache: &Path) -> String {
    let cache = cache.display();
    match mode {
        Mode::WriteBack => format!(
            "weir: pages that were written lie on {cache} alone until they go home, flushed ones too: weir stack destroy brings them home"
        ),
        _ => format!("weir: every page that was written is on the disks too: losing {cache} loses none"),
    }
}

/// The array, or the single disk.
fn backing_of(plan: &Plan) -> PathBuf {
    if plan.homes.len() > 1 { plan.array.clone() } else { plan.homes[0].clone() }
}

/// Checks the devices, and chooses the values that no option gives.
fn plan(options: &CreateOptions, kernel: &Kernel) -> Result<Plan, Failure> {
    kernel::check_programs(options.homes.len() > 1)?;
    let homes = options.homes.iter().map(|path| device(path)).collect::<Result<Vec<_>, _>>()?;
    let cache = device(&options.cache)?;
    let wipe = options.wipe.iter().map(|path| device(path)).collect::<Result<Vec<_>, _>>()?;
    let all: Vec<&PathBuf> = homes.iter().chain([&cache]).collect();
    for (number, path) in all.iter().enumerate() {
        if all[..number].contains(path) {
            let path = path.display();
            return Err(Failure::Usage(format!("{path} is named twice: name each device once")));
        }
    }
    if let Some(other) = wipe.iter().find(|path| !all.contains(path)) {
        let other = other.display();
        return Err(Failure::Usage(format!("--wipe names {other}, which is no device of the stack")));
    }
    for path in all {
        let shown = path.display();
        let user = device_use::user_or_owner(&path.to_string_lossy());
        if let Some(user) = user.map_err(Failure::failed)? {
            return Err(Failure::Failed(device_use::in_use(&shown.to_string(), &user)));
        }
        let marks = marks::find(path)?;
        if !marks.is_empty() && !wipe.contains(path) {
            return Err(Failure::Failed(format!("{shown} carries {marks}; --wipe {shown} erases it")));
        }
    }
    let size = kernel.size(&cache).0;
    if size < SMALLEST {
        let (cache, size) = (cache.display(), ByteSize(size));
        return Err(Failure::Failed(format!(
            "{cache} has {size}, and bcache needs {} for a cache: make it larger",
            ByteSize(SMALLEST)
        )));
    }
    Ok(Plan {
        homes,
        array: kernel.free_array(),
        cache: (cache, size),
        uuids: (identity()?.replace('-', ""), identity()?),
        backing_settings: backing_settings(options),
        set_settings: set_settings(),
    })
}

/// The settings of bcache for the array.
fn backing_settings(options: &CreateOptions) -> Vec<(&'static str, String)> {
    let mode = match options.mode {
        Mode::WriteBack => "writeback",
        Mode::WriteThrough => "writethrough",
        Mode::WriteAround => "writearound",
    };
    vec![
        ("sequential_cutoff", options.stream.0.to_string()),
        ("writeback_percent", options.dirty.to_string()),
        // A dead cache that has dirty pages stops the device. Otherwise the device goes on.
        ("stop_when_cache_set_failed", "auto".to_owned()),
        ("cache_mode", mode.to_owned()),
    ]
}

/// The settings of bcache for the set. Zero turns off a limit at which requests bypass a busy
/// cache. That limit is for a cache that is slower than the disks.
fn set_settings() -> Vec<(&'static str, String)> {
    ["congested_read_threshold_us", "congested_write_threshold_us"].map(|name| (name, "0".to_owned())).into()
}

/// A random identity.
fn identity() -> Result<String, Failure> {
    let mut bytes = [0; 16];
    rustix::rand::getrandom(&mut bytes, rustix::rand::GetRandomFlags::empty()).map_err(Failure::failed)?;
    Ok(superblock::written(&bytes))
}

/// Resolves a path to a block device, by the kernel's own name for the device.
fn device(path: &Path) -> Result<PathBuf, Failure> {
    let shown = path.display();
    let real = path.canonicalize().map_err(|error| {
        Failure::Failed(format!("{shown}: {error}; lsblk lists the devices that there are"))
    })?;
    match std::fs::metadata(&real) {
        Ok(about) if about.file_type().is_block_device() => Ok(real),
        _ => Err(Failure::Failed(format!("{shown} is no block device; lsblk lists those that there are"))),
    }
}

/// Erases the marks of the devices that `--wipe` names.
fn erase(options: &CreateOptions, plan: &Plan) -> Result<(), Failure> {
    let named: Vec<_> = options.wipe.iter().filter_map(|path| path.canonicalize().ok()).collect();
    let all = plan.homes.iter().chain([&plan.cache.0]);
    all.filter(|path| named.contains(path)).try_for_each(|path| marks::wipe(path))
}

/// Does the steps. The journal records each step before the step is done.
pub fn build(
    system: &mut dyn System,
    journal: &mut Journal,
    plan: &Plan,
    watch: &mut Watch<'_>,
) -> Result<(), Failure> {
    let array = (plan.homes.len() > 1).then_some("raid0");
    for name in array.into_iter().chain(["bcache"]) {
        if !system.has_module(name) {
            journal.intend(Step::Module { name: name.to_owned() })?;
            system.load(name)?;
        }
    }
    let backing = backing_of(plan);
    if array.is_some() {
        let (path, uuid, members) = (plan.array.clone(), colons(&plan.uuids.0), plan.homes.clone());
        journal.intend(Step::Array { path: path.clone(), uuid: uuid.clone(), members })?;
        system.make_array(&path, &uuid, &plan.homes)?;
        // The disks may have been a stripe of the same shape before. Then the new stripe shows the
        // old stripe's content, and udev may have given that old bcache superblock to bcache.
        destroy::stop_backing(system, &path, watch)?;
        system.erase_marks(&path)?;
    }
    watch(0)?;
    journal.intend(Step::Backing { device: backing.clone(), uuid: None })?;
    system.make_backing(&backing)?;
    let uuid = system.superblock(&backing).map(|found| found.uuid);
    journal.amend(Step::Backing { device: backing.clone(), uuid })?;
    system.register(&backing)?;
    let what = |device: &Path| format!("bcache does not take {}", device.display());
    wait(system, watch, &what(&backing), &|system| system.backing(&backing).is_some())?;
    let ((device, bytes), set) = (&plan.cache, &plan.uuids.1);
    journal.intend(Step::Set { device: device.clone(), uuid: set.clone(), bytes: *bytes })?;
    system.make_set(device, set, *bytes)?;
    system.register(device)?;
    wait(system, watch, &what(device), &|system| system.has_set(set))?;
    system.attach(&backing, set)?;
    let has_cache = |system: &dyn System| system.backing(&backing).is_some_and(|it| it.link != Link::NoCache);
    wait(system, watch, &what(device), &has_cache)?;
    for (name, value) in &plan.backing_settings {
        system.set_backing(&backing, name, value)?;
    }
    for (name, value) in &plan.set_settings {
        system.set_set(set, name, value)?;
    }
    watch(0)?;
    journal.enter(Phase::Up)
}

/// An identity as mdadm writes it: four groups of eight digits.
fn colons(digits: &str) -> String {
    [0..8, 8..16, 16..24, 24..32].map(|part| digits.get(part).unwrap_or_default()).join(":")
}
