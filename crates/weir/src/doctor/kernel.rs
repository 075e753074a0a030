//! Checks of the kernel: block front ends, memory front ends, cgroups.

use super::finding::Finding;
use std::fmt;
use weir_system::Machine;
use weir_system::kernel_release::{FUSE_RESENDS, UBLK, UBLK_SURVIVES, version};

pub fn check(machine: &Machine) -> Vec<Finding> {
    let release = machine.release();
    let nbd = Module::find(machine, &release, "nbd");
    let ublk = Module::find(machine, &release, "ublk_drv");
    let fuse = machine.has("/dev/fuse");
    let loop_device = Module::find(machine, &release, "loop");
    vec![
        kernel(&release),
        front_end(nbd, ublk, fuse && loop_device.usable()),
        module("nbd", &nbd, "weir attach cannot connect a kernel block device", "modprobe nbd"),
        ublk_driver(&ublk, &release),
        module(
            "bcache",
            &Module::find(machine, &release, "bcache"),
            "the kernel's own block cache cannot be stacked on a Weir device",
            "modprobe bcache",
        ),
        module(
            "md",
            &Module::find(machine, &release, "raid0"),
            "the kernel cannot stripe disks under a cache",
            "modprobe raid0",
        ),
        fuse_device(machine, fuse, &release),
        module("loop", &loop_device, "a FUSE file cannot become a block device", "modprobe loop"),
        userfaultfd(machine),
        io_uring(machine),
        cgroup(machine),
        pressure(machine),
    ]
}

/// The state of a kernel module.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
enum Module {
    BuiltIn,
    Loaded,
    Loadable,
    Missing,
}

impl Module {
    fn find(machine: &Machine, release: &str, name: &str) -> Self {
        let file = format!("/{name}.ko");
        let listed = |index: &str| {
            machine
                .text(&format!("/lib/modules/{release}/{index}"))
                .is_some_and(|text| text.lines().any(|line| line.contains(&file)))
        };
        if listed("modules.builtin") {
            Module::BuiltIn
        } else if machine.has(&format!("/sys/module/{name}")) {
            // A built-in module with parameters has a directory in /sys/module too. If /lib/modules
            // has no list of built-in modules, that module counts as loaded here.
            Module::Loaded
        } else if listed("modules.dep") {
            Module::Loadable
        } else {
            Module::Missing
        }
    }

    fn usable(self) -> bool {
        self != Module::Missing
    }
}

impl fmt::Display for Module {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Module::BuiltIn => "built in",
            Module::Loaded => "loaded",
            Module::Loadable => "loadable",
            Module::Missing => "missing",
        })
    }
}

fn module(id: &'static str, module: &Module, lost: &str, load: &str) -> Finding {
    match module {
        Module::BuiltIn | Module::Loaded => Finding::ok(id, module.to_string()),
        Module::Loadable => Finding::ok(id, format!("loadable: {load}")),
        Module::Missing => Finding::warn(
            id,
            format!("missing: {lost}"),
            format!("use a kernel whose packages have it, then {load}"),
        ),
    }
}

fn ublk_driver(module: &Module, release: &str) -> Finding {
    const ID: &str = "ublk";
    match version(release) {
        _ if !module.usable() => self::module(
            ID,
            module,
            "the front end with the shortest way to the daemon is missing",
            "modprobe ublk_drv",
        ),
        Some(version) if version < UBLK => Finding::warn(
            ID,
            format!("{module}, but {release} is older than 6.5: weir serve --ublk refuses"),
            "use Linux 6.5 or newer, or weir attach by NBD",
        ),
        Some(version) if version < UBLK_SURVIVES => Finding::warn(
            ID,
            format!("{module}; before Linux 6.16 the kernel may crash when the daemon is killed under load"),
            "use Linux 6.16 or a stable kernel of late 2026 (6.12.117), or weir attach by NBD",
        ),
        _ => self::module(ID, module, "", "modprobe ublk_drv"),
    }
}

fn front_end(nbd: Module, ublk: Module, fuse: bool) -> Finding {
    if fuse && !nbd.usable() && !ublk.usable() {
        return Finding::warn(
            "front-end",
            "only FUSE and a loop device, whose drivers take memory for each page that goes out: the machine may freeze once none is free",
            "use a kernel with ublk or nbd; weir on --front fuse accepts the risk",
        );
    }
    let ways: Vec<&str> =
        [(ublk.usable(), "ublk"), (nbd.usable(), "nbd"), (fuse, "FUSE and a loop device (at a risk)")]
            .into_iter()
            .filter_map(|(there, way)| there.then_some(way))
            .collect();
    if ways.is_empty() {
        Finding::fail(
            "front-end",
            "no way for this kernel to swap on Weir: no nbd, no ublk, no FUSE",
            "use a kernel with one of them; NBD clients in user space work regardless",
        )
    } else {
        Finding::ok("front-end", ways.join(", "))
    }
}

fn kernel(release: &str) -> Finding {
    match version(release) {
        Some(version) if version >= (5, 14) => Finding::ok("kernel", release),
        Some(_) => Finding::fail(
            "kernel",
            format!("{release} is older than 5.14, which has MADV_POPULATE_WRITE"),
            "use Linux 5.14 or newer; 6.8 for the pager's UFFDIO_MOVE",
        ),
        None => Finding::fail(
            "kernel",
            format!("release {release:?} says nothing"),
            "run on Linux, with /proc mounted",
        ),
    }
}

/// The setting that allows FUSE requests through io_uring (Linux 6.14). It applies only to later
/// mounts.
const ENABLE_URING: &str = "/sys/module/fuse/parameters/enable_uring";

fn fuse_device(machine: &Machine, there: bool, release: &str) -> Finding {
    if !there {
        Finding::warn("fuse", "no /dev/fuse", "modprobe fuse")
    } else if version(release).is_some_and(|version| version < FUSE_RESENDS) {
        Finding::warn(
            "fuse",
            "before Linux 6.9 what a daemon has in hand when it dies fails: no weir restart under a FUSE file",
            "use Linux 6.9 or newer for swap that way, or nbd; weir mount is as good as ever",
        )
    } else if machine.may_use("/dev/fuse") {
        match machine.text(ENABLE_URING).as_deref() {
            Some("Y") => Finding::ok("fuse", "/dev/fuse can be opened, and requests come by rings"),
            Some(_) => Finding::ok(
                "fuse",
                format!("/dev/fuse can be opened; weir mount is faster by rings: echo Y > {ENABLE_URING}"),
            ),
            None => Finding::ok("fuse", "/dev/fuse can be opened"),
        }
    } else {
        Finding::warn(
            "fuse",
            "/dev/fuse cannot be opened by this user",
            "run as root, or allow the user in its mode",
        )
    }
}

fn userfaultfd(machine: &Machine) -> Finding {
    let unprivileged = machine.text("/proc/sys/vm/unprivileged_userfaultfd");
    if machine.may_use("/dev/userfaultfd") {
        Finding::ok("userfaultfd", "/dev/userfaultfd can be opened")
    } else if unprivileged.as_deref() == Some("1") {
        Finding::ok("userfaultfd", "allowed to every process")
    } else if unprivileged.is_some() {
        Finding::warn(
            "userfaultfd",
            "only with CAP_SYS_PTRACE, or for faults in user mode",
            "allow the user in the mode of /dev/userfaultfd, or sysctl vm.unprivileged_userfaultfd=1",
        )
    } else {
        Finding::warn("userfaultfd", "the kernel has none", "use a kernel with CONFIG_USERFAULTFD")
    }
}

fn io_uring(machine: &Machine) -> Finding {
    // With 0 every process may use io_uring, with 1 only the group in io_uring_group, with 2 none
    // (Documentation/admin-guide/sysctl/kernel.rst). Linux 6.6 or newer has the setting.
    match machine.text("/proc/sys/kernel/io_uring_disabled").as_deref() {
        Some("0") => Finding::ok("io_uring", "allowed to every process"),
        Some("1") => Finding::warn(
            "io_uring",
            "only with CAP_SYS_ADMIN or in the group of kernel.io_uring_group",
            "sysctl kernel.io_uring_disabled=0, or run as root",
        ),
        Some(_) => Finding::warn("io_uring", "switched off", "sysctl kernel.io_uring_disabled=0"),
        None => Finding::warn(
            "io_uring",
            "unknown: the kernel is older than 6.6 or has none",
            "nothing, unless a file store or ublk reports an error",
        ),
    }
}

fn cgroup(machine: &Machine) -> Finding {
    match machine.text("/sys/fs/cgroup/cgroup.controllers") {
        Some(controllers) if controllers.split(' ').any(|name| name == "memory") => {
            Finding::ok("cgroup", "v2 with the memory controller")
        }
        Some(_) => Finding::warn(
            "cgroup",
            "v2 without the memory controller",
            "boot without cgroup_disable=memory; the daemon wants MemorySwapMax=0 and MemoryMin",
        ),
        None if machine.has("/sys/fs/cgroup/memory") => Finding::warn(
            "cgroup",
            "v1",
            "works; systemd's MemoryMin needs v2 (boot with systemd.unified_cgroup_hierarchy=1)",
        ),
        None => Finding::warn("cgroup", "none mounted", "mount -t cgroup2 none /sys/fs/cgroup"),
    }
}

fn pressure(machine: &Machine) -> Finding {
    if machine.has("/proc/pressure/memory") {
        Finding::ok("psi", "/proc/pressure/memory")
    } else {
        Finding::warn("psi", "no /proc/pressure/memory", "boot with psi=1 to see memory pressure")
    }
}

#[cfg(test)]
mod tests {
    use super::super::finding::Level;
    use super::*;
    use weir_system::fixture::Fixture;

    #[test]
    fn a_module_is_found_however_the_kernel_has_it() {
        let fixture = Fixture::new("modules")
            .with("/lib/modules/6.12.1/modules.builtin", "kernel/drivers/md/bcache/bcache.ko")
            .with(
                "/lib/modules/6.12.1/modules.dep",
                "kernel/drivers/block/nbd.ko.xz:\nkernel/drivers/md/raid0.ko:",
            )
            .with("/sys/module/ublk_drv/refcnt", "0");
        let machine = fixture.machine();
        let find = |name| Module::find(&machine, "6.12.1", name);
        assert_eq!(find("bcache"), Module::BuiltIn);
        assert_eq!(find("nbd"), Module::Loadable);
        assert_eq!(find("ublk_drv"), Module::Loaded);
        assert_eq!(find("bd"), Module::Missing);
    }

    #[test]
    fn kernels_before_5_14_fail() {
        for (release, level) in [
            ("5.13.19", Level::Fail),
            ("5.14.0", Level::Ok),
            ("6.1.0-37-amd64", Level::Ok),
            ("7.2-rc1", Level::Ok),
            ("", Level::Fail),
        ] {
            assert_eq!(kernel(release).level, level, "{release}");
        }
    }

    #[test]
    fn a_ublk_driver_is_as_good_as_its_kernel() {
        for (module, release, level, word) in [
            (Module::Loaded, "7.3.4-cloud-amd64", Level::Ok, "loaded"),
            (Module::Loadable, "6.16.0", Level::Ok, "modprobe ublk_drv"),
            (Module::Loaded, "6.12.95-cloud-amd64", Level::Warn, "killed under load"),
            (Module::Loaded, "6.4.0", Level::Warn, "older than 6.5"),
            (Module::Missing, "7.3.4", Level::Warn, "missing"),
        ] {
            let finding = ublk_driver(&module, release);
            assert_eq!(finding.level, level, "{release}");
            assert!(finding.seen.contains(word), "{release}: {}", finding.seen);
        }
    }

    #[test]
    fn a_kernel_that_cannot_send_fuse_requests_again_is_told_apart() {
        let fixture = Fixture::new("resend").with("/dev/fuse", "");
        let level = |release| fuse_device(&fixture.machine(), true, release).level;
        assert_eq!((level("6.1.0-9-amd64"), level("6.9.0")), (Level::Warn, Level::Ok));
    }

    #[test]
    fn rings_that_fuse_may_not_use_are_told_of_with_the_next_step() {
        for (value, word) in [("N", "echo Y > /sys/module/fuse"), ("Y", "come by rings")] {
            let fixture = Fixture::new(value).with("/dev/fuse", "").with(ENABLE_URING, value);
            let seen = fuse_device(&fixture.machine(), true, "6.18.0").seen;
            assert!(seen.contains(word), "{seen}");
        }
    }

    #[test]
    fn one_way_in_is_enough_and_none_fails() {
        assert_eq!(front_end(Module::Missing, Module::Missing, false).level, Level::Fail);
        assert_eq!(front_end(Module::Missing, Module::Missing, true).level, Level::Warn);
        assert_eq!(front_end(Module::Loadable, Module::Missing, false).seen, "nbd");
    }

    #[test]
    fn cgroup_versions_are_told_apart() {
        let v2 = Fixture::new("cgroup2").with("/sys/fs/cgroup/cgroup.controllers", "cpu memory pids");
        assert_eq!(cgroup(&v2.machine()).level, Level::Ok);
        let v1 = Fixture::new("cgroup1").with("/sys/fs/cgroup/memory/tasks", "");
        assert_eq!(cgroup(&v1.machine()).seen, "v1");
    }
}
