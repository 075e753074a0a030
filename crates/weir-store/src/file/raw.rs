//! A file or a block device as it is: slot `n` is bytes `4096 n` to `4096 n + 4095`. It has no
//! header and no key, and opening changes nothing.

use super::backing::Backing;
use super::quiet::Quiet;
use super::traffic::Traffic;
use super::{Deal, FileStore, Shared};
use crate::{OpenError, OpenErrorKind, Room};
use std::path::Path;
use std::sync::Arc;
use std::sync::atomic::AtomicBool;
use std::time::Duration;
use weir_core::{ByteSize, PAGE_SIZE};

/// Time that the disk has for an operation: as much as the kernel's own block layer gives it.
/// Programs wait for a disk as they would without Weir.
pub(super) const LIMIT: Duration = Duration::from_secs(30);

impl FileStore {
    /// Opens `path` for this process alone. Its content stays, and other programs can read it
    /// afterwards.
    ///
    /// # Errors
    /// Fails when it does not exist, is in use, or is no file or block device of whole pages below
    /// 16 TiB.
    pub fn open_raw(path: &Path) -> Result<Self, OpenError> {
        let name = path.display().to_string();
        let (member, bytes) = Backing::open_raw(&name, path)?;
        let pages = bytes / PAGE_SIZE as u64;
        if pages == 0 || pages >= u64::from(u32::MAX) || !bytes.is_multiple_of(PAGE_SIZE as u64) {
            let what = format!(
                "it has {bytes} bytes ({}); give one of whole pages of 4KiB, one at least and below 16TiB",
                ByteSize(bytes)
            );
            return Err(OpenError::new(OpenErrorKind::Layout, name, what));
        }
        let quiet = Quiet::new().map_err(|error| OpenError::io(&name, "cannot make a pipe", error))?;
        let shared = Shared {
            members: Box::new([member]),
            start: 0,
            cipher: None,
            slots: pages as u32,
            deal: Deal::in_turns(1, 1),
            chunk_slots: pages as u32,
            released: Box::new([AtomicBool::new(false)]),
            quiet,
            room: Room::Reserved,
            limit: LIMIT,
            traffic: Traffic::of(&[path.to_owned()]),
        };
        Ok(FileStore { name, shared: Arc::new(shared) })
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::{Progress, Store};
    use std::time::Instant;
    use weir_core::Slot;

    #[test]
    fn a_raw_home_keeps_what_it_holds_and_page_n_lies_at_n() {
        let path = std::env::temp_dir().join(format!("weir-raw-{}", std::process::id()));
        std::fs::write(&path, vec![3; 5 * PAGE_SIZE]).unwrap();
        let store = FileStore::open_raw(&path).unwrap();
        assert_eq!(store.slots(), 5);
        assert!(FileStore::open_raw(&path).unwrap_err().to_string().contains("in use"));
        let mut lane = store.lane(4).unwrap();
        assert_eq!(lane.write(1, Slot(4), &[7; PAGE_SIZE]), Progress::Queued);
        lane.submit();
        let mut ended = Vec::new();
        while lane.in_flight() > 0 {
            lane.poll(Instant::now(), &mut |done| ended.push((done.ticket, done.result)));
        }
        assert_eq!(lane.flush(2), Progress::Queued);
        assert_eq!(lane.flush(3), Progress::Full, "one at a time");
        lane.submit();
        while lane.in_flight() > 0 {
            lane.poll(Instant::now(), &mut |done| ended.push((done.ticket, done.result)));
        }
        assert_eq!(ended, [(1, Ok(())), (2, Ok(()))]);
        drop((lane, store));
        let bytes = std::fs::read(&path).unwrap();
        assert!(
            bytes[..4 * PAGE_SIZE].iter().all(|byte| *byte == 3) && bytes[4 * PAGE_SIZE..] == [7; PAGE_SIZE]
        );
        std::fs::write(&path, [0; 100]).unwrap();
        let error = FileStore::open_raw(&path).unwrap_err().to_string();
        assert!(error.contains("100 bytes") && error.contains("whole pages"), "{error}");
        std::fs::remove_file(&path).unwrap();
        assert!(FileStore::open_raw(&path).unwrap_err().to_string().contains("does not exist"));
    }
}
