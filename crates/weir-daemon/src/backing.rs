//! `--backing`: room on a disk below the other stores, for pages that leave them.
//!
//! With a backing, every page has room when the faster stores give all their memory back. So the
//! backing is as large as the device, unless its URL gives another size.

use std::fmt;
use std::io;
use std::path::PathBuf;
use std::str::FromStr;
use weir_core::{ByteSize, PAGE_SIZE};
use weir_store::StoreUrl;

/// A file or block device, or several striped, as `--backing` names it.
#[derive(Clone, PartialEq, Debug)]
pub struct Backing(StoreUrl);

impl Backing {
    /// The backing's URL. A URL without a size gets the size of `slots`, if given.
    pub fn url(&self, slots: Option<u32>) -> StoreUrl {
        let mut url = self.0.clone();
        if let (StoreUrl::File(file), Some(slots)) = (&mut url, slots) {
            file.size.get_or_insert(ByteSize(u64::from(slots) * PAGE_SIZE as u64));
        }
        url
    }

    /// The files and devices that the backing names.
    pub fn paths(&self) -> &[PathBuf] {
        self.0.paths()
    }

    /// Makes the backing's paths absolute, for a process in another directory.
    ///
    /// # Errors
    /// Fails when this process is in a directory that is gone.
    pub fn absolute(self) -> io::Result<Self> {
        self.0.absolute().map(Backing)
    }

    /// Whether the backing's size follows from the device's size. It does for a file whose URL has
    /// no size. A block device has a size of its own.
    pub fn follows(&self) -> bool {
        use std::os::unix::fs::FileTypeExt as _;
        match &self.0 {
            StoreUrl::File(file) => {
                let is_device = || file.path.metadata().is_ok_and(|it| it.file_type().is_block_device());
                file.size.is_none() && !is_device()
            }
            _ => false,
        }
    }
}

impl FromStr for Backing {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        const ACCEPTED: &str = "accepted: PATH, PATH?size=64GiB, file:PATH, stripe:PATH,PATH";
        let is_url = text.starts_with("file:") || text.starts_with("stripe:");
        if !is_url && text.parse::<StoreUrl>().is_ok() {
            return Err(format!("backing lies on a disk; {ACCEPTED}"));
        }
        let url = if is_url { text.parse() } else { format!("file:{text}").parse() };
        url.map(Backing).map_err(|error| format!("{error}; {ACCEPTED}"))
    }
}

impl fmt::Display for Backing {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.0.fmt(f)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_path_is_a_file_whose_size_follows_from_the_device_unless_it_says_one() {
        let plain: Backing = "/var/lib/weir/backing".parse().unwrap();
        assert!(plain.follows());
        assert_eq!(plain.url(Some(256)).to_string(), "file:/var/lib/weir/backing?size=1MiB");
        let sized: Backing = "/b?size=2MiB".parse().unwrap();
        assert!(!sized.follows());
        assert_eq!(sized.url(Some(256)).to_string(), "file:/b?size=2MiB");
        assert_eq!("stripe:/a,/b".parse::<Backing>().unwrap().to_string(), "stripe:/a,/b");
    }

    #[test]
    fn memory_is_no_backing() {
        for (text, words) in [("host:1GiB", "disk"), ("vram:", "disk"), ("", "a path"), ("/a?size=x", "size")]
        {
            let error = text.parse::<Backing>().unwrap_err();
            assert!(error.contains(words) && error.contains("accepted: PATH"), "{text}: {error}");
        }
    }
}
