//! The home that `--home` names: a disk as it is, or disks for a log.

use super::marks;
use super::options::CreateOptions;
use std::path::{Path, PathBuf};
use std::str::FromStr;
use std::sync::Arc;
use weir_cli::failure::{Failure, chain};
use weir_core::{ByteSize, PAGE_SIZE, Watch};
use weir_log::Log;
use weir_store::{FileStore, MemberTraffic, Room, Store, StoreUrl};
use weir_system::loop_device::LoopDevice;

/// Bytes of a log's segment; a striped log puts one segment on a disk before the next disk's turn.
const SEGMENT: ByteSize = ByteSize(1 << 20);

/// The home behind a cache.
#[derive(Clone, PartialEq, Debug)]
pub enum HomeUrl {
    /// A disk or file as it is.
    Raw(PathBuf),
    /// Disks or files for a log; what they hold is lost.
    Log(Box<StoreUrl>),
}

impl FromStr for HomeUrl {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        let Some(rest) = text.strip_prefix("log:") else { return Ok(HomeUrl::Raw(text.into())) };
        let kind = if rest.contains(',') { "stripe" } else { "file" };
        let url: StoreUrl = format!("{kind}:{rest}").parse().map_err(|error| chain(&error))?;
        Ok(HomeUrl::Log(Box::new(match url {
            StoreUrl::Stripe(mut stripe) => {
                // The stripe's units are the log's segments.
                stripe.unit = SEGMENT;
                StoreUrl::Stripe(stripe)
            }
            url => url,
        })))
    }
}

impl HomeUrl {
    /// The files and devices that the home names.
    pub fn paths(&self) -> &[PathBuf] {
        match self {
            HomeUrl::Raw(path) => std::slice::from_ref(path),
            HomeUrl::Log(url) => match &**url {
                StoreUrl::Stripe(stripe) => &stripe.paths,
                StoreUrl::File(file) => std::slice::from_ref(&file.path),
                _ => &[],
            },
        }
    }
}

/// An open home.
pub struct Home {
    /// The home's disks.
    pub disks: Arc<FileStore>,
    /// The log on the disks, if the home is one.
    pub log: Option<Log>,
}

impl Home {
    /// Opens the home. Refuses one that carries content which no option says to serve or to erase.
    ///
    /// # Errors
    /// Fails when the home is in use, carries something, or cannot be opened.
    pub fn open(options: &CreateOptions, lanes: u32, watch: Watch<'_>) -> Result<Self, Failure> {
        check_flags(options)?;
        options.home.paths().iter().try_for_each(|path| refuse_served(path))?;
        match &options.home {
            HomeUrl::Raw(path) => open_raw(options, path),
            HomeUrl::Log(url) => open_log(options, url, lanes, watch),
        }
    }

    /// The store that the cache stands in front of.
    pub fn store(&self) -> Arc<dyn Store> {
        match &self.log {
            Some(log) => Arc::new(log.clone()),
            None => Arc::clone(&self.disks) as _,
        }
    }

    /// The traffic of each of the home's disks.
    pub fn traffic(&self) -> Vec<MemberTraffic> {
        self.disks.traffic()
    }
}

fn check_flags(options: &CreateOptions) -> Result<(), Failure> {
    let paths = options.home.paths();
    if let Some(other) = options.wipe.iter().find(|wipe| !paths.contains(wipe)) {
        let named: Vec<String> = paths.iter().map(|path| path.display().to_string()).collect();
        let (other, named) = (other.display(), named.join(", "));
        return Err(Failure::Usage(format!("--wipe names {other}, and --home {named}: name the home again")));
    }
    if options.keep_content && matches!(options.home, HomeUrl::Log(_)) {
        let what = "a log keeps nothing of what its disks carry: leave --keep-content away, or name one disk without log:";
        return Err(Failure::Usage(what.to_owned()));
    }
    Ok(())
}

/// Refuses a file that a loop device serves: the loop device and the cache would overwrite each
/// other's data.
fn refuse_served(path: &Path) -> Result<(), Failure> {
    let file = path.canonicalize().unwrap_or_else(|_| path.to_owned());
    let Some(user) = LoopDevice::over(&file).first().map(|user| user.path().display().to_string()) else {
        return Ok(());
    };
    let path = path.display();
    Err(Failure::Failed(format!(
        "{path} is in use: {user} serves it; losetup -d {user} ends that, or give {user} as the home"
    )))
}

fn open_raw(options: &CreateOptions, path: &Path) -> Result<Home, Failure> {
    let open = || FileStore::open_raw(path).map_err(|error| Failure::Failed(chain(&error)));
    // Open the disks before anything is erased: this fails for a disk that another program uses.
    let mut disks = open()?;
    let marks = marks::find(path)?;
    if !marks.is_empty() && !options.keep_content {
        let shown = path.display();
        if options.wipe.is_empty() {
            return Err(Failure::Failed(format!(
                "{shown} carries {marks}; --keep-content serves it as it is, --wipe {shown} erases it"
            )));
        }
        // wipefs opens the disks for itself alone.
        drop(disks);
        marks::wipe(path)?;
        disks = open()?;
    }
    Ok(Home { disks: Arc::new(disks), log: None })
}

fn open_log(options: &CreateOptions, url: &StoreUrl, lanes: u32, watch: Watch<'_>) -> Result<Home, Failure> {
    let paths = options.home.paths();
    // Look at all disks before erasing one.
    let mut carry = Vec::new();
    for path in paths.iter().filter(|path| holds_something(path)) {
        let marks = marks::find(path)?;
        if marks.is_empty() {
            continue;
        }
        if !options.wipe.contains(path) {
            let shown = path.display();
            return Err(Failure::Failed(format!("{shown} carries {marks}; --wipe {shown} erases it")));
        }
        carry.push(path);
    }
    for path in carry {
        // This fails for a disk that another program uses, and changes nothing.
        drop(FileStore::open_raw(path).map_err(|error| Failure::Failed(chain(&error)))?);
        marks::wipe(path)?;
    }
    let opened = match url {
        StoreUrl::Stripe(stripe) => FileStore::open_stripe_watched(stripe, Room::Reserved, watch),
        StoreUrl::File(file) => FileStore::open_watched(file, Room::Reserved, watch),
        _ => return Err(Failure::Usage("a log lies on files or devices".to_owned())),
    };
    let disks = Arc::new(opened.map_err(crate::failure::of)?.patient());
    let config = weir_log::Config {
        segment_pages: (SEGMENT.0 / PAGE_SIZE as u64) as u32,
        members: paths.len() as u32,
        lanes,
        ..weir_log::Config::default()
    };
    let log = Log::create(Arc::clone(&disks) as _, config);
    let log = log.map_err(|error| Failure::Failed(chain(&error)))?;
    Ok(Home { disks, log: Some(log) })
}

/// Whether the home may hold content to lose: a missing or empty file holds none.
fn holds_something(path: &Path) -> bool {
    std::fs::metadata(path).is_ok_and(|about| !about.is_file() || about.len() > 0)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_home_is_a_path_or_a_log_over_paths() {
        assert_eq!("/dev/sdb".parse(), Ok(HomeUrl::Raw("/dev/sdb".into())));
        let log: HomeUrl = "log:/dev/sdb,/dev/sdc?size=8GiB".parse().unwrap();
        assert_eq!(log.paths(), [PathBuf::from("/dev/sdb"), PathBuf::from("/dev/sdc")]);
        let HomeUrl::Log(url) = log else { panic!("{log:?}") };
        assert_eq!(url.to_string(), "stripe:/dev/sdb,/dev/sdc?size=8GiB&unit=1MiB");
        let one: HomeUrl = "log:/a?size=1GiB".parse().unwrap();
        assert_eq!(one.paths(), [PathBuf::from("/a")]);
        let refused = "log:/a,/b?color=red".parse::<HomeUrl>().unwrap_err();
        assert!(refused.contains("color"), "{refused}");
    }
}
