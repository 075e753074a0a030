//! Checks of everything that could keep `weir on` from working, before anything is changed. Each
//! refusal is one line with the next step.

use super::front::{self, Chosen};
use super::options::{BackingChoice, DIRECTORY, OnOptions, StoreChoice};
use super::place::{Priority, place};
use super::service::UNIT;
use super::settings::{self, Wish};
use super::sizing;
use super::state::Front;
use crate::doctor::{self, Capabilities};
use std::path::{Path, PathBuf};
use weir_cli::failure::Failure;
use weir_core::{ByteSize, PAGE_SIZE};
use weir_daemon::Backing;
use weir_store::vram::{self, PathMode, RingMode};
use weir_store::{Host, StoreUrl, VramUrl};
use weir_system::Machine;
use weir_system::swaps::{self, Swap};

/// The plan of `weir on`.
#[derive(Debug)]
pub struct OnPlan {
    /// The store for the pages.
    pub store: StoreChoice,
    /// The reason for the path to the card's memory that `weir on` chose; `None` if it chose none.
    pub path_why: Option<String>,
    /// The front end that makes the block device.
    pub front: Chosen,
    /// The first size to try, for all parts together.
    pub size: ByteSize,
    /// The reason for the first size.
    pub size_why: String,
    /// Room on a disk below the store, as `weir serve --backing` takes it.
    pub backing: Vec<String>,
    /// Files that are made for the backing or the store, and are removed with the device.
    pub files: Vec<PathBuf>,
    /// The daemon's systemd unit, if systemd runs and knows it.
    pub unit: Option<String>,
    /// The device's priority among the swap devices.
    pub place: Priority,
    /// Settings of the kernel to change.
    pub wishes: Vec<Wish>,
    /// systemd units that may not start while Weir is on.
    pub masks: Vec<String>,
    /// The number of NBD connections of each device: its hardware queues.
    pub connections: u16,
    /// Remarks that are worth a line and no reason to stop.
    pub notes: Vec<String>,
}

/// systemd units that write a hibernation image (systemd.special(7)).
const HIBERNATION: [&str; 3] = ["hibernate.target", "hybrid-sleep.target", "suspend-then-hibernate.target"];

/// Largest number of hardware queues that a device gets. More of them do not make it faster, since
/// all lead to the same memory.
const CONNECTIONS_MOST: usize = 8;

/// Memory that stays free besides a host store: for the daemon itself, and for the kernel.
const HOST_SPARE: ByteSize = ByteSize(256 << 20);

/// Checks everything, and changes nothing.
///
/// # Errors
/// Fails with the first reason for which `weir on` cannot work.
pub fn check(options: &OnOptions, machine: &Machine) -> Result<OnPlan, Failure> {
    sizes(options)?;
    protections(options, machine)?;
    let systemd = machine.has("/run/systemd/system");
    let masks = hibernation(options, machine, systemd)?;
    let front = front::choose(machine, options.front, &front::loadable)?;
    let (size, size_why) =
        size(options, machine, || sizing::cards(&vram::inventory(machine, &vram::Drivers::default())))?;
    let mut notes = Vec::new();
    let (backing, mut files) = backing(options, size, &Disk::this(), &mut notes)?;
    if let StoreChoice::Url(url) = &options.store {
        files.extend(new_files(url.paths()));
    }
    if options.compress.is_some() && backing.is_empty() {
        notes.push(
            "--compress gains nothing here: the device is as large as what the store holds of pages that do not shrink; a --backing PATH?size=SIZE makes it larger"
                .to_owned(),
        );
    }
    let others = swaps::all().map_err(|error| {
        Failure::Failed(format!("this kernel has no swap: /proc/swaps: {error}; use one with CONFIG_SWAP"))
    })?;
    // The unit runs in a mount namespace of its own, so other programs would not see a FUSE file
    // that its daemon mounts.
    let unit = (systemd && front.front != Front::Fuse && options.runtime == Path::new(DIRECTORY))
        .then(|| UNIT.to_owned())
        .filter(|unit| settings::systemctl(&["cat", unit]).is_ok());
    let wishes = settings::wishes(machine, front.front);
    let processors = std::thread::available_parallelism().map_or(1, usize::from);
    let (store, path_why) = path(&options.store, machine);
    Ok(OnPlan {
        store,
        path_why,
        front,
        size,
        size_why,
        backing,
        files,
        unit,
        place: place(&others, options.priority.map(i32::from)),
        wishes,
        masks,
        connections: processors.clamp(2, CONNECTIONS_MOST) as u16,
        notes: [notes, remarks(options, machine, &others)].concat(),
    })
}

fn protections(options: &OnOptions, machine: &Machine) -> Result<(), Failure> {
    let capabilities = Capabilities::of(machine);
    if !capabilities.may_admin() {
        return Err(Failure::Failed(
            "block devices and swap are for root (CAP_SYS_ADMIN): run sudo weir on".to_owned(),
        ));
    }
    if !capabilities.may_set_flusher() && !options.unsafe_no_flusher {
        return Err(Failure::Failed(
            "this system denies CAP_SYS_RESOURCE, so the daemon cannot keep itself from waiting for its own device \
             (PR_SET_IO_FLUSHER), and the machine may freeze when memory is short; run where root has it, or accept the \
             risk by --unsafe-no-flusher"
                .to_owned(),
        ));
    }
    Ok(())
}

/// The systemd units to mask, so that the machine does not hibernate. Otherwise pages in memory
/// that loses its power would be gone, and perhaps the hibernation image with them.
///
/// The kernel writes the image to the device of `resume=`. Without that option, systemd chooses a
/// large enough swap device of the highest priority, and the kernel by itself the first swap device
/// (kernel/power/swap.c). Either may be Weir's. In any case the image does not contain pages in GPU
/// memory.
fn hibernation(options: &OnOptions, machine: &Machine, systemd: bool) -> Result<Vec<String>, Failure> {
    let states = machine.text("/sys/power/state").unwrap_or_default();
    let possible = states.split_whitespace().any(|state| state == "disk");
    if !possible || options.allow_hibernation {
        return Ok(Vec::new());
    }
    if systemd {
        return Ok(HIBERNATION.map(String::from).to_vec());
    }
    if matches!(options.store, StoreChoice::Vram(_)) {
        return Err(Failure::Failed(
            "hibernation is possible here (/sys/power/state has disk), and pages in GPU memory do not survive the power going \
             off, wherever its image goes; boot with nohibernate, or promise not to hibernate before weir off by \
             --allow-hibernation"
                .to_owned(),
        ));
    }
    let resume = machine.text("/sys/power/resume").unwrap_or_default();
    if !resume.is_empty() && resume != "0:0" {
        return Ok(Vec::new());
    }
    Err(Failure::Failed(
        "hibernation is possible here and no device is set for its image, so it could go to Weir's, which does not \
         survive the power going off; boot with nohibernate, or with resume= and a disk, or promise not to hibernate by \
         --allow-hibernation"
            .to_owned(),
    ))
}

/// Checks that store and size fit together.
fn sizes(options: &OnOptions) -> Result<(), Failure> {
    match (&options.store, options.size) {
        (StoreChoice::Url(_), None) if options.parts == 1 => Ok(()),
        (StoreChoice::Url(url), _) => Err(Failure::Usage(format!(
            "--store {url} carries its own size: --size and --parts cannot change it; accepted with them: --store vram, --store host"
        ))),
        (StoreChoice::Host, None) => Err(Failure::Usage(
            "--store host takes RAM away from everything else, so say how much: --size 2GiB".to_owned(),
        )),
        _ => Ok(()),
    }
}

/// The size that was asked for, or the one that fits, with its reason.
fn size(
    options: &OnOptions,
    machine: &Machine,
    cards: impl FnOnce() -> Vec<sizing::Card>,
) -> Result<(ByteSize, String), Failure> {
    sizes(options)?;
    let asked = |size: ByteSize| (size, "as asked".to_owned());
    let (size, why) = match (&options.store, options.size) {
        (StoreChoice::Url(url), _) => {
            let size = url_size(url);
            (size, if size.0 == 0 { format!("what {url} holds") } else { "as its URL says".to_owned() })
        }
        (StoreChoice::Host, size) => asked(size.unwrap_or_default()),
        (StoreChoice::Vram(url), size) => match size.or(url.size) {
            Some(size) => asked(size),
            None => vram_size(url, options.parts.into(), machine, &cards())?,
        },
    };
    let unit = unit(&options.store, options.parts);
    let part = sizing::part(size, u64::from(options.parts), unit);
    if part.0 < 10 * unit
        && !matches!(options.store, StoreChoice::Url(_))
        && (part.0 == 0 || unit == PAGE_SIZE as u64)
    {
        return Err(Failure::Usage(format!(
            "{size} in {} parts is {part} each, less than one is worth; give a larger --size or fewer --parts",
            options.parts
        )));
    }
    // Do not count the limit of this process's cgroup: the daemon runs in another one, not in that
    // of the user's shell.
    if options.store == StoreChoice::Host
        && let Some(available) = machine.available_to_all()
        && size.0 + HOST_SPARE.0 > available.0
    {
        return Err(Failure::Failed(format!(
            "{size} of host memory cannot be locked: {available} is available, of which {HOST_SPARE} must stay free; give a smaller --size"
        )));
    }
    Ok((size, why))
}

/// The file of `--backing auto`.
pub const BACKING: &str = "/var/lib/weir/backing";

/// The values that `--backing auto` depends on.
struct Disk<'a> {
    /// Free room in the file system of a directory; `None` if there is no such directory.
    free: &'a dyn Fn(&Path) -> Option<ByteSize>,
    /// Bytes that an old backing file takes on the disk. An earlier Weir that did not end by `weir
    /// off` left the file there.
    left_over: &'a dyn Fn(&Path) -> Option<ByteSize>,
    is_there: &'a dyn Fn(&Path) -> bool,
}

impl Disk<'_> {
    fn this() -> Self {
        Disk { free: &free_bytes, left_over: &left_over, is_there: &|path| path.symlink_metadata().is_ok() }
    }
}

/// The files among `paths` that do not exist yet.
fn new_files(paths: &[PathBuf]) -> impl Iterator<Item = PathBuf> {
    paths.iter().filter(|path| path.symlink_metadata().is_err()).cloned()
}

/// The backing below the store, and the files to be made for it.
fn backing(
    options: &OnOptions,
    size: ByteSize,
    disk: &Disk<'_>,
    notes: &mut Vec<String>,
) -> Result<(Vec<String>, Vec<PathBuf>), Failure> {
    let at: Vec<&Backing> = options
        .backing
        .iter()
        .filter_map(|choice| match choice {
            BackingChoice::At(backing) => Some(backing),
            BackingChoice::Auto | BackingChoice::None => None,
        })
        .collect();
    if !at.is_empty() {
        if options.parts > 1 {
            return Err(Failure::Usage(
                "--backing serves one device, and with it the whole device shrinks and grows; accepted with it: --parts 1"
                    .to_owned(),
            ));
        }
        let files = at.iter().flat_map(|backing| new_files(backing.paths())).collect();
        return Ok((at.into_iter().map(ToString::to_string).collect(), files));
    }
    let wanted = options.backing.iter().all(|choice| *choice == BackingChoice::Auto);
    if !wanted || options.parts > 1 || !matches!(options.store, StoreChoice::Vram(_)) {
        return Ok((Vec::new(), Vec::new()));
    }
    let file = PathBuf::from(BACKING);
    let left_over = (disk.left_over)(&file);
    // The directory may not exist yet; its file system is that of the nearest ancestor that exists.
    let free = file.ancestors().skip(1).find_map(disk.free).unwrap_or_default();
    let room = ByteSize(free.0 + left_over.unwrap_or_default().0);
    if (disk.is_there)(&file) && left_over.is_none() {
        notes.push(format!(
            "no backing: {BACKING} is there and was not made now; remove it, or say --backing {BACKING}"
        ));
        Ok((Vec::new(), Vec::new()))
    } else if room.0 / 2 < size.0 {
        notes.push(format!(
            "no backing: {room} is free for {BACKING}, less than twice {size}; GPU memory is given back only by weir off"
        ));
        Ok((Vec::new(), Vec::new()))
    } else {
        notes.push(format!(
            "backing {BACKING}, {size} of {room} free there: pages go there when GPU memory is given back (--backing none for none)"
        ));
        Ok((vec![BACKING.to_owned()], vec![file]))
    }
}

fn left_over(file: &Path) -> Option<ByteSize> {
    weir_store::is_left_over(file).then(|| ByteSize(file.metadata().map_or(0, |it| it.len())))
}

fn free_bytes(directory: &Path) -> Option<ByteSize> {
    let found = rustix::fs::statvfs(directory).ok()?;
    Some(ByteSize(found.f_bavail * found.f_frsize))
}

fn vram_size(
    url: &VramUrl,
    parts: u64,
    machine: &Machine,
    cards: &[sizing::Card],
) -> Result<(ByteSize, String), Failure> {
    use weir_store::vram::Target;
    let chosen = match url.target {
        Target::All => cards,
        Target::Index(index) => {
            cards.get(index as usize..).and_then(|rest| rest.get(..1)).unwrap_or_default()
        }
        Target::Software => &[],
    };
    let Some(size) = sizing::of_cards(chosen, url, parts) else {
        let next = "for memory of a card whose driver does not tell, say --size; without a card: --store host --size 2GiB";
        let nodes = machine.names("/dev/dri", |name| name.starts_with("renderD"));
        return Err(Failure::Failed(match (chosen, nodes.is_empty()) {
            ([], true) => format!("no GPU was found ({url}): weir doctor says more; {next}"),
            ([], false) => format!("no driver tells how much memory {url} has; {next}"),
            (cards, _) => {
                let total: u64 = cards.iter().map(|card| card.total.0).sum();
                let free: u64 = cards.iter().map(|card| card.free().0).sum();
                format!(
                    "too little GPU memory is free: {} of {}; of a card others keep 1GiB, 3GiB with a display, and {} stays free; close what uses it, or say --size",
                    ByteSize(free),
                    ByteSize(total),
                    url.floor
                )
            }
        }));
    };
    let free: u64 = chosen.iter().map(|card| card.free().0).sum();
    let taken = size.0 + sizing::beyond(url, parts).0 * chosen.len() as u64;
    let display = if chosen.iter().any(|card| card.display) { ", a display among them" } else { "" };
    let left = ByteSize(free.saturating_sub(taken));
    let is_known = chosen.iter().all(|card| card.free.is_some());
    let what = if is_known { "stays free" } else { "is left to others" };
    Ok((size, format!("about {left} {what}{display}")))
}

/// Chooses the store's path, with the reason, if no option does. On a laptop it chooses the mapped
/// path alone: a CUDA context takes RAM and card memory that are worth more than its speed. A card
/// without a window gets the default paths.
fn path(store: &StoreChoice, machine: &Machine) -> (StoreChoice, Option<String>) {
    match (store, machine.portable()) {
        (StoreChoice::Vram(url), Some(case))
            if url.path.is_none() && url.ring != RingMode::On && url.window =>
        {
            let mapped = VramUrl { path: Some(PathMode::Mapped), ..url.clone() };
            let any = VramUrl { path: Some(PathMode::Auto), ..url.clone() };
            let why = format!(
                "mapped: this is a laptop (chassis type {case}), so no CUDA context takes memory where the card has Resizable BAR; --store '{any}' uses every way"
            );
            (StoreChoice::Vram(mapped), Some(why))
        }
        (store, _) => (store.clone(), None),
    }
}

/// Sizes of this store are multiples of this number of bytes. One of several parts is given back as
/// a whole, so it has whole chunks.
pub fn unit(store: &StoreChoice, parts: u8) -> u64 {
    match store {
        StoreChoice::Vram(url) => url.chunk.0,
        StoreChoice::Host if parts > 1 => Host::CHUNK.0,
        StoreChoice::Host | StoreChoice::Url(_) => PAGE_SIZE as u64,
    }
}

fn url_size(url: &StoreUrl) -> ByteSize {
    match url {
        StoreUrl::Host { size } => *size,
        StoreUrl::File(file) => file.size.unwrap_or_default(),
        _ => ByteSize(0),
    }
}

fn remarks(options: &OnOptions, machine: &Machine, others: &[Swap]) -> Vec<String> {
    let mut notes = Vec::new();
    let runtime = &options.runtime;
    if matches!(options.store, StoreChoice::Vram(_)) && doctor::suspend_loses_pages(machine, runtime) {
        const LOST: &str = "pages in GPU memory do not survive a suspend here";
        notes.push(if runtime == Path::new(DIRECTORY) {
            format!("{LOST}: install the package (weir-sleep.service), or run weir off before, or weir give-back --sleep before and weir take --sleep after")
        } else {
            format!(
                "{LOST}, and weir-sleep.service looks after {DIRECTORY} alone: run weir off --runtime {} before, or leave --runtime out",
                runtime.display()
            )
        });
    }
    if machine.text("/sys/module/zswap/parameters/enabled").as_deref() == Some("Y") {
        notes.push(
            "zswap is on: pages are compressed in RAM first and come to Weir when its pool is full"
                .to_owned(),
        );
    }
    let full = others.iter().filter(|swap| swap.used.0 > 0).map(|swap| swap.used.0).sum::<u64>();
    if full > 0 {
        notes.push(format!(
            "{} lies on other swap already and stays there until it is used; swapoff and swapon moves it",
            ByteSize(full)
        ));
    }
    notes
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::cli::{Cli, Command};
    use clap::Parser as _;
    use weir_system::fixture::Fixture;

    fn options(arguments: &[&str]) -> OnOptions {
        match Cli::try_parse_from([&["weir", "on"], arguments].concat()).expect("right").command {
            Command::On(options) => options,
            other => panic!("{other:?}"),
        }
    }

    fn refusal<T>(result: Result<T, Failure>) -> String {
        match result {
            Err(Failure::Failed(text) | Failure::Usage(text)) => text,
            _ => panic!("not refused"),
        }
    }

    #[test]
    fn without_the_capability_it_is_refused_unless_it_is_forced() {
        let root =
            |mask: &str| Fixture::new("caps-on").with("/proc/self/status", &format!("CapEff:\t{mask}\n"));
        let all = root("000001ffffffffff");
        assert!(protections(&options(&[]), &all.machine()).is_ok());
        let no_resource = root("000001fffeffffff");
        let said = refusal(protections(&options(&[]), &no_resource.machine()));
        assert!(said.contains("CAP_SYS_RESOURCE") && said.contains("--unsafe-no-flusher"), "{said}");
        assert!(protections(&options(&["--unsafe-no-flusher"]), &no_resource.machine()).is_ok());
        let user = root("0000000000000000");
        assert!(
            refusal(protections(&options(&["--unsafe-no-flusher"]), &user.machine()))
                .contains("sudo weir on")
        );
    }

    #[test]
    fn hibernation_onto_the_device_is_made_impossible_or_refused() {
        let can = |name, resume: &str| {
            Fixture::new(name).with("/sys/power/state", "freeze mem disk\n").with("/sys/power/resume", resume)
        };
        let (unset, disk) = (can("resume-unset", "0:0\n"), can("resume-disk", "8:2\n"));
        let host = options(&["--store", "host", "--size", "1G"]);
        let said = refusal(hibernation(&host, &unset.machine(), false));
        assert!(said.contains("nohibernate") && said.contains("--allow-hibernation"), "{said}");
        assert_eq!(hibernation(&host, &disk.machine(), false).ok(), Some(vec![]), "the image has its pages");
        for machine in [&unset, &disk] {
            let said = refusal(hibernation(&options(&[]), &machine.machine(), false));
            assert!(said.contains("GPU memory") && said.contains("--allow-hibernation"), "{said}");
            let masks = hibernation(&options(&[]), &machine.machine(), true).expect("systemd masks it");
            assert_eq!(masks.len(), 3);
        }
        let never = Fixture::new("no-disk").with("/sys/power/state", "freeze mem\n");
        assert_eq!(hibernation(&options(&[]), &never.machine(), true).ok(), Some(vec![]));
        let allowed = hibernation(&options(&["--allow-hibernation"]), &unset.machine(), false);
        assert_eq!(allowed.ok(), Some(vec![]));
    }

    #[test]
    fn a_size_is_the_one_asked_for_or_the_one_that_the_cards_allow() {
        let machine = Fixture::new("sizes").with("/proc/meminfo", "MemAvailable:    4194304 kB\n");
        let card = sizing::Card { total: ByteSize(8 << 30), free: None, display: true };
        let size = |arguments: &[&str]| size(&options(arguments), &machine.machine(), || vec![card]);
        assert_eq!(size(&[]).expect("a card").0, ByteSize(5 << 30));
        assert_eq!(size(&["--size", "6G"]).expect("asked").0, ByteSize(6 << 30));
        assert_eq!(size(&["--store", "vram:0?size=2G"]).expect("asked").0, ByteSize(2 << 30));
        assert_eq!(size(&["--store", "host", "--size", "1G"]).expect("fits").0, ByteSize(1 << 30));
        for (arguments, words) in [
            (&["--store", "host"][..], "--size 2GiB"),
            (&["--store", "host", "--size", "4G"], "smaller --size"),
            (&["--store", "vram:3"], "no GPU was found"),
            (&["--store", "host:1GiB", "--parts", "2"], "--store host"),
            (&["--store", "host", "--size", "16K"], "less than one is worth"),
            (&["--store", "host", "--size", "511M", "--parts", "4"], "fewer --parts"),
        ] {
            let said = refusal(size(arguments));
            assert!(said.contains(words), "{arguments:?}: {said}");
        }
    }

    #[test]
    fn host_memory_is_what_the_machine_has_whatever_the_users_own_cgroup_allows() {
        let machine = Fixture::new("sizes-in-a-cgroup")
            .with("/proc/meminfo", "MemAvailable:    4194304 kB\n")
            .with("/proc/self/cgroup", "0::/small\n")
            .with("/sys/fs/cgroup/small/memory.max", "1073741824\n")
            .with("/sys/fs/cgroup/small/memory.current", "0\n");
        let size =
            |asked| size(&options(&["--store", "host", "--size", asked]), &machine.machine(), Vec::new);
        assert!(size("2G").is_ok());
        assert!(refusal(size("4G")).contains("4GiB is available"));
    }

    #[test]
    fn the_size_is_shown_with_what_is_really_left_free() {
        let machine = Fixture::new("left").machine();
        let why = |arguments: &[&str], free: Option<u64>| {
            let free = free.map(|mib| ByteSize(mib << 20));
            let card = sizing::Card { total: ByteSize(8 << 30), free, display: true };
            size(&options(arguments), &machine, || vec![card]).expect("a size")
        };
        let (size, said) = why(&[], Some(4608));
        assert_eq!(size, ByteSize(3968 << 20));
        assert_eq!(said, "about 512MiB stays free, a display among them");
        assert!(why(&["--parts", "4"], Some(4608)).1.starts_with("about 512MiB stays free"));
        assert!(why(&["--store", "vram:?floor=1GiB"], Some(4608)).1.starts_with("about 1GiB stays free"));
        assert!(why(&[], None).1.starts_with("about 2.9GiB is left to others"));
        let tight = sizing::Card { total: ByteSize(8 << 30), free: Some(ByteSize(700 << 20)), display: true };
        let said = refusal(super::size(&options(&[]), &machine, || vec![tight]));
        assert!(said.contains("700MiB of 8GiB") && said.contains("512MiB stays free"), "{said}");
    }

    #[test]
    fn backing_is_offered_for_gpu_memory_where_the_disk_keeps_as_much_free_again() {
        let size = ByteSize(4 << 30);
        let offered = |arguments: &[&str], gib: u64| {
            let free = move |directory: &Path| (directory == Path::new("/")).then_some(ByteSize(gib << 30));
            let disk = Disk { free: &free, left_over: &|_| None, is_there: &|_| false };
            backing(&options(arguments), size, &disk, &mut Vec::new())
        };
        let taken = (vec![BACKING.to_owned()], vec![PathBuf::from(BACKING)]);
        assert_eq!(offered(&[], 8).ok(), Some(taken.clone()));
        // After a power failure the backing file is still there. Weir takes its own file again, and
        // never that of another program.
        let there = |left_over: Option<ByteSize>| {
            let free = |directory: &Path| (directory == Path::new("/")).then_some(ByteSize(4 << 30));
            let disk = Disk { free: &free, left_over: &|_| left_over, is_there: &|_| true };
            backing(&options(&[]), size, &disk, &mut Vec::new()).ok()
        };
        assert_eq!(there(Some(size)), Some(taken));
        assert_eq!(there(None), Some((vec![], vec![])));
        for (arguments, gib) in [
            (&[][..], 7),
            (&["--backing", "none"], 100),
            (&["--store", "host"], 100),
            (&["--parts", "2"], 100),
        ] {
            assert_eq!(offered(arguments, gib).ok(), Some((vec![], vec![])), "{arguments:?}");
        }
        let said = offered(&["--backing", "/srv/pages"], 0).expect("taken as it is");
        assert_eq!(said, (vec!["file:/srv/pages".to_owned()], vec![PathBuf::from("/srv/pages")]));
        assert!(refusal(offered(&["--backing", "/srv/pages", "--parts", "2"], 0)).contains("--parts 1"));
    }

    #[test]
    fn on_a_laptop_pages_go_by_the_window_alone_unless_the_url_says_how() {
        let case = |case: &str| {
            Fixture::new(&format!("case-{case}")).with("/sys/class/dmi/id/chassis_type", &format!("{case}\n"))
        };
        let chosen = |fixture: &Fixture, store: &str| {
            let store = options(&["--store", store, "--size", "1G"]).store;
            let (store, why) = path(&store, &fixture.machine());
            (store.to_string(), why)
        };
        for portable in ["8", "9", "10", "14", "30", "31", "32"] {
            let laptop = case(portable);
            let (store, why) = chosen(&laptop, "vram:0?floor=1GiB");
            assert_eq!(store, "vram:0?floor=1GiB&path=mapped");
            let why = why.expect("a reason");
            assert!(why.contains(portable) && why.contains("vram:0?floor=1GiB&path=auto"), "{why}");
        }
        let laptop = case("10");
        for said in ["vram:?path=auto", "vram:?path=engine", "vram:?ring=on", "vram:?window=off", "host:1GiB"]
        {
            assert_eq!(chosen(&laptop, said), (said.to_owned(), None));
        }
        for (fixture, said) in [(case("3"), "vram:"), (Fixture::new("no-dmi"), "vram:1")] {
            assert_eq!(chosen(&fixture, said), (said.to_owned(), None));
        }
    }

    #[test]
    fn zswap_and_swapped_pages_are_mentioned() {
        let zswap = Fixture::new("zswap").with("/sys/module/zswap/parameters/enabled", "Y\n");
        let swap =
            Swap { path: "/dev/sda2".into(), size: ByteSize(1 << 30), used: ByteSize(1 << 20), priority: -2 };
        assert_eq!(remarks(&options(&[]), &zswap.machine(), &[swap]).len(), 2);
        assert_eq!(remarks(&options(&[]), &Fixture::new("no-zswap").machine(), &[]).len(), 0);
    }

    #[test]
    fn a_suspend_that_would_lose_the_pages_is_mentioned() {
        let loses = Fixture::new("suspend-loses")
            .with("/sys/power/state", "freeze mem\n")
            .with("/proc/driver/nvidia/params", "PreserveVideoMemoryAllocations: 0\n");
        let said = remarks(&options(&[]), &loses.machine(), &[]);
        assert!(
            said.len() == 1 && said[0].contains("weir-sleep.service") && said[0].contains("weir off"),
            "{said:?}"
        );
        let host = options(&["--store", "host", "--size", "1G"]);
        assert_eq!(remarks(&host, &loses.machine(), &[]), Vec::<String>::new());
        // The package's unit works only with the default directory.
        let unit = "/usr/lib/systemd/system/sleep.target.requires/weir-sleep.service";
        let loses = loses.with("/run/systemd/system/x", "").with(unit, "");
        assert_eq!(remarks(&options(&[]), &loses.machine(), &[]), Vec::<String>::new());
        let said = remarks(&options(&["--runtime", "/run/other"]), &loses.machine(), &[]);
        assert!(said.len() == 1 && said[0].contains("weir off --runtime /run/other"), "{said:?}");
        let saves = loses.with("/proc/driver/nvidia/params", "PreserveVideoMemoryAllocations: 1\n");
        assert_eq!(remarks(&options(&[]), &saves.machine(), &[]), Vec::<String>::new());
    }
}
