//! Signals of a terminal, a session or init end no daemon whose device is in use, nor its keeper.

mod common;

use common::{Daemon, PATIENCE, WEIR};
use rustix::process::{Pid, Signal, kill_process, kill_process_group};
use std::fs::{self, File, OpenOptions};
use std::io::Read as _;
use std::os::unix::fs::OpenOptionsExt as _;
use std::os::unix::process::CommandExt as _;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::thread;
use std::time::{Duration, Instant};
use weir_export::fuse::mount::is_mounted;
use weir_system::loop_device::LoopDevice;

/// Time that a process must survive a signal: one that the signal ends is gone much sooner.
const LIVES_FOR: Duration = Duration::from_secs(1);

/// Signals that end or stop a process that does not expect them.
const SIGNALS: [Signal; 14] = [
    Signal::HUP,
    Signal::QUIT,
    Signal::TERM,
    Signal::INT,
    Signal::PIPE,
    Signal::USR2,
    Signal::ALARM,
    Signal::VTALARM,
    Signal::IO,
    Signal::XCPU,
    Signal::XFSZ,
    Signal::TSTP,
    Signal::TTIN,
    Signal::TTOU,
];

#[derive(Clone, Copy, PartialEq, Eq, Debug)]
enum Carries {
    FileSystem,
    Swap,
}

/// A user of a loop device over the daemon's file.
struct User {
    device: Option<LoopDevice>,
    /// The mount point, if the device carries a file system.
    mounted: Option<PathBuf>,
}

impl User {
    fn new(scene: &Daemon, carries: Carries) -> User {
        let device = LoopDevice::attach(&disk(scene)).unwrap();
        let mut user = User { device: Some(device), mounted: None };
        match carries {
            Carries::FileSystem => {
                let point = scene.directory.join("mounted");
                fs::create_dir(&point).unwrap();
                run(Command::new("mkfs.ext4").args(["-q", "-O", "^has_journal"]).arg(user.path()));
                run(Command::new("mount").arg(user.path()).arg(&point));
                user.mounted = Some(point);
                let mut file = user.file(OpenOptions::new().write(true).create(true));
                std::io::Write::write_all(&mut file, &[7; 1 << 20]).unwrap();
                file.sync_all().unwrap();
            }
            Carries::Swap => {
                run(Command::new("mkswap").arg("-q").arg(user.path()));
                run(Command::new("swapon").arg(user.path()));
            }
        }
        user
    }

    fn path(&self) -> &Path {
        self.device.as_ref().unwrap().path()
    }

    fn file(&self, options: &mut OpenOptions) -> File {
        options.open(self.mounted.as_ref().unwrap().join("file")).unwrap()
    }

    /// Whether everything that was written is read back, from the daemon itself.
    fn is_whole(&self) -> bool {
        if self.mounted.is_none() {
            return fs::read_to_string("/proc/swaps").unwrap().contains(self.path().to_str().unwrap());
        }
        let mut file = self.file(OpenOptions::new().read(true).custom_flags(libc::O_DIRECT));
        let mut page = weir_core::Page::zeroed();
        (0..256).all(|_| file.read_exact(&mut page[..]).is_ok() && page.iter().all(|byte| *byte == 7))
    }
}

impl Drop for User {
    fn drop(&mut self) {
        let device = self.device.take().unwrap();
        match &self.mounted {
            // A process that another test starts has this one's open file for a moment, between its
            // fork and its exec.
            Some(point) => {
                let begun = Instant::now();
                let is_off =
                    || Command::new("umount").arg(point).status().is_ok_and(|status| status.success());
                while !is_off() && begun.elapsed() < PATIENCE {
                    thread::sleep(Duration::from_millis(20));
                }
            }
            None => drop(Command::new("swapoff").arg(device.path()).status()),
        }
        let _ = device.detach();
    }
}

fn run(command: &mut Command) {
    let output = command.output().unwrap();
    assert!(output.status.success(), "{command:?}: {output:?}");
}

fn disk(scene: &Daemon) -> PathBuf {
    scene.directory.join("disk")
}

/// The arguments of `weir serve`.
fn serve(directory: &Path, carries: Carries, has_keeper: bool) -> Vec<String> {
    let at = |name: &str| directory.join(name).display().to_string();
    let mut words = vec!["serve".to_owned(), "--control".into(), at("control"), "--fuse".into(), at("disk")];
    words.extend(["--store".into(), "host:16MiB".into()]);
    if has_keeper {
        words.push("--keeper".into());
    }
    if carries == Carries::Swap {
        words.extend(["--swap".into(), "--unsafe-no-flusher".into()]);
    }
    words
}

/// Whether this machine has what the tests of this file need; prints what is missing.
fn is_possible(name: &str) -> bool {
    let has = |program: &str| Command::new(program).arg("--version").output().is_ok();
    let missing = if !rustix::process::geteuid().is_root() {
        "root"
    } else if !Path::new("/dev/fuse").exists() {
        "/dev/fuse"
    } else if !Path::new("/dev/loop-control").exists() {
        "/dev/loop-control"
    } else if !has("mkfs.ext4") && Command::new("mkfs.ext4").arg("-V").output().is_err() {
        "mkfs.ext4"
    } else {
        return true;
    };
    println!("\nskipped: {name}: {missing}");
    false
}

/// Starts a daemon in a process group of its own, and waits for its file.
fn start(name: &str, carries: Carries, has_keeper: bool) -> Daemon {
    let directory = std::env::temp_dir().join(format!("weir-signals-{}-{name}", std::process::id()));
    fs::create_dir_all(&directory).unwrap();
    let words = serve(&directory, carries, has_keeper);
    let process = Command::new(WEIR).args(words).process_group(0).spawn().unwrap();
    let mut scene = Daemon { directory, process };
    assert!(scene.comes_up(|scene| is_mounted(&disk(scene)) && scene.listens()), "it ended");
    scene
}

fn pid(scene: &Daemon) -> i64 {
    scene.status()["pid"].as_i64().unwrap()
}

fn every_signal(carries: Carries, has_keeper: bool) {
    let name = format!("{carries:?}-{has_keeper}").to_lowercase();
    let scene = start(&name, carries, has_keeper);
    let daemon = pid(&scene);
    let outer = Pid::from_child(&scene.process);
    let user = User::new(&scene, carries);
    for signal in SIGNALS {
        for process in [outer, Pid::from_raw(daemon as i32).unwrap()] {
            kill_process(process, signal).unwrap_or_else(|error| panic!("before {signal:?}: {error}"));
        }
        kill_process_group(outer, signal).unwrap();
    }
    if has_keeper {
        // For a daemon this signal means: end so that another can take over.
        kill_process(outer, Signal::USR1).unwrap();
    }
    thread::sleep(LIVES_FOR);
    assert_eq!(pid(&scene), daemon, "another daemon had to be started");
    assert!(user.is_whole());
    drop(user);
    let mut scene = scene;
    assert_eq!(scene.terminate(), Some(0), "it ends once nothing uses it");
}

#[test]
fn no_signal_ends_what_carries_a_mounted_file_system() {
    if is_possible("no_signal_ends_what_carries_a_mounted_file_system") {
        [false, true].into_iter().for_each(|has_keeper| every_signal(Carries::FileSystem, has_keeper));
    }
}

#[test]
fn no_signal_ends_what_carries_swap() {
    if is_possible("no_signal_ends_what_carries_swap") {
        [false, true].into_iter().for_each(|has_keeper| every_signal(Carries::Swap, has_keeper));
    }
}

/// If a user tells a hanging daemon to stop, and then kills it, its pages must not be lost.
#[test]
fn a_daemon_that_hangs_and_is_killed_after_its_keeper_was_told_to_end_is_replaced() {
    if !is_possible("a_daemon_that_hangs_and_is_killed_after_its_keeper_was_told_to_end_is_replaced") {
        return;
    }
    let mut scene = start("hangs", Carries::FileSystem, true);
    let daemon = pid(&scene);
    let user = User::new(&scene, Carries::FileSystem);
    let [keeper, one] = [Pid::from_child(&scene.process), Pid::from_raw(daemon as i32).unwrap()];
    assert!(common::kill(one, Signal::STOP));
    kill_process(keeper, Signal::TERM).unwrap();
    let begun = Instant::now();
    while !Daemon::has_pending(one, Signal::TERM) {
        assert!(begun.elapsed() < PATIENCE, "the keeper does not pass the signal on");
        thread::sleep(Duration::from_millis(10));
    }
    kill_process(one, Signal::KILL).unwrap();
    let begun = Instant::now();
    while scene.daemon().is_none_or(|next| next == one) {
        assert!(begun.elapsed() < PATIENCE, "the keeper gave the pages up");
        thread::sleep(Duration::from_millis(10));
    }
    // The next daemon is asked, and says that it is in use.
    assert!(user.is_whole());
    thread::sleep(LIVES_FOR);
    assert_ne!(pid(&scene), daemon);
    assert!(user.is_whole());
    drop(user);
    assert_eq!(scene.terminate(), Some(0));
}

/// A shell on a terminal of its own, which closes when this is dropped.
struct Terminal(Child);

impl Terminal {
    fn running(words: &[String]) -> Terminal {
        let line = words.iter().map(|word| format!("'{word}'")).collect::<Vec<_>>().join(" ");
        let mut script = Command::new("script");
        script.args(["-qec", &format!("'{WEIR}' {line} & wait"), "/dev/null"]);
        // The end of its input would be the end of the shell.
        script.stdin(Stdio::piped()).stdout(Stdio::null()).stderr(Stdio::null());
        Terminal(script.spawn().unwrap())
    }

    /// The process of the shell, which leads the session.
    fn shell(&self) -> Option<Pid> {
        let pid = self.0.id();
        let children = fs::read_to_string(format!("/proc/{pid}/task/{pid}/children")).ok()?;
        Pid::from_raw(children.trim().parse().ok()?)
    }
}

impl Drop for Terminal {
    fn drop(&mut self) {
        let _ = self.0.kill();
        let _ = self.0.wait();
    }
}

fn a_terminal_closes(carries: Carries, has_keeper: bool) {
    let name = format!("terminal-{carries:?}-{has_keeper}").to_lowercase();
    let directory = std::env::temp_dir().join(format!("weir-signals-{}-{name}", std::process::id()));
    fs::create_dir_all(&directory).unwrap();
    let terminal = Terminal::running(&serve(&directory, carries, has_keeper));
    // No other part of the harness has the daemon as its child.
    let process = Command::new("sleep").arg("0").spawn().unwrap();
    let scene = Daemon { directory, process };
    let begun = Instant::now();
    while !(is_mounted(&disk(&scene)) && scene.listens()) {
        assert!(begun.elapsed() < PATIENCE, "no daemon");
        thread::sleep(Duration::from_millis(10));
    }
    let daemon = pid(&scene);
    let user = User::new(&scene, carries);
    let shell = terminal.shell().expect("a shell");
    drop(terminal);
    while rustix::process::test_kill_process(shell).is_ok() {
        assert!(begun.elapsed() < PATIENCE, "the session does not end");
        thread::sleep(Duration::from_millis(10));
    }
    thread::sleep(LIVES_FOR);
    assert_eq!(pid(&scene), daemon, "another daemon had to be started");
    // The daemon writes that it does not stop, to a terminal that is gone.
    let one = Pid::from_raw(daemon as i32).unwrap();
    kill_process(one, Signal::TERM).unwrap();
    thread::sleep(LIVES_FOR);
    assert_eq!(pid(&scene), daemon, "its last words ended it");
    assert!(user.is_whole());
    drop(user);
    kill_process(one, Signal::TERM).unwrap();
    while rustix::process::test_kill_process(one).is_ok() {
        assert!(begun.elapsed() < PATIENCE, "it stays though nothing uses it");
        thread::sleep(Duration::from_millis(10));
    }
}

#[test]
fn a_terminal_that_closes_ends_nothing_that_is_in_use() {
    let name = "a_terminal_that_closes_ends_nothing_that_is_in_use";
    if !is_possible(name) {
        return;
    }
    if Command::new("script").arg("--version").output().is_err() {
        return println!("\nskipped: {name}: the program script");
    }
    for carries in [Carries::FileSystem, Carries::Swap] {
        [false, true].into_iter().for_each(|has_keeper| a_terminal_closes(carries, has_keeper));
    }
}
