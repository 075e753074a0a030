//! `weir off`: undoes the steps in the journal, the last first. Pages come back before anything
//! else is touched. A device that still holds pages is never detached.

use super::options::OffOptions;
use super::preflight::BACKING;
use super::state::{Front, Journal, Phase, Step};
use super::{again, drain, front, interrupt, service, settings, state, unread};
use std::os::unix::fs::MetadataExt as _;
use std::path::Path;
use weir_cli::failure::Failure;
use weir_core::ByteSize;
use weir_system::swaps;

/// Turns Weir off.
pub fn run(options: &OffOptions) -> Result<(), Failure> {
    if let Some(device) = &options.swapoff {
        return drain::swapoff_here(device);
    }
    // With `--remember` a timer or a sleep turns Weir off, and not the user. Only a user's decision
    // drops the notes.
    if rustix::process::geteuid().is_root() && options.remember.is_none() {
        again::forget(&options.runtime)?;
    }
    // Also undo the changes of a benchmark that was killed.
    weir_cli::guard::clear_up(None)?;
    if state::read(&options.runtime)?.is_none() {
        // A `weir on` that was killed in its first moment leaves an empty directory with this mode.
        let is_private = options.runtime.metadata().is_ok_and(|it| it.is_dir() && it.mode() & 0o777 == 0o700);
        if rustix::process::geteuid().is_root() && is_private {
            Journal::open(&options.runtime)?.delete()?;
        }
        println!("not on: nothing in {} to turn off", options.runtime.display());
        return Ok(());
    }
    if !rustix::process::geteuid().is_root() {
        return Err(Failure::Failed("only root can turn swap off: run sudo weir off".to_owned()));
    }
    interrupt::watch()?;
    // Lock this process's memory: it must not wait for swapped pages of its own while it removes
    // the device.
    let _ = weir_core::swap_safety::lock_all_memory();
    let journal = Journal::open(&options.runtime)?;
    let (size, used) = gained(&journal);
    let finished = finish(journal, options.remember.as_deref())?;
    let lost = finished.lost().map(str::to_owned);
    finished.remove()?;
    if let Some(lost) = lost {
        return Err(Failure::Failed(format!(
            "the device is off, but {lost}; a program that touches such a page gets SIGBUS: end it; dmesg has the kernel's errors"
        )));
    }
    println!("off: {used} of pages are back in memory, and the device's {size} are free again");
    Ok(())
}

/// The size of the device that is on, and the bytes of pages on it, over all parts.
fn gained(journal: &Journal) -> (ByteSize, ByteSize) {
    let swaps = journal.state().swaps().filter_map(|path| swaps::find(path).ok().flatten());
    let (size, used) = swaps.fold((0, 0), |(size, used), swap| (size + swap.size.0, used + swap.used.0));
    (ByteSize(size), ByteSize(used))
}

/// A journal with nothing left to undo.
#[derive(Debug)]
pub struct Finished {
    journal: Journal,
    lost: Option<String>,
}

impl Finished {
    /// A sentence about pages that could not be read while the swap was turned off.
    pub fn lost(&self) -> Option<&str> {
        self.lost.as_deref()
    }

    /// Removes the journal and its directory.
    pub fn remove(self) -> Result<(), Failure> {
        self.journal.delete()
    }

    /// Begins a new journal in the same directory.
    pub fn reopen(self, directory: &Path) -> Result<Journal, Failure> {
        self.journal.delete()?;
        Journal::open(directory)
    }
}

/// Undoes all steps. As soon as nothing is swapped to the devices any more, writes `note`, if one
/// is given. So no later failure loses the note.
///
/// # Errors
/// Fails at the first step that cannot be undone. The journal then has that step and those that
/// remain, and the others are undone.
pub fn finish(mut journal: Journal, note: Option<&Path>) -> Result<Finished, Failure> {
    let devices: Vec<_> = journal.state().swaps().map(Path::to_owned).collect();
    drain::check_room(&devices)?;
    let state = journal.state();
    let mut lost = None;
    if !state.steps.is_empty() {
        // Write no note for a device that was not on, so that nothing turns the device on later. If
        // an earlier command turned off the last swap device, that command decided whether to write
        // the note.
        let note = note.filter(|_| state.phase == Phase::On || !devices.is_empty());
        // If the journal cannot be written (the file system is full), the steps are undone all the
        // same. After a crash in the middle, some are then undone twice, which is harmless.
        let _ = journal.enter(Phase::TurningOff);
        let (daemons, (_, used)) = (unread::Daemons::before(&journal), gained(&journal));
        let undone = undo_swaps(&mut journal, note);
        lost = daemons.lost(used);
        undone.inspect_err(|_| tell(lost.as_deref()))?;
    }
    while !journal.state().steps.is_empty() {
        undo_last(&mut journal).inspect_err(|_| tell(lost.as_deref()))?;
    }
    Ok(Finished { journal, lost })
}

/// Says what was lost where a failure of another kind is reported too.
pub fn tell(lost: Option<&str>) {
    if let Some(lost) = lost {
        eprintln!("weir: {lost}");
    }
}

/// Turns all swap devices off. If one of them cannot be turned off, turns the others on again:
/// parts that are away can only be taken again while the others are on.
fn undo_swaps(journal: &mut Journal, note: Option<&Path>) -> Result<(), Failure> {
    let is_swap = |step: &&Step| matches!(step, Step::Swap { .. });
    let swaps: Vec<Step> = journal.state().steps.iter().rev().filter(is_swap).cloned().collect();
    let on_before: Vec<Step> = swaps.iter().filter(|step| is_on(step)).cloned().collect();
    let remember = || note.map_or(Ok(()), |note| again::remember(note, &journal.state().again));
    if let Err(failure) = swaps.iter().try_for_each(undo).and_then(|()| remember()) {
        for step in on_before.iter().filter(|step| !is_on(step)) {
            if let Step::Swap { path, priority } = step
                && let Err(error) = swaps::on(path, *priority)
            {
                eprintln!("weir: {} does not come on again: {error}; see dmesg", path.display());
            }
        }
        // A device that still carries swap counts as on.
        let phase = if swaps.iter().all(is_on) { Phase::On } else { Phase::TurningOff };
        let _ = journal.enter(phase);
        return Err(failure);
    }
    let _ = journal.remove(|step| is_swap(&step));
    Ok(())
}

fn is_on(step: &Step) -> bool {
    matches!(step, Step::Swap { path, .. } if swaps::is_on(path))
}

/// Undoes the last step and removes it from the journal. The step of a ublk device is undone after
/// all others. Such a device disappears when its daemon ends. So undoing its step only checks that
/// the device is gone.
pub fn undo_last(journal: &mut Journal) -> Result<(), Failure> {
    let steps = &journal.state().steps;
    let is_ublk = |step: &&Step| matches!(step, Step::Device { front: Front::Ublk, .. });
    let Some(step) = steps.iter().rfind(|step| !is_ublk(step)).or(steps.last()).cloned() else {
        return Ok(());
    };
    undo(&step)?;
    let _ = journal.remove(|other| *other == step);
    Ok(())
}

/// A file's directory, if Weir makes and removes the directory together with the file.
pub fn own_directory(file: &Path) -> Option<&Path> {
    file.parent().filter(|_| file == Path::new(BACKING))
}

/// Makes the directory of a file, if Weir makes and removes it with the file.
///
/// # Errors
/// Fails when the directory cannot be made.
pub fn make_own_directory(file: &Path) -> Result<(), Failure> {
    let Some(directory) = own_directory(file) else { return Ok(()) };
    std::fs::create_dir_all(directory)
        .map_err(|error| Failure::Failed(format!("cannot make {}: {error}", directory.display())))
}

pub fn undo(step: &Step) -> Result<(), Failure> {
    match step {
        Step::Swap { path, .. } => drain::swapoff(path),
        Step::Setting { path, before, after, .. } => settings::restore(path, before, after),
        Step::Device { path, front, file, by, .. } => front::detach(*front, path, file.as_deref(), *by),
        Step::Daemon { directory, unit, process } => service::stop(directory, unit.as_deref(), *process),
        // The volume of this part was removed, and its memory given back.
        Step::Away { .. } => Ok(()),
        Step::Mask { units } => {
            let units = units.iter().map(String::as_str);
            settings::systemctl(&["unmask", "--runtime"].into_iter().chain(units).collect::<Vec<_>>())
        }
        Step::File { path } => {
            match std::fs::remove_file(path) {
                Err(error) if error.kind() != std::io::ErrorKind::NotFound => {
                    return Err(Failure::Failed(format!("cannot remove {}: {error}", path.display())));
                }
                _ => {}
            }
            // A directory with other files in it stays.
            own_directory(path).map(std::fs::remove_dir);
            Ok(())
        }
        Step::Module { name } => {
            front::unload(name);
            Ok(())
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use rustix::mount::{MountFlags, mount};
    use weir_system::fixture;

    #[test]
    fn a_directory_that_cannot_be_made_is_named_and_that_of_the_users_own_file_is_not_made() {
        let name = "on::off::tests::a_directory_that_cannot_be_made_is_named_and_that_of_the_users_own_file_is_not_made";
        fixture::alone(name, || {
            mount("none", "/var/lib", "tmpfs", MountFlags::empty(), None).expect("mounted");
            make_own_directory(Path::new("/var/lib/other/file")).expect("nothing to do");
            assert!(!Path::new("/var/lib/other").exists());
            make_own_directory(Path::new(BACKING)).expect("made");
            std::fs::remove_dir("/var/lib/weir").expect("it is there");
            std::fs::write("/var/lib/weir", "").expect("written");
            let error = make_own_directory(Path::new(BACKING)).expect_err("a file is in the way");
            let Failure::Failed(said) = error else { panic!("{error:?}") };
            assert_eq!(said, "cannot make /var/lib/weir: File exists (os error 17)");
        });
    }

    #[test]
    fn a_ublk_device_is_asked_for_after_its_daemon_has_ended_however_often_that_takes() {
        let directory = std::env::temp_dir().join(format!("weir-off-{}", std::process::id()));
        let blocks = std::fs::read_dir("/sys/block").ok();
        let Some(name) = blocks.and_then(|mut all| Some(all.next()?.ok()?.file_name())) else {
            println!("skipped: a_ublk_device_is_asked_for_after_its_daemon_has_ended: no block device");
            return;
        };
        let device = |path| Step::Device { path, front: Front::Ublk, file: None, by: None, volume: None };
        let mut journal = Journal::open(&directory).expect("a journal");
        journal.intend(Step::File { path: directory.join("made") }).expect("written");
        journal
            .intend(Step::Daemon { directory: directory.join("2"), unit: None, process: None })
            .expect("written");
        journal.intend(device(Path::new("/dev").join(name))).expect("written");
        undo_last(&mut journal).expect("no daemon");
        undo_last(&mut journal).expect("no file");
        for _ in 0..2 {
            let Err(Failure::Failed(said)) = undo_last(&mut journal) else { panic!("it is still there") };
            assert!(said.contains("has no daemon"), "{said}");
        }
        journal.amend(device("/dev/weir-has-none".into())).expect("written");
        undo_last(&mut journal).expect("it has gone");
        assert_eq!(journal.state().steps, []);
        journal.delete().expect("removed");
    }
}
