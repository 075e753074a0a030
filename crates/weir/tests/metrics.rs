//! Prometheus and its view of a daemon.

mod common;

use common::{Daemon, PATIENCE, WEIR};
use serde_json::Value;
use std::fs;
use std::io::{Read as _, Write as _};
use std::net::{TcpListener, TcpStream};
use std::os::unix::fs::PermissionsExt as _;
use std::os::unix::net::UnixStream;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::time::{Duration, Instant};
use weir_core::PAGE_SIZE;

const PACKAGING: &str = concat!(env!("CARGO_MANIFEST_DIR"), "/../../packaging");

/// A port of this machine on which no server listens now.
fn free_port() -> u16 {
    TcpListener::bind("127.0.0.1:0").unwrap().local_addr().unwrap().port()
}

/// Starts a daemon that answers at `address`.
fn daemon(name: &str, address: &str) -> Daemon {
    let stores = ["--store", "host:16MiB", "--store", "host:8MiB", "--metrics", address];
    let mut scene = Daemon::spawn(name, &stores, Daemon::with_nbd);
    assert!(scene.comes_up(Daemon::listens), "it ended");
    scene
}

/// Sends this request; returns the whole answer.
fn ask(mut socket: impl std::io::Read + std::io::Write, request: &str) -> String {
    socket.write_all(request.as_bytes()).unwrap();
    let mut answer = String::new();
    socket.read_to_string(&mut answer).unwrap();
    answer
}

/// The value of a sample in a scrape.
fn value(text: &str, sample: &str) -> f64 {
    let line = text.lines().find(|line| line.rsplit_once(' ').is_some_and(|(name, _)| name == sample));
    line.unwrap_or_else(|| panic!("no {sample} in {text}")).rsplit_once(' ').unwrap().1.parse().unwrap()
}

fn write_some(scene: &Daemon) {
    let mut client = scene.connect();
    let mut bytes = vec![0; 8 * PAGE_SIZE];
    bytes.iter_mut().enumerate().for_each(|(at, byte)| *byte = (at * 7) as u8);
    for round in 0..32 {
        client.write(round * bytes.len() as u64, &bytes).unwrap();
        assert!(client.read(round * bytes.len() as u64, bytes.len() as u32).unwrap() == bytes);
    }
}

#[test]
fn a_scrape_says_what_status_says() {
    let path = std::env::temp_dir().join(format!("weir-metrics-{}.sock", std::process::id()));
    let scene = daemon("metrics-unix", &format!("unix:{}", path.display()));
    assert_eq!(fs::metadata(&path).unwrap().permissions().mode() & 0o777, 0o600, "its owner's alone");
    write_some(&scene);
    let status = scene.status();
    let get = "GET /metrics HTTP/1.1\r\nHost: weir\r\nAccept: application/openmetrics-text\r\n\r\n";
    let answer = ask(UnixStream::connect(&path).unwrap(), get);
    let (head, text) = answer.split_once("\r\n\r\n").unwrap();
    assert!(head.starts_with("HTTP/1.1 200 OK\r\nContent-Type: application/openmetrics-text; version=1.0.0"));
    assert!(text.ends_with("# EOF\n") && head.contains(&format!("Content-Length: {}\r\n", text.len())));
    let number = |value: &Value| value.as_f64().unwrap();
    assert_eq!(value(text, "weir_pages_written_total"), number(&status["write"]["pages"]));
    assert_eq!(value(text, "weir_pages_written_total"), 256.0);
    assert_eq!(value(text, "weir_volume_size_bytes"), number(&status["volume"]["bytes"]));
    assert_eq!(value(text, "weir_volume_pages{state=\"stored\"}"), 256.0);
    assert_eq!(value(text, "weir_store_slots_used{store=\"host:16MiB\"}"), 256.0);
    assert_eq!(value(text, "weir_store_state{store=\"host:16MiB\",state=\"online\"}"), 1.0);
    assert_eq!(value(text, "weir_store_state{store=\"host:16MiB\",state=\"lost\"}"), 0.0);
    assert!(value(text, "weir_write_latency_seconds_count") >= 1.0);
    assert_eq!(
        value(text, "weir_write_latency_seconds_bucket{le=\"+Inf\"}"),
        value(text, "weir_write_latency_seconds_count")
    );
    assert_eq!(value(text, "weir_io_allocations_total"), 0.0);
    for (request, said) in [
        ("GET / HTTP/1.1\r\n\r\n", "HTTP/1.1 404 "),
        ("POST /metrics HTTP/1.1\r\n\r\n", "HTTP/1.1 405 "),
        ("nonsense\r\n\r\n", "HTTP/1.1 400 "),
    ] {
        assert!(ask(UnixStream::connect(&path).unwrap(), request).starts_with(said), "{request:?}");
    }
    drop(scene);
    // A daemon that is killed leaves the socket.
    fs::remove_file(&path).unwrap();
}

#[test]
fn a_silent_client_holds_nobody_up_for_ever() {
    let port = free_port();
    let _scene = daemon("metrics-silent", &format!("tcp:127.0.0.1:{port}"));
    let mut silent = TcpStream::connect(("127.0.0.1", port)).unwrap();
    silent.write_all(b"GET /met").unwrap();
    let begun = Instant::now();
    let answer = ask(TcpStream::connect(("127.0.0.1", port)).unwrap(), "GET /metrics HTTP/1.1\r\n\r\n");
    assert!(answer.starts_with("HTTP/1.1 200 OK\r\nContent-Type: text/plain"), "{answer}");
    assert!(begun.elapsed() < PATIENCE);
    assert_eq!(silent.read(&mut [0; 10]).unwrap(), 0, "it was hung up on");
}

#[test]
fn an_address_that_others_reach_is_refused() {
    let directory = std::env::temp_dir().join(format!("weir-metrics-refused-{}", std::process::id()));
    fs::create_dir_all(&directory).unwrap();
    let at = |name: &str| directory.join(name).display().to_string();
    let output = Command::new(WEIR)
        .args(["serve", "--store", "host:16MiB", "--nbd", &format!("unix:{}", at("nbd"))])
        .args(["--control", &at("control"), "--metrics", "tcp:0.0.0.0:9419"])
        .output()
        .unwrap();
    fs::remove_dir_all(&directory).unwrap();
    let said = String::from_utf8_lossy(&output.stderr).into_owned();
    assert_eq!(output.status.code(), Some(2), "{said}");
    assert!(said.contains("--metrics tcp:0.0.0.0:9419") && said.contains("accepted: unix:PATH"), "{said}");
}

/// A program of Debian's package prometheus, if it is installed or unpacked.
fn program(name: &str) -> Option<PathBuf> {
    let unpacked = std::env::var_os("WEIR_PROMETHEUS").map(PathBuf::from);
    let directories = std::env::var_os("PATH").unwrap_or_default();
    let found = unpacked.into_iter().chain(std::env::split_paths(&directories));
    found.map(|directory| directory.join(name)).find(|path| path.is_file())
}

fn check(command: &mut Command) -> String {
    let output = command.output().unwrap();
    let said =
        [output.stdout, output.stderr].map(|bytes| String::from_utf8_lossy(&bytes).into_owned()).concat();
    assert!(output.status.success(), "{command:?}: {said}");
    said
}

struct Prometheus {
    process: Child,
    port: u16,
    directory: PathBuf,
}

impl Prometheus {
    /// Starts Prometheus with the packaged configuration, except for the port of the daemon and the
    /// time between two scrapes.
    fn start(program: &Path, target: u16) -> Prometheus {
        let directory = std::env::temp_dir().join(format!("weir-prometheus-{}", std::process::id()));
        fs::create_dir_all(&directory).unwrap();
        let packaged = fs::read_to_string(format!("{PACKAGING}/prometheus/weir.yml")).unwrap();
        let here = packaged.replace("127.0.0.1:9419", &format!("127.0.0.1:{target}"));
        let here = here.replace("scrape_interval: 15s", "scrape_interval: 1s");
        fs::write(directory.join("weir.yml"), here).unwrap();
        let rules =
            fs::copy(format!("{PACKAGING}/prometheus/weir.rules.yml"), directory.join("weir.rules.yml"));
        rules.unwrap();
        let port = free_port();
        let process = Command::new(program)
            .arg(format!("--config.file={}", directory.join("weir.yml").display()))
            .arg(format!("--storage.tsdb.path={}", directory.join("data").display()))
            .arg(format!("--web.listen-address=127.0.0.1:{port}"))
            .stdout(Stdio::null())
            .stderr(Stdio::null())
            .spawn()
            .unwrap();
        Prometheus { process, port, directory }
    }

    /// The samples of a query now; none while the server is not up.
    fn query(&self, query: &str) -> Vec<Value> {
        let escaped: String = query.bytes().map(|byte| format!("%{byte:02X}")).collect();
        let request = format!("GET /api/v1/query?query={escaped} HTTP/1.0\r\n\r\n");
        let Ok(socket) = TcpStream::connect(("127.0.0.1", self.port)) else { return Vec::new() };
        let answer = ask(socket, &request);
        let Some((_, body)) = answer.split_once("\r\n\r\n") else { return Vec::new() };
        let Ok(body) = serde_json::from_str::<Value>(body) else { return Vec::new() };
        assert!(body["status"] == "success", "{query}: {body}");
        body["data"]["result"].as_array().cloned().unwrap_or_default()
    }
}

impl Drop for Prometheus {
    fn drop(&mut self) {
        let _ = self.process.kill();
        let _ = self.process.wait();
        let _ = fs::remove_dir_all(&self.directory);
    }
}

#[test]
fn prometheus_scrapes_the_daemon_and_every_query_of_the_board_has_data() {
    let name = "prometheus_scrapes_the_daemon_and_every_query_of_the_board_has_data";
    let (Some(prometheus), Some(promtool)) = (program("prometheus"), program("promtool")) else {
        return println!("\nskipped: {name}: prometheus and promtool (package prometheus)");
    };
    check(
        Command::new(&promtool)
            .args(["check", "rules"])
            .arg(format!("{PACKAGING}/prometheus/weir.rules.yml")),
    );
    check(
        Command::new(&promtool).args(["test", "rules"]).arg(format!("{PACKAGING}/prometheus/weir.test.yml")),
    );

    let target = free_port();
    let scene = daemon("metrics-prometheus", &format!("tcp:127.0.0.1:{target}"));
    write_some(&scene);
    let answer = ask(TcpStream::connect(("127.0.0.1", target)).unwrap(), "GET /metrics HTTP/1.0\r\n\r\n");
    let (_, text) = answer.split_once("\r\n\r\n").unwrap();
    let mut lint = Command::new(&promtool)
        .args(["check", "metrics"])
        .stdin(Stdio::piped())
        .stdout(Stdio::piped())
        .stderr(Stdio::piped())
        .spawn()
        .unwrap();
    lint.stdin.take().unwrap().write_all(text.as_bytes()).unwrap();
    let lint = lint.wait_with_output().unwrap();
    assert!(lint.status.success(), "{}", String::from_utf8_lossy(&lint.stderr));

    let server = Prometheus::start(&prometheus, target);
    let begun = Instant::now();
    // Rates need two scrapes, and requests between them.
    while server.query("count_over_time(weir_uptime_seconds[1m]) > 3").is_empty() {
        assert!(begun.elapsed() < PATIENCE, "Prometheus does not scrape");
        write_some(&scene);
        std::thread::sleep(Duration::from_millis(200));
    }
    let up = server.query("up{job=\"weir\"}");
    assert_eq!(up[0]["value"][1], "1");
    let board: Value =
        serde_json::from_str(&fs::read_to_string(format!("{PACKAGING}/grafana/weir.json")).unwrap()).unwrap();
    let mut queries = 0;
    for panel in board["panels"].as_array().unwrap() {
        for target in panel["targets"].as_array().unwrap() {
            let query = target["expr"].as_str().unwrap();
            let query = query.replace("$__rate_interval", "1m").replace("$instance", ".+");
            assert!(!server.query(&query).is_empty(), "{}: {query} has no data", panel["title"]);
            queries += 1;
        }
    }
    assert!(queries >= 10, "{queries} queries");
    assert!(server.query("ALERTS{alertstate=\"firing\"}").is_empty(), "all is well, and nothing is alarmed");
}
