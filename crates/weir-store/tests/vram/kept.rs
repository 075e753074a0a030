//! A store that is reopened from what a keeper holds: with every page, at once through the window,
//! and with CUDA as soon as that is open.

use super::fake_cuda::{BatchCopy, FakeCuda};
use super::fake_nvml::FakeNvml;
use super::{CARD, drivers, memory, page, read, report, soon, url, write};
use rustix::process::{Resource, Rlimit, getrlimit, setrlimit};
use std::path::Path;
use std::process::Command;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex};
use std::time::Instant;
use weir_core::{Page, Slot};
use weir_store::conformance::Shelf;
use weir_store::vram::{Counters, Drivers, Target, VramStore, VramUrl};
use weir_store::{Condition, Fault, Joined, Lane, Progress, State, Store, Survive};

/// Reopens the store as a new process does; the shelf still holds its own copies.
fn reopen(shelf: &Shelf, url: &VramUrl, drivers: &Drivers) -> Result<VramStore, weir_store::OpenError> {
    VramStore::reopen_with(url, drivers, &mut |name| shelf.copy(name))
}

#[test]
fn a_store_is_found_again_by_the_chunks_that_were_kept() {
    let cuda = FakeCuda::build(BatchCopy::Cuda13);
    let no_cuda = Path::new("/no/libcuda.so.1");
    for (url, library) in [
        (url(""), cuda.path()),
        (url("&path=mapped"), no_cuda),
        (url("&path=ring&ring=on"), cuda.path()),
        (url("&window=off"), no_cuda),
    ] {
        let drivers = drivers(library);
        let shelf = Arc::new(Shelf::default());
        let store = VramStore::open_with(&url, &drivers).expect("a store");
        store.keep_with(shelf.clone(), false).expect("kept");
        assert_eq!(shelf.names(), ["chunk.0.0", "chunk.0.1", "chunk.0.2", "chunk.0.3", "plan"]);
        let mut lane = store.lane(4).expect("a lane");
        for slot in 0..store.slots() {
            write(lane.as_mut(), slot, &page(slot)).expect("written");
        }
        // One chunk is released, so it is not found again; one is taken later, and is.
        memory(&store).release(1).expect("released");
        memory(&store).release(2).expect("released");
        memory(&store).take(2).expect("taken");
        write(lane.as_mut(), 2 * 256, &page(77)).expect("written");
        assert_eq!(shelf.names(), ["chunk.0.0", "chunk.0.2", "chunk.0.3", "plan"]);
        drop(lane);
        drop(store);
        for generation in 0..3 {
            let again = reopen(&shelf, &url, &drivers).expect("the store again");
            assert_eq!(again.slots(), 1024);
            let mut lane = again.lane(4).expect("a lane");
            for slot in (0..256).chain(768..1024) {
                assert_eq!(
                    read(lane.as_mut(), slot),
                    Ok(page(slot)),
                    "{url} slot {slot}, generation {generation}"
                );
            }
            assert_eq!(read(lane.as_mut(), 512), Ok(page(77)));
            assert_eq!(read(lane.as_mut(), 256), Err(Fault::Lost));
            again.keep_with(shelf.clone(), true).expect("kept");
            if generation == 0 {
                memory(&again).take(1).expect("taken");
                assert_eq!(shelf.names().len(), 5);
                write(lane.as_mut(), 300, &page(300)).expect("written");
                assert_eq!(read(lane.as_mut(), 300), Ok(page(300)));
                drop(lane);
                memory(&again).release(1).expect("released");
            }
        }
        // Told to end, the store leaves nothing readable.
        let last = reopen(&shelf, &url, &drivers).expect("the store again");
        last.keep_with(shelf.clone(), true).expect("kept");
        last.forget();
        drop(last);
        let after = reopen(&shelf, &url, &drivers).expect("the store again");
        let mut lane = after.lane(4).expect("a lane");
        assert_eq!(read(lane.as_mut(), 3), Ok(Page::zeroed()));
    }
}

#[test]
fn chunks_of_cuda_alone_on_two_cards_are_found_again() {
    let cuda = FakeCuda::build(BatchCopy::Cuda13);
    let drivers = drivers(cuda.path());
    let mut url = url("");
    url.target = Target::All;
    let store = VramStore::open_with(&url, &drivers).expect("two fake GPUs");
    let shelf = Arc::new(Shelf::default());
    store.keep_with(shelf.clone(), false).expect("kept");
    let mut lane = store.lane(4).expect("a lane");
    (0..1024).for_each(|slot| write(lane.as_mut(), slot, &page(slot)).expect("written"));
    drop(lane);
    drop(store);
    let again = reopen(&shelf, &url, &drivers).expect("the store again");
    let mut lane = again.lane(4).expect("a lane");
    assert!((0..1024).all(|slot| read(lane.as_mut(), slot) == Ok(page(slot))));
}

#[test]
fn a_process_that_may_open_no_more_files_says_so() {
    const CHILD: &str = "WEIR_TEST_OPENS_NO_MORE_FILES";
    if std::env::var_os(CHILD).is_none() {
        // The limit is the whole process's.
        let name = "kept::a_process_that_may_open_no_more_files_says_so";
        let mut child = Command::new(std::env::current_exe().expect("it lies somewhere"));
        let output = child.args(["--exact", name]).env(CHILD, "1").output().expect("it runs");
        assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stdout));
        return;
    }
    let cuda = FakeCuda::build(BatchCopy::Cuda13);
    let (url, drivers) = (url(""), drivers(cuda.path()));
    let shelf = left_behind(&url, &drivers);
    let opened = VramStore::reopen_with(&url, &drivers, &mut |name| {
        let fd = shelf.copy(name);
        if name.starts_with("chunk.") {
            let none = Rlimit { current: Some(0), ..getrlimit(Resource::Nofile) };
            setrlimit(Resource::Nofile, none).expect("less is always granted");
        }
        fd
    });
    let error = opened.expect_err("no descriptor is left").to_string();
    let why = "chunk 0 cannot be imported: no file descriptor is left: raise the limit on open files";
    assert!(error.contains(why), "{error}");
}

/// A store whose process has ended, with every page written; returns what a keeper would hold.
fn left_behind(url: &VramUrl, drivers: &Drivers) -> Arc<Shelf> {
    let store = VramStore::open_with(url, drivers).expect("a store");
    let shelf = Arc::new(Shelf::default());
    store.keep_with(shelf.clone(), false).expect("kept");
    let mut lane = store.lane(4).expect("a lane");
    (0..1024).for_each(|slot| write(lane.as_mut(), slot, &page(slot)).expect("written"));
    shelf
}

/// Reopens the store with its lanes, while CUDA waits in `cuInit`. It goes no further before the
/// lanes are there: they would otherwise meet the errors that a test injects into later calls.
fn opening<const LANES: usize>(
    cuda: &FakeCuda,
    shelf: &Arc<Shelf>,
    url: &VramUrl,
    drivers: &Drivers,
) -> (VramStore, [Box<dyn Lane>; LANES]) {
    cuda.hold("cuInit");
    let store = reopen(shelf, url, drivers).expect("the store again");
    store.keep_with(shelf.clone(), true).expect("kept");
    let lanes = std::array::from_fn(|_| store.lane(4).expect("a lane"));
    (store, lanes)
}

fn holds_every_page(lane: &mut dyn Lane) -> bool {
    (0..1024).all(|slot| read(lane, slot) == Ok(page(slot)))
}

fn counters(store: &VramStore) -> Counters {
    store.gpus()[0].counters()
}

/// The report once the later parts are open.
fn outcome(store: &VramStore) -> Joined {
    let told = Arc::new(Mutex::new(None));
    let tell = Arc::clone(&told);
    report(store).when_joined(Arc::new(move |joined| *tell.lock().unwrap() = Some(joined.clone())));
    soon("over", || told.lock().unwrap().is_some());
    let joined = told.lock().unwrap().take();
    joined.expect("just seen")
}

#[test]
fn pages_are_served_while_cuda_is_still_being_opened_and_by_it_once_it_is() {
    for (call, options) in [
        ("cuInit", "&path=engine&ring=off"),
        ("cuDevicePrimaryCtxRetain", "&path=ring&ring=on"),
        ("cuImportExternalMemory", "&path=engine&ring=off"),
        ("cuModuleLoadData", "&path=ring&ring=on"),
        ("cuMemHostAlloc", "&path=engine&ring=off"),
    ] {
        let cuda = FakeCuda::build(BatchCopy::Cuda13);
        let drivers = drivers(cuda.path());
        let url = url(options);
        let shelf = left_behind(&url, &drivers);
        let (store, [mut lane]) = opening(&cuda, &shelf, &url, &drivers);
        cuda.hold(call);
        assert!(holds_every_page(lane.as_mut()), "{call}");
        write(lane.as_mut(), 7, &page(7777)).expect("written");
        assert_eq!((store.state(0), read(lane.as_mut(), 7)), (State::Online, Ok(page(7777))));
        let by = counters(&store).pages;
        assert!(by[0] >= 1026 && by[1..] == [0, 0], "{call}: {by:?}");
        // Chunks are released and taken meanwhile.
        memory(&store).release(1).expect("released");
        memory(&store).release(2).expect("released");
        if call != "cuImportExternalMemory" {
            memory(&store).take(1).expect("taken");
            write(lane.as_mut(), 300, &page(300)).expect("written");
        }
        cuda.hold("");
        let joined = outcome(&store);
        assert_eq!(joined.missing, None, "{call}");
        assert!(joined.stages.iter().any(|stage| stage.0 == "cuda"), "{joined:?}");
        let way = if options.contains("ring=on") { 2 } else { 1 };
        soon("by the way that was asked for", || {
            assert_eq!(read(lane.as_mut(), 7), Ok(page(7777)));
            counters(&store).pages[way] > 0
        });
        let mut later = store.lane(4).expect("a lane");
        for slot in (8..256).chain(768..1024) {
            assert_eq!(read(later.as_mut(), slot), Ok(page(slot)), "{call}");
        }
        assert_eq!(read(lane.as_mut(), 600), Err(Fault::Lost), "{call}: given back meanwhile");
        if call != "cuImportExternalMemory" {
            assert_eq!(read(later.as_mut(), 300), Ok(page(300)), "{call}: taken meanwhile");
        }
    }
}

#[test]
fn a_driver_that_fails_behind_the_first_operations_leaves_the_window() {
    for call in [
        "cuInit",
        "cuDevicePrimaryCtxRetain",
        "cuImportExternalMemory",
        "cuExternalMemoryGetMappedBuffer",
        "cuMemHostAlloc",
        "cuStreamCreateWithPriority",
        "cuEventCreate",
    ] {
        // The errors are refused, out of memory, and one after which the context is gone: none of
        // them affects the window.
        for code in [1, 2, 999] {
            let cuda = FakeCuda::build(BatchCopy::Cuda13);
            let drivers = drivers(cuda.path());
            let url = url("&path=engine&ring=off");
            let shelf = left_behind(&url, &drivers);
            // The error hits the second chunk, lane or event, if there are several.
            let skip = if call.starts_with("cuInit") || call.starts_with("cuDevice") { 0 } else { 1 };
            cuda.fail(call, skip, -1, code);
            let (store, mut lanes) = opening::<2>(&cuda, &shelf, &url, &drivers);
            cuda.hold("");
            let why = outcome(&store).missing.expect("something is missing");
            assert!(why.contains(&format!("CUDA error {code}")) || why.contains("answered"), "{call}: {why}");
            assert!(lanes.iter_mut().all(|lane| holds_every_page(lane.as_mut())), "{call}");
            assert_eq!(store.state(0), State::Online, "{call} answered {code}");
            let by = counters(&store).pages;
            assert!(by[0] >= 2048 && by[1..] == [0, 0], "{call}: {by:?}");
            // Nothing holds memory that was given back.
            memory(&store).release(1).expect("released");
            memory(&store).take(1).expect("taken");
            write(lanes[0].as_mut(), 256, &page(1)).expect("written");
            assert_eq!(read(lanes[1].as_mut(), 256), Ok(page(1)));
            let mut later = store.lane(4).expect("a lane");
            assert_eq!(read(later.as_mut(), 9), Ok(page(9)));
        }
    }
}

#[test]
fn a_store_can_be_closed_while_cuda_is_being_opened() {
    for call in ["cuInit", "cuImportExternalMemory", "cuMemHostAlloc"] {
        let cuda = FakeCuda::build(BatchCopy::Cuda13);
        let drivers = drivers(cuda.path());
        let url = url("&path=engine&ring=off");
        let shelf = left_behind(&url, &drivers);
        let (store, [mut lane]) = opening(&cuda, &shelf, &url, &drivers);
        cuda.hold(call);
        assert_eq!(read(lane.as_mut(), 3), Ok(page(3)));
        let lanes_end = Arc::new(AtomicBool::new(false));
        std::thread::scope(|scope| {
            let ended = Arc::clone(&lanes_end);
            let closing = scope.spawn(move || {
                drop(lane);
                ended.store(true, Ordering::Release);
                store.forget();
                drop(store);
            });
            soon("closed but for the card", || lanes_end.load(Ordering::Acquire));
            cuda.hold("");
            closing.join().expect("no panic");
        });
        // Told to end, it left nothing readable, whatever was half open.
        let after = reopen(&shelf, &url, &drivers).expect("the store again");
        let mut lane = after.lane(4).expect("a lane");
        assert_eq!(read(lane.as_mut(), 3), Ok(Page::zeroed()), "{call}");
    }
}

#[test]
fn whoever_asks_for_the_head_room_is_told_when_the_library_is_open() {
    let nvml = FakeNvml::build(CARD);
    let drivers = Drivers { nvml: nvml.path().into(), ..drivers(Path::new("/no/libcuda.so.1")) };
    let url = url("");
    let shelf = left_behind(&url, &drivers);
    let store = reopen(&shelf, &url, &drivers).expect("the store again");
    assert!(memory(&store).headroom(0).is_some());
}

#[test]
fn by_cuda_alone_what_is_kept_waits_for_another_process_and_is_whole_there() {
    let cuda = FakeCuda::build(BatchCopy::Cuda13);
    let drivers = drivers(cuda.path());
    let mut url = url("");
    url.target = Target::Index(0);
    let store = VramStore::open_with(&url, &drivers).expect("a store");
    let shelf = Arc::new(Shelf::default());
    store.keep_with(shelf.clone(), false).expect("kept");
    let mut lane = store.lane(16).expect("a lane");
    (0..1024).for_each(|slot| write(lane.as_mut(), slot, &page(slot)).expect("written"));
    let wants = Arc::new(AtomicBool::new(false));
    let told = Arc::clone(&wants);
    report(&store).when_changed(Arc::new(move |it: &Condition| {
        told.store(it.wants_another_process, Ordering::Release);
    }));
    for number in 0..8 {
        assert_eq!(lane.write(number, Slot(number * 3), &page(number * 3)), Progress::Queued);
    }
    lane.submit();
    cuda.die(719, false);
    // No operation under way is refused before another process had time to take over, and no more
    // are taken.
    lane.poll(Instant::now(), &mut |done| panic!("answered: {done:?}"));
    assert_eq!(lane.write(9, Slot(1000), &page(1)), Progress::Full);
    soon("asked for another process", || wants.load(Ordering::Acquire));
    lane.poll(Instant::now(), &mut |done| panic!("answered: {done:?}"));
    // Act as a process that ends: nothing of it is dropped. Releasing the context is what its end
    // does to the driver.
    Box::leak(Box::new((lane, store)));
    let next = FakeCuda::build(BatchCopy::Cuda13);
    let drivers = super::drivers(next.path());
    let again = reopen(&shelf, &url, &drivers).expect("the store again");
    assert!(holds_every_page(again.lane(4).expect("a lane").as_mut()));
}

#[test]
fn a_card_that_has_left_the_bus_is_lost_at_once_and_costs_no_process() {
    let (cuda, nvml) = (FakeCuda::build(BatchCopy::Cuda13), FakeNvml::build(CARD));
    let mut url = url("");
    url.target = Target::Index(0);
    let shelf = left_behind(&url, &drivers(cuda.path()));
    let drivers = Drivers { nvml: nvml.path().into(), ..drivers(cuda.path()) };
    let store = reopen(&shelf, &url, &drivers).expect("the store again");
    store.keep_with(shelf, true).expect("kept");
    let told = Arc::new(Mutex::new(Vec::new()));
    let tell = Arc::clone(&told);
    report(&store).when_changed(Arc::new(move |it: &Condition| tell.lock().unwrap().push(it.clone())));
    let mut lane = store.lane(4).expect("a lane");
    write(lane.as_mut(), 1, &page(1)).expect("written");
    std::fs::remove_file(nvml.path().with_extension("card")).expect("removed");
    cuda.die(719, true);
    assert_eq!(lane.write(0, Slot(1), &page(2)), Progress::Queued);
    lane.submit();
    let (mut result, since) = (None, std::time::Instant::now());
    while result.is_none() {
        lane.poll(Instant::now(), &mut |done| result = Some(done.result));
        assert!(since.elapsed() < super::PATIENCE, "no answer");
    }
    assert_eq!((result, store.state(0)), (Some(Err(Fault::Lost)), State::Lost));
    soon("told", || !told.lock().unwrap().is_empty());
    let told = told.lock().unwrap();
    assert!(told.iter().all(|it| it.state == State::Lost && !it.wants_another_process), "{told:?}");
}

#[test]
fn a_failed_take_over_leaves_the_pages_for_the_next() {
    let cuda = FakeCuda::build(BatchCopy::Cuda13);
    // The store uses CUDA alone, since otherwise the window would be left.
    let (alone, mut there) = (drivers(cuda.path()), url(""));
    there.target = Target::Index(0);
    let shelf = left_behind(&there, &alone);
    cuda.fail("cuMemImportFromShareableHandle", 1, 1, 1);
    let why = reopen(&shelf, &there, &alone).expect_err("an import failed").to_string();
    assert!(why.contains("chunk 1 cannot be imported"), "{why}");
    let again = reopen(&shelf, &there, &alone).expect("the store again");
    assert!(holds_every_page(again.lane(4).expect("a lane").as_mut()));

    let nvml = FakeNvml::build(CARD);
    let good = Drivers { nvml: nvml.path().into(), ..alone };
    let url = url("");
    let shelf = left_behind(&url, &good);
    // An upgrade has installed other libraries than those of the loaded module.
    let version = Path::new(env!("CARGO_TARGET_TMPDIR")).join(format!("version-{}", std::process::id()));
    std::fs::write(&version, "NVRM version: NVIDIA UNIX x86_64 Kernel Module  580.159.04  Sun Nov 1\n")
        .unwrap();
    let upgraded = Drivers { loaded: version.clone(), ..good.clone() };
    let why = reopen(&shelf, &url, &upgraded).expect_err("versions differ").to_string();
    assert!(why.contains("580.159.04") && why.contains("0.fake"), "{why}");
    std::fs::remove_file(version).unwrap();
    let why = VramStore::reopen_with(&url, &good, &mut |_| None).expect_err("nothing kept").to_string();
    assert!(why.contains("does not hold its plan"), "{why}");
    let again = reopen(&shelf, &url, &good).expect("the store again");
    let mut lane = again.lane(4).expect("a lane");
    assert!(holds_every_page(lane.as_mut()));
}
