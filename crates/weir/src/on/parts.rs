//! A device in parts (`weir on --parts`): several swap devices, each over a volume of one daemon.
//! `weir give-back` turns some of them off and removes their volumes. Then it gives back the memory
//! that no volume needs. `weir take` is the reverse. `weir status` lists the parts.

use super::options::DIRECTORY;
use super::state::{Front, Journal, Phase, State, Step};
use super::{drain, front, interrupt, off, service, state, swap_area};
use crate::cli::Amount;
use crate::failure;
use crate::progress::Waiting;
use std::fs;
use std::path::{Path, PathBuf};
use std::thread;
use std::time::{Duration, Instant};
use weir_cli::failure::Failure;
use weir_core::ByteSize;
use weir_daemon::ErrorKind;
use weir_daemon::control::{self, Moved, Request, Status};
use weir_system::swaps::{self, Swap};

/// Time for which a request is repeated while no daemon answers. After a crash, the keeper has
/// started the next daemon within this time.
const PATIENCE: Duration = Duration::from_secs(60);
/// Time between two tries of a request.
const LOOK: Duration = Duration::from_millis(20);

/// A part that is on.
#[derive(Clone, PartialEq, Eq, Debug)]
struct Part {
    volume: String,
    device: PathBuf,
    front: Front,
    priority: i32,
}

/// The name of the volume of part `number`, from 1 on.
pub fn volume(number: u8) -> String {
    format!("part-{number}")
}

/// The run-time directory of the daemon that answers at `control`, if its device is one of several
/// parts.
pub fn among(control: &Path) -> Option<PathBuf> {
    let directory = control.parent()?;
    let state = state::read(directory).ok()??;
    (state.parts > 1).then(|| directory.to_owned())
}

/// A line for each part: its device, its size, and the bytes of pages on it.
///
/// # Errors
/// Fails when the journal of `weir on` cannot be read.
pub fn lines(directory: &Path) -> Result<String, Failure> {
    let Some(state) = state::read(directory)? else { return Ok(String::new()) };
    Ok(listing(&state, |device| swaps::find(device).ok().flatten()))
}

fn listing(state: &State, find: impl Fn(&Path) -> Option<Swap>) -> String {
    let first = format!("{:<10}{}", "parts", state.parts);
    if state.is_of_daemons() {
        return format!("{first}, each with its own daemon, by weir {}: {NEW}\n", state.version);
    }
    let mut lines = Vec::new();
    for step in &state.steps {
        if let Step::Away { volume: Some(volume), bytes, .. } = step {
            let line = format!("off, {}; weir take all turns it on", ByteSize(*bytes));
            lines.push((number(volume), line));
        }
    }
    for Part { volume, device, .. } in on(state) {
        let line = match find(&device) {
            Some(swap) => format!("{}, {}: {} swapped out", device.display(), swap.size, swap.used),
            None => format!("{}: no swap any more; weir off, then weir on", device.display()),
        };
        lines.push((number(&volume), line));
    }
    lines.sort();
    let line = |(number, line): &(u8, String)| format!("part {number:<5}{line}\n");
    format!("{first}\n{}", lines.iter().map(line).collect::<String>())
}

/// The next step for a user whose parts were made by an earlier version of Weir.
const NEW: &str = "weir off, then weir on makes them parts of one";

/// The number of a part, by its volume's name.
fn number(volume: &str) -> u8 {
    volume.rsplit('-').next().and_then(|number| number.parse().ok()).unwrap_or_default()
}

/// The message about a device in `directory` whose parts are all away.
pub fn all_away(state: &State, directory: &Path) -> String {
    let socket = service::control_socket(directory);
    let elsewhere = directory != Path::new(DIRECTORY);
    let control = if elsewhere { format!(" --control {}", socket.display()) } else { String::new() };
    format!("all {} parts are given back: weir take all{control} turns them on again", state.parts)
}

/// Makes the volume of a part, a block device of it, and a swap area there. Returns the device.
///
/// # Errors
/// Fails when the daemon or the kernel refuses.
pub fn make(
    directory: &Path,
    (front, connections): (Front, u16),
    (volume, bytes): (&str, u64),
    journal: &mut Journal,
) -> Result<PathBuf, Failure> {
    let status = until(|| {
        let made = ask(directory, Request::VolumeCreate { name: volume.to_owned(), bytes: Some(bytes) });
        let status = control::status(&service::control_socket(directory))?;
        // The volume is also there if the daemon died before it answered, or made the volume for a
        // command that was killed.
        let is_there = status.volumes.iter().any(|it| it.name == volume && it.bytes == bytes);
        match made {
            Err(error) if !is_there => Err(error),
            _ => Ok(status),
        }
    })?;
    let device = attach((front, connections), directory, volume, status, journal)?;
    swap_area::make(&device, ByteSize(bytes))?;
    Ok(device)
}

/// Makes a block device of a part's volume. Tries again if the daemon died meanwhile: the next one
/// must know the device.
fn attach(
    (front, connections): (Front, u16),
    directory: &Path,
    volume: &str,
    mut status: Status,
    journal: &mut Journal,
) -> Result<PathBuf, Failure> {
    loop {
        let attached = front::attach(front, directory, connections, Some(volume), &status, journal);
        let now = until(|| control::status(&service::control_socket(directory)))?;
        let is_known = |device: &Path| {
            front != Front::Nbd || now.attached.iter().any(|known| Path::new(known) == device)
        };
        match attached {
            Ok(device) if is_known(&device) || now.pid == status.pid => return Ok(device),
            Err(failure) if now.pid == status.pid => return Err(failure),
            _ => undo(journal, directory, |step| is_device(step, volume))?,
        }
        status = now;
    }
}

/// Turns off as many parts as hold `amount`; without an amount all of them, until the machine has
/// slept.
///
/// # Errors
/// Fails when the parts' pages fit nowhere else; then nothing is changed.
pub fn give_back(directory: &Path, amount: Option<Amount>) -> Result<(), Failure> {
    let begun = Instant::now();
    let mut journal = open(directory)?;
    let parts = on(journal.state());
    let mut chosen = Vec::new();
    let mut bytes = 0;
    let status = until(|| control::status(&service::control_socket(directory)))?;
    // The last part goes first.
    for part in parts.iter().rev() {
        if matches!(amount, Some(Amount::Size(wanted)) if bytes >= wanted.0) {
            break;
        }
        let found = status.volumes.iter().find(|it| it.name == part.volume);
        let size = found.map_or(0, |found| found.bytes);
        bytes += size;
        chosen.push((part.clone(), size));
    }
    match amount {
        Some(Amount::Size(wanted)) if wanted.0 > bytes => {
            return Err(Failure::Failed(format!(
                "cannot give back {wanted}: {} parts with {} are on; ask for that, or for all",
                parts.len(),
                ByteSize(bytes)
            )));
        }
        _ => {}
    }
    let devices: Vec<PathBuf> = chosen.iter().map(|(part, _)| part.device.clone()).collect();
    drain::check_room(&devices)?;
    interrupt::watch()?;
    // Lock this process's memory: it must not wait for swapped pages of its own while it removes
    // the device.
    let _ = weir_core::swap_safety::lock_all_memory();
    if matches!(amount, Some(Amount::All)) {
        // The user asked to give back all of the memory. So a part that was turned off for a sleep
        // stays off after the sleep.
        journal.revise(|step| {
            if let Step::Away { asleep, .. } = step {
                *asleep = false;
            }
        })?;
    }
    for (part, size) in &chosen {
        turn_off(&mut journal, directory, part, *size, amount.is_none())?;
    }
    let moved = until(|| ask(directory, Request::GiveBackSpare))?;
    println!(
        "gave back {} in {:.2} s{}; {} of {} parts stay on",
        ByteSize(moved.bytes),
        begun.elapsed().as_secs_f64(),
        listed(&devices, " are off", " is off"),
        parts.len() - chosen.len(),
        journal.state().parts
    );
    Ok(())
}

/// Turns on again as many parts as hold `amount`; without an amount, those that were turned off for
/// a sleep.
///
/// # Errors
/// Fails when there is not enough memory. The parts that were turned on stay on.
pub fn take(directory: &Path, amount: Option<Amount>) -> Result<(), Failure> {
    let begun = Instant::now();
    let mut journal = open(directory)?;
    interrupt::watch()?;
    let mut bytes = 0;
    let mut devices = Vec::new();
    // The part that was given back last comes back first.
    for step in away(journal.state()).into_iter().rev() {
        if matches!(amount, Some(Amount::Size(wanted)) if bytes >= wanted.0) {
            break;
        }
        let Step::Away { bytes: size, asleep, volume: Some(volume), front, priority } = &step else {
            continue;
        };
        if amount.is_none() && !asleep {
            continue;
        }
        let device = turn_on(&mut journal, directory, (volume, *size), *front, *priority);
        let device = device.and_then(|device| journal.remove(|other| *other == step).map(|()| device));
        let device = device.map_err(|failure| match failure {
            Failure::Failed(why) => Failure::Failed(format!(
                "took {}: {why}; end what uses the memory, then weir take again",
                ByteSize(bytes)
            )),
            other => other,
        })?;
        bytes += size;
        devices.push(device);
    }
    println!(
        "took {} in {:.2} s{}; {} of {} parts are on",
        ByteSize(bytes),
        begun.elapsed().as_secs_f64(),
        listed(&devices, " are on again", " is on again"),
        on(journal.state()).len(),
        journal.state().parts
    );
    Ok(())
}

fn listed(devices: &[PathBuf], many: &str, one: &str) -> String {
    let names: Vec<String> = devices.iter().map(|device| device.display().to_string()).collect();
    match names.len() {
        0 => String::new(),
        1 => format!(": {}{one}", names[0]),
        _ => format!(": {}{many}", names.join(", ")),
    }
}

/// Opens the journal of `weir on`, if Weir is on and every part is either on or away.
fn open(directory: &Path) -> Result<Journal, Failure> {
    let mut journal = Journal::open(directory)?;
    if journal.state().phase != Phase::On {
        return Err(Failure::Failed(format!(
            "weir is not on in {}: weir on, or weir off, was interrupted there; run it again",
            directory.display()
        )));
    }
    if journal.state().is_of_daemons() {
        return Err(Failure::Failed(format!(
            "weir {} has made a daemon for each part, and this one moves volumes of one daemon: {NEW}",
            journal.state().version
        )));
    }
    // Finish the steps of a command that died while it turned a part off or on.
    for step in away(journal.state()) {
        let Step::Away { volume: Some(volume), .. } = &step else { continue };
        take_away(&mut journal, directory, volume)?;
    }
    Ok(journal)
}

/// The parts that are on, in order.
fn on(state: &State) -> Vec<Part> {
    let mut parts = Vec::new();
    for step in &state.steps {
        let Step::Device { path, front, volume: Some(volume), .. } = step else { continue };
        let priority = state.steps.iter().find_map(|step| match step {
            Step::Swap { path: swap, priority } if swap == path => Some(*priority),
            _ => None,
        });
        let Some(priority) = priority else { continue };
        parts.push(Part { volume: volume.clone(), device: path.clone(), front: *front, priority });
    }
    parts.sort_by_key(|part| number(&part.volume));
    parts
}

fn away(state: &State) -> Vec<Step> {
    state.steps.iter().filter(|step| matches!(step, Step::Away { .. })).cloned().collect()
}

fn turn_off(
    journal: &mut Journal,
    directory: &Path,
    part: &Part,
    bytes: u64,
    asleep: bool,
) -> Result<(), Failure> {
    let volume = Some(part.volume.clone());
    let away = Step::Away { volume, front: part.front, priority: part.priority, bytes, asleep };
    journal.intend(away.clone())?;
    let done = take_away(journal, directory, &part.volume);
    if done.is_err() && swaps::is_on(&part.device) {
        // The pages of this part did not come back, so it is on as before.
        journal.remove(|step| *step == away)?;
    }
    done
}

/// Undoes the steps of a part: swap, device, volume, in this order. A ublk device ends with its
/// volume.
fn take_away(journal: &mut Journal, directory: &Path, volume: &str) -> Result<(), Failure> {
    let device = journal.state().steps.iter().find_map(|step| match step {
        Step::Device { path, volume: Some(of), .. } if of == volume => Some(path.clone()),
        _ => None,
    });
    if let Some(device) = &device {
        undo(journal, directory, |step| matches!(step, Step::Swap { path, .. } if path == device))?;
    }
    let is_ublk = |step: &Step| matches!(step, Step::Device { front: Front::Ublk, .. });
    undo(journal, directory, |step| is_device(step, volume) && !is_ublk(step))?;
    remove(directory, volume)?;
    undo(journal, directory, |step| is_device(step, volume))
}

fn is_device(step: &Step, of: &str) -> bool {
    matches!(step, Step::Device { volume: Some(volume), .. } if volume == of)
}

fn undo(journal: &mut Journal, directory: &Path, which: impl Fn(&Step) -> bool) -> Result<(), Failure> {
    let Some(step) = journal.state().steps.iter().find(|step| which(step)).cloned() else { return Ok(()) };
    off::undo(&step)?;
    if let Step::Device { path, front: Front::Nbd, .. } = &step
        && let Some(number) = path.to_str().and_then(|path| path.strip_prefix("/dev/nbd")?.parse().ok())
    {
        // A daemon that died meanwhile did not get this message. Without the message, the next
        // daemon would keep the volume for the device.
        until(|| control::detached(&service::control_socket(directory), number))?;
    }
    journal.remove(|other| *other == step)
}

/// Removes a volume. A volume that is not there is no error.
fn remove(directory: &Path, volume: &str) -> Result<(), Failure> {
    // Ask in any case: the daemon may still be at work for a command that was killed.
    until(|| match ask(directory, Request::VolumeRemove { name: volume.to_owned() }) {
        Err(error) if error.kind() == ErrorKind::Refused => {
            let status = control::status(&service::control_socket(directory))?;
            let is_there = status.volumes.iter().any(|it| it.name == volume);
            if is_there { Err(error) } else { Ok(()) }
        }
        done => done.map(drop),
    })
}

/// Turns a part on again. If a step fails, undoes the steps before it.
fn turn_on(
    journal: &mut Journal,
    directory: &Path,
    (volume, bytes): (&str, u64),
    front: Front,
    priority: i32,
) -> Result<PathBuf, Failure> {
    let turn_on = |journal: &mut Journal| {
        let config = fs::read_to_string(service::config_file(directory)).map_err(|error| {
            let file = service::config_file(directory);
            Failure::Failed(format!("cannot read the daemon's options in {}: {error}", file.display()))
        })?;
        let config: toml::Table = config.parse().map_err(Failure::failed)?;
        let connections = front.connections(&config, journal.state().parts);
        until(|| {
            let status = control::status(&service::control_socket(directory))?;
            match bytes.saturating_sub(status.free_bytes) {
                0 => Ok(()),
                lacking => ask(directory, Request::Take { bytes: Some(lacking) }).map(drop),
            }
        })?;
        let device = make(directory, (front, connections), (volume, bytes), journal)?;
        journal.intend(Step::Swap { path: device.clone(), priority })?;
        swaps::on(&device, priority).map_err(|error| {
            Failure::Failed(format!("the kernel refuses {} as swap: {error}; see dmesg", device.display()))
        })?;
        Ok(device)
    };
    turn_on(journal).inspect_err(|_| {
        interrupt::forget();
        let undone = take_away(journal, directory, volume);
        let undone = undone.and_then(|()| until(|| ask(directory, Request::GiveBackSpare)));
        if let Err(also) = undone {
            also.report();
        }
    })
}

/// Sends the daemon a request that takes long, and waits for the answer.
fn ask(directory: &Path, request: Request) -> Result<Moved, weir_daemon::Error> {
    control::ask_for(&service::control_socket(directory), request, |_| {})
}

/// Repeats `work` while no daemon answers. After a crash, the keeper soon starts the next daemon.
fn until<T>(work: impl Fn() -> Result<T, weir_daemon::Error>) -> Result<T, Failure> {
    let begun = Instant::now();
    let mut waiting = Waiting::new("a daemon that answers".to_owned(), PATIENCE);
    loop {
        match work() {
            Err(error) if error.kind() == ErrorKind::Unreachable && begun.elapsed() < PATIENCE => {
                waiting.look();
                thread::sleep(LOOK);
            }
            done => return done.map_err(failure::of),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn state(steps: Vec<Step>) -> State {
        State {
            schema: 1,
            version: "0.9".to_owned(),
            phase: Phase::On,
            again: state::Again::default(),
            parts: 3,
            steps,
        }
    }

    fn device(path: &str, part: Option<u8>) -> Step {
        Step::Device { path: path.into(), front: Front::Nbd, file: None, by: None, volume: part.map(volume) }
    }

    fn swap(path: &str) -> Step {
        Step::Swap { path: path.into(), priority: 7 }
    }

    fn away(part: Option<u8>) -> Step {
        Step::Away { volume: part.map(volume), front: Front::Nbd, priority: 7, bytes: 1 << 20, asleep: false }
    }

    #[test]
    fn parts_are_found_with_their_devices_wherever_their_steps_are() {
        let steps = vec![
            Step::Daemon { directory: "/run/weir".into(), unit: None, process: None },
            device("/dev/nbd1", Some(2)),
            swap("/dev/nbd1"),
            // The first part was away for a while, so its steps come after those of the second
            // part.
            device("/dev/nbd0", Some(1)),
            swap("/dev/nbd0"),
            device("/dev/nbd2", Some(3)),
        ];
        let found: Vec<_> = on(&state(steps)).into_iter().map(|part| part.device).collect();
        assert_eq!(found, [Path::new("/dev/nbd0"), Path::new("/dev/nbd1")], "the third is no swap");
    }

    #[test]
    fn every_part_has_a_line_with_what_lies_in_it_or_why_that_is_not_known() {
        let steps = vec![
            device("/dev/nbd9", Some(10)),
            swap("/dev/nbd9"),
            away(Some(2)),
            device("/dev/nbd0", Some(1)),
            swap("/dev/nbd0"),
        ];
        let find = |device: &Path| {
            let (size, used) = (ByteSize(1 << 20), ByteSize(4096));
            let path = device.display().to_string();
            (path == "/dev/nbd0").then_some(Swap { path, size, used, priority: 7 })
        };
        assert_eq!(
            listing(&state(steps), find),
            "parts     3\n\
             part 1    /dev/nbd0, 1MiB: 4KiB swapped out\n\
             part 2    off, 1MiB; weir take all turns it on\n\
             part 10   /dev/nbd9: no swap any more; weir off, then weir on\n"
        );
    }

    #[test]
    fn parts_of_an_earlier_weir_with_a_daemon_each_can_only_be_turned_off() {
        let directory = std::env::temp_dir().join(format!("weir-parts-{}", std::process::id()));
        let steps = [
            vec![device("/dev/nbd0", None), swap("/dev/nbd0"), device("/dev/nbd1", None), swap("/dev/nbd1")],
            vec![away(None), away(None), away(None)],
        ];
        for steps in steps {
            let state = state(steps);
            let listed = listing(&state, |_| None);
            let way_out = "weir off, then weir on makes them parts of one";
            assert_eq!(listed, format!("parts     3, each with its own daemon, by weir 0.9: {way_out}\n"));
            fs::create_dir_all(&directory).expect("a directory");
            fs::write(directory.join("state.json"), serde_json::to_vec(&state).expect("text"))
                .expect("written");
            for work in [give_back, take] {
                let Err(Failure::Failed(said)) = work(&directory, Some(Amount::All)) else {
                    panic!("there is no volume to move")
                };
                assert!(said.starts_with("weir 0.9 has made a daemon for each part"), "{said}");
                assert!(said.ends_with(way_out), "{said}");
            }
        }
        fs::remove_dir_all(&directory).expect("removed");
    }

    #[test]
    fn who_turns_on_while_all_parts_are_away_is_told_to_take_them_again() {
        let said = |directory: &str| all_away(&state(vec![away(Some(1))]), Path::new(directory));
        assert_eq!(said(DIRECTORY), "all 3 parts are given back: weir take all turns them on again");
        assert!(said("/r").contains("weir take all --control /r/control.sock turns"), "{}", said("/r"));
    }
}
