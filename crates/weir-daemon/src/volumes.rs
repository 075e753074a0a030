//! The daemon's volumes: one of its own, which its options name, unless they ask for a pool alone;
//! and others that are made, resized and removed while the daemon runs.
//!
//! A keeper has every volume in its list before a client can write to the volume. The keeper takes
//! a volume off its list before the volume's first page is discarded. So if a daemon dies between
//! two steps, pages of no volume may be left, and the next daemon drops them.

use crate::attach::Attachments;
use crate::control::{NamedVolume, Progress};
use crate::error::{Error, ErrorKind};
use crate::keeper::{Link, write_note};
use crate::worker::{Worker, stopping};
use serde::{Deserialize, Serialize};
use std::io;
use std::ops::Range;
use std::os::fd::AsFd as _;
use std::sync::{Arc, Mutex, MutexGuard, OnceLock, PoisonError};
use weir_core::{ByteSize, PAGE_SIZE};
use weir_export::nbd::{Export, Exports};
use weir_store::OpenError;
use weir_volume::{CreateError, Lane, PAGES_MAX, Pool, Removal, Volume, map_bytes_of};

/// The name under which the keeper holds the page map.
pub const MAP: &str = "map";
/// The name under which the keeper holds the list of volumes.
pub const VOLUMES: &str = "volumes";

/// Gets the progress of a change that discards pages.
type Tell<'a> = &'a mut dyn FnMut(Progress);

/// The description of each export, for people.
const DESCRIPTION: &str = "Weir volume";
/// Largest number of volumes of a daemon with a volume of its own.
pub const VOLUMES_MOST: usize = 256;
/// Longest name of a volume, in bytes.
const NAME_MOST: usize = 64;

/// A volume, as the next daemon must know it.
#[derive(Clone, PartialEq, Eq, Debug, Serialize, Deserialize)]
pub struct Noted {
    /// The volume's name.
    pub name: String,
    /// The number of the volume's first page in the pool.
    pub first: u32,
    /// The volume's size in pages.
    pub pages: u32,
}

impl Noted {
    /// The volume's pages in the pool.
    pub fn range(&self) -> Range<u32> {
        self.first..self.first.saturating_add(self.pages)
    }

    fn of(name: &str, range: &Range<u32>) -> Self {
        Noted { name: name.to_owned(), first: range.start, pages: range.end - range.start }
    }
}

/// The volumes of a daemon, by name.
#[derive(Debug)]
pub struct Volumes {
    pool: Arc<Pool>,
    own: Option<Arc<Volume>>,
    /// The volumes in the order of their making. The daemon's own comes first.
    named: Mutex<Vec<Named>>,
    /// Largest number of volumes.
    most: usize,
    /// Locked during a change. So changes come one after another, and so do the lists that the
    /// keeper gets.
    changing: Mutex<()>,
    keeper: Option<Link>,
    attachments: OnceLock<Arc<Attachments>>,
}

#[derive(Debug)]
struct Named {
    name: String,
    /// `None`: the volume is losing pages, and no client can have it.
    volume: Option<Arc<Volume>>,
    /// The volume as the keeper's list has it; `None`: it is being removed.
    noted: Option<Noted>,
}

impl Named {
    fn new(name: &str, volume: Arc<Volume>) -> Self {
        let noted = Some(Noted::of(name, &volume.range()));
        Named { name: name.to_owned(), volume: Some(volume), noted }
    }
}

impl Volumes {
    /// The volumes of a daemon, at most `most` of them. `own` says that the first one is the
    /// daemon's own.
    pub fn new(
        pool: &Arc<Pool>,
        own: bool,
        volumes: Vec<(String, Arc<Volume>)>,
        most: usize,
        keeper: Option<Link>,
    ) -> Self {
        let own = volumes.first().filter(|_| own).map(|(_, volume)| Arc::clone(volume));
        let named = volumes.into_iter().map(|(name, volume)| Named::new(&name, volume)).collect();
        let (named, changing, attachments) = (Mutex::new(named), Mutex::new(()), OnceLock::new());
        Volumes { pool: Arc::clone(pool), own, named, most, changing, keeper, attachments }
    }

    /// From now on, a volume with a device in this list neither shrinks nor is removed. A count of
    /// connections would not do: after a daemon's death the device has none, until the next daemon
    /// connects it again.
    pub fn mind(&self, attachments: &Arc<Attachments>) {
        let _ = self.attachments.set(Arc::clone(attachments));
    }

    /// The pool of all volumes.
    pub fn pool(&self) -> &Arc<Pool> {
        &self.pool
    }

    /// The daemon's own volume, which lives as long as the daemon; `None`: it has a pool alone.
    pub fn own(&self) -> Option<&Arc<Volume>> {
        self.own.as_ref()
    }

    /// Hands the keeper the list of volumes.
    ///
    /// # Errors
    /// Fails when the keeper does not answer.
    pub fn note(&self) -> io::Result<()> {
        self.note_list(&self.noted())
    }

    /// The volumes, and the room for more.
    pub fn list(&self) -> Vec<NamedVolume> {
        let bytes = |named: &Named| {
            let pages = named.volume.as_ref().map(|volume| volume.pages());
            u64::from(pages.or(named.noted.as_ref().map(|noted| noted.pages)).unwrap_or(0)) * PAGE_SIZE as u64
        };
        let volume = |(at, named): (usize, &Named)| NamedVolume {
            name: named.name.clone(),
            bytes: bytes(named),
            is_own: at == 0 && self.own.is_some(),
            is_changing: named.volume.is_none(),
        };
        self.named().iter().enumerate().map(volume).collect()
    }

    /// Bytes of all volumes together.
    pub fn bytes(&self) -> u64 {
        u64::from(self.pool.pages()) * PAGE_SIZE as u64
    }

    /// Bytes that further volumes may have together.
    pub fn free_bytes(&self) -> u64 {
        u64::from(self.pool.free_pages()) * PAGE_SIZE as u64
    }

    /// The volume of this name, if clients can have it. The empty name is the daemon's own volume.
    pub fn find(&self, name: &[u8]) -> Option<(String, Arc<Volume>)> {
        let named = self.named();
        let found = match name {
            b"" => named.first().filter(|_| self.own.is_some()),
            name => named.iter().find(|named| named.name.as_bytes() == name),
        };
        found.and_then(|found| Some((found.name.clone(), Arc::clone(found.volume.as_ref()?))))
    }

    /// Makes an empty volume. Without a size, it has all the room that is left.
    ///
    /// # Errors
    /// Fails when another volume has the name, the name is not allowed, or the pool has too little
    /// room. Then no volume has changed; if the failed creation could not be undone, the error says
    /// what remains of the new volume.
    pub fn create(&self, name: &str, size: Option<ByteSize>, worker: &Worker) -> Result<(), Error> {
        check_name(name)?;
        let asked = size.map(pages).transpose()?;
        let _alone = self.alone();
        let pages = asked.unwrap_or_else(|| self.pool.free_pages());
        if pages == 0 {
            return Err(refused(
                "there is no room for another volume; weir volume list shows all".to_owned(),
            ));
        }
        if self.named().iter().any(|named| named.name == name) {
            return Err(refused(format!("there is a volume {name} already; weir volume list shows all")));
        }
        let most = self.most;
        if self.named().len() >= most {
            return Err(refused(format!("there are {most} volumes, and this daemon has no more")));
        }
        let volume = self.pool.volume(pages).map_err(unmade)?;
        let range = volume.range();
        let mut list = self.noted();
        list.push(Noted::of(name, &range));
        if let Err(error) = self.take(&range).and_then(|()| self.note_list(&list)) {
            // The keeper still has the old list, so the keeper needs no other one.
            let removal = volume.shrink(0, |_| Ok(())).map_err(|(_, error)| unmade(error));
            let undone = removal.and_then(|removal| worker.discard(removal, &mut |_| {})).map(drop);
            let left = || format!("the room of {name} stays taken until the daemon ends");
            return Err(Error::of(ErrorKind::Keeper, error).unless_undone(undone, left));
        }
        self.named().push(Named::new(name, volume));
        Ok(())
    }

    /// Gives a volume another size. New pages at the end are empty, and pages beyond a smaller size
    /// are discarded.
    ///
    /// # Errors
    /// Fails when there is no such volume, when it cannot grow so far, or when it should shrink and
    /// a client has it. Then the volume keeps its size.
    pub fn resize(&self, name: &str, size: ByteSize, worker: &Worker, tell: Tell<'_>) -> Result<(), Error> {
        let pages = pages(size)?;
        let _alone = self.alone();
        let volume = self.changeable(name, "resized")?;
        if pages >= volume.pages() {
            let old_end = volume.range().end;
            let grown = volume.grow(pages, |range| {
                self.take(&(old_end..range.end))?;
                self.note_changed(name, Some(&range))
            });
            return grown.map_err(unmade);
        }
        drop(volume);
        let volume = self.take_out(name, "resized")?;
        let shrunk = volume.shrink(pages, |range| self.note_changed(name, Some(&range)));
        let rest = self.shrunk(name, shrunk, worker, tell)?;
        self.put_back(name, rest);
        Ok(())
    }

    /// Removes a volume with all that it holds.
    ///
    /// # Errors
    /// Fails when there is no such volume, or a client has it. Then nothing has changed.
    pub fn remove(&self, name: &str, worker: &Worker, tell: Tell<'_>) -> Result<(), Error> {
        let _alone = self.alone();
        let volume = self.take_out(name, "removed")?;
        let shrunk = volume.shrink(0, |_| self.note_changed(name, None));
        self.shrunk(name, shrunk, worker, tell)?;
        self.named().retain(|named| named.name != name);
        Ok(())
    }

    /// Discards the pages that a volume is to lose. Returns the volume with the pages that it
    /// keeps, or `None` if it keeps no page.
    fn shrunk(
        &self,
        name: &str,
        begun: Result<Removal, (Arc<Volume>, CreateError)>,
        worker: &Worker,
        tell: Tell<'_>,
    ) -> Result<Option<Arc<Volume>>, Error> {
        match begun {
            // If the daemon stops meanwhile, the remaining pages are gone with it, or the next
            // daemon drops them if a keeper holds them.
            Ok(removal) => worker.discard(removal, tell),
            Err((volume, error)) => {
                self.put_back(name, Some(volume));
                Err(unmade(error))
            }
        }
    }

    /// The volume of this name, if it can change.
    fn changeable(&self, name: &str, change: &str) -> Result<Arc<Volume>, Error> {
        let named = self.named();
        let Some(at) = named.iter().position(|named| named.name == name) else {
            return Err(refused(format!("there is no volume {name}; weir volume list shows all")));
        };
        if at == 0 && self.own.is_some() {
            return Err(refused(format!(
                "{name} is the daemon's own volume, whose size is --size; it cannot be {change} while the daemon runs"
            )));
        }
        // If the volume is not here, an earlier change of it has not ended. Only the end of the
        // daemon interrupts a change.
        named[at].volume.clone().ok_or_else(stopping)
    }

    /// Whether a client has the volume of this name, which can be removed.
    pub fn is_in_use(&self, name: &str) -> bool {
        self.changeable(name, "removed").is_ok_and(|volume| Arc::strong_count(&volume) > 2)
    }

    /// Makes a volume unavailable to clients, so that it can lose pages. Fails if a client has the
    /// volume; then other clients can still get it.
    fn take_out(&self, name: &str, change: &str) -> Result<Arc<Volume>, Error> {
        let volume = self.changeable(name, change)?;
        if let Some(device) = self.attachments.get().and_then(|it| it.device_of(name)) {
            return Err(refused(format!(
                "volume {name} is attached as {device}; run weir detach {device}, then try again"
            )));
        }
        // Clients get the volume from this list, which stays locked here. So no client can get the
        // volume now. Each client that has the volume holds a reference to it, and so do the list
        // and this function.
        let mut named = self.named();
        if Arc::strong_count(&volume) > 2 {
            return Err(refused(format!(
                "volume {name} is in use; disconnect its clients (weir status counts connections), then try again"
            )));
        }
        named.iter_mut().filter(|named| named.name == name).for_each(|named| named.volume = None);
        Ok(volume)
    }

    /// Makes a volume available to clients again, after `take_out`.
    fn put_back(&self, name: &str, volume: Option<Arc<Volume>>) {
        if let Some(named) = self.named().iter_mut().find(|named| named.name == name) {
            named.volume = volume;
        }
    }

    /// Replaces the keeper's list by one in which this volume has another range, or is missing.
    fn note_changed(&self, name: &str, range: Option<&Range<u32>>) -> io::Result<()> {
        let noted = range.map(|range| Noted::of(name, range));
        let mut list = self.noted();
        list.retain(|noted| noted.name != name);
        list.extend(noted.clone());
        self.note_list(&list)?;
        self.named().iter_mut().filter(|named| named.name == name).for_each(|it| it.noted.clone_from(&noted));
        Ok(())
    }

    fn note_list(&self, list: &[Noted]) -> io::Result<()> {
        let Some(keeper) = &self.keeper else { return Ok(()) };
        keeper.hold_memory(VOLUMES, write_note(&list)?.as_fd())
    }

    /// Has the keeper lock the map's part for new pages.
    fn take(&self, range: &Range<u32>) -> io::Result<()> {
        let Some(keeper) = &self.keeper else { return Ok(()) };
        let bytes = map_bytes_of(range);
        keeper.took(MAP, bytes.start, bytes.end - bytes.start)
    }

    fn noted(&self) -> Vec<Noted> {
        self.named().iter().filter_map(|named| named.noted.clone()).collect()
    }

    fn named(&self) -> MutexGuard<'_, Vec<Named>> {
        self.named.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn alone(&self) -> MutexGuard<'_, ()> {
        self.changing.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// The volumes as exports of the NBD server.
impl Exports for Volumes {
    type Lane = Lane;
    type Device = Arc<Volume>;

    fn open(&self) -> Result<Lane, OpenError> {
        self.pool.lane()
    }

    fn find(&self, name: &[u8]) -> Option<(Export, Arc<Volume>)> {
        let (name, volume) = Volumes::find(self, name)?;
        let bytes = volume.bytes();
        let description = DESCRIPTION.to_owned();
        Some((Export { name, description, bytes, read_only: false, clears: true }, volume))
    }

    fn list(&self, each: &mut dyn FnMut(&str, &str)) {
        let named = self.named();
        named.iter().filter(|it| it.volume.is_some()).for_each(|it| each(&it.name, DESCRIPTION));
    }

    fn turn(&self, lane: &mut Lane, volume: Option<&Arc<Volume>>) {
        lane.turn(volume);
    }
}

/// Refuses a name that shells, paths or lists could take for something else.
fn check_name(name: &str) -> Result<(), Error> {
    let is_plain = |byte: u8| byte.is_ascii_alphanumeric() || b"._-".contains(&byte);
    let starts_well = name.bytes().next().is_some_and(|byte| byte.is_ascii_alphanumeric());
    if starts_well && name.len() <= NAME_MOST && name.bytes().all(is_plain) {
        return Ok(());
    }
    Err(refused(format!(
        "{name:?} is no name for a volume: accepted: 1 to {NAME_MOST} letters, digits, dots, dashes and underscores, a letter or digit first"
    )))
}

/// The number of pages of a volume of this size, if a volume can have it.
pub fn whole_pages(size: ByteSize) -> Option<u32> {
    let whole = size.0.is_multiple_of(PAGE_SIZE as u64).then_some(size.0 / PAGE_SIZE as u64);
    let pages = whole.and_then(|pages| u32::try_from(pages).ok());
    pages.filter(|pages| (1..=PAGES_MAX).contains(pages))
}

fn pages(size: ByteSize) -> Result<u32, Error> {
    whole_pages(size).ok_or_else(|| {
        refused(format!(
            "a volume cannot have {size}: accepted: a multiple of 4KiB above 0, at most 8TiB less 32MiB"
        ))
    })
}

fn refused(what: String) -> Error {
    Error::new(ErrorKind::Refused, what)
}

fn unmade(error: CreateError) -> Error {
    Error::of(ErrorKind::Volume, error)
}
