//! A device in parts (`weir on --parts`). `weir give-back` turns some of them off, which frees
//! their memory while the others stay. `weir take` turns them on again. `weir status` lists them.

use super::options::DIRECTORY;
use super::state::{Front, Journal, Phase, State, Step};
use super::{drain, front, interrupt, off, service, state, swap_area};
use crate::cli::Amount;
use crate::failure;
use service::Service;
use std::fs;
use std::path::{Path, PathBuf};
use std::time::Instant;
use weir_cli::failure::Failure;
use weir_core::{ByteSize, PAGE_SIZE};
use weir_daemon::control::{self, Status};
use weir_system::swaps;

/// A part that is on.
#[derive(Clone, PartialEq, Eq, Debug)]
struct Part {
    directory: PathBuf,
    device: PathBuf,
    front: Front,
    priority: i32,
}

/// The run-time directory of the daemon that answers at `control`, if that daemon is one of several
/// parts.
pub fn among(control: &Path) -> Option<PathBuf> {
    let (directory, state) = state_at(control)?;
    (state.parts > 1).then(|| directory.to_owned())
}

/// The number of parts of the device whose first daemon answers at `control`; 0 if no daemon of
/// `weir on` does.
pub fn count(control: &Path) -> u8 {
    state_at(control).map_or(0, |(_, state)| state.parts)
}

/// The state that `weir on` has written beside `control`, with its directory.
fn state_at(control: &Path) -> Option<(&Path, State)> {
    let directory = control.parent()?;
    Some((directory, state::read(directory).ok()??))
}

/// A line for each part: its device, the bytes of pages on it, and the socket of its own daemon.
///
/// # Errors
/// Fails when the journal of `weir on` cannot be read.
pub fn lines(directory: &Path) -> Result<String, Failure> {
    let Some(state) = state::read(directory)? else { return Ok(String::new()) };
    // The paths in the journal are absolute, so make this one absolute too.
    let directory = std::path::absolute(directory).unwrap_or_else(|_| directory.to_owned());
    Ok(listing(&directory, &state, |socket| control::status(socket).ok()))
}

fn listing(root: &Path, state: &State, ask: impl Fn(&Path) -> Option<Status>) -> String {
    let number = |directory: &Path| {
        let name = directory.strip_prefix(root).ok().and_then(|name| name.to_str()?.parse::<u8>().ok());
        name.unwrap_or(1)
    };
    let mut lines: Vec<(u8, String)> = away(state)
        .iter()
        .filter_map(|step| match step {
            Step::Away { directory, bytes, .. } => {
                Some((number(directory), format!("off, {}; weir take all turns it on", ByteSize(*bytes))))
            }
            _ => None,
        })
        .collect();
    for Part { directory, device, .. } in on(state) {
        let number = number(&directory);
        let socket = service::control_socket(&directory);
        let line = match ask(&socket) {
            Some(Status { volume, .. }) => {
                let (bytes, stored) = (ByteSize(volume.bytes), ByteSize(volume.stored * PAGE_SIZE as u64));
                let more = match number {
                    1 => "see below".to_owned(),
                    _ => format!("weir status --control {}", socket.display()),
                };
                format!("{}, {bytes}: {stored} stored; {more}", device.display())
            }
            None => format!("{}: its daemon does not answer at {}", device.display(), socket.display()),
        };
        lines.push((number, line));
    }
    lines.sort();
    let line = |(number, line): &(u8, String)| format!("part {number:<5}{line}\n");
    let first = format!("{:<10}{}, each with its own daemon\n", "parts", state.parts);
    first + &lines.iter().map(line).collect::<String>()
}

/// The control socket that commands use if the user names none. While all parts of the system's
/// device are away, no daemon answers. Then it is the socket at which a daemon has answered before.
pub fn find() -> PathBuf {
    let found = control::find();
    let system = service::control_socket(Path::new(DIRECTORY));
    if !found.exists() && among(&system).is_some() { system } else { found }
}

/// The status of the daemon at `control`. If every part has given its memory back, the error says
/// so.
///
/// # Errors
/// Fails as [`control::status`] does.
pub fn status(control: &Path) -> Result<Status, Failure> {
    control::status(control).map_err(|error| match silence(control) {
        Some(why) => Failure::Failed(format!("no daemon answers at {}: {why}", control.display())),
        None => failure::of(error),
    })
}

/// Explains that no daemon answers at `control` because every part has given its memory back, with
/// the next step; `None` for another reason.
fn silence(control: &Path) -> Option<String> {
    let (directory, state) = state_at(control)?;
    state.is_all_away().then(|| all_away(&state, directory))
}

/// The message about a device in `directory` whose parts are all away.
pub fn all_away(state: &State, directory: &Path) -> String {
    let socket = service::control_socket(directory);
    let elsewhere = directory != Path::new(DIRECTORY);
    let control = if elsewhere { format!(" --control {}", socket.display()) } else { String::new() };
    format!("all {} parts are given back: weir take all{control} turns them on again", state.parts)
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
    // The first part's daemon answers `weir status`, so it is turned off last.
    for part in parts.iter().rev() {
        if matches!(amount, Some(Amount::Size(wanted)) if bytes >= wanted.0) {
            break;
        }
        let size = size(part)?;
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
        // The user asked for all of the memory, so a part that is away for a sleep stays away after
        // it.
        journal.revise(|step| {
            if let Step::Away { asleep, .. } = step {
                *asleep = false;
            }
        })?;
    }
    for (part, size) in &chosen {
        turn_off(&mut journal, part, *size, amount.is_none())?;
    }
    println!(
        "gave back {} in {:.2} s{}; {} of {} parts stay on",
        ByteSize(bytes),
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
    // The part that was given back last comes back first. The first part is given back last of all.
    for step in away(journal.state()).into_iter().rev() {
        if matches!(amount, Some(Amount::Size(wanted)) if bytes >= wanted.0) {
            break;
        }
        let Step::Away { bytes: size, asleep, directory, config, front, priority } = &step else { continue };
        if amount.is_none() && !asleep {
            continue;
        }
        let device = turn_on(&mut journal, directory, config, *front, *priority);
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
    // Finish the steps of a command that died while it turned a part off or on.
    for step in away(journal.state()) {
        let Step::Away { directory, .. } = &step else { continue };
        take_away(&mut journal, directory)?;
    }
    Ok(journal)
}

/// The parts that are on, in order.
fn on(state: &State) -> Vec<Part> {
    let mut parts = Vec::new();
    let mut latest = None;
    for step in &state.steps {
        match step {
            Step::Daemon { directory, .. } => latest = Some(directory),
            Step::Device { path, front, .. } => {
                let Some(directory) = latest.take() else { continue };
                let priority = state.steps.iter().find_map(|step| match step {
                    Step::Swap { path: swap, priority } if swap == path => Some(*priority),
                    _ => None,
                });
                let Some(priority) = priority else { continue };
                let (directory, device) = (directory.clone(), path.clone());
                parts.push(Part { directory, device, front: *front, priority });
            }
            _ => {}
        }
    }
    parts.sort_by_key(|part| part.directory.components().count());
    parts
}

fn away(state: &State) -> Vec<Step> {
    state.steps.iter().filter(|step| matches!(step, Step::Away { .. })).cloned().collect()
}

fn size(part: &Part) -> Result<u64, Failure> {
    let status = control::status(&service::control_socket(&part.directory));
    status.map(|status| status.volume.bytes).map_err(failure::of)
}

fn turn_off(journal: &mut Journal, part: &Part, bytes: u64, asleep: bool) -> Result<(), Failure> {
    let config = fs::read_to_string(service::config_file(&part.directory)).map_err(|error| {
        Failure::Failed(format!(
            "cannot read the options of the part in {}: {error}",
            part.directory.display()
        ))
    })?;
    let away = Step::Away {
        directory: part.directory.clone(),
        config,
        front: part.front,
        priority: part.priority,
        bytes,
        asleep,
    };
    journal.intend(away.clone())?;
    let done = take_away(journal, &part.directory);
    if done.is_err() && swaps::is_on(&part.device) {
        // The pages of this part did not come back, so it is on as before.
        journal.remove(|step| *step == away)?;
    }
    done
}

/// Undoes the steps of a part: swap, device, daemon, in this order. A ublk device ends when its
/// daemon does.
fn take_away(journal: &mut Journal, directory: &Path) -> Result<(), Failure> {
    let after = journal.state().steps.iter().skip_while(|step| !is_daemon(step, directory)).skip(1);
    let device = after.take_while(|step| !matches!(step, Step::Daemon { .. })).find_map(|step| match step {
        Step::Device { path, .. } => Some(path.clone()),
        _ => None,
    });
    let Some(device) = device else { return undo(journal, |step| is_daemon(step, directory)) };
    undo(journal, |step| matches!(step, Step::Swap { path, .. } if *path == device))?;
    let is_device = |step: &Step| matches!(step, Step::Device { path, .. } if *path == device);
    let is_ublk = |step: &Step| matches!(step, Step::Device { front: Front::Ublk, .. });
    undo(journal, |step| is_device(step) && !is_ublk(step))?;
    undo(journal, |step| is_daemon(step, directory))?;
    undo(journal, is_device)
}

fn is_daemon(step: &Step, of: &Path) -> bool {
    matches!(step, Step::Daemon { directory, .. } if directory == of)
}

fn undo(journal: &mut Journal, which: impl Fn(&Step) -> bool) -> Result<(), Failure> {
    let Some(step) = journal.state().steps.iter().find(|step| which(step)).cloned() else { return Ok(()) };
    off::undo(&step)?;
    journal.remove(|other| *other == step)
}

/// Turns a part on again. Its daemon gets the directory `directory` and the options in `config`. If
/// a step fails, undoes the steps before it.
fn turn_on(
    journal: &mut Journal,
    directory: &Path,
    config: &str,
    front: Front,
    priority: i32,
) -> Result<PathBuf, Failure> {
    let config: toml::Table = config.parse().map_err(Failure::failed)?;
    let connections = front.connections(&config);
    let service = Service { directory: directory.to_owned(), unit: None, config };
    let turn_on = |journal: &mut Journal| {
        let status = service.start(journal)?;
        let device = front::attach(front, directory, connections, &status, journal)?;
        swap_area::make(&device, ByteSize(status.volume.bytes))?;
        journal.intend(Step::Swap { path: device.clone(), priority })?;
        swaps::on(&device, priority).map_err(|error| {
            Failure::Failed(format!("the kernel refuses {} as swap: {error}; see dmesg", device.display()))
        })?;
        Ok(device)
    };
    turn_on(journal).inspect_err(|_| {
        interrupt::forget();
        if let Err(also) = take_away(journal, directory) {
            also.report();
        }
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    fn state(steps: Vec<Step>) -> State {
        State {
            schema: 1,
            version: String::new(),
            phase: Phase::On,
            again: state::Again::default(),
            parts: 3,
            steps,
        }
    }

    #[test]
    fn parts_are_found_with_their_devices_wherever_their_steps_are() {
        let daemon =
            |directory: &str| Step::Daemon { directory: directory.into(), unit: None, process: None };
        let device = |path: &str| Step::Device { path: path.into(), front: Front::Nbd, file: None, by: None };
        let swap = |path: &str| Step::Swap { path: path.into(), priority: 7 };
        let steps = vec![
            // The first part was away for a while, so its steps come after those of the second
            // part.
            daemon("/run/weir/2"),
            device("/dev/nbd1"),
            swap("/dev/nbd1"),
            daemon("/run/weir"),
            device("/dev/nbd0"),
            swap("/dev/nbd0"),
            daemon("/run/weir/3"),
        ];
        let state = state(steps);
        let found: Vec<_> = on(&state).into_iter().map(|part| part.device).collect();
        assert_eq!(found, [Path::new("/dev/nbd0"), Path::new("/dev/nbd1")], "the third is no swap");
    }

    #[test]
    fn every_part_has_a_line_with_what_lies_in_it_or_why_that_is_not_known() {
        let steps = vec![
            Step::Daemon { directory: "/run/weir".into(), unit: None, process: None },
            Step::Device { path: "/dev/nbd0".into(), front: Front::Nbd, file: None, by: None },
            Step::Swap { path: "/dev/nbd0".into(), priority: 7 },
            Step::Away {
                directory: "/run/weir/2".into(),
                config: String::new(),
                front: Front::Nbd,
                priority: 7,
                bytes: 1 << 20,
                asleep: false,
            },
            Step::Daemon { directory: "/run/weir/3".into(), unit: None, process: None },
            Step::Device { path: "/dev/nbd2".into(), front: Front::Nbd, file: None, by: None },
            Step::Swap { path: "/dev/nbd2".into(), priority: 7 },
            Step::Daemon { directory: "/run/weir/4".into(), unit: None, process: None },
            Step::Device { path: "/dev/nbd3".into(), front: Front::Nbd, file: None, by: None },
            Step::Swap { path: "/dev/nbd3".into(), priority: 7 },
        ];
        let state = State { parts: 4, ..state(steps) };
        let answers =
            |socket: &Path| (socket != Path::new("/run/weir/4/control.sock")).then(|| Status::example(0));
        let listed = listing(Path::new("/run/weir"), &state, answers);
        assert_eq!(
            listed,
            "parts     4, each with its own daemon\n\
             part 1    /dev/nbd0, 1MiB: 256KiB stored; see below\n\
             part 2    off, 1MiB; weir take all turns it on\n\
             part 3    /dev/nbd2, 1MiB: 256KiB stored; weir status --control /run/weir/3/control.sock\n\
             part 4    /dev/nbd3: its daemon does not answer at /run/weir/4/control.sock\n"
        );
    }

    #[test]
    fn who_finds_nobody_since_all_parts_are_away_is_told_to_take_them_again() {
        let directory = std::env::temp_dir().join(format!("weir-away-{}", std::process::id()));
        fs::create_dir_all(&directory).expect("a directory");
        let control = service::control_socket(&directory);
        let away = |part: &str| Step::Away {
            directory: directory.join(part),
            config: String::new(),
            front: Front::Nbd,
            priority: 7,
            bytes: 1 << 20,
            asleep: false,
        };
        let swap = Step::Swap { path: "/dev/nbd0".into(), priority: 7 };
        let said = |steps: Vec<Step>| {
            let text = serde_json::to_vec(&state(steps)).expect("text");
            fs::write(directory.join("state.json"), text).expect("written");
            silence(&control)
        };
        let words = said(vec![away(""), away("2"), away("3")]).expect("all are away");
        let way_out = format!("weir take all --control {}", control.display());
        assert!(words.contains("all 3 parts") && words.contains(&way_out), "{words}");
        let Failure::Failed(words) = status(&control).expect_err("nobody is there") else {
            panic!("asked rightly")
        };
        assert!(words.contains(&way_out) && !words.contains("weir on turns"), "{words}");
        assert_eq!(said(vec![away("2"), away("3"), swap]), None);
        assert_eq!(said(vec![]), None);
        fs::remove_dir_all(&directory).expect("removed");
        assert_eq!(silence(&control), None);
        assert!(all_away(&state(vec![]), Path::new(DIRECTORY)).contains("weir take all turns"));
    }
}
