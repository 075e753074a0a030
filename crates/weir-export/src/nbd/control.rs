//! The thread that accepts connections and negotiates with all of them at once, without ever
//! waiting for one.
//!
//! Unknown clients can make the thread hold only a bounded amount: [`PENDING_MAX`] connections of
//! fixed size, for [`PATIENCE`] each. When one more connection comes, the oldest is dropped. A real
//! client negotiates within milliseconds, so a flood of idle connections only drops its own.

use super::exports::Exports;
use super::handshake::{self, Handshake, INPUT_MAX, OUTPUT_MAX, Step, Tls};
use super::listen::{Listen, Listener};
use super::seat::Seats;
use super::tls;
use rustix::event::epoll::{self, EventData, EventFlags};
use rustix::event::{EventfdFlags, Timespec};
use rustix::net::{RecvFlags, SendFlags};
use std::fmt;
use std::io;
use std::os::fd::{AsFd, OwnedFd};
use std::sync::Arc;
use std::time::{Duration, Instant};
use weir_core::log::{Level, Log, Throttle};

/// Largest number of connections that negotiate at once.
pub const PENDING_MAX: usize = 64;
/// Longest time that a negotiation may take.
pub const PATIENCE: Duration = Duration::from_secs(10);
/// Number of connections that are accepted in a row. After that the thread looks at the negotiating
/// ones again.
const ACCEPT_BURST: usize = 16;
/// Pause before new connections are accepted again, when the process has no descriptors left.
const ACCEPT_PAUSE: Duration = Duration::from_millis(100);
/// Bytes of unread replies that the system is asked to hold for a connection; the system doubles
/// the number for its own overhead. One piece of a long read fits: while the client copies a piece,
/// the next one is verified. With 64 KiB, client and server wake each other twice as often.
const SEND_BUFFER_BYTES: usize = 512 << 10;

const WAKE: u64 = u64::MAX;
const LISTENER: u64 = 1 << 32;

/// The bell that tells the control thread to stop.
#[derive(Debug)]
pub(super) struct Bell(OwnedFd);

impl Bell {
    pub fn new() -> io::Result<Bell> {
        Ok(Bell(rustix::event::eventfd(0, EventfdFlags::CLOEXEC | EventfdFlags::NONBLOCK)?))
    }

    /// Rings the bell, so that the control thread leaves.
    pub fn ring(&self) {
        // The write fails only if the bell's counter is full, after 2^64 rings.
        let _ = rustix::io::write(&self.0, &1u64.to_ne_bytes());
    }
}

/// A connection that negotiates.
struct Pending<'e, E: Exports> {
    socket: OwnedFd,
    handshake: Handshake<'e, E>,
    listener: usize,
    since: Instant,
    /// Bytes received and not yet consumed.
    input: usize,
    /// Bytes of the output that were sent.
    sent: usize,
    /// The next step once the output is sent.
    then: Option<Step>,
}

/// The memory of one negotiation: its state, and its buffers.
struct Negotiation<'e, E: Exports> {
    pending: Option<Pending<'e, E>>,
    input: Box<[u8]>,
    output: Vec<u8>,
}

pub(super) struct Control<'e, E: Exports> {
    epoll: OwnedFd,
    listeners: &'e [Listener],
    exports: &'e E,
    seats: &'e Seats<E::Device>,
    send_patience: Duration,
    negotiations: Vec<Negotiation<'e, E>>,
    /// The time until which no new connections are accepted.
    paused: Option<Instant>,
    log: Throttle,
    /// Limits the log lines that say that no connection can be accepted: the server tries again ten
    /// times a second.
    shortage: Throttle,
}

impl<'e, E: Exports> Control<'e, E> {
    /// Allocates the memory of the control thread.
    ///
    /// # Errors
    /// Fails when the system has no descriptors left.
    pub fn new(
        listeners: &'e [Listener],
        exports: &'e E,
        seats: &'e Seats<E::Device>,
        send_patience: Duration,
        bell: &Bell,
        log: Log,
    ) -> io::Result<Self> {
        let epoll = epoll::create(epoll::CreateFlags::CLOEXEC)?;
        epoll::add(&epoll, &bell.0, EventData::new_u64(WAKE), EventFlags::IN)?;
        for (at, listener) in listeners.iter().enumerate() {
            epoll::add(&epoll, listener, EventData::new_u64(LISTENER + at as u64), EventFlags::IN)?;
        }
        let idle = || Negotiation {
            pending: None,
            input: vec![0; INPUT_MAX].into_boxed_slice(),
            output: Vec::with_capacity(OUTPUT_MAX),
        };
        let negotiations = std::iter::repeat_with(idle).take(PENDING_MAX).collect();
        let shortage = Throttle::condition(Arc::clone(&log), "nbd");
        let log = Throttle::new(log, "nbd");
        Ok(Control {
            epoll,
            listeners,
            exports,
            seats,
            send_patience,
            negotiations,
            paused: None,
            log,
            shortage,
        })
    }

    /// Runs until the bell rings.
    pub fn run(&mut self) {
        let mut events = Vec::with_capacity(PENDING_MAX);
        loop {
            let timeout = self.next_deadline().map(|deadline| {
                let left = deadline.saturating_duration_since(Instant::now());
                Timespec { tv_sec: left.as_secs() as i64, tv_nsec: left.subsec_nanos().into() }
            });
            events.clear();
            match epoll::wait(&self.epoll, rustix::buffer::spare_capacity(&mut events), timeout.as_ref()) {
                Ok(_) | Err(rustix::io::Errno::INTR) => {}
                Err(errno) => {
                    // `epoll_wait` fails only because of a bug. Other threads go on serving the
                    // connections in transmission.
                    self.log.line(Level::Warning, format_args!("no new connections: epoll: {errno}"));
                    return;
                }
            }
            for event in &events {
                match event.data.u64() {
                    WAKE => return,
                    at if at >= LISTENER => self.accept((at - LISTENER) as usize),
                    at => self.go_on(at as usize),
                }
            }
            self.expire();
        }
    }

    fn next_deadline(&self) -> Option<Instant> {
        let pending = self.negotiations.iter().filter_map(|negotiation| negotiation.pending.as_ref());
        pending.map(|pending| pending.since + PATIENCE).chain(self.paused).min()
    }

    fn expire(&mut self) {
        let now = Instant::now();
        for at in 0..self.negotiations.len() {
            if self.negotiations[at].pending.as_ref().is_some_and(|pending| now >= pending.since + PATIENCE) {
                self.drop_pending(at, format_args!("no agreement within {} s", PATIENCE.as_secs()));
            }
        }
        if self.paused.is_some_and(|until| now >= until) {
            self.paused = None;
            for at in 0..self.listeners.len() {
                self.listen_for(at, EventFlags::IN);
            }
        }
    }

    fn accept(&mut self, at: usize) {
        for _ in 0..ACCEPT_BURST {
            match self.listeners[at].accept() {
                Ok(Some(socket)) => self.begin(socket, at),
                Ok(None) => return,
                Err(error) => {
                    // The process is out of descriptors or memory. The connection stays in the
                    // socket's queue, so without a pause this thread would spin.
                    self.shortage.line(
                        Level::Warning,
                        format_args!("cannot accept: {error}; raise the limit of open files"),
                    );
                    for at in 0..self.listeners.len() {
                        self.listen_for(at, EventFlags::empty());
                    }
                    self.paused = Some(Instant::now() + ACCEPT_PAUSE);
                    return;
                }
            }
        }
    }

    fn listen_for(&self, at: usize, events: EventFlags) {
        let data = EventData::new_u64(LISTENER + at as u64);
        // The listener was added at the start and is open, so this cannot fail.
        let _ = epoll::modify(&self.epoll, &self.listeners[at], data, events);
    }

    fn begin(&mut self, socket: OwnedFd, listener: usize) {
        let tls = match self.listeners[listener].bound {
            Listen::Tls { .. } => Tls::Required,
            Listen::Unix(_) | Listen::Insecure { .. } => Tls::Off,
        };
        self.place(socket, listener, tls);
    }

    /// Begins to negotiate with a client.
    fn place(&mut self, socket: OwnedFd, listener: usize, tls: Tls) {
        let at = match self.negotiations.iter().position(|negotiation| negotiation.pending.is_none()) {
            Some(at) => at,
            None => {
                let since = |negotiation: &Negotiation<'_, E>| {
                    negotiation.pending.as_ref().map(|pending| pending.since)
                };
                let oldest = (0..self.negotiations.len())
                    .min_by_key(|at| since(&self.negotiations[*at]))
                    .expect("there is room for some");
                self.drop_pending(oldest, format_args!("{PENDING_MAX} others negotiate"));
                oldest
            }
        };
        if let Err(errno) = epoll::add(&self.epoll, &socket, EventData::new_u64(at as u64), EventFlags::IN) {
            self.log.line(Level::Warning, format_args!("connection refused: epoll: {errno}"));
            return;
        }
        let negotiation = &mut self.negotiations[at];
        negotiation.output.clear();
        if tls != Tls::Active {
            negotiation.output.extend_from_slice(&handshake::greeting());
        }
        let handshake = Handshake::new(self.exports, tls);
        let since = Instant::now();
        negotiation.pending =
            Some(Pending { socket, handshake, listener, since, input: 0, sent: 0, then: None });
        self.go_on(at);
    }

    /// Begins TLS on `socket`. Inside TLS the client negotiates from the start, as on a new
    /// connection.
    fn start_tls(&mut self, socket: OwnedFd, early: usize, listener: usize) {
        let Listen::Tls { identity, .. } = &self.listeners[listener].bound else { return };
        if early > 0 {
            // Refuse bytes that came in the clear after STARTTLS. They would count as sent inside
            // TLS, and an attacker in the middle may have added them.
            let line = "connection dropped: bytes in the clear after NBD_OPT_STARTTLS";
            return self.log.line(Level::Warning, format_args!("{line}"));
        }
        match tls::relay(identity, socket) {
            Ok(plain) => self.place(plain, listener, Tls::Active),
            Err(error) => {
                self.log.line(Level::Warning, format_args!("no TLS for a connection: {error}"));
            }
        }
    }

    fn drop_pending(&mut self, at: usize, why: fmt::Arguments<'_>) {
        // Closing the socket also removes it from the epoll set.
        self.negotiations[at].pending = None;
        self.log.line(Level::Warning, format_args!("connection dropped while negotiating: {why}"));
    }

    /// Continues a negotiation as far as possible.
    fn go_on(&mut self, at: usize) {
        loop {
            match self.advance(at) {
                Ok(true) => {}
                Ok(false) => return,
                Err(error) => return self.drop_pending(at, format_args!("{error}")),
            }
        }
    }

    /// One step of a negotiation. Returns whether another may follow.
    fn advance(&mut self, at: usize) -> io::Result<bool> {
        let Negotiation { pending: Some(pending), input, output } = &mut self.negotiations[at] else {
            return Ok(false);
        };
        // Send earlier output first: a client that does not read gets no further answers.
        if pending.sent < output.len() {
            let flags = SendFlags::NOSIGNAL | SendFlags::DONTWAIT;
            match rustix::net::send(&pending.socket, &output[pending.sent..], flags) {
                Ok(sent) => pending.sent += sent,
                Err(rustix::io::Errno::AGAIN | rustix::io::Errno::INTR) => {
                    let data = EventData::new_u64(at as u64);
                    epoll::modify(&self.epoll, &pending.socket, data, EventFlags::OUT)?;
                    return Ok(false);
                }
                Err(errno) => return Err(errno.into()),
            }
            return Ok(true);
        }
        output.clear();
        pending.sent = 0;
        match pending.then.take() {
            None | Some(Step::Again | Step::NeedMore) => {}
            Some(Step::Close(ending)) => {
                self.negotiations[at].pending = None;
                let level = if ending == handshake::Ending::Abort { Level::Info } else { Level::Warning };
                self.log.line(level, format_args!("negotiation ended: {ending}"));
                return Ok(false);
            }
            Some(Step::StartTls) => {
                let Pending { socket, input: early, listener, .. } =
                    self.negotiations[at].pending.take().expect("matched above");
                epoll::delete(&self.epoll, &socket)?;
                self.start_tls(socket, early, listener);
                return Ok(false);
            }
            Some(Step::Transmission(negotiated)) => {
                let Pending { socket, input: early, mut handshake, .. } =
                    self.negotiations[at].pending.take().expect("matched above");
                let device = handshake.take_device().expect("the client has chosen one");
                epoll::delete(&self.epoll, &socket)?;
                rustix::io::ioctl_fionbio(&socket, false)?;
                // If the system refuses the larger buffer, long reads are slower, but correct.
                let _ = rustix::net::sockopt::set_socket_send_buffer_size(&socket, SEND_BUFFER_BYTES);
                rustix::net::sockopt::set_socket_timeout(
                    &socket,
                    rustix::net::sockopt::Timeout::Send,
                    Some(self.send_patience),
                )?;
                let early = &self.negotiations[at].input[..early];
                match self.seats.give(socket, negotiated, device, early) {
                    Ok(seat) => {
                        self.log.line(Level::Info, format_args!("connection {seat}: begins"));
                    }
                    Err(error) => {
                        self.log.line(Level::Warning, format_args!("connection dropped: {error}"));
                    }
                }
                return Ok(false);
            }
        }
        let room = self.seats.has_room();
        let (consumed, step) = pending.handshake.advance(&input[..pending.input], room, output);
        input.copy_within(consumed..pending.input, 0);
        pending.input -= consumed;
        if step != Step::NeedMore {
            pending.then = Some(step);
            return Ok(true);
        }
        match rustix::net::recv(&pending.socket, &mut input[pending.input..], RecvFlags::DONTWAIT) {
            Ok((0, _)) => {
                // Do not log this as a warning: port scanners and health checks leave in the same
                // way.
                self.negotiations[at].pending = None;
                self.log.line(Level::Info, format_args!("a client left while negotiating"));
                Ok(false)
            }
            Ok((received, _)) => {
                pending.input += received;
                Ok(true)
            }
            Err(rustix::io::Errno::AGAIN | rustix::io::Errno::INTR) => {
                let data = EventData::new_u64(at as u64);
                epoll::modify(&self.epoll, pending.socket.as_fd(), data, EventFlags::IN)?;
                Ok(false)
            }
            Err(errno) => Err(errno.into()),
        }
    }
}
