//! Promises of `file:` beyond the conformance suite. The room is really there. Other people's data
//! is not touched. Nothing readable is left behind. Errors hit only the operations that they belong
//! to.

mod scratch;

use rustix::fs::FallocateFlags;
use rustix::thread::{CapabilitySet, CapabilitySets, set_capabilities};
use scratch::{Directory, Loop};
use std::fs::{File, OpenOptions};
use std::io::Read as _;
use std::os::unix::fs::{FileExt, MetadataExt, PermissionsExt};
use std::path::Path;
use std::process::{Command, Stdio};
use std::sync::Arc;
use std::time::{Duration, Instant};
use weir_core::{ByteSize, PAGE_SIZE, PageBytes, Slot};
use weir_store::conformance::{Shelf, content};
use weir_store::{
    Done, Fault, FileStore, FileUrl, Lane, OpenErrorKind, Progress, Reclaim, Room, Store, StripeUrl, Survive,
};

const MIB: u64 = 1 << 20;

fn url(path: &Path, mib: u64) -> FileUrl {
    FileUrl { size: Some(ByteSize(mib * MIB)), chunk: ByteSize(MIB), ..FileUrl::new(path) }
}

fn refusal(url: &FileUrl) -> String {
    use std::error::Error;
    let error = FileStore::open(url).expect_err("must be refused");
    let source = error.source().map(|source| format!(": {source}")).unwrap_or_default();
    format!("{error}{source}")
}

fn kind(url: &FileUrl) -> OpenErrorKind {
    FileStore::open(url).expect_err("must be refused").kind
}

#[test]
fn a_refusal_says_what_kind_it_is() {
    let directory = Directory::new();
    let path = directory.file("store");
    let in_none = directory.file("none").join("store");
    assert_eq!(kind(&url(&in_none, 1)), OpenErrorKind::NoDevice);
    assert_eq!(kind(&url(Path::new("/dev/no-such-disk"), 1)), OpenErrorKind::NoDevice);
    assert_eq!(kind(&url(Path::new("/dev/null"), 1)), OpenErrorKind::Layout);
    let too_large = kind(&url(&path, 8 << 20));
    assert!(matches!(too_large, OpenErrorKind::NoMemory { wanted, had } if had < wanted), "{too_large:?}");
    let _held = FileStore::open(&url(&path, 1)).unwrap();
    assert_eq!(kind(&url(&path, 1)), OpenErrorKind::InUse);
}

/// Queues one operation for each slot, submits them together, and returns their results in the
/// order of slots.
fn batch(
    lane: &mut dyn Lane,
    slots: &[u32],
    mut queue: impl FnMut(&mut dyn Lane, u32) -> Progress,
) -> Vec<Result<PageBytes, Fault>> {
    let mut results = vec![None; slots.len()];
    for (at, _) in slots.iter().enumerate() {
        match queue(lane, at as u32) {
            Progress::Queued => {}
            Progress::Done(result) => results[at] = Some(result.map(|()| [0; PAGE_SIZE])),
            Progress::Full => panic!("the lane is deep enough for the batch"),
        }
    }
    lane.submit();
    while lane.in_flight() > 0 {
        lane.poll(Instant::now(), &mut |Done { ticket, result, page }| {
            let page = page.copied().unwrap_or([0; PAGE_SIZE]);
            assert!(results[ticket as usize].replace(result.map(|()| page)).is_none());
        });
    }
    results.into_iter().map(|result| result.expect("a result for each")).collect()
}

fn write(lane: &mut dyn Lane, slots: &[u32], serial: u32) -> Vec<Result<(), Fault>> {
    let queue = |lane: &mut dyn Lane, at: u32| {
        let slot = Slot(slots[at as usize]);
        lane.write(at, slot, &content(slot, serial))
    };
    batch(lane, slots, queue).into_iter().map(|result| result.map(|_| ())).collect()
}

fn read(lane: &mut dyn Lane, slots: &[u32]) -> Vec<Result<PageBytes, Fault>> {
    batch(lane, slots, |lane, at| lane.read(at, Slot(slots[at as usize]), &mut [0; PAGE_SIZE]))
}

fn range(from: u32, to: u32) -> Vec<u32> {
    (from..to).collect()
}

#[test]
fn all_its_room_is_there_before_the_first_page() {
    let directory = Directory::new();
    let path = directory.file("store");
    let store = FileStore::open(&url(&path, 16)).unwrap();
    let file = path.metadata().unwrap();
    assert!(file.blocks() * 512 >= 17 * MIB, "{} blocks", file.blocks());
    assert_eq!(file.mode() & 0o777, 0o600);
    assert_eq!(store.slots(), 4096);
    assert!(store.name().ends_with("store?size=16MiB&chunk=1MiB"), "{}", store.name());
}

/// The output of filefrag for a file. `None`, after printing that, if it does not work.
fn extents(test: &str, path: &Path) -> Option<String> {
    let said = Command::new("filefrag").arg("-v").arg(path).output();
    let said = said.ok().filter(|said| said.status.success()).map(|said| said.stdout);
    if said.is_none() {
        println!("skipped: {test}: filefrag, or a file system that it can ask");
    }
    said.map(|said| String::from_utf8_lossy(&said).into_owned())
}

#[test]
fn what_a_kernel_swaps_on_has_no_extent_that_is_only_set_aside() {
    let test = "what_a_kernel_swaps_on_has_no_extent_that_is_only_set_aside";
    let directory = Directory::new();
    let path = directory.file("store");
    drop(FileStore::open(&url(&path, 16)).unwrap());
    let Some(reserved) = extents(test, &path) else { return };
    if !reserved.contains("unwritten") {
        println!("skipped: {test}: a file system that sets blocks aside without writing them");
        return;
    }
    // In a file that was only set aside before, the missing part is written.
    let written = soon(|| {
        let mut heard = Vec::new();
        let mut watch = |done, all| {
            heard.push((done, all));
            Ok(())
        };
        let store = FileStore::open_watched(&url(&path, 16), Room::Written, &mut watch);
        let whole = heard.is_sorted() && heard.last() == Some(&(17 * MIB, 17 * MIB));
        assert!(store.is_err() || whole, "{heard:?}");
        store
    });
    let now = extents(test, &path).unwrap();
    assert!(!now.contains("unwritten"), "{now}");
    written.release(2).unwrap();
    written.take(2).unwrap();
    let now = extents(test, &path).unwrap();
    assert!(!now.contains("unwritten"), "what is taken again is written too: {now}");
}

#[test]
fn writing_the_room_ends_when_told_to_and_leaves_no_new_file() {
    let directory = Directory::new();
    let path = directory.file("store");
    let mut end = |_, _| Err(std::io::ErrorKind::Interrupted.into());
    let error = FileStore::open_watched(&url(&path, 16), Room::Written, &mut end).unwrap_err();
    assert_eq!(error.source.map(|error| error.kind()), Some(std::io::ErrorKind::Interrupted));
    assert!(!path.exists());
}

#[test]
fn a_file_that_others_could_read_is_its_owners_alone_once_it_is_a_store() {
    let directory = Directory::new();
    let path = directory.file("store");
    File::create(&path).unwrap();
    std::fs::set_permissions(&path, std::fs::Permissions::from_mode(0o644)).unwrap();
    let _store = FileStore::open(&FileUrl { encrypt: false, ..url(&path, 1) }).unwrap();
    assert_eq!(path.metadata().unwrap().mode() & 0o777, 0o600);
}

#[test]
fn a_file_that_is_refused_stays_as_it_is() {
    let directory = Directory::new();
    let path = directory.file("thesis");
    std::fs::write(&path, "all of it").unwrap();
    std::fs::set_permissions(&path, std::fs::Permissions::from_mode(0o755)).unwrap();
    let unsized_url = FileUrl { size: None, overwrite: true, ..url(&path, 16) };
    let too_large = FileUrl { overwrite: true, ..url(&path, 15 << 20) };
    for url in [url(&path, 16), unsized_url, too_large] {
        let error = FileStore::open(&url).unwrap_err();
        assert_eq!(std::fs::read(&path).unwrap(), b"all of it", "{error}");
        assert_eq!(path.metadata().unwrap().mode() & 0o777, 0o755, "{error}");
    }
}

#[test]
fn a_file_that_others_can_read_and_that_stays_so_is_refused() {
    let test = "a_file_that_others_can_read_and_that_stays_so_is_refused";
    if !rustix::process::geteuid().is_root() {
        println!("skipped: {test}: root, to make a file of somebody else");
        return;
    }
    let directory = Directory::new();
    let path = directory.file("store");
    File::create(&path).unwrap();
    std::fs::set_permissions(&path, std::fs::Permissions::from_mode(0o666)).unwrap();
    std::os::unix::fs::chown(&path, Some(65534), None).unwrap();
    // Each thread has capabilities of its own.
    let error = std::thread::scope(|scope| {
        let as_no_owner = || {
            let none = CapabilitySet::empty();
            let none = CapabilitySets { effective: none, permitted: none, inheritable: none };
            set_capabilities(None, none).expect("less is always granted");
            refusal(&url(&path, 1))
        };
        scope.spawn(as_no_owner).join().unwrap()
    });
    assert!(error.contains("others may read") && error.contains("chmod 600"), "{error}");
    assert_eq!(path.metadata().unwrap().len(), 0, "nothing was done to it");
}

#[test]
fn a_device_that_does_not_exist_is_never_made() {
    let path = Path::new("/dev").join(format!("weir-no-such-device-{}", std::process::id()));
    for path in [path.clone(), path.join("below")] {
        let error = refusal(&url(&path, 1));
        assert!(error.contains("does not exist") && error.contains("lsblk"), "{error}");
    }
    assert!(!path.exists());
}

#[test]
fn a_full_disk_is_an_error_before_anything_starts_and_nothing_is_left_of_the_try() {
    let directory = Directory::new();
    let Some(()) = directory.mount_tmpfs(8 * MIB) else { return };
    let path = directory.file("store");
    let error = refusal(&url(&path, 16));
    assert!(
        error.contains("17MiB") && error.contains("8MiB free") && error.contains("ask for less"),
        "{error}"
    );
    assert!(!path.exists());
    FileStore::open(&url(&path, 6)).expect("what fits is taken");
    // A Weir file that cannot grow stays as it was.
    refusal(&url(&path, 16));
    assert_eq!(path.metadata().unwrap().len(), 7 * MIB);
}

#[test]
fn a_released_chunk_whose_room_is_taken_by_others_stays_released_until_there_is_room() {
    let directory = Directory::new();
    let Some(()) = directory.mount_tmpfs(8 * MIB) else { return };
    let store = FileStore::open(&url(&directory.file("store"), 6)).unwrap();
    store.release(2).unwrap();
    let other = File::create(directory.file("other")).unwrap();
    let hog = |mib: u64| rustix::fs::fallocate(&other, FallocateFlags::empty(), 0, mib * MIB);
    hog(2).unwrap();
    assert_eq!(store.take(2), Err(Fault::Io(libc::ENOSPC)));
    let mut lane = store.lane(4).unwrap();
    assert_eq!(read(&mut *lane, &[2 * 256]), [Err(Fault::Lost)]);
    other.set_len(0).unwrap();
    store.take(2).unwrap();
    assert_eq!(write(&mut *lane, &[2 * 256], 1), [Ok(())]);
}

#[test]
fn a_file_that_holds_something_else_is_refused_and_stays_whole() {
    let directory = Directory::new();
    let path = directory.file("thesis.tex");
    std::fs::write(&path, "years of work").unwrap();
    let error = refusal(&url(&path, 2));
    assert!(error.contains("data that is not Weir's") && error.contains("overwrite=on"), "{error}");
    assert_eq!(std::fs::read(&path).unwrap(), b"years of work");
    FileStore::open(&FileUrl { overwrite: true, ..url(&path, 2) }).expect("told to");
    assert_eq!(path.metadata().unwrap().len(), 3 * MIB);
}

#[test]
fn a_weir_file_is_taken_again_at_its_size_or_another() {
    let directory = Directory::new();
    let path = directory.file("store");
    assert!(refusal(&FileUrl::new(&path)).contains("how large"), "a new file needs a size");
    assert!(!path.exists());
    for mib in [4, 8, 2] {
        drop(opened(&url(&path, mib)));
        assert_eq!(path.metadata().unwrap().len(), (mib + 1) * MIB);
        let again = opened(&FileUrl::new(&path));
        assert_eq!(u64::from(again.slots()), mib * 256);
    }
}

#[test]
fn what_a_file_has_no_room_for_is_named() {
    let directory = Directory::new();
    let paths = [directory.file("store"), directory.file("other")];
    let mut full = |_, _| Err(std::io::ErrorKind::StorageFull.into());
    let error = FileStore::open_watched(&url(&paths[0], 1), Room::Written, &mut full).unwrap_err();
    assert!(error.to_string().contains("cannot write all the room of "), "{error}");
    assert!(!paths[0].exists(), "half a file is left behind");
    for path in &paths {
        let error = opened(&url(path, 1)).lane(40_000).err().unwrap().to_string();
        assert!(error.contains("a lane of 40000 operations; at most 32768 fit a ring"), "{error}");
    }
    let stripe = StripeUrl { unit: ByteSize(2 * MIB), ..StripeUrl::new(paths) };
    let error = FileStore::open_stripe(&stripe).unwrap_err().to_string();
    assert!(error.contains("1MiB on each member is less than one unit of 2MiB"), "{error}");
}

#[test]
fn what_cannot_be_a_store_is_named() {
    let directory = Directory::new();
    for (path, part) in [
        (directory.file("absent/store"), "directory that does not exist"),
        (directory.file(""), "is a directory"),
        ("/dev/null".into(), "is a character device"),
    ] {
        let error = refusal(&url(&path, 1));
        assert!(error.contains(part) && error.contains(path.to_str().unwrap()), "{error}");
    }
}

#[test]
fn a_file_whose_owner_has_ended_is_waited_for_until_the_kernel_has_let_it_go() {
    let directory = Directory::new();
    let path = directory.file("store");
    // The lock belongs to the process of `flock`, which has ended when the line is printed. The
    // open file stays for two seconds more, as with an io_uring whose writes a slow disk still has.
    let holder = "exec 9>>\"$0\"; flock 9; echo locked; sleep 2";
    let mut shell =
        Command::new("sh").arg("-c").arg(holder).arg(&path).stdout(Stdio::piped()).spawn().unwrap();
    let mut line = [0; 7];
    shell.stdout.as_mut().unwrap().read_exact(&mut line).unwrap();
    // Do not use `opened`, which would try again by itself.
    FileStore::open(&url(&path, 1)).unwrap();
    assert!(shell.wait().unwrap().success());
}

#[test]
fn two_stores_never_share_a_file() {
    let directory = Directory::new();
    let path = directory.file("store");
    let first = FileStore::open(&url(&path, 1)).unwrap();
    let error = refusal(&url(&path, 1));
    assert!(error.contains("in use by another process"), "{error}");
    drop(first);
    opened(&url(&path, 1)); // free again
}

#[test]
fn a_release_gives_the_blocks_back() {
    let directory = Directory::new();
    let path = directory.file("store");
    let store = FileStore::open(&url(&path, 4)).unwrap();
    let bytes = || path.metadata().unwrap().blocks() * 512;
    let before = bytes();
    store.release(1).unwrap();
    let released = bytes();
    // On a fragmented disk the list of the file's extents takes a block more or less.
    assert!(released <= before - MIB + MIB / 16, "{before} bytes before, {released} after");
    store.take(1).unwrap();
    assert!(bytes() >= path.metadata().unwrap().len(), "all its room is there again");
}

#[test]
fn a_file_cut_off_underneath_costs_exactly_the_pages_that_were_cut_off() {
    let directory = Directory::new();
    let path = directory.file("store");
    let store = FileStore::open(&url(&path, 1)).unwrap();
    let mut lane = store.lane(256).unwrap();
    let all = range(0, 256);
    assert!(write(&mut *lane, &all, 1).iter().all(Result::is_ok));
    OpenOptions::new().write(true).open(&path).unwrap().set_len(MIB + 100 * PAGE_SIZE as u64).unwrap();
    for (slot, result) in all.iter().zip(read(&mut *lane, &all)) {
        let expected = if *slot < 100 { Ok(content(Slot(*slot), 1)) } else { Err(Fault::Io(libc::EIO)) };
        assert!(result == expected, "slot {slot}: {:?}", result.map(|_| ()));
    }
}

#[test]
fn a_device_with_bad_blocks_fails_the_operations_on_them_and_no_others() {
    let directory = Directory::new();
    let path = directory.file("disk");
    File::create(&path).unwrap().set_len(4 * MIB).unwrap();
    let Some(device) = Loop::over(&path) else { return };
    let store = opened(&FileUrl::new(&device.0));
    assert_eq!(store.slots(), 3 * 256, "all of the device but the header");
    let unfit = store.unfit_for_swap().unwrap_or_default();
    assert!(!unfit.contains("tmpfs"), "the device's name lies on one, the device does not: {unfit}");
    let mut lane = store.lane(256).unwrap();
    let all = range(0, 256);
    assert!(write(&mut *lane, &all, 1).iter().all(Result::is_ok));
    // The loop driver reports an error for a read past the end of its file.
    OpenOptions::new().write(true).open(&path).unwrap().set_len(MIB + 100 * PAGE_SIZE as u64).unwrap();
    for (slot, result) in all.iter().zip(read(&mut *lane, &all)) {
        let expected = if *slot < 100 { Ok(content(Slot(*slot), 1)) } else { Err(Fault::Io(libc::EIO)) };
        assert!(result == expected, "slot {slot}: {:?}", result.map(|_| ()));
    }
}

#[test]
fn a_write_that_the_disk_takes_only_half_of_reports_each_page_by_itself() {
    let directory = Directory::new();
    let Some(()) = directory.mount_tmpfs(8 * MIB) else { return };
    let path = directory.file("store");
    let store = FileStore::open(&url(&path, 2)).unwrap();
    let mut lane = store.lane(256).unwrap();
    // One program punches pages 40 to 80 out of the file, and another takes their room.
    let file = OpenOptions::new().write(true).open(&path).unwrap();
    let page = PAGE_SIZE as u64;
    let hole = FallocateFlags::PUNCH_HOLE | FallocateFlags::KEEP_SIZE;
    rustix::fs::fallocate(&file, hole, MIB + 40 * page, 40 * page).unwrap();
    let other = File::create(directory.file("other")).unwrap();
    let mut hog = 0;
    while other.write_at(&[1; PAGE_SIZE], hog).is_ok() {
        hog += page;
    }
    let all = range(0, 120);
    for (slot, result) in all.iter().zip(write(&mut *lane, &all, 1)) {
        let expected = if (40..80).contains(slot) { Err(Fault::Io(libc::ENOSPC)) } else { Ok(()) };
        assert_eq!(result, expected, "slot {slot}");
    }
    for slot in (0..40).chain(80..120) {
        assert!(read(&mut *lane, &[slot]) == [Ok(content(Slot(slot), 1))], "slot {slot}");
    }
}

#[test]
fn a_device_that_carries_a_file_system_or_is_in_use_is_refused() {
    let directory = Directory::new();
    let path = directory.file("disk");
    let disk = File::create(&path).unwrap();
    disk.set_len(4 * MIB).unwrap();
    disk.write_all_at(b"\x53\xef", 0x438).unwrap();
    let Some(device) = Loop::over(&path) else { return };
    let error = refusal(&FileUrl::new(&device.0));
    assert!(error.contains("holds ext2, ext3 or ext4") && error.contains("overwrite=on"), "{error}");
    let told = FileUrl { overwrite: true, ..FileUrl::new(&device.0) };
    let store = opened(&told);
    let error = refusal(&told);
    assert!(error.contains("is in use"), "{error}");
    drop(store);
    let mut mark = [0; 2];
    File::open(&path).unwrap().read_exact_at(&mut mark, 0x438).unwrap();
    assert_ne!(&mark, b"\x53\xef", "what was there is not taken for whole again");
    drop(opened(&told));
    soon(|| match refusal(&url(&device.0, 4)) {
        no_room if no_room.contains("has room for 3MiB, 4MiB is asked for") => Ok(()),
        other => Err(other),
    });
    opened(&FileUrl::new(&device.0)); // a Weir device needs no telling
}

#[test]
fn who_may_not_write_is_told_what_he_lacks_and_root_is_not_told_to_be_root() {
    let directory = Directory::new();
    let own = directory.file("own");
    std::fs::create_dir(&own).unwrap();
    std::fs::set_permissions(&own, std::fs::Permissions::from_mode(0o555)).unwrap();
    let url = url(&own.join("store"), 4);
    // The thread acts as root in a systemd unit: a thread has capabilities of its own.
    let without = std::thread::spawn(move || {
        let none = CapabilitySet::empty();
        let none = CapabilitySets { effective: none, permitted: none, inheritable: none };
        set_capabilities(None, none).expect("less is always granted");
        refusal(&url)
    });
    let error = without.join().expect("no panic");
    let is_root = rustix::process::geteuid().is_root();
    assert_eq!(error.contains("CAP_DAC_OVERRIDE"), is_root, "{error}");
    assert_eq!(error.contains("run as root"), !is_root, "{error}");
}

/// Opens the store, and tries again for a short time. A child that another test starts at this
/// moment has this test's descriptors too, until it runs its own program. So a device that was
/// closed here stays in use.
fn opened(url: &FileUrl) -> FileStore {
    soon(|| FileStore::open(url))
}

fn soon<T, E: std::fmt::Debug>(mut open: impl FnMut() -> Result<T, E>) -> T {
    let begun = Instant::now();
    loop {
        match open() {
            Ok(opened) => return opened,
            Err(error) => assert!(begun.elapsed() < Duration::from_secs(60), "{error:?}"),
        }
        std::thread::sleep(Duration::from_millis(20));
    }
}

#[test]
fn the_next_daemon_takes_over_every_page_and_the_lock() {
    let directory = Directory::new();
    let (one, two) = (directory.file("a").display().to_string(), directory.file("b").display().to_string());
    for url in
        [format!("file:{one}?size=2MiB&chunk=1MiB"), format!("stripe:{one},{two}?size=2MiB&unit=64KiB")]
    {
        let url = url.parse().unwrap();
        let first = weir_store::open(&url).unwrap();
        let all = range(0, 512);
        assert!(write(&mut *first.lane(512).unwrap(), &all, 1).iter().all(Result::is_ok));
        let shelf = Arc::new(Shelf::default());
        first.survive().unwrap().keep_with(shelf.clone(), false).unwrap();
        drop(first);
        let error = weir_store::open(&url).expect_err("the keeper holds the lock").to_string();
        assert!(error.contains("in use by another process"), "{error}");
        let mut take = |name: &str| shelf.take(name);
        let second = weir_store::reopen(&url, Room::Reserved, &mut take).unwrap();
        for (slot, page) in read(&mut *second.lane(512).unwrap(), &all).iter().enumerate() {
            assert!(*page == Ok(content(Slot(slot as u32), 1)), "slot {slot}");
        }
        let error = weir_store::reopen(&url, Room::Reserved, &mut take).unwrap_err().to_string();
        assert!(error.contains("does not hold"), "everything was taken: {error}");
        drop(second);
        soon(|| weir_store::open(&url)); // nobody holds the lock any more
    }
}

#[test]
fn a_kept_file_of_another_size_is_refused() {
    let directory = Directory::new();
    let path = directory.file("store");
    let first = FileStore::open(&FileUrl { encrypt: false, ..url(&path, 1) }).unwrap();
    let shelf = Arc::new(Shelf::default());
    first.keep_with(shelf.clone(), false).unwrap();
    let larger = FileUrl { encrypt: false, ..url(&path, 2) };
    let error =
        FileStore::reopen(&larger, Room::Reserved, &mut |name| shelf.take(name)).unwrap_err().to_string();
    assert!(error.contains("it holds 1MiB, the URL asks for 2MiB"), "{error}");
}

/// Content that no disk may show: 32 bytes, repeated over every page that the tests below write.
const PLANTED: &[u8; 32] = b"the secret nobody may ever find.";

fn planted_page() -> PageBytes {
    std::array::from_fn(|at| PLANTED[at % PLANTED.len()])
}

fn shows_the_secret(path: &Path) -> bool {
    // Half of it is enough to find it at any alignment.
    let needle = &PLANTED[..16];
    std::fs::read(path).unwrap().windows(needle.len()).any(|window| window == needle)
}

#[test]
fn a_killed_process_leaves_nothing_readable_in_the_file() {
    for encrypt in [true, false] {
        let directory = Directory::new();
        let path = directory.file("store");
        let mut child = Command::new(std::env::current_exe().unwrap())
            .args(["--exact", "writes_the_secret_until_it_is_killed", "--nocapture"])
            .env("WEIR_TEST_SECRET_IN", FileUrl { encrypt, ..url(&path, 8) }.to_string())
            .stdout(Stdio::piped())
            .spawn()
            .unwrap();
        let mut seen = String::new();
        let mut output = std::io::BufReader::new(child.stdout.take().unwrap());
        while !seen.contains("round 3") {
            assert!(std::io::BufRead::read_line(&mut output, &mut seen).unwrap() > 0, "{seen}");
        }
        child.kill().unwrap();
        child.wait().unwrap();
        // Without encryption it is there, so the search would find it.
        assert_eq!(shows_the_secret(&path), !encrypt, "encrypt: {encrypt}");
    }
}

/// The other half of the test above. Run by itself, it is one round that reads back what it wrote.
#[test]
fn writes_the_secret_until_it_is_killed() {
    let told = std::env::var("WEIR_TEST_SECRET_IN").ok();
    // Only a process that is not killed has a directory here: a killed one would leave it behind.
    let directory = told.is_none().then(Directory::new);
    let url = match &told {
        Some(url) => match url.parse().unwrap() {
            weir_store::StoreUrl::File(url) => url,
            other => panic!("{other} is no file"),
        },
        None => url(&directory.as_ref().expect("made above").file("store"), 8),
    };
    let store = FileStore::open(&url).unwrap();
    let mut lane = store.lane(64).unwrap();
    for round in 1.. {
        for first in (0..store.slots()).step_by(64) {
            let slots = range(first, first + 64);
            let planted = planted_page();
            let written = batch(&mut *lane, &slots, |lane, at| lane.write(at, Slot(first + at), &planted));
            assert!(written.iter().all(Result::is_ok));
            assert!(read(&mut *lane, &slots).iter().all(|page| *page == Ok(planted)));
        }
        println!("round {round}");
        if told.is_none() {
            return;
        }
    }
}
