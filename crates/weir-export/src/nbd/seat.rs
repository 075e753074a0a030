//! The threads that serve connections. All are started before the process is sealed, each with its
//! memory and its lane. Each waits at its seat until it is given a connection.

use super::connection::Worker;
use super::exports::Exports;
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

/// The state that all seats share.
pub(super) struct Seats<D> {
    seats: Box<[Seat<D>]>,
    gate: SpinGate,
    spin: Duration,
    /// Whether the server has begun to shut its connections' sockets for reading.
    closing: AtomicBool,
    log: Log,
}

struct Seat<D> {
    mailbox: Mutex<Mailbox<D>>,
    /// The condition variable that is notified when the mailbox's state changes.
    bell: Condvar,
    counters: Counters,
}

struct Mailbox<D> {
    state: State,
    /// The connection's socket, for another thread that must end the connection.
    socket: Option<OwnedFd>,
    /// The connection, until the serving thread takes it.
    given: Option<Given<D>>,
    early: Box<[u8]>,
    early_len: usize,
}

/// A connection that waits for its serving thread to take it.
struct Given<D> {
    /// The thread's own descriptor of the connection.
    socket: OwnedFd,
    negotiated: Negotiated,
    /// The connection's hold on its device.
    device: D,
}

#[derive(Clone, Copy, PartialEq, Eq, Debug)]
enum State {
    /// The seat has no thread yet, or has one no longer.
    Empty,
    Idle,
    Serving,
    /// The thread must end once it serves no connection.
    Closing,
}

/// The seats as the server sees them. The server need not know of which type their devices are.
pub(super) trait Seating: Send + Sync {
    /// Makes every thread leave. Idle threads leave now, and others after they have answered what
    /// they have received. After `grace` their connections are cut. Returns the number of threads
    /// that were still busy some time later, because they wait for a store.
    fn close(&self, grace: Duration) -> usize;

    /// Number of connections that may be the kernel's. A connection does not count if another
    /// living process made it. A connection that this process made counts, since this process may
    /// have made it for the kernel.
    fn kernels(&self) -> usize;

    /// Ends the connections that may be those of the kernel's NBD client.
    fn hang_up_kernels(&self);

    /// The counts of all seats.
    fn stats(&self) -> Stats;
}

impl<D> Seats<D> {
    pub fn new(count: usize, spin: Duration, log: Log) -> Self {
        let processors = std::thread::available_parallelism().map_or(1, usize::from);
        let mailbox = || Mailbox {
            state: State::Empty,
            socket: None,
            given: None,
            early: vec![0; INPUT_MAX].into_boxed_slice(),
            early_len: 0,
        };
        let seat =
            || Seat { mailbox: Mutex::new(mailbox()), bell: Condvar::new(), counters: Counters::default() };
        let seats = std::iter::repeat_with(seat).take(count).collect();
        Seats { seats, gate: SpinGate::new(processors), spin, closing: AtomicBool::new(false), log }
    }

    /// The work of a seat's thread: serves each connection that it is given, until it must leave.
    /// Between two connections the worker's lane leads to no device.
    pub fn sit<E: Exports<Device = D>>(&self, number: usize, worker: &mut Worker<E::Lane>, exports: &E) {
        weir_core::seal::on_io_thread(|| {
            while let Some(given) = self.seats[number].wait() {
                self.serve(number, worker, exports, given);
            }
        });
    }

    /// Notes that a thread is about to take this seat. The seat may be given a connection, and
    /// [`close`](Seating::close) waits for the thread.
    pub fn open(&self, number: usize) {
        self.seats[number].lock().state = State::Idle;
    }

    /// Notes that the seat's thread has left, or that none will come. Ends the seat's connection,
    /// if there is one.
    pub fn vacate(&self, number: usize) {
        let mut mail = self.seats[number].lock();
        mail.shut(Shutdown::Both);
        let given = mail.given.take();
        (mail.state, mail.socket) = (State::Empty, None);
        self.seats[number].bell.notify_all();
        // Unlock first: dropping `given` may run code of the device's owner.
        drop(mail);
        drop(given);
    }

    /// Vacates the seat when the returned guard is dropped: as the thread's last act, even after a
    /// panic.
    pub fn vacate_at_end(&self, number: usize) -> Sitting<'_, D> {
        Sitting(self, number)
    }

    fn serve<E: Exports<Device = D>>(
        &self,
        number: usize,
        worker: &mut Worker<E::Lane>,
        exports: &E,
        Given { socket, negotiated, device }: Given<D>,
    ) {
        let seat = &self.seats[number];
        seat.counters.connections.add(1);
        let mut early = [0; INPUT_MAX];
        let early_len = {
            let mail = seat.lock();
            early[..mail.early_len].copy_from_slice(&mail.early[..mail.early_len]);
            mail.early_len
        };
        let mut spin = Spin::new(&self.gate, self.spin);
        let early = &early[..early_len];
        exports.turn(worker.lane(), Some(&device));
        let ending =
            worker.serve(socket.as_fd(), negotiated, &self.closing, early, &mut spin, &seat.counters);
        // The connection's last operation has ended, so the owner may remove the device from here
        // on. This comes before the socket's end: a client that has seen that end finds the device
        // removable.
        exports.turn(worker.lane(), None);
        drop(device);
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
    pub fn give(
        &self,
        socket: OwnedFd,
        negotiated: Negotiated,
        device: D,
        early: &[u8],
    ) -> io::Result<usize> {
        for (number, seat) in self.seats.iter().enumerate() {
            let mut mail = seat.lock();
            if mail.state == State::Idle {
                mail.given = Some(Given { socket: socket.try_clone()?, negotiated, device });
                mail.socket = Some(socket);
                mail.early[..early.len()].copy_from_slice(early);
                mail.early_len = early.len();
                mail.state = State::Serving;
                seat.bell.notify_all();
                return Ok(number);
            }
        }
        Err(io::ErrorKind::ResourceBusy.into())
    }

    /// Waits until every thread has left, but not beyond the deadline. Returns the number of
    /// threads that have not left.
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
}

impl<D: Send> Seating for Seats<D> {
    fn close(&self, grace: Duration) -> usize {
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

    fn kernels(&self) -> usize {
        self.seats.iter().filter(|seat| seat.lock().socket.as_ref().is_some_and(is_kernels)).count()
    }

    fn hang_up_kernels(&self) {
        for seat in &self.seats {
            let mail = seat.lock();
            if mail.socket.as_ref().is_some_and(is_kernels) {
                mail.shut(Shutdown::Both);
            }
        }
    }

    fn stats(&self) -> Stats {
        let mut stats = Stats { connections_max: self.seats.len() as u64, ..Stats::default() };
        for seat in &self.seats {
            stats.add(&seat.counters);
            stats.connected += u64::from(seat.lock().socket.is_some());
        }
        stats
    }
}

/// Vacates a seat when dropped; see [`Seats::vacate_at_end`].
pub(super) struct Sitting<'a, D>(&'a Seats<D>, usize);

impl<D> Drop for Sitting<'_, D> {
    fn drop(&mut self) {
        self.0.vacate(self.1);
    }
}

impl<D> Seat<D> {
    /// Locks the mailbox, even after a panic. Each change is one assignment, so no change is half
    /// done.
    fn lock(&self) -> MutexGuard<'_, Mailbox<D>> {
        self.mailbox.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Waits for a connection; `None` when the thread must leave.
    fn wait(&self) -> Option<Given<D>> {
        let mut mail = self.lock();
        loop {
            if let Some(given) = mail.given.take() {
                return Some(given);
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

impl<D> Mailbox<D> {
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

    const NEGOTIATED: Negotiated =
        Negotiated { structured: false, allocation: false, bytes: 0, read_only: false, clears: false };

    #[test]
    fn what_this_process_connected_for_the_kernel_is_hung_up() {
        let seats = Seats::new(2, Duration::ZERO, Arc::new(|_, _| {}));
        seats.open(0);
        let (ours, mut client) = UnixStream::pair().unwrap();
        seats.give(ours.into(), NEGOTIATED, (), &[]).unwrap();
        assert_eq!(seats.kernels(), 1);
        seats.hang_up_kernels();
        assert_eq!(client.read(&mut [0]).unwrap(), 0);
    }

    #[test]
    fn a_thread_that_panics_leaves_its_seat_and_its_client() {
        let seats = Seats::new(1, Duration::ZERO, Arc::new(|_, _| {}));
        seats.open(0);
        let (ours, mut client) = UnixStream::pair().unwrap();
        client.set_read_timeout(Some(Duration::from_secs(60))).unwrap();
        seats.give(ours.into(), NEGOTIATED, (), &[]).unwrap();
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
