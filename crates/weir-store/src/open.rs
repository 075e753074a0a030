//! Opens the store that a URL names.

use crate::vram::{Drivers, VramStore};
use crate::{FileStore, Host, OpenError, OpenErrorKind, RemoteStore, Room, Sim, Store, StoreUrl, host};
use std::os::fd::OwnedFd;
use std::sync::Arc;
use weir_core::{Memory, PAGE_SIZE, Watch, unwatched};

/// Opens the store that `url` names: takes its memory, or allocates its file. It may take seconds
/// for a large one.
///
/// ```
/// let store = weir_store::open(&"host:1MiB".parse()?)?;
/// assert_eq!(store.slots(), 256);
/// # Ok::<(), Box<dyn std::error::Error>>(())
/// ```
///
/// # Errors
/// Fails when there is not enough room, or the machine lacks something that the store needs.
pub fn open(url: &StoreUrl) -> Result<Arc<dyn Store>, OpenError> {
    open_watched(url, Room::Reserved, &mut unwatched)
}

/// Does the same as [`open`]. `watch` gets the progress while memory is taken or a file's room is
/// written, and can stop the opening.
///
/// # Errors
/// Fails as [`open`] does. If `watch` returns an error, fails with that error as its
/// [source](OpenError::source).
pub fn open_watched(url: &StoreUrl, room: Room, watch: Watch<'_>) -> Result<Arc<dyn Store>, OpenError> {
    match url {
        StoreUrl::Host { size } => Ok(Arc::new(Host::watched((size.0 / PAGE_SIZE as u64) as u32, watch)?)),
        StoreUrl::Sim(sim) => Ok(Arc::new(Sim::open(sim.clone())?)),
        StoreUrl::File(file) => Ok(Arc::new(FileStore::open_watched(file, room, watch)?)),
        StoreUrl::Stripe(stripe) => Ok(Arc::new(FileStore::open_stripe_watched(stripe, room, watch)?)),
        StoreUrl::Vram(url) => Ok(Arc::new(VramStore::open(url)?)),
        StoreUrl::Remote(url) => Ok(Arc::new(RemoteStore::open(url)?)),
    }
}

/// Opens the store of a daemon that has ended, with every page in it. `take` returns the keeper's
/// descriptors by name ([`Survive`](crate::Survive)). `room` is that of the earlier daemon.
///
/// # Errors
/// Fails when the keeper lacks a descriptor, or this kind of store does not outlive its process.
pub fn reopen(
    url: &StoreUrl,
    room: Room,
    take: &mut dyn FnMut(&str) -> Option<OwnedFd>,
) -> Result<Arc<dyn Store>, OpenError> {
    match url {
        StoreUrl::Host { .. } => {
            let missing = || {
                OpenError::new(OpenErrorKind::NoDevice, url.to_string(), "the keeper does not hold its pages")
            };
            let memory = Memory::adopt(take(host::HANDOFF).ok_or_else(missing)?)
                .map_err(|error| OpenError::io(url.to_string(), "cannot use what was kept", error))?;
            Ok(Arc::new(Host::adopt(memory)))
        }
        StoreUrl::File(file) => Ok(Arc::new(FileStore::reopen(file, room, take)?)),
        StoreUrl::Stripe(stripe) => Ok(Arc::new(FileStore::reopen_stripe(stripe, room, take)?)),
        StoreUrl::Vram(url) => Ok(Arc::new(VramStore::reopen_with(url, &Drivers::default(), take)?)),
        StoreUrl::Remote(_) | StoreUrl::Sim(_) => Err(OpenError::new(
            OpenErrorKind::Layout,
            url.to_string(),
            "its pages end with the daemon; those of host memory, cards and files do not",
        )),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::conformance::Shelf;
    use weir_core::Slot;

    #[test]
    fn a_store_is_found_again_by_what_it_gave_to_keep() {
        let url: StoreUrl = "host:64KiB".parse().unwrap();
        assert!(url.outlives_its_process());
        let first = open(&url).unwrap();
        let _ = first.lane(1).unwrap().write(0, Slot(3), &[7; PAGE_SIZE]);
        let shelf = Arc::new(Shelf::default());
        first.survive().unwrap().keep_with(shelf.clone(), false).unwrap();
        drop(first);
        let mut take = |name: &str| shelf.take(name);
        let second = reopen(&url, Room::Reserved, &mut take).unwrap();
        let mut page = [0; PAGE_SIZE];
        let _ = second.lane(1).unwrap().read(0, Slot(3), &mut page);
        assert_eq!(page, [7; PAGE_SIZE]);
        assert!(
            reopen(&url, Room::Reserved, &mut take)
                .unwrap_err()
                .to_string()
                .contains("keeper does not hold its pages"),
            "it was taken"
        );
        // A keeper that holds /dev/null under each name: it is neither the memory of `host:`, nor
        // the record of `vram:`.
        for url in ["host:64KiB", "vram:0"] {
            let null = |_: &str| Some(OwnedFd::from(std::fs::File::open("/dev/null").unwrap()));
            let error = reopen(&url.parse().unwrap(), Room::Reserved, &mut { null }).unwrap_err();
            assert!(error.to_string().contains("cannot use what was kept"), "{error}");
        }
    }

    #[test]
    fn what_ends_with_the_daemon_says_so() {
        let sim: StoreUrl = "sim:seed=1".parse().unwrap();
        assert!(!sim.outlives_its_process());
        let error = reopen(&sim, Room::Reserved, &mut |_| None).unwrap_err().to_string();
        assert!(error.contains("sim:") && error.contains("end with the daemon"), "{error}");
    }

    #[test]
    fn an_enlarged_url_says_its_size() {
        let url: StoreUrl = "host:1MiB".parse().unwrap();
        assert_eq!(url.enlarged(256).to_string(), "host:2MiB");
        let whole: StoreUrl = "vram:0".parse().unwrap();
        assert_eq!(whole.enlarged(256), whole, "a whole GPU is as large as it is");
        for (size, enlarged) in [("64MiB", "66MiB"), ("65MiB", "67MiB"), ("1028KiB", "1028KiB")] {
            let url: StoreUrl = format!("stripe:a,b?size={size}").parse().unwrap();
            assert_eq!(url.enlarged(257).to_string(), format!("stripe:a,b?size={enlarged}"));
        }
    }
}
