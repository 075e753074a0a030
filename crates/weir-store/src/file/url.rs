//! Parses `file:PATH[?size=SIZE&encrypt=on|off&overwrite=on|off&chunk=SIZE]`.

use crate::url::{Exact, Query, UrlProblem, pairs, size, split_query, switch};
use std::fmt;
use std::path::PathBuf;
use weir_core::ByteSize;

const KEYS: &[&str] = &["size", "encrypt", "overwrite", "chunk"];

/// A file or a block device, and the options of its use.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct FileUrl {
    /// The path of the file or device.
    pub path: PathBuf,
    /// Room for pages. `None`: all of a block device. A file needs a size, unless it is a Weir file
    /// already, which keeps its size.
    pub size: Option<ByteSize>,
    /// Whether pages are encrypted with a key that exists only while the store is open. The default
    /// is on.
    pub encrypt: bool,
    /// Whether to take the file or the device even if it has foreign content. The default is off.
    pub overwrite: bool,
    /// Bytes of a chunk, which is given back as a whole.
    pub chunk: ByteSize,
}

impl FileUrl {
    /// The default size of a chunk: half of a card's. It is large enough that file systems free
    /// whole extents.
    pub const CHUNK: ByteSize = ByteSize(64 << 20);

    /// The file at `path`, with every option at its default.
    pub fn new(path: impl Into<PathBuf>) -> Self {
        FileUrl { path: path.into(), size: None, encrypt: true, overwrite: false, chunk: FileUrl::CHUNK }
    }

    pub(crate) fn parse(text: &str) -> Result<Self, UrlProblem> {
        let (path, query) = split_query(text);
        if path.is_empty() {
            let expected = "a path, such as file:/var/lib/weir/backing?size=64GiB";
            return Err(UrlProblem::Value { key: "path", value: path.to_owned(), expected });
        }
        let mut url = FileUrl::new(path);
        for (key, text) in pairs(query, '&', KEYS)? {
            match key {
                "size" => url.size = Some(size(key, text)?),
                "encrypt" => url.encrypt = switch(key, text)?,
                "overwrite" => url.overwrite = switch(key, text)?,
                _ => url.chunk = size(key, text)?,
            }
        }
        Ok(url)
    }
}

impl fmt::Display for FileUrl {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let path = self.path.display().to_string();
        write!(f, "file:{path}")?;
        // If the path has a `?`, write an empty query after it. Without that, a parser takes the
        // end of the path for the query.
        let bare = self.size.is_none() && self.encrypt && !self.overwrite && self.chunk == FileUrl::CHUNK;
        if bare && path.contains('?') {
            return f.write_str("?");
        }
        let mut query = Query::new(f, "?", "&");
        query.pair(self.size.is_some(), "size", Exact(self.size.unwrap_or_default()))?;
        query.pair(!self.encrypt, "encrypt", "off")?;
        query.pair(self.overwrite, "overwrite", "on")?;
        query.pair(self.chunk != FileUrl::CHUNK, "chunk", Exact(self.chunk))
    }
}
