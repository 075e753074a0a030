//! A file or a block device as it is, called a raw disk: slot `n` is bytes `4096 n` to
//! `4096 n + 4095`. A raw disk has no header and no key, and opening one changes nothing on it.
//! Several raw disks can form a stripe, in which they take units in turns.

use super::backing::Backing;
use super::quiet::Quiet;
use super::traffic::Traffic;
use super::{Deal, FileStore, Shared};
use crate::{DENIED, OpenError, OpenErrorKind, Room};
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;
use weir_core::{ByteSize, PAGE_SIZE};

/// Time limit of an operation at a raw disk. The limit is that of the kernel's own block layer, so
/// programs wait for the disk as long as they would without Weir.
pub(super) const LIMIT: Duration = Duration::from_secs(30);

impl FileStore {
    /// Opens `path` for this process alone. Changes no content, so that other programs can read it
    /// afterwards.
    ///
    /// Fails when `path` does not exist or is in use, or when it is neither a file nor a block
    /// device. Also fails when its size is not a whole number of pages, or is 16 TiB or more.
    pub fn open_raw(path: &Path) -> Result<Self, OpenError> {
        let name = path.display().to_string();
        let (member, bytes) = Backing::open_raw(&name, path)?;
        let pages = pages(&name, bytes)?;
        Self::of_members(name, vec![member], pages, 1, std::slice::from_ref(&path.to_owned()))
    }

    /// Reads the present size of a raw disk. If the disk has grown, adds the slots at its new end,
    /// which open lanes can use from then on. Returns the number of slots.
    ///
    /// Fails if the disk is smaller than before, or if [`open_raw`](Self::open_raw) would refuse
    /// its size. Also fails if the store is not a single raw disk. After an error the store is
    /// unchanged.
    pub fn grow(&self) -> Result<u32, OpenError> {
        let Shared { members, start, .. } = &*self.shared;
        let refused = |what: String| Err(OpenError::new(OpenErrorKind::Layout, self.name.clone(), what));
        let ([member], 0) = (&**members, *start) else {
            return refused("only one disk as it is can grow".to_owned());
        };
        let bytes = member.length(&self.name)?;
        let (pages, before) = (pages(&self.name, bytes)?, self.shared.slots());
        if pages < before {
            let had = ByteSize(u64::from(before) * PAGE_SIZE as u64);
            return refused(format!(
                "it has {} now and had {had}, so pages at its end are lost; make it as large as it was",
                ByteSize(bytes)
            ));
        }
        self.shared.slots.store(pages, Ordering::Relaxed);
        Ok(pages)
    }

    /// Opens the files or devices at `paths` for this process alone, as members of a stripe. They
    /// have no headers, and take pages in turns, `unit` bytes at a time. Each member gives as many
    /// whole units as the smallest member has. The rest of a larger member stays unused.
    ///
    /// # Errors
    /// Fails when a path does not exist, is in use, or is neither a file nor a block device. Also
    /// fails when a member is shorter than a unit.
    pub fn open_members(paths: &[PathBuf], unit: ByteSize) -> Result<Self, OpenError> {
        let names: Vec<String> = paths.iter().map(|path| path.display().to_string()).collect();
        let name = names.join(",");
        let open = |(name, path): (&String, &PathBuf)| Backing::open_raw(name, path);
        let opened = names.iter().zip(paths).map(open).collect::<Result<Vec<_>, _>>()?;
        let units = opened.iter().map(|(_, bytes)| bytes / unit.0).min().unwrap_or(0);
        let pages = units * (unit.0 / PAGE_SIZE as u64) * opened.len() as u64;
        if pages == 0 || pages >= u64::from(u32::MAX) {
            let what = format!(
                "there are {units} units of {unit} on each; give files or devices of one unit at least, and below 16TiB in all"
            );
            return Err(OpenError::new(OpenErrorKind::Layout, name, what));
        }
        let members = opened.into_iter().map(|(member, _)| member).collect();
        Self::of_members(name, members, pages as u32, (unit.0 / PAGE_SIZE as u64) as u32, paths)
    }

    fn of_members(
        name: String,
        members: Vec<Backing>,
        slots: u32,
        unit: u32,
        paths: &[PathBuf],
    ) -> Result<Self, OpenError> {
        let quiet = Quiet::new().map_err(|error| OpenError::io(&name, DENIED, error))?;
        let shared = Shared {
            deal: Deal::in_turns(members.len() as u32, unit),
            members: members.into(),
            start: 0,
            cipher: None,
            slots: slots.into(),
            // The store has one chunk, however large the disk becomes.
            chunk_slots: u32::MAX,
            released: Box::new([AtomicBool::new(false)]),
            quiet,
            room: Room::Reserved,
            limit: LIMIT,
            traffic: Traffic::of(paths),
        };
        Ok(FileStore { name, shared: Arc::new(shared) })
    }
}

/// Number of pages of a raw disk of so many bytes.
fn pages(name: &str, bytes: u64) -> Result<u32, OpenError> {
    let pages = bytes / PAGE_SIZE as u64;
    if pages == 0 || pages >= u64::from(u32::MAX) || !bytes.is_multiple_of(PAGE_SIZE as u64) {
        let what = format!(
            "it has {bytes} bytes ({}); give one of whole pages of 4KiB, one at least and below 16TiB",
            ByteSize(bytes)
        );
        return Err(OpenError::new(OpenErrorKind::Layout, name, what));
    }
    Ok(pages as u32)
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
        let error = FileStore::open_raw(&path.join("below")).unwrap_err().to_string();
        assert!(error.contains("cannot look at it"), "{error}");
        std::fs::remove_file(&path).unwrap();
        assert!(FileStore::open_raw(&path).unwrap_err().to_string().contains("does not exist"));
    }

    #[test]
    fn a_raw_disk_that_has_grown_takes_pages_at_its_end_and_one_that_has_shrunk_is_refused() {
        let path = std::env::temp_dir().join(format!("weir-grown-{}", std::process::id()));
        std::fs::write(&path, vec![3; 5 * PAGE_SIZE]).unwrap();
        let file = std::fs::OpenOptions::new().write(true).open(&path).unwrap();
        let store = FileStore::open_raw(&path).unwrap();
        let mut lane = store.lane(4).unwrap();
        let mut write = |slot: u32| {
            let begun = lane.write(1, Slot(slot), &[slot as u8; PAGE_SIZE]);
            lane.submit();
            let mut ended = None;
            while lane.in_flight() > 0 {
                lane.poll(Instant::now(), &mut |done| ended = Some(done.result));
            }
            if let Progress::Done(result) = begun { result } else { ended.unwrap() }
        };
        assert_eq!(store.grow().unwrap(), 5, "nothing has changed");
        write(5).unwrap_err();
        file.set_len(9 * PAGE_SIZE as u64).unwrap();
        write(8).unwrap_err();
        assert_eq!((store.grow().unwrap(), store.slots()), (9, 9));
        write(8).unwrap();
        write(9).unwrap_err();
        assert_eq!(store.grow().unwrap(), 9, "twice");
        for (bytes, words) in [
            (9 * PAGE_SIZE + 1, "whole pages of 4KiB"),
            (
                4 * PAGE_SIZE,
                "it has 16KiB now and had 36KiB, so pages at its end are lost; make it as large as it was",
            ),
        ] {
            file.set_len(bytes as u64).unwrap();
            let error = store.grow().unwrap_err().to_string();
            assert!(error.contains(words) && store.slots() == 9, "{error}");
        }
        std::fs::remove_file(&path).unwrap();
    }

    #[test]
    fn units_lie_on_members_in_turns_from_their_first_byte_on() {
        let unit = ByteSize(2 * PAGE_SIZE as u64);
        let path = |at: u32| std::env::temp_dir().join(format!("weir-members-{at}-{}", std::process::id()));
        let paths = [path(0), path(1)];
        std::fs::write(&paths[0], vec![0; 5 * PAGE_SIZE]).unwrap();
        std::fs::write(&paths[1], vec![0; 4 * PAGE_SIZE]).unwrap();
        let store = FileStore::open_members(&paths, unit).unwrap();
        assert_eq!(store.slots(), 8, "what fills no unit is not used");
        let mut lane = store.lane(8).unwrap();
        for slot in 0..8 {
            assert_eq!(lane.write(slot, Slot(slot), &[slot as u8 + 1; PAGE_SIZE]), Progress::Queued);
        }
        lane.submit();
        while lane.in_flight() > 0 {
            lane.poll(Instant::now(), &mut |done| assert_eq!(done.result, Ok(())));
        }
        assert!(store.grow().unwrap_err().to_string().contains("only one disk as it is can grow"));
        drop((lane, store));
        let first = |at: usize| -> Vec<u8> {
            std::fs::read(&paths[at]).unwrap().chunks(PAGE_SIZE).map(|page| page[0]).collect()
        };
        assert_eq!((first(0), first(1)), (vec![1, 2, 5, 6, 0], vec![3, 4, 7, 8]));
        let error = FileStore::open_members(&paths, ByteSize(1 << 20)).unwrap_err().to_string();
        assert!(error.contains("there are 0 units of 1MiB on each; give files or devices"), "{error}");
        paths.iter().for_each(|path| std::fs::remove_file(path).unwrap());
    }
}
