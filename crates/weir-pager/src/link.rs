//! The link between a bounded process's pager and the daemon that has its pages. The daemon sends
//! orders, and the pager sends reports. Neither end ever waits for the other. If the daemon dies,
//! the pager looks for the next one now and then.

use rustix::io::Errno;
use rustix::net::{AddressFamily, RecvFlags, SendFlags, SocketAddrUnix, SocketFlags, SocketType};
use std::io;
use std::os::fd::{AsFd, OwnedFd};
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

/// Time between two attempts to connect.
const AGAIN: Duration = Duration::from_millis(100);

/// A request to a pager. Each request may come twice, or late.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Order {
    /// Send a [`Report`].
    Report,
    /// Keep at most this many bytes resident from now on.
    Limit(u64),
    /// Move all memory out that is resident now.
    Evict,
}

/// A pager's state and its counts since its start.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Report {
    /// Bytes of the program's managed memory that may be resident.
    pub limit: u64,
    /// Bytes that are resident, as the limit counts them: blocks, single pages, frames without
    /// content, and memory that is not managed.
    pub resident: u64,
    /// Number of blocks of 2 MiB that are in place.
    pub blocks: u64,
    /// Number of single pages that are in place.
    pub singles: u64,
    /// Bytes of the blocks that have room in the store.
    pub stored: u64,
    /// Number of page faults that the pager has resolved.
    pub faults: u64,
    /// Nanoseconds for which threads have waited for page faults, as far as the pager saw it.
    pub waited_ns: u64,
    /// Number of blocks that were prefetched.
    pub ahead: u64,
    /// Number of prefetched blocks that the program then used.
    pub ahead_used: u64,
    /// Number of blocks that could not be read back.
    pub lost: u64,
    /// Number of evictions that have ended.
    pub evictions: u64,
    /// Whether the store is full (1), or has failed (2). Otherwise 0.
    pub store: u64,
}

const WORDS: usize = 12;
/// Length of an encoded report in bytes.
const BYTES: usize = WORDS * size_of::<u64>();

impl Report {
    /// The value of [`store`](Self::store) when the store has no more room.
    pub const FULL: u64 = 1;
    /// The value of [`store`](Self::store) when the store has failed.
    pub const FAILED: u64 = 2;

    fn words(&self) -> [u64; WORDS] {
        let Report { limit, resident, blocks, singles, stored, faults, .. } = *self;
        let Report { waited_ns, ahead, ahead_used, lost, evictions, store, .. } = *self;
        [
            limit, resident, blocks, singles, stored, faults, waited_ns, ahead, ahead_used, lost, evictions,
            store,
        ]
    }

    fn from_words(words: [u64; WORDS]) -> Self {
        let [limit, resident, blocks, singles, stored, faults, rest @ ..] = words;
        let [waited_ns, ahead, ahead_used, lost, evictions, store] = rest;
        Report {
            limit,
            resident,
            blocks,
            singles,
            stored,
            faults,
            waited_ns,
            ahead,
            ahead_used,
            lost,
            evictions,
            store,
        }
    }
}

/// The pager's end of the link. Its descriptor is in the descriptor table of the thread that
/// connected it, and other threads may have another table.
#[derive(Debug)]
pub struct Link {
    path: PathBuf,
    socket: Option<OwnedFd>,
    /// The time of the last attempt to connect.
    tried: Option<Instant>,
}

impl Link {
    /// Makes a link to the daemon that listens at `path`, now or later.
    pub fn to(path: impl Into<PathBuf>) -> Self {
        Link { path: path.into(), socket: None, tried: None }
    }

    fn connect(path: &Path) -> io::Result<OwnedFd> {
        let flags = SocketFlags::CLOEXEC | SocketFlags::NONBLOCK;
        let socket = rustix::net::socket_with(AddressFamily::UNIX, SocketType::SEQPACKET, flags, None)?;
        rustix::net::connect(&socket, &SocketAddrUnix::new(path)?)?;
        Ok(socket)
    }

    /// Returns the daemon's next order, if one has come.
    pub fn order(&mut self) -> Option<Order> {
        if self.socket.is_none() && self.tried.is_none_or(|tried| tried.elapsed() >= AGAIN) {
            self.tried = Some(Instant::now());
            self.socket = Self::connect(&self.path).ok();
        }
        loop {
            let mut bytes = [0; 16];
            match rustix::net::recv(self.socket.as_ref()?, &mut bytes, RecvFlags::DONTWAIT) {
                Ok((16, _)) => {
                    let (kind, value) = bytes.split_at(8);
                    let word = |bytes: &[u8]| bytes.try_into().map_or(0, u64::from_ne_bytes);
                    match word(kind) {
                        0 => return Some(Order::Report),
                        1 => return Some(Order::Limit(word(value))),
                        2 => return Some(Order::Evict),
                        // A later version of the daemon may send orders that this version does not
                        // know. They have no effect.
                        _ => {}
                    }
                }
                Err(Errno::INTR) => {}
                Err(Errno::AGAIN) => return None,
                // The daemon has gone.
                Ok((0, _)) | Err(_) => self.socket = None,
                Ok(_) => {}
            }
        }
    }

    /// Sends a report. If the daemon does not read, the report is dropped, since a later one says
    /// more.
    pub fn report(&mut self, report: &Report) {
        if let Some(socket) = &self.socket {
            let mut bytes = [0; BYTES];
            for (into, word) in bytes.chunks_exact_mut(8).zip(report.words()) {
                into.copy_from_slice(&word.to_ne_bytes());
            }
            let _ = rustix::net::send(socket, &bytes, SendFlags::DONTWAIT | SendFlags::NOSIGNAL);
        }
    }
}

/// Sends an order to the pager at the other end of `socket`.
///
/// # Errors
/// Fails when the pager has gone. Fails with `WouldBlock` when the socket is full of orders that
/// the pager has not read.
pub fn send(socket: impl AsFd, order: Order) -> io::Result<()> {
    let (kind, value) = match order {
        Order::Report => (0_u64, 0),
        Order::Limit(bytes) => (1, bytes),
        Order::Evict => (2, 0),
    };
    let bytes = [kind.to_ne_bytes(), value.to_ne_bytes()];
    rustix::net::send(socket, bytes.as_flattened(), SendFlags::DONTWAIT | SendFlags::NOSIGNAL)?;
    Ok(())
}

/// The next report of the pager at the other end, if one has come. Skips messages that are no
/// report.
///
/// # Errors
/// Fails when the pager has gone.
pub fn receive(socket: impl AsFd) -> io::Result<Option<Report>> {
    let mut bytes = [0; BYTES + 1];
    match rustix::net::recv(socket, &mut bytes, RecvFlags::DONTWAIT) {
        Ok((0, _)) => Err(io::ErrorKind::UnexpectedEof.into()),
        Ok((BYTES, _)) => {
            let mut words = [0; WORDS];
            for (word, bytes) in words.iter_mut().zip(bytes.chunks_exact(8)) {
                *word = bytes.try_into().map_or(0, u64::from_ne_bytes);
            }
            Ok(Some(Report::from_words(words)))
        }
        Ok(_) | Err(Errno::AGAIN | Errno::INTR) => Ok(None),
        Err(error) => Err(error.into()),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn orders_and_reports_arrive_as_they_were_sent_and_nobody_waits() {
        let flags = SocketFlags::CLOEXEC;
        let (ours, theirs) =
            rustix::net::socketpair(AddressFamily::UNIX, SocketType::SEQPACKET, flags, None).unwrap();
        let mut link = Link { socket: Some(theirs), ..Link::to("/nowhere") };
        assert_eq!(link.order(), None);
        let orders = [Order::Limit(64 << 20), Order::Report, Order::Evict];
        for order in orders {
            send(&ours, order).unwrap();
        }
        assert_eq!(orders.map(|_| link.order()), orders.map(Some));
        let words: [u64; WORDS] = std::array::from_fn(|at| at as u64 + 1);
        let report = Report::from_words(words);
        assert_eq!((report.words(), report.store), (words, 12));
        link.report(&report);
        assert_eq!(receive(&ours).unwrap(), Some(report));
        assert_eq!(receive(&ours).unwrap(), None);
        // Both ends skip messages that they do not know.
        rustix::net::send(&ours, &[9; 3], SendFlags::NOSIGNAL).unwrap();
        rustix::net::send(&ours, &[9; 16], SendFlags::NOSIGNAL).unwrap();
        send(&ours, Order::Evict).unwrap();
        assert_eq!(link.order(), Some(Order::Evict));
        // When a pager reads nothing, the daemon's `send` fails and does not wait.
        let mut sent = 0;
        while send(&ours, Order::Evict).is_ok() {
            sent += 1;
            assert!(sent < 1 << 20);
        }
        while link.order().is_some() {}
        drop(ours);
        assert_eq!(link.order(), None);
        link.report(&report);
        assert!(link.socket.is_none(), "the daemon has gone");
    }

    #[test]
    fn a_link_finds_the_next_daemon_at_the_same_place() {
        let path = std::env::temp_dir().join(format!("weir-link-{}", std::process::id()));
        let mut link = Link::to(&path);
        for daemon in 0..2 {
            assert_eq!(link.order(), None, "no daemon listens");
            let flags = SocketFlags::CLOEXEC;
            let listener =
                rustix::net::socket_with(AddressFamily::UNIX, SocketType::SEQPACKET, flags, None).unwrap();
            rustix::net::bind(&listener, &SocketAddrUnix::new(&path).unwrap()).unwrap();
            rustix::net::listen(&listener, 1).unwrap();
            while link.socket.is_none() {
                assert_eq!(link.order(), None);
            }
            let daemon_s = rustix::net::accept(&listener).unwrap();
            send(&daemon_s, Order::Limit(daemon)).unwrap();
            assert_eq!(link.order(), Some(Order::Limit(daemon)));
            std::fs::remove_file(&path).unwrap();
        }
    }
}
