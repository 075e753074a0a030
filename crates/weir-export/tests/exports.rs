//! One server of many devices, which clients ask for by name.

mod common;

use common::gated::{Gate, marked};
use common::{PATIENCE, few, have, page};
use std::io::{Read, Write};
use std::os::unix::net::UnixStream;
use std::path::PathBuf;
use std::process::Command;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, Mutex, MutexGuard};
use std::time::{Duration, Instant};
use weir_core::log::Log;
use weir_core::seal::{Policy, seal};
use weir_core::{PAGE_SIZE, PageNo};
use weir_device::PageLane;
use weir_export::nbd::client::{Client, ClientError, Operation, Wish};
use weir_export::nbd::wire::{Errno, OPTION_MAGIC, OPTION_REPLY_MAGIC};
use weir_export::nbd::{Config, Export, Exports, Listen, Server};
use weir_store::{Host, OpenError, Progress, Store};
use weir_volume::{Lane, Pool, Volume};

/// A volume and its name. A client holds all of it, a lane the volume alone.
struct Device {
    name: String,
    volume: Arc<Volume>,
}

/// Volumes of one pool, by name. The first is the default one.
struct Devices {
    pool: Arc<Pool>,
    all: Mutex<Vec<Arc<Device>>>,
    turns: AtomicUsize,
}

impl Devices {
    fn new(connections: usize, pages: u32, open: impl FnOnce(u32) -> Arc<dyn Store>) -> Arc<Devices> {
        let shape = weir_volume::Config { pages, lanes: connections + 1, depth: 256 };
        let pool = Pool::create(shape, vec![open(shape.slots())]).unwrap();
        Arc::new(Devices { pool, all: Mutex::default(), turns: AtomicUsize::new(0) })
    }

    fn all(&self) -> MutexGuard<'_, Vec<Arc<Device>>> {
        self.all.lock().unwrap()
    }

    fn volume(&self, name: &str) -> Arc<Volume> {
        let all = self.all();
        Arc::clone(&all.iter().find(|device| device.name == name).unwrap().volume)
    }

    fn add(&self, name: &str, pages: u32) {
        let volume = self.pool.volume(pages).unwrap();
        self.all().push(Arc::new(Device { name: name.to_owned(), volume }));
    }

    /// Removes a device; `false` if a client holds it, and it stays.
    fn remove(&self, name: &str) -> bool {
        let mut all = self.all();
        let at = all.iter().position(|device| device.name == name).unwrap();
        if Arc::strong_count(&all[at]) > 1 {
            return false;
        }
        let Device { volume, .. } = Arc::into_inner(all.remove(at)).unwrap();
        let held = |(_, error)| panic!("no client holds it, and a lane does: {error}");
        let mut removal = volume.shrink(0, |_| Ok(())).unwrap_or_else(held);
        let mut mover = self.pool.mover().unwrap();
        while !mover.remove(&mut removal, 100) {}
        true
    }

    /// The first bytes of a device's first pages, by a lane of their own.
    fn heads(&self, name: &str, pages: u32) -> Vec<Vec<u8>> {
        let mut lane = self.volume(name).lane().unwrap();
        let mut read = |number| {
            let mut bytes = [1; PAGE_SIZE];
            let read = lane.read(0, PageNo(number), &mut bytes);
            assert_eq!(read, Progress::Done(Ok(())));
            bytes[..8].to_vec()
        };
        (0..pages).map(&mut read).collect()
    }
}

impl Exports for Devices {
    type Lane = Lane;
    type Device = Arc<Device>;

    fn open(&self) -> Result<Lane, OpenError> {
        self.pool.lane()
    }

    fn find(&self, name: &[u8]) -> Option<(Export, Arc<Device>)> {
        let all = self.all();
        let device = all.iter().find(|its| name.is_empty() || its.name.as_bytes() == name)?;
        let Device { name, volume } = &**device;
        // Clients are told of a page that a device has not, or are not told of one that it has.
        let pages = match &**name {
            "too large" => volume.pages() + 1,
            "too small" => volume.pages() - 1,
            _ => volume.pages(),
        };
        let export = Export {
            name: name.clone(),
            description: format!("about {name}"),
            bytes: u64::from(pages) * PAGE_SIZE as u64,
            read_only: name == "read-only",
            clears: true,
        };
        Some((export, Arc::clone(device)))
    }

    fn list(&self, each: &mut dyn FnMut(&str, &str)) {
        self.all().iter().for_each(|its| each(&its.name, &format!("about {}", its.name)));
    }

    fn turn(&self, lane: &mut Lane, device: Option<&Arc<Device>>) {
        assert_eq!(lane.in_flight(), 0);
        assert_ne!(device.is_some(), lane.pages() > 0, "a lane is turned away before it is turned on");
        if device.is_none() {
            let is_held =
                |its: &Arc<Device>| Arc::ptr_eq(&its.volume, lane.volume()) && Arc::strong_count(its) > 1;
            assert!(self.all().iter().any(is_held), "a client holds its device until then");
        }
        self.turns.fetch_add(1, Ordering::Relaxed);
        lane.turn(device.map(|device| &device.volume));
    }
}

struct Served {
    server: Server,
    devices: Arc<Devices>,
    socket: PathBuf,
}

fn served(test: &str, devices: &Arc<Devices>, config: &Config) -> Served {
    let socket = std::env::temp_dir().join(format!("weir-test-{test}-{}", std::process::id()));
    let listen = [Listen::Unix(socket.clone())];
    let log: Log = Arc::new(|_, _| {});
    let server = Server::start_exports(Arc::clone(devices), config, &listen, &log).unwrap();
    seal(Policy::Abort);
    Served { server, devices: Arc::clone(devices), socket }
}

fn host(slots: u32) -> Arc<dyn Store> {
    Arc::new(Host::new(slots).unwrap())
}

impl Served {
    fn try_client(&self, name: &str) -> Result<Client, ClientError> {
        Client::unix(&self.socket, &Wish { name: name.to_owned(), ..Wish::default() })
    }

    fn client(&self, name: &str) -> Client {
        self.try_client(name).unwrap()
    }

    /// Leaves in order, and waits until the server has noticed.
    fn leave(&self, client: Client) {
        let before = self.server.stats().connected;
        client.disconnect().unwrap();
        wait("the connection ends", || self.server.stats().connected < before);
    }

    fn shutdown(self) {
        assert_eq!(self.server.shutdown(PATIENCE), 0, "threads that did not come back");
        let held = |device: &Arc<Device>| Arc::strong_count(device) + Arc::strong_count(&device.volume) > 2;
        assert!(!self.devices.all().iter().any(held));
    }
}

fn wait(what: &str, mut until: impl FnMut() -> bool) {
    let begun = Instant::now();
    while !until() {
        assert!(begun.elapsed() < PATIENCE, "{what}: not in time");
        std::thread::sleep(Duration::from_millis(1));
    }
}

/// Writes a device's pages, each its own content, and checks all of them.
fn fill(client: &mut Client, seed: u64) {
    let pages = client.terms().bytes / PAGE_SIZE as u64;
    let whole: Vec<u8> = (0..pages).flat_map(|number| page(seed + number)).collect();
    client.write(0, &whole).unwrap();
    assert!(client.read(0, whole.len() as u32).unwrap() == whole);
}

fn holds(client: &mut Client, seed: u64) -> bool {
    let bytes = client.terms().bytes;
    let whole: Vec<u8> = (0..bytes / PAGE_SIZE as u64).flat_map(|number| page(seed + number)).collect();
    client.read(0, bytes as u32).unwrap() == whole
}

#[test]
fn each_name_shows_its_own_pages_and_its_own_terms() {
    let devices = Devices::new(4, 600, host);
    for (name, pages) in [("one", 100), ("two", 200), ("read-only", 10), ("too large", 10), ("too small", 11)]
    {
        devices.add(name, pages);
    }
    let served = served("names", &devices, &few());
    let [mut one, mut two] = ["one", "two"].map(|name| served.client(name));
    assert_eq!([&one, &two].map(|client| client.terms().bytes), [100, 200].map(|pages| pages * 4096));
    fill(&mut one, 1000);
    fill(&mut two, 2000);
    assert!(holds(&mut one, 1000) && holds(&mut two, 2000));
    let mut by_default = served.client("");
    assert_eq!(by_default.terms().bytes, 100 * 4096);
    assert!(holds(&mut by_default, 1000), "the default device is the first");
    let beyond = one.write(100 * 4096, &page(1));
    assert!(matches!(beyond, Err(ClientError::Failed(Errno::NoSpace))), "{beyond:?}");
    one.perform(Operation::Trim { offset: 0, length: 100 * 4096 }).unwrap();
    assert!(one.read(0, 100 * 4096).unwrap() == vec![0; 100 * 4096] && holds(&mut two, 2000));
    let mut refuses = served.client("read-only");
    let refused = refuses.write(0, &page(1));
    assert!(matches!(refused, Err(ClientError::Failed(Errno::NotPermitted))), "{refused:?}");
    assert_eq!(refuses.read(0, 4096).unwrap(), vec![0; 4096]);
    served.leave(refuses);
    for name in ["too large", "too small"] {
        let mut client = served.client(name);
        assert_eq!(client.read(9 * 4096, 4096).unwrap(), vec![0; 4096]);
        let beyond = client.read(10 * 4096, 4096);
        assert!(matches!(beyond, Err(ClientError::Failed(Errno::Invalid))), "{name}: {beyond:?}");
        served.leave(client);
    }
    for unknown in ["three", "on", "ONE"] {
        let refused = served.try_client(unknown).unwrap_err().to_string();
        assert!(refused.contains("no such export"), "{refused}");
    }
    // The pages are the volumes', whatever lane shows them.
    assert_eq!(devices.heads("two", 3), [2000, 2001, 2002].map(|seed| page(seed)[..8].to_vec()));
    drop((one, two, by_default));
    served.shutdown();
}

#[test]
fn lanes_serve_more_devices_than_there_are_threads_one_after_another() {
    const DEVICES: usize = 7;
    let devices = Devices::new(2, 700, host);
    let name = |at: usize| format!("device-{at}");
    (0..DEVICES).for_each(|at| devices.add(&name(at), 10 + at as u32));
    let served = served("turns", &devices, &Config { connections: 2, ..few() });
    let mut last = [None; DEVICES];
    for round in 0..50 {
        let [at, other] = [round, round + 3].map(|at| at % DEVICES);
        let mut clients = [at, other].map(|at| (at, served.client(&name(at))));
        for (at, client) in &mut clients {
            assert_eq!(client.terms().bytes, (10 + *at as u64) * 4096);
            match last[*at] {
                Some(seed) => assert!(holds(client, seed), "round {round}, device {at}"),
                None => assert!(client.read(0, 10 * 4096).unwrap() == vec![0; 10 * 4096]),
            }
        }
        for (at, client) in &mut clients {
            let seed = (1000 * *at + 100_000 * round) as u64;
            fill(client, seed);
            last[*at] = Some(seed);
        }
        clients.into_iter().for_each(|(_, client)| served.leave(client));
    }
    let connections = served.server.stats().connections as usize;
    assert_eq!((connections, devices.turns.load(Ordering::Relaxed)), (100, 200));
    served.shutdown();
}

#[test]
fn a_device_is_held_until_the_last_operation_of_its_connection_has_ended_and_is_free_then() {
    let mut gate = None;
    let devices = Devices::new(4, 100, |slots| {
        let (store, its) = Gate::store(slots);
        gate = Some(its);
        store
    });
    let gate = gate.unwrap();
    devices.add("one", 30);
    devices.add("two", 30);
    let served = served("held", &devices, &few());
    let mut client = served.client("one");
    assert!(!devices.remove("one"), "a connection holds it, though it has nothing under way");
    client.queue(Operation::write(0, &marked(1)));
    client.send().unwrap();
    gate.wait();
    // The client goes, and its write stays under way.
    drop(client);
    let begun = Instant::now();
    while begun.elapsed() < Duration::from_millis(300) {
        assert!(!devices.remove("one"), "the store may still write for it");
        std::thread::sleep(Duration::from_millis(10));
    }
    assert_eq!(served.server.stats().connected, 1, "and its thread takes no other connection");
    // Others are served meanwhile, also with that device.
    for name in ["two", "one"] {
        let mut other = served.client(name);
        fill(&mut other, 500);
        assert!(holds(&mut other, 500));
        served.leave(other);
    }
    gate.open.store(true, Ordering::SeqCst);
    wait("the connection ends", || served.server.stats().connected == 0);
    assert_eq!(devices.heads("one", 1), [page(500)[..8].to_vec()], "what was under way is not published");
    assert!(devices.remove("one"), "nobody holds it any more");
    let gone = served.try_client("one").unwrap_err().to_string();
    assert!(gone.contains("no such export"), "{gone}");
    // The next device of that name has nothing of it, by the same threads.
    devices.add("one", 70);
    for _ in 0..4 {
        let mut client = served.client("one");
        assert!(client.read(0, 70 * 4096).unwrap() == vec![0; 70 * 4096]);
        served.leave(client);
    }
    assert_eq!(devices.pool.status().stores[0].used, 30, "all slots but those of the other device are free");
    served.shutdown();
}

#[test]
fn a_client_that_sees_its_connection_end_finds_the_device_free() {
    let devices = Devices::new(4, 100, host);
    let served = served("free", &devices, &few());
    for round in 0..20 {
        devices.add("one", 50);
        let mut client = served.client("one");
        fill(&mut client, round);
        // The server ends a connection that breaks the protocol.
        let mut raw = after_go(&served, b"one");
        raw.write_all(&[0x55; 28]).unwrap();
        assert_eq!(raw.read(&mut [0]).unwrap_or(0), 0);
        assert!(!devices.remove("one"), "the other client holds it");
        served.leave(client);
        assert!(devices.remove("one"));
    }
    served.shutdown();
}

#[test]
fn a_device_that_grows_keeps_its_size_for_those_who_are_connected() {
    let devices = Devices::new(4, 300, host);
    devices.add("one", 100);
    let served = served("grows", &devices, &few());
    let mut before = served.client("one");
    fill(&mut before, 7);
    devices.volume("one").grow(200, |_| Ok(())).unwrap();
    let mut after = served.client("one");
    assert_eq!([&before, &after].map(|client| client.terms().bytes), [100 * 4096, 200 * 4096]);
    fill(&mut after, 9);
    assert!(holds(&mut before, 9));
    let beyond = before.read(100 * 4096, 4096);
    assert!(matches!(beyond, Err(ClientError::Failed(Errno::Invalid))), "{beyond:?}");
    drop((before, after));
    served.shutdown();
}

fn option(number: u32, data: &[u8]) -> Vec<u8> {
    let length = (data.len() as u32).to_be_bytes();
    [&OPTION_MAGIC.to_be_bytes()[..], &number.to_be_bytes(), &length, data].concat()
}

/// A connection that has sent its flags and `options`, without Weir's client.
fn negotiating(served: &Served, options: &[u8]) -> UnixStream {
    let mut stream = UnixStream::connect(&served.socket).unwrap();
    stream.set_read_timeout(Some(PATIENCE)).unwrap();
    stream.read_exact(&mut [0; 18]).unwrap();
    stream.write_all(&[&3u32.to_be_bytes()[..], options].concat()).unwrap();
    stream
}

fn after_go(served: &Served, name: &[u8]) -> UnixStream {
    let data = [&(name.len() as u32).to_be_bytes()[..], name, &[0, 0]].concat();
    let mut stream = negotiating(served, &option(7, &data));
    stream.read_exact(&mut [0; 20 + 12 + 20 + 14 + 20]).unwrap();
    stream
}

#[test]
fn a_list_of_hundreds_has_each_device_once_and_waits_for_a_client_that_does_not_read() {
    let devices = Devices::new(4, 600, host);
    let names: Vec<String> = (0..600).map(|at| format!("{at:0200}")).collect();
    names.iter().for_each(|name| devices.add(name, 1));
    let served = served("list", &devices, &few());
    // Each list is 260 KiB long, which no socket holds. The other clients are served all the while.
    let mut slow = negotiating(&served, &[option(3, b""), option(3, b"")].concat());
    let mut other = served.client(&names[599]);
    fill(&mut other, 3);
    let mut read = || {
        let mut head = [0; 20];
        slow.read_exact(&mut head).unwrap();
        assert_eq!(head[..8], OPTION_REPLY_MAGIC.to_be_bytes());
        let mut data = vec![0; u32::from_be_bytes(head[16..].try_into().unwrap()) as usize];
        slow.read_exact(&mut data).unwrap();
        (u32::from_be_bytes(head[12..16].try_into().unwrap()), data)
    };
    for _ in 0..2 {
        for name in &names {
            let (kind, data) = read();
            assert_eq!((kind, &data[..4]), (2, &200u32.to_be_bytes()[..]));
            assert_eq!(data[4..], *format!("{name}about {name}").as_bytes());
        }
        assert_eq!(read(), (1, vec![]), "then the list ends");
    }
    assert!(holds(&mut other, 3));
    drop(other);
    served.shutdown();
}

#[test]
fn the_tools_of_others_list_and_choose_devices() {
    if !have("nbdinfo", "libnbd-bin") {
        return;
    }
    let devices = Devices::new(4, 300, host);
    devices.add("one", 100);
    devices.add("zwei ü", 200);
    let served = served("tools", &devices, &few());
    let uri = |name: &str| format!("nbd+unix:///{name}?socket={}", served.socket.display());
    let run = |arguments: &[&str]| {
        let output = Command::new("nbdinfo").args(arguments).output().unwrap();
        (output.status.success(), String::from_utf8_lossy(&output.stdout).into_owned())
    };
    let (fine, list) = run(&["--list", &uri("")]);
    assert!(fine, "{list}");
    for said in ["export=\"one\"", "export=\"zwei ü\"", "about one", "about zwei ü", "409600", "819200"] {
        assert!(list.contains(said), "{said}: {list}");
    }
    assert_eq!(run(&["--size", &uri("zwei%20%C3%BC")]), (true, "819200\n".to_owned()));
    assert_eq!(run(&["--size", &uri("")]), (true, "409600\n".to_owned()));
    assert!(!run(&["--size", &uri("three")]).0);
    wait("they leave", || served.server.stats().connected == 0);
    served.shutdown();
}
