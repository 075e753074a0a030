//! A file or a block device.

mod url;

pub use url::FileUrl;
