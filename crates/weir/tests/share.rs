//! `weir serve --share` as programs on the same machine meet it: in Rust, in C, beside NBD, and over a kernel's swap.

use std::fs;
use std::io::Read as _;
use std::os::unix::fs::PermissionsExt as _;
use std::os::unix::net::UnixStream;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::thread;
use std::time::{Duration, Instant};
use weir_share::wire::Spot;
use weir_share::{Client, Options};

const PATIENCE: Duration = Duration::from_secs(20);

/// A daemon with its directory; both end with it.
struct Daemon {
    process: Child,
    directory: PathBuf,
}

impl Daemon {
    fn start(name: &str, flags: &[&str]) -> Self {
        let directory = std::env::temp_dir().join(format!("weir-share-{}-{name}", std::process::id()));
        fs::create_dir_all(&directory).expect("a directory");
        let mut command = Command::new(env!("CARGO_BIN_EXE_weir"));
        command.args(["serve", "--store", "host:32MiB", "--size", "16MiB", "--control"]);
        command.arg(directory.join("control.sock")).arg("--share").arg(directory.join("share.sock"));
        let process = command.args(flags).stderr(Stdio::piped()).spawn().expect("the daemon starts");
        let mut daemon = Daemon { process, directory };
        let begun = Instant::now();
        while UnixStream::connect(daemon.directory.join("control.sock")).is_err() {
            if daemon.process.try_wait().expect("a child").is_some() {
                panic!("the daemon ended: {}", daemon.said());
            }
            assert!(begun.elapsed() < PATIENCE, "the daemon does not listen");
            thread::sleep(Duration::from_millis(10));
        }
        daemon
    }

    fn socket(&self) -> PathBuf {
        self.directory.join("share.sock")
    }

    fn status(&self) -> serde_json::Value {
        let control = self.directory.join("control.sock");
        let mut command = Command::new(env!("CARGO_BIN_EXE_weir"));
        let output = command.args(["status", "--json", "--control"]).arg(control).output().expect("status");
        serde_json::from_slice(&output.stdout).expect("JSON")
    }

    fn said(&mut self) -> String {
        let mut said = String::new();
        let _ = self.process.stderr.take().expect("piped").read_to_string(&mut said);
        said
    }

    /// Ends it by SIGTERM.
    fn terminate(mut self) -> String {
        let pid = rustix::process::Pid::from_child(&self.process);
        rustix::process::kill_process(pid, rustix::process::Signal::TERM).expect("a living child");
        assert!(self.process.wait().expect("a child").success());
        assert!(!self.socket().exists(), "the socket is gone with the daemon");
        self.said()
    }
}

impl Drop for Daemon {
    fn drop(&mut self) {
        let _ = self.process.kill();
        let _ = self.process.wait();
        let _ = fs::remove_dir_all(&self.directory);
    }
}

fn page_of(number: u64) -> [u8; 4096] {
    std::array::from_fn(|at| (number as usize * 31 + at * 7 + at / 256) as u8)
}

#[test]
fn a_program_writes_and_reads_pages_through_the_daemon_in_frames_and_in_place() {
    let daemon = Daemon::start("serve", &["--share-in-place"]);
    let mode = fs::metadata(daemon.socket()).expect("a socket").permissions().mode();
    assert_eq!(mode & 0o777, 0o600, "only its owner");
    for in_place in [false, true] {
        let options = Options { in_place, ..Options::default() };
        let mut client = Client::connect(&daemon.socket(), options).expect("a connection");
        assert_eq!(client.pages(), 4096);
        for number in 0..1000 {
            client.write(number, &page_of(number)).expect("written");
            let lease = client.read(number).expect("read");
            assert_eq!(client.page(&lease), &page_of(number));
            assert_eq!(matches!(lease.spot(), Spot::Window { .. }), in_place);
            client.give(lease).expect("given back");
        }
        let status = daemon.status();
        let export = &status["exports"][0];
        assert_eq!((export["kind"].as_str(), export["connections"].as_u64()), (Some("share"), Some(1)));
    }
    assert_eq!(daemon.status()["protection"]["io_allocations"].as_u64(), Some(0));
    assert!(daemon.terminate().contains("share.sock"));
}

#[test]
fn the_client_in_c_meets_the_daemon() {
    let here = Path::new(env!("CARGO_MANIFEST_DIR")).join("../weir-share");
    let daemon = Daemon::start("c", &["--share-in-place"]);
    let program = daemon.directory.join("client");
    let mut compiler = Command::new("cc");
    compiler.args(["-std=c11", "-D_GNU_SOURCE", "-O2", "-I"]).arg(here.join("include"));
    let built = compiler.arg(here.join("examples/client.c")).arg("-o").arg(&program).status();
    assert!(built.expect("a C compiler, cc, is needed for this test").success());
    for flag in [None, Some("in-place")] {
        let output = Command::new(&program).arg(daemon.socket()).args(flag).output().expect("it runs");
        let said = String::from_utf8_lossy(&output.stdout) + String::from_utf8_lossy(&output.stderr);
        assert_eq!(said, "1000 pages written and read in place\n");
    }
}

#[test]
fn pages_that_carry_swap_can_be_read_and_not_written() {
    // Where the system denies the flusher flag the rest holds all the same.
    let daemon = Daemon::start("swap", &["--swap", "--unsafe-no-flusher"]);
    let mut client = Client::connect(&daemon.socket(), Options::default()).expect("a connection");
    let refused = client.write(0, &page_of(0)).expect_err("the kernel alone writes its swap");
    assert!(format!("{refused:?}").contains("ReadOnlyFilesystem"), "{refused:?}");
    let lease = client.read(0).expect("read");
    assert_eq!(client.page(&lease), &[0; 4096]);
    client.give(lease).expect("given back");
}
