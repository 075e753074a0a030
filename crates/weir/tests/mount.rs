//! `weir mount` as a process: in the background and in the foreground, as root and as an ordinary
//! user.

#[path = "../../weir-export/tests/enable_uring/mod.rs"]
mod enable_uring;

use enable_uring::EnableUring;
use std::fs;
use std::os::unix::fs::{MetadataExt as _, PermissionsExt as _, chown};
use std::os::unix::process::CommandExt as _;
use std::path::{Path, PathBuf};
use std::process::{Command, Output};
use std::thread;
use std::time::{Duration, Instant};
use weir_export::fuse::mount::is_mounted;

const PATIENCE: Duration = Duration::from_secs(60);
const NOBODY: u32 = 65_534;

struct Directory(PathBuf);

impl Directory {
    fn new(name: &str) -> Self {
        let path = std::env::temp_dir().join(format!("weir-mount-{}-{name}", std::process::id()));
        fs::create_dir_all(&path).unwrap();
        Directory(path)
    }
}

impl Drop for Directory {
    fn drop(&mut self) {
        unmount(&self.0);
        let _ = fs::remove_dir_all(&self.0);
    }
}

fn weir(arguments: &[&str], directory: &Path) -> Command {
    let mut command = Command::new(env!("CARGO_BIN_EXE_weir"));
    command.arg("mount").arg(directory).args(arguments);
    command
}

fn said(output: &Output) -> String {
    String::from_utf8_lossy(&[&output.stdout[..], &output.stderr].concat()).into_owned()
}

fn unmount(path: &Path) -> bool {
    let by = [("umount", &[][..]), ("fusermount3", &["-u"])];
    by.iter().any(|(program, flags)| {
        let run = Command::new(program).args(*flags).arg(path).output();
        run.is_ok_and(|output| output.status.success())
    })
}

/// Whether this machine refuses to mount at all; prints that.
fn refused(output: &Output) -> bool {
    let refused = !output.status.success() && said(output).contains("cannot");
    if refused {
        println!("\nskipped: no FUSE mount here: {}", said(output).trim());
    }
    refused
}

fn until(what: &str, mut done: impl FnMut() -> bool) {
    let begun = Instant::now();
    while !done() {
        assert!(begun.elapsed() < PATIENCE, "{what}");
        thread::sleep(Duration::from_millis(10));
    }
}

/// Number of processes that serve a directory.
fn servers(directory: &Path) -> usize {
    let text = directory.to_str().unwrap();
    let serves = |entry: fs::DirEntry| {
        let line = fs::read(entry.path().join("cmdline")).unwrap_or_default();
        let words: Vec<_> = line.split(|byte| *byte == 0).collect();
        words.contains(&&b"mount"[..]) && words.contains(&text.as_bytes())
    };
    fs::read_dir("/proc")
        .unwrap()
        .flatten()
        .filter(|entry| entry.file_name().as_encoded_bytes()[0].is_ascii_digit())
        .filter_map(|entry| serves(entry).then_some(()))
        .count()
}

#[test]
fn a_disk_is_there_when_the_command_returns_and_its_process_goes_with_it() {
    let directory = Directory::new("background");
    let output = weir(&["--store", "host:16MiB"], &directory.0).output().unwrap();
    if refused(&output) {
        return;
    }
    assert!(output.status.success() && said(&output).is_empty(), "{}", said(&output));
    assert!(is_mounted(&directory.0));
    fs::create_dir(directory.0.join("sub")).unwrap();
    fs::write(directory.0.join("sub/file"), vec![9; 100_000]).unwrap();
    fs::rename(directory.0.join("sub"), directory.0.join("dir")).unwrap();
    assert_eq!(fs::read(directory.0.join("dir/file")).unwrap(), vec![9; 100_000]);
    assert_eq!(servers(&directory.0), 1);
    // The mount is busy while a child of another test has the files that were written here.
    until("it cannot be unmounted", || unmount(&directory.0));
    until("its process stays", || servers(&directory.0) == 0);
    assert_eq!(fs::read_dir(&directory.0).unwrap().count(), 0, "nothing is left");
}

#[test]
fn in_the_foreground_a_signal_ends_it_and_nothing_stays_mounted() {
    let directory = Directory::new("foreground");
    let mut child = weir(&["--foreground", "--store", "host:8MiB"], &directory.0).spawn().unwrap();
    let begun = Instant::now();
    while !is_mounted(&directory.0) {
        if child.try_wait().unwrap().is_some() {
            return println!("\nskipped: no FUSE mount here");
        }
        assert!(begun.elapsed() < PATIENCE);
        thread::sleep(Duration::from_millis(10));
    }
    fs::write(directory.0.join("file"), b"here").unwrap();
    rustix::process::kill_process(rustix::process::Pid::from_child(&child), rustix::process::Signal::TERM)
        .unwrap();
    assert_eq!(child.wait().unwrap().code(), Some(0));
    assert!(!is_mounted(&directory.0));
}

#[test]
fn no_signal_ends_a_disk_that_is_in_use() {
    use rustix::process::{Pid, Signal, kill_process};
    let directory = Directory::new("in-use");
    let said = std::env::temp_dir().join(format!("weir-mount-{}-said", std::process::id()));
    let mut command = weir(&["--foreground", "--store", "host:8MiB"], &directory.0);
    let mut child = command.stderr(fs::File::create(&said).unwrap()).spawn().unwrap();
    let begun = Instant::now();
    while !is_mounted(&directory.0) {
        if child.try_wait().unwrap().is_some() {
            return println!("\nskipped: no_signal_ends_a_disk_that_is_in_use: no FUSE mount here");
        }
        assert!(begun.elapsed() < PATIENCE);
        thread::sleep(Duration::from_millis(10));
    }
    let path = directory.0.join("file");
    let open = fs::File::create(&path).unwrap();
    fs::write(&path, b"here").unwrap();
    let end = [Signal::QUIT, Signal::TERM, Signal::INT];
    for (number, signal) in end.into_iter().enumerate() {
        kill_process(Pid::from_child(&child), signal).unwrap();
        let lines = || fs::read_to_string(&said).unwrap().matches("not stopping: ").count();
        until("it does not say that it stays", || lines() > number || child.try_wait().unwrap().is_some());
        assert_eq!(fs::read(&path).unwrap(), b"here", "after {signal:?}");
    }
    for signal in [Signal::PIPE, Signal::USR1, Signal::USR2, Signal::ALARM] {
        kill_process(Pid::from_child(&child), signal).unwrap();
    }
    drop(open);
    // A terminal that closes does not check whether its user has a file open.
    kill_process(Pid::from_child(&child), Signal::HUP).unwrap();
    thread::sleep(Duration::from_secs(1));
    assert_eq!(fs::read(&path).unwrap(), b"here");
    until("it stays though nobody uses it", || {
        let _ = kill_process(Pid::from_child(&child), Signal::TERM);
        child.try_wait().unwrap().is_some()
    });
    assert!(!is_mounted(&directory.0));
    fs::remove_file(&said).unwrap();
}

/// A missing directory is refused with any store, and taking the store's memory first would take
/// seconds.
#[test]
fn a_place_that_cannot_be_is_refused_before_any_memory_is_taken() {
    for directory in ["/nonexistent/directory", "/etc/passwd"] {
        let output = weir(&["--foreground", "--store", "host:1TiB"], Path::new(directory)).output().unwrap();
        assert_eq!(output.status.code(), Some(1), "{}", said(&output));
        assert!(said(&output).contains(directory), "{}", said(&output));
    }
}

#[test]
fn an_ordinary_user_mounts_writes_and_unmounts() {
    if !rustix::process::geteuid().is_root() {
        return println!("\nskipped: the other tests of this file run as an ordinary user here");
    }
    if Command::new("fusermount3").arg("--version").output().is_err() {
        return println!("\nskipped: no fusermount3 here (package fuse3)");
    }
    let directory = Directory::new("user");
    chown(&directory.0, Some(NOBODY), Some(NOBODY)).unwrap();
    let as_nobody = |mut command: Command| command.uid(NOBODY).gid(NOBODY).current_dir("/").output();
    let output = match as_nobody(weir(&["--store", "host:8MiB"], &directory.0)) {
        Ok(output) => output,
        Err(error) => {
            return println!("\nskipped: an ordinary user cannot run the program where it lies: {error}");
        }
    };
    if refused(&output) {
        return;
    }
    assert!(output.status.success(), "{}", said(&output));
    let shell = |script: &str| {
        let mut command = Command::new("sh");
        command.args(["-ec", script]).arg("sh").arg(&directory.0);
        as_nobody(command).unwrap()
    };
    let output = shell(
        "cd $1; echo mine > file; mkdir d; mv file d; cat d/file; stat -c '%u %a' d/file; cd /; fusermount3 -u $1",
    );
    assert!(output.status.success(), "{}", said(&output));
    let lines = said(&output);
    let mut lines = lines.lines();
    assert_eq!(lines.next(), Some("mine"));
    assert!(lines.next().unwrap().starts_with("65534 6"));
    until("its process stays", || servers(&directory.0) == 0);
    assert_eq!(fs::metadata(&directory.0).unwrap().uid(), NOBODY);
}

#[test]
fn a_disk_is_open_to_other_users_if_it_is_told_so_and_not_else() {
    if !rustix::process::geteuid().is_root() {
        return println!("\nskipped: only root can be two users");
    }
    for (flags, is_open) in [
        (&["--size", "8MiB", "--store", "host"][..], false),
        (&["--allow-other", "--store", "host:8MiB"], true),
    ] {
        let directory = Directory::new("other");
        let output = weir(flags, &directory.0).output().unwrap();
        if refused(&output) {
            return;
        }
        assert!(output.status.success(), "{}", said(&output));
        fs::write(directory.0.join("public"), b"for all").unwrap();
        fs::write(directory.0.join("private"), b"for root").unwrap();
        let open_to = |name: &str, mode| {
            fs::set_permissions(directory.0.join(name), fs::Permissions::from_mode(mode)).unwrap();
        };
        open_to(".", 0o1777);
        open_to("private", 0o600);
        let as_nobody = |script: &str| {
            let mut command = Command::new("sh");
            command.args(["-c", script]).arg("sh").arg(&directory.0).current_dir("/");
            command.uid(NOBODY).gid(NOBODY).output().unwrap()
        };
        let read = as_nobody("cat $1/public && echo mine >$1/mine");
        assert_eq!(read.status.success(), is_open, "{}", said(&read));
        // Modes and owners apply to all users.
        assert!(!as_nobody("cat $1/private").status.success());
        assert!(!as_nobody("rm -f $1/public").status.success());
        if is_open {
            assert_eq!(fs::metadata(directory.0.join("mine")).unwrap().uid(), NOBODY);
        }
    }
}

#[test]
fn an_ordinary_user_who_may_not_open_a_disk_to_others_hears_where_that_is_said() {
    if !rustix::process::geteuid().is_root() || Command::new("fusermount3").arg("--version").output().is_err()
    {
        return println!("\nskipped: this needs root, to be another user, and fusermount3 (package fuse3)");
    }
    let says = |line: &str| line.trim() == "user_allow_other";
    if fs::read_to_string("/etc/fuse.conf").is_ok_and(|text| text.lines().any(says)) {
        return println!("\nskipped: /etc/fuse.conf lets every user open a disk to others");
    }
    // The refusal of /dev/fuse itself would come first.
    let mode = fs::metadata("/dev/fuse").map_or(0, |fuse| fuse.permissions().mode());
    if mode & 0o006 != 0o006 {
        return println!("\nskipped: /dev/fuse has mode {:o}: ordinary users cannot open it", mode & 0o777);
    }
    let directory = Directory::new("not-other");
    chown(&directory.0, Some(NOBODY), Some(NOBODY)).unwrap();
    let mut command = weir(&["--allow-other", "--store", "host:8MiB"], &directory.0);
    let Ok(output) = command.uid(NOBODY).gid(NOBODY).current_dir("/").output() else {
        return println!("\nskipped: an ordinary user cannot run the program where it lies");
    };
    let said = said(&output);
    assert_eq!((output.status.code(), said.lines().count()), (Some(1), 1), "{said}");
    assert!(said.contains("user_allow_other") && said.contains("/etc/fuse.conf"), "{said}");
}

#[test]
fn what_cannot_be_is_one_line_that_says_why() {
    let file = std::env::temp_dir().join(format!("weir-mount-{}-file", std::process::id()));
    fs::write(&file, b"precious").unwrap();
    for (directory, flags, words, code) in [
        (
            Path::new("/nonexistent/directory"),
            &["--store", "host:8MiB"][..],
            "cannot mount on /nonexistent/directory: ",
            1,
        ),
        (&file, &["--store", "host:8MiB"], "no directory", 1),
        (Path::new("/tmp"), &["--store", "host:1TiB"], "host", 3),
    ] {
        for mode in [&[][..], &["--foreground"]] {
            let output = weir(&[flags, mode].concat(), directory).output().unwrap();
            assert_eq!(output.status.code(), Some(code), "{}", said(&output));
            assert!(said(&output).contains(words) && said(&output).lines().count() == 1, "{}", said(&output));
        }
    }
    assert_eq!(fs::read(&file).unwrap(), b"precious");
    fs::remove_file(&file).unwrap();
}

/// The open files of a process: the targets of its descriptors.
fn open_by(pid: u32) -> Vec<String> {
    let fds = fs::read_dir(format!("/proc/{pid}/fd")).unwrap().flatten();
    fds.filter_map(|fd| fs::read_link(fd.path()).ok()?.into_os_string().into_string().ok()).collect()
}

#[test]
fn by_rings_a_signal_ends_it_under_load_and_a_disk_that_was_killed_is_replaced() {
    use rustix::process::{Pid, Signal, kill_process};
    let Some(_enabled) = EnableUring::set("Y") else { return };
    let directory = Directory::new("rings");
    for signal in [Signal::KILL, Signal::TERM] {
        let mut child = weir(&["--foreground", "--store", "host:16MiB"], &directory.0).spawn().unwrap();
        let file = directory.0.join("file");
        let begun = Instant::now();
        // A killed server leaves a mount too, which does not answer.
        while !is_mounted(&directory.0) || fs::write(&file, vec![7; 1 << 20]).is_err() {
            if child.try_wait().unwrap().is_some() {
                return println!("\nskipped: no FUSE mount here");
            }
            assert!(begun.elapsed() < PATIENCE);
            thread::sleep(Duration::from_millis(10));
        }
        let rings = open_by(child.id()).iter().filter(|name| name.contains("io_uring")).count();
        assert!(rings > 0, "requests come by rings");
        let load = "while dd if=/dev/zero of=$1 bs=4k count=200 conv=notrunc oflag=direct; do :; done";
        let mut clients: Vec<_> = (0..3)
            .map(|number| {
                let file = directory.0.join(format!("load-{number}"));
                Command::new("sh")
                    .args(["-c", load, "sh"])
                    .arg(file)
                    .stderr(std::process::Stdio::null())
                    .spawn()
                    .unwrap()
            })
            .collect();
        until("nothing is written", || {
            fs::metadata(directory.0.join("load-2")).is_ok_and(|meta| meta.len() > 0)
        });
        if signal == Signal::KILL {
            kill_process(Pid::from_child(&child), signal).unwrap();
            child.wait().unwrap();
        } else {
            // Wait for a moment at which no client has a file open.
            until("it stays though it is told to end", || {
                let _ = kill_process(Pid::from_child(&child), signal);
                child.try_wait().unwrap().is_some()
            });
            assert_eq!(child.wait().unwrap().code(), Some(0));
        }
        // The kernel closes a dead process's rings a moment later; until then the disk looks alive.
        // The kernel still answers from its caches.
        until("a dead disk answers", || {
            !is_mounted(&directory.0) || fs::write(directory.0.join("probe"), b"new").is_err()
        });
        for client in &mut clients {
            // The clients fail on the mount that is gone, or write into the directory below it.
            until("a client waits for ever", || {
                let _ = kill_process(Pid::from_child(client), Signal::TERM);
                client.try_wait().unwrap().is_some()
            });
        }
    }
    assert!(!is_mounted(&directory.0));
}

#[test]
fn whoever_gives_up_waiting_for_a_disk_ends_its_making_without_another_word() {
    let scene = Directory::new("given-up");
    let directory = scene.0.join("disk");
    fs::create_dir_all(&directory).unwrap();
    let said = scene.0.join("said");
    let mut outer =
        weir(&["--store", "host:2GiB"], &directory).stderr(fs::File::create(&said).unwrap()).spawn().unwrap();
    until("the inner process begins", || servers(&directory) == 2);
    // Act as a terminal does: the signal goes only to the outer process, which it knows.
    outer.kill().unwrap();
    outer.wait().unwrap();
    until("the inner process ends", || servers(&directory) == 0);
    assert!(!is_mounted(&directory));
    let said = fs::read_to_string(&said).unwrap();
    assert!(!said.contains("Broken pipe"), "{said}");
}
