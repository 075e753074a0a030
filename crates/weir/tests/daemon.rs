//! `weir serve`, `weir status` and `weir try` as processes, over real sockets.

use std::fs;
use std::io::{BufRead as _, BufReader, Read as _, Write as _};
use std::os::unix::fs::PermissionsExt as _;
use std::os::unix::net::{UnixListener, UnixStream};
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Output, Stdio};
use std::thread;
use std::time::{Duration, Instant};
use weir_export::nbd::client::{Client, Wish};

const PATIENCE: Duration = Duration::from_secs(60);

fn weir(arguments: &[&str]) -> Command {
    let mut command = Command::new(env!("CARGO_BIN_EXE_weir"));
    command.args(arguments);
    command
}

fn run(arguments: &[&str]) -> Output {
    weir(arguments).output().expect("the program starts")
}

fn text(bytes: &[u8]) -> String {
    String::from_utf8_lossy(bytes).into_owned()
}

/// A directory with a short path: a socket's path has at most 107 bytes.
struct Directory(PathBuf);

impl Directory {
    fn new(name: &str) -> Self {
        let path = std::env::temp_dir().join(format!("weir-{}-{name}", std::process::id()));
        fs::create_dir_all(&path).expect("a directory");
        Directory(path)
    }

    fn file(&self, name: &str) -> String {
        self.0.join(name).to_str().expect("UTF-8").to_owned()
    }
}

impl Drop for Directory {
    fn drop(&mut self) {
        let _ = fs::remove_dir_all(&self.0);
    }
}

/// A daemon that is killed if the test fails.
struct Daemon {
    process: Child,
    control: String,
    nbd: String,
}

impl Daemon {
    /// Starts a daemon with these flags besides its sockets, and waits until it answers.
    fn start(directory: &Directory, flags: &[&str]) -> Self {
        let (control, nbd) = (directory.file("control.sock"), directory.file("nbd.sock"));
        let address = format!("unix:{nbd}");
        let sockets = ["serve", "--control", &control, "--nbd", &address];
        Self::spawn(weir(&[&sockets, flags].concat()), control, nbd)
    }

    fn spawn(mut command: Command, control: String, nbd: String) -> Self {
        let process = command.stderr(Stdio::piped()).spawn().expect("the daemon starts");
        let mut daemon = Daemon { process, control, nbd };
        let begun = Instant::now();
        while UnixStream::connect(&daemon.control).is_err() {
            if let Some(status) = daemon.process.try_wait().expect("a child") {
                panic!("the daemon ended with {status}: {}", daemon.said());
            }
            assert!(begun.elapsed() < PATIENCE, "the daemon does not listen at {}", daemon.control);
            thread::sleep(Duration::from_millis(10));
        }
        daemon
    }

    fn status(&self) -> serde_json::Value {
        let output = run(&["status", "--json", "--control", &self.control]);
        assert!(output.status.success(), "{}", text(&output.stderr));
        serde_json::from_slice(&output.stdout).expect("JSON")
    }

    /// Sends SIGTERM and returns the exit code, if the daemon ends.
    fn terminate(&mut self) -> Option<i32> {
        let pid = rustix::process::Pid::from_child(&self.process);
        rustix::process::kill_process(pid, rustix::process::Signal::TERM).expect("a living child");
        let begun = Instant::now();
        while begun.elapsed() < PATIENCE {
            if let Some(status) = self.process.try_wait().expect("a child") {
                return status.code();
            }
            thread::sleep(Duration::from_millis(10));
        }
        None
    }

    fn said(&mut self) -> String {
        let mut said = String::new();
        let _ = self.process.stderr.take().expect("piped").read_to_string(&mut said);
        said
    }
}

impl Drop for Daemon {
    fn drop(&mut self) {
        let _ = self.process.kill();
        let _ = self.process.wait();
    }
}

#[test]
fn a_daemon_serves_tells_how_it_is_and_leaves_nothing_behind() {
    let directory = Directory::new("serve");
    let mut daemon =
        Daemon::start(&directory, &["--store", "host:32MiB", "--size", "16MiB", "--connections", "3"]);
    let mut client = Client::unix(&daemon.nbd, &Wish::default()).expect("a connection");
    assert_eq!(client.terms().bytes, 16 << 20);
    let page: Vec<u8> = (0..4096u32).map(|at| (at * 7) as u8).collect();
    client.write(8 << 20, &page).expect("written");
    client.write(4096, &[5; 8192]).expect("written");
    assert_eq!(client.read(8 << 20, 4096).expect("read"), page);

    let status = daemon.status();
    assert_eq!(status["schema"], 1);
    assert_eq!(status["volume"]["pages"], 4096);
    assert_eq!((&status["volume"]["stored"], &status["volume"]["filled"]), (&1.into(), &2.into()));
    assert_eq!(status["volume"]["free"], 4093);
    // Besides the device's slots, the last store has room for writes under way.
    assert!(status["stores"][0]["slots"].as_u64().is_some_and(|slots| slots >= 8192), "{status}");
    assert_eq!(status["stores"][0]["state"], "online");
    assert_eq!(status["stores"][0]["slots_used"], 1);
    assert_eq!(status["write"]["pages"], 3);
    assert_eq!(status["read"]["corrupt"], 0);
    assert_eq!(status["exports"][0]["connections"], 1);
    assert_eq!(status["exports"][0]["connections_most"], 3);
    assert_eq!(status["protection"]["io_allocations"], 0);
    let lines = text(&run(&["status", "--control", &daemon.control]).stdout);
    assert!(lines.contains("store     host:") && lines.contains(" online: 4KiB of "), "{lines}");

    for socket in [&daemon.nbd, &daemon.control] {
        let mode = fs::metadata(socket).expect("there").permissions().mode();
        assert_eq!(mode & 0o777, 0o600, "{socket}");
    }
    assert_eq!(daemon.terminate(), Some(0), "{}", daemon.said());
    assert!(!Path::new(&daemon.nbd).exists() && !Path::new(&daemon.control).exists());
}

#[test]
fn a_configuration_file_serves_as_its_flags_would() {
    let directory = Directory::new("config");
    let (control, nbd) = (directory.file("c.sock"), directory.file("n.sock"));
    let file = directory.file("weir.toml");
    let toml = format!(
        "store = 'host:16MiB'\nsize = '8MiB'\nnbd = 'unix:{nbd}'\ncontrol = '{control}'\nconnections = 2\n"
    );
    fs::write(&file, toml).expect("written");
    let daemon = Daemon::spawn(weir(&["serve", "--config", &file]), control, nbd);
    let status = daemon.status();
    assert_eq!(status["volume"]["bytes"], 8 << 20);
    assert_eq!(status["exports"][0]["connections_most"], 2);
}

#[test]
fn the_run_time_directory_is_made_before_the_first_way_in_and_nobody_elses_is() {
    let directory = Directory::new("run-time");
    let serve = |addresses: &[&str]| {
        let mut command =
            weir(&[&["serve", "--store", "host:16MiB", "--connections", "1"], addresses].concat());
        command.env("XDG_RUNTIME_DIR", &directory.0);
        command
    };
    let nbd = directory.file("weir/nbd.sock");
    let (address, share) = (format!("unix:{nbd}"), directory.file("weir/share.sock"));
    let mut places = vec!["--share", &share];
    let file = directory.file("weir/disk");
    if rustix::process::geteuid().is_root() && Path::new("/dev/fuse").exists() {
        places.extend(["--fuse", &file]);
    }
    // Each is the first front end of its own daemon.
    for places in [vec!["--nbd", &address], places] {
        let mut daemon = Daemon::spawn(serve(&places), directory.file("weir/control.sock"), nbd.clone());
        let mode = fs::metadata(directory.0.join("weir")).expect("made").permissions().mode();
        assert_eq!(mode & 0o777, 0o700);
        assert_eq!(daemon.terminate(), Some(0), "{}", daemon.said());
        fs::remove_dir(directory.0.join("weir")).expect("nothing is left in it");
    }
    let elsewhere = format!("unix:{}", directory.file("elsewhere/nbd.sock"));
    let refused = serve(&["--nbd", &elsewhere]).output().expect("the program starts");
    assert_eq!(refused.status.code(), Some(1), "{}", text(&refused.stderr));
    assert!(!directory.0.join("elsewhere").exists());
}

#[test]
fn a_second_daemon_is_refused_and_a_dead_ones_socket_is_not() {
    let directory = Directory::new("twice");
    let control = directory.file("control.sock");
    drop(UnixListener::bind(&control).expect("a socket that nobody listens on"));
    // A child that another test starts at this moment also listens, until it runs its own program.
    let begun = Instant::now();
    while UnixStream::connect(&control).is_ok() {
        assert!(begun.elapsed() < PATIENCE, "somebody listens");
    }
    let daemon = Daemon::start(&directory, &["--store", "host:16MiB"]);
    let address = format!("unix:{}", directory.file("other.sock"));
    let second = run(&["serve", "--store", "host:16MiB", "--nbd", &address, "--control", &daemon.control]);
    let said = text(&second.stderr);
    assert_eq!(second.status.code(), Some(1), "{said}");
    assert!(said.contains(&format!("a daemon already answers at {control}")), "{said}");
    assert_eq!(daemon.status()["volume"]["filled"], 0, "the first one goes on");
}

#[test]
fn nonsense_at_the_control_socket_gets_an_error_and_hurts_nobody() {
    let directory = Directory::new("control");
    let daemon = Daemon::start(&directory, &["--store", "host:16MiB"]);
    let long = format!("{{\"schema\":1,\"request\":\"{}\"}}\n", "x".repeat(10_000));
    for (request, words) in [
        ("\n", "no line of JSON"),
        ("status\n", "no line of JSON"),
        ("{\"request\":\"status\"}\n", "names no schema"),
        ("{\"schema\":7,\"request\":\"status\"}\n", "schema 7 is not spoken here; use "),
        ("{\"schema\":1,\"request\":\"format\"}\n", "unknown request"),
        (long.as_str(), "no line of JSON"),
    ] {
        let mut stream = UnixStream::connect(&daemon.control).expect("listening");
        // The daemon may disconnect before it has read all of an endless line.
        let _ = stream.write_all(request.as_bytes());
        let mut answer = String::new();
        let _ = BufReader::new(stream).read_line(&mut answer);
        let cut = request.len() > 4096 && answer.is_empty();
        assert!(cut || (answer.contains("\"schema\":1") && answer.contains(words)), "{request:?}: {answer}");
    }
    assert_eq!(daemon.status()["schema"], 1);
}

#[test]
fn status_without_a_daemon_says_where_it_looked() {
    let directory = Directory::new("nobody");
    let output = run(&["status", "--control", &directory.file("nobody.sock")]);
    assert_eq!(output.status.code(), Some(1));
    assert!(text(&output.stderr).contains("nobody.sock"));
}

/// Sends a request to a control socket, as `weir attach` does.
fn ask(control: &str, request: &str) -> String {
    let mut stream = UnixStream::connect(control).expect("the daemon listens");
    stream.write_all(format!("{request}\n").as_bytes()).expect("it reads");
    let mut line = String::new();
    BufReader::new(stream).read_line(&mut line).expect("it answers");
    line
}

#[test]
fn a_device_that_was_attached_is_known_to_the_daemon_after_a_crash_and_one_let_go_is_not() {
    let directory = Directory::new("attached");
    let mut keeper = Daemon::start(&directory, &["--keeper", "--store", "host:16MiB", "--connections", "2"]);
    let request = |device: u32, address: &str| {
        format!(
            r#"{{"schema":1,"request":"attached","device":{device},"address":"{address}","name":"","connections":2,"request_timeout":5,"reconnect_timeout":600}}"#
        )
    };
    let address = format!("unix:{}", keeper.nbd);
    assert_eq!(ask(&keeper.control, &request(901, &address)).trim(), r#"{"schema":1}"#);
    assert_eq!(ask(&keeper.control, &request(902, &address)).trim(), r#"{"schema":1}"#);
    assert!(ask(&keeper.control, &request(903, "nowhere")).contains("is no address"));
    assert_eq!(
        ask(&keeper.control, r#"{"schema":1,"request":"detached","device":901}"#).trim(),
        r#"{"schema":1}"#
    );

    let pid = keeper.status()["pid"].as_u64().expect("a number") as i32;
    let daemon = rustix::process::Pid::from_raw(pid).expect("a process");
    rustix::process::kill_process(daemon, rustix::process::Signal::KILL).expect("a living daemon");
    let begun = Instant::now();
    let again = loop {
        let output = run(&["status", "--json", "--control", &keeper.control]);
        let status: Option<serde_json::Value> = serde_json::from_slice(&output.stdout).ok();
        match status {
            Some(status) if status["pid"] != pid => break status,
            _ => assert!(begun.elapsed() < PATIENCE, "no daemon after the first was killed"),
        }
        thread::sleep(Duration::from_millis(20));
    };
    // A kernel with an NBD client reports at once that it has no such device.
    let asked = Path::new("/sys/module/nbd").exists() && again["attached"] == serde_json::json!([]);
    assert!(asked || again["attached"] == serde_json::json!(["/dev/nbd902"]), "{again}");
    keeper.terminate();
}

#[test]
fn swap_onto_a_file_in_memory_is_refused_whatever_is_forced() {
    let directory = Directory::new("swap-tmpfs");
    let address = format!("unix:{}", directory.file("nbd"));
    let file = format!("/dev/shm/weir-daemon-test-{}", std::process::id());
    let mounts = fs::read_to_string("/proc/mounts").expect("mounts");
    if !mounts.lines().any(|mount| mount.split(' ').skip(1).take(2).eq(["/dev/shm", "tmpfs"])) {
        println!("skipped: swap_onto_a_file_in_memory_is_refused_whatever_is_forced: no tmpfs at /dev/shm");
        return;
    }
    let store = format!("file:{file}?size=16MiB");
    let output = run(&[
        "serve",
        "--swap",
        "--unsafe-no-flusher",
        "--store",
        &store,
        "--nbd",
        &address,
        "--control",
        &directory.file("control"),
    ]);
    let _ = fs::remove_file(&file);
    let said = text(&output.stderr);
    assert_eq!(output.status.code(), Some(1), "{said}");
    assert!(said.contains(&file) && said.contains("cannot carry swap"), "{said}");
    // The store is refused as cached if tmpfs does not support O_DIRECT, and as memory if it does.
    assert!(said.contains("page cache") || said.contains("tmpfs"), "{said}");
}

#[test]
fn swap_without_the_flusher_is_refused_unless_it_is_forced() {
    if weir_core::swap_safety::set_io_flusher().is_ok() {
        println!(
            "skipped: swap_without_the_flusher_is_refused_unless_it_is_forced: this system grants the flusher"
        );
        return;
    }
    let directory = Directory::new("swap");
    let address = format!("unix:{}", directory.file("refused.sock"));
    let refused =
        run(&["serve", "--swap", "--store", "host:16MiB", "--nbd", &address, "--control", &address[5..]]);
    let said = text(&refused.stderr);
    assert_eq!(refused.status.code(), Some(1), "{said}");
    assert!(said.contains("PR_SET_IO_FLUSHER") && said.contains("--unsafe-no-flusher"), "{said}");

    let daemon = Daemon::start(&directory, &["--swap", "--unsafe-no-flusher", "--store", "host:16MiB"]);
    let protection = &daemon.status()["protection"];
    assert_eq!((&protection["swap"], &protection["io_flusher"]), (&true.into(), &false.into()));
}

#[test]
fn a_device_larger_than_its_stores_is_refused_with_the_room_that_is_missing() {
    let directory = Directory::new("large");
    let address = format!("unix:{}", directory.file("n.sock"));
    let control = directory.file("c.sock");
    let flags = ["--size", "64MiB", "--store", "host:8MiB", "--nbd", &address, "--control", &control];
    let output = run(&[&["serve"], &flags[..]].concat());
    let said = text(&output.stderr);
    assert_eq!(output.status.code(), Some(1), "{said}");
    assert!(said.contains("64MiB") && said.contains("make it smaller or the stores larger"), "{said}");
}

#[test]
fn tls_without_a_certificate_is_refused_and_the_missing_file_is_named() {
    let directory = Directory::new("tls");
    let (tls, control) = (directory.file("certificates"), directory.file("c.sock"));
    let flags =
        ["--store", "host:16MiB", "--nbd", "tcp:localhost:10809", "--tls", &tls, "--control", &control];
    let output = run(&[&["serve"], &flags[..]].concat());
    let said = text(&output.stderr);
    assert_eq!((output.status.code(), said.lines().count()), (Some(1), 1), "{said}");
    assert!(said.contains("weir: --tls: ") && said.contains("server-cert.pem"), "{said}");
}

#[test]
fn a_trial_on_memory_passes_and_reports() {
    let output =
        run(&["try", "--seconds", "1", "--store", "host:32MiB", "--connections", "3", "--seed", "1"]);
    let report = text(&output.stdout);
    assert!(output.status.success(), "{report}{}", text(&output.stderr));
    for words in
        ["p50 us", "p99 us", "IOPS", "read", "write", "discard", "zero", "passed", "0 mismatches, 0 errors"]
    {
        assert!(report.contains(words), "{words:?} is not in {report}");
    }
}

#[test]
fn a_trial_on_a_store_that_flips_bits_fails() {
    let store = "sim:seed=1,size=32MiB,corrupt=0.1";
    let output = run(&["try", "--seconds", "1", "--store", store, "--seed", "1"]);
    let report = text(&output.stdout);
    assert_eq!(output.status.code(), Some(1), "{report}");
    assert!(report.contains("FAILED, 0 mismatches") && !report.contains(" 0 errors"), "{report}");
    assert!(
        report.contains("input/output error"),
        "a corrupt page is an error, never other content: {report}"
    );
}

#[test]
fn a_trial_on_a_store_that_loses_writes_fails_without_handing_out_old_pages() {
    let store = "sim:seed=2,size=32MiB,lose=0.1";
    let output = run(&["try", "--seconds", "1", "--store", store, "--seed", "2"]);
    let report = text(&output.stdout);
    assert_eq!(output.status.code(), Some(1), "{report}");
    assert!(report.contains("FAILED, 0 mismatches") && !report.contains(" 0 errors"), "{report}");
}
