//! The FUSE server with requests by rings: on every processor, with fewer threads than processors,
//! and every way in which it ends.

mod enable_uring;
mod fuse_mounts;

use enable_uring::EnableUring;
use fuse_mounts::{GRACE, content, eventually, open};
use rustix::fs::{FallocateFlags, fallocate};
use rustix::process::{Pid, Signal, kill_process};
use rustix::thread::CpuSet;
use std::fs::{self, File};
use std::os::unix::fs::FileExt as _;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::thread;
use std::time::Duration;
use weir_core::PAGE_SIZE;
use weir_core::seal::SealedAllocator;
use weir_export::fuse::mount::is_mounted;
use weir_export::fuse::{Config, Server};
use weir_store::StoreUrl;
use weir_volume::Volume;

#[global_allocator]
static ALLOCATOR: SealedAllocator = SealedAllocator;

const PAGES: u32 = 4096;

fn volume(threads: usize) -> Arc<Volume> {
    fuse_mounts::volume(PAGES, threads)
}

fn path(name: &str) -> PathBuf {
    std::env::temp_dir().join(format!("weir-fuse-ring-test-{name}-{}", std::process::id()))
}

/// Starts a server over a file of its own. `None`, after printing the reason, if this machine
/// cannot mount.
fn serve(volume: &Arc<Volume>, threads: usize, point: &Path) -> Option<Server> {
    fuse_mounts::serve(volume, &Config { threads, ..Config::default() }, point)
}

/// The same with requests by rings; a kernel that has the parameter has rings.
fn by_rings(threads: usize, name: &str) -> Option<(EnableUring, Server)> {
    let enabled = EnableUring::set("Y")?;
    let server = serve(&volume(threads), threads, &path(name))?;
    open(server.file()).write_all_at(&[1], 0).unwrap();
    assert!(server.stats().by_ring > 0, "requests come by rings: {:?}", server.stats());
    Some((enabled, server))
}

/// The processors on which this test may run.
fn processors() -> Vec<usize> {
    let set = rustix::thread::sched_getaffinity(None).unwrap();
    (0..CpuSet::MAX_CPU).filter(|processor| set.is_set(*processor)).collect()
}

/// Writes, reads and punches in one part of the file, on one processor.
fn exercise(file: &File, processor: usize, number: u64) {
    let mut only = CpuSet::new();
    only.set(processor);
    rustix::thread::sched_setaffinity(None, &only).unwrap();
    const PART: u64 = 2 << 20;
    let start = number * PART;
    let mut model = vec![0; PART as usize];
    for (round, (offset, length)) in
        [(0, 1 << 20), (5, 1), (4095, 2), (123, 300_000), (PART as usize - 4096, 4096), (0, PART as usize)]
            .into_iter()
            .cycle()
            .take(30)
            .enumerate()
    {
        let bytes = content(number << 8 | round as u64, length);
        file.write_all_at(&bytes, start + offset as u64).unwrap();
        model[offset..offset + length].copy_from_slice(&bytes);
        let mut back = vec![0; model.len() - offset];
        file.read_exact_at(&mut back, start + offset as u64).unwrap();
        assert!(back == model[offset..], "processor {processor}, round {round}");
    }
    let punch = FallocateFlags::PUNCH_HOLE | FallocateFlags::KEEP_SIZE;
    fallocate(file, punch, start + 4096, 8192).unwrap();
    model[4096..4096 + 8192].fill(0);
    let mut back = vec![1; model.len()];
    file.read_exact_at(&mut back, start).unwrap();
    assert!(back == model, "processor {processor}: what was punched is zero, and nothing else");
}

#[test]
fn callers_on_every_processor_are_served_by_as_many_threads_as_there_are() {
    let processors = processors();
    for threads in [1, 3, 6] {
        let Some((_enabled, server)) = by_rings(threads, "processors") else { return };
        thread::scope(|scope| {
            for (number, processor) in processors.iter().take(8).enumerate() {
                let file = open(server.file());
                scope.spawn(move || exercise(&file, *processor, number as u64));
            }
        });
        let stats = server.stats();
        assert!(stats.by_ring > 100 * processors.len().min(8) as u64 && stats.errors == 0, "{stats:?}");
        assert_eq!(server.stop(GRACE), 0);
        assert!(!is_mounted(&path("processors")) && !path("processors").exists());
    }
}

#[test]
fn without_the_parameter_requests_come_by_the_device() {
    let Some(_disabled) = EnableUring::set("N") else { return };
    let Some(server) = serve(&volume(2), 2, &path("disabled")) else { return };
    exercise(&open(server.file()), processors()[0], 0);
    let stats = server.stats();
    assert!(stats.by_ring == 0 && stats.writes > 30 && !server.handoffs().is_empty(), "{stats:?}");
}

#[test]
fn where_pages_may_have_to_be_waited_for_requests_come_by_the_device() {
    let Some(_enabled) = EnableUring::set("Y") else { return };
    let shape = weir_volume::Config { pages: 1024, lanes: 2, depth: 64 };
    let url: StoreUrl = "sim:seed=1,size=8MiB,delay=20".parse().unwrap();
    let volume = Volume::create(shape, vec![weir_store::open(&url).unwrap()]).unwrap();
    let Some(server) = serve(&volume, 2, &path("slow")) else { return };
    open(server.file()).write_all_at(&[1; 100], 0).unwrap();
    assert_eq!(server.stats().by_ring, 0);
}

#[test]
fn clients_that_are_killed_leave_the_others_served() {
    let Some((_enabled, server)) = by_rings(3, "killed") else { return };
    let file = open(server.file());
    let bytes = content(3, 8 << 20);
    file.write_all_at(&bytes, 0).unwrap();
    for round in 0..20 {
        let mut clients: Vec<_> = (0..3)
            .map(|number| {
                let mut dd = Command::new("dd");
                let (from, to) = (format!("if={}", server.file().display()), "of=/dev/null".to_owned());
                let write = [format!("of={}", server.file().display()), "if=/dev/zero".to_owned()];
                match number {
                    0 => dd.args([from, to, "bs=1M".to_owned(), "iflag=direct".to_owned()]),
                    1 => dd.args([from, to, "bs=4k".to_owned()]),
                    _ => dd.args(write).args(["seek=8", "bs=1M", "conv=notrunc"]),
                };
                dd.stderr(Stdio::null()).spawn().unwrap()
            })
            .collect();
        thread::sleep(Duration::from_micros(500 * round));
        for client in &mut clients {
            // The client may have ended already.
            let _ = client.kill();
            client.wait().unwrap();
        }
    }
    let mut back = vec![0; bytes.len()];
    file.read_exact_at(&mut back, 0).unwrap();
    assert!(back == bytes);
    exercise(&file, processors()[0], 6);
    drop(file);
    assert_eq!(server.stop(GRACE), 0);
}

/// Starts threads that write until a write fails; also returns the count of writes that succeeded.
fn writers(file: &Path, count: usize) -> (Vec<thread::JoinHandle<()>>, Arc<AtomicU64>) {
    let written = Arc::new(AtomicU64::new(0));
    let writer = |number: usize| {
        let (file, written) = (open(file), Arc::clone(&written));
        thread::spawn(move || {
            let page = [number as u8; PAGE_SIZE];
            while file.write_all_at(&page, (number * PAGE_SIZE) as u64).is_ok() {
                written.fetch_add(1, Ordering::Relaxed);
            }
        })
    };
    ((0..count).map(writer).collect(), written)
}

fn end_with_errors(writers: Vec<thread::JoinHandle<()>>) {
    eventually("a client waits for ever", || writers.iter().all(thread::JoinHandle::is_finished));
    writers.into_iter().for_each(|writer| writer.join().unwrap());
}

#[test]
fn a_server_that_stops_under_load_leaves_nobody_waiting_and_nothing_mounted() {
    for threads in [1, 4] {
        let Some((_enabled, server)) = by_rings(threads, "stop") else { return };
        let (writers, written) = writers(server.file(), 6);
        eventually("nothing is written", || written.load(Ordering::Relaxed) > 1000);
        assert_eq!(server.stop(GRACE), 0);
        end_with_errors(writers);
        assert!(!is_mounted(&path("stop")) && !path("stop").exists());
    }
}

#[test]
fn requests_of_a_server_that_dies_fail_and_the_next_one_replaces_its_mount() {
    let Some((_enabled, first)) = by_rings(2, "dies") else { return };
    assert!(first.handoffs().is_empty(), "nobody can take it over");
    let (writers, written) = writers(first.file(), 4);
    eventually("nothing is written", || written.load(Ordering::Relaxed) > 1000);
    first.abandon();
    end_with_errors(writers);
    let point = path("dies");
    assert!(is_mounted(&point));
    let second = serve(&volume(2), 2, &point).expect("mounting works here");
    exercise(&open(second.file()), processors()[0], 0);
    assert!(second.stats().by_ring > 0);
    drop(second);
    assert!(!is_mounted(&point));
    fs::remove_file(&point).unwrap();
}

#[test]
fn an_unmount_by_somebody_else_ends_it() {
    let Some((_enabled, server)) = by_rings(2, "unmounted") else { return };
    let point = path("unmounted");
    // The mount is busy while another process has inherited a file of it.
    eventually("it cannot be unmounted", || {
        Command::new("umount").arg(&point).output().is_ok_and(|output| output.status.success())
    });
    let mut fds = [rustix::event::PollFd::from_borrowed_fd(server.unmounted(), rustix::event::PollFlags::IN)];
    let most = rustix::event::Timespec { tv_sec: 60, tv_nsec: 0 };
    assert_eq!(rustix::event::poll(&mut fds, Some(&most)).unwrap(), 1, "the server is told");
    assert_eq!(server.stop(GRACE), 0);
    assert!(!point.exists());
}

#[test]
fn an_idle_server_sleeps() {
    let Some((_enabled, server)) = by_rings(4, "idle") else { return };
    exercise(&open(server.file()), processors()[0], 0);
    let switches = || -> u64 {
        let tasks = fs::read_dir("/proc/self/task").unwrap().flatten();
        let serves = tasks.filter(|task| {
            let name = fs::read_to_string(task.path().join("comm"));
            name.is_ok_and(|name| name.starts_with("weir-fuse"))
        });
        let lines = serves.map(|task| fs::read_to_string(task.path().join("status")).unwrap_or_default());
        let count = |text: String| {
            let line = text.lines().find_map(|line| line.strip_prefix("voluntary_ctxt_switches:"));
            line.and_then(|number| number.trim().parse::<u64>().ok()).unwrap_or(0)
        };
        lines.map(count).sum()
    };
    // Another program's look at all mounts may come between.
    eventually("its threads wake up though nothing happens", || {
        let before = switches();
        thread::sleep(Duration::from_millis(500));
        before > 0 && switches() == before
    });
}

#[test]
fn a_stopped_client_keeps_nobody_waiting() {
    let Some((_enabled, server)) = by_rings(1, "stopped") else { return };
    let mut client = Command::new("dd")
        .args([&format!("if={}", server.file().display()), "of=/dev/null", "bs=4k", "iflag=direct"])
        .stderr(Stdio::null())
        .spawn()
        .unwrap();
    // The client may have ended already.
    let _ = kill_process(Pid::from_child(&client), Signal::STOP);
    exercise(&open(server.file()), processors()[0], 0);
    let _ = kill_process(Pid::from_child(&client), Signal::KILL);
    client.wait().unwrap();
}
