//! The server's thread: accepts clients, serves their rings, and notices when they go.
//!
//! Nothing that a client shares may stop the server. The server never reads a client's bell,
//! because epoll reports each time that the client rings it. To wake a client, the server uses a
//! socket pair of which the client has the other end. Another thread closes sockets: closing drops
//! the client's unread messages, which may contain descriptors. A client can make the closing of
//! such descriptors very slow.

use std::fmt;
use std::io;
use std::mem::MaybeUninit;
use std::os::fd::{AsFd, OwnedFd};
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering, fence};
use std::sync::mpsc::{self, Sender};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use rustix::event::epoll::{self, CreateFlags, Event, EventData, EventFlags};
use rustix::event::{EventfdFlags, Timespec};
use rustix::io::Errno;
use rustix::net::{Shutdown, SocketFlags, SocketType};
use weir_core::Rest;
use weir_core::{PAGE_SIZE, seal};
use weir_lease::{Geometry, Table};
use weir_request::Requests;
use weir_share::wire::{HELLO_BYTES, Hello, NAME_BYTES_MAX, RUN_MAX, VERSION, WINDOWS_MAX, Welcome};
use weir_share::{Layout, Offers, Turns, first_turns, short_turns};
use weir_store::OpenError;
use weir_volume::{Lane, Pool, Volume};

use super::loans::Loans;
use super::session::{Asked, Desk, Frames, Session, Violation};
use super::stats::{Stats, add};
use weir_core::log::{Level, Log, Throttle};
use weir_system::local_socket::{self, BindError, SocketFile};

/// Pause before the next look at a client whose ring was full, or at a volume that had no room.
const STALL: Duration = Duration::from_millis(1);
/// Time that a client may take for its greeting.
const GREETING: Duration = Duration::from_secs(2);
/// Pause before the next client is accepted, after the system had no descriptors or memory left.
const ADMIT_PAUSE: Duration = Duration::from_millis(100);
/// Largest number of requests of all clients that may wait for slow stores.
const REQUESTS: u16 = 256;
/// Number of rounds over the rings between two looks at the sockets.
const ROUNDS: u32 = 64;
/// Number of rounds without work between two offers of the CPU to other threads.
const YIELD: u32 = 4;
/// Time that the server waits for its thread at the end. A thread that a store holds up for longer
/// is left behind.
const END: Duration = Duration::from_secs(5);

const LISTENER: u64 = u64::MAX;
const STOP: u64 = u64::MAX - 1;
/// Marks an event of a client's bell. An event of a client's socket has the plain number of the
/// seat.
const BELL: u64 = 1 << 32;

/// The settings of a share server.
#[derive(Clone, Debug)]
pub struct Config {
    /// The path of the unix socket, which only its owner can use (mode 0600). A socket that a dead
    /// server left is replaced.
    pub path: PathBuf,
    /// Largest number of clients at a time; at most 16384.
    pub clients: u32,
    /// Largest number of frames that a client may have: its quota; at most 4096.
    pub frames: u32,
    /// Number of entries in a client's rings, a power of two.
    pub entries: u32,
    /// Time that the thread spins for the next request before it sleeps.
    pub spin: Duration,
    /// Largest number of pages that all clients together may be lent in place, in the stores'
    /// memory, at a time; 0: none. A client that asks for pages in place can read all of the
    /// stores' memory. Further pages are copied into frames. The lender takes this many slots of
    /// the volume's [slack](weir_volume::Config::slack).
    pub in_place: u32,
    /// Whether clients may only read, as when the pages are a kernel's swap.
    pub read_only: bool,
    /// Whether the clients are pagers, whose threads have a [higher priority](first_turns). Then
    /// the server's thread has it too: threads that wait for another one must not outrank it.
    pub serves_pagers: bool,
}

impl Config {
    /// The settings for 64 clients with 1 MiB of frames each, at `path`.
    pub fn at(path: impl Into<PathBuf>) -> Self {
        Config {
            path: path.into(),
            clients: 64,
            frames: 256,
            entries: 256,
            spin: Duration::from_micros(50),
            in_place: 0,
            read_only: false,
            serves_pagers: false,
        }
    }
}

/// The reason why a server cannot start.
#[derive(Debug, thiserror::Error)]
pub enum ServeError {
    /// A figure of the configuration is out of range.
    #[error(
        "{clients} clients with {frames} frames and {entries} entries cannot be served: use 1 to 16384, 1 to 4096, and a power of two up to 4096"
    )]
    Config {
        /// The number of clients that the configuration asks for.
        clients: u32,
        /// The number of frames for each client that the configuration asks for.
        frames: u32,
        /// The number of entries in each ring that the configuration asks for.
        entries: u32,
    },
    /// The socket cannot be made.
    #[error(transparent)]
    Listen(#[from] BindError),
    /// The volume has no free lane, or cannot lend.
    #[error(transparent)]
    Lane(#[from] OpenError),
    /// The system has no thread or no descriptors left.
    #[error("cannot start the share server's thread")]
    Resources(#[from] io::Error),
}

/// Finds the volume that a client asks for by its name, and keeps it as long as the client has it.
/// The empty name is the name of the daemon's own volume.
pub type Find = Box<dyn Fn(&[u8]) -> Option<Arc<Volume>> + Send>;

/// A running share server. Dropping it disconnects every client.
pub struct Server {
    stats: Arc<Stats>,
    stop: Arc<AtomicBool>,
    bell: OwnedFd,
    socket: SocketFile,
    thread: Option<JoinHandle<()>>,
    log: Log,
}

impl fmt::Debug for Server {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Server")
            .field("socket", &self.socket)
            .field("stats", &self.stats)
            .finish_non_exhaustive()
    }
}

impl Server {
    /// Starts a server of one volume, which has no name. It listens and serves from here on.
    ///
    /// # Errors
    /// Fails with a [`ServeError`]; nothing is left listening then.
    pub fn start(volume: &Arc<Volume>, config: &Config, log: Log) -> Result<Server, ServeError> {
        let its = Arc::clone(volume);
        let find = move |name: &[u8]| name.is_empty().then(|| Arc::clone(&its));
        Self::start_all(volume.pool(), Box::new(find), config, log)
    }

    /// Starts a server of the volumes of a pool that `find` knows.
    ///
    /// # Errors
    /// Fails as [`start`](Server::start) does.
    pub fn start_all(pool: &Arc<Pool>, find: Find, config: &Config, log: Log) -> Result<Server, ServeError> {
        let Config { clients, frames, entries, .. } = *config;
        let layout = Layout::new(frames, entries)
            .filter(|_| (1..=16384).contains(&clients))
            .ok_or(ServeError::Config { clients, frames, entries })?;
        let lane = pool.lane_of_all()?;
        let (listener, socket) = local_socket::listen(&config.path, SocketType::SEQPACKET)?;
        let bell = rustix::event::eventfd(0, EventfdFlags::CLOEXEC | EventfdFlags::NONBLOCK)
            .map_err(io::Error::from)?;
        let (stats, stop) = (Arc::new(Stats::default()), Arc::new(AtomicBool::new(false)));
        let (lender, windows) = match config.in_place {
            0 => (None, Vec::new()),
            slots => {
                let (lender, windows) = pool.lender(slots, WINDOWS_MAX as usize)?;
                (Some(lender), windows)
            }
        };
        let (stores, windows) = windows.into_iter().unzip();
        let volumes = (find, lane, Loans::new(clients * layout.frames(), lender, stores), windows);
        let (counted, stopped) = (Arc::clone(&stats), Arc::clone(&stop));
        let porter = Porter::new(listener, &bell, volumes, config, layout, counted, Arc::clone(&log))?;
        let thread =
            std::thread::Builder::new().name("weir-share".to_owned()).spawn(move || porter.run(&stopped))?;
        Ok(Server { stats, stop, bell, socket, thread: Some(thread), log })
    }

    /// The server's counters.
    pub fn stats(&self) -> &Stats {
        &self.stats
    }

    /// The path of the server's socket.
    pub fn path(&self) -> &Path {
        self.socket.path()
    }
}

impl Drop for Server {
    fn drop(&mut self) {
        self.stop.store(true, Ordering::Release);
        let _ = rustix::io::write(&self.bell, &1u64.to_ne_bytes());
        let Some(thread) = self.thread.take() else { return };
        let begun = Instant::now();
        while !thread.is_finished() && begun.elapsed() < END {
            std::thread::sleep(Duration::from_millis(1));
        }
        if thread.is_finished() {
            let _ = thread.join();
        } else {
            (self.log)(
                Level::Warning,
                format_args!(
                    "share: its thread has not ended within {END:?} and is left behind: does a store hang?"
                ),
            );
        }
    }
}

/// A seat: the server's place for one client.
enum Seat {
    Empty,
    /// The client is connected, and has not sent its greeting yet.
    Greeting {
        socket: OwnedFd,
        since: Instant,
    },
    Taken {
        socket: OwnedFd,
        session: Box<Session>,
    },
}

/// The state of the server's thread.
struct Porter {
    listener: OwnedFd,
    epoll: OwnedFd,
    find: Find,
    requests: Requests<Lane>,
    desk: Desk,
    spin: Duration,
    serves_pagers: bool,
    layout: Layout,
    windows: Vec<OwnedFd>,
    seats: Vec<Seat>,
    /// Seats from this index on are empty.
    used: usize,
    greetings: usize,
    /// The time until which no client is accepted.
    paused: Option<Instant>,
    sessions: u64,
    /// The channel to the thread that closes sockets to which clients may have sent descriptors.
    closer: Sender<OwnedFd>,
    log: Throttle,
    /// Limits the log lines that say that no client can be accepted: the server tries again ten
    /// times a second.
    shortage: Throttle,
}

impl Porter {
    fn new(
        listener: OwnedFd,
        bell: &OwnedFd,
        (find, lane, loans, windows): (Find, Lane, Loans, Vec<OwnedFd>),
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
        let requests_most = REQUESTS.min(lane.volume().config().depth as u16);
        let desk = Desk {
            table: Table::new(geometry, loans).map_err(io::Error::other)?,
            asked: vec![Asked::default(); requests_most.into()],
            idle: (0..requests_most).rev().collect(),
            scratch: Box::new([[0; PAGE_SIZE]; RUN_MAX as usize]),
            left: Vec::new(),
            read_only: config.read_only,
            stats,
        };
        let (closer, to_close) = mpsc::channel::<OwnedFd>();
        // Nobody joins this thread: it ends when the channel closes.
        let close = move || to_close.into_iter().for_each(drop);
        std::thread::Builder::new().name("weir-share-close".to_owned()).spawn(close)?;
        let seats = (0..config.clients).map(|_| Seat::Empty).collect();
        let spin = config.spin;
        Ok(Porter {
            listener,
            epoll,
            find,
            requests: Requests::new(lane, requests_most),
            desk,
            spin,
            serves_pagers: config.serves_pagers,
            layout,
            windows,
            seats,
            used: 0,
            greetings: 0,
            paused: None,
            sessions: 0,
            closer,
            shortage: Throttle::condition(Arc::clone(&log), "share"),
            log: Throttle::new(log, "share"),
        })
    }

    fn run(mut self, stop: &AtomicBool) {
        let (mut last_work, mut rest, mut offers) = (Instant::now(), Rest::default(), Offers::default());
        // A thread that does not spin makes no offers, and so does not learn of other threads.
        let learns = !self.serves_pagers && !self.spin.is_zero();
        let turns = Turns::of_this_thread();
        if self.serves_pagers {
            first_turns();
        } else if !learns {
            short_turns();
        }
        let (mut rounds, mut was_crowded) = (0, false);
        while !stop.load(Ordering::Acquire) {
            if self.serve() {
                last_work = Instant::now();
                rest.end();
            } else if rounds % YIELD == 0 {
                // A client may be waiting for this very CPU, so let it run. The scheduler likes to
                // wake a client on its server's CPU.
                offers.offer();
            } else {
                std::hint::spin_loop();
            }
            rounds += 1;
            let is_crowded = offers.is_crowded();
            if is_crowded != was_crowded && learns {
                // Short turns let this thread run soon after a client woke it. Without other
                // threads they only interrupt this thread and a client on the same processor.
                if is_crowded {
                    short_turns();
                } else {
                    turns.restore();
                }
                was_crowded = is_crowded;
            }
            let idle = last_work.elapsed() >= self.spin || is_crowded;
            if idle && !self.requests.must_poll() {
                self.sleep();
                // A client that rang is served before the next sleep, and its request begins a new
                // spin.
            } else if idle {
                rest.until_next();
            }
            if idle || rounds >= ROUNDS {
                rounds = 0;
                self.look();
            }
        }
        for seat in 0..self.used {
            self.vacate(seat);
        }
        // The listening socket may hold clients that were not accepted, so the closing thread
        // closes it.
        let Porter { listener, closer, .. } = self;
        let _ = closer.send(listener);
    }

    /// Runs one round over the rings and the stores. Returns whether there was anything to do.
    fn serve(&mut self) -> bool {
        // A round must not allocate. Clients are accepted and removed between rounds, since that
        // may allocate.
        let (worked, cut) = seal::on_io_thread(|| self.round());
        if let Some((seat, Violation(what))) = cut {
            add(&self.desk.stats.violations, 1);
            self.log.line(Level::Warning, format_args!("a client is cut off: {what}"));
            self.vacate(seat);
        }
        worked
    }

    /// Runs one round. Returns whether there was anything to do, and the last client that violated
    /// the format.
    fn round(&mut self) -> (bool, Option<(usize, Violation)>) {
        let (mut worked, mut cut) = (false, None);
        for seat in 0..self.used {
            let Seat::Taken { session, .. } = &mut self.seats[seat] else { continue };
            match session.serve(&mut self.requests, &mut self.desk) {
                Ok(requests) => worked |= requests > 0,
                Err(violation) => (worked, cut) = (true, Some((seat, violation))),
            }
        }
        if worked || self.requests.is_busy() {
            self.requests.submit();
        }
        if self.requests.is_busy() {
            worked |= self.complete();
        }
        // Tell the clients of their completions only after the lane's pin has ended. So no writer
        // of the volume waits for the pin while this thread does so.
        if worked {
            for seat in &mut self.seats[..self.used] {
                if let Seat::Taken { socket, session } = seat {
                    session.publish(socket);
                }
            }
        }
        (worked, cut)
    }

    /// Hands completions of slow stores to their sessions.
    fn complete(&mut self) -> bool {
        let Porter { requests, desk, seats, .. } = self;
        let area = |asked: &Asked| match &seats[asked.seat] {
            // The client has gone meanwhile, and its frames with it.
            Seat::Taken { session, .. } if session.number == asked.session => Some(session.area()),
            _ => None,
        };
        let Desk { asked, scratch, .. } = desk;
        requests.turn(Instant::now(), &mut Frames { area: &area, asked, scratch });
        let mut finished = false;
        while let Some(answer) = requests.finished() {
            finished = true;
            let asked = desk.asked[usize::from(answer.id)];
            match &mut seats[asked.seat] {
                Seat::Taken { session, .. } if session.number == asked.session => {
                    session.finish(desk, &answer);
                }
                _ => desk.end_of_left(answer.id),
            }
        }
        finished
    }

    /// Sleeps until a client rings, a socket or a store has an event, or a greeting is overdue.
    fn sleep(&mut self) {
        let sessions = || {
            self.seats[..self.used].iter().filter_map(|seat| match seat {
                Seat::Taken { session, .. } => Some(session),
                _ => None,
            })
        };
        sessions().for_each(|session| session.set_asleep(true));
        // This thread has set the flag which says that it sleeps, and now looks for submissions. A
        // client first submits, and then reads that flag. So either the client sees the flag and
        // rings, or this thread sees the submission.
        fence(Ordering::SeqCst);
        if !sessions().any(|session| session.has_work() && !session.is_stalled()) {
            let stalled = sessions().any(|session| session.has_work()).then_some(STALL);
            let greeting = (self.greetings > 0).then_some(GREETING);
            let pause = self.paused.map(|until| until.saturating_duration_since(Instant::now()));
            add(&self.desk.stats.sleeps, 1);
            let wait = [stalled, greeting, pause].into_iter().flatten().min();
            // Ignore an error: the thread looks at the rings and sockets next in any case.
            let _ = self.requests.sleep(Some(self.epoll.as_fd()), wait);
        }
        sessions().for_each(|session| session.set_asleep(false));
    }

    /// Handles the events of sockets and bells.
    fn look(&mut self) {
        let mut events = [MaybeUninit::<Event>::uninit(); 64];
        let now = Timespec { tv_sec: 0, tv_nsec: 0 };
        let Ok((events, _)) = epoll::wait(&self.epoll, &mut events, Some(&now)) else { return };
        for event in events.iter() {
            match event.data.u64() {
                LISTENER => self.admit(),
                STOP => {}
                // epoll reports one event each time that a client rings its bell. So do not read
                // the bell: the read could block, since the client can change the bell's flags too.
                bell if bell & BELL != 0 => {}
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

    /// Accepts waiting clients, as long as there are seats.
    fn admit(&mut self) {
        loop {
            let flags = SocketFlags::CLOEXEC | SocketFlags::NONBLOCK;
            let socket = match rustix::net::accept_with(&self.listener, flags) {
                Ok(socket) => socket,
                Err(Errno::INTR | Errno::CONNABORTED) => continue,
                Err(Errno::AGAIN) => return,
                Err(errno) => {
                    // The process is out of descriptors or memory. The clients stay in the socket's
                    // queue, so without a pause this thread would spin.
                    self.shortage.line(
                        Level::Warning,
                        format_args!("cannot let a client in yet: {errno}; raise the limit of open files"),
                    );
                    self.listen_for(EventFlags::empty());
                    self.paused = Some(Instant::now() + ADMIT_PAUSE);
                    return;
                }
            };
            let Some(seat) = self.seats.iter().position(|seat| matches!(seat, Seat::Empty)) else {
                self.turn_away(socket, Errno::USERS);
                continue;
            };
            let interest = EventFlags::IN | EventFlags::RDHUP;
            if epoll::add(&self.epoll, &socket, EventData::new_u64(seat as u64), interest).is_err() {
                self.turn_away(socket, Errno::NOMEM);
                continue;
            }
            self.seats[seat] = Seat::Greeting { socket, since: Instant::now() };
            self.used = self.used.max(seat + 1);
            self.greetings += 1;
        }
    }

    fn listen_for(&self, events: EventFlags) {
        // The listener was added at the start and is open, so this cannot fail.
        let _ = epoll::modify(&self.epoll, &self.listener, EventData::new_u64(LISTENER), events);
    }

    /// Handles an event of a client's socket: its greeting, or its end.
    fn hear(&mut self, seat: usize) {
        match self.seats.get(seat) {
            Some(Seat::Greeting { .. }) => {}
            // After the greeting only the end of the connection is awaited.
            Some(Seat::Taken { .. }) => return self.vacate(seat),
            _ => return,
        }
        let Seat::Greeting { socket, since } = std::mem::replace(&mut self.seats[seat], Seat::Empty) else {
            return;
        };
        let mut bytes = [0; HELLO_BYTES + NAME_BYTES_MAX + 1];
        match weir_share::peek(&socket, &mut bytes) {
            Err(error) if error.kind() == io::ErrorKind::WouldBlock => {
                self.seats[seat] = Seat::Greeting { socket, since };
            }
            Ok(count) if count > 0 => {
                self.greetings -= 1;
                self.welcome(seat, socket, Hello::decode(&bytes[..count]));
            }
            _ => {
                self.greetings -= 1;
                self.hang_up(socket);
            }
        }
    }

    /// Shuts a client's socket down, which the client notices, and gives the socket to the thread
    /// that closes it. Also stops the socket's events. Closing alone does not stop them while
    /// another process has the descriptor. Those events would then count for the next client in the
    /// seat.
    fn hang_up(&self, socket: OwnedFd) {
        let _ = epoll::delete(&self.epoll, &socket);
        let _ = rustix::net::shutdown(&socket, Shutdown::Both);
        // The send cannot fail: the thread that closes sockets lives as long as this one.
        let _ = self.closer.send(socket);
    }

    /// Answers a client's greeting. Sends the descriptors of the client's area, of its bell and of
    /// the windows, or refuses the client.
    fn welcome(&mut self, seat: usize, socket: OwnedFd, hello: Option<Hello<'_>>) {
        let hello = match hello {
            Some(hello) if hello.version == VERSION => hello,
            Some(_) => return self.turn_away(socket, Errno::PROTONOSUPPORT),
            None => return self.turn_away(socket, Errno::PROTO),
        };
        let (frames, entries) =
            (hello.frames.min(self.layout.frames()), hello.entries.min(self.layout.entries()));
        let Some(layout) = Layout::new(frames, entries) else { return self.turn_away(socket, Errno::INVAL) };
        let Some(volume) = (self.find)(hello.volume) else { return self.turn_away(socket, Errno::NOENT) };
        let Ok(connection) = self.desk.table.open(frames) else {
            return self.turn_away(socket, Errno::USERS);
        };
        self.sessions += 1;
        let base = seat as u32 * self.layout.frames();
        let in_place = hello.in_place && !self.windows.is_empty();
        let session = match Session::new(self.sessions, seat, base, in_place, layout, volume, connection) {
            Ok(session) => session,
            Err((connection, error)) => {
                self.desk.table.close(connection, |_, _| {});
                self.log.line(Level::Warning, format_args!("no memory for a client's area: {error}"));
                return self.turn_away(socket, Errno::NOMEM);
            }
        };
        if let Err(error) = self.let_in(seat, &socket, &session) {
            // The client has gone already, or the system is out of descriptors. In neither case can
            // a client be told.
            self.log.line(Level::Info, format_args!("a client left at the door: {error}"));
            self.hang_up(socket);
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
            pages: session.pages(),
            windows: if session.in_place() { self.windows.len() as u32 } else { 0 },
            run_most: RUN_MAX,
        };
        let area = session.area().fd().ok_or(io::ErrorKind::Unsupported)?;
        let bell = EventData::new_u64(BELL | seat as u64);
        epoll::add(&self.epoll, &session.server_bell, bell, EventFlags::IN | EventFlags::ET)?;
        // The client's messages on the socket are not read any more, so wait only for its end.
        epoll::modify(&self.epoll, socket, EventData::new_u64(seat as u64), EventFlags::RDHUP)?;
        let mut fds = [area; 2 + WINDOWS_MAX as usize];
        fds[1] = session.server_bell.as_fd();
        for (fd, window) in fds[2..].iter_mut().zip(&self.windows) {
            *fd = window.as_fd();
        }
        weir_share::send(socket, &welcome.encode(), &fds[..2 + welcome.windows as usize])
    }

    fn turn_away(&self, socket: OwnedFd, reason: Errno) {
        add(&self.desk.stats.turned_away, 1);
        let welcome = Welcome {
            version: VERSION,
            status: -reason.raw_os_error(),
            frames: 0,
            entries: 0,
            pages: 0,
            windows: 0,
            run_most: 0,
        };
        // If the welcome cannot be sent, the client sees the socket close instead.
        let _ = weir_share::send(&socket, &welcome.encode(), &[]);
        self.hang_up(socket);
    }

    /// Empties a seat, and takes back all that its client had.
    fn vacate(&mut self, seat: usize) {
        match std::mem::replace(&mut self.seats[seat], Seat::Empty) {
            Seat::Empty => {}
            Seat::Greeting { socket, .. } => {
                self.greetings -= 1;
                self.hang_up(socket);
            }
            Seat::Taken { session, socket } => {
                // The client holds the bell too. So closing the server's descriptor of it would not
                // take it out of the epoll set.
                let _ = epoll::delete(&self.epoll, &session.server_bell);
                // Forsake the client's requests: a slow store may finish them after other clients
                // have written the same pages.
                let asked = &self.desk.asked;
                self.requests.forsake(|id| asked[usize::from(id)].session == session.number);
                session.close(&mut self.desk);
                while let Some(answer) = self.requests.finished() {
                    self.desk.end_of_left(answer.id);
                }
                // Hang up last, when no request of the client is under way. The client may have
                // sent descriptors with its greeting, which close with the socket. Other processes
                // may take their closing as the end of all requests of the client.
                self.hang_up(socket);
            }
        }
    }
}
