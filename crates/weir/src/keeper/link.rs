//! The daemon's side: what it was handed when it started, and what it gives to be kept.

use super::wire::{FORMAT, Kind, receive, send, split};
use crate::stages::Stages;
use std::collections::HashMap;
use std::io;
use std::os::fd::{BorrowedFd, FromRawFd, OwnedFd, RawFd};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::{Duration, SystemTime, UNIX_EPOCH};

/// Tells a daemon that a keeper started it, and where to reach it.
pub const ENVIRONMENT: &str = "WEIR_KEEPER_FD";

/// Tells a daemon how many processors its keeper found.
pub(super) const PROCESSORS: &str = "WEIR_KEEPER_PROCESSORS";

/// Tells a daemon when the one before it was gone, and how long its end took before that from the
/// first sign of it on: nanoseconds of [`now`], and nanoseconds.
pub(super) const GONE: &str = "WEIR_KEEPER_GONE";

/// Now, in nanoseconds of a clock that all processes share. Where somebody sets that clock
/// meanwhile, one line of the log is wrong. (rustix's monotonic one panics in a kernel whose vDSO
/// has no getcpu, as User-Mode Linux's, and a keeper must not.)
pub(super) fn now() -> u64 {
    SystemTime::now().duration_since(UNIX_EPOCH).map_or(0, |now| now.as_nanos() as u64)
}

/// Processors to plan threads for. Each thread has its share of the stores, so all daemons of one
/// keeper go by the same number, though processors come and go.
pub fn processors() -> usize {
    let told = std::env::var(PROCESSORS).ok().and_then(|text| text.parse().ok());
    told.unwrap_or_else(|| std::thread::available_parallelism().map_or(1, usize::from))
}

/// The daemon's line to its keeper; clones are the same line.
#[derive(Clone, Debug)]
pub struct Link(Arc<Line>);

#[derive(Debug)]
struct Line {
    socket: OwnedFd,
    /// The lock's holder has asked, and the next answer is for it.
    turn: Mutex<()>,
}

/// The descriptors of an earlier daemon that the keeper holds, by name.
#[derive(Debug, Default)]
pub struct Held(HashMap<String, OwnedFd>);

impl Held {
    /// Time spent on taking its place so far.
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

    /// Whether something is kept under a name like this.
    pub fn any(&self, like: impl Fn(&str) -> bool) -> bool {
        self.0.keys().any(|name| like(name))
    }

    /// Takes what was kept under `name`.
    pub fn take(&mut self, name: &str) -> Option<OwnedFd> {
        self.0.remove(name)
    }
}

impl Link {
    /// The line, and what the keeper holds, if a keeper started this process. Call it once, before
    /// there are threads.
    pub fn open() -> io::Result<Option<(Self, Held)>> {
        let Some(number) = std::env::var_os(ENVIRONMENT) else { return Ok(None) };
        let broken = |what: &str| io::Error::other(format!("{ENVIRONMENT}: {what}"));
        let number: RawFd =
            number.to_str().and_then(|text| text.parse().ok()).ok_or_else(|| broken("not a number"))?;
        // SAFETY: only looked at here, to see that it is what a keeper passes.
        let socket = unsafe { BorrowedFd::borrow_raw(number) };
        let kind = rustix::net::sockopt::socket_type(socket).map_err(|_| broken("not a socket"))?;
        if kind != rustix::net::SocketType::SEQPACKET {
            return Err(broken("not a keeper's socket"));
        }
        rustix::io::fcntl_setfd(socket, rustix::io::FdFlags::CLOEXEC)?;
        // SAFETY: the keeper made it for this process alone, and this function is called once.
        let socket = unsafe { OwnedFd::from_raw_fd(number) };
        let mut held = HashMap::new();
        while let Some(message) = receive(&socket)? {
            match (split(&message.text), message.fd) {
                (("begin", format), _) if format.parse() != Ok(FORMAT) => {
                    return Err(io::Error::other(format!(
                        "the keeper holds pages in format {format:?}, this weir knows {FORMAT}; to upgrade run weir off, then weir on"
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

    /// Has a memfd kept: mapped and locked in the keeper when this returns.
    pub fn hold_memory(&self, name: &str, fd: BorrowedFd<'_>) -> io::Result<()> {
        self.hold(Kind::Memory, name, fd)
    }

    /// Has a descriptor kept open.
    pub fn hold_open(&self, name: &str, fd: BorrowedFd<'_>) -> io::Result<()> {
        self.hold(Kind::Descriptor, name, fd)
    }

    fn hold(&self, kind: Kind, name: &str, fd: BorrowedFd<'_>) -> io::Result<()> {
        self.ask(&format!("hold {} {name}", kind.word()), Some(fd), "held", name)
    }

    /// Says that a memfd that is kept has pages where it had none, to be locked there too. What is
    /// said is done also when this process dies over it, so nobody waits for an answer.
    pub fn took(&self, name: &str, offset: u64, bytes: u64) -> io::Result<()> {
        send(&self.0.socket, &format!("took {name} {offset} {bytes}"), None)
    }

    /// Has what was kept under a name closed.
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

    /// Says that the daemon is about to listen: from here on somebody may have pages here.
    pub fn opening(&self) -> io::Result<()> {
        send(&self.0.socket, "opening", None)
    }

    /// Says that the daemon serves; and once more whenever it has taken memory since that the next
    /// will need too.
    pub fn ready(&self) -> io::Result<()> {
        send(&self.0.socket, "ready", None)
    }

    /// Says that the daemon was told to end, and is about to: nobody needs its pages.
    pub fn ending(&self) -> io::Result<()> {
        send(&self.0.socket, "ending", None)
    }

    /// Says that the daemon was told to end and does not: it is in use, so if it dies another is
    /// needed.
    pub fn staying(&self) -> io::Result<()> {
        send(&self.0.socket, "staying", None)
    }

    /// Says that the daemon is about to end so that another, perhaps newer, program takes over.
    pub fn replacing(&self) -> io::Result<()> {
        send(&self.0.socket, "replacing", None)
    }
}
