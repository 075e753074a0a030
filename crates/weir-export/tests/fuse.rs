//! The FUSE server through real mounts: files, loop devices, faults, and a server that takes over
//! from a killed one.

mod fuse_mounts;

use fuse_mounts::{GRACE, content, kept, open, quiet, serve, volume};
use std::fs;
use std::os::unix::fs::FileExt as _;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::sync::Arc;
use std::time::{Duration, Instant};
use weir_core::PAGE_SIZE;
use weir_core::seal::SealedAllocator;
use weir_export::fuse::mount::is_mounted;
use weir_export::fuse::{Config, Left, ServeError, Server};
use weir_store::{Store, StoreUrl};
use weir_system::loop_device::LoopDevice;
use weir_volume::Volume;

#[global_allocator]
static ALLOCATOR: SealedAllocator = SealedAllocator;

fn over(url: &str, pages: u32, threads: usize) -> Arc<Volume> {
    let shape = weir_volume::Config { pages, lanes: threads, depth: 64 };
    let url: StoreUrl = url.parse().unwrap();
    let store: Arc<dyn Store> = weir_store::open(&url).unwrap();
    Volume::create(shape, vec![store]).unwrap()
}

fn path(name: &str) -> PathBuf {
    std::env::temp_dir().join(format!("weir-fuse-test-{name}-{}", std::process::id()))
}

#[test]
fn a_file_reads_what_was_written_wherever_it_begins_and_nothing_is_left_behind() {
    let point = path("file");
    let volume = volume(1000, 4);
    let Some(server) = serve(&volume, &Config::default(), &point) else { return };
    let file = open(server.file());
    assert_eq!(file.metadata().unwrap().len(), 1000 * PAGE_SIZE as u64);
    let mut model = vec![0; 1000 * PAGE_SIZE];
    let mut random = content(7, 4000).into_iter();
    let mut number = |most: usize| {
        let mut bytes = || u64::from(random.next().unwrap());
        ((bytes() << 16 | bytes() << 8 | bytes()) as usize) % most
    };
    for round in 0..100 {
        let offset = number(model.len());
        let length = (1 + number(if round % 4 == 0 { 2 << 20 } else { 9000 })).min(model.len() - offset);
        let (offset, length) = if round % 3 == 0 { (offset & !4095, length) } else { (offset, length) };
        let bytes = content(round, length);
        file.write_all_at(&bytes, offset as u64).unwrap();
        model[offset..offset + length].copy_from_slice(&bytes);
        let (from, length) = (number(model.len()), number(100_000));
        let length = length.min(model.len() - from);
        let mut back = vec![0; length];
        file.read_exact_at(&mut back, from as u64).unwrap();
        assert!(back == model[from..from + length], "round {round}: {length} bytes at {from}");
    }
    assert!(fs::read(server.file()).unwrap() == model);

    let end = model.len() as u64;
    assert!(file.write_at(&[1], end).is_err(), "the file does not grow");
    assert_eq!(file.read_at(&mut [0; 10], end).unwrap(), 0);
    file.set_len(5).unwrap();
    assert_eq!(file.metadata().unwrap().len(), end, "nor does it shrink");
    file.sync_all().unwrap();
    let stats = server.stats();
    assert!(stats.reads > 100 && stats.writes > 100 && stats.bytes_written > 0, "{stats:?}");
    drop(file);
    assert_eq!(server.stop(GRACE), 0);
    assert!(!is_mounted(&point) && !point.exists(), "the file that was made is gone");
}

#[test]
fn a_directory_shows_the_file_and_stays_when_the_server_goes() {
    let point = path("directory");
    fs::create_dir_all(&point).unwrap();
    let config = Config { name: "disk".to_owned(), threads: 1, ..Config::default() };
    let Some(server) = serve(&volume(100, 1), &config, &point) else { return };
    let names: Vec<_> = fs::read_dir(&point).unwrap().map(|entry| entry.unwrap().file_name()).collect();
    assert_eq!(names, ["disk"]);
    assert_eq!(server.file(), point.canonicalize().unwrap().join("disk"));
    open(server.file()).write_all_at(b"here", 9).unwrap();
    assert!(fs::read(point.join("other")).is_err() && fs::write(point.join("other"), b"x").is_err());
    drop(server);
    assert_eq!(fs::read_dir(&point).unwrap().count(), 0);
    fs::remove_dir(&point).unwrap();
}

#[test]
fn holes_are_punched_exactly_and_found_by_seeking() {
    use rustix::fs::{FallocateFlags, SeekFrom, fallocate, seek};
    let point = path("holes");
    let volume = volume(600, 2);
    let config = Config { threads: 2, ..Config::default() };
    let Some(server) = serve(&volume, &config, &point) else { return };
    let file = open(server.file());
    let mut model = content(3, 600 * PAGE_SIZE);
    file.write_all_at(&model, 0).unwrap();
    let punch = FallocateFlags::PUNCH_HOLE | FallocateFlags::KEEP_SIZE;
    for (mode, offset, length) in [
        (punch, 4096, 8192),
        (punch, 100, 50),
        (punch, 20_000, 30_000),
        (FallocateFlags::ZERO_RANGE, 1_000_001, 500_000),
        (punch, 4095, 2),
        (punch, 2_400_000, 1 << 30),
    ] {
        fallocate(&file, mode, offset, length).unwrap();
        let end = model.len().min((offset + length) as usize);
        model[offset as usize..end].fill(0);
        let mut back = vec![1; model.len()];
        file.read_exact_at(&mut back, 0).unwrap();
        assert!(back == model, "{mode:?} {offset} {length}");
    }
    assert_eq!(seek(&file, SeekFrom::Hole(0)).unwrap(), 4096);
    assert_eq!(seek(&file, SeekFrom::Data(4096)).unwrap(), 3 * 4096);
    fallocate(&file, FallocateFlags::empty(), 0, 600 * 4096).unwrap();
    assert!(fallocate(&file, FallocateFlags::COLLAPSE_RANGE, 0, 4096).is_err());
    drop(file);
    drop(server);
    // Punched pages are free, not stored as zeros.
    assert!(volume.status().stored < 600 - 120 - 7, "{:?}", volume.status().stored);
}

#[test]
fn what_a_store_cannot_prove_is_an_i_o_error_and_nothing_else_is() {
    let point = path("faults");
    // Every fourth read fails; the store is slow enough to queue reads.
    let volume = over("sim:seed=5,size=8MiB,read_error=0.25", 1000, 2);
    let config = Config { threads: 2, ..Config::default() };
    let Some(server) = serve(&volume, &config, &point) else { return };
    let file = open(server.file());
    let (mut failed, mut read) = (0, 0);
    for page in 0..1000u64 {
        file.write_all_at(&content(page, PAGE_SIZE), page * PAGE_SIZE as u64).unwrap();
    }
    for page in 0..1000u64 {
        let mut back = vec![0; PAGE_SIZE];
        match file.read_exact_at(&mut back, page * PAGE_SIZE as u64) {
            Ok(()) => {
                read += 1;
                assert!(back == content(page, PAGE_SIZE), "page {page}");
            }
            Err(error) => {
                failed += 1;
                assert_eq!(error.raw_os_error(), Some(rustix::io::Errno::IO.raw_os_error()));
            }
        }
    }
    assert!(failed > 100 && read > 500, "{failed} failed, {read} read");
    // The last request is counted once its reply is sent.
    let begun = Instant::now();
    while server.stats().errors < failed && begun.elapsed() < Duration::from_secs(60) {
        std::thread::sleep(Duration::from_millis(1));
    }
    assert_eq!(server.stats().errors, failed);
}

#[test]
fn many_readers_and_writers_at_once_see_their_own_pages() {
    let point = path("many");
    let volume = volume(4096, 4);
    let config = Config { spin: Duration::from_micros(50), ..Config::default() };
    let Some(server) = serve(&volume, &config, &point) else { return };
    std::thread::scope(|scope| {
        for writer in 0..8u64 {
            let file = open(server.file());
            scope.spawn(move || {
                let mut back = vec![0; PAGE_SIZE];
                for round in 0..300u64 {
                    let at = (round * 37 % 512 * 8 + writer) * PAGE_SIZE as u64;
                    let bytes = content(round << 8 | writer, PAGE_SIZE);
                    file.write_all_at(&bytes, at).unwrap();
                    file.read_exact_at(&mut back, at).unwrap();
                    assert!(back == bytes);
                }
            });
        }
    });
    assert_eq!(server.stop(GRACE), 0);
}

#[test]
fn a_new_server_goes_on_with_the_mount_of_one_that_is_gone() {
    let point = path("take-over");
    let config = Config { threads: 2, ring: false, ..Config::default() };
    let volume = volume(1000, 4);
    let Some(first) = serve(&volume, &config, &point) else { return };
    let file = open(first.file());
    file.write_all_at(&content(1, 8192), 4096).unwrap();
    let mut kept = kept(&first);
    let resends = kept.len() > 1;
    first.abandon();
    let second =
        Server::take_over(&volume, &config, &point, &mut |name| kept.remove(name), &quiet()).unwrap();
    let mut back = vec![0; 8192];
    file.read_exact_at(&mut back, 4096).unwrap();
    assert!(back == content(1, 8192));
    if !resends {
        println!("\nskipped: this kernel does not send requests again");
    }
    drop(file);
    assert_eq!(second.stop(GRACE), 0);
    assert!(!is_mounted(&point) && !point.exists());
}

#[test]
fn a_server_that_cannot_take_over_leaves_everything_to_the_next() {
    let point = path("cannot");
    let config = Config { threads: 1, ring: false, ..Config::default() };
    let volume = volume(1000, 1);
    let Some(first) = serve(&volume, &config, &point) else { return };
    let file = open(first.file());
    file.write_all_at(&content(1, 8192), 4096).unwrap();
    let kept = kept(&first);
    first.abandon();
    let mut take = |name: &str| kept.get(name).map(|fd| fd.try_clone().unwrap());
    // One lane is too few for two threads.
    let greedy = Config { threads: 2, ..config.clone() };
    let failed = Server::take_over(&volume, &greedy, &point, &mut take, &quiet()).err();
    assert!(matches!(failed, Some(ServeError::Lane(_))), "{failed:?}");
    assert!(is_mounted(&point));
    let second = Server::take_over(&volume, &config, &point, &mut take, &quiet()).unwrap();
    for file in [&file, &open(second.file())] {
        let mut back = vec![0; 8192];
        file.read_exact_at(&mut back, 4096).unwrap();
        assert!(back == content(1, 8192));
    }
    drop(file);
    assert_eq!(second.stop(GRACE), 0);
    assert!(!is_mounted(&point) && !point.exists());
}

#[test]
fn a_mount_whose_server_died_is_replaced_by_the_next() {
    let point = path("dead");
    let volume = volume(100, 1);
    let config = Config { threads: 1, ..Config::default() };
    let Some(first) = serve(&volume, &config, &point) else { return };
    let file = open(first.file());
    first.abandon();
    assert!(is_mounted(&point) && file.write_at(&[1], 0).is_err(), "nobody answers any more");
    drop(file);
    let second = Server::start(&volume, &config, &point, &quiet()).unwrap();
    open(second.file()).write_all_at(&[1], 0).unwrap();
    drop(second);
    assert!(!is_mounted(&point));
    fs::remove_file(&point).unwrap();
}

#[test]
fn dead_mounts_beside_a_file_are_cleared_and_other_files_there_stay() {
    let directory = path("beside");
    fs::create_dir(&directory).unwrap();
    let at = |name: &str| directory.join(name);
    for other in ["disk", "disk.img", "disks.a"] {
        fs::write(at(other), "").unwrap();
    }
    let (dead, alive) = (volume(100, 1), volume(100, 1));
    let config = Config { threads: 1, ..Config::default() };
    let Some(first) = serve(&dead, &config, &at("disk.a")) else { return };
    let second = serve(&alive, &config, &at("disk.b")).unwrap();
    first.abandon();
    let left = Left::beside(&at("disk"));
    assert_eq!(left.len(), 2);
    left.into_iter().for_each(Left::clear);
    assert!(!is_mounted(&at("disk.a")) && !at("disk.a").exists());
    open(second.file()).write_all_at(&[1], 0).unwrap();
    assert_eq!(second.stop(GRACE), 0);
    for other in ["disk", "disk.img", "disks.a"] {
        assert!(at(other).exists(), "{other}");
    }
    fs::remove_dir_all(&directory).unwrap();
}

#[test]
fn a_loop_device_over_the_file_is_a_disk_with_direct_i_o_and_discard() {
    let point = path("loop");
    let volume = volume(8192, 4);
    let Some(server) = serve(&volume, &Config::default(), &point) else { return };
    let device = match LoopDevice::attach(server.file()) {
        Ok(device) => device,
        Err(error) => {
            println!("\nskipped: no loop device here: {error}");
            return;
        }
    };
    assert_eq!(device.backing_file().as_deref(), Some(server.file()));
    let name = device.path().file_name().unwrap().to_str().unwrap().to_owned();
    let attribute =
        |what: &str| fs::read_to_string(format!("/sys/block/{name}/{what}")).unwrap().trim().to_owned();
    assert_eq!(attribute("size"), (8192 * 8).to_string());
    assert_eq!(attribute("queue/logical_block_size"), "4096");
    assert_eq!(attribute("queue/discard_granularity"), "4096");
    let disk = open(device.path());
    let bytes = content(9, 4 << 20);
    disk.write_all_at(&bytes, 1 << 20).unwrap();
    disk.sync_all().unwrap();
    let mut back = vec![0; bytes.len()];
    open(server.file()).read_exact_at(&mut back, 1 << 20).unwrap();
    assert!(back == bytes, "the disk's bytes are the file's");
    let before = volume.status().stored;
    let discard = Command::new("blkdiscard").arg(device.path()).status();
    if discard.is_ok_and(|status| status.success()) {
        assert!(before >= 1024 && volume.status().stored == 0, "{before} {}", volume.status().stored);
    }
    drop(disk);
    device.detach().unwrap();
    assert_eq!(server.stop(GRACE), 0);
}

#[test]
fn what_cannot_be_mounted_on_is_refused_with_the_reason() {
    let volume = volume(10, 1);
    let start = |path: &str, config: &Config| Server::start(&volume, config, Path::new(path), &quiet());
    let config = Config { threads: 1, ..Config::default() };
    let error = start("/nonexistent/deep/file", &config).unwrap_err();
    assert!(error.to_string().contains("/nonexistent/deep/file"), "{error}");
    let error = start("/tmp", &Config { threads: 0, ..config.clone() }).unwrap_err();
    assert!(error.to_string().contains("1 to 64"), "{error}");
    let error = start("/tmp", &Config { name: "a/b".to_owned(), ..config }).unwrap_err();
    assert!(error.to_string().contains("a/b"), "{error}");
}
