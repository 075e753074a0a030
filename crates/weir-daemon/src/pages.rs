//! The daemon's volume: a new one, or one that the daemon takes over from an earlier daemon.

use crate::backing::Backing;
use crate::error::{Error, ErrorKind};
use crate::keeper::{Held, Link, read_note};
use crate::stages::Stages;
use crate::start::Start;
use crate::volumes::{MAP, Noted, VOLUMES, VOLUMES_MOST, Volumes, whole_pages};
use std::fmt::Display;
use std::os::fd::{BorrowedFd, OwnedFd};
use std::sync::Arc;
use std::time::Instant;
use weir_core::log::{Level, Log};
use weir_core::{ByteSize, Memory, PAGE_SIZE};
use weir_store::{Keep, OpenError, Report, Room, Store, StoreUrl};
use weir_volume::{Compression, Config, CreateError, Kept, PAGES_MAX, Pool, Volume};

/// The stores and the settings of a volume.
#[derive(Debug)]
pub struct VolumeOptions<'a> {
    /// The stores that keep pages, the fastest first.
    pub stores: &'a [StoreUrl],
    /// The backing, which takes pages when the stores are full or give their memory back.
    pub backing: &'a [Backing],
    /// The volume's name.
    pub name: &'a str,
    /// The device's size; `None`: as much as the stores hold.
    pub size: Option<ByteSize>,
    /// If set, no volume is made, and at most this many are made later.
    pub pool: Option<u16>,
    /// The number of threads that will use the volume.
    pub lanes: usize,
    /// Number of pages that each thread moves at a time in slow stores.
    pub depth: usize,
    /// The compression algorithm, if there is one.
    pub compress: Option<Compression>,
    /// The way in which files get their room before the first page is written.
    pub room: Room,
}

/// Makes a volume that ends with this process.
///
/// # Errors
/// Fails when a store cannot be opened, or no volume can have the requested size.
///
/// # Panics
/// Panics when the options ask for a pool alone.
pub fn create_volume(
    options: &VolumeOptions<'_>,
    start: &mut Start<'_>,
    log: &Log,
) -> Result<Arc<Volume>, Error> {
    let volumes = open(options, None, &mut Stages::default(), start, log)?;
    Ok(Arc::clone(volumes.own().expect("the options ask for a volume")))
}

/// Makes the daemon's pool, and its own volume unless the options ask for a pool alone. With a
/// keeper, the volumes outlive this process. If the keeper holds the volumes of an earlier process,
/// takes all of these over instead.
///
/// # Errors
/// Fails when a store cannot be opened, the requested size is invalid, or the keeper's pages do not
/// fit the options.
pub(crate) fn open(
    options: &VolumeOptions<'_>,
    keeper: Option<(&Link, &mut Held)>,
    stages: &mut Stages,
    start: &mut Start<'_>,
    log: &Log,
) -> Result<Volumes, Error> {
    let volumes = match keeper {
        None => create(options, None, start)?,
        Some((link, held)) if held.is_empty() => {
            let volumes = create(options, Some(link), start)?;
            volumes.note().and_then(|()| keep(volumes.pool(), link)).map_err(unkept)?;
            volumes
        }
        Some((link, held)) => take_over(options, link, held, stages, log)?,
    };
    let pool = volumes.pool();
    if let Some(compression) = options.compress {
        pool.compress(compression);
    }
    pool.time_with(Instant::now);
    Ok(volumes)
}

/// The registry of the volumes of `pool`, of which the first may be the daemon's own.
fn registry(
    options: &VolumeOptions<'_>,
    pool: &Arc<Pool>,
    volumes: Vec<(String, Arc<Volume>)>,
    keeper: Option<&Link>,
) -> Volumes {
    let most = options.pool.map_or(VOLUMES_MOST, usize::from);
    Volumes::new(pool, options.pool.is_none(), volumes, most, keeper.cloned())
}

fn create(
    options: &VolumeOptions<'_>,
    keeper: Option<&Link>,
    start: &mut Start<'_>,
) -> Result<Volumes, Error> {
    let stores = stores(options, |_, url, asked| {
        weir_store::open_watched(url, options.room, &mut start.watch(asked))
    })?;
    let (config, pages) = config(options, &stores)?;
    let refused = |error| Error::of(ErrorKind::Volume, error);
    let pool = Pool::create(config, stores).map_err(refused)?;
    let volumes = match options.pool {
        Some(_) => Vec::new(),
        None => vec![(options.name.to_owned(), pool.volume(pages).map_err(refused)?)],
    };
    Ok(registry(options, &pool, volumes, keeper))
}

fn take_over(
    options: &VolumeOptions<'_>,
    link: &Link,
    held: &mut Held,
    stages: &mut Stages,
    log: &Log,
) -> Result<Volumes, Error> {
    let missing = |what: &str| Error::new(ErrorKind::Keeper, format!("the keeper does not hold {what}"));
    let map = |fd: OwnedFd| {
        Memory::adopt(fd)
            .map_err(|error| Error::because(ErrorKind::Keeper, "cannot map what the keeper holds", error))
    };
    // No signal ends this opening early: clients' pages are at stake, and only a serving daemon can
    // say whether they are in use.
    let stores = stores(options, |index, url, _| {
        weir_store::reopen(url, options.room, &mut |name| held.take(&store_name(index, name)))
    })?;
    stages.note_all(stores.iter().filter_map(|store| store.report()).flat_map(Report::stages));
    stages.end("stores");
    let mut records = Vec::new();
    for index in 0..stores.len() {
        let name = records_name(index);
        records.push(map(held.take(&name).ok_or_else(|| missing(&name))?)?);
    }
    let note = held.take(VOLUMES).ok_or_else(|| missing(VOLUMES))?;
    let noted = read_note::<Vec<Noted>>(note).map_err(unkept)?;
    let ranges: Vec<_> = noted.iter().map(Noted::range).collect();
    let kept = Kept { map: map(held.take(MAP).ok_or_else(|| missing(MAP))?)?, records };
    let (config, pages) = config(options, &stores)?;
    let refused = |error| Error::of(ErrorKind::Volume, error);
    let own = match options.pool {
        Some(_) => None,
        None => Some(own(options, pages, &noted).map_err(|what| refused(CreateError::Kept(what)))?),
    };
    // Hand the stores to the keeper before the volume is opened. The volume continues the dead
    // daemon's give-back, and the keeper must hear of that.
    keep_stores(&stores, link, true).map_err(unkept)?;
    let (pool, volumes, lost) = Pool::take_over(config, stores, kept, &ranges).map_err(refused)?;
    let mut volumes: Vec<_> = noted.into_iter().map(|noted| noted.name).zip(volumes).collect();
    if let Some(own) = own {
        let (_, volume) = volumes.remove(own);
        volumes.insert(0, (options.name.to_owned(), volume));
    }
    stages.end("map");
    let status = pool.status();
    (log)(
        if lost == 0 { Level::Info } else { Level::Warning },
        format_args!(
            "took over {} pages from the daemon before, {} of one value each; {lost} lost",
            status.stored + status.filled,
            status.filled
        ),
    );
    Ok(registry(options, &pool, volumes, Some(link)))
}

/// Finds this daemon's own volume among those of the daemon before: the one of its name, or the
/// only one. Refuses a volume that this daemon would not serve as it is. Call this before anything
/// is changed, because a volume that is taken over as another one would lose its pages.
fn own(options: &VolumeOptions<'_>, pages: u32, noted: &[Noted]) -> Result<usize, String> {
    let name = options.name;
    let own = match noted {
        [_] => Some(0),
        _ => noted.iter().position(|noted| noted.name == name),
    };
    let Some(own) = own else {
        return Err(format!("it had {} volumes, and none of them is {name}", noted.len()));
    };
    if noted[own].pages != pages {
        let [had, asked] = [noted[own].pages, pages].map(size);
        return Err(format!("volume {name} is {had} large, and {asked} is asked for"));
    }
    Ok(own)
}

/// Hands the keeper everything that [`take_over`] needs, besides the list of volumes.
fn keep(pool: &Pool, link: &Link) -> std::io::Result<()> {
    let fds = pool.kept_fds();
    link.hold_memory(MAP, fds.map)?;
    for (index, fd) in fds.records.into_iter().enumerate() {
        link.hold_memory(&records_name(index), fd)?;
    }
    keep_stores(pool.stores(), link, false)
}

/// Hands the keeper the stores' memory. With `held` the keeper has the memory already, and gets
/// only later changes.
fn keep_stores<'a>(
    stores: impl IntoIterator<Item = &'a Arc<dyn Store>>,
    link: &Link,
    held: bool,
) -> std::io::Result<()> {
    for (index, store) in stores.into_iter().enumerate() {
        if let Some(store) = store.survive() {
            store.keep_with(Arc::new(Shelf { link: link.clone(), store: index }), held)?;
        }
    }
    Ok(())
}

/// The names under which the keeper holds one store.
#[derive(Debug)]
struct Shelf {
    link: Link,
    store: usize,
}

impl Keep for Shelf {
    fn hold(&self, name: &str, fd: BorrowedFd<'_>, is_memory: bool) -> std::io::Result<()> {
        let hold = if is_memory { Link::hold_memory } else { Link::hold_open };
        hold(&self.link, &store_name(self.store, name), fd)
    }

    fn took(&self, name: &str, offset: u64, bytes: u64) -> std::io::Result<()> {
        self.link.took(&store_name(self.store, name), offset, bytes)
    }

    fn let_go(&self, name: &str) -> std::io::Result<()> {
        self.link.let_go(&store_name(self.store, name))
    }
}

fn records_name(store: usize) -> String {
    format!("records.{store}")
}

fn store_name(store: usize, handoff: &str) -> String {
    format!("store.{store}.{handoff}")
}

fn unkept(error: std::io::Error) -> Error {
    Error::of(ErrorKind::Keeper, error)
}

/// Opens the stores in order, then the backing. `open` gets each store's index, its URL, and the
/// text that the user gave.
fn stores(
    options: &VolumeOptions<'_>,
    mut open: impl FnMut(usize, &StoreUrl, &dyn Display) -> Result<Arc<dyn Store>, OpenError>,
) -> Result<Vec<Arc<dyn Store>>, Error> {
    // An error names the text that the user gave, not the URL made of it.
    let mut open = |at, url: &StoreUrl, asked: &dyn Display| {
        open(at, url, asked).map_err(|error| Error::from(OpenError { store: asked.to_string(), ..error }))
    };
    let fast = enlarged(options);
    let mut stores = Vec::new();
    for (at, (url, asked)) in fast.iter().zip(options.stores).enumerate() {
        stores.push(open(at, url, asked)?);
    }
    // Open first the backings that have a size of their own. The others share the room that is
    // still needed.
    let mut backing: Vec<Option<Arc<dyn Store>>> = vec![None; options.backing.len()];
    for (at, it) in options.backing.iter().enumerate().filter(|(_, it)| !it.follows()) {
        backing[at] = Some(open(fast.len() + at, &it.url(None), it)?);
    }
    let following = options.backing.iter().filter(|it| it.follows()).count() as u32;
    if following > 0 {
        let there = slots(backing.iter().flatten());
        let device = match options.size {
            Some(size) => pages(size)?,
            None => slots(&stores).max(there.saturating_sub(slack(options))),
        };
        let each = device.saturating_add(slack(options)).saturating_sub(there).div_ceil(following).max(1);
        for (at, it) in options.backing.iter().enumerate().filter(|(_, it)| it.follows()) {
            backing[at] = Some(open(fast.len() + at, &it.url(Some(each)), it)?);
        }
    }
    stores.extend(backing.into_iter().flatten());
    Ok(stores)
}

/// The URLs of the stores above the backing. A volume needs slots for writes under way besides the
/// slots of its pages. Without a backing the last store gets these slots in addition to its size.
/// So the device is as large as the sizes in the URLs together.
fn enlarged(options: &VolumeOptions<'_>) -> Vec<StoreUrl> {
    let mut urls = options.stores.to_vec();
    if let Some(last) = urls.last_mut().filter(|_| options.backing.is_empty()) {
        *last = last.enlarged(slack(options));
    }
    urls
}

fn slack(options: &VolumeOptions<'_>) -> u32 {
    Config { pages: 1, lanes: options.lanes, depth: options.depth }.slack()
}

fn slots<'a>(stores: impl IntoIterator<Item = &'a Arc<dyn Store>>) -> u32 {
    stores.into_iter().fold(0u32, |sum, store| sum.saturating_add(store.slots()))
}

/// The pool's configuration, and the size of the daemon's own volume in pages. Further volumes may
/// have the rest of what the stores hold.
fn config(options: &VolumeOptions<'_>, stores: &[Arc<dyn Store>]) -> Result<(Config, u32), Error> {
    let mut config = Config { pages: 1, lanes: options.lanes, depth: options.depth };
    let all = slots(stores);
    let most = all.checked_sub(config.slack()).filter(|pages| *pages > 0);
    let (fast, backing) = stores.split_at(options.stores.len());
    let own = match (options.size, most) {
        (Some(size), _) => pages(size)?,
        (None, None) => return Err(too_small(all, &config)),
        (None, Some(most)) if backing.is_empty() => most,
        // Do not make the device as large as stores and backing together: no chunk could be given
        // back then.
        (None, Some(most)) => slots(fast).max(slots(backing).saturating_sub(config.slack())).min(most),
    };
    config.pages = own.max(most.unwrap_or(own)).min(PAGES_MAX);
    Ok((config, own))
}

fn size(pages: u32) -> ByteSize {
    ByteSize(u64::from(pages) * PAGE_SIZE as u64)
}

fn too_small(slots: u32, config: &Config) -> Error {
    let what = format!(
        "the stores hold {}, and {} connections or threads keep {} of that for writes under way: give more --store, or fewer of them",
        size(slots),
        config.lanes,
        size(config.slack())
    );
    Error::new(ErrorKind::Volume, what)
}

fn pages(size: ByteSize) -> Result<u32, Error> {
    whole_pages(size).ok_or_else(|| {
        let what =
            format!("--size cannot be {size}: accepted: a multiple of 4KiB above 0, at most 8TiB less 32MiB");
        Error::new(ErrorKind::Config, what)
    })
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::attach::{Attachment, Attachments};
    use crate::environment::tests::quiet;
    use crate::keeper::played::Keeper;
    use crate::keeper::write_note;
    use crate::worker::{self, Worker};
    use std::ops::Range;
    use std::sync::atomic::{AtomicBool, Ordering};
    use weir_core::{PageBytes, PageNo, chain};
    use weir_store::Progress;

    const PAGES: u32 = 700;

    /// A page that differs for each number.
    fn content(number: u32) -> PageBytes {
        let mut page: PageBytes = std::array::from_fn(|at| (at as u32 * 7 + number) as u8);
        page[..4].copy_from_slice(&number.to_le_bytes());
        page
    }

    fn start(keeper: &Keeper, held: &mut Held, size: Option<u64>) -> Result<Volumes, Error> {
        start_with(keeper, held, size, None)
    }

    fn start_with(
        keeper: &Keeper,
        held: &mut Held,
        size: Option<u64>,
        pool: Option<u16>,
    ) -> Result<Volumes, Error> {
        let stores = ["host:4MiB".parse().expect("a store")];
        let options = VolumeOptions {
            stores: &stores,
            backing: &[],
            name: "disk",
            size: size.map(|pages| ByteSize(pages * PAGE_SIZE as u64)),
            pool,
            lanes: 2 + worker::lanes(quiet().processors),
            depth: 16,
            compress: None,
            room: Room::Reserved,
        };
        let log: Log = Arc::new(|_, _| {});
        let link = keeper.link();
        open(&options, Some((&link, held)), &mut Stages::default(), &mut Start::silent(), &log)
    }

    fn own(volumes: &Volumes) -> &Arc<Volume> {
        volumes.own().expect("it has one")
    }

    fn write(volume: &Arc<Volume>, numbers: Range<u32>) {
        let mut lane = volume.lane().expect("a lane");
        for (page, number) in numbers.enumerate() {
            let page = PageNo(page as u32);
            assert_eq!(lane.write(0, page, &content(number)), Progress::Done(Ok(())));
            lane.submit();
        }
    }

    /// For each page of the volume, the number that [`content`] made its content from; `None` for
    /// an empty page.
    fn numbers(volume: &Arc<Volume>) -> Vec<Option<u32>> {
        let mut lane = volume.lane().expect("a lane");
        let read = |page| {
            let mut found = [0; PAGE_SIZE];
            assert_eq!(lane.read(page, PageNo(page), &mut found), Progress::Done(Ok(())));
            let number = u32::from_le_bytes(found[..4].try_into().expect("four bytes"));
            (found != [0; PAGE_SIZE]).then(|| {
                assert!(found == content(number), "page {page}");
                number
            })
        };
        (0..volume.pages()).map(read).collect()
    }

    fn worker(volumes: &Volumes) -> Worker {
        Worker::start(volumes.pool(), &[false], &quiet()).expect("threads")
    }

    #[test]
    fn every_volume_is_there_again_for_the_next_daemon_as_it_was_last_noted() {
        let keeper = Keeper::default();
        let volumes = start(&keeper, &mut Held::default(), Some(100)).expect("a volume");
        let worker = worker(&volumes);
        let named = |name: &str| volumes.find(name.as_bytes()).expect("it is there").1;
        write(own(&volumes), 0..100);
        for (name, pages) in [("a", 50), ("gone", 60), ("small", 40), ("large", 20)] {
            volumes.create(name, Some(size(pages)), &worker).expect("there is room");
            write(&named(name), 1000 + pages..1000 + 2 * pages);
        }
        volumes.remove("gone", &worker, &mut |_| {}).expect("nobody has it");
        volumes.resize("small", size(10), &worker, &mut |_| {}).expect("nobody has it");
        volumes.resize("large", size(30), &worker, &mut |_| {}).expect("there is room");
        let free = volumes.free_bytes();
        // The keeper was told of one page of the map for each of the four new volumes. It was told
        // of one page again when `large` grew within that page.
        assert_eq!(keeper.took(), 5 * PAGE_SIZE as u64);
        drop((worker, volumes));
        let volumes = start(&keeper, &mut keeper.held(), Some(100)).expect("its volumes");
        let list: Vec<_> =
            volumes.list().into_iter().map(|it| (it.name, it.bytes / PAGE_SIZE as u64)).collect();
        let expected = [("disk", 100), ("a", 50), ("small", 10), ("large", 30)];
        assert_eq!(list, expected.map(|(name, pages)| (name.to_owned(), pages)));
        assert_eq!((volumes.free_bytes(), volumes.pool().status().stored), (free, 100 + 50 + 10 + 20));
        let named = |name: &str| volumes.find(name.as_bytes()).expect("it is there").1;
        let some = |range: Range<u32>| range.map(Some).collect::<Vec<_>>();
        assert_eq!(numbers(own(&volumes)), some(0..100));
        assert_eq!(numbers(&named("a")), some(1050..1100));
        assert_eq!(numbers(&named("small")), some(1040..1050));
        assert_eq!(numbers(&named("large")), [some(1020..1040), vec![None; 10]].concat());
    }

    #[test]
    fn a_pool_begins_and_goes_on_without_a_volume_and_has_no_more_than_it_was_asked_for() {
        let keeper = Keeper::default();
        let volumes = start_with(&keeper, &mut Held::default(), None, Some(2)).expect("a pool");
        let all = volumes.free_bytes();
        assert!(all >= 4 << 20 && volumes.list().is_empty() && volumes.find(b"").is_none());
        drop(volumes);
        let next = || start_with(&keeper, &mut keeper.held(), None, Some(2)).expect("the pool");
        let volumes = next();
        assert_eq!((volumes.free_bytes(), volumes.list()), (all, vec![]), "it had no volume");
        let worker = worker(&volumes);
        for name in ["a", "b"] {
            volumes.create(name, Some(size(50)), &worker).expect("there is room");
        }
        let more = volumes.create("c", Some(size(1)), &worker).expect_err("there are two");
        assert!(more.to_string().starts_with("there are 2 volumes, and this daemon has no more"), "{more}");
        write(&volumes.find(b"a").expect("it is there").1, 0..50);
        volumes.remove("b", &worker, &mut |_| {}).expect("nobody has it");
        drop((worker, volumes));
        let volumes = next();
        assert!(volumes.find(b"").is_none(), "none is the daemon's own");
        let a = volumes.find(b"a").expect("it is there").1;
        assert_eq!(numbers(&a), (0..50).map(Some).collect::<Vec<_>>());
        drop(a);
        let worker = self::worker(&volumes);
        volumes.remove("a", &worker, &mut |_| {}).expect("also the first can go");
        assert_eq!(volumes.free_bytes(), all);
        drop((worker, volumes));
        assert_eq!(next().list(), [], "nor is there one after the last has gone");
    }

    #[test]
    fn a_change_that_is_refused_leaves_every_volume_as_it_was() {
        let keeper = Keeper::default();
        let volumes = start(&keeper, &mut Held::default(), Some(100)).expect("a volume");
        let worker = worker(&volumes);
        volumes.create("a", Some(size(50)), &worker).expect("there is room");
        let held = volumes.find(b"a").expect("it is there").1;
        write(&held, 50..100);
        let before = (volumes.list(), volumes.free_bytes());
        let free = size((volumes.free_bytes() / PAGE_SIZE as u64) as u32 + 1);
        let long = "a".repeat(65);
        type Change<'a> = &'a dyn Fn(&Volumes) -> Result<(), Error>;
        let refusals: [(Change<'_>, &str); 12] = [
            (&|it| it.create("a", Some(size(1)), &worker), "there is a volume a already"),
            (&|it| it.create("disk", Some(size(1)), &worker), "there is a volume disk already"),
            (&|it| it.create("", Some(size(1)), &worker), "is no name for a volume"),
            (&|it| it.create("-x", Some(size(1)), &worker), "is no name for a volume"),
            (&|it| it.create("a/b", Some(size(1)), &worker), "is no name for a volume"),
            (&|it| it.create(&long, Some(size(1)), &worker), "is no name for a volume"),
            (&|it| it.create("b", Some(ByteSize(4097)), &worker), "a volume cannot have 4.0KiB"),
            (&|it| it.create("b", Some(free), &worker), "the pool has room for"),
            (
                &|it| it.resize("a", size(49), &worker, &mut |_| {}),
                "volume a is in use; disconnect its clients",
            ),
            (&|it| it.remove("a", &worker, &mut |_| {}), "volume a is in use; disconnect its clients"),
            (&|it| it.remove("b", &worker, &mut |_| {}), "there is no volume b"),
            (&|it| it.remove("disk", &worker, &mut |_| {}), "disk is the daemon's own volume"),
        ];
        for (change, said) in refusals {
            let error = weir_core::chain(&change(&volumes).expect_err(said));
            assert!(error.contains(said), "{said}: {error}");
            assert_eq!((volumes.list(), volumes.free_bytes()), before, "{said}");
        }
        // This keeper takes no list. A change that the keeper has not noted must not happen.
        keeper.refuses(true);
        drop(held);
        let changes: [Change<'_>; 4] = [
            &|it| it.create("b", Some(size(5)), &worker),
            &|it| it.resize("a", size(60), &worker, &mut |_| {}),
            &|it| it.resize("a", size(40), &worker, &mut |_| {}),
            &|it| it.remove("a", &worker, &mut |_| {}),
        ];
        for change in changes {
            change(&volumes).expect_err("the keeper has not noted it");
            assert_eq!((volumes.list(), volumes.free_bytes()), before);
        }
        keeper.refuses(false);
        assert_eq!(
            numbers(&volumes.find(b"a").expect("it is there").1),
            (50..100).map(Some).collect::<Vec<_>>()
        );
        volumes.remove("a", &worker, &mut |_| {}).expect("nobody has it");
        for number in 1..VOLUMES_MOST {
            volumes.create(&format!("v{number}"), Some(size(1)), &worker).expect("there is room");
        }
        let one_more = volumes.create("more", Some(size(1)), &worker).expect_err("there are too many");
        assert!(
            one_more.to_string().starts_with("there are 256 volumes, and this daemon has no more"),
            "{one_more}"
        );
        worker.stop();
        let stopping = volumes.remove("v1", &worker, &mut |_| {}).expect_err("nobody discards its pages");
        assert!(stopping.to_string().starts_with("the daemon is stopping, so the volume"), "{stopping}");
    }

    #[test]
    fn clients_find_a_volume_while_its_removal_is_refused_and_while_it_grows() {
        let keeper = Keeper::default();
        let volumes = start(&keeper, &mut Held::default(), Some(100)).expect("a volume");
        let worker = worker(&volumes);
        volumes.create("a", Some(size(1)), &worker).expect("there is room");
        let _held = volumes.find(b"a").expect("it is there");
        let stop = AtomicBool::new(false);
        let missed = std::thread::scope(|scope| {
            let look = || {
                let mut missed = 0;
                while !stop.load(Ordering::Relaxed) {
                    missed += u32::from(volumes.find(b"a").is_none());
                }
                missed
            };
            let looks = scope.spawn(look);
            for pages in 2..500 {
                for _ in 0..100 {
                    volumes.remove("a", &worker, &mut |_| {}).expect_err("it is in use");
                }
                volumes.resize("a", size(pages), &worker, &mut |_| {}).expect("there is room");
            }
            stop.store(true, Ordering::Relaxed);
            looks.join().expect("no panic")
        });
        assert_eq!(missed, 0);
    }

    #[test]
    fn a_volume_with_an_attached_device_keeps_its_pages_though_the_device_has_no_connection() {
        let keeper = Keeper::default();
        let volumes = start(&keeper, &mut Held::default(), Some(100)).expect("a volume");
        let worker = worker(&volumes);
        for name in ["a", "b"] {
            volumes.create(name, Some(size(50)), &worker).expect("there is room");
        }
        let device = Attachment {
            device: 3,
            address: "unix:/run/weir/nbd.sock".into(),
            name: "a".into(),
            connections: 1,
            request_timeout: 5,
            reconnect_timeout: 600,
        };
        let log: Log = Arc::new(|_, _| {});
        let note = write_note(&[device]).expect("memory");
        let attachments = Attachments::new(None, Some(note), &log);
        volumes.mind(&attachments);
        type Change<'a> = &'a dyn Fn(&str) -> Result<(), Error>;
        let changes: [Change<'_>; 2] =
            [&|name| volumes.resize(name, size(40), &worker, &mut |_| {}), &|name| {
                volumes.remove(name, &worker, &mut |_| {})
            }];
        for change in changes {
            let said = change("a").expect_err("it has a device").to_string();
            assert_eq!(said, "volume a is attached as /dev/nbd3; run weir detach /dev/nbd3, then try again");
            change("b").expect("it has none");
        }
        volumes.resize("a", size(60), &worker, &mut |_| {}).expect("it grows");
        attachments.detached(3).expect("it is on the list");
        volumes.remove("a", &worker, &mut |_| {}).expect("it has none any more");
    }

    #[test]
    fn volumes_that_a_daemon_would_not_serve_as_they_are_stay_as_they_are() {
        let keeper = Keeper::default();
        let volumes = start(&keeper, &mut Held::default(), Some(PAGES.into())).expect("a volume");
        write(own(&volumes), 0..PAGES);
        drop(volumes);
        let disk = |first, pages| Noted { name: "disk".to_owned(), first, pages };
        let sized =
            |pages: u32| format!("volume disk is {} large, and {} is asked for", size(pages), size(PAGES));
        let wrong = [
            (vec![], "it had 0 volumes, and none of them is disk".to_owned()),
            (
                vec![
                    Noted { name: "a".to_owned(), ..disk(0, 512) },
                    Noted { name: "b".to_owned(), ..disk(512, 188) },
                ],
                "it had 2 volumes, and none of them is disk".to_owned(),
            ),
            (vec![disk(0, 512), disk(512, 188)], sized(512)),
            (vec![disk(0, PAGES - 1)], sized(PAGES - 1)),
            (vec![disk(0, PAGES + 1)], sized(PAGES + 1)),
            (vec![disk(512, 188)], sized(188)),
        ];
        let right = keeper.0.lock().expect("no panic").remove(VOLUMES).expect("it was noted");
        for (noted, said) in wrong {
            let note = write_note(&noted).expect("memory");
            keeper.0.lock().expect("no panic").insert(VOLUMES.to_owned(), note);
            let refused =
                start(&keeper, &mut keeper.held(), Some(PAGES.into())).expect_err("it does not fit");
            assert!(refused.to_string().contains(&said), "{noted:?}: {refused}");
        }
        keeper.0.lock().expect("no panic").insert(VOLUMES.to_owned(), right);
        for other in [None, Some(1), Some(u64::from(PAGES) - 1), Some(u64::from(PAGES) + 1)] {
            let refused = start(&keeper, &mut keeper.held(), other).expect_err("another size");
            let said = format!("volume disk is {} large", size(PAGES));
            assert!(refused.to_string().contains(&said), "--size {other:?}: {refused}");
        }
        let volumes = start(&keeper, &mut keeper.held(), Some(PAGES.into())).expect("its volume");
        assert_eq!(numbers(own(&volumes)), (0..PAGES).map(Some).collect::<Vec<_>>());
    }

    #[test]
    fn a_keeper_that_lacks_a_part_of_the_volume_or_holds_another_thing_is_refused() {
        let keeper = Keeper::default();
        drop(start(&keeper, &mut Held::default(), Some(PAGES.into())).expect("a volume"));
        let refused = |held: &mut Held| {
            chain(&start(&keeper, held, Some(PAGES.into())).expect_err("a part is missing"))
        };
        for part in [MAP, VOLUMES, "records.0"] {
            let mut held = keeper.held();
            held.take(part).expect("it was kept");
            assert_eq!(refused(&mut held), format!("the keeper does not hold {part}"));
        }
        // A file that could shrink under its mapping.
        let file = rustix::fs::memfd_create("weir-test", rustix::fs::MemfdFlags::empty()).expect("memory");
        rustix::fs::ftruncate(&file, PAGE_SIZE as u64).expect("memory");
        let map = keeper.0.lock().expect("no panic").insert(MAP.to_owned(), file).expect("it was kept");
        let said = refused(&mut keeper.held());
        assert_eq!(said, "cannot map what the keeper holds: Invalid argument (os error 22)");
        keeper.0.lock().expect("no panic").insert(MAP.to_owned(), map);
        start(&keeper, &mut keeper.held(), Some(PAGES.into())).expect("its volume");
    }
}
