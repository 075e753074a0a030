//! Parses `stripe:PATH,PATH...[?size=SIZE&unit=SIZE&encrypt=on|off&overwrite=on|off]`.

use crate::url::{Exact, Query, UrlProblem, pairs, size, split_query, switch};
use std::fmt;
use std::path::PathBuf;
use weir_core::ByteSize;

const KEYS: &[&str] = &["size", "unit", "encrypt", "overwrite"];

/// Files or block devices that are striped, and the options of the stripe.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct StripeUrl {
    /// The paths of the members. A path with a comma cannot be written.
    pub paths: Vec<PathBuf>,
    /// Room for pages on all members together. `None`: each member gives all of its device, or what
    /// its Weir file has.
    pub size: Option<ByteSize>,
    /// Whether to encrypt, as for a single file.
    pub encrypt: bool,
    /// Whether to overwrite foreign content, as for a single file.
    pub overwrite: bool,
    /// Bytes on one member before the next one's turn.
    pub unit: ByteSize,
}

impl StripeUrl {
    /// The default unit: that of the kernel's own RAID-0.
    pub const UNIT: ByteSize = ByteSize(512 << 10);

    /// Bytes of one unit on each member. The size is a multiple of this.
    pub fn round(&self) -> u64 {
        self.unit.0.saturating_mul(self.paths.len() as u64)
    }

    /// The files or devices at `paths`, with every option at its default.
    pub fn new(paths: impl IntoIterator<Item = PathBuf>) -> Self {
        let paths = paths.into_iter().collect();
        StripeUrl { paths, size: None, encrypt: true, overwrite: false, unit: StripeUrl::UNIT }
    }

    pub(crate) fn parse(text: &str) -> Result<Self, UrlProblem> {
        let (list, query) = split_query(text);
        let mut url = StripeUrl::new(list.split(',').map(PathBuf::from));
        if url.paths.len() < 2 || list.split(',').any(str::is_empty) {
            let expected = "two paths or more, such as stripe:/dev/nvme0n1,/dev/nvme1n1";
            return Err(UrlProblem::Value { key: "paths", value: list.to_owned(), expected });
        }
        for (key, text) in pairs(query, '&', KEYS)? {
            match key {
                "size" => url.size = Some(size(key, text)?),
                "encrypt" => url.encrypt = switch(key, text)?,
                "overwrite" => url.overwrite = switch(key, text)?,
                _ => url.unit = size(key, text)?,
            }
        }
        Ok(url)
    }
}

impl fmt::Display for StripeUrl {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let list: Vec<String> = self.paths.iter().map(|path| path.display().to_string()).collect();
        let list = list.join(",");
        write!(f, "stripe:{list}")?;
        let bare = self.size.is_none() && self.encrypt && !self.overwrite && self.unit == StripeUrl::UNIT;
        if bare && list.contains('?') {
            return f.write_str("?");
        }
        let mut query = Query::new(f, "?", "&");
        query.pair(self.size.is_some(), "size", Exact(self.size.unwrap_or_default()))?;
        query.pair(!self.encrypt, "encrypt", "off")?;
        query.pair(self.overwrite, "overwrite", "on")?;
        query.pair(self.unit != StripeUrl::UNIT, "unit", Exact(self.unit))
    }
}
