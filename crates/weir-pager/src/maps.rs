//! The process's own mappings, as `/proc/self/maps` has them.

use std::fs::File;
use std::io::{self, Read as _, Seek as _};

/// A mapping.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Mapping {
    /// The first byte.
    pub start: usize,
    /// The byte after the last.
    pub end: usize,
    /// Private, anonymous, to be read and written, and no stack: memory that can be managed.
    pub is_plain: bool,
}

/// Reads the mappings into memory that is kept.
#[derive(Debug)]
pub struct Maps {
    file: File,
    text: String,
}

impl Maps {
    /// Opens the file.
    ///
    /// # Errors
    /// When `/proc` is not there.
    pub fn open() -> io::Result<Self> {
        Ok(Maps { file: File::open("/proc/self/maps")?, text: String::with_capacity(64 << 10) })
    }

    /// The mappings of now.
    ///
    /// # Errors
    /// When they cannot be read.
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
