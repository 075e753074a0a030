//! The daemon's side of the keeper's socket: descriptors that the daemon got at its start, and
//! descriptors that it hands to the keeper.

use super::wire::{FORMAT, Kind, receive, send, split};
use crate::stages::Stages;
use std::collections::HashMap;
use std::io;
use std::os::fd::{BorrowedFd, FromRawFd, OwnedFd, RawFd};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::{Duration, SystemTime, UNIX_EPOCH};

/// The environment variable with the number of the descriptor that leads to the keeper. A daemon
/// that has it was started by a keeper.
pub const ENVIRONMENT: &str = "WEIR_KEEPER_FD";

/// The environment variable with the number of processors that the keeper found.
pub(super) const PROCESSORS: &str = "WEIR_KEEPER_PROCESSORS";

/// The environment variable about the last daemon's end. It has the time when that daemon was gone
/// (nanoseconds of [`now`]), and the nanoseconds from the first sign of its end until then.
pub(super) const GONE: &str = "WEIR_KEEPER_GONE";

/// The environment variable that tells a daemon that the installed program did not serve, and that
/// the keeper started this one instead.
pub(super) const REFUSED: &str = "WEIR_KEEPER_REFUSED";

/// Whether the program that is installed now did not serve, so that the keeper has started this one
/// instead.
pub fn upgrade_failed() -> bool {
    std::env::var_os(REFUSED).is_some()
}

/// The time now, in nanoseconds of a clock that all processes share. If a person sets that clock,
/// one line of the log is wrong. (rustix's monotonic clock panics in a kernel whose vDSO has no
/// getcpu, such as User-Mode Linux, and a keeper must not panic.)
pub(super) fn now() -> u64 {
    SystemTime::now().duration_since(UNIX_EPOCH).map_or(0, |now| now.as_nanos() as u64)
}

/// Number of processors to plan threads for. Each thread has its share of the stores. So all
/// daemons of one keeper use the same number, though processors come and go.
pub fn processors() -> usize {
    let told = std::env::var(PROCESSORS).ok().and_then(|text| text.parse().ok());
    told.unwrap_or_else(|| std::thread::available_parallelism().map_or(1, usize::from))
}

/// The daemon's socket to its keeper; clones share the socket.
#[derive(Clone, Debug)]
pub struct Link(Arc<Line>);

#[derive(Debug)]
struct Line {
    socket: OwnedFd,
    /// Locked from a request until its answer, so that each answer goes to the thread that asked.
    turn: Mutex<()>,
}

/// The descriptors of an earlier daemon that the keeper holds, by name.
#[derive(Debug, Default)]
pub struct Held(HashMap<String, OwnedFd>);

impl Held {
    /// Time that each stage of the takeover has taken so far.
    pub fn stages(&self) -> Stages {
        let told = std::env::var(GONE).ok();
        let told = told.as_deref().and_then(|text| text.split_once(' '));
        let Some((gone, dying)) = told.and_then(|(at, by)| Some((at.parse().ok()?, by.parse().ok()?))) else {
            return Stages::default();
        };
        let start = now().saturating_sub(gone);
        Stages::after([("dying", Duration::from_nanos(dying)), ("start", Duration::from_nanos(start))])
    }

    /// Whether there was no daemon before this one.
    pub fn is_empty(&self) -> bool {
        self.0.is_empty()
    }

    /// Whether the keeper holds a descriptor whose name satisfies `like`.
    pub fn any(&self, like: impl Fn(&str) -> bool) -> bool {
        self.0.keys().any(|name| like(name))
    }

    /// The names under which the keeper holds descriptors.
    pub fn names(&self) -> impl Iterator<Item = &str> {
        self.0.keys().map(String::as_str)
    }

    /// Takes the descriptor that the keeper held under `name`.
    pub fn take(&mut self, name: &str) -> Option<OwnedFd> {
        self.0.remove(name)
    }
}

impl Link {
    /// Opens the socket to the keeper and gets all that the keeper holds, if a keeper started this
    /// process. Call this once, before there are threads.
    pub fn open() -> io::Result<Option<(Self, Held)>> {
        let Some(number) = std::env::var_os(ENVIRONMENT) else { return Ok(None) };
        let broken = || io::Error::other(format!("{ENVIRONMENT} names no keeper's socket; unset it"));
        let number: RawFd = number.to_str().and_then(|text| text.parse().ok()).ok_or_else(broken)?;
        // SAFETY: the descriptor is only asked for its type, which fails if it is not open.
        let socket = unsafe { BorrowedFd::borrow_raw(number) };
        let kind = rustix::net::sockopt::socket_type(socket).map_err(|_| broken())?;
        if kind != rustix::net::SocketType::SEQPACKET {
            return Err(broken());
        }
        rustix::io::fcntl_setfd(socket, rustix::io::FdFlags::CLOEXEC)?;
        // SAFETY: the keeper made the descriptor for this process alone, and this function is
        // called once.
        let socket = unsafe { OwnedFd::from_raw_fd(number) };
        let mut held = HashMap::new();
        while let Some(message) = receive(&socket)? {
            match (split(&message.text), message.fd) {
                (("begin", format), _) if format.parse() != Ok(FORMAT) => {
                    return Err(io::Error::other(format!(
                        "the keeper holds pages in format {format:?}, this weir knows {FORMAT}; to change the program run weir off, then weir on"
                    )));
                }
                (("begin", _), _) => {
                    let line = Line { socket, turn: Mutex::new(()) };
                    return Ok(Some((Link(Arc::new(line)), Held(held))));
                }
                (("have", rest), Some(fd)) => {
                    let name = rest.split_once(' ').map_or(rest, |(_, name)| name);
                    held.insert(name.to_owned(), fd);
                }
                _ => return Err(io::Error::other(format!("the keeper said {:?}", message.text))),
            }
        }
        Err(io::ErrorKind::UnexpectedEof.into())
    }

    /// Hands a memfd to the keeper, which has mapped and locked it when this returns.
    pub fn hold_memory(&self, name: &str, fd: BorrowedFd<'_>) -> io::Result<()> {
        self.hold(Kind::Memory, name, fd)
    }

    /// Hands a descriptor to the keeper, which holds it open.
    pub fn hold_open(&self, name: &str, fd: BorrowedFd<'_>) -> io::Result<()> {
        self.hold(Kind::Descriptor, name, fd)
    }

    fn hold(&self, kind: Kind, name: &str, fd: BorrowedFd<'_>) -> io::Result<()> {
        self.ask(&format!("hold {} {name}", kind.word()), Some(fd), "held", name)
    }

    /// Tells the keeper that a memfd which it holds has new pages. The keeper locks them too, even
    /// if this process dies meanwhile. So the daemon does not wait for an answer.
    pub fn took(&self, name: &str, offset: u64, bytes: u64) -> io::Result<()> {
        send(&self.0.socket, &format!("took {name} {offset} {bytes}"), None)
    }

    /// Tells the keeper to close the descriptor of this name.
    pub fn let_go(&self, name: &str) -> io::Result<()> {
        self.ask(&format!("drop {name}"), None, "dropped", name)
    }

    fn ask(&self, question: &str, fd: Option<BorrowedFd<'_>>, answer: &str, name: &str) -> io::Result<()> {
        let _turn = self.0.turn.lock().unwrap_or_else(PoisonError::into_inner);
        send(&self.0.socket, question, fd)?;
        match receive(&self.0.socket)? {
            Some(message) if message.text == answer => Ok(()),
            Some(message) => {
                Err(io::Error::other(format!("the keeper does not keep {name}: {}", message.text)))
            }
            None => Err(io::Error::other("the keeper is gone")),
        }
    }

    /// Tells the keeper that the daemon is about to listen. From here on the daemon may have
    /// clients' pages.
    pub fn opening(&self) -> io::Result<()> {
        send(&self.0.socket, "opening", None)
    }

    /// Tells the keeper that the daemon serves. The daemon calls this again after it has taken
    /// memory that the next daemon will need too.
    pub fn ready(&self) -> io::Result<()> {
        send(&self.0.socket, "ready", None)
    }

    /// Tells the keeper that the daemon was told to end and is about to, since no client needs its
    /// pages.
    pub fn ending(&self) -> io::Result<()> {
        send(&self.0.socket, "ending", None)
    }

    /// Tells the keeper that the daemon was told to end but stays, because its device is in use. If
    /// the daemon dies later, the keeper must start another.
    pub fn staying(&self) -> io::Result<()> {
        send(&self.0.socket, "staying", None)
    }

    /// Tells the keeper that the daemon is about to end so that another program, perhaps a newer
    /// one, takes over.
    pub fn replacing(&self) -> io::Result<()> {
        send(&self.0.socket, "replacing", None)
    }
}

#[cfg(test)]
pub mod played {
    //! A test's stand-in for the keeper, which runs in a thread.

    use super::super::wire::Message;
    use super::{HashMap, Held, Kind, Line, Link, receive, send, split};
    use rustix::net::{AddressFamily, SocketFlags, SocketType, socketpair};
    use std::os::fd::OwnedFd;
    use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
    use std::sync::{Arc, Mutex};

    /// A test's keeper: the descriptors that it holds, by name; whether it refuses more; and how
    /// many bytes of memory daemons have told it that they took.
    #[derive(Clone, Default)]
    pub struct Keeper(pub Arc<Mutex<HashMap<String, OwnedFd>>>, Arc<AtomicBool>, Arc<AtomicU64>);

    /// The two ends of a socket between a daemon and its keeper.
    fn pair() -> (OwnedFd, OwnedFd) {
        let pair = socketpair(AddressFamily::UNIX, SocketType::SEQPACKET, SocketFlags::CLOEXEC, None);
        pair.expect("sockets")
    }

    /// A link of a daemon to a keeper that is gone.
    pub fn gone() -> Link {
        Link(Arc::new(Line { socket: pair().0, turn: Mutex::new(()) }))
    }

    impl Keeper {
        /// Links a daemon to this test's keeper.
        pub fn link(&self) -> Link {
            let (socket, its) = pair();
            let Keeper(held, refuses, took) = self.clone();
            std::thread::spawn(move || {
                while let Ok(Some(Message { text, fd })) = receive(&its) {
                    let (what, rest) = split(&text);
                    let name = rest.split_once(' ').map_or(rest, |(_, name)| name).to_owned();
                    if what == "took" {
                        let numbers: Vec<u64> = rest.split(' ').skip(1).flat_map(str::parse).collect();
                        let is_whole = |number: &u64| number.is_multiple_of(4096);
                        assert!(
                            numbers.len() == 2 && numbers.iter().all(is_whole),
                            "{text}: not whole pages"
                        );
                        took.fetch_add(numbers[1], Ordering::SeqCst);
                    } else if what == "hold" && refuses.load(Ordering::SeqCst) {
                        send(&its, "refused as a test wants it", None).expect("the daemon is there");
                    } else if what == "hold" && Kind::parse(split(rest).0).is_some() {
                        held.lock().expect("no panic").insert(name, fd.expect("a descriptor"));
                        send(&its, "held", None).expect("the daemon is there");
                    } else if what == "drop" {
                        held.lock().expect("no panic").remove(&name);
                        send(&its, "dropped", None).expect("the daemon is there");
                    }
                }
            });
            Link(Arc::new(Line { socket, turn: Mutex::new(()) }))
        }

        /// Makes this test's keeper refuse descriptors from now on, or take them again.
        pub fn refuses(&self, refuses: bool) {
            self.1.store(refuses, Ordering::SeqCst);
        }

        /// Bytes of memory that a daemon has said it took.
        pub fn took(&self) -> u64 {
            self.2.load(Ordering::SeqCst)
        }

        /// The descriptors that this test's keeper hands to the next daemon.
        pub fn held(&self) -> Held {
            let held = self.0.lock().expect("no panic");
            let copy =
                |(name, fd): (&String, &OwnedFd)| (name.clone(), fd.try_clone().expect("a descriptor"));
            Held(held.iter().map(copy).collect())
        }
    }
}
