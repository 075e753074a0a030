//! The threads that serve connections. All are started before the process is sealed, each with its
//! memory and its lane. Each waits at its seat until it is given a connection.

use super::connection::Worker;
use super::handshake::{INPUT_MAX, Negotiated};
use super::stats::{Counters, Stats};
use crate::spin::{Spin, SpinGate};
use rustix::net::Shutdown;
use std::io;
use std::os::fd::{AsFd, OwnedFd};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Condvar, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};
use weir_core::log::{Level, Log};
use weir_device::PageLane;

/// The state that all seats share.
pub(super) struct Seats {
    seats: Box<[Seat]>,
    gate: SpinGate,
    spin: Duration,
    read_only: bool,
    /// Whether the server has begun to shut its connections' sockets for reading.
    closing: AtomicBool,
    log: Log,
}

struct Seat {
    mailbox: Mutex<Mailbox>,
    /// The condition variable that is notified when the mailbox's state changes.
    bell: Condvar,
    counters: Counters,
}

struct Mailbox {
    state: State,
    /// The connection's socket, for another thread that must end the connection.
    socket: Option<OwnedFd>,
    /// The serving thread's own descriptor of the connection, until the thread takes it.
    given: Option<OwnedFd>,
    negotiated: Negotiated,
    early: Box<[u8]>,
    early_len: usize,
}

#[derive(Clone, Copy, PartialEq, Eq, Debug)]
enum State {
    /// The seat has no thread yet, or no more.
    Empty,
    Idle,
    Serving,
    /// The thread must end once it serves no connection.
    Closing,
}

impl Seats {
    pub fn new(count: usize, spin: Duration, read_only: bool, log: Log) -> Seats {
        let processors = std::thread::available_parallelism().map_or(1, usize::from);
        let mailbox = || Mailbox {
            state: State::Empty,
            socket: None,
            given: None,
            negotiated: Negotiated { structured: false, allocation: false },
            early: vec![0; INPUT_MAX].into_boxed_slice(),
            early_len: 0,
        };
        let seat =
            || Seat { mailbox: Mutex::new(mailbox()), bell: Condvar::new(), counters: Counters::default() };
        let seats = std::iter::repeat_with(seat).take(count).collect();
        Seats {
            seats,
            gate: SpinGate::new(processors),
            spin,
            read_only,
            closing: AtomicBool::new(false),
            log,
        }
    }

    /// The work of a seat's thread: serves each connection that it is given, until it must leave.
    pub fn sit<L: PageLane>(&self, number: usize, worker: &mut Worker<L>) {
        weir_core::seal::on_io_thread(|| {
            while let Some(socket) = self.seats[number].wait() {
                self.serve(number, worker, socket);
            }
        });
    }

    /// Notes that a thread is about to take this seat. The seat may be given a connection, and
    /// [`close`](Seats::close) waits for the thread.
    pub fn open(&self, number: usize) {
        self.seats[number].lock().state = State::Idle;
    }

    /// Notes that the thread has left, or will not come. Its connection ends.
    pub fn vacate(&self, number: usize) {
        let mut mail = self.seats[number].lock();
        mail.shut(Shutdown::Both);
        (mail.state, mail.socket, mail.given) = (State::Empty, None, None);
        self.seats[number].bell.notify_all();
    }

    /// Vacates the seat when the returned guard is dropped: as the thread's last act, even after a
    /// panic.
    pub fn vacate_at_end(&self, number: usize) -> Sitting<'_> {
        Sitting(self, number)
    }

    fn serve<L: PageLane>(&self, number: usize, worker: &mut Worker<L>, socket: OwnedFd) {
        let seat = &self.seats[number];
        seat.counters.connections.add(1);
        let mut early = [0; INPUT_MAX];
        let (negotiated, early_len) = {
            let mail = seat.lock();
            early[..mail.early_len].copy_from_slice(&mail.early[..mail.early_len]);
            (mail.negotiated, mail.early_len)
        };
        let mut spin = Spin::new(&self.gate, self.spin);
        let early = &early[..early_len];
        let ending = worker.serve(
            socket.as_fd(),
            negotiated,
            self.read_only,
            &self.closing,
            early,
            &mut spin,
            &seat.counters,
        );
        let level = if ending.is_usual() { Level::Info } else { Level::Warning };
        (self.log)(level, format_args!("nbd: connection {number}: {ending}"));
        drop(socket);
        let mut mail = seat.lock();
        mail.socket = None;
        if mail.state == State::Serving {
            mail.state = State::Idle;
        }
        seat.bell.notify_all();
    }

    /// Whether another connection would find a seat.
    pub fn has_room(&self) -> bool {
        self.seats.iter().any(|seat| seat.lock().state == State::Idle)
    }

    /// Gives a connection to an idle thread; `early` holds bytes that the client sent too early.
    ///
    /// # Errors
    /// Fails when no thread is idle, or no descriptor can be had.
    pub fn give(&self, socket: OwnedFd, negotiated: Negotiated, early: &[u8]) -> io::Result<usize> {
        for (number, seat) in self.seats.iter().enumerate() {
            let mut mail = seat.lock();
            if mail.state == State::Idle {
                mail.given = Some(socket.try_clone()?);
                mail.socket = Some(socket);
                mail.negotiated = negotiated;
                mail.early[..early.len()].copy_from_slice(early);
                mail.early_len = early.len();
                mail.state = State::Serving;
                seat.bell.notify_all();
                return Ok(number);
            }
        }
        Err(io::ErrorKind::ResourceBusy.into())
    }

    /// Makes every thread leave. Idle threads leave now, and others after they have answered what
    /// they have received. After `grace` their connections are cut. Returns the number of threads
    /// that were still busy some time later, because they wait for a store.
    pub fn close(&self, grace: Duration) -> usize {
        self.closing.store(true, Ordering::SeqCst);
        for seat in &self.seats {
            let mut mail = seat.lock();
            if mail.state != State::Empty {
                mail.state = State::Closing;
            }
            mail.shut(Shutdown::Read);
            seat.bell.notify_all();
        }
        let deadline = Instant::now() + grace;
        if self.empty_by(deadline) > 0 {
            for seat in &self.seats {
                seat.lock().shut(Shutdown::Both);
            }
        }
        self.empty_by(Instant::now().max(deadline) + Duration::from_secs(2))
    }

    /// Waits until every thread has left, or the deadline; returns how many have not.
    fn empty_by(&self, deadline: Instant) -> usize {
        let mut busy = 0;
        for seat in &self.seats {
            let mut mail = seat.lock();
            while mail.state != State::Empty {
                let left = deadline.saturating_duration_since(Instant::now());
                if left.is_zero() {
                    busy += 1;
                    break;
                }
                (mail, _) = seat.bell.wait_timeout(mail, left).unwrap_or_else(PoisonError::into_inner);
            }
        }
        busy
    }

    /// Number of connections that may be the kernel's: all that no other living process made. One
    /// that this process made counts too, since this process may have made it for the kernel.
    pub fn kernels(&self) -> usize {
        self.seats.iter().filter(|seat| seat.lock().socket.as_ref().is_some_and(is_kernels)).count()
    }

    /// Ends the connections that may be those of the kernel's NBD client.
    pub fn hang_up_kernels(&self) {
        for seat in &self.seats {
            let mail = seat.lock();
            if mail.socket.as_ref().is_some_and(is_kernels) {
                mail.shut(Shutdown::Both);
            }
        }
    }

    pub fn stats(&self) -> Stats {
        let mut stats = Stats { connections_max: self.seats.len() as u64, ..Stats::default() };
        for seat in &self.seats {
            stats.add(&seat.counters);
            stats.connected += u64::from(seat.lock().socket.is_some());
        }
        stats
    }
}

/// Vacates a seat when dropped; see [`Seats::vacate_at_end`].
pub(super) struct Sitting<'a>(&'a Seats, usize);

impl Drop for Sitting<'_> {
    fn drop(&mut self) {
        self.0.vacate(self.1);
    }
}

impl Seat {
    /// Locks the mailbox, even after a panic. Each change is one assignment, so no change is half
    /// done.
    fn lock(&self) -> MutexGuard<'_, Mailbox> {
        self.mailbox.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Waits for a connection; `None` when the thread must leave.
    fn wait(&self) -> Option<OwnedFd> {
        let mut mail = self.lock();
        loop {
            if let Some(socket) = mail.given.take() {
                return Some(socket);
            }
            if mail.state == State::Closing {
                return None;
            }
            mail = self.bell.wait(mail).unwrap_or_else(PoisonError::into_inner);
        }
    }
}

/// Whether the connection may be the kernel's: no other living process made it, or its maker is
/// unknown.
fn is_kernels(socket: &OwnedFd) -> bool {
    let maker = rustix::net::sockopt::socket_peercred(socket).map_or(0, |peer| peer.pid.as_raw_pid());
    maker <= 0
        || maker as u32 == std::process::id()
        || !std::path::Path::new(&format!("/proc/{maker}")).exists()
}

impl Mailbox {
    fn shut(&self, how: Shutdown) {
        if let Some(socket) = &self.socket {
            // A shutdown fails only if the client has gone already.
            let _ = rustix::net::shutdown(socket, how);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::io::Read;
    use std::os::unix::net::UnixStream;
    use std::sync::Arc;

    #[test]
    fn what_this_process_connected_for_the_kernel_is_hung_up() {
        let seats = Seats::new(2, Duration::ZERO, false, Arc::new(|_, _| {}));
        seats.open(0);
        let (ours, mut client) = UnixStream::pair().unwrap();
        seats.give(ours.into(), Negotiated { structured: false, allocation: false }, &[]).unwrap();
        assert_eq!(seats.kernels(), 1);
        seats.hang_up_kernels();
        assert_eq!(client.read(&mut [0]).unwrap(), 0);
    }

    #[test]
    fn a_thread_that_panics_leaves_its_seat_and_its_client() {
        let seats = Seats::new(1, Duration::ZERO, false, Arc::new(|_, _| {}));
        seats.open(0);
        let (ours, mut client) = UnixStream::pair().unwrap();
        client.set_read_timeout(Some(Duration::from_secs(60))).unwrap();
        seats.give(ours.into(), Negotiated { structured: false, allocation: false }, &[]).unwrap();
        let ended = std::thread::scope(|scope| {
            let sit = || {
                let _sitting = seats.vacate_at_end(0);
                let _socket = seats.seats[0].wait().expect("a connection");
                panic!("as a bug would");
            };
            scope.spawn(sit).join()
        });
        assert!(ended.is_err());
        assert_eq!(client.read(&mut [0]).unwrap(), 0, "the connection ends");
        assert_eq!(seats.stats().connected, 0);
        assert_eq!(seats.close(Duration::ZERO), 0, "nobody is waited for");
    }
}
