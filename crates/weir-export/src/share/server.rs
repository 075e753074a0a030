//! The server's thread: lets clients in, serves their rings, notices when they go.

use std::fmt;
use std::io;
use std::mem::MaybeUninit;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering, fence};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use rustix::event::epoll::{self, CreateFlags, Event, EventData, EventFlags};
use rustix::event::{EventfdFlags, PollFd, PollFlags, Timespec};
use rustix::fs::Mode;
use rustix::io::Errno;
use rustix::net::{AddressFamily, SocketAddrUnix, SocketFlags, SocketType};
use weir_core::{PAGE_SIZE, seal};
use weir_lease::{Geometry, Table};
use weir_share::Layout;
use weir_share::wire::{HELLO_BYTES, Hello, VERSION, WINDOWS_MAX, Welcome};
use weir_store::OpenError;
use weir_volume::{Lane, Volume};

use super::loans::Loans;
use super::session::{Desk, Session, Violation};
use super::stats::{Stats, add};
use crate::log::{Level, Log};

/// How soon a client that left no room, or a volume that had none, is looked at again.
const STALL: Duration = Duration::from_millis(1);
/// How long a client may take to say its first word.
const GREETING: Duration = Duration::from_secs(2);
/// How long nobody is let in after a client could not be for want of descriptors or memory.
const ADMIT_PAUSE: Duration = Duration::from_millis(100);
/// Requests that may wait for slow stores, over all clients.
const TICKETS: u32 = 256;
/// Rounds over the rings between two looks at the sockets.
const ROUNDS: u32 = 64;
/// Rounds without work between two offers of the CPU to others.
const YIELD: u32 = 4;
/// Descriptors of stores that a sleep listens to.
const STORES: usize = 8;

const LISTENER: u64 = u64::MAX;
const STOP: u64 = u64::MAX - 1;
/// Marks a client's doorbell; its socket has the plain number.
const BELL: u64 = 1 << 32;

/// How a volume is shared.
#[derive(Clone, Debug)]
pub struct Config {
    /// The unix socket, which only its owner can use (mode 0600); one that a dead server left is replaced.
    pub path: PathBuf,
    /// Clients at a time, at most 16384.
    pub clients: u32,
    /// Frames that a client may have, at most 4096: its quota.
    pub frames: u32,
    /// Entries of a client's rings, a power of two.
    pub entries: u32,
    /// How long the thread looks for the next request before it sleeps.
    pub spin: Duration,
    /// Pages that may be lent where the stores keep them, at a time and over all clients; 0: none. A client that asks for
    /// it gets the stores' memory to read, all of it. More than this are copied into frames. Takes the place of a lane for each
    /// [`lane_slots`](weir_volume::Config::lane_slots).
    pub in_place: u32,
    /// Clients may read only, as where the pages are a kernel's swap.
    pub read_only: bool,
}

impl Config {
    /// 64 clients with 1 MiB of frames each, at `path`.
    pub fn at(path: impl Into<PathBuf>) -> Self {
        Config {
            path: path.into(),
            clients: 64,
            frames: 256,
            entries: 256,
            spin: Duration::from_micros(50),
            in_place: 0,
            read_only: false,
        }
    }
}

/// Why a server cannot start.
#[derive(Debug, thiserror::Error)]
pub enum ServeError {
    /// A figure of the configuration is out of range.
    #[error(
        "{clients} clients with {frames} frames and {entries} entries cannot be served: use 1 to 16384, 1 to 4096, and a power of two up to 4096"
    )]
    Config {
        /// Clients.
        clients: u32,
        /// Frames.
        frames: u32,
        /// Entries.
        entries: u32,
    },
    /// The socket cannot be made.
    #[error("cannot listen on {}; is the directory there, and writable?", path.display())]
    Listen {
        /// Where.
        path: PathBuf,
        /// What the system said.
        #[source]
        source: io::Error,
    },
    /// The volume has no lane left, or cannot lend.
    #[error("the share server gets no lane of the volume")]
    Lane(#[source] OpenError),
    /// No thread, no descriptors.
    #[error("cannot start the share server's thread")]
    Resources(#[from] io::Error),
}

/// A running share server. Dropping it cuts every client off.
pub struct Server {
    stats: Arc<Stats>,
    stop: Arc<AtomicBool>,
    bell: OwnedFd,
    path: PathBuf,
    thread: Option<JoinHandle<()>>,
}

impl fmt::Debug for Server {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Server").field("path", &self.path).field("stats", &self.stats).finish_non_exhaustive()
    }
}

impl Server {
    /// Listens and serves from here on.
    ///
    /// # Errors
    /// [`ServeError`]; nothing is left listening then.
    pub fn start(volume: &Arc<Volume>, config: &Config, log: Log) -> Result<Server, ServeError> {
        let Config { clients, frames, entries, .. } = *config;
        let layout = Layout::new(frames, entries)
            .filter(|_| (1..=16384).contains(&clients))
            .ok_or(ServeError::Config { clients, frames, entries })?;
        let lane = volume.lane().map_err(ServeError::Lane)?;
        let listener = listen(&config.path)
            .map_err(|source| ServeError::Listen { path: config.path.clone(), source })?;
        let bell = rustix::event::eventfd(0, EventfdFlags::CLOEXEC | EventfdFlags::NONBLOCK)
            .map_err(io::Error::from)?;
        let (stats, stop) = (Arc::new(Stats::default()), Arc::new(AtomicBool::new(false)));
        let path = config.path.clone();
        let (lender, windows) = match config.in_place {
            0 => (None, Vec::new()),
            slots => {
                let (lender, windows) =
                    volume.lender(slots, WINDOWS_MAX as usize).map_err(ServeError::Lane)?;
                (Some(lender), windows)
            }
        };
        let (stores, windows) = windows.into_iter().unzip();
        let volume = (lane, Loans::new(clients * layout.frames(), lender, stores), windows);
        let mut porter = Porter::new(listener, &bell, volume, config, layout, Arc::clone(&stats), log)?;
        let stopped = Arc::clone(&stop);
        let thread =
            std::thread::Builder::new().name("weir-share".to_owned()).spawn(move || porter.run(&stopped))?;
        Ok(Server { stats, stop, bell, path, thread: Some(thread) })
    }

    /// Its counters.
    pub fn stats(&self) -> &Stats {
        &self.stats
    }

    /// Where it listens.
    pub fn path(&self) -> &Path {
        &self.path
    }
}

impl Drop for Server {
    fn drop(&mut self) {
        self.stop.store(true, Ordering::Release);
        let _ = rustix::io::write(&self.bell, &1u64.to_ne_bytes());
        if let Some(thread) = self.thread.take() {
            let _ = thread.join();
        }
        let _ = std::fs::remove_file(&self.path);
    }
}

fn listen(path: &Path) -> io::Result<OwnedFd> {
    use std::os::unix::fs::FileTypeExt;
    // A socket that a dead server left; anything else stays, and bind fails.
    if std::fs::symlink_metadata(path).is_ok_and(|found| found.file_type().is_socket()) {
        std::fs::remove_file(path)?;
    }
    let flags = SocketFlags::CLOEXEC | SocketFlags::NONBLOCK;
    let socket = rustix::net::socket_with(AddressFamily::UNIX, SocketType::SEQPACKET, flags, None)?;
    // Before it has a name: whoever may connect sees every page, so only its owner may.
    rustix::fs::fchmod(&socket, Mode::RUSR | Mode::WUSR)?;
    rustix::net::bind(&socket, &SocketAddrUnix::new(path)?)?;
    rustix::net::listen(&socket, 128)?;
    Ok(socket)
}

/// A place for one client.
enum Seat {
    Empty,
    /// Connected, and has not said hello yet.
    Greeting {
        socket: OwnedFd,
        since: Instant,
    },
    Taken {
        socket: OwnedFd,
        session: Box<Session>,
    },
}

/// All that the thread has.
struct Porter {
    listener: OwnedFd,
    epoll: OwnedFd,
    lane: Lane,
    desk: Desk,
    spin: Duration,
    layout: Layout,
    windows: Vec<OwnedFd>,
    seats: Vec<Seat>,
    /// Seats from here on are empty.
    used: usize,
    greetings: usize,
    /// Until when nobody is let in.
    paused: Option<Instant>,
    /// Whether the last client that came could not be let in.
    is_short: bool,
    sessions: u64,
    log: Log,
}

impl Porter {
    fn new(
        listener: OwnedFd,
        bell: &OwnedFd,
        (lane, loans, windows): (Lane, Loans, Vec<OwnedFd>),
        config: &Config,
        layout: Layout,
        stats: Arc<Stats>,
        log: Log,
    ) -> io::Result<Self> {
        let epoll = epoll::create(CreateFlags::CLOEXEC)?;
        epoll::add(&epoll, &listener, EventData::new_u64(LISTENER), EventFlags::IN)?;
        epoll::add(&epoll, bell, EventData::new_u64(STOP), EventFlags::IN)?;
        let geometry = Geometry {
            connections: config.clients,
            references: config.clients * layout.frames().next_multiple_of(64),
            quota: layout.frames(),
        };
        let tickets = TICKETS.min(lane.volume().config().depth as u32);
        let desk = Desk {
            table: Table::new(geometry, loans).map_err(io::Error::other)?,
            pending: vec![None; tickets as usize],
            free_tickets: (0..tickets).rev().collect(),
            scratch: Box::new([0; PAGE_SIZE]),
            pages: u64::from(lane.volume().pages()),
            read_only: config.read_only,
            stats,
        };
        let seats = (0..config.clients).map(|_| Seat::Empty).collect();
        let spin = config.spin;
        Ok(Porter {
            listener,
            epoll,
            lane,
            desk,
            spin,
            layout,
            windows,
            seats,
            used: 0,
            greetings: 0,
            paused: None,
            is_short: false,
            sessions: 0,
            log,
        })
    }

    fn run(&mut self, stop: &AtomicBool) {
        let mut last_work = Instant::now();
        let mut rounds = 0;
        while !stop.load(Ordering::Acquire) {
            if self.serve() {
                last_work = Instant::now();
            } else if rounds % YIELD == 0 {
                // The client may wait for this very CPU: the scheduler likes to wake it where its server runs.
                std::thread::yield_now();
            } else {
                std::hint::spin_loop();
            }
            rounds += 1;
            let idle = last_work.elapsed() >= self.spin;
            if idle && !self.lane.must_poll() {
                self.sleep();
                // Whoever rang is served before the next sleep; a spin begins with its request.
            }
            if idle || rounds >= ROUNDS {
                rounds = 0;
                self.look();
            }
        }
        for seat in 0..self.used {
            self.vacate(seat);
        }
    }

    /// One round over the rings and the stores. Whether there was anything to do.
    fn serve(&mut self) -> bool {
        // No allocation in here: letting clients in and out is another matter, and comes between rounds.
        let (worked, cut) = seal::on_io_thread(|| self.round());
        if let Some((seat, Violation(what))) = cut {
            add(&self.desk.stats.violations, 1);
            (self.log)(Level::Warning, format_args!("share: a client is cut off: {what}"));
            self.vacate(seat);
        }
        worked
    }

    /// Whether there was anything to do, and the last client that broke the format.
    fn round(&mut self) -> (bool, Option<(usize, Violation)>) {
        let (mut worked, mut cut) = (false, None);
        for seat in 0..self.used {
            let Seat::Taken { session, .. } = &mut self.seats[seat] else { continue };
            match session.serve(&mut self.lane, &mut self.desk) {
                Ok(requests) => worked |= requests > 0,
                Err(violation) => (worked, cut) = (true, Some((seat, violation))),
            }
        }
        if worked || self.lane.in_flight() > 0 {
            self.lane.submit();
        }
        if self.lane.in_flight() > 0 {
            worked |= self.complete();
        }
        (worked, cut)
    }

    /// Hands what slow stores have finished to its sessions.
    fn complete(&mut self) -> bool {
        let mut finished = false;
        let (desk, seats) = (&mut self.desk, &mut self.seats);
        self.lane.poll(&mut |done| {
            finished = true;
            let Some(waiting) = desk.pending[done.ticket as usize].take() else { return };
            desk.free_tickets.push(done.ticket);
            // A client that went away meanwhile took its frame with it.
            if let Seat::Taken { session, .. } = &mut seats[waiting.seat]
                && session.number == waiting.session
            {
                session.finish(desk, waiting, done.result.is_ok(), done.page);
            }
        });
        finished
    }

    /// Sleeps until a client rings, a socket or a store has something, or a greeting is overdue.
    fn sleep(&mut self) {
        let sessions = || {
            self.seats[..self.used].iter().filter_map(|seat| match seat {
                Seat::Taken { session, .. } => Some(session),
                _ => None,
            })
        };
        sessions().for_each(|session| session.set_asleep(true));
        // A client rings if it finds the flag after it has submitted: one of the two sees the other.
        fence(Ordering::SeqCst);
        if !sessions().any(|session| session.has_work() && !session.is_stalled()) {
            let stalled = sessions().any(|session| session.has_work()).then_some(STALL);
            let greeting = (self.greetings > 0).then_some(GREETING);
            let pause = self.paused.map(|until| until.saturating_duration_since(Instant::now()));
            add(&self.desk.stats.sleeps, 1);
            let mut stores = self.lane.wake_fds();
            let fds: [BorrowedFd<'_>; 1 + STORES] = std::array::from_fn(|at| {
                if at == 0 { None } else { stores.next() }.unwrap_or(self.epoll.as_fd())
            });
            let mut fds = fds.map(|fd| PollFd::from_borrowed_fd(fd, PollFlags::IN));
            let wait = [stalled, greeting, pause]
                .into_iter()
                .flatten()
                .min()
                .map(|wait| Timespec { tv_sec: wait.as_secs() as i64, tv_nsec: wait.subsec_nanos().into() });
            // Whatever the outcome, the rings and sockets are looked at next.
            let _ = rustix::event::poll(&mut fds, wait.as_ref());
        }
        sessions().for_each(|session| session.set_asleep(false));
    }

    /// Sees to the sockets and doorbells that have something.
    fn look(&mut self) {
        let mut events = [MaybeUninit::<Event>::uninit(); 64];
        let now = Timespec { tv_sec: 0, tv_nsec: 0 };
        let Ok((events, _)) = epoll::wait(&self.epoll, &mut events, Some(&now)) else { return };
        for event in events.iter() {
            match event.data.u64() {
                LISTENER => self.admit(),
                STOP => {}
                bell if bell & BELL != 0 => {
                    if let Some(Seat::Taken { session, .. }) = self.seats.get((bell & !BELL) as usize) {
                        let _ = rustix::io::read(&session.server_bell, &mut [0; 8]);
                    }
                }
                seat => self.hear(seat as usize),
            }
        }
        if self.paused.is_some_and(|until| Instant::now() >= until) {
            self.paused = None;
            self.listen_for(EventFlags::IN);
        }
        if self.greetings > 0 {
            for seat in 0..self.used {
                if matches!(&self.seats[seat], Seat::Greeting { since, .. } if since.elapsed() >= GREETING) {
                    self.vacate(seat);
                }
            }
        }
    }

    /// Accepts whoever waits at the door, as far as there are seats.
    fn admit(&mut self) {
        loop {
            let flags = SocketFlags::CLOEXEC | SocketFlags::NONBLOCK;
            let socket = match rustix::net::accept_with(&self.listener, flags) {
                Ok(socket) => socket,
                Err(Errno::INTR | Errno::CONNABORTED) => continue,
                Err(Errno::AGAIN) => return,
                Err(errno) => {
                    // Out of descriptors or memory: whoever waits stays at the door, and this would spin.
                    if !std::mem::replace(&mut self.is_short, true) {
                        let next = "raise the limit of open files";
                        (self.log)(
                            Level::Warning,
                            format_args!("share: cannot let a client in yet: {errno}; {next}"),
                        );
                    }
                    self.listen_for(EventFlags::empty());
                    self.paused = Some(Instant::now() + ADMIT_PAUSE);
                    return;
                }
            };
            self.is_short = false;
            let Some(seat) = self.seats.iter().position(|seat| matches!(seat, Seat::Empty)) else {
                self.turn_away(&socket, Errno::USERS);
                continue;
            };
            let interest = EventFlags::IN | EventFlags::RDHUP;
            if epoll::add(&self.epoll, &socket, EventData::new_u64(seat as u64), interest).is_ok() {
                self.seats[seat] = Seat::Greeting { socket, since: Instant::now() };
                self.used = self.used.max(seat + 1);
                self.greetings += 1;
            }
        }
    }

    fn listen_for(&self, events: EventFlags) {
        // It was added at the start and is open: there is nothing that could fail.
        let _ = epoll::modify(&self.epoll, &self.listener, EventData::new_u64(LISTENER), events);
    }

    /// A client's socket has something: its greeting, or its end.
    fn hear(&mut self, seat: usize) {
        match self.seats.get(seat) {
            Some(Seat::Greeting { .. }) => {}
            // After the greeting a client says nothing more: it has gone, or it breaks the format.
            Some(Seat::Taken { .. }) => return self.vacate(seat),
            _ => return,
        }
        let Seat::Greeting { socket, since } = std::mem::replace(&mut self.seats[seat], Seat::Empty) else {
            return;
        };
        let mut bytes = [0; HELLO_BYTES + 1];
        match weir_share::receive(&socket, &mut bytes) {
            Err(error) if error.kind() == io::ErrorKind::WouldBlock => {
                self.seats[seat] = Seat::Greeting { socket, since };
            }
            Ok((count, _)) if count > 0 => {
                self.greetings -= 1;
                self.welcome(seat, socket, Hello::decode(&bytes[..count]));
            }
            _ => {
                self.greetings -= 1;
                self.forget(&socket);
            }
        }
    }

    /// No more events of a socket that is about to be closed. Closing alone does not see to that while a child that this process is
    /// just starting has the descriptor too, and the next client in the seat would be taken for the one that has gone.
    fn forget(&self, socket: &OwnedFd) {
        let _ = epoll::delete(&self.epoll, socket);
    }

    /// Answers a greeting, and gives the client what it needs.
    fn welcome(&mut self, seat: usize, socket: OwnedFd, hello: Option<Hello>) {
        let hello = match hello {
            Some(hello) if hello.version == VERSION => hello,
            Some(_) => return self.turn_away(&socket, Errno::PROTONOSUPPORT),
            None => return self.turn_away(&socket, Errno::PROTO),
        };
        let (frames, entries) =
            (hello.frames.min(self.layout.frames()), hello.entries.min(self.layout.entries()));
        let Some(layout) = Layout::new(frames, entries) else { return self.turn_away(&socket, Errno::INVAL) };
        let Ok(connection) = self.desk.table.open(frames) else {
            return self.turn_away(&socket, Errno::USERS);
        };
        self.sessions += 1;
        let base = seat as u32 * self.layout.frames();
        let in_place = hello.in_place && !self.windows.is_empty();
        let session = match Session::new(self.sessions, seat, base, in_place, layout, connection) {
            Ok(session) => session,
            Err((connection, error)) => {
                self.desk.table.close(connection, |_, _| {});
                (self.log)(Level::Warning, format_args!("share: no memory for a client's area: {error}"));
                return self.turn_away(&socket, Errno::NOMEM);
            }
        };
        if let Err(error) = self.let_in(seat, &socket, &session) {
            // Gone already, or out of descriptors: either way nobody is there to tell.
            (self.log)(Level::Info, format_args!("share: a client left at the door: {error}"));
            self.forget(&socket);
            let connection = session.leave();
            self.desk.table.close(connection, |_, _| {});
            return;
        }
        add(&self.desk.stats.sessions, 1);
        self.seats[seat] = Seat::Taken { socket, session: Box::new(session) };
    }

    fn let_in(&self, seat: usize, socket: &OwnedFd, session: &Session) -> io::Result<()> {
        let layout = session.area().layout();
        let welcome = Welcome {
            version: VERSION,
            status: 0,
            frames: layout.frames(),
            entries: layout.entries(),
            pages: self.desk.pages,
            windows: if session.in_place() { self.windows.len() as u32 } else { 0 },
        };
        let area = session.area().fd().ok_or(io::ErrorKind::Unsupported)?;
        epoll::add(
            &self.epoll,
            &session.server_bell,
            EventData::new_u64(BELL | seat as u64),
            EventFlags::IN,
        )?;
        let mut fds = [area; 3 + WINDOWS_MAX as usize];
        (fds[1], fds[2]) = (session.server_bell.as_fd(), session.client_bell.as_fd());
        for (fd, window) in fds[3..].iter_mut().zip(&self.windows) {
            *fd = window.as_fd();
        }
        weir_share::send(socket, &welcome.encode(), &fds[..3 + welcome.windows as usize])
    }

    fn turn_away(&self, socket: &OwnedFd, reason: Errno) {
        add(&self.desk.stats.turned_away, 1);
        self.forget(socket);
        let welcome = Welcome {
            version: VERSION,
            status: -reason.raw_os_error(),
            frames: 0,
            entries: 0,
            pages: 0,
            windows: 0,
        };
        // If it cannot be sent, the client sees the socket close instead.
        let _ = weir_share::send(socket, &welcome.encode(), &[]);
    }

    /// Takes back all that whoever sits there had.
    fn vacate(&mut self, seat: usize) {
        match std::mem::replace(&mut self.seats[seat], Seat::Empty) {
            Seat::Empty => {}
            Seat::Greeting { socket, .. } => {
                self.greetings -= 1;
                self.forget(&socket);
            }
            Seat::Taken { session, socket } => {
                self.forget(&socket);
                // The client holds the bell, too, so closing it here would not take it out of the epoll.
                let _ = epoll::delete(&self.epoll, &session.server_bell);
                drop(socket);
                session.close(&mut self.desk);
            }
        }
    }
}
