//! Checks of the daemon's surroundings: the init system, sleep, the battery, and room on the disk.

use super::finding::Finding;
use std::path::Path;
use weir_core::ByteSize;
use weir_daemon::control::SYSTEM as DIRECTORY;
use weir_system::Machine;

/// Least free room on the disk for which the report does not warn.
const ROOM_WANTED: ByteSize = ByteSize(1 << 30);

const UNIT_DIRECTORIES: [&str; 4] =
    ["/etc/systemd/system", "/run/systemd/system", "/usr/lib/systemd/system", "/lib/systemd/system"];

pub fn check(machine: &Machine) -> Vec<Finding> {
    vec![
        systemd(machine),
        suspend(machine),
        battery(machine),
        cpu_latency(machine),
        backing(machine.room("/var/lib")),
    ]
}

fn has_unit(machine: &Machine, name: &str) -> bool {
    UNIT_DIRECTORIES.iter().any(|directory| machine.has(&format!("{directory}/{name}")))
}

fn systemd(machine: &Machine) -> Finding {
    // /run/systemd/system exists if systemd is the init system (sd_booted(3)).
    if !machine.has("/run/systemd/system") {
        Finding::ok("systemd", "not the init here: weir on runs the daemon by itself")
    } else if !has_unit(machine, "weir.service") {
        Finding::warn(
            "systemd",
            "runs, but has no weir.service: at shutdown the daemon is killed before what it holds is back",
            "install the package (packaging/deb makes it), or run weir off before you shut down",
        )
    } else if machine.has("/sys/fs/cgroup/system.slice/weir.service") {
        Finding::ok("systemd", "weir.service is active")
    } else {
        Finding::ok("systemd", "weir.service is installed and not active")
    }
}

fn can_suspend(machine: &Machine) -> bool {
    let states = machine.text("/sys/power/state").unwrap_or_default();
    states.split_whitespace().any(|state| matches!(state, "mem" | "standby" | "freeze"))
}

/// Whether NVIDIA's driver saves all of its memory in a suspend; `None` without that driver. Other
/// vendors' drivers move theirs to RAM.
fn driver_saves(machine: &Machine) -> Option<bool> {
    let kept = machine.value("/proc/driver/nvidia/params", "PreserveVideoMemoryAllocations")?;
    Some(kept == "1")
}

/// Whether systemd runs weir-sleep.service before the machine sleeps. systemd does not run a unit
/// that is installed but not enabled.
fn has_sleep_unit(machine: &Machine) -> bool {
    let hooked = |kind| has_unit(machine, &format!("sleep.target.{kind}/weir-sleep.service"));
    machine.has("/run/systemd/system") && ["requires", "wants"].into_iter().any(hooked)
}

/// Whether a suspend loses pages in GPU memory: the driver does not save them, and
/// weir-sleep.service does not move them out before. That unit moves pages out only for the daemon
/// in [`DIRECTORY`].
pub fn suspend_loses_pages(machine: &Machine, runtime: &Path) -> bool {
    let are_taken_out = has_sleep_unit(machine) && runtime == Path::new(DIRECTORY);
    can_suspend(machine) && driver_saves(machine) == Some(false) && !are_taken_out
}

fn suspend(machine: &Machine) -> Finding {
    if suspend_loses_pages(machine, Path::new(DIRECTORY)) {
        return Finding::warn(
            "suspend",
            "possible, and GPU memory loses what it holds",
            "run weir off before, install the package (weir-sleep.service, which sleep.target requires), or load nvidia with \
             NVreg_PreserveVideoMemoryAllocations=1",
        );
    }
    let has_card = !machine.names("/dev/dri", |name| name.starts_with("renderD")).is_empty();
    let seen = match driver_saves(machine) {
        _ if !can_suspend(machine) => "not possible here",
        Some(true) => "possible; the GPU's driver saves its memory",
        Some(false) => {
            "possible; weir-sleep.service takes pages out of GPU memory before, but not those of --runtime DIRECTORY, nor where \
             rtcwake or /sys/power/state go past systemd"
        }
        None if has_card => {
            "possible; the GPU's driver moves its memory to RAM before, as all but NVIDIA's do"
        }
        None => "possible; RAM keeps what it holds",
    };
    Finding::ok("suspend", seen)
}

fn battery(machine: &Machine) -> Finding {
    let supply = |name: &str, file: &str| machine.text(&format!("/sys/class/power_supply/{name}/{file}"));
    let batteries = machine.names("/sys/class/power_supply", |name| {
        // A mouse's battery says nothing of the machine's battery.
        supply(name, "type").as_deref() == Some("Battery")
            && supply(name, "scope").as_deref() != Some("Device")
    });
    if batteries.is_empty() {
        return Finding::ok("battery", "none");
    }
    let status = |name: &String| supply(name, "status").unwrap_or_default();
    let seen: Vec<String> = batteries
        .iter()
        .map(|name| {
            let percent = supply(name, "capacity").unwrap_or("?".to_owned());
            format!("{name} at {percent} %, {}", status(name).to_lowercase())
        })
        .collect();
    if batteries.iter().any(|name| status(name) == "Discharging") {
        Finding::warn(
            "battery",
            format!("{}: a GPU that holds pages stays awake", seen.join("; ")),
            "weir off, or weir give-back all where there is a backing; WEIR_BATTERY_OFF=30 in /etc/default/weir, or weir battery from \
             cron, turns it off below 30 %",
        )
    } else {
        Finding::ok("battery", seen.join("; "))
    }
}

fn cpu_latency(machine: &Machine) -> Finding {
    use weir_system::latency::DEVICE;
    let driver = machine.text("/sys/devices/system/cpu/cpuidle/current_driver").unwrap_or("none".to_owned());
    if machine.may_use(DEVICE) && driver == "none" {
        Finding::ok(
            "cpu-latency",
            format!("{DEVICE} can be opened, and changes nothing: no idle driver (a virtual machine)"),
        )
    } else if machine.may_use(DEVICE) {
        Finding::ok(
            "cpu-latency",
            format!("{DEVICE} can be opened, for weir on --policy low-latency; idle driver {driver}"),
        )
    } else if machine.has(DEVICE) {
        Finding::warn(
            "cpu-latency",
            format!("{DEVICE} cannot be opened by this user, so --policy low-latency only spins"),
            "run as root",
        )
    } else {
        Finding::warn(
            "cpu-latency",
            format!("no {DEVICE}, so --policy low-latency only spins"),
            "use a kernel with CONFIG_CPU_IDLE and CONFIG_PM",
        )
    }
}

fn backing(room: Option<ByteSize>) -> Finding {
    match room {
        Some(room) if room >= ROOM_WANTED => {
            Finding::ok("backing", format!("{room} free below /var/lib, for --backing"))
        }
        Some(room) => Finding::warn(
            "backing",
            format!("only {room} free below /var/lib: what GPU memory gives back has nowhere to go"),
            "free some, or name a path on another disk to --backing",
        ),
        None => Finding::warn("backing", "/var/lib cannot be looked at", "name a path to --backing"),
    }
}

#[cfg(test)]
mod tests {
    use super::super::finding::Level;
    use super::*;
    use weir_system::fixture::Fixture;

    #[test]
    fn a_unit_is_missed_only_where_systemd_runs() {
        let level = |fixture: &Fixture| systemd(&fixture.machine()).level;
        assert_eq!(level(&Fixture::new("init")), Level::Ok);
        let runs = Fixture::new("systemd").with("/run/systemd/system/x", "");
        assert_eq!(level(&runs), Level::Warn);
        let installed = runs.with("/lib/systemd/system/weir.service", "");
        assert!(systemd(&installed.machine()).seen.contains("not active"));
        let active = installed.with("/sys/fs/cgroup/system.slice/weir.service/cgroup.procs", "1");
        assert_eq!(systemd(&active.machine()).seen, "weir.service is active");
    }

    #[test]
    fn suspend_matters_where_the_driver_does_not_save_its_memory() {
        let sleeps = Fixture::new("sleeps").with("/sys/power/state", "freeze mem\n");
        assert_eq!(suspend(&sleeps.machine()).level, Level::Ok);
        let params = "/proc/driver/nvidia/params";
        let loses = sleeps.with(params, "EnableMSI: 1\nPreserveVideoMemoryAllocations: 0\n");
        assert_eq!(suspend(&loses.machine()).level, Level::Warn);
        let loses_pages =
            |fixture: &Fixture, runtime| suspend_loses_pages(&fixture.machine(), Path::new(runtime));
        assert!(loses_pages(&loses, DIRECTORY));
        let unit = loses.with("/run/systemd/system/weir-sleep.service", "");
        assert_eq!(suspend(&unit.machine()).level, Level::Warn, "nothing starts it");
        let unit = unit.with("/usr/lib/systemd/system/sleep.target.requires/weir-sleep.service", "");
        assert_eq!(suspend(&unit.machine()).level, Level::Ok);
        assert!(!loses_pages(&unit, DIRECTORY));
        assert!(loses_pages(&unit, "/run/other"), "the unit does not know that directory");
        let saves = Fixture::new("saves")
            .with("/sys/power/state", "mem")
            .with(params, "PreserveVideoMemoryAllocations: 1");
        assert!(suspend(&saves.machine()).seen.contains("saves"));
        let other = Fixture::new("moves").with("/sys/power/state", "mem").with("/dev/dri/renderD128", "");
        assert!(suspend(&other.machine()).seen.contains("to RAM before"));
    }

    #[test]
    fn a_battery_matters_while_it_is_used_and_a_mouse_s_never() {
        let supply = "/sys/class/power_supply";
        let mouse = Fixture::new("mouse")
            .with(&format!("{supply}/hid/type"), "Battery\n")
            .with(&format!("{supply}/hid/scope"), "Device\n")
            .with(&format!("{supply}/hid/status"), "Discharging\n");
        assert_eq!(battery(&mouse.machine()).seen, "none");
        let laptop = mouse
            .with(&format!("{supply}/BAT0/type"), "Battery\n")
            .with(&format!("{supply}/BAT0/capacity"), "41\n")
            .with(&format!("{supply}/BAT0/status"), "Discharging\n");
        let finding = battery(&laptop.machine());
        assert_eq!(finding.level, Level::Warn);
        assert!(finding.seen.starts_with("BAT0 at 41 %, discharging"), "{}", finding.seen);
        let next = finding.next.expect("a next step");
        assert!(
            next.contains("weir off") && next.contains("give-back all") && !next.contains("--policy"),
            "{next}"
        );
        let charging = laptop.with(&format!("{supply}/BAT0/status"), "Charging\n");
        assert_eq!(battery(&charging.machine()).level, Level::Ok);
    }

    #[test]
    fn the_file_that_keeps_processors_awake_is_looked_for() {
        let driver = "/sys/devices/system/cpu/cpuidle/current_driver";
        let fixture = Fixture::new("idle").with(driver, "intel_idle\n");
        assert_eq!(cpu_latency(&fixture.machine()).level, Level::Warn);
        let there = fixture.with("/dev/cpu_dma_latency", "");
        assert!(cpu_latency(&there.machine()).seen.ends_with("idle driver intel_idle"));
        let virtual_machine = there.with(driver, "none\n");
        assert!(cpu_latency(&virtual_machine.machine()).seen.contains("changes nothing"));
    }

    #[test]
    fn little_room_on_the_disk_is_a_warning() {
        assert_eq!(backing(Some(ROOM_WANTED)).level, Level::Ok);
        assert_eq!(backing(Some(ByteSize(ROOM_WANTED.0 - 1))).level, Level::Warn);
        assert_eq!(backing(None).level, Level::Warn);
    }
}
