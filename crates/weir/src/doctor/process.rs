//! Checks of this process: capabilities and limits that swap needs.

use super::finding::Finding;
use rustix::process::{Resource, getrlimit};
use std::thread;
use weir_core::ByteSize;
use weir_core::swap_safety::{self, Unprotected};
use weir_system::Machine;

// The numbers of capabilities are from include/uapi/linux/capability.h.
const CAP_IPC_LOCK: u32 = 14;
const CAP_SYS_ADMIN: u32 = 21;
const CAP_SYS_RESOURCE: u32 = 24;

/// Number of descriptors that Weir wants: those of a 141 GB card in chunks of 128 MiB, with room
/// for connections.
const FILES_WANTED: u64 = 4096;

pub fn check(machine: &Machine) -> Vec<Finding> {
    let capabilities = Capabilities::of(machine);
    vec![
        flusher(try_flusher(), is_root(machine)),
        memory_lock(capabilities, getrlimit(Resource::Memlock).current),
        attach(capabilities),
        open_files(getrlimit(Resource::Nofile).maximum),
    ]
}

/// The effective capabilities, as a bit mask.
#[derive(Clone, Copy, Debug)]
pub struct Capabilities(u64);

impl Capabilities {
    /// The capabilities of this process.
    pub fn of(machine: &Machine) -> Self {
        let mask = machine.value("/proc/self/status", "CapEff");
        Capabilities(mask.and_then(|digits| u64::from_str_radix(&digits, 16).ok()).unwrap_or(0))
    }

    /// Whether block devices and swap can be set up.
    pub fn may_admin(self) -> bool {
        self.has(CAP_SYS_ADMIN)
    }

    /// Whether `PR_SET_IO_FLUSHER` can be set.
    pub fn may_set_flusher(self) -> bool {
        self.has(CAP_SYS_RESOURCE)
    }

    fn has(self, capability: u32) -> bool {
        self.0 >> capability & 1 == 1
    }
}

/// Tries to set the I/O flusher flag, on a thread that ends afterwards. A process may have the
/// capability, and still not be allowed to set the flag.
fn try_flusher() -> Result<bool, Unprotected> {
    thread::spawn(|| swap_safety::set_io_flusher().and_then(|()| swap_safety::has_io_flusher()))
        .join()
        .expect("two system calls do not panic")
}

/// Whether this process acts as root, or as the root of a container.
fn is_root(machine: &Machine) -> bool {
    let ids = machine.value("/proc/self/status", "Uid");
    ids.is_some_and(|ids| ids.split_whitespace().nth(1) == Some("0"))
}

/// The finding for the flusher flag. Without the flag the daemon refuses to serve swap, so the
/// finding is a failure. But it is only a warning for an ordinary user, since root may still be
/// allowed to set the flag.
fn flusher(tried: Result<bool, Unprotected>, is_root: bool) -> Finding {
    match tried {
        Ok(true) => Finding::ok("io-flusher", "PR_SET_IO_FLUSHER was tried and holds"),
        Ok(false) => Finding::fail(
            "io-flusher",
            "PR_SET_IO_FLUSHER was tried, and nothing came of it",
            "use a kernel of the distribution's; until then --unsafe-no-flusher accepts the risk",
        ),
        Err(error) if is_root => Finding::fail(
            "io-flusher",
            format!("{error}: under memory pressure the daemon could wait for its own device"),
            "let root have CAP_SYS_RESOURCE (a container: --cap-add SYS_RESOURCE; systemd: CapabilityBoundingSet), or \
             accept the risk by --unsafe-no-flusher",
        ),
        Err(error) => Finding::warn(
            "io-flusher",
            error.to_string(),
            "run weir doctor as root to see whether swap can have it",
        ),
    }
}

fn memory_lock(capabilities: Capabilities, limit: Option<u64>) -> Finding {
    match limit {
        _ if capabilities.has(CAP_IPC_LOCK) => Finding::ok("memlock", "CAP_IPC_LOCK: no limit"),
        None => Finding::ok("memlock", "no limit"),
        Some(bytes) => Finding::warn(
            "memlock",
            format!("at most {} can be locked in memory", ByteSize(bytes)),
            "for swap: run as root, or raise it (ulimit -l; systemd: LimitMEMLOCK=infinity)",
        ),
    }
}

fn attach(capabilities: Capabilities) -> Finding {
    if capabilities.has(CAP_SYS_ADMIN) {
        Finding::ok("admin", "CAP_SYS_ADMIN: block devices and swap can be set up")
    } else {
        Finding::warn("admin", "no CAP_SYS_ADMIN: no kernel block device, no swapon", "run as root for those")
    }
}

fn open_files(limit: Option<u64>) -> Finding {
    match limit {
        Some(files) if files < FILES_WANTED => Finding::warn(
            "open-files",
            format!("at most {files}; a large card's chunks take {FILES_WANTED}"),
            "raise it (ulimit -Hn; systemd: LimitNOFILE=65536)",
        ),
        Some(files) => Finding::ok("open-files", format!("at most {files}")),
        None => Finding::ok("open-files", "no limit"),
    }
}

#[cfg(test)]
mod tests {
    use super::super::finding::Level;
    use super::*;
    use rustix::thread::{CapabilitySet, CapabilitySets, set_capabilities};
    use weir_system::fixture::Fixture;

    #[test]
    fn capabilities_are_read_bit_by_bit() {
        let fixture =
            Fixture::new("caps").with("/proc/self/status", "Name:\tweir\nCapEff:\t000001fffeffffff\n");
        let capabilities = Capabilities::of(&fixture.machine());
        assert!(capabilities.has(CAP_SYS_ADMIN) && capabilities.has(CAP_IPC_LOCK));
        assert!(!capabilities.has(CAP_SYS_RESOURCE));
        assert!(!capabilities.may_set_flusher());
    }

    #[test]
    fn the_flusher_flag_is_tried_and_does_not_stay() {
        let tried = try_flusher();
        let allowed = tried.is_ok();
        assert_eq!(flusher(tried, true).level, if allowed { Level::Ok } else { Level::Fail });
        assert_eq!(flusher(Ok(false), false).level, Level::Fail, "no user's business");
        if allowed {
            assert!(!swap_safety::has_io_flusher().unwrap(), "this thread is as it was");
        }
    }

    #[test]
    fn doctor_refuses_where_root_cannot_have_the_flusher_and_sends_others_to_root() {
        let checks = |name, ids| {
            let fixture = Fixture::new(name).with("/proc/self/status", ids);
            // A thread has capabilities of its own, and the threads that it starts have no more.
            let without = thread::spawn(move || {
                let none = CapabilitySet::empty();
                let none = CapabilitySets { effective: none, permitted: none, inheritable: none };
                set_capabilities(None, none).expect("less is always granted");
                check(&fixture.machine())
            });
            let checks = without.join().expect("no panic");
            checks.into_iter().find(|finding| finding.id == "io-flusher").expect("it is looked at")
        };
        let root = checks("flusher-root", "Uid:\t0\t0\t0\t0\n");
        assert_eq!(root.level, Level::Fail, "{root}");
        assert!(root.to_string().contains("--unsafe-no-flusher"), "{root}");
        let user = checks("flusher-user", "Uid:\t1000\t1000\t1000\t1000\n");
        assert_eq!(user.level, Level::Warn, "{user}");
        assert!(user.to_string().contains("as root"), "{user}");
    }

    #[test]
    fn a_small_memory_lock_limit_matters_only_without_the_capability() {
        assert_eq!(memory_lock(Capabilities(0), Some(8 << 20)).level, Level::Warn);
        assert_eq!(memory_lock(Capabilities(1 << CAP_IPC_LOCK), Some(0)).level, Level::Ok);
        assert_eq!(memory_lock(Capabilities(0), None).level, Level::Ok);
    }
}
