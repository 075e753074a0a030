//! The refusals of servers and of clients, in the words that people read.

use rustix::net::{AddressFamily, RecvFlags, SocketAddrUnix, SocketType, accept, bind, listen, recv, socket};
use std::os::fd::OwnedFd;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use weir_core::log::{Level, to_stderr};
use weir_export::{nbd, share};
use weir_share::wire::Welcome;
use weir_share::{Client, Options, send};
use weir_store::Host;
use weir_volume::Volume;

fn volume() -> Arc<Volume> {
    let config = weir_volume::Config { pages: 64, lanes: 2, depth: 64 };
    Volume::create(config, vec![Arc::new(Host::new(config.slots()).unwrap())]).unwrap()
}

fn path(name: &str) -> PathBuf {
    let path = std::env::temp_dir().join(format!("weir-refusals-{name}-{}", std::process::id()));
    let _ = std::fs::remove_file(&path);
    path
}

/// Answers one client's greeting with `answer`, and hangs up. Without an answer it only hangs up.
fn share_server(path: &Path, answer: Option<Vec<u8>>) {
    let server: OwnedFd = socket(AddressFamily::UNIX, SocketType::SEQPACKET, None).unwrap();
    bind(&server, &SocketAddrUnix::new(path).unwrap()).unwrap();
    listen(&server, 1).unwrap();
    std::thread::spawn(move || {
        let client = accept(&server).unwrap();
        recv(&client, &mut [0; 256], RecvFlags::empty()).unwrap();
        answer.inspect(|answer| send(&client, answer, &[]).unwrap());
    });
}

#[test]
fn a_share_client_says_what_is_wrong_with_its_server() {
    let refusal = Welcome { version: 7, status: -16, frames: 0, entries: 0, pages: 0, windows: 0 };
    for (name, answer, words) in [
        ("refuses", Some(refusal.encode().to_vec()), "the share server (format 7) refuses: "),
        ("nonsense", Some(b"hello".to_vec()), "the share server's greeting makes no sense"),
        ("gone", None, "the share server has gone; connect again"),
    ] {
        let path = path(name);
        share_server(&path, answer);
        let error = Client::connect(&path, Options::default()).unwrap_err().to_string();
        std::fs::remove_file(&path).unwrap();
        assert!(error.starts_with(words), "{error}");
    }
    let error = Client::connect(&path("nobody"), Options::default()).unwrap_err().to_string();
    assert!(error.starts_with("cannot connect to the share server at "), "{error}");
}

#[test]
fn a_share_server_takes_so_many_requests_and_clients() {
    let path = path("share");
    let config = share::Config { clients: 1, frames: 8, entries: 4, ..share::Config::at(path) };
    let server = share::Server::start(&volume(), &config, to_stderr(Level::Warning)).unwrap();
    let mut client =
        Client::connect(server.path(), Options { frames: 8, entries: 4, ..Options::default() }).unwrap();
    let error = (0..).find_map(|tag| client.ask_read(tag, 0).err()).unwrap().to_string();
    assert_eq!(error, "4 requests are under way, and no more fit: take completions first");
    drop((client, server));
    let config = share::Config { entries: 5, ..config };
    let error = share::Server::start(&volume(), &config, to_stderr(Level::Warning)).unwrap_err().to_string();
    assert!(error.starts_with("1 clients with 8 frames and 5 entries cannot be served"), "{error}");
}

#[test]
fn an_nbd_client_says_why_its_server_does_not_serve_it() {
    let path = path("nbd");
    let connect = |wish: &nbd::client::Wish| nbd::client::Client::unix(&path, wish).unwrap_err().to_string();
    let error = connect(&nbd::client::Wish::default());
    assert!(
        error.starts_with("cannot connect to ") && error.ends_with(": is the server running?"),
        "{error}"
    );
    let config = nbd::Config { connections: 1, ..nbd::Config::default() };
    let listen = [nbd::Listen::Unix(path.clone())];
    let server = nbd::Server::start(&volume(), &config, &listen, &to_stderr(Level::Warning)).unwrap();
    let other = nbd::client::Wish { name: "another".to_owned(), ..nbd::client::Wish::default() };
    let error = connect(&other);
    assert!(error.starts_with("the server refused "), "{error}");
    drop(server);
}
