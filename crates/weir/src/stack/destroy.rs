//! `weir stack destroy`: brings home the pages that only the cache has. Then undoes the steps of
//! the journal, the last step first. After an interruption, each step can be undone again.

use super::kernel::Kernel;
use super::options::DestroyOptions;
use super::state::{self, Journal, Phase, State, Step};
use super::superblock::Lack;
use super::system::{Link, System};
use crate::on::interrupt;
use crate::progress::Shown;
use std::path::{Path, PathBuf};
use std::time::Duration;
use weir_cli::failure::Failure;
use weir_core::ByteSize;
use weir_system::device_use;
use weir_system::loop_device::LoopDevice;

/// Time between two looks at the machine.
const LOOK: Duration = Duration::from_millis(100);
/// Number of looks after which `destroy` stops waiting for a device to appear or disappear.
const LOOKS: u32 = 300;

/// The user's options for the undoing.
#[derive(Clone, Copy, Debug, Default)]
pub struct Wish {
    /// Erase the marks on the disks too.
    pub wipe: bool,
    /// Go on although pages are lost.
    pub lose_dirty: bool,
}

/// The result of the undoing.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub struct Ended {
    /// Whether pages are lost that only the cache had.
    pub has_lost: bool,
}

/// A callback for the time while the program waits. It gets the number of bytes that only the cache
/// has.
///
/// # Errors
/// Fails when the program is to end.
pub type Watch<'a> = dyn FnMut(u64) -> Result<(), Failure> + 'a;

/// Ends the stack.
pub fn run(options: &DestroyOptions) -> Result<(), Failure> {
    let directory = &options.runtime.path;
    check_root()?;
    let Some(state) = state::read(directory)? else {
        println!("no stack: nothing in {} to destroy", directory.display());
        return Ok(());
    };
    interrupt::watch()?;
    let journal = Journal::open(directory)?;
    let wish = Wish { wipe: options.wipe, lose_dirty: options.lose_dirty };
    let ended = finish(journal, wish)?;
    println!("{}", told(&state, wish, ended));
    Ok(())
}

/// Refuses other users than root.
pub fn check_root() -> Result<(), Failure> {
    if rustix::process::geteuid().is_root() {
        return Ok(());
    }
    Err(Failure::Failed("only root can make or end a stack: use sudo".to_owned()))
}

/// Tells the user what is left of the stack.
fn told(state: &State, wish: Wish, ended: Ended) -> String {
    let homes: Vec<_> = state.homes().iter().map(|path| path.display().to_string()).collect();
    if wish.wipe || state.phase == Phase::Creating || homes.is_empty() {
        return format!("destroyed: nothing of the stack is left on {}", homes.join(", "));
    }
    let what = if ended.has_lost { "the pages that are not lost are" } else { "all pages are" };
    let (assemble, device) = if homes.len() > 1 {
        (format!("mdadm --assemble /dev/md0 {}; ", homes.join(" ")), "/dev/md0")
    } else {
        (String::new(), homes[0].as_str())
    };
    format!(
        "destroyed: {what} on {}; without a cache they are /dev/bcache0 after: modprobe bcache; {assemble}echo {device} >/sys/fs/bcache/register",
        homes.join(", ")
    )
}

/// Undoes all steps, and removes the journal. Shows the progress.
///
/// # Errors
/// Fails while a program uses the stack, and at the first step that cannot be undone.
pub fn finish(mut journal: Journal, wish: Wish) -> Result<Ended, Failure> {
    let mut kernel = Kernel::this();
    refuse_used(&kernel, journal.state())?;
    let say = |far: &str, left: &str| eprintln!("destroying: {far} are at home{left}");
    let (mut shown, mut total) = (Shown::new("destroying", say), 0);
    let mut watch = |dirty: u64| {
        interrupt::check()?;
        total = dirty.max(total);
        // While no page goes home, `destroy` only waits for the kernel, and the bar is not needed.
        if total > 0 {
            shown.show(total - dirty, total);
        }
        Ok(())
    };
    let ended = undo(&mut kernel, &mut journal, wish, &mut watch)?;
    drop(shown);
    journal.delete()?;
    Ok(ended)
}

/// Refuses to end a stack whose device is in use.
fn refuse_used(kernel: &Kernel, state: &State) -> Result<(), Failure> {
    let made = state.backing().and_then(|backing| kernel.backing(backing)?.device);
    let Some(device) = made.map(|name| format!("/dev/{name}")) else { return Ok(()) };
    let served = LoopDevice::over(Path::new(&device)).first().map(|user| user.path().display().to_string());
    let served = served.map(|user| format!("by {user}: run losetup -d {user}"));
    match device_use::user_or_opener(&device).or(served) {
        Some(user) => Err(Failure::Failed(device_use::in_use(&device, &user))),
        None => Ok(()),
    }
}

/// Undoes all steps.
///
/// # Errors
/// Fails at the first step that cannot be undone. The journal then has that step and all steps that
/// were done before it.
pub fn undo(
    system: &mut dyn System,
    journal: &mut Journal,
    wish: Wish,
    watch: &mut Watch<'_>,
) -> Result<Ended, Failure> {
    // `create` never told the user the device of an unfinished stack. So the disks hold no data of
    // the user.
    let wipe = wish.wipe || journal.state().phase == Phase::Creating;
    if journal.state().phase == Phase::Up {
        journal.enter(Phase::Destroying)?;
    }
    while let Some(step) = journal.state().steps.last().cloned() {
        match &step {
            Step::Set { device, uuid, bytes } => {
                let backing = journal.state().backing().map(Path::to_owned).unwrap_or_default();
                let set = (device.as_path(), uuid.as_str(), *bytes);
                undo_set(system, journal, &backing, set, wish.lose_dirty, watch)?;
            }
            Step::Backing { device, uuid } => {
                undo_backing(system, journal, (device, uuid.as_deref()), wipe, watch)?;
            }
            Step::Array { uuid, members, .. } => undo_array(system, uuid, members, wipe, watch)?,
            Step::Module { name } => system.unload(name)?,
        }
        journal.strike_last()?;
    }
    Ok(Ended { has_lost: journal.state().has_lost })
}

/// Waits until `is_so` is true of the machine.
///
/// # Errors
/// Fails with the message `what` when the wait takes too long, or with the error of `watch`.
pub fn wait(
    system: &mut dyn System,
    watch: &mut Watch<'_>,
    what: &str,
    is_so: &dyn Fn(&dyn System) -> bool,
) -> Result<(), Failure> {
    if comes(system, watch, is_so)? {
        return Ok(());
    }
    Err(Failure::Failed(format!("{what}, after {} s; the kernel's log says why (dmesg)", {
        LOOKS / (1000 / LOOK.as_millis() as u32)
    })))
}

/// Waits until `is_so` is true of the machine. Returns false if the time is over before.
fn comes(
    system: &mut dyn System,
    watch: &mut Watch<'_>,
    is_so: &dyn Fn(&dyn System) -> bool,
) -> Result<bool, Failure> {
    for _ in 0..LOOKS {
        if is_so(system) {
            return Ok(true);
        }
        watch(0)?;
        system.pause(LOOK)?;
    }
    Ok(false)
}

/// Removes the cache, once the disks have every page that the cache has.
fn undo_set(
    system: &mut dyn System,
    journal: &mut Journal,
    backing: &Path,
    set: (&Path, &str, u64),
    lose_dirty: bool,
    watch: &mut Watch<'_>,
) -> Result<(), Failure> {
    let (device, uuid, bytes) = set;
    take_back(system, backing, uuid, lose_dirty, watch)?;
    let dirty = bring_home(system, backing, uuid, watch)?;
    // If the disks lack pages now, the set has died, and the pages are lost.
    let has_lost = lacks_pages(system, backing);
    if has_lost && !lose_dirty {
        return Err(lost(device, dirty, bytes));
    }
    if has_lost {
        // Record the loss. After the next changes, nothing else on the machine shows that pages are
        // lost.
        journal.note_lost()?;
    }
    if system.has_set(uuid) {
        system.unregister(uuid)?;
        let what = format!("{} does not leave bcache", device.display());
        wait(system, watch, &what, &|system| !system.has_set(uuid))?;
    }
    // Do not erase a dead device, which cannot be read. Do not erase a device either on which
    // another program has written meanwhile.
    if system.superblock(device).is_some_and(|found| found.set == uuid) {
        system.erase_superblock(device)?;
    }
    Ok(())
}

/// Whether bcache has a set and has stopped the array or disk that belongs to it.
pub fn is_stopped(system: &dyn System, backing: &Path, uuid: &str) -> bool {
    let belongs = |lack| matches!(lack, Lack::Clean | Lack::Dirty);
    system.has_set(uuid)
        && system.backing(backing).is_none()
        && system.superblock(backing).is_some_and(|it| it.set == uuid && belongs(it.lack))
}

/// Whether bcache has the array or disk without its cache, and waits for that cache.
fn waits_for_cache(system: &dyn System, backing: &Path) -> bool {
    let belongs = |link| matches!(link, Link::Clean | Link::Dirty);
    system.backing(backing).is_some_and(|it| it.device.is_none() && belongs(it.link))
}

/// Gives an array or disk back to bcache after bcache has stopped it. The set is still alive, and
/// has its pages.
fn take_back(
    system: &mut dyn System,
    backing: &Path,
    uuid: &str,
    lose_dirty: bool,
    watch: &mut Watch<'_>,
) -> Result<(), Failure> {
    if is_stopped(system, backing, uuid) {
        system.register(backing)?;
    }
    let is_back = |system: &dyn System| {
        let is_out = is_stopped(system, backing, uuid) || waits_for_cache(system, backing);
        !system.has_set(uuid) || !is_out
    };
    let what = format!("bcache does not take {} back", backing.display());
    if lose_dirty {
        return comes(system, watch, &is_back).map(drop);
    }
    wait(system, watch, &what, &is_back)
}

/// Has bcache write all dirty pages home and leave the set. Waits until bcache has done both, or
/// the set is dead. Returns the number of bytes that only the cache had at the last look.
fn bring_home(
    system: &mut dyn System,
    backing: &Path,
    uuid: &str,
    watch: &mut Watch<'_>,
) -> Result<u64, Failure> {
    let (mut is_asked, mut dirty) = (false, 0);
    loop {
        let Some(now) = system.backing(backing) else { return Ok(dirty) };
        let is_apart = matches!(now.link, Link::NoCache | Link::Inconsistent);
        if is_apart || !system.has_set(uuid) || waits_for_cache(system, backing) {
            return Ok(dirty);
        }
        if !is_asked {
            system.detach(backing)?;
            is_asked = true;
        }
        dirty = now.dirty;
        watch(dirty)?;
        system.pause(LOOK)?;
    }
}

/// Whether a cache has, or had, pages that the disks lack.
pub fn lacks_pages(system: &dyn System, backing: &Path) -> bool {
    system.backing(backing).is_some_and(|it| matches!(it.link, Link::Dirty | Link::Inconsistent))
        || system.superblock(backing).is_some_and(|it| matches!(it.lack, Lack::Dirty | Lack::Stale))
}

/// The failure for a cache that died with pages that nobody else has.
fn lost(device: &Path, dirty: u64, bytes: u64) -> Failure {
    let device = device.display();
    let amount = if dirty > 0 {
        format!("about {}", ByteSize(dirty))
    } else {
        format!("some of its {}", ByteSize(bytes))
    };
    Failure::Failed(format!(
        "the cache {device} is dead, and {amount} that only it had is lost, nobody knows which pages; --lose-dirty ends the stack all the same, with what the disks have"
    ))
}

/// Takes an array or disk from bcache. Afterwards its superblock is erased, or says that the device
/// has no cache.
fn undo_backing(
    system: &mut dyn System,
    journal: &mut Journal,
    made: (&Path, Option<&str>),
    wipe: bool,
    watch: &mut Watch<'_>,
) -> Result<(), Failure> {
    let (device, uuid) = made;
    let found = system.superblock(device);
    if let (Some(ours), Some(found)) = (uuid, &found)
        && found.uuid != ours
    {
        return Ok(());
    }
    stop_backing(system, device, watch)?;
    let found = system.superblock(device);
    let is_plain = found.as_ref().is_some_and(|found| found.lack == Lack::NoCache);
    if !wipe && !is_plain {
        // The new superblock has another identity, which the journal does not know. `None` in the
        // journal means that any superblock on this device belongs to the stack.
        journal.amend(Step::Backing { device: device.to_owned(), uuid: None })?;
    }
    if found.is_some() && (wipe || !is_plain) {
        system.erase_superblock(device)?;
    }
    if !wipe && !is_plain {
        system.make_backing(device)?;
        // udev gives a new superblock to bcache, possibly later than this call. Once bcache has the
        // device, udev's attempt has no effect.
        system.register(device)?;
        comes(system, watch, &|system| system.backing(device).is_some())?;
        stop_backing(system, device, watch)?;
    }
    Ok(())
}

/// Takes an array or disk from bcache, if bcache has it, and waits until it has left.
pub fn stop_backing(system: &mut dyn System, device: &Path, watch: &mut Watch<'_>) -> Result<(), Failure> {
    if system.backing(device).is_none() {
        return Ok(());
    }
    system.stop_backing(device)?;
    let what = format!("{} does not leave bcache", device.display());
    wait(system, watch, &what, &|system| system.backing(device).is_none())
}

/// Stops an array, if it runs. udev may have assembled the array at another path, or given the
/// array to bcache.
fn undo_array(
    system: &mut dyn System,
    uuid: &str,
    members: &[PathBuf],
    wipe: bool,
    watch: &mut Watch<'_>,
) -> Result<(), Failure> {
    while let Some(path) = system.array(uuid) {
        stop_backing(system, &path, watch)?;
        match system.stop_array(&path) {
            Ok(()) => break,
            Err(error) if system.backing(&path).is_none() => return Err(error),
            Err(_) => watch(0)?,
        }
    }
    for disk in members.iter().filter(|_| wipe) {
        if system.member(disk).as_deref() == Some(uuid) {
            system.erase_member(disk)?;
        }
    }
    Ok(())
}
