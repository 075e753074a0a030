//! Store URLs: the names of stores on the command line, in the TOML file and in status.
//!
//! | URL | a store in |
//! |---|---|
//! | `host:8GiB` | host memory |
//! | `vram:` · `vram:0` · `vram:0?size=8GiB` | the memory of every GPU, or of one ([`VramUrl`]) |
//! | `file:/path?size=64GiB` | a file or a block device, fully allocated and encrypted ([`FileUrl`]) |
//! | `stripe:/dev/nvme0n1,/dev/nvme1n1` | several of them, in turns ([`StripeUrl`]) |
//! | `redis://host:port,host:port?size=8GiB` | engines that speak the Redis protocol ([`RemoteUrl`]) |
//! | `sim:seed=1,read_error=1e-4` | memory that fails as told, for tests ([`SimUrl`]) |
//!
//! Each kind of store parses its part of a URL in its own module. A new kind needs a variant in
//! this file, a parser in its module, and an arm in [`open`](crate::open()).
//!
//! ```
//! use weir_store::StoreUrl;
//!
//! let url: StoreUrl = "file:/var/lib/weir/backing?size=64GiB".parse()?;
//! assert_eq!(url.to_string(), "file:/var/lib/weir/backing?size=64GiB");
//!
//! let error = "sim:read_eror=1e-4".parse::<StoreUrl>().unwrap_err();
//! assert!(error.to_string().contains("unknown key \"read_eror\"; accepted: seed, size, "));
//! # Ok::<(), weir_store::UrlError>(())
//! ```

use crate::file::{FileUrl, StripeUrl};
use crate::remote::RemoteUrl;
use crate::sim::SimUrl;
use crate::vram::VramUrl;
use std::fmt;
use std::path::PathBuf;
use std::str::FromStr;
use weir_core::{ByteSize, PAGE_SIZE};

/// A store's name as a URL.
#[derive(Clone, PartialEq, Debug)]
pub enum StoreUrl {
    /// `host:SIZE`: a store in RAM.
    Host {
        /// Bytes of memory that the store takes.
        size: ByteSize,
    },
    /// `vram:[GPU][?KEY=VALUE&...]`: a store in GPU memory.
    Vram(VramUrl),
    /// `file:PATH[?KEY=VALUE&...]`: a store in a file or on a disk.
    File(FileUrl),
    /// `stripe:PATH,PATH...[?KEY=VALUE&...]`: a store striped over several files or disks.
    Stripe(StripeUrl),
    /// `redis://HOST:PORT[,HOST:PORT...]?size=SIZE[&KEY=VALUE...]`: a store on key-value nodes.
    Remote(RemoteUrl),
    /// `sim:[KEY=VALUE,...]`: a simulated store.
    Sim(SimUrl),
}

/// The reason why a text is no store URL.
#[derive(Clone, PartialEq, Eq, Debug, thiserror::Error)]
#[error("store {url:?}: {problem}")]
pub struct UrlError {
    /// The text that was given.
    pub url: String,
    /// The mistake that the text has.
    pub problem: UrlProblem,
}

/// A mistake in a store URL.
#[derive(Clone, PartialEq, Eq, Debug, thiserror::Error)]
pub enum UrlProblem {
    /// The text names an unknown kind of store.
    #[error(
        "no kind of store is called {0:?}; accepted: host:8GiB, vram:, file:PATH, stripe:PATH,PATH, redis://HOST:PORT, sim:"
    )]
    Scheme(String),
    /// The text has a key that this kind of store does not know.
    #[error("unknown key {key:?}; accepted: {}", accepted.join(", "))]
    UnknownKey {
        /// The key that this kind of store does not know.
        key: String,
        /// The keys that this kind of store knows.
        accepted: &'static [&'static str],
    },
    /// The text has a key twice.
    #[error("{0} is given twice")]
    Repeated(&'static str),
    /// The text has a value that its key cannot take.
    #[error("{key} cannot be {value:?}: give {expected}")]
    Value {
        /// The key, or the part of the URL, that has the wrong value.
        key: &'static str,
        /// The value that was given.
        value: String,
        /// The values that the key takes.
        expected: &'static str,
    },
    /// The text gives no size, and this kind of store has no default.
    #[error("no size is given; accepted: {0}")]
    NoSize(&'static str),
    /// The text has a user name or a password before its address. A URL is in lists of processes
    /// and in logs.
    #[error(
        "a login does not belong into the address; give user=NAME and password-file=PATH behind ?size=8GiB&"
    )]
    Login,
}

impl StoreUrl {
    /// The files and devices that the URL names.
    pub fn paths(&self) -> &[PathBuf] {
        match self {
            StoreUrl::File(file) => std::slice::from_ref(&file.path),
            StoreUrl::Stripe(stripe) => &stripe.paths,
            StoreUrl::Host { .. } | StoreUrl::Vram(_) | StoreUrl::Remote(_) | StoreUrl::Sim(_) => &[],
        }
    }

    /// Whether a keeper can give the store's pages to the next process: [`reopen`](crate::reopen)
    /// finds them.
    pub fn outlives_its_process(&self) -> bool {
        !matches!(self, StoreUrl::Remote(_) | StoreUrl::Sim(_))
    }

    /// Makes every path of the URL absolute, for a process in another directory.
    ///
    /// # Errors
    /// Fails when this process's working directory no longer exists.
    pub fn absolute(mut self) -> std::io::Result<Self> {
        let paths = match &mut self {
            StoreUrl::File(file) => std::slice::from_mut(&mut file.path),
            StoreUrl::Stripe(stripe) => &mut stripe.paths[..],
            StoreUrl::Remote(remote) => remote.password_file.as_mut_slice(),
            StoreUrl::Host { .. } | StoreUrl::Vram(_) | StoreUrl::Sim(_) => &mut [],
        };
        for path in paths {
            *path = std::path::absolute(&*path)?;
        }
        Ok(self)
    }

    /// The same store with `slots` more slots, if the URL gives a size: the slots for writes under
    /// way come on top of the size that the user asked for. A stripe gets whole units, so it may
    /// get more.
    pub fn enlarged(&self, slots: u32) -> Self {
        let mut url = self.clone();
        let more = u64::from(slots) * PAGE_SIZE as u64;
        let size = match &mut url {
            StoreUrl::Host { size } => Some(size),
            StoreUrl::Vram(url) => url.size.as_mut(),
            StoreUrl::File(file) => file.size.as_mut(),
            StoreUrl::Stripe(stripe) => {
                let round = stripe.round();
                // A size that is no multiple is refused as the user has written it.
                let size = stripe.size.as_mut().filter(|size| size.0.is_multiple_of(round));
                size.into_iter().for_each(|size| size.0 += more.next_multiple_of(round));
                None
            }
            StoreUrl::Remote(remote) => Some(&mut remote.size),
            StoreUrl::Sim(sim) => Some(&mut sim.size),
        };
        if let Some(size) = size {
            size.0 += more;
        }
        url
    }
}

impl FromStr for StoreUrl {
    type Err = UrlError;

    fn from_str(url: &str) -> Result<Self, UrlError> {
        parse(url).map_err(|problem| UrlError { url: without_login(url), problem })
    }
}

impl FileUrl {
    /// Parses what stands behind `file:` in a store URL.
    ///
    /// # Errors
    /// Fails as parsing the whole URL does.
    pub fn behind_scheme(rest: &str) -> Result<Self, UrlError> {
        FileUrl::parse(rest).map_err(|problem| UrlError { url: format!("file:{rest}"), problem })
    }
}

impl StripeUrl {
    /// Parses what stands behind `stripe:` in a store URL.
    ///
    /// # Errors
    /// Fails as parsing the whole URL does.
    pub fn behind_scheme(rest: &str) -> Result<Self, UrlError> {
        StripeUrl::parse(rest).map_err(|problem| UrlError { url: format!("stripe:{rest}"), problem })
    }
}

/// A URL as a message may show it: `***` in the place of a user name and a password.
fn without_login(url: &str) -> String {
    match (url.split_once(':'), url.rsplit_once('@')) {
        // Other programs have such URLs too, with other names for the scheme.
        (Some((scheme, rest)), Some((_, address)))
            if scheme == "redis" || rest.starts_with("//") && scheme != "file" =>
        {
            format!("{scheme}://***@{address}")
        }
        _ => url.to_owned(),
    }
}

fn parse(url: &str) -> Result<StoreUrl, UrlProblem> {
    let (scheme, rest) = url.split_once(':').ok_or_else(|| UrlProblem::Scheme(url.to_owned()))?;
    match scheme {
        "host" if rest.is_empty() => Err(UrlProblem::NoSize("host:8GiB")),
        "host" => Ok(StoreUrl::Host { size: size("size", rest)? }),
        "vram" => VramUrl::parse(rest).map(StoreUrl::Vram),
        "file" => FileUrl::parse(rest).map(StoreUrl::File),
        "stripe" => StripeUrl::parse(rest).map(StoreUrl::Stripe),
        "redis" => RemoteUrl::parse(rest).map(StoreUrl::Remote),
        "sim" => SimUrl::parse(rest).map(StoreUrl::Sim),
        other => Err(UrlProblem::Scheme(other.to_owned())),
    }
}

/// Splits `path?query` at the last `?`, so a path may contain one if a query follows.
pub(crate) fn split_query(text: &str) -> (&str, &str) {
    text.rsplit_once('?').unwrap_or((text, ""))
}

/// Parses `text` into `key=value` pairs; each key must be one of `accepted`, and given once.
pub(crate) fn pairs<'a>(
    text: &'a str,
    separator: char,
    accepted: &'static [&'static str],
) -> Result<Vec<(&'static str, &'a str)>, UrlProblem> {
    let mut found: Vec<(&'static str, &str)> = Vec::new();
    for pair in text.split(separator).filter(|pair| !pair.is_empty()) {
        let (key, value) = pair.split_once('=').unwrap_or((pair, ""));
        let key = *accepted
            .iter()
            .find(|&&known| known == key)
            .ok_or_else(|| UrlProblem::UnknownKey { key: key.to_owned(), accepted })?;
        if found.iter().any(|&(earlier, _)| earlier == key) {
            return Err(UrlProblem::Repeated(key));
        }
        found.push((key, value));
    }
    Ok(found)
}

/// Parses `text` as a `T`; the error says which values `key` takes.
pub(crate) fn value<T: FromStr>(
    key: &'static str,
    text: &str,
    expected: &'static str,
) -> Result<T, UrlProblem> {
    text.parse().map_err(|_| UrlProblem::Value { key, value: text.to_owned(), expected })
}

/// Parses `text` as room for pages: whole pages, at least one, and no more than slots can be
/// numbered.
pub(crate) fn size(key: &'static str, text: &str) -> Result<ByteSize, UrlProblem> {
    const MOST: u64 = u32::MAX as u64 * PAGE_SIZE as u64;
    let expected = "a size in whole pages of 4KiB, below 16TiB, such as 8GiB";
    let size: ByteSize = value(key, text, expected)?;
    if size.0 == 0 || size.0 > MOST || !size.0.is_multiple_of(PAGE_SIZE as u64) {
        return Err(UrlProblem::Value { key, value: text.to_owned(), expected });
    }
    Ok(size)
}

/// Parses `text` as `on` or `off`.
pub(crate) fn switch(key: &'static str, text: &str) -> Result<bool, UrlProblem> {
    match text {
        "on" => Ok(true),
        "off" => Ok(false),
        _ => Err(UrlProblem::Value { key, value: text.to_owned(), expected: "on or off" }),
    }
}

/// Writes `key=value` pairs with separators, and leaves out values that are the default.
pub(crate) struct Query<'a, 'f> {
    out: &'a mut fmt::Formatter<'f>,
    next: &'static str,
    then: &'static str,
}

impl<'a, 'f> Query<'a, 'f> {
    pub(crate) fn new(out: &'a mut fmt::Formatter<'f>, first: &'static str, then: &'static str) -> Self {
        Query { out, next: first, then }
    }

    pub(crate) fn pair(&mut self, shown: bool, key: &str, value: impl fmt::Display) -> fmt::Result {
        if shown {
            write!(self.out, "{}{key}={value}", std::mem::replace(&mut self.next, self.then))?;
        }
        Ok(())
    }
}

/// Writes the URL in its shortest form, as [`FromStr`] reads it.
impl fmt::Display for StoreUrl {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            StoreUrl::Host { size } => write!(f, "host:{}", Exact(*size)),
            StoreUrl::Vram(url) => url.fmt(f),
            StoreUrl::File(url) => url.fmt(f),
            StoreUrl::Stripe(url) => url.fmt(f),
            StoreUrl::Remote(url) => url.fmt(f),
            StoreUrl::Sim(url) => url.fmt(f),
        }
    }
}

/// A size without rounding, in the largest unit that divides it: [`ByteSize`] rounds for people.
pub(crate) struct Exact(pub(crate) ByteSize);

impl fmt::Display for Exact {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let units = [("TiB", 1u64 << 40), ("GiB", 1 << 30), ("MiB", 1 << 20), ("KiB", 1 << 10)];
        let divides = |&(_, scale): &(_, u64)| self.0.0 >= scale && self.0.0.is_multiple_of(scale);
        match units.into_iter().find(divides) {
            Some((unit, scale)) => write!(f, "{}{unit}", self.0.0 / scale),
            None => write!(f, "{}", self.0.0),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::vram::Target;
    use proptest::prelude::*;

    fn refused(url: &str) -> String {
        url.parse::<StoreUrl>().unwrap_err().to_string()
    }

    #[test]
    fn every_url_of_the_manual_is_read() {
        assert_eq!("host:8GiB".parse(), Ok(StoreUrl::Host { size: ByteSize(8 << 30) }));
        assert_eq!("vram:".parse(), Ok(StoreUrl::Vram(VramUrl::new(Target::All))));
        assert_eq!("vram:0".parse(), Ok(StoreUrl::Vram(VramUrl::new(Target::Index(0)))));
        assert!(matches!("vram:1?size=8GiB".parse(), Ok(StoreUrl::Vram(_))));
        assert!(matches!("file:/path?size=64GiB".parse(), Ok(StoreUrl::File(_))));
        assert!(matches!("stripe:/dev/nvme0n1,/dev/nvme1n1".parse(), Ok(StoreUrl::Stripe(_))));
        assert!(matches!("sim:seed=1,read_error=1e-4".parse(), Ok(StoreUrl::Sim(_))));
    }

    #[test]
    fn an_error_names_the_part_the_value_and_what_is_accepted() {
        for (url, parts) in [
            ("", ["\"\"", "accepted: host:8GiB, vram:"]),
            ("disk:/dev/sda", ["\"disk\"", "accepted: host:8GiB, vram:"]),
            ("host:", ["no size is given", "accepted: host:8GiB"]),
            ("rediss://bob:secret@host:1?size=1M", ["\"rediss://***@host:1?size=1M\"", "no kind of store"]),
            ("host:5000", ["size cannot be \"5000\"", "whole pages"]),
            ("host:16TiB", ["size cannot be \"16TiB\"", "below 16TiB"]),
            ("vram:gpu0", ["gpu cannot be \"gpu0\"", "such as 0"]),
            ("vram:0?sise=1G", ["unknown key \"sise\"", "accepted: size"]),
            ("file:/a?size=1M&size=2M", ["size is given twice", "file:/a"]),
            ("file:/a?size=0", ["size cannot be \"0\"", "whole pages"]),
            ("file:", ["path cannot be \"\"", "a path"]),
            ("file:/a?encrypt=yes", ["encrypt cannot be \"yes\"", "on or off"]),
            ("stripe:/a", ["paths cannot be \"/a\"", "two paths or more"]),
            ("sim:corrupt=2", ["corrupt cannot be \"2\"", "0 to 1"]),
            ("sim:corrupt=NaN", ["corrupt cannot be \"NaN\"", "0 to 1"]),
        ] {
            let error = refused(url);
            assert!(parts.iter().all(|part| error.contains(part)), "{url}: {error}");
        }
    }

    fn some_size() -> impl Strategy<Value = ByteSize> {
        (1u64..u64::from(u32::MAX)).prop_map(|pages| ByteSize(pages * PAGE_SIZE as u64))
    }

    fn some_path() -> impl Strategy<Value = std::path::PathBuf> {
        "/[a-z0-9.?=&/ ]{1,20}".prop_map(Into::into)
    }

    fn any_url() -> impl Strategy<Value = StoreUrl> {
        let sized = || proptest::option::of(some_size());
        prop_oneof![
            some_size().prop_map(|size| StoreUrl::Host { size }),
            (any::<Option<u32>>(), sized(), 20u32..33, any::<u32>(), proptest::option::of(1u32..4097))
                .prop_map(|(gpu, size, chunk, blocks, engine_batch)| {
                    let target = gpu.map_or(Target::All, Target::Index);
                    let chunk = ByteSize(1 << chunk);
                    StoreUrl::Vram(VramUrl { size, chunk, blocks, engine_batch, ..VramUrl::new(target) })
                }),
            (some_path(), sized(), any::<bool>(), any::<bool>(), some_size()).prop_map(
                |(path, size, encrypt, overwrite, chunk)| {
                    StoreUrl::File(FileUrl { path, size, encrypt, overwrite, chunk })
                }
            ),
            (
                proptest::collection::vec(some_path(), 2..5),
                sized(),
                any::<bool>(),
                any::<bool>(),
                some_size()
            )
                .prop_map(|(paths, size, encrypt, overwrite, unit)| {
                    StoreUrl::Stripe(StripeUrl { paths, size, encrypt, overwrite, unit })
                }),
            (any::<u64>(), some_size(), 0.0f64..=1.0, 0.0f64..=1.0, any::<u32>(), any::<Option<u32>>())
                .prop_map(|(seed, size, read_error, corrupt, delay, lost_slot)| {
                    let sim =
                        SimUrl { seed, size, read_error, corrupt, delay, lost_slot, ..SimUrl::default() };
                    StoreUrl::Sim(sim)
                }),
        ]
    }

    proptest! {
        #[test]
        fn a_url_survives_being_shown(url in any_url()) {
            prop_assert_eq!(url.to_string().parse(), Ok(url));
        }

        #[test]
        fn no_text_panics(text in "(host|vram|file|stripe|redis|sim)?:?[ -~é]{0,40}") {
            if let Ok(url) = text.parse::<StoreUrl>() {
                prop_assert_eq!(url.to_string().parse(), Ok(url));
            }
        }
    }
}
