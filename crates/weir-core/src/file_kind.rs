//! Names of kinds of files.

use rustix::fs::FileType;

/// Names the kind of a file by its mode, with an article, as in "a directory".
pub fn file_kind(mode: u32) -> &'static str {
    match FileType::from_raw_mode(mode) {
        FileType::RegularFile => "a file",
        FileType::Directory => "a directory",
        FileType::Symlink => "a symbolic link",
        FileType::Fifo => "a named pipe",
        FileType::Socket => "a socket",
        FileType::CharacterDevice => "a character device",
        FileType::BlockDevice => "a block device",
        FileType::Unknown => "of no kind that is known here",
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::os::unix::fs::MetadataExt as _;

    #[test]
    fn a_kind_of_file_is_named_as_people_name_it() {
        let kind = |path: &str| file_kind(std::fs::metadata(path).unwrap().mode());
        assert_eq!(kind("/"), "a directory");
        assert_eq!(kind("/dev/null"), "a character device");
        assert_eq!(kind("/proc/self/exe"), "a file");
    }
}
