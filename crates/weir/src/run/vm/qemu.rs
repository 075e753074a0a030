//! The command line of QEMU: how much memory the guest gets, and whether that can be bounded.

use std::ffi::OsString;
use std::path::Path;

/// The guest's memory if the command line has no `-m`.
const DEFAULT: u64 = 128 << 20;

/// The guest's memory, in bytes.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Guest {
    /// Memory that the guest has at its start.
    pub at_start: u64,
    /// The guest's memory once all memory is plugged in that the command line allows.
    pub most: u64,
}

/// An option of QEMU, and the reason why a guest with that option cannot be bounded.
pub type Refusal = (String, &'static str);

/// Whether a program of this name is QEMU, emulating a whole machine.
pub fn is_qemu(program: &Path) -> bool {
    program
        .file_name()
        .and_then(|name| name.to_str())
        .is_some_and(|name| name.starts_with("qemu-system-") || ["qemu-kvm", "kvm"].contains(&name))
}

/// Reads QEMU's arguments.
pub fn read(arguments: &[OsString]) -> Result<Guest, Refusal> {
    let mut guest = Guest { at_start: DEFAULT, most: 0 };
    for (at, argument) in arguments.iter().enumerate() {
        let argument = argument.to_string_lossy();
        let Some(name) = argument.strip_prefix("--").or_else(|| argument.strip_prefix('-')) else { continue };
        let value = arguments.get(at + 1).map(|value| value.to_string_lossy()).unwrap_or_default();
        let parts = parts(&value);
        let of = |key: &str| parts.iter().rev().find(|part| part.0 == key).map(|part| &*part.1);
        if let Some(why) = refusal(name, of) {
            let shown = if FLAGS.contains(&name) { String::new() } else { format!(" {value}") };
            return Err((format!("{argument}{shown}"), why));
        }
        if name == "m" {
            if let Some(size) = of("").or_else(|| of("size")).and_then(|size| bytes(size, 1 << 20)) {
                guest.at_start = size;
            }
            if let Some(most) = of("maxmem").and_then(|most| bytes(most, 1)) {
                guest.most = most;
            }
        }
    }
    guest.most = guest.most.max(guest.at_start);
    Ok(guest)
}

/// Options of [`refusal`] that have no value.
const FLAGS: [&str; 2] = ["daemonize", "mem-prealloc"];
const NOT_PRIVATE: &str =
    "only private anonymous memory can be, and QEMU takes that if nothing says otherwise; leave it out";
const PINNED: &str = "a device that reads the guest's memory by itself pins all of it; use an emulated one";
const OTHER_PROCESS: &str =
    "another process uses the guest's memory, which is shared for that; use a device of QEMU's own";
const ENCRYPTED: &str = "the memory of an encrypted guest is pinned";
const AT_ONCE: &str = "it takes all of the guest's memory at once; leave it out";

/// The reason why a guest with this option cannot be bounded. `of` returns the part of the option's
/// value that has a given key. A part without a key has the key "".
fn refusal<'a>(name: &str, of: impl Fn(&str) -> Option<&'a str>) -> Option<&'static str> {
    let is_on = |key: &str| of(key).is_some_and(|value| !["off", "no", "n", "false"].contains(&value));
    let kind = of("").or_else(|| of("qom-type")).or_else(|| of("driver")).or_else(|| of("type"));
    let kind = kind.unwrap_or_default();
    match name {
        "daemonize" => {
            Some("it forks, and a child is not bounded; leave it out, and put weir vm in the background")
        }
        "mem-prealloc" => Some(AT_ONCE),
        "mem-path" => Some(NOT_PRIVATE),
        "overcommit" if is_on("mem-lock") => Some("locked memory stays where it is; leave mem-lock out"),
        "object" if kind == "memory-backend-ram" && is_on("share") => Some(NOT_PRIVATE),
        "object" if kind == "memory-backend-ram" && is_on("prealloc") => Some(AT_ONCE),
        "object" if kind == "memory-backend-ram" => None,
        "object" if kind.starts_with("memory-backend-") => Some(NOT_PRIVATE),
        "object" if kind.starts_with("sev-") || kind.starts_with("tdx-") => Some(ENCRYPTED),
        "machine" | "M" if of("memory-encryption").or_else(|| of("confidential-guest-support")).is_some() => {
            Some(ENCRYPTED)
        }
        "device" | "netdev" if kind.starts_with("vfio-") || kind.starts_with("vhost-vdpa") => Some(PINNED),
        "device" | "netdev" if kind.starts_with("vhost-user") => Some(OTHER_PROCESS),
        _ => None,
    }
}

/// The parts of an option's value, which is `first,key=value,...` or JSON.
fn parts(value: &str) -> Vec<(String, String)> {
    if let Ok(serde_json::Value::Object(object)) = serde_json::from_str(value) {
        let text = |value: serde_json::Value| match value {
            serde_json::Value::String(text) => text,
            other => other.to_string(),
        };
        return object.into_iter().map(|(key, value)| (key, text(value))).collect();
    }
    let part = |(at, part): (usize, &str)| match part.split_once('=') {
        Some((key, value)) => (key.to_owned(), value.to_owned()),
        None if at == 0 => (String::new(), part.to_owned()),
        None => (part.to_owned(), "on".to_owned()),
    };
    value.split(',').enumerate().map(part).collect()
}

/// A number of bytes as QEMU reads it: a number with the letter of a unit, or of `unit` bytes.
fn bytes(text: &str, unit: u64) -> Option<u64> {
    let (number, unit) = match text.char_indices().next_back()? {
        (_, '0'..='9') => (text, unit),
        (at, letter) => {
            let power = "bkmgtpe".find(letter.to_ascii_lowercase())?;
            (&text[..at], 1 << (10 * power))
        }
    };
    let number: f64 = number.parse().ok()?;
    Some((number * unit as f64) as u64)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn guest(line: &str) -> Result<Guest, Refusal> {
        read(&line.split(' ').map(OsString::from).collect::<Vec<_>>())
    }

    #[test]
    fn the_size_of_the_guest_is_what_qemu_makes_of_it() {
        let of = |line: &str| guest(line).map(|guest| (guest.at_start >> 20, guest.most >> 20)).unwrap();
        assert_eq!(of("-display none"), (128, 128));
        assert_eq!(of("-m 512"), (512, 512));
        assert_eq!(of("--m 1.5G -smp 2"), (1536, 1536));
        assert_eq!(of("-m size=1g,slots=2,maxmem=8G"), (1024, 8192));
        assert_eq!(of("-m 2G -m maxmem=4294967296,slots=1"), (2048, 4096));
        // QEMU refuses this value.
        assert_eq!(of("-m much"), (128, 128));
    }

    #[test]
    fn what_cannot_be_bounded_is_refused_in_every_spelling_and_nothing_else_is() {
        for line in [
            "-daemonize",
            "-m 1G -mem-prealloc",
            "--mem-path /dev/hugepages",
            "-overcommit mem-lock=on",
            "-overcommit cpu-pm=off,mem-lock=on-fault",
            "-object memory-backend-memfd,id=ram,size=1G",
            "-object memory-backend-file,id=ram,mem-path=/dev/shm/ram,size=1G,share=off",
            "-object memory-backend-ram,id=ram,size=1G,share=on",
            "-object memory-backend-ram,id=ram,share",
            "-object memory-backend-ram,id=ram,size=1G,prealloc=yes",
            r#"-object {"qom-type":"memory-backend-memfd","id":"ram","size":1073741824}"#,
            r#"-object {"id":"ram","qom-type":"memory-backend-ram","share":true}"#,
            "-object qom-type=memory-backend-shm,id=ram",
            "-object sev-guest,id=sev0",
            "-M q35,confidential-guest-support=sev0",
            "-device vfio-pci,host=01:00.0",
            r#"-device {"driver":"vfio-pci","host":"01:00.0"}"#,
            "-netdev type=vhost-vdpa,id=n",
            "-device vhost-user-fs-pci,chardev=c",
        ] {
            let refused = guest(line);
            assert!(refused.is_err(), "{line}");
            assert!(!refused.unwrap_err().1.is_empty());
        }
        for line in [
            "-enable-kvm -cpu host -m 4G -smp 4 -device virtio-balloon-pci",
            "-overcommit mem-lock=off",
            "-object memory-backend-ram,id=ram,size=1G,share=off,prealloc=off -machine q35,memory-backend=ram",
            r#"-object {"qom-type":"memory-backend-ram","id":"ram","size":1073741824,"share":false}"#,
            "-netdev tap,id=n,vhost=on -device virtio-net-pci,netdev=n",
            "-drive file=daemonize,if=virtio",
        ] {
            assert!(guest(line).is_ok(), "{line}");
        }
        assert_eq!(guest("-daemonize -m 1").unwrap_err().0, "-daemonize");
        assert_eq!(guest("-mem-path x").unwrap_err().0, "-mem-path x");
    }

    #[test]
    fn qemu_is_told_by_its_name() {
        for name in ["qemu-system-x86_64", "/usr/libexec/qemu-kvm", "/usr/bin/kvm", "qemu-system-aarch64"] {
            assert!(is_qemu(Path::new(name)), "{name}");
        }
        for name in ["qemu-img", "/opt/qemu-system-x86_64/run", "cloud-hypervisor", "akvm"] {
            assert!(!is_qemu(Path::new(name)), "{name}");
        }
    }
}
