//! An end-to-end run with 4 flows and 4 workers. It is like the runs of kperf (a network benchmark)
//! that the kernel's device memory patches report. Pages go to their users over the share transport
//! at a fixed rate. The run measures how busy the workers are with each design.
//!
//! A worker is the server's side of one or more connections. When a client asks for a page, the
//! worker takes a free frame, copies the payload there, takes a reference, and answers with the
//! token. The client is `weir-share`'s own. It reads every page, and returns pages in ranges. Only
//! the design differs: `none` uses the frame's number as token and records nothing, which shows the
//! cost of all the other work.

use std::io;
use std::os::fd::{AsFd, OwnedFd};
use std::path::Path;
use std::sync::Barrier;
use std::sync::atomic::{AtomicBool, Ordering, fence};
use std::time::{Duration, Instant};

use rustix::event::{EventfdFlags, PollFd, PollFlags, Timespec, eventfd, poll};
use rustix::net::{AddressFamily, SocketAddrUnix, SocketFlags, SocketType, bind, listen, socket_with};
use weir_core::{Memory, PAGE_SIZE};
use weir_lease::{BATCH_TOKENS_MAX, Place, Token};
use weir_share::wire::{Completed, HELLO_BYTES, Hello, Op, Spot, Submission, VERSION, Welcome};
use weir_share::{Area, Client, Layout, Options, Ring};

use super::Plan;
use super::counters::{RegionCounters, SocketArrays};
use super::design::{Design, Nothing};
use super::kernel::KernelXArrays;
use super::table::Lease;
use super::xarray::XArrays;
use crate::report::{Report, Row, Runs};
use crate::steps::Steps;

/// Number of frames of a flow, which is the largest number of pages that its connection may hold.
const FRAMES: u32 = 1024;
const ENTRIES: u32 = 256;
/// Number of payload pages that a worker copies from, in an order that no cache can predict.
const SOURCE_PAGES: usize = 16_384;
/// Pages that a flow asks for at once, and the time between two bursts: 4 KiB x 64 / 200 us = 1.3
/// GB/s.
const BURST: u32 = 64;
const PERIOD: Duration = Duration::from_micros(200);

/// Figures of one design: percent of a CPU that a worker used, nanoseconds a page, and pages that
/// arrived a second.
#[derive(Default)]
struct Figures {
    busy: Runs,
    ns: Runs,
    rate: Runs,
}

/// Number of designs.
const DESIGNS: usize = 6;

/// Number of runs that [`rows`] makes.
pub fn runs(plan: &Plan) -> usize {
    if plan.flows > 0 { plan.flow_rounds.max(1) * DESIGNS } else { 0 }
}

/// Adds the rows of the end-to-end run.
///
/// # Errors
/// Fails when the system gives no sockets or no memory.
pub fn rows(report: &mut Report, plan: &Plan, steps: &Steps) -> io::Result<()> {
    let (flows, workers) = (plan.flows, plan.workers.min(plan.flows));
    let mut source = Memory::anonymous(SOURCE_PAGES * PAGE_SIZE)?;
    fill(&mut source);
    let mut figures: [Figures; DESIGNS] = std::array::from_fn(|_| Figures::default());
    // The designs take turns, so that a slow change of the machine affects all designs.
    for _ in 0..plan.flow_rounds.max(1) {
        let shares = || (0..workers).map(|worker| (flows + workers - 1 - worker) / workers);
        let mut each = figures.iter_mut();
        let mut next = || each.next().expect("a figure for each design");
        let run = |into: &mut Figures, parts| {
            run(into, plan.flow_time, flows, &source, parts).inspect(|()| steps.end())
        };
        run(next(), boxed(shares().map(|_| Nothing)))?;
        run(next(), boxed(shares().map(|flows| Lease::owned(flows, FRAMES, FRAMES * flows))))?;
        run(next(), boxed(shares().map(XArrays::new)))?;
        run(next(), boxed(KernelXArrays::parts(shares(), FRAMES * flows)))?;
        run(next(), boxed(RegionCounters::parts(workers, FRAMES * flows)))?;
        run(next(), boxed(shares().map(|flows| SocketArrays::new(flows, FRAMES * flows))))?;
    }
    let [none, lease, xarray, kernel, region, arrays] = &figures;
    let id = format!("flows_{flows}x{workers}");
    let controls = [
        (KernelXArrays::NAME, kernel),
        ("xarray", xarray),
        ("binding", region),
        ("socket-array", arrays),
        ("none", none),
    ];
    for (control, of) in controls {
        let busy = Row::lower(&id, "worker_cpu_percent", lease.busy.median());
        report.rows.push(busy.beside(control, of.busy.median()));
        // `worker_ns_per_page` counts only pages that arrived. On a busy machine some do not arrive
        // in time.
        let ns = Row::lower(&id, "worker_ns_per_page", lease.ns.median());
        report.rows.push(ns.beside(control, of.ns.median()));
    }
    let rate = Row::higher(&id, "kpages_per_s", lease.rate.median());
    report.rows.push(rate.beside("xarray", xarray.rate.median()));
    Ok(())
}

fn boxed<'a, D: Design + 'a>(parts: impl IntoIterator<Item = D>) -> Vec<Box<dyn Rounds + 'a>> {
    parts.into_iter().map(|design| Box::new(design) as Box<dyn Rounds>).collect()
}

/// Fills the payload. Each word of 8 bytes has the page's number in its first half, and the word's
/// index in its second.
fn fill(source: &mut Memory) {
    for page in 0..SOURCE_PAGES {
        for at in 0..PAGE_SIZE / 8 {
            let word = (at as u64) << 32 | page as u64;
            // SAFETY: the address is inside the mapping, which only `source` has; it is aligned, as
            // the mapping and the words are.
            unsafe { source.as_ptr().cast::<u64>().add(page * PAGE_SIZE / 8 + at).write(word) };
        }
    }
}

/// The operations of a design, as a worker uses them.
trait Rounds: Send {
    fn take(&mut self, connection: u32, pages: &[Place], tokens: &mut [Token]);
    fn give_pages(&mut self, connection: u32, tokens: &[Token], back: &mut Vec<u32>);
}

impl<D: Design> Rounds for D {
    fn take(&mut self, connection: u32, pages: &[Place], tokens: &mut [Token]) {
        Design::take(self, connection, pages, tokens);
    }

    fn give_pages(&mut self, connection: u32, tokens: &[Token], back: &mut Vec<u32>) {
        Design::give_pages(self, connection, tokens, back);
    }
}

/// Runs all flows for `time` over one design. Each of `parts` is one worker's part of the design.
fn run(
    into: &mut Figures,
    time: Duration,
    flows: u32,
    source: &Memory,
    parts: Vec<Box<dyn Rounds + '_>>,
) -> io::Result<()> {
    let workers = parts.len() as u32;
    let stop = AtomicBool::new(false);
    let start = Barrier::new(parts.len() + 1);
    std::thread::scope(|scope| {
        let mut clients = Vec::new();
        let mut threads = Vec::new();
        for (number, mut design) in (0u32..).zip(parts) {
            let mut connections = Vec::new();
            for flow in (number..flows).step_by(workers as usize) {
                let (client, connection) = connect(flow, connections.len() as u32 * FRAMES)?;
                clients.push(client);
                connections.push(connection);
            }
            let (start, stop) = (&start, &stop);
            threads.push(scope.spawn(move || {
                start.wait();
                let begun = (cpu_time(), Instant::now());
                while !stop.load(Ordering::Relaxed) {
                    serve(&mut *design, &mut connections, source);
                }
                (cpu_time() - begun.0).as_secs_f64() / begun.1.elapsed().as_secs_f64()
            }));
        }
        start.wait();
        let users: Vec<_> =
            clients.into_iter().map(|client| scope.spawn(move || use_pages(client, time))).collect();
        let pages: u64 = users.into_iter().map(|user| user.join().expect("a user panicked")).sum();
        stop.store(true, Ordering::Relaxed);
        let busy: f64 = threads.into_iter().map(|thread| thread.join().expect("a worker panicked")).sum();
        into.busy.push(100.0 * busy / f64::from(workers));
        let rate = pages as f64 / time.as_secs_f64();
        into.ns.push(busy * 1e9 / rate);
        into.rate.push(rate / 1e3);
        Ok(())
    })
}

/// The CPU time of this thread.
fn cpu_time() -> Duration {
    let used = rustix::time::clock_gettime(rustix::time::ClockId::ThreadCPUTime);
    Duration::new(used.tv_sec as u64, used.tv_nsec as u32)
}

/// One flow's user: asks for a burst of pages each period, reads each page, and gives it back. The
/// result is the number of pages that it read.
fn use_pages(mut client: Client, time: Duration) -> u64 {
    let (begun, mut pages, mut next) = (Instant::now(), 0, Instant::now());
    while begun.elapsed() < time {
        for page in 0..BURST {
            // A full-period congruence gives the page numbers, so that no two bursts are alike
            // (Knuth 3.2.1.2).
            let page = ((pages as u32 + page).wrapping_mul(1_664_525) >> 8) as usize % SOURCE_PAGES;
            client.ask_read(page as u32, page as u64).expect("the ring has room for a burst");
        }
        client.submit().expect("the worker lives");
        for _ in 0..BURST {
            let done = client.wait().expect("the worker lives");
            let lease = done.result.expect("a frame is free").expect("a page");
            let page = client.page(&lease);
            assert_eq!(page[..4], done.tag.to_le_bytes(), "another page came than was asked for");
            client.give_later(lease).expect("the worker lives");
            pages += 1;
        }
        client.submit().expect("the worker lives");
        next += PERIOD;
        std::thread::sleep(next.saturating_duration_since(Instant::now()));
    }
    pages
}

/// The worker's side of a flow.
struct Connection {
    area: Area,
    server_bell: OwnedFd,
    free: Vec<u32>,
    /// The first page of this connection in the design's region.
    base: u32,
    taken: u32,
    completed: u32,
    /// A byte on this socket wakes the client. If the connection is dropped, the socket closes,
    /// which the client notices.
    socket: OwnedFd,
}

/// Makes a client and the worker's side of it, connected as docs/share.md says.
fn connect(flow: u32, base: u32) -> io::Result<(Client, Connection)> {
    let path = std::env::temp_dir().join(format!("weir-bench-flow-{}-{flow}", std::process::id()));
    let socket = socket_with(AddressFamily::UNIX, SocketType::SEQPACKET, SocketFlags::CLOEXEC, None)?;
    bind(&socket, &SocketAddrUnix::new(&path)?)?;
    listen(&socket, 1)?;
    let connected = std::thread::scope(|scope| {
        let client = scope.spawn(|| {
            let options = Options { frames: FRAMES, entries: ENTRIES, ..Options::default() };
            Client::connect(Path::new(&path), options).map_err(io::Error::other)
        });
        let connection = welcome(&socket, base)?;
        Ok((client.join().expect("connecting does not panic")?, connection))
    });
    std::fs::remove_file(&path)?;
    connected
}

fn welcome(listener: &OwnedFd, base: u32) -> io::Result<Connection> {
    let socket = rustix::net::accept_with(listener, SocketFlags::CLOEXEC)?;
    let mut bytes = [0; HELLO_BYTES];
    let (count, _) = weir_share::receive(&socket, &mut bytes)?;
    let hello = Hello::decode(&bytes[..count]).ok_or(io::ErrorKind::InvalidData)?;
    let layout = Layout::new(hello.frames, hello.entries).ok_or(io::ErrorKind::InvalidData)?;
    let area = Area::create(layout)?;
    let server_bell = eventfd(0, EventfdFlags::CLOEXEC | EventfdFlags::NONBLOCK)?;
    let welcome = Welcome {
        version: VERSION,
        status: 0,
        frames: hello.frames,
        entries: hello.entries,
        pages: SOURCE_PAGES as u64,
        windows: 0,
        run_most: 0,
    };
    let fds = [area.fd().ok_or(io::ErrorKind::Unsupported)?, server_bell.as_fd()];
    weir_share::send(&socket, &welcome.encode(), &fds)?;
    let free = (0..layout.frames()).rev().collect();
    Ok(Connection { area, server_bell, free, base, taken: 0, completed: 0, socket })
}

/// Serves every ring once, and sleeps briefly if there was nothing to do.
fn serve(design: &mut dyn Rounds, connections: &mut [Connection], source: &Memory) {
    let mut worked = false;
    for (number, connection) in (0u32..).zip(&mut *connections) {
        worked |= connection.serve(design, number, source);
    }
    if worked {
        return;
    }
    let asleep = |connections: &[Connection], asleep: u32| {
        for connection in connections {
            connection.area.server_asleep().store(asleep, Ordering::Relaxed);
        }
    };
    asleep(connections, 1);
    fence(Ordering::SeqCst);
    if !connections.iter().any(Connection::has_work) {
        let mut fds: Vec<_> = connections
            .iter()
            .map(|connection| PollFd::new(&connection.server_bell, PollFlags::IN))
            .collect();
        // The worker wakes up once in a while, to check whether the run is over.
        let moment = Timespec { tv_sec: 0, tv_nsec: 50_000_000 };
        let _ = poll(&mut fds, Some(&moment));
        for connection in &*connections {
            let _ = rustix::io::read(&connection.server_bell, &mut [0; 8]);
        }
    }
    asleep(connections, 0);
}

impl Connection {
    fn has_work(&self) -> bool {
        self.area.written(Ring::Submissions).load(Ordering::Acquire) != self.taken
    }

    fn serve(&mut self, design: &mut dyn Rounds, number: u32, source: &Memory) -> bool {
        let written = self.area.written(Ring::Submissions).load(Ordering::Acquire);
        if written == self.taken {
            return false;
        }
        let mut places = [Place::page(0, 0); BURST as usize];
        let mut tags = [0; BURST as usize];
        let mut asked = 0;
        while self.taken != written {
            let entry = self.area.load(Ring::Submissions, self.taken);
            let Submission { op, tag, page, token, count } =
                Submission::decode(entry).expect("an honest client");
            match op {
                Op::Read => {
                    let frame = self.free.pop().expect("a flow holds a burst or two");
                    let from = page as usize % SOURCE_PAGES * PAGE_SIZE;
                    // SAFETY: both pointers are to whole pages of their mappings. Nobody writes the
                    // source, and the frame is free.
                    unsafe {
                        let from = source.as_ptr().add(from).cast::<[u8; PAGE_SIZE]>();
                        std::ptr::copy_nonoverlapping(from, self.area.frame(frame), 1);
                    }
                    (places[asked], tags[asked]) = (Place::page(0, self.base + frame), tag);
                    asked += 1;
                }
                _ => self.give(design, number, token, count),
            }
            self.taken = self.taken.wrapping_add(1);
            if asked == places.len() {
                self.answer(design, number, &places, &tags);
                asked = 0;
            }
        }
        self.answer(design, number, &places[..asked], &tags);
        self.area.read(Ring::Submissions).store(self.taken, Ordering::Release);
        self.area.written(Ring::Completions).store(self.completed, Ordering::Release);
        fence(Ordering::SeqCst);
        if self.area.client_asleep().load(Ordering::Relaxed) != 0 {
            self.area.client_asleep().store(0, Ordering::Relaxed);
            weir_share::ring(&self.socket);
        }
        true
    }

    fn answer(&mut self, design: &mut dyn Rounds, number: u32, places: &[Place], tags: &[u32]) {
        let mut tokens = [Token(0); BURST as usize];
        let tokens = &mut tokens[..places.len()];
        design.take(number, places, tokens);
        for ((place, token), &tag) in places.iter().zip(tokens).zip(tags) {
            let spot = Spot::Frame(place.page - self.base);
            let completed = Completed { tag, status: 0, token: token.0, spot };
            self.area.store(Ring::Completions, self.completed, completed.encode());
            self.completed = self.completed.wrapping_add(1);
        }
    }

    fn give(&mut self, design: &mut dyn Rounds, number: u32, first: u32, count: u32) {
        let mut tokens = [Token(0); BATCH_TOKENS_MAX];
        let mut given = 0;
        while given < count {
            let some = (count - given).min(BATCH_TOKENS_MAX as u32);
            for (token, offset) in tokens.iter_mut().zip(given..given + some) {
                *token = Token(first.wrapping_add(offset));
            }
            let before = self.free.len();
            design.give_pages(number, &tokens[..some as usize], &mut self.free);
            for frame in &mut self.free[before..] {
                *frame -= self.base;
            }
            given += some;
        }
    }
}
