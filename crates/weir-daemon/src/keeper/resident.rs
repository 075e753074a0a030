//! Holds in memory the files that the next daemon reads before it serves: the program and its
//! configuration. Both may lie on tmpfs (`/run`, a memfd). The pages of a tmpfs are swapped out
//! like a process's own, to the very device that is down when they are needed.

use std::fs::File;
use std::io;
use std::os::linux::fs::MetadataExt as _;
use std::path::Path;
use weir_core::Resident;

/// Locks this program's file in RAM up to the end of its last mapped part. The symbols for
/// debuggers come after that, and are not locked.
pub fn program() -> io::Result<Resident> {
    let file = File::open("/proc/self/exe")?;
    let inode = file.metadata()?.st_ino();
    let maps = std::fs::read_to_string("/proc/self/maps")?;
    let end = maps.lines().filter_map(|line| file_end(line, inode)).max().ok_or(io::ErrorKind::NotFound)?;
    Resident::hold(&file, end)
}

/// Holds a configuration file in memory.
pub fn file(path: &Path) -> io::Result<Resident> {
    Resident::hold(&File::open(path)?, u64::MAX)
}

/// Reads a line of `/proc/PID/maps` (proc_pid_maps(5)). If it maps the file with number `inode`,
/// returns the offset in the file at which the mapping ends.
fn file_end(line: &str, inode: u64) -> Option<u64> {
    let mut fields = line.split_ascii_whitespace();
    let (from, to) = fields.next()?.split_once('-')?;
    let offset = fields.nth(1)?;
    let of = fields.nth(1)?;
    let hex = |text| u64::from_str_radix(text, 16).ok();
    (of.parse() == Ok(inode)).then_some(hex(offset)? + hex(to)? - hex(from)?)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_mapping_ends_where_its_offset_and_length_say() {
        let line =
            "7f0000002000-7f0000005000 r-xp 00001000 00:01 2056                       /memfd:weir (deleted)";
        assert_eq!(file_end(line, 2056), Some(0x4000));
        assert_eq!(file_end(line, 2057), None);
        assert_eq!(file_end("7ffc0000-7ffd0000 rw-p 00000000 00:00 0        [stack]", 2056), None);
    }

    #[test]
    fn this_program_can_be_held() {
        match program() {
            Ok(held) => drop(held),
            Err(error) => println!("skipped: this process may not lock memory: {error}"),
        }
    }
}
