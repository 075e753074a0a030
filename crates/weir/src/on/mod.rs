//! `weir on`, `off`, `restart` and `top`: set up a swap device, and remove all of it again.
//!
//! `weir on` checks everything that could stand in the way, then does its steps in order. The
//! journal records each step before it is done. `weir off` undoes the steps in reverse, and brings
//! the pages back first. If a step fails, or the machine goes down between two, the finished steps
//! are undone from the journal.

mod again;
mod battery;
mod drain;
pub mod front;
pub mod interrupt;
mod off;
mod options;
pub mod parts;
mod place;
mod policy;
mod preflight;
mod restart;
mod service;
mod settings;
mod sizing;
mod state;
mod swap_area;
mod top;
mod unread;

pub use battery::run as battery;
pub use off::run as off;
pub use options::{BatteryOptions, OffOptions, OnOptions, RestartOptions, StoreChoice, TopOptions};
pub use restart::run as restart;
pub use service::started;
pub use top::run as top;

use clap::ValueEnum as _;
use preflight::OnPlan;
use service::Service;
use state::{Again, Journal, Phase, State, Step};
use std::path::{Path, PathBuf};
use toml::{Table, Value};
use weir_cli::failure::Failure;
use weir_core::ByteSize;
use weir_daemon::control::{Condition, Status};
use weir_store::{StoreUrl, VramUrl};
use weir_system::Machine;
use weir_system::swaps;

/// Turns Weir on.
pub fn on(options: &OnOptions) -> Result<(), Failure> {
    if let Some(note) = &options.again {
        return again::turn_on(note);
    }
    let machine = Machine::this();
    let options = &options.clone().absolute().map_err(Failure::failed)?;
    if let Some(state) = state::read(&options.runtime).or_else(|failure| match failure {
        // Without root the journal cannot be read; the preflight says so in better words.
        Failure::Failed(_) if !rustix::process::geteuid().is_root() => Ok(None),
        failure => Err(failure),
    })? && state.phase == Phase::On
        && state.swaps().all(swaps::is_on)
    {
        println!("{}", already(&state, &options.runtime));
        return Ok(());
    }
    let plan = preflight::check(options, &machine)?;
    interrupt::watch()?;
    let mut journal = Journal::open(&options.runtime)?;
    if !journal.state().steps.is_empty() {
        println!("an earlier weir on or off did not come to its end: undoing what it left");
        let finished = off::finish(journal, None)?;
        off::tell(finished.lost());
        journal = finished.reopen(&options.runtime)?;
    }
    match turn_on(options, &plan, &mut journal) {
        Ok(()) => again::forget(&options.runtime),
        Err(failure) => {
            interrupt::forget();
            match off::finish(journal, None).and_then(off::Finished::remove) {
                Ok(()) => Err(failure),
                Err(also) => {
                    also.report();
                    eprintln!("weir: what was done is not all undone; run weir off");
                    Err(failure)
                }
            }
        }
    }
}

fn already(state: &State, directory: &Path) -> String {
    if state.is_all_away() {
        return format!("already on, but {}; weir off turns it off", parts::all_away(state, directory));
    }
    let devices: Vec<String> = state.swaps().map(|path| path.display().to_string()).collect();
    format!("already on: {}; weir status says how it is, weir off turns it off", devices.join(", "))
}

/// The arguments after the command's own name, and the working directory.
fn invocation() -> Again {
    // Every argument is valid text, since clap has parsed them all by now.
    let arguments = std::env::args_os().skip(2).map(|it| it.to_string_lossy().into_owned()).collect();
    let directory = std::env::current_dir().ok().filter(|directory| directory.to_str().is_some());
    Again { arguments, directory: directory.unwrap_or_else(|| "/".into()) }
}

fn turn_on(options: &OnOptions, plan: &OnPlan, journal: &mut Journal) -> Result<(), Failure> {
    journal.begin(invocation(), options.parts)?;
    for module in &plan.front.modules {
        front::load(module, journal)?;
    }
    if !plan.masks.is_empty() {
        journal.intend(Step::Mask { units: plan.masks.clone() })?;
        let masks = plan.masks.iter().map(String::as_str);
        settings::systemctl(&["mask", "--runtime"].into_iter().chain(masks).collect::<Vec<_>>())?;
    }
    for path in &plan.files {
        journal.intend(Step::File { path: path.clone() })?;
        off::make_own_directory(path)?;
    }
    let directory = &options.runtime;
    let (status, part) = start(options, plan, journal)?;
    let mut devices = Vec::new();
    let front = (plan.front.front, plan.connections);
    let bytes = if options.parts == 1 {
        interrupt::check()?;
        let size = ByteSize(status.volume.bytes);
        let device = front::attach(front.0, directory, front.1, None, &status, journal)?;
        swap_area::make(&device, size)?;
        devices.push(device);
        size.0
    } else {
        for number in 1..=options.parts {
            interrupt::check()?;
            let volume = parts::volume(number);
            devices.push(parts::make(directory, front, (&volume, part.0), journal)?);
        }
        part.0 * u64::from(options.parts)
    };
    let cards: Vec<_> = status.stores.into_iter().flat_map(|store| store.conditions).collect();
    interrupt::check()?;
    for wish in &plan.wishes {
        settings::apply(wish, journal)?;
    }
    for device in &devices {
        journal.intend(Step::Swap { path: device.clone(), priority: plan.place.priority })?;
        swaps::on(device, plan.place.priority).map_err(|error| {
            Failure::Failed(format!("the kernel refuses {} as swap: {error}; see dmesg", device.display()))
        })?;
    }
    journal.enter(Phase::On)?;
    report(options, plan, &devices, ByteSize(bytes), &cards);
    Ok(())
}

fn report(options: &OnOptions, plan: &OnPlan, devices: &[PathBuf], size: ByteSize, cards: &[Condition]) {
    let names: Vec<String> = devices.iter().map(|device| device.display().to_string()).collect();
    let smaller = if size < plan.size && matches!(plan.store, StoreChoice::Vram(_)) {
        format!("; {} was not to be had", plan.size)
    } else {
        String::new()
    };
    println!("size      {size} on {} ({}{smaller})", plan.store, plan.size_why);
    if let Some(why) = &plan.path_why {
        println!("path      {why}");
    }
    for card in cards {
        println!("card      {card}");
        if card.is_slow() {
            println!("note      slower by far than through the window: weir doctor says what to do");
        }
    }
    let why = if plan.front.why.is_empty() { String::new() } else { format!(" ({})", plan.front.why) };
    println!("device    {} by {}{why}", names.join(", "), plan.front.front.name());
    println!("priority  {}: {}", plan.place.priority, plan.place.why);
    for wish in &plan.wishes {
        let key = wish.path.strip_prefix("/proc/sys").unwrap_or(&wish.path).display().to_string();
        println!("setting   {} {} -> {}: {}", key.replace('/', "."), wish.before, wish.after, wish.why);
    }
    if !plan.masks.is_empty() {
        println!("sleep     hibernation is masked meanwhile: its image would not survive on this device");
    }
    for note in &plan.notes {
        println!("note      {note}");
    }
    if let Some(risk) = plan.front.front.risk(&Machine::this().release()) {
        println!("note      --front {}: {risk}", plan.front.front.name());
    }
    if options.unsafe_no_flusher {
        println!("note      --unsafe-no-flusher: under memory pressure the machine may freeze");
    }
    println!(
        "on: room for {size} of pages more than RAM holds; weir status and weir top show it, weir off undoes it"
    );
}

/// Starts the daemon. Returns its status and the size of a part. Tries again with a smaller size if
/// the card has too little memory.
fn start(options: &OnOptions, plan: &OnPlan, journal: &mut Journal) -> Result<(Status, ByteSize), Failure> {
    let directory = &options.runtime;
    let unit = preflight::unit(&plan.store, options.parts);
    let mut last = None;
    let steps = journal.state().steps.len();
    for size in sizing::tries(plan.size) {
        let part = sizing::part(size, options.parts.into(), unit);
        let all = ByteSize(part.0 * u64::from(options.parts));
        let service = Service {
            directory: directory.clone(),
            unit: plan.unit.clone(),
            config: config(options, plan, directory, all),
        };
        match service.start(journal) {
            Ok(status) => return Ok((status, part)),
            // Another program has taken memory of the card since its free memory was read.
            Err(Failure::NoRoom(reason)) if matches!(plan.store, StoreChoice::Vram(_)) => {
                if journal.state().steps.len() > steps {
                    off::undo_last(journal)?;
                }
                last = Some(Failure::NoRoom(reason));
            }
            Err(failure) => return Err(failure),
        }
    }
    Err(last.expect("there is a first try"))
}

/// The options of `weir serve` for a daemon of `size` bytes.
fn config(options: &OnOptions, plan: &OnPlan, directory: &Path, size: ByteSize) -> Table {
    let text = |path: PathBuf| path.display().to_string();
    let store = match &plan.store {
        StoreChoice::Vram(url) => StoreUrl::Vram(VramUrl { size: Some(size), ..url.clone() }).to_string(),
        StoreChoice::Host => StoreUrl::Host { size }.to_string(),
        StoreChoice::Url(url) => url.to_string(),
    };
    let mut config = Table::new();
    let mut put = |key: &str, value: Value| config.insert(key.to_owned(), value);
    put("store", service::list([store]));
    if !plan.backing.is_empty() {
        put("backing", service::list(plan.backing.clone()));
    }
    if let Some(algorithm) = options.compress.and_then(|it| it.to_possible_value()) {
        put("compress", Value::String(algorithm.get_name().to_owned()));
    }
    if let Some(address) = &options.metrics {
        put("metrics", Value::String(address.to_string()));
    }
    put("swap", Value::Boolean(true));
    put("keeper", Value::Boolean(true));
    put("control", Value::String(text(service::control_socket(directory))));
    put("start-report", Value::String(text(service::start_report(directory))));
    if options.parts > 1 {
        put("pool", Value::Integer(options.parts.into()));
    }
    for (key, value) in plan.front.front.config(directory, plan.connections, options.parts) {
        put(key, value);
    }
    put("spin-us", Value::Integer(options.policy.spin_us().into()));
    if options.policy.bounds_cpu_latency() {
        put("cpu-latency", Value::Boolean(true));
    }
    if options.unsafe_no_flusher {
        put("unsafe-no-flusher", Value::Boolean(true));
    }
    config
}
