//! The RAM disk through a real mount, with ordinary tools.

mod enable_uring;
mod fuse_mounts;

use enable_uring::EnableUring;
use fuse_mounts::{content, eventually};
use rustix::fs::{FallocateFlags, RenameFlags, SeekFrom};
use std::collections::BTreeMap;
use std::fs::{self, File, OpenOptions};
use std::io::{Read as _, Seek as _, Write as _};
use std::os::unix::fs::{FileExt as _, MetadataExt as _, PermissionsExt as _, symlink};
use std::path::{Path, PathBuf};
use std::process::Command;
use std::sync::Arc;
use std::time::{Duration, SystemTime};
use weir_core::log::Log;
use weir_export::fuse::mount::is_mounted;
use weir_export::fuse::{Config, ServeError, Server};
use weir_store::{Host, StoreUrl};
use weir_volume::Volume;

const PAGE: usize = 4096;

struct Disk {
    server: Option<Server>,
    volume: Arc<Volume>,
    point: PathBuf,
}

impl Disk {
    /// Mounts a disk of `pages` pages. `None`, after printing the reason, if this machine cannot
    /// mount.
    fn new(name: &str, pages: u32) -> Option<Disk> {
        let shape = weir_volume::Config { pages, lanes: 3, depth: 64 };
        Disk::over(name, Volume::create(shape, vec![Arc::new(Host::new(shape.slots()).unwrap())]).unwrap())
    }

    fn over(name: &str, volume: Arc<Volume>) -> Option<Disk> {
        let point = std::env::temp_dir().join(format!("weir-ram-disk-{name}-{}", std::process::id()));
        fs::create_dir_all(&point).unwrap();
        let config = Config { threads: 3, ..Config::default() };
        let log: Log = Arc::new(|_, line| eprintln!("{line}"));
        match Server::ram_disk(&volume, &config, &point, &log) {
            Ok(server) => Some(Disk { server: Some(server), volume, point }),
            Err(ServeError::Mount(error)) => {
                println!("\nskipped: no FUSE mount here: {error}");
                let _ = fs::remove_dir(&point);
                None
            }
            Err(error) => panic!("{error}"),
        }
    }

    fn at(&self, name: &str) -> PathBuf {
        self.point.join(name)
    }

    fn shell(&self, script: &str) {
        let output = Command::new("sh").args(["-ec", script]).current_dir(&self.point).output().unwrap();
        let said = [output.stdout, output.stderr].concat();
        assert!(output.status.success(), "{script}: {}", String::from_utf8_lossy(&said));
    }
}

impl Drop for Disk {
    fn drop(&mut self) {
        drop(self.server.take());
        assert!(!is_mounted(&self.point));
        let _ = fs::remove_dir(&self.point);
    }
}

#[test]
fn ordinary_tools_do_what_they_do_on_any_disk() {
    if let Some(disk) = Disk::new("tools", 16_384) {
        ordinary_tools(&disk);
    }
}

fn ordinary_tools(disk: &Disk) {
    disk.shell(
        "mkdir -p a/b/c; cp -r /etc/os-release a/; cp /bin/sh a/b/sh; cmp /bin/sh a/b/sh; mv a/b d; test ! -e a/b
         ln -s d/sh link; cmp link /bin/sh; test \"$(readlink link)\" = d/sh; ln d/sh hard; test $(stat -c %h hard) = 2
         chmod 640 hard; test $(stat -c %a d/sh) = 640; touch -d '2001-02-03 04:05:06 UTC' hard; test $(stat -c %Y d/sh) = 981173106
         tar cf all.tar a d; mkdir out; tar xf all.tar -C out; diff -r d out/d; find . | sort | wc -l
         echo one > log; echo two >> log; test \"$(cat log)\" = \"one
two\"; truncate -s 5 log; test \"$(cat log)\" = \"one
t\"; chmod 755 d/sh; d/sh -c 'exit 0'; rm -r a d out; mkfifo fifo; rmdir a 2>/dev/null && exit 1; df . > /dev/null
         seq 1 2000 | while read n; do echo $n > f$n; done; test $(ls | grep -c '^f[0-9]') = 2000; cat f[0-9]* | sort -n | tail -1 | grep -q 2000; rm f[0-9]*",
    );
    let names: Vec<_> = fs::read_dir(&disk.point).unwrap().map(|entry| entry.unwrap().file_name()).collect();
    assert_eq!(names.len(), 5, "{names:?}");
    disk.shell("rm -rf ./*");
    // Freed pages must be free in the volume too: a moment later, when the kernel forgets the file.
    eventually("pages stay in the volume", || disk.volume.status().stored == 0);
}

#[test]
fn a_file_is_its_model_whatever_is_done_to_it() {
    if let Some(disk) = Disk::new("model", 4096) {
        a_files_model(&disk);
    }
}

fn a_files_model(disk: &Disk) {
    let path = disk.at("file");
    let mut file = OpenOptions::new().read(true).write(true).create(true).truncate(true).open(&path).unwrap();
    let mut model: Vec<u8> = Vec::new();
    let mut random = content(77, 100_000).into_iter();
    let mut number = |most: usize| {
        let mut byte = || random.next().unwrap() as usize;
        (byte() << 16 | byte() << 8 | byte()) % most
    };
    for round in 0..400u64 {
        match number(10) {
            0..4 => {
                let (at, length) =
                    (number(600_000), 1 + number(if round % 7 == 0 { 300_000 } else { 9_000 }));
                let bytes = content(round, length);
                file.write_all_at(&bytes, at as u64).unwrap();
                model.resize(model.len().max(at + length), 0);
                model[at..at + length].copy_from_slice(&bytes);
            }
            4 => {
                let size = number(700_000);
                file.set_len(size as u64).unwrap();
                model.resize(size, 0);
            }
            5 if !model.is_empty() => {
                let (at, length) = (number(model.len()), 1 + number(50_000));
                let mode = FallocateFlags::PUNCH_HOLE | FallocateFlags::KEEP_SIZE;
                rustix::fs::fallocate(&file, mode, at as u64, length as u64).unwrap();
                let end = model.len().min(at + length);
                model[at..end].fill(0);
            }
            6 => {
                // Use another descriptor, without the kernel's cached pages.
                file = OpenOptions::new().read(true).write(true).open(&path).unwrap();
                rustix::fs::fadvise(&file, 0, None, rustix::fs::Advice::DontNeed).unwrap();
            }
            7 => {
                let end = file.seek(std::io::SeekFrom::End(0)).unwrap();
                assert_eq!(end, model.len() as u64);
                file.write_all(b"appended").unwrap();
                model.extend(b"appended");
            }
            _ => {
                let at = number(model.len() + 1);
                let mut back = vec![0; number(100_000).min(model.len() - at)];
                file.read_exact_at(&mut back, at as u64).unwrap();
                assert!(back == model[at..at + back.len()], "round {round}");
            }
        }
        assert_eq!(file.metadata().unwrap().len(), model.len() as u64, "round {round}");
    }
    rustix::fs::fadvise(&file, 0, None, rustix::fs::Advice::DontNeed).unwrap();
    assert!(fs::read(&path).unwrap() == model);
}

#[test]
fn by_rings_it_is_the_same_disk() {
    let Some(_enabled) = EnableUring::set("Y") else { return };
    let Some(disk) = Disk::new("rings", 16_384) else { return };
    ordinary_tools(&disk);
    a_files_model(&disk);
    let stats = disk.server.as_ref().expect("running").stats();
    // The kernel's FORGET still comes by the device.
    assert!(stats.by_ring > 1000 && stats.by_ring < stats.requests, "{stats:?}");
}

#[test]
fn a_file_without_a_name_lives_until_it_is_closed_and_its_room_comes_back() {
    let Some(disk) = Disk::new("unnamed", 1024) else { return };
    let before = rustix::fs::statvfs(&disk.point).unwrap();
    let mut file = OpenOptions::new().read(true).write(true).create_new(true).open(disk.at("gone")).unwrap();
    file.write_all(&content(1, 100 * PAGE)).unwrap();
    fs::remove_file(disk.at("gone")).unwrap();
    assert!(!disk.at("gone").exists());
    rustix::fs::fadvise(&file, 0, None, rustix::fs::Advice::DontNeed).unwrap();
    let mut back = Vec::new();
    file.rewind().unwrap();
    file.read_to_end(&mut back).unwrap();
    assert!(back == content(1, 100 * PAGE));
    assert_eq!(before.f_bfree - rustix::fs::statvfs(&disk.point).unwrap().f_bfree, 100);
    drop(file);
    // The kernel forgets the node by itself, a moment later.
    eventually("the room does not come back", || {
        rustix::fs::statvfs(&disk.point).unwrap().f_bfree == before.f_bfree
    });
    eventually("pages stay in the volume", || disk.volume.status().stored == 0);
}

#[test]
fn a_full_disk_says_so_and_has_room_again_after_something_is_removed() {
    let Some(disk) = Disk::new("full", 256) else { return };
    fs::write(disk.at("a"), vec![7; 200 * PAGE]).unwrap();
    let error = fs::write(disk.at("b"), content(2, 100 * PAGE)).unwrap_err();
    assert_eq!(error.kind(), std::io::ErrorKind::StorageFull);
    assert!(fs::read(disk.at("a")).unwrap() == vec![7; 200 * PAGE]);
    fs::remove_file(disk.at("a")).unwrap();
    fs::remove_file(disk.at("b")).ok();
    eventually("the room does not come back", || rustix::fs::statvfs(&disk.point).unwrap().f_bfree == 256);
    fs::write(disk.at("b"), content(2, 256 * PAGE)).unwrap();
    assert!(fs::read(disk.at("b")).unwrap() == content(2, 256 * PAGE));
}

#[test]
fn names_times_modes_and_holes_are_as_they_were_set() {
    let Some(disk) = Disk::new("attributes", 1024) else { return };
    let path = disk.at("file");
    let file = File::create(&path).unwrap();
    file.set_len(1 << 40).unwrap();
    file.write_all_at(b"far", 1 << 39).unwrap();
    let meta = fs::metadata(&path).unwrap();
    assert_eq!((meta.len(), meta.blocks()), (1 << 40, 8), "a sparse file takes what it holds");
    assert_eq!(rustix::fs::seek(&file, SeekFrom::Data(0)).unwrap(), 1 << 39);
    assert_eq!(rustix::fs::seek(&file, SeekFrom::Hole(1 << 39)).unwrap(), (1 << 39) + 4096);
    let when = SystemTime::UNIX_EPOCH + Duration::new(1_000_000_000, 123_456_789);
    file.set_modified(when).unwrap();
    fs::set_permissions(&path, fs::Permissions::from_mode(0o604)).unwrap();
    let meta = fs::metadata(&path).unwrap();
    assert_eq!((meta.modified().unwrap(), meta.permissions().mode() & 0o7777), (when, 0o604));

    fs::write(disk.at("other"), b"other").unwrap();
    let rename = |from: &str, to: &str, flags| {
        rustix::fs::renameat_with(rustix::fs::CWD, disk.at(from), rustix::fs::CWD, disk.at(to), flags)
    };
    assert_eq!(rename("other", "file", RenameFlags::NOREPLACE), Err(rustix::io::Errno::EXIST));
    rename("other", "file", RenameFlags::EXCHANGE).unwrap();
    assert_eq!(fs::read(&path).unwrap(), b"other");
    assert_eq!(fs::metadata(disk.at("other")).unwrap().len(), 1 << 40);
    rename("file", "other", RenameFlags::empty()).unwrap();
    assert_eq!(fs::read(disk.at("other")).unwrap(), b"other");

    symlink("/nowhere/at/all", disk.at("link")).unwrap();
    assert_eq!(fs::read_link(disk.at("link")).unwrap(), Path::new("/nowhere/at/all"));
    let long = "x".repeat(255);
    fs::write(disk.at(&long), b"1").unwrap();
    assert!(fs::write(disk.at(&"x".repeat(256)), b"1").is_err());
    let mapped = Command::new(disk.at("true")).status();
    assert!(mapped.is_err(), "there is no such program");
    fs::copy("/bin/true", disk.at("true")).unwrap();
    // A child that another test starts at this moment has the copy open for writing until it runs
    // its own program.
    let mut ran = None;
    eventually("the program stays busy", || {
        let status = Command::new(disk.at("true")).status();
        let busy = matches!(&status, Err(error) if error.kind() == std::io::ErrorKind::ExecutableFileBusy);
        ran = (!busy).then_some(status);
        !busy
    });
    assert!(ran.unwrap().unwrap().success(), "programs run: pages are mapped");
}

#[test]
fn threads_make_move_and_remove_files_side_by_side() {
    let Some(disk) = Disk::new("threads", 8192) else { return };
    std::thread::scope(|scope| {
        for thread in 0..6u64 {
            let disk = &disk;
            scope.spawn(move || {
                let mut known: BTreeMap<String, Vec<u8>> = BTreeMap::new();
                for round in 0..120u64 {
                    let name = format!("{thread}-{}", round * 7 % 20);
                    let bytes = content(round << 8 | thread, (round as usize * 997) % 40_000);
                    fs::write(disk.at(&name), &bytes).unwrap();
                    known.insert(name.clone(), bytes);
                    if round % 3 == 0 {
                        let to = format!("{thread}-{}", round * 5 % 20);
                        fs::rename(disk.at(&name), disk.at(&to)).unwrap();
                        let moved = known.remove(&name).unwrap();
                        known.insert(to, moved);
                    }
                    if round % 5 == 0
                        && let Some((name, _)) = known.pop_first()
                    {
                        fs::remove_file(disk.at(&name)).unwrap();
                    }
                }
                for (name, bytes) in known {
                    let file = File::open(disk.at(&name)).unwrap();
                    rustix::fs::fadvise(&file, 0, None, rustix::fs::Advice::DontNeed).unwrap();
                    assert!(fs::read(disk.at(&name)).unwrap() == bytes, "{name}");
                }
            });
        }
    });
}

#[test]
fn a_page_that_a_store_cannot_prove_is_an_i_o_error() {
    let shape = weir_volume::Config { pages: 512, lanes: 3, depth: 64 };
    let url: StoreUrl = "sim:seed=3,size=8MiB,read_error=1".parse().unwrap();
    let volume = Volume::create(shape, vec![weir_store::open(&url).unwrap()]).unwrap();
    let Some(disk) = Disk::over("faults", volume) else { return };
    let path = disk.at("file");
    fs::write(&path, content(1, 10 * PAGE)).unwrap();
    let file = File::open(&path).unwrap();
    rustix::fs::fadvise(&file, 0, None, rustix::fs::Advice::DontNeed).unwrap();
    let error = fs::read(&path).unwrap_err();
    assert_eq!(error.raw_os_error(), Some(rustix::io::Errno::IO.raw_os_error()), "{error}");
}

#[test]
fn it_ends_by_itself_when_somebody_unmounts_it() {
    let Some(disk) = Disk::new("unmounted", 256) else { return };
    fs::write(disk.at("file"), b"here").unwrap();
    let by = ["umount", "fusermount3"];
    let arguments = [vec![], vec!["-u"]];
    // The mount is busy while a child of another test has the file that was written here.
    eventually("it cannot be unmounted", || {
        by.iter().zip(&arguments).any(|(program, arguments)| {
            let status = Command::new(program).args(arguments).arg(&disk.point).status();
            status.is_ok_and(|status| status.success())
        })
    });
    assert!(!is_mounted(&disk.point));
    let server = disk.server.as_ref().unwrap();
    let mut fds = [rustix::event::PollFd::from_borrowed_fd(server.unmounted(), rustix::event::PollFlags::IN)];
    let limit = rustix::event::Timespec { tv_sec: 60, tv_nsec: 0 };
    assert_eq!(rustix::event::poll(&mut fds, Some(&limit)), Ok(1));
}
