//! VRAM without a GPU. The mapped path uses Mesa's software renderer. The engine and the ring use a
//! fake CUDA driver that imports the renderer's memory, and each error that a real driver may
//! return.

mod death;
#[path = "../fake_cuda/mod.rs"]
mod fake_cuda;
#[path = "../fake_nvml/mod.rs"]
mod fake_nvml;
mod kept;

use fake_cuda::{BatchCopy, FakeCuda};
use fake_nvml::{Card, FakeNvml};
use std::os::unix::fs::FileExt;
use std::path::Path;
use std::sync::Arc;
use std::time::{Duration, Instant};
use weir_core::{ByteSize, PAGE_SIZE, Page, PageBytes, Slot};
use weir_store::vram::{Drivers, VramStore, VramUrl};
use weir_store::{
    Done, Fault, Lane, OpenErrorKind, Progress, Reclaim, Report, State, Store, StoreUrl, conformance,
};

/// Time limit for actions that take almost no time, on a machine with other work.
const PATIENCE: Duration = Duration::from_secs(60);

/// The store's interface for giving memory back.
fn memory(store: &VramStore) -> &dyn Reclaim {
    store.reclaim().expect("cards give memory back")
}

/// The store's interface for reports of its cards.
fn report(store: &VramStore) -> &dyn Report {
    store.report().expect("cards tell how they are")
}

fn url(options: &str) -> VramUrl {
    // The renderer and the fake driver's threads answer when the machine lets them run.
    weir_store::vram::set_answer_limit(Duration::from_secs(15));
    let url = format!("vram:lavapipe?size=4MiB&chunk=1MiB{options}");
    match url.parse().expect("a URL") {
        StoreUrl::Vram(url) => url,
        other => panic!("{other} is not vram:"),
    }
}

/// Drivers with that libcuda, and no management library.
fn drivers(cuda: &Path) -> Drivers {
    Drivers { cuda: cuda.into(), nvml: "/no/libnvidia-ml.so.1".into(), loaded: "/no/version".into() }
}

/// A store with the fake driver under it, which must outlive it.
struct Faked {
    store: VramStore,
    cuda: FakeCuda,
}

fn faked(options: &str, batch: BatchCopy) -> Faked {
    let cuda = FakeCuda::build(batch);
    let store = VramStore::open_with(&url(options), &drivers(cuda.path()))
        .expect("lavapipe, from mesa-vulkan-drivers");
    Faked { store, cuda }
}

fn shared(options: &str, batch: BatchCopy) -> Arc<dyn Store> {
    Arc::new(faked(options, batch).store)
}

conformance!(mapped: Arc::new(VramStore::open_with(&url(""), &drivers(Path::new("/no/libcuda.so.1"))).unwrap()) as Arc<dyn Store>);
conformance!(transfer_queue: Arc::new(blind()) as Arc<dyn Store>);
conformance!(engine_of_cuda_13: shared("&path=engine", BatchCopy::Cuda13));
conformance!(engine_of_cuda_12: shared("&path=engine", BatchCopy::Cuda12));
conformance!(engine_without_batches: shared("&path=engine", BatchCopy::None));
conformance!(ring: shared("&path=ring&ring=on", BatchCopy::Cuda13));
conformance!(by_measurement: shared("", BatchCopy::Cuda13));

conformance!(striped_over_two_gpus: Arc::new(striped()) as Arc<dyn Store>);

/// A store on a card whose memory the processor does not see, without CUDA.
fn blind() -> VramStore {
    let store =
        VramStore::open_with(&url("&window=off"), &drivers(Path::new("/no/libcuda.so.1"))).expect("a store");
    assert!(store.gpus()[0].describe().ends_with("by engine"), "{}", store.gpus()[0].describe());
    store
}

/// A store on two GPUs by CUDA alone, with two chunks each.
fn striped() -> VramStore {
    let cuda = FakeCuda::build(BatchCopy::Cuda13);
    let mut url = url("");
    url.target = weir_store::vram::Target::All;
    let store = VramStore::open_with(&url, &drivers(cuda.path())).expect("two fake GPUs");
    assert_eq!((store.gpus().len(), store.slots()), (2, 1024));
    store
}

fn page(seed: u32) -> Page {
    let mut page = Page::zeroed();
    for (at, word) in page.chunks_exact_mut(4).enumerate() {
        word.copy_from_slice(&seed.wrapping_mul(0x9e37_79b9).wrapping_add(at as u32).to_le_bytes());
    }
    page
}

/// Runs one operation to its end.
fn complete(
    lane: &mut dyn Lane,
    mut queue: impl FnMut(&mut dyn Lane) -> Progress,
) -> Result<Option<PageBytes>, Fault> {
    match queue(lane) {
        Progress::Done(result) => return result.map(|()| None),
        Progress::Full => return Err(Fault::Full),
        Progress::Queued => lane.submit(),
    }
    let since = Instant::now();
    let mut outcome = None;
    while outcome.is_none() {
        lane.poll(Instant::now(), &mut |done: Done<'_>| {
            outcome = Some(done.result.map(|()| done.page.copied()));
        });
        assert!(since.elapsed() < PATIENCE, "no answer");
    }
    outcome.expect("just filled")
}

fn write(lane: &mut dyn Lane, slot: u32, content: &PageBytes) -> Result<(), Fault> {
    complete(lane, |lane| lane.write(1, Slot(slot), content)).map(|_| ())
}

/// A page whose debug text shows only its first bytes.
fn read(lane: &mut dyn Lane, slot: u32) -> Result<Page, Fault> {
    let mut here = [0; PAGE_SIZE];
    let there = complete(lane, |lane| lane.read(2, Slot(slot), &mut here))?;
    Ok(Page(there.unwrap_or(here)))
}

/// A lane whose operations use `path` ("ring" waits until the kernel is there).
fn lane(faked: &Faked) -> Box<dyn Lane> {
    let mut lane = faked.store.lane(32).expect("a lane");
    if faked.store.name().contains("ring=on") {
        let served = || faked.store.gpus()[0].counters().pages[2];
        let before = served();
        soon("served by the kernel", || {
            let _ = read(lane.as_mut(), 0);
            served() > before
        });
    }
    lane
}

#[test]
fn a_page_written_through_the_window_is_read_by_the_engine_and_the_other_way_round() {
    let cuda = FakeCuda::build(BatchCopy::Cuda13);
    let mapped = VramStore::open_with(&url("&path=mapped"), &drivers(cuda.path())).expect("a store");
    let unwanted = ("engine", "not wanted with path=mapped".to_owned());
    assert_eq!(report(&mapped).conditions()[0].missing, [unwanted]);
    let gpu = &mapped.gpus()[0];
    let fd = gpu.export(0).expect("an export").expect("a chunk");
    let mut by_window = mapped.lane(1).expect("a lane");
    write(by_window.as_mut(), 3, &page(1)).expect("written");
    // The exported memory is the same memory: lavapipe's data begins one page into its file.
    let file = std::fs::File::from(fd);
    let mut seen = page(0);
    file.read_exact_at(&mut seen[..], 4096 * 4).expect("readable");
    assert_eq!(seen, page(1));
    file.write_all_at(&page(2)[..], 4096 * 4).expect("writable");
    assert_eq!(read(by_window.as_mut(), 3), Ok(page(2)));
}

#[test]
fn nothing_readable_is_left_in_a_released_chunk_or_after_the_end() {
    let cuda = FakeCuda::build(BatchCopy::Cuda13);
    let store = VramStore::open_with(&url(""), &drivers(cuda.path())).expect("a store");
    // A duplicate descriptor keeps the memory after its owner dropped it, and shows what was left
    // in it.
    let kept = [0, 1].map(|chunk| {
        std::fs::File::from(store.gpus()[0].export(chunk).expect("an export").expect("a chunk"))
    });
    let mut lane = store.lane(1).expect("a lane");
    for slot in 0..2 * memory(&store).chunk_slots() {
        write(lane.as_mut(), slot, &page(slot)).expect("written");
    }
    let zeros = |file: &std::fs::File| {
        let mut bytes = vec![1; 1 << 20];
        file.read_exact_at(&mut bytes, 4096).expect("readable");
        bytes.iter().all(|&byte| byte == 0)
    };
    assert!(kept.iter().all(|file| !zeros(file)), "the pages are there while the store holds them");
    memory(&store).release(0).expect("released");
    assert!(zeros(&kept[0]) && !zeros(&kept[1]));
    drop(lane);
    drop(store);
    assert!(zeros(&kept[1]));
}

#[test]
fn neighbours_in_a_batch_become_one_copy() {
    let faked = faked("&path=engine&ring=off", BatchCopy::Cuda13);
    let mut lane = lane(&faked);
    let before = faked.cuda.copies();
    for slot in 0..32 {
        assert_eq!(lane.write(slot, Slot(slot), &page(slot)), Progress::Queued);
    }
    lane.submit();
    let mut written = 0;
    while written < 32 {
        lane.poll(Instant::now(), &mut |done: Done<'_>| {
            assert_eq!(done.result, Ok(()));
            written += 1;
        });
    }
    let after = faked.cuda.copies();
    assert_eq!((after[0] - before[0], after[1] - before[1]), (1, 0), "32 neighbours are one plain copy");
    assert!((0..32).all(|slot| read(lane.as_mut(), slot) == Ok(page(slot))));
}

#[test]
fn a_run_is_one_operation_that_ends_with_its_chunk_and_with_the_staging_memory() {
    let faked = faked("&path=engine&ring=off", BatchCopy::Cuda13);
    let mut lane = faked.store.lane(64).expect("a lane");
    let (chunk, pages) = (
        faked.store.reclaim().expect("by chunks").chunk_slots(),
        (0..64).map(|seed| page(seed).0).collect::<Vec<_>>(),
    );
    let before = faked.cuda.copies();
    assert_eq!(lane.write_run(1, Slot(chunk - 40), &pages), 40, "up to the end of the chunk");
    assert_eq!(lane.write_run(2, Slot(chunk), &pages[40..]), 24, "up to the end of the staging memory");
    assert_eq!((lane.in_flight(), lane.run_room(true)), (64, 0));
    assert_eq!(lane.write_run(3, Slot(0), &pages), 0);
    lane.submit();
    assert_eq!(drain(lane.as_mut(), 64), 64, "each page is answered");
    let written = faked.cuda.copies();
    assert_eq!((written[0] - before[0], written[1] - before[1]), (2, 0), "a copy for each chunk");
    assert_eq!(lane.read_run(4, Slot(chunk - 40), 64), 40);
    assert_eq!(lane.read_run(5, Slot(chunk), 24), 24);
    lane.submit();
    let mut expected = pages.iter();
    while lane.in_flight() > 0 {
        lane.poll(Instant::now(), &mut |done: Done<'_>| assert_eq!(done.page, expected.next()));
    }
    assert_eq!(expected.len(), 0);
    assert_eq!(lane.read_run(6, Slot(faked.store.slots()), 1), 0, "past the end of the store");
}

/// Writes `pages` slots, `stride` apart so that none are neighbours, all in flight together; then
/// reads them.
fn scattered(lane: &mut dyn Lane, pages: u32, stride: u32) {
    for number in 0..pages {
        let progress = lane.write(number, Slot(number * stride), &page(number));
        assert_eq!(progress, Progress::Queued);
    }
    lane.submit();
    drain(lane, pages);
    assert!((0..pages).all(|number| read(lane, number * stride) == Ok(page(number))));
}

#[test]
fn a_call_names_no_more_copies_than_the_url_allows() {
    for (options, most) in [("&engine_batch=200", 200), ("&engine_batch=16", 16)] {
        for batch in [BatchCopy::Cuda13, BatchCopy::Cuda12] {
            let faked = faked(&format!("&path=engine&ring=off{options}"), batch);
            // With one copy more the channel dies, as the real driver's does after some hundred.
            faked.cuda.limit_batches(most);
            let mut lane = faked.store.lane(256).expect("a lane");
            scattered(lane.as_mut(), 256, 3);
            assert_eq!(faked.cuda.largest_batch(), most.min(256), "{options} by {batch:?}");
            assert_eq!(faked.store.state(0), State::Online);
        }
    }
}

#[test]
fn writes_are_plain_copies_and_reads_batches_of_at_most_64_unless_the_url_says_otherwise() {
    let faked = faked("&path=engine&ring=off", BatchCopy::Cuda13);
    let mut lane = faked.store.lane(256).expect("a lane");
    let before = faked.cuda.copies();
    for number in 0..200 {
        assert_eq!(lane.write(number, Slot(number * 3), &page(number)), Progress::Queued);
    }
    lane.submit();
    let mut done = drain(lane.as_mut(), 200);
    let written = faked.cuda.copies();
    assert_eq!(
        (written[0] - before[0], written[1] - before[1]),
        (200, 0),
        "a call for each copy to the card"
    );
    let mut nowhere = page(0);
    for number in 0..200 {
        assert_eq!(lane.read(number, Slot(number * 3), &mut nowhere), Progress::Queued);
    }
    lane.submit();
    done += drain(lane.as_mut(), 200);
    let after = faked.cuda.copies();
    assert_eq!((after[1] - written[1], after[2] - written[2], done), (4, 200, 400), "64, 64, 64 and 8");
    assert_eq!(faked.cuda.largest_batch(), 64);
    // Mix both: copies to the card are never in a call that names several.
    for number in 0..100 {
        assert_eq!(lane.write(number, Slot(number * 6), &page(number)), Progress::Queued);
        assert_eq!(lane.read(number + 100, Slot(number * 6 + 3), &mut nowhere), Progress::Queued);
    }
    lane.submit();
    drain(lane.as_mut(), 200);
    let mixed = faked.cuda.copies();
    assert_eq!((mixed[0] - after[0], mixed[2] - after[2]), (100, 100));
}

/// Polls until this many operations are done, all with success.
fn drain(lane: &mut dyn Lane, operations: u32) -> u32 {
    let (mut done, since) = (0, Instant::now());
    while done < operations {
        lane.poll(Instant::now(), &mut |it: Done<'_>| {
            assert_eq!(it.result, Ok(()));
            done += 1;
        });
        assert!(since.elapsed() < PATIENCE, "no answer");
    }
    done
}

#[test]
fn with_batches_of_one_every_copy_is_a_call_of_its_own() {
    let faked = faked("&path=engine&ring=off&engine_batch=1", BatchCopy::Cuda13);
    let mut lane = faked.store.lane(64).expect("a lane");
    let before = faked.cuda.copies();
    scattered(lane.as_mut(), 64, 3);
    let after = faked.cuda.copies();
    assert_eq!((after[0] - before[0], after[1]), (128, 0), "64 written and 64 read, and no call for several");
}

#[test]
fn no_copy_reaches_across_two_chunks() {
    let cuda = FakeCuda::build(BatchCopy::Cuda13);
    let mut url = url("&ring=off&engine_batch=8");
    url.target = weir_store::vram::Target::Index(0);
    // Chunks are as large as the driver's granularity, so that their addresses are neighbours.
    (url.chunk, url.size) = (ByteSize(2 << 20), Some(ByteSize(8 << 20)));
    let store = VramStore::open_with(&url, &drivers(cuda.path())).expect("a store by CUDA alone");
    let mut lane = store.lane(8).expect("a lane");
    for boundary in [512, 1024, 1536] {
        let before = cuda.copies();
        for slot in boundary - 4..boundary + 4 {
            assert_eq!(lane.write(slot, Slot(slot), &page(slot)), Progress::Queued);
        }
        lane.submit();
        drain(lane.as_mut(), 8);
        let after = cuda.copies();
        assert_eq!((after[0] - before[0], after[2] - before[2]), (0, 2), "a copy for each chunk");
    }
}

#[test]
fn a_batch_that_the_driver_refuses_fails_alone_and_whole() {
    for (batch, call) in
        [(BatchCopy::Cuda13, "cuMemcpyBatchAsync_v2"), (BatchCopy::Cuda12, "cuMemcpyBatchAsync")]
    {
        let faked = faked("&path=engine&ring=off&engine_batch=8", batch);
        let mut lane = lane(&faked);
        for round in 0..3 {
            if round == 1 {
                faked.cuda.fail(call, 0, 1, 1);
            }
            for at in 0..4 {
                assert_eq!(lane.write(at, Slot(at * 7), &page(at)), Progress::Queued);
            }
            lane.submit();
            let mut results = Vec::new();
            while results.len() < 4 {
                lane.poll(Instant::now(), &mut |done: Done<'_>| results.push((done.ticket, done.result)));
            }
            let expected = if round == 1 { Err(Fault::Io(libc::EIO)) } else { Ok(()) };
            assert_eq!(results, [0, 1, 2, 3].map(|ticket| (ticket, expected)), "round {round}");
        }
        assert_eq!(faked.store.state(0), State::Online, "an error that is not sticky loses nothing");
    }
}

#[test]
fn an_asynchronous_failure_reaches_the_batch_that_it_belongs_to() {
    let faked = faked("&path=engine&ring=off", BatchCopy::Cuda13);
    let mut lane = lane(&faked);
    write(lane.as_mut(), 1, &page(1)).expect("written");
    faked.cuda.fail("cuEventQuery", 0, 1, 1);
    assert_eq!(write(lane.as_mut(), 2, &page(2)), Err(Fault::Io(libc::EIO)));
    assert_eq!(write(lane.as_mut(), 3, &page(3)), Ok(()));
    assert_eq!(read(lane.as_mut(), 1), Ok(page(1)));
}

#[test]
fn a_batch_that_was_started_in_part_ends_once_its_stream_is_idle_and_nobody_waits_for_that() {
    let faked = faked("&path=engine&ring=off", BatchCopy::Cuda13);
    let mut lane = lane(&faked);
    // The copies were started, and no event says when they have ended. To wait for the stream here
    // would kill the context.
    faked.cuda.fail("cuStreamSynchronize", 0, -1, 719);
    faked.cuda.fail("cuEventRecord", 0, 1, 1);
    faked.cuda.fail("cuStreamQuery", 0, 3, 600);
    assert_eq!(lane.write(1, Slot(1), &page(1)), Progress::Queued);
    lane.submit();
    for _ in 0..3 {
        lane.poll(Instant::now(), &mut |done: Done<'_>| panic!("{done:?} before the stream is idle"));
    }
    let mut result = None;
    lane.poll(Instant::now(), &mut |done: Done<'_>| result = Some(done.result));
    assert_eq!(result, Some(Err(Fault::Io(libc::EIO))));
    assert_eq!(write(lane.as_mut(), 1, &page(2)), Ok(()));
    // A stream that is never idle is a driver that does not answer: the window goes on.
    faked.cuda.fail("cuEventRecord", 0, 1, 1);
    faked.cuda.fail("cuStreamQuery", 0, -1, 600);
    assert_eq!(lane.write(1, Slot(1), &page(3)), Progress::Queued);
    lane.submit();
    let now = Instant::now();
    lane.poll(now, &mut |done: Done<'_>| panic!("{done:?} before the time is over"));
    lane.poll(now + PATIENCE, &mut |done: Done<'_>| result = Some(done.result));
    assert_eq!((result, read(lane.as_mut(), 1)), (Some(Ok(())), Ok(page(3))));
}

#[test]
fn a_card_with_less_memory_than_was_asked_for_says_how_much_it_had() {
    let cuda = FakeCuda::build(BatchCopy::Cuda13);
    // The first of these calls is a trial of the path, before any chunk.
    cuda.fail("cuExternalMemoryGetMappedBuffer", 3, -1, 2);
    let error = VramStore::open_with(&url("&ring=off"), &drivers(cuda.path())).expect_err("there is less");
    assert_eq!(error.kind, OpenErrorKind::NoMemory { wanted: 4 << 20, had: 2 << 20 }, "{error}");
}

#[test]
fn out_of_device_memory_is_a_full_store_and_passes() {
    let faked = faked("&ring=off", BatchCopy::Cuda13);
    memory(&faked.store).release(2).expect("released");
    faked.cuda.fail("cuExternalMemoryGetMappedBuffer", 0, 1, 2);
    assert_eq!(memory(&faked.store).take(2), Err(Fault::Full));
    assert_eq!(faked.store.state(0), State::Online);
    assert_eq!(memory(&faked.store).take(2), Ok(()));
}

#[test]
fn every_call_that_fails_at_the_start_is_a_sentence_and_no_crash() {
    for call in [
        "cuDeviceGetAttribute",
        "cuDevicePrimaryCtxRetain",
        "cuImportExternalMemory",
        "cuExternalMemoryGetMappedBuffer",
        "cuMemHostAlloc",
        "cuStreamCreateWithPriority",
        "cuModuleLoadData",
        "cuModuleGetFunction",
        "cuEventCreate",
    ] {
        for code in [1, 2, 999] {
            let cuda = FakeCuda::build(BatchCopy::Cuda13);
            cuda.fail(call, 0, -1, code);
            match VramStore::open_with(&url("&ring=on"), &drivers(cuda.path())) {
                // Without its context there is still the window.
                Ok(store) => {
                    let needless =
                        ["cuDevice", "cuImport", "cuExternal"].iter().any(|start| call.starts_with(start));
                    assert!(needless, "{call} answered {code} and nobody minded");
                    let mut lane = store.lane(1).expect("a lane");
                    write(lane.as_mut(), 1, &page(1)).expect("written");
                    assert_eq!(read(lane.as_mut(), 1), Ok(page(1)));
                }
                Err(error) => assert!(error.to_string().contains("vram:lavapipe"), "{error}"),
            }
        }
    }
}

#[test]
fn without_any_driver_there_is_a_reason_instead_of_a_store() {
    let mut url = url("");
    url.target = weir_store::vram::Target::Index(0);
    let error = VramStore::open_with(&url, &drivers(Path::new("/no/libcuda.so.1")))
        .expect_err("no GPU here")
        .to_string();
    for part in ["no VRAM store here", "Vulkan: ", "CUDA: ", "libcuda.so.1"] {
        assert!(error.contains(part), "{error}");
    }
    let cuda = FakeCuda::build(BatchCopy::Cuda13);
    url.target = weir_store::vram::Target::Index(7);
    let error = VramStore::open_with(&url, &drivers(cuda.path())).expect_err("two fake GPUs").to_string();
    assert!(error.contains("CUDA: CUDA does not list the card Index(7)"), "{error}");
}

#[test]
fn cuda_alone_works_without_the_window() {
    let cuda = FakeCuda::build(BatchCopy::Cuda13);
    let mut url = url("");
    url.target = weir_store::vram::Target::Index(0);
    let store = VramStore::open_with(&url, &drivers(cuda.path())).expect("a store by CUDA alone");
    assert!(store.gpus()[0].describe().contains("not mapped"), "{}", store.gpus()[0].describe());
    let mut lane = store.lane(4).expect("a lane");
    for slot in [0, 255, 256, 1023] {
        write(lane.as_mut(), slot, &page(slot)).expect("written");
        assert_eq!(read(lane.as_mut(), slot), Ok(page(slot)));
    }
    memory(&store).release(1).expect("released");
    assert_eq!(read(lane.as_mut(), 256), Err(Fault::Lost));
    assert_eq!(read(lane.as_mut(), 255), Ok(page(255)));
}

#[test]
fn cuda_s_cards_are_counted_by_pci_address_and_not_the_fastest_first() {
    let cuda = FakeCuda::build(BatchCopy::Cuda13);
    let mut url = url("");
    for (index, card) in [(0, "Slow Fake GPU"), (1, "Fast Fake GPU")] {
        url.target = weir_store::vram::Target::Index(index);
        let store = VramStore::open_with(&url, &drivers(cuda.path())).expect("a store by CUDA alone");
        let described = store.gpus()[0].describe();
        assert!(described.starts_with(card), "vram:{index} is {described}");
    }
}

#[test]
fn chunks_come_and_go_under_load_and_the_ring_makes_way() {
    let faked = faked("&path=ring&ring=on", BatchCopy::Cuda13);
    let store = &faked.store;
    let stop = std::sync::atomic::AtomicBool::new(false);
    std::thread::scope(|scope| {
        let workers: Vec<_> = (0..3u32)
            .map(|worker| {
                let stop = &stop;
                scope.spawn(move || {
                    // The call is refused if the kernel is not scheduled for so long that it does
                    // not leave.
                    let mut opened = None;
                    soon("open", || {
                        opened = store.lane(16).ok();
                        opened.is_some()
                    });
                    let mut lane = opened.expect("just opened");
                    let mut rounds = 0u32;
                    while rounds < 10 || !stop.load(std::sync::atomic::Ordering::Relaxed) {
                        let slot = worker * 85 + rounds % 85; // Chunk 0, which stays.
                        write(lane.as_mut(), slot, &page(rounds)).expect("written");
                        assert_eq!(read(lane.as_mut(), slot), Ok(page(rounds)));
                        // Chunk 3 is released and taken: a page of it is either there or lost, and
                        // nothing else.
                        let there = read(lane.as_mut(), 3 * memory(store).chunk_slots() + worker);
                        assert!(matches!(there, Ok(_) | Err(Fault::Lost)), "{there:?}");
                        rounds += 1;
                    }
                    rounds
                })
            })
            .collect();
        // Go on until the kernel has come back between two chunks, however late the machine
        // schedules it.
        let (mut cycles, begun) = (0, Instant::now());
        soon("back between two chunks", || {
            in_time(|| memory(store).release(3));
            in_time(|| memory(store).take(3));
            cycles += 1;
            (cycles >= 30 || begun.elapsed() > PATIENCE / 3) && store.gpus()[0].counters().ring_entered > 1
        });
        stop.store(true, std::sync::atomic::Ordering::Relaxed);
        for worker in workers {
            assert!(worker.join().expect("no panic") >= 10);
        }
    });
    assert_eq!(store.state(0), State::Online);
}

/// Tries again while a thread that the store waits for is not scheduled: each refusal changes
/// nothing.
fn in_time(mut act: impl FnMut() -> Result<(), Fault>) {
    let mut result = Err(Fault::Timeout);
    soon("in time", || {
        result = act();
        result != Err(Fault::Timeout)
    });
    result.expect("done");
}

/// Waits for what the watching thread does a few times a second.
fn soon(what: &str, mut is: impl FnMut() -> bool) {
    let since = Instant::now();
    while !is() {
        assert!(since.elapsed() < PATIENCE, "not {what} in {PATIENCE:?}");
        std::thread::sleep(Duration::from_millis(5));
    }
}

const CARD: Card = Card { free: 8 << 30, total: 24 << 30, display: false, others: 0 };

#[test]
fn the_floor_of_free_memory_makes_a_store_drain_and_recover() {
    let nvml = FakeNvml::build(CARD);
    let drivers = Drivers { nvml: nvml.path().into(), ..drivers(Path::new("/no/libcuda.so.1")) };
    let store = VramStore::open_with(&url("&floor=512MiB"), &drivers).expect("a store");
    let room = memory(&store).headroom(0).expect("it says");
    assert_eq!((room.free, room.total, room.floor, room.spare), (8 << 30, 24 << 30, 512 << 20, 1 << 30));
    assert_eq!((store.state(0), room.owed_chunks()), (State::Online, 0));
    nvml.set(Card { free: 511 << 20, ..CARD });
    soon("draining", || store.state(0) == State::Draining);
    assert_eq!(
        memory(&store).headroom(0).map(|room| room.owed_chunks()),
        Some(2),
        "the floor and a chunk on top"
    );
    // The store still returns the pages that it holds.
    let mut lane = store.lane(1).expect("a lane");
    write(lane.as_mut(), 1, &page(1)).expect("written");
    assert_eq!(read(lane.as_mut(), 1), Ok(page(1)));
    nvml.set(Card { free: 513 << 20, ..CARD });
    soon("online", || store.state(0) == State::Online);
}

#[test]
fn a_display_takes_its_share_and_keeps_the_kernel_off_the_card() {
    let nvml = FakeNvml::build(Card { display: true, ..CARD });
    let cuda = FakeCuda::build(BatchCopy::Cuda13);
    let drivers = Drivers { nvml: nvml.path().into(), ..drivers(cuda.path()) };
    let store = VramStore::open_with(&url(""), &drivers).expect("a store");
    let room = memory(&store).headroom(0).expect("it says");
    assert_eq!((room.display, room.spare), (true, 3 << 30));
    assert!(!store.gpus()[0].enter_ring(), "no kernel beside a display unless it is asked for");
    let asked = VramStore::open_with(&url("&ring=on"), &drivers).expect("a store");
    let _lane = asked.lane(1).expect("a lane");
    assert!(asked.gpus()[0].enter_ring());
}

#[test]
fn another_process_on_the_card_sends_the_kernel_away() {
    let nvml = FakeNvml::build(CARD);
    let cuda = FakeCuda::build(BatchCopy::Cuda13);
    let drivers = Drivers { nvml: nvml.path().into(), ..drivers(cuda.path()) };
    let store = VramStore::open_with(&url("&ring=on"), &drivers).expect("a store");
    let _lane = store.lane(1).expect("a lane");
    let gpu = &store.gpus()[0];
    soon("resident", || gpu.ring_is_resident());
    nvml.set(Card { others: 1, ..CARD });
    soon("away", || !gpu.ring_is_resident());
    nvml.set(CARD);
    soon("back", || gpu.ring_is_resident());
}

#[test]
fn a_management_library_that_fails_says_nothing_and_breaks_nothing() {
    let nvml = FakeNvml::build(CARD);
    let drivers = Drivers { nvml: nvml.path().into(), ..drivers(Path::new("/no/libcuda.so.1")) };
    let store = VramStore::open_with(&url(""), &drivers).expect("a store");
    assert!(memory(&store).headroom(0).is_some());
    std::fs::remove_file(nvml.path().with_extension("card")).expect("removed");
    assert_eq!(memory(&store).headroom(0), None, "the card stays the one of its number");
    assert_eq!(store.state(0), State::Online);
}

#[test]
fn without_a_window_cuda_goes_before_the_transfer_queue() {
    let cuda = FakeCuda::build(BatchCopy::Cuda13);
    let store = VramStore::open_with(&url("&window=off"), &drivers(cuda.path())).expect("a store");
    assert!(store.gpus()[0].describe().contains("Fake GPU"), "{}", store.gpus()[0].describe());
    let mut lane = store.lane(4).expect("a lane");
    write(lane.as_mut(), 3, &page(3)).expect("written");
    assert_eq!(read(lane.as_mut(), 3), Ok(page(3)));
}

#[test]
fn neighbours_by_the_transfer_queue_come_back_across_the_staging_memory_s_end() {
    let store = blind();
    let mut lane = store.lane(8).expect("a lane");
    for round in 0..5u32 {
        for slot in 0..6 {
            assert_eq!(lane.write(slot, Slot(slot), &page(round * 6 + slot)), Progress::Queued);
        }
        lane.submit();
        let mut written = 0;
        while written < 6 {
            lane.poll(Instant::now(), &mut |done: Done<'_>| {
                assert_eq!(done.result, Ok(()));
                written += 1;
            });
        }
        assert!((0..6).all(|slot| read(lane.as_mut(), slot) == Ok(page(round * 6 + slot))), "round {round}");
    }
}
