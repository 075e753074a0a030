//! Weir's client against a server of another project: nbdkit's memory plugin.

use std::os::unix::net::UnixStream;
use std::process::{Child, Command, Stdio};
use std::time::{Duration, Instant};
use weir_export::nbd::client::{Client, ClientError, Extent, Operation, Wish};
use weir_export::nbd::wire::{Errno, extent_flag};

struct Nbdkit {
    child: Child,
    socket: std::path::PathBuf,
}

impl Nbdkit {
    fn start(name: &str, arguments: &[&str]) -> Option<Nbdkit> {
        let socket = std::env::temp_dir().join(format!("weir-{name}-{}", std::process::id()));
        let child = Command::new("nbdkit")
            .args(["--exit-with-parent", "--foreground", "--unix"])
            .arg(&socket)
            .args(arguments)
            .stderr(Stdio::inherit())
            .spawn();
        let Ok(child) = child else {
            eprintln!("skipped: nbdkit is not installed (apt-get install nbdkit)");
            return None;
        };
        let deadline = Instant::now() + Duration::from_secs(60);
        // The socket's file appears before the server listens.
        while UnixStream::connect(&socket).is_err() {
            assert!(Instant::now() < deadline, "nbdkit did not come up");
            std::thread::sleep(Duration::from_millis(10));
        }
        Some(Nbdkit { child, socket })
    }
}

impl Drop for Nbdkit {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
        let _ = std::fs::remove_file(&self.socket);
    }
}

#[test]
fn what_is_written_to_nbdkit_is_read_back_with_and_without_structured_replies() {
    let Some(server) = Nbdkit::start("client", &["memory", "64M"]) else { return };
    for structured in [true, false] {
        let wish = Wish { structured, ..Wish::default() };
        let mut client = Client::unix(&server.socket, &wish).unwrap();
        assert_eq!(client.terms().bytes, 64 << 20);
        assert_eq!(client.terms().structured, structured);
        assert!(client.terms().multi_conn());

        let pages: Vec<Vec<u8>> = (0..16u8).map(|fill| vec![fill + 1; 4096]).collect();
        for (at, page) in pages.iter().enumerate() {
            client.queue(Operation::write(at as u64 * 4096, page));
        }
        client.send().unwrap();
        for _ in 0..16 {
            assert_eq!(client.receive().unwrap().result, Ok(()));
        }
        let cookies: Vec<u64> = (0..16).map(|at| client.queue(Operation::read(at * 4096, 4096))).collect();
        client.send().unwrap();
        for _ in 0..16 {
            let reply = client.receive().unwrap();
            let at = cookies.iter().position(|cookie| *cookie == reply.cookie).unwrap();
            assert!(reply.data == pages[at], "page {at}");
        }
        client.perform(Operation::Trim { offset: 4096, length: 4096 }).unwrap();
        let zeroes = Operation::WriteZeroes { offset: 0, length: 4096, fast: false, no_hole: false };
        client.perform(zeroes).unwrap();
        assert_eq!(client.read(0, 8192).unwrap(), vec![0; 8192]);
        client.perform(Operation::Flush).unwrap();
        let beyond = client.read(64 << 20, 4096);
        assert!(matches!(beyond, Err(ClientError::Failed(Errno::Invalid))), "{beyond:?}");
        client.disconnect().unwrap();
    }
}

#[test]
fn nbdkits_holes_are_seen_as_extents() {
    let Some(server) = Nbdkit::start("extents", &["memory", "1M"]) else { return };
    let mut client = Client::unix(&server.socket, &Wish::default()).unwrap();
    client.write(512 << 10, &[1; 65536]).unwrap();
    let status = Operation::BlockStatus { offset: 0, length: 1 << 20, one: false };
    let extents = client.perform(status).unwrap().extents;
    let hole = extent_flag::HOLE | extent_flag::ZERO;
    assert_eq!(extents[0], Extent { length: 512 << 10, flags: hole });
    assert_eq!(extents[1].flags, 0);
}

#[test]
fn a_wrong_address_is_named() {
    let error = Client::unix("/nonexistent/weir.sock", &Wish::default()).unwrap_err();
    assert!(error.to_string().contains("/nonexistent/weir.sock"), "{error}");
}
