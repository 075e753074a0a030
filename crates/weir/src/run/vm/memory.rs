//! The mappings and open files of a QEMU that runs: whether all of its guest's memory is managed.

use rustix::fs::OFlags;
use std::fs;
use std::path::PathBuf;
use weir_core::ByteSize;

/// Smaller mappings cannot be the guest's memory.
const LEAST: u64 = 16 << 20;
/// File systems that move data straight to and from a program's pages without pinning these, with
/// their numbers from `statfs(2)`.
const UNPINNED: [(&str, i64); 4] =
    [("NFS", 0x6969), ("Ceph", 0x00c3_6400), ("FUSE", 0x6573_5546), ("9P", 0x0102_1997)];

/// The result of a look at QEMU.
#[derive(Debug, PartialEq, Eq)]
pub enum Verdict {
    /// QEMU has not made the guest's memory yet, or the pager has not noticed that memory yet.
    NotYet,
    /// The pager manages the guest's memory.
    Bounded,
    /// A part of the guest's memory cannot be bounded, for this reason.
    Refused(String),
}

/// Looks at a process of QEMU, whose guest has `ram` bytes of memory.
pub fn look(process: i32, ram: u64) -> Verdict {
    let smaps = fs::read_to_string(format!("/proc/{process}/smaps")).unwrap_or_default();
    match mappings(&smaps, ram) {
        Verdict::Bounded => match direct(process) {
            Some(why) => Verdict::Refused(why),
            None => Verdict::Bounded,
        },
        other => other,
    }
}

/// The verdict of the text of `/proc/PID/smaps`.
fn mappings(smaps: &str, ram: u64) -> Verdict {
    let (mut managed, mut others, mut largest) = (0, 0, (0, ""));
    let (mut bytes, mut name, mut is_file) = (0, "", false);
    for line in smaps.lines() {
        if let Some(flags) = line.strip_prefix("VmFlags:") {
            let has = |flag| flags.split_ascii_whitespace().any(|other| other == flag);
            // "um": registered with userfaultfd, which only the pager does.
            if has("um") {
                managed += if name == "[heap]" { 0 } else { bytes };
            } else if bytes >= LEAST
                && has("wr")
                && (has("sh") || has("ht") || has("lo") || is_file)
                // Memory of a device, as of a graphics card.
                && !has("io")
                && !has("pf")
            {
                others += bytes;
                largest = largest.max((bytes, name));
            }
        } else if let Some((range, rest)) = line.split_once(' ')
            && let Some((start, end)) = range.split_once('-')
            && let (Ok(start), Ok(end)) = (u64::from_str_radix(start, 16), u64::from_str_radix(end, 16))
        {
            let mut words = rest.split_ascii_whitespace();
            is_file = words.nth(3).is_some_and(|inode| inode != "0");
            (bytes, name) = (end - start, words.next().unwrap_or("locked memory"));
        }
    }
    if others >= (ram / 2).max(LEAST) {
        return Verdict::Refused(format!(
            "{} of its memory cannot be bounded: {} is shared, locked, or a file; docs/vm.md says what can",
            ByteSize(others),
            largest.1
        ));
    }
    if managed >= ram { Verdict::Bounded } else { Verdict::NotYet }
}

/// The reason to refuse a file that QEMU has opened for direct I/O, if there is one.
fn direct(process: i32) -> Option<String> {
    let files = fs::read_dir(format!("/proc/{process}/fd")).ok()?;
    files.flatten().find_map(|file| {
        let number = file.file_name();
        let info = fs::read_to_string(format!("/proc/{process}/fdinfo/{}", number.display())).ok()?;
        let flags = info.lines().find_map(|line| line.strip_prefix("flags:"))?;
        let flags = u32::from_str_radix(flags.trim(), 8).ok()?;
        let kind = rustix::fs::statfs(file.path()).ok()?.f_type;
        let system = unpinned(OFlags::from_bits_retain(flags), kind)?;
        let path = fs::read_link(file.path()).unwrap_or_else(|_| PathBuf::from(&number));
        Some(format!(
            "{} is open for direct I/O, and {system} does not pin the guest's pages meanwhile, so some could \
             be lost; use cache=writeback",
            path.display()
        ))
    })
}

/// The file system's name, if pages of direct I/O on a file with these flags are not pinned.
fn unpinned(flags: OFlags, kind: i64) -> Option<&'static str> {
    let known = UNPINNED.iter().find(|(_, number)| *number == kind)?;
    flags.contains(OFlags::DIRECT).then_some(known.0)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn mapping(mib: u64, mode: &str, name: &str, flags: &str) -> String {
        let inode = if name.starts_with('/') { 7 } else { 0 };
        let end = 0x7f00_0000_0000_u64 + (mib << 20);
        format!("7f0000000000-{end:x} {mode} 00000000 00:01 {inode} {name}\nRss: 0 kB\nVmFlags: {flags}\n")
    }

    #[test]
    fn a_guest_is_bounded_once_as_much_memory_as_it_has_is_registered_with_userfaultfd() {
        let heap = mapping(256, "rw-p", "[heap]", "rd wr mr mw me ac um");
        let code = mapping(48, "rwxp", "", "rd wr ex mr mw me ac");
        let own = [heap, code].concat();
        assert_eq!(mappings(&own, 256 << 20), Verdict::NotYet);
        let ram = mapping(256, "rw-p", "", "rd wr mr mw me dc ac um hg mg");
        assert_eq!(mappings(&[&*own, &ram].concat(), 256 << 20), Verdict::Bounded);
        let half = mapping(128, "rw-p", "", "rd wr mr mw me dc ac um");
        assert_eq!(mappings(&[&*own, &half].concat(), 256 << 20), Verdict::NotYet);
        assert_eq!(mappings(&[half.clone(), half].concat(), 256 << 20), Verdict::Bounded);
    }

    #[test]
    fn shared_locked_and_huge_memory_of_the_guests_size_is_refused_by_its_name_and_a_cards_is_not() {
        for (mode, name, flags) in [
            ("rw-s", "/memfd:memory-backend-memfd", "rd wr sh mr mw me ms"),
            ("rw-p", "/dev/shm/ram", "rd wr mr mw me"),
            ("rw-p", "/anon_hugepage", "rd wr mr mw me ht"),
            ("rw-p", "", "rd wr mr mw me lo"),
        ] {
            let Verdict::Refused(why) = mappings(&mapping(256, mode, name, flags), 256 << 20) else {
                panic!("{name} {flags}")
            };
            assert!(why.contains(if name.is_empty() { "locked memory" } else { name }), "{why}");
        }
        let card = mapping(256, "rw-s", "/dev/dri/renderD128", "rd wr sh mr mw me ms pf io");
        let code = mapping(64, "r-xp", "/usr/bin/qemu-system-x86_64", "rd ex mr mw me");
        let small = mapping(8, "rw-s", "/memfd:pulseaudio", "rd wr sh mr mw me ms");
        assert_eq!(mappings(&[card, code, small].concat(), 256 << 20), Verdict::NotYet);
    }

    #[test]
    fn direct_io_is_refused_where_the_kernel_pins_no_pages() {
        let (direct, plain) = (OFlags::DIRECT | OFlags::RDWR, OFlags::RDWR);
        assert_eq!(unpinned(direct, 0x6969), Some("NFS"));
        assert_eq!(unpinned(plain, 0x6969), None);
        const EXT4: i64 = 0xef53;
        assert_eq!(unpinned(direct, EXT4), None);
    }
}
