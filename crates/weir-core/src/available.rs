//! The memory that can be taken without waking the OOM killer. The machine has a limit, and a
//! container or a service may have a lower one.

use std::fs;
use std::path::Path;

/// Bytes of memory that this process can take without making the kernel swap; `None` if unknown.
pub fn available() -> Option<u64> {
    available_below(Path::new("/"))
}

/// Does the same as [`available`], for the machine whose `/proc` and `/sys` are below `root`.
pub fn available_below(root: &Path) -> Option<u64> {
    available_to_all_below(root).into_iter().chain(of_cgroups(root)).min()
}

/// Memory that all processes together can take without the OOM killer, whatever their cgroups
/// allow: `MemAvailable` of /proc/meminfo below `root`.
pub fn available_to_all_below(root: &Path) -> Option<u64> {
    let meminfo = fs::read_to_string(root.join("proc/meminfo")).ok()?;
    let line = meminfo.lines().find_map(|line| line.strip_prefix("MemAvailable:"))?;
    line.trim().strip_suffix(" kB")?.parse::<u64>().ok().map(|kib| kib << 10)
}

/// A version of cgroups: the mount point of its hierarchy, and the names of its files.
struct Version {
    mount: &'static str,
    limit: &'static str,
    used: &'static str,
    /// Lines of `memory.stat` that count file pages, which can be dropped.
    files: [&'static str; 2],
}

const V1: Version = Version {
    mount: "sys/fs/cgroup/memory",
    limit: "memory.limit_in_bytes",
    used: "memory.usage_in_bytes",
    files: ["total_inactive_file ", "total_active_file "],
};

const V2: Version = Version {
    mount: "sys/fs/cgroup",
    limit: "memory.max",
    used: "memory.current",
    files: ["inactive_file ", "active_file "],
};

/// The number of bytes that this process may still take under the limits of all its cgroups.
fn of_cgroups(root: &Path) -> Option<u64> {
    let groups = fs::read_to_string(root.join("proc/self/cgroup")).ok()?;
    // A line of /proc/self/cgroup is "4:memory:/path", or "0::/path" for version 2.
    let group = |line: &str| {
        let mut fields = line.splitn(3, ':').skip(1);
        let (controllers, path) = (fields.next()?, fields.next()?);
        let version = match controllers {
            "" => V2,
            names if names.split(',').any(|name| name == "memory") => V1,
            _ => return None,
        };
        left(&version, &root.join(version.mount), path)
    };
    groups.lines().filter_map(group).min()
}

/// The number of bytes that a cgroup may still take under its own limit and those of the cgroups
/// above it. In a container the path may name a cgroup of the host. Cgroups that the container
/// cannot see are skipped.
fn left(version: &Version, mount: &Path, path: &str) -> Option<u64> {
    let group = mount.join(path.trim_start_matches('/'));
    let groups = group.ancestors().take_while(|group| group.starts_with(mount));
    groups.filter_map(|group| left_in(version, group)).min()
}

fn left_in(version: &Version, group: &Path) -> Option<u64> {
    let number = |file| fs::read_to_string(group.join(file)).ok()?.trim().parse::<u64>().ok();
    // "max" is no number, and means no limit.
    let (limit, used) = (number(version.limit)?, number(version.used)?);
    let stat = fs::read_to_string(group.join("memory.stat")).unwrap_or_default();
    let file = |key| stat.lines().find_map(|line| line.strip_prefix(key)?.trim().parse::<u64>().ok());
    let files: u64 = version.files.into_iter().filter_map(file).sum();
    Some(limit.saturating_sub(used.saturating_sub(files)))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn fixture(name: &str, files: &[(&str, &str)]) -> Option<u64> {
        let root = std::env::temp_dir().join(format!("weir-available-{}-{name}", std::process::id()));
        for (path, text) in files {
            let path = root.join(path);
            fs::create_dir_all(path.parent().unwrap()).unwrap();
            fs::write(path, text).unwrap();
        }
        let left = of_cgroups(&root);
        let _ = fs::remove_dir_all(&root);
        left
    }

    #[test]
    fn the_lowest_limit_above_a_process_counts_and_files_do_not() {
        let v2 = [
            ("proc/self/cgroup", "0::/a/b\n"),
            ("sys/fs/cgroup/memory.stat", "anon 5\n"),
            ("sys/fs/cgroup/a/memory.max", "1000\n"),
            ("sys/fs/cgroup/a/memory.current", "700\n"),
            ("sys/fs/cgroup/a/memory.stat", "anon 500\nfile 200\ninactive_file 120\nactive_file 80\n"),
            ("sys/fs/cgroup/a/b/memory.max", "max\n"),
            ("sys/fs/cgroup/a/b/memory.current", "600\n"),
        ];
        assert_eq!(fixture("v2", &v2), Some(500));
        let v1 = [
            ("proc/self/cgroup", "5:cpu,cpuacct:/x\n4:memory:/x\n0::/\n"),
            ("sys/fs/cgroup/memory/memory.limit_in_bytes", "9223372036854771712\n"),
            ("sys/fs/cgroup/memory/memory.usage_in_bytes", "900\n"),
            ("sys/fs/cgroup/memory/x/memory.limit_in_bytes", "400\n"),
            ("sys/fs/cgroup/memory/x/memory.usage_in_bytes", "500\n"),
        ];
        assert_eq!(fixture("v1", &v1), Some(0), "over its limit");
    }

    #[test]
    fn a_group_of_the_host_is_looked_for_in_what_a_container_sees() {
        let inside = [
            ("proc/self/cgroup", "0::/docker/1234\n"),
            ("sys/fs/cgroup/memory.max", "300\n"),
            ("sys/fs/cgroup/memory.current", "100\n"),
        ];
        assert_eq!(fixture("inside", &inside), Some(200));
        assert_eq!(fixture("nothing", &[("proc/self/cgroup", "0::/\n")]), None);
        assert_eq!(fixture("no-proc", &[]), None);
    }
}
