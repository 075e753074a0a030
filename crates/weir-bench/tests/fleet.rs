//! The rows of a store in a fleet, over an engine that the test starts.

use std::net::{Ipv4Addr, TcpListener, TcpStream};
use std::os::unix::process::CommandExt as _;
use std::process::{Child, Command, Stdio};
use std::time::{Duration, Instant};

struct Engine(Child);

impl Drop for Engine {
    fn drop(&mut self) {
        let _ = self.0.kill();
        let _ = self.0.wait();
    }
}

#[test]
fn a_page_of_a_fleet_is_read_beside_the_client_crates_own_get() {
    // Below the kernel's own range, and not where other tests start engines.
    let ports = (0..100).map(|turn| (7000 + (std::process::id() + turn) % 2000) as u16);
    let mut free = ports.filter(|port| TcpListener::bind((Ipv4Addr::LOCALHOST, *port)).is_ok());
    let port = free.next().expect("a free port");
    // By this name the program of `redis-tools` is the server.
    let mut command = Command::new("redis-check-rdb");
    command.arg0("redis-server").args(["--bind", "127.0.0.1", "--port", &port.to_string(), "--save", ""]);
    let Ok(child) = command.stdout(Stdio::null()).stderr(Stdio::null()).spawn() else {
        println!("\nskipped: a_page_of_a_fleet_is_read_beside_the_client_crates_own_get: no redis-tools");
        return;
    };
    let _engine = Engine(child);
    let begun = Instant::now();
    while TcpStream::connect((Ipv4Addr::LOCALHOST, port)).is_err() {
        assert!(begun.elapsed() < Duration::from_secs(60), "redis-server does not listen");
        std::thread::sleep(Duration::from_millis(20));
    }
    let store = format!("redis://127.0.0.1:{port}?size=4MiB");
    let mut command = Command::new(env!("CARGO_BIN_EXE_weir-bench"));
    command.args(["store", "--short", "--runs", "1", "--only", "remote", "--store", &store]);
    let output = command.output().expect("the program starts");
    let (said, why) = (String::from_utf8_lossy(&output.stdout), String::from_utf8_lossy(&output.stderr));
    // A goal may be missed here: other tests run beside it.
    assert!(output.status.success() || why.contains("goals missed"), "{said}{why}");
    for row in ["remote_read_asleep", "remote_read_spinning"] {
        for metric in ["p50_over_get_us", "p50_us", "p99_us"] {
            let is_row = |line: &str| line.starts_with(row) && line.contains(metric);
            assert!(said.lines().any(is_row), "{row} {metric}: {said}{why}");
        }
    }
    assert!(said.contains("client-get") && said.contains("load_1m"), "{said}");
}
