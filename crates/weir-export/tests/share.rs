//! The share server as its clients see it: honest, greedy, killed and malicious ones.

use std::collections::HashMap;
use std::io::{BufRead, BufReader};
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, mpsc};
use std::time::{Duration, Instant};

use weir_core::log::{Level, to_stderr};
use weir_core::{PAGE_SIZE, PageBytes, PageNo, Slot};
use weir_export::share::{Config, Server};
use weir_share::wire::{Completed, Hello, Op, Spot, Submission, VERSION, Welcome};
use weir_share::{Area, Client, Error, Layout, Lease, Options, Ring, receive, send};
use weir_store::{Done, Host, Lane, OpenError, Progress, State, Store, Ticket};
use weir_volume::{Pool, Volume};

const PAGES: u32 = 4096;

fn socket(name: &str) -> PathBuf {
    std::env::temp_dir().join(format!("weir-share-{name}-{}", std::process::id()))
}

fn volume() -> Arc<Volume> {
    let config = weir_volume::Config { pages: PAGES, lanes: 2, depth: 64 };
    Volume::create(config, vec![Arc::new(Host::new(config.slots()).unwrap())]).unwrap()
}

fn server(name: &str, clients: u32, frames: u32) -> Server {
    let config = Config { clients, frames, entries: 64, ..Config::at(socket(name)) };
    Server::start(&volume(), &config, to_stderr(Level::Warning)).unwrap()
}

/// Waits for an action of another thread.
fn eventually(what: &str, mut done: impl FnMut() -> bool) {
    let begun = Instant::now();
    while !done() {
        assert!(begun.elapsed() < Duration::from_secs(60), "{what} did not happen");
        std::thread::sleep(Duration::from_millis(1));
    }
}

/// Runs `action` on a thread of its own: if it hangs, the test fails instead of hanging too.
fn within_a_minute<T: Send + 'static>(what: &str, action: impl FnOnce() -> T + Send + 'static) -> T {
    let (told, heard) = mpsc::channel();
    std::thread::spawn(move || told.send(action()));
    heard.recv_timeout(Duration::from_secs(60)).unwrap_or_else(|_| panic!("{what} did not end"))
}

fn page_of(number: u64, version: u64) -> [u8; PAGE_SIZE] {
    let mut page = [0; PAGE_SIZE];
    for (at, chunk) in page.chunks_exact_mut(8).enumerate() {
        chunk.copy_from_slice(&(number << 32 | version << 16 | at as u64).to_le_bytes());
    }
    page
}

fn connect(server: &Server) -> Client {
    Client::connect(server.path(), Options::default()).unwrap()
}

#[test]
fn what_one_client_writes_another_reads_in_place() {
    let server = server("two", 4, 64);
    let (mut writer, mut reader) = (connect(&server), connect(&server));
    assert_eq!((writer.pages(), writer.frames()), (u64::from(PAGES), 64));
    for number in 0..200 {
        writer.write(number, &page_of(number, 1)).unwrap();
    }
    for number in (0..200).rev() {
        let lease = reader.read(number).unwrap();
        assert_eq!(reader.page(&lease), &page_of(number, 1));
        reader.give(lease).unwrap();
    }
    writer.ask_discard(9, 10, 20).unwrap();
    writer.submit().unwrap();
    let done = writer.wait().unwrap();
    assert_eq!((done.tag, done.result.unwrap()), (9, None));
    let lease = reader.read(15).unwrap();
    assert_eq!(reader.page(&lease), &[0; PAGE_SIZE]);
    eventually("the return of all but one", || server.stats().out() == 1);
    assert_eq!((server.stats().refused(), server.stats().double_frees()), (0, 0));
}

#[test]
fn many_requests_under_way_all_end_and_leases_come_back_in_ranges() {
    let server = server("deep", 1, 64);
    let mut client = connect(&server);
    for number in 0..u64::from(PAGES) {
        client.write(number, &page_of(number, 2)).unwrap();
    }
    let (mut asked, mut answered) = (0u64, 0u64);
    while answered < 20_000 {
        while client.in_flight() < 32 && asked < 20_000 {
            client.ask_read(asked as u32, asked * 7 % u64::from(PAGES)).unwrap();
            asked += 1;
        }
        client.submit().unwrap();
        let done = client.wait().unwrap();
        let lease = done.result.unwrap().unwrap();
        assert_eq!(client.page(&lease), &page_of(u64::from(done.tag) * 7 % u64::from(PAGES), 2));
        client.give_later(lease).unwrap();
        answered += 1;
    }
    client.submit().unwrap();
    eventually("the return of every lease", || server.stats().out() == 0);
    assert_eq!((server.stats().reads(), server.stats().refused()), (20_000, 0));
}

const MINUTE: Duration = Duration::from_secs(60);

/// Sends the request that was made, and waits for its end.
fn end(client: &mut Client) -> std::io::Result<()> {
    client.submit().unwrap();
    client.wait().unwrap().result.map(drop)
}

#[test]
fn runs_of_pages_are_read_and_written_by_one_request_each() {
    let server = server("runs", 2, 128);
    let (mut client, mut other) = (connect(&server), connect(&server));
    let frames = client.take_frames(100, MINUTE).unwrap();
    let filled = |number: u64| if number.is_multiple_of(5) { [7; PAGE_SIZE] } else { page_of(number, 1) };
    for (at, count) in [(0, 1), (3, 64), (36, 64), (99, 1), (20, 31)] {
        let first = PAGES as usize - count - at;
        let pages: Vec<PageBytes> = (first..first + count).map(|number| filled(number as u64)).collect();
        client.copy_to_frames(&frames, at, &pages);
        client.ask_write_run(1, first as u64, &frames, at as u32, count as u32).unwrap();
        end(&mut client).unwrap();
        for (number, page) in (first..).zip(&pages) {
            let lease = other.read(number as u64).unwrap();
            assert_eq!(other.page(&lease), page, "page {number}");
            other.give(lease).unwrap();
        }
        client.copy_to_frames(&frames, at, &vec![[0xee; PAGE_SIZE]; count]);
        let from = 100 - count;
        client.ask_read_run(2, first as u64, &frames, from as u32, count as u32).unwrap();
        end(&mut client).unwrap();
        let mut read = vec![[0; PAGE_SIZE]; count];
        client.copy_from_frames(&frames, from, &mut read);
        assert!(read == pages, "{count} pages in frames {from} on");
    }
    let runs = 1 + 64 + 64 + 1 + 31;
    assert_eq!((server.stats().writes(), server.stats().reads()), (runs, 2 * runs));
}

#[test]
fn a_run_that_is_too_long_or_has_no_row_of_frames_is_refused_and_changes_nothing() {
    let server = server("bad-runs", 2, 8);
    let mut raw = Raw::connect(server.path());
    let mut ask = |op, page, token, count| {
        raw.push(Submission { op, tag: 9, page, token, count });
        if op == Op::Give { None } else { Some(raw.next()) }
    };
    let reserve = |ask: &mut dyn FnMut(Op, u64, u32, u32) -> Option<Completed>| {
        let completed = ask(Op::Reserve, 0, 0, 0).unwrap();
        let Spot::Frame(frame) = completed.spot else { panic!("{completed:?}") };
        (completed.token, frame)
    };
    let first: Vec<_> = (0..4).map(|_| reserve(&mut ask)).collect();
    let (bad, wrong) = (rustix::io::Errno::BADF, rustix::io::Errno::INVAL);
    let token = first[0].0;
    // The two frames in the middle are given back and come again in another order.
    ask(Op::Give, 0, token + 1, 2);
    let status = ask(Op::WriteRun, 0, token, 2).unwrap().status;
    assert_eq!(status, -bad.raw_os_error(), "the second frame is not held");
    let swapped = [reserve(&mut ask), reserve(&mut ask)];
    assert_eq!(swapped[1].0, swapped[0].0 + 1, "their tokens are a row");
    assert_ne!(swapped[1].1, swapped[0].1 + 1, "the frames are none");
    for op in [Op::ReadRun, Op::WriteRun] {
        for (page, token, count, errno) in [
            (0, swapped[0].0, 2, bad),
            (0, token, 5, bad),
            (0, token, 64, bad),
            (0, u32::MAX, 2, bad),
            (0, token, 0, wrong),
            (0, token, 65, wrong),
            (0, token, u32::MAX, wrong),
            (u64::from(PAGES) - 1, token, 2, wrong),
            (u64::from(PAGES), token, 1, wrong),
            (u64::MAX, token, 2, wrong),
        ] {
            let completed = ask(op, page, token, count).unwrap();
            assert_eq!((completed.tag, completed.status), (9, -errno.raw_os_error()), "{op:?} {count}");
            assert_eq!(completed.spot, Spot::Nowhere);
        }
        assert_eq!(ask(op, 0, token, 1).unwrap().status, 0);
    }
    assert_eq!((server.stats().writes(), server.stats().violations()), (1, 0));
}

#[test]
fn a_run_of_a_slow_store_fills_each_of_its_frames() {
    let config = weir_volume::Config { pages: PAGES, lanes: 2, depth: 64 };
    let store = Arc::new(Gated::new(config.slots()));
    let volume = Volume::create(config, vec![Arc::clone(&store) as Arc<dyn Store>]).unwrap();
    let server = Server::start(&volume, &Config::at(socket("slow")), to_stderr(Level::Warning)).unwrap();
    let mut client = connect(&server);
    let frames = client.take_frames(64, MINUTE).unwrap();
    let pages: Vec<PageBytes> = (0..40).map(|number| page_of(number, 3)).collect();
    client.copy_to_frames(&frames, 0, &pages);
    client.ask_write_run(1, 5, &frames, 0, 40).unwrap();
    end(&mut client).unwrap();
    client.copy_to_frames(&frames, 0, &[[0xee; PAGE_SIZE]; 64]);
    // The run begins with a page of zeros, which no store has.
    client.ask_read_run(2, 4, &frames, 20, 41).unwrap();
    client.submit().unwrap();
    store.gate.open();
    client.wait().unwrap().result.unwrap();
    let mut read = vec![[0; PAGE_SIZE]; 64];
    client.copy_from_frames(&frames, 0, &mut read);
    assert!(read[20] == [0; PAGE_SIZE] && read[21..61] == pages[..]);
    assert!(read[..20].iter().chain(&read[61..]).all(|page| *page == [0xee; PAGE_SIZE]));
}

#[test]
fn a_hoarder_is_refused_at_its_quota_and_others_go_on() {
    let server = server("hoard", 2, 8);
    let (mut hoarder, mut other) = (connect(&server), connect(&server));
    let mut held: Vec<Lease> = (0..8).map(|number| hoarder.read(number).unwrap()).collect();
    for _ in 0..100 {
        let refused = hoarder.read(0).unwrap_err();
        let Error::Failed { op: Op::Read, source, .. } = refused else { panic!("{refused}") };
        assert_eq!(source.raw_os_error(), Some(rustix::io::Errno::NOBUFS.raw_os_error()));
        let lease = other.read(1).unwrap();
        other.give(lease).unwrap();
    }
    hoarder.give(held.pop().unwrap()).unwrap();
    held.push(hoarder.read(3).unwrap());
    assert_eq!(server.stats().over_quota(), 100);
    drop(hoarder);
    eventually("the return of what was hoarded", || server.stats().reclaimed() == 8);
}

#[test]
fn a_page_beyond_the_end_and_a_token_that_is_not_held_are_errors() {
    let server = server("bad", 1, 8);
    let mut client = connect(&server);
    for page in [u64::from(PAGES), u64::MAX, 1 << 32] {
        let Error::Failed { source, .. } = client.read(page).unwrap_err() else { panic!("page {page}") };
        assert_eq!(source.raw_os_error(), Some(rustix::io::Errno::INVAL.raw_os_error()));
    }
    client.ask_discard(0, u64::from(PAGES) - 1, 2).unwrap();
    client.submit().unwrap();
    assert!(client.wait().unwrap().result.is_err());
    let lease = client.read(0).unwrap();
    let token = lease.token();
    client.give(lease).unwrap();
    eventually("the return", || server.stats().given() == 1);
    let mut raw = Raw::connect(server.path());
    assert_eq!(raw.welcome.status, -rustix::io::Errno::USERS.raw_os_error(), "one client only");
    drop(client);
    eventually("the client's end", || server.stats().sessions_ended() == 1);
    raw = Raw::connect(server.path());
    raw.push(Submission { op: Op::Write, tag: 5, page: 0, token: token.0, count: 0 });
    raw.push(Submission { op: Op::Give, tag: 0, page: 0, token: token.0, count: 3 });
    eventually("the refusal", || server.stats().refused() == 3);
    let area = raw.area.as_ref().unwrap();
    let entry = weir_share::wire::Completed::decode(area.load(Ring::Completions, 0));
    assert_eq!((entry.tag, entry.status), (5, -rustix::io::Errno::BADF.raw_os_error()));
}

/// A server that lends in place, with its volume.
fn lending(name: &str, pages: u32) -> (Server, Arc<Volume>) {
    let config = weir_volume::Config { pages: PAGES, lanes: 4, depth: 64 };
    let volume = Volume::create(config, vec![Arc::new(Host::new(config.slots()).unwrap())]).unwrap();
    let config = Config { clients: 8, frames: 64, entries: 64, in_place: pages, ..Config::at(socket(name)) };
    (Server::start(&volume, &config, to_stderr(Level::Warning)).unwrap(), volume)
}

/// Writes pages `0..pages` past the server, as another front end would.
fn write_anew(volume: &Arc<Volume>, pages: u32, version: u64) {
    let mut lane = volume.lane().unwrap();
    for page in 0..pages {
        let _ = lane.write(0, weir_core::PageNo(page), &page_of(page.into(), version));
        lane.submit();
    }
}

fn connect_in_place(server: &Server) -> Client {
    Client::connect(server.path(), Options { in_place: true, ..Options::default() }).unwrap()
}

#[test]
fn pages_lent_in_place_are_the_stores_own_and_stay_as_they_were_when_they_are_written_anew() {
    let (server, volume) = lending("place", 128);
    let mut reader = connect_in_place(&server);
    write_anew(&volume, PAGES, 1);
    let mut held: Vec<Lease> = (0..64).map(|number| reader.read(number).unwrap()).collect();
    assert!(held.iter().all(|lease| matches!(lease.spot(), Spot::Window { window: 0, .. })));
    assert_eq!((server.stats().in_place(), reader.page_mut(&mut held[0]).is_none()), (64, true));
    // Every page is written anew many times, so every slot of the store that may be reused is
    // reused.
    for version in 2..6 {
        write_anew(&volume, PAGES, version);
    }
    for (number, lease) in held.iter().enumerate() {
        assert_eq!(reader.page(lease), &page_of(number as u64, 1), "the slot of page {number} was reused");
    }
    // A page that is returned is free for others, and its number shows what was written since.
    for lease in held {
        reader.give_later(lease).unwrap();
    }
    reader.submit().unwrap();
    let lease = reader.read(5).unwrap();
    assert_eq!(reader.page(&lease), &page_of(5, 5));
    reader.give(lease).unwrap();
    eventually("the return of every lease", || server.stats().out() == 0);
    assert_eq!((server.stats().refused(), server.stats().double_frees()), (0, 0));
}

#[test]
fn more_than_may_be_lent_in_place_is_copied_and_a_page_of_a_window_cannot_be_written_from() {
    let (server, volume) = lending("limit", 128);
    let mut clients: Vec<_> = (0..3).map(|_| connect_in_place(&server)).collect();
    write_anew(&volume, 200, 1);
    let mut held = Vec::new();
    for (at, client) in clients.iter_mut().enumerate() {
        for number in 0..64 {
            let page = at as u64 * 64 + number;
            let lease = client.read(page).unwrap();
            assert_eq!(client.page(&lease), &page_of(page, 1));
            assert_eq!(matches!(lease.spot(), Spot::Window { .. }), page < 128, "128 pages at a time");
            held.push(lease);
        }
        assert!(client.read(0).is_err(), "its quota is 64, wherever the pages lie");
    }
    assert_eq!(server.stats().over_quota(), 3);
    clients[0].ask_write(7, 0, &held[0]).unwrap();
    clients[0].submit().unwrap();
    let refused = clients[0].wait().unwrap().result.unwrap_err();
    assert_eq!(refused.raw_os_error(), Some(rustix::io::Errno::BADF.raw_os_error()));
    drop(clients);
    eventually("the return of all", || server.stats().reclaimed() == 192);
}

#[test]
fn a_lent_slot_comes_back_when_its_client_is_gone() {
    let (server, volume) = lending("gone", 128);
    for round in 1..20 {
        let mut reader = connect_in_place(&server);
        write_anew(&volume, PAGES, round);
        let held: Vec<Lease> = (0..64).map(|number| reader.read(number).unwrap()).collect();
        write_anew(&volume, 64, round + 100);
        assert!(held.iter().all(|lease| matches!(lease.spot(), Spot::Window { .. })), "round {round}");
        drop(reader);
        eventually("the return of all", || server.stats().out() == 0);
    }
    let status = volume.status();
    let in_use: u64 = status.stores.iter().map(|store| u64::from(store.used)).sum();
    assert_eq!(in_use, u64::from(PAGES), "a slot a page, and none besides");
}

#[test]
fn where_only_reading_is_allowed_a_write_is_refused() {
    let config = Config { read_only: true, ..Config::at(socket("read-only")) };
    let server = Server::start(&volume(), &config, to_stderr(Level::Warning)).unwrap();
    let mut client = connect(&server);
    let Error::Failed { source, .. } = client.write(0, &page_of(0, 1)).unwrap_err() else { panic!() };
    assert_eq!(source.raw_os_error(), Some(rustix::io::Errno::ROFS.raw_os_error()));
    client.ask_discard(0, 0, 1).unwrap();
    assert!(end(&mut client).is_err());
    let (mut other, read_only) = (connect(&server), rustix::io::Errno::ROFS.raw_os_error());
    let frames = other.take_frames(2, MINUTE).unwrap();
    other.ask_write_run(0, 0, &frames, 0, 2).unwrap();
    assert_eq!(end(&mut other).unwrap_err().raw_os_error(), Some(read_only));
    let lease = client.read(0).unwrap();
    assert_eq!(client.page(&lease), &[0; PAGE_SIZE]);
    client.give(lease).unwrap();
}

/// A client that breaks the rules.
struct Raw {
    welcome: Welcome,
    area: Option<Area>,
    /// The descriptors of the welcome: the area, the server's bell, and the windows.
    fds: Vec<OwnedFd>,
    written: u32,
    socket: OwnedFd,
}

impl Raw {
    /// A connection that has sent nothing.
    fn dial(path: &Path) -> OwnedFd {
        use rustix::net::{AddressFamily, SocketAddrUnix, SocketFlags, SocketType, connect, socket_with};
        let flags = SocketFlags::CLOEXEC;
        let socket = socket_with(AddressFamily::UNIX, SocketType::SEQPACKET, flags, None).unwrap();
        connect(&socket, &SocketAddrUnix::new(path).unwrap()).unwrap();
        socket
    }

    fn greet(path: &Path, hello: &[u8]) -> Raw {
        Raw::greet_with(path, hello, &[])
    }

    fn greet_with(path: &Path, hello: &[u8], descriptors: &[BorrowedFd<'_>]) -> Raw {
        let socket = Raw::dial(path);
        // The server may have refused the client already: its answer says so.
        let _ = send(&socket, hello, descriptors);
        let mut bytes = [0; 64];
        let (count, fds) = receive(&socket, &mut bytes).unwrap();
        let welcome = Welcome::decode(&bytes[..count]).unwrap();
        let layout = Layout::new(welcome.frames, welcome.entries);
        let area = layout.map(|layout| Area::adopt(fds[0].try_clone().unwrap(), layout).unwrap());
        Raw { welcome, area, fds, written: 0, socket }
    }

    fn connect(path: &Path) -> Raw {
        Raw::greet(
            path,
            &Hello { version: VERSION, frames: 8, entries: 8, in_place: false, volume: b"" }.encode(),
        )
    }

    fn push(&mut self, submission: Submission) {
        self.push_words(submission.encode());
    }

    /// Waits for the next completion, and takes it.
    fn next(&self) -> Completed {
        let area = self.area.as_ref().unwrap();
        let seen = area.read(Ring::Completions).load(Ordering::SeqCst);
        eventually("a completion", || area.written(Ring::Completions).load(Ordering::SeqCst) != seen);
        area.read(Ring::Completions).store(seen + 1, Ordering::SeqCst);
        Completed::decode(area.load(Ring::Completions, seen))
    }

    fn push_words(&mut self, words: [u64; 4]) {
        self.area.as_ref().unwrap().store(Ring::Submissions, self.written, words);
        self.written += 1;
        self.tell(self.written);
    }

    fn tell(&self, written: u32) {
        let area = self.area.as_ref().unwrap();
        area.written(Ring::Submissions).store(written, Ordering::SeqCst);
        // A bell that is full has been rung.
        let _ = rustix::io::write(&self.fds[1], &1u64.to_ne_bytes());
    }
}

#[test]
fn what_a_client_sent_along_stays_open_until_its_requests_have_ended() {
    let server = server("along", 1, 4096);
    for round in 1..=30 {
        let (reader, writer) = rustix::pipe::pipe().unwrap();
        let options = Options { frames: 4096, entries: 64, ..Options::default() };
        let mut client = Client::connect_with(server.path(), options, &[writer.as_fd()]).unwrap();
        drop(writer);
        // The server takes some time to take back all that this client holds.
        for _ in 0..128 {
            (0..32).for_each(|tag| client.ask_frame(tag).unwrap());
            client.submit().unwrap();
            (0..32).for_each(|_| drop(client.wait().unwrap().result.unwrap().expect("a frame")));
        }
        let mut fds = [rustix::event::PollFd::new(&reader, rustix::event::PollFlags::empty())];
        let now = rustix::event::Timespec { tv_sec: 0, tv_nsec: 0 };
        assert_eq!(
            rustix::event::poll(&mut fds, Some(&now)).unwrap(),
            0,
            "it is open while the client is there"
        );
        drop(client);
        assert_eq!(rustix::io::read(&reader, &mut [0; 1]).unwrap(), 0, "its last end is closed");
        assert_eq!(server.stats().sessions_ended(), round);
    }
}

#[test]
fn a_client_of_another_version_or_none_is_turned_away_with_the_reason() {
    let server = server("version", 2, 8);
    let refused = |hello: &[u8]| Raw::greet(server.path(), hello).welcome;
    let other = refused(
        &Hello { version: VERSION + 1, frames: 8, entries: 8, in_place: false, volume: b"" }.encode(),
    );
    assert_eq!((other.version, other.status), (VERSION, -rustix::io::Errno::PROTONOSUPPORT.raw_os_error()));
    assert_eq!(refused(b"GET / HTTP/1.1").status, -rustix::io::Errno::PROTO.raw_os_error());
    let zero =
        refused(&Hello { version: VERSION, frames: 0, entries: 8, in_place: false, volume: b"" }.encode());
    assert_eq!(zero.status, -rustix::io::Errno::INVAL.raw_os_error());
    assert_eq!(server.stats().turned_away(), 3);
}

#[test]
fn a_client_that_breaks_the_rings_is_cut_off_and_holds_nothing_afterwards() {
    let server = server("hostile", 2, 8);
    let mut honest = connect(&server);
    let read = Submission { op: Op::Read, tag: 0, page: 0, token: 0, count: 0 };
    let attacks: [fn(&mut Raw); 4] = [
        |raw| raw.push_words([77, 0, 0, 0]),
        |raw| raw.tell(u32::MAX / 2),
        |raw| {
            let area = raw.area.as_ref().unwrap();
            area.read(Ring::Completions).store(5, std::sync::atomic::Ordering::SeqCst);
            raw.push(Submission { op: Op::Reserve, tag: 0, page: 0, token: 0, count: 0 });
        },
        |raw| raw.push(Submission { op: Op::Give, tag: 0, page: 0, token: 0, count: u32::MAX }),
    ];
    for (number, attack) in attacks.iter().enumerate() {
        let mut raw = Raw::connect(server.path());
        raw.push(read);
        eventually("the first, honest read", || server.stats().taken() > 2 * number as u64);
        attack(&mut raw);
        eventually("the cut", || server.stats().violations() == number as u64 + 1);
        let lease = honest.read(3).unwrap();
        honest.give(lease).unwrap();
    }
    eventually("the return of everything", || server.stats().out() == 0);
}

#[test]
fn a_socket_at_which_somebody_answers_is_neither_taken_nor_removed() {
    let first = server("taken", 2, 8);
    let again = Server::start(&volume(), &Config::at(first.path()), to_stderr(Level::Warning)).unwrap_err();
    assert!(again.to_string().contains("another server listens there"), "{again}");
    drop(connect(&first));
    // The socket is removed by hand, and a second server starts.
    std::fs::remove_file(first.path()).unwrap();
    let second = server("taken", 2, 8);
    drop(first);
    drop(connect(&second));
}

#[test]
fn clients_that_are_cut_off_one_after_the_other_do_not_flood_the_log() {
    let lines = Arc::new(std::sync::atomic::AtomicU64::new(0));
    let counted = Arc::clone(&lines);
    let log: weir_core::log::Log = Arc::new(move |_, _| {
        counted.fetch_add(1, Ordering::SeqCst);
    });
    let config = Config { clients: 2, frames: 8, ..Config::at(socket("flood")) };
    let server = Server::start(&volume(), &config, log).unwrap();
    let begun = Instant::now();
    for number in 1..=200 {
        let mut raw = Raw::connect(server.path());
        raw.push_words([77, 0, 0, 0]);
        eventually("the cut", || server.stats().violations() == number);
    }
    let most = 21 * (begun.elapsed().as_secs() + 1);
    let lines = lines.load(Ordering::SeqCst);
    assert!((1..=most).contains(&lines), "{lines} lines in {:?}", begun.elapsed());
}

/// A volume with hardly any slack: its writers fail as soon as one lane holds freed slots back.
fn tight_volume() -> Arc<Volume> {
    let config = weir_volume::Config { pages: 64, lanes: 3, depth: 8 };
    Volume::create(config, vec![Arc::new(Host::new(config.slots()).unwrap())]).unwrap()
}

/// Checks that others are served: a client of the same server, and writers of the same volume
/// through another front end.
fn others_are_served(mut honest: Client, volume: &Arc<Volume>) -> Client {
    let honest = within_a_minute("another client's read", move || {
        let lease = honest.read(1).unwrap();
        honest.give(lease).unwrap();
        honest
    });
    let volume = Arc::clone(volume);
    within_a_minute("writing by another front end", move || {
        let mut lane = volume.lane().unwrap();
        for (version, page) in (1..=40).flat_map(|version| (2..64).map(move |page| (version, page))) {
            let written = lane.write(0, PageNo(page), &page_of(page.into(), version));
            assert_eq!(written, Progress::Done(Ok(())), "page {page}, version {version}");
            lane.submit();
        }
    });
    honest
}

#[test]
fn nothing_that_a_client_does_to_the_descriptors_it_shares_stops_the_server() {
    let volume = tight_volume();
    let config = Config { clients: 2, frames: 16, entries: 64, ..Config::at(socket("spoiled")) };
    let server = Server::start(&volume, &config, to_stderr(Level::Warning)).unwrap();
    let mut honest = connect(&server);
    for op in [Op::Discard, Op::Read] {
        let mut raw = Raw::connect(server.path());
        // O_NONBLOCK belongs to the open file, which both sides share: each bell is made full, or
        // empty, and blocking.
        for fd in &raw.fds {
            let _ = rustix::io::write(fd, &(u64::MAX - 1).to_ne_bytes());
            let flags = rustix::fs::fcntl_getfl(fd).unwrap();
            rustix::fs::fcntl_setfl(fd, flags - rustix::fs::OFlags::NONBLOCK).unwrap();
        }
        rustix::io::read(&raw.fds[1], &mut [0; 8]).unwrap();
        // The client says that it sleeps, and is woken again and again without reacting.
        for request in 0..2000 {
            let area = raw.area.as_ref().unwrap();
            area.client_asleep().store(1, Ordering::SeqCst);
            area.read(Ring::Completions).store(request, Ordering::SeqCst);
            raw.push(Submission { op, tag: 0, page: 0, token: 0, count: 1 });
            eventually("the answer", || {
                raw.area.as_ref().unwrap().written(Ring::Completions).load(Ordering::SeqCst) > request
            });
        }
        honest = others_are_served(honest, &volume);
    }
    within_a_minute("the server's end", move || drop(server));
}

/// A read could block for ever, since the client can empty the bell first, and make it blocking.
#[test]
fn the_server_never_reads_the_bell_by_which_its_client_wakes_it() {
    let volume = tight_volume();
    let config = Config { clients: 1, frames: 16, entries: 64, ..Config::at(socket("bell")) };
    let server = Server::start(&volume, &config, to_stderr(Level::Warning)).unwrap();
    let mut raw = Raw::connect(server.path());
    for request in 0..50 {
        raw.push(Submission { op: Op::Discard, tag: 0, page: 0, token: 0, count: 1 });
        eventually("the answer", || {
            raw.area.as_ref().unwrap().written(Ring::Completions).load(Ordering::SeqCst) > request
        });
        raw.area.as_ref().unwrap().read(Ring::Completions).store(request + 1, Ordering::SeqCst);
        // The server looks for what has woken it, and goes to sleep.
        std::thread::sleep(Duration::from_millis(5));
        let mut rings = [0; 8];
        rustix::io::read(&raw.fds[1], &mut rings).expect("the ring is there still");
        assert_eq!(u64::from_ne_bytes(rings), 1, "request {request}");
    }
    drop(server);
}

/// A descriptor whose last close takes as long as its owner likes: TCP with unread data and
/// SO_LINGER. Also returns the end that does not read.
fn lingering() -> (OwnedFd, std::net::TcpStream) {
    use std::io::Write as _;
    let listener = std::net::TcpListener::bind(("127.0.0.1", 0)).unwrap();
    let mut stream = std::net::TcpStream::connect(listener.local_addr().unwrap()).unwrap();
    stream.set_nonblocking(true).unwrap();
    while stream.write(&[0; 65536]).is_ok() {}
    stream.set_nonblocking(false).unwrap();
    rustix::net::sockopt::set_socket_linger(&stream, Some(Duration::from_secs(3600))).unwrap();
    (stream.into(), listener.accept().unwrap().0)
}

#[test]
fn no_descriptor_that_a_client_sends_is_closed_by_the_thread_that_serves() {
    let volume = tight_volume();
    let config = Config { clients: 4, frames: 16, entries: 64, ..Config::at(socket("lingering")) };
    let server = Server::start(&volume, &config, to_stderr(Level::Warning)).unwrap();
    let mut honest = connect(&server);
    let mut ends = Vec::new();
    let mut lingering = || {
        let (fd, end) = lingering();
        ends.push(end);
        fd
    };
    let hello = Hello { version: VERSION, frames: 8, entries: 8, in_place: false, volume: b"" }.encode();

    // The descriptor comes with a greeting, with a message after it, with an invalid greeting, and
    // before the server has read anything.
    let raw = Raw::greet_with(server.path(), &hello, &[lingering().as_fd()]);
    assert_eq!(raw.welcome.status, 0);
    honest = others_are_served(honest, &volume);
    // If the kernel refuses to send it, there is nothing to close.
    let _ = send(&raw.socket, b"more", &[lingering().as_fd()]);
    honest = others_are_served(honest, &volume);
    drop(raw);
    honest = others_are_served(honest, &volume);
    let raw = Raw::greet_with(server.path(), b"none", &[lingering().as_fd()]);
    assert_eq!(raw.welcome.status, -rustix::io::Errno::PROTO.raw_os_error());
    honest = others_are_served(honest, &volume);
    let left = Raw::dial(server.path());
    send(&left, b"none", &[lingering().as_fd()]).unwrap();
    drop(left);
    honest = others_are_served(honest, &volume);
    let _last = Raw::greet_with(server.path(), &hello, &[lingering().as_fd()]);
    others_are_served(honest, &volume);
    within_a_minute("the server's end", move || drop(server));
}

/// A store that answers all operations at once, except writes that begin with [`HELD`], and later
/// reads: those wait until it is opened.
#[derive(Debug)]
struct Gated {
    host: Host,
    gate: Arc<Gate>,
}

const HELD: [u8; 4] = *b"held";

#[derive(Debug)]
struct Gate {
    is_open: AtomicBool,
    bell: OwnedFd,
}

struct GatedLane {
    lane: Box<dyn Lane>,
    gate: Arc<Gate>,
    held: Vec<(Ticket, Slot)>,
    held_write: Option<(Ticket, Slot)>,
    page: Box<PageBytes>,
}

impl Gated {
    fn new(slots: u32) -> Self {
        let bell = rustix::event::eventfd(0, rustix::event::EventfdFlags::NONBLOCK).unwrap();
        let gate = Arc::new(Gate { is_open: AtomicBool::new(false), bell });
        Gated { host: Host::new(slots).unwrap(), gate }
    }
}

impl Gate {
    fn open(&self) {
        self.is_open.store(true, Ordering::SeqCst);
        rustix::io::write(&self.bell, &1u64.to_ne_bytes()).unwrap();
    }
}

impl Store for Gated {
    fn name(&self) -> &str {
        "gated"
    }

    fn slots(&self) -> u32 {
        self.host.slots()
    }

    fn lane(&self, depth: usize) -> Result<Box<dyn Lane>, OpenError> {
        let held = Vec::with_capacity(depth);
        let (gate, page) = (Arc::clone(&self.gate), Box::new([0; PAGE_SIZE]));
        Ok(Box::new(GatedLane { lane: self.host.lane(depth)?, gate, held, held_write: None, page }))
    }

    fn state(&self, member: u32) -> State {
        self.host.state(member)
    }

    fn unfit_for_swap(&self) -> Option<String> {
        None
    }
}

impl Lane for GatedLane {
    fn write(&mut self, ticket: Ticket, slot: Slot, page: &PageBytes) -> Progress {
        if page.starts_with(&HELD) && !self.gate.is_open.load(Ordering::SeqCst) {
            *self.page = *page;
            assert_eq!(self.held_write.replace((ticket, slot)), None);
            return Progress::Queued;
        }
        self.lane.write(ticket, slot, page)
    }

    fn read(&mut self, ticket: Ticket, slot: Slot, _page: &mut PageBytes) -> Progress {
        self.held.push((ticket, slot));
        Progress::Queued
    }

    fn poll(&mut self, _now: Instant, done: &mut dyn FnMut(Done<'_>)) {
        if self.gate.is_open.load(Ordering::SeqCst) {
            if let Some((ticket, slot)) = self.held_write.take() {
                let Progress::Done(result) = self.lane.write(ticket, slot, &self.page) else {
                    unreachable!()
                };
                done(Done { ticket, result, page: None });
            }
            while let Some((ticket, slot)) = self.held.pop() {
                let read = self.lane.read(ticket, slot, &mut self.page);
                assert_eq!(read, Progress::Done(Ok(())));
                done(Done { ticket, result: Ok(()), page: Some(&self.page) });
            }
        }
    }

    fn in_flight(&self) -> usize {
        self.held.len() + usize::from(self.held_write.is_some())
    }

    fn wake_fd(&self) -> Option<BorrowedFd<'_>> {
        Some(self.gate.bell.as_fd())
    }
}

#[test]
fn a_write_of_a_client_that_has_gone_is_never_published() {
    leave_a_write(false);
}

#[test]
fn a_run_of_writes_of_a_client_that_has_gone_is_never_published() {
    leave_a_write(true);
}

fn leave_a_write(is_run: bool) {
    let config = weir_volume::Config { pages: PAGES, lanes: 2, depth: 64 };
    let store = Arc::new(Gated::new(config.slots()));
    let volume = Volume::create(config, vec![Arc::clone(&store) as Arc<dyn Store>]).unwrap();
    let server = Server::start(
        &volume,
        &Config::at(socket(if is_run { "late-run" } else { "late" })),
        to_stderr(Level::Warning),
    )
    .unwrap();
    let mut first = connect(&server);
    let mut held = page_of(7, 1);
    held[..4].copy_from_slice(&HELD);
    if is_run {
        let frames = first.take_frames(2, MINUTE).unwrap();
        first.copy_to_frames(&frames, 0, &[[9; PAGE_SIZE], held]);
        first.ask_write_run(1, 6, &frames, 0, 2).unwrap();
    } else {
        first.ask_frame(0).unwrap();
        first.submit().unwrap();
        let mut frame = first.wait().unwrap().result.unwrap().unwrap();
        *first.page_mut(&mut frame).unwrap() = held;
        first.ask_write(1, 7, &frame).unwrap();
    }
    first.submit().unwrap();
    let used = || volume.status().stores.iter().map(|store| u64::from(store.used)).sum::<u64>();
    eventually("the slot of the write", || used() == 1);
    drop(first);
    eventually("the client's end", || server.stats().sessions_ended() == 1);
    let mut second = connect(&server);
    second.write(7, &page_of(7, 2)).unwrap();
    store.gate.open();
    let mut read = || {
        let lease = second.read(7).unwrap();
        let intact = second.page(&lease) == &page_of(7, 2);
        second.give(lease).unwrap();
        assert!(intact, "page 7 went back to what was written before");
    };
    // Each read makes the server look at its stores. A read that began before the held write ended
    // proves nothing.
    eventually("the end of the held write", || {
        read();
        used() == 1
    });
    read();
}

/// Volumes by name.
type Named = Arc<Mutex<HashMap<&'static str, Arc<Volume>>>>;

/// A server of the volumes `a` of 600 pages and `b` of 50, and of a nameless one of 700.
fn several(name: &str, store: Arc<dyn Store>, config: weir_volume::Config) -> (Server, Arc<Pool>, Named) {
    let pool = Pool::create(config, vec![store]).unwrap();
    let named = [("", 700), ("a", 600), ("b", 50)].map(|(name, pages)| (name, pool.volume(pages).unwrap()));
    let named: Named = Arc::new(Mutex::new(HashMap::from(named)));
    let known = Arc::clone(&named);
    let find = move |name: &[u8]| {
        let known = known.lock().unwrap();
        std::str::from_utf8(name).ok().and_then(|name| known.get(name).map(Arc::clone))
    };
    let config = Config { clients: 6, frames: 8, entries: 8, ..Config::at(socket(name)) };
    let server = Server::start_all(&pool, Box::new(find), &config, to_stderr(Level::Warning)).unwrap();
    (server, pool, named)
}

const SEVERAL: weir_volume::Config = weir_volume::Config { pages: 1400, lanes: 2, depth: 64 };

fn connect_to(server: &Server, volume: &str) -> Result<Client, Error> {
    Client::connect_to(server.path(), volume, Options::default())
}

#[test]
fn each_client_has_the_pages_of_the_volume_that_it_names_and_no_others() {
    let (server, _, _) = several("named", Arc::new(Host::new(SEVERAL.slots()).unwrap()), SEVERAL);
    let names = ["", "a", "b", "a"];
    let mut clients = names.map(|name| connect_to(&server, name).unwrap());
    assert_eq!(clients.each_ref().map(Client::pages), [700, 600, 50, 600]);
    for (at, client) in clients[..3].iter_mut().enumerate() {
        for page in [0, 49] {
            client.write(page, &page_of(page, at as u64 + 1)).unwrap();
        }
        for beyond in [client.pages(), u64::MAX] {
            let Error::Failed { source, .. } = client.read(beyond).unwrap_err() else { panic!() };
            assert_eq!(source.raw_os_error(), Some(rustix::io::Errno::INVAL.raw_os_error()));
        }
        client.ask_discard(0, client.pages() - 1, 2).unwrap();
        client.submit().unwrap();
        assert!(client.wait().unwrap().result.is_err(), "one page beyond the end");
    }
    let mut read = |at: usize, page, version: Option<u64>| {
        let lease = clients[at].read(page).unwrap();
        let expected = version.map_or([0; PAGE_SIZE], |version| page_of(page, version));
        assert!(clients[at].page(&lease) == &expected, "page {page} of client {at}");
        clients[at].give(lease).unwrap();
    };
    for page in [0, 49] {
        (0..3).for_each(|at| read(at, page, Some(at as u64 + 1)));
        read(3, page, Some(2));
    }
    clients[2].ask_discard(0, 0, 50).unwrap();
    clients[2].submit().unwrap();
    assert!(clients[2].wait().unwrap().result.is_ok());
    let mut read = |at: usize, version: Option<u64>| {
        let lease = clients[at].read(49).unwrap();
        let expected = version.map_or([0; PAGE_SIZE], |version| page_of(49, version));
        assert!(clients[at].page(&lease) == &expected, "client {at}");
    };
    [(0, Some(1)), (1, Some(2)), (2, None)].into_iter().for_each(|(at, version)| read(at, version));
    // An earlier client sends no name.
    let mut old = *b"weirshar\x02\0\0\0\x08\0\0\0\x08\0\0\0\0\0\0\0\0\0\0\0\0\0\0\0";
    let raw = Raw::greet(server.path(), &old);
    assert_eq!((raw.welcome.status, raw.welcome.pages), (0, 700));
    // A server of an earlier version refuses a name as this one refuses a longer message.
    old[24] = 1;
    assert_eq!(Raw::greet(server.path(), &old).welcome.status, -rustix::io::Errno::PROTO.raw_os_error());
}

#[test]
fn a_greeting_with_a_hostile_name_is_refused_and_others_are_served() {
    let (server, pool, _) = several("hostile", Arc::new(Host::new(SEVERAL.slots()).unwrap()), SEVERAL);
    let hello =
        |volume: &[u8]| Hello { version: VERSION, frames: 8, entries: 8, in_place: false, volume }.encode();
    let refused = |hello: &[u8]| Raw::greet(server.path(), hello).welcome.status;
    let [proto, noent] =
        [rustix::io::Errno::PROTO, rustix::io::Errno::NOENT].map(|errno| -errno.raw_os_error());
    let before = pool.map_bytes();
    for name in [&b"c"[..], b"A", b"a\0", b"a/../b", b"\xff\xfe", &[b'a'; 255], &[0; 255]] {
        assert_eq!(refused(&hello(name)), noent, "{name:?}");
    }
    for name in [&[b'a'; 256][..], &[b'a'; 60_000]] {
        assert_eq!(refused(&hello(name)), proto, "{} bytes", name.len());
    }
    for length in [0u32, 2, 255, 256, u32::MAX] {
        let mut bytes = hello(b"a");
        bytes[24..28].copy_from_slice(&length.to_le_bytes());
        assert_eq!(refused(&bytes), proto, "a name of 1 byte that says {length}");
    }
    assert!(matches!(connect_to(&server, "c"), Err(Error::NoVolume { volume }) if volume == "c"));
    assert!(matches!(connect_to(&server, &"a".repeat(256)), Err(Error::NoVolume { .. })));
    assert_eq!(connect_to(&server, "b").unwrap().pages(), 50);
    assert_eq!(pool.map_bytes(), before);
}

#[test]
fn a_volume_that_a_client_holds_stays_until_a_store_has_answered_the_last_request_of_that_client() {
    let store = Arc::new(Gated::new(SEVERAL.slots()));
    let (server, pool, named) = several("held", Arc::clone(&store) as _, SEVERAL);
    let mut client = connect_to(&server, "a").unwrap();
    client.ask_frame(0).unwrap();
    client.submit().unwrap();
    let mut frame = client.wait().unwrap().result.unwrap().unwrap();
    client.page_mut(&mut frame).unwrap()[..4].copy_from_slice(&HELD);
    client.ask_write(1, 7, &frame).unwrap();
    client.submit().unwrap();
    let used = || pool.status().stores.iter().map(|store| u64::from(store.used)).sum::<u64>();
    eventually("the slot of the write", || used() == 1);
    let volume = named.lock().unwrap().remove("a").unwrap();
    let is_held = || Arc::strong_count(&volume) > 1;
    assert!(is_held(), "its client is there");
    drop(client);
    eventually("the client's end", || server.stats().sessions_ended() == 1);
    assert!(is_held(), "its write is under way");
    assert!(matches!(connect_to(&server, "a"), Err(Error::NoVolume { .. })), "nobody gets it now");
    let mut other = connect_to(&server, "b").unwrap();
    store.gate.open();
    eventually("the end of the write", || {
        // Each request makes the server look at its stores.
        other.ask_discard(0, 0, 1).unwrap();
        other.submit().unwrap();
        other.wait().unwrap().result.unwrap();
        !is_held()
    });
    let before = pool.map_bytes();
    let mut removal = volume.shrink(0, |_| Ok(())).unwrap();
    let mut mover = pool.mover().unwrap();
    while !mover.remove(&mut removal, 64) {}
    assert_eq!((before - pool.map_bytes(), used()), (2 * 4096, 0), "all of its memory is free");
}

#[test]
fn any_of_sixteen_slow_stores_wakes_the_server() {
    const STORES: u32 = 16;
    let config = weir_volume::Config { pages: PAGES, lanes: 2, depth: 64 };
    let each = config.slots().div_ceil(STORES);
    let stores: Vec<_> = (0..STORES).map(|_| Arc::new(Gated::new(each))).collect();
    let shared = stores.iter().map(|store| Arc::clone(store) as Arc<dyn Store>).collect();
    let volume = Volume::create(config, shared).unwrap();
    write_anew(&volume, PAGES, 1);
    let server = Server::start(&volume, &Config::at(socket("stores")), to_stderr(Level::Warning)).unwrap();
    let mut client = connect(&server);
    // Pages fill one store after the other, so read one page of each store that has any.
    let pages: Vec<u32> = (0..PAGES / each).map(|store| store * each + each / 2).collect();
    for &page in &pages {
        client.ask_read(page, page.into()).unwrap();
    }
    let sleeps = server.stats().sleeps();
    client.submit().unwrap();
    eventually("the server's sleep", || server.stats().sleeps() > sleeps);
    assert!(pages.len() > 8);
    for (store, &page) in stores.iter().zip(&pages).rev() {
        store.gate.open();
        client = within_a_minute("the read of a page whose store has answered", move || {
            let done = client.wait().unwrap();
            let lease = done.result.unwrap().unwrap();
            assert_eq!((done.tag, client.page(&lease)), (page, &page_of(page.into(), 1)));
            client.give(lease).unwrap();
            client
        });
    }
}

#[test]
fn a_client_that_does_not_read_its_completions_costs_no_processor() {
    let server = server("deaf", 1, 64);
    let mut raw = Raw::connect(server.path());
    for tag in 0..12 {
        raw.push(Submission { op: Op::Read, tag, page: 0, token: 0, count: 0 });
        // The ring is full of completions after 8; later requests wait.
        eventually("the look at it", || tag >= 8 || server.stats().taken() > u64::from(tag));
    }
    let sleeps = server.stats().sleeps();
    eventually("the sleeps of a server that waits for room", || server.stats().sleeps() > sleeps + 20);
    let area = raw.area.as_ref().unwrap();
    area.read(Ring::Completions).store(8, std::sync::atomic::Ordering::SeqCst);
    eventually("the rest", || {
        area.written(Ring::Completions).load(std::sync::atomic::Ordering::SeqCst) == 12
    });
}

/// This is no test of its own: it is the client that
/// [`clients_killed_at_random_moments_leave_nothing_out`] kills.
#[test]
fn client_to_be_killed() {
    let Ok(path) = std::env::var("WEIR_SHARE_VICTIM") else { return };
    let in_place = std::env::var_os("WEIR_SHARE_VICTIM_IN_PLACE").is_some();
    let mut client = Client::connect(path.as_ref(), Options { in_place, ..Options::default() }).unwrap();
    let mut held = vec![client.read(0).unwrap(), client.read(1).unwrap()];
    println!("connected");
    for number in 0u64.. {
        let page = number * 13 % u64::from(PAGES);
        match number % 4 {
            0 => client.write(page, &page_of(page, 3)).unwrap_or(()),
            1 if held.len() > 20 => held.drain(..15).for_each(|lease| client.give_later(lease).unwrap()),
            _ => held.extend(client.read(page)),
        }
    }
}

/// The test has a process of its own, since descriptors are counted by process.
#[test]
fn a_server_without_descriptors_waits_and_then_lets_clients_in() {
    const NAME: &str = "a_server_without_descriptors_waits_and_then_lets_clients_in";
    if std::env::var_os("WEIR_SHARE_DESCRIPTORS").is_none() {
        let status = Command::new(std::env::current_exe().unwrap())
            .args(["--exact", NAME, "--nocapture", "--test-threads=1"])
            .env("WEIR_SHARE_DESCRIPTORS", "1")
            .status();
        assert!(status.unwrap().success());
        return;
    }
    use rustix::net::{AddressFamily, SocketAddrUnix, SocketFlags, SocketType, socket_with};
    use rustix::process::{Resource, Rlimit, getrlimit, setrlimit};
    use std::os::fd::AsRawFd;
    let server = server("descriptors", 2, 8);
    drop(connect(&server));
    let flags = SocketFlags::CLOEXEC;
    let client = socket_with(AddressFamily::UNIX, SocketType::SEQPACKET, flags, None).unwrap();
    eventually("the first client's end", || server.stats().sessions_ended() == 1);
    // The lowest free number is the client's next descriptor.
    let free = rustix::io::dup(&client).unwrap().as_raw_fd();
    let before = getrlimit(Resource::Nofile);
    setrlimit(Resource::Nofile, Rlimit { current: Some(free as u64), ..before }).unwrap();
    rustix::net::connect(&client, &SocketAddrUnix::new(server.path()).unwrap()).unwrap();
    let spent = || {
        let now = rustix::time::clock_gettime(rustix::time::ClockId::ProcessCPUTime);
        Duration::new(now.tv_sec as u64, now.tv_nsec as u32)
    };
    let begun = spent();
    std::thread::sleep(Duration::from_millis(600));
    let used = spent() - begun;
    assert!(used < Duration::from_millis(100), "{used:?} of a processor in 0.6 s of waiting");
    setrlimit(Resource::Nofile, before).unwrap();
    send(
        &client,
        &Hello { version: VERSION, frames: 8, entries: 8, in_place: false, volume: b"" }.encode(),
        &[],
    )
    .unwrap();
    let mut bytes = [0; 64];
    let (count, _) = receive(&client, &mut bytes).unwrap();
    assert_eq!(Welcome::decode(&bytes[..count]).unwrap().status, 0);
}

fn victim(path: &Path, in_place: bool) -> Child {
    let mut child = Command::new(std::env::current_exe().unwrap())
        .args(["--exact", "client_to_be_killed", "--nocapture", "--test-threads=1"])
        .env("WEIR_SHARE_VICTIM", path)
        .envs(in_place.then_some(("WEIR_SHARE_VICTIM_IN_PLACE", "1")))
        .stdout(Stdio::piped())
        .stderr(Stdio::null())
        .spawn()
        .unwrap();
    let lines = BufReader::new(child.stdout.as_mut().unwrap()).lines();
    assert!(
        lines.map_while(Result::ok).any(|line| line.ends_with("connected")),
        "the victim did not connect"
    );
    child
}

/// `tests/torture share-killed` kills 10,000.
#[test]
fn clients_killed_at_random_moments_leave_nothing_out() {
    let full = std::env::var_os("WEIR_SCALE").is_some_and(|scale| scale == "full");
    let kills: u64 = if full { 10_000 } else { 40 };
    // Every other client has its pages in the store's memory.
    let (server, volume) = lending("killed", 128);
    write_anew(&volume, PAGES, 3);
    let mut random = 88_172_645_463_325_252u64;
    for kill in 0..kills {
        random ^= random << 13;
        random ^= random >> 7;
        random ^= random << 17;
        let mut child = victim(server.path(), kill % 2 == 1);
        std::thread::sleep(Duration::from_micros(random % 3000));
        child.kill().unwrap();
        child.wait().unwrap();
    }
    let stats = server.stats();
    eventually("the end of every session", || stats.sessions_ended() == kills);
    println!(
        "{kills} killed: {} leases, {} given, {} reclaimed, {} out, {} freed twice, {} refused, {} violations",
        stats.taken(),
        stats.given(),
        stats.reclaimed(),
        stats.out(),
        stats.double_frees(),
        stats.refused(),
        stats.violations()
    );
    println!("figure: clients killed {kills} higher {kills}");
    println!("figure: leases taken {} higher", stats.taken());
    println!("figure: leases reclaimed {} higher", stats.reclaimed());
    println!("figure: pages leaked {} lower 0", stats.out());
    println!("figure: pages freed_twice {} lower 0", stats.double_frees());
    assert_eq!((stats.out(), stats.double_frees(), stats.refused(), stats.violations()), (0, 0, 0, 0));
    assert!(stats.reclaimed() > kills, "most died holding something");
    let status = volume.status();
    let in_use: u64 = status.stores.iter().map(|store| u64::from(store.used)).sum();
    assert_eq!(in_use, status.stored, "every slot that no page lies in is free");
    assert!(stats.in_place() > 0, "some had pages in place");
    // Every frame of every seat is free for the next clients, and every page is a whole one.
    let mut clients: Vec<_> = (0..8).map(|_| connect(&server)).collect();
    for client in &mut clients {
        for number in 0..64 {
            let lease = client.read(number).unwrap();
            let page = client.page(&lease);
            assert!(page == &[0; PAGE_SIZE] || page == &page_of(number, 3), "page {number} is torn");
        }
    }
}

#[test]
fn the_header_is_one_for_cpp_too() {
    let header = Path::new(env!("CARGO_MANIFEST_DIR")).join("../weir-share/include/weir_share.h");
    let flags = ["-std=c++11", "-D_GNU_SOURCE", "-Wall", "-Wextra", "-Werror", "-fsyntax-only", "-x", "c++"];
    match Command::new("c++").args(flags).arg("/dev/null").arg("-include").arg(&header).status() {
        Ok(status) => assert!(status.success()),
        Err(error) => println!("skipped: no C++ compiler: {error}"),
    }
}

#[test]
fn the_client_in_c_writes_and_reads_in_place() {
    let here = Path::new(env!("CARGO_MANIFEST_DIR")).join("../weir-share");
    let program = socket("c-client").with_extension("out");
    let built = Command::new("cc")
        .args(["-std=c11", "-D_GNU_SOURCE", "-Wall", "-Wextra", "-Werror", "-O2", "-I"])
        .arg(here.join("include"))
        .arg(here.join("examples/client.c"))
        .arg("-o")
        .arg(&program)
        .status()
        .expect("a C compiler, cc, is needed for this test");
    assert!(built.success());
    for arguments in [&[][..], &["", "in-place"]] {
        let (server, _volume) = lending("c", 128);
        let run = Command::new(&program).arg(server.path()).args(arguments).output().unwrap();
        let text = String::from_utf8_lossy(&run.stdout) + String::from_utf8_lossy(&run.stderr);
        assert!(run.status.success() && text == "1000 pages written and read in place\n", "{text}");
        eventually("the return of every lease", || server.stats().out() == 0);
        let stats = server.stats();
        // Page 0 is zeros, which lie in no store.
        assert_eq!(stats.in_place(), if arguments.is_empty() { 0 } else { 999 });
        // The last return may come with the client's end.
        assert_eq!((stats.given() + stats.reclaimed(), stats.refused(), stats.writes()), (2000, 0, 1000));
        assert!(stats.reclaimed() <= 1);
    }
    std::fs::remove_file(&program).unwrap();
}
