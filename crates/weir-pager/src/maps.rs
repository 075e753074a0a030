//! The process's own mappings, as listed in `/proc/self/maps`.

use std::fs::File;
use std::io::{self, Read as _, Seek as _};

/// A mapping of this process.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Mapping {
    /// The address of the mapping's first byte.
    pub start: usize,
    /// The address of the byte after the mapping's last.
    pub end: usize,
    /// Whether the memory can be managed: it is private, anonymous, readable and writable, and no
    /// stack.
    pub is_plain: bool,
}

/// Reads the mappings into a buffer that is used again.
#[derive(Debug)]
pub struct Maps {
    file: File,
    text: String,
}

impl Maps {
    /// Opens `/proc/self/maps`.
    ///
    /// # Errors
    /// Fails when `/proc` is not mounted.
    pub fn open() -> io::Result<Self> {
        Ok(Maps { file: File::open("/proc/self/maps")?, text: String::with_capacity(64 << 10) })
    }

    /// Reads the mappings as they are now.
    ///
    /// # Errors
    /// Fails when the mappings cannot be read.
    pub fn read(&mut self) -> io::Result<impl Iterator<Item = Mapping>> {
        self.text.clear();
        self.file.rewind()?;
        self.file.read_to_string(&mut self.text)?;
        Ok(self.text.lines().filter_map(parse))
    }
}

fn parse(line: &str) -> Option<Mapping> {
    let mut words = line.split_ascii_whitespace();
    let (start, end) = words.next()?.split_once('-')?;
    let mode = words.next()?;
    let inode = words.nth(2)?;
    let name = words.next().unwrap_or_default();
    Some(Mapping {
        start: usize::from_str_radix(start, 16).ok()?,
        end: usize::from_str_radix(end, 16).ok()?,
        is_plain: mode == "rw-p"
            && inode == "0"
            && (name.is_empty() || name == "[heap]" || name.starts_with("[anon:")),
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_private_anonymous_memory_that_can_be_written_is_plain() {
        let plain = |line: &str| parse(line).expect("a mapping").is_plain;
        assert!(plain("7f0000000000-7f0000200000 rw-p 00000000 00:00 0 "));
        assert!(plain("55d0-55f0 rw-p 00000000 00:00 0                          [heap]"));
        for other in [
            "7ffc-7ffd rw-p 00000000 00:00 0                          [stack]",
            "1000-2000 r--p 00000000 00:00 0 ",
            "1000-2000 rw-s 00000000 00:01 7 /dev/zero (deleted)",
            "1000-2000 rw-p 00002000 fe:00 1234 /usr/lib/libc.so.6",
            "1000-2000 ---p 00000000 00:00 0 ",
        ] {
            assert!(!plain(other), "{other}");
        }
        assert_eq!(parse("nonsense"), None);
    }
}
