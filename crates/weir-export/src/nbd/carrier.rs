//! Threads that send long replies and receive long writes, so that a connection's own thread works on another part meanwhile.
//!
//! To copy 1 MiB into or out of a socket takes a thread longer than everything else that the server does for it. A connection with
//! long reads at a slow store, or long writes, hires one of these threads for as long as it has some; where none is free it does
//! both by itself. What is handed over has been proven, lies in memory that the parcel owns, and leaves in the order in which it
//! came. What is received is a part of a write's payload, no more, and a connection asks for it while nothing is to be sent.

use super::pool::Loan;
use super::slices::Slices;
use rustix::io::Errno;
use rustix::net::{RecvFlags, Shutdown};
use std::collections::VecDeque;
use std::ops::Range;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

/// Parcels that wait for a carrier at most, besides the one that it sends.
pub(super) const PARCELS: usize = 3;
/// A connection that waits for room is woken when so many have not left: neither then sleeps while the other works.
const FEW: usize = 2;
/// The longest header.
const HEAD_MAX: usize = 64;

/// A piece of the stream of replies: a header, and bytes behind it.
pub(super) struct Parcel {
    head: [u8; HEAD_MAX],
    head_len: usize,
    bytes: Option<(Loan, Range<usize>)>,
}

impl Parcel {
    /// `bytes` are a range of what is borrowed.
    pub fn new(head: &[u8], bytes: Option<(Loan, Range<usize>)>) -> Parcel {
        let mut parcel = Parcel { head: [0; HEAD_MAX], head_len: head.len(), bytes };
        parcel.head[..head.len()].copy_from_slice(head);
        parcel
    }

    fn send(&self, socket: BorrowedFd<'_>) -> rustix::io::Result<()> {
        let mut slices = Slices::new();
        slices.push(&self.head[..self.head_len]);
        if let Some((loan, range)) = &self.bytes {
            slices.push(&loan[range.clone()]);
        }
        slices.send_all(socket)
    }
}

/// All of a server's.
pub(super) struct Carriers {
    carriers: Box<[Carrier]>,
    /// A bit for each that is at work and nobody has hired.
    idle: AtomicU64,
}

struct Carrier {
    state: Mutex<State>,
    /// Rung for the carrier.
    work: Condvar,
    /// Rung for the connection that has hired it.
    room: Condvar,
}

struct State {
    /// The connection's, while it is hired and not in the carrier's hands.
    socket: Option<OwnedFd>,
    parcels: VecDeque<Parcel>,
    /// It has the socket and a parcel.
    sends: bool,
    /// The memory to receive into, and which bytes of it.
    wanted: Option<(Loan, Range<usize>)>,
    /// It has the socket, and receives.
    receives: bool,
    /// The memory that was filled, and up to which byte.
    received: Option<(Loan, usize)>,
    /// The connection sleeps until then.
    awaits_received: bool,
    /// Nothing more leaves on this socket.
    failed: Option<Errno>,
    /// The thread shall leave when it has nothing to send.
    leaves: bool,
    /// It has.
    gone: bool,
    /// The carrier sleeps.
    sleeps: bool,
    /// The connection sleeps until no more than so many parcels are left.
    awaited: Option<usize>,
}

impl State {
    /// Parcels that have not left.
    fn left(&self) -> usize {
        self.parcels.len() + usize::from(self.sends)
    }
}

impl Carriers {
    /// Places for `count` threads, 64 at most.
    pub fn new(count: usize) -> Arc<Self> {
        let state = || State {
            socket: None,
            parcels: VecDeque::with_capacity(PARCELS),
            sends: false,
            wanted: None,
            receives: false,
            received: None,
            awaits_received: false,
            failed: None,
            leaves: false,
            gone: false,
            sleeps: false,
            awaited: None,
        };
        let carrier = || Carrier { state: Mutex::new(state()), work: Condvar::new(), room: Condvar::new() };
        let carriers = std::iter::repeat_with(carrier).take(count.min(64)).collect();
        Arc::new(Carriers { carriers, idle: AtomicU64::new(0) })
    }

    pub fn count(&self) -> usize {
        self.carriers.len()
    }

    /// The life of a carrier's thread.
    pub fn carry(&self, number: usize) {
        // Also where it ends by a panic: nobody waits for a thread that has gone.
        let _leaving = Leaving(&self.carriers[number]);
        self.idle.fetch_or(1 << number, Ordering::Release);
        weir_core::seal::on_io_thread(|| self.carriers[number].carry());
    }

    /// Hires a carrier for a connection, if one is free.
    pub fn hire<'a>(self: &Arc<Self>, socket: BorrowedFd<'a>) -> Option<Hired<'a>> {
        if self.idle.load(Ordering::Relaxed) == 0 {
            return None;
        }
        // The carrier's own, which it may hold for longer than the connection lives.
        let own = socket.try_clone_to_owned().ok()?;
        let lowest = |idle: u64| (idle != 0).then(|| idle & (idle - 1));
        let before = self.idle.fetch_update(Ordering::Acquire, Ordering::Relaxed, lowest).ok()?;
        let number = before.trailing_zeros() as usize;
        let mut state = self.carriers[number].lock();
        if state.gone {
            return None;
        }
        (state.socket, state.failed) = (Some(own), None);
        drop(state);
        Some(Hired { carriers: Arc::clone(self), number, socket })
    }

    /// Lets every thread leave, once it has sent what it has.
    pub fn close(&self) {
        for carrier in &self.carriers {
            carrier.lock().leaves = true;
            carrier.work.notify_all();
        }
    }
}

impl Carrier {
    /// A thread that panicked while it held the lock is gone, and its state says so.
    fn lock(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn carry(&self) {
        let mut state = self.lock();
        loop {
            let work = match state.parcels.pop_front() {
                Some(parcel) => Some(Work::Send(parcel)),
                None => state.wanted.take().map(|(loan, range)| Work::Receive(loan, range)),
            };
            let Some(work) = work else {
                if state.leaves {
                    return;
                }
                state.sleeps = true;
                state = self.work.wait(state).unwrap_or_else(PoisonError::into_inner);
                state.sleeps = false;
                continue;
            };
            let Some(socket) = state.socket.take() else { continue };
            (state.sends, state.receives) =
                (matches!(work, Work::Send(_)), matches!(work, Work::Receive(..)));
            drop(state);
            let (sent, received) = match work {
                Work::Send(parcel) => (parcel.send(socket.as_fd()), None),
                Work::Receive(loan, range) => (Ok(()), Some(receive(socket.as_fd(), loan, range))),
            };
            state = self.lock();
            (state.sends, state.receives, state.socket) = (false, false, Some(socket));
            state.received = received.or(state.received.take());
            if let Err(errno) = sent {
                state.failed = Some(errno);
                state.parcels.clear();
            }
            self.tell(&mut state);
        }
    }

    /// Wakes the connection where it waits for this.
    fn tell(&self, state: &mut State) {
        if state.awaits_received && (!state.receives || state.failed.is_some()) {
            state.awaits_received = false;
            self.room.notify_one();
        }
        if state.awaited.is_some_and(|few| state.left() <= few || state.failed.is_some()) {
            state.awaited = None;
            self.room.notify_one();
        }
    }
}

enum Work {
    Send(Parcel),
    Receive(Loan, Range<usize>),
}

/// Fills a range of what is borrowed, as far as the client sends. Returns up to where.
fn receive(socket: BorrowedFd<'_>, mut loan: Loan, range: Range<usize>) -> (Loan, usize) {
    let mut filled = range.start;
    while filled < range.end {
        match rustix::net::recv(socket, &mut loan[filled..range.end], RecvFlags::empty()) {
            Ok((received @ 1.., _)) => filled += received,
            Err(Errno::INTR) => {}
            // The next receive meets with whatever ended this one.
            Ok((0, _)) | Err(_) => break,
        }
    }
    (loan, filled)
}

/// Says that a carrier's thread has gone.
struct Leaving<'a>(&'a Carrier);

impl Drop for Leaving<'_> {
    fn drop(&mut self) {
        let mut state = self.0.lock();
        (state.gone, state.sends, state.receives) = (true, false, false);
        (state.wanted, state.received) = (None, None);
        state.failed = Some(Errno::IO);
        state.parcels.clear();
        self.0.tell(&mut state);
    }
}

/// A carrier that a connection has to itself. Dropped, what has not left is thrown away and the connection is cut.
pub(super) struct Hired<'a> {
    carriers: Arc<Carriers>,
    number: usize,
    socket: BorrowedFd<'a>,
}

impl Hired<'_> {
    fn carrier(&self) -> &Carrier {
        &self.carriers.carriers[self.number]
    }

    /// Waits until no more than `few` parcels are left.
    fn wait(&self, few: usize) -> rustix::io::Result<MutexGuard<'_, State>> {
        let mut state = self.carrier().lock();
        loop {
            match state.failed {
                Some(errno) => return Err(errno),
                None if state.left() <= few => return Ok(state),
                None => state.awaited = Some(few),
            }
            state = self.carrier().room.wait(state).unwrap_or_else(PoisonError::into_inner);
        }
    }

    /// Has a parcel sent, after those that were handed over before; waits for room.
    ///
    /// # Errors
    /// The error that a parcel before it met with.
    pub fn send(&self, parcel: Parcel) -> rustix::io::Result<()> {
        let is_full = self.carrier().lock().parcels.len() == PARCELS;
        let mut state = self.wait(if is_full { FEW } else { PARCELS })?;
        state.parcels.push_back(parcel);
        if std::mem::take(&mut state.sleeps) {
            self.carrier().work.notify_one();
        }
        Ok(())
    }

    /// Has bytes received into a range of `loan`. Nothing is to be sent until they are [there](Hired::received).
    pub fn receive(&self, loan: Loan, range: Range<usize>) {
        let mut state = self.carrier().lock();
        debug_assert!(state.left() == 0 && state.wanted.is_none() && !state.receives);
        state.wanted = Some((loan, range));
        if std::mem::take(&mut state.sleeps) {
            self.carrier().work.notify_one();
        }
    }

    /// What was received, and up to which byte; less than was asked for where the client has ended the stream. `None`: not within
    /// `patience`, without which it is waited for.
    ///
    /// # Errors
    /// When the carrier's thread has gone.
    pub fn received(&self, patience: Option<Duration>) -> rustix::io::Result<Option<(Loan, usize)>> {
        let room = &self.carrier().room;
        let mut state = self.carrier().lock();
        let mut patience = patience;
        loop {
            if let Some(received) = state.received.take() {
                state.awaits_received = false;
                return Ok(Some(received));
            }
            if let Some(errno) = state.failed {
                return Err(errno);
            }
            if patience == Some(Duration::ZERO) {
                state.awaits_received = false;
                return Ok(None);
            }
            state.awaits_received = true;
            state = match patience {
                None => room.wait(state).unwrap_or_else(PoisonError::into_inner),
                Some(time) => {
                    patience = Some(Duration::ZERO);
                    room.wait_timeout(state, time).unwrap_or_else(PoisonError::into_inner).0
                }
            };
        }
    }

    /// Whether everything has left.
    pub fn is_still(&self) -> bool {
        self.carrier().lock().left() == 0
    }

    /// Waits until everything has left. The socket is the caller's own from then on.
    ///
    /// # Errors
    /// The error that a parcel met with.
    pub fn be_still(&self) -> rustix::io::Result<()> {
        self.wait(0).map(drop)
    }
}

impl Drop for Hired<'_> {
    fn drop(&mut self) {
        let mut state = self.carrier().lock();
        state.parcels.clear();
        (state.wanted, state.received) = (None, None);
        if state.sends || state.receives {
            // It may wait for a client that reads nothing, or sends nothing.
            let _ = rustix::net::shutdown(self.socket, Shutdown::Both);
        }
        while state.sends || state.receives {
            (state.awaited, state.awaits_received) = (Some(0), true);
            state = self.carrier().room.wait(state).unwrap_or_else(PoisonError::into_inner);
        }
        (state.received, state.socket) = (None, None);
        (state.awaited, state.awaits_received) = (None, false);
        drop(state);
        self.carriers.idle.fetch_or(1 << self.number, Ordering::Release);
    }
}

#[cfg(test)]
mod tests {
    use super::super::pool::Pool;
    use super::*;
    use std::io::Read;
    use std::os::unix::net::UnixStream;

    /// A carrier at work, and both ends of a socket.
    fn with_one(test: impl FnOnce(&Arc<Carriers>, UnixStream, UnixStream)) {
        let carriers = Carriers::new(1);
        std::thread::scope(|scope| {
            scope.spawn(|| carriers.carry(0));
            let (ours, theirs) = UnixStream::pair().unwrap();
            test(&carriers, ours, theirs);
            carriers.close();
        });
    }

    fn hire<'a>(carriers: &Arc<Carriers>, socket: &'a UnixStream) -> Hired<'a> {
        loop {
            if let Some(hired) = carriers.hire(socket.as_fd()) {
                return hired;
            }
            std::thread::yield_now();
        }
    }

    #[test]
    fn parcels_arrive_whole_and_in_order_however_slowly_the_client_reads() {
        let pool = Pool::new(PARCELS + 2, 300_000).unwrap();
        with_one(|carriers, ours, mut theirs| {
            let reader = std::thread::spawn(move || {
                let mut all = Vec::new();
                let mut piece = [0; 70_000];
                while let Ok(length @ 1..) = theirs.read(&mut piece) {
                    all.extend_from_slice(&piece[..length]);
                }
                all
            });
            let mut expected = Vec::new();
            let hired = hire(carriers, &ours);
            for number in 0..50u8 {
                let mut loan = loop {
                    match pool.borrow() {
                        Some(loan) => break loan,
                        None => std::thread::yield_now(),
                    }
                };
                let range = usize::from(number)..200_000 + usize::from(number);
                loan.fill(number);
                expected.extend_from_slice(&[number, 77]);
                expected.extend_from_slice(&loan[range.clone()]);
                hired.send(Parcel::new(&[number, 77], Some((loan, range)))).unwrap();
                if number % 7 == 0 {
                    hired.be_still().unwrap();
                    assert!(hired.is_still());
                }
            }
            hired.be_still().unwrap();
            drop(hired);
            drop(ours);
            assert!(reader.join().unwrap() == expected);
            assert_eq!(std::iter::from_fn(|| pool.borrow()).collect::<Vec<_>>().len(), PARCELS + 2);
        });
    }

    #[test]
    fn a_broken_connection_is_told_to_its_owner_and_to_no_later_one() {
        with_one(|carriers, ours, theirs| {
            let hired = hire(carriers, &ours);
            drop(theirs);
            hired.send(Parcel::new(&[1], None)).unwrap();
            assert_eq!(hired.be_still(), Err(Errno::PIPE));
            assert_eq!(hired.send(Parcel::new(&[2], None)), Err(Errno::PIPE));
            drop(hired);
            let (ours, mut theirs) = UnixStream::pair().unwrap();
            let hired = hire(carriers, &ours);
            hired.send(Parcel::new(&[3], None)).unwrap();
            hired.be_still().unwrap();
            let mut byte = [0];
            theirs.read_exact(&mut byte).unwrap();
            assert_eq!(byte, [3], "and nothing that was meant for the one before");
        });
    }

    #[test]
    fn who_gives_a_carrier_up_waits_for_no_client() {
        let pool = Pool::new(1, 4 << 20).unwrap();
        with_one(|carriers, ours, theirs| {
            let hired = hire(carriers, &ours);
            let loan = pool.borrow().unwrap();
            hired.send(Parcel::new(&[1], Some((loan, 0..4 << 20)))).unwrap();
            drop(hired);
            assert!(carriers.hire(ours.as_fd()).is_some(), "it is free again");
            assert!(pool.borrow().is_some(), "and so is what it had");
            drop(theirs);
        });
    }

    #[test]
    fn who_waits_for_a_carrier_that_dies_is_told() {
        let carriers = Carriers::new(1);
        let (ours, _theirs) = UnixStream::pair().unwrap();
        carriers.idle.store(1, Ordering::Relaxed);
        let hired = carriers.hire(ours.as_fd()).unwrap();
        std::thread::scope(|scope| {
            scope.spawn(|| {
                let _leaving = Leaving(&carriers.carriers[0]);
                while carriers.carriers[0].lock().parcels.is_empty() {
                    std::thread::yield_now();
                }
            });
            hired.send(Parcel::new(&[1], None)).unwrap();
            assert_eq!(hired.be_still(), Err(Errno::IO));
        });
        drop(hired);
        assert!(carriers.hire(ours.as_fd()).is_none(), "nobody hires who is not there");
    }
}
