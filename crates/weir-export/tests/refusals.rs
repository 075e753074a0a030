//! The refusals of servers and of clients, in the words that people read.

use rustix::event::{EventfdFlags, eventfd};
use rustix::fs::{Mode, OFlags};
use rustix::net::{AddressFamily, RecvFlags, SocketAddrUnix, SocketType, accept, bind, listen, recv, socket};
use rustix::thread::{CapabilitySet, capabilities, set_capabilities};
use std::os::fd::{AsFd, OwnedFd};
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::thread;
use std::time::Duration;
use weir_core::log::{Level, to_stderr};
use weir_export::{fuse, nbd, share, ublk};
use weir_share::wire::{Completed, Op, Spot, Submission, VERSION, Welcome};
use weir_share::{Area, Client, Error, Layout, Options, Ring, send};
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

/// Answers one client's greeting with `answer` and these descriptors, and hangs up. Without an
/// answer it only hangs up.
fn share_server(path: &Path, answer: Option<Vec<u8>>, descriptors: Vec<OwnedFd>) {
    let server: OwnedFd = socket(AddressFamily::UNIX, SocketType::SEQPACKET, None).unwrap();
    bind(&server, &SocketAddrUnix::new(path).unwrap()).unwrap();
    listen(&server, 1).unwrap();
    thread::spawn(move || {
        let client = accept(&server).unwrap();
        recv(&client, &mut [0; 256], RecvFlags::empty()).unwrap();
        let fds: Vec<_> = descriptors.iter().map(AsFd::as_fd).collect();
        answer.inspect(|answer| send(&client, answer, &fds).unwrap());
    });
}

#[test]
fn a_share_client_waits_for_a_server_that_stands_still_only_as_long_as_it_is_told() {
    let path = path("still");
    let server: OwnedFd = socket(AddressFamily::UNIX, SocketType::SEQPACKET, None).unwrap();
    bind(&server, &SocketAddrUnix::new(&path).unwrap()).unwrap();
    listen(&server, 0).unwrap();
    let options = Options { patience: Some(Duration::from_millis(20)), ..Options::default() };
    // The first one that waits gets no answer. The later ones are not even accepted.
    for _ in 0..3 {
        let error = Client::connect(&path, options).unwrap_err();
        let (Error::Connect { source, .. } | Error::System(source)) = &error else { panic!("{error}") };
        assert_eq!(source.kind(), std::io::ErrorKind::WouldBlock, "{error}");
    }
    std::fs::remove_file(&path).unwrap();
}

#[test]
fn a_share_client_says_what_is_wrong_with_its_server() {
    let refusal =
        Welcome { version: 7, status: -16, frames: 0, entries: 0, pages: 0, windows: 0, run_most: 0 };
    let welcome =
        Welcome { version: VERSION, status: 0, frames: 8, entries: 8, pages: 64, windows: 0, run_most: 0 };
    for (name, answer, descriptors, words) in [
        ("refuses", Some(refusal.encode().to_vec()), 0, "the share server (format 7) refuses: "),
        ("nonsense", Some(b"hello".to_vec()), 0, "the share server's greeting makes no sense"),
        ("gone", None, 0, "the share server has gone; connect again"),
        ("fails", Some(welcome.encode().to_vec()), 2, "the share connection failed"),
    ] {
        let path = path(name);
        // A file that is no memory.
        let null = || std::fs::File::open("/dev/null").unwrap().into();
        share_server(&path, answer, (0..descriptors).map(|_| null()).collect());
        let error = Client::connect(&path, Options::default()).unwrap_err().to_string();
        std::fs::remove_file(&path).unwrap();
        assert!(error.starts_with(words), "{error}");
    }
    let error = Client::connect(&path("nobody"), Options::default()).unwrap_err().to_string();
    assert!(error.starts_with("cannot connect to the share server at "), "{error}");
    // An earlier server answers so to a greeting that is longer than those it knows.
    let (path, status) = (path("earlier"), -rustix::io::Errno::PROTO.raw_os_error());
    for (name, words) in [
        ("a", "the share server is of an earlier version, which serves its own volume alone"),
        ("", "the share server (format 2) refuses: "),
    ] {
        let answer =
            Welcome { version: VERSION, status, frames: 0, entries: 0, pages: 0, windows: 0, run_most: 0 };
        share_server(&path, Some(answer.encode().to_vec()), Vec::new());
        let error = Client::connect_to(&path, name, Options::default()).unwrap_err().to_string();
        std::fs::remove_file(&path).unwrap();
        assert!(error.starts_with(words), "{error}");
    }
    let area = Area::create(Layout::new(8, 8).unwrap()).unwrap();
    let bell = eventfd(0, EventfdFlags::NONBLOCK).unwrap();
    let descriptors = vec![area.fd().unwrap().try_clone_to_owned().unwrap(), bell];
    share_server(&path, Some(welcome.encode().to_vec()), descriptors);
    let mut client = Client::connect(&path, Options::default()).unwrap();
    std::fs::remove_file(&path).unwrap();
    for frame in 0..2 {
        let completed = Completed { tag: 0, status: 0, token: 5 + frame, spot: Spot::Frame(frame) };
        area.store(Ring::Completions, frame, completed.encode());
    }
    area.written(Ring::Completions).store(2, Ordering::Release);
    let frames = client.take_frames(2, Duration::from_secs(1)).unwrap();
    // One page is no run.
    client.ask_write_run(9, 3, &frames, 1, 1).unwrap();
    let asked = Submission::decode(area.load(Ring::Submissions, 2)).unwrap();
    assert_eq!(asked, Submission { op: Op::Write, tag: 9, page: 3, token: 6, count: 0 });
    let error = client.ask_write_run(9, 3, &frames, 0, 2).unwrap_err().to_string();
    assert!(error.starts_with("the share server is of an earlier version, which knows no runs"), "{error}");
    let error = client.ask_read_run(9, 3, &frames, 0, 1).unwrap_err().to_string();
    assert!(error.starts_with("the share server is of an earlier version, which knows no runs"), "{error}");
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

#[test]
fn an_nbd_server_takes_no_other_configuration_than_it_can_serve() {
    let path = path("config");
    let listen = [nbd::Listen::Unix(path.clone())];
    let start = |config| {
        let server = nbd::Server::start(&volume(), &config, &listen, &to_stderr(Level::Warning));
        server.unwrap_err().to_string()
    };
    let config = nbd::Config { connections: 1, ..nbd::Config::default() };
    let long = || "x".repeat(300);
    for (config, words) in [
        (
            nbd::Config { name: long(), ..config.clone() },
            "the export's name has 300 bytes; at most 255 are accepted",
        ),
        (
            nbd::Config { description: long(), ..config.clone() },
            "the export's description has 300 bytes; at most 255 are accepted",
        ),
        (nbd::Config { connections: 0, ..config }, "0 connections: a server needs at least 1"),
    ] {
        assert_eq!(start(config), words);
    }
    assert!(!path.exists(), "nothing listens");
}

#[test]
fn a_fuse_server_takes_no_other_configuration_than_it_can_serve() {
    let point = path("file");
    let config = fuse::Config { threads: 1, ..fuse::Config::default() };
    for (config, words) in [
        (fuse::Config { threads: 0, ..config.clone() }, "0 FUSE threads; accepted: 1 to "),
        (
            fuse::Config { name: "a/b".to_owned(), ..config },
            "the file cannot have the name \"a/b\"; accepted: 1 to 255 bytes",
        ),
    ] {
        let error = fuse::Server::start(&volume(), &config, &point, &to_stderr(Level::Warning));
        let error = error.unwrap_err().to_string();
        assert!(error.starts_with(words), "{error}");
    }
    assert!(!point.exists(), "no file is made to mount over");
}

#[test]
fn a_fuse_server_takes_over_no_mount_without_its_connection() {
    let config = fuse::Config { threads: 1, ..fuse::Config::default() };
    let take_over = |take: &mut dyn FnMut(&str) -> Option<OwnedFd>| {
        let log = to_stderr(Level::Warning);
        fuse::Server::take_over(&volume(), &config, &path("mount"), take, &log).unwrap_err().to_string()
    };
    let error = take_over(&mut |_| None);
    assert!(error.starts_with("the keeper does not hold the connection of "), "{error}");
    // A connection that refuses each message.
    let full = || rustix::fs::open("/dev/full", OFlags::RDWR, Mode::empty()).ok();
    let error = take_over(&mut |name| full().filter(|_| ["connection", "queue.0"].contains(&name)));
    assert!(error.starts_with("the kernel does not send requests again: No space left"), "{error}");
}

#[test]
fn a_ublk_server_takes_no_other_configuration_than_it_can_serve() {
    let config = ublk::Config::default();
    for (config, words) in [
        (
            ublk::Config { queues: 0, ..config.clone() },
            "a ublk device with 0 queues of 64 requests: accepted: at least 1 queue, of 1 to ",
        ),
        (
            ublk::Config { depth: 0, ..config.clone() },
            "a ublk device with 1 queues of 0 requests: accepted: at least 1 queue, of 1 to ",
        ),
        (
            ublk::Config { request_bytes: 5000, ..config },
            "requests of 5000 bytes: accepted: a power of two from ",
        ),
    ] {
        let made = |device| panic!("{device} was made");
        let error = ublk::Server::create(&volume(), &config, &to_stderr(Level::Warning), made);
        let error = error.unwrap_err().to_string();
        assert!(error.starts_with(words), "{error}");
    }
}

/// Starts a server for swap on a thread without any capability but those of `keeps`.
fn serve_swap(name: &str, keeps: CapabilitySet) -> String {
    let listen = [nbd::Listen::Unix(path(name))];
    thread::scope(|scope| {
        let started = scope.spawn(|| {
            let mut sets = capabilities(None).unwrap();
            sets.effective &= keeps;
            set_capabilities(None, sets).unwrap();
            let config = nbd::Config { connections: 1, swap: true, ..nbd::Config::default() };
            nbd::Server::start(&volume(), &config, &listen, &to_stderr(Level::Warning))
        });
        started.join().unwrap().unwrap_err().to_string()
    })
}

#[test]
fn swap_is_served_by_no_thread_without_the_flusher_flag() {
    let error = serve_swap("denied", CapabilitySet::empty());
    assert_eq!(error, "a thread that would serve swap lacks the I/O flusher flag");
    if !capabilities(None).unwrap().effective.contains(CapabilitySet::SYS_RESOURCE) {
        println!("\nskipped: the rest needs CAP_SYS_RESOURCE");
        return;
    }
    let error = serve_swap("forgotten", CapabilitySet::SYS_RESOURCE);
    assert!(error.starts_with("threads that are to serve swap lack the I/O flusher flag: call "), "{error}");
}
