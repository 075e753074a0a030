//! The home that `--home` names: a disk as it is, or disks for a log.

use super::marks;
use super::options::{CacheOptions, CreateOptions};
use crate::progress::Shown;
use std::fmt;
use std::os::unix::fs::OpenOptionsExt as _;
use std::path::{Path, PathBuf};
use std::str::FromStr;
use std::sync::Arc;
use std::time::Instant;
use weir_cli::failure::{Failure, chain};
use weir_core::{ByteSize, PAGE_SIZE, Watch};
use weir_log::Log;
use weir_store::{FileStore, FileUrl, MemberTraffic, Room, Store, StripeUrl};
use weir_system::loop_device::LoopDevice;

/// Bytes of a log's segment. The disks of a striped log take its segments in turns.
const SEGMENT: ByteSize = ByteSize(1 << 20);

/// The home behind a cache, as `--home` names it.
#[derive(Clone, PartialEq, Debug)]
pub enum HomeUrl {
    /// A disk or file without a log: page n lies at n.
    Raw(PathBuf),
    /// Disks or files for a log; what they hold is lost.
    Log(LogUrl),
}

/// The disks or files of a log.
#[derive(Clone, PartialEq, Debug)]
pub enum LogUrl {
    /// One disk or file.
    One(FileUrl),
    /// Several disks or files, which take the log's segments in turns.
    Several(StripeUrl),
}

impl LogUrl {
    fn paths(&self) -> &[PathBuf] {
        match self {
            LogUrl::One(file) => std::slice::from_ref(&file.path),
            LogUrl::Several(stripe) => &stripe.paths,
        }
    }

    fn size(&self) -> Option<ByteSize> {
        match self {
            LogUrl::One(file) => file.size,
            LogUrl::Several(stripe) => stripe.size,
        }
    }

    fn is_encrypted(&self) -> bool {
        match self {
            LogUrl::One(file) => file.encrypt,
            LogUrl::Several(stripe) => stripe.encrypt,
        }
    }
}

impl fmt::Display for LogUrl {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            LogUrl::One(file) => file.fmt(f),
            LogUrl::Several(stripe) => stripe.fmt(f),
        }
    }
}

impl FromStr for HomeUrl {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        let Some(rest) = text.strip_prefix("log:") else { return Ok(HomeUrl::Raw(text.into())) };
        let url = if rest.contains(',') {
            // The stripe's units are the log's segments.
            StripeUrl::behind_scheme(rest)
                .map(|stripe| LogUrl::Several(StripeUrl { unit: SEGMENT, ..stripe }))
        } else {
            FileUrl::behind_scheme(rest).map(LogUrl::One)
        };
        url.map(HomeUrl::Log).map_err(|error| chain(&error))
    }
}

impl HomeUrl {
    /// For a log without headers: finds the disk that has a slot, and the slot's offset there in
    /// bytes.
    pub fn position(&self, slot: u32) -> (&Path, u64) {
        let (paths, segment_pages) = (self.paths(), (SEGMENT.0 / PAGE_SIZE as u64) as u32);
        let (segment, place) = (slot / segment_pages, slot % segment_pages);
        let disk = segment as usize % paths.len();
        let first = u64::from(segment) / paths.len() as u64 * SEGMENT.0;
        (&paths[disk], first + u64::from(place) * PAGE_SIZE as u64)
    }

    /// The files and devices that the home names.
    pub fn paths(&self) -> &[PathBuf] {
        match self {
            HomeUrl::Raw(path) => std::slice::from_ref(path),
            HomeUrl::Log(url) => url.paths(),
        }
    }
}

/// A home whose disks are open.
pub struct Home {
    /// The home's disks.
    pub disks: Arc<FileStore>,
    /// The log on the disks, if the home is one.
    pub log: Option<Log>,
    /// Whether no content of the home outlives the process.
    pub is_scratch: bool,
}

impl Home {
    /// Makes the home as `create` describes it, or opens a durable one. Refuses a disk with
    /// content, unless an option says to serve or to erase the content.
    ///
    /// # Errors
    /// Fails when the home is in use, has content, or cannot be opened.
    pub fn open(
        options: &CacheOptions,
        create: Option<&CreateOptions>,
        lanes: u32,
        watch: Watch<'_>,
    ) -> Result<Self, Failure> {
        let paths = options.home.paths();
        create.map_or(Ok(()), check_flags)?;
        paths.iter().try_for_each(|path| refuse_served(path))?;
        match (&options.home, create) {
            (HomeUrl::Raw(path), Some(create)) => open_raw(create, path),
            (HomeUrl::Raw(path), None) => Err(no_log(path)),
            (HomeUrl::Log(url), Some(create)) if create.durable => {
                let disks = make_durable(create, url, lanes)?;
                open_durable(disks, lanes, watch)
            }
            (HomeUrl::Log(url), Some(create)) => open_log(create, url, lanes, watch),
            (HomeUrl::Log(_), None) => open_durable(Arc::new(open_members(paths)?), lanes, watch),
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

/// The error for a plain disk or file where a durable log is needed.
pub fn no_log(path: &Path) -> Failure {
    let path = path.display();
    Failure::Usage(format!(
        "{path} is a home as it is, and carries nothing of the cache's: write log:{path} for a durable log, or create --keep-content to serve what it carries"
    ))
}

fn check_flags(options: &CreateOptions) -> Result<(), Failure> {
    let home = &options.cache.home;
    let paths = home.paths();
    if let Some(other) = options.wipe.iter().find(|wipe| !paths.contains(wipe)) {
        let named: Vec<String> = paths.iter().map(|path| path.display().to_string()).collect();
        let (other, named) = (other.display(), named.join(", "));
        return Err(Failure::Usage(format!("--wipe names {other}, and --home {named}: name the home again")));
    }
    if options.keep_content && matches!(home, HomeUrl::Log(_)) {
        let what = "a new log keeps nothing of what its disks carry: leave --keep-content away, name one disk without log:, or weir cache open for a durable log";
        return Err(Failure::Usage(what.to_owned()));
    }
    match home {
        HomeUrl::Raw(path) if options.durable => {
            let path = path.display();
            Err(Failure::Usage(format!(
                "--durable is about logs, and what is at {path} is durable anyway: leave it away, or write log:{path}"
            )))
        }
        HomeUrl::Log(url) if options.durable && url.is_encrypted() => {
            let what =
                "--durable: a durable log is not encrypted yet: add ?encrypt=off to the home if that will do";
            Err(Failure::Usage(what.to_owned()))
        }
        _ => Ok(()),
    }
}

fn config(members: usize, lanes: u32) -> weir_log::Config {
    weir_log::Config {
        segment_pages: (SEGMENT.0 / PAGE_SIZE as u64) as u32,
        members: members as u32,
        lanes,
        ..weir_log::Config::default()
    }
}

/// Makes a durable log on the disks, and opens the disks. Files that do not exist are made.
fn make_durable(options: &CreateOptions, url: &LogUrl, lanes: u32) -> Result<Arc<FileStore>, Failure> {
    let (paths, size) = (url.paths(), url.size());
    erase(options, paths)?;
    let missing: Vec<_> = paths.iter().filter(|path| !holds_something(path)).collect();
    let made = match (missing.is_empty(), size) {
        (true, None) => Ok(()),
        (true, Some(_)) => {
            let what =
                "size= is for a log of files that do not exist yet: leave it away, or remove the files";
            Err(Failure::Usage(what.to_owned()))
        }
        (false, None) => Err(Failure::Usage(format!(
            "how large shall {} be? Add ?size=64GiB, for example",
            missing[0].display()
        ))),
        (false, Some(_)) if missing.len() < paths.len() => Err(Failure::Usage(format!(
            "{} does not exist, and other parts of the log do: make it, or name new files only",
            missing[0].display()
        ))),
        (false, Some(size)) => {
            let each = size.0.div_ceil(paths.len() as u64).next_multiple_of(SEGMENT.0);
            paths.iter().try_for_each(|path| make_file(path, each))
        }
    };
    let result = made.and_then(|()| {
        let disks = Arc::new(open_members(paths)?);
        let mut identity = [0; 16];
        rustix::rand::getrandom(&mut identity, rustix::rand::GetRandomFlags::empty())
            .map_err(Failure::failed)?;
        let (below, identity) = (Arc::clone(&disks) as Arc<dyn Store>, u128::from_le_bytes(identity));
        let made = Log::make(&below, config(paths.len(), lanes), identity, &mut Instant::now);
        made.map_err(|error| Failure::Failed(chain(&error)))?;
        Ok(disks)
    });
    if result.is_err() && size.is_some() {
        // The call has failed, so remove the files that it has made.
        for path in missing {
            let _ = std::fs::remove_file(path);
        }
    }
    result
}

fn open_members(paths: &[PathBuf]) -> Result<FileStore, Failure> {
    FileStore::open_members(paths, SEGMENT).map_err(crate::failure::of)
}

/// Makes a file of this many bytes that only its owner can read. The file system reserves all of
/// the bytes.
fn make_file(path: &Path, bytes: u64) -> Result<(), Failure> {
    let shown = path.display();
    let failed = |error: std::io::Error| {
        Failure::Failed(format!("cannot make {shown} with {}: {error}; is there room?", ByteSize(bytes)))
    };
    let open = std::fs::OpenOptions::new().write(true).create(true).truncate(false).mode(0o600).open(path);
    let file = open.map_err(failed)?;
    // Check the room first: fallocate takes all free room before it fails.
    let room = rustix::fs::fstatvfs(&file).map_err(|errno| failed(errno.into()))?;
    if room.f_bavail.saturating_mul(room.f_frsize) < bytes {
        return Err(failed(std::io::ErrorKind::StorageFull.into()));
    }
    rustix::fs::fallocate(&file, rustix::fs::FallocateFlags::empty(), 0, bytes)
        .map_err(|errno| failed(errno.into()))?;
    file.sync_all().map_err(failed)
}

/// Opens a durable log.
fn open_durable(disks: Arc<FileStore>, lanes: u32, watch: Watch<'_>) -> Result<Home, Failure> {
    let config = config(disks.traffic().len(), lanes);
    let below = Arc::clone(&disks) as Arc<dyn Store>;
    let log = Log::open(&below, config, &mut Instant::now, watch);
    let log = log.map_err(|error| Failure::Failed(chain(&error)))?;
    Ok(Home { disks, log: Some(log), is_scratch: false })
}

/// Verifies a durable log, and shows the progress.
///
/// # Errors
/// Fails when there is no log, or the log is in use.
pub fn check(home: &HomeUrl) -> Result<weir_log::CheckReport, Failure> {
    if let HomeUrl::Raw(path) = home {
        return Err(no_log(path));
    }
    let paths = home.paths();
    paths.iter().try_for_each(|path| refuse_served(path))?;
    let disks = Arc::new(open_members(paths)?) as Arc<dyn Store>;
    let mut shown = Shown::new("checking", |far, left| eprintln!("checking: {far}{left}"));
    let mut watch = |done, all| {
        shown.show(done, all);
        Ok(())
    };
    let report = weir_log::check(&disks, config(paths.len(), 1), &mut Instant::now, &mut watch);
    report.map_err(|error| Failure::Failed(chain(&error)))
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
    // Open the disk before anything is erased. Opening fails for a disk that another program uses.
    let mut disks = open()?;
    let marks = marks::find(path)?;
    if !marks.is_empty() && !options.keep_content {
        let shown = path.display();
        if options.wipe.is_empty() {
            return Err(Failure::Failed(format!(
                "{shown} carries {marks}; --keep-content serves it as it is, --wipe {shown} erases it"
            )));
        }
        // Close the disks first, because wipefs opens them exclusively.
        drop(disks);
        marks::wipe(path)?;
        disks = open()?;
    }
    Ok(Home { disks: Arc::new(disks), log: None, is_scratch: false })
}

fn open_log(options: &CreateOptions, url: &LogUrl, lanes: u32, watch: Watch<'_>) -> Result<Home, Failure> {
    let paths = url.paths();
    erase(options, paths)?;
    let opened = match url {
        LogUrl::Several(stripe) => FileStore::open_stripe_watched(stripe, Room::Reserved, watch),
        LogUrl::One(file) => FileStore::open_watched(file, Room::Reserved, watch),
    };
    let disks = Arc::new(opened.map_err(crate::failure::of)?.patient());
    let log = Log::create(Arc::clone(&disks) as _, config(paths.len(), lanes));
    let log = log.map_err(|error| Failure::Failed(chain(&error)))?;
    Ok(Home { disks, log: Some(log), is_scratch: true })
}

/// Erases the marks on a log's disks, if `--wipe` names the disk. Looks at all disks before it
/// erases one.
fn erase(options: &CreateOptions, paths: &[PathBuf]) -> Result<(), Failure> {
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
        // Opening fails for a disk that another program uses, and changes nothing.
        drop(FileStore::open_raw(path).map_err(|error| Failure::Failed(chain(&error)))?);
        marks::wipe(path)?;
    }
    Ok(())
}

/// Whether the home may hold content that could be lost. A missing or empty file holds none.
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
