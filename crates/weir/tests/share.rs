//! `weir serve --share` with other programs of the machine: in Rust, in C, beside NBD, and over a
//! kernel's swap.

mod common;

use common::Daemon;
use std::fs;
use std::io::Read as _;
use std::os::unix::fs::PermissionsExt as _;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use weir_share::wire::Spot;
use weir_share::{Client, Error, Options};

fn start(name: &str, flags: &[&str]) -> Daemon {
    let flags = [&["--store", "host:32MiB", "--size", "16MiB"], flags].concat();
    let mut daemon = Daemon::spawn(&format!("share-{name}"), &flags, |command, directory| {
        command.arg("--share").arg(directory.join("share.sock")).stderr(Stdio::piped());
    });
    assert!(daemon.comes_up(Daemon::listens), "the daemon ended: {}", said(&mut daemon));
    daemon
}

fn socket(daemon: &Daemon) -> PathBuf {
    daemon.directory.join("share.sock")
}

/// The daemon's lines, once it has ended.
fn said(daemon: &mut Daemon) -> String {
    let mut said = String::new();
    let _ = daemon.process.stderr.take().expect("piped").read_to_string(&mut said);
    said
}

fn terminate(mut daemon: Daemon) -> String {
    assert_eq!(daemon.terminate(), Some(0));
    assert!(!socket(&daemon).exists(), "the socket is gone with the daemon");
    said(&mut daemon)
}

fn page_of(number: u64) -> [u8; 4096] {
    std::array::from_fn(|at| (number as usize * 31 + at * 7 + at / 256) as u8)
}

#[test]
fn a_program_writes_and_reads_pages_through_the_daemon_in_frames_and_in_place() {
    let daemon = start("serve", &["--share-in-place"]);
    let mode = fs::metadata(socket(&daemon)).expect("a socket").permissions().mode();
    assert_eq!(mode & 0o777, 0o600, "only its owner");
    for in_place in [false, true] {
        let options = Options { in_place, ..Options::default() };
        let mut client = Client::connect(&socket(&daemon), options).expect("a connection");
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
    assert!(terminate(daemon).contains("share.sock"));
}

#[test]
fn each_thread_of_the_share_server_has_a_socket_and_all_serve_the_same_pages() {
    let mut daemon = start("threads", &["--share-threads", "3"]);
    let paths: Vec<PathBuf> = (0..3).map(|number| weir_share::path_of(&socket(&daemon), number)).collect();
    let mut clients: Vec<Client> =
        paths.iter().map(|path| Client::connect(path, Options::default()).unwrap()).collect();
    for (writer, page) in (0..3).zip([10, 20, 30]) {
        clients[writer].write(page, &page_of(page)).unwrap();
        for client in &mut clients {
            let lease = client.read(page).unwrap();
            assert_eq!(client.page(&lease), &page_of(page), "page {page}");
            client.give(lease).unwrap();
        }
    }
    assert!(Client::connect(&weir_share::path_of(&socket(&daemon), 3), Options::default()).is_err());
    drop(clients);
    assert!(paths.iter().all(|path| path.exists()));
    assert_eq!(daemon.terminate(), Some(0));
    assert!(paths.iter().all(|path| !path.exists()), "a socket is left");
}

#[test]
fn the_client_in_c_meets_the_daemon() {
    let here = Path::new(env!("CARGO_MANIFEST_DIR")).join("../weir-share");
    let daemon = start("c", &["--share-in-place"]);
    let program = daemon.directory.join("client");
    let mut compiler = Command::new("cc");
    compiler.args(["-std=c11", "-D_GNU_SOURCE", "-O2", "-I"]).arg(here.join("include"));
    let built = compiler.arg(here.join("examples/client.c")).arg("-o").arg(&program).status();
    assert!(built.expect("a C compiler, cc, is needed for this test").success());
    let run = |arguments: &[&str]| {
        let output = Command::new(&program).arg(socket(&daemon)).args(arguments).output().expect("it runs");
        String::from_utf8_lossy(&[output.stdout, output.stderr].concat()).into_owned()
    };
    for arguments in [&[][..], &["", "in-place"], &["weir"]] {
        assert_eq!(run(arguments), "1000 pages written and read in place\n");
    }
    assert!(run(&["nobody"]).ends_with("No such file or directory\n"));
}

#[test]
fn a_program_names_its_volume_which_stays_while_the_program_holds_it() {
    let mut daemon =
        Daemon::spawn("share-pool", &["--store", "host:16MiB", "--pool", "2"], |command, directory| {
            command.arg("--share").arg(directory.join("share.sock"));
        });
    assert!(daemon.comes_up(Daemon::listens), "share needs no volume to start");
    let connect = |name: &str| Client::connect_to(&socket(&daemon), name, Options::default());
    let ask = |arguments: &[&str]| {
        let output = daemon.weir(&[&["volume"], arguments].concat());
        String::from_utf8_lossy(&[output.stdout, output.stderr].concat()).into_owned()
    };
    assert!(matches!(connect(""), Err(Error::NoVolume { .. })), "it has none of its own");
    assert!(ask(&["create", "a", "4MiB"]).starts_with("made a, 4MiB"));
    assert!(ask(&["create", "b"]).starts_with("made b, 12MiB"), "all the room that is left");
    let [mut a, mut b] = ["a", "b"].map(|name| connect(name).expect("it is there"));
    assert_eq!([a.pages(), b.pages()], [1024, 3072]);
    a.write(3, &page_of(1)).expect("written");
    b.write(3, &page_of(2)).expect("written");
    let lease = a.read(3).expect("read");
    assert_eq!(a.page(&lease), &page_of(1));
    for change in [&["remove", "a"][..], &["resize", "a", "1MiB"]] {
        let said = ask(change);
        assert!(said.contains("volume a is in use; disconnect its clients"), "{said}");
    }
    drop(a);
    assert_eq!(ask(&["remove", "a"]), "removed a\n");
    assert!(matches!(connect("a"), Err(Error::NoVolume { volume }) if volume == "a"));
    assert!(ask(&["create", "a"]).starts_with("made a, 4MiB"));
    let mut a = connect("a").expect("it is there");
    let lease = a.read(3).expect("read");
    assert_eq!(a.page(&lease), &[0; 4096], "nothing old is in it");
    let lease = b.read(3).expect("read");
    assert_eq!(b.page(&lease), &page_of(2));
    assert_eq!(daemon.status()["protection"]["io_allocations"].as_u64(), Some(0));
}

#[test]
fn pages_that_carry_swap_can_be_read_and_not_written() {
    // If the system denies the flusher flag, the rest of the test still works.
    let daemon = start("swap", &["--swap", "--unsafe-no-flusher"]);
    let mut client = Client::connect(&socket(&daemon), Options::default()).expect("a connection");
    let refused = client.write(0, &page_of(0)).expect_err("the kernel alone writes its swap");
    assert!(format!("{refused:?}").contains("ReadOnlyFilesystem"), "{refused:?}");
    let lease = client.read(0).expect("read");
    assert_eq!(client.page(&lease), &[0; 4096]);
    client.give(lease).expect("given back");
}
