//! Memory that fails as told.

mod url;

pub use url::SimUrl;
