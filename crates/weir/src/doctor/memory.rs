//! Checks of memory, of the swap in use, and of settings that affect both.

use super::finding::Finding;
use weir_core::ByteSize;
use weir_system::Machine;

pub fn check(machine: &Machine) -> Vec<Finding> {
    vec![
        memory(machine),
        swap(machine),
        zswap(machine),
        huge_pages(machine),
        shared_huge_pages(machine),
        hibernation(machine),
    ]
}

fn memory(machine: &Machine) -> Finding {
    match (machine.size("/proc/meminfo", "MemTotal"), machine.available()) {
        (Some(total), Some(free)) => Finding::ok("memory", format!("{total}, {free} available")),
        _ => Finding::fail("memory", "/proc/meminfo says nothing", "mount /proc"),
    }
}

fn swap(machine: &Machine) -> Finding {
    // The columns of /proc/swaps are "Filename Type Size Used Priority", with sizes in KiB.
    let Some(table) = machine.text("/proc/swaps") else {
        return Finding::warn("swap", "the kernel has no swap", "use a kernel with CONFIG_SWAP");
    };
    let devices: Vec<String> = table
        .lines()
        .skip(1)
        .filter_map(|line| {
            let mut columns = line.split_whitespace();
            let (name, size, priority) = (columns.next()?, columns.nth(1)?, columns.nth(1)?);
            Some(format!("{name} {} priority {priority}", ByteSize(size.parse::<u64>().ok()? << 10)))
        })
        .collect();
    if devices.is_empty() {
        Finding::ok("swap", "none in use")
    } else {
        Finding::ok("swap", devices.join(", "))
    }
}

fn zswap(machine: &Machine) -> Finding {
    match machine.text("/sys/module/zswap/parameters/enabled").as_deref() {
        Some("Y") => Finding::warn(
            "zswap",
            "on: it keeps compressed pages in RAM before they reach any swap device",
            "echo N > /sys/module/zswap/parameters/enabled, if GPU memory is to be used first",
        ),
        Some(_) => Finding::ok("zswap", "off"),
        None => Finding::ok("zswap", "not in this kernel"),
    }
}

fn huge_pages(machine: &Machine) -> Finding {
    // The file has a text such as "always [madvise] never". The brackets mark the choice.
    let text = machine.text("/sys/kernel/mm/transparent_hugepage/enabled").unwrap_or_default();
    match text.split(['[', ']']).nth(1) {
        Some("never") => Finding::warn(
            "huge-pages",
            "never: tables and host stores cost more TLB misses",
            "echo madvise > /sys/kernel/mm/transparent_hugepage/enabled",
        ),
        Some(choice) => Finding::ok("huge-pages", choice),
        None => Finding::warn("huge-pages", "not in this kernel", "nothing: it costs some speed only"),
    }
}

/// Checks the kernel's separate huge page setting for shared memory, in which host stores lie.
fn shared_huge_pages(machine: &Machine) -> Finding {
    let text = machine.text("/sys/kernel/mm/transparent_hugepage/shmem_enabled").unwrap_or_default();
    match text.split(['[', ']']).nth(1) {
        Some(choice @ ("never" | "deny")) => Finding::warn(
            "shared-huge-pages",
            format!("{choice}: a read from a host store costs about a quarter more CPU"),
            "echo advise > /sys/kernel/mm/transparent_hugepage/shmem_enabled, before the daemon starts",
        ),
        Some(choice) => Finding::ok("shared-huge-pages", choice),
        None => Finding::ok("shared-huge-pages", "not in this kernel"),
    }
}

fn hibernation(machine: &Machine) -> Finding {
    let states = machine.text("/sys/power/state").unwrap_or_default();
    let resume = machine.text("/sys/power/resume").filter(|device| !device.is_empty() && device != "0:0");
    if !states.split(' ').any(|state| state == "disk") {
        return Finding::ok("hibernation", "not possible here, so no image can end up in GPU memory");
    }
    match resume {
        Some(device) => Finding::ok("hibernation", format!("possible; its image goes to the disk {device}")),
        None => Finding::warn(
            "hibernation",
            "possible, and no resume= says where its image goes: never to GPU memory, which loses power",
            "boot with resume= and a disk; where systemd runs, weir on masks hibernation until weir off",
        ),
    }
}

#[cfg(test)]
mod tests {
    use super::super::finding::Level;
    use super::*;
    use weir_system::fixture::Fixture;

    #[test]
    fn swap_devices_are_listed_with_size_and_priority() {
        let fixture = Fixture::new("swaps").with(
            "/proc/swaps",
            "Filename\t\t\t\tType\t\tSize\t\tUsed\t\tPriority\n/dev/nbd0   partition\t8388604\t\t0\t\t100\n",
        );
        assert_eq!(swap(&fixture.machine()).seen, "/dev/nbd0 8.0GiB priority 100");
    }

    #[test]
    fn shared_memory_without_huge_pages_is_told_of() {
        let path = "/sys/kernel/mm/transparent_hugepage/shmem_enabled";
        let never = Fixture::new("shmem").with(path, "always within_size advise [never] deny force\n");
        let found = shared_huge_pages(&never.machine());
        assert!(found.level == Level::Warn && found.next.is_some(), "{found:?}");
        let advise = never.with(path, "always within_size [advise] never deny force\n");
        assert_eq!(shared_huge_pages(&advise.machine()).level, Level::Ok);
    }

    #[test]
    fn the_bracketed_choice_of_huge_pages_is_read() {
        let path = "/sys/kernel/mm/transparent_hugepage/enabled";
        let madvise = Fixture::new("thp").with(path, "always [madvise] never\n");
        assert_eq!(huge_pages(&madvise.machine()).seen, "madvise");
        let never = Fixture::new("thp-never").with(path, "always madvise [never]\n");
        assert_eq!(huge_pages(&never.machine()).level, Level::Warn);
    }

    #[test]
    fn hibernation_is_a_warning_where_the_kernel_can_do_it() {
        let fixture = Fixture::new("disk").with("/sys/power/state", "freeze mem disk\n");
        assert_eq!(hibernation(&fixture.machine()).level, Level::Warn);
        let resume = fixture.with("/sys/power/resume", "259:3\n");
        assert_eq!(hibernation(&resume.machine()).level, Level::Ok);
    }
}
